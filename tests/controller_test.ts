/** Controllers with real workers on the local Railway: what they see, decide, record and do. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { fileURLToPath } from "node:url";
import { connect, type Pool, schema } from "../db.ts";
import { type LocalRailway, type RailwayOptions, startRailway } from "../dev/railway.ts";
import { quantile } from "../dev/simulation/report.ts";
import { siding } from "../dev/simulation/scalers.ts";
import { simulate } from "../dev/simulation/world.ts";
import { looks } from "../looks.ts";
import { defaults } from "../policy.ts";
import * as queue from "../queue.ts";
import { Railway } from "../railway.ts";
import { databaseTest, type Needs, waitFor } from "./database.ts";
import { enqueueMany } from "./kinds.ts";
import { hasty, runScript, startScript } from "./processes.ts";

const worker = fileURLToPath(new URL("../worker.ts", import.meta.url));

/** A local Railway whose replicas are real workers on the database. `more`: variables of theirs. */
const workersOn = (
  url: string,
  flags: string[] = [],
  options: Partial<RailwayOptions> = {},
  more: () => Record<string, string> = () => ({}),
) =>
  startRailway({
    start: (env) =>
      new Deno.Command(Deno.execPath(), {
        args: ["run", "-P=worker", "--quiet", worker, ...hasty, "--drain-s", "1", ...flags],
        env: { DATABASE_URL: url, NO_COLOR: "1", ...env, ...more() },
        ...{ stdin: "null", stdout: "null", stderr: "null", detached: true },
      }).spawn(),
    ...{ startDelayMs: 100, drainMs: 3000, overlapMs: 200, restartMs: 200, seed: 1 },
    ...options,
  });

function test(
  name: string,
  body: (sql: Pool, railway: LocalRailway, url: string) => Promise<void>,
  options: Partial<RailwayOptions> = {},
  needs: Needs = {},
): void {
  databaseTest(name, async (sql, url) => {
    await using railway = await workersOn(url, [], options);
    await body(sql, railway, url);
  }, needs);
}

const envOf = (railway: LocalRailway, url: string) => ({
  DATABASE_URL: url,
  SIDING_RAILWAY_URL: railway.url,
  SIDING_WORKER_SERVICE_ID: railway.serviceId,
  RAILWAY_ENVIRONMENT_ID: railway.environmentId,
  RAILWAY_TOKEN: railway.projectToken,
});
/** Short times, so that seconds show what minutes would. */
const quick = [
  ...["--look-ms", "200", "--heartbeat-ms", "200", "--step-s", "2", "--idle-s", "3"],
  ...["--railway-calls-per-hour", "10000"],
];
const startController = (railway: LocalRailway, url: string, flags: string[] = []) =>
  startScript("controller.ts", [...quick, ...flags], envOf(railway, url));

const total = (railway: LocalRailway) =>
  Object.values(railway.counts()).reduce((sum, count) => sum + count, 0);
const lastLook = async (sql: Pool) => (await looks(sql, "default", 1))[0];
const told = async (sql: Pool) =>
  (await looks(sql, "default", 1000)).filter(({ act }) => act === "written").toReversed();

/** Enqueues jobs that run until they are released. */
async function holdJobs(sql: Pool, n: number) {
  const gone = await Deno.makeTempFile();
  const job = { kind: "until" as const, payload: { gone } };
  const entries = await enqueueMany(sql, Array.from({ length: n }, () => job));
  const jobs = () => queue.get(sql, entries.map(({ id }) => id));
  return {
    jobs,
    all: async (status: queue.Status) => (await jobs()).every((job) => job.status === status),
    release: () => Deno.remove(gone),
  };
}

/** Waits until so many workers report. */
const reporting = (sql: Pool, n = 1) =>
  waitFor(async () => {
    const [row] = await sql`select count(*)::integer as n from ${sql(schema)}.processes
      where role = 'worker' and seen_at > now() - interval '2 s'`;
    return row.n === n;
  }, `${n} workers to report`);

