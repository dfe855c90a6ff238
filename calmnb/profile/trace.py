"""Sessions for other tools: Chrome trace JSON (Perfetto, chrome://tracing) and CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from calmnb.errors import ConfigError
from calmnb.files import replacing

if TYPE_CHECKING:
    import pandas as pd

    from calmnb.profile.session import Session

__all__ = ["TABLES", "chrome_trace", "write_chrome_trace", "write_csv"]

#: What `write_csv` can write.
TABLES = ("events", "steps", "stages", "layers", "kernels", "tokens", "kv_cost")

_PID = 1
_STEPS, _KERNELS, _OVERLAP = 1, 2, 3


def chrome_trace(session: Session) -> dict[str, Any]:
    """Return the session in the Trace Event Format: microseconds, complete events, counters.

    Notes
    -----
    Threads: "steps" (one slice a step), "kernels", and "kernels (overlapping)" for those that begin before their
    predecessor ends, since slices of one thread must nest. Counters: GB/s of each step, KV bytes it reads; power, clock,
    temperature and throttling of the GPU, where they were sampled. Gaps are what is between slices, so they have none.
    """
    meta = session.meta
    device = str(meta.get("device", "device"))
    out: list[dict[str, Any]] = [
        _name("process_name", 0, f"{meta.get('model', 'model')} on {device}"),
        _name("thread_name", _STEPS, "steps"),
        _name("thread_name", _KERNELS, "kernels"),
    ]
    for row in _rows(session.steps):
        rate = row.bytes_min / row.duration_s / 1e9 if row.duration_s > 0 else 0.0
        args = {
            "run": row.run, "pos": row.pos, "kv_len": row.kv_len, "n_tokens": row.n_tokens, "token": row.token,
            "text": row.text, "bytes_min": row.bytes_min, "flops": row.flops, "gb_per_s": round(rate, 3),
        }  # fmt: skip
        title = f"{row.phase} {row.pos}" if row.n_tokens <= 1 else f"{row.phase} {row.pos}-{row.pos + row.n_tokens - 1}"
        out.append(_slice(title, str(row.phase), _STEPS, row.start_s, row.duration_s, args))
        if row.phase == "decode" and row.n_tokens:
            out.append(_counter("GB/s", row.start_s, {"step": round(rate, 3)}))
            out.append(_counter("KV bytes read", row.start_s, {"bytes": row.kv_bytes}))
    events = session.events[session.events["stage"] != "gap"]
    busy_until, overlapped = -math.inf, False
    for row in _rows(events):
        rate = row.bytes_min / row.exclusive_s / 1e9 if row.exclusive_s > 0 else 0.0
        args = {
            "kernel": row.kernel, "layer": row.layer, "pos": row.pos, "bytes_min": row.bytes_min,
            "bytes_counted": row.bytes_counted, "flops": row.flops, "gb_per_s": round(rate, 3),
            "exclusive_us": round(row.exclusive_s * 1e6, 3), "source": row.source,
            "overlap_us": round(max(row.duration_s - row.exclusive_s, 0.0) * 1e6, 3),
        }  # fmt: skip
        overlaps = row.start_s < busy_until - 1e-9
        overlapped |= overlaps
        title = str(row.stage) if row.layer < 0 else f"{row.stage} {row.layer}"
        out.append(_slice(title, str(row.stage), _OVERLAP if overlaps else _KERNELS, row.start_s, row.duration_s, args))
        if not overlaps:
            busy_until = row.start_s + row.duration_s
    out += _telemetry_counters(session)
    if overlapped:
        out.insert(3, _name("thread_name", _OVERLAP, "kernels (overlapping)"))
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": {"summary": session.summary()}}


def _telemetry_counters(session: Session) -> Iterator[dict[str, Any]]:
    shown = (("power, W", "power_w", "watts"), ("SM clock, MHz", "sm_mhz", "MHz"), ("temperature, C", "temperature_c", "C"))
    held = session.throttling()
    for row in _rows(session.telemetry()):
        for title, column, unit in shown:
            value = getattr(row, column)
            if value == value:
                yield _counter(title, row.time_s, {unit: value})
        if held:
            yield _counter("throttled", row.time_s, {reason: int(reason in row.throttled.split(", ")) for reason in held})


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    """Rows as named tuples, which type checkers need not understand."""
    return frame.itertuples(index=False)


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PID, "tid": thread, "args": {"name": name}}


def _slice(name: str, category: str, thread: int, start_s: float, duration_s: float, args: dict[str, Any]) -> dict[str, Any]:
    """A complete event; nanosecond resolution."""
    ts, dur = round(start_s * 1e6, 3), round(duration_s * 1e6, 3)
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in args.items()}
    return {"name": name, "cat": category, "ph": "X", "pid": _PID, "tid": thread, "ts": ts, "dur": dur, "args": plain}


def _counter(name: str, start_s: float, values: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
    return {"name": name, "ph": "C", "pid": _PID, "ts": round(start_s * 1e6, 3), "args": plain}


def write_chrome_trace(session: Session, path: Path) -> Path:
    """Write `chrome_trace`; see `Session.to_chrome_trace`."""
    trace = chrome_trace(session)
    return _write(path, lambda file: json.dump(trace, file, allow_nan=False, separators=(",", ":")))


def write_csv(session: Session, path: Path, table: str) -> Path:
    """Write one table as CSV with a header line; see `Session.to_csv`."""
    if table not in TABLES:
        raise ConfigError(f"to_csv: table is {table!r}; accepted are {', '.join(TABLES)}")
    found = getattr(session, table)
    frame = found() if callable(found) else found
    return _write(path, lambda file: frame.to_csv(file, index=False, lineterminator="\n"))


def _write(path: Path, write: Callable[[TextIO], Any]) -> Path:
    """Write text, whole or not at all."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        write(file)
    return path
