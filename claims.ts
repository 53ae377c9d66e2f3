/**
 * Claims: how jobs come to a worker. A look tells which queues have something; a claim takes the next jobs
 * in line of one, in the way that the queue's row says.
 */
import { codeOf, type Pool, schema, type Sql } from "./db.ts";
import { type Claimed, type Job, list, names } from "./queue.ts";

const s = (sql: Sql) => sql(schema);

/** A queue with something to do, as {@linkcode look} saw it. */
export interface Ready {
  queue: string;
  claim: "skip_locked" | "lock" | "repeatable_read";
  /** Its next job is for a worker that runs nothing else: see siding.recover. */
  alone?: boolean;
  /** Where its next job stands in line. */
  head?: Place;
}

/** A place in line. */
export interface Place {
  priority: number;
  /** Microseconds since 1970. */
  due_us: number;
  id: string;
}

/** What {@linkcode look} saw. */
export interface Look {
  ready: Ready[];
  /** Whether a scheduled job has fallen due. */
  promotable: boolean;
  /** Milliseconds until a queue that its rate limit holds back has room; null: none is held. */
  opens_ms: number | null;
}

/**
 * Whether anything is due, without a lock and without a mark: the queues a worker may claim from
 * now, the one with the next job in line first.
 *
 * @param queues the queues to look at; null is all
 */
export async function look(
  sql: Sql,
  queues: readonly string[] | null,
  kinds: readonly string[],
): Promise<Look> {
  const [row] = await sql<Look[]>`
    select * from ${s(sql)}.look(${queues && names(queues)}::text[], ${names(kinds)}::text[])`;
  return row;
}

/** Moves scheduled jobs that have fallen due into line, at most `most`. @returns how many */
export async function promote(sql: Sql, most = 1000): Promise<number> {
  const [row] = await sql`select ${s(sql)}.promote(${most})::integer as n`;
  return row.n;
}

export interface ClaimOptions {
  /** The worker's boot_id, see {@linkcode register}. */
  worker: string;
  kinds: readonly string[];
  /** Jobs at the most. */
  most: number;
  leaseS: number;
  /** Whether the worker runs nothing, and so may have a job that is to run alone; by default it is. */
  idle?: boolean;
  /** A fresh uuid: should the reply get lost, the jobs it took can be told by it. */
  token: string;
}

/**
 * Claims the next jobs in line of one queue, in the way its row says. A row that was changed since
 * the look makes a claim come back empty: a limit is never passed by a worker that did not know it.
 */
export async function claim(sql: Pool, ready: Ready, options: ClaimOptions): Promise<Job[]> {
  const { worker, kinds, most, leaseS, token, idle = true } = options;
  if (ready.claim === "repeatable_read") {
    return await claimRepeatableRead(sql, ready.queue, options);
  }
  if (ready.claim === "lock") {
    return await list(sql<Job[]>`
      select ${sql.unsafe(claimedColumns)} from ${s(sql)}.claim_lock(${ready.queue},
        ${names(kinds)}::text[], ${most}, ${worker}, ${token}, ${leaseS}, ${idle}) j
      order by j.priority desc, j.due_at, j.id`);
  }
  return (await exchange(sql, ready, options, [])).jobs;
}

/** An attempt that is done, with its result, and that wrote no files and brings no other jobs. */
export type Done = Claimed & { result: unknown };

/** What an {@linkcode exchange} brings. */
export interface Exchange {
  jobs: Job[];
  /** Those of the attempts that stand as done. {@linkcode settle} tells what became of the others. */
  stand: Set<string>;
  /** The place in line of the last of the jobs; null when there are none. */
  last: Place | null;
}

/**
 * Claims the next jobs of a queue that skips locks, and in the same statement ends attempts as done.
 *
 * @param mark where in line to begin: what stands before it is not seen. Only for claims that follow one
 * another: a claim or a {@linkcode look} without it is due within a second, and at once after a claim that
 * found fewer than it may.
 * @param waitMs how long a row that somebody else has locked may hold this up, before it is refused (55P03)
 */
export async function exchange(
  sql: Sql,
  { queue, alone = false }: Ready,
  { worker, kinds, most, leaseS, token, idle = true }: ClaimOptions,
  done: readonly Done[],
  mark?: Place | null,
  waitMs = 50,
): Promise<Exchange> {
  const [row] = await sql<[ExchangeRow]>`
    select * from ${s(sql)}.exchange(${queue}, ${
    names(kinds)
  }::text[], ${most}, ${worker}, ${token},
      ${leaseS}, ${alone && idle}, ${mark?.priority ?? null}, ${mark?.due_us ?? null},
      ${mark?.id ?? null}, ${
    done.length ? numbers(done.map(({ id }) => id)) : null
  }::text::bigint[],
      ${done.length ? numbers(done.map(({ attempt }) => attempt)) : null}::text::integer[],
      ${resultsOf(done)}::text::jsonb, ${waitMs})`;
  const taken = (row.jobs ?? []).sort(inLine);
  const last = taken.at(-1);
  return {
    jobs: taken.map((job) => jobOf(job, queue, row.claimed_us)),
    stand: new Set(row.stand ?? done.map(({ id }) => id)),
    last: last ? { priority: priorityOf(last), due_us: last.due_us, id: last.id } : null,
  };
}

