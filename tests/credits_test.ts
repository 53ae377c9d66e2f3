/** Credits (I13): reserved, captured, released and held with the change of the job, whoever makes it. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { audit, balance, deposit, fold } from "../credits.ts";
import { codeOf, connect, type Pool, schema, type Sql, via } from "../db.ts";
import { Outcomes } from "../jobs/outcomes.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import * as requests from "../requests.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { startScript } from "./processes.ts";

const kinds = ["a", "b"];
const jobsTable = (sql: Sql) => sql`${sql(schema)}.jobs`;
const ledgerTable = (sql: Sql) => sql`${sql(schema)}.ledger`;
const accountsTable = (sql: Sql) => sql`${sql(schema)}.accounts`;

async function aWorker(sql: Pool): Promise<string> {
  return await processes.register(sql, {
    role: "worker",
    name: "test",
    version: "0",
    kinds,
    knownKinds: kinds,
  });
}

async function claimNext(sql: Sql, worker: string, most = 1, leaseS = 60): Promise<queue.Job[]> {
  const ready = { queue: "default", claim: "skip_locked" } as const;
  const token = crypto.randomUUID();
  return await claims.claim(sql as Pool, ready, { worker, kinds, most, leaseS, token });
}

/** An owner's free, reserved and captured credits. */
async function credits(sql: Sql, owner = "ada"): Promise<number[] | null> {
  const has = await balance(sql, owner);
  return has && [has.balance, has.reserved, has.captured].map(Number);
}

/** Fails unless the credits are these, now and once all is folded, and nothing is off. */
async function assertCredits(sql: Pool, expected: number[], owner = "ada"): Promise<void> {
  assertEquals(await credits(sql, owner), expected);
  assertEquals(await audit(sql), []);
  await fold(sql);
  assertEquals(await credits(sql, owner), expected, "folded");
  assertEquals(await audit(sql), []);
}

/** A job of ada's that costs 8 of her 20 credits, claimed. */
async function aPricedJob(sql: Pool, worker: string, leaseS = 60): Promise<queue.Job> {
  await deposit(sql, "ada", 20);
  await queue.enqueue(sql, [{ kind: "a", owner: "ada", price: 8 }]);
  const [job] = await claimNext(sql, worker, 1, leaseS);
  return job;
}

/** Runs `body` with so many connections of their own. */
async function withPools(url: string, n: number, body: (pools: Pool[]) => Promise<void>) {
  const pools = Array.from({ length: n }, () => connect(url, { max: 1 }));
  try {
    await body(pools);
  } finally {
    await Promise.all(pools.map((pool) => pool.end()));
  }
}

/** Numbers from 0 to 1, the same ones for the same seed (mulberry32). */
function randomOf(seed: number): () => number {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), seed | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296;
  };
}

test("credits are reserved with the job and captured when it is done", async (sql) => {
  const worker = await aWorker(sql);
  assertEquals(await balance(sql, "ada"), null);
  assertEquals(await deposit(sql, "ada", 20), "20");
  const [{ id }] = await queue.enqueue(sql, [{ kind: "a", owner: "ada", price: 8 }]);
  assertEquals(await balance(sql, "ada"), {
    ...{ owner: "ada", balance: "12", reserved: "8", captured: "0" },
  });
  const [job] = await claimNext(sql, worker);
  assertEquals([job.id, job.price], [id, "8"]);
  assertEquals((await queue.get(sql, [id]))[0].price, "8");
  await assertCredits(sql, [12, 8, 0]);
  assert(await queue.finish(sql, worker, job, null));
  await assertCredits(sql, [12, 0, 8]);
  assert(await queue.finish(sql, worker, job, null), "a repeated write stands");
  await assertCredits(sql, [12, 0, 8]);
});

test("a job without a price moves no credits, and needs no account", async (sql) => {
  const worker = await aWorker(sql);
  await queue.enqueue(sql, [{ kind: "a", owner: "bob" }, { kind: "a" }]);
  const [job, other] = await claimNext(sql, worker, 2);
  assertEquals(job.price, null);
  await queue.finish(sql, worker, job, null);
  await queue.fail(sql, worker, other, "no");
  assertEquals((await sql`select from ${ledgerTable(sql)}`).length, 0);
});

