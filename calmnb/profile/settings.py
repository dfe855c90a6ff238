"""In what two sessions differ besides their times, so that nobody compares apples with pears unknowingly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from calmnb.engine.base import Phase
from calmnb.profile.report import device_label
from calmnb.profile.tables import selected_steps

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["context_span", "distinguishing_labels", "model_name", "setting_differences"]

_FEW_PERCENT = 0.05


def model_name(meta: Mapping[str, Any]) -> str:
    """Name of the model without its dtype at the end: files are named for it, and "weights" says it already."""
    name, dtype = str(meta.get("model", "unknown model")), str(meta.get("dtype") or "")
    short = name.removesuffix(dtype).rstrip("-_. ") if dtype else name
    return short or name


def context_span(session: Session, phase: Phase) -> str:
    """First and last ``kv_len`` of the steps that tables use, or "unknown"."""
    lengths = selected_steps(session.steps, phase)["kv_len"]
    if not len(lengths) or lengths.max() <= 0:  # an outside tool may not know them
        return "unknown"
    return f"{lengths.min():.0f}-{lengths.max():.0f}"


def _main_settings(session: Session, phase: Phase) -> dict[str, str]:
    """What a reader asks first, in that order."""
    meta = session.meta
    return {
        "model": model_name(meta),
        "weights": str(meta.get("dtype", "unknown")),
        "KV cache": str(meta.get("kv_dtype", "unknown")),
        "device": device_label(meta),
        "engine": str(meta.get("engine", "unknown")),
        "times": str(meta.get("time_source", "unknown")),
        "context": context_span(session, phase),
    }


def setting_differences(a: Session, b: Session, phase: Phase = "decode") -> tuple[tuple[str, str, str], ...]:
    """Settings that differ, the weightiest first.

    Returns
    -------
    tuple of (name, value in a, value in b)
        Model, weights, KV cache, device, engine, source of times and context; then sizes (``config.``), how it was
        recorded (``settings.``), peaks of the same kind more than 5% apart, versions and the git revision.
    """
    found = [
        (name, value, other)
        for (name, value), other in zip(_main_settings(a, phase).items(), _main_settings(b, phase).values(), strict=True)
        if value != other
    ]
    told = {"config.dtype"}  # is "weights" above
    for part in ("config", "settings", "versions"):
        ours, theirs = a.meta.get(part) or {}, b.meta.get(part) or {}
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            name = f"{part}.{key}"
            if ours.get(key) != theirs.get(key) and name not in told:
                found.append((name, _shown(ours.get(key)), _shown(theirs.get(key))))
        if part == "settings":
            found += _peak_differences(a, b)
    for name in ("seq_len", "git_revision"):
        if a.meta.get(name) != b.meta.get(name):
            found.append((name, _shown(a.meta.get(name)), _shown(b.meta.get(name))))
    return tuple(found)


def _peak_differences(a: Session, b: Session) -> list[tuple[str, str, str]]:
    found = []
    kinds: tuple[Any, ...] = ("user", "measured", "datasheet")
    for kind in kinds:
        ours, theirs = a.peak(kind), b.peak(kind)
        rates = [peak.gb_per_s for peak in (ours, theirs) if peak]
        if len(rates) == 1 or (len(rates) == 2 and abs(rates[1] - rates[0]) > _FEW_PERCENT * rates[0]):
            found.append((f"{kind} peak", *(f"{peak.gb_per_s:.4g} GB/s" if peak else "none" for peak in (ours, theirs))))
    return found  # type: ignore[return-value]


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def distinguishing_labels(a: Session, b: Session, phase: Phase = "decode") -> tuple[str, str]:
    """Short names: the one or two weightiest settings that differ, else the git revision, else "a" and "b"."""
    found = setting_differences(a, b, phase)
    names = [*_main_settings(a, phase), "git_revision"]
    telling = [row for row in found if row[0] in names and row[0] not in ("engine", "times")]
    if len(telling) > 1:  # a context or a revision says little beside a model or a device
        telling = [row for row in telling if row[0] not in ("context", "git_revision")] or telling[:1]
    if not telling:
        return "a", "b"

    def label(side: int) -> str:
        return ", ".join(_prefixed(row[0], row[side]) for row in telling[:2])

    return label(1), label(2)


def _prefixed(name: str, value: str) -> str:
    prefixes = {"KV cache": "KV ", "context": "context ", "git_revision": "revision "}
    return prefixes.get(name, "") + value
