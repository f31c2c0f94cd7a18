/* Mouse, pen and fingers on the lanes and on the small picture above them. */

const CLICK_PX = 4;

class Pointers {
  constructor(controls) {
    this.controls = controls;
    this.down = new Map();
    const canvas = controls.parts.main;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.lift(event));
    canvas.addEventListener("pointercancel", (event) => this.lift(event));
    canvas.addEventListener("pointerleave", () => this.leave());
  }

  press(event) {
    const { controls } = this, { view, drawing, parts } = controls, [x, y] = controls.place(event);
    parts.scroller.focus({ preventScroll: true });
    parts.main.setPointerCapture(event.pointerId);
    this.down.set(event.pointerId, [x, y]);
    this.grabbed = { x, y, from: view.from, scroll: parts.scroller.scrollTop, measures: event.shiftKey, moved: false };
    if (event.shiftKey) view.measure = [drawing.time(x), drawing.time(x)];
    if (this.down.size === 2) this.pinched = { apart: this.apart(), span: view.span, time: drawing.time(this.middle()) };
  }

  apart() { const [a, b] = [...this.down.values()]; return Math.max(10, Math.abs(a[0] - b[0])); }
  middle() { const [a, b] = [...this.down.values()]; return (a[0] + b[0]) / 2; }

  move(event) {
    const { controls } = this, { view, drawing, parts } = controls, [x, y] = controls.place(event);
    if (!this.down.has(event.pointerId)) { this.hover(x, y); return; }
    this.down.set(event.pointerId, [x, y]);
    const { grabbed } = this;
    if (Math.hypot(x - grabbed.x, y - grabbed.y) > CLICK_PX) grabbed.moved = true;
    if (this.pinched && this.down.size === 2) {
      view.zoom(this.pinched.span * this.pinched.apart / this.apart() / view.span, this.pinched.time);
    } else if (grabbed.measures) {
      const times = [drawing.time(grabbed.x), drawing.time(x)].map((time) => Math.max(0, Math.min(view.end, time)));
      view.measure = times.sort((a, b) => a - b);
      controls.tellMeasure();
      view.changed();
    } else if (grabbed.moved) {
      parts.tip.hidden = true;
      parts.scroller.scrollTop = grabbed.scroll - (y - grabbed.y);
      view.show(grabbed.from - (x - grabbed.x) / drawing.scale, view.span);
    }
  }

  lift(event) {
    const { controls, grabbed } = this, { view, drawing } = controls;
    this.down.delete(event.pointerId);
    this.pinched = null;
    if (!grabbed || grabbed.moved || this.down.size || event.type === "pointercancel") return;
    if (grabbed.measures) { view.measure = null; view.changed(); return; }
    const found = drawing.at(grabbed.x, grabbed.y);
    if (!found) return;
    if (found.node !== undefined) { view.rows.fold(found.node); controls.resize(); return; }
    view.lane = found.lane;
    view.select(found.place && found.place.part !== "idle" ? found.place : null);
    controls.describe();
  }

  hover(x, y) {
    const { controls } = this, { view, drawing, parts } = controls, found = drawing.at(x, y), place = found && found.place;
    view.pointed = found && found.lane !== undefined && x >= LABEL_PX ? drawing.time(x) : null;
    view.hovered = place && place.part !== "idle" ? place : null;
    parts.tip.hidden = !place || (place.part === "idle" && !view.layers.idle && view.data.merged);
    if (!parts.tip.hidden) {
      parts.tip.replaceChildren(...this.words(place, found.lane).map((line) => made("div", {}, line)));
      const box = parts.figure.getBoundingClientRect(), canvas = parts.main.getBoundingClientRect();
      const left = Math.min(x + 14 + canvas.left - box.left, box.width - parts.tip.offsetWidth - 8);
      parts.tip.style.left = `${Math.max(0, left)}px`;
      parts.tip.style.top = `${y + 18 + canvas.top - box.top}px`;
    }
    view.changed();
  }

  words(place, lane) {
    const { view } = this.controls;
    if (place.part !== "idle") return view.words(place);
    const blocks = view.blocks(place), i = place.index;
    const device = view.data.lanes[lane].device, lasts = duration(blocks.end[i] - blocks.start[i]);
    return [`${device} idles ${lasts}: ${view.data.names[KINDS[blocks.kind[i]]]}`, `${duration(blocks.start[i])} to ${duration(blocks.end[i])}`];
  }

  leave() {
    const { view, parts } = this.controls;
    if (this.down.size) return;
    view.hovered = view.pointed = null;
    parts.tip.hidden = true;
    view.changed();
  }
}

/** The window on the small picture: its middle moves it, its edges stretch it, elsewhere it jumps there. */
function overviewPointer({ view, drawing, parts }) {
  const { map } = parts, time = (x) => (x - LABEL_PX) / drawing.lanesWidth * view.end;
  let act = null;
  map.addEventListener("pointerdown", (event) => {
    const at = event.offsetX, edge = (value) => Math.abs(LABEL_PX + value / view.end * drawing.lanesWidth - at) < 6;
    const { from, to } = view, least = view.end / MOST_ZOOM;
    map.setPointerCapture(event.pointerId);
    if (edge(from) && view.zoomed > 1) act = (x) => { const left = Math.max(0, Math.min(time(x), to - least)); view.show(left, to - left); };
    else if (edge(to) && view.zoomed > 1) act = (x) => view.show(from, Math.max(least, Math.min(time(x), view.end) - from));
    else {
      const grip = time(at) >= from && time(at) <= to ? time(at) - from : view.span / 2;
      act = (x) => view.show(time(x) - grip, view.span);
    }
    act(at);
  });
  map.addEventListener("pointermove", (event) => { if (act) act(event.offsetX); });
  map.addEventListener("pointerup", () => { act = null; });
  map.addEventListener("pointercancel", () => { act = null; });
}
