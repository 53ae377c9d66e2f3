/** What must hold after any history: each check names the jobs that are off, and why. */
import { type Pool, schema } from "../../db.ts";
import { audit } from "../../credits.ts";
import type { Charge } from "../band_service.ts";

export interface Problem {
  /** Null: of no single job. */
  job: string | null;
  what: string;
}

/** What the tool knows of what it enqueued, by the number in the payload. */
export interface Book {
  /** Enqueued, and said so. */
  stands: Set<number>;
  /** Rolled back, or refused. */
  never: Set<number>;
}

/**
 * Keeps every write to a job, with who wrote it: by the session's name, and not by what the write
 * says of itself. And the name of each boot, since a worker that stops takes its row along.
 */
export async function installRecorder(sql: Pool): Promise<void> {
  await sql.unsafe(`
    create schema chaos;
    create table chaos.boots (boot_id uuid primary key, name text not null);
    create function chaos.note_boot() returns trigger language plpgsql as $$ begin
      insert into chaos.boots values (new.boot_id, new.name);
      return null;
    end $$;
    create trigger note_boot after insert on "${schema}".processes
      for each row execute function chaos.note_boot();

    create table chaos.writes (
      n bigint generated always as identity primary key,
      at timestamptz not null default clock_timestamp(),
      who text not null default current_setting('application_name'),
      job bigint not null, was jsonb, became jsonb
    );
    create index on chaos.writes (job);
    create function chaos.note_write() returns trigger language plpgsql as $$ begin
      insert into chaos.writes (job, was, became) values (coalesce(new.id, old.id),
        to_jsonb(old) - '{payload,result}'::text[], to_jsonb(new) - '{payload,result}'::text[]);
      return null;
    end $$;
    create trigger note_write after insert or update or delete on "${schema}".jobs
      for each row execute function chaos.note_write();
  `).simple();
}

/** All that is off. */
export async function findProblems(sql: Pool, book: Book, charges: Charge[]): Promise<Problem[]> {
  const s = sql(schema);
  const rows = async (
    what: string,
    found: PromiseLike<{ job: string | null; detail?: string }[]>,
  ) =>
    (await found).map(({ job, detail }) => ({ job, what: detail ? `${what}: ${detail}` : what }));
  return (await Promise.all([
    rows(
      "it is neither final nor in review",
      sql`select id::text as job, status as detail from ${s}.jobs
        where status in ('scheduled', 'queued', 'running')`,
    ),
    enqueuedOnce(sql, book),
    rows(
      "it is done with another's result",
      sql`select id::text as job, result::text as detail from ${s}.jobs
        where status = 'done' and kind <> 'band' and result -> 'n' is distinct from payload -> 'n'`,
    ),
    rows(
      "it is done without its one file",
      sql`select j.id::text as job from ${s}.jobs j where j.status = 'done' and j.kind = 'free'
        and 1 <> (select count(*) from ${s}.files f join ${s}.file_chunks c on c.file_id = f.id
                  where f.job_id = j.id and f.attempt = j.attempt and f.kept
                    and convert_from(c.data, 'UTF8') = (j.payload ->> 'n') || E'\n')`,
    ),
    rows(
      "it brought not one next job when it was done, or one when it was not",
      sql`select j.id::text as job from ${s}.jobs j where j.kind = 'chain'
        and (j.status = 'done')::integer <> (select count(*) from ${s}.jobs n
          where n.payload -> 'n' = to_jsonb(-(j.payload ->> 'n')::bigint))`,
    ),
    strayWrites(sql),
    rows(
      "its attempts do not rise one by one",
      sql`select job::text, became ->> 'attempt' as detail from chaos.writes
        where (became ->> 'attempt')::integer - coalesce((was ->> 'attempt')::integer, 0)
          <> (became ->> 'status' = 'running' and was ->> 'status' = 'queued')::integer`,
    ),
    rows(
      "it left a final state",
      sql`select job::text, became ->> 'status' as detail from chaos.writes
        where was ->> 'status' in ('done', 'failed', 'cancelled')
          and became ->> 'status' is distinct from was ->> 'status'`,
    ),
    rows(
      "it failed without one of the reasons that there are",
      sql`select id::text as job, error as detail from ${s}.jobs where status = 'failed'
        and not (crashes >= 4 or releases > 20 or failures > case kind when 'band' then 50 else 5 end)`,
    ),
    rows(
      "it is in review though somebody must have known whether it was sent",
      sql`select id::text as job, error as detail from ${s}.jobs where status = 'review'
        and error !~ 'not known whether the request was sent|fell silent'`,
    ),
    paidOnce(sql, charges),
    audit(sql).then((found) =>
      found.map(({ job_id, owner, problem }) => ({
        job: job_id,
        what: `credits of ${owner}: ${problem}`,
      }))
    ),
  ])).flat();
}

