/* What lives on a page: elements with data-live are fetched again with their page and replaced where they changed.
   Every second while the page says data-busy, every ten else; not while it is hidden, nor while the user chooses in it. */

import { tables } from "./tables.js";

const BUSY_MS = 1000, IDLE_MS = 10000, LOST_MS = 5000;

export const changed = new EventTarget();

for (const element of document.querySelectorAll("[data-needs-script]")) element.hidden = false;

const isInUse = (element) => element.querySelector("input:checked, details[open]:not([data-shown])") !== null
  || (element.contains(document.activeElement) && document.activeElement.matches("input, select, textarea"));

/** What has the focus, by what stays the same when its element is replaced. */
function focused(element) {
  const active = document.activeElement;
  if (!element.contains(active)) return null;
  if (active.id) return `#${CSS.escape(active.id)}`;
  const href = active.getAttribute("href");
  return href ? `a[href="${CSS.escape(href)}"]` : null;
}

function replace(element, fresh) {
  if (element.innerHTML === fresh.innerHTML && element.attributes.length === fresh.attributes.length) return false;
  const focus = focused(element), order = element.querySelector("table")?.dataset.order;
  for (const name of element.getAttributeNames()) if (!fresh.hasAttribute(name)) element.removeAttribute(name);
  for (const name of fresh.getAttributeNames()) element.setAttribute(name, fresh.getAttribute(name));
  element.replaceChildren(...fresh.childNodes);
  for (const one of element.querySelectorAll("[data-needs-script]")) one.hidden = false;
  tables(element, order);
  if (focus) element.querySelector(focus)?.focus({ preventScroll: true });
  return true;
}

/** Fetch the page again now, and replace what lives on it. */
export async function refresh() {
  const answer = await fetch(window.location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  let any = false;
  for (const element of document.querySelectorAll("[data-live]")) {
    const fresh = page.querySelector(`[data-live="${element.dataset.live}"]`);
    if (fresh && !isInUse(element)) any = replace(element, fresh) || any;
  }
  if (any) { document.title = page.title; changed.dispatchEvent(new Event("change")); }
}

async function follow() {
  for (;;) {
    const busy = document.querySelector("[data-busy]") !== null;
    await new Promise((wake) => setTimeout(wake, busy ? BUSY_MS : IDLE_MS));
    if (document.hidden) continue;
    try { await refresh(); } catch { await new Promise((wake) => setTimeout(wake, LOST_MS)); }
  }
}

if (document.querySelector("[data-live]")) follow();
