/** The queue's statements, one by one and against each other. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { connect, type Pool, schema, type Sql, via, withQueueLock } from "../db.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import * as requests from "../requests.ts";
import { tidyUp } from "../upkeep.ts";
import { databaseTest as test, waitFor } from "./database.ts";

const kinds = ["a", "b"];
const jobsTable = (sql: Pool) => sql`${sql(schema)}.jobs`;

async function aWorker(sql: Pool): Promise<string> {
  return await processes.register(sql, {
    role: "worker",
    name: "test",
    version: "0",
    kinds,
    knownKinds: kinds,
  });
}

/** Claims from the first queue that has something. */
async function claimNext(sql: Pool, worker: string, most = 1, leaseS = 60): Promise<queue.Job[]> {
  const { ready } = await claims.look(sql, null, kinds);
  if (ready.length === 0) return [];
  const token = crypto.randomUUID();
  return await claims.claim(sql, ready[0], { worker, kinds, most, leaseS, token });
}

async function stateOf(sql: Pool, id: string): Promise<queue.JobView> {
  const [job] = await queue.get(sql, [id]);
  return job;
}

/** Opens a transaction, leaves it open until `close` is called, and commits or rolls back then. */
async function openTransaction(sql: Pool, body: (tx: Sql) => Promise<unknown>) {
  const opened = Promise.withResolvers<void>();
  const closed = Promise.withResolvers<"commit" | "rollback">();
  const over = sql.begin(async (tx) => {
    await body(tx);
    opened.resolve();
    if (await closed.promise === "rollback") throw new Error("rolled back");
  }).catch((error) => {
    opened.reject(error);
    if (error.message !== "rolled back") throw error;
  });
  await opened.promise;
  return async (how: "commit" | "rollback") => {
    closed.resolve(how);
    await over;
  };
}

test("jobs are claimed by priority, then due time, then id", async (sql) => {
  const entries = await queue.enqueue(sql, [
    { kind: "a" },
    { kind: "a", priority: 5 },
    { kind: "a" },
    { kind: "a", priority: -1 },
    { kind: "a", priority: 5 },
  ]);
  const late = entries[2].id; // due before the others of its priority
  await sql`update ${jobsTable(sql)} set due_at = due_at - interval '1 hour' where id = ${late}`;
  const worker = await aWorker(sql);
  const order = [];
  for (const _ of entries) order.push(...(await claimNext(sql, worker)).map((job) => job.id));
  const ids = entries.map((entry) => entry.id);
  assertEquals(order, [ids[1], ids[4], ids[2], ids[0], ids[3]]);
});

test("a claim of several returns them in order, and no more than asked", async (sql) => {
  const entries = await queue.enqueue(
    sql,
    Array.from({ length: 10 }, (_, i) => ({ kind: "a", priority: i % 2 })),
  );
  const claimed = await claimNext(sql, await aWorker(sql), 7);
  const ids = entries.map((entry) => entry.id);
  assertEquals(
    claimed.map((job) => job.id),
    [1, 3, 5, 7, 9, 0, 2].map((i) => ids[i]),
  );
});

test("ids are strings and survive 2^53", async (sql) => {
  await sql`select setval(pg_get_serial_sequence(${`${schema}.jobs`}, 'id'), 9007199254740992)`;
  const [{ id }] = await queue.enqueue(sql, [{ kind: "a" }]);
  assertEquals(id, "9007199254740993");
  const worker = await aWorker(sql);
  const [job] = await claimNext(sql, worker);
  assertEquals(job.id, id);
  const pulse = await queue.heartbeat(sql, worker, [{ ...job, stage: "x", progress: 0.5 }], 60, 45);
  assertEquals(pulse.beats, [{ id, state: "renewed", cancel: false }]);
  assert(await queue.finish(sql, worker, job, { fine: true }));
  assertEquals((await stateOf(sql, id)).status, "done");
});

test("a caller's rollback takes its jobs along, and its commit brings them", async (sql) => {
  for (const how of ["rollback", "commit"] as const) {
    const close = await openTransaction(sql, (tx) => queue.enqueue(tx, [{ kind: "a" }]));
    assertEquals((await claims.look(sql, null, kinds)).ready, [], "seen before the commit");
    await close(how);
    assertEquals((await claims.look(sql, null, kinds)).ready.length, how === "commit" ? 1 : 0);
  }
});

test("a batch is enqueued whole or not at all", async (sql) => {
  const error = await assertRejects(
    () => queue.enqueue(sql, [{ kind: "a" }, { kind: "Not A Name" }]),
    queue.EnqueueError,
  );
  assertEquals(
    error.message,
    'job 2: kind is "Not A Name": it must be 1 to 63 of a-z, 0-9, ".", "_" and "-"',
  );
  assertEquals(await queue.counts(sql), []);
});

