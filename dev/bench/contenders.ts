/**
 * The contenders as the measurements see them: Siding, and the peers of tools/bench/ where their
 * dependencies can be installed. Each works, and enqueues, in processes of its own.
 */
import { fileURLToPath } from "node:url";
import * as config from "../../config.ts";
import type { Pool } from "../../db.ts";
import { pause } from "../../db.ts";
import type { BenchDatabase, BenchServer, Say } from "./common.ts";
import type { How, Order } from "./contender.ts";

const path = (name: string) => fileURLToPath(new URL(name, import.meta.url));
const peersConfig = path("../../tools/bench/deno.json");

/** A queue that is measured. */
export interface Rival {
  name: string;
  /** In words, for each way it is run. */
  settings: Record<How, string>;
  /** Arguments of `deno run`, before the command of contender.ts. */
  child: string[];
  /** Arguments of `deno run` for a worker that is no child: worker.ts. */
  worker?: Record<How, string[]>;
  /** The part of the jobs that it gets: a slow one has the same rate with fewer. */
  share?: number;
  /** When the first job was claimed, null before; and how many have not ended. */
  claimed: string;
  left: string;
  /** How many have ended, as the server's statistics count rows: cheap, and at most a second old. */
  ended?: string;
  /** How many were done at the first try; of what deletes them none are known. */
  done?: string;
  /** Makes a filled queue hold its jobs back, and lets go of them; a peer's workers start late instead. */
  hold?: string;
  release?: string;
}

const SIDING_BEST = ["--concurrency", "1000", "--poll-max-ms", "10"];

export const siding: Rival = {
  name: "Siding",
  settings: {
    best: `worker.ts ${SIDING_BEST.join(" ")}`,
    default: "worker.ts --concurrency 10",
  },
  child: [path("siding_child.ts")],
  worker: { best: SIDING_BEST, default: ["--concurrency", "10"] },
  claimed: "select min(claimed_at) from siding.jobs where status <> 'queued'",
  left: "select count(*) from siding.jobs where status not in ('done', 'failed')",
  done: "select count(*) from siding.jobs where status = 'done' and attempt = 1",
  ended:
    "select n_tup_upd / 2 from pg_stat_user_tables where schemaname = 'siding' and relname = 'jobs'",
  hold: "update siding.queues set paused = true",
  release: "update siding.queues set paused = false",
};

const peer = (name: string) => ["--config", peersConfig, path("../../tools/bench/peer.ts"), name];

export const peers: Rival[] = [
  {
    name: "graphile-worker",
    settings: {
      best: "localQueue 500, complete- and failJobBatchDelay 10, 500 at a time, preset",
      default: "its own, 10 at a time",
    },
    child: peer("graphile-worker"),
    claimed: "select min(locked_at) from graphile_worker._private_jobs",
    left: "select count(*) from graphile_worker._private_jobs", // what has ended is deleted
    ended: `select n_tup_del from pg_stat_user_tables
      where schemaname = 'graphile_worker' and relname = '_private_jobs'`,
  },
  {
    name: "pg-boss",
    settings: {
      best: "batchSize 2000, 1 worker a process, poll 0.5 s, burstWhenBatchFull, notify",
      default: "its own, 10 workers",
    },
    child: peer("pg-boss"),
    claimed: "select min(started_on) from pgboss.job where name = 'noop' and state <> 'created'",
    left: "select count(*) from pgboss.job where name = 'noop' and state < 'completed'",
    done: "select count(*) from pgboss.job where state = 'completed' and retry_count = 0",
    ended: `select coalesce(sum(n_tup_upd), 0) / 2 from pg_stat_user_tables
      where schemaname = 'pgboss' and relname like 'job%'`,
  },
  {
    name: "DBOS",
    settings: {
      best: "workerConcurrency 1000, minPollingIntervalMs 10, 20 connections",
      default: "its own, workerConcurrency 10",
    },
    child: peer("dbos"),
    share: 0.1,
    claimed: `select to_timestamp(min(started_at_epoch_ms) / 1000.0) from dbos.workflow_status
      where name = 'noop' and status <> 'ENQUEUED'`,
    left: `select count(*) from dbos.workflow_status
      where name = 'noop' and status in ('ENQUEUED', 'PENDING', 'DELAYED')`,
    done: "select count(*) from dbos.workflow_status where name = 'noop' and status = 'SUCCESS'",
  },
];

const flagName = ({ name }: Rival) => name.toLowerCase();

/** The flag that says which contenders take part. */
export const contenders = config.flag({
  parse: (text: string) => {
    const names = text.split(",");
    if (names.some((name) => ![siding, ...peers].some((it) => flagName(it) === name))) throw text;
    return names;
  },
  rule: `it must be of ${[siding, ...peers].map(flagName).join(",")}, with commas between`,
  fallback: [siding, ...peers].map(flagName),
  help: "who takes part",
});

/**
 * The contenders that are wanted; of the peers none where they cannot be installed.
 *
 * @returns also a line on why they are left out, or null
 */
