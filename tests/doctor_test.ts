/** `deno task doctor`: each finding provoked on a real server, and none where all is well. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { connect, type Pool, schema, withQueueLock } from "../db.ts";
import { installedPostgres, startPostgres } from "../dev/postgres.ts";
import { migrate } from "../migrate.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { examine, type Report, textOf } from "../tools/doctor.ts";
import { picksUnskipped } from "../tools/doctor/queues.ts";
import { databaseTest, emptyDatabase, testDatabase, waitFor } from "./database.ts";
import { missingNote, pgbouncerVersion, startPgBouncer } from "./pgbouncer.ts";
import { runScript, startWorker } from "./processes.ts";

// One with what must be set before a server starts. As the file is loaded: see database.ts.
const own = await startPostgres({
  settings: {
    shared_preload_libraries: "pg_stat_statements",
    max_prepared_transactions: "4",
  },
});

/** Runs `body` with a migrated database of the server above. */
async function onOwn(name: string, body: (sql: Pool, url: string) => Promise<void>): Promise<void> {
  const admin = connect(own.url, { max: 1 });
  await admin`create database ${admin(name)}`;
  const url = Object.assign(new URL(own.url), { pathname: `/${name}` }).href;
  await migrate(url);
  const sql = connect(url, { max: 4 });
  try {
    await body(sql, url);
  } finally {
    await sql.end({ timeout: 1 });
    await admin`drop database ${admin(name)} with (force)`;
    await admin.end({ timeout: 1 });
  }
}

const options = { watchS: 1, heldS: 60, prepare: true };
/** For what does not change while it is watched. */
const glance = (url: string, more: Partial<typeof options> = {}) =>
  examine(url, { ...options, ...more }, AbortSignal.abort());
const only = ({ items }: Report, code: string) => items.filter((item) => item.code === code);
const one = (report: Report, code: string) => {
  const found = only(report, code);
  assertEquals(found.length, 1, `${code} among ${JSON.stringify(report.items)}`);
  return found[0];
};
const doctor = (url: string, ...args: string[]) =>
  runScript("tools/doctor.ts", args, { DATABASE_URL: url });

/** Makes the server count what the statements before did, which it does once a second. */
const counted = (sql: Pool) => sql`select pg_stat_force_next_flush()`;

/** Waits until a doctor that was started has begun to watch. */
const watching = (sql: Pool) =>
  waitFor(
    async () =>
      (await sql`select from pg_stat_activity where datname = current_database()
        and application_name = 'siding doctor' and query like '%wait_event_type%'`).length,
    "the doctor to watch",
  );

/** Puts `count` jobs in, in whatever state and time. */
const insertJobs = (sql: Pool, count: number, finishedAgoS = 3600, payload = "{}") =>
  sql`
    insert into ${sql(schema)}.jobs (queue, kind, payload, status, finished_at)
    select 'default', 'echo', ${payload}::text::jsonb, 'done',
      now() - ${finishedAgoS} * interval '1 second'
    from generate_series(1, ${count})`;

Deno.test("a busy queue that is well has no finding, with pg_stat_statements looking on", async () => {
  await onOwn("busy", async (sql, url) => {
    await sql`create extension pg_stat_statements`;
    await queue.setQueue(sql, "narrow", { max_running: 2 });
    await using _one = startWorker(url, ["--concurrency", "10"]);
    await using _two = startWorker(url, ["--concurrency", "10"]);
    const over = new AbortController();
    const churn = (async () => {
      while (!over.signal.aborted) {
        const jobs = ["default", "default", "default", "narrow"].map((queue, i) => ({
          ...{ kind: "echo", queue, owner: `owner ${i}`, payload: i },
        }));
        await queue.enqueue(sql, jobs);
        await new Promise((done) => setTimeout(done, 5));
      }
    })();
    try {
      await waitFor(
        async () =>
          (await sql`select count(*)::integer as n from ${sql(schema)}.jobs
                     where status = 'done'`)[0].n > 100,
        "jobs to be done",
        { timeoutMs: 60_000 },
      );
      const report = await examine(url, { ...options, watchS: 2 });
      assertEquals([report.items, report.unread, report.bottleneck], [[], [], null]);
      assert(report.figures.transactions_per_s > 10, "it was busy");
      assertEquals(report.figures.workers, 2);
      assertMatch(textOf(report), /^busy on PostgreSQL 18.*\nIt is well\. It is at none/);
    } finally {
      over.abort();
      await churn;
    }
  });
});

