/**
 * How many workers to ask for. Pure: what was seen, what was remembered and the settings in, the
 * wanted count and its reason out, the clock too. controller.ts acts on it, tools/simulate.ts tries
 * it on traces.
 *
 * Jobs wait: one worker a job, at least one more than wanted now, at most `max`, a step each 90 s.
 * Nothing to do for 600 s: straight to `min`. Else the count is held. The platform chooses which
 * worker stops, so the count is lowered only when a look sees nothing queued, running or busy.
 */

/** Jobs of a kind in a queue, as of a look; see the view siding.counts. */
export interface Work {
  queue: string;
  kind: string;
  paused: boolean;
  /** The queue's limit across all of its kinds and pools. */
  max_running: number | null;
  /** What its rate limit lets start now; null: it has none. */
  rate_room: number | null;
  /** Whether a worker of this pool that reports claims them. */
  served: boolean;
  queued: number;
  /** In all pools, as the queue's limit counts them; and by workers of this pool. */
  running: number;
  running_here: number;
  /** How long the first of the queued has been due; null when none is. */
  oldest_wait_s: number | null;
  /** Of late; null when unknown. Only a target for the wait needs it. */
  mean_run_s: number | null;
}

/** The workers of the pool that reported within 45 s. */
export interface Workers {
  reporting: number;
  /** Those that say they run something. */
  busy: number;
  /** Jobs at a time, of the one with the least; 1 when none reports. */
  concurrency: number;
}

/** What the platform says of the workers' service. */
export interface Platform {
  configured: number;
  /** Instances that run, and those that crashed and are there no more, or again and again. */
  running: number;
  crashed: number;
}

/** What one look saw. A part that failed is null: nothing is known of it, and never a zero. */
export interface Look {
  /** By the database's clock, in ms since 1970. */
  at_ms: number;
  /** One statement, so that jobs and workers are of one instant. */
  queue: { work: readonly Work[]; workers: Workers } | null;
  platform: Platform | null;
}

/** What is carried from look to look, in the look's row. Instants are in ms since 1970. */
export interface Memory {
  /** Of the look that left it. */
  at_ms: number;
  wanted: number;
  stepped_up_at_ms: number | null;
  /** The first look of the idle run that is not broken yet. */
  idle_since_ms: number | null;
  /** The most that the platform has not refused, and when it refused more. */
  ceiling: number | null;
  refused_at_ms: number | null;
  /** Since when other than the wanted count run; fewer workers report than run. */
  off_since_ms: number | null;
  silent_since_ms: number | null;
  alarms: Alarm[];
}

export interface Policy {
  min: number;
  max: number;
  /** Seconds between two steps up. */
  stepS: number;
  /** Seconds with nothing to do after which the pool shrinks. */
  idleS: number;
  /** Seconds between two looks after which nobody knows what was between them. */
  gapS: number;
  /** Seconds that a written count, or a worker's first report, may take before it is an alarm. */
  arriveS: number;
  /** Seconds after which a ceiling is tried again: plans change. */
  ceilingS: number;
  /** Connections that the database has for the pool; null: enough. */
  connections: number | null;
  /** What one worker opens: two for jobs, one for files, one for heartbeats. */
  connectionsPerWorker: number;
  /** Seconds within which the oldest waiting job is to start; null: a worker for each job at once. */
  waitTargetS: number | null;
}

export const defaults: Policy = {
  min: 1,
  max: 4,
  stepS: 90,
  idleS: 600,
  gapS: 120,
  arriveS: 120,
  ceilingS: 3600,
  connections: null,
  connectionsPerWorker: 4,
  waitTargetS: null,
};

/**
 * What is unwell. `crashed`: replicas crash. `silent`: replicas run and do not report. `unreached`:
 * not the wanted count runs. `ceiling`: the platform refuses so many. `budget`: the connections do
 * not suffice for the least.
 */
export type Alarm = "crashed" | "silent" | "unreached" | "ceiling" | "budget";

/**
 * What was decided. `up`, `down`; `reassert`: the count was changed from outside; the others hold
 * it: `unknown` part of the look failed, `idle` not for long enough, `running` none waits, `step` too
 * soon after the last, `most` no more may be asked for, `missing` those asked for are not all there,
 * `in_time` the waiting jobs start within the target.
 */
