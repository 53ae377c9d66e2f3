/** Connections: how many are left, and whether a pooler on the way carries prepared statements. */
import { codeOf, connect, describe, pause } from "../../db.ts";
import { type Finding, number, percent, type Reader } from "./reader.ts";

/** From here on it is near the limit; from there on the next deploy will not get its own. */
const NEAR = 0.8;
const FULL = 0.95;

export interface Places {
  of: string;
  used: number;
  places: number;
}

/** The server's connections first, then the limits of this database and role, where they have one. */
export async function places(reader: Reader): Promise<Places[]> {
  // A role with few rights sees of others' sessions only whose they are: so a client is who has a user.
  return await reader.rows<Places>(
    "connections and their limits",
    `with client as materialized (
       select datname, usename from pg_stat_activity
       where datid is not null and usesysid is not null
         and coalesce(backend_type, 'client backend') = 'client backend'
     )
     select 'the server' as of, (select count(*)::integer from client) as used,
       current_setting('max_connections')::integer
       - current_setting('superuser_reserved_connections')::integer
       - coalesce(current_setting('reserved_connections', true)::integer, 0) as places
     union all
     select 'database "' || datname || '"', (select count(*)::integer from client c where c.datname = d.datname),
       datconnlimit
     from pg_database d where datname = current_database() and datconnlimit >= 0
     union all
     select 'role "' || rolname || '"', (select count(*)::integer from client c where c.usename = r.rolname),
       rolconnlimit
     from pg_roles r where rolname = current_user and rolconnlimit >= 0`,
  ) ?? [];
}

/** Connections near a limit. */
export function connections(all: Places[]): Finding[] {
  return all.filter(({ used, places }) => used >= NEAR * places).map(({ of, used, places }) => ({
    code: "connections",
    severity: used >= FULL * places ? "critical" : "warning",
    title: `${number(used)} of the ${number(places)} connections of ${of} are taken ` +
      `(${percent(used / Math.max(1, places))})`,
    figures: { of, used, places },
    remedy:
      "Put PgBouncer in transaction mode before the workers and the site, or raise the limit; fewer " +
      "processes with more --concurrency need fewer connections, too.",
  }));
}

/** What was found of the way to the database. */
export interface Pooler {
  /** Whether transactions of one connection went to several servers. */
  pooled: boolean;
  /** The code with which a prepared statement failed; null: it is carried. */
  failed: string | null;
}

const ROUNDS = 3;
const PROBE_MS = 3000;

/**
 * Tries a prepared statement on the URL's own connection, several times. Meanwhile another connection
 * has a transaction open, so that a pooler must send the next one to another server: the statement is
 * not there (26000, PgBouncer before 1.21), or its name is somebody else's (42P05).
 */
export async function probe(url: string): Promise<Pooler> {
  const one = connect(url, { max: 1, name: "siding doctor" });
  const two = connect(url, { max: 1, name: "siding doctor", prepare: false });
  const pids = new Set<number>();
  const stop = new AbortController();
  const ask = async () => {
    const query = one`select pg_backend_pid() as pid, ${"probe"}::text as probe`;
    pids.add((await query)[0].pid);
    // The driver prepares once more, by itself, and only fails when that one is not there either.
    const { retried } = query as unknown as { retried?: Error | null };
    if (retried) throw retried;
  };
  const tried = (async (): Promise<Pooler> => {
    try {
      for (let round = 0; round < ROUNDS; round++) {
        await ask();
        await two.unsafe("begin; select 1").simple();
        await ask();
        await two.unsafe("commit").simple();
      }
      return { pooled: pids.size > 1, failed: null };
    } catch (error) {
      const code = codeOf(error);
      if (/^(26000|42P05)$/.test(code)) return { pooled: true, failed: code };
      throw error;
    }
  })();
  // A pool of one server makes the second connection wait for the first: then there is nothing to tell.
  const late = pause(PROBE_MS, stop.signal).then(() => null);
  try {
    const told = await Promise.race([tried, late]);
    if (told) return told;
    tried.catch(() => {});
    throw new Error(`no answer within ${PROBE_MS} ms: the pool may have no second server to give`);
  } finally {
    stop.abort();
    await Promise.all([one, two].map((sql) => sql.end({ timeout: 0 })));
  }
}

/** {@linkcode probe}, noted as not read when it fails otherwise. */
export const probed = (reader: Reader, url: string) =>
  probe(url).catch((error) => {
    reader.skip("whether a pooler carries prepared statements", describe(error));
    return null;
  });

/** A pooler that breaks prepared statements. */
export function pooler(found: Pooler | null): Finding[] {
  if (!found?.failed) return [];
  return [{
    code: "pooler_breaks_prepared",
    severity: "critical",
    title:
      `A pooler is on the way that does not carry prepared statements: one failed with ${found.failed}`,
    figures: { code: found.failed },
    remedy:
      "Set SIDING_PREPARE=false (--prepare=false) for the workers, the site and the controller; or " +
      "PgBouncer 1.21 or newer with max_prepared_statements above 0.",
  }];
}