/** What each outcome of an attempt makes of the 8 credits that were reserved. */
const ends: [string, number[], (sql: Pool, worker: string, job: queue.Job) => Promise<unknown>][] =
  [
    [
      "failed for good releases",
      [20, 0, 0],
      (sql, worker, job) => queue.fail(sql, worker, job, "no"),
    ],
    [
      "failed and tried again holds",
      [12, 8, 0],
      (sql, worker, job) => queue.fail(sql, worker, job, "no", 60),
    ],
    [
      "snoozed holds",
      [12, 8, 0],
      (sql, worker, { id, attempt }) =>
        queue.settle(sql, worker, [{ id, attempt, outcome: "snoozed", delay_s: 60 }]),
    ],
    [
      "released holds",
      [12, 8, 0],
      (sql, worker, job) => queue.release(sql, worker, job, "stopping"),
    ],
    [
      "released once too often releases",
      [20, 0, 0],
      (sql, worker, { id, attempt }) =>
        queue.settle(sql, worker, [{ id, attempt, outcome: "released", error: "stopping" }], 0),
    ],
    ["cancelled while it runs releases", [20, 0, 0], async (sql, worker, { id, attempt }) => {
      await queue.cancel(sql, id);
      assertEquals(await credits(sql), [12, 8, 0], "only asked for");
      await queue.settle(sql, worker, [{ id, attempt, outcome: "cancelled" }]);
    }],
    ["put in review holds", [12, 8, 0], async (sql, worker, job) => {
      const { id, attempt } = job;
      await requests.intend(sql, worker, job);
      await queue.settle(sql, worker, [{ id, attempt, outcome: "review", error: "not known" }]);
    }],
    ["put in review and failed there releases", [20, 0, 0], async (sql, worker, job) => {
      const { id, attempt } = job;
      await requests.intend(sql, worker, job);
      await queue.settle(sql, worker, [{ id, attempt, outcome: "review", error: "not known" }]);
      await sql`update ${jobsTable(sql)} set status = 'failed', finished_at = now(),
        error = 'never came' where id = ${id}`;
    }],
  ];
for (const [what, expected, end] of ends) {
  test(`a job that is ${what} its credits`, async (sql) => {
    const worker = await aWorker(sql);
    await end(sql, worker, await aPricedJob(sql, worker));
    await assertCredits(sql, expected);
  });
}

test("a job that is cancelled in line releases its credits", async (sql) => {
  await deposit(sql, "ada", 20);
  const entries = await queue.enqueue(sql, [
    { kind: "a", owner: "ada", price: 8 },
    { kind: "a", owner: "ada", price: 3, delay_s: 60 },
  ]);
  await assertCredits(sql, [9, 11, 0]);
  for (const { id } of entries) assertEquals(await queue.cancel(sql, id), "cancelled");
  await assertCredits(sql, [20, 0, 0]);
});

test("the first crash holds a job's credits, the one that fails it releases them", async (sql) => {
  const worker = await aWorker(sql);
  await aPricedJob(sql, worker, 0);
  assertEquals((await queue.recover(sql))[0].status, "queued");
  await assertCredits(sql, [12, 8, 0]);
  await claimNext(sql, worker, 1, 0);
  assertEquals((await queue.recover(sql))[0].status, "failed");
  await assertCredits(sql, [20, 0, 0]);
});

test("a job of a kind that nobody knows releases its credits when that fails it", async (sql) => {
  await aWorker(sql);
  await deposit(sql, "ada", 20);
  await queue.enqueue(sql, [{ kind: "typo", owner: "ada", price: 8 }]);
  assertEquals((await queue.failUnknownKinds(sql, 0, 45)).length, 1);
  await assertCredits(sql, [20, 0, 0]);
});

test("outcomes of all sorts in one settle move each its own credits", async (sql) => {
  const worker = await aWorker(sql);
  await deposit(sql, "ada", 100);
  await deposit(sql, "bob", 100);
  await queue.enqueue(
    sql,
    [1, 2, 4, 8, 16].flatMap((price) => [
      { kind: "a", owner: "ada", price },
      { kind: "a", owner: "bob", price: price * 2 },
      { kind: "a", owner: "bob" },
    ]),
  );
  const jobs = await claimNext(sql, worker, 15);
  const outcomes = [
    { outcome: "done", result: 1 },
    { outcome: "failed", error: "no" },
    { outcome: "failed", error: "again", delay_s: 0 },
    { outcome: "released", error: "stopping" },
    { outcome: "cancelled" },
  ] as const;
  const settled = await queue.settle(
    sql,
    worker,
    jobs.map(({ id, attempt }, i) => ({ id, attempt, ...outcomes[Math.floor(i / 3)] })),
  );
  assertEquals(settled.length, 15);
  await assertCredits(sql, [87, 12, 1], "ada");
  await assertCredits(sql, [74, 24, 2], "bob");
});

test("a batch that an owner cannot pay is refused whole, and leaves nothing behind", async (sql) => {
  await deposit(sql, "ada", 5);
  await deposit(sql, "bob", 50);
  const cases: [queue.NewJob[], string][] = [
    [[{ kind: "a", owner: "ada", price: 8 }], 'owner "ada" has 5 credits, 8 are needed'],
    [[{ kind: "a", owner: "eve", price: 1 }], 'owner "eve" has no account'],
    [
      [
        { kind: "a", owner: "bob", price: 8 },
        { kind: "a", owner: "ada", price: 3 },
        { kind: "a" },
        { kind: "a", owner: "ada", price: 3 },
      ],
      'owner "ada" has 5 credits, 6 are needed',
    ],
  ];
  for (const [jobs, message] of cases) {
    const error = await assertRejects(() => queue.enqueue(sql, jobs), queue.EnqueueError);
    assertEquals([error.code, error.message], ["SD402", message]);
  }
  assertEquals(await queue.counts(sql), []);
  await assertCredits(sql, [5, 0, 0]);
  await assertCredits(sql, [50, 0, 0], "bob");
  assertEquals((await sql`select from ${ledgerTable(sql)}`).length, 2, "the deposits");
  await queue.enqueue(sql, [{ kind: "a", owner: "ada", price: 5 }]);
  await assertCredits(sql, [0, 5, 0]);
});

