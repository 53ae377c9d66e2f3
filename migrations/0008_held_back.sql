-- What a rate limit holds back is no reason to climb, nor to be unwell: the controllers' look and the
-- health check see it.
-- oldest code that still runs on this: 1

-- What a controller sees of the queue and of the workers of its pool, all of it of one instant, and
-- the look before: at_ms (the database's clock), whether it leads, number and memory of the last
-- look, and work and workers as policy.ts has them. With `run_times` also how long the kinds' jobs
-- ran of late. `look_pool` is the pool of the looks.
create or replace function siding.survey(controller uuid, pool_name text, look_pool text,
                              silent_s double precision, run_times boolean)
returns table (at_ms double precision, leader boolean, number bigint, memory jsonb,
               work jsonb, workers jsonb) language sql as $$
  with alive as materialized (
    select p.* from siding.processes p
    where p.role = 'worker' and p.pool = pool_name
      and p.seen_at > now() - silent_s * interval '1 second'
  ),
  here as materialized (
    select p.boot_id from siding.processes p where p.role = 'worker' and p.pool = pool_name
  ),
  lines as materialized (
    select j.queue, j.kind,
      count(*) filter (where j.status <> 'running') as queued,
      count(*) filter (where j.status = 'running') as running,
      count(*) filter (where j.status = 'running' and h.boot_id is not null) as running_here,
      extract(epoch from now() - min(j.due_at) filter (where j.status <> 'running')) as oldest_wait_s
    from (
      select queue, kind, status, due_at, worker_id from siding.jobs where status = 'queued'
      union all
      select queue, kind, status, due_at, worker_id from siding.jobs
        where status = 'scheduled' and due_at <= now()
      union all
      select queue, kind, status, due_at, worker_id from siding.jobs where status = 'running'
    ) j
    left join here h on h.boot_id = j.worker_id
    group by j.queue, j.kind
  ),
  runs as materialized (
    select r.kind, avg(extract(epoch from r.finished_at - r.claimed_at)) as mean_s from (
      select j.kind, j.finished_at, j.claimed_at from siding.jobs j
      where run_times and j.status in ('done', 'failed', 'cancelled')
      order by j.finished_at desc limit 1000) r
    where r.claimed_at is not null group by r.kind
  ),
  last as materialized (
    select l.number, l.memory from siding.looks l where l.pool = look_pool
    order by l.number desc limit 1
  )
  select
    extract(epoch from now())::float8 * 1000,
    siding.is_leader(controller, silent_s),
    coalesce((select number from last), 0),
    (select memory from last),
    (select coalesce(jsonb_agg(jsonb_build_object('queue', l.queue, 'kind', l.kind,
        'paused', q.paused, 'max_running', q.max_running, 'rate_room', siding.rate_room(q, now()),
        'served', exists (select from alive a where l.kind = any(a.kinds)
                          and (a.queues is null or l.queue = any(a.queues))),
        'queued', l.queued, 'running', l.running, 'running_here', l.running_here,
        'oldest_wait_s', l.oldest_wait_s, 'mean_run_s', r.mean_s)), '[]')
     from lines l join siding.queues q on q.name = l.queue left join runs r on r.kind = l.kind),
    (select jsonb_build_object('reporting', count(*), 'busy', count(*) filter (where a.running > 0),
        'concurrency', coalesce(min(a.concurrency), 1)) from alive a);
$$;

-- What tells whether jobs get done, of one instant and by a bounded number of rows, however many jobs
-- there are. `waiting`: for each queue and kind how long the first has been due, and whether that has a
-- reason of its own (`apart`): its queue is paused, or goes at the pace of its max_running or rate
-- limit, or no worker that reports serves the kind. `waits`: there is something to do for a worker.
create or replace function siding.service_state(silent_s double precision)
returns table (workers integer, waits boolean, waiting jsonb, reviews integer, looks jsonb)
language sql stable as $$
  with recursive alive as materialized (
    select p.queues, p.kinds from siding.processes p
    where p.role = 'worker' and p.seen_at > now() - silent_s * interval '1 second'
  ),
  running as materialized (
    select r.queue from (select queue from siding.jobs where status = 'running' limit 10000) r
    group by r.queue
  ),
  -- In each queue each priority, one after the other: within one the index has the first due first.
  lines as (
    (select q.name as queue, head.priority, 1 as number from siding.queues q
     cross join lateral (
       select j.priority from siding.jobs j where j.queue = q.name and j.status = 'queued'
       order by j.priority desc limit 1) head
     limit 1000)
    union all
    select l.queue, below.priority, l.number + 1 from lines l
    cross join lateral (
      select j.priority from siding.jobs j
      where j.queue = l.queue and j.status = 'queued' and j.priority < l.priority
      order by j.priority desc limit 1) below
    where l.number < 100
  ),
  due as materialized (
    (select l.queue, first.kind, first.due_at from lines l
     cross join lateral (
       select j.kind, j.due_at from siding.jobs j
       where j.queue = l.queue and j.status = 'queued' and j.priority = l.priority
       order by j.due_at limit 1000) first
     limit 20000)
    union all
    (select j.queue, j.kind, j.due_at from siding.jobs j
     where j.status = 'scheduled' and j.due_at <= now() order by j.due_at limit 1000)
  ),
  first as materialized (
    select d.queue, d.kind, q.paused, extract(epoch from now() - min(d.due_at))::float8 as oldest_wait_s,
      case when q.paused then 'paused'
        when q.max_running is not null and exists (select from running r where r.queue = q.name) then 'limited'
        when q.rate_limit is not null and exists (select from siding.starts s where s.queue = q.name
          and s.started_at > now() - greatest(q.rate_period_s, 60) * interval '1 second') then 'limited'
        when not exists (select from alive a where d.kind = any(a.kinds)
                         and (a.queues is null or d.queue = any(a.queues))) then 'not_served' end as apart
    from due d join siding.queues q on q.name = d.queue
    group by d.queue, d.kind, q.name, q.paused, q.max_running, q.rate_limit, q.rate_period_s
  )
  select
    (select count(*)::integer from alive),
    exists (select from first f where not f.paused) or exists (select from running),
    (select coalesce(jsonb_agg(jsonb_build_object('queue', f.queue, 'kind', f.kind, 'apart', f.apart,
        'oldest_wait_s', f.oldest_wait_s) order by f.oldest_wait_s desc), '[]')
     from (select * from first order by apart is not null, oldest_wait_s desc limit 200) f),
    (select count(*)::integer from (select from siding.jobs where status = 'review' limit 1000) r),
    (select coalesce(jsonb_agg(jsonb_build_object('pool', l.pool, 'act', l.act, 'error', l.error,
        'alarms', l.alarms, 'age_s', extract(epoch from now() - l.at)::float8,
        'queue_seen', l.seen -> 'queue' <> 'null', 'railway_seen', l.seen -> 'platform' <> 'null')
        order by l.pool), '[]')
     from siding.last_looks() l);
$$;
