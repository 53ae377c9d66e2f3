/** Real processes for the tests. */
import { fileURLToPath } from "node:url";

/** A script that runs, and what it has said so far. */
export interface Script extends AsyncDisposable {
  pid: number;
  /** Its standard error so far. */
  log(): string;
  kill(signal: Deno.Signal): void;
  /** Its exit code, once it has ended. */
  ended: Promise<number>;
}

/** Short times, so that seconds show what minutes would. */
export const hasty = [
  ...["--jobs", fileURLToPath(new URL("kinds.ts", import.meta.url))],
  ...["--heartbeat-ms", "200", "--recover-ms", "200", "--poll-max-ms", "100", "--lease-s", "3"],
];

/** Starts one of the project's scripts; it is killed, if need be, when disposed of. */
export function startScript(
  name: string,
  args: string[],
  env: Record<string, string>,
  denoArgs: string[] = [],
): Script {
  const child = new Deno.Command(Deno.execPath(), {
    args: [
      ...["run", "-A", "--quiet", ...denoArgs],
      fileURLToPath(new URL(`../${name}`, import.meta.url)),
      ...args,
    ],
    env: { NO_COLOR: "1", ...env },
    stdin: "null",
    stdout: "null",
    stderr: "piped",
  }).spawn();
  let said = "";
  const reading = (async () => {
    for await (const text of child.stderr.pipeThrough(new TextDecoderStream())) said += text;
  })();
  let over = false;
  const ended = child.status.then(async ({ code }) => {
    over = true;
    await reading;
    return code;
  });
  const kill = (signal: Deno.Signal) => {
    try {
      if (!over) child.kill(signal);
    } catch {
      // It has ended, and its status is on its way.
    }
  };
  return {
    pid: child.pid,
    log: () => said,
    kill,
    ended,
    async [Symbol.asyncDispose]() {
      kill("SIGKILL");
      await ended;
    },
  };
}

/** Starts a worker on the tests' kinds, with {@linkcode hasty} times. */
export const startWorker = (
  url: string,
  args: string[] = [],
  denoArgs: string[] = [],
  env: Record<string, string> = {},
) => startScript("worker.ts", [...hasty, ...args], { DATABASE_URL: url, ...env }, denoArgs);

/** Whether a process is there; one that has ended but was not waited for is not. */
export function isAlive(pid: number): boolean {
  try {
    const state = Deno.readTextFileSync(`/proc/${pid}/stat`).split(") ")[1][0];
    return state !== "Z";
  } catch {
    return false;
  }
}
