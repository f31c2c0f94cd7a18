/* What is seen of a timeline: the span of time, the device, the block, what is shown; and how that changes. */

const LEAST_SPAN_NS = 20, MOST_ZOOM = 1e7;

class View {
  constructor(data) {
    data.lanes = data.lanes.map((lane) => ({ ...data.lanes[lane.like], ...lane }));
    this.data = data;
    this.strips = data.strips.map(stripOf);
    this.reasons = new Reasons(data, this.strips);
    this.rows = new Rows(data);
    this.end = Math.max(data.end_ns, data.measured_end_ns || 0, 1);
    this.from = 0;
    this.to = this.end;
    this.lane = 0;
    this.selected = null;
    this.hovered = null;
    this.only = -1;
    this.measure = null;
    this.shown = new Uint8Array(KINDS.length).fill(1);
    this.layers = { path: data.path.length > 0, idle: false, communication: true, links: false };
    this.fine = null;
    this.changed = () => {};
  }

  get span() { return this.to - this.from; }
  get zoomed() { return this.end / this.span; }

  show(from, span) {
    this.from = Math.max(0, Math.min(from, this.end - span));
    this.to = this.from + span;
    this.changed();
  }

  zoom(factor, time = (this.from + this.to) / 2) {
    const least = Math.min(this.end, Math.max(LEAST_SPAN_NS, this.end / MOST_ZOOM));
    const span = Math.min(this.end, Math.max(least, this.span * factor));
    this.show(time - (time - this.from) / this.span * span, span);
  }

  pan(share) { this.show(this.from + share * this.span, this.span); }
  everything() { this.show(0, this.end); }

  /** Finer blocks where the service gave some for what is seen, else the whole picture's. */
  strip(number) {
    const fine = this.fine;
    return fine && fine.from <= this.from && fine.to >= this.to ? fine.strips[number] : this.strips[number];
  }

  blocks(place) { return place.blocks || this.strips[place.strip][place.part]; }
  same(a, b) { return a === b || Boolean(a && b && a.strip === b.strip && a.part === b.part && a.index === b.index); }

  /** The lane that a block is drawn on: the chosen one where it can be, else the first that has its strip. */
  laneOf(place) {
    const has = (lane) => lane.strip === place.strip || lane.measured === place.strip;
    return has(this.data.lanes[this.lane]) ? this.lane : this.data.lanes.findIndex(has);
  }

  isMeasured(place) { return this.data.lanes.some((lane) => lane.measured === place.strip); }

  select(place, { reveal = false } = {}) {
    this.selected = place;
    if (place) {
      this.lane = this.laneOf(place);
      const blocks = this.blocks(place), start = blocks.start[place.index], end = blocks.end[place.index];
      if (reveal && (start < this.from || end > this.to)) this.show((start + end - this.span) / 2, this.span);
    }
    this.changed();
  }

  step(direction) {
    const strip = this.data.lanes[this.lane].strip, blocks = this.strips[strip].compute;
    if (!blocks.count) return;
    const same = this.selected && this.selected.strip === strip && this.selected.part === "compute";
    const index = same ? this.selected.index + direction : blocks.after(this.from);
    this.select({ strip, part: "compute", index: Math.max(0, Math.min(blocks.count - 1, index)) }, { reveal: true });
  }

  /** From the selected block to what decided its start (-1), or to the first that waits for it (+1). */
  follow(direction) {
    if (!this.selected) { this.step(0); return; }
    const measured = this.isMeasured(this.selected);
    const next = direction < 0 ? this.reasons.decisive(this.reasons.before(this.selected, measured))
      : this.reasons.after(this.selected, measured)[0];
    if (next) this.select(next, { reveal: true });
  }

  chooseLane(direction) {
    const rows = this.rows.rows.filter((row) => row.lane !== undefined);
    const now = rows.indexOf(this.rows.rowOf.get(this.lane));
    this.lane = rows[Math.max(0, Math.min(rows.length - 1, now + direction))].lane;
    this.selected = null;
    this.changed();
  }

  zoomToSelected() {
    if (!this.selected) return;
    const blocks = this.blocks(this.selected), i = this.selected.index, span = 4 * (blocks.end[i] - blocks.start[i]);
    this.zoom(span / this.span);
    this.show((blocks.start[i] + blocks.end[i] - this.span) / 2, this.span);
  }

