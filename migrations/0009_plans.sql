-- Plans that stay: each statement reads few rows, by an index, whatever the statistics say of the table.
-- oldest code that still runs on this: 1

-- Fails jobs of a kind that no live worker's code knows and that have been due for `grace_s`: long
-- enough for a deploy, in which old workers meet the kinds of newer code.
create or replace function siding.fail_unknown_kinds(most integer, grace_s double precision, silent_s double precision)
returns table (id bigint, kind text) language sql as $$
  with known as materialized (
    select p.queues, p.known_kinds from siding.processes p
    where p.role = 'worker' and p.seen_at > now() - silent_s * interval '1 second'
  ),
  stuck as materialized (
    select j.id from siding.jobs j
    where j.status = 'queued' and j.due_at < now() - grace_s * interval '1 second'
      -- Somebody works this queue, so that a kind nobody knows is not just workers that are down.
      and exists (select from known k where k.queues is null or j.queue = any(k.queues))
      and not exists (select from known k where j.kind = any(k.known_kinds))
    limit most -- in no order: by id it is all jobs that are read
    for update skip locked
  )
  update siding.jobs j set status = 'failed', finished_at = now(), failures = j.failures + 1,
    error = format('unknown kind "%s": no worker''s code has it', j.kind)
  from stuck where j.id = stuck.id
  returning j.id, j.kind;
$$;

-- The unfinished jobs, by queue and kind, each state read from its own partial index. A function behind the
-- view, since a function can rule plans out.
create function siding.count_jobs()
returns table (queue text, kind text, paused boolean, max_running integer, scheduled integer,
               queued integer, running integer, review integer, oldest_wait_s double precision)
language sql stable as $$
  select j.queue, j.kind, q.paused, q.max_running,
    (count(*) filter (where j.status = 'scheduled'))::integer as scheduled,
    (count(*) filter (where j.status = 'queued'))::integer as queued,
    (count(*) filter (where j.status = 'running'))::integer as running,
    (count(*) filter (where j.status = 'review'))::integer as review,
    extract(epoch from now() - min(j.due_at) filter (where j.status = 'queued'))::float8
      as oldest_wait_s
  from (
    select queue, kind, status, due_at from siding.jobs where status = 'scheduled'
    union all select queue, kind, status, due_at from siding.jobs where status = 'queued'
    union all select queue, kind, status, due_at from siding.jobs where status = 'running'
    union all select queue, kind, status, due_at from siding.jobs where status = 'review'
  ) j
  join siding.queues q on q.name = j.queue
  group by j.queue, j.kind, q.paused, q.max_running;
$$;
create or replace view siding.counts as select * from siding.count_jobs();

-- Plans of statements in functions are made once a session and kept. One that was made while the table was
-- small, or its statistics old, may be a scan of all jobs for ever: it is ruled out. No bitmaps either: they
-- read more than the few rows wanted, and leave dead entries for the next. A function that is created anew
-- has to be named here again (tests/plans_test.ts tells).
do $$
declare
  f record;
begin
  for f in
    select p.oid::regprocedure as name from pg_proc p
    where p.pronamespace = (select c.relnamespace from pg_class c where c.oid = 'siding.jobs'::regclass)
      and p.proname in ('look', 'promote', 'claim_lock', 'claim_repeatable_read', 'heartbeat', 'recover',
        'cancel', 'enqueue', 'retry', 'check_limits', 'attach_files', 'fail_unknown_kinds', 'sweep', 'count_jobs',
        'survey', 'service_state', 'to_look_up', 'intend', 'save_request')
  loop
    execute format('alter function %s set enable_seqscan = off', f.name);
    execute format('alter function %s set enable_bitmapscan = off', f.name);
  end loop;
  -- Nor joins that read all of one side, where a few rows are joined by their ids.
  for f in
    select p.oid::regprocedure as name from pg_proc p
    where p.pronamespace = (select c.relnamespace from pg_class c where c.oid = 'siding.jobs'::regclass)
      and p.proname in ('look', 'promote', 'claim_lock', 'claim_repeatable_read', 'heartbeat', 'recover',
        'cancel', 'check_limits', 'fail_unknown_kinds', 'sweep')
  loop
    execute format('alter function %s set enable_hashjoin = off', f.name);
    execute format('alter function %s set enable_mergejoin = off', f.name);
  end loop;
  -- A plan that has no other way than one that is ruled out is priced at 10^10 before PostgreSQL 18: as if it were
  -- worth compiling, which takes a second, at each call.
  for f in
    select p.oid::regprocedure as name from pg_proc p
    where p.pronamespace = (select c.relnamespace from pg_class c where c.oid = 'siding.jobs'::regclass)
      and p.proconfig::text like '%enable_%=off%'
  loop
    execute format('alter function %s set jit = off', f.name);
  end loop;
end $$;
-- Files are joined with each other by how many there are: an enqueue plans once, for few.
alter function siding.attach_files(jsonb, bigint[], bigint[]) set plan_cache_mode = auto;
