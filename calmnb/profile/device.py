"""What the maker says a device can do, by name; and what this machine's CPU is.

A wrong peak is worse than none, so a name matches only if nothing in it is left unexplained: "RTX 4090 Laptop GPU" is
not an RTX 4090, and "H100" alone, of which there are three, is nobody.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from calmnb.errors import ConfigError

__all__ = ["DEVICES", "CpuInfo", "Device", "cpu_info", "datasheet_peak", "find_device", "get_device"]


@dataclass(frozen=True)
class Device:
    """Datasheet figures of one device.

    Attributes
    ----------
    name : str
    gb_per_s : float
        Memory bandwidth, GB = 1e9 bytes.
    fp32_tflops : float
        Ordinary float32 arithmetic at boost clock, 1e12 FLOP/s.
    tensor_tflops : float or None
        Dense fp16 matrix arithmetic with float32 sums, 1e12 FLOP/s; None where there is none or it is not published.
    memory_gb : float
        As the name on the box says, GiB.
    sms : int
        Streaming multiprocessors (GPU cores on Apple's chips).
    l2_mb : float
        Last-level cache, MiB; 0 unknown.
    aliases : tuple of str
        Other names the driver or people use.
    """

    name: str
    gb_per_s: float
    fp32_tflops: float
    tensor_tflops: float | None = None
    memory_gb: float = 0.0
    sms: int = 0
    l2_mb: float = 0.0
    aliases: tuple[str, ...] = ()


# name, GB/s, fp32, fp16 tensor (float32 sums, dense), GiB, SMs, L2 MiB. From NVIDIA's architecture white papers and
# product datasheets; Apple's from its newsroom (bandwidth, GPU cores) with FLOPs by clock x lanes.
_TABLE: tuple[Device, ...] = (
    Device("RTX 2080 Ti", 616, 13.4, 53.8, 11, 68, 5.5),
    Device("RTX 3060", 360, 12.7, 25.5, 12, 28, 3),
    Device("RTX 3070", 448, 20.3, 40.6, 8, 46, 4),
    Device("RTX 3080", 760, 29.8, 59.5, 10, 68, 5),
    Device("RTX 3090", 936, 35.6, 71, 24, 82, 6),
    Device("RTX 3090 Ti", 1008, 40, 80, 24, 84, 6),
    Device("RTX 4060", 272, 15.1, 30.2, 8, 24, 24),
    Device("RTX 4060 Ti", 288, 22.1, 44.1, 16, 34, 32),
    Device("RTX 4070", 504, 29.1, 58.3, 12, 46, 36),
    Device("RTX 4070 SUPER", 504, 35.5, 71, 12, 56, 48),
    Device("RTX 4070 Ti", 504, 40.1, 80.2, 12, 60, 48),
    Device("RTX 4070 Ti SUPER", 672, 44.1, 88.2, 16, 66, 48),
    Device("RTX 4080", 717, 48.7, 97.5, 16, 76, 64),
    Device("RTX 4080 SUPER", 736, 52.2, 104.4, 16, 80, 64),
    Device("RTX 4090", 1008, 82.6, 165.2, 24, 128, 72),
    Device("RTX 4090 D", 1008, 73.5, 147, 24, 114, 72),
    Device("RTX 5070", 672, 30.9, 61.7, 12, 48, 48),
    Device("RTX 5070 Ti", 896, 43.9, 87.9, 16, 70, 48),
    Device("RTX 5080", 960, 56.3, 112.6, 16, 84, 64),
    Device("RTX 5090", 1792, 104.8, 209.5, 32, 170, 96),
    Device("RTX A4000", 448, 19.2, 76.7, 16, 48, 4),
    Device("RTX A5000", 768, 27.8, 111.1, 24, 64, 6),
    Device("RTX A6000", 768, 38.7, 154.8, 48, 84, 6),
    Device("RTX 5000 Ada", 576, 65.3, 261.1, 32, 100, 72),
    Device("RTX 6000 Ada", 960, 91.1, 364.2, 48, 142, 96),
    Device("RTX PRO 6000 Blackwell", 1792, 125, 503.8, 96, 188, 128, ("RTX PRO 6000 Blackwell Workstation Edition",)),
    Device("T4", 320, 8.1, 65, 16, 40, 4),
    Device("V100 SXM2 16GB", 900, 15.7, 125, 16, 80, 6),
    Device("V100 SXM2 32GB", 900, 15.7, 125, 32, 80, 6),
    Device("V100 PCIe 16GB", 900, 14, 112, 16, 80, 6),
    Device("V100 PCIe 32GB", 900, 14, 112, 32, 80, 6),
    Device("A10", 600, 31.2, 125, 24, 72, 6),
    Device("A10G", 600, 35, 70, 24, 80, 6),
    Device("A30", 933, 10.3, 165, 24, 56, 24),
    Device("A40", 696, 37.4, 149.7, 48, 84, 6),
    Device("A100 40GB", 1555, 19.5, 312, 40, 108, 40, ("A100 SXM4 40GB", "A100 PCIe 40GB", "A100-40")),
    Device("A100 80GB PCIe", 1935, 19.5, 312, 80, 108, 40),
    Device("A100 80GB SXM", 2039, 19.5, 312, 80, 108, 40, ("A100 SXM4 80GB",)),
    Device("L4", 300, 30.3, 121, 24, 58, 48),
    Device("L40", 864, 90.5, 181, 48, 142, 96),
    Device("L40S", 864, 91.6, 362, 48, 142, 96),
    Device("H100 PCIe", 2000, 51, 756, 80, 114, 50, ("H100 PCIe 80GB",)),
    Device("H100 SXM", 3350, 66.9, 989, 80, 132, 50, ("H100 80GB HBM3", "H100 SXM5", "H100 SXM5 80GB", "H100 SXM 80GB")),
    Device("H100 NVL", 3938, 60, 835, 94, 132, 50),
    Device("H200", 4800, 66.9, 989, 141, 132, 60, ("H200 SXM", "H200 141GB HBM3e")),
    Device("H200 NVL", 4800, 60, 835, 141, 132, 50),
    Device("GH200", 4000, 66.9, 989, 96, 132, 50, ("GH200 480GB",)),
    Device("B200", 8000, 80, 2250, 180, 148, 126, ("B200 SXM",)),
    Device("Apple M1", 68, 2.6, None, 16, 8),
    Device("Apple M1 Pro", 200, 5.2, None, 32, 16),
    Device("Apple M1 Max", 400, 10.4, None, 64, 32),
    Device("Apple M1 Ultra", 800, 20.8, None, 128, 64),
    Device("Apple M2", 100, 3.6, None, 24, 10),
    Device("Apple M2 Pro", 200, 6.8, None, 32, 19),
    Device("Apple M2 Max", 400, 13.6, None, 96, 38),
    Device("Apple M2 Ultra", 800, 27.2, None, 192, 76),
    Device("Apple M3", 100, 3.5, None, 24, 10),
    Device("Apple M4", 120, 4.3, None, 32, 10),
)

#: Datasheet figures by name.
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}

_NOISE = frozenset({"nvidia", "geforce", "tesla", "graphics", "gpu", "generation", "apple", "corporation", "r", "tm"})


def _words(name: str) -> tuple[str, ...]:
    """Split a device name into what tells it apart, order and makers' words aside."""
    text = re.sub(r"(\d+)\s*gi?b\b", r"\1gb", name.lower())
    text = re.sub(r"\brtx(?=[\da])", "rtx ", text)
    return tuple(sorted(word for word in re.findall(r"[a-z0-9]+", text) if word not in _NOISE))


@cache
def _by_words() -> dict[tuple[str, ...], Device]:
    known: dict[tuple[str, ...], Device] = {}
    for device in _TABLE:
        for name in (device.name, *device.aliases):
            words = _words(name)
            known[words] = device
            # People leave out "RTX" where the number says it all ("4090"), but "6000 Ada" alone is left to stand.
            short = tuple(word for word in words if word != "rtx")
            if short != words and short[0].isdigit() and len(short[0]) == 4 and "ada" not in short:
                known.setdefault(short, device)
    return known


def find_device(name: str, *, memory_bytes: int | None = None) -> Device | None:
    """Datasheet figures of the device called `name`, or None if that is not certain.

    Parameters
    ----------
    name
        What the driver calls it ("NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3") or people do ("4090").
    memory_bytes
        Its memory, if known. Cards sold under one name with different memories differ in bandwidth too: a size more
        than 15% off the table's is no match.

    Examples
    --------
    >>> find_device("NVIDIA GeForce RTX 4090").gb_per_s
    1008
    >>> find_device("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    True
    """
    device = _by_words().get(_words(name))
    if device is None or memory_bytes is None or not device.memory_gb:
        return device
    return device if abs(memory_bytes / 2**30 / device.memory_gb - 1.0) <= 0.15 else None


def get_device(name: str) -> Device:
    """Like `find_device`, for a name that must be known.

    Raises
    ------
    ConfigError
        If it is not; the message lists those that share a word with it, or all.
    """
    device = find_device(name)
    if device is not None:
        return device
    asked = set(_words(name)) - {"rtx"}
    near = [known for known in DEVICES if asked & set(_words(known))] or list(DEVICES)
    raise ConfigError(
        f"device {name!r} is not in the table, or is one of several; known are {', '.join(near)}; "
        "or give a bandwidth in GB/s, or a Device of your own"
    )


def datasheet_peak(name: str, *, memory_bytes: int | None = None) -> dict[str, Any] | None:
    """Entry for ``Session.meta["peaks"]["datasheet"]``, or None if the table does not have `name` for certain."""
    device = find_device(name, memory_bytes=memory_bytes)
    return {"gb_per_s": float(device.gb_per_s), "source": f"datasheet of {device.name}"} if device else None


@dataclass(frozen=True)
class CpuInfo:
    """This machine's processor: marketing name, cores usable here, and last-level cache in bytes (0 unknown)."""

    name: str
    cores: int
    l3_bytes: int


@cache
def cpu_info() -> CpuInfo:
    """Return what this machine's processor says of itself. Never fails; what cannot be found is "CPU" or 0."""
    return CpuInfo(_cpu_name(), _usable_cores(), _last_level_cache())


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _last_level_cache() -> int:
    """Size of all last-level caches that the kernel lists, bytes; each is counted once however many cores share it."""
    sizes: dict[tuple[int, str], int] = {}
    try:
        for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            text = (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
            sizes[level, shared] = int(text.rstrip("KM")) * unit
    except (OSError, ValueError):
        return 0
    top = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == top)
