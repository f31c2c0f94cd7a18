/* Buttons, keys and pointers of one timeline. Whatever a pointer can do a key can do, and buttons say so. */

const HELP = "Drag, Shift + wheel or ← → move; Ctrl + wheel, pinch, double click or + − zoom; 0 shows everything, Home and End its ends. "
  + "↑ ↓ choose a device, n p its next and previous block, [ ] what a block waited for and what waits for it, Enter zooms to it, Escape lets go. "
  + "Shift + drag, or m at two blocks, measures. c critical path, i idle reasons, k communication, l links, g groups, o opens and closes the chosen device's group, / search.";
const LAYERS = { path: ["Critical path", "c"], idle: ["Idle reasons", "i"], communication: ["Communication", "k"], links: ["Links", "l"] };

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (typeof value === "function") element.addEventListener(name, value); else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function button(words, title, act, pressed) {
  const attributes = { type: "button", title, click: act };
  if (pressed !== undefined) attributes["aria-pressed"] = String(pressed);
  return made("button", attributes, words);
}

class Controls {
  constructor(figure, view) {
    this.figure = figure;
    this.view = view;
    const name = view.data.title, id = figure.id || `timeline-${document.querySelectorAll("figure[data-mounted]").length}`;
    const canvas = (kind) => made("canvas", { class: kind, "aria-hidden": "true" });
    this.parts = {
      figure, main: canvas("lanes"), map: canvas("map"), memory: canvas("memory"), spacer: made("div", { class: "spacer" }),
      about: made("p", { class: "about", role: "status", "aria-live": "polite" }), tip: made("div", { class: "tip", "aria-hidden": "true", hidden: true }),
      memoryWords: made("p", { class: "hint memory-words" }),
    };
    this.parts.scroller = made("div", {
      class: "lanes-scroller", tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": `${name}: ${view.data.lanes.length} devices, ${view.data.num_blocks} blocks, ${duration(view.end)}`, "aria-describedby": `${id}-help`,
    }, this.parts.main, this.parts.spacer);
    this.help = made("figcaption", { id: `${id}-help` }, made("details", {}, made("summary", {}, "Keys and pointers"), HELP));
    this.drawing = new Drawing(view, this.parts);
    this.build();
    this.listen();
    view.changed = () => this.schedule();
  }

  build() {
    const { view, figure, parts } = this;
    this.layerButtons = {};
    const layers = Object.keys(LAYERS).filter((name) => this.has(name)).map((name) => {
      const [words, key] = LAYERS[name];
      return this.layerButtons[name] = button(words, `${words} (${key})`, () => this.toggle(name), view.layers[name]);
    });
    this.search = made("input", { type: "search", placeholder: "micro-batch", size: "9", inputmode: "numeric", "aria-label": "Find a micro-batch", input: () => this.find() });
    this.group = new Set(view.data.lanes.map((lane) => lane.node)).size > 1 ? button("By node", "Group lanes by node, or in the order of stages (g)", () => this.regroup(), view.rows.byNode) : null;
    this.both = view.rows.measured ? button("Measured", "Measured blocks below the predicted ones", () => this.showMeasured(), true) : null;
    const bar = made("div", { class: "timeline-bar", role: "toolbar", "aria-label": "Timeline" },
      button("−", "Zoom out (−)", () => view.zoom(2)), button("+", "Zoom in (+)", () => view.zoom(0.5)), button("All", "Show everything (0)", () => view.everything()),
      ...layers, ...[this.group, this.both, this.search].filter(Boolean), button("Share", "Copy the address of this view", () => this.share()));
    const note = view.data.merged ? made("p", { class: "hint" }, `Its ${counted(view.data.num_blocks)} blocks are merged: each column shows what fills most of it.`) : "";
    figure.replaceChildren(bar, this.legend(), parts.map, parts.scroller, parts.about, parts.memory, parts.memoryWords, note, this.help, parts.tip);
  }

  has(layer) {
    const { data } = this.view;
    if (layer === "path") return data.path.length > 0;
    if (layer === "idle") return /[<>tgsom]/.test(data.kinds);
    return /[fba]/.test(data.kinds) && !(layer === "links" && data.merged);
  }

  /** A button for each kind that there is; it hides and shows the kind. */
  legend() {
    const { view } = this, list = made("ul", { class: "legend" });
    [...KINDS].forEach((letter, kind) => {
      if (!view.data.kinds.includes(letter)) return;
      const toggle = button("", `Hide or show: ${view.data.names[letter]}`, () => {
        view.shown[kind] ^= 1;
        toggle.setAttribute("aria-pressed", String(Boolean(view.shown[kind])));
        this.drawing.overview = null;
        view.changed();
      }, true);
      toggle.append(made("i", { class: `k-${VARIABLES[letter] || letter}` }), view.data.names[letter]);
      list.append(made("li", { class: kind >= MOVING ? "idle-kind" : false }, toggle));
    });
    list.classList.toggle("with-idle", view.layers.idle);
    this.kinds = list;
    return list;
  }

  toggle(name) {
    if (!this.layerButtons[name]) return;
    const { view } = this;
    view.layers[name] = !view.layers[name];
    this.press();
    this.say(`${LAYERS[name][0]} ${view.layers[name] ? "shown" : "hidden"}`);
    view.changed();
  }

  press() {
    for (const [name, each] of Object.entries(this.layerButtons)) each.setAttribute("aria-pressed", String(this.view.layers[name]));
    this.kinds.classList.toggle("with-idle", this.view.layers.idle);
    if (this.view.only >= 0) this.search.value = String(this.view.only);
  }

