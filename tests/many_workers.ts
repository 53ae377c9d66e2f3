/**
 * Workers in one process, each the code of worker.ts with the pools of its own: as many processes
 * would take some 80 MB each.
 *
 *     deno run -A tests/many_workers.ts 20 --jobs tests/kinds.ts
 */
import { runMain } from "../config.ts";
import { pause } from "../db.ts";
import { main } from "../worker.ts";

/** One after the other: each sets up the log, which two cannot do at once. */
const APART_MS = 100;

await runMain("many_workers", async ([count, ...args], signal) => {
  const workers: Promise<number>[] = [];
  while (workers.length < Number(count)) {
    workers.push(main(args, signal));
    await pause(APART_MS, signal);
  }
  return Math.max(...await Promise.all(workers));
});
