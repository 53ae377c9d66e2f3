/** What every script and tool has in common: its flags, its help, its settings, its exit codes. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { VERSION } from "../config.ts";
import { fastClock, runScript, startScript } from "../dev/scripts.ts";
import { databaseTest, waitFor } from "./database.ts";

const PASSWORD = "planted-password";
const NOWHERE = `postgres://nobody:${PASSWORD}@127.0.0.1:1/none`;
const TOKEN = "planted-token-of-railway";
const SECRET = "planted-secret-planted-secret-32";

/** A script, and what it needs besides a database. */
interface Entry {
  script: string;
  /** Its name, where that is not the file's. */
  name?: string;
  /** What it is called with, so that it asks its database. */
  args?: string[];
  env?: Record<string, string>;
  /** It asks no database, or runs its own. */
  alone?: boolean;
  /** It runs until it is stopped. */
  lasts?: boolean;
}

const entries: Entry[] = [
  { script: "worker.ts", lasts: true },
  {
    script: "controller.ts",
    lasts: true,
    env: { SIDING_WORKER_SERVICE_ID: "s", RAILWAY_ENVIRONMENT_ID: "e", RAILWAY_TOKEN: TOKEN },
  },
  {
    script: "web.ts",
    lasts: true,
    env: { SIDING_ADMIN_TOKEN: SECRET, SIDING_SESSION_SECRET: `${SECRET}!`, PORT: "0" },
  },
  { script: "recover.ts", args: ["list"] },
  { script: "migrate.ts", args: ["--check"] },
  { script: "schema_check.ts", name: "check-schema", alone: true },
  { script: "dev.ts", alone: true },
  { script: "dev/band_service.ts", name: "band-service", alone: true },
  { script: "tools/enqueue.ts", args: ["transcribe"] },
  { script: "tools/key.ts", args: ["list"] },
  { script: "tools/schedule.ts", args: ["list"] },
  { script: "tools/stats.ts" },
  { script: "tools/doctor.ts", args: ["--watch-s", "1"] },
  { script: "tools/simulate.ts", args: ["--history"] },
  { script: "tools/bench.ts", alone: true },
  { script: "tools/chaos.ts", alone: true },
];
const withDatabase = entries.filter(({ alone }) => !alone);
const nameOf = ({ script, name }: Entry) => name ?? script.replace(/^.*\/|\.ts$/g, "");

/** Does it for each of them, a few at a time; fails with the first error once all have ended. */
async function forEach(some: Entry[], check: (entry: Entry) => Promise<void>): Promise<void> {
  const left = [...some];
  const errors: unknown[] = [];
  const one = async () => {
    for (let entry = left.shift(); entry; entry = left.shift()) {
      await check(entry).catch((error) => errors.push(error));
    }
  };
  await Promise.all([one(), one(), one(), one()]);
  if (errors.length > 0) throw errors[0];
}

const isDocumented = (help: string, code: number) =>
  new RegExp(`^  ${code} +\\S`, "m").test(help.split("Exit codes:")[1] ?? "");

Deno.test("every script and tool answers --help and --version, and refuses unknown flags", async () => {
  await forEach(entries, async (entry) => {
    const run = (...args: string[]) => runScript(entry.script, args, {});
    const help = await run("--help");
    assertEquals(help.code, 0, help.stderr);
    const example = /^Example: .*deno task (\S+)/m.exec(help.stdout);
    assertEquals(example?.[1], nameOf(entry), help.stdout);
    for (const code of [0, 1, 2, 130]) assert(isDocumented(help.stdout, code), help.stdout);
    const asks = !entry.alone || /schema_check|bench/.test(entry.script);
    assertEquals(isDocumented(help.stdout, 3), asks, help.stdout);
    const version = await run("--version");
    assertEquals([version.code, version.stdout], [0, `${nameOf(entry)} ${VERSION}\n`]);
    const unknown = await run("--nonsense");
    assertEquals([unknown.code, unknown.stdout], [2, ""]);
    assertStringIncludes(unknown.stderr, "there is no flag --nonsense");
  });
});

Deno.test("each says at its start what its flags and variables set, without secrets, and ends with 3 when there is no database", async () => {
  await forEach(withDatabase, async (entry) => {
    const { script, args = [], env } = entry;
    // For those that wait 30 s for the database, by a clock that is a hundred times as fast.
    const process = startScript(
      script,
      [...args, "--database-url", NOWHERE],
      { SIDING_STATEMENT_LIMIT_MS: "4321", ...env },
      entry.lasts ? fastClock(100) : [],
    );
    const code = await process.ended;
    const [first, ...more] = process.log().trim().split("\n");
    assertEquals(code, 3, process.log());
    assert(new RegExp(`\\b${nameOf(entry)}\\b`).test(first), first);
    assertStringIncludes(first, "--database-url …");
    if (script !== "migrate.ts" && script !== "tools/doctor.ts") {
      assertStringIncludes(first, "--statement-limit-ms 4321");
    }
    assertStringIncludes(more.join("\n"), "ECONNREFUSED");
    assert(!process.log().includes("planted"), process.log());
  });
});

Deno.test("the schema check says which Railway it asks, and ends with 3 when nobody is there", async () => {
  const { code, stderr } = await runScript("schema_check.ts", ["--url", "http://127.0.0.1:1"], {});
  assertEquals([code, stderr], [3, "check-schema: --url http://127.0.0.1:1\n"]);
});

databaseTest("each ends with 1 where the database is not as it must be", async (_, url) => {
  await forEach(withDatabase, async ({ script, args = [], env }) => {
    // Of a schema that is not there.
    const { code, stderr, stdout } = await runScript(script, args, {
      ...{ DATABASE_URL: url, SIDING_SCHEMA: "nowhere", ...env },
    });
    assertEquals(code, 1, `${script}: ${stderr}${stdout}`);
    assert(/nowhere|missing: /.test(stderr + stdout), `${script}: ${stderr}${stdout}`);
  });
});

Deno.test("those that run until they are stopped end with 0, also before they found the database", async () => {
  await forEach(entries.filter(({ lasts }) => lasts), async ({ script, env }) => {
    await using process = startScript(script, [], { DATABASE_URL: NOWHERE, ...env });
    await waitFor(() => process.log().includes("settings: "), "it to start");
    process.kill("SIGTERM");
    assertEquals(await process.ended, 0, process.log());
  });
});
