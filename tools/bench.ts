#!/usr/bin/env -S deno run -A
/**
 * Measures this machine: Siding by itself and beside other queues.
 *
 *     deno task bench web                     # 200 submits a second for a minute, 100 event streams open
 *     deno task bench web --seconds 10 --rate 50 --jobs 1000000
 *     deno task bench all --quick             # every measurement, small, in less than two minutes
 *
 * Each measurement is a file in dev/bench/. It starts an embedded Postgres, unless DATABASE_URL_TEST
 * names a server, on which it makes databases of its own and drops them. It prints the machine, the
 * versions and the settings with the figures.
 *
 * Exit codes: 0 done, 1 failure, also when what was measured went wrong; 2 usage; 3 the database could
 * not be reached.
 */
import * as config from "../config.ts";
import type { Measurement } from "../dev/bench/common.ts";
import { bottlenecks } from "../dev/bench/bottlenecks.ts";
import { drain } from "../dev/bench/drain.ts";
import { enqueue } from "../dev/bench/enqueue.ts";
import { growth } from "../dev/bench/growth.ts";
import { held } from "../dev/bench/held.ts";
import { latency } from "../dev/bench/latency.ts";
import { peers } from "../dev/bench/peers.ts";
import { soak } from "../dev/bench/soak.ts";
import { web } from "../dev/bench/web.ts";

const measurements: Record<string, Measurement> = {
  ...{ drain, enqueue, latency, peers },
  ...{ bottlenecks, growth, held, soak, web },
};

/** What `peers` measures too, so that `all` need not. */
const IN_PEERS = ["drain", "enqueue", "latency"];

const common = {
  quick: config.flag(config.yes("small sizes: all measurements in less than two minutes")),
  json: config.flag(config.yes("print one JSON object instead of text")),
  svg: config.flag(config.text("draw a picture into this file; of all: into one a measurement")),
};
const list = Object.entries(measurements).map(([name, { summary }]) => `${name}, ${summary}`);
const program = {
  name: "bench",
  summary: `Measures this machine.\n\n  ${list.join("\n  ")}\n  all, each of them`,
  usage: "MEASUREMENT [flags], or MEASUREMENT --help",
  example: "deno task bench web --rate 200 --seconds 60 --streams 100",
  exits: { 1: "failure, also when what was measured went wrong" },
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  const what = Object.hasOwn(measurements, args[0] ?? "") ? args[0] : null;
  const names = what
    ? [what]
    : Object.keys(measurements).filter((name) => !IN_PEERS.includes(name));
  const flags = what ? measurements[what].flags : {};
  const about = what
    ? { ...program, summary: `Measures ${measurements[what].summary}.`, usage: `${what} [flags]` }
    : program;
  const settings = config.configuration(about, { ...flags, ...common }, args);
  if (settings.rest.length !== 1 || (!what && settings.rest[0] !== "all")) {
    const wrong = settings.rest.length > 0
      ? `"${settings.rest.join(" ")}" cannot be measured`
      : "what is to be measured is not said";
    throw new config.UsageError(
      `${wrong}: there are ${Object.keys(measurements).join(", ")}, and all`,
    );
  }

  const reports: Record<string, unknown> = {};
  let failed = false;
  for (const name of names) {
    const { flags, run, text, svg, failed: wrong } = measurements[name];
    const own = what ? settings : { ...defaultsOf(flags), ...settings };
    const report = await run(own, signal, progressOf(name)).finally(clearProgress);
    reports[name] = report;
    failed ||= wrong?.(report) ?? false;
    if (!settings.json) console.log(`${what ? "" : `== ${name}\n`}${text(report)}\n`);
    if (settings.svg) {
      const path = what ? settings.svg : settings.svg.replace(/(\.svg)?$/, `-${name}.svg`);
      await Deno.writeTextFile(path, svg(report));
    }
  }
  if (settings.json) console.log(JSON.stringify(what ? reports[what] : reports));
  return failed ? 1 : 0;
}

const defaultsOf = (flags: Measurement["flags"]) =>
  Object.fromEntries(Object.entries(flags).map(([name, { fallback }]) => [name, fallback]));

/** Progress is for whoever watches: one line on a terminal, written over, and nothing elsewhere. */
const write = (text: string) => {
  if (Deno.stderr.isTerminal()) Deno.stderr.writeSync(new TextEncoder().encode(`\r\x1b[K${text}`));
};
const progressOf = (name: string) => (line: string) => write(`${name}: ${line}`);
const clearProgress = () => write("");

if (import.meta.main) await config.runMain("bench", main);
