/**
 * Kinds in other languages, as a table of their own: `deno task worker --jobs jobs/examples/kinds.ts`
 * runs them. In a project they stand in its jobs.ts. docs/jobs.md goes through them.
 */
import { fileURLToPath } from "node:url";
import { z } from "zod";
import { process } from "../kind.ts";
import { typed } from "../typed.ts";

/** A whole path: a job's process runs in a work folder. */
const script = (name: string) => fileURLToPath(new URL(name, import.meta.url));

export const kinds = {
  /** Text files to how often each word comes in them. */
  words: process({
    payload: z.strictObject({ top: z.int().min(0).max(1000).optional() }),
    command: ["python3", script("words.py")],
    timeoutS: 300,
  }),
  /** Files to the same, compressed, and their SHA-256. */
  pack: process({
    payload: z.strictObject({}),
    command: ["/bin/sh", script("pack.sh")],
    env: { MIN_FREE_KB: "10000" },
    timeoutS: 300,
    retries: 5,
  }),
};

export const { enqueue, enqueueMany, drainForTest } = typed(kinds);
