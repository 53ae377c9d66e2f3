/**
 * A thread of the worker that ends it when its main thread hangs: an inline job which never gives
 * the thread back cannot be stopped, and would keep its worker from all others for ever. By then
 * the leases are over, and the worker's jobs are for others to recover.
 *
 * The main thread says that it is well by any message; the first one is {limitS}. It counts its own
 * ticks and not the time, so that a process that was frozen as a whole does not count as hanging.
 */
/// <reference lib="deno.worker" />
const TICKS = 20;

let quiet = 0;
addEventListener("message", ({ data: { limitS } }: MessageEvent) => {
  setInterval(() => {
    if (++quiet < TICKS) return;
    const line = `no job's function may keep the thread for ${limitS} s: this worker ends\n`;
    Deno.stderr.writeSync(new TextEncoder().encode(line));
    Deno.kill(Deno.pid, "SIGKILL"); // its guards end its jobs' processes
  }, limitS * 1000 / TICKS);
}, { once: true });
addEventListener("message", () => quiet = 0);
