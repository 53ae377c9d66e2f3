/**
 * The replicas of one service, as Railway runs them: real processes that are started and stopped to
 * match a count, restarted when they crash, and replaced by a deploy. It chooses by itself which one
 * stops, and a replica that is told to stop has so long and no longer.
 */
import { pause } from "../db.ts";
import { random } from "./chaos/faults.ts";

/** Crashes in a row, after which a replica is left as it is. */
const MAX_RESTARTS = 10;
/** The longest pause before a restart; who ran for longer starts with short ones again. */
const MAX_BACKOFF_MS = 30_000;

/** A process, or what passes for one in a test. */
export interface Process {
  pid?: number;
  kill(signal: Deno.Signal): void;
  status: Promise<{ code: number }>;
}

export interface ReplicasOptions {
  /** Starts a replica's process with these variables. */
  start: (env: Record<string, string>) => Process;
  /** Variables that all of them have. */
  env?: Record<string, string>;
  /** From when a replica is wanted until its process is started. */
  startDelayMs?: number;
  /** Between SIGTERM and SIGKILL (RAILWAY_DEPLOYMENT_DRAINING_SECONDS); 0, as Railway's own default. */
  drainMs?: number;
  /** How long a deploy lets the old replicas go on when the new ones run. */
  overlapMs?: number;
  /** Before the first restart of a replica that crashed; each one more waits twice as long. */
  restartMs?: number;
  /** What draws the replicas that are stopped. */
  seed?: number;
}

export type Status = "INITIALIZING" | "RUNNING" | "CRASHED" | "EXITED" | "REMOVING" | "REMOVED";

export interface Replica {
  id: string;
  region: string;
  status: Status;
  pid?: number;
  restarts: number;
}

export interface Deployment {
  id: string;
  status: "DEPLOYING" | "SUCCESS" | "CRASHED" | "REMOVING";
  createdAt: Date;
  updatedAt: Date;
  replicas: Replica[];
}

/** A replica with what runs it. */
interface Slot extends Replica {
  process?: Process;
  startedAtMs: number;
  /** Ends the pause that it is in, before a start or the SIGKILL. */
  wake: AbortController;
}
interface Release extends Deployment {
  replicas: Slot[];
}

export class Replicas implements AsyncDisposable {
  readonly #options: Required<ReplicasOptions>;
  readonly #draw: () => number;
  /** The newest first. Those before the newest are there until it runs. */
  #releases: Release[] = [];
  #wanted: Record<string, number> = {};
  /** All that goes on by itself. */
  readonly #tasks = new Set<Promise<void>>();
  readonly #over = new AbortController();

  constructor(options: ReplicasOptions, regions: Record<string, number>) {
    const defaults = { env: {}, startDelayMs: 500, drainMs: 0, overlapMs: 0, restartMs: 1000 };
    this.#options = { ...defaults, seed: 1, ...options };
    this.#draw = random(this.#options.seed);
    this.deploy(regions);
  }

