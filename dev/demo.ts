/**
 * The demo: enqueues the recordings of examples/, shows the queue and the workers' count as they
 * move, and ends with a table of what became of each job and whether that is what was expected.
 */
import { pause, type Pool, schema, via } from "../db.ts";
import { melodies } from "../examples/make.ts";
import { writeFile } from "../files.ts";
import { enqueueMany } from "../jobs.ts";
import type { EnqueueOptions } from "../jobs/typed.ts";
import { type LookRow, looks } from "../looks.ts";
import type { Status } from "../queue.ts";

const EXAMPLES = new URL("../examples/", import.meta.url);
/** How often the queue is looked at. */
const LOOK_MS = 100;
/** The demo gives up after this. */
const LIMIT_MS = 180_000;
const BAR = 24;

/** By the recording's place in the folder: some that pass the others, and some that are due later. */
const special: Record<number, EnqueueOptions> = {
  3: { delay_s: 2 },
  7: { delay_s: 4 },
  9: { priority: 10 },
  12: { priority: 5 },
};

/** A job of the demo as it is shown. */
interface Shown {
  id: string;
  kind: string;
  file: string;
  status: Status;
  stage: string | null;
  progress: number | null;
  worker: string | null;
  wait_ms: number | null;
  run_ms: number | null;
  notes: number | null;
  error: string | null;
}

/** What there is to show at one moment. */
interface Scene {
  jobs: Shown[];
  /** How many workers were asked for and are there, as the controller saw it last. */
  workers: string;
  /** What it made of that. */
  reason: string;
  /** What it told Railway since the scene before, and why. */
  told: string[];
}

/**
 * Shows the recordings being transcribed by as many workers as the pool's controller asks for, until
 * there is one again; or, once `signal` is aborted, how far that got.
 *
 * @returns whether every job is done with the notes that its recording is known to have, and the
 * pool went up and came back
 */
export async function runDemo(sql: Pool, pool: string, signal: AbortSignal): Promise<boolean> {
  const files = await enqueueRecordings(sql);
  const startedMs = performance.now();
  const screen = Deno.stdout.isTerminal() ? new LiveScreen() : new PlainLines();
  let jobs: Shown[] = [];
  let seen: LookRow[] = [];
  let told = 0;
  while (!signal.aborted) {
    jobs = await look(sql, files);
    seen = (await looks(sql, pool, 1000)).toReversed();
    const reasons = seen.filter(({ act }) => act === "written").map(({ reason }) => reason);
    const atMs = performance.now() - startedMs;
    screen.show({ jobs, ...shownOf(seen.at(-1)), told: reasons.slice(told) }, atMs);
    told = reasons.length;
    if (jobs.every(isFinal) && isOne(seen.at(-1)) || atMs > LIMIT_MS) break;
    await pause(LOOK_MS, signal);
  }
  screen.end();
  const steps = stepsOf(seen);
  const cameBack = steps.some((count) => count > 1) && isOne(seen.at(-1));
  console.log(table(jobs));
  if (!cameBack && !signal.aborted) console.log("the workers did not become more, and one again\n");
  console.log(`${closingLine(jobs, signal.aborted)}; workers ${steps.join(" → ") || "not seen"}`);
  return cameBack && jobs.every((job) => expectation(job) === "done");
}

function shownOf(look: LookRow | undefined): Pick<Scene, "workers" | "reason"> {
  const { platform, queue } = look?.seen ?? {};
  if (!look || !platform || !queue) return { workers: "not seen", reason: look?.reason ?? "" };
  const { configured, running } = platform;
  const workers =
    `${configured} asked for, ${running} running, ${queue.workers.reporting} reporting`;
  return { workers, reason: look.reason };
}

/** Whether one worker was asked for and the others are gone. */
const isOne = (look: LookRow | undefined) =>
  look?.seen.platform?.configured === 1 && look.seen.queue?.workers.reporting === 1;

/** The counts that were asked for, one after the other. */
const stepsOf = (seen: LookRow[]) =>
  seen.flatMap((look) => look.seen.platform?.configured ?? [])
    .filter((count, index, all) => count !== all[index - 1]);

/** Uploads the recordings, and enqueues them in one statement. @returns the file of each job id */
async function enqueueRecordings(sql: Pool): Promise<Map<string, string>> {
  const names = [...Deno.readDirSync(EXAMPLES)].map((entry) => entry.name)
    .filter((name) => name.endsWith(".wav")).sort();
  const uploads = [];
  for (const name of names) {
    const content = (await Deno.open(new URL(encodeURIComponent(name), EXAMPLES))).readable;
    uploads.push(await writeFile(via(sql), name, content, 100_000_000));
  }
  const entries = await enqueueMany(
    sql,
    uploads.map((file, index) => ({
      kind: "transcribe",
      payload: { title: titleOf(file.name) },
      owner: "demo",
      files: [file.id],
      ...special[index],
    })),
  );
  console.log(
    `${entries.length} recordings enqueued: 2 are due some seconds later, 2 have priority`,
  );
  return new Map(entries.map((entry, index) => [entry.id, names[index]]));
}

const titleOf = (file: string) =>
  melodies.find((melody) => melody.file === file)?.title ?? file.replace(/\.wav$/, "");

