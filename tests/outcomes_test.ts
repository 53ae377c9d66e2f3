/** Outcomes that are recorded together: none waits long for another, and none is lost or happens twice. */
import { assert, assertEquals } from "@std/assert";
import { z } from "zod";
import * as claims from "../claims.ts";
import { type Pool, schema, via } from "../db.ts";
import { startProxy } from "../dev/proxy.ts";
import { type Context, inline, type Kinds } from "../jobs/kind.ts";
import { Outcomes } from "../jobs/outcomes.ts";
import * as processes from "../processes.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { work } from "./intake.ts";

const MANY = 200;
const HELD_BACK_MS = 400;
/** What a busy machine may add. */
const ALLOWANCE_MS = 1500;

/** A job's row, locked by somebody until it is let go. */
async function lockRow(sql: Pool, id: string): Promise<() => Promise<void>> {
  const [locked, letGo] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  const transaction = sql.begin(async (tx) => {
    await tx`select from ${tx(schema)}.jobs where id = ${id} for update`;
    locked.resolve();
    await letGo.promise;
  });
  await Promise.race([locked.promise, transaction]);
  return async () => {
    letGo.resolve();
    await transaction;
  };
}

const aWorker = (sql: Pool) => processes.register(sql, { role: "worker", name: "a", version: "0" });
const statusOf = async (sql: Pool, { id }: { id: string }) => (await queue.get(sql, [id]))[0];
/** Makes a queue that takes no more. */
async function fullQueue(sql: Pool): Promise<void> {
  await queue.setQueue(sql, "full", { max_waiting: 1 });
  await queue.enqueue(sql, [{ kind: "nobodys", queue: "full" }]);
}

test("one outcome whose row is locked, and one that is refused, hold back no others for long", async (sql) => {
  await fullQueue(sql);
  const worker = await aWorker(sql);
  await queue.enqueue(sql, Array.from({ length: MANY }, () => ({ kind: "a" })));
  const jobs = await claims.claim(sql, { queue: "default", claim: "skip_locked" }, {
    ...{ worker, kinds: ["a"], most: MANY, leaseS: 600, token: crypto.randomUUID() },
  });
  const [locked, refused, chained] = [jobs[70], jobs[130], jobs[131]];
  const letGo = await lockRow(sql, locked.id);
  const outcomes = new Outcomes(via(sql), worker, new AbortController().signal, 5, HELD_BACK_MS);
  const startedMs = performance.now();
  let lockedStands: boolean | null = null;
  const stand = await Promise.all(jobs.map(async (job) => {
    const { id, attempt } = job;
    const next = job === refused
      ? [{ kind: "a", queue: "full" }]
      : job === chained
      ? [{ kind: "b" }]
      : [];
    const recorded = outcomes.record({ id, attempt, outcome: "done", result: id, next });
    if (job !== locked) return await recorded;
    recorded.then((stands) => lockedStands = stands);
    return true;
  }));
  const tookMs = performance.now() - startedMs;
  assert(tookMs < HELD_BACK_MS + ALLOWANCE_MS, `the others took ${tookMs} ms`);
  assertEquals([stand.every(Boolean), lockedStands], [true, null]);

  await letGo();
  assertEquals(await waitFor(() => lockedStands, "the locked one"), true);
  const after = await queue.get(sql, jobs.map(({ id }) => id));
  assertEquals(after.filter(({ status }) => status !== "done").map(({ id }) => id), [refused.id]);
  assert((await statusOf(sql, refused)).error?.includes('queue "full" is full'));
  for (const { id, result } of after) if (id !== refused.id) assertEquals(result, id);
  const next = await sql`select from ${sql(schema)}.jobs where kind = 'b'`;
  assertEquals(next.length, 1, "what the chained one brings");
});

test("an outcome of a worker that lost its job ends nothing, alone or with a claim", async (sql) => {
  const [worker, other] = [await aWorker(sql), await aWorker(sql)];
  await queue.enqueue(sql, [{ kind: "a" }]);
  const ready: claims.Ready = { queue: "default", claim: "skip_locked" };
  const optionsOf = (worker: string, leaseS: number) => ({
    ...{ worker, kinds: ["a"], most: 1, leaseS, token: crypto.randomUUID() },
  });
  const [old] = await claims.claim(sql, ready, optionsOf(worker, 0));
  await queue.recover(sql);
  const [job] = await claims.claim(sql, ready, optionsOf(worker, 600));
  assertEquals([job.id, job.attempt], [old.id, 2]);
  const before = await statusOf(sql, job);
  for (const [who, { id, attempt }] of [[worker, old], [other, job]] as const) {
    const done = [{ id, attempt, result: "stale" }];
    assertEquals(await claims.finishMany(sql, who, done, 50), new Set());
    const { stand, jobs } = await claims.exchange(sql, ready, optionsOf(who, 600), done);
    assertEquals([stand, jobs], [new Set(), []]);
  }
  assertEquals(await statusOf(sql, job), before);
  const { id, attempt } = job;
  const { stand } = await claims.exchange(sql, ready, optionsOf(worker, 600), [
    { id, attempt, result: "fresh" },
  ]);
  assertEquals([stand, (await statusOf(sql, job)).result], [new Set([id]), "fresh"]);
});

