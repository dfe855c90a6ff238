// Numbers and arrays: pure functions, no DOM.

/** A number with about three significant digits, without exponents. */
export function short(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  return x.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
}

/** A rate: one decimal below 1000, thousands grouped above. */
export function rate(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  return x >= 1000 ? Math.round(x).toLocaleString("en-US") : x.toFixed(1);
}

/** Decimal bytes: 23040 is "23.0 kB". */
export function bytes(n) {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? n : short(n)} ${units[unit]}`;
}

/** A share of 1 as a percentage. */
export function percent(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  return x < 0.0995 ? `${(100 * x).toFixed(1)}%` : `${Math.round(100 * x)}%`;
}

/** Microseconds, as milliseconds from 1000 up. */
export function micros(us) {
  if (us === null || us === undefined || !Number.isFinite(us)) return "–";
  return us >= 1000 ? `${short(us / 1000)} ms` : `${short(us)} µs`;
}

/** About `n` round tick values from 0 to `max`, the last one at most `max`. */
export function ticks(max, n) {
  if (!(max > 0) || !Number.isFinite(max)) return [0];
  const raw = max / Math.max(n, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw * 0.999);
  const out = [];
  for (let i = 0; i * step <= max * 1.0001; i += 1) out.push(i * step);
  return out;
}

/** A tick as text: plain numbers, only as many decimals as the step needs. */
export function tickText(value, step) {
  if (value >= 10000) return `${value / 1000}k`;
  const digits = step > 0 && step < 1 ? Math.min(4, Math.ceil(-Math.log10(step) - 1e-9)) : 0;
  return value.toFixed(digits);
}

/** Value below which a share `q` of `values` lies. */
export function quantile(values, q) {
  if (!values.length) return 0;
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

/** Bytes from the kernel (DataView, ArrayBuffer or typed array) as float32. Copies, so alignment does not matter. */
export function floats(data) {
  if (!data) return new Float32Array(0);
  const view = data.buffer instanceof ArrayBuffer ? data : new Uint8Array(data);
  const start = view.byteOffset;
  return new Float32Array(view.buffer.slice(start, start + view.byteLength - (view.byteLength % 4)));
}

/** Rows of `columns` numbers: an array of small typed arrays. */
export function rows(data, columns) {
  const flat = floats(data);
  const out = [];
  for (let i = 0; i + columns <= flat.length; i += columns) out.push(flat.subarray(i, i + columns));
  return out;
}

/** Cut `text` into pieces of the given UTF-16 lengths; what is left over is the last piece. */
export function pieces(text, lengths) {
  const out = [];
  let at = 0;
  for (const length of lengths) {
    out.push(text.slice(at, at + length));
    at += length;
  }
  return { pieces: out, rest: text.slice(at) };
}

/** Table rows sorted by a key; nulls last, ties in the given order. */
export function sortRows(table, key, descending) {
  const sign = descending ? -1 : 1;
  return table
    .map((row, index) => [row, index])
    .sort(([a, i], [b, j]) => {
      const x = a[key];
      const y = b[key];
      if (x === y) return i - j;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
    })
    .map(([row]) => row);
}
