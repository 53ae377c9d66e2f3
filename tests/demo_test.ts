/** The demo and dev, as a newcomer starts them. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { fileURLToPath } from "node:url";

const dev = fileURLToPath(new URL("../dev.ts", import.meta.url));

/** How long the demo may take until its site is all that is left. */
const LIMIT_MS = 180_000;

Deno.test("the demo transcribes every recording as it was played, with more workers for a while, shows its site, and leaves nothing behind", async () => {
  const temporary = await Deno.makeTempDir({ prefix: "siding demo " });
  const child = new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", dev, "--demo", "--open", "--port", "0"],
    env: { NO_COLOR: "1", TMPDIR: temporary },
    stdout: "piped",
    stderr: "piped",
  }).spawn();
  const errors = new Response(child.stderr).text();
  let out = "";
  const late = setTimeout(() => child.kill("SIGKILL"), LIMIT_MS);
  for await (const piece of child.stdout.pipeThrough(new TextDecoderStream())) {
    out += piece;
    const [, link] = /^the site: (\S+) — Ctrl-C stops all$/m.exec(out) ?? [];
    if (!link) continue;
    const signedIn = await fetch(link, { redirect: "manual" });
    await signedIn.body?.cancel();
    const cookie = signedIn.headers.getSetCookie()[0].split(";")[0];
    const jobs = await fetch(new URL("/api/jobs?status=done", link), { headers: { cookie } });
    assert((await jobs.json()).items.length >= 12);
    child.kill("SIGTERM");
    break;
  }
  clearTimeout(late);
  const { code } = await child.status;
  assertEquals(code, 0, out + await errors);
  const last = out.split("\n").find((line) => line.includes("; workers "))!;
  assertMatch(
    last,
    /^(\d+) jobs: \1 done, 0 failed, 0 lost; wait p50 [\d.]+ s p95 [\d.]+ s; run p50 [\d.]+ s p95 [\d.]+ s; workers \d+( → \d+)+$/,
  );
  const steps = last.split("; workers ")[1].split(" → ").map(Number);
  assertEquals([steps[0], steps.at(-1)], [1, 1], last);
  assert(Math.max(...steps) >= 2, last);
  assertMatch(out, /^ +[\d.]+ s {2}controller: .* from 1 worker to \d+$/m);
  assert(Number(last.split(" ")[0]) >= 12, last);
  assertMatch(out, /^job +kind +recording +wait +run +notes +outcome$/m);
  assertEquals([...Deno.readDirSync(temporary)].map((entry) => entry.name), []);
  await Deno.remove(temporary);
});
