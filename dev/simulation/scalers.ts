/** Policies to compare: Siding's own, the one of Railway's guide, and pools that do not change. */
import { decide, type Look, type Memory, type Policy } from "../../policy.ts";

/** Sets the count of replicas, one look after another. One is for one run: it remembers. */
export interface Scaler {
  name: string;
  /** Seconds between its looks. */
  lookS: number;
  /** The count at the start. */
  initial: number;
  /** @returns the count that is to be configured */
  look(seen: Look): number;
}

/** The controller's own decisions. */
export function siding(name: string, policy: Policy, lookS: number): Scaler {
  let memory: Memory | null = null;
  return {
    ...{ name, lookS, initial: policy.min },
    look(seen) {
      const decision = decide(seen, memory, policy);
      memory = decision.memory;
      return decision.wanted ?? seen.platform!.configured;
    },
  };
}

/** Always as many. */
export const fixed = (count: number): Scaler => ({
  ...{ name: `fixed ${count}`, lookS: 3600, initial: count },
  look: () => count,
});

/** The guide looks once a minute, and steps down no more often than every five. */
const GUIDE_LOOK_S = 60;
const GUIDE_DOWN_S = 300;

/**
 * The policy of Railway's guide "Autoscale a Service Horizontally Based on Load" (July 2026), with
 * jobs, waiting and running, as its load: up at once in proportion to the load of a replica, down by
 * one. It does not ask whether the replica that goes is busy.
 *
 * @param load jobs
 * @param target jobs per replica that it aims at
 */
export function guideCount(
  current: number,
  load: number,
  target: number,
  sinceDownS: number,
  { min, max }: Pick<Policy, "min" | "max">,
): number {
  // The guide's (load / current) / target * current, without its rounding.
  const desired = Math.max(min, Math.min(max, Math.ceil(load / target)));
  if (desired >= current) return desired;
  return sinceDownS < GUIDE_DOWN_S ? current : current - 1;
}

export function guide(limits: Pick<Policy, "min" | "max">): Scaler {
  let downS = -Infinity;
  return {
    ...{ name: "Railway's guide", lookS: GUIDE_LOOK_S, initial: limits.min },
    look({ at_ms, queue, platform }) {
      const current = platform!.configured;
      const load = queue!.work.reduce((sum, row) => sum + row.queued + row.running, 0);
      const target = queue!.workers.concurrency;
      const next = guideCount(current, load, target, at_ms / 1000 - downS, limits);
      if (next < current) downS = at_ms / 1000;
      return next;
    },
  };
}
