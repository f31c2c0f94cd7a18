/* Small charts as SVG: lines and steps over a common axis, and points that are links. Each comes with a text that says
   what it shows; the numbers themselves are in the page's tables. */

import { drawn } from "./words.js";

const HEIGHT = 260, LEFT = 78, RIGHT = 16, TOP = 14, BOTTOM = 38, LEAST_WIDTH = 320;

/** The values' range with some room, and never so narrow that its ticks would read alike. */
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!Number.isFinite(low)) return [0, 1];
  const room = Math.max((high - low) * 0.06, Math.abs(high) * 0.02);
  return [low - room, high + room];
}

function ticks(low, high, about) {
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
  return found;
}

class Frame {
  constructor(figure, x, y, formats, names, about) {
    const style = getComputedStyle(figure);
    this.width = Math.max(LEAST_WIDTH, figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
    this.x0 = x[0]; this.x1 = x[1]; this.y0 = y[0]; this.y1 = y[1];
    this.svg = drawn("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "group", "aria-label": about });
    for (const value of ticks(...y, 5)) {
      const at = this.y(value);
      this.svg.append(drawn("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: at, y2: at }),
        drawn("text", { class: "axis", x: LEFT - 8, y: at + 4, "text-anchor": "end" }, formats[1](value)));
    }
    for (const value of ticks(...x, Math.max(2, this.width / 130))) {
      if (value < Math.min(0, x[0])) continue;
      this.svg.append(drawn("text", { class: "axis", x: this.x(value), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, formats[0](value)));
    }
    this.svg.append(drawn("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
      drawn("text", { class: "axis", x: this.width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, names[0]),
      drawn("text", { class: "axis", x: 0, y: HEIGHT - 3 }, names[1]));
  }
  x(value) { return LEFT + (value - this.x0) / (this.x1 - this.x0) * (this.width - LEFT - RIGHT); }
  y(value) { return HEIGHT - BOTTOM - (value - this.y0) / (this.y1 - this.y0) * (HEIGHT - TOP - BOTTOM); }
}

const place = (value) => value.toFixed(1);

/** A path through points; ``stepped`` keeps each value until the next one. */
function path(frame, points, kind, stepped) {
  let way = "";
  points.forEach(([x, y], i) => {
    if (i && stepped) way += `H${place(frame.x(x))}`;
    way += `${i ? "L" : "M"}${place(frame.x(x))} ${place(frame.y(y))}`;
  });
  return drawn("path", { class: kind, d: way });
}

/** Lines over one axis. ``lines``: [{points: [[x, y], …], kind, stepped}]; ``until``: where the axis ends at least. */
export function lineChart(figure, lines, { formats, names, about, from = Infinity, until = 0 }) {
  const shown = lines.filter((line) => line.points.length);
  figure.hidden = shown.length === 0;
  if (figure.hidden) return;
  const all = shown.flatMap((line) => line.points);
  const last = Math.max(until, ...all.map(([x]) => x)), first = Math.min(from, ...all.map(([x]) => x));
  const frame = new Frame(figure, [first, last > first ? last : first + 1], extent(all.map(([, y]) => y)), formats, names, about);
  frame.svg.setAttribute("role", "img");
  for (const { points, kind, stepped } of shown) {
    const whole = stepped && points.at(-1)[0] < last ? [...points, [last, points.at(-1)[1]]] : points;
    frame.svg.append(path(frame, whole, kind, stepped));
    if (points.length === 1 || stepped) {
      const [x, y] = points.at(-1);
      if (kind === "one") frame.svg.append(drawn("circle", { class: "dot", cx: frame.x(x), cy: frame.y(y), r: 4 }));
    }
  }
  figure.replaceChildren(frame.svg);
}

/** Points that are links, the front through them; more y and less x are better. ``points``: [{x, y, name, href}]. */
export function pointChart(figure, points, { formats, names, about }) {
  figure.hidden = points.length === 0;
  if (figure.hidden) return;
  const held = figure.querySelector("a:focus")?.getAttribute("href");
  const frame = new Frame(figure, extent(points.map((p) => p.x)), extent(points.map((p) => p.y)), formats, names, about);
  const ordered = [...points].sort((a, b) => a.x - b.x || b.y - a.y);
  let best = -Infinity;
  for (const point of ordered) { point.front = point.y > best; best = Math.max(best, point.y); }
  const equals = (point) => ordered.some((other) => other.front && other.x === point.x && other.y === point.y);
  const front = ordered.filter((point) => point.front);
  if (front.length > 1) frame.svg.append(path(frame, front.map((p) => [p.x, p.y]), "front", true));
  const label = drawn("text", { class: "axis label", x: frame.width - RIGHT, y: TOP, "text-anchor": "end" });
  for (const point of ordered) {
    const words = `${point.name}: ${formats[1](point.y)} ${names[1]}, ${formats[0](point.x)} ${names[0]}`;
    const dot = drawn("circle", { class: equals(point) ? "dot" : "dot dominated", cx: frame.x(point.x), cy: frame.y(point.y), r: 6 });
    const link = drawn("a", { href: point.href, "aria-label": words }, drawn("title", {}, words), dot);
    for (const event of ["pointerenter", "focus"]) link.addEventListener(event, () => { label.textContent = words; });
    frame.svg.append(link);
  }
  frame.svg.append(label);
  figure.replaceChildren(frame.svg);
  if (held) figure.querySelector(`a[href="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}
