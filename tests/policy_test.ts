/** The scaling decision: each rule by numbers, and what holds in thousands of random histories. */
import { assert, assertEquals } from "@std/assert";
import { random } from "../dev/chaos/faults.ts";
import {
  decide,
  type Decision,
  defaults,
  type Look,
  type Memory,
  type Platform,
  type Policy,
  refused,
  type Work,
} from "../policy.ts";

const T0 = Date.UTC(2026, 9, 7, 5, 17);

interface Seen {
  waiting?: number;
  running?: number;
  busy?: number;
  reporting?: number;
  concurrency?: number;
  configured?: number;
  up?: number;
  crashed?: number;
  oldestS?: number;
  meanS?: number | null;
  rows?: Partial<Work>[];
}

const work = (row: Partial<Work>): Work => ({
  ...{ queue: "default", kind: "transcribe", paused: false, served: true },
  ...{ max_running: null, rate_room: null },
  ...{ queued: 0, running: 0, running_here: row.running ?? 0 },
  ...{ oldest_wait_s: null, mean_run_s: null },
  ...row,
});

/** A look at `atS` seconds; what is not given is as a healthy pool of the configured count has it. */
function lookAt(atS: number, seen: Seen = {}): Look {
  const { waiting = 0, running = 0, configured = 1, up = configured } = seen;
  const { busy = running, reporting = up, concurrency = 1, crashed = 0 } = seen;
  const row = { queued: waiting, running, oldest_wait_s: seen.oldestS, mean_run_s: seen.meanS };
  return {
    at_ms: T0 + atS * 1000,
    queue: {
      work: (seen.rows ?? [row]).map(work),
      workers: { reporting, busy, concurrency },
    },
    platform: { configured, running: up, crashed },
  };
}

/** Decides one look after another; each sees the count that the last one wanted, unless it says. */
function history(policy: Policy = defaults) {
  let last: Decision | undefined;
  return {
    look(atS: number, seen: Seen = {}, failed: { queue?: null; platform?: null } = {}): Decision {
      const configured = last?.wanted ?? 1;
      last = decide(
        { ...lookAt(atS, { configured, ...seen }), ...failed },
        last?.memory ?? null,
        policy,
      );
      return last;
    },
    refuse(configured: number, most?: number) {
      last = { ...last!, wanted: configured, memory: refused(last!.memory!, configured, most) };
    },
  };
}

/** What is wanted, whether that is written, the code. */
const gist = ({ wanted, write, code }: Decision) => [wanted, write, code];
const settings = (changes: Partial<Policy>): Policy => ({ ...defaults, ...changes });

Deno.test("jobs wait: one worker a job, up to the most", () => {
  const first = decide(lookAt(0, { waiting: 2, running: 1 }), null, defaults);
  assertEquals(gist(first), [3, true, "up"]);
  assertEquals(first.reason, "2 jobs wait and 1 runs: from 1 worker to 3");
  const burst = decide(lookAt(0, { waiting: 40 }), null, defaults);
  assertEquals(gist(burst), [4, true, "up"]);
  assertEquals(burst.reason, "40 jobs wait and 0 run: from 1 worker to 4");
});

Deno.test("jobs wait: at least one worker more than wanted now, though there are fewer jobs", () => {
  const it = decide(lookAt(0, { waiting: 1, running: 1, configured: 3 }), null, defaults);
  assertEquals(gist(it), [4, true, "up"]);
  assertEquals(it.reason, "1 job waits and 1 runs: from 3 workers to 4");
});

Deno.test("jobs are divided by how many a worker runs at a time", () => {
  const seen = { waiting: 20, running: 10, concurrency: 10, busy: 1 };
  assertEquals(gist(decide(lookAt(0, seen), null, defaults)), [3, true, "up"]);
  assertEquals(decide(lookAt(0, { ...seen, waiting: 21 }), null, defaults).wanted, 4);
});

