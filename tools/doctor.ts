#!/usr/bin/env -S deno run -A
/**
 * Says what ails the queue's database, and what to do about it.
 *
 *     deno task doctor                       # watches for 5 s
 *     deno task doctor --watch-s 30 --json
 *
 * A queue in Postgres stalls at one of three: workers that wait for locks, transactions that are done
 * again, indexes that are kept up. It says which, if any, with the figures and the remedy; and
 * whatever else makes a queue slow or stand still: an xmin that is held, an autovacuum that is off or
 * behind, connections near the limit, a pooler that breaks prepared statements, jobs past their
 * lease, settings that do not fit, jobs that nobody serves, a migration behind, bloat, and, by
 * pg_stat_statements where that is there, dequeues of any table that do not skip locked rows.
 *
 * Reads: Postgres's statistics and settings, the queue's tables. Writes nothing, locks nothing, and
 * bounds every statement. What the role may not read is said; pg_monitor sees all of it.
 *
 * Exit codes: 0 it is well; 1 a finding, or failure; 2 usage; 3 the database could not be reached.
 */
import * as config from "../config.ts";
import { Database, parameterOf, schema } from "../db.ts";
import { aligned } from "../dev/simulation/report.ts";
import {
  type Bottleneck,
  bottleneckOf,
  deadlocks,
  lockWaits,
  retries,
  unreadIndexes,
  waitsText,
} from "./doctor/bottlenecks.ts";
import { connections, type Places, places, type Pooler, pooler, probed } from "./doctor/pooler.ts";
import { claimSettings, dequeues, migrations, pastLease, unserved } from "./doctor/queues.ts";
import { duration, type Finding, number, percent, plural, Reader } from "./doctor/reader.ts";
import { autovacuum, bloat, heldXmin } from "./doctor/vacuum.ts";
import { mean, transactions, type Wait, watch, type Watched, written } from "./doctor/watch.ts";

/** How long a statement may take with its way there and back; on the server each has less. */
const REPLY_MS = 10_000;

const program = {
  name: "doctor",
  summary: "Says what ails the queue's database, with the figures and the remedy.",
  example: "deno task doctor --watch-s 10",
  exits: { 0: "it is well", 1: "a finding, or failure" },
};
const { databaseUrl, prepare } = config.settings;
const spec = {
  databaseUrl,
  prepare: { ...prepare, help: "as the workers have it; false: the pooler is not tried" },
  watchS: config.flag(config.int(5, 1, 600, "watch for so many seconds")),
  heldS: config.flag(config.int(60, 1, 86_400, "a transaction open for so long holds too much")),
  json: config.flag(config.yes("print one JSON object instead of text")),
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const url = config.requireDatabase(settings.databaseUrl);
  const report = await examine(url, settings, signal);
  console.log(settings.json ? JSON.stringify(report) : textOf(report));
  return report.items.length > 0 ? 1 : 0;
}

/** What was found. */
export interface Report {
  database: string;
  server_version: string;
  watched_s: number;
  /** Of the three the one that it is at; null: at none. */
  bottleneck: Bottleneck | null;
  /** The worst first. */
  items: Finding[];
  figures: Figures;
  /** What the server refused to tell, and why. */
  unread: { what: string; why: string }[];
}

interface Figures {
  transactions_per_s: number;
  rollback_share: number;
  active_mean: number;
  waiting_mean: number;
  connections: Places[];
  pooler: "none seen" | "carries prepared statements" | "breaks prepared statements" | "not tried";
  jobs_written_per_s: number;
  /** Updates of jobs that touched no index; null: none was updated. */
  hot_share: number | null;
  live_rows: number;
  dead_rows: number;
  jobs: { scheduled: number; queued: number; running: number; review: number } | null;
  workers: number | null;
}

/** Examines the database at `url`; aborting `signal` ends the watching early. */
export async function examine(
  url: string,
  options: { watchS: number; heldS: number; prepare: boolean },
  signal: AbortSignal = new AbortController().signal,
): Promise<Report> {
  const db = new Database(url, { max: 1, name: "siding doctor", prepare: false }, REPLY_MS);
  try {
    const reader = new Reader(db);
    // The first that is sent: an unreachable server or a wrong password shows here.
    const [about] = await reader.must<
      { database: string; version: string; sees: boolean; role: string }
    >(
      `select current_database() as database, current_setting('server_version') as version,
         pg_has_role(current_user, 'pg_read_all_stats', 'usage') as sees, current_user::text as role`,
    );
    if (!about.sees) {
      reader.skip(
        "what sessions of other roles do, wait for and hold",
        `grant pg_monitor to "${about.role}", and it is seen`,
      );
    }
    const fit = await migrations(reader);
    const watched = await watch(reader, options.watchS, signal);
    const prepare = options.prepare && parameterOf(url, "prepare") !== "false";
    const [taken, way] = [await places(reader), prepare ? await probed(reader, url) : null];
    const items = [
      ...fit,
      ...[lockWaits, retries, deadlocks].flatMap((judge) => judge(watched)),
      ...await unreadIndexes(reader, watched),
      ...await heldXmin(reader, watched, options.heldS),
      ...await autovacuum(reader, watched),
      ...connections(taken),
      ...pooler(way),
      ...await queueFindings(reader, watched, fit),
      ...await bloat(reader),
      ...await dequeues(reader),
    ];
    return {
      database: about.database,
      server_version: about.version,
      watched_s: Number(watched.seconds.toFixed(1)),
      bottleneck: bottleneckOf(items, watched),
      items: items.sort((a, b) => a.severity.localeCompare(b.severity)),
      figures: await figuresOf(reader, watched, taken, way),
      unread: reader.unread,
    };
  } finally {
    await db.close();
  }
}

