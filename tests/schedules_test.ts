/** Schedules: each tick once, whatever happens to the leader; and when ticks are. */
import { assert, assertEquals, assertMatch, assertRejects, assertThrows } from "@std/assert";
import { type Pool, schema, via } from "../db.ts";
import { enqueue, Refused, setQueue } from "../queue.ts";
import {
  type Due,
  dueSchedules,
  enableSchedule,
  failingSchedules,
  keepSchedules,
  listSchedules,
  nextTicks,
  removeSchedule,
  setSchedule,
  stepOf,
  takeStep,
  ticksAfter,
} from "../schedules.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { kinds } from "./kinds.ts";
import { runScript, skewedClock, startWorker } from "./processes.ts";
import { fileURLToPath } from "node:url";

const SILENT_S = 45;
const keep = (sql: Pool) => keepSchedules(via(sql), kinds, SILENT_S);
const due = (sql: Pool) => dueSchedules(via(sql), kinds, SILENT_S);
const jobs = async (sql: Pool) =>
  (await sql`select kind, payload from ${sql(schema)}.jobs order by id`).map((it) => it.payload);
const ticks = async (sql: Pool, name: string) =>
  Array.from(
    await sql<{ tick_at: Date; outcome: string }[]>`
      select tick_at, outcome from ${
      sql(schema)
    }.schedule_ticks where schedule = ${name} order by tick_at`,
  );
const view = async (sql: Pool, name: string) =>
  (await listSchedules(sql)).find((it) => it.name === name)!;

/** Moves the next tick to so many whole minutes ago; null: to none of them. */
const moveNext = (sql: Pool, name: string, minutesAgo: number) =>
  sql`
    update ${sql(schema)}.schedules
    set next_at = date_trunc('minute', now()) - ${minutesAgo} * interval '1 minute', version = version + 1
    where name = ${name}`;

/** An hourly schedule, whose ticks are half an hour from now, of which one was due a minute ago. */
async function dueSchedule(sql: Pool, name = "hourly", minutesAgo = 1, more = {}) {
  const [{ minute }] = await sql`
    select extract(minute from now() + interval '30 minutes')::integer as minute`;
  await setSchedule(sql, name, {
    ...{ cron: `${minute} * * * *`, kind: "echo", payload: { of: name } },
    ...more,
  });
  await moveNext(sql, name, minutesAgo);
}

/** The ticks after an instant, by the zone's clocks and in UTC. */
const shown = (cron: string, timeZone: string, from: string, most: number) =>
  ticksAfter(cron, timeZone, Date.parse(from), most).map((tick) =>
    `${tick.toLocaleString("sv", { timeZone }).slice(5, 16)} ${tick.toISOString().slice(11, 16)}Z`
  );

