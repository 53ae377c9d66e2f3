/**
 * How a worker gets its jobs. It looks whether there are any, and claims; idle, it looks less and less often.
 *
 * For small jobs a claim costs more than the job. So while a queue has plenty, the next claim is not preceded
 * by a look, takes along outcomes of jobs before, begins at the place in line where the last one ended, and
 * is under way while the jobs of the last one run. Never two at a time: each would pass over the rows that the
 * other one takes, which cost it half as much again. Every {@linkcode LOOK_EVERY_MS} there is a look all the
 * same, for other queues, and for jobs that came to stand before that place. Where the claimed jobs run, and
 * wait to run, is in places.ts.
 */
import { logger, repeat } from "./config.ts";
import { codeOf, type Database, describe, isDisconnect, turn } from "./db.ts";
import type { Outcomes } from "./jobs/outcomes.ts";
import { clocks, type Held, type Leases } from "./lease.ts";
import { Places, type PlacesSettings } from "./places.ts";
import * as claims from "./claims.ts";
import type * as queue from "./queue.ts";

const log = logger("worker");

/** A place in line is a mark for so long. */
export const LOOK_EVERY_MS = 400;
/** For so long after work was seen a worker looks as often as it ever does. */
const BUSY_MS = 5000;
/** After that it waits for this part of the time in which there was none. */
const SLOWING = 0.1;

export interface IntakeSettings extends PlacesSettings {
  queues: string[] | null;
  pollMinMs: number;
  pollMaxMs: number;
  leaseS: number;
}

/** A queue that had more jobs than the last claim could take. */
interface Plenty {
  from: claims.Ready;
  mark: claims.Place | null;
}

export class Intake {
  readonly #places: Places;
  #plenty: Plenty | null = null;
  /** When the last look that was answered was sent. */
  #lookedMs = -Infinity;
  /** When a job was last claimed. */
  #workSeenMs = -Infinity;
  /** Queues whose claim came back empty or failed: how often in a row, and until when to leave them. */
  readonly #misses = new Map<string, { count: number; untilMs: number }>();
  /** Aborted when there is something to do; each step has a new one. */
  #bell = new AbortController();

  /**
   * @param serves the kinds to claim
   * @param start begins to run a job
   */
  constructor(
    readonly settings: IntakeSettings,
    readonly serves: readonly string[],
    readonly db: Database,
    readonly leases: Leases,
    readonly outcomes: Outcomes,
    start: (held: Held) => void,
  ) {
    this.#places = new Places(settings, leases, outcomes, start, () => this.#changed());
  }

  /** Claims until `stop` is aborted. */
  async run(stop: AbortSignal): Promise<void> {
    const step = () => this.leases.working(() => this.#step(stop)); // which is seen when it hangs
    await repeat("claim", step, stop, () => this.#bell.signal);
  }

  /** A job's function came to an end: its place is free, though its outcome is not recorded yet. */
  ran(): void {
    this.#places.ran();
    this.#changed();
  }

  /** A job's outcome is recorded. */
  ended(): void {
    this.#ring();
  }

  /** What was claimed ahead goes back in line: this worker stops. */
  giveBack(): void {
    this.#places.giveBack();
  }

  #changed(): void {
    if (this.#wanted() > 0) this.#ring();
  }

  #ring(): void {
    if (!this.#bell.signal.aborted) this.#bell.abort(null); // with a reason, since to make one costs a stack trace
  }

  /**
   * How many jobs to claim: half of the most, so that the database takes the next ones while these run; and
   * while some wait to run no fewer, since a claim costs more than many a job. As many as the most may be held
   * besides, while their outcomes are recorded.
   */
  #wanted(most = this.#places.most): number {
    const { running, waiting } = this.#places;
    const half = Math.ceil(most / 2);
    const room = Math.min(most - running - waiting, 2 * most - this.leases.held.size);
    return waiting > 0 && room < half ? 0 : Math.min(room, half);
  }

  /** {@linkcode #wanted} of one queue: where there are limits a job counts from its claim, so none ahead. */
  #wantedFrom({ claim }: claims.Ready): number {
    return this.#wanted(claim === "skip_locked" ? undefined : this.settings.concurrency);
  }

  /** One look and, when there is something, one claim. @returns milliseconds until the next */
  async #step(stop: AbortSignal): Promise<number> {
    const { settings, leases, db } = this;
    this.#bell = new AbortController();
    await turn(); // what else ends in this moment makes room for the same claim
    for (;;) {
      const plenty = this.#plenty;
      const wanted = plenty ? this.#wantedFrom(plenty.from) : this.#wanted();
      if (wanted <= 0 || leases.alone || stop.aborted) return settings.pollMaxMs;
      if (!plenty || performance.now() - this.#lookedMs > LOOK_EVERY_MS) break;
      this.leases.gotOn();
      await this.#claim(plenty.from, plenty.mark);
    }
    const sentMs = performance.now();
    const look = () => db.run((sql) => claims.look(sql, settings.queues, this.serves));
    let seen = await look();
    // Then a claim all the same: where jobs fall due all the time there would be none. None moved:
    // somebody's open transaction holds them, which is no reason to wait with the others.
    const moved = seen.promotable && await db.run((sql) => claims.promote(sql)) > 0;
    if (moved) seen = await look();
    this.#lookedMs = sentMs;
    this.#plenty = null; // the next claim begins where this look says, also when it has to wait for room
    const waitMs = await this.#claimFirst(seen.ready, stop);
    if (moved) return 0;
    // Back when a queue that its rate limit holds has room, though not all workers at that instant.
    return Math.min(waitMs, (seen.opens_ms ?? Infinity) + 10 + Math.random() * 20);
  }

