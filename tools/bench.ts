#!/usr/bin/env -S deno run -A
/**
 * Measures this machine.
 *
 *     deno task bench web                     # 200 submits a second for a minute, 100 event streams open
 *     deno task bench web --seconds 10 --rate 50 --jobs 1000000
 *
 * It starts an embedded Postgres, unless DATABASE_URL_TEST names a server, on which it makes a database
 * of its own and drops it. It prints the machine, the versions and the settings with the figures.
 *
 * Exit codes: 0 done, 1 failure, also when a request failed; 2 usage.
 */
import * as config from "../config.ts";
import { benchWeb, textOf } from "../dev/bench/web.ts";

const program = {
  name: "bench",
  summary: "Measures this machine: web, the site under load and its pages among many jobs.",
  usage: "web [flags]",
  example: "deno task bench web --rate 200 --seconds 60 --streams 100",
};
const spec = {
  rate: config.flag(config.int(200, 1, 10_000, "submits a second")),
  seconds: config.flag(config.int(60, 1, 3600, "for so long")),
  streams: config.flag(config.int(100, 0, 1000, "event streams that are open meanwhile")),
  jobs: config.flag(config.int(1_000_000, 0, 10_000_000, "finished jobs that are there already")),
  json: config.flag(config.yes("print one JSON object instead of text")),
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const [what, ...more] = settings.rest;
  if (what !== "web" || more.length > 0) {
    throw new config.UsageError(`"${settings.rest.join(" ")}" cannot be measured: there is web`);
  }
  const report = await benchWeb(settings, signal, (line) => console.error(line));
  console.log(settings.json ? JSON.stringify(report) : textOf(report));
  return report.load.failed > 0 ? 1 : 0;
}

if (import.meta.main) await config.runMain("bench", main);
