/**
 * A worker that is killed at each of its messages in turn: to Postgres and to the paid service,
 * sent and received, until a run ends unharmed. So no boundary is left out, whatever the code does
 * between two of them. What follows each is what docs/what-happens-if.md says.
 */
import { assert, assertEquals } from "@std/assert";
import { fileURLToPath } from "node:url";
import { connect, type Pool, schema, via } from "../db.ts";
import { requeue } from "../desk.ts";
import { startBandService } from "../dev/band_service.ts";
import { startProxy, type Tap } from "../dev/proxy.ts";
import { outputsOf, readFile, writeFile } from "../files.ts";
import * as project from "../jobs.ts";
import { sweepFolders } from "../jobs/process.ts";
import { lookUpReviews } from "../jobs/paid.ts";
import * as queue from "../queue.ts";
import { testDatabase, waitFor } from "./database.ts";
import * as tests from "./kinds.ts";
import { type Script, startWorker } from "./processes.ts";

/** Runs at a time. */
const LANES = 4;
/** More messages than this, and the run never ends. */
const MOST = 400;

/** A job, its worker, and what stands between that and the world. */
interface Scene {
  sql: Pool;
  url: string;
  /** Counts a message; false from the one on at which the worker is killed. */
  tap: Tap;
  /** The worker's temporary folder. */
  folder: string;
}

/** Starts a worker that is killed at the `k`-th message, before that is passed on. */
async function crashAt(k: number, scene: (scene: Scene) => Promise<Play>): Promise<boolean> {
  await using database = await testDatabase();
  const sql = connect(database.url, { max: 2 });
  const folder = await Deno.makeTempDir();
  let worker: Script | undefined;
  let messages = 0;
  const tap: Tap = () => {
    if (++messages === k) worker!.kill("SIGKILL");
    return messages < k;
  };
  await using proxy = startProxy(database.url, tap);
  await using play = await scene({ sql, url: database.url, tap, folder });
  try {
    // Quiet: fewer messages that say the same again.
    // Each look is a message to be killed at: as few as its longest poll makes.
    const quiet = ["--heartbeat-ms", "300", "--lease-s", "60", "--recover-ms", "600000"];
    quiet.push("--poll-min-ms", "60000");
    const env = { ...play.env, TMPDIR: folder };
    worker = startWorker(proxy.url, [...quiet, ...play.flags], [], env);
    const { id } = await play.begin();
    let over = false;
    worker.ended.then(() => over = true);
    await waitFor(async () => over || (await stateOf(sql, id)).status === "done", "the run");
    worker.kill("SIGTERM");
    const unharmed = await worker.ended === 0;
    assertEquals(unharmed, messages < k, `it ended with ${messages} messages`);
    // The time of a lease passes.
    await sql`update ${sql(schema)}.jobs set lease_until = now() - interval '1 s'
      where status = 'running'`;
    await queue.recover(sql);
    await play.check(id, unharmed);
    await waitFor(async () => {
      await sweepFolders(folder); // as the next worker does when it starts
      return [...Deno.readDirSync(folder)].length === 0;
    }, "its work folder to go");
    return unharmed;
  } catch (error) {
    throw new Error(`killed at message ${k}`, { cause: error });
  } finally {
    await worker?.[Symbol.asyncDispose]();
    await sql.end({ timeout: 1 });
    await Deno.remove(folder, { recursive: true });
  }
}

/** What happens in a scene. */
interface Play extends AsyncDisposable {
  env: Record<string, string>;
  flags: string[];
  /** Enqueues the job. */
  begin(): Promise<{ id: string }>;
  /** Checks what is left, and has another worker end it. */
  check(id: string, unharmed: boolean): Promise<void>;
}

async function stateOf(sql: Pool, id: string) {
  const [{ status, attempt, crashes, failures, releases }] = await queue.get(sql, [id]);
  return { status, attempt, crashes, failures, releases };
}

/** Runs `crashAt` for k = 1, 2, 3 … until a run ends unharmed. @returns that k */
async function everyCrash(scene: (scene: Scene) => Promise<Play>): Promise<number> {
  let k = 0;
  let last = MOST;
  await Promise.all(Array.from({ length: LANES }, async () => {
    while (++k < last) {
      const mine = k;
      if (await crashAt(mine, scene)) last = Math.min(last, mine);
    }
  }));
  assert(last < MOST, "a run that ends unharmed");
  return last;
}

