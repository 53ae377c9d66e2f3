/** The site's settings. */
import * as config from "../config.ts";
import { usage } from "../costs.ts";

const { databaseUrl, prepare, statementLimitMs, heartbeatMs, jobs, maxFileBytes, logLevel, pool } =
  config.settings;

export const spec = {
  ...usage,
  ...{ databaseUrl, prepare, statementLimitMs, heartbeatMs, jobs, maxFileBytes, logLevel, pool },
  port: { ...config.int(8000, 0, 65_535, "the port; the variable is PORT"), variable: "PORT" },
  host: {
    ...config.text("the address to listen on; all of them if not given"),
    fallback: "0.0.0.0",
  } as config.Setting<string>,
  adminToken: config.secret("signs in to everything; needed"),
  sessionSecret: config.secret("signs the cookies of those who signed in; needed"),
  webhookSecret: config.secret("signs what webhooks are told; the workers need it too"),
  metricsToken: config.secret("what /metrics asks for; closed without"),
  openMetrics: config.yes("let anybody read /metrics"),
  unwellWaitS: config.int(900, 1, 31_536_000, "how long a job may wait before that is unwell"),
  alertEveryMs: config.int(
    300_000,
    100,
    86_400_000,
    "how often the leader looks whether it is well",
  ),
  alertWebhookUrl: {
    ...config.url("is told when the service is unwell; the variable is ALERT_WEBHOOK_URL"),
    ...{ variable: "ALERT_WEBHOOK_URL", secret: true },
  },
  sentryDsn: {
    ...config.url("is told, too; the variable is SENTRY_DSN"),
    ...{ variable: "SENTRY_DSN", secret: true },
  },
  submitsPerMinute: config.int(1200, 1, 10_000_000, "jobs that one key may submit in a minute"),
  connections: config.int(8, 2, 200, "connections to the database"),
};
