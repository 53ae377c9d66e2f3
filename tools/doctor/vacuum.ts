/** What keeps dead rows: who holds xmin, an autovacuum that is off or behind, and what they have cost. */
import { schema } from "../../db.ts";
import { duration, type Finding, literal, megabytes, number } from "./reader.ts";
import { percent, type Reader, shortened } from "./reader.ts";
import { type Watched, written } from "./watch.ts";

/** What has no time of its own, a slot or a standby, holds xmin once so many transactions came after. */
const HELD_XIDS = 10_000;

interface Holder {
  kind: "transaction" | "prepared_transaction" | "replication_slot" | "standby";
  name: string | null;
  pid: number | null;
  held_s: number | null;
  xids: number;
  state: string | null;
  query: string | null;
}

const KINDS: Record<Holder["kind"], [words: string, remedy: (it: Holder) => string]> = {
  transaction: [
    "an open transaction",
    ({ pid }) =>
      `End it: select pg_terminate_backend(${pid}); and bound such: ` +
      "idle_in_transaction_session_timeout, and reports on a standby.",
  ],
  prepared_transaction: [
    "a prepared transaction",
    ({ name }) =>
      `Nobody ends it but by hand: commit prepared or rollback prepared ${literal(name ?? "")}; ` +
      "in its own database.",
  ],
  replication_slot: [
    "a replication slot",
    ({ name }) =>
      `Bring its reader back, or drop it: select pg_drop_replication_slot(${literal(name ?? "")});`,
  ],
  standby: [
    "a standby's feedback",
    () => "End the long query on the standby, or set hot_standby_feedback = off there.",
  ],
};

/** An xmin held, by whom: dead rows stay, and claims wade through those of every job since. */
export async function heldXmin(
  reader: Reader,
  watched: Watched,
  heldS: number,
): Promise<Finding[]> {
  // A vacuum does not hold up the others. Slots and standbys hold all databases.
  const rows = await reader.rows<Holder>(
    "who holds xmin",
    `select 'transaction' as kind, application_name as name, pid,
       extract(epoch from now() - xact_start)::float8 as held_s,
       greatest(age(backend_xmin), age(backend_xid)) as xids, state, query
     from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid()
       and backend_type not in ('walsender', 'autovacuum worker') and coalesce(backend_xmin, backend_xid) is not null
       and query !~* '^\\s*vacuum' and xact_start < now() - ${heldS} * interval '1 second'
     union all
     select 'prepared_transaction', gid, null, extract(epoch from now() - prepared)::float8,
       age(transaction), null, null
     from pg_prepared_xacts
     where database = current_database() and prepared < now() - ${heldS} * interval '1 second'
     union all
     select 'replication_slot', slot_name, active_pid, null, age(xmin),
       case when active then 'active' else 'inactive' end, null
     from pg_replication_slots where age(xmin) > ${HELD_XIDS}
     union all
     select 'standby', r.application_name, r.pid, null, age(r.backend_xmin), r.state, null
     from pg_stat_replication r
     where age(r.backend_xmin) > ${HELD_XIDS}
     order by xids desc limit 20`,
  );
  const dead = watched.after.tables.jobs?.dead ?? 0;
  return (rows ?? []).map((holder) => {
    const { kind, name, pid, held_s, xids, state, query } = holder;
    const [words, remedy] = KINDS[kind];
    const since = held_s === null ? `${number(xids)} transactions` : duration(held_s);
    return {
      code: "xmin_held",
      severity: held_s !== null && held_s < 10 * heldS ? "warning" : "critical",
      title: `xmin is held for ${since} by ${words}, ` +
        [name && `"${name}"`, pid && `process ${pid}`, state].filter(Boolean).join(", ") +
        ": no dead row since then can be removed",
      figures: {
        holder: kind,
        ...{ name, pid, state, query: shortened(query) },
        held_s: held_s === null ? null : Math.round(held_s),
        transactions_since: xids,
        dead_rows_of_jobs: dead,
      },
      remedy: remedy(holder),
    };
  });
}

