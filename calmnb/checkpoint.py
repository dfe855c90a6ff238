"""The `.calm` file: open one by mapping it into memory, write one by streaming tensors into it.

A `.calm` file is a safetensors container whose metadata describes the model (SPEC: names and shapes in
`weight_layout`). Nothing is copied or expanded when a file is opened; whatever can be wrong with it is found here,
once, so that engines may trust shapes, dtypes and ranges.

Files that calmnb writes carry what calm's format has no place for in extra ``U8`` tensors named ``extra.<name>``, which
calm ignores:

=====================  ===============================================================================================
``tokenizer.json``     bytes of a complete Hugging Face tokenizer (built from the metadata when the source is GGUF)
``tokenizer.model``    bytes of a SentencePiece model, when there is no tokenizer.json
``chat_template``      Jinja source of the chat template, UTF-8
``calmnb.json``        JSON object: `stop_ids`, `rope_scaling`, `sliding_window`, `special_tokens` (role such as
                       ``bos_token`` -> text), `add_bos_token`, `add_eos_token`, `chat_templates` (by name), `source`
=====================  ===============================================================================================
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmnb.config import ModelConfig
from calmnb.container import CALM_DTYPES, Entry, Progress, TensorSpec, read_header, write_container
from calmnb.engine.base import LayerWeights, Weights
from calmnb.errors import ConfigError, FormatError, TensorError
from calmnb.metadata import calm_metadata, read_config, read_settings
from calmnb.quant import storage_dtype, storage_shape

__all__ = ["CalmFile", "Slot", "calm_metadata", "count_non_finite", "open_calm", "weight_code", "weight_layout", "write_calm"]

_WEIGHT_CODES = {"fp16": "F16", "fp8": "F8_E5M2", "gf4": "I32"}
_EXTRA_PREFIX = "extra."
_MAX_TOKEN_BYTES = 512


class Slot(NamedTuple):
    """One tensor that a model of some configuration has: its name, logical shape, and whether it is stored quantised."""

    name: str
    shape: tuple[int, ...]
    quantised: bool


def weight_layout(config: ModelConfig, *, qkv_bias: bool | Sequence[bool] = False, tied: bool = False) -> Iterator[Slot]:
    """Names and logical shapes of a model's weights, in file order.

    Parameters
    ----------
    config
        Sizes.
    qkv_bias
        Whether attention projections have a bias, for all layers or layer by layer.
    tied
        Whether the output matrix is the embedding, and therefore absent.
    """
    c = config
    experts = (c.n_experts,) if c.is_moe else ()
    yield Slot("model.embed.weight", (c.vocab_size, c.dim), True)
    for layer in range(c.n_layers):
        prefix = f"model.layers.{layer}."
        yield Slot(prefix + "attn.norm.weight", (c.dim,), False)
        yield Slot(prefix + "attn.wq.weight", (c.q_dim, c.dim), True)
        yield Slot(prefix + "attn.wk.weight", (c.kv_dim, c.dim), True)
        yield Slot(prefix + "attn.wv.weight", (c.kv_dim, c.dim), True)
        yield Slot(prefix + "attn.wo.weight", (c.dim, c.q_dim), True)
        if qkv_bias if isinstance(qkv_bias, bool) else qkv_bias[layer]:
            yield Slot(prefix + "attn.wqkv.bias", (c.q_dim + 2 * c.kv_dim,), False)
        if not c.is_parallel:
            yield Slot(prefix + "mlp.norm.weight", (c.dim,), False)
        if c.is_moe:
            yield Slot(prefix + "moegate.weight", (c.n_experts, c.dim), True)
        yield Slot(prefix + "mlp.w1.weight", (*experts, c.hidden_dim, c.dim), True)
        yield Slot(prefix + "mlp.w2.weight", (*experts, c.dim, c.hidden_dim), True)
        yield Slot(prefix + "mlp.w3.weight", (*experts, c.hidden_dim, c.dim), True)
    yield Slot("model.norm.weight", (c.dim,), False)
    if not tied:
        yield Slot("model.output.weight", (c.vocab_size, c.dim), True)


# --- reading ---------------------------------------------------------------------------------------------------------


def open_calm(path: str | os.PathLike[str]) -> CalmFile:
    """Open and check a `.calm` file without reading its weights.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    CalmFile
        A context manager; its arrays are read-only views into the mapped file.

    Raises
    ------
    FormatError, TensorError
        If the file is truncated or damaged, or misses a metadata key or a tensor.
    UnsupportedError
        If it asks for something this version cannot run.
    ConfigError
        If `path` is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path is {path!r:.80}; accepted is a .calm file's path, as a str or a Path")
    return CalmFile(Path(path))


