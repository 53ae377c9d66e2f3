/** Recovery, the review desk, and the script that does both. */
import { assert, assertEquals, assertRejects, assertStringIncludes } from "@std/assert";
import { deposit } from "../credits.ts";
import { type Pool, schema, via } from "../db.ts";
import * as desk from "../desk.ts";
import { inputsOf, writeFile } from "../files.ts";
import { lookUpReviews } from "../jobs/paid.ts";
import { attempts } from "../listing.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import * as requests from "../requests.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { kinds as testKinds, service } from "./kinds.ts";
import { runScript, startScript } from "./processes.ts";
import { startProxy } from "../dev/proxy.ts";

const kinds = ["a", "b", "charge"];
const jobsTable = (sql: Pool) => sql`${sql(schema)}.jobs`;

/** A worker whose jobs of kind `a` run in its own process. */
const aWorker = (sql: Pool) =>
  processes.register(sql, {
    role: "worker",
    name: "test",
    version: "0",
    kinds,
    knownKinds: kinds,
    inlineKinds: ["a"],
  });

async function claimNext(
  sql: Pool,
  worker: string,
  { most = 1, leaseS = 60, idle = true }: { most?: number; leaseS?: number; idle?: boolean } = {},
): Promise<queue.Job[]> {
  const { ready } = await claims.look(sql, null, kinds);
  if (ready.length === 0) return [];
  const token = crypto.randomUUID();
  return await claims.claim(sql, ready[0], { worker, kinds, most, leaseS, idle, token });
}

const fence = ({ id, attempt }: queue.Claimed) => ({ id, attempt });

const stateOf = async (sql: Pool, { id }: { id: string }) => (await queue.get(sql, [id]))[0];

const requestOf = async (sql: Pool, { id }: { id: string }) =>
  (await sql`select key, sent_at is not null as sent, request_id, look_up
    from ${sql(schema)}.requests where job_id = ${id}`)[0];

/** Enqueues a job, has a worker intend to send it, and fall silent: it is in review. */
async function aReview(sql: Pool, job: Partial<queue.NewJob> = {}) {
  const worker = await aWorker(sql);
  const [entry] = await queue.enqueue(sql, [{ kind: "charge", priority: 99, ...job }]);
  const [claimed] = await claimNext(sql, worker);
  const { key } = (await requests.intend(sql, worker, claimed))!;
  await runOut(sql);
  assertEquals((await queue.recover(sql))[0], {
    id: entry.id,
    kind: claimed.kind,
    status: "review",
  });
  return { ...entry, key: key!, worker, job: claimed };
}

/** Has the leases of all that runs run out. */
const runOut = (sql: Pool) =>
  sql`update ${jobsTable(sql)} set lease_until = now() - interval '1 s' where status = 'running'`;

/** A job that failed, for a reason. */
async function aFailure(sql: Pool, error: string, job: Partial<queue.NewJob> = {}) {
  const worker = await aWorker(sql);
  const [entry] = await queue.enqueue(sql, [{ kind: "b", priority: 99, ...job }]);
  const [claimed] = await claimNext(sql, worker);
  assert(await queue.fail(sql, worker, claimed, error));
  return { ...entry, job: claimed };
}

test("inline jobs lost together go back uncounted and run alone next; a crash alone counts", async (sql) => {
  const worker = await aWorker(sql);
  const entries = await queue.enqueue(sql, [
    ...Array.from({ length: 3 }, () => ({ kind: "a" })),
    { kind: "b" },
  ]);
  await claimNext(sql, worker, { most: 4, leaseS: 0 });
  await queue.recover(sql);
  const after = await queue.get(sql, entries.map(({ id }) => id));
  assertEquals(after.map((job) => [job.status, job.crashes, job.alone]), [
    ["queued", 0, true],
    ["queued", 0, true],
    ["queued", 0, true],
    ["queued", 1, false], // a process of its own: the crash is counted
  ]);
  assertEquals(
    after[0].error,
    `worker ${worker.slice(0, 8)} fell silent during attempt 1, with 4 jobs: it is next run alone`,
  );

  // Whoever runs something gets none of them, and whoever does not gets one and nothing beside it.
  const busy = await claimNext(sql, worker, { most: 4, idle: false });
  assertEquals(busy.map(({ id }) => id), [entries[3].id]);
  const [first, ...more] = await claimNext(sql, await aWorker(sql), { most: 4, leaseS: 0 });
  assertEquals([first.id, first.alone, more.length], [entries[0].id, true, 0]);
  await queue.recover(sql);
  assertEquals(
    [(await stateOf(sql, entries[0])).crashes, (await stateOf(sql, entries[0])).status],
    [1, "queued"],
  );
  await claimNext(sql, await aWorker(sql), { leaseS: 0 });
  await queue.recover(sql);
  assertEquals((await stateOf(sql, entries[0])).status, "failed");
});

