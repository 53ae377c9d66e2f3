/**
 * Connections to Postgres: how they are made, how long a statement may take, and the one
 * transaction of several statements that Siding has, {@linkcode withQueueLock}.
 *
 * Nothing here leaves state in a session, so all of it runs through PgBouncer in transaction mode.
 */
import { setImmediate } from "node:timers";
import { getLogger } from "@logtape/logtape";
import postgres from "postgres";

/** A pool, or a transaction on one connection of it. */
// deno-lint-ignore ban-types
export type Sql = postgres.Sql<{}> | postgres.TransactionSql<{}>;
// deno-lint-ignore ban-types
export type Pool = postgres.Sql<{}>;

/**
 * The number of the newest migration that this code was written for. A database that has newer
 * ones is served all the same, unless one of them says that this code is too old for it.
 */
export const CODE_MIGRATION = 12;

/** The schema of Siding's tables (SIDING_SCHEMA). Every name is qualified: a pooler keeps no search_path. */
export const schema = Deno.env.get("SIDING_SCHEMA") || "siding";

/** What is wrong with the schema's name, or null. Names go into SQL as they are. */
export const schemaProblem = /^[a-z_][a-z0-9_]{0,62}$/.test(schema)
  ? null
  : `SIDING_SCHEMA is "${schema}": it must be a lower-case letter or _, then letters, digits and _`;

export interface ConnectOptions {
  /** Connections at the most. Opened when first needed. */
  max?: number;
  /** Shown in pg_stat_activity. */
  name?: string;
  /** Prepared statements, unless the URL has `?prepare=false`: see {@linkcode poolerMistake}. */
  prepare?: boolean;
  /** Statements sent on a connection behind one whose reply is not there yet. */
  pipeline?: boolean;
}

/** A pool of connections to the database at `url`. Nothing is sent before the first statement. */
export function connect(url: string, options: ConnectOptions = {}): Pool {
  if (schemaProblem) throw new TypeError(schemaProblem);
  return postgres(url, {
    max: options.max ?? 4,
    prepare: (options.prepare ?? true) && parameterOf(url, "prepare") !== "false",
    // @ts-ignore: the driver has the option, its types do not. With 0 it cannot begin().
    max_pipeline: options.pipeline ?? true ? 100 : 0,
    connect_timeout: 10,
    // Statements carry arrays as JSON or text, so the driver need not ask for the array types.
    fetch_types: false,
    onnotice: () => {},
    connection: { application_name: options.name ?? "siding" },
  });
}

/** A parameter of a connection string, as the driver reads it; null: it has none. */
export const parameterOf = (url: string, name: string): string | null =>
  new URLSearchParams(url.split("?")[1]).get(name);

/** What sends statements: a {@linkcode Database}, or a pool by {@linkcode via}. */
export interface Via {
  run<T>(f: (sql: Pool) => Promise<T>): Promise<T>;
}
export const via = (sql: Pool): Via => ({ run: (f) => f(sql) });

/** A statement's reply did not come in time. Whether it took effect is not known. */
export class StatementTimeout extends Error {
  override name = "StatementTimeout";
}

/**
 * A pool whose statements end in time. The driver lets a statement pend for ever when its peer is
 * frozen or gone without a word (porsager/postgres #1089), so the limit is kept here. And it may
 * leave a connection that died with a write pending unable to connect ever again (seen in 3.4.9:
 * the timer of the next write is cleared and not reset). So after either, the pool is thrown away,
 * and the next call connects anew.
 */
export class Database implements Via {
  #pool: Pool;
  #free: number;
  readonly #waiting = new Set<() => void>();
  readonly #open: () => Pool;
  /** Ends for good at the first statement that could not be run because it was prepared. */
  #prepare: boolean;

  constructor(url: string, options: ConnectOptions & { max: number }, readonly limitMs = 20_000) {
    this.#prepare = options.prepare ?? true;
    // Sent behind another, a statement would wait for it; and PgBouncer in transaction mode loses
    // what comes behind one without parameters, since it has given the server away by then (seen
    // with 1.18: "got packet from server when not linked").
    this.#open = () => connect(url, { ...options, prepare: this.#prepare, pipeline: false });
    this.#pool = this.#open();
    this.#free = options.max;
  }

