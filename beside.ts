/** What runs beside a worker: a controller, if it is asked for, and the thread that watches it. */
import { fileURLToPath } from "node:url";
import { logger } from "./config.ts";
import { pause } from "./db.ts";

const log = logger("beside");

/** Before a script that ended by itself is started again. */
const RESTART_MS = 5000;
/** How long a script may take to end. */
const STOP_MS = 10_000;

/**
 * Runs a script, again when it ends, until `signal` is aborted, when it is stopped. It takes its
 * settings from the variables, and ends when this process is gone. One that its settings do not fit
 * (exit code 2) is not started again.
 */
async function keepBeside(
  script: string,
  env: Record<string, string>,
  signal: AbortSignal,
): Promise<void> {
  while (!signal.aborted) {
    const child = new Deno.Command(Deno.execPath(), {
      args: ["run", "-A", "--quiet", fileURLToPath(new URL(script, import.meta.url))],
      env: { ...env, SIDING_END_WITH_PARENT: String(Deno.pid) },
      ...{ stdin: "null", stdout: "inherit", stderr: "inherit", detached: true },
    }).spawn();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const stop = () => {
      child.kill("SIGTERM");
      timer = setTimeout(() => child.kill("SIGKILL"), STOP_MS);
    };
    signal.addEventListener("abort", stop);
    const { code } = await child.status;
    signal.removeEventListener("abort", stop);
    clearTimeout(timer);
    if (signal.aborted) return;
    log.error("{script} ended with exit code {code}", { script, code });
    if (code === 2) return;
    await pause(RESTART_MS, signal);
  }
}

/** A controller of this worker's own service. Of all those beside the workers one acts. */
export function controllerBeside(signal: AbortSignal): Promise<void> {
  const own = Deno.env.get("RAILWAY_SERVICE_ID");
  const named = Deno.env.get("SIDING_WORKER_SERVICE_ID") || own;
  return keepBeside("controller.ts", named ? { SIDING_WORKER_SERVICE_ID: named } : {}, signal);
}

/** Starts the thread of jobs/watchdog.ts, which ends this process when it hangs for `limitS`. */
export function startWatchdog(limitS: number): globalThis.Worker {
  const thread = new globalThis.Worker(import.meta.resolve("./jobs/watchdog.ts"), {
    type: "module",
  });
  thread.postMessage({ limitS });
  return thread;
}
