"""What the bench does not time: first compilation, loading weights, opening and closing: ``python -m tests.gpu.extras``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from calmnb.engine.cuda import open_random_engine
from calmnb.engine.cuda_device import CudaDevice
from calmnb.engine.cuda_weights import Region, upload
from calmnb.shapes import shape_config

COMPILE = """
import time
from calmnb.engine.cuda import open_random_engine
from calmnb.shapes import shape_config
began = time.perf_counter()
with open_random_engine(shape_config("llama-3.2-1b", "{dtype}"), is_tied=True, seq_len=512) as engine:
    opened = time.perf_counter()
    list(engine.decode_many(1, 0, 4))
    print(f"{{opened - began:.1f}} s to open, {{time.perf_counter() - opened:.2f}} s more to the fourth token", flush=True)
"""


def compile_times() -> None:
    """A model opened with an empty kernel cache, then with a full one, each in a new process."""
    for dtype in ("fp16", "gf4"):
        with tempfile.TemporaryDirectory() as cache:
            for what in ("empty", "full"):
                environment = os.environ | {"CALMNB_CACHE": cache}
                done = subprocess.run(
                    [sys.executable, "-c", COMPILE.format(dtype=dtype)],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                print(f"1B {dtype}, kernel cache {what}: {done.stdout.strip() or done.stderr[-300:]}", flush=True)


def upload_rate(gb: int = 6) -> None:
    """Copy a mapped file in the page cache to the GPU."""
    with tempfile.NamedTemporaryFile() as file:
        block = np.random.default_rng(0).integers(0, 256, 1 << 28, dtype=np.uint8)
        for _ in range(4 * gb):
            file.write(block.tobytes())
        file.flush()
        gpu = CudaDevice()
        try:
            for again in range(3):
                data = np.memmap(file.name, np.uint8, "r")
                pieces = [data[at : at + (117 << 20)] for at in range(0, len(data), 117 << 20)]
                regions = [Region(str(i), p.nbytes, (p,), 8) for i, p in enumerate(pieces)]
                base = gpu.allocate(len(data) + 512 * len(pieces))
                addresses, at = {}, base
                for region in regions:
                    addresses[region.name] = at
                    at += -(-region.nbytes // 256) * 256
                began = time.perf_counter()
                upload(gpu, regions, addresses)
                print(f"upload {again}: {len(data) / (time.perf_counter() - began) / 1e9:.1f} GB/s of {len(data) / 1e9:.1f} GB")
                gpu.release(base)
        finally:
            gpu.close()


def open_and_close() -> None:
    """Free memory after loading, generating and closing, five times."""
    import cupy

    free = []
    for _ in range(6):
        with open_random_engine(shape_config("llama-3.2-1b", "fp8"), is_tied=True, seq_len=4096) as engine:
            engine.prefill(list(range(1, 40)))
            list(engine.decode_many(1, 39, 32))
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    print("free memory after each, relative to the first, bytes:", [f - free[0] for f in free[1:]])


def main() -> None:
    compile_times()
    open_and_close()
    upload_rate()
    print(f"cached kernels: {len(list(Path(os.environ.get('CALMNB_CACHE', '.')).rglob('*')))} files")


if __name__ == "__main__":
    main()