databaseTest("who waits for whom is told, and for which queue's lock", async (sql, url) => {
  await queue.setQueue(sql, "turns", { claim: "lock" });
  const other = connect(url, { max: 1, name: "the waiter" });
  let waiter: Promise<unknown> = Promise.resolve();
  try {
    await withQueueLock(sql, "turns", async (tx) => {
      const [{ pid }] = await tx`select pg_backend_pid() as pid`;
      waiter = other`select ${other(schema)}.lock_queue('turns')`.execute();
      await waitFor(
        async () =>
          (await sql`select from pg_locks where not granted
          and database = (select oid from pg_database where datname = current_database())`).length,
        "somebody to wait",
      );
      const report = await examine(url, options);
      const { figures, remedy, title } = one(report, "lock_waits");
      assertEquals([report.bottleneck, figures.queues], ["locks", ["turns"]]);
      const [wait] = figures.waits as { name: string; holders: { pid: number }[] }[];
      assertEquals([wait.name, wait.holders[0].pid], ["the waiter", pid]);
      assertStringIncludes(title, 'the lock of queue "turns"');
      assertStringIncludes(remedy, 'queue "turns"');
      const shown = textOf(report);
      assertStringIncludes(shown, "first of a queue's three bottlenecks");
      assertStringIncludes(shown, "(the waiter) waits");
    }, 60);
    await waiter;
  } finally {
    await other.end({ timeout: 1 });
  }
});

databaseTest(
  "rows and tables that others wait for are told, without the values of statements",
  async (sql, url) => {
    const others = connect(url, { max: 2 });
    const change = `update "${schema}".queues set paused = false where name <> 'secret'`;
    let waiters: Promise<unknown>[] = [];
    try {
      await sql.begin(async (tx) => {
        await tx.unsafe(change);
        await tx`lock table ${tx(schema)}.jobs in access exclusive mode`;
        waiters = [others.unsafe(change).execute(), queue.get(others, ["1"])];
        await waitFor(
          async () =>
            (await sql`select from pg_stat_activity where wait_event_type = 'Lock'
              and datname = current_database()`).length === 2,
          "both to wait",
        );
        const report = await examine(url, options);
        const waits = one(report, "lock_waits").figures.waits as { lock: string }[];
        assertEquals(waits.map(({ lock }) => lock).sort(), [
          "a row that another transaction changed",
          `table ${schema}.jobs (AccessShareLock)`,
        ]);
        assert(!JSON.stringify(report).includes("secret"), "a value is shown");
        // It does not wait itself.
        const { why } = report.unread.find(({ what }) => what === "jobs past their lease")!;
        assertStringIncludes(why, "lock timeout");
      });
      await Promise.all(waiters);
    } finally {
      await others.end({ timeout: 1 });
    }
  },
);

databaseTest(
  "transactions that are done again are told, and whose claims they are",
  async (sql, url) => {
    await queue.setQueue(sql, "strict", { claim: "repeatable_read", max_running: 1000 });
    const pools = Array.from({ length: 6 }, () => connect(url, { max: 1, prepare: false }));
    const over = new AbortController();
    // As claims.claim does it, but with some time between the snapshot and the change of the queue's row.
    const claims = pools.map(async (pool) => {
      while (!over.signal.aborted) {
        await pool.unsafe(
          `set transaction isolation level repeatable read; select pg_sleep(0.01);
         select from "${schema}".claim_repeatable_read('strict', '{echo}', 1, gen_random_uuid(),
           gen_random_uuid(), 60)`,
        ).simple().catch((error) => assertEquals(error.code, "40001"));
      }
    });
    try {
      await waitFor(
        async () =>
          (await sql`select xact_rollback > 20 as yes from pg_stat_database
                             where datname = current_database()`)[0].yes,
        "claims that were undone",
      );
      const { figures } = one(await examine(url, { ...options, watchS: 2 }), "retries");
      assert((figures.repeatable_read_claims as Record<string, number>).strict > 0);
      assert(Number(figures.rollback_share) > 0.1, JSON.stringify(figures));
    } finally {
      over.abort();
      await Promise.all(claims);
      await Promise.all(pools.map((pool) => pool.end({ timeout: 1 })));
    }
  },
);

