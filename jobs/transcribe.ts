#!/usr/bin/env -S deno run --allow-read=in --allow-write=out
/**
 * The job kind `transcribe`: listens to a WAV recording of a melody and writes its notes down.
 *
 * Reads one JSON object from stdin, the job, and the file it names, below `in/`. Writes
 * `out/score.mid` and `out/score.abc`, and to stdout one JSON object per line: the stage and the
 * progress of the whole job, and as the last line the result or the error. The stages are
 *
 *     decode   read all of it once, to know that it is sound and how long it is
 *     pitch    follow the pitch, 10 ms at a time
 *     notes    find where notes begin and end
 *     write    the MIDI and ABC files
 *
 * Signals: none handled; the files are written last, so a killed job leaves nothing half done that
 * counts. Exit codes: 0 done, also when the last line is an error; 1 a failure of the program
 * itself; 2 what came on stdin is not a job.
 */

import { basename } from "node:path";
import { ANALYSIS_RATE_HZ, findNotes, noteName, PitchTracker, toAbc, toMidi } from "./notes.ts";
import { openWav, resample, WavError } from "./wav.ts";

const DEFAULT_TEMPO_BPM = 120;
const MIN_TEMPO_BPM = 20;
const MAX_TEMPO_BPM = 400;
const MAX_TITLE = 200;
/** Measured: 52 minutes take 20 s of CPU and 230 MB, of which 60 are Deno itself. */
const MAX_DURATION_S = 3_600;
/** About 70 bytes each: a third of the megabyte that a result may have. The files hold all. */
const MAX_NOTES_IN_RESULT = 5_000;
const PROGRESS_EVERY_MS = 100;

/** The recording or the payload can't be used; trying again would not help. */
class JobError extends Error {
  override name = "JobError";
}

interface Job {
  payload: Record<string, unknown>;
  files: { name: string; path: string }[];
}

type Stage = "decode" | "pitch" | "notes" | "write";
type Report = (stage: Stage, progress: number) => void;

export async function main(): Promise<number> {
  const job = parseJob(await new Response(Deno.stdin.readable).text());
  if (!job) {
    console.error('usage: a job on stdin, {"payload": {…}, "files": [{"name": …, "path": …}]}');
    return 2;
  }
  try {
    print({ result: await transcribe(job, reporter()) });
  } catch (error) {
    if (!(error instanceof WavError || error instanceof JobError)) throw error;
    print({ error: error.message, retry: false });
  }
  return 0;
}

async function transcribe(job: Job, report: Report): Promise<Record<string, unknown>> {
  if (job.files.length !== 1) {
    throw new JobError(`transcribe takes one WAV file; this job has ${job.files.length}`);
  }
  const [{ name, path }] = job.files;
  const title = titleOf(job.payload.title, name);
  const tempoBpm = tempoOf(job.payload.tempo_bpm);

  report("decode", 0);
  using wav = await openWav(path, name);
  const { sampleRateHz, channels, durationS, frames } = wav.header;
  if (durationS > MAX_DURATION_S) {
    throw new JobError(
      `${name} lasts ${Math.round(durationS)} s; at most ${MAX_DURATION_S} s are transcribed`,
    );
  }
  let done = 0;
  for await (const block of wav.blocks()) {
    done += block.length;
    report("decode", 0.2 * done / frames);
  }

  const tracker = new PitchTracker();
  done = 0;
  report("pitch", 0.2);
  for await (const block of resample(wav.blocks(), sampleRateHz, ANALYSIS_RATE_HZ)) {
    tracker.push(block);
    done += block.length;
    report("pitch", 0.2 + 0.7 * Math.min(1, done / (durationS * ANALYSIS_RATE_HZ)));
  }

  report("notes", 0.9);
  const notes = findNotes(tracker.finish());

  report("write", 0.95);
  await Deno.writeFile("out/score.mid", toMidi(notes, title, tempoBpm));
  await Deno.writeTextFile("out/score.abc", toAbc(notes, title, tempoBpm));
  return {
    title,
    duration_s: Math.round(durationS * 1_000) / 1_000,
    sample_rate_hz: sampleRateHz,
    channels,
    tempo_bpm: tempoBpm,
    note_count: notes.length,
    notes: notes.slice(0, MAX_NOTES_IN_RESULT)
      .map(({ midi, ...times }) => ({ midi, name: noteName(midi), ...times })),
    ...(notes.length > MAX_NOTES_IN_RESULT && { notes_cut: true }),
  };
}

/** The job on stdin, or null when it is something else. */
function parseJob(text: string): Job | null {
  let job: unknown;
  try {
    job = JSON.parse(text);
  } catch {
    return null;
  }
  if (!isObject(job) || !isObject(job.payload) || !Array.isArray(job.files)) return null;
  const files = job.files.every((file) =>
    isObject(file) && typeof file.name === "string" && typeof file.path === "string"
  );
  return files ? { payload: job.payload, files: job.files } : null;
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** One line: a line break in a title would begin a field of its own in the ABC file. */
function titleOf(given: unknown, fileName: string): string {
  if (given !== undefined && typeof given !== "string") {
    throw new JobError(`title is ${JSON.stringify(given)}; a text is expected`);
  }
  const title = (given ?? basename(fileName).replace(/\.wav$/i, "")).toWellFormed()
    .replace(/[\s\p{Cc}]+/gu, " ").trim();
  return [...title].slice(0, MAX_TITLE).join("") || "Untitled";
}

function tempoOf(given: unknown): number {
  if (given === undefined) return DEFAULT_TEMPO_BPM;
  if (typeof given === "number" && given >= MIN_TEMPO_BPM && given <= MAX_TEMPO_BPM) return given;
  throw new JobError(
    `tempo_bpm is ${
      JSON.stringify(given)
    }; a number from ${MIN_TEMPO_BPM} to ${MAX_TEMPO_BPM} is expected`,
  );
}

/** Prints a stage when it begins, and how far it is at most ten times a second. */
function reporter(): Report {
  let last: Stage | undefined;
  let nextMs = 0;
  return (stage, progress) => {
    const now = performance.now();
    if (stage === last && now < nextMs) return;
    last = stage;
    nextMs = now + PROGRESS_EVERY_MS;
    print({ stage, progress: Math.round(progress * 1_000) / 1_000 });
  };
}

function print(line: Record<string, unknown>): void {
  console.log(JSON.stringify(line));
}

if (import.meta.main) Deno.exit(await main());
