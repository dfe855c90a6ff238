"""Recording where each token's time and bytes go: recorder, session, tables, peaks, speed of light.

The package is callable: ``calmnb.profile(model, prompt)`` is `calmnb.profile.capture.profile`, and
``calmnb.profile.Session`` is here too. Names load when first used, so that importing calmnb imports no pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from calmnb._callable import make_callable

if TYPE_CHECKING:
    from calmnb.profile.bandwidth import Bandwidth, measure_bandwidth
    from calmnb.profile.capture import measure_recording_overhead, profile
    from calmnb.profile.compare import Comparison, compare
    from calmnb.profile.device import DEVICES, find_device
    from calmnb.profile.ncu import attach_measured, read_ncu_csv
    from calmnb.profile.nsys import read_nsys
    from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
    from calmnb.profile.recorder import SessionRecorder, StepRecord
    from calmnb.profile.session import Peak, Session
    from calmnb.profile.speed_of_light import SpeedOfLight, speed_of_light

_HOME = {
    "Bandwidth": "bandwidth",
    "measure_bandwidth": "bandwidth",
    "measure_recording_overhead": "capture",
    "Comparison": "compare",
    "compare": "compare",
    "profile": "capture",
    "DEVICES": "device",
    "find_device": "device",
    "attach_measured": "ncu",
    "read_ncu_csv": "ncu",
    "read_nsys": "nsys",
    "STAGE_COLORS": "palette",
    "STAGE_LABELS": "palette",
    "SessionRecorder": "recorder",
    "StepRecord": "recorder",
    "Peak": "session",
    "Session": "session",
    "SpeedOfLight": "speed_of_light",
    "speed_of_light": "speed_of_light",
}

__all__ = [
    "DEVICES",
    "STAGE_COLORS",
    "STAGE_LABELS",
    "Bandwidth",
    "Comparison",
    "Peak",
    "Session",
    "SessionRecorder",
    "SpeedOfLight",
    "StepRecord",
    "attach_measured",
    "compare",
    "find_device",
    "measure_bandwidth",
    "measure_recording_overhead",
    "profile",
    "read_ncu_csv",
    "read_nsys",
    "speed_of_light",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


make_callable(__name__, "profile", keep=("compare", "speed_of_light"))
