// Achieved against possible: arithmetic intensity on logarithmic axes, or bandwidth as bars against the peak.
import { short } from "./format.js";
import { Chart } from "./charts.js";

/** Tick values of a logarithmic axis within [low, high]. */
export function logTicks(low, high) {
  const out = [];
  const fine = high / low < 200 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const k of fine) {
      const value = k * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) out.push(value);
    }
  }
  return out;
}

/** A plain number: no exponents, thousands grouped. */
export function plain(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

/** Positions at least `gap` apart within [low, high], near the wanted ones, in their order. */
export function spread(wanted, gap, low, high) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const placed = [...wanted];
  let at = low - gap;
  for (const i of order) placed[i] = at = Math.max(wanted[i], at + gap);
  at = high + gap;
  for (const i of order.reverse()) placed[i] = at = Math.min(placed[i], at - gap);
  return placed;
}

/**
 * Points are {name, label, color, x (FLOP/byte), y (GFLOP/s), gbs, share (0..1), on, shape ("dot", "ring", "square")};
 * `cloud` is {x, y, color, on}[] of single rows; `links` are pairs of points to join. Options as for Chart, and onpick(name).
 */
export class Roofline extends Chart {
  constructor(root, tip, options) {
    super(root, tip, options);
    this.mode = "roofline";
    this.points = [];
    this.cloud = [];
    this.peaks = [];
    this.roofs = [];
    this.onpick = options.onpick;
    this.tipOf = options.tip;
    this.plot.addEventListener("click", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const i = this.probe(event.clientX - box.left, event.clientY - box.top);
      if (i !== null) this.onpick?.(this.points[i].name);
    });
  }

  /** Points may name a colour of the theme ("ink", "accent"), which is known only when they are drawn. */
  set({ points, cloud = [], links = [], peaks, roofs = [] }) {
    Object.assign(this, { points, cloud, links, peaks, roofs, cursor: null });
    this.invalidate();
  }

  paint(ctx, width, height, theme) {
    this.places = [];
    const rows = this.points.filter((p) => p.y > 0 && p.x > 0);
    if (!rows.length) {
      ctx.fillStyle = theme.muted;
      ctx.textAlign = "center";
      return ctx.fillText("no row declares its bytes here", width / 2, height / 2);
    }
    if (this.mode === "bandwidth") this.paintBars(ctx, width, height, theme);
    else this.paintRoof(ctx, width, height, theme, rows);
  }

  // ---- arithmetic intensity

  limits(rows) {
    const { peaks, roofs } = this;
    const xs = rows.map((p) => p.x);
    const ys = rows.map((p) => p.y);
    const best = Math.max(...peaks.map((p) => p[1]), 0);
    const x0 = Math.min(0.5, 0.5 * Math.min(...xs));
    const x1 = Math.max(16, 2.5 * Math.max(...xs), ...(best ? roofs.map((roof) => (2000 * roof[1]) / best) : []));
    const y0 = 0.4 * Math.min(...ys);
    const y1 = 2.2 * Math.max(...ys, ...(best ? [best * Math.min(Math.max(...xs) * 2, x1)] : []), ...roofs.map((roof) => 1e3 * roof[1]));
    return [x0, x1, y0, y1];
  }

  paintRoof(ctx, width, height, theme, rows) {
    const [x0, x1, y0, y1] = this.limits(rows);
    const yTicks = logTicks(y0, y1);
    const left = 12 + Math.max(...yTicks.map((v) => ctx.measureText(plain(v)).width));
    const box = { left, top: 18, right: width - 8, bottom: height - 34 };
    const x = (v) => box.left + ((box.right - box.left) * Math.log(v / x0)) / Math.log(x1 / x0);
    const y = (v) => box.bottom - ((box.bottom - box.top) * Math.log(v / y0)) / Math.log(y1 / y0);
    this.grid(ctx, theme, box, x, y, logTicks(x0, x1), yTicks);
    ctx.save();
    ctx.beginPath();
    ctx.rect(box.left, box.top - 4, box.right - box.left, box.bottom - box.top + 4);
    ctx.clip();
    this.paintRoofs(ctx, theme, box, x, y, [x0, x1, y0, y1]);
    for (const dot of this.cloud) {
      ctx.globalAlpha = dot.on ? 0.34 : 0.07;
      ctx.fillStyle = dot.color;
      ctx.fillRect(x(dot.x) - 1, y(dot.y) - 1, 2.2, 2.2);
    }
    ctx.restore();
    ctx.globalAlpha = 1;
    this.paintPoints(ctx, theme, box, x, y);
  }

  grid(ctx, theme, box, x, y, xTicks, yTicks) {
    ctx.strokeStyle = theme.line;
    ctx.fillStyle = theme.muted;
    ctx.lineWidth = 1;
    ctx.textAlign = "right";
    for (const value of yTicks) {
      const at = Math.round(y(value)) + 0.5;
      line(ctx, box.left, at, box.right, at);
      ctx.fillText(plain(value), box.left - 5, at);
    }
    ctx.textAlign = "center";
    let used = -Infinity;
    for (const value of xTicks) {
      const at = Math.round(x(value)) + 0.5;
      line(ctx, at, box.top, at, box.bottom);
      const half = ctx.measureText(plain(value)).width / 2;
      if (at - half < used || at + half > box.right + 6) continue;
      used = at + half + 8;
      ctx.fillText(plain(value), at, box.bottom + 11);
    }
    ctx.fillText("FLOP per byte", (box.left + box.right) / 2, box.bottom + 26);
    ctx.textAlign = "left";
    ctx.fillText("GFLOP/s", 2, 7);
  }

  /** The lines that bound what can be; their names stand one above the other over the highest, where no point can lie. */
  paintRoofs(ctx, theme, box, x, y, [x0, x1, y0, y1]) {
    const highest = this.roofs.length ? Math.max(...this.roofs.map((roof) => 1e3 * roof[1])) : Infinity;
    const sorted = [...this.peaks].sort((a, b) => b[1] - a[1]);
    sorted.forEach(([kind, rate, name], i) => {
      ctx.strokeStyle = ctx.fillStyle = kind === "datasheet" ? theme.muted : theme.peak;
      ctx.lineWidth = 1.6;
      ctx.setLineDash(kind === "datasheet" ? [5, 4] : []);
      const knee = Math.min(x1, highest / rate);
      ctx.beginPath();
      ctx.moveTo(x(x0), y(x0 * rate));
      ctx.lineTo(x(knee), y(knee * rate));
      if (knee < x1) ctx.lineTo(x(x1), y(highest));
      ctx.stroke();
      ctx.setLineDash([]);
      const top = sorted[0][1];
      const [first, last] = [Math.max(x0, y0 / top), Math.min(x1, highest / top, y1 / top)];
      const at = Math.sqrt(first * last);
      ctx.save();
      ctx.translate(x(at), y(at * top));
      ctx.rotate(Math.atan2(y(at * top * 2) - y(at * top), x(at * 2) - x(at)));
      ctx.textAlign = "center";
      outlined(ctx, theme, `${name || kind} peak ${plain(rate)} GB/s`, 0, -9 - 12 * (sorted.length - 1 - i));
      ctx.restore();
    });
    for (const [name, tflops] of this.roofs) {
      ctx.strokeStyle = theme.muted;
      ctx.setLineDash([2, 3]);
      line(ctx, box.left, y(1e3 * tflops), box.right, y(1e3 * tflops));
      ctx.setLineDash([]);
      ctx.textAlign = "left";
      ctx.fillStyle = theme.muted;
      ctx.fillText(`${name} ${plain(tflops)} TFLOP/s`, box.left + 4, y(1e3 * tflops) - 7);
    }
  }

  paintPoints(ctx, theme, box, x, y) {
    this.places = this.points.map((p) => (p.x > 0 && p.y > 0 ? [x(p.x), y(p.y)] : null));
    const known = this.points.map((_, i) => i).filter((i) => this.places[i]);
    for (const [i, j] of this.links || []) this.join(ctx, theme, i, j);
    this.labels(ctx, theme, box, known);
    for (const i of [...known].sort((a, b) => this.points[b].share - this.points[a].share)) {
      const p = this.points[i];
      const radius = 3.5 + 9 * Math.sqrt(Math.max(p.share, 0));
      ctx.globalAlpha = p.on ? 1 : 0.2;
      mark(ctx, theme, { ...p, color: theme[p.color] || p.color }, ...this.places[i], radius, this.cursor === i);
    }
    ctx.globalAlpha = 1;
  }

  /** A line from one point to another, for what became of it. */
  join(ctx, theme, i, j) {
    const [from, to] = [this.places[i], this.places[j]];
    if (!from || !to) return;
    ctx.globalAlpha = this.points[j].on ? 0.9 : 0.2;
    ctx.strokeStyle = theme[this.points[j].color] || this.points[j].color;
    ctx.lineWidth = 1.5;
    line(ctx, ...from, ...to);
    ctx.globalAlpha = 1;
  }

  /** Names beside the points, moved apart, joined by thin lines where they had to move. */
  labels(ctx, theme, box, known) {
    const shown = known.filter((i) => this.points[i].label);
    if (!shown.length) return;
    const right = Math.max(...shown.map((i) => this.places[i][0])) + 22;
    const at = spread(shown.map((i) => this.places[i][1] + 6), 13.5, box.top + 8, box.bottom - 8);
    ctx.textAlign = "left";
    shown.forEach((i, k) => {
      const p = this.points[i];
      ctx.globalAlpha = p.on ? 1 : 0.35;
      ctx.strokeStyle = theme.muted;
      ctx.lineWidth = 0.6;
      line(ctx, this.places[i][0], this.places[i][1], right - 4, at[k]);
      ctx.fillStyle = theme.ink;
      ctx.font = `${p.bold ? "600 " : ""}11px ${theme.font}`;
      outlined(ctx, theme, p.label, right, at[k]);
    });
    ctx.font = `11px ${theme.font}`;
    ctx.globalAlpha = 1;
  }

  // ---- bandwidth

  paintBars(ctx, width, height, theme) {
    const rows = this.points.map((p, i) => [p, i]).filter(([p]) => p.gbs > 0 && p.label);
    const left = 10 + Math.max(...rows.map(([p]) => ctx.measureText(p.label).width), 30);
    const box = { left, top: 22, right: width - 92, bottom: height - 8 };
    const top = Math.max(...rows.map(([p]) => p.gbs), ...this.peaks.map((p) => p[1])) * 1.03;
    const x = (v) => box.left + ((box.right - box.left) * v) / top;
    const slot = Math.min((box.bottom - box.top) / rows.length, 30);
    const best = this.peaks[0]?.[1];
    rows.forEach(([p, i], k) => {
      const y = box.top + k * slot;
      ctx.globalAlpha = p.on ? 1 : 0.25;
      ctx.fillStyle = theme[p.color] || p.color;
      ctx.fillRect(box.left, y + 2, x(p.gbs) - box.left, slot - 5);
      if (this.cursor === i) {
        ctx.strokeStyle = theme.ink;
        ctx.strokeRect(box.left, y + 2, x(p.gbs) - box.left, slot - 5);
      }
      ctx.fillStyle = theme.ink;
      ctx.textAlign = "right";
      ctx.font = `${p.bold ? "600 " : ""}11px ${theme.font}`;
      ctx.fillText(p.label, box.left - 6, y + slot / 2);
      ctx.fillText(short(p.gbs), width - 42, y + slot / 2);
      if (best) ctx.fillText(`${Math.round((100 * p.gbs) / best)}%`, width - 4, y + slot / 2);
      this.places[i] = [x(p.gbs), y + slot / 2];
    });
    ctx.globalAlpha = 1;
    ctx.font = `11px ${theme.font}`;
    ctx.fillStyle = theme.muted;
    ctx.fillText("GB/s", width - 42, 9);
    ctx.fillText("of peak", width - 4, 9);
    for (const [kind, rate, name] of this.peaks) {
      ctx.strokeStyle = ctx.fillStyle = kind === "datasheet" ? theme.muted : theme.peak;
      ctx.lineWidth = 1.6;
      ctx.setLineDash(kind === "datasheet" ? [5, 4] : []);
      line(ctx, x(rate), box.top - 4, x(rate), box.top + rows.length * slot);
      ctx.setLineDash([]);
    }
    const line0 = this.peaks[0];
    if (line0) {
      ctx.fillStyle = theme.peak;
      ctx.fillText(`${line0[2] || line0[0]} peak ${plain(line0[1])}`, Math.max(x(line0[1]), 110), 9);
    }
    this.bars = { slot, top: box.top, order: rows.map(([, i]) => i) };
  }

  // ---- pointing

  count() { return this.points.length; }

  place(i) { return this.places[i] || [0, 0]; }

  probe(px, py) {
    if (this.mode === "bandwidth") return this.bars?.order[Math.floor((py - this.bars.top) / this.bars.slot)] ?? null;
    let [best, distance] = [null, 18];
    (this.places || []).forEach((at, i) => {
      if (!at) return;
      const d = Math.hypot(at[0] - px, at[1] - py);
      if (d < distance) [best, distance] = [i, d];
    });
    return best;
  }

  describe(i) {
    const p = this.points[i];
    return this.tipOf({ ...p, color: p.color.startsWith("#") ? p.color : `var(--cn-${p.color})` });
  }
}

