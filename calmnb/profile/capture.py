"""Running a model while recording it: `profile`, and what recording itself costs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
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

    def generate(self, prompt: Any, **options: Any) -> Any: ...


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
        On a CPU, measure the read bandwidth before and after (about half a second each).
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
    info = model.engine.info
    measures = measure_peak and peak is None and info.engine != "cuda"
    if measures:
        _read_peak(info.threads)
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
    if measures:
        recorder.meta["peaks"]["measured"] = _read_peak(info.threads)
    return recorder.session()


def _read_peak(threads: int) -> dict[str, Any]:
    """Measure the read bandwidth now; return the best of this process. Done before and after: other work only lowers it."""
    from calmnb.profile.bandwidth import known_bandwidth, measure_bandwidth

    now = measure_bandwidth(threads or 1, quick=True, fresh=True)
    return (known_bandwidth(threads or 1) or now).as_peak()


@dataclass(frozen=True)
class RecordingOverhead:
    """What recording costs: median milliseconds a token without and with, from interleaved decodes.

    Attributes
    ----------
    off_ms, on_ms : float
        Median over the runs of the median token.
    off_spread_ms, on_spread_ms : float
        Difference of the slowest and fastest run's median: changes smaller than this mean nothing.
    rounds, tokens : int
        Pairs of runs, and tokens of each.
    """

    off_ms: float
    on_ms: float
    off_spread_ms: float
    on_spread_ms: float
    rounds: int
    tokens: int

    @property
    def percent(self) -> float:
        """Cost of recording in percent of the time without."""
        return 100.0 * (self.on_ms / self.off_ms - 1.0)

    def __str__(self) -> str:
        return (
            f"recording off {self.off_ms:.3f} ms a token (spread {self.off_spread_ms:.3f}), "
            f"on {self.on_ms:.3f} ms (spread {self.on_spread_ms:.3f}): {self.percent:+.2f}%, "
            f"{self.rounds} interleaved runs of {self.tokens} tokens each way"
        )


def measure_recording_overhead(
    model: _Generates,
    prompt: Any = "Once upon a time",
    *,
    tokens: int = 48,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> RecordingOverhead:
    """Decode the same tokens with recording off and on, in turns, and compare medians.

    Parameters
    ----------
    model
        A loaded `Model`.
    prompt
        As for `Model.generate`.
    tokens
        Tokens of each run, >= 4.
    rounds
        Pairs of runs, >= 1; which of a pair goes first alternates, so that drift cancels.
    clock
        Seconds; for tests.
    """
    if tokens < 4 or rounds < 1:
        raise ConfigError(f"measure_recording_overhead: tokens {tokens} must be at least 4 and rounds {rounds} at least 1")
    _median_token(model, prompt, tokens, None, clock)  # compile, fill caches
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for recorded in (False, True) if turn % 2 == 0 else (True, False):
            recorder = SessionRecorder(model) if recorded else None
            times[recorded].append(_median_token(model, prompt, tokens, recorder, clock))
    off, on = times[False], times[True]
    return RecordingOverhead(
        statistics.median(off), statistics.median(on), max(off) - min(off), max(on) - min(on), rounds, tokens
    )  # fmt: skip


def _median_token(
    model: _Generates, prompt: Any, tokens: int, recorder: SessionRecorder | None, clock: Callable[[], float]
) -> float:
    """Median milliseconds from one token to the next; the first two are left out."""
    with model.generate(prompt, max_tokens=tokens, temperature=0.0, stop_ids=(), recorder=recorder) as run:
        stamps = list(_stamps(run, clock))
    if len(stamps) < 4:
        raise ConfigError(f"measure_recording_overhead: only {len(stamps)} tokens fit in the context; use a shorter prompt")
    return statistics.median(1e3 * (b - a) for a, b in itertools.pairwise(stamps[1:]))


def _stamps(run: Any, clock: Callable[[], float]) -> Iterator[float]:
    for _ in run:
        yield clock()
