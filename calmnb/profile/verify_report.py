"""The fidelity table as Markdown, for the documentation and the terminal alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from calmnb.profile.verify import Fidelity

__all__ = ["fidelity_markdown"]


def fidelity_markdown(found: Fidelity, *, command: str = "") -> str:
    """Whole document: where it was measured and by which command, the checks, kernels by three clocks, bytes.

    Parameters
    ----------
    found
        From `calmnb.profile.verify`.
    command
        The command line to write down.

    Returns
    -------
    str
        Ends in a line break; cells hold no ``|``.
    """
    meta = found.meta
    versions = ", ".join(" ".join(item) for item in meta.get("versions", {}).items())
    title = (
        f"{meta['model']}, {meta['dtype']} weights, KV cache {meta['kv_dtype']}, context {meta['context']}, on {meta['device']}"
    )
    lines = [f"# Fidelity of the profiler: {title}", ""]
    if command:
        lines += [f"Measured {meta['date'][:10]} with `{command}` (git {meta['git_revision'] or 'unknown'}; {versions}).", ""]
    lines += _table(
        ("what", "measured", "bound", "result", "how"),
        [(c.what, c.shown, c.bound, c.result, c.note) for c in found.checks],
    )
    if found.kernels:
        lines += ["", "## Kernels alone, microseconds a launch (median over steps, mean over layers)", ""]
        lines += _table(
            ("stage", "kernel", "calls", "stamps", "events", "CUPTI"),
            [
                (
                    r["stage"],
                    f"`{r['kernel']}`",
                    r["calls"],
                    *(_number(r[f"{k}_us"], ".2f") for k in ("stamps", "events", "cupti")),
                )
                for r in found.kernels
            ],
        )
    if found.bytes:
        lines += ["", "## Bytes of a step, MB (declared, counted by the code, measured by Nsight Compute)", ""]
        lines += _table(
            ("stage", "kernel", "calls", "min", "counted", "measured", "measured / counted"),
            [
                (
                    r["stage"], f"`{r['kernel']}`", r["calls"],
                    *(_number(r[k], ",.3f", 1e6) for k in ("bytes_min", "bytes_counted", "bytes_measured")),
                    _number(r["measured_to_counted"], ".4f"),
                )
                for r in found.bytes
            ],
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"

    return [line(titles), "|" + "---|" * len(titles), *(line(row) for row in rows)]


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None or value != value else format(value / unit, form)
