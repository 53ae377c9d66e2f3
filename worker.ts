#!/usr/bin/env -S deno run --quiet --no-prompt -P=worker
/**
 * A worker: claims jobs, runs them, reports, finishes them, and takes back what silent workers left.
 *
 *     deno task worker                                   # one job at a time, of every queue and kind
 *     deno task worker --concurrency 10 --queues small
 *
 * Reads and writes: the queue's tables (DATABASE_URL), work folders in the temporary folder.
 *
 * Its loops: those of intake.ts claim jobs, which start() runs; those of lease.ts renew the leases of the jobs it
 * holds, hear of cancellations, and stop what cannot be renewed; tidy() recovers and sweeps; tick() enqueues
 * what is due by the schedules.
 *
 * Signals: the first SIGTERM or SIGINT stops claiming; running jobs have --drain-s to end, then
 * they are stopped and given back to the queue. A second one ends the process and its jobs at once.
 *
 * Exit codes: 0 after a stop; 1 failure, also when its row was removed because it was taken for
 * dead, or when its look for jobs hangs though its heartbeat lives; 2 usage; 3 the database
 * could not be reached at the start; 130 stopped by a second signal.
 */
import { hostname } from "node:os";
import { controllerBeside, startWatchdog } from "./beside.ts";
import * as config from "./config.ts";
import { checkSchema, codeOf, Database, describe, patient, pause } from "./db.ts";
import { type Kinds, loadKinds, Stop } from "./jobs/kind.ts";
import { sweepFolders } from "./jobs/process.ts";
import { idsStored, lookUpReviews } from "./jobs/paid.ts";
import { Outcomes } from "./jobs/outcomes.ts";
import { type Runner, runToEnd } from "./jobs/run.ts";
import { Intake } from "./intake.ts";
import { type Held, Leases } from "./lease.ts";
import * as processes from "./processes.ts";
import { keepSchedules, nextTickMs, type Stepped } from "./schedules.ts";
import { foldCredits, promoteDue, takeBack, tidyUp } from "./upkeep.ts";

const log = config.logger("worker");

/** How long a stopping worker tries to give its jobs back. */
export const GIVE_BACK_MS = 10_000;
/** How long a starting worker waits for the database. */
const START_MS = 30_000;
/**
 * The leader sweeps at every so many recoveries, so every five minutes; at the next one where it did
 * not get through (100,000 jobs at the most), so that it keeps up with 3,000 jobs a second.
 */
const PASSES_A_SWEEP = 10;

const program = {
  name: "worker",
  summary: "Claims jobs, runs them, and takes back what silent workers left.",
  example: "DATABASE_URL=postgres://… deno task worker --concurrency 2 --queues default",
  exits: {
    0: "after a stop",
    1: "failure; or it was taken for dead, or its look for jobs hung",
    3: "the database could not be reached at the start",
  },
};
/** All the shared settings are a worker's. */
const spec = {
  ...config.settings,
  controller: config.yes("run a controller beside it, for teams that want no service for that"),
};

interface Worker {
  settings: ReturnType<typeof config.configuration<typeof spec>>;
  kinds: Kinds;
  /** Claims, and what moves jobs; their files, which must not hold that up. */
  db: Database;
  files: Database;
  leases: Leases;
  outcomes: Outcomes;
  intake: Intake;
  /** Whether the last sweep left something to remove. */
  moreToSweep: boolean;
  /** Aborted when what is left to write has no more time. */
  hurry: AbortController;
}

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const worker = await boot(args, signal).catch((error) => {
    if (signal.aborted) return null; // stopped before it began
    throw error;
  });
  if (!worker) return 0;
  // What one job's function left to fail on its own must not end the others.
  config.surviveUncaught((error) =>
    log.error("a job's code left an error uncaught: {error}", { error: describe(error) })
  );
  const { leases, db, files } = worker;
  const over = new AbortController();
  let passes = 0;
  const watchdog = startWatchdog(worker.settings.leaseS);
  const loops = [
    config.repeat("heartbeat", () => leases.beat(), over.signal, () => leases.urgent),
    config.repeat("watch", () => (watchdog.postMessage({}), leases.watch()), over.signal),
    config.repeat("recovery", () => tidy(worker, passes++), over.signal),
    config.repeat("schedules", () => tick(worker), over.signal),
  ];
  if (worker.settings.controller) loops.push(controllerBeside(over.signal));
  const dead = leases.dead.signal;
  const noMore = AbortSignal.any([signal, dead]);
  const hung = new Promise((resolve) => dead.addEventListener("abort", resolve));
  await Promise.race([worker.intake.run(noMore), hung]);
  await drain(worker);
  watchdog.terminate();
  over.abort();
  await Promise.all(loops);
  if (!dead.aborted) {
    await leases.db.run((sql) => processes.deregister(sql, leases.bootId), 2000).catch(() => {});
  }
  await Promise.all([db.close(), files.close(), leases.db.close()]);
  log.info(dead.aborted ? `ended: ${dead.reason.message}` : "stopped");
  return dead.aborted ? 1 : 0;
}

