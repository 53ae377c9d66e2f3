#!/usr/bin/env -S deno run -A
/**
 * What the queue did of late: jobs by state, how long they waited and ran, the controller's steps,
 * replica-hours and what these cost at Railway's prices.
 *
 *     deno task stats                          # of the last hour
 *     deno task stats --since 7d --json
 *     deno task stats --since 24h --vcpu 4 --gb 3
 *
 * A job counts when it finished in that time; of those not finished all that are there now. The wait
 * goes from the time it was due to its claim, the run from there to its end. A job has the claim of its
 * last attempt only: the wait of one that went back contains the attempts before, and the run of one
 * that a person decided in review, or that was cancelled while it waited once more, contains that.
 *
 * Replica-hours are the controller's looks, each standing until the next one, at most for 120 s. One
 * that did not see the platform, and dry runs, do not count. The price is that of what replicas use,
 * as `simulate` has it: so much while they run a job, as the looks saw them, and so much while they wait.
 *
 * Reads: jobs and looks. Writes nothing.
 *
 * Exit codes: 0 done, also when there is nothing to tell; 1 failure; 2 usage; 3 the database could not
 * be reached.
 */
import * as config from "../config.ts";
import { dollarsOf, type PoolSeconds, poolSeconds, type Prices, usage } from "../costs.ts";
import { checkSchema, Database, schema, type Sql } from "../db.ts";
import { aligned, round } from "../dev/simulation/report.ts";
import type { Status } from "../queue.ts";

/** The last finished jobs that are read, and the last steps that are told, at the most. */
const MOST_JOBS = 100_000;
const MOST_STEPS = 1000;

const UNIT_S: Record<string, number> = { s: 1, m: 60, h: 3600, d: 86_400 };
const MAX_DAYS = 366;
const secondsOf = (duration: string) => parseInt(duration) * UNIT_S[duration.slice(-1)];

const program = {
  name: "stats",
  summary: "Jobs of late: states, waits, runs; the controller's steps, replica-hours, dollars.",
  example: "deno task stats --since 24h",
  exits: { 0: "done, also when there is nothing to tell" },
};
const { databaseUrl, prepare, statementLimitMs } = config.settings;
const spec = {
  ...{ databaseUrl, prepare, statementLimitMs },
  since: config.flag({
    parse: (text) => {
      const seconds = /^\d{1,9}[smhd]$/.test(text) ? secondsOf(text) : 0;
      if (seconds < 1 || seconds > MAX_DAYS * UNIT_S.d) throw new RangeError(text);
      return text;
    },
    rule: `it must be a duration such as 30m, 24h or 7d, from 1s to ${MAX_DAYS}d`,
    fallback: "1h",
    help: "of the last so long, such as 30m, 24h or 7d",
  } as config.Setting<string>),
  ...usage,
  json: config.flag(config.yes("print one JSON object instead of text")),
};

export async function main(args: string[]): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const url = config.requireDatabase(settings.databaseUrl);
  const options = { max: 1, name: "siding stats", prepare: settings.prepare };
  const db = new Database(url, options, settings.statementLimitMs);
  try {
    await db.run(checkSchema);
    const stats = await db.run((sql) => statsOf(sql, secondsOf(settings.since), settings));
    console.log(settings.json ? JSON.stringify(stats) : textOf(stats, settings.since));
    return 0;
  } finally {
    await db.close();
  }
}

/** Seconds; null when no job was ever claimed. */
interface Percentiles {
  p50: number | null;
  p95: number | null;
  p99: number | null;
}

/** Seconds, hours and dollars rounded as they are shown. Instants are texts, in UTC. */
export interface Stats {
  since: string;
  until: string;
  /** Those final: finished in that time; the others: now. */
  states: Record<Status, number>;
  /** The finished jobs that were read; `first_at`: how far back they go, when not all were. */
  finished: { jobs: number; cut: boolean; first_at: string | null };
  kinds: { items: { kind: string; jobs: number; wait_s: Percentiles; run_s: Percentiles }[] };
  steps: {
    items: { at: string; pool: string; from: number | null; to: number; reason: string }[];
    /** Whether there were more before them. */
    cut: boolean;
  };
  /** Empty when no look saw the platform. */
  pools: { items: Hours[] };
}

