"""What `ChatWidget` needs before its first answer: checked options, a peak to compare with, and what the browser must know."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from calmnb.errors import CalmnbError, ConfigError
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
from calmnb.profile.recorder import SessionRecorder
from calmnb.widgets.panels import LAYER_STAGES, LivePanels

__all__ = ["check_text", "checked_sampling", "describe", "peak_of"]

_FROM_META = ("model", "dtype", "kv_dtype", "engine", "device", "threads", "time_source", "seq_len", "n_params", "model_bytes")


def check_text(text: Any) -> None:
    """Raise ConfigError unless `text` says something."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("the message is empty; say something")


def checked_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Complete and check ``max_tokens`` and the options of `calmnb.sampler.Sampling`.

    Raises
    ------
    ConfigError
        If an option is unknown or out of range.
    """
    from calmnb.sampler import Sampling

    known = sorted(field.name for field in dataclasses.fields(Sampling))
    values = {key: value for key, value in options.items() if key != "max_tokens"}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown option {key!r}; accepted are max_tokens, {', '.join(known)}")
    max_tokens = options.get("max_tokens", 512)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens!r}; it must be a whole number, at least 1")
    chosen = Sampling(**values)
    return {"max_tokens": max_tokens} | {name: getattr(chosen, name) for name in known}


def peak_of(recorder: SessionRecorder) -> tuple[float | None, str]:
    """Memory peak that `recorder`'s model can reach, in GB/s, and how to name it; the session's metadata keeps it too."""
    from calmnb.profile.bandwidth import known_bandwidth, measure_bandwidth

    meta = recorder.meta
    peaks = meta.setdefault("peaks", {})
    if "measured" not in peaks and meta.get("engine") != "cuda":
        threads = max(int(meta.get("threads") or 0), 1)
        with contextlib.suppress(CalmnbError):
            peaks["measured"] = (known_bandwidth(threads) or measure_bandwidth(threads)).as_peak()
    for kind, words in (("measured", "measured"), ("datasheet", "data sheet")):
        if peaks.get(kind):
            peak = float(peaks[kind]["gb_per_s"])
            return peak, f"{peak:.4g} GB/s ({words})"
    return None, ""


def describe(meta: Mapping[str, Any], panels: LivePanels, peak_label: str) -> dict[str, Any]:
    """What is fixed about the model and the machine, as JSON data: names, sizes, predicted lines, stage colours."""
    return {key: meta.get(key) for key in _FROM_META} | {
        "n_layers": panels.config.n_layers,
        "peak_gb_per_s": panels.peak_gb_per_s,
        "peak_label": peak_label,
        "floor_line": panels.floor_line().tolist(),
        "kv_line": panels.kv_line().tolist(),
        "kv_full_bytes": panels.config.kv_bytes_per_token(panels.kv_dtype) * panels.seq_len,
        "layer_stages": list(LAYER_STAGES),
        "stages": {stage: {"label": STAGE_LABELS[stage], "color": color} for stage, color in STAGE_COLORS.items()},
    }
