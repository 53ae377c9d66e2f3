/** What pgbench, a client that does nothing else, reaches with the statements that Siding's worker sends. */
import { schema } from "../../db.ts";
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
 * Claims and ends, {@linkcode BATCH} at a time by {@linkcode CLIENTS} connections.
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
    await Deno.writeTextFile(`${folder}/drain.sql`, SCRIPT);
    const { success, stdout, stderr } = await new Deno.Command(pgbench, {
      args: [
        ...[
          "--no-vacuum",
          "--protocol",
          "simple",
          "--client",
          String(CLIENTS),
          "--define",
          "ids={}",
        ],
        ...["--transactions", String(rounds), "--file", `${folder}/drain.sql`, database.url],
      ],
    }).output();
    const said = new TextDecoder().decode(stdout);
    const tps = Number(/^tps = ([\d.]+)/m.exec(said)?.[1]);
    if (!success || !tps) throw new Error(`pgbench: ${new TextDecoder().decode(stderr)}`);
    const [{ left }] = await database.sql.unsafe(`select (${siding.left})::integer as left`);
    // What each claimed last is ended by no next call of it.
    if (left > CLIENTS * BATCH + 1) {
      throw new Error(`pgbench left ${left} jobs: its script is not the queue's`);
    }
    return { jobs_per_s: Math.round(tps * BATCH), clients: CLIENTS, batch: BATCH };
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
}

/**
 * What the worker sends, a call of exchange with what is done in it; the ids that it brings are
 * those of the next call.
 */
const SCRIPT = `select '{' || coalesce(string_agg(job ->> 'id', ','), '') || '}' as ids
  from ${schema}.exchange('default', '{noop}', ${BATCH}, '${WORKER}', '${WORKER}', 120, false,
    null, null, null, nullif(':ids', '{}')::bigint[], array_fill(1, array[cardinality(':ids'::bigint[])]), null, 50) c
  left join lateral json_array_elements(c.jobs) job on true \\gset
`.replace(/\n +/g, " ");
