"""A conversation as data, and as files: Markdown, JSON and a static page that runs no script.

What a model says is never trusted. Everything that becomes HTML here goes through `html.escape`; nothing is interpreted
as Markdown.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS

__all__ = ["TOKEN_FIELDS", "Message", "State", "pack_tokens", "to_html", "to_json", "to_markdown", "utf16_length"]

#: Columns of the token table: index of the message, length of the text in UTF-16 units, milliseconds, GB/s, position, id.
TOKEN_FIELDS = ("message", "length", "ms", "gb_per_s", "pos", "id")

State = Literal["done", "queued", "prompt", "streaming", "stopped", "length", "context", "error"]

_STATE_NOTES = {
    "stopped": "stopped",
    "length": "reached the token limit",
    "context": "context full",
    "error": "failed",
    "queued": "waiting",
    "prompt": "reading the prompt",
    "streaming": "unfinished",
}


@dataclass
class Message:
    """One turn.

    Attributes
    ----------
    role : {"user", "assistant"}
    content : str
    state : State
        How an answer ended, or where it is; "done" for a user's message.
    error : str
        What went wrong, in words, for state "error" or "context".
    stats : dict
        Figures of an answer: ``tokens``, ``tok_per_s``, ``first_token_s``.
    tokens : list of tuple
        One row of `TOKEN_FIELDS` a token, without the first column.
    """

    role: Literal["user", "assistant"]
    content: str
    state: State = "done"
    error: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    tokens: list[tuple[float, ...]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON data for the browser, without the token table."""
        return {"role": self.role, "content": self.content, "state": self.state, "error": self.error, "stats": self.stats}


def utf16_length(text: str) -> int:
    """Length of `text` as JavaScript counts it."""
    return len(text) + sum(ord(c) > 0xFFFF for c in text)


def pack_tokens(messages: Sequence[Message]) -> NDArray[np.float32]:
    """Token tables of all messages in one; float32 (n, len(TOKEN_FIELDS)), nan where a time is unknown."""
    rows = [(index, *row) for index, message in enumerate(messages) for row in message.tokens]
    return np.array(rows, np.float32).reshape(-1, len(TOKEN_FIELDS))


def to_json(messages: Sequence[Message], info: Mapping[str, Any], system: str) -> str:
    """The conversation and its figures as one JSON document."""
    head = {"model": info.get("model"), "dtype": info.get("dtype"), "device": info.get("device"), "system": system or None}
    return json.dumps(head | {"messages": [m.to_dict() for m in messages]}, ensure_ascii=False, indent=2)


def to_markdown(messages: Sequence[Message], info: Mapping[str, Any], system: str) -> str:
    """The conversation as Markdown; what was said stands in fenced blocks, so that none of it is markup."""
    parts = [f"# Chat with {info.get('model', 'a model')}", _caption(info)]
    if system:
        parts.append("**system**\n\n" + _fenced(system))
    for message in messages:
        note = _note(message)
        parts.append(f"**{message.role}**{f' ({note})' if note else ''}\n\n{_fenced(message.content)}")
    return "\n\n".join(parts) + "\n"


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _note(message: Message) -> str:
    parts = []
    if message.stats.get("tokens"):
        parts.append(f"{message.stats['tokens']} tokens")
    if message.stats.get("tok_per_s"):
        parts.append(f"{message.stats['tok_per_s']:.1f} tok/s")
    if message.state in _STATE_NOTES:
        parts.append(_STATE_NOTES[message.state])
    return ", ".join(parts)


def _caption(info: Mapping[str, Any]) -> str:
    parts = [info.get("dtype"), info.get("device"), info.get("engine"), info.get("peak_label")]
    return " · ".join(str(part) for part in parts if part)


def to_html(
    messages: Sequence[Message], info: Mapping[str, Any], summary: Mapping[str, Any], system: str = "", name: str = ""
) -> str:
    """A static view for places without a kernel: the conversation, the headline and the time of each stage.

    One ``div`` with inline styles only: no script, no style sheet, no ids, so it survives the sanitisers of notebook
    viewers. It inherits text colour and font, which suits light and dark pages. `name` is a further
    class, by which a live widget finds its own static view.
    """
    out = [
        f'<div class="calmnb-static {_esc(name)}" style="max-width:900px;font-size:13px;line-height:1.5">',
        f'<div style="opacity:.75;margin-bottom:6px"><b>{_esc(info.get("model", ""))}</b> {_esc(_caption(info))}</div>',
    ]
    if summary.get("tok_per_s"):
        out.append(_headline(summary, info))
        out.append(_stage_bar(summary.get("stages") or []))
    if system:
        out.append(_turn("system", system, ""))
    out += [_turn("you" if m.role == "user" else "model", m.content, _note(m), m.error) for m in messages]
    if not messages:
        out.append('<div style="opacity:.75">The conversation is empty. Run the notebook to chat.</div>')
    out.append("</div>")
    return "".join(out)


def _headline(summary: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    text = f"<b>{summary['tok_per_s']:.1f} tok/s</b>"
    if summary.get("gb_per_s"):
        text += f" · {summary['gb_per_s']:.1f} GB/s"
    if summary.get("of_peak") is not None:
        text += f" · {summary['of_peak']:.0%} of {_esc(info.get('peak_label', ''))}"
    if summary.get("ms"):
        text += f" · {summary['ms']:.1f} ms a token"
    return f'<div style="margin-bottom:4px">{text}</div>'


def _stage_bar(stages: Sequence[Mapping[str, Any]]) -> str:
    bar = "".join(
        f'<span style="display:inline-block;height:12px;width:{stage["share"] * 99:.2f}%;'
        f'background-color:{STAGE_COLORS.get(stage["stage"], "#888")}"></span>'
        for stage in stages
    )
    words = " · ".join(
        f"{_esc(STAGE_LABELS.get(stage['stage'], stage['stage']))} {stage['us'] / 1e3:.2f} ms ({stage['share']:.0%})"
        for stage in sorted(stages, key=lambda stage: -stage["share"])
    )
    return (
        f'<div style="white-space:nowrap;overflow:hidden">{bar}</div>'
        f'<div style="font-size:12px;opacity:.75;margin-bottom:8px">one token, stage by stage: {words}</div>'
    )


def _turn(who: str, text: str, note: str, error: str = "") -> str:
    body = f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{_esc(text)}</div>'
    if error:
        body += f'<div style="white-space:pre-wrap;color:#c0392b">{_esc(error)}</div>'
    after = f' <span style="opacity:.7;font-size:11px">{_esc(note)}</span>' if note else ""
    return f'<div style="margin:8px 0"><b>{_esc(who)}</b>{after}{body}</div>'


def _esc(value: Any) -> str:
    return html.escape(str(value), quote=True)
