/** The site's pages, for people with a browser: rendered here, useful without JavaScript. */
import { type Context, Hono } from "hono";
import { adminOnly, session } from "./auth.ts";
import { assets } from "./assets.ts";
import { dashboard } from "./pages/dashboard.ts";
import { desk } from "./pages/desk.ts";
import { showError } from "./pages/errors.ts";
import { shortForm } from "./pages/forms.ts";
import { job } from "./pages/job.ts";
import { jobs } from "./pages/jobs.ts";
import { queues } from "./pages/queues.ts";
import { schedules } from "./pages/schedules.ts";
import { signIn } from "./pages/sign_in.ts";
import { submitting } from "./pages/submit.ts";
import { Problem } from "./problem.ts";
import type { Env, Site } from "./site.ts";

/** What only the admin sees; and what everybody does who signed in. */
const admins = ["/dashboard/*", "/review/*", "/queues/*", "/schedules/*"];
const everybody = ["/", "/jobs/*", "/submit", ...admins];
/** Where forms are short; that of /submit has files. */
const short = ["/sign-in", "/sign-out", "/jobs/*", "/review/*", "/queues/*", "/schedules/*"];

export function pages(site: Site): Hono<Env> {
  const app = new Hono<Env>();
  app.onError((error, c) => showError(c as Context<Env>, error));
  for (const path of short) app.use(path, shortForm);
  for (const path of everybody) app.use(path, session(site));
  for (const path of admins) app.use(path, adminOnly);
  app.get("/", (c) => c.redirect(c.get("who").admin ? "/dashboard" : "/jobs", 303));
  for (const part of [signIn, jobs, job, submitting, dashboard, desk, queues, schedules]) {
    app.route("/", part(site));
  }
  app.route("/", assets());
  return app;
}

/** Whether a request that found nothing is to be answered with a page. */
export const wantsPage = (c: Context) =>
  !/^\/(api|mcp|health|metrics|static)\b/.test(c.req.path) &&
  (c.req.header("accept") ?? "").includes("text/html");

export const showNotFound = (c: Context<Env>) =>
  showError(c, new Problem(404, `there is nothing at ${c.req.path}`));
