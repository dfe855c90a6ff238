"""Whether the profiler can be trusted: its numbers against each other, against other clocks, and against other tools.

`verify_engine` and `verify_model` measure; what comes out is a `Fidelity`: one row a question, with the bound that calmnb
sets itself and whether it is kept. What a machine lacks is said, not left out.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from calmnb.config import ModelConfig
from calmnb.engine.stages import weight_bytes_per_token
from calmnb.errors import CalmnbError
from calmnb.profile.recorder import SessionRecorder, StepRecord

__all__ = ["Check", "Fidelity", "recording_bounds", "verify_bytes", "verify_engine", "verify_model"]

Say = Callable[[str], None]

#: Bounds that do not depend on the model.
SUM_PERCENT = 1.0
CALL_US = 100.0  # what a call from Python and its checks may take
KERNEL_US, KERNEL_PERCENT = 1.0, 3.0
BYTES_PERCENT = 2.0
READ_PERCENT = (80.0, 100.5)
COPY_PERCENT = (60.0, 100.5)


@dataclass(frozen=True)
class Check:
    """One row: a number and the bound on it.

    Attributes
    ----------
    what : str
    value : float or None
        None if it could not be measured here; `note` says why.
    unit : str
    bound : str
        As text; empty where there is none.
    passed : bool or None
        None where there is no bound or no value.
    note : str
        How it was measured, or why not.
    """

    what: str
    value: float | None
    unit: str
    bound: str
    passed: bool | None
    note: str = ""

    @property
    def shown(self) -> str:
        """The value with its unit."""
        if self.value is None:
            return "not measured"
        digits = {"%": "+.2f", "us": ",.2f", "GB/s": ",.0f" if self.value >= 100 else ",.1f"}.get(self.unit, ".4f")
        return " ".join((format(self.value, digits), self.unit)).strip()

    @property
    def result(self) -> str:
        """ "pass", "FAIL" or "-"."""
        return "-" if self.passed is None else "pass" if self.passed else "FAIL"


@dataclass(frozen=True)
class Fidelity:
    """What `verify_engine` and `verify_model` found.

    Attributes
    ----------
    meta : dict
        Model, device, context, versions, date.
    checks : list of Check
    kernels : list of dict
        A row a stage: ``stage, kernel, calls, stamps_us, events_us, cupti_us`` (None where not measured), of kernels that run
        alone.
    bytes : list of dict
        A row a stage: ``stage, kernel, calls, bytes_min, bytes_counted, bytes_measured``; empty without ncu.
    """

    meta: dict[str, Any]
    checks: list[Check]
    kernels: list[dict[str, Any]] = field(default_factory=list)
    bytes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """Checks whose bound is not kept."""
        return [check for check in self.checks if check.passed is False]

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return dataclasses.asdict(self)


def recording_bounds(config: ModelConfig) -> tuple[float, float, str]:
    """Percent of a step that recording may cost, with light and with full stamps, and for which models that holds.

    The shorter the kernels, the more a stamp weighs.
    """
    nbytes = weight_bytes_per_token(config)
    if config.dtype != "gf4" and nbytes >= 6e9:
        return 0.5, 1.0, "7B and larger, fp16 and fp8"
    if config.dtype == "fp16" and nbytes >= 2e9:
        return 0.75, 1.5, "1B fp16"
    return 2.0, 4.0, "all others"


def within(percent: float) -> str:
    """Bound of a deviation, as text."""
    return f"within {percent:g}%"


def verify_engine(
    engine: Any,
    name: str,
    *,
    context: int = 0,
    steps: int = 48,
    rounds: int = 7,
    use_cupti: bool = True,
    say: Say = lambda _: None,
) -> Fidelity:
    """Check the profiler on a CUDA engine.

    Parameters
    ----------
    engine
        A `calmnb.engine.cuda.CudaEngine`; its KV cache is overwritten.
    name
        What to call the model.
    context
        Positions cached before the first step; ``context + steps`` must fit.
    steps
        Steps of each measurement, >= 8.
    rounds
        How often recording off, light and full are timed in turns.
    use_cupti
        Also ask CUPTI, where it is installed.
    say
        Called with a line of text before each part.
    """
    meta = _meta(engine, name, context)
    engine.pretend_cached(context)
    say("measuring memory bandwidth: read kernel, device copy")
    checks = _gpu_peaks(engine)
    say("timing steps with recording off, light and full, in turns")
    checks += _recording_costs(engine, context, steps, rounds)
    say("recording steps between CUDA events")
    checks += _sums_of_rows(engine, context, steps)
    say("timing each kernel alone: stamps, events, CUPTI")
    kernels, more = _kernel_times(engine, context, steps, use_cupti)
    return Fidelity(meta, checks + more, kernels)


def _meta(engine: Any, name: str, context: int) -> dict[str, Any]:
    from calmnb.profile.describe import describe_model

    known = describe_model(SimpleNamespace(engine=engine))
    kept = ("engine", "device", "threads", "dtype", "kv_dtype", "versions", "git_revision", "peaks")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"model": name, "context": context, "date": now, **{key: known[key] for key in kept}}


def _gpu_peaks(engine: Any) -> list[Check]:
    from calmnb.bench import measure_copy, measure_read
    from calmnb.profile.device import datasheet_peak

    sheet = datasheet_peak(engine.info.device)
    rows = []
    limit = sheet["gb_per_s"] if sheet else None
    rows.append(
        Check("peak, datasheet", limit, "GB/s", "", None, sheet["source"] if sheet else "this device is not in calmnb's table")
    )
    for what, rate, (low, high), how in (
        ("peak, calmnb's read kernel", measure_read(engine.gpu), READ_PERCENT, "best of three grids, median of repeats"),
        ("peak, device copy", measure_copy(engine.gpu), COPY_PERCENT, "bytes read and written together"),
    ):
        share = 100 * rate / limit if limit else None
        passed = None if share is None else low <= share <= high
        note = how if share is None else f"{share:.1f}% of the datasheet; {how}"
        rows.append(Check(what, rate, "GB/s", f"{low:.0f} to 100% of the datasheet", passed, note))
    return rows


def _recording_costs(engine: Any, context: int, steps: int, rounds: int) -> list[Check]:
    """Steps queued back to back, timed by events at the two ends of the queue."""
    light_level, full_level = (int(engine.runner.level_of(source)) for source in ("stamps-light", "stamps"))
    times: dict[int, list[float]] = {0: [], light_level: [], full_level: []}
    for level in times:
        engine.time_graph(context, steps, level=level)  # warm-up
    for turn in range(rounds):
        for level in itertools.islice(itertools.cycle(times), turn % 3, turn % 3 + 3):
            times[level].append(engine.time_graph(context, steps, level=level))
    off = statistics.median(times[0])
    light, full, which = recording_bounds(engine.config)
    rows = [Check("step, recording off", off * 1e6, "us", "", None, f"median of {rounds} times {steps} steps back to back")]
    for what, level, bound in (("light", light_level, light), ("full", full_level, full)):
        # Neighbours in time are compared, so that the clock's drift cancels.
        cost = 100 * statistics.median(on / plain - 1 for on, plain in zip(times[level], times[0], strict=True))
        rows.append(
            Check(
                f"recording, {what}", cost, "%", f"< {bound:g}% ({which})", cost < bound,
                f"step {statistics.median(times[level]) * 1e6:,.1f} us",
            )
        )  # fmt: skip
    return rows


def _sums_of_rows(engine: Any, context: int, steps: int) -> list[Check]:
    rows = []
    for what, source in (("full", "stamps"), ("light", "stamps-light")):
        recorder = SessionRecorder({})
        between, moving = engine.time_steps(context, steps, recorder, level=engine.runner.level_of(source))
        ratios = [
            (r.step_end - r.step_start) / (seconds - moved)
            for r, seconds, moved in list(zip(recorder.steps, between, moving, strict=False))[2:]
        ]
        off = 100 * (statistics.median(ratios) - 1)
        kernels = statistics.median(float((r.ends - r.starts).sum()) / (r.step_end - r.step_start) for r in recorder.steps[2:])
        rows.append(
            Check(
                f"sum of rows / step, {what} stamps", off, "%", within(SUM_PERCENT), abs(off) <= SUM_PERCENT,
                f"step by a pair of CUDA events, less {statistics.median(moving) * 1e6:.1f} us for moving the stamps; "
                f"without taking overlap out, kernels sum to {kernels:.2f} of the step",
            )
        )  # fmt: skip
    return rows


#: The clocks take turns, for a card at its power cap slows down while it is measured; the first steps of a turn are left out.
_TURNS, _SETTLING = 3, 2


def _kernel_times(engine: Any, context: int, steps: int, use_cupti: bool) -> tuple[list[dict[str, Any]], list[Check]]:
    source, overlap, n = engine.time_source, engine.graphs.overlap, max(steps // 4, 6)
    found: dict[str, list[StepRecord]] = {}
    problem, excesses = "left out with --no-cupti", []
    try:
        engine.graphs.overlap = False
        for _ in range(_TURNS):
            for kind in ("stamps", "events"):
                engine.time_source = kind
                found.setdefault(kind, []).extend(_recorded(engine, context, n)[_SETTLING:])
            if use_cupti:
                try:
                    records, excess = _by_cupti(engine, context, n)
                except CalmnbError as error:
                    problem, use_cupti = str(error), False
                    found.pop("cupti", None)
                else:
                    found.setdefault("cupti", []).extend(records[_SETTLING:])
                    excesses.append(excess)
    finally:
        engine.time_source, engine.graphs.overlap = source, overlap
    tables = {kind: _by_stage(records) for kind, records in found.items()}
    rows: list[dict[str, Any]] = [
        {
            "stage": stage, "kernel": kernel, "calls": calls, "stamps_us": 1e6 * seconds,
            **{f"{kind}_us": 1e6 * tables[kind][stage, kernel][1] if kind in tables else None for kind in ("events", "cupti")},
        }
        for (stage, kernel), (calls, seconds) in tables["stamps"].items()
    ]  # fmt: skip
    checks = []
    bound = f"within {KERNEL_US:g} us or {KERNEL_PERCENT:g}% for every kernel"
    for a, b in (("events", "cupti"), ("stamps", "cupti"), ("events", "stamps")):
        what = f"kernel by {a} less by {b.upper() if b == 'cupti' else b}, worst"
        if a not in tables or b not in tables:
            checks.append(Check(what, None, "us", bound, None, problem))
            continue
        beyond = 1e6 * statistics.median(excesses) if b == "cupti" else 0.0
        pairs = [(row["stage"], row[f"{a}_us"], row[f"{b}_us"] - beyond) for row in rows]
        stage, ours, theirs = max(pairs, key=lambda pair: abs(pair[1] - pair[2]) / _allowed(pair[2]))
        note = f"{stage}: {ours:.2f} us against {theirs:.2f}; kernels alone, medians, clocks in turns"
        if beyond:
            note += f"; of CUPTI's times {beyond:.2f} us are taken off, which it adds to a kernel that times itself"
        checks.append(Check(what, ours - theirs, "us", bound, abs(ours - theirs) <= _allowed(theirs), note))
    return rows, checks


def _allowed(us: float) -> float:
    return max(KERNEL_US, KERNEL_PERCENT / 100 * us)


def _recorded(engine: Any, context: int, n: int) -> list[StepRecord]:
    before, recorder = engine.recorder, SessionRecorder({})
    engine.pretend_cached(context)
    engine.recorder = recorder
    try:
        for _ in engine.decode_many(1, context, n):
            pass
    finally:
        engine.recorder = before
    return recorder.steps


def _by_cupti(engine: Any, context: int, n: int) -> tuple[list[StepRecord], float]:
    """Steps as CUPTI sees them, and what it counts for a kernel beyond the kernel's own time."""
    from calmnb.profile.cupti import kernel_excess, trace_launches

    engine.pretend_cached(context)
    return trace_launches(engine, context, n), kernel_excess(engine)


