/** Queues whose owners take turns, and queues that start so many jobs in so long. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { connect, type Pool, schema } from "../db.ts";
import { survey } from "../looks.ts";
import * as processes from "../processes.ts";
import * as queueClaims from "../claims.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { startWorker } from "./processes.ts";

const kinds = ["a"];
type Way = "lock" | "repeatable_read";

const aWorker = (sql: Pool) =>
  processes.register(sql, { role: "worker", name: "test", version: "0", kinds });

/** So many jobs of an owner; null: of nobody. */
const jobsOf = (owner: string | null, count: number, priority = 0): queue.NewJob[] =>
  Array.from({ length: count }, () => ({
    ...{ kind: "a", queue: "q", priority },
    ...(owner === null ? {} : { owner }),
  }));

async function claim(sql: Pool, worker: string, most: number, way: Way = "lock", idle = true) {
  const options = { worker, kinds, most, leaseS: 60, idle, token: crypto.randomUUID() };
  try {
    return await queueClaims.claim(sql, { queue: "q", claim: way }, options);
  } catch (error) {
    if ((error as { code?: string }).code !== "55P03") throw error;
    return []; // the others had the lock for a second
  }
}

/** The owners of one claim's jobs, counted. */
async function owners(sql: Pool, worker: string, most: number): Promise<Record<string, number>> {
  const counts: Record<string, number> = {};
  for (const { owner } of await claim(sql, worker, most)) {
    counts[owner ?? "-"] = (counts[owner ?? "-"] ?? 0) + 1;
  }
  return counts;
}

for (const [way, most] of [["lock", 1], ["lock", 10], ["repeatable_read", 3]] as const) {
  test(`owners take turns among four claimers of ${most}, by ${way}`, async (sql, url) => {
    await queue.setQueue(sql, "q", { fair: true, claim: way });
    // One after the other, so that the order in line is not the order of turns.
    for (const [owner, count] of [["b", 60], ["a", 8], [null, 8], ["c", 8]] as const) {
      await queue.enqueue(sql, jobsOf(owner, count));
    }
    const pools = Array.from({ length: 4 }, () => connect(url, { max: 1 }));
    try {
      await Promise.all(pools.map(async (pool) => {
        const worker = await aWorker(pool);
        // Nothing else orders them: they claim as fast as they can.
        while ((await queueClaims.look(pool, ["q"], kinds)).ready.length > 0) {
          await claim(pool, worker, most, way);
        }
      }));
    } finally {
      await Promise.all(pools.map((pool) => pool.end({ timeout: 1 })));
    }
    // Whenever somebody was served for the n-th time, nobody who still waited was behind by two.
    const claims = await sql<{ owners: string[] }[]>`
      select jsonb_agg(coalesce(owner, '-')) as owners from ${sql(schema)}.jobs
      group by claimed_at, claim_token order by claimed_at`;
    const left: Record<string, number> = { a: 8, b: 60, c: 8, "-": 8 };
    const served: Record<string, number> = { a: 0, b: 0, c: 0, "-": 0 };
    for (const claim of claims) {
      for (const owner of claim.owners) served[owner]++, left[owner]--;
      const waiting = Object.keys(left).filter((owner) => left[owner] > 0);
      const most = Math.max(...Object.values(served));
      if (waiting.length < 2) continue;
      for (const owner of waiting) assert(most - served[owner] <= 1, JSON.stringify(served));
    }
    assertEquals(served, { a: 8, b: 60, c: 8, "-": 8 });
  });
}

test("a newcomer among one with 10,000 waiting is served in the next round", async (sql) => {
  await queue.setQueue(sql, "q", { fair: true });
  await queue.enqueue(sql, jobsOf("large", 10_000));
  const worker = await aWorker(sql);
  assertEquals(await owners(sql, worker, 10), { large: 10 });
  await queue.enqueue(sql, jobsOf("new", 3));
  assertEquals(await owners(sql, worker, 1), { new: 1 });
  assertEquals(await owners(sql, worker, 1), { large: 1 });
  assertEquals(await owners(sql, worker, 10), { new: 2, large: 5 }, "its share, and no more");
  assertEquals(await owners(sql, worker, 10), { large: 10 });
  await queue.enqueue(sql, [...jobsOf("new", 5), ...jobsOf("other", 5)]);
  assertEquals(await owners(sql, worker, 10), { new: 4, other: 3, large: 3 }, "by rounds");
});

