/**
 * Runs a paid job: the intent is stored before the request is sent, its id after, so that a job is
 * sent at most once, whoever dies in between (I7).
 *
 * What is left to the service: a process that is frozen between the last look at its clocks and the
 * kernel's sending may send late; and a database that fails over may lose the intent. Both send with
 * the job's one key, by which the service is to know that it has the request already.
 */
import { logger } from "../config.ts";
import { cut, describe, patient, type Pool, type Via } from "../db.ts";
import { clocks, sinceMs } from "../lease.ts";
import type { Job } from "../queue.ts";
import { intend, noteLookUp, saveRequest, toLookUp } from "../requests.ts";
import {
  ABANDON_MS,
  type Context,
  type Kinds,
  NotSent,
  type PaidKind,
  Stop,
  Uncertain,
  unlessAbandoned,
} from "./kind.ts";

const log = logger("worker");

/** How long an id that reached this process is tried to be stored, whatever becomes of the job. */
const SAVE_MS = 3_600_000;
const NEVER = new AbortController().signal;
/** How long the service may take to say whether it has a request. */
const LOOK_UP_MS = 5000;
/** How often the database is asked again because a clock jumped before the request was sent. */
const MAX_ASKS = 3;

/** Where a paid job's statements go, and whose job it is. */
interface Payer {
  db: Via;
  worker: string;
}

/** Too long ago, by one clock or the other, the database said that the job is ours. Nothing was sent. */
class Doubt extends NotSent {
  constructor() {
    super("this worker was stopped or its clock moved, each time before the request was sent");
  }
}

/** @returns the result @throws Uncertain when the request may have been sent without our knowing */
export async function runPaid(
  kind: PaidKind,
  payload: unknown,
  context: Context,
  runner: Payer,
): Promise<unknown> {
  const { job, signal } = context;
  const requestId = job.request_id ?? await send(kind, payload, context, runner);
  context.report("collect");
  signal.throwIfAborted();
  const collecting = Promise.resolve().then(() => kind.collect(requestId, context));
  return await unlessAbandoned(collecting, signal, ABANDON_MS);
}

/** @returns the request's id, stored */
async function send(
  kind: PaidKind,
  payload: unknown,
  context: Context,
  runner: Payer,
): Promise<string> {
  const { job, signal } = context;
  context.report("submit");
  for (let round = 1;; round++) {
    const asked = clocks();
    // Repeated after a lost reply it stores the same key again.
    const intent = await patient(runner.db, signal).run((sql) => intend(sql, runner.worker, job))
      .catch((error) => {
        throw new NotSent(describe(error)); // whether it is stored or not
      });
    if (!intent) throw new Stop("lost", "somebody else has it");
    if (intent.request_id) return intent.request_id; // it came late, from whoever sent it
    const { key, left_s } = intent;
    if (!key) {
      if (round > 1) throw new Doubt(); // an intent is stored, and it is certain that nothing was sent
      throw intent.cancel
        ? new Stop("cancelled", "cancelled")
        : new Stop("released", "its lease ran out before its request was sent");
    }
    const assertMine = () => {
      if (sinceMs(asked) > left_s * 900) throw new Doubt(); // a tenth is left for the sending
    };
    try {
      return await submit(kind, payload, key, { ...context, assertMine }, runner);
    } catch (error) {
      if (!(error instanceof Doubt) || round === MAX_ASKS) throw error;
    }
  }
}

/** Sends the request, and stores its id. */
async function submit(
  kind: PaidKind,
  payload: unknown,
  key: string,
  context: Context,
  { db }: Payer,
): Promise<string> {
  const { job, signal } = context;
  const save = (requestId: string) => store(db, key, requestId, job);
  context.assertMine();
  const submitted = Promise.resolve().then(() => kind.submit(payload, key, context)).then(save);
  try {
    return await unlessAbandoned(submitted, signal, ABANDON_MS);
  } catch (error) {
    if (error instanceof NotSent) throw error;
    submitted.catch(() => {}); // it may still come, and be stored
    const found = await lookUp(kind, key, job).catch(() => null);
    if (found !== null) return await save(found);
    throw new Uncertain(`it is not known whether the request was sent: ${describe(error)}`);
  }
}

/** The ids that are being stored. */
const storing = new Set<Promise<unknown>>();

/** Resolves when no id waits to be stored. A worker that stops has nothing else to lose. */
export async function idsStored(): Promise<void> {
  while (storing.size > 0) await Promise.allSettled(storing);
}

/** Stores a request's id, whoever has the job by now: it is worth money. @returns it */
async function store(db: Via, key: string, requestId: string, job: Job): Promise<string> {
  const facts = { job: job.id, attempt: job.attempt, key, requestId };
  const once = (sql: Pool) => saveRequest(sql, key, requestId);
  const stored = db.run(once).catch((error) => {
    // Here it is in a log, whatever becomes of this process.
    const why = describe(error);
    const line = "job {job}: the id {requestId} of its request {key} is not stored yet: {why}";
    log.error(line, { ...facts, why });
    return patient(db, NEVER, SAVE_MS).run(once);
  });
  storing.add(stored);
  try {
    if (await stored) return requestId;
  } finally {
    storing.delete(stored);
  }
  log.error("job {job}: its request {key} has another id already, not {requestId}", facts);
  return requestId;
}

/** The id that the service has under the key; it has {@linkcode LOOK_UP_MS} to say. */
function lookUp(kind: PaidKind, key: string, job: Job): Promise<string | null> {
  const signal = AbortSignal.timeout(LOOK_UP_MS);
  const asked = Promise.resolve().then(() => kind.lookup?.(key, { job, signal }) ?? null);
  return unlessAbandoned(asked, signal, 1000);
}

/** Jobs that are asked for at a time. */
const LOOK_UPS = 20;

/**
 * Asks the services for the requests of jobs in review, each at most every `everyS` seconds: those
 * that have one go on. That a service has none yet is no proof that it will not: somebody frozen may
 * be about to send it. So the others stay, with what the service said, for a person.
 *
 * @returns the ids of the jobs that go on; `more`: others may be due to be asked for
 */
export async function lookUpReviews(db: Via, kinds: Kinds, everyS: number) {
  const able = Object.entries(kinds).flatMap(([name, kind]) =>
    kind.runs === "paid" && kind.lookup ? [name] : []
  );
  const found: string[] = [];
  if (able.length === 0) return { found, more: false };
  const jobs = await db.run((sql) => toLookUp(sql, able, everyS, LOOK_UPS));
  await Promise.all(jobs.map(async (job) => {
    const key = job.request_key!;
    let said: string;
    try {
      const id = await lookUp(kinds[job.kind] as PaidKind, key, job);
      if (id !== null && await db.run((sql) => saveRequest(sql, key, id))) found.push(job.id);
      said = id === null ? "the service has none under its key" : "found";
    } catch (error) {
      said = describe(error); // also an id that no column can hold: it is this job's trouble alone
    }
    await db.run((sql) => noteLookUp(sql, key, cut(said, 1000)));
  }));
  return { found, more: jobs.length === LOOK_UPS };
}
