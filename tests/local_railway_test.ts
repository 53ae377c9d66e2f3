/** The local Railway: it refuses what Railway refuses, and its replicas are processes that follow the count. */
import { assert, assertEquals, assertMatch, assertNotEquals, assertRejects } from "@std/assert";
import {
  buildSchema,
  type GraphQLField,
  type GraphQLInputField,
  type GraphQLSchema,
  isEnumType,
  isInputObjectType,
  isInterfaceType,
  isObjectType,
  isScalarType,
} from "graphql";
import type { LocalRailway, RailwayOptions } from "../dev/railway.ts";
import type { Replica } from "../dev/replicas.ts";
import { isAlive, startScript } from "../dev/scripts.ts";
import { operations } from "../railway.ts";
import { idle, isReady, realSchema, schemaNote, sh, startQuick } from "./replicas.ts";
import { waitFor } from "./wait.ts";

/** A call of its API, as it is: status and body. */
async function post(local: LocalRailway, body: unknown, token = local.projectToken) {
  const response = await fetch(local.url, {
    method: "POST",
    headers: { "content-type": "application/json", "project-access-token": token },
    body: typeof body === "string" ? body : JSON.stringify(body),
  });
  return { status: response.status, body: await response.json() };
}

/** Sets the count by the API. */
async function scale(local: LocalRailway, numReplicas: number, region = "us-west2") {
  const { serviceId: service, environmentId: environment } = local;
  const variables = { service, environment, regions: { [region]: { numReplicas } } };
  const { body } = await post(local, { query: operations.update, variables });
  assertEquals(body, { data: { serviceInstanceUpdate: true } });
}

const pidsOf = (replicas: Replica[]) => replicas.map(({ pid }) => pid!);
/** What has no process id is none that would have to get ready. */
const isUp = (pid: number | undefined) => pid === undefined || isReady(pid);
const withStatus = (local: LocalRailway, status: Replica["status"]) =>
  local.replicas().filter((replica) => replica.status === status);
/** Waits for so many replicas that run, and none besides. @returns them */
const settles = (local: LocalRailway, count: number) =>
  waitFor(() => {
    const all = local.replicas();
    const isSettled = all.length === count && withStatus(local, "RUNNING").length === count;
    return isSettled && pidsOf(all).every(isUp) && all;
  }, `${count} replicas to run and no other to be there`);
const gone = (pids: number[]) => waitFor(() => !pids.some(isAlive), "the processes to end");

/** Replicas that are a shell script each. */
const startScripts = (script: string, options: Partial<RailwayOptions> = {}) =>
  startQuick({ drainMs: 10_000, start: (env) => sh(script, env), ...options });
const obedient = "trap 'exit 0' TERM; forEver";

Deno.test("as many processes run as the count says, each with Railway's variables", async () => {
  const folder = await Deno.makeTempDir();
  const script = `env > ${folder}/$RAILWAY_REPLICA_ID.tmp
    mv ${folder}/$RAILWAY_REPLICA_ID.tmp ${folder}/$RAILWAY_REPLICA_ID; ${obedient}`;
  {
    await using local = await startScripts(script);
    assertEquals((await settles(local, 1)).map(({ region }) => region), ["us-west2"]);
    await scale(local, 3);
    const replicas = await settles(local, 3);
    assert(pidsOf(replicas).every(isAlive));
    await waitFor(
      () => [...Deno.readDirSync(folder)].filter(({ name }) => !name.includes(".")).length === 3,
      "the scripts to write",
    );
    for (const { id } of replicas) {
      const lines = Deno.readTextFileSync(`${folder}/${id}`).split("\n");
      const has = (name: string, value: string) =>
        assert(lines.includes(`${name}=${value}`), `${name}=${value} of ${lines}`);
      has("RAILWAY_REPLICA_ID", id);
      has("RAILWAY_REPLICA_REGION", "us-west2");
      has("RAILWAY_SERVICE_ID", local.serviceId);
      has("RAILWAY_ENVIRONMENT_ID", local.environmentId);
      has("RAILWAY_DEPLOYMENT_ID", local.deployments()[0].id);
    }
    await scale(local, 1);
    const [kept] = await settles(local, 1);
    await gone(pidsOf(replicas).filter((pid) => pid !== kept.pid));
    assert(isAlive(kept.pid!));
  }
  await Deno.remove(folder, { recursive: true });
});

