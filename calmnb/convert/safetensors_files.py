"""The safetensors files of a Hugging Face folder, as one set of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from calmnb.container import SOURCE_DTYPES, Entry, read_header
from calmnb.errors import FormatError, TensorError, UnsupportedError

__all__ = ["SafetensorsFiles", "load_json"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises
    ------
    FormatError
        If the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith("version https://git-lfs"):
            raise FormatError(f"{path} is a Git LFS pointer; fetch the file with `git lfs pull` or download it again")
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds a JSON {type(value).__name__}; an object is expected")
    return value


class SafetensorsFiles:
    """Tensors of a checkpoint that may be spread over files.

    Where there is an index it alone says which tensors count and where they are: stray files beside it (another copy of the
    weights, an adapter) are left alone.

    Parameters
    ----------
    folder
        Holds ``model.safetensors.index.json`` and the files it names, or ``model.safetensors``, or other safetensors files
        none of which repeats a tensor.

    Raises
    ------
    FormatError, TensorError
        If a file is missing or damaged, or does not hold what the index promises.
    UnsupportedError
        If the weights are only there in another format.
    """

    def __init__(self, folder: Path) -> None:
        self._open: dict[Path, BinaryIO] = {}
        self._entries: dict[str, tuple[Path, Entry]] = {}
        try:
            if (folder / _INDEX).exists():
                self._read_index(folder)
            elif (folder / _SINGLE).exists():
                self._read_all([folder / _SINGLE])
            else:
                self._read_all(sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_")))
                if not self._entries:
                    raise _nothing_found(folder)
        except BaseException:
            self.close()
            raise
        self._shapes = {name: entry.shape for name, (_, entry) in self._entries.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical shape of every tensor."""
        return self._shapes

    def dtype_of(self, name: str) -> str:
        """Container dtype of a tensor, such as "BF16"."""
        return self._entries[name][1].code

    def rows(self, name: str, count: int) -> Iterator[NDArray[Any]]:
        """Blocks of at most `count` rows (of values, for a vector): float16 for F16, float32 for F32, BF16 and F64."""
        path, entry = self._entries[name]
        if entry.code not in ("F32", "F16", "BF16", "F64"):
            raise UnsupportedError(
                f"{path}: tensor {name} is stored as {entry.code}; F32, F16 and BF16 weights are converted. "
                "Is this checkpoint quantised already?"
            )
        dtype = SOURCE_DTYPES[entry.code]
        n_rows, rest = (entry.shape[0], entry.shape[1:]) if entry.shape else (1, ())
        row_bytes = math.prod(rest) * dtype.itemsize
        file = self._open[path]
        for first in range(0, n_rows, count):
            taken = min(count, n_rows - first)
            file.seek(entry.begin + first * row_bytes)
            data = file.read(taken * row_bytes)
            if len(data) != taken * row_bytes:
                raise FormatError(f"{path} became shorter while it was read; is something else writing it?")
            block: NDArray[Any] = np.frombuffer(data, dtype).reshape(taken, *rest)
            if entry.code == "BF16":
                block = np.left_shift(block, 16, dtype=np.uint32).view(np.float32)
            yield block.astype(np.float32) if entry.code == "F64" else block

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()

    def _header(self, path: Path) -> dict[str, Entry]:
        try:
            self._open[path] = path.open("rb")
        except OSError as error:
            raise FormatError(f"{path} cannot be opened: {error.strerror or error}; download the checkpoint again") from error
        except ValueError as error:  # a null character, a lone surrogate
            raise FormatError(f"{str(path)!r} cannot be the name of a file ({error}); download the checkpoint again") from error
        return read_header(self._open[path], path, SOURCE_DTYPES)[1]

    def _read_all(self, paths: list[Path]) -> None:
        for path in paths:
            for name, entry in self._header(path).items():
                if name in self._entries:
                    raise TensorError(
                        f"tensor {name} is in {self._entries[name][0].name} and in {path.name}, and there is no "
                        f"{_INDEX} to say which counts; move one of the files away"
                    )
                self._entries[name] = (path, entry)

    def _read_index(self, folder: Path) -> None:
        places = load_json(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise FormatError(f"{folder / _INDEX} has no weight_map of tensor names to file names; download it again")
        headers: dict[str, dict[str, Entry]] = {}
        for name, file in places.items():
            if Path(file).name != file:
                raise FormatError(f"{folder / _INDEX} refers to {file!r}, outside its own folder; that is refused")
            if file not in headers:
                headers[file] = self._header(folder / file)
            if name not in headers[file]:
                raise TensorError(f"{folder / file} does not hold tensor {name}, which {_INDEX} says is there")
            self._entries[name] = (folder / file, headers[file][name])


def _nothing_found(folder: Path) -> Exception:
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for path in folder.glob(pattern))
    if others and others[0].endswith(".gguf"):
        return UnsupportedError(
            f"{folder} holds no safetensors files, but {others[0]}: give that file's own name to convert it"
        )
    if others:
        return UnsupportedError(
            f"{folder} holds no safetensors files, only {others[0]}. Such files can run code when they are opened and are not "
            "read; save the model as safetensors (transformers: model.save_pretrained)"
        )
    return FormatError(f"{folder} holds no safetensors files; download the checkpoint again")