def _by_stage(records: Sequence[StepRecord]) -> dict[tuple[str, str], tuple[int, float]]:
    """Launches in a step, and mean over them of each one's median time over the steps, for each kind of kernel."""
    times = np.median([r.ends - r.starts for r in records], axis=0)
    parts: dict[tuple[str, str], list[float]] = {}
    for kernel, seconds in zip(records[0].kernels, times, strict=True):
        parts.setdefault((kernel.stage, kernel.name), []).append(float(seconds))
    return {key: (len(values), statistics.fmean(values)) for key, values in parts.items()}


def verify_bytes(
    config: ModelConfig, *, is_tied: bool, kv_dtype: str = "fp16", context: int = 0, say: Say = lambda _: None
) -> tuple[list[dict[str, Any]], Check]:
    """Measure a step's bytes with Nsight Compute, in a process of its own: a row a stage, and the worst weight kernel.

    Parameters
    ----------
    config, is_tied, kv_dtype, context
        As for `calmnb.profile.ncu_step.measure_step`; four layers stand for all.
    say
        Called with a line of text before it starts.

    Returns
    -------
    rows : list of dict
        Columns of `calmnb.profile.ncu.MEASURED_COLUMNS`; none where ncu is missing or may not read the counters.
    check : Check
    """
    from calmnb.profile.ncu import attach_measured
    from calmnb.profile.ncu_step import measure_step

    what, bound = "bytes measured / counted, worst weight kernel", within(BYTES_PERCENT)
    say("measuring bytes with Nsight Compute")
    try:
        session, launches, _ = measure_step(
            config, is_tied=is_tied, kv_dtype=kv_dtype, context=context, output=lambda line: None
        )
        table = attach_measured(session, launches)
    except CalmnbError as error:
        return [], Check(what, None, "%", bound, None, str(error))
    rows: list[dict[str, Any]] = table.to_dict("records")  # type: ignore[assignment]
    weights = [row for row in rows if row["stage"].startswith("matmul_") or row["stage"] == "output"]
    worst = max(weights, key=lambda row: abs(row["measured_to_counted"] - 1))
    off = 100 * (worst["measured_to_counted"] - 1)
    note = (
        f"{worst['stage']}: {worst['bytes_measured'] / 1e6:,.3f} MB measured, {worst['bytes_counted'] / 1e6:,.3f} counted; "
        f"{session.config.n_layers if session.config else 0} layers, DRAM reads and writes from cold caches"
    )
    return rows, Check(what, off, "%", bound, abs(off) <= BYTES_PERCENT, note)


