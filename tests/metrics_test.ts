/** What Prometheus is told. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { type Pool, schema } from "../db.ts";
import * as processes from "../processes.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { keyOf, type RunningSite, startSite } from "./site.ts";

const token = "a-token-of-the-metrics-for-tests-00001";

/** A scrape's samples, by name and labels. */
async function scrape(site: RunningSite): Promise<Map<string, number>> {
  const response = await site.ask("/metrics", { token });
  const text = await response.text();
  assertEquals(response.status, 200, text);
  assertMatch(response.headers.get("content-type")!, /^text\/plain; version=0\.0\.4/);
  return new Map(
    text.split("\n").filter((line) => line && !line.startsWith("#")).map((line) => {
      const at = line.lastIndexOf(" ");
      return [line.slice(0, at), Number(line.slice(at + 1))];
    }),
  );
}

const sitesWithToken = (url: string, args: string[] = []) =>
  startSite(url, args, { SIDING_METRICS_TOKEN: token });

/** Adds finished jobs, each due, claimed and finished so many seconds ago. */
const finished = (
  sql: Pool,
  n: number,
  { kind = "echo", status = "done", dueS = 60, claimedS = 50, endedS = 40 } = {},
) =>
  sql`insert into ${
    sql(schema)
  }.jobs (queue, kind, payload, status, error, attempt, worker_id, due_at, claimed_at, finished_at)
    select 'default', ${kind}, '{}', ${status}, ${
    status === "failed" ? "x" : null
  }, 1, gen_random_uuid(),
      now() - ${dueS} * interval '1 second', now() - ${claimedS} * interval '1 second',
      now() - ${endedS} * interval '1 second' from generate_series(1, ${n})`;

/** Since a process is followed from its start: waits until it has run for so long. */
async function old(site: RunningSite, seconds: number) {
  await waitFor(
    async () => {
      const started = (await scrape(site)).get("process_start_time_seconds")!;
      return Date.now() / 1000 - started > seconds;
    },
    `the site to be ${seconds} s old`,
    { timeoutMs: 60_000 },
  );
}

test(
  "/metrics is there for its token alone, and for anybody only where the settings say so",
  async (sql, url) => {
    await using closed = await startSite(url);
    const ask = async (site: RunningSite, token: string | null) => {
      const response = await site.ask("/metrics", { token });
      await response.body?.cancel();
      return response.status;
    };
    assertEquals([await ask(closed, null), await ask(closed, token)], [404, 404]);
    await using site = await sitesWithToken(url);
    const key = await keyOf(sql, "ann");
    for (const wrong of [null, `${token}x`, token.slice(1), key, site.adminToken]) {
      assertEquals(await ask(site, wrong), 401);
    }
    assertEquals(await ask(site, token), 200);
    await using open = await startSite(url, ["--open-metrics"]);
    assertEquals(await ask(open, null), 200);
  },
);

test(
  "gauges say what is as of the scrape: jobs, the oldest, workers, replicas, the process",
  async (sql, url) => {
    await using site = await sitesWithToken(url, ["--heartbeat-ms", "5000"]);
    await queue.enqueue(sql, [{ kind: "echo" }, { kind: "echo" }, { kind: "slow", delay_s: 3600 }]);
    await sql`update ${
      sql(schema)
    }.jobs set due_at = now() - interval '100 s' where status = 'queued'`;
    const worker = () => processes.register(sql, { role: "worker", name: "w", version: "0" });
    const [busy, silent] = [await worker(), await worker(), await worker()];
    await sql`update ${sql(schema)}.processes set running = 1 where boot_id = ${busy}`;
    await sql`update ${
      sql(schema)
    }.processes set seen_at = now() - interval '16 s' where boot_id = ${silent}`;
    await sql`insert into ${
      sql(schema)
    }.looks (pool, number, controller, seen, wanted, code, reason, act)
    values ('default', 1, gen_random_uuid(), '{"platform": {"running": 2}}', 3, 'up', '', 'none'),
      ('blind', 1, gen_random_uuid(), '{"platform": null}', null, 'unknown', '', 'none'),
      ('default/dry-run', 1, gen_random_uuid(), '{"platform": {"running": 2}}', 9, 'up', '', 'none')`;
    const samples = await scrape(site);
    const expected = {
      'siding_jobs{queue="default",kind="echo",status="queued"}': 2,
      'siding_jobs{queue="default",kind="echo",status="running"}': 0,
      'siding_jobs{queue="default",kind="slow",status="scheduled"}': 1,
      'siding_workers{pool="default",state="busy"}': 1,
      'siding_workers{pool="default",state="idle"}': 1,
      'siding_workers{pool="default",state="silent"}': 1,
      'siding_replicas_wanted{pool="default"}': 3,
      'siding_replicas_running{pool="default"}': 2,
      'siding_replicas_wanted{pool="blind"}': undefined,
      'siding_replicas_running{pool="blind"}': undefined,
      'siding_replicas_wanted{pool="default/dry-run"}': undefined,
    };
    const found = Object.fromEntries(
      Object.keys(expected).map((name) => [name, samples.get(name)]),
    );
    assertEquals(found, expected);
    const oldest = samples.get('siding_oldest_waiting_seconds{queue="default",kind="echo"}')!;
    assert(oldest >= 100 && oldest < 130, `${oldest} s`);
    assert(samples.get("process_resident_memory_bytes")! > 10_000_000);
    assert(samples.get("process_cpu_seconds_total")! > 0.01);
    const startedS = Date.now() / 1000 - samples.get("process_start_time_seconds")!;
    assert(startedS > 0 && startedS < 60, `${startedS} s`);
    await sql`truncate ${sql(schema)}.jobs`;
    assertEquals(
      [...(await scrape(site)).keys()].filter((name) => name.startsWith("siding_jobs{")),
      [],
    );
  },
);

