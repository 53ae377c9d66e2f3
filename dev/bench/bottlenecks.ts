/**
 * Where a Postgres queue stalls: the ways to claim side by side, for ever more claimers; and which of
 * the two that keep a limit across workers keeps it best.
 */
import * as config from "../../config.ts";
import { codeOf, type Pool, schema, withQueueLock } from "../../db.ts";
import { type Ready } from "../../claims.ts";
import { type Claimed } from "../../queue.ts";
import {
  finishAll,
  KIND,
  makeQueue,
  QUEUE,
  startOver,
  type Take,
  take,
  type Work,
  work,
} from "./claimers.ts";
import {
  aligned,
  type BenchDatabase,
  type BenchServer,
  benchServer,
  type Common,
  type Machine,
  machineText,
  type Measurement,
  ratio,
  round,
  type Say,
} from "./common.ts";
import { picture } from "./svg.ts";

interface Settings extends Common {
  cellMs: number;
  waiting: number;
  limits: boolean;
}

interface Cell {
  way: string;
  claimers: number;
  /** Jobs a claim, or the queue's max_running. */
  size: number;
  claims_s: number;
  jobs_s: number;
  /** Shares of the claims. */
  wasted: number;
  failures: number;
  cpu_us_per_job: number | null;
  dead_per_job: number;
  /** Of each claim. */
  waited_ms: number;
}

interface Report {
  machine: Machine;
  settings: { cell_ms: number; waiting: number };
  /** Claims of `size` jobs, which stay claimed. */
  claims: Cell[];
  /** Queues whose max_running is `size`, of which each job is settled right after it is claimed. */
  limits: Cell[];
}

interface Way {
  by: Ready["claim"];
  take: Take;
  /** On indexes that hold every state. */
  full?: boolean;
}

/** The oldest, as everybody sees them. */
const oldest = (sql: Pool, most: number, lock = "") =>
  sql<{ id: string }[]>`
    select id::text from ${sql(schema)}.jobs
    where queue = ${QUEUE} and status = 'queued' and kind = ${KIND}
    order by priority desc, due_at, id limit ${most} ${sql.unsafe(lock)}`;
/** Those of them that are still in line. */
const claimThese = (sql: Pool, worker: string, rows: { id: string }[]) =>
  sql<Claimed[]>`
    update ${sql(schema)}.jobs set status = 'running', worker_id = ${worker}, attempt = attempt + 1,
      claim_token = gen_random_uuid(), claimed_at = now(), lease_until = now() + interval '2 minutes'
    where id = any(${`{${rows.map(({ id }) => id)}}`}::bigint[]) and status = 'queued'
    returning id::text, attempt`;

/** The names say what the second source changed, one after the other, and the first source's lock. */
const ways: Record<string, Way> = {
  "no lock: the oldest, then a conditional update": {
    by: "skip_locked",
    take: async (sql, worker, most) => {
      const rows = await oldest(sql, most);
      return { jobs: rows.length ? await claimThese(sql, worker, rows) : [] };
    },
  },
  "skip locked, REPEATABLE READ": { by: "skip_locked", take: skipAtRepeatableRead },
  "skip locked, READ COMMITTED, full indexes": {
    by: "skip_locked",
    take: take("skip_locked"),
    full: true,
  },
  "skip locked, READ COMMITTED, partial indexes": { by: "skip_locked", take: take("skip_locked") },
  "advisory lock, several round trips": {
    by: "lock",
    take: async (sql, worker, most) => ({
      jobs: await withQueueLock(sql, QUEUE, async (tx) => {
        const rows = await oldest(tx as Pool, most);
        return rows.length ? Array.from(await claimThese(tx as Pool, worker, rows)) : [];
      }),
    }),
  },
  "advisory lock, one call (lock)": { by: "lock", take: take("lock") },
  "the queue's row, one call (repeatable_read)": {
    by: "repeatable_read",
    take: take("repeatable_read"),
  },
};

/** One round trip, as the second source began: a failure is a claim in vain, and is tried again. */
async function skipAtRepeatableRead(sql: Pool, worker: string, most: number) {
  try {
    const [, jobs] = await sql.unsafe(
      `set transaction isolation level repeatable read;
       with next as materialized (
         select id from "${schema}".jobs
         where queue = '${QUEUE}' and status = 'queued' and kind = '${KIND}'
         order by priority desc, due_at, id limit ${most} for update skip locked)
       update "${schema}".jobs j set status = 'running', worker_id = '${worker}',
         attempt = j.attempt + 1, claim_token = gen_random_uuid(), claimed_at = now(),
         lease_until = now() + interval '2 minutes'
       from next where j.id = next.id returning j.id::text, j.attempt`,
    ).simple() as unknown as [unknown, Claimed[]];
    return { jobs };
  } catch (error) {
    if (codeOf(error) !== "40001") throw error;
    return { jobs: [], failures: 1 };
  }
}

