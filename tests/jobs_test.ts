/** How kinds of job run to their outcome, in the test's own process. */
import { z } from "zod";
import { assert, assertEquals, assertRejects, assertStringIncludes } from "@std/assert";
import { type Pool, schema, via } from "../db.ts";
import { requeue } from "../desk.ts";
import { outputsOf, readFile, writeFile } from "../files.ts";
import { NotSent, paid, PayloadError, Stop } from "../jobs/kind.ts";
import { sweepFolders } from "../jobs/process.ts";
import { Outcomes } from "../jobs/outcomes.ts";
import { run } from "../jobs/run.ts";
import { Stopper } from "../jobs/stopper.ts";
import { typed } from "../jobs/typed.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import * as requests from "../requests.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { drainForTest, enqueue, enqueueMany, kinds, service } from "./kinds.ts";

async function jobs(sql: Pool): Promise<queue.JobView[]> {
  const rows = await sql<{ id: string }[]>`select id::text from ${sql(schema)}.jobs order by id`;
  return await queue.get(sql, rows.map((row) => row.id));
}

const bytes = (text: string) => new Blob([text]).stream() as ReadableStream<Uint8Array>;
const text = (stream: ReadableStream<Uint8Array>) => new Response(stream).text();

test("drainForTest runs what is due, and what that enqueues, and says how each ended", async (sql) => {
  await enqueue(sql, "chain", 2);
  await enqueue(sql, "echo", { later: true }, { delay_s: 3600 });
  const drained = await drainForTest(sql);
  assertEquals(drained.map(({ kind, outcome }) => [kind, outcome?.outcome]), [
    ["chain", "done"],
    ["chain", "done"],
    ["chain", "done"],
  ]);
  assertEquals((await jobs(sql)).map((job) => [job.status, job.result]), [
    ["done", 2],
    ["scheduled", null],
    ["done", 1],
    ["done", 0],
  ]);
  await enqueue(sql, "chain", 99);
  await assertRejects(() => drainForTest(sql, 10), Error, "still not empty after 10 jobs");
});

test("a payload is checked at enqueue, naming the field, and nothing is enqueued", async (sql) => {
  const wrong = { message: 7 } as unknown as { message: string };
  const good = { kind: "echo", payload: 1 } as const;
  const error = await assertRejects(
    () => enqueueMany(sql, [good, { kind: "throws", payload: wrong }]),
    PayloadError,
  );
  assertStringIncludes(error.message, "payload.message: ");
  const unknown = "nothing" as "echo";
  await assertRejects(() => enqueue(sql, unknown, 1), PayloadError, 'unknown kind "nothing"');
  await assertRejects(() => enqueue(sql, "toString" as "echo", 1), PayloadError, "unknown kind");
  assertEquals(await jobs(sql), []);
});

Deno.test("the types of payloads are checked at compile time", () => {
  const check = (sql: Pool) => {
    enqueue(sql, "number", 1);
    enqueue(sql, "throws", { message: "x" }, { priority: 1 });
    // @ts-expect-error a number is wanted
    enqueue(sql, "number", "1");
    // @ts-expect-error message is missing
    enqueue(sql, "throws", {});
    // @ts-expect-error no such kind
    enqueue(sql, "nothing", {});
    // @ts-expect-error the payload of one kind is not that of another
    enqueueMany(sql, [{ kind: "number", payload: { message: "x" } }]);
  };
  assert(check); // never called: what counts is that `deno check` wants the errors above
});

test("one that cannot run fails with a message, and leaves the others of its batch unharmed", async (sql) => {
  // Some of them never came by the typed enqueue: old rows, other languages.
  await queue.enqueue(sql, [
    { kind: "echo", payload: 1 },
    { kind: "number", payload: "not a number" },
    { kind: "echo", payload: 2 },
    ...["nul", "large", "surrogate", "circular", "bigint", "undefined"].map((payload) => ({
      kind: "returns",
      payload,
    })),
    { kind: "echo", payload: 3 },
  ]);
  await drainForTest(sql);
  const all = await jobs(sql);
  const failed = all.filter((job) => job.status === "failed").map((job) => job.error!);
  assertStringIncludes(failed[0], "its payload does not fit its kind: payload: ");
  assertEquals(failed[1], "its result.deep[0] contains a NUL character (\\u0000)");
  assertEquals(failed[2], "its result is larger than 1048576 bytes of JSON: write a file instead");
  assertEquals(failed[3], "its result contains half of a surrogate pair");
  assertStringIncludes(failed[4], "its result is not JSON: ");
  assertStringIncludes(failed[5], "its result is not JSON: ");
  assertEquals(failed.length, 6);
  assertEquals(all.filter((job) => job.status === "done").map((job) => job.result), [
    1,
    2,
    null,
    3,
  ]);
});

