"""The GGUF container: metadata and tensor table, read without mapping the file or trusting a length in it.

The `gguf` package dequantises the blocks. Its own reader keeps two array objects for each of the hundred thousand strings
of a vocabulary and fails on damaged files with whatever exception comes first, so the container is parsed here.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import FormatError, TensorError, UnsupportedError

__all__ = ["GgufFile"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    kind: int
    begin: int
    row_bytes: int


class GgufFile:
    """An open GGUF file.

    Attributes
    ----------
    path : Path
    metadata : dict
        Values as Python numbers, strings and lists; arrays of numbers as NumPy arrays.
    shapes : dict of tuple
        Logical shape of every tensor, rows first (GGUF itself lists them the other way round).

    Raises
    ------
    FormatError
        If the file is not GGUF, is truncated, or contradicts itself.
    UnsupportedError
        If it is a version or a byte order that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise FormatError(f"{path} cannot be opened: {error.strerror or error}") from error
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.metadata, self._tensors = self._read_head()
        except BaseException:
            self.close()
            raise
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def rows(self, name: str, count: int) -> Iterator[NDArray[Any]]:
        """Dequantised blocks of at most `count` rows (of values, for a vector), float32 or float16."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            count = 1
        n_rows = math.prod(tensor.shape[:-1])
        for first in range(0, n_rows, count):
            taken = min(count, n_rows - first)
            self._file.seek(tensor.begin + first * tensor.row_bytes)
            raw = np.frombuffer(self._take(taken * tensor.row_bytes), np.uint8).reshape(taken, tensor.row_bytes)
            kind = GGMLQuantizationType(tensor.kind)
            if kind == GGMLQuantizationType.F16:
                block: NDArray[Any] = raw.view(np.float16)
            else:
                block = dequantize(raw, kind)
            yield block.reshape(tensor.shape) if len(tensor.shape) == 1 else block.reshape(taken, *tensor.shape[1:])

    def _take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._size else b""
        if len(data) != count:
            raise FormatError(f"{self.path} ends in the middle of its contents; it is truncated or damaged, download it again")
        return data

    def _unpack(self, pattern: str) -> Any:
        return struct.unpack(pattern, self._take(struct.calcsize(pattern)))[0]

    def _string(self) -> str:
        return self._take(self._unpack("<Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind == _ARRAY and depth < 4:
            element, count = self._unpack("<I"), self._unpack("<Q")
            if element in _SCALARS:
                dtype = np.dtype(_SCALARS[element].replace("B", "u1").replace("b", "i1"))
                return np.frombuffer(self._take(count * dtype.itemsize), dtype)
            if count > self._size:
                raise FormatError(f"{self.path}: an array of {count} elements is longer than the file; the file is damaged")
            return [self._value(element, depth + 1) for _ in range(count)]
        raise FormatError(f"{self.path}: the metadata has a value of unknown type {kind}; the file is damaged")

    def _read_head(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        magic = self._take(4) if self._size >= 24 else b""
        if magic != b"GGUF":
            raise FormatError(f"{self.path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
        version = self._unpack("<I")
        if version not in (2, 3):
            order = " (big-endian?)" if version & 0xFFFF == 0 else ""
            raise UnsupportedError(f"{self.path} is GGUF version {version}{order}; versions 2 and 3, little-endian, are read")
        n_tensors, n_values = self._unpack("<Q"), self._unpack("<Q")
        if (n_tensors + n_values) * 12 > self._size:
            raise FormatError(f"{self.path}: {n_tensors} tensors and {n_values} values cannot be in {self._size} bytes")
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I"))
        table = [self._read_tensor_head() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise FormatError(f"{self.path}: general.alignment is {alignment!r}; it must be a positive integer")
        start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, _Tensor] = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                raise TensorError(f"{self.path}: tensor {name!r} occurs twice; the file is damaged")
            row_bytes = self._row_bytes(name, shape, kind)
            end = start + offset + row_bytes * math.prod(shape[:-1])
            if end > self._size:
                raise TensorError(
                    f"{self.path}: tensor {name!r} ends at byte {end}, but the file has {self._size}; it is truncated, "
                    "download it again"
                )
            tensors[name] = _Tensor(shape, kind, start + offset, row_bytes)
        return metadata, tensors

    def _read_tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self._string(), self._unpack("<I")
        if not 1 <= rank <= 4:
            raise TensorError(f"{self.path}: tensor {name[:200]!r} has {rank} dimensions; 1 to 4 are possible")
        shape = tuple(reversed([self._unpack("<Q") for _ in range(rank)]))
        if not all(shape):
            raise TensorError(f"{self.path}: tensor {name[:200]!r} has the shape {list(shape)}; dimensions must be positive")
        return name, shape, self._unpack("<I"), self._unpack("<Q")

    def _row_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import _type_traits

        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise TensorError(f"{self.path}: tensor {name!r} has the unknown type number {kind}; is calmnb too old?") from None
        if known not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16) and known not in _type_traits:
            raise UnsupportedError(f"{self.path}: tensor {name!r} is stored as {known.name}, which cannot be converted")
        per_block, block_bytes = GGML_QUANT_SIZES[known]
        if shape[-1] % per_block:
            raise TensorError(f"{self.path}: rows of tensor {name!r} have {shape[-1]} values, not a multiple of {per_block}")
        return shape[-1] // per_block * int(block_bytes)