/** The replicas of a pool. */
interface Hours {
  pool: string;
  /** The part of the time that the looks cover. */
  seen_hours: number;
  replica_hours: number;
  busy_hours: number;
  /** By use; and if replicas that wait cost as those that run jobs. */
  dollars: number;
  dollars_if_busy: number;
}

type Row = Omit<Stats, "pools"> & { pools: PoolSeconds[] };

/** Reads all of it in one statement, so that it is of one instant: the last `sinceS` before it. */
export async function statsOf(
  sql: Sql,
  sinceS: number,
  prices: Prices,
  mostJobs = MOST_JOBS,
): Promise<Stats> {
  const s = sql(schema);
  const shares = "{0.5,0.95,0.99}";
  const [{ stats: { pools, ...rest } }] = await sql<{ stats: Row }[]>`
    with time as materialized (
      select now() as until, now() - ${sinceS} * interval '1 second' as since
    ),
    newest as materialized (
      select kind, status, due_at, claimed_at, finished_at from ${s}.jobs
      where status in ('done', 'failed', 'cancelled')
        and finished_at >= now() - ${sinceS} * interval '1 second'
      order by finished_at desc limit ${mostJobs} + 1
    ),
    finished as materialized (
      select * from newest order by finished_at desc limit ${mostJobs}
    ),
    kinds as (
      select kind, count(*) as jobs,
        to_jsonb(percentile_disc(${shares}::float8[]) within group (order by
          greatest(0, extract(epoch from claimed_at - due_at)::float8)
        ) filter (where claimed_at is not null)) as wait_s,
        to_jsonb(percentile_disc(${shares}::float8[]) within group (order by
          extract(epoch from finished_at - claimed_at)::float8
        ) filter (where claimed_at is not null)) as run_s
      from finished group by kind
    ),
    steps as materialized (
      select pool, number, at, seen, wanted, reason from ${s}.looks, time
      where act = 'written' and at >= since order by at desc, number desc limit ${MOST_STEPS} + 1
    ),
    pools as materialized (${poolSeconds(sql, sinceS)})
    select jsonb_build_object(
      'since', since at time zone 'UTC', 'until', until at time zone 'UTC',
      'states', (
        select jsonb_build_object('scheduled', coalesce(sum(scheduled), 0),
          'queued', coalesce(sum(queued), 0), 'running', coalesce(sum(running), 0),
          'review', coalesce(sum(review), 0)) from ${s}.counts) || (
        select jsonb_build_object('done', count(*) filter (where status = 'done'),
          'failed', count(*) filter (where status = 'failed'),
          'cancelled', count(*) filter (where status = 'cancelled')) from finished),
      'finished', jsonb_build_object('jobs', (select count(*) from finished),
        'cut', (select count(*) from newest) > ${mostJobs},
        'first_at', (select min(finished_at) at time zone 'UTC' from finished)),
      'kinds', jsonb_build_object('items', (
        select coalesce(jsonb_agg(jsonb_build_object('kind', kind, 'jobs', jobs,
          'wait_s', jsonb_build_object('p50', wait_s -> 0, 'p95', wait_s -> 1, 'p99', wait_s -> 2),
          'run_s', jsonb_build_object('p50', run_s -> 0, 'p95', run_s -> 1, 'p99', run_s -> 2))
          order by kind), '[]') from kinds)),
      'steps', jsonb_build_object('items', (
        select coalesce(jsonb_agg(jsonb_build_object('at', at at time zone 'UTC', 'pool', pool,
          'from', seen #> '{platform,configured}', 'to', wanted, 'reason', reason)
          order by at, number), '[]')
        from (select * from steps order by at desc, number desc limit ${MOST_STEPS}) told),
        'cut', (select count(*) from steps) > ${MOST_STEPS}),
      'pools', (select coalesce(jsonb_agg(to_jsonb(pools) order by pool), '[]') from pools)
    ) as stats from time`;
  return shown({ ...rest, pools: { items: pools.map((pool) => hoursOf(pool, prices)) } });
}

