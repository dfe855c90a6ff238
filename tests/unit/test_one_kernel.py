"""The lesson's kernels on the CPU, through the emulator's stand-ins for CUDA; their table, its file, the code that is shown."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from calmnb import one_kernel
from calmnb.engine.cuda_device import Launch
from calmnb.engine.cuda_matvec import Device
from calmnb.errors import CalmnbError, CompileError, ConfigError, FormatError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources, kernels_dir
from calmnb.one_kernel import VERSIONS, Layer, Version
from calmnb.plots import one_kernel as figures
from calmnb.profile import sass
from tests.emulator.gpu import EmulatedGpu
from tests.emulator.launcher import EmulatedLauncher
from tests.unit.test_plots import drawn

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to run kernels on the CPU")


class LessonGpu(EmulatedGpu):
    """A GPU of three multiprocessors; every graph takes 1 ms."""

    name = "NVIDIA H200"
    l2_bytes = 20_000
    clock_ghz = 1.98


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> LessonGpu:
    return LessonGpu(EmulatedLauncher(tmp_path_factory.mktemp("lesson")))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVRTC is needed: what a kernel takes is made up, what it computes is g++'s."""

    def compile_kernel(spec: KernelSpec, arch: str) -> CompiledKernel:
        return CompiledKernel(spec, arch, b"", Resources(64, 0, 0, 0), "", False)

    def compile_all(specs: Sequence[KernelSpec], arch: str) -> dict[KernelSpec, CompiledKernel]:
        return {spec: compile_kernel(spec, arch) for spec in specs}

    monkeypatch.setattr(one_kernel, "compile_all", compile_all)
    monkeypatch.setattr(one_kernel, "find_disassembler", lambda: None)


def run(gpu: LessonGpu, versions: Sequence[Version], rows: int, cols: int, **options: Any) -> Any:
    layer = Layer(f"{rows} x {cols}", rows, cols)
    settings: dict[str, Any] = {"cached": None, "repeats": 2, "arena_bytes": 1, "peak_gb_per_s": 4600.0, **options}
    return one_kernel.measure(gpu, layers=[layer], versions=versions, **settings)


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.number}")
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (37, 96), (259, 1056)])
def test_every_version_computes_the_product(gpu: LessonGpu, version: Version, rows: int, cols: int) -> None:
    table = run(gpu, [version], rows, cols)
    assert list(table["version"]) == [version.number]
    assert table["error"].iloc[0] < one_kernel.TOLERANCE[version.dtype]


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS[:7], ids=lambda v: f"{v.number}")
@pytest.mark.parametrize(("rows", "cols"), [(33, 8), (5, 1544), (2, 14336)])
def test_rows_that_end_in_the_middle_of_a_warp(gpu: LessonGpu, version: Version, rows: int, cols: int) -> None:
    run(gpu, [version], rows, cols)


@needs_compiler
@pytest.mark.parametrize("cols", [1, 3, 33, 577])
def test_the_plain_versions_take_any_number_of_columns(gpu: LessonGpu, cols: int) -> None:
    run(gpu, VERSIONS[:2], 130, cols)
    with pytest.raises(ConfigError, match="multiple of 8 columns"):
        run(gpu, [VERSIONS[2]], 130, cols)


@needs_compiler
def test_the_real_layers_widths(gpu: LessonGpu) -> None:
    for layer in one_kernel.LAYERS:
        table = run(gpu, [v for v in VERSIONS if v.kind in ("resident", "ring")], 14, layer.cols)
        assert set(table["version"]) == {5, 6, 9, 11, 12}


