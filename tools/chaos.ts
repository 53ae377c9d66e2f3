#!/usr/bin/env -S deno run -A
/**
 * Shows that nothing is lost and nothing is paid for twice: real workers on a real Postgres, free,
 * inline and paid jobs, and faults drawn from a seed, for so many minutes; then everything is mended,
 * the queue runs empty, and every job, write, charge and credit is checked.
 *
 *     deno task chaos --minutes 1 --seed 7
 *     deno task chaos --minutes 600 --json
 *
 * Leases are 3 s, so that minutes show what days would. The same seed draws the same jobs and faults
 * at the same times; what processes make of them differs from run to run.
 *
 * Exit codes: 0 all holds; 1 something is off, with the history of each job concerned; 2 usage.
 */
import { existsSync } from "node:fs";
import { readlink, rm } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import * as config from "../config.ts";
import { deposit } from "../credits.ts";
import { Database, describe, patient, pause, type Pool, schema } from "../db.ts";
import { type BandService, moods, startBandService } from "../dev/band_service.ts";
import {
  type Book,
  findProblems,
  historyOf,
  installRecorder,
  overlaps,
  type Problem,
} from "../dev/chaos/checks.ts";
import { drawFaults, type Fault, faultKinds, random } from "../dev/chaos/faults.ts";
import { type Postgres, startPostgres } from "../dev/postgres.ts";
import { type Proxy, startProxy } from "../dev/proxy.ts";
import { isAlive, type Script, skewedClock, startScript } from "../dev/scripts.ts";
import { writeFile } from "../files.ts";
import { sweepFolders } from "../jobs/process.ts";
import { migrate } from "../migrate.ts";
import * as queue from "../queue.ts";

const LEASE_MS = 3000;
/** How long the queue may take to run empty once all is mended. */
const QUIET_MS = 120_000;
/** How long the last processes of jobs may take to end. */
const ENDING_MS = 15_000;
const PROGRESS_MS = 5000;
/** Between two jobs, about. */
const JOB_EVERY_MS = 250;
/** Where jobs note, in the workers' temporary folder, that they are at work. */
const EFFECTS = "effects";
const JOBS = ["free", "quick", "quick", "flaky", "chain", "band", "band"];
const OWNERS = ["ann", "bob", "cyd", "poor"];

const workerFlags = [
  ...["--jobs", fileURLToPath(new URL("../dev/chaos/kinds.ts", import.meta.url))],
  ...["--concurrency", "3", "--poll-max-ms", "200", "--heartbeat-ms", "300"],
  ...["--lease-s", String(LEASE_MS / 1000), "--recover-ms", "500", "--look-up-s", "1"],
  ...["--statement-limit-ms", "1500", "--drain-s", "1", "--stall-s", "20"],
  ...["--max-crashes", "4", "--max-releases", "20"],
];

const program = {
  name: "chaos",
  summary: "Breaks everything that can break, and checks that nothing is lost or paid for twice.",
  example: "deno task chaos --minutes 10 --seed 42",
  exits: { 0: "all holds", 1: "something is off, or failure", 3: null },
};
const spec = {
  minutes: config.flag(config.int(1, 1, 100_000, "how long faults come")),
  seed: config.flag(config.int(1, 0, 2 ** 32 - 1, "what draws the jobs and the faults")),
  workers: config.flag(config.int(4, 1, 64, "how many workers")),
  json: config.flag(config.yes("print one JSON object instead of text")),
};

/** A place for a worker: whoever is in it ends, a new one follows. */
interface Slot {
  number: number;
  proxy: Proxy;
  boots: number;
  script: Script | null;
  /** Of all who were here. */
  logs: string[];
}

