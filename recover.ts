#!/usr/bin/env -S deno run --quiet --no-prompt -P=recover
/**
 * Recovery by hand or by cron, and the review desk.
 *
 *     deno task recover                              # one pass of what the workers do all the time
 *     deno task recover list --json                  # the jobs in review
 *     deno task recover resume 7 --request req_123   # it was sent, and this is its id: go on from there
 *     deno task recover requeue 7                    # send it, with the key it always had
 *     deno task recover fail 7 --reason "refunded"
 *     deno task recover retry 7 8                    # failed jobs again, as new jobs
 *     deno task recover retry --kind band --error "timed out" --since 2026-11-30T08:00:00Z
 *
 * A pass puts due jobs in line, takes back what silent workers left, asks services for the requests
 * of jobs in review, and removes what is past its time. Before it takes anything back it watches the
 * database for three heartbeats: after an outage all leases have run out, and those who still run
 * their jobs must have had the time to say so.
 *
 * Exit codes: 0 done; 1 refused, or failed; 2 usage; 3 the database could not be reached.
 */
import * as config from "./config.ts";
import { checkSchema, Database, isTransient, pause } from "./db.ts";
import * as desk from "./desk.ts";
import { loadKinds } from "./jobs/kind.ts";
import { lookUpReviews } from "./jobs/paid.ts";
import { clocks, sinceMs } from "./lease.ts";
import * as queue from "./queue.ts";
import { foldCredits, promoteDue, takeBack, tidyUp } from "./upkeep.ts";

/** Rows at a time, and how many times at the most, of everything that comes in batches. */
const BATCH = 1000;
const MAX_BATCHES = 1000;
/** A service that was asked for a request so long ago is asked again: this pass asks once. */
const ASKED_AGAIN_S = 10;
/** Unanswered questions after which the database counts as away: ten minutes of them, about. */
const MAX_BREAKS = 200;

const program = {
  name: "recover",
  summary: "Takes back what silent workers left, once, or says what becomes of jobs in review.",
  usage: "[list | resume ID | requeue ID | fail ID | retry [ID …]] [flags]",
  example: 'deno task recover retry --kind band --error "timed out"',
  exits: { 1: "refused, or failed" },
};
const { databaseUrl, prepare, statementLimitMs, heartbeatMs, maxCrashes } = config.settings;
const { retentionS, fileGraceS, unknownKindS, jobs, logLevel } = config.settings;
const spec = {
  ...{ databaseUrl, prepare, statementLimitMs, heartbeatMs, maxCrashes },
  ...{ retentionS, fileGraceS, unknownKindS, jobs, logLevel },
  request: config.flag(config.text("resume: the request's id at the paid service")),
  reason: config.flag(config.text("fail: why")),
  kind: config.flag(config.text("retry: jobs of this kind")),
  error: config.flag(config.text("retry: jobs with this in their error")),
  since: config.flag(config.instant("retry: jobs that failed from this instant on")),
  until: config.flag(config.instant("retry: jobs that failed before this instant")),
  most: config.flag(config.int(1000, 1, 1_000_000, "retry, list: so many jobs at the most")),
  payAgain: config.flag(config.yes("retry: send, and pay for, paid requests again")),
  json: config.flag(config.yes("print one JSON object instead of text")),
};
type Settings = ReturnType<typeof config.configuration<typeof spec>>;

/** The flags that each command takes besides those of all. */
const commands: Record<string, { flags: string[]; ids: [least: number, most: number] }> = {
  pass: { flags: [], ids: [0, 0] },
  list: { flags: ["most"], ids: [0, 0] },
  resume: { flags: ["request"], ids: [1, 1] },
  requeue: { flags: [], ids: [1, 1] },
  fail: { flags: ["reason"], ids: [1, 1] },
  retry: { flags: ["kind", "error", "since", "until", "most", "payAgain"], ids: [0, 1000] },
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const url = config.requireDatabase(settings.databaseUrl);
  const [command = "pass", ...ids] = settings.rest;
  check(command, ids, settings);
  await config.setUpLog(settings.logLevel);
  const options = { max: 2, name: "siding recover", prepare: settings.prepare };
  const db = new Database(url, options, settings.statementLimitMs);
  try {
    await db.run(checkSchema);
    const done = command === "pass"
      ? await pass(db, settings, signal)
      : await decide(db, command, ids, settings);
    console.log(settings.json ? JSON.stringify(done.json) : done.text.join("\n"));
    return 0;
  } finally {
    await db.close();
  }
}

/** @throws config.UsageError that names the command, the value and the rule */
function check(command: string, ids: string[], settings: Settings): void {
  if (!Object.hasOwn(commands, command)) {
    throw new config.UsageError(
      `there is no command "${command}": there are list, resume, requeue, fail and retry`,
    );
  }
  const { flags, ids: [least, most] } = commands[command];
  const odd = ids.find((id) => !/^[1-9]\d{0,18}$/.test(id));
  if (odd !== undefined) throw new config.UsageError(`"${odd}" is not the id of a job`);
  if (ids.length < least) throw new config.UsageError(`${command} wants the ID of a job`);
  if (ids.length > most) throw new config.UsageError(`${command} takes ${most} ids at the most`);
  for (const { flags: others } of Object.values(commands)) {
    for (const flag of others) {
      const given = settings[flag as keyof Settings];
      if (!flags.includes(flag) && given !== spec[flag as keyof typeof spec].fallback) {
        throw new config.UsageError(`${command} takes no ${config.flagOf(flag)}`);
      }
    }
  }
  if (command === "resume" && !settings.request) {
    throw new config.UsageError("resume wants --request, the request's id at the paid service");
  }
  if (command === "fail" && !settings.reason) {
    throw new config.UsageError("fail wants --reason");
  }
  const { kind, error, since, until } = settings;
  if (command === "retry" && ids.length === 0 && !(kind || error || since || until)) {
    throw new config.UsageError("retry wants ids of jobs, or --kind, --error, --since or --until");
  }
}

