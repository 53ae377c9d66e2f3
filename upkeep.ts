/**
 * What has to be done now and then, by the workers all the time and by `deno task recover` once:
 * due jobs put in line, what silent workers left taken back, credits folded, and what is past its time
 * removed. Every step is a bounded statement; whoever dies between two has done the
 * ones before.
 */
import { fold } from "./credits.ts";
import type { Via } from "./db.ts";
import { promote } from "./claims.ts";
import { failUnknownKinds, type Job, recover, type Recovered, sweep } from "./queue.ts";

/** Rows at a time, and how many times at the most: the rest comes the next time. */
const BATCH = 1000;
const MAX_BATCHES = 100;

export interface Times {
  /** Seconds after which a worker that was not heard of is silent. */
  silentS: number;
  unknownKindS: number;
  retentionS: number;
  fileGraceS: number;
}

/** Puts due jobs in line. @returns how many */
export const promoteDue = (db: Via) => inBatches(() => db.run((sql) => promote(sql, BATCH)));

/**
 * Takes back what silent workers left. Only for those who have been in touch with the database for
 * a while: see recover in queue.ts.
 */
export async function takeBack(db: Via, maxCrashes: number): Promise<Recovered[]> {
  const all: Recovered[] = [];
  await inBatches(async () => {
    const some = await db.run((sql) => recover(sql, BATCH, maxCrashes));
    all.push(...some);
    return some.length;
  });
  return all;
}

/**
 * Fails jobs of kinds that nobody knows, and removes what is past its time.
 *
 * @returns `more`: the last batch was a full one too, so there is more to remove
 */
export async function tidyUp(db: Via, o: Times, batch = BATCH) {
  const unknown: Pick<Job, "id" | "kind">[] = await db.run((sql) =>
    failUnknownKinds(sql, o.unknownKindS, o.silentS, batch)
  );
  const removed = { jobs: 0, files: 0, processes: 0 };
  let more = false;
  await inBatches(async () => {
    const gone = await db.run((sql) => sweep(sql, o.retentionS, o.fileGraceS, batch));
    for (const what of ["jobs", "files", "processes"] as const) removed[what] += gone[what];
    const most = Math.max(gone.jobs, gone.files);
    more = most >= batch;
    return most;
  }, batch);
  return { unknown, removed, more };
}

/** Folds the ledger. Balances are right without it: what a locked account has can wait. */
export const foldCredits = (db: Via) => inBatches(() => db.run((sql) => fold(sql, BATCH)));

/** Repeats a step that says how many rows it had, while it had a full batch. @returns all of them */
async function inBatches(step: () => Promise<number>, full = BATCH): Promise<number> {
  let all = 0;
  for (let batch = 0; batch < MAX_BATCHES; batch++) {
    const n = await step();
    all += n;
    if (n < full) break;
  }
  return all;
}
