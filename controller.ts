#!/usr/bin/env -S deno run --quiet --no-prompt -P=controller
/**
 * A controller: looks at the queue and at Railway, decides how many workers there are to be
 * (policy.ts), and sets the count. Any number of controllers may run; the leader of the pool acts.
 *
 *     SIDING_WORKER_SERVICE_ID=… RAILWAY_TOKEN=… deno task controller
 *     deno task controller --once --dry-run      # one look: what it sees, and what it would do
 *
 * Reads and writes: the queue's tables (DATABASE_URL); Railway's API (RAILWAY_TOKEN of the project, or
 * RAILWAY_API_TOKEN). The service is that of SIDING_WORKER_SERVICE_ID in RAILWAY_ENVIRONMENT_ID.
 *
 * Every look is a row, taken by compare-and-set before Railway is told: of two that both think they
 * lead, one acts. A look that is older than 10 s by then, since this process was frozen, is dropped.
 *
 * Signals: SIGTERM and SIGINT end it; a look under way is finished.
 *
 * Exit codes: 0 after a stop, or one look; 1 failure, with --once also a look that could not see all or
 * a refused write; 2 usage; 3 the database could not be reached at the start; 130 stopped by a second signal.
 */
import { hostname } from "node:os";
import * as config from "./config.ts";
import { checkSchema, Database, describe, patient } from "./db.ts";
import { clocks, sinceMs } from "./lease.ts";
import { conclude, record, standing, survey, sweepLooks } from "./looks.ts";
import { decide, type Decision, defaults, type Look, type Policy, refused } from "./policy.ts";
import { deregister, register } from "./processes.ts";
import { heartbeat } from "./queue.ts";
import { Railway, type Seen } from "./railway.ts";
import { RailwayError, tokenFrom } from "./railway_call.ts";

const log = config.logger("controller");

/** A look may be so old when Railway is told. */
const FRESH_MS = 10_000;
/** How long a starting controller waits for the database. */
const START_MS = 30_000;

const program = {
  name: "controller",
  summary: "Decides how many workers there are to be, and tells Railway.",
  example: "deno task controller --once --dry-run",
  exits: {
    0: "after a stop, or one look",
    1: "failure; with --once also a look that could not see all, or a refused write",
    3: "the database could not be reached at the start",
  },
};
const { databaseUrl, prepare, statementLimitMs, heartbeatMs, retentionS, logLevel, pool } =
  config.settings;
const { railwayUrl, railwayRegion, railwayWrite, railwayCallsPerHour } = config.settings;
const spec = {
  ...{ databaseUrl, prepare, statementLimitMs, heartbeatMs, retentionS, logLevel, pool },
  ...{ railwayUrl, railwayRegion, railwayWrite, railwayCallsPerHour },
  workerServiceId: config.text("the service whose replicas are the workers"),
  lookMs: config.int(30_000, 100, 600_000, "how often it looks"),
  min: config.int(defaults.min, 1, 50, "workers at the least"),
  max: config.int(defaults.max, 1, 50, "workers at the most"),
  stepS: config.int(defaults.stepS, 0, 86_400, "between two steps up"),
  idleS: config.int(defaults.idleS, 1, 864_000, "with nothing to do, after which it is the least"),
  arriveS: config.int(defaults.arriveS, 1, 86_400, "for a new count to be there before an alarm"),
  connections: config.int(0, 0, 100_000, "connections the database has for workers; 0 is enough"),
  waitTargetS: config.int(0, 0, 864_000, "the oldest job is to start within; 0 is at once"),
  once: config.flag(config.yes("look once, and end")),
  dryRun: config.flag(config.yes("decide and record, but tell Railway nothing")),
  json: config.flag(config.yes("print each look as a JSON object a line")),
};
type Settings = ReturnType<typeof config.configuration<typeof spec>>;

