"""The safetensors container under `.calm` files and Hugging Face checkpoints: its header, read and written.

Layout: 8 bytes of little-endian header length N, N bytes of JSON, then raw data. A tensor's ``data_offsets`` count from
byte ``8 + N``. The header comes from outside, so every number in it is checked against the file before it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import CalmnbError, FormatError, TensorError

__all__ = ["CALM_DTYPES", "SOURCE_DTYPES", "Entry", "Progress", "TensorSpec", "read_header", "write_container"]

#: Container dtypes that calm knows, as the NumPy dtypes their bytes are viewed as.
CALM_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "I32": np.dtype("<u4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}

#: What safetensors files of other programs hold besides; recognised so that an unusable tensor can be named.
SOURCE_DTYPES: dict[str, np.dtype[Any]] = CALM_DTYPES | {
    "F8_E4M3FN": np.dtype("u1"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "BOOL": np.dtype("u1"),
}

_HEADER_LIMIT = 100_000_000
_ALIGNMENT = 256

#: Called with bytes written so far, bytes in all, and the name of the tensor being written.
Progress = Callable[[int, int, str], None]


class Entry(NamedTuple):
    """Where a tensor lies: container dtype, shape, and bytes `begin` to `end` of the file (not of its data area)."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(
    file: BinaryIO, path: Path, dtypes: Mapping[str, np.dtype[Any]] = CALM_DTYPES
) -> tuple[dict[str, str], dict[str, Entry]]:
    """Parse and check the header of an open container.

    Parameters
    ----------
    file
        Positioned at its start.
    path
        For messages.
    dtypes
        Accepted container dtypes. With calm's own, empty and scalar tensors are refused too, as calm refuses them.

    Returns
    -------
    metadata : dict of str
    entries : dict of Entry
        By name, in header order.

    Raises
    ------
    FormatError
        If the file is truncated, is a Git LFS pointer or a GGUF file, or its header is not what it should be.
    TensorError
        If a tensor has an unknown dtype or a wrong shape, lies outside the file, or overlaps another.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    if head.startswith(b"version "):
        raise FormatError(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull` or download it again"
        )
    if head.startswith(b"GGUF"):
        raise FormatError(f"{path} is a GGUF file; convert it first: calmnb convert {path.name} model.calm")
    if head.startswith(b"PK\x03\x04"):
        raise FormatError(
            f"{path} is a zip archive, not a model; if it is a saved session, `calmnb profile {path.name}` or "
            "calmnb.Session.load shows it"
        )
    if len(head) < 8:
        raise FormatError(f"{path} is {size} bytes long and cannot hold a model; download or convert it again")
    length = int.from_bytes(head, "little")
    if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
        raise FormatError(
            f"{path}: the header is said to be {length} bytes long, in a file of {size} bytes. "
            "The file is truncated, or is not a safetensors or .calm file; download or convert it again."
        )
    try:
        header = json.loads(file.read(length).decode("utf-8").rstrip(" \t\r\n\0"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not valid JSON ({error}); the file is damaged") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is a JSON {type(header).__name__}; it must be an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ must be an object whose values are strings")
    entries = {name: _read_entry(name, value, 8 + length, size, path, dtypes) for name, value in header.items()}
    by_place = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    for (name, entry), (other, following) in itertools.pairwise(by_place):
        if following.begin < entry.end:
            raise TensorError(
                f"{path}: tensors {name!r} (bytes {entry.begin} to {entry.end}) and {other!r} (bytes {following.begin} to "
                f"{following.end}) overlap; the header is damaged"
            )
    return metadata, entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the name {key[:80]!r} occurs twice")
        found[key] = value
    return found


def _read_entry(name: str, value: Any, start: int, size: int, path: Path, dtypes: Mapping[str, np.dtype[Any]]) -> Entry:
    def fail(problem: str) -> TensorError:
        return TensorError(f"{path}: tensor {name[:200]!r} {problem}")

    if not isinstance(value, dict) or set(value) - {"dtype", "shape", "data_offsets"}:
        raise fail(f"is described by {str(value)[:80]!r}; accepted is an object of dtype, shape and data_offsets")
    code, offsets, shape = value.get("dtype"), value.get("data_offsets"), value.get("shape", [1])
    if not isinstance(code, str) or code not in dtypes:
        raise fail(f"has dtype {str(code)[:40]!r}; accepted are {', '.join(dtypes)}")
    least, ranks = (1, range(1, 5)) if dtypes is CALM_DTYPES else (0, range(9))
    if not isinstance(shape, list) or len(shape) not in ranks or not all(type(n) is int and least <= n < 2**63 for n in shape):
        raise fail(f"has shape {str(shape)[:80]}; accepted are 1 to 4 positive dimensions")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise fail(f"has data_offsets {str(offsets)[:80]}; accepted are two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= size - start:
        raise fail(
            f"lies at bytes {begin} to {end}, outside the {size - start} bytes of data; the file is truncated or damaged"
        )
    expected = math.prod(shape) * dtypes[code].itemsize
    if end - begin != expected:
        raise fail(f"takes {end - begin} bytes, but {code} {shape} takes {expected}; the header is damaged")
    return Entry(code, tuple(shape), start + begin, start + end)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: described now, computed when its turn comes.

    Attributes
    ----------
    name : str
    code : str
        Container dtype ("F16", "F8_E5M2", "I32", "F32", "U8").
    shape : tuple of int
        As stored.
    blocks : callable
        Returns the tensor's contents as consecutive arrays; called once, when the tensor is written.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes in the file."""
        return math.prod(self.shape) * CALM_DTYPES[self.code].itemsize

    @classmethod
    def of_array(cls, name: str, array: NDArray[Any], code: str) -> TensorSpec:
        """A tensor that is in memory already."""
        return cls(name, code, array.shape, lambda: (array,))


