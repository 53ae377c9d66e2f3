/** The kinds of job of the measurements, for worker.ts. */
import { z } from "zod";
import { inline } from "../../jobs/kind.ts";
import { stamp } from "./contender.ts";

export const kinds = {
  /** Does nothing, as the peers' does; tells when it runs where it is asked to. */
  noop: inline({
    payload: z.looseObject({ tell: z.boolean().optional() }),
    work: ({ tell }) => {
      if (tell) console.log(JSON.stringify({ ran: stamp() }));
      return null;
    },
  }),
};
