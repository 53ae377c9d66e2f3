/**
 * Runs a paid job: the intent is stored before the request is sent, its id after, so that a job is
 * sent at most once, whoever dies in between (I7).
 */
import { describe, patient, type Via } from "../db.ts";
import { intend, saveRequest } from "../queue.ts";
import { type Context, NotSent, type PaidKind, Stop, Uncertain } from "./kind.ts";

/** How long an id that reached this process is tried to be stored, whatever becomes of the job. */
const SAVE_MS = 3_600_000;
const NEVER = new AbortController().signal;

/** Where a paid job's statements go, and whose job it is. */
interface Payer {
  db: Via;
  worker: string;
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
  return await kind.collect(requestId, context);
}

async function send(
  kind: PaidKind,
  payload: unknown,
  context: Context,
  runner: Payer,
): Promise<string> {
  const { job, signal } = context;
  context.report("submit");
  // Repeated after a lost reply it stores the same key again.
  const key = await patient(runner.db, signal).run((sql) => intend(sql, runner.worker, job));
  if (key === null) throw new Stop("lost", "the job was given away before its request was sent");
  let requestId: string | null;
  try {
    requestId = await kind.submit(payload, key, context);
  } catch (error) {
    if (error instanceof NotSent) throw error;
    requestId = await kind.lookup?.(key, context).catch(() => null) ?? null;
    if (requestId === null) {
      throw new Uncertain(`it is not known whether the request was sent: ${describe(error)}`);
    }
  }
  // Whoever has the job by now: an id that reached us is worth money.
  const id = requestId;
  await patient(runner.db, NEVER, SAVE_MS).run((sql) => saveRequest(sql, key, id));
  return id;
}
