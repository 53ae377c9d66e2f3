/** What each entry may do, as deno.json says: enough for its work, and what it is kept from. */
import { assertEquals, assertStringIncludes } from "@std/assert";
import { fileURLToPath } from "node:url";
import config from "../deno.json" with { type: "json" };
import * as queue from "../queue.ts";
import { databaseTest, emptyDatabase, waitFor } from "./database.ts";
import { enqueue } from "./kinds.ts";
import { hasty, startScript } from "./processes.ts";
import { startQuick } from "./replicas.ts";
import { startSite } from "../dev/site.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const tasks: Record<string, { command: string }> = config.tasks;
/** The entries, and the tasks that start them. */
const taskOf: Record<string, string> = {
  ...{ worker: "worker", controller: "controller", web: "web", recover: "recover" },
  ...{ migrate: "migrate", schema_check: "check-schema" },
};

/** Runs `deno` in the project's folder. */
async function deno(args: string[], env: Record<string, string> = {}, stdin = "") {
  const child = new Deno.Command(Deno.execPath(), {
    ...{ args, cwd: root, env: { NO_COLOR: "1", ...env } },
    ...{ stdin: "piped", stdout: "piped", stderr: "piped" },
  }).spawn();
  const writer = child.stdin.getWriter();
  const [{ code, stdout, stderr }] = await Promise.all([
    child.output(),
    writer.write(new TextEncoder().encode(stdin)).then(() => writer.close()),
  ]);
  const text = (bytes: Uint8Array) => new TextDecoder().decode(bytes);
  return { code, out: text(stdout), err: text(stderr) };
}

/** Runs an entry as its task does. */
const runTask = (task: string, args: string[], env: Record<string, string>) =>
  deno([...tasks[task].command.split(" ").slice(1), ...args], env);

Deno.test("each entry has permissions of its own in deno.json, and its task starts it with them", () => {
  assertEquals(Object.keys(config.permissions).sort(), Object.keys(taskOf).sort());
  for (const [entry, task] of Object.entries(taskOf)) {
    const small = entry === "web" ? "--v8-flags=--optimize-for-size " : "";
    assertEquals(
      tasks[task].command,
      `deno run --quiet --no-prompt -P=${entry} ${small}${entry}.ts`,
    );
    const [line] = Deno.readTextFileSync(`${root}${entry}.ts`).split("\n");
    assertEquals(
      line,
      `#!/usr/bin/env -S deno run --quiet --no-prompt -P=${entry} ${small}`.trimEnd(),
    );
  }
});

Deno.test("migrate and schema_check do their work with their permissions", async () => {
  await using database = await emptyDatabase();
  await using railway = await startQuick();
  const env = { DATABASE_URL: database.url, GITHUB_ACTIONS: "" };
  const applied = await runTask("migrate", [], env);
  assertEquals([applied.code, applied.err], [0, "migrate: --database-url …\n"]);
  assertEquals((await runTask("migrate", ["--check"], env)).out, "up to date\n");
  const checked = await runTask("check-schema", ["--url", railway.url], env);
  assertEquals([checked.code, checked.err], [0, `check-schema: --url ${railway.url}\n`]);
});

databaseTest(
  "worker, web, recover and controller do their work with their permissions",
  async (sql, url) => {
    const process = await enqueue(sql, "copy", {});
    const inline = await enqueue(sql, "echo", "hello");
    await using worker = startScript("worker.ts", hasty, { DATABASE_URL: url });
    await using site = await startSite(url);
    await waitFor(
      async () => (await queue.get(sql, [process.id, inline.id])).every((j) => j.status === "done"),
      "the jobs",
    );
    assertEquals((await (await site.ask("/health")).json()).status, "ok");
    assertStringIncludes(await (await site.ask("/static/uplot.js")).text(), "uPlot");
    assertEquals((await runTask("recover", [], { DATABASE_URL: url })).code, 0);
    await using railway = await startQuick();
    const looked = await runTask("controller", ["--once", "--json"], {
      DATABASE_URL: url,
      SIDING_RAILWAY_URL: railway.url,
      SIDING_WORKER_SERVICE_ID: railway.serviceId,
      RAILWAY_ENVIRONMENT_ID: railway.environmentId,
      RAILWAY_TOKEN: railway.projectToken,
    });
    assertEquals([looked.code, JSON.parse(looked.out).error], [0, null], looked.err);
    for (const script of [worker, site]) {
      script.kill("SIGTERM");
      assertEquals([await script.ended, script.log().includes("NotCapable")], [0, false]);
    }
  },
);

databaseTest(
  "Railway's token reaches no job, not even where the worker's environment has it",
  async (sql, url) => {
    const token = "a-token-that-no-job-may-see";
    await using _ = startScript("worker.ts", hasty, { DATABASE_URL: url, RAILWAY_TOKEN: token });
    const ids = [
      await enqueue(sql, "environment", {}),
      await enqueue(sql, "peeks", "RAILWAY_TOKEN"),
    ]
      .map(({ id }) => id);
    const jobs = await waitFor(async () => {
      const jobs = await queue.get(sql, ids);
      return jobs.every(({ status }) => status === "done") && jobs;
    }, "the jobs");
    assertEquals(String(jobs[0].result).includes("RAILWAY"), false);
    assertStringIncludes(String(jobs[0].result), "PATH");
    assertEquals(jobs[1].result, ["NotCapable", "NotCapable", "NotCapable", "NotCapable"]);
  },
);

Deno.test("the controller can start no process, nor read or write a file; only a worker has a shell", async () => {
  const script = `
    const tries = {
      shell: () => new Deno.Command("/bin/sh", { args: ["-c", "true"] }).outputSync(),
      program: () => new Deno.Command("/bin/true").outputSync(),
      itself: () => new Deno.Command(Deno.execPath(), { args: ["--version"] }).outputSync(),
      signal: () => Deno.kill(Deno.ppid, "SIGCONT"),
      environ: () => Deno.openSync("/proc/self/environ"),
      project: () => Deno.readTextFileSync("deno.json"),
      system: () => Deno.readTextFileSync("/etc/hostname"),
      write: () => Deno.removeSync(Deno.makeTempDirSync({ dir: "/tmp" })),
      change: () => Deno.writeTextFileSync("jobs.ts", "", { append: true }),
      token: () => Deno.env.get("RAILWAY_TOKEN"),
    };
    const may = Object.entries(tries).filter(([_, attempt]) => {
      try { attempt(); return true; } catch (error) {
        if (error.name !== "NotCapable") throw error;
      }
    });
    console.log(JSON.stringify(may.map(([name]) => name)));`;
  const may: Record<string, string[]> = {};
  await Promise.all(
    Object.keys(taskOf).map(async (entry) => {
      const { out, err } = await deno(["run", "--quiet", `-P=${entry}`, "-"], {}, script);
      may[entry] = JSON.parse(out || `"${err}"`);
    }),
  );
  assertEquals(may, {
    // Where the project is in the temporary folder itself, jobs may write to it.
    worker: ["shell", "project", "write", ...(/^\/tmp\//.test(root) ? ["change"] : [])],
    controller: ["token"],
    web: ["project"],
    recover: ["project"],
    migrate: [],
    schema_check: [],
  });
});
