/** Workers as real processes: what they do with jobs, signals, lost databases and each other. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { fileURLToPath } from "node:url";
import { connect, type Pool, schema, via } from "../db.ts";
import { outputsOf, writeFile } from "../files.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, testDatabase, waitFor } from "./database.ts";
import { enqueue, enqueueMany } from "./kinds.ts";
import { hasty, isAlive, skewedClock, startWorker } from "./processes.ts";
import { startProxy } from "../dev/proxy.ts";

const workerPath = fileURLToPath(new URL("../worker.ts", import.meta.url));

async function jobOf(sql: Pool, { id }: { id: string }): Promise<queue.JobView> {
  return (await queue.get(sql, [id]))[0];
}

/** Waits until a job is in a state. */
const reaches = (sql: Pool, entry: { id: string }, status: queue.Status) =>
  waitFor(async () => {
    const job = await jobOf(sql, entry);
    return job.status === status && job;
  }, `job ${entry.id} to be ${status}`);

/** Enqueues a job whose process says its pid, its child's and its folder, and waits until it runs. */
async function runForking(sql: Pool, kind: "forks" | "stubborn" = "forks") {
  const path = await Deno.makeTempFile();
  const entry = await enqueue(sql, kind, { pids: path });
  const pids = async () => (await Deno.readTextFile(path)).trim();
  const said = await waitFor(pids, "the job's process to run");
  const [pid, child, folder] = said.split(" ");
  await Deno.remove(path);
  return { entry, pids: [Number(pid), Number(child)], folder };
}

const gone = (pids: number[]) => waitFor(() => !pids.some(isAlive), "the job's processes to end");
const isFolder = (path: string) => Deno.stat(path).then((info) => info.isDirectory, () => false);

test(
  "a worker runs what is enqueued, files in and out, and says its stages on the way",
  async (sql, url) => {
    await using _ = startWorker(url);
    const file = await writeFile(via(sql), "a.bin", new Blob(["content"]).stream(), 100);
    const copy = await enqueue(sql, "copy", {}, { files: [file.id] });
    const done = await reaches(sql, copy, "done");
    assertEquals([done.attempt, done.result], [1, { files: 1 }]);
    assertEquals((await outputsOf(via(sql), copy.id)).map((f) => f.bytes), [7]);
    const waits = await enqueue(sql, "waits", null);
    const stage = await waitFor(async () => (await jobOf(sql, waits)).stage, "its stage");
    assertEquals([stage, (await jobOf(sql, waits)).progress], ["waiting", 0.5]);
  },
);

test(
  "a worker runs as many jobs at once as it is told, and only its queues and kinds",
  async (sql, url) => {
    await queue.setQueue(sql, "other");
    const mine = await enqueueMany(
      sql,
      Array.from({ length: 4 }, () => ({ kind: "waits", payload: 0 })),
    );
    const elsewhere = await enqueue(sql, "waits", 0, { queue: "other" });
    const another = await enqueue(sql, "echo", 0);
    await using _ = startWorker(url, [
      "--concurrency",
      "3",
      "--queues",
      "default",
      "--kinds",
      "waits",
    ]);
    await waitFor(async () => {
      const jobs = await queue.get(sql, mine.map((entry) => entry.id));
      return jobs.filter((job) => job.status === "running").length === 3;
    }, "three to run");
    await queue.cancel(sql, mine[0].id);
    await waitFor(
      async () => (await jobOf(sql, mine[3])).status === "running",
      "the fourth to run",
    );
    for (const entry of [elsewhere, another]) {
      assertEquals(
        (await jobOf(sql, entry)).status,
        "queued",
      );
    }
  },
);

