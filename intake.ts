/**
 * How a worker gets its jobs. It looks whether there are any, and claims; idle, it looks less and less often.
 *
 * For small jobs a claim costs more than the job. So while a queue has plenty, the next claim is not preceded
 * by a look, takes along the outcomes of the jobs before, begins at the place in line where the last one
 * ended, and is made while the jobs of another run: two lanes, each with one claim under way at the most.
 * Every {@linkcode LOOK_EVERY_MS} there is a look all the same, for other queues, and for jobs that came to
 * stand before that place.
 */
import { logger, repeat } from "./config.ts";
import { codeOf, type Database, describe, isDisconnect, turn } from "./db.ts";
import type { Outcomes } from "./jobs/outcomes.ts";
import { clocks, type Leases } from "./lease.ts";
import * as claims from "./claims.ts";
import * as queue from "./queue.ts";

const log = logger("worker");

/** A place in line is a mark for so long, and as long again while the look is under way. */
export const LOOK_EVERY_MS = 400;
/** For so long after work was seen a worker looks as often as it ever does. */
const BUSY_MS = 5000;
/** After that it waits for this part of the time in which there was none. */
const SLOWING = 0.1;
const LANES = [0, 1];

export interface IntakeSettings {
  concurrency: number;
  queues: string[] | null;
  pollMinMs: number;
  pollMaxMs: number;
  leaseS: number;
}

/** A queue that had more jobs than the last claim could take. */
interface Plenty {
  from: claims.Ready;
  mark: claims.Place | null;
  /** The look that this goes back to. */
  look: number;
}

export class Intake {
  #running = 0;
  /** Places kept for claims that are under way. */
  #claiming = 0;
  #plenty: Plenty | null = null;
  /** Looks that were answered. */
  #looks = 0;
  /** When the last look that was answered was sent. */
  #lookedMs = -Infinity;
  /** When a job was last claimed. */
  #workSeenMs = -Infinity;
  /** Queues whose claim came back empty or failed: how often in a row, and until when to leave them. */
  readonly #misses = new Map<string, { count: number; untilMs: number }>();
  /** Aborted when there is something to do; a lane's next step has a new one. */
  readonly #bells = LANES.map(() => new AbortController());

  /**
   * @param serves the kinds to claim
   * @param start begins to run a job, claimed by a statement that was sent at the time `sent`
   */
  constructor(
    readonly settings: IntakeSettings,
    readonly serves: readonly string[],
    readonly db: Database,
    readonly leases: Leases,
    readonly outcomes: Outcomes,
    readonly start: (job: queue.Job, sent: ReturnType<typeof clocks>) => void,
  ) {}

  /** Claims until `stop` is aborted. */
  async run(stop: AbortSignal): Promise<void> {
    await Promise.all(LANES.map((lane) => {
      const step = () => this.#step(lane, stop);
      // The first lane is seen when it hangs; where it does, the second has nothing to do.
      const watched = lane === 0 ? () => this.leases.working(step) : step;
      return repeat("claim", watched, stop, () => this.#bells[lane].signal);
    }));
  }

  /** A job began to run. */
  started(): void {
    this.#running++;
  }

  /** A job's function came to an end: its place is free, though its outcome is not recorded yet. */
  ran(): void {
    this.#running--;
    this.#ring();
  }

  /** A job's outcome is recorded. */
  ended(): void {
    this.#ring();
  }

  #ring(): void {
    for (const bell of this.#bells) {
      if (!bell.signal.aborted) bell.abort(null); // with a reason, since to make one costs a stack trace
    }
  }

  /** How many jobs may be claimed; as many again may be held while their outcomes are recorded. */
  get #room(): number {
    const { settings: { concurrency }, leases: { held } } = this;
    return Math.min(concurrency - this.#running, 2 * concurrency - held.size) - this.#claiming;
  }

  /** One look and, when there is something, one claim. @returns milliseconds until the next */
  async #step(lane: number, stop: AbortSignal): Promise<number> {
    const { settings, leases, db } = this;
    this.#bells[lane] = new AbortController();
    await turn(); // what else ends in this moment makes room for the same claim
    if (this.#room <= 0 || leases.alone || stop.aborted) return settings.pollMaxMs;
    const plenty = this.#plenty;
    const sentMs = performance.now();
    if (plenty && sentMs - this.#lookedMs < LOOK_EVERY_MS * (lane + 1)) {
      await this.#claim(plenty.from, plenty.mark, plenty.look);
      return 0;
    }
    if (lane > 0) return settings.pollMaxMs;
    const look = () => db.run((sql) => claims.look(sql, settings.queues, this.serves));
    let seen = await look();
    // Then a claim all the same: where jobs fall due all the time there would be none. None moved:
    // somebody's open transaction holds them, which is no reason to wait with the others.
    const moved = seen.promotable && await db.run((sql) => claims.promote(sql)) > 0;
    if (moved) seen = await look();
    this.#lookedMs = sentMs;
    this.#looks++;
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
      if (stop.aborted || this.#room <= 0) return 0;
      if (this.leases.waitsToBeAlone(from)) return pollMaxMs;
      this.leases.gotOn();
      if (await this.#claim(from, from.head ?? null, this.#looks) !== 0) return 0; // started some, or waited for a lock
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
    look: number,
  ): Promise<number | null> {
    const { settings: { concurrency, pollMaxMs }, leases } = this;
    const idle = leases.held.size === 0 && this.#claiming === 0;
    // Half at the most, so that the database takes the next ones while these run.
    const most = Math.min(this.#room, Math.ceil(concurrency / 2));
    const places = idle ? concurrency : most; // what it brings may have to run alone
    this.#claiming += places;
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
    } finally {
      this.#claiming -= places;
    }
    if (jobs.length < most) this.#plenty = null;
    // Not where the other lane has looked since: what it saw may stand before this place.
    else if (look === this.#looks) this.#plenty = { from, mark: last, look };
    for (const job of jobs) this.start(job, sent);
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
