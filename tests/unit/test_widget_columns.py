"""Columns of numbers on their way to the browser, and the one module that a widget's files are joined into."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from calmnb.widgets import ChatWidget, CompareView, KernelTable, ProfileView
from calmnb.widgets.columns import FORMATS, frame_columns, pack_columns, pack_texts, unpack_columns

STATIC = Path(__file__).parents[2] / "calmnb" / "widgets" / "static"


@given(
    st.lists(
        st.sampled_from(FORMATS).flatmap(lambda f: arrays(f, array_shapes(max_dims=1, min_side=0, max_side=9))), max_size=5
    )
)
def test_columns_come_back_as_they_were_and_aligned(columns: list[np.ndarray]) -> None:
    named = {f"c{i}": values for i, values in enumerate(columns)}
    layout, data = pack_columns(named)
    assert all(offset % 8 == 0 for _, _, offset, _ in layout)
    for name, values in unpack_columns(layout, data).items():
        np.testing.assert_array_equal(values, named[name])


def test_a_column_that_the_browser_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="'c' is int64"):
        pack_columns({"c": np.arange(3)})
    with pytest.raises(TypeError, match="2 dimensions"):
        pack_columns({"c": np.zeros((2, 2), np.float32)})


@given(st.lists(st.text()))
def test_texts_come_back(texts: list[str]) -> None:
    ends, data = pack_texts(texts)
    starts = [0, *ends.tolist()]
    assert [data[a:b].decode() for a, b in zip(starts, ends.tolist(), strict=False)] == [
        text.encode("utf-8", "replace").decode() for text in texts
    ]


def test_a_frame_becomes_numbers_and_labels() -> None:
    frame = pd.DataFrame(
        {"n": [1, 2], "x": [0.5, np.nan], "on": [True, False], "s": ["b", "a"], "c": pd.Categorical(["u", "v"])}
    )
    columns, labels = frame_columns(frame)
    assert {name: values.dtype.kind for name, values in columns.items()} == {"n": "f", "x": "f", "on": "f", "s": "i", "c": "i"}
    assert [labels["s"][code] for code in columns["s"]] == ["b", "a"]
    assert [labels["c"][code] for code in columns["c"]] == ["u", "v"]


@pytest.mark.parametrize("widget", [ChatWidget, CompareView, KernelTable, ProfileView])
def test_joined_files_declare_no_name_twice_and_import_nothing(widget: type) -> None:
    code = widget._esm  # type: ignore[attr-defined]
    code = code if isinstance(code, str) else str(code)
    names = re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
    assert not re.search(r"^import ", code, re.MULTILINE)
    assert len(re.findall(r"^export default", code, re.MULTILINE)) == 1


def test_every_import_is_of_something_the_other_file_exports() -> None:
    for path in STATIC.glob("*.js"):
        for wanted, source in re.findall(r'^import \{([^}]*)\} from "\./([\w.-]+)";', path.read_text(), re.MULTILINE):
            exported = re.findall(
                r"^export (?:async )?(?:function|class|const) (\w+)", (STATIC / source).read_text(), re.MULTILINE
            )
            missing = {name.strip() for name in wanted.split(",")} - set(exported)
            assert not missing, f"{path.name} wants {missing} of {source}"


def test_no_text_becomes_markup() -> None:
    for path in STATIC.glob("*.js"):
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(", path.read_text())
        assert not found, f"{path.name}: {found}"
