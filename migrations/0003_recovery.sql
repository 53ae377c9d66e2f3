-- Recovery and paid work: what is known of each request, what people decide about jobs in review,
-- and who a crash is counted against.
-- A function is in the newest file that changed it, and taken out of the older one.
-- oldest code that still runs on this: 1

-- What was sent to a paid service, and its id there. A table of its own, since it outlasts the job.
create table siding.requests (
  key uuid primary key,
  -- The job that was sent with it, or last resumed from it.
  job_id bigint not null,
  kind text not null,
  owner text,
  -- The last intent to send it; null when it is certain that nothing was charged.
  sent_at timestamptz,
  request_id text,
  -- The last time that the service was asked for it by its key, and what came of that.
  looked_up_at timestamptz,
  look_up text
);
-- By a trigger, so that no way to change a job can forget it, older code's neither.
create function siding.keep_request() returns trigger language plpgsql as $$
begin
  insert into siding.requests as r (key, job_id, kind, owner, sent_at, request_id)
    values (new.request_key, new.id, new.kind, new.owner, new.sent_at, new.request_id)
    on conflict (key) do update set job_id = new.id, sent_at = new.sent_at,
      request_id = coalesce(r.request_id, new.request_id);
  return null;
end $$;
create trigger keep_request after update of sent_at, request_id on siding.jobs for each row
  when (new.request_key is not null and (old.sent_at is distinct from new.sent_at
                                         or old.request_id is distinct from new.request_id))
  execute function siding.keep_request();
-- After the trigger, which waits for those who are just storing an intent: none is missed.
insert into siding.requests (key, job_id, kind, owner, sent_at, request_id)
  select j.request_key, j.id, j.kind, j.owner, j.sent_at, j.request_id
  from siding.jobs j where j.request_key is not null
  on conflict (key) do nothing;

-- It was lost together with others: it runs next with nothing beside it, and a crash then is its own.
alter table siding.jobs add column alone boolean not null default false;
-- The job that a failed one was tried again as.
alter table siding.jobs add column retried_as bigint;
create index jobs_failed on siding.jobs (finished_at) where status = 'failed' and retried_as is null;

-- The kinds whose jobs run in the worker's own process, and end with it.
alter table siding.processes add column inline_kinds text[] not null default '{}';
-- When the worker last got around to looking for jobs, which a heartbeat alone does not show.
alter table siding.processes add column progressed_at timestamptz not null default now();

drop function if exists
  siding.take(text, text[], integer, uuid, uuid, double precision),
  siding.claim_lock(text, text[], integer, uuid, uuid, double precision),
  siding.claim_repeatable_read(text, text[], integer, uuid, uuid, double precision),
  siding.heartbeat(uuid, jsonb, double precision, double precision),
  siding.cancel(bigint);

-- Renews the worker's own row and the leases of the jobs it names, a JSON array of {id, attempt,
-- stage, progress}: those it names, never all that bear its name. It waits for no job's row, since
-- somebody's open transaction on one job must not stop the heartbeat of the others.
-- Per job: `renewed`, `skipped` (its row is locked just now, its lease runs on) or `lost`.
-- `stalled_s`: how long ago the worker last got around to looking for jobs.
-- `strays` run in the worker's name but were not named: the reply of a claim got lost.
create function siding.heartbeat(worker uuid, jobs jsonb, lease_s double precision,
                                 silent_s double precision, stalled_s double precision default 0)
returns table (alive boolean, leader boolean, beats jsonb, strays jsonb) language sql
set lock_timeout = '5s' as $$
  with me as (
    update siding.processes set seen_at = now(), running = jsonb_array_length(jobs),
      progressed_at = now() - stalled_s * interval '1 second'
    where boot_id = worker returning id, role, pool
  ),
  named as materialized (
    select * from jsonb_to_recordset(jobs) as n(id bigint, attempt integer, stage text, progress real)
  ),
  mine as materialized (
    select j.id from siding.jobs j join named n on n.id = j.id and n.attempt = j.attempt
    where j.worker_id = worker and j.status = 'running'
    order by j.id
    for update of j skip locked
  ),
  renewed as (
    update siding.jobs j set stage = n.stage, progress = n.progress,
      lease_until = now() + lease_s * interval '1 second'
    from mine, named n where j.id = mine.id and n.id = mine.id
    returning j.id, j.cancel_requested_at is not null as cancel
  )
  select
    exists (select from me),
    siding.is_leader(worker, silent_s),
    (select coalesce(jsonb_agg(jsonb_build_object('id', n.id::text, 'cancel', coalesce(r.cancel, false),
        'state', case when r.id is not null then 'renewed' when j.id is not null then 'skipped'
                      else 'lost' end)), '[]')
     from named n left join renewed r on r.id = n.id
     left join siding.jobs j on j.id = n.id and j.attempt = n.attempt
       and j.worker_id = worker and j.status = 'running'),
    (select coalesce(jsonb_agg(jsonb_build_object('id', j.id::text, 'attempt', j.attempt,
        'claim_token', j.claim_token)), '[]')
     from siding.jobs j
     where j.worker_id = worker and j.status = 'running'
       and not exists (select from named n where n.id = j.id and n.attempt = j.attempt));