Deno.test("a step up comes no sooner than 90 s after the last", () => {
  const { look } = history();
  assertEquals(gist(look(0, { waiting: 1, running: 1 })), [2, true, "up"]);
  const soon = look(60, { waiting: 2, running: 2 });
  assertEquals(gist(soon), [2, false, "step"]);
  assertEquals(
    soon.reason,
    "2 jobs wait and 2 run: 2 workers held, 60 s after the last step up; the next is due after 90 s",
  );
  assertEquals(gist(look(89.999, { waiting: 2, running: 2 })), [2, false, "step"]);
  assertEquals(gist(look(90, { waiting: 2, running: 2 })), [4, true, "up"]);
  const full = look(200, { waiting: 9, running: 4 });
  assertEquals(gist(full), [4, false, "most"]);
  assertEquals(full.reason, "9 jobs wait and 4 run: 4 workers held, which is the most (MAX)");
});

Deno.test("nothing to do for 600 s, from the first look of the unbroken run: straight to the least", () => {
  const { look } = history();
  look(0, { waiting: 9, configured: 4, up: 4 });
  assertEquals(gist(look(30, { running: 2 })), [4, false, "running"]);
  assertEquals(look(60).reason, "nothing to do for 0 s: 4 workers held until it is 600 s");
  for (let atS = 90; atS < 660; atS += 30) assertEquals(gist(look(atS)), [4, false, "idle"]);
  const down = look(660);
  assertEquals(gist(down), [1, true, "down"]);
  assertEquals(down.reason, "nothing to do for 600 s: from 4 workers to 1");
  assertEquals(gist(look(690)), [1, false, "idle"]);
  assertEquals(look(720).reason, "nothing to do for 660 s: 1 worker, the least");
});

Deno.test("a job in between begins the idle run anew, and so does a busy worker", () => {
  for (const seen of [{ running: 1 }, { waiting: 1, reporting: 3 }, { busy: 1 }]) {
    const { look } = history(settings({ gapS: 10_000 }));
    look(0, { configured: 4 });
    look(599, seen);
    assertEquals(look(600).wanted, 4);
    assertEquals(look(1199).wanted, 4);
    assertEquals(look(1200).wanted, 1);
  }
});

Deno.test("a busy worker without a job that runs holds the count, and the reason says so", () => {
  const { code, reason } = decide(lookAt(0, { busy: 1, configured: 2 }), null, defaults);
  assertEquals([code, reason], ["running", "1 worker is busy: 2 workers held"]);
});

Deno.test("a paused queue, jobs beyond max_running or a rate limit and kinds that nobody serves do not count", () => {
  const rows = [
    { queue: "stopped", paused: true, queued: 7 },
    { queue: "limited", max_running: 2, queued: 5, running: 2, running_here: 0 },
    { queue: "slow", rate_room: 0, queued: 2 },
    { kind: "unknown", served: false, queued: 1 },
  ];
  const { look } = history();
  const idle = look(0, { rows, configured: 4 });
  assertEquals(gist(idle), [4, false, "idle"]);
  assertEquals(
    idle.reason,
    "nothing to do for 0 s (15 more wait that no worker may claim): 4 workers held until it is 600 s",
  );
  for (let atS = 30; atS < 600; atS += 30) look(atS, { rows });
  assertEquals(gist(look(600, { rows })), [1, true, "down"]);
});

Deno.test("up to max_running jobs of a limited queue count, across its kinds", () => {
  const limited = { queue: "limited", max_running: 3, oldest_wait_s: 5 };
  const rows = [
    { ...limited, kind: "a", queued: 5, running: 1 },
    { ...limited, kind: "b", queued: 5, running: 0 },
  ];
  const it = decide(lookAt(0, { rows }), null, defaults);
  assertEquals(gist(it), [3, true, "up"]);
  assertEquals(
    it.reason,
    "2 jobs wait and 1 runs (8 more wait that no worker may claim): from 1 worker to 3",
  );
});

Deno.test("what runs holds the count, in a paused queue and of a kind that nobody serves as well", () => {
  for (const row of [{ paused: true }, { served: false }, { max_running: 1 }]) {
    const { look } = history(settings({ gapS: 10_000 }));
    look(0, { configured: 4 });
    const it = look(700, { rows: [{ ...row, running: 1 }], busy: 0 });
    assertEquals(gist(it), [4, false, "running"]);
  }
  // What runs in another pool is not this one's.
  const rows = [{ running: 3, running_here: 0 }];
  assertEquals(decide(lookAt(0, { rows }), null, defaults).code, "idle");
});

