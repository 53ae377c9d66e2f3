-- Schedules: jobs that come again, at the ticks of a cron expression.
-- oldest code that still runs on this: 1

create table siding.schedules (
  name text primary key constraint schedule_name check (name ~ '^[a-z0-9_.-]{1,63}$'),
  -- Five fields, read on the clocks of the time zone. Only schedules.ts can tell what they mean: a row that
  -- was written by hand may say anything, and has its error shown.
  cron text not null constraint cron_length check (length(cron) <= 200),
  time_zone text not null default 'UTC' constraint time_zone_length check (length(time_zone) between 1 and 100),
  enabled boolean not null default true,
  -- Of ticks that nobody was there for: one job for all of them, or none.
  missed text not null default 'run_once' constraint missed_known check (missed in ('run_once', 'skip')),
  -- The job of each tick.
  kind text not null constraint schedule_kind check (kind ~ '^[a-z0-9_.-]{1,63}$'),
  payload jsonb not null default '{}',
  queue text not null default 'default',
  owner text constraint schedule_owner check (length(owner) between 1 and 200),
  priority integer not null default 0,
  unique_key text constraint schedule_unique_key check (length(unique_key) between 1 and 200),
  -- Rises with every change and every tick: a step that was worked out from an older one does nothing.
  version bigint not null default 1,
  -- Ticks count from here on; next_at is the first that is not done with, null where it is to be worked out.
  planned_from timestamptz not null default now(),
  next_at timestamptz,
  -- Why the tick at next_at could not be enqueued, or none be worked out, and when that was last tried.
  error text constraint schedule_error_length check (octet_length(error) <= 8192),
  error_at timestamptz,
  constraint error_is_timed check ((error is null) = (error_at is null))
);

-- What became of each tick. Its key is what makes a second job of one tick impossible, whoever enqueues it.
create table siding.schedule_ticks (
  schedule text not null references siding.schedules on delete cascade on update cascade,
  tick_at timestamptz not null,
  outcome text not null constraint outcome_known check (outcome in ('enqueued', 'skipped')),
  -- An unfinished job that had the unique key is the job of the tick, too.
  job_id bigint,
  ended_at timestamptz not null default now(),
  primary key (schedule, tick_at)
);

-- Whoever changes a schedule, by hand too: other times count from now on, not from the past, and what was
-- refused is tried again at once.
create function siding.schedule_changed() returns trigger language plpgsql as $$
begin
  new.version := old.version + 1;
  new.error := null;
  new.error_at := null;
  if (new.cron, new.time_zone, new.enabled) is distinct from (old.cron, old.time_zone, old.enabled) then
    new.planned_from := now();
    new.next_at := null;
  end if;
  return new;
end $$;
create trigger schedule_changed before update on siding.schedules for each row
  when ((old.cron, old.time_zone, old.enabled, old.missed, old.kind, old.payload, old.queue, old.owner,
         old.priority, old.unique_key)
    is distinct from (new.cron, new.time_zone, new.enabled, new.missed, new.kind, new.payload, new.queue,
         new.owner, new.priority, new.unique_key))
  execute function siding.schedule_changed();

-- The schedules with something to do: a tick that is due, or the first to be worked out. One whose kind other
-- live workers' code has, and the caller's has not, is left to them. A function, since to plan it
-- takes twenty times as long as to run it.
create function siding.due_schedules(kinds text[], silent_s double precision, again_s double precision, most integer)
returns table (name text, version text, cron text, time_zone text, missed text, kind text, payload jsonb,
               known boolean, planned_from_ms double precision, next_ms double precision, now_ms double precision)
language plpgsql stable set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  return query
    select d.name, d.version::text, d.cron, d.time_zone, d.missed, d.kind, d.payload, d.known,
      extract(epoch from d.planned_from)::float8 * 1000, extract(epoch from d.next_at)::float8 * 1000,
      extract(epoch from now())::float8 * 1000
    from (select s.*, s.kind = any(kinds) as known from siding.schedules s) d
    where d.enabled and (d.next_at is null or d.next_at <= now())
      and (d.error_at is null or d.error_at <= now() - again_s * interval '1 second')
      and (d.known or not exists (
        select from siding.processes p where p.role = 'worker' and d.kind = any(p.known_kinds)
          and p.seen_at > now() - silent_s * interval '1 second'))
    order by d.next_at nulls first, d.name limit most;
end $$;

-- One step of a schedule, worked out at `seen_ms` from its version `seen`: `run` enqueues the job of the tick at
-- next_at, `skip` goes without, `plan` has no tick yet, and all three go on to `next_ms`; `fail` records why
-- none could be worked out. A tick that is refused stays, with the reason, and is tried again.
--
-- Whoever calls it late, or at the same time as another, changes nothing: `stale`.
create function siding.step_schedule(schedule text, seen bigint, seen_ms double precision, step text,
                                     next_ms double precision, reason text)
returns table (outcome text, job_id bigint, error text) language plpgsql as $$
#variable_conflict use_column
declare
  s siding.schedules;
  following timestamptz := to_timestamp(next_ms / 1000);
  job bigint;
begin
  select one.* into s from siding.schedules one
    where one.name = schedule and one.version = seen and one.enabled for update;
  -- A caller that was frozen: by now the tick may be a missed one.
  if not found or clock_timestamp() > to_timestamp(seen_ms / 1000) + interval '10 seconds' then
    return query select 'stale', null::bigint, null::text;
    return;
  end if;

  if step = 'run' then
    begin
      insert into siding.schedule_ticks (schedule, tick_at, outcome)
        values (schedule, s.next_at, 'enqueued') on conflict do nothing;
      if found then
        select e.id into job from siding.enqueue(jsonb_build_array(jsonb_build_object(
          'kind', s.kind, 'payload', s.payload, 'queue', s.queue, 'owner', s.owner,
          'priority', s.priority, 'unique_key', s.unique_key))) e;
        update siding.schedule_ticks t set job_id = job where t.schedule = s.name and t.tick_at = s.next_at;
      end if;
    exception when others then
      -- Another transaction, or the server, was in the way: nobody's fault, and tried again at once.
      if sqlstate ~ '^(40|53|55|57|58)' then
        raise;
      end if;
      step := 'fail';
      reason := sqlerrm;
    end;
  elsif step = 'skip' then
    insert into siding.schedule_ticks (schedule, tick_at, outcome)
      values (schedule, s.next_at, 'skipped') on conflict do nothing;
  end if;

  if step = 'fail' then
    update siding.schedules one set version = one.version + 1, error = left(reason, 2000),
      error_at = clock_timestamp() where one.name = schedule;
    return query select 'failed', null::bigint, left(reason, 2000);
    return;
  end if;
  if following <= s.next_at then
    raise exception 'schedule "%": the next tick, %, is not after the last, %', schedule, following, s.next_at
      using errcode = 'SD422';
  end if;
  update siding.schedules one set version = one.version + 1, next_at = following, error = null, error_at = null
    where one.name = schedule;
  delete from siding.schedule_ticks t where t.schedule = s.name and t.tick_at < (
    select k.tick_at from siding.schedule_ticks k where k.schedule = s.name
    order by k.tick_at desc offset 100 limit 1);
  return query select case when step = 'run' and job is not null then 'enqueued'
                           when step = 'skip' then 'skipped' else 'planned' end, job, null::text;
end $$;
