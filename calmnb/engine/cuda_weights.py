"""Weights on the GPU: which regions they need, and how they get there.

One allocation holds every tensor, each at a multiple of 256 bytes, so that the memory a model needs is known to the byte
before any is taken. Rows stay as the file stores them; q, k and v lie one after another and are read as one matrix.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calmnb.config import DTYPE_BITS, ModelConfig
from calmnb.engine.base import Weights
from calmnb.engine.cuda_device import Gpu, Launch
from calmnb.kernels import CompiledKernel, KernelSpec

__all__ = [
    "ALIGNMENT",
    "Layout",
    "Region",
    "fill_random",
    "fill_regions",
    "find_wide",
    "random_regions",
    "upload",
    "weight_regions",
]

ALIGNMENT = 256
#: One thread copies from a mapped file at 3-6 GB/s; a few reach what the memory gives.
_COPY_THREADS = 4

Compile = Callable[[KernelSpec], CompiledKernel]

#: Half products of two weights and two activations stay in range below this weight; beyond, the wide kernel is used.
_WIDE_FROM = 256.0

#: Called with bytes done, bytes in all, and the name of the tensor at hand.
UploadProgress = Callable[[int, int, str], None]


class Layout:
    """Named pieces of one allocation, each at a multiple of `ALIGNMENT` bytes.

    Examples
    --------
    >>> layout = Layout([("a", 10), ("b", 300)])
    >>> layout.offsets["b"], layout.nbytes
    (256, 768)
    """

    def __init__(self, pieces: Iterable[tuple[str, int]]) -> None:
        self.offsets: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.nbytes = 0
        for name, nbytes in pieces:
            self.offsets[name] = self.nbytes
            self.sizes[name] = nbytes
            self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def at(self, base: int) -> dict[str, int]:
        """Addresses of the pieces when the allocation begins at `base`."""
        return {name: base + offset for name, offset in self.offsets.items()}


@dataclass(frozen=True)
class Region:
    """One piece of the weights.

    Attributes
    ----------
    name : str
        ``"embed"``, ``"0.wqkv"``, ``"0.attn_norm"``, ...
    nbytes : int
    arrays : tuple of arrays
        What to copy there, one after another; empty for random weights.
    bits : int
        4, 8 or 16 for a matrix, 32 for a norm or a bias.
    """

    name: str
    nbytes: int
    arrays: tuple[NDArray[np.generic], ...]
    bits: int


def weight_regions(weights: Weights) -> list[Region]:
    """Regions of a model's tensors, in the order in which a step reads them."""
    bits = DTYPE_BITS[weights.config.dtype]

    def region(name: str, *arrays: NDArray[np.generic], bits: int = bits) -> Region:
        return Region(name, sum(a.nbytes for a in arrays), arrays, bits)

    out = [region("embed", weights.embed)]
    for i, layer in enumerate(weights.layers):
        out.append(region(f"{i}.attn_norm", layer.attn_norm, bits=32))
        out.append(region(f"{i}.wqkv", layer.wq, layer.wk, layer.wv))
        if layer.qkv_bias is not None:
            out.append(region(f"{i}.bias", layer.qkv_bias, bits=32))
        out.append(region(f"{i}.wo", layer.wo))
        if layer.mlp_norm is not None:
            out.append(region(f"{i}.mlp_norm", layer.mlp_norm, bits=32))
        if layer.moegate is not None:
            out.append(region(f"{i}.moegate", layer.moegate))
        out += [region(f"{i}.w1", layer.w1), region(f"{i}.w3", layer.w3), region(f"{i}.w2", layer.w2)]
    out.append(region("final_norm", weights.final_norm, bits=32))
    if not weights.is_tied:
        out.append(region("output", weights.output))
    return out


