/**
 * What becomes of a job, as server-sent events: `event: job` with its state whenever that changes,
 * `event: end` after a final one. The id of each is a digest of the state, so that a client that comes
 * back with Last-Event-ID is told only what it does not know yet; where that is nothing more ever,
 * the answer is 204, upon which a browser's EventSource stops.
 *
 * However many look on, one statement a second asks for all the jobs that they watch.
 */
import { createHash } from "node:crypto";
import type { Context } from "hono";
import * as config from "../config.ts";
import { describe, pause, type Pool, schema, type Via } from "../db.ts";
import { type JobView, list, names } from "../queue.ts";
import { isFinal, visibleJob } from "./jobs.ts";
import { Problem } from "./problem.ts";
import type { Env, Site } from "./site.ts";

const log = config.logger("web");

const POLL_MS = 1000;
/** A comment so often, so that nobody on the way takes a silent stream for a dead one. */
const PING_MS = 15_000;
/** Streams of this process, and of one owner. */
const MAX_STREAMS = 1000;
const MAX_STREAMS_OF_ONE = 250;
const FULL_RETRY_S = 10;
/** What waits for a client that does not read; it is told no more until it does. */
const MAX_WAITING = 8;
/** How soon a client whose stream broke off is to come back. */
const RETRY_MS = 2000;

/** What an event tells of a job. */
export type JobState = Pick<
  JobView,
  | "id"
  | "status"
  | "stage"
  | "progress"
  | "attempt"
  | "error"
  | "created_at"
  | "due_at"
  | "claimed_at"
  | "finished_at"
>;

function stateOf(job: JobState): JobState {
  const { id, status, stage, progress, attempt, error } = job;
  const { created_at, due_at, claimed_at, finished_at } = job;
  return {
    ...{ id, status, stage, progress, attempt, error },
    ...{ created_at, due_at, claimed_at, finished_at },
  };
}

const digestOf = (text: string) => createHash("sha256").update(text).digest("hex").slice(0, 16);

/** One who looks on. Null: the job is gone, or is not theirs to see any more. */
interface Watcher {
  /** The key it came with: once that is revoked it sees nothing more. */
  keyId: string | null;
  owner: string | null;
  tell(job: JobState | null): void;
}

/** All that this process watches, and the one poller for it. */
export class Watch {
  readonly #jobs = new Map<string, Set<Watcher>>();
  #count = 0;
  #polling = false;

  constructor(readonly site: { db: Via; stopping: AbortSignal }, readonly pollMs = POLL_MS) {}

