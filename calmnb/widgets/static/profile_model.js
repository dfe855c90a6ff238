// A recording as typed arrays, and sums over any rows of it: pure functions, no DOM.
import { unpack, unpackTexts } from "./columns.js";

export const GAP = "gap";

/** What the kernel sent, with what follows from it. Times in microseconds; `t0` counts from the window's first step. */
export class Recording {
  constructor({ info, layout, stepsData, eventsData, textsData }) {
    this.info = info;
    this.stages = info.stages || [];
    this.kernels = info.kernels || [];
    this.steps = unpack(layout.steps, stepsData);
    const e = (this.events = unpack(layout.events, eventsData));
    const texts = layout.texts ? layout.texts.slice(0, -1) : [];
    const ends = unpack(texts, textsData).ends || new Uint32Array(0);
    this.texts = unpackTexts(ends, textsData ? new Uint8Array(textsData.buffer ?? textsData, (textsData.byteOffset ?? 0) + layout.texts.at(-1)) : null);
    [this.first, this.last] = info.window || [0, 0];
    this.n = e.start ? e.start.length : 0;
    this.gapCode = this.stages.findIndex((stage) => stage.name === GAP);
    this.place();
    this.findGaps();
  }

  get nSteps() { return this.steps.pos ? this.steps.pos.length : 0; }

  /** First and last + 1 row of a step. */
  rowsOf(step) {
    const { row } = this.steps;
    return step >= this.first && step < this.last ? [row[step], step + 1 < row.length && step + 1 < this.last ? row[step + 1] : this.n] : [0, 0];
  }

  place() {
    const { start_s: began } = this.steps;
    this.stepOf = new Uint32Array(this.n);
    this.t0 = new Float64Array(this.n);
    this.origin = this.last > this.first ? began[this.first] : 0;
    this.maxWall = 0;
    for (let s = this.first; s < this.last; s += 1) {
      const [a, b] = this.rowsOf(s);
      const at = this.stepStart(s);
      for (let i = a; i < b; i += 1) {
        this.stepOf[i] = s;
        this.t0[i] = at + this.events.start[i];
        if (this.events.stage[i] !== this.gapCode) this.maxWall = Math.max(this.maxWall, this.events.wall[i]);
      }
    }
  }

  /** Start of a step of the window, in microseconds after the window's. */
  stepStart(step) { return (this.steps.start_s[step] - this.origin) * 1e6; }

  /** Where nothing runs in a step: the gap row, cut into the intervals it is made of. */
  findGaps() {
    const [from, to] = [[], []];
    for (let s = this.first; s < this.last; s += 1) {
      const [a, b] = this.rowsOf(s);
      const at = this.stepStart(s);
      let until = at;
      const forward = this.steps.forward_us[s];
      for (let i = a; i < b; i += 1) {
        if (this.events.stage[i] === this.gapCode || this.t0[i] >= at + forward - 1e-3) continue;  // a token chosen afterwards
        if (this.t0[i] > until + 1e-3) {
          from.push(until);
          to.push(this.t0[i]);
        }
        until = Math.max(until, this.t0[i] + this.events.wall[i]);
      }
      if (at + forward > until + 1e-3) {
        from.push(until);
        to.push(at + forward);
      }
    }
    this.gapFrom = Float64Array.from(from);
    this.gapTo = Float64Array.from(to);
  }

  isGap(i) { return this.events.stage[i] === this.gapCode; }
  time(i, wall) { return wall && !this.isGap(i) ? this.events.wall[i] : this.events.own[i]; }
  begin(i, wall) { return wall ? this.t0[i] : this.t0[i] + this.events.wall[i] - this.events.own[i]; }
  end(i) { return this.t0[i] + this.events.wall[i]; }
  bytesMin(i) { return this.events.cost_min[this.events.cost[i]]; }
  bytesCounted(i) { return this.events.cost_counted[this.events.cost[i]]; }
  flops(i) { return this.events.cost_flops[this.events.cost[i]]; }
  kernel(i) { return this.kernels[this.events.kernel[i]] ?? "?"; }
  stage(i) { return this.stages[this.events.stage[i]]; }

