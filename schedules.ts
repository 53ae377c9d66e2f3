/**
 * Schedules: jobs that come again, at the ticks of a cron expression in a time zone.
 *
 * The workers' leader asks the database what is due, works out the tick after it (the one thing that
 * SQL cannot do), and has one function enqueue the job, record the tick and go on to the next, all or
 * none. It may die, freeze or have a rival between any two lines: the database takes a step only from
 * the version that it was worked out from, and never a second job of one tick.
 *
 * All times are the database's; this machine's clocks are not asked.
 */
import { Cron } from "croner";
import {
  codeOf,
  cut,
  describe,
  isDisconnect,
  schema,
  type Sql,
  unstorable,
  type Via,
} from "./db.ts";
import { checkPayload, type Kinds } from "./jobs/kind.ts";
import { list, names, Refused, type Status } from "./queue.ts";

/** A tick is missed when nobody enqueued it for so long: more than a leader's death takes. */
export const MISSED_S = 300;
/** A tick that was refused is tried again after so long. */
const AGAIN_S = 30;
/** Schedules that one statement returns, and how often it is asked in a row. */
const BATCH = 100;
const MAX_BATCHES = 20;
/** Schedules that are told of, the first by name. */
export const MAX_SCHEDULES = 200;

/** What a schedule is. Only the expression and the kind are needed. */
export interface ScheduleSettings {
  /** Minute, hour, day of the month, month, day of the week; or `@hourly`, `@daily`, … */
  cron: string;
  /** The zone whose clocks the expression is read on, such as Europe/Berlin; UTC if not given. */
  time_zone?: string;
  kind: string;
  /** Any JSON value; `{}` if not given. */
  payload?: unknown;
  queue?: string;
  owner?: string;
  /** Larger is sooner; 0 by default. */
  priority?: number;
  /** While an unfinished job of the kind has it, a tick brings no second one. */
  unique_key?: string;
  /** What becomes of ticks that were missed: one job for all of them, or none. `run_once` by default. */
  missed?: "run_once" | "skip";
}

/** A schedule as people look at it. */
export interface Schedule extends Required<Omit<ScheduleSettings, "owner" | "unique_key">> {
  name: string;
  owner: string | null;
  unique_key: string | null;
  enabled: boolean;
  /** The first tick that is not done with; null until the leader has worked it out, and when paused. */
  next_at: Date | null;
  /** Why that tick was not enqueued, or could not be worked out; and when that was last tried. */
  error: string | null;
  error_at: Date | null;
  /** The last tick that is done with: what became of it, and its job as it is now. */
  last_at: Date | null;
  last_outcome: "enqueued" | "skipped" | null;
  last_job: string | null;
  /** Null when the job was deleted after its retention. */
  last_status: Status | null;
  /** The database's time as it was read. */
  now: Date;
}

/**
 * The ticks after an instant. A time of the day that a change of the clocks leaves out is the moment
 * after the gap, and one that comes twice is the first of the two; what comes at intervals (`*`, or a
 * step) goes on in both hours, and has no tick in a gap.
 *
 * @param afterMs milliseconds since 1970
 * @throws Refused when the expression or the time zone is none, or there is no such tick
 */
export function ticksAfter(cron: string, timeZone: string, afterMs: number, most: number): Date[] {
  const expression = cron.trim();
  const wrong = (why: string) => new Refused(`cron is "${cron}": ${why}`, "SD422");
  if (!/^(@[a-z]+|\S+( +\S+){4})$/i.test(expression)) {
    throw wrong("it must have five fields, minute, hour, day, month and day of the week");
  }
  // Without a function it starts no timer. Several hours, too, are times of the day, and no interval.
  const options = { timezone: timeZone, mode: "5-part", fixedTimeRule: "no-wildcard" } as const;
  let ticks: Date[];
  try {
    if (timeZone === "") throw new RangeError(); // Cron would take this machine's
    ticks = new Cron(expression, options).nextRuns(most, new Date(afterMs));
  } catch (error) {
    if (!isTimeZone(timeZone)) {
      const rule = "it must be one such as Europe/Berlin or UTC";
      throw new Refused(`time_zone is "${timeZone}": ${rule}`, "SD422");
    }
    throw wrong((error as Error).message.replace(/^Cron\w*: /, ""));
  }
  if (ticks.length === 0) throw wrong("there is no such time");
  return ticks;
}

/** Said last of what is wrong: to make a format takes as long as to find a tick. */
function isTimeZone(timeZone: string): boolean {
  try {
    new Intl.DateTimeFormat("en", { timeZone });
    return true;
  } catch {
    return false;
  }
}

