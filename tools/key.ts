#!/usr/bin/env -S deno run -A
/**
 * Keys of the API. A key lets its bearer see and submit the jobs of its owner, and nothing else.
 *
 *     deno task key create acme --name "their site"            # prints the key, which is shown this once
 *     deno task key create acme --webhook https://acme.example/siding   # told of the end of each job
 *     deno task key list --owner acme
 *     deno task key secret acme                                # what signs that owner's webhooks
 *     deno task key revoke 7                                   # good for nothing from now on
 *
 * Exit codes: 0 done; 1 refused, or failed; 2 usage; 3 the database could not be reached.
 */
import * as config from "../config.ts";
import { checkSchema, Database } from "../db.ts";
import { webhookSecretOf } from "../jobs/webhook.ts";
import { createKey, type Key, listKeys, revokeKey } from "../keys.ts";

const program = {
  name: "key",
  summary: "Makes, lists and revokes keys of the API.",
  usage: "create OWNER | list | secret OWNER | revoke ID [flags]",
  example: 'deno task key create acme --name "their site"',
  exits: { 1: "refused, or failed" },
};
const { databaseUrl, prepare, statementLimitMs } = config.settings;
const spec = {
  ...{ databaseUrl, prepare, statementLimitMs },
  name: config.flag(config.text("create: what the key is for, to tell it from others")),
  webhook: config.flag(config.url("create: a URL that is told of the end of each of its jobs")),
  owner: config.flag(config.text("list: the keys of this owner only")),
  webhookSecret: config.secret("secret: that of the site and the workers"),
  json: config.flag(config.yes("print one JSON object instead of text")),
};
type Settings = ReturnType<typeof config.configuration<typeof spec>>;

/** The flags and arguments that each command takes besides those of all. */
const commands: Record<string, { flags: string[]; wants: string | null }> = {
  create: { flags: ["name", "webhook"], wants: "OWNER, whose jobs it is for" },
  list: { flags: ["owner"], wants: null },
  secret: { flags: [], wants: "OWNER, whose webhooks it signs" },
  revoke: { flags: [], wants: "ID, the number of a key that list shows" },
};

export async function main(args: string[]): Promise<number> {
  const settings = config.configuration(program, spec, args);
  const [command = "", ...values] = settings.rest;
  check(command, values, settings);
  const url = config.requireDatabase(settings.databaseUrl);
  const options = { max: 1, name: "siding key", prepare: settings.prepare };
  const db = new Database(url, options, settings.statementLimitMs);
  try {
    await db.run(checkSchema);
    const { text, json } = await commanded(db, command, values[0], settings);
    console.log(settings.json ? JSON.stringify(json) : text.join("\n"));
    return 0;
  } finally {
    await db.close();
  }
}

/** @throws config.UsageError that names the command, the value and the rule */
function check(command: string, values: string[], settings: Settings): void {
  if (!Object.hasOwn(commands, command)) {
    const given = command ? `there is no command "${command}"` : "a command is missing";
    throw new config.UsageError(`${given}: there are create, list, secret and revoke`);
  }
  const { flags, wants } = commands[command];
  if (wants && values.length === 0) throw new config.UsageError(`${command} wants ${wants}`);
  const [odd] = values.slice(wants ? 1 : 0);
  if (odd !== undefined) throw new config.UsageError(`"${odd}" is not wanted by ${command}`);
  if (command === "revoke" && !/^[1-9]\d{0,17}$/.test(values[0])) {
    throw new config.UsageError(`"${values[0]}" is not the id of a key: list shows them`);
  }
  for (const flag of ["name", "webhook", "owner"] as const) {
    if (settings[flag] !== undefined && !flags.includes(flag)) {
      throw new config.UsageError(`${command} takes no ${config.flagOf(flag)}`);
    }
  }
}

/** What a command did, for people and for programs. */
interface Done {
  text: string[];
  json: unknown;
}

async function commanded(
  db: Database,
  command: string,
  value: string,
  settings: Settings,
): Promise<Done> {
  if (command === "create") {
    const { name, webhook } = settings;
    const made = await db.run((sql) => createKey(sql, value, { name, webhook }));
    return { text: [made.key], json: { ...made, owner: value } };
  }
  if (command === "secret") {
    if (!settings.webhookSecret) {
      throw new config.UsageError("SIDING_WEBHOOK_SECRET is not set: owners' secrets come of it");
    }
    const secret = webhookSecretOf(settings.webhookSecret, value);
    return { text: [secret], json: { owner: value, secret } };
  }
  if (command === "revoke") {
    await db.run((sql) => revokeKey(sql, value));
    return { text: [`key ${value} is revoked`], json: { id: value } };
  }
  const items = await db.run((sql) => listKeys(sql, settings.owner));
  return { text: items.length ? items.map(line) : ["there is no key"], json: { items } };
}

function line({ id, owner, name, webhook, created_at, used_at, revoked_at }: Key): string {
  return [
    `key ${id} of ${owner}${name ? ` "${name}"` : ""}`,
    `made ${created_at.toISOString()}`,
    used_at ? `last used ${used_at.toISOString()}` : "never used",
    ...(revoked_at ? [`revoked ${revoked_at.toISOString()}`] : []),
    ...(webhook ? [`tells ${webhook}`] : []),
  ].join(", ");
}

if (import.meta.main) await config.runMain("key", main);
