// Small canvas charts: crisp on any screen, readable in light and dark, usable by keyboard. They draw arrays; they know
// nothing of models.
import { short, ticks, tickText, quantile } from "./format.js";

/** Make an element. Text is always a text node; there is no way to pass markup. */
export function h(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "style") Object.assign(node.style, value);
    else if (key in node && key !== "list" && key !== "form") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

/** Call `action` in the next frame, or soon where the browser holds frames back. Returns a function that calls it off. */
export function soon(action) {
  let timer = 0;
  let frame = 0;
  const off = () => {
    clearTimeout(timer);
    cancelAnimationFrame(frame);
  };
  const run = () => {
    off();
    action();
  };
  frame = requestAnimationFrame(run);
  timer = setTimeout(run, 250);
  return off;
}

/** Change a node's text only if it differs: setting it makes the browser lay out and paint again. */
export function setText(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

/** Colours of the current theme, read from the root's CSS variables. */
export function readTheme(root) {
  const style = getComputedStyle(root);
  const get = (name) => style.getPropertyValue(name).trim();
  return {
    ink: get("--cn-ink"), muted: get("--cn-muted"), line: get("--cn-line"), soft: get("--cn-soft"), accent: get("--cn-accent"),
    panel: get("--cn-panel"), peak: get("--cn-peak"), dark: root.dataset.theme === "dark", font: style.fontFamily || "sans-serif",
  };
}

/** One tooltip a widget, placed inside its root. */
export class Tip {
  constructor(root) {
    this.root = root;
    this.node = h("div", { class: "cn-tip", role: "tooltip", hidden: true });
    root.append(this.node);
  }

  show(lines, clientX, clientY) {
    this.node.replaceChildren(
      ...lines.map((line, i) => {
        const row = h("div", { class: i === 0 ? "cn-tip-head" : "" });
        if (line.color) row.append(h("span", { class: "cn-swatch", style: { background: line.color } }));
        row.append(line.text ?? line);
        return row;
      }),
    );
    this.node.hidden = false;
    const box = this.root.getBoundingClientRect();
    const own = this.node.getBoundingClientRect();
    const x = Math.min(Math.max(clientX - box.left + 14, 4), box.width - own.width - 4);
    const below = clientY - box.top + 16;
    const y = below + own.height > box.height - 4 ? clientY - box.top - own.height - 10 : below;
    this.node.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
  }

  hide() {
    this.node.hidden = true;
  }
}

/** A titled canvas. Subclasses give paint(ctx, width, height, theme), probe(x, y), and count() and at(i) for the keyboard. */
export class Chart {
  constructor(root, tip, { title, label, height = 150 }) {
    this.root = root;
    this.tip = tip;
    this.height = height;
    this.cursor = null;
    this.canvas = h("canvas", { class: "cn-canvas", style: { height: `${height}px` } });
    this.note = h("span", { class: "cn-note" });
    this.extra = h("span", { class: "cn-extra" });
    this.plot = h("div", { class: "cn-plot", tabIndex: 0, role: "img" }, this.canvas);
    this.plot.setAttribute("aria-label", label);
    this.label = label;
    this.node = h("figure", { class: "cn-chart" },
      h("figcaption", {}, h("span", { class: "cn-title" }, title), this.note, this.extra), this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.leave());
    this.observer = new ResizeObserver(() => this.invalidate());
    this.observer.observe(this.plot);
  }

  destroy() {
    this.observer.disconnect();
    this.callOff?.();
    clearTimeout(this.retry);
  }

  invalidate() {
    if (this.callOff) return;
    this.callOff = soon(() => {
      this.callOff = null;
      this.render();
    });
  }

  render() {
    const width = this.plot.clientWidth;
    if (!width || !this.canvas.isConnected) {
      // Out of the page for a moment (JupyterLab does that while it changes themes): no observer may tell of the return.
      this.misses = (this.misses || 0) + 1;
      if (this.misses < 50) this.retry = setTimeout(() => this.invalidate(), 200);
      return;
    }
    this.misses = 0;
    const ratio = window.devicePixelRatio || 1;
    const [w, hgt] = [Math.round(width * ratio), Math.round(this.height * ratio)];
    // Whole device pixels in size and place, or the browser resamples the drawing and blurs it.
    this.canvas.style.width = `${w / ratio}px`;
    const left = this.plot.getBoundingClientRect().left * ratio;
    this.canvas.style.marginLeft = `${(Math.round(left) - left) / ratio}px`;
    if (this.canvas.width !== w || this.canvas.height !== hgt) {
      this.canvas.width = w;
      this.canvas.height = hgt;
    }
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, this.height);
    const theme = readTheme(this.root);
    ctx.font = `11px ${theme.font}`;
    ctx.textBaseline = "middle";
    this.paint(ctx, width, this.height, theme);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.cursor = this.probe(event.clientX - box.left, event.clientY - box.top);
    this.invalidate();
    if (this.cursor === null) this.tip.hide();
    else this.tip.show(this.describe(this.cursor), event.clientX, event.clientY);
  }

  leave() {
    this.cursor = null;
    this.tip.hide();
    this.invalidate();
  }

  key(event) {
    const n = this.count();
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return this.leave();
    if (!n || !(event.key in moves)) return;
    event.preventDefault();
    const from = this.cursor === null ? (moves[event.key] > 0 ? -1 : n) : this.order(this.cursor);
    const to = Math.min(Math.max(from + moves[event.key], 0), n - 1);
    this.cursor = this.at(to);
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = this.place(this.cursor);
    const lines = this.describe(this.cursor);
    this.tip.show(lines, box.left + x, box.top + y);
    this.plot.setAttribute("aria-label", `${this.label}: ${lines.map((line) => line.text ?? line).join(", ")}`);
    this.invalidate();
  }

  count() { return 0; }
  at(i) { return i; }
  order(cursor) { return cursor; }
  probe() { return null; }
  place() { return [0, 0]; }
  describe() { return []; }
}

