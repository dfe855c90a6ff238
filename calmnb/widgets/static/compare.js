// CompareView: a waterfall of the differences, the table behind it, and both rooflines. Texts are text nodes only.
import { bytes, micros, percent, short } from "./format.js";
import { h, readTheme, setText, Tip } from "./charts.js";
import { hideStatic, watchTheme } from "./theme.js";
import { unpack } from "./columns.js";
import { VirtualTable } from "./table.js";
import { Choice } from "./choice.js";
import { Roofline } from "./roofline.js";
import { signed, Waterfall } from "./waterfall.js";
import { saveAs, savePng, toCsv } from "./export.js";

const VERDICTS = { "no difference shown": "unclear" };
const NUMBERS = [0, 1, 2, 3].map((n) => new Intl.NumberFormat("en-US", { minimumFractionDigits: n, maximumFractionDigits: n }));
const fixed = (x, n) => (Number.isFinite(x) ? NUMBERS[n].format(x) : "");
const plus = (x, n) => {
  if (!Number.isFinite(x)) return "";
  const text = NUMBERS[n].format(Math.abs(x));
  return `${Number(text.replaceAll(",", "")) === 0 ? "" : x > 0 ? "+" : "−"}${text}`;
};

/** In words, what became of the step. */
export function inWords({ ratio, verdict }) {
  if (verdict === "no difference shown" || !(ratio > 0)) return "no difference shown";
  if (verdict === "faster") return ratio < 0.9 ? `${(1 / ratio).toFixed(2)} times as fast` : `${short(100 * (1 - ratio))}% less time`;
  return ratio > 1.1 ? `${ratio.toFixed(2)} times as long` : `${short(100 * (ratio - 1))}% more time`;
}

class CompareView {
  constructor(model, el) {
    this.model = model;
    this.root = h("div", { class: "calmnb calmnb-profile calmnb-compare" });
    this.root.dataset.lmSuppressShortcuts = "true";
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    el.append(this.root);
    this.tip = new Tip(this.root);
    this.by = "stage";
    this.build();
    this.endTheme = watchTheme(this.root, () => this.redraw());
    this.onChange = () => this.load();
    model.on("change:info", this.onChange);
    this.load();
  }

  destroy() {
    for (const part of [this.waterfall, this.table, this.roofline]) part.destroy();
    this.endTheme();
    this.model.off("change:info", this.onChange);
    this.root.remove();
  }

  build() {
    this.names = h("div", { class: "cn-title-line" });
    this.head = h("div", { class: "cn-figures" });
    this.notes = h("div", { class: "cn-banner", role: "note", hidden: true });
    this.waterfall = new Waterfall(this.root, this.tip, { title: "From a to b", label: "Waterfall of the differences", height: 300,
      tip: (bar) => this.describeBar(bar), onpick: (row) => this.pick(row.key, true) });
    this.roofline = new Roofline(this.root, this.tip, { title: "Rooflines", label: "Rooflines of both sessions", height: 330,
      tip: (point) => this.describePoint(point), onpick: (name) => this.pickStage(name) });
    const mode = new Choice("", [["roofline", "roofline"], ["bandwidth", "GB/s"]], (value) => {
      this.roofline.mode = value;
      mode.set(value);
      this.roofline.invalidate();
    }, "kind of plot");
    mode.set("roofline");
    this.roofline.extra.append(mode.node);
    this.choice = new Choice("compare", [["stage", "stages"], ["kernel", "kernels"], ["layer", "layers × stages"]], (by) => {
      this.by = by;
      this.pick(null);
      this.show();
    });
    this.table = new VirtualTable({ label: "Differences", height: 330, example: "ffn verdict:faster change<-10", onselect: (i) => this.pick(i === null ? null : this.rows[i].key) });
    const button = (text, title, action) => h("button", { class: "cn-button", type: "button", title, onclick: action }, text);
    this.csv = button("CSV", "The table as it stands: its rows, order and columns", () => saveAs(toCsv(this.table.rows()), "compare.csv", "text/csv;charset=utf-8"));
    this.png = button("PNG", "The waterfall and the rooflines as a picture", () => savePng([this.waterfall.canvas, this.roofline.canvas], "compare.png",
      readTheme(this.root), this.model.get("info").summary));
    this.method = h("div", { class: "cn-note cn-method" });
    this.settingsBody = h("tbody");
    this.settingsHead = h("tr");
    this.settingsTitle = h("summary");
    this.settings = h("details", { class: "cn-settings" }, this.settingsTitle, h("table", { class: "cn-plain" }, h("thead", {}, this.settingsHead), this.settingsBody));
    this.root.append(h("div", { class: "cn-frame" }, this.names, this.head, this.notes, h("div", { class: "cn-below" }, this.waterfall.node, this.roofline.node),
      h("div", { class: "cn-controls" }, this.choice.node), this.table.node, this.method, this.settings, h("div", { class: "cn-foot" }, this.csv, this.png)));
  }

