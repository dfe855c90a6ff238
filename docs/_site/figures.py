"""Figures of the recordings that come with calmnb, drawn while the site is built: they cannot differ from the data."""

from __future__ import annotations

import io
from pathlib import Path

__all__ = ["RECORDINGS", "figure_files"]

#: Sessions measured on a GPU, kept with the notebooks.
RECORDINGS = Path(__file__).resolve().parents[2] / "notebooks" / "data"

_INTRODUCTION = """# Figures

Each figure is drawn from a recording in `notebooks/data` when this site is built. `calmnb.Session.load` opens the same files
on any machine ([how to](../howto/saved_session.md)). Weights and caches were random numbers; speed does not depend on them.
"""


def figure_files(folder: Path = RECORDINGS) -> dict[str, str | bytes]:
    """Page and images by path under docs/; nothing if `folder` holds no recording with an fp16 cache."""
    paths = [path for path in sorted(folder.glob("*.calmprof")) if "-kv-" not in path.stem]
    if not paths:
        return {}
    files: dict[str, str | bytes] = {}
    text = _INTRODUCTION
    for path in paths:
        section, images = _section(path)
        text += section
        files |= images
    return {"kernels/figures.md": text, **files}


def _section(path: Path) -> tuple[str, dict[str, str | bytes]]:
    from calmnb import Session, plots

    session = Session.load(path)
    config, meta = session.config, session.meta
    first = int(session.steps.loc[session.steps["phase"] == "decode", "kv_len"].min())
    start = session.select(kv_len=first)
    drawn = {
        "roofline": ("achieved GB/s of each stage at the shortest context", plots.roofline(start)),
        "waterfall": ("from the memory's limit to the measured step at the shortest context", plots.waterfall(start)),
        "kv_cost": ("attention's time against the context, measured and predicted from its bytes", plots.kv_cost(session)),
    }
    dtype = config.dtype if config else meta.get("dtype", "")
    text = f"\n## {meta.get('model', path.stem)} {dtype} on {meta.get('device', 'an unknown device')}\n\n`{path.name}`, "
    text += f"{str(meta.get('date', ''))[:10]}:\n{start.summary().replace('|', '·')}\n"
    images: dict[str, str | bytes] = {}
    for name, (alt, figure) in drawn.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        images[f"kernels/figures/{path.stem}-{name}.png"] = buffer.getvalue()
        text += f"\n![{alt}](figures/{path.stem}-{name}.png)\n"
    return text, images