test(
  "a burst takes the pool up to MAX by steps, and back to MIN once it is idle, no job harmed",
  async (sql, railway, url) => {
    await reporting(sql);
    const first = await holdJobs(sql, 2);
    await using _ = startController(railway, url);
    await waitFor(() => total(railway) === 2, "a second worker to be asked for");
    const more = await holdJobs(sql, 4);
    await waitFor(() => total(railway) === 4, "the most");
    await reporting(sql, 4);
    await first.release();
    await more.release();
    await waitFor(async () => await first.all("done") && await more.all("done"), "all to be done");
    await waitFor(() => total(railway) === 1, "the least");
    await waitFor(async () => (await told(sql)).at(-1)!.code === "down", "its row");
    const numbers = (await looks(sql, "default", 1000)).map(({ number }) => Number(number));
    assert(numbers.length > 10, `${numbers.length} looks`);
    assertEquals(numbers, numbers.toSorted((a, b) => b - a));
    const steps = await told(sql);
    const wanted = steps.map(({ wanted }) => wanted!);
    assertEquals([wanted[0], Math.max(...wanted), wanted.at(-1)], [2, 4, 1]);
    const ups = steps.slice(0, -1);
    assertEquals([...new Set(ups.map(({ code }) => code))], ["up"]);
    for (const [n, { seen }] of ups.entries()) {
      const apartMs = n === 0 ? Infinity : seen.at_ms - ups[n - 1].seen.at_ms;
      assert(apartMs >= 2000, `${apartMs} ms between two steps up`);
    }
    const all = [...await first.jobs(), ...await more.jobs()];
    assertEquals(all.map(({ attempt }) => attempt), all.map(() => 1));
    assertStringIncludes(steps[0].reason, "from 1 worker to 2");
  },
);

test(
  "of two controllers one acts, and the other when the first is gone",
  async (sql, railway, url) => {
    await reporting(sql);
    const lookers = async () => {
      const rows = await sql`select distinct controller from ${sql(schema)}.looks`;
      return rows.length;
    };
    await using first = startController(railway, url);
    await waitFor(async () => await lookers() === 1, "a look");
    await using _ = startController(railway, url);
    await waitFor(async () => {
      const [row] = await sql`select count(*)::integer as n from ${sql(schema)}.processes
      where role = 'controller'`;
      return row.n === 2;
    }, "both");
    const before = Number((await lastLook(sql)).number);
    await waitFor(async () => Number((await lastLook(sql)).number) > before + 3, "more looks");
    assertEquals(await lookers(), 1);
    first.kill("SIGKILL");
    await first.ended;
    await waitFor(async () => await lookers() === 2, "the other to look");
    const jobs = await holdJobs(sql, 2);
    await waitFor(() => total(railway) === 2, "the other to act");
    await jobs.release();
  },
);

test(
  "a count that a deploy reset during a burst is set again at once, and its stopped jobs end elsewhere",
  async (sql, railway, url) => {
    await reporting(sql);
    const jobs = await holdJobs(sql, 4);
    await using _ = startController(railway, url);
    await waitFor(() => total(railway) === 4, "the most");
    await waitFor(() => jobs.all("running"), "all to run");
    railway.deploy();
    assertEquals(total(railway), 1);
    await waitFor(() => total(railway) === 4, "it to be set again");
    await waitFor(async () => (await told(sql)).length === 2, "the rows");
    assertEquals((await told(sql)).map(({ code }) => code), ["up", "reassert"]);
    await waitFor(
      async () => (await jobs.jobs()).every(({ attempt }) => attempt > 1),
      "all again",
    );
    await jobs.release();
    await waitFor(() => jobs.all("done"), "all to be done");
    // One may have gone to another old worker first.
    for (const { crashes, releases, attempt } of await jobs.jobs()) {
      assertEquals([crashes, releases], [0, attempt - 1]);
    }
  },
);

test(
  "a busy worker that the platform stops gives its job back at once, and it ends elsewhere",
  async (sql, railway, url) => {
    await reporting(sql);
    const jobs = await holdJobs(sql, 3);
    await using _ = startController(railway, url, ["--max", "3"]);
    await reporting(sql, 3);
    await waitFor(() => jobs.all("running"), "three to run");
    const hand = new Railway({
      ...{ serviceId: railway.serviceId, environmentId: railway.environmentId, url: railway.url },
      token: { project: railway.projectToken },
    });
    await hand.write(1, await hand.read()); // somebody lowers it by hand; Railway chooses two
    await waitFor(async () => (await told(sql)).at(-1)?.code === "reassert", "it to be set again");
    await waitFor(async () => {
      const attempts = (await jobs.jobs()).map(({ attempt }) => attempt).sort();
      return attempts.join() === "1,2,2" && await jobs.all("running");
    }, "the two to run elsewhere");
    const counts = (await jobs.jobs()).map(({ crashes, releases }) => [crashes, releases]).sort();
    assertEquals(counts, [[0, 0], [0, 1], [0, 1]]);
    await jobs.release();
    await waitFor(() => jobs.all("done"), "all to be done");
  },
);