class CalmFile:
    """An open `.calm` file. Create it with `open_calm`.

    Attributes
    ----------
    path : Path
    config : ModelConfig
    weights : Weights
        What engines take.
    metadata : dict of str
        As stored.
    tensors : dict of read-only arrays
        Every tensor by name, shaped as stored: F16 as float16, F8_E5M2 and U8 as uint8, I32 as uint32, F32 as float32.
    extras : dict of bytes
        The extra U8 tensors by name without the ``extra.`` prefix (see the module's docstring).
    settings : dict
        ``calmnb.json`` of the extras, parsed; empty for files that calm wrote.
    token_scores : float32 (vocab_size,), or (0,) when the file has no calm tokenizer
    n_params : int
        Logical number of weights.
    nbytes : int
        Bytes of the model's weights (no tokenizer, no extras).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map, self.metadata, self._entries = _map_file(path)
        try:
            self.tensors = {name: self._view(entry) for name, entry in self._entries.items()}
            self.extras = {
                name.removeprefix(_EXTRA_PREFIX): tensor.tobytes()
                for name, tensor in self.tensors.items()
                if name.startswith(_EXTRA_PREFIX) and self._entries[name].code == "U8"
            }
            self.settings = read_settings(self.extras, path)
            self.config = read_config(self.metadata, self.settings, path)
            self.weights = self._bind()
            self.token_scores = self._check_tokens()
        except BaseException:
            self.close()
            raise
        model = [entry for name, entry in self._entries.items() if name.startswith("model.")]
        self.nbytes = sum(entry.end - entry.begin for entry in model)
        self.n_params = sum(math.prod(entry.shape) * (8 if entry.code == "I32" else 1) for entry in model)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, norms and biases included."""
        return 8 * self.nbytes / self.n_params

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Byte string of every token id; empty when the file has no calm tokenizer."""
        stored = self.tensors.get("tokenizer.tokens")
        return [] if stored is None else stored.tobytes().split(b"\0")[:-1]

    def check_finite(self) -> None:
        """Read every weight and name the first tensor that holds NaN or infinity.

        Raises
        ------
        TensorError
        """
        for name, entry in self._entries.items():
            if name.startswith("model."):
                self._check_tensor_finite(name, entry.code)

    def check_length(self) -> None:
        """Make sure that the file still holds every tensor: reading a mapped page behind its end kills the process.

        Raises
        ------
        FormatError
            If another program made it shorter, as ``cp`` onto it does before it writes.
        """
        length, needed = self._map.size(), max(entry.end for entry in self._entries.values())
        if length < needed:
            raise FormatError(
                f"{self.path} became shorter while it was open: it has {length} bytes, its tensors end at {needed}. Load it "
                "again; to replace a model that is in use, write the new file beside it and rename it (mv, not cp)"
            )

    def close(self) -> None:
        """Unmap the file, or let it be unmapped when the last array that views it is gone. Idempotent."""
        for name in ("tensors", "weights"):
            self.__dict__.pop(name, None)
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> CalmFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return f"<CalmFile {self.path.name}: {c.arch} {self.n_params / 1e6:.0f}M {c.dtype}, {c.n_layers} layers>"

    def _view(self, entry: Entry) -> NDArray[Any]:
        dtype = CALM_DTYPES[entry.code]
        view = np.frombuffer(self._map, np.uint8, count=entry.end - entry.begin, offset=entry.begin)
        if entry.begin % dtype.itemsize:
            # calm packs tensors back to back, so a foreign file may misalign one; compiled code must not see that.
            view = view.copy()
            view.flags.writeable = False
        return view.view(dtype).reshape(entry.shape)

    def _take(self, slot: Slot, optional: bool = False) -> NDArray[Any]:
        """The tensor of `slot`, checked for dtype and shape."""
        code = _WEIGHT_CODES[self.config.dtype] if slot.quantised else "F32"
        shape = storage_shape(slot.shape, self.config.dtype) if slot.quantised else slot.shape
        entry = self._entries.get(slot.name)
        if entry is None:
            raise TensorError(f"{self.path}: tensor {slot.name} is missing; a {self.config.arch} model needs it")
        if entry.code != code or entry.shape != shape:
            raise TensorError(
                f"{self.path}: tensor {slot.name} is {entry.code} {list(entry.shape)}, "
                f"but the metadata (dtype {self.config.dtype}) asks for {code} {list(shape)}"
            )
        if not slot.quantised:
            self._check_tensor_finite(slot.name, code)
        return self.tensors[slot.name]

    def _check_tensor_finite(self, name: str, code: str) -> None:
        if count_non_finite(self.tensors[name], code):
            raise TensorError(
                f"{self.path}: tensor {name} holds NaN or infinite values, so the model cannot work. "
                "Convert it again from an undamaged source; for fp8 and gf4 also check that its weights stay below 61440."
            )

    def _bind(self) -> Weights:
        config = self.config
        last = f"model.layers.{config.n_layers - 1}."
        if config.n_layers > len(self._entries) or not any(name.startswith(last) for name in self._entries):
            raise TensorError(
                f"{self.path}: the metadata says n_layers {config.n_layers}, but the last layer is not in the file"
            )
        bias = [f"model.layers.{layer}.attn.wqkv.bias" in self._entries for layer in range(config.n_layers)]
        tied = "model.output.weight" not in self._entries
        try:
            found = {slot.name: self._take(slot) for slot in weight_layout(config, qkv_bias=bias, tied=tied)}
        except ConfigError as error:
            raise FormatError(f"{self.path}: {error}") from error
        layers = []
        for layer in range(config.n_layers):
            prefix = f"model.layers.{layer}."
            layers.append(
                LayerWeights(
                    attn_norm=found[prefix + "attn.norm.weight"],
                    wq=found[prefix + "attn.wq.weight"],
                    wk=found[prefix + "attn.wk.weight"],
                    wv=found[prefix + "attn.wv.weight"],
                    wo=found[prefix + "attn.wo.weight"],
                    qkv_bias=found.get(prefix + "attn.wqkv.bias"),
                    mlp_norm=found.get(prefix + "mlp.norm.weight"),
                    moegate=found.get(prefix + "moegate.weight"),
                    w1=found[prefix + "mlp.w1.weight"],
                    w2=found[prefix + "mlp.w2.weight"],
                    w3=found[prefix + "mlp.w3.weight"],
                )
            )
        embed = found["model.embed.weight"]
        return Weights(
            config=config,
            embed=embed,
            layers=tuple(layers),
            final_norm=found["model.norm.weight"],
            output=embed if tied else found["model.output.weight"],
        )

    def _check_tokens(self) -> NDArray[np.float32]:
        """Check calm's tokenizer tensors, where there are any, and return the scores."""
        vocab = self.config.vocab_size
        tokens = self.tensors.get("tokenizer.tokens")
        if tokens is None:
            return np.zeros(0, np.float32)
        if self._entries["tokenizer.tokens"].code != "U8" or tokens.ndim != 1:
            raise TensorError(f"{self.path}: tensor tokenizer.tokens must be U8 with one dimension")
        ends = np.flatnonzero(tokens == 0)
        if len(ends) != vocab or tokens[-1] != 0:
            raise TensorError(
                f"{self.path}: tensor tokenizer.tokens holds {len(ends)} zero-terminated strings; "
                f"the vocabulary has {vocab}, each ended by one zero byte"
            )
        longest = int(np.diff(ends, prepend=-1).max()) - 1
        if longest > _MAX_TOKEN_BYTES:
            raise TensorError(
                f"{self.path}: a token of tokenizer.tokens is {longest} bytes long; at most {_MAX_TOKEN_BYTES} are"
            )
        scores: NDArray[np.float32] = self._take(Slot("tokenizer.scores", (vocab,), False))
        return scores


