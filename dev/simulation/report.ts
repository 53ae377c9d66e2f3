/** What a simulated policy comes to: waits, replica-hours, dollars. */
import { dollarsOf, type Prices } from "../../costs.ts";
import type { Trace } from "./trace.ts";
import type { Result } from "./world.ts";

/** Seconds, hours and dollars rounded as they are shown. */
export interface Report {
  policy: string;
  wait_p50_s: number;
  wait_p95_s: number;
  wait_p99_s: number;
  wait_max_s: number;
  replica_hours: number;
  busy_hours: number;
  dollars: number;
  /** Attempts that a stopped replica ended; attempts and jobs that crashes ended. */
  interrupted: number;
  crashed: number;
  failed: number;
  /** Changes of the count. */
  changes: number;
  ended_h: number;
}

export function reportOf(policy: string, result: Result, prices: Prices): Report {
  const { waitS, replicaS, busyS, interrupted, crashed, failed, changes, endS } = result;
  return {
    policy,
    wait_p50_s: round(quantile(waitS, 0.5), 1),
    wait_p95_s: round(quantile(waitS, 0.95), 1),
    wait_p99_s: round(quantile(waitS, 0.99), 1),
    wait_max_s: round(quantile(waitS, 1), 1),
    replica_hours: round(replicaS / 3600, 1),
    busy_hours: round(busyS / 3600, 1),
    dollars: round(dollarsOf(replicaS, busyS, prices), 2),
    ...{ interrupted, crashed, failed, changes, ended_h: round(endS / 3600, 1) },
  };
}

/** The smallest value that this share of all is not above; 0 when there are none. */
export function quantile(ascending: Float64Array, share: number): number {
  if (ascending.length === 0) return 0;
  return ascending[Math.max(0, Math.ceil(share * ascending.length) - 1)];
}

export const round = (value: number, digits: number) => Number(value.toFixed(digits));

const COLUMNS: [string, (report: Report) => string][] = [
  ["wait p50", (r) => seconds(r.wait_p50_s)],
  ["p95", (r) => seconds(r.wait_p95_s)],
  ["p99", (r) => seconds(r.wait_p99_s)],
  ["replica-h", (r) => r.replica_hours.toFixed(1)],
  ["busy-h", (r) => r.busy_hours.toFixed(1)],
  ["dollars", (r) => r.dollars.toFixed(2)],
  ["interrupted", (r) => String(r.interrupted)],
  ["crashed", (r) => String(r.crashed)],
  ["changes", (r) => String(r.changes)],
];
const seconds = (s: number) => `${s.toFixed(1)} s`;

/** Rows as lines of aligned columns: texts, whose columns are named, to the left, numbers to the right. */
export function aligned(rows: string[][], texts = [0]): string[] {
  const widths = rows[0].map((_, column) => Math.max(...rows.map((row) => row[column].length)));
  const cellOf = (cell: string, i: number) =>
    texts.includes(i) ? cell.padEnd(widths[i]) : cell.padStart(widths[i]);
  return rows.map((row) => row.map(cellOf).join("  ").trimEnd());
}

/** The reports as text. */
export function table({ name, arrivalS, runS, forS, waitS }: Trace, reports: Report[]): string {
  const rows = [["policy", ...COLUMNS.map(([title]) => title)]];
  for (const report of reports) rows.push([report.policy, ...COLUMNS.map(([, of]) => of(report))]);
  const lines = aligned(rows);
  const meanS = runS.reduce((sum, s) => sum + s, 0) / Math.max(1, runS.length);
  const head = `${arrivalS.length} jobs in ${(forS / 3600).toFixed(1)} h (${name}), ` +
    `${seconds(meanS)} each`;
  const measured = waitS
    ? [
      `as it was: wait p50 ${seconds(quantile(waitS, 0.5))}, p95 ${
        seconds(quantile(waitS, 0.95))
      }, p99 ${seconds(quantile(waitS, 0.99))}`,
    ]
    : [];
  const late = reports.filter(({ ended_h }) => ended_h > 1.01 * forS / 3600 + 1)
    .map(({ policy, ended_h }) => `${policy} ended its last job after ${ended_h} h`);
  return [head, ...measured, "", ...lines, ...late].join("\n");
}
