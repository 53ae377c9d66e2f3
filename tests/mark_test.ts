/** Claims that begin at a mark, in random histories: nothing in line stays unseen, or is claimed twice. */
import { assert, assertEquals } from "@std/assert";
import * as claims from "../claims.ts";
import { type Pool, schema } from "../db.ts";
import * as processes from "../processes.ts";
import * as queue from "../queue.ts";
import { databaseTest as test } from "./database.ts";

const STEPS = 300;
const kinds = ["a"];
const QUEUES = ["default", "other"];

/** Mulberry32: the same numbers each time. */
function numbers(seed: number): () => number {
  return () => {
    seed = seed + 0x6d2b79f5 | 0;
    let t = Math.imul(seed ^ seed >>> 15, 1 | seed);
    t = t + Math.imul(t ^ t >>> 7, 61 | t) ^ t;
    return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
  };
}

/** A queue's line, and which of it are not before a mark. */
interface InLine {
  id: string;
  alone: boolean;
  after: boolean;
}

async function lineOf(sql: Pool, name: string, mark: claims.Place | null): Promise<InLine[]> {
  const { priority = null, due_us = null, id = null } = mark ?? {};
  return await queue.list(sql<InLine[]>`
    select j.id::text, alone, ${id}::text is null or priority < ${priority}::text::integer or
      (priority = ${priority}::text::integer and
        (extract(epoch from due_at) * 1000000, j.id) >= (${due_us}::text::numeric, ${id}::text::bigint)) as after
    from ${sql(schema)}.jobs j where queue = ${name} and status = 'queued'
    order by priority desc, due_at, j.id`);
}

/** Jobs and a claimer that goes by the rule of intake.ts, in a random history. */
class History {
  readonly running = new Map<string, queue.Job>();
  readonly attempts = new Map<string, number>();
  plenty: { from: claims.Ready; mark: claims.Place | null } | null = null;
  withMark = 0;

  constructor(
    readonly sql: Pool,
    readonly worker: string,
    readonly random: () => number,
  ) {}

  int = (n: number) => Math.floor(this.random() * n);

  /** One of those that run, which does so no more. */
  take(): queue.Job | undefined {
    const jobs = [...this.running.values()];
    const job = jobs[this.int(jobs.length)];
    if (job) this.running.delete(job.id);
    return job;
  }

  async enqueue(): Promise<void> {
    const when = () => [{}, { delay_s: 0.02 }, { due_at: new Date(Date.now() - this.int(9000)) }];
    await queue.enqueue(
      this.sql,
      Array.from({ length: 1 + this.int(6) }, () => ({
        ...{ kind: "a", queue: QUEUES[this.int(2)], priority: this.int(4) - 1 },
        ...when()[this.int(3)],
      })),
    );
  }

  /** Ends one that runs, in one of the ways that bring it back, or for good. */
  async end(): Promise<void> {
    const job = this.take();
    if (!job) return;
    const { id, attempt } = job;
    const outcome = ([
      { id, attempt, outcome: "done", result: 1 },
      { id, attempt, outcome: "released", error: "" },
      { id, attempt, outcome: "failed", error: "", delay_s: 0.01 },
      { id, attempt, outcome: "snoozed", delay_s: 0 },
    ] satisfies queue.Outcome[])[this.int(4)];
    assertEquals(await queue.settle(this.sql, this.worker, [outcome], 1000), [id]);
  }

  /** A worker is lost with some, which go back, to run alone where they were lost together. */
  async recover(): Promise<void> {
    const lost = Array.from({ length: 1 + this.int(3) }, () => this.take()?.id ?? "0");
    await this.sql`update ${this.sql(schema)}.jobs set lease_until = now() - interval '1 second'
      where id = any(${queue.names(lost)}::text::bigint[]) and status = 'running'`;
    await queue.recover(this.sql, 100, 1000);
  }