  /** Claims from the first of the queues that has a job for this worker. */
  async #claimFirst(ready: claims.Ready[], stop: AbortSignal): Promise<number> {
    const { pollMaxMs } = this.settings;
    // A queue that is locked, or whose next job is, must not keep the worker from the others: it is
    // left alone for a while, and comes after those that were not.
    const missesOf = (of: claims.Ready) => this.#misses.get(of.queue) ?? { count: 0, untilMs: 0 };
    const open = ready.filter((from) => performance.now() >= missesOf(from).untilMs)
      .sort((a, b) => missesOf(a).count - missesOf(b).count);
    for (const from of open) {
      if (stop.aborted) return 0;
      if (this.#wantedFrom(from) <= 0) continue;
      if (this.leases.waitsToBeAlone(from)) return pollMaxMs;
      this.leases.gotOn();
      if (await this.#claim(from, from.head ?? null) !== 0) return 0; // started some, or waited for a lock
    }
    if (ready.length === 0) return this.#idleMs();
    const soonestMs = Math.min(...ready.map((from) => missesOf(from).untilMs)) - performance.now();
    return Math.max(10, Math.min(pollMaxMs, soonestMs));
  }

  /** How long to wait when there is nothing: the longer there was none, the longer. */
  #idleMs(): number {
    const { pollMinMs, pollMaxMs } = this.settings;
    const sinceMs = performance.now() - this.#workSeenMs - BUSY_MS;
    return jitter(Math.min(pollMaxMs, Math.max(pollMinMs, sinceMs * SLOWING)));
  }

  /** Claims from one queue and starts what it got. @returns how many; null: others hold its lock */
  async #claim(
    from: claims.Ready,
    mark: claims.Place | null,
  ): Promise<number | null> {
    const { settings: { pollMaxMs }, leases } = this;
    const idle = leases.held.size === 0;
    const most = this.#wantedFrom(from);
    const token = crypto.randomUUID();
    const sent = clocks();
    const count = (this.#misses.get(from.queue)?.count ?? 0) + 1;
    // Others were faster, or hold what was seen: further and further apart, not all at once again.
    let pauseMs = Math.min(pollMaxMs, 10 * 2 ** Math.min(count, 10));
    let jobs: queue.Job[] = [];
    let last: claims.Place | null = null;
    let held = false;
    try {
      ({ jobs, last } = await this.#exchange(from, most, idle, token, mark));
    } catch (error) {
      if (isDisconnect(error)) leases.lostClaims.set(token, sent.monotonicMs);
      held = codeOf(error) === "55P03"; // by a claim or another transaction, for longer than 1 s
      const facts = { queue: from.queue, error: describe(error) };
      log[held ? "debug" : "warn"]("claim from {queue}: {error}", facts);
      pauseMs = pollMaxMs * Math.min(count, 5);
    }
    this.#plenty = jobs.length < most ? null : { from, mark: last };
    this.#places.take(jobs, sent);
    if (jobs.length > 0) {
      this.#misses.delete(from.queue);
      this.#workSeenMs = performance.now();
    } else this.#misses.set(from.queue, { count, untilMs: performance.now() + jitter(pauseMs) });
    return held ? null : jobs.length;
  }

  /** The claim's statement, which takes along what is done where the queue's way to claim can. */
  async #exchange(
    from: claims.Ready,
    most: number,
    idle: boolean,
    token: string,
    mark: claims.Place | null,
  ): Promise<Pick<claims.Exchange, "jobs" | "last">> {
    const { settings: { leaseS }, leases: { bootId }, serves, outcomes } = this;
    const options = { worker: bootId, kinds: serves, most, idle, token, leaseS };
    if (from.claim !== "skip_locked") {
      return { jobs: await this.db.run((sql) => claims.claim(sql, from, options)), last: null };
    }
    const { done, landed } = outcomes.take();
    let stand: Set<string> | undefined;
    try {
      const exchange = await this.db.run((sql) =>
        claims.exchange(sql, from, options, done, mark, outcomes.waitMs)
      );
      stand = exchange.stand;
      return exchange;
    } catch (error) {
      if (isDisconnect(error) || done.length === 0) throw error;
    } finally {
      landed(stand);
    }
    // One of the outcomes was refused, or its row is locked, which is no reason not to claim.
    return await this.db.run((sql) => claims.exchange(sql, from, options, [], mark));
  }
}

/** So that workers which started together do not ask together. */
const jitter = (ms: number) => ms * (0.8 + Math.random() * 0.4);