test("a failure is tried again after its kind's backoff, as often as the kind says", async (sql) => {
  const { id } = await enqueue(sql, "throws", { message: "flaky" });
  await drainForTest(sql);
  const [waiting] = await queue.get(sql, [id]);
  assertEquals([waiting.status, waiting.failures, waiting.error], ["scheduled", 1, "flaky"]);
  const [{ delay }] = await sql`select extract(epoch from due_at - now())::float8 as delay
    from ${sql(schema)}.jobs where id = ${id}`;
  assert(delay > 50 && delay < 67, `60 s, give or take a tenth, and not ${delay}`);
  await sql`update ${sql(schema)}.jobs set due_at = now() where id = ${id}`;
  await drainForTest(sql);
  const [failed] = await queue.get(sql, [id]);
  assertEquals([failed.status, failed.failures, failed.attempt], ["failed", 2, 2]);
});

test("without a say of its kind, a failure is tried again after 10, 30 and 90 s, and not after that", async (sql) => {
  const { id } = await enqueue(sql, "fails", null);
  const delays = [];
  for (;;) {
    await drainForTest(sql);
    const [job] = await sql`select status, extract(epoch from due_at - now())::float8 as delay
      from ${sql(schema)}.jobs where id = ${id}`;
    if (job.status === "failed") break;
    delays.push(job.delay);
    await sql`update ${sql(schema)}.jobs set due_at = now() where id = ${id}`;
  }
  assertEquals(delays.length, 3);
  for (const [i, usual] of [10, 30, 90].entries()) {
    assert(delays[i] > usual * 0.85 && delays[i] < usual * 1.15, `${delays[i]} and not ${usual} s`);
  }
});

test("a permanent failure is not tried again, and a snooze is no failure", async (sql) => {
  await enqueue(sql, "throws", { message: "hopeless", permanent: true });
  await enqueue(sql, "snoozes", null);
  await drainForTest(sql);
  const [failed, snoozed] = await jobs(sql);
  assertEquals([failed.status, failed.attempt, failed.error], ["failed", 1, "hopeless"]);
  assertEquals([snoozed.status, snoozed.failures, snoozed.result], ["done", 0, 1]);
});

test("a process gets its job on stdin and its files in a folder, and leaves files and a result", async (sql) => {
  const one = await writeFile(via(sql), "../../etc/one.txt", bytes("first"), 100);
  const two = await writeFile(via(sql), "two words.txt", bytes("second"), 100);
  const copy = await enqueue(sql, "copy", {}, { files: [two.id, one.id] });
  const { id } = await enqueue(sql, "stdin", { a: [1] }, { owner: "ada", files: [one.id] });
  await drainForTest(sql);
  const outputs = await outputsOf(via(sql), copy.id);
  assertEquals(outputs.map((file) => file.name), ["0-copy.bin", "1-copy.bin"]);
  assertEquals(await text(readFile(via(sql), outputs[0])), "second");
  assertEquals(await text(readFile(via(sql), outputs[1])), "first");
  const [job] = await queue.get(sql, [id]);
  assertEquals(job.result, {
    ...{ id, kind: "stdin", attempt: 1, owner: "ada", payload: { a: [1] } },
    files: [{ name: "one.txt", path: "in/0/one.txt", media_type: "text/plain", bytes: 5 }],
  });
});

test("a process sees none of the worker's secrets in its environment", async (sql) => {
  Deno.env.set("SIDING_PLANTED_SECRET", "hush");
  await enqueue(sql, "environment", {});
  await drainForTest(sql);
  const [job] = await jobs(sql);
  const allowed = ["DENO_DIR", "HOME", "LANG", "PATH", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "_"];
  const others = String(job.result).trim().split(" ").filter((name) => !allowed.includes(name));
  assertEquals(others, []);
});

