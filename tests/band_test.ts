/** The kind `band` and the service it pays: whatever goes wrong between them, one charge at most. */
import {
  assert,
  assertEquals,
  assertMatch,
  assertRejects,
  assertStringIncludes,
} from "@std/assert";
import { fileURLToPath } from "node:url";
import { type Pool, schema, via } from "../db.ts";
import {
  type BandService,
  type BandServiceOptions,
  type Mood,
  startBandService,
} from "../dev/band_service.ts";
import { outputsOf, readFile, writeFile } from "../files.ts";
import { requeue } from "../desk.ts";
import { startProxy } from "../dev/proxy.ts";
import { drainForTest, enqueue } from "../jobs.ts";
import * as queue from "../queue.ts";
import { databaseTest, waitFor } from "./database.ts";
import { isAlive, startWorker } from "./processes.ts";

const path = (name: string) => fileURLToPath(new URL(`../${name}`, import.meta.url));
const stream = (text: string) => new Blob([text]).stream() as ReadableStream<Uint8Array>;

/** A request to the service as a careful client sends it: on a connection of its own, once. */
async function call(url: string, init: RequestInit = {}): Promise<[number, unknown]> {
  using client = Deno.createHttpClient({ poolMaxIdlePerHost: 0 });
  const response = await fetch(url, { ...init, client });
  return [response.status, await response.json()];
}

const send = (service: BandService, key: string, body: BodyInit = stream("sound")) =>
  call(`${service.url}/requests?title=Song`, {
    method: "POST",
    headers: { "idempotency-key": key },
    body,
  });

Deno.test("the service charges once a key, whatever is sent again or at once, and counts each call", async () => {
  await using service = await startBandService();
  const [first, ...others] = await Promise.all(
    Array.from({ length: 5 }, () => send(service, "one")),
  );
  const ids = [first, ...others].map(([, body]) => (body as { id: string }).id);
  assertEquals(new Set(ids).size, 1);
  const statuses = [first, ...others].map(([status]) => status);
  assertEquals(statuses.sort(), [200, 200, 200, 200, 201]);
  assertEquals((await send(service, "two"))[0], 201);
  const items = service.charges();
  assertEquals(items.map(({ key, calls, charges }) => [key, calls, charges]), [
    ["one", 5, 1],
    ["two", 1, 1],
  ]);
  assertEquals(items[0].id, ids[0]);
  assertEquals(await call(`${service.url}/charges`), [200, { items }]);
});

Deno.test("the service's moods do to the charge and to the connection what they say", async () => {
  await using service = await startBandService({ slowMs: 300 });
  const counts = (key: string) => {
    const { calls, charges } = service.charges().find((charge) => charge.key === key)!;
    return [calls, charges];
  };
  for (const [mood, charges] of [["drop", 0], ["charge-and-drop", 1]] as const) {
    service.setMood(mood, 1);
    const error = await assertRejects(() => send(service, mood), TypeError);
    assertMatch((error.cause as Error).message, /connection closed|reset/i);
    assertEquals(counts(mood), [1, charges]);
    assertEquals((await send(service, mood))[0], charges ? 200 : 201);
    assertEquals(counts(mood), [2, 1]);
  }

  service.setMood("refuse", 1);
  const refusal = { error: "the service takes no requests just now" };
  assertEquals(await send(service, "refuse"), [503, refusal]);
  assertEquals(counts("refuse"), [1, 0]);

  service.setMood("slow", 1);
  let replied = false;
  const reply = send(service, "slow").finally(() => replied = true);
  await waitFor(() => service.charges().some(({ key }) => key === "slow"), "the charge");
  assertEquals([counts("slow"), replied], [[1, 1], false]);
  assertEquals((await reply)[0], 201);
});