  /** Start and end of what the timeline can show: of a step, or of the window. */
  domain(scope, step) {
    const [a, b] = scope === "step" ? [step, step + 1] : [this.first, this.last];
    if (b <= a || !this.n) return [0, 1];
    const from = this.stepStart(a);
    let to = this.stepStart(b - 1) + this.steps.step_us[b - 1];
    const [lo, hi] = this.rowsOf(b - 1);
    for (let i = lo; i < hi; i += 1) if (!this.isGap(i)) to = Math.max(to, this.end(i));
    return [from, Math.max(to, from + 1e-3)];
  }

  /** Steps whose start is at or before `t`: the last of them, within the window. */
  stepAt(t) {
    let [lo, hi] = [this.first, this.last - 1];
    while (lo < hi) {
      const mid = (lo + hi + 1) >> 1;
      if (this.stepStart(mid) <= t) lo = mid;
      else hi = mid - 1;
    }
    return lo;
  }

  /** Sums of a step, or means over the window's decode steps, as the header shows them. */
  figures(scope, step) {
    const s = this.steps;
    let chosen = [step];
    if (scope === "all") {
      chosen = [];
      for (let k = this.first; k < this.last; k += 1) if (s.decode[k] && !s.warmup[k]) chosen.push(k);
      if (!chosen.length) for (let k = this.first; k < this.last; k += 1) chosen.push(k);
    }
    const mean = (values) => chosen.reduce((sum, k) => sum + values[k], 0) / Math.max(chosen.length, 1);
    const out = { n: chosen.length, step: mean(s.step_us), rows: mean(s.rows_us), wall: mean(s.wall_us), gap: mean(s.gap_us), bytes: mean(s.bytes_min) };
    out.overlap = Math.max(out.wall - out.rows, 0);
    out.rate = out.step > 0 && out.bytes > 0 ? out.bytes / out.step / 1e3 : null;
    return out;
  }

  /** Sums over rows: {n, time, min, max, bytes, counted, flops}; `index` are row numbers. */
  sum(index, wall) {
    const out = { n: index.length, time: 0, min: Infinity, max: 0, bytes: 0, counted: 0, flops: 0 };
    for (const i of index) {
      const time = this.time(i, wall);
      out.time += time;
      out.min = Math.min(out.min, time);
      out.max = Math.max(out.max, time);
      out.bytes += this.bytesMin(i);
      out.counted += this.bytesCounted(i);
      out.flops += this.flops(i);
    }
    return out;
  }

  /** Rows of `index` in groups: "kernel" (and stage), "layer" (and stage), "stage". Each is {key, rows, first, ...sums}. */
  groups(index, by, wall) {
    const { layer, stage, kernel } = this.events;
    const nStages = this.stages.length;
    const keyOf = {
      kernel: (i) => kernel[i] * nStages + stage[i],
      layer: (i) => (layer[i] + 1) * nStages + stage[i],
      stage: (i) => stage[i],
    }[by];
    const found = new Map();
    for (const i of index) {
      const key = keyOf(i);
      const rows = found.get(key);
      if (rows) rows.push(i);
      else found.set(key, [i]);
    }
    const out = [...found].map(([key, rows]) => ({ key, rows, first: rows[0], ...this.sum(rows, wall) }));
    return by === "kernel" ? out : out.sort((a, b) => a.key - b.key);
  }

  /** Intervals of gap, in microseconds, within [from, to]. */
  gapWithin(from, to) {
    let sum = 0;
    for (let k = 0; k < this.gapFrom.length; k += 1) sum += Math.max(0, Math.min(to, this.gapTo[k]) - Math.max(from, this.gapFrom[k]));
    return sum;
  }
}

/** GB/s of bytes in microseconds; NaN where none must move. */
export const gbPerS = (bytes, us) => (bytes > 0 && us > 0 ? bytes / us / 1e3 : NaN);
