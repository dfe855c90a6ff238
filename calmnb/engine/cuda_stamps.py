"""Times of every kernel, read while the GPU runs on.

Kernels note %globaltimer as they run (`StampLevel`); a last small kernel of the step moves those notes into a ring in
page-locked host memory. The host only ever reads memory: it asks the GPU for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmnb.engine.base import Kernel, Phase, Recorder
from calmnb.engine.cuda_device import Gpu
from calmnb.errors import DeviceError

__all__ = ["STAMP_ROWS", "StampLevel", "StampRing", "StepEdges"]

#: Steps that the ring holds.
STAMP_ROWS = 4096
#: Seconds after which the offset between the two clocks is measured again.
_CALIBRATION_S = 5.0
#: A step that begins within this many seconds of the end of what came before was queued behind it: the pause is the GPU's.
_BACK_TO_BACK_S = 20e-6


class StampLevel(IntEnum):
    """What kernels note: the values of ``CALMNB_STAMPS`` in kernels/common.cuh.

    Where a kernel starts before the one ahead of it has ended (programmatic dependent launch), its wait for that one returns
    when all of its blocks are done and their writes can be seen. One thread that reads the clock there gives the end of the
    kernel ahead, and costs next to nothing; every block's own end costs a third of a microsecond a kernel.

    Attributes
    ----------
    OFF
        Nothing.
    BLOCKS
        First block's start and last block's end.
    BLOCK_0
        Start and end of block 0.
    HANDED_OVER
        Start of block 0, and the end of the kernel ahead, as seen by block 0.
    HANDED_OVER_ENDS
        The end of the kernel ahead alone: a kernel then starts where that ended, and no overlap is seen.
    """

    OFF = 0
    BLOCKS = 1
    BLOCK_0 = 2
    HANDED_OVER = 3
    HANDED_OVER_ENDS = 4


class StepEdges(NamedTuple):
    """What lies around a step, in seconds.

    Attributes
    ----------
    moved_before : float
        When the stamps of the step before had been moved; far in the past at first.
    last_end : float
        When the step's last kernel ended.
    moving : float
        When the kernel that moves the step's stamps began its work.
    """

    moved_before: float
    last_end: float
    moving: float


class StampRing:
    """The ring, and the way from the GPU's clock to ``time.perf_counter``.

    Parameters
    ----------
    gpu
        Where the kernels run.
    n_kernels : int
        The most kernels a step may have.
    rows : int
        Steps the ring holds; a reader that falls further behind loses the oldest.

    Attributes
    ----------
    edges : StepEdges
        Of the step handed over last.

    Notes
    -----
    A step lasts from there to the end of its last kernel, so that the pause between two graphs queued back to back is in the
    step's ``gap`` and its rows sum to what CUDA events around it measure. After a longer pause, which is the host's, it
    begins with its first kernel. The kernel that moves the stamps is in no step: without recording, it would not be there.
    """

    def __init__(self, gpu: Gpu, n_kernels: int, rows: int = STAMP_ROWS) -> None:
        self._n = n_kernels
        self.rows = rows
        self._stride = 2 * n_kernels + 4
        self._ring = gpu.pinned(8 * rows * self._stride).view(np.uint64)
        self._stamps = gpu.allocate(16 * n_kernels + 16)
        self._serial = self._stamps + 16 * n_kernels
        initial = gpu.pinned(16 * n_kernels)
        initial.view(np.uint64)[0::2] = np.iinfo(np.uint64).max
        gpu.to_device(self._stamps, initial)
        gpu.wait()
        gpu.release(initial.ctypes.data)
        self._queued: list[tuple[Sequence[Kernel], StampLevel]] = []
        self._read = 0
        self.edges = StepEdges(0.0, 0.0, 0.0)
        self._origin: int | None = None
        self._newest = 1  # last note of the step read last, in the GPU's nanoseconds
        self._mapped = -float("inf")  # end of that step, on the host's clock
        self._offset = float("inf")
        self._calibrated = -float("inf")

    def places(self) -> dict[str, int]:
        """Addresses that `build_program` needs."""
        return {
            "stamps": self._stamps,
            "stamp_ring": self._ring.ctypes.data,
            "stamp_serial": self._serial,
            "stamp_rows": self.rows,
            "stamp_stride": self._stride,
        }

    def begin(self, kernels: Sequence[Kernel], level: StampLevel) -> None:
        """Note that a step with these kernels, stamped at `level`, was queued."""
        self._queued.append((kernels, level))

    def skip(self) -> None:
        """Pass over the steps that were queued but that nobody will ask for."""
        self._read += len(self._queued)
        self._queued.clear()

    def forward(self, recorder: Recorder, phase: Phase, pos: int, kv_len: int, *, timeout_s: float = 2.0) -> None:
        """Hand the oldest unread step to `recorder`, waiting for it if it is still on its way."""
        kernels, level = self._queued.pop(0)
        n = len(kernels)
        serial = self._read
        self._read += 1
        first = (serial % self.rows) * self._stride
        row = self._ring[first : first + 2 * n + 4]
        began = time.perf_counter()
        while True:
            # Words of a row may arrive in any order: what is older than the last step read is still to come.
            ticks = row[2:].astype(np.int64)  # nanoseconds since 1970, beyond what a float holds to the nanosecond
            noted = ticks[1 : 2 * n : 2] if level == StampLevel.HANDED_OVER_ENDS else ticks[: 2 * n]
            if int(row[0]) == serial + 1 and int(noted.min()) >= self._newest <= int(ticks[-1]):
                break
            if time.perf_counter() - began > timeout_s:
                raise DeviceError("the times of a step did not arrive; this is a bug in calmnb, please report it")
            time.sleep(0)
        now = time.perf_counter()
        if self._origin is None:
            self._origin = int(ticks[-1])
        seconds = (ticks - self._origin).astype(np.float64) * 1e-9
        times: NDArray[np.float64] = seconds[: 2 * n].reshape(n, 2)
        if level >= StampLevel.HANDED_OVER:
            seen = np.append(times[:, 1], seconds[-1])  # of a step's last kernel, what moves the stamps sees the end
            times[:, 1] = seen[1:]
            if level == StampLevel.HANDED_OVER_ENDS:
                times[:, 0] = seen[:-1]
        first_start, last_end = float(times[:, 0].min()), float(times[:, 1].max())
        self.edges = StepEdges(float(seconds[-2]), last_end, float(seconds[-1]))
        pause = first_start - self.edges.moved_before
        begin = self.edges.moved_before if 0 <= pause < _BACK_TO_BACK_S else first_start
        if begin == first_start or self._offset == float("inf"):  # a new run: within one, all steps keep their distance
            late = now - self._calibrated > _CALIBRATION_S
            self._offset = max(now - last_end if late else min(self._offset, now - last_end), self._mapped - begin)
            self._calibrated = now if late else self._calibrated
        self._newest = int(noted.max())
        self._mapped = last_end + self._offset
        times += self._offset
        recorder.add(phase, pos, kv_len, 1, kernels, times[:, 0], times[:, 1], begin + self._offset, self._mapped)
