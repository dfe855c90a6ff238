"""Sessions on disk: one ``.npz`` of plain arrays, with the rest as JSON inside it.

No pickle, so a session from a stranger is data and nothing else. Strings of categorical columns are kept as codes with
their labels in the JSON. A file is written under a temporary name and renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calmnb.errors import ConfigError, FormatError
from calmnb.files import replacing

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["load_session", "save_session"]

_FORMAT = "calmnb session"
_VERSION = 1
_MAX_BYTES = 1 << 32  # unpacked; a session of a million steps of a 7B model is half of this
_S = TypeVar("_S", bound="Session")


def save_session(session: Session, path: Path) -> Path:
    """Write `session` to `path`, in place of what was there.

    Raises
    ------
    CalmnbError
        If the folder cannot be written to or the disk is full; nothing is left behind then.
    """
    arrays: dict[str, NDArray[Any]] = {}
    header: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "meta": session.meta}
    for name, frame in (("events", session.events), ("steps", session.steps)):
        header[name] = [_pack(frame[column], f"{name}.{column}", arrays) for column in frame.columns]
    arrays["header"] = np.frombuffer(json.dumps(header, allow_nan=False).encode(), np.uint8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def _pack(column: pd.Series[Any], key: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Put the column's numbers into `arrays`, and return what JSON has to say about it."""
    entry: dict[str, Any] = {"name": str(column.name), "kind": "number"}
    if isinstance(column.dtype, pd.CategoricalDtype):
        entry |= {"kind": "category", "labels": [str(label) for label in column.cat.categories]}
        arrays[key] = column.cat.codes.to_numpy(np.int16)
    elif column.dtype.kind in "biuf":
        arrays[key] = column.to_numpy()
    else:
        entry |= {"kind": "text", "values": [str(value) for value in column]}
    return entry


def load_session(cls: type[_S], path: Path) -> _S:
    """Read a session; see `Session.load`."""
    if not path.is_file():
        raise FormatError(f"{path}: there is no such file; a session is what Session.save(path) writes")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > _MAX_BYTES:
            raise FormatError(f"{path}: unpacks to {size} bytes; a session has at most {_MAX_BYTES}")
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header["format"] != _FORMAT or header["version"] != _VERSION:
                found = f"{header['format']!r} version {header['version']}"
                raise FormatError(f"{path}: is {found}; this calmnb reads {_FORMAT!r} version {_VERSION}; update calmnb")
            events, steps = (_unpack(header[name], name, arrays) for name in ("events", "steps"))
        return cls(events, steps, header["meta"])
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error
    except (OSError, EOFError, KeyError, TypeError, ValueError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise FormatError(f"{path}: is not a session of calmnb, or is damaged ({error}); save it again") from error
    except (NotImplementedError, RuntimeError, RecursionError, MemoryError) as error:
        raise FormatError(f"{path}: cannot be unpacked ({error or type(error).__name__}); save it again") from error


def _unpack(columns: list[dict[str, Any]], table: str, arrays: Any) -> pd.DataFrame:
    out: dict[str, Any] = {}
    for entry in columns:
        name, kind = entry["name"], entry["kind"]
        if kind == "text":
            out[name] = np.array([str(value) for value in entry["values"]], object)
        elif kind == "category":
            codes = arrays[f"{table}.{name}"]
            out[name] = pd.Categorical.from_codes(codes.tolist(), categories=pd.Index(entry["labels"]))
        else:
            out[name] = arrays[f"{table}.{name}"]
    lengths = {name: len(values) for name, values in out.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of {table} differ in length: {lengths}")
    return pd.DataFrame(out)
