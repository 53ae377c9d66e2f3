/** What went wrong, as a page for people. */
import type { Context } from "hono";
import { html } from "hono/html";
import { problemOf } from "../problem.ts";
import type { Env } from "../site.ts";
import { show } from "./layout.ts";

const titles: Record<number, string> = {
  403: "Not from this session",
  404: "Not found",
  409: "Not possible now",
  413: "Too large",
  422: "That does not fit",
  429: "Too many",
  503: "The database is away",
};

/** Answers with a page that says what was thrown. */
export function showError(c: Context<Env>, error: unknown): Response | Promise<Response> {
  const { status, message, extra: { retryAfterS } } = problemOf(error);
  if (retryAfterS !== undefined) c.header("retry-after", String(Math.ceil(retryAfterS)));
  const title = titles[status] ?? "Something failed";
  return show(c, {
    title,
    body: html`
      <section class="card narrow">
        <p class="code">${status}</p>
        <h1>${title}</h1>
        <p>${message}</p>
        ${retryAfterS !== undefined && html`
          <p>Come back in ${Math.ceil(retryAfterS)} s.</p>
        `}
        <p><a href="/">Back to the start</a></p>
      </section>
    `,
  }, status);
}
