/**
 * Deploys put old and new code side by side, and a rollback puts old code on the new schema. So the
 * release before runs here, as it was, on a database that has all migrations of now. It is the newest
 * tag v…, or, as long as there is none, the commit before that of the newest migration.
 */
import { assert, assertEquals } from "@std/assert";
import { fileURLToPath } from "node:url";
import { migrations } from "../migrate.ts";
import * as queue from "../queue.ts";
import { databaseTest, waitFor } from "./database.ts";
import { enqueue } from "./kinds.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const previous = findPrevious();

function git(...args: string[]): string | null {
  try {
    const options = { args, cwd: root, stderr: "null" } as const;
    const { success, stdout } = new Deno.Command("git", options).outputSync();
    return success ? new TextDecoder().decode(stdout).trim() || null : null;
  } catch {
    return null; // there is no git
  }
}

function findPrevious(): string | null {
  const tag = git("describe", "--tags", "--match=v*", "--abbrev=0");
  if (tag) return tag;
  const { number, name } = migrations().at(-1)!;
  const path = `migrations/${String(number).padStart(4, "0")}_${name}.sql`;
  const added = git("log", "--diff-filter=A", "--format=%H", "--max-count=1", "--", path);
  return added && git("rev-parse", "--verify", `${added}^`);
}

/** The release's files, in a folder of their own. */
async function unpack(): Promise<string> {
  const folder = await Deno.makeTempDir();
  const script = 'git -C "$0" archive "$1" | tar x -C "$2"';
  const args = ["-c", script, root, previous!, folder];
  assert((await new Deno.Command("/bin/sh", { args }).output()).success, `git archive ${previous}`);
  return folder;
}

/** Starts one of its scripts, on the packages that its own lock file names. */
function start(folder: string, script: string, args: string[], url: string): Deno.ChildProcess {
  return new Deno.Command(Deno.execPath(), {
    args: [
      ...["run", "-A", "--quiet", "--no-check", "--node-modules-dir=none"],
      ...[`--config=${folder}/deno.json`, `${folder}/${script}`, ...args],
    ],
    env: { DATABASE_URL: url, NO_COLOR: "1" },
    ...{ stdin: "null", stdout: "piped", stderr: "piped" },
  }).spawn();
}

async function outcomeOf(child: Deno.ChildProcess) {
  const { code, stdout, stderr } = await child.output();
  return { code, out: new TextDecoder().decode(stdout), err: new TextDecoder().decode(stderr) };
}

databaseTest(
  "the release before enqueues, runs and gives back jobs on the schema of this one" +
    (previous ? "" : " (skipped: its commit is not here)"),
  async (sql, url) => {
    if (!previous) return;
    const folder = await unpack();
    const enqueued = await outcomeOf(start(folder, "tools/enqueue.ts", ["transcribe"], url));
    assertEquals(enqueued.code, 0, enqueued.err);
    const [theirs] = await queue.get(sql, [enqueued.out.trim()]);
    assertEquals([theirs.kind, theirs.status], ["transcribe", "queued"]);

    const kinds = ["--jobs", `${folder}/tests/kinds.ts`];
    const times = ["--heartbeat-ms", "200", "--recover-ms", "200", "--poll-max-ms", "100"];
    const some = ["--concurrency", "2", "--drain-s", "0"];
    const worker = start(folder, "worker.ts", [...kinds, ...times, ...some], url);
    const ended = outcomeOf(worker);
    try {
      const job = async (id: string) => (await queue.get(sql, [id]))[0];
      const reaches = (entry: { id: string }, status: queue.Status) =>
        waitFor(async () => {
          const { status: now, error } = await job(entry.id);
          assert(now !== "failed", error ?? "");
          return now === status;
        }, `job ${entry.id} to be ${status}`);
      await reaches(await enqueue(sql, "copy", {}), "done"); // a process
      await reaches(await enqueue(sql, "echo", 1), "done"); // inline
      await reaches(await enqueue(sql, "snoozes", 1), "done");
      await queue.setQueue(sql, "turns", { claim: "lock", max_running: 1 });
      await reaches(await enqueue(sql, "echo", 1, { queue: "turns" }), "done");
      const long = await enqueue(sql, "waits", null);
      await reaches(long, "running");
      worker.kill("SIGTERM");
      await reaches(long, "queued");
      const { releases, crashes } = await job(long.id);
      assertEquals([releases, crashes], [1, 0]);
      const { code, err } = await ended;
      assertEquals(code, 0, err);
    } finally {
      try {
        worker.kill("SIGKILL");
      } catch {
        // It has ended.
      }
      await ended;
      await Deno.remove(folder, { recursive: true });
    }
  },
);