Deno.test("work folders that were left behind are swept, those of live workers never", async () => {
  const dead = new Deno.Command("/bin/true").spawn();
  await dead.status;
  const space = Deno.readLinkSync("/proc/self/ns/pid").replace(/\D/g, "");
  const [mine, left, elsewhere] = [
    await Deno.makeTempDir({ prefix: `siding-job-${space}-${Deno.pid}-` }),
    await Deno.makeTempDir({ prefix: `siding-job-${space}-${dead.pid}-` }),
    await Deno.makeTempDir({ prefix: `siding-job-1${space}-${dead.pid}-` }),
  ];
  const there = (path: string) => Deno.stat(path).then(() => true, () => false);
  await sweepFolders();
  assertEquals([await there(mine), await there(left), await there(elsewhere)], [true, false, true]);
  for (const path of [mine, elsewhere]) await Deno.remove(path);
});

test("a process that misbehaves fails with a message that says how", async (sql) => {
  const expected: Record<string, string> = {
    exits: "the process ended with 137, as after SIGKILL (out of memory?) without a result; " +
      "the end of its stderr: first line\nno memory left",
    "odd-name": "its output file ",
    silent: "the process exited with code 0 without a result",
    chatty: "line 1 of the process's stdout is not JSON: hello",
    array: "line 1 of the process's stdout is not a JSON object: [1]",
    "wrong-stage": "line 1 of the process's stdout has neither stage, progress, result, error",
    flood: "the process wrote a line of more than 1200000 bytes to stdout",
    "large-result": "the process wrote a line of more than 1200000 bytes to stdout",
    "nul-error": "a\ufffdb",
    killed: "the process ended with 137, as after SIGKILL (out of memory?) without a result",
    "error-line": "the tape is broken",
    "closes-stdout": "timed out after 1 s",
    overtime: "timed out after 1 s",
    vanishes: "timed out after 1 s",
    "no-such-program": "exited with code 127 without a result",
  };
  const names = Object.keys(expected) as (keyof typeof kinds)[];
  await queue.enqueue(sql, names.map((kind) => ({ kind, payload: {} })));
  await drainForTest(sql);
  for (const job of await jobs(sql)) {
    assertEquals(job.status, "failed", job.kind);
    assertStringIncludes(job.error!, expected[job.kind], job.kind);
  }
});

test("a child in a session of its own keeps neither its job nor the time limit waiting", async (sql) => {
  const { id } = await enqueue(sql, "escapes", {});
  await drainForTest(sql);
  const [job] = await queue.get(sql, [id]);
  assertEquals([job.status, (job.result as { ran: string }).ran], ["done", "yes"]);
  Deno.kill(Number((job.result as { child: string }).child), "SIGKILL");
});

test("a kind whose own code fails in odd ways fails its job with a message, and is not run twice", async (sql) => {
  const odd = [
    "schema-throws",
    "schema-async",
    "backoff-throws",
    "throws-nothing",
    "odd-next",
    "odd-json",
  ];
  await queue.enqueue(sql, odd.map((kind) => ({ kind })));
  await drainForTest(sql);
  const expected: Record<string, string> = { "odd-json": "done", "backoff-throws": "scheduled" };
  for (const job of await jobs(sql)) {
    const status = expected[job.kind] ?? "failed";
    assertEquals([job.kind, job.status, job.attempt], [job.kind, status, 1]);
    if (status === "failed") assert(job.error, job.kind);
  }
});

test("a process may snooze, enqueue what is next, and leave children or links behind", async (sql) => {
  const ids: Record<string, string> = {};
  for (const kind of ["retry-after", "next", "leaves-child", "links", "nul-stage"] as const) {
    ids[kind] = (await enqueue(sql, kind, {})).id;
  }
  await drainForTest(sql);
  const [snoozed, next, left, links, stage] = await queue.get(sql, Object.values(ids));
  assertEquals([snoozed.status, snoozed.snoozes], ["scheduled", 1]);
  assertEquals([next.status, left.status, left.result], ["done", "done", "left"]);
  assertEquals((await jobs(sql)).find((job) => job.kind === "echo")?.result, 5);
  assertEquals((await outputsOf(via(sql), links.id)).map((file) => file.name), ["x.txt"]);
  assertEquals([stage.status, stage.result], ["done", 1]);
});

test("outputs over the size limit fail the job, and inputs over it are refused, keeping nothing", async (sql) => {
  const error = await assertRejects(() =>
    writeFile(via(sql), "big.wav", bytes("x".repeat(101)), 100)
  );
  assertStringIncludes(error.message, "big.wav is larger than 100 bytes (SIDING_MAX_FILE_BYTES)");
  const [{ n }] = await sql`select count(*)::integer as n from ${sql(schema)}.files`;
  assertEquals(n, 0);
});

