/** The dashboard: what waits, what runs, who works on it, what the controller decided, what it costs. */
import { type Context, Hono } from "hono";
import { html } from "hono/html";
import { dollarsOf, type PoolSeconds } from "../../costs.ts";
import { COUNTED_TO, MAX_QUEUES, type QueueStatus, queueStatus } from "../../listing.ts";
import * as overview from "../overview.ts";
import { Problem } from "../problem.ts";
import type { Env, Site } from "../site.ts";
import { costTable, failureTable, kindTable, queueTable, workerTable } from "./dashboard_tables.ts";
import { decisionTable, seriesOf } from "./decisions.ts";
import { atLeast, count, cutTo, duration, live, type Markup, show } from "./layout.ts";

const REFRESH_S = 5;
const DAY_S = 86_400;
/** The hours that charts and decisions may go back. */
const spans = [1, 6, 24];

export function dashboard(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/dashboard", async (c) => {
    const { pool, pools, hours } = await choice(site, c);
    const silentS = site.settings.heartbeatMs * 3 / 1000;
    const run = site.db.run.bind(site.db);
    const [depths, processes, kinds, failures, seen, costs] = await Promise.all([
      run(queueStatus),
      run((sql) => overview.processes(sql, silentS)),
      run(overview.lately),
      run(overview.failures),
      run((sql) => overview.seen(sql, pool, hours * 3600)),
      run((sql) => overview.costs(sql, DAY_S)),
    ]);
    const last = seen.at(-1);
    return show(c, {
      title: "Dashboard",
      at: "/dashboard",
      styles: ["uplot.css"],
      scripts: ["uplot.js", "charts.js"],
      body: html`
        <h1 class="sr">Dashboard</h1>
        ${live("tiles", REFRESH_S, tiles(site, depths, processes, last, costs))}
        ${charts(pool, pools, hours, seen.length)}
        ${live("decisions", REFRESH_S, decisionTable(seen))}
        ${live("kinds-live", REFRESH_S, kindTable(kinds))}
        ${live("failures-live", REFRESH_S, failureTable(failures))}
        <div class="columns">
          ${live("workers-live", REFRESH_S, workerTable(processes))}
          ${live("queues-live", REFRESH_S, queueTable(depths))}
        </div>
        ${live("cost-live", REFRESH_S, costTable(costs, site.settings))}
      `,
    });
  });
  app.get("/dashboard/data.json", async (c) => {
    const { pool, hours } = await choice(site, c);
    c.header("cache-control", "no-store");
    return c.json(seriesOf(await site.db.run((sql) => overview.seen(sql, pool, hours * 3600))));
  });
  return app;
}

/** Which pool and time the query asks for; if none, the site's own pool or else the first with looks. */
async function choice(site: Site, c: Context<Env>) {
  const pools = await site.db.run(overview.pools);
  const own = pools.includes(site.settings.pool) ? site.settings.pool : pools[0];
  const pool = c.req.query("pool") ?? own ?? site.settings.pool;
  const hours = Number(c.req.query("hours") ?? spans[0]);
  if (!spans.includes(hours)) {
    throw new Problem(
      422,
      `hours is "${cutTo(String(c.req.query("hours")), 20)}": it must be one of ${
        spans.join(", ")
      }`,
    );
  }
  return { pool, pools, hours };
}

