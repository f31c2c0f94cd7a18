/* A job as it lives: server-sent events into the chart, the figures and the table; its state from the page itself. */

import { lineChart } from "./charts.js";
import { duration, made, percent } from "./words.js";

const page = document.getElementById("job");
const chart = page.querySelector("[data-chart]"), table = page.querySelector("[data-events]");
const figure = (name) => page.querySelector(`[data-figure="${name}"]`);
const curve = { first: null, begun: 0, last: null, best: [], bound: [], ended: page.dataset.active === "no" };

table.replaceChildren();

function take(event) {
  const at = Date.parse(event.at);
  curve.first ??= at;
  curve.last = at;
  const after = (at - curve.first) * 1e6, data = event.data;
  if (data.state === "running" && !curve.best.length) curve.begun = after;
  if (data.incumbent_ns != null) curve.best.push([after, data.incumbent_ns]);
  if (data.bound_ns != null) curve.bound.push([after, data.bound_ns]);
  if (data.incumbent_ns != null) figure("incumbent").textContent = duration(data.incumbent_ns);
  if (data.bound_ns != null) figure("bound").textContent = duration(data.bound_ns);
  if (data.gap != null) figure("gap").textContent = percent(data.gap);
  const what = data.state ?? (data.planner ? "better plan" : data.working ? "bound" : event.kind);
  const who = data.working ?? (data.planner ? [`${data.planner}${data.schedule ? `, ${data.schedule}` : ""}`] : []);
  const working = page.querySelector("[data-working]");
  if (working && data.working?.length) working.textContent = `at work: ${data.working.join(", ")}`;
  const number = (text) => made("td", { class: "number" }, text);
  table.append(made("tr", {}, number(duration(after)), made("td", {}, data.why ? `${what}: ${data.why}` : what),
    number(data.incumbent_ns == null ? "–" : duration(data.incumbent_ns)), number(data.bound_ns == null ? "–" : duration(data.bound_ns)),
    number(data.gap == null ? "–" : percent(data.gap)), made("td", {}, who.join(", "))));
}

let pending = false;
function schedule() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

function draw() {
  const now = curve.ended ? curve.last : Math.max(curve.last ?? 0, Date.now());
  lineChart(chart, [
    { points: curve.bound, kind: "two", stepped: true },
    { points: curve.best, kind: "one", stepped: true },
  ], { formats: [duration, duration], names: ["since it was submitted", "time per global batch"],
    about: "Best plan so far and proven lower bound over time", from: curve.begun, until: curve.first === null ? 0 : Math.min(now - curve.first, 3.6e6) * 1e6 });
}

/** The parts of the page that name the state, as the service renders them now. */
async function renew() {
  const answer = await fetch(window.location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const name of ["actions", "state"]) {
    page.querySelector(`[data-part="${name}"]`).replaceChildren(...fresh.querySelector(`[data-part="${name}"]`).childNodes);
  }
  for (const name of ["incumbent", "bound", "gap", "time"]) {
    const [old, now] = [figure(name), fresh.querySelector(`[data-figure="${name}"]`)];
    old.textContent = now.textContent;
    for (const key of ["started", "finished"]) if (key in now.dataset) old.dataset[key] = now.dataset[key];
  }
  document.title = fresh.title;
  curve.ended = fresh.getElementById("job").dataset.active === "no";
  page.dataset.active = curve.ended ? "no" : "yes";
}

window.addEventListener("resize", schedule);

setInterval(() => {
  const { started, finished } = figure("time").dataset;
  if (curve.ended || !started || finished) return;
  figure("time").textContent = duration(Math.max(0, Date.now() - Date.parse(started)) * 1e6);
  schedule();
}, 500);

const source = new EventSource(`/v1/jobs/${encodeURIComponent(page.dataset.job)}/events`);
for (const kind of ["state", "progress", "log"]) {
  source.addEventListener(kind, (message) => {
    const event = JSON.parse(message.data);
    take(event);
    schedule();
    if (kind === "state") renew().then(schedule);
    if (["succeeded", "failed", "cancelled"].includes(event.data.state)) source.close();
  });
}
