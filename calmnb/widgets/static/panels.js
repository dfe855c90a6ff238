// The right-hand side: where the time and the bytes of each token go.
import { bytes, micros, percent, rate, short, sortRows } from "./format.js";
import { h, LayerChart, PointChart, setText } from "./charts.js";

const COLUMNS = [
  ["name", "kernel", false], ["calls", "calls", true], ["us", "time", true],
  ["share", "share", true], ["gb_per_s", "GB/s", true], ["of_peak", "of peak", true],
];

/** Everything to the right of the chat. `act(kind, detail)` asks for downloads. */
export class Panels {
  constructor(root, tip, act) {
    this.root = root;
    this.frozen = false;
    this.pinned = false;
    this.sort = { key: "us", descending: true };
    this.store = null;
    this.buildHead();
    this.buildStages();
    this.buildCharts(root, tip);
    this.buildTable();
    this.freeze = h("button", { class: "cn-button", type: "button", onclick: () => this.toggleFreeze() }, "Freeze");
    this.freeze.setAttribute("aria-pressed", "false");
    this.freeze.title = "Hold the figures still while the answer goes on";
    const download = (what, text, title) =>
      h("button", { class: "cn-button", type: "button", title, onclick: () => act("download", what) }, text);
    this.downloads = [
      h("button", { class: "cn-button", type: "button", title: "Timeline, table and roofline of every kernel of this conversation, below the chat",
        onclick: () => act("profile") }, "Open in ProfileView"),
      download("session", "Save session", "Every step of this conversation, to open with calmnb.profile.Session.load"),
      download("csv", "CSV", "One row for each kernel of each step"),
      download("trace", "Trace", "A Chrome trace, to open in Perfetto"),
    ];
    this.source = h("span", { class: "cn-source" });
    this.node = h("section", { class: "cn-panels", role: "region" },
      this.head, this.verdict, this.stageBox, this.grid, this.tableBox,
      h("div", { class: "cn-foot" }, this.freeze, this.downloads, this.source));
    this.node.setAttribute("aria-label", "Where the time goes");
  }

  destroy() {
    for (const chart of this.charts) chart.destroy();
  }

  buildHead() {
    const big = (unit) => {
      const value = h("span", { class: "cn-big" }, "–");
      return [value, h("div", { class: "cn-stat" }, value, h("span", { class: "cn-unit" }, unit))];
    };
    const [speed, speedBox] = big("tok/s");
    const [flow, flowBox] = big("GB/s");
    this.speed = speed;
    this.flow = flow;
    this.meterFill = h("div", { class: "cn-meter-fill" });
    this.meter = h("div", { class: "cn-meter", role: "meter" }, this.meterFill);
    this.meter.setAttribute("aria-label", "Share of the memory peak");
    this.meter.setAttribute("aria-valuemin", "0");
    this.meter.setAttribute("aria-valuemax", "100");
    this.meterText = h("span", { class: "cn-meter-text" }, "of the memory peak");
    this.share = h("b", {}, "–");
    this.small = h("div", { class: "cn-small" });
    this.head = h("div", { class: "cn-head" },
      h("div", { class: "cn-stats" }, speedBox, flowBox,
        h("div", { class: "cn-peak" }, h("div", { class: "cn-peak-line" }, this.share, " ", this.meterText), this.meter)),
      this.small);
    this.verdict = h("div", { class: "cn-verdict" });
  }

  buildStages() {
    this.bar = h("div", { class: "cn-bar", role: "img" });
    this.legend = h("div", { class: "cn-legend" });
    this.stageNote = h("span", { class: "cn-note" });
    this.stageBox = h("div", { class: "cn-stages" },
      h("div", { class: "cn-caption" }, h("span", { class: "cn-title" }, "One token, stage by stage"), this.stageNote),
      this.bar, this.legend);
  }