Deno.test("in the mood `twice` the service's whole reply goes over one connection two times", async () => {
  await using service = await startBandService();
  service.setMood("twice", 1);
  const { hostname, port } = new URL(service.url);
  using connection = await Deno.connect({ hostname, port: Number(port) });
  await connection.write(new TextEncoder().encode(
    `POST /requests HTTP/1.1\r\nhost: ${hostname}\r\nidempotency-key: k\r\ncontent-length: 1\r\n\r\nx`,
  ));
  const { id } = await waitFor(() => service.charges()[0], "the charge");
  const buffer = new Uint8Array(10_000);
  let text = "";
  await waitFor(async () => {
    const n = await connection.read(buffer);
    text += new TextDecoder().decode(buffer.subarray(0, n ?? 0));
    return text.split(`{"id":"${id}"}`).length === 3;
  }, "two replies");
  assertEquals(text.split("HTTP/1.1 201 ").length, 3, text);
  assertEquals(service.charges()[0].charges, 1);
});

Deno.test("a request without a key, and half a recording, are no calls and cost nothing", async () => {
  await using service = await startBandService();
  const url = `${service.url}/requests`;
  const missing = { error: "the header Idempotency-Key is missing" };
  assertEquals(await call(url, { method: "POST", body: "x" }), [400, missing]);
  let pieces = 0;
  const broken = new ReadableStream({
    pull(controller) {
      if (pieces++ === 3) controller.error(new Error("the disk is gone"));
      else controller.enqueue(new Uint8Array(100_000));
    },
  });
  await assertRejects(() => send(service, "half", broken), TypeError);
  assertEquals((await send(service, "whole"))[0], 201);
  assertEquals(service.charges().map(({ key }) => key), ["whole"]);
});

Deno.test("a mood is set over HTTP too, and `down` leaves only /charges and /mood", async () => {
  await using service = await startBandService();
  const setMood = (mood: unknown) =>
    call(`${service.url}/mood`, { method: "POST", body: JSON.stringify(mood) });
  assertEquals((await setMood({ mood: "grumpy" }))[0], 400);
  assertEquals((await setMood({ mood: "slow", requests: 0 }))[0], 400);
  assertEquals((await call(`${service.url}/mood`, { method: "POST", body: "{" }))[0], 400);
  const { id } = (await send(service, "k"))[1] as { id: string };
  assertEquals(await setMood({ mood: "down" }), [200, { mood: "down" }]);
  for (const place of [`requests/${id}`, "requests?key=k", "nowhere"]) {
    assertEquals(await call(`${service.url}/${place}`), [503, { error: "the service is down" }]);
  }
  assertEquals(await send(service, "k"), [503, { error: "the service is down" }]);
  assertEquals((await call(`${service.url}/charges`))[0], 200);
  await setMood({ mood: "fine" });
  assertEquals((await call(`${service.url}/requests/${id}`))[0], 200);
  assertEquals((await call(`${service.url}/requests?key=k`))[0], 200);
  assertEquals((await call(`${service.url}/requests?key=other`))[0], 404);
  assertEquals((await call(`${service.url}/requests/other`))[0], 404);
});

Deno.test("an arrangement depends on its title alone, and each of its bars is full", async () => {
  const arranged = async () => {
    await using service = await startBandService({ workMs: 1 });
    const { id } = (await send(service, "k"))[1] as { id: string };
    return await waitFor(async () => {
      // deno-lint-ignore no-explicit-any -- whatever the service sends
      const [, request] = await call(`${service.url}/requests/${id}`) as [number, any];
      return request.result;
    }, "the arrangement");
  };
  const one = await arranged();
  assertEquals(one, await arranged());
  assertEquals(one.title, "Song");
  assertEquals(one.parts.length, 3);
  for (const { abc } of one.parts) {
    assertMatch(abc, /^X:\d\nT:Song\nT:\w+\nM:4\/4\nL:1\/8\nQ:1\/4=\d+\nK:C clef=\w+\n.* \|\]\n$/);
    const bars = abc.trim().split("\n").at(-1)!.replace(" |]", "").split(" | ");
    assertEquals(bars.length, 8);
    for (const bar of bars) {
      const lengths = [...bar.matchAll(/\d/g)].map(Number);
      assertEquals(lengths.reduce((sum, length) => sum + length), 8, bar);
    }
  }
});

