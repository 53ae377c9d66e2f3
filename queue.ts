/**
 * The queue: every statement that moves a job but for those of claims.ts, which bring it to a worker; and the
 * types of a job.
 *
 * Each change of a job's state is one statement, or one call of a function in migrations/, so
 * that a process may die or freeze between any two lines here and nothing is half done. Each write
 * by a worker names the job's id, worker, attempt and the state `running` (the fence); one that
 * matches no row means that the job is somebody else's by now. All times are the database's.
 *
 * Ids are bigint in the database and strings here: a number would be wrong from 2^53 on.
 */
import { codeOf, cut, type Pool, schema, type Sql, unstorable } from "./db.ts";
import { gathererOf } from "./gather.ts";

export type Status =
  | "scheduled"
  | "queued"
  | "running"
  | "review"
  | "done"
  | "failed"
  | "cancelled";

/** A job as a worker gets it from {@linkcode claim}. */
export interface Job {
  id: string;
  queue: string;
  kind: string;
  owner: string | null;
  /** Credits, see credits.ts; null: none. */
  price: string | null;
  payload: unknown;
  priority: number;
  /** 1 at the first claim; rises at each, and is never reset. */
  attempt: number;
  failures: number;
  crashes: number;
  releases: number;
  snoozes: number;
  /** Nothing else may run beside it: see siding.recover. */
  alone: boolean;
  /** The W3C trace context of what enqueued it. */
  trace_parent: string | null;
  /** Paid work: the key of its request, and the request's id once it is known. */
  request_key: string | null;
  request_id: string | null;
  /** When it was claimed, by the database's clock; and the milliseconds from when it was due to then. */
  claimed_at: Date;
  wait_ms: number;
}

/** What to enqueue. Only the kind is needed. */
export interface NewJob {
  kind: string;
  /** Any JSON value; `{}` if not given. */
  payload?: unknown;
  queue?: string;
  owner?: string;
  /** Larger is sooner; 0 by default. */
  priority?: number;
  /** Seconds from now, by the database's clock, or an instant. */
  delay_s?: number;
  due_at?: string | Date;
  /** An unfinished job of this kind with the same key is returned instead of a second one. */
  unique_key?: string;
  /** Ids of input files, in the order in which the job gets them. */
  files?: string[];
  /** Credits that it costs its owner, reserved at once and captured when it is done: see credits.ts. */
  price?: number;
  /** A URL that is told when it ends: see jobs/webhook.ts. */
  webhook?: string;
  /** The W3C trace context of what enqueues it. */
  trace_parent?: string;
}

export interface Enqueued {
  id: string;
  /** False when an unfinished job had the unique key already: `id` is that job's. */
  created: boolean;
}

/**
 * What was asked for cannot be done. `code`: SD404 there is no such job, SD409 it is in no state for
 * it, which the message names, SD422 a value is malformed.
 */
export class Refused extends Error {
  override name = "Refused";
  constructor(message: string, readonly code: string) {
    super(message);
  }
}

/**
 * The enqueue was refused. `code`: SD402 too few credits, SD404 no such queue, SD410 no such file,
 * SD422 malformed, SD429 over a limit.
 */
export class EnqueueError extends Refused {
  override name = "EnqueueError";
}

/** A job of a claim, as the worker's later writes name it. */
export interface Claimed {
  id: string;
  attempt: number;
}

const s = (sql: Sql) => sql(schema);
const json = (value: unknown) => JSON.stringify(value);
/** A plain array: the driver's carries the statement and more. */
export const list = async <T>(rows: PromiseLike<T[]>): Promise<T[]> => Array.from(await rows);
/** A list of names or ids as Postgres writes it; they hold no quotes. Quoted, since null is a name too. */
export const names = (list: readonly string[]) => `{${list.map((name) => `"${name}"`).join(",")}}`;

/**
 * Enqueues jobs in one statement, on a pool or in the caller's transaction, with which they then
 * commit or vanish. All or none. On a pool, those of one moment go together: see gather.ts.
 *
 * @returns one entry a job, in the order given
 * @throws EnqueueError when a queue, file or credits are missing, a value malformed, or a limit reached
 */
