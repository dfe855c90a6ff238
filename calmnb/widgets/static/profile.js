// ProfileView: the timeline, the table and the roofline of one recording, tied together by what is selected.
// Texts from the recording (kernels, tokens, model) go into the page as text nodes only.
import { bytes, micros, percent, rate, short } from "./format.js";
import { h, readTheme, setText, Tip } from "./charts.js";
import { hideStatic, watchTheme } from "./theme.js";
import { VirtualTable } from "./table.js";
import { Choice } from "./choice.js";
import { gbPerS, Recording } from "./profile_model.js";
import { groupColumns, rowColumns } from "./profile_table.js";
import { Timeline } from "./timeline.js";
import { StepStrip } from "./steps.js";
import { Roofline } from "./roofline.js";
import { saveAs, savePng, toCsv } from "./export.js";

const DATA = ["info", "layout_of", "steps_data", "events_data", "texts_data"];
const STATE = ["step", "scope", "time", "lanes", "live", "notice"];
const CLOUD = 3000;
let views = 0;

class ProfileView {
  constructor(model, el) {
    this.model = model;
    this.id = `${Date.now()}-${(views += 1)}`;
    this.root = h("div", { class: "calmnb calmnb-profile" });
    this.root.dataset.lmSuppressShortcuts = "true";
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    el.append(this.root);
    this.tip = new Tip(this.root);
    this.stages = new Set();
    this.range = null;
    this.group = "kernel";
    this.pick = null;
    this.build();
    this.listen();
    this.endTheme = watchTheme(this.root, () => this.redraw());
    this.load();
    this.model.send({ type: "hello" });
    this.kernelTimer = setTimeout(() => this.setKernel(false), 4000);
  }

  destroy() {
    for (const part of [this.timeline, this.strip, this.table, this.roofline]) part.destroy();
    this.endTheme();
    clearTimeout(this.kernelTimer);
    clearTimeout(this.syncTimer);
    this.model.off("msg:custom", this.onCustom);
    for (const [name, handler] of this.handlers) this.model.off(`change:${name}`, handler);
    this.root.remove();
  }

  // ---- building

  build() {
    this.timeline = new Timeline(this.root, {
      tip: this.tip, describe: (i) => this.describe(i), onrange: (range) => this.setRange(range), onpick: (i) => this.pickRow(i),
      onstep: (by) => this.strip.go(by), onhint: () => this.hint(),
    });
    this.strip = new StepStrip(this.root, { tip: this.tip, onstep: (step) => this.setStep(step) });
    this.table = new VirtualTable({ label: "Kernels", height: 330, example: "ffn -gap time>20 layer:3-7", sort: { key: "time", descending: true },
      onselect: () => this.chosen(), onfilter: () => this.link() });
    this.roofline = new Roofline(this.root, this.tip, {
      title: "Roofline", label: "Roofline of the stages", height: 340, tip: (point) => this.describePoint(point), onpick: (name) => this.toggleStage(name),
    });
    this.buildHead();
    this.buildControls();
    this.buildFoot();
    const roofMode = new Choice("", [["roofline", "roofline"], ["bandwidth", "GB/s"]], (mode) => {
      this.roofline.mode = mode;
      roofMode.set(mode);
      this.roofline.invalidate();
    }, "kind of plot");
    roofMode.set("roofline");
    this.roofline.extra.append(roofMode.node);
    this.banner = h("div", { class: "cn-banner", role: "status", hidden: true });
    this.alert = h("div", { class: "cn-alert", role: "alert", hidden: true });
    this.status = h("div", { class: "cn-selection", role: "status" });
    this.clear = h("button", { class: "cn-mini", type: "button", hidden: true, onclick: () => this.clearAll() }, "clear selection");
    this.root.append(h("div", { class: "cn-frame" }, this.head, this.legend, this.banner, this.alert, this.controls, this.strip.node, this.timeline.node,
      h("div", { class: "cn-selection-line" }, this.status, this.clear),
      h("div", { class: "cn-below" }, h("section", { class: "cn-table-side" }, this.groupChoice.node, this.table.node), this.roofline.node), this.foot));
  }