test("what cannot be enqueued is refused with a message that names it", async (sql) => {
  await queue.setQueue(sql, "full", { max_waiting: 1 });
  await queue.enqueue(sql, [{ kind: "a", queue: "full" }]);
  const cases: [queue.NewJob, string, string][] = [
    [{ kind: "a", queue: "nowhere" }, "SD404", 'queue "nowhere" does not exist'],
    [{ kind: "a", payload: { title: "a\0b" } }, "22P05", "jobs[0].payload.title contains a NUL"],
    [
      { kind: "a", payload: ["\ud800"] },
      "22P02",
      "jobs[0].payload[0] contains half of a surrogate",
    ],
    [{ kind: "a", payload: "x".repeat(1_048_575) }, "SD422", "job 1: payload is larger than 1 MiB"],
    [{ kind: "a", due_at: "infinity" }, "SD422", "due_at is not an instant"],
    [{ kind: "a", due_at: new Date(NaN) }, "SD422", "due_at is not an instant"],
    [{ kind: "a", delay_s: Infinity }, "SD422", "delay_s is Infinity"],
    [{ kind: "a", proirity: 1 } as queue.NewJob, "SD422", "job 1: there is no field proirity"],
    [{ kind: "a", files: [null as unknown as string] }, "23502", "null value"],
    [{ kind: "a", due_at: "soon" }, "22007", 'timestamp with time zone: "soon"'],
    [{ kind: "a", due_at: new Date(), delay_s: 1 }, "SD422", "due_at and delay_s are both given"],
    [{ kind: "a", delay_s: -1 }, "SD422", "delay_s is not from 0"],
    [{ kind: "a", unique_key: "" }, "SD422", "unique_key is not 1 to 200 characters"],
    [{ kind: "a", owner: "x".repeat(201) }, "SD422", "owner is not 1 to 200 characters"],
    [{ kind: "a", files: ["77"] }, "SD410", "file"],
    [{ kind: "a", files: "77" as unknown as string[] }, "SD422", "files is not a list of ids"],
    [{ kind: "a", queue: "full" }, "SD429", 'queue "full" is full: its max_waiting is 1'],
  ];
  for (const [job, code, message] of cases) {
    const error = await assertRejects(() => queue.enqueue(sql, [job]), queue.EnqueueError, message);
    assertEquals(error.code, code, message);
  }
  assertEquals((await queue.counts(sql)).map((count) => count.queued), [1]);
  const largest = "x".repeat(1_048_574); // with its two quotes exactly 1 MiB
  await queue.enqueue(sql, [{ kind: "a", payload: largest }]);
});

test("a payload is any JSON value, also null, and {} when there is none", async (sql) => {
  const payloads = [null, undefined, 0, "", [], { a: null }, "\u00e9\u{1f3b5}"];
  const entries = await queue.enqueue(sql, payloads.map((payload) => ({ kind: "a", payload })));
  const jobs = await queue.get(sql, entries.map((entry) => entry.id));
  assertEquals(jobs.map((job) => job.payload), payloads.map((p) => p === undefined ? {} : p));
});

test("a unique key returns the unfinished job that has it, of its kind only, until that is final", async (sql) => {
  const worker = await aWorker(sql);
  const job = { kind: "a", unique_key: "k" };
  const [first] = await queue.enqueue(sql, [job]);
  assertEquals(await queue.enqueue(sql, [job]), [{ id: first.id, created: false }]);
  const [other] = await queue.enqueue(sql, [{ kind: "b", unique_key: "k" }]);
  assert(other.created && other.id !== first.id);
  const [claimed] = await claimNext(sql, worker);
  assertEquals(claimed.id, first.id);
  assertEquals(await queue.enqueue(sql, [job]), [{ id: first.id, created: false }], "running");
  await queue.finish(sql, worker, claimed, null);
  const [second] = await queue.enqueue(sql, [job]);
  assert(second.created && second.id !== first.id, "the key is free once its job is done");
});

test("keys twice in a batch make one job each, and every entry gets its id", async (sql) => {
  const [held] = await queue.enqueue(sql, [{ kind: "a", unique_key: "held" }]);
  const entries = await queue.enqueue(sql, [
    { kind: "a", unique_key: "x" },
    { kind: "a" },
    { kind: "a", unique_key: "held" },
    { kind: "a", unique_key: "x" },
    { kind: "b", unique_key: "x" },
  ]);
  assertEquals(entries.map((entry) => entry.created), [true, true, false, false, true]);
  assertEquals(entries[3].id, entries[0].id);
  assertEquals(entries[2].id, held.id);
  assertEquals(new Set(entries.map((entry) => entry.id)).size, 4);
});

for (const how of ["commit", "rollback"] as const) {
  test(`two that race for a unique key leave one job when the first ends in a ${how}`, async (sql) => {
    let first: queue.Enqueued[] = [];
    const close = await openTransaction(sql, async (tx) => {
      first = await queue.enqueue(tx, [{ kind: "a", unique_key: "k" }]);
    });
    const second = queue.enqueue(sql, [{ kind: "a", unique_key: "k" }, { kind: "a" }]);
    await waitFor(async () => {
      const [{ n }] = await sql`select count(*)::integer as n from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'`;
      return n === 1;
    }, "the second to wait for the first");
    await close(how);
    const entries = await second;
    assertEquals(entries.map((entry) => entry.created), [how === "rollback", true]);
    if (how === "commit") assertEquals(entries[0].id, first[0].id);
    const [{ n }] = await sql`select count(*)::integer as n from ${jobsTable(sql)}
      where unique_key = 'k'`;
    assertEquals(n, 1);
  });
}

