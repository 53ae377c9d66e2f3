/** Alerts: real sites tell a real receiver, once when it turns unwell and once when it is well again. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { Database, type Pool, schema } from "../db.ts";
import { startProxy } from "../dev/proxy.ts";
import * as queue from "../queue.ts";
import { watcher } from "../web/alerts.ts";
import type { Site } from "../web/site.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { startSite } from "./site.ts";

/** What is told, whole; `answer` says with which status, 200 by default. */
function receiver(answer: (nth: number) => number = () => 200) {
  const got: { path: string; body: string }[] = [];
  const server = Deno.serve({ port: 0, hostname: "127.0.0.1", onListen() {} }, async (request) => {
    const bytes = request.headers.get("content-encoding") === "gzip"
      ? request.body!.pipeThrough(new DecompressionStream("gzip"))
      : request.body;
    got.push({ path: new URL(request.url).pathname, body: await new Response(bytes).text() });
    return new Response(null, { status: answer(got.length) });
  });
  return {
    got,
    texts: () => got.map(({ body }) => JSON.parse(body).text as string),
    host: `127.0.0.1:${server.addr.port}`,
    url: `http://127.0.0.1:${server.addr.port}/hook-with-a-secret`,
    [Symbol.asyncDispose]: () => server.shutdown(),
  };
}

const quick = ["--heartbeat-ms", "200", "--alert-every-ms", "300"];

const alert = async (sql: Pool) => {
  const [row] = await sql<{ unwell: number; told: boolean; looked_at: string }[]>`
    select unwell, told, looked_at::text from ${sql(schema)}.alerts`;
  return row ?? { unwell: 0, told: false, looked_at: "" };
};
/** Waits until so many more looks are kept. */
async function someLooks(sql: Pool, n = 3) {
  const seen = new Set<string>();
  await waitFor(async () => seen.add((await alert(sql)).looked_at).size > n, `${n} looks`);
}

test(
  "people are told once when it is unwell twice in a row and once when it is well again, by two sites",
  async (sql, url) => {
    await using people = receiver();
    const env = { ALERT_WEBHOOK_URL: people.url };
    await using first = await startSite(url, quick, env);
    await using _ = await startSite(url, quick, env);
    await someLooks(sql);
    assertEquals(people.got, []);
    const [{ id }] = await queue.enqueue(sql, [{ kind: "echo" }]);
    await waitFor(async () => (await alert(sql)).told, "it to be told");
    await someLooks(sql, 5);
    assertEquals(people.texts(), [
      "Siding is unwell: no_workers: no worker has reported within 0.6 s, and there are jobs to do",
    ]);
    assertEquals((await alert(sql)).told, true);
    // Whichever leads next knows what was told.
    first.kill("SIGKILL");
    await first.ended;
    await queue.cancel(sql, id);
    await waitFor(async () => !(await alert(sql)).told, "the other to tell that it is well");
    await someLooks(sql);
    assertEquals(people.texts().slice(1), ["Siding is well again"]);
  },
);

test("what is unwell at one look only is told nobody", async (sql, url) => {
  await using people = receiver();
  const site = siteOf(url, { alertWebhookUrl: people.url });
  const look = watcher(site);
  for (let round = 0; round < 3; round++) {
    const [{ id }] = await queue.enqueue(sql, [{ kind: "echo" }]);
    await look();
    assertEquals((await alert(sql)).unwell, 1);
    await queue.cancel(sql, id);
    await age(sql);
    await look();
    assertEquals((await alert(sql)).unwell, 0);
    await age(sql);
  }
  assertEquals(people.got, []);
  await site.db.close();
});

test("two sites that both think they lead do not count one time twice", async (sql, url) => {
  await using people = receiver();
  const site = siteOf(url, { alertWebhookUrl: people.url });
  const other = siteOf(url, { alertWebhookUrl: people.url });
  const looks = [watcher(site), watcher(other)];
  await queue.enqueue(sql, [{ kind: "echo" }]);
  await Promise.all(looks.map((look) => look()));
  assertEquals([(await alert(sql)).unwell, people.got.length], [1, 0]);
  await age(sql);
  await Promise.all(looks.map((look) => look()));
  assertEquals([(await alert(sql)).unwell, people.got.length], [2, 1]);
  for (const { db } of [site, other]) await db.close();
});

test(
  "a receiver that fails is told again at the next look, and the log has not its secret",
  async (sql, url) => {
    await using people = receiver((nth) => nth < 3 ? 500 : 204);
    await using site = await startSite(url, quick, { ALERT_WEBHOOK_URL: people.url });
    await queue.enqueue(sql, [{ kind: "echo" }]);
    await waitFor(async () => (await alert(sql)).told, "it to be told");
    assertEquals(people.got.length, 3);
    await someLooks(sql);
    assertEquals(people.got.length, 3);
    assertStringIncludes(site.log(), "ALERT_WEBHOOK_URL answered 500");
    assert(!site.log().includes("hook-with-a-secret"), site.log());
    const gone = receiver();
    await gone[Symbol.asyncDispose]();
    await using deaf = await startSite(url, quick, { ALERT_WEBHOOK_URL: gone.url });
    site.kill("SIGKILL");
    await sql`update ${sql(schema)}.alerts set told = false`;
    await waitFor(() => deaf.log().includes("could not be told"), "the log");
    assert(!deaf.log().includes("hook-with-a-secret"), deaf.log());
    assertEquals((await alert(sql)).told, false);
  },
);