  /** A claim as intake.ts makes it. @returns whether there was anything */
  async claim(): Promise<boolean> {
    if (!this.plenty) {
      const { ready } = await claims.look(this.sql, null, kinds);
      for (const name of QUEUES) {
        const [first] = await lineOf(this.sql, name, null);
        const seen = ready.find((from) => from.queue === name);
        assertEquals([seen?.head?.id, seen?.alone], [first?.id, first?.alone], "the look's");
      }
      if (ready.length === 0) return false;
      // With the mark or without, which is to be the same.
      this.plenty = { from: ready[0], mark: this.int(2) ? ready[0].head! : null };
    }
    const { from, mark } = this.plenty;
    const most = 1 + this.int(8);
    const idle = this.running.size === 0;
    const line = await lineOf(this.sql, from.queue, mark);
    const expected = from.alone && idle
      ? line.filter(({ alone }) => alone).slice(0, 1)
      : line.filter(({ alone, after }) => !alone && after).slice(0, most);
    const done = this.int(3) ? [] : [this.take()].flatMap((job) => job ? [job] : []);
    const { jobs, last, stand } = await claims.exchange(
      this.sql,
      from,
      { worker: this.worker, kinds, most, leaseS: 600, idle, token: crypto.randomUUID() },
      done.map(({ id, attempt }) => ({ id, attempt, result: 1 })),
      mark,
    );
    assertEquals(jobs.map(({ id }) => id), expected.map(({ id }) => id));
    assertEquals([...stand], done.map(({ id }) => id));
    assertEquals(last?.id, expected.at(-1)?.id);
    if (mark) this.withMark++;
    this.started(jobs);
    this.plenty = jobs.length < most ? null : { from, mark: last };
    return true;
  }

  started(jobs: queue.Job[]): void {
    for (const job of jobs) {
      assert(!this.running.has(job.id), `${job.id} runs already`);
      assertEquals(job.attempt, (this.attempts.get(job.id) ?? 0) + 1);
      this.attempts.set(job.id, job.attempt);
      this.running.set(job.id, job);
    }
  }

  /** Two claims at once, of which one knows a mark. */
  async claimTwice(): Promise<void> {
    const from: claims.Ready = { queue: QUEUES[this.int(2)], claim: "skip_locked" };
    const line = await lineOf(this.sql, from.queue, null);
    const { id } = line[this.int(line.length)] ?? { id: "0" };
    const [mark = null] = await this.sql<claims.Place[]>`
      select priority, (extract(epoch from due_at) * 1000000)::float8 as due_us, id::text
      from ${this.sql(schema)}.jobs where id = ${id}`;
    const both = await Promise.all([mark, null].map((mark) =>
      claims.exchange(
        this.sql,
        from,
        { worker: this.worker, kinds, most: 3, leaseS: 600, token: crypto.randomUUID() },
        [],
        mark,
      )
    ));
    for (const { jobs } of both) this.started(jobs);
  }

  /** Claims until there is nothing, with looks as the rule has them. */
  async drain(): Promise<void> {
    for (let claimed = 0; await this.claim(); claimed++) {
      assert(claimed < 2000, "the claims find no end");
      // What is to run alone waits for that.
      while (this.plenty?.from.alone && this.running.size > 0) {
        await this.finish(), this.plenty = null;
      }
      if (!this.plenty && this.running.size > 0) await this.finish();
    }
    for (const name of QUEUES) assertEquals(await lineOf(this.sql, name, null), []);
  }

  async finish(): Promise<void> {
    for (const { id, attempt } of this.running.values()) {
      await queue.finish(this.sql, this.worker, { id, attempt }, 1);
    }
    this.running.clear();
  }
}

for (const seed of [1, 2]) {
  test(
    `claims that begin at a mark leave out only what is before it, and nothing for long (seed ${seed})`,
    async (sql) => {
      await queue.setQueue(sql, "other");
      const worker = await processes.register(sql, { role: "worker", name: "a", version: "0" });
      const history = new History(sql, worker, numbers(seed));
      const ways: (() => Promise<unknown>)[] = [
        ...Array.from({ length: 3 }, () => () => history.enqueue()),
        ...Array.from({ length: 3 }, () => () => history.end()),
        ...Array.from({ length: 5 }, () => () => history.claim()),
        () => history.recover(),
        () => claims.promote(sql),
        () => history.claimTwice(),
        () => Promise.resolve(history.plenty = null), // it is time for a look
      ];
      for (let step = 0; step < STEPS; step++) {
        await ways[history.int(ways.length)]();
        if (step % 100 === 99) await history.drain();
      }
      await history.drain();
      assert(history.withMark > 20, `${history.withMark} claims at a mark`);
    },
  );
}