$$;

-- Takes back running jobs whose lease ran out: those of the workers of the first `most`.
--   Work that was never sent goes back in line until it crashed `max_crashes` times.
--   A saved request is resumed; since to collect it may be what crashes, five times as often.
--   An intent without an id waits for a person, or for its id.
-- Of jobs that run in the worker's own process and were lost together, nobody knows which one it
-- was: each goes back uncounted, once, and is next run alone.
create or replace function siding.recover(most integer, max_crashes integer)
returns table (id bigint, kind text, status text) language sql as $$
  with silent as materialized (
    select distinct f.worker_id as boot from (
      select j.worker_id from siding.jobs j where j.status = 'running' and j.lease_until < now()
      order by j.id limit most) f
  ),
  -- How many were with each: not only now, since the leases of a batch may run out one by one.
  crowd as materialized (
    select s.boot, p.inline_kinds, greatest(count(*), p.running) as jobs
    from silent s
    join siding.jobs j on j.worker_id = s.boot and j.status = 'running'
    left join siding.processes p on p.boot_id = s.boot
    group by s.boot, p.inline_kinds, p.running
  ),
  noted as (
    update siding.processes p set running = n.jobs from (
      select q.boot_id, c.jobs from siding.processes q join crowd c on c.boot = q.boot_id
      where c.jobs > q.running order by q.boot_id for update of q skip locked) n
    where p.boot_id = n.boot_id
  ),
  lost as materialized (
    select j.id, t.together, c.jobs, case
        when j.sent_at is not null and j.request_id is null then 'review'
        when j.request_id is not null and j.crashes + 1 < 5 * max_crashes then 'queued'
        when j.cancel_requested_at is not null and j.request_id is null then 'cancelled'
        when t.together or j.crashes + 1 < max_crashes then 'queued'
        else 'failed' end as status
    from siding.jobs j
    join crowd c on c.boot = j.worker_id
    cross join lateral (select c.jobs > 1 and not j.alone and j.request_id is null
                               and coalesce(j.kind = any(c.inline_kinds), false) as together) t
    where j.status = 'running' and j.lease_until < now()
    order by j.id
    for update of j skip locked -- the lock re-checks the lease: a heartbeat may have come first
  )
  update siding.jobs j set
    status = l.status,
    crashes = j.crashes + (not l.together)::integer,
    alone = l.together or j.alone,
    lease_until = null,
    worker_id = case when l.status in ('failed', 'cancelled') then j.worker_id end,
    claim_token = case when l.status in ('failed', 'cancelled') then j.claim_token end,
    finished_at = case when l.status in ('failed', 'cancelled') then now() end,
    error = case when l.status <> 'cancelled' then
      format('worker %s fell silent during attempt %s', left(j.worker_id::text, 8), j.attempt)
      || case when l.together then format(', with %s jobs: it is next run alone', l.jobs) else '' end end
  from lost l where j.id = l.id
  returning j.id, j.kind, j.status;
$$;

-- The key of a job's request. It is made from what the job has had from the start: should the database
-- fail over and lose the last transactions, and the stored intent with them, the request is sent
-- again with the same key, by which the service knows it.
create function siding.key_of(job siding.jobs) returns uuid language sql immutable as $$
  select left(encode(sha256(convert_to(format('%s %s %s', job.id, job.kind,
    extract(epoch from job.created_at)), 'UTF8')), 'hex'), 32)::uuid;
$$;

-- Stores, before a paid request is sent, that it will be. Returns the request's key, which is the
-- job's for life, its id if that has come meanwhile, and for how many seconds the job is surely the
-- worker's; no key when it was cancelled or its lease has run out; nothing when it is not its any more.
create function siding.intend(worker uuid, job bigint, job_attempt integer)
returns table (key uuid, request_id text, left_s double precision, cancel boolean) language sql
set lock_timeout = '5s' as $$
  -- The clock and not now(): this may have waited for the row.
  with mine as materialized (
    select j.id, extract(epoch from j.lease_until - clock_timestamp())::float8 as left_s,
      j.cancel_requested_at is not null as cancel
    from siding.jobs j
    where j.id = job and j.attempt = job_attempt and j.worker_id = worker and j.status = 'running'
    for update
  ),
  stored as (
    update siding.jobs j set request_key = coalesce(j.request_key, siding.key_of(j)),
      sent_at = case when j.request_id is null then now() else j.sent_at end
    from mine m where j.id = m.id and m.left_s > 0 and not m.cancel
    returning j.request_key, j.request_id
  )
  select s.request_key, s.request_id, m.left_s, m.cancel from mine m left join stored s on true;
