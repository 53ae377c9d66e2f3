/** What runs beside a worker: a controller, if it is asked for, and the thread that watches it. */
import { keepRunning, spawnScript } from "./child.ts";
import { logger } from "./config.ts";

const log = logger("beside");

/** Before a controller that ended by itself is started again, and how long one may take to end. */
const TIMES = { restartMs: 5000, stopMs: 10_000 };

/**
 * Keeps a controller of this worker's own service running. It takes its settings from the variables,
 * and ends when this process is gone. Of all those beside the workers one acts.
 */
export function controllerBeside(signal: AbortSignal): Promise<void> {
  const own = Deno.env.get("RAILWAY_SERVICE_ID");
  const named = Deno.env.get("SIDING_WORKER_SERVICE_ID") || own;
  const env: Record<string, string> = named ? { SIDING_WORKER_SERVICE_ID: named } : {};
  const start = () => spawnScript("controller.ts", [], env, "-P=controller");
  return keepRunning(start, signal, TIMES, (code) => {
    log.error("the controller ended with exit code {code}", { code });
  });
}

/** Starts the thread of jobs/watchdog.ts, which ends this process when it hangs for `limitS`. */
export function startWatchdog(limitS: number): globalThis.Worker {
  const thread = new globalThis.Worker(import.meta.resolve("./jobs/watchdog.ts"), {
    type: "module",
  });
  thread.postMessage({ limitS });
  return thread;
}
