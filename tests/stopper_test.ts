/** What stops a job, and limits that share a timer. Timers that are left behind fail these tests. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { Stop } from "../jobs/kind.ts";
import { limit, Stopper } from "../jobs/stopper.ts";
import { waitFor } from "./wait.ts";

const cancelled = new Stop("cancelled", "cancelled");
const lost = new Stop("lost", "lost");
const never = new Promise<never>(() => {});

Deno.test("a signal tells of a stop before it was asked for, and after", () => {
  const before = new Stopper();
  before.stop(cancelled);
  assertEquals([before.signal.aborted, before.signal.reason], [true, cancelled]);

  const after = new Stopper();
  const { signal } = after;
  let told = 0;
  signal.addEventListener("abort", () => told++);
  assertEquals([signal.aborted, after.reason], [false, undefined]);
  after.stop(cancelled);
  assertEquals([told, signal.reason, after.signal], [1, cancelled, signal]);
});

Deno.test("of two reasons to stop the first stands", () => {
  const stopper = new Stopper();
  const { signal } = stopper;
  stopper.stop(cancelled);
  stopper.stop(lost);
  assertEquals([stopper.reason, signal.reason], [cancelled, cancelled]);
});

Deno.test("work that does not heed its stop is left behind after its grace, and not before", async () => {
  for (const when of ["before", "during"]) {
    const stopper = new Stopper();
    if (when === "before") stopper.stop(lost);
    const work = stopper.unlessAbandoned(never, 60);
    const startedMs = performance.now();
    if (when === "during") stopper.stop(lost);
    assertEquals(await assertRejects(() => work), lost);
    assert(performance.now() - startedMs > 55, when);
  }
});

Deno.test("work that ends within its grace is what it came to, and a later stop is nothing to it", async () => {
  const stopper = new Stopper();
  const { promise, resolve } = Promise.withResolvers<number>();
  const work = stopper.unlessAbandoned(promise, 60_000);
  stopper.stop(cancelled);
  resolve(7);
  assertEquals(await work, 7);

  const failing = new Stopper();
  const failure = failing.unlessAbandoned(Promise.reject(new Error("its own")), 60_000);
  await assertRejects(() => failure, Error, "its own");
  failing.stop(cancelled);
});

Deno.test("limits of several lengths run out each in its time, but for those that ended before", async () => {
  const ranOut: string[] = [];
  const startedMs = performance.now();
  const early: string[] = [];
  const begin = (name: string, ms: number) =>
    limit(ms, () => {
      ranOut.push(name);
      if (performance.now() - startedMs < ms - 1) early.push(name);
    });
  begin("b1", 120);
  const ended = begin("b2", 120);
  begin("a1", 40);
  begin("a2", 40);
  begin("b3", 120);
  const alone = begin("c", 60_000);
  ended();
  await waitFor(() => ranOut.length >= 2, "the short ones");
  const late = begin("b4", 120); // begun later, so it runs out after those of its length
  await waitFor(() => ranOut.length >= 5, "the long ones");
  assertEquals([ranOut, early], [["a1", "a2", "b1", "b3", "b4"], []]);
  alone();
  late(); // again, and to no effect
  // Its timer was not needed: another begins a new one.
  const again = Promise.withResolvers<void>();
  limit(40, again.resolve);
  await again.promise;
});
