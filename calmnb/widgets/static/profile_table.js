// The columns of ProfileView's table: single rows of a recording, or groups of them.
import { gbPerS } from "./profile_model.js";

// Kept, because making one takes as long as formatting hundreds of numbers.
const FORMATS = [0, 1, 2, 3].map((n) => new Intl.NumberFormat("en-US", { minimumFractionDigits: n, maximumFractionDigits: n }));
const digits = (x, n) => (Number.isFinite(x) ? FORMATS[n].format(x) : "");

/** A number for a table column: as many decimals as keep three digits, none below zero lost; empty if unknown. */
export function cell(x) {
  if (!Number.isFinite(x)) return "";
  const size = Math.abs(x);
  return digits(x, size >= 1000 ? 0 : size >= 100 ? 1 : 2);
}

const exact = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(9))) : "");

function number(key, title, help, value, more = {}) {
  return { key, title, help, value, text: (i) => cell(value(i)), exact: (i) => exact(value(i)), width: 76, ...more };
}

/** Share, rate, share of peak; then what they are made of. */
function shared({ peak, total, time, bytes, flops }) {
  const rate = (i) => gbPerS(bytes(i), time(i));
  const first = [
    number("share", "share %", "Part of the time of the step, or of all steps of the window", (i) => (100 * time(i)) / total, { names: ["share"], text: (i) => digits((100 * time(i)) / total, 1), width: 68 }),
    number("gbs", "GB/s", "Bytes that must move over the time shown", rate, { names: ["gbs", "GB/s"], full: "gb_per_s", width: 62 }),
    number("peak", "% peak", peak ? `Of ${peak[1]} GB/s (${peak[0]}); above 100, it came from a cache` : "No peak is known", (i) => (peak ? (100 * rate(i)) / peak[1] : NaN),
      { names: ["peak", "%"], full: "percent_of_peak", text: (i) => (peak ? digits((100 * rate(i)) / peak[1], 0) : ""), width: 66 }),
  ];
  const second = [
    number("bytes", "MB", "Bytes that must move, 1 MB = 10⁶ bytes", (i) => (bytes(i) > 0 ? bytes(i) / 1e6 : NaN), { names: ["mb"], full: "bytes_min_MB" }),
    number("intensity", "FLOP/B", "Arithmetic intensity: floating-point operations for each byte that must move", (i) => (bytes(i) > 0 ? flops(i) / bytes(i) : NaN), { names: ["intensity", "flop"], full: "flop_per_byte", width: 66 }),
  ];
  return [first, second];
}

/** Columns of single rows. */
export function rowColumns(rec, { wall, scope, total, peak }) {
  const { steps } = rec;
  const [rates, amounts] = shared({ peak, total, time: (i) => rec.time(i, wall), bytes: (i) => rec.bytesMin(i), flops: (i) => rec.flops(i) });
  return [
    { key: "kernel", title: "kernel", isText: true, width: 136, value: (i) => rec.kernel(i), text: (i) => rec.kernel(i), color: (i) => rec.stage(i).color },
    { key: "stage", title: "stage", isText: true, width: 76, value: (i) => rec.stage(i).label, text: (i) => rec.stage(i).label },
    { ...number("layer", "layer", "Layer; empty outside the layers", (i) => rec.events.layer[i]), text: (i) => (rec.events.layer[i] < 0 ? "" : String(rec.events.layer[i])), width: 54 },
    ...(scope === "all" ? [{ ...number("pos", "position", "Position of the step's token", (i) => steps.pos[rec.stepOf[i]], { names: ["pos"] }), text: (i) => String(steps.pos[rec.stepOf[i]]) }] : []),
    number("start", "start µs", "After the start of the step", (i) => rec.events.start[i], { names: ["start"], full: "start_us" }),
    number("time", "time µs", wall ? "From start to end" : "Exclusive: from the later of its start and all earlier ends, to its end", (i) => rec.time(i, wall),
      { names: ["time", "us"], full: wall ? "wall_us" : "exclusive_us", width: 74 }),
    ...rates, ...amounts,
  ];
}

/** Columns of groups (see `Recording.groups`), by "kernel", "layer" or "stage". */
export function groupColumns(rec, groups, by, { wall, total, peak }) {
  const stage = (g) => rec.stage(groups[g].first);
  const [rates, amounts] = shared({ peak, total, time: (g) => groups[g].time, bytes: (g) => groups[g].bytes, flops: (g) => groups[g].flops });
  const layer = (g) => rec.events.layer[groups[g].first];
  const name = by === "kernel" ? (g) => rec.kernel(groups[g].first) : by === "stage" ? (g) => stage(g).label
    : (g) => (layer(g) < 0 ? stage(g).label : `layer ${layer(g)}`);
  return [
    { key: by === "layer" ? "where" : by, title: by, names: [by], isText: true, width: 136, value: name, text: name, color: (g) => stage(g).color },
    ...(by === "stage" ? [] : [{ key: "stage", title: "stage", isText: true, width: 76, value: (g) => stage(g).label, text: (g) => stage(g).label }]),
    ...(by === "layer" ? [{ ...number("layer", "layer", "", layer), text: (g) => (layer(g) < 0 ? "" : String(layer(g))), width: 54 }] : []),
    number("calls", "calls", "Rows in the group", (g) => groups[g].n, { text: (g) => digits(groups[g].n, 0), width: 58 }),
    number("time", "time µs", `Sum of the ${wall ? "times from start to end" : "exclusive times"}`, (g) => groups[g].time, { names: ["time", "us"], full: wall ? "wall_us" : "exclusive_us", width: 74 }),
    ...rates,
    number("mean", "mean µs", "Time of one row", (g) => groups[g].time / groups[g].n, { names: ["mean"], full: "mean_us", width: 70 }),
    number("max", "max µs", "Longest row", (g) => groups[g].max, { names: ["max"], full: "max_us", width: 70 }),
    ...amounts,
  ];
}
