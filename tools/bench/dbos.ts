/** DBOS Transact as a contender. */
import { DBOS, DBOSClient } from "@dbos-inc/dbos-sdk";
import { enqueueWorkflows, prepareEnqueuedWorkflow } from "@dbos-inc/dbos-sdk/eventreceiver";
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

/** A short poll and many at a time; unlike with the other contenders, not tuned further. */
const queueOf = (how: How) =>
  how === "best"
    ? { workerConcurrency: 1000, minPollingIntervalMs: 10 }
    : { workerConcurrency: 10 };

/**
 * Its calls enqueue one workflow each. What its receivers of events use enqueues many, and needs the
 * application itself.
 */
async function launched(url: string): Promise<(jobs: number) => Promise<void>> {
  DBOS.setConfig({ ...config(url, 10), listenQueues: ["none"] });
  const noop = DBOS.registerWorkflow((_tell: boolean) => Promise.resolve(), { name: "noop" });
  await DBOS.launch();
  const prepare = () =>
    prepareEnqueuedWorkflow(noop, [false], {
      ...{ queueName: "noop", workflowID: crypto.randomUUID() },
    });
  return (jobs) =>
    inBatches(
      jobs,
      1000,
      async (n) => await enqueueWorkflows(await Promise.all(Array.from({ length: n }, prepare))),
    );
}

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
    let app: ReturnType<typeof launched> | undefined;
    return {
      bulk: async (jobs) => await (await (app ??= launched(url)))(jobs),
      one: (tell = false) => client.enqueue(options, tell),
      inTransaction: () =>
        transaction(
          pool,
          (tx) => client.enqueueInTransaction(tx, options, false),
        ),
      close: async () => {
        await client.destroy();
        if (app) await app.then(() => DBOS.shutdown());
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
