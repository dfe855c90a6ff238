"""What the weight kernels compute, without a GPU: their source runs on the CPU through ``tests/emulator``.

The same cases as ``tests/gpu/test_matvec.py``, on a device of three multiprocessors so that few rows fill many batches.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from calmnb.engine.cuda_matvec import Geometry
from tests.emulator.launcher import EmulatedLauncher
from tests.gpu.matvec_case import MatvecCase

pytestmark = [
    pytest.mark.beside,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to run kernels on the CPU"),
]

# Half activations and half2 sums of 16 bytes: a few roundings of 2^-11 in quadrature. gf4 sums codes 0..7 and takes 4
# times the sum of x off, which doubles what is rounded; gate times up adds two such errors.
TOLERANCE = {"fp16": 2e-3, "fp8": 2e-3, "gf4": 3e-3}
KV_TOLERANCE = {"fp16": 2e-3, "fp8": 0.09}
DTYPES = ("fp16", "fp8", "gf4")


@pytest.fixture
def gpu(emulated: EmulatedLauncher) -> EmulatedLauncher:
    return emulated


def verify(gpu: EmulatedLauncher, kind: str, dtype: str, rows: int, cols: int, **options: Any) -> MatvecCase:
    case = MatvecCase(gpu, kind, dtype, rows, cols, **options)  # type: ignore[arg-type]
    first = case.run()
    for name, error in case.errors(first).items():
        limit = KV_TOLERANCE[case.kv_dtype] if name in ("kcache", "vcache") else TOLERANCE[dtype]
        assert error < limit, f"{kind} {dtype} {rows}x{cols} {options}: {name} is off by {error:.2e} (limit {limit})"
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [32, 96, 512, 1056, 2048, 11008])
def test_rows_of_every_length(gpu: EmulatedLauncher, dtype: str, cols: int) -> None:
    case = verify(gpu, "logits", dtype, 20, cols, seed=cols)
    assert not case.plan.wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 193, 1601])
def test_any_number_of_rows(gpu: EmulatedLauncher, dtype: str, rows: int) -> None:
    verify(gpu, "logits", dtype, rows, 96, seed=rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_widest_block(gpu: EmulatedLauncher, dtype: str) -> None:
    case = verify(gpu, "down", dtype, 22, 14336)
    assert case.plan.block == 448


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_group_and_stage_shape(gpu: EmulatedLauncher, dtype: str) -> None:
    chunks = 2 if dtype == "fp16" else 1
    for geometry in (Geometry(256, 2, chunks, 8, 2, 3, 1), Geometry(96, 3, 2, 8, 8, 2, 2)):
        cols = {"fp16": 8, "fp8": 16, "gf4": 32}[dtype] * 32 * geometry.warps_per_row * geometry.chunks
        verify(gpu, "gateup", dtype, 2 * 43, cols, geometry=geometry)
        verify(gpu, "qkv", dtype, 64, cols - 64, geometry=geometry, head_dim=16, n_kv_heads=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [8, 40, 1544])
def test_rows_that_the_fast_path_does_not_take(gpu: EmulatedLauncher, dtype: str, cols: int) -> None:
    if cols * {"fp16": 16, "fp8": 8, "gf4": 4}[dtype] % 128:
        assert verify(gpu, "logits", dtype, 13, cols).plan.wide
        verify(gpu, "out", dtype, 13, cols)


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_odd_columns(gpu: EmulatedLauncher, dtype: str) -> None:
    verify(gpu, "gateup", dtype, 26, 33)
    verify(gpu, "down", dtype, 13, 577, in_place=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv(gpu: EmulatedLauncher, dtype: str) -> None:
    verify(gpu, "qkv", dtype, 10 * 32, 256, head_dim=32, n_kv_heads=2)
    verify(gpu, "qkv", dtype, 5 * 64, 576, head_dim=64, n_kv_heads=1, kv_dtype="fp8", bias=True, clip=0.5, rotary_dim=16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_layer_norm(gpu: EmulatedLauncher, dtype: str) -> None:
    verify(gpu, "gateup", dtype, 2 * 21, 512, norm=2, gelu=True)
    verify(gpu, "logits", dtype, 21, 520, norm=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("massive", [7000.0, 1e12])
def test_massive_activations_do_not_overflow(gpu: EmulatedLauncher, dtype: str, massive: float) -> None:
    verify(gpu, "gateup", dtype, 2 * 30, 1024, massive=massive)
    if massive < 1e9:
        verify(gpu, "down", dtype, 30, 1024, massive=massive)
        verify(gpu, "out", dtype, 30, 1024, massive=massive)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "active"), [(8, 2), (70, 8), (3, 3)])
@pytest.mark.parametrize("wide", [False, True])
def test_experts(gpu: EmulatedLauncher, dtype: str, experts: int, active: int, wide: bool) -> None:
    verify(gpu, "gateup", dtype, 2 * 12 * active, 96, moe=(experts, active), wide=wide)
    verify(gpu, "down", dtype, 31, 96, moe=(experts, active), wide=wide)


def test_a_block_more_than_rows_writes_nothing(gpu: EmulatedLauncher) -> None:
    case = MatvecCase(gpu, "logits", "fp8", 4, 64)  # type: ignore[arg-type]
    assert case.plan.grid == 4
    verify(gpu, "router", "fp8", 4, 64)
