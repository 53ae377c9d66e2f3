/** Webhooks: real workers tell a real receiver of the ends of jobs. */
import {
  assert,
  assertEquals,
  assertRejects,
  assertStringIncludes,
  assertThrows,
} from "@std/assert";
import { Webhook } from "standardwebhooks";
import { type Pool, schema } from "../db.ts";
import { loadKinds, PermanentFailure } from "../jobs/kind.ts";
import { isPublic, post, webhookSecretOf } from "../jobs/webhook.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { runScript, skewedClock, startWorker } from "./processes.ts";

const master = "a-webhook-secret-for-the-tests-only-01";
const signing = { SIDING_WEBHOOK_SECRET: master };
const here = { ...signing, SIDING_WEBHOOK_PRIVATE: "true" };

interface Received {
  path: string;
  headers: Record<string, string>;
  body: string;
}

/** A receiver of webhooks, which answers as `answer` says, by default that all is well. */
function receiver(
  answer: (path: string, nth: number) => Response | Promise<Response> = () => new Response(),
) {
  const got: Received[] = [];
  const server = Deno.serve(
    { port: 0, hostname: "127.0.0.1", onListen() {} },
    async (request) => {
      const path = new URL(request.url).pathname;
      const headers = Object.fromEntries(request.headers);
      got.push({ path, headers, body: await request.text() });
      return await answer(path, got.filter((it) => it.path === path).length);
    },
  );
  return {
    got,
    url: `http://127.0.0.1:${server.addr.port}`,
    [Symbol.asyncDispose]: () => server.shutdown(),
  };
}

/** Enqueues a job with a webhook. @returns its id */
async function enqueue(sql: Pool, webhook: string, job: Partial<queue.NewJob> = {}) {
  const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", payload: 1, webhook, ...job }]);
  return id;
}

/** The webhook jobs, in the order in which they were enqueued. */
async function webhookJobs(sql: Pool) {
  const rows = await sql<{ id: string }[]>`
    select id::text from ${sql(schema)}.jobs j where kind = 'webhook' order by j.id`;
  return await queue.get(sql, rows.map(({ id }) => id));
}

const isFinal = ({ status }: queue.JobView) => /^(done|failed|cancelled)$/.test(status);
/** Waits until there are so many webhook jobs and all have ended. */
const allEnded = (sql: Pool, n: number) =>
  waitFor(async () => {
    const jobs = await webhookJobs(sql);
    return jobs.length === n && jobs.every(isFinal) && jobs;
  }, `${n} webhooks to end`);

test(
  "a job's end is told once, signed: done, failed, cancelled in line, cancelled while it runs",
  async (sql, url) => {
    await using hooks = receiver();
    const inLine = await enqueue(sql, `${hooks.url}/in-line`, { delay_s: 3600, owner: "ann" });
    await queue.cancel(sql, inLine);
    await using _ = startWorker(url, [], [], here);
    const ids: Record<string, string> = {
      "/in-line": inLine,
      "/done": await enqueue(sql, `${hooks.url}/done`, { payload: { a: ["ü"] }, owner: "ann" }),
      "/failed": await enqueue(sql, `${hooks.url}/failed`, {
        kind: "throws",
        payload: { message: "no such tune", permanent: true },
      }),
    };
    await waitFor(() => hooks.got.length === 3, "three ends to be told");
    ids["/running"] = await enqueue(sql, `${hooks.url}/running`, { kind: "waits", owner: "bob" });
    await waitFor(
      async () => (await queue.get(sql, [ids["/running"]]))[0].status === "running",
      "it to run",
    );
    await queue.cancel(sql, ids["/running"]);
    const jobs = await allEnded(sql, 4);
    assertEquals(jobs.map(({ status, owner }) => [status, owner]), jobs.map(() => ["done", null]));
    assertEquals(hooks.got.length, 4);
    const owners: Record<string, string | null> = {
      "/in-line": "ann",
      "/done": "ann",
      "/failed": null,
      "/running": "bob",
    };
    const told = Object.fromEntries(hooks.got.map(({ path, headers, body }) => {
      const secret = webhookSecretOf(master, owners[path]);
      return [
        path,
        new Webhook(secret).verify(body, headers) as {
          type: string;
          timestamp: string;
          data: queue.JobView;
        },
      ];
    }));
    assertEquals(
      Object.fromEntries(
        Object.entries(told).map(([path, { type, data }]) => [path, [type, data.id]]),
      ),
      {
        "/in-line": ["job.cancelled", ids["/in-line"]],
        "/done": ["job.done", ids["/done"]],
        "/failed": ["job.failed", ids["/failed"]],
        "/running": ["job.cancelled", ids["/running"]],
      },
    );
    const { data, timestamp } = told["/done"];
    assertEquals([data.kind, data.queue, data.owner, data.status], [
      "echo",
      "default",
      "ann",
      "done",
    ]);
    assertEquals(data.result, { a: ["ü"] });
    assertEquals(timestamp, String(data.finished_at));
    assertEquals(told["/failed"].data.error, "no such tune");
    assertEquals(new Set(hooks.got.map(({ headers }) => headers["webhook-id"])).size, 4);
    const { headers, body } = hooks.got.find(({ path }) => path === "/done")!;
    const ann = new Webhook(webhookSecretOf(master, "ann"));
    assertThrows(() => new Webhook(webhookSecretOf(master, "bob")).verify(body, headers));
    assertThrows(() => new Webhook(webhookSecretOf(`${master}!`, "ann")).verify(body, headers));
    assertThrows(() => ann.verify(body.replace("job.done", "job.gone"), headers));
    assertThrows(() => ann.verify(body, { ...headers, "webhook-id": "msg_0" }));
  },
);