test("a price is a whole number of somebody's, or refused by name", async (sql) => {
  const most = Number.MAX_SAFE_INTEGER;
  const rule = "it must be a whole number from 1 to 9007199254740991";
  await deposit(sql, "ada", most);
  const wrong: [unknown, string][] = [
    ...[0, -1, 1.5, most + 1, 1e300].map((n): [unknown, string] => [n, `price is `]),
    [1.5, `job 2: price is 1.5: ${rule}`],
    ["8", `job 2: price is "8": ${rule}`],
    [true, `job 2: price is true: ${rule}`],
    [NaN, "job 2: price is NaN"],
    [Infinity, "job 2: price is Infinity"],
  ];
  for (const [price, message] of wrong) {
    const jobs = [{ kind: "a" }, { kind: "a", owner: "ada", price: price as number }];
    const error = await assertRejects(() => queue.enqueue(sql, jobs), queue.EnqueueError, message);
    assertEquals(error.code, "SD422", message);
  }
  const nobodys = await assertRejects(
    () => queue.enqueue(sql, [{ kind: "a", price: 8 }]),
    queue.EnqueueError,
  );
  assertEquals(
    [nobodys.code, nobodys.message],
    ["SD422", "job 1: price is 8 and owner is missing: a job with a price is somebody's"],
  );
  await assertRejects(
    () =>
      sql`insert into ${jobsTable(sql)} (queue, kind, payload, status, price)
      values ('default', 'a', '{}', 'queued', 8)`,
    Error,
    "priced_has_owner",
  );
  await queue.enqueue(sql, [
    { kind: "a", owner: "ada", price: most },
    { kind: "a", owner: "ada", price: null as unknown as undefined },
  ]);
  assertEquals((await balance(sql, "ada"))?.reserved, String(most));
});

test("sums beyond what a number can say are exact", async (sql) => {
  assertEquals(await deposit(sql, "ada", 2n ** 62n + 1n), "4611686018427387905");
  assertEquals((await balance(sql, "ada"))?.balance, "4611686018427387905");
  await assertRejects(() => deposit(sql, "ada", 2 ** 53), RangeError, "9007199254740992");
});

test("a unique key that is taken reserves nothing more", async (sql) => {
  await deposit(sql, "ada", 20);
  const job = { kind: "a", owner: "ada", price: 8, unique_key: "k" };
  const [first, twin] = await queue.enqueue(sql, [job, job]);
  assertEquals([first.created, twin.created], [true, false]);
  await assertCredits(sql, [12, 8, 0]);
  assertEquals(await queue.enqueue(sql, [job]), [{ id: first.id, created: false }]);
  await assertCredits(sql, [12, 8, 0]);
});

test("a caller's rollback takes the reservation and the capture along", async (sql) => {
  const worker = await aWorker(sql);
  const job = await aPricedJob(sql, worker);
  const undone = sql.begin(async (tx) => {
    await queue.enqueue(tx, [{ kind: "a", owner: "ada", price: 12 }]);
    assert(await queue.finish(tx, worker, job, null));
    assertEquals(await credits(tx), [0, 12, 8]);
    await fold(tx);
    throw new Error("rolled back");
  });
  await assertRejects(() => undone, Error, "rolled back");
  await assertCredits(sql, [12, 8, 0]);
});

test("credits released a moment ago can be used at once, before any fold", async (sql) => {
  const worker = await aWorker(sql);
  await deposit(sql, "ada", 8);
  const job = { kind: "a", owner: "ada", price: 8 };
  for (let i = 0; i < 3; i++) {
    await queue.enqueue(sql, [job]);
    const [claimed] = await claimNext(sql, worker);
    await queue.fail(sql, worker, claimed, "no");
  }
  await queue.enqueue(sql, [job]);
  await assertCredits(sql, [0, 8, 0]);
});

test("whatever statement inserts a job reserves its price, once", async (sql) => {
  await deposit(sql, "ada", 100);
  await deposit(sql, "bob", 100);
  const columns = sql`queue, kind, payload, status, owner, price`;
  await sql`insert into ${jobsTable(sql)} (${columns})
    select 'default', 'a', '{}', 'queued', o, 3 from unnest(array['bob', 'ada', 'bob']) o`;
  await assertCredits(sql, [97, 3, 0]);
  await assertCredits(sql, [94, 6, 0], "bob");
  // Two inserts in one statement, and one that meets a unique key.
  await sql`
    with one as (insert into ${jobsTable(sql)} (${columns}, unique_key)
      values ('default', 'a', '{}', 'queued', 'ada', 10, 'k')),
    two as (insert into ${jobsTable(sql)} (${columns})
      values ('default', 'a', '{}', 'queued', 'ada', 20), ('default', 'a', '{}', 'queued', 'bob', 30))
    select 1`;
  await sql`insert into ${jobsTable(sql)} (${columns}, unique_key)
    values ('default', 'a', '{}', 'queued', 'ada', 10, 'k')
    on conflict (kind, unique_key)
      where unique_key is not null and status in ('scheduled', 'queued', 'running', 'review')
    do update set priority = 1`;
  await assertCredits(sql, [67, 33, 0]);
  await assertCredits(sql, [64, 36, 0], "bob");
  const ended = () =>
    sql`insert into ${jobsTable(sql)} (${columns}, finished_at)
      values ('default', 'a', '{}', 'done', 'ada', 10, now())`;
  const error = await assertRejects(ended, Error, "inserted in a final state");
  assertEquals(codeOf(error), "SD422");
  await assertCredits(sql, [67, 33, 0]);
});

