/** What no single part can promise: faults of workers, networks and servers, and what is left after. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { fileURLToPath } from "node:url";
import { connect, schema, via } from "../db.ts";
import { startBandService } from "../dev/band_service.ts";
import { startPostgres } from "../dev/postgres.ts";
import { startProxy } from "../dev/proxy.ts";
import { writeFile } from "../files.ts";
import { migrate } from "../migrate.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { enqueue, enqueueMany } from "./kinds.ts";
import { isAlive, type Script, startWorker } from "./processes.ts";

test(
  "one job that ends its worker costs the jobs beside it nothing, and only itself its life",
  async (sql, url) => {
    const [go, end] = [await Deno.makeTempFile(), await Deno.makeTempFile()];
    const entries = await enqueueMany(sql, [
      ...Array.from({ length: 4 }, () => ({
        kind: "inline-until" as const,
        payload: { gone: end },
      })),
      { kind: "poison", payload: { gone: go } },
    ]);
    const ids = entries.map(({ id }) => id);
    const jobs = () => queue.get(sql, ids);
    const flags = ["--concurrency", "5", "--lease-s", "1"];
    let worker = startWorker(url, flags);
    let deaths = 0;
    try {
      await waitFor(async () => (await jobs()).every((job) => job.status === "running"), "all");
      await Deno.remove(go);
      await worker.ended;
      await Deno.remove(end);
      await waitFor(async () => {
        if (!isAlive(worker.pid)) {
          await worker.ended;
          deaths++;
          worker = startWorker(url, flags);
        }
        return (await jobs()).every((job) => job.finished_at);
      }, "all to end");
    } finally {
      await worker[Symbol.asyncDispose]();
    }
    assertEquals((await jobs()).map((job) => [job.status, job.crashes, job.attempt]), [
      ...Array.from({ length: 4 }, () => ["done", 0, 2]),
      ["failed", 2, 3],
    ]);
    assertEquals(deaths, 3);
  },
);

test(
  "a worker whose look for jobs hangs while its heartbeat lives says so, gives its jobs back and ends",
  async (sql, url) => {
    const hang = await Deno.makeTempFile();
    const jobs = fileURLToPath(new URL("hanging_kinds.ts", import.meta.url));
    const flags = ["--jobs", jobs, "--concurrency", "2", "--stall-s", "1"];
    const limit = ["--statement-limit-ms", "900"];
    await using worker = startWorker(url, [...flags, ...limit], [], { SIDING_TEST_HANG: hang });
    const entry = await enqueue(sql, "waits", null);
    const state = async () => (await queue.get(sql, [entry.id]))[0];
    await waitFor(async () => (await state()).status === "running", "it to run");
    await Deno.writeTextFile(hang, "hang");
    const stalled = async () => {
      const [row] = await sql`select extract(epoch from seen_at - progressed_at)::float8 as s
        from ${sql(schema)}.processes`;
      return row?.s;
    };
    await waitFor(async () => await stalled() > 0.5, "its row to show it");
    assertEquals(await worker.ended, 1);
    assertStringIncludes(worker.log(), "unwell: its look for jobs hangs since");
    const { status, error, releases, crashes } = await state();
    assertEquals([status, error, releases, crashes], ["queued", "its worker hung", 1, 0]);
  },
);

test(
  "a worker that may not look for jobs, or has room for none, does not hang",
  async (sql, url) => {
    const flags = ["--stall-s", "1", "--statement-limit-ms", "900", "--poll-max-ms", "1500"];
    await using worker = startWorker(url, flags);
    const entry = await enqueue(sql, "waits", null);
    const state = async () => (await queue.get(sql, [entry.id]))[0];
    await waitFor(async () => (await state()).status === "running", "it to run");
    await queue.cancel(sql, entry.id); // and so it looks, in vain
    await sql.unsafe(`alter function ${schema}.look(text[], text[]) rename to look_no_more`);
    await waitFor(() => worker.log().match(/claim: .*look/g)?.length === 3, "errors");
    const [{ until }] = await sql`select now() + interval '2 s' as until`;
    await waitFor(async () => (await sql`select now() > ${until} as yes`)[0].yes, "twice the time");
    assert(isAlive(worker.pid));
    await using contradicts = startWorker(url, ["--stall-s", "1", "--statement-limit-ms", "1000"]);
    assertEquals(await contradicts.ended, 2);
    assertStringIncludes(contradicts.log(), "it must be more than --statement-limit-ms");
  },
);

test(
  "a worker whose thread a job never gives back is ended, and the others go on",
  async (sql, url) => {
    const entry = await enqueue(sql, "hog", null);
    await using hung = startWorker(url, ["--lease-s", "1"]);
    await waitFor(() => !isAlive(hung.pid), "it to end");
    await hung.ended;
    await using _ = startWorker(url, ["--lease-s", "1", "--kinds", "echo"]);
    await waitFor(
      async () => (await queue.get(sql, [entry.id]))[0].status === "queued",
      "recovery",
    );
  },
);

test(
  "an idle worker whose peers are gone without a word finds new ones in time",
  async (sql, url) => {
    await using proxy = startProxy(url);
    await using worker = startWorker(proxy.url, ["--statement-limit-ms", "500"]);
    await waitFor(() => worker.log().includes("serves"), "the worker to boot");
    proxy.silence();
    await waitFor(() => worker.log().includes("no reply from the database"), "it to notice");
    proxy.mend(); // the old connections stay silent
    const entry = await enqueue(sql, "echo", 1);
    const done = async () => (await queue.get(sql, [entry.id]))[0].status === "done";
    await waitFor(done, "the job");
    assert(isAlive(worker.pid));
  },
);

test(
  "a full disk of Postgres stops jobs in time, is nobody's crash, and is over when there is room again",
  async (sql, url) => {
    await using worker = startWorker(url);
    const go = await Deno.makeTempFile();
    const entry = await enqueue(sql, "until", { gone: go });
    const state = async () => (await queue.get(sql, [entry.id]))[0];
    await waitFor(async () => (await state()).status === "running", "it to run");
    await sql.unsafe(`
      create function no_room() returns trigger language plpgsql as $$ begin
        raise exception 'could not extend file: No space left on device' using errcode = '53100';
      end $$`);
    // One statement each, so that none waits for one table while it holds the other.
    for (const table of ["jobs", "processes"]) {
      await sql.unsafe(`create trigger no_room before insert or update on ${schema}.${table}
        execute function no_room()`);
    }
    await waitFor(async () => {
      const [row] = await sql`select lease_until < now() as over from ${sql(schema)}.jobs`;
      return row.over;
    }, "its lease to run out");
    await Deno.remove(go);
    for (const table of ["jobs", "processes"]) {
      await sql.unsafe(`drop trigger no_room on ${schema}.${table}`);
    }
    await waitFor(async () => (await state()).status === "done", "it to be done");
    const { crashes, releases, attempt } = await state();
    assertEquals([crashes, releases, attempt], [0, 1, 2]);
    assertStringIncludes(worker.log(), "No space left on device");
  },
);

test(
  "a worker that has no room for a job's folder fails the attempt, and says why",
  async (sql, url) => {
    const entry = await enqueue(sql, "silent", {});
    await using worker = startWorker(url, [], [], { TMPDIR: "/dev/null/nowhere" });
    const job = await waitFor(async () => {
      const [job] = await queue.get(sql, [entry.id]);
      return job.status === "failed" && job;
    }, "it to fail");
    assertStringIncludes(job.error!, "/dev/null/nowhere");
    assert(isAlive(worker.pid));
  },
);

test(
  "results of 50 MB and lines of 10 MB without an end cost the worker no memory",
  async (sql, url) => {
    await using worker = startWorker(url, ["--lease-s", "600"]);
    const rss = () =>
      Number(Deno.readTextFileSync(`/proc/${worker.pid}/statm`).split(" ")[1]) * 4096;
    const peakOf = async (rounds: number) => {
      const entries = await enqueueMany(
        sql,
        Array.from({ length: rounds }, () => [
          { kind: "flood" as const, payload: {} },
          { kind: "large-result" as const, payload: {} },
        ]).flat(),
      );
      let peak = 0;
      const jobs = await waitFor(
        async () => {
          peak = Math.max(peak, rss());
          const jobs = await queue.get(sql, entries.map(({ id }) => id));
          return jobs.every((job) => job.finished_at) && jobs;
        },
        "all to end",
        { timeoutMs: 180_000 },
      );
      for (const job of jobs) assertStringIncludes(job.error!, "a line of more than 1200000 bytes");
      return peak / (1 << 20);
    };
    const [few, many] = [await peakOf(2), await peakOf(8)];
    assert(many - few < 40, `${few.toFixed(0)} MiB for 4 jobs, ${many.toFixed(0)} for 16 more`);
  },
);

test("a worker waits for a connection when there are none left", async (sql, url) => {
  const name = `limited_${crypto.randomUUID().slice(0, 8)}`;
  await sql.unsafe(`
    create role ${name} login password 'x' connection limit 6;
    grant usage on schema ${schema} to ${name};
    grant all on all tables in schema ${schema} to ${name};
    grant all on all sequences in schema ${schema} to ${name};`).simple();
  const limited = new URL(url);
  limited.username = name;
  limited.password = "x";
  const hog = connect(limited.href, { max: 6 });
  try {
    // All six, each busy until it is told.
    const busy = Array.from({ length: 6 }, () => hog`select pg_sleep(600)`.catch(() => {}));
    await waitFor(async () => {
      const [row] = await sql`
        select count(*)::integer as n from pg_stat_activity where usename = ${name}`;
      return row.n === 6;
    }, "six connections");
    await using worker = startWorker(limited.href);
    const entry = await enqueue(sql, "echo", 1);
    const refused = "too many connections for role";
    await waitFor(async () => {
      const [row] = await sql`select count(*)::integer as n from ${sql(schema)}.processes`;
      return row.n === 0 && isAlive(worker.pid);
    }, "it to wait");
    assert(!worker.log().includes(refused), "no reason to end");
    await sql`select pg_terminate_backend(pid) from pg_stat_activity where usename = ${name}`;
    await Promise.all(busy);
    await waitFor(async () => (await queue.get(sql, [entry.id]))[0].status === "done", "the job");
  } finally {
    await hog.end({ timeout: 1 });
    await sql.unsafe(`drop owned by ${name} cascade; drop role ${name}`).simple();
  }
});

/** A server of the test's own, which it may end and start again. */
async function ownServer(settings: Record<string, string> = {}) {
  const dataDir = await Deno.makeTempDir({ prefix: "siding-server-" });
  let server = await startPostgres({ dataDir, settings });
  const { url } = server;
  await migrate(url);
  return {
    url,
    /** As pg_ctl -m immediate, or a machine that is gone: nobody hears of it. */
    async crash() {
      Deno.kill(server.pid, "SIGQUIT");
      await server.stop();
    },
    async start() {
      server = await startPostgres({ dataDir, settings });
      assertEquals(server.url, url);
    },
    async [Symbol.asyncDispose]() {
      await server.stop();
      await Deno.remove(dataDir, { recursive: true });
    },
  };
}

