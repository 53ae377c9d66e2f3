/**
 * What the tests share: a database of their own, and waiting for a condition (wait.ts).
 *
 * The server is the one of DATABASE_URL_TEST (`deno task test` sets it, as does CI). Without that
 * an embedded one is started for the test file, so that `deno test -A tests/queue_test.ts` works
 * by hand.
 *
 * With DATABASE_URL_TEST_POOLED, which is that server by way of PgBouncer in transaction mode, tests
 * and their processes connect through it.
 */
import postgres from "postgres";
import { connect, type Pool } from "../db.ts";
import { startPostgres } from "../dev/postgres.ts";
import { migrate } from "../migrate.ts";

export { waitFor } from "./wait.ts";

/** A database of its own for a test; dropped when disposed of. */
export interface TestDatabase extends AsyncDisposable {
  /** By way of the pooler, where there is one. */
  url: string;
  /** Without it, for what is the server's own: settings of sessions, proxies before the server. */
  direct: string;
}

// Started as the file is loaded, not in a test: no test's own resources include it. It ends with
// us.
const adminUrl = Deno.env.get("DATABASE_URL_TEST") || (await startPostgres()).url;
const pooledUrl = Deno.env.get("DATABASE_URL_TEST_POOLED") || undefined;
/** Whether tests connect through a pooler. */
export const pooled = pooledUrl !== undefined;
/** The server, for what makes databases of its own on it. */
export const testServer = adminUrl;
const migrations = new URL("../migrations/", import.meta.url);
let template: Promise<string> | undefined;

/** Makes a database with all migrations applied and nothing in it. */
export async function testDatabase(): Promise<TestDatabase> {
  return await copyOf(await (template ??= migratedTemplate()));
}

/** Makes a database with nothing in it, not even migrations. */
export async function emptyDatabase(): Promise<TestDatabase> {
  return await copyOf("template0");
}

async function copyOf(source: string): Promise<TestDatabase> {
  const name = `siding_test_${crypto.randomUUID().replaceAll("-", "")}`;
  // Copying the files takes 40 ms, writing all of it to the log (the default) 170.
  await withAdmin((sql) =>
    sql`create database ${sql(name)} template ${sql(source)} strategy file_copy`
  );
  return {
    url: urlOf(name, pooledUrl),
    direct: urlOf(name),
    async [Symbol.asyncDispose]() {
      await withAdmin((sql) => sql`drop database ${sql(name)} with (force)`);
    },
  };
}

/** What a test needs that a pooler in transaction mode cannot give. */
export interface Needs {
  /** Why it is skipped there, as its name says. */
  noPooler?: string;
}

/** The end of a test's name, and whether it is skipped. */
export function skipOf({ noPooler }: Needs): { note: string; ignore: boolean } {
  const ignore = pooled && noPooler !== undefined;
  return { note: ignore ? ` (skipped through PgBouncer: ${noPooler})` : "", ignore };
}

/** A test with a migrated database of its own, and a pool to it that is closed after. */
export function databaseTest(
  name: string,
  body: (sql: Pool, url: string, direct: string) => Promise<void>,
  needs: Needs = {},
): void {
  const { note, ignore } = skipOf(needs);
  Deno.test({
    name: name + note,
    ignore,
    async fn() {
      await using database = await testDatabase();
      const sql = testPool(database.url);
      try {
        await body(sql, database.url, database.direct);
      } finally {
        await sql.end({ timeout: 1 });
      }
    },
  });
}

/**
 * A pool on which a test may send several statements at once. Behind a pooler each needs a connection
 * of its own: it loses what comes behind another (see db.ts).
 */
export const testPool = (url: string): Pool => connect(url, { max: pooled ? 40 : 4 });

/** The database that is copied for each test: made once per server and state of the migrations. */
async function migratedTemplate(): Promise<string> {
  const name = `siding_template_${await migrationsHash()}`;
  await withAdmin(async (sql) => {
    // Test processes that start together wait here for the first. The lock goes with the
    // connection.
    await sql`select pg_advisory_lock(hashtextextended('siding_template', 0))`;
    const [known] =
      await sql`select datistemplate as complete from pg_database where datname = ${name}`;
    if (known?.complete) return;
    await sql`drop database if exists ${sql(name)} with (force)`;
    await sql`create database ${sql(name)}`;
    await migrate(urlOf(name));
    // The mark that it is complete. Nobody connects from here on: a database in use can't be
    // copied.
    await sql`alter database ${sql(name)} with is_template true allow_connections false`;
  });
  return name;
}

async function migrationsHash(): Promise<string> {
  const names = [...Deno.readDirSync(migrations)].map((entry) => entry.name).sort();
  const texts = names.map((name) => name + "\0" + Deno.readTextFileSync(new URL(name, migrations)));
  const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(texts.join("\0")));
  return new Uint8Array(hash).toHex().slice(0, 16);
}

async function withAdmin(action: (sql: postgres.Sql) => Promise<unknown>): Promise<void> {
  const sql = postgres(adminUrl, {
    max: 1,
    fetch_types: false,
    onnotice: () => {},
    connection: { lock_timeout: 60_000 },
  });
  try {
    await action(sql);
  } finally {
    await sql.end();
  }
}

function urlOf(database: string, server = adminUrl): string {
  const url = new URL(server);
  url.pathname = `/${database}`;
  return url.href;
}
