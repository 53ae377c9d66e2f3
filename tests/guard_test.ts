/** jobs/guard.sh by itself, where only many starts at once show what may go wrong. */
import { assertEquals } from "@std/assert";
import { fileURLToPath } from "node:url";

const GUARD = fileURLToPath(new URL("../jobs/guard.sh", import.meta.url));

/** Guards `command`, tells the renewals, and leaves at once. @returns how that ended, and what was said */
async function guarded(graceS: number, renewals: number[], command: string) {
  const folder = await Deno.makeTempDir({ prefix: "siding-guard-test-" });
  await Deno.writeTextFile(`${folder}/job.json`, "{}");
  const child = new Deno.Command("/bin/sh", {
    args: [GUARD, String(graceS), "sh", "-c", command],
    cwd: folder,
    stdin: "piped",
    stdout: "null",
    stderr: "piped",
    detached: true,
  }).spawn();
  const stdin = child.stdin.getWriter();
  await stdin.write(new TextEncoder().encode(renewals.map((left) => `${left}\n`).join("")));
  await stdin.close();
  const { code, stderr } = await child.output();
  return { code, stderr: new TextDecoder().decode(stderr) };
}

Deno.test("a job is ended by SIGTERM at once, however close to its start and to its renewals", async () => {
  const ended = await Promise.all(
    // 137 would be SIGKILL, after the grace.
    Array.from({ length: 40 }, () => guarded(30, [600, 600, 600], "sleep 600")),
  );
  assertEquals(ended, ended.map(() => ({ code: 128 + 15, stderr: "" })));
});