async function boot(args: string[], signal: AbortSignal): Promise<Worker> {
  const settings = config.configuration(program, spec, args);
  const url = config.requireDatabase(settings.databaseUrl);
  await config.setUpLog(settings.logLevel);
  if (settings.leaseS * 1000 < 3 * settings.heartbeatMs) {
    throw new config.UsageError(
      `--lease-s is ${settings.leaseS}: it must be at least three times --heartbeat-ms, ` +
        `which is ${settings.heartbeatMs}`,
    );
  }
  if (settings.stallS * 1000 <= settings.statementLimitMs) {
    throw new config.UsageError(
      `--stall-s is ${settings.stallS}: it must be more than --statement-limit-ms, which is ` +
        `${settings.statementLimitMs}: a statement that takes its time is no hang`,
    );
  }
  const kinds = await loadKinds(settings.jobs).catch((error) => {
    throw new config.UsageError(`--jobs ${settings.jobs}: ${describe(error)}`);
  });
  const serves = settings.kinds ?? Object.keys(kinds);
  const missing = serves.find((name) => !Object.hasOwn(kinds, name));
  if (missing) throw new config.UsageError(`--kinds names "${missing}", which jobs.ts has not`);

  await sweepFolders();

  const name = Deno.env.get("RAILWAY_REPLICA_ID") ?? `${hostname()}-${Deno.pid}`;
  const options = { name: `siding worker ${name}`, prepare: settings.prepare };
  const db = new Database(url, { ...options, max: 2 }, settings.statementLimitMs);
  const files = new Database(url, { ...options, max: 1 }, settings.statementLimitMs);
  const pulse = new Database(url, { ...options, max: 1 }, settings.statementLimitMs);
  const patiently = patient(db, signal, START_MS);
  const behind = await patiently.run(checkSchema);
  if (behind > 0) log.warn("the database is {behind} migrations behind this code", { behind });
  const bootId = await patiently.run((sql) =>
    processes.register(sql, {
      role: "worker",
      pool: settings.pool,
      name,
      version: config.VERSION,
      queues: settings.queues,
      kinds: serves,
      knownKinds: Object.keys(kinds),
      inlineKinds: Object.keys(kinds).filter((name) => kinds[name].runs !== "process"),
      concurrency: settings.concurrency,
    })
  );
  config.identify({ worker: bootId });
  log.info("worker {name} {boot}, version {version}, serves {serves}", {
    ...{ name, boot: bootId.slice(0, 8), version: config.VERSION, serves },
  });
  const hurry = new AbortController();
  const { maxReleases, heldBackMs } = settings;
  const outcomes = new Outcomes(db, bootId, hurry.signal, maxReleases, heldBackMs);
  const leases = new Leases(pulse, bootId, settings.heartbeatMs, settings.leaseS, settings.stallS);
  const worker: Worker = {
    ...{ settings, kinds, db, files, leases, outcomes, hurry, moreToSweep: false },
    intake: new Intake(
      settings,
      serves,
      db,
      leases,
      outcomes,
      (held) => start(worker, held),
    ),
  };
  return worker;
}