test("the turns go on where they stood, whoever claims next", async (sql, url) => {
  await queue.setQueue(sql, "q", { fair: true });
  for (const owner of ["a", "b", "c", "d"]) await queue.enqueue(sql, jobsOf(owner, 5));
  const order: (string | null)[] = [];
  for (let i = 0; i < 8; i++) {
    const pool = connect(url, { max: 1 }); // a worker of one claim
    try {
      order.push(...(await claim(pool, await aWorker(pool), 1)).map(({ owner }) => owner));
    } finally {
      await pool.end();
    }
  }
  assertEquals(order.join(""), "abcdabcd");
  assertEquals(await owners(sql, await aWorker(sql), 3), { a: 1, b: 1, c: 1 });
  assertEquals(await owners(sql, await aWorker(sql), 3), { d: 1, a: 1, b: 1 });
});

test("priority orders the jobs of one owner, and gets nobody another's turn", async (sql) => {
  await queue.setQueue(sql, "q", { fair: true });
  await queue.enqueue(sql, [...jobsOf("a", 2), ...jobsOf("b", 2), ...jobsOf("a", 1, 9)]);
  await queue.enqueue(sql, jobsOf("b", 1, -5));
  const worker = await aWorker(sql);
  const order: string[] = [];
  for (let i = 0; i < 6; i++) {
    const [{ owner, priority }] = await claim(sql, worker, 1);
    order.push(`${owner}${priority}`);
  }
  assertEquals(order, ["a9", "b0", "a0", "b0", "a0", "b-5"]);
});

