/**
 * What the measurements of `deno task bench` share: a server and databases of their own, the machine
 * and the server's settings as they are printed, turns of the contenders, medians and ratios, and the
 * CPU that Postgres used.
 */
import { cpus } from "node:os";
import postgres from "postgres";
import type { Setting } from "../../config.ts";
import { connect, type Pool } from "../../db.ts";
import { migrate } from "../../migrate.ts";
import { startPostgres } from "../postgres.ts";
import { aligned, round } from "../simulation/report.ts";

export { aligned, round };

/** Hears how far a measurement is. */
export type Say = (line: string) => void;

/** Flags that every measurement takes. */
export interface Common {
  /** Small sizes: all measurements together take less than two minutes. */
  quick: boolean;
}

/** A measurement, as tools/bench.ts lists it. */
// deno-lint-ignore no-explicit-any -- a table of measurements holds those of different flags and reports
export interface Measurement<Settings extends Common = any, Report = any> {
  /** Ends the sentence "measures …". */
  summary: string;
  /** Its flags beside the common ones. */
  flags: Record<string, Setting<unknown>>;
  run: (settings: Settings, signal: AbortSignal, say: Say) => Promise<Report>;
  text: (report: Report) => string;
  svg: (report: Report) => string;
  /** Whether what was measured went wrong, which makes the exit code 1. */
  failed?: (report: Report) => boolean;
}

/** A database of a measurement's own, dropped when disposed of. */
export interface BenchDatabase extends AsyncDisposable {
  name: string;
  url: string;
  /** A small pool on it, for the measurement's own looks. */
  sql: Pool;
  /** Closes the pool, for good. */
  close(): Promise<void>;
}

/** A server to measure on, stopped when disposed of if it was started here. */
export interface BenchServer extends AsyncDisposable {
  machine: Machine;
  /** Makes a database: with Siding's tables in it, or empty for a peer, or a copy of another one. */
  database(options?: { empty?: boolean; copyOf?: BenchDatabase }): Promise<BenchDatabase>;
  /** CPU seconds that all of the server's processes have used so far; null where that cannot be read. */
  cpuS(): number | null;
  /** CPU seconds of each process with a connection, by `DATABASE PID`; empty where that cannot be read. */
  backendsCpuS(): Promise<Record<string, number>>;
}

/**
 * The server of DATABASE_URL_TEST, or an embedded one. That has Postgres's own defaults: the embedded
 * servers of the tests write nothing to the disk for sure, which would flatter whoever commits most.
 *
 * @param settings server settings for an embedded one, such as `autovacuum: "off"`
 */
export async function benchServer(
  settings: Record<string, string> = {},
): Promise<BenchServer> {
  const given = Deno.env.get("DATABASE_URL_TEST");
  const durable = { fsync: "on", full_page_writes: "on" };
  const started = given ? null : await startPostgres({ settings: { ...durable, ...settings } });
  const admin = postgres(given || started!.url, {
    max: 1,
    fetch_types: false,
    onnotice: () => {},
  });
  const stop = async () => {
    await admin.end({ timeout: 1 });
    await started?.stop();
  };
  try {
    const postmaster = started?.pid ?? await postmasterOf(admin);
    return {
      machine: await machineOf(
        admin,
        started ? "embedded" : "of DATABASE_URL_TEST",
      ),
      database: (options = {}) => aDatabase(admin, given || started!.url, options),
      cpuS: () => postmaster === null ? null : cpuSecondsOf(postmaster),
      backendsCpuS: () => postmaster === null ? Promise.resolve({}) : backendsCpuS(admin),
      [Symbol.asyncDispose]: stop,
    };
  } catch (error) {
    await stop();
    throw error;
  }
}

async function aDatabase(
  admin: Pool,
  adminUrl: string,
  { empty, copyOf }: { empty?: boolean; copyOf?: BenchDatabase },
): Promise<BenchDatabase> {
  const name = `siding_bench_${crypto.randomUUID().replaceAll("-", "")}`;
  if (copyOf) {
    await copyOf.close(); // a database in use cannot be copied
    await admin`create database ${admin(name)} template ${admin(copyOf.name)} strategy file_copy`;
  } else await admin`create database ${admin(name)}`;
  const url = new URL(adminUrl);
  url.pathname = `/${name}`;
  const sql = connect(url.href, { max: 4, name: "siding bench" });
  const close = () => sql.end({ timeout: 1 });
  const drop = async () => {
    await close();
    await admin`drop database ${admin(name)} with (force)`;
  };
  try {
    if (!empty && !copyOf) await migrate(url.href);
    return { name, url: url.href, sql, close, [Symbol.asyncDispose]: drop };
  } catch (error) {
    await drop();
    throw error;
  }
}

/** What the figures are of. */
export interface Machine {
  cores: number;
  model: string;
  deno: string;
  postgres: string;
  /** Whose server it is. */
  server: string;
  /** The server's settings that figures hang on. */
  settings: Record<string, string>;
}

