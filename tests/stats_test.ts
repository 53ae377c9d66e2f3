/** `deno task stats`: its numbers, by jobs and looks that can be reckoned by hand. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { type Pool, schema, type Sql } from "../db.ts";
import { statsOf } from "../tools/stats.ts";
import { databaseTest, emptyDatabase } from "./database.ts";
import { runScript } from "./processes.ts";

const HOUR_S = 3600;
const prices = { vcpu: 2, gb: 1.5, idleVcpu: 0.01, idleGb: 0.1 };
const run = (url: string, ...args: string[]) =>
  runScript("tools/stats.ts", args, { DATABASE_URL: url, NO_COLOR: "1" });

interface JobTimes {
  kind?: string;
  status?: string;
  /** Seconds before now at which it finished. */
  agoS: number;
  waitS?: number;
  runS?: number;
}

/** Inserts a final job; without a wait it was never claimed. */
async function insertFinal(sql: Sql, { kind = "a", status = "done", agoS, ...times }: JobTimes) {
  const { waitS = null, runS = 0 } = times;
  await sql`
    insert into ${sql(schema)}.jobs
      (queue, kind, payload, status, attempt, due_at, claimed_at, finished_at, error)
    select 'default', ${kind}, '{}', ${status}, 1,
      finished_at - ${runS + (waitS ?? 0)} * interval '1 second',
      case when ${waitS !== null} then finished_at - ${runS} * interval '1 second' end,
      finished_at, case when ${status} = 'failed' then 'broken' end
    from (select now() - ${agoS} * interval '1 second' as finished_at) t`;
}

interface LookFacts {
  agoS: number;
  running: number | null;
  busy?: number;
  pool?: string;
  act?: string;
  wanted?: number;
  reason?: string;
}
let number = 0;

async function insertLook(sql: Sql, facts: LookFacts) {
  const { agoS, running, busy = 0, pool = "default", act = "none", wanted = 1 } = facts;
  const seen = {
    at_ms: 0,
    queue: { work: [], workers: { reporting: 1, busy, concurrency: 1 } },
    platform: running === null ? null : { configured: running, running, crashed: 0 },
  };
  await sql`
    insert into ${sql(schema)}.looks (pool, number, at, controller, seen, wanted, code, reason, act)
    values (${pool}, ${++number}, now() - ${agoS} * interval '1 second', gen_random_uuid(),
      ${JSON.stringify(seen)}::text::jsonb, ${wanted}, 'x', ${facts.reason ?? "because"}, ${act})`;
}

/** In a transaction, in which now() stands still: what is inserted is of the very instant. */
const still = (sql: Pool, body: (tx: Sql) => Promise<void>) => sql.begin((tx) => body(tx));

databaseTest(
  "jobs by state, and the percentiles of wait and run by kind",
  (sql) =>
    still(sql, async (tx) => {
      // Waits of 1 to 100 s and runs of 2 to 200 s: the smallest value that the share is not above.
      for (let i = 1; i <= 100; i++) {
        await insertFinal(tx, { agoS: 10 * i, waitS: i, runS: 2 * i });
      }
      await insertFinal(tx, { kind: "b", status: "failed", agoS: HOUR_S, waitS: 0.25, runS: 1.5 });
      // Due anew after the claim, by a snooze: it did not wait less than nothing.
      await insertFinal(tx, { kind: "b", status: "cancelled", agoS: 5, waitS: -7, runS: 3 });
      await insertFinal(tx, { kind: "c", status: "cancelled", agoS: 5 });
      await insertFinal(tx, { agoS: HOUR_S + 1, waitS: 5000, runS: 5000 });
      await tx`
      insert into ${tx(schema)}.jobs (queue, kind, payload, status, created_at)
      select 'default', 'a', '{}', status, now() - interval '9 days'
      from unnest('{queued,queued,scheduled}'::text[]) status`;
      await tx`
      insert into ${tx(schema)}.jobs (queue, kind, payload, status, attempt, worker_id, claim_token,
        claimed_at, lease_until)
      values ('default', 'a', '{}', 'running', 1, gen_random_uuid(), gen_random_uuid(), now(), now())`;
      await tx`
      insert into ${tx(schema)}.jobs (queue, kind, payload, status, request_key, sent_at)
      values ('default', 'a', '{}', 'review', gen_random_uuid(), now())`;

      const stats = await statsOf(tx, HOUR_S, prices);
      assertEquals(stats.states, {
        ...{ scheduled: 1, queued: 2, running: 1, review: 1, done: 100, failed: 1, cancelled: 2 },
      });
      assertEquals(stats.kinds.items, [
        {
          ...{ kind: "a", jobs: 100 },
          ...{ wait_s: { p50: 50, p95: 95, p99: 99 }, run_s: { p50: 100, p95: 190, p99: 198 } },
        },
        {
          ...{ kind: "b", jobs: 2 },
          wait_s: { p50: 0, p95: 0.25, p99: 0.25 },
          run_s: { p50: 1.5, p95: 3, p99: 3 },
        },
        {
          ...{ kind: "c", jobs: 1 },
          wait_s: { p50: null, p95: null, p99: null },
          run_s: { p50: null, p95: null, p99: null },
        },
      ]);
      assertEquals([stats.finished.jobs, stats.finished.cut], [103, false]);
      assertEquals(Date.parse(stats.until) - Date.parse(stats.since), HOUR_S * 1000);

      // The newest ten end 5, 5, 10, 20 … 80 s ago.
      const cut = await statsOf(tx, HOUR_S, prices, 10);
      assertEquals([cut.finished.jobs, cut.finished.cut], [10, true]);
      assertEquals([cut.states.done, cut.states.cancelled, cut.states.queued], [8, 2, 2]);
      assertEquals(cut.kinds.items[0].wait_s, { p50: 4, p95: 8, p99: 8 });
      const firstMs = Date.parse(cut.finished.first_at!);
      assertEquals(Date.parse(cut.until) - firstMs, 80_000);
      assertEquals((await statsOf(tx, HOUR_S, prices, 103)).finished.cut, false);
    }),
);