test(
  "keys whose holders finish between the insert and the look-up are taken after all",
  async (sql, url) => {
    // Fifty holders that come and end together, as fast as they can, and enqueues of the same keys
    // that meet them in every phase.
    const batch = Array.from({ length: 50 }, (_, i) => ({ kind: "a", unique_key: `k${i}` }));
    const worker = await aWorker(sql);
    const churn = connect(url, { max: 1 });
    let over = false;
    const churning = (async () => {
      while (!over) {
        await queue.enqueue(churn, batch);
        const jobs = await claimNext(churn, worker, 100);
        const done = jobs.map(({ id, attempt }) => ({
          id,
          attempt,
          outcome: "cancelled" as const,
        }));
        await queue.settle(churn, worker, done);
      }
    })();
    const other = connect(url, { max: 1 });
    try {
      for (let i = 0; i < 300; i++) {
        const ids = (await queue.enqueue(other, batch)).map((entry) => entry.id);
        assertEquals((await queue.get(other, ids)).length, new Set(ids).size, "each id is a job");
      }
    } finally {
      over = true;
      await churning;
      await churn.end();
      await other.end();
    }
  },
);

test("batches that take the same keys in opposite orders do not deadlock", async (sql) => {
  const keys = Array.from({ length: 50 }, (_, i) => `k${i}`);
  for (let round = 0; round < 20; round++) {
    const batch = (list: string[]) =>
      sql.begin((tx) =>
        queue.enqueue(tx, list.map((key) => ({ kind: "a", unique_key: `${round}-${key}` })))
      );
    const [one, two] = await Promise.all([batch(keys), batch(keys.toReversed())]);
    assertEquals(new Set([...one, ...two].map((entry) => entry.id)).size, keys.length);
  }
});

test("a scheduled job is due at its time by the database's clock, and is promoted then", async (sql) => {
  const [{ id }] = await queue.enqueue(sql, [{ kind: "a", delay_s: 3600 }]);
  assertEquals((await stateOf(sql, id)).status, "scheduled");
  assertEquals(await claims.look(sql, null, kinds), {
    ready: [],
    promotable: false,
    opens_ms: null,
  });
  assertEquals(await claims.promote(sql), 0);
  await sql`update ${jobsTable(sql)} set due_at = now() where id = ${id}`;
  assertEquals((await claims.look(sql, null, kinds)).promotable, true);
  assertEquals(await claims.promote(sql), 1);
  assertEquals((await claimNext(sql, await aWorker(sql))).map((job) => job.id), [id]);
});

test("a job due in the past is due now and passes nobody", async (sql) => {
  const [first] = await queue.enqueue(sql, [{ kind: "a" }]);
  await queue.enqueue(sql, [{ kind: "a", due_at: "2001-01-01T00:00:00Z" }]);
  assertEquals((await claimNext(sql, await aWorker(sql)))[0].id, first.id);
});

test("null is a name like any other", async (sql) => {
  await queue.setQueue(sql, "null");
  const [{ id }] = await queue.enqueue(sql, [{ kind: "null", queue: "null" }]);
  const worker = await aWorker(sql);
  const { ready } = await claims.look(sql, ["null"], ["null"]);
  const claim = { worker, kinds: ["null"], most: 1, leaseS: 60, token: crypto.randomUUID() };
  assertEquals((await claims.claim(sql, ready[0], claim)).map((job) => job.id), [id]);
});

test("a paused queue is not claimed from, even by a claim that looked before", async (sql) => {
  for (const claim of ["skip_locked", "lock", "repeatable_read"] as const) {
    const name = claim.replace("_", "-");
    await queue.setQueue(sql, name, { claim });
    await queue.enqueue(sql, [{ kind: "a", queue: name }]);
    const { ready } = await claims.look(sql, [name], kinds);
    await queue.setQueue(sql, name, { paused: true });
    const options = {
      worker: await aWorker(sql),
      kinds,
      most: 1,
      leaseS: 60,
      token: crypto.randomUUID(),
    };
    assertEquals(await claims.claim(sql, ready[0], options), []);
    assertEquals((await claims.look(sql, [name], kinds)).ready, []);
    await queue.setQueue(sql, name, { paused: false });
    assertEquals((await claims.claim(sql, ready[0], options)).length, 1);
  }
});

test("a queue with max_running cannot skip locks, and bad settings are refused", async (sql) => {
  await queue.setQueue(sql, "limited", { max_running: 3 });
  const [row] = await sql`select claim from ${sql(schema)}.queues where name = 'limited'`;
  assertEquals(row.claim, "lock");
  await assertRejects(
    () => queue.setQueue(sql, "limited", { claim: "skip_locked" }),
    Error,
    "limit_needs_order",
  );
  await assertRejects(() => queue.setQueue(sql, "No Name"), Error, "queue_name");
  await assertRejects(
    () => queue.setQueue(sql, "q", { max_waiting: 0 }),
    Error,
    "max_waiting_positive",
  );
  const unknown = { max_speed: 1 } as queue.QueueSettings;
  await assertRejects(() => queue.setQueue(sql, "q", unknown), Error, "no setting max_speed");
  await queue.setQueue(sql, "limited", { max_running: null, claim: "skip_locked" });
});

