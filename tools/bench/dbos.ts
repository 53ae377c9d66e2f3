/** DBOS Transact as a contender. */
import { DBOS, DBOSClient } from "@dbos-inc/dbos-sdk";
import pg from "pg";
import type { Contender, How } from "../../dev/bench/contender.ts";
import { inBatches, transaction } from "./transaction.ts";

const options = {
  queueName: "noop",
  workflowName: "noop",
  appVersion: "bench",
};
const silent = { info() {}, warn() {}, error() {}, debug() {} };
const config = (url: string, poolSize: number) => ({
  ...{ name: "bench", applicationVersion: "bench", systemDatabaseUrl: url },
  ...{ systemDatabasePoolSize: poolSize, logger: silent },
});

/** Found best by tries of each: see `settings`. */
const queueOf = (how: How) =>
  how === "best"
    ? { workerConcurrency: 1000, minPollingIntervalMs: 10 }
    : { workerConcurrency: 10 };

export const contender: Contender = {
  async install(url, how) {
    DBOS.setConfig(config(url, 10));
    await DBOS.launch();
    await DBOS.registerQueue("noop", queueOf(how));
    await DBOS.shutdown();
  },
  async open(url) {
    const client = await DBOSClient.create({
      ...{
        systemDatabaseUrl: url,
        systemDatabasePoolSize: 20,
        applicationName: "bench",
      },
      logger: silent,
    });
    const pool = new pg.Pool({ connectionString: url, max: 10 });
    return {
      // It has no call for many: as many calls at once as its connections carry.
      bulk: (jobs) =>
        inBatches(
          jobs,
          100,
          (n) =>
            Promise.all(
              Array.from({ length: n }, () => client.enqueue(options, false)),
            ),
        ),
      one: (tell = false) => client.enqueue(options, tell),
      inTransaction: () =>
        transaction(
          pool,
          (tx) => client.enqueueInTransaction(tx, options, false),
        ),
      close: async () => {
        await client.destroy();
        await pool.end();
      },
    };
  },
  worker(url, how, ran) {
    DBOS.setConfig({
      ...config(url, how === "best" ? 20 : 10),
      listenQueues: ["noop"],
    });
    DBOS.registerWorkflow((tell: boolean) => {
      if (tell) ran();
      return Promise.resolve();
    }, { name: "noop" });
    return Promise.resolve({
      start: () => DBOS.launch(),
      stop: () => DBOS.shutdown(),
    });
  },
};
