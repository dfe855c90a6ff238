"""What a checkpoint is to the converter, whatever format it came in: sizes, a tensor reader, and a recipe per tensor.

Readers of formats (`hf`, `gguf_model`) fill in a `Source`; `__init__.convert` writes it out. Matrices travel as
blocks of rows, so that nothing here holds a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calmnb.checkpoint import Slot, weight_layout
from calmnb.config import ModelConfig
from calmnb.convert.vocabulary import Vocabulary
from calmnb.errors import TensorError, UnsupportedError

__all__ = ["Recipe", "Source", "TensorReader", "plan_llama", "rotary_order"]

#: Values of a matrix handled at once; 4 MiB as float32, which stays in cache while it is encoded.
_BLOCK_VALUES = 1 << 20


class TensorReader(Protocol):
    """Gives the tensors of a checkpoint as float arrays."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical shape of every tensor."""
        ...

    def rows(self, name: str, count: int) -> Iterator[NDArray[Any]]:
        """Consecutive blocks of at most `count` rows (of values, for a vector), as float16 or float32."""
        ...

    def close(self) -> None:
        """Release the files."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How one tensor of the `.calm` file is made.

    Attributes
    ----------
    slot : Slot
    parts : tuple of (source name or None, rows, order or None)
        Stacked along the rows. A None name stands for zeros. `order` permutes the rows of each attention head: new row i
        of a head is old row ``order[i]``.
    """

    slot: Slot
    parts: tuple[tuple[str | None, int, NDArray[np.intp] | None], ...]

    def blocks(self, reader: TensorReader) -> Iterator[NDArray[Any]]:
        """The tensor's values as consecutive blocks of rows."""
        columns = self.slot.shape[1] if len(self.slot.shape) > 1 else 1
        for name, rows, order in self.parts:
            if name is None:
                yield np.zeros((rows, *self.slot.shape[1:]), np.float32)
                continue
            head = 1 if order is None else len(order)
            for block in reader.rows(name, max(_BLOCK_VALUES // columns // head, 1) * head):
                if order is None:
                    yield block
                else:
                    yield block.reshape(-1, head, *self.slot.shape[1:])[:, order].reshape(block.shape)


@dataclass
class Source:
    """A checkpoint, ready to be converted.

    Attributes
    ----------
    path : Path
    config : ModelConfig
        Its dtype is not meaningful yet.
    reader : TensorReader
    recipes : list of Recipe
        In file order.
    vocabulary : Vocabulary
    settings : dict
        Goes into ``calmnb.json``.
    """

    path: Path
    config: ModelConfig
    reader: TensorReader
    recipes: list[Recipe]
    vocabulary: Vocabulary
    settings: dict[str, Any] = field(default_factory=dict)


def rotary_order(head_dim: int, rotary_dim: int) -> NDArray[np.intp]:
    """Row order that turns half-split rotary embedding into interleaved pairs, within one head.

    New rows are the old ``0, r/2, 1, r/2 + 1, ..., r/2 - 1, r - 1`` for ``r = rotary_dim``, then the rest unchanged.
    """
    order = np.arange(head_dim)
    order[:rotary_dim] = np.arange(rotary_dim).reshape(2, -1).T.reshape(-1)
    return order


def plan_llama(
    config: ModelConfig,
    reader: TensorReader,
    name_of: Callable[[str], str],
    *,
    path: Path,
    tied: bool | None,
    half_split: bool,
    needs_bias: bool,
    is_ignored: Callable[[str], bool],
) -> list[Recipe]:
    """Recipes for a Llama-like model, every source tensor used, ignored knowingly, or named in an error.

    Parameters
    ----------
    config
        Sizes.
    reader
        Knows the shapes.
    name_of
        Source name of a calm tensor name; biases are asked for as ``...attn.wq.bias`` and so on.
    path
        For messages.
    tied
        Whether the checkpoint says its output matrix is the embedding; a stored one is then ignored. Without a stored one
        it is tied in any case.
    half_split
        Whether rows of q and k are in half-split rotary order.
    needs_bias
        Whether q, k and v biases must be there.
    is_ignored
        Tells source tensors that carry no weights.

    Raises
    ------
    TensorError
        If a tensor is missing, has the wrong shape, or is left over.
    UnsupportedError
        If there is a bias that calm's layout has no place for, and it is not all zeros.
    """
    # Sizes from outside bound loops and arrays below, so they are held against the tensors first.
    query = reader.shapes.get(name_of("model.layers.0.attn.wq.weight"))
    if config.n_layers > len(reader.shapes) or query is None or query[0] != config.q_dim:
        raise TensorError(
            f"{path}: the configuration asks for {config.n_layers} layers of {config.n_heads} heads of {config.head_dim}, but "
            f"among the {len(reader.shapes)} tensors {name_of('model.layers.0.attn.wq.weight')} "
            f"{'is missing' if query is None else 'has the shape ' + str(list(query))}"
        )
    order = rotary_order(config.head_dim, config.rotary_dim) if half_split else None
    output = name_of("model.output.weight")
    tied = bool(tied) or output not in reader.shapes
    used = {output} if tied else set()

    def take(name: str, shape: tuple[int, ...], what: str) -> str:
        found = reader.shapes.get(name)
        if found is None:
            raise TensorError(f"{path}: tensor {name} ({what}) is missing; a {config.arch} model needs it")
        if found != shape:
            raise TensorError(
                f"{path}: tensor {name} has the shape {list(found)}, but the configuration asks for {list(shape)}"
            )
        used.add(name)
        return name

    def bias_part(layer: int, which: str) -> tuple[str | None, int, NDArray[np.intp] | None]:
        rows = config.q_dim if which == "wq" else config.kv_dim
        name = name_of(f"model.layers.{layer}.attn.{which}.bias")
        if name not in reader.shapes and not needs_bias:
            return None, rows, None
        return take(name, (rows,), f"{which} bias"), rows, None if which == "wv" else order

    bias = [
        needs_bias or any(name_of(f"model.layers.{layer}.attn.{which}.bias") in reader.shapes for which in ("wq", "wk", "wv"))
        for layer in range(config.n_layers)
    ]
    recipes = []
    for slot in weight_layout(config, qkv_bias=bias, tied=tied):
        if slot.name.endswith("wqkv.bias"):
            layer = int(slot.name.split(".")[2])
            recipes.append(Recipe(slot, tuple(bias_part(layer, which) for which in ("wq", "wk", "wv"))))
            continue
        rotated = slot.name.endswith(("attn.wq.weight", "attn.wk.weight"))
        name = take(name_of(slot.name), slot.shape, slot.name)
        recipes.append(Recipe(slot, ((name, slot.shape[0], order if rotated else None),)))
    _check_leftovers([name for name in reader.shapes if name not in used and not is_ignored(name)], reader, path)
    return recipes


def _check_leftovers(names: Sequence[str], reader: TensorReader, path: Path) -> None:
    """Refuse tensors that nothing used; biases of zeros may be dropped, since they change nothing."""
    for name in names:
        if name.endswith(".bias") and len(reader.shapes[name]) == 1:
            if not any(block.any() for block in reader.rows(name, _BLOCK_VALUES)):
                continue
            raise UnsupportedError(
                f"{path}: tensor {name} is a bias that this version has no place for; "
                "biases of the q, k and v projections are supported, others only when they are zero"
            )
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise TensorError(
            f"{path}: tensor {name} {list(reader.shapes[name])}{others} has no place in the model that the configuration "
            "describes; converting without it would give wrong answers. Is this a variant of the architecture?"
        )