test("each attempt that did not end in done is kept, with why, and goes with its job", async (sql) => {
  const worker = await aWorker(sql);
  const [{ id }] = await queue.enqueue(sql, [{ kind: "a" }]);
  const endings: [string, (job: queue.Claimed) => Promise<unknown>][] = [
    ["failed", (job) => queue.fail(sql, worker, job, "the tape broke", 0)],
    [
      "snoozed",
      (job) => queue.settle(sql, worker, [{ ...fence(job), outcome: "snoozed", delay_s: 0 }]),
    ],
    ["released", (job) => queue.release(sql, worker, job, "a deploy")],
    ["crashed", async () => {
      await runOut(sql);
      await queue.recover(sql);
    }],
    ["done", (job) => queue.finish(sql, worker, job, 1)],
  ];
  for (const [, end] of endings) {
    await claims.promote(sql);
    const [job] = await claimNext(sql, worker);
    await end(job);
  }
  const kept = (await attempts(sql, id)).toReversed();
  assertEquals(kept.map(({ attempt, outcome }) => [attempt, outcome]), [
    [1, "failed"],
    [2, "snoozed"],
    [3, "released"],
    [4, "crashed"],
  ]);
  assertEquals([kept[0].error, kept[0].worker], ["the tape broke", worker]);
  assert(kept.every((attempt) => attempt.claimed_at && attempt.claimed_at <= attempt.ended_at));
  await sql`delete from ${jobsTable(sql)} where id = ${id}`;
  assertEquals(await attempts(sql, id), []);
});

test("a job lost together with others, or cancelled, is kept as that", async (sql) => {
  const worker = await aWorker(sql);
  const entries = await queue.enqueue(sql, [{ kind: "a" }, { kind: "a" }]);
  await claimNext(sql, worker, { most: 2, leaseS: 0 });
  await queue.recover(sql);
  const outcomes = async (id: string) => (await attempts(sql, id)).map(({ outcome }) => outcome);
  assertEquals(await outcomes(entries[0].id), ["lost"]);
  const [job] = await claimNext(sql, worker);
  await queue.settle(sql, worker, [{ ...fence(job), outcome: "cancelled" }]);
  assertEquals(await outcomes(job.id), ["cancelled", "lost"]);
  await sql`truncate ${jobsTable(sql)}`;
  assertEquals(await outcomes(job.id), []);
});

for (const claim of ["skip_locked", "lock", "repeatable_read"] as const) {
  test(`a job that is to run alone is never claimed with others, by ${claim}`, async (sql) => {
    await queue.setQueue(sql, "default", { claim });
    const entries = await queue.enqueue(sql, Array.from({ length: 4 }, () => ({ kind: "a" })));
    await sql`update ${jobsTable(sql)} set alone = true where id = ${entries[1].id}`;
    const worker = await aWorker(sql);
    const ids = async (options: { idle: boolean }) =>
      (await claimNext(sql, worker, { most: 3, ...options })).map(({ id }) => Number(id));
    const before = await ids({ idle: true });
    assert(before[0] === 1 && !before.includes(2), String(before));
    assertEquals((await claims.look(sql, null, kinds)).ready[0].alone, true);
    assertEquals(await ids({ idle: true }), [2]);
    assertEquals([...before, ...await ids({ idle: false })], [1, 3, 4]);
  });
}

