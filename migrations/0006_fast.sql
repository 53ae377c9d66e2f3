-- Many small jobs: what each of them costs, taken out where it could be.
-- oldest code that still runs on this: 1

-- A check is made again at every update of a row, and this one's pattern was a tenth of what a claim and
-- its finish cost. So it is made when a kind is written, and not at each claim.
alter table siding.jobs drop constraint kind_name;
create function siding.refuse_kind() returns trigger language plpgsql as $$
begin
  raise exception 'kind is "%": it must be 1 to 63 of a-z, 0-9, ".", "_" and "-"', left(new.kind, 100)
    using errcode = '23514', constraint = 'kind_name';
end $$;
create trigger kind_name before insert or update of kind on siding.jobs for each row
  when (new.kind !~ '^[a-z0-9_.-]{1,63}$') execute function siding.refuse_kind();

-- A job leaves two dead rows behind, its waiting and its running self. By default a fifth of the table must be
-- dead before it is vacuumed, which among many finished jobs is hours of work, all of it in the way of claims
-- that look from the start; and the statistics are as old.
alter table siding.jobs set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
  autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 1000);
-- A few rows that are updated all the time: small, or else each look at them reads what they were.
alter table siding.processes set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table siding.queues set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- At the end of a job only, which always sets this column, and not at its claim too.
drop trigger end_reservation on siding.jobs;
create trigger end_reservation after update of finished_at on siding.jobs
  for each row when (new.price is not null and old.status <> new.status
                     and new.status in ('done', 'failed', 'cancelled'))
  execute function siding.end_reservation();
drop trigger tell on siding.jobs;
create trigger tell after update of finished_at on siding.jobs for each row
  when (new.webhook is not null and old.finished_at is null and new.finished_at is not null)
  execute function siding.tell();

drop function if exists siding.settle(uuid, jsonb, integer);

-- The claim of a queue with the claim setting `skip_locked`, and in the same round trip the finish of what
-- the worker has done meanwhile (`done`, as the arguments of siding.finish; null is nothing).
--
-- Rows are found, locked and passed over where others hold them, in the order of the partial index, whose
-- condition is here word for word; and updated by where they lie: so the plan is the same whatever the
-- statistics say, fresh or stale, and is made once. A row that was changed between the two is left in line.
--
-- `mark`, where given, is a place in line before which nothing is looked for, though not for long: the
-- entries of jobs claimed before are still in the index, as long as any transaction is older than their
-- claim, and to pass over them costs more than the claim itself (see docs/scale.md). Jobs of less priority
-- than the mark's come after it. Whoever has a mark must look without one at least every second, and at
-- once when this finds fewer than `most`.
--
-- `idle`: the worker runs nothing, and the next in line is to run alone (`lone`): it is taken by itself.
create function siding.claim_skip_locked(queue_name text, kinds text[], most integer, worker uuid, token uuid,
  lease_s double precision, lone boolean, mark_priority integer, mark_due_at timestamptz, mark_id bigint,
  done_ids bigint[], done_attempts integer[], done_results jsonb, wait_ms integer,
  out finished json, out claimed_at timestamptz, out jobs json, out last json)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off as $$
declare
  tids tid[] := '{}';
begin
  if done_ids is not null then
    finished := (select json_agg(f::text) from siding.finish(worker, done_ids, done_attempts, done_results, wait_ms) f);
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
    returning j.*
  )
  select now(),
    (select json_agg(row_to_json(j)) from (
      select t.id::text as id, t.kind, t.attempt, t.payload,
        date_part('epoch', t.claimed_at - t.due_at) * 1000 as wait_ms,
        -- Most jobs have none of these, and to write them all would be a tenth of the claim.
        case when num_nonnulls(t.owner, t.price, t.trace_parent, t.request_key) > 0 or t.priority <> 0 or t.alone
               or t.failures + t.crashes + t.releases + t.snoozes > 0 then
          json_build_object('owner', t.owner, 'price', t.price::text, 'priority', t.priority,
            'failures', t.failures, 'crashes', t.crashes, 'releases', t.releases, 'snoozes', t.snoozes,
            'alone', t.alone, 'trace_parent', t.trace_parent, 'request_key', t.request_key,
            'request_id', t.request_id) end as more
      from taken t order by t.priority desc, t.due_at, t.id) j),
    (select json_build_object('priority', t.priority, 'due_at', t.due_at, 'id', t.id::text)
     from taken t order by t.priority, t.due_at desc, t.id desc limit 1)
  into claim_skip_locked.claimed_at, claim_skip_locked.jobs, claim_skip_locked.last;
end $$;
