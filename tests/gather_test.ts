/** Enqueues that come at the same time go together, and each caller has what it would have had alone. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { balance, deposit } from "../credits.ts";
import { connect, Database, type Pool, schema } from "../db.ts";
import { startProxy } from "../dev/proxy.ts";
import * as queue from "../queue.ts";
import { databaseTest as test } from "./database.ts";

const jobs = (sql: Pool) => sql`${sql(schema)}.jobs`;
const one = async (sql: Pool, job: Partial<queue.NewJob> = {}) =>
  (await queue.enqueue(sql, [{ kind: "a", ...job }]))[0];
/** In how many transactions the jobs there are were inserted. */
async function statements(sql: Pool): Promise<number> {
  const [{ n }] = await sql`select count(distinct xmin::text)::integer as n from ${jobs(sql)}`;
  return n;
}
/** The payloads of all jobs, in order. */
async function payloads(sql: Pool): Promise<unknown[]> {
  const rows = await sql`select payload from ${jobs(sql)} order by payload`;
  return rows.map((row) => row.payload);
}
const outcome = (call: Promise<unknown>) =>
  call.then((): string => "fine", (error) => error.code ?? error.name);

test("what comes at the same time goes in few statements, and each caller gets its own ids", async (sql) => {
  const entries = await Promise.all(
    Array.from(
      { length: 10 },
      (_, n) =>
        queue.enqueue(sql, Array.from({ length: 1 + n % 3 }, () => ({ kind: "a", payload: n }))),
    ),
  );
  assertEquals(entries.map((list) => list.length), [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]);
  for (const [n, list] of entries.entries()) {
    const found = await queue.get(sql, list.map((entry) => entry.id));
    assertEquals(found.map((job) => job.payload), list.map(() => n));
    assert(list.every((entry) => entry.created));
  }
  const many = await statements(sql);
  assert(many <= 2, `${many} statements`);
});

test("what comes while a statement is under way goes in one", async (sql, _url, direct) => {
  await using proxy = startProxy(direct);
  const pool = connect(proxy.url, { max: 1 });
  try {
    const hold = proxy.holdReplyTo("enqueue");
    const first = one(pool);
    await hold.held;
    const later = Array.from({ length: 8 }, () => one(pool));
    hold.release();
    await Promise.all([first, ...later]);
    assertEquals(await statements(sql), 2);
  } finally {
    await pool.end({ timeout: 1 });
  }
});

test("a caller at fault gets its error, and the others their jobs", async (sql) => {
  await queue.setQueue(sql, "full", { max_waiting: 1 });
  await queue.setQueue(sql, "few", { max_per_owner: 1 });
  await one(sql, { queue: "full", payload: "a first" });
  await deposit(sql, "ada", 10);
  const wrong: [Partial<queue.NewJob>, string][] = [
    [{ kind: "Not A Name" }, "SD422"],
    [{ queue: "nowhere" }, "SD404"],
    [{ queue: "full" }, "SD429"],
    [{ files: ["77"] }, "SD410"],
    [{ price: 11, owner: "ada" }, "SD402"],
    [{ payload: "a\0b" }, "22P05"],
    [{ due_at: "soon" }, "22007"],
    [{ priority: 2 ** 40 }, "22003"],
    [{ delay_s: Infinity }, "SD422"],
  ];
  const calls = [
    ...wrong.flatMap(([job]) => [one(sql, { payload: "good" }), one(sql, job)]),
    one(sql, { queue: "few", owner: "bob", payload: "few" }),
    one(sql, { queue: "few", owner: "bob", payload: "few" }),
    one(sql, { price: 10, owner: "ada", payload: "paid" }),
  ];
  const outcomes = await Promise.all(calls.map(outcome));
  assertEquals(outcomes.slice(0, -3), wrong.flatMap(([, code]) => ["fine", code]));
  assertEquals(outcomes.slice(-3, -1).sort(), ["SD429", "fine"]);
  assertEquals(outcomes.at(-1), "fine");
  assertEquals(await payloads(sql), ["a first", "few", ...wrong.map(() => "good"), "paid"]);
  assertEquals((await balance(sql, "ada"))?.reserved, "10");
});

