/**
 * `/metrics`, for Prometheus. What is now is read at each scrape. What has happened is counted from
 * when this process started, by following the jobs that finish; so of several sites one is to be
 * scraped, or `max by` taken.
 */
import nodeProcess from "node:process";
import { OpenAPIHono } from "@hono/zod-openapi";
import { Counter, Gauge, Histogram, Registry } from "prom-client";
import { type Database, schema, type Sql } from "../db.ts";
import { lastLooks } from "../looks.ts";
import { counts, list } from "../queue.ts";
import { sameText } from "./auth.ts";
import { Problem } from "./problem.ts";
import type { App, Env, Site } from "./site.ts";

/** How far behind now the finished are followed: a row may be seen so long after the time that it bears. */
const LAG_S = 30;
/** Rows that one statement reads, and how many of these one scrape sends: the rest comes with the next. */
const BATCH = 5000;
const MAX_BATCHES = 10;

const WAITS_S = [0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600];
const RUNS_S = [0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600];

export function metrics(site: Site): App {
  const app: App = new OpenAPIHono<Env>();
  const { settings: { openMetrics, heartbeatMs }, secrets } = site;
  const instruments = instrumentsOf();
  const follow = { finished: follower(finishedAfter), looks: follower(looksAfter) };
  let scrape: Promise<string> | undefined;
  async function read(): Promise<string> {
    await readNow(site.db, instruments, 3 * heartbeatMs / 1000);
    const behindS = await follow.finished(site.db, (job) => countJob(instruments, job));
    await follow.looks(site.db, ({ pool, failed }) => {
      instruments.looks.inc({ pool });
      instruments.lookErrors.inc({ pool }, Number(failed));
    });
    instruments.behind.set(behindS);
    readProcess(instruments);
    return await instruments.registry.metrics();
  }
  app.get("/metrics", async (c) => {
    if (!openMetrics) {
      if (!secrets.metrics) throw new Problem(404, "there is nothing at /metrics");
      const [, token = ""] = /^Bearer +(\S+)$/i.exec(c.req.header("authorization") ?? "") ?? [];
      if (!await sameText(token, secrets.metrics)) {
        throw new Problem(401, "the token of the metrics is needed: Authorization: Bearer …");
      }
    }
    // One at a time: what one has followed is not for the other to count again.
    scrape ??= read().finally(() => scrape = undefined);
    return c.body(await scrape, 200, { "content-type": instruments.registry.contentType });
  });
  return app;
}

type Instruments = ReturnType<typeof instrumentsOf>;

function instrumentsOf() {
  const registry = new Registry();
  const own = (name: string, help: string, labelNames: string[] = []) => ({
    ...{ name: `siding_${name}`, help, labelNames, registers: [registry] },
  });
  const process = (name: string, help: string) => ({
    ...{ name: `process_${name}`, help, registers: [registry] },
  });
  return {
    registry,
    jobs: new Gauge(own("jobs", "Unfinished jobs", ["queue", "kind", "status"])),
    oldest: new Gauge(
      own("oldest_waiting_seconds", "How long the first in line is due", ["queue", "kind"]),
    ),
    workers: new Gauge(own("workers", "Workers: busy, idle, or silent", ["pool", "state"])),
    wanted: new Gauge(own("replicas_wanted", "Replicas asked for", ["pool"])),
    running: new Gauge(own("replicas_running", "Replicas that Railway runs", ["pool"])),
    lookAge: new Gauge(own("last_look_age_seconds", "Since the controller's last look", ["pool"])),
    looks: new Counter(own("looks_total", "Looks of the controllers", ["pool"])),
    lookErrors: new Counter(own("look_errors_total", "Looks with an error", ["pool"])),
    finished: new Counter(own("jobs_finished_total", "Finished jobs", ["kind", "status"])),
    waits: new Histogram({
      ...own("job_wait_seconds", "From when a job was due to its last claim", ["kind"]),
      buckets: WAITS_S,
    }),
    runs: new Histogram({
      ...own("job_run_seconds", "From a job's last claim to its end", ["kind"]),
      buckets: RUNS_S,
    }),
    behind: new Gauge(own("metrics_behind_seconds", "How late finished jobs are counted")),
    memory: new Gauge(process("resident_memory_bytes", "Resident memory in bytes")),
    heap: new Gauge(process("heap_bytes", "The JavaScript heap in bytes")),
    cpu: new Gauge(process("cpu_seconds_total", "CPU time in seconds")),
    started: new Gauge(process("start_time_seconds", "When it started, in Unix time")),
  };
}

