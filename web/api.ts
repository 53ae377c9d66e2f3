/** The API. */
import { OpenAPIHono } from "@hono/zod-openapi";
import { bearer } from "./auth.ts";
import { download } from "./downloads.ts";
import { events, Watch } from "./events.ts";
import type { App, Env, Site } from "./site.ts";

/** The routes under /api. */
export function api(site: Site): App {
  const app: App = new OpenAPIHono<Env>();
  const watch = new Watch(site);
  app.use(bearer(site));
  app.get("/jobs/:id/files/:file_id", (c) => download(site, c));
  app.get("/jobs/:id/events", (c) => events(site, watch, c));
  return app;
}
