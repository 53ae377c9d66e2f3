/**
 * How the pages look and whom they let in: no violation that axe finds, no script of a stranger's, and
 * a picture of each page. The pictures are kept in the folder of SIDING_ARTIFACTS, a temporary one
 * if not given, which the output names.
 */
import { assertEquals } from "@std/assert";
import axe, { type AxeResults } from "axe-core";
import type { Page } from "playwright-core";
import { type Pool, schema, via } from "../db.ts";
import { writeFile } from "../files.ts";
import { enqueue, setQueue } from "../queue.ts";
import { browserTest } from "./browser.ts";
import { waitFor } from "./database.ts";
import { startWorker } from "./processes.ts";

const stream = (text: string) => new Blob([text]).stream();

/** Jobs in every state, looks, processes: what there is to see. @returns ids by state */
async function furnish(sql: Pool): Promise<Record<string, string>> {
  const s = sql(schema);
  await setQueue(sql, "nightly", { paused: true });
  await sql`
    insert into ${s}.jobs (queue, kind, owner, payload, status, due_at, claimed_at, finished_at, attempt,
      worker_id, claim_token, lease_until, stage, progress, error, result, request_key, sent_at)
    select case n % 3 when 0 then 'nightly' else 'default' end, 'echo', 'acme', '{"title": "A title"}', status,
      case status when 'scheduled' then now() + interval '2 hours' else now() - n * interval '7 s' end,
      case when status in ('running', 'done', 'failed') then now() - n * interval '5 s' end,
      case when status in ('done', 'failed', 'cancelled') then now() end,
      1, case when status in ('running', 'done', 'failed') then gen_random_uuid() end,
      case when status = 'running' then gen_random_uuid() end,
      case when status = 'running' then now() + interval '1 hour' end,
      case when status = 'running' then 'pitch' end, case when status = 'running' then 0.4 end,
      case when status in ('failed', 'review') then 'the reply was lost: connection reset' end,
      case when status = 'done' then '{"notes": 12}'::jsonb end,
      case when status = 'review' then gen_random_uuid() end, case when status = 'review' then now() end
    from unnest('{scheduled,queued,running,review,done,failed,cancelled}'::text[]) status,
      generate_series(1, 4) n`;
  await sql`
    insert into ${s}.attempts (job_id, attempt, outcome, error)
    select j.id, 1, 'crashed', 'its worker fell silent' from ${s}.jobs j where status <> 'queued'`;
  await sql`
    insert into ${s}.processes (boot_id, role, name, version, running, seen_at)
    select gen_random_uuid(), 'worker', 'worker-' || n, '1', n % 2, now() - n * interval '40 s'
    from generate_series(0, 3) n`;
  await sql`
    insert into ${s}.looks (pool, number, at, controller, seen, wanted, code, reason, alarms, act)
    select 'default', n, now() - (120 - n) * interval '30 s', gen_random_uuid(), jsonb_build_object(
        'queue', jsonb_build_object('work', jsonb_build_array(jsonb_build_object(
            'queued', abs(n % 40 - 20), 'running', 2)),
          'workers', jsonb_build_object('reporting', 2, 'busy', 1 + n / 30 % 2)),
        'platform', jsonb_build_object('running', 1 + n / 30, 'configured', 1 + n / 30)),
      1 + n / 30, case when n % 30 = 0 then 'up' else 'most' end, format('%s jobs wait', abs(n % 40 - 20)),
      case when n > 110 then '{silent}'::text[] else '{}' end, 'none' from generate_series(1, 119) n`;
  await sql`
    insert into ${s}.schedules (name, cron, time_zone, kind, queue, owner, enabled, next_at, error, error_at)
    select name, '30 2 * * 1-5', 'Europe/Berlin', 'echo', queue, owner, enabled,
      date_trunc('hour', now()) + interval '9 hours', error, case when error is not null then now() end
    from (values ('nightly-report', 'nightly', 'acme', true, null), ('paused', 'default', null, false, null),
        ('refused', 'default', null, true, 'queue "default" is full: its max_waiting is 100'))
      it (name, queue, owner, enabled, error)`;
  await sql`
    insert into ${s}.schedule_ticks (schedule, tick_at, outcome, job_id)
    select name, now() - interval '15 hours', case when name = 'paused' then 'skipped' else 'enqueued' end,
      case when name = 'nightly-report' then (select max(id) from ${s}.jobs) when name = 'refused' then 999999 end
    from ${s}.schedules`;
  const rows = await sql<{ status: string; id: string }[]>`
    select status, min(id)::text as id from ${s}.jobs group by status`;
  return Object.fromEntries(rows.map(({ status, id }) => [status, id]));
}

