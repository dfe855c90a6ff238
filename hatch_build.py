"""Ships `kernels/` and `notebooks/` inside the wheel; an editable install uses them where they are."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShipFolders(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the two folders to a standard wheel, and nothing to an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        if version == "standard":
            build_data["force_include"].update({"kernels": "calmnb/_kernels", "notebooks": "calmnb/_notebooks"})