/** Runs a job to its end, besides everything else. */
function start(worker: Worker, held: Held): void {
  const { leases, intake, db, files, kinds } = worker;
  const runner: Runner = {
    ...{ db, files, worker: leases.bootId, kinds },
    maxFileBytes: worker.settings.maxFileBytes,
    lease: {
      graceS: leases.graceS,
      onRenewal: (tell) => leases.onRenewal(held, tell),
      assertMine: () => leases.assertMine(held),
    },
    report: (stage, progress) => leases.report(held, stage, progress),
  };
  const ran = () => intake.ran();
  held.ended = runToEnd(runner, held.job, held.stopper, worker.outcomes, ran).finally(() => {
    leases.drop(held);
    intake.ended();
  });
}

/** Takes back what silent workers left, folds credits; the leader removes what is no longer needed. */
async function tidy(worker: Worker, pass: number): Promise<number> {
  const { settings, db, kinds, leases } = worker;
  if (!leases.inTouch()) return Math.min(settings.recoverMs, settings.heartbeatMs);
  for (const job of await takeBack(db, settings.maxCrashes)) {
    log.warn("recovered job {job} {kind}: {status}", { ...job, job: job.id });
  }
  await promoteDue(db);
  if (leases.leader) {
    for (const id of (await lookUpReviews(db, kinds, settings.lookUpS)).found) {
      log.warn("job {job}: its service has its request, from which it goes on", { job: id });
    }
  }
  if (leases.leader && (worker.moreToSweep || pass % PASSES_A_SWEEP === 0)) {
    const { unknown, more } = await tidyUp(db, { ...settings, silentS: leases.silentS });
    worker.moreToSweep = more;
    for (const job of unknown) log.warn("job {job}: unknown kind {kind}", { ...job, job: job.id });
  }
  await foldCredits(db);
  return settings.recoverMs;
}

/** The leader enqueues what is due by the schedules. */
async function tick({ settings, db, kinds, leases }: Worker): Promise<number> {
  let stepped: Stepped[] = [];
  let nextMs = Infinity;
  try {
    if (leases.leader) {
      stepped = await keepSchedules(db, kinds, leases.silentS);
      nextMs = await nextTickMs(db);
    }
  } catch (error) {
    if (codeOf(error) !== "42883") throw error;
    return settings.recoverMs; // a database that is behind has no such function: the start said so
  }
  for (const { name, outcome, job_id, error } of stepped) {
    if (outcome === "enqueued") log.info("schedule {name}: job {job}", { name, job: job_id });
    if (outcome === "skipped") log.info("schedule {name}: missed, and skipped", { name });
    if (outcome === "failed") log.warn("schedule {name}: {error}", { name, error });
  }
  // At the tick; and often enough for a schedule that is made or changed meanwhile. What is due all the
  // same is of a kind that is left to other workers.
  return Math.min(settings.heartbeatMs, nextMs > 0 ? Math.max(100, nextMs) : settings.pollMaxMs);
}

/** Lets running jobs end, stops those that did not in time, and sees their outcomes written. */
async function drain({ leases, intake, settings: { drainS }, hurry }: Worker): Promise<void> {
  const { held, dead } = leases;
  intake.giveBack();
  const rest = () => Promise.all([...held.values()].map(({ ended }) => ended));
  if (held.size > 0 && !dead.signal.aborted) {
    log.info("stopping: {n} jobs have {drainS} s to end", { n: held.size, drainS });
    const enough = new AbortController();
    await Promise.race([rest(), pause(drainS * 1000, enough.signal, dead.signal)]);
    enough.abort();
  }
  const reason = dead.signal.reason ?? new Stop("released", "its worker was stopped");
  for (const { stopper } of held.values()) stopper.stop(reason);
  // First what is worth money, however long it takes: the platform ends what it will not wait for.
  await idsStored();
  const timer = setTimeout(() => hurry.abort(), GIVE_BACK_MS);
  await rest();
  clearTimeout(timer);
}

if (import.meta.main) await config.runMain("worker", main);
