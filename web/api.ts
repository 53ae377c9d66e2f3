/** The API under /api: its routes, from which its OpenAPI document is made. */
import { createRoute, OpenAPIHono, z } from "@hono/zod-openapi";
import type { Context } from "hono";
import { COUNTED_TO, queueStatus, workerStatus } from "../listing.ts";
import { apiPage } from "./api_page.ts";
import { adminOnly, assertLeft, bearer, noteWho } from "./auth.ts";
import { download } from "./downloads.ts";
import { events, Watch } from "./events.ts";
import { cancelJob, visibleJobs, wholeJob } from "./jobs.ts";
import { documentOf, submitRoute } from "./openapi.ts";
import { show } from "./pages/layout.ts";
import { Problem, unfit } from "./problem.ts";
import * as shapes from "./shapes.ts";
import type { App, Env, Site } from "./site.ts";
import { limitKey, submit, SUBMITTED } from "./submit.ts";
import { discard, jobOfForm, readForm, withJson } from "./uploads.ts";

const json = <T extends z.ZodType>(schema: T, description: string) => ({
  description,
  content: { "application/json": { schema } },
});
const problem = (description: string) => ({
  description,
  content: { "application/problem+json": { schema: shapes.ProblemShape } },
});
const noJob = { 404: problem("There is no such job, or it is another owner's") };
const params = z.object({ id: z.string().openapi({ example: "42" }) });

const routes = {
  list: createRoute({
    method: "get",
    path: "/jobs",
    summary: "Your jobs, the newest first",
    request: { query: shapes.JobQuery },
    responses: {
      200: json(shapes.JobPage, "A page of them"),
      422: problem("A filter is malformed"),
    },
  }),
  get: createRoute({
    method: "get",
    path: "/jobs/{id}",
    summary: "All of one job: payload, result, error, times, files, attempts",
    request: { params },
    responses: { 200: json(shapes.Job, "The job"), ...noJob },
  }),
  cancel: createRoute({
    method: "post",
    path: "/jobs/{id}/cancel",
    summary: "Cancel a job: at once when it waits, else its worker is asked to",
    request: { params },
    responses: {
      200: json(shapes.Cancelled, "It is cancelled, or it was before"),
      202: json(shapes.Cancelled, "It runs, and its worker is asked to end it"),
      ...noJob,
      409: problem("It has ended, or nobody knows whether it was paid for"),
    },
  }),
  queues: createRoute({
    method: "get",
    path: "/queues",
    summary: "The queues: their settings, and how many jobs are in them",
    responses: { 200: json(shapes.QueuePage, "The first 100 of them by name") },
  }),
  workers: createRoute({
    method: "get",
    path: "/workers",
    summary: "The workers: busy, idle or silent (the admin's alone)",
    responses: {
      200: json(shapes.WorkerPage, "The newest 1000 of them"),
      404: problem("You are not the admin"),
    },
  }),
  /** These two answer with streams, and so are checked and answered by hand. */
  events: createRoute({
    method: "get",
    path: "/jobs/{id}/events",
    summary: "A job's state as server-sent events, until it ends",
    description:
      "`event: job` has a JobEvent whenever that changes; `event: end` comes after the last. " +
      "With Last-Event-ID a client that comes back is told only what is new.",
    request: { params, headers: z.object({ "last-event-id": z.string().optional() }) },
    responses: {
      200: { description: "Events", content: { "text/event-stream": { schema: shapes.JobEvent } } },
      204: { description: "It has ended, and Last-Event-ID says that you know" },
      ...noJob,
      429: problem("Too many streams of yours are open"),
    },
  }),
  file: createRoute({
    method: "get",
    path: "/jobs/{id}/files/{file_id}",
    summary: "Download an input or output file of a job",
    request: { params: params.extend({ file_id: z.string().openapi({ example: "7" }) }) },
    responses: {
      200: {
        description: "Its bytes, as an attachment",
        content: { "application/octet-stream": { schema: { type: "string", format: "binary" } } },
      },
      ...noJob,
    },
  }),
};

/** The routes under /api. */
export function api(site: Site): App {
  const app: App = new OpenAPIHono<Env>({
    defaultHook: (result) => {
      if (result.success) return;
      const { error, data } = result as typeof result & { data?: unknown };
      throw unfit(error, data);
    },
  });
  const watch = new Watch(site);
  const document = documentOf(site, app);
  app.get("/openapi.json", (c) => c.json(document()));
  app.get("/", async (c) => {
    await noteWho(site, c);
    return show(c, { title: "API", body: apiPage(document()) });
  });

  app.use(bearer(site));
  app.openAPIRegistry.registerPath(submitRoute(site));
  app.post("/jobs", (c) => submitted(site, c));
  app.openapi(
    routes.list,
    async (c) => c.json(await visibleJobs(site, c.get("who"), c.req.valid("query")), 200),
  );
  app.openapi(
    routes.get,
    async (c) => c.json(await wholeJob(site, c.get("who"), c.req.valid("param").id), 200),
  );
  app.openapi(routes.cancel, async (c) => {
    const job = await cancelJob(site, c.get("who"), c.req.valid("param").id);
    return c.json(job, job.status === "running" ? 202 : 200);
  });
  app.openAPIRegistry.registerPath(routes.events);
  app.get("/jobs/:id/events", (c) => events(site, watch, c));
  app.openAPIRegistry.registerPath(routes.file);
  app.get("/jobs/:id/files/:file_id", (c) => download(site, c));
  app.openapi(
    routes.queues,
    async (c) => c.json({ items: await site.db.run(queueStatus), counted_to: COUNTED_TO }, 200),
  );
  app.use("/workers", adminOnly);
  app.openapi(routes.workers, async (c) => {
    const silentS = 3 * site.settings.heartbeatMs / 1000;
    return c.json({ items: await site.db.run((sql) => workerStatus(sql, silentS)) }, 200);
  });
  return app;
}

/** Answers a submission, as JSON or as a form with files. */
async function submitted(site: Site, c: Context<Env>): Promise<Response> {
  const who = c.get("who");
  const type = c.req.header("content-type") ?? "";
  const key = c.req.header("idempotency-key");
  const isForm = /^multipart\/form-data\b/i.test(type);
  if (!isForm && !/^application\/json\b/i.test(type)) {
    throw new Problem(
      415,
      `Content-Type is "${
        type.slice(0, 100)
      }": it must be application/json, or with files multipart/form-data`,
    );
  }
  // Said before a file is sent in vain; it is spent once that is read.
  await assertLeft(site.limits.submit, limitKey(who), SUBMITTED);
  const { fields, files } = isForm
    ? await readForm(site, c.req.raw, limitKey(who))
    : { fields: null, files: [] };
  let created = false;
  const enter = async (body: unknown) => {
    const entry = await submit(site, who, body, files, key);
    created = entry.created;
    return c.json(entry, created ? 201 : 200, { location: `/api/jobs/${entry.id}` });
  };
  try {
    return await (fields ? enter(jobOfForm(fields)) : withJson(c.req.raw, enter));
  } finally {
    if (!created) await discard(site, files);
  }
}
