/** A minute of `deno task chaos`: everything at once, by a seed that brings every fault there is. */
import { assert, assertEquals } from "@std/assert";
import { faultKinds } from "../dev/chaos/faults.ts";
import { runScript } from "./processes.ts";

Deno.test("whatever breaks in a minute of chaos, no job, write, charge or credit is off after it", async () => {
  const flags = ["--minutes", "1", "--seed", "7", "--json"];
  const { code, stdout, stderr } = await runScript("tools/chaos.ts", flags, {});
  assertEquals(code, 0, `${stdout}\n${stderr}`);
  const { counts, jobs, paid, problems } = JSON.parse(stdout);
  assertEquals(problems, []);
  for (const kind of faultKinds) assert(counts[kind] >= 1, `no fault of kind ${kind}`);
  const done = (kind: string) =>
    jobs.find((row: { kind: string; status: string }) => row.kind === kind && row.status === "done")
      ?.n ?? 0;
  for (const kind of ["free", "quick", "flaky", "chain", "band"]) {
    assert(done(kind) >= 5, `${done(kind)} jobs of kind ${kind} are done`);
  }
  assertEquals(paid.most_charges_of_a_job, 1);
});
