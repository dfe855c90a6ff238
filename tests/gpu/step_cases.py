"""What scripts that look at a decode step take on the command line, and the engines that this asks for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from calmnb.engine.cuda import CudaEngine, open_random_engine
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