test(
  "an outage of the database is told from memory, and its end from the table",
  async (sql, url) => {
    await using people = receiver();
    await using proxy = startProxy(url);
    await using _ = await startSite(proxy.url, quick, { ALERT_WEBHOOK_URL: people.url });
    await someLooks(sql, 1);
    proxy.cut();
    await waitFor(() => people.got.length === 1, "the outage to be told");
    assertStringIncludes(people.texts()[0], "database_unreachable");
    proxy.mend();
    await waitFor(() => people.got.length === 2, "its end to be told");
    assertEquals(people.texts()[1], "Siding is well again");
  },
);

test("Sentry is told, where its DSN is set", async (sql, url) => {
  await using sentry = receiver();
  const dsn = `http://0123456789abcdef0123456789abcdef@${sentry.host}/42`;
  await using site = await startSite(url, quick, { SENTRY_DSN: dsn });
  const [{ id }] = await queue.enqueue(sql, [{ kind: "echo" }]);
  await waitFor(async () => (await alert(sql)).told, "it to be told");
  await queue.cancel(sql, id);
  await waitFor(async () => !(await alert(sql)).told, "the end to be told");
  assertEquals(sentry.got.map(({ path }) => path), ["/api/42/envelope/", "/api/42/envelope/"]);
  const events = sentry.got.map(({ body }) => JSON.parse(body.split("\n")[2]));
  assertEquals(events.map(({ level }) => level), ["error", "info"]);
  assertStringIncludes(events[0].message, "Siding is unwell: no_workers");
  assertEquals(events[1].message, "Siding is well again");
  for (const { body } of sentry.got) {
    assert(!/postgres|admin-token|session-secret/.test(body), body);
  }
  assert(!site.log().includes("0123456789abcdef"), site.log());
});

/** Has a process say when Sentry's module is loaded: it marks the global object. */
const SENTRY_WATCH =
  `Object.defineProperty(globalThis, "__SENTRY__", { configurable: true, set(value) {
  console.error("Sentry is loaded");
  Object.defineProperty(globalThis, "__SENTRY__", { value, writable: true });
} });`;

test("Sentry is not loaded where its DSN is not set, and is told no secret", async (sql, url) => {
  await using people = receiver();
  await using sentry = receiver();
  const error = "https://ann:planted@host/?api_key=planted said: Authorization: Bearer planted, " +
    'and {"password": "planted"}';
  await sql`
    insert into ${sql(schema)}.schedules (name, cron, time_zone, kind, error, error_at)
    values ('nightly', '0 2 * * *', 'UTC', 'echo', ${error}, now())`;
  const dsn = `http://0123456789abcdef0123456789abcdef@${sentry.host}/42`;
  const settings: Record<string, string>[] = [{ ALERT_WEBHOOK_URL: people.url }, {
    SENTRY_DSN: dsn,
  }];
  for (const env of settings) {
    await sql`update ${sql(schema)}.alerts set told = false, unwell = 0`;
    await using site = await startSite(url, quick, env, [
      "--preload",
      `data:text/javascript,${encodeURIComponent(SENTRY_WATCH)}`,
    ]);
    await waitFor(async () => (await alert(sql)).told, "it to be told");
    assertEquals(site.log().includes("Sentry is loaded"), "SENTRY_DSN" in env);
    assert(!/planted|hook-with|0123456789abcdef/.test(site.log()), site.log());
  }
  assertEquals([people.got.length, sentry.got.length], [1, 1]);
  for (const { body } of [...people.got, ...sentry.got]) {
    assertStringIncludes(body, 'schedule_failing: schedule \\"nightly\\": https://…@host/');
    assert(!/planted|postgres:/.test(body), body);
  }
});

test("what was submitted under an Idempotency-Key is forgotten after a day", async (sql, url) => {
  const t = sql(schema);
  await sql`insert into ${t}.submissions (owner, key, fingerprint, created_at)
    select 'ann', i::text, 'x', now() - interval '25 hours' from generate_series(1, 2500) i`;
  await sql`insert into ${t}.submissions (owner, key, fingerprint, created_at)
    values ('ann', 'yesterday', 'x', now() - interval '23 hours'), ('', 'now', 'x', now())`;
  const site = siteOf(url);
  await watcher(site)();
  const left = await sql<{ key: string }[]>`select key from ${t}.submissions order by key`;
  assertEquals(left.map(({ key }) => key), ["now", "yesterday"]);
  await site.db.close();
});

/** A site in this process that thinks it leads; as much of one as the watcher wants. */
function siteOf(url: string, settings: Partial<Site["settings"]> = {}): Site {
  return {
    db: new Database(url, { max: 2 }),
    settings: { alertEveryMs: 60_000, heartbeatMs: 15_000, unwellWaitS: 900, ...settings },
    leader: true,
    stopping: new AbortController().signal,
  } as unknown as Site;
}

/** Makes the last look old enough for the next to count. */
const age = (sql: Pool) =>
  sql`update ${sql(schema)}.alerts set looked_at = looked_at - interval '1 minute'`;