Deno.test("a count changed from outside is set again at once, and the 90 s are apart from that", () => {
  const { look } = history();
  look(0, { waiting: 3, running: 1 });
  const reset = look(30, { waiting: 3, running: 1, configured: 1 });
  assertEquals(gist(reset), [4, true, "reassert"]);
  assertEquals(reset.reason, "the count is 1, and not 4 as it is to be: set again");
  assertEquals(gist(look(60, { running: 1, configured: 1 })), [4, true, "reassert"]);
  assertEquals(gist(look(90, { running: 1 })), [4, false, "running"]);
});

Deno.test("a count raised from outside goes down again when all is quiet, and else is held until idle", () => {
  const quiet = history();
  quiet.look(0);
  assertEquals(gist(quiet.look(30, { configured: 6 })), [1, true, "reassert"]);

  const busy = history();
  busy.look(0);
  assertEquals(gist(busy.look(30, { configured: 6, running: 1 })), [6, false, "running"]);
  const held = busy.look(60, { waiting: 9, running: 6 });
  assertEquals(gist(held), [6, false, "most"]);
  assertEquals(
    held.reason,
    "9 jobs wait and 6 run: 6 workers held, more than 4 (MAX), until idle",
  );
  for (let atS = 90; atS < 690; atS += 30) assertEquals(busy.look(atS).wanted, 6);
  assertEquals(gist(busy.look(690)), [1, true, "down"]);
});

Deno.test("an excess that was lowered from outside is not set again above the most", () => {
  const { look } = history();
  look(0, { configured: 8, running: 3 });
  assertEquals(gist(look(30, { configured: 1, running: 1 })), [4, true, "reassert"]);
});

Deno.test("it decides from the count it wants, not from the one that lags", () => {
  const { look } = history();
  look(0, { waiting: 1, running: 1 });
  const late = look(90, { waiting: 3, running: 1, configured: 1, reporting: 1 });
  assertEquals(gist(late), [4, true, "up"]);
  assertEquals(late.reason, "3 jobs wait and 1 runs: from 2 workers to 4");
});

Deno.test("replicas that crash or never report are no reason to climb, and an alarm", () => {
  const { look } = history();
  look(0, { waiting: 2, running: 1 });
  look(30, { waiting: 2, running: 1, up: 1, crashed: 2 });
  const it = look(120, { waiting: 2, running: 1, up: 1, crashed: 2 });
  assertEquals(gist(it), [3, false, "missing"]);
  assertEquals(it.reason, "2 jobs wait and 1 runs: 3 workers would do, of which 1 reports");
  assertEquals(it.alarms, ["crashed", "unreached"]);
  // More jobs are a reason.
  assertEquals(gist(look(150, { waiting: 5, running: 1, up: 1 })), [4, true, "up"]);
});

Deno.test("a count that is not reached within two minutes of its writing is an alarm", () => {
  const { look } = history();
  assertEquals(look(0, { waiting: 2, running: 1, up: 1 }).alarms, []);
  assertEquals(look(90, { waiting: 3, running: 1, up: 1 }).wanted, 4);
  assertEquals(look(209, { running: 1, up: 3 }).alarms, []);
  assertEquals(look(210, { running: 1, up: 3 }).alarms, ["unreached"]);
  assertEquals(look(240, { running: 1, up: 4 }).alarms, []);
});

Deno.test("replicas that run for two minutes and do not report are an alarm", () => {
  const { look } = history();
  assertEquals(look(0, { configured: 3, reporting: 2 }).alarms, []);
  assertEquals(look(120, { reporting: 2 }).alarms, ["silent"]);
  // An alarm stands until a look sees that it is over.
  assertEquals(look(150, {}, { platform: null }).alarms, ["silent"]);
  assertEquals(look(180, { reporting: 3 }).alarms, []);
});

Deno.test("without any worker that reports, jobs that wait are neither work nor none", () => {
  const { look } = history();
  look(0, { configured: 2 });
  const rows = [{ served: false, queued: 2 }];
  for (let atS = 30; atS < 900; atS += 30) {
    const it = look(atS, { rows, up: 0 });
    assertEquals(gist(it), [2, false, "missing"]);
    assertEquals(it.reason, "2 jobs wait and 0 run, but no worker reports: 2 workers held");
  }
});

