"""Instructions of a compiled kernel's hot loop, counted in its machine code by NVIDIA's disassembler."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from calmnb.errors import DeviceError

__all__ = ["disassemble", "find_disassembler", "loop_instructions"]

_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_TARGET = re.compile(r"`\((\.L_\w+)\)|0x([0-9a-f]+)")
_ARITHMETIC = ("HFMA2", "HMUL2", "FFMA", "FMUL")


def find_disassembler() -> str | None:
    """Path of ``nvdisasm``: on the PATH, in pip's nvidia packages, or in a toolkit; None if absent."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    candidates = [root / part / "bin" / "nvdisasm" for root in roots for part in ("cu13", "cuda_nvdisasm", "cuda_nvcc")]
    return next((str(path) for path in [*candidates, Path("/usr/local/cuda/bin/nvdisasm")] if path.is_file()), None)


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, with labels, as ``nvdisasm -c`` prints it.

    Raises
    ------
    DeviceError
        If there is no ``nvdisasm``, or it does not accept the cubin.
    """
    tool = find_disassembler()
    if tool is None:
        raise DeviceError("nvdisasm was not found on the PATH or among pip's packages; pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(
            f"{tool} failed on a cubin of {len(cubin)} bytes: {done.stderr.strip()}; is it older than the compiler?"
        )
    return done.stdout


def loop_instructions(sass: str) -> int:
    """Instructions in the body of the loop that does most of the arithmetic; of nested ones the innermost.

    Parameters
    ----------
    sass
        Of one kernel, from `disassemble`.

    Returns
    -------
    int
        Static count, both sides of every branch inside the loop included; 0 if there is no loop with arithmetic.
    """
    labels: dict[str, int] = {}
    body: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(body)
        elif found := _INSTRUCTION.match(line):
            body.append((found[3], found[4]))
    best = (0, 0)
    for at, (opcode, operands) in enumerate(body):
        target = _TARGET.search(operands) if opcode.startswith("BRA") else None
        if target is None:
            continue
        start = labels.get(target[1], at + 1) if target[1] else int(target[2], 16) // 16
        if start <= at:
            inside = [op for op, _ in body[start : at + 1] if not op.startswith(("NOP", "WARPSYNC"))]
            arithmetic = sum(op.startswith(_ARITHMETIC) for op in inside)
            if arithmetic:
                best = max(best, (arithmetic, -len(inside)))
    return -best[1]
