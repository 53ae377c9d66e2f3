/** schema_check.ts against the local Railway, as it is and as Railway may become. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { moods } from "../dev/railway.ts";
import { runScript } from "../dev/scripts.ts";
import { operations } from "../railway.ts";
import { check } from "../schema_check.ts";
import { startQuick } from "./replicas.ts";

const root = new URL("../", import.meta.url);
const run = (url: string, env: Record<string, string> = {}) =>
  runScript("schema_check.ts", ["--url", url], { GITHUB_ACTIONS: "", ...env });

Deno.test("what fits gets as far as Not Authorized, and the check ends with 0", async () => {
  await using local = await startQuick();
  // A token that is at hand is not used.
  const { code, stdout } = await run(local.url, { RAILWAY_TOKEN: local.projectToken });
  assertEquals([code, stdout], [0, "read: fits\nupdate: fits\ncommit: fits\n"]);
  assertEquals(local.counts(), { "us-west2": 1 });
});

Deno.test("no operation can be forgotten: all texts there are stand in railway.ts's list, and all of that is sent", async () => {
  await using local = await startQuick();
  await check(operations, local.url);
  assertEquals(local.calls.sort(), Object.keys(operations).sort());
  // Each says its own name, by which it is known here.
  for (const [name, text] of Object.entries(operations)) {
    assertMatch(text, new RegExp(`^(query|mutation) ${name}\\(`));
  }
  const texts = [root, new URL("tools/", root)].flatMap((folder) =>
    [...Deno.readDirSync(folder)].filter(({ name }) => name.endsWith(".ts")).flatMap(({ name }) =>
      Deno.readTextFileSync(new URL(name, folder)).match(/\b(query|mutation) \w*(\(\$| ?\{)/g) ?? []
    )
  );
  assertEquals(texts.length, Object.keys(operations).length, texts.join());
});

Deno.test("the query of the first controller does not fit, and the field is named", async () => {
  await using local = await startQuick();
  const old = `query ($service: String!, $environment: String!) {
    serviceInstance(serviceId: $service, environmentId: $environment) {
      numReplicas multiRegionConfig
    }
  }`;
  assertEquals(await check({ old }, local.url), [{
    operation: "old",
    outcome: "misfit",
    message: 'Railway: Cannot query field "multiRegionConfig" on type "ServiceInstance".',
  }]);
});

for (
  const [what, before, after, field] of [
    ["a field that is read", "deploymentStopped: Boolean!", "", "deploymentStopped"],
    ["a field that is written", "multiRegionConfig: JSON", "", "multiRegionConfig"],
    ["the type of an argument", "serviceId: String!)", "serviceId: Int!)", "service"],
    ["a mutation", "environmentPatchCommit(", "environmentCommit(", "environmentPatchCommit"],
  ]
) {
  Deno.test(`when Railway's schema changes ${what}, the check ends with 1 and names it`, async () => {
    const own = await Deno.readTextFile(new URL("dev/railway.graphql", root));
    const schema = own.replace(before, after);
    assert(schema !== own);
    await using local = await startQuick({ schema });
    const { code, stdout } = await run(local.url);
    assertEquals(code, 1, stdout);
    assertMatch(stdout, new RegExp(`^\\w+: does not fit: Railway: .*"\\$?${field}"`, "m"));
    assertMatch(stdout, /^\w+: fits$/m);
    const annotated = await run(local.url, { GITHUB_ACTIONS: "true" });
    assertEquals(annotated.code, 1);
    assertMatch(
      annotated.stdout,
      /^::error file=railway.ts,title=Railway's schema::\w+: does not/m,
    );
  });
}

Deno.test("a Railway that cannot be reached ends the check with 3, a warning and no error", async () => {
  const listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
  const url = `http://127.0.0.1:${listener.addr.port}`;
  listener.close();
  const { code, stdout } = await run(url, { GITHUB_ACTIONS: "true" });
  assertEquals(code, 3);
  assertEquals(stdout.match(/^::warning .*could not be checked: .*reached/gm)?.length, 3, stdout);
  assert(!stdout.includes("::error"), stdout);
});

Deno.test("a reply that proves nothing is no success: not a page, a 429, a 503 nor data for nobody", async () => {
  await using local = await startQuick();
  for (const mood of moods.filter((mood) => /^(garbage|limited|unavailable|drop)$/.test(mood))) {
    local.setMood(mood);
    const verdicts = await check(operations, local.url);
    assertEquals(verdicts.map(({ outcome }) => outcome), ["unknown", "unknown", "unknown"], mood);
  }
  for (const mood of ["unauthorized", "unauthorized-200"] as const) {
    local.setMood(mood);
    const verdicts = await check(operations, local.url);
    assertEquals(verdicts.map(({ outcome }) => outcome), ["fits", "fits", "fits"], mood);
  }
  // The stand-in that answers any query, which is how the first controller's bug got through.
  const anything = Deno.serve(
    { hostname: "127.0.0.1", port: 0, onListen: () => {} },
    () => Response.json({ data: { environment: {} } }),
  );
  const { code, stdout } = await run(`http://127.0.0.1:${anything.addr.port}`);
  await anything.shutdown();
  assertEquals(code, 3);
  assertStringIncludes(stdout, "read: could not be checked: it was answered without a token");
});

Deno.test("a finding counts more than what could not be checked", async () => {
  const own = await Deno.readTextFile(new URL("dev/railway.graphql", root));
  const schema = own.replaceAll(/multiRegionConfig: JSON|deploymentStopped: Boolean!/g, "");
  await using local = await startQuick({ schema });
  local.setMood("unavailable", 1);
  assertEquals((await run(local.url)).code, 1);
});

Deno.test("a URL that is none is a wrong use", async () => {
  const { code, stderr } = await run("backboard");
  assertEquals(code, 2);
  assertStringIncludes(stderr, '--url is "backboard": it must be a URL that begins with https://');
});
