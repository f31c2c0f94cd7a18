/* What a block waited for and what waits for it, and the same in words. A place is {strip, part, index}; of a
   merged timeline also {blocks}, the finer ones that it is an index of. */

const PART_OF = (kind) => (kind < COMPUTING ? "compute" : kind < MOVING ? "communication" : "idle");
const K = Object.fromEntries([...KINDS].map((letter, k) => [letter, k]));

class Reasons {
  constructor(data, strips) {
    this.data = data;
    this.strips = strips;
    this.firsts = new Set(data.firsts);
    this.index = null;
  }

  key(kind, stage, number) { return (kind * 16384 + stage) * 4194304 + number; }

  /** Where things are among the predicted strips, or among the measured ones. */
  places(measured) {
    if (!this.index) {
      this.index = [new Map(), new Map()];
      const own = [new Set(), new Set()];
      for (const lane of this.data.lanes) {
        own[0].add(lane.strip);
        if (lane.measured !== null) own[1].add(lane.measured);
      }
      own.forEach((numbers, which) => {
        for (const strip of numbers) {
          for (const part of ["compute", "communication"]) {
            const blocks = this.strips[strip][part];
            for (let index = 0; index < blocks.count; index++) {
              const key = this.key(blocks.kind[index], blocks.stage[index], blocks.number[index]);
              const found = this.index[which].get(key);
              if (found) found.push({ strip, part, index }); else this.index[which].set(key, [{ strip, part, index }]);
            }
          }
        }
      });
    }
    return this.index[measured ? 1 : 0];
  }

  find(measured, kinds, stage, number) {
    for (const kind of kinds) {
      const found = this.places(measured).get(this.key(K[kind], stage, number));
      if (found) return found.slice(0, 16);
    }
    return [];
  }

  before(place, measured) {
    if (this.data.merged) return [];
    const blocks = this.strips[place.strip][place.part], i = place.index;
    const letter = KINDS[blocks.kind[i]], s = blocks.stage[i], m = blocks.number[i];
    const find = (kinds, stage) => this.find(measured, kinds, stage, m);
    const own = (kinds) => find(kinds, s).filter((each) => each.strip === place.strip);
    const previous = place.part === "compute" && i > 0 ? [{ strip: place.strip, part: place.part, index: i - 1 }] : [];
    const received = (way, stage, makers) => {
      const moved = find([way], stage).filter((each) => each.strip === place.strip);
      return moved.length ? moved : find(makers, stage);
    };
    switch (letter) {
      case "F": return [...(this.firsts.has(s) ? [] : received("f", s - 1, ["F"])), ...previous];
      case "B": case "I":
        return [...(this.firsts.has(s + 1) ? [] : received("b", s + 1, ["I", "B"])), ...own(["R", "F"]), ...previous];
      case "R": return [...own(["F"]), ...previous];
      case "W": return [...own(["I"]), ...previous];
      case "U": return [...this.sums(place, measured, s, blocks.start[i]), ...previous];
      case "f": return find(["F"], s);
      case "b": return find(["I", "B"], s);
      default: return [];
    }
  }

  /** The all-reduces of the strip that end before an update begins. */
  sums(place, measured, stage, start) {
    const moved = this.strips[place.strip].communication;
    let last = -1;
    for (let i = 0; i < moved.count; i++) {
      if (moved.kind[i] === K.a && moved.stage[i] === stage && moved.end[i] <= start) last = i;
    }
    return last < 0 ? [] : [{ strip: place.strip, part: "communication", index: last }];
  }

  after(place, measured) {
    if (this.data.merged) return [];
    const blocks = this.strips[place.strip][place.part], i = place.index;
    const letter = KINDS[blocks.kind[i]], s = blocks.stage[i], m = blocks.number[i];
    const find = (kinds, stage) => this.find(measured, kinds, stage, m);
    const own = (kinds) => find(kinds, s).filter((each) => each.strip === place.strip);
    const following = place.part === "compute" && i + 1 < blocks.count
      ? [{ strip: place.strip, part: place.part, index: i + 1 }] : [];
    const sent = (way, stage, takers) => {
      const moved = find([way], s).filter((each) => each.strip === place.strip);
      return moved.length ? moved : find(takers, stage);
    };
    switch (letter) {
      case "F": return [...(this.firsts.has(s + 1) ? [] : sent("f", s + 1, ["F"])), ...own(["R", "I", "B"]), ...following];
      case "B": case "I":
        return [...(this.firsts.has(s) ? [] : sent("b", s - 1, ["I", "B"])), ...(letter === "I" ? own(["W"]) : []), ...following];
      case "R": return [...own(["I", "B"]), ...following];
      case "f": return this.firsts.has(s + 1) ? [] : find(["F"], s + 1);
      case "b": return this.firsts.has(s) ? [] : find(["I", "B"], s - 1);
      default: return following;
    }
  }

  /** The one of several that ended last: what decided when the block began. */
  decisive(places) {
    const end = ({ strip, part, index }) => this.strips[strip][part].end[index];
    return places.reduce((last, each) => (last === null || end(each) > end(last) ? each : last), null);
  }

  name(place) {
    const blocks = place.blocks || this.strips[place.strip][place.part], i = place.index, letter = KINDS[blocks.kind[i]];
    const words = this.data.names[letter], m = blocks.number[i], s = blocks.stage[i];
    if (s < 0) return words;
    const number = m < 0 ? (m === -2 ? " of a tied parameter" : "") : letter === "a" || letter === "U" ? ` of bucket ${m}` : ` of micro-batch ${m}`;
    return `${words}${number}, stage ${s}`;
  }

  /** What stands between the block and the one before it, piece by piece, or that nothing does. */
  waited(place, measured) {
    const strip = this.strips[place.strip], blocks = strip[place.part], i = place.index;
    const last = this.decisive(this.before(place, measured));
    if (place.part !== "compute") return last ? `follows ${this.name(last)}` : "";
    const since = i > 0 ? blocks.end[i - 1] : 0, gap = blocks.start[i] - since;
    if (gap <= 0) return i > 0 ? `its device was busy until then with ${this.name({ ...place, index: i - 1 })}` : "nothing comes before it";
    const pieces = [];
    for (let k = strip.idle.after(since); k < strip.idle.count && strip.idle.start[k] < blocks.start[i]; k++) {
      const lasts = Math.min(strip.idle.end[k], blocks.start[i]) - Math.max(strip.idle.start[k], since);
      pieces.push(`${duration(lasts)} ${this.data.names[KINDS[strip.idle.kind[k]]]}`);
    }
    const why = pieces.length ? `: ${pieces.join(", ")}` : "";
    return `its device waited ${duration(gap)}${why}${last ? `; the last that it needed was ${this.name(last)}` : ""}`;
  }
}
