/** I1: a job is running under at most one worker and attempt, whichever way its queue is claimed. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { connect, type Pool, schema } from "../db.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { pooled, testDatabase } from "./database.ts";

const ways = ["skip_locked", "lock", "repeatable_read"] as const;
type Way = typeof ways[number];
const kinds = ["a"];

/** A worker with a connection of its own. */
interface Claimer {
  sql: Pool;
  id: string;
}

/** Runs a test with a queue `q` and so many claimers, each on a connection of its own. */
function test(
  name: string,
  settings: queue.QueueSettings,
  count: number,
  body: (claimers: Claimer[], sql: Pool) => Promise<void>,
): void {
  Deno.test(name, async () => {
    await using database = await testDatabase();
    const sql = connect(database.url, { max: 2 });
    const pools = Array.from({ length: count }, () => connect(database.url, { max: 1 }));
    try {
      await queue.setQueue(sql, "q", settings);
      const claimers = await Promise.all(pools.map(async (pool, index) => ({
        sql: pool,
        id: await processes.register(pool, {
          role: "worker",
          name: `${index}`,
          version: "0",
          kinds,
        }),
      })));
      await body(claimers, sql);
    } finally {
      await Promise.all([sql, ...pools].map((pool) => pool.end({ timeout: 1 })));
    }
  });
}

async function claim({ sql, id }: Claimer, way: Way, most = 1): Promise<queue.Job[]> {
  const options = { worker: id, kinds, most, leaseS: 60, token: crypto.randomUUID() };
  try {
    return await claims.claim(sql, { queue: "q", claim: way }, options);
  } catch (error) {
    if ((error as { code?: string }).code !== "55P03") throw error;
    return []; // the others had the lock for a second
  }
}

/** Whether nothing waits any more: a claim that comes back empty may just have come too late. */
const isDrained = async (sql: Pool) => (await claims.look(sql, ["q"], kinds)).ready.length === 0;

for (const way of ways) {
  test(
    `six workers drain 40 jobs, each exactly once, by ${way}`,
    { claim: way },
    6,
    async (claimers, sql) => {
      await queue.enqueue(sql, Array.from({ length: 40 }, () => ({ kind: "a", queue: "q" })));
      const taken = await Promise.all(claimers.map(async (claimer) => {
        const ids: string[] = [];
        for (;;) {
          const [job] = await claim(claimer, way);
          if (!job) return ids;
          assertEquals(job.attempt, 1);
          ids.push(job.id);
          assert(await queue.finish(claimer.sql, claimer.id, job, null));
        }
      }));
      const all = taken.flat();
      assertEquals([all.length, new Set(all).size], [40, 40]);
      const rows = await sql`select distinct status, attempt from ${sql(schema)}.jobs`;
      assertEquals(Array.from(rows), [{ status: "done", attempt: 1 }]);
    },
  );
}

// Through a pooler, where more of them wait for a server than have one, fewer: it takes longer.
const batches = pooled ? 2 : 10;
for (const way of ["skip_locked", "lock"] as const) {
  test(
    `64 workers take ${batches}0,000 jobs, each exactly once, by ${way}`,
    { claim: way },
    64,
    async (claimers, sql) => {
      const jobs = Array.from({ length: 10_000 }, () => ({ kind: "a", queue: "q" }));
      for (let i = 0; i < batches; i++) await queue.enqueue(sql, jobs);
      const taken = await Promise.all(claimers.map(async (claimer) => {
        const ids: string[] = [];
        for (;;) {
          const claimed = await claim(claimer, way, 100);
          if (claimed.length === 0 && await isDrained(claimer.sql)) return ids;
          ids.push(...claimed.map((job) => job.id));
        }
      }));
      const all = taken.flat();
      assertEquals([all.length, new Set(all).size], [batches * 10_000, batches * 10_000]);
      // The rows agree: each is with the worker that was given it.
      const rows = await sql`select worker_id, count(*)::integer as n, max(attempt) as attempt
      from ${sql(schema)}.jobs group by worker_id`;
      const given = new Map(claimers.map(({ id }, i) => [id, taken[i].length]));
      for (const { worker_id, n, attempt } of rows) {
        assertEquals([n, attempt], [given.get(worker_id), 1]);
      }
    },
  );
}