export type Code =
  | "up"
  | "down"
  | "reassert"
  | "unknown"
  | "idle"
  | "running"
  | "step"
  | "most"
  | "missing"
  | "in_time";

export interface Decision {
  /** Null: Railway was never seen, so that there is no count to hold. */
  wanted: number | null;
  /** Whether the platform is to be told. */
  write: boolean;
  code: Code;
  /** In words, with the numbers. */
  reason: string;
  alarms: Alarm[];
  /** For the next look; null as long as `wanted` is. */
  memory: Memory | null;
}

/** Decides one look. `memory` is what the last one left; null at the first. */
export function decide(look: Look, memory: Memory | null, policy: Policy): Decision {
  const before = recall(memory, look, policy);
  const { queue, platform, at_ms } = look;
  if (!before || !queue || !platform) return hold(look, before);

  const work = claimable(queue);
  const { idle } = work;
  const idleSinceMs = idle ? before.idle_since_ms ?? at_ms : null;
  const limits = limitsOf(before, policy);
  // A count above the limits that was lowered from outside is not put back above them.
  let held = Math.min(before.wanted, Math.max(limits.most, platform.configured));
  held = Math.max(held, limits.least);
  // One that was raised from outside is an excess: it waits for idle, as any other.
  if (!idle) held = Math.max(held, platform.configured);

  const choice = choose({
    ...{ work, limits, held, policy, workers: queue.workers },
    idleS: idleSinceMs === null ? 0 : (at_ms - idleSinceMs) / 1000,
    sinceStepS: before.stepped_up_at_ms === null
      ? Infinity
      : (at_ms - before.stepped_up_at_ms) / 1000,
  });
  const { wanted } = choice;
  const write = wanted !== platform.configured;
  const after: Memory = {
    ...before,
    ...{ at_ms, wanted, idle_since_ms: idleSinceMs },
    stepped_up_at_ms: choice.code === "up" ? at_ms : before.stepped_up_at_ms,
    off_since_ms: platform.running === wanted
      ? null
      : wanted === before.wanted
      ? before.off_since_ms ?? at_ms
      : at_ms,
    silent_since_ms: queue.workers.reporting < platform.running
      ? before.silent_since_ms ?? at_ms
      : null,
  };
  after.alarms = alarmsOf(after, platform, limits, policy);
  const outcome = write && choice.code !== "up" && choice.code !== "down"
    ? {
      code: "reassert" as const,
      reason: `the count is ${platform.configured}, and not ${wanted} as it is to be: set again`,
    }
    : { code: choice.code, reason: choice.reason };
  return { wanted, write, ...outcome, alarms: after.alarms, memory: after };
}

/**
 * The memory after the platform refused the count that was asked for: `configured` stays in force,
 * and the count becomes a ceiling.
 *
 * @param most what the platform says it would take, if it does
 */
export function refused(memory: Memory, configured: number, most = memory.wanted - 1): Memory {
  const ceiling = Math.max(1, Math.min(most, memory.wanted - 1));
  return { ...memory, wanted: configured, ceiling, refused_at_ms: memory.at_ms };
}

/** What is still true of what the last look left. */
function recall(memory: Memory | null, look: Look, policy: Policy): Memory | null {
  const { at_ms, platform } = look;
  if (memory === null) {
    return platform && {
      ...{ at_ms, wanted: platform.configured, stepped_up_at_ms: null, idle_since_ms: null },
      ...{ ceiling: null, refused_at_ms: null, off_since_ms: null, silent_since_ms: null },
      alarms: [],
    };
  }
  // A database that failed over may have an earlier clock: what lies ahead would bind for ever.
  const past = (ms: number | null) => ms === null ? null : Math.min(ms, at_ms);
  const unseen = at_ms - memory.at_ms > policy.gapS * 1000;
  const refusedAtMs = past(memory.refused_at_ms);
  const stands = refusedAtMs !== null && at_ms - refusedAtMs < policy.ceilingS * 1000;
  return {
    ...memory,
    stepped_up_at_ms: past(memory.stepped_up_at_ms),
    idle_since_ms: unseen ? null : past(memory.idle_since_ms),
    ceiling: stands ? memory.ceiling : null,
    refused_at_ms: stands ? refusedAtMs : null,
    off_since_ms: past(memory.off_since_ms),
    silent_since_ms: past(memory.silent_since_ms),
  };
}

