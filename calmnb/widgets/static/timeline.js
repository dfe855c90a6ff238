// The timeline: time across, layers, stages or kernels down. Draws any number of rows in one pass over those in sight.
import { micros } from "./format.js";
import { h, setText, soon } from "./charts.js";
import { lanesOf } from "./lanes.js";
import { BOTTOM, TimelinePainter, TOP } from "./timeline_paint.js";

const MIN_SPAN = 0.02;

/**
 * Options: tip (Tip), describe(i) -> lines, onrange([t0, t1] or null), onpick(i or null), onstep(delta).
 * State is set with `set`; `selected` is a Uint8Array of rows, or null where all are.
 */
export class Timeline {
  constructor(root, options) {
    this.root = root;
    Object.assign(this, options);
    this.view = [0, 1];
    this.rows = [0, 1];
    this.domain = [0, 1];
    this.range = null;
    this.selected = null;
    this.tool = "select";
    this.cursor = null;
    this.painter = new TimelinePainter(this);
    this.build();
  }

  build() {
    this.canvas = h("canvas", { class: "cn-canvas" });
    this.plot = h("div", { class: "cn-timeline", tabIndex: 0 }, this.canvas);
    this.plot.calmTimeline = this;
    this.plot.setAttribute("role", "application");
    this.plot.setAttribute("aria-roledescription", "timeline");
    this.strip = h("canvas", { class: "cn-canvas" });
    this.strip.setAttribute("aria-hidden", "true");
    this.said = h("div", { class: "cn-hidden", role: "status" });
    this.pane = h("div", { class: "cn-window" });
    this.clip = h("div", { class: "cn-clip" }, this.pane);
    this.stripBox = h("div", { class: "cn-overview" }, this.strip, this.clip);
    this.node = h("div", { class: "cn-timeline-box" }, this.plot, this.stripBox, this.said);
    this.plot.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.plot.addEventListener("pointerdown", (event) => this.press(event));
    this.plot.addEventListener("pointermove", (event) => this.move(event));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("dblclick", (event) => this.double(event));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.leave());
    this.stripBox.addEventListener("pointerdown", (event) => this.dragStrip(event));
    this.width = 0;  // kept, because asking the page for it makes the browser lay out anew
    this.observer = new ResizeObserver(() => this.invalidate(true));
    this.observer.observe(this.plot);
  }

  destroy() {
    this.observer.disconnect();
    this.callOff?.();
    clearTimeout(this.retry);
  }

  /** Show a recording: {rec, scope, step, lanes, wall}. Keeps the zoom where the domain is the same; returns whether it isn't. */
  set({ rec, scope, step, lanes, wall }) {
    const members = scope === "step" ? rec.rowsOf(step) : [0, rec.n];
    const domain = rec.domain(scope, step);
    const same = domain[0] === this.domain[0] && domain[1] === this.domain[1] && rec === this.rec;
    const sameLanes = lanes === this.by && rec === this.rec && members[0] === this.members?.[0] && members[1] === this.members?.[1];
    Object.assign(this, { rec, scope, step, by: lanes, wall, members, domain });
    if (!same) {
      this.view = [...domain];
      this.range = null;
      this.cursor = null;
    }
    if (!sameLanes) {
      this.lanes = lanesOf(rec, lanes, members);
      this.rows = [0, Math.max(this.lanes.labels.length, 1)];
      this.bucket();
    }
    const per = { layer: 11.6, "layer-stage": 4, stage: 26, kernel: 24 }[lanes];
    this.height = Math.round(Math.min(Math.max(this.lanes.labels.length * per, 150), 400)) + TOP + BOTTOM;
    this.label();
    this.invalidate(true);
    return !same;
  }

  select(selected, range) {
    this.selected = selected;
    this.range = range;
    this.invalidate(true);
  }

  /** Rows by stage, so that a colour is set once a frame and not once a row. */
  bucket() {
    const [from, to] = this.members;
    const { stage } = this.rec.events;
    const counts = new Uint32Array(this.rec.stages.length);
    for (let i = from; i < to; i += 1) counts[stage[i]] += 1;
    this.buckets = Array.from(counts, (n) => new Uint32Array(n));
    counts.fill(0);
    for (let i = from; i < to; i += 1) this.buckets[stage[i]][counts[stage[i]]++] = i;
  }

  label() {
    const { scope, rec, step } = this;
    const what = scope === "step" ? `step ${step}` : `steps ${rec.first} to ${rec.last - 1}`;
    this.plot.setAttribute("aria-label", `Timeline of ${what}: ${(this.members[1] - this.members[0]).toLocaleString("en-US")} rows in ${micros(this.domain[1] - this.domain[0])}. `
      + "Arrows move, plus and minus zoom, 0 shows all, comma and period go from kernel to kernel, Enter selects, Escape clears.");
  }

  invalidate(whole = false) {
    this.stale = this.stale || whole;
    if (this.callOff) return;
    this.callOff = soon(() => {
      this.callOff = null;
      this.render();
    });
  }

  // ---- geometry

  get left() { return this.gutter || 60; }
  x(t) { return this.left + ((this.width - this.left) * (t - this.view[0])) / (this.view[1] - this.view[0]); }
  t(x) { return this.view[0] + ((this.view[1] - this.view[0]) * (x - this.left)) / (this.width - this.left); }
  get laneHeight() { return (this.height - TOP - BOTTOM) / (this.rows[1] - this.rows[0]); }
  y(lane) { return TOP + (lane - this.rows[0]) * this.laneHeight; }

  /** First row of a stage's bucket that may reach beyond `from`. */
  firstIn(bucket, from) {
    const wanted = from - this.rec.maxWall;
    let [lo, hi] = [0, bucket.length];
    while (lo < hi) {
      const mid = (lo + hi) >> 1;
      if (this.rec.t0[bucket[mid]] < wanted) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  }

  render() {
    if (this.stale) this.width = this.plot.clientWidth;
    if (!this.rec) return;
    if (!this.width) {
      // Out of the page for a moment (JupyterLab does that while it changes themes): no observer may tell of the return.
      this.misses = (this.misses || 0) + 1;
      if (this.misses < 50) this.retry = setTimeout(() => this.invalidate(true), 200);
      return;
    }
    this.misses = 0;
    this.painter.render(this.stale);
    this.stale = false;
  }

  isWhole() { return this.view[0] <= this.domain[0] && this.view[1] >= this.domain[1]; }

  // ---- moving

  /** Zoom by `factor` (below 1: closer) around time `at`. */
  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    const whole = this.domain[1] - this.domain[0];
    const span = Math.min(Math.max((this.view[1] - this.view[0]) * factor, Math.min(MIN_SPAN, whole)), whole);
    const share = (at - this.view[0]) / (this.view[1] - this.view[0]);
    this.moveTo(at - span * share, span);
  }

  zoomRows(factor, at = (this.rows[0] + this.rows[1]) / 2) {
    const n = this.lanes.labels.length || 1;
    const span = Math.min(Math.max((this.rows[1] - this.rows[0]) * factor, Math.min(4, n)), n);
    const share = (at - this.rows[0]) / (this.rows[1] - this.rows[0]);
    this.moveRows(at - span * share, span);
  }

  moveTo(from, span = this.view[1] - this.view[0]) {
    const start = Math.min(Math.max(from, this.domain[0]), this.domain[1] - span);
    this.view = [start, start + span];
    this.invalidate();
  }

  moveRows(from, span = this.rows[1] - this.rows[0]) {
    const start = Math.min(Math.max(from, 0), (this.lanes.labels.length || 1) - span);
    this.rows = [start, start + span];
    this.invalidate();
  }

  /** Show a range of time, and only the lanes in which something runs then. */
  zoomTo([from, to]) {
    this.moveTo(from, Math.max(to - from, MIN_SPAN));
    let [low, high] = [Infinity, -Infinity];
    for (let i = this.members[0]; i < this.members[1]; i += 1) {
      if (this.rec.isGap(i) || this.rec.end(i) < from || this.rec.begin(i, this.wall) > to) continue;
      low = Math.min(low, this.lanes.of[i]);
      high = Math.max(high, this.lanes.of[i] + 1);
    }
    const span = Math.max(high - low, Math.min(4, this.lanes.labels.length));
    if (high > low) this.moveRows((low + high - span) / 2, span);
  }

  reset() {
    this.view = [...this.domain];
    this.rows = [0, Math.max(this.lanes.labels.length, 1)];
    this.invalidate();
  }

  local(event) {
    const box = this.plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  wheel(event) {
    // A wheel over a plot that nobody has clicked belongs to the page.
    if (!this.rec || !(event.ctrlKey || event.metaKey || this.plot.contains(document.activeElement))) {
      this.onhint?.();
      return;
    }
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    const [x, y] = this.local(event);
    if (event.shiftKey) this.zoomRows(1.0015 ** ((event.deltaY || event.deltaX) * unit), this.rows[0] + (y - TOP) / this.laneHeight);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.moveTo(this.view[0] + ((this.view[1] - this.view[0]) * event.deltaX * unit) / this.width);
    else this.zoom(1.0015 ** (event.deltaY * unit), this.t(Math.max(x, this.left)));
    this.tip.hide();
  }

  press(event) {
    if (!this.rec || event.button > 1) return;
    this.plot.focus({ preventScroll: true });
    event.preventDefault();
    this.tip.hide();
    this.plot.setPointerCapture(event.pointerId);
    const [x, y] = this.local(event);
    const tool = event.button === 1 || event.shiftKey ? "pan" : event.altKey ? "zoom" : this.tool;
    this.drag = { x, y, tool, view: [...this.view], rows: [...this.rows], moved: false };
    const release = (up) => {
      this.plot.removeEventListener("pointerup", release);
      this.plot.removeEventListener("pointercancel", release);
      this.release(up);
    };
    this.plot.addEventListener("pointerup", release);
    this.plot.addEventListener("pointercancel", release);
  }

  move(event) {
    if (!this.rec) return;
    const [x, y] = this.local(event);
    const { drag } = this;
    if (!drag) return this.hover(x, y, event);
    if (Math.abs(x - drag.x) > 3 || Math.abs(y - drag.y) > 3) drag.moved = true;
    if (!drag.moved) return;
    if (drag.tool === "pan") {
      const span = drag.view[1] - drag.view[0];
      this.moveTo(drag.view[0] - (span * (x - drag.x)) / (this.width - this.left), span);
      this.moveRows(drag.rows[0] - (y - drag.y) / this.laneHeight);
    } else {
      const ends = [this.t(Math.max(drag.x, this.left)), this.t(Math.max(x, this.left))].sort((a, b) => a - b);
      this.brush = [Math.max(ends[0], this.domain[0]), Math.min(ends[1], this.domain[1])];
      this.invalidate();
    }
  }

  release(event) {
    const { drag, brush } = this;
    this.drag = null;
    this.brush = null;
    if (!drag || event.type === "pointercancel") return this.invalidate();
    if (!drag.moved) {
      const i = this.probe(drag.x, drag.y);
      this.onpick(i !== null && i >= 0 ? i : null);
    } else if (brush && drag.tool === "zoom") this.zoomTo(brush);
    else if (brush) this.onrange(brush);
    this.invalidate();
  }

  double(event) {
    const [x] = this.local(event);
    const t = this.t(x);
    if (this.range && t >= this.range[0] && t <= this.range[1]) this.zoomTo(this.range);
    else this.reset();
  }

  dragStrip(event) {
    if (!this.rec) return;
    const box = this.stripBox.getBoundingClientRect();
    const [from, to] = this.domain;
    const span = this.view[1] - this.view[0];
    const at = (e) => from + ((to - from) * (e.clientX - box.left - this.left)) / (box.width - this.left);
    const grip = at(event) >= this.view[0] && at(event) <= this.view[1] ? at(event) - this.view[0] : span / 2;
    const follow = (e) => this.moveTo(at(e) - grip, span);
    const end = () => this.stripBox.removeEventListener("pointermove", follow);
    this.stripBox.setPointerCapture(event.pointerId);
    this.stripBox.addEventListener("pointermove", follow);
    this.stripBox.addEventListener("pointerup", end, { once: true });
    this.stripBox.addEventListener("pointercancel", end, { once: true });
    follow(event);
  }

  // ---- looking

  /** Row under a point; -1 - k for gap interval k; null for nothing. */
  probe(px, py) {
    if (px < this.left || py < TOP || py > this.height - BOTTOM) return null;
    const { rec } = this;
    const lane = Math.floor(this.rows[0] + (py - TOP) / this.laneHeight);
    const t = this.t(px);
    const slack = (1.5 * (this.view[1] - this.view[0])) / (this.width - this.left);
    if (lane === this.lanes.gap) {
      for (let k = 0; k < rec.gapFrom.length; k += 1) if (t >= rec.gapFrom[k] - slack && t <= rec.gapTo[k] + slack) return -1 - k;
      return null;
    }
    const near = this.laneHeight < 5 ? Math.ceil(3 / this.laneHeight) : 0;
    let [best, score] = [null, Infinity];
    for (const bucket of this.buckets) {
      for (let k = this.firstIn(bucket, t - slack); k < bucket.length; k += 1) {
        const i = bucket[k];
        if (rec.t0[i] > t + slack) break;
        const away = Math.abs(this.lanes.of[i] - lane);
        if (rec.isGap(i) || away > near) continue;
        const [begin, end] = [rec.begin(i, this.wall), rec.end(i)];
        if (t < begin - slack || t > end + slack) continue;
        const off = away * 1e9 + (t < begin ? begin - t : t > end ? t - end : 0);
        if (off < score) [best, score] = [i, off];
      }
    }
    return best;
  }

  hover(x, y, event) {
    const i = this.probe(x, y);
    const before = this.cursor;
    this.cursor = i !== null && i >= 0 ? i : null;
    if (before !== this.cursor) this.invalidate();
    if (i === null) return this.tip.hide();
    this.tip.show(i >= 0 ? this.describe(i) : this.describeGap(-1 - i), event.clientX, event.clientY);
  }

  describeGap(k) {
    const { rec } = this;
    return [{ text: "gap: no kernel runs", color: rec.stages[rec.gapCode].color }, `${micros(rec.gapTo[k] - rec.gapFrom[k])}, from ${micros(rec.gapFrom[k] - this.domain[0])}`];
  }

  leave() {
    if (this.drag) return;
    this.tip.hide();
    if (this.cursor === null) return;
    this.cursor = null;
    this.invalidate();
  }

  key(event) {
    if (!this.rec || event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.view[1] - this.view[0];
    const around = this.cursor === null ? undefined : (this.rec.begin(this.cursor, this.wall) + this.rec.end(this.cursor)) / 2;
    const actions = {
      ArrowLeft: () => this.moveTo(this.view[0] - span * 0.1),
      ArrowRight: () => this.moveTo(this.view[0] + span * 0.1),
      ArrowUp: () => this.moveRows(this.rows[0] - Math.max(1, (this.rows[1] - this.rows[0]) * 0.1)),
      ArrowDown: () => this.moveRows(this.rows[0] + Math.max(1, (this.rows[1] - this.rows[0]) * 0.1)),
      "+": () => this.zoom(0.7, around),
      "=": () => this.zoom(0.7, around),
      "-": () => this.zoom(1 / 0.7, around),
      0: () => this.reset(),
      ",": () => this.walk(-1),
      ".": () => this.walk(1),
      PageUp: () => this.onstep(-1),
      PageDown: () => this.onstep(1),
      Enter: () => this.onpick(this.cursor),
      Escape: () => {
        this.leave();
        this.onrange(null);
        this.onpick(null);
      },
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  /** Put the cursor on the next or previous kernel, show its figures and read them out. */
  walk(by) {
    const [from, to] = this.members;
    let i = this.cursor;
    if (i === null) {
      i = from;
      while (i < to - 1 && (this.rec.isGap(i) || this.rec.t0[i] < this.view[0])) i += 1;
    } else {
      do i += by; while (i > from && i < to - 1 && this.rec.isGap(i));
    }
    if (i < from || i >= to || this.rec.isGap(i)) return;
    this.cursor = i;
    const [t, lane] = [this.rec.begin(i, this.wall), this.lanes.of[i]];
    if (t < this.view[0] || t > this.view[1]) this.moveTo(t - (this.view[1] - this.view[0]) / 2);
    if (lane < this.rows[0] || lane + 1 > this.rows[1]) this.moveRows(lane - (this.rows[1] - this.rows[0]) / 2);
    const lines = this.describe(i);
    const box = this.plot.getBoundingClientRect();
    this.tip.show(lines, box.left + this.x(t), box.top + this.y(lane) + this.laneHeight);
    setText(this.said, lines.map((line) => line.text ?? line).join(", "));
    this.invalidate();
  }
}
