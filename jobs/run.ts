/** Runs one job to its outcome, whichever way its kind runs, and records that outcome. */
import { logger } from "../config.ts";
import { codeOf, cut, describe, patient, unstorable, type Via } from "../db.ts";
import { FileTooLarge, inputsOf, readFile, writeFile } from "../files.ts";
import { get, type Job, type NewJob, type Outcome, settle } from "../queue.ts";
import { traced } from "../tracing.ts";
import {
  ABANDON_MS,
  type Context,
  type InlineKind,
  issues,
  type Kind,
  type Kinds,
  NotSent,
  PermanentFailure,
  Snooze,
  Stop,
  Uncertain,
  unlessAbandoned,
} from "./kind.ts";
import { runPaid } from "./paid.ts";
import { type Lease, runProcess } from "./process.ts";

const log = logger("worker");

/** Bytes of a result's JSON at the most; larger output is a file. */
export const MAX_RESULT_BYTES = 1_048_576;

/** What running a job needs. */
export interface Runner {
  /** For what moves the job, and for its files, which must not hold that up. */
  db: Via;
  files: Via;
  /** The worker's boot_id. */
  worker: string;
  kinds: Kinds;
  maxFileBytes: number;
  /** How often a job may be given back; see settle. */
  maxReleases?: number;
  /** The job's lease; without it, it lasts for ever. */
  lease?: Lease;
  /** Told each stage a job reaches. */
  report?: (stage?: string, progress?: number) => void;
}

/**
 * Runs a job.
 *
 * @param stop aborted with a {@linkcode Stop} when the job has to end early
 * @returns its outcome, or null when the job was lost and nothing may be written
 */
export async function run(runner: Runner, job: Job, stop: AbortSignal): Promise<Outcome | null> {
  const { id, attempt } = job;
  const kind = Object.hasOwn(runner.kinds, job.kind) ? runner.kinds[job.kind] : undefined;
  if (!kind) return { id, attempt, outcome: "failed", error: `unknown kind "${job.kind}"` };

  const timeoutS = kind.timeoutS ?? 900;
  const timeout = new AbortController();
  const timer = setTimeout(
    () => timeout.abort(new Stop("timed out", `timed out after ${timeoutS} s`)),
    timeoutS * 1000,
  );
  const signal = AbortSignal.any([stop, timeout.signal]);
  const next: NewJob[] = [];
  const context = contextOf(runner, job, signal, next);
  try {
    const parsed = kind.payload.safeParse(job.payload);
    if (!parsed.success) {
      throw new PermanentFailure(`its payload does not fit its kind: ${issues(parsed.error)}`);
    }
    const result = kind.runs === "process"
      ? await runProcess(kind, parsed.data, context, runner.lease)
      : kind.runs === "paid"
      ? await runPaid(kind, parsed.data, context, runner)
      : await runInline(kind, parsed.data, context);
    if (signal.aborted && kind.runs === "inline") throw signal.reason; // too late, thrown away
    return done(job, result, next);
  } catch (error) {
    // What a stopped job throws is often an error of the stop's making, such as an AbortError.
    const own = error instanceof Uncertain || (error instanceof NotSent && error.permanent);
    const outcome = outcomeOf(signal.aborted && !own ? signal.reason : error, job, kind);
    return outcome && error instanceof NotSent ? { ...outcome, unsent: true } : outcome;
  } finally {
    clearTimeout(timer);
  }
}

function contextOf(runner: Runner, job: Job, signal: AbortSignal, next: NewJob[]): Context {
  const db = patient(runner.files, signal);
  return {
    job,
    signal,
    // Made fit for its columns here: a heartbeat carries the stages of all jobs, so that one that
    // the database refused would cost the others their leases.
    report: (stage, progress) =>
      runner.report?.(
        stage === undefined ? undefined : cut(stage, 800).slice(0, 200).toWellFormed(),
        // In steps of a ten-thousandth: the smallest numbers are too small for the column.
        typeof progress === "number" && progress >= 0 && progress <= 1
          ? Math.round(progress * 10_000) / 10_000
          : undefined,
      ),
    assertMine: () => runner.lease?.assertMine(),
    next: (newJob) => next.push(newJob),
    view: async (id) => (await db.run((sql) => get(sql, [id])))[0],
    inputs: () => inputsOf(db, job.id),
    read: (file) => readFile(db, file),
    write: (name, content) => writeFile(db, name, content, runner.maxFileBytes, job),
  };
}

const runInline = (kind: InlineKind, payload: unknown, context: Context): Promise<unknown> =>
  unlessAbandoned(
    Promise.resolve().then(() => kind.work(payload, context)),
    context.signal,
    ABANDON_MS,
  );