@needs_compiler
def test_a_wrong_kernel_is_never_timed(gpu: LessonGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    good = gpu.launcher.folder / VERSIONS[1].source
    text = good.read_text()
    monkeypatch.setattr(gpu.launcher, "_libraries", {})
    for broken, message in (
        (text.replace("y[row] = sum", "y[row] = row == 7 ? 0.f : sum"), "first is row 7"),
        (text.replace("if (row >= rows) return;", ""), "past the end of y"),
        (text.replace("lane == 0", "lane == 0 && row < 20"), "first is row 20: .*nan"),
    ):
        good.write_text(broken)
        monkeypatch.setattr(gpu.launcher, "_libraries", {})
        with pytest.raises(CalmnbError, match=message):
            run(gpu, [VERSIONS[1]], 29, 64)
    good.write_text(text)


@needs_compiler
def test_the_table_says_what_its_columns_promise(gpu: LessonGpu) -> None:
    table = run(gpu, VERSIONS, 64, 512, cached=Layer("small", 32, 512))
    assert list(table.columns) == list(one_kernel.COLUMNS)
    assert set(table.loc[table["memory"] == "L2", "version"]) == {9, 12}
    assert set(table.loc[table["memory"] == "one copy", "version"]) == {6}  # 32 KB do not fit an L2 of 20
    row = table[table["version"] == 2].iloc[0]
    assert row["bytes_min"] == 64 * 512 * 2 + 512 * 2 + 64 * 4
    assert row["gb_per_s"] == pytest.approx(row["bytes_min"] / row["us"] / 1e3)
    assert row["percent_measured"] == pytest.approx(100 * row["gb_per_s"] / 4600)
    assert row["percent_datasheet"] == pytest.approx(100 * row["gb_per_s"] / 4800)
    assert row["occupancy_percent"] == pytest.approx(50)  # 64 registers: 4 blocks of 8 warps, of 64 warps
    assert row["in_flight_kb"] == pytest.approx(3 * 256 * 16 / 1024)  # 8 blocks on 3 multiprocessors: 3 on the fullest
    assert table.attrs["meta"]["device"] == "NVIDIA H200"
    # The L2 case runs one copy again and again; otherwise copies take turns.
    copies = [{one.args[0].value for one in graph if len(one.args) == 5} for graph in gpu.graphs[-2:]]
    assert len(copies[1]) == 1
    assert len(copies[0]) >= 2


@needs_compiler
def test_tables_survive_their_file(gpu: LessonGpu, tmp_path: Path) -> None:
    table = run(gpu, VERSIONS[:3], 16, 64)
    path = one_kernel.save(table, tmp_path / "table.json")
    again = one_kernel.load(path)
    assert again.attrs["meta"] == {**table.attrs["meta"], "saved": True}
    assert "saved table" in one_kernel.source_of(again)
    assert "measured here" in one_kernel.source_of(table)
    for name in one_kernel.COLUMNS:
        for a, b in zip(table[name], again[name], strict=True):
            assert a == b or (isinstance(a, float) and (math.isclose(a, b, rel_tol=1e-5) or math.isnan(a) == math.isnan(b)))


def test_kernels_without_shared_memory_keep_their_l1(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    from calmnb.one_kernel_case import LessonDevice
    from tests.unit.test_cuda_device import make_device

    carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    _, noting = make_device(monkeypatch)
    device = LessonDevice()
    assert device.l2_bytes == 232448
    for source, expected in (("one_kernel/v0_thread_a_row.cu", -1), ("matvec_rows.cu", 100)):
        kernel = CompiledKernel(KernelSpec("k", source), "sm_90", b"", Resources(32, 0, 0, 0), "", True)
        device.launch([Launch(kernel, (1, 1), 32, 0, (ctypes.c_int32(1),))] * 2)
        assert [value for name, value in noting.attributes if name == carveout][-1] == expected


def test_without_a_gpu_the_saved_table_is_read_and_the_command_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("calmnb.one_kernel_case._cuda_problem", lambda: "CuPy sees no CUDA device")
    monkeypatch.setattr(one_kernel, "saved_path", lambda: one_kernel.save(table, tmp_path / "h200.json"))
    assert one_kernel.measured_or_saved().attrs["meta"]["saved"]
    assert one_kernel.main(["--out", str(tmp_path / "never.json")]) == 1
    assert "needs an NVIDIA GPU, but CuPy sees no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "never.json").exists()


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"rows": [[1]], "columns": ["version"], "meta": {}}')
    for name in ("x.json", "missing.json"):
        with pytest.raises(FormatError, match=r"python -m calmnb\.one_kernel"):
            one_kernel.load(tmp_path / name)


def test_rows_too_long_for_registers_are_refused() -> None:
    with pytest.raises(ConfigError, match="up to 16384 columns"):
        one_kernel.plan(VERSIONS[5], Layer("wide", 8, 32768), Device.of_arch("sm_90"))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.number}")
def test_the_code_shown_is_the_file_s(version: Version) -> None:
    text = one_kernel.code(version)
    head, _, body = text.partition("\n")
    source = (kernels_dir() / head.removeprefix("// kernels/")).read_text()
    squeezed = "".join(source.split())
    for line in body.split("\n"):
        assert line == "// ..." or "".join(line.split()) in squeezed
    assert 5 <= len(body.splitlines()) <= 40
    assert "// ---" not in body
    wanted = {6: "cp_async16", 7: "cp_async_wait", 8: "pdl_wait", 9: "__byte_perm", 11: ">> (8 + 3 * j) & 7", 12: "0x000E0007"}
    assert wanted.get(version.number, "pdl_wait" if version.dependent else "sum") in body


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_plans_fit_every_gpu(arch: str) -> None:
    device = Device.of_arch(arch)
    for layer in (*one_kernel.LAYERS, one_kernel.CACHED):
        for version in VERSIONS:
            p = one_kernel.plan(version, layer, device)
            assert p.shared <= device.shared_per_block
            assert p.threads <= 512
            assert p.loop_weights > 0


SASS = """
.text.k:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   LDG.E R1, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/                   FFMA R3, R1, R4, R3 ;
        /*0030*/                   FFMA R3, R1, R5, R3 ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
        /*0050*/                   FADD R6, R6, R3 ;
        /*0060*/               @P1 BRA `(.L_x_3) ;
        /*0070*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/                   BRA `(.L_x_4);
        /*00a0*/                   NOP;
"""


def test_the_hot_loop_is_the_innermost_with_the_arithmetic() -> None:
    assert sass.loop_instructions(SASS) == 3
    assert sass.loop_instructions(SASS.replace("`(.L_x_2)", "0x20")) == 3
    assert sass.loop_instructions(SASS.replace("FFMA", "IMAD")) == 0


