/** The pages in a real browser: what people do with them. */
import { assert, assertEquals } from "@std/assert";
import { fileURLToPath } from "node:url";
import { schema } from "../db.ts";
import { signInLink } from "../web/auth.ts";
import { cancel, enqueue, get } from "../queue.ts";
import { browserTest, signIn } from "./browser.ts";
import { waitFor } from "./database.ts";
import { startScript, startWorker } from "./processes.ts";
import { adminToken, keyOf } from "./site.ts";

const root = (path: string) => fileURLToPath(new URL(`../${path}`, import.meta.url));
const ownJobs = ["--jobs", root("jobs.ts")];

browserTest(
  "a recording that is submitted is followed to its score, which is drawn and plays",
  async ({ open, url }) => {
    await using _worker = startScript("worker.ts", ["--poll-max-ms", "100"], { DATABASE_URL: url });
    const page = await open();
    await page.getByRole("link", { name: "Submit", exact: true }).click();
    await page.getByLabel("Title").fill("Up & <b>up</b>");
    await page.getByLabel("Files").setInputFiles(root("examples/01-up-the-stairs.wav"));
    await page.getByRole("button", { name: "Submit" }).click();
    await page.waitForURL(/\/jobs\/\d+$/);
    await page.locator(".badge.done").waitFor();
    await page.locator("[data-paper] svg").waitFor();
    assert(await page.locator("[data-paper] .abcjs-note").count() >= 5);
    await page.locator("[data-paper] svg").getByText("Up & <b>up</b>", { exact: true }).waitFor();

    await page.getByRole("button", { name: "Play" }).click();
    await page.locator("[data-paper] .playing").first().waitFor();
    await page.getByRole("button", { name: "Stop" }).click();
    await page.getByRole("button", { name: "Play" }).waitFor();

    const download = page.waitForEvent("download");
    await page.getByRole("link", { name: "score.mid" }).click();
    assertEquals((await download).suggestedFilename(), "score.mid");
  },
  ownJobs,
);

browserTest(
  "a job's page shows its stage and progress as they come, and its end, without being loaded again",
  async ({ open, sql, url }) => {
    const [{ id }] = await enqueue(sql, [{ kind: "waits" }]);
    const page = await open();
    await page.goto(`/jobs/${id}`);
    await page.locator(".badge.queued").waitFor();
    await page.evaluate("document.title = 'the same page'");
    await using _worker = startWorker(url);
    await page.locator(".badge.running").waitFor();
    await page.locator("[data-stage]", { hasText: "waiting" }).waitFor();
    await page.locator("[data-progress][value='0.5']").waitFor();
    await cancel(sql, id);
    await page.locator(".badge.cancelled").waitFor();
    await page.getByText("Attempts that did not finish it").waitFor();
    assertEquals(await page.title(), "the same page");
  },
);

browserTest(
  "only the right token signs in, and only to this site; signing out ends it",
  async ({ open, site }) => {
    const page = await open({ token: null });
    await page.goto("/queues");
    assertEquals(new URL(page.url()).pathname, "/sign-in");
    await page.getByLabel("Admin token or API key").fill(`${adminToken}x`);
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.getByRole("alert").waitFor();
    await page.getByLabel("Admin token or API key").fill(adminToken);
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.getByRole("heading", { name: "Queues" }).waitFor();
    const [cookie] = await page.context().cookies();
    assertEquals([cookie.httpOnly, cookie.sameSite], [true, "Strict"]);

    for (
      const to of ["//elsewhere.example/", "/\\elsewhere.example", "https://elsewhere.example"]
    ) {
      await page.goto(`/sign-in?to=${encodeURIComponent(to)}`);
      assertEquals(page.url(), `${site.address}/dashboard`);
    }
    await page.getByRole("button", { name: "Sign out" }).click();
    await page.goto("/queues");
    assertEquals(new URL(page.url()).pathname, "/sign-in");
  },
);

browserTest("a link to sign in is good until it is changed", async ({ open }) => {
  const secrets = { admin: adminToken, session: "a-session-secret-for-the-tests-only-01" };
  const link = await signInLink(secrets);
  const page = await open({ token: null });
  const reply = await page.goto(link.replace("link=", "link=9"));
  assertEquals(reply?.status(), 401);
  await page.goto(link);
  await page.getByRole("heading", { name: "Dashboard" }).waitFor({ state: "attached" });
});

