/** Submitting a job, as the API, the pages and MCP do it: checked, limited, once per Idempotency-Key. */
import { z } from "zod";
import { schema, type Sql, unstorable } from "../db.ts";
import { enqueue, enqueueError, list, type NewJob, Refused } from "../queue.ts";
import { traceParent } from "../tracing.ts";
import { spend } from "./auth.ts";
import { Problem, unfit } from "./problem.ts";
import type { Site, Who } from "./site.ts";

/** The queue of those that tell of a job's end. */
const WEBHOOKS = "webhooks";

/** Whose submissions are counted together, and what a refusal calls them. */
export const limitKey = (who: Who) => who.key?.id ?? "admin";
export const SUBMITTED = "submitted jobs";

/** What a job may be submitted with. */
export const Submission = z.strictObject({
  kind: z.string(),
  payload: z.unknown().optional(),
  queue: z.string().regex(/^[a-z0-9_.-]{1,63}$/).optional(),
  delay_s: z.number().min(0).max(315_360_000).optional().describe("Seconds until it is due"),
  due_at: z.iso.datetime({ offset: true }).optional().describe("Instead of delay_s"),
  unique_key: z.string().min(1).max(200).optional()
    .describe("An unfinished job of yours, of this kind, with the same key is returned instead"),
  webhook: z.url({ protocol: /^https?$/ }).max(2000).optional()
    .describe("Is told when the job ends"),
  // Others do not choose their place in line, nor who pays.
  priority: z.int().min(-1000).max(1000).optional().describe("Larger is sooner; the admin's alone"),
  owner: z.string().min(1).max(200).optional().describe("Whose job it is; the admin's alone"),
});

export interface Submitted {
  id: string;
  /** False: an unfinished job with its unique key was there. */
  created: boolean;
  /** True: its Idempotency-Key was used before, for the same request. */
  replayed: boolean;
}

/**
 * Submits a job.
 *
 * @param files the ids of its input files, and the SHA-256 of their bytes in hexadecimal
 * @param idempotencyKey of at most 200 characters; the same request with it again gets the same job
 * @throws Problem and what {@linkcode enqueue} throws
 */
export async function submit(
  site: Site,
  who: Who,
  body: unknown,
  files: readonly { id: string; sha256: string; name: string }[] = [],
  idempotencyKey?: string,
): Promise<Submitted> {
  // First: what is malformed came with as many bytes, and would be free.
  await spend(site.limits.submit, limitKey(who), SUBMITTED);
  const parsed = Submission.safeParse(body);
  if (!parsed.success) throw unfit(parsed.error, body);
  const { kind, payload = {}, owner, priority, ...rest } = parsed.data;
  for (const [field, value] of Object.entries({ owner, priority })) {
    if (value !== undefined && !who.admin) {
      throw refused(field, "only the admin may give it", value);
    }
  }
  const webhook = rest.webhook ?? who.key?.webhook ?? undefined;
  if (rest.webhook && !site.secrets.webhook) {
    throw refused("webhook", "this site has no SIDING_WEBHOOK_SECRET to sign with");
  }
  assertFits(site, kind, payload);
  if (rest.queue === WEBHOOKS) throw refused("queue", "it is Siding's own", WEBHOOKS);
  const keyRule = idempotencyKey === undefined
    ? null
    : idempotencyKey.length < 1 || idempotencyKey.length > 200
    ? "it must be 1 to 200 characters long"
    : unstorable(idempotencyKey, "it");
  if (keyRule) throw refused("Idempotency-Key", keyRule, idempotencyKey);
  const job: NewJob = {
    ...rest,
    kind,
    payload,
    webhook,
    unique_key: await uniqueKeyOf(who.owner ?? owner, rest.unique_key),
    owner: who.owner ?? owner,
    priority,
    price: site.kinds[kind].price,
    files: files.length ? files.map((file) => file.id) : undefined,
    trace_parent: traceParent(),
  };
  try {
    const print = JSON.stringify([parsed.data, files.map(({ name, sha256 }) => [name, sha256])]);
    return await site.db.run(async (sql) => {
      if (idempotencyKey !== undefined) {
        return await submitOnce(sql, who.owner ?? "", idempotencyKey, print, job);
      }
      const [entry] = await enqueue(sql, [job]);
      return { ...entry, replayed: false };
    });
  } catch (error) {
    // What is nested deeper than there is room on the stack.
    if (error instanceof RangeError) throw refused("payload", "it is nested too deep");
    throw error instanceof Refused ? naming(error, job) : error;
  }
}

/** A refusal of the database's that is a mistake in the request, with the field that it is in. */
function naming(error: Refused, job: NewJob): unknown {
  if (/^SD(402|409|429)/.test(error.code)) return error;
  const rule = error.message.replace(/^job 1: |jobs\[0\]\./, "");
  if (error.code === "SD404") return refused("queue", rule, job.queue);
  // The one text that Postgres itself reads is an instant.
  if (/^2200[789]$/.test(error.code)) return refused("due_at", rule, String(job.due_at));
  return refused(/^(?:a key of )?([\w.[\]-]+)/.exec(rule)?.[1] ?? "body", rule);
}

function refused(field: string, rule: string, value?: string | number): Problem {
  const shown = typeof value === "string" ? value.slice(0, 100) : value;
  return new Problem(422, `${field}: ${rule}`, {
    errors: [{ field, ...(shown !== undefined && { value: shown }), rule }],
  });
}

/** The kinds that may be submitted: one of Siding's own is enqueued by Siding alone. */
export const submittable = (site: Pick<Site, "kinds">): string[] =>
  Object.keys(site.kinds).filter((kind) => !site.kinds[kind].internal);

/** @throws Problem 422 when there is no such kind, or the payload does not fit it */
function assertFits(site: Site, kind: string, payload: unknown): void {
  const known = submittable(site);
  if (!known.includes(kind)) throw refused("kind", `it must be one of ${known.join(", ")}`, kind);
  const fitting = site.kinds[kind].payload.safeParse(payload);
  if (!fitting.success) throw unfit(fitting.error, payload, ["payload"]);
}

/**
 * Owners share the table and not their keys: what one of them calls a job by is nobody else's
 * business, and must not make another's job the answer.
 */
async function uniqueKeyOf(owner?: string, key?: string): Promise<string | undefined> {
  if (owner === undefined || key === undefined) return key;
  const own = JSON.stringify([owner, key]);
  if (own.length <= 200) return own;
  const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(own));
  return new Uint8Array(hash).toHex();
}

async function submitOnce(
  sql: Sql,
  submitter: string,
  key: string,
  print: string,
  job: NewJob,
): Promise<Submitted> {
  try {
    const [row] = await list(sql<Submitted[]>`
      select id::text, created, replayed from ${sql(schema)}.submit(${submitter}, ${key},
        sha256(convert_to(${print}, 'UTF8')), ${JSON.stringify([job])}::text::jsonb)`);
    return row;
  } catch (error) {
    throw enqueueError(error, [job]);
  }
}
