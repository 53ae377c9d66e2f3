/**
 * Files to take home. What was uploaded is somebody's word for what it is, so a browser gets it as an
 * attachment, with a type from a short list of those it would not run, and is told not to guess.
 */
import type { Context } from "hono";
import { type FileInfo, readFile } from "../files.ts";
import { filesOf, visibleJob } from "./jobs.ts";
import { Problem } from "./problem.ts";
import type { Env, Site } from "./site.ts";

/** None of them can hold a script that a browser would run. SVG can, and is not one of them. */
const HARMLESS = new Set([
  "audio/wav",
  "audio/mpeg",
  "audio/midi",
  "text/plain",
  "text/csv",
  "text/vnd.abc",
  "application/json",
  "image/png",
  "image/jpeg",
]);

/** Answers with an input or output file of a job, as a stream. @throws Problem 404 */
export async function download(site: Site, c: Context<Env>): Promise<Response> {
  const { id } = await visibleJob(site, c.get("who"), c.req.param("id")!);
  const wanted = c.req.param("file_id")!;
  const { inputs, outputs } = await filesOf(site, id);
  const file = [...outputs, ...inputs].find((file) => file.id === wanted);
  if (!file) throw new Problem(404, `job ${id} has no file ${wanted.slice(0, 50)}`);
  const body = c.req.method === "HEAD" ? null : readFile(site.files, file);
  return new Response(body, { headers: headersOf(file) });
}

function headersOf({ name, media_type, bytes }: FileInfo): Record<string, string> {
  return {
    "content-type": HARMLESS.has(media_type) ? media_type : "application/octet-stream",
    "content-length": String(bytes),
    "content-disposition": disposition(name),
    "x-content-type-options": "nosniff",
    // Not to be compressed on the way: its length would be lost.
    "cache-control": "private, no-transform",
  };
}

/** RFC 6266: the name in full as RFC 5987 has it, and in ASCII for what is old. */
export function disposition(name: string): string {
  const plain = name.replace(/[^\x20-\x7e]|["\\%;]/g, "_");
  const full = encodeURIComponent(name.toWellFormed())
    .replace(/['()*]/g, (c) => `%${c.charCodeAt(0).toString(16).toUpperCase()}`);
  return `attachment; filename="${plain}"; filename*=UTF-8''${full}`;
}