test("a batch whose leases run out one by one is still one batch", async (sql) => {
  const worker = await aWorker(sql);
  const entries = await queue.enqueue(sql, [{ kind: "a" }, { kind: "a" }]);
  await claimNext(sql, worker, { leaseS: 0 });
  await claimNext(sql, worker, { leaseS: 60, idle: false });
  await queue.recover(sql);
  await runOut(sql);
  await queue.recover(sql);
  const jobs = await queue.get(sql, entries.map(({ id }) => id));
  assertEquals(jobs.map(({ crashes, alone }) => [crashes, alone]), [[0, true], [0, true]]);
});

test("a job that ended well after it ran alone is like any other again", async (sql) => {
  const [entry] = await queue.enqueue(sql, [{ kind: "a" }]);
  await sql`update ${jobsTable(sql)} set alone = true`;
  const worker = await aWorker(sql);
  const [released] = await claimNext(sql, worker);
  await queue.release(sql, worker, released, "its worker was stopped");
  assertEquals((await stateOf(sql, entry)).alone, true, "a deploy shows nothing");
  const [failed] = await claimNext(sql, worker);
  await queue.fail(sql, worker, failed, "no", 0);
  assertEquals((await stateOf(sql, entry)).alone, false);
});

test("one key for a job's life, whoever sends it; no key without the lease, nor once it is cancelled", async (sql) => {
  const worker = await aWorker(sql);
  const [entry] = await queue.enqueue(sql, [{ kind: "charge" }]);
  const [job] = await claimNext(sql, worker);
  const first = (await requests.intend(sql, worker, job))!;
  assert(first.key && first.left_s > 50 && first.left_s <= 60, JSON.stringify(first));
  assertEquals((await requests.intend(sql, worker, job))!.key, first.key);
  await assertRejects(() => queue.cancel(sql, entry.id), queue.Refused, "is running");
  assertEquals(await requests.intend(sql, crypto.randomUUID(), job), null);
  assertEquals(await requests.intend(sql, worker, { ...job, attempt: 2 }), null);

  const unsent = { id: job.id, attempt: 1, outcome: "failed", error: "closed", unsent: true };
  await queue.settle(sql, worker, [{ ...unsent, delay_s: 0 } as queue.Outcome]);
  assertEquals((await requestOf(sql, entry)).sent, false);
  await claims.promote(sql);
  const [again] = await claimNext(sql, worker, { leaseS: 0 });
  const late = (await requests.intend(sql, worker, again))!;
  assertEquals([late.key, late.left_s <= 0], [null, true]);
  assertEquals((await requestOf(sql, entry)).sent, false);
  await sql`update ${jobsTable(sql)} set lease_until = now() + interval '60 s'`;
  assertEquals((await requests.intend(sql, worker, again))!.key, first.key);

  await queue.settle(sql, worker, [{ ...unsent, attempt: 2, delay_s: 0 } as queue.Outcome]);
  await claims.promote(sql);
  const [third] = await claimNext(sql, worker);
  assertEquals(await queue.cancel(sql, entry.id), "running");
  const cancelled = (await requests.intend(sql, worker, third))!;
  assertEquals([cancelled.key, cancelled.cancel], [null, true]);
});