def verify_model(model: Any, name: str, *, steps: int = 24, say: Say = lambda _: None) -> Fidelity:
    """Check the profiler on a model that runs on a CPU: memory bandwidth, cost of recording, rows against the clock.

    Parameters
    ----------
    model
        A loaded `calmnb.model.Model`.
    name
        What to call it.
    steps
        Steps of each measurement, >= 8.
    say
        Called with a line of text before each part.
    """
    from calmnb.profile.bandwidth import measure_bandwidth
    from calmnb.profile.capture import measure_recording_overhead

    meta = _meta(model.engine, name, 0)
    say("measuring memory bandwidth")
    read = measure_bandwidth(model.engine.info.threads or 1, quick=True)
    copy = _host_copy(read.nbytes)
    checks = [
        Check("peak, datasheet", None, "GB/s", "", None, "depends on the memory that a CPU is given; none is known"),
        Check("peak, calmnb's read kernel", read.gb_per_s, "GB/s", "", None, str(read)),
        Check("peak, copy in memory", copy, "GB/s", "", None, "NumPy, one thread, bytes read and written together"),
    ]
    say("decoding with recording off and on, token by token in turns")
    cost = measure_recording_overhead(model, [1, 2, 3], tokens=max(steps, 8), rounds=4)
    passed = cost.percent - 2 * cost.error_percent < 4.0
    note = f"{cost}; fails if it is above by more than twice its error"
    checks.append(Check("recording", cost.percent, "%", "< 4%", passed, note))
    say("recording steps against the clock")
    checks.append(_sum_by_clock(model.engine, steps))
    missing = "for GPUs; a CPU's kernels are timed by its own clock alone"
    checks += [Check(f"kernel by {which}", None, "us", "", None, missing) for which in ("stamps", "CUDA events", "CUPTI")]
    checks.append(Check("bytes measured / counted", None, "%", "", None, "needs a GPU and Nsight Compute"))
    return Fidelity(meta, checks)


