// Which token: a bar for each step of the recording, and a slider over them.
import { micros, quantile, short } from "./format.js";
import { h, readTheme, setText, soon } from "./charts.js";
import { gbPerS } from "./profile_model.js";

const HEIGHT = 44;

/** A token as a person can read it: line breaks and blanks made visible. */
export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

/** Options: tip (Tip), onstep(step). */
export class StepStrip {
  constructor(root, { tip, onstep }) {
    Object.assign(this, { root, tip, onstep });
    this.canvas = h("canvas", { class: "cn-canvas" });
    this.plot = h("div", { class: "cn-strip", tabIndex: 0 }, this.canvas);
    this.plot.setAttribute("role", "slider");
    this.plot.setAttribute("aria-label", "Token");
    const turn = (text, label, by) => {
      const button = h("button", { class: "cn-mini cn-turn", type: "button", title: label, onclick: () => this.go(by) }, text);
      button.setAttribute("aria-label", label);
      return button;
    };
    this.name = h("span", { class: "cn-step-name" });
    this.node = h("div", { class: "cn-steps" },
      h("div", { class: "cn-step-line" }, turn("‹", "Previous token", -1), turn("›", "Next token", 1), this.name), this.plot);
    this.plot.addEventListener("pointerdown", (event) => this.press(event));
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.plot.addEventListener("pointerleave", () => this.tip.hide());
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => this.invalidate());
    this.observer.observe(this.plot);
  }

  destroy() {
    this.observer.disconnect();
    this.callOff?.();
    clearTimeout(this.retry);
  }

  set(rec, step, scope) {
    Object.assign(this, { rec, step, scope });
    this.plot.setAttribute("aria-valuemin", "0");
    this.plot.setAttribute("aria-valuemax", String(Math.max(rec.nSteps - 1, 0)));
    this.plot.setAttribute("aria-valuenow", String(step));
    const words = rec.nSteps ? this.describe(step).map((line) => line.text ?? line) : ["no step"];
    this.plot.setAttribute("aria-valuetext", words.join(", "));
    this.writeName();
    this.invalidate();
  }

  writeName() {
    const { rec, step } = this;
    if (!rec.nSteps) return setText(this.name, "nothing recorded yet");
    const text = rec.texts[step];
    const kind = !rec.steps.n_tokens[step] ? "choice" : rec.steps.decode[step] ? "token" : `prompt, ${rec.steps.n_tokens[step]} tokens`;
    this.name.replaceChildren(
      `${kind} `, h("b", {}, kind === "token" ? `${step} of ${rec.nSteps - 1}` : ""), kind === "token" ? "  at position " : " from position ", h("b", {}, String(rec.steps.pos[step])),
      text ? h("span", {}, " → ", h("q", { class: "cn-token-text" }, visible(text))) : "",
      rec.steps.warmup[step] ? h("span", { class: "cn-chip" }, "warm-up") : "");
  }

  go(by) {
    const next = Math.min(Math.max(this.step + by, 0), this.rec.nSteps - 1);
    if (next !== this.step) this.onstep(next);
  }

  describe(k) {
    const { steps, texts } = this.rec;
    const rate = gbPerS(steps.bytes_min[k], steps.step_us[k]);
    return [
      steps.decode[k] ? `position ${steps.pos[k]}` : `prompt from ${steps.pos[k]}, ${steps.n_tokens[k]} tokens`,
      ...(texts[k] ? [`chose ${visible(texts[k])}`] : []), micros(steps.step_us[k]), ...(rate ? [`${short(rate)} GB/s`] : []),
      ...(steps.warmup[k] ? ["warm-up: left out of means"] : []),
    ];
  }

  get slot() { return this.plot.clientWidth / Math.max(this.rec.nSteps, 1); }

  invalidate() {
    if (this.callOff || !this.rec) return;
    this.callOff = soon(() => {
      this.callOff = null;
      this.draw();
    });
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) {  // out of the page for a moment
      this.misses = (this.misses || 0) + 1;
      if (this.misses < 50) this.retry = setTimeout(() => this.invalidate(), 200);
      return;
    }
    this.misses = 0;
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(HEIGHT * ratio) });
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    const theme = readTheme(this.root);
    const { steps, nSteps } = this.rec;
    const decoded = Array.from(steps.step_us || []).filter((_, k) => steps.decode[k]);
    const top = (quantile(decoded, 0.97) || quantile(Array.from(steps.step_us || []), 1) || 1) * 1.25;
    const slot = width / Math.max(nSteps, 1);
    const high = HEIGHT - 6;
    const bar = (k, colour, alpha) => {
      const value = Math.min(steps.step_us[k] / top, 1) * high;
      ctx.globalAlpha = alpha;
      ctx.fillStyle = colour;
      ctx.fillRect(k * slot, HEIGHT - value, Math.max(slot - (slot > 3 ? 1 : 0), 0.7), value);
    };
    for (let k = 0; k < nSteps; k += 1) {
      const inView = this.scope === "all" && k >= this.rec.first && k < this.rec.last;
      bar(k, steps.decode[k] && !steps.warmup[k] ? theme.muted : theme.peak, inView ? 0.95 : 0.45);
    }
    if (nSteps && this.scope === "step") {
      ctx.globalAlpha = 1;
      ctx.fillStyle = theme.accent;
      const x = this.step * slot;
      ctx.fillRect(Math.min(x, width - 3), 4, Math.max(slot - 1, 3), HEIGHT - 4);
    }
    ctx.globalAlpha = 1;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.min(Math.max(Math.floor((event.clientX - box.left) / this.slot), 0), this.rec.nSteps - 1);
  }

  press(event) {
    if (!this.rec?.nSteps) return;
    this.plot.setPointerCapture(event.pointerId);
    this.pressed = true;
    const end = () => { this.pressed = false; };
    this.plot.addEventListener("pointerup", end, { once: true });
    this.plot.addEventListener("pointercancel", end, { once: true });
    this.onstep(this.at(event));
  }

  hover(event) {
    if (!this.rec?.nSteps) return;
    const k = this.at(event);
    if (this.pressed && k !== this.step) this.onstep(k);
    this.tip.show(this.describe(k), event.clientX, event.clientY);
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.rec?.nSteps) return;
    event.preventDefault();
    this.go(moves[event.key]);
  }
}
