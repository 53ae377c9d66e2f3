-- Claims, finishes and enqueues for less: what a profile of Postgres showed to be for nothing (docs/scale.md).
-- oldest code that still runs on this: 1

-- For a trigger before an update, whatever its columns and condition, Postgres reads and locks each row once
-- more. These refuse, which is as well done after it.
--
-- The condition is written out, in siding.check_enqueue too: a function would be parsed at each statement. And it
-- is no pattern (`~ '^[a-z0-9_.-]{1,63}$'`): each match builds its automaton anew, which took two microseconds,
-- twice a job, and so a fifth of an enqueue.
drop trigger kind_name on siding.jobs;
create trigger kind_name after insert or update of kind on siding.jobs for each row
  when (translate(new.kind, 'abcdefghijklmnopqrstuvwxyz0123456789_.-', '') <> ''
        or length(new.kind) not between 1 and 63)
  execute function siding.refuse_kind();
drop trigger keep_final on siding.jobs;
create trigger keep_final after update of status on siding.jobs
  for each row when (old.status in ('done', 'failed', 'cancelled') and new.status <> old.status)
  execute function siding.keep_job();
drop trigger keep_price on siding.jobs;
create trigger keep_price after update of price, owner, id on siding.jobs
  for each row when (new.price is distinct from old.price or
                     old.price is not null and (new.owner is distinct from old.owner or new.id <> old.id))
  execute function siding.keep_job();

-- A job leaves three entries here, of which two are dead soon. Room for them, so that a page need not be
-- searched for dead ones at each claim, or split; once split, it is as large.
alter index siding.jobs_pkey set (fillfactor = 40);

-- What must hold before a batch goes in.
create or replace function siding.check_enqueue(jobs jsonb) returns void language plpgsql as $$
declare
  bad text;
begin
  select format('job %s: there is no field %s', j.ord,
      (select key from jsonb_object_keys(j.unknown) key limit 1)) into bad
    from (select e.ord, e.job - '{kind,payload,queue,owner,priority,delay_s,due_at,unique_key,files,price,webhook,trace_parent}'::text[]
            as unknown
          from jsonb_array_elements(jobs) with ordinality as e(job, ord)) j
    where j.unknown <> '{}' limit 1;
  if bad is not null then
    raise exception '%', bad using errcode = 'SD422';
  end if;
  select format('job %s: %s', x.ord, problem) into bad
    from rows from (jsonb_to_recordset(jobs) as (kind text, owner text, unique_key text, payload jsonb,
           files jsonb, price jsonb, webhook text, trace_parent text, due_at timestamptz,
           delay_s double precision))
           with ordinality as x(kind, owner, unique_key, payload, files, price, webhook, trace_parent,
                                due_at, delay_s, ord)
    cross join lateral (select case
      when x.kind is null then 'kind is missing'
      when translate(x.kind, 'abcdefghijklmnopqrstuvwxyz0123456789_.-', '') <> ''
           or length(x.kind) not between 1 and 63 then
        format('kind is "%s": it must be 1 to 63 of a-z, 0-9, ".", "_" and "-"', left(x.kind, 100))
      when length(x.owner) not between 1 and 200 then 'owner is not 1 to 200 characters long'
      when length(x.unique_key) not between 1 and 200 then 'unique_key is not 1 to 200 characters long'
      -- As large as a number of JavaScript's may be and still be what it says.
      when not case when jsonb_typeof(x.price) = 'number' then x.price::numeric % 1 = 0
                      and x.price::numeric between 1 and 9007199254740991
                    else x.price is null end then
        format('price is %s: it must be a whole number from 1 to 9007199254740991',
          left(x.price::text, 100))
      when x.price is not null and x.owner is null then
        format('price is %s and owner is missing: a job with a price is somebody''s', x.price)
      when x.webhook !~ '^https?://' or length(x.webhook) > 2000 then
        format('webhook is "%s": it must be a URL that begins with https:// or http://, at most 2000 long',
          left(x.webhook, 100))
      when length(x.trace_parent) > 100 then 'trace_parent is longer than 100 characters'
      when jsonb_typeof(x.files) <> 'array' then 'files is not a list of ids'
      when x.due_at is not null and x.delay_s is not null then 'due_at and delay_s are both given'
      when not isfinite(x.due_at) then 'due_at is not an instant'
      when x.delay_s not between 0 and 315360000 then 'delay_s is not from 0 to 315360000'
      -- The stored size is a cheap bound for the text, which is only made when it matters.
      when pg_column_size(x.payload) > 16000 and octet_length(x.payload::text) > 1048576
        then 'payload is larger than 1 MiB' end as problem) found
    where problem is not null
    order by x.ord limit 1;
  if bad is not null then
    raise exception '%', bad using errcode = 'SD422';
  end if;

  perform siding.lock_owners(jobs);
