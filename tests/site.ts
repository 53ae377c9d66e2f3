/** The site for the tests, and what they ask it. */
import { fileURLToPath } from "node:url";
import { type Pool, schema } from "../db.ts";
import { createKey } from "../keys.ts";
import { secrets, startSite as start } from "../dev/site.ts";

export type { RunningSite } from "../dev/site.ts";
export const adminToken = secrets.admin;

/** Starts web.ts with the tests' kinds. `args` and `env`: more flags and variables. */
export const startSite = (
  url: string,
  args: string[] = [],
  env: Record<string, string> = {},
  denoArgs: string[] = [],
) =>
  start(
    url,
    ["--jobs", fileURLToPath(new URL("kinds.ts", import.meta.url)), ...args],
    env,
    denoArgs,
  );

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
