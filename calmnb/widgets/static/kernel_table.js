// KernelTable: one table of a session. Texts from the recording go into the page as text nodes only.
import { h, setText } from "./charts.js";
import { unpack } from "./columns.js";
import { hideStatic, watchTheme } from "./theme.js";
import { VirtualTable } from "./table.js";
import { saveAs, toCsv } from "./export.js";

const UNITS = [["_percent", "%"], ["_us", "µs"], ["_ms", "ms"], ["_s", "s"]];
const PLAIN = new Set(["layer", "pos", "kv_len", "n_tokens", "token", "run", "step", "calls", "steps", "warmup"]);
const FORMATS = [0, 1, 2, 3].map((n) => new Intl.NumberFormat("en-US", { minimumFractionDigits: n, maximumFractionDigits: n }));

/** Title of a column of a data frame: its unit as people write it. */
function titleOf(name) {
  if (name === "gb_per_s") return "GB/s";
  if (name === "percent_of_peak") return "% of peak";
  if (name === "flop_per_byte") return "FLOP/B";
  if (name.startsWith("bytes_") || name.endsWith("_bytes")) return name.replaceAll("_", " ");
  for (const [tail, unit] of UNITS) if (name.endsWith(tail)) return `${name.slice(0, -tail.length).replaceAll("_", " ")} ${unit}`;
  return name.replaceAll("_", " ");
}

/** The middle of the sizes of values, zeros and unknown ones left out; 0 where none is left. */
function middle(values) {
  const sizes = Float64Array.from(values).map(Math.abs).filter((v) => v > 0 && Number.isFinite(v)).sort();
  return sizes.length ? sizes[Math.floor(sizes.length / 2)] : 0;
}

/** Seconds shown, sorted and filtered as microseconds; copied as they are. */
function inMicroseconds(shared, name, values) {
  const key = `${name.slice(0, -2)}_us`;
  const us = values.map((v) => v * 1e6);
  const format = FORMATS[decimals(us)];
  return { ...shared, key, title: titleOf(key), names: [key], help: shared.help.replace("seconds", "microseconds"), value: (i) => us[i], exact: (i) => exact(values[i]),
    text: (i) => (Number.isFinite(us[i]) ? format.format(us[i]) : ""), width: Math.max(72, 22 + titleOf(key).length * 7) };
}

const exact = (x) => (Number.isFinite(x) ? String(x) : "");

/** Decimals that give the column's middle value three digits, the same for all its rows. */
function decimals(values) {
  if (values.every((v) => Number.isInteger(v) || !Number.isFinite(v))) return 0;
  const size = middle(values);
  return size >= 100 ? 1 : size >= 0.1 ? 2 : 3;
}

function columnsOf(info, found) {
  const stages = info.labels.stage;
  return info.layout.map(([name]) => {
    const [values, labels] = [found[name], info.labels[name]];
    const shared = { key: name, title: titleOf(name), full: name, names: [name], help: info.help[name] || "" };
    if (labels) {
      const text = (i) => labels[values[i]] ?? "";
      const color = name === "kernel" && stages ? (i) => info.colors[stages[found.stage[i]]] : name === "stage" && !info.labels.kernel ? (i) => info.colors[text(i)] : null;
      return { ...shared, isText: true, value: text, text, color: color && ((i) => color(i) || "#888"), width: name === "kernel" ? 170 : 118 };
    }
    if (name.endsWith("_s") && middle(values) < 0.1) return inMicroseconds(shared, name, values);
    const format = FORMATS[PLAIN.has(name) ? 0 : decimals(values)];
    return { ...shared, value: (i) => values[i], exact: (i) => exact(values[i]),
      text: (i) => (Number.isFinite(values[i]) ? format.format(values[i]) : ""), width: Math.max(66, 22 + shared.title.length * 7) };
  });
}

export default {
  render({ model, el }) {
    const root = h("div", { class: "calmnb calmnb-profile calmnb-table" });
    root.dataset.lmSuppressShortcuts = "true";
    root.addEventListener("keydown", (event) => event.stopPropagation());
    const info = model.get("info");
    const table = new VirtualTable({ label: `Table of ${info.table}`, height: info.height });
    const csv = h("button", { class: "cn-button", type: "button", title: "The table as it stands: its rows, order and columns",
      onclick: () => saveAs(toCsv(table.rows()), `${info.table}.csv`, "text/csv;charset=utf-8") }, "CSV");
    table.tools.append(csv);
    const name = h("span", { class: "cn-name" });
    setText(name, info.model);
    root.append(h("div", { class: "cn-frame" }, h("div", { class: "cn-title-line" }, name, h("span", { class: "cn-chip" }, info.table)), table.node));
    el.append(root);
    const endTheme = watchTheme(root, () => {});
    const show = () => {
      const now = model.get("info");
      table.set(columnsOf(now, unpack(now.layout, model.get("data"))), now.rows);
      root.dataset.rows = String(now.rows);
      hideStatic(now.static_id);
    };
    model.on("change:info", show);
    show();
    return () => {
      model.off("change:info", show);
      endTheme();
      table.destroy();
      root.remove();
    };
  },
};
