"""How weights are stored: fp16, fp8 (E5M2) and gf4, encoded and decoded in NumPy.

These functions say what the bits mean. Converters call the encoders; tests hold every kernel and every engine against
the decoders. Everything works block by block, so that encoding a matrix needs little memory beside it and stays in cache.

fp8 is the top byte of an fp16 number: sign 1, exponent 5 (bias 15), mantissa 2, unscaled. gf4 packs 8 weights of a row
into a 32-bit word: bits 0-7 hold an E5M2 scale ``s``, bits ``8 + 3 i .. 10 + 3 i`` the code ``c`` of weight ``i``, which
decodes to ``(c - 4) * s / -4``. The largest weight of a group always has code 0, so 4 bits a weight keep it to E5M2.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import ConfigError

__all__ = ["decode", "decode_e5m2", "decode_gf4", "encode", "encode_e5m2", "encode_gf4", "storage_dtype", "storage_shape"]

#: Groups of eight weights handled at once by the gf4 encoder (512 KiB of float32), and values by the fp8 encoder.
_BLOCK_GROUPS = 1 << 14
_BLOCK_VALUES = 1 << 17

_STORAGE: dict[str, type[np.generic]] = {"fp16": np.float16, "fp8": np.uint8, "gf4": np.uint32}


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy dtype that holds weights stored as `dtype`: float16, uint8 or uint32.

    Raises
    ------
    ConfigError
        For another `dtype` than fp16, fp8 and gf4.
    """
    if dtype not in _STORAGE:
        raise ConfigError(f"weights cannot be stored as {dtype!r}; accepted are {', '.join(_STORAGE)}")
    return np.dtype(_STORAGE[dtype])


def storage_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Shape of the array that holds a matrix of logical `shape`: the last dimension is divided by 8 for gf4.

    Raises
    ------
    ConfigError
        If `dtype` is gf4 and the rows do not divide into groups of 8.
    """
    storage_dtype(dtype)
    if dtype != "gf4":
        return shape
    if not shape or shape[-1] % 8:
        raise ConfigError(
            f"gf4 groups 8 weights of a row, but the shape is {list(shape)}: the last dimension must be a multiple of 8. "
            "Store this model as fp8 or fp16."
        )
    return (*shape[:-1], shape[-1] // 8)


def encode(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Encode weights for storage.

    Parameters
    ----------
    x : float array, shape (..., columns)
        Any float dtype, bfloat16 included. Not modified.
    dtype : {"fp16", "fp8", "gf4"}

    Returns
    -------
    array, freshly allocated
        float16 or uint8 of the same shape, or uint32 of shape (..., columns // 8).

    Raises
    ------
    ConfigError
        If `dtype` is unknown, or is gf4 and `columns` is not a multiple of 8.
    """
    storage_shape(x.shape, dtype)
    if dtype == "fp8":
        return encode_e5m2(x)
    if dtype == "gf4":
        return encode_gf4(x)
    with np.errstate(over="ignore"):
        return np.asarray(x, order="C").astype(np.float16)