test(
  "a leader that is killed in the middle of a look leaves its step to the next",
  async (sql, railway, url) => {
    await reporting(sql);
    const jobs = await holdJobs(sql, 2);
    railway.setMood("hang", 1);
    await using first = startController(railway, url);
    await waitFor(() => railway.calls.length === 1, "its look");
    await using _ = startController(railway, url);
    first.kill("SIGKILL");
    await first.ended;
    await waitFor(() => total(railway) === 2, "the other to act");
    await waitFor(async () => (await told(sql)).length === 1, "its row");
    assertEquals((await looks(sql, "default", 1000)).at(-1)!.number, "1");
    await jobs.release();
  },
);

for (
  const mood of ["unauthorized", "unauthorized-200", "limited", "unavailable", "garbage"] as const
) {
  test(
    `a look that Railway leaves without an answer (${mood}) holds the count, and says why`,
    async (sql, railway, url) => {
      await reporting(sql);
      const jobs = await holdJobs(sql, 3);
      railway.setMood(mood);
      await using controller = startController(railway, url);
      const look = await waitFor(() => lastLook(sql), "a look");
      assertEquals([look.code, look.act, look.seen.platform], ["unknown", "none", null]);
      assert(look.error, "the reason");
      const said = controller.log() + JSON.stringify(await looks(sql, "default", 100));
      assert(!said.includes(railway.projectToken), "no token in logs or rows");
      assertEquals(total(railway), 1);
      await jobs.release();
    },
    {},
    mood === "unauthorized" ? {} : { noPooler: "one of Railway's answers is enough there" },
  );
}

test(
  "a count that the plan refuses is a ceiling, recorded and not tried again at each look",
  async (sql, railway, url) => {
    await reporting(sql);
    const jobs = await holdJobs(sql, 5);
    await using _ = startController(railway, url, ["--step-s", "0"]);
    await waitFor(() => total(railway) === 2, "what the plan takes");
    await waitFor(async () => (await lastLook(sql)).code === "most", "it to hold");
    const rows = await looks(sql, "default", 1000);
    const failed = rows.filter(({ act }) => act === "failed");
    assert(failed.length >= 1 && failed.length <= 3, `${failed.length} refused writes`);
    assert(rows[0].alarms.includes("ceiling"), rows[0].alarms.join());
    await jobs.release();
  },
  { ceiling: 2 },
);

test(
  "a look that could not see the queue is no empty queue: it holds the count, and is recorded",
  async (sql, railway, url) => {
    await reporting(sql);
    const jobs = await holdJobs(sql, 2);
    await using _ = startController(railway, url, ["--idle-s", "1"]);
    await waitFor(() => total(railway) === 2, "a second worker to be asked for");
    await sql.unsafe(`alter function ${schema}.survey rename to hidden`);
    await waitFor(async () => (await lastLook(sql)).code === "unknown", "looks that fail");
    await jobs.release();
    await waitFor(() => jobs.all("done"), "the jobs");
    const { number } = await lastLook(sql);
    const [{ until }] = await sql`select now() + interval '1.5 s' as until`; // longer than the idle time
    await waitFor(async () => (await sql`select now() > ${until} as yes`)[0].yes, "the idle time");
    const look = await lastLook(sql);
    assert(Number(look.number) > Number(number));
    const { code, seen, wanted } = look;
    assertEquals([code, seen.queue, wanted, total(railway)], ["unknown", null, 2, 2]);
    assertStringIncludes(look.error!, "survey");
    await sql.unsafe(`alter function ${schema}.hidden rename to survey`);
    await waitFor(() => total(railway) === 1, "the least, once it has seen that long enough");
  },
);

test(
  "what is paused, or of a kind that no worker serves, is no reason for more workers",
  async (sql, railway, url) => {
    await queue.setQueue(sql, "paused", { paused: true });
    await reporting(sql);
    await queue.enqueue(sql, [
      { kind: "echo", queue: "paused" },
      { kind: "nobody-serves-this" },
      { kind: "nobody-serves-this" },
    ]);
    await using _ = startController(railway, url);
    await waitFor(async () => (await looks(sql, "default")).length > 3, "looks");
    const rows = await looks(sql, "default");
    assertEquals([...new Set(rows.map(({ code }) => code))], ["idle"]);
    const work = rows[0].seen.queue!.work.map(({ queue, served }) => [queue, served]).sort();
    assertEquals(work, [["default", false], ["paused", true]]);
    assertEquals(total(railway), 1);
  },
);

