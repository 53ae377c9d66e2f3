/** Traces: when jobs arrive and how long each runs, from a file, the project's own jobs, or a seed. */
import { schema, type Sql } from "../../db.ts";
import { random } from "../chaos/faults.ts";

export interface Trace {
  name: string;
  /** In ascending order, from 0 on. */
  arrivalS: Float64Array;
  runS: Float64Array;
  /** How long it lasts: a generated month is one, also when its last hours bring no job. */
  forS: number;
  /** The waits that were measured, where the trace is a history. */
  waitS?: Float64Array;
}

/** A line of a trace's file is wrong. */
export class TraceError extends Error {
  override name = "TraceError";
}

/** Jobs in any order, as a trace. */
function traceOf(name: string, jobs: [arrivalS: number, runS: number][], forS = 0): Trace {
  jobs.sort(([a], [b]) => a - b);
  const firstS = forS > 0 || jobs.length === 0 ? 0 : jobs[0][0];
  return {
    name,
    arrivalS: Float64Array.from(jobs, ([arrivalS]) => arrivalS - firstS),
    runS: Float64Array.from(jobs, ([, runS]) => runS),
    forS: forS || (jobs.length > 0 ? jobs[jobs.length - 1][0] - firstS : 0),
  };
}

/**
 * Reads `arrival_s,run_s` per line; that heading and empty lines are passed over. The first arrival
 * becomes 0, so that seconds since 1970 will do.
 *
 * @throws TraceError that names the line, the value and the rule
 */
export function parseTrace(name: string, csv: string): Trace {
  const jobs: [number, number][] = [];
  for (const [index, line] of csv.split(/\r?\n/).entries()) {
    if (line.trim() === "" || (index === 0 && /^\s*arrival_s\s*,\s*run_s\s*$/.test(line))) continue;
    const where = `${name}, line ${index + 1}`;
    const values = line.split(",").map((value) => value.trim());
    if (values.length !== 2) {
      throw new TraceError(`${where} is "${line.slice(0, 80)}": it must be arrival_s,run_s`);
    }
    const [arrivalS, runS] = values.map((value, column) => {
      if (/^\d+(\.\d*)?(e[+-]?\d+)?$/i.test(value) && Number(value) < 1e12) return Number(value);
      const what = ["arrival_s", "run_s"][column];
      throw new TraceError(
        `${where}: ${what} is "${value.slice(0, 40)}": it must be seconds, a number from 0`,
      );
    });
    jobs.push([arrivalS, runS]);
  }
  if (jobs.length === 0) throw new TraceError(`${name} has no jobs: a line each, arrival_s,run_s`);
  return traceOf(name, jobs);
}

/** The jobs that were done, the newest `most` of them: when each was due, and its last attempt's run. */
export async function readHistory(sql: Sql, most = 1_000_000): Promise<Trace> {
  const rows = await sql<{ due_s: number; wait_s: number; run_s: number }[]>`
    select extract(epoch from due_at)::float8 as due_s,
      extract(epoch from claimed_at - due_at)::float8 as wait_s,
      extract(epoch from finished_at - claimed_at)::float8 as run_s
    from ${sql(schema)}.jobs
    where status = 'done' and finished_at >= claimed_at
    order by finished_at desc limit ${most}`;
  if (rows.length === 0) throw new TraceError("no job is done yet: there is no history");
  return {
    ...traceOf("history", rows.map(({ due_s, run_s }) => [due_s, run_s])),
    waitS: Float64Array.from(rows, ({ wait_s }) => Math.max(0, wait_s)).sort(),
  };
}

export const shapes = ["poisson", "bursts", "day"] as const;
export type Shape = typeof shapes[number];

const DAY_S = 86_400;
/** Jobs in a burst, on average, and how long it takes to bring them. */
const BURST_JOBS = 20;
const BURST_S = 60;
/** How far run times spread: with 0.7 one in twenty is over 2.5 times the mean. */
const RUN_SIGMA = 0.7;

/**
 * Draws a trace by a seed. `poisson`: jobs come at one rate, each by itself. `bursts`: someone
 * uploads a whole folder. `day`: many around three in the afternoon, few at night, half on weekends.
 */
export function generate(
  shape: Shape,
  seed: number,
  jobs: number,
  days: number,
  meanRunS: number,
): Trace {
  const draw = random(seed);
  const forS = days * DAY_S;
  const arrivalS = new Float64Array(jobs);
  let [burstS, left] = [0, 0];
  for (let i = 0; i < jobs; i++) {
    if (shape === "poisson") arrivalS[i] = draw() * forS;
    else if (shape === "day") arrivalS[i] = dayTime(draw, forS);
    else {
      if (left === 0) {
        burstS = draw() * Math.max(0, forS - BURST_S);
        left = 1 + Math.floor(-Math.log(1 - draw()) * (BURST_JOBS - 0.5));
      }
      arrivalS[i] = burstS + draw() * BURST_S;
      left--;
    }
  }
  arrivalS.sort();
  return {
    name: `${shape}, seed ${seed}`,
    arrivalS,
    runS: Float64Array.from({ length: jobs }, () => lognormal(draw) * meanRunS),
    forS,
  };
}

/** An instant by the weight of its hour and day. */
function dayTime(draw: () => number, forS: number): number {
  for (;;) {
    const atS = draw() * forS;
    const hour = (atS % DAY_S) / 3600;
    const weekend = Math.floor(atS / DAY_S) % 7 >= 5;
    const weight = 0.05 + 0.95 * ((1 + Math.cos((hour - 15) * Math.PI / 12)) / 2) ** 2;
    if (draw() < weight * (weekend ? 0.5 : 1)) return atS;
  }
}

/** Above 0, with mean 1 (Box and Muller). */
function lognormal(draw: () => number): number {
  const normal = Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
  return Math.exp(RUN_SIGMA * normal - RUN_SIGMA ** 2 / 2);
}
