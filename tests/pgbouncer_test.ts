/** I9: no session state, so all of it runs through PgBouncer in transaction mode. */
import { assert, assertEquals, assertRejects, assertStringIncludes } from "@std/assert";
import { connect, Database, describe, isDisconnect, patient, type Pool, schema } from "../db.ts";
import { via, withQueueLock } from "../db.ts";
import { startSite } from "../dev/site.ts";
import { outputsOf, writeFile } from "../files.ts";
import * as queue from "../queue.ts";
import { emptyDatabase, testDatabase, waitFor } from "./database.ts";
import { enqueue, enqueueMany } from "./kinds.ts";
import { missingNote, pgbouncerVersion, startPgBouncer } from "./pgbouncer.ts";
import { hasty, runScript, startScript, startWorker } from "./processes.ts";
import { startQuick } from "./replicas.ts";

/** Before 1.21 it asks one server for what was prepared on another. */
const carriesPrepared = pgbouncerVersion !== null && Number(pgbouncerVersion.split(".")[1]) >= 21;

/** The pooler's URL without its ?prepare=false. */
const preparing = (url: string) => url.replace("prepare=false", "prepare=true");

/** A test that is skipped where there is no PgBouncer. */
const poolerTest = (name: string, fn: () => Promise<void>) =>
  Deno.test({ name: name + missingNote, ignore: missingNote !== "", fn });

for (const prepare of [false, true]) {
  const missing = missingNote ||
    (prepare && !carriesPrepared ? " (skipped: this PgBouncer is older than 1.21)" : "");
  Deno.test({
    name: "workers, files, locks and all three claims go through PgBouncer in transaction mode" +
      `${prepare ? ", with prepared statements" : ""}${missing}`,
    ignore: missing !== "",
    async fn() {
      await using database = await testDatabase();
      await using pooler = await startPgBouncer(
        database.direct,
        prepare ? { max_prepared_statements: 100 } : {},
      );
      const url = prepare ? preparing(pooler.url) : pooler.url;
      const sql = connect(url, { max: 3, prepare, pipeline: false });
      try {
        await queue.setQueue(sql, "in-turns", { max_running: 3 });
        await queue.setQueue(sql, "strict", { claim: "repeatable_read", max_running: 3 });
        const content = new Blob(["x".repeat(3_000_000)]).stream();
        const file = await writeFile(via(sql), "a.bin", content, 10_000_000);
        const queues = ["default", "in-turns", "strict"];
        const entries = await queue.enqueue(
          sql,
          Array.from({ length: 60 }, (_, i) => ({
            ...(i % 10 === 0 ? { kind: "copy", files: [file.id] } : { kind: "echo", payload: i }),
            queue: queues[i % 3],
          })),
        );
        const flags = ["--concurrency", "4", `--prepare=${prepare}`, "--lease-s", "60"];
        await using one = startWorker(url, flags);
        await using two = startWorker(url, flags);
        const ids = entries.map((entry) => entry.id);
        await waitFor(
          async () => (await queue.get(sql, ids)).every(({ status }) => status === "done"),
          "all jobs to be done",
          { timeoutMs: 60_000 },
        );
        const jobs = await queue.get(sql, ids);
        assertEquals(jobs.filter((job) => job.attempt !== 1), [], "each ran once");
        assertEquals((await outputsOf(via(sql), ids[0]))[0].bytes, 3_000_000);
        // `begin` of the driver needs its pipeline, and a transaction keeps its server.
        const plain = connect(url, { max: 1, prepare });
        await withQueueLock(plain, "in-turns", async (tx) => {
          await tx`select count(*) from ${tx(schema)}.jobs`;
        });
        await plain.end();
        for (const worker of [one, two]) {
          assert(!/WRN|ERR/.test(worker.log()), worker.log());
          worker.kill("SIGTERM");
          assertEquals(await worker.ended, 0);
        }
        assert(!pooler.log().includes("not linked"), pooler.log());
      } finally {
        await sql.end({ timeout: 1 });
      }
    },
  });
}

poolerTest("a parameter that a pooler does not take is named, with the rule, and 2", async () => {
  await using database = await testDatabase();
  await using pooler = await startPgBouncer(database.direct);
  const scripts = [["worker.ts", "statement_timeout=5000"], ["tools/key.ts", "options=-c%20x=1"]];
  await Promise.all(scripts.map(async ([script, parameter]) => {
    const { code, stderr } = await runScript(script, script === "worker.ts" ? hasty : ["list"], {
      DATABASE_URL: `${pooler.url}&${parameter}`,
    });
    assertEquals(code, 2, stderr);
    const name = parameter.split("=")[0];
    assertStringIncludes(stderr, `a pooler takes no ${name} at the start of a connection`);
    assertStringIncludes(stderr, "DATABASE_URL");
  }));
});

Deno.test("what newer poolers refuse of ?options= is told, too, and is no reason to try again", () => {
  const newer = Object.assign(
    new Error("unsupported startup parameter in options: statement_timeout"),
    { code: "08P01" },
  );
  assertStringIncludes(describe(newer), "a pooler takes no statement_timeout");
  assertEquals(isDisconnect(newer), false);
});

