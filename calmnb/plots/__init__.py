"""Figures of a `Session`, each a function that returns a matplotlib Figure; light or dark, legible at 800 pixels.

They draw the session's own tables and compute nothing a test could not check there. No pyplot: nothing is shown or kept.
"""

from __future__ import annotations

from calmnb.plots.compare import compare, waterfall
from calmnb.plots.costs import latency, layers, speed_of_light
from calmnb.plots.kv import kv_cost, kv_memory
from calmnb.plots.rooflines import intensity_roofline, roofline
from calmnb.plots.telemetry import telemetry
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS

__all__ = [
    "STAGE_COLORS",
    "STAGE_LABELS",
    "compare",
    "intensity_roofline",
    "kv_cost",
    "kv_memory",
    "latency",
    "layers",
    "roofline",
    "speed_of_light",
    "telemetry",
    "waterfall",
]
