"""Every column of every table, as the package describes them: one page made of its own dictionaries."""

from __future__ import annotations

import importlib

__all__ = ["TABLES", "columns_page"]

#: Heading, what holds the table, module and name of its description, key within it.
TABLES: tuple[tuple[str, str, str, str, str], ...] = (
    ("Events", "`session.events`", "calmnb.profile.events", "EVENT_COLUMNS", ""),
    ("Steps", "`session.steps`", "calmnb.profile.events", "STEP_COLUMNS", ""),
    ("Stages", "`session.stages()`", "calmnb.profile.tables", "TABLE_COLUMNS", "stages"),
    ("Layers", "`session.layers()`", "calmnb.profile.tables", "TABLE_COLUMNS", "layers"),
    ("Kernels", "`session.kernels()`", "calmnb.profile.tables", "TABLE_COLUMNS", "kernels"),
    ("Tokens", "`session.tokens()`", "calmnb.profile.tables", "TABLE_COLUMNS", "tokens"),
    ("KV cache", "`session.kv_cost()`", "calmnb.profile.tables", "TABLE_COLUMNS", "kv_cost"),
    ("Telemetry", "`session.telemetry()`", "calmnb.profile.telemetry", "TELEMETRY_COLUMNS", ""),
    ("Where attention is felt", "`calmnb.profile.kv.kv_milestones(session)`", "calmnb.profile.kv", "MILESTONE_COLUMNS", ""),
    ("Contexts that fit", "`calmnb.profile.kv.context_limits(config, device)`", "calmnb.profile.kv", "LIMIT_COLUMNS", ""),
    (
        "Comparison",
        "`calmnb.compare(a, b).table`, beside those compared by",
        "calmnb.profile.compare",
        "COMPARE_COLUMNS",
        "",
    ),
    ("Waterfall", "`calmnb.profile.waterfall.waterfall(session)`", "calmnb.profile.waterfall", "WATERFALL_COLUMNS", ""),
    ("Launches under ncu", "`read_ncu_csv(path)`", "calmnb.profile.ncu", "NCU_COLUMNS", ""),
    ("Declared and measured bytes", "`attach_measured(session, launches)`", "calmnb.profile.ncu", "MEASURED_COLUMNS", ""),
)

_INTRODUCTION = """# Columns of every table

Written at build time from the descriptions in the package. A column without a unit in its name is in seconds, bytes, FLOPs or a
count. GB is 10⁹ bytes.
"""


def columns_page() -> str:
    """Markdown of the page: a table of columns for each table."""
    parts = [_INTRODUCTION]
    for heading, holder, module, name, key in TABLES:
        described = getattr(importlib.import_module(module), name)
        columns: dict[str, str] = described[key] if key else described
        rows = "\n".join(f"| `{column}` | {text.replace('|', chr(92) + '|')} |" for column, text in columns.items())
        parts.append(f"## {heading}\n\n{holder}\n\n| column | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)
