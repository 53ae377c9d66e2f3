/** The site's health, as whoever asks from outside finds it. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { type Pool, schema } from "../db.ts";
import { startProxy } from "../dev/proxy.ts";
import * as processes from "../processes.ts";
import * as queue from "../queue.ts";
import { setSchedule } from "../schedules.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { adminToken, keyOf, type RunningSite, startSite } from "./site.ts";

interface Service {
  status: string;
  reasons: string[];
  messages?: { code: string; message: string }[];
  apart?: { queue: string; kind: string; apart: string }[];
}

async function service(site: RunningSite, token: string | null = null) {
  const response = await site.ask("/health/service", { token });
  return { status: response.status, body: await response.json() as Service };
}

/** Waits until these are the reasons, and returns what the admin is told. */
const reasons = (site: RunningSite, ...codes: string[]) =>
  waitFor(async () => {
    const { status, body } = await service(site, adminToken);
    if (body.reasons.join() !== codes.join()) return false;
    assertEquals(status, codes.length === 0 ? 200 : 503);
    return body;
  }, `the reasons [${codes}]`);

const aWorker = (sql: Pool, kinds = ["echo"]) =>
  processes.register(sql, { role: "worker", name: "w", version: "0", kinds, knownKinds: kinds });

/** Enqueues a job that has waited for so long. */
async function waiting(sql: Pool, seconds: number, job: Partial<queue.NewJob> = {}) {
  const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", ...job }]);
  await sql`update ${sql(schema)}.jobs set due_at = now() - ${seconds} * interval '1 second'
    where id = ${id}`;
  return id;
}

test(
  "/health/service is well with nothing to do, and says no_workers when a job waits for one",
  async (sql, url) => {
    await using site = await startSite(url);
    assertEquals(await service(site), { status: 200, body: { status: "ok", reasons: [] } });
    await queue.enqueue(sql, [{ kind: "echo" }]);
    const { messages } = await reasons(site, "no_workers");
    assertEquals(messages!.map(({ message }) => message), [
      "no worker has reported within 45 s, and there are jobs to do",
    ]);
    await aWorker(sql);
    await reasons(site);
  },
);

test("the reasons are codes to anybody, and words to the admin alone", async (sql, url) => {
  await using site = await startSite(url);
  await waiting(sql, 5000, { kind: "echo" });
  await reasons(site, "no_workers");
  for (const token of [null, await keyOf(sql, "ann"), `${adminToken}!`, "x"]) {
    assertEquals(await service(site, token), {
      status: 503,
      body: { status: "unwell", reasons: ["no_workers"] },
    });
  }
  const link = await signedInCookie(site);
  const response = await fetch(`${site.address}/health/service`, { headers: { cookie: link } });
  assertEquals((await response.json()).messages?.length, 1);
});

/** A cookie as the sign-in gives it. */
async function signedInCookie(site: RunningSite): Promise<string> {
  const secret = `a-session-secret-for-the-tests-only-01/${adminToken}`;
  const key = await crypto.subtle.importKey(
    "raw",
    new TextEncoder().encode(secret),
    { name: "HMAC", hash: "SHA-256" },
    false,
    ["sign"],
  );
  const value = `admin.${Math.floor(Date.now() / 1000) + 60}.${site.pid}`;
  const mac = await crypto.subtle.sign("HMAC", key, new TextEncoder().encode(value));
  return `siding_session=${encodeURIComponent(`${value}.${new Uint8Array(mac).toBase64()}`)}`;
}

test("a browser gets a page, which says no more to strangers", async (sql, url) => {
  await using site = await startSite(url);
  await waiting(sql, 5000, { kind: "echo" });
  await reasons(site, "no_workers");
  const ask = (token: string | null) =>
    site.ask("/health/service", {
      token,
      headers: { accept: "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8" },
    });
  const strange = await ask(null);
  assertEquals(strange.status, 503);
  const page = await strange.text();
  assertMatch(page, /✕<\/span> no<\/span>\s*<\/td>\s*<td><code>no_workers/);
  assert(!page.includes("45 s"), page);
  assertStringIncludes(await (await ask(adminToken)).text(), "reported within 45 s");
});