test("the status of a final job cannot change, with a price or without", async (sql) => {
  const worker = await aWorker(sql);
  await deposit(sql, "ada", 100);
  const job = { kind: "a", owner: "ada" };
  await queue.enqueue(sql, Array.from({ length: 6 }, (_, i) => i % 2 ? job : { ...job, price: 8 }));
  const jobs = await claimNext(sql, worker, 6);
  const how = ["done", "done", "failed", "failed", "cancelled", "cancelled"] as const;
  await queue.settle(
    sql,
    worker,
    jobs.map(({ id, attempt }, i) =>
      ({ id, attempt, outcome: how[i], error: "no", result: 1 }) as queue.Outcome
    ),
  );
  await assertCredits(sql, [92, 0, 8]);
  for (const [i, { id }] of jobs.entries()) {
    const others = [
      sql`status = 'queued', finished_at = null, worker_id = null, claim_token = null`,
      sql`status = ${how[i] === "done" ? "failed" : "done"}, error = 'no'`,
    ];
    for (const change of others) {
      const error = await assertRejects(
        () => sql`update ${jobsTable(sql)} set ${change} where id = ${id}`,
        Error,
        `job ${id} is ${how[i]}: a final job stays as it is; retry it as a new job`,
      );
      assertEquals(codeOf(error), "SD409");
    }
    await sql`update ${jobsTable(sql)} set status = status, stage = 'seen' where id = ${id}`;
  }
  await assertCredits(sql, [92, 0, 8]);
});

test("a price cannot change, nor whose job with a price it is", async (sql) => {
  await deposit(sql, "ada", 100);
  await deposit(sql, "bob", 100);
  const [priced, free] = await queue.enqueue(sql, [
    { kind: "a", owner: "ada", price: 8 },
    { kind: "a", owner: "ada" },
  ]);
  const refused = [
    sql`update ${jobsTable(sql)} set price = 9 where id = ${priced.id}`,
    sql`update ${jobsTable(sql)} set price = null where id = ${priced.id}`,
    sql`update ${jobsTable(sql)} set price = 9 where id = ${free.id}`,
    sql`update ${jobsTable(sql)} set owner = 'bob' where id = ${priced.id}`,
    sql`update ${jobsTable(sql)} set id = 999 where id = ${priced.id}`,
  ];
  for (const statement of refused) {
    const error = await assertRejects(() => statement, Error, "stay as they are");
    assertEquals(codeOf(error), "SD409");
  }
  await sql`update ${jobsTable(sql)} set owner = 'bob' where id = ${free.id}`;
  await sql`update ${jobsTable(sql)} set owner = owner, price = price`;
  await assertCredits(sql, [92, 8, 0]);
});

test("deleting an unfinished job releases its credits, and a final one's stay as they went", async (sql) => {
  const worker = await aWorker(sql);
  await aPricedJob(sql, worker).then((job) => queue.finish(sql, worker, job, null));
  const [waits] = await queue.enqueue(sql, [
    { kind: "a", owner: "ada", price: 5 },
    { kind: "a", owner: "ada", price: 4 },
  ]);
  await assertCredits(sql, [3, 9, 8]);
  await sql`delete from ${jobsTable(sql)} where id = ${waits.id}`;
  await assertCredits(sql, [8, 4, 8]);
  await sql`update ${jobsTable(sql)} set finished_at = now() - interval '2 days'
    where status = 'done'`;
  assertEquals((await queue.sweep(sql, 86_400, 3600)).jobs, 1);
  await assertCredits(sql, [8, 4, 8]);
  await sql`truncate ${jobsTable(sql)}`;
  await assertCredits(sql, [12, 0, 8]);
  const entries = await sql<{ entry: string; amount: string }[]>`
    select entry, amount::text from ${ledgerTable(sql)} order by id`;
  assertEquals(entries.map(({ entry, amount }) => `${entry} ${amount}`), [
    ...["deposit 20", "reserve 8", "capture 8", "reserve 5", "reserve 4", "release 5", "release 4"],
  ]);
});

