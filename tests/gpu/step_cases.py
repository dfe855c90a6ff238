"""What scripts that look at a decode step take on the command line, and the engines that this asks for."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from calmnb.engine.cuda import CudaEngine, open_random_engine
from calmnb.engine.cuda_ops import sample_params, state_words
from calmnb.sampler import Sampling
from calmnb.shapes import TIED, shape_config

Variant = dict[str, Any]


def step_parser() -> argparse.ArgumentParser:
    """``SHAPE DTYPES CONTEXT ... [--kv KV] [--attention OVERRIDES]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("dtypes")
    parser.add_argument("contexts", nargs="+", type=int)
    parser.add_argument("--kv", default="fp16")
    parser.add_argument("--attention", default="", help="overrides for make_plans: short_max=0,hold_ns=0;... several")
    return parser


def step_cases(arguments: argparse.Namespace) -> Iterator[tuple[str, Variant]]:
    """Every dtype with every variant of attention."""
    variants: list[Variant] = [
        {k: float(v) if "." in v else int(v) for k, v in (item.split("=") for item in text.split(",") if item)}
        for text in arguments.attention.split(";")
    ]
    for dtype in arguments.dtypes.split(","):
        for variant in variants:
            yield dtype, variant


def open_case(arguments: argparse.Namespace, dtype: str, variant: Variant) -> CudaEngine:
    """An engine with room for all contexts."""
    return open_random_engine(
        shape_config(arguments.shape, dtype),
        is_tied=arguments.shape in TIED,
        seq_len=max(arguments.contexts) + 80,
        kv_dtype=arguments.kv,
        attention=variant,
    )


def timed_steps(arguments: argparse.Namespace) -> Iterator[tuple[CudaEngine, int, str]]:
    """Every case at every context: the engine there, the context, and the time of its graph as the start of a line."""
    for dtype, variant in step_cases(arguments):
        with open_case(arguments, dtype, variant) as engine:
            for context in arguments.contexts:
                engine.pretend_cached(context)
                graph = 1e6 * min(engine.time_graph(context, 50) for _ in range(3))
                yield engine, context, f"{arguments.shape} {dtype} {arguments.kv} ctx {context} {variant}: graph {graph:.1f} us"


def spied_step(
    engine: CudaEngine, context: int, key: str, dtype: Any, *, only: tuple[str, ...]
) -> list[tuple[str, np.ndarray]]:
    """Run the step's graph with kernels that leave notes, three times, and return what the last left.

    Parameters
    ----------
    key
        The compile-time key that makes kernels write `dtype` for each block at their stamp: ``K_SMID``, ``K_TRACE``.
    only
        Starts of the names of the kernels that know it.

    Returns
    -------
    list
        For each launch of the step its stage, and [blocks] of its notes: none if it is not among `only`.
    """
    gpu: Any = engine.gpu
    item = np.dtype(dtype)
    program = engine.program_at("greedy", context)
    stride = max(one.grid[0] for one in program.launches) * item.itemsize
    table = gpu.allocate(len(program.launches) * stride)
    spied = []
    for i, launch in enumerate(program.launches):
        if launch.kernel.name.startswith(only):
            kernel = engine._kernels(launch.kernel.spec.with_defines(**{key: 1}))
            args = type(launch.args[0]).from_buffer_copy(launch.args[0])
            args.stamp = table + stride * i
            launch = dataclasses.replace(launch, kernel=kernel, args=(args,))
        spied.append(launch)
    run = gpu.capture(spied)
    engine._put(engine._work["params"], np.frombuffer(bytes(sample_params(Sampling(), 1, engine.config.vocab_size)), np.uint8))
    engine._put(engine._work["state"], np.array(state_words(1, context, engine.seq_len), np.int32).view(np.uint8))
    for _ in range(3):
        run()
    gpu.wait()
    host = gpu.pinned(len(program.launches) * stride)
    gpu.to_host(host, table)
    gpu.wait()
    gpu.release(table)
    notes = np.array(host).view(item.base).reshape(len(program.launches), stride // item.itemsize, *item.shape)
    return [
        (program.kernels[i].stage, row[: one.grid[0] if one.kernel.name.startswith(only) else 0])
        for i, (one, row) in enumerate(zip(program.launches, notes, strict=True))
    ]