test("paid work is sent once: intent first, then its id, and a saved id is resumed", async (sql) => {
  Object.assign(service, { mood: "fine", sent: new Map(), charges: 0 });
  const { id } = await enqueue(sql, "charge", {});
  await drainForTest(sql);
  const [job] = await queue.get(sql, [id]);
  assertEquals([job.status, job.result], ["done", { collected: "request-1" }]);

  // A worker died between the id and the result: the next one collects, and sends nothing.
  const { id: second } = await enqueue(sql, "charge", {});
  await sql`update ${sql(schema)}.jobs set request_key = gen_random_uuid(), sent_at = now(),
    request_id = 'request-from-before' where id = ${second}`;
  await drainForTest(sql);
  assertEquals((await queue.get(sql, [second]))[0].result, { collected: "request-from-before" });
  assertEquals(service.charges, 1);
});

test("a request that is late for its lease is not sent, and its job is as if it never was meant to be", async (sql) => {
  const { id } = await enqueue(sql, "charge", {});
  const worker = await processes.register(sql, { role: "worker", name: "test", version: "0" });
  const options = { worker, kinds: ["charge"], most: 1, leaseS: 1, token: crypto.randomUUID() };
  const [job] = await claims.claim(sql, { queue: "default", claim: "skip_locked" }, options);
  let asked = 0;
  const late = paid({
    payload: z.unknown(),
    submit: async (_payload, _key, context) => {
      asked++;
      await waitFor(async () => {
        const [row] = await sql`select lease_until < now() as over from ${sql(schema)}.jobs`;
        return row.over;
      }, "the lease to run out");
      context.assertMine();
      throw new Error("it was sent");
    },
    collect: () => 1,
  });
  const runner = {
    ...{ db: via(sql), files: via(sql), worker, maxFileBytes: 100 },
    kinds: { charge: late },
  };
  const outcome = (await run(runner, job, new Stopper()))!;
  assertEquals([outcome.outcome, asked], ["failed", 1]);
  await new Outcomes(runner.db, worker, new AbortController().signal).record(outcome);
  const [row] = await sql`select status, sent_at from ${sql(schema)}.jobs where id = ${id}`;
  assertEquals({ ...row }, { status: "scheduled", sent_at: null });
});

test("a paid job that is stopped before it sends is given back, and not for review", async (sql) => {
  const worker = await processes.register(sql, { role: "worker", name: "test", version: "0" });
  const options = { worker, kinds: ["charge"], most: 1, leaseS: 60, token: crypto.randomUUID() };
  /** Runs a job that is stopped when `when` comes, and records what came of it. */
  const stopped = async (submit: (stop: () => void) => Promise<string>, lostReply = false) => {
    const { id } = await enqueue(sql, "charge", {}, { priority: 1 });
    const [job] = await claims.claim(sql, { queue: "default", claim: "skip_locked" }, options);
    const stopper = new Stopper();
    const abort = () => stopper.stop(new Stop("released", "its worker was stopped"));
    const db = via(sql);
    const runner = {
      ...{ files: db, worker, maxFileBytes: 100 },
      db: lostReply
        // The intent is stored, and its worker is stopped before it hears of that.
        ? { run: <T>(f: (sql: Pool) => Promise<T>) => db.run(f).finally(abort) }
        : db,
      kinds: {
        charge: paid({
          payload: z.unknown(),
          retries: 0,
          submit: () => submit(abort),
          collect: () => 1,
        }),
      },
    };
    const outcome = (await run(runner, job, stopper))!;
    await new Outcomes(db, worker, new AbortController().signal).record(outcome);
    const [row] = await sql`select status, sent_at, releases, failures from ${sql(schema)}.jobs
      where id = ${id}`;
    assertEquals({ ...row }, { status: "queued", sent_at: null, releases: 1, failures: 0 });
    await queue.cancel(sql, id);
  };
  await stopped((stop) => {
    stop();
    return Promise.reject(new NotSent("its inputs could not be read"));
  });
  let submits = 0;
  await stopped(() => Promise.reject(new Error(`sent ${++submits} times`)), true);
  assertEquals(submits, 0);
});

