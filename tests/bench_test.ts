/** `deno task bench`: its usage, a tiny run of it with Siding alone, and its pictures. */
import { assert, assertEquals } from "@std/assert";
import { join } from "node:path";
import { inTurns, median, quantile, ratio } from "../dev/bench/common.ts";
import { picture, short } from "../dev/bench/svg.ts";
import { runScript } from "./processes.ts";
import { testServer } from "./database.ts";

const bench = (...args: string[]) =>
  runScript("tools/bench.ts", args, { DATABASE_URL_TEST: testServer });

/** Refuses what is no well-formed XML, as far as these pictures go: tags that nest, nothing unescaped. */
function assertWellFormed(svg: string): void {
  const open: string[] = [];
  const style = svg.replace(/<style>[^<]*<\/style>/g, "");
  for (
    const [tag, close, name, attributes, empty] of style.matchAll(/<(\/?)([\w-]+)([^<>]*?)(\/?)>/g)
  ) {
    assert(/^(\s[\w-:]+="[^"<&]*(&#\d+;[^"<&]*)*")*$/.test(attributes), tag);
    if (close) assertEquals(open.pop(), name);
    else if (!empty) open.push(name);
  }
  assertEquals(open, []);
  assert(!/&(?!#\d+;)/.test(style));
  assert(!/<(?!\/?[\w-]+[^<>]*>)/.test(style));
}

Deno.test("bench refuses what it cannot measure, and lists what it can", async () => {
  const wrong: [string[], string][] = [
    [[], "what is to be measured is not said: there are drain, enqueue, latency, peers"],
    [["speed"], '"speed" cannot be measured: there are drain, enqueue'],
    [["drain", "enqueue"], '"drain enqueue" cannot be measured'],
    [["drain", "--jobs", "0"], '--jobs is "0": it must be a whole number from 1'],
    [["drain", "--processes", "1,0"], '--processes is "1,0": it must be counts'],
    [["drain", "--contenders", "siding,sidekiq"], "it must be of siding,graphile-worker,pg-boss"],
    [["enqueue", "--processes", "2"], "there is no flag --processes"],
    [["all", "--svg"], "--svg wants a value"],
  ];
  await Promise.all(wrong.map(async ([args, message]) => {
    const { code, stderr } = await bench(...args);
    assertEquals(code, 2, stderr);
    assert(stderr.includes(message), stderr);
  }));
});

Deno.test("a tiny drain of Siding alone: figures, a picture, and every job done", async () => {
  const folder = await Deno.makeTempDir();
  try {
    const svg = join(folder, "drain.svg");
    const { code, stdout, stderr } = await bench(
      ...["drain", "--jobs", "40", "--processes", "1,2", "--contenders", "siding", "--rounds", "2"],
      ...["--json", "--svg", svg],
    );
    assertEquals(code, 0, stderr);
    assertEquals(stderr.split("\n").length, 2, "its settings; progress is for terminals");
    const { machine, jobs, how, left_out, items } = JSON.parse(stdout);
    assertEquals([jobs, how, left_out, machine.deno], [40, "best", null, Deno.version.deno]);
    assertEquals(machine.settings.synchronous_commit, "on");
    assertEquals(items.map((it: { processes: number }) => it.processes), [1, 2]);
    for (const { jobs_per_s, rounds, siding_ratio } of items) {
      assertEquals([rounds.length, siding_ratio], [2, null]);
      assert(jobs_per_s > 0.1 && jobs_per_s < 1e6, stdout);
    }
    assertWellFormed(await Deno.readTextFile(svg));
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
});

Deno.test("a picture of bars and lines is well-formed, whatever the names and the values", () => {
  const svg = picture('a < b & "c"', "note", [
    {
      ...{ kind: "bars", title: "<bars>", unit: "jobs & more" },
      groups: [
        { label: "1", bars: [{ series: "a", value: 3 }, { series: "b", value: null }] },
        { label: "2", bars: [{ series: "a", value: 0 }, { series: "b", value: 40_000 }] },
      ],
    },
    { kind: "bars", title: "none", unit: "", log: true, groups: [] },
    {
      ...{ kind: "lines", title: "lines", x: { label: "n", log: true }, y: { label: "ms" } },
      series: [{ name: "a", points: [[10, 1], [1e6, 3]] }, { name: "<b>", points: [] }],
    },
  ]);
  assertWellFormed(svg);
  assert(!svg.includes("NaN") && !svg.includes("Infinity"), svg);
  assert(svg.includes("40k") && svg.includes("not measured"), svg);
  assertEquals([0, 12.345, 9994, 9996, 1.25e6].map(short), ["0", "12.3", "9990", "10k", "1.25M"]);
});

Deno.test("contenders take turns, a round begun by the next; medians, quantiles and ratios", async () => {
  const order: string[] = [];
  const turn = (name: string) => () => Promise.resolve(order.push(name));
  const turns = { a: turn("a"), b: turn("b"), c: turn("c") };
  const measured = await inTurns(turns, 3, new AbortController().signal, () => {});
  assertEquals(order.join(""), "abcbcacab");
  assertEquals(measured, { a: [1, 6, 8], b: [2, 4, 9], c: [3, 5, 7] });
  assertEquals([median([9, 1, 5]), median([4, 1, 2, 3])], [5, 2.5]);
  assertEquals([quantile([4, 1, 3, 2], 0.5), quantile([1, 2], 0.99)], [2, 2]);
  assertEquals([ratio(3, 2), ratio(1, 0), ratio(undefined, 1)], [1.5, null, null]);
});
