/** The line and the replicas over time as an SVG, one band for each policy, for light and dark. */
import { Course } from "./world.ts";

export interface Band {
  title: string;
  /** What to say of it at the right. */
  note: string;
  course: Course;
}

const WIDTH = 960;
const LEFT = 64;
const RIGHT = 20;
const TOP = 76;
const LINE_HEIGHT = 92;
const REPLICAS_HEIGHT = 48;
const GAP = 16;
/** Of a band: its title, the line, a gap, the replicas, a gap. */
const BAND = 28 + LINE_HEIGHT + GAP + REPLICAS_HEIGHT + 28;

const STYLE = `
  svg { --paper: #fff; --ink: #1b2530; --quiet: #5a6673; --rule: #e1e5ea; --line: #b3500b; --pool: #1d63c4; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #11161c; --ink: #e8edf2; --quiet: #9fabb8; --rule: #2b343f; --line: #f0a04b; --pool: #6db0ff; }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--quiet); }
  .title { font-size: 17px; font-weight: 600; fill: var(--ink); }
  .name { font-size: 14px; font-weight: 600; fill: var(--ink); }
  .end { text-anchor: end; } .middle { text-anchor: middle; }
  .paper { fill: var(--paper); } .rule { stroke: var(--rule); }
  .line { fill: var(--line); fill-opacity: .3; stroke: var(--line); stroke-width: 1.2; }
  .pool { fill: var(--pool); fill-opacity: .3; stroke: var(--pool); stroke-width: 1.2; }
  .in-line { fill: var(--line); } .in-pool { fill: var(--pool); }`;

/** @param spanS what of the time is shown, from 0 on */
export function picture(title: string, bands: readonly Band[], spanS: number): string {
  const height = TOP + bands.length * BAND + 24;
  const longest = Math.max(
    1,
    ...bands.flatMap(({ course }) => [...visible(course, spanS).waiting]),
  );
  const most = Math.max(1, ...bands.flatMap(({ course }) => [...visible(course, spanS).replicas]));
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" role="img" ` +
    `aria-labelledby="title">`,
    `<title id="title">${escape(title)}</title>`,
    `<style>${STYLE}\n</style>`,
    `<rect class="paper" width="${WIDTH}" height="${height}"/>`,
    `<text class="title" x="${LEFT}" y="32">${escape(title)}</text>`,
    `<text x="${LEFT}" y="54"><tspan class="in-line">■</tspan> jobs waiting, the most at a time, on a scale of tens` +
    `  <tspan class="in-pool">■</tspan> replicas</text>`,
    ...bands.map((band, index) => bandOf(band, TOP + index * BAND, spanS, longest, most)),
    ...timeAxis(spanS, TOP + bands.length * BAND - 12),
    "</svg>\n",
  ].join("\n");
}

function bandOf(
  { title, note, course }: Band,
  top: number,
  spanS: number,
  longest: number,
  most: number,
) {
  const lineBase = top + 28 + LINE_HEIGHT;
  const poolBase = lineBase + GAP + REPLICAS_HEIGHT;
  const ofLine = (n: number) =>
    lineBase - LINE_HEIGHT * Math.log10(1 + n) / Math.log10(1 + longest);
  const ofPool = (n: number) => poolBase - REPLICAS_HEIGHT * n / most;
  const { waiting, replicas } = visible(course, spanS);
  const x = (part: number) => place(Math.min(part * course.partS, spanS), spanS);
  return [
    `<text class="name" x="${LEFT}" y="${top + 16}">${escape(title)}</text>`,
    `<text class="end" x="${WIDTH - RIGHT}" y="${top + 16}">${escape(note)}</text>`,
    ...tens(longest).map((n) => rule(ofLine(n), short(n))),
    ...[...new Set([0, most])].map((n) => rule(ofPool(n), String(n))),
    `<path class="line" d="${steps(waiting, x, ofLine)}"/>`,
    `<path class="pool" d="${steps(replicas, x, ofPool)}"/>`,
  ].join("\n");
}

const visible = ({ waiting, replicas, partS }: Course, spanS: number) => {
  const parts = Math.min(Course.PARTS, Math.max(1, Math.ceil(spanS / partS)));
  return { waiting: waiting.subarray(0, parts), replicas: replicas.subarray(0, parts) };
};
const place = (atS: number, spanS: number) =>
  LEFT + (WIDTH - LEFT - RIGHT) * atS / Math.max(1e-9, spanS);

/** An area under steps. */
function steps(
  values: Float64Array,
  x: (part: number) => number,
  y: (n: number) => number,
): string {
  const path = [`M${fine(x(0))} ${fine(y(0))}`];
  values.forEach((value, part) => {
    if (part === 0 || value !== values[part - 1]) path.push(`H${fine(x(part))}V${fine(y(value))}`);
  });
  return `${path.join("")}H${fine(x(values.length))}V${fine(y(0))}Z`;
}

const rule = (y: number, label: string) =>
  `<path class="rule" d="M${LEFT} ${fine(y)}H${WIDTH - RIGHT}"/>` +
  `<text class="end" x="${LEFT - 8}" y="${fine(y + 4)}">${label}</text>`;

/** 0, 1, 10, 100 … as far as it goes, and the end where that is not close to one of them. */
function tens(longest: number): number[] {
  const marks = [0];
  for (let n = 1; n <= longest; n *= 10) marks.push(n);
  if (longest > 2.5 * marks[marks.length - 1]) marks.push(longest);
  return marks;
}

const UNITS: [string, number, number[]][] = [
  ["s", 1, [1, 2, 5, 10, 20, 30]],
  ["min", 60, [1, 2, 5, 10, 20, 30]],
  ["h", 3600, [1, 2, 3, 6, 12]],
  ["d", 86_400, [1, 2, 5, 10, 20, 50, 100, 200]],
];

/** At most nine marks, in a unit that suits. */
function timeAxis(spanS: number, y: number): string[] {
  const all = UNITS.flatMap(([unit, unitS, every]) =>
    every.map((n) => ({ unit, unitS, stepS: n * unitS }))
  );
  const { unit, unitS, stepS } = all.find(({ stepS }) => spanS / stepS <= 8) ?? all[all.length - 1];
  const marks: string[] = [];
  for (let atS = 0; atS <= spanS; atS += stepS) {
    const x = fine(place(atS, spanS));
    marks.push(`<text class="middle" x="${x}" y="${y + 14}">${atS / unitS} ${unit}</text>`);
  }
  return marks;
}

const fine = (n: number) => String(Math.round(n * 10) / 10);
const short = (n: number) =>
  n >= 1e6 ? `${fine(n / 1e6)}M` : n >= 1000 ? `${fine(n / 1000)}k` : String(n);
const escape = (text: string) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
