// A table of any length: only the rows in sight are in the page. Sort, filter, select and copy, by pointer and by keyboard.
import { h, setText, soon } from "./charts.js";
import { indices, sortIndex } from "./columns.js";
import { FILTER_HELP, readFilter } from "./filter.js";

const ROW = 23;
const HEAD = 26;
let tables = 0;

/** Put text on the clipboard, where the page may not ask for it too. Resolves to whether that worked. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { value: text, style: { position: "fixed", opacity: "0" } });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/**
 * Columns: {key, title, help, names, isText, value(i), text(i), color(i), width}. `value` sorts and filters, `text` is
 * shown, `exact(i)` (else the text) is copied and exported. Options: label, onselect(i or null), onfilter(), example (of a
 * filter).
 */
export class VirtualTable {
  constructor({ label, onselect, onfilter, height = 300, sort = null, example = "ffn -gap" }) {
    this.uid = `cn-table-${(tables += 1)}-${Math.random().toString(36).slice(2, 8)}`;
    this.onselect = onselect || (() => {});
    this.onfilter = onfilter || (() => {});
    this.columns = [];
    this.all = new Uint32Array(0);
    this.index = this.all;
    this.sort = sort;
    this.active = -1;
    this.chosen = null;
    this.pool = [];
    this.version = 0;
    this.build(label, height, example);
  }