  /** The deployments that have replicas, the newest first. */
  list(): Deployment[] {
    return this.#releases.map(({ replicas, ...release }) => ({
      ...release,
      status: isCrashed(replicas) ? "CRASHED" : release.status,
      replicas: replicas.map(({ id, region, status, process, restarts }) => ({
        id,
        region,
        status,
        restarts,
        pid: process?.pid,
      })),
    }));
  }

  /** Has so many replicas run in each region from now on, of the newest deployment. */
  scale(regions: Record<string, number>): void {
    this.#wanted = { ...regions };
    const [{ replicas }] = this.#releases;
    for (const region of new Set([...Object.keys(regions), ...replicas.map((r) => r.region)])) {
      const there = replicas.filter((r) => r.region === region && r.status !== "REMOVING");
      for (let n = there.length; n < (regions[region] ?? 0); n++) this.#add(region);
      for (let n = there.length; n > (regions[region] ?? 0); n--) {
        const [victim] = there.splice(Math.floor(this.#draw() * there.length), 1);
        this.#spawn(this.#remove(victim));
      }
    }
    this.#succeed();
  }

  /** Starts new replicas and, when all of them run, stops the old ones. @returns the deployment's id */
  deploy(regions = this.#wanted): string {
    const now = new Date();
    const id = crypto.randomUUID();
    const status = "DEPLOYING";
    this.#releases.unshift({ id, status, createdAt: now, updatedAt: now, replicas: [] });
    this.scale(regions);
    return id;
  }

  /** Sends a signal to a replica, as a fault would. */
  kill(id: string, signal: Deno.Signal = "SIGKILL"): void {
    const slot = this.#releases.flatMap((release) => release.replicas).find((r) => r.id === id);
    if (!slot?.process) throw new Error(`no replica ${id} runs`);
    send(slot.process, signal);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#over.abort();
    for (const { replicas } of this.#releases) {
      for (const slot of replicas) this.#spawn(this.#remove(slot));
    }
    while (this.#tasks.size > 0) await Promise.all(this.#tasks);
  }

  #spawn(task: Promise<void>): void {
    const done = task.finally(() => this.#tasks.delete(done));
    this.#tasks.add(done);
  }

  #add(region: string): void {
    const [release] = this.#releases;
    const slot: Slot = {
      id: crypto.randomUUID(),
      region,
      status: "INITIALIZING",
      restarts: 0,
      startedAtMs: 0,
      wake: new AbortController(),
    };
    release.replicas.push(slot);
    this.#spawn(this.#live(release, slot));
  }

  /** The life of a replica, from its start over its crashes to its end. */
  async #live(release: Release, slot: Slot): Promise<void> {
    const { startDelayMs, restartMs } = this.#options;
    let delayMs = startDelayMs;
    while (slot.restarts <= MAX_RESTARTS) {
      await pause(delayMs, slot.wake.signal);
      if (isLeaving(slot)) break;
      const code = await this.#run(release, slot);
      if (isLeaving(slot)) break;
      slot.status = code === 0 ? "EXITED" : "CRASHED";
      if (code === 0) return; // as ON_FAILURE has it
      if (performance.now() - slot.startedAtMs > MAX_BACKOFF_MS) slot.restarts = 0;
      delayMs = Math.min(MAX_BACKOFF_MS, restartMs * 2 ** slot.restarts++);
    }
    if (isLeaving(slot)) this.#gone(slot);
  }

  /** Runs a replica's process to its end. @returns its exit code */
  async #run(release: Release, slot: Slot): Promise<number> {
    const env = {
      ...this.#options.env,
      // It comes again after a crash, as Railway's does.
      RAILWAY_REPLICA_ID: slot.id,
      RAILWAY_REPLICA_REGION: slot.region,
      RAILWAY_DEPLOYMENT_ID: release.id,
      SIDING_END_WITH_PARENT: String(Deno.pid),
    };
    try {
      slot.process = this.#options.start(env);
    } catch {
      return 127; // there is no such command: a crash
    }
    slot.startedAtMs = performance.now();
    slot.status = "RUNNING";
    this.#succeed();
    const { code } = await slot.process.status;
    slot.process = undefined;
    return code;
  }

  /** Tells a replica to stop, and ends it when it takes too long. */
  async #remove(slot: Slot): Promise<void> {
    if (isLeaving(slot)) return;
    const { process, status } = slot;
    slot.status = "REMOVING";
    slot.wake.abort();
    // What no process and no pause will end by itself.
    if (!process && (status === "EXITED" || slot.restarts > MAX_RESTARTS)) this.#gone(slot);
    if (!process) return;
    send(process, "SIGTERM");
    const ended = new AbortController();
    const wait = process.status.then(() => ended.abort());
    await pause(this.#options.drainMs, ended.signal);
    if (!ended.signal.aborted) send(process, "SIGKILL");
    await wait;
  }

  #gone(slot: Slot): void {
    slot.status = "REMOVED";
    for (const release of this.#releases) {
      release.replicas = release.replicas.filter((other) => other !== slot);
    }
    this.#releases = this.#releases.filter((release, index) =>
      index === 0 || release.replicas.length > 0
    );
  }

  /** A deploy whose replicas all run takes the place of those before it. */
  #succeed(): void {
    const [release, ...old] = this.#releases;
    if (release.status !== "DEPLOYING" || this.#over.signal.aborted) return;
    if (!release.replicas.every(({ status }) => status === "RUNNING")) return;
    Object.assign(release, { status: "SUCCESS", updatedAt: new Date() });
    this.#spawn(this.#retire(old));
  }

  async #retire(old: Release[]): Promise<void> {
    await pause(this.#options.overlapMs, this.#over.signal);
    for (const release of old) {
      Object.assign(release, { status: "REMOVING", updatedAt: new Date() });
      for (const slot of release.replicas) this.#spawn(this.#remove(slot));
    }
  }
}

// A function, because the compiler takes the status for unchanged across an await.
const isLeaving = ({ status }: Replica) => status === "REMOVING" || status === "REMOVED";
const isCrashed = (replicas: Replica[]) =>
  replicas.length > 0 && replicas.every(({ status }) => status === "CRASHED");

function send(process: Process, signal: Deno.Signal): void {
  try {
    process.kill(signal);
  } catch {
    // It has ended, and its status is on its way.
  }
}
