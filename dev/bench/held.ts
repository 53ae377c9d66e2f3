/**
 * Jobs that churn while a transaction holds xmin, so that nothing dead can be removed: how the rate of
 * each queue falls. Workers of Siding and of its peers drain a long line; and one connection claims, ends and
 * enqueues in turn, with a mark and without, to show what that is for.
 */
import * as config from "../../config.ts";
import { connect, pause, type Pool } from "../../db.ts";
import { type Done, type Exchange, exchange, look, type Place } from "../../claims.ts";
import { LOOK_EVERY_MS } from "../../intake.ts";
import { KIND, makeQueue, putJobs, QUEUE } from "./claimers.ts";
import {
  aligned,
  type BenchServer,
  benchServer,
  type Common,
  type Machine,
  machineText,
  type Measurement,
  ratio,
  type Say,
} from "./common.ts";
import {
  contenders as rivalsFlag,
  type Rival,
  rivals,
  template,
  until,
  worker,
} from "./contenders.ts";
import { picture, short } from "./svg.ts";

interface Settings extends Common {
  jobs: number;
  batch: number;
  contenders: string[];
}

/** A queue under churn. */
export interface Churn extends AsyncDisposable {
  /** Claims `most` jobs, ends them, and enqueues as many. @returns how many it had */
  cycle(most: number): Promise<number>;
}

/** A contender: makes its queue in an empty database, with `waiting` jobs in line. */
export interface Contender {
  /** Whether it wants Siding's tables in its database. */
  tables: boolean;
  start(url: string, waiting: number): Promise<Churn>;
}

interface Course {
  name: string;
  /** Jobs in each second. */
  jobs_s: number[];
  first_s: number;
  last_s: number;
  last_to_first: number | null;
}

interface Report {
  machine: Machine;
  settings: { jobs: number; batch: number; waiting: number };
  courses: Course[];
  left_out: string | null;
}

const WAITING = 3000;
/** Nobody is given longer, however slow it gets. */
const LIMIT_MS = 300_000;
/** Claims, and in the same statement ends those before. */
type Claimer = (sql: Pool, worker: string, most: number, done: Done[]) => Promise<Exchange>;

const claimFrom = (mark: Place | null): Claimer => (sql, worker, most, done) => {
  const options = { worker, kinds: [KIND], most, leaseS: 120, token: crypto.randomUUID() };
  return exchange(sql, { queue: QUEUE, claim: "skip_locked" }, options, done, mark);
};

/** As a worker does it: from the place where the last claim ended, with a look every so often. */
function marked(): Claimer {
  let mark: Place | null = null;
  let lookedMs = -Infinity;
  return async (sql, worker, most, done) => {
    if (performance.now() - lookedMs > LOOK_EVERY_MS) {
      lookedMs = performance.now();
      mark = (await look(sql, [QUEUE], [KIND])).ready[0]?.head ?? null;
    }
    const claimed = await claimFrom(mark)(sql, worker, most, done);
    if (claimed.jobs.length < most) lookedMs = -Infinity;
    mark = claimed.last;
    return claimed;
  };
}

const siding = (claimer: () => Claimer): Contender => ({
  tables: true,
  async start(url, waiting) {
    const sql = connect(url, { max: 1, name: "siding held" });
    await makeQueue(sql, "skip_locked");
    await putJobs(sql, waiting);
    const worker = crypto.randomUUID();
    const claims = claimer();
    let done: Done[] = [];
    return {
      async cycle(most) {
        const { jobs } = await claims(sql, worker, most, done);
        done = jobs.map(({ id, attempt }) => ({ id, attempt, result: null }));
        await putJobs(sql, jobs.length);
        return jobs.length;
      },
      [Symbol.asyncDispose]: () => sql.end({ timeout: 1 }),
    };
  },
});

/** One connection that claims, ends and enqueues in turn. */
const contenders: Record<string, Contender> = {
  "one connection, from a mark": siding(marked),
  "one connection, without": siding(() => claimFrom(null)),
};

async function benchHeld(settings: Settings, signal: AbortSignal, say: Say): Promise<Report> {
  const jobs = settings.quick ? Math.min(settings.jobs, 20_000) : settings.jobs;
  const { batch } = settings;
  await using server = await benchServer();
  const courses: Course[] = [];
  const { all, leftOut } = await rivals(settings.contenders, say);
  for (const rival of all.filter(({ ended }) => ended)) {
    courses.push(await courseOfWorker(server, rival, jobs, signal, say));
  }
  for (const [name, contender] of Object.entries(contenders)) {
    courses.push(await courseOf(server, name, contender, { jobs, batch }, signal, say));
  }
  const { machine } = server;
  return { machine, settings: { jobs, batch, waiting: WAITING }, courses, left_out: leftOut };
}

