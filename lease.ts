/**
 * The jobs that a worker holds, and their leases: renewed by a heartbeat, and each job stopped in
 * time when its lease cannot be.
 *
 * A lease is counted from when its renewal was sent, by this process's monotonic clock, so that
 * the worker's idea of it never ends after the database's.
 */
import { logger } from "./config.ts";
import { type Database, describe } from "./db.ts";
import { Stop } from "./jobs/kind.ts";
import { cancellations, heartbeat, type Job, type Pulse, release } from "./queue.ts";

const log = logger("worker");

/** How often a held job's cancellation is asked for, and a new stage told. */
const TICK_MS = 2000;

/** A job under way. */
export interface Held {
  job: Job;
  stop: AbortController;
  stage: string | null;
  progress: number | null;
  /** When the renewal that last succeeded was sent. */
  renewedAtMs: number;
  /** Told at each renewal how many seconds the job may still run: the guard of its process. */
  tell: (leftS: number) => void;
  /** Resolves when its outcome is recorded, or given up. */
  ended: Promise<void>;
}

export class Leases {
  readonly held = new Map<string, Held>();
  /** Whether this worker is the leader of its pool, as of the last heartbeat. */
  leader = false;
  /** Aborted when the worker's own row is gone: it was taken for dead. */
  readonly dead = new AbortController();
  /** The tokens of claims whose reply was lost, which may have taken jobs all the same, and when. */
  readonly lostClaims = new Map<string, number>();
  /** When the last heartbeat that succeeded was sent, and the first of the unbroken run of them. */
  #lastBeatMs = -Infinity;
  #inTouchSinceMs = Infinity;
  /** A stage was reached that no heartbeat has told. */
  #news = false;

  /**
   * @param db the heartbeat's own connection: nothing that waits can stand before it
   * @param bootId the worker
   */
  constructor(
    readonly db: Database,
    readonly bootId: string,
    readonly heartbeatMs: number,
    readonly leaseS: number,
  ) {}

  /** Begins to hold a job, claimed by a statement that was sent at `sentAtMs`. */
  hold(job: Job, sentAtMs: number): Held {
    // After a failover that lost its last transactions an id can come again, as another job's.
    this.held.get(job.id)?.stop.abort(new Stop("lost", "its id is another job's"));
    const held: Held = {
      ...{ job, stop: new AbortController(), stage: null, progress: null },
      ...{ renewedAtMs: sentAtMs, tell: () => {}, ended: Promise.resolve() },
    };
    this.held.set(job.id, held);
    return held;
  }

  drop(held: Held): void {
    if (this.held.get(held.job.id) === held) this.held.delete(held.job.id);
  }

  /** Notes how far a job is; told with the next heartbeat, which comes soon. */
  report(held: Held, stage?: string, progress?: number): void {
    held.stage = stage ?? held.stage;
    held.progress = progress ?? held.progress;
    this.#news = true;
  }

