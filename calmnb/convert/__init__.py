"""Conversion: a Hugging Face folder or a GGUF file becomes one `.calm` file, tensor by tensor.

`hf` and `gguf_model` say what a checkpoint means (`source.Source`); `convert` encodes and writes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb._callable import make_callable
from calmnb.checkpoint import count_non_finite, weight_code, write_calm
from calmnb.config import ModelConfig
from calmnb.container import Progress, TensorSpec
from calmnb.convert.source import Recipe, Source
from calmnb.errors import ConfigError, FormatError, TensorError, UnsupportedError
from calmnb.quant import encode, storage_dtype, storage_shape

__all__ = ["convert"]


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "fp8",
    progress: Progress | None = None,
    extras: bool = True,
) -> Path:
    """Convert a checkpoint to a `.calm` file.

    Parameters
    ----------
    src
        A Hugging Face folder (config.json and safetensors) or a GGUF file, of the Llama, Mistral or Qwen2 family.
    out
        The `.calm` file to write. It appears under this name only when it is complete.
    dtype : {"fp16", "fp8", "gf4"}
        Storage of the matrices: 16, 8 or 4 bits a weight.
    progress
        Called with bytes written so far, bytes in all, and the name of the tensor being written.
    extras
        Whether to store the full tokenizer, the chat template and the settings that calm's format has no place for. calm
        ignores them. Without them the file is byte for byte what calm's own converter writes.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    CalmnbError
        If the source is damaged, incomplete or of an unknown kind, holds NaN or infinity, does not fit the storage type,
        or if the file cannot be written. Nothing is left behind.

    Notes
    -----
    Works tensor by tensor in blocks of rows; the memory it takes does not depend on the size of the model.
    """
    storage_dtype(dtype)
    source_path, target = Path(src), Path(out)
    _check_target(target, source_path)
    try:
        source = _open_source(source_path)
    except OSError as error:
        raise FormatError(
            f"{source_path} cannot be read: {error.strerror or error}; give a Hugging Face folder or a GGUF file"
        ) from error
    try:
        return _write(source, target, dtype, progress, extras)
    finally:
        source.reader.close()


def _check_target(target: Path, source: Path) -> None:
    """Refuse an output that cannot be a file, or whose name a file of the source has."""
    try:
        target.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a null character
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"the output {str(target)!r} cannot be written: {said}; choose another name") from error
    if target.is_dir():
        raise ConfigError(f"the output {target} is a folder; give the name of the .calm file to write")
    try:
        read = [source, *(source.iterdir() if source.is_dir() and target.suffix != ".calm" else ())]
        is_read = any(target.samefile(path) for path in read if path.exists())
    except (OSError, ValueError):  # opening the source says why
        return
    if is_read:
        where = "the source itself" if read[0].is_file() else f"a file of the source {source}"
        raise ConfigError(f"the output {target} is {where}, and would be lost; choose another name, which ends in .calm")


def _open_source(path: Path) -> Source:
    if path.is_dir():
        from calmnb.convert.hf import read_folder

        return read_folder(path)
    if not path.exists():
        raise FormatError(f"{path} does not exist; give a Hugging Face folder or a GGUF file")
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] == b"GGUF":
        from calmnb.convert.gguf_model import read_gguf

        return read_gguf(path)
    if head.startswith(b"version "):
        raise FormatError(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull` or download it again"
        )
    if path.suffix == ".calm":
        raise FormatError(
            f"{path} is a .calm file already; to store the model as another dtype, convert its original checkpoint"
        )
    if path.suffix == ".safetensors":
        raise FormatError(f"{path} is only the weights; give the folder {path.parent}, which should also hold config.json")
    raise FormatError(
        f"{path} is neither a folder nor a GGUF file (it starts with {head[:4]!r}); give the folder that holds config.json "
        "and the safetensors files, or a GGUF file"
    )


def _write(source: Source, target: Path, dtype: str, progress: Progress | None, extras: bool) -> Path:
    config = source.config.replace(dtype=dtype)
    if not extras and (config.rope_scaling is not None or config.sliding_window):
        what = "rope scaling" if config.rope_scaling is not None else "sliding window"
        raise UnsupportedError(
            f"{source.path}: the model has a {what}, which calm's format has no place for; convert it with extras "
            "(calm opens such files too)"
        )
    vocabulary = source.vocabulary
    return write_calm(
        target,
        config,
        [_spec(recipe, source, config) for recipe in source.recipes],
        tokens=vocabulary.tokens,
        scores=vocabulary.scores,
        extras=vocabulary.extras | {"calmnb.json": _settings(source, config)} if extras else None,
        progress=progress,
    )


def _spec(recipe: Recipe, source: Source, config: ModelConfig) -> TensorSpec:
    slot = recipe.slot
    code = weight_code(config) if slot.quantised else "F32"
    shape = slot.shape
    if slot.quantised:
        try:
            shape = storage_shape(slot.shape, config.dtype)
        except ConfigError as error:
            raise UnsupportedError(f"{source.path}: tensor {slot.name}: {error}") from error

    def blocks() -> Iterator[NDArray[Any]]:
        for block in recipe.blocks(source.reader):
            stored = encode(block, config.dtype) if slot.quantised else block.astype(np.float32)
            if count_non_finite(stored, code):
                raise TensorError(_explain_non_finite(recipe, block, source, config))
            yield stored

    return TensorSpec(slot.name, code, shape, blocks)


def _explain_non_finite(recipe: Recipe, block: NDArray[Any], source: Source, config: ModelConfig) -> str:
    names = ", ".join(name for name, _, _ in recipe.parts if name is not None)
    wrong = block[~np.isfinite(block)]
    if wrong.size:
        return (
            f"{source.path}: tensor {names} holds {wrong.size} values that are NaN or infinite (the first is {wrong[0]}); "
            "the checkpoint is damaged, download it again"
        )
    return (
        f"{source.path}: tensor {names} holds the value {np.abs(block).max():g}, which {config.dtype} cannot store "
        f"(fp16 ends at 65504, fp8 and gf4 at 57344)"
    )


def _settings(source: Source, config: ModelConfig) -> bytes:
    from importlib.metadata import PackageNotFoundError, version

    try:
        made_by = f"calmnb {version('calmnb')}"
    except PackageNotFoundError:
        made_by = "calmnb"
    scaling = config.rope_scaling
    settings = {
        "made_by": made_by,
        "stop_ids": list(config.stop_ids),
        "rope_scaling": None if scaling is None else dataclasses.asdict(scaling),
        "sliding_window": config.sliding_window,
        **source.settings,
    }
    return json.dumps(settings, indent=1).encode("ascii")


make_callable(__name__, "convert")