/** Grid, ticks and axis labels; returns the mapping from data to pixels. */
export function frame(ctx, width, height, theme, { xMax, yMax, xLabel, yLabel, xTicks }) {
  const ys = ticks(yMax, height > 140 ? 4 : 3);
  const step = ys.length > 1 ? ys[1] : yMax;
  const left = 10 + Math.max(...ys.map((y) => ctx.measureText(tickText(y, step)).width), 12);
  const box = { left, top: 18, right: width - 10, bottom: height - 32 };
  const x = (value) => box.left + ((box.right - box.left) * value) / (xMax || 1);
  const y = (value) => box.bottom - ((box.bottom - box.top) * value) / (yMax || 1);
  ctx.lineWidth = 1;
  ctx.strokeStyle = theme.line;
  ctx.fillStyle = theme.muted;
  ctx.textAlign = "right";
  for (const value of ys) {
    const at = Math.round(y(value)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(box.left, at);
    ctx.lineTo(box.right, at);
    ctx.stroke();
    ctx.fillText(tickText(value, step), box.left - 6, at);
  }
  ctx.textAlign = "center";
  const xs = xTicks || ticks(xMax, Math.max(2, Math.floor((box.right - box.left) / 60)));
  const xStep = xs.length > 1 ? xs[1] - xs[0] : xMax;
  for (const value of xs) ctx.fillText(tickText(value, xStep), Math.min(x(value), box.right - 4), box.bottom + 10);
  ctx.fillText(xLabel, (box.left + box.right) / 2, box.bottom + 24);
  ctx.textAlign = "left";
  ctx.fillText(yLabel, 2, 7);
  return { x, y, box };
}

/** What an empty chart says. */
function nothing(ctx, width, height, theme) {
  ctx.fillStyle = theme.soft;
  ctx.fillRect(0, 6, width, height - 12);
  ctx.fillStyle = theme.muted;
  ctx.textAlign = "center";
  ctx.fillText("no token yet", width / 2, height / 2);
}

/** Points (dots or a line) with reference lines: [{points, label, color, dash}] in data units. */
export class PointChart extends Chart {
  constructor(root, tip, options) {
    super(root, tip, options);
    this.options = options;
    this.data = [];
    this.lines = [];
    this.xMax = 0;
  }

  set(data, { lines = [], xMax = 0, color } = {}) {
    this.data = data;
    this.lines = lines;
    this.xMax = xMax;
    this.color = color;
    this.invalidate();
  }

  paint(ctx, width, height, theme) {
    if (!this.data.length && !this.lines.length) return nothing(ctx, width, height, theme);
    const { xi, yi, style, xLabel, yLabel } = this.options;
    const values = this.data.map((row) => row[yi]);
    const refs = this.lines.flatMap((line) => line.points.map((p) => p[1]));
    const yMax = Math.max(quantile(values, 0.97) * 1.25, ...refs.map((v) => v * 1.12), 1e-6);
    let last = 0;
    for (const row of this.data) last = Math.max(last, row[xi]);
    const xMax = this.xMax || last || this.options.xEmpty;
    const scale = frame(ctx, width, height, theme, { xMax, yMax, xLabel, yLabel });
    this.scale = scale;
    const color = this.color || theme.accent;
    ctx.save();
    ctx.beginPath();
    ctx.rect(scale.box.left - 4, scale.box.top - 6, scale.box.right - scale.box.left + 8, scale.box.bottom - scale.box.top + 8);
    ctx.clip();
    if (style === "line") this.paintLine(ctx, scale, color, xi, yi);
    else this.paintDots(ctx, scale, color, xi, yi, yMax);
    for (const line of this.lines) {
      ctx.strokeStyle = line.color || theme.peak;
      ctx.lineWidth = 1.5;
      ctx.setLineDash(line.dash || []);
      ctx.beginPath();
      line.points.forEach(([a, b], i) => (i ? ctx.lineTo(scale.x(Math.min(a, xMax)), scale.y(at(line.points, Math.min(a, xMax)))) : ctx.moveTo(scale.x(a), scale.y(b))));
      ctx.stroke();
      ctx.setLineDash([]);
    }
    ctx.restore();
    this.paintLabels(ctx, scale, theme, xMax);
    if (this.cursor !== null && this.data[this.cursor]) {
      const [x, y] = this.place(this.cursor);
      ctx.strokeStyle = theme.ink;
      ctx.fillStyle = color;
      ctx.lineWidth = 1.5;
      ctx.beginPath();
      ctx.arc(x, Math.max(y, scale.box.top), 4, 0, 7);
      ctx.fill();
      ctx.stroke();
    }
  }

  paintLine(ctx, scale, color, xi, yi) {
    if (!this.data.length) return;
    const trace = () => {
      ctx.beginPath();
      this.data.forEach((row, i) => (i ? ctx.lineTo(scale.x(row[xi]), scale.y(row[yi])) : ctx.moveTo(scale.x(row[xi]), scale.y(row[yi]))));
    };
    trace();
    ctx.lineTo(scale.x(this.data.at(-1)[xi]), scale.box.bottom);
    ctx.lineTo(scale.x(this.data[0][xi]), scale.box.bottom);
    ctx.globalAlpha = 0.14;
    ctx.fillStyle = color;
    ctx.fill();
    ctx.globalAlpha = 1;
    trace();
    ctx.strokeStyle = color;
    ctx.lineWidth = 1.5;
    ctx.lineJoin = "round";
    ctx.stroke();
  }

  paintDots(ctx, scale, color, xi, yi, yMax) {
    ctx.fillStyle = color;
    const size = this.data.length > 600 ? 1.3 : 2;
    for (const row of this.data) {
      const over = row[yi] > yMax;
      ctx.globalAlpha = over ? 0.35 : 0.75;
      ctx.beginPath();
      ctx.arc(scale.x(row[xi]), over ? scale.box.top : scale.y(row[yi]), size, 0, 7);
      ctx.fill();
    }
    ctx.globalAlpha = 1;
  }

  paintLabels(ctx, scale, theme, xMax) {
    ctx.textAlign = "right";
    const used = [];
    for (const line of this.lines) {
      if (!line.label) continue;
      const end = Math.min(line.points.at(-1)[0], xMax);
      let y = scale.y(at(line.points, end)) - 8;
      while (used.some((other) => Math.abs(other - y) < 13)) y -= 13;
      y = Math.max(y, 7);
      used.push(y);
      ctx.strokeStyle = theme.panel;
      ctx.lineWidth = 3;
      ctx.strokeText(line.label, scale.box.right, y);
      ctx.fillStyle = line.color || theme.peak;
      ctx.fillText(line.label, scale.box.right, y);
    }
  }

  count() { return this.data.length; }

  place(i) {
    return [this.scale.x(this.data[i][this.options.xi]), this.scale.y(this.data[i][this.options.yi])];
  }

  probe(px) {
    if (!this.scale || !this.data.length) return null;
    let best = null;
    let distance = 24;
    this.data.forEach((row, i) => {
      const d = Math.abs(this.scale.x(row[this.options.xi]) - px);
      if (d < distance) [best, distance] = [i, d];
    });
    return best;
  }

  describe(i) { return this.options.tip(this.data[i]); }
}

/** Height of a polyline at x, for lines that end beyond the axis. */
export function at(points, x) {
  for (let i = 1; i < points.length; i += 1) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
    if (x <= x1 || i === points.length - 1) return x1 === x0 ? y1 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
  }
  return points.length ? points[0][1] : 0;
}

