/** The part of a worker that claims, runs and records, in the test's own process. */
import { repeat } from "../config.ts";
import { Database, type Pool } from "../db.ts";
import { Intake } from "../intake.ts";
import type { Kinds } from "../jobs/kind.ts";
import { Outcomes } from "../jobs/outcomes.ts";
import { runToEnd } from "../jobs/run.ts";
import { Leases } from "../lease.ts";
import * as processes from "../processes.ts";
import type { Job } from "../queue.ts";

export interface Options {
  concurrency: number;
  pollMinMs?: number;
  pollMaxMs?: number;
  heldBackMs?: number;
  /** None by default. */
  aheadMs?: number;
  /** For a reply. */
  limitMs?: number;
  /** Told of each job that starts. */
  onStart?: (job: Job) => void;
}

/** A worker at work; `statements` are those of its claims and outcomes, as they were begun. */
export interface AtWork extends AsyncDisposable {
  outcomes: Outcomes;
  leases: Leases;
  statements: { atMs: number }[];
  /** Of its own process. */
  id: string;
}

/** Notes when statements are begun. */
class Noted extends Database {
  readonly statements: { atMs: number }[] = [];
  override run<T>(f: (sql: Pool) => Promise<T>, limitMs?: number): Promise<T> {
    this.statements.push({ atMs: performance.now() });
    return super.run(f, limitMs);
  }
}

/** Works the jobs of all queues. Statements are not prepared, so that a proxy sees the text of each. */
export async function work(url: string, kinds: Kinds, options: Options): Promise<AtWork> {
  const { concurrency, pollMinMs = 5, pollMaxMs = 100, heldBackMs = 1000 } = options;
  const { aheadMs = 0, limitMs = 5000, onStart } = options;
  const db = new Noted(url, { max: 2, prepare: false }, limitMs);
  const pulse = new Database(url, { max: 1, prepare: false }, limitMs);
  const serves = Object.keys(kinds);
  const id = await db.run((sql) =>
    processes.register(sql, { role: "worker", name: "a", version: "0", kinds: serves, concurrency })
  );
  const [stop, hurry] = [new AbortController(), new AbortController()];
  const outcomes = new Outcomes(db, id, hurry.signal, 5, heldBackMs);
  const leases = new Leases(pulse, id, 100, 60, 60);
  const polls = { pollMinMs, pollMaxMs, aheadMs, heldBackMs };
  const settings = { concurrency, queues: null, leaseS: 60, ...polls };
  const intake: Intake = new Intake(settings, serves, db, leases, outcomes, (held) => {
    const runner = { db, files: db, worker: id, kinds, maxFileBytes: 1000 };
    onStart?.(held.job);
    const ran = () => intake.ran();
    held.ended = runToEnd(runner, held.job, held.stopper, outcomes, ran).finally(() => {
      leases.drop(held);
      intake.ended();
    });
  });
  const loops = [
    intake.run(stop.signal),
    repeat("heartbeat", () => leases.beat(), stop.signal, () => leases.urgent),
  ];
  return {
    ...{ outcomes, leases, id, statements: db.statements },
    async [Symbol.asyncDispose]() {
      stop.abort();
      const timer = setTimeout(() => hurry.abort(), 2000);
      await Promise.all(loops); // a claim that was under way starts jobs
      intake.giveBack();
      await Promise.all([...leases.held.values()].map(({ ended }) => ended));
      clearTimeout(timer);
      await Promise.all([db.close(), pulse.close()]);
    },
  };
}
