"""The lesson's kernels on a GPU: right at awkward sizes, same bits every run, and the order of their speeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from calmnb import one_kernel
from calmnb.one_kernel import VERSIONS, Layer, Version
from tests.gpu.short import fewer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    device = one_kernel.open_gpu()
    yield device
    device.close()


def run(gpu: Any, versions: Any, rows: int, cols: int, **options: Any) -> Any:
    settings = {"cached": None, "repeats": fewer(3, 1), "arena_bytes": fewer(1 << 20, 1), "peak_gb_per_s": 1000.0, **options}
    return one_kernel.measure(gpu, layers=[Layer(f"{rows} x {cols}", rows, cols)], versions=versions, **settings)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.number}")
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (7, 96), (133, 1056), (4097, 4128), (1055, 8192), (263, 14336)])
def test_every_version_computes_the_product(gpu: Any, version: Version, rows: int, cols: int) -> None:
    table = run(gpu, [version], rows, cols)  # checks y against float64 before and after timing
    assert len(table) == (1 if gpu.has_pdl or not version.dependent else 0)
    assert (table["us"] > 0).all()


@pytest.mark.parametrize("cols", [1, 3, 33, 577])
def test_the_plain_versions_take_any_number_of_columns(gpu: Any, cols: int) -> None:
    run(gpu, VERSIONS[:2], 1000, cols)


@pytest.mark.parametrize("cols", [8, 520, 1544])
def test_rows_that_end_in_the_middle_of_a_warp(gpu: Any, cols: int) -> None:
    run(gpu, VERSIONS[:7], 261, cols)


def test_each_idea_helps_where_the_lesson_says_so(gpu: Any) -> None:
    table = one_kernel.measure(gpu, layers=one_kernel.LAYERS[:1], cached=None, repeats=20)
    rate = table.set_index("version")["gb_per_s"]
    assert rate[1] > 2 * rate[0], "neighbouring lanes read neighbouring weights"
    assert rate[4] > rate[1], "more bytes in flight"
    assert rate[6] > rate[1]
    us = table.set_index("version")["us"]
    assert us[9] < 0.7 * us[6], "fp8 moves half the bytes"
    assert us[12] < us[11], "codes as halves take fewer instructions"
    assert (table["percent_datasheet"].dropna() < 100).all(), "faster than the memory: something was not read"