end $$;

-- The rows of an enqueue, with the ids drawn for them.
create function siding.rows_of(jobs jsonb, ids bigint[])
returns table (id bigint, queue text, kind text, owner text, payload jsonb, priority integer, unique_key text,
  price numeric, webhook text, trace_parent text, due_at timestamptz, status text) language sql stable as $$
  select ids[x.ord], coalesce(x.queue, 'default'), x.kind, x.owner, coalesce(x.payload, 'null'),
         coalesce(x.priority, 0), x.unique_key, x.price, x.webhook, x.trace_parent, t.due_at,
         case when t.due_at > now() then 'scheduled' else 'queued' end
  from rows from (jsonb_to_recordset(jobs) as (queue text, kind text, owner text, payload jsonb,
         priority integer, unique_key text, price numeric, webhook text, trace_parent text,
         due_at timestamptz, delay_s double precision))
         with ordinality as x(queue, kind, owner, payload, priority, unique_key, price, webhook,
                              trace_parent, due_at, delay_s, ord)
  -- Not before now: an instant in the past would pass those who wait.
  cross join lateral (select greatest(now(), coalesce(x.due_at, now() + coalesce(x.delay_s, 0)
                                      * interval '1 second')) as due_at) t;
$$;

-- Enqueues a JSON array of jobs, each {kind, payload, queue, owner, priority, delay_s or due_at,
-- unique_key, files: a list of ids, price, webhook, trace_parent}; all but the kind may be missing. Returns a row a job, in
-- the order given: its id, and whether it was created or is the unfinished job that has its unique
-- key already. All or nothing. Errors: SD402 too few credits, SD404 no such queue, SD410 no such
-- file, SD422 malformed, SD429 over a limit of the queue.
create or replace function siding.enqueue(jobs jsonb)
returns table (ord integer, id bigint, created boolean) language plpgsql
-- Planned once: for one job, planning was half of the time.
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  ids_of regclass := pg_get_serial_sequence('siding.jobs', 'id');
  -- Drawn first: an insert's "returning" could not say which row came from which input.
  drawn bigint[] := array(select nextval(ids_of) from generate_series(1, jsonb_array_length(jobs)));
  ids bigint[];
  fresh bigint[];
begin
  perform siding.check_enqueue(jobs);
  -- Without keys there is nothing to undo: a subtransaction costs more than a job.
  if not jsonb_path_exists(jobs, '$[*].unique_key') then
    ids := drawn;
    fresh := drawn;
    -- Without "on conflict", which writes each row in two steps, and in no order: both cost a fifth of it.
    insert into siding.jobs
        (id, queue, kind, owner, payload, priority, unique_key, price, webhook, trace_parent, due_at, status)
      select r.* from siding.rows_of(jobs, drawn) r;
  else
    -- Each round inserts what has no holder and looks up the holder of the rest. A key has neither
    -- when its holder finished between the two; then the round is undone and repeated, a bounded
    -- number of times. Undone, since to go back to an earlier key while holding a later one is how
    -- two batches deadlock (seen: within seconds, where holders come and go).
    for round in 1..10 loop
      begin
        fresh := siding.insert_jobs(jobs, drawn);
        ids := drawn;
        exit when cardinality(fresh) = cardinality(drawn);

        -- The holder of a key that is new is the new job. Each by itself: a join may be planned as a
        -- scan of all keys there are.
        select array_agg(case when x.unique_key is null then drawn[x.ord] else
            (select holder.id from siding.jobs holder
             where holder.kind = x.kind and holder.unique_key = x.unique_key
               and holder.status in ('scheduled', 'queued', 'running', 'review')) end order by x.ord) into ids
          from rows from (jsonb_to_recordset(jobs) as (kind text, unique_key text))
            with ordinality as x(kind, unique_key, ord);
        exit when array_position(ids, null) is null;
        raise exception 'unique_key "%" was taken and freed % times in a row',
          jobs -> (array_position(ids, null) - 1) ->> 'unique_key', round using errcode = 'SD409';
      exception when sqlstate 'SD409' then
        if round = 10 then
          raise;
        end if;
      end;
    end loop;
  end if;

  perform siding.attach_files(jobs, ids, fresh);
  perform siding.check_limits(jobs, fresh);
  return query select u.ord::integer, u.id, u.id = drawn[u.ord]
               from unnest(ids) with ordinality as u(id, ord) order by u.ord;
