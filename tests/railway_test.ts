/** The client of Railway's API, against the local Railway in each of its moods. */
import { assert, assertEquals, assertMatch, assertRejects, assertThrows } from "@std/assert";
import { buildSchema, parse, validate } from "graphql";
import { UsageError } from "../config.ts";
import { describe } from "../db.ts";
import type { LocalRailway, Mood } from "../dev/railway.ts";
import { operations, Railway, type RailwayOptions } from "../railway.ts";
import { RailwayError, type Reason, tokenFrom } from "../railway_call.ts";
import { realSchema, schemaNote, startQuick } from "./replicas.ts";
import { waitFor } from "./wait.ts";

/** The client of a local Railway's service. */
const clientOf = (local: LocalRailway, options: Partial<RailwayOptions> = {}) =>
  new Railway({
    url: local.url,
    serviceId: local.serviceId,
    environmentId: local.environmentId,
    token: { project: local.projectToken },
    limitMs: 5000,
    ...options,
  });

/** A server that gives the same reply to all, as often as it is asked. */
function startStub(reply: () => Response) {
  const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen: () => {} }, reply);
  const client = (options: Partial<RailwayOptions> = {}) =>
    new Railway({
      url: `http://127.0.0.1:${server.addr.port}`,
      serviceId: "s",
      environmentId: "e",
      ...options,
    });
  return { client, [Symbol.asyncDispose]: () => server.shutdown() };
}

const fails = async (call: Promise<unknown>, reason: Reason) => {
  const error = await assertRejects(() => call, RailwayError);
  assertEquals(error.reason, reason, error.message);
  return error;
};
const runs = (local: LocalRailway, count: number) =>
  waitFor(
    () => local.replicas().filter(({ status }) => status === "RUNNING").length === count,
    `${count} replicas to run`,
  );

const two = {
  multiRegionConfig: {
    "us-west2": { numReplicas: 2, stackerAssignment: "a" },
    "europe-west4-drams3a": { numReplicas: 1, stackerAssignment: null },
  },
  drainingSeconds: 30,
};

Deno.test("a read gives the counts by region, their sum and what runs, in one call", async () => {
  await using local = await startQuick({ deploy: two });
  await runs(local, 3);
  const seen = await clientOf(local, { region: "us-west2" }).read();
  const { deployments, ...counts } = seen;
  assertEquals(counts, {
    regions: { "us-west2": 2, "europe-west4-drams3a": 1 },
    total: 3,
    region: "us-west2",
    least: 2,
    running: 3,
    crashed: 0,
  });
  assertEquals(deployments.map(({ status, instances }) => [status, instances.length]), [
    ["SUCCESS", 3],
  ]);
  assertEquals(local.calls, ["read"]);
});

Deno.test("a config from before there were several regions is read and scaled as well", async () => {
  await using local = await startQuick({ deploy: { numReplicas: 2, region: "us-east4-eqdc4a" } });
  const railway = clientOf(local);
  const seen = await railway.read();
  assertEquals([seen.regions, seen.total, seen.region], [
    { "us-east4-eqdc4a": 2 },
    2,
    "us-east4-eqdc4a",
  ]);
  await railway.write(3, seen);
  assertEquals((await railway.read()).regions, { "us-east4-eqdc4a": 3 });
});

Deno.test("a service that was never scaled has one replica, where its region is told", async () => {
  await using local = await startQuick({ deploy: {} });
  assertMatch((await fails(clientOf(local).read(), "settings")).message, /SIDING_RAILWAY_REGION/);
  const seen = await clientOf(local, { region: "us-west2" }).read();
  assertEquals([seen.regions, seen.least], [{ "us-west2": 1 }, 1]);
});