/** The next ticks of a schedule, as of when it was read; none where it is paused, or they cannot be told. */
export function nextTicks(it: Schedule, most: number): Date[] {
  const { cron, time_zone, enabled, next_at, now } = it;
  if (!enabled) return [];
  try {
    if (next_at === null) return ticksAfter(cron, time_zone, now.getTime(), most);
    return [next_at, ...ticksAfter(cron, time_zone, next_at.getTime(), most - 1)];
  } catch {
    return []; // its error is shown
  }
}

/** Instants as the clocks of a time zone show them: `2026-03-29 03:00`. */
export function onClocksOf(timeZone: string, instants: readonly Date[]): string[] {
  const options = { dateStyle: "short", timeStyle: "short", timeZone } as const;
  const format = instants.length > 0 ? new Intl.DateTimeFormat("sv", options) : null;
  return instants.map((at) => format!.format(at));
}

/**
 * Makes a schedule, or makes the one of this name what is given; what is not given is as by default.
 * A paused one stays paused. Where cron and time zone are as before, no tick is lost: to be called
 * at each start.
 *
 * The kind and the payload are for the caller to check (checkPayload); the leader does so at each tick.
 *
 * @throws Refused when a value is malformed
 */
export async function setSchedule(sql: Sql, name: string, it: ScheduleSettings): Promise<void> {
  ticksAfter(it.cron, it.time_zone ?? "UTC", 0, 1);
  const payload = it.payload === undefined ? {} : it.payload;
  const mistake = unstorable(payload, "payload");
  if (mistake) throw new Refused(mistake, "SD422");
  try {
    await sql`
      insert into ${sql(schema)}.schedules as s
        (name, cron, time_zone, missed, kind, payload, queue, owner, priority, unique_key)
      values (${name}, ${it.cron}, ${it.time_zone ?? "UTC"}, ${it.missed ?? "run_once"}, ${it.kind},
        ${JSON.stringify(payload)}::text::jsonb, ${it.queue ?? "default"}, ${it.owner ?? null},
        ${it.priority ?? 0}, ${it.unique_key ?? null})
      on conflict (name) do update set (cron, time_zone, missed, kind, payload, queue, owner, priority,
        unique_key) = (excluded.cron, excluded.time_zone, excluded.missed, excluded.kind,
        excluded.payload, excluded.queue, excluded.owner, excluded.priority, excluded.unique_key)`;
  } catch (error) {
    if (!/^(22|23)/.test(codeOf(error))) throw error;
    throw new Refused(`schedule "${name}": ${(error as Error).message}`, "SD422");
  }
}

/** Removes a schedule; its jobs stay. @throws Refused when there is none of this name */
export async function removeSchedule(sql: Sql, name: string): Promise<void> {
  foundOne(
    name,
    await sql`delete from ${sql(schema)}.schedules where name = ${name} returning name`,
  );
}

/**
 * Pauses a schedule, or has it go on. The ticks of the time between are none that were missed.
 *
 * @throws Refused when there is none of this name
 */
export async function enableSchedule(sql: Sql, name: string, enabled: boolean): Promise<void> {
  foundOne(
    name,
    await sql`
      update ${sql(schema)}.schedules set enabled = ${enabled} where name = ${name} returning name`,
  );
}

function foundOne(name: string, rows: readonly unknown[]): void {
  if (rows.length === 0) throw new Refused(`there is no schedule "${name}"`, "SD404");
}

/** The first 200 schedules by name; or the one of this name, if there is one. */
export const listSchedules = (sql: Sql, name: string | null = null): Promise<Schedule[]> =>
  list(sql<Schedule[]>`
    select s.name, s.cron, s.time_zone, s.missed, s.kind, s.payload, s.queue, s.owner, s.priority,
      s.unique_key, s.enabled, s.next_at, s.error, s.error_at, now() as now,
      t.tick_at as last_at, t.outcome as last_outcome, t.job_id::text as last_job, j.status as last_status
    from ${sql(schema)}.schedules s
    left join lateral (
      select * from ${sql(schema)}.schedule_ticks t where t.schedule = s.name
      order by t.tick_at desc limit 1) t on true
    left join ${sql(schema)}.jobs j on j.id = t.job_id
    where ${name}::text is null or s.name = ${name}
    order by s.name limit ${MAX_SCHEDULES}`);

/** A schedule that is not kept. */
export interface Failing {
  name: string;
  error: string | null;
  /** How long its next tick has been due, or nobody has worked that out. */
  late_s: number;
}

