/** Siding as a contender: what enqueues. What works is worker.ts itself. */
import { connect } from "../../db.ts";
import { migrate } from "../../migrate.ts";
import { enqueue } from "../../queue.ts";
import { type Contender, serve } from "./contender.ts";

/** Jobs a statement: more gain nothing. */
const BATCH = 5000;

const contender: Contender = {
  install: async (url) => void await migrate(url),
  open(url) {
    const sql = connect(url, { max: 10 });
    const job = { kind: "noop", payload: {} };
    return Promise.resolve({
      async bulk(jobs) {
        for (let left = jobs; left > 0; left -= BATCH) {
          await enqueue(sql, Array.from({ length: Math.min(left, BATCH) }, () => job));
        }
      },
      one: (tell = false) => enqueue(sql, [{ kind: "noop", payload: { tell } }]),
      inTransaction: () =>
        sql.begin(async (tx) => {
          await tx`insert into bench_rows (note) values (${"a row of the caller's own"})`;
          await enqueue(tx, [job]);
        }),
      close: () => sql.end({ timeout: 1 }),
    });
  },
};

await serve(contender, Deno.args[0], Deno.args[1]);