test("a queue with unfinished jobs cannot be removed or renamed", async (sql) => {
  await queue.setQueue(sql, "q");
  await queue.enqueue(sql, [{ kind: "a", queue: "q" }]);
  await assertRejects(
    () => sql`delete from ${sql(schema)}.queues where name = 'q'`,
    Error,
    "unfinished",
  );
  await assertRejects(
    () => sql`update ${sql(schema)}.queues set name = 'r' where name = 'q'`,
    Error,
    "unfinished",
  );
  const worker = await aWorker(sql);
  await queue.finish(sql, worker, (await claimNext(sql, worker))[0], null);
  await sql`delete from ${sql(schema)}.queues where name = 'q'`;
});

test(
  "an owner never has more than max_per_owner unfinished jobs, whoever races",
  async (sql, url) => {
    await queue.setQueue(sql, "fair", { max_per_owner: 3 });
    const pools = Array.from({ length: 8 }, () => connect(url, { max: 1 }));
    try {
      const tries = await Promise.allSettled(
        pools.flatMap((pool) =>
          Array.from(
            { length: 5 },
            () => queue.enqueue(pool, [{ kind: "a", queue: "fair", owner: "ada" }]),
          )
        ),
      );
      assertEquals(
        tries.filter((t) => t.status === "fulfilled").length,
        3,
      );
      for (const t of tries) {
        if (t.status === "rejected") {
          assertEquals(t.reason.code, "SD429");
          assertEquals(
            t.reason.message,
            'owner "ada" would have 4 unfinished jobs in queue "fair": its max_per_owner is 3',
          );
        }
      }
      await queue.enqueue(sql, [{ kind: "a", queue: "fair", owner: "bob" }, {
        kind: "a",
        queue: "fair",
      }]);
      const worker = await aWorker(sql);
      const [done] = await claimNext(sql, worker);
      await queue.finish(sql, worker, done, null);
      await queue.enqueue(sql, [{ kind: "a", queue: "fair", owner: "ada" }]);
    } finally {
      await Promise.all(pools.map((pool) => pool.end()));
    }
  },
);

test("an owner never has more than max_per_owner with what is not committed yet", async (sql) => {
  await queue.setQueue(sql, "fair", { max_per_owner: 3 });
  const mine = { kind: "a", queue: "fair", owner: "ada" };
  for (const [how, refused] of [["rollback", false], ["commit", true]] as const) {
    const close = await openTransaction(sql, (tx) => queue.enqueue(tx, [mine, mine, mine]));
    // It waits for the other to end: what it would count before that is not what there is after.
    const one = queue.enqueue(sql, [mine]).then(() => false, (error) => error.code === "SD429");
    await waitFor(
      async () =>
        (await sql`select from pg_locks where locktype = 'advisory' and not granted`).length,
      "the second to wait for the first",
    );
    await close(how);
    assertEquals(await one, refused);
    if (!refused) await sql`delete from ${jobsTable(sql)}`;
  }
});

test("max_per_owner refuses a transaction whose snapshot cannot see the others", async (sql) => {
  await queue.setQueue(sql, "fair", { max_per_owner: 3 });
  const refused = sql.begin(
    "isolation level repeatable read",
    (tx) => queue.enqueue(tx, [{ kind: "a", queue: "fair", owner: "ada" }]),
  );
  await assertRejects(() => refused, queue.EnqueueError, "READ COMMITTED");
});

test(
  "a finish that brings the next of an owner, and enqueues of that owner, do not deadlock",
  async (sql, url) => {
    await queue.setQueue(sql, "fair", { max_per_owner: 1000 });
    const job = { kind: "a", queue: "fair", owner: "ada", unique_key: "k" };
    const worker = await aWorker(sql);
    const other = connect(url, { max: 1 });
    let over = false;
    const enqueueing = (async () => {
      while (!over) await queue.enqueue(other, [job]);
    })();
    try {
      for (let i = 0; i < 300; i++) {
        for (const claimed of await claimNext(sql, worker)) {
          assert(await queue.finish(sql, worker, claimed, null, [job]));
        }
      }
    } finally {
      over = true;
      await enqueueing;
      await other.end();
    }
  },
);

test(
  "a queue that claims by lock refuses a database whose default hides what the others did",
  async (sql, _url, direct) => {
    await queue.setQueue(sql, "limited", { max_running: 1 });
    await queue.enqueue(sql, [{ kind: "a", queue: "limited" }]);
    await sql.unsafe(
      `alter database ${
        new URL(direct).pathname.slice(1)
      } set default_transaction_isolation = 'repeatable read'`,
    );
    // The default counts for connections that are made after it; a pooler has some of before.
    const strict = connect(direct, { max: 1 });
    try {
      await assertRejects(
        () => claimNext(strict, crypto.randomUUID()),
        Error,
        'queue "limited" counts its jobs, which needs READ COMMITTED, not REPEATABLE READ',
      );
    } finally {
      await strict.end();
    }
  },
);

