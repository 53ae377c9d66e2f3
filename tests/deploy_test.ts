/** What a deploy is made of: the Railway project as code, the image, the workflow, the change log. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { fileURLToPath } from "node:url";
import program from "../.railway/railway.ts";
import config from "../deno.json" with { type: "json" };
import { settings, VERSION } from "../config.ts";
import { GIVE_BACK_MS } from "../worker.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const read = (path: string) => Deno.readTextFileSync(root + path);
const tasks: Record<string, { command: string }> = config.tasks;

interface Service {
  name: string;
  type: string;
  deploy: Record<string, unknown>;
  networking?: unknown;
  variables: Record<string, Record<string, unknown>>;
}

/** The project, as Railway's CLI has it: it hands the function nothing. */
// deno-lint-ignore no-explicit-any -- what the CLI does
const project = JSON.parse(JSON.stringify(await (program as any)({})));
const service = (name: string): Service =>
  project.resources.find((it: Service) => it.type === "service" && it.name === name);
const valueOf = ({ type, value, resource, output }: Record<string, unknown>) =>
  type === "reference" ? `${resource} ${output}` : type === "preserve" ? "kept" : value;
const variablesOf = (name: string) =>
  Object.fromEntries(Object.entries(service(name).variables).map(([k, v]) => [k, valueOf(v)]));

Deno.test("the Railway project is a Postgres and three services, each starting deno on its own entry", () => {
  const names = project.resources.map(({ type, name }: Service) => `${type} ${name}`);
  assertEquals(names, ["database postgres", "service web", "service worker", "service controller"]);
  const common = {
    preDeployCommand: [tasks.migrate.command],
    restartPolicyType: "ALWAYS",
  };
  // Also: no replicas, which the controller sets.
  for (const name of ["worker", "controller"]) {
    assertEquals(service(name).deploy, { ...common, startCommand: tasks[name].command });
    assertEquals(service(name).networking, undefined);
  }
  const health = { healthcheckPath: "/health", healthcheckTimeout: 60 };
  assertEquals(service("web").deploy, { ...common, ...health, startCommand: tasks.web.command });
});

Deno.test("each service has its variables, and Railway's token is the controller's alone", () => {
  const DATABASE_URL = "database.postgres DATABASE_URL";
  const kept = (...names: string[]) => Object.fromEntries(names.map((name) => [name, "kept"]));
  assertEquals(variablesOf("worker"), {
    DATABASE_URL,
    ...{ SIDING_DRAIN_S: "20", RAILWAY_DEPLOYMENT_DRAINING_SECONDS: "60" },
    ...kept("SIDING_WEBHOOK_SECRET", "SENTRY_DSN"),
  });
  assertEquals(variablesOf("controller"), {
    DATABASE_URL,
    ...{ SIDING_MAX: "4", RAILWAY_DEPLOYMENT_DRAINING_SECONDS: "15" },
    SIDING_WORKER_SERVICE_ID: "service.worker RAILWAY_SERVICE_ID",
    ...kept("RAILWAY_TOKEN", "SENTRY_DSN"),
  });
  assertEquals(variablesOf("web"), {
    DATABASE_URL,
    RAILWAY_DEPLOYMENT_DRAINING_SECONDS: "15",
    ...kept("SIDING_ADMIN_TOKEN", "SIDING_SESSION_SECRET", "SIDING_WEBHOOK_SECRET"),
    ...kept("SIDING_METRICS_TOKEN", "ALERT_WEBHOOK_URL", "SENTRY_DSN"),
  });
  const doc = read("docs/deploy.md");
  for (const name of ["web", "worker", "controller"]) {
    for (const variable of Object.keys(variablesOf(name))) assert(doc.includes(variable), variable);
  }
  const tokenMay = Object.entries(config.permissions)
    .filter(([, { env }]) =>
      env.some((name) => name.startsWith("RAILWAY_") && /TOKEN|\*/.test(name))
    )
    .map(([name]) => name);
  assertEquals(tokenMay, ["controller"]);
});

Deno.test("Railway waits longer for a worker than that waits for its jobs, stops them and gives them back", () => {
  const { SIDING_DRAIN_S, RAILWAY_DEPLOYMENT_DRAINING_SECONDS } = variablesOf("worker");
  assertEquals(Number(SIDING_DRAIN_S), settings.drainS.fallback);
  const stopS = 5; // between SIGTERM and SIGKILL for a job's process
  const leastS = Number(SIDING_DRAIN_S) + stopS + GIVE_BACK_MS / 1000;
  assert(Number(RAILWAY_DEPLOYMENT_DRAINING_SECONDS) >= leastS + 10, `${leastS} s`);
});

/** Whether Node takes TypeScript and finds out by itself what kind of module it is. */
const node = await new Deno.Command("node", { args: ["--version"] }).output()
  .then(({ stdout }) => new TextDecoder().decode(stdout).slice(1), () => "none");
const [major, minor] = node.split(".").map(Number);
const canStrip = major > 22 || (major === 22 && minor >= 7);