  buildCharts(root, tip) {
    const point = (r) => [`position ${r[0]}`, `${short(r[1])} ms`, `${short(r[2])} GB/s`, `attention ${short(r[3])} ms over ${r[4]} positions`];
    this.layers = new LayerChart(root, tip, {
      title: "Time per layer", label: "Time per layer, stacked by stage", height: 158,
      tip: (layer, stage, us) => {
        const s = this.layers.stages[stage];
        return [`layer ${layer}`, { text: `${s.label} ${micros(us)}`, color: s.color },
          us > 0 && s.bytes ? `${short(s.bytes / us / 1e3)} GB/s of ${bytes(s.bytes)}` : "moves no weights"];
      },
    });
    const mode = (name, text) => h("button", { class: "cn-mini", type: "button", onclick: () => this.setMode(name) }, text);
    this.modes = { bars: mode("bars", "bars"), heat: mode("heat", "heat map") };
    this.layers.extra.append(this.modes.bars, this.modes.heat);
    this.flowChart = new PointChart(root, tip, {
      title: "Bandwidth against peak", label: "Gigabytes a second over decoding time", height: 158,
      xi: 5, yi: 2, xEmpty: 1, style: "line", xLabel: "decoding time, s", yLabel: "GB/s", tip: point,
    });
    this.latency = new PointChart(root, tip, {
      title: "Time per token", label: "Milliseconds per token over position", height: 158,
      xi: 0, yi: 1, xEmpty: 100, style: "dots", xLabel: "position, tokens", yLabel: "ms", tip: point,
    });
    this.cache = new PointChart(root, tip, {
      title: "KV cache", label: "Attention milliseconds against context length", height: 158,
      xi: 4, yi: 3, xEmpty: 100, style: "dots", xLabel: "context, tokens", yLabel: "attention, ms", tip: point,
    });
    this.charts = [this.layers, this.flowChart, this.latency, this.cache];
    this.grid = h("div", { class: "cn-grid" }, this.charts.map((chart) => chart.node));
    this.setMode("bars");
  }

  setMode(name) {
    this.layers.mode = name;
    for (const [key, button] of Object.entries(this.modes)) button.setAttribute("aria-pressed", String(key === name));
    this.layers.invalidate();
  }

  buildTable() {
    this.headCells = COLUMNS.map(([key, text, numeric]) =>
      h("th", { class: numeric ? "cn-num" : "", scope: "col" },
        h("button", { class: "cn-sort", type: "button", onclick: () => this.sortBy(key, numeric) }, text)));
    this.body = h("tbody");
    const table = h("table", { class: "cn-table" }, h("thead", {}, h("tr", {}, this.headCells)), this.body);
    table.setAttribute("aria-label", "Kernels, mean of a token");
    this.tableNote = h("span", { class: "cn-note" });
    this.tableBox = h("div", { class: "cn-kernels" },
      h("div", { class: "cn-caption" }, h("span", { class: "cn-title" }, "Kernels"), this.tableNote),
      h("div", { class: "cn-table-scroll" }, table));
  }

  sortBy(key, numeric) {
    this.sort = { key, descending: this.sort.key === key ? !this.sort.descending : numeric };
    if (this.shown) this.drawTable(this.shown.summary);
  }

  toggleFreeze() {
    this.frozen = !this.frozen;
    this.freeze.setAttribute("aria-pressed", String(this.frozen));
    setText(this.freeze, this.frozen ? "Frozen" : "Freeze");
    if (!this.frozen && this.store) this.update(this.store);
  }

  /** Dim every stage but one in the layer chart, the bar and the legend; null shows all. */
  highlight(stage) {
    this.layers.highlight = stage;
    this.layers.invalidate();
    for (const node of [...this.bar.children, ...this.legend.children]) {
      node.classList.toggle("cn-dim", stage !== null && node.dataset.stage !== stage);
    }
  }

  redraw() {
    for (const chart of this.charts) chart.invalidate();
  }

  setReadOnly(readOnly) {
    for (const button of this.downloads) button.disabled = readOnly;
  }

