-- Credits, kept by the database itself, so that no path can forget them: reserved with the job,
-- captured when it is done, released when it fails, is cancelled or removed, held in between, also
-- while it waits in review. Each is in the transaction of the change itself.
-- Only a reservation waits for an account's lock, with the accounts in order of owner, so that two
-- batches cannot deadlock. What ends a job only adds a row to the ledger: a settle waits for no
-- account. Those rows are folded into the account later, or when it is next reserved from.
-- oldest code that still runs on this: 1

-- What a job costs its owner; null is nothing. The rows there are have no price, so they need no
-- scan, which would hold up everybody ("not valid": new rows are checked all the same).
alter table siding.jobs
  add column price bigint,
  add constraint price_positive check (price > 0) not valid,
  add constraint priced_has_owner check (price is null or owner is not null) not valid;
-- What an owner has, as of the ledger's folded rows; what is true just now is in siding.balances.
create table siding.accounts (
  owner text primary key constraint owner_length check (length(owner) between 1 and 200),
  balance bigint not null default 0 constraint balance_not_negative check (balance >= 0),
  reserved bigint not null default 0 constraint reserved_not_negative check (reserved >= 0),
  captured bigint not null default 0 constraint captured_not_negative check (captured >= 0),
  deposited bigint not null default 0 constraint deposited_not_negative check (deposited >= 0),
  constraint nothing_from_nothing check (balance + reserved + captured = deposited)
);

-- Every movement of credits; it stays when its job is swept. No row is marked folded but by who
-- holds the account's lock. No foreign key to the account, whose check would lock it at each end.
create table siding.ledger (
  id bigint generated always as identity primary key,
  owner text not null,
  job_id bigint,
  entry text not null constraint entry_known
    check (entry in ('deposit', 'reserve', 'capture', 'release')),
  amount bigint not null,
  created_at timestamptz not null default now(),
  folded boolean not null default false,
  constraint entry_of_a_job check ((entry = 'deposit') = (job_id is null)),
  -- A deposit below zero is a correction.
  constraint amount_sign check (case entry when 'deposit' then amount <> 0 else amount > 0 end)
);
create index ledger_unfolded on siding.ledger (owner) where not folded;
-- A job's entries: one reservation, and one end.
create unique index ledger_of_job on siding.ledger (job_id, (entry = 'reserve'))
  where job_id is not null;

-- What one credit of each entry does to the columns of an account.
create view siding.effects (entry, balance, reserved, captured, deposited) as
  values ('deposit', 1, 0, 0, 1), ('reserve', -1, 1, 0, 0),
         ('capture', 0, -1, 1, 0), ('release', 1, -1, 0, 0);

-- What each owner has just now, with what is not folded yet.
create view siding.balances as
  select a.owner, (a.balance + u.balance)::bigint as balance,
    (a.reserved + u.reserved)::bigint as reserved, (a.captured + u.captured)::bigint as captured,
    (a.deposited + u.deposited)::bigint as deposited
  from siding.accounts a
  cross join lateral (
    select coalesce(sum(l.amount * e.balance), 0) as balance,
      coalesce(sum(l.amount * e.reserved), 0) as reserved,
      coalesce(sum(l.amount * e.captured), 0) as captured,
      coalesce(sum(l.amount * e.deposited), 0) as deposited
    from siding.ledger l join siding.effects e on e.entry = l.entry
    where l.owner = a.owner and not l.folded
  ) u;

-- Folds at most `most` of an account's entries (null: all), and returns how many, for a caller that
-- holds the account's lock: by a statement before this one, whose snapshot then is older than what
-- this one must see.
create function siding.fold_account(account text, most bigint) returns bigint language plpgsql as $$
declare
  sums record;
begin
  with unfolded as materialized (
    select l.id from siding.ledger l where l.owner = account and not l.folded limit most
  ),
  marked as (
    update siding.ledger l set folded = true from unfolded u where l.id = u.id
    returning l.entry, l.amount
  )
  select count(*) as n, sum(m.amount * e.balance) as balance, sum(m.amount * e.reserved) as reserved,
      sum(m.amount * e.captured) as captured, sum(m.amount * e.deposited) as deposited
    into sums from marked m join siding.effects e on e.entry = m.entry;
  if sums.n > 0 then -- also where all sums are 0: at REPEATABLE READ two must meet at the account
    update siding.accounts a set balance = a.balance + sums.balance,
      reserved = a.reserved + sums.reserved, captured = a.captured + sums.captured,
      deposited = a.deposited + sums.deposited
    where a.owner = account;
  end if;
  return sums.n;
end $$;

-- Folds entries into accounts, in order of owner, at most `most`, and returns how many. It passes over
-- accounts that are locked: those fold by themselves, or come next time.
create function siding.fold(most integer) returns bigint language plpgsql as $$
declare
  account text;
  folded bigint := 0;
