/** The forms of the pages, as requests: whose they must be, and what many jobs at once come to. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { schema, type Sql } from "../db.ts";
import { enqueue, setQueue } from "../queue.ts";
import { listSchedules, setSchedule } from "../schedules.ts";
import { databaseTest as test } from "./database.ts";
import { adminToken, keyOf, type RunningSite, startSite } from "./site.ts";

/** Somebody who signed in: requests with their cookie. */
async function signedIn(site: RunningSite, token = adminToken) {
  const reply = await fetch(`${site.address}/sign-in`, {
    method: "POST",
    body: new URLSearchParams({ token }),
    redirect: "manual",
  });
  await reply.body?.cancel();
  const cookie = reply.headers.get("set-cookie")!.split(";")[0];
  const ask = (path: string, init: RequestInit = {}) =>
    fetch(site.address + path, {
      redirect: "manual",
      ...init,
      headers: { cookie, ...init.headers },
    });
  const html = async (path: string) => await (await ask(path)).text();
  const csrf = /name="csrf" value="([^"]+)"/.exec(await html("/jobs"))![1];
  const post = (path: string, fields: Record<string, string>) =>
    ask(path, { method: "POST", body: new URLSearchParams({ csrf, ...fields }) });
  return { ask, html, csrf, post };
}

async function ended(reply: Response): Promise<number> {
  await reply.body?.cancel();
  return reply.status;
}

const failedJobs = (sql: Sql, n: number) =>
  sql`
    insert into ${sql(schema)}.jobs (queue, kind, payload, status, finished_at, error)
    select 'default', case when n % 2 = 0 then 'echo' else 'fails' end, '{}', 'failed', now(), 'error ' || n % 5
    from generate_series(1, ${n}) n`;

test(
  "every form is refused without the token of its session, and with another's",
  async (sql, url) => {
    await using site = await startSite(url);
    const [waiting] = await enqueue(sql, [{ kind: "echo" }]);
    await failedJobs(sql, 1);
    await sql`
    insert into ${sql(schema)}.jobs (queue, kind, payload, status, attempt, request_key, sent_at)
    values ('default', 'charge', '{}', 'review', 1, gen_random_uuid(), now())`;
    const state = async () =>
      (await sql`
      select jsonb_agg(to_jsonb(j) order by j.id)::text || (select jsonb_agg(q)::text from ${
        sql(schema)
      }.queues q) as text
      from ${sql(schema)}.jobs j`)[0].text;
    await setSchedule(sql, "nightly", { cron: "0 2 * * *", kind: "echo" });
    const before = await state();
    const me = await signedIn(site);
    const other = await signedIn(site);
    const failed = String(Number(waiting.id) + 1);
    const paths = [
      "/jobs?status=failed",
      "/jobs?status=queued",
      `/jobs/${waiting.id}`,
      `/jobs/${failed}`,
      "/review",
      "/queues",
      "/schedules",
      "/submit?kind=echo",
    ];
    const actions = new Set<string>();
    for (const path of paths) {
      for (const [form] of (await me.html(path)).matchAll(/<form[^>]*method="post".*?<\/form>/gs)) {
        const action = /action="([^"]+)"/.exec(form)![1];
        actions.add(action);
        const [first] = /<input[^>]*>/.exec(form)!;
        assertMatch(first, /name="csrf"/, `${action}: the token is its first field`);
        const names = [
          ...form.matchAll(/<(?:input|button)[^>]*name="([^"]+)"[^>]*value="([^"]*)"/g),
        ];
        const fields = Object.fromEntries(names.map(([, name, value]) => [name, value]));
        for (const csrf of [undefined, "", "x", other.csrf]) {
          const body = form.includes("multipart") ? new FormData() : new URLSearchParams();
          for (const [name, value] of Object.entries({ ...fields, csrf })) {
            if (value !== undefined) body.append(name, value);
          }
          assertEquals(
            await ended(await me.ask(action, { method: "POST", body })),
            403,
            `${action} with ${csrf}`,
          );
        }
      }
    }
    assertEquals(
      actions,
      new Set([
        "/sign-out",
        "/jobs",
        `/jobs/${waiting.id}/cancel`,
        `/jobs/${failed}/retry`,
        "/review/3/resume",
        "/review/3/requeue",
        "/review/3/fail",
        "/queues",
        "/schedules",
        "/submit",
      ]),
    );
    assertEquals(await state(), before);
  },
);

test("the admin pauses and resumes a schedule, and nobody else sees any", async (sql, url) => {
  await using site = await startSite(url);
  await setSchedule(sql, "nightly", { cron: "0 2 * * *", kind: "echo" });
  const me = await signedIn(site);
  const post = async (fields: Record<string, string>) =>
    await ended(await me.post("/schedules", fields));
  const enabled = async () => (await listSchedules(sql))[0].enabled;
  assertEquals(await post({ name: "nightly", do: "pause" }), 303);
  assertEquals(await enabled(), false);
  assertEquals(await post({ name: "nightly", do: "resume" }), 303);
  assertEquals(await enabled(), true);
  assertEquals(await post({ name: "weekly", do: "pause" }), 404);
  assertEquals(await post({ name: "nightly", do: "remove" }), 422);
  const owner = await signedIn(site, await keyOf(sql, "acme"));
  assertEquals(await ended(await owner.ask("/schedules")), 404);
  assertEquals(await ended(await owner.post("/schedules", { name: "nightly", do: "pause" })), 404);
  assertEquals(await enabled(), true);
});