for (
  const [zone, spring, autumn] of [
    ["America/New_York", "2026-03-07T12:00:00Z", "2026-10-31T12:00:00Z"],
    ["Europe/Berlin", "2026-03-28T12:00:00Z", "2026-10-24T12:00:00Z"],
  ]
) {
  const berlin = zone === "Europe/Berlin";
  Deno.test(`a daily tick comes once a day over both changes of the clocks in ${zone}`, () => {
    const at = (cron: string, from: string) => shown(cron, zone, from, 3);
    assertEquals(
      {
        "the hour that is left out": [at("0 2 * * *", spring), at("30 2 * * *", spring)],
        "before it": at("30 1 * * *", spring),
        "autumn, 02:00": at("0 2 * * *", autumn),
        "autumn, 01:30": at("30 1 * * *", autumn),
        "autumn, 02:30": at("30 2 * * *", autumn),
      },
      berlin
        ? {
          "the hour that is left out": [
            ["03-29 03:00 01:00Z", "03-30 02:00 00:00Z", "03-31 02:00 00:00Z"],
            ["03-29 03:00 01:00Z", "03-30 02:30 00:30Z", "03-31 02:30 00:30Z"],
          ],
          "before it": ["03-29 01:30 00:30Z", "03-30 01:30 23:30Z", "03-31 01:30 23:30Z"],
          // 02:00 to 03:00 comes twice there: the first of the two.
          "autumn, 02:00": ["10-25 02:00 00:00Z", "10-26 02:00 01:00Z", "10-27 02:00 01:00Z"],
          "autumn, 01:30": ["10-25 01:30 23:30Z", "10-26 01:30 00:30Z", "10-27 01:30 00:30Z"],
          "autumn, 02:30": ["10-25 02:30 00:30Z", "10-26 02:30 01:30Z", "10-27 02:30 01:30Z"],
        }
        : {
          "the hour that is left out": [
            ["03-08 03:00 07:00Z", "03-09 02:00 06:00Z", "03-10 02:00 06:00Z"],
            ["03-08 03:00 07:00Z", "03-09 02:30 06:30Z", "03-10 02:30 06:30Z"],
          ],
          "before it": ["03-08 01:30 06:30Z", "03-09 01:30 05:30Z", "03-10 01:30 05:30Z"],
          "autumn, 02:00": ["11-01 02:00 07:00Z", "11-02 02:00 07:00Z", "11-03 02:00 07:00Z"],
          // 01:00 to 02:00 comes twice there: the first of the two.
          "autumn, 01:30": ["11-01 01:30 05:30Z", "11-02 01:30 06:30Z", "11-03 01:30 06:30Z"],
          "autumn, 02:30": ["11-01 02:30 07:30Z", "11-02 02:30 07:30Z", "11-03 02:30 07:30Z"],
        },
    );
    // Several times of a day are no interval.
    assertEquals(
      at("30 2,14 * * *", spring)[1],
      `${berlin ? "03-29 03:00 01" : "03-08 03:00 07"}:00Z`,
    );
    const twice = berlin ? "30 2,14 * * *" : "30 1,13 * * *";
    assertEquals(new Set(shown(twice, zone, autumn, 6).map((it) => it.slice(0, 11))).size, 6);
  });

  Deno.test(`every 15 minutes stays every 15 minutes over both changes in ${zone}`, () => {
    for (const from of [spring, autumn].map(Date.parse)) {
      const ticks = ticksAfter("*/15 * * * *", zone, from, 4 * 24);
      // One by one, as the leader has them, and all at once.
      let last = from;
      for (const tick of ticks) {
        assertEquals(tick.getTime() - last, 15 * 60_000, `after ${new Date(last).toISOString()}`);
        assertEquals(ticksAfter("*/15 * * * *", zone, last, 1), [tick]);
        last = tick.getTime();
      }
    }
  });
}

Deno.test("what is no cron expression, no time zone, or comes never is refused, with the rule", () => {
  for (
    const [cron, zone, what] of [
      ["every day", "UTC", /cron is "every day": it must have five fields/],
      ["* * * * * *", "UTC", /it must have five fields/],
      ["2026-12-01T00:00:00", "UTC", /it must have five fields/],
      ["61 * * * *", "UTC", /cron is "61 \* \* \* \*": Invalid value for minute: 61/],
      ["@reboot", "UTC", /cron is "@reboot": /],
      ["0 0 30 2 *", "UTC", /cron is "0 0 30 2 \*": there is no such time/],
      ["0 0 * * *", "Mars/Olympus", /time_zone is "Mars\/Olympus": it must be one such as/],
      ["0 0 * * *", "", /time_zone is ""/],
    ] as const
  ) {
    assertMatch(assertThrows(() => ticksAfter(cron, zone, 0, 1), Refused).message, what);
  }
  assertEquals(ticksAfter("@daily", "UTC", 1, 1)[0].toISOString(), "1970-01-02T00:00:00.000Z");
});

const noon = Date.UTC(2026, 11, 1, 12);
const MIN = 60_000;
const quarterly = (minutesLate: number, more: Partial<Due> = {}): Due => ({
  ...{ name: "s", version: "1", cron: "*/15 * * * *", time_zone: "UTC", missed: "run_once" },
  ...{ kind: "echo", payload: {}, known: true, planned_from_ms: 0 },
  ...{ next_ms: noon - minutesLate * MIN, now_ms: noon + 3 * MIN },
  ...more,
});
const gist = (it: Due) => {
  const { step, next } = stepOf(it, kinds);
  return [step, next && (next.getTime() - noon) / MIN];
};

