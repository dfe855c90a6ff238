"""The event table seen from five sides: stages, layers, kernels, tokens, KV-cache cost.

Each is a group-by over `Session.events` and `Session.steps`. Times are exclusive times, so they add up; medians stand
beside a spread (20th and 80th percentile) because a shared machine has a long tail. Decode statistics leave the
warm-up steps out, unless there is nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calmnb.config import ModelConfig
from calmnb.engine.base import Phase
from calmnb.profile.launches import LAUNCH_COLUMNS, launch_table

__all__ = ["TABLE_COLUMNS", "kernels", "kv_cost", "layers", "nonkv_bandwidth", "selected_steps", "stages", "tokens"]

_COMMON = {
    "time_us": "median exclusive time in a step, microseconds",
    "p20_us": "20th percentile of it over the steps",
    "p80_us": "80th percentile of it over the steps",
    "share_percent": "part of all steps' time",
    "bytes_min": "bytes that must move, mean of a step",
    "bytes_counted": "bytes this code touches, mean of a step",
    "flops": "floating-point operations, mean of a step",
    "gb_per_s": "bytes_min over exclusive time, median of the steps; GB = 1e9 bytes; nan where no bytes must move",
    "percent_of_peak": "gb_per_s over the peak asked for; above 100 means the data came from a cache; nan without a peak",
    "flop_per_byte": "flops over bytes_min: arithmetic intensity",
}

#: What each column of each table means.
TABLE_COLUMNS: dict[str, dict[str, str]] = {
    "stages": {"stage": "stage, all its layers together", "calls": "rows of a step, median", **_COMMON},
    "layers": {"layer": "layer; -1 outside the layers", "stage": "stage", **_COMMON},
    "kernels": {
        "kernel": "the engine's name of the code that ran",
        "stage": "stage it works for",
        "calls": "number of times it ran, all steps together",
        "total_ms": "exclusive time, all calls together, milliseconds",
        "mean_us": "mean exclusive time of a call, microseconds",
        "std_us": "standard deviation of it (population)",
        "min_us": "shortest call",
        "median_us": "median call",
        "max_us": "longest call",
        "overlap_us": "mean time of a call beside the kernel before it, microseconds: duration less exclusive time",
        "share_percent": "part of all steps' time",
        "gb_per_s": "bytes_min over exclusive time, median of the calls; GB = 1e9 bytes",
        "percent_of_peak": "gb_per_s over the peak asked for",
        "flop_per_byte": "flops over bytes_min: arithmetic intensity",
        **LAUNCH_COLUMNS,
    },
    "tokens": {
        "run": "prompt-and-answer",
        "step": "row of Session.steps",
        "pos": "position of the token fed in",
        "kv_len": "positions attended to",
        "token": "id of the token chosen, -1 unknown",
        "text": "the token chosen as text, if known",
        "time_ms": "forward pass and choice of the token, milliseconds",
        "forward_ms": "forward pass alone",
        "sample_ms": "choice of the token alone",
        "interval_ms": "from the previous token's start to this one's, host work included",
        "tok_per_s": "1000 / time_ms",
        "bytes_min": "bytes that must move",
        "gb_per_s": "bytes_min over time_ms; GB = 1e9 bytes",
        "percent_of_peak": "gb_per_s over the peak asked for",
        "warmup": "left out of the other tables",
    },
    "kv_cost": {
        "kv_len": "positions attended to: mean of the bin's steps",
        "steps": "steps in the bin",
        "attention_ms": "attention in a step, all layers, median, milliseconds",
        "p20_ms": "20th percentile of it",
        "p80_ms": "80th percentile of it",
        "kv_bytes": "KV cache bytes a token must read, all layers, mean of the bin",
        "gb_per_s": "kv_bytes over attention time, median of the bin",
        "predicted_ms": "kv_bytes over the bandwidth the weights' stages reached in this session",
        "token_ms": "the whole token, median",
        "share_percent": "attention in the token's time",
        "cache_bytes": "memory the cached positions take",
    },
}


def selected_steps(steps: pd.DataFrame, phase: Phase) -> pd.DataFrame:
    """Return the steps that statistics of `phase` are made of: warm-up left out unless there is nothing else."""
    rows = steps[(steps["phase"] == phase) & (steps["n_tokens"] > 0)]
    settled = rows[~rows["warmup"]]
    return settled if len(settled) else rows


def _of_steps(events: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    return events[events["step"].isin(steps["step"])]


def _ratio(top: pd.Series[Any], bottom: pd.Series[Any]) -> pd.Series[Any]:
    """top / bottom, nan where either is zero."""
    return (top / bottom.where(bottom > 0)).where(top > 0)


def _per_step(events: pd.DataFrame, steps: pd.DataFrame, keys: list[str], peak: float | None) -> pd.DataFrame:
    rows = _of_steps(events, steps)
    sums = ["exclusive_s", "bytes_min", "bytes_counted", "flops"]
    grouped = rows.groupby(["step", *keys], observed=True, sort=True)
    each = grouped[sums].sum()
    each["calls"] = grouped.size()
    each["gb_per_s"] = _ratio(each["bytes_min"], each["exclusive_s"]) / 1e9
    by = each.groupby(level=keys, observed=True, sort=True)
    out = pd.DataFrame(
        {
            "calls": by["calls"].median(),
            "time_us": by["exclusive_s"].median() * 1e6,
            "p20_us": by["exclusive_s"].quantile(0.2) * 1e6,
            "p80_us": by["exclusive_s"].quantile(0.8) * 1e6,
            "share_percent": 100.0 * by["exclusive_s"].sum() / max(float(steps["duration_s"].sum()), 1e-300),
            "bytes_min": by["bytes_min"].mean(),
            "bytes_counted": by["bytes_counted"].mean(),
            "flops": by["flops"].mean(),
            "gb_per_s": by["gb_per_s"].median(),
        }
    )
    out["percent_of_peak"] = 100.0 * out["gb_per_s"] / peak if peak else np.nan
    out["flop_per_byte"] = _ratio(out["flops"], out["bytes_min"])
    return out.reset_index()


def stages(events: pd.DataFrame, steps: pd.DataFrame, *, phase: Phase = "decode", peak: float | None = None) -> pd.DataFrame:
    """One row a stage, in execution order; columns in ``TABLE_COLUMNS["stages"]``.

    Parameters
    ----------
    events, steps
        `Session.events` and `Session.steps`.
    phase : {"decode", "prefill"}
        Which steps; never mixed.
    peak : float or None
        GB/s for ``percent_of_peak``.

    Returns
    -------
    DataFrame
    """
    out = _per_step(events, selected_steps(steps, phase), ["stage"], peak)
    return out[list(TABLE_COLUMNS["stages"])]


def layers(events: pd.DataFrame, steps: pd.DataFrame, *, phase: Phase = "decode", peak: float | None = None) -> pd.DataFrame:
    """One row a layer and stage; columns in ``TABLE_COLUMNS["layers"]``. Parameters as for `stages`."""
    out = _per_step(events, selected_steps(steps, phase), ["layer", "stage"], peak)
    return out[list(TABLE_COLUMNS["layers"])]


def kernels(
    events: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    phase: Phase = "decode",
    peak: float | None = None,
    meta: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """One row a kernel and stage, the most expensive first; columns in ``TABLE_COLUMNS["kernels"]``.

    Parameters as for `stages`; `meta` is `Session.meta`, whose ``launches`` fill the columns of `LAUNCH_COLUMNS`.
    """
    chosen = selected_steps(steps, phase)
    rows = _of_steps(events, chosen)
    beside = (rows["duration_s"] - rows["exclusive_s"]).clip(lower=0.0)
    rows = rows.assign(gb_per_s=_ratio(rows["bytes_min"], rows["exclusive_s"]) / 1e9, overlap_s=beside)
    by = rows.groupby(["kernel", "stage"], observed=True)
    seconds = by["exclusive_s"]
    total, moved, flops = seconds.sum(), by["bytes_min"].sum(), by["flops"].sum()
    out = pd.DataFrame(
        {
            "calls": by.size(),
            "total_ms": total * 1e3,
            "mean_us": seconds.mean() * 1e6,
            "std_us": seconds.std(ddof=0) * 1e6,
            "min_us": seconds.min() * 1e6,
            "median_us": seconds.median() * 1e6,
            "max_us": seconds.max() * 1e6,
            "overlap_us": by["overlap_s"].mean() * 1e6,
            "share_percent": 100.0 * total / max(float(chosen["duration_s"].sum()), 1e-300),
            "gb_per_s": by["gb_per_s"].median(),
        }
    )
    out["percent_of_peak"] = 100.0 * out["gb_per_s"] / peak if peak else np.nan
    out["flop_per_byte"] = _ratio(flops, moved)
    out["kv_len"] = by["kv_len"].median()
    out = out.sort_values("total_ms", ascending=False, kind="stable").reset_index()
    return out.join(launch_table(meta or {}, out))[list(TABLE_COLUMNS["kernels"])]


def tokens(steps: pd.DataFrame, *, peak: float | None = None) -> pd.DataFrame:
    """One row a decoded token, warm-up included and marked; columns in ``TABLE_COLUMNS["tokens"]``."""
    rows = steps[(steps["phase"] == "decode") & (steps["n_tokens"] > 0)]
    out = rows[["run", "step", "pos", "kv_len", "token", "text", "bytes_min", "warmup"]].copy()
    for name in ("forward", "sample", "interval"):
        out[f"{name}_ms"] = rows[f"{name}_s"] * 1e3
    out["time_ms"] = rows["duration_s"] * 1e3
    out["tok_per_s"] = 1.0 / rows["duration_s"].where(rows["duration_s"] > 0)
    out["gb_per_s"] = _ratio(rows["bytes_min"], rows["duration_s"]) / 1e9
    out["percent_of_peak"] = 100.0 * out["gb_per_s"] / peak if peak else np.nan
    return out[list(TABLE_COLUMNS["tokens"])].reset_index(drop=True)


def nonkv_bandwidth(events: pd.DataFrame, steps: pd.DataFrame) -> float:
    """GB/s that the stages reading weights reached together when decoding: the session's own idea of a byte's price.

    Returns
    -------
    float
        Median over the steps of bytes_min over exclusive time, GB = 1e9 bytes; nan if no step read weights.
    """
    chosen = selected_steps(steps, "decode")
    rows = _of_steps(events, chosen)
    rows = rows[(rows["stage"] != "attention") & (rows["bytes_min"] > 0)]
    each = rows.groupby("step")[["bytes_min", "exclusive_s"]].sum()
    return float((_ratio(each["bytes_min"], each["exclusive_s"]) / 1e9).median()) if len(each) else float("nan")


def _clusters(contexts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the clusters of ascending `contexts`: a new one begins where the way to the next is far longer than usual."""
    ways = np.diff(contexts)
    usual = float(np.median(ways[ways > 0])) if (ways > 0).any() else 0.0
    return np.concatenate([[0], np.cumsum(ways > max(8 * usual, 16))])[: len(contexts)]


