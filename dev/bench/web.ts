/**
 * The site under load: submits at a steady rate, each sent when it is due whether or not those before
 * were answered, with event streams open; and how long its pages take among many jobs.
 */
import * as config from "../../config.ts";
import { pause, type Pool, schema } from "../../db.ts";
import { createKey } from "../../keys.ts";
import { type RunningSite, startSite } from "../site.ts";
import {
  benchServer,
  type Common,
  type Machine,
  machineText,
  type Measurement,
  median,
  quantile,
  type Say,
} from "./common.ts";
import { picture } from "./svg.ts";

export interface Load {
  rate: number;
  seconds: number;
  streams: number;
  jobs: number;
}

export interface Report {
  machine: Machine;
  settings: Load;
  load: {
    submitted: number;
    /** Requests that were not answered with 201, and what they were answered with. */
    failed: number;
    failures: Record<string, number>;
    p50_ms: number;
    p95_ms: number;
    p99_ms: number;
    /** Streams that were open to the end. */
    streams: number;
    /** The site's memory after the first tenth, and the largest after that. */
    rss_mib: number;
    rss_max_mib: number;
  };
  /** Milliseconds of each page, the median of {@linkcode READS}. */
  pages: Record<string, number>;
}

const READS = 5;
const PAGES = [
  ...[
    "/",
    "/jobs",
    "/jobs?status=queued",
    "/jobs?status=failed",
    "/jobs?owner=nobody",
  ],
  ...[
    "/jobs?kind=none",
    "/dashboard",
    "/review",
    "/queues",
    "/health/service",
    "/metrics",
  ],
  ...["/api/jobs", "/api/queues"],
];

const flags = {
  rate: config.flag(config.int(200, 1, 10_000, "submits a second")),
  seconds: config.flag(config.int(60, 1, 3600, "for so long")),
  streams: config.flag(
    config.int(100, 0, 1000, "event streams that are open meanwhile"),
  ),
  jobs: config.flag(
    config.int(
      1_000_000,
      0,
      10_000_000,
      "finished jobs that are there already",
    ),
  ),
};

/** @param say hears how far it is */
export async function benchWeb(
  settings: Load & Common,
  signal: AbortSignal,
  say: Say,
): Promise<Report> {
  const { rate, streams } = settings;
  const [seconds, jobs] = settings.quick ? [5, 20_000] : [settings.seconds, settings.jobs];
  await using server = await benchServer();
  await using database = await server.database();
  const { sql } = database;
  say(`${jobs} finished jobs…`);
  await fill(sql, jobs);
  const siteFlags = ["--submits-per-minute", "10000000", "--open-metrics"];
  await using site = await startSite(database.url, siteFlags);
  const pages = await timePages(site, say);
  const { key } = await createKey(sql, "bench");
  const load = { rate, seconds, streams, jobs };
  const result = await submits(site, key, load, signal, say);
  return { machine: server.machine, settings: load, load: result, pages };
}

async function fill(sql: Pool, jobs: number): Promise<void> {
  await sql`
    insert into ${
    sql(schema)
  }.jobs (queue, kind, owner, payload, status, attempt, worker_id, created_at,
      due_at, claimed_at, finished_at, result)
    select 'default', 'transcribe', 'owner-' || n % 100, '{}', 'done', 1, gen_random_uuid(), t, t, t,
      t + interval '1 second', '{}'
    from generate_series(1, ${jobs}::integer) n,
      lateral (select now() - (${jobs} - n) * interval '1 second' as t) at`;
  await sql`vacuum analyze ${sql(schema)}.jobs`;
}

async function timePages(
  site: RunningSite,
  say: Say,
): Promise<Record<string, number>> {
  const cookie = await site.signIn();
  const times: Record<string, number> = {};
  for (const path of PAGES) {
    const read: number[] = [];
    for (let i = 0; i < READS; i++) {
      const startedMs = performance.now();
      const reply = await site.ask(path, { headers: { cookie } });
      await reply.body?.cancel();
      if (!reply.ok && reply.status !== 503) {
        throw new Error(`${path}: ${reply.status}`);
      }
      read.push(performance.now() - startedMs);
    }
    times[path] = median(read);
    say(`${path} ${times[path].toFixed(1)} ms`);
  }
  return times;
}