for (const write of ["update", "commit"] as const) {
  Deno.test(`a write by ${write} changes the count of one region, and no other region or key`, async () => {
    await using local = await startQuick({ deploy: two });
    const railway = clientOf(local, { region: "us-west2", write });
    await railway.write(5, await railway.read());
    assertEquals(local.calls, ["read", write]);
    const seen = await railway.read();
    assertEquals([seen.regions, seen.total], [{ "us-west2": 4, "europe-west4-drams3a": 1 }, 5]);
    assertEquals(local.config(), {
      ...two,
      multiRegionConfig: {
        ...two.multiRegionConfig,
        "us-west2": { numReplicas: 4, stackerAssignment: "a" },
      },
    });
    await runs(local, 5);
    await railway.write(seen.least, seen);
    await runs(local, 2);
    assertEquals(local.counts(), { "us-west2": 1, "europe-west4-drams3a": 1 });
  });
}

Deno.test("of several regions the one to scale must be told, and the last replica there stays", async () => {
  await using local = await startQuick({ deploy: two });
  const { message } = await fails(clientOf(local).read(), "settings");
  assertMatch(message, /us-west2 and europe-west4-drams3a: SIDING_RAILWAY_REGION/);
  const railway = clientOf(local, { region: "us-west2" });
  const seen = await railway.read();
  await fails(railway.write(seen.least - 1, seen), "settings");
  assertEquals(local.calls, ["read", "read"], "nothing was written");
});

Deno.test("where a write only records the count, a read shows that nothing more runs", async () => {
  await using local = await startQuick({ recordsOnly: true });
  await runs(local, 1);
  await clientOf(local).write(3, await clientOf(local).read());
  const seen = await clientOf(local).read();
  assertEquals([seen.total, seen.running], [3, 1]);
  await clientOf(local, { write: "commit" }).write(3, seen);
  await runs(local, 3);
});

Deno.test("a project's token and an account's go in their own headers, and a wrong one is refused in Railway's words", async () => {
  await using local = await startQuick();
  const read = (token: RailwayOptions["token"]) => clientOf(local, { token }).read();
  assertEquals((await read({ project: local.projectToken })).total, 1);
  assertEquals((await read({ account: local.accountToken })).total, 1);
  const wrong: [RailwayOptions["token"], string][] = [
    [{ project: local.accountToken }, "Railway: Project Token not found"],
    [{ account: local.projectToken }, "Railway: Not Authorized"],
    [undefined, "Railway: Not Authorized"],
  ];
  for (const [token, message] of wrong) {
    const error = await fails(read(token), "unauthorized");
    assertEquals([error.message, error.about.status], [message, 400]);
  }
  for (const other of [{ serviceId: "other" }, { environmentId: "other" }]) {
    const error = await fails(clientOf(local, other).read(), "unauthorized");
    assertEquals(error.message, "Railway: Not Authorized");
  }
});

const failures: [Mood, Reason, RegExp, number | undefined][] = [
  ["unauthorized", "unauthorized", /^Railway: Not Authorized \(INTERNAL_SERVER_ERROR\)$/, 400],
  ["unauthorized-200", "unauthorized", /^Railway: Not Authorized \(INTERNAL_SERVER_ERROR\)$/, 200],
  ["limited", "limited", /^Railway: Rate limit exceeded$/, 429],
  ["unavailable", "unavailable", /^Railway replied 503 and no data$/, 503],
  ["partial", "refused", /^Railway: Problem processing request \(INTERNAL_SERVER_ERROR\)$/, 200],
  ["garbage", "unexpected", /^Railway replied 200 and no data$/, 200],
  ["drop", "unreachable", /^Railway could not be reached: .*connection/, undefined],
  ["hang", "unreachable", /^Railway did not reply within 0.3 s$/, undefined],
];
for (const [mood, reason, said, status] of failures) {
  Deno.test(`a read fails as ${reason} in the mood ${mood}, is asked once, and the next one is well`, async () => {
    await using local = await startQuick();
    local.setMood(mood, 1);
    const limitMs = mood === "hang" ? 300 : 5000;
    const error = await fails(clientOf(local, { limitMs }).read(), reason);
    assertMatch(describe(error), said);
    assertEquals(error.about.status, status);
    assertEquals(local.calls, ["read"]);
    assertEquals((await clientOf(local).read()).total, 1);
  });
}

Deno.test("a Railway that is not there is unreachable", async () => {
  const listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
  const url = `http://127.0.0.1:${listener.addr.port}`;
  listener.close();
  const railway = new Railway({ url, serviceId: "s", environmentId: "e" });
  assertMatch((await fails(railway.read(), "unreachable")).message, /refused/i);
});

