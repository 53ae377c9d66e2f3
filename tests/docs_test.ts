/**
 * What the README and docs/ say is there, is there: code compiles, statements run, tasks, flags, links and
 * tests exist. What only another machine can run (Railway, Docker) is read by the shell and not run.
 */
import { assert, assertEquals } from "@std/assert";
import { fileURLToPath } from "node:url";
import { type Pool, schema } from "../db.ts";
import { databaseTest } from "./database.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const pages = Object.fromEntries(
  [
    "README.md",
    ...[...Deno.readDirSync(`${root}docs`)].map(({ name }) => `docs/${name}`),
  ].sort().map((name) => [name, Deno.readTextFileSync(root + name)]),
);
const { tasks } = JSON.parse(Deno.readTextFileSync(`${root}deno.json`));

interface Block {
  page: string;
  /** What its fence says. */
  kind: string;
  code: string;
}
const blocks: Block[] = Object.entries(pages).flatMap(([page, text]) =>
  [...text.matchAll(/^( *)```([^\n`]*)\n(.*?)^ *```$/gms)].map(([, indent, kind, code]) => ({
    ...{ page, kind, code: code.replaceAll(`\n${indent}`, "\n") },
  }))
);
const blocksOf = (kind: string) => blocks.filter((block) => block.kind === kind);

/** Kinds of block that a test of their own runs, or nobody can. */
const elsewhere: Record<string, string> = {
  text: "pictures, and what programs print",
  python: "adopt_test.ts",
  "sql app": "adopt_test.ts",
  "sql graphile-worker": "moving_test.ts",
  "sql pg-boss": "moving_test.ts",
};

/** Runs a command. @returns what it printed, both ways, and its exit code */
async function run(command: string, args: string[]): Promise<{ code: number; text: string }> {
  const { code, stdout, stderr } = await new Deno.Command(command, {
    ...{ args, cwd: root, env: { NO_COLOR: "1" } },
  }).output();
  const decoder = new TextDecoder();
  return { code, text: decoder.decode(stdout) + decoder.decode(stderr) };
}

Deno.test("each block of code is looked at by a test", () => {
  const known = ["ts", "sh", "sql", "json", ...Object.keys(elsewhere)];
  assertEquals(blocks.filter(({ kind }) => !known.includes(kind)), []);
  for (const kind of known) assert(blocksOf(kind).length > 0, `there is no block "${kind}"`);
});

Deno.test("the pages' TypeScript compiles as it stands", async () => {
  const { code, text } = await run(Deno.execPath(), [
    ...["check", "--quiet", "--doc-only", ...Object.keys(pages)],
  ]);
  assertEquals(code, 0, text);
});

Deno.test("the pages' shell commands are such, and their JSON too", async () => {
  for (const { page, code } of blocksOf("sh")) {
    const said = await run("bash", ["-n", "-c", code]);
    assertEquals(said.code, 0, `${page}: ${said.text}\n${code}`);
  }
  for (const { code } of blocksOf("json")) JSON.parse(code);
});

databaseTest("the pages' SQL runs on the queue's tables", async (sql: Pool) => {
  for (const { page, code } of blocksOf("sql")) {
    await sql.begin(async (tx) => {
      await tx.unsafe(code.replaceAll("siding.", `${schema}.`));
      throw new Undone();
    }).catch((error) => {
      if (!(error instanceof Undone)) throw new Error(`${page}: ${error.message}\n${code}`);
    });
  }
});
class Undone extends Error {}

/** What a task is started with besides its name, where that decides its flags. */
const MEASUREMENT = /^bench ([a-z]+)/;
/** Tasks that hand their flags on. */
const handsOn = ["test", "ok", "mutants"];

Deno.test("each task that a page names is there, and has the flags that it is named with", async () => {
  const named: { page: string; call: string; flags: string[] }[] = [];
  for (const [page, text] of Object.entries(pages)) {
    for (const [, call] of text.matchAll(/deno task ([a-z-]+(?:[^\n`|&;#]*))/g)) {
      const flags = [...call.matchAll(/ --([a-z-]+)/g)].map(([, flag]) => flag);
      named.push({ page, call, flags });
    }
  }
  assert(named.length > 50, `${named.length} are named`);
  const keyOf = (call: string) => {
    const measurement = MEASUREMENT.exec(call)?.[1];
    return measurement ? `bench ${measurement}` : call.split(" ")[0];
  };
  const keys = new Set(
    named.map(({ call }) => keyOf(call)).filter((key) => !handsOn.includes(key)),
  );
  const helps = new Map(
    await Promise.all([...keys].map(async (key): Promise<[string, string]> => {
      const [name, ...more] = key.split(" ");
      assert(name in tasks, `a page names a task "${name}"`);
      const words = tasks[name].command.split(" ").slice(1);
      return [key, (await run(Deno.execPath(), [...words, ...more, "--help"])).text];
    })),
  );
  for (const { page, call, flags } of named) {
    const help = helps.get(keyOf(call));
    if (help === undefined) continue;
    for (const flag of [...flags, "help"]) {
      assert(help.includes(`--${flag}`), `${page}: "${call}" has no flag --${flag}: ${help}`);
    }
  }
});

Deno.test("the pages' links lead somewhere", () => {
  let count = 0;
  for (const [page, text] of Object.entries(pages)) {
    for (const [, path, anchor] of text.matchAll(/\]\((?!https?:)([^)#]*)(#[^)]+)?\)/g)) {
      const target = path
        ? new URL(path, `file://${root}${page}`)
        : new URL(`file://${root}${page}`);
      assert(exists(target), `${page} leads to ${path}`);
      if (anchor) assert(anchorsOf(target).includes(anchor), `${page}: ${path} has no ${anchor}`);
      count++;
    }
  }
  assert(count > 100, `${count} links`);
});

function exists(url: URL): boolean {
  try {
    Deno.statSync(url);
    return true;
  } catch {
    return false;
  }
}

/** A page's headings, as links name them. */
const anchorsOf = (page: URL): string[] =>
  [...Deno.readTextFileSync(page).matchAll(/^#+ (.+)$/gm)].map(([, heading]) =>
    "#" + heading.toLowerCase().replace(/[^\p{L}\p{N} -]/gu, "").replaceAll(" ", "-")
  );

Deno.test("what a page says that a test shows, a test of that name shows", () => {
  const least: Record<string, number> = { "docs/what-happens-if.md": 50, "docs/design.md": 25 };
  for (const [page, text] of Object.entries(pages)) {
    // [worker_test](../tests/worker_test.ts) *part of a name*, *and of another*
    const shown = [
      ...text.replace(/\s+/g, " ").matchAll(
        /\]\((\S+_test\.ts)\)((?:,? [*_][^*_]+[*_])*)/g,
      ),
    ];
    for (const [, path, parts] of shown) {
      const test = Deno.readTextFileSync(new URL(path, `file://${root}${page}`)).replace(
        /\s+/g,
        " ",
      );
      const names = [...parts.matchAll(/[*_]([^*_]+)[*_]/g)].map(([, name]) => name);
      assert(
        names.length > 0 || !(page in least),
        `${page}: ${path} is named without a test of it`,
      );
      for (const name of names) {
        assert(test.includes(name), `${page}: ${path} has no test "${name}"`);
      }
    }
    assert(shown.length >= (least[page] ?? 0), `${page} names ${shown.length} tests`);
  }
});