databaseTest("a deadlock is told", async (sql, url) => {
  await queue.setQueue(sql, "a");
  await queue.setQueue(sql, "b");
  const done = new AbortController();
  const report = examine(url, { ...options, watchS: 30 }, done.signal);
  await watching(sql);
  const arrived = Promise.withResolvers<void>();
  let there = 0;
  const lockBoth = async (first: string, second: string) => {
    const pool = connect(url, { max: 1 });
    await pool.begin(async (tx) => {
      await tx`set local deadlock_timeout = 20`;
      await tx`update ${tx(schema)}.queues set paused = false where name = ${first}`;
      if (++there === 2) arrived.resolve();
      await arrived.promise;
      await tx`update ${tx(schema)}.queues set paused = false where name = ${second}`;
    }).catch((error) => assertEquals(error.code, "40P01"));
    await pool.end({ timeout: 1 }); // which has it counted
  };
  await Promise.all([lockBoth("a", "b"), lockBoth("b", "a")]);
  await waitFor(
    async () =>
      (await sql`select deadlocks > 0 as yes from pg_stat_database
                           where datname = current_database()`)[0].yes,
    "the deadlock to be counted",
  );
  done.abort();
  assertEquals(one(await report, "deadlocks").figures.deadlocks, 1);
});

databaseTest(
  "an index that is updated and not read is named; one that is read is not",
  async (sql, url) => {
    await sql`create index of_the_team on ${sql(schema)}.jobs (status, created_at)`;
    await sql`create index read_by_the_team on ${sql(schema)}.jobs (attempt)`;
    await sql.begin(async (tx) => {
      await tx`set local enable_seqscan = off`;
      await tx`select count(*) from ${tx(schema)}.jobs where attempt = 7`;
      await counted(tx as unknown as Pool);
    });
    const writer = connect(url, { max: 1 });
    await insertJobs(writer, 1200);
    await writer.end({ timeout: 1 });
    await waitFor(
      async () =>
        (await sql`select s.n_tup_ins >= 1000 and i.idx_scan > 0 as yes
      from pg_stat_user_tables s join pg_stat_user_indexes i on i.indexrelname = 'read_by_the_team'
      where s.relname = 'jobs'`)[0]?.yes,
      "rows and scans to be counted",
    );
    const report = await glance(url);
    const { figures, remedy } = one(report, "unread_index");
    assertEquals([figures.index, figures.scans], ["of_the_team", 0]);
    assertStringIncludes(remedy, `drop index concurrently "${schema}"."of_the_team"`);
    assertEquals(report.bottleneck, null, "nobody writes");
    const watching = async () =>
      (await sql`select from pg_stat_activity where datname = current_database()
      and application_name = 'siding doctor' and query like '%wait_event_type%'`).length;
    await waitFor(async () => await watching() === 0, "the last doctor to be gone");
    const done = new AbortController();
    const watched = examine(url, { ...options, watchS: 30 }, done.signal);
    await waitFor(watching, "the doctor to watch");
    const busy = connect(url, { max: 1 });
    await insertJobs(busy, 30_000);
    await busy.end({ timeout: 1 });
    await waitFor(
      async () =>
        (await sql`select n_tup_ins > 30000 as yes from pg_stat_user_tables where relname = 'jobs'`)[
          0
        ]
          .yes,
      "rows to be counted",
    );
    done.abort();
    assertEquals((await watched).bottleneck, "indexes");
  },
);

databaseTest("a transaction that holds xmin is told, with its process", async (sql, url) => {
  await sql.begin(async (tx) => {
    const [{ pid }] = await tx`select pg_backend_pid() as pid, pg_current_xact_id()`;
    const { figures, remedy, title } = one(await glance(url, { heldS: 0 }), "xmin_held");
    assertEquals([figures.holder, figures.pid, figures.state], [
      "transaction",
      pid,
      "idle in transaction",
    ]);
    assertStringIncludes(remedy, `pg_terminate_backend(${pid})`);
    assertStringIncludes(title, "idle in transaction");
    assertEquals(only(await glance(url), "xmin_held"), [], "not for 60 s yet");
  });
});