test("a deposit may take back what is free, and no more", async (sql) => {
  await deposit(sql, "ada", 20);
  await queue.enqueue(sql, [{ kind: "a", owner: "ada", price: 8 }]);
  assertEquals(await deposit(sql, "ada", -5), "7");
  const short = await assertRejects(() => deposit(sql, "ada", -8), Error);
  assertEquals([codeOf(short), short.message], [
    "SD402",
    'owner "ada" has 7 credits, 8 are needed',
  ]);
  for (const [owner, amount] of [["ada", 0], ["", 5], ["x".repeat(201), 5]] as const) {
    const error = await assertRejects(() => deposit(sql, owner, amount), Error, "deposit of ");
    assertEquals(codeOf(error), "SD422");
  }
  const missing = await assertRejects(() => sql`select ${sql(schema)}.deposit('ada', null)`, Error);
  assertEquals(codeOf(missing), "SD422");
  await assertRejects(() => deposit(sql, "ada", 1.5), RangeError, "the amount is 1.5");
  const nobody = await assertRejects(() => deposit(sql, "eve", -1), Error);
  assertEquals(codeOf(nobody), "SD402");
  assertEquals(await balance(sql, "eve"), null);
  await assertCredits(sql, [7, 8, 0]);
});

test("a next job with a price is its owner's, and one that cannot be paid fails the job with the refusal", async (sql) => {
  const worker = await aWorker(sql);
  const first = await aPricedJob(sql, worker);
  const done = { attempt: 1, outcome: "done", result: 1 } as const;
  const outcomes = new Outcomes(via(sql), worker, new AbortController().signal);
  const next = [{ kind: "a", price: 7 }];
  assert(await outcomes.record({ ...done, id: first.id, next }));
  await assertCredits(sql, [5, 7, 8]);
  const [second] = await claimNext(sql, worker);
  assertEquals([second.owner, second.price], ["ada", "7"]);
  assert(await outcomes.record({ ...done, id: second.id, next }));
  const [failed] = await queue.get(sql, [second.id]);
  assertEquals([failed.status, failed.error], [
    "failed",
    'its outcome could not be stored: owner "ada" has 5 credits, 7 are needed',
  ]);
  await assertCredits(sql, [12, 0, 8]);
});

test("owners who race for the last credits never get more than there are", async (sql, url) => {
  await deposit(sql, "ada", 30);
  await withPools(url, 8, async (pools) => {
    const tries = await Promise.allSettled(
      pools.flatMap((pool) =>
        Array.from(
          { length: 5 },
          () => queue.enqueue(pool, [{ kind: "a", owner: "ada", price: 4 }]),
        )
      ),
    );
    assertEquals(tries.filter((t) => t.status === "fulfilled").length, 7);
    for (const t of tries) {
      if (t.status === "rejected") {
        assertEquals([t.reason.code, t.reason.message], [
          "SD402",
          'owner "ada" has 2 credits, 4 are needed',
        ]);
      }
    }
  });
  await assertCredits(sql, [2, 28, 0]);
});

test("who waits for an account sees what the one before took, and is told so", async (sql, url) => {
  await deposit(sql, "ada", 6);
  const job = { kind: "a", owner: "ada", price: 4 };
  await withPools(url, 1, async ([other]) => {
    let refused: Promise<queue.EnqueueError> | undefined;
    await other.begin(async (tx) => {
      await queue.enqueue(tx, [job]);
      refused = assertRejects(() => queue.enqueue(sql, [job]), queue.EnqueueError);
      // Not in the transaction, which sees who waits as it was at its first look.
      await waitFor(async () => {
        const [{ n }] = await sql`select count(*)::integer as n from pg_stat_activity
          where datname = current_database() and wait_event_type = 'Lock'`;
        return n === 1;
      }, "the second to wait for the first");
    });
    const error = await refused;
    assertEquals([error?.code, error?.message], [
      "SD402",
      'owner "ada" has 2 credits, 4 are needed',
    ]);
  });
  await assertCredits(sql, [2, 4, 0]);
});

test(
  "a transaction whose snapshot is older than the account's last change is refused, not wrong",
  async (sql, url) => {
    const worker = await aWorker(sql);
    const job = await aPricedJob(sql, worker);
    await withPools(url, 1, async ([other]) => {
      const late = sql.begin("isolation level repeatable read", async (tx) => {
        await tx`select 1 from ${accountsTable(tx)}`;
        await queue.finish(other, worker, job, null);
        await fold(other);
        await queue.enqueue(tx, [{ kind: "a", owner: "ada", price: 1 }]);
      });
      assertEquals(codeOf(await assertRejects(() => late)), "40001");
    });
    await assertCredits(sql, [12, 0, 8]);
  },
);

test(
  "a settle waits for nobody who holds the account, and a fold passes over it",
  async (sql, url) => {
    const worker = await aWorker(sql);
    const job = await aPricedJob(sql, worker);
    await deposit(sql, "bob", 5);
    const [{ id }] = await queue.enqueue(sql, [{ kind: "a", owner: "bob", price: 5 }]);
    await withPools(url, 1, async ([other]) => {
      await other.begin(async (tx) => {
        await queue.enqueue(tx, [{ kind: "a", owner: "ada", price: 2 }]);
        assert(await queue.finish(sql, worker, job, null));
        assertEquals(await queue.cancel(sql, id), "cancelled");
        const folded = sql.begin(async (own) => {
          await own`set local lock_timeout = '2s'`;
          return await fold(own);
        });
        assertEquals(await folded, 1, "bob's");
      });
    });
    assertEquals(await fold(sql), 1, "ada's");
    await assertCredits(sql, [10, 2, 8]);
  },
);