async function submits(
  site: RunningSite,
  key: string,
  { rate, seconds, streams }: Load,
  signal: AbortSignal,
  say: Say,
): Promise<Report["load"]> {
  const headers = {
    authorization: `Bearer ${key}`,
    "content-type": "application/json",
  };
  const failures: Record<string, number> = {};
  const latencies: number[] = [];
  const submit = async (n: number) => {
    const startedMs = performance.now();
    try {
      const body = JSON.stringify({
        kind: "transcribe",
        payload: { title: `bench ${n}` },
      });
      const reply = await fetch(`${site.address}/api/jobs`, {
        method: "POST",
        headers,
        body,
      });
      const { id } = await reply.json();
      if (reply.status === 201) {
        latencies.push(performance.now() - startedMs);
        return id as string;
      }
      failures[reply.status] = (failures[reply.status] ?? 0) + 1;
    } catch (error) {
      const name = (error as Error).message.slice(0, 80);
      failures[name] = (failures[name] ?? 0) + 1;
    }
    return null;
  };

  const over = new AbortController();
  let open = 0;
  const followed = await Promise.all(
    Array.from({ length: streams }, (_, n) => submit(-1 - n)),
  );
  const follow = async (id: string | null) => {
    try {
      const url = `${site.address}/api/jobs/${id}/events`;
      const reply = await fetch(url, { headers, signal: over.signal });
      if (!reply.ok) throw new Error(`an event stream: ${reply.status}`);
      open++;
      for await (const _ of reply.body!);
      open--; // ended by the site, which is not to be
    } catch (error) {
      if (!over.signal.aborted) say(String(error));
    }
  };
  const following = followed.map(follow);

  const rss = () => memoryMib(site.pid);
  let [base, largest] = [0, 0];
  const underWay = new Set<Promise<unknown>>();
  const total = rate * seconds;
  const startedMs = performance.now();
  for (let n = 0; n < total && !signal.aborted; n++) {
    const dueMs = startedMs + n * 1000 / rate;
    const aheadMs = dueMs - performance.now();
    if (aheadMs > 1) await pause(aheadMs, signal);
    const one: Promise<unknown> = submit(n).finally(() => underWay.delete(one));
    underWay.add(one);
    if (n === Math.floor(total / 10)) base = rss();
    if (n % rate === 0) largest = base ? Math.max(largest, rss()) : 0;
    if (n % (rate * 10) === 0) {
      say(`${n} of ${total} submitted, the site has ${rss().toFixed(0)} MiB`);
    }
  }
  await Promise.all(underWay);
  largest = Math.max(largest, rss());
  const stillOpen = open;
  over.abort();
  await Promise.all(following);
  return {
    submitted: latencies.length,
    failed: Object.values(failures).reduce((sum, n) => sum + n, 0),
    failures,
    p50_ms: quantile(latencies, 0.5),
    p95_ms: quantile(latencies, 0.95),
    p99_ms: quantile(latencies, 0.99),
    streams: stillOpen,
    ...{ rss_mib: base, rss_max_mib: largest },
  };
}

/** What a process has in memory, in MiB. Linux only. */
function memoryMib(pid: number): number {
  const status = Deno.readTextFileSync(`/proc/${pid}/status`);
  return Number(/^VmRSS:\s+(\d+) kB/m.exec(status)?.[1]) / 1024;
}

function textOf({ machine, settings, load, pages }: Report): string {
  const ms = (value: number) => `${value.toFixed(1)} ms`;
  const failures = Object.entries(load.failures).map(([what, n]) => `${n} × ${what}`).join(", ");
  return [
    machineText(machine),
    `${settings.jobs} finished jobs in the table`,
    "",
    ...Object.entries(pages).map(([path, took]) => `${ms(took).padStart(10)}  ${path}`),
    "",
    `${settings.rate} submits a second for ${settings.seconds} s with ${settings.streams} event streams: ` +
    `${load.submitted} submitted, ${load.failed} failed${failures && ` (${failures})`}`,
    `  p50 ${ms(load.p50_ms)}  p95 ${ms(load.p95_ms)}  p99 ${ms(load.p99_ms)}; ` +
    `${load.streams} streams open to the end`,
    `  memory of the site: ${load.rss_mib.toFixed(0)} MiB, ` +
    `at the most ${load.rss_max_mib.toFixed(0)} (+${(load.rss_max_mib - load.rss_mib).toFixed(0)})`,
  ].join("\n");
}

function svgOf({ machine, settings, load, pages }: Report): string {
  const bar = (label: string, value: number) => ({
    label,
    bars: [{ series: "ms", value }],
  });
  const title = `The site, ${settings.rate} submits a second, ${settings.jobs} finished jobs`;
  return picture(title, machineText(machine).split("\n")[0], [
    {
      ...{ kind: "bars", title: "Answer to a submit", unit: "ms" },
      groups: [
        bar("p50", load.p50_ms),
        bar("p95", load.p95_ms),
        bar("p99", load.p99_ms),
      ],
    },
    {
      ...{ kind: "bars", title: "Pages", unit: "ms", log: true },
      groups: Object.entries(pages).map(([path, ms]) => bar(path, ms)),
    },
  ]);
}

export const web: Measurement<Load & Common, Report> = {
  summary: "the site under load, and its pages among many jobs",
  flags,
  run: benchWeb,
  text: textOf,
  svg: svgOf,
  failed: ({ load }) => load.failed > 0,
};