/** What is as of now. Gauges of what is there no more go. */
async function readNow(db: Database, it: Instruments, silentS: number): Promise<void> {
  const [jobs, workers, pools] = await Promise.all([
    db.run((sql) => counts(sql)),
    db.run((sql) => workersNow(sql, silentS)),
    db.run((sql) => lastLooks(sql)),
  ]);
  for (const name of ["jobs", "oldest", "workers", "wanted", "running", "lookAge"] as const) {
    it[name].reset();
  }
  for (const { queue, kind, oldest_wait_s, ...count } of jobs) {
    for (const status of ["scheduled", "queued", "running", "review"] as const) {
      it.jobs.set({ queue, kind, status }, count[status]);
    }
    if (oldest_wait_s !== null) it.oldest.set({ queue, kind }, oldest_wait_s);
  }
  for (const { pool, busy, idle, silent } of workers) {
    for (const [state, n] of Object.entries({ busy, idle, silent })) {
      it.workers.set({ pool, state }, n);
    }
  }
  for (const { pool, wanted, running, age_s } of pools) {
    if (wanted !== null) it.wanted.set({ pool }, wanted);
    if (running !== null) it.running.set({ pool }, running); // not known is no zero
    it.lookAge.set({ pool }, age_s);
  }
}

const workersNow = (sql: Sql, silentS: number) =>
  list(sql<{ pool: string; busy: number; idle: number; silent: number }[]>`
    select pool, (count(*) filter (where here and running > 0))::integer as busy,
      (count(*) filter (where here and running = 0))::integer as idle,
      (count(*) filter (where not here))::integer as silent
    from (select pool, running, seen_at > now() - ${silentS} * interval '1 second' as here
          from ${sql(schema)}.processes where role = 'worker') p
    group by pool`);

/** What is followed: rows with a time and a key, in whose order they come. */
interface Row {
  at: string;
  key: string;
  age_s: number;
}
/** Reads at most `most` rows after the given one and before `LAG_S` ago, of which only those newer than `sinceS`. */
type After<T> = (sql: Sql, from: Pick<Row, "at" | "key"> | null, sinceS: number) => Promise<T[]>;

/**
 * Follows rows from when this process started, a bounded number at a time.
 *
 * @returns a function that gives the new ones to `see`, and returns how many seconds behind now it is
 */
function follower<T extends Row>(after: After<T>) {
  let last: Pick<Row, "at" | "key"> | null = null;
  return async (db: Database, see: (row: T) => void): Promise<number> => {
    for (let batch = 1;; batch++) {
      const upS = performance.now() / 1000;
      const rows = await db.run((sql) => after(sql, last, upS));
      for (const row of rows) see(row);
      last = rows.at(-1) ?? last;
      if (rows.length < BATCH) return LAG_S;
      if (batch === MAX_BATCHES) return rows.at(-1)!.age_s;
    }
  };
}

interface FinishedJob extends Row {
  kind: string;
  status: string;
  wait_s: number | null;
  run_s: number | null;
}

/** By the index on finished_at. Those that were cancelled in line ran for nobody. */
const finishedAfter: After<FinishedJob> = (sql, from, sinceS) =>
  list(sql<FinishedJob[]>`
    select j.finished_at::text as at, j.id::text as key, j.kind, j.status,
      extract(epoch from now() - j.finished_at)::float8 as age_s,
      case when j.worker_id is not null
        then greatest(0, extract(epoch from j.claimed_at - j.due_at))::float8 end as wait_s,
      case when j.worker_id is not null
        then extract(epoch from j.finished_at - j.claimed_at)::float8 end as run_s
    from ${sql(schema)}.jobs j
    where j.status in ('done', 'failed', 'cancelled')
      and (j.finished_at, j.id) > (${
    from ? sql`${from.at}::text::timestamptz, ${from.key}::bigint` : since(sql, sinceS)
  })
      and j.finished_at < now() - ${LAG_S} * interval '1 second'
    order by j.finished_at, j.id limit ${BATCH}`);

interface Looked extends Row {
  pool: string;
  failed: boolean;
}

const looksAfter: After<Looked> = (sql, from, sinceS) =>
  list(sql<Looked[]>`
    select l.at::text as at, l.number::text as key, l.pool, l.error is not null as failed,
      extract(epoch from now() - l.at)::float8 as age_s
    from ${sql(schema)}.looks l
    where (l.at, l.number) > (${
    from ? sql`${from.at}::text::timestamptz, ${from.key}::bigint` : since(sql, sinceS)
  })
      and l.at < now() - ${LAG_S} * interval '1 second'
    order by l.at, l.number limit ${BATCH}`);

/** When this process started, by the database's clock. */
const since = (sql: Sql, s: number) => sql`now() - ${s} * interval '1 second', 0`;

function countJob(it: Instruments, { kind, status, wait_s, run_s }: FinishedJob): void {
  it.finished.inc({ kind, status });
  if (wait_s !== null) it.waits.observe({ kind }, wait_s);
  if (run_s !== null) it.runs.observe({ kind }, run_s);
}

/** The client's own metrics of the process ask for what only Node has. */
function readProcess(it: Instruments): void {
  const { rss, heapUsed } = Deno.memoryUsage();
  const { user, system } = nodeProcess.cpuUsage();
  it.memory.set(rss);
  it.heap.set(heapUsed);
  it.cpu.set((user + system) / 1e6);
  it.started.set(performance.timeOrigin / 1000);
}