  buildHead() {
    this.name = h("span", { class: "cn-name" });
    this.chips = h("span", { class: "cn-chips" });
    const stat = (text, title) => {
      const value = h("span", { class: "cn-value" }, "–");
      return { value, node: h("div", { class: "cn-figure", title }, value, h("span", { class: "cn-unit" }, text)) };
    };
    this.figures = {
      step: stat("step time", "Forward pass and choice of the token"),
      rows: stat("sum of rows", "Exclusive times of all rows: overlapping time counts once. In wall time it counts twice."),
      gap: stat("gap", "Time in the step that no row covers"),
      overlap: stat("overlap", "Time in which two rows run at once: sum of wall times minus sum of exclusive times"),
    };
    const sign = (text) => h("span", { class: "cn-sign", "aria-hidden": "true" }, text);
    this.meterFill = h("div", { class: "cn-meter-fill" });
    this.meter = h("div", { class: "cn-meter", role: "meter" }, this.meterFill);
    this.meter.setAttribute("aria-label", "Share of the memory peak");
    this.meterText = h("div", { class: "cn-meter-text" });
    const f = this.figures;
    f.step.node.classList.add("cn-main");
    this.head = h("div", { class: "cn-top" },
      h("div", { class: "cn-title-line" }, this.name, this.chips),
      h("div", { class: "cn-figures" }, f.step.node, sign("="), f.rows.node, sign("+"), f.gap.node, f.overlap.node,
        h("div", { class: "cn-peak" }, this.meterText, this.meter)));
    this.legend = h("div", { class: "cn-keys", role: "group" });
    this.legend.setAttribute("aria-label", "Stages: press to select");
  }

  buildControls() {
    const keep = (name) => (value) => this.setState(name, value);
    this.choices = {
      scope: new Choice("show", [["step", "one token", "Time within one step"], ["all", "all tokens", "All steps of the window, one after the other"]], keep("scope")),
      lanes: new Choice("rows", [["layer", "layers"], ["layer-stage", "layers × stages"], ["stage", "stages"], ["kernel", "kernels"]], keep("lanes")),
      time: new Choice("time", [["exclusive", "exclusive", "Time that a row has to itself: rows and gap sum to the step"], ["wall", "wall", "From start to end, overlaps counted on both sides"]], keep("time")),
      tool: new Choice("drag", [["select", "selects", "Drag to select a range of time"], ["zoom", "zooms", "Drag to zoom to a range (Alt)"], ["pan", "pans", "Drag to move (Shift, or the middle button)"]], (tool) => {
        this.timeline.tool = tool;
        this.choices.tool.set(tool);
        this.timeline.plot.dataset.tool = tool;
      }),
    };
    this.choices.tool.set("select");
    this.timeline.plot.dataset.tool = "select";
    const zoom = (text, label, action) => {
      const button = h("button", { class: "cn-mini", type: "button", title: label, onclick: action }, text);
      button.setAttribute("aria-label", label);
      return button;
    };
    this.hintNode = h("span", { class: "cn-note cn-hint" });
    this.controls = h("div", { class: "cn-controls", role: "toolbar" }, Object.values(this.choices).map((choice) => choice.node),
      h("span", { class: "cn-choice" }, zoom("+", "Zoom in (+)", () => this.timeline.zoom(0.6)), zoom("−", "Zoom out (-)", () => this.timeline.zoom(1 / 0.6)),
        zoom("fit", "Show all (0)", () => this.timeline.reset())), this.hintNode);
    this.controls.setAttribute("aria-label", "Timeline");
    this.groupChoice = new Choice("table of", [["kernel", "kernels"], ["layer", "layers × stages"], ["stage", "stages"], ["row", "single rows"]], (by) => {
      this.group = by;
      this.table.chosen = null;
      this.update();
    });
  }

  buildFoot() {
    const button = (text, title, action) => h("button", { class: "cn-button", type: "button", title, onclick: action }, text);
    this.csv = button("CSV", "The table as it stands: its rows, order and columns", () => saveAs(toCsv(this.table.rows()), "profile.csv", "text/csv;charset=utf-8"));
    this.png = button("PNG", "The timeline and the roofline as a picture", () => this.savePicture());
    this.needKernel = [
      button("Chrome trace", "Every row, to open in Perfetto (ui.perfetto.dev) or chrome://tracing", () => this.ask("download", { what: "trace" })),
      button("Save session", "To open with calmnb.Session.load, or ProfileView(path)", () => this.ask("download", { what: "session" })),
    ];
    this.refresh = button("Refresh", "Show what has been recorded by now", () => this.ask("refresh"));
    this.live = button("Live", "Follow the recording, twice a second", () => this.setState("live", !this.model.get("live")));
    this.source = h("span", { class: "cn-source" });
    this.foot = h("div", { class: "cn-foot" }, this.refresh, this.live, this.csv, this.png, this.needKernel, this.source);
  }

