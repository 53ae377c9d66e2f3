/**
 * What stops a job. An AbortController and two timers a job would cost more than many a small job
 * itself, so the first is made when somebody asks for its signal, and the others are shared.
 */
import type { Stop } from "./kind.ts";

export class Stopper {
  /** Why it is to stop, once it is. The first reason stands. */
  reason: Stop | undefined;
  #controller: AbortController | undefined;
  #onStop: ((reason: Stop) => void) | undefined;

  stop(reason: Stop): void {
    if (this.reason) return;
    this.reason = reason;
    this.#controller?.abort(reason);
    this.#onStop?.(reason);
  }

  /** Aborted with the reason. */
  get signal(): AbortSignal {
    if (!this.#controller) {
      this.#controller = new AbortController();
      if (this.reason) this.#controller.abort(this.reason);
    }
    return this.#controller.signal;
  }

  /**
   * What `work` comes to; or, once it was stopped for `graceMs`, the reason of that: a function that does
   * not heed its signal is left behind. One at a time.
   */
  unlessAbandoned<T>(work: Promise<T>, graceMs: number): Promise<T> {
    return new Promise((resolve, reject) => {
      let timer: ReturnType<typeof setTimeout> | undefined;
      const over = () => {
        if (timer !== undefined) clearTimeout(timer);
        this.#onStop = undefined;
      };
      this.#onStop = (reason) => timer = setTimeout(() => reject(reason), graceMs);
      if (this.reason) this.#onStop(this.reason);
      work.then(
        (value) => (over(), resolve(value)),
        (error) => (over(), reject(error)),
      );
    });
  }
}

/** Limits of one length: the one that began first is the first to run out, so one timer serves all. */
class Limits {
  readonly #begun = new Map<() => void, number>();
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(readonly lengthMs: number) {}

  begin(runOut: () => void): () => void {
    this.#begun.set(runOut, performance.now());
    this.#timer ??= setTimeout(() => this.#check(), this.lengthMs);
    return () => {
      this.#begun.delete(runOut);
      if (this.#begun.size === 0) this.#arm();
    };
  }

  #check(): void {
    const now = performance.now();
    for (const [runOut, sinceMs] of this.#begun) {
      if (now - sinceMs < this.lengthMs) break;
      this.#begun.delete(runOut);
      runOut();
    }
    this.#arm();
  }

  /** Sets the timer for the first that is left. */
  #arm(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    for (const sinceMs of this.#begun.values()) {
      const leftMs = sinceMs + this.lengthMs - performance.now();
      this.#timer = setTimeout(() => this.#check(), Math.max(1, leftMs));
      break;
    }
  }
}

const limits = new Map<number, Limits>();

/** Calls `runOut` after `lengthMs`, unless what this returns was called before. */
export function limit(lengthMs: number, runOut: () => void): () => void {
  let of = limits.get(lengthMs);
  if (!of) limits.set(lengthMs, of = new Limits(lengthMs));
  return of.begin(runOut);
}
