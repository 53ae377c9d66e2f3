/** Migrations: forward only, once each, whoever else is at it. */
import { fileURLToPath } from "node:url";
import { assert, assertEquals, assertRejects } from "@std/assert";
import { checkSchema, CODE_MIGRATION, connect, type Pool, schema, SchemaMismatch } from "../db.ts";
import { migrate, type Migration, migrations, missing } from "../migrate.ts";
import { emptyDatabase, testDatabase, waitFor } from "./database.ts";

/** Runs a test with an empty database. */
function test(
  name: string,
  body: (url: string, sql: Pool, direct: string) => Promise<void>,
): void {
  Deno.test(name, async () => {
    await using database = await emptyDatabase();
    const sql = connect(database.url, { max: 2 });
    try {
      await body(database.url, sql, database.direct);
    } finally {
      await sql.end({ timeout: 1 });
    }
  });
}

const step = (number: number, sql: string, floor = 1): Migration => ({
  number,
  name: "step",
  floor,
  sql,
});
const run = (script: string, args: string[], env: Record<string, string>) =>
  new Deno.Command(Deno.execPath(), {
    args: [
      "run",
      "-A",
      "--quiet",
      fileURLToPath(new URL(`../${script}`, import.meta.url)),
      ...args,
    ],
    env: { NO_COLOR: "1", ...env },
  }).output().then(({ code, stdout, stderr }) => ({
    code,
    out: new TextDecoder().decode(stdout),
    err: new TextDecoder().decode(stderr),
  }));

test("migrations are applied once, and a second run finds nothing to do", async (url, sql) => {
  assertEquals((await missing(url)).length, migrations().length);
  assertEquals((await migrate(url)).map(({ number }) => number), migrations().map((m) => m.number));
  assertEquals(await migrate(url), []);
  assertEquals(await missing(url), []);
  assertEquals(await checkSchema(sql), 0);
});

