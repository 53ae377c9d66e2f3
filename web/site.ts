/** What every part of the site shares: its connections, its kinds, its settings, and who is asking. */
import type { OpenAPIHono } from "@hono/zod-openapi";
import type { RateLimiterMemory } from "rate-limiter-flexible";
import type * as config from "../config.ts";
import type { Database } from "../db.ts";
import type { Kinds } from "../jobs/kind.ts";
import type { Key } from "../keys.ts";
import type { spec } from "./settings.ts";

export type SiteSettings = ReturnType<typeof config.configuration<typeof spec>>;

export interface Site {
  /** Short statements; and the bytes of files, which must not hold those up. */
  db: Database;
  files: Database;
  kinds: Kinds;
  settings: SiteSettings;
  secrets: {
    admin: string;
    session: string;
    /** Absent: jobs' ends are told of nowhere, and a webhook is refused. */
    webhook?: string;
    /** Absent: /metrics is closed, or open where the settings say so. */
    metrics?: string;
  };
  limits: { signIn: RateLimiterMemory; submit: RateLimiterMemory };
  /** This boot's row of processes; and whether it leads the sites, as of the last heartbeat. */
  bootId: string;
  leader: boolean;
  /** Aborted when the site stops: streams end then. */
  stopping: AbortSignal;
}

/** Who asks: the admin, or somebody with a key, who sees the jobs of the key's owner. */
export type Who = { admin: true; owner: null; key: null } | {
  admin: false;
  owner: string;
  key: Key;
};

/** What the handlers of the site find in their context. */
export interface Env {
  Variables: { who: Who; /** Of the signed-in, for their forms. */ csrf: string };
}

export type App = OpenAPIHono<Env>;