Deno.test("the service runs by itself too, and ends when it is told to", async () => {
  const child = new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", path("dev/band_service.ts"), "--port", "0"],
    env: { NO_COLOR: "1" },
    stdout: "piped",
  }).spawn();
  const said = child.stdout.pipeThrough(new TextDecoderStream()).getReader();
  const url = (await said.read()).value!.trim();
  assertEquals(await call(`${url}/charges`), [200, { items: [] }]);
  child.kill("SIGTERM");
  assertEquals((await child.status).code, 0);
  await said.cancel();
});

/** A test of the kind, with a database and a service of its own. */
function test(
  name: string,
  body: (sql: Pool, service: BandService, url: string) => Promise<void>,
  options: BandServiceOptions = {},
): void {
  databaseTest(name, async (sql, url) => {
    await using service = await startBandService({ workMs: 1, slowMs: 300, ...options });
    Deno.env.set("SIDING_BAND_URL", service.url);
    try {
      await body(sql, service, url);
    } finally {
      Deno.env.delete("SIDING_BAND_URL");
    }
  });
}

/** Enqueues a recording for the band. @returns the job's id */
async function enqueueBand(sql: Pool, content = "sound", files = 1): Promise<string> {
  const ids = [];
  for (let i = 0; i < files; i++) {
    ids.push((await writeFile(via(sql), "Stairs.wav", stream(content), 100)).id);
  }
  return (await enqueue(sql, "band", {}, { files: ids })).id;
}

/** What counts of a job, besides what was charged for it. */
async function stateOf(sql: Pool, id: string) {
  const [{ status, error, attempt }] = await queue.get(sql, [id]);
  return { status, error, attempt };
}

const paidOf = async (sql: Pool, id: string) =>
  (await sql`select request_key as key, request_id as id, sent_at is not null as sent
    from ${sql(schema)}.jobs where id = ${id}`)[0];

/** The one entry of the service's book: calls and charges, and that it is this job's. */
async function bill(sql: Pool, service: BandService, id: string): Promise<[number, number]> {
  const [{ calls, charges, ...rest }, ...more] = service.charges();
  const { key, id: requestId } = await paidOf(sql, id);
  assertEquals([rest, more], [{ key, id: requestId }, []]);
  return [calls, charges];
}

/** Lets the time pass that a failed job waits. */
const comeDue = (sql: Pool, id: string) =>
  sql`update ${sql(schema)}.jobs set due_at = now() where id = ${id} and status = 'scheduled'`;

test("a recording becomes an arrangement, for one call and one charge", async (sql, service) => {
  const id = await enqueueBand(sql);
  await drainForTest(sql);
  const [job] = await queue.get(sql, [id]);
  assertEquals([job.status, job.result], ["done", { title: "Stairs", parts: 3 }]);
  assertEquals(await bill(sql, service, id), [1, 1]);
  const [file, ...more] = await outputsOf(via(sql), id);
  assertEquals([file.name, file.media_type, more], ["band.abc", "text/vnd.abc", []]);
  const abc = await new Response(readFile(via(sql), file)).text();
  assertMatch(abc, /^%abc-2.1\n\nX:1\nT:Stairs\n[^]*\n\nX:2\nT:Stairs\n[^]*\n\nX:3\nT:Stairs\n/);
});

for (const mood of ["slow", "twice", "charge-and-drop"] as Mood[]) {
  test(
    `a job is done in one attempt, for one charge, though the service is ${mood}`,
    async (sql, service) => {
      service.setMood(mood, 1);
      const id = await enqueueBand(sql);
      await drainForTest(sql);
      assertEquals(await stateOf(sql, id), { status: "done", error: null, attempt: 1 });
      assertEquals(await bill(sql, service, id), [1, 1]);
      assertEquals((await outputsOf(via(sql), id)).length, 1);
    },
  );
}

