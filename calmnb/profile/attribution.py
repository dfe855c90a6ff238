"""Which stage and layer a kernel worked for, told from what outside tools see: kernel names in order, and NVTX ranges.

Inside a graph replay there are no ranges, but the kernels of a step always come in one order, so their names are enough.
Ranges are read leniently, so that another program that names its ranges this way reads as well as calmnb does:

* a step: ``decode pos=12 kv_len=13``, ``prefill pos=0 n_tokens=24``, ``token 12``;
* a layer: ``layer 3`` (or ``layer_3``, ``layers.3``);
* a stage: the name of a stage, ``matmul_qkv``, with nothing around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from calmnb.engine.base import STAGES, Kernel, Phase, Stage

__all__ = [
    "HOLD_KERNELS",
    "STEP_KERNELS",
    "DecodeStep",
    "StepRange",
    "find_steps",
    "kernel_name",
    "layer_of_range",
    "stage_of_range",
    "step_of_range",
]

#: Matches the names of the kernels of calmnb's decode steps, and of no others of calmnb's.
STEP_KERNELS = "^(embed|rotate_sinks|attention|matvec_.*|sample_.*|collect_stamps)$"

#: Keep the stream busy while the engine queues kernels between CUDA events, and calibrate these (`calmnb.engine.cuda_events`).
HOLD_KERNELS = frozenset({"hold_stream", "hold_time"})

_STEP = re.compile(r"(decode|prefill|token)(?=$|[\s:#=@])", re.IGNORECASE)
_LAYER = re.compile(r"layers?[\s._:#=]*(\d{1,6})$", re.IGNORECASE)
_FIELD = re.compile(r"(\w+)\s*[=:]\s*(\d{1,12})")
_NUMBER = re.compile(r"(?<![\w=.])(\d{1,12})(?![\w.])")
_BASE = re.compile(r"(?:void\s+)?([A-Za-z_]\w*)\s*(?:[<(].*)?", re.DOTALL)
_STAGE_NAMES: dict[str, Stage] = {stage: stage for stage in STAGES if stage != "gap"}


class StepRange(NamedTuple):
    """What the name of a step's range says; -1 where it does not."""

    phase: Phase
    pos: int
    kv_len: int
    n_tokens: int


class DecodeStep(NamedTuple):
    """One step of calmnb among many kernels: index of its first kernel, and what each of them is."""

    first: int
    rows: tuple[Kernel, ...]

    @property
    def phase(self) -> Phase:
        """A step that computes no logits only feeds the prompt."""
        return "decode" if any(row.stage in ("output", "sample") for row in self.rows) else "prefill"


def step_of_range(text: str) -> StepRange | None:
    """Read the name of a range as that of a step, or return None."""
    match = _STEP.match(text.strip())
    if match is None:
        return None
    fields = {name.lower(): int(value) for name, value in _FIELD.findall(text)}
    bare = _NUMBER.search(_FIELD.sub("", text))
    pos = fields.get("pos", fields.get("token", int(bare[1]) if bare else -1))
    phase: Phase = "prefill" if match[1].lower() == "prefill" else "decode"
    n_tokens = fields.get("n_tokens", fields.get("n", 1))
    kv_len = fields.get("kv_len", fields.get("kv", pos + n_tokens if pos >= 0 else 0))
    return StepRange(phase, pos, kv_len, n_tokens)


def layer_of_range(text: str) -> int | None:
    """Read the name of a range as that of a layer, or return None."""
    match = _LAYER.fullmatch(text.strip())
    return int(match[1]) if match else None


def stage_of_range(text: str) -> Stage | None:
    """Read the name of a range as that of a stage, or return None."""
    return _STAGE_NAMES.get(text.strip())


def kernel_name(name: str, *, longest: int = 160) -> str:
    """`name` without return type and argument list; template arguments stay, since they tell kernels apart."""
    short = name.removeprefix("void ").strip()
    if short.endswith(")"):
        depth = 0
        for i in range(len(short) - 1, -1, -1):
            depth += (short[i] == ")") - (short[i] == "(")
            if depth == 0:
                short = short[:i] if i else short
                break
    return short if len(short) <= longest else short[: longest - 3] + "..."


def find_steps(names: Sequence[str]) -> list[DecodeStep]:
    """Find calmnb's steps among kernels in execution order.

    Parameters
    ----------
    names
        Kernel names as a tool reports them; template arguments and argument lists do no harm.

    Returns
    -------
    list of DecodeStep
        In order, not overlapping. A step runs from ``embed`` to the last kernel that one can be part of, and has at least
        one ``matvec_qkv``; kernels in no step are not calmnb's decoding.
    """
    bases = [match[1] if (match := _BASE.fullmatch(name.strip())) else "" for name in names]
    steps = []
    i = 0
    while i < len(bases):
        if bases[i] != "embed":
            i += 1
            continue
        end = i + 1
        while end < len(bases) and bases[end] != "embed" and re.match(STEP_KERNELS, bases[end]):
            end += 1
        segment = bases[i:end]
        if "matvec_qkv" in segment:
            steps.append(DecodeStep(i, _rows(segment)))
        i = end
    return steps


def _rows(bases: Sequence[str]) -> tuple[Kernel, ...]:
    layer = -1
    before: Stage = "embed"
    rows = []
    for i, base in enumerate(bases):
        here: Stage
        if base in {"embed", "rotate_sinks"}:
            here = "embed"
        elif base == "matvec_qkv":
            here, layer = "matmul_qkv", layer + 1
        elif base == "attention":
            here = "attention"
        elif base == "matvec_residual":
            here = "matmul_ffn_down" if before == "matmul_ffn_up" else "matmul_attn"
        elif base == "matvec_gateup":
            here = "matmul_ffn_up"
        elif base == "matvec_rows":
            # The router of a mixture of experts, or the output matrix: the former goes before gate and up.
            here = "matmul_ffn_up" if "matvec_gateup" in bases[i + 1 : i + 2] else "output"
        elif base.startswith("sample_"):
            here = "sample"
        else:
            here = "other"
        rows.append(Kernel(here, layer if here in _IN_LAYER else -1, base))
        before = here
    return tuple(rows)


_IN_LAYER = frozenset({"matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down"})
