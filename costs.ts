/**
 * What replicas cost at Railway's prices: of a simulated pool, and of a real one by its controllers'
 * looks, each standing until the next one. One that did not see the platform, and dry runs, do not
 * count.
 */
import { decimal, flag } from "./config.ts";
import { schema, type Sql } from "./db.ts";
import { defaults } from "./policy.ts";

/** Railway's prices of a month, which is charged by the minute as if it had 30 days. */
const VCPU_DOLLARS = 20;
const GB_DOLLARS = 10;
export const MONTH_S = 30 * 86_400;

/** What a replica uses, which is what Railway charges: while it runs jobs, and while it waits. */
export interface Prices {
  vcpu: number;
  gb: number;
  idleVcpu: number;
  idleGb: number;
}

/** The flags of it. */
export const usage = {
  vcpu: flag(decimal(2, 64, "vCPUs that a replica uses while it runs jobs")),
  gb: flag(decimal(1.5, 512, "GB that it uses then")),
  // Measured: a worker that waits uses 0.006 of a core and 78 MB.
  idleVcpu: flag(decimal(0.01, 64, "vCPUs that it uses while it waits")),
  idleGb: flag(decimal(0.1, 512, "GB that it uses then")),
};

/** What the use of so many replica-seconds costs, of which `busyS` ran jobs. */
export function dollarsOf(replicaS: number, busyS: number, prices: Prices): number {
  const month = (vcpu: number, gb: number) => vcpu * VCPU_DOLLARS + gb * GB_DOLLARS;
  const busy = month(prices.vcpu, prices.gb) * busyS;
  const idle = month(prices.idleVcpu, prices.idleGb) * (replicaS - busyS);
  return (busy + idle) / MONTH_S;
}

/** Seconds of a pool, as {@linkcode poolSeconds} has them. */
export interface PoolSeconds {
  pool: string;
  /** The part of the time that the looks cover. */
  seen_s: number;
  replica_s: number;
  busy_s: number;
}

/**
 * A query for the {@linkcode PoolSeconds} of the last `sinceS` seconds.
 *
 * @param mostLooks the newest looks that it reads; null: all of that time
 */
export const poolSeconds = (sql: Sql, sinceS: number, mostLooks: number | null = null) =>
  sql`
    select pool, sum(s) as seen_s, sum(s * running) as replica_s, sum(s * least(busy, running)) as busy_s
    from (
      select pool, running, busy, greatest(0, extract(epoch from
        least(next_at, at + ${defaults.gapS} * interval '1 second', now())
          - greatest(at, now() - ${sinceS} * interval '1 second')))::float8 as s
      from (
        select pool, at, (seen #>> '{platform,running}')::float8 as running,
          -- Not known: taken for busy.
          coalesce((seen #>> '{queue,workers,busy}')::float8, 'infinity') as busy,
          lead(at) over (partition by pool order by at, number) as next_at
        from (
          select pool, number, at, seen from ${sql(schema)}.looks
          where at > now() - ${sinceS + defaults.gapS} * interval '1 second'
          order by at desc limit ${mostLooks}
        ) newest
        -- Those of dry runs are the looks of nobody who acts, at the same replicas.
        where pool not like '%/dry-run' and seen #>> '{platform,running}' is not null
      ) looks
    ) spans
    group by pool having sum(s) > 0`;