test("a late id is saved whoever has the job by then, and is resumed instead of sent again", async (sql) => {
  // In review: it goes back in line, in its place.
  const waits = await aReview(sql);
  assert(await requests.saveRequest(sql, waits.key, "r1"));
  assert(await requests.saveRequest(sql, waits.key, "r1"), "a reply was lost");
  assertEquals(await requests.saveRequest(sql, waits.key, "r2"), false, "from null to an id only");
  const [resumed] = await claimNext(sql, waits.worker);
  assertEquals([resumed.id, resumed.request_id, resumed.request_key], [waits.id, "r1", waits.key]);
  assertEquals((await requests.intend(sql, waits.worker, resumed))!.request_id, "r1");
  await queue.finish(sql, waits.worker, resumed, 1);

  // Sent back in line by a person, and running again: whoever is about to send it hears of the id.
  const again = await aReview(sql);
  await desk.requeue(sql, again.id);
  const other = await aWorker(sql);
  const [second] = await claimNext(sql, other);
  assertEquals([second.id, second.request_id], [again.id, null]);
  assert(await requests.saveRequest(sql, again.key, "r3"));
  const heard = (await requests.intend(sql, other, second))!;
  assertEquals([heard.request_id, heard.key], ["r3", again.key]);
  await queue.finish(sql, other, second, 1);

  // Failed by a person: it stays failed, and the id is kept, also when the job is long gone.
  const failed = await aReview(sql);
  await desk.failReview(sql, failed.id, "nobody knows");
  assert(await requests.saveRequest(sql, failed.key, "r4"));
  assertEquals((await stateOf(sql, failed)).status, "failed");
  await sql`update ${jobsTable(sql)} set finished_at = now() - interval '2 s'`;
  assertEquals((await queue.sweep(sql, 1, 60)).jobs, 3);
  assertEquals((await requestOf(sql, failed)).request_id, "r4");
  const gone = await aReview(sql);
  await desk.failReview(sql, gone.id, "nobody knows");
  await sql`update ${jobsTable(sql)} set finished_at = now() - interval '2 s'`;
  await queue.sweep(sql, 1, 60);
  assert(await requests.saveRequest(sql, gone.key, "r5"));
  assertEquals((await requestOf(sql, gone)).request_id, "r5");
  assertEquals(await requests.saveRequest(sql, crypto.randomUUID(), "r6"), false);
});

test("what may have been sent is never failed, cancelled or given back by its worker: it waits in review", async (sql) => {
  const outcomes = [
    { outcome: "failed", error: "no" },
    { outcome: "failed", error: "no", delay_s: 0 },
    { outcome: "released", error: "stopped" },
    { outcome: "snoozed", delay_s: 0 },
    { outcome: "cancelled" },
  ];
  for (const outcome of outcomes) {
    const worker = await aWorker(sql);
    const [entry] = await queue.enqueue(sql, [{ kind: "charge" }]);
    const [job] = await claimNext(sql, worker);
    await requests.intend(sql, worker, job);
    await queue.settle(sql, worker, [{ id: job.id, attempt: 1, ...outcome } as queue.Outcome]);
    assertEquals((await stateOf(sql, entry)).status, "review", outcome.outcome);
  }
});

test("a worker that gave up on its request, whose id came meanwhile, has it resumed", async (sql) => {
  const worker = await aWorker(sql);
  const [entry] = await queue.enqueue(sql, [{ kind: "charge" }]);
  const [job] = await claimNext(sql, worker);
  const { key } = (await requests.intend(sql, worker, job))!;
  await requests.saveRequest(sql, key!, "r1");
  const outcome = { id: job.id, attempt: 1, outcome: "review", error: "not known" } as const;
  assertEquals(await queue.settle(sql, worker, [outcome]), [job.id]);
  assertEquals((await stateOf(sql, entry)).status, "queued");
  assertEquals((await claimNext(sql, worker))[0].request_id, "r1");
});

test("a request that is certainly unsent, but whose id came from an earlier sending, is resumed", async (sql) => {
  const again = await aReview(sql);
  await desk.requeue(sql, again.id);
  const worker = await aWorker(sql);
  const [job] = await claimNext(sql, worker);
  await requests.intend(sql, worker, job);
  assert(await requests.saveRequest(sql, again.key, "r1"));
  const unsent = { id: job.id, attempt: job.attempt, outcome: "failed", unsent: true } as const;
  assertEquals(await queue.settle(sql, worker, [{ ...unsent, error: "closed" }]), [job.id]);
  const [resumed] = await claimNext(sql, worker);
  assertEquals([resumed.id, resumed.request_id], [again.id, "r1"]);
});