def random_regions(config: ModelConfig, *, is_tied: bool) -> list[Region]:
    """Regions of a model that exists only as sizes; a kernel fills them."""
    c, bits = config, DTYPE_BITS[config.dtype]
    experts = max(c.n_experts, 1)

    def matrix(name: str, rows: int, cols: int) -> Region:
        return Region(name, rows * cols * bits // 8, (), bits)

    def norm(name: str) -> Region:
        return Region(name, c.dim * 4, (), 32)

    out = [matrix("embed", c.vocab_size, c.dim)]
    for i in range(c.n_layers):
        out += [norm(f"{i}.attn_norm"), matrix(f"{i}.wqkv", c.q_dim + 2 * c.kv_dim, c.dim), matrix(f"{i}.wo", c.dim, c.q_dim)]
        if not c.is_parallel:
            out.append(norm(f"{i}.mlp_norm"))
        if c.is_moe:
            out.append(matrix(f"{i}.moegate", c.n_experts, c.dim))
        out += [matrix(f"{i}.{w}", experts * c.hidden_dim, c.dim) for w in ("w1", "w3", "w2")]
    out.append(norm("final_norm"))
    if not is_tied:
        out.append(matrix("output", c.vocab_size, c.dim))
    return out


def upload(
    gpu: Gpu,
    regions: Sequence[Region],
    addresses: dict[str, int],
    *,
    progress: UploadProgress | None = None,
    staging_bytes: int = 32 << 20,
) -> None:
    """Copy the regions' arrays to the GPU through two page-locked buffers.

    While one buffer travels, the next piece is read from the mapped file into the other: host memory stays at two
    buffers whatever the model's size.
    """
    total = sum(r.nbytes for r in regions)
    pool = ThreadPoolExecutor(_COPY_THREADS)
    buffers = [gpu.pinned(staging_bytes) for _ in range(2)]
    events: list[object | None] = [None, None]
    turn = done = 0
    try:
        for region in regions:
            target = addresses[region.name]
            for array in region.arrays:
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for at in range(0, flat.nbytes, staging_bytes):
                    piece = flat[at : at + staging_bytes]
                    if events[turn] is not None:
                        gpu.wait(events[turn])
                    staged = buffers[turn][: piece.nbytes]
                    _copy(pool, staged, piece)
                    gpu.to_device(target + at, staged)
                    events[turn] = gpu.mark()
                    turn = 1 - turn
                    done += piece.nbytes
                    if progress is not None:
                        progress(done, total, region.name)
                target += flat.nbytes
        gpu.wait()
    finally:
        pool.shutdown()
        for buffer in buffers:
            gpu.release(buffer.ctypes.data)


def _copy(pool: Executor, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copy with several threads (NumPy releases the interpreter lock while it copies)."""
    step = max(-(-source.nbytes // _COPY_THREADS), 1 << 20)
    cuts = range(0, source.nbytes, step)
    for _ in pool.map(lambda at: np.copyto(target[at : at + step], source[at : at + step]), cuts):
        pass


def fill_random(gpu: Gpu, kernels: Compile, address: int, nbytes: int, *, seed: int, bits: int, scale: float) -> None:
    """Queue random numbers into device memory, uniform within +-`scale` (bits 32: near 1); see kernels/cache.cu."""
    args = (
        ctypes.c_uint64(address), ctypes.c_int64(nbytes // 4), ctypes.c_uint32(seed), ctypes.c_int32(bits),
        ctypes.c_float(scale),
    )  # fmt: skip
    kernel = kernels(KernelSpec("fill_random", "cache.cu"))
    gpu.launch([Launch(kernel, (gpu.sm_count * 8, 1), 256, 0, args, dependent=False)])


def fill_regions(gpu: Gpu, kernels: Compile, regions: Sequence[Region], addresses: dict[str, int], dim: int) -> None:
    """Random weights of zero mean, with the spread that keeps activations level; norms near 1."""
    for seed, region in enumerate(regions, start=1):
        scale = (0.6 if region.bits == 4 else 1.0) * math.sqrt(3.0 / dim)
        fill_random(gpu, kernels, addresses[region.name], region.nbytes, seed=seed, bits=region.bits, scale=scale)
    gpu.wait()


def find_wide(gpu: Gpu, kernels: Compile, regions: Sequence[Region], addresses: dict[str, int]) -> frozenset[str]:
    """Names of matrices with weights so large that products in half precision could overflow."""
    matrices = [r for r in regions if r.bits != 32]
    kernel = kernels(KernelSpec("weight_peak", "cache.cu"))
    peaks = gpu.allocate(4 * len(matrices))
    staged = gpu.pinned(4 * len(matrices))
    launches = []
    for i, region in enumerate(matrices):
        args = (
            ctypes.c_uint64(addresses[region.name]), ctypes.c_int64(region.nbytes // 4), ctypes.c_int32(region.bits),
            ctypes.c_uint64(peaks + 4 * i),
        )  # fmt: skip
        launches.append(Launch(kernel, (gpu.sm_count * 8, 1), 256, 0, args, dependent=False))
    gpu.launch(launches)
    gpu.to_host(staged, peaks)
    gpu.wait()
    found = staged.view(np.float32)
    wide = frozenset(r.name for r, peak in zip(matrices, found, strict=True) if not peak < _WIDE_FROM)
    gpu.release(peaks)
    gpu.release(staged.ctypes.data)
    return wide
