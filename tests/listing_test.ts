/** Lists of jobs among 1,000,000: each reads a bounded number of rows, and its pages leave nothing out. */
import { assert, assertEquals, assertLess } from "@std/assert";
import { connect, type Pool, schema } from "../db.ts";
import { COUNTED_TO, type JobFilter, listJobs, queueStatus, WINDOW } from "../listing.ts";
import * as queue from "../queue.ts";
import { databaseTest, testDatabase } from "./database.ts";

const JOBS = 1_000_000;

/**
 * What a planner gets wrong that takes the jobs for evenly mixed: all of the largest owner's, a quarter
 * of the table, are old, as are most that failed; and the queued are `from` to `to`. Some owners have
 * 100, one has 3, and a tenth of the jobs is nobody's. A rare kind and a rare queue have 50 and 20.
 */
async function fill(sql: Pool, [from, to]: readonly number[]): Promise<void> {
  await queue.setQueue(sql, "rare");
  await sql`
    insert into ${sql(schema)}.jobs (queue, kind, owner, payload, status, created_at, finished_at,
      error, worker_id, claim_token, claimed_at, attempt, lease_until, request_key, sent_at)
    select case when i % 50000 = 7 then 'rare' else 'default' end,
      case when i % 20000 = 9 then 'rare' when i % 3 = 0 then 'band' else 'transcribe' end,
      case when i in (1000, 20000, 300000) then 'minnow' when i % 10 = 4 then null
           when i < 270000 then 'whale' else 'owner ' || i % 6000 end,
      '{}', s.status, now() - (${JOBS} - i) * interval '1 second',
      case when s.status in ('done', 'failed', 'cancelled') then now() end,
      case when s.status = 'failed' then 'it failed' end,
      case when s.status = 'running' then gen_random_uuid() end,
      case when s.status = 'running' then gen_random_uuid() end,
      case when s.status = 'running' then now() end, (s.status = 'running')::integer,
      case when s.status = 'running' then now() + interval '1 hour' end,
      case when s.status = 'review' then gen_random_uuid() end,
      case when s.status = 'review' then now() end
    from generate_series(1, ${JOBS}::integer) i
    cross join lateral (select case
      when i between ${from} and ${to} then 'queued'
      when i between 30000 and 33000 then 'scheduled'
      when i between 34000 and 34003 then 'running'
      when i between 35000 and 35049 then 'review'
      when i % 100 = 1 or i < 400000 and i % 3 = 1 then 'failed'
      when i % 500 = 2 then 'cancelled' else 'done' end as status) s`;
  await sql`analyze ${sql(schema)}.jobs`;
}

interface Plan {
  "Node Type": string;
  "Relation Name"?: string;
  "Actual Rows": number;
  "Actual Loops": number;
  "Rows Removed by Filter"?: number;
  "Rows Removed by Index Recheck"?: number;
  Plans?: Plan[];
}

/** The rows that a plan's scans of tables read. */
function rowsRead(plan: Plan): number {
  const own = plan["Relation Name"] === undefined ? 0 : plan["Actual Loops"] *
    (plan["Actual Rows"] + (plan["Rows Removed by Filter"] ?? 0) +
      (plan["Rows Removed by Index Recheck"] ?? 0));
  return (plan.Plans ?? []).reduce((sum, inner) => sum + rowsRead(inner), own);
}

/** Has `f` send its statement, and says how many rows that read, in how long. */
async function explained(sql: Pool, f: (sql: Pool) => Promise<unknown>) {
  let found: { Plan: Plan; "Execution Time": number } | undefined;
  const asked = new Proxy(sql, {
    apply(target, self, args) {
      const query = Reflect.apply(target, self, args);
      // Only what is waited for is sent: the others are parts of it.
      if (query && typeof query.then === "function") {
        query.then = (resolve: (rows: unknown) => void, reject: (error: unknown) => void) =>
          target`explain (analyze, format json) ${query}`.then((rows) => {
            found = rows[0]["QUERY PLAN"][0];
            resolve([{ id: null, last: null, scanned: 0, all_read: true }]);
          }, reject);
      }
      return query;
    },
  });
  await f(asked);
  return { rows: rowsRead(found!.Plan), ms: found!["Execution Time"] };
}

/** Every filter there is, with values that many, few and no jobs have. */
function* filters(): Generator<JobFilter> {
  const statuses = [
    "scheduled",
    "queued",
    "running",
    "review",
    "done",
    "failed",
    "cancelled",
  ] as const;
  for (const owner of [undefined, "whale", "minnow", "nobody"]) {
    for (const status of [undefined, ...statuses]) {
      for (const kind of [undefined, "band", "rare", "none"]) {
        for (const queue of [undefined, "rare"]) yield { owner, status, kind, queue };
      }
    }
  }
}