test(
  "the timestamp of a webhook is the database's, also where the worker's clock is off",
  async (sql, url) => {
    await using hooks = receiver();
    await using _ = startWorker(url, [], skewedClock(-600_000), here);
    await enqueue(sql, hooks.url);
    await waitFor(() => hooks.got.length === 1, "the webhook");
    const [{ body, headers }] = hooks.got;
    new Webhook(webhookSecretOf(master, null)).verify(body, headers); // refuses what is 5 minutes off
  },
);

test("a receiver that fails is told again, with the same id, until it works", async (sql, url) => {
  await using hooks = receiver((_, nth) => new Response(null, { status: nth === 3 ? 204 : 503 }));
  await using _ = startWorker(url, [], [], here);
  await enqueue(sql, hooks.url);
  for (const failures of [1, 2]) {
    const [waiting] = await waitFor(async () => {
      const jobs = await webhookJobs(sql);
      return jobs[0]?.status === "scheduled" && jobs[0].failures === failures && jobs;
    }, `failure ${failures}`);
    const delayS = (waiting.due_at.getTime() - Date.now()) / 1000;
    const usualS = 10 * 3 ** (failures - 1);
    assert(delayS > usualS * 0.9 - 5 && delayS < usualS * 1.1 + 1, `${delayS} s`);
    await sql`update ${sql(schema)}.jobs set due_at = now() where id = ${waiting.id}`;
  }
  const [job] = await allEnded(sql, 1);
  assertEquals([job.status, job.failures, job.result], ["done", 2, { status: 204 }]);
  assertEquals(new Set(hooks.got.map(({ headers }) => headers["webhook-id"])).size, 1);
  assertEquals(new Set(hooks.got.map(({ body }) => body)).size, 1);
  assertEquals(hooks.got.length, 3);
});

test(
  "a receiver that refuses for good is not told again, and no redirect is followed",
  async (sql, url) => {
    await using hooks = receiver((path) => {
      const status = Number(path.slice(1));
      return new Response("no ".repeat(1_000_000), {
        status,
        headers: status === 302 ? { location: "/elsewhere" } : {},
      });
    });
    const ends: Record<number, queue.Status> = {
      ...{ 400: "failed", 401: "failed", 404: "failed", 410: "failed", 422: "failed" },
      ...{ 408: "scheduled", 409: "scheduled", 425: "scheduled", 429: "scheduled" },
      ...{ 302: "scheduled", 500: "scheduled" },
    };
    await using _ = startWorker(url, ["--concurrency", "4"], [], here);
    for (const status of Object.keys(ends)) await enqueue(sql, `${hooks.url}/${status}`);
    const n = Object.keys(ends).length;
    const jobs = await waitFor(async () => {
      const jobs = await webhookJobs(sql);
      return jobs.length === n && jobs.every(({ failures }) => failures === 1) && jobs;
    }, "each to be told once");
    const found = jobs.map((job) => {
      const status = Number(new URL((job.payload as { url: string }).url).pathname.slice(1));
      assertEquals(job.error, `the receiver answered ${status}`);
      return [status, job.status];
    });
    assertEquals(Object.fromEntries(found), ends);
    assertEquals(hooks.got.filter(({ path }) => path === "/elsewhere"), []);
  },
);

