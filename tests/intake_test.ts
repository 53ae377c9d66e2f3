/** How a worker gets its jobs: soon, though a queue has plenty; seldom asking, when there are none. */
import { assert, assertEquals } from "@std/assert";
import { z } from "zod";
import * as claims from "../claims.ts";
import { type Pool, schema } from "../db.ts";
import { startProxy } from "../dev/proxy.ts";
import { inline, type Kinds } from "../jobs/kind.ts";
import * as processes from "../processes.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { type AtWork, work } from "./intake.ts";

const CONCURRENCY = 20;
/** Within this a job starts that is next in line, besides what a busy machine may add. */
const SOON_MS = 1000;
const ALLOWANCE_MS = 1000;

const kinds: Kinds = {
  brief: inline({
    payload: z.unknown(),
    work: () => new Promise((resolve) => setTimeout(resolve, 5)),
  }),
  urgent: inline({ payload: z.unknown(), work: () => 1 }),
  /** Whose outcome goes with no claim. */
  chained: inline({
    payload: z.unknown(),
    work: (_, { next }) => next({ kind: "nobodys" }),
  }),
};

/** A worker whose queue has more than it gets done meanwhile, and when it started jobs of the kind `urgent`. */
async function busyWorker(sql: Pool, url: string) {
  for (let i = 0; i < 2; i++) {
    await queue.enqueue(sql, Array.from({ length: 10_000 }, () => ({ kind: "brief" })));
  }
  const startedMs = new Map<string, number>();
  let briefs = 0;
  const worker = await work(url, kinds, {
    concurrency: CONCURRENCY,
    onStart: ({ id, kind }) => {
      if (kind === "brief") briefs++;
      else startedMs.set(id, performance.now());
    },
  });
  await waitFor(() => briefs > 4 * CONCURRENCY, "it to be in the midst of it");
  return { worker, startedMs };
}

/** Waits until jobs have started, and sees that they did so soon. */
async function startSoon(startedMs: Map<string, number>, ids: string[], sinceMs: number) {
  await waitFor(() => ids.every((id) => startedMs.has(id)), "all to start");
  const tookMs = Math.max(...ids.map((id) => startedMs.get(id)!)) - sinceMs;
  assert(tookMs < SOON_MS + ALLOWANCE_MS, `they started after ${tookMs} ms`);
}

