/* The Pareto chart above a table of plans: drawn from its rows, and again whenever they change. */

import { pointChart } from "./charts.js";
import { changed } from "./live.js";
import { digits } from "./words.js";

const figure = document.querySelector("[data-pareto]"), axis = document.getElementById("axis");
const AXES = {
  memory: { format: (gib) => `${digits(gib)} GiB`, name: "peak memory", unit: 2 ** 30 },
  devices: { format: (n) => String(Math.round(n * 10) / 10), name: "devices" },
  cost: { format: (n) => n.toPrecision(3), name: "cost per sample" },
};

function draw() {
  const rows = [...document.querySelectorAll("[data-rows] tbody tr")].filter((row) => row.dataset.href);
  const { format, name, unit = 1 } = AXES[axis.value];
  for (const option of axis.options) option.disabled = !rows.some((row) => row.dataset[option.value] !== "");
  const points = rows.filter((row) => row.dataset[axis.value] !== "" && row.dataset.throughput !== "")
    .map((row) => ({ x: Number(row.dataset[axis.value]) / unit, y: Number(row.dataset.throughput), name: row.dataset.name, href: row.dataset.href }));
  pointChart(figure, points, { formats: [format, digits], names: [name, "samples/s"], about: `Samples per second against ${name}; each point is a plan` });
}

if (figure) {
  axis.addEventListener("change", draw);
  changed.addEventListener("change", draw);
  window.addEventListener("resize", draw);
  draw();
}