Deno.test("a look of which a part failed holds the count", () => {
  const { look } = history();
  look(0, { waiting: 2, running: 1 });
  const parts: [{ queue?: null; platform?: null }, string][] = [
    [{ queue: null }, "the queue was not seen: 3 workers held"],
    [{ platform: null }, "Railway was not seen: 3 workers held"],
    [{ queue: null, platform: null }, "neither the queue nor Railway was seen: 3 workers held"],
  ];
  for (const [failed, reason] of parts) {
    const it = look(200, { waiting: 9, running: 3, configured: 1 }, failed);
    assertEquals(gist(it), [3, false, "unknown"]);
    assertEquals(it.reason, reason);
  }
  const never = decide({ ...lookAt(0), platform: null }, null, defaults);
  assertEquals([...gist(never), never.memory], [null, false, "unknown", null]);
  assertEquals(never.reason, "Railway was not seen: no count known yet");
});

Deno.test("a look without the queue begins the idle run anew; one without Railway does not", () => {
  const run = (failed: { queue?: null; platform?: null }) => {
    const { look } = history();
    look(0, { configured: 4 });
    for (let atS = 30; atS < 600; atS += 30) look(atS, {}, atS === 300 ? failed : {});
    return look(600).wanted;
  };
  assertEquals([run({}), run({ platform: null }), run({ queue: null })], [1, 1, 4]);
});

Deno.test("an idle run does not go on over a time without looks", () => {
  const { look } = history();
  look(0, { configured: 4 });
  assertEquals(look(121).reason, "nothing to do for 0 s: 4 workers held until it is 600 s");
  assertEquals(look(241).reason, "nothing to do for 120 s: 4 workers held until it is 600 s");
});

Deno.test("a clock that was set back binds nothing for longer than its time", () => {
  const { look } = history();
  look(10_000, { waiting: 1, running: 1 });
  assertEquals(look(0, { waiting: 1, running: 2 }).code, "step");
  assertEquals(gist(look(90, { waiting: 1, running: 2 })), [3, true, "up"]);
});

Deno.test("a refused count is a ceiling, an alarm, and is tried again after an hour", () => {
  const { look, refuse } = history();
  assertEquals(look(0, { waiting: 9 }).wanted, 4);
  refuse(1, 2);
  const next = look(90, { waiting: 9, running: 1 });
  assertEquals(gist(next), [2, true, "up"]);
  assertEquals(next.alarms, ["ceiling"]);
  const full = look(180, { waiting: 9, running: 2 });
  assertEquals(
    full.reason,
    "9 jobs wait and 2 run: 2 workers held, which is the most (what Railway takes)",
  );
  assertEquals(look(3599, { waiting: 9, running: 2 }).wanted, 2);
  assertEquals(gist(look(3600, { waiting: 9, running: 2 })), [4, true, "up"]);
  // Without a word on how many it would take, one less is tried next.
  refuse(2);
  assertEquals(look(3700, { waiting: 9, running: 2 }).wanted, 3);
});

Deno.test("the connections of the database bound the count; too few for the least are an alarm", () => {
  const policy = settings({ connections: 11, connectionsPerWorker: 4 });
  const it = decide(lookAt(0, { waiting: 9 }), null, policy);
  assertEquals(gist(it), [2, true, "up"]);
  const full = decide(lookAt(90, { waiting: 9, configured: 2 }), it.memory, policy);
  assertEquals(
    full.reason,
    "9 jobs wait and 0 run: 2 workers held, which is the most (the connection budget)",
  );
  const few = decide(lookAt(0, { waiting: 9 }), null, { ...policy, min: 3 });
  assertEquals([few.wanted, few.alarms], [2, ["budget"]]);
});

Deno.test("the least is asked for at once, whatever is there", () => {
  const it = decide(lookAt(0), null, settings({ min: 2 }));
  assertEquals(gist(it), [2, true, "reassert"]);
});