test("a request that is saved is resumed after a crash, but not for ever", async (sql) => {
  const [entry] = await queue.enqueue(sql, [{ kind: "charge" }]);
  await sql`update ${jobsTable(sql)} set request_key = gen_random_uuid(), sent_at = now(),
    request_id = 'r'`;
  for (let crashes = 1; crashes <= 10; crashes++) {
    const [job] = await claimNext(sql, await aWorker(sql), { leaseS: 0 });
    assertEquals([job.id, job.request_id], [entry.id, "r"]);
    await queue.recover(sql);
    const { status } = await stateOf(sql, entry);
    assertEquals(status, crashes < 10 ? "queued" : "failed");
  }
});

test("the desk resumes, requeues and fails what is in review, and refuses the rest by its state", async (sql) => {
  const [one, two, three] = [await aReview(sql), await aReview(sql), await aReview(sql)];
  assertEquals((await desk.reviews(sql)).map(({ id }) => id), [one.id, two.id, three.id]);
  assertEquals((await desk.reviews(sql, 1, one.id)).map(({ id }) => id), [two.id]);
  await desk.resume(sql, one.id, "r1");
  await desk.requeue(sql, two.id);
  await desk.failReview(sql, three.id, "refunded by phone");
  const [resumed, requeued, failed] = await queue.get(sql, [one.id, two.id, three.id]);
  assertEquals([resumed.status, requeued.status], ["queued", "queued"]);
  assertEquals([failed.status, failed.error], ["failed", "refunded by phone"]);
  const [first, second] = await claimNext(sql, await aWorker(sql), { most: 2 });
  assertEquals([first.request_id, second.request_id], ["r1", null]);
  assertEquals([second.request_key, (await requestOf(sql, two)).sent], [two.key, false]);
  for (
    const act of [
      (id: string) => desk.resume(sql, id, "r"),
      (id: string) => desk.requeue(sql, id),
      (id: string) => desk.failReview(sql, id, "no"),
    ]
  ) {
    const error = await assertRejects(() => act(three.id), queue.Refused);
    assertEquals([error.message, error.code], [
      `job ${three.id} is failed, and not in review`,
      "SD409",
    ]);
    await assertRejects(() => act(first.id), queue.Refused, "is running, and not in review");
    await assertRejects(() => act("999"), queue.Refused, "there is no job 999");
  }
  await assertRejects(() => desk.resume(sql, one.id, ""), queue.Refused, "1 to 1000 characters");
});

test("failed jobs are tried again as new jobs, once each, with all that they had", async (sql) => {
  const file = await writeFile(via(sql), "a.bin", new Blob(["content"]).stream(), 100);
  const more = { owner: "o", payload: { n: 1 }, priority: 7, unique_key: "k", files: [file.id] };
  const failed = await aFailure(sql, "the tape is broken", more);
  const [{ new_id, created }] = await desk.retry(sql, { ids: [failed.id] });
  assertEquals(created, true);
  const again = await stateOf(sql, { id: new_id });
  assertEquals(
    [again.status, again.owner, again.payload, again.priority, again.attempt, again.failures],
    ["queued", "o", { n: 1 }, 7, 0, 0],
  );
  assertEquals((await inputsOf(via(sql), new_id)).map(({ id }) => id), [file.id]);
  assertEquals((await stateOf(sql, failed)).status, "failed");
  await assertRejects(
    () => desk.retry(sql, { ids: [failed.id] }),
    queue.Refused,
    `job ${failed.id} was tried again already, as job ${new_id}`,
  );
  await assertRejects(
    () => desk.retry(sql, { ids: [new_id] }),
    queue.Refused,
    `job ${new_id} is queued, and not failed`,
  );
  await assertRejects(() => desk.retry(sql, { ids: ["99"] }), queue.Refused, "there is no job 99");
  await assertRejects(() => desk.retry(sql, {}), queue.Refused, "is not said");
  // Its key is held by an unfinished job: that one is what it was tried again as.
  await sql`update ${jobsTable(sql)} set retried_as = null where id = ${failed.id}`;
  assertEquals(await desk.retry(sql, { ids: [failed.id] }), [
    { id: failed.id, new_id, created: false },
  ]);
});

