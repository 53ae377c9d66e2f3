/** With a million jobs the dashboard's statements read a bounded number of rows, and tell the truth. */
import { assert, assertEquals } from "@std/assert";
import { attempts, COUNTED_TO, queueStatus } from "../listing.ts";
import { type Pool, schema, type Sql } from "../db.ts";
import { setQueue } from "../queue.ts";
import * as overview from "../web/overview.ts";
import { toRetry } from "../web/pages/bulk.ts";
import { databaseTest as test } from "./database.ts";

async function counted(sql: Sql): Promise<number> {
  const [{ n }] = await sql`
    select sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))::float8 as n
    from pg_class c left join pg_index i on i.indexrelid = c.oid
    where coalesce(i.indrelid, c.oid) = any(array[${`${schema}.jobs`}::regclass,
      ${`${schema}.looks`}::regclass, ${`${schema}.processes`}::regclass])`;
  return n;
}

/**
 * How many rows and index entries of jobs, looks and processes a statement reads, as the server
 * counts them.
 */
async function rowsRead(sql: Pool, statement: (sql: Sql) => Promise<unknown>): Promise<number> {
  return await sql.begin(async (tx) => {
    await tx`set local max_parallel_workers_per_gather = 0`; // other processes count for themselves
    // What is counted and not yet told of may be of transactions before, too.
    const before = await counted(tx);
    await statement(tx);
    return await counted(tx) - before;
  }) as number;
}

test("with a million jobs and 50,000 looks each of the dashboard's statements reads a bounded number of rows", async (sql) => {
  const s = sql(schema);
  await setQueue(sql, "other");
  await sql`
    insert into ${s}.jobs (queue, kind, owner, payload, status, due_at, claimed_at, finished_at, error)
    select case when n % 5 = 0 then 'other' else 'default' end, 'kind-' || n % 7, 'acme', '{}', status,
      now() + case when status = 'scheduled' then interval '1 hour' else interval '0' end,
      case when status in ('done', 'failed') then now() end,
      case when status in ('done', 'failed', 'cancelled') then now() - n * interval '1 ms' end,
      case when status = 'failed' then 'error ' || n % 3 end
    from (select n, case when n % 10 < 5 then 'done' when n % 10 < 7 then 'failed' when n % 10 = 7 then 'cancelled'
      when n % 10 = 8 then 'queued' else 'scheduled' end as status from generate_series(1, 1000000) n) jobs`;
  await sql`
    insert into ${s}.looks (pool, number, at, controller, seen, wanted, code, reason, act)
    select 'pool-' || n % 2, n / 2, now() - n * interval '1 s', gen_random_uuid(),
      '{"queue": {"work": [{"queued": 3, "running": 1}], "workers": {"reporting": 1, "busy": 1}}, "platform": {"running": 2}}',
      1, 'up', 'because', 'none' from generate_series(1, 50000) n`;
  await sql`analyze ${s}.jobs, ${s}.looks, ${s}.processes`;
  const day = 86_400;
  const bounds: [string, number, (sql: Sql) => Promise<unknown>][] = [
    // A row is counted up to four times: as fetched and as returned, for the index and for the table.
    ["queueStatus", 4 * 6 * COUNTED_TO, queueStatus],
    ["lately", 4 * overview.MOST_FINISHED, overview.lately],
    ["failures", 4 * overview.MOST_FAILED, overview.failures],
    ["seen", 4 * overview.MOST_LOOKS, (sql) => overview.seen(sql, "pool-1", day)],
    ["costs", 4 * 20_000, (sql) => overview.costs(sql, day)],
    ["pools", 500, overview.pools],
    ["processes", 1000, (sql) => overview.processes(sql, 45)],
    ["toRetry", 40_000, (sql) => toRetry(sql, {}, null)],
    ["toRetry of none", 40_000, (sql) => toRetry(sql, { kind: "nothing" }, "nothing")],
    ["attempts", 1000, (sql) => attempts(sql, "1")],
  ];
  const read: Record<string, number> = {};
  for (const [name, most, statement] of bounds) {
    read[name] = await rowsRead(sql, statement);
    assert(read[name] <= most, `${name} reads ${read[name]} rows, and ${most} is the most`);
  }
  assert(read.lately >= overview.MOST_FINISHED, `the rows are counted: ${JSON.stringify(read)}`);
  assert(
    await rowsRead(sql, (sql) => Promise.resolve(sql`select count(*) from ${s}.jobs`)) >= 1_000_000,
  );

  const depths = await queueStatus(sql);
  assertEquals(depths.map(({ name, queued }) => [name, queued]), [
    ["default", COUNTED_TO],
    ["other", 0],
    ["webhooks", 0],
  ]);
  const [{ read: jobs }] = await overview.lately(sql);
  assertEquals(jobs, overview.MOST_FINISHED);
  const { ids, scanned } = await toRetry(sql, {}, "error 1");
  assertEquals([ids.length, scanned], [1001, 10_000]);
});

test("the overview counts what is there", async (sql) => {
  const s = sql(schema);
  await setQueue(sql, "other", { paused: true });
  await sql`
    insert into ${s}.jobs (queue, kind, payload, status, due_at, claimed_at, finished_at, error)
    select 'other', 'a', '{}'::jsonb, 'queued', now() - interval '30 s', null::timestamptz, null::timestamptz, null
    from generate_series(1, 3)
    union all
    select 'default', 'a', '{}', 'done', now() - interval '50 s', now() - interval '40 s', now() - interval '20 s', null
    from generate_series(1, 6)
    union all
    select 'default', 'b', '{}', 'failed', now() - interval '50 s', now() - interval '40 s', now() - interval '10 s', 'no luck'
    from generate_series(1, 2)
    union all
    select 'default', 'b', '{}', 'failed', now() - interval '3 hours', now() - interval '3 hours', now() - interval '2 hours', 'long ago'`;
  const other = (await queueStatus(sql)).find((it) => it.name === "other")!;
  assertEquals([other.queued, other.paused], [3, true]);
  assert(other.oldest_wait_s! >= 30 && other.oldest_wait_s! < 60);
  const kinds = await overview.lately(sql);
  assertEquals(
    kinds.map((
      it,
    ) => [it.kind, it.jobs, it.failed, Math.round(it.wait_p50_s!), Math.round(it.run_p95_s!)]),
    [["a", 6, 0, 10, 20], ["b", 2, 2, 10, 30]],
  );
  assertEquals(
    (await overview.failures(sql)).map((it) => [it.kind, it.message, it.jobs]),
    [["b", "long ago", 1], ["b", "no luck", 2]],
  );
});

test("a look that could not see the queue is no zero in the overview", async (sql) => {
  await sql`
    insert into ${
    sql(schema)
  }.looks (pool, number, controller, seen, wanted, code, reason, act) values
      ('b', 1, gen_random_uuid(), '{"queue": null, "platform": {"running": 2, "configured": 3}}', 3, 'unknown', 'x', 'none'),
      ('b', 2, gen_random_uuid(), '{"queue": {"work": [], "workers": {"reporting": 0, "busy": 0}}, "platform": null}', 3, 'unknown', 'x', 'none'),
      ('a', 1, gen_random_uuid(), '{"queue": null, "platform": null}', null, 'unknown', 'x', 'none')`;
  const seen = await overview.seen(sql, "b", 3600);
  assertEquals(
    seen.map(({ waiting, busy, replicas, configured }) => [waiting, busy, replicas, configured]),
    [[null, null, 2, 3], [0, 0, null, null]],
  );
  assertEquals(await overview.pools(sql), ["a", "b"]);
});
