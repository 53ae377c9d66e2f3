-- Enqueueing from any language, and moving here from another queue: docs/adopt.md.
-- oldest code that still runs on this: 1

-- Enqueues one job, for whoever has no library of Siding's: siding.enqueue(jobs), with the same checks and
-- errors, as arguments by name. Returns the job's id, or that of the unfinished job that has its unique key.
-- The payload has no default: with one, a call with a single untyped text would mean this and not siding.enqueue(jobs).
--
-- `failed`: how often it was tried in vain in the queue that it comes from. It counts as if it was here, so that the
-- retries of its kind are what is left to it. A job that was here before, by its key, is left as it is.
create function siding.enqueue(kind text, payload jsonb, queue text default null, owner text default null,
  priority integer default null, delay_s double precision default null, due_at timestamptz default null,
  unique_key text default null, files bigint[] default null, price numeric default null,
  webhook text default null, trace_parent text default null, failed integer default 0)
returns bigint language plpgsql
-- As every statement that finds a job by its id, see 0009.
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  job record;
begin
  if failed is null or failed < 0 then
    raise exception 'failed is %: it must be a whole number from 0', coalesce(failed::text, 'null') using errcode = 'SD422';
  end if;
  select e.id, e.created into job from siding.enqueue(jsonb_build_array(
    -- Those that are null are not given. Within the payload null is a value.
    jsonb_strip_nulls(jsonb_build_object('kind', kind, 'queue', queue, 'owner', owner, 'priority', priority,
      'delay_s', delay_s, 'due_at', due_at, 'unique_key', unique_key, 'files', files, 'price', price,
      'webhook', webhook, 'trace_parent', trace_parent))
    || jsonb_build_object('payload', coalesce(payload, '{}')))) e;
  if failed > 0 and job.created then
    update siding.jobs j set failures = failed where j.id = job.id;
  end if;
  return job.id;
end $$;