export async function enqueue(sql: Sql, jobs: readonly NewJob[]): Promise<Enqueued[]> {
  const texts = jobs.map((job, index) => {
    const { delay_s, due_at, price } = job;
    // JSON would make these null, and the job due at once, or free.
    if (typeof delay_s === "number" && !Number.isFinite(delay_s)) {
      throw new EnqueueError(`job ${index + 1}: delay_s is ${delay_s}`, "SD422");
    }
    if (typeof price === "number" && !Number.isFinite(price)) {
      throw new EnqueueError(`job ${index + 1}: price is ${price}`, "SD422");
    }
    if (due_at instanceof Date && Number.isNaN(due_at.getTime())) {
      throw new EnqueueError(`job ${index + 1}: due_at is not an instant`, "SD422");
    }
    return json(job.payload === undefined ? { ...job, payload: {} } : job);
  });
  const text = texts.join(",");
  try {
    // A transaction is its caller's own.
    if (!("begin" in sql)) return await insert(sql, text);
    return await gathererOf(sql, insertAgain).enqueue({ text, count: jobs.length });
  } catch (error) {
    throw enqueueError(error, jobs);
  }
}

/** @param lockWaitMs how long it may wait for a lock, before it is refused (55P03); not in a transaction */
const insert = (sql: Sql, text: string, lockWaitMs?: number): Promise<Enqueued[]> =>
  list(
    lockWaitMs === undefined
      ? sql<Enqueued[]>`
        select id::text, created from ${s(sql)}.enqueue(${`[${text}]`}::text::jsonb) order by ord`
      // Set before the jobs are looked at, and until this statement ends.
      : sql<Enqueued[]>`
        select e.id::text, e.created
        from set_config('lock_timeout', ${String(lockWaitMs)}, true) as waits,
          ${s(sql)}.enqueue(case when waits is not null then ${`[${text}]`}::text::jsonb end) as e
        order by e.ord`,
  );

/** {@linkcode insert}, repeated where others took the same keys in another order. */
async function insertAgain(sql: Pool, text: string, lockWaitMs?: number): Promise<Enqueued[]> {
  for (let round = 1;; round++) {
    try {
      return await insert(sql, text, lockWaitMs);
    } catch (error) {
      if (codeOf(error) !== "40P01" || round === 5) throw error;
    }
  }
}

/** What an enqueue failed with: an {@linkcode EnqueueError} where what was asked for is at fault. */
export function enqueueError(error: unknown, jobs: readonly NewJob[]): unknown {
  const code = codeOf(error);
  // A value that fits no type (22), such as a bad time, no column (23), or is nested too deep (54).
  if (!/^(SD|22|23|54)/.test(code)) return error;
  return new EnqueueError(unstorable(jobs, "jobs") ?? (error as Error).message, code);
}

/** How an attempt ended. See siding.settle for what each does to the job. */
export type Outcome =
  & Claimed
  /** `unsent`: whatever was meant to be sent to a paid service was not. `files`: it wrote some. */
  & { unsent?: boolean }
  & (
    | { outcome: "done"; result: unknown; next?: readonly NewJob[]; files?: boolean }
    /** `delay_s`: seconds until it is tried again; absent: it has failed for good. */
    | { outcome: "failed"; error: string; delay_s?: number }
    | { outcome: "snoozed"; delay_s: number }
    | { outcome: "released" | "review"; error: string }
    /** It did not begin to run. */
    | { outcome: "released"; unbegun: true }
    | { outcome: "cancelled" }
  );

/**
 * Ends attempts of one worker, in one statement whatever their outcomes.
 *
 * @param maxReleases how often a job may be given back before that fails it
 * @param waitMs how long it may wait for a row that somebody else has locked, before it is refused (55P03)
 * @returns the ids whose outcome stands, also where it had landed before and only the reply was
 * lost. The worker has lost the others: somebody else has them.
 */
