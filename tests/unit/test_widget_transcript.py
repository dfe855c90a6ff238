"""Conversations as files and static HTML: nothing a model says becomes markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calmnb.widgets.transcript import Message, pack_tokens, to_html, to_json, to_markdown, utf16_length

INFO = {"model": "m<b>", "dtype": "fp8", "device": "CPU & co", "peak_label": "10 GB/s (measured)"}
ATTACK = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    return tags


@pytest.mark.parametrize("where", ["user", "assistant", "error", "system"])
def test_an_attack_stays_text(where: str) -> None:
    message = Message("assistant", "x", "error", ATTACK) if where == "error" else Message(where, ATTACK)  # type: ignore[arg-type]
    html = to_html([message], INFO, {}, ATTACK if where == "system" else "")
    tags = parsed(html)
    assert set(tags.tags) <= {"div", "b", "span"}
    assert set(tags.attributes) <= {"class", "style"}
    assert ATTACK in tags.text


@given(st.text())
def test_any_text_survives_as_text(text: str) -> None:
    clean = text.replace("\r", " ")
    tags = parsed(to_html([Message("assistant", clean)], {}, {}))
    assert set(tags.tags) <= {"div", "b", "span"}
    assert clean in tags.text


def test_headline_and_stages_are_in_the_static_view() -> None:
    summary = {"tok_per_s": 64.6, "gb_per_s": 8.8, "of_peak": 0.53, "ms": 15.5}
    summary["stages"] = [{"stage": "matmul_ffn_up", "share": 0.4, "us": 6200.0}]  # type: ignore[assignment]
    text = parsed(to_html([], INFO, summary)).text
    for words in ("64.6 tok/s", "8.8 GB/s", "53% of 10 GB/s (measured)", "ffn up 6.20 ms (40%)"):
        assert words in text


@given(st.text(alphabet="`a\n~ ", max_size=40))
def test_a_fence_of_the_model_cannot_end_ours(text: str) -> None:
    lines = to_markdown([Message("assistant", text)], {}, "").split("\n")
    opening = next(i for i, line in enumerate(lines) if line.endswith("`text"))
    fence = lines[opening].removesuffix("text")
    closing = [i for i, line in enumerate(lines) if i > opening and line == fence]
    assert len(closing) == 1
    assert "\n".join(lines[opening + 1 : closing[0]]) == text


def test_json_holds_what_was_said() -> None:
    data = json.loads(to_json([Message("user", "hé 👋"), Message("assistant", ATTACK, "stopped")], INFO, "brief"))
    assert [m["content"] for m in data["messages"]] == ["hé 👋", ATTACK]
    assert data["messages"][1]["state"] == "stopped"
    assert data["system"] == "brief"


@given(st.text())
def test_utf16_length_is_javascripts(text: str) -> None:
    assert utf16_length(text) == len(text.encode("utf-16-le", "surrogatepass")) // 2


def test_tokens_of_all_messages_in_one_table() -> None:
    messages = [Message("user", "q"), Message("assistant", "ab", tokens=[(1, 15.0, 8.0, 4, 7), (1, float("nan"), 8.0, 5, 9)])]
    table = pack_tokens(messages)
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, [[1, 1, 15, 8, 4, 7], [1, 1, np.nan, 8, 5, 9]])
    assert pack_tokens([]).shape == (0, 6)