interface World {
  folder: string;
  dataDir: string;
  server: Postgres;
  /** The database's URL; it stays the same when Postgres comes back. */
  url: string;
  /** The tool's own way to the database. */
  db: Database;
  service: BandService;
  serviceProxy: Proxy;
  slots: Slot[];
  draw: () => number;
  book: Book;
  /** How often each thing happened. */
  counts: Record<string, number>;
  /** Resolves when Postgres is there: two faults of it do not mix. */
  postgres: Promise<void>;
}

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const { minutes, seed } = settings;
  const say = (line: string) => Deno.stderr.writeSync(new TextEncoder().encode(`${line}\n`));
  const world = await begin(seed, settings.workers);
  const startedMs = performance.now();
  const noMoreWorkers = new AbortController();
  const keeping = world.slots.map((slot) => keepWorker(world, slot, noMoreWorkers.signal));
  try {
    say(`PostgreSQL ${world.server.version}, ${settings.workers} workers, seed ${seed}`);
    const over = AbortSignal.any([signal, AbortSignal.timeout(minutes * 60_000)]);
    const faults = drawFaults(random(seed), minutes * 60_000, settings.workers);
    await Promise.all([
      applyFaults(world, faults, over),
      enqueueJobs(world, over),
      reportProgress(world, startedMs, say, over),
    ]);
    say("faults are over: mending, and letting the queue run empty");
    await mend(world);
    await runEmpty(world, signal);
    noMoreWorkers.abort();
    await Promise.all(keeping);
    const problems = await verify(world);
    const report = { seed, minutes, ...await tally(world), problems };
    console.log(settings.json ? JSON.stringify(report) : textOf(report));
    if (problems.length > 0) await tellHistories(world, problems, say);
    return problems.length === 0 ? 0 : 1;
  } finally {
    noMoreWorkers.abort();
    for (const { script } of world.slots) script?.kill("SIGKILL");
    await Promise.all(keeping);
    await end(world);
  }
}

async function begin(seed: number, workers: number): Promise<World> {
  const folder = await Deno.makeTempDir({ prefix: "siding-chaos-" });
  const dataDir = await Deno.makeTempDir({ prefix: "siding-chaos-data-" });
  const server = await startPostgres({ dataDir });
  const { url } = server;
  await migrate(url);
  const db = new Database(url, { name: "chaos", max: 4 }, 5000);
  await db.run(installRecorder);
  for (const owner of OWNERS) {
    await db.run((sql) => deposit(sql, owner, owner === "poor" ? 20 : 1_000_000));
  }
  // It charges twice for what is sent twice, and leaves some time between a charge and its reply.
  const service = await startBandService({
    ...{ workMs: 500, replyMs: 600, slowMs: 1500, honoursKeys: false },
  });
  return {
    ...{ folder, dataDir, server, url, db, service },
    serviceProxy: startProxy(service.url),
    slots: Array.from({ length: workers }, (_, number) => ({
      ...{ number, proxy: startProxy(url), boots: 0, script: null, logs: [] },
    })),
    draw: random(seed + 1),
    book: { stands: new Set(), never: new Set() },
    counts: {},
    postgres: Promise.resolve(),
  };
}

async function end(world: World): Promise<void> {
  await world.postgres.catch(() => {});
  await world.db.close();
  for (const { proxy } of world.slots) await proxy[Symbol.asyncDispose]();
  await world.serviceProxy[Symbol.asyncDispose]();
  await world.service[Symbol.asyncDispose]();
  await world.server.stop();
  for (const path of [world.folder, world.dataDir]) {
    await rm(path, { recursive: true, force: true });
  }
}

function count(world: World, what: string): void {
  world.counts[what] = (world.counts[what] ?? 0) + 1;
}

/** Has a worker in the slot until the signal; every second one's clock is off by up to ten minutes. */
async function keepWorker(world: World, slot: Slot, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    const boot = ++slot.boots;
    const skewMs = boot % 2
      ? 0
      : Math.round((random(slot.number * 1000 + boot)() - 0.5) * 1_200_000);
    if (skewMs) count(world, "skewed clocks");
    const env = {
      DATABASE_URL: slot.proxy.url,
      SIDING_BAND_URL: world.serviceProxy.url,
      RAILWAY_REPLICA_ID: `chaos-${slot.number}-${boot}`,
      TMPDIR: world.folder,
    };
    const script = startScript("worker.ts", workerFlags, env, skewMs ? skewedClock(skewMs) : []);
    slot.script = script;
    const stop = () => script.kill("SIGTERM");
    signal.addEventListener("abort", stop);
    const code = await script.ended;
    signal.removeEventListener("abort", stop);
    slot.logs.push(
      `-- worker ${slot.number}-${boot}, clock off by ${skewMs} ms, exit code ${code}`,
    );
    slot.logs.push(script.log());
    count(world, `workers that ended with ${code}`);
    await pause(100, signal);
  }
  slot.script = null;
}

