/**
 * Moving from another queue, and back, by the statements of docs/adopt.md, out of and into the tables
 * that the real packages make.
 */
import { assert, assertEquals } from "@std/assert";
import { fileURLToPath } from "node:url";
import { type Pool, schema } from "../db.ts";
import { get } from "../queue.ts";
import { databaseTest, waitFor } from "./database.ts";

const folder = fileURLToPath(new URL("../tools/bench/", import.meta.url));
const page = Deno.readTextFileSync(new URL("../docs/adopt.md", import.meta.url));

async function deno(...args: string[]) {
  const options = { cwd: folder, env: { NO_COLOR: "1" }, signal: AbortSignal.timeout(120_000) };
  const { success, stdout, stderr } = await new Deno.Command(Deno.execPath(), { args, ...options })
    .output();
  return { success, out: new TextDecoder().decode(stdout), err: new TextDecoder().decode(stderr) };
}

// Dependencies of their own, which come from the network the first time.
const { success: there } = await deno("install", "--quiet", "--frozen");
function test(name: string, body: (sql: Pool, url: string) => Promise<void>): void {
  if (there) databaseTest(name, (sql, _, url) => body(sql, url));
  else Deno.test.ignore(`${name} (skipped: its packages could not be installed)`, () => {});
}

const old = async (peer: string, command: string, url: string) => {
  const { success, out, err } = await deno(
    "run",
    "-A",
    "--quiet",
    "old_queue.ts",
    peer,
    command,
    url,
  );
  assert(success, err);
  return out;
};
/** Whom the jobs are to that the old queue would run now. */
const ran = async (peer: string, url: string) =>
  (JSON.parse(await old(peer, "run", url)) as { to: string }[]).map(({ to }) => to).sort();

/** The page's statements for a peer: to here, and back. */
const statements = (peer: string) =>
  [...page.matchAll(/^```sql (\S+)\n(.*?)^```$/gms)].filter(([, it]) => it === peer).map((
    [, , sql],
  ) => sql);

const LATER = Date.UTC(2099, 0, 1);
async function moved(sql: Pool) {
  const ids = await sql<{ id: string }[]>`select id::text from ${sql(schema)}.jobs order by id`;
  const keys = await sql<{ key: string }[]>`select unique_key as key from ${
    sql(schema)
  }.jobs order by id`;
  return (await get(sql, ids.map(({ id }) => id))).map((job, n) => [
    ...[(job.payload as { to: string }).to, job.kind, job.priority, job.failures, keys[n].key],
    job.due_at.getTime() === LATER ? "later" : "now",
  ]);
}

test(
  "docs/adopt.md: from graphile-worker, what waits there and no more, and back",
  async (sql, url) => {
    const [there, back, ...more] = statements("graphile-worker");
    assertEquals(more, []);
    await old("graphile-worker", "fill", url);
    // As if its pause before the next try was over.
    await sql`update graphile_worker._private_jobs set run_at = created_at where attempts = 1`;
    assertEquals((await sql.unsafe(there)).length, 6);
    assertEquals(await moved(sql), [
      ["failed once", "send_mail", 0, 1, null, "now"],
      ["plain", "send_mail", 0, 0, null, "now"],
      ["urgent", "send_mail", 10, 0, null, "now"],
      ["keyed", "send_mail", 0, 0, "mail-7", "now"],
      ["once", "send_mail", 0, 24, null, "now"],
      ["later", "send_mail", 0, 0, null, "later"],
    ]);
    const left =
      await sql`select payload ->> 'to' as to from graphile_worker._private_jobs order by id`;
    assertEquals(left.map(({ to }) => to), ["running", "given up", "another"]);
    assertEquals((await sql.unsafe(there)).length, 0);

    assertEquals((await sql.unsafe(back)).length, 6);
    assertEquals(await moved(sql), []);
    const again =
      await sql`select payload ->> 'to' as to, priority, max_attempts, key from graphile_worker._private_jobs
    where payload ->> 'to' in ('urgent', 'once', 'keyed', 'later') order by id`;
    assertEquals(again.map((row) => Object.values(row)), [
      ["urgent", -10, 25, null],
      ["keyed", 0, 25, "mail-7"],
      ["once", 0, 1, null],
      ["later", 0, 25, null],
    ]);
    assertEquals(await ran("graphile-worker", url), [
      "failed once",
      "keyed",
      "once",
      "plain",
      "urgent",
    ]);
  },
);

test("docs/adopt.md: from pg-boss, what waits there and no more, and back", async (sql, url) => {
  const [there, back, ...more] = statements("pg-boss");
  assertEquals(more, []);
  await old("pg-boss", "fill", url);
  assertEquals((await sql.unsafe(there)).length, 7);
  assertEquals(await moved(sql), [
    ["failed once", "send_mail", 0, 1, null, "now"],
    ["plain", "send_mail", 0, 0, null, "now"],
    ["urgent", "send_mail", 10, 0, null, "now"],
    ["later", "send_mail", 0, 0, null, "later"],
    ["keyed", "send_mail", 0, 0, "mail-7", "now"],
    ["keyed too", "send_mail", 0, 0, null, "now"],
    ["once", "send_mail", 0, 4, null, "now"],
  ]);
  const left = await sql`select data ->> 'to' as to from pgboss.job order by created_on`;
  assertEquals(left.map(({ to }) => to), ["running", "given up", "another"]);
  assertEquals((await sql.unsafe(there)).length, 0);

  assertEquals((await sql.unsafe(back)).length, 7);
  assertEquals(await moved(sql), []);
  const again =
    await sql`select data ->> 'to' as to, priority, retry_limit, singleton_key from pgboss.job
    where data ->> 'to' in ('urgent', 'once', 'keyed') order by data ->> 'to'`;
  assertEquals(again.map((row) => Object.values(row)), [
    ["keyed", 0, 4, "mail-7"],
    ["once", 0, 0, null],
    ["urgent", 10, 4, null],
  ]);
  assertEquals(await ran("pg-boss", url), [
    "failed once",
    "keyed",
    "keyed too",
    "once",
    "plain",
    "urgent",
  ]);
  // Without its queue there nothing goes, and nothing is lost.
  await sql`select siding.enqueue('send_mail', '{"to": "x"}')`;
  await sql`delete from pgboss.job`;
  await sql`delete from pgboss.queue where name = 'send/mail'`;
  const error = await sql.unsafe(back).then(() => "none", (e) => String(e));
  assert(error.includes("null value"), error);
  assertEquals((await moved(sql)).length, 1);
});

test(
  "docs/adopt.md: a job that an old worker takes at that moment is left to it",
  async (sql, url) => {
    await old("graphile-worker", "fill", url);
    const [there] = statements("graphile-worker");
    const holds = Promise.withResolvers<void>(), asked = Promise.withResolvers<void>();
    const taking = sql.begin(async (tx) => { // as the package's own statement does
      await tx`update graphile_worker._private_jobs set locked_at = now(), locked_by = 'x', attempts = attempts + 1
      where payload ->> 'to' = 'plain'`;
      holds.resolve();
      await asked.promise;
    });
    await holds.promise;
    const moving = sql.unsafe(there).execute();
    const waits = () =>
      sql`select from pg_stat_activity where wait_event_type = 'Lock' and query like 'with waiting%'`;
    await waitFor(async () => (await waits()).length > 0, "the statement to wait for the row");
    asked.resolve();
    await taking;
    await moving;
    const names = (await moved(sql)).map(([to]) => to);
    assertEquals([names.length, names.includes("plain")], [5, false]);
  },
);
