/** pg-boss as a contender. */
import pg from "pg";
import { PgBoss, type WorkOptions } from "pg-boss";
import type { Contender } from "../../dev/bench/contender.ts";
import { inBatches, transaction } from "./transaction.ts";

const QUEUE = "noop";

/**
 * Tried with 20,000 jobs and one and four processes: batches of 1000, 2000 and 4000 by 1, 2 and 4 workers
 * a process. One worker is best, 2000 as good as 4000. Without metadata, as is its default.
 */
const best: WorkOptions = {
  batchSize: 2000,
  localConcurrency: 1,
  pollingIntervalSeconds: 0.5,
  burstWhenBatchFull: true,
};

export const contender: Contender = {
  async install(url, how) {
    const boss = new PgBoss({
      connectionString: url,
      supervise: false,
      schedule: false,
    });
    await boss.start();
    await boss.createQueue(QUEUE, { notify: how === "best" });
    await boss.stop();
  },
  async open(url) {
    const boss = new PgBoss({
      connectionString: url,
      supervise: false,
      schedule: false,
    });
    await boss.start();
    const pool = new pg.Pool({ connectionString: url, max: 10 });
    return {
      bulk: (jobs) =>
        inBatches(
          jobs,
          10_000,
          (n) => boss.insert(QUEUE, Array.from({ length: n }, () => ({ data: {} }))),
        ),
      one: (tell = false) => boss.send(QUEUE, { tell }),
      inTransaction: () =>
        transaction(pool, (client) =>
          boss.send(QUEUE, {}, {
            db: { executeSql: (text, values) => client.query(text, values) },
          })),
      close: async () => {
        await pool.end();
        await boss.stop();
      },
    };
  },
  async worker(url, how, ran) {
    const boss = new PgBoss({
      ...{ connectionString: url, supervise: false, schedule: false },
      useListenNotify: how === "best",
    });
    boss.on("error", () => {});
    await boss.start();
    const options = how === "best" ? best : { localConcurrency: 10 };
    return {
      async start() {
        await boss.work<{ tell?: boolean }>(QUEUE, options, (jobs) => {
          for (const { data } of jobs) if (data.tell) ran();
          return Promise.resolve();
        });
      },
      stop: () => boss.stop({ graceful: false }),
    };
  },
};