end $$;

-- Inserts the jobs of an enqueue, with the ids drawn for them, but those whose key an unfinished job has.
-- Returns the ids of those it inserted.
create or replace function siding.insert_jobs(jobs jsonb, ids bigint[]) returns bigint[] language plpgsql as $$
declare
  fresh bigint[];
begin
  with inserted as (
    insert into siding.jobs
      (id, queue, kind, owner, payload, priority, unique_key, price, webhook, trace_parent, due_at, status)
    select r.* from siding.rows_of(jobs, ids) r
    -- In order of key: two batches that take the same keys in turns would deadlock.
    order by r.kind, r.unique_key, r.id
    -- Waits for a holder that is not committed yet; a second of the same key in this batch yields.
    on conflict (kind, unique_key)
      where unique_key is not null and status in ('scheduled', 'queued', 'running', 'review')
      do nothing
    returning id
  )
  select coalesce(array_agg(id), '{}') into fresh from inserted;
  return fresh;
end $$;

-- Ends attempts of one worker as done, whose jobs wrote no files and bring no others: what siding.settle
-- does for these, at a third of what that costs. `results` is a JSON object, by id, of those that are not null.
-- Returns the ids of those that stand by it. Another may be lost, or have been done by a call whose reply
-- was lost: siding.settle tells.
-- Waits for a locked row no longer than `wait_ms`, and is refused (55P03) then: the others are not to wait
-- for it. Nothing is locked in order first: no two calls are about the same job.
--
-- Planned once, since that costs more than to finish ten jobs; and never as anything else than here: each
-- found by its key, whatever the statistics say, and updated from there. Else it was planned as a scan of all
-- jobs while these were few, and so read a million later on. That it has a lease is to say that it is running:
-- in that word the index of the running ones would serve, whose entries of jobs that ran before are many.
create or replace function siding.finish(worker uuid, ids bigint[], attempts integer[], results jsonb, wait_ms integer)
returns setof bigint language plpgsql
set lock_timeout = '50ms' set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
begin
  perform set_config('lock_timeout', wait_ms::text, true); -- until this returns, by the line above
  return query
    update siding.jobs j set status = 'done', result = nullif(results -> j.id::text, 'null'), error = null,
      progress = 1, alone = false, lease_until = null, finished_at = now()
    from unnest(ids, attempts) as o(id, attempt)
    where j.id = o.id and j.attempt = o.attempt and j.worker_id = worker and j.lease_until is not null
    returning j.id;
end $$;

-- Ends attempts: a JSON array of {id, attempt, outcome, …} of one worker, whatever the outcomes:
--   done       with result and next, a list of jobs to enqueue, for the same owner unless they name another
--   failed     with error; delay_s retries the job after so many seconds, null fails it for good;
--              unsent: the paid service refused it, so it was not charged
--   snoozed    with delay_s: put off at its own wish, which counts as no failure
--   released   with error: its worker stops; it goes back in line and keeps its place, at most
--              max_releases times, so that deploys in a row cannot run a long job for ever;
--              unbegun: it did not begin to run, which is not counted
--   cancelled  as somebody asked
--   review     with error: whether a paid service has it is not known
-- A job that was asked to be cancelled meanwhile is not run again, and what may have been sent
-- waits for a person instead of being sent again.
-- Waits for a locked row for `wait_ms`. Returns the ids whose outcome stands, also those where it had landed
-- before and only the reply was lost. The others are no longer the worker's, which has lost them.
create or replace function siding.settle(worker uuid, outcomes jsonb, max_releases integer default 5,
                              wait_ms integer default 500)