Deno.test("ticks of the last five minutes each run; of older ones, missed, one does for all, or none", () => {
  assertEquals(gist(quarterly(0)), ["run", 15]);
  assertEquals(gist(quarterly(0, { cron: "* * * * *" })), ["run", 1], "the next of them follows");
  // Nobody was there for three hours. The tick at noon is three minutes old.
  assertEquals(gist(quarterly(180)), ["run", 15], "one for all, and that is it");
  assertEquals(gist(quarterly(180, { missed: "skip" })), ["skip", 0], "all but the one at noon");
  assertEquals(gist(quarterly(0, { missed: "skip" })), ["run", 15]);
});

test("each tick brings one job, as the schedule says, and the next tick is set", async (sql) => {
  await setQueue(sql, "reports");
  const more = { queue: "reports", owner: "acme", priority: 7, unique_key: "one" };
  await dueSchedule(sql, "hourly", 1, more);
  const before = await view(sql, "hourly");
  assertEquals((await keep(sql)).map(({ outcome }) => outcome), ["enqueued"]);
  assertEquals(await keep(sql), []);
  const [job] = await sql`select id::text, * from ${sql(schema)}.jobs`;
  assertEquals(
    [job.kind, job.payload, job.queue, job.owner, job.priority, job.unique_key],
    ["echo", { of: "hourly" }, "reports", "acme", 7, "one"],
  );
  const it = await view(sql, "hourly");
  assertEquals([it.last_job, it.last_outcome, it.last_status], [job.id, "enqueued", "queued"]);
  assertEquals(it.last_at, before.next_at);
  const minutes = (it.next_at!.getTime() - it.now.getTime()) / MIN;
  assert(minutes > 28 && minutes <= 31, `${minutes}`);
  assertEquals(nextTicks(it, 3).length, 3);
  // The job is unfinished, so it is that of the next tick too.
  await moveNext(sql, "hourly", 0);
  assertEquals((await keep(sql)).map(({ job_id }) => job_id), [job.id]);
});

test("of leaders that see the same tick at once, one enqueues it", async (sql) => {
  for (let round = 0; round < 5; round++) {
    const name = `s${round}`;
    await dueSchedule(sql, name);
    // All have read and worked it out before any of them writes.
    const seen = await Promise.all(Array.from({ length: 4 }, () => due(sql)));
    assertEquals(seen.map((it) => it.length), [1, 1, 1, 1]);
    const outcomes = await Promise.all(
      seen.map(([it]) => takeStep(via(sql), it, stepOf(it, kinds))),
    );
    assertEquals(outcomes.map(({ outcome }) => outcome).sort(), [
      ...["enqueued", "stale", "stale", "stale"],
    ]);
    assertEquals((await jobs(sql)).length, round + 1);
  }
});

test("a tick is not enqueued twice, whoever sets the clock or the row back", async (sql) => {
  await dueSchedule(sql);
  await keep(sql);
  const { last_at } = await view(sql, "hourly");
  await sql`
    update ${sql(schema)}.schedules set next_at = ${last_at}, version = version + 1`;
  assertEquals((await keep(sql)).map(({ outcome }) => outcome), ["planned"]);
  assertEquals((await jobs(sql)).length, 1);
  const it = await view(sql, "hourly");
  assert(it.error === null && it.next_at! > it.now);
});

test("a leader that dies after it worked out a tick loses none, and one that was frozen adds none", async (sql) => {
  await dueSchedule(sql);
  const [seen] = await due(sql);
  const step = stepOf(seen, kinds);
  // It is gone. Another goes on from what the database has.
  await keep(sql);
  assertEquals(await jobs(sql), [{ of: "hourly" }]);
  assertEquals((await takeStep(via(sql), seen, step)).outcome, "stale");
  // Nobody was there meanwhile, but what it worked out is eleven seconds old.
  await moveNext(sql, "hourly", 0);
  const [late] = await due(sql);
  const frozen = { ...late, now_ms: late.now_ms - 11_000 };
  assertEquals((await takeStep(via(sql), frozen, stepOf(frozen, kinds))).outcome, "stale");
  assertEquals((await jobs(sql)).length, 1);
});

