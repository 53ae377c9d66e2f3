/**
 * What the README and docs/ say is there, is there: code compiles, statements and commands run, tasks,
 * flags, links and tests exist. What only another machine can run (Railway, Docker) is named below, and
 * is read by the shell and not run.
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

/** Who runs a shell block, by how it begins: this file, another, or nobody and why. */
const shell: Record<string, string> = {
  "deno task recover list  ": "docs_test.ts",
  "deno task recover retry 4711": "docs_test.ts",
  "deno task recover  ": "docs_test.ts",
  "deno task schedule set ": "docs_test.ts",
  "npx -y deno task demo ": "demo_test.ts",
  "deno task dev ":
    "it runs until it is stopped, on data in the checkout; demo_test.ts runs dev.ts",
  "export SIDING_ADMIN_TOKEN": "api_test.ts",
  'curl -H "Authorization: Bearer $SIDING_ADMIN_TOKEN"': "health_test.ts",
  "export RAILWAY_TOKEN": "controller_test.ts",
  "deno task bench peers": "it takes minutes; bench_test.ts runs a small one",
  "deno task migrate --check": "adopt_test.ts",
  'text="It\'s late"': "adopt_test.ts",
  "mkdir -p work": "adopt_test.ts",
  "docker ": "it needs Docker",
  "npx -y deno install ": "it needs Railway",
  "secret() {": "it needs Railway",
  "keep controller RAILWAY_TOKEN": "it needs Railway",
  "for name in web worker controller": "it needs Railway",
  "curl https://….up.railway.app/health ": "it needs Railway",
};

/** Runs a command. @returns what it printed, both ways, and its exit code */
async function run(
  command: string,
  args: string[],
  env: Record<string, string> = {},
): Promise<{ code: number; text: string }> {
  const { code, stdout, stderr } = await new Deno.Command(command, {
    ...{ args, cwd: root, env: { NO_COLOR: "1", ...env } },
  }).output();
  const decoder = new TextDecoder();
  return { code, text: decoder.decode(stdout) + decoder.decode(stderr) };
}

Deno.test("each block of code is looked at by a test", () => {
  const known = ["ts", "sh", "sql", "json", ...Object.keys(elsewhere)];
  assertEquals(blocks.filter(({ kind }) => !known.includes(kind)), []);
  for (const kind of known) assert(blocksOf(kind).length > 0, `there is no block "${kind}"`);
  const used = blocksOf("sh").map(({ page, code }) => {
    const begin = Object.keys(shell).find((begin) => code.startsWith(begin));
    assert(begin !== undefined, `${page}: who runs this?\n${code}`);
    return begin;
  });
  for (const [begin, by] of Object.entries(shell)) {
    assert(used.includes(begin), `there is no block that begins "${begin}"`);
    if (by.endsWith("_test.ts")) Deno.statSync(`${root}tests/${by}`);
  }
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

databaseTest("the pages' commands of the review desk do what they say", async (sql, url) => {
  const jobs = sql`${sql(schema)}.jobs`;
  const commands = blocksOf("sh").filter(({ code }) => code.startsWith("deno task recover"))
    .flatMap(({ code }) => code.trim().split("\n"));
  assert(commands.length >= 12, commands.join("\n"));
  for (const command of commands) {
    // Each finds the jobs that it names as they must be for it.
    const status = command.includes(" retry ") ? "failed" : "review";
    await sql`truncate ${jobs} cascade`;
    await sql`
      insert into ${jobs} (id, queue, kind, payload, status, error, finished_at, request_key, sent_at)
      overriding system value
      select id, 'default', case id when 7 then 'band' else 'transcribe' end, '{}', ${status},
        case when id = 7 then 'timed out' else 'no such file' end,
        case when ${status} = 'failed' then now() end,
        case when ${status} = 'review' then gen_random_uuid() end,
        case when ${status} = 'review' then now() end
      from unnest('{7,4711,4712}'::bigint[]) id`;
    const { code, text } = await run("bash", ["-euc", command], { DATABASE_URL: url });
    assertEquals(code, 0, `${command}: ${text}`);
    const after = await sql`select id::text, status from ${jobs} order by id`;
    const of = (id: string) => after.find((job) => job.id === id)?.status;
    const [, verb, id] = /recover (resume|requeue|fail) (\d+)/.exec(command) ?? [];
    if (verb) assertEquals(of(id), verb === "fail" ? "failed" : "queued", command);
    else if (status === "failed") assert(after.length > 3, `${command}: nothing is tried again`);
    else assertEquals(after.map((job) => job.status), Array(3).fill("review"), command);
  }
});

databaseTest(
  "the pages' schedule, of a kind of one's own, is made, shown and paused",
  async (sql, url) => {
    const jobs = await Deno.makeTempFile({ suffix: ".ts" });
    try {
      await Deno.writeTextFile(
        jobs,
        `import { z } from "zod"; import { inline } from "file://${root}jobs/kind.ts";
      export const kinds = { report: inline({ payload: z.object({ days: z.int() }), work: () => 1 }) };`,
      );
      const [{ code }] = blocksOf("sh").filter(({ code }) => code.startsWith("deno task schedule"));
      const said = await run("bash", ["-euc", code], { DATABASE_URL: url, SIDING_JOBS: jobs });
      assertEquals(said.code, 0, said.text);
    } finally {
      await Deno.remove(jobs);
    }
    const made = await sql`select name, kind, enabled from ${sql(schema)}.schedules`;
    assertEquals([...made], [{ name: "nightly", kind: "report", enabled: false }]);
  },
);

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

Deno.test("each invariant of docs/design.md names who keeps it and what shows it", () => {
  const [, ...invariants] = pages["docs/design.md"].split(/^\*\*(?=I\d+ )/m);
  assertEquals(invariants.map((text) => /^I\d+/.exec(text)![0]), [
    ...Array.from({ length: 15 }, (_, i) => `I${i + 1}`),
  ]);
  for (const text of invariants) {
    assert(/\]\(\.\.\/(?!tests)/.test(text) && /_test\.ts\)/.test(text), text);
  }
});

Deno.test("docs/operate.md says what to do for each reason of /health/service, and for no other", () => {
  const source = Deno.readTextFileSync(`${root}web/health.ts`);
  const [, union] = /^export type Code =\n(.*?);$/ms.exec(source) ?? [, ""];
  const codes = [...union.matchAll(/"(\w+)"/g)].map(([, code]) => code);
  assert(codes.length > 5, `web/health.ts has the codes ${codes}`);
  const rows = pages["docs/operate.md"].matchAll(/^\| `([a-z]+_[a-z_]+)` +\|/gm);
  assertEquals([...rows].map(([, code]) => code).sort(), codes.sort());
});

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
