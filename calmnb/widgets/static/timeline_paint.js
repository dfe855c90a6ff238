// Drawing of the timeline. Bars, lanes and grid lines are written as pixels; texts and what lies over them are drawn.
import { micros } from "./format.js";
import { readTheme } from "./charts.js";
import { cut, moment, ticksWithin } from "./lanes.js";
import { pixel, Pixels } from "./pixels.js";

export const TOP = 22;
export const BOTTOM = 4;
export const STRIP = 30;
const DIM = 0.2;
const MOST_NAMES = 150;

/** Draws a Timeline (`line`): its canvas, and the overview under it. */
export class TimelinePainter {
  constructor(line) {
    this.line = line;
    this.pixels = new Pixels();
    this.stripPixels = new Pixels();
  }

  /** Draw a frame; `whole` if anything but the part of the time in view has changed. */
  render(whole) {
    const { line } = this;
    this.theme = readTheme(line.root);
    this.ratio = window.devicePixelRatio || 1;
    const ctx = this.fit(line.canvas, line.height);
    ctx.font = `11px ${this.theme.font}`;
    if (whole) {
      const longest = line.lanes.labels.reduce((w, text) => Math.max(w, ctx.measureText(text).width), 30);
      const ratio = this.ratio;
      line.gutter = Math.round((Math.min(longest, 136) + 14) * ratio) / ratio;
    }
    const rows = `${line.rows} ${line.height}`;
    if (whole || this.rowsDrawn !== rows) {
      ctx.clearRect(0, 0, line.width, line.height);
      this.paintLabels(ctx);
      this.rowsDrawn = rows;
    }
    ctx.clearRect(line.left - 20, 0, line.width, TOP);
    const ticks = this.paintAxis(ctx);
    this.paintBars(ctx, ticks);
    ctx.save();
    ctx.beginPath();
    ctx.rect(line.left, TOP, line.width - line.left, line.height - TOP - BOTTOM);
    ctx.clip();
    this.paintNames(ctx);
    this.paintRange(ctx);
    this.paintCursor(ctx);
    ctx.restore();
    if (whole) this.paintStrip();
    this.placePane();
  }

