/** Siding beside its peers in one table: drain, enqueue, defaults and pickup, and what is aimed at. */
import * as config from "../../config.ts";
import {
  aligned,
  benchServer,
  type Common,
  type Machine,
  machineText,
  type Measurement,
  ratio,
  type Say,
} from "./common.ts";
import { contenders, siding } from "./contenders.ts";
import * as drain from "./drain.ts";
import * as enqueue from "./enqueue.ts";
import * as latency from "./latency.ts";
import { type Claims, pgbenchOn } from "./pgbench.ts";
import { picture } from "./svg.ts";

export interface Settings extends Common {
  jobs: number;
  rounds: number;
  contenders: string[];
}

/** A line of the table: what every contender reaches. */
export interface Line {
  what: string;
  unit: "jobs/s" | "ms";
  values: Record<string, number>;
  /** Siding to the fastest peer that counts: how many times as fast. */
  ratio: number | null;
  /** The ratio that is aimed at, and whose. */
  target: number | null;
  against: string;
}

export interface Report {
  machine: Machine;
  left_out: string | null;
  items: Line[];
  /** What pgbench reaches with the same statements, if it is there. */
  pgbench: Claims | null;
  drain: drain.Report;
  defaults: drain.Report;
  enqueue: enqueue.Report;
  latency: latency.Report;
}

const FASTEST = "the fastest peer";
const MANY_JOBS = ["graphile-worker", "pg-boss"];

const flags = {
  jobs: config.flag(config.int(20_000, 100, 1_000_000, "jobs that are drained")),
  rounds: config.flag(config.int(5, 1, 100, "times each; the figures are the medians")),
  contenders,
};

export async function benchPeers(
  settings: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  await using server = await benchServer();
  const { quick, rounds, contenders } = settings;
  const { jobs } = settings;
  const common = { quick, rounds, contenders, jobs };
  const told = (part: string): Say => (line) => say(`${part}: ${line}`);
  const best = await drain.drainOn(
    server,
    { ...common, warmUp: jobs, processes: "1,4", default: false },
    signal,
    told("drain"),
  );
  const defaults = await drain.drainOn(
    server,
    // Some take a second for 500 by their defaults.
    {
      ...{ ...common, jobs: Math.min(jobs, quick ? 500 : 5000), warmUp: quick ? 500 : 5000 },
      ...{ processes: "1", default: true },
    },
    signal,
    told("defaults"),
  );
  const enqueued = await enqueue.enqueueOn(
    server,
    { ...common, jobs: 100_000, calls: 5000, callers: 10 },
    signal,
    told("enqueue"),
  );
  const waited = await latency.latencyOn(
    server,
    { quick, contenders, samples: 60, longIdle: 10, idleS: 30 },
    signal,
    told("latency"),
  );
  const pgbench = contenders.includes("siding")
    ? await pgbenchOn(server, best.jobs, told("pgbench"))
    : null;
  return {
    ...{ machine: server.machine, left_out: best.left_out, pgbench },
    items: tableOf(best, defaults, enqueued, waited),
    ...{ drain: best, defaults, enqueue: enqueued, latency: waited },
  };
}

function tableOf(
  best: drain.Report,
  defaults: drain.Report,
  enqueued: enqueue.Report,
  waited: latency.Report,
): Line[] {
  const rates = (items: { contender: string; jobs_per_s: number }[]) =>
    Object.fromEntries(items.map((it) => [it.contender, it.jobs_per_s]));
  const by = (processes: number) => rates(best.items.filter((it) => it.processes === processes));
  const way = (name: enqueue.Way) => rates(enqueued.items.filter((it) => it.way === name));
  return [
    lineOf("drain, 1 process", by(1), 2, MANY_JOBS),
    lineOf("drain, 4 processes", by(4), 2, MANY_JOBS),
    lineOf("drain, default settings", rates(defaults.items), 5, ["graphile-worker"]),
    lineOf("enqueue in bulk", way("bulk"), 2),
    lineOf("enqueue, 10 callers", way("single"), 7),
    lineOf("enqueue in a transaction", way("transaction"), 2.5),
    pickupLine(waited.items),
  ];
}

function lineOf(
  what: string,
  values: Record<string, number>,
  target: number,
  against: string[] = [],
): Line {
  const rivals = Object.entries(values).filter(([name]) =>
    name !== siding.name && (against.length === 0 || against.includes(name))
  );
  return {
    ...{ what, unit: "jobs/s", values, target, against: against.join(" and ") || FASTEST },
    ratio: ratio(values[siding.name], Math.max(0, ...rivals.map(([, value]) => value))),
  };
}

/** Of each contender the settings that pick up soonest; of Siding the default ones. */
function pickupLine(items: latency.Result[]): Line {
  const values: Record<string, number> = {};
  for (const { contender, recent: { p50_ms } } of items) {
    if (contender === siding.name && contender in values) continue;
    values[contender] = Math.min(values[contender] ?? Infinity, p50_ms);
  }
  const rivals = Object.entries(values).filter(([name]) => name !== siding.name);
  return {
    ...{ what: "pickup, p50", unit: "ms", values, target: null, against: FASTEST },
    ratio: rivals.length === 0
      ? null
      : ratio(Math.min(...rivals.map(([, ms]) => ms)), values[siding.name]),
  };
}

function textOf(report: Report): string {
  const { machine, left_out, items, pgbench } = report;
  const names = Object.keys(items[0].values);
  const rows = items.map((it) => [
    it.what,
    ...names.map((name) => it.values[name] === undefined ? "" : String(it.values[name])),
    ...[it.unit, it.ratio === null ? "" : `${it.ratio} ×`],
    it.target === null ? "" : `${it.target} × ${it.against}`,
  ]);
  const settings = report.drain.items.filter(({ processes }) => processes === 1)
    .map((it) => [it.contender, it.settings]);
  const claims = pgbench && [
    "",
    `pgbench with the same statements, ${pgbench.clients} clients: ${pgbench.jobs_per_s} jobs/s; ` +
    `Siding with one process reaches ${
      Math.round(100 * items[0].values[siding.name] / pgbench.jobs_per_s)
    } %, aimed at 80 %`,
  ];
  return [
    machineText(machine),
    `${report.drain.jobs} jobs drained, ${report.defaults.jobs} by default settings; ` +
    `${report.enqueue.jobs} enqueued in bulk; medians of ${report.drain.items[0].rounds.length}`,
    "",
    ...aligned([["", ...names, "", "Siding is", "aimed at"], ...rows], [0, names.length + 1]),
    "",
    ...aligned([["best settings", ""], ...settings], [0, 1]),
    ...(claims ?? ["", "pgbench is not installed: nothing to compare the statements with"]),
    ...(left_out ? ["", left_out] : []),
  ].join("\n");
}

const svgOf = (report: Report) =>
  picture("Siding beside its peers", machineText(report.machine).split("\n")[0], [
    drain.barsOf(report.drain),
    drain.barsOf(report.defaults),
    enqueue.barsOf(report.enqueue),
    latency.barsOf(report.latency)[0],
  ]);

export const peers: Measurement<Settings, Report> = {
  summary: "all of these in one table, with what is aimed at",
  flags,
  run: benchPeers,
  text: textOf,
  svg: svgOf,
};