test(
  "batches that name the same owners in opposite orders do not deadlock, whatever else goes on",
  async (sql, url) => {
    const owners = Array.from({ length: 50 }, (_, i) => `owner-${i}`);
    // Enough for all, so that none is refused however late the settles are.
    for (const owner of owners) await deposit(sql, owner, 240);
    const worker = await aWorker(sql);
    await withPools(url, 4, async ([one, two, settler, folder]) => {
      let over = false;
      const until = async (step: () => Promise<unknown>) => {
        while (!over) await step();
      };
      const settling = until(async () => {
        const jobs = await claimNext(settler, worker, 40);
        const outcomes = jobs.toReversed().map(({ id, attempt }, i) =>
          ({ id, attempt, outcome: i % 5 ? "failed" : "done", error: "no" }) as queue.Outcome
        );
        if (jobs.length > 0) await queue.settle(settler, worker, outcomes);
      });
      const folding = until(() => fold(folder, 30));
      try {
        for (let round = 0; round < 60; round++) {
          const batch = (pool: Pool, list: string[]) =>
            pool.begin((tx) =>
              queue.enqueue(tx, list.map((owner) => ({ kind: "a", owner, price: 2 })))
            );
          await Promise.all([batch(one, owners), batch(two, owners.toReversed())]);
          if (round % 20 === 0) assertEquals(await audit(sql), []);
        }
      } finally {
        over = true;
        await Promise.all([settling, folding]);
      }
    });
    assertEquals(await audit(sql), []);
  },
);

test("four that fold at once fold each entry once", async (sql, url) => {
  const owners = Array.from({ length: 12 }, (_, i) => `owner-${i}`);
  for (const owner of owners) await deposit(sql, owner, 1000);
  const total = 1200;
  await queue.enqueue(
    sql,
    Array.from({ length: total }, (_, i) => ({ kind: "a", owner: owners[i % 12], price: 2 })),
  );
  await sql`update ${jobsTable(sql)} set status = case when id % 5 = 0 then 'done' else 'cancelled'
    end, finished_at = now()`;
  const before = await Promise.all(owners.map((owner) => balance(sql, owner)));
  await withPools(url, 4, async (pools) => {
    const folded = await Promise.all(pools.map(async (pool) => {
      let sum = 0;
      // Empty-handed when the others hold all the accounts, so not the end by itself.
      for (let misses = 0; misses < 20;) {
        const n = await fold(pool, 7);
        assert(n <= 7, `folded ${n}`);
        sum += n;
        misses = n === 0 ? misses + 1 : 0;
      }
      return sum;
    }));
    assertEquals(folded.reduce((a, b) => a + b), total);
  });
  assertEquals(await Promise.all(owners.map((owner) => balance(sql, owner))), before);
  const [{ n }] = await sql`select count(*)::integer as n from ${accountsTable(sql)}
    where reserved = 0 and balance + captured = 1000 and deposited = 1000`;
  assertEquals(n, 12);
  assertEquals(await audit(sql), []);
});

test("a worker captures with the finish, and folds in passing", async (sql, url) => {
  await deposit(sql, "ada", 20);
  await queue.enqueue(sql, [{ kind: "echo", owner: "ada", price: 8 }]);
  const flags = ["--heartbeat-ms", "100", "--recover-ms", "100", "--jobs", "tests/kinds.ts"];
  await using _ = startScript("worker.ts", flags, { DATABASE_URL: url });
  const folded = async () => {
    const [account] = await sql`select captured::integer from ${accountsTable(sql)}`;
    return account.captured === 8;
  };
  await waitFor(folded, "the capture to be folded into the account");
  await assertCredits(sql, [12, 0, 8]);
});