  regroup() {
    if (!this.group) return;
    this.view.rows.group(!this.view.rows.byNode);
    this.group.setAttribute("aria-pressed", String(this.view.rows.byNode));
    this.resize();
  }

  /** Open or close the group of the chosen device. */
  open() {
    const { rows, data, lane } = this.view, name = rows.groupOf(data.lanes[lane]);
    if (!name) return;
    rows.fold(name);
    this.resize();
    this.reveal();
    this.say(`the group of ${data.lanes[lane].device} is ${rows.folded.has(name) ? "closed" : "open"}`);
  }

  showMeasured() {
    const { rows } = this.view;
    rows.showsMeasured = !rows.showsMeasured;
    rows.place();
    this.both.setAttribute("aria-pressed", String(rows.showsMeasured));
    this.resize();
  }

  find() {
    const text = this.search.value.trim(), number = /^\d+$/.test(text) ? Number(text) : -1;
    const count = this.view.search(number);
    this.say(number < 0 ? "" : count ? `micro-batch ${number}: ${count} blocks` : `no micro-batch ${text}; there are 0 to ${this.view.data.num_micro_batches - 1}`);
  }

  async share() {
    this.remember();
    try {
      await navigator.clipboard.writeText(window.location.href);
      this.say("the address of this view is copied");
    } catch {
      this.say(`copy the address of the page: it ends with ${window.location.hash}`);
    }
  }

  say(words) { this.parts.about.textContent = words; }

  describe() {
    const { view } = this;
    this.say(view.selected ? view.words(view.selected).join("; ") : `${view.data.lanes[view.lane].device} chosen`);
  }

  schedule() {
    if (this.pending) return;
    this.pending = true;
    window.requestAnimationFrame(() => this.frame());
  }

  frame() {
    this.pending = false;
    this.drawing.draw();
    clearTimeout(this.soon);
    this.soon = setTimeout(() => { this.remember(); this.refine?.(); }, 250);
  }

  resize() {
    this.drawing.resize();
    this.drawing.draw();
  }

  /** Only the first timeline of a page is part of its address. */
  remember() {
    if (this.view !== window.penstockTimeline.views[0]) return;
    const hash = this.view.hash;
    if (hash !== window.location.hash.slice(1)) window.history.replaceState(window.history.state, "", hash ? `#${hash}` : window.location.pathname + window.location.search);
  }

  key(event) {
    const { view } = this, moved = (act) => () => { act(); this.reveal(); this.describe(); };
    const actions = {
      ArrowLeft: () => view.pan(-0.2), ArrowRight: () => view.pan(0.2), ArrowUp: moved(() => view.chooseLane(-1)), ArrowDown: moved(() => view.chooseLane(1)),
      "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2), 0: () => view.everything(),
      Home: () => view.show(0, view.span), End: () => view.show(view.end - view.span, view.span),
      n: moved(() => view.step(1)), p: moved(() => view.step(-1)), "[": moved(() => view.follow(-1)), "]": moved(() => view.follow(1)),
      Enter: () => view.zoomToSelected(), m: () => { view.mark(); this.tellMeasure(); },
      Escape: () => { view.measure = null; view.only = -1; this.search.value = ""; view.select(null); this.say(""); },
      c: () => this.toggle("path"), i: () => this.toggle("idle"), k: () => this.toggle("communication"), l: () => this.toggle("links"),
      g: () => this.regroup(), o: () => this.open(), "/": () => this.search.focus(),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
  }

  tellMeasure() {
    const { measure } = this.view;
    if (measure) this.say(measure[0] === measure[1] ? `measuring from ${duration(measure[0])}` : `${duration(measure[1] - measure[0])} from ${duration(measure[0])} to ${duration(measure[1])}`);
  }

  /** Scroll so far that the chosen lane is seen. */
  reveal() {
    const row = this.view.rows.rowOf.get(this.view.lane), { scroller } = this.parts, room = this.drawing.height - AXIS_PX;
    if (!row) return;
    if (row.y < scroller.scrollTop) scroller.scrollTop = row.y;
    else if (row.y + row.height > scroller.scrollTop + room) scroller.scrollTop = row.y + row.height - room;
  }

  listen() {
    const { view, parts, drawing } = this;
    parts.scroller.addEventListener("keydown", (event) => this.key(event));
    parts.scroller.addEventListener("scroll", () => this.schedule(), { passive: true });
    this.search.addEventListener("keydown", (event) => { if (event.key === "Escape" || event.key === "Enter") parts.scroller.focus(); });
    parts.scroller.addEventListener("wheel", (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
      if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(event.deltaY / 300), drawing.time(this.place(event)[0]));
      else if (sideways) view.pan(sideways / 1000);
      else return;
      event.preventDefault();
    }, { passive: false });
    parts.main.addEventListener("dblclick", (event) => view.zoom(0.4, drawing.time(this.place(event)[0])));
    new Pointers(this);
    overviewPointer(this);
    parts.memory.addEventListener("pointermove", (event) => { view.pointed = drawing.time(event.offsetX); view.changed(); });
    parts.memory.addEventListener("pointerleave", () => { view.pointed = null; view.changed(); });
    new ResizeObserver(() => { if (parts.scroller.clientWidth !== drawing.width) this.resize(); }).observe(parts.figure);
  }

  place(event) {
    const box = this.parts.main.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

