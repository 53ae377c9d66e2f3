/**
 * A team's queue of before, for tests/moving_test.ts: `deno run -A old_queue.ts PEER COMMAND URL`.
 *
 *     fill   installs it, and brings it to a state with a job of each sort that there is to move:
 *            `to` in its payload says which. One of them is running still when this ends.
 *     run    runs what is due of the task, and prints the payloads that it got, as JSON
 */
import { Logger, makeWorkerUtils, runOnce } from "graphile-worker";
import pg from "pg";
import { PgBoss } from "pg-boss";

interface Mail {
  to: string;
}
const LATER = new Date("2099-01-01T00:00:00Z");

const logger = new Logger(() => () => {});
async function runMails(
  url: string,
  send: (mail: Mail) => void | Promise<void>,
  concurrency = 10,
) {
  const taskList = { sendMail: (mail: unknown) => send(mail as Mail) };
  await runOnce({
    connectionString: url,
    logger,
    taskList,
    concurrency,
    noHandleSignals: true,
  });
}

const graphileWorker = {
  async fill(url: string) {
    const utils = await makeWorkerUtils({ connectionString: url, logger });
    await utils.migrate();
    await utils.addJob("sendMail", { to: "failed once" });
    await runMails(url, () => {
      throw new Error("no such mailbox");
    });
    await utils.addJob("sendMail", { to: "running" }, { priority: -100 });
    await new Promise<void>((begun) => {
      runMails(url, () => {
        begun();
        return new Promise(() => {}); // it runs on until this process is gone
      }, 1);
    });
    await utils.addJob("sendMail", { to: "plain" });
    await utils.addJob("sendMail", { to: "urgent" }, { priority: -10 });
    await utils.addJob("sendMail", { to: "later" }, { runAt: LATER });
    await utils.addJob("sendMail", { to: "keyed" }, { jobKey: "mail-7" });
    await utils.addJob("sendMail", { to: "once" }, { maxAttempts: 1 });
    await utils.addJob("sendMail", { to: "given up" }, { jobKey: "gone", maxAttempts: 1 });
    const pool = new pg.Pool({ connectionString: url, max: 1 });
    await pool.query("update graphile_worker._private_jobs set attempts = 1 where key = 'gone'");
    await pool.end();
    await utils.addJob("another task", { to: "another" });
  },
  async run(url: string) {
    const got: Mail[] = [];
    await runMails(url, (mail) => void got.push(mail));
    return got;
  },
};

async function startBoss(url: string) {
  const boss = new PgBoss({ connectionString: url, supervise: false, schedule: false });
  await boss.start();
  return boss;
}

const pgBoss = {
  async fill(url: string) {
    const boss = await startBoss(url);
    await boss.createQueue("send/mail", { retryLimit: 4 });
    await boss.createQueue("another-task");
    await boss.send("send/mail", { to: "running" });
    await boss.fetch("send/mail");
    await boss.send("send/mail", { to: "failed once" });
    const [failed] = await boss.fetch("send/mail");
    await boss.fail("send/mail", failed.id, { message: "no such mailbox" });

    await boss.send("send/mail", { to: "plain" });
    await boss.send("send/mail", { to: "urgent" }, { priority: 10 });
    await boss.send("send/mail", { to: "later" }, { startAfter: LATER });
    await boss.send("send/mail", { to: "keyed" }, { singletonKey: "mail-7" });
    await boss.send("send/mail", { to: "keyed too" }, { singletonKey: "mail-7" });
    await boss.send("send/mail", { to: "once" }, { retryLimit: 0 });
    const id = await boss.send("send/mail", { to: "given up" });
    await boss.cancel("send/mail", id!);
    await boss.send("another-task", { to: "another" });
  },
  async run(url: string) {
    const boss = await startBoss(url);
    const jobs = await boss.fetch<Mail>("send/mail", { batchSize: 100 });
    await boss.complete("send/mail", jobs.map((job) => job.id));
    return jobs.map((job) => job.data);
  },
};

const [peer, command, url] = Deno.args;
const queue = { "graphile-worker": graphileWorker, "pg-boss": pgBoss }[peer]!;
if (command === "fill") await queue.fill(url);
else console.log(JSON.stringify(await queue.run(url)));
Deno.exit(0);
