/** Schedules: when each comes next, what became of its last tick, what is wrong with it, and pausing it. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import { Refused } from "../../queue.ts";
import {
  enableSchedule,
  listSchedules,
  MAX_SCHEDULES,
  nextTicks,
  onClocksOf,
  type Schedule,
} from "../../schedules.ts";
import { Problem } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { trustedForm } from "./forms.ts";
import { ago, badge, csrfField, cutTo, type Markup, show } from "./layout.ts";

/** Ticks that are shown of what is to come. */
const NEXT = 3;

export function schedules(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/schedules", async (c) => {
    const items = await site.db.run(listSchedules);
    return show(c, {
      title: "Schedules",
      at: "/schedules",
      body: html`
        <h1>Schedules</h1>
        ${items.length === 0 && html`
          <p class="empty">There is no schedule. Make one with <code>deno task schedule set</code>.</p>
        `}
        <div class="cards">${items.map((it) => card(c, it))}</div>
        ${items.length === MAX_SCHEDULES &&
          html`<p class="hint">The first ${MAX_SCHEDULES} by name.</p>`}
      `,
    });
  });
  app.post("/schedules", async (c) => {
    const { name = "", do: action } = await trustedForm(c);
    if (action !== "pause" && action !== "resume") {
      throw new Problem(422, "do: it must be pause or resume");
    }
    try {
      await site.db.run((sql) => enableSchedule(sql, name, action === "resume"));
    } catch (error) {
      if (error instanceof Refused) throw new Problem(404, error.message);
      throw error;
    }
    return c.redirect(`/schedules#schedule-${name}`, 303);
  });
  return app;
}

function card(c: Context<Env>, it: Schedule): Markup {
  const { name, enabled, error } = it;
  const state = !enabled ? "paused" : error === null ? "on" : "in error";
  const look = !enabled ? "paused" : error === null ? "open" : "silent";
  const verb = enabled ? "pause" : "resume";
  return html`
    <section class="card queue" id="schedule-${name}" aria-labelledby="title-${name}">
      <div class="heading">
        <h2 id="title-${name}">${name}</h2>
        <form method="post" action="/schedules">
          ${csrfField(c)}
          <input type="hidden" name="name" value="${name}" />
          <span class="state ${look}">${state}</span>
          <button name="do" value="${verb}">${enabled
            ? "Pause"
            : "Resume"}<span class="sr"> schedule ${name}</span></button>
        </form>
      </div>
      ${error !== null && html`<pre class="error">${error}</pre>`}
      <dl class="facts">
        <div><dt>When</dt><dd><code>${it.cron}</code> ${it.time_zone}</dd></div>
        <div>
          <dt>What</dt>
          <dd>${it.kind}${it.queue !== "default" ? ` in ${it.queue}` : ""}${it.owner
            ? ` for ${it.owner}`
            : ""}</dd>
        </div>
        <div><dt>Next, by its clocks</dt>${upcoming(it)}</div>
        <div><dt>Last</dt><dd>${last(it)}</dd></div>
      </dl>
      <details><summary>Payload<span class="sr"> of schedule ${name}</span></summary><pre>${cutTo(
        JSON.stringify(it.payload, null, 2),
        5000,
      )}</pre></details>
    </section>
  `;
}

function upcoming(it: Schedule): Markup {
  const ticks = nextTicks(it, NEXT);
  if (ticks.length === 0) return html`<dd>–</dd>`;
  const shown = onClocksOf(it.time_zone, ticks);
  return html`
    ${ticks.map((tick, i) =>
      html`
        <dd><time datetime="${tick.toISOString()}" title="${tick
          .toISOString()}">${shown[i]}</time></dd>
      `
    )}
  `;
}

function last({ last_at, last_job, last_status }: Schedule): Markup {
  if (last_at === null) return html`no tick yet`;
  if (last_job === null) return html`${ago(last_at)}, missed and skipped`;
  if (last_status === null) return html`${ago(last_at)}, its job was removed`;
  return html`${ago(last_at)}, <a href="/jobs/${last_job}">#${last_job}</a> ${badge(last_status)}`;
}
