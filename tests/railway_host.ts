/** A process with a local Railway in it, for the test that kills it. Its replica is one of the project's scripts. */
import { fileURLToPath } from "node:url";
import { startRailway } from "../dev/railway.ts";

const script = fileURLToPath(new URL("../dev/band_service.ts", import.meta.url));
await startRailway({
  startDelayMs: 0,
  start: (env) => {
    const child = new Deno.Command(Deno.execPath(), {
      args: ["run", "-A", "--quiet", script, "--port", "0"],
      env,
      stdin: "null",
      stdout: "piped",
      stderr: "null",
    }).spawn();
    // It prints its address when it runs, and by then it watches its parent.
    child.stdout.getReader().read().then(() => console.error(`replica ${child.pid}`));
    return child;
  },
});
