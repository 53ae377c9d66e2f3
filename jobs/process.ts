/**
 * Runs a job as a process of its own, in any language:
 * - the working folder is its own and goes with it; its input files are in `in/`, and what it
 *   leaves in `out/` become its output files;
 * - stdin is one JSON object: {id, kind, attempt, owner, payload, files: [{name, path, media_type, bytes}]};
 * - stdout is one JSON object a line: {"stage": "…", "progress": 0.4} as often as it likes, with
 *   "next": [{kind, payload, …}] on any for jobs to enqueue when it is done; and a last one,
 *   {"result": …} or {"error": "…", "retry": false} or {"retry_after_s": 60};
 * - the end of stderr is kept for the error of a process that fails without a word;
 * - when it has to stop it gets SIGTERM, and SIGKILL 5 s later, and its children too.
 *
 * It runs under guard.sh, which ends it when this process cannot.
 */
import { lstat, mkdir, readdir, rm, stat, writeFile } from "node:fs/promises";
import { existsSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { baseName } from "../files.ts";
import type { Job, NewJob } from "../queue.ts";
import { traceParent } from "../tracing.ts";
import { type Context, PermanentFailure, type ProcessKind, Snooze, Stop } from "./kind.ts";

const GUARD = fileURLToPath(new URL("guard.sh", import.meta.url));
/** A line of stdout at the most: a result of 1 MiB and its wrapping. */
const MAX_LINE_BYTES = 1_200_000;
/** How much of stderr's end is kept. */
const STDERR_BYTES = 4096;
/** How long its output is read on after its end: a child in a session of its own may hold it open. */
const AFTERMATH_MS = 2000;
/** Where process ids are ours: another container may share the temporary folder, but not these. */
const NOWHERE = "0"; // not on Linux
let space: string | undefined;
/** Work folders; the second number is the process id of their worker. */
const FOLDER = /^siding-job-(\d+)-(\d+)-/;
const DAY_MS = 86_400_000;

/** A job's lease, for its guard. */
export interface Lease {
  /** Seconds between SIGTERM and SIGKILL. */
  graceS: number;
  /** Has `tell` told, now and at each renewal, how many seconds the job may still run. @returns to stop it */
  onRenewal: (tell: (leftS: number) => void) => () => void;
  /** Throws a {@linkcode Stop} unless it surely runs on. */
  assertMine: () => void;
}
const forEver: Lease = { graceS: 5, onRenewal: () => () => {}, assertMine: () => {} };

/** What the last line said. */
type Verdict =
  | { result: unknown }
  | { error: string; retry: boolean }
  | { retry_after_s: number };

/**
 * Asks a shell of /proc, which Deno shows to those alone who may do everything.
 *
 * @returns where process ids are ours, and those that are there
 */
async function processesHere(): Promise<{ space: string; pids: Set<string> }> {
  const { stdout } = await new Deno.Command("/bin/sh", {
    args: ["-c", "readlink /proc/self/ns/pid && cd /proc && echo [0-9]*"],
    stdin: "null",
    stderr: "null",
  }).output();
  const [link, pids] = new TextDecoder().decode(stdout).split("\n");
  return { space: pids ? link.replace(/\D/g, "") : NOWHERE, pids: new Set(pids?.split(" ")) };
}

/** @returns the result; throws what ended the job otherwise, or the signal's reason when stopped */
export async function runProcess(
  kind: ProcessKind,
  payload: unknown,
  context: Context,
  lease: Lease = forEver,
): Promise<unknown> {
  space ??= (await processesHere()).space;
  const folder = await Deno.makeTempDir({ prefix: `siding-job-${space}-${Deno.pid}-` })
    .catch((error) => {
      throw new Error(`no work folder could be made in ${tmpdir()}: ${error.message}`);
    });
  try {
    const files = await fetchInputs(folder, context);
    const { id, kind: name, attempt, owner } = context.job;
    const input = { id, kind: name, attempt, owner, payload, files };
    await writeFile(join(folder, "job.json"), JSON.stringify(input));
    const verdict = await converse(kind, folder, context, lease);
    if ("retry_after_s" in verdict) throw new Snooze(verdict.retry_after_s);
    if ("error" in verdict) {
      throw verdict.retry ? new Error(verdict.error) : new PermanentFailure(verdict.error);
    }
    await storeOutputs(join(folder, "out"), context);
    return verdict.result;
  } finally {
    // What cannot be removed (a folder that the job closed) is no reason to lose a result.
    await rm(folder, { recursive: true, force: true }).catch(() => {});
  }
}

/**
 * Removes work folders that a worker has left behind: killed together with its guard, or before it
 * had started one. Where process ids do not show whether it is here (not on Linux), those a day old.
 */
export async function sweepFolders(parent = tmpdir()): Promise<void> {
  // The folders first: a process that comes meanwhile, with its folder, is not among them.
  const names = (await readdir(parent).catch(() => [])).filter((name) => FOLDER.test(name));
  const here = await processesHere();
  for (const name of names) {
    const [, space, pid] = FOLDER.exec(name)!;
    const path = join(parent, name);
    if (space !== here.space || here.pids.has(pid)) continue;
    const age = await stat(path).then((info) => Date.now() - info.mtimeMs, () => 0);
    // Another worker may be at it too, or it may be another user's: no reason not to start.
    if (space !== NOWHERE || age > DAY_MS) {
      await rm(path, { recursive: true, force: true }).catch(() => {});
    }
  }
}

/** Streams the input files to `in/<n>/<name>`, and makes `out/`. */
async function fetchInputs(folder: string, context: Context) {
  await mkdir(join(folder, "out"));
  const files = [];
  for (const [index, file] of (await context.inputs()).entries()) {
    const path = join("in", String(index), baseName(file.name));
    await mkdir(join(folder, "in", String(index)), { recursive: true });
    const target = await Deno.open(join(folder, path), { write: true, createNew: true });
    await context.read(file).pipeTo(target.writable, { signal: context.signal });
    files.push({ name: file.name, path, media_type: file.media_type, bytes: file.bytes });
  }
  return files;
}

/** Writes what the process left in `out/`, also in folders in it. Links are left alone: they may point anywhere. */
async function storeOutputs(folder: string, context: Context): Promise<void> {
  if (!await lstat(folder).then((info) => info.isDirectory(), () => false)) return;
  for await (const entry of Deno.readDir(folder)) {
    context.signal.throwIfAborted();
    const path = join(folder, entry.name);
    if (entry.isDirectory) await storeOutputs(path, context);
    if (!entry.isFile) continue;
    const file = await Deno.open(path).catch((error) => {
      throw new PermanentFailure(`its output file ${path}: ${error.message}`);
    });
    await context.write(entry.name, file.readable);
  }
}

/** Starts the process, hears its lines, and sees it and its children end. */
async function converse(
  kind: ProcessKind,
  folder: string,
  context: Context,
  lease: Lease,
): Promise<Verdict> {
  const { signal } = context;
  signal.throwIfAborted();
  const child = new Deno.Command("/bin/sh", {
    args: [GUARD, String(lease.graceS), ...kind.command],
    cwd: folder,
    clearEnv: true,
    env: environment(context.job, kind.env),
    stdin: "piped",
    stdout: "piped",
    stderr: "piped",
    detached: true, // out of reach of a terminal's Ctrl-C, which is for the worker
  }).spawn();
  const guard = child.stdin.getWriter();
  // Closing its stdin is how the guard is told, by our wish or by our death.
  const stop = () => guard.close().catch(() => {});
  const stopTelling = lease.onRenewal((leftS) => {
    guard.write(new TextEncoder().encode(`${Math.max(0, leftS)}\n`)).catch(() => {});
  });
  signal.addEventListener("abort", stop);
  const enough = new AbortController();
  const stderr = tail(piecesOf(child.stderr, enough.signal), STDERR_BYTES);
  const lines = hear(piecesOf(child.stdout, enough.signal), context).catch((error: unknown) => {
    stop(); // it does not keep to the protocol
    return error instanceof Error ? error : new Error(String(error));
  });
  const { code } = await child.status;
  stopTelling();
  const timer = setTimeout(() => enough.abort(), AFTERMATH_MS);
  const [verdict, said] = [await lines, await stderr];
  clearTimeout(timer);
  signal.removeEventListener("abort", stop);
  await stop();
  signal.throwIfAborted();
  if (existsSync(join(folder, "overdue"))) {
    throw new Stop("released", "its worker could not renew its lease");
  }
  if (verdict instanceof Error) throw verdict;
  if (verdict && (code === 0 || "error" in verdict)) return verdict;
  // A shell's way to tell of a signal.
  const how = code > 128
    ? `ended with ${code}, as after ${
      code === 137 ? "SIGKILL (out of memory?)" : `signal ${code - 128}`
    }`
    : `exited with code ${code}`;
  const without = verdict ? "" : " without a result";
  throw new Error(`the process ${how}${without}${said && `; the end of its stderr: ${said}`}`);
}

/** The few variables a process needs to find its way, and its trace to go on; no secret of the worker's. */
function environment(job: Job, own: Record<string, string> = {}): Record<string, string> {
  const kept = ["PATH", "HOME", "LANG", "TMPDIR", "DENO_DIR", "SystemRoot"].flatMap((name) => {
    const value = Deno.env.get(name);
    return value === undefined ? [] : [[name, value]];
  });
  const parent = traceParent() ?? job.trace_parent;
  return { ...Object.fromEntries(kept), ...(parent && { TRACEPARENT: parent }), ...own };
}

/** Reads stdout line by line, reporting stages. @returns what the last line said */
async function hear(
  stdout: AsyncIterable<Uint8Array>,
  context: Context,
): Promise<Verdict | undefined> {
  let verdict: Verdict | undefined;
  let number = 0;
  for await (const line of linesOf(stdout)) {
    number++;
    if (line.trim() === "") continue;
    verdict = understand(line, number, context);
  }
  return verdict;
}

function understand(line: string, number: number, context: Context): Verdict | undefined {
  const wrong = (what: string) => {
    const shown = line.length > 100 ? `${line.slice(0, 100)}…` : line;
    return new PermanentFailure(`line ${number} of the process's stdout ${what}: ${shown}`);
  };
  let said: Record<string, unknown>;
  try {
    said = JSON.parse(line);
  } catch {
    throw wrong("is not JSON");
  }
  if (typeof said !== "object" || said === null || Array.isArray(said)) {
    throw wrong("is not a JSON object");
  }
  if (Array.isArray(said.next)) { for (const job of said.next) context.next(job as NewJob); }
  if ("result" in said) return { result: said.result };
  if ("error" in said) return { error: String(said.error), retry: said.retry !== false };
  if ("retry_after_s" in said) {
    const delay = said.retry_after_s;
    if (typeof delay === "number" && delay >= 0) return { retry_after_s: delay };
    throw wrong("has a retry_after_s that is not a number of seconds");
  }
  if (typeof said.stage !== "string" && typeof said.progress !== "number") {
    throw wrong("has neither stage, progress, result, error nor retry_after_s");
  }
  context.report(
    typeof said.stage === "string" ? said.stage : undefined,
    typeof said.progress === "number" ? said.progress : undefined,
  );
}

/** The pieces of a stream, to its end or until `enough` is aborted. */
async function* piecesOf(stream: ReadableStream<Uint8Array>, enough: AbortSignal) {
  const reader = stream.getReader();
  const cancel = () => reader.cancel().catch(() => {});
  enough.addEventListener("abort", cancel);
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    enough.removeEventListener("abort", cancel);
    await cancel();
  }
}