/** A worker of a contender's own that drains a long line, counted by the server's statistics every second. */
async function courseOfWorker(
  server: BenchServer,
  rival: Rival,
  jobs: number,
  signal: AbortSignal,
  say: Say,
): Promise<Course> {
  say(`${rival.name}: ${short(jobs)} jobs are put in line`);
  await using source = await template(server, rival, "best", jobs);
  await using database = await server.database({ copyOf: source });
  await using child = await worker(rival, database.url, "best");
  const holder = connect(database.url, { max: 1, name: "holds xmin" });
  try {
    return await holder.begin("isolation level repeatable read", async (tx) => {
      await tx`select count(*) from pg_class`; // its snapshot, which it keeps
      const { sql } = database;
      const ended = async (): Promise<number> =>
        (await sql.unsafe(`select (${rival.ended})::integer as n`))[0].n;
      const before = await ended();
      if (rival.release) {
        await until(sql, "(select count(*) = 1 from siding.processes)", signal);
        await sql.unsafe(rival.release);
      } else await child.tell("start");
      const samples: [number, number][] = [];
      const startedMs = performance.now();
      for (let n = 0; n < jobs && performance.now() - startedMs < LIMIT_MS;) {
        await pause(1000, signal);
        signal.throwIfAborted();
        n = (await ended()) - before;
        samples.push([performance.now() - startedMs, n]);
        say(`${rival.name}: ${short(n)} of ${short(jobs)} jobs, xmin held`);
      }
      return summaryOf(`${rival.name}, a worker`, samples);
    }) as Course;
  } finally {
    await holder.end({ timeout: 1 });
  }
}

/**
 * The rates of three of the first seconds, the very first aside, and of the last tenth of the time, three
 * seconds at least: late, one statement may take longer than a second.
 */
function summaryOf(name: string, samples: [number, number][]): Course {
  const rate = (from: number, to: number) => {
    const [[fromMs, had], [toMs, has]] = [samples[Math.max(0, from)], samples[Math.max(0, to)]];
    return Math.round((has - had) * 1000 / (toMs - fromMs));
  };
  const last = samples.length - 2; // the last second had less to do
  const many = Math.min(3, Math.floor(last / 2));
  const [first_s, last_s] = [
    rate(0, many),
    rate(last - Math.max(many, Math.floor(last / 10)), last),
  ];
  const jobs_s = samples.slice(1).map((_, i) => rate(i, i + 1));
  return { name, jobs_s, first_s, last_s, last_to_first: ratio(last_s, first_s) };
}

async function courseOf(
  server: BenchServer,
  name: string,
  contender: Contender,
  { jobs, batch }: { jobs: number; batch: number },
  signal: AbortSignal,
  say: Say,
): Promise<Course> {
  await using database = await server.database({ empty: !contender.tables });
  await using churn = await contender.start(database.url, WAITING);
  await churn.cycle(batch); // to connect, and plan
  const holder = connect(database.url, { max: 1, name: "holds xmin" });
  try {
    return await holder.begin("isolation level repeatable read", async (tx) => {
      await tx`select count(*) from pg_class`; // its snapshot, which it keeps
      const atMs: number[] = [];
      const startedMs = performance.now();
      for (let done = 0; done < jobs; done = atMs.length) {
        signal.throwIfAborted();
        const had = await churn.cycle(batch);
        if (had === 0) throw new Error(`${name}: a claim got none of ${WAITING} jobs in line`);
        const ms = performance.now() - startedMs;
        for (let n = 0; n < had; n++) atMs.push(ms);
        if (ms > LIMIT_MS) break;
        say(`${name}: ${short(atMs.length)} of ${short(jobs)} jobs, xmin held`);
      }
      return summary(name, atMs);
    }) as Course;
  } finally {
    await holder.end({ timeout: 1 });
  }
}

/** The rates of the first tenth of the jobs, at most three seconds of it, and of the last tenth. */
function summary(name: string, atMs: number[]): Course {
  const tenth = Math.max(1, Math.floor(atMs.length / 10));
  const first = Math.max(1, Math.min(tenth, atMs.filter((ms) => ms <= 3000).length || tenth));
  const endMs = atMs[atMs.length - 1];
  const first_s = Math.round(first * 1000 / atMs[first - 1]);
  const last_s = Math.round(tenth * 1000 / (endMs - atMs[atMs.length - 1 - tenth]));
  const jobs_s = new Array<number>(Math.floor(endMs / 1000)).fill(0);
  for (const ms of atMs) if (ms < jobs_s.length * 1000) jobs_s[Math.floor(ms / 1000)]++;
  return { name, jobs_s, first_s, last_s, last_to_first: ratio(last_s, first_s) };
}

function textOf({ machine, settings, courses, left_out }: Report): string {
  const { jobs, batch, waiting } = settings;
  const rows = courses.map(({ name, first_s, last_s, last_to_first }) => [
    ...[name, String(first_s), String(last_s), `${Math.round((last_to_first ?? 0) * 100)}%`],
  ]);
  return [
    machineText(machine),
    `${jobs} jobs, ${batch} at a time, ${waiting} in line, while a transaction holds xmin`,
    "",
    ...aligned([["jobs/s", "at first", "in the end", "is"], ...rows]),
    ...(left_out ? ["", left_out] : []),
  ].join("\n");
}

const svgOf = ({ machine, courses }: Report) =>
  picture("While a transaction holds xmin", machineText(machine).split("\n")[0], [{
    kind: "lines",
    title: "Jobs claimed, ended and enqueued in each second",
    x: { label: "seconds of the hold" },
    y: { label: "jobs" },
    series: courses.map(({ name, jobs_s }) => ({
      name,
      points: jobs_s.map((jobs, second): [number, number] => [second, jobs]),
    })),
  }]);

export const held: Measurement<Settings, Report> = {
  summary: "how the rate falls while a transaction holds xmin",
  flags: {
    jobs: config.flag(config.int(200_000, 1000, 10_000_000, "jobs that each works off meanwhile")),
    batch: config.flag(config.int(100, 1, 1000, "jobs at a time, of one connection")),
    contenders: rivalsFlag,
  },
  ...{ run: benchHeld, text: textOf, svg: svgOf },
};