interface ExchangeRow {
  /** Null: all. */
  stand: string[] | null;
  claimed_us: number;
  jobs: ExchangedJob[] | null;
}

type ExchangedJob = Pick<Job, "id" | "kind" | "attempt" | "payload"> & {
  due_us: number;
  /** What few jobs have; null: nothing of it. */
  more: Partial<Job> | null;
};

const priorityOf = ({ more }: ExchangedJob) => more?.priority ?? 0;

const inLine = (a: ExchangedJob, b: ExchangedJob) =>
  priorityOf(b) - priorityOf(a) || a.due_us - b.due_us ||
  // Ids are numbers that a number of JavaScript's may not hold: the longer is the larger.
  a.id.length - b.id.length || (a.id < b.id ? -1 : 1);

/** Each field by its name: to spread one object over another takes three times as long. */
function jobOf(taken: ExchangedJob, queue: string, claimedUs: number): Job {
  const { id, kind, payload, attempt, due_us, more } = taken;
  const job: Job = {
    id,
    queue,
    kind,
    owner: null,
    price: null,
    payload,
    priority: 0,
    attempt,
    failures: 0,
    crashes: 0,
    releases: 0,
    snoozes: 0,
    alone: false,
    trace_parent: null,
    request_key: null,
    request_id: null,
    claimed_at: new Date(claimedUs / 1000),
    wait_ms: (claimedUs - due_us) / 1000,
  };
  return more ? Object.assign(job, more) : job;
}

const numbers = (list: readonly (string | number)[]) => `{${list.join(",")}}`;
/** The results that are not null as a JSON object, by id; null when there are none. */
function resultsOf(done: readonly Done[]): string | null {
  const results = done.filter(({ result }) => result !== null && result !== undefined);
  if (results.length === 0) return null;
  return JSON.stringify(Object.fromEntries(results.map(({ id, result }) => [id, result])));
}

/** {@linkcode exchange} without a claim. @returns the ids that stand as done */
export async function finishMany(
  sql: Sql,
  worker: string,
  done: readonly Done[],
  waitMs: number,
): Promise<Set<string>> {
  const rows = await sql<{ id: string }[]>`
    select id::text from ${s(sql)}.finish(${worker}, ${
    numbers(done.map(({ id }) => id))
  }::text::bigint[],
      ${numbers(done.map(({ attempt }) => attempt))}::text::integer[], ${
    resultsOf(done)
  }::text::jsonb,
      ${waitMs}) as id`;
  return new Set(rows.map(({ id }) => id));
}

/** What a worker gets of a job. */
export const claimedColumns = `j.id::text, j.queue, j.kind, j.owner, j.price::text, j.payload,
  j.priority, j.attempt, j.failures, j.crashes, j.releases, j.snoozes, j.alone, j.trace_parent, j.request_key, j.request_id,
  j.claimed_at, (extract(epoch from j.claimed_at - j.due_at) * 1000)::float8 as wait_ms`;

/**
 * The level must be set before the transaction's first snapshot, so not in a function; and in the
 * same round trip, so in a string of two statements, which the simple protocol runs as one
 * transaction and which takes no parameters.
 */
async function claimRepeatableRead(sql: Pool, queue: string, o: ClaimOptions): Promise<Job[]> {
  const quoted = (text: string) => `'${text.replaceAll("'", "''")}'`;
  const args = [quoted(queue), quoted(names(o.kinds)), o.most, quoted(o.worker), quoted(o.token)];
  for (let round = 1;; round++) {
    try {
      const results = await sql.unsafe(
        `set transaction isolation level repeatable read;
         select ${claimedColumns} from "${schema}".claim_repeatable_read(${
          args.join(", ")
        }, ${o.leaseS}, ${o.idle ?? true}) j
         order by j.priority desc, j.due_at, j.id`,
      ).simple();
      return Array.from((results as unknown as [unknown, Job[]])[1]);
    } catch (error) {
      if (!/^(40001|40P01)$/.test(codeOf(error))) throw error;
      if (round === 10) return []; // others were first each time; the caller polls again
      await new Promise((done) => setTimeout(done, Math.random() * 2 ** Math.min(round, 6)));
    }
  }
}
