"""What the notebook ``08_one_kernel`` shows of a version: the code that is new in it, and its numbers beside a prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calmnb.errors import ConfigError
from calmnb.kernels import kernels_dir
from calmnb.one_kernel_versions import VERSIONS, Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

__all__ = ["code", "compare", "step"]

#: What calmnb's own headers have of a step: file, text before the part (each sought after the one before), last line.
_PARTS = {
    "ring": ("matvec.cuh", ("#if !K_WIDE", "#pragma unroll\n      for (int s = 0; s < STAGES_PER_BATCH"), "\n      }\n"),
    "dependent": ("matvec.cuh", ("auto fill = [&] {",), "pdl_wait();\n"),
    "fp8": ("quant.cuh", ("struct Quant<FP8>", "  static DEVICE float dot"), "\n  }\n"),
    "gf4": ("quant.cuh", ("struct Quant<GF4>", "  static DEVICE float dot"), "\n  }\n"),
}


def code(version: Version) -> str:
    """The part of a version's source that is new in it, as it stands in ``kernels/``."""
    key = ("dependent" if version.dependent else "ring") if version.kind == "product" else version.dtype
    if key in _PARTS and not version.plain:
        name, starts, end = _PARTS[key]
        text = (kernels_dir() / name).read_text(encoding="utf-8")
        at = 0
        for start in starts:
            at = text.index(start, at)
        at = text.rindex("\n", 0, at) + 1 if text[at] != "#" else at
        return f"// kernels/{name}\n" + _dedent(text[at : text.index(end, at) + len(end)])
    text = (kernels_dir() / version.source).read_text(encoding="utf-8")
    mark = "// --- plain gf4 ---" if version.plain else "// --- the idea ---"
    parts = [part.split("// --- end ---")[0].rsplit("\n", 1)[0].lstrip("\n") for part in text.split(mark)[1:]]
    return f"// kernels/{version.source}\n" + "\n// ...\n".join(_dedent(part) for part in parts)


def _dedent(text: str) -> str:
    """Take off the indentation that all lines share, whatever preprocessor lines do."""
    lines = text.rstrip().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip() and line[0] != "#"), default=0)
    return "\n".join(line if line.startswith("#") else line[margin:] for line in lines)


def step(table: pd.DataFrame, number: int, layer: str = "gate+up", *, predicted: float | None = None) -> Any:
    """Markdown for a notebook: the new code of version `number`, then one line of what was measured.

    Parameters
    ----------
    table
        Of `calmnb.one_kernel.measure` or `load`.
    number
        Of the version.
    layer
        Which matrix.
    predicted
        GB/s written down before the measurement, repeated beside it.

    Returns
    -------
    IPython.display.Markdown
    """
    from IPython import display

    markdown: Any = display.Markdown

    version = next((v for v in VERSIONS if v.number == number), None)
    if version is None:
        raise ConfigError(f"there is no version {number}; the lesson has 0 to {VERSIONS[-1].number}")
    block = f"```cpp\n{code(version)}\n```\n\n"
    rows = table[(table["layer"] == layer) & (table["version"] == number) & (table["memory"] == "DRAM")]
    if rows.empty:
        return markdown(block + f"_Version {number} was not measured on this GPU: it takes dependent launch (sm_90 or later)._")
    row = rows.iloc[0]
    guess = "" if predicted is None else f" (predicted: {predicted:,.0f})"
    count = row["instructions_per_weight"]
    each = f"{count:.1f} instructions a weight" if count == count else "instructions not counted"
    return markdown(
        f"{block}**{number} {version.name}, {version.dtype}: {row['us']:,.1f} µs, {row['gb_per_s']:,.0f} GB/s**{guess}, "
        f"{row['percent_measured']:.0f}% of a kernel that only reads. {row['registers']} registers, "
        f"{row['occupancy_percent']:.0f}% of a multiprocessor's warps, {row['in_flight_kb']:,.0f} KiB in flight; "
        f"{each}. Relative error {row['error']:.1e}."
    )


def compare(table: pd.DataFrame, predicted: Mapping[int, float], layer: str = "gate+up") -> pd.DataFrame:
    """Predictions beside measurements: ``version, name, predicted`` and ``measured`` GB/s, ``off_percent`` of the measured.

    Parameters
    ----------
    table
        Of `calmnb.one_kernel.measure` or `load`.
    predicted
        GB/s by version number.
    layer
        Which matrix.
    """
    rows = table[(table["layer"] == layer) & (table["memory"] == "DRAM") & table["version"].isin(list(predicted))]
    out = rows[["version", "name"]].copy()
    out["predicted"] = [float(predicted[number]) for number in rows["version"]]
    out["measured"] = rows["gb_per_s"].round(0)
    out["off_percent"] = (100 * (out["predicted"] / rows["gb_per_s"] - 1)).round(0)
    return out.reset_index(drop=True)
