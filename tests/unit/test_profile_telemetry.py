"""Telemetry beside a recording: what is kept of NVML's answers, and what happens where it has none."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calmnb.engine.base import Kernel
from calmnb.profile import Session, SessionRecorder
from calmnb.profile.report import text_report
from calmnb.profile.telemetry import TELEMETRY_COLUMNS, Telemetry, telemetry_note, telemetry_table, throttling
from calmnb.profile.trace import chrome_trace
from tests.profile_fakes import SMOL, noisy_recorder

BUS = "0000:19:00.0"


class FakeNvml(SimpleNamespace):
    """NVML with answers of the test's choice; anything not given raises, as an unsupported query does."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *, reasons: Any = (0,), power: Any = (400_000,), missing: Any = ()) -> None:
        super().__init__()
        self.opened = self.closed = 0
        self.reasons, self.power, self.missing = list(reasons), list(power), missing
        self.energy = 5_000_000
        self.threads: set[str] = set()

    def nvmlInit(self) -> None:
        if self._lacks("library"):
            raise RuntimeError("Shared Library Not Found")
        self.opened += 1

    def _lacks(self, what: str) -> bool:
        return what in self.missing

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        assert bus_id == BUS
        return "handle"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self.threads.add(threading.current_thread().name)
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self._lacks("power"):
            raise RuntimeError("Not Supported")
        return int(self.power.pop(0) if len(self.power) > 1 else self.power[0])

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return int(self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self._lacks("energy"):
            raise RuntimeError("Not Supported")
        self.energy += 1000
        return self.energy


def sampled(monkeypatch: pytest.MonkeyPatch, nvml: Any, *, tokens: int = 4, times: tuple[float, ...] = (10.0, 12.0)) -> Any:
    """Telemetry of a run of two samples, at the given times."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    clock = iter(times)
    with Telemetry(BUS, hz=1e-3, clock=lambda: next(clock)) as telemetry:
        pass
    return telemetry.to_meta(origin=10.5, tokens=tokens)


def test_every_answer_is_kept_with_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(power=[400_000, 500_000])
    meta = sampled(monkeypatch, nvml)
    table = telemetry_table({"telemetry": meta})
    assert list(table) == list(TELEMETRY_COLUMNS)
    assert table.iloc[1].to_dict() == {
        "time_s": 1.5, "sm_mhz": 1980, "memory_mhz": 3201, "power_w": 500.0, "temperature_c": 41, "throttled": "",
    }  # fmt: skip
    assert (meta["seconds"], meta["power_limit_w"]) == (2.0, 700.0)
    assert (nvml.opened, nvml.closed) == (1, 1)


def test_energy_comes_from_the_counter_over_long_runs_and_from_power_over_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    long = sampled(monkeypatch, FakeNvml())
    assert (long["energy_j"], long["energy_from"], long["energy_per_token_j"]) == (1.0, "counter", 0.25)
    short = sampled(monkeypatch, FakeNvml(power=[300_000, 500_000]), times=(10.0, 10.1))
    assert short["energy_from"] == "mean power"
    assert short["energy_j"] == pytest.approx(400 * 0.1)


def test_samples_are_taken_by_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with Telemetry(BUS, hz=200.0) as telemetry:
        until = time.monotonic() + 10
        while len(telemetry._rows) < 4 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(telemetry._rows) >= 5
    assert "calmnb-telemetry" in nvml.threads
    assert "calmnb-telemetry" not in [thread.name for thread in threading.enumerate()]


def test_throttling_is_flagged_with_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = {"telemetry": sampled(monkeypatch, FakeNvml(reasons=[0x04 | 0x20, 0x04]))}
    assert throttling(meta) == {"power cap": 100.0, "thermal slowdown": 50.0}
    assert "THROTTLED: power cap in 100%, thermal slowdown in 50% of samples" in telemetry_note(meta)


@pytest.mark.parametrize("bits", [0x01, 0x02, 0x100, 0x10])
def test_idling_and_chosen_clocks_are_no_throttling(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    assert throttling({"telemetry": sampled(monkeypatch, FakeNvml(reasons=[bits]))}) == {}


def test_what_nvml_does_not_answer_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = sampled(monkeypatch, FakeNvml(missing=("power", "energy")))
    assert telemetry_table({"telemetry": meta})["power_w"].isna().all()
    assert (meta["energy_j"], meta["energy_per_token_j"]) == (None, None)
    assert json.loads(json.dumps(meta, allow_nan=False)) == meta


def test_no_library_no_package_and_no_gpu_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Shared Library Not Found" in sampled(monkeypatch, FakeNvml(missing=("library",)))["problem"]
    assert "pip install nvidia-ml-py" in sampled(monkeypatch, None)["problem"]
    with Telemetry(None) as telemetry:
        pass
    assert telemetry.to_meta() == {"problem": "this engine runs on no GPU"}
    assert telemetry_note({"telemetry": telemetry.to_meta()}) == ""
    assert throttling({"telemetry": telemetry.to_meta()}) == {}


def test_the_thread_ends_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(ZeroDivisionError), Telemetry(BUS):
        raise ZeroDivisionError
    assert nvml.closed == 1
    assert "calmnb-telemetry" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    meta = sampled(monkeypatch, FakeNvml(reasons=[0x04, 0]), tokens=9)
    return noisy_recorder(SMOL.replace(n_layers=1), tokens=8, telemetry=meta).session()


def test_a_session_keeps_it_through_a_file(session: Session, tmp_path: Path) -> None:
    again = Session.load(session.save(tmp_path / "s.calmprof"))
    assert again.telemetry().equals(session.telemetry())
    assert len(again.telemetry()) == 2
    assert again.throttling() == {"power cap": 50.0}


def test_reports_and_traces_show_it(session: Session) -> None:
    assert "0.111 J a token (counter), up to 400 W, up to 1980 MHz, up to 41 C, THROTTLED" in text_report(session)
    counters = [event for event in chrome_trace(session)["traceEvents"] if event["ph"] == "C"]
    assert {"watts": 400.0} in [event["args"] for event in counters if event["name"] == "power, W"]
    assert [event["args"] for event in counters if event["name"] == "throttled"] == [{"power cap": 1}, {"power cap": 0}]


def test_a_session_without_it_has_an_empty_table() -> None:
    recorder = SessionRecorder({})
    recorder.add("decode", 0, 1, 1, (Kernel("embed", -1, "embed"),), np.zeros(1), np.ones(1), 0.0, 1.0)
    session = recorder.session()
    assert list(session.telemetry()) == list(TELEMETRY_COLUMNS)
    assert len(session.telemetry()) == 0
    assert session.throttling() == {}
