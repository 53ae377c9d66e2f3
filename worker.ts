#!/usr/bin/env -S deno run -A
/**
 * A worker: claims jobs, runs them, reports, finishes them, and takes back what silent workers left.
 *
 *     deno task worker                                   # one job at a time, of every queue and kind
 *     deno task worker --concurrency 10 --queues small
 *
 * Reads and writes: the queue's tables (DATABASE_URL), work folders in the temporary folder.
 *
 * Four loops: work() claims and starts jobs; beat() renews the leases and hears of cancellations;
 * watch() stops jobs whose lease is about to end unrenewed; tidy() recovers and sweeps.
 *
 * Signals: the first SIGTERM or SIGINT stops claiming; running jobs have --drain-s to end, then
 * they are stopped and given back to the queue. A second one ends the process and its jobs at once.
 *
 * Exit codes: 0 after a stop; 1 failure, also when its row was removed because it was taken for
 * dead; 2 usage; 3 the database could not be reached at the start; 130 stopped by a second signal.
 */
import { hostname } from "node:os";
import * as config from "./config.ts";
import { checkSchema, Database, describe, isDisconnect, patient, pause } from "./db.ts";
import { type Kinds, loadKinds, Stop } from "./jobs/kind.ts";
import { sweepFolders } from "./jobs/process.ts";
import { runToEnd } from "./jobs/run.ts";
import * as queue from "./queue.ts";

const log = config.logger("worker");

/** How often a running job's cancellation is asked for, and a new stage told. */
const TICK_MS = 2000;
/** How long a stopping worker tries to give its jobs back. */
const GIVE_BACK_MS = 10_000;
/** How long a starting worker waits for the database. */
const START_MS = 30_000;
/** The leader sweeps at every so many recoveries, so every five minutes: so many rows at a time, so often. */
const PASSES_A_SWEEP = 10;
const SWEEP = 1000;
const MAX_SWEEPS = 100;

const program = {
  name: "worker",
  summary: "Claims jobs, runs them, and takes back what silent workers left.",
  example: "DATABASE_URL=postgres://… deno task worker --concurrency 2 --queues default",
};
/** All the shared settings are a worker's. */
const spec = config.settings;

/** A job under way. */
interface Running {
  job: queue.Job;
  stop: AbortController;
  stage: string | null;
  progress: number | null;
  /** When the renewal that last succeeded was sent, by this process's monotonic clock. */
  renewedAtMs: number;
  /** Told of each renewal: the guard of the job's process. */
  tell: (leftS: number) => void;
  ended: Promise<void>;
}

interface Worker {
  settings: ReturnType<typeof config.configuration<typeof spec>>;
  kinds: Kinds;
  /** The names of the kinds it claims. */
  serves: string[];
  /** Claims, and what moves jobs; their files, which must not hold that up. */
  db: Database;
  files: Database;
  /** The heartbeat's own connection: nothing that waits can stand before it. */
  pulse: Database;
  bootId: string;
  running: Map<string, Running>;
  /** The tokens of claims that ended in an error, and may have taken jobs all the same, and when. */
  lostClaims: Map<string, number>;
  /** Aborted when a job has ended, since there is room for the next; a new one each step. */
  roomMade: AbortController;
  /** Queues whose claim came back empty or failed: how often in a row, and until when to leave them. */
  misses: Map<string, { count: number; untilMs: number }>;
  leader: boolean;
  /** Passes of tidy(). */
  passes: number;
  /** The last heartbeat sent that succeeded, and the first of the unbroken run of them. */
  lastBeatMs: number;
  inTouchSinceMs: number | undefined;
  /** A stage was reached that no heartbeat has told. */
  news: boolean;
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
  for (const kind of ["unhandledrejection", "error"] as const) {
    addEventListener(kind, (event) => {
      event.preventDefault();
      const error = describe("reason" in event ? event.reason : (event as ErrorEvent).error);
      log.error("a job's code left an error uncaught: {error}", { error });
    });
  }
  const over = new AbortController();
  const lost = new AbortController();
  const helpers = [
    config.repeat("heartbeat", () => beat(worker, lost), over.signal),
    config.repeat("watch", () => watch(worker), over.signal),
    config.repeat("recovery", () => tidy(worker), over.signal),
  ];
  const noMore = AbortSignal.any([signal, lost.signal]);
  await config.repeat("claim", () => work(worker), noMore, () => worker.roomMade.signal);
  await drain(worker, lost.signal.aborted);
  over.abort();
  await Promise.all(helpers);
  if (!lost.signal.aborted) {
    await worker.pulse.run((sql) => queue.deregister(sql, worker.bootId), 2000).catch(() => {});
  }
  await Promise.all([worker.db.close(), worker.files.close(), worker.pulse.close()]);
  log.info(lost.signal.aborted ? "ended: it was taken for dead" : "stopped");
  return lost.signal.aborted ? 1 : 0;
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
  const kinds = await loadKinds(settings.jobs).catch((error) => {
    throw new config.UsageError(`--jobs ${settings.jobs}: ${describe(error)}`);
  });
  const serves = settings.kinds ?? Object.keys(kinds);
  const missing = serves.find((name) => !Object.hasOwn(kinds, name));
  if (missing) throw new config.UsageError(`--kinds names "${missing}", which jobs.ts has not`);