function hoursOf({ pool, seen_s, replica_s, busy_s }: PoolSeconds, prices: Prices): Hours {
  return {
    pool,
    seen_hours: round(seen_s / 3600, 3),
    replica_hours: round(replica_s / 3600, 3),
    busy_hours: round(busy_s / 3600, 3),
    dollars: round(dollarsOf(replica_s, busy_s, prices), 4),
    dollars_if_busy: round(dollarsOf(replica_s, replica_s, prices), 4),
  };
}

/** With times as they are shown: seconds to the millisecond, instants to the second. */
function shown(stats: Stats): Stats {
  const instant = (at: string) => `${at.slice(0, 19)}Z`;
  const rounded = ({ p50, p95, p99 }: Percentiles) => {
    const of = (s: number | null) => s === null ? null : round(s, 3);
    return { p50: of(p50), p95: of(p95), p99: of(p99) };
  };
  const { finished: { first_at }, kinds, steps } = stats;
  return {
    ...stats,
    since: instant(stats.since),
    until: instant(stats.until),
    finished: { ...stats.finished, first_at: first_at && instant(first_at) },
    kinds: {
      items: kinds.items.map((it) => ({
        ...it,
        wait_s: rounded(it.wait_s),
        run_s: rounded(it.run_s),
      })),
    },
    steps: { ...steps, items: steps.items.map((it) => ({ ...it, at: instant(it.at) })) },
  };
}

/** In the order in which a job goes through them. */
const OPEN: Status[] = ["scheduled", "queued", "running", "review"];
const FINAL: Status[] = ["done", "failed", "cancelled"];

function textOf(stats: Stats, since: string): string {
  const parts = [
    [`the last ${since}, from ${stats.since} to ${stats.until}`],
    jobsText(stats),
    stepsText(stats),
    hoursText(stats),
  ];
  return parts.map((lines) => lines.join("\n")).join("\n\n");
}

function jobsText({ states, finished, kinds }: Stats): string[] {
  if (Object.values(states).every((count) => count === 0)) {
    return ["no job finished in this time, and none is there now"];
  }
  const counts = [...OPEN, ...FINAL].map((state) => [
    ...[state, String(states[state]), FINAL.includes(state) ? "in this time" : "now"],
  ]);
  const lines = aligned([["state", "jobs", "when"], ...counts], [0, 2]);
  if (finished.cut) {
    lines.push(
      `not all: only the last ${finished.jobs} finished jobs were read, from ${finished.first_at} on`,
    );
  }
  if (kinds.items.length === 0) return [...lines, "", "no job finished in this time"];
  const titles = ["p50", "p95", "p99"];
  const head = [
    "kind",
    "jobs",
    ...["wait", "run"].flatMap((it) => titles.map((p) => `${it} ${p}`)),
  ];
  const rows = kinds.items.map(({ kind, jobs, wait_s, run_s }) => [
    ...[kind, String(jobs)],
    ...[wait_s, run_s].flatMap(({ p50, p95, p99 }) => [p50, p95, p99].map(seconds)),
  ]);
  return [...lines, "", ...aligned([head, ...rows])];
}

const seconds = (s: number | null) => s === null ? "-" : `${s.toFixed(s < 10 ? 3 : 1)} s`;

function stepsText({ steps: { items, cut } }: Stats): string[] {
  if (items.length === 0) return ["no step of a controller in this time"];
  const rows = items.map(({ at, pool, from, to, reason }) => [
    ...[at, pool, String(from ?? "?"), String(to), reason],
  ]);
  return [
    ...aligned([["step at", "pool", "from", "to", "reason"], ...rows], [0, 1, 4]),
    ...(cut ? [`not all: only the last ${MOST_STEPS} steps`] : []),
  ];
}

function hoursText({ pools: { items } }: Stats): string[] {
  if (items.length === 0) {
    return ["no look of a controller saw replicas in this time: hours and cost are not known"];
  }
  const rows = items.map((it) => [
    it.pool,
    ...[it.seen_hours, it.replica_hours, it.busy_hours].map((hours) => hours.toFixed(2)),
    ...[it.dollars, it.dollars_if_busy].map((dollars) => dollars.toFixed(4)),
  ]);
  const head = ["pool", "hours seen", "replica-h", "busy-h", "dollars", "if all were busy"];
  return aligned([head, ...rows]);
}

if (import.meta.main) await config.runMain("stats", main);
