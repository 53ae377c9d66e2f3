-- The site: who may use it, what it was asked for, why attempts ended, and who is told of it.
-- oldest code that still runs on this: 1

-- Keys of the API. Of the key itself only its hash is kept: whoever reads this table cannot use one.
create table siding.keys (
  id bigint generated always as identity primary key,
  owner text not null constraint key_owner_length check (length(owner) between 1 and 200),
  name text not null default '' constraint key_name_length check (length(name) <= 200),
  hash bytea not null constraint key_hash_length check (octet_length(hash) = 32),
  -- Is told of the end of each job submitted with this key, unless that names another.
  webhook text constraint key_webhook_url check (webhook ~ '^https?://' and length(webhook) <= 2000),
  created_at timestamptz not null default now(),
  used_at timestamptz,
  revoked_at timestamptz
);

-- What was submitted under an Idempotency-Key, for a day: the same request again gets the same job.
create table siding.submissions (
  -- '' is the admin.
  owner text not null,
  key text not null constraint submission_key_length check (length(key) between 1 and 200),
  fingerprint bytea not null,
  job_id bigint,
  created_at timestamptz not null default now(),
  primary key (owner, key)
);
create index submissions_by_time on siding.submissions (created_at);

-- How attempts ended that did not end in `done`: the job's row has only the last of them.
create table siding.attempts (
  job_id bigint not null,
  attempt integer not null,
  worker uuid,
  claimed_at timestamptz,
  ended_at timestamptz not null default now(),
  outcome text not null constraint outcome_known check
    (outcome in ('crashed', 'released', 'snoozed', 'failed', 'cancelled', 'review', 'lost')),
  error text,
  primary key (job_id, attempt)
);

-- What the site's leader found, so that people are told once, whichever site leads next.
create table siding.alerts (
  name text primary key,
  -- Looks in a row that found it unwell, and whether people were told so.
  unwell integer not null default 0,
  told boolean not null default false,
  codes text[] not null default '{}',
  looked_at timestamptz not null default now()
);

alter table siding.jobs
  -- Is told when the job ends.
  add column webhook text,
  -- The W3C trace context of the request that enqueued it.
  add column trace_parent text;

-- Jobs without an owner pay nothing for it. It holds finished jobs too: their owners look for them.
create index jobs_by_owner on siding.jobs (owner, id) where owner is not null;
-- The few among many finished ones that people ask for.
create index jobs_not_done on siding.jobs (status, id) where status in ('failed', 'cancelled');

-- One row for each attempt that did not end in `done`, so that a job that just works pays nothing.
create function siding.keep_attempt() returns trigger language plpgsql as $$
begin
  insert into siding.attempts (job_id, attempt, worker, claimed_at, outcome, error)
  values (old.id, old.attempt, old.worker_id, old.claimed_at, case
      when new.crashes > old.crashes then 'crashed'
      when new.releases > old.releases then 'released'
      when new.snoozes > old.snoozes then 'snoozed'
      when new.failures > old.failures then 'failed'
      when new.status in ('failed', 'cancelled', 'review') then new.status
      else 'lost' end, -- together with others, so that it counts for none
    new.error)
  on conflict do nothing;
  return null;
end $$;
create trigger keep_attempt after update of status on siding.jobs for each row
  when (old.status = 'running' and new.status not in ('running', 'done'))
  execute function siding.keep_attempt();

-- They go with their job. No foreign key: it would forbid to truncate the jobs.
create function siding.drop_attempts() returns trigger language plpgsql as $$
begin
  if tg_op = 'TRUNCATE' then
    truncate siding.attempts;
  else
    delete from siding.attempts a using gone where a.job_id = gone.id;
  end if;
  return null;
end $$;
create trigger drop_attempts after delete on siding.jobs referencing old table as gone
  for each statement execute function siding.drop_attempts();
create trigger truncate_attempts after truncate on siding.jobs
  for each statement execute function siding.drop_attempts();

-- Tells of a job's end by a job of its own, in a queue of its own, which commits with that end.
insert into siding.queues (name) values ('webhooks') on conflict do nothing;
create function siding.tell() returns trigger language plpgsql as $$
begin
  insert into siding.jobs (queue, kind, payload, trace_parent, status)
  values ('webhooks', 'webhook', jsonb_build_object('job', new.id::text, 'url', new.webhook),
    new.trace_parent, 'queued');
  return null;
end $$;
create trigger tell after update of status on siding.jobs for each row
  when (new.webhook is not null and old.finished_at is null and new.finished_at is not null)
  execute function siding.tell();

-- Enqueues one job (a JSON array of one) under an Idempotency-Key, once: the same key with the same
-- fingerprint again returns the job of the first time, and with another one is refused (SD422).
-- `replayed`: it was there. Else as siding.enqueue.
create function siding.submit(submitter text, idempotency_key text, print bytea, jobs jsonb)
returns table (id bigint, created boolean, replayed boolean) language plpgsql as $$
#variable_conflict use_column
declare
  before siding.submissions;
  entry record;
begin
  -- Waits for one under way with the same key, which then stands or is gone.
  insert into siding.submissions (owner, key, fingerprint) values (submitter, idempotency_key, print)
    on conflict do nothing;
  if not found then
    select * into before from siding.submissions s where s.owner = submitter and s.key = idempotency_key;
    if before.fingerprint is distinct from print then
      raise exception 'Idempotency-Key "%" was used for another request', idempotency_key
        using errcode = 'SD422';
    end if;
    return query select before.job_id, false, true;
    return;
  end if;
  select e.id, e.created into entry from siding.enqueue(jobs) e;
  update siding.submissions s set job_id = entry.id
    where s.owner = submitter and s.key = idempotency_key;
  return query select entry.id, entry.created, false;
