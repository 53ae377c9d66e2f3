/** What pgbench, a client that does nothing else, reaches with the statements that Siding's worker sends. */
import postgres from "postgres";

import { claim } from "../../claims.ts";
import { settle } from "../../queue.ts";
import { installedPostgres } from "../postgres.ts";
import type { BenchServer, Say } from "./common.ts";
import { siding, template } from "./contenders.ts";

export interface Claims {
  jobs_per_s: number;
  clients: number;
  batch: number;
}

const BATCH = 500;
const CLIENTS = 2;
const WORKER = "00000000-0000-4000-8000-000000000001";

/** Debian has it beside the server or alone; null where it is not installed. */
async function pgbenchPath(): Promise<string | null> {
  const folders = [...installedPostgres().map(({ binDir }) => binDir).reverse(), "/usr/bin"];
  for (const folder of folders) {
    const there = await Deno.stat(`${folder}/pgbench`).then(() => true, () => false);
    if (there) return `${folder}/pgbench`;
  }
  return null;
}

/**
 * Claims and settles, {@linkcode BATCH} at a time by {@linkcode CLIENTS} connections, the statements
 * of queue.ts as they are sent.
 *
 * @returns null where pgbench is not installed
 */
export async function pgbenchOn(
  server: BenchServer,
  jobs: number,
  say: Say,
): Promise<Claims | null> {
  const pgbench = await pgbenchPath();
  if (!pgbench) return null;
  const rounds = Math.max(1, Math.floor(jobs / BATCH / CLIENTS));
  say(`${rounds * CLIENTS} claims of ${BATCH} jobs`);
  await using database = await template(server, siding, "best", rounds * CLIENTS * BATCH + 1);
  await database.sql.unsafe(siding.release!);
  const folder = await Deno.makeTempDir({ prefix: "siding-bench-" });
  try {
    await Deno.writeTextFile(`${folder}/drain.sql`, await script(database.url));
    const { success, stdout, stderr } = await new Deno.Command(pgbench, {
      args: [
        ...["--no-vacuum", "--protocol", "simple", "--client", String(CLIENTS)],
        ...["--transactions", String(rounds), "--file", `${folder}/drain.sql`, database.url],
      ],
    }).output();
    const said = new TextDecoder().decode(stdout);
    const tps = Number(/^tps = ([\d.]+)/m.exec(said)?.[1]);
    if (!success || !tps) throw new Error(`pgbench: ${new TextDecoder().decode(stderr)}`);
    const [{ left }] = await database.sql.unsafe(`select (${siding.left})::integer as left`);
    if (left !== 0) throw new Error(`pgbench left ${left} jobs: its script is not the queue's`);
    return { jobs_per_s: Math.round(tps * BATCH), clients: CLIENTS, batch: BATCH };
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
}

/** The statements of one claim and its settlement, as the queue sends them, with pgbench's variable between. */
async function script(url: string): Promise<string> {
  const sent: { text: string; values: unknown[] }[] = [];
  const sql = postgres(url, {
    ...{ max: 1, fetch_types: false, onnotice: () => {} },
    debug: (_connection: number, text: string, values: unknown[]) => sent.push({ text, values }),
  });
  try {
    const options = { worker: WORKER, kinds: ["noop"], most: 1, leaseS: 120, token: WORKER };
    const from = { queue: "default", claim: "skip_locked" } as const;
    const [job] = await claim(sql, from, options);
    await settle(sql, WORKER, [{ id: job.id, attempt: 1, outcome: "done", result: null }]);
  } finally {
    await sql.end();
  }
  const claiming = sent.find(({ text }) => text.includes("skip locked"))!;
  const settling = sent.find(({ text }) => text.includes(".settle("))!;
  const outcome = "'id', j.id::text, 'attempt', j.attempt, 'outcome', 'done', 'result', null";
  const claimText = literal({ ...claiming, values: claiming.values.map(ofBatch) })
    .replace(
      /select j\.id::text.*?from taken j order by.*$/s,
      `select coalesce(jsonb_agg(jsonb_build_object(${outcome})), '[]')::text as outcomes from taken j`,
    );
  const settleText = literal(settling).replace(/'\[\{.*\}\]'/s, "':outcomes'");
  return `${oneLine(claimText)} \\gset\n${oneLine(settleText)};\n`;
}

/** The one number that is 1 is how many are claimed. */
const ofBatch = (value: unknown) => String(value) === "1" ? String(BATCH) : value;

/** A statement with its values in it. pgbench takes a colon with letters after it for a variable. */
function literal({ text, values }: { text: string; values: unknown[] }): string {
  return text.replace(
    /\$(\d+)/g,
    (_, n) => `'${String(values[Number(n) - 1]).replaceAll("'", "''")}'`,
  );
}

const oneLine = (text: string) => text.replace(/\s+/g, " ").trim();
