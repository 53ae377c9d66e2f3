/** The simulation, by traces that can be reckoned by hand; its traces, its picture, its command. */
import { dollarsOf } from "../costs.ts";
import { assert, assertAlmostEquals, assertEquals, assertThrows } from "@std/assert";
import { join } from "node:path";
import { random } from "../dev/chaos/faults.ts";
import { Events } from "../dev/simulation/events.ts";
import { picture } from "../dev/simulation/picture.ts";
import { quantile, reportOf } from "../dev/simulation/report.ts";
import { fixed, guide, guideCount, type Scaler, siding } from "../dev/simulation/scalers.ts";
import {
  generate,
  parseTrace,
  readHistory,
  shapes,
  type Trace,
  TraceError,
} from "../dev/simulation/trace.ts";
import { Course, simulate, type World } from "../dev/simulation/world.ts";
import { schema } from "../db.ts";
import { defaults } from "../policy.ts";
import { claim } from "../claims.ts";
import { enqueue, finish } from "../queue.ts";
import { databaseTest } from "./database.ts";

const world = (changes: Partial<World> = {}): World => ({
  ...{ seed: 1, startS: 17, drainS: 20, leaseS: 120, maxCrashes: 2, crashesPerHour: 0 },
  concurrency: 1,
  ...changes,
});
const trace = (...jobs: [number, number][]): Trace =>
  parseTrace("test", jobs.map((job) => job.join(",")).join("\n"));
/** Sets the counts in turn, one a look. */
const scripted = (lookS: number, initial: number, ...counts: number[]): Scaler => ({
  ...{ name: "scripted", lookS, initial },
  look: ({ platform }) => counts.shift() ?? platform!.configured,
});
const sum = (values: ArrayLike<number>) => Array.from(values).reduce((a, b) => a + b, 0);

Deno.test("one replica: jobs wait for those before them", async () => {
  const result = await simulate(trace([0, 10], [5, 10], [30, 5]), world(), fixed(1));
  assertEquals([...result.waitS], [0, 0, 5]);
  const { replicaS, busyS, endS, interrupted, changes } = result;
  assertEquals({ replicaS, busyS, endS, interrupted, changes }, {
    ...{ replicaS: 35, busyS: 25, endS: 35, interrupted: 0, changes: 0 },
  });
});

Deno.test("four replicas, and one with four places, run four jobs at once", async () => {
  const jobs = trace([0, 10], [0, 10], [0, 10], [0, 10], [0, 10]);
  const four = await simulate(jobs, world(), fixed(4));
  assertEquals([[...four.waitS], four.replicaS, four.busyS], [[0, 0, 0, 0, 10], 80, 50]);
  const one = await simulate(jobs, world({ concurrency: 4 }), fixed(1));
  assertEquals([[...one.waitS], one.replicaS, one.busyS], [[0, 0, 0, 0, 10], 20, 20]);
});

Deno.test("Siding's policy: the look at 30 s asks for three, which take jobs 17 s later", async () => {
  const jobs = trace([0, 100], [0, 100], [0, 100]);
  const result = await simulate(jobs, world(), siding("Siding", defaults, 30));
  assertEquals([...result.waitS], [0, 47, 47]);
  const { replicaS, busyS, endS, changes } = result;
  // One for 147 s, two that were there from 30 s on.
  assertEquals({ replicaS, busyS, endS, changes }, {
    ...{ replicaS: 147 + 2 * 117, busyS: 300, endS: 147, changes: 1 },
  });
});

Deno.test("Siding's policy: back to one at the look that ends 600 s with nothing to do", async () => {
  const jobs = { ...trace([0, 100], [0, 100], [0, 100]), forS: 1000 };
  const result = await simulate(jobs, world(), siding("Siding", defaults, 30));
  // Idle is seen first at 150 s, so two of three go at 750 s.
  assertEquals([result.replicaS, result.changes, result.endS], [1000 + 2 * 720, 2, 1000]);
});