  load() {
    this.info = this.model.get("info");
    this.looks = Object.fromEntries(this.info.sides[0].stages.map((stage) => [stage.name, stage]));
    hideStatic(this.info.static_id);
    this.drawHead();
    this.drawSettings();
    this.show();
  }

  // ---- header

  drawHead() {
    const { info } = this;
    const { total } = info;
    const side = (k) => [h("span", { class: "cn-side" }, "ab"[k]), h("span", { class: "cn-name" }, info.labels[k]),
      h("span", { class: "cn-chip" }, `${info.sides[k].model}, ${info.sides[k].device}`)];
    this.names.replaceChildren(...side(0), h("span", { class: "cn-sign" }, "→"), ...side(1));
    const figure = (value, words, main) => h("div", { class: main ? "cn-figure cn-main" : "cn-figure" }, h("span", { class: "cn-value" }, value), h("span", { class: "cn-unit" }, words));
    const known = total.low_us !== null;
    const verdict = h("div", { class: "cn-verdict-box" }, h("b", {}, inWords(total)),
      h("div", { class: "cn-note" }, known ? `b − a: ${signed(total.low_us)} to ${signed(total.high_us)} (${100 * info.confidence}%)` : "too few steps for an interval"));
    verdict.dataset.verdict = total.verdict;
    this.head.replaceChildren(figure(micros(total.time_us_a), "step of a", true), h("span", { class: "cn-sign" }, "→"), figure(micros(total.time_us_b), "step of b", true),
      figure(signed(total.difference_us), "difference"), figure(total.ratio ? `× ${total.ratio.toFixed(3)}` : "–", "ratio b / a"),
      figure(`${short(total.gb_per_s_a)} → ${short(total.gb_per_s_b)}`, "GB/s"), verdict);
    setText(this.notes, info.notes.join("\n"));
    this.notes.hidden = !info.notes.length;
  }

  drawSettings() {
    const { settings, labels } = this.info;
    setText(this.settingsTitle, settings.length ? settings.length === 1 ? "1 setting differs" : `${settings.length} settings differ` : "Recorded with the same settings");
    this.settings.classList.toggle("cn-none", !settings.length);
    this.settings.open = settings.length > 0 && settings.length <= 4;
    this.settingsHead.replaceChildren(...["", `a: ${labels[0]}`, `b: ${labels[1]}`].map((text) => h("th", { scope: "col" }, text)));
    this.settingsBody.replaceChildren(...settings.map((row) => h("tr", {}, row.map((text) => h("td", {}, text)))));
  }

  // ---- rows

