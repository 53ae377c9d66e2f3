/**
 * Keys of the API: an owner has some, and with one may see and submit that owner's jobs.
 *
 * A key is `siding_<id>_<secret>`, its secret 32 random bytes. It is shown once, when it is made; the
 * database has the SHA-256 of the secret only, which is enough for a secret that nobody can guess.
 */
import { timingSafeEqual } from "node:crypto";
import { schema, type Sql } from "./db.ts";
import { list, Refused } from "./queue.ts";

/** A key as it is listed, without what would let one use it. */
export interface Key {
  id: string;
  owner: string;
  name: string;
  webhook: string | null;
  created_at: Date;
  /** When it was last used, to the minute. */
  used_at: Date | null;
  revoked_at: Date | null;
}

const PATTERN = /^siding_(\d{1,18})_([A-Za-z0-9_-]{43})$/;
const columns = "id::text, owner, name, webhook, created_at, used_at, revoked_at";

const sha256 = async (bytes: Uint8Array<ArrayBuffer>) =>
  new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));

/**
 * Makes a key for an owner.
 *
 * @param webhook a URL that is told of the end of each job submitted with it
 * @returns the key, which is not to be had again
 * @throws Refused when a value is malformed
 */
export async function createKey(
  sql: Sql,
  owner: string,
  { name = "", webhook }: { name?: string; webhook?: string } = {},
): Promise<{ id: string; key: string }> {
  if (owner.length < 1 || owner.length > 200) {
    throw new Refused(`owner is ${owner.length} characters long: it must be 1 to 200`, "SD422");
  }
  if (name.length > 200) throw new Refused("name is longer than 200 characters", "SD422");
  if (webhook !== undefined && (!/^https?:\/\//.test(webhook) || webhook.length > 2000)) {
    throw new Refused(
      `webhook is "${webhook}": it must be a URL that begins with https:// or http://`,
      "SD422",
    );
  }
  const secret = crypto.getRandomValues(new Uint8Array(32));
  const hash = (await sha256(secret)).toHex();
  const [{ id }] = await sql<{ id: string }[]>`
    insert into ${sql(schema)}.keys (owner, name, webhook, hash)
    values (${owner}, ${name}, ${webhook ?? null}, decode(${hash}, 'hex')) returning id::text`;
  return {
    id,
    key: `siding_${id}_${secret.toBase64({ alphabet: "base64url", omitPadding: true })}`,
  };
}

/** The keys, the newest first; of one owner or of all. At most 1000. */
export const listKeys = (sql: Sql, owner: string | null = null): Promise<Key[]> =>
  list(sql<Key[]>`
    select ${sql.unsafe(columns)} from ${sql(schema)}.keys k
    where ${owner}::text is null or owner = ${owner} order by k.id desc limit 1000`);

/** Makes a key useless at once. @throws Refused when there is none with this id, or it is already */
export async function revokeKey(sql: Sql, id: string): Promise<void> {
  if (!/^\d{1,18}$/.test(id)) throw new Refused(`"${id}" is not a key's id`, "SD422");
  const rows = await sql`
    update ${sql(schema)}.keys set revoked_at = now()
    where id = ${id} and revoked_at is null returning id`;
  if (rows.length > 0) return;
  const [there] = await sql`select from ${sql(schema)}.keys where id = ${id}`;
  if (there) throw new Refused(`key ${id} was revoked before`, "SD409");
  throw new Refused(`there is no key ${id}`, "SD404");
}

/** The key with this text, or null when it is none or revoked. Notes its use, once a minute. */
export async function findKey(sql: Sql, text: string): Promise<Key | null> {
  const [, id, secret] = PATTERN.exec(text) ?? [];
  if (!id) return null;
  const [row] = await sql<(Key & { hash: string; stale: boolean })[]>`
    select ${sql.unsafe(columns)}, encode(hash, 'hex') as hash,
      coalesce(used_at < now() - interval '1 minute', true) as stale
    from ${sql(schema)}.keys where id = ${id} and revoked_at is null`;
  if (!row) return null;
  const { hash, stale, ...key } = row;
  const given = await sha256(Uint8Array.fromBase64(secret, { alphabet: "base64url" }));
  if (!timingSafeEqual(given, Uint8Array.fromHex(hash))) return null;
  if (stale) await sql`update ${sql(schema)}.keys set used_at = now() where id = ${id}`;
  return key;
}

/** The key with this id, or null when there is none or it is revoked: for who signed in with it. */
export async function keyById(sql: Sql, id: string): Promise<Key | null> {
  const [row] = await sql<Key[]>`
    select ${sql.unsafe(columns)} from ${sql(schema)}.keys
    where id = ${id} and revoked_at is null`;
  return row ?? null;
}