Deno.test("a worker killed at any message leaves its free job to run once more, and nothing else", async () => {
  const last = await everyCrash((scene) => Promise.resolve(freeWork(scene)));
  assert(last > 20, `${last} messages make no run`);
});

function freeWork({ sql }: Scene): Play {
  return {
    env: {},
    flags: ["--kinds", "copy"],
    begin: async () => {
      const file = await writeFile(via(sql), "a.bin", new Blob(["content"]).stream(), 100);
      return await tests.enqueue(sql, "copy", {}, { files: [file.id] });
    },
    async check(id, unharmed) {
      const left = await stateOf(sql, id);
      const { status, attempt } = left;
      // Never claimed, or claimed and lost, or done: there is no other way.
      const crashes = status === "queued" ? attempt : 0;
      assertEquals(left, { status, attempt, crashes, failures: 0, releases: 0 });
      assert(status === "done" || (status === "queued" && attempt <= 1 && !unharmed), status);
      await tests.drainForTest(sql);
      const [job] = await queue.get(sql, [id]);
      assertEquals([job.status, job.result, job.attempt], [
        "done",
        { files: 1 },
        status === "done" ? 1 : attempt + 1,
      ]);
      const [output, ...more] = await outputsOf(via(sql), id);
      assertEquals(await new Response(readFile(via(sql), output)).text(), "content");
      assertEquals(more, []);
    },
    async [Symbol.asyncDispose]() {},
  };
}

Deno.test("a worker killed at any message, the paid service's too, leaves a job that is paid for once", async () => {
  const seen = new Set<string>();
  const last = await everyCrash((scene) => paidWork(scene, seen));
  assert(last > 30, `${last} messages make no run`);
  // Every row of the table was met.
  assertEquals([...seen].sort(), [
    "done, charged",
    "queued, charged",
    "queued, not charged",
    "review, charged",
    "review, not charged",
  ]);
});

let turn: Promise<unknown> = Promise.resolve();
/** The variable is one for all lanes of this process: who needs it takes turns. */
function withBandUrl<T>(url: string, f: () => Promise<T>): Promise<T> {
  const mine = turn.then(async () => {
    Deno.env.set("SIDING_BAND_URL", url);
    try {
      return await f();
    } finally {
      Deno.env.delete("SIDING_BAND_URL");
    }
  });
  turn = mine.catch(() => {});
  return mine;
}

async function paidWork({ sql, tap }: Scene, seen: Set<string>): Promise<Play> {
  const service = await startBandService({ workMs: 1 });
  const proxy = startProxy(service.url, tap);
  return {
    env: { SIDING_BAND_URL: proxy.url },
    flags: ["--jobs", fileURLToPath(new URL("../jobs.ts", import.meta.url)), "--kinds", "band"],
    begin: async () => {
      const file = await writeFile(via(sql), "a.wav", new Blob(["sound"]).stream(), 100);
      return await project.enqueue(sql, "band", {}, { files: [file.id] });
    },
    check: (id) =>
      withBandUrl(service.url, async () => {
        const { status, crashes, attempt, failures } = await stateOf(sql, id);
        const [paid] = await sql`select request_key as key, sent_at is not null as sent, request_id
        from ${sql(schema)}.jobs where id = ${id}`;
        const [charge] = service.charges();
        const charged = charge?.charges ?? 0;
        seen.add(`${status}, ${charged ? "charged" : "not charged"}`);
        assertEquals(failures, 0);
        if (status === "done") assertEquals([crashes, charged], [0, 1]);
        else assertEquals(crashes, attempt);
        // In line without an id: it was never sent. With one: it is resumed.
        if (status === "queued") {
          assertEquals([paid.sent, paid.request_id !== null], [!!charged, !!charged]);
        }
        if (status === "review") {
          assertEquals(paid.request_id, null);
          const { found } = await lookUpReviews(via(sql), project.kinds, 0);
          assertEquals(found, charged ? [id] : [], "the service knows its key");
          if (!charged) await requeue(sql, id);
        }
        await project.drainForTest(sql);
        const [job] = await queue.get(sql, [id]);
        assertEquals([job.status, job.error], ["done", null]);
        const [{ key, calls, charges }, ...more] = service.charges();
        assertEquals([calls, charges, more], [1, 1, []]);
        if (paid.key) assertEquals(key, paid.key, "one key for the job's life");
        assertEquals((await outputsOf(via(sql), id)).map(({ name }) => name), ["band.abc"]);
      }),
    async [Symbol.asyncDispose]() {
      await proxy[Symbol.asyncDispose]();
      await service[Symbol.asyncDispose]();
    },
  };
}