test(
  "a job that waits too long is a reason; one that is paused, limited or served by nobody is named apart",
  async (sql, url) => {
    await using site = await startSite(url, ["--unwell-wait-s", "60"]);
    await aWorker(sql);
    const late = await waiting(sql, 61);
    const { messages } = await reasons(site, "oldest_waiting");
    assertStringIncludes(
      messages![0].message,
      'a job of kind "echo" in queue "default" has waited',
    );
    await queue.cancel(sql, late);
    await waiting(sql, 20);
    await queue.setQueue(sql, "resting", { paused: true });
    await waiting(sql, 1000, { queue: "resting" });
    await queue.setQueue(sql, "narrow", { max_running: 1 });
    const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", queue: "narrow" }]);
    await sql`update ${sql(schema)}.jobs set status = 'running', attempt = 1, claimed_at = now(),
    worker_id = gen_random_uuid(), claim_token = gen_random_uuid(),
    lease_until = now() + interval '1 hour' where id = ${id}`;
    await waiting(sql, 1000, { queue: "narrow" });
    await waiting(sql, 1000, { kind: "nobody-s" });
    // Above, where nothing hides it.
    await waiting(sql, 2000, { kind: "nobody-s", priority: 5 });
    const { apart } = await reasons(site);
    assertEquals(
      apart!.map(({ queue, kind, apart }) => `${queue} ${kind} ${apart}`).sort(),
      ["default nobody-s not_served", "narrow echo limited", "resting echo paused"],
    );
    await waiting(sql, 300, { priority: -3 });
    await reasons(site, "oldest_waiting");
  },
);

test("a job that is due and was never put in line waits, too", async (sql, url) => {
  await using site = await startSite(url, ["--unwell-wait-s", "60"]);
  await aWorker(sql);
  await waiting(sql, 61, { delay_s: 3600 });
  await reasons(site, "oldest_waiting");
});

/** A look as a controller records it. */
async function look(
  sql: Pool,
  it: {
    pool?: string;
    number: number;
    ageS?: number;
    railway?: boolean;
    queue?: boolean;
    act?: string;
    error?: string;
    alarms?: string[];
  },
) {
  const { pool = "default", number, ageS = 0, railway = true, queue = true } = it;
  const seen = JSON.stringify({
    queue: queue ? { work: [] } : null,
    platform: railway ? { running: 1 } : null,
  });
  await sql`insert into ${
    sql(schema)
  }.looks (pool, number, at, controller, seen, code, reason, act, error, alarms)
    values (${pool}, ${number}, now() - ${ageS} * interval '1 second', gen_random_uuid(),
      ${seen}::text::jsonb, 'idle', 'a test', ${it.act ?? "none"}, ${it.error ?? null},
      ${`{${it.alarms ?? []}}`}::text[])`;
}

test(
  "the controller's silence, its failed looks and Railway's refusals are reasons",
  async (sql, url) => {
    await using site = await startSite(url);
    await reasons(site); // none has ever looked
    await look(sql, { number: 1, ageS: 121 });
    await look(sql, { pool: "default/dry-run", number: 1, ageS: 5000 });
    const { messages } = await reasons(site, "controller_silent");
    assertStringIncludes(messages![0].message, 'no controller of pool "default" has looked for 12');
    await look(sql, { number: 2, ageS: 90 });
    await reasons(site);
    await look(sql, { number: 3, railway: false, error: "Not Authorized" });
    const refused = await reasons(site, "railway_refused");
    assertStringIncludes(refused.messages![0].message, "Not Authorized");
    await look(sql, { number: 4, act: "failed", error: "replicas: too many" });
    assertStringIncludes(
      (await waitFor(async () => {
        const { body } = await service(site, adminToken);
        return body.messages?.[0]?.message.includes("too many") && body;
      }, "the other refusal")).messages![0].code,
      "railway_refused",
    );
    await look(sql, { number: 5, queue: false, error: "deadlock" });
    await reasons(site, "look_failed");
    await look(sql, { number: 6, alarms: ["crashed", "ceiling"] });
    await reasons(site, "railway_refused", "scaling_alarm");
    await look(sql, { number: 7 });
    await look(sql, { pool: "other", number: 1, ageS: 300 });
    const other = await reasons(site, "controller_silent");
    assertStringIncludes(other.messages![0].message, '"other"');
  },
);