test(
  "a batch with jobs that cannot run leaves the others, and the worker, unharmed",
  async (sql, url) => {
    const bad = [
      "exits",
      "killed",
      "chatty",
      "flood",
      "nul-error",
      "large-result",
      "no-such-program",
    ];
    const entries = await queue.enqueue(sql, [
      { kind: "echo", payload: 1 },
      ...bad.map((kind) => ({ kind, payload: {} })),
      { kind: "number", payload: "x" },
      { kind: "returns", payload: "nul" },
      { kind: "nul-stage", payload: {} },
      { kind: "careless" },
      { kind: "echo", payload: 2 },
    ]);
    // Its columns could not hold such a stage and number, and the heartbeat carries them for all.
    const tiny = await enqueue(sql, "tiny-progress", {}, { priority: 1 });
    await using worker = startWorker(url, ["--concurrency", "20"]);
    const jobs = await waitFor(async () => {
      const jobs = await queue.get(sql, entries.map((entry) => entry.id));
      return jobs.every((job) => job.finished_at) && jobs;
    }, "all to end");
    assertEquals(jobs.filter((job) => job.status === "done").map((job) => job.result), [
      1,
      1,
      1,
      2,
    ]);
    for (const job of jobs) assert(job.status === "done" || job.error, job.kind);
    assertEquals(jobs.map((job) => job.attempt), jobs.map(() => 1));
    const { stage, progress, attempt } = await waitFor(async () => {
      const job = await jobOf(sql, tiny);
      return job.stage !== null && job;
    }, "its stage");
    assertEquals([stage, progress, attempt], ["x\ufffd", 0, 1]);
    await waitFor(() => worker.log().includes("nor for this"), "errors left behind to be logged");
    assertStringIncludes(worker.log(), "nobody waits for this");
    assert(isAlive(worker.pid));
  },
);

test(
  "a job whose worker is killed is taken back once its lease is over, and runs elsewhere",
  async (sql, url) => {
    const first = startWorker(url);
    const { entry, pids, folder } = await runForking(sql);
    first.kill("SIGKILL");
    await first.ended;
    await using _second = startWorker(url, ["--kinds", "forks"]);
    await waitFor(async () => (await jobOf(sql, entry)).attempt === 2, "the second attempt");
    const job = await jobOf(sql, entry);
    assertEquals([job.crashes, job.releases, job.failures], [1, 0, 0]);
    await gone(pids);
    await waitFor(async () => !await isFolder(folder), "its folder to go");
  },
);

for (const kind of ["forks", "stubborn"] as const) {
  test(
    `the processes of a killed worker's job end at once, not with its lease (${kind})`,
    async (sql, url) => {
      const worker = startWorker(url, ["--lease-s", "600"]);
      const { pids, folder } = await runForking(sql, kind);
      worker.kill("SIGKILL");
      await worker.ended;
      await gone(pids);
      await waitFor(async () => !await isFolder(folder), "its folder to go");
    },
  );
}

test(
  "a worker frozen past its lease has its job ended meanwhile, and writes nothing after the thaw",
  async (sql, url) => {
    await using frozen = startWorker(url);
    const { entry, pids, folder } = await runForking(sql);
    frozen.kill("SIGSTOP");
    await gone(pids);
    const [{ left }] = await sql`select extract(epoch from lease_until - now())::float8 as left
    from ${sql(schema)}.jobs where id = ${entry.id}`;
    assert(left > 0, `ended ${-left} s after its lease`);
    await using _other = startWorker(url, ["--kinds", "forks"]);
    await waitFor(async () => (await jobOf(sql, entry)).attempt === 2, "the other to take it");
    const job = await jobOf(sql, entry);
    assertEquals([job.crashes, job.releases, job.failures], [1, 0, 0]);
    frozen.kill("SIGCONT");
    await waitFor(
      () => frozen.log().includes("is lost: somebody else has it"),
      "the frozen to see it",
    );
    const after = await jobOf(sql, entry);
    assertEquals([after.status, after.attempt, after.error], ["running", 2, job.error]);
    await waitFor(async () => !await isFolder(folder), "its folder to go");
  },
);

