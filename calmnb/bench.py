"""How fast decoding is: whole token loops, timed, with tokens delivered to the caller.

A row is the median of several runs with its spread, never a lone best, and says its bytes: tok/s alone cannot be judged.
Shapes without a checkpoint run with random weights made on the GPU, because speed does not depend on their values.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from calmnb.config import KvDtype, ModelConfig, WeightDtype
from calmnb.engine import DeviceName
from calmnb.engine.positions import check_kv_dtype
from calmnb.engine.stages import kv_bytes, weight_bytes_per_token
from calmnb.errors import CalmnbError, ConfigError
from calmnb.shapes import SHAPES, TIED, shape_config

__all__ = ["BenchRow", "append_results", "bench", "format_rows", "gpu_clocks", "measure_read"]

#: Prompt whose rate is reported beside the decode rate.
PROMPT_TOKENS = 512


@dataclass(frozen=True)
class BenchRow:
    """One line of a benchmark.

    Attributes
    ----------
    model, dtype, kv_dtype, engine, device : str
    context : int
        Positions cached before the first timed token.
    tok_per_s, ms_per_token : float
        Median over `runs`.
    ms_p20, ms_p80 : float
        Spread over `runs`, ms per token.
    runs, tokens : int
        Runs, and timed tokens in each.
    bytes_per_token : int
        Weights and KV cache that a token must read.
    gb_per_s : float
        `bytes_per_token` over the median time, GB = 1e9 bytes.
    percent_datasheet, percent_measured : float or None
        `gb_per_s` against the maker's bandwidth, and against our own read kernel; None where unknown.
    graph_ms : float or None
        A step's graph replayed without the loop, ms.
    versions : dict
        Versions of calmnb (and its git revision) and of the libraries, driver, clocks.
    date : str
        UTC.
    read_gb_per_s : float or None
        The read bandwidth that `percent_measured` refers to. On a CPU it is read again before every run, because a shared
        machine's changes from minute to minute, and each run is held against its own reading.
    prompt_tokens : int
        Length of the prompt that was timed, 0 if none was.
    prompt_tok_per_s : float or None
        Tokens a second of that prompt, fed in batches to an empty context: median of 3 to 25.
    """

    model: str
    dtype: str
    kv_dtype: str
    engine: str
    device: str
    context: int
    tok_per_s: float
    ms_per_token: float
    ms_p20: float
    ms_p80: float
    runs: int
    tokens: int
    bytes_per_token: int
    gb_per_s: float
    percent_datasheet: float | None
    percent_measured: float | None
    graph_ms: float | None
    versions: dict[str, str]
    date: str
    read_gb_per_s: float | None = None
    prompt_tokens: int = 0
    prompt_tok_per_s: float | None = None


def bench(
    model: str | Path,
    *,
    dtype: WeightDtype | None = None,
    contexts: Sequence[int] = (0, 4000),
    kv_dtype: KvDtype = "fp16",
    device: DeviceName = "auto",
    runs: int = 5,
    tokens: int = 128,
    threads: int | None = None,
    measured_peak: float | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> list[BenchRow]:
    """Time greedy decoding.

    Parameters
    ----------
    model
        A ``.calm`` file, or a shape's name (`calmnb.shapes.SHAPES`), which runs with random weights on a GPU.
    dtype
        Weight storage of a shape; a file has its own.
    contexts
        Positions cached before timing starts (their keys and values are made up on a GPU, fed on a CPU).
    kv_dtype
        KV-cache storage.
    device
        "auto", "cuda" or "cpu".
    runs, tokens
        Runs, and timed tokens in each.
    threads
        CPU threads.
    measured_peak
        Bandwidth of our own read kernel, GB/s; measured when None.
    progress
        Called with a line of text before each part.
    **options
        For `calmnb.engine.cuda.CudaEngine`.

    Returns
    -------
    list of BenchRow
        One a context.

    Raises
    ------
    ConfigError
        For a name that is neither a file nor a shape, or contexts beyond what the model can hold.
    """
    if runs < 1 or tokens < 2 or not contexts or min(contexts) < 0:
        raise ConfigError(
            f"bench: runs {runs}, tokens {tokens}, contexts {list(contexts)}: at least 1, 2, and one >= 0 are needed"
        )
    check_kv_dtype(kv_dtype)
    say = progress or (lambda line: None)
    try:
        is_shape = not Path(model).exists()
    except OSError as error:
        raise ConfigError(f"{model} cannot be opened: {error.strerror or error}; give a .calm file or a shape") from error
    if is_shape and str(model) not in SHAPES:
        raise ConfigError(f"{str(model)!r} is neither a file nor one of the shapes {', '.join(SHAPES)}")
    seq_len = max(max(contexts) + tokens + 2, PROMPT_TOKENS)
    if is_shape:
        if device == "cpu":
            raise ConfigError("a shape runs with random weights made on a GPU; for the CPU give a .calm file")
        config = shape_config(str(model), dtype or "fp16")
        from calmnb.engine.cuda import open_random_engine

        say(f"{model} {config.dtype}: making random weights")
        engine = open_random_engine(
            config, is_tied=str(model) in TIED, seq_len=seq_len, kv_dtype=kv_dtype, progress=progress, **options
        )
        with engine:
            return _bench_cuda(engine, str(model), contexts, runs, tokens, measured_peak, say)
    from calmnb.checkpoint import open_calm
    from calmnb.engine import open_engine

    with open_calm(Path(model)) as file:
        opened = open_engine(
            file.weights,
            device=device,
            seq_len=seq_len,
            kv_dtype=kv_dtype,
            threads=threads,
            progress=progress,
        )
        try:
            if opened.info.engine == "cuda":
                return _bench_cuda(opened, Path(model).name, contexts, runs, tokens, measured_peak, say)
            return _bench_steps(opened, Path(model).name, contexts, runs, tokens, measured_peak, say)
        finally:
            opened.close()


def _bench_cuda(
    engine: Any, name: str, contexts: Sequence[int], runs: int, tokens: int, measured: float | None, say: Callable[[str], None]
) -> list[BenchRow]:
    if measured is None:
        say("measuring the read bandwidth")
        measured = measure_read(engine.gpu)
    prompt = min(PROMPT_TOKENS, engine.seq_len)
    say(f"{name}, {prompt}-token prompt")
    prompt_rate = _prompt_rate(engine, prompt)
    rows = []
    for context in contexts:
        say(f"{name} {engine.config.dtype}, {engine.kv_dtype} KV, context {context}")
        engine.pretend_cached(context)
        times = []
        for run in range(runs + 1):
            started = 0.0
            for i, _ in enumerate(engine.decode_many(1, context, tokens + 1)):
                if i == 0:
                    started = time.perf_counter()
            if run:  # the first is warm-up
                times.append((time.perf_counter() - started) / tokens)
        row = _row(engine, name, context, times, tokens, measured, engine.time_graph(context, tokens))
        rows.append(dataclasses.replace(row, prompt_tokens=prompt, prompt_tok_per_s=prompt_rate))
    return rows


def _bench_steps(
    engine: Any, name: str, contexts: Sequence[int], runs: int, tokens: int, measured: float | None, say: Callable[[str], None]
) -> list[BenchRow]:
    from calmnb.profile.bandwidth import measure_bandwidth

    def read_rate() -> float:
        return measured or measure_bandwidth(engine.info.threads, quick=True, fresh=True).gb_per_s

    rows = []
    prompt = min(PROMPT_TOKENS, engine.seq_len)
    say(f"{name}, {prompt}-token prompt")
    prompt_rate = _prompt_rate(engine, prompt)
    for context in sorted(contexts):
        say(f"{name}, context {context}: feeding the context")
        for start in range(0, context, 256):
            engine.prefill([1] * min(256, context - start), start)
        times, reads = [], []
        for run in range(runs + 1):
            say(f"{name}, context {context}: run {run} of {runs}")
            read = read_rate()
            token = int(np.argmax(engine.step(1, context)))
            started = time.perf_counter()
            for i in range(1, tokens + 1):
                token = int(np.argmax(engine.step(token, context + i)))
            if run:
                times.append((time.perf_counter() - started) / tokens)
                reads.append(read)
        row = _row(engine, name, context, times, tokens, statistics.median(reads), None)
        share = statistics.median(1.0 / (taken * read) for taken, read in zip(times, reads, strict=True))
        rows.append(
            dataclasses.replace(
                row,
                percent_measured=100 * row.bytes_per_token / 1e9 * share,
                prompt_tokens=prompt,
                prompt_tok_per_s=prompt_rate,
            )
        )
    return rows


def _prompt_rate(engine: Any, tokens: int) -> float:
    ids = [(7 * i + 1) % engine.config.vocab_size for i in range(tokens)]
    engine.prefill(ids, 0)
    times: list[float] = []
    while len(times) < 3 or (len(times) < 25 and sum(times) < 0.5):  # milliseconds on a GPU, a second on a CPU
        started = time.perf_counter()
        engine.prefill(ids, 0)
        times.append(time.perf_counter() - started)
    return tokens / statistics.median(times)


def _row(
    engine: Any, name: str, context: int, times: list[float], tokens: int, measured: float | None, graph_s: float | None
) -> BenchRow:
    from calmnb.profile.device import find_device

    config: ModelConfig = engine.config
    median = statistics.median(times)
    low, high = (float(x) for x in np.percentile(times, [20, 80]))
    # The timed tokens stand at context + 1 ... context + tokens: the mean length they attend to.
    length = context + (tokens + 3) // 2
    nbytes = weight_bytes_per_token(config) + kv_bytes(config, length, kv_dtype=engine.kv_dtype)
    rate = nbytes / median / 1e9
    found = find_device(engine.info.device)
    datasheet = found.gb_per_s if found else None
    return BenchRow(
        model=name,
        dtype=config.dtype,
        kv_dtype=engine.kv_dtype,
        engine=engine.info.engine,
        device=engine.info.device,
        context=context,
        tok_per_s=1 / median,
        ms_per_token=median * 1e3,
        ms_p20=low * 1e3,
        ms_p80=high * 1e3,
        runs=len(times),
        tokens=tokens,
        bytes_per_token=nbytes,
        gb_per_s=rate,
        percent_datasheet=100 * rate / datasheet if datasheet else None,
        percent_measured=100 * rate / measured if measured else None,
        graph_ms=graph_s * 1e3 if graph_s else None,
        versions=_versions(engine.info.engine),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        read_gb_per_s=measured,
    )


def measure_read(gpu: Any, *, nbytes: int = 4 << 30, repeats: int = 9) -> float:
    """Bandwidth of a kernel that reads and does nothing else.

    Parameters
    ----------
    gpu
        An open `calmnb.engine.cuda_device.CudaDevice`, such as ``model.engine.gpu``.
    nbytes
        Buffer, bytes; at most half of what is free. Far larger than any cache.
    repeats
        Timed reads of each grid, >= 1.

    Returns
    -------
    float
        GB/s (1e9 bytes): the best of three grids, each the median of its repeats.
    """
    import ctypes

    from calmnb.engine.cuda_device import Launch
    from calmnb.kernels import KernelSpec, compile_kernel

    kernel = compile_kernel(KernelSpec("read_bytes", "cache.cu"), gpu.arch)
    fill = compile_kernel(KernelSpec("fill_random", "cache.cu"), gpu.arch)
    nbytes = min(nbytes, gpu.memory()[0] // 2)
    buffer = gpu.allocate(nbytes)
    try:
        words = (
            ctypes.c_uint64(buffer),
            ctypes.c_int64(nbytes // 4),
            ctypes.c_uint32(7),
            ctypes.c_int32(8),
            ctypes.c_float(1.0),
        )
        gpu.launch([Launch(fill, (gpu.sm_count * 8, 1), 256, 0, words, dependent=False)])
        best = 0.0
        for blocks in (1, 2, 4):
            grid = gpu.sm_count * blocks
            count = nbytes // 16 // (grid * 4096) * (grid * 4096)
            args = (ctypes.c_uint64(buffer), ctypes.c_int64(count), ctypes.c_uint64(buffer))
            launch = Launch(kernel, (grid, 1), 512, 0, args, dependent=False)
            times = [gpu.time([launch]) for _ in range(repeats + 1)][1:]
            best = max(best, 16 * count / statistics.median(times) / 1e9)
        return best
    finally:
        gpu.release(buffer)


def measure_copy(gpu: Any, *, nbytes: int = 2 << 30, repeats: int = 9) -> float:
    """Bandwidth of the driver's copy within the device, GB/s, bytes read and written together: the median of repeats."""
    nbytes = min(nbytes, gpu.memory()[0] // 4)
    buffers = [gpu.allocate(nbytes) for _ in range(2)]
    try:
        times = [gpu.time_call(lambda: gpu.copy(*buffers, nbytes)) for _ in range(repeats + 1)][1:]
        return float(2 * nbytes / statistics.median(times) / 1e9)
    finally:
        for buffer in buffers:
            gpu.release(buffer)


def format_rows(rows: Sequence[BenchRow]) -> str:
    """Rows as a plain table, without the columns that say nothing in any row.

    Examples
    --------
    >>> print(format_rows([]).split()[0])
    model
    """
    head = (
        "model",
        "dtype",
        "kv",
        "context",
        "tok/s",
        "ms/token",
        "p20..p80",
        "GB/s",
        "% sheet",
        "% read",
        "graph ms",
        "read GB/s",
        "prompt tok/s",
    )
    lines = [head]
    for r in rows:
        lines.append(
            (
                r.model.removesuffix(".calm"),
                r.dtype,
                r.kv_dtype,
                str(r.context),
                f"{r.tok_per_s:.1f}",
                f"{r.ms_per_token:.4f}",
                f"{r.ms_p20:.4f}..{r.ms_p80:.4f}",
                f"{r.gb_per_s:.0f}" if r.gb_per_s >= 100 else f"{r.gb_per_s:.1f}",
                "-" if r.percent_datasheet is None else f"{r.percent_datasheet:.1f}",
                "-" if r.percent_measured is None else f"{r.percent_measured:.1f}",
                "-" if r.graph_ms is None else f"{r.graph_ms:.4f}",
                "-" if r.read_gb_per_s is None else f"{r.read_gb_per_s:.1f}",
                "-" if r.prompt_tok_per_s is None else f"{r.prompt_tok_per_s:.0f}",
            )
        )
    kept = [i for i in range(len(head)) if not rows or any(line[i] != "-" for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in kept}
    return "\n".join(
        "  ".join(line[i].rjust(widths[i]) if i > 2 else line[i].ljust(widths[i]) for i in kept).rstrip() for line in lines
    )


def append_results(path: str | Path, rows: Sequence[BenchRow]) -> None:
    """Add rows to a file of JSON lines; what is there stays.

    Parameters
    ----------
    path
        The file; it and its folder are made if they are not there.
    rows
        One line each, with the fields of `BenchRow`.

    Raises
    ------
    CalmnbError
        If the file cannot be written.
    """
    path = Path(path)
    text = "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CalmnbError(
            f"{len(rows)} rows cannot be added to {path}: {error.strerror or error}; choose another file"
        ) from error


def _versions(engine: str) -> dict[str, str]:
    from calmnb.profile.describe import git_revision, versions

    found, revision = versions(), git_revision()
    if revision:
        found["revision"] = revision
    if engine == "cuda":
        found |= gpu_clocks()
    return found


def gpu_clocks() -> dict[str, str]:
    """``driver, sm_mhz, memory_mhz`` of the first GPU now, as text; {} where NVML does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            driver = pynvml.nvmlSystemGetDriverVersion()
            return {
                "driver": driver.decode() if isinstance(driver, bytes) else str(driver),
                "sm_mhz": str(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
                "memory_mhz": str(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            }
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # NVML is a courtesy here: a benchmark without clocks is still one
        return {}
