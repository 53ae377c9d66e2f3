/** The process of one peer: `deno run -A peer.ts PEER COMMAND JSON`. See dev/bench/contender.ts. */
import { type Contender, serve } from "../../dev/bench/contender.ts";

const [peer, command, order] = Deno.args;
const peers: Record<string, () => Promise<{ contender: Contender }>> = {
  "graphile-worker": () => import("./graphile_worker.ts"),
  "pg-boss": () => import("./pg_boss.ts"),
  "dbos": () => import("./dbos.ts"),
};
await serve((await peers[peer]()).contender, command, order);
