/**
 * Bars and lines as one SVG picture, legible in light and in dark. A picture is a title, a line below
 * it, and charts one under the other.
 */

/** Horizontal bars in groups: a group for each thing measured, a bar for each contender. */
export interface Bars {
  kind: "bars";
  title: string;
  /** What the values are, such as "jobs a second". */
  unit: string;
  groups: { label: string; bars: { series: string; value: number | null }[] }[];
  /** Tens instead of a scale from 0, for values that are far apart. */
  log?: boolean;
}

/** Lines through points. */
export interface Lines {
  kind: "lines";
  title: string;
  /** What is along each axis. */
  x: { label: string; log?: boolean };
  y: { label: string; log?: boolean };
  series: { name: string; points: [x: number, y: number][] }[];
}

const WIDTH = 960;
const LEFT = 200;
const RIGHT = 96;
const TOP = 64;
const BAR = 16;
const LINES_HEIGHT = 260;
const LINES_LEFT = 72;
const COLOURS = 8;

const STYLE = `
  svg { --paper: #fff; --ink: #1b2530; --quiet: #5a6673; --rule: #e1e5ea;
    --c0: #b3500b; --c1: #1d63c4; --c2: #2c7a4b; --c3: #8a3ea8; --c4: #a8741a; --c5: #0f7d8c;
    --c6: #c02f5a; --c7: #66717d; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #11161c; --ink: #e8edf2; --quiet: #9fabb8; --rule: #2b343f;
      --c0: #f0a04b; --c1: #6db0ff; --c2: #6fcf97; --c3: #cf9bea; --c4: #e5c25d; --c5: #5fd0dd;
      --c6: #ff8fae; --c7: #aab4bf; }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--quiet); }
  .title { font-size: 17px; font-weight: 600; fill: var(--ink); }
  .name { font-size: 14px; font-weight: 600; fill: var(--ink); }
  .ink { fill: var(--ink); }
  .end { text-anchor: end; } .middle { text-anchor: middle; }
  .paper { fill: var(--paper); } .rule { stroke: var(--rule); fill: none; }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
${
  Array.from({ length: COLOURS }, (_, n) =>
    `  .f${n} { fill: var(--c${n}); } .s${n} { stroke: var(--c${n}); }`).join(
      "\n",
    )
}`;

/**
 * A picture of charts, one under the other. A series has the same colour in all of them.
 *
 * @param note one line below the title, such as the machine
 */
export function picture(
  title: string,
  note: string,
  charts: readonly (Bars | Lines)[],
): string {
  const series = [...new Set(charts.flatMap(seriesOf))];
  const parts: string[] = [];
  let y = TOP;
  for (const chart of charts) {
    const colours = (name: string) => series.indexOf(name) % COLOURS;
    const drawn = chart.kind === "bars" ? barsOf(chart, y, colours) : linesOf(chart, y, colours);
    parts.push(...drawn.parts);
    y = drawn.bottom + 28;
  }
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${y}" role="img" ` +
    `aria-labelledby="title">`,
    `<title id="title">${escape(title)}</title>`,
    `<style>${STYLE}\n</style>`,
    `<rect class="paper" width="${WIDTH}" height="${y}"/>`,
    `<text class="title" x="24" y="32">${escape(title)}</text>`,
    `<text x="24" y="52">${escape(note)}</text>`,
    ...parts,
    "</svg>\n",
  ].join("\n");
}

type Colours = (series: string) => number;
interface Drawn {
  parts: string[];
  bottom: number;
}

const seriesOf = (chart: Bars | Lines) =>
  chart.kind === "bars"
    ? chart.groups.flatMap(({ bars }) => bars.map(({ series }) => series))
    : chart.series.map(({ name }) => name);

/** The title of a chart, and its series with their colours, in as many rows as they need. */
function head(
  title: string,
  names: string[],
  top: number,
  colours: Colours,
): Drawn {
  const parts = [
    `<text class="name" x="24" y="${top + 22}">${escape(title)}</text>`,
  ];
  let [x, y] = [24, top + 44];
  for (const name of names) {
    const width = 26 + name.length * 6.6;
    if (x + width > WIDTH - 24) [x, y] = [24, y + 18];
    parts.push(
      `<rect class="f${colours(name)}" x="${fine(x)}" y="${
        y - 10
      }" width="10" height="10" rx="2"/>` +
        `<text x="${fine(x + 16)}" y="${y}">${escape(name)}</text>`,
    );
    x += width + 8;
  }
  return { parts, bottom: y + 14 };
}