test("the audit names each thing that is off", async (sql) => {
  const worker = await aWorker(sql);
  const done = await aPricedJob(sql, worker);
  await queue.finish(sql, worker, done, null);
  const [{ id: waits }] = await queue.enqueue(sql, [{ kind: "a", owner: "ada", price: 5 }]);
  await deposit(sql, "bob", 7);
  await fold(sql);
  const [jobs, ledger, accounts] = [jobsTable, ledgerTable, accountsTable].map((of) => of(sql));
  const cases: [(tx: Sql) => Promise<unknown>[], string[]][] = [
    [(tx) => [tx`update ${accounts} set balance = balance + 1, deposited = deposited + 1
        where owner = 'bob'`], [
      "bob null its account holds 8 credits, its deposits are 7",
      "bob null its account says 8 free, 0 reserved, 0 captured, its folded entries 7, 0, 0",
    ]],
    [(tx) => [tx`update ${accounts} set balance = balance - 1, captured = captured + 1
        where owner = 'bob'`], [
      "bob null its account says 6 free, 0 reserved, 1 captured, its folded entries 7, 0, 0",
    ]],
    [(tx) => [tx`delete from ${accounts} where owner = 'bob'`], [
      "bob null it has entries or jobs with a price, but no account",
    ]],
    [(tx) => [tx`delete from ${ledger} where job_id = ${done.id} and entry = 'capture'`], [
      "ada null 13 credits are reserved, its unfinished jobs cost 5",
      "ada null its account says 7 free, 5 reserved, 8 captured, its folded entries 7, 13, 0",
      `ada ${done.id} it is done and was not captured`,
    ]],
    [(tx) => [tx`update ${ledger} set entry = 'release', folded = false
        where job_id = ${done.id} and entry = 'capture'`], [
      "ada null its account says 7 free, 5 reserved, 8 captured, its folded entries 7, 13, 0",
      `ada ${done.id} it is done and was not captured`,
    ]],
    [(tx) => [
      tx`drop index ${tx(schema)}.ledger_of_job`,
      tx`insert into ${ledger} (owner, job_id, entry, amount) values ('ada', ${done.id}, 'release', 8)`,
    ], [
      "ada null -3 credits are reserved, its unfinished jobs cost 5",
      `ada ${done.id} it ended 2 times`,
    ]],
    [(tx) => [
      tx`alter table ${jobs} disable trigger user`,
      tx`update ${jobs} set status = 'cancelled', finished_at = now() where id = ${waits}`,
    ], [
      "ada null 5 credits are reserved, its unfinished jobs cost 0",
      `ada ${waits} it is cancelled and was not released`,
    ]],
    [(tx) => [
      tx`alter table ${jobs} disable trigger user`,
      tx`update ${jobs} set price = 6 where id = ${waits}`,
    ], [
      "ada null 5 credits are reserved, its unfinished jobs cost 6",
      `ada ${waits} it costs ada 6, its entries say ada 5`,
    ]],
    [(tx) => [
      tx`alter table ${jobs} disable trigger user`,
      tx`delete from ${jobs} where id = ${waits}`,
    ], [
      "ada null 5 credits are reserved, its unfinished jobs cost 0",
      `ada ${waits} it is gone and still reserved`,
    ]],
    [(tx) => [
      tx`insert into ${ledger} (owner, job_id, entry, amount) values ('ada', ${waits}, 'release', 5)`,
    ], [
      "ada null 0 credits are reserved, its unfinished jobs cost 5",
      `ada ${waits} it is queued and has ended`,
    ]],
    [(tx) => [
      tx`alter table ${jobs} disable trigger user`,
      tx`insert into ${jobs} (id, queue, kind, payload, status, owner, price)
        values (99, 'default', 'a', '{}', 'queued', 'bob', 3)`,
    ], [
      "bob null 0 credits are reserved, its unfinished jobs cost 3",
      "bob 99 it was reserved 0 times",
    ]],
  ];
  for (const [tamper, expected] of cases) {
    const undone = sql.begin(async (tx) => {
      for (const statement of tamper(tx)) await statement;
      const found = await audit(tx);
      assertEquals(found.map((f) => `${f.owner} ${f.job_id} ${f.problem}`), expected);
      throw new Error("undone");
    });
    await assertRejects(() => undone, Error, "undone");
  }
  await assertCredits(sql, [7, 5, 8]);
});

/** What a connection of the random histories does next. */
interface Actor {
  sql: Pool;
  worker: string;
  random: () => number;
  /** Credits that its deposits have added. */
  deposited: number;
  /** How often it did what, and was refused. */
  counts: Record<string, number>;
}
const below = ({ random }: Actor, n: number) => Math.floor(random() * n);
const anOwner = (actor: Actor) => `owner-${below(actor, 12)}`;
const jobsOf = (actor: Actor, n: number): queue.NewJob[] =>
  Array.from({ length: n }, () => ({
    kind: "a",
    owner: anOwner(actor),
    price: below(actor, 5) ? 1 + below(actor, 30) : undefined,
    unique_key: below(actor, 3) ? undefined : `key-${below(actor, 10)}`,
    delay_s: below(actor, 6) ? undefined : 0.001,
  }));

/** Claims a few jobs and ends each in a way of its own, in any order, some with what `nextOf` says. */
async function claimAndSettle(
  actor: Actor,
  sql: Sql,
  nextOf: () => queue.NewJob[] | undefined,
): Promise<void> {
  const { worker, random } = actor;
  const jobs = await claimNext(sql, worker, 1 + below(actor, 10));
  const outcomes: queue.Outcome[] = [];
  for (const { id, attempt } of jobs) {
    const dice = below(actor, 12);
    if (dice === 0) continue; // left to its lease
    if (dice === 1) {
      if ((await requests.intend(sql, worker, { id, attempt }))?.key) {
        outcomes.push({ id, attempt, outcome: "review", error: "not known" });
      }
    } else if (dice === 2) outcomes.push({ id, attempt, outcome: "snoozed", delay_s: 0 });
    else if (dice === 3) outcomes.push({ id, attempt, outcome: "released", error: "stop" });
    else if (dice === 4) outcomes.push({ id, attempt, outcome: "cancelled" });
    else if (dice < 7) outcomes.push({ id, attempt, outcome: "failed", error: "no" });
    else if (dice === 7) outcomes.push({ id, attempt, outcome: "failed", error: "no", delay_s: 0 });
    else {
      const next = dice === 8 ? nextOf() : undefined;
      outcomes.push({ id, attempt, outcome: "done", result: 1, next });
    }
  }
  await queue.settle(sql, worker, outcomes.toSorted(() => random() - 0.5));
}

