/**
 * Takes out, one at a time, the code that keeps an invariant, and sees that its test fails:
 *
 *     deno task mutants            # all of them, some minutes
 *     deno task mutants I3 lease   # those whose line has one of these words
 *
 * Each cut is made in a copy of the tree. Exits 1 when a cut was not noticed, or no longer fits.
 */
import { cp, mkdtemp, rm, symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { startPostgres } from "../dev/postgres.ts";

interface Mutant {
  invariant: string;
  what: string;
  file: string;
  /** The text to find, which must be there once, and what takes its place. */
  cut: [string, string];
  test: string;
  filter: string;
}

/** The newest of its files that has the text: an older one has what only older code calls. */
const SQL = "migrations";
/** A test that hangs without its code has noticed, too. */
const LIMIT_MS = 180_000;

const mutants: Mutant[] = [
  {
    invariant: "I1",
    what: "a claim that does not lock what it takes",
    file: SQL,
    cut: ["limit most for update skip locked);\n  else\n", "limit most);\n  else\n"],
    test: "queue_test.ts",
    filter: "stops no heartbeat and no claim",
  },
  {
    invariant: "I1",
    what: "claims by lock without the lock",
    file: SQL,
    cut: ["  perform siding.lock_queue(queue_name);\n", ""],
    test: "claim_test.ts",
    filter: "never runs 4 under 16 claimers, by lock",
  },
  {
    invariant: "I1",
    what: "claims by repeatable_read that do not move the queue's row",
    file: SQL,
    cut: [
      "  update siding.queues one set claims = one.claims + 1\n" +
      "    where one.name = queue_name and one.claim = 'repeatable_read' and not one.paused\n" +
      "    returning one.* into q;\n",
      "  select one.* into q from siding.queues one\n" +
      "    where one.name = queue_name and one.claim = 'repeatable_read' and not one.paused;\n",
    ],
    test: "claim_test.ts",
    filter: "by repeatable_read",
  },
  {
    invariant: "I2",
    what: "a next job enqueued after the finish, and not with it",
    file: SQL,
    cut: ["      perform siding.enqueue(next_jobs);\n", ""],
    test: "queue_test.ts",
    filter: "whose first reply was lost",
  },
  {
    invariant: "I3",
    what: "a settle that does not ask whose job it is",
    file: SQL,
    cut: [
      "j.attempt = o.attempt and j.worker_id = worker and j.lease_until is not null\n      for update) j",
      "j.attempt = o.attempt and j.lease_until is not null\n      for update) j",
    ],
    test: "queue_test.ts",
    filter: "lost its job matches nothing",
  },
  {
    invariant: "I3",
    what: "a settle that does not ask which attempt it was",
    file: SQL,
    cut: [
      "j.attempt = o.attempt and j.worker_id = worker and j.lease_until is not null\n      for update) j",
      "j.worker_id = worker and j.lease_until is not null\n      for update) j",
    ],
    test: "queue_test.ts",
    filter: "lost its job matches nothing",
  },
  {
    invariant: "I3",
    what: "an attempt that does not rise",
    file: SQL,
    cut: [
      "attempt = j.attempt + 1, claimed_at = now()",
      "attempt = greatest(j.attempt, 1), claimed_at = now()",
    ],
    test: "queue_test.ts",
    filter: "lost its job matches nothing",
  },
  {
    invariant: "I3",
    what: "a worker that does not stop a job it has lost",
    file: "lease.ts",
    cut: ['if (beat?.state === "lost")', 'if (beat?.state === "skipped")'],
    test: "worker_test.ts",
    filter: "given away kills it",
  },
  {
    invariant: "I4",
    what: "a worker that does not stop what it cannot renew",
    file: "lease.ts",
    cut: [
      "renewed.monotonicMs > (this.leaseS - this.#marginS) * 1000",
      "renewed.monotonicMs > this.leaseS * 100_000",
    ],
    test: "worker_test.ts",
    filter: "stopped in time, and is nobody's crash",
  },
  {
    invariant: "I4",
    what: "a guard that does not see its worker's end",
    file: "jobs/guard.sh",
    cut: ["  mark unwatched\n  end_job\n", ""],
    test: "worker_test.ts",
    filter: "end at once, not with its lease",
  },
  {
    invariant: "I4",
    what: "a guard without a deadline",
    file: "jobs/guard.sh",
    cut: ["      mark overdue\n      end_job\n", ""],
    test: "worker_test.ts",
    filter: "frozen past its lease",
  },
  {
    invariant: "I4",
    what: "a statement without a time limit",
    file: "db.ts",
    cut: [
      "} ms`));\n      }, limitMs);\n    });\n    try",
      "} ms`));\n      }, 2 ** 30);\n    });\n    try",
    ],
    test: "worker_test.ts",
    filter: "nobody's crash (silence)",
  },
  {
    invariant: "I5",
    what: "a lease by the worker's clock",
    file: "claims.ts",
    cut: [
      "${leaseS}, ${alone && idle}",
      "${leaseS + (Date.now() - performance.timeOrigin - performance.now()) / 1000}, ${alone && idle}",
    ],
    test: "worker_test.ts",
    filter: "ten minutes off",
  },
  {
    invariant: "I6",
    what: "a recovery that counts no crash",
    file: SQL,
    cut: ["    crashes = j.crashes + (not l.together)::integer,\n", ""],
    test: "queue_test.ts",
    filter: "fails it the second time",
  },
  {
    invariant: "I6",
    what: "a recovery right after an outage",
    file: "lease.ts",
    cut: ["return performance.now() - this.#inTouchSinceMs >= this.silentS * 1000 &&", "return"],
    test: "worker_test.ts",
    filter: "after an outage",
  },
  {
    invariant: "I7",
    what: "a connection that broke, taken for one that was never made",
    file: "jobs/band.ts",
    cut: ['cause.includes("client error (Connect)")', "cause"],
    test: "band_test.ts",
    filter: "waits in review, and is not sent again",
  },
  {
    invariant: "I7",
    what: "a status that proves a refusal, whoever it is from",
    file: "jobs/band.ts",
    cut: [
      "Refusal = z.object({ error: z.string().min(1) })",
      'Refusal = z.any().transform(() => ({ error: "no" }))',
    ],
    test: "band_test.ts",
    filter: "only the service's own refusal",
  },
  {
    invariant: "I7",
    what: "a request id that may be overwritten",
    file: SQL,
    cut: [" and coalesce(r.request_id, save_request.id) = save_request.id", ""],
    test: "recover_test.ts",
    filter: "a late id is saved",
  },
  {
    invariant: "I8",
    what: "a stopped worker that leaves its jobs to the lease",
    file: "worker.ts",
    cut: [
      'new Stop("released", "its worker was stopped")',
      'new Stop("lost", "its worker was stopped")',
    ],
    test: "worker_test.ts",
    filter: "outlasts the drain time",
  },
  {
    invariant: "I8",
    what: "a stopped worker that gives its jobs no time",
    file: "worker.ts",
    cut: ["pause(drainS * 1000, enough", "pause(0, enough"],
    test: "worker_test.ts",
    filter: "lets a job end that can",
  },
  {
    invariant: "I9",
    what: "a handle that goes on after its connection died",
    file: "db.ts",
    cut: ["if (lost) throw new LockLost", "if (false) throw new LockLost"],
    test: "queue_test.ts",
    filter: "connection died sends nothing more",
  },
  {
    invariant: "I10",
    what: "a leader that may be long silent",
    file: SQL,
    cut: [
      "where p.seen_at > now() - silent_s * interval '1 second' or p.boot_id = process",
      "where true",
    ],
    test: "queue_test.ts",
    filter: "the leader is the lowest",
  },
  {
    invariant: "I13",
    what: "a job that is done and captures nothing",
    file: SQL,
    cut: [
      "and new.status in ('done', 'failed', 'cancelled'))\n  execute function siding.end_reservation();\ndrop",
      "and new.status in ('failed', 'cancelled'))\n  execute function siding.end_reservation();\ndrop",
    ],
    test: "credits_test.ts",
    filter: "captured when it is done",
  },
  {
    invariant: "I13",
    what: "a job that is cancelled and releases nothing",
    file: SQL,
    cut: [
      "and new.status in ('done', 'failed', 'cancelled'))\n  execute function siding.end_reservation();\ndrop",
      "and new.status in ('done', 'failed'))\n  execute function siding.end_reservation();\ndrop",
    ],
    test: "credits_test.ts",
    filter: "cancelled in line",
  },
  {
    invariant: "I13",
    what: "a deleted job that releases nothing",
    file: SQL,
    cut: [
      "  for each row when (old.price is not null and old.status not in ('done', 'failed', 'cancelled'))",
      "  for each row when (false)",
    ],
    test: "credits_test.ts",
    filter: "deleting an unfinished job",
  },
  {
    invariant: "I13",
    what: "a final job that may change its state",
    file: SQL,
    cut: [
      "when (old.status in ('done', 'failed', 'cancelled') and new.status <> old.status)",
      "when (false)",
    ],
    test: "credits_test.ts",
    filter: "the status of a final job",
  },
  {
    invariant: "I13",
    what: "a price that may change",
    file: SQL,
    cut: [
      "when (new.price is distinct from old.price or",
      "when (false and new.price is distinct from old.price or",
    ],
    test: "credits_test.ts",
    filter: "a price cannot change",
  },
  {
    invariant: "I13",
    what: "a reservation that does not look at the balance",
    file: SQL,
    cut: ["elsif had < need.credits then", "elsif had < 0 then"],
    test: "credits_test.ts",
    filter: "cannot pay is refused whole",
  },
  {
    invariant: "I13",
    what: "a reservation without the account's lock",
    file: SQL,
    cut: ["where a.owner = account for no key update;", "where a.owner = account;"],
    test: "credits_test.ts",
    filter: "sees what the one before took",
  },
  {
    invariant: "I13",
    what: "a reservation that does not see what was just released",
    file: SQL,
    cut: ["  perform siding.fold_account(account, null);\n", ""],
    test: "credits_test.ts",
    filter: "before any fold",
  },
  {
    invariant: "I13",
    what: "accounts locked in the order of the jobs",
    file: SQL,
    cut: ["group by n.owner order by n.owner --", "group by n.owner order by min(n.id) --"],
    test: "credits_test.ts",
    filter: "opposite orders do not deadlock",
  },
  {
    invariant: "I13",
    what: "a fold without the account's lock",
    file: SQL,
    cut: ["    for no key update skip locked\n", ""],
    test: "credits_test.ts",
    filter: "fold each entry once",
  },
  {
    invariant: "I13",
    what: "a fold that waits for an account",
    file: SQL,
    cut: ["    for no key update skip locked\n", "    for no key update\n"],
    test: "credits_test.ts",
    filter: "a fold passes over it",
  },
  {
    invariant: "I14",
    what: "a job that gets the worker's environment",
    file: "jobs/process.ts",
    cut: ["clearEnv: true", "clearEnv: false"],
    test: "jobs_test.ts",
    filter: "none of the worker's secrets",
  },
  {
    invariant: "I14",
    what: "a worker that may read Railway's token",
    file: "deno.json",
    cut: ['"RAILWAY_SERVICE_ID",', '"RAILWAY_*",'],
    test: "permissions_test.ts",
    filter: "reaches no job",
  },
  {
    invariant: "I15",
    what: "a stage that no column takes",
    file: "jobs/run.ts",
    cut: ["cut(stage, 800).slice(0, 200).toWellFormed()", "stage"],
    test: "worker_test.ts",
    filter: "leaves the others, and the worker",
  },
  {
    invariant: "I15",
    what: "a result that is not looked at",
    file: "jobs/run.ts",
    cut: ["  if (bad) throw new PermanentFailure(bad);\n", ""],
    test: "jobs_test.ts",
    filter: "leaves the others of its batch",
  },
  {
    invariant: "queue",
    what: "keys inserted in the order they come",
    file: SQL,
    cut: ["order by r.kind, r.unique_key, r.id", "order by r.id"],
    test: "queue_test.ts",
    filter: "opposite orders do not deadlock",
  },
  {
    invariant: "queue",
    what: "owners counted without their lock",
    file: SQL,
    cut: [
      "    perform pg_advisory_xact_lock(hashtextextended('siding.' || target.queue",
      "    perform (hashtextextended('siding.' || target.queue",
    ],
    test: "queue_test.ts",
    filter: "max_per_owner with what is not committed",
  },
  {
    invariant: "queue",
    what: "a heartbeat that waits for a locked row",
    file: SQL,
    cut: [
      "    for update of j skip locked\n  ),\n  renewed",
      "    for update of j\n  ),\n  renewed",
    ],
    test: "queue_test.ts",
    filter: "stops no heartbeat",
  },
  {
    invariant: "files",
    what: "outputs seen before their job's finish",
    file: "files.ts",
    cut: [" and f.kept and j.status = 'done'", ""],
    test: "files_test.ts",
    filter: "only through the finish",
  },
  {
    invariant: "migrations",
    what: "a migration that waits as long as it takes",
    file: "migrate.ts",
    cut: ["set local lock_timeout = '${LOCK_TIMEOUT}';", ""],
    test: "migrate_test.ts",
    filter: "waits for a long transaction",
  },
  {
    invariant: "I4",
    what: "a worker that hears nothing of a frozen clock",
    file: "lease.ts",
    cut: ["jumpMs > this.#marginS * 500", "jumpMs === -1"],
    test: "band_test.ts",
    filter: "thaws just before it sends",
  },
  {
    invariant: "I4",
    what: "a worker that hangs, and is not told",
    file: "lease.ts",
    cut: ["this.#stalledS > this.stallS &&", "false &&"],
    test: "faults_test.ts",
    filter: "whose look for jobs hangs",
  },
  {
    invariant: "I4",
    what: "a thread that is kept for ever",
    file: "jobs/watchdog.ts",
    cut: ['    Deno.kill(Deno.pid, "SIGKILL");', "    //"],
    test: "faults_test.ts",
    filter: "whose thread a job never gives back",
  },
  {
    invariant: "I6",
    what: "a batch of which each counts as crashed",
    file: SQL,
    cut: ["(select c.jobs > 1 and not j.alone", "(select false and not j.alone"],
    test: "recover_test.ts",
    filter: "lost together go back uncounted",
  },
  {
    invariant: "I6",
    what: "a suspect that is claimed with others",
    file: SQL,
    cut: [
      "case when first.alone then next.id = first.id else not next.alone end\n  returning j.*",
      "true\n  returning j.*",
    ],
    test: "recover_test.ts",
    filter: "never claimed with others, by lock",
  },
  {
    invariant: "I6",
    what: "a recovery by cron right after an outage",
    file: "recover.ts",
    cut: ["  await watch(db, settings.heartbeatMs, signal);\n", ""],
    test: "recover_test.ts",
    filter: "waits out an outage",
  },
  {
    invariant: "I7",
    what: "a request sent after the lease",
    file: "jobs/paid.ts",
    cut: ["if (sinceMs(asked) > left_s * 900) throw", "if (left_s < 0) throw"],
    test: "jobs_test.ts",
    filter: "is late for its lease",
  },
  {
    invariant: "I7",
    what: "a key that a failover can lose",
    file: SQL,
    cut: [
      "coalesce(j.request_key, siding.key_of(j))",
      "coalesce(j.request_key, gen_random_uuid())",
    ],
    test: "faults_test.ts",
    filter: "loses the last transactions",
  },
  {
    invariant: "I7",
    what: "a late id that is not looked at before sending",
    file: "jobs/paid.ts",
    cut: ["if (intent.request_id) return", "if (!intent) return"],
    test: "jobs_test.ts",
    filter: "whose id comes before it is sent",
  },
  {
    invariant: "I7",
    what: "requests that are not kept",
    file: SQL,
    cut: ["  execute function siding.keep_request();", "  execute function siding.keep_queue();"],
    test: "recover_test.ts",
    filter: "a late id is saved",
  },
  {
    invariant: "I7",
    what: "an uncertain request that is cancelled",
    file: SQL,
    cut: [
      "        when j.sent_at is not null and j.request_id is null and not coalesce(o.unsent, false) then 'review'\n",
      "",
    ],
    test: "recover_test.ts",
    filter: "it waits in review",
  },
  {
    invariant: "I10",
    what: "a look that is told however old it is",
    file: "controller.ts",
    cut: ["if (sinceMs(started) > FRESH_MS) throw", "if (sinceMs(started) < 0) throw"],
    test: "controller_test.ts",
    filter: "too old when Railway is to be told",
  },
  {
    invariant: "I10",
    what: "every controller that acts",
    file: "controller.ts",
    cut: ["  if (!now.leader) {", "  if (!now) {"],
    test: "controller_test.ts",
    filter: "of two controllers one acts",
  },
  {
    invariant: "I12",
    what: "a queue that was not seen taken for an empty one",
    file: "controller.ts",
    cut: [
      "return { now, queue: null, trouble: describe(error) };",
      "return { now, queue: { work: [], workers: { reporting: 2, busy: 0, concurrency: 1 } }, trouble: describe(error) };",
    ],
    test: "controller_test.ts",
    filter: "no empty queue",
  },
  {
    invariant: "I12",
    what: "data that is taken although there is an error beside it",
    file: "railway_call.ts",
    cut: ["if (response.ok && data && !errors?.length)", "if (response.ok && data)"],
    test: "railway_test.ts",
    filter: "in the mood partial",
  },
  {
    invariant: "I14",
    what: "a failure's message as it came",
    file: "railway_call.ts",
    cut: ['secret ? message.replaceAll(secret, "…") : message', "message"],
    test: "railway_test.ts",
    filter: "the token appears in no message",
  },
  {
    invariant: "I14",
    what: "a log line as it came",
    file: "log.ts",
    cut: ["format!(withoutSecrets(record))", "format!(record)"],
    test: "log_test.ts",
    filter: "elsewhere it is a text",
  },
  {
    invariant: "I14",
    what: "an alert as it came",
    file: "web/alerts.ts",
    cut: ["redactText(why)", "why"],
    test: "alerts_test.ts",
    filter: "is told no secret",
  },
  {
    invariant: "I10",
    what: "alerts of two leaders at once",
    file: "web/alerts.ts",
    cut: ["where a.looked_at < now()", "where a.looked_at < 'infinity' or a.looked_at < now()"],
    test: "alerts_test.ts",
    filter: "do not count one time twice",
  },
  {
    invariant: "owners",
    what: "a job for whoever knows its id",
    file: "web/jobs.ts",
    cut: ["if (!job || !(who.admin || job.owner === who.owner)) {", "if (!job) {"],
    test: "api_test.ts",
    filter: "to others they are not there",
  },
  {
    invariant: "owners",
    what: "forms without a token of the session",
    file: "web/auth.ts",
    cut: [
      'if (typeof token !== "string" || !await sameText(token, c.get("csrf"))) {',
      "if (false) {",
    ],
    test: "pages_forms_test.ts",
    filter: "token",
  },
  {
    invariant: "owners",
    what: "an Idempotency-Key that is good for another request",
    file: SQL,
    cut: ["if before.fingerprint is distinct from print then", "if false then"],
    test: "api_test.ts",
    filter: "Idempotency-Key happens once",
  },
  {
    invariant: "webhooks",
    what: "webhooks to any address",
    file: "jobs/webhook.ts",
    cut: ["if (!isPublic(address))", "if (false)"],
    test: "webhook_test.ts",
    filter: "not public",
  },
  {
    invariant: "webhooks",
    what: "webhooks whose name is looked up again",
    file: "jobs/webhook.ts",
    cut: ["found(null, addresses),", "found(null, []),"],
    test: "webhook_test.ts",
    filter: "looked up once",
  },
  {
    invariant: "I5",
    what: "webhooks by the worker's clock",
    file: "jobs/webhook.ts",
    cut: ["context.job.claimed_at.getTime()", "Date.now()"],
    test: "webhook_test.ts",
    filter: "is the database's",
  },
  {
    invariant: "I11",
    what: "an excess that does not wait for idle",
    file: "policy.ts",
    cut: [
      "  if (!idle) held = Math.max(held, platform.configured);\n",
      "",
    ],
    test: "policy_test.ts",
    filter: "3000 random histories",
  },
  {
    invariant: "I11",
    what: "a busy worker that is not asked about",
    file: "policy.ts",
    cut: [
      "all.running + workers.busy === 0",
      "all.running === 0",
    ],
    test: "policy_test.ts",
    filter: "so does a busy worker",
  },
  {
    invariant: "I11",
    what: "what runs outside the open queues left out",
    file: "policy.ts",
    cut: [
      "    all.running += row.running_here;\n",
      "    if (row.served && !row.paused) all.running += row.running_here;\n",
    ],
    test: "policy_test.ts",
    filter: "what runs holds the count",
  },
  {
    invariant: "I11",
    what: "jobs that wait while no worker reports taken for none",
    file: "policy.ts",
    cut: [
      "row.served || workers.reporting === 0",
      "row.served",
    ],
    test: "policy_test.ts",
    filter: "without any worker that reports",
  },
  {
    invariant: "I11",
    what: "a step above the most",
    file: "policy.ts",
    cut: [
      "const wanted = Math.min(needed, limits.most);",
      "const wanted = needed;",
    ],
    test: "policy_test.ts",
    filter: "up to the most",
  },
  {
    invariant: "I11",
    what: "an excess that is set again above the most",
    file: "policy.ts",
    cut: [
      "Math.min(before.wanted, Math.max(limits.most, platform.configured))",
      "before.wanted",
    ],
    test: "policy_test.ts",
    filter: "an excess that was lowered from outside",
  },
  {
    invariant: "I12",
    what: "a look that did not see the queue taken for an idle one",
    file: "policy.ts",
    cut: [
      "queue !== null && claimable(queue).idle",
      "queue === null || claimable(queue).idle",
    ],
    test: "policy_test.ts",
    filter: "begins the idle run anew",
  },
  {
    invariant: "I12",
    what: "an idle run over a time without looks",
    file: "policy.ts",
    cut: [
      "at_ms - memory.at_ms > policy.gapS * 1000",
      "at_ms < memory.at_ms",
    ],
    test: "policy_test.ts",
    filter: "over a time without looks",
  },
  {
    invariant: "turns",
    what: "a claim that forgets whose turn it was",
    file: SQL,
    cut: [
      "on conflict (queue) do update set turn = excluded.turn",
      "on conflict (queue) do nothing",
    ],
    test: "turns_test.ts",
    filter: "owners take turns among four claimers",
  },
  {
    invariant: "turns",
    what: "a claim that takes an owner's share before the next owner's turn",
    file: SQL,
    cut: [
      "row_number() over (order by p.round, o.ord)",
      "row_number() over (order by o.ord, p.round)",
    ],
    test: "turns_test.ts",
    filter: "served in the next round",
  },
  {
    invariant: "turns",
    what: "a queue made fair that does not wait for the enqueues under way",
    file: SQL,
    cut: ["  lock table siding.jobs in share row exclusive mode;\n", ""],
    test: "turns_test.ts",
    filter: "waits for the enqueues under way",
  },
  {
    invariant: "turns",
    what: "a queue made fair whose waiting jobs get no turn",
    file: SQL,
    cut: ["      using new.name, new.fair;", "      using '', new.fair;"],
    test: "turns_test.ts",
    filter: "while jobs wait",
  },
  {
    invariant: "turns",
    what: "a claim that goes on past a job that is to run alone",
    file: SQL,
    cut: [
      "l.place < coalesce((select min(a.place) from line a where a.alone), l.place + 1)",
      "not l.alone",
    ],
    test: "turns_test.ts",
    filter: "nobody's company",
  },
  {
    invariant: "rate",
    what: "a claim under a rate limit that counts from when it began to wait",
    file: SQL,
    cut: ["at timestamptz := clock_timestamp();", "at timestamptz := now();"],
    test: "turns_test.ts",
    filter: "counts from when its claim was in order",
  },
  {
    invariant: "rate",
    what: "a rate limit that looks at a part of its period",
    file: SQL,
    cut: [
      "s.queue = q.name and s.started_at < at - period",
      "s.queue = q.name and s.started_at < at - period / 2",
    ],
    test: "turns_test.ts",
    filter: "never pass a rate limit, by lock",
  },
  {
    invariant: "rate",
    what: "a clock that was set back, after which the starts before it count no more",
    file: SQL,
    cut: [
      "    update siding.starts s set started_at = at where",
      "    delete from siding.starts s where",
    ],
    test: "turns_test.ts",
    filter: "the clock was set back",
  },
  {
    invariant: "rate",
    what: "a worker that comes back after its longest poll only",
    file: "intake.ts",
    cut: ["(seen.opens_ms ?? Infinity) + 10", "Infinity + 10"],
    test: "turns_test.ts",
    filter: "comes back when there is room",
  },
  {
    invariant: "rate",
    what: "jobs that a rate limit holds back as a reason to climb",
    file: "policy.ts",
    cut: ["Math.min(room.get(queue)!, rate_room ?? Infinity)", "room.get(queue)!"],
    test: "policy_test.ts",
    filter: "beyond max_running",
  },
  {
    invariant: "I3",
    what: "a finish that does not ask whose job it is",
    file: SQL,
    cut: [
      "and j.attempt = o.attempt and j.worker_id = worker and j.lease_until is not null\n    returning",
      "and j.attempt = o.attempt and j.lease_until is not null\n    returning",
    ],
    test: "outcomes_test.ts",
    filter: "lost its job ends nothing",
  },
  {
    invariant: "I3",
    what: "a finish that does not ask which attempt it was",
    file: SQL,
    cut: [
      "and j.attempt = o.attempt and j.worker_id = worker and j.lease_until is not null\n    returning",
      "and j.worker_id = worker and j.lease_until is not null\n    returning",
    ],
    test: "outcomes_test.ts",
    filter: "lost its job ends nothing",
  },
  {
    invariant: "fast",
    what: "a mark that no look renews",
    file: "intake.ts",
    cut: ["performance.now() - this.#lookedMs > LOOK_EVERY_MS", "false"],
    test: "intake_test.ts",
    filter: "before its place starts within a second",
  },
  {
    invariant: "fast",
    what: "a mark that less priority does not come after",
    file: SQL,
    cut: ["          and j.priority < mark_priority\n", "          and false\n"],
    test: "mark_test.ts",
    filter: "seed 1",
  },
  {
    invariant: "fast",
    what: "a mark that is passed over itself",
    file: SQL,
    cut: [
      "(j.due_at, j.id) >= (mark_due_at, mark_id)",
      "(j.due_at, j.id) > (mark_due_at, mark_id)",
    ],
    test: "mark_test.ts",
    filter: "seed 1",
  },
  {
    invariant: "fast",
    what: "a worker that holds what it cannot record, without end",
    file: "intake.ts",
    cut: ["2 * most - this.leases.held.size", "Infinity"],
    test: "intake_test.ts",
    filter: "cannot record",
  },
  {
    invariant: "fast",
    what: "jobs that a slow one keeps waiting",
    file: "places.ts",
    cut: ["this.#waiting.splice(0, inTime < 0 ? this.#waiting.length : inTime)", "[]"],
    test: "places_test.ts",
    filter: "goes back in line",
  },
  {
    invariant: "fast",
    what: "jobs that are claimed again behind the slow one",
    file: "places.ts",
    cut: ["Math.max(this.#paceMs, awaitedMs, 0.001)", "Math.max(this.#paceMs, 0.001)"],
    test: "places_test.ts",
    filter: "goes back in line",
  },
  {
    invariant: "fast",
    what: "jobs claimed ahead that stay with a worker that stops",
    file: "places.ts",
    cut: ["this.#giveBack(this.#waiting.splice(0));", "this.#waiting = [];"],
    test: "places_test.ts",
    filter: "a worker that stops gives back",
  },
  {
    invariant: "I3",
    what: "jobs claimed ahead that begin after their lease",
    file: "places.ts",
    cut: ["|| !this.leases.isMine(next.held)", ""],
    test: "places_test.ts",
    filter: "its lease may have run out",
  },
  {
    invariant: "fast",
    what: "jobs that count as given back though they never began",
    file: SQL,
    cut: ["(m.outcome = 'released' and not m.unbegun)", "(m.outcome = 'released')"],
    test: "places_test.ts",
    filter: "goes back in line",
  },
  {
    invariant: "fast",
    what: "jobs of a limited queue claimed ahead",
    file: "intake.ts",
    cut: ['claim === "skip_locked" ? undefined : this.settings.concurrency', ""],
    test: "places_test.ts",
    filter: "of a queue with limits",
  },
  {
    invariant: "fast",
    what: "places that stay empty until the next poll",
    file: "intake.ts",
    cut: ["outcomes, start, () => this.#changed()", "outcomes, start, () => {}"],
    test: "intake_test.ts",
    filter: "until its places are full",
  },
  {
    invariant: "fast",
    what: "outcomes that are refused together",
    file: "jobs/outcomes.ts",
    cut: [
      "if (half === 0) return void this.#insist(entries[0], error);",
      "return entries.forEach((entry) => this.#insist(entry, error));",
    ],
    test: "outcomes_test.ts",
    filter: "hold back no others",
  },
  {
    invariant: "fast",
    what: "a claim that fails of an outcome it took along",
    file: "intake.ts",
    cut: ["if (isDisconnect(error) || done.length === 0) throw error;", "throw error;"],
    test: "outcomes_test.ts",
    filter: "nor are the claims",
  },
  {
    invariant: "fast",
    what: "outcomes that go with a lost reply",
    file: "intake.ts",
    cut: ["      landed(stand);\n", "      if (stand) landed(stand);\n"],
    test: "outcomes_test.ts",
    filter: "whose reply is lost",
  },
  {
    invariant: "fast",
    what: "a row that is waited for as long as it takes",
    file: SQL,
    cut: [
      "perform set_config('lock_timeout', wait_ms::text, true); -- until",
      "perform set_config('lock_timeout', '0', true); -- until",
    ],
    test: "outcomes_test.ts",
    filter: "hold back no others",
  },
  {
    invariant: "gathered",
    what: "a refusal that all callers of the statement get",
    file: "gather.ts",
    cut: ["calls.length > 1 ? REFUSED.test(code) : ", ""],
    test: "gather_test.ts",
    filter: "a caller at fault",
  },
  {
    invariant: "I10",
    what: "schedules: a tick that may be enqueued twice",
    file: SQL,
    cut: [
      "values (schedule, s.next_at, 'enqueued') on conflict do nothing;\n      if found then",
      "values (schedule, s.next_at, 'enqueued') on conflict do nothing;\n      if true then",
    ],
    test: "schedules_test.ts",
    filter: "not enqueued twice",
  },
  {
    invariant: "I10",
    what: "schedules: a step from a version that is gone",
    file: SQL,
    cut: ["and one.version = seen and one.enabled", "and one.enabled"],
    test: "schedules_test.ts",
    filter: "is let be",
  },
  {
    invariant: "I10",
    what: "schedules: a step that is taken however old it is",
    file: SQL,
    cut: [
      "to_timestamp(seen_ms / 1000) + interval '10 seconds'",
      "to_timestamp(seen_ms / 1000) + interval '1 day'",
    ],
    test: "schedules_test.ts",
    filter: "was frozen adds none",
  },
  {
    invariant: "I5",
    what: "schedules: ticks by the worker's clock",
    file: "schedules.ts",
    cut: [
      "const { cron, time_zone, next_ms, now_ms } = it;",
      "const { cron, time_zone, next_ms } = it;\n  const now_ms = Date.now();",
    ],
    test: "schedules_test.ts",
    filter: "clock is ten minutes off",
  },
  {
    invariant: "I15",
    what: "schedules: one that cannot be kept stops the others",
    file: SQL,
    cut: ["if sqlstate ~ '^(40|53|55|57|58)' then", "if true then"],
    test: "schedules_test.ts",
    filter: "stops no other",
  },
];

async function main(words: string[]): Promise<number> {
  const chosen = mutants.filter(({ invariant, what }) =>
    words.length === 0 || words.some((word) => `${invariant} ${what}`.includes(word))
  );
  await using server = await startPostgres();
  let unnoticed = 0;
  for (const [index, mutant] of chosen.entries()) {
    const verdict = await tryOut(mutant, server.url);
    if (!verdict.startsWith("noticed")) unnoticed++;
    console.log(`${index + 1}/${chosen.length}  ${mutant.invariant}: ${mutant.what}: ${verdict}`);
  }
  console.log(`${chosen.length - unnoticed} of ${chosen.length} cuts noticed`);
  return unnoticed === 0 && chosen.length > 0 ? 0 : 1;
}

/** Makes the cut in a copy and runs its test there. */
async function tryOut({ file, cut, test, filter }: Mutant, url: string): Promise<string> {
  const root = import.meta.dirname + "/..";
  const folder = await mkdtemp(join(tmpdir(), "siding-mutant-"));
  try {
    for (const { name } of Deno.readDirSync(root)) {
      if (name.startsWith(".") || name === "node_modules") continue; // and the data of dev
      await cp(join(root, name), join(folder, name), { recursive: true });
    }
    await symlink(await Deno.realPath(join(root, "node_modules")), join(folder, "node_modules"));
    const paths = file === SQL
      ? [...Deno.readDirSync(join(folder, SQL))].map(({ name }) => join(folder, SQL, name)).sort()
      : [join(folder, file)];
    const times = (path: string) => Deno.readTextFileSync(path).split(cut[0]).length - 1;
    const path = paths.findLast((path) => times(path) > 0);
    if (!path || times(path) !== 1) {
      return `NOT TRIED: its text is not once in ${file}`;
    }
    const text = await Deno.readTextFile(path);
    await Deno.writeTextFile(path, text.replace(cut[0], () => cut[1]));
    const { code, signal, stdout } = await new Deno.Command(Deno.execPath(), {
      args: ["test", "-A", "--no-check", `--filter=${filter}`, `tests/${test}`],
      cwd: folder,
      env: { DATABASE_URL_TEST: url, NO_COLOR: "1" },
      stderr: "null",
      signal: AbortSignal.timeout(LIMIT_MS),
    }).output();
    if (signal) return "noticed (its test did not end)";
    const summary = new TextDecoder().decode(stdout).match(/(\d+) passed(?: .*)? \| (\d+) failed/);
    if (!summary || (summary[1] === "0" && summary[2] === "0")) {
      return "NOT TRIED: its test was not found";
    }
    return code === 0 ? "NOT NOTICED" : "noticed";
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

if (import.meta.main) Deno.exit(await main(Deno.args));
