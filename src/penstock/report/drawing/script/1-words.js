/* Numbers as people read them, as penstock.schemas.amounts writes them. */

const digits = (value) => {
  const size = Math.abs(value);
  return size >= 99.95 ? counted(Math.round(value)) : value.toFixed(size >= 9.995 ? 1 : 2);
};

const counted = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");

function duration(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  for (const [limit, unit, scale] of [[1e6, "µs", 1e3], [1e9, "ms", 1e6]]) {
    if (size < limit * 0.9995) return `${digits(ns / scale)} ${unit}`;
  }
  return `${digits(ns / 1e9)} s`;
}

/** Times on an axis whose ticks are `step` apart: one unit for all, no more digits than they differ in. */
function axisTime(ns, step, end) {
  const [unit, scale] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(([, size]) => end >= 2 * size) || ["ns", 1];
  const places = Math.max(0, Math.min(9, -Math.floor(Math.log10(step / scale) + 1e-9)));
  return `${(ns / scale).toFixed(places)} ${unit}`;
}

function amount(bytes) {
  let left = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(left) < 1023.5) return unit === "B" ? `${Math.round(left)} B` : `${digits(left)} ${unit}`;
    left /= 1024;
  }
  return `${digits(left)} TiB`;
}