  /**
   * Runs `f`, which sends a statement or a few one after the other, with the pool of the moment.
   * The limit counts from when a connection is free for it, for which it waits as long at the most:
   * callers that keep coming while the database is frozen would be ever more, and none is answered.
   *
   * A statement that was refused because of how it was prepared took no effect: `f` is run once
   * more, unprepared. So of several statements only the last may write.
   */
  async run<T>(f: (sql: Pool) => Promise<T>, limitMs = this.limitMs): Promise<T> {
    try {
      return await this.#once(f, limitMs);
    } catch (error) {
      if (!isPreparedAmiss(error)) throw error;
      this.#prepareNoMore(error);
      return await this.#once(f, limitMs);
    }
  }

  async #once<T>(f: (sql: Pool) => Promise<T>, limitMs: number): Promise<T> {
    if (this.#free === 0) await this.#turn(limitMs);
    else this.#free--;
    const pool = this.#pool;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        this.#discard(pool, 0);
        reject(new StatementTimeout(`no reply from the database within ${limitMs} ms`));
      }, limitMs);
    });
    try {
      return await Promise.race([f(pool), late]);
    } catch (error) {
      // Statements on its other connections may still be answered.
      if (isDisconnect(error)) this.#discard(pool, this.limitMs / 1000);
      throw error;
    } finally {
      clearTimeout(timer);
      const [next] = this.#waiting;
      if (next) next();
      else this.#free++;
    }
  }

  /** Waits until another call hands on its connection, first come first served. */
  async #turn(limitMs: number): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      const next = () => {
        this.#waiting.delete(next);
        clearTimeout(timer);
        resolve();
      };
      const timer = setTimeout(() => {
        this.#waiting.delete(next);
        reject(new StatementTimeout(`no connection to the database was free for ${limitMs} ms`));
      }, limitMs);
      this.#waiting.add(next);
    });
  }

  /**
   * Not once more on another connection: a pooler that carries prepared statements has one for all
   * clients that send the same text, so that it would be refused again.
   */
  #prepareNoMore(error: unknown): void {
    if (!this.#prepare) return; // another call was faster
    this.#prepare = false;
    this.#discard(this.#pool, this.limitMs / 1000);
    const facts = { error: describe(error) };
    getLogger(["siding", "db"]).warn("statements are not prepared from here on: {error}", facts);
  }

  #discard(pool: Pool, graceS: number): void {
    if (this.#pool === pool) this.#pool = this.#open();
    pool.end({ timeout: graceS }).catch(() => {});
  }

  /** Closes the connections; what is still under way has `graceS` seconds. */
  async close(graceS = 1): Promise<void> {
    await this.#pool.end({ timeout: graceS });
  }
}

/** The SQLSTATE of an error that Postgres sent, or the driver's code, else "". */
export function codeOf(error: unknown): string {
  return error instanceof Error && "code" in error ? String(error.code) : "";
}

/**
 * Whether a statement was refused because of how it was prepared, before it did anything: what was
 * prepared is not there on this server (26000), something else is (42P05, or 08P01 for its
 * parameters), or a table has changed since (0A000). The driver repeats the first and the last by
 * itself, once, and in vain within a transaction and where the pooler shares what is prepared.
 */
function isPreparedAmiss(error: unknown): boolean {
  const message = error instanceof Error ? error.message : "";
  return /^(26000|42P05)$/.test(codeOf(error)) ||
    (codeOf(error) === "08P01" && message.startsWith("bind message")) ||
    (codeOf(error) === "0A000" && message.startsWith("cached plan"));
}

/** What a pooler does not take, with the setting and the rule; null where it is none of that. */
export function poolerMistake(error: unknown): string | null {
  const refused = /unsupported startup parameter(?: in options)?: (\S+)/;
  const parameter = error instanceof Error && codeOf(error) === "08P01" &&
    refused.exec(error.message)?.[1];
  if (parameter) {
    return `a pooler takes no ${parameter} at the start of a connection: leave it out of ` +
      `DATABASE_URL, and set such limits for the role (\`deno task migrate --limit-role\`)`;
  }
  if (!isPreparedAmiss(error)) return null;
  return codeOf(error) === "0A000"
    ? "a table has changed since this was prepared, and a pooler keeps what was prepared: " +
      "until it connects anew, SIDING_PREPARE=false or ?prepare=false in DATABASE_URL does without"
    : "the pooler carries no prepared statements: set SIDING_PREPARE=false, or ?prepare=false in " +
      "DATABASE_URL (PgBouncer carries them from 1.21 on, with max_prepared_statements above 0)";
}

