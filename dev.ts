#!/usr/bin/env -S deno run -A
/**
 * All of Siding on one machine, with nothing installed but Deno.
 *
 *     deno task demo     # a temporary Postgres, the recordings of examples/, workers as needed, a table
 *     deno task demo --open   # … which then runs on, its site with it
 *     deno task dev      # the same stack, kept running; its data stay in .siding/
 *
 * The site's address is printed, and a link that signs in to it. The workers are the replicas of a local Railway (dev/railway.ts), and a controller scales them: in
 * the demo it looks, steps and shrinks within seconds, in dev as its settings say.
 *
 * dev takes the Postgres of DATABASE_URL, if that is set, instead of starting one; demo never does.
 * It starts the example's paid service too, unless SIDING_BAND_URL names one.
 * SIGINT (Ctrl-C) and SIGTERM stop the site, the controller, the workers, which give their jobs back,
 * and then Postgres.
 *
 * Exit codes: 0 done, demo: all jobs as expected, and the pool went up and came back; 1 failure, or
 * that was not so; 2 usage; 130 demo stopped before its end.
 */
import { fileURLToPath } from "node:url";
import * as config from "./config.ts";
import { keepRunning, spawnScript, untilEnded } from "./child.ts";
import { connect, pause, type Pool, schema } from "./db.ts";
import { startBandService } from "./dev/band_service.ts";
import { runDemo } from "./dev/demo.ts";
import { startPostgres } from "./dev/postgres.ts";
import { type LocalRailway, startRailway } from "./dev/railway.ts";
import { signInLink } from "./web/auth.ts";

/** How long a stopped process may take, its jobs' time to end included, before it is killed. */
const STOP_MS = 30_000;
/** Before a controller or site that ended by itself is started again. */
const RESTART_MS = 1000;
const TIMES = { restartMs: RESTART_MS, stopMs: STOP_MS };
/** How long the demo waits for its first worker. */
const FIRST_MS = 60_000;
/** Of its own: controllers and workers elsewhere may use the same database. */
const POOL = "dev";
/** The demo's times, so that seconds show what minutes would. */
const quick = {
  worker: ["--heartbeat-ms", "300", "--poll-max-ms", "200", "--log-level", "error"],
  controller: [
    ...["--look-ms", "300", "--heartbeat-ms", "1000", "--step-s", "1", "--idle-s", "3"],
    ...["--railway-calls-per-hour", "10000", "--log-level", "warning"],
  ],
};

const program = {
  name: "dev",
  summary:
    "Runs all of Siding on this machine: Postgres, migrations, and workers as a controller asks for.",
  example: "deno task dev --workers 6",
  exits: {
    0: "done",
    1: "failure; demo: a job did not end as expected, or the pool did not go up and come back",
    3: null,
    130: "stopped by a second signal; demo: stopped before its end",
  },
};
const spec = {
  databaseUrl: config.settings.databaseUrl,
  demo: config.flag(config.yes("transcribe the recordings of examples/, show a table, and end")),
  open: config.flag(config.yes("the demo runs on, to look at its site, until it is stopped")),
  port: config.flag(config.int(8000, 0, 65_535, "the site's port; another one where it is taken")),
  workers: config.flag(
    config.int(4, 1, 50, "workers at the most: the controller's --max; at the least it is 1"),
  ),
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  if (settings.open && !settings.demo) {
    throw new config.UsageError("--open is of --demo: dev runs on anyway");
  }
  if (settings.demo && settings.workers < 2) {
    throw new config.UsageError("--workers is 1: the demo shows steps, and wants 2 at the least");
  }
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
    const site = await siteOf(url, settings.port);
    if (settings.demo) return await demo(url, site, settings, signal);
    await dev(url, site, settings.workers, signal);
    say("stopped");
    return 0;
  } finally {
    await postgres?.stop();
  }
}

/** Keeps the site, the workers and their controller running until the signal. */
async function dev(url: string, site: Site, max: number, signal: AbortSignal): Promise<void> {
  await using band = Deno.env.get("SIDING_BAND_URL") ? null : await startBandService();
  if (band) {
    Deno.env.set("SIDING_BAND_URL", band.url); // the workers inherit it
    say(`a service that charges, for the kind band, is at ${band.url}`);
  }
  await using railway = await startWorkers(url);
  say(`a local Railway, whose replicas are the workers, is at ${railway.url}`);
  say(`a controller asks it for 1 to ${max} of them. Ctrl-C stops all. In another terminal:`);
  say("");
  say(`    export DATABASE_URL='${url}'`);
  say("    deno task enqueue transcribe --file examples/01-up-the-stairs.wav --wait");
  say("    deno task enqueue band --file examples/01-up-the-stairs.wav --wait");
  say("");
  await Promise.all([
    keepRunning(() => startController(url, railway, max), signal, TIMES, (code) => {
      say(`the controller ended with exit code ${code}`);
    }),
    keepSite(site, signal),
  ]);
}