/**
 * A look of which a part is missing holds the count. It breaks the idle run when it did not see the
 * queue, because a job may have come and gone: the pool stays up a while longer, which costs little.
 * When only Railway was not seen, the run is what the queue says. Alarms stand until a look sees
 * that they are over.
 */
function hold(look: Look, before: Memory | null): Decision {
  const { queue, platform, at_ms } = look;
  const missing = !queue && !platform
    ? "neither the queue nor Railway was"
    : queue
    ? "Railway was not"
    : "the queue was not";
  const held = before ? `${counted(before.wanted, "worker")} held` : "no count known yet";
  let after = before;
  if (before) {
    const idle = queue !== null && claimable(queue).idle;
    after = { ...before, at_ms, idle_since_ms: idle ? before.idle_since_ms ?? at_ms : null };
  }
  return {
    ...{ wanted: before?.wanted ?? null, write: false, code: "unknown", memory: after },
    reason: `${missing} seen: ${held}`,
    alarms: before?.alarms ?? [],
  };
}

interface Claimable {
  /** Jobs that a worker could claim now. */
  waiting: number;
  running: number;
  /** Jobs of which nobody knows whether they could be claimed, since no worker reports. */
  unsure: number;
  /** Jobs that wait and cannot be claimed. */
  stuck: number;
  /** None of these, but stuck ones, and no worker is busy. */
  idle: boolean;
  oldestWaitS: number;
  /** Seconds of work in line, and about left of what runs; null: a kind's run time is not known. */
  leftS: number | null;
}

/**
 * What of the line counts: not what is paused, beyond its queue's limits, or of a kind that no
 * worker serves. What runs counts always.
 */
function claimable({ work: rows, workers }: NonNullable<Look["queue"]>): Claimable {
  const room = new Map<string, number>();
  for (const row of rows) {
    const limit = room.get(row.queue) ?? (row.paused ? 0 : row.max_running ?? Infinity);
    room.set(row.queue, limit - row.running);
  }
  for (const { queue, rate_room } of rows) {
    room.set(queue, Math.min(room.get(queue)!, rate_room ?? Infinity));
  }
  const all = { waiting: 0, running: 0, unsure: 0, stuck: 0, oldestWaitS: 0 };
  let leftS: number | null = 0;
  for (const row of rows) {
    const left = Math.max(0, room.get(row.queue)!);
    const open = row.served || workers.reporting === 0 ? Math.min(row.queued, left) : 0;
    room.set(row.queue, left - open);
    const waiting = row.served ? open : 0;
    all.waiting += waiting;
    all.unsure += open - waiting;
    all.stuck += row.queued - open;
    all.running += row.running_here;
    if (waiting > 0) all.oldestWaitS = Math.max(all.oldestWaitS, row.oldest_wait_s ?? 0);
    // A job that runs is half done, on average.
    const jobs: number = waiting + row.running_here / 2;
    if (jobs > 0) {
      leftS = leftS === null || row.mean_run_s === null ? null : leftS + jobs * row.mean_run_s;
    }
  }
  const idle = all.waiting + all.unsure + all.running + workers.busy === 0;
  return { ...all, idle, leftS };
}

interface Limits {
  least: number;
  most: number;
  /** What `most` comes from. */
  name: string;
  ceiling: boolean;
  budget: boolean;
}

function limitsOf({ ceiling }: Memory, policy: Policy): Limits {
  const budget = policy.connections === null
    ? Infinity
    : Math.floor(policy.connections / policy.connectionsPerWorker);
  const most = Math.max(1, Math.min(policy.max, ceiling ?? Infinity, budget));
  return {
    least: Math.min(policy.min, most),
    most,
    name: most === policy.max
      ? "MAX"
      : budget < (ceiling ?? Infinity)
      ? "the connection budget"
      : "what Railway takes",
    ceiling: ceiling !== null && ceiling < policy.max,
    budget: budget < policy.min,
  };
}

interface Situation {
  work: Claimable;
  workers: Workers;
  idleS: number;
  sinceStepS: number;
  limits: Limits;
  /** The count that is wanted before this look changes it. */
  held: number;
  policy: Policy;
}
type Choice = Pick<Decision, "code" | "reason"> & { wanted: number };