test("a schedule that is changed, paused or removed while the leader works it out is let be", async (sql) => {
  const changes: Record<string, () => Promise<unknown>> = {
    changed: () => setSchedule(sql, "changed", { cron: "0 3 * * *", kind: "echo" }),
    "by-hand": () => sql`update ${sql(schema)}.schedules set payload = '5' where name = 'by-hand'`,
    paused: () => enableSchedule(sql, "paused", false),
    removed: () => removeSchedule(sql, "removed"),
  };
  for (const [name, change] of Object.entries(changes)) {
    await dueSchedule(sql, name);
    const seen = (await due(sql)).find((it) => it.name === name)!;
    await change();
    assertEquals((await takeStep(via(sql), seen, stepOf(seen, kinds))).outcome, "stale", name);
    assertEquals((await jobs(sql)).length, 0, name);
    if (name === "by-hand") await moveNext(sql, name, -30);
  }
  await keep(sql);
  // What it is now counts from now on: 03:00 UTC, whatever had been due.
  assertEquals((await view(sql, "changed")).next_at!.toISOString().slice(11, 16), "03:00");
  assertEquals((await view(sql, "paused")).next_at, null);
  assertEquals(await jobs(sql), []);
  await enableSchedule(sql, "paused", true);
  await keep(sql);
  const it = await view(sql, "paused");
  assert(it.next_at! > it.now, "the ticks of the pause are not missed ones");
  assertEquals(await jobs(sql), []);
});

test("setting a schedule to what it is changes nothing: neither a tick that is due nor a pause", async (sql) => {
  const settings = { cron: "*/5 * * * *", kind: "echo", payload: { a: [1] } };
  await setSchedule(sql, "s", settings);
  await keep(sql);
  await moveNext(sql, "s", 2);
  await setSchedule(sql, "s", settings);
  assertEquals((await due(sql)).length, 1);
  // Another payload is for the tick that is due already.
  await setSchedule(sql, "s", { ...settings, payload: 2 });
  await keep(sql);
  assertEquals((await jobs(sql))[0], 2);
  await enableSchedule(sql, "s", false);
  await setSchedule(sql, "s", settings);
  assertEquals((await view(sql, "s")).enabled, false);
  await assertRejects(() => setSchedule(sql, "S!", settings), Refused, "schedule_name");
  await assertRejects(() => setSchedule(sql, "s", { ...settings, cron: "no" }), Refused, "no");
  await assertRejects(() => removeSchedule(sql, "none"), Refused, 'there is no schedule "none"');
});

test("after three hours with nobody there one job is for all the ticks, or none where it says skip", async (sql) => {
  await dueSchedule(sql, "once", 180);
  await dueSchedule(sql, "skips", 180, { missed: "skip" });
  const outcomes = (await keep(sql)).map(({ name, outcome }) => [name, outcome]);
  assertEquals(outcomes, [["once", "enqueued"], ["skips", "skipped"]]);
  assertEquals(await jobs(sql), [{ of: "once" }]);
  assertEquals((await ticks(sql, "skips")).map(({ outcome }) => outcome), ["skipped"]);
  for (const it of await listSchedules(sql)) assert(it.next_at! > it.now, it.name);
});

test("of the minutes that a new leader takes to be one no tick is lost", async (sql) => {
  await setSchedule(sql, "often", { cron: "* * * * *", kind: "echo" });
  await keep(sql);
  await moveNext(sql, "often", 3);
  await keep(sql);
  const at = (await ticks(sql, "often")).map(({ tick_at }) => tick_at.getTime());
  assert(at.length >= 4, `${at.length} ticks`);
  at.slice(1).forEach((ms, i) => assertEquals(ms - at[i], MIN));
  assertEquals((await jobs(sql)).length, at.length);
});

