/**
 * Jobs at a steady rate for a while, worked off by a worker and swept: whether the table, its indexes,
 * its dead rows and the worker's memory level off.
 */
import { fileURLToPath } from "node:url";
import * as config from "../../config.ts";
import { type Pool, schema } from "../../db.ts";
import { enqueue } from "../../queue.ts";
import { startScript } from "../scripts.ts";
import {
  aligned,
  benchServer,
  type Common,
  type Machine,
  machineText,
  type Measurement,
  ratio,
  round,
  type Say,
} from "./common.ts";
import { picture } from "./svg.ts";

interface Settings extends Common {
  minutes: number;
  rate: number;
  workers: number;
  concurrency: number;
  retentionS: number;
}

interface Sample {
  at_s: number;
  waiting: number;
  finished: number;
  table_mib: number;
  indexes_mib: number;
  /** The size of each index. */
  indexes: Record<string, number>;
  dead: number;
  vacuums: number;
  analyzes: number;
  rss_mib: number;
}

interface Report {
  machine: Machine;
  settings: Omit<Settings, "quick">;
  enqueued: number;
  samples: Sample[];
  /** The largest of the last third to the largest of the third before it. */
  growth: Record<"table_mib" | "indexes_mib" | "dead" | "waiting", number | null>;
  /** Of the worker that grew most, from the end of the first third on. */
  rss_growth_mib: number;
}

const TICK_MS = 50;
/** More than this from one third to the next is no levelling off. */
const LEVEL = 1.15;
const MOST_RSS_MIB = 32;

async function benchSoak(settings: Settings, signal: AbortSignal, say: Say): Promise<Report> {
  const { quick, ...given } = settings;
  const o = quick ? { ...given, minutes: 0.2, rate: Math.min(given.rate, 200) } : given;
  const everyMs = quick ? 1000 : 10_000;
  await using server = await benchServer({ autovacuum_naptime: quick ? "2s" : "1min" });
  await using database = await server.database();
  const args = [
    ...["--jobs", fileURLToPath(new URL("noop.ts", import.meta.url)), "--log-level", "warning"],
    ...["--concurrency", String(o.concurrency), "--retention-s", String(o.retentionS)],
  ];
  await using stack = new AsyncDisposableStack();
  const workers = Array.from(
    { length: o.workers },
    () => stack.use(startScript("worker.ts", args, { DATABASE_URL: database.url })),
  );
  const samples: Sample[] = [];
  const startedMs = performance.now();
  const totalMs = o.minutes * 60_000;
  let [enqueued, sampledMs] = [0, 0];
  for (let ms = 0; ms < totalMs; ms = performance.now() - startedMs) {
    signal.throwIfAborted();
    // As many as are due by now, so that a slow statement is made up for.
    const due = Math.min(10_000, Math.floor(ms / 1000 * o.rate) - enqueued);
    if (due > 0) await enqueue(database.sql, Array(due).fill({ kind: "noop" }));
    enqueued += Math.max(0, due);
    if (ms - sampledMs >= everyMs) {
      sampledMs = ms;
      samples.push(await sample(database.sql, ms, workers.map(({ pid }) => pid)));
      const { waiting, table_mib, dead, rss_mib } = samples[samples.length - 1];
      say(
        `${
          Math.round(ms / 1000)
        } s: ${waiting} wait, ${table_mib} MiB, ${dead} dead, ${rss_mib} MiB`,
      );
    }
    await new Promise((done) => setTimeout(done, TICK_MS));
  }
  return { machine: server.machine, settings: o, enqueued, samples, ...thirds(samples) };
}

async function sample(sql: Pool, atMs: number, pids: number[]): Promise<Sample> {
  const [row] = await sql<Omit<Sample, "at_s" | "rss_mib">[]>`
    select
      (select count(*)::integer from ${sql(schema)}.jobs where status = 'queued') as waiting,
      (select count(*)::integer from ${
    sql(schema)
  }.jobs where status in ('done', 'failed', 'cancelled')) as finished,
      round(pg_table_size(s.relid) / 1048576.0, 1)::float8 as table_mib,
      round(pg_indexes_size(s.relid) / 1048576.0, 1)::float8 as indexes_mib,
      (select jsonb_object_agg(i.indexrelname, round(pg_relation_size(i.indexrelid) / 1048576.0, 1))
       from pg_stat_user_indexes i where i.relid = s.relid) as indexes,
      s.n_dead_tup::integer as dead, s.autovacuum_count::integer as vacuums,
      s.autoanalyze_count::integer as analyzes
    from pg_stat_user_tables s where s.schemaname = ${schema} and s.relname = 'jobs'`;
  const rss = Math.max(...pids.map((pid) => memoryMib(pid)));
  return { at_s: Math.round(atMs / 1000), ...row, rss_mib: round(rss, 1) };
}

