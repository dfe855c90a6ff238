"""Recording well-known shapes on a GPU without a checkpoint, and showing a saved recording where there is no GPU.

Speed does not depend on what the weights say, so they are random numbers made on the GPU; the keys and values of the
context are too. What is recorded are whole decode steps, tokens chosen on the device, at several contexts in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from calmnb.config import KvDtype, WeightDtype
from calmnb.errors import ConfigError, DeviceError, FormatError
from calmnb.profile.recorder import SessionRecorder, StepRecord
from calmnb.profile.session import Session
from calmnb.shapes import SHAPES, TIED, shape_config

__all__ = ["CONTEXTS", "file_name", "find_saved", "gpu_problem", "profile_shape", "saved_file", "saved_path", "shape_session"]

#: Contexts of the recordings that come with calmnb.
CONTEXTS = (0, 500, 1000, 2000, 4000, 8000, 16000, 32000)
_PACKAGE = Path(__file__).resolve().parents[1]
#: Where saved recordings are looked for: beside the notebook, in an installed wheel, in a checkout.
DATA_FOLDERS = (Path("data"), _PACKAGE / "_notebooks" / "data", _PACKAGE.parent / "notebooks" / "data")

_GRAPH_STEPS = 48  # enough that the launch of the first hardly counts
_WATCHED = 4000  # power is watched at the longest context up to this one
_WATCH_S = 1.25

_TICK = 2.0**30  # ticks a second that times are rounded to: finer than the GPU's clock, and they pack well


def profile_shape(
    shape: str,
    *,
    dtype: WeightDtype = "fp16",
    kv_dtype: KvDtype = "fp16",
    contexts: Sequence[int] = CONTEXTS,
    tokens: int = 6,
    warmup: int = 2,
    rounds: int = 10,
    prompt: int = 512,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Session:
    """Record decode steps of `shape` with random weights at several contexts. Needs a GPU.

    Parameters
    ----------
    shape
        A name of `calmnb.shapes.SHAPES`.
    dtype, kv_dtype
        Storage of the weights and of the KV cache.
    contexts
        Positions cached before the first recorded token, >= 0; each is a run of its own.
    tokens, warmup
        Steps of each run, and how many of them the tables leave out; tokens > warmup >= 0.
    rounds
        How often all contexts are gone through, >= 1: neighbouring runs then differ in context, and five or more let
        `calmnb.compare` see how runs scatter.
    prompt
        Tokens of a prompt that is fed in one go at the start of each round, >= 0; 0 for none.
    progress
        Called with a line of text before each part.
    **options
        For `calmnb.engine.cuda.CudaEngine` (``gpu``, ``attention``).

    Returns
    -------
    Session
        Times by stamps inside the graph. ``meta["graph_us"]`` has, for each context, microseconds of the same step
        replayed without any recording; ``meta["launches"]`` what each kernel takes of a multiprocessor; ``meta["telemetry"]``
        power and clocks of a bit more than a second of unrecorded decoding at one context, which it names.

    Raises
    ------
    ConfigError
        If an argument is out of range.
    DeviceError
        If the model does not fit in the GPU's memory.

    Examples
    --------
    >>> session = profile_shape("mistral-7b", dtype="fp8", contexts=(0, 4000))  # doctest: +SKIP
    """
    if tokens <= warmup or min(warmup, prompt) < 0 or rounds < 1 or not contexts or min(contexts) < 0:
        raise ConfigError(
            f"profile_shape: tokens {tokens}, warmup {warmup}, rounds {rounds}, prompt {prompt}, contexts {list(contexts)}: "
            "tokens > warmup >= 0, one round, a prompt >= 0 and one context >= 0 are needed"
        )
    from calmnb.engine.cuda import open_random_engine

    say = progress or (lambda line: None)
    config = shape_config(shape, dtype)
    say(f"{shape} {dtype}, {kv_dtype} KV: making random weights")
    longest = max(*contexts, prompt) + max(tokens, _GRAPH_STEPS) + 1
    with open_random_engine(
        config, is_tied=shape in TIED, seq_len=longest, kv_dtype=kv_dtype, progress=progress, **options
    ) as engine:
        settings = {"warmup": warmup, "tokens": tokens, "rounds": rounds, "prompt": prompt, "weights": "random"}
        recorder = SessionRecorder(SimpleNamespace(engine=engine), model=shape, settings=settings)
        readings = [_read_rate(engine)]
        recorder.meta["graph_us"] = _graph_times(engine, contexts)
        for turn in range(-1, rounds):  # the first compiles stamped kernels and captures their graphs
            say(f"round {turn + 1} of {rounds}" if turn >= 0 else "warming up")
            _go_through(engine, recorder, contexts, tokens, prompt, is_kept=turn >= 0)
        say("watching power and clocks")
        recorder.meta["telemetry"] = _watch(engine, recorder, contexts)
        readings.append(_read_rate(engine))
        recorder.meta |= _device_state(engine)
    recorder.meta["peaks"]["measured"] = {
        "gb_per_s": max(readings),
        "source": "calmnb's read kernel, best of three grids",
        "readings_gb_per_s": [round(rate, 1) for rate in readings],
    }
    _round_times(recorder.steps)
    return recorder.session()


def _read_rate(engine: Any) -> float:
    from calmnb.bench import measure_read

    return measure_read(engine.gpu)


def _graph_times(engine: Any, contexts: Sequence[int]) -> dict[str, float]:
    """Microseconds of a step without recording at each context: median of seven times many steps back to back."""
    import statistics

    times: dict[str, float] = {}
    for context in contexts:
        engine.pretend_cached(context)
        engine.time_graph(context, _GRAPH_STEPS)  # the first captures the graph
        each = [engine.time_graph(context, _GRAPH_STEPS) for _ in range(7)]
        times[str(context)] = round(statistics.median(each) * 1e6, 3)
    return times


def _go_through(
    engine: Any, recorder: SessionRecorder, contexts: Sequence[int], tokens: int, prompt: int, *, is_kept: bool
) -> None:
    """One round: the prompt, then a few tokens at each context."""
    engine.recorder = recorder if is_kept else _Nothing()
    if prompt:
        recorder.new_run()
        engine.prefill([(7 * i + 1) % engine.config.vocab_size for i in range(prompt)], 0)
    for context in contexts:
        engine.pretend_cached(context)
        recorder.new_run()
        for _ in engine.decode_many(1, context, tokens):
            pass
    engine.recorder = None


def _watch(engine: Any, recorder: SessionRecorder, contexts: Sequence[int]) -> dict[str, Any]:
    """Power and clocks of steady decoding, long enough for the energy counter: energy per token without anything else."""
    from calmnb.profile.telemetry import Telemetry

    near = [context for context in contexts if context <= _WATCHED]
    context = max(near) if near else min(contexts)
    engine.pretend_cached(context)
    room, count = min(256, engine.seq_len - context), 0
    with Telemetry(getattr(engine.gpu, "pci_bus_id", None)) as samples:
        began = time.perf_counter()
        while not samples.problem and time.perf_counter() - began < _WATCH_S:
            for _ in engine.decode_many(1, context, room):
                count += 1
    known = samples.to_meta(origin=recorder.steps[0].step_start, tokens=count)
    return {**known, "context": context}


class _Nothing:
    """A recorder that keeps nothing."""

    def add(self, *args: Any) -> None:
        """Forget a step."""

    def sampled(self, *args: Any) -> None:
        """Forget a token."""


def _device_state(engine: Any) -> dict[str, Any]:
    """Clocks while the GPU is still warm, and its driver."""
    from calmnb.bench import gpu_clocks
    from calmnb.profile.describe import versions

    state = gpu_clocks()
    clocks = {key: int(state[key]) for key in ("sm_mhz", "memory_mhz") if key in state}
    driver = {"driver": state["driver"]} if "driver" in state else {}
    return {"clocks": clocks, "versions": {**versions(), **driver}}


def _round_times(steps: Sequence[StepRecord]) -> None:
    """Round all times to whole ticks after the first step's start, so that a saved session is small."""
    if not steps:
        return
    origin = steps[0].step_start

    def rounded(value: Any) -> Any:
        return np.rint((value - origin) * _TICK) / _TICK

    for step in steps:
        step.starts, step.ends = rounded(step.starts), rounded(step.ends)
        for name in ("step_start", "step_end", "sample_start", "sample_end"):
            setattr(step, name, float(rounded(getattr(step, name))))


