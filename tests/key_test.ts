/** `deno task key`: keys of the API. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { schema } from "../db.ts";
import { findKey } from "../keys.ts";
import { databaseTest as test } from "./database.ts";
import { runScript } from "./processes.ts";

const run = (url: string, ...args: string[]) =>
  runScript("tools/key.ts", args, { DATABASE_URL: url });

test(
  "a key is shown once, is good until it is revoked, and is kept as a hash alone",
  async (sql, url) => {
    const made = await run(url, "create", "acme", "--name", "their site");
    assertEquals([made.code, made.stderr], [0, 'key: --database-url … --name "their site"\n']);
    const key = made.stdout.trim();
    assertMatch(key, /^siding_1_[\w-]{43}$/);
    assertEquals((await findKey(sql, key))?.owner, "acme");
    const [row] = await sql`select to_jsonb(k)::text as text from ${sql(schema)}.keys k`;
    assert(!row.text.includes(key.split("_")[2].slice(0, 20)), "the secret is not in the table");

    const listed = await run(url, "list");
    assertStringIncludes(listed.stdout, 'key 1 of acme "their site", made 20');
    assert(!listed.stdout.includes("siding_"), "it is not to be had again");
    const revoked = await run(url, "revoke", "1");
    assertEquals([revoked.code, revoked.stdout], [0, "key 1 is revoked\n"]);
    assertEquals(await findKey(sql, key), null);
    assertStringIncludes((await run(url, "list")).stdout, "revoked 20");
  },
);

test("keys are listed by owner and as JSON, with the webhook that each tells", async (_, url) => {
  assertEquals((await run(url, "list")).stdout, "there is no key\n");
  const webhook = "https://acme.example/siding";
  const made = await run(url, "create", "acme", "--webhook", webhook, "--json");
  const { id, key, owner } = JSON.parse(made.stdout);
  assertEquals([id, owner, key.startsWith("siding_1_")], ["1", "acme", true]);
  await run(url, "create", "bob");
  const { items } = JSON.parse((await run(url, "list", "--json")).stdout);
  assertEquals(items.map((k: { owner: string }) => k.owner), ["bob", "acme"]);
  assertEquals(Object.keys(items[1]).includes("hash"), false);
  const hers = JSON.parse((await run(url, "list", "--owner", "acme", "--json")).stdout);
  assertEquals(hers.items.map((k: { webhook: string }) => k.webhook), [webhook]);
});

test("what cannot be is refused by name: usage with 2, the rest with 1", async (_, url) => {
  await run(url, "create", "acme");
  await run(url, "revoke", "1");
  const wrong: [string[], number, string][] = [
    [[], 2, "a command is missing: there are create, list"],
    [["drop"], 2, 'there is no command "drop"'],
    [["create"], 2, "create wants OWNER"],
    [["create", "a", "b"], 2, '"b" is not wanted by create'],
    [["create", "a", "--owner", "b"], 2, "create takes no --owner"],
    [["create", "a", "--webhook", "ftp://x"], 2, "--webhook"],
    [["create", "x".repeat(201)], 1, "owner is 201 characters long: it must be 1 to 200"],
    [["list", "acme"], 2, '"acme" is not wanted by list'],
    [["revoke"], 2, "revoke wants ID"],
    [["revoke", "one"], 2, '"one" is not the id of a key'],
    [["revoke", "7"], 1, "there is no key 7"],
    [["revoke", "1"], 1, "key 1 was revoked before"],
  ];
  for (const [args, code, message] of wrong) {
    const got = await run(url, ...args);
    assertEquals([args, got.code, got.stdout], [args, code, ""]);
    assertStringIncludes(got.stderr, message);
  }
});
