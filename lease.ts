/**
 * The jobs that a worker holds, and their leases: renewed by a heartbeat, and each job stopped in
 * time when its lease cannot be.
 *
 * A lease is counted from when its renewal was sent, by this process's monotonic clock, so that
 * the worker's idea of it never ends after the database's. Where a clock jumps (this process was
 * frozen, or the machine slept) the first thing is to ask the database what is still ours.
 */
import { logger } from "./config.ts";
import { type Database, describe } from "./db.ts";
import { Stop } from "./jobs/kind.ts";
import { Stopper } from "./jobs/stopper.ts";
import { type Ready } from "./claims.ts";
import { cancellations, heartbeat, type Job, type Pulse, release } from "./queue.ts";

const log = logger("worker");

/** How often a held job's cancellation is asked for, and a new stage told. */
const TICK_MS = 2000;

/** How long a job that is to run alone waits for the leader, before every worker makes room for it. */
const ALONE_WAIT_MS = 60_000;

/** Both clocks: where a process was frozen or a machine slept, one of them may have stood still. */
export const clocks = () => ({ monotonicMs: performance.now(), wallMs: Date.now() });
type Clocks = ReturnType<typeof clocks>;
/** Milliseconds since, by the clock that moved further. */
export const sinceMs = (then: Clocks) =>
  Math.max(performance.now() - then.monotonicMs, Math.abs(Date.now() - then.wallMs));

/** A job under way. */
export interface Held {
  job: Job;
  stopper: Stopper;
  stage: string | null;
  progress: number | null;
  /** When the renewal that last succeeded was sent. */
  renewed: Clocks;
  /** Told at each renewal how many seconds the job may still run: the guard of its process. */
  tell: (leftS: number) => void;
  /** Resolves when its outcome is recorded, or given up. */
  ended: Promise<void>;
}

export class Leases {
  readonly held = new Map<string, Held>();
  /** Whether this worker is the leader of its pool, as of the last heartbeat. */
  leader = false;
  /** Aborted, with the {@linkcode Stop} of its jobs, when this worker is to end: it was taken for dead, or hangs. */
  readonly dead = new AbortController();
  /** The tokens of claims whose reply was lost, which may have taken jobs all the same, and when. */
  readonly lostClaims = new Map<string, number>();
  /** When the last heartbeat that succeeded was sent, and the first of the unbroken run of them. */
  #lastBeat: Clocks = { monotonicMs: -Infinity, wallMs: -Infinity };
  #inTouchSinceMs = Infinity;
  /** A stage was reached that no heartbeat has told. */
  #news = false;
  /** When the look for jobs that is under way last got on; Infinity when none is. */
  #gotOnAtMs = Infinity;
  /** Queues whose next job is to run alone, and since when that was seen while this worker was busy. */
  readonly #lonely = new Map<string, number>();
  /** Aborted when a heartbeat is due at once; a new one each beat. */
  #urgent = new AbortController();
  /** When watch() last ran. */
  #watched = clocks();

  /**
   * @param db the heartbeat's own connection: nothing that waits can stand before it
   * @param bootId the worker
   * @param stallS seconds in which a look for jobs does not get on, after which the worker hangs
   */
  constructor(
    readonly db: Database,
    readonly bootId: string,
    readonly heartbeatMs: number,
    readonly leaseS: number,
    readonly stallS: number,
  ) {}

