/**
 * Tells people when the service is unwell: once when that was found twice in a row, and once when it
 * is well again. The leader of the sites looks, and the table `alerts` remembers, so that it does not
 * matter which site leads. Told are ALERT_WEBHOOK_URL and Sentry; and the log.
 *
 * The sites' leader also removes what submissions were remembered by, after a day.
 */
import * as config from "../config.ts";
import { describe, schema, type Sql } from "../db.ts";
import { redact, redactText } from "../redact.ts";
import { type Code, codesOf, judge, type Judgement } from "./health.ts";
import type { Site } from "./site.ts";

const log = config.logger("alerts");

/** What is judged: the one row of `alerts`. */
const NAME = "service";
/** Looks in a row that find it unwell, before that is told: one may meet a deploy. */
const UNWELL = 2;
/** How long a receiver of alerts may take. */
const LIMIT_MS = 10_000;
/** For an Idempotency-Key to hold; and rows at a time, and how many times at a look. */
const SUBMISSION_S = 86_400;
const BATCH = 1000;
const MAX_BATCHES = 100;

/** What was found, as it is kept. */
interface Alert {
  /** Looks in a row that found it unwell; and whether people believe that it is. */
  unwell: number;
  told: boolean;
  /** Names this look; as text, since a Date has no microseconds. */
  looked_at: string;
}

/** The step that a site repeats. @returns it, which returns the milliseconds until the next */
export function watcher(site: Site): () => Promise<number> {
  const { alertEveryMs, heartbeatMs } = site.settings;
  // While the database is away: nobody else can lead then, and nothing can be kept.
  const blind = { unwell: 0, told: false };
  async function look(): Promise<void> {
    const judgement = await judge(site);
    const codes = codesOf(judgement.reasons);
    if (codes.includes("database_unreachable")) {
      blind.unwell++;
      if (blind.unwell >= UNWELL && !blind.told) blind.told = await tell(site, codes, judgement);
      return;
    }
    const found = { unwell: codes.length > 0, told: blind.told };
    const alert = await site.db.run((sql) => keep(sql, found, codes, alertEveryMs));
    blind.unwell = 0;
    if (alert) blind.told = false;
    if (alert && isDue(alert) && await tell(site, codes, judgement)) {
      await site.db.run((sql) => markTold(sql, alert));
    }
    await sweepSubmissions(site);
  }
  return async () => {
    if (!site.leader) return Math.min(alertEveryMs, heartbeatMs);
    await look().catch((error) => log.warn("{error}", { error: describe(error) }));
    return alertEveryMs;
  };
}

const isDue = ({ unwell, told }: Alert) => told ? unwell === 0 : unwell >= UNWELL;

/**
 * Keeps what a look found. Null: another site that leads, or thinks that it does, has looked just
 * now, so that this look does not count.
 *
 * @param found `told`: people were told so while the database was away
 */
async function keep(
  sql: Sql,
  found: { unwell: boolean; told: boolean },
  codes: readonly Code[],
  everyMs: number,
): Promise<Alert | null> {
  const unwell = Number(found.unwell);
  const [row] = await sql<Alert[]>`
    insert into ${sql(schema)}.alerts as a (name, unwell, told, codes)
    values (${NAME}, ${unwell}, ${found.told}, ${`{${codes.join(",")}}`}::text[])
    on conflict (name) do update set unwell = (a.unwell + 1) * ${unwell},
      told = a.told or excluded.told, codes = excluded.codes, looked_at = now()
    where a.looked_at < now() - ${everyMs / 2} * interval '1 millisecond'
    returning unwell, told, looked_at::text`;
  return row ?? null;
}

/** Remembers that people were told of what a look found. */
async function markTold(sql: Sql, { told, looked_at }: Alert): Promise<void> {
  await sql`
    update ${sql(schema)}.alerts set told = ${!told}
    where name = ${NAME} and looked_at = ${looked_at}::text::timestamptz`;
}

/** Tells it to everybody who is to know. @returns whether that worked; if not, the next look tries again */
async function tell(
  site: Site,
  codes: readonly Code[],
  { reasons }: Judgement,
): Promise<boolean> {
  const { alertWebhookUrl, sentryDsn } = site.settings;
  const unwell = codes.length > 0;
  const why = reasons.map(({ code, message }) => `${code}: ${message}`).join("; ");
  const text = unwell ? `Siding is unwell: ${redactText(why)}` : "Siding is well again";
  log[unwell ? "error" : "info"]("{text}", { text });
  const sentry = !sentryDsn || await tellSentry(sentryDsn, text, unwell);
  // Sentry, which knows what it was told before, may be told again with the other.
  return alertWebhookUrl ? await post(alertWebhookUrl, text, site.stopping) : sentry;
}

async function post(url: string, text: string, stopping: AbortSignal): Promise<boolean> {
  try {
    const response = await fetch(url, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ text }),
      redirect: "error",
      signal: AbortSignal.any([stopping, AbortSignal.timeout(LIMIT_MS)]),
    });
    await response.body?.cancel();
    if (response.ok) return true;
    log.warn("ALERT_WEBHOOK_URL answered {status}", { status: response.status });
  } catch (error) {
    // Not its message, which names the URL: that is a secret.
    const why = error instanceof DOMException ? error.name : "no connection";
    log.warn("ALERT_WEBHOOK_URL could not be told: {why}", { why });
  }
  return false;
}

async function tellSentry(dsn: string, text: string, unwell: boolean): Promise<boolean> {
  try {
    const Sentry = await import("@sentry/deno"); // large, and mostly not wanted
    // Only what is said here: no breadcrumbs of requests, no variables, nobody's address, no traces.
    Sentry.init({
      ...{ dsn, defaultIntegrations: false, sendDefaultPii: false, serverName: "siding" },
      skipOpenTelemetrySetup: true, // that is Deno's own
      beforeSend: (event) => redact(event) as typeof event,
    });
    Sentry.captureMessage(text, {
      level: unwell ? "error" : "info",
      fingerprint: ["siding", unwell ? "unwell" : "well"],
    });
    if (await Sentry.flush(LIMIT_MS)) return true;
    log.warn("Sentry was not told in time");
  } catch (error) {
    log.warn("Sentry could not be told: {error}", { error: describe(error).replaceAll(dsn, "…") });
  }
  return false;
}

/** Forgets under which Idempotency-Keys jobs were submitted, after a day. */
async function sweepSubmissions({ db }: Site): Promise<void> {
  for (let batch = 0; batch < MAX_BATCHES; batch++) {
    const gone = await db.run((sql) =>
      sql`
      delete from ${sql(schema)}.submissions s using (
        select owner, key from ${sql(schema)}.submissions
        where created_at < now() - ${SUBMISSION_S} * interval '1 second'
        order by created_at limit ${BATCH}) old
      where s.owner = old.owner and s.key = old.key`
    );
    if (gone.count < BATCH) return;
  }
}
