/**
 * Records how attempts ended. Outcomes that come while others are being written go together, in one
 * statement: no timer waits for more of them, and where there is one, it goes at once.
 */
import { codeOf, describe, isDisconnect, patient, pause, type Via } from "../db.ts";
import { type Outcome, settle } from "../queue.ts";

/** Outcomes of one statement at the most. */
const MOST = 1000;
/** How long an outcome is tried to be written. */
const PATIENCE_MS = 600_000;

interface Entry {
  outcome: Outcome;
  resolve: (stands: boolean) => void;
  reject: (error: unknown) => void;
}

export class Outcomes {
  #waiting: Entry[] = [];
  #writing = false;

  /** @param hurry aborted when what is left to write has no more time */
  constructor(
    readonly db: Via,
    readonly worker: string,
    readonly hurry: AbortSignal,
    readonly maxReleases?: number,
  ) {}

  /**
   * Records an outcome, again and again while the database cannot be reached, for ten minutes or until
   * there is no more time. One that the database refuses (a next job over a queue's limit, a value that a
   * column cannot hold) fails the job with the refusal.
   *
   * @returns whether the outcome stands; false: the job is somebody else's
   */
  record(outcome: Outcome): Promise<boolean> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ outcome, resolve, reject });
      if (!this.#writing) this.#writeAll();
    });
  }

  async #writeAll(): Promise<void> {
    this.#writing = true;
    await pause(0); // jobs that end in the same moment
    while (this.#waiting.length > 0) await this.#write(this.#waiting.splice(0, MOST));
    this.#writing = false;
  }

  /** Writes some; where they are refused, halves of them, down to the one at fault, which keeps nobody waiting. */
  async #write(entries: Entry[]): Promise<void> {
    try {
      const db = patient(this.db, this.hurry, PATIENCE_MS, isDisconnect);
      const stand = new Set(await this.#settle(db, entries.map(({ outcome }) => outcome)));
      for (const { outcome, resolve } of entries) resolve(stand.has(outcome.id));
    } catch (error) {
      const half = entries.length >> 1;
      if (half === 0) return void this.#insist(entries[0], error);
      await this.#write(entries.slice(0, half));
      await this.#write(entries.slice(half));
    }
  }

  /** Writes one that failed by itself, though others go on meanwhile. */
  async #insist({ outcome, resolve, reject }: Entry, error: unknown): Promise<void> {
    const { id, attempt } = outcome;
    const refused = /^(SD|22|23|54)/.test(codeOf(error));
    const it: Outcome = refused
      ? {
        id,
        attempt,
        outcome: "failed",
        error: `its outcome could not be stored: ${describe(error)}`,
      }
      : outcome;
    try {
      resolve((await this.#settle(patient(this.db, this.hurry, PATIENCE_MS), [it])).length > 0);
    } catch (error) {
      reject(error);
    }
  }

  #settle(db: Via, outcomes: Outcome[]): Promise<string[]> {
    return db.run((sql) => settle(sql, this.worker, outcomes, this.maxReleases));
  }
}