/** Applies the faults at their times; one that lasts goes on beside the next ones. */
async function applyFaults(world: World, faults: Fault[], over: AbortSignal): Promise<void> {
  const startedMs = performance.now();
  const underWay: Promise<unknown>[] = [];
  for (const fault of faults) {
    await pause(fault.atMs - (performance.now() - startedMs), over);
    if (over.aborted) break;
    count(world, fault.kind);
    underWay.push(
      apply(world, fault).catch((error) => {
        throw new Error(`fault ${fault.kind}: ${describe(error)}`, { cause: error });
      }),
    );
  }
  await Promise.all(underWay);
}

async function apply(world: World, { kind, slot: number, size }: Fault): Promise<void> {
  const { proxy, script } = world.slots[number];
  const forMs = (least: number, most: number) => pause(least + size * (most - least));
  switch (kind) {
    case "kill":
      return script?.kill("SIGKILL");
    case "term":
      return script?.kill("SIGTERM");
    case "freeze":
    case "hiccup":
      script?.kill("SIGSTOP");
      await (kind === "freeze"
        ? forMs(1.2 * LEASE_MS, 2.5 * LEASE_MS)
        : forMs(100, 0.5 * LEASE_MS));
      return script?.kill("SIGCONT");
    case "cut":
      proxy.cut();
      await forMs(100, 2.5 * LEASE_MS);
      return proxy.mend();
    case "reset":
      return proxy.reset();
    case "silence":
      proxy.silence();
      await forMs(100, 2.5 * LEASE_MS);
      return proxy.mend();
    case "restart":
      return await restartPostgres(world, "SIGINT", 0);
    case "crash":
      return await restartPostgres(world, "SIGQUIT", size * 2 * LEASE_MS);
    case "mood":
      return setMood(world, size);
    case "unreachable":
      world.serviceProxy.cut();
      await forMs(100, 2 * LEASE_MS);
      return world.serviceProxy.mend();
  }
}

/** Ends Postgres by a signal, and starts it again after a while. */
function restartPostgres(world: World, signal: Deno.Signal, awayMs: number): Promise<void> {
  world.postgres = world.postgres.then(async () => {
    const { server } = world;
    Deno.kill(server.pid, signal);
    await server.stop();
    await pause(awayMs);
    world.server = await startPostgres({ dataDir: world.dataDir });
    if (world.server.url !== world.url) throw new Error("Postgres came back at another address");
  });
  return world.postgres;
}

function setMood(world: World, size: number): void {
  const [, ...bad] = moods; // the first is fine
  const mood = bad[Math.floor(size * bad.length)];
  world.service.setMood(mood, 4);
  count(world, `mood ${mood}`);
}

/** Enqueues jobs of all kinds, in all the ways there are. */
async function enqueueJobs(world: World, over: AbortSignal): Promise<void> {
  const { draw } = world;
  const underWay: Promise<unknown>[] = [];
  for (let n = 1; !over.aborted; n++) {
    // All that is drawn is drawn here, before anything waits: the order is the seed's.
    const kind = JOBS[Math.floor(draw() * JOBS.length)];
    // Some outlast a lease, so that it can be lost under them.
    const ms = Math.round(draw() < 0.15 ? 3000 + draw() * 6000 : draw() * 1500);
    const plan = { n, kind, ms, how: draw(), cancel: draw() };
    const owner = OWNERS[Math.floor(draw() * OWNERS.length)];
    const delay_s = draw() < 0.2 ? draw() * 5 : 0;
    const price = kind === "band" || draw() < 0.5 ? 1 + Math.floor(draw() * 9) : undefined;
    underWay.push(enqueueOne(world, plan, { owner, delay_s, price }));
    await pause(draw() * 2 * JOB_EVERY_MS, over);
  }
  await Promise.all(underWay);
}

