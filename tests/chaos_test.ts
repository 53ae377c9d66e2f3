/** A minute of `deno task chaos`: everything at once, by a seed that brings every fault there is. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { deposit } from "../credits.ts";
import { connect, schema } from "../db.ts";
import type { Charge } from "../dev/band_service.ts";
import { findProblems, historyOf, installRecorder, overlaps } from "../dev/chaos/checks.ts";
import { faultKinds } from "../dev/chaos/faults.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { databaseTest as test } from "./database.ts";
import { runScript } from "./processes.ts";

Deno.test("whatever breaks in a minute of chaos, no job, write, charge or credit is off after it", async () => {
  const flags = ["--minutes", "1", "--seed", "7", "--json"];
  const { code, stdout, stderr } = await runScript("tools/chaos.ts", flags, {});
  assertEquals(code, 0, `${stdout}\n${stderr}`);
  const { counts, jobs, paid, problems } = JSON.parse(stdout);
  assertEquals(problems, []);
  for (const kind of faultKinds) assert(counts[kind] >= 1, `no fault of kind ${kind}`);
  const done = (kind: string) =>
    jobs.find((row: { kind: string; status: string }) => row.kind === kind && row.status === "done")
      ?.n ?? 0;
  for (const kind of ["free", "quick", "flaky", "chain", "band"]) {
    assert(done(kind) >= 5, `${done(kind)} jobs of kind ${kind} are done`);
  }
  assertEquals(paid.most_charges_of_a_job, 1);
});

test(
  "each check of the chaos tool finds what it is for, and nothing where all is right",
  async (sql, url) => {
    await installRecorder(sql);
    await deposit(sql, "ann", 100);
    const owner = await processes.register(sql, { role: "worker", name: "one", version: "0" });
    const theirs = connect(url, { max: 1, name: "siding worker two" });
    const mine = connect(url, { max: 1, name: "siding worker one" });
    const tool = connect(url, { max: 1, name: "chaos" });
    const jobs = sql`${sql(schema)}.jobs`;
    const book = { stands: new Set<number>(), never: new Set<number>() };
    /** Runs a job to its end, as its worker does; `before` that, something may go wrong. */
    const play = async (
      kind: string,
      n: number,
      result: unknown = { n },
      before: (id: string) => PromiseLike<unknown> = async () => {},
    ) => {
      const band = kind === "band" ? { payload: {}, unique_key: String(n) } : {};
      const [{ id }] = await queue.enqueue(sql, [{ kind, payload: { n, ms: 0 }, ...band }]);
      book.stands.add(n);
      const claim = { worker: owner, kinds: [kind], most: 1, leaseS: 60, token: owner };
      const [job] = await claims.claim(mine, { queue: "default", claim: "skip_locked" }, claim);
      await before(id);
      await queue.finish(mine, owner, job, result);
      return id;
    };
    const key = crypto.randomUUID();
    const charge = { key, id: "request", calls: 1, charges: 1 };
    let charges: Charge[] = [];
    /** What is off now that was not before. */
    const known = new Set<string>();
    const found = async () => {
      const all = (await findProblems(sql, book, charges)).map(({ job, what }) =>
        `${job}: ${what}`
      );
      const fresh = all.filter((what) => !known.has(what));
      for (const what of fresh) known.add(what);
      return fresh.join("\n");
    };
    try {
      await play("quick", 1);
      assertEquals(await found(), "");

      const [{ id: waits }] = await queue.enqueue(sql, [{
        kind: "quick",
        payload: { n: 2, ms: 0 },
      }]);
      assertEquals(await found(), `${waits}: it is neither final nor in review: queued`);
      await queue.cancel(tool, waits);

      book.stands.add(3);
      assertEquals(await found(), "null: job number 3 was enqueued and is not there");
      book.never.add(1);
      assertMatch(await found(), /^\d+: job number 1 was rolled back or refused, and is there$/);
      await play("quick", 1);
      assertMatch(await found(), /^\d+: job number 1 is there 2 times/);
      const wrong = await play("quick", 4, { n: 5 });
      assertEquals(await found(), `${wrong}: it is done with another's result: {"n": 5}`);
      const empty = await play("free", 5);
      assertEquals(await found(), `${empty}: it is done without its one file`);
      const alone = await play("chain", 6);
      assertMatch(await found(), new RegExp(`^${alone}: it brought not one next job`));

      const stolen = await play(
        "quick",
        7,
        { n: 7 },
        (id) => theirs`update ${jobs} set stage = 'mine now' where id = ${id}`,
      );
      assertMatch(await found(), new RegExp(`^${stolen}: siding worker two wrote to it without`));
      const jumped = await play("quick", 8, { n: 8 }, async (id) => {
        await mine`update ${jobs} set attempt = 5 where id = ${id}`;
        await mine`update ${jobs} set attempt = 1 where id = ${id}`;
      });
      assertMatch(await found(), new RegExp(`^${jumped}: its attempts do not rise one by one: 5`));
      await sql`alter table ${jobs} disable trigger keep_final`;
      await sql`update ${jobs} set status = 'cancelled' where id = ${jumped}`;
      assertStringIncludes(await found(), `${jumped}: it left a final state: cancelled`);

      const undone = await play("quick", 11, { n: 11 });
      const was = { id: undone, attempt: 1 };
      await sql`update ${jobs} set status = 'queued', worker_id = null, claim_token = null,
      finished_at = null where id = ${undone}`;
      assertMatch(await found(), /it left a final state: queued/);
      await mine`update ${jobs} set status = 'done', finished_at = now() where id = ${was.id}`;
      assertMatch(await found(), new RegExp(`^${undone}: siding worker one wrote to it without`));
      await sql`update ${jobs} set status = 'failed', error = 'no' where id = ${undone}`;
      assertMatch(await found(), /it failed without one of the reasons that there are: no/);
      assertEquals(overlaps("7 1\n8 1\n7 2\n8 2\n7 2\n8 1\n"), [
        { job: "8", what: "attempt 1 was at work though 2 had begun" },
      ]);

      const unpaid = await play("band", 9);
      assertEquals(await found(), `${unpaid}: it is done and was not charged`);
      charges = [charge];
      assertEquals(await found(), `null: key ${key} is no job's, and was charged 1 times`);
      const paid = await play(
        "band",
        10,
        {},
        (id) => mine`update ${jobs} set request_key = ${key}, sent_at = now() where id = ${id}`,
      );
      assertEquals(await found(), `${paid}: it was charged as request, and null is stored`);
      charges = [{ ...charge, charges: 2 }];
      assertEquals(await found(), `${paid}: it was charged 2 times`);

      await sql`update ${sql(schema)}.accounts set balance = 99, deposited = 99`;
      assertMatch(await found(), /^null: credits of ann: /);
      assert((await historyOf(sql, stolen)).some((line) => line.includes("two: stage: mine now")));
    } finally {
      await theirs.end();
      await mine.end();
      await tool.end();
    }
  },
);