/** What axe finds on a page, as text; by one of its rules alone where one is named. */
async function violationsOf(page: Page, rule?: string): Promise<string[]> {
  await page.evaluate(axe.source);
  const options = JSON.stringify(rule ? { runOnly: [rule] } : {});
  const { violations } = await page.evaluate(`axe.run(document, ${options})`) as AxeResults;
  return violations.flatMap(({ id, nodes }) =>
    nodes.map((node) => `${page.url()} ${id}: ${node.target.join(" ")}: ${node.failureSummary}`)
  );
}

browserTest(
  "every page, wide and narrow, light and dark, has no violation that axe finds, and fits",
  async ({ open, sql }) => {
    const ids = await furnish(sql);
    const pages: Record<string, string> = {
      dashboard: "/dashboard",
      jobs: "/jobs",
      "jobs-none": "/jobs?kind=nothing",
      "jobs-failed": "/jobs?status=failed",
      submit: "/submit?kind=throws",
      "submit-json": "/submit?kind=number",
      review: "/review",
      queues: "/queues",
      schedules: "/schedules",
      api: "/api",
      health: "/health/service",
      "not-found": "/jobs/999999",
      ...Object.fromEntries(
        Object.entries(ids).map(([status, id]) => [`job-${status}`, `/jobs/${id}`]),
      ),
    };
    const folder = Deno.env.get("SIDING_ARTIFACTS") ||
      await Deno.makeTempDir({ prefix: "siding-pages-" });
    await Deno.mkdir(folder, { recursive: true });
    const found: string[] = [];
    const lookAtAll = async (colorScheme: "light" | "dark", width: number) => {
      const options = { colorScheme, viewport: { width, height: 800 } };
      const look = async (page: Page, name: string) => {
        const blank = page.locator("[data-chart]:not(:has(canvas))");
        await waitFor(async () => await blank.count() === 0, "the charts to be drawn");
        const path = `${folder}/${name}-${colorScheme}-${width}.png`;
        await page.screenshot({ path, fullPage: true });
        // A dark page is the same, but for its colours.
        const rule = colorScheme === "dark" ? "color-contrast" : undefined;
        if (width > 1000 || !rule) found.push(...await violationsOf(page, rule));
        const wide = Number(await page.evaluate("document.documentElement.scrollWidth"));
        if (wide > width) found.push(`${name} is ${wide} px wide in ${width}`);
      };
      const stranger = await open({ ...options, token: null });
      await stranger.goto("/sign-in");
      await look(stranger, "sign-in");
      await stranger.context().close();
      const page = await open(options);
      for (const [name, path] of Object.entries(pages)) {
        // With all the tests' kinds it is as long as all the others.
        if (name === "api" && (width < 1000 || colorScheme === "dark")) continue;
        await page.goto(path);
        await look(page, name);
      }
      await page.context().close();
    };
    await Promise.all(
      [1280, 390].flatMap((width) => [lookAtAll("light", width), lookAtAll("dark", width)]),
    );
    console.log(`pictures of the pages are in ${folder}`);
    assertEquals(found, []);
  },
);

const evil =
  `"'><img src=x onerror="document.title='stolen'"><script>document.title='stolen'</script>`;