def saved_path(shape: str, dtype: str = "fp16", kv_dtype: str = "fp16", *, device: str = "h200") -> Path:
    """Where the recording of a shape is kept; see `shape_session`.

    Raises
    ------
    FormatError
        If it is not in one of `DATA_FOLDERS`; the message names them.
    """
    return saved_file(file_name(shape, dtype, kv_dtype, device=device))


def find_saved(name: str) -> Path | None:
    """A file that comes with calmnb's notebooks, in the first of `DATA_FOLDERS` that has it; None if none has."""
    return next((folder / name for folder in DATA_FOLDERS if (folder / name).is_file()), None)


def saved_file(name: str) -> Path:
    """A file that comes with calmnb's notebooks.

    Raises
    ------
    FormatError
        If it is not in `DATA_FOLDERS`; the message names them.
    """
    found = find_saved(name)
    if found:
        return found
    where = " or ".join(str(folder.resolve()) for folder in DATA_FOLDERS)
    raise FormatError(
        f"the saved recording {name} is not in {where}; run the notebook in "
        "calmnb's folder notebooks/, which has it, or record one on a GPU with calmnb.profile.shape.profile_shape(...)"
    )


def file_name(shape: str, dtype: str, kv_dtype: str, *, device: str = "h200", tool: str = "", ending: str = "calmprof") -> str:
    """File name of the recording of a shape, by calmnb or by an outside `tool`.

    Examples
    --------
    >>> file_name("mistral-7b", "fp8", "fp16")
    'h200-mistral-7b-fp8.calmprof'
    >>> file_name("mistral-7b", "fp8", "fp8", tool="ncu", ending="csv")
    'h200-ncu-mistral-7b-fp8-kv-fp8.csv'
    """
    kv = "" if kv_dtype == "fp16" else f"-kv-{kv_dtype}"
    return f"{device}-{tool + '-' if tool else ''}{shape}-{dtype}{kv}.{ending}"


