/* The small pictures around the lanes: the whole step with the part that is seen, and the chosen device's memory. */

/** The sorts of memory: name in sentences, and in the narrow legend. */
const SORTS = [["parameters, optimizer and more", "constant"], ["activations", "activations"], ["gradients, buffers, workspace", "gradients, other"]];
const MOST_TICKS = 4;

function drawOverview(drawing) {
  const { view, theme, ratio } = drawing, pen = drawing.pen(drawing.parts.map);
  const wide = drawing.lanesWidth / view.end, x = (time) => LABEL_PX + time * wide;
  pen.fillStyle = theme.panel;
  pen.fillRect(0, 0, drawing.width, MAP_PX);
  if (!drawing.overview) drawing.overview = overview(drawing);
  pen.putImageData(drawing.overview, Math.round(LABEL_PX * ratio), 0);
  pen.fillStyle = theme.faint;
  pen.fillText(`everything: ${duration(view.end)}`, 6, MAP_PX / 2, LABEL_PX - 14);
  pen.fillStyle = theme.panel;
  pen.globalAlpha = 0.65;
  pen.fillRect(LABEL_PX, 0, x(view.from) - LABEL_PX, MAP_PX);
  pen.fillRect(x(view.to), 0, drawing.width - x(view.to), MAP_PX);
  pen.globalAlpha = 1;
  pen.strokeStyle = theme.accent;
  pen.lineWidth = 2;
  pen.strokeRect(x(view.from), 1, Math.max(3, x(view.to) - x(view.from)), MAP_PX - 2);
}

/** Every lane as at least one line of pixels, or every n-th lane. */
function overview(drawing) {
  const { view, ratio } = drawing, raster = new Raster(), height = Math.round(MAP_PX * ratio), codes = new Uint16Array(drawing.codes.length);
  raster.resize(codes.length, height, ratio);
  raster.paint(drawing.theme.kinds, drawing.theme.ground);
  raster.clear();
  const strips = view.data.lanes.map((lane) => lane.strip), count = Math.min(strips.length, height);
  for (let i = 0; i < count; i++) {
    const strip = view.strips[strips[Math.floor(i * strips.length / count)]], top = Math.floor(i * height / count);
    raster.columns(strip.compute, 0, codes.length / view.end, view.shown, -1, codes);
    raster.band(codes, null, 0, top, Math.floor((i + 1) * height / count) - top);
  }
  return raster.image;
}

class Curve {
  constructor(packed) {
    const count = packed.count, whole = (text) => column(text, count, new Float64Array(count), true);
    this.times = whole(packed.times);
    this.total = whole(packed.total);
    this.activations = whole(packed.activations);
  }

  /** The point that holds at `time`. */
  at(time) {
    let low = 0, high = this.times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1; else high = middle;
    }
    return Math.max(0, low - 1);
  }
}

function curveOf(view, lane) {
  const { curve } = view.data.lanes[lane];
  if (curve === null) return null;
  view.curves = view.curves || new Map();
  if (!view.curves.has(curve)) view.curves.set(curve, new Curve(view.data.curves[curve]));
  return view.curves.get(curve);
}

/** Bytes of each sort at a point of a curve, in the order of SORTS; `constant`: what never changes. */
function parts(curve, i, constant) {
  const kept = Math.min(constant, curve.total[i]), activations = Math.min(curve.activations[i], curve.total[i] - kept);
  return [kept, activations, curve.total[i] - kept - activations];
}

