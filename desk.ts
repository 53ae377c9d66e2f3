/**
 * The review desk: jobs whose paid request may have been sent without our knowing, and what a
 * person, or the service asked by the request's key, can say of them; and trying failed jobs again.
 *
 * Each step is one SQL function in migrations/. One that does not fit the job's state is refused
 * with a message that names that state.
 */
import { schema, type Sql } from "./db.ts";
import { type JobView, list, names, Refused, refusing } from "./queue.ts";

/** A job in review. */
export interface Review extends Pick<JobView, "id" | "queue" | "kind" | "owner" | "payload"> {
  attempt: number;
  /** Why it is here. */
  error: string | null;
  request_key: string;
  /** When its request may have been sent. */
  sent_at: Date;
  /** When the service was last asked for it, and what came of that. */
  looked_up_at: Date | null;
  look_up: string | null;
}

/** The jobs in review after the job `after`, by id. */
export async function reviews(sql: Sql, most = 100, after = "0"): Promise<Review[]> {
  return await list(sql<Review[]>`
    select j.id::text, j.queue, j.kind, j.owner, j.payload, j.attempt, j.error, j.request_key,
      j.sent_at, r.looked_up_at, r.look_up
    from ${sql(schema)}.jobs j left join ${sql(schema)}.requests r on r.key = j.request_key
    where j.status = 'review' and j.id > ${after} order by j.id limit ${most}`);
}

/** Its request was sent, and has this id at the service: the job goes on from there. @throws Refused */
export async function resume(sql: Sql, id: string, requestId: string): Promise<void> {
  await refusing(sql`select ${sql(schema)}.resume(${id}, ${requestId})`);
}

/** Its request is to be sent, with the key it always had. @throws Refused */
export async function requeue(sql: Sql, id: string): Promise<void> {
  await refusing(sql`select ${sql(schema)}.requeue(${id})`);
}

/** It has failed, and why. @throws Refused */
export async function failReview(sql: Sql, id: string, reason: string): Promise<void> {
  await refusing(sql`select ${sql(schema)}.fail_review(${id}, ${reason})`);
}

/** Which failed jobs to try again: those named, or all that fit what is given. */
export interface RetryFilter {
  ids?: readonly string[];
  kind?: string;
  /** A part of their error. */
  error?: string;
  /** When they failed: from, and up to but not including. */
  since?: Date;
  until?: Date;
  /** Also those whose paid request was, or may have been, sent: it is sent again, and charged again. */
  payAgain?: boolean;
}

export interface Retried {
  id: string;
  /** The new job. */
  new_id: string;
  /** False when an unfinished job had its unique key already: `new_id` is that job's. */
  created: boolean;
}

/**
 * Tries failed jobs again, as new jobs, each only once; a paid request that has an id is resumed
 * and not paid for again. The oldest failures first.
 *
 * @throws Refused when one that is named cannot be, or a queue is full: then none is
 */
export async function retry(sql: Sql, filter: RetryFilter, most = 100): Promise<Retried[]> {
  const { ids, kind, error, since, until, payAgain = false } = filter;
  if (!ids && !kind && !error && !since && !until) {
    throw new Refused("which jobs to try again is not said", "SD422");
  }
  return await refusing(list(sql<Retried[]>`
    select id::text, new_id::text, created from ${sql(schema)}.retry(
      ${ids ? names(ids) : null}::bigint[], ${kind ?? null}, ${error ?? null},
      ${since?.toISOString() ?? null}::timestamptz, ${until?.toISOString() ?? null}::timestamptz,
      ${most}, ${payAgain})`));
}