/** Layers by stages: stacked bars, or a heat map where each stage has its own shade. */
export class LayerChart extends Chart {
  constructor(root, tip, options) {
    super(root, tip, options);
    this.options = options;
    this.mode = "bars";
    this.values = new Float32Array(0);
    this.stages = [];
    this.highlight = null;
  }

  set(values, stages) {
    this.values = values;
    this.stages = stages;
    this.invalidate();
  }

  get layers() { return this.stages.length ? Math.floor(this.values.length / this.stages.length) : 0; }

  value(layer, stage) { return this.values[layer * this.stages.length + stage]; }

  paint(ctx, width, height, theme) {
    const n = this.layers;
    if (!this.values.some((value) => value > 0)) return nothing(ctx, width, height, theme);
    if (this.mode === "heat") this.paintHeat(ctx, width, height, theme, n);
    else this.paintBars(ctx, width, height, theme, n);
  }

  layerTicks(n) {
    const step = n > 60 ? 20 : n > 16 ? 5 : n > 8 ? 2 : 1;
    return Array.from({ length: Math.ceil(n / step) }, (_, i) => i * step);
  }

  paintBars(ctx, width, height, theme, n) {
    let top = 1e-6;
    for (let l = 0; l < n; l += 1) {
      let sum = 0;
      for (let s = 0; s < this.stages.length; s += 1) sum += this.value(l, s);
      top = Math.max(top, sum);
    }
    const scale = frame(ctx, width, height, theme, { xMax: n || 1, yMax: top * 1.08, xLabel: "layer", yLabel: "µs", xTicks: [] });
    const slot = (scale.box.right - scale.box.left) / Math.max(n, 1);
    const gap = slot > 5 ? Math.min(3, slot * 0.25) : 0;
    for (let l = 0; l < n; l += 1) {
      let base = 0;
      for (let s = 0; s < this.stages.length; s += 1) {
        const value = this.value(l, s);
        ctx.fillStyle = this.stages[s].color;
        ctx.globalAlpha = this.dim(l, s);
        const [y1, y0] = [scale.y(base + value), scale.y(base)];
        ctx.fillRect(scale.box.left + l * slot + gap / 2, y1, slot - gap, y0 - y1);
        base += value;
      }
    }
    ctx.globalAlpha = 1;
    ctx.fillStyle = theme.muted;
    ctx.textAlign = "center";
    for (const l of this.layerTicks(n)) ctx.fillText(l, scale.box.left + (l + 0.5) * slot, scale.box.bottom + 10);
    this.geometry = { box: scale.box, slot, scale };
  }

