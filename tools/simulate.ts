#!/usr/bin/env -S deno run -A
/**
 * Tries scaling policies on a trace of jobs: what each makes of the wait in line, and what it costs.
 * Siding's own policy is the controller's very decide().
 *
 *     deno task simulate                                   # a drawn month of a million jobs
 *     deno task simulate --trace jobs.csv --svg jobs.svg   # arrival_s,run_s a line
 *     deno task simulate --history                         # the jobs of DATABASE_URL
 *     deno task simulate --generate bursts --jobs 5000 --run-mean-s 80 --vary max=8 --vary idle-s=120
 *
 * Reads: the trace's file, or finished jobs. Writes: the picture of --svg. The same trace, settings
 * and seed give the same numbers.
 *
 * Exit codes: 0 done, also when it was stopped by a signal; 1 failure; 2 usage, also when the trace is
 * no good; 3 the database could not be reached.
 */
import * as config from "../config.ts";
import { type Prices, usage } from "../costs.ts";
import { Database } from "../db.ts";
import { picture } from "../dev/simulation/picture.ts";
import { type Report, reportOf, table } from "../dev/simulation/report.ts";
import { fixed, guide, type Scaler, siding } from "../dev/simulation/scalers.ts";
import {
  generate,
  parseTrace,
  readHistory,
  type Shape,
  shapes,
  type Trace,
  TraceError,
} from "../dev/simulation/trace.ts";
import { type Result, simulate, type World } from "../dev/simulation/world.ts";
import { defaults, type Policy } from "../policy.ts";

const program = {
  name: "simulate",
  summary: "Tries scaling policies on a trace of jobs: waits, replica-hours, dollars.",
  example: "deno task simulate --generate bursts --jobs 5000 --run-mean-s 80 --svg bursts.svg",
  exits: { 0: "done, also when a signal stopped it", 2: "usage, also a trace that is no good" },
};

const { databaseUrl, prepare, statementLimitMs } = config.settings;
const { decimal, flag, int } = config;
const spec = {
  databaseUrl,
  prepare,
  statementLimitMs,
  trace: flag(config.text("a file of jobs, arrival_s,run_s a line")),
  history: flag(config.yes("the jobs that DATABASE_URL has done")),
  generate: flag({
    parse: (text) => {
      if (!shapes.includes(text as Shape)) throw new RangeError(text);
      return text;
    },
    rule: `it must be ${shapes.join(", ")}`,
    fallback: undefined,
    help: `draw a trace: ${shapes.join(", ")}; day if no trace is named`,
  } as config.Setting<Shape | undefined>),
  jobs: flag(int(1_000_000, 1, 10_000_000, "how many jobs are drawn")),
  days: flag(int(30, 1, 366, "in how many days")),
  runMeanS: flag(decimal(3, 100_000, "how long a drawn job runs on average")),
  seed: flag(int(1, 0, 2 ** 32 - 1, "what draws the trace, the victims and the crashes")),
  max: flag(int(defaults.max, 1, 1000, "the most replicas, of all policies that scale")),
  concurrency: flag({ ...config.settings.concurrency, help: "jobs at a time of a replica" }),
  lookS: flag(int(30, 1, 3600, "how often the controller looks")),
  startS: flag(decimal(17, 3600, "how long a replica takes to start")),
  drainS: flag({ ...config.settings.drainS, help: "how long a stopped replica's jobs go on" }),
  leaseS: flag({ ...config.settings.leaseS, help: "until a crashed replica's jobs go back" }),
  crashesPerHour: flag(decimal(0, 3600, "how often a replica that works crashes")),
  ...usage,
  vary: config.many("Siding's policy once more, with settings such as max=8,idle-s=300"),
  svg: flag(config.text("the file for a picture of the line and the replicas")),
  json: flag(config.yes("print one JSON object instead of text")),
};
type Settings = ReturnType<typeof config.configuration<typeof spec>>;

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const variants = settings.vary.map(variantOf);
  const trace = await traceOf(settings);
  const { seed, startS, drainS, leaseS, crashesPerHour, concurrency } = settings;
  const world: World = {
    ...{ seed, startS, drainS, leaseS, crashesPerHour, concurrency },
    maxCrashes: config.settings.maxCrashes.fallback,
  };
  const base = { ...defaults, max: settings.max };
  const scalers: Scaler[] = [
    siding("Siding", base, settings.lookS),
    ...variants.map((changes, index) =>
      siding(`Siding, ${settings.vary[index]}`, { ...base, ...changes }, settings.lookS)
    ),
    guide(base),
    fixed(1),
    fixed(settings.max),
  ];
  const results: Result[] = [];
  for (const scaler of scalers) {
    try {
      results.push(await simulate(trace, world, scaler, progressOf(scaler, signal)));
    } catch (error) {
      if (signal.aborted) return 0;
      throw error;
    }
  }
  const reports = scalers.map((scaler, i) => reportOf(scaler.name, results[i], settings));
  if (settings.svg !== undefined) await draw(settings.svg, trace, reports, results);
  console.log(
    settings.json ? JSON.stringify(jsonOf(trace, settings, reports)) : table(trace, reports),
  );
  return 0;
}

