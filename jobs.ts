/**
 * The kinds of job: the file a team edits. Each kind says what its payload must be, how it runs
 * (see jobs/kind.ts), how long it may take and how often it is tried.
 */
import { fileURLToPath } from "node:url";
import { z } from "zod";
import * as band from "./jobs/band.ts";
import { paid, process } from "./jobs/kind.ts";
import { typed } from "./jobs/typed.ts";

export const kinds = {
  /** A recording to sheet music: WAV in, MIDI and ABC notation out. */
  transcribe: process({
    payload: z.strictObject({
      title: z.string().max(200).optional(),
      tempo_bpm: z.number().min(20).max(400).optional(),
    }),
    command: [
      Deno.execPath(),
      "run",
      "--no-prompt",
      "--allow-read=in",
      "--allow-write=out",
      fileURLToPath(new URL("./jobs/transcribe.ts", import.meta.url)),
    ],
    timeoutS: 900,
  }),
  /** A recording to an arrangement for a band, by a service that charges: WAV in, ABC notation out. */
  band: paid({
    payload: z.strictObject({ title: z.string().max(200).optional() }),
    submit: band.submit,
    collect: band.collect,
    lookup: band.lookup,
    retries: 8, // three hours: what was paid for outlasts an outage of its service
  }),
};

export const { enqueue, enqueueMany, drainForTest } = typed(kinds);
