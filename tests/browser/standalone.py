"""The browser half of a widget in an empty page, without JupyterLab: its real state, a model that only remembers."""

from __future__ import annotations

import base64
import json
from typing import Any

_PAGE = """<!doctype html><meta charset="utf-8"><style>%s</style>
<body data-jp-theme-light="%s" style="margin:0;padding:8px;background:%s"><div id="here"></div></body>"""

_MOUNT = """async ([esm, json, buffers]) => {
  const state = JSON.parse(json);
  for (const [name, text] of Object.entries(buffers)) {
    state[name] = new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  }
  const handlers = {};
  const model = {
    get: (name) => state[name],
    set: (name, value) => {
      if (state[name] === value) return;
      state[name] = value;
      for (const handler of handlers[`change:${name}`] || []) handler();
    },
    save_changes: () => { window.saved = (window.saved || 0) + 1; },
    on: (name, handler) => { (handlers[name] ||= []).push(handler); },
    off: (name, handler) => { handlers[name] = (handlers[name] || []).filter((known) => known !== handler); },
    send: (content) => {
      (window.sent ||= []).push(content);
      if (content.type !== "hello") return;
      setTimeout(() => (handlers["msg:custom"] || []).forEach((handler) => handler({ type: "hello" }, [])), 0);
    },
  };
  window.model = model;
  const url = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
  const module = await import(url);
  let made = module.default;
  if (typeof made === "function") made = await made();
  window.end = await made.render({ model, el: document.getElementById("here") });
}"""


def mount(page: Any, widget: Any, *, dark: bool = False) -> None:
    """Show `widget` in `page`, an empty one."""
    page.set_content(_PAGE % (widget._css, "false" if dark else "true", "#111" if dark else "#fff"))
    names = [name for name in widget.traits(sync=True) if not name.startswith("_") and name not in ("layout", "keys")]
    values = {name: getattr(widget, name) for name in names}
    buffers = {name: base64.b64encode(value).decode() for name, value in values.items() if isinstance(value, bytes)}
    plain = {name: value for name, value in values.items() if _is_json(value)}
    page.evaluate(_MOUNT, [widget._esm, json.dumps(plain), buffers])


def _is_json(value: Any) -> bool:
    return isinstance(value, str | int | float | list | dict | None)
