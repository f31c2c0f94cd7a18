/* Blocks as pixels. A column of pixels shows the kind that fills most of it, the paler the less of it is filled, so that
   zoomed out nothing is lost and no block costs more than an addition. Codes: kind + 1, four bits of strength, one bit
   for what a search leaves out. */

const STRENGTH = 16, DIM = 1 << 12, ROWS_OF_HATCH = 6;
const HATCHES = {
  "<": (x, y) => (x + y) % 6 < 2, ">": (x, y) => (x - y + 600) % 6 < 2, t: (x, y) => y % 3 === 0, g: (x) => x % 4 < 2,
  s: (x, y) => x % 3 === 0 && y % 3 === 0, o: (x, y) => x % 6 < 1 || y % 6 < 1, m: (x, y) => (x >> 1) % 2 === (y >> 1) % 2,
};

const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
const mixed = (a, b, share) => a.map((value, i) => Math.round(value + (b[i] - value) * share));
const luminance = (colour) => {
  const [r, g, b] = colour.map((value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

class Raster {
  constructor() {
    this.shares = new Float64Array(KINDS.length);
    this.image = null;
    this.glyphs = null;
  }

  resize(width, height, ratio) {
    if (!this.image || this.image.width !== width || this.image.height !== height) {
      this.image = new ImageData(Math.max(1, width), Math.max(1, height));
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.width = width;
    this.height = height;
    if (this.ratio !== ratio) { this.ratio = ratio; this.glyphs = null; }
  }

  /** `colours`: of each kind, [r, g, b]; `ground` lies below everything. */
  paint(colours, ground) {
    this.table = new Uint32Array(DIM * 2).fill(packed(ground));
    this.ground = packed(ground);
    this.ink = colours.map((colour) => (luminance(colour) > 0.18 ? 0 : 255));
    colours.forEach((colour, k) => {
      for (let level = 0; level < STRENGTH; level++) {
        const tone = mixed(ground, colour, (level + 1) / STRENGTH);
        this.table[(k + 1) * STRENGTH + level] = packed(tone);
        this.table[DIM + (k + 1) * STRENGTH + level] = packed(mixed(ground, tone, 0.18));
      }
    });
    this.pale = colours.map((colour) => packed(mixed(ground, colour, 0.16)));
    this.strong = colours.map((colour) => packed(mixed(ground, colour, 0.8)));
  }

  clear() { this.pixels.fill(this.ground); }

  /** Codes of all columns into `codes`; returns how many blocks were looked at. */
  columns(blocks, from, scale, shown, only, codes) {
    const { start, end, kind, number, count } = blocks, shares = this.shares, width = codes.length;
    const to = from + width / scale, gap = this.ratio, wide = 5 * this.ratio;
    codes.fill(0);
    let open = -1, dim = DIM, touched = 0, total = 0;
    const add = (k, share) => {
      shares[k] = touched >> k & 1 ? shares[k] + share : share;
      touched |= 1 << k;
      total += share;
    };
    const close = () => {
      let best = 31 - Math.clz32(touched);
      for (let rest = touched & ~(1 << best); rest;) {
        const k = 31 - Math.clz32(rest);
        if (shares[k] > shares[best]) best = k;
        rest &= ~(1 << k);
      }
      const level = total >= 1 ? STRENGTH - 1 : Math.max(4, (total * STRENGTH + 0.5 | 0) - 1);
      codes[open] = (best + 1) * STRENGTH + level | dim;
      open = -1;
      dim = DIM;
      touched = total = 0;
    };
    let i = blocks.after(from), looked = 0;
    for (; i < count && start[i] < to; i++) {
      const k = kind[i];
      if (!shown[k]) continue;
      looked++;
      const a = Math.max((start[i] - from) * scale, 0);
      let b = Math.min((end[i] - from) * scale, width);
      if (b <= a) continue;
      if (b - a > wide) b -= gap;
      const c = a | 0, d = b | 0, faint = only >= 0 && number[i] !== only ? DIM : 0;
      if (open !== c && open >= 0) close();
      open = c;
      dim &= faint;
      if (c === d) { add(k, b - a); continue; }
      add(k, c + 1 - a);
      close();
      if (d > c + 1) codes.fill((k + 1) * STRENGTH + STRENGTH - 1 | faint, c + 1, d);
      if (b > d && d < width) { open = d; dim = faint; add(k, b - d); }
    }
    if (open >= 0 && open < width) close();
    return looked;
  }

  /** Rows of pixels from `top` on from the codes; what is idle has its reason's hatch. */
  band(codes, idle, left, top, height) {
    const { pixels, table, width } = this, count = codes.length;
    const bottom = Math.min(top + height, this.height), first = Math.max(top, 0);
    const variants = idle ? ROWS_OF_HATCH : 1;
    for (let y = first; y < bottom; y++) {
      const base = y * width + left;
      if (y - first >= variants) {
        const copied = (y - variants) * width + left;
        pixels.copyWithin(base, copied, copied + count);
        continue;
      }
      for (let x = 0; x < count; x++) pixels[base + x] = table[codes[x]];
      if (idle) this.hatch(codes, idle, base, y);
    }
  }

  hatch(codes, idle, base, y) {
    const { pixels, pale, strong, ratio } = this, row = Math.floor(y / ratio);
    for (let x = 0; x < codes.length; x++) {
      if (codes[x] || !idle[x]) continue;
      const k = (idle[x] & DIM - 1) / STRENGTH - 1 | 0;
      pixels[base + x] = HATCHES[KINDS[k]](Math.floor(x / ratio), row) ? strong[k] : pale[k];
    }
  }

  /** A number in its block, if it has room. */
  label(text, x, y, room, k) {
    this.glyphs = this.glyphs || glyphs(this.ratio);
    const { pixels, width, height, glyphs: shapes } = this, ink = this.ink[k];
    if (text.length * shapes.advance > room || y < 0 || y + shapes.height > height) return;
    for (const letter of text) {
      const mask = shapes.masks[letter.charCodeAt(0) - 48];
      for (let row = 0, at = 0; row < shapes.height; row++) {
        const base = (y + row) * width + x;
        for (let i = 0; i < shapes.advance; i++, at++) {
          const alpha = mask[at];
          if (!alpha) continue;
          const old = pixels[base + i];
          const blend = (shift) => { const value = old >> shift & 255; return value + ((ink - value) * alpha >> 8) << shift; };
          pixels[base + i] = (0xff000000 | blend(0) | blend(8) | blend(16)) >>> 0;
        }
      }
      x += shapes.advance;
    }
  }
}

/** The ten digits as masks of alpha. */
function glyphs(ratio) {
  const canvas = document.createElement("canvas"), size = Math.round(11 * ratio);
  const advance = Math.ceil(size * 0.62), height = size;
  canvas.width = advance * 10;
  canvas.height = height;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.font = `${size}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  for (let d = 0; d < 10; d++) pen.fillText(String(d), d * advance, height / 2 + 1);
  const masks = Array.from({ length: 10 }, (_, d) => {
    const { data } = pen.getImageData(d * advance, 0, advance, height);
    return Uint8Array.from({ length: advance * height }, (_each, i) => data[4 * i + 3]);
  });
  return { advance, height, masks };
}
