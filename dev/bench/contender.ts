/**
 * What a queue must be able to do to be measured, and the process that does it: Siding's is
 * siding_child.ts, the others' are in tools/bench/, which have dependencies of their own. So this
 * imports nothing.
 *
 * A child is called `child.ts COMMAND JSON`. It says one JSON object a line on standard output, and
 * ends when its standard input does.
 */

/** `best`: the settings that were found best for many small jobs. `default`: its own, 10 at a time. */
export type How = "best" | "default";

export interface Contender {
  /** Makes its tables and its queue. */
  install(url: string, how: How): Promise<void>;
  /** What enqueues no-op jobs from one process. */
  open(url: string): Promise<Caller>;
  /**
   * What works: ready to start, but not started. Siding has none: it is worker.ts.
   *
   * @param ran is called at each job that `say`s so in its payload
   */
  worker?(url: string, how: How, ran: () => void): Promise<Starter>;
}

export interface Caller {
  /** Enqueues many, at the batch size that is best for it. */
  bulk(jobs: number): Promise<void>;
  /** Enqueues one. `tell`: whether the worker is to tell when it runs. */
  one(tell?: boolean): Promise<unknown>;
  /** Enqueues one in a transaction that also inserts a row into bench_rows. */
  inTransaction(): Promise<unknown>;
  close(): Promise<void>;
}

export interface Starter {
  start(): Promise<void>;
  stop(): Promise<void>;
}

/** What one run of enqueuing came to. */
export interface Calls {
  ms: number;
  /** Milliseconds of each call. */
  latencies_ms: number[];
}

/** Milliseconds since 1970, with more digits than Date.now(): the same clock in every process. */
export const stamp = () => performance.timeOrigin + performance.now();

const say = (it: unknown) => console.log(JSON.stringify(it));

/** Lines of standard input, one at a time. */
async function* lines(): AsyncGenerator<string> {
  let rest = "";
  for await (
    const text of Deno.stdin.readable.pipeThrough(new TextDecoderStream())
  ) {
    const parts = (rest + text).split("\n");
    rest = parts.pop()!;
    yield* parts;
  }
}

/** Runs `calls` calls from so many loops, each of which waits for its last one. */
async function timed(
  calls: number,
  callers: number,
  call: () => Promise<unknown>,
): Promise<Calls> {
  const latencies_ms: number[] = [];
  let left = calls;
  const startedMs = performance.now();
  await Promise.all(Array.from({ length: callers }, async () => {
    while (left-- > 0) {
      const sentMs = performance.now();
      await call();
      latencies_ms.push(performance.now() - sentMs);
    }
  }));
  return { ms: performance.now() - startedMs, latencies_ms };
}

/** What a child is asked to do. */
export interface Order {
  url: string;
  how: How;
  jobs: number;
  callers: number;
}

const commands: Record<string, (it: Contender, order: Order) => Promise<void>> = {
  async install(it, { url, how }) {
    await it.install(url, how);
    say({ done: true });
  },
  async fill(it, { url, jobs }) {
    const caller = await it.open(url);
    await caller.bulk(jobs);
    say({ done: true });
    await caller.close();
  },
  /** At each line, such as `single 2000`: so many in bulk, singly or in transactions, after a few. */
  async enqueue(it, { url, callers }) {
    const caller = await it.open(url);
    for await (const line of lines()) {
      const [what, count] = [line.split(" ")[0], Number(line.split(" ")[1])];
      if (what === "bulk") {
        await caller.bulk(1000);
        say(await timed(1, 1, () => caller.bulk(count)));
        continue;
      }
      const call = what === "single" ? () => caller.one() : () => caller.inTransaction();
      await timed(callers * 20, callers, call);
      say(await timed(count, callers, call));
    }
    await caller.close();
  },
  /** One job at each line, which tells when it runs. */
  async send(it, { url }) {
    const caller = await it.open(url);
    await caller.one();
    say({ ready: true });
    for await (const _ of lines()) {
      await caller.one(true);
      say({ sent: stamp() });
    }
    await caller.close();
  },
  async work(it, { url, how }) {
    const worker = await it.worker!(url, how, () => say({ ran: stamp() }));
    say({ ready: true });
    for await (const _ of lines()) await worker.start();
    await worker.stop();
  },
};

/** Runs a child to the end of the process. */
export async function serve(
  it: Contender,
  command: string,
  order: string,
): Promise<never> {
  try {
    await commands[command](it, JSON.parse(order));
  } catch (error) {
    console.error(error);
    Deno.exit(1);
  }
  Deno.exit(0);
}
