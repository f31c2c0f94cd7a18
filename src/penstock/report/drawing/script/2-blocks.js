/* Blocks of a strip as typed arrays, sorted by their start. Kinds are numbers in the order of KINDS. */

const KINDS = "FBIWRUfba<>tgsom";
const COMPUTING = 6, MOVING = 9;
const KIND_OF_CODE = new Uint8Array(128);
[...KINDS].forEach((letter, k) => { KIND_OF_CODE[letter.charCodeAt(0)] = k; });

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** Zigzag varints; with `sum` each is the difference from the one before. One plain number means that all are equal to it. */
function column(packed, count, values, sum) {
  if (typeof packed === "number") return values.fill(packed);
  const bytes = bytesOf(packed);
  let at = 0, last = 0;
  for (let i = 0; i < count; i++) {
    let byte = bytes[at++], low = byte & 127, shift = 7;
    while (byte > 127 && shift < 28) {
      byte = bytes[at++];
      low |= (byte & 127) << shift;
      shift += 7;
    }
    let value = low >>> 1;
    for (let scale = 2 ** 27; byte > 127; scale *= 128) {
      byte = bytes[at++];
      value += (byte & 127) * scale;
    }
    if (low & 1) value = -value - 1;
    values[i] = last = sum ? last + value : value;
  }
  return values;
}

class Blocks {
  constructor(packed) {
    this.longest = 0;
    const count = this.count = packed.kind.length;
    this.kind = new Uint8Array(count);
    this.stage = column(packed.stage, count, new Int32Array(count), true);
    this.number = column(packed.number, count, new Int32Array(count), true);
    const gap = column(packed.gap, count, new Float64Array(count), false);
    const length = column(packed.length, count, new Float64Array(count), false);
    this.start = gap;
    this.end = length;
    this.latest = new Float64Array(count);
    const kinds = packed.kind;
    for (let i = 0, time = 0, latest = 0; i < count; i++) {
      this.kind[i] = KIND_OF_CODE[kinds.charCodeAt(i)];
      time = gap[i] += time;
      if (length[i] > this.longest) this.longest = length[i];
      time = length[i] += time;
      this.latest[i] = latest = time > latest ? time : latest;
    }
  }

  /** The same blocks in two: those of one direction, and the others, each in the order of their start. */
  directions() {
    if (this.split) return this.split;
    const forward = KIND_OF_CODE[102], { kind, number, start, end, count } = this, parts = [0, 1].map(() => {
      const part = Object.create(Blocks.prototype);
      part.count = 0;
      for (const name of ["kind", "number", "start", "end", "latest"]) part[name] = new this[name].constructor(count);
      return part;
    });
    const latest = [0, 0];
    for (let i = 0; i < count; i++) {
      const which = kind[i] === forward ? 1 : 0, part = parts[which], at = part.count++;
      part.kind[at] = kind[i];
      part.number[at] = number[i];
      part.start[at] = start[i];
      part.end[at] = end[i];
      part.latest[at] = latest[which] = Math.max(latest[which], end[i]);
    }
    return this.split = parts;
  }

  /** The first block that may reach beyond `time`. */
  after(time) {
    let low = 0, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.latest[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  /** The block that covers `time`, the last one to begin; -1 if there is none. */
  at(time, accepts = () => true) {
    let found = -1;
    for (let i = this.after(time); i < this.count && this.start[i] <= time; i++) {
      if (this.end[i] > time && accepts(this.kind[i])) found = i;
    }
    return found;
  }
}

/** The three parts of a strip, unpacked when they are first looked at. */
class Strip {
  constructor(packed) { this.packed = packed; }
  get compute() { return this.unpacked("compute"); }
  get communication() { return this.unpacked("communication"); }
  get idle() { return this.unpacked("idle"); }

  unpacked(part) {
    const blocks = new Blocks(this.packed[part]);
    Object.defineProperty(this, part, { value: blocks });
    return blocks;
  }
}

const stripOf = (packed) => new Strip(packed);