for (const way of ["lock", "repeatable_read"] as const) {
  const limited = { claim: way, max_running: 3 };

  test(
    `a queue with max_running 3 never runs 4 under 16 claimers, by ${way}`,
    limited,
    16,
    async (claimers, sql) => {
      await queue.enqueue(sql, Array.from({ length: 200 }, () => ({ kind: "a", queue: "q" })));
      let most = 0;
      let done = 0;
      await Promise.all(claimers.map(async (claimer, index) => {
        while (done < 200) {
          // Some ask for more than may run.
          for (const job of await claim(claimer, way, 1 + index % 4)) {
            const [{ n }] = await claimer.sql`select count(*)::integer as n from ${
              claimer.sql(schema)
            }.jobs
            where status = 'running'`;
            most = Math.max(most, n);
            assert(await queue.finish(claimer.sql, claimer.id, job, null));
            done++;
          }
        }
      }));
      assertEquals([done, most], [200, 3]);
    },
  );

  test(
    `a higher-priority job between two claims' snapshots lets no 4th run, by ${way}`,
    limited,
    4,
    async (claimers, sql) => {
      await queue.enqueue(sql, Array.from({ length: 4 }, () => ({ kind: "a", queue: "q" })));
      await claim(claimers[0], way, 2);
      const [slow, fast] = claimers.slice(1);
      const level = way === "lock" ? "read committed" : "repeatable read";
      const late = slow.sql.begin(`isolation level ${level}`, async (tx) => {
        await tx`select count(*) from ${tx(schema)}.jobs`; // its snapshot
        await queue.enqueue(sql, [{ kind: "a", queue: "q", priority: 9 }]);
        assertEquals((await claim(fast, way)).map((job) => job.priority), [9]);
        return await tx`select id from ${tx(schema)}.${
          tx(`claim_${way}`)
        }('q', '{a}', 1, ${slow.id},
        gen_random_uuid(), 60)`;
      });
      if (way === "lock") assertEquals((await late).length, 0);
      else await assertRejects(() => late, Error, "could not serialize");
      const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs
      where status = 'running'`;
      assertEquals(n, 3);
    },
  );
}

test(
  "a claim at the wrong isolation level is refused",
  { claim: "repeatable_read" },
  1,
  async ([claimer]) => {
    await assertRejects(
      () =>
        claimer.sql`select * from ${claimer.sql(schema)}.claim_repeatable_read('q', '{a}', 1,
      ${claimer.id}, gen_random_uuid(), 60)`,
      Error,
      "is claimed at REPEATABLE READ, not READ COMMITTED",
    );
  },
);

for (const way of ways) {
  test(
    `a claim that thinks its queue is claimed by another way than ${way} gets nothing`,
    { claim: way },
    1,
    async ([claimer], sql) => {
      await queue.enqueue(sql, [{ kind: "a", queue: "q" }]);
      for (const other of ways) {
        if (other !== way) assertEquals(await claim(claimer, other), [], other);
      }
      assertEquals((await claim(claimer, way)).length, 1);
    },
  );
}

test(
  "the claim reads its jobs from the partial index, in order and without a sort",
  {},
  1,
  async ([claimer], sql) => {
    await queue.enqueue(sql, Array.from({ length: 5000 }, () => ({ kind: "a", queue: "q" })));
    await sql.unsafe(`analyze ${schema}.jobs`);
    const plan = await sql`
    explain (format json) select id from ${sql(schema)}.jobs
    where queue = 'q' and status = 'queued' and kind = any('{a}'::text[])
    order by priority desc, due_at, id limit 10 for update skip locked`;
    const text = JSON.stringify(plan[0]["QUERY PLAN"]);
    assert(text.includes("jobs_queued") && !text.includes('"Sort"'), text);
    assertEquals((await claim(claimer, "skip_locked")).length, 1);
  },
);