returns setof bigint language plpgsql
set lock_timeout = '500ms' as $$
declare
  mine jsonb;
  settled bigint[];
  finished bigint[];
  next_jobs jsonb;
begin
  perform set_config('lock_timeout', wait_ms::text, true);
  -- First the owners' locks, then the jobs' rows: an enqueue takes them in this order too.
  if jsonb_path_exists(outcomes, '$[*].next[*]') then
    perform siding.lock_owners(siding.next_of(outcomes,
      array(select o.id from jsonb_to_recordset(outcomes) as o(id bigint))));
  end if;
  -- Locked by a statement of its own: a heartbeat may just have made a new version of a row, and the next one
  -- sees that.
  mine := (select coalesce(jsonb_agg(m), '[]') from (
    select j.id, j.tid::text, o.outcome, o.result, o.error, o.delay_s, coalesce(o.unsent, false) as unsent,
      coalesce(o.unbegun, false) as unbegun, case
        when o.outcome = 'done' then o.outcome
        when j.sent_at is not null and j.request_id is null and not coalesce(o.unsent, false) then 'review'
        -- Its id has come meanwhile, from which it goes on, whatever this attempt knows.
        when j.request_id is not null and (o.outcome = 'review' or coalesce(o.unsent, false)) then 'queued'
        when o.outcome = 'review' then 'failed' -- it was never sent
        when o.outcome = 'cancelled' then o.outcome
        when o.outcome = 'failed' and o.delay_s is null then 'failed'
        when j.cancel_requested_at is not null and j.request_id is null then 'cancelled'
        when o.outcome <> 'released' then 'scheduled'
        when j.releases < max_releases or j.request_id is not null or coalesce(o.unbegun, false) then 'queued'
        else 'failed' end as status
    from (select * from jsonb_to_recordset(outcomes) as r(id bigint, attempt integer,
            outcome text, result jsonb, error text, delay_s double precision, unsent boolean, unbegun boolean)
          order by r.id) o -- as every statement that locks several jobs does, so that none deadlock
    -- Each by its key, whatever the statistics say. A running job is told by its lease: by its status the
    -- index of the running ones would be read instead, with what is dead in it, once for each outcome.
    cross join lateral (
      select j.*, j.ctid as tid from siding.jobs j
      where j.id = o.id and j.attempt = o.attempt and j.worker_id = worker and j.lease_until is not null
      for update) j) m);
  with ended as (
    update siding.jobs j set
      status = m.status,
      result = m.result,
      error = case
        when m.status in ('done', 'cancelled') then null
        when m.unbegun then j.error
        when m.status = 'failed' and m.outcome = 'released' then
          left(format('given back %s times, the last since %s', j.releases + 1, m.error), 2000)
        else m.error end,
      progress = case when m.status = 'done' then 1 else j.progress end,
      due_at = case when m.status = 'scheduled' then now() + m.delay_s * interval '1 second' else j.due_at end,
      failures = j.failures + (m.outcome = 'failed')::integer,
      snoozes = j.snoozes + (m.outcome = 'snoozed')::integer,
      releases = j.releases + (m.outcome = 'released' and not m.unbegun)::integer,
      sent_at = case when m.unsent and j.request_id is null then null else j.sent_at end,
      alone = j.alone and m.outcome = 'released',
      lease_until = null,
      -- A final row keeps who had it, so that a repeated write can tell that it had landed.
      worker_id = case when m.status in ('done', 'failed', 'cancelled') then worker end,
      claim_token = case when m.status in ('done', 'failed', 'cancelled') then j.claim_token end,
      finished_at = case when m.status in ('done', 'failed', 'cancelled') then now() end
    -- Where they lie, and not by an index of ids, see siding.finish.
    from jsonb_to_recordset(mine) as m(id bigint, outcome text, result jsonb, error text,
      delay_s double precision, unsent boolean, unbegun boolean, status text)
    where j.ctid = any(array(select (m ->> 'tid')::tid from jsonb_array_elements(mine) m)) and j.id + 0 = m.id
    returning j.id, j.status
  )
  select array_agg(id), array_agg(id) filter (where status = 'done') into settled, finished from ended;

  if finished is not null then
    update siding.files f set kept = true
      from jsonb_to_recordset(outcomes) as o(id bigint, attempt integer)
      where f.job_id = o.id and f.attempt = o.attempt and f.complete and o.id = any(finished);
    next_jobs := siding.next_of(outcomes, finished);
    if next_jobs is not null then
      perform siding.enqueue(next_jobs);
    end if;
  end if;

  return query select unnest(settled);
  if coalesce(cardinality(settled), 0) = jsonb_array_length(outcomes) then
    return;
  end if;
  -- Those of which only the reply was lost. By their keys, as above: else all that ever finished is read.
  return query
    select j.id from jsonb_to_recordset(outcomes) as o(id bigint, attempt integer, outcome text)
    cross join lateral (select * from siding.jobs j where j.id = o.id offset 0) j
    where j.attempt = o.attempt and j.status = o.outcome and j.worker_id = worker
      and j.finished_at is not null and j.id <> all(coalesce(settled, '{}'));
