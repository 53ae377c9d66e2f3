/** The queue's own rows: leases that ran out, claim settings, what nobody works, migrations, others' dequeues. */
import { checkSchema, CODE_MIGRATION, describe, isDisconnect } from "../../db.ts";
import { schema, SchemaMismatch } from "../../db.ts";
import {
  duration,
  type Finding,
  literal,
  number,
  plural,
  type Reader,
  shortened,
} from "./reader.ts";
import type { Watched } from "./watch.ts";

/** A process not seen for so long is gone: three heartbeats. */
const SILENT_S = 45;
/** Workers take a job back within some 30 s of its lease; so long after it nobody does. */
const PAST_LEASE_S = 120;

/** The tables are there, and their migrations are those that this code knows. */
export async function migrations(reader: Reader): Promise<Finding[]> {
  try {
    const behind = await reader.db.run(checkSchema);
    if (behind === 0) return [];
    return [{
      code: "migrations_behind",
      severity: "critical",
      title: `The database lacks ${plural(behind, "migration")} of this code`,
      figures: { missing: behind, newest_of_code: CODE_MIGRATION },
      remedy: "deno task migrate",
    }];
  } catch (error) {
    if (isDisconnect(error)) throw error;
    if (!(error instanceof SchemaMismatch)) {
      reader.own.rollbacks++;
      reader.skip("the migrations", describe(error));
      return [];
    }
    return [{
      code: "schema_mismatch",
      severity: "critical",
      title: "This code and this database do not fit",
      figures: { schema, newest_of_code: CODE_MIGRATION },
      remedy: error.message,
    }];
  }
}

/** Jobs that run past their lease: nobody takes them back. */
export async function pastLease(reader: Reader): Promise<Finding[]> {
  const row = await reader.row<
    { jobs: number; past_s: number; queues: string[]; first: string; workers: number }
  >(
    "jobs past their lease",
    `select count(*)::integer as jobs, coalesce(jsonb_agg(distinct queue), '[]') as queues,
       extract(epoch from now() - min(lease_until))::float8 as past_s, min(id)::text as first,
       (select count(*)::integer from "${schema}".processes where role = 'worker'
          and seen_at > now() - ${SILENT_S} * interval '1 second') as workers
     from (select id, queue, lease_until from "${schema}".jobs
           where status = 'running' and lease_until < now() - ${PAST_LEASE_S} * interval '1 second'
           limit 10000) past`,
  );
  if (!row?.jobs) return [];
  const { jobs, past_s, workers, first, queues } = row;
  return [{
    code: "past_lease",
    severity: "critical",
    title: `${plural(jobs, "job")} still ${jobs === 1 ? "runs" : "run"} by name, ` +
      `${duration(past_s)} past ${jobs === 1 ? "its" : "the first one's"} lease: nobody takes ` +
      `${jobs === 1 ? "it" : "them"} back`,
    figures: { jobs, longest_past_s: Math.round(past_s), first_job: first, queues, workers },
    remedy: workers === 0
      ? "No worker is alive: start one (deno task worker), or run deno task recover once."
      : "Workers are alive and do not recover: look into their logs, and run deno task recover once.",
  }];
}

/** Workers are far more than places when they are so many times as many, and so many at all. */
const CLAIMERS_A_PLACE = 4;
const CLAIMERS = 8;
/** Taking turns is felt from about here. */
const JOBS_PER_S = 50;
/** Of so many finished jobs at most is it seen how many a queue does. */
const MOST_FINISHED = 50_000;

interface QueueRow {
  name: string;
  claim: string;
  max_running: number | null;
  workers: number;
  waits: boolean;
  finished: number;
  /** Since the watch began. */
  seconds: number;
}

/** Queues whose claim setting does not fit their limits, or who claims. */
export async function claimSettings(reader: Reader, { since }: Watched): Promise<Finding[]> {
  const rows = await reader.rows<QueueRow>(
    "the queues' settings",
    `with finished as materialized (
       select queue from "${schema}".jobs where status in ('done', 'failed', 'cancelled')
         and finished_at > ${literal(since)} limit ${MOST_FINISHED}
     )
     select q.name, q.claim, q.max_running,
       (select count(*)::integer from "${schema}".processes p
        where p.role = 'worker' and p.seen_at > now() - ${SILENT_S} * interval '1 second'
          and (p.queues is null or q.name = any(p.queues))) as workers,
       exists (select from "${schema}".jobs j
               where j.queue = q.name and j.status = 'queued') as waits,
       (select count(*)::integer from finished f where f.queue = q.name) as finished,
       extract(epoch from now() - ${literal(since)}::timestamptz)::float8 as seconds
     from "${schema}".queues q where q.claim <> 'skip_locked' and not q.paused
     order by 1 limit 1000`,
  );
  return (rows ?? []).flatMap((row) => {
    const { name, claim, max_running, workers, waits } = row;
    const jobsPerS = Number((row.finished / row.seconds).toFixed(1));
    const figures = { queue: name, claim, max_running, workers, jobs_per_s: jobsPerS };
    if (max_running === null && jobsPerS >= JOBS_PER_S) {
      return [{
        code: "claims_in_turns_for_nothing",
        severity: "warning" as const,
        title: `Queue "${name}" has no max_running and is claimed by ${claim}: at ` +
          `${number(jobsPerS)} jobs a second its claims ` +
          (claim === "lock" ? "take turns" : "undo each other") + " for nothing",
        figures,
        remedy:
          `update "${schema}".queues set claim = 'skip_locked' where name = '${name}'; unless ` +
          "other writes of yours count on the queue's lock (withQueueLock).",
      }];
    }
    const far = max_running !== null && workers >= CLAIMERS &&
      workers > CLAIMERS_A_PLACE * max_running;
    if (!far || !waits) return [];
    return [{
      code: "more_claimers_than_places",
      severity: "warning" as const,
      title: `${number(workers)} workers claim from queue "${name}", of which ` +
        `${number(max_running!)} jobs may run at once`,
      figures,
      remedy: `Let a few workers serve it (deno task worker --queues ${name} --concurrency ` +
        `${max_running}), and the others the other queues; or raise its max_running.`,
    }];
  });
}

