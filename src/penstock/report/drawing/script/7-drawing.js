/* The view as pixels: lanes by the raster, everything else with a pen on top of them. */

const LABEL_PX = 150, AXIS_PX = 24, MAP_PX = 44, MEMORY_PX = 132, MOST_LINKS = 1500, RIGHT_PX = 6, LARGE = 20000;
const TOKENS = ["back", "panel", "text", "faint", "line", "accent", "limit"];

class Theme {
  /** Colours as the style sheet has them now, as [r, g, b] of each kind and as CSS of each token. */
  constructor(root) {
    const probe = document.createElement("span"), pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    root.append(probe);
    const resolved = (name) => {
      probe.style.color = `var(--${name})`;
      pen.fillStyle = getComputedStyle(probe).color;
      pen.fillRect(0, 0, 1, 1);
      return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    };
    this.kinds = [...KINDS].map((letter) => resolved(VARIABLES[letter] || letter));
    this.ground = resolved("panel");
    for (const token of TOKENS) this[token] = `rgb(${resolved(token).join(" ")})`;
    probe.remove();
  }
}

const VARIABLES = { "<": "idle-fill", ">": "idle-drain", t: "idle-transfer", g: "idle-all-reduce", s: "idle-stages", o: "idle-order", m: "idle-memory" };

class Drawing {
  constructor(view, parts) {
    this.view = view;
    this.parts = parts;
    this.raster = new Raster();
    this.overview = null;
    this.theme = null;
    this.stats = { frames: 0, drawn: 0, ms: 0 };
  }

  get lanesWidth() { return this.width - LABEL_PX - RIGHT_PX; }
  get scale() { return this.lanesWidth / this.view.span; }
  /** Of a large timeline the first frame has what devices compute; everything else comes with the next one. */
  get isWhole() { return this.stats.frames > 0 || this.view.data.num_blocks < LARGE; }
  x(time) { return LABEL_PX + (time - this.view.from) * this.scale; }
  time(x) { return this.view.from + (x - LABEL_PX) / this.scale; }
  get top() { return this.parts.scroller.scrollTop; }

  restyle() {
    this.theme = new Theme(this.parts.figure);
    this.raster.paint(this.theme.kinds, this.theme.ground);
    this.overview = null;
  }

