/**
 * A worker's places, in which its jobs run: `concurrency` of them. While jobs are quick it claims ahead, as
 * many as end within `aheadMs` at the pace they do; these wait here, the first claimed first, and are renewed
 * and stopped like those that run. What one slow job keeps waiting for `heldBackMs` goes back in line, and so
 * do all of them when the worker stops: that they were claimed counts for nothing but an attempt's number.
 */
import { logger } from "./config.ts";
import { describe, turn } from "./db.ts";
import type { Outcomes } from "./jobs/outcomes.ts";
import { type clocks, type Held, type Leases } from "./lease.ts";
import type { Job } from "./queue.ts";

const log = logger("worker");

/** Claimed at the most, where `concurrency` is not more: with larger claims there is nothing to be gained. */
const AHEAD_TO = 500;
/** The pace is that of the last jobs: each counts for this part of it. */
const PACE_SHARE = 1 / 16;

export interface PlacesSettings {
  concurrency: number;
  aheadMs: number;
  heldBackMs: number;
}

interface Waiting {
  held: Held;
  /** When its claim was sent. */
  sinceMs: number;
}

export class Places {
  running = 0;
  #waiting: Waiting[] = [];
  /** Set while some wait. */
  #timer: ReturnType<typeof setTimeout> | undefined;
  /** Milliseconds from one job's end to the next one's, while any run. */
  #paceMs: number;
  /** When a job last ended, or began where none ran. */
  #sinceMs = 0;

  /**
   * @param start begins to run a job
   * @param changed is called when there may be room for more
   */
  constructor(
    readonly settings: PlacesSettings,
    readonly leases: Leases,
    readonly outcomes: Outcomes,
    readonly start: (held: Held) => void,
    readonly changed: () => void,
  ) {
    this.#paceMs = Math.max(1, settings.aheadMs); // none ahead before it is known
  }

  /** How many wait for a place. */
  get waiting(): number {
    return this.#waiting.length;
  }

  /** How many jobs may run or wait: more than there are places while they are quick. */
  get most(): number {
    const { concurrency, heldBackMs } = this.settings;
    // So that what was given back is not claimed again behind the same slow job.
    const aheadMs = Math.min(this.settings.aheadMs, heldBackMs);
    const awaitedMs = this.running > 0 ? performance.now() - this.#sinceMs : 0;
    const paceMs = Math.max(this.#paceMs, awaitedMs, 0.001);
    return Math.max(concurrency, Math.min(AHEAD_TO, Math.floor(aheadMs / paceMs)));
  }

  /** Takes jobs, claimed by a statement that was sent at the time `sent`; they begin as there are places. */
  take(jobs: readonly Job[], sent: ReturnType<typeof clocks>): void {
    for (const job of jobs) {
      this.#waiting.push({ held: this.leases.hold(job, sent), sinceMs: sent.monotonicMs });
    }
    // Once the next claim is on its way, so that the database works on it meanwhile: the driver sends small
    // statements in the next turn.
    turn().then(turn).then(() => {
      this.#begin();
      this.#watch();
      this.changed();
    });
  }

  /** A job's function came to an end. */
  ran(): void {
    const now = performance.now();
    this.#paceMs += (now - this.#sinceMs - this.#paceMs) * PACE_SHARE;
    this.#sinceMs = now;
    this.running--;
    this.#begin();
  }

  /** Those that wait go back in line: this worker stops. */
  giveBack(): void {
    clearTimeout(this.#timer);
    this.#giveBack(this.#waiting.splice(0));
  }

  #begin(): void {
    while (this.running < this.settings.concurrency && this.#waiting.length > 0) {
      const next = this.#waiting.shift()!;
      // Stopped meanwhile, or this process was frozen: nothing begins that may be another worker's.
      if (next.held.stopper.reason || !this.leases.isMine(next.held)) this.#giveBack([next]);
      else {
        if (this.running++ === 0) this.#sinceMs = performance.now();
        this.start(next.held);
      }
    }
  }

  /** Gives back, when it is time, what has waited for too long. */
  #watch(): void {
    const [first] = this.#waiting;
    if (!first || this.#timer !== undefined) return;
    const { heldBackMs } = this.settings;
    this.#timer = setTimeout(() => {
      this.#timer = undefined;
      const now = performance.now();
      const inTime = this.#waiting.findIndex(({ sinceMs }) => now - sinceMs < heldBackMs);
      this.#giveBack(this.#waiting.splice(0, inTime < 0 ? this.#waiting.length : inTime));
      this.#watch();
    }, first.sinceMs + heldBackMs - performance.now());
  }

  #giveBack(waiting: readonly Waiting[]): void {
    for (const { held } of waiting) {
      const { id, attempt } = held.job;
      const outcome = { id, attempt, outcome: "released", unbegun: true } as const;
      held.ended = this.outcomes.record(outcome).then((stands) => {
        if (!stands) log.warn("job {job} is lost: somebody else has it", { job: id });
      }, (error) => {
        log.error("job {job}: not given back: {error}", { job: id, error: describe(error) });
      }).finally(() => {
        this.leases.drop(held);
        this.changed();
      });
    }
  }
}
