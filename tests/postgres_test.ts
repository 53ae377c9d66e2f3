/**
 * What dev/postgres.ts promises: that it starts anywhere, keeps what it should, and leaves
 * nothing behind.
 */
import { assert, assertEquals, assertMatch, assertNotEquals, assertRejects } from "@std/assert";
import { join } from "node:path";
import postgres from "postgres";
import { type Postgres, type PostgresOptions, startPostgres } from "../dev/postgres.ts";
import { waitFor } from "./database.ts";

const isRoot = Deno.build.os !== "windows" && Deno.uid() === 0;
const NOBODY = 65534;
const canUnshare = Deno.build.os === "linux" && await succeeds("unshare", ["-n", "true"]);
const hasLoopback = await canConnectLocally();
const nobodyCanRun = isRoot &&
  await succeeds(Deno.execPath(), ["--version"], { uid: NOBODY, gid: NOBODY, cwd: "/" });

Deno.test("a temporary server starts from nothing, and is gone after its stop", async () => {
  const server = await startPostgres();
  assertEquals(await ask(server.url, "select 6 * 7 as answer"), 42);
  assertEquals(await ask(server.url, "select upper('é')"), "É");
  await server.stop();
  await server.stop();
  assert(!isAlive(server.pid), `process ${server.pid} is still there`);
  assert(!await isThere(server.dataDir), `${server.dataDir} is still there`);
});

Deno.test("a kept folder, its path with spaces, has its rows after a restart", async () => {
  await using folder = await testFolder();
  const dataDir = join(folder.path, "a folder, it's 'kept'", "pg data");
  let before: string;
  {
    await using server = await startPostgres({ dataDir });
    before = passwordIn(server.url);
    await ask(server.url, "create table kept as select 'still here' as word");
  }
  await using server = await startPostgres({ dataDir });
  assertEquals(passwordIn(server.url), before);
  assertEquals(await ask(server.url, "select word from kept"), "still here");
  assertEquals(await ask(server.url, "show fsync"), "on");
});

Deno.test("settings are applied, and a refused one is told in the server's words", async () => {
  await using folder = await testFolder();
  const dataDir = join(folder.path, "data");
  {
    await using server = await startPostgres({ dataDir, settings: { max_connections: "17" } });
    assertEquals(await ask(server.url, "show max_connections"), "17");
  }
  await assertRejects(
    () => startPostgres({ dataDir, settings: { max_connections: "many" } }),
    Error,
    'invalid value for parameter "max_connections": "many"',
  );
});

Deno.test("after a SIGKILL of the parent there is no server and no folder", async () => {
  await using parent = await startParent({});
  const { pid, dataDir } = parent.server;
  assert(isAlive(pid));
  Deno.kill(parent.pid, "SIGKILL");
  await waitFor(() => !isAlive(pid), `the end of server ${pid}`);
  await waitFor(async () => !await isThere(dataDir), `the removal of ${dataDir}`);
});

Deno.test("Ctrl-C ends parent and server, and a kept folder can be used at once", async () => {
  await using folder = await testFolder();
  const dataDir = join(folder.path, "data");
  await using parent = await startParent({ dataDir });
  await ask(parent.server.url, "create table kept as select 1 as one");
  Deno.kill(-parent.pid, "SIGINT");
  await parent.ended;
  await using server = await startPostgres({ dataDir });
  assertEquals(await ask(server.url, "select one from kept"), 1);
});

Deno.test("data of a killed server start again, whoever has its process id now", async () => {
  await using folder = await testFolder();
  const dataDir = join(folder.path, "data");
  {
    await using server = await startPostgres({ dataDir });
    await ask(server.url, "create table kept as select 1 as one");
    Deno.kill(server.pid, "SIGKILL");
    await waitFor(() => !isAlive(server.pid), `the end of server ${server.pid}`);
  }
  // Another process now has the id that the dead server, or its dead guardian, wrote down.
  const { uid } = await Deno.stat(join(dataDir, "data"));
  const other = new Deno.Command("sleep", { args: ["60"], ...(isRoot ? { uid: uid! } : {}) })
    .spawn();
  try {
    const pidFile = join(dataDir, "data", "postmaster.pid");
    const left = await Deno.readTextFile(pidFile);
    await Deno.writeTextFile(pidFile, left.replace(/^\d+/, String(other.pid)));
    await Deno.writeTextFile(join(dataDir, "guard"), `${other.pid} ${Deno.pid}\n`);
    await using server = await startPostgres({ dataDir });
    assertEquals(await ask(server.url, "select one from kept"), 1);
  } finally {
    other.kill("SIGKILL");
    await other.status;
  }
});