/** Runs the demo on a stack that reports, looks and steps often, so that there is something to see. */
async function demo(
  url: string,
  site: Site,
  { workers: max, open }: { workers: number; open: boolean },
  signal: AbortSignal,
): Promise<number> {
  const over = new AbortController();
  const stop = AbortSignal.any([signal, over.signal]);
  await using railway = await startWorkers(url, quick.worker);
  const sql = connect(url, { max: 2, name: "siding demo" });
  const controller = untilEnded(
    startController(url, railway, max, quick.controller),
    stop,
    STOP_MS,
  ).then((code) => {
    if (stop.aborted) return;
    say(`the controller ended with exit code ${code}`);
    over.abort();
  });
  const sites = keepSite(site, stop);
  try {
    await workerReports(sql, stop);
    const asExpected = await runDemo(sql, POOL, stop);
    if (open && !stop.aborted) {
      say(`\nthe site: ${site.link} — Ctrl-C stops all`);
      await new Promise((resolve) => stop.addEventListener("abort", resolve));
      return asExpected ? 0 : 1;
    }
    return signal.aborted ? 130 : asExpected ? 0 : 1;
  } finally {
    over.abort();
    await Promise.all([controller, sites]);
    await sql.end({ timeout: 1 });
  }
}

/** The site as dev runs it: with secrets of its own, for this run. */
interface Site {
  env: Record<string, string>;
  address: string;
  /** Signs in whoever follows it. */
  link: string;
}

async function siteOf(url: string, wantedPort: number): Promise<Site> {
  const secret = () => crypto.getRandomValues(new Uint8Array(32)).toHex();
  const secrets = { admin: secret(), session: secret() };
  const port = freePort(wantedPort);
  const address = `http://localhost:${port}`;
  // Of the workers too, which send what it signs; and here nothing is too private to be told.
  Deno.env.set("SIDING_WEBHOOK_SECRET", secret());
  Deno.env.set("SIDING_WEBHOOK_PRIVATE", "true");
  return {
    env: {
      DATABASE_URL: url,
      PORT: String(port),
      SIDING_HOST: "127.0.0.1",
      SIDING_ADMIN_TOKEN: secrets.admin,
      SIDING_SESSION_SECRET: secrets.session,
      SIDING_OPEN_METRICS: "true",
    },
    address,
    link: `${address}${await signInLink(secrets)}`,
  };
}

/** The port that is wanted, or where it is taken any other. */
function freePort(wanted: number): number {
  const take = (port: number) => {
    using listener = Deno.listen({ hostname: "127.0.0.1", port });
    return listener.addr.port;
  };
  try {
    return take(wanted);
  } catch (error) {
    if (!(error instanceof Deno.errors.AddrInUse)) throw error;
    return take(0);
  }
}

function keepSite(site: Site, signal: AbortSignal): Promise<void> {
  say(`the site: ${site.address}; signed in, for a day: ${site.link}`);
  const start = () => script("web.ts", ["--log-level", "warning"], site.env);
  return keepRunning(start, signal, TIMES, (code) => say(`the site ended with exit code ${code}`));
}

async function workerReports(sql: Pool, signal: AbortSignal): Promise<void> {
  const startedMs = performance.now();
  while (!signal.aborted) {
    const rows = await sql`select from ${sql(schema)}.processes where role = 'worker'`;
    if (rows.length > 0) return say("a worker reports");
    if (performance.now() - startedMs > FIRST_MS) throw new Error("no worker reports");
    await pause(50, signal);
  }
}

async function migrate(url: string): Promise<void> {
  const { success } = await script("migrate.ts", [], { DATABASE_URL: url }).status;
  if (!success) throw new Error("the migrations failed");
}

/** Starts a local Railway whose replicas are workers, one at first. */
const startWorkers = (url: string, flags: string[] = []): Promise<LocalRailway> =>
  startRailway({
    start: (env) => script("worker.ts", flags, { DATABASE_URL: url, ...env }),
    drainMs: STOP_MS,
  });

/** Starts a controller of that Railway. */
const startController = (url: string, railway: LocalRailway, max: number, flags: string[] = []) =>
  script("controller.ts", ["--min", "1", "--max", String(max), ...flags], {
    DATABASE_URL: url,
    SIDING_RAILWAY_URL: railway.url,
    SIDING_WORKER_SERVICE_ID: railway.serviceId,
    RAILWAY_ENVIRONMENT_ID: railway.environmentId,
    RAILWAY_TOKEN: railway.projectToken,
  });

/** Starts one of the entry scripts, in the pool of dev, with a log for people: this Railway is a local one. */
const script = (name: string, flags: string[], env: Record<string, string>) =>
  spawnScript(name, flags, { SIDING_LOG_FORMAT: "text", SIDING_POOL: POOL, ...env });

function say(line: string): void {
  console.log(line);
}

if (import.meta.main) await config.runMain("dev", main);
