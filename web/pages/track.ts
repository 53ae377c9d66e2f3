/** Where a job is, as a line with its stations; what holds it up is a siding beside the line. */
import { html } from "hono/html";
import type { JobView } from "../../queue.ts";
import { duration, type Markup } from "./layout.ts";
import { runOf, waitOf } from "./jobs.ts";

interface Station {
  name: string;
  note: string;
  /** `aside`: it waits there for somebody or something, off the line. */
  is: "passed" | "here" | "ahead" | "aside" | "ended";
}

/** The stations of a job: submitted, in line, running, and its end. */
function stationsOf(job: JobView): Station[] {
  const { status, claimed_at } = job;
  const final = job.finished_at !== null;
  const waited = waitOf(job);
  const stations: Station[] = [{ name: "Submitted", note: "", is: "passed" }];
  if (status === "scheduled") {
    stations.push({ name: "Scheduled", note: "not due yet", is: "aside" });
  }
  if (status === "review") stations.push({ name: "In review", note: "for a person", is: "aside" });
  stations.push({
    name: "In line",
    note: status === "scheduled" || status === "review" ? "" : duration(waited),
    is: status === "queued" ? "here" : status === "running" || final ? "passed" : "ahead",
  });
  const ran = status === "running" || (final && claimed_at !== null);
  stations.push({
    name: "Running",
    note: ran ? duration(runOf(job)) : "",
    is: status === "running" ? "here" : ran ? "passed" : "ahead",
  });
  stations.push({
    name: status === "failed" ? "Failed" : status === "cancelled" ? "Cancelled" : "Done",
    note: "",
    is: !final ? "ahead" : status === "done" ? "passed" : "ended",
  });
  return stations;
}

const said = { passed: "passed", here: "now", ahead: "to come", aside: "now", ended: "ended here" };

export const track = (job: JobView): Markup =>
  html`
    <ol class="track" aria-label="Stations of the job">
      ${stationsOf(job).map(({ name, note, is }) =>
        html`
          <li class="${is}" ${is === "here" || is === "aside" ? html`aria-current="step"` : ""}>
            <span class="name">${name}</span><span class="sr">, ${said[is]}</span>
            <span class="note">${note}</span>
          </li>
        `
      )}
    </ol>
  `;