browserTest(
  "who tries token after token is stopped, and told when to come back",
  async ({ open }) => {
    const page = await open({ token: null });
    await page.goto("/sign-in");
    for (let i = 0; i < 10; i++) {
      await page.getByLabel("Admin token or API key").fill(`wrong ${i}`);
      await page.getByRole("button", { name: "Sign in" }).click();
      await page.getByRole("alert").waitFor();
    }
    await page.getByLabel("Admin token or API key").fill(adminToken);
    const replied = page.waitForResponse((it) => it.request().method() === "POST");
    await page.getByRole("button", { name: "Sign in" }).click();
    const reply = await replied;
    assertEquals(reply.status(), 429);
    assert(Number(reply.headers()["retry-after"]) > 0);
    await page.getByText("Come back in").waitFor();
  },
);

browserTest("at the review desk a job is resumed, requeued, or failed", async ({ open, sql }) => {
  const rows = await sql<{ id: string }[]>`
    insert into ${
    sql(schema)
  }.jobs (queue, kind, payload, status, attempt, request_key, sent_at, error)
    select 'default', 'charge', '{}', 'review', 1, gen_random_uuid(), now(), 'the reply was lost'
    from generate_series(1, 3) returning id::text`;
  const [sent, unsent, lost] = rows.map((row) => row.id);
  const page = await open();
  await page.goto("/review");
  const desk = (id: string) => page.getByRole("article").filter({ hasText: `#${id}` });
  await desk(sent).getByLabel("Its id at the service").fill("req_1");
  await desk(sent).getByRole("button", { name: "Resume" }).click();
  await desk(sent).waitFor({ state: "detached" });
  await desk(unsent).getByRole("button", { name: "Requeue" }).click();
  await desk(unsent).waitFor({ state: "detached" });
  await desk(lost).getByLabel("Why").fill("refunded by hand");
  await desk(lost).getByRole("button", { name: "Fail" }).click();
  await page.getByText("Nothing waits for you here").waitFor();
  const jobs = await sql`
    select status, request_id, error from ${sql(schema)}.jobs j order by j.id`;
  assertEquals(jobs.map((it) => [it.status, it.request_id]), [
    ["queued", "req_1"],
    ["queued", null],
    ["failed", null],
  ]);
  assertEquals(jobs[2].error, "refunded by hand");
});

browserTest("a queue is made, limited, paused and resumed", async ({ open, sql, url }) => {
  const page = await open();
  await page.goto("/queues");
  const fresh = page.getByRole("region", { name: "New queue" });
  await fresh.getByLabel("Name").fill("slow-lane");
  await fresh.getByLabel("Claimed by").selectOption("lock");
  await fresh.getByLabel("Running at a time").fill("2");
  await fresh.getByRole("button", { name: "Create" }).click();
  const lane = page.getByRole("region", { name: "slow-lane" });
  await lane.getByText("0 of 2").waitFor();
  await lane.getByRole("button", { name: "Pause" }).click();
  await lane.getByText("paused").waitFor();

  const [{ id }] = await enqueue(sql, [{ kind: "echo", queue: "slow-lane", payload: 1 }]);
  const [other] = await enqueue(sql, [{ kind: "echo", payload: 1 }]);
  await using _worker = startWorker(url);
  const statusOf = async (id: string) => (await get(sql, [id]))[0].status;
  await waitFor(async () => await statusOf(other.id) === "done", "the job of the other queue");
  assertEquals(await statusOf(id), "queued");
  await lane.getByRole("button", { name: "Resume" }).click();
  await lane.getByText("open").waitFor();
  await waitFor(async () => await statusOf(id) === "done", "the job");
  await lane.locator("summary").click();
  await lane.getByLabel("Waiting, about").fill("70");
  await lane.getByLabel("Starts, across all workers").fill("5");
  await lane.getByLabel("… in so many seconds").fill("0.5");
  await lane.getByLabel("Owners take turns").check();
  await lane.getByRole("button", { name: "Save" }).click();
  await waitFor(async () => {
    const [row] = await sql`
      select * from ${sql(schema)}.queues where name = 'slow-lane'`;
    return row.max_waiting === 70 && row.max_running === 2 && row.claim === "lock" &&
      row.fair && row.rate_limit === 5 && row.rate_period_s === 0.5;
  }, "the limit");
});

browserTest(
  "an owner sees the own jobs alone: another's is not found, nor is what is the admin's",
  async ({ open, sql }) => {
    const [mine, theirs] = await enqueue(sql, [
      { kind: "echo", owner: "acme" },
      { kind: "echo", owner: "globex" },
    ]);
    const page = await open({ token: await keyOf(sql, "acme") });
    await page.goto("/jobs?owner=globex");
    await page.locator("tbody tr").first().waitFor();
    assertEquals(await page.locator("tbody tr").count(), 1);
    await page.getByText(`#${mine.id}`).waitFor();
    assertEquals((await page.goto(`/jobs/${mine.id}`))?.status(), 200);
    for (
      const path of [
        `/jobs/${theirs.id}`,
        "/jobs/999999",
        "/dashboard",
        "/dashboard/data.json",
        "/review",
        "/queues",
      ]
    ) {
      assertEquals((await page.goto(path))?.status(), 404, path);
    }
    assertEquals(await page.getByRole("link", { name: "Dashboard" }).count(), 0);
  },
);

