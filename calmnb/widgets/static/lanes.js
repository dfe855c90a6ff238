// Lanes and axes of the timeline: pure functions.

/** Round tick values within [from, to], about `n` of them. */
export function ticksWithin(from, to, n) {
  const raw = (to - from) / Math.max(n, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw * 0.999);
  const out = [];
  for (let k = Math.ceil(from / step); k * step <= to; k += 1) out.push(k * step);
  return { values: out, step };
}

/** A moment on the axis: microseconds with as many digits as the ticks' distance asks for. */
export function moment(us, step) {
  const [unit, scale] = Math.abs(us) >= 1e6 && step >= 100 ? ["s", 1e-6] : Math.abs(us) >= 1000 && step >= 0.1 ? ["ms", 1e-3] : ["µs", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(step * scale) - 1e-9));
  return us === 0 ? "0" : `${(us * scale).toFixed(Math.min(digits, 6))} ${unit}`;
}

/** Lanes of the timeline: {labels, of: Int32Array (lane of each row)}. */
export function lanesOf(rec, by, members) {
  const { layer, stage, kernel } = rec.events;
  const nStages = rec.stages.length;
  const keyOf = {
    layer: (i) => (layer[i] < 0 ? (rec.stages[stage[i]].name === "embed" ? -1 : 1e6 + stage[i]) : layer[i]),
    "layer-stage": (i) => (layer[i] < 0 ? (rec.stages[stage[i]].name === "embed" ? -1 : 1e6 + stage[i]) : layer[i] * nStages + stage[i]),
    stage: (i) => stage[i],
    kernel: (i) => (rec.isGap(i) ? 1e6 : kernel[i]),
  }[by];
  const keys = new Map();
  const [from, to] = members;
  for (let i = from; i < to; i += 1) {
    const key = keyOf(i);
    if (!keys.has(key)) keys.set(key, i);
  }
  const sorted = [...keys.keys()].sort((a, b) => a - b);
  const lane = new Map(sorted.map((key, k) => [key, k]));
  const of = new Int32Array(rec.n).fill(-1);
  let gap = -1;
  for (let i = from; i < to; i += 1) {
    of[i] = lane.get(keyOf(i));
    if (rec.isGap(i)) gap = of[i];
  }
  const labels = sorted.map((key) => {
    const i = keys.get(key);
    if (by === "kernel") return rec.isGap(i) ? "gap" : rec.kernel(i);
    const name = rec.stage(i).label;
    if (layer[i] < 0 || by === "stage") return name;
    return by === "layer" ? `layer ${layer[i]}` : `${layer[i]} ${name}`;
  });
  // Where lanes are too low for their own names, those of the layers stand beside the first lane of each.
  const heads = by !== "layer-stage" ? null : sorted.map((key, k) => {
    const own = layer[keys.get(key)];
    return own >= 0 && (k === 0 || layer[keys.get(sorted[k - 1])] !== own) ? `layer ${own}` : "";
  });
  return { labels, heads, of, gap };
}

/** Shorten text to a width, in pixels. */
export function cut(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let end = text.length - 1;
  while (end > 1 && ctx.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
