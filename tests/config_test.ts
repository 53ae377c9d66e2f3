/** Flags, variables, help and exit codes. */
import { assert, assertEquals, assertThrows } from "@std/assert";
import * as config from "../config.ts";
import { connect, StatementTimeout } from "../db.ts";

const program = { name: "test", summary: "A test.", usage: "WORD …", example: "deno task test" };
const spec = {
  databaseUrl: config.settings.databaseUrl,
  pollMaxMs: config.settings.pollMaxMs,
  queues: config.settings.queues,
  prepare: config.settings.prepare,
  key: config.flag(config.text("a key")),
  file: config.many("a file"),
};
const read = (...args: string[]) => config.configuration(program, spec, args);

/** Sets variables for the time of a test. */
function withVariables(variables: Record<string, string>, body: () => void): void {
  const before = Object.keys(variables).map((name) => [name, Deno.env.get(name)] as const);
  for (const [name, value] of Object.entries(variables)) Deno.env.set(name, value);
  try {
    body();
  } finally {
    for (const [name, value] of before) {
      if (value === undefined) Deno.env.delete(name);
      else Deno.env.set(name, value);
    }
  }
}

Deno.test("a setting is its flag, else its variable, else its default", () => {
  assertEquals(read().pollMaxMs, 2000);
  withVariables(
    { SIDING_POLL_MAX_MS: "500", SIDING_QUEUES: "a, b", SIDING_PREPARE: "0" },
    () => {
      const { pollMaxMs, queues, prepare } = read();
      assertEquals([pollMaxMs, queues, prepare], [500, ["a", "b"], false]);
      assertEquals(read("--poll-max-ms", "700").pollMaxMs, 700);
      assertEquals(read("--prepare").prepare, true);
    },
  );
  withVariables({ SIDING_POLL_MAX_MS: "" }, () => assertEquals(read().pollMaxMs, 2000));
  assertEquals(read("--file", "a", "--file", "b", "word").file, ["a", "b"]);
  assertEquals(read("--key", "007", "word", "12").rest, ["word", "12"]);
  assertEquals([read("--key", "007").key, read("--key", "-3").key], ["007", "-3"]);
  assertEquals([read().prepare, read("--prepare=false").prepare], [true, false]);
});

Deno.test("a variable is not read for what only a flag sets", () => {
  withVariables({ SIDING_KEY: "x" }, () => assertEquals(read().key, undefined));
});

Deno.test("what is wrong is named, with its value and the rule", () => {
  const wrong: [string[], string][] = [
    [
      ["--poll-max-ms", "fast"],
      '--poll-max-ms is "fast": it must be a whole number from 10 to 60000',
    ],
    [["--poll-max-ms", "5"], '--poll-max-ms is "5": it must be a whole number from 10 to 60000'],
    [
      ["--poll-max-ms", "1e3"],
      '--poll-max-ms is "1e3": it must be a whole number from 10 to 60000',
    ],
    [["--queues", "A"], '--queues is "A": it must be names of [a-z0-9_.-], at most 63 long'],
    [["--pol-max-ms", "5"], "there is no flag --pol-max-ms; --help shows those there are"],
    [["-x"], "there is no flag -x; --help shows those there are"],
    [["--key"], "--key wants a value"],
    [["--key", "--file", "x"], "--key wants a value"],
  ];
  for (const [args, message] of wrong) {
    assertThrows(() => read(...args), config.UsageError, message);
  }
  withVariables({ SIDING_POLL_MAX_MS: "soon" }, () => {
    assertThrows(() => read(), config.UsageError, 'SIDING_POLL_MAX_MS is "soon": it must be');
  });
  const { message } = assertThrows(() => read("--database-url", "mysql://u:secret@h/d"));
  assert(message.includes("--database-url will not do: it must begin with postgres://"), message);
  assert(!message.includes("secret"), "a URL may hold a password");
});

Deno.test("a database's URL that is none is refused without being shown", () => {
  for (const url of ["postgres://postgres:secret pw@[bad/x", "postgres://u:se%cret@h/d"]) {
    const { message } = assertThrows(() => config.requireDatabase(url), config.UsageError);
    assert(!/secret|se%cret| pw/.test(message), message);
  }
  assertThrows(
    () => config.requireDatabase(undefined),
    config.UsageError,
    "DATABASE_URL is not set",
  );
  const good = "postgres://u:p%40ss@localhost:5432/d?sslmode=require";
  assertEquals(config.requireDatabase(good), good);
});

Deno.test("exit codes: 2 for usage, 3 for a database that cannot be reached, else 1", () => {
  const driver = (code: string) => Object.assign(new Error("x"), { code });
  const codes: [unknown, number][] = [
    [new config.UsageError("x"), 2],
    [driver("ECONNREFUSED"), 3],
    [driver("CONNECT_TIMEOUT"), 3],
    [driver("57P03"), 3],
    [new StatementTimeout("x"), 3],
    [new Error("wrapped", { cause: driver("ENOTFOUND") }), 3],
    [driver("42P01"), 1],
    [driver("ENOENT"), 1], // a file's, not the database's
    [new Error("x"), 1],
    ["x", 1],
  ];
  for (const [error, code] of codes) assertEquals(config.exitCode(error), code, String(error));
});

Deno.test("a process whose parent is gone before it could look ends all the same", async () => {
  const gone = new Deno.Command("true").spawn();
  await gone.status;
  const path = new URL("../dev/band_service.ts", import.meta.url);
  const { code } = await new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", path.href, "--port", "0"],
    env: { SIDING_END_WITH_PARENT: String(gone.pid) },
  }).output();
  assertEquals(code, 0);
});

Deno.test("?prepare= in the connection string is true or false, and false counts over the setting", () => {
  const url = "postgres://nobody@127.0.0.1:1/none";
  assertThrows(
    () => config.requireDatabase(`${url}?prepare=off`),
    config.UsageError,
    "DATABASE_URL has prepare=off: it must be true or false",
  );
  assertEquals(config.requireDatabase(`${url}?prepare=false`), `${url}?prepare=false`);
  assertEquals(connect(url).options.prepare, true);
  assertEquals(connect(url, { prepare: false }).options.prepare, false);
  const off = connect(`${url}?sslmode=disable&prepare=false`, { prepare: true });
  assertEquals(off.options.prepare, false);
});
