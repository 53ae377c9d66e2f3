-- Queues whose owners take turns, and queues that start so many jobs in so long, for services outside.
-- Both need claims in order. Queues that are neither pay nothing for it: `turn` is null in their
-- jobs, which are in no index of this.
-- oldest code that still runs on this: 1

alter table siding.queues
  -- Owners take turns: see siding.take_in_turns.
  add column fair boolean not null default false
    constraint fair_needs_order check (not fair or claim <> 'skip_locked'),
  -- Never more than so many starts within so long: see siding.rate_room.
  add column rate_limit integer constraint rate_limit_positive check (rate_limit > 0),
  add column rate_period_s double precision
    constraint rate_period_s_from_a_millisecond_to_31_days check (rate_period_s between 0.001 and 2678400),
  add constraint rate_limit_with_period check ((rate_limit is null) = (rate_period_s is null)),
  add constraint rate_limit_needs_order check (rate_limit is null or claim <> 'skip_locked');

-- Whose turn a job in a fair queue is: '/' and its owner, '/' alone for those without; null elsewhere.
alter table siding.jobs add column turn text;
create index jobs_in_turns on siding.jobs (queue, turn, priority desc, due_at, id)
  where status = 'queued' and turn is not null;

-- Where the turns stand: who was last. Not in the queue's row, which every claim and look reads: old
-- versions that somebody's transaction keeps there would cost them all.
create table siding.turns (
  queue text primary key,
  turn text not null
);

-- The starts of queues with a rate limit, a row a claim; those within the period, and a few older.
create table siding.starts (
  queue text not null,
  started_at timestamptz not null,
  -- Of all claims up to this one, so that the starts since an instant are a difference of two rows.
  total bigint not null,
  jobs integer not null,
  primary key (queue, started_at, total)
);

-- Puts the jobs of a queue that becomes fair, or no longer is, into turns or out of them. By a trigger,
-- so that it is done however the setting is changed. The lock waits for the enqueues under way, which
-- do not know of it, and lets no other begin: about 2 s for 100,000 waiting jobs.
create function siding.change_turns() returns trigger language plpgsql
-- Whoever comes after a waiting lock waits behind it. More than 1 s, in which an autovacuum yields.
set lock_timeout = '3s' as $$
declare
  state text;