  readRows() {
    const made = this.info.tables[this.by];
    const found = unpack(made.layout, this.model.get("data"));
    const text = (name, i) => made.labels[name]?.[found[name][i]] ?? "";
    return Array.from({ length: made.rows }, (_, i) => {
      const stage = this.looks[text("stage", i)] || { label: text("stage", i), color: "#888" };
      const layer = found.layer ? found.layer[i] : null;
      const kernel = made.labels.kernel ? text("kernel", i) : "";
      const name = layer !== null ? (layer < 0 ? stage.label : `layer ${layer} ${stage.label}`) : kernel && kernel !== stage.label ? `${kernel} ${stage.label}` : stage.label;
      return {
        key: `${i}`, name, color: stage.color, stage: text("stage", i), label: stage.label, layer, kernel, verdict: text("verdict", i), a: found.time_us_a[i], b: found.time_us_b[i],
        low: found.low_us[i], high: found.high_us[i], ratio: found.ratio[i], change: found.difference_us[i], part: found.change_percent[i],
        gbsA: found.gb_per_s_a[i], gbsB: found.gb_per_s_b[i],
      };
    });
  }

  columns() {
    const { rows } = this;
    const number = (key, title, help, value, text, more) => ({ key, title, help, value: (i) => value(rows[i]), text: (i) => text(value(rows[i]), rows[i]),
      exact: (i) => (Number.isFinite(value(rows[i])) ? String(value(rows[i])) : ""), width: 78, ...more });
    const two = (x) => fixed(x, 2);
    return [
      { key: "name", title: { stage: "stage", kernel: "kernel", layer: "layer and stage" }[this.by], names: ["name", "stage", "kernel"], isText: true, width: 170, value: (i) => rows[i].name, text: (i) => rows[i].name, color: (i) => rows[i].color },
      number("a", "a µs", "Exclusive time in a step of a", (r) => r.a, two, { names: ["a"], full: "time_us_a" }),
      number("b", "b µs", "Exclusive time in a step of b", (r) => r.b, two, { names: ["b"], full: "time_us_b" }),
      number("change", "b − a µs", "Below zero, b is faster", (r) => r.change, (x) => plus(x, 2), { names: ["change"], full: "difference_us" }),
      { ...number("interval", "interval µs", "Holds for all rows together", (r) => r.high - r.low, (x, r) => (Number.isFinite(r.low) ? `${plus(r.low, 1)} … ${plus(r.high, 1)}` : ""),
        { names: ["interval"], width: 130, full: "interval_us" }), exact: (i) => (Number.isFinite(rows[i].low) ? `${rows[i].low}..${rows[i].high}` : "") },
      number("ratio", "ratio", "b over a", (r) => r.ratio, (x) => fixed(x, 3), { names: ["ratio"], width: 66 }),
      { key: "verdict", title: "verdict", help: "Given where the interval excludes zero", names: ["verdict"], isText: true, width: 96, value: (i) => VERDICTS[rows[i].verdict] ?? rows[i].verdict, text: (i) => VERDICTS[rows[i].verdict] ?? rows[i].verdict },
      number("part", "of change %", "Part of the whole step's change", (r) => r.part, (x) => plus(x, 1), { names: ["part"], full: "change_percent", width: 92 }),
      number("gbsA", "a GB/s", "Bytes that must move over time", (r) => r.gbsA, two, { names: ["a_gbs"], full: "gb_per_s_a" }),
      number("gbsB", "b GB/s", "Bytes that must move over time", (r) => r.gbsB, two, { names: ["b_gbs"], full: "gb_per_s_b" }),
    ];
  }

  // ---- showing

  show() {
    const { info } = this;
    this.choice.set(this.by);
    this.rows = this.readRows();
    this.table.set(this.columns(), this.rows.length);
    const total = info.total;
    this.waterfall.options = { unit: info.phase === "decode" ? "token" : "step of the prompt" };
    this.waterfall.set(this.rows, { a: total.time_us_a, b: total.time_us_b, names: info.labels.map((label, k) => (label === "ab"[k] ? label : `${"ab"[k]}: ${label}`.slice(0, 26))) });
    setText(this.waterfall.note, "to the left: time saved · hatched: no difference shown");
    setText(this.method, info.tables[this.by].method);
    this.drawRoofline();
    this.root.dataset.rows = String(this.rows.length);
  }