test("who waits for a lock that another holds gives up on the server too, and takes nothing then", async (sql) => {
  await queue.setQueue(sql, "limited", { max_running: 1 });
  await queue.enqueue(sql, [{ kind: "a", queue: "limited" }]);
  const close = await openTransaction(sql, (tx) => tx`select ${tx(schema)}.lock_queue('limited')`);
  const worker = await aWorker(sql);
  const error = await assertRejects(() => claimNext(sql, worker));
  assertEquals((error as { code?: string }).code, "55P03");
  await close("commit");
  assertEquals((await queue.counts(sql))[0].running, 0);
});

test("max_waiting counts what waits, and lets go as it is claimed", async (sql) => {
  await queue.setQueue(sql, "small", { max_waiting: 2 });
  const job = { kind: "a", queue: "small" };
  await queue.enqueue(sql, [job, { ...job, delay_s: 60 }]);
  await assertRejects(() => queue.enqueue(sql, [job]), queue.EnqueueError, "full");
  await claimNext(sql, await aWorker(sql));
  await queue.enqueue(sql, [job]);
});

test("a write of a worker that lost its job matches nothing, whatever it writes", async (sql) => {
  const worker = await aWorker(sql);
  const other = await aWorker(sql);
  await queue.enqueue(sql, [{ kind: "a" }]);
  const [old] = await claimNext(sql, worker, 1, 0);
  await queue.recover(sql);
  const [job] = await claimNext(sql, worker);
  assertEquals([job.id, job.attempt], [old.id, 2]);
  const before = await stateOf(sql, job.id);
  const stale: [string, queue.Claimed][] = [[worker, old], [other, job]];
  for (const [who, { id, attempt }] of stale) {
    assertEquals(
      await queue.settle(sql, who, [{ id, attempt, outcome: "done", result: "stale" }]),
      [],
    );
    assertEquals(await queue.fail(sql, who, { id, attempt }, "stale"), false);
    assertEquals(await queue.release(sql, who, { id, attempt }, "stale"), false);
    for (const outcome of ["cancelled", "snoozed", "review"] as const) {
      const end = { id, attempt, outcome, delay_s: 1, error: "stale" } as queue.Outcome;
      assertEquals(await queue.settle(sql, who, [end]), []);
    }
    assertEquals(await requests.intend(sql, who, { id, attempt }), null);
    const named = [{ id, attempt, stage: "stale", progress: 1 }];
    assertEquals((await queue.heartbeat(sql, who, named, 60, 45)).beats[0].state, "lost");
  }
  assertEquals(await stateOf(sql, job.id), before);
  assert(await queue.finish(sql, worker, job, "fresh"));
});

test("a repeated write whose first reply was lost is known to stand; a different outcome is not", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, [{ kind: "a" }, { kind: "a" }, { kind: "a" }]);
  const [one, two, three] = await claimNext(sql, worker, 3);
  assert(await queue.finish(sql, worker, one, 1, [{ kind: "b" }]));
  assert(await queue.finish(sql, worker, one, 1, [{ kind: "b" }]));
  assertEquals((await queue.counts(sql)).find((c) => c.kind === "b")?.queued, 1, "next only once");
  assertEquals(await queue.fail(sql, worker, one, "no"), false);
  assert(await queue.fail(sql, worker, two, "no"));
  assert(await queue.fail(sql, worker, two, "no"));
  assertEquals(await queue.finish(sql, worker, two, 1), false);
  assert(await queue.release(sql, worker, three, "stopping"));
  assertEquals((await stateOf(sql, three.id)).releases, 1);
});

test("outcomes of all sorts are settled in one statement, each for itself", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, Array.from({ length: 7 }, () => ({ kind: "a", owner: "ada" })));
  const jobs = await claimNext(sql, worker, 7);
  const fence = (i: number) => ({ id: jobs[i].id, attempt: 1 });
  const settled = await queue.settle(sql, worker, [
    {
      ...fence(0),
      outcome: "done",
      result: { n: 1 },
      next: [{ kind: "b" }, { kind: "b", owner: "bob" }],
    },
    { ...fence(1), outcome: "failed", error: "broken" },
    { ...fence(2), outcome: "failed", error: "again", delay_s: 60 },
    { ...fence(3), outcome: "snoozed", delay_s: 60 },
    { ...fence(4), outcome: "released", error: "stopping" },
    { ...fence(5), outcome: "cancelled" },
    { id: jobs[6].id, attempt: 9, outcome: "done", result: null },
  ]);
  assertEquals(settled.length, 6);
  const after = await queue.get(sql, jobs.map((job) => job.id));
  assertEquals(after.map((job) => job.status), [
    ...["done", "failed", "scheduled", "scheduled", "queued", "cancelled", "running"] as const,
  ]);
  assertEquals(after[0].result, { n: 1 });
  assertEquals(after.map((job) => job.failures), [0, 1, 1, 0, 0, 0, 0]);
  assertEquals([after[3].snoozes, after[4].releases], [1, 1]);
  assert(+after[2].due_at > Date.now() + 30_000, "a retry is due later");
  assertEquals(
    +after[4].due_at,
    +jobs[4].id && +(await stateOf(sql, jobs[0].id)).due_at,
    "keeps its place",
  );
  const next = await sql`select owner from ${jobsTable(sql)} where kind = 'b' order by id`;
  assertEquals(next.map((row) => row.owner), ["ada", "bob"]);
});

