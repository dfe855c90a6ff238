"""What `ProfileView` shows of a session, as columns: every step in brief, and the rows of a window of steps in full.

A browser should compute nothing that a test could not check, so a step's sums come from here; the browser only adds up
the rows that somebody selects.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calmnb.engine.base import STAGES
from calmnb.profile.device import find_device
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
from calmnb.profile.report import decode_summary, device_label
from calmnb.profile.session import PeakChoice, Session
from calmnb.profile.tables import selected_steps

__all__ = ["EVENT_FIELDS", "STEP_FIELDS", "ProfileData", "describe_session", "stage_looks"]

#: Columns of a step that the browser gets; times in microseconds unless named otherwise.
STEP_FIELDS: dict[str, str] = {
    "pos": "position of the step's first token",
    "kv_len": "positions its last token attends to",
    "n_tokens": "tokens computed together",
    "token": "id chosen after it, -1 unknown",
    "decode": "1 for a decode step, 0 for a prompt",
    "warmup": "1 where statistics leave it out",
    "start_s": "start after the session's first step, seconds",
    "step_us": "forward pass and choice of the token",
    "forward_us": "the forward pass alone",
    "rows_us": "sum of the rows' exclusive times",
    "wall_us": "sum of the rows' times from start to end; beyond rows_us by what overlaps",
    "gap_us": "what no row covers: step_us - rows_us",
    "bytes_min": "bytes that must move",
    "row": "first of its rows in the window; equal to the next step's outside the window",
}

#: Columns of a row (a kernel of a step) that the browser gets.
EVENT_FIELDS: dict[str, str] = {
    "start": "start after its step's start, microseconds",
    "wall": "end minus start, microseconds",
    "own": "exclusive time, microseconds",
    "layer": "layer, -1 outside",
    "stage": "index into STAGES",
    "kernel": "index into the kernels' names",
    "cost": "index into cost_min, cost_counted, cost_flops",
}


def stage_looks() -> list[dict[str, str]]:
    """Name, label and colour of every stage, in execution order."""
    return [{"name": name, "label": STAGE_LABELS[name], "color": STAGE_COLORS[name]} for name in STAGES]


@dataclasses.dataclass(frozen=True, eq=False)
class ProfileData:
    """A session, put in order for the browser once.

    Attributes
    ----------
    session : Session
    events : DataFrame
        `Session.events`, rows of a step together and in the order of their start; the index is theirs.
    first_row : int64 (n_steps + 1,)
        Where each step's rows begin.
    """

    session: Session
    events: pd.DataFrame
    first_row: NDArray[np.int64]

    @classmethod
    def of(cls, session: Session) -> ProfileData:
        """Order the rows of `session`."""
        events = session.events
        step = events["step"].to_numpy(np.int64)
        order = np.lexsort((events["start_s"].to_numpy(), events["stage"].astype(object).to_numpy() == "gap", step))
        events = events.iloc[order]
        counts = np.bincount(step, minlength=len(session.steps))
        return cls(session, events, np.concatenate(([0], np.cumsum(counts))))

    @property
    def n_steps(self) -> int:
        """Steps of the session."""
        return len(self.session.steps)

    def typical_step(self) -> int:
        """The settled decode step whose time is nearest to the median; the last step where nothing was decoded."""
        steps = self.session.steps.reset_index(drop=True)
        chosen = selected_steps(steps, "decode")
        if not len(chosen):
            return max(len(steps) - 1, 0)
        seconds = chosen["duration_s"].to_numpy(float)
        return int(chosen.index.to_numpy()[np.abs(seconds - np.median(seconds)).argmin()])

    def window(self, step: int, limit: int) -> tuple[int, int]:
        """Steps around `step` whose rows stay below `limit`: (first, last + 1), `step` always among them."""
        n = self.n_steps
        if not n:
            return 0, 0
        first = min(max(step, 0), n - 1)
        last = first + 1
        grown = True
        while grown:
            grown = False
            for a, b in ((0, 1), (-1, 0)):  # after it, before it, in turns
                low, high = max(first + a, 0), min(last + b, n)
                if (low, high) != (first, last) and self.first_row[high] - self.first_row[low] <= limit:
                    first, last, grown = low, high, True
        return first, last

    def steps(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        """Columns of `STEP_FIELDS` of all steps; rows are counted in the window of steps ``first`` to ``last - 1``."""
        steps, events = self.session.steps, self.events
        is_row = (events["stage"] != "gap").to_numpy()
        index = events["step"].to_numpy(np.int64)

        def sums(column: str, keep: NDArray[np.bool_]) -> NDArray[np.float32]:
            weights = events[column].to_numpy(float) * keep
            return (np.bincount(index, weights, self.n_steps) * 1e6).astype(np.float32)

        inside = np.clip(self.first_row, self.first_row[first], self.first_row[last]) - self.first_row[first]
        numbers = {name: steps[name].to_numpy(np.int32) for name in ("pos", "kv_len", "n_tokens", "token")}
        return {
            **numbers,
            "decode": ((steps["phase"] == "decode") & (steps["n_tokens"] > 0)).to_numpy(np.uint8),
            "warmup": steps["warmup"].to_numpy(np.uint8),
            "start_s": steps["start_s"].to_numpy(np.float64),
            "step_us": (steps["duration_s"].to_numpy(float) * 1e6).astype(np.float32),
            "forward_us": (steps["forward_s"].to_numpy(float) * 1e6).astype(np.float32),
            "rows_us": sums("exclusive_s", is_row),
            "wall_us": sums("duration_s", is_row),
            "gap_us": sums("exclusive_s", ~is_row),
            "bytes_min": steps["bytes_min"].to_numpy(np.float64),
            "row": inside.astype(np.uint32),
        }

    def rows(self, first: int, last: int) -> tuple[dict[str, NDArray[Any]], list[str]]:
        """Columns of `EVENT_FIELDS` of the window's rows with the three ``cost_`` columns, and the kernels' names."""
        events = self.events.iloc[self.first_row[first] : self.first_row[last]]
        began = self.session.steps["start_s"].to_numpy(float)[events["step"].to_numpy(np.int64)]
        kernel, names = pd.factorize(events["kernel"].astype(object))
        costs = events[["bytes_min", "bytes_counted", "flops"]].to_numpy(np.float64)
        unique, cost = np.unique(costs, axis=0, return_inverse=True)
        codes = {stage: code for code, stage in enumerate(STAGES)}
        stage = np.array([codes[name] for name in events["stage"]], np.uint8)
        columns = {
            "start": _micro(events["start_s"].to_numpy(float) - began),
            "wall": _micro(events["duration_s"].to_numpy(float)),
            "own": _micro(events["exclusive_s"].to_numpy(float)),
            "layer": events["layer"].to_numpy(np.int16),
            "stage": stage,
            "kernel": kernel.astype(np.uint16),
            "cost": cost.reshape(-1).astype(np.uint32),
        }
        for i, name in enumerate(("cost_min", "cost_counted", "cost_flops")):
            columns[name] = np.ascontiguousarray(unique[:, i])
        return columns, [str(name) for name in names]

    def texts(self) -> list[str]:
        """The token chosen after each step, as text; empty where unknown."""
        return [str(text) for text in self.session.steps["text"]]


def _micro(seconds: NDArray[np.float64]) -> NDArray[np.float32]:
    return (seconds * 1e6).astype(np.float32)


def describe_session(session: Session, peak: PeakChoice) -> dict[str, Any]:
    """What is fixed about a session, as JSON data: names, peaks, roofs, the headline's medians (None where unknown)."""
    meta, chosen = session.meta, session.peak(peak)
    kinds: tuple[Any, ...] = ("user", "measured", "datasheet")
    peaks = [found for kind in kinds if (found := session.peak(kind))] if peak is None else [chosen] if chosen else []
    device = find_device(str(meta.get("device", "")))
    known = () if device is None else (("fp32", device.fp32_tflops), ("fp16 tensor cores", device.tensor_tflops))
    return {
        "model": str(meta.get("model", "unknown model")),
        "dtype": meta.get("dtype"),
        "kv_dtype": meta.get("kv_dtype"),
        "device": device_label(meta),
        "engine": meta.get("engine"),
        "source": str(meta.get("time_source", "unknown")),
        "date": str(meta.get("date", ""))[:10],
        "peaks": [[line.kind, line.gb_per_s] for line in peaks],
        "peak": None if chosen is None else [chosen.kind, chosen.gb_per_s],
        "roofs": [[name, tflops] for name, tflops in known if tflops],
        "summary": {key: None if math.isnan(value) else value for key, value in decode_summary(session).items()},
        "stages": stage_looks(),
    }
