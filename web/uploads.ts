/**
 * The bodies of requests, within limits: JSON, and forms whose files go to the database piece by piece
 * as they come. What was stored of a request that comes to nothing is removed, or, where this process
 * ends on the way, is a loose file, which the sweep removes.
 */
import { createHash } from "node:crypto";
import type { Readable } from "node:stream";
import { pipeline } from "node:stream/promises";
import busboy from "busboy";
import { schema } from "../db.ts";
import { writeFile } from "../files.ts";
import { Problem } from "./problem.ts";
import type { Site } from "./site.ts";

/** JSON, and each field of a form: a payload of 1 MiB and what is around it. */
export const MAX_JSON_BYTES = 1_200_000;
/** Files of one job. */
export const MAX_FILES = 20;
const MAX_FIELDS = 50;
/** Forms that are read at a time; each takes a few MB of memory. */
const MAX_UPLOADS = 32;
/** Of these, with one key: who sends slowly must not keep everybody else from sending. */
const MAX_UPLOADS_OF_ONE = 16;
/** Bytes of JSON bodies that are being read or used, of all requests; they take three times that. */
const MAX_HELD_BYTES = 64_000_000;
const BUSY_RETRY_S = 5;
/** A client that sends nothing for so long has gone. */
const IDLE_MS = 60_000;

/** A file of a form, as it was stored. */
export interface Upload {
  id: string;
  name: string;
  /** Of its bytes, in hexadecimal. */
  sha256: string;
}

export interface Form {
  fields: Record<string, string>;
  files: Upload[];
}

const invalid = (field: string, rule: string, value?: string, status = 422) =>
  new Problem(status, `${field}: ${rule}`, {
    errors: [{ field, ...(value !== undefined && { value: value.slice(0, 100) }), rule }],
  });

let heldBytes = 0;

/**
 * Reads a JSON body for `use`, until the end of which it counts as held.
 *
 * @throws Problem 400, 408, 413, 503
 */
export async function withJson<T>(
  request: Request,
  use: (body: unknown) => Promise<T>,
  maxBytes = MAX_JSON_BYTES,
  idleMs = IDLE_MS,
): Promise<T> {
  const pieces: Uint8Array[] = [];
  const stop = new AbortController();
  let bytes = 0;
  try {
    for await (const piece of piecesOf(request, stop, idleMs)) {
      bytes += piece.length;
      heldBytes += piece.length;
      if (bytes > maxBytes) {
        const rule = `the body is larger than ${maxBytes} bytes; a file may be larger`;
        stop.abort(new Problem(413, rule));
      } else if (heldBytes > MAX_HELD_BYTES) {
        const retryAfterS = BUSY_RETRY_S;
        stop.abort(new Problem(503, "too much is being submitted at the moment", { retryAfterS }));
      }
      pieces.push(piece);
    }
    stop.signal.throwIfAborted();
    return await use(await parsed(pieces));
  } finally {
    heldBytes -= bytes;
  }
}

async function parsed(pieces: Uint8Array[]): Promise<unknown> {
  try {
    const whole = new Uint8Array(await new Blob(pieces as Uint8Array<ArrayBuffer>[]).arrayBuffer());
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(whole));
  } catch (error) {
    throw invalid("body", `it must be JSON: ${(error as Error).message}`, undefined, 400);
  }
}

/** A submission as a form has it: its numbers are texts there, and its payload is JSON. */
export function jobOfForm(fields: Record<string, string>): Record<string, unknown> {
  const job: Record<string, unknown> = { ...fields };
  for (const field of ["delay_s", "priority"]) {
    if (/^-?\d+(\.\d+)?$/.test(fields[field] ?? "")) job[field] = Number(fields[field]);
  }
  if (fields.payload !== undefined) {
    try {
      job.payload = JSON.parse(fields.payload);
    } catch (error) {
      throw invalid("payload", `it must be JSON: ${(error as Error).message}`, fields.payload);
    }
  }
  return job;
}

/** By whom each form that is under way is sent. */
const senders: string[] = [];

/** Throws when the fields before the first file say that no file is to be stored. */
type Check = (fields: Form["fields"]) => Promise<void>;

/**
 * Reads a form of multipart/form-data; its files, in the field `file`, are stored as they come, once
 * `check` let them.
 *
 * @param sender whose forms are counted together
 * @throws Problem 400, 408, 413, 422, 429, 503; then nothing of it is kept
 */
export async function readForm(
  site: Site,
  request: Request,
  sender = "admin",
  check?: Check,
): Promise<Form> {
  assertRoom(sender);
  senders.push(sender);
  const files: Upload[] = [];
  try {
    return { fields: await parse(site, request, files, check), files };
  } catch (error) {
    await discard(site, files);
    throw error;
  } finally {
    senders.splice(senders.indexOf(sender), 1);
  }
}

