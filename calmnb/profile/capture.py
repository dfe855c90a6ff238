"""Running a model while recording it: `profile`, and what recording itself costs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calmnb.engine.base import TimeSource
from calmnb.errors import ConfigError
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session
from calmnb.profile.telemetry import Telemetry

__all__ = ["GPU_SOURCES", "RecordingOverhead", "measure_recording_overhead", "profile", "timed_by"]


#: Time sources of `profile` on a GPU.
GPU_SOURCES: tuple[TimeSource, ...] = ("stamps", "stamps-light", "events", "cupti")
_NOTES: dict[TimeSource, str] = {
    "stamps-light": "only ends of kernels are timed: a kernel begins where the one before it ended, so no overlap is seen",
    "events": "kernels were launched one by one, so they do not overlap and a step takes longer than at full speed",
    "cupti": "CUPTI slows a step down by 0.1 to 0.3 ms; the prompt is not in the recording",
}


class _Generates(Protocol):
    """The part of `calmnb.model.Model` that profiling needs."""

    @property
    def engine(self) -> Any: ...

    @property
    def generate(self) -> Callable[..., Any]: ...


def profile(
    model: _Generates,
    prompt: Any,
    *,
    tokens: int = 64,
    warmup: int = 1,
    peak: float | None = None,
    measure_peak: bool = True,
    source: TimeSource | None = None,
    telemetry: bool = True,
    **sampling: Any,
) -> Session:
    """Generate with every kernel timed, and return the recording.

    Parameters
    ----------
    model
        A loaded `Model`.
    prompt
        Text, token ids, or chat messages, as for `Model.generate`.
    tokens
        Tokens to generate at most, >= 2. Stop ids are ignored, so that as many steps are measured as were asked for,
        unless the context is full first.
    warmup
        Decode steps at the start that the tables leave out, >= 0: caches are cold after the prompt.
    peak
        Your own bandwidth to compare with, GB/s.
    measure_peak
        Measure the read bandwidth before and after (on a CPU about half a second each), and keep the better.
    source
        How kernels are timed; None for the engine's own way. On a GPU:

        * "stamps" (the default): kernels of the graph note when they began, and when the one before them ended, at full speed;
        * "stamps-light": the ends alone, so that no overlap is seen, at half the cost;
        * "events": kernels are launched one by one between CUDA events, inside NVTX ranges (domain "calmnb"). Nothing
          overlaps, and a step takes longer than at full speed;
        * "cupti": kernel records of NVIDIA's CUPTI (``pip install cupti-python``), decode steps only.

        The work lies between ``cudaProfilerStart`` and ``cudaProfilerStop``, for outside profilers.
    telemetry
        Sample the GPU's clocks, power and temperature meanwhile (`calmnb.profile.telemetry`), where NVML answers.
    **sampling
        Options of `Model.generate`; greedy unless you say otherwise.

    Returns
    -------
    Session

    Raises
    ------
    ConfigError
        If an argument is out of range, or the engine has no such time source.
    DeviceError
        If CUPTI was asked for and cannot be used.
    """
    if not hasattr(model, "engine") or not hasattr(model, "generate"):
        raise ConfigError(f"profile: model is {model!r}; give a loaded model: calmnb.load('model.calm')")
    if not _is_whole(tokens, 2):
        raise ConfigError(
            f"profile: tokens is {tokens!r}; it must be a whole number, at least 2, since the first comes from the prompt"
        )
    if not _is_whole(warmup, 0):
        raise ConfigError(f"profile: warmup is {warmup!r}; it must be a whole number, 0 or more")
    is_rate = isinstance(peak, int | float | np.integer | np.floating) and not isinstance(peak, bool)
    if peak is not None and not (is_rate and 0 < peak <= sys.float_info.max):
        raise ConfigError(f"profile: peak is {peak!r}; it must be a positive number, in GB/s")
    measures = measure_peak and peak is None
    options: dict[str, Any] = {"stop_ids": (), **sampling}
    if "sampling" not in options:
        options.setdefault("temperature", 0.0)
    shown = {key: value for key, value in options.items() if isinstance(value, str | int | float | bool | type(None))}
    with timed_by(model.engine, source) as chosen:
        readings = [_read_peak(model.engine)] if measures else []
        recorder = SessionRecorder(model, settings={"warmup": warmup, "tokens": tokens, **shown}, time_source=chosen)
        if peak is not None:
            recorder.meta["peaks"]["user"] = {"gb_per_s": float(peak), "source": "given by the user"}
        run = _run_under_cupti if chosen == "cupti" else _run
        bus_id = getattr(getattr(model.engine, "gpu", None), "pci_bus_id", None)
        with Telemetry(bus_id if telemetry else None) as samples, _profiler_range(model.engine):
            run(model, prompt, recorder, {"max_tokens": tokens, **options})
        if bus_id and telemetry and recorder.steps:
            computed = sum(step.n_tokens for step in recorder.steps)
            recorder.meta["telemetry"] = samples.to_meta(origin=recorder.steps[0].step_start, tokens=computed)
        recorder.meta |= _time_notes(model.engine, chosen)
    readings = [*readings, _read_peak(model.engine)] if measures else []
    known = [reading for reading in readings if reading is not None]
    if known:
        best = max(known, key=lambda reading: float(reading["gb_per_s"]))
        rates = [round(float(reading["gb_per_s"]), 3) for reading in known]
        recorder.meta["peaks"]["measured"] = {**best, "readings_gb_per_s": rates}
    return recorder.session()


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def _run(model: _Generates, prompt: Any, recorder: SessionRecorder, options: dict[str, Any]) -> None:
    with model.generate(prompt, recorder=recorder, **options) as run:
        for _ in run:
            pass


def _run_under_cupti(model: _Generates, prompt: Any, recorder: SessionRecorder, options: dict[str, Any]) -> None:
    """Generate unrecorded, and make records of what CUPTI saw of the tokens that a graph computed."""
    from calmnb.profile.cupti import step_records, trace_kernels

    engine = model.engine
    with trace_kernels() as kernels:
        engine.graphs.forget()  # CUPTI knows the nodes of graphs that it saw being made
        with model.generate(prompt, **options) as run:
            for _ in run:
                pass
            first, tokens = len(run.prompt_ids), list(run.token_ids)
    if len(tokens) < 2:
        raise ConfigError("profile: only one token fits in the context; use a shorter prompt")
    for record in step_records(kernels, engine, first, len(tokens) - 1):
        recorder.steps.append(record)
        end = record.step_end
        recorder.sampled(record.pos + 1, tokens[record.pos + 1 - first], end, end)


@contextmanager
def timed_by(engine: Any, source: TimeSource | None) -> Iterator[TimeSource]:
    """Let `engine` time by `source` within the block; yields the source that holds there.

    Raises
    ------
    ConfigError
        If the engine has no such time source.
    """
    own: TimeSource = engine.info.time_source
    if source is None or source == own:
        yield own
        return
    if not hasattr(engine, "time_source"):
        raise ConfigError(
            f"source is {source!r}, but the {engine.info.engine} engine times by {own!r} alone; leave source out, or use a GPU"
        )
    if source not in GPU_SOURCES:
        raise ConfigError(f"source is {source!r}; accepted are {', '.join(GPU_SOURCES)}")
    if source == "cupti":
        yield source
        return
    engine.time_source = source
    try:
        yield source
    finally:
        engine.time_source = own


@contextmanager
def _profiler_range(engine: Any) -> Iterator[None]:
    """What ``nsys --capture-range=cudaProfilerApi`` and ``ncu --profile-from-start off`` see."""
    switch = getattr(getattr(engine, "gpu", None), "profiler", None)
    if switch is None:
        yield
        return
    switch(True)
    try:
        yield
    finally:
        switch(False)


def _time_notes(engine: Any, source: TimeSource) -> dict[str, Any]:
    """What a reader must know about how times were taken, as session metadata."""
    if source not in _NOTES:
        return {}
    return {
        "serialised": source == "events",
        "time_note": _NOTES[source],
        **(engine.runner.describe() if source == "events" else {}),
    }


def _read_peak(engine: Any) -> dict[str, Any] | None:
    """Read bandwidth of the engine's memory now, as an entry of ``meta["peaks"]``; None where there is no way to measure it.

    Taken before and after a run and the better kept: a busy neighbour can only lower it.
    """
    if engine.info.engine != "cuda":
        from calmnb.profile.bandwidth import measure_bandwidth

        return measure_bandwidth(engine.info.threads or 1, quick=True, fresh=True).as_peak()
    if getattr(engine, "gpu", None) is None:
        return None
    from calmnb.bench import measure_read

    return {"gb_per_s": measure_read(engine.gpu), "source": "calmnb's read kernel, best of three grids"}


@dataclass(frozen=True)
class RecordingOverhead:
    """What recording costs, from neighbouring tokens decoded without and with it.

    Attributes
    ----------
    off_ms, on_ms : float
        Median milliseconds a token.
    percent : float
        Median difference of a pair of neighbours, in percent of `off_ms`.
    error_percent : float
        Standard error of `percent` (from the median absolute deviation): a smaller difference means nothing.
    pairs : int
        Number of pairs.
    """

    off_ms: float
    on_ms: float
    percent: float
    error_percent: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"recording off {self.off_ms:.3f} ms a token, on {self.on_ms:.3f} ms: "
            f"{self.percent:+.2f}% +- {self.error_percent:.2f}% ({self.pairs} pairs of neighbouring tokens)"
        )


def measure_recording_overhead(
    model: _Generates,
    prompt: Any = "Once upon a time",
    *,
    tokens: int = 64,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> RecordingOverhead:
    """Decode with recording off and on in turns, and compare.

    On CPUs the turns are tokens of one answer, so that neighbours in time are compared and a busy machine disturbs both
    alike. A GPU replays a graph that has stamps compiled in or not, so there the turns are whole answers.

    Parameters
    ----------
    model
        A loaded `Model`.
    prompt
        As for `Model.generate`.
    tokens
        Tokens of each answer, >= 8.
    rounds
        Answers (on a GPU: pairs of answers), >= 1.
    clock
        Seconds; for tests.

    Raises
    ------
    ConfigError
        If an argument is out of range, or too few tokens fit in the context.
    """
    if not _is_whole(tokens, 8) or not _is_whole(rounds, 1):
        raise ConfigError(
            f"measure_recording_overhead: tokens {tokens!r} must be at least 8 and rounds {rounds!r} at least 1, whole numbers"
        )
    whole_answers = model.engine.info.engine == "cuda"
    pairs: list[tuple[float, float]] = []
    for turn in range(rounds):
        if whole_answers:
            runs = {}
            for on in _order(turn):
                runs[on] = _token_times(model, prompt, tokens, clock, (on, on))
            pairs.append((statistics.median(runs[False]), statistics.median(runs[True])))
        else:
            times = _token_times(model, prompt, tokens, clock, None)
            for i in range(0, len(times) - 1, 2):
                first_on = _order(i // 2)[0]
                pairs.append((times[i + 1], times[i]) if first_on else (times[i], times[i + 1]))
    off_s, on_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    differences = [b - a for a, b in pairs]
    middle = statistics.median(differences)
    # The median of n values scatters 1.2533 sigma / sqrt(n); sigma is 1.4826 median absolute deviations.
    deviation = statistics.median(abs(value - middle) for value in differences)
    error = 1.2533 * 1.4826 * deviation / len(pairs) ** 0.5
    return RecordingOverhead(1e3 * off_s, 1e3 * on_s, 100 * middle / off_s, 100 * error / off_s, len(pairs))


def _order(turn: int) -> tuple[bool, bool]:
    """Which of a pair goes first alternates, so that drift cancels."""
    return (False, True) if turn % 2 == 0 else (True, False)


def _token_times(
    model: _Generates, prompt: Any, tokens: int, clock: Callable[[], float], order: tuple[bool, bool] | None
) -> list[float]:
    """Seconds of each decoded token but the first two; `order` says which of a pair are recorded, None alternates."""
    engine, recorder, times = model.engine, SessionRecorder(model), []
    before = engine.recorder
    try:
        with model.generate(prompt, max_tokens=tokens, temperature=0.0, stop_ids=()) as run:
            for i in range(-2, tokens - 2):
                engine.recorder = recorder if (order or _order(i // 2))[i % 2] else None
                start = clock()
                if next(run, None) is None:
                    break
                times.append(clock() - start)
    finally:
        engine.recorder = before
    if len(times) < 8:
        raise ConfigError(f"measure_recording_overhead: only {len(times)} tokens fit in the context; use a shorter prompt")
    return times[2:]
