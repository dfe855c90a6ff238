// Columns of numbers as they come from the kernel, and their order: pure functions, no DOM. `calmnb/widgets/columns.py`
// is the other end.

const ARRAYS = {
  f4: Float32Array, f8: Float64Array, i2: Int16Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array,
};

/** What a trait of bytes holds (DataView, ArrayBuffer or typed array), as bytes. */
export function toBytes(data) {
  if (!data) return new Uint8Array(0);
  return data.buffer instanceof ArrayBuffer ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength) : new Uint8Array(data);
}

/** Columns by name; `layout` is [name, format, byte offset, count] each. Copies, so alignment does not matter. */
export function unpack(layout, data) {
  const all = toBytes(data);
  const out = {};
  for (const [name, format, offset, count] of layout || []) {
    const type = ARRAYS[format];
    const size = type.BYTES_PER_ELEMENT * count;
    out[name] = offset + size <= all.length ? new type(all.slice(offset, offset + size).buffer) : new type(count);
  }
  return out;
}

/** Texts that `pack_texts` packed: where each ends, and all of them as UTF-8. */
export function unpackTexts(ends, data) {
  const decoder = new TextDecoder();
  const all = toBytes(data);
  return Array.from(ends, (end, i) => decoder.decode(all.subarray(i ? ends[i - 1] : 0, end)));
}

/** Indices 0..n-1 that pass `keep`, or all. */
export function indices(n, keep) {
  const out = new Uint32Array(n);
  let count = 0;
  for (let i = 0; i < n; i += 1) if (!keep || keep(i)) out[count++] = i;
  return out.slice(0, count);
}

/** Sort `index` in place by `value(i)`, a number or a text; unknown values (nan, null) last, ties in the given order. */
export function sortIndex(index, value, descending) {
  const n = index.length;
  const keys = new Float64Array(n);
  const first = n ? value(index[0]) : 0;
  if (typeof first === "string") {
    const names = Array.from(index, (i) => value(i));
    const order = new Map([...new Set(names)].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).map((name, i) => [name, i]));
    for (let k = 0; k < n; k += 1) keys[k] = order.get(names[k]);
  } else {
    for (let k = 0; k < n; k += 1) keys[k] = value(index[k]) ?? NaN;
  }
  const sign = descending ? -1 : 1;
  const order = new Uint32Array(n);
  for (let k = 0; k < n; k += 1) order[k] = k;
  order.sort((a, b) => {
    const [x, y] = [keys[a], keys[b]];
    if (x === y) return a - b;
    if (x !== x) return y !== y ? a - b : 1;
    if (y !== y) return -1;
    return sign * (x - y);
  });
  const before = index.slice();
  for (let k = 0; k < n; k += 1) index[k] = before[order[k]];
  return index;
}
