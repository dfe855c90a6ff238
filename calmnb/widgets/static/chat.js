// The chat and the life of a view. The kernel owns the conversation; this file shows it and passes on what is typed.
// Text of the model goes into the page as text nodes only.
import { micros, pieces, rate, short } from "./format.js";
import { h, setText, soon, Tip } from "./charts.js";
import { hideStatic, watchTheme } from "./theme.js";
import { Panels } from "./panels.js";
import { Store, TRAITS } from "./chat_store.js";

const STATUS = {
  loading: "loading", ready: "ready", queued: "waiting: the model is answering another chat", prompt: "reading the prompt",
  generating: "answering", stopping: "stopping", error: "not available",
};
const BUSY = new Set(["queued", "prompt", "generating", "stopping"]);
const NOTES = {
  stopped: "stopped", length: "reached max tokens", context: "context full", error: "failed", queued: "waiting", prompt: "reading the prompt",
};
const CONTROLS = [
  ["temperature", "temperature", { min: 0, max: 5, step: 0.1 }, "0 always takes the likeliest token"],
  ["top_p", "top-p", { min: 0, max: 1, step: 0.05 }, "Keep the likeliest tokens that together have this probability; 1 keeps all"],
  ["top_k", "top-k", { min: 0, step: 1 }, "Keep this many tokens; 0 keeps all"],
  ["min_p", "min-p", { min: 0, max: 1, step: 0.01 }, "Drop tokens below this share of the likeliest one's probability"],
  ["repetition_penalty", "repetition", { min: 0.1, max: 5, step: 0.05 }, "Above 1, tokens used before become less likely"],
  ["max_tokens", "max tokens", { min: 1, step: 1 }, "Longest answer"],
  ["seed", "seed", { min: 0, step: 1, placeholder: "random" }, "Same seed, same answer; empty draws a new one each time"],
];

/** One view of the widget in one output area. */
class View {
  constructor(store, el) {
    this.store = store;
    this.root = h("div", { class: "calmnb calmnb-chat" });
    this.root.dataset.lmSuppressShortcuts = "true";
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    el.append(this.root);
    this.tip = new Tip(this.root);
    this.panels = new Panels(this.root, this.tip, (type, what) => this.act({ type, what }));
    this.profile = { id: "", view: null };
    this.panelsDue = false;
    this.buildChat();
    this.layout = h("div", { class: "cn-layout" }, this.chat, this.panels.node);
    this.profileBox = h("section", { class: "cn-opened", role: "region", hidden: true },
      h("div", { class: "cn-caption" }, h("span", { class: "cn-title" }, "ProfileView of this conversation"),
        h("button", { class: "cn-mini", type: "button", onclick: () => this.act({ type: "close_profile" }) }, "close")),
      (this.profilePlace = h("div")));
    this.profileBox.setAttribute("aria-label", "ProfileView of this conversation");
    this.root.append(this.layout, this.profileBox);
    this.endTheme = watchTheme(this.root, () => this.panels.redraw());
    this.changed(new Set(TRAITS));
    this.waitForKernel();
  }

  destroy() {
    this.profile.id = null;
    this.endProfile();
    this.panels.destroy();
    this.endTheme();
    clearTimeout(this.kernelTimer);
    this.root.remove();
  }

  // ---- building

  buildChat() {
    this.name = h("span", { class: "cn-name" });
    this.chips = h("span", { class: "cn-chips" });
    this.state = h("span", { class: "cn-state", role: "status" });
    this.gaugeFill = h("div", { class: "cn-gauge-fill" });
    this.gauge = h("div", { class: "cn-gauge", role: "meter" }, this.gaugeFill);
    this.gauge.setAttribute("aria-label", "Context used");
    this.gaugeText = h("span", { class: "cn-gauge-text" });
    this.banner = h("div", { class: "cn-banner", role: "status", hidden: true });
    this.log = h("div", { class: "cn-log", role: "log", tabIndex: 0 });
    this.log.setAttribute("aria-label", "Conversation");
    this.log.addEventListener("pointermove", (event) => this.hoverToken(event));
    this.log.addEventListener("pointerleave", () => this.hoverToken(null));
    this.empty = h("div", { class: "cn-hello" },
      h("div", { class: "cn-hello-head" }, "Ask something"),
      h("div", {}, "Each token's time and bytes appear beside the answer, layer by layer."));
    this.alert = h("div", { class: "cn-alert", role: "alert", hidden: true });
    this.chat = h("section", { class: "cn-chat", role: "region" },
      h("div", { class: "cn-status" },
        h("div", { class: "cn-status-line" }, this.name, this.chips, this.state),
        h("div", { class: "cn-status-line" }, this.gauge, this.gaugeText)),
      this.banner, this.log, this.alert, this.buildComposer(), this.buildSettings());
    this.chat.setAttribute("aria-label", "Chat");
    this.nodes = [];
  }