end $$;

-- The instant by which a job stands in line, in microseconds since 1970, which a number of JavaScript's holds
-- exactly. Never later than now: what a raw insert set to a later one, or to infinity, is not to be passed over.
create function siding.place_us(due_at timestamptz) returns bigint language sql stable as $$
  select (date_part('epoch', least(greatest(due_at, timestamptz 'epoch'), now())) * 1000000)::bigint;
$$;

-- Whether anything is due, without a lock and without a mark: the queues that may be claimed from
-- now, a JSON array of {queue, claim, alone: its next job is to run alone, head: where that stands in
-- line}, the one with the next job in line first; whether a scheduled job has fallen due; and in how many milliseconds a queue that its
-- rate limit holds back has room, null when none is held. `queues` null is all.
create or replace function siding.look(queues text[], kinds text[], out ready jsonb, out promotable boolean,
                            out opens_ms double precision)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set jit = off as $$
  select
    coalesce(jsonb_agg(jsonb_build_object('queue', q.name, 'claim', q.claim, 'alone', case when q.fair then
          coalesce((siding.next_turn(q.name, kinds, true, (select t.turn from siding.turns t
                      where t.queue = q.name))).alone,
            (siding.next_turn(q.name, kinds, true, '')).alone, head.alone)
        else head.alone end,
        -- due_at is for code before this migration.
        'head', jsonb_build_object('priority', head.priority, 'due_us', siding.place_us(head.due_at),
                                   'due_at', head.due_at, 'id', head.id::text))
      order by head.priority desc, head.due_at, head.id) filter (where may.start > 0), '[]'),
    -- The first of them, by their index: "exists" was planned as a scan of all jobs where many are scheduled.
    coalesce((select j.due_at <= now() from siding.jobs j where j.status = 'scheduled'
              order by j.due_at limit 1), false),
    min(siding.opens_ms(q, now())) filter (where may.start = 0 and q.rate_limit is not null)
  from siding.queues q
  cross join lateral (
    select j.priority, j.due_at, j.id, j.alone from siding.jobs j
    where j.queue = q.name and j.status = 'queued' and j.kind = any(kinds)
    order by j.priority desc, j.due_at, j.id limit 1) head
  cross join lateral (
    select case when q.max_running is null and q.rate_limit is null then 1
                else siding.room(q, 1, now()) end as start) may
  where not q.paused and (queues is null or q.name = any(queues));
$$;