test(
  "a job that was refused is tried again with the same key, and charged once",
  async (sql, service) => {
    service.setMood("refuse", 1);
    const id = await enqueueBand(sql);
    await drainForTest(sql);
    const error = "the service takes no requests just now";
    assertEquals(await stateOf(sql, id), { status: "scheduled", error, attempt: 1 });
    assertEquals(await bill(sql, service, id), [1, 0]);
    await comeDue(sql, id);
    await drainForTest(sql);
    assertEquals((await stateOf(sql, id)).status, "done");
    assertEquals(await bill(sql, service, id), [2, 1]);
  },
);

test(
  "a job whose connection broke waits in review, and is not sent again",
  async (sql, service) => {
    service.setMood("drop");
    const id = await enqueueBand(sql);
    await drainForTest(sql);
    const error = "it is not known whether the request was sent: " +
      "the connection to the service broke before its reply";
    assertEquals(await stateOf(sql, id), { status: "review", error, attempt: 1 });
    await drainForTest(sql);
    assertEquals(await bill(sql, service, id), [1, 0]);
  },
);

test(
  "a service that is down while the work goes on is asked again later, by the saved id",
  async (sql, service) => {
    const id = await enqueueBand(sql);
    const drained = drainForTest(sql);
    await waitFor(() => service.charges()[0]?.charges, "the charge");
    service.setMood("down");
    await drained;
    const error = "the service replied 503: the service is down";
    assertEquals(await stateOf(sql, id), { status: "scheduled", error, attempt: 1 });
    service.setMood("fine");
    await comeDue(sql, id);
    await drainForTest(sql);
    assertEquals(await stateOf(sql, id), { status: "done", error: null, attempt: 2 });
    assertEquals(await bill(sql, service, id), [1, 1]);
  },
  { workMs: 1500 },
);

test("a job without exactly one recording fails before anything is sent", async (sql, service) => {
  for (const files of [0, 2]) {
    const id = await enqueueBand(sql, "sound", files);
    await drainForTest(sql);
    const error = `one input file is wanted, the recording, and not ${files}`;
    assertEquals(await stateOf(sql, id), { status: "failed", error, attempt: 1 });
    assertEquals((await paidOf(sql, id)).sent, false);
  }
  assertEquals(service.charges(), []);
});

test(
  "a service that is not named, or not there, was certainly sent nothing",
  async (sql, service) => {
    const listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
    const closed = `http://127.0.0.1:${(listener.addr as Deno.NetAddr).port}`;
    listener.close();
    const id = await enqueueBand(sql);
    const errors: [string, string][] = [
      ["", "SIDING_BAND_URL is not set"],
      ["band", "SIDING_BAND_URL is not a URL"],
      [closed, "the service could not be reached"],
    ];
    for (const [index, [url, error]] of errors.entries()) {
      Deno.env.set("SIDING_BAND_URL", url);
      await comeDue(sql, id);
      await drainForTest(sql);
      assertEquals(await stateOf(sql, id), { status: "scheduled", error, attempt: index + 1 });
      assertEquals((await paidOf(sql, id)).sent, false);
    }
    Deno.env.set("SIDING_BAND_URL", service.url);
    await comeDue(sql, id);
    await drainForTest(sql);
    assertEquals((await stateOf(sql, id)).status, "done");
    assertEquals(await bill(sql, service, id), [1, 1]);
  },
);

