#!/usr/bin/env -S deno run --quiet --no-prompt -P=schema_check
/**
 * Asks Railway's live schema whether it still knows what railway.ts sends.
 *
 *     deno task check-schema
 *
 * It sends each operation without a token and with ids of nothing. A GraphQL server validates
 * before it executes: an operation that fits gets as far as "Not Authorized", and one that names a
 * field that is not there does not. Nothing can change by that. In GitHub Actions what is found
 * becomes annotations. SIGINT and SIGTERM end it at once.
 *
 * Exit codes: 0 all fit; 1 one does not; 2 usage; 3 nobody could tell: Railway was not reached, or
 * what replied is not Railway.
 */
import * as config from "./config.ts";
import { operations } from "./railway.ts";
import { RAILWAY_URL, RailwayError, send } from "./railway_call.ts";

const program = {
  name: "check-schema",
  summary: "Asks Railway's live schema whether it still knows what Siding sends.",
  example: "deno task check-schema",
  exits: { 0: "all fit", 1: "one does not fit", 3: "Railway could not be asked" },
};
const spec = { url: config.flag(config.url("another endpoint than Railway's own")) };

/** What stands in for the variables. */
const NOTHING = "00000000-0000-0000-0000-000000000000";
const placeholders = {
  service: NOTHING,
  environment: NOTHING,
  regions: { nowhere: { numReplicas: 1 } },
  patch: { services: {} },
  message: "schema check",
};

export interface Verdict {
  operation: string;
  outcome: "fits" | "misfit" | "unknown";
  /** Why. */
  message: string;
}

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const { url = RAILWAY_URL } = config.configuration(program, spec, args);
  const verdicts = await check(operations, url, signal);
  const isAction = Deno.env.get("GITHUB_ACTIONS") === "true";
  for (const verdict of verdicts) console.log(isAction ? annotation(verdict) : line(verdict));
  const are = (outcome: Verdict["outcome"]) =>
    verdicts.some((verdict) => verdict.outcome === outcome);
  return are("misfit") ? 1 : are("unknown") ? 3 : 0;
}

/** Sends the operations, each by itself. */
export function check(
  texts: Record<string, string>,
  url: string,
  signal?: AbortSignal,
): Promise<Verdict[]> {
  return Promise.all(
    Object.entries(texts).map(async ([operation, text]) => {
      const variables = Object.entries(placeholders).filter(([name]) => text.includes(`$${name}`));
      try {
        await send(text, Object.fromEntries(variables), { url, signal });
        const message = "it was answered without a token, so by something else than Railway";
        return { operation, outcome: "unknown", message };
      } catch (error) {
        if (!(error instanceof RailwayError)) throw error;
        return { operation, outcome: outcomeOf(error), message: error.message };
      }
    }),
  );
}

function outcomeOf({ reason }: RailwayError): Verdict["outcome"] {
  if (reason === "unauthorized") return "fits";
  // Railway has read it, and says no for another reason than the missing token.
  return reason === "invalid" || reason === "refused" ? "misfit" : "unknown";
}

const line = ({ operation, outcome, message }: Verdict) =>
  outcome === "fits"
    ? `${operation}: fits`
    : `${operation}: ${outcome === "misfit" ? "does not fit" : "could not be checked"}: ${message}`;

/** The line as GitHub Actions shows it beside the code. */
function annotation(verdict: Verdict): string {
  if (verdict.outcome === "fits") return line(verdict);
  const escaped = line(verdict).replaceAll("%", "%25").replaceAll("\r", "%0D").replaceAll(
    "\n",
    "%0A",
  );
  const level = verdict.outcome === "misfit" ? "error" : "warning";
  return `::${level} file=railway.ts,title=Railway's schema::${escaped}`;
}

if (import.meta.main) await config.runMain("check-schema", main);
