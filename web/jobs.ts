/** What the API and MCP do with jobs. Those of others are not found, as if they were not there. */
import type { z } from "@hono/zod-openapi";
import { type FileInfo, inputsOf, outputsOf } from "../files.ts";
import { type Attempt, attempts, type ListedJob, listJobs } from "../listing.ts";
import { cancel, get, type JobView, type Status } from "../queue.ts";
import { Problem } from "./problem.ts";
import type { JobQuery } from "./shapes.ts";
import type { Site, Who } from "./site.ts";

/** The largest bigint: ids beyond it are nobody's. */
const MAX_ID = 2n ** 63n - 1n;

/** Whether a text can be an id in the database. */
export const isId = (text: string) => /^[1-9]\d{0,18}$/.test(text) && BigInt(text) <= MAX_ID;

export const isFinal = ({ status }: { status: Status }) =>
  status === "done" || status === "failed" || status === "cancelled";

/** A job. @throws Problem 404 when there is none, or none of theirs */
export async function visibleJob(site: Site, who: Who, id: string): Promise<JobView> {
  const [job] = isId(id) ? await site.db.run((sql) => get(sql, [id])) : [];
  if (!job || !(who.admin || job.owner === who.owner)) {
    throw new Problem(404, `there is no job ${id.slice(0, 50)}`);
  }
  return job;
}

/** The files of a job: what it was given, and once it is done what it made. */
export async function filesOf(
  site: Site,
  id: string,
): Promise<{ inputs: FileInfo[]; outputs: FileInfo[] }> {
  const [inputs, outputs] = await Promise.all([inputsOf(site.db, id), outputsOf(site.db, id)]);
  return { inputs, outputs };
}

type LinkedFile = FileInfo & { url: string };
export type WholeJob = Omit<JobView, "alone"> & {
  inputs: LinkedFile[];
  outputs: LinkedFile[];
  attempts: Attempt[];
};

/** A job with its files, and why its attempts ended. @throws Problem 404 */
export async function wholeJob(site: Site, who: Who, id: string): Promise<WholeJob> {
  const { alone: _, ...job } = await visibleJob(site, who, id);
  const { inputs, outputs } = await filesOf(site, id);
  const linked = (file: FileInfo) => ({ ...file, url: `/api/jobs/${id}/files/${file.id}` });
  return {
    ...job,
    inputs: inputs.map(linked),
    outputs: outputs.map(linked),
    attempts: await site.db.run((sql) => attempts(sql, id)),
  };
}

/** A page of the jobs that somebody may see. @throws Problem 422 */
export async function visibleJobs(
  site: Site,
  who: Who,
  query: z.output<typeof JobQuery>,
): Promise<{ items: ListedJob[]; next_cursor: string | null }> {
  const { limit, cursor, owner, ...filter } = query;
  if (owner !== undefined && !who.admin) {
    const rule = "only the admin may give it";
    throw new Problem(422, `owner: ${rule}`, { errors: [{ field: "owner", value: owner, rule }] });
  }
  if (cursor !== undefined && !isId(cursor)) {
    const rule = "it must be a next_cursor";
    throw new Problem(422, `cursor: ${rule}`, {
      errors: [{ field: "cursor", value: cursor, rule }],
    });
  }
  const { items, next } = await site.db.run((sql) =>
    listJobs(sql, { ...filter, owner: who.owner ?? owner }, { before: cursor, most: limit })
  );
  return { items, next_cursor: next };
}

/**
 * Cancels a job: at once when it waits, else by asking its worker, and it is `running` until then.
 *
 * @throws Problem 404; 409 when it has ended otherwise, or what came of a paid request is not known
 */
export async function cancelJob(
  site: Site,
  who: Who,
  id: string,
): Promise<{ id: string; status: Status }> {
  await visibleJob(site, who, id);
  const status = await site.db.run((sql) => cancel(sql, id));
  if (status === null) throw new Problem(404, `there is no job ${id}`);
  if (status === "done" || status === "failed") {
    throw new Problem(409, `job ${id} is ${status}: only an unfinished job can be cancelled`);
  }
  return { id, status };
}
