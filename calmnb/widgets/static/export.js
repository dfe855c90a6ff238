// Files made in the browser: a table as CSV, a canvas as PNG, bytes from the kernel.
import { h } from "./charts.js";

/** Rows of cells as CSV (RFC 4180). */
export function toCsv(rows) {
  const cell = (value) => {
    const text = String(value ?? "");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

/** Let the browser save `data` (a Blob, text or bytes) as a file. */
export function saveAs(data, name, mime) {
  const blob = data instanceof Blob ? data : new Blob([data], { type: mime });
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Canvases one below the other with a title, on the colour of the panel, as a PNG. */
export function savePng(canvases, name, theme, title) {
  const ratio = window.devicePixelRatio || 1;
  const head = Math.round(30 * ratio);
  const pad = Math.round(10 * ratio);
  const out = document.createElement("canvas");
  out.width = Math.max(...canvases.map((canvas) => canvas.width)) + 2 * pad;
  out.height = head + canvases.reduce((sum, canvas) => sum + canvas.height + pad, 0);
  const ctx = out.getContext("2d");
  ctx.fillStyle = theme.panel;
  ctx.fillRect(0, 0, out.width, out.height);
  ctx.fillStyle = theme.ink;
  ctx.font = `600 ${13 * ratio}px ${theme.font}`;
  ctx.textBaseline = "middle";
  ctx.fillText(title, pad, head / 2);
  let y = head;
  for (const canvas of canvases) {
    ctx.drawImage(canvas, pad, y);
    y += canvas.height + pad;
  }
  out.toBlob((blob) => saveAs(blob, name), "image/png");
}