Deno.test({
  name: "a transaction that finds its prepared statements on another server names the setting" +
    (missingNote || (carriesPrepared ? " (skipped: this PgBouncer carries them)" : "")),
  ignore: missingNote !== "" || carriesPrepared,
  async fn() {
    await using database = await testDatabase();
    await using pooler = await startPgBouncer(database.direct);
    const [sql, other] = [1, 2].map(() => connect(preparing(pooler.url), { max: 1 }));
    const plain = connect(pooler.url, { max: 1, prepare: true });
    try {
      // The server that prepared it is busy with the other's transaction.
      await sql`select ${1}::integer`;
      const refused = await other.begin(async (tx) => {
        await tx`select 1`;
        return await assertRejects(() => sql.begin((own) => own`select ${1}::integer`));
      });
      assertStringIncludes(describe(refused), "(26000): the pooler carries no prepared statements");
      assertStringIncludes(describe(refused), "set SIDING_PREPARE=false, or ?prepare=false in");
      assertEquals(plain.options.prepare, false, "the URL's counts, too");
    } finally {
      await Promise.all([sql, other, plain].map((pool) => pool.end({ timeout: 1 })));
    }
  },
});

Deno.test("what was prepared before an ALTER TABLE is prepared anew", async () => {
  await using database = await emptyDatabase();
  const db = new Database(database.direct, { max: 1 });
  try {
    await db.run((sql) => sql`create table notes (id bigint generated always as identity)`);
    const add = () => db.run((sql) => sql`insert into notes default values returning *`);
    await add();
    await db.run((sql) => sql`alter table notes add column more integer`);
    assertEquals((await add()).map((row) => ({ ...row })), [{ id: "2", more: null }]);
  } finally {
    await db.close();
  }
});

/**
 * Refuses every change of a job by a session that has prepared statements, as does a pooler that
 * lost them, or that kept them over an ALTER TABLE and hands them to each new client.
 */
const refusesPrepared = (code: string, message: string) => `
  create function refuse_prepared() returns trigger language plpgsql as $$ begin
    if exists (select from pg_prepared_statements where not from_sql) then
      raise exception using errcode = '${code}', message = '${message}';
    end if;
    return null;
  end $$;
  create trigger refuse_prepared before update on ${schema}.jobs
    for each statement execute function refuse_prepared();`;

for (
  const [code, message] of [
    ["0A000", "cached plan must not change result type"],
    ["26000", "prepared statement does not exist"],
  ]
) {
  Deno.test(`a worker whose prepared statements are refused (${code}) loses nothing, and says what to set`, async () => {
    await using database = await testDatabase();
    const sql = connect(database.direct, { max: 1, prepare: false });
    try {
      const entries = await enqueueMany(
        sql,
        Array.from({ length: 5 }, (_, i) => ({ kind: "echo" as const, payload: i })),
      );
      await sql.unsafe(refusesPrepared(code, message)).simple();
      await using worker = startWorker(database.direct, ["--concurrency", "2"]);
      const jobs = await waitFor(async () => {
        const jobs = await queue.get(sql, entries.map(({ id }) => id));
        return jobs.every(({ status }) => status === "done") && jobs;
      }, "the jobs");
      assertEquals(jobs.map(({ attempt, failures, releases }) => [attempt, failures, releases]), [
        ...Array(5).fill([1, 0, 0]),
      ]);
      assertStringIncludes(worker.log(), `${message} (${code}): `);
      assertStringIncludes(worker.log(), "SIDING_PREPARE=false");
    } finally {
      await sql.end({ timeout: 1 });
    }
  });
}

poolerTest(
  "a worker goes on after its pooler was restarted, and takes no more clients for a while",
  async () => {
    await using database = await testDatabase();
    await using pooler = await startPgBouncer(database.direct, { max_client_conn: 6 });
    const sql = connect(database.direct, { max: 1 });
    const others = connect(pooler.url, { max: 6 });
    try {
      await using worker = startWorker(pooler.url, ["--lease-s", "600"]);
      const gone = await Deno.makeTempFile();
      const { id } = await enqueue(sql, "until", { gone });
      const jobOf = async () => (await queue.get(sql, [id]))[0];
      await waitFor(async () => (await jobOf()).status === "running", "the job to run");
      await pooler.stop();
      await waitFor(() => /heartbeat: .*ECONNREFUSED/.test(worker.log()), "the worker to see it");
      await pooler.start();
      const taken = waitFor(async () => {
        const held = Array.from({ length: 6 }, () => others`select pg_sleep(0.3)`);
        await Promise.allSettled(held);
        return worker.log().includes("no more connections allowed");
      }, "the worker to be refused");
      await taken;
      await others.end({ timeout: 1 });
      await Deno.remove(gone); // it ends while its worker may still be refused
      const job = await waitFor(async () => {
        const job = await jobOf();
        return job.status === "done" && job;
      }, "the job to be done");
      assertEquals([job.attempt, job.crashes, job.releases], [1, 0, 0]);
    } finally {
      await Promise.all([sql, others].map((pool) => pool.end({ timeout: 1 })));
    }
  },
);

