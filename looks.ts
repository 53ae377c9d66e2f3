/** The controllers' looks, a row each: see migrations/0004_looks.sql. */
import { cut, schema, type Sql } from "./db.ts";
import type { Decision, Look, Memory } from "./policy.ts";
import { list } from "./queue.ts";

/** Where a controller stands: what it needs to record a look, whatever that saw. */
export interface Standing {
  at_ms: number;
  /** Whether the one who asked is the leader of its pool's controllers. */
  leader: boolean;
  /** The last look's, 0 before the first; and what it left. */
  number: string;
  memory: Memory | null;
}

/** What a controller sees of the database. */
export interface Survey extends Standing {
  work: NonNullable<Look["queue"]>["work"];
  workers: NonNullable<Look["queue"]>["workers"];
}

/** Reads all of it in one statement. `runTimes`: also how long jobs ran of late. */
export async function survey(
  sql: Sql,
  controller: string,
  pools: { workers: string; looks: string },
  silentS: number,
  runTimes: boolean,
): Promise<Survey> {
  const [row] = await sql<Survey[]>`
    select at_ms, leader, number::text, memory, work, workers
    from ${sql(schema)}.survey(${controller}, ${pools.workers}, ${pools.looks},
      ${silentS}, ${runTimes})`;
  return row;
}

/** {@linkcode survey} without what can be large: for a look that could not see the queue. */
export async function standing(
  sql: Sql,
  controller: string,
  pool: string,
  silentS: number,
): Promise<Standing> {
  const [row] = await sql<Standing[]>`
    select extract(epoch from now())::float8 * 1000 as at_ms,
      ${sql(schema)}.is_leader(${controller}, ${silentS}) as leader,
      coalesce(last.number, 0)::text as number, last.memory
    from (values (1)) one
    left join (select number, memory from ${sql(schema)}.looks
               where pool = ${pool} order by number desc limit 1) last on true`;
  return row;
}

/** Whether the platform is to be told, and what came of that. */
export type Act = "none" | "due" | "written" | "failed" | "dry";

/** A look as it is kept. */
export interface LookRow {
  number: string;
  at: Date;
  seen: Look;
  wanted: number | null;
  code: string;
  reason: string;
  alarms: string[];
  act: Act;
  error: string | null;
}

/**
 * Stores a look under the number after `last`, which is also what makes it the leader's: an effect
 * outside the database follows only on this.
 *
 * @returns its number, or null: another controller took it
 */
export async function record(
  sql: Sql,
  it: { controller: string; pool: string; last: string; look: Look; decision: Decision },
  act: Act,
  error: string | null,
): Promise<string | null> {
  const { controller, pool, last, look, decision } = it;
  const { wanted, code, reason, alarms, memory } = decision;
  const rows = await sql<{ number: string }[]>`
    insert into ${sql(schema)}.looks
      (pool, number, controller, seen, memory, wanted, code, reason, alarms, act, error)
    values (${pool}, ${last}::bigint + 1, ${controller}, ${JSON.stringify(look)}::text::jsonb,
      ${memory && JSON.stringify(memory)}::text::jsonb, ${wanted}, ${code}, ${reason},
      ${`{${alarms.join(",")}}`}::text[], ${act}, ${error && cut(error, 2000)})
    on conflict (pool, number) do nothing
    returning number::text`;
  return rows[0]?.number ?? null;
}

/** Says what came of a look's write, and what the next look is to know of it. */
export async function conclude(
  sql: Sql,
  pool: string,
  number: string,
  act: Act,
  error: string | null,
  memory: Memory | null,
): Promise<void> {
  await sql`
    update ${sql(schema)}.looks set act = ${act}, error = ${error && cut(error, 2000)},
      memory = ${memory && JSON.stringify(memory)}::text::jsonb
    where pool = ${pool} and number = ${number} and act = 'due'`;
}

/** The last looks of a pool, the newest first. */
export async function looks(sql: Sql, pool: string, most = 100): Promise<LookRow[]> {
  const rows = await list(sql<(Omit<LookRow, "alarms"> & { alarms: string })[]>`
    select number::text, at, seen, wanted, code, reason, to_jsonb(alarms)::text as alarms, act, error
    from ${sql(schema)}.looks l where pool = ${pool} order by l.number desc limit ${most}`);
  return rows.map((row) => ({ ...row, alarms: JSON.parse(row.alarms) }));
}

/** The last look of each pool of workers. */
export interface LastLook {
  pool: string;
  number: string;
  /** Replicas that are asked for, and that Railway said are running; null when it was never seen, or not then. */
  wanted: number | null;
  running: number | null;
  age_s: number;
}

/** The last look of each pool, at most 100. */
export const lastLooks = (sql: Sql): Promise<LastLook[]> =>
  list(sql<LastLook[]>`
    select pool, number::text, wanted, (seen -> 'platform' ->> 'running')::integer as running,
      extract(epoch from now() - at)::float8 as age_s
    from ${sql(schema)}.last_looks() order by pool`);

/** Removes looks older than `retentionS`, at most `most`. */
export async function sweepLooks(sql: Sql, retentionS: number, most = 1000): Promise<void> {
  await sql`
    delete from ${sql(schema)}.looks l using (
      select pool, number from ${sql(schema)}.looks
      where at < now() - ${retentionS} * interval '1 second' order by at limit ${most}) old
    where l.pool = old.pool and l.number = old.number`;
}