function barsOf(chart: Bars, top: number, colours: Colours): Drawn {
  const { parts, bottom } = head(
    `${chart.title}, ${chart.unit}`,
    [...new Set(seriesOf(chart))],
    top,
    colours,
  );
  const values = chart.groups.flatMap(({ bars }) => bars.map(({ value }) => value ?? 0));
  const scale = scaleOf(values, LEFT, WIDTH - RIGHT, chart.log ?? false, true);
  const drawn: string[] = [];
  let y = bottom;
  for (const { label, bars } of chart.groups) {
    y += 8;
    const middle = y + bars.length * BAR / 2 + 4;
    drawn.push(
      `<text class="end ink" x="${LEFT - 12}" y="${fine(middle)}">${escape(label)}</text>`,
    );
    for (const { series, value } of bars) {
      const width = value === null ? 0 : Math.max(1, scale.at(value) - LEFT);
      const text = value === null ? "not measured" : short(value);
      drawn.push(
        `<rect class="f${colours(series)}" x="${LEFT}" y="${y + 2}" width="${fine(width)}" ` +
          `height="${BAR - 4}" rx="2"><title>${escape(`${series}: ${text}`)}</title></rect>` +
          `<text x="${fine(LEFT + width + 6)}" y="${y + BAR - 4}">${text}</text>`,
      );
      y += BAR;
    }
    y += 8;
  }
  const rules = scale.marks.map((mark) =>
    `<path class="rule" d="M${fine(scale.at(mark))} ${bottom}V${y}"/>` +
    `<text class="middle" x="${fine(scale.at(mark))}" y="${y + 16}">${short(mark)}</text>`
  );
  return { parts: [...parts, ...rules, ...drawn], bottom: y + 16 };
}

function linesOf(chart: Lines, top: number, colours: Colours): Drawn {
  const { parts, bottom } = head(chart.title, seriesOf(chart), top, colours);
  const points = chart.series.flatMap(({ points }) => points);
  const low = bottom + 20 + LINES_HEIGHT;
  const x = scaleOf(
    points.map(([x]) => x),
    LINES_LEFT,
    WIDTH - 32,
    chart.x.log ?? false,
    false,
  );
  const y = scaleOf(
    points.map(([, y]) => y),
    low,
    bottom + 20,
    chart.y.log ?? false,
    true,
  );
  return {
    parts: [
      ...parts,
      `<text x="24" y="${bottom + 8}">${escape(chart.y.label)}</text>`,
      ...y.marks.map((mark) =>
        `<path class="rule" d="M${LINES_LEFT} ${fine(y.at(mark))}H${WIDTH - 32}"/>` +
        `<text class="end" x="${LINES_LEFT - 8}" y="${fine(y.at(mark) + 4)}">${short(mark)}</text>`
      ),
      ...x.marks.map((mark) =>
        `<text class="middle" x="${fine(x.at(mark))}" y="${low + 18}">${short(mark)}</text>`
      ),
      ...chart.series.map(({ name, points }) => lineOf(name, points, x, y, colours(name))),
      `<text class="middle" x="${(LINES_LEFT + WIDTH - 32) / 2}" y="${low + 38}">${
        escape(chart.x.label)
      }</text>`,
    ],
    bottom: low + 38,
  };
}

function lineOf(
  name: string,
  points: [number, number][],
  x: Scale,
  y: Scale,
  colour: number,
) {
  const places = points.map(([px, py]) => [fine(x.at(px)), fine(y.at(py))]);
  const dots = points.length > 60
    ? []
    : places.map(([px, py], index) =>
      `<circle class="f${colour}" cx="${px}" cy="${py}" r="3"><title>${
        escape(
          `${name}: ${short(points[index][0])}, ${short(points[index][1])}`,
        )
      }</title></circle>`
    );
  const path = places.map(([px, py], index) => `${index ? "L" : "M"}${px} ${py}`).join("");
  return `<path class="line s${colour}" d="${path}"/>${dots.join("")}`;
}

interface Scale {
  at: (value: number) => number;
  marks: number[];
}

/** From the values to places between `from` and `to`: linear, or by tens, where 0 is at the start. */
function scaleOf(
  values: number[],
  from: number,
  to: number,
  log: boolean,
  fromZero: boolean,
): Scale {
  const shown = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  const most = Math.max(...shown, log ? Number.MIN_VALUE : 0);
  const least = Math.min(...shown);
  if (shown.length === 0 || most <= 0) return { at: () => from, marks: [0] };
  if (log) {
    const low = fromZero ? 10 ** Math.floor(Math.log10(least) - 1e-9) : least;
    const high = Math.max(most, low * 10);
    const at = (value: number) =>
      value <= low ? from : from + (to - from) * Math.log(value / low) / Math.log(high / low);
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const count = Math.floor(Math.log10(high) + 1e-9) - first + 1;
    return {
      at,
      marks: Array.from(
        { length: Math.max(0, count) },
        (_, n) => 10 ** (first + n),
      ),
    };
  }
  const start = fromZero ? Math.min(0, least) : least;
  const span = most - start || 1;
  const step = stepOf(span / 5);
  const first = Math.ceil(start / step);
  const count = Math.floor(most / step) - first + 1;
  return {
    at: (value) => from + (to - from) * (value - start) / span,
    marks: Array.from({ length: count }, (_, n) => (first + n) * step),
  };
}

/** The 1, 2 or 5 of some ten that is not below `least`. */
function stepOf(least: number): number {
  const ten = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * ten).find((step) => step >= least * (1 - 1e-9))!;
}

const fine = (n: number) => String(Math.round(n * 10) / 10);

/** A value as it is shown: three digits that count, thousands as k, millions as M. */
export function short(n: number): string {
  const digits = (value: number) => String(Number(value.toPrecision(3)));
  const size = Math.abs(n);
  if (size >= 999_500) return `${digits(n / 1e6)}M`;
  return size >= 9995 ? `${digits(n / 1000)}k` : digits(n);
}

const escape = (text: string) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
