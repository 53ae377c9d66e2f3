/**
 * What the dashboard shows. Each statement here reads a bounded number of rows, however many jobs and
 * looks there are: it stops at so many, and what was not counted to its end is said to be more.
 */
import { type PoolSeconds, poolSeconds } from "../costs.ts";
import { schema, type Sql } from "../db.ts";
import { list } from "../queue.ts";

/** The last finished jobs, and the last failed ones, that are read. */
export const MOST_FINISHED = 10_000;
export const MOST_FAILED = 1000;
/** The last looks of a pool: a day of them, at one each 30 s. And those that cost is reckoned by. */
export const MOST_LOOKS = 2880;
const MOST_COST_LOOKS = 20_000;
const MOST_PROCESSES = 200;

/** A worker, controller or site that reports or did so of late. */
export interface Process {
  role: "worker" | "controller" | "web";
  pool: string;
  name: string;
  version: string;
  concurrency: number;
  running: number;
  seen_s: number;
  silent: boolean;
}

/** Those there are; `silentS`: seconds without a word after which one is silent. */
export const processes = (sql: Sql, silentS: number): Promise<Process[]> =>
  list(sql<Process[]>`
    select role, pool, name, version, concurrency, running,
      extract(epoch from now() - seen_at)::float8 as seen_s,
      seen_at < now() - ${silentS} * interval '1 second' as silent
    from (select * from ${
    sql(schema)
  }.processes order by seen_at desc limit ${MOST_PROCESSES}) newest
    order by role desc, pool, id`);

/** The jobs of a kind that finished within the hour. Seconds; null when none was ever claimed. */
export interface Lately {
  kind: string;
  jobs: number;
  failed: number;
  cancelled: number;
  wait_p50_s: number | null;
  wait_p95_s: number | null;
  run_p50_s: number | null;
  run_p95_s: number | null;
  /** Over all kinds: what was read, and how far back that goes. */
  read: number;
  read_s: number;
}

/** The kinds whose jobs finished within the hour, of the newest {@linkcode MOST_FINISHED}. */
export const lately = (sql: Sql): Promise<Lately[]> =>
  list(sql<Lately[]>`
    with finished as materialized (
      select kind, status, finished_at, extract(epoch from finished_at - claimed_at)::float8 as run_s,
        greatest(0, extract(epoch from claimed_at - due_at)::float8) as wait_s
      from ${sql(schema)}.jobs
      where status in ('done', 'failed', 'cancelled') and finished_at > now() - interval '1 hour'
      order by finished_at desc limit ${MOST_FINISHED}
    ),
    kinds as (
      select kind, count(*)::integer as jobs,
        (count(*) filter (where status = 'failed'))::integer as failed,
        (count(*) filter (where status = 'cancelled'))::integer as cancelled,
        to_jsonb(percentile_disc('{0.5,0.95}'::float8[]) within group (order by wait_s)
          filter (where wait_s is not null)) as wait_s,
        to_jsonb(percentile_disc('{0.5,0.95}'::float8[]) within group (order by run_s)
          filter (where run_s is not null)) as run_s
      from finished group by kind
    )
    select kind, jobs, failed, cancelled, (wait_s -> 0)::float8 as wait_p50_s,
      (wait_s -> 1)::float8 as wait_p95_s, (run_s -> 0)::float8 as run_p50_s,
      (run_s -> 1)::float8 as run_p95_s, total.read,
      case when total.read < ${MOST_FINISHED} then 3600 else total.read_s end as read_s
    from kinds cross join (
      select count(*)::integer as read, greatest(1, extract(epoch from now() - min(finished_at)))::float8
        as read_s from finished) total
    order by jobs desc, kind limit 100`);

/** Failed jobs of a kind that say the same. */
export interface Failures {
  kind: string;
  message: string;
  jobs: number;
  last_id: string;
  last_at: Date;
}

/** Of the newest {@linkcode MOST_FAILED} failed jobs, the messages, the newest first. The order as in listing.ts. */
export const failures = (sql: Sql): Promise<Failures[]> =>
  list(sql<Failures[]>`
    select kind, left(error, 300) as message, count(*)::integer as jobs, max(id)::text as last_id,
      max(finished_at) as last_at
    from (
      select j.id, kind, error, finished_at from ${
    sql(schema)
  }.jobs j where j.status = any(array['failed'])
      order by j.status desc, j.id desc limit ${MOST_FAILED}
    ) newest
    group by kind, left(error, 300) order by max(id) desc limit 30`);

/** The pools that have looks, by name; at most 50. Found one after the other, not by reading them all. */
export async function pools(sql: Sql): Promise<string[]> {
  const rows = await sql<{ pool: string }[]>`
    with recursive found as (
      select min(pool) as pool, 1 as n from ${sql(schema)}.looks
      union all
      select (select min(l.pool) from ${sql(schema)}.looks l where l.pool > f.pool), n + 1
      from found f where f.pool is not null and n < 50
    )
    select pool from found where pool is not null order by pool`;
  return rows.map((row) => row.pool);
}

/** A controller's look, as charts and tables have it. What was not seen is null, never 0. */
export interface Seen {
  number: string;
  /** Seconds since 1970. */
  at_s: number;
  age_s: number;
  waiting: number | null;
  running: number | null;
  workers: number | null;
  busy: number | null;
  replicas: number | null;
  configured: number | null;
  wanted: number | null;
  code: string;
  reason: string;
  alarms: string[];
  act: string;
  error: string | null;
}

/** The looks of a pool within `sinceS`, the oldest first, the newest {@linkcode MOST_LOOKS} of them. */
export const seen = (sql: Sql, pool: string, sinceS: number): Promise<Seen[]> =>
  list(sql<Seen[]>`
    select number::text, extract(epoch from at)::float8 as at_s,
      extract(epoch from now() - at)::float8 as age_s, work.waiting, work.running,
      (seen #>> '{queue,workers,reporting}')::integer as workers,
      (seen #>> '{queue,workers,busy}')::integer as busy,
      (seen #>> '{platform,running}')::integer as replicas,
      (seen #>> '{platform,configured}')::integer as configured,
      wanted, code, reason, to_jsonb(alarms) as alarms, act, error
    from (
      select * from ${sql(schema)}.looks l where pool = ${pool}
      order by l.number desc limit ${MOST_LOOKS}
    ) newest
    -- No row, and so null, where the queue was not seen.
    left join lateral (
      select coalesce(sum((w ->> 'queued')::integer), 0)::integer as waiting,
        coalesce(sum((w ->> 'running')::integer), 0)::integer as running
      from jsonb_array_elements(case when jsonb_typeof(seen #> '{queue,work}') = 'array'
                                  then seen #> '{queue,work}' else '[]' end) w
    ) work on jsonb_typeof(seen #> '{queue,work}') = 'array'
    where at > now() - ${sinceS} * interval '1 second'
    order by newest.number`);

/** What the replicas of each pool did in the last `sinceS` seconds. */
export const costs = (sql: Sql, sinceS: number): Promise<PoolSeconds[]> =>
  list(sql<PoolSeconds[]>`
    select pool, seen_s, replica_s, busy_s
    from (${poolSeconds(sql, sinceS, MOST_COST_LOOKS)}) pools order by pool limit 50`);