async function enqueueOne(
  world: World,
  { n, kind, ms, how, cancel }: {
    n: number;
    kind: string;
    ms: number;
    how: number;
    cancel: number;
  },
  options: Partial<queue.NewJob>,
): Promise<void> {
  const { db, book } = world;
  const job: queue.NewJob = kind === "band"
    ? { kind, payload: { title: `Job ${n}` }, unique_key: String(n), ...options }
    : { kind, payload: { n, ms }, ...options };
  try {
    if (kind === "band") {
      const recording = new Blob([`recording ${n}`]).stream();
      job.files = [(await writeFile(patient(db, NEVER, 30_000), "take.wav", recording, 1000)).id];
    }
    if (how < 0.1) return await rollBack(world, n, job);
    const [{ id }] = await db.run((sql) => queue.enqueue(sql, [job]));
    book.stands.add(n);
    count(world, "enqueued");
    if (cancel < 0.1) {
      await pause(cancel * 30_000);
      await patient(db, NEVER, 30_000).run((sql) => queue.cancel(sql, id));
      count(world, "asked to cancel");
    }
  } catch (error) {
    if (error instanceof queue.EnqueueError) {
      book.never.add(n);
      count(world, "refused for want of credits");
      if (error.code !== "SD402") throw error;
    } else if (error instanceof queue.Refused) {
      count(world, "refused to cancel");
    } else {
      count(world, "enqueued, perhaps: the reply was lost"); // who is in doubt looks; we do in the end
    }
  }
}
const NEVER = new AbortController().signal;

/** Enqueues in a transaction that is undone after it: two statements in one string are one. */
async function rollBack(world: World, n: number, job: queue.NewJob): Promise<void> {
  world.book.never.add(n);
  const jobs = JSON.stringify([job]).replaceAll("'", "''");
  const undone = `select "${schema}".enqueue('${jobs}'::jsonb); select 1 / 0`;
  await world.db.run((sql) => sql.unsafe(undone).simple()).catch(() => {});
  count(world, "rolled back");
}

async function reportProgress(
  world: World,
  startedMs: number,
  say: (line: string) => void,
  over: AbortSignal,
): Promise<void> {
  for (;;) {
    await pause(PROGRESS_MS, over);
    if (over.aborted) return;
    const seconds = Math.round((performance.now() - startedMs) / 1000);
    const faults = faultKinds.reduce((sum, kind) => sum + (world.counts[kind] ?? 0), 0);
    const states = await statesOf(world.db).catch(() => null);
    say(`${String(seconds).padStart(5)} s  ${faults} faults, ${states ?? "Postgres is away"}`);
  }
}

async function statesOf(db: Database): Promise<string> {
  const rows = await db.run((sql) =>
    sql<{ status: string; n: number }[]>`
    select status, count(*)::integer as n from ${sql(schema)}.jobs group by 1 order by 1`
  );
  return rows.map(({ status, n }) => `${n} ${status}`).join(", ") || "no job";
}

/** Puts everything right again. */
async function mend(world: World): Promise<void> {
  await world.postgres;
  world.service.setMood("fine");
  world.serviceProxy.mend();
  for (const { proxy, script } of world.slots) {
    proxy.mend();
    script?.kill("SIGCONT");
  }
}

