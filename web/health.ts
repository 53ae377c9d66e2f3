/**
 * Whether it is well: `/health`, this process and its database, for whoever restarts the process;
 * and `/health/service`, whether jobs get done, for whoever is to be told. Anybody may ask, and gets
 * the reasons as codes; the admin gets them in words.
 */
import { accepts } from "hono/accepts";
import type { Context } from "hono";
import { OpenAPIHono } from "@hono/zod-openapi";
import { checkSchema, describe, pause, schema, SchemaMismatch, type Sql } from "../db.ts";
import { type Failing, failingSchedules } from "../schedules.ts";
import { noteWho, sameText, signedIn } from "./auth.ts";
import { healthPage } from "./pages/health.ts";
import { show } from "./pages/layout.ts";
import type { App, Env, Site } from "./site.ts";

/** How long the database may take, after which it counts as unreachable. */
const LIMIT_MS = 3000;
/** Answers are as old as this: however many ask, the database is asked once. */
const KEPT_MS = 1000;
/** A controller that has not looked for so long does not look any more. */
const LOOK_S = 120;

export type Code =
  | "database_unreachable"
  | "migrations_behind"
  | "no_workers"
  | "oldest_waiting"
  | "controller_silent"
  | "look_failed"
  | "railway_refused"
  | "scaling_alarm"
  | "review_cases"
  | "schedule_failing";

/** Why it is unwell. The message names queues, kinds and numbers, and is not for everybody. */
export interface Reason {
  code: Code;
  message: string;
}

/** Jobs that wait and are no reason: their queue is paused or limited, or no worker serves their kind. */
export interface Apart {
  queue: string;
  kind: string;
  apart: "paused" | "limited" | "not_served";
  oldest_wait_s: number;
}

/** Well when there is no reason. */
export interface Judgement {
  reasons: Reason[];
  apart: Apart[];
}

/** See siding.service_state. */
interface State {
  workers: number;
  waits: boolean;
  waiting: (Omit<Apart, "apart"> & { apart: Apart["apart"] | null })[];
  reviews: number;
  looks: {
    pool: string;
    act: string;
    error: string | null;
    alarms: string[];
    age_s: number;
    queue_seen: boolean;
    railway_seen: boolean;
  }[];
}

export function health(site: Site): App {
  const app: App = new OpenAPIHono<Env>();
  const reached = shared(() => site.db.run((sql) => sql`select 1`));
  const judged = shared(() => judge(site));
  app.get("/health", async (c) => {
    const well = await within(reached()).then(() => true, () => false);
    return c.json({ status: well ? "ok" : "database_unreachable" }, well ? 200 : 503, ofNow);
  });
  app.get("/health/service", async (c) => {
    const { reasons, apart } = await judged();
    const codes = codesOf(reasons);
    const [status, number] = codes.length === 0 ? ["ok", 200 as const] : ["unwell", 503 as const];
    const told = await isAdmin(site, c) ? { messages: reasons, apart } : {};
    const supports = ["application/json", "text/html"];
    if (accepts(c, { header: "Accept", supports, default: supports[0] }) !== "text/html") {
      return c.json({ status, reasons: codes, ...told }, number, ofNow);
    }
    await within(noteWho(site, c)).catch(() => {});
    return show(c, healthPage(codes, told), number);
  });
  return app;
}

/** Nobody on the way may keep an answer. */
const ofNow = { "cache-control": "no-store" };

export const codesOf = (reasons: readonly Reason[]): Code[] => [
  ...new Set(reasons.map(({ code }) => code)),
];

/** Judges the service, whatever state it is in. */
export async function judge(site: Site): Promise<Judgement> {
  const { heartbeatMs, unwellWaitS } = site.settings;
  const silentS = 3 * heartbeatMs / 1000;
  try {
    return await within(site.db.run(async (sql) => {
      const behind = await checkSchema(sql);
      if (behind > 0) {
        return only("migrations_behind", `the database lacks ${behind} migrations of this code`);
      }
      const { reasons, apart } = judgementOf(await stateOf(sql, silentS), silentS, unwellWaitS);
      return { reasons: [...reasons, ...(await failingSchedules(sql)).map(aboutSchedule)], apart };
    }));
  } catch (error) {
    if (error instanceof SchemaMismatch) return only("migrations_behind", error.message);
    // Whatever it is, such as a password that was changed.
    return only("database_unreachable", `the database does not answer: ${describe(error)}`);
  }
}