/** Below it dead rows do not matter, whatever the threshold is. */
const DEAD_ROWS = 1000;
/** An autovacuum comes by once a naptime; so many of them later it is behind. */
const NAPTIMES = 5;

interface TableRow {
  name: string;
  live: number;
  dead: number;
  off: boolean;
  threshold: number;
  naptime_s: number;
  vacuumed_s: number | null;
  known_s: number;
  quiet_s: number | null;
  under_way: boolean;
  server_off: string | null;
}

/** Autovacuum behind: off, or not come although there was enough for it to do. */
export async function autovacuum(reader: Reader, watched: Watched): Promise<Finding[]> {
  // quiet_s: since when no job ended, so how long a table that is not written now has been as it is.
  const option = (name: string) =>
    `(select option_value::float8 from pg_options_to_table(c.reloptions) where option_name = '${name}')`;
  const setting = (name: string) => `current_setting('${name}', true)`;
  const rows = await reader.rows<TableRow>(
    "autovacuum of the tables",
    `select s.relname as name, s.n_live_tup::float8 as live, s.n_dead_tup::float8 as dead,
       coalesce((select not option_value::boolean from pg_options_to_table(c.reloptions)
                 where option_name = 'autovacuum_enabled'), false) as off,
       least(
         coalesce(${option("autovacuum_vacuum_threshold")},
                  ${setting("autovacuum_vacuum_threshold")}::float8)
         + coalesce(${option("autovacuum_vacuum_scale_factor")},
                    ${
      setting("autovacuum_vacuum_scale_factor")
    }::float8) * greatest(c.reltuples, 0),
         nullif(coalesce(${option("autovacuum_vacuum_max_threshold")},
                         ${setting("autovacuum_vacuum_max_threshold")}::float8), -1)) as threshold,
       (select p.setting::float8 from pg_settings p where p.name = 'autovacuum_naptime') as naptime_s,
       extract(epoch from now() - greatest(s.last_autovacuum, s.last_vacuum))::float8 as vacuumed_s,
       extract(epoch from now() - greatest(pg_postmaster_start_time(), d.stats_reset))::float8 as known_s,
       (select extract(epoch from now() - max(j.finished_at))::float8 from "${schema}".jobs j
        where j.status in ('done', 'failed', 'cancelled')) as quiet_s,
       exists (select from pg_stat_progress_vacuum v where v.relid = s.relid) as under_way,
       case when ${setting("autovacuum")} = 'off' then 'autovacuum'
         when ${setting("track_counts")} = 'off' then 'track_counts' end as server_off
     from pg_stat_user_tables s
     join pg_class c on c.oid = s.relid
     join pg_stat_database d on d.datname = current_database()
     where s.schemaname = ${literal(schema)} order by s.n_dead_tup desc`,
  );
  if (!rows) return [];
  const serverOff = rows[0]?.server_off;
  if (serverOff) {
    const figures = { setting: serverOff, dead_rows: sum(rows.map(({ dead }) => dead)) };
    return [{
      code: "autovacuum_off",
      severity: "critical",
      title: `No autovacuum on this server: ${serverOff} is off`,
      figures,
      remedy: `alter system set ${serverOff} = on; select pg_reload_conf();`,
    }];
  }
  return rows.flatMap((row) => judge(row, watched));
}

const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);

