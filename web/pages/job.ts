/** A job's page: where it is, what it was given, what became of each attempt, and its score. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import { schema, type Sql } from "../../db.ts";
import { retry } from "../../desk.ts";
import { type FileInfo, readFile } from "../../files.ts";
import { type Attempt, attempts } from "../../listing.ts";
import { cancel, type JobView } from "../../queue.ts";
import { spend } from "../auth.ts";
import { filesOf, visibleJob } from "../jobs.ts";
import type { Env, Site } from "../site.ts";
import { trustedForm } from "./forms.ts";
import { runOf, waitOf } from "./jobs.ts";
import {
  badge,
  bytes,
  csrfField,
  cutTo,
  duration,
  instant,
  live,
  type Markup,
  scrolling,
  show,
} from "./layout.ts";
import { track } from "./track.ts";

/** What is shown of a payload or result; and of a score, in bytes. */
const MOST_JSON = 20_000;
const MOST_ABC_BYTES = 262_144;

/** What only this page tells of a job. */
interface Details {
  unique_key: string | null;
  webhook: string | null;
  request_key: string | null;
  request_id: string | null;
  sent_at: Date | null;
  cancel_requested_at: Date | null;
  worker: string | null;
}

export function job(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/jobs/:id", async (c) => {
    const it = await visibleJob(site, c.get("who"), c.req.param("id"));
    const [details, ended, { inputs, outputs }] = await Promise.all([
      site.db.run((sql) => detailsOf(sql, it.id)),
      site.db.run((sql) => attempts(sql, it.id)),
      filesOf(site, it.id),
    ]);
    const abc = await scoreOf(site, outputs);
    const final = it.finished_at !== null;
    return show(c, {
      title: `${it.kind} #${it.id}`,
      at: "/jobs",
      scripts: ["abcjs.js", "score.js"],
      body: html`
        <p class="crumbs"><a href="/jobs">Jobs</a></p>
        <div id="job" ${final ? "" : html`data-job="${it.id}"`}>
          ${live("state", 0, state(c, it, details))}
          ${live("score", 0, abc === null ? html`` : score(abc))}
          ${live("made", 0, fileTable(it, "Files it made", outputs))}
          ${live("outcome", 0, outcome(it))}
          ${live("attempts", 0, attemptTable(ended))}
        </div>
        ${fileTable(it, "Files it was given", inputs)}
        ${json("Payload", it.payload)}
        ${facts(it, details, c.get("who").admin)}
      `,
    });
  });
  app.post("/jobs/:id/cancel", async (c) => {
    await trustedForm(c);
    const { id } = await visibleJob(site, c.get("who"), c.req.param("id"));
    await site.db.run((sql) => cancel(sql, id));
    return c.redirect(`/jobs/${id}`, 303);
  });
  app.post("/jobs/:id/retry", async (c) => {
    const { pay_again } = await trustedForm(c);
    const who = c.get("who");
    const { id } = await visibleJob(site, who, c.req.param("id"));
    await spend(site.limits.submit, who.key?.id ?? "admin", "submitted jobs");
    const payAgain = who.admin && pay_again === "yes";
    const [{ new_id }] = await site.db.run((sql) => retry(sql, { ids: [id], payAgain }, 1));
    return c.redirect(`/jobs/${new_id}`, 303);
  });
  return app;
}

async function detailsOf(sql: Sql, id: string): Promise<Details> {
  const [row] = await sql<Details[]>`
    select j.unique_key, j.webhook, j.request_key, j.request_id, j.sent_at, j.cancel_requested_at,
      coalesce(p.name, j.worker_id::text) as worker
    from ${sql(schema)}.jobs j left join ${sql(schema)}.processes p on p.boot_id = j.worker_id
    where j.id = ${id}`;
  return row;
}

/** The first score among the files a job made, as text; null when there is none, or a large one. */
async function scoreOf(site: Site, outputs: FileInfo[]): Promise<string | null> {
  const abc = outputs.find((file) => file.name.endsWith(".abc") && file.bytes <= MOST_ABC_BYTES);
  return abc ? await new Response(readFile(site.files, abc)).text() : null;
}

function state(c: Context<Env>, it: JobView, details: Details): Markup {
  const { status, stage, progress, error } = it;
  const running = status === "running";
  return html`
    <div class="heading">
      <h1>${it.kind} <span class="id">#${it.id}</span></h1>
      <div class="actions">${actions(c, it, details)}</div>
    </div>
    <section class="card" aria-label="Where it is">
      <p class="now" role="status">${badge(status)}
        ${running && html`<span data-stage>${stage ?? "started"}</span>`}
        ${details.cancel_requested_at && running && html`<span class="muted">asked to stop</span>`}
      </p>
      ${track(it)}
      ${running && html`
        <progress class="bar" max="1" ${progress === null
          ? ""
          : html`value="${progress}"`} data-progress aria-label="Progress"></progress>
      `}
      ${error && status !== "done" && html`<pre class="error">${error}</pre>`}
      <dl class="facts row">
        <div><dt>Waited</dt><dd>${duration(waitOf(it))}</dd></div>
        <div><dt>Ran</dt><dd>${duration(runOf(it))}</dd></div>
        <div><dt>Attempt</dt><dd>${it.attempt}</dd></div>
        <div><dt>Queue</dt><dd>${it.queue}</dd></div>
        ${it.owner !== null && html`
          <div>
            <dt>Owner</dt>
            <dd>${it.owner}</dd>
          </div>
        `}
        ${it.price !== null && html`
          <div>
            <dt>Price</dt>
            <dd>${it.price} credits</dd>
          </div>
        `}
      </dl>
    </section>
  `;
}

