/** The list of jobs: filters, pages by the id before, and what can be done to many at once. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import { type JobFilter, type ListedJob, listJobs, WINDOW } from "../../listing.ts";
import type { Status } from "../../queue.ts";
import { isId } from "../jobs.ts";
import { Problem } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { bulk, bulkForm } from "./bulk.ts";
import {
  ago,
  badge,
  count,
  cutTo,
  duration,
  live,
  type Markup,
  scrolling,
  show,
  statuses,
} from "./layout.ts";

const MOST = 50;
const REFRESH_S = 5;
const filters = ["status", "kind", "queue", "owner"] as const;

export function jobs(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/jobs", async (c) => {
    const filter = filterOf(c, c.req.query());
    const before = beforeOf(c.req.query("before"));
    const page = await site.db.run((sql) => listJobs(sql, filter, { before, most: MOST }));
    const admin = c.get("who").admin;
    return show(c, {
      title: "Jobs",
      at: "/jobs",
      body: html`
        <div class="heading">
          <h1>Jobs</h1>
          <a class="button" href="/submit">Submit a job</a>
        </div>
        ${filterForm(site, filter, admin)}
        ${live(
          "jobs",
          before === undefined ? REFRESH_S : 0,
          html`<div class="card">${table(page.items, admin)} ${pager(filter, before, page)}</div>`,
        )}
        ${admin && bulkForm(c, filter, before)}
      `,
    });
  });
  app.post("/jobs", (c) => bulk(site, c));
  return app;
}

/** The filter that a query or form says; an owner's is for their own jobs, whatever it says. */
export function filterOf(
  c: Context<Env>,
  given: Record<string, string | undefined>,
): JobFilter {
  const { status, kind, queue, owner } = given;
  if (status && !statuses.includes(status as Status)) {
    throw new Problem(
      422,
      `status is "${cutTo(status, 50)}": it must be one of ${statuses.join(", ")}`,
    );
  }
  const who = c.get("who");
  return {
    ...(status && { status: status as Status }),
    ...(kind && { kind: kind.slice(0, 100) }),
    ...(queue && { queue: queue.slice(0, 100) }),
    ...(who.admin ? owner && { owner: owner.slice(0, 200) } : { owner: who.owner }),
  };
}

/** The id before which a page begins. */
export function beforeOf(given: string | undefined): string | undefined {
  if (!given) return undefined;
  if (!isId(given)) {
    throw new Problem(422, `before is "${cutTo(given, 50)}": it must be a job's id`);
  }
  return given;
}

/** The list's address with this filter. */
export function listPath(filter: JobFilter, before?: string): string {
  const query = new URLSearchParams({ ...filter, ...(before && { before }) }).toString();
  return query ? `/jobs?${query}` : "/jobs";
}

function filterForm(site: Site, filter: JobFilter, admin: boolean): Markup {
  const text = (name: "kind" | "queue" | "owner", label: string, list?: string) =>
    html`
      <div>
        <label for="by-${name}">${label}</label>
        <input id="by-${name}" name="${name}" value="${filter[name] ?? ""}" maxlength="200"
          ${list ? html`list="${list}"` : ""} spellcheck="false" autocomplete="off" />
      </div>
    `;
  return html`
    <form class="filter" method="get" action="/jobs" role="search" aria-label="Filter the jobs">
      <div>
        <label for="by-status">Status</label>
        <select id="by-status" name="status">
          <option value="">any</option>
          ${statuses.map((it) =>
            html`
              <option ${it === filter.status ? "selected" : ""}>${it}</option>
            `
          )}
        </select>
      </div>
      ${text("kind", "Kind", "kinds")} ${text("queue", "Queue")} ${admin && text("owner", "Owner")}
      <datalist id="kinds">
        ${Object.keys(site.kinds).map((kind) => html`<option>${kind}</option>`)}
      </datalist>
      <div class="buttons">
        <button>Filter</button>
        ${filters.some((it) => filter[it] && (admin || it !== "owner")) &&
          html`<a href="/jobs">Clear</a>`}
      </div>
    </form>
  `;
}