test("a schedule that cannot be kept says why, stops no other, and goes on once it is mended", async (sql) => {
  const s = sql(schema);
  await dueSchedule(sql, "payload", 1, { kind: "number", payload: "five" });
  await dueSchedule(sql, "queue", 1, { queue: "nowhere" });
  await dueSchedule(sql, "kind", 1, { kind: "of-later-code" });
  await sql`
    insert into ${s}.schedules (name, cron, time_zone, kind)
    values ('cron', 'now and then', 'UTC', 'echo'), ('zone', '* * * * *', 'Atlantis', 'echo')`;
  await dueSchedule(sql, "sound");
  await keep(sql);
  assertEquals(await jobs(sql), [{ of: "sound" }]);
  const errors = Object.fromEntries(
    (await listSchedules(sql)).map(({ name, error }) => [name, error]),
  );
  assertEquals(errors.sound, null);
  assertMatch(errors.cron!, /cron is "now and then": it must have five fields/);
  assertMatch(errors.zone!, /time_zone is "Atlantis"/);
  assertMatch(errors.kind!, /unknown kind "of-later-code"/);
  assertMatch(errors.payload!, /payload: .*expected number/);
  assertMatch(errors.queue!, /queue "nowhere" does not exist/);
  const failing = (await failingSchedules(sql)).map(({ name }) => name);
  assertEquals(failing, ["cron", "kind", "payload", "queue", "zone"]);
  assertEquals(await keep(sql), [], "it is not tried again at once");
  await sql`update ${s}.schedules set cron = '* * * * *' where name = 'cron'`;
  await sql`update ${s}.schedules set payload = '5' where name = 'payload'`;
  assertEquals(
    (await keep(sql)).map(({ name, outcome }) => `${name} ${outcome}`),
    ["cron planned", "payload enqueued"],
  );
});

test("a tick of a full queue is tried again until it is let in, and is then one job", async (sql) => {
  const s = sql(schema);
  await setQueue(sql, "small", { max_waiting: 1 });
  await enqueue(sql, [{ kind: "echo", queue: "small" }]);
  await dueSchedule(sql, "waits", 1, { queue: "small" });
  await dueSchedule(sql, "skips", 1, { queue: "small", missed: "skip" });
  const again = () => sql`update ${s}.schedules set error_at = error_at - interval '1 hour'`;
  assertEquals((await keep(sql)).map(({ outcome }) => outcome), ["failed", "failed"]);
  assertMatch((await view(sql, "waits")).error!, /queue "small" is full: its max_waiting is 1/);
  assertEquals(await ticks(sql, "waits"), []);
  // Three hours later.
  for (const name of ["waits", "skips"]) await moveNext(sql, name, 180);
  await again();
  const outcomes = async () => (await keep(sql)).map((it) => `${it.name} ${it.outcome}`).sort();
  assertEquals(await outcomes(), ["skips skipped", "waits failed"]);
  await sql`delete from ${s}.jobs`;
  await again();
  assertEquals(await outcomes(), ["waits enqueued"]);
  const it = await view(sql, "waits");
  assertEquals([it.error, (await jobs(sql)).length], [null, 1]);
  assert(it.next_at! > it.now);
});

test("a kind that this leader's code has not, and that of other workers has, is left to them", async (sql) => {
  await dueSchedule(sql, "theirs", 1, { kind: "of-later-code" });
  const [{ boot_id }] = await sql`
    insert into ${sql(schema)}.processes (boot_id, role, name, version, known_kinds)
    values (gen_random_uuid(), 'worker', 'newer', '2', '{of-later-code}') returning boot_id`;
  assertEquals(await keep(sql), []);
  await sql`update ${sql(schema)}.processes set seen_at = now() - interval '1 hour'
    where boot_id = ${boot_id}`;
  assertEquals((await keep(sql)).map(({ outcome }) => outcome), ["failed"]);
});

