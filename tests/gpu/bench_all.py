"""Time the shapes of ANCHORS.md on this GPU: ``python -m tests.gpu.bench_all [shape ...] [--dtypes ...] [--contexts ...]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from calmnb.bench import append_results, bench, format_rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=["llama-3.2-1b", "mistral-7b", "llama-2-7b"])
    parser.add_argument("--dtypes", nargs="+", default=["fp16", "fp8", "gf4"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[0, 4000])
    parser.add_argument("--kv", default="fp16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    peak = None
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            try:
                found = bench(
                    shape, dtype=dtype, contexts=arguments.contexts, kv_dtype=arguments.kv, runs=arguments.runs,
                    tokens=arguments.tokens, measured_peak=peak,
                )  # fmt: skip
            except Exception as error:  # one broken cell must not hide the others
                print(f"{shape} {dtype}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            rows += found
            peak = found[0].gb_per_s / (found[0].percent_measured or 100) * 100
    print(f"measured read peak {peak or 0:.0f} GB/s on {rows[0].device if rows else '?'}")
    print(format_rows(rows))
    if arguments.out:
        append_results(arguments.out, rows)


if __name__ == "__main__":
    main()