Deno.test("regions have counts of their own, and null removes one", async () => {
  await using local = await startQuick();
  await scale(local, 2, "europe-west4-drams3a");
  const regions = (await settles(local, 3)).map(({ region }) => region).sort();
  assertEquals(regions, ["europe-west4-drams3a", "europe-west4-drams3a", "us-west2"]);
  const { serviceId: service, environmentId: environment } = local;
  const variables = { service, environment, regions: { "us-west2": null } };
  await post(local, { query: operations.update, variables });
  await settles(local, 2);
  assertEquals(local.counts(), { "europe-west4-drams3a": 2 });
});

Deno.test("which replica stops is for the seed to say, and not always the oldest or the newest", async () => {
  const survivor = async (seed: number) => {
    await using local = await startQuick({ seed });
    await scale(local, 4);
    const before = await settles(local, 4);
    await scale(local, 1);
    const [kept] = await settles(local, 1);
    return before.findIndex(({ id }) => id === kept.id);
  };
  const places = await Promise.all(Array.from({ length: 8 }, (_, seed) => survivor(seed)));
  assertEquals(await survivor(3), places[3]);
  assert(new Set(places).size > 2, `${places}`);
});

Deno.test("a replica is started after the start delay, and never if it is not wanted any more", async () => {
  let starts = 0;
  const start = () => (starts++, idle());
  {
    await using local = await startQuick({ startDelayMs: 300, start });
    const beganMs = performance.now();
    assertEquals([local.replicas().map(({ status }) => status), starts], [["INITIALIZING"], 0]);
    await settles(local, 1);
    assert(performance.now() - beganMs > 200);
    const europe = "europe-west4-drams3a";
    await scale(local, 2, europe);
    assertEquals(withStatus(local, "INITIALIZING").length, 2);
    const { serviceId: service, environmentId: environment } = local;
    const variables = { service, environment, regions: { [europe]: null } };
    await post(local, { query: operations.update, variables });
    await settles(local, 1);
  }
  assertEquals(starts, 1);
});

Deno.test("a stopped replica gets SIGTERM, and all of the drain time if it needs it", async () => {
  const path = await Deno.makeTempFile();
  // It has its say 300 ms after the signal.
  const script = `trap 'sleep 0.3; echo drained >> ${path}; exit 0' TERM; forEver`;
  {
    await using local = await startScripts(script);
    await scale(local, 2);
    const before = await settles(local, 2);
    await scale(local, 1);
    assertEquals(withStatus(local, "REMOVING").map(({ pid }) => isAlive(pid!)), [true]);
    const [kept] = await settles(local, 1);
    await gone(pidsOf(before).filter((pid) => pid !== kept.pid));
    assertEquals(await Deno.readTextFile(path), "drained\n");
  }
  await Deno.remove(path);
});

Deno.test("a replica that ignores SIGTERM is killed when the drain time is over, and at once without one", async () => {
  for (const drainMs of [400, 0]) {
    await using local = await startScripts("trap '' TERM; forEver", { drainMs });
    await scale(local, 2);
    const before = await settles(local, 2);
    const beganMs = performance.now();
    await scale(local, 1);
    const [kept] = await settles(local, 1);
    assert(performance.now() - beganMs >= drainMs);
    await gone(pidsOf(before).filter((pid) => pid !== kept.pid));
  }
});

