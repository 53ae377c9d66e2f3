/** The demo and dev, as a newcomer starts them. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { fileURLToPath } from "node:url";

const dev = fileURLToPath(new URL("../dev.ts", import.meta.url));

Deno.test("the demo transcribes every recording as it was played, with more workers for a while, and leaves nothing behind", async () => {
  const temporary = await Deno.makeTempDir({ prefix: "siding demo " });
  const { code, stdout, stderr } = await new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", dev, "--demo"],
    env: { NO_COLOR: "1", TMPDIR: temporary },
  }).output();
  const out = new TextDecoder().decode(stdout);
  assertEquals(code, 0, out + new TextDecoder().decode(stderr));
  const last = out.trim().split("\n").at(-1)!;
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
