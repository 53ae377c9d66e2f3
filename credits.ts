/**
 * Credits: what owners have paid in, what their jobs have reserved of it, and what those that are
 * done have captured. The database moves them itself, in the transaction of each change of a job,
 * so that only a deposit is left to be called: see migrations/0002_credits.sql.
 *
 * Amounts come back as strings, as ids do: a sum may be larger than a number can say.
 */
import { schema, type Sql } from "./db.ts";

/** What an owner has just now. The three add up to what was deposited. */
export interface Balance {
  owner: string;
  /** Free to be reserved. */
  balance: string;
  /** Held by unfinished jobs. */
  reserved: string;
  /** Spent on jobs that are done. */
  captured: string;
}

/**
 * Adds credits to an owner's account, which is made if need be; a negative amount takes some back,
 * as far as they are there (else an error with code SD402). Called in the transaction in which the
 * payment is recorded, it happens once.
 *
 * @returns the balance
 */
export async function deposit(sql: Sql, owner: string, amount: number | bigint): Promise<string> {
  if (typeof amount === "number" && !Number.isSafeInteger(amount)) {
    throw new RangeError(`the amount is ${amount}: it must be a whole number that is exact`);
  }
  const [row] = await sql<{ balance: string }[]>`
    select ${sql(schema)}.deposit(${owner}, ${String(amount)}::bigint)::text as balance`;
  return row.balance;
}

/** What an owner has, or null when there is no account. */
export async function balance(sql: Sql, owner: string): Promise<Balance | null> {
  const [row] = await sql<Balance[]>`
    select owner, balance::text, reserved::text, captured::text
    from ${sql(schema)}.balances where owner = ${owner}`;
  return row ?? null;
}

/** Folds at most `most` entries of the ledger into accounts, and waits for none. @returns how many */
export async function fold(sql: Sql, most = 1000): Promise<number> {
  const [row] = await sql<{ n: number }[]>`
    select ${sql(schema)}.fold(${most})::integer as n`;
  return row.n;
}

/** Something that is off; see siding.audit. */
export interface Finding {
  owner: string;
  /** Null: it is about the owner's account. */
  job_id: string | null;
  problem: string;
}

/** Counts all credits anew. @returns what is off: nothing, when all is right */
export async function audit(sql: Sql): Promise<Finding[]> {
  return Array.from(
    await sql<Finding[]>`
      select owner, job_id::text, problem from ${sql(schema)}.audit()`,
  );
}
