/** How the service is, for people. */
import { html } from "hono/html";
import { VERSION } from "../../config.ts";
import type { Apart, Code, Reason } from "../health.ts";
import { duration, type Markup, type Page, scrolling } from "./layout.ts";

/** What is looked at, and so what is the case while its code is no reason. */
const checks: Record<Code, string> = {
  database_unreachable: "The database answers",
  migrations_behind: "It has the migrations of this code",
  no_workers: "Workers report, or there is nothing to do",
  oldest_waiting: "Nobody waits for too long",
  controller_silent: "The controllers look",
  look_failed: "They see the queue",
  railway_refused: "Railway does as it is told",
  scaling_alarm: "Replicas start, and report",
  review_cases: "No job waits for a person to decide",
  schedule_failing: "The schedules are kept",
};
/** While one of these is so, nothing was seen of what comes after them. */
const blind: Code[] = ["database_unreachable", "migrations_behind"];

/** @param told what is for the admin alone */
export function healthPage(
  codes: readonly Code[],
  { messages = [], apart = [] }: { messages?: Reason[]; apart?: Apart[] },
): Page {
  const well = codes.length === 0;
  return {
    title: `Siding is ${well ? "well" : "unwell"}`,
    at: "/health/service",
    body: html`
      <section class="card">
        <h1>Siding is ${well ? "well" : "unwell"}</h1>
        ${scrolling(
          "What was looked at",
          html`
            <table>
              <thead>
                <tr>
                  <th scope="col">What is looked at</th>
                  <th scope="col">So?</th>
                  <th scope="col">Code</th>
                  <th scope="col">Why</th>
                </tr>
              </thead>
              <tbody>${(Object.keys(checks) as Code[]).map((code) =>
                row(code, codes, messages)
              )}</tbody>
            </table>
          `,
        )}
      </section>
      ${apart.length > 0 && html`
        <section class="card">
          <h2>Waiting, for a reason</h2>
          <ul>${apart.map(line)}</ul>
        </section>
      `}
      <p>Version ${VERSION}</p>
    `,
  };
}

function row(code: Code, codes: readonly Code[], messages: readonly Reason[]): Markup {
  const unwell = codes.includes(code);
  const unseen = !unwell && !blind.includes(code) && codes.some((it) => blind.includes(it));
  const said = messages.filter((reason) => reason.code === code);
  return html`
    <tr>
      <th scope="row">${checks[code]}</th>
      <td>${unwell
        ? html`<span class="badge failed"><span aria-hidden="true">✕</span> no</span>`
        : unseen
        ? "not seen"
        : html`<span class="badge done"><span aria-hidden="true">●</span> yes</span>`}</td>
      <td><code>${code}</code></td>
      <td>${said.map(({ message }) => html`<div>${message}</div>`)}</td>
    </tr>
  `;
}

const line = ({ queue, kind, apart, oldest_wait_s }: Apart): Markup =>
  html`<li>${kind} in ${queue}: ${apart.replace("_", " ")}, for ${duration(oldest_wait_s)}</li>`;
