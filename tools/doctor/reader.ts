/**
 * How the doctor reads a database without being in its way, and what it finds.
 *
 * Every statement bounds itself on the server (`set local`), since a client that gives up leaves its
 * statement running, and waits for no lock. The bound and the statement are one string, which the
 * simple protocol runs as one transaction: nothing outlives it, it takes no prepared statements, and
 * so it goes through any pooler. It takes no parameters: what goes in is from here, or by `literal`.
 */
import { type Database, describe, isDisconnect } from "../../db.ts";

/** What somebody should see to. A number of the figures has its unit in its name. */
export interface Finding {
  code: string;
  /** `critical`: jobs stop, or soon will; `warning`: it costs something, or will. */
  severity: "critical" | "warning";
  title: string;
  figures: Record<string, unknown>;
  remedy: string;
}

const LIMIT_MS = 3000;
/** How long it waits for a lock; a table that somebody changes just now could not be read. */
const LOCK_LIMIT_MS = 100;

export const literal = (text: string) => `'${text.replaceAll("'", "''")}'`;

/** Reads, and notes what could not be read, with the reason: such as a right that the role lacks. */
export class Reader {
  readonly unread: { what: string; why: string }[] = [];
  /** Its own transactions, which the server counts with the others. */
  readonly own = { commits: 0, rollbacks: 0 };

  constructor(readonly db: Database) {}

  /**
   * The rows of one statement; null when the server refused it.
   *
   * @param what what it reads, for people
   * @throws when the database is not reachable
   */
  async rows<T>(what: string, statement: string): Promise<T[] | null> {
    try {
      return await this.must(statement);
    } catch (error) {
      if (isDisconnect(error)) throw error;
      this.skip(what, describe(error));
      return null;
    }
  }

  /** The rows of a statement without which there is nothing to say. */
  async must<T>(statement: string): Promise<T[]> {
    const results = await this.db.run((sql) =>
      sql.unsafe(
        `set local statement_timeout = ${LIMIT_MS}; set local lock_timeout = ${LOCK_LIMIT_MS};` +
          statement,
      ).simple()
    ).catch((error) => {
      this.own.rollbacks++;
      throw error;
    }) as unknown as T[][];
    this.own.commits++;
    return Array.from(results.at(-1)!);
  }

  /** The one row of a statement; null when the server refused it. */
  async row<T>(what: string, statement: string): Promise<T | null> {
    return (await this.rows<T>(what, statement))?.[0] ?? null;
  }

  /** Notes that something could not be read. Once: a statement may be sent many times. */
  skip(what: string, why: string): void {
    if (!this.unread.some((it) => it.what === what)) this.unread.push({ what, why });
  }
}

/** A statement in a line, without the values in it, which are nobody's business. */
export function shortened(query: string | null, most = 160): string | null {
  if (query === null) return null;
  const line = query.replace(/'(?:[^']|'')*'/g, "'…'").replace(/\s+/g, " ").trim()
    .replace(/\bextract ?\([^()]*\)/gi, "extract(…)")
    // Where the rows come from tells more than a long list of columns.
    .replace(/\bselect (?:(?! from ).){60,}? from /gi, "select … from ");
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

/** A number to read: 12,345 or 3.4. */
export const number = (value: number) =>
  value.toLocaleString("en-US", { maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 });
export const percent = (share: number) => `${number(100 * share)}%`;
/** Seconds as people say them. */
export const duration = (s: number) =>
  s < 120
    ? `${number(s)} s`
    : s < 7200
    ? `${number(s / 60)} min`
    : s < 172_800
    ? `${number(s / 3600)} h`
    : `${number(s / 86_400)} days`;
export const megabytes = (bytes: number) => `${number(bytes / 1_048_576)} MiB`;
export const plural = (count: number, one: string, many = `${one}s`) =>
  `${number(count)} ${count === 1 ? one : many}`;
