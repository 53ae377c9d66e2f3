/** The project's scripts as processes of their own, for the tests and tools. */
import { fileURLToPath } from "node:url";
import config from "../deno.json" with { type: "json" };

/** A script that runs, and what it has said so far. */
export interface Script extends AsyncDisposable {
  pid: number;
  /** Its standard error so far. */
  log(): string;
  kill(signal: Deno.Signal): void;
  /** Its exit code, once it has ended. */
  ended: Promise<number>;
}

const path = (name: string) => fileURLToPath(new URL(`../${name}`, import.meta.url));

/** What a script may do: what deno.json says of an entry; a tool may do everything. */
function permissionsOf(name: string): string {
  const set = name.replace(/\.ts$/, "");
  return Object.hasOwn(config.permissions, set) ? `-P=${set}` : "-A";
}

/** Starts one of the project's scripts; it is killed, if need be, when disposed of. */
export function startScript(
  name: string,
  args: string[],
  env: Record<string, string>,
  denoArgs: string[] = [],
): Script {
  const child = new Deno.Command(Deno.execPath(), {
    args: [
      ...["run", permissionsOf(name), "--quiet", ...denoArgs],
      path(name),
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

/** Runs one of the project's scripts to its end. */
export async function runScript(name: string, args: string[], env: Record<string, string>) {
  const { code, stdout, stderr } = await new Deno.Command(Deno.execPath(), {
    args: ["run", permissionsOf(name), "--quiet", path(name), ...args],
    env: { NO_COLOR: "1", ...env },
  }).output();
  const decoder = new TextDecoder();
  return { code, stdout: decoder.decode(stdout), stderr: decoder.decode(stderr) };
}

/** Whether a process is there; one that has ended but was not waited for is not. */
export function isAlive(pid: number): boolean {
  try {
    const state = Deno.readTextFileSync(`/proc/${pid}/stat`).split(") ")[1][0];
    return state !== "Z";
  } catch {
    return false;
  }
}

/** Arguments for `deno run` that set a script's wall clock off by so many milliseconds. */
export function skewedClock(ms: number): string[] {
  const code = `const N = Date.now; Date.now = () => N() + ${ms};
    globalThis.Date = class extends Date { constructor(...a) { a.length ? super(...a) : super(N() + ${ms}); } };`;
  return ["--preload", `data:text/javascript,${encodeURIComponent(code)}`];
}

/** Arguments for `deno run` that have a script's time limits pass so many times as fast. */
export function fastClock(times: number): string[] {
  const code =
    `const now = performance.now.bind(performance); performance.now = () => ${times} * now();`;
  return ["--preload", `data:text/javascript,${encodeURIComponent(code)}`];
}
