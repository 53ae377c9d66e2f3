/** The faults of the chaos tool: drawn from a seed, all of them before the first is applied. */

export const faultKinds = [
  /** SIGKILL to a worker. */
  "kill",
  /** SIGTERM to a worker, as a deploy. */
  "term",
  /** SIGSTOP to a worker, for longer than the lease, then SIGCONT. */
  "freeze",
  /** SIGSTOP for less than the lease. */
  "hiccup",
  /** All connections of a worker closed, new ones refused for a while. */
  "cut",
  /** All connections of a worker closed. */
  "reset",
  /** What a worker and Postgres say to each other swallowed, for a while; the connections stay silent. */
  "silence",
  /** Postgres stopped as by an administrator, and started again. */
  "restart",
  /** Postgres ended as by pg_ctl -m immediate, and started again after a while. */
  "crash",
  /** How the paid service treats the next requests. */
  "mood",
  /** The paid service out of reach for a while. */
  "unreachable",
] as const;
export type FaultKind = typeof faultKinds[number];

export interface Fault {
  atMs: number;
  kind: FaultKind;
  /** Which worker. */
  slot: number;
  /** From 0 to 1: how long, or which mood. */
  size: number;
}

/** Numbers from 0 to 1 that the seed alone decides (mulberry32). */
export function random(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Each kind comes as often as the others; the first round brings each once, in an order of its own. */
export function drawFaults(draw: () => number, forMs: number, slots: number): Fault[] {
  const faults: Fault[] = [];
  let bag: FaultKind[] = [];
  for (let atMs = 1500; atMs < forMs; atMs += 300 + draw() * 1700) {
    if (bag.length === 0) bag = [...faultKinds];
    const [kind] = bag.splice(Math.floor(draw() * bag.length), 1);
    faults.push({ atMs: Math.round(atMs), kind, slot: Math.floor(draw() * slots), size: draw() });
  }
  return faults;
}