/** What a command did, for people and for programs. */
interface Done {
  text: string[];
  json: unknown;
}

/** The review desk. */
async function decide(
  db: Database,
  command: string,
  ids: string[],
  settings: Settings,
): Promise<Done> {
  const [id] = ids;
  const { request, reason } = settings;
  switch (command) {
    case "list":
      return list(await db.run((sql) => desk.reviews(sql, settings.most)));
    case "resume":
      await db.run((sql) => desk.resume(sql, id, request!));
      return { text: [`job ${id} goes on from request ${request}`], json: { id, request } };
    case "requeue":
      await db.run((sql) => desk.requeue(sql, id));
      return { text: [`job ${id} is back in line, to be sent`], json: { id } };
    case "fail":
      await db.run((sql) => desk.failReview(sql, id, reason!));
      return { text: [`job ${id} has failed: ${reason}`], json: { id, reason } };
    default:
      return await retry(db, ids, settings);
  }
}

function list(items: desk.Review[]): Done {
  const text = items.map((job) =>
    `job ${job.id} ${job.kind}${job.owner ? ` of ${job.owner}` : ""}: ${job.error}\n` +
    `  key ${job.request_key}, may have been sent at ${job.sent_at.toISOString()}` +
    (job.looked_up_at ? `\n  asked at ${job.looked_up_at.toISOString()}: ${job.look_up}` : "")
  );
  return { text: items.length ? text : ["no job is in review"], json: { items } };
}

/** In batches, each all or nothing, so that many need no long transaction. */
async function retry(db: Database, ids: string[], settings: Settings): Promise<Done> {
  const { kind, error, since, until, payAgain, most } = settings;
  const filter = { ids: ids.length ? ids : undefined, kind, error, since, until, payAgain };
  const items: desk.Retried[] = [];
  for (let batch = 0; batch < MAX_BATCHES && items.length < most; batch++) {
    const size = ids.length || Math.min(BATCH, most - items.length);
    const some = await db.run((sql) => desk.retry(sql, filter, size));
    items.push(...some);
    if (ids.length || some.length < size) break;
  }
  const text = items.map(({ id, new_id, created }) =>
    `job ${id} is tried again as job ${new_id}${created ? "" : ", which has its unique key"}`
  );
  return { text: [...text, `${items.length} jobs are tried again`], json: { items } };
}

async function pass(db: Database, settings: Settings, signal: AbortSignal): Promise<Done> {
  const kinds = await loadKinds(settings.jobs);
  const promoted = await promoteDue(db);
  const items = await recover(db, settings, signal);
  const resumed: string[] = [];
  for (let batch = 0; batch < MAX_BATCHES; batch++) {
    const { found, more } = await lookUpReviews(db, kinds, ASKED_AGAIN_S);
    resumed.push(...found);
    if (!more) break;
  }
  const silentS = 3 * settings.heartbeatMs / 1000;
  const { unknown, removed } = await tidyUp(db, { ...settings, silentS });
  await foldCredits(db);
  const inReview = (await db.run((sql) => desk.reviews(sql, BATCH))).length;
  return {
    text: [
      `${promoted} jobs that were due are in line`,
      ...items.map(({ id, kind, status }) => `job ${id} ${kind} was left by its worker: ${status}`),
      `${items.length} jobs were taken back from silent workers`,
      ...resumed.map((id) => `job ${id}: its service has its request, from which it goes on`),
      ...unknown.map(({ id, kind }) => `job ${id} failed: no worker knows its kind ${kind}`),
      `removed ${removed.jobs} jobs, ${removed.files} files and ${removed.processes} worker rows`,
      inReview ? `${inReview} jobs are in review: deno task recover list` : "no job is in review",
    ],
    json: { promoted, items, resumed, unknown, removed, in_review: inReview },
  };
}

/** Takes back what silent workers left, once the database was watched without a break. */
async function recover(
  db: Database,
  settings: Settings,
  signal: AbortSignal,
): Promise<queue.Recovered[]> {
  if (await db.run((sql) => queue.expired(sql)) === 0) return [];
  await watch(db, settings.heartbeatMs, signal);
  return await takeBack(db, settings.maxCrashes);
}

/** Resolves when the database has answered for three heartbeats without a break. */
async function watch(db: Database, heartbeatMs: number, signal: AbortSignal): Promise<void> {
  const say = (line: string) => Deno.stderr.writeSync(new TextEncoder().encode(`${line}\n`));
  const wantedMs = 3 * heartbeatMs;
  say(`the leases of some jobs have run out: watching the database for ${wantedMs / 1000} s`);
  let [fromMs, last] = [performance.now(), clocks()];
  for (let breaks = 0; last.monotonicMs - fromMs < wantedMs;) {
    await pause(heartbeatMs / 5, signal);
    signal.throwIfAborted();
    try {
      await db.run((sql) => sql`select 1`, heartbeatMs);
    } catch (error) {
      if (!isTransient(error) || ++breaks === MAX_BREAKS) throw error;
      if (fromMs < Infinity) say("the database was away for a moment: watching anew");
      fromMs = Infinity;
      continue;
    }
    // A turn takes a heartbeat at the most. This process was frozen, or the machine slept: a break too.
    if (sinceMs(last) > 1.5 * heartbeatMs) fromMs = Infinity;
    last = clocks();
    fromMs = Math.min(fromMs, last.monotonicMs);
  }
}

if (import.meta.main) await config.runMain("recover", main);