Deno.test("a prepared transaction that holds xmin is told by its name", async () => {
  await onOwn("prepared", async (sql, url) => {
    const writer = connect(url, { max: 1 });
    await writer.unsafe("begin; select pg_current_xact_id(); prepare transaction 'forgotten'")
      .simple();
    const { figures, remedy } = one(await glance(url, { heldS: 0 }), "xmin_held");
    assertEquals([figures.holder, figures.name], ["prepared_transaction", "forgotten"]);
    assertStringIncludes(remedy, "rollback prepared 'forgotten'");
    await writer.unsafe("rollback prepared 'forgotten'");
    await writer.end({ timeout: 1 });
    assertEquals(only(await glance(url, { heldS: 0 }), "xmin_held"), []);
    await sql`select 1`;
  });
});

const binDir = installedPostgres().map((it) => it.binDir).find((folder) => {
  try {
    return Deno.statSync(`${folder}/pg_basebackup`).isFile;
  } catch {
    return false;
  }
});

/** A standby of `primary` by a slot, with feedback. */
async function startStandby(primary: Awaited<ReturnType<typeof startPostgres>>) {
  const home = await Deno.makeTempDir({ prefix: "siding-standby-" });
  const { uid, gid } = await Deno.stat(primary.dataDir);
  const user = Deno.uid() === 0 ? { uid: uid!, gid: gid! } : {};
  if (Deno.uid() === 0) await Deno.chown(home, uid!, gid!);
  const { password } = new URL(primary.url);
  await Deno.writeTextFile(`${home}/password`, password + "\n");
  if (Deno.uid() === 0) await Deno.chown(`${home}/password`, uid!, gid!);
  const { success, stderr } = await new Deno.Command(`${binDir}/pg_basebackup`, {
    args: ["-d", primary.url, "-D", `${home}/data`, "-R", "-C", "-S", "feed", "-c", "fast", "-N"],
    cwd: home,
    ...user,
  }).output();
  assert(success, new TextDecoder().decode(stderr));
  const server = await startPostgres({
    ...{ dataDir: home, binDir },
    settings: { hot_standby_feedback: "on", wal_receiver_status_interval: "1", fsync: "off" },
  });
  return {
    url: server.url,
    async [Symbol.asyncDispose]() {
      await server.stop();
      await Deno.remove(home, { recursive: true });
    },
  };
}

Deno.test({
  name: "an xmin that a replication slot or a standby holds is told" +
    (binDir ? "" : " (skipped: no pg_basebackup is installed)"),
  ignore: !binDir,
  async fn() {
    await using primary = await startPostgres({ binDir });
    await migrate(primary.url);
    await using standby = await startStandby(primary);
    const [sql, reader] = [primary.url, standby.url].map((url) => connect(url, { max: 2 }));
    try {
      await reader.begin("isolation level repeatable read", async (tx) => {
        await tx`select 1`;
        await waitFor(
          async () => (await sql`select from pg_replication_slots where xmin is not null`).length,
          "the standby's feedback",
        );
        await sql.unsafe(`do $$ begin for i in 1..10100 loop
          perform pg_current_xact_id(); commit; end loop; end $$`);
        const report = await glance(primary.url);
        assertEquals(report.unread, [], "an older server tells all of it, too");
        const slot = one(report, "xmin_held");
        assertEquals([slot.figures.holder, slot.figures.name], ["replication_slot", "feed"]);
        assertStringIncludes(slot.remedy, "pg_drop_replication_slot('feed')");
        // Without its slot the standby says it by the connection; the slot keeps what it had.
        await reader.unsafe("alter system set primary_slot_name = ''");
        await reader`select pg_reload_conf()`;
        await waitFor(
          async () =>
            (await sql`select from pg_stat_replication where backend_xmin is not null`).length,
          "the standby's feedback without a slot",
        );
        const both = only(await glance(primary.url), "xmin_held").map(({ figures }) =>
          figures.holder
        );
        assertEquals(both.sort(), ["replication_slot", "standby"]);
      });
    } finally {
      await Promise.all([sql.end({ timeout: 1 }), reader.end({ timeout: 1 })]);
    }
  },
});

