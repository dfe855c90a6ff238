"""What a model needs of a GPU's memory, known before any of it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from calmnb.errors import DeviceError

__all__ = ["RESERVE", "MemoryPlan"]

#: Left to the driver: machine code, graphs, the context's own growth.
RESERVE = 160 << 20

_GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes
    ----------
    weights, cache, work, prefill : int
        Weights as stored; KV cache; what a decode step keeps between kernels; buffers for prompt processing.

    Examples
    --------
    >>> MemoryPlan(weights=2 << 30, cache=1 << 30, work=0, prefill=0).total >> 30
    3
    """

    weights: int
    cache: int
    work: int
    prefill: int

    @property
    def total(self) -> int:
        """All of it, without the reserve."""
        return self.weights + self.cache + self.work + self.prefill

    def check(self, free: int, total: int, device: str, *, seq_len: int, kv_dtype: str, bytes_per_token: int) -> None:
        """Refuse a plan that does not fit.

        Raises
        ------
        DeviceError
            With the numbers, and the context that would fit.
        """
        needed = self.total + RESERVE
        if needed <= free:
            return
        others = needed - self.cache
        fits = (free - others) // bytes_per_token if bytes_per_token else 0
        if fits >= 16:
            advice = f"a context of up to {fits} tokens would fit: pass seq_len={fits} or less"
            if kv_dtype == "fp16":
                advice += ", or kv_dtype='fp8', which takes half the cache"
        else:
            advice = "the weights alone leave no room: convert the model to a smaller dtype, or use device='cpu'"
        raise DeviceError(
            f"{device} has {free / _GIB:.2f} GiB free of {total / _GIB:.2f}, but this model needs {needed / _GIB:.2f} GiB: "
            f"{self.weights / _GIB:.2f} weights, {self.cache / _GIB:.2f} KV cache ({seq_len} tokens, {kv_dtype}), "
            f"{(self.work + self.prefill + RESERVE) / _GIB:.2f} scratch; {advice}"
        )
