/** What the doctor sees while it watches for some seconds: who waits for whom, and what was counted. */
import { pause, schema } from "../../db.ts";
import { literal, type Reader, shortened } from "./reader.ts";

/** At most so many looks at pg_stat_activity, so far apart at the least. */
const MOST_SAMPLES = 40;
const SAMPLE_MS = 100;

/** A session that waits for a lock. */
export interface Wait {
  pid: number;
  name: string | null;
  query: string | null;
  waited_s: number | null;
  /** What for, in words, and the queue whose lock it is. */
  lock: string;
  queue: string | null;
  /** Who has it, or is before it in line. */
  holders: { pid: number; name: string | null; state: string | null; query: string | null }[];
}

/** Of all time; their difference is what happened while it watched. */
export interface Counters {
  commits: number;
  rollbacks: number;
  deadlocks: number;
  /** The doctor's own among them. */
  own: { commits: number; rollbacks: number };
  /** Of the tables of the queue, by name. Only `live` and `dead` are of the moment. */
  tables: Record<
    string,
    { inserted: number; updated: number; hot: number; deleted: number; live: number; dead: number }
  >;
  /** Claims by repeatable_read that went through, by queue. */
  claims: Record<string, number>;
}

export interface Watched {
  seconds: number;
  /** When it began, by the database's clock. */
  since: string;
  /** At each look: sessions of this database that were at work, and those of them that waited for a lock. */
  samples: { active: number; waiting: number }[];
  /** Each session that waited, at its longest. */
  waits: Wait[];
  before: Counters;
  after: Counters;
}

/** Sessions on average over the looks. */
export const mean = ({ samples }: Watched, key: "active" | "waiting") =>
  samples.reduce((sum, sample) => sum + sample[key], 0) / Math.max(1, samples.length);

/** Watches for so many seconds, or until `signal` is aborted. */
export async function watch(
  reader: Reader,
  seconds: number,
  signal: AbortSignal,
): Promise<Watched> {
  const stepMs = Math.max(SAMPLE_MS, seconds * 1000 / MOST_SAMPLES);
  const before = await counters(reader);
  const [{ since }] = await reader.must<{ since: string }>("select now()::text as since");
  const startMs = performance.now();
  const samples: Watched["samples"] = [];
  const waits = new Map<number, Wait>();
  const queues = await queueLocks(reader);
  while (!signal.aborted && samples.length < MOST_SAMPLES) {
    const sample = await sessions(reader);
    if (sample) samples.push(sample);
    if (sample?.waiting) {
      for (const wait of await waitsNow(reader, queues)) {
        const known = waits.get(wait.pid);
        if (!known || (wait.waited_s ?? 0) >= (known.waited_s ?? 0)) waits.set(wait.pid, wait);
      }
    }
    if (performance.now() - startMs + stepMs > seconds * 1000) break;
    await pause(stepMs, signal);
  }
  await pause(Math.max(0, seconds * 1000 - (performance.now() - startMs)), signal);
  const after = await counters(reader);
  const longest = [...waits.values()].sort((a, b) => (b.waited_s ?? 0) - (a.waited_s ?? 0));
  const watchedS = (performance.now() - startMs) / 1000;
  return { seconds: watchedS, since, samples, waits: longest, before, after };
}

/** How much a counter rose; 0 when it was reset meanwhile. */
export const rise = (before = 0, after = 0) => Math.max(0, after - before);

/** The transactions of others while they were watched. */
export function transactions({ before, after, seconds }: Watched) {
  const commits = rise(before.commits + after.own.commits - before.own.commits, after.commits);
  // A session is counted up to a second late: its own of before the watch may come in it.
  const rollbacks = rise(before.rollbacks + after.own.rollbacks, after.rollbacks);
  return {
    ...{ commits, rollbacks, share: rollbacks / Math.max(1, commits + rollbacks) },
    perS: (commits + rollbacks) / seconds,
  };
}

/** What happened to one table while it was watched. */
export function written({ before, after, seconds }: Watched, table: string) {
  const [a, b] = [before.tables[table], after.tables[table]];
  const [inserted, updated, hot, deleted] = (["inserted", "updated", "hot", "deleted"] as const)
    .map((key) => rise(a?.[key], b?.[key]));
  return {
    rowsPerS: (inserted + updated + deleted) / seconds,
    deadPerS: (updated + deleted) / seconds,
    hotShare: updated > 0 ? hot / updated : null,
  };
}

