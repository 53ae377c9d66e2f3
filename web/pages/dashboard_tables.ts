/** The tables of the dashboard. */
import { html } from "hono/html";
import { dollarsOf, MONTH_S, type PoolSeconds, type Prices } from "../../costs.ts";
import { COUNTED_TO, type QueueStatus } from "../../listing.ts";
import {
  type Failures,
  type Lately,
  MOST_FAILED,
  MOST_FINISHED,
  type Process,
} from "../overview.ts";
import { ago, atLeast, count, duration, type Markup, scrolling } from "./layout.ts";

const section = (id: string, title: string, content: Markup) =>
  html`
    <section class="card"
      aria-labelledby="${id}-title"><h2 id="${id}-title">${title}</h2>${content}</section>
  `;

export function kindTable(kinds: Lately[]): Markup {
  if (kinds.length === 0) {
    return section(
      "kinds",
      "Throughput",
      html`<p class="empty">No job finished in the last hour.</p>`,
    );
  }
  const [{ read, read_s }] = kinds;
  const all = read < MOST_FINISHED;
  return section(
    "kinds",
    "Throughput",
    scrolling(
      "Throughput by kind",
      html`
        <table>
          <caption>${all
            ? "Jobs that finished in the last hour"
            : `The last ${count(read)} jobs that finished, in ${duration(read_s)}`}</caption>
          <thead>
            <tr>
              <th scope="col">Kind</th>
              <th scope="col" class="number">Finished</th>
              <th scope="col" class="number">A minute</th>
              <th scope="col" class="number">Failed</th>
              <th scope="col" class="number">Cancelled</th>
              <th scope="col" class="number">Wait p50</th>
              <th scope="col" class="number">p95</th>
              <th scope="col" class="number">Run p50</th>
              <th scope="col" class="number">p95</th>
            </tr>
          </thead>
          <tbody>
            ${kinds.map((it) =>
              html`
                <tr>
                  <th scope="row"><a href="/jobs?kind=${encodeURIComponent(it.kind)}">${it
                    .kind}</a></th>
                  <td class="number">${count(it.jobs)}</td>
                  <td class="number">${rate(it.jobs / (read_s / 60))}</td>
                  <td class="number ${it.failed ? "bad" : ""}">${count(it.failed)}</td>
                  <td class="number">${count(it.cancelled)}</td>
                  <td class="number">${duration(it.wait_p50_s)}</td>
                  <td class="number">${duration(it.wait_p95_s)}</td>
                  <td class="number">${duration(it.run_p50_s)}</td>
                  <td class="number">${duration(it.run_p95_s)}</td>
                </tr>
              `
            )}
          </tbody>
        </table>
      `,
    ),
  );
}

const rate = (perMinute: number) =>
  perMinute < 10 ? perMinute.toFixed(2) : count(Math.round(perMinute));

export function failureTable(failures: Failures[]): Markup {
  if (failures.length === 0) {
    return section("failures", "Failures", html`<p class="empty">No job has failed.</p>`);
  }
  return section(
    "failures",
    "Failures",
    scrolling(
      "Failures",
      html`
        <table class="failures">
          <caption>Of the last ${count(MOST_FAILED)} failed jobs, by kind and message</caption>
          <thead>
            <tr>
              <th scope="col">Kind</th>
              <th scope="col">Message</th>
              <th scope="col" class="number">Jobs</th>
              <th scope="col">Last</th>
            </tr>
          </thead>
          <tbody>
            ${failures.map((it) =>
              html`
                <tr>
                  <th scope="row"><a href="/jobs?status=failed&amp;kind=${encodeURIComponent(
                    it.kind,
                  )}">${it.kind}</a></th>
                  <td class="message">${it.message}</td>
                  <td class="number">${count(it.jobs)}</td>
                  <td><a href="/jobs/${it.last_id}">#${it.last_id}</a>, ${ago(it.last_at)}</td>
                </tr>
              `
            )}
          </tbody>
        </table>
      `,
    ),
  );
}