/** The schedules that cannot be kept, or are not kept by anybody: the first 20 by name. */
export const failingSchedules = (sql: Sql): Promise<Failing[]> =>
  list(sql<Failing[]>`
    select name, error, extract(epoch from now() - coalesce(next_at, planned_from))::float8 as late_s
    from ${sql(schema)}.schedules s
    where enabled and (error is not null
      or coalesce(next_at, planned_from) < now() - ${MISSED_S} * interval '1 second')
    order by s.name limit 20`);

/** A schedule with something to do. Milliseconds since 1970, by the database's clock. */
export interface Due {
  name: string;
  version: string;
  cron: string;
  time_zone: string;
  missed: "run_once" | "skip";
  kind: string;
  payload: unknown;
  /** Whether the caller's code has the kind; false: nobody's has. */
  known: boolean;
  planned_from_ms: number;
  next_ms: number | null;
  now_ms: number;
}

/** What to do about one: see siding.step_schedule. */
export interface Step {
  step: "run" | "skip" | "plan" | "fail";
  next: Date | null;
  reason: string | null;
}

/** What became of a schedule's step. */
export interface Stepped {
  name: string;
  outcome: "enqueued" | "skipped" | "planned" | "failed" | "stale";
  job_id: string | null;
  error: string | null;
}

/**
 * Enqueues what is due by the schedules, and goes on to their next ticks. For the workers' leader; by
 * two at once it does no harm.
 *
 * @param kinds the caller's
 * @param silentS seconds after which a worker that was not heard of is silent
 */
export async function keepSchedules(db: Via, kinds: Kinds, silentS: number): Promise<Stepped[]> {
  const all: Stepped[] = [];
  for (let batch = 0; batch < MAX_BATCHES; batch++) {
    const due = await dueSchedules(db, kinds, silentS);
    const stepped: Stepped[] = [];
    for (const it of due) stepped.push(await takeStep(db, it, stepOf(it, kinds)));
    all.push(...stepped);
    if (!stepped.some(({ outcome }) => outcome !== "stale" && outcome !== "failed")) break;
  }
  return all;
}

/** The schedules with something to do: see siding.due_schedules. */
export const dueSchedules = (db: Via, kinds: Kinds, silentS: number): Promise<Due[]> =>
  db.run((sql) =>
    list(sql<Due[]>`
      select * from ${sql(schema)}.due_schedules(
        ${names(Object.keys(kinds))}::text[], ${silentS}, ${AGAIN_S}, ${BATCH})`)
  );

/** Milliseconds until the next tick of any schedule; Infinity: there is none. */
export async function nextTickMs(db: Via): Promise<number> {
  const [{ ms }] = await db.run((sql) =>
    sql<{ ms: number | null }[]>`
      select extract(epoch from min(next_at) - now())::float8 * 1000 as ms
      from ${sql(schema)}.schedules where enabled and error is null`
  );
  return ms ?? Infinity;
}

/** What to do about a schedule. Whatever is wrong with it is its own step's, and stops no other. */
export function stepOf(it: Due, kinds: Kinds): Step {
  const { cron, time_zone, next_ms, now_ms } = it;
  const go = (step: Step["step"], afterMs: number): Step => {
    return { step, next: ticksAfter(cron, time_zone, afterMs, 1)[0], reason: null };
  };
  try {
    if (next_ms === null) return go("plan", it.planned_from_ms);
    const isMissed = now_ms - next_ms > MISSED_S * 1000;
    if (isMissed && it.missed === "skip") return go("skip", now_ms - MISSED_S * 1000);
    if (!it.known) throw new Error(`unknown kind "${it.kind}": no worker's code has it`);
    checkPayload(kinds, it.kind, it.payload);
    return go("run", isMissed ? now_ms : next_ms);
  } catch (error) {
    return { step: "fail", next: null, reason: cut(describe(error), 2000) };
  }
}

/** Has the database take a step. Only an outage throws: what else fails is this schedule's alone. */
export async function takeStep(db: Via, it: Due, step: Step): Promise<Stepped> {
  const { name, version, now_ms } = it;
  try {
    const [stepped] = await db.run((sql) =>
      sql<Omit<Stepped, "name">[]>`
        select outcome, job_id::text, error from ${sql(schema)}.step_schedule(${name}, ${version},
          ${now_ms}, ${step.step}, ${step.next?.getTime() ?? null}, ${step.reason})`
    );
    return { name, ...stepped };
  } catch (error) {
    if (isDisconnect(error)) throw error;
    return { name, outcome: "failed", job_id: null, error: describe(error) };
  }
}