def decode(a: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Decode stored weights to float32, exactly.

    Parameters
    ----------
    a : float16, uint8 or uint32 array, shape (..., columns) or (..., columns // 8) for gf4
    dtype : {"fp16", "fp8", "gf4"}

    Returns
    -------
    float32 array, shape (..., columns), freshly allocated

    Raises
    ------
    ConfigError
        If `a` is not stored the way `dtype` is.
    """
    if a.dtype != storage_dtype(dtype):
        raise ConfigError(f"{dtype} weights are stored as {storage_dtype(dtype)}, but the array is {a.dtype}")
    if dtype == "fp8":
        return decode_e5m2(a)
    if dtype == "gf4":
        return decode_gf4(a)
    return a.astype(np.float32)


def encode_e5m2(x: NDArray[Any], *, saturate: bool = False) -> NDArray[np.uint8]:
    """Round to E5M2, ties to even.

    Parameters
    ----------
    x : float array, any shape
        Read as float32.
    saturate
        False: magnitudes from 61440 up become infinity, as weights do. True: they become 57344, as the fp8 KV cache does.

    Returns
    -------
    uint8 array of the same shape
    """
    out = np.empty(x.shape, dtype=np.uint8)
    source, flat = np.ravel(x), out.reshape(-1)
    for start in range(0, source.size, _BLOCK_VALUES):
        block = source[start : start + _BLOCK_VALUES].astype(np.float32)
        flat[start : start + _BLOCK_VALUES] = _e5m2_block(block, saturate)
    return out


def _e5m2_block(x: NDArray[np.float32], saturate: bool = False) -> NDArray[np.uint8]:
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Normal numbers: move the exponent bias from 127 to 15 and round 21 mantissa bits away, ties to even. The carry of a
    # rounded-up mantissa walks into the exponent, and from the largest finite value into infinity, as it should.
    odd = (magnitude >> np.uint32(21)) & np.uint32(1)
    code = (magnitude - np.uint32((127 - 15) << 23) + np.uint32(0xFFFFF) + odd) >> np.uint32(21)
    # Subnormal numbers are multiples of 2**-16, and so is the last bit of a float32 near 128: adding 128 rounds to it.
    tiny = magnitude < np.uint32((127 - 14) << 23)
    if tiny.any():
        shifted = np.minimum(magnitude, np.uint32((127 - 14) << 23)).view(np.float32) + np.float32(128.0)
        code = np.where(tiny, shifted.view(np.uint32) - np.uint32(0x43000000), code)
    code = np.minimum(code, np.uint32(0x7B if saturate else 0x7C))
    nan = magnitude > np.uint32(0x7F800000)
    if nan.any():
        code[nan] = 0x7E
    signed: NDArray[np.uint32] = code | ((bits >> np.uint32(24)) & np.uint32(0x80))
    return signed.astype(np.uint8)


def decode_e5m2(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode E5M2 bytes: uint8 array of any shape to float32 of the same shape."""
    return (b.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)


def encode_gf4(x: NDArray[Any]) -> NDArray[np.uint32]:
    """Encode weights as gf4, eight of a row to a word.

    Parameters
    ----------
    x : float array, shape (..., columns), columns a multiple of 8
        Read as float32; bfloat16 and float16 values are exact in it.

    Returns
    -------
    uint32 array, shape (..., columns // 8)

    Notes
    -----
    Per group: the scale is the element of largest magnitude with its sign (the first one on ties), rounded to E5M2. Each
    quotient by it is cast to fp16, and ``4 - 4 q`` is computed in fp16, clamped to 0..7 and rounded half to even.
    """
    out = np.empty(storage_shape(x.shape, "gf4"), dtype=np.uint32)
    source, flat = np.ravel(x).reshape(-1, 8), out.reshape(-1)
    for start in range(0, len(source), _BLOCK_GROUPS):
        flat[start : start + _BLOCK_GROUPS] = _gf4_block(source[start : start + _BLOCK_GROUPS])
    return out


def _gf4_block(groups: NDArray[Any]) -> NDArray[np.uint32]:
    # One contiguous row per place in the group: the search for the largest element is then seven whole-row passes.
    # A copy even where a lone group needs no transposing: x is divided in place.
    x = np.array(groups.T, dtype=np.float32, order="C", copy=True)
    size = np.abs(x)
    largest = size.max(axis=0)
    scale = x[7].copy()
    for place in range(6, -1, -1):
        np.copyto(scale, x[place], where=size[place] == largest)
    code8 = _e5m2_block(np.where(np.isnan(largest), largest, scale))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x /= decode_e5m2(code8)
        if not np.isfinite(x.min() + x.max()):
            x[~np.isfinite(x)] = 0.0
        # fp16 holds 4 q exactly; adding 4 rounds, which float32 arithmetic followed by one cast does identically.
        y = x.astype(np.float16).astype(np.float32)
    y *= np.float32(-4.0)
    y += np.float32(4.0)
    codes = np.rint(y.astype(np.float16).astype(np.float32)).clip(0.0, 7.0).astype(np.uint32)
    word = code8.astype(np.uint32)
    for place in range(8):
        word |= codes[place] << np.uint32(8 + 3 * place)
    return word


def decode_gf4(w: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Decode gf4 words: uint32 array of shape (..., groups) to float32 of shape (..., 8 * groups)."""
    out = np.empty((*w.shape[:-1], w.shape[-1] * 8), dtype=np.float32)
    words, flat = np.ravel(w), out.reshape(-1, 8)
    table = _gf4_table()
    for start in range(0, words.size, _BLOCK_GROUPS):
        block = words[start : start + _BLOCK_GROUPS]
        scale = (block & np.uint32(0xFF)) << np.uint32(3)
        for place in range(8):
            code = (block >> np.uint32(8 + 3 * place)) & np.uint32(7)
            flat[start : start + _BLOCK_GROUPS, place] = table.take(scale | code)
    return out


@cache
def _e5m2_table() -> NDArray[np.float32]:
    return decode_e5m2(np.arange(256, dtype=np.uint8))


@cache
def _gf4_table() -> NDArray[np.float32]:
    """All values a gf4 weight can have: float32 (2048,), indexed by ``8 * scale byte + code``."""
    steps = np.arange(8, dtype=np.float32) - np.float32(4.0)
    with np.errstate(invalid="ignore"):
        table: NDArray[np.float32] = (steps * (_e5m2_table()[:, None] / np.float32(-4.0))).reshape(-1)
    return table
