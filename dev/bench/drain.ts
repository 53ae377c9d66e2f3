/**
 * How fast no-op jobs that are all there already are drained, by one process and by several.
 *
 * The same clock for every contender. Each process first works off some jobs, since V8 compiles what runs
 * often only once it has: the clock starts at the first look that finds no more than the measured jobs left,
 * and ends at the first that finds none, by the database's clock. A second figure has the warming-up in it: it
 * counts all jobs from the time of the first claim, as the rows have it.
 * The start of the processes does not count. The looks count what is left; they come closer together
 * toward the end, the last ones some milliseconds apart, so that they cost next to nothing.
 */
import * as config from "../../config.ts";
import { pause } from "../../db.ts";
import {
  aligned,
  type BenchDatabase,
  type BenchServer,
  benchServer,
  type Common,
  inTurns,
  type Machine,
  machineText,
  type Measurement,
  median,
  ratio,
  type Say,
} from "./common.ts";
import type { How } from "./contender.ts";
import {
  type Child,
  contenders,
  type Rival,
  rivals,
  siding,
  template,
  until,
  worker,
} from "./contenders.ts";
import { type Bars, picture } from "./svg.ts";

export interface Settings extends Common {
  jobs: number;
  warmUp: number;
  processes: string;
  rounds: number;
  default: boolean;
  contenders: string[];
}

export interface Result {
  contender: string;
  settings: string;
  processes: number;
  jobs_per_s: number;
  /** Jobs a second of each round. */
  rounds: number[];
  /** The warming-up included. */
  cold_jobs_per_s: number;
  /** How many times as fast Siding is. */
  siding_ratio: number | null;
}

export interface Report {
  machine: Machine;
  jobs: number;
  how: How;
  left_out: string | null;
  items: Result[];
}

const flags = {
  jobs: config.flag(config.int(20_000, 1, 1_000_000, "no-op jobs that are there beforehand")),
  warmUp: config.flag(
    config.int(
      20_000,
      0,
      1_000_000,
      "jobs before them, which are not measured; as many as these at the most",
    ),
  ),
  processes: config.flag({
    parse: (text: string) => {
      if (!/^\d{1,2}(,\d{1,2})*$/.test(text) || text.split(",").includes("0")) throw text;
      return text;
    },
    rule: "it must be counts with commas between, such as 1,4",
    fallback: "1,4",
    help: "by so many processes of each",
  }),
  rounds: config.flag(config.int(5, 1, 100, "times each; the figures are the medians")),
  default: config.flag(config.yes("everyone's default settings, with 10 jobs at a time")),
  contenders,
};

export async function benchDrain(
  settings: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  await using server = await benchServer();
  return await drainOn(server, settings, signal, say);
}

/** {@linkcode benchDrain} on a server that is there. */
export async function drainOn(
  server: BenchServer,
  settings: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  const { all, leftOut } = await rivals(settings.contenders, say);
  const most = settings.quick ? Math.min(settings.jobs, QUICK_JOBS) : settings.jobs;
  const how: How = settings.default ? "default" : "best";
  // A copy of a filled database for each run: filling takes some of them longer than draining.
  await using filled = new AsyncDisposableStack();
  const turns: Record<string, () => Promise<Rates>> = {};
  for (const rival of all) {
    signal.throwIfAborted();
    const jobs = Math.ceil(most * (rival.share ?? 1));
    const total = jobs + Math.min(settings.warmUp, settings.quick ? Math.ceil(jobs / 2) : jobs);
    say(`${total} jobs for ${rival.name}`);
    const source = filled.use(await template(server, rival, how, total));
    for (const processes of settings.processes.split(",").map(Number)) {
      turns[`${processes} ${rival.name}`] = async () => {
        await using database = await server.database({ copyOf: source });
        return await drainOnce(database, rival, how, jobs, total, processes, signal);
      };
    }
  }
  const measured = await inTurns(turns, settings.quick ? 1 : settings.rounds, signal, say);
  return {
    ...{ machine: server.machine, jobs: most, how, left_out: leftOut },
    items: itemsOf(all, how, settings.processes.split(",").map(Number), measured),
  };
}

function itemsOf(
  all: Rival[],
  how: How,
  counts: number[],
  measured: Record<string, Rates[]>,
): Result[] {
  return counts.flatMap((processes) => {
    const roundsOf = ({ name }: Rival) => measured[`${processes} ${name}`].map(({ warm }) => warm);
    const coldOf = ({ name }: Rival) => measured[`${processes} ${name}`].map(({ cold }) => cold);
    const own = all.includes(siding) ? median(roundsOf(siding)) : null;
    return all.map((rival) => ({
      ...{ contender: rival.name, settings: rival.settings[how], processes },
      jobs_per_s: Math.round(median(roundsOf(rival))),
      rounds: roundsOf(rival).map(Math.round),
      cold_jobs_per_s: Math.round(median(coldOf(rival))),
      siding_ratio: rival === siding ? null : ratio(own, median(roundsOf(rival))),
    }));
  });
}