Deno.test("half a reply, or one without the service, is a failure and never a zero", async () => {
  const service = { activeDeployments: [] };
  const config = { services: { s: { deploy: { multiRegionConfig: { r: { numReplicas: 2 } } } } } };
  const replies: [unknown, Reason][] = [
    [{ environment: null, serviceInstance: service }, "unexpected"],
    [{ environment: { config }, serviceInstance: null }, "unexpected"],
    [{ environment: { config }, serviceInstance: {} }, "unexpected"],
    [{ environment: { config: {} }, serviceInstance: service }, "unexpected"],
    [{ environment: { config: { services: {} } }, serviceInstance: service }, "settings"],
    [
      {
        environment: { config: { services: { s: { deploy: { numReplicas: "2" } } } } },
        serviceInstance: service,
      },
      "unexpected",
    ],
  ];
  for (const [data, reason] of replies) {
    await using stub = startStub(() => Response.json({ data }));
    await fails(stub.client().read(), reason);
  }
  const data = { environment: { config }, serviceInstance: service };
  await using stub = startStub(() => Response.json({ data }));
  assertEquals((await stub.client().read()).total, 2);
});

Deno.test("the token appears in no message, stack or inspection, whatever the reply quotes", async () => {
  const token = "11111111-2222-3333-4444-555555555555";
  const message = `token ${token} (Bearer ${token}) is not allowed`;
  const code = "FORBIDDEN";
  await using stub = startStub(() =>
    Response.json({ errors: [{ message, extensions: { code } }] })
  );
  for (const kind of ["project", "account"]) {
    const railway = stub.client({ token: { [kind]: token } as RailwayOptions["token"] });
    const error = await fails(railway.read(), "unauthorized");
    const shown = [describe(error), error.stack, Deno.inspect(error), Deno.inspect(railway)].join();
    assert(!shown.includes(token), shown);
    assertMatch(error.message, /token … \(Bearer …\) is not allowed/);
  }
  // What cannot even be sent.
  const odd = `${token}\nx`;
  const error = await assertRejects(() => stub.client({ token: { account: odd } }).read(), Error);
  assert(!Deno.inspect(error).includes(token), Deno.inspect(error));
  const { message: refusal } = assertThrows(
    () => tokenFrom(new Map([["RAILWAY_TOKEN", odd]])),
    UsageError,
  );
  assertEquals(refusal, "RAILWAY_TOKEN does not look like a token");
});

Deno.test("RAILWAY_TOKEN is a project's token, and comes before an account's RAILWAY_API_TOKEN", () => {
  const [project, account] = ["project-token", "account-token"];
  assertEquals(tokenFrom(new Map()), undefined);
  assertEquals(tokenFrom(new Map([["RAILWAY_API_TOKEN", account]])), { account });
  const both = new Map([["RAILWAY_API_TOKEN", account], ["RAILWAY_TOKEN", project]]);
  assertEquals(tokenFrom(both), { project });
});

Deno.test("after a 429 Railway is not asked before Retry-After is over", async () => {
  await using local = await startQuick({ retryAfterS: 30 });
  let nowMs = 0;
  const railway = clientOf(local, { now: () => nowMs });
  local.setMood("limited", 1);
  assertEquals((await fails(railway.read(), "limited")).about.retryAfterMs, 30_000);
  nowMs = 29_000;
  const error = await fails(railway.read(), "limited");
  assertEquals(error.about.retryAfterMs, 1000);
  assertEquals(error.message, "no call to Railway for another 1 s: Railway said so");
  assertEquals(local.calls.length, 1, "the second was not made");
  nowMs = 30_000;
  assertEquals((await railway.read()).total, 1);
});