databaseTest(
  "an autovacuum that is off for the jobs is told, with their dead rows",
  async (sql, url) => {
    await sql`alter table ${sql(schema)}.jobs set (autovacuum_enabled = off)`;
    const writer = connect(url, { max: 1 });
    await insertJobs(writer, 1500);
    await writer`update ${writer(schema)}.jobs set progress = 1`;
    await writer.end({ timeout: 1 });
    await waitFor(
      async () =>
        (await sql`select n_dead_tup >= 1500 as yes from pg_stat_user_tables where relname = 'jobs'`)[
          0
        ]
          .yes,
      "dead rows to be counted",
    );
    const { figures, severity, remedy } = one(await glance(url), "autovacuum_off");
    assertEquals([figures.table, figures.dead_rows, severity], ["jobs", 1500, "critical"]);
    assertStringIncludes(remedy, "reset (autovacuum_enabled)");
  },
);

Deno.test("an autovacuum that does not come is told; and one that the server has off", async () => {
  await onOwn("behind", async (sql, url) => {
    await sql`alter system set autovacuum_naptime = 1`;
    await sql`select pg_reload_conf()`;
    await sql.begin(async (tx) => {
      // What keeps it away, as the change of a table that was left open would.
      await tx`lock table ${tx(schema)}.jobs in share update exclusive mode`;
      const writer = connect(url, { max: 1 });
      await insertJobs(writer, 1500);
      await writer`update ${writer(schema)}.jobs set progress = 1`;
      await writer.end({ timeout: 1 });
      const report = await waitFor(
        async () => {
          const report = await glance(url);
          return only(report, "autovacuum_behind").length > 0 && report;
        },
        "the doctor to see it, five times its pace later",
      );
      const { figures, severity } = one(report, "autovacuum_behind");
      assertEquals([figures.table, figures.last_vacuum_s, severity], ["jobs", null, "warning"]);
      assert(Number(figures.dead_rows) > Number(figures.threshold));
    });
    await waitFor(async () => (await glance(url)).items.length === 0, "autovacuum to come");
    await sql`alter system set autovacuum = off`;
    await sql`select pg_reload_conf()`;
    try {
      await waitFor(
        async () => only(await glance(url), "autovacuum_off")[0]?.figures.setting === "autovacuum",
        "the doctor to see that it is off",
      );
    } finally {
      await sql`alter system reset all`;
      await sql`select pg_reload_conf()`;
    }
  });
});

databaseTest("connections near a limit are told", async (sql, url) => {
  const name = new URL(url).pathname.slice(1);
  await sql`alter database ${sql(name)} connection limit 5`;
  await Promise.all([1, 2, 3, 4].map(() => sql`select pg_sleep(0.1)`)); // which opens all four
  const { figures, severity } = one(await glance(url), "connections");
  assertEquals(figures, { of: `database "${name}"`, used: 5, places: 5 });
  assertEquals(severity, "critical");
  await sql`alter database ${sql(name)} connection limit 50`;
  assertEquals(only(await glance(url), "connections"), []);
});

Deno.test({
  name: "a pooler that breaks prepared statements is told, one that carries them passes" +
    missingNote,
  ignore: !pgbouncerVersion,
  async fn() {
    await using database = await testDatabase();
    await using pooler = await startPgBouncer(database.url);
    const [major, minor] = pgbouncerVersion!.split(".").map(Number);
    const carries = major > 1 || minor >= 21;
    const prepared = pooler.url.replace("?prepare=false", "");
    const report = await glance(prepared);
    assertEquals(only(report, "pooler_breaks_prepared").length, carries ? 0 : 1);
    assertEquals(
      report.figures.pooler,
      carries ? "carries prepared statements" : "breaks prepared statements",
    );
    assertEquals(report.unread, [], "all the rest is read through it");
    // What is set right is no finding.
    assertEquals((await glance(prepared, { prepare: false })).items, []);
    assertEquals((await glance(pooler.url)).items, []);
    assertEquals((await glance(database.url)).figures.pooler, "none seen");
  },
});