def write_container(
    target: Path, metadata: Mapping[str, str], specs: Sequence[TensorSpec], progress: Progress | None = None
) -> None:
    """Write a container tensor by tensor, under a temporary name that becomes `target` once it is complete.

    Raises
    ------
    CalmnbError
        If it cannot be written, for want of disk space for instance. Nothing is left behind, whatever is raised.
    """
    header = _build_header(metadata, specs)
    total = sum(spec.nbytes for spec in specs)
    _check_space(target, len(header) + total)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise CalmnbError(f"cannot write {target}: {error.strerror or error}. Is the folder there, and writable?") from error
    try:
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 (a descriptor, not a path)
            _write_all(file, header)
            done = 0
            for spec in specs:
                end = done + spec.nbytes
                for block in spec.blocks():
                    data = np.ascontiguousarray(block, dtype=CALM_DTYPES[spec.code]).reshape(-1).view(np.uint8)
                    _write_all(file, data.data)
                    done += data.nbytes
                    if progress is not None:
                        progress(done, total, spec.name)
                assert done == end, f"{spec.name} was announced as {spec.nbytes} bytes, {spec.nbytes + done - end} came"
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except OSError as error:
        raise CalmnbError(
            f"cannot write {target}: {error.strerror or error}. It takes {(len(header) + total) / 1e6:.1f} MB; "
            "nothing was left behind. Free some space or choose another folder."
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def _check_space(target: Path, needed: int) -> None:
    """Refuse at once what would fail after minutes of work. Best effort: quotas and other programs may still interfere."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise CalmnbError(
                f"cannot write {target}: it takes {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free. "
                "Free some space or choose another folder."
            )


def _write_all(file: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _build_header(metadata: Mapping[str, str], specs: Sequence[TensorSpec]) -> bytes:
    """Header length and JSON, padded with spaces so that the data area starts at a multiple of 256."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for spec in specs:
        header[spec.name] = {"dtype": spec.code, "shape": list(spec.shape), "data_offsets": [place, place + spec.nbytes]}
        place += spec.nbytes
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