  await sweepFolders();

  const name = Deno.env.get("RAILWAY_REPLICA_ID") ?? `${hostname()}-${Deno.pid}`;
  const options = { name: "siding worker", prepare: settings.prepare };
  const db = new Database(url, { ...options, max: 2 }, settings.statementLimitMs);
  const files = new Database(url, { ...options, max: 1 }, settings.statementLimitMs);
  const pulse = new Database(url, { ...options, max: 1 }, settings.statementLimitMs);
  const start = patient(db, signal, START_MS);
  const behind = await start.run(checkSchema);
  if (behind > 0) log.warn("the database is {behind} migrations behind this code", { behind });
  const bootId = await start.run((sql) =>
    queue.register(sql, {
      role: "worker",
      name,
      version: config.VERSION,
      queues: settings.queues,
      kinds: serves,
      knownKinds: Object.keys(kinds),
      concurrency: settings.concurrency,
    })
  );
  log.info("worker {name} {boot} serves {serves}", { name, boot: bootId.slice(0, 8), serves });
  return {
    ...{
      settings,
      kinds,
      serves,
      db,
      files,
      pulse,
      bootId,
      running: new Map(),
      lostClaims: new Map(),
    },
    ...{ roomMade: new AbortController(), misses: new Map(), leader: false, passes: 0 },
    ...{ lastBeatMs: -Infinity, inTouchSinceMs: undefined, news: false },
    hurry: new AbortController(),
  };
}

/** One look and, when there is something, one claim. @returns milliseconds until the next */
async function work(worker: Worker): Promise<number> {
  const { settings, serves, db } = worker;
  const room = settings.concurrency - worker.running.size;
  worker.roomMade = new AbortController();
  if (room <= 0) return settings.pollMaxMs;
  const { ready, promotable } = await db.run((sql) => queue.look(sql, settings.queues, serves));
  // None moved: somebody's open transaction holds them, which is no reason to wait with the others.
  if (promotable && await db.run((sql) => queue.promote(sql)) > 0) return 0;
  // A queue that is locked, or whose next job is, must not keep the worker from the others.
  const open = ready.filter(({ queue }) =>
    !(performance.now() < (worker.misses.get(queue)?.untilMs ?? 0))
  );
  for (const candidate of open) {
    if (await claimFrom(worker, candidate, room) > 0) return 0;
  }
  if (ready.length === 0) return jitter(settings.pollMaxMs);
  const soonestMs = Math.min(...ready.map(({ queue }) => worker.misses.get(queue)?.untilMs ?? 0));
  return Math.max(10, Math.min(settings.pollMaxMs, soonestMs - performance.now()));
}

/** Claims from one queue and starts what it got. @returns how many */
async function claimFrom(worker: Worker, from: queue.Ready, room: number): Promise<number> {
  const { settings, db, misses } = worker;
  const token = crypto.randomUUID();
  const sentAtMs = performance.now();
  const options = { worker: worker.bootId, kinds: worker.serves, most: room, token };
  const count = (misses.get(from.queue)?.count ?? 0) + 1;
  // Others were faster, or hold what was seen: further and further apart, not all at once again.
  let pauseMs = Math.min(settings.pollMaxMs, 10 * 2 ** Math.min(count, 10));
  let jobs: queue.Job[] = [];
  try {
    jobs = await db.run((sql) => queue.claim(sql, from, { ...options, leaseS: settings.leaseS }));
  } catch (error) {
    if (isDisconnect(error)) worker.lostClaims.set(token, sentAtMs);
    log.warn("claim from {queue}: {error}", { queue: from.queue, error: describe(error) });
    pauseMs = settings.pollMaxMs * Math.min(count, 5);
  }
  for (const job of jobs) start(worker, job, sentAtMs);
  if (jobs.length > 0) misses.delete(from.queue);
  else misses.set(from.queue, { count, untilMs: performance.now() + jitter(pauseMs) });
  return jobs.length;
}