  // ---- with the kernel

  listen() {
    this.onCustom = (message, buffers) => {
      if (message.type === "hello") this.setKernel(true);
      if (message.type === "download" && message.view === this.id) saveAs(buffers[0], message.name, message.mime);
    };
    this.model.on("msg:custom", this.onCustom);
    this.handlers = [...DATA, ...STATE].map((name) => {
      const handler = () => this.changed(name);
      this.model.on(`change:${name}`, handler);
      return [name, handler];
    });
  }

  ask(type, detail = {}) { this.model.send({ type, ...detail, view: this.id }); }

  changed(name) {
    this.due = (this.due || new Set()).add(name);
    if (this.due.size > 1) return;
    queueMicrotask(() => {  // one redraw for all traits of one message
      const names = [...this.due];
      this.due = null;
      if (names.some((known) => DATA.includes(known))) this.load();
      else if (names.includes("notice") && names.length === 1) this.drawNotice();
      else this.update();
    });
  }

  setKernel(live) {
    this.hasKernel = live;
    clearTimeout(this.kernelTimer);
    this.banner.hidden = live;
    setText(this.banner, live ? "" : "Saved view: no kernel is behind it. Everything but the trace, the session file and other windows of steps works.");
    this.root.classList.toggle("cn-readonly", !live);
    for (const button of [...this.needKernel, this.refresh, this.live]) button.disabled = !live;
  }

  setState(name, value) {
    this.model.set(name, value);
    if (name === "scope" || name === "lanes") this.pick = null;
    if (this.hasKernel !== false) this.model.save_changes();
  }

  setStep(step) {
    if (this.model.get("scope") !== "step") this.model.set("scope", "step");
    this.pick = null;
    this.setState("step", step);
  }

  load() {
    const get = (name) => this.model.get(name);
    this.rec = new Recording({ info: get("info") || {}, layout: get("layout_of") || {}, stepsData: get("steps_data"), eventsData: get("events_data"), textsData: get("texts_data") });
    this.root.dataset.rows = String(this.rec.n);
    this.pick = null;
    this.range = null;
    hideStatic(this.rec.info.static_id);
    this.update();
  }

  /** Tell the kernel which rows are selected, a little later and only if it listens. */
  sync(selected) {
    clearTimeout(this.syncTimer);
    this.syncTimer = setTimeout(() => {
      if (!this.hasKernel) return;
      this.model.set("selection", new DataView(selected ? Uint32Array.from(selected).buffer : new ArrayBuffer(0)));
      this.model.save_changes();
    }, 250);
  }

  // ---- selecting

  get wall() { return this.model.get("time") === "wall"; }
  get scope() { return this.model.get("scope"); }
  get step() { return this.model.get("step"); }
  get members() { return this.scope === "step" ? this.rec.rowsOf(this.step) : [0, this.rec.n]; }

  setRange(range) {
    this.range = range;
    this.table.chosen = null;
    this.pick = null;
    this.update();
  }

  toggleStage(name) {
    if (!this.rec.stages.some((stage) => stage.name === name)) return;
    if (this.stages.has(name)) this.stages.delete(name);
    else this.stages.add(name);
    this.table.chosen = null;
    this.update();
  }

  /** Select the row under the pointer: itself in a table of rows, its group in a table of groups. */
  pickRow(i) {
    this.pick = i;
    const at = i === null ? null : this.group === "row" ? i : this.groups.findIndex((group) => group.rows.includes(i));
    this.table.show(at === -1 ? null : at);
    this.link();
  }

  chosen() {
    this.pick = this.group === "row" ? this.table.chosen : null;
    this.link();
  }

  clearAll() {
    this.stages.clear();
    this.range = null;
    this.pick = null;
    this.table.chosen = null;
    this.table.input.value = "";
    this.update();
  }

