#!/usr/bin/env -S deno run -A
/**
 * Enqueues one job, with its files, and prints its id.
 *
 *     deno task enqueue transcribe --file song.wav --payload '{"title": "Song"}' --wait
 *
 * With --wait it follows the job's stages to the end and writes its output files into a folder.
 *
 * Exit codes: 0 enqueued, with --wait done; 1 refused, with --wait not done; 2 usage; 3 the
 * database could not be reached; 130 stopped while waiting, and the job goes on.
 */
import { mkdir } from "node:fs/promises";
import { basename, join } from "node:path";
import * as config from "../config.ts";
import { Database, pause } from "../db.ts";
import { outputsOf, readFile, writeFile } from "../files.ts";
import { kinds } from "../jobs.ts";
import { checkPayload, PayloadError } from "../jobs/kind.ts";
import { enqueue, type Enqueued, get, type JobView, type NewJob } from "../queue.ts";

/** How often the job is asked for while waiting. */
const POLL_MS = 500;

const program = {
  name: "enqueue",
  summary: "Enqueues one job, with its files, and prints its id.",
  usage: "KIND [flags]",
  example: `deno task enqueue transcribe --file song.wav --payload '{"title": "Song"}' --wait`,
  exits: {
    0: "enqueued; with --wait: done",
    1: "refused; with --wait: not done",
    130: "stopped while waiting, and the job goes on",
  },
};
const { databaseUrl, prepare, statementLimitMs, maxFileBytes } = config.settings;
const spec = {
  databaseUrl,
  prepare,
  statementLimitMs,
  maxFileBytes,
  payload: config.flag(config.text("the job's payload, a JSON object")),
  file: config.many("an input file; may be given several times"),
  owner: config.flag(config.text("whose job it is")),
  queue: config.flag(config.text("the queue; default if not given")),
  priority: config.flag(config.int(0, -1_000_000, 1_000_000, "larger is sooner")),
  at: config.flag(config.instant("not before this instant, such as 2026-12-01T08:00:00Z")),
  key: config.flag(config.text("an unfinished job of the kind with this key is returned instead")),
  price: config.flag({
    ...config.int(
      0,
      1,
      Number.MAX_SAFE_INTEGER,
      "credits that it costs its owner; free if not given",
    ),
    fallback: undefined,
  } as config.Setting<number | undefined>),
  wait: config.flag(config.yes("follow it to the end, and write its output files")),
  out: config.flag(config.text("the folder for them; job-ID if not given")),
  json: config.flag(config.yes("print one JSON object instead of text")),
};
type Settings = ReturnType<typeof config.configuration<typeof spec>>;

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const url = config.requireDatabase(settings.databaseUrl);
  const job = jobOf(settings);
  const sizes = await Promise.all(settings.file.map((path) => sizeOf(path)));
  const large = sizes.findIndex((bytes) => bytes > settings.maxFileBytes);
  if (large !== -1) {
    throw new Error(
      `${settings.file[large]} has ${sizes[large]} bytes: the limit is ${settings.maxFileBytes} ` +
        "(SIDING_MAX_FILE_BYTES)",
    );
  }

  const options = { max: 2, name: "siding enqueue", prepare: settings.prepare };
  const db = new Database(url, options, settings.statementLimitMs);
  try {
    const files: string[] = [];
    for (const path of settings.file) {
      const content = (await Deno.open(path)).readable;
      files.push((await writeFile(db, basename(path), content, settings.maxFileBytes)).id);
    }
    const [entry] = await db.run((sql) => enqueue(sql, [{ ...job, files }]));
    if (!settings.wait) {
      console.log(settings.json ? JSON.stringify(entry) : entry.id);
      return 0;
    }
    return await follow(db, entry, settings, signal);
  } finally {
    await db.close();
  }
}

/** The job of the flags. @throws UsageError that names the flag, the value and the rule */
function jobOf(settings: Settings): NewJob {
  const [kind, ...more] = settings.rest;
  const known = Object.keys(kinds).join(", ");
  if (kind === undefined) throw new config.UsageError(`KIND is missing: there are ${known}`);
  if (more.length > 0) throw new config.UsageError(`one KIND is wanted, not also "${more[0]}"`);
  let payload: unknown;
  try {
    payload = JSON.parse(settings.payload ?? "{}");
  } catch (error) {
    throw new config.UsageError(`--payload is not JSON: ${(error as Error).message}`);
  }
  try {
    checkPayload(kinds, kind, payload);
  } catch (error) {
    if (error instanceof PayloadError) throw new config.UsageError(error.message);
    throw error;
  }
  return {
    kind,
    payload,
    owner: settings.owner,
    queue: settings.queue,
    priority: settings.priority,
    due_at: settings.at,
    unique_key: settings.key,
    price: settings.price,
  };
}

async function sizeOf(path: string): Promise<number> {
  const info = await Deno.stat(path).catch((error) => {
    throw new config.UsageError(`--file ${path}: ${error.message}`);
  });
  if (!info.isFile) throw new config.UsageError(`--file ${path}: it is not a file`);
  return info.size;
}

/** Shows the job's stages on one line of a terminal, or a line each elsewhere, until it is final. */
async function follow(
  db: Database,
  entry: Enqueued,
  settings: Settings,
  signal: AbortSignal,
): Promise<number> {
  const terminal = Deno.stderr.isTerminal();
  const say = (line: string) =>
    Deno.stderr.writeSync(new TextEncoder().encode(terminal ? `\r\x1b[K${line}` : `${line}\n`));
  let last = "";
  while (!signal.aborted) {
    const [job] = await db.run((sql) => get(sql, [entry.id]));
    if (!job) throw new Error(`job ${entry.id} is gone`);
    const line = describe(job);
    if (line !== last) say(last = line);
    if (["done", "failed", "cancelled", "review"].includes(job.status)) {
      if (terminal) say("");
      return await conclude(db, entry, job, settings);
    }
    await pause(POLL_MS, signal);
  }
  say(`stopped waiting; job ${entry.id} goes on\n`);
  return 130;
}

function describe(job: JobView): string {
  const progress = job.progress === null ? "" : ` ${Math.round(job.progress * 100)}%`;
  const stage = job.status === "running" && job.stage ? `, ${job.stage}${progress}` : "";
  return `job ${job.id}: ${job.status}${stage}`;
}

/** Writes the output files and prints how the job ended. */
async function conclude(db: Database, entry: Enqueued, job: JobView, settings: Settings) {
  const folder = settings.out ?? `job-${job.id}`;
  const files = [];
  for (const file of await outputsOf(db, job.id)) {
    await mkdir(folder, { recursive: true });
    const path = join(folder, file.name);
    await Deno.writeFile(path, readFile(db, file));
    files.push({ ...file, path });
  }
  const { status, result, error } = job;
  if (settings.json) console.log(JSON.stringify({ ...entry, status, result, error, files }));
  else {
    console.log(`job ${job.id} ${status}${error ? `: ${error}` : ""}`);
    for (const { path, bytes } of files) console.log(`  ${path} (${bytes} bytes)`);
  }
  return status === "done" ? 0 : 1;
}

if (import.meta.main) await config.runMain("enqueue", main);