test("jobs to try again are chosen by kind, error and time, oldest first, all or none", async (sql) => {
  const jobs = [
    await aFailure(sql, "out of tape", { kind: "a" }),
    await aFailure(sql, "out of tape"),
    await aFailure(sql, "out of luck"),
    await aFailure(sql, "out of tape"),
    await aFailure(sql, "out of tape"),
  ];
  for (const [index, { id }] of jobs.entries()) {
    await sql`update ${jobsTable(sql)} set finished_at = now() - ${60 - index} * interval '1 m'
      where id = ${id}`;
  }
  const [{ at }] = await sql`select finished_at as at from ${jobsTable(sql)} where id = 5`;
  const tried = async (filter: desk.RetryFilter, most?: number) =>
    (await desk.retry(sql, filter, most)).map(({ id }) => Number(id));
  await queue.setQueue(sql, "default", { max_waiting: 1 });
  await assertRejects(() => desk.retry(sql, { kind: "b" }), queue.Refused, "is full");
  await queue.setQueue(sql, "default", { max_waiting: null });
  assertEquals(await tried({ kind: "b", error: "tape", until: at }, 1), [2]);
  assertEquals(await tried({ kind: "b", error: "tape", until: at }), [4]);
  assertEquals(await tried({ since: at }), [5]);
  assertEquals(await tried({ error: "out" }), [1, 3]);
});

test("to try paid work again resumes its request and pays only when told to", async (sql) => {
  const failed = await aFailure(sql, "not collected", { kind: "charge" });
  const key = crypto.randomUUID();
  await sql`update ${jobsTable(sql)} set request_key = ${key}, sent_at = now(), request_id = 'r'
    where id = ${failed.id}`;
  const [{ new_id }] = await desk.retry(sql, { ids: [failed.id] });
  const worker = await aWorker(sql);
  const [job] = await claimNext(sql, worker);
  assertEquals([job.id, job.request_id, job.request_key], [new_id, "r", key]);
  await queue.fail(sql, worker, job, "not collected again");
  const [{ new_id: paid }] = await desk.retry(sql, { ids: [new_id], payAgain: true });
  const [fresh] = await claimNext(sql, worker);
  assertEquals([fresh.id, fresh.request_id, fresh.request_key], [paid, null, null]);
  await queue.finish(sql, worker, fresh, 1);

  const uncertain = await aReview(sql);
  await desk.failReview(sql, uncertain.id, "nobody knows");
  await assertRejects(
    () => desk.retry(sql, { ids: [uncertain.id] }),
    queue.Refused,
    `job ${uncertain.id} may have been charged for`,
  );
  assertEquals(await desk.retry(sql, { kind: "charge" }), []);
  assertEquals((await desk.retry(sql, { ids: [uncertain.id], payAgain: true })).length, 1);
});

test("to try a job again gives its paid request to no other job, and one owner's want stops no other's", async (sql) => {
  const paidFailure = async (key: string, request: string) => {
    const failed = await aFailure(sql, "not collected", { kind: "charge", unique_key: key });
    await sql`update ${jobsTable(sql)} set request_key = gen_random_uuid(), sent_at = now(),
      request_id = ${request} where id = ${failed.id}`;
    return failed;
  };
  // Another job has its unique key by now.
  const old = await paidFailure("k", "r-old");
  const [other] = await queue.enqueue(sql, [{ kind: "charge", unique_key: "k", payload: "new" }]);
  assertEquals(await desk.retry(sql, { kind: "charge" }), []);
  await assertRejects(
    () => desk.retry(sql, { ids: [old.id] }),
    queue.Refused,
    `job ${old.id} has a paid request, and another job has its unique key "k"`,
  );
  const [waiting] = await claimNext(sql, await aWorker(sql));
  assertEquals([waiting.id, waiting.request_id], [other.id, null]);

  // Two with one key: one now, the other when that has ended.
  const [one, two] = [await paidFailure("l", "r-one"), await paidFailure("l", "r-two")];
  assertEquals((await desk.retry(sql, { kind: "charge" })).map(({ id }) => id), [one.id]);
  const worker = await aWorker(sql);
  const [first] = await claimNext(sql, worker);
  assertEquals(first.request_id, "r-one");
  await queue.finish(sql, worker, first, 1);
  assertEquals((await desk.retry(sql, { kind: "charge" })).map(({ id }) => id), [two.id]);
  await queue.finish(sql, worker, (await claimNext(sql, worker))[0], 1);

  // Credits for two of the three of one owner, and the job of another who comes after.
  for (const owner of ["poor", "rich"]) await deposit(sql, owner, 10);
  const priced: queue.Enqueued[] = [];
  for (const owner of ["poor", "poor", "poor", "rich"]) {
    priced.push(await aFailure(sql, "no", { owner, price: 4 }));
  }
  const tried = (await desk.retry(sql, { kind: "b" })).map(({ id }) => id);
  assertEquals(tried, [0, 1, 3].map((n) => priced[n].id));
  await assertRejects(
    () => desk.retry(sql, { ids: [priced[2].id] }),
    queue.Refused,
    'owner "poor" has 2 credits, 4 are needed',
  );
});