/** That there was plenty all the time, and claims without a look before. */
async function wasPlenty(sql: Pool, { statements }: AtWork): Promise<void> {
  const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs
    where kind = 'brief' and status = 'queued'`;
  assert(n > CONCURRENCY, `${n} are left: the worker was not busy all the time`);
  assert(statements.length > 20, `${statements.length} statements`);
}

test(
  "while a queue has plenty, what comes to stand before its place starts within a second",
  async (sql, url) => {
    // One that another worker has, from the head of the line.
    const other = await processes.register(sql, { role: "worker", name: "b", version: "0" });
    await queue.enqueue(sql, [{ kind: "urgent" }]);
    const [held] = await claims.claim(sql, { queue: "default", claim: "skip_locked" }, {
      ...{ worker: other, kinds: ["urgent"], most: 1, leaseS: 600, token: crypto.randomUUID() },
    });
    await queue.setQueue(sql, "other");
    const { worker, startedMs } = await busyWorker(sql, url);
    await using _ = worker;

    let sinceMs = performance.now();
    await queue.release(sql, other, held, "its worker stops");
    await startSoon(startedMs, [held.id], sinceMs);

    for (const priority of [1, 2]) {
      sinceMs = performance.now();
      const [{ id }] = await queue.enqueue(sql, [{ kind: "urgent", priority }]);
      await startSoon(startedMs, [id], sinceMs);
    }

    sinceMs = performance.now();
    const [elsewhere] = await queue.enqueue(sql, [{ kind: "urgent", queue: "other", priority: 3 }]);
    await startSoon(startedMs, [elsewhere.id], sinceMs);
    await wasPlenty(sql, worker);
  },
);

test(
  "more of them than one claim takes are not left for what has less priority",
  async (sql, url) => {
    const { worker, startedMs } = await busyWorker(sql, url);
    await using _ = worker;
    const sinceMs = performance.now();
    const entries = await queue.enqueue(
      sql,
      Array.from({ length: 8 * CONCURRENCY }, () => ({ kind: "urgent", priority: 1 })),
    );
    await startSoon(startedMs, entries.map(({ id }) => id), sinceMs);
    await wasPlenty(sql, worker);
  },
);

test("a worker claims until its places are full, however many it has", async (sql, url) => {
  for (const concurrency of [1, 3, 10]) {
    const gate = Promise.withResolvers<void>();
    const wait = inline({ payload: z.unknown(), work: () => gate.promise });
    let running = 0;
    const startedMs = performance.now();
    await queue.enqueue(sql, Array.from({ length: 2 * concurrency }, () => ({ kind: "wait" })));
    await using _ = await work(url, { wait }, {
      ...{ concurrency, pollMaxMs: 60_000, aheadMs: 50 },
      onStart: () => running++,
    });
    await waitFor(() => running === concurrency, `${concurrency} to run`);
    assert(performance.now() - startedMs < 5000, "at once, and not at the next poll");
    gate.resolve();
  }
});

test("so it is where jobs fall due all the time", async (sql, url) => {
  const { worker, startedMs } = await busyWorker(sql, url);
  await using _ = worker;
  // One each 5 ms, so that a look always finds one.
  await queue.enqueue(
    sql,
    Array.from({ length: 1000 }, (_, i) => ({ kind: "brief", delay_s: 0.005 * i })),
  );
  for (let i = 0; i < 2; i++) {
    const sinceMs = performance.now();
    const [{ id }] = await queue.enqueue(sql, [{ kind: "urgent", priority: 1 }]);
    await startSoon(startedMs, [id], sinceMs);
  }
  await wasPlenty(sql, worker);
});

test(
  "a worker looks often after work, then less and less, and soon again when there is some",
  async (sql, url) => {
    const [pollMinMs, pollMaxMs] = [20, 400];
    const realNow = performance.now;
    let skippedMs = 0;
    await using worker = await work(url, kinds, { concurrency: 2, pollMinMs, pollMaxMs });
    const { statements } = worker;
    /** Runs a job. @returns milliseconds from when it was there to its end */
    const runOne = async () => {
      const sinceMs = realNow.call(performance);
      const [{ id }] = await queue.enqueue(sql, [{ kind: "urgent" }]);
      await waitFor(async () => (await queue.get(sql, [id]))[0].status === "done", "the job");
      return realNow.call(performance) - sinceMs;
    };
    /** The time between looks, the mean of the next `count`: those that come late are late by themselves. */
    const gapMs = async (count: number) => {
      // Two more: one that was under way, and the wait of the one before.
      const [from, until] = [statements.length + 2, statements.length + 2 + count];
      await waitFor(() => statements.length > until, "looks");
      return (statements[until].atMs - statements[from].atMs) / count;
    };
    performance.now = () => realNow.call(performance) + skippedMs;
    try {
      await runOne();
      const soon = await gapMs(10);
      assert(soon >= 0.8 * pollMinMs && soon < 5 * pollMinMs, `${soon} ms after work`);
      skippedMs = 5000 + 2000; // past the busy time: a tenth of what is beyond it
      const later = await gapMs(2);
      assert(later >= 0.8 * 200 && later < pollMaxMs, `${later} ms when there was none for 2 s`);
      skippedMs += 60_000;
      const atLast = await gapMs(2);
      assert(atLast >= 0.8 * pollMaxMs && atLast < 3 * pollMaxMs, `${atLast} ms in the end`);
      await runOne();
      // Not by chance: each time it would be half of the longest wait.
      let tookMs = 0;
      for (let i = 0; i < 5; i++) tookMs += await runOne();
      assert(tookMs < 5 * pollMaxMs / 2, `five jobs took ${tookMs} ms`);
    } finally {
      performance.now = realNow;
    }
  },
);

test(
  "while the database does not answer a worker holds twice what it runs, and then loses nothing",
  async (sql, url) => {
    await using proxy = startProxy(url);
    const concurrency = 10;
    const entries = await queue.enqueue(
      sql,
      Array.from({ length: 1000 }, () => ({ kind: "urgent" })),
    );
    let most = 0;
    const starts: string[] = [];
    await using worker = await work(proxy.url, kinds, {
      ...{ concurrency, limitMs: 400 },
      onStart: ({ id }) => {
        starts.push(id);
        most = Math.max(most, worker.leases.held.size);
        if (starts.length === 100) proxy.silence();
      },
    });
    const { statements, leases } = worker;
    await waitFor(() => starts.length >= 100, "the database to fall silent");
    const before = statements.length;
    await waitFor(() => statements.length > before + 3, "it to ask in vain");
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.jobs
    where status = 'running'`;
    assert(leases.held.size > 0 && n > 0, "there are outcomes to record");
    proxy.mend();
    const jobs = await waitFor(async () => {
      const jobs = await queue.get(sql, entries.map(({ id }) => id));
      return jobs.every(({ finished_at }) => finished_at) && jobs;
    }, "all to be done");
    assert(most <= 2 * concurrency, `it held ${most}`);
    assertEquals(jobs.filter(({ status }) => status !== "done"), []);
    assertEquals(starts.length, entries.length, "each ran once");
    assertEquals(new Set(starts).size, entries.length);
  },
);

test("a worker that claims and cannot record stops at twice what it runs", async (sql, url) => {
  await using proxy = startProxy(url);
  const concurrency = 10;
  const entries = await queue.enqueue(
    sql,
    Array.from({ length: 100 }, () => ({ kind: "chained" })),
  );
  proxy.silenceThatSay(".settle(");
  let most = 0;
  await using worker = await work(proxy.url, kinds, {
    ...{ concurrency, limitMs: 400 },
    onStart: () => most = Math.max(most, worker.leases.held.size),
  });
  await waitFor(() => most > concurrency, "it to claim more than it runs");
  const before = worker.statements.length;
  await waitFor(() => worker.statements.length > before + 3, "it to try again");
  proxy.mend();
  await waitFor(async () => {
    const jobs = await queue.get(sql, entries.map(({ id }) => id));
    return jobs.every(({ status }) => status === "done");
  }, "all to be done");
  assertEquals(most, 2 * concurrency);
});