async function traceOf(settings: Settings): Promise<Trace> {
  const { trace: path, history, jobs, days, runMeanS, seed } = settings;
  if ([path !== undefined, history, settings.generate !== undefined].filter(Boolean).length > 1) {
    throw new config.UsageError("--trace, --history and --generate are three ways: one is wanted");
  }
  try {
    if (path !== undefined) {
      const csv = await Deno.readTextFile(path).catch((error) => {
        throw new config.UsageError(`--trace ${path}: ${error.message}`);
      });
      return parseTrace(path, csv);
    }
    if (history) return await historyOf(settings);
  } catch (error) {
    if (error instanceof TraceError) throw new config.UsageError(error.message);
    throw error;
  }
  return generate(settings.generate ?? "day", seed, jobs, days, runMeanS);
}

async function historyOf({ databaseUrl, prepare, statementLimitMs }: Settings): Promise<Trace> {
  const url = config.requireDatabase(databaseUrl);
  const db = new Database(url, { name: "simulate", max: 1, prepare }, statementLimitMs);
  try {
    return await db.run((sql) => readHistory(sql));
  } finally {
    await db.close();
  }
}

/** The settings of the policy that --vary may change; whole numbers. */
const VARIABLE: Record<string, keyof Policy> = {
  "min": "min",
  "max": "max",
  "step-s": "stepS",
  "idle-s": "idleS",
  "wait-target-s": "waitTargetS",
};

/** @throws UsageError that names what is wrong */
function variantOf(text: string): Partial<Policy> {
  return Object.fromEntries(
    text.split(",").map((part) => {
      const [name, value] = part.trim().split("=");
      if (
        !(name in VARIABLE) || !/^\d{1,6}$/.test(value ?? "") || (/^m/.test(name) && value < "1")
      ) {
        throw new config.UsageError(
          `--vary is "${text}": it must be such as max=8,idle-s=300, of ${
            Object.keys(VARIABLE).join(", ")
          }, with whole numbers`,
        );
      }
      return [VARIABLE[name], Number(value)];
    }),
  );
}

/** Says on stderr how far a policy is: in place on a terminal, else a line each quarter. */
function progressOf({ name }: Scaler, signal: AbortSignal): (share: number) => Promise<void> {
  const terminal = Deno.stderr.isTerminal();
  const encoder = new TextEncoder();
  let shown = -1;
  return async (share) => {
    const percent = Math.floor(share * (terminal ? 100 : 4)) * (terminal ? 1 : 25);
    if (percent !== shown) {
      shown = percent;
      const line = `${name}: ${percent} %`;
      const inPlace = `\r\x1b[K${share < 1 ? line : ""}`;
      Deno.stderr.writeSync(encoder.encode(terminal ? inPlace : `${line}\n`));
    }
    await new Promise((resolve) => setTimeout(resolve)); // signals are heard in between
    signal.throwIfAborted();
  };
}

async function draw(path: string, trace: Trace, reports: Report[], results: Result[]) {
  const bands = reports.map((report, index) => ({
    title: report.policy,
    note: `half wait ${report.wait_p50_s} s at most, 95 % ${report.wait_p95_s} s; ` +
      `${report.replica_hours} replica-hours, $${report.dollars}`,
    course: results[index].course,
  }));
  const spanS = Math.max(trace.forS, results[0].endS);
  await Deno.writeTextFile(
    path,
    picture(`${trace.arrivalS.length} jobs: ${trace.name}`, bands, spanS),
  );
}

function jsonOf(trace: Trace, prices: Prices, items: Report[]) {
  const { vcpu, gb, idleVcpu, idleGb } = prices;
  return {
    trace: { name: trace.name, jobs: trace.arrivalS.length, for_s: trace.forS },
    ...{ vcpu, gb, idle_vcpu: idleVcpu, idle_gb: idleGb, items },
  };
}

if (import.meta.main) await config.runMain("simulate", main);