/** So that workers which started together do not ask together. */
const jitter = (ms: number) => ms * (0.8 + Math.random() * 0.4);

/** Runs a claimed job to its end, besides everything else. */
function start(worker: Worker, job: queue.Job, sentAtMs: number): void {
  const running: Running = {
    ...{ job, stop: new AbortController(), stage: null, progress: null, renewedAtMs: sentAtMs },
    ...{ tell: () => {}, ended: Promise.resolve() },
  };
  // After a failover that lost its last transactions an id can come again, as another job's.
  stop(worker.running.get(job.id), "lost", "its id is another job's");
  worker.running.set(job.id, running);
  const runner = {
    ...{ db: worker.db, files: worker.files, worker: worker.bootId, kinds: worker.kinds },
    maxFileBytes: worker.settings.maxFileBytes,
    onLease: (tell: (leftS: number) => void) => {
      running.tell = tell;
      tell(guardedS(worker, running));
      return () => running.tell = () => {};
    },
    report: (stage?: string, progress?: number) => {
      running.stage = stage ?? running.stage;
      running.progress = progress ?? running.progress;
      worker.news = true;
    },
  };
  running.ended = runToEnd(runner, job, running.stop.signal, worker.hurry.signal).finally(() => {
    if (worker.running.get(job.id) === running) worker.running.delete(job.id);
    worker.roomMade.abort();
  });
}

/** Before the lease ends: a worker stops its job so long before, its guard half as long. */
const marginS = (worker: Worker) => Math.min(20, worker.settings.leaseS / 6);

/** Seconds after which the guard ends the job, should no renewal come. */
const guardedS = (worker: Worker, { renewedAtMs }: Running) =>
  worker.settings.leaseS - marginS(worker) / 2 - (performance.now() - renewedAtMs) / 1000;

function stop(running: Running | undefined, why: Stop["why"], message: string): void {
  running?.stop.abort(new Stop(why, message));
}

/** Renews what runs, every --heartbeat-ms and when a stage was reached; else hears of cancellations. */
async function beat(worker: Worker, lost: AbortController): Promise<number> {
  const { settings, bootId, running } = worker;
  const tickMs = Math.min(TICK_MS, settings.heartbeatMs);
  const nowMs = performance.now();
  const dueMs = worker.lastBeatMs + settings.heartbeatMs - nowMs;
  if (dueMs > 0 && !worker.news) {
    if (running.size > 0) {
      const ids = await worker.pulse.run((sql) => queue.cancellations(sql, bootId));
      for (const id of ids) stop(running.get(id), "cancelled", "cancelled");
    }
    return Math.min(tickMs, dueMs);
  }
  const named = [...running.values()];
  const jobs = named.map(({ job, stage, progress }) => ({
    ...{ id: job.id, attempt: job.attempt, stage, progress },
  }));
  worker.news = false;
  const silentS = 3 * settings.heartbeatMs / 1000;
  try {
    const pulse = await worker.pulse.run((sql) =>
      queue.heartbeat(sql, bootId, jobs, settings.leaseS, silentS)
    );
    heed(worker, pulse, named, nowMs, lost);
  } catch (error) {
    worker.inTouchSinceMs = undefined;
    worker.lastBeatMs = -Infinity; // so that the next try is the next tick
    throw error;
  }
  return tickMs;
}