test(
  "processes that migrate at once apply each migration once, and all succeed",
  async (url, sql) => {
    const all = await Promise.all(Array.from({ length: 6 }, () => migrate(url)));
    assertEquals(all.flat().length, migrations().length);
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.migrations`;
    assertEquals(n, migrations().length);
  },
);

test(
  "a migration that fails leaves nothing of itself, and says which and why",
  async (url, sql) => {
    const steps = [
      step(1, "create table one (id integer)"),
      step(2, "create table two (id integer); select 1/0"),
    ];
    await assertRejects(
      () => migrate(url, () => {}, steps),
      Error,
      "migration of 2 step: division by zero",
    );
    const [{ one, two }] =
      await sql`select to_regclass('one') is not null as one, to_regclass('two') is not null as two`;
    assertEquals([one, two], [true, false]);
    assertEquals((await missing(url, steps)).map(({ number }) => number), [2]);
  },
);

test(
  "a migration waits for a long transaction without holding up those behind it",
  async (url, sql) => {
    await migrate(url, () => {}, [step(1, "create table busy (id integer)")]);
    const holder = connect(url, { max: 1 });
    const held = Promise.withResolvers<void>();
    const release = Promise.withResolvers<void>();
    const holding = holder.begin(async (tx) => {
      await tx`lock table busy in access share mode`;
      held.resolve();
      await release.promise;
    });
    await held.promise;
    const said: string[] = [];
    const waiting = migrate(url, (line) => said.push(line), [
      step(1, ""),
      step(2, "alter table busy add column more integer"),
    ]);
    await waitFor(() => said.length > 0, "the migration to give way once");
    assert(said[0].includes("lock timeout") && said[0].includes("trying again (1 of"), said[0]);
    // While it pauses, a reader gets through; while it waits, within the lock timeout.
    await sql`select count(*) from busy`;
    release.resolve();
    await holding;
    await holder.end();
    assertEquals((await waiting).map(({ number }) => number), [2]);
  },
);

test(
  "code runs on a database that is ahead of it, until one says that it is too old",
  async (url, sql) => {
    const known = migrations();
    const ahead = [...known, step(CODE_MIGRATION + 1, "", CODE_MIGRATION)];
    await migrate(url, () => {}, ahead);
    assertEquals(await checkSchema(sql), 0);
    const beyond = step(CODE_MIGRATION + 2, "", CODE_MIGRATION + 1);
    await assertRejects(
      () => migrate(url, () => {}, [...ahead, beyond]),
      SchemaMismatch,
      `needs code that knows migration ${
        CODE_MIGRATION + 1
      }; this code knows migrations up to ${CODE_MIGRATION}`,
    );
    const { code, err } = await run("worker.ts", [], { DATABASE_URL: url });
    assertEquals(code, 1);
    assert(err.includes("deploy newer code"), err);
  },
);

test("a connection that claims in turns goes on claiming through every migration", async (url) => {
  const all = migrations();
  const live = connect(url, { max: 1 }); // a worker's of before, whose plans are made
  const s = live(schema);
  const worker = crypto.randomUUID();
  try {
    // From the one on that has these functions. A later one that adds a column to jobs has to have
    // them planned anew ("structure of query does not match function result type").
    const first = all.findIndex(({ sql }) => sql.includes("claim_lock(queue_name")) + 1;
    for (let applied = first; applied <= all.length; applied++) {
      await migrate(url, () => {}, all.slice(0, applied));
      for (const claim of ["lock", "repeatable_read"]) {
        await live`insert into ${s}.queues (name, claim) values (${claim}, ${claim})
          on conflict do nothing`;
        await live`insert into ${s}.jobs (queue, kind, payload, status)
          values (${claim}, 'a', '{}', 'queued')`;
        const level = claim === "lock" ? "read committed" : "repeatable read";
        const jobs = await live.begin(
          `isolation level ${level}`,
          (tx) =>
            tx`select id, attempt from ${s}.${tx(`claim_${claim}`)}
            (${claim}, '{a}', 1, ${worker}, ${worker}, 60)`,
        );
        assertEquals(jobs.length, 1, `${claim} after migration ${applied}`);
      }
    }
  } finally {
    await live.end();
  }
});

test(
  "a role's forgotten transaction and endless statement are ended by the server",
  async (url, sql, direct) => {
    const role = `siding_${crypto.randomUUID().slice(0, 8)}`;
    await sql.unsafe(`create role ${role} login password 'x'`);
    try {
      const { code, out } = await run("migrate.ts", ["--limit-role", role], { DATABASE_URL: url });
      assertEquals(code, 0);
      assert(out.includes(`limited role ${role}: statement_timeout 30s, lock_timeout 10s`), out);
      const theirs = new URL(direct); // a pooler has its own role to connect with
      Object.assign(theirs, { username: role, password: "x" });
      const limited = connect(theirs.href, { max: 1 });
      const limits = await limited`select name, setting || unit as value from pg_settings
      where name in ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout')
      order by name`;
      await limited.end();
      assertEquals(Object.fromEntries(limits.map(({ name, value }) => [name, value])), {
        idle_in_transaction_session_timeout: "30000ms",
        lock_timeout: "10000ms",
        statement_timeout: "30000ms",
      });
    } finally {
      await sql.unsafe(`drop owned by ${role} cascade; drop role ${role}`).simple();
    }
    assertEquals(
      (await run("migrate.ts", ["--check", "--limit-role", "x"], { DATABASE_URL: url })).code,
      2,
    );
  },
);

test("a database without tables is told by what to do", async (url, sql) => {
  await assertRejects(() => checkSchema(sql), SchemaMismatch, "run `deno task migrate` first");
  const { code, err } = await run("worker.ts", [], { DATABASE_URL: url });
  assertEquals(code, 1);
  assert(err.includes("run `deno task migrate` first"), err);
});

test(
  "the schema's name is a setting, and --check says with its exit code what is missing",
  async (url, sql) => {
    const env = { DATABASE_URL: url, SIDING_SCHEMA: "other_place" };
    const before = await run("migrate.ts", ["--check"], env);
    assertEquals([before.code, before.out], [
      1,
      migrations().map((m) => `missing: ${m.number} ${m.name}\n`).join(""),
    ]);
    assertEquals((await run("migrate.ts", [], env)).code, 0);
    assertEquals(await run("migrate.ts", ["--check"], env), {
      code: 0,
      out: "up to date\n",
      err: "migrate: SIDING_SCHEMA=other_place --database-url … --check\n",
    });
    const enqueued = await run("tools/enqueue.ts", ["transcribe"], env);
    assertEquals([enqueued.code, enqueued.out], [0, "1\n"]);
    const [{ there, absent }] =
      await sql`select to_regclass('other_place.jobs') is not null as there,
    to_regnamespace('siding') is null as absent`;
    assertEquals([there, absent], [true, true]);
    const bad = await run("migrate.ts", [], { ...env, SIDING_SCHEMA: "Drop Table" });
    assertEquals(bad.code, 2);
    assert(bad.err.includes('SIDING_SCHEMA is "Drop Table"'), bad.err);
  },
);

test("a database that cannot be reached is exit code 3, and a wrong flag 2", async () => {
  const unreachable = { DATABASE_URL: "postgres://nobody:secret@127.0.0.1:1/none" };
  const { code, err } = await run("migrate.ts", ["--check"], unreachable);
  assertEquals(code, 3);
  assert(err.includes("ECONNREFUSED") && !err.includes("secret"), err);
  assertEquals((await run("migrate.ts", ["--now"], unreachable)).code, 2);
  assertEquals((await run("migrate.ts", [], { DATABASE_URL: "" })).code, 2);
});

Deno.test("the code's own migration number is that of the newest file", async () => {
  await using _ = await testDatabase();
  assertEquals(CODE_MIGRATION, migrations().at(-1)?.number);
  for (const { number, floor } of migrations()) assert(floor >= 1 && floor <= number);
});
