"""One decode step as a list of kernel launches.

``program(...)`` is a pure function of sizes and addresses: the same list is captured into a graph on a GPU and checked
field by field in tests. A step is

    embed, then per layer: [router] qkv, attention, out, gate+up, down; then logits, and the choice of the next token
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from calmnb.config import DTYPE_BITS, KvDtype, ModelConfig
from calmnb.engine.base import FullPolicy, Kernel
from calmnb.engine.cuda_device import Launch
from calmnb.engine.cuda_matvec import Device, MatvecArgs, MatvecPlan, matrix_shapes, plan_matvec
from calmnb.engine.cuda_ops import (
    HOST_RING,
    SAMPLE_SCRATCH_BYTES,
    STATE_WORDS,
    AttentionArgs,
    AttentionPlan,
    CollectArgs,
    EmbedArgs,
    HostToken,
    SampleArgs,
    SampleParams,
    SamplePlan,
    SinkArgs,
    collect_spec,
    embed_grid,
    embed_spec,
    plan_attention,
    plan_sampling,
    sample_specs,
    sinks_spec,
)
from calmnb.engine.cuda_weights import Layout
from calmnb.errors import UnsupportedError
from calmnb.kernels import CompiledKernel, KernelSpec

__all__ = ["Ending", "Plans", "StepProgram", "activation_layout", "build_program", "cache_bytes", "make_plans"]

#: What a step does after the layers: nothing (a prompt token), logits, the most likely token, or a drawn one.
Ending = Literal["none", "logits", "greedy", "draw"]

Compile = Callable[[KernelSpec], CompiledKernel]

_ACT_SCALE = 8.0
_SHORT_CHANGES = ("short_fill", "short_hold_ns", "short_least_shared", "short_warps", "short_budget")
#: Experts of one token that the weight kernels keep track of.
_MOST_EXPERTS = 64


@dataclass(frozen=True)
class Plans:
    """Geometry of every kernel of a step."""

    config: ModelConfig
    kv_dtype: KvDtype
    seq_len: int
    on_full: FullPolicy
    attention: AttentionPlan
    short_attention: AttentionPlan
    matvec: Mapping[str, MatvecPlan]  # qkv, out, gateup, down, logits, [router]
    wide: frozenset[str]  # names of weight regions that need the wide kernel
    wide_matvec: Mapping[str, MatvecPlan]
    sampling: SamplePlan

    def is_short(self, pos: int) -> bool:
        """Whether a step at `pos` sees so little that the short attention serves it."""
        visible = min(pos + 1, self.seq_len, self.config.sliding_window or pos + 1)
        return visible <= self.attention.short_max

    def plan(self, kind: str, region: str) -> MatvecPlan:
        """Plan of a weight kernel for the matrix in `region`; gate and up are one kernel, named by the gate's region."""
        regions = {region, region.removesuffix("w1") + "w3"} if kind == "gateup" else {region}
        return self.wide_matvec[kind] if regions & self.wide else self.matvec[kind]


def make_plans(
    config: ModelConfig,
    kv_dtype: KvDtype,
    seq_len: int,
    on_full: FullPolicy,
    arch: str,
    sm_count: int,
    *,
    wide: frozenset[str] = frozenset(),
    attention: Mapping[str, Any] | None = None,
) -> Plans:
    """Choose the geometry of every kernel.

    Parameters
    ----------
    wide
        Regions whose weights are too large for half products.
    attention
        Overrides for `plan_attention`, for experiments; those of the short form begin with ``short_``.
    """
    device = Device.of_arch(arch, sm_count)
    norm = 1 if config.norm_type == "rmsnorm" else 2
    active = max(config.n_experts_active, 1)
    if active > _MOST_EXPERTS:
        raise UnsupportedError(
            f"the model uses {active} experts a token; the CUDA engine takes up to {_MOST_EXPERTS}. Use device='cpu'"
        )

    def plans(is_wide: bool) -> dict[str, MatvecPlan]:
        return {
            kind: plan_matvec(
                kind,
                config.dtype,
                rows * active if kind == "gateup" else rows,
                cols,
                device,
                norm=0 if kind in ("out", "down") else norm,
                kv_dtype=kv_dtype,
                gelu=config.act_type == "gelu",
                wide=is_wide,
                moe=config.is_moe and kind in ("gateup", "down"),
            )
            for kind, (rows, cols) in matrix_shapes(config).items()
        }

    changes = dict(attention or {})
    short = {name.removeprefix("short_"): changes.pop(name) for name in list(changes) if name in _SHORT_CHANGES}
    usual: dict[str, Any] = {"shared_per_sm": device.shared_per_sm, "fill": device.has_pdl}
    return Plans(
        config,
        kv_dtype,
        seq_len,
        on_full,
        plan_attention(config, kv_dtype, sm_count, **usual | changes),
        plan_attention(config, kv_dtype, sm_count, **usual | short, short=True),
        plans(False),
        wide,
        plans(True) if wide else {},
        plan_sampling(config.vocab_size, sm_count, shared_per_block=device.shared_per_block, rehearse=device.has_pdl),
    )


