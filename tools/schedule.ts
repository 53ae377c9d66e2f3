#!/usr/bin/env -S deno run -A
/**
 * Schedules: jobs that come again at the ticks of a cron expression, enqueued by the workers' leader.
 *
 *     deno task schedule set nightly --cron '0 2 * * *' --zone Europe/Berlin --kind report --payload '{"days": 1}'
 *     deno task schedule list                # what there is, with the next ticks and what is wrong
 *     deno task schedule pause nightly       # and resume: the ticks between are not made up for
 *     deno task schedule remove nightly      # its jobs stay
 *
 * `set` makes the schedule what the flags say; a flag that is not given is as by default.
 *
 * Exit codes: 0 done; 1 refused, or failed; 2 usage; 3 the database could not be reached.
 */
import * as config from "../config.ts";
import { checkSchema, Database } from "../db.ts";
import { checkPayload, loadKinds, PayloadError } from "../jobs/kind.ts";
import { Refused } from "../queue.ts";
import {
  enableSchedule,
  listSchedules,
  MAX_SCHEDULES,
  nextTicks,
  onClocksOf,
  removeSchedule,
  type Schedule,
  type ScheduleSettings,
  setSchedule,
  ticksAfter,
} from "../schedules.ts";

/** Ticks that `list` shows of what is to come. */
const NEXT = 3;

const program = {
  name: "schedule",
  summary: "Makes, lists, pauses and removes schedules: jobs that come again.",
  usage: "set NAME | list | pause NAME | resume NAME | remove NAME [flags]",
  example: "deno task schedule set nightly --cron '0 2 * * *' --zone Europe/Berlin --kind report",
  exits: { 1: "refused, or failed" },
};
const { databaseUrl, prepare, statementLimitMs, jobs } = config.settings;
const text = (help: string) => config.flag(config.text(help));
/** The flags of `set` alone. */
const ofSet = {
  cron: text("set: minute, hour, day of the month, month, day of the week, such as '0 2 * * *'"),
  zone: text("set: the zone whose clocks it goes by, such as Europe/Berlin; UTC if not given"),
  kind: text("set: the kind of its jobs"),
  payload: text("set: their payload, a JSON value; {} if not given"),
  queue: text("set: their queue; default if not given"),
  owner: text("set: whose jobs they are"),
  priority: config.flag({
    ...config.int(0, -1_000_000, 1_000_000, "set: larger is sooner; 0 if not given"),
    fallback: undefined,
  } as config.Setting<number | undefined>),
  key: text("set: their unique key: a tick while such a job is unfinished brings no second one"),
  missed: config.flag({
    ...config.text("set: run_once or skip, for ticks nobody was there for; run_once if not given"),
    parse: (value) => {
      if (value === "run_once" || value === "skip") return value;
      throw new Error();
    },
    rule: "it must be run_once or skip",
  } as config.Setting<"run_once" | "skip" | undefined>),
};
const spec = {
  ...{ databaseUrl, prepare, statementLimitMs, jobs },
  ...ofSet,
  json: config.flag(config.yes("print one JSON object instead of text")),
};
type Settings = ReturnType<typeof config.configuration<typeof spec>>;

const commands = ["set", "list", "pause", "resume", "remove"];

export async function main(args: string[]): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const [command = "", name = ""] = settings.rest;
  check(settings);
  const url = config.requireDatabase(settings.databaseUrl);
  const schedule = command === "set" ? await scheduleOf(settings) : null;
  const options = { max: 1, name: "siding schedule", prepare: settings.prepare };
  const db = new Database(url, options, settings.statementLimitMs);
  try {
    await db.run(checkSchema);
    if (schedule) await db.run((sql) => setSchedule(sql, name, schedule));
    if (command === "remove") await db.run((sql) => removeSchedule(sql, name));
    if (command === "pause" || command === "resume") {
      await db.run((sql) => enableSchedule(sql, name, command === "resume"));
    }
    const items = await db.run((sql) => listSchedules(sql, name || null));
    if (settings.json) console.log(JSON.stringify({ items: items.map(shown) }));
    else if (command === "remove") console.log(`schedule ${name} is removed`);
    else if (items.length > 0) console.log(items.map(lines).join("\n"));
    else console.log("there is no schedule");
    if (command === "list" && items.length === MAX_SCHEDULES) {
      console.error(`these are the first ${MAX_SCHEDULES} by name`);
    }
    return 0;
  } finally {
    await db.close();
  }
}

/** @throws config.UsageError that names the command, the value and the rule */
function check(settings: Settings): void {
  const [command, ...values] = settings.rest;
  if (!commands.includes(command)) {
    const given = command ? `there is no command "${command}"` : "a command is missing";
    throw new config.UsageError(`${given}: there are ${commands.join(", ")}`);
  }
  const wants = command === "list" ? 0 : 1;
  if (values.length < wants) throw new config.UsageError(`${command} wants the schedule's NAME`);
  if (values.length > wants) {
    throw new config.UsageError(`"${values[wants]}" is not wanted by ${command}`);
  }
  if (wants && !config.NAME.test(values[0])) {
    throw new config.UsageError(
      `NAME is "${values[0]}": it must be of [a-z0-9_.-], at most 63 long`,
    );
  }
  if (command === "set") return;
  for (const flag of Object.keys(ofSet) as (keyof typeof ofSet)[]) {
    if (settings[flag] === undefined) continue;
    throw new config.UsageError(`${command} takes no ${config.flagOf(flag)}`);
  }
}

/** The schedule of the flags. @throws config.UsageError that names the flag, the value and the rule */
async function scheduleOf(settings: Settings): Promise<ScheduleSettings> {
  const { cron, zone, kind, queue, owner, priority, key, missed } = settings;
  if (cron === undefined) throw new config.UsageError("set wants --cron, such as '0 2 * * *'");
  if (kind === undefined) throw new config.UsageError("set wants --kind, the kind of its jobs");
  let payload: unknown;
  try {
    payload = JSON.parse(settings.payload ?? "{}");
  } catch (error) {
    throw new config.UsageError(`--payload is not JSON: ${(error as Error).message}`);
  }
  const kinds = await loadKinds(settings.jobs);
  try {
    ticksAfter(cron, zone ?? "UTC", 0, 1);
    checkPayload(kinds, kind, payload);
  } catch (error) {
    if (!(error instanceof PayloadError || error instanceof Refused)) throw error;
    throw new config.UsageError(error.message);
  }
  return { cron, time_zone: zone, kind, payload, queue, owner, priority, unique_key: key, missed };
}

/** A schedule for programs. */
function shown(it: Schedule) {
  const { now: _, ...rest } = it;
  return { ...rest, next: nextTicks(it, NEXT) };
}

/** A schedule for people: times by its own clocks. */
function lines(it: Schedule): string {
  const state = !it.enabled ? ", paused" : it.error === null ? "" : ", IN ERROR";
  const next = onClocksOf(it.time_zone, nextTicks(it, NEXT)).join(", ");
  const last = it.last_at === null
    ? ""
    : `${it.last_at.toISOString()}, ${it.last_job === null ? "skipped" : `job ${it.last_job}`}` +
      (it.last_status ? ` ${it.last_status}` : "");
  return [
    `${it.name}: ${it.kind} at ${it.cron} ${it.time_zone}${state}`,
    ...(next ? [`  next ${next}`] : []),
    ...(last ? [`  last ${last}`] : []),
    ...(it.error ? [`  error ${it.error}`] : []),
  ].join("\n");
}

if (import.meta.main) await config.runMain("schedule", main);
