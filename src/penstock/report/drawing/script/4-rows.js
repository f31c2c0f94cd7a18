/* Which lanes stand where: grouped by node or in the order of stages. Of many lanes those that are equal share a row
   with their number, until their group is opened. */

const ROW_LEAST_PX = 14, ROW_MOST_PX = 34, HEAD_PX = 18, WANTED_PX = 520, FOLD_ABOVE = 32;

class Rows {
  constructor(data) {
    this.lanes = data.lanes;
    this.measured = data.lanes.some((lane) => lane.measured !== null);
    this.showsMeasured = this.measured;
    this.many = data.lanes.length > FOLD_ABOVE;
    const nodes = new Set(data.lanes.map((lane) => lane.node));
    this.group(!this.many && nodes.size > 1 && data.lanes.length > nodes.size);
  }

  /** The group of a lane: its node, or those that do the same. */
  groupOf(lane) {
    return this.byNode ? lane.node : this.many ? `${lane.strip} ${lane.measured}` : "";
  }

  place() {
    const groups = new Map();
    this.lanes.forEach((lane, number) => {
      const name = this.groupOf(lane);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(number);
    });
    const rows = [];
    for (const [name, members] of groups) {
      const open = !this.folded.has(name);
      if (this.byNode) rows.push({ node: name, title: name, members, height: HEAD_PX });
      else if (this.many && open && members.length > 1) rows.push({ node: name, title: "equal", members, height: HEAD_PX });
      if (open) { for (const lane of members) rows.push({ lane, alike: 1, members: [lane] }); continue; }
      const equal = new Map();
      for (const lane of members) {
        const { strip, measured } = this.lanes[lane], key = `${strip} ${measured}`;
        if (equal.has(key)) equal.get(key).push(lane); else equal.set(key, [lane]);
      }
      for (const those of equal.values()) rows.push({ lane: those[0], alike: those.length, members: those });
    }
    const lanes = rows.filter((row) => row.lane !== undefined).length;
    const heads = rows.length - lanes;
    const fit = Math.floor((WANTED_PX - heads * HEAD_PX) / Math.max(1, lanes));
    const height = Math.max(ROW_LEAST_PX, Math.min(ROW_MOST_PX, fit)) * (this.showsMeasured ? 1.7 : 1);
    let y = 0;
    for (const row of rows) {
      row.y = y;
      if (row.lane !== undefined) row.height = Math.round(height);
      y += row.height;
    }
    this.rows = rows;
    this.height = y;
    this.rowOf = new Map();
    for (const row of rows) if (row.lane !== undefined) for (const lane of row.members) this.rowOf.set(lane, row);
  }

  /** The row at a height; the rows between two heights. */
  at(y) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].y + this.rows[middle].height <= y) low = middle + 1; else high = middle;
    }
    return low < this.rows.length && y >= 0 ? low : -1;
  }

  between(top, bottom) {
    const first = Math.max(0, this.at(Math.max(0, top)));
    let last = first;
    while (last < this.rows.length && this.rows[last].y < bottom) last++;
    return this.rows.slice(first, last);
  }

  /** The bars of a row: which strip, whether it was measured, where its computing and its communication lie. */
  bars(row, showsCommunication) {
    const lane = this.lanes[row.lane], both = this.showsMeasured && lane.measured !== null;
    const half = both ? Math.floor((row.height - 1) / 2) : row.height;
    const bar = (strip, measured, y, height) => {
      const thin = showsCommunication ? Math.max(2, Math.round(height * 0.14)) : 0;
      return { strip, measured, compute: [y + 1, height - 2 * thin - 2], moves: [y + height - 2 * thin - 1, thin] };
    };
    const found = [bar(lane.strip, false, row.y, half)];
    if (both) found.push(bar(lane.measured, true, row.y + half, half));
    return found;
  }

  /** Open or close a group. */
  fold(name) {
    if (this.folded.has(name)) this.folded.delete(name); else this.folded.add(name);
    this.place();
  }

  group(byNode) {
    this.byNode = byNode;
    this.folded = new Set(this.many ? this.lanes.map((lane) => this.groupOf(lane)) : []);
    this.place();
  }
}
