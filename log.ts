/**
 * The log, on stderr, which is not for results: JSON lines on Railway, readable text elsewhere. No
 * secret is in it (redact.ts).
 */
import {
  configure,
  getAnsiColorFormatter,
  getLogger,
  getTextFormatter,
  type LogRecord,
  type TextFormatter,
} from "@logtape/logtape";
import { redact, redactText } from "./redact.ts";

export type Level = "debug" | "info" | "warning" | "error";

/** What each line says of this process. */
const about: Record<string, string> = {};

/** Has each line say so, such as which worker this is. */
export const identify = (facts: Record<string, string>): void => void Object.assign(about, facts);

/** The trace of what is under way. */
let trace = (): string | undefined => undefined;

/** Has each line name the trace; tracing.ts says so where there is one. */
export const nameTrace = (of: typeof trace): void => void (trace = of);

/** The log of one script. */
export const logger = (name: string) => getLogger(["siding", name]);

/** The format once the log is set up. */
let format: TextFormatter | null = null;

/**
 * Sets up the log. It is text also where dev says so, whose Railway is a local one.
 *
 * @param level the least that is logged
 */
export async function setUpLog(level: Level): Promise<void> {
  const json = Deno.env.get("RAILWAY_ENVIRONMENT_ID") !== undefined &&
    Deno.env.get("SIDING_LOG_FORMAT") !== "text";
  const colour = Deno.stderr.isTerminal() && !Deno.noColor;
  format = json
    ? jsonLine
    : (colour ? getAnsiColorFormatter : getTextFormatter)({ timestamp: "time", value: shown });
  await configure({
    reset: true,
    sinks: { stderr: write },
    loggers: [
      { category: "siding", lowestLevel: level, sinks: ["stderr"] },
      { category: ["logtape", "meta"], lowestLevel: "warning", sinks: ["stderr"] },
    ],
  });
}

/** Says with what error a script ends: in its log on Railway, else, and before that is set up, as text. */
export function sayLast(name: string, text: string): void {
  if (format === jsonLine) logger(name).fatal`${text}`;
  else console.error(`${name}: ${redactText(text)}`);
}

const encoder = new TextEncoder();
function write(record: LogRecord): void {
  Deno.stderr.writeSync(encoder.encode(format!(withoutSecrets(record))));
}

/** The template's words and its values take turns: a value is hidden by the name it was given. */
function withoutSecrets(record: LogRecord): LogRecord {
  const names = [...String(record.rawMessage).matchAll(/\{\s*([^{}]*?)\s*\}/g)].map(([, n]) => n);
  return {
    ...record,
    message: record.message.map((part, index) =>
      index % 2 ? redact(part, names[(index - 1) / 2]) : redactText(String(part))
    ),
    properties: redact(record.properties) as Record<string, unknown>,
  };
}

/** As Railway reads it: its levels, and any field to search by: `@job:7`, `@level:error`. */
function jsonLine({ timestamp, level, category, message, properties }: LogRecord): string {
  const head = {
    timestamp: new Date(timestamp).toISOString(),
    level: { trace: "debug", warning: "warn", fatal: "error" }[level as string] ?? level,
    message: message.map((part, index) => index % 2 ? shown(part) : part).join(""),
    logger: category.join("."),
  };
  // The head once more, since a fact may be called like a part of it.
  return JSON.stringify({ ...head, ...about, trace: trace(), ...properties, ...head }) + "\n";
}

/** A value within a message. */
function shown(value: unknown): string {
  if (Array.isArray(value)) return value.map(shown).join(", ");
  if (typeof value !== "object" || value === null) return String(value);
  const { stack, cause } = value as { stack?: unknown; cause?: unknown };
  if (stack === undefined) return JSON.stringify(value);
  return cause === undefined ? String(stack) : `${stack}\ncaused by: ${shown(cause)}`;
}
