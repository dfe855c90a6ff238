"""How a session shows itself: one line, a text table, a static HTML block. Formatting only; numbers come from tables.

The HTML has no script and no colours of text or background, so it reads in light and dark themes and on GitHub; every
string from the session (model names, tokens) is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from calmnb.engine.base import Stage
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
from calmnb.profile.tables import selected_steps
from calmnb.profile.telemetry import telemetry_note, throttling_note

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["decode_summary", "html_report", "html_table", "stage_bar", "summary_line", "text_report"]


def decode_summary(session: Session) -> dict[str, float]:
    """The numbers of a headline, medians over the settled decode steps.

    Returns
    -------
    dict
        ``tokens`` (count), ``time_ms`` a token with ``p20_ms`` and ``p80_ms``, ``tok_per_s``, ``gb_per_s`` (GB = 1e9
        bytes), ``percent_of_peak`` (of the session's first peak), ``kv_len_first``, ``kv_len_last``; nan where unknown.
    """
    steps = selected_steps(session.steps, "decode")
    nan = math.nan
    if not len(steps):
        keys = ("time_ms", "p20_ms", "p80_ms", "tok_per_s", "gb_per_s", "percent_of_peak", "kv_len_first", "kv_len_last")
        return {"tokens": 0, **dict.fromkeys(keys, nan)}
    seconds = steps["duration_s"]
    middle = float(seconds.median())
    rate = float((steps["bytes_min"] / seconds.where(seconds > 0)).median()) / 1e9
    peak = session.peak()
    return {
        "tokens": len(steps),
        "time_ms": middle * 1e3,
        "p20_ms": float(seconds.quantile(0.2)) * 1e3,
        "p80_ms": float(seconds.quantile(0.8)) * 1e3,
        "tok_per_s": 1.0 / middle if middle > 0 else nan,
        "gb_per_s": rate if rate > 0 else nan,
        "percent_of_peak": 100.0 * rate / peak.gb_per_s if peak and rate > 0 else nan,
        "kv_len_first": float(steps["kv_len"].min()),
        "kv_len_last": float(steps["kv_len"].max()),
    }


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def device_label(meta: dict[str, Any]) -> str:
    """Device with its thread count, if it has one."""
    threads = meta.get("threads") or 0
    name = str(meta.get("device", "unknown device"))
    return f"{name}, {threads} thread{'s' if threads != 1 else ''}" if threads else name


def _headline(session: Session) -> list[str]:
    meta, numbers, peak = session.meta, decode_summary(session), session.peak()
    parts = [str(meta.get("model", "unknown model"))]
    if meta.get("dtype"):
        parts.append(f"{meta['dtype']} (KV {meta.get('kv_dtype', 'fp16')})")
    parts.append(device_label(meta))
    if not numbers["tokens"]:
        return [*parts, "no decoded token"]
    if meta.get("engine") == "foreign":  # another program's steps are not tokens
        return [*parts, f"{numbers['time_ms']:.4g} ms/step", f"{numbers['tokens']:.0f} steps"]
    parts.append(f"{numbers['tok_per_s']:.4g} tok/s")
    parts.append(f"{numbers['time_ms']:.4g} ms/token")
    if _known(numbers["gb_per_s"]):
        parts.append(f"{numbers['gb_per_s']:.4g} GB/s")
    if peak and _known(numbers["percent_of_peak"]):
        parts.append(f"{numbers['percent_of_peak']:.0f}% of {peak.gb_per_s:.4g} GB/s ({peak.kind})")
    if numbers["kv_len_last"] > 0:  # an outside tool may not know it
        parts.append(f"context {numbers['kv_len_first']:.0f}-{numbers['kv_len_last']:.0f}")
    return parts


def summary_line(session: Session) -> str:
    """One line to paste in an issue; see `Session.summary`."""
    meta, parts = session.meta, _headline(session)
    known = meta.get("versions", {})
    wanted = {"cpu": ("numba", "numpy"), "reference": ("numpy",)}.get(meta.get("engine", ""), ("cupy-cuda12x", "cupy-cuda13x"))
    parts += [f"{name} {known[name]}" for name in ("calmnb", *wanted) if name in known]
    if meta.get("git_revision"):
        parts.append(f"git {meta['git_revision']}")
    if held := throttling_note(meta):
        parts.append(f"THROTTLED: {held}")
    if meta.get("date"):
        parts.append(str(meta["date"])[:10])
    return " | ".join(parts).replace("\n", " ")


def _notes(session: Session) -> str:
    """What one must know to read the numbers: what was left out, how times were taken."""
    steps, numbers = session.steps, decode_summary(session)
    prefill = steps[steps["phase"] == "prefill"]
    what = "steps" if session.meta.get("engine") == "foreign" else "decode steps"
    parts = [f"median of {numbers['tokens']:.0f} {what}"]
    warm = int(steps["warmup"].sum())
    if warm and numbers["tokens"] != warm:
        parts.append(f"{warm} warm-up step{'s' if warm != 1 else ''} left out")
    elif warm:
        parts.append("warm-up included: there is nothing else")
    if numbers["tokens"] > 1:
        parts.append(f"80% of steps under {numbers['p80_ms']:.4g} ms, 20% under {numbers['p20_ms']:.4g} ms")
    if len(prefill):
        tokens, seconds = int(prefill["n_tokens"].sum()), float(prefill["forward_s"].sum())
        parts.append(f"prompt {tokens} tokens in {seconds * 1e3:.4g} ms ({tokens / seconds:.4g} tok/s)" if seconds > 0 else "")
    parts.append(f"times by {session.meta.get('time_source', 'unknown clock')}")
    parts += [str(session.meta.get("time_note", "")), telemetry_note(session.meta)]
    return "; ".join(part for part in parts if part)


_COLUMNS = (
    ("us", "time_us", ",.1f"),
    ("p20", "p20_us", ",.1f"),
    ("p80", "p80_us", ",.1f"),
    ("%", "share_percent", ".1f"),
    ("MB", "bytes_min", ",.1f"),
    ("GB/s", "gb_per_s", ",.1f"),
    ("% of peak", "percent_of_peak", ".0f"),
)


def _cell(record: dict[str, Any], key: str, form: str) -> str:
    value = float(record[key])
    if math.isnan(value) or (key == "bytes_min" and value == 0):
        return ""
    return format(value / 1e6 if key == "bytes_min" else value, form)


def text_report(session: Session) -> str:
    """Headline, stage table and notes in plain text, 80 columns."""
    lines = [" | ".join(_headline(session))]
    records: list[dict[str, Any]] = session.stages().to_dict("records")  # type: ignore[assignment]
    if records:
        widths = [10, 10, 10, 6, 8, 8, 11]
        titles = zip(_COLUMNS, widths, strict=True)
        lines.append(f"{'stage':<16}" + "".join(f"{title:>{width}}" for (title, *_), width in titles))
        for record in records:
            cells = [_cell(record, key, form) for _, key, form in _COLUMNS]
            lines.append(f"{record['stage']:<16}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
        lines.append(_notes(session))
    return "\n".join(lines)


def stage_bar(parts: Iterable[tuple[Stage, float]]) -> str:
    """Static HTML: one bar split by stage in the stages' colours, with a legend. Numbers are seconds."""
    rows = [(stage, seconds) for stage, seconds in parts if seconds > 0]
    total = sum(seconds for _, seconds in rows)
    if not rows:
        return ""
    pieces = "".join(
        f'<div title="{html.escape(stage)}: {seconds * 1e6:,.1f} &micro;s, {100 * seconds / total:.1f}%" '
        f'style="width:{100 * seconds / total:.3f}%;background:{STAGE_COLORS[stage]}"></div>'
        for stage, seconds in rows
    )
    legend = "".join(
        f'<span style="margin-right:1em;white-space:nowrap"><span style="display:inline-block;width:.7em;height:.7em;'
        f'background:{STAGE_COLORS[stage]};margin-right:.3em"></span>{html.escape(STAGE_LABELS[stage])} '
        f"{100 * seconds / total:.0f}%</span>"
        for stage, seconds in rows
        if seconds >= 0.005 * total
    )
    return (
        f'<div style="display:flex;height:1.4em;max-width:50em;overflow:hidden;border-radius:3px">{pieces}</div>'
        f'<div style="font-size:smaller;max-width:55em;margin:.3em 0">{legend}</div>'
    )


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Static HTML table of texts, escaped here: the first column to the left, the rest to the right."""

    def cell(tag: str, column: int, text: str) -> str:
        side = "right" if column else "left"
        style = f"text-align:{side};padding:.15em .7em;font-size:13px;font-variant-numeric:tabular-nums"
        return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'

    head = "".join(cell("th", i, title) for i, title in enumerate(titles))
    body = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def html_report(session: Session) -> str:
    """Headline, bar and stage table as static HTML; see `Session`."""
    numbers = decode_summary(session)
    headline = " &middot; ".join(html.escape(part) for part in _headline(session))
    if not numbers["tokens"]:
        return f"<div><p>{headline}</p></div>"
    total = numbers["time_ms"] / 1e3
    records: list[dict[str, Any]] = session.stages().to_dict("records")  # type: ignore[assignment]
    bar = stage_bar([(record["stage"], record["share_percent"] / 100 * total) for record in records])
    table = html_table(
        ["stage", *(title.replace("us", "µs") for title, *_ in _COLUMNS)],
        [[str(record["stage"]), *(_cell(record, key, form) for _, key, form in _COLUMNS)] for record in records],
    )
    peaks = "; ".join(
        f"peak {kind}: {float(entry['gb_per_s']):.4g} GB/s ({entry.get('source', 'no source given')})"
        for kind, entry in session.meta.get("peaks", {}).items()
    )
    notes = html.escape("; ".join(part for part in (_notes(session), peaks) if part))
    return (
        f'<div><p style="margin:.3em 0"><b>{headline}</b></p>{bar}{table}'
        f'<p style="font-size:smaller;opacity:.8">{notes}</p></div>'
    )
