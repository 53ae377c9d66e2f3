/** What a script says of its flags: the text of --help, and its settings at the start. */
import type { Program, Setting } from "./config.ts";
import { schema } from "./db.ts";
import { redactText } from "./redact.ts";

/** The flag of a setting, as it is typed. */
export const flagOf = (name: string) => `--${kebab(name)}`;
/** A setting's name as flags have it. */
export const kebab = (name: string) => name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`);
/** The variable of a setting. */
export const variable = (name: string, setting: Setting<unknown>) =>
  setting.variable ?? `SIDING_${kebab(name).replaceAll("-", "_").toUpperCase()}`;

/** What the exit codes of scripts mean. */
const EXIT_CODES: Record<number, string> = {
  0: "done",
  1: "failure",
  2: "usage: a flag, a variable or an argument is wrong or missing",
  3: "the database could not be reached",
  130: "stopped by a second signal",
};

/** The answer to --help. */
export function helpText(program: Program, spec: Record<string, Setting<unknown>>): string {
  const lines = Object.entries(spec).map(([name, setting]) => {
    const flag = `--${kebab(name)}${setting.boolean ? "" : " …"}`;
    const fallback = setting.fallback;
    const shown = fallback === undefined || fallback === null || fallback === false ||
        (Array.isArray(fallback) && fallback.length === 0)
      ? ""
      : ` (${fallback})`;
    return { setting, line: `  ${flag.padEnd(26)} ${setting.help}${shown}` };
  });
  const some = (title: string, of: (setting: Setting<unknown>) => boolean) => {
    const these = lines.filter(({ setting }) => of(setting)).map(({ line }) => line);
    return these.length > 0 ? [title, ...these, ""] : [];
  };
  return [
    `${program.summary}`,
    "",
    `Usage: deno task ${program.name} ${program.usage ?? "[flags]"}`,
    "",
    ...some("Flags:", ({ flagOnly }) => !!flagOnly),
    ...some(
      "Settings, by flag or by variable; --poll-max-ms is SIDING_POLL_MAX_MS:",
      (s) => !s.flagOnly,
    ),
    "--help and --version are answered, and nothing is done.",
    "",
    "Exit codes:",
    ...Object.entries({ ...EXIT_CODES, ...program.exits })
      .filter(([, meaning]) => meaning !== null)
      .map(([code, meaning]) => `  ${code.padEnd(4)} ${meaning}`),
    "",
    `Example: ${program.example}`,
  ].join("\n");
}

/** Settings as they would be given, without secrets. @param changed only those that are not as by default */
export function lineOf(
  spec: Record<string, Setting<unknown>>,
  values: Record<string, unknown>,
  changed = false,
): string {
  const told = Object.entries(spec).filter(([name, { fallback }]) => {
    const value = values[name];
    if (value === undefined || value === null || value === false && fallback === false) {
      return false;
    }
    return !(changed && value === fallback) && !(Array.isArray(value) && value.length === 0);
  });
  const texts = told.map(([name, { secret, many }]) => {
    const value = values[name];
    if (secret) return `${flagOf(name)} …`;
    if (value === true) return flagOf(name);
    if (value === false) return `${flagOf(name)}=false`;
    const items = many ? value as unknown[] : [value];
    return items.map((item) => {
      const text = redactText(item instanceof Date ? item.toISOString() : String(item));
      return `${flagOf(name)} ${/^[\w.,:\/@+-]+$/.test(text) ? text : JSON.stringify(text)}`;
    }).join(" ");
  });
  // It is of no script alone: db.ts reads it.
  if (schema !== "siding") texts.unshift(`SIDING_SCHEMA=${schema}`);
  return texts.join(" ");
}