def test_counted_instructions_cover_every_version() -> None:
    """The table in calmnb/data knows each kernel of the lesson for sm_90; calmnb's own change with their tuning."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    from calmnb.kernels import _nvrtc_version

    path = Path(one_kernel.__file__).parent / "data" / "one_kernel_sass.json"
    counted = json.loads(path.read_text())
    own = {str(spec) for spec in one_kernel.specs("sm_90") if spec.source.startswith("one_kernel/")}
    assert set(counted["loop_instructions"]) >= own, "count again: python -m calmnb.one_kernel --count FILE"
    if sass.find_disassembler() and counted["nvrtc"] == ".".join(map(str, _nvrtc_version())):
        from calmnb.kernels import compile_kernel

        spec = one_kernel.plan(VERSIONS[4], one_kernel.LAYERS[0], Device.of_arch("sm_90")).spec
        found = sass.loop_instructions(sass.disassemble(compile_kernel(spec, "sm_90").cubin))
        assert found == counted["loop_instructions"][str(spec)]


@pytest.fixture
def table() -> Any:
    """What the H200 measured, as the notebook shows it where there is no GPU."""
    return one_kernel.load(one_kernel.saved_path())


def test_the_saved_table_holds_every_version_and_nothing_impossible(table: Any) -> None:
    for layer in one_kernel.LAYERS:
        assert list(table.loc[table["layer"] == layer.name, "version"]) == [v.number for v in VERSIONS]
    assert set(table.loc[table["layer"] == one_kernel.CACHED.name, "memory"]) == {"DRAM", "L2"}
    assert (table["error"] < table["dtype"].map(one_kernel.TOLERANCE)).all()
    assert (table.loc[table["memory"] == "DRAM", "percent_datasheet"] < 100).all()
    assert "NVIDIA H200, saved table" in one_kernel.source_of(table)


def test_instructions_say_how_much_of_the_issue_slots_they_take(table: Any) -> None:
    row = table[table["version"] == 4].iloc[0]
    assert row["counted"] in ("SASS", "table")
    weights = 28672 * 4096
    slots = 132 * 4 * 1.98e9 * row["us"] * 1e-6  # four instructions a cycle, each for 32 lanes
    assert row["issue_percent"] == pytest.approx(100 * row["instructions_per_weight"] * weights / 32 / slots)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("draw", [figures.version_bars, figures.version_roofline, figures.instruction_roofline])
def test_figures_name_device_versions_and_peaks(table: Any, draw: Any, dark: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = draw(table, dark=dark)
    assert figure._repr_png_()[:4] == b"\x89PNG"
    text = "\n".join(found.get_text() for found in figure.findobj(Text))
    for part in ("NVIDIA H200", "saved table", "2026-11-29", "4,507", "gate+up"):
        assert part in text
    if draw is figures.version_bars:
        assert "cp.async ring  6" in text
        assert VERSIONS[11].idea in text
    boxes = drawn(figure, monkeypatch)
    width = figure.get_figwidth() * 100
    assert [name for name, box, _ in boxes if box.x0 < -1 or box.x1 > width + 1] == []
    level = [(name, box.padded(-1.5)) for name, box, rotation in boxes if rotation in (0, 90)]
    assert [(a, b) for (a, box), (b, other) in itertools.combinations(level, 2) if box.overlaps(other)] == []
    with pytest.raises(ConfigError, match=r"no matrix 'nothing'.*gate\+up"):
        draw(table, "nothing")


def test_a_step_shows_code_numbers_and_the_prediction(table: Any) -> None:
    shown = one_kernel.step(table, 6, predicted=4350).data
    assert "cp_async16" in shown
    assert "54.2 µs, 4,338 GB/s" in shown
    assert "(predicted: 4,350)" in shown
    assert "not measured on this GPU" in one_kernel.step(table[table["version"] != 8], 8).data
    with pytest.raises(ConfigError, match="0 to 13"):
        one_kernel.step(table, 99)


def test_predictions_stand_beside_what_was_measured(table: Any) -> None:
    found = one_kernel.compare(table, {0: 818.0, 2: 4026.0})
    assert list(found["version"]) == [0, 2]
    assert list(found["off_percent"]) == [100, 0]


def test_an_edited_kernel_compiles_without_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    version = dataclasses.replace(VERSIONS[4], rows_per_block=64, load_bytes=128, loop_weights=64)
    text = (kernels_dir() / version.source).read_text()
    eight = one_kernel.try_kernel(text.replace("R = 4", "R = 8"), version)
    four = one_kernel.try_kernel(text, VERSIONS[4])
    assert math.isnan(eight["us"].iloc[0])
    assert math.isnan(eight["instructions_per_weight"].iloc[0]), "the table of counts knows nothing of an edited source"
    assert eight["registers"].iloc[0] > four["registers"].iloc[0]
    with pytest.raises(CompileError, match="nonsense"):
        one_kernel.try_kernel(text.replace("R = 4", "R = nonsense"), version)