test("a job is given back so many times and no more, unless it was paid for", async (sql) => {
  const worker = await aWorker(sql);
  const [free] = await queue.enqueue(sql, [{ kind: "a" }]);
  for (let n = 1; n <= 6; n++) {
    const [job] = await claimNext(sql, worker);
    assertEquals([job.id, job.releases], [free.id, n - 1]);
    await queue.release(sql, worker, job, "its worker was stopped");
  }
  const job = await stateOf(sql, free.id);
  assertEquals([job.status, job.releases, job.crashes], ["failed", 6, 0]);
  assertEquals(job.error, "given back 6 times, the last since its worker was stopped");

  const [paid] = await queue.enqueue(sql, [{ kind: "a" }]);
  await sql`update ${jobsTable(sql)} set releases = 99, sent_at = now(),
    request_key = gen_random_uuid(), request_id = 'r' where id = ${paid.id}`;
  await queue.release(sql, worker, (await claimNext(sql, worker))[0], "its worker was stopped");
  assertEquals((await stateOf(sql, paid.id)).status, "queued");
});

test("a job whose next is refused is not done, and nothing of the refusal stays", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, [{ kind: "a" }]);
  const [job] = await claimNext(sql, worker);
  await assertRejects(
    () => queue.finish(sql, worker, job, null, [{ kind: "b", queue: "nowhere" }]),
    Error,
    'queue "nowhere" does not exist',
  );
  assertEquals((await stateOf(sql, job.id)).status, "running");
});

test("cancel ends what waits, asks for what runs, and says what is final", async (sql) => {
  const worker = await aWorker(sql);
  const [waits, later, runs] = await queue.enqueue(sql, [
    { kind: "a" },
    { kind: "a", delay_s: 60 },
    { kind: "a", priority: 1 },
  ]);
  const [job] = await claimNext(sql, worker);
  assertEquals(await queue.cancel(sql, waits.id), "cancelled");
  assertEquals(await queue.cancel(sql, later.id), "cancelled");
  assertEquals(await queue.cancel(sql, runs.id), "running");
  assertEquals(await queue.cancellations(sql, worker), [runs.id]);
  const pulse = await queue.heartbeat(
    sql,
    worker,
    [{ ...job, stage: null, progress: null }],
    60,
    45,
  );
  assertEquals(pulse.beats[0].cancel, true);
  await queue.settle(sql, worker, [{ id: job.id, attempt: job.attempt, outcome: "cancelled" }]);
  assertEquals(await queue.cancel(sql, runs.id), "cancelled");
  assertEquals(await queue.cancel(sql, "999"), null);
});

test("a job asked to be cancelled is not run again: not retried, released or recovered", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, Array.from({ length: 3 }, () => ({ kind: "a" })));
  const [failing, released] = await claimNext(sql, worker, 2);
  const [silent] = await claimNext(sql, worker, 1, 0);
  for (const { id } of [failing, released, silent]) await queue.cancel(sql, id);
  await queue.fail(sql, worker, failing, "no", 60);
  await queue.release(sql, worker, released, "stopping");
  await queue.recover(sql);
  for (const { id } of [failing, released, silent]) {
    assertEquals((await stateOf(sql, id)).status, "cancelled");
  }
});

test("an open transaction on one job stops no heartbeat and no claim of the others", async (sql) => {
  for (const claim of ["skip_locked", "lock", "repeatable_read"] as const) {
    const name = claim.replace("_", "-");
    await queue.setQueue(sql, name, { claim });
    const worker = await aWorker(sql);
    const [first] = await queue.enqueue(
      sql,
      Array.from({ length: 4 }, () => ({ kind: "a", queue: name })),
    );
    const jobs = await claimNext(sql, worker, 2);
    const [waiting] = (await queue.get(sql, [String(Number(first.id) + 2)])).map((job) => job.id);
    const close = await openTransaction(sql, async (tx) => {
      await queue.cancel(tx, jobs[0].id);
      await queue.cancel(tx, waiting);
    });
    const named = jobs.map((job) => ({ ...job, stage: null, progress: null }));
    const pulse = await queue.heartbeat(sql, worker, named, 60, 45);
    assertEquals(pulse.beats.map((beat) => beat.state), ["skipped", "renewed"]);
    const next = await claimNext(sql, worker);
    assertEquals(next.map((job) => job.id), [String(Number(waiting) + 1)], claim);
    await close("rollback");
    assertEquals((await claimNext(sql, worker)).map((job) => job.id), [waiting]);
  }
});

