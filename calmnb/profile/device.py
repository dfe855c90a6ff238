"""placeholder"""
from __future__ import annotations

from typing import Any


def datasheet_peak(device: str) -> dict[str, Any] | None:
    return None