function drawMemory(drawing) {
  const { view, theme, width } = drawing, about = view.data.lanes[view.lane], curve = curveOf(view, view.lane);
  drawing.parts.memory.hidden = drawing.parts.memoryWords.hidden = curve === null;
  if (curve === null) return;
  const pen = drawing.pen(drawing.parts.memory), capacity = about.capacity_bytes || 0, peak = about.peak_bytes;
  pen.fillStyle = theme.panel;
  pen.fillRect(0, 0, width, MEMORY_PX);
  const near = capacity > 0 && capacity < 3 * peak, highest = 1.1 * (near ? Math.max(peak, capacity) : peak), base = MEMORY_PX - 4;
  const y = (bytes) => base - bytes / highest * (base - 6);
  const colours = [theme.faint, `rgb(${theme.kinds[K.F].join(" ")})`, `rgb(${theme.kinds[K.b].join(" ")})`];
  const areas = SORTS.map(() => new Path2D());
  const snapped = (x) => Math.round(x * drawing.ratio) / drawing.ratio;
  for (let i = curve.at(view.from); i < curve.times.length && curve.times[i] < view.to; i++) {
    const end = i + 1 < curve.times.length ? curve.times[i + 1] : view.data.end_ns;
    const left = Math.max(snapped(drawing.x(curve.times[i])), LABEL_PX), right = Math.min(snapped(drawing.x(end)), width - RIGHT_PX);
    if (right <= left && curve.total[i] < 0.98 * peak) continue;
    let below = 0;
    parts(curve, i, about.constant_bytes).forEach((bytes, sort) => {
      if (bytes) areas[sort].rect(left, y(below + bytes), Math.max(right - left, 1 / drawing.ratio), y(below) - y(below + bytes));
      below += bytes;
    });
  }
  areas.forEach((area, sort) => { pen.fillStyle = colours[sort]; pen.fill(area); });
  pen.fillStyle = theme.panel;
  pen.fillRect(0, 0, LABEL_PX - 2, MEMORY_PX);
  pen.fillStyle = theme.text;
  const lines = [about.device, `peak ${amount(peak)}`, capacity ? `of ${amount(capacity)}, ${Math.round(100 * peak / capacity)} %` : ""];
  lines.forEach((text, i) => pen.fillText(text, 6, 14 + 17 * i, LABEL_PX - 14));
  SORTS.forEach(([, short], sort) => {
    pen.fillStyle = colours[sort];
    pen.fillRect(6, 68 + 18 * sort, 9, 9);
    pen.fillStyle = theme.faint;
    pen.fillText(short, 20, 73 + 18 * sort, LABEL_PX - 26);
  });
  drawTicks(drawing, pen, highest, y);
  if (near) {
    pen.strokeStyle = theme.limit;
    pen.lineWidth = 1.5;
    pen.setLineDash([6, 3]);
    pen.beginPath();
    pen.moveTo(LABEL_PX, y(capacity));
    pen.lineTo(width - RIGHT_PX, y(capacity));
    pen.stroke();
    pen.setLineDash([]);
  }
  drawing.parts.memoryWords.textContent = memoryWords(view);
}

/** Lines and labels of the axis of memory, at powers of two. */
function drawTicks(drawing, pen, highest, y) {
  const { theme, width } = drawing, step = 2 ** Math.ceil(Math.log2(highest / MOST_TICKS)), align = pen.textAlign;
  pen.lineWidth = 1;
  pen.textAlign = "right";
  for (let bytes = step; bytes < highest; bytes += step) {
    pen.globalAlpha = 0.35;
    pen.strokeStyle = theme.text;
    pen.beginPath();
    pen.moveTo(LABEL_PX, y(bytes));
    pen.lineTo(width - RIGHT_PX, y(bytes));
    pen.stroke();
    pen.globalAlpha = 0.8;
    pen.fillStyle = theme.panel;
    const label = amount(bytes), long = pen.measureText(label).width;
    pen.fillRect(width - RIGHT_PX - long - 6, y(bytes) + 1, long + 4, 13);
    pen.globalAlpha = 1;
    pen.fillStyle = theme.text;
    pen.fillText(label, width - RIGHT_PX - 4, y(bytes) + 8);
  }
  pen.textAlign = align;
}

/** The chosen device's memory in words: when the pointer or the selected block is, else at its peak. */
function memoryWords(view) {
  const curve = curveOf(view, view.lane), about = view.data.lanes[view.lane];
  if (!curve) return "";
  const place = view.selected, time = view.pointed ?? (place ? view.blocks(place).start[place.index] : null);
  if (time === null || time === undefined) {
    const named = Object.entries(about.parts || {}).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => `${name} ${amount(bytes)}`);
    return `Memory of ${about.device}: at its peak ${amount(about.peak_bytes)}${named.length ? `: ${named.join(", ")}` : ""}.`;
  }
  const i = curve.at(time), [kept, activations, other] = parts(curve, i, about.constant_bytes);
  return `Memory of ${about.device} at ${duration(time)}: ${amount(curve.total[i])}: ${SORTS[0][0]} ${amount(kept)}, `
    + `activations ${amount(activations)}, ${SORTS[2][0]} ${amount(other)}.`;
}
