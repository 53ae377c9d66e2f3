/**
 * The Railway project as code: a Postgres, and three services that run this repository.
 *
 *     railway config plan      # what would change
 *     railway config apply     # change it
 *
 * docs/deploy.md goes through all of it. Railway's CLI evaluates this file by Node, with no argument:
 * so it imports nothing but `railway/iac`, and asks for nothing of Deno's.
 *
 * What is not in this file, `plan` wants removed: give each variable that you set by hand a line here,
 * as `preserve()`, which keeps what Railway has.
 */
import { defineRailway, postgres, preserve, project, service } from "railway/iac";

/** Where the code comes from. None: `railway up`; or, to deploy at each push, github("you/your-repo"). */
const source = undefined;

/**
 * The script itself, by Deno, with the permissions that deno.json names for it: a package manager
 * before it would keep SIGTERM to itself, and no job would get its time to end.
 */
const start = (name: string, flags = "") =>
  `deno run --quiet --no-prompt -P=${name}${flags} ${name}.ts`;

const common = {
  source,
  build: { builder: "DOCKERFILE", dockerfilePath: "Dockerfile" },
  // In each service, since nobody knows which is deployed first: one applies what is missing, and
  // the others see it done. So no code starts before the tables that it needs.
  preDeploy: start("migrate"),
  deploy: { restartPolicyType: "ALWAYS" },
} as const;

export default defineRailway(() => {
  const db = postgres("postgres");
  const DATABASE_URL = db.env.DATABASE_URL;

  const web = service("web", {
    ...common,
    start: start("web", " --v8-flags=--optimize-for-size"),
    healthcheck: "/health",
    healthcheckTimeout: 60,
    env: {
      DATABASE_URL,
      RAILWAY_DEPLOYMENT_DRAINING_SECONDS: "15", // it answers what is under way for 10 s
      SIDING_ADMIN_TOKEN: preserve(),
      SIDING_SESSION_SECRET: preserve(),
      SIDING_WEBHOOK_SECRET: preserve(),
      SIDING_METRICS_TOKEN: preserve(),
      ALERT_WEBHOOK_URL: preserve(),
      SENTRY_DSN: preserve(),
    },
  });

  // No replicas here: the controller sets them. docs/deploy.md says what `plan` shows of that.
  const worker = service("worker", {
    ...common,
    start: start("worker"),
    env: {
      DATABASE_URL,
      // Jobs have the 20 s to end; the rest is for stopping them and giving them back.
      SIDING_DRAIN_S: "20",
      RAILWAY_DEPLOYMENT_DRAINING_SECONDS: "60",
      SIDING_WEBHOOK_SECRET: preserve(),
      SENTRY_DSN: preserve(),
    },
  });

  const controller = service("controller", {
    ...common,
    start: start("controller"),
    env: {
      DATABASE_URL,
      RAILWAY_DEPLOYMENT_DRAINING_SECONDS: "15", // it finishes a look
      RAILWAY_TOKEN: preserve(), // the project's, and in no other service
      SIDING_WORKER_SERVICE_ID: worker.env.RAILWAY_SERVICE_ID,
      SIDING_MAX: "4", // no more than the plan allows: 6 on Hobby, 42 on Pro
      SENTRY_DSN: preserve(),
    },
  });

  return project("siding", { resources: [db, web, worker, controller] });
});
