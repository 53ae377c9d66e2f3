/** Submitting a job, as the API, the pages and MCP do it: checked, limited, once per Idempotency-Key. */
import { trace } from "@opentelemetry/api";
import { z } from "zod";
import { schema, type Sql, unstorable } from "../db.ts";
import { checkPayload } from "../jobs/kind.ts";
import { enqueue, EnqueueError, type NewJob, refusing } from "../queue.ts";
import { spend } from "./auth.ts";
import { fieldProblems, Problem } from "./problem.ts";
import type { Site, Who } from "./site.ts";

/** What a job may be submitted with. */
export const Submission = z.strictObject({
  kind: z.string(),
  payload: z.unknown().optional(),
  queue: z.string().regex(/^[a-z0-9_.-]{1,63}$/).optional(),
  delay_s: z.number().min(0).max(315_360_000).optional(),
  due_at: z.iso.datetime({ offset: true }).optional(),
  unique_key: z.string().min(1).max(200).optional(),
  webhook: z.url({ protocol: /^https?$/ }).max(2000).optional(),
  /** The admin's alone: others do not choose their place in line, nor who pays. */
  priority: z.int().min(-1000).max(1000).optional(),
  owner: z.string().min(1).max(200).optional(),
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
  const parsed = Submission.safeParse(body);
  if (!parsed.success) {
    const errors = fieldProblems(parsed.error, body);
    throw new Problem(422, errors.map((e) => `${e.field}: ${e.rule}`).join("; "), { errors });
  }
  const { kind, payload = {}, owner, priority, ...rest } = parsed.data;
  for (const [field, value] of Object.entries({ owner, priority })) {
    if (value !== undefined && !who.admin) {
      const rule = "only the admin may give it";
      throw new Problem(422, `${field}: ${rule}`, { errors: [{ field, value, rule }] });
    }
  }
  const webhook = rest.webhook ?? who.key?.webhook ?? undefined;
  if (rest.webhook && !site.secrets.webhook) {
    const rule = "this site has no SIDING_WEBHOOK_SECRET to sign with";
    throw new Problem(422, `webhook: ${rule}`, { errors: [{ field: "webhook", rule }] });
  }
  // A kind of Siding's own is enqueued by Siding alone.
  if (site.kinds[kind]?.internal) throw new Problem(422, `kind: "${kind}" is not for submitting`);
  checkPayload(site.kinds, kind, payload);
  if (idempotencyKey !== undefined && (idempotencyKey.length < 1 || idempotencyKey.length > 200)) {
    throw new Problem(422, "Idempotency-Key: it must be 1 to 200 characters long", {
      errors: [{
        field: "Idempotency-Key",
        value: idempotencyKey.slice(0, 100),
        rule: "1 to 200 characters",
      }],
    });
  }
  await spend(site.limits.submit, who.key?.id ?? "admin", "submitted jobs");
  const job: NewJob = {
    ...rest,
    kind,
    payload,
    webhook,
    owner: who.owner ?? owner,
    priority,
    price: site.kinds[kind].price,
    files: files.length ? files.map((file) => file.id) : undefined,
    trace_parent: traceParent(),
  };
  if (idempotencyKey === undefined) {
    const [entry] = await site.db.run((sql) => enqueue(sql, [job]));
    return { ...entry, replayed: false };
  }
  const print = JSON.stringify([parsed.data, files.map(({ name, sha256 }) => [name, sha256])]);
  return await site.db.run((sql) => submitOnce(sql, who.owner ?? "", idempotencyKey, print, job));
}

async function submitOnce(
  sql: Sql,
  submitter: string,
  key: string,
  print: string,
  job: NewJob,
): Promise<Submitted> {
  try {
    const [row] = await refusing(sql<Submitted[]>`
      select id::text, created, replayed from ${sql(schema)}.submit(${submitter}, ${key},
        sha256(convert_to(${print}, 'UTF8')), ${JSON.stringify([job])}::text::jsonb)`);
    return row;
  } catch (error) {
    const bad = unstorable([job.payload, key], "the job");
    throw bad ? new EnqueueError(bad, "SD422") : error;
  }
}

/** The W3C trace context of the request under way, where it is traced. */
function traceParent(): string | undefined {
  const context = trace.getActiveSpan()?.spanContext();
  if (!context) return undefined;
  const flags = context.traceFlags.toString(16).padStart(2, "0");
  return `00-${context.traceId}-${context.spanId}-${flags}`;
}
