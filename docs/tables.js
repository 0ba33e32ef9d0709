// Tables inside <div class="choosable" data-filters="slot, cache">: the button in a header sorts by its column, and the
// columns named in data-filters can be filtered by the values that their cells list, with commas between them. The
// address of the page keeps the filters. Without this script the table stands as it is written.

const compare = new Intl.Collator("en", { numeric: true }).compare;
const FOLLOWING = { none: "ascending", ascending: "descending", descending: "none" };

for (const box of document.querySelectorAll(".choosable")) {
  const table = box.querySelector("table");
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows];
  const names = heads.map((head) => head.textContent);
  for (const row of rows) [...row.cells].forEach((cell, column) => (cell.dataset.name = names[column]));
  heads.forEach((head, column) => makeSortable(head, column, heads, rows));
  box.prepend(makeFilters(box.dataset.filters.split(", "), names, rows));
  box.classList.add("active");
}

function makeSortable(head, column, heads, rows) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  head.ariaSort = "none";
  button.addEventListener("click", () => {
    const order = FOLLOWING[head.ariaSort];
    for (const other of heads) other.ariaSort = "none";
    head.ariaSort = order;
    rows[0].parentNode.append(...inOrder(rows, column, order));
  });
}

// The rows by a column, those with an empty cell last; in the order of the page for "none".
function inOrder(rows, column, order) {
  if (order === "none") return rows;
  const sign = order === "descending" ? -1 : 1;
  const text = (row) => row.cells[column].textContent;
  return [...rows].sort((a, b) => !text(a) - !text(b) || sign * compare(text(a), text(b)));
}

function makeFilters(filtered, names, rows) {
  const form = document.createElement("form");
  const count = document.createElement("output");
  const columns = filtered.map((name) => names.indexOf(name));
  const selects = columns.map((column) => makeSelect(names[column], rows.map((row) => values(row, column))));
  const update = () => {
    for (const row of rows) {
      row.hidden = selects.some(({ value }, i) => value && !values(row, columns[i]).includes(value));
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    keepInAddress(selects);
  };
  form.append(...selects.map((select) => select.parentNode), count);
  form.addEventListener("change", update);
  update();
  return form;
}

function values(row, column) {
  return row.cells[column].textContent.split(", ");
}

// A labelled menu of the values of a column; what it starts with is from the address.
function makeSelect(name, listed) {
  const label = document.createElement("label");
  const select = document.createElement("select");
  select.name = name;
  select.append(new Option("any", ""), ...[...new Set(listed.flat())].map((value) => new Option(value, value)));
  select.value = new URLSearchParams(location.search).get(name) ?? "";
  if (select.selectedIndex < 0) select.value = "";
  label.append(name, select);
  return select;
}

function keepInAddress(selects) {
  const address = new URL(location);
  for (const { name, value } of selects) {
    if (value) address.searchParams.set(name, value);
    else address.searchParams.delete(name);
  }
  history.replaceState(history.state, "", address);
}
