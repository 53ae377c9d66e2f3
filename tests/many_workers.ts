/**
 * Workers in one process, each the code of worker.ts with the pools of its own: as many processes
 * would take some 80 MB each.
 *
 *     deno run -A tests/many_workers.ts 20 --jobs tests/kinds.ts
 */
import { runMain } from "../config.ts";
import { main } from "../worker.ts";

await runMain("many_workers", async ([count, ...args], signal) => {
  const codes = await Promise.all(
    Array.from({ length: Number(count) }, () => main(args, signal)),
  );
  return Math.max(...codes);
});