databaseTest(
  "steps, replica-hours and dollars are those of the looks",
  (sql) =>
    still(sql, async (tx) => {
      const up = { act: "written", wanted: 3, reason: "2 jobs wait" };
      await insertLook(tx, { agoS: 4000, running: 50, ...up }); // too old, by itself and by its 120 s
      await insertLook(tx, { agoS: 3630, running: 4, busy: 4 }); // stands for 60 s of the hour
      await insertLook(tx, { agoS: 3540, running: 1, busy: 1, ...up }); // 60 s
      await insertLook(tx, { agoS: 3510, running: null }); // saw no platform: the one before stands
      await insertLook(tx, { agoS: 3480, running: 3, busy: 2 }); // 120 s, and then nobody looked
      await insertLook(tx, { agoS: 1000, running: 3, act: "failed", wanted: 1 }); // 120 s
      await insertLook(tx, { agoS: 30, running: 2, busy: 9, act: "written", wanted: 1 }); // 30 s
      await insertLook(tx, { agoS: 60, running: 5, busy: 0, pool: "other" }); // 60 s
      await insertLook(tx, {
        agoS: 90,
        running: 5,
        pool: "default/dry-run",
        act: "dry",
        wanted: 2,
      });

      const { steps, pools, until } = await statsOf(tx, HOUR_S, prices);
      const at = (agoS: number) =>
        new Date(Date.parse(until) - 1000 * agoS).toISOString().replace(".000", "");
      assertEquals(steps, {
        items: [
          { at: at(3540), pool: "default", from: 1, to: 3, reason: "2 jobs wait" },
          { at: at(30), pool: "default", from: 2, to: 1, reason: "because" },
        ],
        cut: false,
      });
      // Replicas: 4·60 + 1·60 + 3·120 + 3·120 + 2·30 = 1080 s. Busy: 4·60 + 1·60 + 2·120 + 2·30 = 600 s.
      // A month of 720 h: busy 2·20 + 1.5·10 = 55 dollars, idle 0.01·20 + 0.1·10 = 1.2.
      // 600 s · 55 / 2592000 s = 0.01273, 480 s · 1.2 / 2592000 s = 0.00022; 1080 s · 55 = 0.02292.
      assertEquals(pools.items, [
        {
          ...{ pool: "default", seen_hours: 0.108, replica_hours: 0.3, busy_hours: 0.167 },
          ...{ dollars: 0.013, dollars_if_busy: 0.0229 },
        },
        {
          ...{ pool: "other", seen_hours: 0.017, replica_hours: 0.083, busy_hours: 0 },
          ...{ dollars: 0.0001, dollars_if_busy: 0.0064 },
        },
      ]);
      // 720 replicas at work for an hour are one for a month: 20 dollars a vCPU, 10 a GB.
      await tx`delete from ${tx(schema)}.looks`;
      for (let agoS = 3600; agoS > 0; agoS -= 120) {
        await insertLook(tx, { agoS, running: 720, busy: 720 });
      }
      const one = { vcpu: 1, gb: 0, idleVcpu: 0, idleGb: 0 };
      const [full] = (await statsOf(tx, HOUR_S, one)).pools.items;
      assertEquals([full.seen_hours, full.replica_hours, full.dollars], [1, 720, 20]);
      const idle = (await statsOf(tx, HOUR_S, { ...one, vcpu: 0, gb: 1 })).pools.items[0];
      assertEquals(idle.dollars, 10);
    }),
);