test("all that are in review have their turn to be asked for, and one odd answer is its own job's trouble", async (sql) => {
  const reviews: { id: string; key: string }[] = [];
  for (let n = 0; n < 45; n++) reviews.push(await aReview(sql));
  const asked: string[] = [];
  const answers = {
    charge: {
      ...testKinds.charge,
      lookup: (key: string) => {
        asked.push(key);
        if (key === reviews[3].key) throw new Error("a\0b");
        return Promise.resolve(
          key === reviews[4].key ? "r\0" : key === reviews[44].key ? "r" : null,
        );
      },
    },
  };
  const found = [];
  for (let pass = 0; pass < 3; pass++) {
    found.push(...(await lookUpReviews(via(sql), answers, 60)).found);
  }
  assertEquals(new Set(asked).size, 45);
  assertEquals(asked.length, 45);
  assertEquals(found, [reviews[44].id]);
  const items = await desk.reviews(sql);
  assertEquals(items.find(({ id }) => id === reviews[3].id)?.look_up, "a\ufffdb");
  assertStringIncludes(items.find(({ id }) => id === reviews[4].id)!.look_up!, "0x00");
});

test("a job in review goes on once its service has its request; the others say what it said", async (sql) => {
  Object.assign(service, { mood: "fine", sent: new Map(), charges: 0 });
  const [has, not] = [await aReview(sql), await aReview(sql)];
  service.sent.set(has.key, "request-found");
  assertEquals((await lookUpReviews(via(sql), testKinds, 60)).found, [has.id]);
  assertEquals((await stateOf(sql, has)).status, "queued");
  assertEquals((await stateOf(sql, not)).status, "review");
  assertEquals(
    (await desk.reviews(sql)).map(({ id, look_up }) => [id, look_up]),
    [[not.id, "the service has none under its key"]],
  );
  // Not asked again within the time, and found once it is there.
  service.sent.set(not.key, "request-late");
  assertEquals((await lookUpReviews(via(sql), testKinds, 60)).found, []);
  assertEquals((await lookUpReviews(via(sql), testKinds, 0)).found, [not.id]);
});

test(
  "recover takes back, promotes, resumes and removes, and says what it did",
  async (sql, url) => {
    const silent = await queue.enqueue(sql, [{ kind: "b" }, { kind: "b" }]);
    await claimNext(sql, await aWorker(sql), { most: 2, leaseS: 0 });
    const [due] = await queue.enqueue(sql, [{ kind: "b", delay_s: 60 }]);
    await sql`update ${jobsTable(sql)} set due_at = now() where id = ${due.id}`;
    const old = await aFailure(sql, "long ago");
    await sql`update ${jobsTable(sql)} set finished_at = now() - interval '31 days'
    where id = ${old.id}`;
    const env = { DATABASE_URL: url };
    const first = await runScript("recover.ts", ["--heartbeat-ms", "200"], env);
    assertEquals(first.code, 0);
    assertStringIncludes(first.stderr, "watching the database for 0.6 s");
    assertStringIncludes(first.stdout, "1 jobs that were due are in line");
    assertStringIncludes(first.stdout, `job ${silent[0].id} b was left by its worker: queued`);
    assertStringIncludes(first.stdout, "2 jobs were taken back from silent workers");
    assertStringIncludes(first.stdout, "removed 1 jobs, 0 files and 0 worker rows");
    assertEquals((await stateOf(sql, due)).status, "queued");
    const { stdout, stderr } = await runScript("recover.ts", ["--json"], env);
    assertEquals(JSON.parse(stdout).items, []);
    assertEquals(stderr.trim().split("\n").length, 1, "its settings: there is nothing to wait for");
  },
);