  dim(layer, stage) {
    if (this.highlight && this.highlight !== this.stages[stage].name) return 0.18;
    if (this.cursor !== null && this.cursor[0] !== layer) return 0.55;
    return 1;
  }

  paintHeat(ctx, width, height, theme, n) {
    const left = 8 + Math.max(...this.stages.map((s) => ctx.measureText(s.label).width), 20);
    const box = { left, top: 8, right: width - 10, bottom: height - 32 };
    const rows = this.stages.length || 1;
    const [w, hgt] = [(box.right - box.left) / Math.max(n, 1), (box.bottom - box.top) / rows];
    let top = 1e-6;
    for (const value of this.values) top = Math.max(top, value);
    for (let s = 0; s < this.stages.length; s += 1) {
      ctx.fillStyle = theme.muted;
      ctx.textAlign = "right";
      ctx.fillText(this.stages[s].label, box.left - 6, box.top + (s + 0.5) * hgt);
      for (let l = 0; l < n; l += 1) {
        ctx.fillStyle = theme.soft;
        ctx.fillRect(box.left + l * w, box.top + s * hgt, w - 1, hgt - 1);
        ctx.globalAlpha = 0.06 + 0.94 * (this.value(l, s) / top);
        ctx.fillStyle = this.stages[s].color;
        ctx.fillRect(box.left + l * w, box.top + s * hgt, w - 1, hgt - 1);
        ctx.globalAlpha = 1;
      }
    }
    if (this.cursor !== null) {
      ctx.strokeStyle = theme.ink;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(box.left + this.cursor[0] * w - 0.5, box.top + this.cursor[1] * hgt - 0.5, w, hgt);
    }
    ctx.fillStyle = theme.muted;
    ctx.textAlign = "center";
    for (const l of this.layerTicks(n)) ctx.fillText(l, box.left + (l + 0.5) * w, box.bottom + 10);
    ctx.fillText(n ? `layer (darkest: ${short(top)} µs)` : "layer", (box.left + box.right) / 2, box.bottom + 24);
    this.geometry = { box, slot: w, row: hgt };
  }

  probe(px, py) {
    const g = this.geometry;
    const n = this.layers;
    if (!g || !n || px < g.box.left || px >= g.box.right || py > g.box.bottom) return null;
    const layer = Math.min(n - 1, Math.floor((px - g.box.left) / g.slot));
    if (this.mode === "heat") return [layer, Math.min(this.stages.length - 1, Math.max(0, Math.floor((py - g.box.top) / g.row)))];
    let sum = 0;
    for (let s = 0; s < this.stages.length; s += 1) {
      sum += this.value(layer, s);
      if (py >= g.scale.y(sum)) return [layer, s];
    }
    return [layer, this.stages.length - 1];
  }

  count() { return this.layers * this.stages.length; }
  at(i) { return [Math.floor(i / this.stages.length), i % this.stages.length]; }
  order([l, s]) { return l * this.stages.length + s; }
  place([l]) { return [this.geometry.box.left + (l + 0.5) * this.geometry.slot, this.geometry.box.top + 20]; }
  describe([l, s]) { return this.options.tip(l, s, this.value(l, s)); }
}