function choose(now: Situation): Choice {
  const { work, workers, idleS, limits, held, policy } = now;
  if (work.waiting > 0) return climb(now);
  const wanted = held;
  if (!work.idle) {
    if (work.unsure > 0) {
      const reason = `${waitAndRun(work)}, but no worker reports: ${counted(held, "worker")} held`;
      return { wanted, code: "missing", reason };
    }
    const reason = work.running > 0
      ? `${waitAndRun(work)}: ${counted(held, "worker")} held`
      : `${counted(workers.busy, "worker is", "workers are")} busy: ${
        counted(held, "worker")
      } held`;
    return { wanted, code: "running", reason };
  }
  const so = `nothing to do for ${Math.round(idleS)} s${aside(work)}`;
  if (held === limits.least) {
    return { wanted, code: "idle", reason: `${so}: ${counted(held, "worker")}, the least` };
  }
  if (idleS < policy.idleS) {
    return {
      ...{ wanted, code: "idle" },
      reason: `${so}: ${counted(held, "worker")} held until it is ${policy.idleS} s`,
    };
  }
  const reason = `${so}: from ${counted(held, "worker")} to ${limits.least}`;
  return { wanted: limits.least, code: "down", reason };
}

/** Jobs wait: whether there are to be more workers, and how many. */
function climb({ work, workers, limits, held, policy, sinceStepS }: Situation): Choice {
  const so = waitAndRun(work);
  const here = counted(held, "worker");
  const stay = (code: Code, why: string) => ({ wanted: held, code, reason: `${so}: ${why}` });

  let needed = Math.ceil((work.waiting + work.running) / workers.concurrency);
  const inTime = enoughFor(policy.waitTargetS, work, workers.concurrency);
  // Replicas that crash or are late leave jobs waiting, and would do so however many there are.
  const allHere = workers.reporting >= held;
  if (inTime !== null) needed = Math.min(needed, inTime);
  else if (allHere) needed = Math.max(needed, held + 1);

  if (needed <= held && inTime !== null) {
    return stay("in_time", `${here} will start them within ${policy.waitTargetS} s`);
  }
  if (needed <= held) {
    const there = counted(workers.reporting, "reports", "report");
    return stay("missing", `${here} would do, of which ${there}`);
  }
  if (held >= limits.most) {
    return stay(
      "most",
      held > limits.most
        ? `${here} held, more than ${limits.most} (${limits.name}), until idle`
        : `${here} held, which is the most (${limits.name})`,
    );
  }
  if (sinceStepS < policy.stepS) {
    const ago = `${Math.round(sinceStepS)} s after the last step up`;
    return stay("step", `${here} held, ${ago}; the next is due after ${policy.stepS} s`);
  }
  const wanted = Math.min(needed, limits.most);
  return { wanted, code: "up", reason: `${so}: from ${here} to ${wanted}` };
}

/**
 * How many workers start all that waits within the rest of the oldest job's time, so that each that
 * becomes the oldest starts in time as well. Null without a target, when run times are not known, or when
 * the oldest is late already: then it is one worker a job.
 */
function enoughFor(targetS: number | null, work: Claimable, concurrency: number): number | null {
  if (targetS === null || work.leftS === null) return null;
  const restS = targetS - work.oldestWaitS;
  return restS <= 0 ? null : Math.max(1, Math.ceil(work.leftS / restS / concurrency));
}

function alarmsOf(after: Memory, platform: Platform, limits: Limits, policy: Policy): Alarm[] {
  const late = (sinceMs: number | null) =>
    sinceMs !== null && after.at_ms - sinceMs >= policy.arriveS * 1000;
  const raised: Record<Alarm, boolean> = {
    crashed: platform.crashed > 0,
    silent: late(after.silent_since_ms),
    unreached: late(after.off_since_ms),
    ceiling: limits.ceiling,
    budget: limits.budget,
  };
  return (Object.keys(raised) as Alarm[]).filter((alarm) => raised[alarm]);
}

const counted = (n: number, one: string, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
const waitAndRun = (work: Claimable) =>
  `${counted(work.waiting + work.unsure, "job waits", "jobs wait")} and ${
    counted(work.running, "runs", "run")
  }${aside(work)}`;
const aside = ({ stuck }: Claimable) =>
  stuck > 0 ? ` (${counted(stuck, "more waits", "more wait")} that no worker may claim)` : "";
