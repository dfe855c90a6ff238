"""Put the H200's benchmark rows into README and the documentation: ``python -m tests.gpu.bench_table``.

Reads notebooks/data/bench_results.jsonl (what ``tests.gpu.bench_all --out`` appends to) and prints what the goals ask: tok/s
against calm, llama.cpp and the megakernel, and what longer contexts keep of the bytes-proportional value.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
#: Other engines on an H200 with the same shapes, tok/s at 0 / 4,000: calm's forward pass; llama.cpp F16, Q8_0, Q4_0; the
#: megakernel's kernel alone.
OTHERS = {
    ("llama-3.2-1b", "fp16"): ("901 / 728", "771 / 718", "1345 / 402 (bf16)"),
    ("llama-3.2-1b", "fp8"): ("1420 / 1036", "800 / 748", ""),
    ("llama-3.2-1b", "gf4"): ("1204 / 925", "982 / 891", ""),
    ("mistral-7b", "fp16"): ("208 / 185", "218 / 205", ""),
    ("mistral-7b", "fp8"): ("362 / 298", "261 / 241", ""),
    ("mistral-7b", "gf4"): ("299 / 253", "353 / 322", ""),
    ("llama-2-7b", "fp16"): ("217 / 187", "222 / 200", ""),
    ("llama-2-7b", "fp8"): ("383 / 295", "268 / 237", ""),
    ("llama-2-7b", "gf4"): ("289 / 238", "354 / 295", ""),
}
NAMES = {"llama-3.2-1b": "Llama-3.2-1B", "mistral-7b": "Mistral-7B", "llama-2-7b": "Llama-2-7B"}
#: tok/s that the project asked of itself at context 0.
GOALS = {
    ("llama-3.2-1b", "fp16"): 1500, ("llama-3.2-1b", "fp8"): 2400, ("llama-3.2-1b", "gf4"): 2900, ("mistral-7b", "fp16"): 295,
    ("mistral-7b", "fp8"): 545, ("mistral-7b", "gf4"): 800, ("llama-2-7b", "fp16"): 315, ("llama-2-7b", "fp8"): 585,
    ("llama-2-7b", "gf4"): 860,
}  # fmt: skip

Rows = dict[tuple[str, str, str, int], dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """The last row of each cell."""
    rows: Rows = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows[row["model"], row["dtype"], row["kv_dtype"], row["context"]] = row
    return rows


def speed_table(rows: Rows) -> list[str]:
    out = [
        "| | calmnb, tok/s at 0 / 4,000 | GB/s at 0 / 4,000 | calm | llama.cpp F16 / Q8_0 / Q4_0 | Hazy megakernel |",
        "|---|---|---|---|---|---|",
    ]
    for (model, dtype), others in OTHERS.items():
        a, b = rows[model, dtype, "fp16", 0], rows[model, dtype, "fp16", 4000]
        speed, rate = (f"{a[name]:.0f} / {b[name]:.0f}" for name in ("tok_per_s", "gb_per_s"))
        out.append(" | ".join([f"| {NAMES[model]} {dtype}", speed, rate, *others]) + " |")
    return out


def context_table(rows: Rows) -> list[str]:
    out = [
        "| | context 0 | 16,000 | of the bytes-proportional value | context 4,000, fp16 cache | "
        "512-token prompt, fp16 / E5M2 cache |",
        "|---|---|---|---|---|---|",
    ]
    for model, dtype in OTHERS:
        a, b = rows[model, dtype, "fp8", 0], rows[model, dtype, "fp8", 16000]
        c = rows[model, dtype, "fp16", 0]
        out.append(
            f"| {NAMES[model]} {dtype} | {a['tok_per_s']:.0f} | {b['tok_per_s']:.0f} | {kept(a, b):.0f}% | "
            f"{kept(c, rows[model, dtype, 'fp16', 4000]):.0f}% | "
            f"{c['prompt_tok_per_s'] / 1e3:.1f}k / {a['prompt_tok_per_s'] / 1e3:.1f}k |"
        )
    return out


def kept(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Percent that `b` reaches of the speed at `a` scaled by the bytes of a token."""
    return 100 * b["tok_per_s"] * b["bytes_per_token"] / (a["tok_per_s"] * a["bytes_per_token"])


def replace_between(path: Path, marker: str, lines: list[str]) -> None:
    text = path.read_text()
    begin, end = f"<!-- {marker}:begin -->\n", f"\n<!-- {marker}:end -->"
    new, count = re.subn(re.escape(begin) + ".*?" + re.escape(end), lambda _: begin + "\n".join(lines) + end, text, flags=re.S)
    if count != 1:
        raise SystemExit(f"{path}: the marker {begin.strip()} stands there {count} times")
    path.write_text(new)


def main() -> None:
    rows = read_rows(ROOT / "notebooks/data/bench_results.jsonl")
    speed, context = speed_table(rows), context_table(rows)
    for path in (ROOT / "README.md", ROOT / "docs/measured/h200.md"):
        replace_between(path, "h200-speed", speed)
        replace_between(path, "h200-context", context)
    print("\n".join([*speed, "", *context, ""]))
    for (model, dtype), goal in GOALS.items():
        row = rows[model, dtype, "fp16", 0]
        loop = 100 * row["graph_ms"] / row["ms_per_token"]
        late, long = kept(row, rows[model, dtype, "fp16", 4000]), kept(*(rows[model, dtype, "fp8", n] for n in (0, 16000)))
        verdict = row["tok_per_s"] >= goal and late >= 93 and long >= 90 and loop >= 99
        print(
            f"{model} {dtype}: {row['tok_per_s']:.0f} (asked {goal}), 4000 keeps {late:.0f}%, 16000 keeps {long:.0f}%, "
            f"loop {loop:.1f}% of the graph: {'met' if verdict else 'NOT MET'}"
        )


if __name__ == "__main__":
    main()