Deno.test("Retry-After may be a date, or missing, and keeps nobody for more than an hour", async () => {
  const waits: [string | null, (ms: number) => boolean][] = [
    [new Date(Date.now() + 120_000).toUTCString(), (ms) => ms > 100_000 && ms <= 120_000],
    [null, (ms) => ms === 60_000],
    ["soon", (ms) => ms === 60_000],
    ["0", (ms) => ms === 1000],
    ["999999", (ms) => ms === 3_600_000],
  ];
  for (const [value, isRight] of waits) {
    const headers: HeadersInit = value === null ? {} : { "retry-after": value };
    await using stub = startStub(() => new Response("slow down", { status: 429, headers }));
    const ms = (await fails(stub.client().read(), "limited")).about.retryAfterMs!;
    assert(isRight(ms), `${value}: ${ms}`);
  }
});

Deno.test("no more calls are made in any hour than the budget has", async () => {
  await using local = await startQuick();
  let nowMs = 0;
  const railway = clientOf(local, { now: () => nowMs, callsPerHour: 2 });
  await railway.read();
  nowMs = 1_800_000;
  await railway.read();
  const error = await fails(railway.read(), "limited");
  assertEquals(
    error.message,
    "no call to Railway for another 1800 s: the budget is 2 calls an hour",
  );
  nowMs = 3_600_000;
  await railway.read();
  await fails(railway.read(), "limited");
  assertEquals(local.calls.length, 3);
});

for (const mood of ["apply-and-hang", "apply-and-drop"] as const) {
  Deno.test(`a write that took effect without a reply (${mood}) is found by reading, and not repeated`, async () => {
    await using local = await startQuick();
    const railway = clientOf(local, { limitMs: mood === "apply-and-hang" ? 300 : 5000 });
    const seen = await railway.read();
    local.setMood(mood, 1);
    await railway.write(3, seen);
    assertEquals(local.calls, ["read", "update", "read"]);
    assertEquals(local.counts(), { "us-west2": 3 });
  });
}

for (const mood of ["hang", "drop"] as const) {
  Deno.test(`a write that had no effect (${mood}) is looked for and fails, and is sent again by the next look only`, async () => {
    await using local = await startQuick();
    const railway = clientOf(local, { limitMs: mood === "hang" ? 300 : 5000 });
    const seen = await railway.read();
    local.setMood(mood, 1);
    await fails(railway.write(3, seen), "unreachable");
    assertEquals(local.calls, ["read", "update", "read"]);
    assertEquals(local.counts(), { "us-west2": 1 });
  });
}

Deno.test("a write whose effect a stale read hides fails, and the next look finds it", async () => {
  await using local = await startQuick({ staleMs: 60_000 });
  const railway = clientOf(local);
  const seen = await railway.read();
  local.setMood("apply-and-drop", 1);
  await fails(railway.write(3, seen), "unreachable");
  assertEquals((await railway.read()).total, 1, "as it was");
  local.setConduct({ staleMs: 0 });
  await railway.write(3, seen);
  assertEquals((await railway.read()).total, 3);
});

Deno.test("a count that the plan or Railway does not allow is refused with its words, and nothing changes", async () => {
  await using local = await startQuick({ ceiling: 6 });
  const railway = clientOf(local);
  const seen = await railway.read();
  assertMatch((await fails(railway.write(7, seen), "refused")).message, /your plan allows 6/);
  local.setConduct({ ceiling: 50 });
  assertMatch((await fails(railway.write(51, seen), "refused")).message, /at most 50/);
  await fails(railway.write(0, seen), "settings");
  assertEquals(local.counts(), { "us-west2": 1 });
  assertEquals(local.calls, ["read", "update", "update"], "zero is not even sent");
});

Deno.test("a call ends with the signal, and is no failure of Railway's", async () => {
  await using local = await startQuick();
  local.setMood("hang");
  const stop = new AbortController();
  const reading = clientOf(local, { signal: stop.signal }).read();
  await waitFor(() => local.calls.length === 1, "the call");
  stop.abort(new Error("told to stop"));
  await assertRejects(() => reading, Error, "told to stop");
});

Deno.test({
  name: `every operation is valid against Railway's own schema${schemaNote}`,
  ignore: !realSchema,
  fn() {
    const schema = buildSchema(realSchema!);
    for (const [name, text] of Object.entries(operations)) {
      assertEquals(validate(schema, parse(text)).map(({ message }) => message), [], name);
    }
  },
});