test("a file of a form that is not of this session is not stored", async (sql, url) => {
  await using site = await startSite(url);
  const me = await signedIn(site);
  const send = async (fields: Record<string, string>) => {
    const body = new FormData();
    for (const [name, value] of Object.entries(fields)) body.append(name, value);
    body.append("file", new File(["abc"], "a.wav"));
    return await ended(await me.ask("/submit", { method: "POST", body }));
  };
  assertEquals(await send({ csrf: "x", kind: "echo" }), 403);
  assertEquals(await send({ kind: "echo" }), 403);
  const files = async () =>
    (await sql`select count(*)::integer as n from ${sql(schema)}.files`)[0].n;
  assertEquals(await files(), 0);
  // Nor is one of a job that is refused.
  assertEquals(await send({ csrf: me.csrf, kind: "number", payload: '"x"' }), 422);
  assertEquals(await files(), 0);
  assertEquals(await send({ csrf: me.csrf, kind: "echo" }), 303);
  assertEquals(await files(), 1);
});

test("a form to sign in that another site made is refused", async (_, url) => {
  await using site = await startSite(url);
  for (const from of ["cross-site", "same-site"]) {
    const reply = await fetch(`${site.address}/sign-in`, {
      method: "POST",
      headers: { "sec-fetch-site": from },
      body: new URLSearchParams({ token: adminToken }),
    });
    assertEquals(reply.headers.get("set-cookie"), null);
    assertEquals(await ended(reply), 403);
  }
});

test(
  "failed jobs are tried again in bulk by a filter, so many at a time, none twice",
  async (sql, url) => {
    await using site = await startSite(url);
    await failedJobs(sql, 500);
    const me = await signedIn(site);
    const go = async (fields: Record<string, string>) =>
      await (await me.post("/jobs", { do: "retry", status: "failed", ...fields })).text();
    const queued = async () => {
      const rows = await sql`
      select kind, count(*)::integer as n from ${
        sql(schema)
      }.jobs where status = 'queued' group by kind order by kind`;
      return rows.map((row) => [row.kind, row.n]);
    };
    const first = await go({ kind: "echo" });
    assertMatch(first, /200 jobs tried again/);
    assertMatch(first, /50 more fit the filter/);
    assertMatch(await go({ kind: "echo" }), /50 jobs tried again[^]*No more fit/);
    assertMatch(await go({ kind: "echo" }), /0 jobs tried again/);
    assertEquals(await queued(), [["echo", 250]]);
    assertMatch(await go({ error: "error 3" }), /50 jobs tried again/);
    assertEquals(await queued(), [["echo", 250], ["fails", 50]]);
  },
);

test("one job that cannot be tried again keeps no other from it", async (sql, url) => {
  await using site = await startSite(url);
  await failedJobs(sql, 3);
  await sql`update ${
    sql(schema)
  }.jobs set request_key = gen_random_uuid(), sent_at = now() where id = 2`;
  const me = await signedIn(site);
  const said = await (await me.post("/jobs", { do: "retry", status: "failed" })).text();
  assertMatch(said, /2 jobs tried again[^]*1 were refused[^]*job 2 may have been charged/);
});

test("jobs are cancelled in bulk by a filter, by the admin alone", async (sql, url) => {
  await using site = await startSite(url);
  await setQueue(sql, "other");
  await enqueue(
    sql,
    Array.from({ length: 300 }, (_, i) => ({ kind: "echo", queue: i < 250 ? "other" : "default" })),
  );
  const me = await signedIn(site);
  const go = async () =>
    await (await me.post("/jobs", { do: "cancel", status: "queued", queue: "other" })).text();
  assertMatch(await go(), /200 jobs cancelled[^]*50 more/);
  assertMatch(await go(), /50 jobs cancelled[^]*No more/);
  const [{ n }] = await sql`
    select count(*)::integer as n from ${
    sql(schema)
  }.jobs where status = 'queued' and queue = 'default'`;
  assertEquals(n, 50);
  assertEquals(await ended(await me.post("/jobs", { do: "cancel", status: "done" })), 422);
  const key = await keyOf(sql, "acme");
  const owner = await signedIn(site, key);
  assertEquals(await ended(await owner.post("/jobs", { do: "cancel", status: "queued" })), 404);
});

test(
  "a page is no one else's to keep, and its policy lets no inline script or style run",
  async (_, url) => {
    await using site = await startSite(url);
    const me = await signedIn(site);
    const reply = await me.ask("/dashboard");
    const text = await reply.text();
    assertEquals(reply.headers.get("cache-control"), "no-store");
    const policy = reply.headers.get("content-security-policy")!;
    assert(!policy.includes("unsafe"), policy);
    assertEquals(
      [...text.matchAll(/<script(?![^>]* src=)|<style|\sstyle=|\son\w+=/g)].map(([it]) => it),
      [],
    );
    for (const [, path] of text.matchAll(/(?:src|href)="(\/static\/[^"]+)"/g)) {
      const file = await fetch(site.address + path);
      assertEquals(await ended(file), 200, path);
      assertEquals(file.headers.get("x-content-type-options"), "nosniff");
      assertMatch(file.headers.get("content-type")!, /^(text\/(css|javascript)|image\/svg\+xml)/);
      assertMatch(file.headers.get("cache-control")!, /immutable/);
      const again = await fetch(site.address + path, {
        headers: { "if-none-match": file.headers.get("etag")! },
      });
      assertEquals(await ended(again), 304, path);
    }
    assertEquals(await ended(await fetch(`${site.address}/static/../web.ts`)), 404);
    assertEquals(await ended(await fetch(`${site.address}/static/jobs.ts`)), 404);
    const large = await me.post("/review/1/fail", { reason: "x".repeat(100_000) });
    assertEquals(await ended(large), 413);
  },
);
