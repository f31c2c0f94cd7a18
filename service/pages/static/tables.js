/* Tables that can be sorted: the heads of table[data-sortable] become buttons. A cell's data-value counts before its text. */

const key = (row, column) => {
  const cell = row.cells[column], text = (cell?.dataset.value ?? cell?.textContent ?? "").trim();
  const number = text === "" || text === "–" ? NaN : Number(text.replaceAll(",", ""));
  return { text, number, none: text === "" || text === "–" };
};

/** Cells without a value stay last, whichever the direction. */
function compare(a, b, sign) {
  if (a.none || b.none) return Number(a.none) - Number(b.none);
  const order = Number.isNaN(a.number) || Number.isNaN(b.number)
    ? a.text.localeCompare(b.text, "en", { numeric: true }) : a.number - b.number;
  return sign * order;
}

function sort(table, column, direction) {
  const sign = direction === "descending" ? -1 : 1;
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, key: key(row, column) }));
  rows.sort((a, b) => compare(a.key, b.key, sign));
  table.tBodies[0].append(...rows.map(({ row }) => row));
  table.dataset.order = `${column} ${direction}`;
  [...table.tHead.rows[0].cells].forEach((head, number) => {
    if (number === column) head.setAttribute("aria-sort", direction); else head.removeAttribute("aria-sort");
  });
}

function prepare(table, order) {
  table.dataset.prepared = "";
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (head.hasAttribute("data-fixed")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, column, head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending"));
    head.append(button);
  });
  if (order) sort(table, Number(order.split(" ")[0]), order.split(" ")[1]);
}

/** Prepare the tables within an element; ``order``: how the one before it was sorted. */
export function tables(within = document, order = undefined) {
  for (const table of within.querySelectorAll("table[data-sortable]:not([data-prepared])")) prepare(table, order);
}

tables();