Deno.test("Postgres away for longer than the lease, with ten jobs under way, is nobody's crash", async () => {
  await using server = await ownServer();
  const workers: Script[] = [];
  const sql = connect(server.url, { max: 1 });
  try {
    const go = await Deno.makeTempFile();
    const entries = await enqueueMany(
      sql,
      Array.from({ length: 10 }, () => ({ kind: "until" as const, payload: { gone: go } })),
    );
    const ids = entries.map(({ id }) => id);
    const all = async (status: queue.Status) =>
      (await queue.get(sql, ids)).every((job) => job.status === status);
    const flags = ["--concurrency", "5", "--statement-limit-ms", "1000"];
    workers.push(startWorker(server.url, flags), startWorker(server.url, flags));
    await waitFor(() => all("running"), "ten jobs to run");
    await server.crash();
    const stoppedMs = performance.now();
    await waitFor(() => performance.now() - stoppedMs > 5000, "more than the lease of 3 s");
    await server.start();
    await waitFor(async () => (await queue.get(sql, ids)).every((job) => job.attempt > 1), "all");
    await Deno.remove(go);
    await waitFor(() => all("done"), "all to be done");
    const jobs = await queue.get(sql, ids);
    // On a slow machine one may be given back once more.
    for (const { crashes, releases, attempt } of jobs) {
      assertEquals([crashes, releases], [0, attempt - 1]);
    }
    assert(workers.every(({ pid }) => isAlive(pid)));
  } finally {
    for (const worker of workers) await worker[Symbol.asyncDispose]();
    await sql.end({ timeout: 1 });
  }
});

