/* Timelines are mounted on every figure that names its data: data-timeline (an embedded JSON element's id) or
   data-timeline-src (an address of JSON; there finer blocks are fetched with ?from=&to=&columns=). */

const REFINED_PARTS = 3;

function mount(figure, data, source = null) {
  const began = performance.now(), view = new View(data);
  window.penstockTimeline.views.push(view);
  figure.setAttribute("data-mounted", "");
  const controls = new Controls(figure, view);
  view.controls = controls;
  if (source && data.merged) controls.refine = () => refine(controls, source);
  if (window.penstockTimeline.views.length === 1 && window.location.hash) view.restore(window.location.hash.slice(1));
  controls.press();
  controls.resize();
  view.firstDrawMs = performance.now() - began;
  return view;
}

/** Fetch what is seen, and a little on both sides, in as many columns as there are pixels. */
async function refine(controls, source) {
  const { view, drawing } = controls, { fine, span } = view;
  if (fine && fine.from <= view.from && fine.to >= view.to && fine.columns / (fine.to - fine.from) * span >= drawing.codes.length * 0.6) return;
  const from = Math.max(0, Math.floor(view.from - span)), to = Math.min(view.end, Math.ceil(view.to + span));
  const columns = REFINED_PARTS * drawing.codes.length, address = new URL(source, window.location.href);
  for (const [name, value] of Object.entries({ from, to, columns })) address.searchParams.set(name, String(value));
  controls.fetching?.abort();
  controls.fetching = new AbortController();
  try {
    const answer = await fetch(address, { signal: controls.fetching.signal, headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    const { strips } = await answer.json();
    view.fine = { from, to, columns, strips: strips.map(stripOf) };
    view.changed();
  } catch (error) {
    if (error.name !== "AbortError") controls.say(`finer blocks could not be fetched: ${error.message}`);
  }
}

async function start() {
  for (const figure of document.querySelectorAll("figure[data-timeline]:not([data-mounted])")) {
    mount(figure, JSON.parse(document.getElementById(figure.dataset.timeline).textContent));
  }
  for (const figure of document.querySelectorAll("figure[data-timeline-src]:not([data-mounted])")) {
    const source = figure.dataset.timelineSrc, answer = await fetch(source, { headers: { Accept: "application/json" } });
    if (answer.ok) mount(figure, await answer.json(), source);
    else figure.append(made("p", { class: "fault" }, `The timeline could not be fetched: ${answer.status} ${answer.statusText}`));
  }
}

function restyle() {
  for (const { controls } of window.penstockTimeline.views) {
    controls.drawing.restyle();
    controls.schedule();
  }
}

/** Light, dark, or as the system has it; buttons with data-theme-choice choose, and the choice is kept. */
function themes() {
  const root = document.documentElement, buttons = document.querySelectorAll("[data-theme-choice]");
  const choose = (choice) => {
    if (choice) root.setAttribute("data-theme", choice); else root.removeAttribute("data-theme");
    for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.themeChoice === choice));
    restyle();
  };
  let kept = "";
  try { kept = window.localStorage.getItem("penstock-theme") || ""; } catch { /* pages without storage start from the default */ }
  for (const each of buttons) {
    each.addEventListener("click", () => {
      try { window.localStorage.setItem("penstock-theme", each.dataset.themeChoice); } catch { /* the same */ }
      choose(each.dataset.themeChoice);
    });
  }
  choose(kept);
  for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)", "print"]) {
    window.matchMedia(query).addEventListener("change", () => {
      restyle();
      for (const { controls } of window.penstockTimeline.views) if (query === "print") controls.drawing.draw();
    });
  }
}

/** Escape closes the innermost part of the page that is open around the focus, and leads back to its heading. */
function closing() {
  document.addEventListener("keydown", (event) => {
    const part = event.key === "Escape" && !event.defaultPrevented && event.target.closest?.("details[open]");
    if (!part) return;
    part.open = false;
    part.querySelector("summary").focus();
  });
}

window.penstockTimeline = { views: [], mount, restyle };
themes();
closing();
start().catch((error) => console.error(error));