test("SIGTERM claims nothing more and lets a job end that can", async (sql, url) => {
  await using worker = startWorker(url);
  const go = await Deno.makeTempFile();
  const running = await enqueue(sql, "until", { gone: go });
  await reaches(sql, running, "running");
  const later = await enqueue(sql, "echo", 0);
  worker.kill("SIGTERM");
  await waitFor(() => worker.log().includes("stopping"), "the worker to stop claiming");
  await Deno.remove(go);
  assertEquals(await worker.ended, 0);
  assertEquals((await jobOf(sql, running)).result, "went on to the end");
  assertEquals((await jobOf(sql, later)).status, "queued");
  const rows = await sql`select from ${sql(schema)}.processes`;
  assertEquals(rows.length, 0, "its row is gone");
});

test(
  "one signal that comes twice, as deno task and a terminal send it, is one signal",
  async (sql, url) => {
    await using worker = startWorker(url);
    const go = await Deno.makeTempFile();
    const running = await enqueue(sql, "until", { gone: go });
    await reaches(sql, running, "running");
    for (let i = 0; i < 3; i++) worker.kill("SIGINT");
    await waitFor(() => worker.log().includes("stopping"), "the worker to stop claiming");
    await Deno.remove(go);
    assertEquals(await worker.ended, 0);
    assertEquals((await jobOf(sql, running)).status, "done");
  },
);

test(
  "a job that outlasts the drain time is back in its place at once, its processes ended",
  async (sql, url) => {
    await using worker = startWorker(url, ["--drain-s", "0", "--lease-s", "600"]);
    const { entry, pids, folder } = await runForking(sql);
    const before = await jobOf(sql, entry);
    worker.kill("SIGTERM");
    assertEquals(await worker.ended, 0);
    const job = await jobOf(sql, entry);
    assertEquals([job.status, job.releases, job.crashes], ["queued", 1, 0]);
    assertEquals([job.due_at, job.error], [before.due_at, "its worker was stopped"]);
    await gone(pids);
    assertEquals(await isFolder(folder), false);
  },
);

for (const signal of ["SIGTERM", "SIGINT"] as const) {
  test(`a second signal (${signal}) ends the worker and its jobs at once`, async (sql, url) => {
    await using worker = startWorker(url, ["--drain-s", "600"]);
    const { pids, folder } = await runForking(sql, "stubborn");
    worker.kill(signal);
    await waitFor(() => worker.log().includes("stopping"), "the first signal to be heard");
    await waitFor(() => (worker.kill(signal), !isAlive(worker.pid)), "a later one to end it");
    assertEquals(await worker.ended, 130);
    await gone(pids);
    await waitFor(async () => !await isFolder(folder), "its folder to go");
  });
}

test(
  "a cancelled job's process and its children are ended, and its folder goes",
  async (sql, url) => {
    await using worker = startWorker(url, ["--lease-s", "600"]);
    const { entry, pids, folder } = await runForking(sql);
    assertEquals(await queue.cancel(sql, entry.id), "running");
    await reaches(sql, entry, "cancelled");
    await gone(pids);
    assertEquals(await isFolder(folder), false);
    assert(isAlive(worker.pid));
  },
);

test("a process that ignores SIGTERM is killed", async (sql, url) => {
  await using _ = startWorker(url, ["--lease-s", "600"]);
  const { entry, pids } = await runForking(sql, "stubborn");
  await queue.cancel(sql, entry.id);
  await reaches(sql, entry, "cancelled");
  await gone(pids);
});

/** Why a worker cannot be process 1 of a namespace of its own here, or null. */
const noNamespace = await new Deno.Command("unshare", {
  args: ["--pid", "--fork", "--mount-proc", "true"],
  stdout: "null",
  stderr: "null",
}).output().then(({ success }) => success ? null : "unshare is not allowed", () => "no unshare");

