// The chat's state in the browser: what the kernel has said so far, from traits, snapshots and deltas.
import { floats, rows } from "./format.js";

const POINTS = 6;
const TOKENS = 6;
const LIMIT = 4096;
export const TRAITS = ["info", "status", "progress", "notice", "run_id", "transcript", "token_data", "summary", "points_data", "layers_data", "sampling", "system", "height", "profile_id"];

/** What the kernel has said so far, shared by all views of one widget. */
export class Store {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.run = 0;
    this.seq = 0;
    this.live = false;
    this.readTraits(TRAITS);
    this.onCustom = (message, buffers) => this.receive(message, buffers);
    model.on("msg:custom", this.onCustom);
    this.onChange = TRAITS.map((name) => {
      const handler = () => this.traitChanged(name);
      model.on(`change:${name}`, handler);
      return [name, handler];
    });
  }

  destroy() {
    this.model.off("msg:custom", this.onCustom);
    for (const [name, handler] of this.onChange) this.model.off(`change:${name}`, handler);
  }

  readTraits(names) {
    const get = (name) => this.model.get(name);
    for (const name of names) {
      if (name === "points_data") this.points = rows(get(name), POINTS);
      else if (name === "layers_data") this.layers = floats(get(name));
      else if (name === "token_data") this.tokens = rows(get(name), TOKENS);
      else if (name === "transcript") this.transcript = structuredClone(get(name) || []);
      else if (name === "run_id") this.run = get(name);
      else this[name] = get(name) ?? "";
    }
    this.info = this.info || {};
    this.summary = this.summary || {};
    this.progress = this.progress || {};
    this.sampling = this.sampling || {};
  }

  traitChanged(name) {
    this.changed = (this.changed || new Set()).add(name);
    if (this.changed.size > 1) return;
    queueMicrotask(() => {  // one redraw for all traits of one message
      const names = [...this.changed];
      this.changed = null;
      this.readTraits(names);
      if (names.includes("run_id")) this.seq = 0;
      this.tell(names);
    });
  }

  receive(message, buffers) {
    if (message.type === "snapshot") return this.takeSnapshot(message, buffers);
    if (message.type === "delta") return this.takeDelta(message, buffers);
    if (message.type === "download") for (const view of this.views) view.save(message, buffers[0]);
  }

  takeSnapshot({ run, seq, state }, [tokens, points, layers]) {
    this.live = true;
    Object.assign(this, state, { run, seq });
    this.tokens = rows(tokens, TOKENS);
    this.points = rows(points, POINTS);
    this.layers = floats(layers);
    this.tell(TRAITS);
  }

  takeDelta(message, buffers) {
    if (message.run !== this.run) return;  // a stray of an answer that is over
    if (message.seq !== this.seq + 1) {  // something was missed: ask for all of it
      if (message.seq > this.seq) this.hello();
      return;
    }
    this.live = true;
    this.seq = message.seq;
    const answer = this.transcript[message.message];
    if (!answer) return this.hello();
    answer.content += message.pieces.join("");
    answer.state = message.state;
    const fresh = rows(buffers[0], TOKENS - 1).map((row) => Float32Array.of(message.message, ...row));
    this.tokens.push(...fresh);
    this.points.push(...rows(buffers[1], POINTS));
    if (this.points.length > LIMIT) this.points = this.points.filter((_, i) => i % 2 === 0 || i > LIMIT / 2);
    this.summary = { ...(message.summary || this.summary), used: message.used };
    if (buffers[2]) this.layers = floats(buffers[2]);
    for (const view of this.views) view.stream(message.message, message.pieces, fresh, Boolean(message.summary));
  }

  hello() {
    this.send({ type: "hello" });
  }

  send(content) {
    this.model.send(content);
  }

  tell(names) {
    for (const view of this.views) view.changed(new Set(names));
  }
}