test("a queue is made fair, and not fair again, while jobs wait", async (sql) => {
  const worker = await aWorker(sql);
  await queue.setQueue(sql, "q");
  await queue.enqueue(sql, jobsOf("large", 50));
  await queue.enqueue(sql, jobsOf("small", 20));
  await queue.enqueue(sql, [{ ...jobsOf("later", 1)[0], delay_s: 60 }]);
  await queue.setQueue(sql, "q", { fair: true });
  assertEquals(await owners(sql, worker, 10), { large: 5, small: 5 });
  await sql`update ${sql(schema)}.jobs set due_at = now() where status = 'scheduled'`;
  await queueClaims.promote(sql);
  assertEquals(await owners(sql, worker, 3), { large: 1, small: 1, later: 1 });
  await queue.setQueue(sql, "q", { fair: false });
  assertEquals(await owners(sql, worker, 10), { large: 10 }, "in line again");
  const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs
    where status = 'queued' and turn is not null`;
  assertEquals(n, 0);
  await queue.setQueue(sql, "q", { claim: "skip_locked" });
});

test(
  "a queue that is made fair waits for the enqueues under way, which get their turns",
  async (sql, url) => {
    await queue.setQueue(sql, "q");
    const other = connect(url, { max: 1 });
    try {
      let made: Promise<void> | undefined;
      await other.begin(async (tx) => {
        await queue.enqueue(tx, jobsOf("early", 2));
        made = queue.setQueue(sql, "q", { fair: true });
        await waitFor(async () => {
          const [{ n }] = await sql`select count(*)::integer as n from pg_locks
          where not granted and mode = 'ShareRowExclusiveLock'
            and database = (select oid from pg_database where datname = current_database())`;
          return n === 1;
        }, "the change to wait");
      });
      await made;
    } finally {
      await other.end({ timeout: 1 });
    }
    await queue.enqueue(sql, jobsOf("late", 2));
    assertEquals(await owners(sql, await aWorker(sql), 2), { early: 1, late: 1 });
  },
);

test("a job that goes back has its owner's next turn, and one to run alone is nobody's company", async (sql) => {
  await queue.setQueue(sql, "q", { fair: true });
  for (const owner of ["a", "b", "c"]) await queue.enqueue(sql, jobsOf(owner, 3));
  const worker = await aWorker(sql);
  const [first] = await claim(sql, worker, 1);
  await queue.release(sql, worker, first, "test");
  await sql`update ${sql(schema)}.jobs set alone = true where id = ${first.id}`;
  const alone = async () => (await queueClaims.look(sql, ["q"], kinds)).ready[0].alone;
  assertEquals([first.owner, await alone()], ["a", false]);
  assertEquals(await owners(sql, worker, 10), { b: 1, c: 1 }, "up to the one that is to run alone");
  assertEquals(await alone(), true);
  assertEquals((await claim(sql, worker, 10)).map(({ id }) => id), [first.id]);
  assertEquals(await owners(sql, worker, 6), { a: 2, b: 2, c: 2 });
});

test("a job that was put in by hand, and has no turn, is run when nobody has one", async (sql) => {
  await queue.setQueue(sql, "q", { fair: true });
  await sql`insert into ${sql(schema)}.jobs (queue, kind, payload, status)
    values ('q', 'a', '{}', 'queued')`;
  await queue.enqueue(sql, jobsOf("a", 1));
  const worker = await aWorker(sql);
  assertEquals(await owners(sql, worker, 5), { a: 1 });
  assertEquals(await owners(sql, worker, 5), { "-": 1 });
});

for (const analyzed of [true, false]) {
  test(
    `turns are found in the index${analyzed ? "" : ", on stale statistics too"}: no line is read`,
    async (sql) => {
      const t = sql(schema);
      await queue.setQueue(sql, "q", { fair: true });
      if (!analyzed) await sql`analyze ${t}.jobs`; // which are none
      await sql`alter table ${t}.jobs set (autovacuum_enabled = false)`;
      await sql`insert into ${t}.jobs (queue, kind, payload, status, owner, turn)
        select 'q', 'a', '{}', 'queued', owner, '/' || owner
        from (select case when i % 2 = 0 then 'large' else 'o' || i end as owner
              from generate_series(1, 20000) i) o`;
      if (analyzed) await sql`analyze ${t}.jobs`;
      const worker = await aWorker(sql);
      await claim(sql, worker, 10);
      const buffers = async () => {
        const [{ "QUERY PLAN": [plan] }] = await sql`explain (analyze, buffers, format json)
          select * from ${t}.claim_lock('q', '{a}', 10, ${worker}, gen_random_uuid(), 60)`;
        return plan.Plan["Shared Hit Blocks"] + plan.Plan["Shared Read Blocks"];
      };
      const read = await buffers();
      assert(read < 1000, `${read} pages for 10 jobs, of 20,000 that wait`);
    },
  );
}

/** The most starts within one period of so many seconds, by the rows: of the last attempts, and of those before. */
async function mostWithin(sql: Pool, periodS: number): Promise<{ starts: number; most: number }> {
  const [row] = await sql<{ starts: number; most: number }[]>`
    with starts as (
      select claimed_at as at from ${sql(schema)}.jobs where claimed_at is not null
      union all select claimed_at from ${sql(schema)}.attempts
    )
    select count(*)::integer as starts, max((select count(*) from starts b
      where b.at between a.at and a.at + ${periodS} * interval '1 second'))::integer as most
    from starts a`;
  return row;
}

for (const way of ["lock", "repeatable_read"] as const) {
  test(`eight claimers never pass a rate limit, by ${way}`, async (sql, url) => {
    const [limit, periodS] = [7, 0.3];
    await queue.setQueue(sql, "q", { rate_limit: limit, rate_period_s: periodS, claim: way });
    await queue.enqueue(sql, [...jobsOf(null, 40), ...jobsOf("a", 10)]);
    // No clock but the database's counts.
    const { now } = Date;
    Date.now = () => now() + (Math.random() - 0.5) * 1_200_000;
    let released = 0;
    let done = 0;
    try {
      await Promise.all(Array.from({ length: 8 }, async (_, i) => {
        while (done < 50) { // a worker and its connection of a few claims
          const pool = connect(url, { max: 1 });
          const worker = await aWorker(pool);
          for (let claims = 0; claims < 30 && done < 50; claims++) {
            for (const job of await claim(pool, worker, 1 + i % 4, way)) {
              // What starts again counts again.
              if (released < 5 && ++released) await queue.release(pool, worker, job, "test");
              else assert(await queue.finish(pool, worker, job, null), `${done++}`);
            }
          }
          await pool.end({ timeout: 1 });
        }
      }));
    } finally {
      Date.now = now;
    }
    const { starts, most } = await mostWithin(sql, periodS);
    assertEquals(starts, 55);
    assert(most <= limit, `${most} starts within ${periodS} s`);
    const [{ kept }] = await sql`select count(*)::integer as kept from ${sql(schema)}.starts`;
    assert(kept <= 2 * limit, `${kept} rows are kept`);
  });
}

test("a rate limit leaves what it can, and the look says when there is room", async (sql) => {
  await queue.setQueue(sql, "q", { rate_limit: 5, rate_period_s: 60 });
  await queue.enqueue(sql, jobsOf(null, 20));
  const worker = await aWorker(sql);
  const look = () => queueClaims.look(sql, null, kinds);
  assertEquals((await claim(sql, worker, 3)).length, 3);
  assertEquals([(await look()).ready.length, (await look()).opens_ms], [1, null]);
  assertEquals((await claim(sql, worker, 10)).length, 2);
  const held = await look();
  assertEquals(held.ready, []);
  assert(held.opens_ms! > 50_000 && held.opens_ms! <= 60_001, `${held.opens_ms}`);
  assertEquals(await claim(sql, worker, 10), []);
  // The first three leave the period, and no more.
  await sql`update ${sql(schema)}.starts set started_at = started_at - interval '1 minute'
    where total = 3`;
  assertEquals((await look()).opens_ms, null);
  assertEquals((await claim(sql, worker, 10)).length, 3);
  await queue.setQueue(sql, "q", { rate_limit: null, rate_period_s: null, max_running: 9 });
  assertEquals((await claim(sql, worker, 10)).length, 1, "eight run");
  const { ready, opens_ms } = await look();
  assertEquals([ready.length, opens_ms], [0, null], "its max_running holds it, and no rate");
});

test(
  "a start counts from when its claim was in order, and not from when it began to wait",
  async (sql, url) => {
    await queue.setQueue(sql, "q", { rate_limit: 2, rate_period_s: 60 });
    await queue.enqueue(sql, jobsOf(null, 1));
    const worker = await aWorker(sql);
    const other = connect(url, { max: 1 });
    try {
      let claimed: Promise<queue.Job[]> | undefined;
      let freed: string | undefined;
      await other.begin(async (tx) => {
        await tx`select ${tx(schema)}.lock_queue('q')`;
        claimed = claim(sql, worker, 1);
        await waitFor(async () => {
          const [{ n }] = await sql`select count(*)::integer as n from pg_locks
          where not granted and locktype = 'advisory'
            and database = (select oid from pg_database where datname = current_database())`;
          return n === 1;
        }, "the claim to wait");
        [{ freed }] = await tx`select clock_timestamp()::text as freed`;
      });
      assertEquals((await claimed)!.length, 1);
      const [{ after }] = await sql`select started_at >= ${freed!}::timestamptz as after
      from ${sql(schema)}.starts`;
      assert(after, "it was counted before it had the lock");
    } finally {
      await other.end({ timeout: 1 });
    }
  },
);

test("where the clock was set back, starts of later count from now, and no longer", async (sql) => {
  await queue.setQueue(sql, "q", { rate_limit: 2, rate_period_s: 0.4 });
  await queue.enqueue(sql, jobsOf(null, 4));
  const worker = await aWorker(sql);
  assertEquals((await claim(sql, worker, 10)).length, 2);
  await sql`update ${sql(schema)}.starts set started_at = started_at + interval '1 hour'`;
  assertEquals((await queueClaims.look(sql, null, kinds)).ready.length, 1);
  assertEquals(await claim(sql, worker, 10), []);
  assertEquals((await queueClaims.look(sql, null, kinds)).ready, []);
  await waitFor(async () => (await claim(sql, worker, 10)).length === 2, "the next two");
});

test("owners take turns under a rate limit", async (sql) => {
  await queue.setQueue(sql, "q", { fair: true, rate_limit: 4, rate_period_s: 60 });
  await queue.enqueue(sql, [...jobsOf("a", 50), ...jobsOf("b", 50)]);
  const worker = await aWorker(sql);
  assertEquals(await owners(sql, worker, 3), { a: 2, b: 1 });
  assertEquals(await owners(sql, worker, 3), { b: 1 });
});

test("a worker comes back when there is room, and not after its longest poll", async (sql, url) => {
  await queue.setQueue(sql, "q", { rate_limit: 5, rate_period_s: 0.5 });
  await queue.enqueue(sql, jobsOf(null, 15).map((job) => ({ ...job, kind: "echo" })));
  await using _worker = startWorker(url, ["--poll-max-ms", "60000", "--concurrency", "10"]);
  await waitFor(async () => {
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs
      where status = 'done'`;
    return n === 15;
  }, "three periods");
  const { starts, most } = await mostWithin(sql, 0.5);
  assertEquals(starts, 15);
  assert(most <= 5, `${most} within a period`);
});

