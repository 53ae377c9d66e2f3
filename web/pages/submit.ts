/** Submitting a job: its kind, then a form made for that. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import type { Kind } from "../../jobs/kind.ts";
import { assertCsrf } from "../auth.ts";
import { Problem, problemOf } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { limitKey, submit } from "../submit.ts";
import { discard, type Form, readForm } from "../uploads.ts";
import { inputs, payloadOf } from "./fields.ts";
import { wholeNumber } from "./forms.ts";
import { bytes, csrfField, type Markup, show } from "./layout.ts";

export function submitting(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/submit", (c) => {
    const offered = offeredBy(site);
    const kind = c.req.query("kind") ?? offered[0]?.[0] ?? "";
    return form(site, c, kind, {});
  });
  app.post("/submit", async (c) => {
    const given: Record<string, string> = {};
    try {
      const type = c.req.header("content-type") ?? "";
      if (!type.startsWith("multipart/form-data")) {
        throw new Problem(415, "a form is expected, as multipart/form-data");
      }
      const form = await readForm(site, c.req.raw, limitKey(c.get("who")), async (fields) => {
        Object.assign(given, fields);
        await assertCsrf(c, fields.csrf);
      });
      Object.assign(given, form.fields);
      return await enqueueForm(site, c, form);
    } catch (error) {
      const problem = problemOf(error);
      if (problem.status === 403 || problem.status >= 500) throw error;
      return await form(site, c, given.kind ?? "", given, problem);
    }
  });
  return app;
}

/** Enqueues what a form says; the files of one that is refused are removed. */
async function enqueueForm(site: Site, c: Context<Env>, { fields, files }: Form) {
  try {
    const { id } = await submit(site, c.get("who"), submissionOf(site, fields), files);
    return c.redirect(`/jobs/${id}`, 303);
  } catch (error) {
    await discard(site, files);
    throw error;
  }
}

const offeredBy = (site: Site) => Object.entries(site.kinds).filter(([, kind]) => !kind.internal);

/** What the form's fields say, as the API would have it. Empty ones were not given. */
function submissionOf(site: Site, given: Record<string, string>) {
  const { kind = "", queue, unique_key, webhook, owner } = given;
  const delay_s = wholeNumber(given.delay_s, "delay_s", 0, 315_360_000);
  const priority = wholeNumber(given.priority, "priority", -1000, 1000);
  return {
    kind,
    payload: payloadOf(Object.hasOwn(site.kinds, kind) ? site.kinds[kind] : undefined, given),
    ...(queue && { queue }),
    ...(unique_key && { unique_key }),
    ...(webhook && { webhook }),
    ...(owner && { owner }),
    ...(delay_s !== null && { delay_s }),
    ...(priority !== null && { priority }),
  };
}

function form(
  site: Site,
  c: Context<Env>,
  name: string,
  given: Record<string, string>,
  problem?: Problem,
) {
  const offered = offeredBy(site);
  const kind = offered.find(([it]) => it === name)?.[1];
  if (problem?.extra.retryAfterS !== undefined) {
    c.header("retry-after", String(Math.ceil(problem.extra.retryAfterS)));
  }
  return show(c, {
    title: "Submit a job",
    at: "/submit",
    body: html`
      <h1>Submit a job</h1>
      ${problem && html`
        <div class="problem" role="alert">
          <p>${problem.message}</p>
          ${problem.extra.retryAfterS !== undefined && html`
            <p>Come back in ${Math.ceil(problem.extra.retryAfterS)} s.</p>
          `}
        </div>
      `}
      <nav class="kinds" aria-label="Kinds">
        <ul>
          ${offered.map(([it, { runs }]) =>
            html`
              <li><a href="/submit?kind=${encodeURIComponent(it)}" ${it === name
                ? html`aria-current="page"`
                : ""}>${it} <span class="muted">${runs}</span></a></li>
            `
          )}
        </ul>
      </nav>
      ${kind
        ? kindForm(site, c, name, kind, given)
        : html`<p class="empty">There is no kind ${name}.</p>`}
    `,
  }, problem?.status ?? (kind ? 200 : 404));
}

function kindForm(
  site: Site,
  c: Context<Env>,
  name: string,
  kind: Kind,
  given: Record<string, string>,
): Markup {
  return html`
    <form class="card fields" method="post" action="/submit" enctype="multipart/form-data">
      ${csrfField(c)}
      <input type="hidden" name="kind" value="${name}" />
      ${kind.price !== undefined && html`<p>Costs ${kind.price} credits when it is done.</p>`}
      ${inputs(kind, given)}
      <label for="file">Files ${name === "transcribe"
        ? ""
        : html`<span class="muted">(optional)</span>`}</label>
      <input id="file" name="file" type="file" ${name === "transcribe"
        ? html`required accept="audio/wav,.wav"`
        : "multiple"} aria-describedby="file-hint" />
      <p class="hint" id="file-hint">${name === "transcribe"
        ? "A WAV recording of a melody. "
        : ""}Up to ${bytes(site.settings.maxFileBytes)} each.</p>
      <details ${more.some((it) => given[it]) ? "open" : ""}>
        <summary>More: queue, time, key${c.get("who").admin ? ", owner, priority" : ""}</summary>
        ${moreFields(site, c, given)}
      </details>
      <div class="buttons"><button>Submit</button></div>
    </form>
  `;
}

const more = ["queue", "delay_s", "unique_key", "webhook", "owner", "priority"];

function moreFields(site: Site, c: Context<Env>, given: Record<string, string>): Markup {
  const field = (name: string, label: string, hint: string, type = "text") =>
    html`
      <label for="${name}">${label} <span class="muted">(optional)</span></label>
      <input id="${name}" name="${name}" type="${type}" value="${given[name] ?? ""}"
        aria-describedby="${name}-hint" autocomplete="off" />
      <p class="hint" id="${name}-hint">${hint}</p>
    `;
  return html`
    ${field("queue", "Queue", "The queue named default, if not given.")}
    ${field(
      "delay_s",
      "Seconds from now",
      "It waits for that long before it is in line.",
      "number",
    )}
    ${field(
      "unique_key",
      "Unique key",
      "An unfinished job of this kind with the same key is taken instead of a second one.",
    )}
    ${site.secrets.webhook !== undefined &&
      field("webhook", "Webhook", "A URL that is told when the job ends.", "url")}
    ${c.get("who").admin && html`
      ${field("owner", "Owner", "Whose job it is: who has a key of theirs sees it.")}
      ${field("priority", "Priority", "From -1000 to 1000; larger is sooner.", "number")}
    `}
  `;
}