Deno.test("a victim's job is interrupted, goes back in its place, and is not lost", async () => {
  const jobs = trace([0, 20], [0, 20], [5, 20]);
  const result = await simulate(jobs, world({ drainS: 0 }), scripted(10, 2, 1));
  // At 10 s one of two is stopped. Its job runs from 20 to 40 s, before the one that came at 5 s.
  assertEquals([...result.waitS], [0, 20, 35]);
  const { interrupted, replicaS, busyS, endS } = result;
  assertEquals({ interrupted, replicaS, busyS, endS }, {
    ...{ interrupted: 1, replicaS: 70, busyS: 70, endS: 60 },
  });
});

Deno.test("a job that ends within the drain time is not interrupted", async () => {
  const jobs = trace([0, 20], [0, 20]);
  const result = await simulate(jobs, world({ drainS: 10 }), scripted(10, 2, 1));
  assertEquals([[...result.waitS], result.interrupted, result.replicaS], [[0, 0], 0, 40]);
  const late = await simulate(jobs, world({ drainS: 9 }), scripted(10, 2, 1));
  assertEquals([[...late.waitS], late.interrupted, late.replicaS], [[0, 20], 1, 19 + 40]);
});

Deno.test("the platform picks any replica, also one that starts, which then takes no job", async () => {
  const outcomes = new Set<string>();
  for (let seed = 1; seed <= 20; seed++) {
    const scaler = scripted(10, 1, 2, 1);
    const { waitS, replicaS } = await simulate(
      trace([0, 100]),
      world({ seed, startS: 50 }),
      scaler,
    );
    outcomes.add(`wait ${waitS[0]}, ${replicaS} replica-seconds`);
  }
  // The one that starts is gone after 10 s; or the busy one at 40 s, and the other begins at 60 s.
  assertEquals([...outcomes].sort(), [
    "wait 0, 110 replica-seconds",
    "wait 60, 190 replica-seconds",
  ]);
});

Deno.test("every job is done once or given up after crashes, whatever stops and crashes", async () => {
  for (let seed = 0; seed < 30; seed++) {
    const draw = random(seed);
    const jobs = generate(shapes[seed % 3], seed, 2000, 1, 60);
    const chaotic: Scaler = {
      ...{ name: "chaotic", lookS: 40, initial: 2 },
      look: () => 1 + Math.floor(draw() * 5),
    };
    const concurrency = 1 + seed % 3;
    const settings = world({
      seed,
      crashesPerHour: seed % 2 ? 2 : 0,
      drainS: seed % 20,
      concurrency,
    });
    const result = await simulate(jobs, settings, chaotic);
    assertEquals(result.waitS.length + result.failed, 2000, `seed ${seed}`);
    assert(result.waitS.every((s) => s >= 0) && result.interrupted > 0);
    assertEquals(result.crashed > 0, seed % 2 === 1);
    assert(result.busyS <= result.replicaS * (1 + 1e-9));
    if (result.crashed === 0 && concurrency === 1) {
      assert(result.busyS >= sum(jobs.runS) * (1 - 1e-9), "all that ran was paid for");
    }
  }
});

Deno.test("a crashed replica's job goes back with its lease; the second crash fails it", async () => {
  // It crashes every few seconds of work, so a job of an hour never ends.
  const result = await simulate(trace([0, 3600]), world({ crashesPerHour: 3600 }), fixed(1));
  const { failed, crashed, waitS } = result;
  assertEquals({ failed, crashed, done: waitS.length }, { failed: 1, crashed: 2, done: 0 });
  assert(result.endS > 240 && result.endS < 400, `${result.endS}`);
});

Deno.test("the same seed gives the same numbers, another one others", async () => {
  const numbers = async (seed: number) => {
    const jobs = generate("day", seed, 3000, 2, 40);
    const { course: _, ...rest } = await simulate(
      jobs,
      world({ seed, crashesPerHour: 0.5 }),
      guide(defaults),
    );
    return JSON.stringify({ ...rest, waitS: [...rest.waitS] });
  };
  assertEquals(await numbers(5), await numbers(5));
  assert(await numbers(5) !== await numbers(6));
});

