/** The processes that are alive: workers, controllers and sites, a row for each boot. */
import { schema, type Sql } from "./db.ts";
import { names } from "./queue.ts";

/** What a process says of itself; see the table processes. */
export interface Registration {
  role: "worker" | "controller" | "web";
  pool?: string;
  name: string;
  version: string;
  /** Null: every queue. */
  queues?: readonly string[] | null;
  kinds?: readonly string[];
  knownKinds?: readonly string[];
  /** Those of its kinds whose jobs end with it, since they run in its own process. */
  inlineKinds?: readonly string[];
  concurrency?: number;
}

/** Adds this boot of a process. @returns its boot_id, by which its jobs and its row are known */
export async function register(sql: Sql, it: Registration): Promise<string> {
  const bootId = crypto.randomUUID();
  await sql`
    insert into ${sql(schema)}.processes
      (boot_id, role, pool, name, version, queues, kinds, known_kinds, inline_kinds, concurrency)
    values (${bootId}, ${it.role}, ${it.pool ?? "default"}, ${it.name}, ${it.version},
      ${it.queues ? names(it.queues) : null}::text[], ${names(it.kinds ?? [])}::text[],
      ${names(it.knownKinds ?? [])}::text[], ${names(it.inlineKinds ?? [])}::text[],
      ${it.concurrency ?? 1})`;
  return bootId;
}

/** Removes a process that stops. */
export async function deregister(sql: Sql, bootId: string): Promise<void> {
  await sql`delete from ${sql(schema)}.processes where boot_id = ${bootId}`;
}