const only = (code: Code, message: string): Judgement => ({
  reasons: [{ code, message }],
  apart: [],
});

async function stateOf(sql: Sql, silentS: number): Promise<State> {
  const [state] = await sql<State[]>`select * from ${sql(schema)}.service_state(${silentS})`;
  return state;
}

function judgementOf(state: State, silentS: number, limitS: number): Judgement {
  const reasons: Reason[] = [];
  const because = (code: Code, message: string) => reasons.push({ code, message });
  if (state.workers === 0 && state.waits) {
    because("no_workers", `no worker has reported within ${silentS} s, and there are jobs to do`);
  }
  const apart = state.waiting.filter((line): line is Apart => line.apart !== null);
  const late = state.waiting.find((line) => line.apart === null && line.oldest_wait_s > limitS);
  if (late) {
    const waitS = Math.floor(late.oldest_wait_s);
    because(
      "oldest_waiting",
      `a job of kind "${late.kind}" in queue "${late.queue}" has waited for ${waitS} s, ` +
        `more than the ${limitS} s that it may`,
    );
  }
  for (const look of state.looks) reasons.push(...aboutLook(look));
  if (state.reviews > 0) {
    const n = state.reviews === 1000 ? "1000 or more" : state.reviews;
    because("review_cases", `jobs in review that wait for a person: ${n}`);
  }
  return { reasons, apart };
}

function aboutSchedule({ name, error, late_s }: Failing): Reason {
  const late = `its tick is ${Math.floor(late_s)} s late, and no worker enqueues it`;
  return { code: "schedule_failing", message: `schedule "${name}": ${error ?? late}` };
}

/** What the last look of a pool's controllers says. A pool without any look has no controller to miss. */
function aboutLook(look: State["looks"][number]): Reason[] {
  const { pool, error, alarms, age_s } = look;
  if (age_s > LOOK_S) {
    const message = `no controller of pool "${pool}" has looked for ${Math.floor(age_s)} s`;
    return [{ code: "controller_silent", message }];
  }
  const reasons: Reason[] = [];
  if (!look.railway_seen || look.act === "failed") {
    const message = `pool "${pool}": Railway refused, or was not reached: ${error}`;
    reasons.push({ code: "railway_refused", message });
  } else if (alarms.includes("ceiling")) {
    const message = `pool "${pool}": Railway refused so many replicas`;
    reasons.push({ code: "railway_refused", message });
  }
  if (!look.queue_seen) {
    reasons.push({
      code: "look_failed",
      message: `pool "${pool}": the queue was not seen: ${error}`,
    });
  }
  const others = alarms.filter((alarm) => alarm !== "ceiling");
  if (others.length > 0) {
    reasons.push({ code: "scaling_alarm", message: `pool "${pool}": ${others.join(", ")}` });
  }
  return reasons;
}

/** The admin, by token or cookie. Neither needs the database, which may be why it is asked. */
async function isAdmin(site: Site, c: Context): Promise<boolean> {
  const [, token] = /^Bearer +(\S+)$/i.exec(c.req.header("authorization") ?? "") ?? [];
  if (token) return await sameText(token, site.secrets.admin);
  return await within(signedIn(site, c)).then((it) => it?.who.admin ?? false, () => false);
}

class Late extends Error {}

/** What a promise comes to, if it does so in time. What it waits for goes on. */
async function within<T>(promise: Promise<T>): Promise<T> {
  const over = new AbortController();
  const late = pause(LIMIT_MS, over.signal).then(() => {
    throw new Late(`no reply within ${LIMIT_MS} ms`);
  });
  late.catch(() => {}); // it is in time, mostly
  try {
    return await Promise.race([promise, late]);
  } finally {
    over.abort();
  }
}

/** One call for all who ask while it is under way, and a moment after. */
function shared<T>(call: () => Promise<T>): () => Promise<T> {
  let last: Promise<T> | undefined;
  let endedMs = Infinity;
  return () => {
    if (last && performance.now() - endedMs < KEPT_MS) return last;
    endedMs = Infinity;
    last = call();
    const ended = () => endedMs = performance.now();
    last.then(ended, ended);
    return last;
  };
}
