/** graphile-worker as a contender. */
import { Logger, makeWorkerUtils, run, type Runner, WorkerPreset } from "graphile-worker";
import pg from "pg";
import type { Contender } from "../../dev/bench/contender.ts";
import { inBatches, transaction } from "./transaction.ts";

const quiet = new Logger(() => () => {});

/**
 * Tried with 20,000 jobs and one and four processes: 24, 100 and 500 jobs at a time, which are alike, and
 * a batch delay of 0 and of 10 ms, of which 10 with 500 at a time is the faster by a quarter.
 */
const best: GraphileConfig.WorkerOptions = {
  concurrentJobs: 500,
  maxPoolSize: 10,
  localQueue: { size: 500 },
  completeJobBatchDelay: 10,
  failJobBatchDelay: 10,
};

export const contender: Contender = {
  async install(url) {
    const utils = await makeWorkerUtils({
      connectionString: url,
      logger: quiet,
    });
    await utils.migrate();
    await utils.release();
  },
  async open(url) {
    const pgPool = new pg.Pool({ connectionString: url, max: 10 });
    const utils = await makeWorkerUtils({ pgPool, logger: quiet });
    const spec = { identifier: "noop", payload: {} };
    return {
      bulk: (jobs) =>
        inBatches(
          jobs,
          10_000,
          (n) => utils.addJobs(Array.from({ length: n }, () => spec)),
        ),
      one: (tell = false) => utils.addJob("noop", { tell }),
      // Its library adds jobs on its own pool only: in a transaction it is the SQL function.
      inTransaction: () =>
        transaction(
          pgPool,
          (client) =>
            client.query("select graphile_worker.add_job($1, $2::json)", [
              "noop",
              "{}",
            ]),
        ),
      close: async () => {
        await utils.release();
        await pgPool.end();
      },
    };
  },
  worker(url, how, ran) {
    let runner: Runner | undefined;
    const taskList = {
      noop: (payload: unknown) => {
        if ((payload as { tell?: boolean }).tell) ran();
      },
    };
    const own = how === "best" ? best : { concurrentJobs: 10 };
    const worker = { ...own, connectionString: url, logger: quiet };
    return Promise.resolve({
      async start() {
        runner = await run({
          preset: { extends: [WorkerPreset], worker },
          taskList,
        });
      },
      stop: async () => await runner?.stop(),
    });
  },
};