databaseTest("jobs that run past their lease are told", async (sql, url) => {
  await queue.enqueue(sql, [{ kind: "echo" }, { kind: "echo" }, { kind: "echo" }]);
  const options = { worker: crypto.randomUUID(), kinds: ["echo"], most: 3, leaseS: 60 };
  const ready = { queue: "default", claim: "skip_locked" as const };
  const [job] = await claims.claim(sql, ready, { ...options, token: crypto.randomUUID() });
  assertEquals(only(await glance(url), "past_lease"), []);
  await sql`update ${sql(schema)}.jobs set lease_until = now() - interval '1 hour'
            where id <= ${Number(job.id) + 1}`;
  const { figures, remedy } = one(await glance(url), "past_lease");
  assertEquals([figures.jobs, figures.first_job, figures.queues], [2, job.id, ["default"]]);
  assertMatch(String(figures.longest_past_s), /^360\d$/);
  assertStringIncludes(remedy, "No worker is alive");
});

databaseTest(
  "claim settings that do not fit are told, for limits and for none",
  async (sql, url) => {
    await queue.setQueue(sql, "narrow", { max_running: 2 });
    await queue.setQueue(sql, "turns", { claim: "lock" });
    await queue.setQueue(sql, "calm", { claim: "lock" });
    await queue.enqueue(sql, [{ kind: "echo", queue: "narrow" }]);
    const worker = { role: "worker" as const, name: "w", version: "0", kinds: ["echo"] };
    for (let i = 0; i < 8; i++) await processes.register(sql, worker);
    assertEquals((await glance(url)).items, [], "eight workers to two places will do");
    await processes.register(sql, worker);
    const done = new AbortController();
    const report = examine(url, { ...options, watchS: 30 }, done.signal);
    await waitFor(
      async () =>
        (await sql`select from pg_stat_activity where datname = current_database()
      and application_name = 'siding doctor' and query like '%wait_event_type%'`).length,
      "the doctor to watch",
    );
    await sql`
    insert into ${sql(schema)}.jobs (queue, kind, payload, status, finished_at)
    select 'turns', 'echo', '{}', 'done', clock_timestamp() from generate_series(1, 5000)`;
    done.abort();
    const seen = await report;
    const { figures, remedy } = one(seen, "claims_in_turns_for_nothing");
    assertEquals([figures.queue, figures.claim], ["turns", "lock"]);
    assertStringIncludes(remedy, "set claim = 'skip_locked' where name = 'turns'");
    const narrow = one(seen, "more_claimers_than_places").figures;
    assertEquals([narrow.queue, narrow.workers, narrow.max_running], ["narrow", 9, 2]);
  },
);

databaseTest("due jobs that no live worker serves are told", async (sql, url) => {
  await queue.enqueue(sql, [{ kind: "echo" }, { kind: "orphan" }]);
  await processes.register(sql, { role: "worker", name: "w", version: "0", kinds: ["echo"] });
  assertEquals((await glance(url)).items, [], "not for long");
  await sql`update ${sql(schema)}.jobs set due_at = now() - interval '10 minutes'`;
  const { figures, title } = one(await glance(url), "unserved");
  assertEquals([figures.queue, figures.kind, figures.workers], ["default", "orphan", 1]);
  assertStringIncludes(title, "10 min");
});

databaseTest("a migration behind is told, and a database without tables", async (sql, url) => {
  await sql`delete from ${sql(schema)}.migrations
            where number = (select max(number) from ${sql(schema)}.migrations)`;
  const { figures, remedy } = one(await glance(url), "migrations_behind");
  assertEquals([figures.missing, remedy], [1, "deno task migrate"]);
  await using empty = await emptyDatabase();
  assertStringIncludes(one(await glance(empty.url), "schema_mismatch").remedy, "deno task migrate");
});

databaseTest("a table that is mostly empty room is told", async (sql, url) => {
  const payload = JSON.stringify(
    Array.from({ length: 30 }, (_, i) => `${i}`.repeat(20).slice(0, 30)).join(""),
  );
  await insertJobs(sql, 40_000, 3600, payload);
  await sql`analyze ${sql(schema)}.jobs`;
  assertEquals(only(await glance(url), "bloat"), []);
  await sql`delete from ${sql(schema)}.jobs where id % 20 > 0`;
  await sql`analyze ${sql(schema)}.jobs`;
  const { figures } = one(await glance(url), "bloat");
  assertEquals(figures.table, "jobs");
  assert(Number(figures.empty_share) > 0.9, JSON.stringify(figures));
});