function assertRoom(sender: string): void {
  const busy = { retryAfterS: BUSY_RETRY_S };
  if (senders.filter((other) => other === sender).length >= MAX_UPLOADS_OF_ONE) {
    throw new Problem(429, `uploads: more than ${MAX_UPLOADS_OF_ONE} at a time`, busy);
  }
  if (senders.length >= MAX_UPLOADS) {
    throw new Problem(503, `${MAX_UPLOADS} uploads are under way, as many as there may be`, busy);
  }
}

/** Removes stored files that no job has. The sweep does so too, later. */
export async function discard(site: Site, files: readonly Upload[]): Promise<void> {
  for (const { id } of files) {
    await site.files.run((sql) =>
      sql`delete from ${sql(schema)}.files where id = ${id} and not kept`
    ).catch(() => {});
  }
}

async function parse(
  site: Site,
  request: Request,
  files: Upload[],
  check: Check = () => Promise.resolve(),
): Promise<Form["fields"]> {
  const parser = parserOf(request);
  const fields = new Map<string, string>();
  const stop = new AbortController();
  const fail = (error: unknown) => stop.abort(error);
  let left = MAX_JSON_BYTES;
  parser.on("field", (name: string | undefined, value: string | undefined, { valueTruncated }) => {
    if (name === undefined) return fail(invalid("form", "a part of it has no name"));
    if (value === undefined) return fail(invalid(name.slice(0, 100), "its charset is unknown"));
    if (fields.has(name)) fail(invalid(name.slice(0, 100), "it is there twice"));
    left -= value.length;
    if (valueTruncated || left < 0) {
      fail(
        new Problem(
          413,
          `the fields are larger than ${MAX_JSON_BYTES} bytes; a file may be larger`,
        ),
      );
    }
    fields.set(name, value);
  });
  // One after the other: the next file's bytes are not read before the last one's are stored.
  let stored = Promise.resolve();
  parser.on("file", (name, content: Readable, { filename }) => {
    content.on("error", () => {}); // whoever reads it hears of it, if anybody does
    if (name !== "file") {
      return fail(invalid(name.slice(0, 100), 'a file is sent in the field "file"'));
    }
    // What a browser sends where no file was chosen.
    if (!filename) return content.on("data", () => fail(invalid("file", "it has no name")));
    stored = stored.then(() => files.length ? undefined : check(Object.fromEntries(fields)))
      .then(() => store(site, content, filename))
      .then((file) => void files.push(file))
      .catch(fail);
  });
  parser.on("filesLimit", () => fail(invalid("file", `there are more than ${MAX_FILES}`)));
  parser.on("fieldsLimit", () => fail(invalid("form", `it has more than ${MAX_FIELDS} fields`)));
  let broken: unknown;
  await pipeline(piecesOf(request, stop), parser, { signal: stop.signal })
    .catch((error) => broken = error);
  await stored;
  if (stop.signal.aborted) throw stop.signal.reason;
  if (broken) throw broken instanceof Problem ? broken : brokenOff(broken);
  if (files.length === 0) await check(Object.fromEntries(fields));
  return Object.fromEntries(fields);
}

const brokenOff = (error: unknown) =>
  new Problem(400, `the body broke off, or is no form: ${(error as Error).message}`);

function parserOf(request: Request): busboy.Busboy {
  try {
    return busboy({
      headers: { "content-type": request.headers.get("content-type")! },
      limits: { files: MAX_FILES, fields: MAX_FIELDS, fieldSize: MAX_JSON_BYTES },
      defParamCharset: "utf8",
    });
  } catch (error) {
    throw invalid("Content-Type", (error as Error).message, undefined, 400);
  }
}

/** The body, until it ends or `stop` is aborted, which is done too when nothing comes any more. */
async function* piecesOf(
  request: Request,
  stop: AbortController,
  idleMs = IDLE_MS,
): AsyncGenerator<Uint8Array> {
  const reader = request.body?.getReader();
  stop.signal.addEventListener("abort", () => reader?.cancel().catch(() => {}));
  while (reader) {
    const late = () => stop.abort(new Problem(408, `nothing came for ${idleMs / 1000} s`));
    const timer = setTimeout(late, idleMs);
    const { done, value } = await reader.read().finally(() => clearTimeout(timer))
      .catch((error) => {
        throw brokenOff(error);
      });
    if (done) return;
    yield value;
  }
}

async function store(site: Site, content: Readable, filename: string): Promise<Upload> {
  const hash = createHash("sha256");
  const hashed = ReadableStream.from((async function* () {
    try {
      for await (const piece of content) {
        hash.update(piece);
        yield piece as Uint8Array;
      }
    } catch (error) {
      throw brokenOff(error);
    }
  })());
  const { id, name } = await writeFile(site.files, filename, hashed, site.settings.maxFileBytes);
  return { id, name, sha256: hash.digest("hex") };
}