function tiles(
  site: Site,
  depths: QueueStatus[],
  processes: overview.Process[],
  last: overview.Seen | undefined,
  costs: PoolSeconds[],
): Markup {
  const sum = (key: "queued" | "running" | "scheduled" | "review") => {
    const counts = depths.map((it) => it[key]);
    const total = counts.reduce((a, b) => a + b, 0);
    // Those in line are counted queue by queue, the others for all queues at once.
    const cut = key === "queued" ? counts.some((it) => it >= COUNTED_TO) : total >= COUNTED_TO;
    return count(total) + (cut || depths.length === MAX_QUEUES ? "+" : "");
  };
  const oldestS = Math.max(...depths.map((it) => it.oldest_wait_s ?? -1));
  const workers = processes.filter((it) => it.role === "worker");
  const silent = workers.filter((it) => it.silent).length;
  const busy = workers.filter((it) => !it.silent && it.running > 0).length;
  const idle = workers.length - silent - busy;
  const dollars = costs.reduce(
    (total, it) => total + dollarsOf(it.replica_s, it.busy_s, site.settings),
    0,
  );
  const review = depths.reduce((total, it) => total + it.review, 0);
  const tile = (name: string, value: Markup | string, note: Markup | string, more = "") =>
    html`
      <div class="tile ${more}">
        <dt>${name}</dt>
        <dd><span class="figure">${value}</span> <span class="note">${note}</span></dd>
      </div>
    `;
  return html`
    <dl class="tiles">
      ${tile(
        "In line",
        html`<a href="/jobs?status=queued">${sum("queued")}</a>`,
        oldestS < 0 ? "nobody waits" : `oldest ${duration(oldestS)}`,
      )}
      ${tile(
        "Running",
        html`<a href="/jobs?status=running">${sum("running")}</a>`,
        `${sum("scheduled")} due later`,
      )}
      ${tile(
        "In review",
        html`<a href="/review">${atLeast(review, COUNTED_TO)}</a>`,
        review ? "for a person" : "nothing to decide",
        review ? "warn" : "",
      )}
      ${tile(
        "Workers",
        String(busy + idle),
        `${busy} busy, ${idle} idle${silent ? `, ${silent} silent` : ""}`,
        silent ? "warn" : "",
      )}
      ${tile(
        "Replicas",
        last ? `${last.replicas ?? "?"}` : "–",
        last ? `${last.wanted ?? "?"} wanted` : "no controller looked",
        last?.alarms.length ? "warn" : "",
      )}
      ${tile(
        "Cost, 24 h",
        costs.length ? `$${dollars.toFixed(2)}` : "–",
        costs.length ? "at Railway's prices" : "no look saw replicas",
      )}
    </dl>
  `;
}

function charts(pool: string, pools: string[], hours: number, looks: number): Markup {
  const data = `/dashboard/data.json?${new URLSearchParams({ pool, hours: String(hours) })}`;
  return html`
    <section class="card" aria-labelledby="charts-title">
      <div class="heading">
        <h2 id="charts-title">The line and the workers</h2>
        <form class="filter inline" method="get" action="/dashboard">
          ${pools.length > 1
            ? html`
              <label for="pool">Pool</label>
              <select id="pool" name="pool">${pools.map((it) =>
                html`<option ${it === pool ? "selected" : ""}>${it}</option>`
              )}</select>
            `
            : html`<input type="hidden" name="pool" value="${pool}" />`}
          <label for="hours">Last</label>
          <select id="hours" name="hours">${spans.map((it) =>
            html`<option value="${it}" ${it === hours ? "selected" : ""}>${it} h</option>`
          )}</select>
          <button>Show</button>
          <button type="button" class="quiet" data-pause hidden>Pause updates</button>
        </form>
      </div>
      ${looks === 0
        ? html`
          <p
            class="empty">No controller has looked at the pool ${pool} in this time. Start one with <code>deno task controller</code>.</p>
        `
        : html`
          <div class="charts" data-charts="${data}">
            <figure>
              <figcaption>Jobs in line and running</figcaption>
              <div data-chart="jobs" role="img"
                aria-label="Jobs in line and running over time; the table of decisions has the numbers"></div>
            </figure>
            <figure>
              <figcaption>Replicas wanted and running, workers busy</figcaption>
              <div data-chart="workers" role="img"
                aria-label="Replicas wanted and running, and busy workers, over time; the table of decisions has the numbers"></div>
            </figure>
          </div>
          <p class="why"
            data-why>Point at the charts to see why the controller decided as it did; the table has the same.</p>
          <noscript><p class="hint">The charts need JavaScript. The table below has what the controller saw and decided.</p></noscript>
        `}
    </section>
  `;
}