  /** The micro-batch alone; every other block is pale. The view moves to it. Returns how many blocks it has. */
  search(number) {
    this.only = number;
    let count = 0, first = Infinity, last = 0;
    if (number >= 0) {
      for (const lane of this.data.lanes) {
        const { kind, number: of, start, end, count: all } = this.strips[lane.strip].compute;
        for (let i = 0; i < all; i++) {
          if (of[i] !== number || kind[i] === K.U) continue;
          count++;
          first = Math.min(first, start[i]);
          last = Math.max(last, end[i]);
        }
      }
    }
    if (count && (first < this.from || last > this.to)) {
      const span = Math.min(this.end, 1.1 * (last - first));
      this.show((first + last - span) / 2, span);
    }
    this.changed();
    return count;
  }

  /** A mark at the selected block's start or, the second time, the time from there to its end. */
  mark() {
    if (!this.selected) return;
    const blocks = this.blocks(this.selected), i = this.selected.index;
    this.measure = this.measure && this.measure[0] === this.measure[1]
      ? [Math.min(this.measure[0], blocks.start[i]), Math.max(this.measure[0], blocks.end[i])]
      : [blocks.start[i], blocks.start[i]];
    this.changed();
  }

  /** The measured counterpart of a predicted block, or the other way round. */
  counterpart(place) {
    const lane = this.data.lanes[this.laneOf(place)];
    if (!lane || lane.measured === null) return null;
    const measured = lane.measured === place.strip, blocks = this.blocks(place), i = place.index;
    const found = this.reasons.find(!measured, [KINDS[blocks.kind[i]]], blocks.stage[i], blocks.number[i]);
    const strip = measured ? lane.strip : lane.measured;
    return found.find((each) => each.strip === strip) || null;
  }

  /** A block in words: what, where, when, how long, why it waited, how the measurement differs. */
  words(place) {
    const lane = this.data.lanes[this.laneOf(place)], blocks = this.blocks(place), i = place.index;
    const lasts = blocks.end[i] - blocks.start[i], measured = this.isMeasured(place);
    const lines = [
      `${lane.device}: ${this.reasons.name(place)}${measured ? " (measured)" : ""}`,
      `${duration(blocks.start[i])} to ${duration(blocks.end[i])}, ${duration(lasts)}`,
    ];
    if (this.data.merged || place.part === "idle") return lines;
    const waited = this.reasons.waited(place, measured);
    if (waited) lines.push(waited);
    const other = this.counterpart(place);
    if (other) {
      const { start, end } = this.blocks(other), theirs = end[other.index] - start[other.index];
      const [real, said] = measured ? [lasts, theirs] : [theirs, lasts];
      const later = (measured ? 1 : -1) * (blocks.start[i] - start[other.index]);
      const by = 100 * (real / said - 1);
      const apart = this.data.comparable ? `: measured ${Math.abs(by).toFixed(1)} % ${by < 0 ? "shorter" : "longer"}` : "";
      lines.push(`${measured ? "predicted" : "measured"} ${duration(theirs)}${apart}, `
        + `begins ${duration(Math.abs(later))} ${later < 0 ? "earlier" : "later"}`);
    }
    return lines;
  }

  /** The view as a part of an address, and back. */
  get hash() {
    const parts = new URLSearchParams();
    if (this.zoomed > 1.0001) parts.set("t", `${Math.round(this.from)}-${Math.round(this.to)}`);
    if (this.lane) parts.set("d", this.data.lanes[this.lane].device);
    if (this.selected && !this.data.merged) {
      const blocks = this.blocks(this.selected), i = this.selected.index;
      parts.set("b", [KINDS[blocks.kind[i]], blocks.stage[i], blocks.number[i], Number(this.isMeasured(this.selected))].join("."));
    }
    if (this.only >= 0) parts.set("m", String(this.only));
    const on = Object.keys(this.layers).filter((name) => this.layers[name]).map((name) => name[0]).join("");
    if (on !== this.usual) parts.set("l", on);
    return parts.toString();
  }

  get usual() { return (this.data.path.length ? "p" : "") + "c"; }

  restore(text) {
    const parts = new URLSearchParams(text), [from, to] = (parts.get("t") || "").split("-").map(Number);
    if (to > from && from >= 0) this.show(from, Math.min(to - from, this.end));
    const lane = this.data.lanes.findIndex((each) => each.device === parts.get("d"));
    if (lane >= 0) this.lane = lane;
    if (parts.has("m")) this.only = Number(parts.get("m"));
    if (parts.has("l")) for (const name of Object.keys(this.layers)) this.layers[name] = parts.get("l").includes(name[0]);
    const [letter, stage, number, measured] = (parts.get("b") || "").split(".");
    if (letter in K && !this.data.merged) {
      const found = this.reasons.find(measured === "1", [letter], Number(stage), Number(number));
      if (found.length) this.select(found.find((each) => this.data.lanes[this.lane].strip === each.strip) || found[0]);
    }
    this.changed();
  }
}