  /** Has `tell` told, now and at each renewal, how many seconds a job may still run. */
  onRenewal(held: Held, tell: (leftS: number) => void): () => void {
    held.tell = tell;
    tell(this.#guardedS(held));
    return () => held.tell = () => {};
  }

  /** Seconds without a heartbeat after which a worker is silent. */
  get silentS(): number {
    return 3 * this.heartbeatMs / 1000;
  }

  /**
   * Whether this worker has been in touch with the database for a while without a break. After an
   * outage everybody's leases have run out, and those who still run their jobs must have had the
   * time to say so before anybody recovers them.
   */
  inTouch(): boolean {
    const nowMs = performance.now();
    return nowMs - this.#inTouchSinceMs >= this.silentS * 1000 &&
      nowMs - this.#lastBeatMs < this.silentS * 1000;
  }

  /**
   * Renews what is held, when that is due or a stage was reached; else hears of cancellations.
   *
   * @returns milliseconds until the next
   */
  async beat(): Promise<number> {
    const tickMs = Math.min(TICK_MS, this.heartbeatMs);
    const sentAtMs = performance.now();
    const dueMs = this.#lastBeatMs + this.heartbeatMs - sentAtMs;
    if (dueMs > 0 && !this.#news) {
      const ids = this.held.size === 0
        ? []
        : await this.db.run((sql) => cancellations(sql, this.bootId));
      for (const id of ids) this.held.get(id)?.stop.abort(new Stop("cancelled", "cancelled"));
      return Math.min(tickMs, dueMs);
    }
    const named = [...this.held.values()];
    const jobs = named.map(({ job: { id, attempt }, stage, progress }) => ({
      ...{ id, attempt, stage, progress },
    }));
    this.#news = false;
    let pulse: Pulse;
    try {
      pulse = await this.db.run((sql) =>
        heartbeat(sql, this.bootId, jobs, this.leaseS, this.silentS)
      );
    } catch (error) {
      this.#inTouchSinceMs = Infinity;
      this.#lastBeatMs = -Infinity; // the next try is the next tick
      throw error;
    }
    const nowMs = performance.now();
    // A pause of its own, such as a freeze, is a break too.
    if (!(nowMs - this.#lastBeatMs < this.silentS * 1000)) this.#inTouchSinceMs = Infinity;
    this.#inTouchSinceMs = Math.min(this.#inTouchSinceMs, nowMs);
    this.#lastBeatMs = sentAtMs;
    this.#heed(pulse, named, sentAtMs);
    return tickMs;
  }

  /** Stops jobs whose lease could not be renewed, before it ends and others may take them. */
  watch(): Promise<number> {
    for (const { renewedAtMs, stop } of this.held.values()) {
      if (performance.now() - renewedAtMs > (this.leaseS - this.#marginS) * 1000) {
        stop.abort(new Stop("released", "its lease could not be renewed"));
      }
    }
    return Promise.resolve(Math.min(1000, this.#marginS * 250));
  }

  /** Acts on what a heartbeat, sent at `sentAtMs` for the jobs `named`, brought back. */
  #heed(pulse: Pulse, named: Held[], sentAtMs: number): void {
    this.leader = pulse.leader;
    if (!pulse.alive) return this.dead.abort();
    const beats = new Map(pulse.beats.map((beat) => [beat.id, beat]));
    for (const held of named) {
      const beat = beats.get(held.job.id);
      if (beat?.state === "renewed") {
        held.renewedAtMs = sentAtMs;
        held.tell(this.#guardedS(held));
      }
      if (beat?.state === "lost") held.stop.abort(new Stop("lost", "somebody else has it"));
      if (beat?.cancel) held.stop.abort(new Stop("cancelled", "cancelled"));
    }
    for (const [token, atMs] of this.lostClaims) {
      // Whatever it may have taken has been given back, or recovered.
      if (sentAtMs - atMs > 2 * this.leaseS * 1000) this.lostClaims.delete(token);
    }
    for (const stray of pulse.strays) {
      if (!this.lostClaims.has(stray.claim_token)) continue; // it started, or ended, meanwhile
      log.warn("job {id} was claimed by a call whose reply was lost: given back", { ...stray });
      // Should this fail, it is a stray of the next heartbeat too.
      this.db.run((sql) => release(sql, this.bootId, stray, "its claim's reply was lost"))
        .catch((error) => log.warn("{error}", { error: describe(error) }));
    }
  }

  /** A worker stops its job so long before the lease ends, and the guard half as long before. */
  get #marginS(): number {
    return Math.min(20, this.leaseS / 6);
  }

  /** Seconds between a job's SIGTERM and its SIGKILL, both within the lease. */
  get graceS(): number {
    return this.#marginS / 4;
  }

  /** Seconds after which the guard is to end the job, should no renewal come. */
  #guardedS({ renewedAtMs }: Held): number {
    return this.leaseS - this.#marginS / 2 - (performance.now() - renewedAtMs) / 1000;
  }
}
