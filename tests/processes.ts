/** Workers for the tests. */
import { fileURLToPath } from "node:url";
import { startScript } from "../dev/scripts.ts";

export { isAlive, runScript, type Script, skewedClock, startScript } from "../dev/scripts.ts";

/** Short times, so that seconds show what minutes would. */
export const hasty = [
  ...["--jobs", fileURLToPath(new URL("kinds.ts", import.meta.url))],
  ...["--heartbeat-ms", "200", "--recover-ms", "200", "--poll-max-ms", "100", "--lease-s", "3"],
];

/** Starts a worker on the tests' kinds, with {@linkcode hasty} times. */
export const startWorker = (
  url: string,
  args: string[] = [],
  denoArgs: string[] = [],
  env: Record<string, string> = {},
) => startScript("worker.ts", [...hasty, ...args], { DATABASE_URL: url, ...env }, denoArgs);
