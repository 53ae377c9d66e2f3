/** The three bottlenecks of a queue in Postgres: locks, retries, indexes. */
import { schema } from "../../db.ts";
import { type Finding, literal, number, percent, plural, type Reader } from "./reader.ts";
import { duration, megabytes } from "./reader.ts";
import { mean, rise, transactions, type Wait, type Watched, written } from "./watch.ts";

/** A wait so long is one too many, however few wait. Claims give up after 1 s, and come again. */
const LONG_WAIT_S = 2;
/** Or this many wait on average, and are such a share of those at work. */
const WAITING = 0.5;
const WAITING_SHARE = 1 / 3;

/** Waiting for locks: who waits for whom, and which queue's lock. */
export function lockWaits(watched: Watched): Finding[] {
  const { samples, waits } = watched;
  const [active, waiting] = [mean(watched, "active"), mean(watched, "waiting")];
  const longestS = Math.max(0, ...waits.map((wait) => wait.waited_s ?? 0));
  const many = waiting >= WAITING && waiting >= WAITING_SHARE * active;
  if (longestS < LONG_WAIT_S && !many) return [];
  const asleep = waits.flatMap(({ holders }) => holders)
    .find(({ state }) => state?.startsWith("idle in transaction"));
  const idle = asleep ? `Process ${asleep.pid} holds it and does nothing: see why. ` : "";
  const queues = [...new Set(waits.flatMap(({ queue }) => queue ?? []))];
  return [{
    code: "lock_waits",
    severity: longestS >= 10 * LONG_WAIT_S || waiting > active / 2 ? "critical" : "warning",
    title:
      `Waiting for locks: on average ${number(waiting)} of ${number(active)} sessions at work ` +
      `wait, the longest seen ${duration(longestS)}, for ${waits[0]?.lock ?? "a lock"}`,
    figures: {
      looks: samples.length,
      active_mean: round(active),
      waiting_mean: round(waiting),
      longest_wait_s: round(longestS),
      queues,
      waits: waits.slice(0, 10).map((wait) => ({
        ...wait,
        waited_s: wait.waited_s === null ? null : round(wait.waited_s),
      })),
    },
    remedy: idle +
      (queues.length > 0
        ? `Claims of ${queues.map((name) => `queue "${name}"`).join(", ")} take turns. ` +
          "If it has no max_running, claim it by skip_locked; else claim more jobs at a time " +
          "(--concurrency) with fewer workers, and keep what else takes its lock (withQueueLock) short."
        : "Look at who holds the lock: end a transaction that was left open " +
          "(pg_terminate_backend), keep transactions short, give changes of tables a lock_timeout."),
  }];
}

/** Who waits for whom, a line each. */
export const waitsText = (waits: Wait[]): string[] =>
  waits.flatMap(({ pid, name, query, waited_s, lock, holders }) => [
    `- process ${pid}${name ? ` (${name})` : ""} waits` +
    `${waited_s === null ? "" : ` ${duration(waited_s)}`} for ${lock}: ${query}`,
    ...holders.map((it) =>
      `    behind process ${it.pid}${it.name ? ` (${it.name})` : ""}, ${it.state}: ${it.query}`
    ),
  ]);

const round = (value: number) => Number(value.toFixed(3));

/** So many rollbacks a second, and such a share of all transactions, are work done twice. */
const ROLLBACKS_PER_S = 2;
const ROLLBACK_SHARE = 0.1;

/** Retrying transactions: rollbacks, and claims at REPEATABLE READ that others were before. */
export function retries(watched: Watched): Finding[] {
  const { before, after, seconds } = watched;
  const { commits, rollbacks, share, perS } = transactions(watched);
  if (rollbacks / seconds < ROLLBACKS_PER_S || rollbacks < 3 || share < ROLLBACK_SHARE) return [];
  const claims = Object.fromEntries(
    Object.entries(after.claims).map(([name, count]) => [name, rise(before.claims[name], count)])
      .filter(([, count]) => Number(count) > 0),
  );
  const names = Object.keys(claims).map((name) => `"${name}"`).join(", ");
  return [{
    code: "retries",
    severity: share > 0.5 ? "critical" : "warning",
    title: `Retrying transactions: ${number(rollbacks / seconds)} of ` +
      `${number(perS)} transactions a second are rolled back ` +
      `(${percent(share)})`,
    figures: {
      rollbacks_per_s: round(rollbacks / seconds),
      commits_per_s: round(commits / seconds),
      rollback_share: round(share),
      repeatable_read_claims: claims,
    },
    remedy: names
      ? `Claims of ${names} go at REPEATABLE READ, where all but one of those at once are undone. ` +
        "Without a max_running claim it by skip_locked; else by lock, which waits instead of doing " +
        "it again, or with fewer workers and more jobs a claim (--concurrency)."
      : "No queue claims at REPEATABLE READ just now, so these are other statements: the server's log has " +
        "their errors. Serialization failures (40001) go with READ COMMITTED.",
  }];
}