Deno.test("dollars: $20 a vCPU and $10 a GB for 30 days, by what is used", () => {
  const prices = { vcpu: 2, gb: 1.5, idleVcpu: 0.1, idleGb: 0.2 };
  const monthS = 30 * 86_400;
  assertEquals(dollarsOf(monthS, monthS, prices), 55);
  assertEquals(dollarsOf(monthS, 0, prices), 4);
  assertEquals(dollarsOf(2 * monthS, monthS / 2, prices), 27.5 + 6);
  assertAlmostEquals(dollarsOf(3600, 3600, prices), 0.0764, 0.0001); // the source's 0.08 an hour
});

Deno.test("a quantile is the smallest value that so many are not above", () => {
  const values = Float64Array.from({ length: 100 }, (_, i) => i + 1);
  assertEquals([0.5, 0.95, 0.99, 1].map((q) => quantile(values, q)), [50, 95, 99, 100]);
  assertEquals([quantile(Float64Array.of(7), 0.5), quantile(new Float64Array(), 0.5)], [7, 0]);
});

Deno.test("Railway's guide: up at once in proportion, down by one each five minutes", () => {
  const limits = { min: 1, max: 4 };
  assertEquals(guideCount(1, 3, 1, 0, limits), 3);
  assertEquals(guideCount(1, 40, 1, 0, limits), 4);
  assertEquals(guideCount(3, 30, 10, 0, limits), 3);
  assertEquals(guideCount(4, 0, 1, Infinity, limits), 3);
  assertEquals(guideCount(3, 0, 1, 299, limits), 3);
  assertEquals(guideCount(3, 0, 1, 300, limits), 2);
  assertEquals(guideCount(1, 0, 1, Infinity, limits), 1);
});

Deno.test("events come by time, then kind, then as they were added", () => {
  const draw = random(3);
  const events = new Events();
  const all: number[][] = [];
  for (let ref = 0; ref < 5000; ref++) {
    const [atS, kind] = [Math.floor(draw() * 500), Math.floor(draw() * 4)];
    all.push([atS, kind, ref]);
    events.add(atS, kind, ref, -ref);
    if (draw() < 0.3) {
      all.sort(([a, b, c], [x, y, z]) => a - x || b - y || c - z);
      assert(events.next());
      assertEquals([events.atS, events.kind, events.ref, events.token + events.ref], [
        ...all.shift()!,
        0,
      ]);
    }
  }
  all.sort(([a, b, c], [x, y, z]) => a - x || b - y || c - z);
  for (const [atS, kind, ref] of all) {
    assertEquals([events.nextS, events.next()], [atS, true]);
    assertEquals([events.atS, events.kind, events.ref], [atS, kind, ref]);
  }
  assertEquals([events.nextS, events.next()], [Infinity, false]);
});

Deno.test("a trace's file: in any order, with a heading or without", () => {
  const { arrivalS, runS, forS } = parseTrace("t.csv", "arrival_s,run_s\n1005, 2.5\r\n1000,1\n\n");
  assertEquals([[...arrivalS], [...runS], forS], [[0, 5], [1, 2.5], 5]);
});

Deno.test("a bad line of a trace is refused by its number, its value and the rule", () => {
  const wrong: [string, string][] = [
    ["1,2\nabc,3", 't.csv, line 2: arrival_s is "abc": it must be seconds, a number from 0'],
    ["1,-2", 't.csv, line 1: run_s is "-2": it must be seconds, a number from 0'],
    ["1,2\n\n3,", 't.csv, line 3: run_s is "": it must be seconds, a number from 0'],
    ["1,NaN", 'run_s is "NaN"'],
    ["1,1e999", 'run_s is "1e999"'],
    ["1,2,3", 't.csv, line 1 is "1,2,3": it must be arrival_s,run_s'],
    ["1;2", 't.csv, line 1 is "1;2": it must be arrival_s,run_s'],
    ["arrival_s,run_s\n", "t.csv has no jobs: a line each, arrival_s,run_s"],
  ];
  for (const [csv, message] of wrong) {
    assertThrows(() => parseTrace("t.csv", csv), TraceError, message);
  }
});