test("recover waits out an outage before it takes anything back", async (sql, url) => {
  await queue.enqueue(sql, [{ kind: "b" }]);
  await claimNext(sql, await aWorker(sql), { leaseS: 0 });
  await using proxy = startProxy(url);
  const flags = ["--heartbeat-ms", "1000"];
  await using script = startScript("recover.ts", flags, { DATABASE_URL: proxy.url });
  await waitFor(() => script.log().includes("watching"), "the watch");
  proxy.cut();
  await waitFor(() => script.log().includes("was away"), "the outage to be seen");
  const [{ mended }] = await sql`select now() as mended`;
  proxy.mend();
  assertEquals(await script.ended, 0);
  const [{ seconds }] = await sql`
    select extract(epoch from now() - ${mended})::float8 as seconds`;
  assert(seconds > 3, `${seconds} s after the outage, and not three heartbeats`);
  assertEquals((await queue.get(sql, ["1"]))[0].status, "queued");
});

test(
  "recover is the review desk: it lists, resumes, requeues, fails and tries again",
  async (sql, url) => {
    const recover = (...args: string[]) => runScript("recover.ts", args, { DATABASE_URL: url });
    const [one, two, three] = [await aReview(sql), await aReview(sql), await aReview(sql)];
    const { items } = JSON.parse((await recover("list", "--json")).stdout);
    assertEquals(items.map((item: desk.Review) => [item.id, item.request_key]), [
      [one.id, one.key],
      [two.id, two.key],
      [three.id, three.key],
    ]);
    assertStringIncludes((await recover("list")).stdout, `key ${one.key}, may have been sent at`);
    assertStringIncludes(
      (await recover("resume", one.id, "--request", "r1")).stdout,
      `job ${one.id} goes on from request r1`,
    );
    assertEquals((await recover("requeue", two.id)).code, 0);
    assertEquals((await recover("fail", three.id, "--reason", "refunded")).code, 0);
    const jobs = await queue.get(sql, [one.id, two.id, three.id]);
    assertEquals(jobs.map(({ status }) => status), ["queued", "queued", "failed"]);
    const refused = await recover("requeue", three.id);
    assertEquals(refused.code, 1);
    assertStringIncludes(
      refused.stderr,
      `\nrecover: job ${three.id} is failed, and not in review\n`,
    );
    const again = await recover("retry", "--kind", "charge", "--pay-again", "--json");
    assertEquals(JSON.parse(again.stdout).items.map((item: desk.Retried) => item.id), [three.id]);
    assertEquals((await recover("list")).stdout, "no job is in review\n");
  },
);

test("recover refuses what it cannot understand, by name, value and rule", async (_sql, url) => {
  const wrong: [string[], string][] = [
    [["frobnicate"], 'there is no command "frobnicate"'],
    [["resume"], "resume wants the ID of a job"],
    [["resume", "x"], '"x" is not the id of a job'],
    [["resume", "7"], "resume wants --request"],
    [["fail", "7"], "fail wants --reason"],
    [["fail", "7", "8", "--reason", "r"], "fail takes 1 ids at the most"],
    [["requeue", "7", "--reason", "r"], "requeue takes no --reason"],
    [["retry"], "retry wants ids of jobs, or --kind"],
    [["retry", "--since", "noon"], '--since is "noon": it must be an instant'],
    [["list", "7"], "list takes 0 ids at the most"],
  ];
  await Promise.all(wrong.map(async ([args, message]) => {
    const { code, stderr } = await runScript("recover.ts", args, { DATABASE_URL: url });
    assertEquals(code, 2, stderr);
    assertStringIncludes(stderr, message);
  }));
});