/** Has the indexes hold each job all its life, as an ordinary table's do. */
async function fillIndexes(sql: Pool): Promise<void> {
  const on = `on "${schema}".jobs`;
  for (const name of ["queued", "scheduled", "running", "review", "unique_key", "finished"]) {
    await sql.unsafe(`drop index "${schema}".jobs_${name}`);
  }
  await sql.unsafe(`drop index "${schema}".jobs_unfinished_by_owner`);
  await sql.unsafe(`create index ${on} (queue, status, priority desc, due_at, id)`);
  await sql.unsafe(`create index ${on} (status, due_at)`);
  await sql.unsafe(`create index ${on} (worker_id, status)`);
  await sql.unsafe(`create index ${on} (status, id)`);
  await sql.unsafe(`create index ${on} (kind, unique_key, status)`);
  await sql.unsafe(`create index ${on} (status, finished_at)`);
  await sql.unsafe(`create index ${on} (queue, owner, status)`);
}

async function benchBottlenecks(
  { quick, cellMs, waiting, limits }: Settings,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  const all = quick
    ? { claimers: [1, 16], sizes: [1, 10], limited: [4, 16], limits: [1, 10] }
    : { claimers: [1, 4, 16, 64], sizes: [1, 10, 100], limited: [4, 16, 64], limits: [1, 10, 100] };
  const forMs = quick ? Math.min(cellMs, 150) : cellMs;
  const jobs = quick ? Math.min(waiting, 4000) : waiting;
  await using server = await benchServer({ autovacuum: "off" });
  await using partial = await server.database();
  await using full = await server.database();
  await fillIndexes(full.sql);
  const report: Report = {
    ...{ machine: server.machine, settings: { cell_ms: forMs, waiting: jobs } },
    ...{ claims: [], limits: [] },
  };
  for (const size of limits ? [] : all.sizes) {
    for (const claimers of all.claimers) {
      for (const [name, way] of Object.entries(ways)) {
        signal.throwIfAborted();
        say(`${claimers} claimers, ${size} a claim: ${name}`);
        const database = way.full ? full : partial;
        await makeQueue(database.sql, way.by);
        await startOver(database.sql, jobs);
        const done = await work(server, database, way.take, { claimers, most: size, forMs });
        report.claims.push(cellOf(name, claimers, size, done));
      }
    }
  }
  for (const size of all.limits) {
    for (const claimers of all.limited) {
      for (const by of ["lock", "repeatable_read"] as const) {
        signal.throwIfAborted();
        say(`${claimers} claimers, at most ${size} running: ${by}`);
        report.limits.push(await limited(server, partial, by, { claimers, size, forMs, jobs }));
      }
    }
  }
  return report;
}

/** A queue with a limit, whose claimers settle what they take, and pause as a worker does when it is nothing. */
async function limited(
  server: BenchServer,
  database: BenchDatabase,
  by: "lock" | "repeatable_read",
  o: { claimers: number; size: number; forMs: number; jobs: number },
): Promise<Cell> {
  await makeQueue(database.sql, by, o.size);
  await startOver(database.sql, o.jobs);
  const done = await work(server, database, take(by), {
    ...{ claimers: o.claimers, most: 10, forMs: o.forMs, then: finishAll },
    pauseMs: (empty) => Math.min(200, 10 * 2 ** Math.min(empty, 6)) * (0.8 + Math.random() * 0.4),
  });
  return cellOf(by, o.claimers, o.size, done);
}

function cellOf(way: string, claimers: number, size: number, done: Work): Cell {
  const { seconds, claims, jobs } = done;
  const share = (part: number) => round(part / Math.max(1, claims), 3);
  return {
    ...{
      way,
      claimers,
      size,
      claims_s: Math.round(claims / seconds),
      jobs_s: Math.round(jobs / seconds),
    },
    ...{ wasted: share(done.wasted), failures: share(done.failures) },
    cpu_us_per_job: done.cpu_s === null || jobs === 0 ? null : Math.round(done.cpu_s / jobs * 1e6),
    dead_per_job: round(done.dead / Math.max(1, jobs), 2),
    waited_ms: round(done.waited_s * 1000 / Math.max(1, claims), 2),
  };
}

