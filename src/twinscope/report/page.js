"use strict";
// Sorting and copying of tables; the page reads the same without it.
const rawText = (cell) => cell.dataset.value ?? cell.querySelector("span")?.textContent ?? cell.textContent;

function sortBy(button) {
  const header = button.closest("th");
  const body = header.closest("table").tBodies[0];
  const column = header.cellIndex;
  const descending = header.getAttribute("aria-sort") === "ascending";
  const sign = descending ? -1 : 1;
  const key = (row) => {
    const cell = row.cells[column];
    return { number: cell.dataset.value === undefined ? NaN : Number(cell.dataset.value), text: rawText(cell).trim() };
  };
  const rows = Array.from(body.rows, (row) => ({ row, ...key(row) }));
  rows.sort((a, b) => {
    const missing = Number.isNaN(a.number) - Number.isNaN(b.number);
    // Cells without a number stay last in either direction.
    if (missing) return missing;
    if (!Number.isNaN(a.number)) return sign * (a.number - b.number);
    return sign * a.text.localeCompare(b.text, "en", { numeric: true });
  });
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  body.append(...rows.map((entry) => entry.row));
}

async function copy(button) {
  const table = document.getElementById(button.dataset.copy);
  const clean = (text) => text.replace(/[\t\r\n]+/g, " ").trim();
  const lines = Array.from(table.rows, (row) =>
    Array.from(row.cells, (cell) => clean(cell.tagName === "TH" ? cell.textContent : rawText(cell))).join("\t"));
  const text = lines.join("\n") + "\n";
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without permission, or on a page that is not secure: the older way.
    const area = document.createElement("textarea");
    area.value = text;
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const label = button.textContent;
  button.textContent = done ? "Copied" : "Not allowed here";
  setTimeout(() => { button.textContent = label; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.matches(".sort")) sortBy(button);
  else if (button?.matches(".copy")) copy(button);
});