$$;

-- Stores a paid request's id by its key, whoever has the job by now and though the job may be gone:
-- the one write that no fence holds, from null to an id only. A job that waits for it in review goes
-- back in line, to resume. False: there is no such request, or it has another id.
create function siding.save_request(request uuid, id text) returns boolean language plpgsql
set lock_timeout = '5s' as $$
declare
  job bigint := (select r.job_id from siding.requests r where r.key = request);
begin
  -- The job's row first, as all do who change both.
  perform from siding.jobs j where j.id = job for update;
  update siding.requests r set request_id = save_request.id
    where r.key = request and coalesce(r.request_id, save_request.id) = save_request.id;
  if not found then
    return false;
  end if;
  update siding.jobs j set request_id = save_request.id, sent_at = coalesce(j.sent_at, now()),
      status = case when j.status = 'review' then 'queued' else j.status end
    where j.id = job and j.request_key = request and j.request_id is null;
  return true;
end $$;

-- The jobs in review that the service is to be asked for now, at most `most`, each at most every
-- `every_s`; marked, so that two who ask share them out.
create function siding.to_look_up(kinds text[], most integer, every_s double precision)
returns setof siding.jobs language sql as $$
  with due as materialized (
    select r.key from siding.jobs j join siding.requests r on r.key = j.request_key
    where j.status = 'review' and j.kind = any(kinds)
      and (r.looked_up_at is null or r.looked_up_at < now() - every_s * interval '1 second')
    order by r.looked_up_at nulls first, j.id limit most -- so that each has its turn
    for update of r skip locked
  ),
  marked as (
    update siding.requests r set looked_up_at = now() from due where r.key = due.key returning r.key
  )
  select j.* from siding.jobs j join marked m on m.key = j.request_key where j.status = 'review';
$$;

-- Cancels a job: at once when it waits, else by asking its worker. Work that may have been sent to
-- a paid service stays as it is (SD409), since what came of it is not known. Returns the state it is
-- in after, null when there is no such job.
create function siding.cancel(job bigint) returns text language plpgsql as $$
declare
  found siding.jobs;
  cancelled text;
begin
  update siding.jobs set cancel_requested_at = coalesce(cancel_requested_at, now()),
      status = case when status = 'running' then status else 'cancelled' end,
      finished_at = case when status = 'running' then null else now() end
    where id = job and status in ('scheduled', 'queued', 'running') and sent_at is null
    returning status into cancelled;
  if cancelled is not null then
    return cancelled;
  end if;
  select * into found from siding.jobs where id = job;
  if found.status not in ('done', 'failed', 'cancelled') then
    raise exception 'job % was sent to its paid service and is %: it cannot be cancelled until what came of that is known',
      job, found.status using errcode = 'SD409';
  end if;
  return found.status;
end $$;

-- Says why a person cannot do this to a job.
create function siding.refuse(job bigint, wanted text) returns void language plpgsql as $$
declare
  status text := (select j.status from siding.jobs j where j.id = job);
begin
  if status is null then
    raise exception 'there is no job %', job using errcode = 'SD404';
  end if;
  raise exception 'job % is %, and not %', job, status, wanted using errcode = 'SD409';
end $$;

-- The three things that a person can say of a job in review. It was sent, and this is its id:
create function siding.resume(job bigint, request text) returns void language plpgsql as $$
begin
  if coalesce(length(request), 0) not between 1 and 1000 then
    raise exception 'a request''s id is 1 to 1000 characters long' using errcode = 'SD422';
  end if;
  update siding.jobs set status = 'queued', request_id = request where id = job and status = 'review';
  if not found then
    perform siding.refuse(job, 'in review');
  end if;
end $$;

-- It is to be sent, again if it was: with the same key, which the service is to honour.
create function siding.requeue(job bigint) returns void language plpgsql as $$
begin
  update siding.jobs set status = 'queued', sent_at = null where id = job and status = 'review';
  if not found then
    perform siding.refuse(job, 'in review');
  end if;
end $$;

-- It has failed.
create function siding.fail_review(job bigint, reason text) returns void language plpgsql as $$
begin
  if coalesce(length(reason), 0) = 0 then
    raise exception 'a reason is needed to fail job %', job using errcode = 'SD422';
  end if;
  update siding.jobs set status = 'failed', finished_at = now(), error = left(reason, 2000)
    where id = job and status = 'review';
  if not found then
    perform siding.refuse(job, 'in review');
  end if;
end $$;
