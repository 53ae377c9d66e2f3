/**
 * How soon an idle worker picks up a job, against what its waiting costs Postgres.
 *
 * All contenders wait at once, each a worker in a process of its own on a database of its own, with a
 * few jobs a second among all of them: so the machine is as good as idle throughout. A job's pickup
 * goes from when its enqueue returned, so it was committed, to when the worker ran it, by one clock.
 * The cost is the CPU time of the server's processes that are connected to the contender's database,
 * over a time in which nothing is enqueued.
 */
import * as config from "../../config.ts";
import { pause } from "../../db.ts";
import {
  aligned,
  type BenchServer,
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
import type { How } from "./contender.ts";
import { type Child, child, contenders, type Rival, rivals, siding } from "./contenders.ts";
import { template, worker } from "./contenders.ts";
import { type Bars, picture } from "./svg.ts";

export interface Settings extends Common {
  samples: number;
  longIdle: number;
  idleS: number;
  contenders: string[];
}

interface Pickup {
  p50_ms: number;
  p99_ms: number;
  samples: number;
}

export interface Result {
  contender: string;
  settings: string;
  /** Of jobs that arrive within `recent_s` of the last one, and after a rest of `rest_s`. */
  recent: Pickup;
  rested: Pickup;
  /** Postgres's CPU while idle, in per cent of a core; null without /proc. */
  idle_cpu_percent: number | null;
  /** How many times as long as Siding's with its default settings the pickup p50 is. */
  siding_ratio: number | null;
}

export interface Report {
  machine: Machine;
  recent_s: number;
  rest_s: number;
  idle_s: number;
  left_out: string | null;
  items: Result[];
}

const flags = {
  samples: config.flag(config.int(60, 1, 10_000, "jobs that come soon after the last one")),
  longIdle: config.flag(config.int(10, 1, 1000, "jobs that come after a rest")),
  idleS: config.flag(config.int(30, 1, 3600, "idle for so long, to see what that costs")),
  contenders,
};

/** Polls of Siding's worker that are tried: the first is its default. */
const POLLS: string[][] = [
  [],
  ...("pollMinMs" in config.settings
    ? [["--poll-min-ms", "5", "--poll-max-ms", "500"], ["--poll-min-ms", "50"]]
    : []),
  ["--poll-max-ms", "500"],
  ["--poll-max-ms", "100"],
];

/** A worker that waits, and what sends it jobs. */
interface Waiting {
  name: string;
  settings: string;
  database: string;
  worker: Child;
  sender: Child;
}

export async function benchLatency(
  settings: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  await using server = await benchServer();
  return await latencyOn(server, settings, signal, say);
}

/** {@linkcode benchLatency} on a server that is there. */
export async function latencyOn(
  server: BenchServer,
  settings: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  const { all, leftOut } = await rivals(settings.contenders, say);
  const quick = { samples: 12, longIdle: 2, idleS: 4, recentS: 1, restS: 5 };
  const plan = settings.quick ? quick : { ...settings, recentS: 5, restS: 15 };
  const polls = settings.quick ? [POLLS[0], POLLS[POLLS.length - 1]] : POLLS;
  await using stack = new AsyncDisposableStack();
  const waiting: Waiting[] = [];
  for (const rival of all) {
    const ways: [How, string[] | undefined][] = rival === siding
      ? polls.map((flags) => ["default", [...siding.worker!.default, ...flags]])
      : settings.quick
      ? [["best", undefined]]
      : [["default", undefined], ["best", undefined]];
    for (const [how, flags] of ways) {
      signal.throwIfAborted();
      say(`starting ${rival.name}`);
      waiting.push(await begin(stack, server, rival, how, flags));
    }
  }
  say(`idle for ${plan.idleS} s`);
  await pause(plan.restS * 1000, signal);
  const idle = await idleCost(server, waiting, plan.idleS, signal);
  const recent = await pickups(
    waiting,
    plan.samples,
    signal,
    say,
    "soon after the last",
    () => Math.random() * plan.recentS * 1000,
  );
  const rested = await pickups(
    waiting,
    plan.longIdle,
    signal,
    say,
    "after a rest",
    () => (1 + Math.random() * 0.2) * plan.restS * 1000,
  );
  const own = waiting.findIndex(({ name }) => name === siding.name);
  return {
    ...{ machine: server.machine, recent_s: plan.recentS, rest_s: plan.restS, idle_s: plan.idleS },
    left_out: leftOut,
    items: waiting.map(({ name, settings }, i) => ({
      ...{ contender: name, settings, recent: recent[i], rested: rested[i] },
      idle_cpu_percent: idle[i],
      siding_ratio: name === siding.name || own < 0
        ? null
        : ratio(recent[i].p50_ms, recent[own].p50_ms),
    })),
  };
}

async function begin(
  stack: AsyncDisposableStack,
  server: BenchServer,
  rival: Rival,
  how: How,
  flags: string[] | undefined,
): Promise<Waiting> {
  const database = stack.use(await template(server, rival, how, 0));
  const it = stack.use(await worker(rival, database.url, how, flags));
  if (!rival.worker) await it.tell("start");
  const sender = stack.use(child(rival, "send", { url: database.url }));
  await sender.heard();
  await database.close();
  return {
    ...{ name: rival.name, database: database.name, worker: it, sender },
    settings: flags ? `worker.ts ${flags.join(" ")}` : rival.settings[how],
  };
}

/** Has each get so many jobs, one after the other with pauses between, all contenders at once. */
async function pickups(
  waiting: Waiting[],
  samples: number,
  signal: AbortSignal,
  say: Say,
  what: string,
  pauseMs: () => number,
): Promise<Pickup[]> {
  let done = 0;
  return await Promise.all(waiting.map(async ({ sender, worker }) => {
    const took: number[] = [];
    for (let n = -1; n < samples; n++) { // the first comes after whatever was before
      await pause(pauseMs(), signal);
      signal.throwIfAborted();
      await sender.tell("one");
      const [{ sent }, { ran }] = await Promise.all([sender.heard(), worker.heard()]);
      // A worker that is woken by the commit itself may be there before the reply is.
      if (n >= 0) took.push(Math.max(0, ran - sent));
      say(`jobs ${what}: ${++done} of ${(samples + 1) * waiting.length}`);
    }
    return {
      p50_ms: round(quantile(took, 0.5), 1),
      p99_ms: round(quantile(took, 0.99), 1),
      samples,
    };
  }));
}

/** @returns per cent of a core, of each contender's connections */
async function idleCost(
  server: BenchServer,
  waiting: Waiting[],
  idleS: number,
  signal: AbortSignal,
): Promise<(number | null)[]> {
  const startedMs = performance.now();
  const first = await server.backendsCpuS();
  let last = first;
  // Again and again, since a connection that ends takes its figure along.
  while (performance.now() - startedMs < idleS * 1000) {
    await pause(1000, signal);
    signal.throwIfAborted();
    last = { ...last, ...await server.backendsCpuS() };
  }
  const tookS = (performance.now() - startedMs) / 1000;
  return waiting.map(({ database }) => {
    const of = Object.entries(last).filter(([key]) => key.startsWith(`${database} `));
    if (of.length === 0) return null;
    const usedS = of.reduce((sum, [key, s]) => sum + s - (first[key] ?? 0), 0);
    return round(usedS / tookS * 100, 3);
  });
}

function textOf({ machine, recent_s, rest_s, idle_s, left_out, items }: Report): string {
  const ms = (value: number) => value.toFixed(1);
  const rows = items.map((it) => [
    ...[it.contender, ms(it.recent.p50_ms), ms(it.recent.p99_ms), ms(it.rested.p50_ms)],
    ...[ms(it.rested.p99_ms), it.idle_cpu_percent === null ? "?" : `${it.idle_cpu_percent} %`],
    it.settings,
  ]);
  const head = ["", "p50", "p99", "rested p50", "p99", "idle CPU", "settings"];
  return [
    machineText(machine),
    `milliseconds from commit to run, of ${
      items[0].recent.samples
    } jobs within ${recent_s} s of the ` +
    `last, and of ${
      items[0].rested.samples
    } after ${rest_s} s; Postgres's CPU of a core, idle for ${idle_s} s`,
    "",
    ...aligned([head, ...rows], [0, 6]),
    ...(left_out ? ["", left_out] : []),
  ].join("\n");
}

export function barsOf({ items, recent_s }: Report): Bars[] {
  const label = (it: Result, at: number) => `${it.contender} ${at + 1}`;
  const bars = (
    title: string,
    unit: string,
    of: (it: Result) => [string, number | null][],
  ): Bars => ({
    ...{ kind: "bars", title, unit, log: true },
    groups: items.map((it, at) => ({
      label: label(it, at),
      bars: of(it).map(([series, value]) => ({ series, value })),
    })),
  });
  return [
    bars(`Pickup within ${recent_s} s of the last job`, "ms", ({ recent }) => [
      ["p50", Math.max(0.1, recent.p50_ms)],
      ["p99", Math.max(0.1, recent.p99_ms)],
    ]),
    bars("Postgres while idle", "per cent of a core", (it) => [["CPU", it.idle_cpu_percent]]),
  ];
}

const svgOf = (report: Report) =>
  picture("Pickup by an idle worker", machineText(report.machine).split("\n")[0], barsOf(report));

export const latency: Measurement<Settings, Report> = {
  summary: "how soon an idle worker picks up a job, and what its waiting costs",
  flags,
  run: benchLatency,
  text: textOf,
  svg: svgOf,
};
