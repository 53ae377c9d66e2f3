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