test(
  "a webhook never goes to an address that is not public, however it is written",
  async (sql, url) => {
    await using hooks = receiver();
    const { port } = new URL(hooks.url);
    const hosts = [
      ...["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "127.1"],
      ...["10.0.0.1", "169.254.169.254", "100.64.0.1", "[fd00::1]", "[64:ff9b::7f00:1]", "0.0.0.0"],
    ];
    await using _ = startWorker(url, ["--concurrency", "4"], [], signing);
    for (const host of hosts) await enqueue(sql, `http://${host}:${port}/`);
    const jobs = await allEnded(sql, hosts.length);
    for (const { status, error, attempt } of jobs) {
      assertEquals([status, attempt], ["failed", 1]);
      assertStringIncludes(error!, "which is not a public address");
    }
    assertEquals(hooks.got, []);
  },
);

test("a worker without the secret fails webhooks for good, and says why", async (sql, url) => {
  await using hooks = receiver();
  await using _ = startWorker(url, [], [], { SIDING_WEBHOOK_PRIVATE: "true" });
  await enqueue(sql, hooks.url);
  const [job] = await allEnded(sql, 1);
  assertEquals([job.status, job.attempt], ["failed", 1]);
  assertStringIncludes(job.error!, "SIDING_WEBHOOK_SECRET is not set");
  assertEquals(hooks.got, []);
});

test("deno task key secret prints what an owner's webhooks are signed with", async (_, url) => {
  const args = ["secret", "ann"];
  const { code, stdout } = await runScript("tools/key.ts", args, { DATABASE_URL: url, ...signing });
  assertEquals([code, stdout.trim()], [0, webhookSecretOf(master, "ann")]);
  const bare = await runScript("tools/key.ts", args, { DATABASE_URL: url });
  assertEquals(bare.code, 2);
  assertStringIncludes(bare.stderr, "SIDING_WEBHOOK_SECRET is not set");
});

Deno.test("the kind webhook is in every table of kinds, and is nobody else's", async () => {
  const own = await loadKinds();
  assertEquals([own.webhook.runs, own.webhook.internal], ["inline", true]);
  const path = await Deno.makeTempFile({ suffix: ".ts" });
  await Deno.writeTextFile(path, "export const kinds = { webhook: {} };");
  await assertRejects(() => loadKinds(path), TypeError, 'the kind "webhook" is Siding\'s own');
  await Deno.remove(path);
});

test("the secret of webhooks reaches no job's process", async (sql, url) => {
  await using _ = startWorker(url, [], [], here);
  const [{ id }] = await queue.enqueue(sql, [{ kind: "environment" }]);
  const [job] = await waitFor(async () => {
    const jobs = await queue.get(sql, [id]);
    return isFinal(jobs[0]) && jobs;
  }, "it to end");
  assertStringIncludes(String(job.result), "PATH");
  assert(!String(job.result).includes("SIDING"), String(job.result));
});

test(
  "a worker that is killed amid a delivery: it is delivered again, with the same id",
  async (sql, url) => {
    const held = Promise.withResolvers<Response>();
    await using hooks = receiver((_, nth) => nth === 1 ? held.promise : new Response());
    await using first = startWorker(url, [], [], here);
    await enqueue(sql, hooks.url);
    await waitFor(() => hooks.got.length === 1, "the first delivery");
    first.kill("SIGKILL");
    await first.ended;
    held.resolve(new Response());
    await using _ = startWorker(url, [], [], here);
    const [job] = await allEnded(sql, 1);
    assertEquals([job.status, job.attempt, job.crashes], ["done", 2, 1]);
    assertEquals(hooks.got.length, 2);
    assertEquals(hooks.got[0].headers["webhook-id"], hooks.got[1].headers["webhook-id"]);
  },
);

Deno.test("a webhook goes to the very address that was checked: its name is looked up once", async () => {
  await using hooks = receiver();
  const { port } = new URL(hooks.url);
  const signal = AbortSignal.timeout(10_000);
  const asked: string[] = [];
  // As one who answers with a public address first, and with one of ours after.
  const find = (name: string) => {
    asked.push(name);
    return Promise.resolve([{ address: "127.0.0.1", family: 4 }]);
  };
  const target = new URL(`http://receiver.invalid:${port}/`);
  await assertRejects(
    () => post(target, {}, "{}", signal, find),
    PermanentFailure,
    '"receiver.invalid" is at 127.0.0.1, which is not a public address',
  );
  assertEquals(hooks.got, []);
  Deno.env.set("SIDING_WEBHOOK_PRIVATE", "true");
  try {
    assertEquals(await post(target, {}, "{}", signal, find), 200);
  } finally {
    Deno.env.delete("SIDING_WEBHOOK_PRIVATE");
  }
  assertEquals(asked, ["receiver.invalid", "receiver.invalid"]); // once a call
  assertEquals(hooks.got[0].headers.host, `receiver.invalid:${port}`);
});

Deno.test("one address of several that is not public is enough to refuse", async () => {
  const find = () =>
    Promise.resolve([{ address: "8.8.8.8", family: 4 }, { address: "::ffff:10.1.2.3", family: 6 }]);
  const url = new URL("http://receiver.invalid/");
  await assertRejects(
    () => post(url, {}, "{}", AbortSignal.timeout(10_000), find),
    PermanentFailure,
    "is at ::ffff:10.1.2.3",
  );
});

Deno.test("which addresses are public", () => {
  for (const address of ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8"]) {
    assert(isPublic(address), address);
  }
  const others = [
    ...["127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"],
    ...["0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1"],
    ...["::", "::1", "::7f00:1", "::a00:1", "::ffff:127.0.0.1", "::ffff:a00:1", "fe80::1"],
    ...[
      "fec0::1",
      "fd00::1",
      "ff02::1",
      "64:ff9b::a00:1",
      "2002:a00:1::",
      "2001:db8::1",
      "4000::1",
    ],
  ];
  for (const address of others) assert(!isPublic(address), address);
});

const openssl = await new Deno.Command("openssl", { args: ["version"] }).output()
  .then(({ success }) => success, () => false);

test(
  `a receiver by https must be who it says${openssl ? "" : " (skipped: there is no openssl)"}`,
  async (sql, url) => {
    if (!openssl) return;
    const folder = await Deno.makeTempDir();
    const [key, cert] = [`${folder}/key.pem`, `${folder}/cert.pem`];
    const { success } = await new Deno.Command("openssl", {
      args: [
        ...["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"],
        ...["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"],
        ...["-addext", "subjectAltName=DNS:localhost"],
      ],
      stderr: "null",
    }).output();
    assert(success);
    const paths: string[] = [];
    const server = Deno.serve({
      ...{ port: 0, hostname: "127.0.0.1", onListen() {} },
      ...{ key: await Deno.readTextFile(key), cert: await Deno.readTextFile(cert) },
    }, (request) => (paths.push(new URL(request.url).pathname), new Response()));
    const { port } = server.addr;
    {
      await using _ = startWorker(url, [], [], { ...here, NODE_EXTRA_CA_CERTS: cert });
      await enqueue(sql, `https://localhost:${port}/known`);
      await enqueue(sql, `https://127.0.0.1:${port}/another-name`);
      await waitFor(async () => (await webhookJobs(sql)).length === 2, "the webhooks");
      await waitFor(
        async () => (await webhookJobs(sql)).every((job) => job.failures || isFinal(job)),
        "both to be tried",
      );
    }
    {
      await using _ = startWorker(url, [], [], here);
      await enqueue(sql, `https://localhost:${port}/unknown`);
      await waitFor(async () => (await webhookJobs(sql))[2]?.failures, "it to fail");
    }
    const jobs = await webhookJobs(sql);
    const ends = Object.fromEntries(
      jobs.map((job) => [new URL((job.payload as { url: string }).url).pathname, job]),
    );
    assertEquals(ends["/known"].status, "done");
    assertStringIncludes(ends["/another-name"].error!, "altnames");
    assertStringIncludes(ends["/unknown"].error!, "self-signed certificate");
    assertEquals(paths, ["/known"]);
    await server.shutdown();
    await Deno.remove(folder, { recursive: true });
  },
);