const HEAD = ["claims/s", "jobs/s", "wasted", "failed", "CPU µs a job", "dead a job", "waited ms"];
const figures = (cell: Cell) => [
  ...[String(cell.claims_s), String(cell.jobs_s), percent(cell.wasted), percent(cell.failures)],
  ...[String(cell.cpu_us_per_job ?? "-"), String(cell.dead_per_job), String(cell.waited_ms)],
];
const percent = (share: number) => `${Math.round(share * 100)}%`;

/** Which way keeps a limit best, by the figures: the geometric mean of the ratios of all the cells. */
export function verdict(limits: readonly Cell[]): string {
  const cells = limits.filter(({ way }) => way === "lock").map((lock) => ({
    lock,
    other: limits.find(({ way, claimers, size }) =>
      way === "repeatable_read" && claimers === lock.claimers && size === lock.size
    )!,
  }));
  const mean = (of: (cell: Cell) => number | null) => {
    const logs = cells.map(({ lock, other }) => Math.log(ratio(of(lock), of(other)) || 1));
    return round(Math.exp(logs.reduce((sum, log) => sum + log, 0) / logs.length), 2);
  };
  const [speed, cost] = [mean((cell) => cell.jobs_s), mean((cell) => cell.cpu_us_per_job)];
  const best = speed >= 1 ? "lock" : "repeatable_read";
  return `lock settles ${speed} times the jobs of repeatable_read at ${cost} times the CPU a job ` +
    `(geometric means): ${best} is the one for queues with max_running`;
}

function textOf({ machine, settings, claims, limits }: Report): string {
  const parts = [
    machineText(machine),
    `${settings.cell_ms} ms each; ${settings.waiting} jobs in line, autovacuum off`,
  ];
  for (const { size, claimers } of pairsOf(claims)) {
    const rows = claims.filter((cell) => cell.size === size && cell.claimers === claimers)
      .map((cell) => [cell.way, ...figures(cell)]);
    parts.push(
      "",
      aligned([[`${claimers} claimers, ${size} a claim`, ...HEAD], ...rows], [0]).join("\n"),
    );
  }
  const rows = limits.map((
    cell,
  ) => [`at most ${cell.size} running, ${cell.claimers} claimers: ${cell.way}`, ...figures(cell)]);
  parts.push("", aligned([["queues with max_running", ...HEAD], ...rows], [0]).join("\n"));
  return [...parts, "", verdict(limits)].join("\n");
}

const pairsOf = (cells: readonly Cell[]) =>
  [...new Set(cells.map(({ size, claimers }) => `${size} ${claimers}`))].map((pair) => {
    const [size, claimers] = pair.split(" ").map(Number);
    return { size, claimers };
  });

function svgOf({ machine, claims, limits }: Report): string {
  const sizes = [...new Set(claims.map(({ size }) => size))];
  const most = Math.max(...limits.map(({ claimers }) => claimers));
  return picture("Ways to claim", machineText(machine).split("\n")[0], [
    ...sizes.map((size) => ({
      kind: "lines" as const,
      title: `Jobs claimed a second, ${size} a claim`,
      x: { label: "claimers", log: true },
      y: { label: "jobs a second", log: true },
      series: Object.keys(ways).map((name) => ({
        name,
        points: claims.filter((cell) => cell.way === name && cell.size === size)
          .map((cell): [number, number] => [cell.claimers, cell.jobs_s]),
      })),
    })),
    {
      kind: "bars",
      title: `Queues with max_running, ${most} claimers`,
      unit: "jobs settled a second",
      groups: [...new Set(limits.map(({ size }) => size))].map((size) => ({
        label: `at most ${size}`,
        bars: limits.filter((cell) => cell.size === size && cell.claimers === most)
          .map((cell) => ({ series: cell.way, value: cell.jobs_s })),
      })),
    },
  ]);
}

export const bottlenecks: Measurement<Settings, Report> = {
  summary: "the ways to claim, for 1 to 64 claimers, and which keeps a limit across workers best",
  flags: {
    cellMs: config.flag(config.int(1000, 50, 60_000, "how long each way, claimers and batch")),
    waiting: config.flag(config.int(60_000, 1000, 1_000_000, "jobs in line at the start of each")),
    limits: config.flag(config.yes("only lock against repeatable_read on queues with max_running")),
  },
  ...{ run: benchBottlenecks, text: textOf, svg: svgOf },
};