Deno.test("dequeues of any table that do not skip locked rows are told", async () => {
  await onOwn("statements", async (sql, url) => {
    await sql`create extension pg_stat_statements`;
    await sql`create table tasks (id integer primary key, state text, taken timestamptz)`;
    for (let i = 0; i < 12; i++) {
      await sql`select id from tasks where state = 'new' order by id limit 1 for update`;
      await sql`select id from tasks where state = 'new' order by id limit 1 for update skip locked`;
      await sql`update tasks set state = 'run' where id = (select id from tasks where state = 'new' limit 1)`;
    }
    await sql`update tasks set taken = now() where id in (select id from tasks limit 1)`; // once
    const found = only(await glance(url), "dequeue_without_skip_locked");
    assertEquals(found.map(({ figures }) => figures.calls), [12, 12]);
    const texts = found.map(({ figures }) => String(figures.query)).sort();
    assertMatch(texts[0], /^select id from tasks .* for update$/);
    assertMatch(texts[1], /^update tasks/);
  });
});

Deno.test("a dequeue without skip locked is known by its text", () => {
  const bad = [
    "SELECT * FROM t WHERE s = $1 ORDER BY id LIMIT $2 FOR UPDATE",
    "select id from t limit 1 for no key update nowait",
    "update t set s = $1 where id = (\n  select id from t where s = $2 order by id limit 1) returning *",
    "update t set s = 1 where id in (select id from t fetch first 5 rows only)",
    "update t set s = 1 where id = any(array(select id from t limit 5))",
    "delete from t where id = (select id from t order by id limit 1) returning *",
    "with n as (select id from t limit 5) update t set s = 1 from n where t.id = n.id",
  ];
  const fine = [
    "select id from t limit 1 for update skip locked",
    "update t set s = 1 where id = (select id from t limit 1 for update skip locked)",
    "select id from t where id = $1 for update",
    "select id from t order by id limit 10",
    "update t set s = 1 where id = $1",
    "delete from t where id in (select id from t where old limit 1000)",
    "insert into t select 'for update limit'",
  ];
  assertEquals(bad.filter((text) => !picksUnskipped(text)), []);
  assertEquals(fine.filter((text) => picksUnskipped(text)), []);
});

databaseTest(
  "a role with few rights is told what could not be read, and no more",
  async (sql, url) => {
    const role = `few_${crypto.randomUUID().slice(0, 8)}`;
    await sql.unsafe(`create role ${role} login password 'few'`);
    try {
      const report = await glance(
        Object.assign(new URL(url), { username: role, password: "few" }).href,
      );
      assertEquals(report.items, []);
      const unread = JSON.stringify(report.unread);
      assertStringIncludes(unread, `grant pg_monitor to \\"${role}\\"`);
      assertStringIncludes(unread, "permission denied for schema");
      assertEquals(report.figures.jobs, null);
    } finally {
      await sql.unsafe(`drop role ${role}`);
    }
  },
);

databaseTest("its exit codes and its JSON", async (sql, url) => {
  const [text, usage, gone] = await Promise.all([
    doctor(url, "--watch-s", "1"),
    doctor(url, "--watch-s", "0"),
    doctor("postgres://nobody:hush@127.0.0.1:1/none"),
  ]);
  assertEquals([text.code, text.stderr], [0, "doctor: --database-url … --watch-s 1\n"]);
  assertStringIncludes(text.stdout, "It is well.");
  assertEquals(usage.code, 2);
  assertStringIncludes(usage.stderr, '--watch-s is "0"');
  assertEquals(gone.code, 3);
  assert(!gone.stderr.includes("hush"), gone.stderr);
  await sql`alter table ${sql(schema)}.looks set (autovacuum_enabled = off)`;
  const json = await doctor(url, "--watch-s", "1", "--json");
  const report: Report = JSON.parse(json.stdout);
  assertEquals([json.code, report.items[0].code], [1, "autovacuum_off"]);
  assertEquals(Object.keys(report.items[0]), ["code", "severity", "title", "figures", "remedy"]);
});
