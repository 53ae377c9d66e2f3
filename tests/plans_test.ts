/**
 * What each statement reads of the jobs: the rows it is for, by the index that is for them, whatever
 * the statistics say. Plans are seen by auto_explain, which sees those inside functions too.
 */
import { assert, assertEquals } from "@std/assert";
import postgres from "postgres";
import { type Pool } from "../db.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { testDatabase } from "./database.ts";

const MANY = 4000;
/** Jobs that one statement of the tests is about, at the most. */
const FEW = 100;
const QUEUES = ["default", "locked", "serial"];

/** A node of a plan, as `explain (format json)` has it. */
interface Node {
  "Node Type": string;
  "Relation Name"?: string;
  "Index Name"?: string;
  "Actual Rows": number;
  "Actual Loops": number;
  "Rows Removed by Filter"?: number;
  "Rows Removed by Index Recheck"?: number;
  Plans?: Node[];
}

/** What a statement did to the table of the jobs. */
interface Seen {
  /** The indexes it was read by; `none` for a scan of all of it. */
  by: Set<string>;
  rows: number;
  /** Rows that a sort was given. */
  sorted: number;
}

interface Asked {
  call: (sql: Pool, worker: string) => Promise<unknown>;
  /** The indexes that it may use. */
  by: string[];
  /** Rows that it may read; any number where it counts them all. */
  rows?: number;
}

const claimBy = (name: string, claim: claims.Ready["claim"]) => (sql: Pool, worker: string) =>
  claims.claim(sql, { queue: name, claim }, {
    ...{ worker, kinds: ["small"], most: 10, leaseS: 120 },
    token: crypto.randomUUID(),
  });
const running = async (sql: Pool, worker: string) =>
  await sql<{ id: string; attempt: number }[]>`
    select id::text, attempt from siding.jobs where worker_id = ${worker} and status = 'running'
    order by id limit ${FEW}`;

/** The statements, and what each is to read. */
const statements: Record<string, Asked> = {
  look: {
    call: (sql) => claims.look(sql, null, ["small"]),
    by: ["jobs_queued", "jobs_scheduled", "jobs_running"],
    rows: 10 * FEW,
  },
  "claim by skip_locked": {
    call: claimBy("default", "skip_locked"),
    by: ["jobs_queued", "jobs_pkey"],
    rows: FEW,
  },
  "claim by lock": {
    call: claimBy("locked", "lock"),
    by: ["jobs_queued", "jobs_running", "jobs_pkey"],
    rows: 10 * FEW,
  },
  "claim by repeatable_read": {
    call: claimBy("serial", "repeatable_read"),
    by: ["jobs_queued", "jobs_running", "jobs_pkey"],
    rows: 10 * FEW,
  },
  "finish and claim": {
    call: async (sql, worker) => {
      const done = (await running(sql, worker)).map((job) => ({ ...job, result: 1 }));
      const options = {
        worker,
        kinds: ["small"],
        most: 10,
        leaseS: 120,
        token: crypto.randomUUID(),
      };
      const { last } = await claims.exchange(
        sql,
        { queue: "default", claim: "skip_locked" },
        options,
        done,
      );
      await claims.exchange(
        sql,
        { queue: "default", claim: "skip_locked" },
        options,
        [],
        last ?? { priority: 0, due_us: Date.UTC(2026, 0) * 1000, id: "0" },
      );
    },
    by: ["jobs_pkey", "jobs_queued"],
    rows: 10 * FEW,
  },
  settle: {
    call: async (sql, worker) => {
      const jobs = await running(sql, worker);
      const outcomes = jobs.map((job) => ({ ...job, outcome: "done" as const, result: 1 }));
      return await queue.settle(sql, worker, outcomes);
    },
    by: ["jobs_pkey"],
    rows: 10 * FEW,
  },
  heartbeat: {
    call: async (sql, worker) => {
      const jobs = await running(sql, worker);
      const reports = jobs.map((job) => ({ ...job, stage: "on its way", progress: null }));
      return await queue.heartbeat(sql, worker, reports, 120, 45);
    },
    by: ["jobs_pkey", "jobs_running"],
    rows: 10 * FEW,
  },
  cancellations: {
    call: (sql, worker) => queue.cancellations(sql, worker),
    by: ["jobs_running"],
    rows: 10 * FEW,
  },
  cancel: {
    call: async (sql, worker) => {
      const [job] = await running(sql, worker);
      return await queue.cancel(sql, job?.id ?? "1");
    },
    by: ["jobs_pkey"],
    rows: 10,
  },
  promote: {
    call: (sql) => claims.promote(sql, FEW),
    by: ["jobs_scheduled", "jobs_pkey"],
    rows: 3 * FEW,
  },
  recover: {
    call: (sql) => queue.recover(sql, FEW),
    by: ["jobs_running", "jobs_pkey"],
    rows: 20 * FEW,
  },
  expired: { call: (sql) => queue.expired(sql), by: ["jobs_running"], rows: 10 * FEW },
  "fail unknown kinds": {
    call: (sql) => queue.failUnknownKinds(sql, 3600, 45),
    by: ["jobs_queued", "jobs_pkey"],
  },
  counts: {
    call: (sql) => queue.counts(sql),
    by: ["jobs_queued", "jobs_scheduled", "jobs_running", "jobs_review"],
  },
  sweep: {
    call: (sql) => queue.sweep(sql, 60, 60, FEW),
    by: ["jobs_finished", "jobs_pkey", "jobs_running"],
    rows: 3 * FEW,
  },
  enqueue: {
    call: (sql) =>
      queue.enqueue(sql, [{ kind: "small", queue: "locked", owner: "o-1", unique_key: "key-1" }]),
    by: ["jobs_unique_key", "jobs_unfinished_by_owner", "jobs_by_owner", "jobs_pkey"],
    rows: 20 * FEW,
  },
  "enqueue by arguments": {
    call: (sql) => sql`select siding.enqueue('small', '{}', unique_key => 'key-x', failed => 1)`,
    by: ["jobs_unique_key", "jobs_pkey"],
    rows: 10,
  },
  get: { call: (sql) => queue.get(sql, ["1", "2", "3"]), by: ["jobs_pkey"], rows: 3 },
};