test("jobs in review, and missing migrations, are reasons", async (sql, url) => {
  await using site = await startSite(url);
  const [{ id }] = await queue.enqueue(sql, [{ kind: "charge", queue: "default" }]);
  await sql`update ${sql(schema)}.jobs set status = 'review', sent_at = now(),
    request_key = gen_random_uuid() where id = ${id}`;
  const { messages } = await reasons(site, "review_cases");
  assertStringIncludes(messages![0].message, "for a person: 1");
  await sql`delete from ${sql(schema)}.migrations
    where number = (select max(number) from ${sql(schema)}.migrations)`;
  await reasons(site, "migrations_behind");
});

test("a schedule that is in error, or that nobody keeps, is a reason", async (sql, url) => {
  await using site = await startSite(url);
  const s = sql(schema);
  await setSchedule(sql, "nightly", { cron: "0 2 * * *", kind: "echo" });
  await reasons(site);
  await sql`update ${s}.schedules set next_at = now() - interval '400 seconds'`;
  const late = await reasons(site, "schedule_failing");
  assertMatch(late.messages![0].message, /schedule "nightly": its tick is 40\d s late/);
  await sql`
    update ${s}.schedules set next_at = now(), error = 'the queue is full', error_at = now()`;
  await waitFor(async () => {
    const { messages } = await reasons(site, "schedule_failing");
    return messages![0].message === 'schedule "nightly": the queue is full';
  }, "its error");
  await sql`update ${s}.schedules set enabled = false`;
  await reasons(site);
});

test(
  "a database that is gone without a word: both say so within their time",
  async (_, url) => {
    await using proxy = startProxy(url);
    await using site = await startSite(proxy.url);
    const health = async () => {
      const response = await site.ask("/health", { token: null });
      return { status: response.status, body: await response.json() };
    };
    assertEquals(await health(), { status: 200, body: { status: "ok" } });
    proxy.silence();
    await waitFor(async () => (await health()).status === 503, "/health to say so");
    const startMs = performance.now();
    assertEquals((await health()).body, { status: "database_unreachable" });
    const { status, body } = await service(site, adminToken);
    assertEquals([status, body.reasons], [503, ["database_unreachable"]]);
    assert(performance.now() - startMs < 7500, `${performance.now() - startMs} ms`);
    proxy.mend();
    proxy.reset();
    await waitFor(async () => (await health()).status === 200, "/health to be well");
    await reasons(site);
  },
);

test("among 200,000 jobs /health/service reads a bounded number of rows", async (sql) => {
  const t = sql(schema);
  await sql`insert into ${t}.jobs (queue, kind, payload, status, priority)
    select 'default', 'k' || i % 20, '{}', 'queued', i % 7 from generate_series(1, 100000) i`;
  await sql`insert into ${t}.jobs (queue, kind, payload, status, finished_at)
    select 'default', 'echo', '{}', 'done', now() from generate_series(1, 100000) i`;
  await sql`insert into ${t}.looks (pool, number, controller, seen, code, reason, act)
    select 'p' || i % 3, i, gen_random_uuid(), '{}', 'idle', '', 'none' from generate_series(1, 100000) i`;
  await sql`vacuum analyze ${t}.jobs`;
  const read = async () => {
    const [{ "QUERY PLAN": [plan] }] = await sql`
      explain (analyze, buffers, format json) select * from ${t}.service_state(45)`;
    return plan.Plan["Shared Hit Blocks"] + plan.Plan["Shared Read Blocks"] as number;
  };
  const blocks = await read();
  const [{ all }] = await sql`
    select pg_relation_size(${`${schema}.jobs`}::regclass) / 8192 as all`;
  assert(blocks < 2000, `${blocks} blocks`);
  assert(Number(all) > 2000, `${all} blocks`);
  await sql`insert into ${t}.jobs (queue, kind, payload, status, priority)
    select 'default', 'k' || i % 20, '{}', 'queued', i % 7 from generate_series(1, 100000) i`;
  await sql`vacuum analyze ${t}.jobs`;
  const more = await read();
  assert(more < blocks * 1.2, `${more} blocks, before it ${blocks}`);
});
