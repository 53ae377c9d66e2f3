/**
 * Enqueues of one process that come at the same time, gathered into few statements: a statement and its
 * commit cost more than a job. No timer: whatever comes while the statements before are under way goes
 * together. Ten callers, one job each: 5,700 jobs a second on two cores, and some 1,100 with a statement each.
 *
 * Callers do not notice each other. Each has its own result; and when a statement is refused, which undoes
 * all of it, its callers are tried again by halves, until whoever is at fault is alone and gets the error.
 */
import { codeOf, type Pool, turn } from "./db.ts";

/** Statements under way at a time: while Postgres works at one, the next is made and the last is read. */
const LANES = 2;
/** Of one statement; a call of its own is never split. */
const MOST_JOBS = 1000;
const MOST_CHARACTERS = 1_000_000;
/** A call with more jobs gains nothing by company, nor do those who would wait for it. */
const MOST_OF_A_CALL = 100;
/** So long does a gathered statement wait for a lock, which may be needed for one of its calls only. */
const LOCK_WAIT_MS = 200;

/** What is wrong with one of the calls, or in its way. Postgres said so: nothing took effect. */
const REFUSED = /^(SD|P0|2[23]|40|54|55P03)/;

/** The jobs of one call, as the elements of a JSON array; and how many those are. */
export interface Call {
  text: string;
  count: number;
}

/** Sends one statement, which waits for a lock at most `lockWaitMs`, and returns an entry for each job. */
export type Send<T> = (sql: Pool, text: string, lockWaitMs?: number) => Promise<T[]>;

interface Waiting<T> extends Call {
  resolve(entries: T[]): void;
  reject(error: unknown): void;
}

// deno-lint-ignore no-explicit-any -- each with the entries of its `send`
const gatherers = new WeakMap<Pool, Gatherer<any>>();

/** The one of this pool, which has the `send` that it was first asked for with. */
export function gathererOf<T>(sql: Pool, send: Send<T>): Gatherer<T> {
  const gatherer = gatherers.get(sql) ?? new Gatherer(sql, send);
  gatherers.set(sql, gatherer);
  return gatherer;
}

/** Of one pool. */
export class Gatherer<T> {
  readonly #lanes: number;
  #waiting: Waiting<T>[] = [];
  #underWay = 0;
  #starting = false;

  constructor(readonly sql: Pool, readonly send: Send<T>) {
    this.#lanes = Math.min(LANES, sql.options.max);
  }

  /**
   * @returns the entries of this call
   * @throws what its statement failed with, as the driver has it. One whose reply was lost is not repeated.
   */
  async enqueue(call: Call): Promise<T[]> {
    const { text, count } = call;
    if (count > MOST_OF_A_CALL || text.length > MOST_CHARACTERS) {
      return await this.send(this.sql, text);
    }
    return await new Promise<T[]>((resolve, reject) => {
      this.#waiting.push({ text, count, resolve, reject });
      this.#start();
    });
  }

  /** Sends what waits, if there is room, and not before all that comes in this moment is there. */
  async #start(): Promise<void> {
    if (this.#starting || this.#underWay === this.#lanes) return;
    this.#starting = true;
    await turn();
    this.#starting = false;
    while (this.#waiting.length > 0 && this.#underWay < this.#lanes) {
      void this.#lane(this.#take(Math.ceil(this.#waiting.length / (this.#lanes - this.#underWay))));
    }
  }

  /** The calls of the next statement, `most` of them at the most. */
  #take(most: number): Waiting<T>[] {
    let jobs = 0, characters = 0, calls = 0;
    for (const { text, count } of this.#waiting) {
      jobs += count;
      characters += text.length;
      if (calls === most || calls > 0 && (jobs > MOST_JOBS || characters > MOST_CHARACTERS)) break;
      calls++;
    }
    return this.#waiting.splice(0, calls);
  }

  async #lane(calls: Waiting<T>[]): Promise<void> {
    this.#underWay++;
    const again = await this.#try(calls, LOCK_WAIT_MS);
    this.#underWay--;
    this.#start();
    // Beside the lanes: others are not to wait for what somebody is at fault for, or that is locked.
    if (again) await this.#divide(calls);
  }

  async #divide(calls: Waiting<T>[]): Promise<void> {
    const half = Math.ceil(calls.length / 2);
    const parts = [calls.slice(0, half), calls.slice(half)].filter((part) => part.length > 0);
    await Promise.all(parts.map(async (part) => {
      if (await this.#try(part, part.length > 1 ? LOCK_WAIT_MS : undefined)) {
        await this.#divide(part);
      }
    }));
  }

  /** One statement for these calls. @returns whether they are to be tried again, by fewer */
  async #try(calls: Waiting<T>[], lockWaitMs?: number): Promise<boolean> {
    try {
      const text = calls.map((call) => call.text).filter((text) => text !== "").join(",");
      const entries = await this.send(this.sql, text, lockWaitMs);
      let at = 0;
      for (const { count, resolve } of calls) resolve(entries.slice(at, at += count));
    } catch (error) {
      const code = codeOf(error);
      if (calls.length > 1 ? REFUSED.test(code) : lockWaitMs && code === "55P03") return true;
      for (const { reject } of calls) reject(error);
    }
    return false;
  }
}
