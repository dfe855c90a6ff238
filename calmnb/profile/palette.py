"""One colour and one short label per stage, the same in figures, tables and widgets.

The hues are those of Okabe and Ito (2008), which stay apart under the common colour-vision deficiencies; the two FFN
stages share a hue and differ in lightness. All of them keep a contrast of 2.4:1 or better on white and on near-black.
"""

from __future__ import annotations

from calmnb.engine.base import Stage

__all__ = ["STAGE_COLORS", "STAGE_LABELS"]

STAGE_COLORS: dict[Stage, str] = {
    "embed": "#8172B3",
    "matmul_qkv": "#0072B2",
    "attention": "#D55E00",
    "matmul_attn": "#4BA3D8",
    "matmul_ffn_up": "#008F68",
    "matmul_ffn_down": "#5DB894",
    "output": "#CC79A7",
    "sample": "#D69400",
    "other": "#9B7653",
    "gap": "#8A9097",
}

#: What fits beside a bar.
STAGE_LABELS: dict[Stage, str] = {
    "embed": "embed",
    "matmul_qkv": "qkv",
    "attention": "attention",
    "matmul_attn": "attn out",
    "matmul_ffn_up": "ffn up",
    "matmul_ffn_down": "ffn down",
    "output": "logits",
    "sample": "sample",
    "other": "other",
    "gap": "gap",
}