/** The states in which the statistics may be. Each ends with the same jobs in the table. */
const states: Record<string, (sql: Pool, worker: string) => Promise<void>> = {
  "fresh statistics": async (sql, worker) => {
    await fill(sql, worker);
    await sql`analyze siding.jobs`;
  },
  "a table that was never analyzed": fill,
  "a table that was analyzed while it was empty": async (sql, worker) => {
    await sql`vacuum analyze siding.jobs`;
    await fill(sql, worker);
  },
  "a table that was emptied and analyzed": async (sql, worker) => {
    await fill(sql, worker);
    await sql`delete from siding.jobs`;
    await sql`vacuum analyze siding.jobs`;
    await fill(sql, worker);
  },
  "a table analyzed while all was finished": async (sql, worker) => {
    await finished(sql);
    await sql`vacuum analyze siding.jobs`;
    await planAll(sql, worker);
    await fill(sql, worker);
  },
  "a table analyzed while all was in line, and then worked off": async (sql, worker) => {
    await inLine(sql, 2 * MANY);
    await sql`analyze siding.jobs`;
    await planAll(sql, worker);
    await sql`update siding.jobs set status = 'done', finished_at = now() - interval '1 hour'
              where status = 'queued'`;
    await fill(sql, worker, FEW);
  },
};

for (const [state, make] of Object.entries(states)) {
  Deno.test(`every statement reads its own few jobs, on ${state}`, async () => {
    await using database = await testDatabase();
    const { sql, plans } = watched(database.direct);
    try {
      const worker = await prepare(sql);
      await make(sql, worker);
      const wrong: string[] = [];
      for (const [name, { call, by, rows = Infinity }] of Object.entries(statements)) {
        plans.length = 0;
        await call(sql, worker);
        const own = plans.filter(ofProduct);
        const seen = own.map(({ Plan }) => seenIn(Plan)).reduce((all, one) => ({
          by: all.by.union(one.by),
          rows: all.rows + one.rows,
          sorted: Math.max(all.sorted, one.sorted),
        }));
        if (own.some(({ JIT }) => JIT)) wrong.push(`${name}: is compiled, which takes a second`);
        const others = [...seen.by].filter((index) => !by.includes(index));
        if (others.length > 0) wrong.push(`${name}: reads by ${others.join(", ")}`);
        if (seen.rows > rows) wrong.push(`${name}: reads ${seen.rows} rows, more than ${rows}`);
        if (seen.sorted > rows) wrong.push(`${name}: sorts ${seen.sorted} rows, more than ${rows}`);
        assert(seen.by.size > 0, `${name}: no plan of it was seen`);
        if (Deno.env.get("SHOW")) console.log(name, [...seen.by].join(" "), seen.rows, seen.sorted);
      }
      assertEquals(wrong, []);
    } finally {
      await sql.end({ timeout: 1 });
    }
  });
}

interface Explained {
  "Query Text": string;
  Plan: Node;
  /** There when it was compiled, which the embedded server never does. */
  JIT?: unknown;
}
/** Not what the test itself asks. */
const ofProduct = (plan: Explained) => !plan["Query Text"].includes("order by id limit");