/** Cuts a stream into lines, and refuses one that would fill the memory. */
async function* linesOf(stream: AsyncIterable<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  let pieces: Uint8Array[] = [];
  let bytes = 0;
  const line = () => {
    const whole = new Uint8Array(bytes);
    let at = 0;
    for (const piece of pieces) {
      whole.set(piece, at);
      at += piece.length;
    }
    pieces = [];
    bytes = 0;
    return decoder.decode(whole);
  };
  for await (const chunk of stream) {
    let rest = chunk;
    for (let end = rest.indexOf(10); end !== -1; end = rest.indexOf(10)) {
      pieces.push(rest.subarray(0, end));
      bytes += end;
      yield line();
      rest = rest.subarray(end + 1);
    }
    pieces.push(rest);
    bytes += rest.length;
    if (bytes > MAX_LINE_BYTES) {
      throw new PermanentFailure(
        `the process wrote a line of more than ${MAX_LINE_BYTES} bytes to stdout: ` +
          "larger output is a file in out/",
      );
    }
  }
  if (bytes > 0) yield line();
}

/** The last `most` bytes of a stream, as text. */
async function tail(stream: AsyncIterable<Uint8Array>, most: number): Promise<string> {
  let kept = new Uint8Array();
  for await (const chunk of stream) {
    const joined = new Uint8Array(kept.length + chunk.length);
    joined.set(kept);
    joined.set(chunk, kept.length);
    kept = joined.slice(-most);
  }
  return new TextDecoder().decode(kept).trim();
}
