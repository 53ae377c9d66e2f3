/** Kinds of job for the tests, loaded by workers with `--jobs tests/kinds.ts`. */
import { z } from "zod";
import {
  type Context,
  inline,
  NotSent,
  paid,
  PermanentFailure,
  process,
  Snooze,
} from "../jobs/kind.ts";
import { typed } from "../jobs/typed.ts";

/** A shell script as a job's process; $1 is the text of the payload's `with`, if it has one. */
const shell = (script: string, more: { timeoutS?: number; retries?: number } = {}) =>
  process({
    payload: z.looseObject({}),
    command: ["/bin/sh", "-c", script],
    retries: 0,
    ...more,
  });

/** What the paid service of the tests does next, and what it was sent: by key. */
export const service = {
  mood: "fine" as "fine" | "refuse" | "vanish" | "charge-and-vanish",
  sent: new Map<string, string>(),
  charges: 0,
};

async function untilGone({ gone }: { gone: string }, { signal }: Context): Promise<string> {
  while (await Deno.stat(gone).then(() => true, () => false)) {
    signal.throwIfAborted();
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return "went on to the end";
}

export const kinds = {
  /** What a function in a worker can see of its variables, one way after another. */
  peeks: inline({
    payload: z.string(),
    work: (name) =>
      [
        () => Deno.env.get(name),
        () => globalThis.process.env[name],
        () => Deno.env.toObject()[name],
        () => Deno.readTextFileSync("/proc/self/environ"),
      ].map((look) => {
        try {
          return look();
        } catch (error) {
          return (error as Error).name;
        }
      }),
  }),
  echo: inline({ payload: z.unknown(), work: (payload) => payload }),
  priced: inline({ payload: z.unknown(), price: 5, work: () => 1 }),
  /** Refuses payloads that are not numbers. */
  number: inline({ payload: z.number(), work: (n) => n }),
  throws: inline({
    payload: z.object({ message: z.string(), permanent: z.boolean().optional() }),
    retries: 1,
    backoffS: () => 60,
    work: ({ message, permanent }) => {
      throw permanent ? new PermanentFailure(message) : new Error(message);
    },
  }),
  fails: inline({
    payload: z.unknown(),
    work: () => {
      throw new Error("as always");
    },
  }),
  snoozes: inline({
    payload: z.unknown(),
    work: (_, { job }) => {
      if (job.snoozes === 0) throw new Snooze(0);
      return job.snoozes;
    },
  }),
  returns: inline({
    payload: z.enum(["nul", "large", "undefined", "surrogate", "circular", "bigint"]),
    retries: 0,
    work: (what) => {
      const circle: Record<string, unknown> = {};
      circle.self = circle;
      return {
        nul: { deep: ["a\0b"] },
        large: "x".repeat(1_100_000),
        undefined: undefined,
        surrogate: "\ud800",
        circular: circle,
        bigint: 1n,
      }[what];
    },
  }),
  chain: inline({
    payload: z.number(),
    work: (n, context) => {
      if (n > 0) context.next({ kind: "chain", payload: n - 1 });
      return n;
    },
  }),
  /** Returns at once, and leaves errors behind that nobody waits for. */
  careless: inline({
    payload: z.unknown(),
    work: () => {
      Promise.reject(new Error("nobody waits for this"));
      setTimeout(() => {
        throw new Error("nor for this");
      });
      return 1;
    },
  }),
  "schema-throws": inline({
    payload: z.unknown().refine(() => {
      throw new Error("the schema itself fails");
    }),
    retries: 0,
    work: () => 1,
  }),
  "schema-async": inline({
    payload: z.unknown().refine(() => Promise.resolve(true)),
    retries: 0,
    work: () => 1,
  }),
  "backoff-throws": inline({
    payload: z.unknown(),
    backoffS: () => {
      throw new Error("no backoff");
    },
    work: () => {
      throw new Error("fails");
    },
  }),
  "throws-nothing": inline({
    payload: z.unknown(),
    retries: 0,
    work: () => {
      throw Object.create(null);
    },
  }),
  "odd-next": inline({
    payload: z.unknown(),
    work: (_, { next }) => next({ kind: "echo", payload: 1n }),
  }),
  /** An object that can be written as JSON once only. */
  "odd-json": inline({
    payload: z.unknown(),
    work: () => {
      let asked = false;
      return {
        toJSON() {
          if (asked) throw new Error("asked twice");
          asked = true;
          return 1;
        },
      };
    },
  }),
  /** Heeds its signal. */
  waits: inline({
    payload: z.unknown(),
    work: (payload, { signal, report }) =>
      new Promise((_, reject) => {
        report("waiting", 0.5);
        signal.addEventListener("abort", () => {
          const note = (payload as { note?: string } | null)?.note;
          if (note) Deno.writeTextFileSync(note, "stopped");
          reject(signal.reason);
        });
      }),
  }),

  /** Takes so many milliseconds. */
  takes: inline({
    payload: z.number(),
    work: (ms) => new Promise((resolve) => setTimeout(() => resolve(ms), ms)),
  }),
  /** In the worker's own process: until the file that its payload names is gone, and then … */
  "inline-until": inline({ payload: z.object({ gone: z.string() }), work: untilGone }),
  /** … the worker ends, as when it runs out of memory. */
  poison: inline({
    payload: z.object({ gone: z.string() }),
    work: async (payload, context) => {
      await untilGone(payload, context);
      Deno.kill(Deno.pid, "SIGKILL");
    },
  }),
  /** Never gives the worker its thread back. */
  hog: inline({
    payload: z.unknown(),
    work: () => {
      for (;;);
    },
  }),

  /** Runs until the file that its payload names is gone. */
  until: shell(`
    path=$(sed 's/.*"gone":"\\([^"]*\\)".*/\\1/')
    while [ -e "$path" ]; do sleep 0.05; done
    echo '{"result": "went on to the end"}'`),
  /** Copies its input files to outputs, and says how long they are. */
  copy: shell(`
    cat > job.json
    echo '{"stage": "copy", "progress": 0.25}'
    n=0
    for f in in/*/*; do [ -e "$f" ] && cat "$f" > "out/$n-copy.bin" && n=$((n + 1)); done
    echo '{"result": {"files": '$n'}}'`),
  size: shell(`echo '{"result": '$(cat in/*/* | wc -c)'}'`),
  stdin: shell(`printf '{"result": %s}' "$(cat)"`),
  environment: shell(`env | cut -d= -f1 | sort | tr '\\n' ' ' | sed 's/.*/{"result": "&"}/'`),
  traceparent: shell(`echo '{"result": "'"\${TRACEPARENT:-none}"'"}'`),
  /** Runs until it is ended; its pid and that of its child are in the file the payload names. */
  forks: shell(`
    path=$(sed 's/.*"pids":"\\([^"]*\\)".*/\\1/')
    sleep 600 & child=$!
    echo "$$ $child $PWD" > "$path"
    echo '{"stage": "forked", "progress": 0.1}'
    wait`),
  stubborn: shell(`
    trap '' TERM
    path=$(sed 's/.*"pids":"\\([^"]*\\)".*/\\1/')
    echo "$$ $$ $PWD" > "$path"
    echo '{"stage": "stubborn"}'
    while :; do sleep 1; done`),
  overtime: shell(`exec sleep 600`, { timeoutS: 1 }),
  vanishes: shell(`rm -rf "$PWD"; exec sleep 600`, { timeoutS: 1 }),
  exits: shell(`echo "first line" >&2; echo "no memory left" >&2; exit 137`),
  silent: shell(`exit 0`),
  chatty: shell(`echo hello`),
  array: shell(`echo '[1]'`),
  "wrong-stage": shell(`echo '{"stage": 7}'`),
  flood: shell(`head -c 10000000 /dev/zero | tr '\\0' x; sleep 600`),
  "nul-stage": shell(
    `echo '{"stage": "a\\u0000b\\ud800", "progress": 7}'; read x; echo '{"result": 1}'`,
  ),
  "nul-error": shell(`echo '{"error": "a\\u0000b", "retry": false}'`),
  "large-result": shell(
    `printf '{"result": "'; head -c 50000000 /dev/zero | tr '\\0' x; printf '"}\\n'; sleep 600`,
  ),
  "closes-stdout": shell(`echo '{"result": 1}'; exec >&-; sleep 600`, { timeoutS: 1 }),
  "leaves-child": shell(`sleep 600 & echo '{"result": "left"}'`),
  "killed": shell(`kill -9 $$`),
  "error-line": shell(`echo '{"error": "the tape is broken", "retry": false}'; exit 3`),
  "retry-after": shell(`echo '{"retry_after_s": 3600}'`),
  "next": shell(
    `echo '{"stage": "x", "next": [{"kind": "echo", "payload": 5}]}'; echo '{"result": 1}'`,
  ),
  "links": shell(`ln -s /etc/passwd out/passwd; echo x > out/x.txt; echo '{"result": 1}'`),
  escapes: shell(
    `setsid sleep 600 & sleep 0.3; echo '{"result": {"ran": "yes", "child": "'$!'"}}'`,
    { timeoutS: 30 },
  ),
  "odd-name": shell(`printf x > "out/$(printf '\\377').txt"; echo '{"result": 1}'`),
  "tiny-progress": shell(`echo '{"stage": "x\\u0000", "progress": 1e-60}'; exec sleep 600`),
  "no-such-program": process({ payload: z.unknown(), command: ["./nowhere"], retries: 0 }),

  charge: paid({
    payload: z.unknown(),
    backoffS: () => 0,
    submit: (_, key) => {
      const mood = service.mood;
      service.mood = "fine";
      if (mood === "refuse") throw new NotSent("the service is closed");
      if (mood === "vanish") throw new Error("connection reset");
      service.charges++;
      service.sent.set(key, `request-${service.charges}`);
      if (mood === "charge-and-vanish") throw new Error("connection reset");
      return Promise.resolve(service.sent.get(key)!);
    },
    collect: (id) => ({ collected: id }),
    lookup: (key) => Promise.resolve(service.sent.get(key) ?? null),
  }),
};

export const { enqueue, enqueueMany, drainForTest } = typed(kinds);