async function assertBounded(sql: Pool): Promise<void> {
  let most = { rows: 0, ms: 0 };
  let tried = 0;
  for (const filter of filters()) {
    for (const before of [undefined, "500000"]) {
      const cost = await explained(sql, (sql) => listJobs(sql, filter, { before }));
      const what = `${JSON.stringify(filter)} before ${before}`;
      assert(cost.rows <= 2 * WINDOW + 100, `${what} read ${cost.rows} rows`);
      most = { rows: Math.max(most.rows, cost.rows), ms: Math.max(most.ms, cost.ms) };
      tried++;
    }
  }
  console.log(`      ${tried} lists: at most ${most.rows} rows, ${Math.round(most.ms)} ms`);
}

/** Goes through all pages of a list, and compares with what a plain statement finds. */
async function assertComplete(sql: Pool, filter: JobFilter): Promise<void> {
  const { owner = null, status = null, kind = null, queue = null } = filter;
  const expected = await sql<{ id: string }[]>`
    select id::text from ${sql(schema)}.jobs j
    where (${owner}::text is null or owner = ${owner}) and (${status}::text is null or status = ${status})
      and (${kind}::text is null or kind = ${kind}) and (${queue}::text is null or queue = ${queue})
    order by j.id desc`;
  const found: string[] = [];
  const bound = JOBS / WINDOW + expected.length / 1000 + 2;
  let before: string | undefined;
  for (let pages = 1;; pages++) {
    assertLess(pages, bound);
    const { items, next } = await listJobs(sql, filter, { before, most: 1000 });
    found.push(...items.map(({ id }) => id));
    if (next === null) break;
    before = next;
  }
  assertEquals(found, expected.map(({ id }) => id), JSON.stringify(filter));
}

const lines = { "2,000 old ones": [1, 2_000], "the newest 200,000": [800_001, JOBS] } as const;

for (const [name, line] of Object.entries(lines)) {
  Deno.test(`of 1,000,000 jobs with ${name} in line, every list reads a bounded number of rows`, async (t) => {
    await using database = await testDatabase();
    const sql = connect(database.url, { max: 1 });
    const queued = line[1] - line[0] + 1;
    try {
      await fill(sql, line);
      await t.step("whatever the filter", () => assertBounded(sql));
      await t.step("and its pages are complete, without a job twice", async () => {
        for (const status of ["scheduled", "running", "review", "cancelled", "failed"] as const) {
          await assertComplete(sql, { status });
        }
        await assertComplete(sql, { status: "failed", owner: "whale", kind: "band" });
        await assertComplete(sql, { status: "queued", ...(queued > 10_000 && { kind: "rare" }) });
        await assertComplete(sql, { status: "queued", owner: "owner 5" });
        await assertComplete(sql, { kind: "rare" });
        await assertComplete(sql, { queue: "rare", status: "done" });
        await assertComplete(sql, { owner: "minnow" });
        await assertComplete(sql, { owner: "whale", kind: "rare" });
      });
      await t.step("so do the counts of the queues, which say where they stop", async () => {
        const { rows, ms } = await explained(sql, queueStatus);
        console.log(`      counts: ${Math.round(rows)} rows, ${Math.round(ms)} ms`);
        assert(rows <= 5 * COUNTED_TO + 100, `${rows} rows`);
        const queues = await queueStatus(sql);
        const sum = (state: "queued" | "scheduled" | "running" | "review") =>
          queues.reduce((sum, queue) => sum + queue[state], 0);
        assertEquals([sum("scheduled"), sum("running"), sum("review")], [3001, 4, 50]);
        if (queued < COUNTED_TO) assertEquals(sum("queued"), queued);
        else assertEquals(queues.find(({ name }) => name === "default")!.queued, COUNTED_TO);
      });
    } finally {
      await sql.end({ timeout: 1 });
    }
  });
}

databaseTest(
  "a queue's counts are by state, and tell since when its first job waits",
  async (sql) => {
    await queue.setQueue(sql, "b", {
      max_running: 2,
      max_waiting: 9,
      max_per_owner: 3,
      paused: true,
    });
    await queue.enqueue(sql, [
      { kind: "a", queue: "b" },
      { kind: "a", queue: "b", priority: 1 },
      { kind: "a", queue: "b", delay_s: 60 },
    ]);
    await sql`update ${sql(schema)}.jobs set due_at = now() - interval '1 hour' where id = 1`;
    const { oldest_wait_s, ...rest } = (await queueStatus(sql)).find(({ name }) => name === "b")!;
    assertEquals(rest, {
      name: "b",
      paused: true,
      claim: "lock",
      max_running: 2,
      max_waiting: 9,
      max_per_owner: 3,
      fair: false,
      rate_limit: null,
      rate_period_s: null,
      scheduled: 1,
      queued: 2,
      running: 0,
      review: 0,
    });
    assert(oldest_wait_s! >= 3600 && oldest_wait_s! < 3700);
  },
);
