/**
 * Flags and variables to one typed, checked object; and how an entry script starts and ends. The flag
 * `--poll-max-ms` is the variable SIDING_POLL_MAX_MS; the flag wins.
 */
import { parseArgs } from "@std/cli";
import { z } from "zod";
import { describe, isTransient, parameterOf, pause, poolerMistake, schemaProblem } from "./db.ts";
import { flagOf, helpText, kebab, lineOf, variable } from "./help.ts";
import { identify, type Level, logger, sayLast, setUpLog as setUp } from "./log.ts";
import { hide } from "./redact.ts";

export { flagOf, identify, logger };

/** The version of this code, in logs and in the table processes. */
export const VERSION = "0.1.0";

/** The command line or a variable is wrong. Ends a script with exit code 2. */
export class UsageError extends Error {
  override name = "UsageError";
}

/** A setting: how it is read, what it is when absent, and what to say of it. */
export interface Setting<T> {
  parse: (text: string) => T;
  /** What a value must be, as an error says it. */
  rule: string;
  fallback: T;
  help: string;
  /** A flag that takes no value. */
  boolean?: boolean;
  /** May be given several times. */
  many?: boolean;
  /** Of one command only: read from its flag and not from a variable. */
  flagOnly?: boolean;
  /** Its variable, where that is not the flag's name with SIDING_ before it. */
  variable?: string;
  /** Its value is shown nowhere. */
  secret?: boolean;
}

const checked = <T>(schema: z.ZodType<T>) => (text: string): T => schema.parse(text);

/** A whole number. */
export const int = (fallback: number, min: number, max: number, help: string): Setting<number> => ({
  parse: checked(z.string().regex(/^-?\d+$/).transform(Number).pipe(z.number().min(min).max(max))),
  rule: `it must be a whole number from ${min} to ${max}`,
  fallback,
  help,
});
/** A number, with a point or without. */
export const decimal = (fallback: number, max: number, help: string): Setting<number> => ({
  parse: checked(z.string().regex(/^\d+(\.\d+)?$/).transform(Number).pipe(z.number().max(max))),
  rule: `it must be a number from 0 to ${max}`,
  fallback,
  help,
});
/** A text; `undefined` when absent. */
export const text = (help: string): Setting<string | undefined> => ({
  parse: (value) => value,
  rule: "",
  fallback: undefined,
  help,
});
/** The address of a service; `undefined` when absent. */
export const url = (help: string): Setting<string | undefined> => ({
  parse: checked(z.url({ protocol: /^https?$/ })),
  rule: "it must be a URL that begins with https:// or http://",
  fallback: undefined,
  help,
});
/** A secret of at least 32 characters; `undefined` when absent. Its value is shown nowhere. */
export const secret = (help: string): Setting<string | undefined> => ({
  parse: checked(z.string().min(32)),
  rule: "it must have at least 32 characters",
  fallback: undefined,
  help,
  secret: true,
});
/** An instant, such as 2026-12-01T08:00:00Z; `undefined` when absent. */
export const instant = (help: string): Setting<Date | undefined> => ({
  parse: checked(z.iso.datetime({ offset: true }).transform((text) => new Date(text))),
  rule: "it must be an instant such as 2026-12-01T08:00:00Z",
  fallback: undefined,
  help,
});
/** A comma-separated list of names; null, which is all, when absent. */
const nameList = (help: string): Setting<string[] | null> => ({
  parse: (value) => value.split(",").map((name) => checked(z.string().regex(NAME))(name.trim())),
  rule: "it must be names of [a-z0-9_.-], at most 63 long, with commas between",
  fallback: null,
  help,
});
/** A switch; as a flag it takes no value. */
export const yes = (help: string, fallback = false): Setting<boolean> => ({
  parse: (value) => checked(z.enum(["true", "false", "1", "0"]))(value) in { true: 1, "1": 1 },
  rule: "it must be true or false",
  fallback,
  help,
  boolean: true,
});
/** A setting that is read from a flag of one command and from no variable. */
export const flag = <T>(setting: Setting<T>): Setting<T> => ({ ...setting, flagOnly: true });
/** A flag that may be given several times. */
export const many = (help: string): Setting<string[]> => ({
  parse: (value) => [value],
  rule: "",
  fallback: [],
  help,
  many: true,
  flagOnly: true,
});

