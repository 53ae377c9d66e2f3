/**
 * A recording to an arrangement for a band, by a service that charges for each request. It shows
 * what a paid kind takes: what is certainly unsent is told from what may have been charged, every
 * request has a time limit, and whoever resumes the job needs the request's id only.
 *
 * The service is that of SIDING_BAND_URL; dev/band_service.ts stands in for it.
 */
import { z } from "zod";
import { describe, pause } from "../db.ts";
import type { FileInfo } from "../files.ts";
import { type Context, NotSent, PermanentFailure } from "./kind.ts";

/** How long sending the recording and waiting for the reply may take. */
const SUBMIT_MS = 30_000;
/** How long a question may take. */
const ASK_MS = 10_000;
/** Between two questions whether the arrangement is done. */
const POLL_MS = 500;
/** Questions in a row that the service leaves unanswered, before the attempt fails and the queue waits. */
const POLLS_IN_VAIN = 5;
/** What the service replies, with an error of its own, before it charges. Another time may be better … */
const UNCHARGED = [402, 429, 503];
/** … or not. */
const REFUSED = [400, 413, 422];

const Accepted = z.object({ id: z.string().min(1).max(200) });
const Refusal = z.object({ error: z.string().min(1) });
const Arrangement = z.object({
  title: z.string(),
  parts: z.array(z.object({ instrument: z.string(), abc: z.string() })).min(1),
});
const Request = z.discriminatedUnion("status", [
  z.object({ status: z.literal("working"), progress: z.number() }),
  z.object({ status: z.literal("done"), result: Arrangement }),
  z.object({ status: z.literal("failed"), error: z.string().optional() }),
]);

/** Sends the recording. @returns the request's id */
export async function submit(
  { title }: { title?: string },
  key: string,
  context: Context,
): Promise<string> {
  const { recording, url } = await prepare(title, context).catch((error) => {
    throw error instanceof NotSent ? error : new NotSent(describe(error));
  });
  context.assertMine();
  // It does not heed context.signal: cut off, the request might be charged without our knowing.
  const reply = await ask(url, SUBMIT_MS, {
    method: "POST",
    headers: { "idempotency-key": key, "content-type": recording.media_type },
    body: context.read(recording),
  }).catch((error) => {
    throw error instanceof Unreachable ? new NotSent(error.message) : error;
  });
  const accepted = Accepted.safeParse(reply.body);
  if (reply.ok && accepted.success) return accepted.data.id;
  const refusal = Refusal.safeParse(reply.body);
  // A status alone may be the word of something in between.
  if (refusal.success && [...UNCHARGED, ...REFUSED].includes(reply.status)) {
    throw new NotSent(refusal.data.error, { permanent: REFUSED.includes(reply.status) });
  }
  throw unexpected(reply);
}

/** Waits for the arrangement, and leaves it as band.abc, a tune for each part. */
export async function collect(id: string, context: Context) {
  const { title, parts } = await arrangement(id, context);
  const tunes = parts.map(({ abc }) => abc.trim());
  await context.write("band.abc", new Blob([`%abc-2.1\n\n${tunes.join("\n\n")}\n`]).stream());
  return { title, parts: parts.length };
}

/** The id of the request that the service has under this key. */
export async function lookup(key: string): Promise<string | null> {
  const reply = await ask(urlOf("requests", { key }), ASK_MS);
  if (isUnknown(reply)) return null;
  const known = Accepted.safeParse(reply.body);
  if (reply.ok && known.success) return known.data.id;
  throw unexpected(reply);
}

/** What can fail while nothing is sent yet: the recording and the address. */
async function prepare(title: string | undefined, context: Context) {
  const files = await context.inputs();
  if (files.length !== 1) {
    const message = `one input file is wanted, the recording, and not ${files.length}`;
    throw new NotSent(message, { permanent: true });
  }
  const [recording] = files;
  return { recording, url: urlOf("requests", { title: title ?? nameOf(recording) }) };
}

const nameOf = ({ name }: FileInfo) => name.replace(/\.[^.]+$/, "");

function urlOf(path: string, query: Record<string, string> = {}): URL {
  const base = Deno.env.get("SIDING_BAND_URL");
  if (!base) throw new Error("SIDING_BAND_URL is not set");
  if (!URL.canParse(base)) throw new Error("SIDING_BAND_URL is not a URL");
  const url = new URL(path, base.endsWith("/") ? base : `${base}/`);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  return url;
}

async function arrangement(id: string, context: Context): Promise<z.infer<typeof Arrangement>> {
  const { signal } = context;
  let inVain = 0;
  while (!signal.aborted) {
    try {
      const request = await poll(id, signal);
      if (request.status === "done") return request.result;
      context.report("arrange", request.progress);
      inVain = 0;
    } catch (error) {
      if (error instanceof PermanentFailure || ++inVain === POLLS_IN_VAIN) throw error;
    }
    await pause(POLL_MS, signal);
  }
  throw signal.reason;
}

/** How far a request is. @throws PermanentFailure when there is nothing to wait for */
async function poll(id: string, signal: AbortSignal) {
  const reply = await ask(urlOf(`requests/${encodeURIComponent(id)}`), ASK_MS, { signal });
  if (isUnknown(reply)) throw new PermanentFailure(`the service does not know request ${id}`);
  const request = Request.safeParse(reply.body);
  if (!reply.ok || !request.success) throw unexpected(reply);
  const { data } = request;
  if (data.status !== "failed") return data;
  throw new PermanentFailure(data.error ?? `the service failed at request ${id}`);
}

/** The connection could not be made, so nothing was sent. */
class Unreachable extends Error {
  override name = "Unreachable";
}

interface Reply {
  ok: boolean;
  status: number;
  /** The JSON of its body; undefined when that is none. */
  body: unknown;
}

/** Asks the service, for `limitMs` at the most. @throws Unreachable when it certainly was not asked */
async function ask(url: URL, limitMs: number, init: RequestInit = {}): Promise<Reply> {
  // A connection each. When a used one breaks, fetch sends again by itself what it still has (seen in
  // 2.9.6; denoland/deno #36415), and what is left there of an earlier reply could pass for ours.
  using client = Deno.createHttpClient({ poolMaxIdlePerHost: 0 });
  const limit = AbortSignal.timeout(limitMs);
  const signal = init.signal ? AbortSignal.any([init.signal, limit]) : limit;
  try {
    const response = await fetch(url, { ...init, client, signal, redirect: "manual" });
    const text = await response.text();
    return { ok: response.ok, status: response.status, body: parsed(text) };
  } catch (error) {
    if (init.signal?.aborted) throw error;
    if (limit.aborted) throw new Error(`the service did not reply within ${limitMs / 1000} s`);
    // Deno has no code for it. Should its words change, this is an error like the others: uncertain.
    const cause = describe((error as Error).cause);
    if (cause.includes("client error (Connect)")) {
      throw new Unreachable("the service could not be reached");
    }
    throw new Error("the connection to the service broke before its reply", { cause: error });
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** The service itself says that there is no such request, and not something in between. */
const isUnknown = ({ status, body }: Reply) => status === 404 && Refusal.safeParse(body).success;

function unexpected({ status, body }: Reply): Error {
  const refusal = Refusal.safeParse(body);
  return new Error(
    `the service replied ${status}${refusal.success ? `: ${refusal.data.error}` : ""}`,
  );
}
