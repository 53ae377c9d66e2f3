/** The kind of job of the soak: a worker's `--jobs`. */
import { z } from "zod";
import { inline } from "../../jobs/kind.ts";

export const kinds = { noop: inline({ payload: z.unknown(), work: () => null }) };
