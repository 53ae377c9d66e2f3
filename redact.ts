/**
 * Takes secrets out of what is logged, and out of what is sent to Sentry: those that this process
 * was given, and what looks like one by its name or by its form. It rather hides too much.
 */

const HIDDEN = "…";
/** Deeper than this an object is not looked into. */
const MAX_DEPTH = 8;
/** Shorter secrets are hidden by their name only: as a text they could be any word. */
const MIN_LENGTH = 12;

/** What the names of secrets contain: of fields, headers, variables and parameters of a URL. */
const NAMES =
  "pass(?:word|wd|phrase|code)|pwd|secret|token|credential|authori[sz]ation|cookie|jwt|" +
  "signature|(?:api|access|account|auth|private|signing|encryption)[_-]?key|dsn|\\bauth\\b|" +
  "(?:database|webhook)[_-]?url|connection[_-]?string";
const isSecretName = (name: string) => new RegExp(NAMES, "i").test(name);

/** What stands between a name and its value: "a": 1, a=1, a => 1, ["a", 1]. */
const BETWEEN = `["'\\\\]*\\s*(?:[:=]>?|(?<=["']\\s*),)\\s*`;
/** What is in brackets, which may hold some more. */
const within = (open: string, close: string) =>
  `${open}(?:[^${open}${close}]|${open}[^${open}${close}]*${close})*(?:${close}|$)`;
/** A value: in quotes (JSON within JSON has them as \"), in brackets (to the end, where there are many), or a word. */
const VALUE = [
  `(\\\\*)"[^]*?(?:(?<!\\\\)\\2"|$)`,
  `'[^']*(?:'|$)`,
  ...[within("\\[", "\\]"), within("\\{", "\\}"), "[[{][^]*"],
  `(?:[^\\s"'&\\\\]|\\\\(?!["']))+`,
].join("|");

/** Forms by which a secret is known, and what is left of it. The first that fits comes first. */
const FORMS: [RegExp, string][] = [
  [/-----BEGIN [A-Z ]*PRIVATE KEY-----[^]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)/g, HIDDEN],
  // To the end of the line: a password may hold what is not allowed in a URL.
  [/\bpostgres(?:ql)?:\/\/.*/g, `postgres://${HIDDEN}`],
  [/\b([a-z][a-z0-9+.-]{1,30}:\/\/)[^\s/?#"'<>]+@/gi, `$1${HIDDEN}@`],
  // A header's value is the rest of its line, whatever the scheme, however many cookies.
  [/((?:authori[sz]ation|cookie)\s*:[^\S\n]*)(?=[\w-]).+/gi, `$1${HIDDEN}`],
  // "password": "…", ?api_key=…, AUTH_TOKEN=…
  [
    new RegExp(
      `([\\w-]{0,40}(?:${NAMES})[\\w-]{0,40}${BETWEEN})(?:(?:bearer|basic)\\s+)?(?:${VALUE})`,
      "gi",
    ),
    `$1${HIDDEN}`,
  ],
  [/\b(bearer|basic) +(?=[^\s]*[\d=._-])[\w.~+/=-]{6,}/gi, `$1 ${HIDDEN}`],
  [/\beyJ[\w-]+\.[\w-]+\.[\w-]*/g, HIDDEN],
  [
    /\b(?:[spr]k_(?:live|test)_|sk-|gh[pousr]_|github_pat_|xox[a-z]-|whsec_|AKIA)[\w+/=-]{12,}/g,
    HIDDEN,
  ],
  [/(\bhooks\.slack\.com\/)[\w/]+/g, `$1${HIDDEN}`],
];

/** The secrets that this process was given. */
const known = new Set<string>();

/** Has a secret hidden from now on, wherever it turns up; of a URL also its parts. */
export function hide(secret: string): void {
  const parts = [secret];
  const url = URL.parse(secret);
  if (url) {
    const { username, password, pathname, search } = url;
    parts.push(password);
    // The address of a webhook, or Sentry's, is a secret by its path or by its user.
    if (/^https?:$/.test(url.protocol)) parts.push(username, pathname, pathname + search);
  }
  for (const part of parts) {
    for (const form of [part, decoded(part)]) if (form.length >= MIN_LENGTH) known.add(form);
  }
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** A text without secrets. */
export function redactText(text: string): string {
  for (const secret of [...known].sort((a, b) => b.length - a.length)) {
    text = text.replaceAll(secret, HIDDEN);
  }
  for (const [form, left] of FORMS) text = text.replace(form, left);
  return text;
}

/**
 * Whatever is to be logged, as a JSON value without secrets. An error becomes an object with its
 * message, stack, causes and fields.
 *
 * @param name the name of the field that holds it
 */
export function redact(value: unknown, name = "", holders: readonly object[] = []): unknown {
  if (value === null || value === undefined || typeof value === "boolean") return value;
  if (isSecretName(name)) return HIDDEN;
  if (typeof value === "number") return value;
  if (typeof value !== "object") return redactText(String(value));
  if (holders.includes(value)) return "[circular]";
  if (holders.length === MAX_DEPTH) return "[deep]";
  try {
    return redactObject(value, [...holders, value]);
  } catch {
    return "[unreadable]"; // a getter that throws, for example
  }
}

function redactObject(value: object, holders: readonly object[]): unknown {
  if (value instanceof Date) return value.toJSON();
  if (value instanceof URL || value instanceof URLSearchParams) return redactText(String(value));
  if (ArrayBuffer.isView(value) || value instanceof ArrayBuffer) {
    return `[${value.byteLength} bytes]`;
  }
  if (value instanceof Set) value = [...value];
  if (Array.isArray(value)) {
    const [first, second, ...more] = value;
    const isPair = value.length === 2 && more.length === 0 && typeof first === "string";
    if (isPair) return [redact(first, "", holders), redact(second, first, holders)];
    return value.map((item) => redact(item, "", holders));
  }
  const fields: [string, unknown][] = value instanceof Map || value instanceof Headers
    ? [...value].map(([key, item]) => [String(key), item])
    : Object.entries(value);
  if (value instanceof Error) fields.unshift(...partsOf(value));
  const named = fields.find(([key]) => key === "name" || key === "key")?.[1];
  const isSecret = typeof named === "string" && isSecretName(named);
  return Object.fromEntries(
    // {name: "token", value: …}
    fields.map(([key, item]) => [
      redactText(key),
      redact(item, isSecret && key === "value" ? String(named) : key, holders),
    ]),
  );
}

/** What an error has that is no field to be enumerated. */
function partsOf(error: Error): [string, unknown][] {
  const { name, message, stack, cause } = error;
  const parts: [string, unknown][] = [["name", name], ["message", message], ["stack", stack]];
  if (cause !== undefined) parts.push(["cause", cause]);
  if (error instanceof AggregateError) parts.push(["errors", error.errors]);
  return parts;
}