test(
  "--once --dry-run says what it sees and would do, does nothing, and takes part in nothing",
  async (sql, railway, url) => {
    await reporting(sql);
    const jobs = await holdJobs(sql, 3);
    const flags = ["--once", "--dry-run", "--json"];
    for (let i = 0; i < 2; i++) {
      const { code, stdout, stderr } = await runScript("controller.ts", flags, envOf(railway, url));
      assertEquals(code, 0, stderr);
      const look = JSON.parse(stdout);
      assertEquals([look.wanted, look.write, look.code, look.dry_run], [
        3,
        true,
        "up",
        true,
      ]);
      assertEquals(look.seen.queue.workers.reporting, 1);
    }
    assertEquals(total(railway), 1);
    assertEquals(railway.calls, ["read", "read"]);
    assertEquals(await looks(sql, "default"), []);
    assertEquals((await looks(sql, "default/dry-run")).map(({ act }) => act), ["dry", "dry"]);
    const once = await runScript("controller.ts", ["--once"], envOf(railway, url));
    assertEquals([once.code, total(railway)], [0, 3]);
    await jobs.release();
  },
);

databaseTest(
  "workers with a controller beside each scale themselves; one acts, also while two deploys overlap",
  async (sql, url) => {
    const there: { railway?: LocalRailway } = {}; // it starts replicas before we have it
    await using railway = await workersOn(url, ["--controller"], { drainMs: 5000 }, () => ({
      ...{
        SIDING_LOOK_MS: "200",
        SIDING_HEARTBEAT_MS: "200",
        SIDING_STEP_S: "2",
        SIDING_IDLE_S: "2",
      },
      SIDING_RAILWAY_CALLS_PER_HOUR: "10000",
      SIDING_RAILWAY_URL: there.railway!.url,
      RAILWAY_TOKEN: there.railway!.projectToken,
    }));
    there.railway = railway;
    await reporting(sql);
    const jobs = await holdJobs(sql, 3);
    await reporting(sql, 3);
    await waitFor(() => jobs.all("running"), "all to run"); // those that report may not have claimed yet
    railway.deploy();
    assertEquals(total(railway), 1);
    await waitFor(() => total(railway) >= 3, "it to be set again");
    await waitFor(async () => (await jobs.jobs()).every(({ attempt }) => attempt > 1), "new ones");
    await jobs.release();
    await waitFor(() => total(railway) === 1, "the least");
    await reporting(sql, 1);
    const steps = await told(sql);
    assertEquals([steps[0].wanted, steps.at(-1)!.wanted], [3, 1]);
    const ups = steps.filter(({ code }) => code === "up").map(({ seen }) => seen.at_ms);
    for (const [n, atMs] of ups.entries()) assert(n === 0 || atMs - ups[n - 1] >= 2000, `${ups}`);
    assertEquals((await jobs.jobs()).map(({ crashes }) => crashes), [0, 0, 0]);

    await waitFor(async () => {
      const [row] = await sql`select now() - started_at > interval '3 s' as old
      from ${sql(schema)}.processes where role = 'controller'`;
      return row?.old;
    }, "its controller to stay");
    const [{ id }] = await queue.enqueue(sql, [{ kind: "environment" }]);
    const job = await waitFor(async () => {
      const [job] = await queue.get(sql, [id]);
      return job.status === "done" && job;
    }, "a job");
    assert(!String(job.result).includes("RAILWAY_TOKEN"), "no job sees the token");
  },
);

