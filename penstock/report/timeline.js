"use strict";
/* Draws one timeline with its memory curve on two canvases: wheel and drag, pinch-free keyboard, hover, search for
   the neighbouring block. Blocks of a strip are sorted by start, so a view finds its first block by bisection. */

const LANE_LABEL_PX = 150;
const AXIS_PX = 22;
const MEMORY_PX = 150;

function expand(columns) {
  const count = columns.gap.length;
  const start = new Float64Array(count), end = new Float64Array(count);
  const longest = new Float64Array(count);
  let time = 0, furthest = 0;
  for (let i = 0; i < count; i++) {
    start[i] = time + columns.gap[i];
    end[i] = start[i] + columns.length[i];
    time = end[i];
    furthest = Math.max(furthest, end[i]);
    longest[i] = furthest;
  }
  const at = (value, i) => (Array.isArray(value) ? value[i] : value);
  return { count, start, end, longest, kind: columns.kind,
    stage: (i) => at(columns.stage, i), number: (i) => at(columns.number, i) };
}

function firstEndingAfter(blocks, time) {
  let low = 0, high = blocks.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (blocks.longest[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

function duration(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 1e6) return `${(ns / 1e3).toPrecision(3)} µs`;
  if (size < 1e9) return `${(ns / 1e6).toPrecision(4)} ms`;
  return `${(ns / 1e9).toPrecision(4)} s`;
}

function amount(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < units.length - 1) { bytes /= 1024; unit++; }
  return `${unit ? bytes.toPrecision(3) : bytes} ${units[unit]}`;
}

class TimelineView {
  constructor(data, canvas, memory, about) {
    this.data = data;
    this.canvas = canvas;
    this.memory = memory;
    this.about = about;
    this.strips = data.strips.map((s) => ({ compute: expand(s.compute), communication: expand(s.communication) }));
    this.from = 0;
    this.to = data.end_ns;
    this.lane = 0;
    this.selected = null;
    this.drawn = 0;
    this.pending = false;
    this.top = 0;
    this.listen();
    this.resize();
  }

  get laneHeight() { return Math.max(12, Math.min(34, 700 / this.data.lanes.length)); }
  get height() { return Math.min(this.data.lanes.length, this.lanesShown) * this.laneHeight + AXIS_PX; }
  get lanesShown() { return Math.floor(1400 / this.laneHeight); }
  colour(letter) { return this.style.getPropertyValue("--" + letter).trim() || "#888"; }
  x(time) { return LANE_LABEL_PX + (time - this.from) * this.scale; }
  time(x) { return this.from + (x - LANE_LABEL_PX) / this.scale; }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.width = Math.max(400, this.canvas.clientWidth || 1200);
    for (const [canvas, height] of [[this.canvas, this.height], [this.memory, MEMORY_PX]]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    this.draw();
  }

  schedule() {
    if (this.pending) return;
    this.pending = true;
    window.requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  draw() {
    this.style = window.getComputedStyle(document.documentElement);
    this.scale = (this.width - LANE_LABEL_PX - 4) / (this.to - this.from);
    const pen = this.canvas.getContext("2d");
    const ratio = window.devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = this.style.getPropertyValue("--panel");
    pen.fillRect(0, 0, this.width, this.height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawn = 0;
    const last = Math.min(this.data.lanes.length, this.top + this.lanesShown);
    for (let lane = this.top; lane < last; lane++) this.drawLane(pen, lane);
    this.drawPath(pen, last);
    if (this.data.window_ns) this.drawWindow(pen);
    this.drawAxis(pen);
    if (this.selected) this.drawSelection(pen);
    this.drawMemory();
  }

  drawLane(pen, lane) {
    const about = this.data.lanes[lane], strip = this.strips[about.strip];
    const height = this.laneHeight, y = (lane - this.top) * height;
    const thin = Math.max(2, Math.round(height * 0.16));
    this.drawBlocks(pen, strip.compute, y + 1, height - thin - 2, true);
    this.drawBlocks(pen, strip.communication, y + height - thin - 1, thin, false);
    pen.fillStyle = this.style.getPropertyValue("--panel");
    pen.fillRect(0, y, LANE_LABEL_PX - 2, height);
    pen.fillStyle = this.style.getPropertyValue(lane === this.lane ? "--accent" : "--text");
    pen.fillText(`${about.device} [${about.stages.join(",")}]`, 6, y + height / 2, LANE_LABEL_PX - 12);
  }

  drawBlocks(pen, blocks, y, height, labelled) {
    let edge = -1;
    for (let i = firstEndingAfter(blocks, this.from); i < blocks.count && blocks.start[i] < this.to; i++) {
      const left = Math.max(this.x(blocks.start[i]), LANE_LABEL_PX);
      const right = Math.min(this.x(blocks.end[i]), this.width);
      if (right < edge + 0.3) continue;
      const width = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.5);
      pen.fillStyle = this.colour(blocks.kind[i]);
      pen.fillRect(left, y, width, height);
      edge = right;
      this.drawn++;
      if (labelled && width > 22 && height > 9 && blocks.number(i) >= 0) {
        pen.fillStyle = "BI".includes(blocks.kind[i]) ? "#000000" : "#ffffff";
        pen.fillText(String(blocks.number(i)), left + 3, y + height / 2, width - 4);
      }
    }
  }

  drawPath(pen, last) {
    pen.fillStyle = this.style.getPropertyValue("--limit");
    const height = this.laneHeight, thin = Math.max(2, Math.round(height * 0.16));
    for (const [lane, communication, start, end] of this.data.path) {
      if (lane < this.top || lane >= last || end < this.from || start > this.to) continue;
      const left = Math.max(this.x(start), LANE_LABEL_PX), right = Math.min(this.x(end), this.width);
      const y = (lane - this.top) * height;
      pen.fillRect(left, communication ? y + height - thin - 1 : y + 1, Math.max(right - left, 1), communication ? thin : 3);
    }
  }

  drawWindow(pen) {
    const [left, right] = this.data.window_ns.map((time) => Math.min(Math.max(this.x(time), LANE_LABEL_PX), this.width));
    const bottom = this.height - AXIS_PX;
    pen.globalAlpha = 0.6;
    pen.fillStyle = this.style.getPropertyValue("--panel");
    pen.fillRect(LANE_LABEL_PX, 0, left - LANE_LABEL_PX, bottom);
    pen.fillRect(right, 0, this.width - right, bottom);
    pen.globalAlpha = 1;
    pen.fillStyle = this.style.getPropertyValue("--accent");
    pen.fillRect(left, bottom - 1, right - left, 3);
  }

  drawAxis(pen) {
    const y = this.height - AXIS_PX, span = this.to - this.from;
    const rough = span / 8, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough));
    pen.fillStyle = this.style.getPropertyValue("--faint");
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      pen.fillRect(this.x(tick), y, 1, 5);
      if (this.x(tick) < this.width - 60) pen.fillText(duration(tick), this.x(tick) + 3, y + 13);
    }
  }

  drawSelection(pen) {
    const { lane, part, index } = this.selected;
    const row = lane - this.top;
    if (row < 0 || row >= this.lanesShown) return;
    const blocks = this.strips[this.data.lanes[lane].strip][part];
    pen.strokeStyle = this.style.getPropertyValue("--text");
    pen.lineWidth = 2;
    const left = this.x(blocks.start[index]), right = this.x(blocks.end[index]);
    pen.strokeRect(left, row * this.laneHeight + 1, Math.max(right - left, 2), this.laneHeight - 2);
  }

  drawMemory() {
    const about = this.data.lanes[this.lane];
    this.memory.hidden = about.times_ns.length === 0;
    if (this.memory.hidden) return;
    const pen = this.memory.getContext("2d"), ratio = window.devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = this.style.getPropertyValue("--panel");
    pen.fillRect(0, 0, this.width, MEMORY_PX);
    const peak = Math.max(...about.memory_bytes, 1), capacity = about.capacity_bytes || 0;
    const near = capacity && capacity < 3 * peak;
    const top = 1.08 * (near ? Math.max(peak, capacity) : peak);
    const y = (bytes) => MEMORY_PX - 4 - (bytes / top) * (MEMORY_PX - 24);
    pen.fillStyle = this.colour("F");
    for (let i = 0; i < about.times_ns.length; i++) {
      const end = i + 1 < about.times_ns.length ? about.times_ns[i + 1] : this.data.end_ns;
      if (end < this.from || about.times_ns[i] > this.to) continue;
      const left = Math.max(this.x(about.times_ns[i]), LANE_LABEL_PX), right = Math.min(this.x(end), this.width);
      const high = y(about.memory_bytes[i]);
      pen.fillRect(left, high, Math.max(right - left, 0.5), MEMORY_PX - 4 - high);
    }
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = this.style.getPropertyValue("--text");
    pen.fillText(`memory of ${about.device}`, 6, 14, LANE_LABEL_PX - 12);
    pen.fillText(`peak ${amount(peak)}`, 6, 32, LANE_LABEL_PX - 12);
    if (!capacity) return;
    pen.fillStyle = this.style.getPropertyValue("--limit");
    pen.fillText(`of ${amount(capacity)}`, 6, 50, LANE_LABEL_PX - 12);
    if (near) pen.fillRect(LANE_LABEL_PX, y(capacity), this.width - LANE_LABEL_PX, 1.5);
  }

  describe() {
    if (!this.selected) { this.about.textContent = ""; return; }
    const { lane, part, index } = this.selected;
    const about = this.data.lanes[lane], blocks = this.strips[about.strip][part];
    const kind = this.data.names[blocks.kind[index]] || blocks.kind[index];
    const number = blocks.number(index), stage = blocks.stage(index);
    const what = this.data.merged || number < 0 ? "" : part === "compute" || "fb".includes(blocks.kind[index])
      ? `, micro-batch ${number}` : `, bucket ${number}`;
    const where = stage < 0 ? "" : `, stage ${stage}`;
    this.about.textContent = `${about.device}: ${kind}${what}${where}, ${duration(blocks.start[index])} to `
      + `${duration(blocks.end[index])} (${duration(blocks.end[index] - blocks.start[index])})`;
  }

  zoom(factor, time) {
    const least = Math.max(20, this.data.end_ns / 1e7);
    const span = Math.min(this.data.end_ns, Math.max(least, (this.to - this.from) * factor));
    const share = (time - this.from) / (this.to - this.from);
    this.show(time - share * span, span);
  }

  show(from, span) {
    this.from = Math.max(0, Math.min(from, this.data.end_ns - span));
    this.to = this.from + span;
    this.schedule();
  }

  pan(share) { this.show(this.from + share * (this.to - this.from), this.to - this.from); }

  blockAt(x, y) {
    const lane = this.top + Math.floor(y / this.laneHeight);
    if (lane < 0 || lane >= this.data.lanes.length || x < LANE_LABEL_PX || y > this.height - AXIS_PX) return null;
    const strip = this.strips[this.data.lanes[lane].strip];
    const low = (y % this.laneHeight) > this.laneHeight * 0.8;
    for (const part of low ? ["communication", "compute"] : ["compute"]) {
      const time = this.time(x), blocks = strip[part];
      for (let i = firstEndingAfter(blocks, time); i < blocks.count && blocks.start[i] <= time; i++) {
        if (blocks.end[i] > time) return { lane, part, index: i };
      }
    }
    return null;
  }

  step(direction) {
    const blocks = this.strips[this.data.lanes[this.lane].strip].compute;
    if (!blocks.count) return;
    const same = this.selected && this.selected.lane === this.lane && this.selected.part === "compute";
    const from = same ? this.selected.index + direction : Math.min(firstEndingAfter(blocks, this.from), blocks.count - 1);
    const index = Math.max(0, Math.min(blocks.count - 1, from));
    this.selected = { lane: this.lane, part: "compute", index };
    const span = this.to - this.from;
    if (blocks.start[index] < this.from || blocks.end[index] > this.to) this.show(blocks.start[index] - span / 2, span);
    this.describe();
    this.schedule();
  }

  chooseLane(lane) {
    this.lane = Math.max(0, Math.min(this.data.lanes.length - 1, lane));
    if (this.lane < this.top) this.top = this.lane;
    if (this.lane >= this.top + this.lanesShown) this.top = this.lane - this.lanesShown + 1;
    this.selected = null;
    this.about.textContent = `${this.data.lanes[this.lane].device} chosen`;
    this.schedule();
  }

  key(event) {
    const middle = (this.from + this.to) / 2;
    const actions = {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
      ArrowUp: () => this.chooseLane(this.lane - 1), ArrowDown: () => this.chooseLane(this.lane + 1),
      "+": () => this.zoom(0.5, middle), "=": () => this.zoom(0.5, middle), "-": () => this.zoom(2, middle),
      "0": () => this.show(0, this.data.end_ns), Home: () => this.show(0, this.to - this.from),
      End: () => this.show(this.data.end_ns, this.to - this.from),
      n: () => this.step(1), p: () => this.step(-1),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
  }

  listen() {
    let grabbed = null;
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.shiftKey || event.metaKey) {
        if (event.shiftKey) this.pan((event.deltaY || event.deltaX) / 1000); else this.zoom(Math.exp(event.deltaY / 400), this.time(event.offsetX));
        event.preventDefault();
      }
    }, { passive: false });
    this.canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.time(event.offsetX)));
    this.canvas.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.offsetX, from: this.from };
      this.canvas.setPointerCapture(event.pointerId);
      const lane = this.top + Math.floor(event.offsetY / this.laneHeight);
      if (lane < this.data.lanes.length) this.lane = lane;
      this.schedule();
    });
    this.canvas.addEventListener("pointerup", () => { grabbed = null; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (grabbed) {
        this.show(grabbed.from - (event.offsetX - grabbed.x) / this.scale, this.to - this.from);
        return;
      }
      const found = this.blockAt(event.offsetX, event.offsetY);
      if (!found && !this.selected) return;
      this.selected = found;
      this.describe();
      this.schedule();
    });
    window.addEventListener("resize", () => this.resize());
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.schedule());
  }
}

window.penstock = { views: [] };
for (const figure of document.querySelectorAll("figure[data-timeline]")) {
  const data = JSON.parse(document.getElementById(figure.getAttribute("data-timeline")).textContent);
  const view = new TimelineView(data, figure.querySelector("canvas.timeline"), figure.querySelector("canvas.memory"),
    figure.querySelector(".about"));
  window.penstock.views.push(view);
}
