/** Queues: how full they are, pausing them, their limits, and new ones. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import { schema } from "../../db.ts";
import { type QueueSettings, setQueue } from "../../queue.ts";
import { COUNTED_TO, MAX_QUEUES, type QueueStatus, queueStatus } from "../../listing.ts";
import { Problem } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { decimal, trustedForm, wholeNumber } from "./forms.ts";
import { atLeast, csrfField, duration, type Markup, show } from "./layout.ts";

const claims = ["skip_locked", "lock", "repeatable_read"] as const;
const MOST = 1_000_000_000;
/** The longest period of a rate limit, in seconds: 31 days. */
const MAX_PERIOD_S = 2_678_400;

export function queues(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/queues", async (c) => {
    const items = await site.db.run(queueStatus);
    return show(c, {
      title: "Queues",
      at: "/queues",
      body: html`
        <h1>Queues</h1>
        <div class="cards">${items.map((it) => card(c, it))}</div>
        ${items.length === MAX_QUEUES &&
          html`<p class="hint">The first ${MAX_QUEUES} by name.</p>`}
        ${creation(c)}
      `,
    });
  });
  app.post("/queues", async (c) => {
    const { name = "", do: action, ...rest } = await trustedForm(c);
    const creates = action === "create";
    const settings = action === "pause"
      ? { paused: true }
      : action === "resume"
      ? { paused: false }
      : settingsOf(rest);
    checkName(name);
    await site.db.run(async (sql) => {
      const [there] = await sql`select from ${sql(schema)}.queues where name = ${name}`;
      if (!there && !creates) throw new Problem(404, `there is no queue ${name}`);
      if (there && creates) throw new Problem(409, `there is a queue ${name} already`);
      await setQueue(sql, name, settings);
    });
    return c.redirect(`/queues#queue-${name}`, 303);
  });
  return app;
}

function checkName(name: string): void {
  if (/^[a-z0-9_.-]{1,63}$/.test(name)) return;
  throw new Problem(
    422,
    `name is "${name.slice(0, 70)}": it must be 1 to 63 of a-z, 0-9, ".", "_" and "-"`,
  );
}

/** What a form says of a queue. An empty limit is none. */
function settingsOf(given: Record<string, string | undefined>): QueueSettings {
  const claim = claims.find((it) => it === given.claim);
  if (!claim) throw new Problem(422, `claim: it must be one of ${claims.join(", ")}`);
  const limit = (name: string) => wholeNumber(given[name], name, 1, MOST);
  const max_running = limit("max_running");
  const rate_limit = limit("rate_limit");
  const rate_period_s = decimal(given.rate_period_s, "rate_period_s", 0.001, MAX_PERIOD_S);
  if ((rate_limit === null) !== (rate_period_s === null)) {
    throw new Problem(
      422,
      "rate_limit and rate_period_s: give both, so many starts in so many seconds, or neither",
    );
  }
  const fair = given.fair === "yes";
  const inTurns = Object.entries({ max_running, rate_limit, fair }).find(([, value]) => value);
  if (inTurns && claim === "skip_locked") {
    throw new Problem(
      422,
      `claim is skip_locked and ${
        inTurns[0]
      } is given: such a queue claims in turns, by lock or by repeatable_read`,
    );
  }
  return {
    ...{ claim, fair, max_running, rate_limit, rate_period_s },
    max_waiting: limit("max_waiting"),
    max_per_owner: limit("max_per_owner"),
  };
}

function card(c: Context<Env>, it: QueueStatus): Markup {
  const { name, paused } = it;
  const verb = paused ? "resume" : "pause";
  return html`
    <section class="card queue" id="queue-${name}" aria-labelledby="title-${name}">
      <div class="heading">
        <h2 id="title-${name}">${name}</h2>
        <form method="post" action="/queues">
          ${csrfField(c)}
          <input type="hidden" name="name" value="${name}" />
          <span class="state ${paused ? "paused" : "open"}">${paused ? "paused" : "open"}</span>
          <button name="do" value="${verb}">${paused
            ? "Resume"
            : "Pause"}<span class="sr"> queue ${name}</span></button>
        </form>
      </div>
      <dl class="facts row">
        <div>
          <dt>In line</dt>
          <dd><a href="/jobs?status=queued&amp;queue=${name}">${atLeast(
            it.queued,
            COUNTED_TO,
          )}</a></dd>
        </div>
        <div>
          <dt>Running</dt>
          <dd>${atLeast(it.running, COUNTED_TO)}${it.max_running === null
            ? ""
            : ` of ${it.max_running}`}</dd>
        </div>
        <div>
          <dt>Scheduled</dt>
          <dd>${atLeast(it.scheduled, COUNTED_TO)}</dd>
        </div>
        <div>
          <dt>Oldest waits</dt>
          <dd>${duration(it.oldest_wait_s)}</dd>
        </div>
      </dl>
      <details>
        <summary>Limits<span class="sr"> of queue ${name}</span></summary>
        <form method="post" action="/queues" class="fields">
          ${csrfField(c)}
          <input type="hidden" name="name" value="${name}" /> ${limits(it, name)}
          <div class="buttons"><button name="do" value="limits">Save<span class="sr"> limits of queue ${name}</span></button></div>
        </form>
      </details>
    </section>
  `;
}

type Limits = Pick<
  QueueStatus,
  | "claim"
  | "fair"
  | "max_running"
  | "max_waiting"
  | "max_per_owner"
  | "rate_limit"
  | "rate_period_s"
>;

function limits(it: Limits, name: string): Markup {
  const field = (key: keyof Limits, label: string, step = "1") =>
    html`
      <label for="${key}-${name}">${label}</label>
      <input id="${key}-${name}" name="${key}" type="number" min="${step}"
        step="${step}"
        value="${it[key] ?? ""}" placeholder="no limit" />
    `;
  return html`
    ${field("max_running", "Running at a time, across all workers")}
    ${field("max_waiting", "Waiting, about")}
    ${field("max_per_owner", "Unfinished of one owner")}
    ${field("rate_limit", "Starts, across all workers")}
    ${field("rate_period_s", "… in so many seconds", "0.001")}
    <label
      class="check"><input type="checkbox" name="fair" value="yes" ${it.fair
        ? "checked"
        : ""} /> Owners take turns</label>
    <label for="claim-${name}">Claimed by</label>
    <select id="claim-${name}" name="claim" aria-describedby="claim-hint-${name}">
      ${claims.map((claim) =>
        html`<option ${claim === it.claim ? "selected" : ""}>${claim}</option>`
      )}
    </select>
    <p class="hint"
      id="claim-hint-${name}">Limits of those running and of starts, and owners’ turns, need claims in turns: lock or repeatable_read.</p>
  `;
}

const creation = (c: Context<Env>): Markup =>
  html`
    <section class="card narrow" aria-labelledby="new-queue">
      <h2 id="new-queue">New queue</h2>
      <form method="post" action="/queues" class="fields">
        ${csrfField(c)}
        <label for="name">Name</label>
        <input id="name" name="name" required pattern="[a-z0-9_.\\-]{1,63}" autocomplete="off" spellcheck="false" aria-describedby="name-hint" />
        <p class="hint" id="name-hint">1 to 63 of a-z, 0-9, “.”, “_” and “-”.</p>
        ${limits({
          ...{ claim: "skip_locked", fair: false, max_running: null, max_waiting: null },
          ...{ max_per_owner: null, rate_limit: null, rate_period_s: null },
        }, "+new")}
        <div class="buttons"><button name="do" value="create">Create</button></div>
      </form>
    </section>
  `;
