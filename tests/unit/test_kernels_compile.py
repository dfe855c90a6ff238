"""Every kernel specialisation compiles for every architecture, without a GPU, and takes the registers it took before.

The table ``tests/golden/kernel_resources.json`` is rewritten by ``CALMNB_REWRITE_GOLDEN=1``; its numbers belong to one
compiler version, so under another one only spills count.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from calmnb.engine.cuda_matvec import Device, MatvecPlan, plan_matvec
from calmnb.engine.cuda_ops import all_specs
from calmnb.errors import CompileError
from calmnb.kernels import KernelSpec, _nvrtc_version, compile_all, compile_kernel
from calmnb.one_kernel_versions import specs as lesson_specs

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

pytestmark = pytest.mark.beside

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
GOLDEN = Path(__file__).parents[1] / "golden" / "kernel_resources.json"
# dim, hidden, q_dim, kv_dim, vocab of models whose shapes stand for the rest; the widest runs on sm_90 alone.
SHAPES = {
    "llama-1b": (2048, 8192, 2048, 512, 128256),
    "mistral-7b": (4096, 14336, 4096, 1024, 32000),
    "llama2-7b": (4096, 11008, 4096, 4096, 32000),
    "smollm2-135m": (576, 1536, 576, 192, 49152),
    "spec": (32, 64, 32, 16, 12),
}


def plans(arch: str) -> dict[str, MatvecPlan]:
    """Every weight kernel worth compiling for `arch`, by a readable name."""
    device = Device.of_arch(arch)
    out = {}
    shapes = SHAPES if arch == "sm_90" else {"mistral-7b": SHAPES["mistral-7b"]}
    for name, (dim, hidden, q_dim, kv_dim, vocab) in shapes.items():
        for dtype in ("fp16", "fp8", "gf4"):
            for kind, rows, cols in (
                ("qkv", q_dim + 2 * kv_dim, dim),
                ("out", dim, q_dim),
                ("gateup", 2 * hidden, dim),
                ("down", dim, hidden),
                ("logits", vocab, dim),
            ):
                norm = int(kind not in ("out", "down"))
                out[f"{name} {dtype} {kind}"] = plan_matvec(kind, dtype, rows, cols, device, norm=norm)  # type: ignore[arg-type]
    for dtype in ("fp16", "fp8", "gf4"):
        common: dict[str, Any] = {"wide": True}
        out[f"wide {dtype} qkv"] = plan_matvec("qkv", dtype, 6144, 4096, device, norm=1, kv_dtype="fp8", **common)
        out[f"wide {dtype} down"] = plan_matvec("down", dtype, 4096, 14336, device, **common)
        out[f"layernorm {dtype} gateup"] = plan_matvec("gateup", dtype, 28672, 4096, device, norm=2, gelu=True)
        out[f"experts {dtype} gateup"] = plan_matvec("gateup", dtype, 2 * 28672, 4096, device, norm=1, moe=True)
        out[f"experts {dtype} down"] = plan_matvec("down", dtype, 4096, 14336, device, moe=True)
        out[f"fp8 cache {dtype} qkv"] = plan_matvec("qkv", dtype, 6144, 4096, device, norm=1, kv_dtype="fp8", stamps=True)
    for dtype, (dim, hidden) in itertools.product(("fp8", "gf4"), ((8192, 28672), (3584, 18944))):  # 70B, Qwen2.5-7B
        out[f"long rows {dtype} {hidden}"] = plan_matvec("down", dtype, dim, hidden, device)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("CALMNB_KERNEL_CACHE")
    return Path(given) if given else tmp_path_factory.mktemp("kernels")


def resources(arch: str, cache: Path) -> dict[str, dict[str, int]]:
    named = {name: plan.spec for name, plan in plans(arch).items()} | {str(spec): spec for spec in all_specs()}
    named |= {f"lesson {spec}": spec for spec in lesson_specs(arch) if spec.source.startswith("one_kernel/")}
    compiled = compile_all(named.values(), arch, cache_dir=cache, threads=2)
    table = {}
    for name, spec in named.items():
        r = compiled[spec].resources
        table[name] = {"registers": r.registers, "spill": r.spill_bytes, "stack": r.stack_bytes, "shared": r.shared_bytes}
    return table


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_every_specialisation_compiles_without_spills(arch: str, cache: Path) -> None:
    table = resources(arch, cache)
    spilled = [f"{name}: {r['spill']} bytes" for name, r in table.items() if r["spill"]]
    assert not spilled, f"{arch} spills registers: {spilled}"
    version = ".".join(map(str, _nvrtc_version()))
    if os.environ.get("CALMNB_REWRITE_GOLDEN"):
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        golden["nvrtc"] = version
        golden[arch] = table
        GOLDEN.write_text(json.dumps(golden, indent=0, sort_keys=True) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert table.keys() == golden[arch].keys(), "kernels were added or removed: rewrite the table with CALMNB_REWRITE_GOLDEN=1"
    if golden["nvrtc"] == version:
        changed = [f"{name}: {golden[arch][name]} -> {r}" for name, r in table.items() if r != golden[arch][name]]
        assert not changed, f"{arch}: resources changed, rewrite the table with CALMNB_REWRITE_GOLDEN=1 if meant: {changed}"


def test_a_broken_kernel_says_which_how_and_why(cache: Path) -> None:
    spec = plans("sm_90")["mistral-7b fp8 qkv"].spec.with_defines(K_BATCH=3)
    with pytest.raises(CompileError) as caught:
        compile_kernel(spec, "sm_90", cache_dir=cache)
    message = str(caught.value)
    for part in ("matvec_qkv", "sm_90", "-DK_BATCH=3", "error"):
        assert part in message


def test_unknown_source_is_named(cache: Path) -> None:
    with pytest.raises(CompileError, match=r"no_such\.cu"):
        compile_kernel(KernelSpec("x", "no_such.cu"), "sm_90", cache_dir=cache)