Deno.test({
  name: "a port stays the same while it is free; servers started together get their own" +
    (hasLoopback ? "" : " (skipped: there is no loopback here, and so no port)"),
  ignore: !hasLoopback,
  async fn() {
    await using folder = await testFolder();
    const dataDir = join(folder.path, "data");
    let first: Postgres;
    {
      await using server = await startPostgres({ dataDir });
      first = server;
    }
    {
      await using server = await startPostgres({ dataDir });
      assertEquals(server.url, first.url);
    }
    using _taken = Deno.listen({ hostname: "127.0.0.1", port: first.port });
    const servers = await Promise.all([startPostgres({ dataDir }), startPostgres()]);
    try {
      assertEquals(new Set([first, ...servers].map((server) => server.port)).size, 3);
      for (const { url, pid, dataDir } of servers) {
        const pidFile = await Deno.readTextFile(join(dataDir, "data", "postmaster.pid"));
        assertEquals(Number(pidFile.split("\n")[0]), pid);
        assertEquals(await ask(url, "select 1"), 1);
      }
    } finally {
      await Promise.all(servers.map((server) => server.stop()));
    }
  },
});

Deno.test("a data folder of another version is refused, naming both versions", async () => {
  await using folder = await testFolder();
  await Deno.mkdir(join(folder.path, "data"));
  await Deno.writeTextFile(join(folder.path, "data", "PG_VERSION"), "15\n");
  const error = await assertRejects(() => startPostgres({ dataDir: folder.path }), Error);
  assertMatch(error.message, /was made by PostgreSQL 15, and this is PostgreSQL 18\.\d/);
});

Deno.test("a data folder in use is refused, naming the process that uses it", async () => {
  await using folder = await testFolder();
  const dataDir = join(folder.path, "data");
  await using server = await startPostgres({ dataDir });
  const inUse = `in use by process ${Deno.pid}`;
  await assertRejects(() => startPostgres({ dataDir }), Error, inUse);
  assertEquals(await ask(server.url, "select 1"), 1);
});

Deno.test("a folder with other files in it is refused, and left as it was", async () => {
  await using folder = await testFolder();
  await Deno.writeTextFile(join(folder.path, "thesis.txt"), "years of work");
  const before = await Deno.stat(folder.path);
  await assertRejects(() => startPostgres({ dataDir: folder.path }), Error, "thesis.txt");
  assertEquals((await Deno.stat(folder.path)).uid, before.uid);
});

Deno.test({
  name: "without a loopback the server is reached through a Unix socket, from its URL alone" +
    (canUnshare ? "" : " (skipped: `unshare -n` is not allowed here)"),
  ignore: !canUnshare,
  async fn() {
    await using parent = await startParent({}, { wrapper: ["unshare", "-n"] });
    assertMatch(parent.server.url, /%2F/);
    assertEquals(await ask(parent.server.url, "select 1"), 1);
  },
});

Deno.test({
  name: "an ordinary user can start a server" +
    (nobodyCanRun ? "" : " (skipped: " +
      (isRoot
        ? "user nobody can't run this Deno"
        : "these tests run as one, so the others show it") +
      ")"),
  ignore: !nobodyCanRun,
  async fn() {
    await using folder = await testFolder();
    await Deno.chown(folder.path, NOBODY, NOBODY);
    const dataDir = join(folder.path, "data");
    const env = { HOME: folder.path, DENO_DIR: join(folder.path, "deno") };
    await using parent = await startParent({ dataDir }, { uid: NOBODY, gid: NOBODY, env });
    assertEquals(await ask(parent.server.url, "select 1"), 1);
    assertEquals((await Deno.stat(join(dataDir, "data"))).uid, NOBODY);
  },
});

