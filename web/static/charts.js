/* global uPlot */
// The dashboard's charts: the line and the workers over time, and why the controller decided so.

const box = document.querySelector("[data-charts]");
const REFRESH_MS = 15_000;
const HEIGHT = 210;
let plots = [];
let data = null;
let paused = false;

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const stepped = uPlot.paths.stepped({ align: 1 });

/** A series of a chart: its lines differ in their dashes too, and not in colour alone. */
const series = (label, colour, more = {}) => ({
  label,
  stroke: token(colour),
  width: 2,
  points: { show: false },
  paths: stepped,
  value: (_, v) => v === null || v === undefined ? "–" : String(v),
  ...more,
});

const two = (n) => String(n).padStart(2, "0");
const timeOf = (s) => {
  const at = new Date(s * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}`;
};

const axis = () => ({
  stroke: token("--soft"),
  grid: { stroke: token("--line"), width: 1 },
  ticks: { stroke: token("--line"), width: 1 },
  font: "12px system-ui, sans-serif",
});

const charts = () => ({
  jobs: {
    columns: ["waiting", "running"],
    series: [
      series("In line", "--signal", { fill: `${token("--signal")}22` }),
      series("Running", "--blue", { dash: [6, 3] }),
    ],
  },
  workers: {
    columns: ["wanted", "replicas", "busy"],
    series: [
      series("Wanted", "--accent", { width: 7, stroke: `${token("--accent")}66` }),
      series("Running", "--violet", { dash: [6, 3] }),
      series("Busy", "--blue", { dash: [2, 3] }),
    ],
  },
});

function why(index) {
  const said = document.querySelector("[data-why]");
  if (!said || index === null || index === undefined || !data) return;
  const at = new Date(data.at_s[index] * 1000).toLocaleTimeString();
  said.textContent = `${at}: ${data.code[index]}. ${data.reasons[data.reason[index]]}`;
}

function draw() {
  for (const plot of plots) plot.destroy();
  plots = Object.entries(charts()).map(([name, chart]) => {
    const place = box.querySelector(`[data-chart="${name}"]`);
    const plot = new uPlot(
      {
        width: place.clientWidth,
        height: HEIGHT,
        cursor: { sync: { key: "looks" }, drag: { x: false, y: false } },
        scales: { y: { range: (_, __, max) => [0, Math.max(4, Math.ceil(max * 1.1))] } },
        axes: [{ ...axis(), values: (_, splits) => splits.map(timeOf) }, {
          ...axis(),
          size: 44,
          incrs: [1, 2, 5, 10, 20, 50, 100, 500, 1000, 5000, 10000, 100000, 1e6],
        }],
        series: [{ label: "At", value: (_, s) => s === null ? "–" : timeOf(s) }, ...chart.series],
        hooks: { setCursor: [(plot) => why(plot.cursor.idx)] },
      },
      columnsOf(chart),
      place,
    );
    plot.columns = chart.columns;
    return plot;
  });
}

const columnsOf = ({ columns }) => [data.at_s, ...columns.map((name) => data[name])];

async function load() {
  try {
    const reply = await fetch(box.dataset.charts);
    if (!reply.ok || reply.redirected) return;
    data = await reply.json();
  } catch {
    return; // away for the moment
  }
  if (plots.length === 0) draw();
  else for (const plot of plots) plot.setData(columnsOf(plot));
}

if (box) {
  load();
  setInterval(() => {
    if (!paused && !document.hidden) load();
  }, REFRESH_MS);
  document.addEventListener("paused", ({ detail }) => paused = detail);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => data && draw());
  new ResizeObserver(() => {
    for (const plot of plots) {
      const width = plot.root.parentElement.clientWidth;
      if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }).observe(box);
}