test("an outcome that meets a heartbeat of its job stands, whichever way it is written", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, Array.from({ length: 2 }, () => ({ kind: "a" })));
  const jobs = await claimNext(sql, worker, 2);
  const waits = async () =>
    (await sql`select count(*)::int as n from pg_stat_activity
      where datname = current_database() and wait_event_type = 'Lock'`)[0].n === 1;
  const done = (job: queue.Job) =>
    [{ id: job.id, attempt: job.attempt, outcome: "done", result: 1 }] as const;
  const ways = [
    async (job: queue.Job) =>
      (await queue.settle(sql, worker, done(job), 5, 20_000)).includes(job.id),
    // Its row has moved: what this did not find goes the other way.
    async (job: queue.Job) =>
      (await claims.finishMany(sql, worker, [{ ...job, result: 1 }], 20_000)).has(job.id) ||
      await queue.finish(sql, worker, job, 1),
  ];
  for (const [i, write] of ways.entries()) {
    const beats = [{ ...jobs[i], stage: "on its way", progress: null }];
    const close = await openTransaction(sql, (tx) => queue.heartbeat(tx, worker, beats, 60, 45));
    const written = write(jobs[i]);
    await waitFor(waits, "it to wait for the row");
    await close("commit");
    assert(await written, String(i));
    assertEquals((await stateOf(sql, jobs[i].id)).status, "done");
  }
});

test("recovery gives a silent worker's job back once, in its place, and fails it the second time", async (sql) => {
  const worker = await aWorker(sql);
  const [{ id }] = await queue.enqueue(sql, [{ kind: "a" }]);
  await queue.enqueue(sql, [{ kind: "a" }]);
  await claimNext(sql, worker, 1, 0);
  assertEquals(await queue.recover(sql), [{ id, kind: "a", status: "queued" }]);
  const [again] = await claimNext(sql, worker, 1, 0);
  assertEquals([again.id, again.attempt, again.crashes], [id, 2, 1]);
  assertEquals((await queue.recover(sql))[0].status, "failed");
  const job = await stateOf(sql, id);
  assertEquals(job.error, `worker ${worker.slice(0, 8)} fell silent during attempt 2`);
  assertEquals(await queue.recover(sql), []);
});

test("recovery leaves a job alone whose lease was renewed", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, [{ kind: "a" }]);
  const [job] = await claimNext(sql, worker, 1, 0);
  await queue.heartbeat(sql, worker, [{ ...job, stage: null, progress: null }], 60, 45);
  assertEquals(await queue.recover(sql), []);
});

test("a job claimed by a call whose reply was lost is a stray of the next heartbeat", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, [{ kind: "a" }]);
  const token = crypto.randomUUID();
  const ready = { queue: "default", claim: "skip_locked" } as const;
  const [job] = await claims.claim(sql, ready, { worker, kinds, most: 1, leaseS: 60, token });
  const pulse = await queue.heartbeat(sql, worker, [], 60, 45);
  assertEquals(pulse.strays, [{ id: job.id, attempt: 1, claim_token: token }]);
});

test("the leader is the lowest process of its role and pool that was seen of late", async (sql) => {
  const one = await aWorker(sql);
  const two = await aWorker(sql);
  const other = await processes.register(sql, {
    role: "worker",
    pool: "gpu",
    name: "t",
    version: "0",
  });
  const isLeader = async (id: string) => {
    const [row] = await sql`select ${sql(schema)}.is_leader(${id}, 45) as yes`;
    return row.yes;
  };
  const leaders = async () => {
    const all = [];
    for (const id of [one, two, other]) all.push(await isLeader(id));
    return all;
  };
  assertEquals(await leaders(), [true, false, true]);
  await sql`update ${
    sql(schema)
  }.processes set seen_at = now() - interval '46 s' where boot_id = ${one}`;
  assertEquals(await isLeader(two), true);
  await queue.heartbeat(sql, one, [], 60, 45);
  assertEquals(await leaders(), [true, false, true]);
  await processes.deregister(sql, one);
  assertEquals(await leaders(), [false, true, true]);
  assertEquals((await queue.heartbeat(sql, one, [], 60, 45)).alive, false);
});

test("jobs of a kind that no live worker's code knows fail after the grace, others wait", async (sql) => {
  const [unknown, known, elsewhere] = await queue.enqueue(sql, [
    { kind: "typo" },
    { kind: "b" },
    { kind: "typo" },
  ]);
  await queue.setQueue(sql, "unworked");
  await sql`update ${jobsTable(sql)} set queue = 'unworked' where id = ${elsewhere.id}`;
  assertEquals(await queue.failUnknownKinds(sql, 0, 45), [], "no worker at all");
  await processes.register(sql, {
    role: "worker",
    name: "t",
    version: "0",
    queues: ["default"],
    kinds: ["a"],
    knownKinds: kinds,
  });
  assertEquals(await queue.failUnknownKinds(sql, 3600, 45), [], "within the grace");
  await sql`update ${jobsTable(sql)} set due_at = now() - interval '2 h'`;
  assertEquals(await queue.failUnknownKinds(sql, 3600, 45), [{ id: unknown.id, kind: "typo" }]);
  assertEquals(
    (await stateOf(sql, unknown.id)).error,
    `unknown kind "typo": no worker's code has it`,
  );
  assertEquals((await stateOf(sql, known.id)).status, "queued", "known, though not served");
});