/** Those of the queue's own rows, where there are any. */
async function queueFindings(reader: Reader, watched: Watched, fit: Finding[]): Promise<Finding[]> {
  if (fit.some(({ code }) => code === "schema_mismatch")) return [];
  return [
    ...await pastLease(reader),
    ...await claimSettings(reader, watched),
    ...await unserved(reader),
  ];
}

async function figuresOf(
  reader: Reader,
  watched: Watched,
  taken: Places[],
  way: Pooler | null,
): Promise<Figures> {
  const { after } = watched;
  const jobs = await reader.row<NonNullable<Figures["jobs"]> & { workers: number }>(
    "how many jobs there are",
    `select coalesce(sum(scheduled), 0)::integer as scheduled, coalesce(sum(queued), 0)::integer as queued,
       coalesce(sum(running), 0)::integer as running, coalesce(sum(review), 0)::integer as review,
       (select count(*)::integer from "${schema}".processes
        where role = 'worker' and seen_at > now() - interval '45 s') as workers
     from "${schema}".counts`,
  );
  const rounded = (value: number) => Number(value.toFixed(3));
  const { perS, share } = transactions(watched);
  const { rowsPerS, hotShare } = written(watched, "jobs");
  const { workers = null, ...counts } = jobs ?? {};
  return {
    transactions_per_s: rounded(perS),
    rollback_share: rounded(share),
    active_mean: rounded(mean(watched, "active")),
    waiting_mean: rounded(mean(watched, "waiting")),
    connections: taken,
    pooler: way === null
      ? "not tried"
      : way.failed
      ? "breaks prepared statements"
      : way.pooled
      ? "carries prepared statements"
      : "none seen",
    jobs_written_per_s: rounded(rowsPerS),
    hot_share: hotShare === null ? null : rounded(hotShare),
    live_rows: after.tables.jobs?.live ?? 0,
    dead_rows: after.tables.jobs?.dead ?? 0,
    jobs: jobs && counts as Figures["jobs"],
    workers,
  };
}

const BOTTLENECKS: Record<Bottleneck, string> = {
  locks: "It is at the first of a queue's three bottlenecks: its sessions wait for locks.",
  retries: "It is at the second of a queue's three bottlenecks: its transactions are done again.",
  indexes:
    "It is at the third of a queue's three bottlenecks: it keeps up indexes that nobody reads.",
};

/** A report as people read it. */
export function textOf(report: Report): string {
  const { items, bottleneck, unread } = report;
  const verdict = items.length === 0
    ? paint("32", "It is well.")
    : paint("1", items.length === 1 ? "One finding." : `${items.length} findings.`);
  const stand = bottleneck
    ? BOTTLENECKS[bottleneck]
    : "It is at none of a queue's three bottlenecks (locks, retries, indexes).";
  return [
    `${report.database} on PostgreSQL ${report.server_version}, watched for ${
      duration(report.watched_s)
    }`,
    `${verdict} ${stand}`,
    ...items.flatMap((item) => ["", ...findingText(item)]),
    "",
    ...figuresText(report.figures),
    ...(unread.length > 0 ? ["", "Could not be read:"] : []),
    ...unread.map(({ what, why }) => `  ${what}: ${why}`),
  ].join("\n");
}

const paint = (code: string, text: string) =>
  Deno.stdout.isTerminal() && !Deno.noColor ? `\x1b[${code}m${text}\x1b[0m` : text;

function findingText({ code, severity, title, figures, remedy }: Finding): string[] {
  const [mark, color] = severity === "critical" ? ["!!", "31"] : ["! ", "33"];
  const shown = (key: string, value: unknown): string =>
    typeof value === "number" && key !== "pid"
      ? number(value)
      : Array.isArray(value)
      ? value.join(", ")
      : typeof value === "object" && value !== null
      ? Object.entries(value).map(([name, it]) => `${name} ${shown(name, it)}`).join(", ")
      : String(value ?? "");
  const { waits, ...rest } = figures;
  const pairs = Object.entries(rest).map(([key, value]) => [key, shown(key, value)])
    .filter(([, text]) => text !== "").map(([key, text]) => `${key.replaceAll("_", " ")} ${text}`);
  return [
    `${paint(color, mark)} ${paint("1", title)}  [${code}]`,
    `   ${pairs.join(", ")}`,
    ...waitsText((waits ?? []) as Wait[]).map((line) => `   ${line}`),
    `   ${paint("36", "What to do:")} ${remedy}`,
  ];
}

function figuresText(it: Figures): string[] {
  const jobs = it.jobs &&
    Object.entries(it.jobs).map(([state, count]) => `${number(count)} ${state}`);
  const rows = [
    ["jobs", jobs ? `${jobs.join(", ")}; ${plural(it.workers ?? 0, "worker")} alive` : "not read"],
    [
      "table jobs",
      `${number(it.live_rows)} rows and ${number(it.dead_rows)} dead ones, ` +
      `${number(it.jobs_written_per_s)} written a second` +
      (it.hot_share === null ? "" : `, ${percent(it.hot_share)} of the updates touched no index`),
    ],
    [
      "transactions",
      `${number(it.transactions_per_s)} a second, ${
        percent(it.rollback_share)
      } of them rolled back`,
    ],
    [
      "sessions",
      `${number(it.active_mean)} at work on average, ${
        number(it.waiting_mean)
      } of them waiting for a lock`,
    ],
    [
      "connections",
      it.connections.map(({ of, used, places }) => `${used} of ${places} of ${of}`).join(", "),
    ],
    ["pooler", it.pooler],
  ];
  return aligned(rows, [0, 1]);
}

if (import.meta.main) await config.runMain("doctor", main);
