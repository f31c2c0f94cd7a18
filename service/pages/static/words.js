/* Numbers as people read them, as penstock.schemas.amounts writes them on the server. */

export function digits(number) {
  const size = Math.abs(number);
  if (size >= 99.95) return Math.round(number).toLocaleString("en");
  return number.toFixed(size >= 9.995 ? 1 : 2);
}

export function duration(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  for (const [limit, unit, scale] of [[1e6, "µs", 1e3], [1e9, "ms", 1e6]]) {
    if (size < limit * 0.9995) return `${digits(ns / scale)} ${unit}`;
  }
  return `${digits(ns / 1e9)} s`;
}

export function amount(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(bytes) < 1023.5) return unit === "B" ? `${Math.round(bytes)} B` : `${digits(bytes)} ${unit}`;
    bytes /= 1024;
  }
  return `${digits(bytes)} TiB`;
}

export const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.9995 ? 1 : 0)} %`;

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}

/** An element with its attributes and children; texts are never read as markup. */
export const made = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);

/** The same, of a drawing. */
export const drawn = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