Deno.test("a failover that loses the last transactions, a claim and an intent among them, charges no job twice", async () => {
  // What is committed is not yet on the disk, for as long as the test takes.
  await using server = await ownServer({ synchronous_commit: "off", wal_writer_delay: "10s" });
  await using service = await startBandService({ workMs: 3000 });
  const sql = connect(server.url, { max: 1 });
  const flags = ["--jobs", fileURLToPath(new URL("../jobs.ts", import.meta.url))];
  const env = { SIDING_BAND_URL: service.url };
  try {
    const file = await writeFile(via(sql), "a.wav", new Blob(["sound"]).stream(), 100);
    const [{ id }] = await sql.begin(async (tx) => {
      await tx`set local synchronous_commit = on`;
      return await queue.enqueue(tx, [{ kind: "band", payload: {}, files: [file.id] }]);
    });
    await using first = startWorker(server.url, flags, [], env);
    await waitFor(async () => (await queue.get(sql, [id]))[0].stage === "arrange", "the charge");
    await server.crash();
    await server.start();
    const [lost] = await queue.get(sql, [id]);
    assertEquals([lost.status, lost.attempt], ["queued", 0], "the claim is as if it never was");
    assertEquals(await first.ended, 1, "its row is as if it never was: it ends itself");
    await using _ = startWorker(server.url, flags, [], env);
    await waitFor(async () => (await queue.get(sql, [id]))[0].status === "done", "the job");
    const [{ calls, charges }, ...more] = service.charges();
    assertEquals([calls, charges, more], [2, 1, []], "the same key, by which it is known");
  } finally {
    await sql.end({ timeout: 1 });
  }
});
