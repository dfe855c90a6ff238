"""A stand-in GPU whose kernels leave stamps: every time in a recording is chosen here, the rest is the engine's own.

Made-up numbers for tests and for trying figures out: never to be shown as a measurement.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from calmnb.config import ModelConfig
from calmnb.engine.cuda_device import Launch
from calmnb.engine.cuda_ops import CollectArgs, SampleArgs
from calmnb.engine.stages import stage_cost
from tests.fake_gpu import FakeGpu, deliver

_STAGE_OF = {"embed": "embed", "matvec_qkv": "matmul_qkv", "matvec_gateup": "matmul_ffn_up", "matvec_rows": "output"}


class StampedGpu(FakeGpu):
    """Kernels take their bytes over `gb_per_s` plus `fixed_s`; each starts `overlap_s` before the one before it ends."""

    name = "Fake H200"

    def __init__(
        self, config: ModelConfig, *, kv_dtype: str = "fp16", gb_per_s: float = 4200.0, fixed_s: float = 1.0e-6,
        overlap_s: float = 0.6e-6, noise: float = 0.01, seed: int = 0, free: int = 120 << 30,
    ) -> None:  # fmt: skip
        super().__init__(free=free)
        self.config, self.kv_dtype = config, kv_dtype
        self.gb_per_s, self.fixed_s, self.overlap_s, self.noise = gb_per_s, fixed_s, overlap_s, noise
        self.random = np.random.default_rng(seed)
        self.now_ns, self.before_ns, self.serial = 1_000_000_000, 0, 0
        self.on_run = self._run

    def memory(self) -> tuple[int, int]:
        return self.free, 141 << 30

    def to_device(self, address: int, source: Any) -> None:
        """Skip bulk copies: nobody reads them."""
        if source.nbytes <= 1 << 20:
            super().to_device(address, source)

    def _run(self, launches: Sequence[Launch]) -> None:
        state = next((a.state for one in launches for a in one.args if isinstance(a, SampleArgs)), 0)
        kv_len = (ctypes.c_int32 * 2).from_address(state)[1] + 1 if state else 1
        collect = next((a for one in launches for a in one.args if isinstance(a, CollectArgs)), None)
        if collect is not None:
            self._stamp(launches[:-1], collect, kv_len)
        if state:
            deliver(launches, lambda pos: 1 + pos % 7)

    def _stamp(self, launches: Sequence[Launch], collect: CollectArgs, kv_len: int) -> None:
        begin, end, rows = float(self.now_ns), float(self.now_ns), []
        stages = [self._stage(one) for one in launches]
        for i, stage in enumerate(stages):
            if stage == "matmul_attn" and stages[i - 1] == "matmul_ffn_up":
                stage = "matmul_ffn_down"  # the same kernel serves both
            nbytes = stage_cost(self.config, stage, kv_len, kv_dtype=self.kv_dtype).bytes_min  # type: ignore[arg-type]
            takes = (nbytes / self.gb_per_s + 1e9 * self.fixed_s) * float(self.random.lognormal(0, self.noise))
            begin = max(begin, end - 1e9 * self.overlap_s)
            end = max(end, begin) + takes
            rows += [round(begin / 32) * 32, round(end / 32) * 32]
        ring = (ctypes.c_uint64 * collect.stride).from_address(collect.ring + 8 * (self.serial % collect.rows) * collect.stride)
        edges = [self.before_ns, rows[0]]
        ring[2 : 2 + len(rows) + 2] = [*rows, *edges]
        self.serial += 1
        ring[0] = self.serial
        self.before_ns = rows[-1] + 1000  # the kernel that moves the stamps
        self.now_ns = self.before_ns + round(1000 * self.random.lognormal(0.7, 0.1))

    def _stage(self, one: Launch) -> str:
        name = one.kernel.name
        if name.startswith("attention"):
            return "attention"
        if name.startswith("sample"):
            return "sample"
        return _STAGE_OF.get(name, "matmul_attn")