  fit(canvas, height) {
    const { ratio } = this;
    const [w, hgt] = [Math.round(this.line.width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== hgt) {
      Object.assign(canvas, { width: w, height: hgt });
      canvas.style.height = `${height}px`;
      this.rowsDrawn = null;
    }
    const ctx = canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.textBaseline = "middle";
    return ctx;
  }

  paintLabels(ctx) {
    const { line } = this;
    const lane = line.laneHeight;
    const { heads, labels } = line.lanes;
    const isLow = heads && lane < 11;
    ctx.fillStyle = this.theme.muted;
    ctx.textAlign = "right";
    let used = -Infinity;
    labels.forEach((label, k) => {
      const y = line.y(k) + (isLow ? Math.max(lane / 2, 5) : lane / 2);
      const text = isLow ? heads[k] : label;
      if (!text || y < Math.max(TOP + 3, used + 11.4) || y > line.height - BOTTOM - 2) return;
      used = y;
      ctx.fillText(cut(ctx, text, line.left - 12), line.left - 7, y);
    });
  }

  paintAxis(ctx) {
    const { line } = this;
    const [from, to] = line.view;
    const origin = line.domain[0];
    const { values, step } = ticksWithin(from - origin, to - origin, Math.max(2, (line.width - line.left) / 100));
    ctx.fillStyle = this.theme.muted;
    ctx.textAlign = "center";
    for (const value of values) {
      const text = moment(value, step);
      const half = ctx.measureText(text).width / 2;
      const x = line.x(value + origin);
      if (x + half <= line.width) ctx.fillText(text, Math.max(x, line.left + half - 4), 10);
    }
    return values.map((value) => value + origin);
  }

  // ---- pixels

  paintBars(ctx, ticks) {
    const { line, pixels, ratio, theme } = this;
    const [left, top] = [Math.round(line.left * ratio), Math.round(TOP * ratio)];
    pixels.resize(Math.round(line.width * ratio) - left, Math.round((line.height - BOTTOM) * ratio) - top);
    const [from, to] = line.view;
    const scale = pixels.width / (to - from);
    const lane = line.laneHeight * ratio;
    const y = (k) => (k - line.rows[0]) * lane;
    pixels.data.fill(pixel(theme.panel));
    if (lane >= 3 * ratio) {
      for (let k = 0; k < line.lanes.labels.length; k += 2) pixels.fill(0, pixels.width, Math.round(y(k)), Math.round(y(k + 1)), pixel(theme.soft));
    }
    for (const t of ticks) {
      const x = Math.round((t - from) * scale);
      pixels.fill(x, x + 1, 0, pixels.height, pixel(theme.line));
    }
    if (line.scope === "all") this.markSteps(pixels, from, to, scale);
    this.wide = [];
    this.fillRows(pixels, line.view, scale, y, lane, this.wide);
    pixels.put(ctx, left, top);
  }

  /** Where each step begins. */
  markSteps(pixels, from, to, scale) {
    const { rec } = this.line;
    const [a, b] = [rec.stepAt(from), rec.stepAt(to)];
    if (pixels.width / (b - a + 1) < 24) return;
    const word = pixel(this.theme.muted, 0.6, this.theme.panel);
    for (let s = a; s <= b; s += 1) {
      const x = Math.round((rec.stepStart(s) - from) * scale);
      for (let y = 0; y < pixels.height; y += 6) pixels.fill(x, x + 1, y, y + 3, word);
    }
  }

  fillRows(pixels, [from, to], scale, y, lane, wide) {
    const { line, theme } = this;
    const { rec, wall, selected } = line;
    const { of, labels } = line.lanes;
    const { t0 } = rec;
    const { own, wall: whole } = rec.events;
    const pad = lane >= 6 ? Math.min(2, lane * 0.12) : 0;
    const top = Int32Array.from(labels, (_, k) => Math.round(y(k) + pad));
    const end = Int32Array.from(labels, (_, k) => Math.max(Math.round(y(k) + lane - pad), Math.round(y(k) + pad) + 1));
    const last = new Int32Array(labels.length);
    const wasOn = new Uint8Array(labels.length);
    const room = 46 * this.ratio;
    line.buckets.forEach((bucket, code) => {
      if (code === rec.gapCode) return;
      const words = [pixel(rec.stages[code].color, DIM, theme.panel), pixel(rec.stages[code].color)];
      last.fill(-1);
      for (let k = line.firstIn(bucket, from); k < bucket.length; k += 1) {
        const i = bucket[k];
        if (t0[i] > to) break;
        const after = t0[i] + whole[i];
        if (after < from) continue;
        const l = of[i];
        const on = selected ? selected[i] : 1;
        const x0 = Math.round(((wall ? t0[i] : after - own[i]) - from) * scale);
        let x1 = Math.round((after - from) * scale);
        if (x1 <= last[l] && (wasOn[l] || !on)) continue;  // within a pixel that is filled already
        if (x1 - x0 > 4) x1 -= 1;
        else if (x1 <= x0) x1 = x0 + 1;
        pixels.fill(x0, x1, top[l], end[l], words[on]);
        if (x1 - x0 > room && on && wide) wide.push(i);
        last[l] = x1;
        wasOn[l] = on;
      }
    });
    const gap = line.lanes.gap;
    if (gap < 0) return;
    const word = pixel(rec.stages[rec.gapCode].color, line.gapOn === false ? DIM : 1, theme.panel);
    for (let k = 0; k < rec.gapFrom.length; k += 1) {
      if (rec.gapTo[k] < from) continue;
      if (rec.gapFrom[k] > to) break;
      const x0 = Math.round((rec.gapFrom[k] - from) * scale);
      pixels.fill(x0, Math.max(Math.round((rec.gapTo[k] - from) * scale), x0 + 1), top[gap], end[gap], word);
    }
  }

  // ---- drawn over them

  /** What a bar is and how long, in the bar, where there is room. */
  paintNames(ctx) {
    const { line } = this;
    const lane = line.laneHeight;
    if (lane < 12.5) return;
    const { rec } = line;
    ctx.textAlign = "left";
    ctx.lineWidth = 2;
    ctx.lineJoin = "round";
    ctx.strokeStyle = "rgb(0 0 0 / 55%)";
    ctx.fillStyle = "#fff";
    for (const i of this.wide.slice(0, MOST_NAMES)) {
      const x0 = Math.max(line.x(rec.begin(i, line.wall)), line.left);
      const room = Math.min(line.x(rec.end(i)), line.width) - x0 - 8;
      const name = line.by === "stage" ? rec.kernel(i) : rec.stage(i).label;
      const whole = `${name}  ${micros(rec.time(i, line.wall))}`;
      const text = ctx.measureText(whole).width <= room ? whole : cut(ctx, name, room);
      const y = line.y(line.lanes.of[i]) + lane / 2 + 0.5;
      if (text.length < 3) continue;
      ctx.strokeText(text, x0 + 4, y);
      ctx.fillText(text, x0 + 4, y);
    }
  }

  paintCursor(ctx) {
    const { line } = this;
    const i = line.cursor;
    if (i === null || line.lanes.of[i] < 0) return;
    const x0 = line.x(line.rec.begin(i, line.wall));
    ctx.strokeStyle = this.theme.ink;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x0 - 1, line.y(line.lanes.of[i]) - 0.5, Math.max(line.x(line.rec.end(i)) - x0, 1) + 2, Math.max(line.laneHeight, 2) + 1);
  }