Deno.test({
  name: "a worker that is process 1 of its container leaves no zombies" +
    (noNamespace ? ` (skipped: ${noNamespace})` : ""),
  ignore: noNamespace !== null,
  async fn() {
    await using database = await testDatabase();
    const sql = connect(database.url, { max: 1 });
    const args = ["--pid", "--fork", "--mount-proc", "--kill-child", Deno.execPath()];
    const child = new Deno.Command("unshare", {
      args: [...args, "run", "-A", "--quiet", workerPath, ...hasty],
      env: { DATABASE_URL: database.url },
      stdout: "null",
      stderr: "null",
    }).spawn();
    try {
      const go = await Deno.makeTempFile();
      const entry = await enqueue(sql, "until", { gone: go });
      await reaches(sql, entry, "running");
      const [{ until }] = await sql`select now() + interval '2 s' as until`; // ten renewals
      await waitFor(async () => (await sql`select now() > ${until} as yes`)[0].yes, "renewals");
      await Deno.remove(go);
      await reaches(sql, entry, "done");
      const path = `/proc/${child.pid}/task/${child.pid}/children`;
      const worker = Deno.readTextFileSync(path).trim();
      const theirs = Deno.readTextFileSync(`/proc/${worker}/task/${worker}/children`).trim();
      const states = theirs.split(" ").filter(Boolean).map((pid) =>
        Deno.readTextFileSync(`/proc/${pid}/stat`).replace(/^\d+ /, "")
      );
      assertEquals(states.filter((stat) => stat.includes(") Z ")), []);
    } finally {
      child.kill("SIGKILL");
      await child.status;
      await sql.end({ timeout: 1 });
    }
  },
});

test("a worker that finds its job given away kills it and writes nothing", async (sql, url) => {
  await using worker = startWorker(url, ["--lease-s", "600"]);
  const { entry, pids } = await runForking(sql);
  const thief = crypto.randomUUID();
  await sql`update ${sql(schema)}.jobs set worker_id = ${thief}, attempt = attempt + 1
    where id = ${entry.id}`;
  const before = await jobOf(sql, entry);
  await gone(pids);
  await waitFor(
    () => worker.log().includes("is lost: somebody else has it"),
    "the worker to see it",
  );
  assertEquals(await jobOf(sql, entry), before);
});

test("a worker that was taken for dead, its row removed, ends itself with 1", async (sql, url) => {
  await using worker = startWorker(url);
  const { pids } = await runForking(sql);
  await sql`delete from ${sql(schema)}.processes`;
  assertEquals(await worker.ended, 1);
  await gone(pids);
});

test(
  "the jobs of a claim whose reply was lost are all found at the next heartbeat, and no crash",
  async (sql, url) => {
    await using proxy = startProxy(url);
    proxy.swallowReplyTo("exchange");
    const entries = await enqueueMany(
      sql,
      Array.from({ length: 3 }, () => ({ kind: "echo", payload: 1 })),
    );
    const flags = ["--lease-s", "600", "--statement-limit-ms", "500", "--concurrency", "6"];
    await using worker = startWorker(proxy.url, flags);
    for (const entry of entries) {
      const job = await reaches(sql, entry, "done");
      assertEquals([job.attempt, job.releases, job.crashes], [2, 1, 0]);
    }
    assertStringIncludes(worker.log(), "whose reply was lost");
  },
);

test(
  "a queue whose lock or next job is held keeps nobody from the other queues",
  async (sql, url) => {
    await queue.setQueue(sql, "limited", { max_running: 1 });
    await queue.setQueue(sql, "held");
    await enqueue(sql, "echo", 1, { queue: "limited", priority: 9 });
    const held = await enqueue(sql, "echo", 1, { queue: "held", priority: 9 });
    const holder = connect(url, { max: 1 });
    const release = Promise.withResolvers<void>();
    const holding = holder.begin(async (tx) => {
      await tx`select ${tx(schema)}.lock_queue('limited')`;
      await queue.cancel(tx, held.id);
      await release.promise;
    });
    try {
      await using _ = startWorker(url);
      for (let i = 0; i < 10; i++) await reaches(sql, await enqueue(sql, "echo", 1), "done");
    } finally {
      release.resolve();
      await holding;
      await holder.end();
    }
  },
);