Deno.test("drawn traces: as many jobs as asked for, in order, within their days, of the mean run", () => {
  for (const shape of shapes) {
    const { arrivalS, runS, forS } = generate(shape, 1, 20_000, 10, 80);
    assertEquals([arrivalS.length, runS.length, forS], [20_000, 20_000, 864_000]);
    assert(arrivalS.every((s, i) => s >= (arrivalS[i - 1] ?? 0) && s <= forS), shape);
    assertAlmostEquals(sum(runS) / 20_000, 80, 2);
  }
});

Deno.test("the course is the largest of each part, also when it lasts longer than thought", () => {
  const course = new Course(399);
  course.note(0, 5, 1);
  course.note(0.5, 0, 1);
  course.note(3, 2, 2);
  course.note(700, 0, 1);
  assertEquals(course.partS, 2);
  assertEquals([...course.waiting.slice(0, 3)], [5, 2, 2]);
  assertEquals([...course.replicas.slice(0, 3)], [1, 2, 2]);
  assertEquals([course.waiting[349], course.waiting[350], course.replicas[351]], [2, 2, 0]);
});

/** That tags close in order, and that attributes and text hold no bare signs. */
function assertWellFormed(xml: string): void {
  const open: string[] = [];
  const rest = xml.replace(
    /<(\/?)([a-zA-Z]+)((?:\s+[a-zA-Z-]+(?::[a-z]+)?="[^"<&]*")*)\s*(\/?)>/g,
    (_, closing, name, _attributes, single) => {
      if (closing) assertEquals(open.pop(), name);
      else if (!single) open.push(name);
      return "";
    },
  );
  assertEquals(open, []);
  assert(!/[<>]|&(?!#\d+;)/.test(rest), rest.match(/.{0,40}([<>]|&(?!#\d+;)).{0,40}/)?.[0]);
}

Deno.test("the picture is well-formed, has a band for each policy, and is for light and dark", async () => {
  const jobs = generate("bursts", 2, 500, 1, 60);
  const { course } = await simulate(jobs, world(), siding("Siding", defaults, 30));
  const svg = picture(`<b> & "c"`, [
    { title: "Siding", note: "a < b", course },
    { title: "none", note: "", course: new Course(0) },
  ], jobs.forS);
  assertWellFormed(svg);
  assertEquals([...svg.matchAll(/class="(line|pool)"/g)].length, 4);
  assert(svg.includes("prefers-color-scheme: dark") && !/NaN|Infinity|undefined/.test(svg));
  assertWellFormed(picture("one instant", [{ title: "t", note: "n", course: new Course(0) }], 0));
});

databaseTest("the project's own history is a trace, with the waits as they were", async (sql) => {
  await enqueue(sql, [{ kind: "a" }, { kind: "a" }, { kind: "a" }]);
  const worker = crypto.randomUUID();
  const options = { worker, kinds: ["a"], most: 2, leaseS: 60, token: crypto.randomUUID() };
  for (const job of await claim(sql, { queue: "default", claim: "skip_locked" }, options)) {
    await finish(sql, worker, job, {});
  }
  await sql`
    update ${
    sql(schema)
  }.jobs set due_at = '2026-10-07T05:17:00Z'::timestamptz + id * interval '60 s',
      claimed_at = '2026-10-07T05:17:07Z'::timestamptz + id * interval '60 s',
      finished_at = '2026-10-07T05:17:27.5Z'::timestamptz + id * interval '60 s'
    where status = 'done'`;
  const { arrivalS, runS, waitS, forS } = await readHistory(sql);
  assertEquals([[...arrivalS], [...runS], [...waitS!], forS], [[0, 60], [20.5, 20.5], [7, 7], 60]);
});

async function run(...args: string[]) {
  const path = new URL("../tools/simulate.ts", import.meta.url);
  const { code, stdout, stderr } = await new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", path.href, ...args],
    env: { DATABASE_URL: "", NO_COLOR: "1" },
  }).output();
  const decoder = new TextDecoder();
  return { code, out: decoder.decode(stdout), err: decoder.decode(stderr) };
}

Deno.test("the command: a trace's file in, a table, one JSON object and a picture out", async () => {
  const folder = await Deno.makeTempDir();
  try {
    const [csv, svg] = [join(folder, "jobs.csv"), join(folder, "jobs.svg")];
    await Deno.writeTextFile(csv, "arrival_s,run_s\n0,100\n0,100\n0,100\n");
    const idle = ["--idle-vcpu", "2", "--idle-gb", "1.5"];
    const json = await run("--trace", csv, "--svg", svg, "--vary", "max=2", ...idle, "--json");
    assertEquals(json.code, 0, json.err);
    const { trace, items } = JSON.parse(json.out);
    assertEquals(trace, { name: csv, jobs: 3, for_s: 0 });
    assertEquals(items.map(({ policy }: { policy: string }) => policy), [
      "Siding",
      "Siding, max=2",
      "Railway's guide",
      "fixed 1",
      "fixed 4",
    ]);
    const waits = items.map((item: Record<string, number>) => item.wait_p99_s);
    // The guide has three from 77 s on, and stops one of two busy ones at 120 s: it begins anew at 140 s.
    assertEquals([waits, items[2].interrupted], [[47, 100, 140, 200, 0], 1]);
    assertEquals(items[0].dollars, 0.01); // 381 s of $55 a month are $0.0081
    assertWellFormed(await Deno.readTextFile(svg));

    const text = await run("--trace", csv);
    assert(/^Siding +0?.*47\.0 s +47\.0 s/m.test(text.out), text.out);
    assert(text.err.includes("Siding: 100 %"), text.err);

    await Deno.writeTextFile(csv, "0,100\n1,x\n");
    const wrong: [string[], string][] = [
      [["--trace", csv], 'line 2: run_s is "x": it must be seconds, a number from 0'],
      [["--trace", join(folder, "none.csv")], "none.csv"],
      [["--trace", csv, "--history"], "one is wanted"],
      [["--history"], "DATABASE_URL is not set"],
      [["--generate", "noise"], '--generate is "noise": it must be poisson, bursts, day'],
      [["--vary", "speed=3"], '--vary is "speed=3": it must be such as max=8,idle-s=300'],
      [["--vary", "max=0"], '--vary is "max=0"'],
      [["--start-s", "-1"], '--start-s is "-1": it must be a number from 0 to 3600'],
    ];
    for (const [args, message] of wrong) {
      const { code, err } = await run(...args);
      assertEquals(code, 2, err);
      assert(err.includes(message), err);
    }
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
});

Deno.test("a report rounds to what is shown", () => {
  const result = {
    ...{ waitS: Float64Array.of(0, 1.26), replicaS: 4000, busyS: 1000, endS: 3600, failed: 0 },
    ...{ interrupted: 1, crashed: 2, changes: 3, course: new Course(0) },
  };
  const report = reportOf("x", result, { vcpu: 2, gb: 1.5, idleVcpu: 2, idleGb: 1.5 });
  assertEquals(report, {
    ...{ policy: "x", wait_p50_s: 0, wait_p95_s: 1.3, wait_p99_s: 1.3, wait_max_s: 1.3 },
    ...{ replica_hours: 1.1, busy_hours: 0.3, dollars: 0.08, interrupted: 1, crashed: 2 },
    ...{ failed: 0, changes: 3, ended_h: 1 },
  });
});