begin
  for account in
    select a.owner from siding.accounts a
    -- The bound is within: to find all owners would read all that is not folded.
    where a.owner in (select l.owner from siding.ledger l where not l.folded order by l.owner limit most)
    order by a.owner
    for no key update skip locked
  loop
    exit when folded >= most;
    folded := folded + siding.fold_account(account, most - folded);
  end loop;
  return folded;
end $$;

-- Locks an account and folds all of it, so that what was released a moment ago counts, and returns
-- its balance; null when there is no account.
create function siding.lock_account(account text) returns bigint language plpgsql as $$
begin
  perform from siding.accounts a where a.owner = account for no key update;
  perform siding.fold_account(account, null);
  return (select a.balance from siding.accounts a where a.owner = account);
end $$;

-- Adds credits to an owner's account, which is made if need be, or takes some back (a correction,
-- `amount` below 0) as far as they are there. Returns the balance.
create function siding.deposit(account text, amount bigint) returns bigint language plpgsql as $$
declare
  had bigint;
begin
  if coalesce(amount, 0) = 0 or coalesce(length(account), 0) not between 1 and 200 then
    raise exception 'deposit of % for owner "%": it must be a number other than 0, for an owner of 1 to 200 characters',
      coalesce(amount::text, 'null'), left(account, 201) using errcode = 'SD422';
  end if;
  insert into siding.accounts (owner) values (account) on conflict do nothing;
  had := siding.lock_account(account);
  if had + amount < 0 then
    raise exception 'owner "%" has % credits, % are needed', account, had, -amount using errcode = 'SD402';
  end if;
  update siding.accounts a set balance = a.balance + amount, deposited = a.deposited + amount
    where a.owner = account;
  insert into siding.ledger (owner, entry, amount, folded) values (account, 'deposit', amount, true);
  return had + amount;
end $$;

-- Reserves what the jobs of an insert cost, whatever statement it was. For the statement, since
-- for each row it would lock the accounts in the order of the rows.
-- What that costs jobs without a price (the server's time; 1000 jobs an enqueue, medians of 15
-- rounds in turns): within the noise of 3%; for an enqueue of one job 2 to 3%, since it looks
-- before it sorts.
create function siding.reserve() returns trigger language plpgsql as $$
declare
  need record;
  had bigint;
begin
  if not exists (select from new_jobs n where n.price is not null) then
    return null;
  end if;
  for need in
    select n.owner, sum(n.price) as credits,
      min(n.id) filter (where n.status in ('done', 'failed', 'cancelled')) as ended
    from new_jobs n where n.price is not null
    group by n.owner order by n.owner -- as everything that locks several accounts does
  loop
    if need.ended is not null then
      raise exception 'job % has a price and is inserted in a final state: nothing would end its reservation',
        need.ended using errcode = 'SD422';
    end if;
    had := siding.lock_account(need.owner);
    if had is null then
      raise exception 'owner "%" has no account', need.owner using errcode = 'SD402';
    elsif had < need.credits then
      raise exception 'owner "%" has % credits, % are needed', need.owner, had, need.credits
        using errcode = 'SD402';
    end if;
    update siding.accounts a set balance = a.balance - need.credits, reserved = a.reserved + need.credits
      where a.owner = need.owner;
  end loop;
  insert into siding.ledger (owner, job_id, entry, amount, folded)
    select n.owner, n.id, 'reserve', n.price, true from new_jobs n where n.price is not null;
  return null;
end $$;
create trigger reserve after insert on siding.jobs referencing new table as new_jobs
  for each statement execute function siding.reserve();

-- Ends a job's reservation: captured when it is done, released when it is not, or is no more.
create function siding.end_reservation() returns trigger language plpgsql as $$
begin
  insert into siding.ledger (owner, job_id, entry, amount) values (old.owner, old.id,
    case when tg_op = 'UPDATE' and new.status = 'done' then 'capture' else 'release' end, old.price);
  return null;
end $$;
-- For each row, with a condition, and not for each statement: a transition table would be filled
-- at every claim and heartbeat, and these pay nothing, nor do jobs without a price.
create trigger end_reservation after update of status on siding.jobs
  for each row when (new.price is not null and old.status <> new.status
                     and new.status in ('done', 'failed', 'cancelled'))
  execute function siding.end_reservation();
create trigger release_deleted after delete on siding.jobs
  for each row when (old.price is not null and old.status not in ('done', 'failed', 'cancelled'))
  execute function siding.end_reservation();

create function siding.release_all() returns trigger language plpgsql as $$
begin
  insert into siding.ledger (owner, job_id, entry, amount)
    select j.owner, j.id, 'release', j.price from siding.jobs j
    where j.price is not null and j.status in ('scheduled', 'queued', 'running', 'review');
  return null;
end $$;
create trigger release_truncated before truncate on siding.jobs
  for each statement execute function siding.release_all();

