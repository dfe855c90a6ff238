"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from calmnb.errors import CalmnbError

__all__ = ["replacing", "write_text"]


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there takes `path`'s name when the block ends well.

    However the block ends, a Ctrl-C included, nothing half-written is left and what stood at `path` before is not harmed.

    Raises
    ------
    CalmnbError
        In place of an OSError: a missing or read-only folder, a full disk.
    """
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise CalmnbError(f"{path} cannot be written: {error.strerror or error}; choose another folder") from error
    finally:
        with suppress(OSError):  # it has its new name, or its folder never was
            temporary.unlink()


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text, whole or not at all, and return its path; errors as for `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)
