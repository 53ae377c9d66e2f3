/** What the measurements of claiming share: jobs in line, the product's claim, and many who claim. */
import { codeOf, connect, type Pool, schema } from "../../db.ts";
import { claim, type Ready } from "../../claims.ts";
import { type Claimed, settle } from "../../queue.ts";
import type { BenchServer } from "./common.ts";

export const QUEUE = "bench";
export const KIND = "noop";
const LEASE_S = 120;
/** Postgres plans a prepared statement anew at each of its first five calls. */
const WARM_UP_CALLS = 6;
/** How often those who wait for a lock are counted. */
const SAMPLE_MS = 20;

/** What one claimer did in one go. */
export interface Took {
  jobs: Claimed[];
  /** Transactions that another's made fail. */
  failures?: number;
}
export type Take = (sql: Pool, worker: string, most: number) => Promise<Took>;

/** Makes the queue of the measurements, which claims in this way. */
export async function makeQueue(
  sql: Pool,
  by: Ready["claim"],
  maxRunning: number | null = null,
): Promise<void> {
  await sql`
    insert into ${sql(schema)}.queues (name, claim, max_running)
    values (${QUEUE}, ${by}, ${maxRunning})
    on conflict (name) do update set claim = excluded.claim, max_running = excluded.max_running`;
}

/** Puts jobs in line, or due in a day, or finished, in one statement. */
export async function putJobs(
  sql: Pool,
  count: number,
  status: "queued" | "scheduled" | "done" = "queued",
  owners = 0,
): Promise<void> {
  await sql`
    insert into ${
    sql(schema)
  }.jobs (queue, kind, owner, payload, status, due_at, attempt, worker_id,
      claimed_at, finished_at)
    select ${QUEUE}, ${KIND}, case when ${owners} > 0 then 'owner-' || n % ${owners} end, '{}', ${status},
      now() + case ${status} when 'scheduled' then 86400 + n else 0 end * interval '1 second',
      case ${status} when 'done' then 1 else 0 end,
      case ${status} when 'done' then gen_random_uuid() end,
      case ${status} when 'done' then now() end, case ${status} when 'done' then now() end
    from generate_series(1, ${count}::integer) n`;
}

/** A table with `waiting` jobs in line and nothing else, no dead rows, and statistics of it. */
export async function startOver(sql: Pool, waiting: number): Promise<void> {
  await sql`truncate ${sql(schema)}.jobs`;
  await putJobs(sql, waiting);
  await sql`vacuum analyze ${sql(schema)}.jobs`;
}

/** The product's own claim. */
export const take = (by: Ready["claim"]): Take => async (sql, worker, most) => {
  let failures = 0;
  // The claim at REPEATABLE READ repeats what fails by itself: what it sends is looked at here.
  const heard = by !== "repeatable_read" ? sql : new Proxy(sql, {
    get: (pool, name) =>
      name !== "unsafe" ? Reflect.get(pool, name) : (text: string) => ({
        simple: () => {
          const reply = pool.unsafe(text).simple();
          reply.catch(() => failures++);
          return reply;
        },
      }),
  });
  const options = { worker, kinds: [KIND], most, leaseS: LEASE_S, token: crypto.randomUUID() };
  const jobs = await claim(heard, { queue: QUEUE, claim: by }, options);
  return { jobs, failures };
};

/** Ends jobs as done. */
export const finishAll = (sql: Pool, worker: string, jobs: readonly Claimed[]) =>
  settle(
    sql,
    worker,
    jobs.map(({ id, attempt }) => ({ id, attempt, outcome: "done", result: null })),
  );

/** What many claimers did together. */
export interface Work {
  seconds: number;
  claims: number;
  jobs: number;
  /** Claims that came back empty, or with fewer than wanted, though jobs waited. */
  wasted: number;
  failures: number;
  /** Seconds that all of them together waited for locks. */
  waited_s: number;
  cpu_s: number | null;
  dead: number;
}