/** Without a key, whose holder may be in a settle that waits for this one. */
const keyless = (jobs: queue.NewJob[]) => jobs.map((job) => ({ ...job, unique_key: undefined }));

const acts: Record<string, (actor: Actor) => Promise<unknown>> = {
  enqueue: (actor) => queue.enqueue(actor.sql, jobsOf(actor, 1 + below(actor, 20))),
  settle: (actor) =>
    claimAndSettle(actor, actor.sql, () => keyless(jobsOf(actor, 1 + below(actor, 3)))),
  insert: (actor) =>
    actor.sql`insert into ${jobsTable(actor.sql)} (queue, kind, payload, status, owner, price)
      select 'default', 'a', '{}', 'queued', 'owner-' || n % 12, 1 + n % 9
      from generate_series(${below(actor, 100)}::integer, ${below(actor, 100)}, -5) n`,
  deposit: async (actor) => {
    const amount = below(actor, 3) ? 50 + below(actor, 100) : -1 - below(actor, 40);
    await deposit(actor.sql, anOwner(actor), amount);
    actor.deposited += amount;
  },
  cancel: async (actor) => {
    const [{ last }] = await actor.sql`
      select coalesce(max(id), 1)::integer as last from ${jobsTable(actor.sql)}`;
    await queue.cancel(actor.sql, String(last - below(actor, 60)));
  },
  recover: async ({ sql, worker }) => {
    await sql`update ${jobsTable(sql)} set lease_until = now() - interval '1 s'
      where worker_id = ${worker} and status = 'running'`;
    await queue.recover(sql, 20);
  },
  promote: ({ sql }) => claims.promote(sql),
  fold: (actor) => fold(actor.sql, 1 + below(actor, 50)),
  remove: ({ sql }) =>
    sql`delete from ${jobsTable(sql)} where id in (select id from ${jobsTable(sql)}
      where status in ('queued', 'review', 'done') order by random() limit 2
      for update skip locked)`,
  rollback: async (actor) => {
    const undone = actor.sql.begin(async (tx) => {
      // One enqueue only, since the accounts of two are not in order.
      await claimAndSettle(actor, tx, () => undefined);
      await queue.enqueue(tx, keyless(jobsOf(actor, 3)));
      throw new Error("rolled back");
    });
    const error = await undone.then(() => null, (error) => error);
    if (error.message !== "rolled back") throw error;
  },
};

test(
  "whatever four do at once, in hundreds of random histories, credits only come by deposits",
  async (sql, url) => {
    const seed = Number(Deno.env.get("SEED") ?? crypto.getRandomValues(new Uint32Array(1))[0]);
    const names = Object.keys(acts).flatMap((name) =>
      Array(name === "settle" ? 8 : name === "enqueue" ? 4 : 1).fill(name) as string[]
    );
    await withPools(url, 4, async (pools) => {
      const actors: Actor[] = await Promise.all(pools.map(async (pool, i) => ({
        ...{ sql: pool, worker: await aWorker(sql), random: randomOf(seed + i) },
        ...{ deposited: 0, counts: {} },
      })));
      for (let history = 0; history < 200; history++) {
        await Promise.all(actors.map(async (actor) => {
          for (let step = 0; step < 6; step++) {
            const name = names[below(actor, names.length)];
            const count = await acts[name](actor).then(() => name, (error) => {
              // Too poor, or sent to a paid service.
              if (/^SD4(02|09)$/.test(codeOf(error))) return `${name} refused`;
              // A settle gives up after half a second, and its worker tries again: on a slow machine.
              if (codeOf(error) === "55P03" && /settle|rollback/.test(name)) return `${name} late`;
              throw new Error(`seed ${seed}, history ${history}, ${name}: ${error}`, {
                cause: error,
              });
            });
            actor.counts[count] = (actor.counts[count] ?? 0) + 1;
          }
        }));
        assertEquals(await audit(sql), [], `seed ${seed}, history ${history}`);
        const [{ sum }] =
          await sql`select coalesce(sum(balance + reserved + captured), 0)::integer as sum
        from ${sql(schema)}.balances`;
        const deposited = actors.reduce((total, actor) => total + actor.deposited, 0);
        assertEquals(sum, deposited, `seed ${seed}, history ${history}`);
      }
      const [{ captured, released }] = await sql`
      select (count(*) filter (where entry = 'capture'))::integer as captured,
        (count(*) filter (where entry = 'release'))::integer as released from ${ledgerTable(sql)}`;
      const done: Record<string, number> = {};
      for (const { counts } of actors) {
        for (const [name, n] of Object.entries(counts)) done[name] = (done[name] ?? 0) + n;
      }
      assert(captured > 100 && released > 100, `${captured} captured, ${released} released`);
      for (const name of [...Object.keys(acts), "enqueue refused"]) assert(done[name] > 0, name);
      assert((done["settle late"] ?? 0) < 10, "settles wait for each other");
    });
  },
);