export function workerTable(processes: Process[]): Markup {
  if (processes.length === 0) {
    return section(
      "workers",
      "Processes",
      html`<p class="empty">No process reports. Start a worker with <code>deno task worker</code>.</p>`,
    );
  }
  const stateOf = (it: Process) =>
    it.silent ? "silent" : it.role !== "worker" ? "there" : it.running > 0 ? "busy" : "idle";
  return section(
    "workers",
    "Processes",
    scrolling(
      "Processes",
      html`
        <table>
          <caption>Workers, controllers and sites that report</caption>
          <thead>
            <tr>
              <th scope="col">Process</th>
              <th scope="col">State</th>
              <th scope="col" class="number">Jobs</th>
              <th scope="col" class="number">Seen</th>
            </tr>
          </thead>
          <tbody>
            ${processes.map((it) =>
              html`
                <tr>
                  <th scope="row">${it.role} <span class="muted">${it.name}, pool ${it
                    .pool}</span></th>
                  <td><span class="state ${stateOf(it)}">${stateOf(it)}</span></td>
                  <td class="number">${it.role === "worker"
                    ? `${it.running} of ${it.concurrency}`
                    : "–"}</td>
                  <td class="number">${duration(it.seen_s)} ago</td>
                </tr>
              `
            )}
          </tbody>
        </table>
      `,
    ),
  );
}

export const queueTable = (depths: QueueStatus[]): Markup =>
  section(
    "depth",
    "Queue depth",
    scrolling(
      "Queue depth",
      html`
        <table>
          <caption>Unfinished jobs by queue</caption>
          <thead>
            <tr>
              <th scope="col">Queue</th>
              <th scope="col" class="number">In line</th>
              <th scope="col" class="number">Running</th>
              <th scope="col" class="number">Later</th>
              <th scope="col" class="number">Oldest</th>
            </tr>
          </thead>
          <tbody>
            ${depths.map((it) =>
              html`
                <tr>
                  <th scope="row"><a href="/queues#queue-${it.name}">${it.name}</a>${it.paused
                    ? html`
                      <span class="state paused">paused</span>
                    `
                    : ""}</th>
                  <td class="number">${atLeast(it.queued, COUNTED_TO)}</td>
                  <td class="number">${atLeast(it.running, COUNTED_TO)}${it.max_running === null
                    ? ""
                    : ` of ${it.max_running}`}</td>
                  <td class="number">${atLeast(it.scheduled, COUNTED_TO)}</td>
                  <td class="number">${duration(it.oldest_wait_s)}</td>
                </tr>
              `
            )}
          </tbody>
        </table>
      `,
    ),
  );

export function costTable(costs: PoolSeconds[], prices: Prices): Markup {
  if (costs.length === 0) return html``;
  const hours = (s: number) => (s / 3600).toFixed(2);
  return section(
    "cost",
    "Cost so far",
    scrolling(
      "Cost",
      html`
        <table>
          <caption>The last 24 hours, by what the controller's looks saw: ${prices
            .vcpu} vCPU and ${prices.gb} GB while a replica runs jobs, ${prices
            .idleVcpu} and ${prices.idleGb} while it waits</caption>
          <thead>
            <tr>
              <th scope="col">Pool</th>
              <th scope="col" class="number">Hours seen</th>
              <th scope="col" class="number">Replica-hours</th>
              <th scope="col" class="number">Busy</th>
              <th scope="col" class="number">Dollars</th>
              <th scope="col" class="number">30 days of this</th>
            </tr>
          </thead>
          <tbody>
            ${costs.map((it) => {
              const dollars = dollarsOf(it.replica_s, it.busy_s, prices);
              return html`
                <tr>
                  <th scope="row">${it.pool}</th>
                  <td class="number">${hours(it.seen_s)}</td>
                  <td class="number">${hours(it.replica_s)}</td>
                  <td class="number">${hours(it.busy_s)}</td>
                  <td class="number">${dollars.toFixed(4)}</td>
                  <td class="number">${(dollars * MONTH_S / it.seen_s).toFixed(2)}</td>
                </tr>
              `;
            })}
          </tbody>
        </table>
      `,
    ),
  );
}
