/** Runs one job to its outcome, whichever way its kind runs. */
import { logger } from "../config.ts";
import { cut, describe, patient, unstorable, type Via } from "../db.ts";
import { FileTooLarge, inputsOf, readFile, writeFile } from "../files.ts";
import { get, type Job, type NewJob, type Outcome } from "../queue.ts";
import { traced, traceId } from "../tracing.ts";
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
} from "./kind.ts";
import type { Outcomes } from "./outcomes.ts";
import { runPaid } from "./paid.ts";
import { type Lease, runProcess } from "./process.ts";
import { limit, type Stopper } from "./stopper.ts";

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
  /** The job's lease; without it, it lasts for ever. */
  lease?: Lease;
  /** Told each stage a job reaches. */
  report?: (stage?: string, progress?: number) => void;
}

/**
 * Runs a job.
 *
 * @param stopper stops it when it has to end early
 * @returns its outcome, or null when the job was lost and nothing may be written
 */
export async function run(runner: Runner, job: Job, stopper: Stopper): Promise<Outcome | null> {
  const { id, attempt } = job;
  const kind = Object.hasOwn(runner.kinds, job.kind) ? runner.kinds[job.kind] : undefined;
  if (!kind) return { id, attempt, outcome: "failed", error: `unknown kind "${job.kind}"` };

  const timeoutS = kind.timeoutS ?? 900;
  const inTime = limit(timeoutS * 1000, () => {
    stopper.stop(new Stop("timed out", `timed out after ${timeoutS} s`));
  });
  const made: Made = { next: [], files: false };
  const context = contextOf(runner, job, stopper, made);
  try {
    const parsed = kind.payload.safeParse(job.payload);
    if (!parsed.success) {
      throw new PermanentFailure(`its payload does not fit its kind: ${issues(parsed.error)}`);
    }
    const result = kind.runs === "process"
      ? await runProcess(kind, parsed.data, context, runner.lease)
      : kind.runs === "paid"
      ? await runPaid(kind, parsed.data, context, runner)
      : await runInline(kind, parsed.data, context, stopper);
    if (stopper.reason && kind.runs === "inline") throw stopper.reason; // too late, thrown away
    return done(job, result, made);
  } catch (error) {
    // What a stopped job throws is often an error of the stop's making, such as an AbortError.
    const own = error instanceof Uncertain || (error instanceof NotSent && error.permanent);
    const outcome = outcomeOf(stopper.reason && !own ? stopper.reason : error, job, kind);
    return outcome && error instanceof NotSent ? { ...outcome, unsent: true } : outcome;
  } finally {
    inTime();
  }
}

/** What a job brings besides its result. */
interface Made {
  next: NewJob[];
  files: boolean;
}

function contextOf(runner: Runner, job: Job, stopper: Stopper, made: Made): Context {
  const files = () => patient(runner.files, stopper.signal);
  return {
    job,
    get signal() {
      return stopper.signal;
    },
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
    next: (newJob) => made.next.push(newJob),
    view: async (id) => (await files().run((sql) => get(sql, [id])))[0],
    inputs: () => inputsOf(files(), job.id),
    read: (file) => readFile(files(), file),
    write: (name, content) => {
      made.files = true;
      return writeFile(files(), name, content, runner.maxFileBytes, job);
    },
  };
}

/** Runs a function, which is left behind when it does not heed that it is to stop. */
function runInline(
  kind: InlineKind,
  payload: unknown,
  context: Context,
  stopper: Stopper,
): unknown {
  const result = kind.work(payload, context);
  return result instanceof Promise ? stopper.unlessAbandoned(result, ABANDON_MS) : result;
}

/** A job that is done, unless what it returned cannot be stored. */
function done({ id, attempt }: Job, result: unknown, { next, files }: Made): Outcome {
  if (next.length === 0 && !files && (result === undefined || result === null)) {
    return { id, attempt, outcome: "done", result: null };
  }
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
  return {
    id,
    attempt,
    outcome: "done",
    result: plainResult,
    next: plainNext,
    ...(files && { files }),
  };
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

/** Runs a job, has its outcome recorded and logs both. `ran` is told between the two. */
export async function runToEnd(
  runner: Runner,
  job: Job,
  stopper: Stopper,
  outcomes: Outcomes,
  ran: () => void,
): Promise<void> {
  const facts = { job: job.id, kind: job.kind, attempt: job.attempt, trace: traceId(job) };
  const startedMs = performance.now();
  // Small jobs by the thousand a second would be all that a log has: it gets what went wrong with them.
  const level = runner.kinds[job.kind]?.runs === "inline" ? "debug" : "info";
  const said = log.isEnabledFor(level);
  const begin = () => {
    facts.trace = traceId(job); // its own, where what enqueued it was not traced
    if (said) log[level]("job {job} {kind} started, attempt {attempt}", facts);
    return run(runner, job, stopper);
  };
  try {
    const outcome = await traced(job, begin).finally(ran);
    const stands = outcome && await outcomes.record(outcome);
    const seconds = () => ((performance.now() - startedMs) / 1000).toFixed(1);
    if (!stands) {
      log.warn("job {job} {kind} is lost: somebody else has it", facts);
    } else if ("error" in outcome) {
      const { outcome: how, error } = outcome;
      log.warn("job {job} {kind} {how} after {seconds} s: {error}", {
        ...facts,
        how,
        seconds: seconds(),
        error,
      });
    } else if (said) {
      const how = outcome.outcome;
      log[level]("job {job} {kind} {how} after {seconds} s", { ...facts, how, seconds: seconds() });
    }
  } catch (error) {
    // The database stayed away, or its refusal could not be recorded either: the lease decides.
    const why = describe(error);
    log.error("job {job} {kind}: its outcome was not recorded: {why}", { ...facts, why });
  }
}
