"""What a session writes down about where it came from: model, device, versions, settings.

Numbers without this are worthless a month later, so every session carries it. Everything here is plain JSON data.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from calmnb.config import ModelConfig, RopeScaling
from calmnb.errors import FormatError

__all__ = ["config_from_dict", "config_to_dict", "describe_model", "git_revision", "versions"]

_PACKAGES = ("numpy", "numba", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings")


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config` as JSON data; an infinite `qkv_clip` becomes None."""
    fields = dataclasses.asdict(config)
    if math.isinf(config.qkv_clip):
        fields["qkv_clip"] = None
    fields["stop_ids"] = list(config.stop_ids)
    return fields


def config_from_dict(fields: dict[str, Any]) -> ModelConfig:
    """Rebuild a `ModelConfig` from `config_to_dict`.

    Raises
    ------
    FormatError
        If a field is missing or unknown.
    """
    values = dict(fields)
    try:
        if values.get("qkv_clip", 0) is None:
            values["qkv_clip"] = math.inf
        if values.get("rope_scaling"):
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        values["stop_ids"] = tuple(values.get("stop_ids", ()))
        return ModelConfig(**values)
    except (TypeError, AttributeError) as error:
        raise FormatError(f"the session's model configuration cannot be read: {error}; save the session again") from error


def describe_model(model: Any) -> dict[str, Any]:
    """Session metadata of `model`: what it is, what it runs on, with which versions.

    Parameters
    ----------
    model
        A `calmnb.model.Model`, or anything with an ``engine``; None gives versions and date only.

    Returns
    -------
    dict
        JSON data; the keys are documented at `Session.meta`.
    """
    from calmnb.profile.bandwidth import known_bandwidth
    from calmnb.profile.device import datasheet_peak
    from calmnb.profile.launches import describe_launches

    meta: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git_revision": git_revision(),
        "peaks": {},
        "settings": {},
    }
    engine = getattr(model, "engine", None)
    if engine is None:
        return meta
    info, config = engine.info, engine.config
    path = getattr(model, "path", None)
    meta |= {
        "model": Path(path).stem if path else config.arch,
        "path": str(path) if path else "",
        "engine": info.engine,
        "device": info.device,
        "threads": info.threads,
        "time_source": info.time_source,
        "dtype": config.dtype,
        "kv_dtype": engine.kv_dtype,
        "seq_len": engine.seq_len,
        "config": config_to_dict(config),
        "has_bias": _has_bias(model),
        **describe_launches(engine),
    }
    file = getattr(model, "file", None)
    for key, attribute in (("n_params", "n_params"), ("model_bytes", "nbytes")):
        value = getattr(file, attribute, None)
        if value is not None:
            meta[key] = int(value)
    peak = datasheet_peak(info.device)
    if peak is not None:
        meta["peaks"]["datasheet"] = peak
    measured = known_bandwidth(info.threads) if info.engine != "cuda" else None
    if measured is not None:
        meta["peaks"]["measured"] = measured.as_peak()
    return meta


def _has_bias(model: Any) -> bool:
    weights = getattr(getattr(model, "file", None), "weights", None) or getattr(model.engine, "weights", None)
    layers: Any = getattr(weights, "layers", ())
    return bool(layers) and layers[0].qkv_bias is not None


@cache
def _installed() -> dict[str, str]:
    from calmnb import __version__

    found = {"python": platform.python_version(), "calmnb": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def versions() -> dict[str, str]:
    """Versions of Python, calmnb and the packages that compute."""
    return dict(_installed())


@cache
def git_revision() -> str:
    """Short revision of the checkout calmnb runs from, with ``+`` if it has changes, or of a `git archive`; "" for a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        archived = root / "calmnb" / "revision.txt"  # git archive puts it there
        found = archived.read_text(encoding="utf-8").strip() if archived.is_file() else ""
        return "" if found.startswith("$") else found

    def git(*args: str) -> str:
        done = subprocess.run(("git", "-C", str(root), *args), capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
