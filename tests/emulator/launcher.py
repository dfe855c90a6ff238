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
extern "C" void run(const MatvecArgs* a, unsigned grid, unsigned block, unsigned smem) {{
  static std::vector<uint4> storage;
  storage.resize(smem / 16 + 1);
  emulator::dynamic_shared = reinterpret_cast<u8*>(storage.data());
  shared_bytes = smem;
  emulator::grid_size = {{grid, 1, 1}};
  emulator::block_dim = {{block, 1, 1}};
  for (unsigned b = 0; b < grid; b++) {{
    emulator::block_index = {{b, 0, 0}};
    memset(emulator::dynamic_shared, 0xFF, storage.size() * 16);
    emulator::run_block(block, [&] {{ {name}(*a); }});
  }}
}}
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
        (folder / "common.cuh").write_text((HERE / "common.cuh").read_text())

    def _library(self, spec: KernelSpec) -> Any:
        if spec not in self._libraries:
            name = f"k{len(self._libraries)}"
            (self.folder / f"{name}.cpp").write_text(WRAPPER.format(source=spec.source, name=spec.name))
            subprocess.run(
                ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off",
                 *spec.options(), f"-I{HERE}", "-o", f"{name}.so", f"{name}.cpp"],
                cwd=self.folder, check=True,
            )  # fmt: skip
            self._libraries[spec] = ctypes.CDLL(str(self.folder / f"{name}.so"))
        return self._libraries[spec]

    def launch(self, plan: MatvecPlan, args: MatvecArgs, stream: Any = None, *, pdl: bool = True) -> None:
        self._library(plan.spec).run(ctypes.byref(args), plan.grid, plan.block, plan.smem)
