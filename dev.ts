#!/usr/bin/env -S deno run -A
/**
 * All of Siding on one machine, with nothing installed but Deno.
 *
 *     deno task demo     # a temporary Postgres, two workers, the recordings of examples/, a table
 *     deno task dev      # the same stack, kept running; its data stay in .siding/
 *
 * dev takes the Postgres of DATABASE_URL, if that is set, instead of starting one; demo never does.
 * It starts the example's paid service too, unless SIDING_BAND_URL names one.
 * SIGINT (Ctrl-C) and SIGTERM stop the workers, which give their jobs back, and then Postgres.
 *
 * Exit codes: 0 done, demo: all jobs as expected; 1 failure, or a job that was not; 2 usage;
 * 130 demo stopped before its end.
 */
import { fileURLToPath } from "node:url";
import * as config from "./config.ts";
import { connect, pause, type Pool, schema } from "./db.ts";
import { startBandService } from "./dev/band_service.ts";
import { runDemo } from "./dev/demo.ts";
import { startPostgres } from "./dev/postgres.ts";

/** How long a stopped worker may take, its jobs' time to end included, before it is killed. */
const STOP_MS = 30_000;
/** Before a worker that ended by itself is started again. */
const RESTART_MS = 1000;

const program = {
  name: "dev",
  summary: "Runs all of Siding on this machine: Postgres, migrations and workers.",
  example: "deno task dev --workers 4",
};
const spec = {
  databaseUrl: config.settings.databaseUrl,
  demo: config.flag(config.yes("transcribe the recordings of examples/, show a table, and end")),
  workers: config.flag(config.int(2, 1, 64, "how many workers to start")),
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const started = Date.now();
  const external = settings.demo ? undefined : settings.databaseUrl;
  const postgres = external ? undefined : await startPostgres(
    settings.demo ? {} : { dataDir: fileURLToPath(new URL(".siding", import.meta.url)) },
  );
  const url = external ?? postgres!.url;
  try {
    if (postgres) say(`PostgreSQL ${postgres.version} started in ${Date.now() - started} ms`);
    if (postgres && !settings.demo) say(`its data are in ${await Deno.realPath(postgres.dataDir)}`);
    await migrate(url);
    return settings.demo
      ? await demo(url, settings.workers, signal)
      : await dev(url, settings.workers, signal);
  } finally {
    await postgres?.stop();
  }
}

/** Keeps the workers running until the signal. */
async function dev(url: string, count: number, signal: AbortSignal): Promise<number> {
  await using band = Deno.env.get("SIDING_BAND_URL") ? null : await startBandService();
  if (band) {
    Deno.env.set("SIDING_BAND_URL", band.url); // the workers inherit it
    say(`a service that charges, for the kind band, is at ${band.url}`);
  }
  say(`${count} workers run. Ctrl-C stops them. In another terminal:`);
  say("");
  say(`    export DATABASE_URL='${url}'`);
  say("    deno task enqueue transcribe --file examples/01-up-the-stairs.wav --wait");
  say("    deno task enqueue band --file examples/01-up-the-stairs.wav --wait");
  say("");
  await Promise.all(Array.from({ length: count }, async (_, index) => {
    while (!signal.aborted) {
      const code = await runWorker(url, [], signal);
      if (signal.aborted) return;
      say(`worker ${index + 1} ended with exit code ${code}; it is started again`);
      await pause(RESTART_MS, signal);
    }
  }));
  say("stopped");
  return 0;
}

/** Runs the demo with workers that report often, so that there is something to see. */
async function demo(url: string, count: number, signal: AbortSignal): Promise<number> {
  const over = new AbortController();
  const flags = ["--heartbeat-ms", "300", "--poll-max-ms", "200", "--log-level", "error"];
  const stop = AbortSignal.any([signal, over.signal]);
  const sql = connect(url, { max: 2, name: "siding demo" });
  const workers = Array.from({ length: count }, async () => {
    const code = await runWorker(url, flags, stop);
    if (!stop.aborted) {
      say(`a worker ended with exit code ${code}`);
      over.abort();
    }
  });
  try {
    await workersReport(sql, count, stop);
    const asExpected = await runDemo(sql, stop);
    return signal.aborted ? 130 : asExpected ? 0 : 1;
  } finally {
    over.abort();
    await Promise.all(workers);
    await sql.end({ timeout: 1 });
  }
}

async function workersReport(sql: Pool, count: number, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.processes`;
    if (n >= count) return say(`${n} workers report`);
    await pause(50, signal);
  }
}

async function migrate(url: string): Promise<void> {
  const { success } = await script("migrate.ts", [], url).status;
  if (!success) throw new Error("the migrations failed");
}

/** Runs a worker until the signal, when it is told to stop. @returns its exit code */
async function runWorker(
  url: string,
  flags: string[],
  signal: AbortSignal,
): Promise<number> {
  if (signal.aborted) return 0;
  const child = script("worker.ts", flags, url);
  let timer: ReturnType<typeof setTimeout> | undefined;
  const stop = () => {
    child.kill("SIGTERM");
    timer = setTimeout(() => child.kill("SIGKILL"), STOP_MS);
  };
  signal.addEventListener("abort", stop);
  const { code } = await child.status;
  signal.removeEventListener("abort", stop);
  clearTimeout(timer);
  return code;
}

/** Starts one of the entry scripts. Its signals come from here and not from the terminal. */
function script(
  name: string,
  flags: string[],
  url: string,
): Deno.ChildProcess {
  return new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", fileURLToPath(new URL(name, import.meta.url)), ...flags],
    env: { DATABASE_URL: url, SIDING_END_WITH_PARENT: "1" },
    stdin: "null",
    stdout: "inherit",
    stderr: "inherit",
    detached: true,
  }).spawn();
}

function say(line: string): void {
  console.log(line);
}

if (import.meta.main) await config.runMain("dev", main);