Deno.test({
  name: "root can keep data in a folder closed to the server's user: it becomes a link" +
    (isRoot ? "" : " (skipped: needs root)"),
  ignore: !isRoot,
  async fn() {
    await using folder = await testFolder();
    await Deno.chmod(folder.path, 0o700);
    const dataDir = join(folder.path, "data");
    let before: string;
    {
      await using server = await startPostgres({ dataDir });
      before = passwordIn(server.url);
      assertNotEquals(server.dataDir, dataDir);
    }
    const target = await Deno.readLink(dataDir);
    try {
      await using server = await startPostgres({ dataDir });
      assertEquals(passwordIn(server.url), before);
      await server.stop();
      await Deno.remove(target, { recursive: true });
      // The target is gone: the link is in nobody's way.
      await using anew = await startPostgres({ dataDir });
      assertNotEquals(passwordIn(anew.url), before);
    } finally {
      await Deno.remove(await Deno.realPath(dataDir), { recursive: true });
    }
  },
});

/** The password is the data folder's, made with it. */
function passwordIn(url: string): string {
  return new URL(url).password;
}

/** First column of the first row. */
async function ask(url: string, query: string): Promise<unknown> {
  const sql = postgres(url, { max: 1 });
  try {
    const [row] = await sql.unsafe(query);
    return row && Object.values(row)[0];
  } finally {
    await sql.end();
  }
}

/**
 * Another Deno, in a process group of its own, that starts a server and lives until it is killed.
 * Disposing of it kills it and waits until its server is gone too.
 */
async function startParent(
  options: PostgresOptions,
  { wrapper = [], ...how }: { wrapper?: string[] } & Partial<Deno.CommandOptions> = {},
) {
  const module = new URL("../dev/postgres.ts", import.meta.url).href;
  const code = `
    const { startPostgres } = await import(${JSON.stringify(module)});
    const server = await startPostgres(${JSON.stringify(options)});
    console.log(JSON.stringify(server));
    setInterval(() => server, 60_000);`;
  const [name, ...args] = [...wrapper, Deno.execPath(), "eval", "--cached-only", code];
  const child = new Deno.Command(name, {
    args,
    cwd: join(import.meta.dirname!, ".."),
    detached: true,
    stdout: "piped",
    ...how,
  }).spawn();
  let said = "";
  for await (const text of child.stdout.pipeThrough(new TextDecoderStream())) {
    said += text;
    if (said.endsWith("\n")) break;
  }
  const server: { url: string; pid: number; dataDir: string } = JSON.parse(said || "null");
  return {
    pid: child.pid,
    server,
    ended: child.status,
    async [Symbol.asyncDispose]() {
      if (isAlive(child.pid)) child.kill("SIGKILL");
      await child.status;
      await waitFor(() => !isAlive(server.pid), `the end of server ${server.pid}`);
    },
  };
}

/** A folder that every user may come through, removed with all that is in it. */
async function testFolder() {
  const path = await Deno.realPath(await Deno.makeTempDir({ prefix: "siding-postgres-test-" }));
  await Deno.chmod(path, 0o755);
  return { path, [Symbol.asyncDispose]: () => Deno.remove(path, { recursive: true }) };
}

async function canConnectLocally(): Promise<boolean> {
  try {
    using listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
    using _connection = await Deno.connect({ hostname: "127.0.0.1", port: listener.addr.port });
    return true;
  } catch {
    return false;
  }
}

async function isThere(path: string): Promise<boolean> {
  return await Deno.lstat(path).then(() => true, () => false);
}

function isAlive(pid: number): boolean {
  try {
    // Continues what isn't stopped: it only tells whether there is such a process.
    Deno.kill(pid, "SIGCONT");
    return true;
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return false;
    throw error;
  }
}

async function succeeds(
  name: string,
  args: string[],
  how: Deno.CommandOptions = {},
): Promise<boolean> {
  try {
    return (await new Deno.Command(name, { args, ...how }).output()).success;
  } catch {
    return false;
  }
}