/** Whether the connection is gone: lost, refused, or ended by the server (57P01 to 57P05, 25P03). */
export function isDisconnect(error: unknown): boolean {
  if (poolerMistake(error)) return false;
  const network = /^(CONNECT|ECONN|EPIPE|ETIMEDOUT|E(HOST|NET)(UNREACH|DOWN)|ENOTFOUND|EAI_)/;
  return error instanceof StatementTimeout || network.test(codeOf(error)) ||
    /^(08|57P0|25P03)/.test(codeOf(error)) ||
    (error instanceof Error && "syscall" in error && error.syscall === "connect");
}

/**
 * Whether the same statement may succeed later: the connection or the server is at fault, or
 * another transaction was in the way, and not the statement.
 */
export function isTransient(error: unknown): boolean {
  return isDisconnect(error) || /^(53|57|40|55P03|25006|58)/.test(codeOf(error));
}

/**
 * Repeats statements that the connection or the server failed, with growing pauses, for at most
 * `limitMs` or until `signal` is aborted.
 *
 * @param again which errors another try may not meet
 */
export function patient(
  db: Via,
  signal: AbortSignal,
  limitMs = 600_000,
  again: (error: unknown) => boolean = isTransient,
): Via {
  return {
    async run(f) {
      const endMs = performance.now() + limitMs;
      for (let round = 0;; round++) {
        signal.throwIfAborted();
        // A call that waits for a connection, or for a reply, does not keep a caller that gave up.
        let onAbort = () => {};
        const aborted = new Promise<never>((_, reject) => {
          onAbort = () => reject(signal.reason);
          signal.addEventListener("abort", onAbort);
        });
        try {
          return await Promise.race([db.run(f), aborted]);
        } catch (error) {
          if (signal.aborted || !again(error) || performance.now() > endMs) throw error;
          await pause(Math.min(5000, 100 * 2 ** round), signal);
        } finally {
          signal.removeEventListener("abort", onAbort);
        }
      }
    },
  };
}

/** Waits for what is due already: whatever else ends in the same moment has done so after it. */
export const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

/** Waits `ms`, or until one of the signals is aborted. */
export async function pause(ms: number, ...signals: AbortSignal[]): Promise<void> {
  if (signals.some((signal) => signal.aborted)) return;
  let done = () => {};
  await new Promise<void>((resolve) => {
    const timer = setTimeout(resolve, ms);
    done = () => (clearTimeout(timer), resolve());
    for (const signal of signals) signal.addEventListener("abort", done);
  });
  for (const signal of signals) signal.removeEventListener("abort", done);
}

/** One line about whatever was thrown, without a connection string or parameters. */
export function describe(error: unknown): string {
  try {
    if (!(error instanceof Error)) return String(error);
    const code = codeOf(error);
    // An AggregateError (both addresses of a host refused) has an empty message of its own.
    const message = error.message
      ? String(error.message)
      : error instanceof AggregateError
      ? String(error.errors[0]?.message)
      : error.name;
    const coded = code && !/^SD/.test(code) && !message.includes(code)
      ? `${message} (${code})`
      : message;
    return [coded, poolerMistake(error)].filter(Boolean).join(": ")
      .replace(/postgres(ql)?:\/\/.*/g, "postgres://…");
  } catch {
    return "something was thrown that says nothing"; // an object that cannot become a string
  }
}

/**
 * What Postgres cannot hold in a JSON value: a NUL character or half a surrogate pair.
 *
 * @returns a message that names the place, or null when there is none
 */
export function unstorable(value: unknown, place: string): string | null {
  if (typeof value === "string") {
    if (value.includes("\0")) return `${place} contains a NUL character (\\u0000)`;
    return value.isWellFormed() ? null : `${place} contains half of a surrogate pair`;
  }
  if (typeof value !== "object" || value === null) return null;
  for (const [key, item] of Object.entries(value)) {
    const found = unstorable(key, `a key of ${place}`) ??
      unstorable(item, Array.isArray(value) ? `${place}[${key}]` : `${place}.${key}`);
    if (found) return found;
  }
  return null;
}