  /** Draw `store`: {info, summary, points, layers}. */
  update(store) {
    this.store = store;
    if (this.frozen) return;
    const { info, summary } = store;
    this.shown = { info, summary };
    this.drawHead(info, summary);
    this.drawStages(info, summary);
    this.drawCharts(info, summary, store);
    this.drawTable(summary);
    const parts = [info.device, info.threads ? `${info.threads} threads` : "", info.dtype ? `${info.dtype} weights` : "",
      info.kv_dtype ? `${info.kv_dtype} KV` : "", info.time_source ? `times: ${info.time_source}` : ""];
    setText(this.source, parts.filter(Boolean).join(" · "));
    this.source.title = this.source.textContent;
  }

  drawHead(info, s) {
    setText(this.speed, rate(s.tok_per_s));
    setText(this.flow, rate(s.gb_per_s));
    const known = s.of_peak !== null && s.of_peak !== undefined;
    setText(this.share, percent(s.of_peak));
    setText(this.meterText, info.peak_label ? `of ${info.peak_label}` : "of the memory peak (not measured)");
    this.meterFill.style.width = `${known ? Math.min(100, 100 * s.of_peak) : 0}%`;
    this.meter.setAttribute("aria-valuenow", known ? String(Math.round(100 * s.of_peak)) : "0");
    const parts = [];
    if (s.ms) parts.push(`${short(s.ms)} ms${s.ms_sd ? ` ± ${short(s.ms_sd)}` : ""} a token`);
    if (s.first_token_s) parts.push(`first token ${short(s.first_token_s)} s`);
    if (s.prompt_tok_per_s) parts.push(`prompt ${s.prompt_tokens} tok at ${rate(s.prompt_tok_per_s)} tok/s`);
    setText(this.small, parts.length ? parts.join("  ·  ") : "No token yet: the figures appear with the first answer.");
    this.drawVerdict(info, s);
  }

  drawVerdict(info, s) {
    const top = (s.stages || []).reduce((a, b) => (!a || b.share > a.share ? b : a), null);
    if (!top || !s.ms) return this.verdict.replaceChildren("One token reads every weight once; the memory sets the limit.");
    const stage = info.stages?.[top.stage];
    const out = ["The largest part of a token goes to ",
      h("span", { class: "cn-swatch", style: { background: stage?.color } }), h("b", {}, stage?.label ?? top.stage), ": ", h("b", {}, percent(top.share))];
    if (top.of_peak !== null && top.of_peak !== undefined) out.push(`, reading at ${percent(top.of_peak)} of the peak`);
    out.push(".");
    this.verdict.replaceChildren(...out);
  }

  drawStages(info, s) {
    const stages = s.stages || [];
    setText(this.stageNote, s.tokens ? `mean of ${s.tokens} tokens` : "");
    const look = (name) => info.stages?.[name] || { label: name, color: "#888" };
    const on = (name) => ({ onpointerenter: () => this.highlight(name), onpointerleave: () => this.highlight(null) });
    this.reuse(this.bar, stages, (row) => h("div", { class: "cn-seg", ...on(row.stage) }), (node, row) => {
      const { label, color } = look(row.stage);
      node.dataset.stage = row.stage;
      node.style.background = color;
      node.style.flexGrow = String(Math.max(row.share, 0.001));
      setText(node, row.share > 0.09 ? label : "");
      node.title = `${label}: ${micros(row.us)}, ${percent(row.share)}`;
    });
    this.bar.classList.toggle("cn-empty", !stages.length);
    this.bar.setAttribute("aria-label", stages.map((r) => `${look(r.stage).label} ${percent(r.share)}`).join(", ") || "no token yet");
    const make = (row) => h("div", { class: "cn-key", ...on(row.stage) }, h("span", { class: "cn-swatch" }), h("span", { class: "cn-key-name" }),
      h("span", { class: "cn-num" }), h("span", { class: "cn-num" }), h("span", { class: "cn-num cn-quiet" }));
    this.reuse(this.legend, stages, make, (node, row) => {
      const { label, color } = look(row.stage);
      node.dataset.stage = row.stage;
      const [swatch, name, time, share, flow] = node.children;
      swatch.style.background = color;
      setText(name, label);
      setText(time, micros(row.us));
      setText(share, percent(row.share));
      setText(flow, row.gb_per_s ? `${short(row.gb_per_s)} GB/s` : "");
    });
  }