Deno.test("a replica that crashes shows CRASHED, is started again ever later under its id, and harms no other", async () => {
  const path = await Deno.makeTempFile();
  // The first to come crashes, whenever it is started.
  const script = `[ -s ${path} ] || echo $RAILWAY_REPLICA_ID > ${path}
    [ "$(cat ${path})" = $RAILWAY_REPLICA_ID ] && exit 3; ${obedient}`;
  {
    await using local = await startScripts(script, { restartMs: 20 });
    const crashed = await waitFor(() => withStatus(local, "CRASHED")[0], "a crash");
    assertEquals(local.deployments()[0].status, "CRASHED");
    await scale(local, 2);
    await waitFor(() => local.replicas()[0].restarts > 3, "four restarts");
    assertEquals(local.replicas()[0].id, crashed.id);
    assertEquals(local.replicas()[1].status, "RUNNING");
    // Whether it crashes now or waits, it goes when it is not wanted.
    await Deno.writeTextFile(path, "nobody");
    await settles(local, 2);
  }
  await Deno.remove(path);
});

Deno.test("a replica that never gets going is given up after ten restarts, and still removed", async () => {
  await using local = await startQuick({
    restartMs: 0,
    start: () => {
      throw new Error("no such command");
    },
  });
  await waitFor(() => local.replicas()[0].restarts === 11, "the last restart");
  assertEquals(local.replicas()[0].status, "CRASHED");
  const { serviceId: service, environmentId: environment } = local;
  const regions = { "us-west2": null, "us-east4-eqdc4a": { numReplicas: 1 } };
  const variables = { service, environment, regions };
  await post(local, { query: operations.update, variables });
  await waitFor(
    () => local.replicas().every(({ region }) => region === "us-east4-eqdc4a"),
    "the region to be gone",
  );
});

Deno.test("a replica that is killed comes again, and one that ends by itself with 0 does not", async () => {
  await using local = await startScripts(obedient);
  const [first] = await settles(local, 1);
  local.kill(first.id);
  const again = await waitFor(
    () => withStatus(local, "RUNNING").find(({ pid }) => pid !== first.pid && isReady(pid!)),
    "another process",
  );
  assertEquals([again.id, again.restarts], [first.id, 1]);
  local.kill(again.id, "SIGTERM");
  await waitFor(() => withStatus(local, "EXITED").length === 1, "its end");
  assertEquals(local.replicas().length, 1);
});

Deno.test("a deploy starts new replicas before it stops the old ones, and sets the count back to one", async () => {
  await using local = await startScripts(obedient, { startDelayMs: 200, overlapMs: 200 });
  await settles(local, 1);
  await scale(local, 3);
  const old = await settles(local, 3);
  const id = local.deploy();
  assertEquals(local.counts(), { "us-west2": 1 });
  assertEquals(local.deployments().map(({ status }) => status), ["DEPLOYING", "SUCCESS"]);
  assert(pidsOf(old).every(isAlive), "the old go on until the new one runs");
  await waitFor(() => withStatus(local, "RUNNING").length === 4, "the new one beside the old");
  const [replica] = await settles(local, 1);
  await gone(pidsOf(old));
  const [{ status, id: current, replicas }, ...others] = local.deployments();
  assertEquals([current, status, others], [id, "SUCCESS", []]);
  assertEquals([replicas[0].id, old.some((one) => one.id === replica.id)], [replica.id, false]);
  // The count that is asked for now is the new deployment's.
  await scale(local, 2);
  await settles(local, 2);
});

Deno.test("a deploy whose replicas crash leaves the old ones running", async () => {
  let broken = false;
  await using local = await startScripts("", {
    start: (env) => {
      if (broken) throw new Error("no such command");
      return sh(obedient, env);
    },
  });
  const [old] = await settles(local, 1);
  broken = true;
  local.deploy();
  await waitFor(() => withStatus(local, "CRASHED").length === 1, "the crash");
  assertEquals(withStatus(local, "RUNNING").map(({ id }) => id), [old.id]);
  broken = false;
  local.deploy();
  const [replica] = await settles(local, 1);
  assertNotEquals(replica.id, old.id);
});