test("only the service's own refusal says that nothing was charged", async (sql) => {
  const refusal = (status: number) => Response.json({ error: "no" }, { status });
  const replies: [Response, queue.Status, string][] = [
    [refusal(400), "failed", "no"],
    [refusal(413), "failed", "no"],
    [refusal(422), "failed", "no"],
    [refusal(402), "scheduled", "no"],
    [refusal(429), "scheduled", "no"],
    [refusal(503), "scheduled", "no"],
    [refusal(500), "review", "the service replied 500: no"],
    [new Response("<h1>Bad gateway</h1>", { status: 503 }), "review", "the service replied 503"],
    [Response.json({ number: 7 }), "review", "the service replied 200"],
    [Response.redirect("http://127.0.0.1/"), "review", "the service replied 302"],
  ];
  let reply: Response;
  let lookups = 0;
  await using server = Deno.serve(
    { hostname: "127.0.0.1", port: 0, onListen: () => {} },
    (request) =>
      request.method === "POST"
        ? request.arrayBuffer().then(() => reply)
        : (lookups++, new Response("nothing here", { status: 404 })),
  );
  Deno.env.set("SIDING_BAND_URL", `http://127.0.0.1:${server.addr.port}/v1/`);
  for (const [given, status, message] of replies) {
    reply = given;
    const id = await enqueueBand(sql);
    await drainForTest(sql);
    const state = await stateOf(sql, id);
    assertEquals(state.status, status, message);
    assertStringIncludes(state.error!, message);
  }
  assertEquals(lookups, 4);
});

test(
  "work that the service failed at, or has forgotten, fails for good, and is not sent again",
  async (sql, service) => {
    const failed = await enqueueBand(sql, "");
    await drainForTest(sql);
    const error = "there is nothing to hear: the recording is empty";
    assertEquals(await stateOf(sql, failed), { status: "failed", error, attempt: 1 });
    assertEquals(await bill(sql, service, failed), [1, 1]);

    const forgotten = await enqueueBand(sql);
    await sql`update ${sql(schema)}.jobs set request_key = gen_random_uuid(), sent_at = now(),
    request_id = 'from-before' where id = ${forgotten}`;
    await drainForTest(sql);
    const unknown = "the service does not know request from-before";
    assertEquals(await stateOf(sql, forgotten), { status: "failed", error: unknown, attempt: 1 });
    assertEquals(service.charges().length, 1);
  },
);

const workerFlags = ["--jobs", path("jobs.ts")];
const startBandWorker = (url: string, service: BandService, flags: string[] = []) =>
  startWorker(url, [...workerFlags, ...flags], [], { SIDING_BAND_URL: service.url });

test(
  "a worker that dies between the charge and its reply leaves the job in review, where the look-up by its key finds it",
  async (sql, service, url) => {
    service.setMood("slow");
    const id = await enqueueBand(sql);
    {
      await using worker = startBandWorker(url, service);
      await waitFor(() => service.charges()[0]?.charges, "the charge");
      worker.kill("SIGKILL");
      await worker.ended;
    }
    await waitFor(async () => {
      await queue.recover(sql); // in the place of a worker, which would look it up at once
      return (await stateOf(sql, id)).status === "review";
    }, "the job in review");
    await using _ = startBandWorker(url, service);
    await waitFor(async () => (await stateOf(sql, id)).status === "done", "the arrangement");
    assertEquals(await bill(sql, service, id), [1, 1]);
  },
  { slowMs: 600_000, workMs: 100 },
);

test(
  "a worker that thaws just before it sends, after the desk requeued its job, sends nothing",
  async (sql, service, url) => {
    await using proxy = startProxy(url);
    // The last that it hears before it sends.
    const reply = proxy.holdReplyTo("job_inputs i join");
    const id = await enqueueBand(sql);
    await using frozen = startBandWorker(proxy.url, service);
    await reply.held;
    frozen.kill("SIGSTOP");
    reply.release();
    await waitFor(async () => {
      await queue.recover(sql);
      return (await stateOf(sql, id)).status === "review";
    }, "the job in review");
    assertEquals(service.charges(), []);
    await requeue(sql, id);
    await using _ = startBandWorker(url, service);
    await waitFor(async () => (await stateOf(sql, id)).status === "done", "the arrangement");
    frozen.kill("SIGCONT");
    await waitFor(() => frozen.log().includes("is lost: somebody else has it"), "it to see that");
    assertEquals(await bill(sql, service, id), [1, 1]);
    assertStringIncludes(frozen.log(), "a clock jumped by");
    assertEquals((await stateOf(sql, id)).attempt, 2);
  },
  { workMs: 100 },
);