  /** Keep one child a row, making or dropping nodes only when the set of stages changes. */
  reuse(parent, table, make, fill) {
    const kept = [...parent.children];
    if (kept.length !== table.length || kept.some((node, i) => node.dataset.stage !== table[i].stage)) {
      parent.replaceChildren(...table.map(make));
    }
    table.forEach((row, i) => fill(parent.children[i], row));
  }

  drawCharts(info, s, { points, layers }) {
    const n = info.n_layers || 1;
    const of = Object.fromEntries((s.stages || []).map((row) => [row.stage, row]));
    this.layers.set(layers, (info.layer_stages || []).map((name) => ({
      name, label: info.stages[name].label, color: info.stages[name].color, bytes: of[name] ? of[name].bytes / n : 0,
    })));
    const peak = info.peak_gb_per_s;
    this.flowChart.set(points, { lines: peak ? [{ points: [[0, peak], [1e9, peak]], label: `peak ${info.peak_label}` }] : [] });
    const floor = info.floor_line || [];
    this.latency.set(points, { lines: floor.length ? [{ points: floor, label: "all bytes at the peak", dash: [5, 4] }] : [] });
    const color = info.stages?.attention?.color;
    const lines = [];
    if (info.kv_line?.length) {
      const end = info.kv_line.at(-1);
      lines.push({ points: info.kv_line, label: `bytes at the peak: ${short(end[1])} ms at ${end[0]}`, dash: [5, 4] });
    }
    if (s.kv_trend) {
      const [zero, slope] = s.kv_trend;
      lines.push({ points: [[0, zero], [info.seq_len, zero + slope * info.seq_len]], color, label: `trend: ${short(s.kv_trend_ms)} ms at ${info.seq_len}` });
    }
    this.cache.set(points, { lines, xMax: info.seq_len, color });
    setText(this.cache.note, s.kv_bytes ? `${bytes(s.kv_bytes)} of ${bytes(info.kv_full_bytes)}` : info.kv_full_bytes ? `up to ${bytes(info.kv_full_bytes)}` : "");
  }

  drawTable(s) {
    const info = this.shown.info;
    COLUMNS.forEach(([key], i) => {
      const active = this.sort.key === key;
      this.headCells[i].setAttribute("aria-sort", active ? (this.sort.descending ? "descending" : "ascending") : "none");
    });
    const table = sortRows(s.kernels || [], this.sort.key, this.sort.descending);
    setText(this.tableNote, table.length ? "mean of a token" : "");
    if (this.body.firstChild?.children.length === 1) this.body.replaceChildren();
    while (this.body.children.length > table.length) this.body.lastChild.remove();
    while (this.body.children.length < table.length) {
      const name = h("td", {}, h("span", { class: "cn-swatch" }), h("span", {}), h("span", { class: "cn-quiet" }));
      this.body.append(h("tr", {}, name, COLUMNS.slice(1).map(() => h("td", { class: "cn-num" }))));
    }
    table.forEach((row, i) => {
      const [name, calls, time, share, flow, peak] = this.body.children[i].children;
      const look = info.stages?.[row.stage] || { label: row.stage, color: "#888" };
      name.children[0].style.background = look.color;
      setText(name.children[1], row.name);
      setText(name.children[2], row.name === look.label || row.name === row.stage ? "" : ` ${look.label}`);
      setText(calls, Number.isInteger(row.calls) ? row.calls : row.calls.toFixed(1));
      setText(time, micros(row.us));
      setText(share, percent(row.share));
      setText(flow, row.gb_per_s ? short(row.gb_per_s) : "");
      setText(peak, row.of_peak !== null && row.of_peak !== undefined ? percent(row.of_peak) : "");
    });
    if (!table.length) this.body.replaceChildren(h("tr", {}, h("td", { colSpan: COLUMNS.length, class: "cn-quiet" }, "no kernels yet")));
  }
}
