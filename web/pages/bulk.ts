/** What is done to many jobs at once: all that fit the list's filter, a bounded number at a time. */
import type { Context } from "hono";
import { html } from "hono/html";
import { schema, type Sql } from "../../db.ts";
import { retry } from "../../desk.ts";
import { type JobFilter, listJobs, WINDOW } from "../../listing.ts";
import { cancel, Refused } from "../../queue.ts";
import { Problem } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { trustedForm } from "./forms.ts";
import { beforeOf, filterOf, listPath } from "./jobs.ts";
import { count, csrfField, type Markup, show } from "./layout.ts";

/** Jobs of one go; and those that are looked for, to say how many remain. */
export const BATCH = 200;
const FOUND = 1000;
const MOST_REFUSALS = 20;
const cancellable = ["scheduled", "queued", "running"];

/** The form below the list, where its filter names a state in which there is something to do. */
export function bulkForm(c: Context<Env>, filter: JobFilter, before?: string): Markup {
  const { status } = filter;
  const cancels = cancellable.includes(status ?? "");
  if (!cancels && status !== "failed") {
    return html`<p class="hint">To cancel or retry many at once, filter by one of the statuses
      scheduled, queued, running or failed.</p>`;
  }
  const hidden = Object.entries({ ...filter, ...(before && { before }) });
  return html`
    <form class="card bulk" method="post" action="/jobs">
      ${csrfField(c)}
      ${hidden.map(([name, value]) =>
        html`<input type="hidden" name="${name}" value="${value}" />`
      )}
      <h2>All that fit this filter</h2>
      ${cancels
        ? html`
          <p>Up to ${BATCH} at a time. Those that wait are cancelled at once, those that run are stopped by their worker.</p>
          <button class="danger" name="do" value="cancel">Cancel ${status} jobs</button>
        `
        : html`
          <p>Up to ${BATCH} at a time, as new jobs; none is tried twice.</p>
          <label for="error">Only where the error contains</label>
          <input id="error" name="error" maxlength="300" autocomplete="off" />
          <button name="do" value="retry">Retry failed jobs</button>
        `}
    </form>
  `;
}

interface Outcome {
  done: number;
  /** At least so many fit and are left; `more`: there may be others before `before`. */
  left: number;
  more: boolean;
  before: string | null;
  refusals: string[];
}

/** Does it, and answers with what came of it. Asks for the admin. */
export async function bulk(site: Site, c: Context<Env>): Promise<Response> {
  const fields = await trustedForm(c);
  if (!c.get("who").admin) throw new Problem(404, "there is no such page");
  const filter = filterOf(c, fields);
  const before = beforeOf(fields.before);
  const action = fields.do;
  if (action !== "retry" && action !== "cancel") {
    throw new Problem(422, "do: it must be retry or cancel");
  }
  const needed = action === "retry" ? ["failed"] : cancellable;
  if (!needed.includes(filter.status ?? "")) {
    throw new Problem(422, `status: to ${action} jobs it must be ${needed.join(", ")}`);
  }
  const outcome = action === "retry"
    ? await retryMany(site, filter, fields.error || null, before)
    : await cancelMany(site, filter, before);
  return await answer(c, action, filter, outcome);
}

async function cancelMany(site: Site, filter: JobFilter, before?: string): Promise<Outcome> {
  const { items, next } = await site.db.run((sql) =>
    listJobs(sql, filter, { before, most: FOUND })
  );
  const refusals: string[] = [];
  let done = 0;
  for (const { id } of items.slice(0, BATCH)) {
    try {
      await site.db.run((sql) => cancel(sql, id));
      done++;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      refusals.push(error.message);
    }
  }
  return {
    done,
    left: Math.max(0, items.length - BATCH),
    more: next !== null,
    before: next,
    refusals,
  };
}

async function retryMany(
  site: Site,
  filter: JobFilter,
  error: string | null,
  before?: string,
): Promise<Outcome> {
  const { ids, last, scanned } = await site.db.run((sql) => toRetry(sql, filter, error, before));
  const batch = ids.slice(0, BATCH);
  const { done, refusals } = await retryEach(site, batch);
  const more = ids.length > FOUND || scanned === WINDOW;
  return {
    done,
    left: ids.length - batch.length,
    more,
    before: scanned === WINDOW ? last : null,
    refusals,
  };
}

/** All in one statement; where one of them is refused and so all are, each by itself. */
async function retryEach(site: Site, ids: string[]): Promise<Pick<Outcome, "done" | "refusals">> {
  const refusals: string[] = [];
  if (ids.length === 0) return { done: 0, refusals };
  try {
    return { done: (await site.db.run((sql) => retry(sql, { ids }, ids.length))).length, refusals };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
  }
  let done = 0;
  for (const id of ids) {
    try {
      done += (await site.db.run((sql) => retry(sql, { ids: [id] }, 1))).length;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      refusals.push(error.message);
    }
  }
  return { done, refusals };
}

/** Failed jobs that were not tried again, of the newest {@linkcode WINDOW} before `before`. */
export async function toRetry(
  sql: Sql,
  filter: JobFilter,
  error: string | null,
  before = "9223372036854775807",
): Promise<{ ids: string[]; last: string | null; scanned: number }> {
  const { owner = null, kind = null, queue = null } = filter;
  const [row] = await sql<{ ids: string[]; last: string | null; scanned: number }[]>`
    with range as materialized (
      select j.id, j.kind, j.queue, j.owner, j.error, j.retried_as from ${sql(schema)}.jobs j
      where j.status = any(array['failed']) and j.id < ${before} order by j.status desc, j.id desc limit ${WINDOW}
    ),
    found as (
      select id from range
      where retried_as is null and (${kind}::text is null or kind = ${kind})
        and (${queue}::text is null or queue = ${queue})
        and (${owner}::text is null or owner = ${owner})
        and (${error}::text is null or position(${error} in error) > 0)
      order by id desc limit ${FOUND + 1}
    )
    select (select coalesce(jsonb_agg(id::text order by id desc), '[]') from found) as ids,
      min(id)::text as last, count(*)::integer as scanned from range`;
  return row;
}

function answer(c: Context<Env>, action: "retry" | "cancel", filter: JobFilter, it: Outcome) {
  const said = action === "retry" ? "tried again as new jobs" : "cancelled, or asked to stop";
  return show(c, {
    title: "Done",
    at: "/jobs",
    body: html`
      <section class="card narrow">
        <h1>${count(it.done)} jobs ${said}</h1>
        <p>${it.left > 0 || it.more
          ? `${it.more ? "At least " : ""}${count(it.left)} more fit the filter.`
          : "No more fit the filter."}</p>
        ${it.refusals.length > 0 && html`
          <h2>${count(it.refusals.length)} were refused</h2>
          <ul>${it.refusals.slice(0, MOST_REFUSALS).map((text) => html`<li>${text}</li>`)}</ul>
        `}
        <p class="buttons">
          <a class="button" href="${listPath(filter)}">Back to the list</a>
          ${it.before && html`<a href="${listPath(filter, it.before)}">Older ones that fit</a>`}
        </p>
      </section>
    `,
  });
}