test(
  "an id that reaches a worker which has lost the job meanwhile is saved, and nobody sends again",
  async (sql, service, url) => {
    service.setMood("slow", 1);
    const id = await enqueueBand(sql);
    await using proxy = startProxy(url);
    await using slow = startBandWorker(proxy.url, service);
    await waitFor(() => service.charges()[0]?.charges, "the charge");
    proxy.cut(); // its lease runs out while its request is under way
    await waitFor(async () => {
      await queue.recover(sql);
      return (await stateOf(sql, id)).status === "review";
    }, "the job in review");
    proxy.mend();
    const [{ id: requestId }] = service.charges();
    await waitFor(async () => {
      const [row] = await sql`select request_id from ${sql(schema)}.requests`;
      return row.request_id === requestId;
    }, "the id to be saved");
    await waitFor(async () => (await stateOf(sql, id)).status === "done", "the arrangement");
    assertEquals(await bill(sql, service, id), [1, 1]);
    assert(isAlive(slow.pid));
  },
  { slowMs: 6000, workMs: 100 },
);

test(
  "a worker that is stopped while an id waits to be stored stores it first, and then gives its job back",
  async (sql, service, url) => {
    service.setMood("slow", 1);
    const id = await enqueueBand(sql);
    await using proxy = startProxy(url);
    await using worker = startBandWorker(proxy.url, service, ["--drain-s", "0", "--lease-s", "60"]);
    await waitFor(() => service.charges()[0]?.charges, "the charge");
    proxy.cut();
    const said = new RegExp(
      `the id ${service.charges()[0].id} of its request .* is not stored yet`,
    );
    await waitFor(() => said.test(worker.log()), "its id to be in the log");
    worker.kill("SIGTERM");
    await waitFor(() => worker.log().includes("stopping"), "the worker to stop");
    proxy.mend();
    assertEquals(await worker.ended, 0);
    const [job] = await queue.get(sql, [id]);
    assertEquals([job.status, job.releases, job.crashes, job.failures], ["queued", 1, 0, 0]);
    assertEquals((await paidOf(sql, id)).id, service.charges()[0].id);
  },
  { slowMs: 1000, workMs: 600_000 },
);

test(
  "to cancel work that was sent is refused until what came of it is known",
  async (sql, service, url) => {
    service.setMood("slow", 1);
    const id = await enqueueBand(sql);
    await using _ = startBandWorker(url, service);
    await waitFor(() => service.charges()[0]?.charges, "the charge");
    await assertRejects(
      () => queue.cancel(sql, id),
      queue.Refused,
      `job ${id} was sent to its paid service and is running`,
    );
    await waitFor(async () => (await stateOf(sql, id)).status === "done", "the arrangement");
    assertEquals(await queue.cancel(sql, id), "done");
  },
  { slowMs: 1000, workMs: 100 },
);

test(
  "a worker that dies while the work goes on is followed by one that only collects it",
  async (sql, service, url) => {
    const id = await enqueueBand(sql);
    {
      await using worker = startBandWorker(url, service);
      const working = async () => {
        const [{ stage, progress }] = await queue.get(sql, [id]);
        return stage === "arrange" && progress! > 0;
      };
      await waitFor(working, "progress");
      worker.kill("SIGKILL");
      await worker.ended;
    }
    await using _ = startBandWorker(url, service);
    await waitFor(async () => (await stateOf(sql, id)).status === "done", "the arrangement");
    assertEquals((await stateOf(sql, id)).attempt, 2);
    assertEquals(await bill(sql, service, id), [1, 1]);
    assert((await outputsOf(via(sql), id)).length === 1);
  },
  { workMs: 4000 },
);
