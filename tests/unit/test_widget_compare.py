"""CompareView and KernelTable without a browser."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calmnb.errors import ConfigError
from calmnb.profile import Session, compare
from calmnb.widgets import CompareView, KernelTable
from calmnb.widgets.columns import unpack_columns
from calmnb.widgets.kernel_table import TABLES
from tests.profile_fakes import SMOL, noisy_recorder

ATTACK = "<img src=x onerror=alert(1)></script>"


@pytest.fixture(scope="module")
def fp8() -> Session:
    return noisy_recorder(SMOL, tokens=40).session()


@pytest.fixture(scope="module")
def gf4() -> Session:
    return noisy_recorder(dataclasses.replace(SMOL, dtype="gf4"), tokens=40, seed=1, model=ATTACK).session()


@pytest.mark.parametrize("by", ["stage", "kernel", "layer"])
def test_the_tables_are_those_of_compare(fp8: Session, gf4: Session, by: str) -> None:
    view = CompareView(fp8, gf4)
    made = view.info["tables"][by]
    columns = unpack_columns(made["layout"], view.data)
    expected = compare(fp8, gf4, by=["layer", "stage"] if by == "layer" else by).table
    assert made["rows"] == len(expected)
    np.testing.assert_array_equal(columns["difference_us"], expected["difference_us"])
    assert [made["labels"]["stage"][code] for code in columns["stage"]] == expected["stage"].tolist()
    assert [made["labels"]["verdict"][code] for code in columns["verdict"]] == expected["verdict"].tolist()


def test_header_settings_and_rooflines(fp8: Session, gf4: Session) -> None:
    info = CompareView(fp8, gf4, labels=("before", "after")).info
    json.dumps(info, allow_nan=False)
    assert info["labels"] == ["before", "after"]
    assert info["total"]["verdict"] == "faster"
    assert ["weights", "fp8", "gf4"] in info["settings"]
    for side, session in zip(info["points"], (fp8, gf4), strict=True):
        whole = next(point for point in side if point["stage"] == "")
        settled = session.steps[(session.steps["phase"] == "decode") & ~session.steps["warmup"]]
        assert whole["bytes"] == settled["bytes_min"].sum()
        assert whole["time"] == pytest.approx(settled["duration_s"].sum())
        assert all(0 < point["share"] <= 1 for point in side)


def test_few_steps_have_no_interval_and_the_state_stays_json() -> None:
    short = noisy_recorder(SMOL, tokens=4).session()
    info = CompareView(short, short).info
    assert info["total"]["low_us"] is None
    assert any("too few" in note for note in info["notes"])
    json.dumps(info, allow_nan=False)


def test_a_comparison_needs_sessions(fp8: Session, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CompareView shows a Session; got a int"):
        CompareView(fp8, 3)  # type: ignore[arg-type]
    path = fp8.save(tmp_path / "a.calmprof")
    assert CompareView(path, fp8).info["total"]["verdict"] == "no difference shown"


def test_the_static_view_is_escaped(fp8: Session, gf4: Session) -> None:
    for widget in (CompareView(fp8, gf4), KernelTable(gf4)):
        html = widget.static_html()
        assert "&lt;img" in html
        assert "<img" not in html
        assert "matvec_gf4" in html or "matmul_ffn_up" in html


@pytest.mark.parametrize("table", list(TABLES))
def test_every_table_is_sent_whole(fp8: Session, table: str) -> None:
    view = KernelTable(fp8, table)
    columns = unpack_columns(view.info["layout"], view.data)
    assert list(columns) == list(view.frame.columns)
    assert all(len(values) == len(view.frame) == view.info["rows"] for values in columns.values())
    for name, values in columns.items():
        if name not in view.info["labels"]:
            np.testing.assert_array_equal(values, view.frame[name].to_numpy(float))
    assert view.info["help"].keys() <= columns.keys()
    assert len(json.dumps(view.info, allow_nan=False)) < 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "rows"}, "accepted are stages, layers, kernels"),
        ({"height": 3}, "at least 120 pixels"),
        ({"peak": "best"}, "accepted are"),
    ],
)
def test_wrong_arguments_are_explained(fp8: Session, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KernelTable(fp8, **arguments)