const SETTINGS = [
  ...[
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_level",
    "shared_buffers",
  ],
  ...["max_wal_size", "autovacuum", "jit"],
];

/** The machine and the server, to be printed with each figure. */
async function machineOf(sql: Pool, server: string): Promise<Machine> {
  const [{ version, settings }] = await sql<
    { version: string; settings: Machine["settings"] }[]
  >`
    select current_setting('server_version') as version,
      (select jsonb_object_agg(name, current_setting(name)) from pg_settings
        where name = any(${`{${SETTINGS}}`}::text[])) as settings`;
  return {
    ...{
      cores: cpus().length,
      model: cpus()[0]?.model.trim() || "unknown processor",
    },
    ...{ deno: Deno.version.deno, postgres: version.split(" ")[0], server },
    settings: Object.fromEntries(
      SETTINGS.map((name) => [name, settings[name]]),
    ),
  };
}

/** The machine as the lines above the figures. */
export function machineText({ settings, ...it }: Machine): string {
  const set = Object.entries(settings).map(([name, value]) => `${name} ${value}`).join(", ");
  return `${it.cores} × ${it.model}, Deno ${it.deno}, PostgreSQL ${it.postgres} (${it.server})\n${set}`;
}

/** The middle value; of two the mean of both; NaN of none. */
export function median(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** The smallest value that this share of all is not above; NaN of none. */
export function quantile(values: ArrayLike<number>, share: number): number {
  const sorted = Float64Array.from(values).sort();
  return sorted.length === 0 ? NaN : sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}

/** How many times `other` goes into `one`, to two digits; null where there is nothing to compare. */
export const ratio = (
  one: number | null | undefined,
  other: number | null | undefined,
) => one && other && Number.isFinite(one / other) ? round(one / other, 2) : null;

/**
 * Has contenders take turns, so that whatever else the machine does meets all of them: each once a
 * round, each round begun by the next of them.
 *
 * @returns by name what each measured, a value a round
 * @throws what a contender threw, or what aborted `signal`
 */
export async function inTurns<T>(
  contenders: Record<string, () => Promise<T>>,
  rounds: number,
  signal: AbortSignal,
  say: Say,
): Promise<Record<string, T[]>> {
  const names = Object.keys(contenders);
  const measured: Record<string, T[]> = Object.fromEntries(
    names.map((name) => [name, []]),
  );
  for (let n = 0; n < rounds; n++) {
    for (let i = 0; i < names.length; i++) {
      signal.throwIfAborted();
      const name = names[(n + i) % names.length];
      say(`round ${n + 1} of ${rounds}: ${name}`);
      measured[name].push(await contenders[name]());
    }
  }
  return measured;
}

const TICKS_A_SECOND = 100; // Linux's USER_HZ, the same on every architecture that Deno has

/** The fields of /proc/PID/stat after the name; null when there is no such process. */
function statOf(pid: number): { name: string; fields: string[] } | null {
  try {
    const [, name, rest] = /\((.*)\) (.*)/s.exec(
      Deno.readTextFileSync(`/proc/${pid}/stat`),
    )!;
    return { name, fields: rest.trim().split(" ") };
  } catch {
    return null;
  }
}

/** CPU seconds of a process and of its children, those that ended too; null without /proc. */
export function cpuSecondsOf(pid: number): number | null {
  const root = statOf(pid);
  if (!root) return null;
  const ticks = (fields: string[], from: number, to: number) =>
    fields.slice(from, to).reduce((sum, field) => sum + Number(field), 0);
  let sum = ticks(root.fields, 11, 15); // utime, stime, and both of children that were waited for
  for (const { name } of Deno.readDirSync("/proc")) {
    const child = /^\d+$/.test(name) ? statOf(Number(name)) : null;
    if (child && Number(child.fields[1]) === pid) {
      sum += ticks(child.fields, 11, 15);
    }
  }
  return sum / TICKS_A_SECOND;
}

async function backendsCpuS(sql: Pool): Promise<Record<string, number>> {
  const rows = await sql<{ database: string; pid: number }[]>`
    select datname as database, pid from pg_stat_activity where datname is not null`;
  return Object.fromEntries(rows.flatMap(({ database, pid }) => {
    try {
      // Nanoseconds on a processor; the other files of /proc count in hundredths of a second.
      const [ns] = Deno.readTextFileSync(`/proc/${pid}/schedstat`).split(" ");
      return [[`${database} ${pid}`, Number(ns) / 1e9]];
    } catch {
      return []; // it has ended
    }
  }));
}

/** The process id of the server behind a connection, if it runs on this machine where /proc shows it. */
async function postmasterOf(sql: Pool): Promise<number | null> {
  const [{ pid }] = await sql<
    { pid: number }[]
  >`select pg_backend_pid() as pid`;
  const backend = statOf(pid);
  return backend?.name === "postgres" ? Number(backend.fields[1]) : null;
}
