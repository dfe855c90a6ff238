"""Slow, literal versions of what calmnb does fast, for tests to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def gf4_word(group: Sequence[float]) -> int:
    """One gf4 word, following SPEC_calm.md 2.2 step by step on scalars."""
    import ml_dtypes

    x = [np.float32(value) for value in group]
    largest = x[0]
    for value in x[1:]:
        if abs(value) > abs(largest):
            largest = value
    scale = np.array([largest], np.float32).astype(ml_dtypes.float8_e5m2)
    word = int(scale.view(np.uint8)[0])
    s = np.float32(scale.astype(np.float32)[0])
    for place, value in enumerate(x):
        with np.errstate(all="ignore"):
            q = value / s
        if not np.isfinite(q):
            q = np.float32(0)
        y = np.float16(np.float16(q) * np.float16(-4)) + np.float16(4)
        code = round(float(min(max(y, np.float16(0)), np.float16(7))))  # Python rounds half to even
        word |= code << (8 + 3 * place)
    return word


def gf4_words(matrix: NDArray[np.float32]) -> NDArray[np.uint32]:
    """A matrix in gf4: uint32 (rows, columns // 8)."""
    words = [gf4_word(group) for group in matrix.reshape(-1, 8).tolist()]
    return np.array(words, np.uint32).reshape(*matrix.shape[:-1], -1)


def rotary_rows(heads: int, head_dim: int, r: int) -> list[int]:
    """Old row of every new row: the permutation P of SPEC_calm.md 3."""
    rows = []
    for head in range(heads):
        inside = [half * (r // 2) + i for i in range(r // 2) for half in (0, 1)] + list(range(r, head_dim))
        rows += [head * head_dim + i for i in inside]
    return rows


def container_bytes(metadata: Mapping[str, str], tensors: Sequence[tuple[str, str, NDArray[np.generic]]]) -> bytes:
    """A `.calm` file of (name, dtype, array) as SPEC_calm.md 1.1 describes what calm's converter writes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    data = b""
    for name, dtype, array in tensors:
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    while (8 + len(text)) % 256:
        text += b" "
    return len(text).to_bytes(8, "little") + text + data
