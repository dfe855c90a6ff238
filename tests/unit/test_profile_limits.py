"""Peaks and the speed of light: the device table, the measured read, and SPEC_calm.md vector 18."""

from __future__ import annotations

import math
from typing import Any

import pytest

from calmnb.config import ModelConfig
from calmnb.engine.stages import weight_bytes_per_token
from calmnb.errors import ConfigError, DeviceError
from calmnb.profile import bandwidth as bandwidth_module
from calmnb.profile import speed_of_light
from calmnb.profile.bandwidth import Bandwidth, known_bandwidth, measure_bandwidth
from calmnb.profile.device import DEVICES, Device, cpu_info, datasheet_peak, find_device, get_device
from calmnb.profile.speed_of_light import active_params, total_params

MISTRAL = ModelConfig("mistral", "fp16", 4096, 14336, 128, 32, 32, 8, 32000)
LLAMA_7B = ModelConfig("llama", "fp16", 4096, 11008, 128, 32, 32, 32, 32000)
MIXTRAL = ModelConfig("mixtral", "gf4", 4096, 14336, 128, 32, 32, 8, 32000, n_experts=8, n_experts_active=2)
A100 = Device("A100 80GB as calm has it", 1935, 19.5, 312)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("3090 ti", "RTX 3090 Ti"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA L40S", "L40S"),
        ("Apple M2 Max", "Apple M2 Max"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Quadro RTX 6000", None),
        ("H100", None),
        ("A100", None),
        ("6000 Ada", None),
        ("RTX 4095", None),
        ("NVIDIA", None),
        ("", None),
    ],
)
def test_a_name_matches_only_if_all_of_it_is_understood(name: str, expected: str | None) -> None:
    device = find_device(name)
    assert (device.name if device else None) == expected


@pytest.mark.parametrize(
    ("name", "rate"),
    [("RTX 4090", 1008), ("RTX 3090", 936), ("RTX 5090", 1792), ("H200", 4800), ("H100 SXM", 3350), ("H100 PCIe", 2000),
     ("A100 40GB", 1555), ("B200", 8000), ("L4", 300), ("T4", 320)],
)  # fmt: skip
def test_datasheet_bandwidths(name: str, rate: float) -> None:
    assert DEVICES[name].gb_per_s == rate


def test_every_device_is_found_by_its_own_name() -> None:
    assert {name: find_device(name) for name in DEVICES} == DEVICES


def test_every_alias_leads_to_its_own_device() -> None:
    for device in DEVICES.values():
        assert [find_device(alias) for alias in device.aliases] == [device] * len(device.aliases)


def test_another_memory_size_under_the_same_name_is_no_match() -> None:
    assert find_device("NVIDIA GeForce RTX 3060", memory_bytes=12 * 2**30) is not None
    assert find_device("NVIDIA GeForce RTX 3060", memory_bytes=8 * 2**30) is None


def test_an_unknown_device_is_refused_with_its_likeliest_names() -> None:
    with pytest.raises(ConfigError, match=r"H100 PCIe, H100 SXM, H100 NVL; or give"):
        get_device("H100")


def test_a_datasheet_peak_says_whose_it_is() -> None:
    assert datasheet_peak("NVIDIA GeForce RTX 4090") == {"gb_per_s": 1008.0, "source": "datasheet of RTX 4090"}
    assert datasheet_peak("AMD EPYC") is None


def test_cpu_info_counts_the_cores_usable_here() -> None:
    assert cpu_info().cores >= 1
    assert cpu_info().name


@pytest.mark.parametrize(
    ("config", "device", "options", "milliseconds"),
    [
        (MISTRAL, "RTX 4090", {"kv_len": 1}, 14.10805),
        (MISTRAL, "RTX 4090", {"kv_len": 4096}, 14.64053),
        (MISTRAL, "RTX 4090", {"kv_len": 1, "dtype": "fp8"}, 7.05409),
        (LLAMA_7B, A100, {"kv_len": 2048}, 7.38393),
        (LLAMA_7B, A100, {"kv_len": 2048, "batch": 8}, 11.26826),
        (LLAMA_7B, A100, {"kv_len": 2048, "batch": 16}, 19.72087),
    ],
)
def test_spec_vector_18_latency(config: ModelConfig, device: Any, options: dict[str, Any], milliseconds: float) -> None:
    assert speed_of_light(config, device, **options).latency_s * 1e3 == pytest.approx(milliseconds, abs=6e-6)


def test_spec_vector_18_counts_memory_and_tensor_cores() -> None:
    assert active_params(MISTRAL) == 7_110_393_856
    assert speed_of_light(MISTRAL, "4090", kv_len=4096).memory_bytes == 15_544_090_624
    assert speed_of_light(LLAMA_7B, A100, kv_len=2048, batch=16, tensor_cores=True).tok_per_s == pytest.approx(
        1018.62, abs=5e-3
    )


def test_tensor_cores_pad_a_batch_to_sixteen() -> None:
    one, sixteen = (speed_of_light(MISTRAL, 1e9, tflops=1.0, batch=b, tensor_cores=True).latency_s for b in (1, 16))
    assert one == pytest.approx(sixteen, rel=1e-3)