-- The claim of a queue with the claim setting `skip_locked`, and in the same round trip the finish of what
-- the worker has done meanwhile (`done`, as the arguments of siding.finish; null is nothing). `stand`: the ids
-- of those that stand by it, null where all do.
--
-- Rows are found, locked and passed over where others hold them, in the order of the partial index, whose
-- condition is here word for word; and updated by where they lie: so the plan is the same whatever the
-- statistics say, fresh or stale, and is made once. A row that was changed between the two is left in line.
-- They come back in no order, which the worker puts them into for less. Instants are microseconds since 1970.
--
-- `mark`, where given, is a place in line before which nothing is looked for, though not for long: the
-- entries of jobs claimed before are still in the index, as long as any transaction is older than their
-- claim, and to pass over them costs more than the claim itself (see docs/scale.md). Jobs of less priority
-- than the mark's come after it. Whoever has a mark must look without one at least every second, and at
-- once when this finds fewer than `most`.
--
-- `idle`: the worker runs nothing, and the next in line is to run alone (`lone`): it is taken by itself.
--
-- siding.claim_skip_locked is what code before this migration calls for it.
create function siding.exchange(queue_name text, kinds text[], most integer, worker uuid, token uuid,
  lease_s double precision, lone boolean, mark_priority integer, mark_due_us bigint, mark_id bigint,
  done_ids bigint[], done_attempts integer[], done_results jsonb, wait_ms integer,
  out stand json, out claimed_us double precision, out jobs json)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off set jit = off as $$
declare
  finished bigint[];
  tids tid[];
  mark_due_at timestamptz := timestamptz 'epoch' + mark_due_us * interval '1 microsecond';
begin
  if done_ids is not null then
    finished := array(select siding.finish(worker, done_ids, done_attempts, done_results, wait_ms));
    if cardinality(finished) < cardinality(done_ids) then
      stand := to_json(finished::text[]);
    end if;
  end if;
  perform from siding.queues q where q.name = queue_name and q.claim = 'skip_locked' and not q.paused;
  if not found or most < 1 then
    return;
  end if;
  if lone then
    tids := array(select j.ctid from siding.jobs j
      where j.queue = queue_name and j.status = 'queued' and j.kind = any(kinds) and j.alone
      order by j.priority desc, j.due_at, j.id limit 1 for update skip locked);
  elsif mark_id is null then
    tids := array(select j.ctid from siding.jobs j
      where j.queue = queue_name and j.status = 'queued' and j.kind = any(kinds) and not j.alone
      order by j.priority desc, j.due_at, j.id limit most for update skip locked);
  else
    tids := array(select j.ctid from siding.jobs j
      where j.queue = queue_name and j.status = 'queued' and j.kind = any(kinds) and not j.alone
        and j.priority = mark_priority and (j.due_at, j.id) >= (mark_due_at, mark_id)
      order by j.priority desc, j.due_at, j.id limit most for update skip locked);
    if cardinality(tids) < most then
      tids := tids || array(select j.ctid from siding.jobs j
        where j.queue = queue_name and j.status = 'queued' and j.kind = any(kinds) and not j.alone
          and j.priority < mark_priority
        order by j.priority desc, j.due_at, j.id limit most - cardinality(tids) for update skip locked);
    end if;
  end if;
  with taken as (
    update siding.jobs j set status = 'running', worker_id = worker, claim_token = token,
      attempt = j.attempt + 1, claimed_at = now(), lease_until = now() + lease_s * interval '1 second',
      stage = null, progress = null
    where j.ctid = any(tids) -- which are locked, and so still in line
    returning j.id::text as id, j.kind, j.attempt, j.payload,
      siding.place_us(j.due_at) as due_us,
      -- Most jobs have none of these, and to write them all would be a tenth of the claim.
      case when num_nonnulls(j.owner, j.price, j.trace_parent, j.request_key) > 0 or j.priority <> 0 or j.alone
             or j.failures + j.crashes + j.releases + j.snoozes > 0 then
        json_build_object('owner', j.owner, 'price', j.price::text, 'priority', j.priority,
          'failures', j.failures, 'crashes', j.crashes, 'releases', j.releases, 'snoozes', j.snoozes,
          'alone', j.alone, 'trace_parent', j.trace_parent, 'request_key', j.request_key,
          'request_id', j.request_id) end as more
  )
  select date_part('epoch', now()) * 1000000, json_agg(t) from taken t
  into exchange.claimed_us, exchange.jobs;
end $$;