browserTest(
  "without JavaScript a job is submitted, read, cancelled and tried again",
  async ({ open, sql, url }) => {
    const page = await open({ javaScriptEnabled: false });
    await page.goto("/submit?kind=number");
    await page.getByLabel("Payload").fill('"five"');
    await page.getByRole("button", { name: "Submit" }).click();
    await page.getByRole("alert").filter({ hasText: "expected number" }).waitFor();
    assertEquals(await page.getByLabel("Payload").inputValue(), '"five"'); // nothing is typed twice
    await page.goto("/submit?kind=throws");
    await page.getByLabel("Message").fill("it broke");
    await page.getByLabel("Permanent").check();
    await page.getByRole("button", { name: "Submit" }).click();
    await page.waitForURL(/\/jobs\/\d+$/);
    {
      await using _worker = startWorker(url);
      await waitFor(async () => {
        await page.reload();
        return await page.locator(".badge.failed").count();
      }, "the job to fail");
    }
    await page.getByText("it broke").first().waitFor();
    const first = page.url();
    await page.getByRole("button", { name: "Retry as a new job" }).click();
    await page.waitForURL((url) => url.href !== first && /\/jobs\/\d+$/.test(url.pathname));
    await page.getByRole("button", { name: "Cancel" }).click();
    await page.locator(".badge.cancelled").waitFor();
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs`;
    assertEquals(n, 2);
  },
);

browserTest(
  "the dashboard brings itself up to date, and leaves the focus where it is",
  async ({ open, sql }) => {
    await sql`
    insert into ${sql(schema)}.looks (pool, number, controller, seen, wanted, code, reason, act)
    select 'default', n, gen_random_uuid(), '{"queue": null, "platform": null}', 1, 'unknown',
      'Railway said nothing', 'none' from generate_series(1, 5) n`;
    const page = await open({ reducedMotion: "reduce" });
    await page.goto("/dashboard");
    const waiting = page.locator("#tiles dd").first().getByRole("link");
    assertEquals(await waiting.textContent(), "0");
    await waiting.focus();
    assertEquals(await page.locator("[data-chart] canvas").count(), 2);
    await enqueue(sql, [{ kind: "echo" }, { kind: "echo" }]);
    await waitFor(async () => await waiting.textContent() === "2", "the count");
    assert(await waiting.evaluate((it) => it.matches(":focus")));
    // The reason is there by pointing, and without.
    await page.locator("[data-chart=jobs] .u-over").hover();
    await page.locator("[data-why]", { hasText: "Railway said nothing" }).waitFor();
    await page.getByRole("cell", { name: "Railway said nothing" }).waitFor();
  },
);

browserTest(
  "a list of 100,000 jobs goes page by page, each of them once",
  async ({ open, sql }) => {
    await sql`
    insert into ${sql(schema)}.jobs (queue, kind, payload, status, finished_at, error)
    select 'default', 'echo', '{}', case when n % 1000 = 0 then 'failed' else 'done' end, now(),
      case when n % 1000 = 0 then 'as always' end from generate_series(1, 100000) n`;
    const page = await open();
    await page.goto("/jobs");
    const ids: number[] = [];
    for (let i = 0; i < 3; i++) {
      const texts = await page.locator("tbody th .id").allTextContents();
      ids.push(...texts.map((text) => Number(text.slice(1))));
      const [first] = texts;
      await page.getByRole("link", { name: "Older" }).click();
      await waitFor(
        async () => await page.locator("tbody th .id").first().textContent() !== first,
        "the next page",
      );
    }
    assertEquals(ids, Array.from({ length: 150 }, (_, i) => 100_000 - i));
    await page.getByLabel("Status").selectOption("failed");
    await page.getByRole("button", { name: "Filter" }).click();
    await page.locator(".badge.failed").first().waitFor();
    assertEquals(await page.locator("tbody tr").count(), 50);
  },
);

browserTest("who signed in with a key and lost it sees nothing more", async ({ open, sql }) => {
  const page = await open({ token: null });
  await signIn(page, await keyOf(sql, "acme"));
  await sql`update ${sql(schema)}.keys set revoked_at = now()`;
  await page.goto("/jobs");
  assertEquals(new URL(page.url()).pathname, "/sign-in");
});