def shape_session(
    shape: str,
    dtype: WeightDtype = "fp16",
    kv_dtype: KvDtype = "fp16",
    *,
    record: bool | None = None,
    device: str = "h200",
    say: Callable[[str], None] = print,
    **options: Any,
) -> Session:
    """Record `shape` now where there is a GPU, else load the recording that comes with calmnb; say which.

    Parameters
    ----------
    shape, dtype, kv_dtype
        As for `profile_shape`.
    record
        True: record, whatever it takes. False: load. None: record if there is a GPU and the model fits.
    device
        Whose saved recording.
    say
        Told in one line what is shown.
    **options
        For `profile_shape`.

    Raises
    ------
    DeviceError
        With `record` True, if there is no GPU or the model does not fit.
    FormatError
        If a saved recording is wanted and missing.

    Examples
    --------
    >>> session = shape_session("mistral-7b", "fp8")  # doctest: +SKIP
    No GPU here: this is NVIDIA H200, recorded on 2026-11-29
    """
    if shape not in SHAPES:
        shape_config(shape)  # says which there are
    problem = "recording was not asked for" if record is False else gpu_problem()
    if not problem:
        try:
            session = profile_shape(shape, dtype=dtype, kv_dtype=kv_dtype, **options)
        except DeviceError as error:
            if record:
                raise
            problem = f"not recorded here: {error}"
        else:
            say(f"{shape} {dtype}, KV {kv_dtype}: recorded now on {session.meta['device']}")
            return session
    if record:
        raise DeviceError(f"{shape} cannot be recorded: {problem}. It needs an NVIDIA GPU; record=False shows a saved one")
    session = Session.load(saved_path(shape, dtype, kv_dtype, device=device))
    date = str(session.meta.get("date", ""))[:10]
    say(f"{shape} {dtype}, KV {kv_dtype}: {problem}; showing {session.meta['device']}, recorded on {date}")
    return session


def gpu_problem() -> str:
    """Why there is nothing to record on, or an empty string."""
    from calmnb.engine import _TOO_OLD, _cuda_problem

    problem = _cuda_problem()
    return problem if _TOO_OLD in problem else "no GPU here" if problem else ""