Deno.test("when it is disposed of nothing is left, nor of what ignores SIGTERM or waits to start", async () => {
  let pids: number[];
  {
    await using local = await startScripts("trap '' TERM; forEver", { drainMs: 100 });
    await settles(local, 1);
    await scale(local, 3);
    pids = pidsOf(await settles(local, 3));
    local.deploy();
  }
  await gone(pids);
});

Deno.test("when its own process is killed the replicas end too", async () => {
  await using host = startScript("tests/railway_host.ts", [], {});
  const line = await waitFor(() => /^replica (\d+)$/m.exec(host.log()), "its replica");
  const pid = Number(line[1]);
  assert(isAlive(pid));
  host.kill("SIGKILL");
  await host.ended;
  await gone([pid]);
});

Deno.test("the query of the first controller is refused as Railway refuses it, token or not", async () => {
  await using local = await startQuick();
  const query = `query ($service: String!, $environment: String!) {
    serviceInstance(serviceId: $service, environmentId: $environment) {
      numReplicas multiRegionConfig
    }
  }`;
  for (const token of [local.projectToken, "wrong"]) {
    assertEquals(await post(local, { query, variables: {} }, token), {
      status: 400,
      body: {
        errors: [{
          message: 'Cannot query field "multiRegionConfig" on type "ServiceInstance".',
          locations: [{ line: 3, column: 19 }],
          extensions: { code: "GRAPHQL_VALIDATION_FAILED" },
        }],
      },
    });
  }
});

Deno.test("text that is no query, a variable that does not fit and a body that is none are refused as such", async () => {
  await using local = await startQuick();
  const cases: [unknown, string, RegExp][] = [
    [{ query: "query {" }, "GRAPHQL_PARSE_FAILED", /^Syntax Error/],
    [{ query: operations.read, variables: {} }, "BAD_USER_INPUT", /"\$service" of required type/],
    [{}, "BAD_REQUEST", /query/],
    ["{", "BAD_REQUEST", /query/],
  ];
  for (const [body, code, message] of cases) {
    const { status, body: { errors } } = await post(local, body);
    assertEquals([status, errors[0].extensions.code], [400, code]);
    assertMatch(errors[0].message, message);
  }
});

Deno.test("a count of zero, a fraction, and more than 50 or the plan's are refused, and nothing moves", async () => {
  await using local = await startQuick({ ceiling: 42 });
  await settles(local, 1);
  const { serviceId: service, environmentId: environment } = local;
  for (const numReplicas of [0, 1.5, 43, 51, "2"]) {
    const variables = { service, environment, regions: { "us-west2": { numReplicas } } };
    const { status, body } = await post(local, { query: operations.update, variables });
    assertEquals([status, body.data, body.errors.length], [200, null, 1], `${numReplicas}`);
  }
  assertEquals([local.counts(), local.replicas().length], [{ "us-west2": 1 }, 1]);
});

Deno.test("a service instance's numReplicas is stale, so nobody can rely on it", async () => {
  await using local = await startQuick();
  await scale(local, 3);
  const { serviceId, environmentId } = local;
  const query = `{ serviceInstance(serviceId: "${serviceId}", environmentId: "${environmentId}") {
    numReplicas region serviceName activeDeployments { createdAt instances { status } }
  } environment(id: "${environmentId}") { name projectId createdAt } }`;
  const { status, body } = await post(local, { query });
  assertEquals([status, body.data.serviceInstance.numReplicas], [200, 1]);
  assertEquals(body.data.environment.name, "production");
});

