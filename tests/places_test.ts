/** Jobs claimed ahead: many at a time while they are quick, and back in line when one is not. */
import { assert, assertEquals } from "@std/assert";
import { z } from "zod";
import { type Pool, schema } from "../db.ts";
import { inline, type Kinds } from "../jobs/kind.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { type AtWork, work } from "./intake.ts";

/** So many that the pace is known. */
const MANY = 300;
const HELD_BACK_MS = 300;
const ALLOWANCE_MS = 2000;

/** A worker of `concurrency` that works off `MANY` quick jobs, and then has one that waits for `open`. */
class Slow implements AsyncDisposable {
  readonly gate = Promise.withResolvers<void>();
  readonly starts: string[] = [];
  /** Running at a time. */
  running = 0;
  mostRunning = 0;
  worker!: AtWork;
  /** The ids of those before the slow one, of it, and of those after it. */
  quick: string[] = [];
  slow = "";
  after: string[] = [];

  readonly kinds: Kinds = {
    quick: inline({
      payload: z.unknown(),
      work: async () => {
        this.mostRunning = Math.max(this.mostRunning, ++this.running);
        await null;
        this.running--;
      },
    }),
    slow: inline({ payload: z.unknown(), work: () => this.gate.promise }),
  };

  static async start(sql: Pool, url: string, heldBackMs: number): Promise<Slow> {
    const it = new Slow();
    const entries = await queue.enqueue(
      sql,
      Array.from({ length: 2 * MANY + 1 }, (_, i) => ({ kind: i === MANY ? "slow" : "quick" })),
    );
    const ids = entries.map(({ id }) => id);
    [it.quick, [it.slow], it.after] = [
      ids.slice(0, MANY),
      ids.slice(MANY, MANY + 1),
      ids.slice(MANY + 1),
    ];
    it.worker = await work(url, it.kinds, {
      ...{ concurrency: 1, aheadMs: 1000, heldBackMs },
      onStart: ({ id }) => it.starts.push(id),
    });
    await waitFor(() => it.starts.includes(it.slow), "the slow one");
    return it;
  }

  async [Symbol.asyncDispose]() {
    this.gate.resolve();
    await this.worker[Symbol.asyncDispose]();
  }
}

const allDone = async (sql: Pool, ids: string[]) =>
  await waitFor(async () => {
    const states = await counted(sql, ids);
    return states.length === 1 && states[0].status === "done";
  }, "all to be done");

const counted = async (sql: Pool, ids: string[]) =>
  await queue.list(sql<{ status: string; n: number; attempts: number; releases: number }[]>`
    select status, count(*)::integer as n, max(attempt) as attempts, sum(releases)::integer as releases
    from ${sql(schema)}.jobs where id = any(${`{${ids}}`}::bigint[]) group by status`);

test(
  "quick jobs are claimed many at a time, and run in their order, as many at a time as may",
  async (sql, url) => {
    await using slow = await Slow.start(sql, url, 60_000);
    const { worker: { statements }, starts, quick } = slow;
    assertEquals(starts, [...quick, slow.slow]);
    assertEquals(slow.mostRunning, 1);
    assert(statements.length < MANY / 3, `${statements.length} statements`);
    slow.gate.resolve();
    await waitFor(() => starts.length === 2 * MANY + 1, "all");
    assertEquals(starts.slice(MANY + 1), slow.after);
  },
);

test(
  "what a slow job keeps waiting goes back in line, which counts for nothing, and no more is claimed",
  async (sql, url) => {
    await using slow = await Slow.start(sql, url, HELD_BACK_MS);
    const sinceMs = performance.now();
    const back = await waitFor(async () => {
      const [state, ...others] = await counted(sql, slow.after);
      return others.length === 0 && state.status === "queued" && state;
    }, "all that wait to be back in line");
    const tookMs = performance.now() - sinceMs;
    assert(tookMs < HELD_BACK_MS + ALLOWANCE_MS, `after ${tookMs} ms`);
    assertEquals([back.attempts, back.releases], [1, 0], "some had been claimed");
    const asked = slow.worker.statements.length;
    await new Promise((done) => setTimeout(done, 2 * HELD_BACK_MS));
    assertEquals(await counted(sql, slow.after), [back]);
    assertEquals(slow.worker.statements.length, asked);

    slow.gate.resolve();
    await allDone(sql, slow.after);
    assertEquals(slow.starts.length, 2 * MANY + 1, "none began twice");
  },
);

test("a worker that stops gives back what it claimed ahead", async (sql, url) => {
  const slow = await Slow.start(sql, url, 60_000);
  const runs = async () =>
    (await counted(sql, slow.after)).find(({ status }) => status === "running")?.n ?? 0;
  assert(await runs() > 0, "some were claimed ahead");
  const stopped = slow.worker[Symbol.asyncDispose]();
  try {
    await waitFor(
      async () => await runs() === 0,
      "them to be back in line, while the slow one runs",
    );
    for (const { releases } of await counted(sql, slow.after)) assertEquals(releases, 0);
  } finally {
    slow.gate.resolve();
    await stopped;
  }
});

test(
  "nothing that was claimed ahead begins once it is cancelled, or its lease may have run out",
  async (sql, url) => {
    await using slow = await Slow.start(sql, url, 60_000);
    const claimed = await queue.list(sql<{ id: string }[]>`
    select id::text from ${
      sql(schema)
    }.jobs where status = 'running' and id > ${slow.slow} order by id`);
    assert(claimed.length > 2, "some were claimed ahead");
    const [{ id }] = claimed;
    await queue.cancel(sql, id);
    await waitFor(
      () => slow.worker.leases.held.get(id)?.stopper.reason,
      "the worker to hear of it",
    );
    const realNow = Date.now;
    // As if the process had been frozen for three minutes, which is longer than its lease.
    Date.now = () => realNow() + 180_000;
    slow.gate.resolve();
    await slow.gate.promise;
    await new Promise((done) => setTimeout(done)); // the next ones would have begun before that
    Date.now = realNow;
    await allDone(sql, slow.after.filter((it) => it !== id));
    const jobs = await queue.get(sql, claimed.slice(1).map(({ id }) => id));
    assertEquals(jobs.filter(({ attempt }) => attempt !== 2), [], "each went back, and ran then");
    assert(!slow.starts.includes(id));
    assertEquals((await queue.get(sql, [id]))[0].status, "cancelled");
  },
);

test("of a queue with limits nothing is claimed ahead", async (sql, url) => {
  await queue.setQueue(sql, "limited", { claim: "lock", max_running: MANY });
  await queue.enqueue(
    sql,
    Array.from({ length: MANY }, () => ({ kind: "quick", queue: "limited" })),
  );
  let most = 0;
  const { kinds } = new Slow();
  await using worker = await work(url, kinds, {
    ...{ concurrency: 2, aheadMs: 1000 },
    onStart: () => most = Math.max(most, worker.leases.held.size),
  });
  await waitFor(async () => {
    const [{ n }] = await sql`select count(*)::integer as n from ${
      sql(schema)
    }.jobs where status = 'done'`;
    return n === MANY;
  }, "all");
  assert(most <= 4, `it held ${most}`);
});