Deno.test("with a target for the wait it climbs only as far as the oldest job's start needs", () => {
  const policy = settings({ max: 20, waitTargetS: 300 });
  // 6 jobs of 60 s in line, and half of one that runs: 390 s of work in the 260 s left.
  const seen = { waiting: 6, running: 1, oldestS: 40, meanS: 60 };
  const it = decide(lookAt(0, seen), null, policy);
  assertEquals(gist(it), [2, true, "up"]);
  const enough = decide(lookAt(120, { ...seen, configured: 2 }), it.memory, policy);
  assertEquals(gist(enough), [2, false, "in_time"]);
  assertEquals(
    enough.reason,
    "6 jobs wait and 1 runs: 2 workers will start them within 300 s",
  );
  // Late, or run times not known: one worker a job.
  for (const changed of [{ oldestS: 300 }, { meanS: null }]) {
    assertEquals(decide(lookAt(0, { ...seen, ...changed }), null, policy).wanted, 7);
  }
});

interface Step {
  seen: Look;
  before: Memory | null;
  decision: Decision;
  policy: Policy;
}

/** A platform that responds late, crashes replicas and is changed from outside. */
function* histories(seed: number): Generator<Step> {
  const draw = random(seed);
  const upTo = (n: number) => Math.floor(draw() * (n + 1));
  const min = 1 + upTo(2);
  const policy = settings({
    ...{ min, max: min + upTo(6), connectionsPerWorker: 4 },
    connections: draw() < 0.3 ? 4 * min + upTo(20) : null,
    waitTargetS: draw() < 0.2 ? 30 + upTo(600) : null,
  });
  const responsive = draw() < 0.3;
  const trouble = draw() < 0.5 ? 0.05 : 0.002;
  let [configured, up, crashed] = [1 + upTo(3), 1, 0];
  let pending: { n: number; at: number } | null = null;
  let before: Memory | null = null;
  let [waiting, running] = [0, 0];
  for (let i = 0, atS = 0; i < 160; i++, atS += 5 + upTo(draw() < trouble / 2 ? 900 : 40)) {
    // Calm for a while, then bursts.
    if (i % 80 < 35) waiting = draw() < 0.2 ? upTo(12) : draw() < 0.3 ? 0 : waiting;
    else waiting = 0;
    const reporting = Math.max(0, up - upTo(draw() < 0.1 ? up : 0));
    running = i % 80 < 38 ? Math.min(reporting, waiting + upTo(1)) : 0;
    if (pending && pending.at <= i) [configured, pending] = [pending.n, null];
    if (draw() < 0.04) configured = 1 + upTo(draw() < 0.5 ? 0 : 9);
    if (draw() < 0.7) up = configured;
    crashed = draw() < 0.1 ? upTo(up) : 0;
    const rows: Partial<Work>[] = [
      { queued: waiting, running, oldest_wait_s: waiting ? upTo(500) : null, mean_run_s: 60 },
      { queue: "stopped", paused: true, queued: upTo(3) },
      { kind: "odd", served: draw() < 0.8, queued: draw() < trouble ? 1 : 0 },
    ];
    const whole = lookAt(atS, { rows, running, reporting, configured, up: up - crashed, crashed });
    const busy = draw() < trouble && reporting > 0 ? 1 : running;
    const seen: Look = {
      ...whole,
      queue: draw() < trouble
        ? null
        : { ...whole.queue!, workers: { reporting, busy, concurrency: 1 } },
      platform: draw() < trouble ? null : whole.platform,
    };
    const decision = decide(seen, before, policy);
    yield { seen, before, decision, policy };
    before = decision.memory;
    if (!decision.write) continue;
    const refusal = draw() < 0.05 && decision.wanted! > configured && decision.wanted! > policy.min;
    if (refusal) before = refused(before!, configured);
    else if (responsive) configured = decision.wanted!;
    else pending = { n: decision.wanted!, at: i + 1 + upTo(3) };
  }
}

const quiet = ({ queue }: Look) =>
  queue !== null && queue.workers.busy === 0 &&
  queue.work.every((row) =>
    row.running_here === 0 && (row.queued === 0 || row.paused || !row.served)
  );
const mostOf = (policy: Policy, memory: Memory | null) =>
  Math.min(
    policy.max,
    memory?.ceiling ?? Infinity,
    policy.connections ? Math.floor(policy.connections / policy.connectionsPerWorker) : Infinity,
  );