interface Controller {
  settings: Settings;
  policy: Policy;
  db: Database;
  railway: Railway;
  bootId: string;
  /** The pool of its looks, in which it may lead: a dry run takes no part in the real one. */
  looks: string;
}

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const controller = await boot(args, signal);
  const { db, bootId, settings } = controller;
  const dead = new AbortController();
  const stop = AbortSignal.any([signal, dead.signal]);
  let complete = true;
  try {
    if (settings.once) {
      complete = await look(controller);
    } else {
      await Promise.all([
        config.repeat("heartbeat", () => beat(controller, dead), stop),
        config.repeat("look", async () => {
          const startedMs = performance.now();
          await look(controller);
          return Math.max(0, settings.lookMs - (performance.now() - startedMs));
        }, stop),
      ]);
      log.info(dead.signal.aborted ? "ended: it was taken for dead" : "stopped");
    }
  } finally {
    await db.run((sql) => deregister(sql, bootId), 2000).catch(() => {});
    await db.close();
  }
  return complete && !dead.signal.aborted ? 0 : 1;
}

async function boot(args: string[], signal: AbortSignal): Promise<Controller> {
  const settings = config.configuration(program, spec, args);
  const url = config.requireDatabase(settings.databaseUrl);
  await config.setUpLog(settings.logLevel);
  const { min, max, stepS, idleS, arriveS, connections, waitTargetS } = settings;
  if (min > max) {
    throw new config.UsageError(`--min is ${min}: it must not be more than --max, ${max}`);
  }
  const serviceId = settings.workerServiceId;
  if (!serviceId) throw new config.UsageError("SIDING_WORKER_SERVICE_ID is not set");
  const environmentId = Deno.env.get("RAILWAY_ENVIRONMENT_ID");
  if (!environmentId) throw new config.UsageError("RAILWAY_ENVIRONMENT_ID is not set");
  const token = tokenFrom(Deno.env);
  if (!token) throw new config.UsageError("RAILWAY_TOKEN is not set, nor is RAILWAY_API_TOKEN");
  const name = Deno.env.get("RAILWAY_REPLICA_ID") ?? `${hostname()}-${Deno.pid}`;
  const options = { max: 2, name: `siding controller ${name}`, prepare: settings.prepare };
  const db = new Database(url, options, settings.statementLimitMs);
  const start = patient(db, signal, START_MS);
  await start.run(checkSchema);
  const looks = settings.dryRun ? `${settings.pool}/dry-run` : settings.pool;
  const bootId = await start.run((sql) =>
    register(sql, { role: "controller", pool: looks, name, version: config.VERSION })
  );
  log.info("controller {name}, version {version}", { name, version: config.VERSION });
  return {
    ...{ settings, db, bootId, looks },
    policy: {
      ...defaults,
      ...{ min, max, stepS, idleS, arriveS },
      gapS: Math.max(defaults.gapS, 4 * settings.lookMs / 1000),
      connections: connections || null,
      waitTargetS: waitTargetS || null,
    },
    railway: new Railway({
      ...{ serviceId, environmentId, token },
      url: settings.railwayUrl,
      region: settings.railwayRegion,
      write: settings.railwayWrite,
      callsPerHour: settings.railwayCallsPerHour,
    }),
  };
}

/** Says that this controller is there. */
async function beat({ db, bootId, settings }: Controller, dead: AbortController): Promise<number> {
  const silentS = silentAfterS(settings);
  const { alive } = await db.run((sql) => heartbeat(sql, bootId, [], 1, silentS));
  if (!alive) dead.abort();
  return settings.heartbeatMs;
}

const silentAfterS = ({ heartbeatMs }: Settings) => 3 * heartbeatMs / 1000;