/** What a process has in memory. Linux only; elsewhere NaN. */
function memoryMib(pid: number): number {
  try {
    const status = Deno.readTextFileSync(`/proc/${pid}/status`);
    return Number(/^VmRSS:\s+(\d+) kB/m.exec(status)?.[1]) / 1024;
  } catch {
    return NaN;
  }
}

/** The first third is to get going; the last is compared with the one before it. */
export function thirds(samples: readonly Sample[]): Pick<Report, "growth" | "rss_growth_mib"> {
  const size = Math.floor(samples.length / 3);
  const most = (part: readonly Sample[], of: (sample: Sample) => number) =>
    Math.max(...part.map(of));
  const middle = samples.slice(size, 2 * size);
  const last = samples.slice(-size);
  const grown = (what: keyof Report["growth"]) =>
    ratio(most(last, (sample) => sample[what]), most(middle, (sample) => sample[what]));
  return {
    growth: {
      ...{ table_mib: grown("table_mib"), indexes_mib: grown("indexes_mib") },
      ...{ dead: grown("dead"), waiting: grown("waiting") },
    },
    rss_growth_mib: size === 0
      ? NaN
      : round(most(last, ({ rss_mib }) => rss_mib) - most(middle, ({ rss_mib }) => rss_mib), 1),
  };
}

function textOf({ machine, settings, enqueued, samples, growth, rss_growth_mib }: Report): string {
  const rows = samples.map((s) => [
    ...[`${s.at_s} s`, String(s.waiting), String(s.finished), String(s.table_mib)],
    ...[String(s.indexes_mib), String(s.dead), String(s.vacuums), String(s.rss_mib)],
  ]);
  const head = ["", "in line", "finished", "table MiB", "indexes", "dead", "vacuums", "worker MiB"];
  const levels = Object.entries(growth).filter(([what]) => what !== "waiting").map((
    [what, times],
  ) =>
    `${what.replace("_mib", "")} ${times ?? "-"} times the third before` +
    ((times ?? 1) <= LEVEL ? ", level" : ", NOT level")
  );
  const indexes = Object.entries(samples[samples.length - 1]?.indexes ?? {})
    .map(([name, mib]) => `${name} ${mib}`).join(", ");
  return [
    machineText(machine),
    `${settings.rate} jobs a second for ${settings.minutes} minutes (${enqueued}), ` +
    `${settings.workers} workers × ${settings.concurrency}, kept for ${settings.retentionS} s`,
    "",
    ...aligned([head, ...rows]),
    "",
    `indexes in the end, MiB: ${indexes}`,
    ...levels,
    `the worker's memory: ${rss_growth_mib} MiB more than in the third before` +
    (rss_growth_mib <= MOST_RSS_MIB ? "" : `, which is more than ${MOST_RSS_MIB}`),
  ].join("\n");
}

const svgOf = ({ machine, samples }: Report) =>
  picture("A steady rate", machineText(machine).split("\n")[0], [
    linesOf("Sizes", "MiB", samples, { "the table": "table_mib", "its indexes": "indexes_mib" }),
    linesOf("Rows", "rows", samples, { dead: "dead", "in line": "waiting" }),
    linesOf("Memory of the worker", "MiB", samples, { worker: "rss_mib" }),
  ]);

type Shown = "table_mib" | "indexes_mib" | "dead" | "waiting" | "rss_mib";
const linesOf = (
  title: string,
  unit: string,
  samples: readonly Sample[],
  series: Record<string, Shown>,
) => ({
  kind: "lines" as const,
  ...{ title, x: { label: "seconds" }, y: { label: unit } },
  series: Object.entries(series).map(([name, what]) => ({
    name,
    points: samples.map((sample): [number, number] => [sample.at_s, sample[what]]),
  })),
});

export const soak: Measurement<Settings, Report> = {
  summary: "whether sizes and memory level off at a steady rate",
  flags: {
    minutes: config.flag(config.int(10, 1, 1440, "for so long")),
    rate: config.flag(config.int(2000, 1, 100_000, "jobs a second")),
    workers: config.flag(config.int(1, 1, 64, "worker processes")),
    concurrency: config.flag(config.int(100, 1, 1000, "jobs at a time in each")),
    retentionS: config.flag(config.int(60, 60, 86_400, "how long finished jobs are kept")),
  },
  ...{ run: benchSoak, text: textOf, svg: svgOf },
};