export interface WorkOptions {
  claimers: number;
  most: number;
  forMs: number;
  /** What each does with what it took, before it takes more. */
  then?: (sql: Pool, worker: string, jobs: readonly Claimed[]) => Promise<unknown>;
  /** Milliseconds after an empty claim, by how many came in a row. */
  pauseMs?: (empty: number) => number;
}

/**
 * Has claimers, each with a connection of its own, take jobs for `forMs` or until none is left. The
 * database's own counts are read once they are gone, since a session hands its counts on late.
 */
export async function work(
  server: BenchServer,
  { url, sql }: { url: string; sql: Pool },
  takes: Take,
  { claimers, most, forMs, then, pauseMs }: WorkOptions,
): Promise<Work> {
  const sum = { claims: 0, jobs: 0, wasted: 0, failures: 0 };
  const pools = Array.from({ length: claimers }, () => connect(url, { max: 1, name: "claimer" }));
  const over = new AbortController();
  try {
    // Each connects and plans before the clock starts, one after the other: some ways take turns.
    for (const pool of pools) {
      const worker = crypto.randomUUID();
      for (let call = 0; call < WARM_UP_CALLS; call++) {
        await then?.(pool, worker, (await takes(pool, worker, 1)).jobs);
      }
    }
    const waiting = await inLine(sql);
    const cpuS = server.cpuS();
    const startedMs = performance.now();
    const endMs = startedMs + forMs;
    const waits = lockWaits(sql, over.signal);
    await Promise.all(pools.map(async (pool) => {
      const worker = crypto.randomUUID();
      let empty = 0;
      while (performance.now() < endMs && sum.jobs < waiting) {
        const { jobs, failures = 0 } = await takes(pool, worker, most).catch(givenUp);
        const left = waiting - sum.jobs;
        sum.claims++;
        sum.jobs += jobs.length;
        sum.failures += failures;
        if (jobs.length < Math.min(most, left)) sum.wasted++;
        empty = jobs.length ? 0 : empty + 1;
        if (jobs.length > 0) await then?.(pool, worker, jobs);
        else if (pauseMs) await new Promise((done) => setTimeout(done, pauseMs(empty)));
      }
    }));
    const seconds = (performance.now() - startedMs) / 1000;
    over.abort();
    const share = await waits;
    const usedS = server.cpuS();
    await Promise.all(pools.map((pool) => pool.end({ timeout: 1 })));
    return {
      ...{ seconds, ...sum, waited_s: share * seconds },
      cpu_s: cpuS === null || usedS === null ? null : usedS - cpuS,
      dead: await deadRows(sql),
    };
  } finally {
    over.abort();
    await Promise.all(pools.map((pool) => pool.end({ timeout: 1 })));
  }
}

/** Who waits too long for a lock comes back with nothing. */
function givenUp(error: unknown): Took {
  if (codeOf(error) !== "55P03") throw error;
  return { jobs: [], failures: 1 };
}

async function inLine(sql: Pool): Promise<number> {
  const [{ n }] = await sql<{ n: number }[]>`
    select count(*)::integer as n from ${sql(schema)}.jobs where status = 'queued'`;
  return n;
}

/** How many of the claimers wait for a lock, on average until `signal` is aborted. */
async function lockWaits(sql: Pool, signal: AbortSignal): Promise<number> {
  let [samples, waiting] = [0, 0];
  while (!signal.aborted) {
    const [{ n }] = await sql<{ n: number }[]>`
      select count(*)::integer as n from pg_stat_activity
      where datname = current_database() and application_name = 'claimer' and wait_event_type = 'Lock'`;
    samples++;
    waiting += n;
    await new Promise((done) => setTimeout(done, SAMPLE_MS));
  }
  return waiting / Math.max(1, samples);
}

async function deadRows(sql: Pool): Promise<number> {
  const [{ n }] = await sql<{ n: number }[]>`
    select n_dead_tup::integer as n from pg_stat_user_tables
    where schemaname = ${schema} and relname = 'jobs'`;
  return n;
}