  /** Rows that stages and range leave. */
  base() {
    const { rec, range, stages } = this;
    const [from, to] = this.members;
    const out = [];
    for (let i = from; i < to; i += 1) {
      if (stages.size && !stages.has(rec.stage(i).name)) continue;
      if (range && (rec.isGap(i) || rec.begin(i, this.wall) > range[1] || rec.end(i) < range[0])) continue;
      out.push(i);
    }
    return Uint32Array.from(out);
  }

  // ---- showing

  update() {
    const { rec } = this;
    for (const name of ["scope", "lanes", "time"]) this.choices[name].set(this.model.get(name));
    this.groupChoice.set(this.group);
    const isElsewhere = this.timeline.set({ rec, scope: this.scope, step: this.step, lanes: this.model.get("lanes"), wall: this.wall });
    if (isElsewhere) this.range = null;
    this.strip.set(rec, this.step, this.scope);
    this.drawHead();
    this.drawNotice();
    this.fillTable();
    this.link();
  }

  fillTable() {
    const { rec } = this;
    const base = this.base();
    const wall = this.wall;
    const [from, to] = this.scope === "step" ? [this.step, this.step + 1] : [rec.first, rec.last];
    let total = 0;
    for (let s = from; s < to; s += 1) total += rec.steps.step_us?.[s] ?? 0;
    const look = { wall, scope: this.scope, total: total || 1, peak: rec.info.peak };
    if (this.group === "row") {
      this.groups = null;
      this.table.set(rowColumns(rec, look), rec.n, base);
    } else {
      this.groups = rec.groups(base, this.group, wall);
      this.table.set(groupColumns(rec, this.groups, this.group, look), this.groups.length);
    }
    this.shownBase = base;
    this.total = look.total;
  }

  /** Rows that everything together selects; null where that is all. */
  selectedRows() {
    const { table, groups } = this;
    const rowsOf = (at) => (groups ? groups[at]?.rows ?? [] : [at]);
    if (this.pick !== null && table.chosen === null) return [this.pick];
    if (table.chosen !== null) return rowsOf(table.chosen);
    const isFiltered = table.index.length < table.all.length;
    if (!isFiltered && !this.stages.size && !this.range) return null;
    return isFiltered ? (groups ? Array.from(table.index).flatMap(rowsOf) : table.index) : this.shownBase;
  }

  /** Show in the timeline, the roofline and the line between them what is selected. */
  link() {
    const { rec } = this;
    const chosen = this.selectedRows();
    let on = null;
    if (chosen) {
      on = new Uint8Array(rec.n);
      for (const i of chosen) on[i] = 1;
    }
    const range = this.range;
    this.timeline.gapOn = !chosen || (!range && [...chosen].some((i) => rec.isGap(i)));
    this.timeline.select(on, range);
    this.drawLegend(on);
    this.drawRoofline(chosen, on);
    this.drawSelection(chosen);
    this.root.dataset.selected = chosen ? String(chosen.length) : "all";
    if (chosen || this.lastChosen) this.sync(chosen);
    this.lastChosen = Boolean(chosen);
  }

  drawHead() {
    const { info } = this.rec;
    setText(this.name, info.model || "calmnb");
    const chips = [info.dtype && `${info.dtype} weights`, info.kv_dtype && `${info.kv_dtype} KV`, info.device].filter(Boolean);
    this.chips.replaceChildren(...chips.map((text) => h("span", { class: "cn-chip" }, text)));
    const f = this.rec.nSteps ? this.rec.figures(this.scope, this.step) : {};
    const set = (name, value) => setText(this.figures[name].value, value < 5e-4 ? "0 µs" : micros(value));
    set("step", f.step);
    set("rows", this.wall ? f.wall : f.rows);
    set("gap", f.gap);
    set("overlap", f.overlap);
    const isMean = this.scope === "all";
    setText(this.figures.step.node.lastChild, isMean ? `step time, mean of ${f.n}` : "step time");
    this.head.querySelectorAll(".cn-sign").forEach((node) => { node.style.visibility = this.wall && f.overlap > 0 ? "hidden" : ""; });
    const peak = info.peak;
    const share = peak && f.rate ? f.rate / peak[1] : null;
    this.meterText.replaceChildren(h("b", {}, f.rate ? `${rate(f.rate)} GB/s` : "–"), peak ? `  ${percent(share)} of ${short(peak[1])} GB/s (${peak[0]})` : "  no peak known");
    this.meterFill.style.width = `${Math.min(100, 100 * (share || 0))}%`;
    this.meter.setAttribute("aria-valuemin", "0");
    this.meter.setAttribute("aria-valuemax", "100");
    this.meter.setAttribute("aria-valuenow", String(Math.round(100 * (share || 0))));
    const recorded = [info.source && `times: ${info.source}`, info.n_steps && `${info.n_steps} steps`,
      info.n_steps > this.rec.last - this.rec.first && `rows of steps ${this.rec.first}–${this.rec.last - 1} are loaded`, info.date].filter(Boolean);
    setText(this.source, recorded.join(" · "));
    for (const button of [this.refresh, this.live]) button.hidden = !info.can_refresh;
    this.live.setAttribute("aria-pressed", String(this.model.get("live")));
  }

