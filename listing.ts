/**
 * Jobs as people look for them. Each statement here reads a bounded number of rows, however many
 * jobs there are: there is no count over all, and a page is found by the id before it.
 */
import { schema, type Sql } from "./db.ts";
import { type JobView, list, type Status } from "./queue.ts";

/** A job in a list: without what can be large. */
export interface ListedJob extends
  Pick<
    JobView,
    | "id"
    | "queue"
    | "kind"
    | "owner"
    | "status"
    | "attempt"
    | "stage"
    | "progress"
    | "error"
    | "created_at"
    | "due_at"
    | "claimed_at"
    | "finished_at"
  > {}

export interface JobFilter {
  owner?: string;
  status?: Status;
  kind?: string;
  queue?: string;
}

export interface Page {
  /** The newest first. */
  items: ListedJob[];
  /** Where to go on, as `before`; null at the end. A page may be short, even empty, and not the last. */
  next: string | null;
}

/** Rows that one page reads at the most. */
export const WINDOW = 10_000;
/** The order of each state's partial index, by which that index is the one to be read. */
const unfinishedInOrder = {
  scheduled: "j.due_at",
  queued: "j.queue, j.priority desc, j.due_at, j.id",
  running: "j.worker_id",
  review: "j.id",
};
type Unfinished = keyof typeof unfinishedInOrder;

/**
 * One page of jobs.
 *
 * @param before a job's id: the page has older ones; the newest when absent
 * @param most jobs on it, up to 1000
 */
export async function listJobs(
  sql: Sql,
  filter: JobFilter = {},
  { before, most = 50 }: { before?: string; most?: number } = {},
): Promise<Page> {
  const { owner = null, status = null, kind = null, queue = null } = filter;
  const s = sql(schema);
  const end = before ?? "9223372036854775807";
  const columns = sql`j.id, j.status, j.kind, j.queue, j.owner`;
  // A literal, so that the partial index serves. Of few unfinished jobs all are read, since the
  // newest jobs may all be finished ones; of many the newest jobs have some.
  const literal = status && sql.unsafe(`'${status}'`);
  const unfinished = owner === null && status !== null && status in unfinishedInOrder;
  // Each has an order that one index alone gives: with `=` the planner knows that the order by id is
  // enough, and takes the primary key where it thinks that many rows match (seen: 30% of all), however
  // old they are.
  const newest = owner !== null
    ? sql`
      select ${columns} from ${s}.jobs j
      where j.owner = any(array[${owner}]) and j.id < ${end}
      order by j.owner desc, j.id desc limit ${WINDOW}`
    : status === "failed" || status === "cancelled"
    ? sql`
      select ${columns} from ${s}.jobs j
      where j.status = any(array[${literal!}]) and j.id < ${end}
      order by j.status desc, j.id desc limit ${WINDOW}`
    : sql`
      select ${columns} from ${s}.jobs j where j.id < ${end} order by j.id desc limit ${WINDOW}`;
  const rows = await list(
    sql<(ListedJob & { last: string | null; scanned: number; all_read: boolean })[]>`
    with few as materialized (
      ${
      unfinished
        ? sql`
          select ${columns} from ${s}.jobs j where j.status = ${literal!}
          order by ${sql.unsafe(unfinishedInOrder[status as Unfinished])} limit ${WINDOW}`
        : sql`select ${columns} from ${s}.jobs j where false`
    }
    ),
    range as materialized (
      select * from few j where (select count(*) from few) < ${WINDOW} and j.id < ${end}
      union all
      select * from (${newest}) newest
      where ${!unfinished} or (select count(*) from few) = ${WINDOW}
    ),
    found as materialized (
      select r.id from range r
      where (${status}::text is null or r.status = ${status}) and (${kind}::text is null or r.kind = ${kind})
        and (${queue}::text is null or r.queue = ${queue})
      order by r.id desc limit ${most + 1}
    ),
    facts as (
      select min(r.id)::text as last, count(*)::integer as scanned,
        ${unfinished} and (select count(*) from few) < ${WINDOW} as all_read
      from range r
    )
    select f.last, f.scanned, f.all_read, j.id::text, j.queue, j.kind, j.owner, j.status, j.attempt, j.stage,
      j.progress, j.error, j.created_at, j.due_at, j.claimed_at, j.finished_at
    from facts f left join found on true left join ${s}.jobs j on j.id = found.id
    order by j.id desc`,
  );
  const { last, scanned, all_read } = rows[0];
  const items = rows.filter((row) => row.id !== null).slice(0, most)
    .map(({ last: _, scanned: __, all_read: ___, ...job }) => job);
  if (rows.length > most) return { items, next: items.at(-1)!.id };
  return { items, next: !all_read && scanned === WINDOW ? last : null };
}

