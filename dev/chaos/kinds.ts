/** The kinds of job of the chaos tool: short, of all three ways to run, and not always well behaved. */
import { z } from "zod";
import { type Context, inline, process } from "../../jobs/kind.ts";
import { kinds as project } from "../../jobs.ts";

/** `n` tells the job from all others, `ms` is how long it takes. */
const payload = z.strictObject({ n: z.number().int(), ms: z.number().int() });
const quickly = { retries: 5, backoffS: () => 0.5 };

/** Waits, as work that heeds its signal. */
async function work({ n, ms }: z.output<typeof payload>, { signal, report }: Context) {
  for (let done = 0; done < ms; done += 50) {
    signal.throwIfAborted();
    report("work", done / ms);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  return { n };
}

export const kinds = {
  /** A process with a child, which leaves a file, and notes that it is at work beside its folder. */
  free: process({
    payload,
    ...quickly,
    command: [
      "/bin/sh",
      "-c",
      `read -r job
       n=$(echo "$job" | sed 's/.*"n":\\([0-9]*\\).*/\\1/')
       id=$(echo "$job" | sed 's/.*"id":"\\([0-9]*\\).*/\\1/')
       attempt=$(echo "$job" | sed 's/.*"attempt":\\([0-9]*\\).*/\\1/')
       turns=$(($(echo "$job" | sed 's/.*"ms":\\([0-9]*\\).*/\\1/') / 100))
       sleep 600 &
       turn=0
       while [ $turn -le $turns ]; do
         echo "$id $attempt" >>../effects
         echo '{"stage": "turn '$turn'"}'
         sleep 0.1
         turn=$((turn + 1))
       done
       echo "$n" > out/n.txt
       echo '{"result": {"n": '"$n"'}}'`,
    ],
  }),
  quick: inline({ payload, ...quickly, work }),
  /** Fails once. */
  flaky: inline({
    payload,
    ...quickly,
    work: async (payload, context) => {
      await work(payload, context);
      if (context.job.failures === 0) throw new Error("the first time always fails");
      return { n: payload.n };
    },
  }),
  /** Brings a next one, in the statement that finishes it. */
  chain: inline({
    payload,
    ...quickly,
    work: async (payload, context) => {
      context.next({ kind: "quick", payload: { n: -payload.n, ms: 0 } });
      return await work(payload, context);
    },
  }),
  band: { ...project.band, ...quickly, retries: 50 },
};