  drawNotice() {
    const notice = this.model.get("notice");
    setText(this.alert, notice || "");
    this.alert.hidden = !notice;
  }

  drawLegend(on) {
    const { rec } = this;
    const [from, to] = this.members;
    const groups = rec.groups(Array.from({ length: to - from }, (_, k) => from + k), "stage", this.wall);
    const known = groups.map((group) => rec.stages[group.key]);
    if (this.legend.children.length !== known.length || known.some((stage, k) => this.legend.children[k].dataset.stage !== stage.name)) {
      this.legend.replaceChildren(...known.map((stage) => {
        const node = h("button", { class: "cn-stage-key", type: "button", onclick: () => this.toggleStage(stage.name) },
          h("span", { class: "cn-swatch", style: { background: stage.color } }), h("span", {}, stage.label), h("span", { class: "cn-quiet" }));
        node.dataset.stage = stage.name;
        return node;
      }));
    }
    groups.forEach((group, k) => {
      const node = this.legend.children[k];
      const stage = known[k];
      const isOn = !on || group.rows.some((i) => on[i]);
      setText(node.lastChild, percent(group.time / this.total));
      node.title = `${micros(group.time)}${group.bytes ? `, ${short(gbPerS(group.bytes, group.time))} GB/s of ${bytes(group.bytes)}` : ""}. Press to select.`;
      node.setAttribute("aria-pressed", String(this.stages.has(stage.name)));
      node.classList.toggle("cn-dim", !isOn);
      node.style.setProperty("--cn-share", `${(100 * group.time) / this.total}%`);
      node.style.setProperty("--cn-stage", stage.color);
    });
    this.stageGroups = groups;
  }

  drawRoofline(chosen, on) {
    const { rec } = this;
    const point = (sum, more) => ({ x: sum.bytes ? sum.flops / sum.bytes : 0, y: sum.time ? sum.flops / sum.time / 1e3 : 0, gbs: gbPerS(sum.bytes, sum.time), sum, on: true, ...more });
    const points = this.stageGroups.filter((group) => group.flops > 0 && group.bytes > 0).map((group) => {
      const stage = rec.stages[group.key];
      return point(group, { name: stage.name, label: stage.label, color: stage.color, share: group.time / this.total, on: !on || group.rows.some((i) => on[i]) });
    });
    const all = this.stageGroups.reduce((sum, g) => ({ time: sum.time + g.time, bytes: sum.bytes + g.bytes, flops: sum.flops + g.flops, n: sum.n + g.n }), { time: 0, bytes: 0, flops: 0, n: 0 });
    if (all.bytes) points.push(point(all, { name: "whole", label: this.scope === "step" ? "whole step" : "all steps", color: "ink", hollow: true, shape: "square", share: 0.06, bold: true, on: !chosen }));
    if (chosen?.length) {
      const sum = rec.sum(chosen, this.wall);
      if (sum.bytes && sum.flops) points.push(point(sum, { name: "selection", label: "selected", color: "accent", shape: "diamond", share: 0.1, bold: true }));
    }
    const [from, to] = this.members;
    const stride = Math.max(1, Math.ceil((to - from) / CLOUD));
    const cloud = [];
    for (let i = from; i < to; i += stride) {
      const [nbytes, flops, time] = [rec.bytesMin(i), rec.flops(i), rec.time(i, this.wall)];
      if (nbytes > 0 && flops > 0 && time > 0) cloud.push({ x: flops / nbytes, y: flops / time / 1e3, color: rec.stage(i).color, on: !on || on[i] });
    }
    this.roofline.set({ points, cloud, peaks: rec.info.peaks || [], roofs: rec.info.roofs || [] });
    setText(this.roofline.note, chosen ? "selected kernels highlighted" : "area: share of time");
  }