databaseTest("the newest 1000 steps are told, in their order", (sql) =>
  still(sql, async (tx) => {
    await tx`
      insert into ${
      tx(schema)
    }.looks (pool, number, at, controller, seen, wanted, code, reason, act)
      select 'default', n, now() - (2000 - n) * interval '1 second', gen_random_uuid(),
        '{"platform": {"configured": 1, "running": 1, "crashed": 0}, "queue": null}', 2, 'x', n,
        'written'
      from generate_series(1, 1001) n`;
    const { steps, pools } = await statsOf(tx, HOUR_S, prices);
    assertEquals([steps.items.length, steps.cut], [1000, true]);
    assertEquals([steps.items[0].reason, steps.items[999].reason], ["2", "1001"]);
    // Who is busy is not known: none is taken to have waited.
    assertEquals(pools.items[0].busy_hours, pools.items[0].replica_hours);
  }));

databaseTest("stats prints tables, or one JSON object", async (sql, url) => {
  await insertFinal(sql, { agoS: 100, waitS: 1, runS: 20 });
  await insertLook(sql, {
    ...{ agoS: 1000, running: 2, busy: 1, act: "written", wanted: 4, reason: "3 jobs wait" },
  });
  const text = await run(url, "--since", "30m");
  assertEquals([text.code, text.stderr], [0, "stats: --database-url … --since 30m\n"]);
  for (
    const line of [
      /^the last 30m, from \S+Z to \S+Z$/m,
      /^done +1 {2}in this time$/m,
      /^scheduled .*\nqueued +0 {2}now\nrunning .*\nreview .*\ndone .*\nfailed .*\ncancelled /m,
      /^a +1 +1\.000 s +1\.000 s +1\.000 s +20\.0 s +20\.0 s +20\.0 s$/m,
      /^\S+Z +default +2 +4 +3 jobs wait$/m,
      /^default +0\.03 +0\.07 +0\.03 +0\.0026 +0\.0051$/m, // 2·120 s, half of them busy
    ]
  ) assertMatch(text.stdout, line);
  const json = await run(url, "--json", "--vcpu", "0", "--gb", "1", "--idle-gb", "1.0");
  assertEquals(json.code, 0);
  const stats = JSON.parse(json.stdout);
  assertEquals(stats.states.done, 1);
  assertEquals(stats.kinds.items[0].run_s, { p50: 20, p95: 20, p99: 20 });
  assertEquals(stats.steps.items[0].to, 4);
  assertEquals(stats.pools.items[0].dollars_if_busy, 0.0009); // 240 s · 10 / 2592000 s
  const short = await run(url, "--since", "1s");
  assertStringIncludes(short.stdout, "no job finished in this time, and none is there now");
});

databaseTest("stats says plainly that there is nothing", async (_sql, url) => {
  const text = await run(url);
  assertEquals(text.code, 0);
  for (
    const line of [
      "the last 1h, from ",
      "no job finished in this time, and none is there now",
      "no step of a controller in this time",
      "no look of a controller saw replicas in this time: hours and cost are not known",
    ]
  ) assertStringIncludes(text.stdout, line);
  const json = JSON.parse((await run(url, "--json")).stdout);
  assertEquals([json.kinds.items, json.steps.items, json.pools.items], [[], [], []]);
  assertEquals(json.finished, { jobs: 0, cut: false, first_at: null });
});

Deno.test("stats refuses a duration that is none, naming it and the rule", async () => {
  for (
    const since of ["1", "h", "0h", "-1h", "1.5h", "1w", "367d", "9999999999s", "1h30m", " 1h"]
  ) {
    const { code, stderr } = await run("postgres://nowhere.invalid/x", "--since", since);
    assertEquals(code, 2, since);
    const rule = "it must be a duration such as 30m, 24h or 7d, from 1s to 366d";
    assertStringIncludes(stderr, `--since is "${since}": ${rule}`);
  }
});

Deno.test("stats on a database without tables says what to run", async () => {
  await using database = await emptyDatabase();
  const { code, stderr } = await run(database.url);
  assertEquals(code, 1);
  assert(stderr.includes("deno task migrate"), stderr);
});
