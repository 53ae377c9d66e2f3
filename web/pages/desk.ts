/** The review desk: paid jobs of which nobody knows whether they were sent, and what a person can say. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import { failReview, requeue, resume, type Review, reviews } from "../../desk.ts";
import { isId } from "../jobs.ts";
import { Problem } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { trustedForm } from "./forms.ts";
import { ago, csrfField, cutTo, type Markup, show } from "./layout.ts";

const MOST = 20;

export function desk(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/review", async (c) => {
    const after = c.req.query("after") ?? "0";
    if (after !== "0" && !isId(after)) throw new Problem(422, "after: it must be a job's id");
    const found = await site.db.run((sql) => reviews(sql, MOST + 1, after));
    const items = found.slice(0, MOST);
    return show(c, {
      title: "Review",
      at: "/review",
      body: html`
        <h1>Review desk</h1>
        <p class="lead">Each of these may have been sent to a service that charges, and nobody knows
          whether it was. Look there for its key, then say what you found.</p>
        ${items.length === 0
          ? html`<p class="empty">Nothing waits for you here.</p>`
          : html`${items.map((it) => review(c, it))}`}
        ${found.length > MOST && html`
          <nav class="pager" aria-label="Pages"><a href="/review?after=${items.at(-1)!
            .id}" rel="next">Next</a></nav>
        `}
      `,
    });
  });
  app.post("/review/:id/:action", async (c) => {
    const { request_id = "", reason = "" } = await trustedForm(c);
    const { id, action } = c.req.param();
    if (!isId(id)) throw new Problem(404, "there is no such job");
    await site.db.run((sql) => {
      if (action === "resume") return resume(sql, id, request_id.trim());
      if (action === "requeue") return requeue(sql, id);
      if (action === "fail") return failReview(sql, id, reason.trim());
      throw new Problem(404, "there is no such page");
    });
    return c.redirect("/review", 303);
  });
  return app;
}

function review(c: Context<Env>, it: Review): Markup {
  const action = (name: string) => `/review/${it.id}/${name}`;
  return html`
    <article class="card review" aria-labelledby="job-${it.id}">
      <h2 id="job-${it.id}"><a href="/jobs/${it.id}">${it.kind} <span class="id">#${it
        .id}</span></a></h2>
      <dl class="facts">
        <div><dt>Key at the service</dt><dd><code>${it.request_key}</code></dd></div>
        <div><dt>Sent, if it was</dt><dd>${ago(it.sent_at)}</dd></div>
        ${it.owner !== null && html`
          <div>
            <dt>Owner</dt>
            <dd>${it.owner}</dd>
          </div>
        `}
        <div><dt>Queue</dt><dd>${it.queue}</dd></div>
        ${it.looked_up_at && html`
          <div>
            <dt>Asked ${ago(it.looked_up_at)}</dt>
            <dd>${it.look_up ?? "no answer yet"}</dd>
          </div>
        `}
      </dl>
      ${it.error && html`<pre class="error">${it.error}</pre>`}
      <details><summary>Payload</summary><pre>${cutTo(
        JSON.stringify(it.payload, null, 2),
        5000,
      )}</pre></details>
      <div class="choices">
        <form method="post" action="${action("resume")}" class="fields">
          ${csrfField(c)}
          <h3>It was sent</h3>
          <label for="request-${it.id}">Its id at the service</label>
          <input id="request-${it
            .id}" name="request_id" required maxlength="1000" autocomplete="off" spellcheck="false" />
          <button>Resume<span class="sr"> job ${it.id}</span></button>
        </form>
        <form method="post" action="${action("requeue")}" class="fields">
          ${csrfField(c)}
          <h3>It was not</h3>
          <p class="hint">It goes back in line and is sent, with the same key.</p>
          <button>Requeue<span class="sr"> job ${it.id}</span></button>
        </form>
        <form method="post" action="${action("fail")}" class="fields">
          ${csrfField(c)}
          <h3>Give it up</h3>
          <label for="reason-${it.id}">Why</label>
          <input id="reason-${it.id}" name="reason" required maxlength="2000" autocomplete="off" />
          <button class="danger">Fail<span class="sr"> job ${it.id}</span></button>
        </form>
      </div>
    </article>
  `;
}
