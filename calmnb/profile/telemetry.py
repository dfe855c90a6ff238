"""Clocks, power, temperature and energy of the GPU beside a recording, by NVML.

A thread of its own asks about twenty times a second, off the timed path. What it sees travels with the session as
``meta["telemetry"]``, and so does the reason where there is nothing to see: a recording never fails for lack of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "TELEMETRY_COLUMNS",
    "THROTTLE_REASONS",
    "Telemetry",
    "telemetry_note",
    "telemetry_table",
    "throttling",
    "throttling_note",
]

#: Columns of `telemetry_table`.
TELEMETRY_COLUMNS = {
    "time_s": "seconds after the first step's start",
    "sm_mhz": "clock of the multiprocessors, MHz",
    "memory_mhz": "clock of the memory, MHz",
    "power_w": "power draw of the board, watts",
    "temperature_c": "temperature of the GPU, degrees Celsius",
    "throttled": "why clocks were held down, as in `THROTTLE_REASONS`, joined by commas; empty if they were not",
}

#: Bits of NVML's reasons that mean the GPU ran slower than asked. Being idle and clocks set by a user do not.
THROTTLE_REASONS: dict[int, str] = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

#: The energy counter moves about ten times a second: over less than this, mean power times duration says more.
_COUNTER_S = 1.0
_ROUNDED = {"time_s": 5, "power_w": 1}


class Telemetry:
    """Samples a GPU while the block runs.

    Parameters
    ----------
    bus_id
        Where the GPU sits (``0000:19:00.0``); None for an engine without a GPU, which is not sampled.
    hz
        Samples a second, > 0; one more is taken at either end.
    clock
        Seconds, the clock of the recording; for tests.

    Attributes
    ----------
    problem : str
        Why there are no samples; empty if there are.
    """

    def __init__(self, bus_id: str | None, *, hz: float = 20.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bus_id, self._hz, self._clock = bus_id, hz, clock
        self._rows: list[tuple[Any, ...]] = []
        self._energy: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._limit_w: float | None = None
        self.problem = "" if bus_id else "this engine runs on no GPU"

    def __enter__(self) -> Telemetry:
        if self.problem:
            return self
        try:
            import pynvml
        except ImportError:
            self.problem = "nvidia-ml-py is not installed; pip install nvidia-ml-py"
            return self
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(self._bus_id)
        except Exception as error:  # NVML's own errors, or no library: a recording does not fail for lack of this
            self.problem = f"NVML does not answer for the GPU at {self._bus_id}: {error}"
            self._shut_down()
            return self
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        self._limit_w = None if limit is None else limit / 1e3
        self._sample()
        self._thread = threading.Thread(target=self._run, name="calmnb-telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._sample()
        self._shut_down()

    def _run(self) -> None:
        while not self._stop.wait(1.0 / self._hz):
            self._sample()

    def _shut_down(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):  # nothing depends on it
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Answer of NVML, or None where this GPU or driver has none."""
        try:
            return getattr(self._nvml, call)(self._handle, *arguments)
        except Exception:  # not supported, or an older library without the call
            return None

    def _sample(self) -> None:
        nvml, now = self._nvml, self._clock()
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        power = self._ask("nvmlDeviceGetPowerUsage")
        self._rows.append(
            (
                now,
                self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
                None if power is None else power / 1e3,
                self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
                0 if reasons is None else int(reasons),
            )
        )
        energy = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        if energy is not None:
            self._energy.append((now, int(energy)))

    def to_meta(self, *, origin: float = 0.0, tokens: int = 0) -> dict[str, Any]:
        """What a session carries: JSON data, or the reason why there is nothing.

        Parameters
        ----------
        origin
            Start of the first step on the recorder's clock; times count from there.
        tokens
            Tokens that the energy went to, prompt included.

        Returns
        -------
        dict
            ``problem`` alone, or ``hz``, ``columns`` (`TELEMETRY_COLUMNS`, one list each, None where NVML has no answer),
            ``seconds``, ``power_limit_w``, ``energy_j`` and ``energy_from`` ("counter" or "mean power"), ``tokens``,
            ``energy_per_token_j``.
        """
        if self.problem:
            return {"problem": self.problem}
        columns: dict[str, list[Any]] = {
            name: [row[i] for row in self._rows] for i, name in enumerate(TELEMETRY_COLUMNS) if name != "throttled"
        }
        columns["time_s"] = [now - origin for now in columns["time_s"]]
        for name, digits in _ROUNDED.items():
            columns[name] = [None if value is None else round(value, digits) for value in columns[name]]
        columns["throttled"] = [", ".join(text for bit, text in THROTTLE_REASONS.items() if row[5] & bit) for row in self._rows]
        seconds = self._rows[-1][0] - self._rows[0][0]
        joules, how = self._joules(seconds)
        return {
            "hz": self._hz,
            "columns": columns,
            "seconds": round(seconds, 5),
            "power_limit_w": self._limit_w,
            "energy_j": joules,
            "energy_from": how,
            "tokens": tokens,
            "energy_per_token_j": joules / tokens if joules is not None and tokens else None,
        }

    def _joules(self, seconds: float) -> tuple[float | None, str]:
        if len(self._energy) > 1 and seconds >= _COUNTER_S:
            return (self._energy[-1][1] - self._energy[0][1]) / 1e3, "counter"
        power = [row[3] for row in self._rows if row[3] is not None]
        return (sum(power) / len(power) * seconds, "mean power") if power else (None, "")