function judge(row: TableRow, watched: Watched): Finding[] {
  const { name, live, dead, threshold, naptime_s, vacuumed_s, known_s, quiet_s } = row;
  const figures = {
    table: name,
    live_rows: live,
    dead_rows: dead,
    threshold: Math.round(threshold),
    last_vacuum_s: vacuumed_s === null ? null : Math.round(vacuumed_s),
  };
  if (row.off) {
    return [{
      code: "autovacuum_off",
      severity: dead > Math.max(threshold, DEAD_ROWS) ? "critical" : "warning",
      title: `Autovacuum is off for ${schema}.${name}, which has ${number(dead)} dead rows`,
      figures,
      remedy:
        `alter table "${schema}".${name} reset (autovacuum_enabled); vacuum analyze "${schema}".${name};`,
    }];
  }
  // For how long there has been enough to do: by the rate of now, or since all is quiet.
  const { deadPerS } = written(watched, name);
  const aboveS = deadPerS > 1 ? (dead - threshold) / deadPerS : quiet_s ?? 0;
  const limitS = NAPTIMES * naptime_s;
  const lastS = vacuumed_s ?? known_s;
  if (dead < DEAD_ROWS || dead <= threshold || aboveS < limitS || lastS < limitS || row.under_way) {
    return [];
  }
  const last = vacuumed_s === null ? "it never came" : `it came last ${duration(vacuumed_s)} ago`;
  return [{
    code: "autovacuum_behind",
    severity: dead > live ? "critical" : "warning",
    title: `Autovacuum is behind: ${schema}.${name} has ${number(dead)} dead rows, ` +
      `${number(threshold)} are enough for it to come, and ${last}`,
    figures,
    remedy:
      `vacuum analyze "${schema}".${name}; now. Then see what kept it away: a lock of the table that ` +
      "is held for long, all autovacuum_max_workers busy elsewhere, or a cost limit that makes it " +
      "slow (autovacuum_vacuum_cost_limit).",
  }];
}

/** Less does not matter. And so much of a table or index may be empty: room is used again. */
const BLOAT_BYTES = 32 * 1_048_576;
const EMPTY_SHARE = 0.8;

interface SizeRow {
  name: string;
  kind: "table" | "index";
  bytes: number;
  rows: number;
  width: number | null;
}

/** Bloat of the jobs and their indexes, as the last vacuum or analyze saw them. */
export async function bloat(reader: Reader): Promise<Finding[]> {
  // Widths are of the planner's statistics: null where there are none, or none that the role may
  // see. An index entry has a header of 12 bytes with its line pointer, and pages are 70% full.
  const rows = await reader.rows<SizeRow>(
    "sizes of the jobs and their indexes",
    `select c.relname as name, case c.relkind when 'r' then 'table' else 'index' end as kind,
       c.relpages * current_setting('block_size')::float8 as bytes, c.reltuples::float8 as rows,
       case when c.relkind = 'r' then
         (select sum(s.avg_width)::float8 + 28 from pg_stats s
          where s.schemaname = ${literal(schema)} and s.tablename = 'jobs')
       else
         (select (sum(coalesce(s.avg_width, 8)) + 12)::float8 / 0.7
          from pg_attribute a left join pg_stats s on s.schemaname = ${literal(schema)}
            and s.tablename = 'jobs' and s.attname = a.attname
          where a.attrelid = c.oid) end as width
     from pg_class c
     where c.oid = to_regclass(${literal(`"${schema}".jobs`)})
       or c.oid in (select indexrelid from pg_index
                    where indrelid = to_regclass(${literal(`"${schema}".jobs`)}))
     order by c.relkind desc, 1`,
  );
  return (rows ?? []).flatMap(({ name, kind, bytes, rows, width }) => {
    if (width === null || rows < 0 || bytes < BLOAT_BYTES) return [];
    const empty = 1 - rows * width / bytes;
    if (empty < EMPTY_SHARE) return [];
    return [{
      code: "bloat",
      severity: "warning" as const,
      title: `${kind === "table" ? "Table" : "Index"} ${schema}.${name} is ${megabytes(bytes)} ` +
        `large, of which about ${percent(empty)} is empty`,
      figures: { [kind]: name, bytes, rows, empty_share: Number(empty.toFixed(3)) },
      remedy: kind === "index"
        ? `reindex index concurrently "${schema}".${name};`
        : "The room is used again as jobs come. To give it back to the disk, when nobody works: " +
          `vacuum full "${schema}".${name}; (locks it), or pg_repack.`,
    }];
  });
}