/** Text as a column takes it: no NUL, no lone surrogate, and at most `most` bytes of UTF-8. */
export function cut(text: string, most: number): string {
  const clean = text.replaceAll("\0", "\uFFFD").toWellFormed();
  const bytes = new TextEncoder().encode(clean);
  if (bytes.length <= most) return clean;
  // A character cut in two decodes to one replacement character, which takes as much as it may.
  return new TextDecoder().decode(bytes.subarray(0, most - 3)).replace(/\uFFFD$/, "") + "…";
}

/** The database needs newer code, or has no tables of Siding's. */
export class SchemaMismatch extends Error {
  override name = "SchemaMismatch";
}

/**
 * Refuses a database that this code cannot run on: one whose migrations say that they need newer
 * code, or one with none.
 *
 * @returns how many migrations it is behind (0: none); the code runs, as far as it needs no more.
 */
export async function checkSchema(sql: Sql): Promise<number> {
  const [there] = await sql`select to_regclass(${`"${schema}".migrations`}) is not null as yes`;
  if (!there.yes) {
    throw new SchemaMismatch(
      `there are no tables in schema "${schema}" of this database: run \`deno task migrate\` first`,
    );
  }
  const [{ floor, newest }] = await sql`
    select coalesce(max(floor), 0) as floor, coalesce(max(number), 0) as newest
    from ${sql(schema)}.migrations`;
  if (floor > CODE_MIGRATION) {
    throw new SchemaMismatch(
      `this database needs code that knows migration ${floor}; this code knows migrations up to ` +
        `${CODE_MIGRATION}: deploy newer code`,
    );
  }
  return Math.max(0, CODE_MIGRATION - newest);
}

/** The transaction of a {@linkcode withQueueLock} is gone; nothing more is sent on its handle. */
export class LockLost extends Error {
  override name = "LockLost";
}

/**
 * The outcome of `result`, or none ever once `lost()`: the driver would end the transaction with a
 * rollback, on a connection that it does not have any more (seen: an uncaught TypeError, which
 * ends the process). It rejects the transaction by itself when the connection closes.
 */
function settledUnless<T>(lost: () => boolean, result: Promise<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    result.then((value) => lost() || resolve(value), (error) => lost() || reject(error));
  });
}

/**
 * Runs `f` in a transaction that holds the queue's lock, in turn with the claims of a queue that
 * claims by `lock`. Everything `f` sends goes through the handle it is given.
 *
 * A transaction of several statements has two dangers, which this bounds. A client that freezes
 * holds the lock for all: the server ends the session after `limitS` seconds of either waiting or
 * working. A connection that dies takes the transaction along, but the driver would run the next
 * statement outside it, on another connection (porsager/postgres #1216): the handle refuses it.
 *
 * @param limitS seconds that one statement, or one pause between two, may take at the most
 */
export async function withQueueLock<T>(
  sql: Pool,
  queue: string,
  f: (sql: Sql) => Promise<T>,
  limitS = 10,
): Promise<T> {
  let lost = false;
  const guard = (tx: postgres.TransactionSql) =>
    new Proxy(tx, {
      apply(target, self, args) {
        if (lost) throw new LockLost(`the transaction that held queue "${queue}" is gone`);
        const query = Reflect.apply(target, self, args);
        // At the moment of the failure, and not when a promise of it resolves: by then the caller
        // may have sent its next statement.
        const reject = query?.reject;
        if (typeof reject === "function") {
          query.reject = (error: unknown) => {
            if (isDisconnect(error)) lost = true;
            return reject.call(query, error);
          };
        }
        return query;
      },
    });
  try {
    return await sql.begin(async (tx) => {
      await tx.unsafe(
        `set local statement_timeout = '${limitS}s';` +
          `set local idle_in_transaction_session_timeout = '${limitS}s'`,
      );
      await tx`select ${tx(schema)}.lock_queue(${queue})`;
      return await settledUnless(() => lost, f(guard(tx)));
    }) as T;
  } finally {
    lost = true;
  }
}