def telemetry_table(meta: Mapping[str, Any]) -> pd.DataFrame:
    """Samples of a session's metadata, one row each.

    Parameters
    ----------
    meta
        `Session.meta`.

    Returns
    -------
    DataFrame
        Columns of `TELEMETRY_COLUMNS`; no rows where nothing was sampled.
    """
    import pandas as pd

    columns = (meta.get("telemetry") or {}).get("columns") or {}
    table = pd.DataFrame({name: columns.get(name, []) for name in TELEMETRY_COLUMNS})
    numbers = {name: float for name in TELEMETRY_COLUMNS if name != "throttled"}
    return table.astype({**numbers, "throttled": object})


def throttling(meta: Mapping[str, Any]) -> dict[str, float]:
    """Why the GPU's clocks were held down while recording, each with its part of the samples in percent.

    Parameters
    ----------
    meta
        `Session.meta`.

    Returns
    -------
    dict
        Reasons of `THROTTLE_REASONS`, the most frequent first; empty where there were none, or nobody looked. A plot of a
        session with any should say so.

    Examples
    --------
    >>> throttling({"telemetry": {"columns": {"throttled": ["", "power cap", "power cap", ""]}}})
    {'power cap': 50.0}
    """
    samples = ((meta.get("telemetry") or {}).get("columns") or {}).get("throttled") or []
    shares = (
        {text: 100.0 * sum(text in each.split(", ") for each in samples) / len(samples) for text in THROTTLE_REASONS.values()}
        if samples
        else {}
    )
    return {text: share for text, share in sorted(shares.items(), key=lambda item: -item[1]) if share > 0}


def throttling_note(meta: Mapping[str, Any]) -> str:
    """Say what `throttling` found: ``"power cap in 50% of samples"``; empty where nothing held the clocks down."""
    held = throttling(meta)
    return ", ".join(f"{reason} in {share:.0f}%" for reason, share in held.items()) + " of samples" if held else ""


def telemetry_note(meta: Mapping[str, Any]) -> str:
    """One line on energy, clocks and throttling, for reports and captions; empty where nothing is known."""
    known = meta.get("telemetry") or {}
    if not known or known.get("problem"):
        return ""
    parts = []
    if known.get("energy_per_token_j"):
        parts.append(f"{known['energy_per_token_j']:.3g} J a token ({known['energy_from']})")
    for name, unit in (("power_w", "W"), ("sm_mhz", "MHz"), ("temperature_c", "C")):
        values = [value for value in known["columns"].get(name, ()) if value is not None]
        if values:
            parts.append(f"up to {max(values):.0f} {unit}")
    if held := throttling_note(meta):
        parts.append(f"THROTTLED: {held}")
    return ", ".join(parts)