Deno.test({
  name: `Node evaluates the project as Railway's CLI has it do${
    canStrip ? "" : ` (skipped: Node is ${node.trim()}, and 22.7 is the least)`
  }`,
  ignore: !canStrip,
  async fn() {
    const script = `const { default: program } = await import(process.argv[1]);
      process.stdout.write(JSON.stringify(await program({})));`;
    const { stdout, stderr } = await new Deno.Command("node", {
      args: [
        ...["--experimental-strip-types", "--input-type=module", "-e", script],
        ...["--", `${root}.railway/railway.ts`],
      ],
    }).output();
    const decoder = new TextDecoder();
    assertEquals(JSON.parse(decoder.decode(stdout) || "null"), project, decoder.decode(stderr));
  },
});

const lines = (path: string) =>
  read(path).replace(/\\\n\s*/g, "").split("\n").filter((l) => l && !l.startsWith("#"));

Deno.test("the image has a pinned Deno, is not run by root, and starts a worker as its task does", () => {
  const file = lines("Dockerfile");
  const after = (word: string) =>
    file.filter((line) => line.startsWith(`${word} `)).map((line) => line.slice(word.length + 1));
  assertMatch(after("FROM").join(), /^denoland\/deno:\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?$/);
  assertEquals(after("USER"), ["deno"]);
  assertEquals(JSON.parse(after("ENTRYPOINT").join()), ["/tini", "--"]);
  assertEquals(JSON.parse(after("CMD").join()).join(" "), tasks.worker.command);
  const copied = after("COPY").flatMap((line) => line.split(" ").slice(0, -1));
  assertEquals(copied, ["deno.json", "deno.lock", "."]);
  for (const path of copied) Deno.statSync(root + path);
  // Whoever is root builds it, and what it builds is not changed by who runs.
  assert(
    file.findIndex((l) => l.startsWith("USER")) > file.findLastIndex((l) => /^(RUN|COPY)/.test(l)),
  );
  const cached = after("RUN").at(-1)!.split(" ").filter((word) => word.endsWith(".ts"));
  for (const entry of Object.keys(config.permissions)) {
    assert(cached.includes(`${entry}.ts`), entry);
  }
});

Deno.test("all that an entry imports or reads is in the image", async () => {
  const ignored = lines(".dockerignore");
  const isLeftOut = (path: string) =>
    ignored.some((pattern) => {
      const [first] = path.split("/");
      return pattern.endsWith("*") ? first.startsWith(pattern.slice(0, -1)) : first === pattern;
    });
  assert(isLeftOut("tests/deploy_test.ts") && isLeftOut("node_modules/zod") && isLeftOut(".env"));
  const cached = lines("Dockerfile").find((line) => line.startsWith("RUN deno cache"))!
    .split(" ").filter((word) => word.endsWith(".ts"));
  const read = ["deno.json", "std.d.ts", "jobs/guard.sh", "migrations", "web/static"];
  const imported = await Promise.all(cached.map(async (entry) => {
    const args = ["info", "--json", root + entry];
    const { stdout } = await new Deno.Command(Deno.execPath(), { args }).output();
    const { modules } = JSON.parse(new TextDecoder().decode(stdout));
    return modules.map(({ specifier, error }: Record<string, string>) => {
      assertEquals(error, undefined);
      return specifier.startsWith("file:") ? fileURLToPath(specifier).replace(root, "") : "";
    });
  }));
  const needed = new Set([...read, ...imported.flat().filter((path) => path !== "")]);
  assert(needed.size > 60, `${needed.size} files`);
  assertEquals([...needed].filter(isLeftOut), []);
  for (const path of needed) Deno.statSync(root + path);
});

Deno.test("the workflow checks Railway's schema and the migrations, and has the history for the release before", () => {
  const workflow = read(".github/workflows/ci.yml");
  assert(workflow.includes("deno task check-schema"));
  assert(workflow.includes("deno task migrate && npx -y deno task migrate --check"));
  assertEquals(
    workflow.match(/actions\/checkout@/g)?.length,
    workflow.match(/fetch-depth: 0/g)?.length,
  );
});

Deno.test("what is pinned is kept up to date: packages, the image's Deno, the workflow's actions", () => {
  const { enabledManagers } = JSON.parse(read("renovate.json"));
  assertEquals(enabledManagers, ["deno", "dockerfile", "docker-compose", "github-actions"]);
  for (const [name, target] of Object.entries(config.imports)) {
    assertMatch(target, /^npm:(@[\w-]+\/)?[\w-.]+@\d+\.\d+\.\d+(-[\w.]+)?(\/|$)/, name);
  }
});

Deno.test("the change log begins with this version, and has each part that it may have", () => {
  const log = read("CHANGELOG.md");
  const versions = [...log.matchAll(/^## \[?([^\]\s]+)\]?(?: - (\S+))?$/gm)].map((m) => m.slice(1));
  const [newest] = versions.filter(([name]) => name !== "Unreleased");
  assertEquals(newest[0], VERSION);
  assertMatch(newest[1], /^\d{4}-\d{2}-\d{2}$/);
  const parts = new Set([...log.matchAll(/^### (.*)$/gm)].map(([, part]) => part));
  const known = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"];
  assertEquals([...parts].filter((part) => !known.includes(part)), []);
});