/** Every job that was promised is there once, and none that was not. */
async function enqueuedOnce(sql: Pool, { stands, never }: Book): Promise<Problem[]> {
  const rows = await sql<{ n: number; id: string; times: number }[]>`
    select n::float8 as n, min(id)::text as id, count(*)::integer as times from (
      select id, case when kind = 'band' then unique_key else payload ->> 'n' end as n
      from ${sql(schema)}.jobs) j
    group by n`;
  const there = new Map(rows.map(({ n, id }) => [n, id]));
  return [
    ...rows.filter(({ times }) => times > 1).map(({ n, id, times }) => ({
      job: id,
      what: `job number ${n} is there ${times} times`,
    })),
    ...[...stands].filter((n) => !there.has(n)).map((n) => ({
      job: null,
      what: `job number ${n} was enqueued and is not there`,
    })),
    ...[...never].filter((n) => there.has(n)).map((n) => ({
      job: there.get(n)!,
      what: `job number ${n} was rolled back or refused, and is there`,
    })),
  ];
}

/**
 * A job was moved, or a running one changed, by somebody who may not: a claim is in the name of who
 * wrote it, and from running a job is moved by the worker that has it, or by a recovery after its
 * lease. Anybody's are only the promotion of what is due, the late id, and the wish to cancel.
 */
async function strayWrites(sql: Pool): Promise<Problem[]> {
  const rows = await sql<{ job: string; who: string; was: string; became: string }[]>`
    select w.job::text, w.who, w.was::text, w.became::text from chaos.writes w
    left join chaos.boots had on had.boot_id = (w.was ->> 'worker_id')::uuid
    left join chaos.boots got on got.boot_id = (w.became ->> 'worker_id')::uuid
    where w.was is not null and w.became is not null
      and (w.was - ${anybodys}::text[]) <> (w.became - ${anybodys}::text[])
      and not case w.was ->> 'status' || ' to ' || (w.became ->> 'status')
        when 'scheduled to queued' then true
        when 'scheduled to cancelled' then w.who = 'chaos'
        when 'queued to cancelled' then w.who = 'chaos'
        when 'queued to running' then coalesce(w.who = 'siding worker ' || got.name, false)
        when 'review to queued' then w.became ->> 'request_id' is not null
        else w.was ->> 'status' = 'running' and (
          coalesce(w.who = 'siding worker ' || had.name, false)
          or (w.at > (w.was ->> 'lease_until')::timestamptz
              and w.became ->> 'status' in ('queued', 'review', 'failed', 'cancelled'))) end`;
  return rows.map(({ job, who, was, became }) => ({
    job,
    what: `${who} wrote to it without having it: ${was} became ${became}`,
  }));
}
const anybodys = "{request_id,sent_at,cancel_requested_at}";

/** One charge a job at the most; done means charged; every charge's id is stored. */
async function paidOnce(sql: Pool, charges: Charge[]): Promise<Problem[]> {
  const jobs = await sql<
    { id: string; status: string; key: string | null; request: string | null }[]
  >`
    select j.id::text, j.status, j.request_key as key, r.request_id as request
    from ${sql(schema)}.jobs j left join ${sql(schema)}.requests r on r.key = j.request_key
    where j.kind = 'band'`;
  const byKey = new Map(jobs.map((job) => [job.key, job]));
  const charged = new Map(charges.map((charge) => [charge.key, charge]));
  const problems: Problem[] = [];
  for (const { key, id, charges: n } of charges) {
    const job = byKey.get(key);
    if (n > 1) problems.push({ job: job?.id ?? null, what: `it was charged ${n} times` });
    if (!job) {
      problems.push({ job: null, what: `key ${key} is no job's, and was charged ${n} times` });
    } else if (n > 0 && job.request !== id) {
      problems.push({ job: job.id, what: `it was charged as ${id}, and ${job.request} is stored` });
    }
  }
  for (const { id, status, key } of jobs) {
    if (status === "done" && !charged.get(key ?? "")?.charges) {
      problems.push({ job: id, what: "it is done and was not charged" });
    }
  }
  return problems;
}

/** Two attempts of one job were at work at once, by what they noted: lines of job and attempt. */
export function overlaps(effects: string): Problem[] {
  const last = new Map<string, number>();
  const problems = new Map<string, Problem>();
  // As the kernel had them, whose order is that of the writes.
  for (const line of effects.trim().split("\n").filter(Boolean)) {
    const [job, attempt] = line.split(" ");
    const newest = Math.max(Number(attempt), last.get(job) ?? 0);
    if (Number(attempt) < newest) {
      problems.set(job, { job, what: `attempt ${attempt} was at work though ${newest} had begun` });
    }
    last.set(job, newest);
  }
  return [...problems.values()];
}

/** All that happened to a job, a line each. */
export async function historyOf(sql: Pool, job: string): Promise<string[]> {
  const rows = await sql<{ at: Date; who: string; changes: string }[]>`
    select w.at, w.who, coalesce((
      select string_agg(format('%s: %s', n.key, n.value), ', ' order by n.key)
      from jsonb_each_text(w.became) n
      where n.value is distinct from w.was ->> n.key), 'deleted') as changes
    from chaos.writes w where w.job = ${job} order by w.n`;
  return rows.map(({ at, who, changes }) => `${at.toISOString()} ${who}: ${changes}`);
}
