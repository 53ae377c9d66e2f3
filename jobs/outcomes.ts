/**
 * Records how attempts ended. Outcomes that come while others are being written go together, in one
 * statement: no timer waits for more of them, and where there is one, it goes at once. A worker's next claim
 * takes along those that are simple, where they are few.
 */
import { codeOf, describe, isDisconnect, patient, turn, type Via } from "../db.ts";
import { type Done, finishMany } from "../claims.ts";
import { type Outcome, settle } from "../queue.ts";

/** Outcomes of one statement at the most. */
const MOST = 1000;
/**
 * Fewer than these, of jobs that end while a claim is under way, wait to go with the next one: a statement costs
 * more than they do. Of more it does not, and they go beside the claim, so that the database does both at once.
 */
const ALONG = 100;
/** How long an outcome is tried to be written. */
const PATIENCE_MS = 600_000;
/** Halvings from {@linkcode MOST} to the one at fault, each of which may wait for a locked row, and as many again. */
const WAITS = 20;

/** An outcome to be written, and who waits for that. */
interface Entry {
  outcome: Outcome;
  resolve: (stands: boolean) => void;
  reject: (error: unknown) => void;
}

/** Done, with nothing to do but say so. */
const isSimple = (outcome: Outcome): outcome is Outcome & Done =>
  outcome.outcome === "done" && !outcome.files && !outcome.next?.length;

export class Outcomes {
  #waiting: Entry[] = [];
  #writing = false;
  /** Whether a claim is under way, after which the next may take more along. */
  #claiming = false;
  /** How long one statement may wait for a locked row. */
  readonly waitMs: number;

  /**
   * @param hurry aborted when what is left to write has no more time
   * @param maxReleases how often a job may be given back; see settle
   * @param heldBackMs how long one job may hold back the outcomes of others
   */
  constructor(
    readonly db: Via,
    readonly worker: string,
    readonly hurry: AbortSignal,
    readonly maxReleases?: number,
    heldBackMs = 1000,
  ) {
    this.waitMs = Math.ceil(heldBackMs / WAITS);
  }

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
      if (!this.#writing && !(this.#claiming && this.#waiting.length < ALONG)) this.#writeAll();
    });
  }

  /**
   * Hands over simple outcomes, for a claim to take along. Whoever takes them calls `landed` with the ids that
   * stand, or with none where that is not known.
   */
  take(): { done: Done[]; landed: (stand?: Set<string>) => void } {
    const taken: Entry[] = [];
    const left: Entry[] = [];
    for (const entry of this.#waiting) {
      (taken.length < MOST && isSimple(entry.outcome) ? taken : left).push(entry);
    }
    this.#waiting = left;
    this.#claiming = true;
    return {
      done: taken.map(({ outcome }) => outcome as Outcome & Done),
      landed: (stand) => {
        this.#claiming = false;
        if (!this.#writing && this.#waiting.length > 0) this.#writeAll();
        const open = stand ? this.#resolve(taken, stand) : taken;
        if (open.length > 0) this.#write(open, false);
      },
    };
  }

  async #writeAll(): Promise<void> {
    this.#writing = true;
    await turn(); // jobs that end in the same moment, and a claim that takes them along
    await turn();
    while (this.#waiting.length > 0) {
      const entries = this.#waiting.splice(0, MOST);
      const simple = entries.filter(({ outcome }) => isSimple(outcome));
      const others = entries.filter(({ outcome }) => !isSimple(outcome));
      await Promise.all([this.#write(simple, true), this.#write(others, false)]);
    }
    this.#writing = false;
  }

  /**
   * Writes some; where they are refused, halves of them, down to the one at fault, which keeps nobody
   * waiting. Those that a simple way leaves open, because they are lost or had landed, go by the other.
   */
  async #write(entries: Entry[], simple: boolean): Promise<void> {
    if (entries.length === 0) return;
    try {
      const db = patient(this.db, this.hurry, PATIENCE_MS, isDisconnect);
      const outcomes = entries.map(({ outcome }) => outcome);
      const stand = await (simple
        ? db.run((sql) =>
          finishMany(sql, this.worker, outcomes as (Outcome & Done)[], this.waitMs)
        )
        : this.#settle(db, outcomes, entries.length > 1 ? this.waitMs : undefined));
      const open = this.#resolve(entries, stand);
      if (simple) {
        await this.#write(open, false);
      } else {for (const { resolve } of open) {
          resolve(false);
        }}
    } catch (error) {
      const half = entries.length >> 1;
      if (half === 0) return void this.#insist(entries[0], error);
      await this.#write(entries.slice(0, half), simple);
      await this.#write(entries.slice(half), simple);
    }
  }

  /** Tells those that stand. @returns the others */
  #resolve(entries: Entry[], stand: Set<string>): Entry[] {
    return entries.filter(({ outcome, resolve }) => !stand.has(outcome.id) || void resolve(true));
  }

  /** Writes one that failed by itself, though others go on meanwhile. */
  async #insist({ outcome, resolve, reject }: Entry, error: unknown): Promise<void> {
    const { id, attempt } = outcome;
    const refused = /^(SD|22|23|54)/.test(codeOf(error));
    const why = `its outcome could not be stored: ${describe(error)}`;
    const it: Outcome = refused ? { id, attempt, outcome: "failed", error: why } : outcome;
    try {
      resolve((await this.#settle(patient(this.db, this.hurry, PATIENCE_MS), [it])).has(id));
    } catch (error) {
      reject(error);
    }
  }

  async #settle(db: Via, outcomes: Outcome[], waitMs?: number): Promise<Set<string>> {
    return new Set(
      await db.run((sql) => settle(sql, this.worker, outcomes, this.maxReleases, waitMs)),
    );
  }
}