export async function settle(
  sql: Sql,
  worker: string,
  outcomes: readonly Outcome[],
  maxReleases = 5,
  waitMs = 500,
): Promise<string[]> {
  const clean = outcomes.map((o) => "error" in o ? { ...o, error: cut(o.error, 8192) } : o);
  const rows = await sql<{ id: string }[]>`
    select id::text from ${s(sql)}.settle(${worker}, ${
    json(clean)
  }::text::jsonb, ${maxReleases}, ${waitMs}) as id`;
  return rows.map((row) => row.id);
}

/** {@linkcode settle} for one job; false: it is somebody else's. */
const settleOne = async (sql: Sql, worker: string, outcome: Outcome) =>
  (await settle(sql, worker, [outcome])).length > 0;

/** Ends one job as done, with what comes next. @returns whether that stands */
export const finish = (sql: Sql, worker: string, job: Claimed, result: unknown, next?: NewJob[]) =>
  settleOne(sql, worker, { ...fence(job), outcome: "done", result, next });

/** Ends one attempt as failed; tried again in `delay_s` seconds, or without it never. */
export const fail = (sql: Sql, worker: string, job: Claimed, error: string, delay_s?: number) =>
  settleOne(sql, worker, { ...fence(job), outcome: "failed", error, delay_s });

/** Gives one job back to the line, where it keeps its place, because its worker stops. */
export const release = (sql: Sql, worker: string, job: Claimed, why: string) =>
  settleOne(sql, worker, { ...fence(job), outcome: "released", error: why });

const fence = ({ id, attempt }: Claimed) => ({ id, attempt });

/** What a heartbeat brings back. */
export interface Pulse {
  /** False: the worker's own row is gone, so it was taken for dead. */
  alive: boolean;
  /** Whether it is the leader of its role and pool. */
  leader: boolean;
  /** `skipped`: the job's row is locked just now, so its lease runs on. */
  beats: { id: string; state: "renewed" | "skipped" | "lost"; cancel: boolean }[];
  /** Jobs that run in the worker's name but that it did not name: a claim's reply got lost. */
  strays: (Claimed & { claim_token: string })[];
}

/**
 * Renews the worker's row and the leases of all its jobs, with the stage each has reached.
 *
 * @param silentS seconds after which a process that was not seen is no leader
 * @param stalledS how long ago the worker last got around to looking for jobs
 */
export async function heartbeat(
  sql: Sql,
  worker: string,
  jobs: readonly (Claimed & { stage: string | null; progress: number | null })[],
  leaseS: number,
  silentS: number,
  stalledS = 0,
): Promise<Pulse> {
  const [pulse] = await sql<Pulse[]>`
    select * from ${s(sql)}.heartbeat(${worker}, ${
    json(jobs)
  }::text::jsonb, ${leaseS}, ${silentS}, ${stalledS})`;
  return pulse;
}

/** Which of a worker's running jobs somebody asked to cancel. @returns their ids */
export async function cancellations(sql: Sql, worker: string): Promise<string[]> {
  const rows = await sql<{ id: string }[]>`
    select id::text from ${s(sql)}.jobs
    where worker_id = ${worker} and status = 'running' and cancel_requested_at is not null`;
  return rows.map((row) => row.id);
}

/**
 * Cancels a job: at once when it waits, else by asking its worker.
 *
 * @returns the state it is in after, or null when there is no such job
 * @throws Refused when it was sent to a paid service and what came of that is not known yet
 */
export async function cancel(sql: Sql, id: string): Promise<Status | null> {
  const [row] = await refusing(sql<{ status: Status | null }[]>`
    select ${s(sql)}.cancel(${id}) as status`);
  return row.status;
}

/** A statement whose refusal (SQLSTATE SD…) is to be a {@linkcode Refused}. */
export async function refusing<T>(statement: PromiseLike<T>): Promise<T> {
  try {
    return await statement;
  } catch (error) {
    const code = codeOf(error);
    throw /^SD/.test(code) ? new Refused((error as Error).message, code) : error;
  }
}