  drawSelection(chosen) {
    const { rec } = this;
    this.clear.hidden = !chosen && !this.table.input.value;
    if (!chosen) {
      setText(this.status, rec.n ? "Nothing selected: drag a range, press a stage, a bar or a row of the table." : "Nothing recorded yet.");
      return;
    }
    const sum = rec.sum(chosen, this.wall);
    const flow = gbPerS(sum.bytes, sum.time);
    const parts = [`${sum.n.toLocaleString("en-US")} row${sum.n === 1 ? "" : "s"}`, `${micros(sum.time)} (${percent(sum.time / this.total)})`];
    if (sum.bytes) parts.push(bytes(sum.bytes), `${short(flow)} GB/s`);
    if (sum.bytes && rec.info.peak) parts.push(`${percent(flow / rec.info.peak[1])} of peak`);
    if (this.range) parts.push(`range ${micros(this.range[1] - this.range[0])}, of it gap ${micros(rec.gapWithin(...this.range))}`);
    this.status.replaceChildren(h("b", {}, "Selected: "), parts.join(" · "));
  }

  /** What the tooltip says of a row. */
  describe(i) {
    const { rec } = this;
    const stage = rec.stage(i);
    const [own, whole] = [rec.events.own[i], rec.events.wall[i]];
    const layer = rec.events.layer[i];
    const flow = gbPerS(rec.bytesMin(i), rec.time(i, this.wall));
    const lines = [
      { text: `${stage.label}${layer >= 0 ? `, layer ${layer}` : ""}`, color: stage.color }, rec.kernel(i),
      `${micros(own)} exclusive${Math.abs(whole - own) > 5e-3 ? `, ${micros(whole)} wall` : ""} · ${percent(own / rec.steps.step_us[rec.stepOf[i]])} of the step`,
      `starts at ${micros(rec.events.start[i])}${this.scope === "all" ? `, position ${rec.steps.pos[rec.stepOf[i]]}` : ""}`,
    ];
    if (rec.bytesMin(i)) {
      lines.push(`${bytes(rec.bytesMin(i))} must move, ${bytes(rec.bytesCounted(i))} touched`);
      lines.push(`${short(flow)} GB/s${rec.info.peak ? ` · ${percent(flow / rec.info.peak[1])} of peak` : ""}`);
    } else lines.push("no bytes must move");
    return lines;
  }

  describePoint({ label, color, sum, x, y, gbs }) {
    const peak = this.rec.info.peak;
    return [{ text: label, color }, `${short(gbs)} GB/s${peak ? ` · ${percent(gbs / peak[1])} of peak` : ""}`, `${short(y)} GFLOP/s at ${short(x)} FLOP per byte`,
      `${micros(sum.time)}, ${bytes(sum.bytes)}`];
  }

  hint() {
    setText(this.hintNode, "click the timeline first, then the wheel zooms (or hold Ctrl)");
    clearTimeout(this.hintTimer);
    this.hintTimer = setTimeout(() => setText(this.hintNode, ""), 2500);
  }

  savePicture() {
    const { info } = this.rec;
    const what = this.scope === "step" ? `position ${this.rec.steps.pos[this.step]}, ${micros(this.rec.steps.step_us[this.step])}` : `steps ${this.rec.first}–${this.rec.last - 1}`;
    savePng([this.timeline.canvas, this.roofline.canvas], "profile.png", readTheme(this.root),
      `${info.model}  ·  ${info.dtype ?? ""}  ·  ${info.device}  ·  ${what}  ·  times: ${info.source}`);
  }

  redraw() {
    this.timeline?.invalidate(true);
    this.strip?.invalidate();
    if (this.rec) this.link();
  }
}

export default {
  render({ model, el }) {
    const view = new ProfileView(model, el);
    return () => view.destroy();
  },
};