Deno.test("a statement that finds no connection free on the server (53300) is repeated until one is", async () => {
  await using database = await testDatabase();
  const sql = connect(database.direct, { max: 1 });
  const role = `siding_${crypto.randomUUID().slice(0, 8)}`;
  await sql.unsafe(`create role ${role} login password 'x' connection limit 0`);
  const theirs = Object.assign(new URL(database.direct), { username: role, password: "x" });
  const db = new Database(theirs.href, { max: 1 });
  const errors: string[] = [];
  const noted = {
    run: <T>(f: (sql: Pool) => Promise<T>) =>
      db.run(f).catch((error) => {
        errors.push(describe(error));
        throw error;
      }),
  };
  try {
    const answer = patient(noted, new AbortController().signal).run((sql) => sql`select 1 as one`);
    await waitFor(() => errors.length > 0, "a refusal");
    assertStringIncludes(errors[0], "53300");
    await sql.unsafe(`alter role ${role} connection limit 1`);
    assertEquals((await answer)[0].one, 1);
  } finally {
    await db.close();
    await sql.unsafe(`drop role ${role}`);
    await sql.end({ timeout: 1 });
  }
});

/** The site's `--connections`, and what README.md says that the others have. */
const CONNECTIONS = { worker: 4, controller: 2, site: 8 };

poolerTest(
  "20 workers, a controller and a site get on within 40 connections of the server, and nobody waits long",
  async () => {
    await using database = await testDatabase();
    const limits = { default_pool_size: 40, max_db_connections: 40, max_client_conn: 200 };
    await using pooler = await startPgBouncer(database.direct, limits);
    const sql = connect(database.direct, { max: 1 });
    const desk = connect(pooler.console, { max: 1, prepare: false });
    const show = async (what: string) => {
      const rows = Array.from(await desk.unsafe(`show ${what}`).simple());
      return rows.filter((row) => row.database === new URL(database.url).pathname.slice(1));
    };
    try {
      await using railway = await startQuick();
      const ways = ["default", "in-turns", "strict"];
      await queue.setQueue(sql, "in-turns", { max_running: 30 });
      await queue.setQueue(sql, "strict", { claim: "repeatable_read", max_running: 30 });
      const quiet = ["--log-level", "warning"];
      // Leases as they are: a machine that is busy with 22 processes' work would miss short ones.
      const times = ["--heartbeat-ms", "1000", "--lease-s", "120"];
      const flags = [...hasty, ...times, "--concurrency", "4", ...quiet];
      const env = { DATABASE_URL: pooler.url };
      await using workers = startScript("tests/many_workers.ts", ["20", ...flags], env);
      await using controller = startScript("controller.ts", ["--look-ms", "300", ...quiet], {
        ...env,
        ...{ SIDING_RAILWAY_URL: railway.url, SIDING_WORKER_SERVICE_ID: railway.serviceId },
        ...{ RAILWAY_ENVIRONMENT_ID: railway.environmentId, RAILWAY_TOKEN: railway.projectToken },
      });
      await using site = await startSite(pooler.url);
      await waitFor(
        async () => {
          const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.processes`;
          return n === 22;
        },
        "all to report",
        { timeoutMs: 60_000 },
      );
      const entries = await enqueueMany(
        sql,
        Array.from(
          { length: 600 },
          (_, i) => ({ kind: "echo" as const, payload: i, queue: ways[i % 3] }),
        ),
      );
      const seen = { server: 0, clients: 0 };
      await waitFor(
        async () => {
          const pages = ["/dashboard", "/api/jobs", "/health/service", "/queues"];
          const replies = await Promise.all(pages.map((page) => site.ask(page)));
          for (const reply of replies) {
            await reply.body?.cancel();
            assertEquals(reply.status, 200);
          }
          seen.clients = Math.max(seen.clients, (await show("clients")).length);
          seen.server = Math.max(seen.server, (await show("servers")).length);
          const [{ left }] = await sql`select count(*)::integer as left from ${sql(schema)}.jobs
          where status <> 'done' or attempt <> 1`;
          return left === 0;
        },
        `${entries.length} jobs, each in one attempt`,
        { timeoutMs: 60_000 },
      );
      assert(seen.server <= 40, `${seen.server} connections of the server`);
      const { worker, controller: one, site: its } = CONNECTIONS;
      const most = 20 * worker + one + its;
      assert(seen.clients <= most, `${seen.clients} connections of the pooler, and not ${most}`);
      const [stats] = await show("stats");
      const waitMs = Number(stats.total_wait_time) / 1000 / Number(stats.total_query_count);
      assert(waitMs < 100, `a statement waited ${waitMs} ms for a server, on the average`);
      const [{ acts }] = await sql`select count(*)::integer as acts from ${sql(schema)}.looks`;
      assert(acts > 0, "the controller looked");
      for (const script of [workers, controller, site]) {
        assert(!/WRN|ERR/.test(script.log()), script.log());
      }
      workers.kill("SIGTERM");
      assertEquals(await workers.ended, 0, workers.log());
    } finally {
      await Promise.all([sql, desk].map((pool) => pool.end({ timeout: 1 })));
    }
  },
);