  resize() {
    const { scroller, spacer, main, map, memory } = this.parts, height = this.view.rows.height + AXIS_PX;
    spacer.style.height = `${height}px`;
    this.width = Math.max(240, scroller.clientWidth || 1000);
    this.height = Math.min(height, Math.max(240, scroller.clientHeight || height));
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    for (const [canvas, tall] of [[main, this.height], [map, MAP_PX], [memory, MEMORY_PX]]) {
      canvas.width = Math.round(this.width * this.ratio);
      canvas.height = Math.round(tall * this.ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${tall}px`;
    }
    const px = (value) => Math.round(value * this.ratio);
    this.raster.resize(main.width, px(this.height - AXIS_PX), this.ratio);
    this.codes = new Uint16Array(Math.max(1, main.width - px(LABEL_PX) - px(RIGHT_PX)));
    this.idleCodes = new Uint16Array(this.codes.length);
    this.overview = null;
  }

  pen(canvas) {
    const pen = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  draw() {
    const began = performance.now();
    if (!this.theme) this.restyle();
    const pen = this.pen(this.parts.main), visible = this.view.rows.between(this.top, this.top + this.height - AXIS_PX);
    this.lanes(visible);
    pen.putImageData(this.raster.image, 0, Math.round(AXIS_PX * this.ratio));
    pen.save();
    pen.beginPath();
    pen.rect(LABEL_PX, AXIS_PX, this.width - LABEL_PX, this.height - AXIS_PX);
    pen.clip();
    this.window(pen);
    if (this.view.layers.links) this.links(pen, visible);
    if (this.view.layers.path) this.path(pen);
    this.selection(pen);
    this.measured(pen);
    pen.restore();
    this.labels(pen, visible);
    this.axis(pen);
    if (this.isWhole) {
      drawOverview(this);
      drawMemory(this);
    } else {
      this.view.changed();
    }
    this.stats.frames++;
    this.stats.ms = performance.now() - began;
  }

  lanes(visible) {
    const { view, raster, ratio } = this, top = this.top, px = (value) => Math.round(value * ratio);
    const left = px(LABEL_PX), scale = this.scale * ratio;
    raster.clear();
    this.stats.drawn = 0;
    for (const row of visible) {
      if (row.lane === undefined) continue;
      for (const bar of view.rows.bars(row, view.layers.communication)) {
        const strip = view.strip(bar.strip), low = px(bar.compute[0] - top), tall = px(bar.compute[1]);
        const paint = (blocks, codes) => raster.columns(blocks, view.from, scale, view.shown, view.only, codes);
        if (view.layers.idle && strip.idle.count) paint(strip.idle, this.idleCodes); else this.idleCodes.fill(0);
        this.stats.drawn += paint(strip.compute, this.codes);
        raster.band(this.codes, view.layers.idle ? this.idleCodes : null, left, low, tall);
        this.numbers(strip.compute, low, tall, left, scale);
        if (!view.layers.communication || !this.isWhole || !strip.communication.count) continue;
        const thin = px(bar.moves[1]);
        strip.communication.directions().forEach((blocks, forward) => {
          this.stats.drawn += paint(blocks, this.codes);
          raster.band(this.codes, null, left, px(bar.moves[0] - top) + (1 - forward) * thin, thin);
        });
      }
    }
  }

  /** Micro-batch numbers in the blocks that have room for them. */
  numbers(blocks, low, tall, left, scale) {
    const { view, raster, ratio } = this, least = 16 * ratio;
    if (tall < 10 * ratio || blocks.longest * scale < least) return;
    const y = low + Math.round((tall - 11 * ratio) / 2);
    for (let i = blocks.after(view.from); i < blocks.count && blocks.start[i] < view.to; i++) {
      if ((blocks.end[i] - blocks.start[i]) * scale < least || blocks.number[i] < 0 || !view.shown[blocks.kind[i]]) continue;
      if (view.only >= 0 && blocks.number[i] !== view.only) continue;
      const a = Math.max(0, Math.round((blocks.start[i] - view.from) * scale));
      const b = Math.min(this.codes.length, Math.round((blocks.end[i] - view.from) * scale));
      raster.label(String(blocks.number[i]), left + a + Math.round(3 * ratio), y, b - a - 4 * ratio, blocks.kind[i]);
    }
  }

  /** Where a block lies, in CSS pixels: [left, right, top, bottom]. Null where its lane's row is not there. */
  box(place, lane = this.view.laneOf(place)) {
    const row = this.view.rows.rowOf.get(lane);
    if (!row) return null;
    const bar = this.view.rows.bars(row, this.view.layers.communication).find((each) => each.strip === place.strip);
    if (!bar) return null;
    const blocks = this.view.blocks(place), i = place.index;
    const [y, tall] = place.part === "communication" ? [bar.moves[0], 2 * bar.moves[1]] : bar.compute;
    const up = AXIS_PX - this.top + y;
    return [this.x(blocks.start[i]), this.x(blocks.end[i]), up, up + tall];
  }

  path(pen) {
    const { view } = this;
    pen.fillStyle = this.theme.limit;
    for (const [lane, communication, start, end] of view.data.path) {
      if (end < view.from || start > view.to) continue;
      const row = view.rows.rowOf.get(lane);
      if (!row) continue;
      const [bar] = view.rows.bars(row, view.layers.communication);
      const [y, tall] = communication ? [bar.moves[0], Math.max(3, 2 * bar.moves[1])] : [bar.compute[0], 3];
      pen.fillRect(this.x(start), AXIS_PX - this.top + y, Math.max((end - start) * this.scale, 1), tall);
    }
  }

  /** A line for each message in sight, from its sender's row to its reader's. */
  links(pen, visible) {
    const { view } = this, lanes = new Set(visible.map((row) => row.lane).filter((lane) => lane !== undefined));
    pen.lineWidth = 1;
    let count = 0;
    for (const lane of lanes) {
      const { strip } = view.data.lanes[lane], moved = view.strips[strip].communication;
      for (let i = moved.after(view.from); i < moved.count && moved.start[i] < view.to && count < MOST_LINKS; i++) {
        if (moved.kind[i] === K.a || !view.shown[moved.kind[i]]) continue;
        const [sender] = view.reasons.before({ strip, part: "communication", index: i }, false);
        if (!sender || sender.strip !== strip) continue;
        count++;
        for (const reader of view.reasons.after({ strip, part: "communication", index: i }, false)) {
          const a = this.box({ strip, part: "communication", index: i }, lane), b = this.box(reader);
          if (!a || !b) continue;
          const [r, g, blue] = this.theme.kinds[moved.kind[i]];
          pen.strokeStyle = `rgb(${r} ${g} ${blue})`;
          pen.beginPath();
          pen.moveTo(a[0], (a[2] + a[3]) / 2);
          pen.lineTo(a[1], (b[2] + b[3]) / 2);
          pen.stroke();
        }
      }
    }
    this.stats.links = count;
  }

  window(pen) {
    if (!this.view.data.window_ns) return;
    const [left, right] = this.view.data.window_ns.map((time) => this.x(time));
    pen.globalAlpha = 0.6;
    pen.fillStyle = this.theme.panel;
    pen.fillRect(LABEL_PX, AXIS_PX, left - LABEL_PX, this.height);
    pen.fillRect(right, AXIS_PX, this.width, this.height);
    pen.globalAlpha = 1;
    pen.fillStyle = this.theme.accent;
    pen.fillRect(left, AXIS_PX, right - left, 2);
  }

  selection(pen) {
    const { view } = this;
    if (view.hovered && !view.same(view.hovered, view.selected)) this.frame(pen, view.hovered, 1);
    if (!view.selected) return;
    this.frame(pen, view.selected, 2);
    const measured = view.isMeasured(view.selected);
    const before = view.reasons.before(view.selected, measured), last = view.reasons.decisive(before);
    for (const each of before) this.arrow(pen, each, view.selected, view.same(each, last) ? 2 : 1, []);
    for (const each of view.reasons.after(view.selected, measured)) this.arrow(pen, view.selected, each, 1, [4, 3]);
  }

  frame(pen, place, width) {
    const box = this.box(place);
    if (!box) return;
    pen.strokeStyle = this.theme.text;
    pen.lineWidth = width;
    pen.strokeRect(box[0], box[2], Math.max(box[1] - box[0], 2), box[3] - box[2]);
  }

  arrow(pen, from, to, width, dash) {
    const a = this.box(from), b = this.box(to);
    if (!a || !b) return;
    const [x1, y1, x2, y2] = [a[1], (a[2] + a[3]) / 2, b[0], (b[2] + b[3]) / 2], bend = Math.max(8, Math.abs(x2 - x1) / 2);
    for (const [stroke, wide] of [[this.theme.panel, width + 3], [this.theme.text, width]]) {
      pen.strokeStyle = pen.fillStyle = stroke;
      pen.lineWidth = wide;
      pen.setLineDash(stroke === this.theme.text ? dash : []);
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.beginPath();
    pen.moveTo(x2 + 1, y2);
    pen.lineTo(x2 - 6, y2 - 4);
    pen.lineTo(x2 - 6, y2 + 4);
    pen.fill();
  }

  measured(pen) {
    const { measure } = this.view;
    if (!measure) return;
    const [left, right] = measure.map((time) => this.x(time)), words = duration(measure[1] - measure[0]);
    pen.fillStyle = this.theme.accent;
    pen.globalAlpha = 0.18;
    pen.fillRect(left, AXIS_PX, right - left, this.height);
    pen.globalAlpha = 1;
    pen.fillRect(left - 1, AXIS_PX, 1.5, this.height);
    pen.fillRect(right, AXIS_PX, 1.5, this.height);
    pen.font = "600 12px system-ui, sans-serif";
    const wide = pen.measureText(words).width + 10, middle = Math.max(LABEL_PX + 2, Math.min((left + right - wide) / 2, this.width - wide - 4));
    pen.fillRect(middle, this.height - 24, wide, 19);
    pen.fillStyle = this.theme.back;
    pen.fillText(words, middle + 5, this.height - 14);
    pen.font = "11px system-ui, sans-serif";
  }

  /** Names of devices and nodes; they stay where they are while the lanes move. */
  labels(pen, visible) {
    const { view, theme } = this, chosen = view.rows.rowOf.get(view.lane);
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS_PX, this.width, this.height - AXIS_PX);
    pen.clip();
    pen.fillStyle = theme.panel;
    pen.fillRect(0, AXIS_PX, LABEL_PX - 2, this.height);
    for (const row of visible) {
      const y = AXIS_PX - this.top + row.y;
      if (row.node !== undefined) {
        pen.fillStyle = theme.line;
        pen.fillRect(0, y, this.width, row.height);
        pen.fillStyle = theme.text;
        const mark = view.rows.folded.has(row.node) ? "▸" : "▾";
        pen.fillText(`${mark} ${row.title}: ${counted(row.members.length)} device${row.members.length > 1 ? "s" : ""}`, 4, y + row.height / 2);
        continue;
      }
      const lane = view.data.lanes[row.lane], stages = lane.stages, count = row.alike * (view.data.together ?? 1);
      const mark = row.alike > 1 && !view.rows.byNode ? "▸ " : "", more = count > 1 ? ` ×${counted(count)}` : "";
      pen.fillStyle = row === chosen ? theme.accent : theme.text;
      const shown = stages.length > 4 ? `${stages[0]}…${stages[stages.length - 1]}` : stages.join(",");
      pen.fillText(`${mark}${lane.device}${more} [${shown}]`, 12, y + row.height / 2, LABEL_PX - 18);
      if (row === chosen) pen.fillRect(2, y + 2, 3, row.height - 4);
      if (row.height > 26 && view.rows.showsMeasured && lane.measured !== null) {
        pen.fillStyle = theme.faint;
        pen.fillText("P", LABEL_PX - 12, y + row.height / 4, 9);
        pen.fillText("M", LABEL_PX - 12, y + 3 * row.height / 4, 9);
      }
    }
    pen.restore();
  }

  axis(pen) {
    const { view, theme } = this, rough = view.span / Math.max(3, this.lanesWidth / 120), power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(1, [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough));
    pen.fillStyle = theme.panel;
    pen.fillRect(0, 0, this.width, AXIS_PX);
    pen.fillStyle = theme.line;
    pen.fillRect(0, AXIS_PX - 1, this.width, 1);
    for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
      const x = this.x(tick);
      pen.fillStyle = theme.faint;
      pen.fillRect(x, AXIS_PX - 7, 1, 6);
      if (x < this.width - 56) pen.fillText(axisTime(tick, step, view.to), x + 3, 10);
    }
    pen.fillStyle = theme.faint;
    pen.fillText(view.zoomed > 1.01 ? `${digits(view.zoomed)}× zoom` : "time", 6, 10);
  }

  /** What lies at a place of the canvas: {lane, place} or {node}; null above and below the rows. */
  at(x, y) {
    const number = y < AXIS_PX ? -1 : this.view.rows.at(y - AXIS_PX + this.top);
    if (number < 0) return null;
    const row = this.view.rows.rows[number];
    if (row.node !== undefined) return { node: row.node };
    if (x < LABEL_PX) return row.alike > 1 && !this.view.rows.byNode ? { node: this.view.rows.groupOf(this.view.data.lanes[row.lane]) } : { lane: row.lane, place: null };
    const time = this.time(x), level = y - AXIS_PX + this.top, { view } = this, shown = (kind) => view.shown[kind];
    for (const bar of view.rows.bars(row, view.layers.communication)) {
      const strip = view.strip(bar.strip), end = bar.moves[0] + 2 * bar.moves[1];
      if (level < bar.compute[0] - 1 || level > end + 1) continue;
      const low = level >= bar.moves[0];
      const kinds = !low ? shown : (kind) => shown(kind) && (level < bar.moves[0] + bar.moves[1] ? kind !== K.b : kind !== K.f);
      for (const part of low ? ["communication", "compute", "idle"] : ["compute", "idle"]) {
        const index = strip[part].at(time, part === "communication" ? kinds : shown);
        if (index >= 0) return { lane: row.lane, place: { strip: bar.strip, part, index, ...(view.data.merged && { blocks: strip[part] }) } };
      }
    }
    return { lane: row.lane, place: null };
  }
}