function actions(c: Context<Env>, it: JobView, { sent_at, request_id }: Details): Markup {
  if (["scheduled", "queued", "running"].includes(it.status)) {
    return html`
      <form method="post"
        action="/jobs/${it.id}/cancel">${csrfField(c)}<button class="danger">Cancel</button></form>
    `;
  }
  if (it.status === "review" && c.get("who").admin) {
    return html`<a class="button" href="/review">To the review desk</a>`;
  }
  if (it.status !== "failed") return html``;
  if (it.retried_as) {
    return html`<a href="/jobs/${it.retried_as}">Tried again as #${it.retried_as}</a>`;
  }
  const unsure = sent_at !== null && request_id === null;
  return html`
    <form method="post" action="/jobs/${it.id}/retry">${csrfField(c)}
      ${unsure && c.get("who").admin && html`
        <label
          class="check"><input type="checkbox" name="pay_again" value="yes" /> it may have been charged: send it again</label>
      `}
      <button>Retry as a new job</button>
    </form>
  `;
}

/** Drawn and played by score.js; the notation itself is there without it. */
const score = (abc: string): Markup =>
  html`
    <section class="card score" aria-labelledby="score-title">
      <div class="heading">
        <h2 id="score-title">Score</h2>
        <div class="player" data-player data-keep hidden>
          <button type="button" data-play>Play</button>
          <span class="muted" data-time></span>
        </div>
      </div>
      <div class="paper scroll" role="group" aria-label="Sheet music" tabindex="0" data-keep hidden>
        <div data-paper></div>
      </div>
      <details>
        <summary>ABC notation</summary>
        <pre data-abc>${abc}</pre>
      </details>
    </section>
  `;

function fileTable({ id }: JobView, title: string, files: FileInfo[]): Markup {
  if (files.length === 0) return html``;
  const name = title.split(" ").at(-1)!;
  return html`
    <section class="card" aria-labelledby="files-${name}">
      <h2 id="files-${name}">${title}</h2>
      <ul class="files">
        ${files.map((file) =>
          html`
            <li><a href="/api/jobs/${id}/files/${file.id}" download>${file.name}</a>
              <span class="muted">${file.media_type}, ${bytes(file.bytes)}</span></li>
          `
        )}
      </ul>
    </section>
  `;
}

function attemptTable(ended: Attempt[]): Markup {
  if (ended.length === 0) return html``;
  return html`
    <section class="card" aria-labelledby="attempts-title">
      <h2 id="attempts-title">Attempts that did not finish it</h2>
      ${scrolling(
        "Attempts",
        html`
          <table>
            <caption>The newest first, times in UTC</caption>
            <thead>
              <tr>
                <th scope="col">Attempt</th>
                <th scope="col">Ended as</th>
                <th scope="col">Why</th>
                <th scope="col">Claimed</th>
                <th scope="col">Ended</th>
              </tr>
            </thead>
            <tbody>
              ${ended.map((it) =>
                html`
                  <tr>
                    <th scope="row">${it.attempt}</th>
                    <td>${it.outcome}</td>
                    <td>${cutTo(it.error ?? "–", 500)}</td>
                    <td>${instant(it.claimed_at)}</td>
                    <td>${instant(it.ended_at)}</td>
                  </tr>
                `
              )}
            </tbody>
          </table>
        `,
      )}
    </section>
  `;
}

const outcome = (it: JobView): Markup =>
  it.status === "done" && it.result !== null ? json("Result", it.result) : html``;

function json(title: string, value: unknown): Markup {
  const text = JSON.stringify(value, null, 2) ?? "null";
  const lines = text.split("\n").length;
  const short = lines <= 12 && text.length < 1500;
  return html`
    <section class="card">
      <details ${short ? "open" : ""}>
        <summary>
          <h2>${title}</h2>
        </summary>
        <pre>${cutTo(text, MOST_JSON)}</pre>
      </details>
    </section>
  `;
}

function facts(it: JobView, details: Details, admin: boolean): Markup {
  const rows: [string, Markup | string | number | null][] = [
    ["Submitted", instant(it.created_at)],
    ["Due", instant(it.due_at)],
    ["Claimed", instant(it.claimed_at)],
    ["Finished", instant(it.finished_at)],
    ["Priority", it.priority],
    ["Failures, crashes", `${it.failures}, ${it.crashes}`],
    ["Given back, put off", `${it.releases}, ${it.snoozes}`],
    ["Unique key", details.unique_key],
    ["Webhook", details.webhook],
    ...(admin
      ? [
        ["Worker", details.worker],
        ["Request key", details.request_key],
        ["Request", details.request_id],
        ["Sent", details.sent_at && instant(details.sent_at)],
      ] as [string, Markup | string | null][]
      : []),
  ];
  return html`
    <section class="card" aria-labelledby="facts-title">
      <h2 id="facts-title">More of it</h2>
      <dl class="facts">
        ${rows.filter(([, value]) => value !== null).map(([name, value]) =>
          html`
            <div>
              <dt>${name}</dt>
              <dd>${value}</dd>
            </div>
          `
        )}
      </dl>
      <p class="hint">Times are in UTC.</p>
    </section>
  `;
}