test(
  "a burst here and in the simulation agree, in wait and in replica-seconds, within 20%",
  async (sql, railway, url) => {
    await reporting(sql);
    await using _ = startController(railway, url);
    await waitFor(() => lastLook(sql), "a look");
    const entries = await enqueueMany(
      sql,
      Array.from({ length: 24 }, () => ({ kind: "takes" as const, payload: 1500 })),
    );
    await reporting(sql, 4);
    const [{ start_s }] = await sql`
    select avg(extract(epoch from p.started_at - l.at))::float8 as start_s
    from ${sql(schema)}.processes p, ${sql(schema)}.looks l
    where p.role = 'worker' and l.act = 'written' and p.started_at > l.at`;
    await waitFor(
      async () => {
        const jobs = await queue.get(sql, entries.map(({ id }) => id));
        return jobs.every(({ status }) => status === "done");
      },
      "all to be done",
      { timeoutMs: 60_000 },
    );

    const [real] = await sql`
    with jobs as (select * from ${sql(schema)}.jobs),
    span as (select min(due_at) as from_at, max(finished_at) as until_at from jobs),
    stands as (
      select (seen -> 'platform' ->> 'running')::integer as running, greatest(at, from_at) as at,
        least(lead(at, 1, until_at) over (order by number), until_at) as until_at
      from ${sql(schema)}.looks, span
    )
    select
      (select percentile_disc(0.95) within group (order by extract(epoch from claimed_at - due_at))
       from jobs)::float8 as wait_s,
      (select avg(extract(epoch from finished_at - claimed_at)) from jobs)::float8 as run_s,
      (select sum(running * extract(epoch from until_at - at)) from stands
       where until_at > at)::float8 as replica_s`;
    const trace = {
      ...{ name: "burst", forS: 0, arrivalS: new Float64Array(24) },
      runS: new Float64Array(24).fill(real.run_s),
    };
    const world = {
      ...{ seed: 1, startS: start_s, drainS: 1, leaseS: 3, maxCrashes: 2 },
      ...{ crashesPerHour: 0, concurrency: 1 },
    };
    const policy = { ...defaults, stepS: 2, idleS: 3 };
    const result = await simulate(trace, world, siding("as here", policy, 0.2));
    const agree = (what: string, here: number, there: number) =>
      assert(Math.abs(here - there) < 0.2 * there, `${what}: ${here} s here, ${there} s simulated`);
    agree("wait p95", real.wait_s, quantile(result.waitS, 0.95));
    agree("replica-seconds", real.replica_s, result.replicaS);
  },
  {},
  { noPooler: "it measures the policy, on real workers" },
);

databaseTest(
  "each pool has a leader of its own, and grows for its own queues only",
  async (sql, url) => {
    for (const name of ["a", "b"]) await queue.setQueue(sql, name);
    await using a = await workersOn(url, ["--pool", "a", "--queues", "a"]);
    await using b = await workersOn(url, ["--pool", "b", "--queues", "b"]);
    await reporting(sql, 2);
    await using _a = startController(a, url, ["--pool", "a"]);
    await using _b = startController(b, url, ["--pool", "b"]);
    const gone = await Deno.makeTempFile();
    const job = { kind: "until" as const, payload: { gone }, queue: "a" };
    await enqueueMany(sql, [job, job, job]);
    await waitFor(() => total(a) >= 3, "the pool of that queue to grow");
    const seen = (await looks(sql, "b")).length;
    await waitFor(async () => (await looks(sql, "b")).length > seen + 3, "the other to look");
    assertEquals(total(b), 1);
    assertEquals([...new Set((await looks(sql, "b")).map(({ code }) => code))], ["idle"]);
    await Deno.remove(gone);
  },
);

test(
  "what a controller needs and has not is told by name, with 2",
  async (_sql, railway, url) => {
    const env = envOf(railway, url);
    const wrong: [Record<string, string>, string[], string][] = [
      [{ RAILWAY_TOKEN: "" }, [], "RAILWAY_TOKEN is not set"],
      [{ SIDING_WORKER_SERVICE_ID: "" }, [], "SIDING_WORKER_SERVICE_ID is not set"],
      [{ RAILWAY_ENVIRONMENT_ID: "" }, [], "RAILWAY_ENVIRONMENT_ID is not set"],
      [{}, ["--min", "5"], "--min is 5: it must not be more than --max, 4"],
    ];
    for (const [without, flags, message] of wrong) {
      const { code, stderr } = await runScript("controller.ts", flags, { ...env, ...without });
      assertEquals(code, 2, stderr);
      assertStringIncludes(stderr, message);
    }
  },
  {},
  { noPooler: "it ends before it connects" },
);

test(
  "a look that is too old when Railway is to be told is dropped, and the next one acts",
  async (sql, railway, url) => {
    await reporting(sql);
    const jobs = await holdJobs(sql, 2);
    const other = connect(url, { max: 1 });
    const release = Promise.withResolvers<void>();
    try {
      // The look's row cannot be written for so long.
      const holding = other.begin(async (tx) => {
        await tx`lock table ${tx(schema)}.looks in share mode`;
        await release.promise;
      });
      await using _ = startController(railway, url, ["--statement-limit-ms", "60000"]);
      await waitFor(() => railway.calls.length === 1, "the look");
      const startedMs = performance.now();
      await waitFor(() => performance.now() - startedMs > 10_500, "it to grow old");
      assertEquals(railway.calls, ["read"]);
      release.resolve();
      await holding;
      const first = await waitFor(async () => {
        const look = (await looks(sql, "default")).at(-1);
        return look?.act === "failed" && look;
      }, "its end");
      assertStringIncludes(first.error!, "too old to act on");
      await waitFor(() => total(railway) === 2, "the next look to act");
    } finally {
      release.resolve();
      await jobs.release();
      await other.end();
    }
  },
);
