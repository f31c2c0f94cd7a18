/* A run as it trains: charts of loss and time per step from the numbers that its page carries, and logs of its ranks. */

import { lineChart } from "./charts.js";
import { changed } from "./live.js";
import { digits, duration, made } from "./words.js";

const page = document.getElementById("run");
const number = (value) => Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 0.01) ? value.toExponential(2) : digits(value);

function draw() {
  const data = page.querySelector("[data-losses]").dataset;
  const losses = JSON.parse(data.losses), times = JSON.parse(data.times);
  const evaluations = JSON.parse(data.evaluations).filter(([, loss]) => loss !== null);
  const step = (value) => String(Math.round(value * 10) / 10), predicted = Number(data.predicted);
  const last = times.at(-1)?.[0] ?? 0;
  lineChart(page.querySelector('[data-chart="loss"]'), [{ points: losses, kind: "one" }, { points: evaluations, kind: "two" }],
    { formats: [step, number], names: ["step", "loss"], about: "Loss of each step" });
  lineChart(page.querySelector('[data-chart="times"]'),
    [{ points: times, kind: "one" }, { points: times.length ? [[times[0][0], predicted], [last, predicted]] : [], kind: "two" }],
    { formats: [step, duration], names: ["step", "time"], about: "Measured time of each step, and the predicted one" });
}

const log = page.querySelector("[data-log]");

async function showLog(form) {
  const given = new FormData(form), query = new URLSearchParams({ rank: given.get("rank") });
  if (given.get("generation")) query.set("generation", given.get("generation"));
  log.hidden = false;
  log.replaceChildren(made("p", { class: "hint" }, "asking its agent …"));
  const answer = await fetch(`/v1/runs/${encodeURIComponent(page.dataset.run)}/logs?${query}`);
  const logEnd = await answer.json();
  log.replaceChildren(answer.ok ? made("p", { class: "hint" }, `${logEnd.path} on ${logEnd.agent}`) : made("p", { class: "fault" }, logEnd.detail),
    ...(answer.ok ? [made("pre", {}, logEnd.text || "(nothing written yet)")] : []));
}

page.querySelector("[data-logs]").addEventListener("submit", (event) => {
  event.preventDefault();
  showLog(event.target).catch((error) => log.replaceChildren(made("p", { class: "fault" }, `no answer: ${error.message}`)));
});
changed.addEventListener("change", draw);
window.addEventListener("resize", draw);
draw();
