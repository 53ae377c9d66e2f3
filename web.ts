#!/usr/bin/env -S deno run --quiet --no-prompt -P=web --v8-flags=--optimize-for-size
/**
 * The site: what people and their programs see of the queue. It only mounts the parts in web/, and
 * never takes a job.
 *
 *     deno task web                     # needs SIDING_ADMIN_TOKEN and SIDING_SESSION_SECRET
 *     deno task key create acme         # a key for the API under /api
 *
 *     /            pages: submit a job and follow it; for the admin the dashboard and the review desk
 *     /api         the API, described by /api/openapi.json; /mcp the same for agents
 *     /health      this process and its database; /health/service: whether jobs get done
 *     /metrics     for Prometheus
 *
 * It is started with --v8-flags=--optimize-for-size: at 200 submits a second it grew by 3 MiB in a
 * minute with that and by 71 without, garbage that V8 leaves for long; the latencies were the same.
 *
 * Reads and writes: the queue's tables (DATABASE_URL). Any number may run; the leader tells people
 * when the service is unwell (ALERT_WEBHOOK_URL).
 *
 * Signals: SIGTERM or SIGINT stops listening, ends the event streams, and answers what is under way;
 * a second one ends it at once.
 *
 * Exit codes: 0 after a stop; 1 failure, 2 usage, also when a secret is missing; 3 the database could
 * not be reached at the start; 130 stopped by a second signal.
 */
import { hostname } from "node:os";
import { RateLimiterMemory } from "rate-limiter-flexible";
import * as config from "./config.ts";
import { checkSchema, Database, patient } from "./db.ts";
import { loadKinds } from "./jobs/kind.ts";
import * as processes from "./processes.ts";
import { heartbeat } from "./queue.ts";
import { watcher } from "./web/alerts.ts";
import { appOf } from "./web/app.ts";
import { spec } from "./web/settings.ts";
import type { Site, SiteSettings } from "./web/site.ts";

const log = config.logger("web");

/** How long a starting site waits for the database. */
const START_MS = 30_000;
/** How long a stopping site answers what is under way. */
const STOP_MS = 10_000;

const program = {
  name: "web",
  summary: "The site: API, pages, health, metrics and MCP.",
  example: "SIDING_ADMIN_TOKEN=… SIDING_SESSION_SECRET=… deno task web --port 8000",
  exits: { 0: "after a stop", 3: "the database could not be reached at the start" },
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const url = config.requireDatabase(settings.databaseUrl);
  const secrets = secretsOf(settings);
  await config.setUpLog(settings.logLevel);
  const options = { prepare: settings.prepare, name: "siding web" };
  const some = Math.ceil(settings.connections / 2);
  const db = new Database(url, { ...options, max: some }, settings.statementLimitMs);
  const files = new Database(url, { ...options, max: settings.connections - some });
  const patience = patient(db, signal, START_MS);
  const behind = await patience.run(checkSchema);
  if (behind) log.warn("the database lacks {behind} migrations that this code knows", { behind });
  const stopping = new AbortController();
  const site: Site = {
    ...{ db, files, settings, secrets },
    kinds: await loadKinds(settings.jobs),
    limits: {
      signIn: new RateLimiterMemory({ points: 10, duration: 60 }),
      submit: new RateLimiterMemory({ points: settings.submitsPerMinute, duration: 60 }),
    },
    bootId: await patience.run((sql) =>
      processes.register(sql, { role: "web", name: nameOf(), version: config.VERSION })
    ),
    leader: false,
    stopping: stopping.signal,
  };
  const server = Deno.serve({
    port: settings.port,
    hostname: settings.host,
    onListen: ({ port }) =>
      log.info("listening on port {port}, version {version}", { port, version: config.VERSION }),
  }, appOf(site).fetch);
  const loops = [
    config.repeat("heartbeat", () => beat(site), stopping.signal),
    config.repeat("alerts", watcher(site), stopping.signal),
  ];
  await new Promise((resolve) => {
    if (signal.aborted) resolve(null);
    signal.addEventListener("abort", resolve);
  });
  stopping.abort();
  const timer = setTimeout(() => Deno.exit(0), STOP_MS); // whoever reads on for longer than that
  await server.shutdown();
  clearTimeout(timer);
  await Promise.all(loops);
  await db.run((sql) => processes.deregister(sql, site.bootId)).catch(() => {});
  await Promise.all([db.close(), files.close()]);
  return 0;
}

/** Says that this site is there, and hears whether it leads. A row that was removed is made anew. */
async function beat(site: Site): Promise<number> {
  const { heartbeatMs } = site.settings;
  const silentS = heartbeatMs * 3 / 1000;
  const pulse = await site.db.run((sql) => heartbeat(sql, site.bootId, [], silentS, silentS));
  site.leader = pulse.alive && pulse.leader;
  if (!pulse.alive) {
    site.bootId = await site.db.run((sql) =>
      processes.register(sql, { role: "web", name: nameOf(), version: config.VERSION })
    );
  }
  return heartbeatMs;
}

const nameOf = () => Deno.env.get("RAILWAY_REPLICA_ID") ?? hostname();

/** The secrets without which the site does not start. */
function secretsOf(settings: SiteSettings): Site["secrets"] {
  const { adminToken, sessionSecret, webhookSecret, metricsToken } = settings;
  for (const [name, value] of Object.entries({ adminToken, sessionSecret })) {
    if (value) continue;
    const variable = { adminToken: "SIDING_ADMIN_TOKEN", sessionSecret: "SIDING_SESSION_SECRET" };
    throw new config.UsageError(
      `${
        variable[name as "adminToken"]
      } is not set: the site needs it, with at least 32 characters, ` +
        "such as `openssl rand -hex 32` prints",
    );
  }
  return {
    admin: adminToken!,
    session: sessionSecret!,
    webhook: webhookSecret,
    metrics: metricsToken,
  };
}

if (import.meta.main) await config.runMain("web", main);
