// A picture of rectangles, written pixel by pixel. Ten thousand of them take a canvas tens of milliseconds to draw without
// a GPU, and about one here: each is a few stores, and the cost is bounded by the pixels of the picture.

const isLittle = new Uint8Array(Uint32Array.of(1).buffer)[0] === 1;
const known = new Map();

/** A colour ("#rgb", "#rrggbb", "rgb(r, g, b)") as three numbers. */
function channels(color) {
  if (color.startsWith("#")) {
    const digits = color.length === 4 ? [...color.slice(1)].map((c) => c + c).join("") : color.slice(1, 7);
    return [0, 2, 4].map((k) => parseInt(digits.slice(k, k + 2), 16));
  }
  return (color.match(/[\d.]+/g) || [128, 128, 128]).slice(0, 3).map(Number);
}

/** A colour as one opaque pixel; `alpha` mixes it with the colour `under`. */
export function pixel(color, alpha = 1, under = "#ffffff") {
  const key = `${color} ${alpha} ${under}`;
  if (!known.has(key)) {
    const back = channels(under);
    const [r, g, b] = channels(color).map((value, k) => Math.round(alpha * value + (1 - alpha) * back[k]));
    known.set(key, (isLittle ? (255 << 24) | (b << 16) | (g << 8) | r : (r << 24) | (g << 16) | (b << 8) | 255) >>> 0);
  }
  return known.get(key);
}

export class Pixels {
  resize(width, height) {
    const [w, hgt] = [Math.max(width, 1), Math.max(height, 1)];
    if (this.width === w && this.height === hgt) return;
    Object.assign(this, { width: w, height: hgt, image: new ImageData(w, hgt) });
    this.data = new Uint32Array(this.image.data.buffer);
  }

  /** Fill whole pixels [x0, x1) x [y0, y1), cut to the picture. */
  fill(x0, x1, y0, y1, word) {
    const { data, width } = this;
    const [a, b] = [x0 < 0 ? 0 : x0, x1 > width ? width : x1];
    const [c, d] = [y0 < 0 ? 0 : y0, y1 > this.height ? this.height : y1];
    if (a >= b) return;
    for (let at = c * width; at < d * width; at += width) {
      if (b - a > 8) data.fill(word, at + a, at + b);
      else for (let k = at + a; k < at + b; k += 1) data[k] = word;
    }
  }

  /** Put the picture on a canvas, its corner at these device pixels. */
  put(ctx, x, y) { ctx.putImageData(this.image, x, y); }
}