async function look(sql: Pool, files: Map<string, string>): Promise<Shown[]> {
  const rows = await sql<Shown[]>`
    select j.id::text, kind, status, stage, progress, error, left(worker_id::text, 4) as worker,
      (extract(epoch from claimed_at - due_at) * 1000)::float8 as wait_ms,
      (extract(epoch from finished_at - claimed_at) * 1000)::float8 as run_ms,
      (result ->> 'note_count')::integer as notes
    from ${sql(schema)}.jobs j order by j.id`;
  return rows.map((row) => ({ ...row, file: files.get(row.id) ?? "?" }));
}

const isFinal = (job: Shown) => ["done", "failed", "cancelled", "review"].includes(job.status);

/** "done", or what is not as expected of a job. */
function expectation(job: Shown): string {
  if (job.status !== "done") return job.error ? `${job.status}: ${job.error}` : job.status;
  const known = melodies.find((melody) => melody.file === job.file)?.notes.length;
  return known === undefined || known === job.notes ? "done" : `done, but ${known} were played`;
}

const seconds = (ms: number | null) => ms === null ? "" : `${(ms / 1000).toFixed(2)} s`;

function table(jobs: Shown[]): string {
  const rows = [
    ["job", "kind", "recording", "wait", "run", "notes", "outcome"],
    ...jobs.map((job) => [
      ...[job.id, job.kind, job.file, seconds(job.wait_ms), seconds(job.run_ms)],
      ...[String(job.notes ?? ""), expectation(job)],
    ]),
  ];
  const widths = rows[0].map((_, column) => Math.max(...rows.map((row) => row[column].length)));
  const right = new Set([0, 3, 4, 5]);
  return "\n" +
    rows.map((row) =>
      row.map((cell, i) => right.has(i) ? cell.padStart(widths[i]) : cell.padEnd(widths[i]))
        .join("  ").trimEnd()
    ).join("\n") + "\n";
}

function closingLine(jobs: Shown[], stopped: boolean): string {
  const count = (status: Status) => jobs.filter((job) => job.status === status).length;
  // A job that the demo waited for in vain is lost; one that it did not wait for is not.
  const rest = `${jobs.filter((job) => !isFinal(job)).length} ${stopped ? "unfinished" : "lost"}`;
  const spread = (values: (number | null)[]) => {
    const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
    // The nearest rank: the smallest value that so many of a hundred do not exceed.
    const at = (percent: number) =>
      sorted[Math.max(0, Math.ceil(sorted.length * percent) - 1)] ?? 0;
    return `p50 ${seconds(at(0.5))} p95 ${seconds(at(0.95))}`;
  };
  return `${jobs.length} jobs: ${count("done")} done, ${count("failed")} failed, ${rest}; ` +
    `wait ${spread(jobs.map((job) => job.wait_ms))}; run ${spread(jobs.map((job) => job.run_ms))}`;
}

/** When it was, in the demo's time. */
const timeOf = (atMs: number) => seconds(atMs).padStart(8);

/** A few lines of a terminal, drawn again as things move, below what the controller did. */
class LiveScreen {
  #lines = 0;

  show({ jobs, workers, reason, told }: Scene, atMs: number): void {
    const count = (status: Status) => jobs.filter((job) => job.status === status).length;
    const done = jobs.filter(isFinal).length;
    const lines = [
      `jobs     scheduled ${count("scheduled")}  queued ${count("queued")}  ` +
      `running ${count("running")}  done ${done}/${jobs.length} ${bar(done / jobs.length)}`,
      `workers  ${workers}`,
      `         ${reason}`,
      ...jobs.filter((job) => job.status === "running").map((job) =>
        `  worker ${job.worker}  ${bar(job.progress ?? 0)} ${
          (job.stage ?? "").padEnd(7)
        } ${job.file}`
      ),
    ];
    this.#draw(lines, told.map((why) => `${timeOf(atMs)}  controller: ${why}`));
  }

  end(): void {
    this.#draw([]);
  }

  /** Draws lines in place of the last ones, and above them some that stay. */
  #draw(lines: string[], above: string[] = []): void {
    const { columns } = Deno.consoleSize();
    const up = this.#lines > 0 ? `\r\x1b[${this.#lines}A` : "";
    const text = [...above, ...lines.map((line) => line.slice(0, columns - 1))]
      .map((line) => `${line}\n`).join("");
    Deno.stdout.writeSync(new TextEncoder().encode(`${up}\x1b[J${text}`));
    this.#lines = lines.length;
  }
}

const bar = (part: number) => {
  const full = Math.round(part * BAR);
  return "█".repeat(full) + "░".repeat(BAR - full);
};

/** A line for each thing that happens, where there is no terminal. */
class PlainLines {
  readonly #seen = new Map<string, string>();

  show({ jobs, workers, told }: Scene, atMs: number): void {
    for (const job of jobs) {
      const stage = job.status === "running" && job.stage ? `, ${job.stage}` : "";
      const who = job.worker ? ` (worker ${job.worker})` : "";
      this.#say(`job ${job.id} ${job.file}`, `${job.status}${stage}`, atMs, who);
    }
    for (const why of told) console.log(`${timeOf(atMs)}  controller: ${why}`);
    this.#say("workers", workers, atMs);
  }

  end(): void {}

  /** Says how something is, if that is new. */
  #say(what: string, now: string, atMs: number, who = ""): void {
    if (this.#seen.get(what) === now) return;
    this.#seen.set(what, now);
    console.log(`${timeOf(atMs)}  ${what}: ${now}${who}`);
  }
}