  /** Begins to hold a job, claimed by a statement that was sent at the time `sent`. */
  hold(job: Job, sent: Clocks): Held {
    // After a failover that lost its last transactions an id can come again, as another job's.
    this.held.get(job.id)?.stopper.stop(new Stop("lost", "its id is another job's"));
    const held: Held = {
      ...{ job, stopper: new Stopper(), stage: null, progress: null },
      ...{ renewed: sent, tell: () => {}, ended: Promise.resolve() },
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

  /** Whether a job's lease surely runs on, by both clocks. */
  isMine({ renewed }: Held): boolean {
    return sinceMs(renewed) <= (this.leaseS - this.#marginS) * 1000;
  }

  /** Throws unless {@linkcode isMine}. */
  assertMine(held: Held): void {
    if (!this.isMine(held)) throw new Stop("released", "its lease could not be renewed");
  }

  /** Whether a job under way is to have nothing beside it. */
  get alone(): boolean {
    return [...this.held.values()].some(({ job }) => job.alone);
  }

  /**
   * Whether this worker is to let what it runs end first, for a job that is to run alone: the leader
   * at once, so that all the others go on; they, too, once it has waited for a minute.
   */
  waitsToBeAlone({ queue, alone }: Ready): boolean {
    if (!alone || this.held.size === 0) {
      this.#lonely.delete(queue);
      return false;
    }
    const sinceMs = this.#lonely.get(queue) ?? performance.now();
    this.#lonely.set(queue, sinceMs);
    return this.leader || performance.now() - sinceMs > ALONE_WAIT_MS;
  }

  /** Runs a look for jobs, which is seen when it hangs. */
  async working<T>(look: () => Promise<T>): Promise<T> {
    this.gotOn();
    try {
      return await look();
    } finally {
      this.#gotOnAtMs = Infinity;
    }
  }

  /** Says that the look for jobs does not hang. */
  gotOn(): void {
    this.#gotOnAtMs = performance.now();
  }

  /** Aborted when the next beat is due at once. */
  get urgent(): AbortSignal {
    return this.#urgent.signal;
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
    return performance.now() - this.#inTouchSinceMs >= this.silentS * 1000 &&
      sinceMs(this.#lastBeat) < this.silentS * 1000;
  }

  /**
   * Renews what is held, when that is due or a stage was reached; else hears of cancellations.
   *
   * @returns milliseconds until the next
   */
  async beat(): Promise<number> {
    const tickMs = Math.min(TICK_MS, this.heartbeatMs);
    const sent = clocks();
    this.#urgent = new AbortController();
    const dueMs = this.#lastBeat.monotonicMs + this.heartbeatMs - sent.monotonicMs;
    if (dueMs > 0 && !this.#news) {
      const ids = this.held.size === 0
        ? []
        : await this.db.run((sql) => cancellations(sql, this.bootId));
      for (const id of ids) this.held.get(id)?.stopper.stop(new Stop("cancelled", "cancelled"));
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
        heartbeat(sql, this.bootId, jobs, this.leaseS, this.silentS, this.#stalledS)
      );
    } catch (error) {
      this.#loseTouch(); // the next try is the next tick
      throw error;
    }
    // A pause of its own, such as a freeze, is a break too.
    if (!(sinceMs(this.#lastBeat) < this.silentS * 1000)) this.#loseTouch();
    this.#inTouchSinceMs = Math.min(this.#inTouchSinceMs, performance.now());
    this.#lastBeat = sent;
    this.#heed(pulse, named, sent);
    return tickMs;
  }

  /**
   * Stops jobs whose lease could not be renewed, before it ends and others may take them. Notices
   * when this process was frozen or the machine slept, and when it no longer looks for jobs.
   */
  watch(): Promise<number> {
    const { monotonicMs, wallMs } = this.#watched;
    const everyMs = Math.min(1000, this.#marginS * 250);
    const [passedMs, wallPassedMs] = [performance.now() - monotonicMs, Date.now() - wallMs];
    const jumpMs = Math.max(passedMs - everyMs, Math.abs(wallPassedMs - passedMs));
    this.#watched = clocks();
    if (jumpMs > this.#marginS * 500) { // less than half the margin cannot matter
      log.warn("a clock jumped by {seconds} s: asking the database what is still this worker's", {
        seconds: (jumpMs / 1000).toFixed(1),
      });
      if (this.#gotOnAtMs < Infinity) this.gotOn();
      this.#loseTouch();
      this.#urgent.abort();
    }
    for (const { renewed, stopper } of this.held.values()) {
      if (performance.now() - renewed.monotonicMs > (this.leaseS - this.#marginS) * 1000) {
        stopper.stop(new Stop("released", "its lease could not be renewed"));
      }
    }
    // Not where the heartbeat was away too: that is the database's outage.
    const inTouchS = (performance.now() - this.#inTouchSinceMs) / 1000;
    if (this.#stalledS > this.stallS && inTouchS > this.stallS && !this.dead.signal.aborted) {
      log.error("unwell: its look for jobs hangs since {seconds} s, though its heartbeat lives", {
        seconds: Math.round(this.#stalledS),
      });
      this.dead.abort(new Stop("released", "its worker hung"));
    }
    return Promise.resolve(everyMs);
  }

  #loseTouch(): void {
    this.#inTouchSinceMs = Infinity;
    this.#lastBeat = { monotonicMs: -Infinity, wallMs: -Infinity };
  }

  /** Acts on what a heartbeat, sent at the time `sent` for the jobs `named`, brought back. */
  #heed(pulse: Pulse, named: Held[], sent: Clocks): void {
    this.leader = pulse.leader;
    if (!pulse.alive) return this.dead.abort(new Stop("lost", "its worker was taken for dead"));
    const beats = new Map(pulse.beats.map((beat) => [beat.id, beat]));
    for (const held of named) {
      const beat = beats.get(held.job.id);
      if (beat?.state === "renewed") {
        held.renewed = sent;
        held.tell(this.#guardedS(held));
      }
      if (beat?.state === "lost") held.stopper.stop(new Stop("lost", "somebody else has it"));
      if (beat?.cancel) held.stopper.stop(new Stop("cancelled", "cancelled"));
    }
    for (const [token, atMs] of this.lostClaims) {
      // Whatever it may have taken has been given back, or recovered.
      if (sent.monotonicMs - atMs > 2 * this.leaseS * 1000) this.lostClaims.delete(token);
    }
    for (const stray of pulse.strays) {
      if (!this.lostClaims.has(stray.claim_token)) continue; // it started, or ended, meanwhile
      log.warn("job {job} was claimed by a call whose reply was lost: given back", {
        ...{ job: stray.id, attempt: stray.attempt },
      });
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
  #guardedS({ renewed }: Held): number {
    return this.leaseS - this.#marginS / 2 - (performance.now() - renewed.monotonicMs) / 1000;
  }

  /** Seconds in which the worker's look for jobs has not got on. */
  get #stalledS(): number {
    return Math.max(0, performance.now() - this.#gotOnAtMs) / 1000;
  }
}