/** Deadlocks. */
export function deadlocks({ before, after, seconds }: Watched): Finding[] {
  const count = rise(before.deadlocks, after.deadlocks);
  if (count === 0) return [];
  return [{
    code: "deadlocks",
    severity: "warning",
    title: `${plural(count, "deadlock")} within ${duration(seconds)}`,
    figures: { deadlocks: count, since_reset: after.deadlocks },
    remedy:
      "The server's log names both statements of each. Statements that lock several rows must " +
      "lock them in one order, such as by id.",
  }];
}

/** Before so many rows were written it is too early to say that an index is not read. */
const WRITTEN = 1000;
/** An index that was last read so long ago is not read any more. */
const UNREAD_S = 30 * 86_400;

interface IndexRow {
  name: string;
  scans: number;
  last_scan_s: number | null;
  bytes: number;
  needed: boolean;
  definition: string;
}

/** Maintaining indexes: each index of the jobs that is updated and never read, and is not Siding's own. */
export async function unreadIndexes(reader: Reader, watched: Watched): Promise<Finding[]> {
  const rows = await reader.rows<IndexRow>(
    "pg_stat_user_indexes",
    // Since 16 there is last_idx_scan, which a row as JSON has or has not. The size is that of the
    // last vacuum: to ask for today's takes a lock.
    `select i.indexrelname as name, i.idx_scan::float8 as scans,
       extract(epoch from now() - (to_jsonb(i) ->> 'last_idx_scan')::timestamptz)::float8 as last_scan_s,
       c.relpages * current_setting('block_size')::float8 as bytes,
       x.indisunique or x.indisexclusion or x.indisreplident as needed,
       pg_get_indexdef(i.indexrelid) as definition
     from pg_stat_user_indexes i
     join pg_index x on x.indexrelid = i.indexrelid
     join pg_class c on c.oid = i.indexrelid
     where i.schemaname = ${literal(schema)} and i.relname = 'jobs' order by 1`,
  );
  const jobs = watched.after.tables.jobs;
  if (!rows || !jobs) return [];
  const writes = jobs.inserted + jobs.updated - jobs.hot;
  const own = ownIndexes();
  const { rowsPerS, hotShare } = written(watched, "jobs");
  const unread = rows.filter(({ name, needed, scans, last_scan_s }) =>
    !own.has(name) && !needed && (scans === 0 || (last_scan_s ?? 0) > UNREAD_S)
  );
  if (writes < WRITTEN) return [];
  return unread.map(({ name, scans, last_scan_s, bytes, definition }) => ({
    code: "unread_index",
    severity: "warning" as const,
    title: `Index ${schema}.${name} is updated with the jobs, and ` +
      (scans === 0 ? "was not read once" : `was read last ${duration(last_scan_s!)} ago`),
    figures: {
      index: name,
      definition,
      scans,
      size: megabytes(bytes),
      rows_written_since_reset: writes,
      rows_written_per_s: round(rowsPerS),
      hot_share_of_updates: hotShare === null ? null : round(hotShare),
    },
    remedy:
      `Each new state of a job is written to it, too. If no standby and no monthly report reads it: ` +
      `drop index concurrently "${schema}".${JSON.stringify(name)};`,
  }));
}

/**
 * The indexes that the migrations make. They are partial, each over one state, and some serve what
 * comes rarely, such as a review: not to be read for long is no fault of theirs.
 */
function ownIndexes(): Set<string> {
  const folder = new URL("../../migrations/", import.meta.url);
  const texts = [...Deno.readDirSync(folder)].filter(({ name }) => name.endsWith(".sql"))
    .map(({ name }) => Deno.readTextFileSync(new URL(name, folder)));
  return new Set(
    texts.flatMap((text) => [...text.matchAll(/create (?:unique )?index (\w+) on siding\.jobs/g)])
      .map(([, name]) => name),
  );
}

export type Bottleneck = "locks" | "retries" | "indexes";

/** So many rows of jobs a second are where the upkeep of indexes begins to be felt. */
const BUSY_ROWS_PER_S = 100;

/** Which of the three the database is at, if it is at one: the earlier hides the later. */
export function bottleneckOf(items: Finding[], watched: Watched): Bottleneck | null {
  const has = (code: string) => items.some((item) => item.code === code);
  // Who is to be undone at REPEATABLE READ first waits for the row of whoever was first.
  const undone = has("retries") &&
    watched.waits.every(({ queue, waited_s }) => queue === null && (waited_s ?? 0) < LONG_WAIT_S);
  if (has("lock_waits") && !undone) return "locks";
  if (has("retries") || has("deadlocks")) return "retries";
  const busy = written(watched, "jobs").rowsPerS >= BUSY_ROWS_PER_S;
  return has("unread_index") && busy ? "indexes" : null;
}