test("an error is of its caller's call: it names its jobs, and its stack the place", async (sql) => {
  const good = Array.from({ length: 5 }, () => one(sql));
  async function theCaller() {
    return await queue.enqueue(sql, [{ kind: "a" }, { kind: "B" }]);
  }
  const error = await assertRejects(theCaller, queue.EnqueueError, 'job 2: kind is "B"');
  assert(error.stack?.includes("theCaller"), error.stack);
  await Promise.all(good);
  assertEquals((await payloads(sql)).length, 5);
});

test("callers that share a unique key share the job, which one of them created", async (sql) => {
  const entries = await Promise.all(Array.from({ length: 6 }, () => one(sql, { unique_key: "k" })));
  assertEquals(new Set(entries.map((entry) => entry.id)).size, 1);
  assertEquals(entries.filter((entry) => entry.created).length, 1);
});

test("a caller that has to wait for a lock keeps no other waiting", async (sql) => {
  const held = Promise.withResolvers<void>();
  const open = Promise.withResolvers<void>();
  const over = sql.begin(async (tx) => {
    await queue.enqueue(tx, [{ kind: "a", unique_key: "k" }]);
    open.resolve();
    await held.promise;
  });
  await open.promise;
  const order: string[] = [];
  const note = async (name: string, call: Promise<queue.Enqueued>) => {
    const { created } = await call;
    order.push(`${name} ${created}`);
  };
  const blocked = note("blocked", one(sql, { unique_key: "k" }));
  await Promise.all([note("other", one(sql)), note("other", one(sql))]);
  await note("later", one(sql));
  held.resolve();
  await Promise.all([over, blocked]);
  assertEquals(order, ["other true", "other true", "later true", "blocked false"]);
});

test("a transaction's jobs are its own, and a large call goes by itself", async (sql) => {
  const rolledBack = sql.begin(async (tx) => {
    await Promise.all([queue.enqueue(tx, [{ kind: "a", payload: "tx" }]), one(sql)]);
    throw new Error("rolled back");
  });
  const large = queue.enqueue(sql, Array.from({ length: 101 }, () => ({ kind: "b" })));
  const small = [one(sql), one(sql)];
  await assertRejects(() => rolledBack, Error, "rolled back");
  await Promise.all([large, ...small]);
  const [{ n, mixed }] = await sql`
    select count(*)::integer as n, (select count(*)::integer from (select from ${jobs(sql)}
      group by xmin::text having count(distinct kind) > 1) m) as mixed from ${jobs(sql)}`;
  assertEquals([n, mixed], [104, 0]);
});

test(
  "when the connection dies each caller gets its error, and no job is there twice",
  async (sql, _url, direct) => {
    await using proxy = startProxy(direct);
    const pool = connect(proxy.url, { max: 1 });
    try {
      const hold = proxy.holdReplyTo("enqueue");
      const calls = Array.from(
        { length: 4 },
        (_, n) => outcome(one(pool, { payload: `lost ${n}` })),
      );
      await hold.held;
      proxy.reset();
      assertEquals(
        await Promise.all(calls),
        calls.map(() => "CONNECTION_CLOSED"),
      );
      await one(pool, { payload: "z after" });
      const found = await payloads(sql);
      assertEquals(found.length, new Set(found).size, "a job is there twice");
      assert(found.includes("z after"));
    } finally {
      await pool.end({ timeout: 1 });
    }
  },
);

test(
  "callers one after the other, and through a Database of few connections, have their results",
  async (sql, url) => {
    for (let n = 0; n < 3; n++) assert((await one(sql)).created);
    const db = new Database(url, { max: 2 });
    try {
      const calls = Array.from({ length: 20 }, (_, n) => db.run((sql) => one(sql, { payload: n })));
      assertEquals(new Set((await Promise.all(calls)).map((entry) => entry.id)).size, 20);
    } finally {
      await db.close();
    }
  },
);