  build(label, height, example) {
    this.input = h("input", { class: "cn-filter", type: "search", placeholder: `Filter:  ${example}`, spellcheck: false,
      title: FILTER_HELP.join("\n"), oninput: () => this.filterSoon() });
    this.input.setAttribute("aria-label", `Filter ${label}`);
    this.input.setAttribute("aria-describedby", `${this.uid}-help`);
    this.count = h("span", { class: "cn-note cn-count", role: "status" });
    this.copyButton = h("button", { class: "cn-button", type: "button", title: "Copy the rows, or the selected one, as tab-separated text (Ctrl+C)",
      onclick: () => this.copy() }, "Copy");
    this.tools = h("span", { class: "cn-table-tools" }, this.copyButton);
    this.head = h("div", { class: "cn-vhead", role: "row", "aria-rowindex": "1" });
    this.body = h("div", { class: "cn-vbody", role: "rowgroup" });
    this.inner = h("div", { class: "cn-vinner" }, this.head, this.body);
    this.scroller = h("div", { class: "cn-vscroll", tabIndex: 0, role: "grid", style: { maxHeight: `${height}px` } }, this.inner);
    this.scroller.setAttribute("aria-label", `${label}: arrow keys move, Enter selects, / filters`);
    this.scroller.addEventListener("scroll", () => this.drawSoon(), { passive: true });
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.click(event));
    this.node = h("div", { class: "cn-vbox" },
      h("div", { class: "cn-table-bar" }, this.input, this.count, this.tools),
      h("div", { id: `${this.uid}-help`, class: "cn-hidden" }, FILTER_HELP.join(" ")), this.scroller);
    this.observer = new ResizeObserver(() => this.drawSoon());
    this.observer.observe(this.scroller);
  }

  destroy() {
    this.observer.disconnect();
    this.callOff?.();
    clearTimeout(this.filterTimer);
  }

  /** Show other rows: `n` of them with these columns, of which `subset` (indices) is on show; the order is kept. */
  set(columns, n, subset = null) {
    const names = (list) => list.map((c) => `${c.key}|${c.title}|${c.width}|${c.help}`).join();
    const isNew = names(columns) !== names(this.columns);
    this.columns = columns;
    this.version += 1;
    this.all = subset || indices(n);
    if (this.sort && !columns.some((column) => column.key === this.sort.key)) this.sort = null;
    if (isNew) this.drawHead();
    if (this.chosen !== null && !this.all.includes(this.chosen)) this.chosen = null;
    this.refresh();
  }

  /** Filter and sort anew. */
  refresh() {
    const { keep, problem } = readFilter(this.input.value, this.columns);
    this.index = keep ? this.all.filter((i) => keep(i)) : this.all.slice();
    const column = this.sort && this.columns.find((c) => c.key === this.sort.key);
    if (column) sortIndex(this.index, (i) => column.value(i), this.sort.descending);
    this.active = this.chosen === null ? -1 : this.index.indexOf(this.chosen);
    this.input.setAttribute("aria-invalid", String(Boolean(problem)));
    this.input.classList.toggle("cn-wrong", Boolean(problem));
    const [shown, all] = [this.index.length, this.all.length].map((n) => n.toLocaleString("en-US"));
    setText(this.count, problem || (shown === all ? `${all} row${all === "1" ? "" : "s"}` : `${shown} of ${all} rows`));
    this.scroller.setAttribute("aria-rowcount", String(this.index.length + 1));
    this.node.dataset.rows = String(this.index.length);
    this.drawSoon();
  }

  filterSoon() {
    clearTimeout(this.filterTimer);
    this.filterTimer = setTimeout(() => {
      this.scroller.scrollTop = 0;
      this.refresh();
      this.onfilter();
    }, 80);
  }

  // ---- drawing

  drawHead() {
    this.head.replaceChildren(...this.columns.map((column) => {
      const button = h("button", { class: "cn-sort", type: "button", title: column.help || "", onclick: () => this.sortBy(column) }, column.title);
      const cell = h("div", { role: "columnheader", class: column.isText ? "cn-cell" : "cn-cell cn-num" }, button);
      cell.dataset.key = column.key;
      return cell;
    }));
    this.body.replaceChildren();
    this.pool = [];
    const widths = this.columns.map((c) => c.width || 90);
    this.inner.style.setProperty("--cn-columns", widths.map((w) => `minmax(${w}px, ${w}fr)`).join(" "));
    this.inner.style.minWidth = `${widths.reduce((a, b) => a + b, 0)}px`;
  }

  drawSoon() {
    if (this.callOff) return;
    this.callOff = soon(() => {
      this.callOff = null;
      this.draw();
    });
  }

  makeRow() {
    const cells = this.columns.map((c) => (c.isText && c.color
      ? h("div", { role: "gridcell", class: "cn-cell" }, h("span", { class: "cn-swatch" }), h("span"))
      : h("div", { role: "gridcell", class: c.isText ? "cn-cell" : "cn-cell cn-num" })));
    const node = h("div", { role: "row", class: "cn-vrow" }, cells);
    this.body.append(node);
    return { node, cells, at: -1, i: -1 };
  }

  /** Row `at` of the order always uses node `at` modulo their number, so that scrolling fills only what comes into sight. */
  draw() {
    const n = this.index.length;
    const height = this.scroller.clientHeight || 300;
    const top = this.scroller.scrollTop;
    const wanted = Math.min(n, Math.ceil(height / ROW) + 8);
    while (this.pool.length < wanted) this.pool.push(this.makeRow());
    const size = this.pool.length;
    const first = Math.max(0, Math.min(Math.floor(top / ROW) - 4, n - size));
    this.body.style.height = `${n * ROW}px`;
    for (const cell of this.head.children) {
      const sorted = this.sort && this.sort.key === cell.dataset.key;
      cell.setAttribute("aria-sort", sorted ? (this.sort.descending ? "descending" : "ascending") : "none");
    }
    for (let at = first; at < first + size; at += 1) this.fill(this.pool[at % size], at);
    if (this.active >= 0) this.scroller.setAttribute("aria-activedescendant", `${this.uid}-${this.active}`);
    else this.scroller.removeAttribute("aria-activedescendant");
    this.filled = this.version;
  }

  fill(row, at) {
    const i = at < this.index.length ? this.index[at] : -1;
    row.node.hidden = i < 0;
    if (i < 0) return;
    row.node.setAttribute("aria-selected", String(i === this.chosen));
    row.node.classList.toggle("cn-active", at === this.active);
    if (row.at === at && row.i === i && this.filled === this.version) return;
    Object.assign(row, { at, i });
    row.node.id = `${this.uid}-${at}`;
    row.node.style.transform = `translateY(${at * ROW}px)`;
    row.node.setAttribute("aria-rowindex", String(at + 2));
    this.columns.forEach((column, c) => {
      const cell = row.cells[c];
      if (column.isText && column.color) {
        cell.firstChild.style.background = column.color(i);
        setText(cell.lastChild, column.text(i));
      } else setText(cell, column.text(i));
    });
  }

  // ---- acting

  sortBy(column) {
    const same = this.sort?.key === column.key;
    this.sort = { key: column.key, descending: same ? !this.sort.descending : !column.isText };
    this.scroller.scrollTop = 0;
    this.refresh();
  }

  click(event) {
    const row = this.pool.find((known) => known.node.contains(event.target));
    if (row && !String(getSelection())) this.choose(row.at);
  }

  choose(at) {
    const i = this.index[at];
    this.active = at;
    this.chosen = i === undefined || i === this.chosen ? null : i;
    this.drawSoon();
    this.onselect(this.chosen);
  }

  /** Mark row `i` (or none) as selected and bring it into sight, without telling anyone. */
  show(i) {
    this.chosen = i;
    this.active = i === null ? -1 : this.index.indexOf(i);
    if (this.active >= 0) this.bring(this.active);
    this.drawSoon();
  }

  bring(at) {
    const room = this.scroller.clientHeight - HEAD - 2;
    const top = at * ROW;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + ROW > this.scroller.scrollTop + room) this.scroller.scrollTop = top + ROW - room;
  }

  key(event) {
    if (event.target !== this.scroller) return;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const n = this.index.length;
    if (event.key in moves && n) {
      this.active = Math.min(Math.max((this.active < 0 && moves[event.key] > 0 ? -1 : this.active) + moves[event.key], 0), n - 1);
      this.bring(this.active);
      this.drawSoon();
    } else if ((event.key === "Enter" || event.key === " ") && this.active >= 0) this.choose(this.active);
    else if (event.key === "Escape") this.choose(this.index.length);
    else if (event.key === "/") this.input.focus();
    else if (event.key === "c" && (event.ctrlKey || event.metaKey)) {
      if (String(getSelection())) return;
      this.copy();
    } else return;
    event.preventDefault();
  }

  /** The rows on show as lines of cells, titles first; `only` limits them to one row. */
  rows(only = null) {
    const chosen = only === null ? Array.from(this.index) : [only];
    return [this.columns.map((c) => c.full || c.title), ...chosen.map((i) => this.columns.map((c) => (c.exact ? c.exact(i) : c.text(i))))];
  }

  async copy() {
    const lines = this.rows(this.chosen).map((row) => row.map((cell) => String(cell).replace(/[\t\r\n]+/g, " ")).join("\t"));
    const done = await copyText(lines.join("\n"));
    const n = lines.length - 1;
    setText(this.count, done ? `copied ${n.toLocaleString("en-US")} row${n === 1 ? "" : "s"}` : "the browser does not allow copying here");
  }
}
