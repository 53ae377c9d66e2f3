/**
 * Runs a job as a process of its own, in any language:
 * - the working folder is its own and goes with it; its input files are in `in/`, and what it
 *   leaves in `out/` become its output files;
 * - stdin is one JSON object: {id, kind, attempt, owner, payload, files: [{name, path, media_type, bytes}]};
 * - stdout is one JSON object a line: {"stage": "…", "progress": 0.4} as often as it likes, with
 *   "next": [{kind, payload, …}] on any for jobs to enqueue when it is done; and a last one,
 *   {"result": …} or {"error": "…", "retry": false} or {"retry_after_s": 60};
 * - the end of stderr is kept for the error of a process that fails without a word.
 */
import { mkdir, rm } from "node:fs/promises";
import { rmSync } from "node:fs";
import { join } from "node:path";
import { baseName } from "../files.ts";
import type { NewJob } from "../queue.ts";
import { type Context, PermanentFailure, type ProcessKind, Snooze } from "./kind.ts";

/** A line of stdout at the most: a result of 1 MiB and its wrapping. */
const MAX_LINE_BYTES = 1_200_000;
/** How much of stderr's end is kept. */
const STDERR_BYTES = 4096;
/** After SIGTERM, until SIGKILL. */
const KILL_AFTER_MS = 5000;

/** What the last line said. */
type Verdict =
  | { result: unknown }
  | { error: string; retry: boolean }
  | { retry_after_s: number };

/** The folders and process groups of running jobs, which go with this process however it ends. */
const live = new Map<string, number | undefined>();
addEventListener("unload", () => {
  for (const [folder, pid] of live) {
    if (pid !== undefined) killGroup(pid, "SIGKILL");
    rmSync(folder, { recursive: true, force: true });
  }
});

/** @returns the result; throws what ended the job otherwise, or the signal's reason when stopped */
export async function runProcess(
  kind: ProcessKind,
  payload: unknown,
  context: Context,
  workRoot?: string,
): Promise<unknown> {
  const folder = await Deno.makeTempDir({ dir: workRoot, prefix: "siding-job-" });
  live.set(folder, undefined);
  try {
    const files = await fetchInputs(folder, context);
    const { id, kind: name, attempt, owner } = context.job;
    const input = JSON.stringify({ id, kind: name, attempt, owner, payload, files });
    const verdict = await converse(kind, folder, input, context);
    if ("retry_after_s" in verdict) throw new Snooze(verdict.retry_after_s);
    if ("error" in verdict) {
      throw verdict.retry ? new Error(verdict.error) : new PermanentFailure(verdict.error);
    }
    await storeOutputs(join(folder, "out"), context);
    return verdict.result;
  } finally {
    live.delete(folder);
    await rm(folder, { recursive: true, force: true });
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
  for await (const entry of Deno.readDir(folder)) {
    context.signal.throwIfAborted();
    const path = join(folder, entry.name);
    if (entry.isDirectory) await storeOutputs(path, context);
    if (entry.isFile) await context.write(entry.name, (await Deno.open(path)).readable);
  }
}

/** Starts the process, gives it its job, hears its lines, and sees it and its children end. */
async function converse(
  kind: ProcessKind,
  folder: string,
  input: string,
  context: Context,
): Promise<Verdict> {
  const { signal } = context;
  signal.throwIfAborted();
  const child = new Deno.Command(kind.command[0], {
    args: kind.command.slice(1),
    cwd: folder,
    clearEnv: true,
    env: environment(kind.env),
    stdin: "piped",
    stdout: "piped",
    stderr: "piped",
    detached: true, // a process group of its own, so that its children can be ended too
  }).spawn();
  live.set(folder, child.pid);
  let killTimer: ReturnType<typeof setTimeout> | undefined;
  const stop = () => {
    killGroup(child.pid, "SIGTERM");
    killTimer = setTimeout(() => killGroup(child.pid, "SIGKILL"), KILL_AFTER_MS);
  };
  signal.addEventListener("abort", stop);
  const stderr = tail(child.stderr, STDERR_BYTES);
  const lines = hear(child.stdout, context).catch((error: unknown) => {
    killGroup(child.pid, "SIGKILL"); // it does not keep to the protocol
    return error instanceof Error ? error : new Error(String(error));
  });
  await give(child.stdin, input);
  const status = await child.status;
  // Children that it left behind would run on, and hold its output open.
  killGroup(child.pid, "SIGKILL");
  const verdict = await lines;
  const said = await stderr;
  clearTimeout(killTimer);
  signal.removeEventListener("abort", stop);
  signal.throwIfAborted();
  if (verdict instanceof Error) throw verdict;
  if (verdict && (status.success || "error" in verdict)) return verdict;
  const how = status.signal
    ? `was ended by ${status.signal}${status.signal === "SIGKILL" ? " (out of memory?)" : ""}`
    : `exited with code ${status.code}`;
  const without = verdict ? "" : " without a result";
  throw new Error(`the process ${how}${without}${said && `; the end of its stderr: ${said}`}`);
}

/** The few variables a process needs to find its way; no secret of the worker's. */
function environment(own: Record<string, string> = {}): Record<string, string> {
  const kept = ["PATH", "HOME", "LANG", "TMPDIR", "DENO_DIR", "SystemRoot"].flatMap((name) => {
    const value = Deno.env.get(name);
    return value === undefined ? [] : [[name, value]];
  });
  return { ...Object.fromEntries(kept), ...own };
}

/** A process may end without having read its input: no fault of its own. */
async function give(stdin: WritableStream<Uint8Array>, input: string): Promise<void> {
  const writer = stdin.getWriter();
  try {
    await writer.write(new TextEncoder().encode(input));
    await writer.close();
  } catch {
    // EPIPE
  }
}

/** Reads stdout line by line, reporting stages. @returns what the last line said */
async function hear(
  stdout: ReadableStream<Uint8Array>,
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

/** Cuts a stream into lines, and refuses one that would fill the memory. */
async function* linesOf(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
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
async function tail(stream: ReadableStream<Uint8Array>, most: number): Promise<string> {
  let kept = new Uint8Array();
  for await (const chunk of stream) {
    const joined = new Uint8Array(kept.length + chunk.length);
    joined.set(kept);
    joined.set(chunk, kept.length);
    kept = joined.slice(-most);
  }
  return new TextDecoder().decode(kept).trim();
}

function killGroup(pid: number, signal: Deno.Signal): void {
  try {
    Deno.kill(-pid, signal);
  } catch {
    // No process of the group is left.
  }
}