/** A deploy may leave a kind without workers for a moment. */
const UNSERVED_S = 30;

/** Queues with due jobs that no live worker serves. */
export async function unserved(reader: Reader): Promise<Finding[]> {
  const row = await reader.row<{
    workers: number;
    waiting: { queue: string; kind: string; apart: string | null; oldest_wait_s: number }[];
  }>(
    "what waits, and who serves it",
    `select workers, waiting from "${schema}".service_state(${SILENT_S})`,
  );
  const left = (row?.waiting ?? []).filter(({ apart, oldest_wait_s }) =>
    apart === "not_served" && oldest_wait_s > UNSERVED_S
  );
  return left.map(({ queue, kind, oldest_wait_s }) => ({
    code: "unserved",
    severity: "critical",
    title: `Jobs of kind "${kind}" in queue "${queue}" have been due for ` +
      `${duration(oldest_wait_s)}, and no live worker serves them`,
    figures: { queue, kind, oldest_wait_s: Math.round(oldest_wait_s), workers: row!.workers },
    remedy: row!.workers === 0
      ? "No worker is alive: deno task worker."
      : `Start a worker that serves it: its --queues and --kinds must name them, or nothing, and its jobs.ts ` +
        `must have the kind.`,
  }));
}

/** A statement that was sent fewer times is somebody's look, and no queue. */
const CALLS = 10;
const MOST_STATEMENTS = 1000;

/** Whether a statement picks rows to work on while others may pick the same, and does not skip theirs. */
export function picksUnskipped(statement: string): boolean {
  const text = statement.toLowerCase().replace(/--.*$/gm, " ").replace(/\/\*.*?\*\//gs, " ")
    .replace(/'(?:[^']|'')*'/g, "''").replace(/\s+/g, " ");
  if (/\bskip locked\b/.test(text)) return false;
  const limited = /\b(limit|fetch (first|next))\b/;
  if (/\bfor (no key )?update\b/.test(text) && limited.test(text)) return true;
  // update … where id = (select … limit …), and delete … returning in the same way
  const chosen =
    /\bwhere\b.*(=|\bin|\bany) ?(\( ?)+(array ?\( ?)?select\b.*\b(limit|fetch (first|next))\b/;
  // with next as (select … limit …) update … from next
  const named = /^ ?with\b.*\(\s*select\b.*\b(limit|fetch (first|next))\b.*\) ?(update|delete)\b/;
  const deletes = /\bdelete from\b/.test(text);
  const changes = /\bupdate\b/.test(text) || (deletes && /\breturning\b/.test(text));
  return changes && (chosen.test(text) || named.test(text));
}

/** Dequeue statements of this database without skip locked, where pg_stat_statements is there. */
export async function dequeues(reader: Reader): Promise<Finding[]> {
  const there = await reader.row<{ place: string }>(
    "pg_stat_statements",
    `select n.nspname as place from pg_extension e join pg_namespace n on n.oid = e.extnamespace
     where e.extname = 'pg_stat_statements'`,
  );
  if (!there) return [];
  // Without those inside functions: the queue's own have the order that they need from their function.
  const rows = await reader.rows<{ query: string; calls: number; mean_ms: number }>(
    "pg_stat_statements",
    `select query, calls::float8 as calls, mean_exec_time as mean_ms
     from "${there.place}".pg_stat_statements
     where dbid = (select oid from pg_database where datname = current_database()) and toplevel
       and calls >= ${CALLS} and query ~* '\\m(limit|fetch)\\M' and query ~* '\\m(update|delete)\\M'
     order by calls desc limit ${MOST_STATEMENTS}`,
  );
  return (rows ?? []).filter(({ query }) => picksUnskipped(query)).slice(0, 20).map((row) => ({
    code: "dequeue_without_skip_locked",
    severity: "warning",
    title: `A statement picks rows to work on and does not skip those that others have locked: ` +
      shortened(row.query, 120),
    figures: {
      query: shortened(row.query, 1000),
      calls: row.calls,
      mean_ms: Number(row.mean_ms.toFixed(3)),
    },
    remedy:
      "Callers at once pick the same rows, wait for each other, and all but one come back empty. Pick " +
      "them by select … for update skip locked, in the order of a partial index.",
  }));
}