/** Kinds whose jobs wait for a gate, which opens when so many run; one job goes on after that. */
function gated(count: number, atGate: () => Promise<unknown>) {
  const [gate, end] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  let running = 0;
  const starts = new Map<string, number>();
  const note = (context: Context) =>
    starts.set(context.job.id, (starts.get(context.job.id) ?? 0) + 1);
  const kinds: Kinds = {
    gate: inline({
      payload: z.unknown(),
      work: async (what, context) => {
        note(context);
        if (++running === count) atGate().then(() => gate.resolve(), gate.reject);
        await gate.promise;
        if (what === "slow") await end.promise;
        if (what === "refused") context.next({ kind: "gate", queue: "full" });
        return what;
      },
    }),
    quick: inline({ payload: z.unknown(), work: (_, context) => (note(context), 1) }),
  };
  return { kinds, starts, opened: gate.promise, end: end.resolve };
}

/** Gathers what claims take along. */
function takenAlong(outcomes: Outcomes): Set<string> {
  const ids = new Set<string>();
  const take = outcomes.take.bind(outcomes);
  outcomes.take = () => {
    const taken = take();
    for (const { id } of taken.done) ids.add(id);
    return taken;
  };
  return ids;
}

test(
  "what a claim takes along is held back by none of it either, nor are the claims",
  async (sql, url) => {
    await fullQueue(sql);
    const { kinds, starts, opened, end } = gated(
      MANY,
      async () => letGo = await lockRow(sql, locked.id),
    );
    let letGo = async () => {};
    const what = Array.from(
      { length: MANY },
      (_, i) => i === 20 ? "slow" : i === 70 ? "locked" : i === 130 ? "refused" : i,
    );
    const entries = await queue.enqueue(sql, what.map((payload) => ({ kind: "gate", payload })));
    const [slow, locked, refused] = [entries[20], entries[70], entries[130]];
    // What is behind them comes when they have made room.
    const behind = await queue.enqueue(
      sql,
      Array.from({ length: 2 * MANY }, () => ({ kind: "quick" })),
    );
    await using worker = await work(url, kinds, {
      ...{ concurrency: MANY, heldBackMs: HELD_BACK_MS, pollMaxMs: 10_000 },
    });
    const along = takenAlong(worker.outcomes);
    await opened;
    const openedMs = performance.now();
    const others = [...entries, ...behind].filter((it) => it !== slow && it !== locked);
    await waitFor(async () => {
      const jobs = await queue.get(sql, others.map(({ id }) => id));
      return jobs.every(({ finished_at }) => finished_at);
    }, "the others");
    const tookMs = performance.now() - openedMs;
    assert(tookMs < HELD_BACK_MS + 2 * ALLOWANCE_MS, `the others took ${tookMs} ms`);
    assert(along.has(locked.id), "it went with a claim");
    assertEquals((await statusOf(sql, slow)).status, "running");
    assertEquals((await statusOf(sql, locked).catch(() => null))?.status, "running");
    assert((await statusOf(sql, refused)).error?.includes('queue "full" is full'));

    await letGo();
    end();
    for (const it of [slow, locked]) {
      await waitFor(async () => (await statusOf(sql, it)).status === "done", it.id);
    }
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs
    where queue = 'default' and (status <> 'done' or attempt <> 1)`;
    assertEquals([n, Math.max(...starts.values())], [1, 1], "all but the refused one");
  },
);

test(
  "a claim whose reply is lost, with the outcomes it took along, loses none and repeats none",
  async (sql, url) => {
    await using proxy = startProxy(url);
    const count = 20;
    const { kinds, starts, opened } = gated(
      count,
      () => Promise.resolve(proxy.swallowReplyTo("exchange")),
    );
    const entries = await queue.enqueue(
      sql,
      Array.from({ length: count }, () => ({ kind: "gate", payload: 1 })),
    );
    const behind = await queue.enqueue(sql, Array.from({ length: 60 }, () => ({ kind: "quick" })));
    await using worker = await work(proxy.url, kinds, {
      ...{ concurrency: count, pollMaxMs: 100, limitMs: 700 },
    });
    const along = takenAlong(worker.outcomes);
    await opened;
    const all = async () => await queue.get(sql, [...entries, ...behind].map(({ id }) => id));
    const jobs = await waitFor(async () => {
      const jobs = await all();
      return jobs.every(({ finished_at }) => finished_at) && jobs;
    }, "all to end");
    assert(along.size > 0, "there were outcomes with it");
    assertEquals(jobs.filter(({ status }) => status !== "done"), []);
    assertEquals(Math.max(...starts.values()), 1, "none ran twice");
    // What that claim took was given back, and is all that has a second attempt.
    const again = jobs.filter(({ attempt }) => attempt !== 1);
    assert(again.length > 0 && again.length <= count / 2, `${again.length} were given back`);
    for (const { kind, attempt, releases } of again) {
      assertEquals([kind, attempt, releases], ["quick", 2, 1]);
    }
  },
);