test("what a rate limit holds back is seen by the controller and by the health check", async (sql) => {
  await queue.setQueue(sql, "q", { rate_limit: 5, rate_period_s: 60 });
  await queue.enqueue(sql, jobsOf(null, 20));
  const worker = await aWorker(sql);
  const seen = async () => {
    const pools = { workers: "default", looks: "default" };
    const [{ queued, rate_room }] = (await survey(sql, worker, pools, 45, false)).work;
    const [{ waiting: [{ apart }] }] = await sql`
      select waiting from ${sql(schema)}.service_state(45)`;
    return [queued, rate_room, apart];
  };
  assertEquals(await seen(), [20, 5, null]);
  await claim(sql, worker, 5);
  assertEquals(await seen(), [15, 0, "limited"]);
});

test("settings that do not go together are refused with the rule", async (sql) => {
  const refused: [queue.QueueSettings, string][] = [
    [{ fair: true, claim: "skip_locked" }, "fair_needs_order"],
    [{ rate_limit: 5, rate_period_s: 1, claim: "skip_locked" }, "rate_limit_needs_order"],
    [{ rate_limit: 5 }, "rate_limit_with_period"],
    [{ rate_period_s: 5 }, "rate_limit_with_period"],
    [{ rate_limit: 0, rate_period_s: 1 }, "rate_limit_positive"],
    [{ rate_limit: 5, rate_period_s: 0 }, "rate_period_s_from_a_millisecond_to_31_days"],
    [{ rate_limit: 5, rate_period_s: 3e6 }, "rate_period_s_from_a_millisecond_to_31_days"],
  ];
  for (const [settings, rule] of refused) {
    await assertRejects(() => queue.setQueue(sql, "q", settings), Error, rule);
  }
  await queue.setQueue(sql, "q", { fair: true });
  await assertRejects(
    () => queue.setQueue(sql, "q", { claim: "skip_locked" }),
    Error,
    "fair_needs_order",
  );
  await queue.setQueue(sql, "q", { fair: false, claim: "skip_locked" });
  await queue.setQueue(sql, "q", { rate_limit: 5, rate_period_s: 1.5 });
  const [row] = await sql`select claim, fair, rate_limit, rate_period_s from ${sql(schema)}.queues
    where name = 'q'`;
  assertEquals({ ...row }, { claim: "lock", fair: false, rate_limit: 5, rate_period_s: 1.5 });
});
