/** I9: no session state, so all of it runs through PgBouncer in transaction mode. */
import { assert, assertEquals } from "@std/assert";
import { connect, schema, via, withQueueLock } from "../db.ts";
import { outputsOf, writeFile } from "../files.ts";
import * as queue from "../queue.ts";
import { testDatabase, waitFor } from "./database.ts";
import { startWorker } from "./processes.ts";

const PGBOUNCER = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"].find((path) => {
  try {
    return Deno.statSync(path).isFile;
  } catch {
    return false;
  }
});

/** Before 1.21 it asks one server for what was prepared on another. */
const carriesPrepared = PGBOUNCER !== undefined && (() => {
  const { stdout } = new Deno.Command(PGBOUNCER, { args: ["--version"] }).outputSync();
  const [, major, minor] = /PgBouncer (\d+)\.(\d+)/.exec(new TextDecoder().decode(stdout))!;
  return Number(major) > 1 || Number(minor) >= 21;
})();

/** Starts PgBouncer before the server of `url`. It runs as nobody, since it refuses to run as root. */
async function startPgBouncer(url: string) {
  const { hostname, port, username, password } = new URL(url);
  const listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
  const pooled = new URL(url);
  pooled.port = String((listener.addr as Deno.NetAddr).port);
  listener.close();
  const folder = await Deno.makeTempDir();
  await Deno.writeTextFile(
    `${folder}/pgbouncer.ini`,
    `[databases]
* = host=${hostname} port=${port} user=${username} password=${password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = ${pooled.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 5
`,
  );
  await Deno.chmod(folder, 0o755);
  const child = new Deno.Command(PGBOUNCER!, {
    args: [`${folder}/pgbouncer.ini`],
    stdin: "null",
    stdout: "null",
    stderr: "piped",
    ...(Deno.uid() === 0 ? { uid: 65534, gid: 65534 } : {}),
  }).spawn();
  let log = "";
  const reading = (async () => {
    for await (const text of child.stderr.pipeThrough(new TextDecoderStream())) log += text;
  })();
  await waitFor(() => log.includes("process up"), "PgBouncer to start").catch((error) => {
    throw new Error(`${error.message}: ${log}`);
  });
  return {
    url: pooled.href,
    log: () => log,
    async [Symbol.asyncDispose]() {
      child.kill("SIGKILL");
      await child.status;
      await reading;
      await Deno.remove(folder, { recursive: true });
    },
  };
}

for (const prepare of [false, true]) {
  const missing = PGBOUNCER === undefined
    ? " (skipped: pgbouncer is not installed)"
    : prepare && !carriesPrepared
    ? " (skipped: this PgBouncer is older than 1.21)"
    : "";
  Deno.test({
    name: "workers, files, locks and all three claims go through PgBouncer in transaction mode" +
      `${prepare ? ", with prepared statements" : ""}${missing}`,
    ignore: missing !== "",
    async fn() {
      await using database = await testDatabase();
      await using pooler = await startPgBouncer(database.url);
      const sql = connect(pooler.url, { max: 3, prepare, pipeline: false });
      try {
        await queue.setQueue(sql, "in-turns", { max_running: 3 });
        await queue.setQueue(sql, "strict", { claim: "repeatable_read", max_running: 3 });
        const content = new Blob(["x".repeat(3_000_000)]).stream();
        const file = await writeFile(via(sql), "a.bin", content, 10_000_000);
        const queues = ["default", "in-turns", "strict"];
        const entries = await queue.enqueue(
          sql,
          Array.from({ length: 60 }, (_, i) => ({
            ...(i % 10 === 0 ? { kind: "copy", files: [file.id] } : { kind: "echo", payload: i }),
            queue: queues[i % 3],
          })),
        );
        const flags = ["--concurrency", "4", `--prepare=${prepare}`, "--lease-s", "60"];
        await using one = startWorker(pooler.url, flags);
        await using two = startWorker(pooler.url, flags);
        const ids = entries.map((entry) => entry.id);
        await waitFor(
          async () => (await queue.get(sql, ids)).every(({ status }) => status === "done"),
          "all jobs to be done",
          { timeoutMs: 60_000 },
        );
        const jobs = await queue.get(sql, ids);
        assertEquals(jobs.filter((job) => job.attempt !== 1), [], "each ran once");
        assertEquals((await outputsOf(via(sql), ids[0]))[0].bytes, 3_000_000);
        // `begin` of the driver needs its pipeline, and a transaction keeps its server.
        const plain = connect(pooler.url, { max: 1, prepare });
        await withQueueLock(plain, "in-turns", async (tx) => {
          await tx`select count(*) from ${tx(schema)}.jobs`;
        });
        await plain.end();
        for (const worker of [one, two]) {
          assert(!/WRN|ERR/.test(worker.log()), worker.log());
          worker.kill("SIGTERM");
          assertEquals(await worker.ended, 0);
        }
        assert(!pooler.log().includes("not linked"), pooler.log());
      } finally {
        await sql.end({ timeout: 1 });
      }
    },
  });
}
