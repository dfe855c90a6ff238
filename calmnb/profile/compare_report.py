"""How a comparison shows itself: one line, a text table of 80 columns, a static HTML block. Formatting only."""

from __future__ import annotations

import html
import math
import textwrap
from typing import TYPE_CHECKING, Any

from calmnb.profile.report import device_label, html_table
from calmnb.profile.settings import model_name

if TYPE_CHECKING:
    from calmnb.profile.compare import Comparison

__all__ = ["html_report", "row_name", "summary_line", "table_rows", "text_report"]

_TITLES = ("a µs", "b µs", "change", "interval", "ratio", "b GB/s", "verdict")


def row_name(comparison: Comparison, record: dict[str, Any]) -> str:
    """Name of a row: its key values; layers by number, and what lies outside them as such."""
    parts = []
    for key in comparison.by:
        value = record[key]
        parts.append((f"layer {value}" if value >= 0 else "outside layers") if key == "layer" else str(value))
    return " ".join(dict.fromkeys(parts))


def _time(us: float, sign: str = "") -> str:
    if math.isnan(us):
        return ""
    if abs(us) < 0.05:
        us = 0.0  # no "-0.0"
    return f"{us:{sign},.0f}" if abs(us) >= 1000 else f"{us:{sign}.1f}"


def _cells(record: dict[str, Any]) -> list[str]:
    low, high, ratio, rate = (record[key] for key in ("low_us", "high_us", "ratio", "gb_per_s_b"))
    return [
        _time(record["time_us_a"]),
        _time(record["time_us_b"]),
        _time(record["difference_us"], "+"),
        "" if math.isnan(low) else f"{_time(low, '+')}..{_time(high, '+')}",
        "" if math.isnan(ratio) else f"{ratio:.3f}",
        "" if math.isnan(rate) else f"{rate:,.1f}",
        str(record["verdict"]),
    ]


def table_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of the report's table, the whole step last, all as text; times in microseconds."""
    records: list[dict[str, Any]] = comparison.table.to_dict("records")  # type: ignore[assignment]
    rows = [[row_name(comparison, record), *_cells(record)] for record in records]
    return [" ".join(comparison.by), *_TITLES], [*rows, ["whole step", *_cells(comparison.total)]]


def _milliseconds(us: float, sign: str = "") -> str:
    return f"{us / 1e3:{sign}.4g}"


def summary_line(comparison: Comparison) -> str:
    """What ran, from what to what, the change with its interval, and the row that changed most."""
    total, meta = comparison.total, comparison.a.meta
    differing = {name for name, _, _ in comparison.settings}
    parts = [] if "model" in differing else [model_name(meta)]
    if "device" not in differing:
        parts.append(device_label(meta))
    foreign = "foreign" in (comparison.a.meta.get("engine"), comparison.b.meta.get("engine"))
    unit = "ms/token" if comparison.phase == "decode" and not foreign else "ms/step"
    parts.append(f"{comparison.labels[0]} -> {comparison.labels[1]}")
    parts.append(f"{_milliseconds(total['time_us_a'])} -> {_milliseconds(total['time_us_b'])} {unit}")
    change = f"x{total['ratio']:.3f}, {_milliseconds(total['difference_us'], '+')} ms"
    if not math.isnan(total["low_us"]):
        change += f" ({100 * comparison.confidence:g}%: {_milliseconds(total['low_us'], '+')}"
        change += f" to {_milliseconds(total['high_us'], '+')})"
    parts.append(f"{change}: {total['verdict']}")
    if total["verdict"] != "no difference shown":
        records: list[dict[str, Any]] = comparison.table.to_dict("records")  # type: ignore[assignment]
        sure = [record for record in records if record["verdict"] != "no difference shown"]
        if sure:
            most = max(sure, key=lambda record: abs(record["difference_us"]))
            name = row_name(comparison, most)
            parts.append(f"most in {name}: {_milliseconds(most['difference_us'], '+')} ms ({most['change_percent']:.0f}%)")
    parts += [
        f"{name} {a} / {b}"
        for name, a, b in comparison.settings
        if name in ("context", "times", "engine") and a not in comparison.labels[0]
    ]
    versions = [session.meta.get("versions", {}).get("calmnb", "unknown") for session in (comparison.a, comparison.b)]
    parts.append(f"calmnb {' / '.join(dict.fromkeys(versions))}")
    return " | ".join(parts)


def _setting_lines(comparison: Comparison) -> list[str]:
    if not comparison.settings:
        return ["recorded with the same settings"]
    return [f"{name}: {a} / {b}" for name, a, b in comparison.settings]


def text_report(comparison: Comparison) -> str:
    """Header with every setting that differs, the table, and how it was made: plain text, 80 columns for stages."""
    titles, rows = table_rows(comparison)
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]

    def line(cells: list[str]) -> str:
        texts = (cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *texts, cells[-1]]).rstrip()

    head = [f"a: {comparison.labels[0]}   b: {comparison.labels[1]}   ({comparison.phase} steps)"]
    head += [f"  differs: {text}" for text in _setting_lines(comparison)] if comparison.settings else _setting_lines(comparison)
    head += [f"  note: {note}" for note in comparison.notes]
    return "\n".join([comparison.summary(), *head, line(titles), *map(line, rows), *textwrap.wrap(comparison.method, 96)])


def html_report(comparison: Comparison) -> str:
    """The same as static HTML, escaped, without script or colours."""
    titles, rows = table_rows(comparison)
    small = "font-size:smaller;opacity:.8;margin:.3em 0"
    settings = ""
    if comparison.settings:
        titles_of = ["differs", comparison.labels[0], comparison.labels[1]]
        table = html_table(titles_of, comparison.settings)
        some = "open" if len(comparison.settings) <= 6 else ""
        settings = f"<details {some}><summary>{len(comparison.settings)} settings differ</summary>{table}</details>"
    else:
        settings = f'<p style="{small}">recorded with the same settings</p>'
    notes = "".join(f'<p style="margin:.3em 0">&#9888; {html.escape(note)}</p>' for note in comparison.notes)
    names = f"a: {comparison.labels[0]}, b: {comparison.labels[1]}. {comparison.method}"
    return (
        f'<div><p style="margin:.3em 0"><b>{html.escape(comparison.summary())}</b></p>{settings}{notes}'
        f'{html_table(titles, rows)}<p style="{small}">{html.escape(names)}</p></div>'
    )
