/**
 * What a kind of job is. A kind runs in one of three ways:
 * - {@linkcode process}: any command in any language; it can be killed, and cannot starve the heartbeat;
 * - {@linkcode inline}: an async function in the worker, for many small jobs;
 * - {@linkcode paid}: a request to a service that charges for it, sent at most once.
 */
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import type { z } from "zod";
import type { FileInfo } from "../files.ts";
import type { Job, JobView, NewJob } from "../queue.ts";

/** What every kind has. */
export interface Common<S extends z.ZodType> {
  /** Checks a payload at enqueue and again before running. */
  payload: S;
  /** Seconds an attempt may take; 900 by default. */
  timeoutS?: number;
  /** How often a failed attempt is repeated; 3 by default. */
  retries?: number;
  /** Seconds before the next attempt, after so many failures; 10, 30, 90, … up to an hour by default. */
  backoffS?: (failures: number) => number;
  /** Credits that a job submitted through the site costs its owner; none by default. */
  price?: number;
  /** Enqueued by Siding itself, and not for submitting. */
  internal?: boolean;
}

/** A command that reads its job as JSON from stdin and writes JSON lines to stdout; see process.ts. */
export interface ProcessKind<S extends z.ZodType = z.ZodType> extends Common<S> {
  runs: "process";
  command: readonly string[];
  /**
   * Variables for the command. It gets no others than these, PATH, HOME, LANG, TMPDIR, DENO_DIR, and
   * TRACEPARENT where its job is traced.
   */
  env?: Record<string, string>;
}

/** An async function in the worker's own process. */
export interface InlineKind<S extends z.ZodType = z.ZodType> extends Common<S> {
  runs: "inline";
  /** Returns the result. What it returns after `context.signal` is aborted is thrown away. */
  work: (payload: z.output<S>, context: Context) => unknown;
}

/** A request to a service that charges for it. */
export interface PaidKind<S extends z.ZodType = z.ZodType> extends Common<S> {
  runs: "paid";
  /**
   * Sends the request, with `key` as its idempotency key. Returns the request's id.
   * Throws {@linkcode NotSent} only when it is certain that nothing was charged.
   */
  submit: (payload: z.output<S>, key: string, context: Context) => Promise<string>;
  /** Waits for the outcome of a request that was sent. Called again, by another worker, after an interruption. */
  collect: (requestId: string, context: Context) => unknown;
  /** The id of the request that the service has under this key; null when it surely has none. */
  lookup?: (key: string, context: Pick<Context, "job" | "signal">) => Promise<string | null>;
}

/** Any kind. */
// deno-lint-ignore no-explicit-any -- a table of kinds holds kinds of different payloads
type AnyPayload = z.ZodType<any, any>;
export type Kind = ProcessKind<AnyPayload> | InlineKind<AnyPayload> | PaidKind<AnyPayload>;
export type Kinds = Record<string, Kind>;

/** What a job's code may know and do. */
export interface Context {
  job: Job;
  /** Aborted when the job must stop: cancelled, out of time, lost, or its worker stops. */
  signal: AbortSignal;
  /** Says how far it is: shown to people, and kept with the next heartbeat. `progress` from 0 to 1. */
  report: (stage?: string, progress?: number) => void;
  /**
   * Throws unless the job is surely still this worker's: to be called just before what cannot be
   * undone, such as sending a paid request.
   */
  assertMine: () => void;
  /** Enqueues a job when, and only when, this one finishes, in the same statement. */
  next: (job: NewJob) => void;
  /** Another job as it is now, such as the one that brought this one; undefined when there is none. */
  view: (id: string) => Promise<JobView | undefined>;
  inputs: () => Promise<FileInfo[]>;
  read: (file: FileInfo) => ReadableStream<Uint8Array>;
  /** Writes an output file; it is seen once the job is done. */
  write: (name: string, content: ReadableStream<Uint8Array>) => Promise<FileInfo>;
}

export const process = <S extends z.ZodType>(
  kind: Omit<ProcessKind<S>, "runs">,
): ProcessKind<S> => ({
  runs: "process",
  ...kind,
});
export const inline = <S extends z.ZodType>(kind: Omit<InlineKind<S>, "runs">): InlineKind<S> => ({
  runs: "inline",
  ...kind,
});
export const paid = <S extends z.ZodType>(kind: Omit<PaidKind<S>, "runs">): PaidKind<S> => ({
  runs: "paid",
  ...kind,
});

/** Fails the job for good: trying again would not help. */
export class PermanentFailure extends Error {
  override name = "PermanentFailure";
}

/** Puts the job off, which counts as no failure. */
export class Snooze extends Error {
  override name = "Snooze";
  constructor(readonly delayS: number) {
    super(`put off for ${delayS} s`);
  }
}

/**
 * It is certain that nothing was charged: the paid service refused the request, or it never got
 * that far. The job is tried again with the same key, unless the failure is `permanent`.
 */
export class NotSent extends Error {
  override name = "NotSent";
  readonly permanent: boolean;
  constructor(message: string, options: { permanent?: boolean } = {}) {
    super(message);
    this.permanent = options.permanent ?? false;
  }
}

/** Why a job is stopped, as the reason of its AbortSignal. */
export class Stop extends Error {
  override name = "Stop";
  constructor(readonly why: "cancelled" | "lost" | "released" | "timed out", message: string) {
    super(message);
  }
}

/** How long a function that was told to stop may take to heed that. */
export const ABANDON_MS = 5000;

/**
 * What `work` comes to; or, once `signal` was aborted for `graceMs`, the reason of that: a function
 * that does not heed its signal is left behind.
 */
export async function unlessAbandoned<T>(
  work: Promise<T>,
  signal: AbortSignal,
  graceMs: number,
): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  let onAbort = () => {};
  const abandoned = new Promise<never>((_, reject) => {
    onAbort = () => timer = setTimeout(() => reject(signal.reason), graceMs);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
  });
  try {
    return await Promise.race([work, abandoned]);
  } finally {
    signal.removeEventListener("abort", onAbort);
    clearTimeout(timer);
  }
}

/** The job ends in review: whether the paid service has its request is not known. */
export class Uncertain extends Error {
  override name = "Uncertain";
}

/** The kinds of the module at `path`, of the project's own jobs.ts if not given; and Siding's own. */
export async function loadKinds(path?: string): Promise<Kinds> {
  const url = path === undefined
    ? new URL("../jobs.ts", import.meta.url)
    : pathToFileURL(resolve(path));
  // Not above: it is made of what is here.
  const { webhook } = await import("./webhook.ts");
  const { kinds } = await import(url.href);
  if (Object.hasOwn(kinds, "webhook")) throw new TypeError('the kind "webhook" is Siding\'s own');
  return { ...kinds, webhook };
}

/** A payload does not fit its kind. The message names each field at fault. */
export class PayloadError extends Error {
  override name = "PayloadError";
}

/** Checks a payload by its kind. @returns it as given, @throws PayloadError */
export function checkPayload(kinds: Kinds, kind: string, payload: unknown): void {
  if (!Object.hasOwn(kinds, kind)) {
    throw new PayloadError(`unknown kind "${kind}": there are ${Object.keys(kinds).join(", ")}`);
  }
  const parsed = kinds[kind].payload.safeParse(payload);
  if (!parsed.success) throw new PayloadError(issues(parsed.error));
}

/** Zod's issues in one line: `payload.tempo_bpm: Too big: …`. */
export function issues(error: z.ZodError): string {
  return error.issues.map((i) => `${["payload", ...i.path].join(".")}: ${i.message}`).join("; ");
}