  drawRoofline() {
    const { info } = this;
    const chosen = this.chosen === null || this.chosen === undefined ? null : this.rows.find((row) => row.key === this.chosen);
    const points = [];
    const links = [];
    const at = new Map();
    info.points.forEach((side, k) => side.forEach((sum) => {
      const look = this.looks[sum.stage] || { label: "whole step", color: "ink" };
      const point = { name: sum.stage, side: k, x: sum.flops / sum.bytes, y: sum.flops / sum.time / 1e9, gbs: sum.bytes / sum.time / 1e9, color: look.color, sum,
        share: sum.stage ? sum.share : 0.05, shape: sum.stage ? "dot" : "square", bold: !sum.stage, hollow: k === 0, on: !chosen || chosen.stage === sum.stage,
        label: this.roofline.mode === "bandwidth" || k === 1 ? (this.roofline.mode === "bandwidth" ? `${"ab"[k]} ${look.label}` : look.label) : "", title: `${"ab"[k]}: ${look.label}` };
      if (k === 1 && at.has(sum.stage)) links.push([at.get(sum.stage), points.length]);
      at.set(sum.stage, points.length);
      points.push(point);
    }));
    this.points = points;
    this.links = links;
    this.roofline.set({ points, links, peaks: this.peaks(), roofs: info.sides[1].roofs });
    setText(this.roofline.note, "○ a  ● b · area: share of time");
  }

  /** Peaks of both, each once; where they differ, they say whose they are. */
  peaks() {
    const [a, b] = this.info.sides.map((side) => side.peaks);
    const same = (p, q) => p[0] === q[0] && Math.abs(p[1] - q[1]) < 0.005 * p[1];
    const shared = b.filter((p) => a.some((q) => same(p, q)));
    const own = (side, list) => list.filter((p) => !shared.some((q) => same(p, q))).map(([kind, rate]) => [kind, rate, `${side} ${kind}`]);
    return [...shared, ...own("b", b), ...own("a", a)];
  }

  pick(key, isFromPlot = false) {
    this.chosen = key === this.chosen && isFromPlot ? null : key;
    this.waterfall.chosen = this.chosen;
    if (isFromPlot) this.table.show(this.chosen === null ? null : this.rows.findIndex((row) => row.key === this.chosen));
    this.waterfall.invalidate();
    if (this.rows) this.drawRoofline();
  }

  pickStage(stage) {
    const row = this.rows.find((known) => known.stage === stage);
    if (row) this.pick(row.key, true);
  }

  describeBar(bar) {
    if (!bar.row) return [bar.name, bar.isTotal ? micros(bar.end) : signed(bar.change)];
    const r = bar.row;
    const lines = [{ text: r.name, color: r.color }, `${micros(r.a)} → ${micros(r.b)}, ${signed(r.change)}`];
    if (Number.isFinite(r.low)) lines.push(`${signed(r.low)} to ${signed(r.high)}`);
    if (Number.isFinite(r.ratio)) lines.push(`ratio ${r.ratio.toFixed(3)}`);
    lines.push(r.verdict);
    if (Number.isFinite(r.gbsA)) lines.push(`${short(r.gbsA)} → ${short(r.gbsB)} GB/s`);
    return lines;
  }

  describePoint({ title, color, sum, x, y, gbs, side }) {
    const peak = this.info.sides[side].peak;
    return [{ text: title, color }, `${short(gbs)} GB/s${peak ? ` · ${percent(gbs / peak[1])} of peak` : ""}`, `${short(y)} GFLOP/s at ${short(x)} FLOP per byte`,
      `${bytes(sum.bytes)} in all steps`];
  }

  redraw() {
    this.waterfall?.invalidate();
    if (this.info) this.drawRoofline();
  }
}

export default {
  render({ model, el }) {
    const view = new CompareView(model, el);
    return () => view.destroy();
  },
};
