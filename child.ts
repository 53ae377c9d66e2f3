/** Entry scripts as processes that another one starts for itself: beside a worker, and in dev. */
import { fileURLToPath } from "node:url";
import { pause } from "./db.ts";

/**
 * Starts an entry script. Its signals come from here and not from the terminal, and it ends with us.
 *
 * @param permissions all of them; or `-P=` and the name of a set in deno.json
 */
export function spawnScript(
  name: string,
  flags: readonly string[] = [],
  env: Record<string, string> = {},
  permissions = "-A",
): Deno.ChildProcess {
  const small = name === "web.ts" ? ["--v8-flags=--optimize-for-size"] : []; // see web.ts
  // By the shell, in whose place it comes: the one program that a worker may start itself.
  return new Deno.Command("/bin/sh", {
    args: [
      ...["-c", 'exec "$0" "$@"', Deno.execPath()],
      "run",
      permissions,
      ...["--quiet", "--no-prompt"],
      ...small,
      fileURLToPath(new URL(name, import.meta.url)),
      ...flags,
    ],
    env: { SIDING_END_WITH_PARENT: String(Deno.pid), ...env },
    ...{ stdin: "null", stdout: "inherit", stderr: "inherit", detached: true },
  }).spawn();
}

/**
 * Waits for a process, which is stopped once `signal` is aborted: SIGTERM, and SIGKILL after `stopMs`.
 *
 * @returns its exit code
 */
export async function untilEnded(
  child: Deno.ChildProcess,
  signal: AbortSignal,
  stopMs: number,
): Promise<number> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const stop = () => {
    child.kill("SIGTERM");
    timer = setTimeout(() => child.kill("SIGKILL"), stopMs);
  };
  if (signal.aborted) stop();
  else signal.addEventListener("abort", stop);
  const { code } = await child.status;
  signal.removeEventListener("abort", stop);
  clearTimeout(timer);
  return code;
}

/**
 * Keeps a process running until `signal` is aborted: started again, after `restartMs`, when it ended by
 * itself; but not one that its settings do not fit (exit code 2), nor when `ended` says so.
 *
 * @param ended is told the exit code; false: it is not to be started again
 */
export async function keepRunning(
  start: () => Deno.ChildProcess,
  signal: AbortSignal,
  { restartMs, stopMs }: { restartMs: number; stopMs: number },
  ended: (code: number) => boolean | void,
): Promise<void> {
  while (!signal.aborted) {
    const code = await untilEnded(start(), signal, stopMs);
    if (signal.aborted || ended(code) === false || code === 2) return;
    await pause(restartMs, signal);
  }
}