export async function rivals(
  names: readonly string[],
  say: Say,
): Promise<{ all: Rival[]; leftOut: string | null }> {
  const all = [siding, ...peers].filter((it) => names.includes(flagName(it)));
  if (all.every((it) => it === siding)) return { all, leftOut: null };
  say("installing graphile-worker, pg-boss and DBOS into tools/bench/node_modules…");
  const { success, stderr } = await new Deno.Command(Deno.execPath(), {
    args: ["install", "--quiet", "--frozen", "--config", peersConfig],
    cwd: path("../../tools/bench/"),
    ...{ stdin: "null", stdout: "null", stderr: "piped" },
  }).output();
  if (success) return { all, leftOut: null };
  const why = new TextDecoder().decode(stderr).trim().split("\n")[0];
  return {
    all: all.filter((it) => it === siding),
    leftOut: `the peers are left out: they could not be installed: ${why}`,
  };
}

/** A process of a contender's. */
export interface Child extends AsyncDisposable {
  /** Has it go on. */
  tell(line: string): Promise<void>;
  /** The next thing that it says. @throws when it ends before, with what it said of that */
  // deno-lint-ignore no-explicit-any -- JSON
  heard(): Promise<any>;
}

/** How long a child may keep silent, and how long it may take to end. */
const SILENT_MS = 180_000;
const END_MS = 3000;

function spawn(args: string[], env: Record<string, string> = {}): Child {
  const process = new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", ...args],
    env: { NO_COLOR: "1", SIDING_END_WITH_PARENT: String(Deno.pid), ...env },
    ...{ stdin: "piped", stdout: "piped", stderr: "piped" },
  }).spawn();
  const stdin = process.stdin.getWriter();
  let errors = "";
  const reading = (async () => {
    for await (const text of process.stderr.pipeThrough(new TextDecoderStream())) {
      errors = (errors + text).slice(-4000);
    }
  })();
  const said = linesOf(process.stdout);
  return {
    tell: (line) => stdin.write(new TextEncoder().encode(`${line}\n`)),
    async heard() {
      const late = new AbortController();
      const timer = setTimeout(() => late.abort(), SILENT_MS);
      late.signal.addEventListener("abort", () => process.kill("SIGKILL"));
      const { value } = await said.next();
      clearTimeout(timer);
      if (value !== undefined) return JSON.parse(value);
      await reading;
      throw new Error(`${args.slice(-3, -1).join(" ")} ended early: ${errors.trim()}`);
    },
    async [Symbol.asyncDispose]() {
      await stdin.close().catch(() => {});
      const kill = (signal: Deno.Signal) => () => {
        try {
          process.kill(signal);
        } catch {
          // It has ended.
        }
      };
      if (args[0].endsWith("worker.ts")) kill("SIGTERM")();
      const timer = setTimeout(kill("SIGKILL"), END_MS);
      await said.return(undefined);
      await Promise.all([process.status, reading]);
      clearTimeout(timer);
    },
  };
}

async function* linesOf(stream: ReadableStream<Uint8Array>): AsyncGenerator<string, void> {
  let rest = "";
  for await (const text of stream.pipeThrough(new TextDecoderStream())) {
    const parts = (rest + text).split("\n");
    rest = parts.pop()!;
    yield* parts;
  }
}

/** Starts a child that obeys a command of contender.ts. */
export function child(rival: Rival, command: string, order: Partial<Order>): Child {
  return spawn([...rival.child, command, JSON.stringify(order)]);
}

/** A worker that is ready, and works once it is told to `start`. Siding's are held back by their queue. */
export async function worker(rival: Rival, url: string, how: How, flags?: string[]) {
  if (!rival.worker) {
    const it = child(rival, "work", { url, how });
    await it.heard();
    return it;
  }
  const kinds = ["--jobs", path("kinds.ts"), "--log-level", "error"];
  return spawn([path("../../worker.ts"), ...kinds, ...(flags ?? rival.worker[how])], {
    DATABASE_URL: url,
  });
}

/** A database with a contender's tables and, on wish, so many jobs, to be copied for each run. */
export async function template(
  server: BenchServer,
  rival: Rival,
  how: How,
  jobs: number,
): Promise<BenchDatabase> {
  const database = await server.database({ empty: true });
  const { url, sql } = database;
  try {
    for (const [command, order] of [["install", { url, how }], ["fill", { url, jobs }]] as const) {
      if (command === "fill" && jobs === 0) continue;
      await using it = child(rival, command, order);
      await it.heard();
    }
    await sql`create table bench_rows (id bigserial primary key, note text not null)`;
    if (rival.hold && jobs > 0) await sql.unsafe(rival.hold);
    await sql`vacuum analyze`;
    return database;
  } catch (error) {
    await database[Symbol.asyncDispose]();
    throw error;
  }
}

/** Waits for a condition in the database. */
export async function until(
  sql: Pool,
  condition: string,
  signal: AbortSignal,
  limitMs = 30_000,
): Promise<void> {
  const endMs = performance.now() + limitMs;
  for (;;) {
    signal.throwIfAborted();
    const [row] = await sql.unsafe(`select (${condition}) as met`);
    if (row.met) return;
    if (performance.now() > endMs) throw new Error(`not so within ${limitMs} ms: ${condition}`);
    await pause(20, signal);
  }
}
