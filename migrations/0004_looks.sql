-- The controllers' looks: what was seen, what was decided and why, and what came of it.
-- oldest code that still runs on this: 1
create table siding.looks (
  -- That of its controllers: of dry runs `<pool>/dry-run`, which never mix with the others.
  pool text not null,
  -- Taken by whoever looks: two controllers that both think they lead cannot have the same one.
  number bigint not null,
  at timestamptz not null default now(),
  controller uuid not null,
  -- What policy.ts was given, and what it left for the next look.
  seen jsonb not null,
  memory jsonb,
  wanted integer,
  code text not null,
  reason text not null,
  alarms text[] not null default '{}',
  -- Whether the platform was told: not due; due, and then written or failed; or only said to be due.
  act text not null constraint act_known check (act in ('none', 'due', 'written', 'failed', 'dry')),
  -- Of the part that could not be seen, or of the write.
  error text,
  primary key (pool, number)
);
create index looks_by_time on siding.looks (at);

-- What a controller sees of the queue and of the workers of its pool, all of it of one instant, and
-- the look before: at_ms (the database's clock), whether it leads, number and memory of the last
-- look, and work and workers as policy.ts has them. With `run_times` also how long the kinds' jobs
-- ran of late. `look_pool` is the pool of the looks.
create function siding.survey(controller uuid, pool_name text, look_pool text,
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
        'paused', q.paused, 'max_running', q.max_running,
        'served', exists (select from alive a where l.kind = any(a.kinds)
                          and (a.queues is null or l.queue = any(a.queues))),
        'queued', l.queued, 'running', l.running, 'running_here', l.running_here,
        'oldest_wait_s', l.oldest_wait_s, 'mean_run_s', r.mean_s)), '[]')
     from lines l join siding.queues q on q.name = l.queue left join runs r on r.kind = l.kind),
    (select jsonb_build_object('reporting', count(*), 'busy', count(*) filter (where a.running > 0),
        'concurrency', coalesce(min(a.concurrency), 1)) from alive a);
$$;