/** A job that is done, unless what it returned cannot be stored. */
function done({ id, attempt }: Job, result: unknown, next: NewJob[]): Outcome {
  let text: string;
  try {
    text = JSON.stringify([result, next]);
  } catch (error) {
    throw new PermanentFailure(`its result is not JSON: ${describe(error)}`); // a circle, or a bigint
  }
  // From here on as it is written, whatever the objects would say the next time.
  const [plainResult, plainNext] = JSON.parse(text);
  if (new TextEncoder().encode(JSON.stringify(plainResult)).length > MAX_RESULT_BYTES) {
    throw new PermanentFailure(
      `its result is larger than ${MAX_RESULT_BYTES} bytes of JSON: write a file instead`,
    );
  }
  const bad = unstorable(plainResult, "its result") ?? unstorable(plainNext, "its next");
  if (bad) throw new PermanentFailure(bad);
  return { id, attempt, outcome: "done", result: plainResult, next: plainNext };
}

/** What the error that ended an attempt makes of the job. */
function outcomeOf(error: unknown, job: Job, kind: Kind): Outcome | null {
  const { id, attempt } = job;
  if (error instanceof Stop && error.why !== "timed out") {
    if (error.why === "lost") return null;
    return error.why === "cancelled"
      ? { id, attempt, outcome: "cancelled" }
      : { id, attempt, outcome: "released", error: error.message };
  }
  if (error instanceof Snooze && error.delayS >= 0 && error.delayS <= 315_360_000) {
    return { id, attempt, outcome: "snoozed", delay_s: error.delayS };
  }
  if (error instanceof Uncertain) return { id, attempt, outcome: "review", error: error.message };
  const permanent = error instanceof PermanentFailure || error instanceof FileTooLarge ||
    (error instanceof NotSent && error.permanent) || job.failures >= (kind.retries ?? 3);
  return {
    id,
    attempt,
    outcome: "failed",
    error: describe(error) || "failed without a message",
    // Spread, so that what failed together does not come back together.
    delay_s: permanent ? undefined : delayS(kind, job.failures + 1) * (0.9 + Math.random() * 0.2),
  };
}

/** Seconds before the next attempt: as the kind says, if it says a number. */
function delayS({ backoffS }: Kind, failures: number): number {
  const usual = Math.min(3600, 10 * 3 ** (failures - 1));
  try {
    const own = backoffS?.(failures) ?? usual;
    return own >= 0 && own <= 315_360_000 ? own : usual;
  } catch {
    return usual;
  }
}

/**
 * Records an outcome, again and again while the database cannot be reached, for ten minutes or
 * until `signal` is aborted. One that the database refuses (a next job over a queue's limit, a value that a column
 * cannot hold) fails the job with the refusal.
 *
 * @returns whether the outcome stands; false: the job is somebody else's
 */
export async function record(
  { db, worker, maxReleases }: Pick<Runner, "db" | "worker" | "maxReleases">,
  outcome: Outcome,
  signal: AbortSignal,
): Promise<boolean> {
  const write = (o: Outcome) =>
    patient(db, signal).run((sql) => settle(sql, worker, [o], maxReleases));
  try {
    return (await write(outcome)).length > 0;
  } catch (error) {
    if (!/^(SD|22|23|54)/.test(codeOf(error))) throw error;
    const { id, attempt } = outcome;
    const refusal = `its outcome could not be stored: ${describe(error)}`;
    return (await write({ id, attempt, outcome: "failed", error: refusal })).length > 0;
  }
}

/** Runs a job, records its outcome and logs both. `hurry`: aborted when recording has no more time. */
export async function runToEnd(
  runner: Runner,
  job: Job,
  stop: AbortSignal,
  hurry: AbortSignal,
): Promise<void> {
  const facts = { job: job.id, kind: job.kind, attempt: job.attempt };
  const startedMs = performance.now();
  log.info("job {job} {kind} started, attempt {attempt}", facts);
  try {
    const outcome = await traced(job, () => run(runner, job, stop));
    const stands = outcome && await record(runner, outcome, hurry);
    const seconds = ((performance.now() - startedMs) / 1000).toFixed(1);
    if (!stands) {
      log.warn("job {job} {kind} is lost: somebody else has it", facts);
    } else if ("error" in outcome) {
      const { outcome: how, error } = outcome;
      log.warn("job {job} {kind} {how} after {seconds} s: {error}", {
        ...facts,
        how,
        seconds,
        error,
      });
    } else {
      const how = outcome.outcome;
      log.info("job {job} {kind} {how} after {seconds} s", { ...facts, how, seconds });
    }
  } catch (error) {
    // The database stayed away, or its refusal could not be recorded either: the lease decides.
    const why = describe(error);
    log.error("job {job} {kind}: its outcome was not recorded: {why}", { ...facts, why });
  }
}
