/**
 * How fast no-op jobs are enqueued by one process: many at once, one at a time by several callers, and
 * one at a time inside a transaction in which its caller inserts a row too.
 */
import * as config from "../../config.ts";
import {
  aligned,
  type BenchServer,
  benchServer,
  type Common,
  inTurns,
  type Machine,
  machineText,
  type Measurement,
  median,
  quantile,
  ratio,
  round,
  type Say,
} from "./common.ts";
import type { Calls } from "./contender.ts";
import { child, contenders, rivals, siding, template } from "./contenders.ts";
import { type Bars, picture } from "./svg.ts";

export interface Settings extends Common {
  jobs: number;
  calls: number;
  callers: number;
  rounds: number;
  contenders: string[];
}

/** The ways of enqueuing, as they are shown. */
export const WAYS = {
  bulk: "in bulk",
  single: "one at a time",
  transaction: "in a transaction",
} as const;
export type Way = keyof typeof WAYS;

export interface Result {
  contender: string;
  way: Way;
  jobs_per_s: number;
  /** Jobs a second of each round. */
  rounds: number[];
  /** Of a call of one job. */
  p50_ms: number | null;
  p99_ms: number | null;
  /** How many times as fast Siding is. */
  siding_ratio: number | null;
}

export interface Report {
  machine: Machine;
  jobs: number;
  calls: number;
  callers: number;
  left_out: string | null;
  items: Result[];
}

const flags = {
  jobs: config.flag(config.int(100_000, 1, 1_000_000, "jobs enqueued in bulk")),
  calls: config.flag(config.int(5000, 1, 1_000_000, "jobs enqueued one at a time")),
  callers: config.flag(config.int(10, 1, 1000, "callers of one process that do so at once")),
  rounds: config.flag(config.int(5, 1, 100, "times each; the figures are the medians")),
  contenders,
};

export async function benchEnqueue(
  settings: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  await using server = await benchServer();
  return await enqueueOn(server, settings, signal, say);
}

/** {@linkcode benchEnqueue} on a server that is there. */
export async function enqueueOn(
  server: BenchServer,
  settings: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  const { all, leftOut } = await rivals(settings.contenders, say);
  const { callers, quick } = settings;
  const [jobs, calls] = quick ? [10_000, 1000] : [settings.jobs, settings.calls];
  await using sources = new AsyncDisposableStack();
  const turns: Record<string, () => Promise<Record<Way, Calls>>> = {};
  for (const rival of all) {
    const source = sources.use(await template(server, rival, "best", 0));
    turns[rival.name] = async () => {
      await using database = await server.database({ copyOf: source });
      await using it = child(rival, "enqueue", { url: database.url, callers });
      const run = async (way: Way, count: number): Promise<Calls> => {
        await it.tell(`${way} ${count}`);
        return await it.heard();
      };
      return {
        bulk: await run("bulk", jobs),
        single: await run("single", calls),
        transaction: await run("transaction", calls),
      };
    };
  }
  const measured = await inTurns(turns, quick ? 1 : settings.rounds, signal, say);
  return {
    ...{ machine: server.machine, jobs, calls, callers, left_out: leftOut },
    items: itemsOf(measured, { bulk: jobs, single: calls, transaction: calls }),
  };
}

function itemsOf(
  measured: Record<string, Record<Way, Calls>[]>,
  counts: Record<Way, number>,
): Result[] {
  return (Object.keys(WAYS) as Way[]).flatMap((way) => {
    const ratesOf = (name: string) => measured[name].map((it) => counts[way] / it[way].ms * 1000);
    const own = measured[siding.name] && median(ratesOf(siding.name));
    return Object.entries(measured).map(([name, runs]) => {
      const latencies = runs.flatMap((it) => it[way].latencies_ms);
      const ms = (share: number) => way === "bulk" ? null : round(quantile(latencies, share), 2);
      return {
        ...{ contender: name, way, jobs_per_s: Math.round(median(ratesOf(name))) },
        ...{ rounds: ratesOf(name).map(Math.round), p50_ms: ms(0.5), p99_ms: ms(0.99) },
        siding_ratio: name === siding.name ? null : ratio(own, median(ratesOf(name))),
      };
    });
  });
}

function textOf({ machine, jobs, calls, callers, left_out, items }: Report): string {
  const ms = (value: number | null) => value === null ? "" : `${value.toFixed(2)} ms`;
  const rows = items.map((it) => [
    ...[it.contender, WAYS[it.way], String(it.jobs_per_s), ms(it.p50_ms), ms(it.p99_ms)],
    it.siding_ratio === null ? "" : `${it.siding_ratio} ×`,
  ]);
  return [
    machineText(machine),
    `${jobs} jobs in bulk, ${calls} by ${callers} callers; medians of ${items[0].rounds.length}`,
    "",
    ...aligned([["", "", "jobs/s", "p50", "p99", "Siding is"], ...rows], [0, 1]),
    ...(left_out ? ["", left_out] : []),
  ].join("\n");
}

/** As a chart: a group for each way. */
export function barsOf({ items, callers }: Report): Bars {
  return {
    ...{ kind: "bars", title: `Enqueued, singly by ${callers} callers`, unit: "jobs a second" },
    log: true,
    groups: [...Map.groupBy(items, ({ way }) => way)].map(([way, items]) => ({
      label: WAYS[way],
      bars: items.map((it) => ({ series: it.contender, value: it.jobs_per_s })),
    })),
  };
}

const svgOf = (report: Report) =>
  picture("Enqueuing", machineText(report.machine).split("\n")[0], [barsOf(report)]);

export const enqueue: Measurement<Settings, Report> = {
  summary: "how fast jobs are enqueued, beside graphile-worker, pg-boss and DBOS",
  flags,
  run: benchEnqueue,
  text: textOf,
  svg: svgOf,
};
