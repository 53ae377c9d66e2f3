/** What the peers share: their caller's own transaction, and batches. */
import type pg from "pg";

/** A row of the caller's own, and what `enqueue` sends on the same connection, or neither. */
export async function transaction<T>(
  pool: pg.Pool,
  enqueue: (client: pg.PoolClient) => Promise<T>,
): Promise<T> {
  const client = await pool.connect();
  try {
    await client.query("begin");
    await client.query("insert into bench_rows (note) values ($1)", [
      "a row of the caller's own",
    ]);
    const enqueued = await enqueue(client);
    await client.query("commit");
    return enqueued;
  } catch (error) {
    await client.query("rollback");
    throw error;
  } finally {
    client.release();
  }
}

/** Calls `add` with sizes that together are `jobs`. */
export async function inBatches(
  jobs: number,
  size: number,
  add: (n: number) => Promise<unknown>,
): Promise<void> {
  for (let left = jobs; left > 0; left -= size) await add(Math.min(left, size));
}