def count_non_finite(tensor: NDArray[Any], code: str) -> int:
    """How many stored values (scales, for gf4) are NaN or infinite. Works in blocks: a matrix may be gigabytes."""
    flat, step, bad = tensor.reshape(-1), 1 << 20, 0
    for start in range(0, flat.size, step):
        block = flat[start : start + step]
        if code == "F16":
            bad += int(np.count_nonzero((block.view(np.uint16) & 0x7C00) == 0x7C00))
        elif code in ("F8_E5M2", "I32"):
            bad += int(np.count_nonzero((block & block.dtype.type(0x7C)) == 0x7C))
        elif code == "F32":
            bad += int(np.count_nonzero(~np.isfinite(block)))
    return bad


def _map_file(path: Path) -> tuple[mmap.mmap, dict[str, str], dict[str, Entry]]:
    try:
        with path.open("rb") as file:
            metadata, entries = read_header(file, path)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), metadata, entries
    except OSError as error:
        raise FormatError(f"{path} cannot be opened: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the name
        raise FormatError(f"{str(path)!r} cannot be opened: {error}; give the path of a .calm file") from error


# --- writing ---------------------------------------------------------------------------------------------------------


def weight_code(config: ModelConfig) -> str:
    """Container dtype of the matrices of `config`: F16, F8_E5M2 or I32."""
    return _WEIGHT_CODES[config.dtype]


def write_calm(
    path: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Mapping[str, NDArray[Any]] | Iterable[TensorSpec],
    *,
    tokens: Sequence[bytes] | None = None,
    scores: Sequence[float] | NDArray[Any] | None = None,
    extras: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a `.calm` file tensor by tensor: under a temporary name beside `path`, renamed when it is complete.

    Parameters
    ----------
    path
        Where the file goes; an existing one is replaced at the end.
    config
        Sizes, and the storage dtype.
    tensors
        The weights in file order: arrays as stored, by name, or specifications whose blocks are asked for one at a time.
    tokens, scores
        calm's tokenizer: one byte string and one score per id. Shorter lists are filled up with empty strings and zeros.
    extras
        Extra byte strings (see the module's docstring); empty ones are left out.
    metadata
        Stored instead of `calm_metadata` of `config`.
    progress
        Called with bytes written, bytes in all and the name of the tensor just written.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    CalmnbError
        If the file cannot be written, for want of disk space for instance. Nothing is left behind.
    """
    target = Path(path)
    specs = _specs_of_arrays(tensors, config) if isinstance(tensors, Mapping) else list(tensors)
    if tokens is not None:
        specs += _token_specs(tokens, scores, config.vocab_size)
    for name, data in (extras or {}).items():
        if data:
            specs.append(TensorSpec.of_array(_EXTRA_PREFIX + name, np.frombuffer(data, np.uint8), "U8"))
    write_container(target, calm_metadata(config) if metadata is None else metadata, specs, progress)
    return target


def _specs_of_arrays(tensors: Mapping[str, NDArray[Any]], config: ModelConfig) -> list[TensorSpec]:
    """Specifications of ready arrays, put into file order and checked against `config`."""
    bias = [f"model.layers.{layer}.attn.wqkv.bias" in tensors for layer in range(config.n_layers)]
    specs = []
    for slot in weight_layout(config, qkv_bias=bias, tied="model.output.weight" not in tensors):
        if slot.name not in tensors:
            raise TensorError(f"tensor {slot.name} is missing; a {config.arch} model needs it")
        array = tensors[slot.name]
        dtype = storage_dtype(config.dtype) if slot.quantised else np.dtype(np.float32)
        shape = storage_shape(slot.shape, config.dtype) if slot.quantised else slot.shape
        if array.dtype != dtype or array.shape != shape:
            raise TensorError(f"tensor {slot.name} is {array.dtype} {list(array.shape)}; {dtype} {list(shape)} is needed")
        specs.append(TensorSpec.of_array(slot.name, array, weight_code(config) if slot.quantised else "F32"))
    unused = set(tensors) - {spec.name for spec in specs}
    if unused:
        raise TensorError(f"tensors {', '.join(sorted(unused))} have no place in a {config.arch} model")
    return specs


def _token_specs(tokens: Sequence[bytes], scores: Sequence[float] | NDArray[Any] | None, vocab_size: int) -> list[TensorSpec]:
    if len(tokens) > vocab_size:
        raise FormatError(f"the tokenizer has {len(tokens)} tokens, but the model only {vocab_size} rows")
    padded = [*tokens, *([b""] * (vocab_size - len(tokens)))]
    joined = np.frombuffer(b"".join(token.replace(b"\0", b"\x07") + b"\0" for token in padded), np.uint8)
    values = np.zeros(vocab_size, np.float32)
    if scores is not None:
        values[: len(scores)] = scores
    return [TensorSpec.of_array("tokenizer.tokens", joined, "U8"), TensorSpec.of_array("tokenizer.scores", values, "F32")]
