/** The site as one handler: what holds for all of it, and its parts mounted. */
import { OpenAPIHono } from "@hono/zod-openapi";
import { secureHeaders } from "hono/secure-headers";
import { api } from "./api.ts";
import { health } from "./health.ts";
import { mcp } from "./mcp.ts";
import { metrics } from "./metrics.ts";
import { pages, showNotFound, wantsPage } from "./pages.ts";
import { answer, Problem } from "./problem.ts";
import type { App, Env, Site } from "./site.ts";

export function appOf(site: Site): App {
  const app: App = new OpenAPIHono<Env>();
  app.use(secureHeaders({
    // No inline script or style, nothing from elsewhere.
    contentSecurityPolicy: {
      defaultSrc: ["'none'"],
      scriptSrc: ["'self'"],
      styleSrc: ["'self'"],
      imgSrc: ["'self'", "data:"],
      connectSrc: ["'self'"],
      mediaSrc: ["'self'"],
      formAction: ["'self'"],
      frameAncestors: ["'none'"],
      baseUri: ["'none'"],
    },
    xFrameOptions: "DENY",
    referrerPolicy: "same-origin",
    crossOriginEmbedderPolicy: false,
  }));
  app.route("/api", api(site));
  app.route("/mcp", mcp(site));
  app.route("/", health(site));
  app.route("/", metrics(site));
  app.onError((error, c) => answer(c, error));
  app.notFound((c) =>
    wantsPage(c)
      ? showNotFound(c)
      : answer(c, new Problem(404, `there is nothing at ${c.req.path}`))
  );
  app.route("/", pages(site));
  return app;
}
