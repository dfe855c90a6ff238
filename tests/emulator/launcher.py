"""Run the kernels on the CPU: their own source, compiled by g++ against stand-ins for CUDA's built-ins.

Covers what a kernel computes, where it reads and writes shared memory, and that it waits for its asynchronous copies; not
timing, and not dependent launch.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from calmnb.engine.cuda_matvec import Device, MatvecArgs, MatvecPlan
from calmnb.kernels import KernelSpec, kernels_dir

HERE = Path(__file__).parent
WRAPPER = """#include <cuda_fp16.h>
#include "{source}"
using uint = unsigned;
extern "C" void run(void** p, uint columns, uint rows, uint threads, uint smem, uint resident, uint order) {{
  shared_bytes = smem;
  emulator::run_grid(columns, rows, threads, smem, resident, order, [=] {{ {name}({arguments}); }});
}}
extern "C" void exponentials(float* x, int n) {{ for (int i = 0; i < n; i++) x[i] = expf(x[i]); }}
"""
_COMPILER = [
    "g++", "-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE",
    "-fno-gnu-unique",
]  # fmt: skip
# What an assembler instruction asks of the driver, and a kernel without it does as well.
_ASSEMBLER = re.compile(r'asm volatile\("ld\.global\.L1::no_allocate.*?;\n', re.DOTALL)
_SHARED = re.compile(r"extern __shared__ __align__\(16\) u8 (\w+)\[\];")


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
        self._numbers = itertools.count()
        for path in kernels_dir().rglob("*.cu*"):
            text = _ASSEMBLER.sub("v[j] = in[base + j * 512];\n", path.read_text()).replace("__restrict__", "")
            target = folder / path.relative_to(kernels_dir())
            target.parent.mkdir(exist_ok=True)
            target.write_text(_SHARED.sub(r"\n#define \1 (emulator::dynamic_shared)\n", text))
        for name in ("common.cuh", "cuda_fp16.h", "mma.cuh", "sync.cuh"):
            (folder / name).write_text((HERE / name).read_text())
        # Compiled once, for it is what every kernel includes first; g++ finds it beside the header.
        subprocess.run([*_COMPILER, "-x", "c++-header", "cuda_fp16.h", "-o", "cuda_fp16.h.gch"], cwd=folder, check=True)

    def library(self, spec: KernelSpec) -> Any:
        """The kernel, compiled, as ``run(addresses of arguments, columns, rows, block, shared, resident, order)``."""
        if spec not in self._libraries:
            name = f"k{next(self._numbers)}"
            text = WRAPPER.format(source=spec.source, name=spec.name, arguments=self._arguments(spec))
            (self.folder / f"{name}.cpp").write_text(text)
            subprocess.run(
                [*_COMPILER, "-shared", *spec.options(), "-I.", "-o", f"{name}.so", f"{name}.cpp"],
                cwd=self.folder,
                check=True,
            )
            self._libraries[spec] = ctypes.CDLL(str(self.folder / f"{name}.so"))
        return self._libraries[spec]

    def compile(self, specs: Iterable[KernelSpec]) -> None:
        """Compile several kernels side by side."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.library, dict.fromkeys(specs)))

    def _arguments(self, spec: KernelSpec) -> str:
        """The kernel's arguments taken from their addresses, by the types that its source declares."""
        source = (self.folder / spec.source).read_text()
        found = re.search(rf"__global__[^;{{]*?\b{spec.name}\(([^{{]*)\)\s*{{", source)
        assert found is not None, f"{spec.source} has no kernel {spec.name}"
        types = [p.replace("__grid_constant__", "").rsplit(None, 1)[0] for p in found[1].split(",")]
        return ", ".join(f"*({kind}*)p[{i}]" for i, kind in enumerate(types))

    def run(
        self, spec: KernelSpec, args: Sequence[Any], grid: tuple[int, int], block: int, shared: int,
        *, together: bool = False, order: int = 0,
    ) -> None:  # fmt: skip
        """Run a kernel; `args` are ctypes objects, `order` changes which block comes first.

        With `together` all blocks stand side by side, for kernels whose blocks wait for each other: these must have no
        static shared memory, which here is one for all blocks.
        """
        pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(a) for a in args])
        self.library(spec).run(pointers, *grid, block, shared, grid[0] * grid[1] if together else 1, order)

    def launch(self, plan: MatvecPlan, args: MatvecArgs, stream: Any = None, *, pdl: bool = True) -> None:
        self.run(plan.spec, [args], (plan.grid, 1), plan.block, plan.smem)

    def launch_grid(
        self,
        spec: KernelSpec,
        args: ctypes.Structure,
        grid: int,
        block: int,
        shared: int,
        *,
        together: bool = False,
        order: int = 0,
    ) -> None:
        """As `run`, of a kernel with one structure and a row of blocks."""
        self.run(spec, [args], (grid, 1), block, shared, together=together, order=order)