/** How an attempt that did not end in `done` ended. */
export interface Attempt {
  attempt: number;
  worker: string | null;
  claimed_at: Date | null;
  ended_at: Date;
  outcome: "crashed" | "released" | "snoozed" | "failed" | "cancelled" | "review" | "lost";
  error: string | null;
}

/** The attempts of a job that did not end in `done`, the newest first, at most 100. */
export const attempts = (sql: Sql, jobId: string): Promise<Attempt[]> =>
  list(sql<Attempt[]>`
    select attempt, worker, claimed_at, ended_at, outcome, error from ${sql(schema)}.attempts a
    where job_id = ${jobId} order by a.attempt desc limit 100`);

/** No state of a queue is counted further: so many may be more. */
export const COUNTED_TO = 10_000;
/** Queues that are told of, the first by name. */
export const MAX_QUEUES = 100;

/** A queue's settings, and its unfinished jobs as far as {@linkcode COUNTED_TO}. */
export interface QueueStatus {
  name: string;
  paused: boolean;
  claim: "skip_locked" | "lock" | "repeatable_read";
  max_running: number | null;
  max_waiting: number | null;
  max_per_owner: number | null;
  fair: boolean;
  rate_limit: number | null;
  rate_period_s: number | null;
  scheduled: number;
  queued: number;
  running: number;
  review: number;
  /** How long the longest-waiting of the first in line have been due. */
  oldest_wait_s: number | null;
}

/** The first 100 queues by name. Reads a bounded number of rows. */
export const queueStatus = (sql: Sql): Promise<QueueStatus[]> =>
  list(sql<QueueStatus[]>`
    with few as (
      (select queue, status from ${sql(schema)}.jobs j where status = 'scheduled'
       order by ${sql.unsafe(unfinishedInOrder.scheduled)} limit ${COUNTED_TO})
      union all
      (select queue, status from ${sql(schema)}.jobs j where status = 'running'
       order by ${sql.unsafe(unfinishedInOrder.running)} limit ${COUNTED_TO})
      union all
      (select queue, status from ${sql(schema)}.jobs j where status = 'review'
       order by ${sql.unsafe(unfinishedInOrder.review)} limit ${COUNTED_TO})
    ),
    counted as materialized (
      select queue, (count(*) filter (where status = 'scheduled'))::integer as scheduled,
        (count(*) filter (where status = 'running'))::integer as running,
        (count(*) filter (where status = 'review'))::integer as review
      from few group by queue
    )
    select q.name, q.paused, q.claim, q.max_running, q.max_waiting, q.max_per_owner,
      q.fair, q.rate_limit, q.rate_period_s,
      coalesce(c.scheduled, 0) as scheduled, line.queued, coalesce(c.running, 0) as running,
      coalesce(c.review, 0) as review, line.oldest_wait_s
    from (select * from ${sql(schema)}.queues order by name limit ${MAX_QUEUES}) q
    left join counted c on c.queue = q.name
    cross join lateral (
      select count(*)::integer as queued,
        extract(epoch from now() - min(first.due_at))::float8 as oldest_wait_s
      from (select j.due_at from ${
    sql(schema)
  }.jobs j where j.queue = q.name and j.status = 'queued'
            order by j.priority desc, j.due_at, j.id limit ${COUNTED_TO}) first
    ) line
    order by q.name`);

/** A worker that is alive, or was of late. */
export interface WorkerStatus {
  /** Its boot_id. */
  id: string;
  name: string;
  pool: string;
  version: string;
  state: "busy" | "idle" | "silent";
  running: number;
  concurrency: number;
  /** Null: every queue. */
  queues: string[] | null;
  kinds: string[];
  started_at: Date;
  seen_at: Date;
}

/**
 * The workers that report, the newest first, at most 1000.
 *
 * @param silentS seconds after which one that was not seen counts as silent
 */
export const workerStatus = (sql: Sql, silentS: number): Promise<WorkerStatus[]> =>
  list(sql<WorkerStatus[]>`
    select boot_id::text as id, name, pool, version, running, concurrency, started_at, seen_at,
      to_jsonb(queues) as queues, to_jsonb(kinds) as kinds,
      case when seen_at < now() - ${silentS} * interval '1 second' then 'silent'
           when running > 0 then 'busy' else 'idle' end as state
    from ${sql(schema)}.processes p where role = 'worker' order by p.id desc limit 1000`);