/** How many running jobs have a lease that ran out. */
export async function expired(sql: Sql): Promise<number> {
  const [row] = await sql`
    select count(*)::integer as n from ${s(sql)}.jobs
    where status = 'running' and lease_until < now()`;
  return row.n;
}

export type Recovered = Pick<JobView, "id" | "kind" | "status">;

/**
 * Takes back jobs whose worker fell silent: see siding.recover. Only to be called by a process
 * that has been in touch with the database for a while without a break, so that an outage of the
 * database is nobody's crash.
 */
export async function recover(sql: Sql, most = 100, maxCrashes = 2): Promise<Recovered[]> {
  return await list(sql<Recovered[]>`
    select id::text, kind, status from ${s(sql)}.recover(${most}, ${maxCrashes})`);
}

/** Fails jobs of kinds that no live worker's code knows, once they are due for `graceS`. */
export async function failUnknownKinds(
  sql: Sql,
  graceS: number,
  silentS: number,
  most = 100,
): Promise<Pick<Job, "id" | "kind">[]> {
  return await list(sql<Pick<Job, "id" | "kind">[]>`
    select id::text, kind from ${s(sql)}.fail_unknown_kinds(${most}, ${graceS}, ${silentS})`);
}

/** A job as people ask for it. */
export interface JobView
  extends Omit<Job, "claimed_at" | "wait_ms" | "trace_parent" | "request_key" | "request_id"> {
  status: Status;
  stage: string | null;
  progress: number | null;
  result: unknown;
  error: string | null;
  created_at: Date;
  due_at: Date;
  claimed_at: Date | null;
  finished_at: Date | null;
  /** The job that this one, which failed, was tried again as. */
  retried_as: string | null;
}

/** Reads jobs by id; those that are not there are left out. */
export async function get(sql: Sql, ids: readonly string[]): Promise<JobView[]> {
  return await list(sql<JobView[]>`
    select id::text, queue, kind, owner, price::text, payload, priority, attempt, failures, crashes,
      releases, snoozes, alone, status, stage, progress, result, error, created_at, due_at,
      claimed_at, finished_at, retried_as::text
    from ${s(sql)}.jobs j where j.id = any(${names(ids)}::bigint[]) order by j.id`);
}

/** Removes final jobs past their retention, files no job came for, rows of processes long gone. */
export async function sweep(sql: Sql, retentionS: number, fileGraceS: number, most = 1000) {
  const [counts] = await sql<{ jobs: number; files: number; processes: number }[]>`
    select jobs::integer, files::integer, processes::integer
    from ${s(sql)}.sweep(${most}, ${retentionS}, ${fileGraceS})`;
  return counts;
}

/** The unfinished jobs of a kind in a queue. */
export interface Count {
  queue: string;
  kind: string;
  paused: boolean;
  max_running: number | null;
  scheduled: number;
  queued: number;
  running: number;
  review: number;
  /** How long the first of the queued has been due. */
  oldest_wait_s: number | null;
}

/** Counts the unfinished jobs, by queue and kind. */
export const counts = (sql: Sql): Promise<Count[]> =>
  list(sql<Count[]>`select * from ${s(sql)}.counts order by queue, kind`);

/**
 * A queue's settings; null lifts a limit. A `max_running`, a `rate_limit` and `fair` need claims in
 * turns: `lock`, unless told.
 */
export interface QueueSettings {
  paused?: boolean;
  claim?: "skip_locked" | "lock" | "repeatable_read";
  max_running?: number | null;
  max_waiting?: number | null;
  max_per_owner?: number | null;
  /** Owners take turns, one job each, and priority orders the jobs of one owner. */
  fair?: boolean;
  /** At most so many starts, retries too, in any period of `rate_period_s` seconds: both or neither. */
  rate_limit?: number | null;
  rate_period_s?: number | null;
}

/** Creates a queue, or changes those of its settings that are given. */
export async function setQueue(sql: Sql, name: string, settings: QueueSettings = {}) {
  await sql`select ${s(sql)}.set_queue(${name}, ${json(settings)}::text::jsonb)`;
}
