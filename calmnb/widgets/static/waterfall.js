// From one step to another: a bar for every difference, which starts where the one above ended.
import { micros } from "./format.js";
import { Chart } from "./charts.js";

const BAR = 26;
const MOST = 14;

/** Time with its sign. */
export function signed(us) {
  if (!Number.isFinite(us)) return "–";
  return Math.abs(us) < 5e-4 ? "0" : `${us > 0 ? "+" : "−"}${micros(Math.abs(us))}`;
}

/**
 * Rows are {key, name, color, a, b, low, high, verdict}; the two ends come from `set`. A bar to the left is time saved;
 * a hatched one shows no difference.
 */
export class Waterfall extends Chart {
  constructor(root, tip, options) {
    super(root, tip, options);
    this.bars = [];
    this.chosen = null;
    this.tipOf = options.tip;
    this.onpick = options.onpick;
    this.plot.addEventListener("click", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const i = this.probe(event.clientX - box.left, event.clientY - box.top);
      if (i !== null && this.bars[i].row) this.onpick(this.bars[i].row);
    });
  }

  /** Most of the differences in size are drawn on their own, the others as one bar. */
  set(rows, ends) {
    const sizes = rows.map((row) => Math.abs(row.b - row.a)).sort((x, y) => y - x);
    const least = rows.length > MOST + 1 ? sizes[MOST - 1] : -1;
    const shown = rows.filter((row) => Math.abs(row.b - row.a) >= least);
    const rest = rows.filter((row) => Math.abs(row.b - row.a) < least);
    let at = ends.a;
    this.bars = [{ name: ends.names[0], start: 0, end: ends.a, isTotal: true }];
    for (const row of shown) {
      this.bars.push({ row, name: row.name, color: row.color, start: at, end: at + row.b - row.a, low: at + row.low, high: at + row.high,
        isSure: row.verdict !== "no difference shown", change: row.b - row.a });
      at += row.b - row.a;
    }
    if (rest.length) {
      const change = rest.reduce((sum, row) => sum + row.b - row.a, 0);
      this.bars.push({ name: `${rest.length} other rows`, start: at, end: at + change, isSure: true, isRest: true, change });
    }
    this.bars.push({ name: ends.names[1], start: 0, end: ends.b, isTotal: true, change: ends.b - ends.a });
    this.height = this.bars.length * BAR + 48;
    this.canvas.style.height = `${this.height}px`;
    this.cursor = null;
    this.invalidate();
  }

  /** The axis starts where small changes of a long step can still be seen, and says so. */
  limits() {
    const ends = this.bars.flatMap((bar) => (bar.isTotal ? [bar.end] : [bar.start, bar.end, bar.low, bar.high])).filter(Number.isFinite);
    const [least, most] = [Math.min(...ends), Math.max(...ends)];
    const span = Math.max(most - least, 0.02 * most);
    if (span > 0.35 * most) return [Math.min(0, least), most * 1.03];
    return [Math.max(0, least - 0.45 * span), most + 0.06 * span];
  }

  paint(ctx, width, height, theme) {
    if (this.bars.length < 2) return;
    const [low, high] = this.limits();
    const left = 14 + Math.min(Math.max(...this.bars.map((bar) => ctx.measureText(bar.name).width)), 190);
    const box = { left, top: 6, right: width - 84, bottom: height - 38 };
    const x = (t) => box.left + ((box.right - box.left) * (t - low)) / (high - low);
    this.grid(ctx, theme, box, x, low, high);
    this.bars.forEach((bar, k) => this.paintBar(ctx, theme, box, x, bar, k, low));
    ctx.globalAlpha = 1;
    this.x = x;
    this.box = box;
  }

  grid(ctx, theme, box, x, low, high) {
    const raw = (high - low) / Math.max(2, (box.right - box.left) / 90);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw * 0.999);
    const isMs = high >= 2000;
    ctx.strokeStyle = theme.line;
    ctx.fillStyle = theme.muted;
    ctx.textAlign = "center";
    ctx.lineWidth = 1;
    for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
      const at = Math.round(x(value)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(at, box.top);
      ctx.lineTo(at, box.bottom);
      ctx.stroke();
      ctx.fillText((isMs ? value / 1000 : value).toLocaleString("en-US", { maximumFractionDigits: 4 }), at, box.bottom + 11);
    }
    const cut = low > 0 ? " (the axis does not start at 0)" : "";
    ctx.fillText(`${isMs ? "ms" : "µs"} per ${this.options?.unit || "step"}${cut}`, (box.left + box.right) / 2, box.bottom + 27);
  }

  paintBar(ctx, theme, box, x, bar, k, low) {
    const y = box.top + k * BAR;
    const [x0, x1] = [x(bar.isTotal ? Math.max(bar.start, low) : bar.start), x(bar.end)].sort((a, b) => a - b);
    const isDim = this.chosen && (bar.isTotal || bar.row?.key !== this.chosen);
    ctx.globalAlpha = isDim ? 0.3 : 1;
    const color = bar.color || (bar.isRest ? theme.line : theme.muted);
    if (bar.isTotal || bar.isSure) {
      ctx.fillStyle = color;
      ctx.fillRect(x0, y + 4, Math.max(x1 - x0, 1), BAR - 8);
    } else hatch(ctx, x0, y + 4, Math.max(x1 - x0, 1), BAR - 8, color);
    if (Number.isFinite(bar.low) && Number.isFinite(bar.high)) whisker(ctx, theme, x(bar.low), x(bar.high), y + BAR / 2);
    if (k + 1 < this.bars.length) {
      ctx.strokeStyle = theme.muted;
      ctx.lineWidth = 0.7;
      ctx.beginPath();
      ctx.moveTo(x(bar.end), y + 4);
      ctx.lineTo(x(bar.end), y + 2 * BAR - 4);
      ctx.stroke();
    }
    if (this.cursor === k) {
      ctx.strokeStyle = theme.ink;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(x0 - 1, y + 3, Math.max(x1 - x0, 1) + 2, BAR - 6);
    }
    ctx.fillStyle = theme.ink;
    ctx.font = `${bar.isTotal ? "600 " : ""}11.5px ${theme.font}`;
    ctx.textAlign = "right";
    ctx.fillText(bar.name, box.left - 8, y + BAR / 2);
    const last = this.canvas.clientWidth - 4;
    if (bar.isTotal) ctx.fillText(micros(bar.end), last, y + BAR / 2);
    else ctx.fillText(signed(bar.change), last, y + BAR / 2);
    ctx.font = `11px ${theme.font}`;
  }

  count() { return this.bars.length; }
  place(k) { return [this.x(this.bars[k].end), this.box.top + (k + 0.6) * BAR]; }

  probe(px, py) {
    const k = Math.floor((py - 6) / BAR);
    return k >= 0 && k < this.bars.length ? k : null;
  }

  describe(k) { return this.tipOf(this.bars[k]); }

  key(event) {
    if ((event.key === "Enter" || event.key === " ") && this.cursor !== null && this.bars[this.cursor].row) {
      event.preventDefault();
      return this.onpick(this.bars[this.cursor].row);
    }
    return super.key(event);
  }
}

function hatch(ctx, x, y, w, height, color) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, height);
  ctx.clip();
  ctx.strokeStyle = color;
  ctx.lineWidth = 1.2;
  for (let at = x - height; at < x + w; at += 5) {
    ctx.beginPath();
    ctx.moveTo(at, y + height);
    ctx.lineTo(at + height, y);
    ctx.stroke();
  }
  ctx.restore();
  ctx.strokeStyle = color;
  ctx.lineWidth = 1;
  ctx.strokeRect(x + 0.5, y + 0.5, Math.max(w - 1, 0), height - 1);
}

function whisker(ctx, theme, x0, x1, y) {
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = 1.3;
  ctx.beginPath();
  ctx.moveTo(x0, y);
  ctx.lineTo(x1, y);
  for (const x of [x0, x1]) {
    ctx.moveTo(x, y - 3);
    ctx.lineTo(x, y + 3);
  }
  ctx.stroke();
}