function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

/** Text that stays legible on lines and points. */
function outlined(ctx, theme, text, x, y) {
  const fill = ctx.fillStyle;
  ctx.lineJoin = "round";
  ctx.lineWidth = 3;
  ctx.strokeStyle = theme.panel;
  ctx.strokeText(text, x, y);
  ctx.fillStyle = fill;
  ctx.fillText(text, x, y);
}

function mark(ctx, theme, p, x, y, radius, isHot) {
  ctx.beginPath();
  if (p.shape === "square") ctx.rect(x - radius, y - radius, 2 * radius, 2 * radius);
  else if (p.shape === "diamond") {
    ctx.moveTo(x, y - radius * 1.2);
    for (const [dx, dy] of [[1.2, 0], [0, 1.2], [-1.2, 0]]) ctx.lineTo(x + dx * radius, y + dy * radius);
    ctx.closePath();
  } else ctx.arc(x, y, radius, 0, 7);
  if (p.hollow) {
    ctx.lineWidth = 2;
    ctx.strokeStyle = p.color;
    ctx.stroke();
  } else {
    ctx.fillStyle = p.color;
    ctx.fill();
    ctx.lineWidth = 1;
    ctx.strokeStyle = theme.panel;
    ctx.stroke();
  }
  if (isHot) {
    ctx.lineWidth = 1.5;
    ctx.strokeStyle = theme.ink;
    ctx.stroke();
  }
}