test("settings that contradict each other are refused", async (_, url) => {
  await using worker = startWorker(url, ["--lease-s", "1", "--heartbeat-ms", "5000"]);
  assertEquals(await worker.ended, 2);
  assertStringIncludes(
    worker.log(),
    "--lease-s is 1: it must be at least three times --heartbeat-ms",
  );
}, { noPooler: "it ends before it connects" });

test(
  "a worker goes on after the database was away for a moment, and so does its job",
  async (sql, url) => {
    await using proxy = startProxy(url);
    await using worker = startWorker(proxy.url, ["--lease-s", "600"]);
    const go = await Deno.makeTempFile();
    const entry = await enqueue(sql, "until", { gone: go });
    await reaches(sql, entry, "running");
    proxy.cut();
    await waitFor(() => /heartbeat: .*ECONNREFUSED/.test(worker.log()), "the outage to be seen");
    await Deno.remove(go); // the job ends while its result cannot be written
    proxy.mend();
    const job = await reaches(sql, entry, "done");
    assertEquals([job.attempt, job.result], [1, "went on to the end"]);
    await reaches(sql, await enqueue(sql, "echo", 1), "done");
  },
);

for (const how of ["cut", "silence"] as const) {
  test(
    `a job whose lease cannot be renewed is stopped in time, and is nobody's crash (${how})`,
    async (sql, url) => {
      await using proxy = startProxy(url);
      const flags = ["--lease-s", "3", "--statement-limit-ms", "500", "--concurrency", "2"];
      await using worker = startWorker(proxy.url, flags);
      const { entry, pids } = await runForking(sql);
      // A function in the worker has no guard: the worker itself must stop it.
      const note = await Deno.makeTempFile();
      const inline = await enqueue(sql, "waits", { note });
      await reaches(sql, inline, "running");
      proxy[how]();
      await waitFor(() => Deno.readTextFileSync(note) === "stopped", "the function to be stopped");
      const [{ rest }] = await sql`select extract(epoch from lease_until - now())::float8 as rest
        from ${sql(schema)}.jobs where id = ${inline.id}`;
      assert(rest > 0, `stopped ${-rest} s after its lease`);
      await gone(pids);
      const [{ left }] = await sql`select extract(epoch from lease_until - now())::float8 as left
      from ${sql(schema)}.jobs where id = ${entry.id}`;
      assert(left > 0, `stopped ${-left} s after its lease`);
      await waitFor(async () => {
        const [{ out }] = await sql`select lease_until < now() as out from ${sql(schema)}.jobs
        where id = ${entry.id}`;
        return out;
      }, "the lease to run out");
      const [{ mended }] = await sql`select now() as mended`;
      proxy.mend();

      await waitFor(async () => (await jobOf(sql, entry)).attempt === 2, "the job to run again");
      const job = await jobOf(sql, entry);
      assertEquals([job.releases, job.crashes], [1, 0]);
      await waitFor(async () => {
        const [row] = await sql`select seen_at > ${mended} as yes from ${sql(schema)}.processes`;
        return row.yes;
      }, "its heartbeat to be back");
      assert(isAlive(worker.pid));
    },
  );
}

test(
  "right after an outage nobody recovers: those who still run their jobs must have had the time to say so",
  async (sql, url) => {
    await using proxy = startProxy(url);
    await using worker = startWorker(proxy.url, ["--heartbeat-ms", "1000", "--kinds", "waits"]);
    await waitFor(() => worker.log().includes("serves"), "the worker to boot");
    const silent = await aSilentJob(sql, 1);
    await reaches(sql, silent, "queued"); // in touch for three heartbeats, it recovers
    proxy.cut();
    await waitFor(() => /heartbeat: .*ECONNREFUSED/.test(worker.log()), "the outage to be seen");
    const another = await aSilentJob(sql, 2);
    const [{ mended }] = await sql`select now() as mended`;
    proxy.mend();
    await reaches(sql, another, "queued");
    const [{ seconds }] =
      await sql`select extract(epoch from now() - ${mended})::float8 as seconds`;
    assert(seconds > 2.5, `recovered ${seconds} s after the outage, and not three heartbeats`);
  },
);

