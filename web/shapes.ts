/** The JSON of the API: one schema for each thing, from which its OpenAPI document is made. */
import { z } from "@hono/zod-openapi";

const id = z.string().regex(/^\d+$/).openapi({ example: "42" });
const instant = z.iso.datetime().openapi({ example: "2026-12-01T08:00:00.000Z" });
const status = z.enum(["scheduled", "queued", "running", "review", "done", "failed", "cancelled"]);
const name = z.string().regex(/^[a-z0-9_.-]{1,63}$/);
const count = z.int().min(0);

const state = {
  status,
  stage: z.string().nullable().describe("What it is doing, in its kind's own words"),
  progress: z.number().min(0).max(1).nullable().describe("Of the whole job"),
  attempt: count.describe("0 before the first; rises each time a worker takes it"),
  error: z.string().nullable().describe("Why it failed, or why its last attempt ended"),
  created_at: instant,
  due_at: instant.describe("Since when it waits in line, or when it will"),
  claimed_at: instant.nullable().describe("When its last attempt began"),
  finished_at: instant.nullable(),
};

/** What an event of a job's stream tells. */
export const JobEvent = z.object({ id, ...state }).openapi("JobEvent");

export const ListedJob = z.object({
  id,
  queue: z.string(),
  kind: z.string(),
  owner: z.string().nullable(),
  ...state,
}).openapi("ListedJob");

export const File = z.object({
  id,
  name: z.string(),
  media_type: z.string(),
  bytes: z.int().min(0),
  url: z.string().describe("Where to download it, on this site"),
}).openapi("File");

export const Attempt = z.object({
  attempt: count,
  worker: z.string().nullable(),
  claimed_at: instant.nullable(),
  ended_at: instant,
  outcome: z.enum(["crashed", "released", "snoozed", "failed", "cancelled", "review", "lost"]),
  error: z.string().nullable(),
}).openapi("Attempt");

export const Job = ListedJob.extend({
  payload: z.unknown(),
  priority: z.int(),
  result: z.unknown().describe("Null until it is done"),
  failures: count,
  crashes: count,
  releases: count.describe("How often a worker that stopped gave it back"),
  snoozes: count,
  price: z.string().nullable().describe("Credits that it costs its owner"),
  retried_as: id.nullable().describe("The job that this one, which failed, was tried again as"),
  inputs: z.array(File),
  outputs: z.array(File).describe("Once it is done"),
  attempts: z.array(Attempt).describe("Those that did not end in done, the newest first"),
}).openapi("Job");

export const Submitted = z.object({
  id,
  created: z.boolean().describe("False: an unfinished job of yours has its unique_key"),
  replayed: z.boolean().describe("True: the same request came before, with its Idempotency-Key"),
}).openapi("Submitted");

export const Cancelled = z.object({
  id,
  status: status.describe("cancelled; or running: its worker is asked to end it"),
}).openapi("Cancelled");

export const JobPage = z.object({
  items: z.array(ListedJob),
  next_cursor: z.string().nullable().describe(
    "Where to go on; null at the end. A page may be short, even empty, and not be the last",
  ),
}).openapi("JobPage");

export const Queue = z.object({
  name: z.string(),
  paused: z.boolean(),
  claim: z.enum(["skip_locked", "lock", "repeatable_read"]),
  max_running: count.nullable(),
  max_waiting: count.nullable(),
  max_per_owner: count.nullable(),
  fair: z.boolean().describe("Owners take turns"),
  rate_limit: count.nullable().describe("Starts in any rate_period_s seconds"),
  rate_period_s: z.number().nullable(),
  scheduled: count,
  queued: count,
  running: count,
  review: count,
  oldest_wait_s: z.number().nullable().describe("How long the first in line have waited"),
}).openapi("Queue");

export const QueuePage = z.object({
  items: z.array(Queue),
  counted_to: count.describe("No count goes further: this many may be more"),
}).openapi("QueuePage");

export const Worker = z.object({
  id: z.string().describe("Of this boot of it"),
  name: z.string(),
  pool: z.string(),
  version: z.string(),
  state: z.enum(["busy", "idle", "silent"]),
  running: count,
  concurrency: count,
  queues: z.array(z.string()).nullable().describe("Null: all of them"),
  kinds: z.array(z.string()),
  started_at: instant,
  seen_at: instant,
}).openapi("Worker");

export const WorkerPage = z.object({ items: z.array(Worker) }).openapi("WorkerPage");

/** RFC 9457. */
export const ProblemShape = z.object({
  type: z.string(),
  title: z.string(),
  status: z.int(),
  detail: z.string(),
  errors: z.array(z.object({
    field: z.string(),
    value: z.unknown().optional(),
    rule: z.string(),
  })).optional().describe("What is wrong with which field"),
}).openapi("Problem");

export const JobQuery = z.strictObject({
  status: status.optional(),
  kind: name.optional(),
  queue: name.optional(),
  owner: z.string().min(1).max(200).regex(/^[^\0]*$/).optional().describe(
    "The admin's alone: others see their own jobs",
  ),
  limit: z.string().regex(/^\d+$/, "it must be a whole number from 1 to 200").transform(Number)
    .pipe(z.int().min(1).max(200)).default(50)
    .openapi({ type: "integer", minimum: 1, maximum: 200, default: 50 }),
  cursor: z.string().regex(/^\d{1,19}$/, "it must be a next_cursor").optional(),
});