def kv_cost(
    events: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    config: ModelConfig | None = None,
    kv_dtype: str = "fp16",
    seq_len: int | None = None,
    bins: int | Literal["steps"] = 32,
) -> pd.DataFrame:
    """What the KV cache costs as the context grows; columns in ``TABLE_COLUMNS["kv_cost"]``.

    Parameters
    ----------
    events, steps
        `Session.events` and `Session.steps`.
    config, kv_dtype, seq_len
        For ``cache_bytes``; without a config it is nan.
    bins : int or "steps"
        At most so many bins of equal numbers of steps along ``kv_len``; where runs begin at a few contexts far apart, a bin
        for each of these. "steps" keeps every step.

    Returns
    -------
    DataFrame
        Ascending in ``kv_len``.
    """
    chosen = selected_steps(steps, "decode").sort_values(["kv_len", "step"])
    rows = _of_steps(events, chosen)
    spent = rows[rows["stage"] == "attention"].groupby("step")["exclusive_s"].sum()
    each = chosen.set_index("step")[["kv_len", "kv_bytes", "duration_s"]].join(spent.rename("attention_s"), how="inner")
    n_bins = len(each) if bins == "steps" else max(1, min(int(bins), len(each)))
    clusters = _clusters(each["kv_len"].to_numpy())
    is_few = bins != "steps" and 1 < int(clusters.max(initial=0)) + 1 <= n_bins
    each["bin"] = clusters if is_few else (np.arange(len(each)) * n_bins) // max(len(each), 1)
    each["gb_per_s"] = _ratio(each["kv_bytes"], each["attention_s"]) / 1e9
    by = each.groupby("bin")
    out = pd.DataFrame(
        {
            "kv_len": by["kv_len"].mean(),
            "steps": by.size(),
            "attention_ms": by["attention_s"].median() * 1e3,
            "p20_ms": by["attention_s"].quantile(0.2) * 1e3,
            "p80_ms": by["attention_s"].quantile(0.8) * 1e3,
            "kv_bytes": by["kv_bytes"].mean(),
            "gb_per_s": by["gb_per_s"].median(),
            "token_ms": by["duration_s"].median() * 1e3,
        }
    )
    out["predicted_ms"] = out["kv_bytes"] / nonkv_bandwidth(events, steps) / 1e6
    out["share_percent"] = 100.0 * _ratio(out["attention_ms"], out["token_ms"])
    cached = out["kv_len"] if seq_len is None else out["kv_len"].clip(upper=seq_len)
    out["cache_bytes"] = cached * config.kv_bytes_per_token(kv_dtype) if config else np.nan
    return out[list(TABLE_COLUMNS["kv_cost"])].reset_index(drop=True)