def cache_bytes(config: ModelConfig, kv_dtype: str, seq_len: int) -> int:
    """Bytes of the KV cache."""
    return config.kv_bytes_per_token(kv_dtype) * seq_len


def activation_layout(plans: Plans) -> Layout:
    """Everything a step keeps between its kernels, in one allocation."""
    c = plans.config
    active = max(c.n_experts_active, 1)
    splits, groups = plans.attention.splits, plans.attention.groups

    def floats(n: int) -> int:
        return -(-n // 64) * 64 * 4

    every = [*plans.matvec.values(), *plans.wide_matvec.values()]
    producers = max(embed_grid(c), *(p.grid for p in every))
    return Layout(
        [
            ("state", STATE_WORDS * 4),
            ("params", ctypes.sizeof(SampleParams)),
            ("sampling", SAMPLE_SCRATCH_BYTES),
            ("counters", groups * 4),
            ("x32", floats(c.dim)),
            ("x32b", floats(c.dim) if c.is_parallel else 0),
            ("x16", floats(c.dim) // 2),
            ("part", producers * 8),
            ("q32", floats(c.q_dim)),
            ("o16", floats(c.q_dim) // 2),
            ("h32", active * floats(c.hidden_dim)),
            ("h16", active * floats(c.hidden_dim) // 2),
            ("rope", max(c.rotary_dim // 2, 1) * 8),
            ("frequencies", max(c.rotary_dim // 2, 1) * 8),
            ("router", floats(max(c.n_experts, 1))),
            ("best", producers * 16),
            ("partial", c.n_heads * splits * c.head_dim * 4),
            ("partial_ml", c.n_heads * splits * 8),
            ("logits", floats(c.vocab_size)),
            ("adjusted", floats(c.vocab_size)),
            ("candidates", floats(c.vocab_size)),
            ("history", plans.seq_len * 4),
        ]
    )


@dataclass(frozen=True)
class StepProgram:
    """The launches of a step, and the rows they make in a profile (one each, `collect_stamps` left out)."""

    launches: tuple[Launch, ...]
    kernels: tuple[Kernel, ...]


def build_program(
    plans: Plans,
    compile_kernel: Compile,
    weights: Mapping[str, int],
    work: Mapping[str, int],
    cache: int,
    ending: Ending,
    *,
    short: bool = False,
    host_ring: int = 0,
    stamps: int = 0,
    stamp_level: int = 1,
    stamp_ring: int = 0,
    stamp_serial: int = 0,
    stamp_rows: int = 0,
    stamp_stride: int = 0,
) -> StepProgram:
    """List the launches of one step.

    Parameters
    ----------
    plans
        From `make_plans`.
    compile_kernel
        Turns a specification into a compiled kernel.
    weights, work
        Addresses of the weight regions and of the pieces of `activation_layout`.
    cache
        Address of the KV cache: for each layer its keys, then its values, each [n_kv_heads][seq_len][head_dim].
    ending
        What follows the layers.
    short
        Use the attention kernel for short contexts.
    host_ring
        Address of `HOST_RING` `HostToken` records in pinned memory.
    stamps, stamp_ring, stamp_serial, stamp_rows, stamp_stride
        Where kernels leave their times, and where a last kernel moves them; 0 compiles stamping out.
    stamp_level
        What kernels note (`calmnb.engine.cuda_stamps.StampLevel`).
    """
    c = plans.config
    rows: list[Kernel] = []
    launches: list[Launch] = []
    half_cache = cache_bytes(c, plans.kv_dtype, plans.seq_len) // (2 * c.n_layers)

    def add(spec: KernelSpec, row: Kernel, grid: tuple[int, int], block: int, shared: int, args: Any) -> None:
        if stamps:
            spec = spec.with_defines(CALMNB_STAMPS=stamp_level)
            args.stamp = stamps + 16 * len(rows)
        rows.append(row)
        launches.append(Launch(compile_kernel(spec), grid, block, shared, (args,), dependent=len(launches) > 0))

    def matvec(kind: str, region: str, row: Kernel, **fields: Any) -> MatvecPlan:
        plan = plans.plan(kind, region)
        args = MatvecArgs(
            w0=weights[region], n_part=n_part, eps=c.norm_eps, clip=c.qkv_clip, in_scale=_ACT_SCALE, head_dim=c.head_dim,
            rotary_dim=c.rotary_dim, seq_len=plans.seq_len, q_dim=c.q_dim, kv_dim=c.kv_dim, n_experts=c.n_experts,
            n_active=c.n_experts_active, state=work["state"], delay=plan.geometry.delay,
        )  # fmt: skip
        for name, value in fields.items():
            setattr(args, name, value)
        add(plan.spec, row, (plan.grid, 1), plan.block, plan.smem, args)
        return plan

    rms = c.norm_type == "rmsnorm"
    normed = {"x16": work["x16"] if rms else 0, "x32": work["x32"], "part": work["part"]}
    router_name = _matvec_name(c, "rows")

    # -- embedding
    n_part = embed_grid(c) - 1
    add(
        embed_spec(c),
        Kernel("embed", -1, f"embed_{c.dtype}"),
        (embed_grid(c), 1),
        256,
        0,
        EmbedArgs(
            embedding=weights["embed"], g_next=weights["0.attn_norm"] if rms else 0, frequencies=work["frequencies"],
            x32=work["x32"], x16=work["x16"], part=work["part"], rope=work["rope"], state=work["state"], dim=c.dim,
            half_rotary=c.rotary_dim // 2, factor=c.rope_frequencies()[1],
        ),
    )  # fmt: skip
    if plans.on_full == "roll":
        item = DTYPE_BITS[plans.kv_dtype] // 8
        add(
            sinks_spec(),
            Kernel("embed", -1, "rotate_sinks"),
            (c.n_layers, c.n_kv_heads),
            128,
            0,
            SinkArgs(
                cache=cache, frequencies=work["frequencies"], state=work["state"], layer_bytes=2 * half_cache,
                head_bytes=plans.seq_len * c.head_dim * item, head_dim=c.head_dim, half_rotary=c.rotary_dim // 2,
                fp8=int(plans.kv_dtype == "fp8"),
            ),
        )  # fmt: skip

    # -- layers
    attention = plans.short_attention if short else plans.attention
    for i in range(c.n_layers):
        keys = cache + 2 * i * half_cache
        next_norm = weights[f"{i + 1}.attn_norm" if i + 1 < c.n_layers else "final_norm"]
        matvec(
            "qkv", f"{i}.wqkv", Kernel("matmul_qkv", i, _matvec_name(c, "qkv")), **normed, g=weights[f"{i}.attn_norm"],
            y32=work["q32"], bias=weights.get(f"{i}.bias", 0), rope=work["rope"], kcache=keys, vcache=keys + half_cache,
            rows=c.q_dim + 2 * c.kv_dim, cols=c.dim, q_scale=math.log2(math.e) / math.sqrt(c.head_dim),
        )  # fmt: skip
        add(
            attention.spec,
            Kernel("attention", i, f"attention_{plans.kv_dtype}"),
            (attention.grid, 1),
            attention.block,
            attention.shared,
            AttentionArgs(
                q=work["q32"], k=keys, v=keys + half_cache, out=work["o16"], partial=work["partial"],
                partial_ml=work["partial_ml"], counters=work["counters"], state=work["state"], seq_len=plans.seq_len,
                heads_per_kv=c.n_heads // c.n_kv_heads, groups_per_kv=attention.groups_per_kv, window=c.sliding_window,
                single=attention.single, min_chunk=attention.min_chunk, splits=attention.splits, groups=attention.groups,
                hold_ns=attention.hold_ns,
            ),
        )  # fmt: skip
        # A parallel block leaves the residual in x32 alone until the FFN, which reads it too, is done.
        mid = work["x32b"] if c.is_parallel else work["x32"]
        mlp_norm = weights[f"{i}.attn_norm" if c.is_parallel else f"{i}.mlp_norm"]
        out = matvec(
            "out", f"{i}.wo", Kernel("matmul_attn", i, _matvec_name(c, "residual")), x16=work["o16"], in_scale=1.0,
            y32=mid, y16=work["x16"], res=work["x32"], g_next=mlp_norm if rms else 0,
            part_next=0 if c.is_parallel else work["part"], rows=c.dim, cols=c.q_dim,
        )  # fmt: skip
        if not c.is_parallel:
            n_part = out.grid
        if c.is_moe:
            matvec(
                "router", f"{i}.moegate", Kernel("matmul_ffn_up", i, router_name), **normed, g=mlp_norm, y32=work["router"],
                rows=c.n_experts, cols=c.dim,
            )  # fmt: skip
        matvec(
            "gateup", f"{i}.w1", Kernel("matmul_ffn_up", i, _matvec_name(c, "gateup")), **normed, g=mlp_norm,
            w1=weights[f"{i}.w3"], y32=work["h32"], y16=work["h16"], router=work["router"],
            rows=2 * c.hidden_dim * max(c.n_experts_active, 1), cols=c.dim,
        )  # fmt: skip
        down = matvec(
            "down", f"{i}.w2", Kernel("matmul_ffn_down", i, _matvec_name(c, "residual")), x16=work["h16"], x32=work["h32"],
            y32=work["x32"], y16=work["x16"], res=mid, g_next=next_norm if rms else 0, part_next=work["part"],
            router=work["router"], rows=c.dim, cols=c.hidden_dim,
        )  # fmt: skip
        n_part = down.grid

    # -- what follows
    if ending != "none":
        region = "output" if "output" in weights else "embed"
        logits = matvec(
            "logits", region, Kernel("output", -1, _matvec_name(c, "rows")), **normed, g=weights["final_norm"],
            y32=work["logits"], best=work["best"], rows=c.vocab_size, cols=c.dim,
        )  # fmt: skip
    if ending in ("greedy", "draw"):
        s = plans.sampling
        args = SampleArgs(
            **{n: work[n] for n in ("logits", "best", "adjusted", "candidates", "params", "state", "history")},
            scratch=work["sampling"], host_ring=host_ring, vocab=c.vocab_size, n_best=logits.grid, history_cap=plans.seq_len,
            host_cap=HOST_RING, rehearse=int(s.rehearse),
        )  # fmt: skip
        maximum, draw = sample_specs()
        if ending == "greedy":
            add(maximum, Kernel("sample", -1, "sample_max"), (s.blocks, 1), s.block, s.max_shared, args)
        else:
            add(draw, Kernel("sample", -1, "sample_draw"), (s.blocks, 1), s.block, s.draw_shared, args)
    if stamps:
        collect = CollectArgs(
            stamps=stamps, ring=stamp_ring, serial=stamp_serial, n=len(rows), rows=stamp_rows, stride=stamp_stride,
            state=work["state"],
        )  # fmt: skip
        launches.append(Launch(compile_kernel(collect_spec()), (1, 1), 256, 0, (collect,)))
    return StepProgram(tuple(launches), tuple(rows))


def _matvec_name(config: ModelConfig, kind: str) -> str:
    return f"matvec_{kind}_{config.dtype}"


#: Bytes of the ring of sampled tokens.
HOST_RING_BYTES = HOST_RING * ctypes.sizeof(HostToken)