/** What holds of every decision by itself. */
function checkOne({ seen, before, decision, policy }: Step): void {
  const { wanted, write, code, memory } = decision;
  const { platform } = seen;
  if (!seen.queue || !platform) {
    const held = before?.wanted ?? platform?.configured ?? null;
    assertEquals([write, code, wanted], [false, "unknown", held], "what is unknown is held");
    return;
  }
  const most = mostOf(policy, memory);
  const least = Math.min(policy.min, most);
  assert(wanted! >= least, "never below the least");
  assertEquals(write, wanted !== platform.configured, "written when it is to change");
  if (wanted! > platform.configured) assert(wanted! <= most, "never raised above the most");
  if (wanted! < platform.configured) assert(quiet(seen), "lowered only when all is quiet");
  if (before && wanted! > before.wanted && wanted! > Math.max(platform.configured, least)) {
    assertEquals(code, "up", "only a step raises what is wanted");
  }
  // An excess may vanish from outside; else what is wanted falls after an idle run only.
  if (before && wanted! < before.wanted && platform.configured >= before.wanted) {
    assertEquals(code, "down", "only an idle run lowers what is wanted");
  }
}

Deno.test("in 3000 random histories the limits hold, and nothing is lowered while anything is to do", () => {
  const codes: Record<string, number> = {};
  for (let seed = 0; seed < 3000; seed++) {
    let [steppedMs, lastMs] = [-Infinity, -Infinity];
    let idleSinceMs: number | null = null;
    for (const step of histories(seed)) {
      const { seen, decision: { code }, policy } = step;
      const { at_ms } = seen;
      codes[code] = (codes[code] ?? 0) + 1;
      try {
        checkOne(step);
        if (code === "up") {
          assert(at_ms - steppedMs >= policy.stepS * 1000, "steps lie apart");
          steppedMs = at_ms;
        }
        // The idle run, counted here anew.
        if (!quiet(seen)) idleSinceMs = null;
        else if (idleSinceMs === null || at_ms - lastMs > policy.gapS * 1000) idleSinceMs = at_ms;
        if (code === "down") {
          assert(at_ms - idleSinceMs! >= policy.idleS * 1000, "the idle run was long enough");
        }
        lastMs = at_ms;
      } catch (error) {
        throw new Error(`seed ${seed}: ${JSON.stringify(step)}`, { cause: error });
      }
    }
  }
  for (const code of ["up", "down", "reassert", "unknown", "idle", "running", "step", "most"]) {
    assert(codes[code] > 100, `${code} came ${codes[code]} times`);
  }
  assert(codes.missing > 100 && codes.in_time > 100, JSON.stringify(codes));
});

Deno.test("in a world that does not change any more, nothing is written any more", () => {
  for (let seed = 0; seed < 1000; seed++) {
    const last = [...histories(seed)].filter(({ decision }) => decision.memory).at(-1)!;
    let { memory } = last.decision;
    const { queue } = lookAt(0, last.seen.queue ? { rows: [...last.seen.queue.work] } : {});
    const platform: Platform = { configured: memory!.wanted, running: memory!.wanted, crashed: 0 };
    const writes: number[] = [];
    for (let i = 1; i <= 100; i++) {
      const at_ms = last.seen.at_ms + i * 30_000;
      const workers = { ...queue!.workers, reporting: platform.running };
      const it = decide({ at_ms, queue: { ...queue!, workers }, platform }, memory, last.policy);
      if (it.write) writes.push(i);
      platform.configured = platform.running = it.wanted!;
      memory = it.memory;
    }
    // Steps up, an hour after a refusal too, or one step down: then it rests.
    assert(writes.length <= 10, `seed ${seed}: ${writes}`);
    assert(writes.every((i) => i <= 25 || memory!.wanted > 1), `seed ${seed}: ${writes}`);
  }
});

Deno.test("only a change from outside is written in a world that does not change otherwise", () => {
  const draw = random(7);
  for (const seen of [{}, { running: 2 }, { waiting: 5, running: 4 }]) {
    const { look } = history();
    look(0, { ...seen, configured: 4 });
    for (let atS = 30; atS < 570; atS += 30) {
      const reset = draw() < 0.2;
      const it = look(atS, reset ? { ...seen, configured: 1 } : seen);
      assertEquals([it.wanted, it.write], [4, reset], `at ${atS}: ${it.reason}`);
    }
  }
});