  /** @throws Problem when there are too many streams */
  assertRoom(owner: string | null): void {
    if (this.#count >= MAX_STREAMS) {
      throw new Problem(503, `${MAX_STREAMS} event streams are open, as many as there may be`, {
        retryAfterS: FULL_RETRY_S,
      });
    }
    let own = 0;
    for (const watcher of this.#watchers()) own += Number(watcher.owner === owner);
    if (owner !== null && own >= MAX_STREAMS_OF_ONE) {
      throw new Problem(429, `event streams: more than ${MAX_STREAMS_OF_ONE} at a time`, {
        retryAfterS: FULL_RETRY_S,
      });
    }
  }

  get polling(): boolean {
    return this.#polling;
  }

  /** Tells `watcher` the job's state every second. @returns what ends that */
  add(id: string, watcher: Watcher): () => void {
    const watchers = this.#jobs.get(id) ?? new Set();
    this.#jobs.set(id, watchers.add(watcher));
    this.#count++;
    if (!this.#polling) this.#poll();
    return () => {
      if (!watchers.delete(watcher)) return;
      this.#count--;
      if (watchers.size === 0) this.#jobs.delete(id);
    };
  }

  *#watchers(): Iterable<Watcher> {
    for (const watchers of this.#jobs.values()) yield* watchers;
  }

  async #poll(): Promise<void> {
    this.#polling = true;
    const { db, stopping } = this.site;
    for (;;) {
      await pause(this.pollMs, stopping);
      // No await between this and the end: whoever comes after starts a new poller.
      if (this.#count === 0 || stopping.aborted) break;
      const asked = [...this.#jobs];
      const keyIds = new Set<string>();
      for (const { keyId } of this.#watchers()) if (keyId) keyIds.add(keyId);
      try {
        const { jobs, revoked } = await db.run((sql) =>
          statesOf(sql, asked.map(([id]) => id), [...keyIds])
        );
        for (const [id, watchers] of asked) {
          const job = jobs.get(id);
          for (const watcher of [...watchers]) {
            watcher.tell(job && !revoked.has(watcher.keyId ?? "") ? job : null);
          }
        }
      } catch (error) {
        log.warn("event streams: {error}", { error: describe(error) });
      }
    }
    this.#polling = false;
  }
}

/** The states of jobs, and which of the keys are revoked. */
async function statesOf(sql: Pool, ids: string[], keyIds: string[]) {
  const rows = await list(sql<(JobState & { revoked: string[] })[]>`
    select j.id::text, j.status, j.stage, j.progress, j.attempt, j.error, j.created_at, j.due_at,
      j.claimed_at, j.finished_at,
      (select coalesce(jsonb_agg(k.id::text), '[]') from ${sql(schema)}.keys k
       where k.id = any(${names(keyIds)}::bigint[]) and k.revoked_at is not null) as revoked
    from ${sql(schema)}.jobs j where j.id = any(${names(ids)}::bigint[])`);
  return {
    jobs: new Map(rows.map(({ revoked: _, ...job }) => [job.id, job])),
    revoked: new Set(rows[0]?.revoked),
  };
}

/** Answers with the event stream of a job. @throws Problem 404, 429, 503 */
export async function events(site: Site, watch: Watch, c: Context<Env>): Promise<Response> {
  const who = c.get("who");
  const job = stateOf(await visibleJob(site, who, c.req.param("id")!));
  const seen = c.req.header("last-event-id") ?? "";
  if (isFinal(job) && seen === digestOf(JSON.stringify(job))) {
    return new Response(null, { status: 204 });
  }
  watch.assertRoom(who.owner);
  // A HEAD is answered without the body, which nobody would ever close.
  const body = c.req.method === "HEAD" ? null : stream(watch, site.stopping, job, seen, {
    keyId: who.key?.id ?? null,
    owner: who.owner,
  });
  return new Response(body, {
    headers: {
      "content-type": "text/event-stream",
      "cache-control": "no-store, no-transform",
      "x-accel-buffering": "no",
    },
  });
}

function stream(
  watch: Watch,
  stopping: AbortSignal,
  job: JobState,
  seen: string,
  who: Pick<Watcher, "keyId" | "owner">,
): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder();
  let leave = () => {};
  return new ReadableStream<Uint8Array>({
    start(controller) {
      const say = (text: string) => controller.enqueue(encoder.encode(text));
      const hasRoom = () => (controller.desiredSize ?? 0) > 0;
      const close = () => {
        leave();
        controller.close();
      };
      const tell = (job: JobState | null) => {
        if (!hasRoom()) return; // it does not read: it is told what is new by then, a second later
        const data = job && JSON.stringify(stateOf(job));
        const id = data && digestOf(data);
        if (id && id !== seen) say(`event: job\nid: ${seen = id}\ndata: ${data}\n\n`);
        if (job && !isFinal(job)) return;
        say(`event: end\ndata: ${JSON.stringify({ status: job?.status ?? null })}\n\n`);
        close();
      };
      const ping = setInterval(() => hasRoom() && say(": still here\n\n"), PING_MS);
      const remove = watch.add(job.id, { ...who, tell });
      leave = () => {
        clearInterval(ping);
        remove();
        stopping.removeEventListener("abort", close);
      };
      stopping.addEventListener("abort", close);
      say(`retry: ${RETRY_MS}\n\n`);
      tell(job);
      if (stopping.aborted && hasRoom()) close();
    },
    cancel: () => leave(),
  }, { highWaterMark: MAX_WAITING });
}