/** The names of queues and kinds. */
export const NAME = /^[a-z0-9_.-]{1,63}$/;

/** Settings that several scripts share; each script names those it takes. */
export const settings = {
  databaseUrl: {
    ...text("the Postgres of the queue; the variable is DATABASE_URL"),
    variable: "DATABASE_URL",
    secret: true,
    parse: checked(z.string().regex(/^postgres(ql)?:\/\//)),
    rule: "it must begin with postgres://",
  },
  prepare: yes(
    "prepare statements; false for PgBouncer before 1.21, as ?prepare=false in the URL",
    true,
  ),
  statementLimitMs: int(20_000, 100, 600_000, "give up on a statement's reply after this"),
  concurrency: int(1, 1, 1000, "jobs at a time"),
  queues: nameList("work these queues only"),
  kinds: nameList("work these kinds only"),
  pool: {
    parse: checked(z.string().regex(NAME)),
    rule: "it must be a name of [a-z0-9_.-], at most 63 long",
    fallback: "default",
    help: "the workers that one controller scales together",
  } as Setting<string>,
  pollMinMs: int(15, 1, 60_000, "how often a worker looks for jobs that had some in the last 5 s"),
  pollMaxMs: int(2000, 10, 60_000, "how often an idle worker looks for jobs, give or take a fifth"),
  aheadMs: int(50, 0, 1000, "claim ahead what is done within this, at the pace of the last jobs"),
  heldBackMs: int(1000, 20, 60_000, "how long one job may hold back others, or their outcomes"),
  heartbeatMs: int(15_000, 100, 60_000, "how often a worker renews its leases"),
  leaseS: int(120, 1, 3600, "how long a job stays with a worker that is not heard of"),
  recoverMs: int(30_000, 100, 600_000, "how often a worker looks for what silent ones left"),
  drainS: int(20, 0, 3600, "how long a stopped worker lets its jobs go on"),
  maxCrashes: int(2, 1, 100, "the crash of a job's worker that fails the job"),
  maxReleases: int(5, 0, 1000, "how often a stopped worker may give a job back before it fails"),
  stallS: int(120, 1, 86_400, "how long a worker's look for jobs may hang"),
  lookUpS: int(60, 1, 86_400, "how often a service is asked for a request in review"),
  unknownKindS: int(3600, 1, 864_000, "how long a job of a kind no worker knows may wait"),
  retentionS: int(2_592_000, 60, 315_360_000, "how long finished jobs are kept"),
  fileGraceS: int(3600, 1, 864_000, "how long a file may be without a job"),
  maxFileBytes: int(536_870_912, 1, 17_179_869_184, "the largest file"),
  jobs: {
    ...text("the module with the kinds of job; jobs.ts if not given"),
  },
  railwayUrl: url("Railway's API, where it is another than the real one"),
  railwayRegion: text("the region whose replicas are scaled, where the service has several"),
  railwayWrite: {
    parse: checked(z.enum(["update", "commit"])),
    rule: "it must be update or commit",
    fallback: "update",
    help: "how the count is set: serviceInstanceUpdate, or environmentPatchCommit",
  } as Setting<"update" | "commit">,
  railwayCallsPerHour: int(500, 1, 10_000, "calls of Railway's API; Hobby has 1000, Pro 10000"),
  logLevel: {
    parse: checked(z.enum(["debug", "info", "warning", "error"])),
    rule: "it must be debug, info, warning or error",
    fallback: "info",
    help: "what to log",
  } as Setting<Level>,
} satisfies Record<string, Setting<unknown>>;

type Values<S> = { [K in keyof S]: S[K] extends Setting<infer T> ? T : never };

/** What a script is called, does and takes. */
export interface Program {
  name: string;
  summary: string;
  /** How it is called, after its name. */
  usage?: string;
  example: string;
  /** What its exit codes mean, where that is not what help.ts says; null: it has none such. */
  exits?: Record<number, string | null>;
}

/**
 * Reads a script's flags and variables. `--help` and `--version` are answered here.
 *
 * @returns the settings, and the arguments that are no flags
 * @throws UsageError that names the flag or variable, its value and the rule
 */
export function configuration<S extends Record<string, Setting<unknown>>>(
  program: Program,
  spec: S,
  args: readonly string[],
): Values<S> & { rest: string[] } {
  const nameOf = new Map(Object.keys(spec).map((name) => [kebab(name), name]));
  const unknown: string[] = [];
  const parsed = parseArgs(withValues(args, (flag) => spec[nameOf.get(flag) ?? ""]), {
    string: [...nameOf].filter(([, name]) => !spec[name].boolean).map(([flag]) => flag),
    boolean: ["help", "version", ...[...nameOf].filter(([, n]) => spec[n].boolean).map(([f]) => f)],
    collect: [...nameOf].filter(([, name]) => spec[name].many).map(([flag]) => flag),
    // Absent, and not false: the variable counts then.
    default: Object.fromEntries([...nameOf.keys()].map((flag) => [flag, undefined])),
    unknown: (arg, key) => key === undefined || (unknown.push(arg), false),
  });
  if (parsed.help) {
    console.log(helpText(program, spec));
    Deno.exit(0);
  }
  if (parsed.version) {
    console.log(`${program.name} ${VERSION}`);
    Deno.exit(0);
  }
  if (unknown.length > 0) {
    throw new UsageError(`there is no flag ${unknown[0]}; --help shows those there are`);
  }
  if (program.usage === undefined && parsed._.length > 0) {
    throw new UsageError(`"${parsed._[0]}" is not wanted: ${program.name} takes flags only`);
  }
  if (schemaProblem) throw new UsageError(schemaProblem);

  const values: Record<string, unknown> = { rest: parsed._.map(String) };
  for (const [flag, name] of nameOf) {
    const setting = spec[name];
    const given = parsed[flag];
    if (setting.many) {
      values[name] = given ?? setting.fallback;
      continue;
    }
    const fromVariable = setting.flagOnly
      ? undefined
      : Deno.env.get(variable(name, setting)) || undefined;
    const value = given === undefined ? fromVariable : String(given);
    if (value !== undefined && setting.secret) hide(value);
    if (value === undefined) {
      values[name] = setting.fallback;
      continue;
    }
    try {
      values[name] = setting.parse(value);
    } catch {
      const source = given === undefined ? variable(name, setting) : `--${flag}`;
      const shown = setting.secret ? " will not do" : ` is "${value}"`;
      throw new UsageError(`${source}${shown}: ${setting.rule}`);
    }
  }
  if (script) {
    script.settings = lineOf(spec, values);
    // Who has no log says at once what it was given.
    const given = lineOf(spec, values, true);
    if (!("logLevel" in spec) && given) console.error(`${script.name}: ${given}`);
  }
  return values as Values<S> & { rest: string[] };
}

/** The script that this process runs, and its settings in one line; null within a test. */
let script: { name: string; settings: string } | null = null;

/** Ties each flag to its value, which may begin with a dash, such as -3. */
function withValues(
  args: readonly string[],
  find: (flag: string) => Setting<unknown> | undefined,
): string[] {
  const tied: string[] = [];
  for (let i = 0; i < args.length; i++) {
    const setting = args[i].startsWith("--") ? find(args[i].slice(2)) : undefined;
    if (!setting || setting.boolean) {
      tied.push(args[i]);
      continue;
    }
    const value = args[i + 1];
    if (value === undefined || /^--[a-z]/.test(value)) {
      throw new UsageError(`${args[i]} wants a value`);
    }
    tied.push(`${args[i++]}=${value}`);
  }
  return tied;
}

/** The database's URL, which most scripts cannot do without. */
export function requireDatabase(url: string | undefined): string {
  if (url === undefined) {
    throw new UsageError("DATABASE_URL is not set: it names the Postgres of the queue");
  }
  try {
    decodeURIComponent(new URL(url).href);
  } catch {
    // Not the value: it may hold a password, and the message of the failure quotes it.
    throw new UsageError(
      "DATABASE_URL is not a URL: special characters in a password are written as %40 and the like",
    );
  }
  const prepare = parameterOf(url, "prepare");
  if (prepare !== null && !/^(true|false)$/.test(prepare)) {
    throw new UsageError(`DATABASE_URL has prepare=${prepare}: it must be true or false`);
  }
  return url;
}

/** Sets up the log (log.ts), and begins it with the settings. */
export async function setUpLog(level: Level): Promise<void> {
  await setUp(level);
  if (script) logger(script.name).info`settings: ${script.settings}`;
}

/**
 * Repeats a step, which returns the milliseconds until the next, until `signal` is aborted.
 *
 * @param sooner a signal, asked for after each step, that makes the next one due at once
 */
export async function repeat(
  name: string,
  step: () => Promise<number>,
  signal: AbortSignal,
  sooner: () => AbortSignal = () => signal,
): Promise<void> {
  while (!signal.aborted) {
    let delayMs: number;
    try {
      delayMs = await step();
    } catch (error) {
      logger(name).warn("{error}", { error: describe(error) });
      delayMs = 500 + Math.random() * 500;
    }
    if (delayMs > 0) await pause(delayMs, signal, sooner()); // since a timer of none is one of 1 ms
  }
}

/** The exit code of what a script ended with: 2 usage, 3 the database could not be reached, else 1. */
export function exitCode(error: unknown): number {
  const causes = [error, error instanceof Error ? error.cause : null];
  if (error instanceof UsageError || causes.some(poolerMistake)) return 2;
  return causes.some(isTransient) ? 3 : 1;
}

/** One Ctrl-C comes twice where `deno task` passes on what the terminal sends to all (seen: within 6 ms). */
const SAME_SIGNAL_MS = 500;

/** What comes of an error that nothing caught: the end, with its stack where the log is. */
let uncaught = (name: string, error: unknown): void => {
  sayLast(name, `uncaught: ${Deno.inspect(error, { colors: false })}`);
  Deno.exit(1);
};

/** Has a script go on after an error that nothing caught. */
export const surviveUncaught = (say: (error: unknown) => void): void =>
  void (uncaught = (_, error) => say(error));

/**
 * Runs a script's `main` to the end of the process. The first SIGTERM or SIGINT aborts `signal`,
 * upon which `main` comes to an end in its own time; the second ends the process at once (130).
 *
 * @param main returns the exit code, 0 if nothing
 */
export async function runMain(
  name: string,
  main: (args: string[], signal: AbortSignal) => Promise<number | void>,
): Promise<never> {
  script = { name, settings: "" };
  const stop = new AbortController();
  let stoppedAtMs = 0;
  const onSignal = () => {
    if (!stop.signal.aborted) {
      stoppedAtMs = performance.now();
      stop.abort();
    } else if (performance.now() - stoppedAtMs > SAME_SIGNAL_MS) Deno.exit(130);
  };
  for (const signal of ["SIGTERM", "SIGINT"] as const) Deno.addSignalListener(signal, onSignal);
  for (const kind of ["unhandledrejection", "error"] as const) {
    addEventListener(kind, (event) => {
      event.preventDefault();
      const error = "reason" in event ? event.reason : (event as ErrorEvent).error;
      // postgres.js 3.4.9 may throw where nobody can catch it when a connection ends while a write to
      // it is pending. Its statement fails, or is given up, all the same.
      if (!/at Immediate\.nextWrite .*postgres/.test(error?.stack ?? "")) uncaught(name, error);
    });
  }
  // A process that another started for itself ends when that one is gone, however it went. It is told
  // the other's id: by now that one may be gone already.
  const parent = Number(Deno.env.get("SIDING_END_WITH_PARENT") || 0);
  if (parent) setInterval(() => Deno.ppid !== parent && onSignal(), SAME_SIGNAL_MS + 100);
  try {
    Deno.exit(await main(Deno.args.slice(), stop.signal) ?? 0);
  } catch (error) {
    if (stop.signal.aborted && error === stop.signal.reason) Deno.exit(0); // stopped before it began
    sayLast(name, describe(error));
    Deno.exit(exitCode(error));
  }
}
