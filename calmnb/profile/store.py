"""Sessions on disk: one ``.npz`` of plain arrays, with the rest as JSON inside it.

No pickle, so a session from a stranger is data and nothing else. Strings of categorical columns are kept as codes with
their labels in the JSON. A file is written under a temporary name and renamed, so it is whole or absent. Kinds and ranges
are checked when it is read, so that tables and reports may trust them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calmnb.config import KV_DTYPES, ModelConfig
from calmnb.errors import ConfigError, FormatError
from calmnb.files import replacing
from calmnb.profile.describe import config_from_dict
from calmnb.profile.events import CATEGORIES, EVENT_COLUMNS, STEP_COLUMNS
from calmnb.profile.launches import launch_table
from calmnb.profile.telemetry import telemetry_note, telemetry_table

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["load_session", "save_session"]

_FORMAT = "calmnb session"
_VERSION = 1
_MAX_BYTES = 1 << 32  # unpacked; a session of a million steps of a 7B model is half of this
_MAX_SECONDS = 1e12  # clocks of GPUs count nanoseconds since 1970: 1.8e9 s
_MAX_AMOUNT = 1e30  # so that no sum or rate overflows
_S = TypeVar("_S", bound="Session")

_TEXTS = frozenset({"phase", "stage", "kernel", "source", "text"})
_AMOUNTS = frozenset({"bytes_min", "bytes_counted", "kv_bytes", "flops"})
_META_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("peaks", "versions", "settings"), (dict, "an object")),
    **dict.fromkeys(
        ("model", "path", "engine", "device", "time_source", "time_note", "dtype", "kv_dtype", "date", "git_revision"),
        (str, "a text"),
    ),
    **dict.fromkeys(("threads", "seq_len", "n_params", "model_bytes"), (int, "a whole number")),
    "has_bias": (bool, "true or false"),
}
_INT_FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.type == "int")


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
        session = cls(events, steps, header["meta"])
        _check_columns(session.events, "events", EVENT_COLUMNS)
        _check_columns(session.steps, "steps", STEP_COLUMNS)
        _check_meta(session)
        return session
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error
    except (
        ArithmeticError,
        OSError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
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
            if out[name].dtype.kind not in "biuf":
                raise ValueError(f"column {table}.{name} is {out[name].dtype}; accepted are numbers")
    lengths = {name: len(values) for name, values in out.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of {table} differ in length: {lengths}")
    return pd.DataFrame(out)


def _check_columns(frame: pd.DataFrame, table: str, columns: Iterable[str]) -> None:
    """Hold the columns that every session has against what a recorder writes: no table or report looks again."""
    for name in columns:
        column = frame[name]
        if name in _TEXTS:
            texts = set(column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column)
            accepted = CATEGORIES.get(name)
            if column.hasnans or not all(isinstance(text, str) and (accepted is None or text in accepted) for text in texts):
                shown = ", ".join(sorted(str(text)[:40] for text in texts)[:12])
                raise ValueError(f"column {table}.{name} holds {shown}; accepted are {', '.join(accepted or ('texts',))}")
            continue
        seconds = name.endswith("_s")
        kinds, wanted = (
            ("b", "booleans") if name == "warmup" else ("iuf", "finite numbers") if seconds or name in _AMOUNTS
            else ("iu", "whole numbers")
        )  # fmt: skip
        values = column.to_numpy()
        if values.dtype.kind not in kinds:
            raise ValueError(f"column {table}.{name} is {values.dtype}; accepted are {wanted}")
        unknown = np.isnan(values) if name == "interval_s" else False
        if not np.all(np.isfinite(values) | unknown):
            raise ValueError(f"column {table}.{name} holds nan or infinity; accepted are {wanted}")
        largest = _MAX_SECONDS if seconds else _MAX_AMOUNT
        if values.dtype.kind == "f" and np.any(np.abs(values) > largest):
            raise ValueError(f"column {table}.{name} holds values beyond {largest:.0e}; accepted are {wanted} below it")
        if (table, name) == ("steps", "step") and len(np.unique(values)) < len(values):
            raise ValueError("column steps.step holds a number twice; each step has its own")


def _check_meta(session: Session) -> None:
    """Hold the metadata that tables and reports read against what `describe_model` writes."""
    meta = session.meta
    for key, (kind, wanted) in _META_KINDS.items():
        if key in meta and type(meta[key]) is not kind:
            raise ValueError(f"meta.{key} is {str(meta[key])[:40]!r}; accepted is {wanted}")
    if meta.get("kv_dtype", "fp16") not in KV_DTYPES:
        raise ValueError(f"meta.kv_dtype is {meta['kv_dtype'][:40]!r}; accepted are {', '.join(KV_DTYPES)}")
    for kind, peak in meta.get("peaks", {}).items():
        rate: Any = peak.get("gb_per_s") if isinstance(peak, dict) else None
        if type(rate) not in (int, float) or not 0 < rate < math.inf:
            raise ValueError(
                f"meta.peaks.{kind[:40]} is {str(peak)[:40]!r}; accepted is {{'gb_per_s': a positive number, ...}}"
            )
    odd = {name: version for name, version in meta.get("versions", {}).items() if not isinstance(version, str)}
    if odd:
        raise ValueError(f"meta.versions has {str(odd)[:80]}; accepted are texts")
    config = meta.get("config")
    if config is not None:
        try:
            config_from_dict(config)
        except FormatError as error:
            raise ConfigError(str(error)) from error  # `load_session` adds the path
        for name in _INT_FIELDS:
            if name in config and (type(config[name]) is not int or not -1 <= config[name] < 1 << 31):
                raise ValueError(f"meta.config.{name} is {str(config[name])[:40]!r}; accepted is a whole number below 2**31")
    for table in (telemetry_table, telemetry_note):  # raise what `load_session` translates
        table(meta)
    launch_table(meta, session.events.drop_duplicates(["kernel", "stage"]))