async function counters(reader: Reader): Promise<Counters> {
  const database = await reader.row<Omit<Counters, "tables" | "claims" | "own">>(
    "pg_stat_database",
    `select xact_commit::float8 as commits, xact_rollback::float8 as rollbacks,
       deadlocks::float8 as deadlocks
     from pg_stat_database where datname = current_database()`,
  );
  const tables = await reader.row<Pick<Counters, "tables">>(
    "pg_stat_user_tables",
    `select coalesce(jsonb_object_agg(relname, jsonb_build_object('inserted', n_tup_ins,
       'updated', n_tup_upd, 'hot', n_tup_hot_upd, 'deleted', n_tup_del, 'live', n_live_tup,
       'dead', n_dead_tup)), '{}') as tables
     from pg_stat_user_tables where schemaname = ${literal(schema)}`,
  );
  const claims = await reader.row<Pick<Counters, "claims">>(
    "the claims of queues",
    `select coalesce(jsonb_object_agg(name, claims), '{}') as claims
     from "${schema}".queues where claim = 'repeatable_read'`,
  );
  return {
    ...(database ?? { commits: 0, rollbacks: 0, deadlocks: 0 }),
    own: { ...reader.own },
    tables: tables?.tables ?? {},
    claims: claims?.claims ?? {},
  };
}

const sessions = (reader: Reader) =>
  reader.row<{ active: number; waiting: number }>(
    "pg_stat_activity",
    `select count(*)::integer as active,
       (count(*) filter (where wait_event_type = 'Lock'))::integer as waiting
     from pg_stat_activity
     where datname = current_database() and state = 'active' and pid <> pg_backend_pid()
       and backend_type = 'client backend'`,
  );

/** The queues by the key of their lock, see siding.lock_queue. */
async function queueLocks(reader: Reader): Promise<Map<string, string>> {
  const rows = await reader.rows<{ key: string; name: string }>(
    "the locks of queues",
    `select hashtextextended(${literal(`"${schema}".`)} || name, 0)::text as key, name
     from "${schema}".queues limit 10000`,
  );
  return new Map(rows?.map(({ key, name }) => [key, name]));
}

interface LockRow extends Omit<Wait, "lock" | "queue"> {
  locktype: string | null;
  mode: string | null;
  relation: string | null;
  key: string;
}

/** Who waits just now, and for whom: asked for only when somebody does, as it looks at all locks. */
async function waitsNow(reader: Reader, queues: Map<string, string>): Promise<Wait[]> {
  const rows = await reader.rows<LockRow>(
    "who waits for whom",
    `with waiting as materialized (
       select a.pid, a.application_name as name, a.query, pg_blocking_pids(a.pid) as blockers
       from pg_stat_activity a
       where a.datname = current_database() and a.wait_event_type = 'Lock'
         and a.backend_type = 'client backend'
       order by a.query_start limit 20
     ),
     locks as materialized (select * from pg_locks where not granted)
     select w.pid, w.name, w.query, l.locktype, l.mode, l.relation::regclass::text as relation,
       ((l.classid::bigint << 32) | l.objid::bigint)::text as key,
       extract(epoch from clock_timestamp() - l.waitstart)::float8 as waited_s,
       (select coalesce(jsonb_agg(jsonb_build_object('pid', h.pid, 'name', h.application_name,
          'state', h.state, 'query', left(h.query, 1000))), '[]')
        from pg_stat_activity h where h.pid = any(w.blockers)) as holders
     from waiting w left join locks l on l.pid = w.pid`,
  );
  return (rows ?? []).map(({ locktype, mode, relation, key, ...wait }) => {
    const queue = locktype === "advisory" ? queues.get(key) ?? null : null;
    return {
      ...wait,
      query: shortened(wait.query),
      lock: lockInWords(locktype, mode, relation, queue),
      queue,
      holders: wait.holders.map((it) => ({ ...it, query: shortened(it.query) })),
    };
  });
}

function lockInWords(
  type: string | null,
  mode: string | null,
  relation: string | null,
  queue: string | null,
): string {
  if (queue !== null) return `the lock of queue "${queue}"`;
  if (type === "advisory") return "an advisory lock";
  if (type === "transactionid") return "a row that another transaction changed";
  if (type === "tuple") return `a row of ${relation}`;
  if (type === "relation") return `table ${relation} (${mode})`;
  return type === null ? "a lock" : `a lock (${type})`;
}