/** Acts on what a heartbeat, sent at `sentAtMs` for the jobs `named`, brought back. */
function heed(
  worker: Worker,
  pulse: queue.Pulse,
  named: Running[],
  sentAtMs: number,
  lost: AbortController,
): void {
  const silentMs = 3 * worker.settings.heartbeatMs;
  if (!(performance.now() - worker.lastBeatMs < silentMs)) worker.inTouchSinceMs = undefined;
  worker.inTouchSinceMs ??= performance.now();
  worker.lastBeatMs = sentAtMs;
  worker.leader = pulse.leader;
  if (!pulse.alive) {
    lost.abort();
    return;
  }
  const states = new Map(pulse.beats.map((b) => [b.id, b]));
  for (const running of named) {
    const state = states.get(running.job.id);
    if (state?.state === "renewed") {
      running.renewedAtMs = sentAtMs;
      running.tell(guardedS(worker, running));
    }
    if (state?.state === "lost") stop(running, "lost", "somebody else has it");
    if (state?.cancel) stop(running, "cancelled", "cancelled");
  }
  for (const [token, atMs] of worker.lostClaims) {
    // Whatever it may have taken has been given back, or recovered.
    if (sentAtMs - atMs > 2 * worker.settings.leaseS * 1000) worker.lostClaims.delete(token);
  }
  for (const stray of pulse.strays) {
    if (!worker.lostClaims.has(stray.claim_token)) continue; // it started, or ended, meanwhile
    log.warn("job {job} was claimed by a call whose reply was lost: given back", { job: stray.id });
    // Should this fail, it is a stray of the next heartbeat too.
    worker.db.run((sql) => queue.release(sql, worker.bootId, stray, "its claim's reply was lost"))
      .catch((error) => log.warn("{error}", { error: describe(error) }));
  }
}

/** Stops jobs whose lease could not be renewed, before it ends and others may take them. */
function watch(worker: Worker): Promise<number> {
  const leaseMs = worker.settings.leaseS * 1000;
  const marginMs = marginS(worker) * 1000;
  for (const running of worker.running.values()) {
    if (performance.now() - running.renewedAtMs > leaseMs - marginMs) {
      stop(running, "released", "its lease could not be renewed");
    }
  }
  return Promise.resolve(Math.min(1000, marginMs / 4));
}

/** Takes back what silent workers left; the leader also removes what is no longer needed. */
async function tidy(worker: Worker): Promise<number> {
  const { settings, db } = worker;
  const silentMs = 3 * settings.heartbeatMs;
  // Only who has been in touch for a while: after an outage everybody's leases have run out, and
  // those who still run their jobs must have had the time to say so.
  const sinceMs = performance.now() - (worker.inTouchSinceMs ?? Infinity);
  const lately = performance.now() - worker.lastBeatMs < silentMs;
  if (!(sinceMs >= silentMs && lately)) return Math.min(settings.recoverMs, silentMs / 3);
  for (const job of await db.run((sql) => queue.recover(sql, 100, settings.maxCrashes))) {
    log.warn("recovered job {id} {kind}: {status}", { ...job });
  }
  await db.run((sql) => queue.promote(sql));
  if (worker.leader && worker.passes++ % PASSES_A_SWEEP === 0) {
    const unknown = await db.run((sql) =>
      queue.failUnknownKinds(sql, settings.unknownKindS, silentMs / 1000)
    );
    for (const job of unknown) log.warn("job {id}: unknown kind {kind}", { ...job });
    for (let batch = 0; batch < MAX_SWEEPS; batch++) {
      const { retentionS, fileGraceS } = settings;
      const gone = await db.run((sql) => queue.sweep(sql, retentionS, fileGraceS, SWEEP));
      if (gone.jobs < SWEEP && gone.files < SWEEP) break;
    }
  }
  return settings.recoverMs;
}

/** Lets running jobs end, stops those that did not in time, and sees their outcomes written. */
async function drain(worker: Worker, lost: boolean): Promise<void> {
  const rest = () => Promise.all([...worker.running.values()].map((running) => running.ended));
  const { drainS } = worker.settings;
  if (worker.running.size > 0 && !lost) {
    log.info("stopping: {n} jobs have {drainS} s to end", { n: worker.running.size, drainS });
    const enough = new AbortController();
    await Promise.race([rest(), pause(drainS * 1000, enough.signal)]);
    enough.abort();
  }
  for (const running of worker.running.values()) {
    stop(running, lost ? "lost" : "released", "its worker was stopped");
  }
  const timer = setTimeout(() => worker.hurry.abort(), GIVE_BACK_MS);
  await rest();
  clearTimeout(timer);
}

if (import.meta.main) await config.runMain("worker", main);