test(
  "a worker whose clock is ten minutes off, either way, enqueues by the database's",
  async (sql, url) => {
    for (const [name, skewMs] of [["ahead", 600_000], ["behind", -600_000]] as const) {
      await setSchedule(sql, name, { cron: "* * * * *", kind: "echo", payload: name });
      await setSchedule(sql, `${name}-later`, {
        cron: "* * * * *",
        kind: "echo",
        payload: "later",
      });
      await keep(sql);
      await moveNext(sql, name, 0);
      await moveNext(sql, `${name}-later`, -5);
      await using _worker = startWorker(url, [], skewedClock(skewMs));
      await waitFor(async () => (await ticks(sql, name)).length > 0, "the tick that is due");
      const it = await view(sql, name);
      const aheadS = (it.next_at!.getTime() - it.now.getTime()) / 1000;
      assert(aheadS > -5 && aheadS <= 60, `the next tick is ${aheadS} s from now`);
      await enableSchedule(sql, name, false);
    }
    assert(!(await jobs(sql)).includes("later"), "what is due in five minutes was enqueued");
  },
);

test(
  "the workers' leader keeps the schedules; frozen, another does; awake again, it adds nothing",
  async (sql, url) => {
    await dueSchedule(sql);
    await using first = startWorker(url);
    await waitFor(async () => (await jobs(sql)).length === 1, "the first's tick");
    await using _second = startWorker(url);
    await waitFor(async () => {
      const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.processes`;
      return n === 2;
    }, "the second worker");
    first.kill("SIGSTOP");
    await moveNext(sql, "hourly", 0);
    await waitFor(async () => (await jobs(sql)).length === 2, "the other's tick");
    first.kill("SIGCONT");
    await moveNext(sql, "hourly", -30);
    await setSchedule(sql, "last", { cron: "0 0 1 1 *", kind: "echo" });
    await moveNext(sql, "last", 0);
    await waitFor(async () => (await ticks(sql, "last")).length === 1, "the tick after both");
    assertEquals((await jobs(sql)).length, 3);
  },
);

test("deno task schedule sets, lists, pauses, resumes and removes", async (sql, url) => {
  const jobs = fileURLToPath(new URL("kinds.ts", import.meta.url));
  const run = async (...args: string[]) => {
    const { code, stdout, stderr } = await runScript(
      "tools/schedule.ts",
      args,
      { DATABASE_URL: url, SIDING_JOBS: jobs },
    );
    return [code, (code === 0 ? stdout : stderr).trim()] as const;
  };
  const set = ["set", "nightly", "--cron", "0 2 * * *", "--zone", "Europe/Berlin", "--kind"];
  const [code, said] = await run(...set, "number", "--payload", "5", "--priority", "-3");
  assertEquals(code, 0);
  assertMatch(
    said,
    /^nightly: number at 0 2 \* \* \* Europe\/Berlin\n {2}next (\d{4}-\d\d-\d\d 0[23]:00(, )?){3}$/,
  );
  const [, text] = await run("list", "--json");
  const { items } = JSON.parse(text);
  assertEquals([items[0].payload, items[0].priority, items[0].next.length], [5, -3, 3]);
  const paused = "nightly: number at 0 2 * * * Europe/Berlin, paused";
  assertEquals(await run("pause", "nightly"), [0, paused]);
  assertEquals((await view(sql, "nightly")).enabled, false);
  assertEquals((await run("resume", "nightly"))[0], 0);
  assertEquals((await view(sql, "nightly")).enabled, true);
  const refusals: [number, RegExp, string[]][] = [
    [2, /payload: .*expected number/, [...set, "number", "--payload", '"five"']],
    [2, /unknown kind "nothing"/, [...set, "nothing"]],
    [2, /time_zone is "Mars"/, [...set, "echo", "--zone", "Mars"]],
    [2, /--missed is "later": it must be run_once or skip/, [...set, "echo", "--missed", "later"]],
    [2, /list takes no --cron/, ["list", "--cron", "0 2 * * *"]],
    [1, /there is no schedule "weekly"/, ["pause", "weekly"]],
  ];
  const refused = await Promise.all(refusals.map(([, , args]) => run(...args)));
  for (const [i, [expected, message]] of refusals.entries()) {
    assertEquals(refused[i][0], expected, refused[i][1]);
    assertMatch(refused[i][1], message);
  }
  assertEquals(await run("remove", "nightly"), [0, "schedule nightly is removed"]);
  assertEquals(await listSchedules(sql), []);
});
