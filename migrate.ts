#!/usr/bin/env -S deno run --quiet --no-prompt -P=migrate
/**
 * Applies the migrations in migrations/ that the database has not had yet, in order.
 *
 *     deno task migrate            # apply
 *     deno task migrate --check    # say what is missing, and exit 1 if anything is
 *     deno task migrate --limit-role siding   # and bound that role's sessions in this database
 *
 * Each migration is sent as one string, which Postgres runs as one transaction: it is applied and
 * recorded, or neither, whatever happens to this process. Two processes may run at once; one
 * applies each migration, and the other sees it done. A migration waits for a table at most 2 s
 * at a time, since whatever comes after a waiting one has to wait behind it.
 *
 * Exit codes: 0 done, 1 failed or behind (`--check`), 2 usage, 3 the database could not be reached.
 */
import {
  configuration,
  flag,
  requireDatabase,
  runMain,
  settings,
  text,
  UsageError,
  yes,
} from "./config.ts";
import { checkSchema, codeOf, connect, describe, type Pool, schema } from "./db.ts";

/**
 * The server's own limits for a role's sessions. Siding's clients give up on a statement after 20 s
 * (SIDING_STATEMENT_LIMIT_MS); these end it on the server too, where a client that is frozen, or gone
 * without a word, would leave it at work or leave its transaction open. A role of Siding's own: an
 * application's longer statements under the same role would be ended as well.
 */
const ROLE_LIMITS = {
  statement_timeout: "30s",
  lock_timeout: "10s",
  idle_in_transaction_session_timeout: "30s",
};

/** A file of migrations/. */
export interface Migration {
  number: number;
  name: string;
  /** The oldest code, by the newest migration it knows, that still runs once this is applied. */
  floor: number;
  sql: string;
}

/** Tries of a migration that has to wait for a lock; with 2 s each and the pauses, about two minutes. */
const TRIES = 40;
const LOCK_TIMEOUT = "2s";

/** Reads migrations/ in order, with the schema's name put in. */
export function migrations(folder = new URL("./migrations/", import.meta.url)): Migration[] {
  const files = [...Deno.readDirSync(folder)].map((entry) => entry.name)
    .filter((name) => name.endsWith(".sql")).sort();
  return files.map((name, index) => {
    const content = Deno.readTextFileSync(new URL(name, folder));
    const number = Number(name.match(/^(\d{4})_/)?.[1]);
    const floor = content.match(/^-- oldest code that still runs on this: (\d+)$/m)?.[1];
    if (number !== index + 1) {
      throw new Error(`${name}: the ${index + 1}th file must have that number`);
    }
    if (!floor) throw new Error(`${name}: it does not say the oldest code that still runs on it`);
    return {
      number,
      name: name.replace(/^\d+_|\.sql$/g, ""),
      floor: Number(floor),
      sql: content.replace(/\bsiding\./g, `"${schema}".`),
    };
  });
}

/** Applies what is missing. @returns the migrations that this call applied */
export async function migrate(
  url: string,
  say: (line: string) => void = () => {},
  all = migrations(),
): Promise<Migration[]> {
  const sql = connect(url, { max: 1, name: "siding migrate", prepare: false });
  try {
    await patiently("the table of migrations", say, () => createLedger(sql));
    const applied: Migration[] = [];
    for (const migration of all) {
      const title = `${migration.number} ${migration.name}`;
      const done = await patiently(title, say, () => apply(sql, migration));
      if (done) {
        say(`applied migration ${title}`);
        applied.push(migration);
      }
    }
    // Also here: a newer deploy may have set a floor above this code.
    await checkSchema(sql);
    return applied;
  } finally {
    await sql.end();
  }
}

/** The migrations that the database has not had. */
export async function missing(url: string, all = migrations()): Promise<Migration[]> {
  const sql = connect(url, { max: 1, name: "siding migrate", prepare: false });
  try {
    const had = await appliedNumbers(sql);
    return all.filter((migration) => !had.has(migration.number));
  } finally {
    await sql.end();
  }
}