test("a look-up that never answers does not keep its job", async (sql) => {
  const { id } = await enqueue(sql, "charge", {});
  const mute = paid({
    payload: z.unknown(),
    submit: () => Promise.reject(new Error("connection reset")),
    collect: () => 1,
    lookup: () => new Promise(() => {}),
  });
  await typed({ charge: mute }).drainForTest(sql);
  const [job] = await queue.get(sql, [id]);
  assertEquals([job.status, job.error], [
    "review",
    "it is not known whether the request was sent: connection reset",
  ]);
});

test("a clock that jumps before a request is sent costs a question, and no more", async (sql) => {
  const { id } = await enqueue(sql, "charge", {});
  const now = Date.now;
  let asked = 0;
  const jumpy = paid({
    payload: z.unknown(),
    submit: (_payload, key, context) => {
      if (asked++ === 0) Date.now = () => now() + 4_000_000; // more than the lease of an hour
      context.assertMine();
      return Promise.resolve(key);
    },
    collect: () => 1,
  });
  try {
    await typed({ charge: jumpy }).drainForTest(sql);
  } finally {
    Date.now = now;
  }
  const [job] = await queue.get(sql, [id]);
  assertEquals([job.status, job.attempt, asked], ["done", 1, 2]);
});

test("paid work whose id comes before it is sent once more is not sent once more", async (sql) => {
  Object.assign(service, { mood: "fine", sent: new Map(), charges: 0 });
  const { id } = await enqueue(sql, "charge", {});
  const worker = await processes.register(sql, { role: "worker", name: "test", version: "0" });
  const claim = async () => {
    const options = { worker, kinds: ["charge"], most: 1, leaseS: 60, token: crypto.randomUUID() };
    return (await claims.claim(sql, { queue: "default", claim: "skip_locked" }, options))[0];
  };
  const { key } = (await requests.intend(sql, worker, await claim()))!;
  await sql`update ${sql(schema)}.jobs set lease_until = now() - interval '1 s'`;
  await queue.recover(sql);
  await requeue(sql, id);
  const job = await claim();
  assertEquals(job.request_id, null);
  assert(await requests.saveRequest(sql, key!, "request-late"));
  const runner = { db: via(sql), files: via(sql), worker, kinds, maxFileBytes: 100 };
  const outcome = await run(runner, job, new Stopper());
  assertEquals(outcome, {
    ...{ id, attempt: 2, outcome: "done", result: { collected: "request-late" }, next: [] },
  } as queue.Outcome);
  assertEquals(service.charges, 0);
});

test("paid work that was refused is tried again with its key; what may be charged waits in review", async (sql) => {
  Object.assign(service, { mood: "refuse", sent: new Map(), charges: 0 });
  const { id } = await enqueue(sql, "charge", {});
  await assertRejects(() => drainForTest(sql, 1), Error, "still not empty after 1 jobs");
  assertEquals((await queue.get(sql, [id]))[0].error, "the service is closed");
  const key = async () =>
    (await sql`select request_key as key from ${sql(schema)}.jobs where id = ${id}`)[0].key;
  const before = await key();
  await drainForTest(sql);
  assertEquals([(await queue.get(sql, [id]))[0].status, await key()], ["done", before]);
  assertEquals(service.charges, 1);

  // Charged, but the reply was lost: its service knows the key.
  service.mood = "charge-and-vanish";
  const { id: looked } = await enqueue(sql, "charge", {});
  await drainForTest(sql);
  assertEquals((await queue.get(sql, [looked]))[0].result, { collected: "request-2" });

  // Nobody knows: a person decides, or the id arrives late.
  service.mood = "vanish";
  const { id: uncertain } = await enqueue(sql, "charge", {});
  await drainForTest(sql);
  const [job] = await queue.get(sql, [uncertain]);
  assertEquals(job.status, "review");
  assertStringIncludes(
    job.error!,
    "it is not known whether the request was sent: connection reset",
  );
  await assertRejects(
    () => queue.cancel(sql, uncertain),
    queue.Refused,
    `job ${uncertain} was sent to its paid service and is review`,
  );
  const [{ request_key }] = await sql`select request_key from ${
    sql(schema)
  }.jobs where id = ${uncertain}`;
  assert(await requests.saveRequest(sql, request_key, "request-late"));
  assertEquals(
    await requests.saveRequest(sql, request_key, "another"),
    false,
    "from null to an id only",
  );
  await drainForTest(sql);
  assertEquals((await queue.get(sql, [uncertain]))[0].result, { collected: "request-late" });
  assertEquals(service.charges, 2);
});
