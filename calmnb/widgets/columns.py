"""Tables for the browser: columns of numbers as one block of bytes, and a short description of what lies where.

A million numbers as JSON take a browser seconds to read and a notebook file megabytes to keep. As bytes they are typed
arrays at once. ``static/columns.js`` is the other end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["FORMATS", "Layout", "frame_columns", "pack_columns", "pack_texts", "unpack_columns"]

#: Number formats that both ends know: NumPy's kind and size, little-endian.
FORMATS = ("f4", "f8", "i2", "i4", "u1", "u2", "u4")

#: ``[name, format, byte offset, count]`` of each column.
Layout = list[list[Any]]


def pack_columns(columns: Mapping[str, NDArray[Any]]) -> tuple[Layout, bytes]:
    """Put columns one behind the other.

    Parameters
    ----------
    columns : mapping of name to 1-D array
        Of a dtype in `FORMATS`. Lengths may differ.

    Returns
    -------
    layout : list of [name, format, byte offset, count]
        JSON data.
    data : bytes
        Each column starts at a multiple of 8.
    """
    layout: Layout = []
    parts: list[bytes] = []
    at = 0
    for name, values in columns.items():
        form = f"{values.dtype.kind}{values.dtype.itemsize}"
        if form not in FORMATS or values.ndim != 1:
            raise TypeError(f"column {name!r} is {values.dtype} with {values.ndim} dimensions; accepted are 1-D {FORMATS}")
        data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
        layout.append([name, form, at, len(values)])
        parts += [data, b"\0" * (-len(data) % 8)]
        at += len(data) + len(parts[-1])
    return layout, b"".join(parts)


def unpack_columns(layout: Layout, data: bytes) -> dict[str, NDArray[Any]]:
    """Undo `pack_columns`."""
    return {name: np.frombuffer(data, f"<{form}", count, offset) for name, form, offset, count in layout}


def pack_texts(texts: Sequence[str]) -> tuple[NDArray[np.uint32], bytes]:
    """Put texts one behind the other.

    Returns
    -------
    ends : uint32 (n,)
        Where each text ends in `data`, in bytes.
    data : bytes
        UTF-8; what cannot be encoded (half a surrogate pair) is replaced.
    """
    encoded = [text.encode("utf-8", "replace") for text in texts]
    return np.cumsum([len(part) for part in encoded], dtype=np.uint32), b"".join(encoded)


def frame_columns(frame: pd.DataFrame) -> tuple[dict[str, NDArray[Any]], dict[str, list[str]]]:
    """Columns of a data frame as numbers.

    Returns
    -------
    columns : dict of arrays
        Numbers and booleans as float64; texts as int32 codes.
    labels : dict of list of str
        What the codes mean, for the columns that hold texts.
    """
    columns: dict[str, NDArray[Any]] = {}
    labels: dict[str, list[str]] = {}
    for name in map(str, frame.columns):
        values = frame[name]
        if values.dtype.kind in "biuf":
            columns[name] = values.to_numpy(np.float64)
            continue
        category = pd.Categorical(values.astype(object))
        columns[name] = category.codes.astype(np.int32)
        labels[name] = [str(label) for label in category.categories]
    return columns, labels