/** Waits until nothing is waiting or running, and no paid request that the service has waits in review. */
async function runEmpty(world: World, signal: AbortSignal): Promise<void> {
  const endMs = performance.now() + QUIET_MS;
  const open = async (sql: Pool) => {
    const keys = world.service.charges().filter(({ charges }) => charges > 0).map(({ key }) => key);
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs
      where status in ('scheduled', 'queued', 'running')
        or (status = 'review' and request_key::text = any(string_to_array(${keys.join()}, ',')))`;
    return n;
  };
  const db = patient(world.db, signal, QUIET_MS);
  while (await db.run(open) > 0 && performance.now() < endMs) {
    await pause(200, signal);
    signal.throwIfAborted();
  }
}

async function verify(world: World): Promise<Problem[]> {
  const { db, book, service, folder } = world;
  const effects = await Deno.readTextFile(join(folder, EFFECTS)).catch(() => "");
  await rm(join(folder, EFFECTS), { force: true });
  const problems = [
    ...await db.run((sql) => findProblems(sql, book, service.charges()), 60_000),
    ...overlaps(effects),
  ];
  // The processes of jobs end with their workers; their folders go then, or at the next one's start.
  const endMs = performance.now() + ENDING_MS;
  let left = await processesIn(folder);
  while (left.length > 0 && performance.now() < endMs) {
    await pause(100);
    left = await processesIn(folder);
  }
  for (const what of left) problems.push({ job: null, what: `process ${what} is left` });
  await sweepFolders(folder);
  for (const { name } of Deno.readDirSync(folder)) {
    problems.push({ job: null, what: `folder ${name} is left` });
  }
  return problems;
}

/** Who works in a folder, or in one of those in it. */
async function processesIn(folder: string): Promise<string[]> {
  const home = await Deno.realPath(folder);
  const found: string[] = [];
  for (const { name } of Deno.readDirSync("/proc")) {
    if (!/^\d+$/.test(name) || !existsSync(`/proc/${name}/cwd`)) continue;
    const cwd = await readlink(`/proc/${name}/cwd`).catch(() => "");
    if (cwd.startsWith(join(home, "/")) && isAlive(Number(name))) found.push(`${name} in ${cwd}`);
  }
  return found;
}

async function tally({ db, service, counts }: World) {
  const jobs = await db.run((sql) =>
    sql<{ kind: string; status: string; n: number }[]>`
    select kind, status, count(*)::integer as n from ${
      sql(schema)
    }.jobs group by 1, 2 order by 1, 2`
  );
  const [lost] = await db.run((sql) =>
    sql`select sum(crashes)::integer as crashes, sum(releases)::integer as releases,
      sum(failures)::integer as failures from ${sql(schema)}.jobs`
  );
  const charges = service.charges();
  return {
    counts,
    jobs: Array.from(jobs),
    attempts: { ...lost },
    paid: {
      calls: charges.reduce((sum, charge) => sum + charge.calls, 0),
      charges: charges.reduce((sum, charge) => sum + charge.charges, 0),
      most_charges_of_a_job: Math.max(0, ...charges.map((charge) => charge.charges)),
    },
  };
}

type Report =
  & { seed: number; minutes: number; problems: Problem[] }
  & Awaited<ReturnType<typeof tally>>;

function textOf({ counts, jobs, attempts, paid, problems, seed, minutes }: Report): string {
  const line = (name: string, value: unknown) => `  ${String(value).padStart(6)}  ${name}`;
  return [
    `${minutes} minutes of seed ${seed}`,
    ...Object.entries(counts).sort().map(([name, n]) => line(name, n)),
    "became of jobs",
    ...jobs.map(({ kind, status, n }) => line(`${kind} ${status}`, n)),
    "attempts that ended early",
    ...Object.entries(attempts).map(([name, n]) => line(name, n)),
    "paid for",
    ...Object.entries(paid).map(([name, n]) => line(name.replaceAll("_", " "), n)),
    problems.length === 0 ? "all holds" : `${problems.length} things are off:`,
    ...problems.map(({ job, what }) => `  job ${job ?? "-"}: ${what}`),
  ].join("\n");
}

/** The whole history of each job that is off, and what workers said of it. */
async function tellHistories(world: World, problems: Problem[], say: (line: string) => void) {
  const ids = new Set(problems.flatMap(({ job }) => job ?? []));
  for (const id of [...ids].slice(0, 20)) {
    say(`\nthe history of job ${id}`);
    for (const line of await world.db.run((sql) => historyOf(sql, id))) say(`  ${line}`);
    for (const line of world.slots.flatMap(({ logs }) => logs).join("\n").split("\n")) {
      if (line.startsWith("--") || new RegExp(`\\bjob ${id}\\b`).test(line)) say(`  ${line}`);
    }
  }
}

if (import.meta.main) await config.runMain("chaos", main);
