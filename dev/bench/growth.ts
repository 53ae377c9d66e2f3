/** Whether a claim takes as long among few jobs as among many, whatever the others are. */
import * as config from "../../config.ts";
import { type Pool, schema } from "../../db.ts";
import { finishAll, makeQueue, putJobs, take } from "./claimers.ts";
import {
  aligned,
  benchServer,
  type Common,
  type Machine,
  machineText,
  type Measurement,
  quantile,
  ratio,
  round,
  type Say,
} from "./common.ts";
import { picture, short } from "./svg.ts";

interface Settings extends Common {
  finished: number;
  unfinished: number;
  claims: number;
}

interface Point {
  /** Jobs of the series that are there. */
  jobs: number;
  /** Of a claim of {@linkcode BATCH} jobs, and of the settling of them. */
  p50_ms: number;
  p99_ms: number;
  settle_p50_ms: number;
}

interface Report {
  machine: Machine;
  claims: number;
  series: { name: string; points: Point[]; largest_to_smallest: number | null }[];
}

const BATCH = 10;
/** Jobs in line where their number is not what is measured. */
const LINE = 10_000;
const TARGET = 1.3;

/** What grows: how it is made more, from one number of jobs to the next. */
interface Series {
  name: string;
  sizes: number[];
  add: (sql: Pool, from: number, to: number) => Promise<void>;
  /** The statistics are made before it grows, and never after. */
  stale?: "never analyzed" | "analyzed while empty";
}

async function benchGrowth(
  { quick, finished, unfinished, claims }: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  const upTo = (most: number) =>
    [10_000, 100_000, 1_000_000, 10_000_000].filter((n) => n <= (quick ? 100_000 : most));
  const [done, more] = [upTo(finished), upTo(unfinished)];
  const ended = (sql: Pool, from: number, to: number) => putJobs(sql, to - from, "done");
  const all: Series[] = [
    { name: "finished", sizes: done, add: ended },
    { name: "in line", sizes: more, add: (sql, from, to) => putJobs(sql, to - from) },
    {
      name: "due later",
      sizes: more,
      add: (sql, from, to) => putJobs(sql, to - from, "scheduled"),
    },
    {
      name: "in line, of so many owners",
      sizes: [1, 100, 10_000],
      add: async (sql, _, owners) => {
        await sql`truncate ${sql(schema)}.jobs`;
        await putJobs(sql, quick ? 20_000 : 100_000, "queued", owners);
      },
    },
    { name: "finished, never analyzed", sizes: done, add: ended, stale: "never analyzed" },
    {
      name: "finished, analyzed while empty",
      sizes: done,
      add: ended,
      stale: "analyzed while empty",
    },
  ];
  await using server = await benchServer({ autovacuum: "off" });
  const report: Report = {
    ...{ machine: server.machine, claims: quick ? Math.min(claims, 100) : claims, series: [] },
  };
  for (const series of all) {
    await using database = await server.database();
    const points = await grow(database.sql, series, report.claims, signal, say);
    const p50s = points.map(({ p50_ms }) => p50_ms);
    const largest_to_smallest = ratio(p50s[p50s.length - 1], p50s[0]);
    report.series.push({ name: series.name, points, largest_to_smallest });
  }
  return report;
}

async function grow(
  sql: Pool,
  { name, sizes, add, stale }: Series,
  claims: number,
  signal: AbortSignal,
  say: Say,
): Promise<Point[]> {
  await makeQueue(sql, "skip_locked");
  if (stale === "analyzed while empty") await sql`vacuum analyze ${sql(schema)}.jobs`;
  const points: Point[] = [];
  let there = 0;
  for (const jobs of sizes) {
    signal.throwIfAborted();
    say(`${short(jobs)} ${name}`);
    await add(sql, there, jobs);
    await putJobs(sql, LINE);
    if (!stale) await sql`vacuum analyze ${sql(schema)}.jobs`;
    await sql`checkpoint`;
    points.push({ jobs, ...await timeClaims(sql, claims) });
    there = jobs;
  }
  return points;
}

async function timeClaims(sql: Pool, claims: number): Promise<Omit<Point, "jobs">> {
  const worker = crypto.randomUUID();
  const takes = take("skip_locked");
  const [claimed, settled]: number[][] = [[], []];
  for (let n = -10; n < claims; n++) { // the first few are to warm up
    const startedMs = performance.now();
    const { jobs } = await takes(sql, worker, BATCH);
    const betweenMs = performance.now();
    if (jobs.length < BATCH) throw new Error(`a claim got ${jobs.length} of ${BATCH} jobs`);
    await finishAll(sql, worker, jobs);
    if (n >= 0) {
      claimed.push(betweenMs - startedMs);
      settled.push(performance.now() - betweenMs);
    }
  }
  const ms = (values: number[], share: number) => round(quantile(values, share), 2);
  return {
    ...{ p50_ms: ms(claimed, 0.5), p99_ms: ms(claimed, 0.99) },
    settle_p50_ms: ms(settled, 0.5),
  };
}

function textOf({ machine, claims, series }: Report): string {
  const rows = series.flatMap(({ name, points, largest_to_smallest }) =>
    points.map(({ jobs, p50_ms, p99_ms, settle_p50_ms }, index) => [
      index === 0 ? name : "",
      ...[short(jobs), String(p50_ms), String(p99_ms), String(settle_p50_ms)],
      index < points.length - 1 ? "" : `${largest_to_smallest ?? "-"}`,
    ])
  );
  const over = series.filter(({ largest_to_smallest: times }) => times !== null && times > TARGET);
  return [
    machineText(machine),
    `claims of ${BATCH} jobs, each settled before the next; ${claims} of them at each size`,
    "",
    ...aligned([
      ["jobs", "there", "p50 ms", "p99 ms", "settle p50", "largest : smallest"],
      ...rows,
    ]),
    "",
    over.length === 0
      ? `no claim takes more than ${TARGET} times as long among the most as among the fewest`
      : `more than ${TARGET} times as long: ${over.map(({ name }) => name).join("; ")}`,
  ].join("\n");
}

const svgOf = ({ machine, series }: Report) =>
  picture(
    "A claim of ten jobs, among few and among many",
    machineText(machine).split("\n")[0],
    (["p50_ms", "p99_ms"] as const).map((which) => ({
      kind: "lines" as const,
      title: `${which === "p50_ms" ? "Half of the claims take" : "99 of 100 claims take"} at most`,
      x: { label: "jobs that are there", log: true },
      y: { label: "ms" },
      series: series.map(({ name, points }) => ({
        name,
        points: points.map((point): [number, number] => [point.jobs, point[which]]),
      })),
    })),
  );

export const growth: Measurement<Settings, Report> = {
  summary: "how long a claim takes among few jobs and among many",
  flags: {
    finished: config.flag(config.int(1_000_000, 10_000, 10_000_000, "finished jobs at the most")),
    unfinished: config.flag(config.int(1_000_000, 10_000, 1_000_000, "others at the most")),
    claims: config.flag(config.int(300, 10, 100_000, "claims timed at each size")),
  },
  ...{ run: benchGrowth, text: textOf, svg: svgOf },
};
