"""The numbers of the live panels, kept up to date step by step.

A browser should compute nothing that a test could not check, so every figure drawn beside the chat comes from here:
small float32 arrays for the charts and a few plain numbers for the headline. Statistics cover the latest answer only;
its first decode step, which also warms caches, counts as a point but not in the means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.config import ModelConfig
from calmnb.engine.base import STAGES, Kernel, Stage
from calmnb.engine.stages import kv_bytes, stage_cost, step_cost
from calmnb.profile.events import exclusive_times
from calmnb.profile.recorder import StepRecord

__all__ = ["LAYER_STAGES", "POINT_FIELDS", "LivePanels", "thin"]

#: Stages of a layer, the columns of the layer matrix.
LAYER_STAGES: tuple[Stage, ...] = ("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down")

#: Columns of a point: one a decoded token. Position of the step, its step time, GB/s of its `bytes_min`, time in
#: attention, positions attended to, and seconds of decoding since the conversation began.
POINT_FIELDS = ("pos", "ms", "gb_per_s", "attention_ms", "kv_len", "at_s")

_STAGE_INDEX = {stage: i for i, stage in enumerate(STAGES)}
_N_STAGES = len(STAGES)
_LAYER_COLUMNS = np.array([STAGES.index(stage) for stage in LAYER_STAGES])


def thin(points: NDArray[np.float32], limit: int) -> NDArray[np.float32]:
    """Keep at most `limit` rows, evenly spaced, first and last included."""
    if len(points) <= limit:
        return points
    kept = np.linspace(0, len(points) - 1, limit).round().astype(np.int64)
    return points[kept]


class _Layout:
    """Where each row of one tuple of kernels goes: its (layer, stage) cell, and its row of the kernel table."""

    def __init__(self, kernels: Sequence[Kernel], table: dict[tuple[str, str], int], n_layers: int) -> None:
        self.kernels = kernels  # kept alive: layouts are found by identity
        layer = np.array([min(k.layer, n_layers - 1) for k in kernels], np.int64)
        stage = np.array([_STAGE_INDEX[k.stage] for k in kernels], np.int64)
        self.cell = (layer + 1) * _N_STAGES + stage
        self.kernel = np.array([table.setdefault((k.name, k.stage), len(table)) for k in kernels], np.int64)
        self.is_attention = stage == _STAGE_INDEX["attention"]
        self.stage = stage
        seen: set[tuple[str, int]] = set()
        # Bytes are declared for a stage. Where several kernels share one, the first carries them, as in `Session`.
        self.carries = np.array([not ((k.stage, k.layer) in seen or seen.add((k.stage, k.layer))) for k in kernels], np.float64)  # type: ignore[func-returns-value]


class LivePanels:
    """Running figures of one chat: feed it steps, read arrays and numbers.

    Parameters
    ----------
    config
        The model.
    kv_dtype
        KV cache storage.
    seq_len
        Positions the cache holds.
    peak_gb_per_s : float or None
        Memory peak that percentages and predictions use; may be set later.
    """

    def __init__(self, config: ModelConfig, *, kv_dtype: str, seq_len: int, peak_gb_per_s: float | None = None) -> None:
        self.config, self.kv_dtype, self.seq_len = config, kv_dtype, seq_len
        self.peak_gb_per_s = peak_gb_per_s
        self.kv_len = 0
        self._decoded_s = 0.0
        self._points: list[NDArray[np.float32]] = []
        self._token_cost: dict[int, tuple[float, float]] = {}
        self._times: list[float] = []
        self._previous: tuple[dict[str, Any], NDArray[np.float32]] | None = None
        self.reset()

    def reset(self) -> None:
        """Begin the figures of another answer; the last one's stay in sight until the new one has its own."""
        if self._times:
            self._previous = self.own_figures(), self._own_layers()
        self._table: dict[tuple[str, str], int] = {}
        self._layouts: dict[int, _Layout] = {}
        self._cells = np.zeros((self.config.n_layers + 1) * _N_STAGES)
        self._calls = np.zeros(0)
        self._kernel_s = np.zeros(0)
        self._kernel_bytes = np.zeros(0)
        self._stage_bytes = np.zeros(_N_STAGES)
        self._times = []
        self._bytes = 0.0
        self._warm: StepRecord | None = None
        self._start = self._end = math.nan
        self._prompt_tokens, self._prompt_s, self._first_token_s = 0, 0.0, math.nan

    def clear(self) -> None:
        """Forget everything: a new conversation."""
        self.reset()
        self._previous = None
        self.kv_len = 0
        self._decoded_s = 0.0
        self._points.clear()
        self._token_cost.clear()

    def update(self, steps: Iterable[StepRecord]) -> NDArray[np.float32]:
        """Add the steps recorded since the last call.

        Returns
        -------
        float32 array, shape (n, len(POINT_FIELDS))
            The decoded tokens among them, as points of the charts.
        """
        new = [point for step in steps if step.n_tokens and (point := self._add(step)) is not None]
        points = np.array(new, np.float32).reshape(-1, len(POINT_FIELDS))
        if new:
            self._points.append(points)
        return points

    def _add(self, step: StepRecord) -> tuple[float, ...] | None:
        seconds = step.step_end - step.step_start
        sampling = 0.0 if math.isnan(step.sample_end) else max(step.sample_end - max(step.sample_start, step.step_end), 0.0)
        bytes_min = float(step_cost(self.config, step.kv_len, kv_dtype=self.kv_dtype, n_tokens=step.n_tokens).bytes_min)
        rate = bytes_min / max(seconds + sampling, 1e-9) / 1e9
        self.kv_len = step.kv_len
        self._token_cost[step.pos + step.n_tokens] = ((seconds + sampling) * 1e3, rate)
        if step.phase == "prefill":
            self._prompt_tokens += step.n_tokens
            self._prompt_s += seconds
            self._first_token_s = self._prompt_s + sampling
            return None
        self._decoded_s += seconds + sampling
        layout = self._layout(step)
        own = exclusive_times(step.starts, step.ends, step.step_start, step.step_end)
        attention_ms = float(own[layout.is_attention].sum()) * 1e3
        point = (
            step.pos, (seconds + sampling) * 1e3, rate, attention_ms, step.kv_len, self._decoded_s,
        )  # fmt: skip
        if self._warm is None:  # the first decode step pays for cold caches
            self._warm = step
            return point
        self._cells += np.bincount(layout.cell, own, len(self._cells))
        self._cells[_STAGE_INDEX["sample"]] += sampling
        self._cells[_STAGE_INDEX["gap"]] += max(seconds - float(own.sum()), 0.0)
        self._grow(len(self._table))
        self._calls += np.bincount(layout.kernel, minlength=len(self._table))
        self._kernel_s += np.bincount(layout.kernel, own, len(self._table))
        cost = np.array([stage_cost(self.config, stage, step.kv_len, kv_dtype=self.kv_dtype).bytes_min for stage in STAGES])
        row_bytes = cost[layout.stage] * layout.carries
        self._stage_bytes += np.bincount(layout.stage, row_bytes, _N_STAGES)
        self._kernel_bytes += np.bincount(layout.kernel, row_bytes, len(self._table))
        if math.isnan(self._start):
            self._start = step.step_start
        self._end = step.step_end + sampling
        self._times.append(seconds + sampling)
        self._bytes += bytes_min
        return point

    def _layout(self, step: StepRecord) -> _Layout:
        layout = self._layouts.get(id(step.kernels))
        if layout is None:
            layout = self._layouts[id(step.kernels)] = _Layout(step.kernels, self._table, self.config.n_layers)
        return layout

    def _grow(self, n: int) -> None:
        if n > len(self._calls):
            zeros = np.zeros(n - len(self._calls))
            self._calls, self._kernel_s, self._kernel_bytes = (
                np.concatenate((kept, zeros)) for kept in (self._calls, self._kernel_s, self._kernel_bytes)
            )

    @property
    def n_steps(self) -> int:
        """Decode steps in the means."""
        return len(self._times)

    def points(self, limit: int = 4096) -> NDArray[np.float32]:
        """Every point of the conversation, thinned to `limit`; shape (n, len(POINT_FIELDS))."""
        if not self._points:
            return np.zeros((0, len(POINT_FIELDS)), np.float32)
        return thin(np.concatenate(self._points), limit)

    def token_cost(self, pos: int) -> tuple[float, float]:
        """Milliseconds and GB/s of the step that chose the token at `pos`; nan where no step was recorded."""
        return self._token_cost.get(pos, (math.nan, math.nan))

    def layers(self) -> NDArray[np.float32]:
        """Mean microseconds of a decode step in each layer and stage; shape (n_layers, len(LAYER_STAGES))."""
        return self._previous[1] if self._previous and not self._times else self._own_layers()

    def _own_layers(self) -> NDArray[np.float32]:
        table = self._cells.reshape(-1, _N_STAGES)[1:][:, _LAYER_COLUMNS]
        scaled: NDArray[np.float32] = (table / max(self.n_steps, 1) * 1e6).astype(np.float32)
        return scaled

    def stages(self) -> list[dict[str, Any]]:
        """Mean of a decode step by stage, in execution order, empty stages left out.

        Returns
        -------
        list of dict
            ``stage``, ``us`` (microseconds a token), ``share`` (of the step, 0..1), ``bytes`` (`bytes_min` a token),
            ``gb_per_s`` and ``of_peak`` (0..1), both None where no bytes move or the peak is unknown.
        """
        n = max(self.n_steps, 1)
        seconds = self._cells.reshape(-1, _N_STAGES).sum(axis=0) / n
        total = float(seconds.sum())
        rows = []
        for index, stage in enumerate(STAGES):
            if seconds[index] <= 0:
                continue
            rate = self._rate(self._stage_bytes[index] / n, seconds[index])
            rows.append(
                {
                    "stage": stage,
                    "us": float(seconds[index]) * 1e6,
                    "share": float(seconds[index]) / total,
                    "bytes": int(self._stage_bytes[index] / n),
                    "gb_per_s": rate,
                    "of_peak": self._of_peak(rate),
                }
            )
        return rows

    def kernels(self) -> list[dict[str, Any]]:
        """Mean of a decode step by kernel and stage, slowest first.

        Returns
        -------
        list of dict
            ``name``, ``stage``, ``calls`` (a token), ``us`` (microseconds a token), ``share`` (of all rows, 0..1),
            ``gb_per_s`` and ``of_peak``. Where kernels share a stage, the first carries its bytes.
        """
        n = max(self.n_steps, 1)
        keys = list(self._table)[: len(self._calls)]
        total = float(self._cells.sum()) or 1.0
        figures = (array.tolist() for array in (self._calls, self._kernel_s, self._kernel_bytes))
        rows = [
            {"name": name, "stage": stage, "calls": calls / n, "us": seconds / n * 1e6, "share": seconds / total}
            | self._rates(n_bytes, seconds)
            for (name, stage), calls, seconds, n_bytes in zip(keys, *figures, strict=True)
        ]
        rows += [
            {"name": stage, "stage": stage, "calls": 1.0, "us": us / n * 1e6, "share": us / total} | self._rates(0.0, us)
            for stage in ("sample", "gap")
            if (us := float(self._cells[_STAGE_INDEX[stage]])) > 0
        ]
        return sorted(rows, key=lambda row: -float(row["us"]))

    def _rate(self, n_bytes: float, seconds: float) -> float | None:
        return float(n_bytes / seconds / 1e9) if n_bytes > 0 and seconds > 0 else None

    def _of_peak(self, rate: float | None) -> float | None:
        return float(rate / self.peak_gb_per_s) if rate is not None and self.peak_gb_per_s else None

    def _rates(self, n_bytes: float, seconds: float) -> dict[str, float | None]:
        rate = self._rate(n_bytes, seconds)
        return {"gb_per_s": rate, "of_peak": self._of_peak(rate)}

    def summary(self) -> dict[str, Any]:
        """The headline of the latest answer that has figures, as JSON data; None where nothing is known yet.

        Returns
        -------
        dict
            ``tokens`` (decode steps in the means), ``tok_per_s`` and ``gb_per_s`` (over wall time between the first and
            the last of them), ``of_peak``, ``ms`` and ``ms_sd`` (a token), ``first_token_s``, ``prompt_tokens``,
            ``prompt_tok_per_s``, ``stages``, ``kernels``; and of the conversation: ``peak_gb_per_s``, ``kv_len``,
            ``kv_bytes`` (cached now), ``kv_full_bytes``, ``kv_full_ms`` (reading the full cache at the peak),
            ``kv_trend`` (see `kv_trend`), ``kv_trend_ms`` (attention at the full context, extrapolated).
        """
        per_token = self.config.kv_bytes_per_token(self.kv_dtype)
        trend = self.kv_trend()
        means = self._previous[0] if self._previous and not self._times else self.own_figures()
        return means | {
            "peak_gb_per_s": self.peak_gb_per_s,
            "kv_len": self.kv_len,
            "kv_bytes": per_token * min(self.kv_len, self.seq_len),
            "kv_full_bytes": per_token * self.seq_len,
            "kv_full_ms": self.kv_line()[-1, 1].item() if self.peak_gb_per_s else None,
            "kv_trend_ms": trend[1] * self.seq_len + trend[0] if trend else None,
            "kv_trend": list(trend) if trend else None,
        }

    def own_figures(self) -> dict[str, Any]:
        """The part of `summary` that is of one answer, for the answer in progress whether or not it has any."""
        n, wall = self.n_steps, self._end - self._start
        rate = self._bytes / wall / 1e9 if n and wall > 0 else None
        times = np.array(self._times) * 1e3
        return {
            "tokens": n,
            "tok_per_s": n / wall if n and wall > 0 else None,
            "gb_per_s": rate,
            "of_peak": self._of_peak(rate),
            "ms": float(times.mean()) if n else None,
            "ms_sd": float(times.std()) if n > 1 else None,
            "first_token_s": None if math.isnan(self._first_token_s) else self._first_token_s,
            "prompt_tokens": self._prompt_tokens,
            "prompt_tok_per_s": self._prompt_tokens / self._prompt_s if self._prompt_s > 0 else None,
            "stages": self.stages(),
            "kernels": self.kernels(),
        }

    def floor_line(self) -> NDArray[np.float32]:
        """Shortest possible milliseconds a token over positions: all bytes at the peak; shape (n, 2), empty without one."""
        return self._line(lambda kv_len: step_cost(self.config, kv_len, kv_dtype=self.kv_dtype).bytes_min)

    def kv_line(self) -> NDArray[np.float32]:
        """Milliseconds to read the KV cache at the peak, over the context; shape (n, 2), empty without a peak."""
        return self._line(lambda kv_len: kv_bytes(self.config, kv_len, kv_dtype=self.kv_dtype))

    def _line(self, n_bytes: Any) -> NDArray[np.float32]:
        if not self.peak_gb_per_s:
            return np.zeros((0, 2), np.float32)
        bends = {0, self.seq_len, min(self.config.sliding_window or self.seq_len, self.seq_len)}
        return np.array([(x, n_bytes(x) / self.peak_gb_per_s / 1e6) for x in sorted(bends)], np.float32)

    def kv_trend(self) -> tuple[float, float] | None:
        """Straight line through the measured attention times: (ms at 0, ms a position); None while it would be noise.

        A least-squares line through the medians of eight equal bands of context, so that one stutter does not tilt it.
        None below 64 positions of spread, with a sliding window, or when the slope is not positive.
        """
        points = self.points(2048)
        x, y = points[:, 4].astype(np.float64), points[:, 3].astype(np.float64)
        if len(x) < 32 or np.ptp(x) < 64 or self.config.sliding_window:
            return None
        band = np.minimum(((x - x.min()) / np.ptp(x) * 8).astype(int), 7)
        centres = [(x[band == b].mean(), np.median(y[band == b])) for b in range(8) if (band == b).any()]
        if len(centres) < 3:
            return None
        across, up = np.array(centres).T
        slope, at_zero = np.polyfit(across, up, 1)
        return (float(at_zero), float(slope)) if slope > 0 else None