test(
  "finished jobs are each counted once, 30 s late, and a bounded number a scrape",
  async (sql, url) => {
    await using site = await sitesWithToken(url);
    await finished(sql, 5, { endedS: 3600, kind: "before-it-started" });
    await old(site, 32);
    await finished(sql, 3, { endedS: 20, kind: "too-new" });
    await finished(sql, 3, { dueS: 38, claimedS: 36, endedS: 31 });
    await finished(sql, 2, { status: "failed", dueS: 38, claimedS: 31.2, endedS: 31 });
    await finished(sql, 1, { status: "cancelled", endedS: 31 });
    const names = [
      'siding_jobs_finished_total{kind="echo",status="done"}',
      'siding_jobs_finished_total{kind="echo",status="failed"}',
      'siding_jobs_finished_total{kind="echo",status="cancelled"}',
      'siding_job_run_seconds_bucket{le="0.5",kind="echo"}',
      'siding_job_run_seconds_bucket{le="5",kind="echo"}',
      'siding_job_wait_seconds_bucket{le="2.5",kind="echo"}',
      'siding_job_wait_seconds_count{kind="echo"}',
      'siding_jobs_finished_total{kind="before-it-started",status="done"}',
      'siding_jobs_finished_total{kind="too-new",status="done"}',
    ];
    for (let round = 0; round < 2; round++) { // the second sees nothing new
      const samples = await scrape(site);
      assertEquals(names.map((name) => samples.get(name)), [
        3,
        2,
        1,
        2,
        5,
        3,
        6,
        undefined,
        undefined,
      ]);
      assertEquals(samples.get("siding_metrics_behind_seconds"), 30);
    }
    await finished(sql, 60_000, { endedS: 30.5, kind: "many" });
    const many = 'siding_jobs_finished_total{kind="many",status="done"}';
    const first = await scrape(site);
    assertEquals(first.get(many), 50_000);
    assert(first.get("siding_metrics_behind_seconds")! > 30.5);
    const both = await Promise.all([scrape(site), scrape(site)]); // at once, and no row twice
    assertEquals(both.map((samples) => samples.get(many)), [60_000, 60_000]);
    await waitFor(
      async () =>
        (await scrape(site)).get('siding_jobs_finished_total{kind="too-new",status="done"}') === 3,
      "those that were too new",
      { timeoutMs: 40_000 },
    );
  },
);

test("the statement that follows finished jobs is served by their index", async (sql) => {
  const t = sql(schema);
  await sql`insert into ${t}.jobs (queue, kind, payload, status, finished_at)
    select 'default', 'echo', '{}', 'done', now() - i * interval '1 second' from generate_series(1, 100000) i`;
  await sql`vacuum analyze ${t}.jobs`;
  const [{ "QUERY PLAN": [plan] }] = await sql`
    explain (analyze, format json) select j.id from ${t}.jobs j
    where j.status in ('done', 'failed', 'cancelled')
      and (j.finished_at, j.id) > (now() - interval '60 s', 0)
      and j.finished_at < now() - interval '30 s'
    order by j.finished_at, j.id limit 5000`;
  assertMatch(JSON.stringify(plan), /"Index Name":"jobs_finished"/);
  assert(!JSON.stringify(plan).includes("Seq Scan"), JSON.stringify(plan));
});
