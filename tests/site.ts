/** The site as a process of its own, for the tests. */
import { fileURLToPath } from "node:url";
import { type Pool, schema } from "../db.ts";
import { createKey } from "../keys.ts";
import { type Script, startScript } from "./processes.ts";
import { waitFor } from "./wait.ts";

export const adminToken = "an-admin-token-for-the-tests-only-0001";

/** A site that listens. */
export interface RunningSite extends Script {
  /** Such as http://127.0.0.1:34567, without a slash at the end. */
  address: string;
  adminToken: string;
  /** Asks for a path, as the admin unless another `token` is given, or none by null. */
  ask(path: string, init?: RequestInit & { token?: string | null }): Promise<Response>;
}

/**
 * Starts web.ts with the tests' kinds and waits until it listens.
 *
 * @param args more flags, such as `--submits-per-minute 5`
 * @param env more variables, such as SIDING_WEBHOOK_SECRET
 */
export async function startSite(
  url: string,
  args: string[] = [],
  env: Record<string, string> = {},
): Promise<RunningSite> {
  const kinds = fileURLToPath(new URL("kinds.ts", import.meta.url));
  const flags = ["--port", "0", "--host", "127.0.0.1", "--jobs", kinds];
  const script = startScript("web.ts", [...flags, ...args], {
    DATABASE_URL: url,
    SIDING_ADMIN_TOKEN: adminToken,
    SIDING_SESSION_SECRET: "a-session-secret-for-the-tests-only-01",
    ...env,
  });
  let over = false;
  script.ended.then(() => over = true);
  const port = await waitFor(() => {
    if (over) throw new Error(`the site ended: ${script.log()}`);
    return /listening on port (\d+)/.exec(script.log())?.[1];
  }, "the site to listen");
  const address = `http://127.0.0.1:${port}`;
  return {
    ...script,
    address,
    adminToken,
    ask(path, { token = adminToken, headers, ...init } = {}) {
      const all = new Headers(headers);
      if (token !== null) all.set("authorization", `Bearer ${token}`);
      return fetch(address + path, { ...init, headers: all });
    },
  };
}

/** A key of an owner's, as text. */
export const keyOf = async (sql: Pool, owner: string) => (await createKey(sql, owner)).key;

/** The rows of one of Siding's tables. */
export const count = async (sql: Pool, table: string) =>
  Number((await sql`select count(*) as n from ${sql(schema)}.${sql(table)}`)[0].n);

/** A server-sent event. */
export interface SentEvent {
  event: string;
  id?: string;
  // deno-lint-ignore no-explicit-any -- whatever JSON the test expects
  data: any;
}

/** The events of a response, one by one, until it ends. */
export async function* eventsOf(response: Response): AsyncGenerator<SentEvent> {
  let text = "";
  for await (const piece of response.body!.pipeThrough(new TextDecoderStream())) {
    text += piece;
    const blocks = text.split("\n\n");
    text = blocks.pop()!;
    for (const block of blocks) {
      const fields = Object.fromEntries(
        block.split("\n").filter((line) => /^\w/.test(line)).map((line) => {
          const at = line.indexOf(": ");
          return [line.slice(0, at), line.slice(at + 2)];
        }),
      );
      if (fields.data) yield { ...fields, event: fields.event, data: JSON.parse(fields.data) };
    }
  }
}
