/**
 * Requests to paid services: stored before they are sent, their ids after (I7). They are rows of
 * their own, which outlast their jobs.
 */
import { schema, type Sql } from "./db.ts";
import { claimedColumns } from "./claims.ts";
import { type Claimed, type Job, list, names } from "./queue.ts";

/** What {@linkcode intend} found: `left_s`: for how long the job is surely the worker's. */
export interface Intent {
  /** One for the job's life; null: it is to be cancelled, or its lease has run out. */
  key: string | null;
  /** The request's id, if it has come meanwhile. */
  request_id: string | null;
  left_s: number;
  cancel: boolean;
}

/** Stores, before a paid request is sent, that it will be (I7). Null: it is somebody else's job. */
export async function intend(sql: Sql, worker: string, job: Claimed): Promise<Intent | null> {
  const [intent] = await sql<Intent[]>`
    select * from ${sql(schema)}.intend(${worker}, ${job.id}, ${job.attempt})`;
  return intent ?? null;
}

/**
 * Stores a paid request's id, by its key and whoever has the job by now: the one write that is not
 * fenced, from null to an id only. A job that waits in review for it goes back in line, to resume.
 *
 * @returns false when there is no request with this key, or it has another id
 */
export async function saveRequest(sql: Sql, key: string, requestId: string): Promise<boolean> {
  const [{ saved }] = await sql`select ${sql(schema)}.save_request(${key}, ${requestId}) as saved`;
  return saved;
}

/** Jobs in review whose service is to be asked for their request now: each at most every `everyS`. */
export async function toLookUp(
  sql: Sql,
  kinds: readonly string[],
  everyS: number,
  most = 20,
): Promise<Job[]> {
  return await list(sql<Job[]>`
    select ${sql.unsafe(claimedColumns)}
    from ${sql(schema)}.to_look_up(${names(kinds)}::text[], ${most}, ${everyS}) j`);
}

/** Notes what came of asking a service for a request, for people to read. */
export async function noteLookUp(sql: Sql, key: string, what: string): Promise<void> {
  await sql`update ${sql(schema)}.requests set look_up = ${what} where key = ${key}`;
}
