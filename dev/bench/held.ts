/**
 * Jobs that churn while a transaction holds xmin, so that nothing dead can be removed: how the rate of
 * each queue falls. Every contender works off its own line in its own database, and refills it.
 */
import * as config from "../../config.ts";
import { connect, type Pool, schema } from "../../db.ts";
import { claimedColumns } from "../../claims.ts";
import { type Job } from "../../queue.ts";
import { finishAll, KIND, makeQueue, putJobs, QUEUE, take } from "./claimers.ts";
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
import { picture, short } from "./svg.ts";

interface Settings extends Common {
  jobs: number;
  batch: number;
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
}

const WAITING = 3000;
/** Nobody is given longer, however slow it gets. */
const LIMIT_MS = 300_000;
/** A marked claim looks from the very start every so many claims, or ms. */
const RESCAN_CLAIMS = 50;
const RESCAN_MS = 1000;

type Claimer = (sql: Pool, worker: string, most: number) => Promise<Pick<Job, "id" | "attempt">[]>;

const plain: Claimer = async (sql, worker, most) =>
  (await take("skip_locked")(sql, worker, most)).jobs;

/** The place in line of the last job that was claimed. */
interface Mark {
  priority: number;
  due_at: string;
  id: string;
}

/** The product's statement, begun at the last claimed key instead of at the dead entries before it. */
function marked(): Claimer {
  let mark: Mark | null = null;
  let [claims, atMs] = [0, 0];
  return async (sql, worker, most) => {
    const old = ++claims > RESCAN_CLAIMS || performance.now() - atMs > RESCAN_MS;
    for (const from of mark && !old ? [mark, null] : [null]) {
      if (!from) [claims, atMs] = [0, performance.now()];
      const jobs = await claimFrom(sql, worker, most, from);
      if (jobs.length > 0) mark = jobs[jobs.length - 1];
      if (jobs.length === most || !from) return jobs;
      mark = null; // short: what is before the mark comes with the next
      if (jobs.length > 0) return jobs;
    }
    return [];
  };
}

function claimFrom(sql: Pool, worker: string, most: number, mark: Mark | null) {
  const after = mark
    ? sql`and priority = ${mark.priority} and (due_at, id) >= (${mark.due_at}::timestamptz, ${mark.id})`
    : sql``;
  return sql<(Pick<Job, "id" | "attempt"> & Mark)[]>`
    with next as materialized (
      select id from ${sql(schema)}.jobs
      where queue = ${QUEUE} and status = 'queued' and kind = any(${`{${KIND}}`}::text[]) ${after}
      order by priority desc, due_at, id limit ${most} for update skip locked
    ),
    taken as (
      update ${sql(schema)}.jobs j set status = 'running', worker_id = ${worker},
        claim_token = gen_random_uuid(), attempt = j.attempt + 1, claimed_at = now(),
        lease_until = now() + interval '2 minutes', stage = null, progress = null
      from next where j.id = next.id returning j.*
    )
    select ${sql.unsafe(claimedColumns)}, j.due_at::text from taken j
    order by j.priority desc, j.due_at, j.id`;
}

const siding = (claimer: () => Claimer): Contender => ({
  tables: true,
  async start(url, waiting) {
    const sql = connect(url, { max: 1, name: "siding held" });
    await makeQueue(sql, "skip_locked");
    await putJobs(sql, waiting);
    const worker = crypto.randomUUID();
    const claims = claimer();
    return {
      async cycle(most) {
        const jobs = await claims(sql, worker, most);
        await finishAll(sql, worker, jobs);
        await putJobs(sql, jobs.length);
        return jobs.length;
      },
      [Symbol.asyncDispose]: () => sql.end({ timeout: 1 }),
    };
  },
});

/** Who is measured; peers are added here. */
const contenders: Record<string, Contender> = {
  "Siding, claim from a mark": siding(marked),
  "Siding, plain claim": siding(() => plain),
};

async function benchHeld(settings: Settings, signal: AbortSignal, say: Say): Promise<Report> {
  const jobs = settings.quick ? Math.min(settings.jobs, 20_000) : settings.jobs;
  const { batch } = settings;
  await using server = await benchServer();
  const courses: Course[] = [];
  for (const [name, contender] of Object.entries(contenders)) {
    courses.push(await courseOf(server, name, contender, { jobs, batch }, signal, say));
  }
  return { machine: server.machine, settings: { jobs, batch, waiting: WAITING }, courses };
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

function textOf({ machine, settings, courses }: Report): string {
  const { jobs, batch, waiting } = settings;
  const rows = courses.map(({ name, first_s, last_s, last_to_first }) => [
    ...[name, String(first_s), String(last_s), `${Math.round((last_to_first ?? 0) * 100)}%`],
  ]);
  return [
    machineText(machine),
    `${jobs} jobs, ${batch} at a time, ${waiting} in line, while a transaction holds xmin`,
    "",
    ...aligned([["jobs/s", "at first", "in the end", "is"], ...rows]),
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
    batch: config.flag(config.int(100, 1, 1000, "jobs at a time")),
  },
  ...{ run: benchHeld, text: textOf, svg: svgOf },
};
