/** What the README says is there, is there. */
import { assert, assertEquals } from "@std/assert";
import { fileURLToPath } from "node:url";

const root = new URL("../", import.meta.url);
const readme = Deno.readTextFileSync(new URL("README.md", root));

Deno.test("the README's code compiles as it stands", async () => {
  const { code, stderr } = await new Deno.Command(Deno.execPath(), {
    args: ["check", "--quiet", "--doc-only", fileURLToPath(new URL("README.md", root))],
    cwd: fileURLToPath(root),
    env: { NO_COLOR: "1" },
  }).output();
  assertEquals(code, 0, new TextDecoder().decode(stderr));
  assert(readme.split("```ts\n").length > 2, "there is code to compile");
});

Deno.test("every row of docs/what-happens-if.md is shown by the tests that it names", () => {
  const folder = new URL("docs/", root);
  const doc = Deno.readTextFileSync(new URL("what-happens-if.md", folder)).replace(/\s+/g, " ");
  // [worker_test](../tests/worker_test.ts) *part of a name*, *and of another*
  const shown = [...doc.matchAll(/\]\((\S+_test\.ts)\)((?:,? [*_][^*_]+[*_])*)/g)];
  assert(shown.length > 50, `${shown.length} tests are named`);
  for (const [, path, parts] of shown) {
    const test = Deno.readTextFileSync(new URL(path, folder)).replace(/\s+/g, " ");
    const names = [...parts.matchAll(/[*_]([^*_]+)[*_]/g)].map(([, name]) => name);
    assert(names.length > 0, `${path} is named without a test of it`);
    for (const name of names) assert(test.includes(name), `${path} has no test "${name}"`);
  }
  const rows = doc.match(/\| [^|]+ \|/g)!.length;
  assert(rows > 50, `${rows} rows`);
});

Deno.test("the README's links lead somewhere, and its tasks are there", () => {
  const links = [...readme.matchAll(/\]\((?!https?:)([^)#]+)/g)].map((match) => match[1]);
  assert(links.length > 10);
  for (const link of links) Deno.statSync(new URL(link, root));
  const { tasks } = JSON.parse(Deno.readTextFileSync(new URL("deno.json", root)));
  const named = [...readme.matchAll(/deno task ([a-z-]+)/g)].map((match) => match[1]);
  for (const name of named) assert(name in tasks, name);
});
