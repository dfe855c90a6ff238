"""Geometry of the weight kernels: what must fit together, and that Python and CUDA agree on the arguments."""

from __future__ import annotations

import ctypes
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calmnb.config import DTYPE_BITS, ModelConfig
from calmnb.engine.cuda_matvec import Device, MatvecArgs, MatvecKind, MatvecPlan, default_geometry, matrix_shapes, plan_matvec
from calmnb.kernels import kernels_dir

SHAPES = {  # dim, hidden, q_dim, kv_dim, vocab
    "llama-1b": (2048, 8192, 2048, 512, 128256),
    "mistral-7b": (4096, 14336, 4096, 1024, 32000),
    "llama2-7b": (4096, 11008, 4096, 4096, 32000),
    "smollm2-135m": (576, 1536, 576, 192, 49152),
}
H200 = Device.of_arch("sm_90")


def step_plans(shape: str, dtype: str, device: Device = H200) -> dict[str, MatvecPlan]:
    dim, hidden, q_dim, kv_dim, vocab = SHAPES[shape]
    sizes = {
        "qkv": (q_dim + 2 * kv_dim, dim),
        "out": (dim, q_dim),
        "gateup": (2 * hidden, dim),
        "down": (dim, hidden),
        "logits": (vocab, dim),
    }
    return {
        kind: plan_matvec(kind, dtype, rows, cols, device, norm=int(kind not in ("out", "down")))  # type: ignore[arg-type]
        for kind, (rows, cols) in sizes.items()
    }


def test_argument_struct_matches_the_header() -> None:
    text = (kernels_dir() / "matvec.cuh").read_text()
    body = re.search(r"struct MatvecArgs \{(.*?)\n\};", text, re.DOTALL)
    assert body is not None
    names, sizes = [], []
    for line in body.group(1).splitlines():
        declaration = line.split("//")[0].strip().rstrip(";")
        if not declaration:
            continue
        kind, rest = re.match(r"((?:const )?\w+\*?)\s+(.*)", declaration).groups()  # type: ignore[union-attr]
        for name in rest.split(","):
            names.append(name.strip())
            sizes.append(8 if kind.endswith("*") else 4)
    assert names == [field[0] for field in MatvecArgs._fields_]
    assert sizes == [ctypes.sizeof(field[1]) for field in MatvecArgs._fields_]


@pytest.mark.parametrize("dtype", DTYPE_BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_neighbours_and_attention_fit_a_multiprocessor(shape: str, dtype: str) -> None:
    """Else their blocks pile up: measured, 1.2 to 1.6 times the time of a step (kernels/NOTES.md)."""
    plans = step_plans(shape, dtype)
    order = ("qkv", "out", "gateup", "down")

    def quarter(plan: MatvecPlan) -> int:
        warps = -(-plan.block // 32 // 4)
        return warps * -(-plan.geometry.max_registers // 8) * 8

    for before, after in zip(order, (*order[1:], order[0]), strict=True):
        a, b = plans[before], plans[after]
        beside_attention = 128 if "qkv" in (before, after) else 0
        assert quarter(a) + quarter(b) + beside_attention <= 512, (before, after)
        assert a.smem + b.smem + 2048 <= H200.shared_per_sm, (before, after)
        assert a.smem + b.smem + min(a.smem, b.smem) + 3072 > H200.shared_per_sm, "three would fit"
    for kind in order:
        assert plans[kind].grid == H200.sm_count


@pytest.mark.parametrize("dtype", DTYPE_BITS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_shared_memory_fits_one_block(arch: str, dtype: str) -> None:
    device = Device.of_arch(arch)
    for plan in step_plans("mistral-7b", dtype, device).values():
        assert plan.smem <= device.shared_per_block
        assert plan.block <= 1024


@given(
    cols=st.integers(1, 5000).map(lambda n: 8 * n),
    rows=st.integers(1, 3000),
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    arch=st.sampled_from(["sm_80", "sm_89", "sm_90"]),
)
def test_a_geometry_covers_its_row(cols: int, rows: int, dtype: str, arch: str) -> None:
    device = Device.of_arch(arch)
    geometry = default_geometry("down", dtype, rows, cols, device)
    row_bits = cols * DTYPE_BITS[dtype]
    plan = plan_matvec("down", dtype, rows, cols, device)
    assert 1 <= plan.grid <= min(rows, device.sm_count * 2)
    assert plan.smem <= device.shared_per_block
    if plan.wide:
        assert row_bits % 128 or cols > 16384
        return
    assert geometry is not None
    assert 32 * geometry.warps_per_row * geometry.chunks >= row_bits // 128
    assert geometry.threads % (32 * geometry.warps_per_row) == 0
    assert geometry.batch % geometry.stage_rows == 0
    tile = dict(plan.spec.defines)["K_TILE"]
    assert isinstance(tile, int)
    assert tile % (geometry.batch * geometry.threads // 32 // geometry.warps_per_row) == 0


def test_rows_that_are_not_16_bytes_take_the_generic_kernel() -> None:
    assert plan_matvec("out", "fp16", 64, 577, H200).wide
    assert plan_matvec("out", "gf4", 64, 520, H200).wide
    assert not plan_matvec("out", "gf4", 64, 544, H200).wide


def test_large_weights_take_the_generic_kernel_when_asked() -> None:
    assert plan_matvec("out", "fp16", 64, 576, H200, wide=True).wide


@pytest.mark.parametrize("kind", ["gateup", "down"])
def test_what_was_measured_on_hopper_stays_there(kind: MatvecKind) -> None:
    rows, cols = {"gateup": (28672, 4096), "down": (4096, 14336)}[kind]
    small, large = (plan_matvec(kind, "gf4", rows, cols, Device.of_arch(arch)) for arch in ("sm_120", "sm_90"))
    assert 2 * small.smem <= 100 * 1024 < 2 * large.smem, "two neighbours fit a multiprocessor"


def test_no_dependent_launch_before_hopper() -> None:
    arches = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
    assert [Device.of_arch(arch).has_pdl for arch in arches] == [False, False, False, True, True]


def test_shapes_of_a_mixture_have_a_router() -> None:
    config = ModelConfig(
        arch="mixtral", dtype="fp8", dim=4096, hidden_dim=14336, head_dim=128, n_layers=2, n_heads=32, n_kv_heads=8,
        vocab_size=32000, n_experts=8, n_experts_active=2,
    )  # fmt: skip
    shapes = matrix_shapes(config)
    assert shapes["router"] == (8, 4096)
    assert shapes["qkv"] == (6144, 4096)
    assert "router" not in matrix_shapes(config.replace(n_experts=0, n_experts_active=0))
