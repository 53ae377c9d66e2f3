/** What all pages share: their frame, and how states, times and sizes are written. */
import type { Context } from "hono";
import { html } from "hono/html";
import type { Status } from "../../queue.ts";
import { asset } from "../assets.ts";
import type { Env } from "../site.ts";

/** Markup, whose values were escaped. */
export type Markup = ReturnType<typeof html>;

export interface Page {
  title: string;
  /** The part of the site that it belongs to, as in its navigation. */
  at?: string;
  /** Static files that it needs: styles, and scripts that run after it is read. */
  styles?: string[];
  scripts?: string[];
  body: Markup;
}

/** Scripts that leave a name behind for ours, which are modules. Both run in order, after the page is read. */
const packages = ["uplot.js", "abcjs.js"];

const admins = [
  ["/dashboard", "Dashboard"],
  ["/jobs", "Jobs"],
  ["/submit", "Submit"],
  ["/review", "Review"],
  ["/queues", "Queues"],
  ["/schedules", "Schedules"],
];
const owners = [["/jobs", "Jobs"], ["/submit", "Submit"]];

/** Answers with a page. What it shows is for who asked, so nobody on the way keeps it. */
export function show(c: Context<Env>, page: Page, status = 200): Response | Promise<Response> {
  const { title, styles = [], scripts = [], body } = page;
  c.header("cache-control", "no-store");
  return c.html(
    html`<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8" />
    <title>${title} · Siding</title>
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <meta name="color-scheme" content="light dark" />
    <link rel="icon" href="${asset("siding.svg")}" type="image/svg+xml" />
    ${
      [...styles, "siding.css", "forms.css", "figures.css"].map((it) =>
        html`<link rel="stylesheet" href="${asset(it)}" />`
      )
    }
    ${
      ["live.js", ...scripts].map((it) =>
        html`<script src="${asset(it)}" ${
          packages.includes(it) ? "defer" : html`type="module"`
        }></script>`
      )
    }
  </head>
  <body>
    <a class="skip" href="#main">Skip to the content</a>
    ${header(c, page)}
    <main id="main" tabindex="-1">${body}</main>
        ${c.get("who") && footer}
  </body>
</html>`,
    status as 200,
  );
}

const footer = html`
  <footer>
    <a href="/api">API</a>
    <a href="/health/service">Health</a>
  </footer>
`;

function header(c: Context<Env>, { at }: Page): Markup {
  const who = c.get("who");
  const links = !who ? [] : who.admin ? admins : owners;
  return html`
    <header class="top">
      <a class="brand" href="/"><img src="${asset("siding.svg")}" alt="" width="44" height="24" />
        <span>Siding</span></a>
      ${who && html`
        <nav aria-label="Site">
          <ul>
            ${links.map(([href, name]) =>
              html`
                <li><a href="${href}" ${at === href
                  ? html`aria-current="page"`
                  : ""}>${name}</a></li>
              `
            )}
          </ul>
        </nav>
        <form class="who" method="post" action="/sign-out">
          ${csrfField(c)}
          <span>${who.admin ? "admin" : who.owner}</span>
          <button class="quiet">Sign out</button>
        </form>
      `}
    </header>
  `;
}

/** What every form carries, the first of its fields. */
export const csrfField = (c: Context<Env>): Markup =>
  html`<input type="hidden" name="csrf" value="${c.get("csrf")}" />`;

/** Told apart by shape and word, and not by colour alone. */
const marks: Record<Status, string> = {
  scheduled: "◷",
  queued: "○",
  running: "◐",
  review: "◇",
  done: "●",
  failed: "✕",
  cancelled: "–",
};
export const statuses = Object.keys(marks) as Status[];

export const badge = (status: Status): Markup =>
  html`<span class="badge ${status}"><span aria-hidden="true">${
    marks[status]
  }</span> ${status}</span>`;

/** An instant, in UTC. */
export const instant = (at: Date | null): Markup =>
  at === null
    ? html`–`
    : html`<time datetime="${at.toISOString()}">${
      at.toISOString().slice(0, 19).replace("T", " ")
    }</time>`;

/** How long ago an instant was; to the eye, in seconds or the largest unit. */
export const ago = (at: Date): Markup =>
  html`<time datetime="${at.toISOString()}" title="${at.toISOString()}">${
    duration((Date.now() - at.getTime()) / 1000)
  } ago</time>`;

/** Seconds as people say them: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`. */
export function duration(s: number | null): string {
  if (s === null || !Number.isFinite(s)) return "–";
  if (s < 0.95) return `${Math.max(0, s).toFixed(1)} s`;
  const units: [string, number][] = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];
  const whole = Math.round(s);
  const first = units.findIndex(([, size]) => whole >= size);
  const [unit, size] = units[first];
  const rest = units[first + 1];
  const left = rest ? Math.floor(whole % size / rest[1]) : 0;
  return `${Math.floor(whole / size)} ${unit}` + (left > 0 ? ` ${left} ${rest[0]}` : "");
}

export const count = (n: number) => n.toLocaleString("en-US");

/** A count that stopped at a bound. */
export const atLeast = (n: number, most: number) => count(n) + (n >= most ? "+" : "");

export function bytes(n: number): string {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]] as const) {
    if (n >= size) return `${Number((n / size).toFixed(1))} ${unit}`;
  }
  return `${n} B`;
}

/** A part of a page that live.js fetches anew every so often; `id` finds it in the new one. */
export const live = (id: string, everyS: number, content: Markup): Markup =>
  html`<div id="${id}" data-live="${everyS}">${content}</div>`;

/** A table that may be wider than the screen: it scrolls by itself, with the keyboard too. */
export const scrolling = (label: string, content: Markup): Markup =>
  html`<div class="scroll" role="group" tabindex="0" aria-label="${label}">${content}</div>`;

/** A text of somebody's, cut to what a cell holds. */
export const cutTo = (text: string, most: number) =>
  text.length > most ? `${text.slice(0, most).toWellFormed()}…` : text;