/** Puts markup into all that somebody else may have a say in. @returns the pages that show it */
async function poison(sql: Pool): Promise<string[]> {
  const s = sql(schema);
  const file = await writeFile(via(sql), evil, stream("x"), 100);
  const [{ id }] = await enqueue(sql, [{
    kind: "echo",
    owner: evil,
    unique_key: evil,
    webhook: `https://x.example/${evil}`,
    payload: { [evil]: evil },
    files: [file.id],
  }]);
  const made = await writeFile(
    via(sql),
    `${evil}.abc`,
    stream(`X:1\nT:${evil}\nW:${evil}\nK:C\nCDEF|\n`),
    1000,
    {
      id,
      attempt: 1,
    },
  );
  await sql`update ${s}.files set kept = true where id = ${made.id}`;
  await sql`
    update ${s}.jobs set status = 'done', attempt = 1, claimed_at = now(), finished_at = now(),
      worker_id = gen_random_uuid(), result = jsonb_build_object(${evil}::text, ${evil}::text) where id = ${id}`;
  const [running, failed, review] = ["running", "failed", "review"];
  const rows = await sql<{ id: string; status: string }[]>`
    insert into ${s}.jobs (queue, kind, owner, payload, status, stage, error, attempt, worker_id, claim_token,
      claimed_at, lease_until, finished_at, request_key, request_id, sent_at)
    select 'default', 'echo', ${evil}, to_jsonb(${evil}::text), status, ${evil}, ${evil}, 1,
      case when status <> 'review' then gen_random_uuid() end, case when status = 'running' then gen_random_uuid() end,
      now(), case when status = 'running' then now() + interval '1 hour' end,
      case when status = 'failed' then now() end, gen_random_uuid(),
      case when status <> 'review' then ${evil}::text end, now()
    from unnest(${`{${running},${failed},${review}}`}::text[]) status returning id::text, status`;
  await sql`
    insert into ${s}.attempts (job_id, attempt, outcome, error) select j.id, 1, 'crashed', ${evil} from ${s}.jobs j`;
  await sql`
    update ${s}.requests set look_up = ${evil}, looked_up_at = now()`;
  await sql`
    insert into ${s}.processes (boot_id, role, name, version, pool)
    values (gen_random_uuid(), 'worker', ${evil}, ${evil}, ${evil})`;
  await sql`
    insert into ${s}.looks (pool, number, controller, seen, wanted, code, reason, alarms, act, error)
    values (${evil}, 1, gen_random_uuid(), '{"queue": null, "platform": {"running": 1}}', 1, ${evil}, ${evil},
      array[${evil}], 'failed', ${evil})`;
  await sql`
    insert into ${s}.schedules (name, cron, time_zone, kind, queue, owner, payload, error, error_at)
    values ('evil', ${evil}, ${evil}, 'echo', ${evil}, ${evil}, to_jsonb(${evil}::text), ${evil}, now())`;
  const q = encodeURIComponent(evil);
  return [
    ...[id, ...rows.map((row) => row.id)].map((it) => `/jobs/${it}`),
    ...[
      "/jobs",
      `/jobs?owner=${q}&kind=${q}&queue=${q}`,
      `/jobs?status=${q}`,
      "/jobs?status=failed",
    ],
    ...[
      "/dashboard",
      `/dashboard?pool=${q}`,
      `/dashboard?hours=${q}`,
      "/review",
      "/queues",
      "/schedules",
    ],
    ...[`/submit?kind=${q}`, `/nowhere/${q}`, `/jobs/${q}`, `/review?after=${q}`],
  ];
}

browserTest(
  "markup in any field that is shown is text there, and never runs",
  async ({ open, sql }) => {
    const page = await open();
    for (const path of await poison(sql)) {
      await page.goto(path);
      await page.locator("[data-abc]").or(page.locator("main")).first().waitFor();
      assertEquals(await page.locator("main img, main script, [onerror]").count(), 0, path);
      await page.evaluate("new Promise((done) => setTimeout(done, 50))"); // an image that fails says so later
      assertEquals(/stolen/.test(await page.title()), false, path);
    }
    const stranger = await open({ token: null });
    await stranger.goto(`/sign-in?to=${encodeURIComponent(`/${evil}`)}`);
    assertEquals(await stranger.locator("main img, main script").count(), 0);
    // What a form is refused for comes back in it.
    await page.goto("/submit?kind=throws");
    await page.getByLabel("Message").fill(evil);
    await page.getByText("More: queue").click();
    await page.getByLabel("Queue").fill(evil);
    await page.getByRole("button", { name: "Submit" }).click();
    await page.getByRole("alert").waitFor();
    assertEquals(await page.getByLabel("Message").inputValue(), evil);
    assertEquals(await page.locator("main img, main script").count(), 0);
  },
);

browserTest(
  "a stage with markup that comes by the event stream is text too",
  async ({ open, sql, url }) => {
    const [{ id }] = await enqueue(sql, [{ kind: "waits" }]);
    await using _worker = startWorker(url);
    const page = await open();
    await page.goto(`/jobs/${id}`);
    await page.locator(".badge.running").waitFor();
    await waitFor(async () => {
      // The worker's heartbeat puts its own stage back.
      await sql`update ${sql(schema)}.jobs set stage = ${evil.slice(0, 200)} where id = ${id}`;
      return (await page.locator("[data-stage]").textContent())?.includes("<img");
    }, "the stage");
    assertEquals(await page.locator("main img").count(), 0);
  },
);