  buildComposer() {
    this.input = h("textarea", { class: "cn-input", rows: 2, placeholder: "Message, Enter sends" });
    this.input.setAttribute("aria-label", "Message");
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      } else if (event.key === "Escape") this.stop();
    });
    this.input.addEventListener("input", () => this.sizeInput());
    this.sendButton = h("button", { class: "cn-button cn-primary", type: "button", onclick: () => this.submit() }, "Send");
    this.stopButton = h("button", { class: "cn-button cn-stop", type: "button", onclick: () => this.stop() }, "Stop");
    this.stopButton.title = "End this answer (Esc)";
    return h("div", { class: "cn-composer" }, this.input, h("div", { class: "cn-composer-buttons" }, this.sendButton, this.stopButton));
  }

  buildSettings() {
    const tool = (text, title, action) => h("button", { class: "cn-button cn-quiet-button", type: "button", title, onclick: action }, text);
    this.newButton = tool("New chat", "Forget this conversation and its figures", () => this.act({ type: "new" }));
    this.retryButton = tool("Retry", "Answer the last message again", () => this.act({ type: "retry" }));
    this.exportSelect = h("select", { class: "cn-select", onchange: () => this.exportAs() },
      h("option", { value: "" }, "Export"), h("option", { value: "md" }, "Markdown"), h("option", { value: "json" }, "JSON"), h("option", { value: "html" }, "HTML"));
    this.exportSelect.setAttribute("aria-label", "Export the conversation");
    this.controls = {};
    const fields = CONTROLS.map(([key, text, attributes, title]) => {
      const input = h("input", { type: "number", class: "cn-number", ...attributes, onchange: () => this.sendSampling() });
      for (const [name, value] of Object.entries(attributes)) input.setAttribute(name, value);
      this.controls[key] = input;
      return h("label", { class: "cn-field", title }, h("span", {}, text), input);
    });
    this.systemInput = h("textarea", { class: "cn-input cn-system", rows: 2, placeholder: "none",
      onchange: () => this.act({ type: "system", text: this.systemInput.value }) });
    this.settingsText = h("span", { class: "cn-note" });
    this.settings = h("details", { class: "cn-settings" },
      h("summary", {}, h("span", { class: "cn-title" }, "Sampling"), this.settingsText),
      h("div", { class: "cn-fields" }, fields),
      h("label", { class: "cn-field cn-wide" }, h("span", {}, "system prompt"), this.systemInput));
    return h("div", { class: "cn-tools" }, h("div", { class: "cn-tool-row" }, this.newButton, this.retryButton, this.exportSelect), this.settings);
  }

  // ---- acting

  act(content) {
    this.store.send({ ...content, view: this.id });
  }

  submit() {
    const text = this.input.value;
    if (!text.trim() || this.sendButton.disabled) return;
    this.act({ type: "send", text });
    this.input.value = "";
    this.sizeInput();
    this.sticky = true;
    this.input.focus();
  }

  stop() {
    if (this.stopButton.disabled) return;
    this.act({ type: "stop" });
    this.root.dataset.stopAt = String(performance.now());
    this.state.textContent = STATUS.stopping;
  }

  exportAs() {
    if (this.exportSelect.value) this.act({ type: "download", what: this.exportSelect.value });
    this.exportSelect.value = "";
  }

  sendSampling() {
    const values = {};
    for (const [key, input] of Object.entries(this.controls)) {
      if (input.value !== "") values[key] = Number(input.value);
      else if (key === "seed") values[key] = null;
    }
    this.act({ type: "sampling", values });
  }

  save({ name, mime, view }, data) {
    if (view !== this.id) return;
    const link = h("a", { href: URL.createObjectURL(new Blob([data], { type: mime })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  sizeInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 160)}px`;
  }

  // ---- showing

  changed(names) {
    const { store } = this;
    const any = (...list) => list.some((name) => names.has(name));
    if (any("height")) this.root.style.setProperty("--cn-log-height", `${store.height || 360}px`);
    if (any("info", "summary", "points_data", "layers_data")) this.drawPanels();
    if (any("info", "summary", "status", "progress")) this.drawStatus();
    if (any("transcript", "token_data")) this.drawLog();
    if (any("notice")) this.drawNotice();
    if (any("sampling", "system")) this.drawSettings();
    if (any("profile_id")) this.showProfile(store.profile_id);
    if (store.live) this.drawKernel(true);
    hideStatic(store.info.static_id);
  }

  stream(index, texts, tokens, figures) {
    const node = this.nodes[index];
    if (!node) return this.drawLog();
    this.appendTokens(node, texts, tokens);
    const { state } = this.store.transcript[index];
    if (node.node.dataset.state !== state) this.drawMeta(node, this.store.transcript[index]);
    this.drawStatus();
    if (figures) this.drawPanels();
    this.scroll();
  }

  drawPanels() {
    if (this.panelsDue) return;
    this.panelsDue = true;
    soon(() => {
      this.panelsDue = false;
      this.panels.update(this.store);
    });
  }

  drawStatus() {
    const { info, summary, status, progress } = this.store;
    const busy = BUSY.has(status);
    setText(this.name, info.model || "calmnb");
    const chips = [info.dtype, info.engine === "cpu" && info.threads ? `cpu, ${info.threads} threads` : info.engine].filter(Boolean);
    if (chips.join() !== this.chipText) {
      this.chipText = chips.join();
      this.chips.replaceChildren(...chips.map((text) => h("span", { class: "cn-chip", title: info.device || "" }, text)));
    }
    const share = progress?.share;
    const words = progress?.text ? `${progress.text}${share !== null && share !== undefined ? ` ${Math.round(100 * share)}%` : " …"}` : STATUS[status] || status;
    setText(this.state, words);
    if (this.root.dataset.status !== status) this.root.dataset.status = status;
    const used = summary.used || 0;
    const size = info.seq_len || 0;
    this.gaugeFill.style.width = size ? `${Math.min(100, (100 * used) / size)}%` : "0";
    this.gaugeFill.classList.toggle("cn-full", size > 0 && used > 0.9 * size);
    setText(this.gaugeText, size ? `${used.toLocaleString("en-US")} / ${size.toLocaleString("en-US")} tokens` : "");
    this.gauge.setAttribute("aria-valuenow", String(used));
    this.gauge.setAttribute("aria-valuemax", String(size));
    this.log.setAttribute("aria-busy", String(busy));
    const off = this.readOnly || status === "error";
    this.sendButton.disabled = off || busy;
    this.stopButton.disabled = off || !busy || status === "stopping";
    this.newButton.disabled = off || busy;
    this.retryButton.disabled = off || busy || !this.store.transcript.length;
    this.input.disabled = off;
    this.panels.setReadOnly(off);
    if (!busy && this.root.dataset.stopAt) {
      this.root.dataset.stopMs = String(performance.now() - Number(this.root.dataset.stopAt));
      delete this.root.dataset.stopAt;
    }
  }

  drawNotice() {
    this.alert.textContent = this.store.notice || "";
    this.alert.hidden = !this.store.notice;
  }

  drawSettings() {
    const { sampling, system } = this.store;
    for (const [key, input] of Object.entries(this.controls)) {
      if (input !== document.activeElement) input.value = sampling[key] ?? "";
    }
    if (this.systemInput !== document.activeElement) this.systemInput.value = system || "";
    const parts = [["temperature", "temperature"], ["top_p", "top-p"], ["min_p", "min-p"], ["max_tokens", "max"]]
      .filter(([key]) => sampling[key] !== undefined)
      .map(([key, text]) => `${text} ${sampling[key]}`);
    if (sampling.seed !== null && sampling.seed !== undefined) parts.push(`seed ${sampling.seed}`);
    if (system) parts.push("system prompt");
    this.settingsText.textContent = parts.join(" · ");
  }

  drawLog() {
    const { transcript, tokens } = this.store;
    const byMessage = new Map();
    for (const row of tokens) {
      if (!byMessage.has(row[0])) byMessage.set(row[0], []);
      byMessage.get(row[0]).push(row);
    }
    while (this.nodes.length > transcript.length) this.nodes.pop().node.remove();
    transcript.forEach((message, index) => {
      let item = this.nodes[index];
      if (!item || item.role !== message.role || item.text !== message.content) {
        const fresh = this.makeMessage(message, index);
        const own = byMessage.get(index) || [];
        if (message.role === "assistant" && own.length) {
          const cut = pieces(message.content, own.map((row) => row[1]));
          this.appendTokens(fresh, cut.pieces, own);
          if (cut.rest) this.appendTokens(fresh, [cut.rest], []);
        } else this.appendTokens(fresh, [message.content], []);
        if (item) item.node.replaceWith(fresh.node);
        else this.log.append(fresh.node);
        item = this.nodes[index] = fresh;
      }
      this.drawMeta(item, message);
    });
    if (transcript.length) this.empty.remove();
    else this.log.append(this.empty);
    this.scroll();
  }

  makeMessage(message, index) {
    const body = h("div", { class: "cn-text" });
    const meta = h("span", { class: "cn-meta" });
    const actions = h("span", { class: "cn-actions" });
    const who = message.role === "user" ? "you" : "model";
    const node = h("div", { class: `cn-message cn-${message.role}` }, h("div", { class: "cn-who" }, h("span", {}, who), meta, actions), body);
    const item = { node, body, meta, actions, role: message.role, text: "", rows: [] };
    const small = (text, title, action) => h("button", { class: "cn-mini", type: "button", title, onclick: action }, text);
    actions.append(small("copy", "Copy this text", () => navigator.clipboard?.writeText(item.text)));
    if (message.role === "user") actions.append(small("edit", "Change this message and answer again", () => this.edit(item, index)));
    return item;
  }

  edit(item, index) {
    if (this.sendButton.disabled || item.editor) return;
    const area = h("textarea", { class: "cn-input", rows: 3, value: item.text });
    const close = () => {
      item.editor.replaceWith(item.body);
      item.editor = null;
    };
    const done = () => {
      close();
      this.act({ type: "edit", index, text: area.value });
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        done();
      }
    });
    item.editor = h("div", { class: "cn-editor" }, area, h("button", { class: "cn-button cn-primary", type: "button", onclick: done }, "Send"),
      h("button", { class: "cn-button", type: "button", onclick: close }, "Cancel"));
    item.body.replaceWith(item.editor);
    area.focus();
  }

  appendTokens(item, texts, tokens) {
    texts.forEach((text, i) => {
      item.text += text;
      const row = tokens[i];
      if (!row) item.body.append(text);
      else if (text) {
        const span = h("span", { class: "cn-token" }, text);
        span.calmToken = row;
        item.body.append(span);
      }
    });
  }

  drawMeta(item, message) {
    const { stats, state, error } = message;
    const parts = [];
    if (stats?.tokens) parts.push(`${stats.tokens} tokens`);
    if (stats?.tok_per_s) parts.push(`${rate(stats.tok_per_s)} tok/s`);
    if (stats?.first_token_s) parts.push(`first after ${short(stats.first_token_s)} s`);
    if (NOTES[state]) parts.push(NOTES[state]);
    item.meta.textContent = parts.join(" · ");
    item.node.dataset.state = state;
    if (error && !item.problem) item.node.append((item.problem = h("div", { class: "cn-problem", role: "alert" })));
    if (item.problem) item.problem.textContent = error ? `${error}${state === "context" ? "\nStart a new chat, or edit an earlier message." : ""}` : "";
  }

  scroll() {
    if (this.sticky !== false) this.log.scrollTop = this.log.scrollHeight;
    if (!this.onScroll) {
      this.onScroll = () => { this.sticky = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40; };
      this.log.addEventListener("scroll", this.onScroll);
    }
  }

  hoverToken(event) {
    const span = event?.target.closest?.(".cn-token");
    if (span === this.hovered) return;
    this.hovered?.classList.remove("cn-over");
    this.hovered = span;
    if (!span) return this.tip.hide();
    span.classList.add("cn-over");
    const [, , ms, flow, pos, id] = span.calmToken;
    const lines = [`token ${id} at position ${pos}`];
    if (Number.isFinite(ms)) lines.push(micros(ms * 1000), `${short(flow)} GB/s`);
    this.tip.show(lines, event.clientX, event.clientY);
  }

  /** Show another widget, the ProfileView that the kernel opened, below the chat; none if `id` is empty. */
  async showProfile(id) {
    if (id === this.profile.id) return;
    const mine = { id, view: null };
    this.endProfile();
    this.profile = mine;
    this.profileBox.hidden = !id;
    if (!id) return;
    try {
      const manager = this.store.model.widget_manager;
      const view = await manager.create_view(await manager.get_model(id));
      if (this.profile !== mine) return view.remove();
      mine.view = view;
      this.profilePlace.replaceChildren(view.el);
    } catch (error) {  // a saved chat whose ProfileView was not saved with it
      console.warn("calmnb: the ProfileView cannot be shown", error);
      if (this.profile === mine) this.profileBox.hidden = true;
    }
  }

  endProfile() {
    this.profile.view?.remove();
    this.profilePlace.replaceChildren();
  }

  // ---- surroundings

  waitForKernel() {
    this.store.hello();
    this.kernelTimer = setTimeout(() => this.drawKernel(this.store.live), 4000);
  }

  drawKernel(live) {
    this.readOnly = !live;
    this.banner.hidden = live;
    this.banner.textContent = live ? "" : "Saved chat: no kernel is behind it. Run its cell again to go on.";
    this.root.classList.toggle("cn-readonly", !live);
    if (live) clearTimeout(this.kernelTimer);
    this.drawStatus();
  }
}

export default () => {
  let store = null;
  let count = 0;
  return {
    initialize({ model }) {
      store = new Store(model);
      return () => store.destroy();
    },
    render({ model, el }) {
      if (!store) store = new Store(model);
      const view = new View(store, el);
      count += 1;
      view.id = `${Date.now()}-${count}`;
      store.views.add(view);
      return () => {
        store.views.delete(view);
        view.destroy();
      };
    },
  };
};