function table(items: ListedJob[], admin: boolean): Markup {
  if (items.length === 0) {
    return html`<p class="empty">No jobs here. <a href="/submit">Submit one</a>, or change the filter.</p>`;
  }
  return scrolling(
    "Jobs",
    html`
      <table class="jobs">
        <caption>The newest first</caption>
        <thead>
          <tr>
            <th scope="col">Job</th>
            <th scope="col">Status</th>
            <th scope="col" class="wide">Queue</th>
            ${admin && html`<th scope="col" class="wide">Owner</th>`}
            <th scope="col">Where it is</th>
            <th scope="col" class="wide number">Wait</th>
            <th scope="col" class="wide number">Run</th>
            <th scope="col" class="wide">Submitted</th>
          </tr>
        </thead>
        <tbody>
          ${items.map((job) =>
            html`
              <tr>
                <th scope="row"><a href="/jobs/${job.id}"><span class="kind">${job
                  .kind}</span> <span class="id">#${job.id}</span></a></th>
                <td>${badge(job.status)}</td>
                <td class="wide">${job.queue}</td>
                ${admin &&
                  html`<td class="wide"><span class="clip">${job.owner ?? "–"}</span></td>`}
                <td>${whereOf(job)}</td>
                <td class="wide number">${duration(waitOf(job))}</td>
                <td class="wide number">${duration(runOf(job))}</td>
                <td class="wide">${ago(job.created_at)}</td>
              </tr>
            `
          )}
        </tbody>
      </table>
    `,
  );
}

function whereOf(job: ListedJob): Markup {
  const { status, stage, progress, error } = job;
  if (status === "running") {
    return html`<span class="clip">${stage ?? "started"}</span>
      ${
      progress !== null && html`
        <progress max="1" value="${progress}"
          aria-label="Progress of job ${job.id}">${Math.round(progress * 100)} %</progress>
      `
    }`;
  }
  if (error && status !== "done") return html`<span class="clip error">${cutTo(error, 160)}</span>`;
  if (status === "scheduled") {
    return html`due ${job.due_at.toISOString().slice(0, 16).replace("T", " ")}`;
  }
  return html`<span class="muted">${
    job.finished_at ? html`finished ${ago(job.finished_at)}` : ""
  }</span>`;
}

type Timed = Pick<ListedJob, "status" | "due_at" | "claimed_at" | "finished_at">;
const seconds = (from: Date, to: Date | number) => (Number(to) - from.getTime()) / 1000;

/** Seconds from when it was due to its last claim, or so far; null: it is not due. */
export function waitOf({ status, due_at, claimed_at, finished_at }: Timed): number | null {
  if (status === "scheduled") return null;
  const waits = status === "queued" || status === "review";
  const to = waits ? Date.now() : claimed_at ?? finished_at;
  return to === null ? null : Math.max(0, seconds(due_at, to));
}

/** Seconds of its last attempt, so far where it runs; null: it has none. */
export function runOf({ status, claimed_at, finished_at }: Timed): number | null {
  if (claimed_at === null || status === "queued" || status === "scheduled") return null;
  if (status === "running") return Math.max(0, seconds(claimed_at, Date.now()));
  return finished_at && Math.max(0, seconds(claimed_at, finished_at));
}

function pager(
  filter: JobFilter,
  before: string | undefined,
  { items, next }: { items: ListedJob[]; next: string | null },
): Markup {
  if (!before && !next) return html`<p class="pager muted">${count(items.length)} in all</p>`;
  return html`
    <nav class="pager" aria-label="Pages">
      ${before && html`<a href="${listPath(filter)}">Newest</a>`}
      <span class="muted">${items.length === 0 && next
        ? `none among ${count(WINDOW)} jobs`
        : `${count(items.length)} shown`}</span>
      ${next && html`<a href="${listPath(filter, next)}" rel="next">Older</a>`}
    </nav>
  `;
}