async function appliedNumbers(sql: Pool): Promise<Set<number>> {
  const [there] = await sql`select to_regclass(${`"${schema}".migrations`}) is not null as yes`;
  if (!there.yes) return new Set();
  const rows = await sql<{ number: number }[]>`select number from ${sql(schema)}.migrations`;
  return new Set(rows.map((row) => row.number));
}

async function createLedger(sql: Pool): Promise<boolean> {
  // Asked first: `create schema if not exists` needs the right to create even where it exists.
  const [has] = await sql`select to_regclass(${`"${schema}".migrations`}) is not null as table,
    to_regnamespace(${`"${schema}"`}) is not null as schema`;
  if (!has.schema) await sql`create schema if not exists ${sql(schema)}`;
  if (!has.table) {
    await sql`
      create table if not exists ${sql(schema)}.migrations (
        number integer primary key,
        name text not null,
        floor integer not null,
        applied_at timestamptz not null default now()
      )`;
  }
  return true;
}

/** Applies one migration, unless it was; false then. */
async function apply(sql: Pool, migration: Migration): Promise<boolean> {
  if ((await appliedNumbers(sql)).has(migration.number)) return false;
  // Its row first: a second process waits here for the first, instead of at some table within.
  await sql.unsafe(`
    set local lock_timeout = '${LOCK_TIMEOUT}';
    set local statement_timeout = 0;
    insert into "${schema}".migrations (number, name, floor)
      values (${migration.number}, '${migration.name.replaceAll("'", "''")}', ${migration.floor});
    ${migration.sql}`).simple();
  return true;
}

/** Repeats a step that somebody else's lock, or another process doing the same, was in the way of. */
async function patiently<T>(title: string, say: (line: string) => void, step: () => Promise<T>) {
  for (let round = 1;; round++) {
    try {
      return await step();
    } catch (error) {
      // 23505, 42710, 42P06, 42P07: the other process has just made the same schema, table or row.
      const inTheWay = /^(55P03|40P01|23505|42710|42P06|42P07)$/.test(codeOf(error));
      if (!inTheWay || round === TRIES) {
        throw new Error(`migration of ${title}: ${describe(error)}`, { cause: error });
      }
      say(`${title}: ${describe(error)}; trying again (${round} of ${TRIES})`);
      await new Promise((done) => setTimeout(done, 200 + Math.random() * 1000));
    }
  }
}

/** Sets {@linkcode ROLE_LIMITS} for a role in this database, for sessions from now on. */
export async function limitRole(url: string, role: string): Promise<void> {
  const sql = connect(url, { max: 1, name: "siding migrate", prepare: false });
  try {
    const [{ database }] = await sql`select current_database() as database`;
    for (const [name, value] of Object.entries(ROLE_LIMITS)) {
      await sql.unsafe(
        `alter role "${role.replaceAll('"', '""')}" in database "${database.replaceAll('"', '""')}"
         set ${name} = '${value}'`,
      );
    }
  } finally {
    await sql.end();
  }
}

async function main(args: string[]): Promise<number> {
  const { databaseUrl, check, limitRole: role } = configuration(
    {
      name: "migrate",
      summary: "Applies the migrations that the database has not had yet.",
      example: "DATABASE_URL=postgres://… deno task migrate --check",
      exits: {
        0: "done; with --check: none is missing",
        1: "failure; with --check: one is missing",
      },
    },
    {
      databaseUrl: settings.databaseUrl,
      check: flag(yes("change nothing; exit 1 if a migration is missing")),
      limitRole: flag(text("also set the time limits of this role's sessions in this database")),
    },
    args,
  );
  const url = requireDatabase(databaseUrl);
  if (check && role) throw new UsageError("--check changes nothing: it takes no --limit-role");
  if (check) {
    const behind = await missing(url);
    for (const { number, name } of behind) console.log(`missing: ${number} ${name}`);
    if (behind.length === 0) console.log("up to date");
    return behind.length === 0 ? 0 : 1;
  }
  const applied = await migrate(url, (line) => console.log(line));
  if (applied.length === 0) console.log("up to date");
  if (role) {
    await limitRole(url, role);
    console.log(
      `limited role ${role}: ${Object.entries(ROLE_LIMITS).map((l) => l.join(" ")).join(", ")}`,
    );
  }
  return 0;
}

if (import.meta.main) await runMain("migrate", main);