Deno.test("moods, a deploy and the replicas can be had over HTTP, for demonstrations", async () => {
  await using local = await startQuick();
  const ask = async (path: string, body?: unknown) => {
    const init = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    const response = await fetch(new URL(path, local.url), init);
    return { status: response.status, body: await response.json() };
  };
  assertEquals((await ask("/mood", { mood: "unavailable", requests: 1 })).status, 200);
  const away = await fetch(local.url, { method: "POST", body: "{}" });
  assertEquals([away.status, await away.text()], [503, "<title>Service Unavailable</title>"]);
  assertEquals((await ask("/mood", { ceiling: 2, stale_ms: 0, records_only: true })).status, 200);
  const { status, body } = await ask("/mood", { mood: "grumpy" });
  assertEquals(status, 400);
  assertMatch(body.error, /a mood is fine, unauthorized/);
  await scale(local, 2);
  assertEquals([local.counts(), local.replicas().length], [{ "us-west2": 2 }, 1], "recorded only");
  const { body: { id } } = await ask("/deploy", {});
  assertEquals([local.deployments()[0].id, local.counts()], [id, { "us-west2": 1 }]);
  const [replica] = await settles(local, 1);
  const shown = await ask("/replicas");
  assertEquals(shown.body.items[0].id, replica.id);
  assertEquals((await ask("/nothing")).status, 404);
});

Deno.test("a deploy by the API keeps the count, and with it come replicas that were only recorded", async () => {
  await using local = await startQuick({ recordsOnly: true });
  await settles(local, 1);
  await scale(local, 3);
  const query = `mutation { serviceInstanceDeployV2(serviceId: "${local.serviceId}",
    environmentId: "${local.environmentId}") }`;
  const { body } = await post(local, { query });
  assertEquals(body.data.serviceInstanceDeployV2, local.deployments()[0].id);
  await settles(local, 3);
});

Deno.test("a port that is taken is an error, and leaves no replica", async () => {
  await using local = await startQuick();
  const port = Number(new URL(local.url).port);
  let left = 0;
  const start = () => {
    const { promise, resolve } = Promise.withResolvers<{ code: number }>();
    left++;
    return { kill: () => resolve({ code: 0 }), status: promise.finally(() => left--) };
  };
  await assertRejects(() => startQuick({ port, start }), Error, "EADDRINUSE");
  assertEquals(left, 0);
});

/** Types of a schema as plain values: a field is its type, with its arguments. */
function shapeOf(schema: GraphQLSchema, names: string[]): Record<string, unknown> {
  const field = (one: GraphQLField<unknown, unknown> | GraphQLInputField) =>
    "args" in one
      ? { type: `${one.type}`, args: one.args.map(({ name, type }) => `${name}: ${type}`).sort() }
      : `${one.type}`;
  return Object.fromEntries(names.map((name) => {
    const type = schema.getType(name);
    if (isEnumType(type)) return [name, type.getValues().map((value) => value.name).sort()];
    if (isScalarType(type)) return [name, "scalar"];
    if (isObjectType(type) || isInterfaceType(type) || isInputObjectType(type)) {
      const fields = Object.values(type.getFields()).map((one) => [one.name, field(one)]);
      return [name, Object.fromEntries(fields)];
    }
    throw new Error(`${name} is not there, or of a kind that is not compared`);
  }));
}

Deno.test({
  name: `the local schema is Railway's own, field by field${schemaNote}`,
  ignore: !realSchema,
  async fn() {
    const text = await Deno.readTextFile(new URL("../dev/railway.graphql", import.meta.url));
    const local = buildSchema(text);
    const names = Object.keys(local.getTypeMap()).filter((name) => !name.startsWith("__"));
    const [ours, theirs] = [shapeOf(local, names), shapeOf(buildSchema(realSchema!), names)];
    for (const [name, shape] of Object.entries(ours)) {
      if (Array.isArray(shape) || typeof shape === "string") {
        assertEquals(shape, theirs[name], name);
        continue;
      }
      const real = theirs[name] as Record<string, unknown>;
      for (const [field, type] of Object.entries(shape as Record<string, unknown>)) {
        assertEquals(type, real?.[field], `${name}.${field}`);
      }
    }
    // What a write may name: a field that is missing here would be refused here only.
    const input = "ServiceInstanceUpdateInput";
    assertEquals(ours[input], theirs[input]);
  },
});