begin
  lock table siding.jobs in share row exclusive mode;
  -- Each state by its own partial index: finished jobs are not read.
  foreach state in array array['scheduled', 'queued', 'running', 'review'] loop
    execute format('update siding.jobs j set turn = case when $2 then ''/'' || coalesce(j.owner, '''') end
      where j.queue = $1 and j.status = %L and (j.turn is not null) <> $2', state)
      using new.name, new.fair;
  end loop;
  return null;
end $$;
create trigger change_turns after update of fair on siding.queues
  for each row when (old.fair <> new.fair) execute function siding.change_turns();

-- Creates a queue, or changes those of its settings that the JSON object names; null lifts a limit.
-- With a max_running, a rate_limit or fair, a queue that skips locks changes to claims in turns.
create or replace function siding.set_queue(queue text, settings jsonb) returns void language plpgsql as $$
declare
  unknown text := (select string_agg(k, ', ') from jsonb_object_keys(settings) k
    where k not in ('paused', 'claim', 'fair', 'max_running', 'max_waiting', 'max_per_owner',
                    'rate_limit', 'rate_period_s'));
begin
  if unknown is not null then
    raise exception 'a queue has no setting %', unknown using errcode = 'SD422';
  end if;
  insert into siding.queues (name) values (queue) on conflict do nothing;
  update siding.queues q set
    paused = coalesce((settings ->> 'paused')::boolean, q.paused),
    fair = coalesce((settings ->> 'fair')::boolean, q.fair),
    claim = coalesce(settings ->> 'claim', case
      when q.claim = 'skip_locked' and (settings ->> 'max_running' is not null
        or settings ->> 'rate_limit' is not null or (settings ->> 'fair')::boolean) then 'lock'
      else q.claim end),
    max_running = case when settings ? 'max_running'
      then (settings ->> 'max_running')::integer else q.max_running end,
    max_waiting = case when settings ? 'max_waiting'
      then (settings ->> 'max_waiting')::integer else q.max_waiting end,
    max_per_owner = case when settings ? 'max_per_owner'
      then (settings ->> 'max_per_owner')::integer else q.max_per_owner end,
    rate_limit = case when settings ? 'rate_limit'
      then (settings ->> 'rate_limit')::integer else q.rate_limit end,
    rate_period_s = case when settings ? 'rate_period_s'
      then (settings ->> 'rate_period_s')::double precision else q.rate_period_s end
  where q.name = queue;
end $$;

-- Refuses a batch that went over a limit; its rows go with the error. Counting after the insert
-- leaves out what a unique key turned away, and sees the whole batch. Gives the jobs of fair queues
-- their turns, in the one look at the queues' settings that there is, so that others pay nothing.
create or replace function siding.check_limits(jobs jsonb, fresh bigint[]) returns void language plpgsql as $$
declare
  target record;
  waiting bigint;
begin
  for target in
    select distinct q.* from siding.queues q
    where (q.max_waiting is not null or q.max_per_owner is not null or q.fair)
      and q.name in (select coalesce(r.queue, 'default')
                     from jsonb_to_recordset(jobs) as r(queue text))
      and exists (select from siding.jobs j where j.id = any(fresh) and j.queue = q.name)
  loop
    if target.fair then
      update siding.jobs j set turn = '/' || coalesce(j.owner, '')
        where j.id = any(fresh) and j.queue = target.name;
      continue when target.max_waiting is null and target.max_per_owner is null;
    end if;
    -- Approximate: batches under way are not seen. Exact would make all enqueues take turns.
    select count(*) into waiting from (
      (select from siding.jobs j where target.max_waiting is not null and j.queue = target.name
         and j.status = 'queued' limit target.max_waiting + 1)
      union all
      (select from siding.jobs j where target.max_waiting is not null and j.queue = target.name
         and j.status = 'scheduled' limit target.max_waiting + 1)) bounded;
    if waiting > target.max_waiting then
      raise exception 'queue "%" is full: its max_waiting is %', target.name, target.max_waiting
        using errcode = 'SD429';
    end if;
    -- Exact: check_enqueue holds the lock of each of these owners until commit.
    declare
      over_limit record;
    begin
      -- Counted for each owner by itself: as a join it was planned as all that is in the queue.
      select o.owner, n.unfinished into over_limit
        from (select distinct f.owner from
                -- By their ids: `offset 0` and no word of the owner rule out the index of the owners.
                (select j.owner from siding.jobs j where j.id = any(fresh) and j.queue = target.name offset 0) f
              where f.owner is not null) o
        cross join lateral (select count(*) as unfinished from siding.jobs j
          where j.queue = target.name and j.owner = o.owner
            and j.status in ('scheduled', 'queued', 'running', 'review')) n
        where target.max_per_owner is not null and n.unfinished > target.max_per_owner limit 1;
      if found then
        raise exception 'owner "%" would have % unfinished jobs in queue "%": its max_per_owner is %',
          over_limit.owner, over_limit.unfinished, target.name, target.max_per_owner
          using errcode = 'SD429';
      end if;
    end;
  end loop;
end $$;

drop function if exists
  siding.room(siding.queues, integer),
  siding.take(text, text[], integer, uuid, uuid, double precision, boolean),
  siding.look(text[], text[]);

-- How many more jobs a queue may start at the instant `at` under its rate limit; null: it has none.
-- A sliding window: no period of rate_period_s, wherever it begins, has more than rate_limit starts.
-- (A bucket of tokens would let nearly twice as many through within one.) Two rows are read, however
-- many starts there were. What is later than a period from now is of a clock that was set back.
create function siding.rate_room(q siding.queues, at timestamptz) returns bigint language sql stable as $$
  select q.rate_limit - coalesce(
    (select s.total from siding.starts s where s.queue = q.name
       and s.started_at between at - w.period and at + w.period
     order by s.started_at desc, s.total desc limit 1) -
    (select s.total - s.jobs from siding.starts s where s.queue = q.name
       and s.started_at between at - w.period and at + w.period
     order by s.started_at, s.total limit 1), 0)
  from (select q.rate_period_s * interval '1 second' as period) w;
$$;

-- How many of `most` jobs may start at the instant `at`, under the queue's max_running and rate limit.
create function siding.room(q siding.queues, most integer, at timestamptz)
returns integer language sql stable as $$
  select greatest(0, least(most,
    case when q.max_running is not null then q.max_running - (
      select count(*) from siding.jobs j where j.status = 'running' and j.queue = q.name) end,
    case when q.rate_limit is not null then siding.rate_room(q, at) end));
$$;

-- Milliseconds until the first start leaves the period of a queue that has no room under its rate
-- limit; null when it has.
create function siding.opens_ms(q siding.queues, at timestamptz)
returns double precision language sql stable as $$
  select 1 + extract(epoch from s.started_at + q.rate_period_s * interval '1 second' - at)::float8 * 1000
  from siding.starts s
  where s.queue = q.name and s.started_at >= at - q.rate_period_s * interval '1 second'
    and siding.rate_room(q, at) <= 0
  order by s.started_at, s.total limit 1;
$$;

-- Whose turn is next after `last`, by what this worker may claim, and whether that job is to run
-- alone; null: nobody's before the turns begin again, for which `last` is ''.
create function siding.next_turn(queue_name text, kinds text[], idle boolean, last text,
                                 out turn text, out alone boolean) language sql stable as $$
  select j.turn, j.alone from siding.jobs j
  where j.queue = queue_name and j.status = 'queued' and j.turn > last and j.kind = any(kinds)
    and (idle or not j.alone)
  order by j.turn, j.priority desc, j.due_at, j.id limit 1;
$$;

-- The claim of a queue with the claim setting `lock`: claims take turns with each other and with
-- whatever else takes the queue's lock. The lock and the update are two statements, because an
-- update that takes the lock itself has a snapshot older than the lock and comes back empty; they
-- are one function, because a client frozen between two round trips would hold the lock for all.
create or replace function siding.claim_lock(queue_name text, kinds text[], most integer,
                                             worker uuid, token uuid, lease_s double precision,
                                             idle boolean default true)
returns setof siding.jobs language plpgsql
-- Bounded here as well as by the client, which gives up on a reply without the server hearing of
-- it: the session would wait on, one more at each try, and claim for nobody in the end. Short,
-- since a worker that waits here claims from no other queue.
set lock_timeout = '1s' as $$
declare
  q siding.queues;
begin
  perform siding.need_read_committed(queue_name);
  perform siding.lock_queue(queue_name);
  select one.* into q from siding.queues one
    where one.name = queue_name and one.claim = 'lock' and not one.paused;
  return query select * from siding.take(q, kinds, most, worker, token, lease_s, idle);
end $$;

-- The claim of a queue with the claim setting `repeatable_read`: called as the second statement of
-- `set transaction isolation level repeatable read; select …`, retried on 40001.
-- Moving the queue's row makes two claims always conflict: without it two claims of different rows
-- both commit, and one more runs than may (a higher-priority job arrives between their snapshots).
create or replace function siding.claim_repeatable_read(queue_name text, kinds text[], most integer,
                                                        worker uuid, token uuid, lease_s double precision,
                                                        idle boolean default true)
returns setof siding.jobs language plpgsql
set lock_timeout = '1s' as $$
declare
  q siding.queues;
begin
  if current_setting('transaction_isolation') <> 'repeatable read' then
    raise exception 'queue "%" is claimed at REPEATABLE READ, not %', queue_name,
      upper(current_setting('transaction_isolation')) using errcode = 'SD409';
  end if;
  update siding.queues one set claims = one.claims + 1
    where one.name = queue_name and one.claim = 'repeatable_read' and not one.paused
    returning one.* into q;
  return query select * from siding.take(q, kinds, most, worker, token, lease_s, idle);
end $$;

-- Takes the next jobs of a queue, as far as it has room, for a claim that holds what orders it; a queue
-- that is all null has none. `idle`: the worker runs nothing. Only then it may have a job that is to
-- run alone, and that one by itself.
create function siding.take(q siding.queues, kinds text[], most integer,
                            worker uuid, token uuid, lease_s double precision, idle boolean)
returns setof siding.jobs language plpgsql as $$
declare
  -- Not now(), when this claim began to wait for its order: another, which began later, may have
  -- started its jobs meanwhile.
  at timestamptz := clock_timestamp();
  period interval := q.rate_period_s * interval '1 second';
  room integer;
  taken integer;
begin
  if q.name is null then
    return;
  end if;
  if q.rate_limit is not null then
    delete from siding.starts s where s.queue = q.name and s.started_at < at - period;
    -- The clock was set back: when these were is not known any more, so that they count from now.
    update siding.starts s set started_at = at where s.queue = q.name and s.started_at > at;
  end if;
  room := siding.room(q, most, at);
  if q.fair then
    return query select * from siding.take_in_turns(q.name, kinds, room, worker, token, at, lease_s, idle);
    get diagnostics taken = row_count;
  end if;
  -- Jobs that were not put in by siding.enqueue have no turn, and come when nobody has one.
  if coalesce(taken, 0) = 0 then
    return query select * from siding.take_in_line(q.name, kinds, room, worker, token, at, lease_s, idle);
    get diagnostics taken = row_count;
  end if;
  if q.rate_limit is not null and taken > 0 then
    insert into siding.starts (queue, started_at, jobs, total)
      values (q.name, at, taken, taken + coalesce((select s.total from siding.starts s
        where s.queue = q.name order by s.started_at desc, s.total desc limit 1), 0));
  end if;
end $$;

-- Takes the next jobs in line: by priority, due time, id.
create function siding.take_in_line(queue_name text, kinds text[], most integer, worker uuid, token uuid,
                                    at timestamptz, lease_s double precision, idle boolean)
returns setof siding.jobs language sql as $$
  with next as materialized (
    select j.id, j.alone from siding.jobs j
    where j.queue = queue_name and j.status = 'queued' and j.kind = any(kinds)
      and (idle or not j.alone)
    order by j.priority desc, j.due_at, j.id
    limit most
    for update skip locked -- no other claim holds a row here, but a cancel under way may
  ),
  first as (select next.id, next.alone from next limit 1)
  update siding.jobs j set status = 'running', worker_id = worker, claim_token = token,
    attempt = j.attempt + 1, claimed_at = at, lease_until = at + lease_s * interval '1 second',
    stage = null, progress = null
  from next, first
  where j.id = next.id and case when first.alone then next.id = first.id else not next.alone end
  returning j.*;
$$;

-- Takes the next jobs by turns: one of each owner, in order of owner, from the one after the last
-- claim's last, round and round; of each owner by priority, due time, id. So a job waits for at most
-- one of each other owner for each of its own owner's that is before it, whatever their priorities.
-- The owners are found each from the one before in the index, so that nobody's line is read; when they
-- are fewer than `most` each gives as many as its share of it, and the claim may come back short.
-- A job that is to run alone ends the claim before it, and so is the first of the next one.
create function siding.take_in_turns(queue_name text, kinds text[], most integer, worker uuid, token uuid,
                                     at timestamptz, lease_s double precision, idle boolean)
returns setof siding.jobs language plpgsql as $$
declare
  last text := coalesce((select t.turn from siding.turns t where t.queue = queue_name), '');
  found_turn text := last;
  round_again boolean := last = '';
  turns text[] := '{}';
begin
  while cardinality(turns) < most loop
    found_turn := (siding.next_turn(queue_name, kinds, idle, found_turn)).turn;
    exit when round_again and (found_turn is null or last <> '' and found_turn > last);
    if found_turn is null then
      round_again := true;
      found_turn := '';
    else
      turns := turns || found_turn;
    end if;
  end loop;
  if turns = '{}' then
    return;
  end if;

  return query
    with line as materialized (
      select p.id, p.alone, o.turn, row_number() over (order by p.round, o.ord) as place
      from unnest(turns) with ordinality as o(turn, ord)
      cross join lateral (
        select own.id, own.alone,
          row_number() over (order by own.priority desc, own.due_at, own.id) as round
        from (
          select j.id, j.alone, j.priority, j.due_at from siding.jobs j
          where j.queue = queue_name and j.status = 'queued' and j.turn = o.turn and j.kind = any(kinds)
            and (idle or not j.alone)
          order by j.priority desc, j.due_at, j.id
          limit ceil(most::numeric / cardinality(turns))
          for update skip locked) own
      ) p
    ),
    next as materialized (
      select l.* from line l where l.place <= most
        and (l.place = 1 or l.place < coalesce((select min(a.place) from line a where a.alone), l.place + 1))
    ),
    moved as (
      insert into siding.turns (queue, turn)
        select queue_name, n.turn from next n order by n.place desc limit 1
      on conflict (queue) do update set turn = excluded.turn
    )
    update siding.jobs j set status = 'running', worker_id = worker, claim_token = token,
      attempt = j.attempt + 1, claimed_at = at, lease_until = at + lease_s * interval '1 second',
      stage = null, progress = null
    from next where j.id = next.id
    returning j.*;
end $$;