@pytest.mark.parametrize("config", [MISTRAL, LLAMA_7B, MIXTRAL], ids=lambda config: config.arch)
def test_the_limit_reads_what_the_stages_declare(config: ModelConfig) -> None:
    limit = speed_of_light(config, 100.0, kv_len=0)
    assert limit.nbytes == weight_bytes_per_token(config)
    assert limit.latency_s == pytest.approx(limit.nbytes / 100e9)


def test_a_mixture_reads_its_active_experts_and_a_batch_at_most_all() -> None:
    def up(batch: int) -> int:
        return next(s.nbytes for s in speed_of_light(MIXTRAL, 1.0, batch=batch).stages if s.stage == "matmul_ffn_up")

    one_expert = 32 * 2 * 14336 * 4096 // 2
    assert [up(1), up(2), up(4), up(64)] == [2 * one_expert, 4 * one_expert, 8 * one_expert, 8 * one_expert]


def test_tied_matrices_are_stored_once_but_read_all_the_same() -> None:
    tied, untied = (speed_of_light(MISTRAL, 1.0, is_tied=tied) for tied in (True, False))
    assert untied.memory_bytes - tied.memory_bytes == 32000 * 4096 * 2
    assert tied.nbytes == untied.nbytes
    assert total_params(MISTRAL) == 7_241_465_856


def test_the_table_splits_the_latency() -> None:
    limit = speed_of_light(LLAMA_7B, A100, kv_len=2048, batch=16)
    table = limit.table().set_index("stage")
    assert table["time_us"].sum() == pytest.approx(limit.latency_s * 1e6)
    assert table["share_percent"].sum() == pytest.approx(100)
    assert table["bound"].to_dict() == {
        "matmul_qkv": "compute", "attention": "memory", "matmul_attn": "compute", "matmul_ffn_up": "compute",
        "matmul_ffn_down": "compute", "output": "compute",
    }  # fmt: skip


def test_a_measured_bandwidth_and_a_number_are_devices_too() -> None:
    measured = Bandwidth(20.0, 19.0, 12.0, 2, 1, 1 << 29, 5, False, "Some <CPU>")
    limit = speed_of_light(MISTRAL, measured)
    assert (limit.gb_per_s, limit.peak_kind, limit.device) == (20.0, "measured", "Some <CPU>")
    assert limit.latency_s == speed_of_light(MISTRAL, 20.0).latency_s
    assert "Some &lt;CPU&gt;" in limit._repr_html_()


@pytest.mark.parametrize(
    ("device", "options"),
    [(None, {}), (0.0, {}), (-5.0, {}), (math.nan, {}), ("nothing", {}), (10.0, {"kv_len": -1}), (10.0, {"batch": 0}),
     (10.0, {"kv_dtype": "int8"}), (10.0, {"dtype": "int4"}), (10.0, {"tflops": 0.0}), ("Apple M1", {"tensor_cores": True})],
)  # fmt: skip
def test_impossible_questions_are_refused(device: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        speed_of_light(MISTRAL, device, **options)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_module, "_MEASURED", {})


@pytest.mark.usefixtures("no_memory")
def test_a_read_of_memory_is_plausible_and_remembered() -> None:
    result = measure_bandwidth(1, nbytes=64 << 20, repeats=3, quick=True)
    assert 0.5 < result.gb_per_s < 2000
    assert result.median_gb_per_s <= result.gb_per_s
    assert result.nbytes == 64 << 20
    assert measure_bandwidth(1, nbytes=64 << 20, repeats=3, quick=True) is result


@pytest.mark.usefixtures("no_memory")
def test_every_shape_reads_all_of_the_buffer_once() -> None:
    result = measure_bandwidth(2, nbytes=(4 << 20) + 8 * 13, repeats=2)
    assert (result.threads, result.repeats) == (2, 2)
    assert result.streams in (1, 2, 4)
    assert result.one_thread_gb_per_s > 0


@pytest.mark.usefixtures("no_memory")
def test_a_buffer_that_fits_in_cache_says_so_and_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_module, "cpu_info", lambda: type(cpu_info())("Fake", 1, 32 << 20))
    result = measure_bandwidth(1, nbytes=16 << 20, repeats=1, quick=True)
    assert result.fits_cache
    assert "from cache" in str(result)
    assert known_bandwidth(1) is None


def test_the_best_of_several_moments_is_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([10.0, 14.0, 12.0])
    monkeypatch.setattr(bandwidth_module, "_MEASURED", {})
    monkeypatch.setattr(
        bandwidth_module,
        "_measure",
        lambda threads, *_: Bandwidth(next(rates), 9.0, 9.0, threads, 1, 1 << 29, 3, False, "Fake"),
    )
    assert [measure_bandwidth(2, fresh=True).gb_per_s for _ in range(3)] == [10.0, 14.0, 12.0]
    best = known_bandwidth(2)
    assert best is not None
    assert best.as_peak()["gb_per_s"] == 14.0
    assert known_bandwidth(1) is None


@pytest.mark.parametrize("options", [{"threads": 0}, {"repeats": 0}, {"nbytes": 100}])
def test_impossible_measurements_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        measure_bandwidth(**options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_memory")
def test_a_buffer_larger_than_memory_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("numpy.empty", refuse)
    with pytest.raises(DeviceError, match="does not fit"):
        measure_bandwidth(1, nbytes=1 << 24, quick=True)
