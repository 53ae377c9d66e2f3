/** graphile-worker as a contender. */
import { Logger, makeWorkerUtils, run, type Runner, WorkerPreset } from "graphile-worker";
import pg from "pg";
import type { Contender } from "../../dev/bench/contender.ts";
import { inBatches, transaction } from "./transaction.ts";

const quiet = new Logger(() => () => {});

/** Found best by tries of each: see `settings`. */
const best: GraphileConfig.WorkerOptions = {
  concurrentJobs: 24,
  maxPoolSize: 10,
  localQueue: { size: 500 },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
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
