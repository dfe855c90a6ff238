"""Run the weight kernels on the CPU: their own source, compiled by g++ against stand-ins for CUDA's built-ins.

Covers what a kernel computes and where it reads and writes; not timing, not the order of asynchronous copies, not
dependent launch.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from calmnb.engine.cuda_matvec import Device, MatvecArgs, MatvecPlan
from calmnb.kernels import KernelSpec, kernels_dir

HERE = Path(__file__).parent
WRAPPER = """
#include "{source}"
extern "C" void run(const {args}* a, unsigned grid, unsigned block, unsigned smem, unsigned resident, unsigned order) {{
  shared_bytes = smem;
  emulator::run_grid(grid, block, smem, resident, order, [=] {{ {name}(*a); }});
}}
extern "C" void exponentials(float* x, int n) {{ for (int i = 0; i < n; i++) x[i] = expf(x[i]); }}
"""


class HostArray(np.ndarray):
    """A NumPy array that tells its address the way CuPy does."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def _host(array: Any) -> Any:
    array = np.asarray(array)
    # Aligned like device memory, so that a misaligned vector load is the kernel's own.
    raw = np.empty(array.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy.view(HostArray)


class EmulatedLauncher:
    """What `tests.gpu.launcher.Launcher` is to a GPU."""

    def __init__(self, folder: Path, *, sm_count: int = 3) -> None:
        self.folder = folder
        self.device = Device.of_arch("sm_90", sm_count)
        self.cupy = SimpleNamespace(
            asarray=_host,
            full=lambda n, value, dtype: _host(np.full(n, value, dtype)),
            asnumpy=lambda a: np.array(a),
            uint8=np.uint8,
            cuda=SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None)),
        )
        self._libraries: dict[KernelSpec, Any] = {}
        for path in kernels_dir().glob("*.cu*"):
            text = path.read_text()
            text = text.replace("extern __shared__ __align__(16) u8 shared[];", "#define shared (emulator::dynamic_shared)")
            (folder / path.name).write_text(text)
        for name in ("common.cuh", "sync.cuh"):
            (folder / name).write_text((HERE / name).read_text())

    def library(self, spec: KernelSpec, args: str = "MatvecArgs") -> Any:
        """The kernel, compiled, as ``run(args, grid, block, shared, resident, order)``; `args` names its structure."""
        if spec not in self._libraries:
            name = f"k{len(self._libraries)}"
            (self.folder / f"{name}.cpp").write_text(WRAPPER.format(source=spec.source, name=spec.name, args=args))
            subprocess.run(
                ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off",
                 "-U_FORTIFY_SOURCE", "-fno-gnu-unique", *spec.options(), f"-I{HERE}", "-o", f"{name}.so", f"{name}.cpp"],
                cwd=self.folder, check=True,
            )  # fmt: skip
            self._libraries[spec] = ctypes.CDLL(str(self.folder / f"{name}.so"))
        return self._libraries[spec]

    def launch(self, plan: MatvecPlan, args: MatvecArgs, stream: Any = None, *, pdl: bool = True) -> None:
        self.library(plan.spec).run(ctypes.byref(args), plan.grid, plan.block, plan.smem, 1, 0)

    def launch_grid(
        self,
        spec: KernelSpec,
        args_name: str,
        args: ctypes.Structure,
        grid: int,
        block: int,
        shared: int,
        *,
        together: bool = False,
        order: int = 0,
    ) -> None:
        """Run any kernel; `order` changes which block comes first.

        With `together` all blocks stand side by side, for kernels whose blocks wait for each other: these must have no
        static shared memory, which here is one for all blocks.
        """
        self.library(spec, args_name).run(ctypes.byref(args), grid, block, shared, grid if together else 1, order)