test("the counts are by queue and kind, with how long the first has waited", async (sql) => {
  await queue.setQueue(sql, "q", { max_running: 2, paused: true });
  await queue.enqueue(sql, [
    { kind: "a" },
    { kind: "a" },
    { kind: "a", delay_s: 60 },
    { kind: "b", queue: "q" },
  ]);
  await sql`update ${
    jobsTable(sql)
  } set due_at = now() - interval '90 s' where kind = 'a' and status = 'queued'`;
  await claimNext(sql, await aWorker(sql));
  const [a, b] = await queue.counts(sql);
  const { oldest_wait_s, ...rest } = a;
  assert(oldest_wait_s !== null && oldest_wait_s >= 90 && oldest_wait_s < 100, `${oldest_wait_s}`);
  assertEquals(rest, {
    ...{ queue: "default", kind: "a", paused: false, max_running: null },
    ...{ scheduled: 1, queued: 1, running: 1, review: 0 },
  });
  assertEquals([b.queue, b.paused, b.max_running, b.queued], ["q", true, 2, 1]);
});

test("no statement can make a row that its state does not allow", async (sql) => {
  const [{ id }] = await queue.enqueue(sql, [{ kind: "a" }]);
  const impossible = [
    ["status = 'running'", "running_is_leased"],
    ["lease_until = now()", "running_is_leased"],
    ["status = 'running', lease_until = now()", "running_is_owned"],
    ["worker_id = gen_random_uuid()", "waiting_is_free"],
    ["status = 'done'", "final_is_timed"],
    ["finished_at = now()", "final_is_timed"],
    ["status = 'failed', finished_at = now()", "failed_says_why"],
    ["status = 'review'", "review_is_uncertain"],
    ["sent_at = now()", "sent_with_key"],
    ["request_id = 'r1'", "id_after_intent"],
    ["status = 'gone'", "status_known"],
    ["progress = 2", "progress_range"],
  ];
  for (const [change, constraint] of impossible) {
    await assertRejects(
      () => sql.unsafe(`update ${schema}.jobs set ${change} where id = ${id}`),
      Error,
      constraint,
    );
  }
});

test("the sweep removes what is past its time, and nothing else, in bounded batches", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, Array.from({ length: 5 }, () => ({ kind: "a" })));
  for (const job of await claimNext(sql, worker, 4)) await queue.finish(sql, worker, job, null);
  assertEquals(await queue.sweep(sql, 3600, 3600), { jobs: 0, files: 0, processes: 0 });
  await sql`update ${jobsTable(sql)} set finished_at = now() - interval '2 h' where id < 4`;
  await sql`update ${sql(schema)}.processes set seen_at = now() - interval '2 days'`;
  assertEquals((await queue.sweep(sql, 3600, 3600, 2)).jobs, 2);
  assertEquals(await queue.sweep(sql, 3600, 3600, 2), { jobs: 1, files: 0, processes: 0 });
  const left = await sql`select id from ${jobsTable(sql)} order by id`;
  assertEquals(left.map((row) => row.id), ["4", "5"]);
});

test("a sweep that is stopped by its bound says that there is more, and the next one goes on", async (sql) => {
  await sql`
    insert into ${jobsTable(sql)} (queue, kind, payload, status, finished_at)
    select 'default', 'a', '{}', 'done', now() - interval '2 h' from generate_series(1, 103)`;
  const times = { silentS: 45, unknownKindS: 3600, retentionS: 3600, fileGraceS: 3600 };
  const first = await tidyUp(via(sql), times, 1);
  assertEquals([first.removed.jobs, first.more], [100, true]);
  const second = await tidyUp(via(sql), times, 1);
  assertEquals([second.removed.jobs, second.more], [3, false]);
});

test("a queue's lock is held to the end, and a handle whose connection died sends nothing more", async (sql) => {
  const order: string[] = [];
  await Promise.all([1, 2].map((n) =>
    withQueueLock(sql, "default", async (tx) => {
      order.push(`in ${n}`);
      await tx`select pg_sleep(0.05)`;
      order.push(`out ${n}`);
    })
  ));
  assertEquals(order[0].slice(-1), order[1].slice(-1), "one after the other");
  assertEquals(order[2].slice(-1), order[3].slice(-1));

  let reached = false;
  const second = Promise.withResolvers<string>();
  const lost = withQueueLock(sql, "default", async (tx) => {
    const [{ pid }] = await tx`select pg_backend_pid() as pid`;
    await sql`select pg_terminate_backend(${pid})`;
    await tx`select 1`.catch(() => {});
    reached = true;
    try {
      await tx`insert into ${tx(schema)}.queues (name) values ('outside')`;
      second.resolve("sent");
    } catch (error) {
      second.resolve((error as Error).name);
    }
  });
  await assertRejects(() => lost);
  await waitFor(() => reached, "the callback to go on");
  assertEquals(await second.promise, "LockLost");
  const rows = await sql`select from ${sql(schema)}.queues where name = 'outside'`;
  assertEquals(rows.length, 0);
});