/** One look: sees, decides, records, and acts if that is due. @returns whether it saw, and did, all */
async function look(controller: Controller): Promise<boolean> {
  const { settings, policy, db, railway, bootId, looks } = controller;
  const started = clocks();
  const { now, queue, trouble } = await seeQueue(controller);
  if (!now.leader) {
    log.debug("another controller leads");
    return true;
  }
  let seen: Seen | null = null;
  let error = trouble;
  try {
    seen = await railway.read();
  } catch (e) {
    error = error ? `${error}; ${describe(e)}` : describe(e);
  }
  const platform = seen &&
    { configured: seen.total, running: seen.running, crashed: seen.crashed };
  const it: Look = { at_ms: now.at_ms, queue, platform };
  // Other regions' replicas are there, too, and one of ours is the least that can be asked for.
  const least = Math.max(policy.min, seen?.least ?? 1);
  const decision = decide(it, now.memory, {
    ...policy,
    min: least,
    max: Math.max(least, policy.max),
  });
  const act = !decision.write ? "none" : settings.dryRun ? "dry" : "due";
  // What was not told is not wanted: the next dry look says it anew.
  if (act === "dry") {
    const stepped_up_at_ms = now.memory?.stepped_up_at_ms ?? null;
    decision.memory = { ...decision.memory!, wanted: seen!.total, stepped_up_at_ms };
  }
  const facts = { controller: bootId, pool: looks, last: now.number, look: it, decision };
  const number = await db.run((sql) => record(sql, facts, act, error));
  if (number === null) {
    log.info("another controller has looked meanwhile");
    return true;
  }
  if (act === "due") error = await tell(controller, number, started, seen!, decision);
  say(settings, number, it, decision, error);
  if (Number(number) % 100 === 0) await db.run((sql) => sweepLooks(sql, settings.retentionS));
  return error === null;
}

/**
 * Sees the queue, or that it cannot be seen. Without the database nobody leads and nothing can be
 * recorded, so that the count stays as it is: that throws.
 */
async function seeQueue({ settings, policy, db, bootId, looks }: Controller) {
  const silentS = silentAfterS(settings);
  const pools = { workers: settings.pool, looks };
  const runTimes = policy.waitTargetS !== null;
  try {
    const now = await db.run((sql) => survey(sql, bootId, pools, silentS, runTimes));
    return { now, queue: { work: now.work, workers: now.workers }, trouble: null };
  } catch (error) {
    const now = await db.run((sql) => standing(sql, bootId, looks, silentS));
    return { now, queue: null, trouble: describe(error) };
  }
}

/** Tells Railway the count, and records what came of it. @returns what went wrong */
async function tell(
  { railway, db, looks }: Controller,
  number: string,
  started: ReturnType<typeof clocks>,
  seen: Seen,
  { wanted, memory }: Decision,
): Promise<string | null> {
  let error: string | null = null;
  let left = memory;
  try {
    if (sinceMs(started) > FRESH_MS) throw new Error("the look was too old to act on: dropped");
    await railway.write(wanted!, seen);
  } catch (e) {
    error = describe(e);
    // Not once more at each look: what was refused is a ceiling, for a while.
    const isRefusal = e instanceof RailwayError && e.reason === "refused";
    if (isRefusal && memory && wanted! > seen.total) left = refused(memory, seen.total);
  }
  const act = error === null ? "written" : "failed";
  await db.run((sql) => conclude(sql, looks, number, act, error, left));
  return error;
}

/** A look in the log, or on stdout as JSON. */
function say(
  { json, dryRun }: Settings,
  number: string,
  look: Look,
  { wanted, write, code, reason, alarms }: Decision,
  error: string | null,
): void {
  if (json) {
    console.log(
      JSON.stringify({
        number,
        wanted,
        write,
        code,
        reason,
        alarms,
        error,
        dry_run: dryRun,
        seen: look,
      }),
    );
  }
  const facts = { number, wanted, code, reason, alarms, error };
  const line = `look {number}: {reason}${write ? (dryRun ? " (not told)" : " (told)") : ""}` +
    `${alarms.length ? "; alarms: {alarms}" : ""}${error ? "; {error}" : ""}`;
  log[error || alarms.length ? "warn" : write ? "info" : "debug"](line, facts);
}

if (import.meta.main) await config.runMain("controller", main);
