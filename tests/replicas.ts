/** What the local Railway runs in tests. */
import type { Process } from "../dev/replicas.ts";
import { type LocalRailway, type RailwayOptions, startRailway } from "../dev/railway.ts";

/** Passes for a process, and ends at the first signal. */
export function idle(): Process {
  const { promise, resolve } = Promise.withResolvers<{ code: number }>();
  return { kill: () => resolve({ code: 143 }), status: promise };
}

/** The shell scripts that have said "ready": from then on their traps are set. */
const ready = new Set<number>();
export const isReady = (pid: number) => ready.has(pid);

/** A replica that is a shell script; `forEver` in it is a loop that ends with this process. */
export function sh(script: string, env: Record<string, string>): Process {
  const forEver = `echo ready; while kill -0 ${Deno.pid} 2>/dev/null; do sleep 0.02; done`;
  const { pid, stdout, status, kill } = spawn(script.replaceAll("forEver", forEver), env);
  const reading = (async () => {
    for await (const _ of stdout) ready.add(pid);
  })();
  return { pid, kill, status: Promise.all([status, reading]).then(([ended]) => ended) };
}

function spawn(script: string, env: Record<string, string>) {
  const child = new Deno.Command("sh", {
    args: ["-c", script],
    env,
    stdin: "null",
    stdout: "piped",
    stderr: "inherit",
  }).spawn();
  const kill = (signal: Deno.Signal) => child.kill(signal);
  return { pid: child.pid, stdout: child.stdout, status: child.status, kill };
}

/** A local Railway that starts replicas at once, and nothing as a replica unless told otherwise. */
export const startQuick = (options: Partial<RailwayOptions> = {}): Promise<LocalRailway> =>
  startRailway({ start: idle, startDelayMs: 0, restartMs: 10, ...options });

/** Railway's own schema, where it is at hand: its path is RAILWAY_SCHEMA, or beside the project. */
export const realSchema: string | null = (() => {
  try {
    return Deno.readTextFileSync(
      Deno.env.get("RAILWAY_SCHEMA") ??
        new URL("../../shared/railway/schema.graphql", import.meta.url),
    );
  } catch {
    return null;
  }
})();
/** What a test's name says when it is skipped for want of the schema. */
export const schemaNote = realSchema ? "" : " (skipped: RAILWAY_SCHEMA names no file)";
