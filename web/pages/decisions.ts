/** The controller's looks: as the series of the charts, and as a table of its decisions. */
import { html } from "hono/html";
import type { Seen } from "../overview.ts";
import { cutTo, duration, type Markup, scrolling } from "./layout.ts";

const MOST_DECISIONS = 60;

/** A list for each of what a chart draws, and the reason of each look as a number in `reasons`. */
export function seriesOf(seen: Seen[]) {
  const reasons: string[] = [];
  const numbers = new Map<string, number>();
  const reason = seen.map(({ reason, alarms, error }) => {
    const text = [reason, ...alarms.map((it) => `alarm: ${it}`), ...(error ? [error] : [])].join(
      "; ",
    );
    if (!numbers.has(text)) numbers.set(text, reasons.push(text) - 1);
    return numbers.get(text)!;
  });
  const of = <K extends keyof Seen>(key: K) => seen.map((it) => it[key]);
  return {
    at_s: of("at_s"),
    waiting: of("waiting"),
    running: of("running"),
    wanted: of("wanted"),
    replicas: of("replicas"),
    busy: of("busy"),
    code: of("code"),
    reason,
    reasons,
  };
}

/** Looks that decided the same, one after the other, as the first of them; the newest first. */
function decisionsOf(seen: Seen[]): (Seen & { looks: number })[] {
  const decisions: (Seen & { looks: number })[] = [];
  const signature = (it: Seen) =>
    [it.code, it.wanted, it.act === "failed", it.alarms, it.error].join("|");
  for (const it of seen) {
    const last = decisions.at(-1);
    if (last && signature(last) === signature(it)) last.looks++;
    else decisions.push({ ...it, looks: 1 });
  }
  return decisions.reverse().slice(0, MOST_DECISIONS);
}

export function decisionTable(seen: Seen[]): Markup {
  if (seen.length === 0) return html``;
  const known = (n: number | null) => n === null ? "?" : String(n);
  return html`
    <section class="card" aria-labelledby="decisions-title">
      <details open>
        <summary><h2 id="decisions-title">The controller's decisions</h2></summary>
        ${scrolling(
          "Decisions",
          html`
            <table class="decisions">
              <caption>The newest first; “?” is what a look could not see</caption>
              <thead>
                <tr>
                  <th scope="col">Since</th>
                  <th scope="col">Decision</th>
                  <th scope="col">Why</th>
                  <th scope="col" class="number">Wanted</th>
                  <th scope="col" class="number">Replicas</th>
                  <th scope="col" class="number">In line</th>
                  <th scope="col" class="number">Looks</th>
                </tr>
              </thead>
              <tbody>
                ${decisionsOf(seen).map((it) =>
                  html`
                    <tr>
                      <th scope="row">${duration(it.age_s)} ago</th>
                      <td><span class="code-${it.code}">${it.code}</span>${it.act === "failed"
                        ? " (refused)"
                        : ""}</td>
                      <td class="why-cell">${it.reason}${it.alarms.map((alarm) =>
                        html`
                          <strong class="alarm">${alarm}</strong>
                        `
                      )}
                        ${it.error && html`<span class="error">${cutTo(it.error, 300)}</span>`}</td>
                      <td class="number">${known(it.wanted)}</td>
                      <td class="number">${known(it.replicas)}</td>
                      <td class="number">${known(it.waiting)}</td>
                      <td class="number">${it.looks}</td>
                    </tr>
                  `
                )}
              </tbody>
            </table>
          `,
        )}
      </details>
    </section>
  `;
}