/** A job that a worker which is no more has left behind, its lease over. */
async function aSilentJob(sql: Pool, priority: number): Promise<queue.Enqueued> {
  const [entry] = await queue.enqueue(sql, [{ kind: "echo", priority }]);
  const dead = { worker: crypto.randomUUID(), kinds: ["echo"], most: 1, leaseS: 0 };
  const claim = { ...dead, token: crypto.randomUUID() };
  const [job] = await claims.claim(sql, { queue: "default", claim: "skip_locked" }, claim);
  assertEquals(job.id, entry.id);
  return entry;
}

test("a worker whose clock is ten minutes off changes nothing", async (sql, url) => {
  await sql.unsafe(`
    create table leases (seconds float8);
    create function note_lease() returns trigger language plpgsql as $$ begin
      insert into leases values (extract(epoch from new.lease_until - now()));
      return null;
    end $$;
    create trigger note_lease after update on ${schema}.jobs for each row
      when (new.status = 'running') execute function note_lease();`).simple();
  const later = await enqueue(sql, "echo", 0, { delay_s: 300 });
  await using _early = startWorker(url, [], skewedClock(600_000));
  await using _late = startWorker(url, [], skewedClock(-600_000));
  const waits = await enqueue(sql, "waits", 0);
  await waitFor(async () => {
    const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.processes`;
    return n === 2;
  }, "both to register");
  const entries = await enqueueMany(
    sql,
    Array.from({ length: 6 }, () => ({ kind: "echo", payload: 1 })),
  );
  for (const entry of entries) await reaches(sql, entry, "done");
  // Longer than a lease of 3 s, and several recoveries.
  const [{ until }] = await sql`select now() + interval '4 s' as until`;
  await waitFor(async () => (await sql`select now() > ${until} as yes`)[0].yes, "a lease's time");
  const job = await jobOf(sql, waits);
  assertEquals([job.status, job.attempt, job.crashes], ["running", 1, 0]);
  assertEquals((await jobOf(sql, later)).status, "scheduled");
  const leases = await sql`select distinct seconds from leases`;
  assertEquals(leases.map((row) => row.seconds), [3]);
});

test(
  "200 MB go through a worker and a process in no more memory than 50 MB do",
  async (sql, url) => {
    await using worker = startWorker(url, ["--lease-s", "600"]);
    const peakOf = async (megabytes: number) => {
      const block = new Uint8Array(1 << 20).fill(7);
      let blocks = 0;
      const content = new ReadableStream<Uint8Array>({
        pull(controller) {
          if (blocks++ < megabytes) controller.enqueue(block);
          else controller.close();
        },
      });
      const file = await writeFile(via(sql), "large.bin", content, 500_000_000);
      const entry = await enqueue(sql, "copy", {}, { files: [file.id] });
      let peak = 0;
      await waitFor(
        async () => {
          const pages = Deno.readTextFileSync(`/proc/${worker.pid}/statm`).split(" ")[1];
          peak = Math.max(peak, Number(pages) * 4096);
          const { status, error } = await jobOf(sql, entry);
          assert(["queued", "running", "done"].includes(status), `${status}: ${error}`);
          return status === "done";
        },
        "the copy",
        { timeoutMs: 60_000 },
      );
      assertEquals((await outputsOf(via(sql), entry.id))[0].bytes, megabytes << 20);
      return peak / (1 << 20);
    };
    const [small, large] = [await peakOf(50), await peakOf(200)];
    assert(large - small < 40, `${small.toFixed(0)} MiB for 50 MB, ${large.toFixed(0)} for 200`);
  },
  { noPooler: "it measures the worker's memory; files_test.ts sends files through it" },
);