def _host_copy(nbytes: int) -> float:
    source = np.ones(nbytes // 8, np.uint64)
    target = np.empty_like(source)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(times[1:]) / 1e9


def _sum_by_clock(engine: Any, steps: int) -> Check:
    """Rows of a step against the time that the caller of `step` waited."""
    recorder, before = SessionRecorder({}), engine.recorder
    waited, token = [], 1
    engine.recorder = recorder
    try:
        for pos in range(min(steps + 2, engine.seq_len)):
            started = time.perf_counter()
            logits = engine.step(token, pos)
            waited.append(time.perf_counter() - started)
            token = int(np.argmax(logits))
    finally:
        engine.recorder = before
    pairs = [(r.step_end - r.step_start, seconds) for r, seconds in zip(recorder.steps, waited, strict=True)][2:]
    off = 100 * (statistics.median(rows / seconds for rows, seconds in pairs) - 1)
    late = 1e6 * statistics.median(seconds - rows for rows, seconds in pairs)
    note = f"step by the clock of the caller, who waits {late:.0f} us longer than the rows say (median)"
    passed = abs(off) <= SUM_PERCENT or abs(late) <= CALL_US
    return Check("sum of rows / step", off, "%", f"{within(SUM_PERCENT)} or {CALL_US:g} us", passed, note)