-- A final job stays as it is, and so does what a reservation was made for. Before the update, for
-- which Postgres locks each row: claims, heartbeats and settles have locked theirs (no difference
-- measured, nor in what is logged).
create function siding.keep_job() returns trigger language plpgsql as $$
begin
  if old.status <> new.status and old.status in ('done', 'failed', 'cancelled') then
    raise exception 'job % is %: a final job stays as it is; retry it as a new job', old.id, old.status
      using errcode = 'SD409';
  end if;
  raise exception 'job %: the price of a job, and the id and owner of one with a price, stay as they are',
    old.id using errcode = 'SD409';
end $$;
create trigger keep_final before update of status on siding.jobs
  for each row when (old.status in ('done', 'failed', 'cancelled') and new.status <> old.status)
  execute function siding.keep_job();
create trigger keep_price before update of price, owner, id on siding.jobs
  for each row when (new.price is distinct from old.price or
                     old.price is not null and (new.owner is distinct from old.owner or new.id <> old.id))
  execute function siding.keep_job();

-- Says what is off, a row for each thing, and none when all is right. All of it is read as of one
-- moment, and counted anew from the ledger and the jobs. It reads the whole ledger.
create function siding.audit() returns table (owner text, job_id bigint, problem text)
language sql stable as $$
  with accounts as (
    select a.*, a.balance + a.reserved + a.captured as held from siding.accounts a
  ),
  sums as (
    select l.owner, sum(l.amount) filter (where l.entry = 'deposit') as deposits,
      sum(l.amount * e.reserved) as reserved,
      coalesce(sum(l.amount * e.balance) filter (where l.folded), 0) as folded_balance,
      coalesce(sum(l.amount * e.reserved) filter (where l.folded), 0) as folded_reserved,
      coalesce(sum(l.amount * e.captured) filter (where l.folded), 0) as folded_captured
    from siding.ledger l join siding.effects e on e.entry = l.entry group by l.owner
  ),
  priced as (
    select j.id, j.owner, j.price, j.status,
      j.status in ('scheduled', 'queued', 'running', 'review') as unfinished
    from siding.jobs j where j.price is not null
  ),
  unfinished as (
    select p.owner, sum(p.price) as prices from priced p where p.unfinished group by p.owner
  ),
  entries as (
    select l.job_id, min(l.owner) as owner, min(l.amount) as amount,
      count(distinct (l.owner, l.amount)) as sorts,
      count(*) filter (where l.entry = 'reserve') as reserves,
      count(*) filter (where l.entry = 'capture') as captures,
      count(*) filter (where l.entry = 'release') as releases
    from siding.ledger l where l.job_id is not null group by l.job_id
  )
  select coalesce(a.owner, s.owner), null::bigint, found.problem
  from accounts a
  full join sums s on s.owner = a.owner
  full join unfinished u on u.owner = coalesce(a.owner, s.owner)
  cross join lateral (values
    (a.owner is null, 'it has entries or jobs with a price, but no account'),
    (a.held <> coalesce(s.deposits, 0),
      format('its account holds %s credits, its deposits are %s', a.held, coalesce(s.deposits, 0))),
    ((a.balance, a.reserved, a.captured) <> (coalesce(s.folded_balance, 0),
      coalesce(s.folded_reserved, 0), coalesce(s.folded_captured, 0)),
      format('its account says %s free, %s reserved, %s captured, its folded entries %s, %s, %s',
        a.balance, a.reserved, a.captured, coalesce(s.folded_balance, 0),
        coalesce(s.folded_reserved, 0), coalesce(s.folded_captured, 0))),
    (coalesce(s.reserved, 0) <> coalesce(u.prices, 0),
      format('%s credits are reserved, its unfinished jobs cost %s',
        coalesce(s.reserved, 0), coalesce(u.prices, 0)))
  ) found (is_off, problem)
  where found.is_off
  union all
  select coalesce(p.owner, e.owner), coalesce(p.id, e.job_id), found.problem
  from priced p
  full join entries e on e.job_id = p.id
  cross join lateral (values
    (coalesce(e.reserves, 0) <> 1, format('it was reserved %s times', coalesce(e.reserves, 0))),
    (e.captures + e.releases > 1, format('it ended %s times', e.captures + e.releases)),
    (e.sorts > 1, 'its entries differ in owner or amount'),
    (e.sorts = 1 and (p.owner, p.price) is distinct from (e.owner, e.amount) and p.id is not null,
      format('it costs %s %s, its entries say %s %s', p.owner, p.price, e.owner, e.amount)),
    (p.unfinished and e.captures + e.releases > 0, format('it is %s and has ended', p.status)),
    (p.status = 'done' and coalesce(e.captures, 0) <> 1, 'it is done and was not captured'),
    (p.status in ('failed', 'cancelled') and coalesce(e.releases, 0) <> 1,
      format('it is %s and was not released', p.status)),
    (p.id is null and e.captures + e.releases = 0, 'it is gone and still reserved')
  ) found (is_off, problem)
  where found.is_off
  order by 1, 2 nulls first, 3;
$$;