  paintRange(ctx) {
    const { line, theme } = this;
    const range = line.brush || line.range;
    if (!range) return;
    const [x0, x1] = [line.x(range[0]), line.x(range[1])];
    ctx.fillStyle = ctx.strokeStyle = theme.accent;
    ctx.globalAlpha = 0.1;
    ctx.fillRect(x0, TOP, x1 - x0, line.height);
    ctx.globalAlpha = 1;
    ctx.lineWidth = 1;
    for (const x of [x0, x1]) {
      ctx.beginPath();
      ctx.moveTo(Math.round(x) + 0.5, TOP);
      ctx.lineTo(Math.round(x) + 0.5, line.height);
      ctx.stroke();
    }
    if (x1 - x0 < 50) return;
    const text = micros(range[1] - range[0]);
    const middle = (Math.max(x0, line.left) + Math.min(x1, line.width)) / 2;
    ctx.textAlign = "center";
    ctx.lineWidth = 3;
    ctx.strokeStyle = theme.panel;
    ctx.strokeText(text, middle, TOP + 9);
    ctx.fillText(text, middle, TOP + 9);
  }

  // ---- overview

  paintStrip() {
    const { line, theme, ratio, stripPixels } = this;
    const ctx = this.fit(line.strip, STRIP);
    const left = Math.round(line.left * ratio);
    stripPixels.resize(Math.round(line.width * ratio) - left, Math.round((STRIP - 4) * ratio));
    stripPixels.data.fill(pixel(theme.soft));
    const [from, to] = line.domain;
    this.fillRows(stripPixels, line.domain, stripPixels.width / (to - from), () => 2 * ratio, (STRIP - 8) * ratio, null);
    ctx.clearRect(0, 0, line.width, STRIP);
    stripPixels.put(ctx, left, Math.round(2 * ratio));
    ctx.font = `10px ${theme.font}`;
    ctx.fillStyle = theme.muted;
    ctx.textAlign = "right";
    ctx.fillText("all", line.left - 7, STRIP / 2);
  }

  /** The part of the overview that the timeline shows. */
  placePane() {
    const { line } = this;
    const [from, to] = line.domain;
    const scale = (line.width - line.left) / (to - from);
    const { style } = line.pane;
    line.clip.style.left = `${line.left}px`;
    style.left = `${(line.view[0] - from) * scale}px`;
    style.width = `${Math.max((line.view[1] - line.view[0]) * scale, 3)}px`;
    line.pane.classList.toggle("cn-whole", line.isWhole());
  }
}