/** Jobs a second: of those measured, and of all from the first claim on. */
interface Rates {
  warm: number;
  cold: number;
}

/** Drains a database of `total` jobs by so many processes, of which the last `jobs` are measured. */
async function drainOnce(
  { sql, url }: BenchDatabase,
  rival: Rival,
  how: How,
  jobs: number,
  total: number,
  processes: number,
  signal: AbortSignal,
): Promise<Rates> {
  await using workers = new AsyncDisposableStack();
  const started: Child[] = await Promise.all(
    Array.from({ length: processes }, () => worker(rival, url, how)),
  );
  for (const it of started) workers.use(it);
  if (rival.release) {
    const ready = `select count(*) = ${processes} from siding.processes`;
    await until(sql, `(${ready})`, signal);
    await sql.unsafe(rival.release);
  } else for (const it of started) await it.tell("start");

  const claimed = `(${rival.claimed})`;
  await until(sql, `${claimed} is not null`, signal);
  // Read once, and at once: of what is deleted when it has ended it cannot be told any more.
  const [{ at }] = await sql.unsafe(`select extract(epoch from ${claimed})::float8 as at`);
  const endMs = performance.now() + LIMIT_MS;
  let begun: { left: number; now: number } | null = null;
  while (performance.now() < endMs) {
    signal.throwIfAborted();
    const [{ left, now }] = await sql.unsafe(
      `select (${rival.left})::integer as left, extract(epoch from statement_timestamp())::float8 as now`,
    );
    if (left === 0) {
      const [{ done }] = await sql.unsafe(`select (${rival.done ?? total})::integer as done`);
      if (done !== total) {
        throw new Error(`${rival.name} did ${done} of ${total} jobs at the first try`);
      }
      const cold = total / (now - at);
      // So few that they were done between two looks.
      return { warm: begun ? begun.left / (now - begun.now) : cold, cold };
    }
    if (left <= jobs) begun ??= { left, now };
    // Until the next point in time that counts, by the pace so far.
    const passedMs = (now - at) * 1000;
    const restMs = passedMs * (left > jobs ? left - jobs : left) / Math.max(1, total - left);
    // At first the rest is a guess, and far too long: not to be slept through.
    await pause(Math.max(2, Math.min(restMs * 0.7, Math.max(20, passedMs / 2), 1000)), signal);
  }
  throw new Error(`${rival.name} has not drained ${jobs} jobs within ${LIMIT_MS / 1000} s`);
}

const LIMIT_MS = 300_000;
const QUICK_JOBS = 10_000;

export function textOf({ machine, jobs, how, left_out, items }: Report): string {
  const rows = items.map((it) => [
    ...[it.contender, String(it.processes), String(it.jobs_per_s), String(it.cold_jobs_per_s)],
    ...[it.siding_ratio === null ? "" : `${it.siding_ratio} ×`, it.settings],
  ]);
  return [
    machineText(machine),
    `${jobs} no-op jobs, the ${how} settings of each; medians of ${items[0].rounds.length}` +
    (items.some((it) => it.contender === "DBOS") ? "; DBOS has a tenth of the jobs" : ""),
    "",
    ...aligned([["", "processes", "jobs/s", "from cold", "Siding is", "settings"], ...rows], [
      0,
      5,
    ]),
    ...(left_out ? ["", left_out] : []),
  ].join("\n");
}

/** As a chart: a group for each number of processes. */
export function barsOf({ jobs, how, items }: Report): Bars {
  const groups = Map.groupBy(items, ({ processes }) => processes);
  return {
    kind: "bars",
    title: `${jobs} jobs drained, ${how} settings`,
    unit: "jobs a second",
    groups: [...groups].map(([processes, items]) => ({
      label: processes === 1 ? "1 process" : `${processes} processes`,
      bars: items.map((it) => ({ series: it.contender, value: it.jobs_per_s })),
    })),
  };
}

const svgOf = (report: Report) =>
  picture("Draining", machineText(report.machine).split("\n")[0], [barsOf(report)]);

export const drain: Measurement<Settings, Report> = {
  summary: "how fast jobs are drained, beside graphile-worker, pg-boss and DBOS",
  flags,
  run: benchDrain,
  text: textOf,
  svg: svgOf,
};
