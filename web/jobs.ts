/** The jobs that somebody may see. Others' are not found, as if they were not there. */
import { type FileInfo, inputsOf, outputsOf } from "../files.ts";
import { get, type JobView } from "../queue.ts";
import { Problem } from "./problem.ts";
import type { Site, Who } from "./site.ts";

/** The largest bigint: ids beyond it are nobody's. */
const MAX_ID = 2n ** 63n - 1n;

/** Whether a text can be an id in the database. */
export const isId = (text: string) => /^[1-9]\d{0,18}$/.test(text) && BigInt(text) <= MAX_ID;

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
