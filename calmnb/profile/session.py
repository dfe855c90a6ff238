"""`Session`: what a recording becomes. Plain rows and metadata; it saves and loads, and needs no GPU to be looked at.

Every table, figure and widget right of it reads nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from calmnb.config import ModelConfig
from calmnb.engine.base import Phase
from calmnb.errors import ConfigError
from calmnb.profile import tables
from calmnb.profile.describe import config_from_dict
from calmnb.profile.events import CATEGORIES, EVENT_COLUMNS, STEP_COLUMNS, Columns, build_columns
from calmnb.profile.recorder import StepRecord

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Peak", "PeakChoice", "Session"]

PeakChoice = Literal["user", "measured", "datasheet"] | float | None


@dataclass(frozen=True)
class Peak:
    """A memory bandwidth to hold results against.

    Attributes
    ----------
    gb_per_s : float
        1e9 bytes a second.
    kind : {"user", "measured", "datasheet"}
        Where the number comes from.
    """

    gb_per_s: float
    kind: str

    def __str__(self) -> str:
        return f"{self.gb_per_s:.4g} GB/s ({self.kind})"


class Session:
    """A recording: one row an event, one row a step, and where it all came from.

    Parameters
    ----------
    events : DataFrame
        Columns of `calmnb.profile.events.EVENT_COLUMNS`.
    steps : DataFrame
        Columns of `calmnb.profile.events.STEP_COLUMNS`.
    meta : mapping
        JSON data; anything else is refused.

    Attributes
    ----------
    meta : dict
        ``model, path, engine, device, threads, time_source, dtype, kv_dtype, seq_len, has_bias, n_params, model_bytes``
        name what ran; ``config`` holds the fields of `ModelConfig`; ``peaks`` maps "user", "measured" and "datasheet" to
        ``{"gb_per_s": float, "source": str, ...}``; ``gpu`` and ``launches`` say what each kernel takes of a multiprocessor
        (`calmnb.profile.launches`); ``settings`` says how it was recorded; ``date`` (ISO 8601, UTC),
        ``versions`` and ``git_revision`` say when and with what; ``time_note`` what one must know of how times were taken;
        ``telemetry`` holds the GPU's clocks and power meanwhile (`calmnb.profile.telemetry`).

    Examples
    --------
    >>> session = calmnb.profile(model, "Why is the sky blue?", tokens=64)  # doctest: +SKIP
    >>> session.stages()  # doctest: +SKIP
    """

    def __init__(self, events: pd.DataFrame, steps: pd.DataFrame, meta: Mapping[str, Any]) -> None:
        for name, frame, wanted in (("events", events, EVENT_COLUMNS), ("steps", steps, STEP_COLUMNS)):
            missing = [column for column in wanted if column not in frame.columns]
            if missing:
                raise ConfigError(f"Session: {name} lacks {', '.join(missing)}; it needs the columns {', '.join(wanted)}")
        self.events = events
        self.steps = steps
        try:
            self.meta: dict[str, Any] = json.loads(json.dumps(dict(meta), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Session: metadata must be JSON data: {error}") from error

    @classmethod
    def from_steps(
        cls, records: Sequence[StepRecord], meta: Mapping[str, Any], *, token_text: Callable[[int], str] | None = None
    ) -> Self:
        """Make a session of what a `SessionRecorder` kept; `token_text` gives the text of a token id."""
        events, steps, labels = build_columns(
            records,
            config=config_from_dict(meta["config"]) if meta.get("config") else None,
            kv_dtype=meta.get("kv_dtype", "fp16"),
            has_bias=bool(meta.get("has_bias", False)),
            source=meta.get("time_source", "cpu"),
            warmup=int(meta.get("settings", {}).get("warmup", 1)),
            token_text=token_text,
        )
        return cls(_frame(events, labels), _frame(steps, CATEGORIES), meta)

    @cached_property
    def config(self) -> ModelConfig | None:
        """The model's sizes, if the metadata has them."""
        fields = self.meta.get("config")
        return config_from_dict(fields) if fields else None

    def peak(self, which: PeakChoice = None) -> Peak | None:
        """Memory bandwidth to compare with.

        Parameters
        ----------
        which
            "user", "measured", "datasheet", your own number in GB/s, or None for the first of these three that the session has.

        Returns
        -------
        Peak or None
            None if the session has no such peak.

        Raises
        ------
        ConfigError
            For another name, or a number that is not positive.
        """
        if isinstance(which, int | float):
            if not which > 0:
                raise ConfigError(f"peak is {which} GB/s; it must be positive")
            return Peak(float(which), "user")
        if which not in (None, "user", "measured", "datasheet"):
            raise ConfigError(f"peak is {which!r}; accepted are 'user', 'measured', 'datasheet' or a number of GB/s")
        known = self.meta.get("peaks", {})
        for kind in ("user", "measured", "datasheet") if which is None else (which,):
            if known.get(kind):
                return Peak(float(known[kind]["gb_per_s"]), kind)
        return None

    def _gb_per_s(self, which: PeakChoice) -> float | None:
        peak = self.peak(which)
        return peak.gb_per_s if peak else None

    def stages(self, phase: Phase = "decode", *, peak: PeakChoice = None) -> pd.DataFrame:
        """One row a stage: median time in a step, spread, share, bytes, GB/s.

        Parameters
        ----------
        phase : {"decode", "prefill"}
            Which steps; never mixed. Warm-up steps are left out, unless there is nothing else.
        peak
            What ``percent_of_peak`` refers to; as for `peak`.

        Returns
        -------
        DataFrame
            Columns of ``TABLE_COLUMNS["stages"]`` (`calmnb.profile.tables`), stages in execution order.

        Raises
        ------
        ConfigError
            For a peak that is not accepted.
        """
        return tables.stages(self.events, self.steps, phase=phase, peak=self._gb_per_s(peak))

    def layers(self, phase: Phase = "decode", *, peak: PeakChoice = None) -> pd.DataFrame:
        """One row a layer and stage; columns of ``TABLE_COLUMNS["layers"]``. Parameters and errors as for `stages`."""
        return tables.layers(self.events, self.steps, phase=phase, peak=self._gb_per_s(peak))

    def kernels(self, phase: Phase = "decode", *, peak: PeakChoice = None) -> pd.DataFrame:
        """One row a kernel and stage, the most expensive first; see ``TABLE_COLUMNS["kernels"]``."""
        return tables.kernels(self.events, self.steps, phase=phase, peak=self._gb_per_s(peak), meta=self.meta)

    def tokens(self, *, peak: PeakChoice = None) -> pd.DataFrame:
        """One row a decoded token, warm-up included and marked; columns of ``TABLE_COLUMNS["tokens"]``."""
        return tables.tokens(self.steps, peak=self._gb_per_s(peak))

    def kv_cost(self, *, bins: int | Literal["steps"] = 32) -> pd.DataFrame:
        """What the KV cache costs against context.

        Parameters
        ----------
        bins : int or "steps"
            At most so many bins of equal numbers of steps along the context; "steps" keeps every step.

        Returns
        -------
        DataFrame
            Columns of ``TABLE_COLUMNS["kv_cost"]``, ascending in ``kv_len``.
        """
        return tables.kv_cost(
            self.events,
            self.steps,
            config=self.config,
            kv_dtype=self.meta.get("kv_dtype", "fp16"),
            seq_len=self.meta.get("seq_len"),
            bins=bins,
        )

    def pivot(
        self,
        index: str | Sequence[str],
        columns: str | Sequence[str] = (),
        values: str = "time_us",
        *,
        phase: Phase | None = "decode",
        statistic: str = "median",
    ) -> pd.DataFrame:
        """Any view of the event table: `values` by `index` down and `columns` across.

        Parameters
        ----------
        index, columns
            One or several of ``run, step, phase, pos, kv_len, n_tokens, layer, stage, kernel, source``, or of the labels
            that an outside tool added to the events (``nvtx``).
        values
            A key of `calmnb.profile.pivot.PIVOT_VALUES`: ``time_us, duration_us, share_percent, calls, bytes_min,
            bytes_counted, flops, gb_per_s, gflop_per_s, flop_per_byte``; or an amount that an outside tool added.
        phase : {"decode", "prefill"} or None
            Which steps; None takes both. Warm-up steps are left out, as in every table.
        statistic : {"median", "mean", "std", "min", "max", "sum", "p20", "p80"}
            How the steps that have a cell become one number; rows of one step in the same cell are added up first.

        Returns
        -------
        DataFrame
            `index` as its index; one column named `values`, or one for each value of `columns`; nan where no row falls.

        Raises
        ------
        ConfigError
            For a name that is not accepted; the message lists those that are.

        Examples
        --------
        >>> session.pivot("layer", "stage", "gb_per_s")  # doctest: +SKIP
        >>> session.pivot("kv_len", "kernel", "time_us", statistic="p80")  # doctest: +SKIP
        """
        from calmnb.profile.pivot import pivot

        return pivot(self.events, self.steps, index=index, columns=columns, values=values, phase=phase, statistic=statistic)

    def select(self, *, kv_len: int | tuple[int, int] | None = None, runs: Sequence[int] | None = None) -> Session:
        """Some steps as a session of their own.

        Parameters
        ----------
        kv_len
            First and last context, both included; a single number means it and 64 positions more, which is what a short
            run that begins there covers.
        runs
            Numbers of the runs to keep.

        Returns
        -------
        Session
            Times stay as they are; steps are numbered from 0 again.

        Raises
        ------
        ConfigError
            If no step is left; the message says what there is.

        Examples
        --------
        >>> session.select(kv_len=4000).stages()  # doctest: +SKIP
        """
        steps = self.steps
        if kv_len is not None:
            first, last = (kv_len, kv_len + 64) if isinstance(kv_len, int) else kv_len
            steps = steps[steps["kv_len"].between(first, last)]
        if runs is not None:
            steps = steps[steps["run"].isin(list(runs))]
        if not len(steps):
            there = ", ".join(f"{n:,}" for n in sorted(self.steps.groupby("run")["kv_len"].min().unique())[:12])
            raise ConfigError(f"select: no step has kv_len {kv_len}, runs {runs}; runs begin at the contexts {there or 'none'}")
        events = self.events[self.events["step"].isin(steps["step"])]
        numbers = np.searchsorted(steps["step"].to_numpy(), events["step"].to_numpy())
        kept = events.assign(step=numbers).reset_index(drop=True)
        return Session(kept, steps.assign(step=np.arange(len(steps))).reset_index(drop=True), self.meta)

    def telemetry(self) -> pd.DataFrame:
        """Clocks, power and temperature while recording, one row a sample; see `calmnb.profile.telemetry.TELEMETRY_COLUMNS`.

        Without rows where nothing was sampled; ``meta["telemetry"]["problem"]`` then says why.
        """
        from calmnb.profile.telemetry import telemetry_table

        return telemetry_table(self.meta)

    def throttling(self) -> dict[str, float]:
        """Why the GPU's clocks were held down while recording, in percent of the samples; empty if they were not."""
        from calmnb.profile.telemetry import throttling

        return throttling(self.meta)

    def nonkv_gb_per_s(self) -> float:
        """GB/s of the stages that read weights; what `kv_cost` predicts with."""
        return tables.nonkv_bandwidth(self.events, self.steps)

    def summary(self) -> str:
        """One line to paste in an issue: model, dtype, device, tok/s, ms, GB/s, % of peak, context, versions."""
        from calmnb.profile.report import summary_line

        return summary_line(self)

    def save(self, path: str | Path) -> Path:
        """Write one ``.npz`` file (arrays and JSON, no pickle) under a temporary name and rename it. Returns its path."""
        from calmnb.profile.store import save_session

        return save_session(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        FormatError
            If the file is missing, damaged, or not a session.
        """
        from calmnb.profile.store import load_session

        return load_session(cls, Path(path))

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write the events as Chrome trace JSON, which https://ui.perfetto.dev opens. Returns the path."""
        from calmnb.profile.trace import write_chrome_trace

        return write_chrome_trace(self, Path(path))

    def to_csv(self, path: str | Path, table: str = "events") -> Path:
        """Write `table` ("events", "steps", "stages", "layers", "kernels", "tokens" or "kv_cost") as CSV."""
        from calmnb.profile.trace import write_csv

        return write_csv(self, Path(path), table)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Session):
            return NotImplemented
        return self.meta == other.meta and self.events.equals(other.events) and self.steps.equals(other.steps)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        from calmnb.profile.report import text_report

        return text_report(self)

    def _repr_html_(self) -> str:
        from calmnb.profile.report import html_report

        return html_report(self)


def _frame(columns: Columns, labels: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            name: pd.Categorical.from_codes(values.tolist(), categories=pd.Index(labels[name])) if name in labels else values
            for name, values in columns.items()
        }
    )
