// Buttons of which one is pressed.
import { h } from "./charts.js";

export class Choice {
  /** `options` are [value, text, title] each. */
  constructor(label, options, onpick, said = label) {
    this.buttons = new Map(options.map(([value, text, title]) => [value,
      h("button", { class: "cn-mini", type: "button", title: title || "", onclick: () => onpick(value) }, text)]));
    this.node = h("span", { class: "cn-choice", role: "group" }, h("span", { class: "cn-note" }, label), [...this.buttons.values()]);
    this.node.setAttribute("aria-label", said);
  }

  set(value) {
    for (const [key, button] of this.buttons) button.setAttribute("aria-pressed", String(key === value));
  }
}
