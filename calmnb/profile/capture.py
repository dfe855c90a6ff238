"""Running a model while recording it: `profile`, and what recording itself costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from calmnb.errors import ConfigError
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session

__all__ = ["RecordingOverhead", "measure_recording_overhead", "profile"]


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
    **sampling
        Options of `Model.generate`; greedy unless you say otherwise.

    Returns
    -------
    Session

    Raises
    ------
    ConfigError
        If an argument is out of range.
    """
    if tokens < 2:
        raise ConfigError(f"profile: tokens is {tokens}; it must be at least 2, since the first comes from the prompt")
    if warmup < 0:
        raise ConfigError(f"profile: warmup is {warmup}; it must be 0 or more")
    if peak is not None and not peak > 0:
        raise ConfigError(f"profile: peak is {peak} GB/s; it must be positive")
    measures = measure_peak and peak is None
    readings = [_read_peak(model.engine)] if measures else []
    options: dict[str, Any] = {"stop_ids": (), **sampling}
    if "sampling" not in options:
        options.setdefault("temperature", 0.0)
    shown = {key: value for key, value in options.items() if isinstance(value, str | int | float | bool | type(None))}
    recorder = SessionRecorder(model, settings={"warmup": warmup, "tokens": tokens, **shown})
    if peak is not None:
        recorder.meta["peaks"]["user"] = {"gb_per_s": float(peak), "source": "given by the user"}
    with model.generate(prompt, max_tokens=tokens, recorder=recorder, **options) as run:
        for _ in run:
            pass
    readings = [*readings, _read_peak(model.engine)] if measures else []
    known = [reading for reading in readings if reading is not None]
    if known:
        best = max(known, key=lambda reading: float(reading["gb_per_s"]))
        rates = [round(float(reading["gb_per_s"]), 3) for reading in known]
        recorder.meta["peaks"]["measured"] = {**best, "readings_gb_per_s": rates}
    return recorder.session()


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
    if tokens < 8 or rounds < 1:
        raise ConfigError(f"measure_recording_overhead: tokens {tokens} must be at least 8 and rounds {rounds} at least 1")
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
