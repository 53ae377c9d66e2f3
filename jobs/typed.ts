/** The enqueue of a table of kinds, which knows each kind's payload; and running jobs in a test. */
import type { z } from "zod";
import { type Pool, type Sql, via } from "../db.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { traceParent } from "../tracing.ts";
import { checkPayload, type Kinds } from "./kind.ts";
import { Outcomes } from "./outcomes.ts";
import { run } from "./run.ts";
import { Stopper } from "./stopper.ts";

/** What else an enqueue may say. */
export type EnqueueOptions = Omit<queue.NewJob, "kind" | "payload">;

type Payload<K extends Kinds, N extends keyof K> = z.input<K[N]["payload"]>;
/** A job of one of the kinds, with the payload of that kind. */
export type TypedJob<K extends Kinds> = {
  [N in keyof K & string]: EnqueueOptions & { kind: N; payload: Payload<K, N> };
}[keyof K & string];

/** How one job of {@linkcode typed}'s drainForTest ended. */
export interface Drained {
  id: string;
  kind: string;
  outcome: queue.Outcome | null;
}

/** The typed functions over queue.ts's own, for a table of kinds. */
export function typed<K extends Kinds>(kinds: K) {
  async function enqueueMany(sql: Sql, jobs: readonly TypedJob<K>[]): Promise<queue.Enqueued[]> {
    for (const job of jobs) checkPayload(kinds, job.kind, job.payload);
    const trace_parent = traceParent();
    return await queue.enqueue(sql, jobs.map((job) => ({ trace_parent, ...job })));
  }
  return {
    /**
     * Enqueues a job on `sql`, a pool or the caller's transaction.
     *
     * @throws PayloadError when the payload does not fit the kind
     * @throws queue.EnqueueError when the queue refuses it
     */
    async enqueue<N extends keyof K & string>(
      sql: Sql,
      kind: N,
      payload: Payload<K, N>,
      options: EnqueueOptions = {},
    ): Promise<queue.Enqueued> {
      const [entry] = await enqueueMany(sql, [{ ...options, kind, payload } as TypedJob<K>]);
      return entry;
    },
    /** Enqueues many jobs in one statement, all or none. */
    enqueueMany,
    /**
     * Runs, one by one in this process, what is due now in this database, and what that enqueues, so
     * that a team can test its own kinds without a worker, on a database of the test's own.
     * Throws after `most` jobs, should they never end.
     */
    async drainForTest(sql: Pool, most = 1000): Promise<Drained[]> {
      return await drain(sql, kinds, most);
    },
  };
}

/** Claims in a row that may come back empty though something is due. */
const MAX_EMPTY = 100;

async function drain(sql: Pool, kinds: Kinds, most: number): Promise<Drained[]> {
  const db = via(sql);
  const names = Object.keys(kinds);
  const worker = await processes.register(sql, {
    role: "worker",
    name: "drainForTest",
    version: "test",
    kinds: names,
    knownKinds: names,
  });
  const outcomes = new Outcomes(db, worker, new AbortController().signal);
  const drained: Drained[] = [];
  let empty = 0;
  try {
    for (;;) {
      await claims.promote(sql);
      const { ready } = await claims.look(sql, null, names);
      if (ready.length === 0) return drained;
      if (drained.length === most) throw new Error(`still not empty after ${most} jobs`);
      const claim = { worker, kinds: names, most: 1, leaseS: 3600, token: crypto.randomUUID() };
      const jobs = await claims.claim(sql, ready[0], claim);
      empty = jobs.length === 0 ? empty + 1 : 0;
      if (empty === MAX_EMPTY) throw new Error("the next job is held by an open transaction");
      for (const job of jobs) {
        const runner = { db, files: db, worker, kinds, maxFileBytes: Infinity };
        const outcome = await run(runner, job, new Stopper());
        if (outcome) await outcomes.record(outcome);
        drained.push({ id: job.id, kind: job.kind, outcome });
      }
    }
  } finally {
    await processes.deregister(sql, worker);
  }
}