/** One connection, so that what was planned on it stays, and the plans of what it was sent. */
function watched(url: string): { sql: Pool; plans: Explained[] } {
  const plans: Explained[] = [];
  const sql = postgres(url, {
    ...{ max: 1, fetch_types: false },
    connection: { application_name: "plans_test" },
    onnotice: ({ message }) => {
      const json = message?.match(/plan:\n(\{.*\})/s)?.[1];
      if (json) plans.push(JSON.parse(json));
    },
  });
  return { sql: sql as unknown as Pool, plans };
}

/** Seen plans, and the worker that the jobs which run belong to. */
async function prepare(sql: Pool): Promise<string> {
  await sql.unsafe(`load 'auto_explain';
    set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
    set auto_explain.log_format = json; set auto_explain.log_level = notice;
    set auto_explain.log_analyze = on; set auto_explain.log_timing = off`);
  await sql`alter table siding.jobs set (autovacuum_enabled = false)`;
  await queue.setQueue(sql, "locked", { claim: "lock", max_running: 1000, max_per_owner: 1000 });
  await queue.setQueue(sql, "serial", { claim: "repeatable_read", max_running: 1000 });
  return await processes.register(sql, {
    ...{ role: "worker", name: "plans", version: "1", kinds: ["small"], knownKinds: ["small"] },
  });
}

/** Has each statement planned as often as makes a plan stay: from the sixth time on. */
async function planAll(sql: Pool, worker: string): Promise<void> {
  for (let n = 0; n < 7; n++) {
    for (const { call } of Object.values(statements)) await call(sql, worker);
  }
  await sql`delete from siding.jobs where unique_key is not null`;
}

/** Many finished, in line and due later; a few that run, some of them past their lease. */
async function fill(sql: Pool, worker: string, waiting = MANY): Promise<void> {
  await finished(sql);
  await inLine(sql, waiting);
  await sql`
    insert into siding.jobs (queue, kind, payload, status, due_at)
    select 'default', 'small', '{}', 'scheduled', now() + (n - 200) * interval '1 minute'
    from generate_series(1, ${waiting}::integer) n`;
  await sql`
    insert into siding.jobs (queue, kind, payload, status, attempt, worker_id, claim_token, claimed_at, lease_until)
    select 'default', 'small', '{}', 'running', 1,
      case when n % 2 = 0 then ${worker}::uuid else '00000000-0000-0000-0000-000000000001' end,
      gen_random_uuid(), now(), now() + case when n % 2 = 0 then interval '1 minute' else interval '-1 minute' end
    from generate_series(1, ${2 * FEW}::integer) n`;
}
async function inLine(sql: Pool, waiting: number): Promise<void> {
  await sql`
    insert into siding.jobs (queue, kind, owner, payload, status, due_at)
    select q, 'small', 'o-' || n % 100, '{}', 'queued', now() - n * interval '1 second'
    from generate_series(1, ${waiting}::integer) n, unnest(${queue.names(QUEUES)}::text[]) q`;
}
async function finished(sql: Pool): Promise<void> {
  await sql`
    insert into siding.jobs (queue, kind, payload, status, attempt, worker_id, claimed_at, finished_at)
    select 'default', 'small', '{}', 'done', 1, gen_random_uuid(), now(), now() - n * interval '1 second'
    from generate_series(1, ${2 * MANY}::integer) n`;
}

/** What a plan reads of the jobs, all its parts together. */
function seenIn(node: Node): Seen {
  const parts = (node.Plans ?? []).map(seenIn);
  const seen: Seen = {
    by: new Set(parts.flatMap(({ by }) => [...by])),
    rows: parts.reduce((sum, { rows }) => sum + rows, 0),
    sorted: Math.max(0, ...parts.map(({ sorted }) => sorted)),
  };
  const type = node["Node Type"];
  const loops = node["Actual Loops"];
  if (loops === 0) return seen; // never begun
  if (/Scan$/.test(type) && (node["Relation Name"] === "jobs" || node["Index Name"])) {
    const index = node["Index Name"] ?? (type === "Seq Scan" ? "none" : undefined);
    if (index && (index.startsWith("jobs_") || index === "none")) seen.by.add(index);
    if (index?.startsWith("jobs_") || index === "none") {
      const left = (node["Rows Removed by Filter"] ?? 0) +
        (node["Rows Removed by Index Recheck"] ?? 0);
      seen.rows += (node["Actual Rows"] + left) * loops;
    }
  }
  if (/Sort$/.test(type) && parts.some(({ by }) => by.size > 0)) {
    const given = node.Plans![0]["Actual Rows"] * node.Plans![0]["Actual Loops"];
    seen.sorted = Math.max(seen.sorted, given);
  }
  return seen;
}
