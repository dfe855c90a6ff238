"""Files are written whole or not at all, and what stood there before survives a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from calmnb.errors import CalmnbError
from calmnb.files import replacing, write_text


def test_text_is_written_in_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "chat.md"
    path.write_text("old")
    assert write_text(path, "new é") == path
    assert path.read_text(encoding="utf-8") == "new é"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failure_leaves_the_old_file_and_nothing_else(failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "chat.md"
    path.write_text("old")
    expected = CalmnbError if isinstance(failure, OSError) else KeyboardInterrupt

    def half_of_it() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(expected):
        half_of_it()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["absent/chat.md", "file/chat.md", "."])
def test_a_place_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(CalmnbError, match="cannot be written"):
        write_text(tmp_path / name, "x")