end $$;

-- Tries failed jobs again, as new jobs in line: those named, or those of a kind, with a text in
-- their error, that failed in a time, oldest first and at most `most`. Each only once. Those that
-- are not named but cannot be tried now are left out: their owner has too few credits.
-- A paid request that has an id is resumed and not paid for again, unless `pay_again`; one that may
-- have been sent without our knowing its id is left out, or refused where it is named; so is one
-- with an id whose unique key another job has, since that job is not its own.
create or replace function siding.retry(jobs bigint[], of_kind text, with_error text, since timestamptz,
                             until timestamptz, most integer, pay_again boolean)
returns table (id bigint, new_id bigint, created boolean) language plpgsql as $$
#variable_conflict use_column
declare
  chosen bigint[];
  entries jsonb;
  bad siding.jobs;
begin
  if jobs is not null then
    perform from siding.jobs j where j.id = any(jobs) order by j.id for update;
    for bad in select j.* from unnest(jobs) as n(id) left join siding.jobs j on j.id = n.id
      where j.id is null or j.status <> 'failed' or j.retried_as is not null
        or not (pay_again or j.sent_at is null or j.request_id is not null) limit 1
    loop
      if bad.id is null then
        raise exception 'there is no job %', (select n.id from unnest(jobs) as n(id)
          where not exists (select from siding.jobs j where j.id = n.id) limit 1)
          using errcode = 'SD404';
      elsif bad.retried_as is not null then
        raise exception 'job % was tried again already, as job %', bad.id, bad.retried_as
          using errcode = 'SD409';
      elsif bad.status = 'failed' then
        raise exception 'job % may have been charged for: only with pay_again is it sent again', bad.id
          using errcode = 'SD409';
      end if;
      perform siding.refuse(bad.id, 'failed');
    end loop;
  end if;
  chosen := array(
    select j.id from siding.jobs j
    where j.status = 'failed' and j.retried_as is null
      and (jobs is null or j.id = any(jobs))
      and (of_kind is null or j.kind = of_kind)
      and (with_error is null or position(with_error in j.error) > 0)
      and (since is null or j.finished_at >= since) and (until is null or j.finished_at < until)
      and (pay_again or j.sent_at is null or j.request_id is not null)
      and (jobs is not null or j.price is null or exists (
        select from siding.balances b where b.owner = j.owner and b.balance >= j.price))
    order by j.finished_at, j.id limit most
    for update skip locked);
  -- As many as their owners can pay, and one of each unique key.
  chosen := array(
    select f.id from (
      select j.id, c.ord, j.price, coalesce(b.balance, 0) as balance,
        sum(j.price) over (partition by j.owner order by c.ord) as needed,
        row_number() over (partition by j.kind, j.unique_key order by c.ord) as turn, j.unique_key
      from unnest(chosen) with ordinality as c(id, ord)
      join siding.jobs j on j.id = c.id
      left join siding.balances b on b.owner = j.owner and j.price is not null) f
    where (jobs is not null or f.price is null or f.needed <= f.balance)
      and (jobs is not null or f.unique_key is null or f.turn = 1)
    order by f.ord);
  select coalesce(jsonb_agg(jsonb_build_object('kind', j.kind, 'queue', j.queue, 'owner', j.owner,
      'payload', j.payload, 'priority', j.priority, 'unique_key', j.unique_key, 'price', j.price, 'webhook', j.webhook,
      'files', (select coalesce(jsonb_agg(i.file_id::text order by i.position), '[]')
                from siding.job_inputs i where i.job_id = j.id)) order by c.ord), '[]') into entries
    from unnest(chosen) with ordinality as c(id, ord) join siding.jobs j on j.id = c.id;
  return query
    with fresh as materialized (select * from siding.enqueue(entries)),
    pairs as materialized (
      select c.id, f.id as new_id, f.created
      from unnest(chosen) with ordinality as c(id, ord) join fresh f on f.ord = c.ord
      join siding.jobs j on j.id = c.id
      where f.created or j.request_id is null or pay_again
    ),
    marked as (
      update siding.jobs j set retried_as = p.new_id from pairs p where j.id = p.id
      returning j.id
    )
    select p.id, p.new_id, p.created from pairs p join marked m on m.id = p.id order by p.id;
  -- Its own statement, which sees the new jobs. One that was there before is left as it is.
  if not pay_again then
    update siding.jobs j set request_key = o.request_key, sent_at = o.sent_at, request_id = o.request_id
      from siding.jobs o
      where o.id = any(chosen) and o.request_id is not null and j.id = o.retried_as
        and j.request_key is null and j.status = 'queued';
  end if;
  if jobs is not null then
    for bad in select j.* from siding.jobs j where j.id = any(jobs) and j.retried_as is null limit 1 loop
      raise exception 'job % has a paid request, and another job has its unique key "%"', bad.id, bad.unique_key
        using errcode = 'SD409';
    end loop;
  end if;
end $$;

-- The last look of each pool, dry runs aside. Pools are found one after the other by their index, so that
-- a month of looks is not read.
create function siding.last_looks() returns setof siding.looks language sql stable as $$
  with recursive pools as (
    (select l.pool from siding.looks l order by l.pool limit 1)
    union all
    select (select l.pool from siding.looks l where l.pool > p.pool order by l.pool limit 1)
    from pools p where p.pool is not null
  )
  select last.* from (select pool from pools where pool not like '%/%' limit 100) p
  cross join lateral (
    select * from siding.looks l where l.pool = p.pool order by l.number desc limit 1) last;
$$;
