"""The weight kernels against NumPy in float64, at sizes astride lane, warp, ring and block edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.short import fewer

pytestmark = pytest.mark.gpu

# Half activations and half2 sums of 16 bytes: a few roundings of 2^-11 in quadrature. gf4 sums codes 0..7 and takes 4
# times the sum of x off, which doubles what is rounded; gate times up adds two such errors.
TOLERANCE = {"fp16": 2e-3, "fp8": 2e-3, "gf4": 3e-3}
KV_TOLERANCE = {"fp16": 2e-3, "fp8": 0.09}  # E5M2 has a 2-bit mantissa: 1/8 at worst, ~0.07 rms
DTYPES = ("fp16", "fp8", "gf4")


@pytest.fixture(scope="module")
def gpu() -> Any:
    from tests.gpu.launcher import Launcher

    return Launcher()


def verify(gpu: Any, kind: str, dtype: str, rows: int, cols: int, **options: Any) -> None:
    from tests.gpu.matvec_case import MatvecCase

    case = MatvecCase(gpu, kind, dtype, rows, cols, **options)
    first = case.run()
    for name, error in case.errors(first).items():
        limit = KV_TOLERANCE[case.kv_dtype] if name in ("kcache", "vcache") else TOLERANCE[dtype]
        assert error < limit, f"{kind} {dtype} {rows}x{cols} {options}: {name} is off by {error:.2e} (limit {limit})"
    for pdl in (True, False):
        again = case.run(pdl=pdl)
        for name, value in first.items():
            assert value.tobytes() == again[name].tobytes(), f"{name} differs between runs (pdl={pdl})"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [32, 64, 96, 256, 480, 512, 544, 576, 1024, 1504, 2048, 4064, 4096, 4128, 8192, 11008, 14336])
def test_rows_of_every_length(gpu: Any, dtype: str, cols: int) -> None:
    verify(gpu, "logits", dtype, 291, cols, seed=cols)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 31, 131, 132, 133, 263, 1055, 4224, 33001])
def test_any_number_of_rows(gpu: Any, dtype: str, rows: int) -> None:
    verify(gpu, "logits", dtype, rows, 576, seed=rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [8, 24, 40, 520, 1544, 40960])
def test_rows_that_the_fast_path_does_not_take(gpu: Any, dtype: str, cols: int) -> None:
    verify(gpu, "logits", dtype, 133, cols, seed=cols)
    verify(gpu, "down", dtype, 65, cols, seed=cols)


@pytest.mark.parametrize("cols", [1, 3, 33, 577])
@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_odd_columns(gpu: Any, dtype: str, cols: int) -> None:
    verify(gpu, "logits", dtype, 77, cols, seed=cols)
    verify(gpu, "out", dtype, 77, cols, seed=cols)
    verify(gpu, "gateup", dtype, 154, cols, seed=cols)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "head_dim", "heads", "kv_heads"),
    [(64, 16, 2, 1), (576, 64, 9, 3), (2048, 64, 32, 8), (4096, 128, 32, 8), (1024, 256, 5, 1)],
)
def test_qkv(gpu: Any, dtype: str, dim: int, head_dim: int, heads: int, kv_heads: int) -> None:
    rows = (heads + 2 * kv_heads) * head_dim
    options = {"head_dim": head_dim, "n_kv_heads": kv_heads}
    verify(gpu, "qkv", dtype, rows, dim, **options)
    verify(gpu, "qkv", dtype, rows, dim, kv_dtype="fp8", bias=True, clip=0.5, rotary_dim=head_dim // 2, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "hidden"), [(32, 64), (576, 1536), (2048, 8192), (4096, 11008), (4096, 14336)])
def test_ffn(gpu: Any, dtype: str, dim: int, hidden: int) -> None:
    rows = min(hidden, 1500)
    verify(gpu, "gateup", dtype, 2 * rows, dim)
    verify(gpu, "gateup", dtype, 2 * rows, dim, gelu=True)
    rows = min(dim, 700)
    verify(gpu, "down", dtype, rows, hidden)
    verify(gpu, "down", dtype, rows, hidden, in_place=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "q_dim"), [(32, 64), (576, 576), (2048, 2048), (4096, 4096), (3072, 4096)])
def test_out(gpu: Any, dtype: str, dim: int, q_dim: int) -> None:
    verify(gpu, "out", dtype, min(dim, 900), q_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [32, 520, 576, 4096])
def test_layer_norm(gpu: Any, dtype: str, cols: int) -> None:
    verify(gpu, "logits", dtype, 133, cols, norm=2)
    verify(gpu, "gateup", dtype, 266, cols, norm=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("massive", [7000.0, 3e5, 1e12])
def test_massive_activations_do_not_overflow(gpu: Any, dtype: str, massive: float) -> None:
    verify(gpu, "gateup", dtype, 2 * 1536, 2048, massive=massive)
    if massive < 1e9:
        verify(gpu, "down", dtype, 576, 1536, massive=massive)
        verify(gpu, "logits", dtype, 133, 520, massive=massive)


@pytest.mark.parametrize("kind", ["qkv", "out", "gateup", "down", "logits"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_generic_kernel(gpu: Any, dtype: str, kind: str) -> None:
    options = {"head_dim": 64, "n_kv_heads": 3} if kind == "qkv" else {}
    verify(gpu, kind, dtype, 960, 576, wide=True, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "active"), [(4, 2), (8, 2), (128, 8), (3, 3)])
@pytest.mark.parametrize("wide", [False, True])
def test_experts(gpu: Any, dtype: str, experts: int, active: int, wide: bool) -> None:
    verify(gpu, "gateup", dtype, 2 * 96 * active, 256, moe=(experts, active), wide=wide)
    verify(gpu, "down", dtype, 200, 96, moe=(experts, active), wide=wide)
    verify(gpu, "router", dtype, experts, 256, wide=wide)


def test_stamps_enclose_the_kernel(gpu: Any) -> None:
    from tests.gpu.matvec_case import MatvecCase

    case = MatvecCase(gpu, "gateup", "fp8", 2 * 8192, 2048, stamps=True)
    case.run()
    start, end = (int(v) for v in gpu.cupy.asnumpy(case.stamp))
    assert 500 < end - start < fewer(10**9, 60 * 10**9), f"{end - start} ns"
    assert np.isfinite(case.run()["y32"]).all()
