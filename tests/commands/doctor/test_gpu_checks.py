"""Each check of a planted card, and a card behind the real pynvml."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_nvml import FakeNvml, State, installed
from planted import put

from pytest_slmserve.commands import doctor as module
from pytest_slmserve.commands.doctor import Finding, Places, examine, lines
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.sensors import SM_ACTIVE
from pytest_slmserve.schema.specs import GIB
from pytest_slmserve.telemetry.host_probe import Gpu, visible_gpus


def test_a_host_without_a_gpu_is_no_problem():
    def none():
        raise BadUsage("no GPU here: NVML says no")

    gpu, finding = module.of_gpu(none)
    assert (gpu, finding.state, finding.found) == (None, "warning", "no GPU here: NVML says no")
    assert "--slm-gpu needs" in finding.advice and "--slm-cpu runs" in finding.advice


def test_a_gpu_is_described():
    with installed():
        gpu, finding = module.of_gpu(lambda: Gpu("GPU-5", "NVIDIA H200", 141 * GIB, "580.1", "13.0"))
    assert gpu.uuid == "GPU-5"
    assert (finding.state, finding.found) == ("ok", "NVIDIA H200, 141.0 GiB, driver 580.1, CUDA 13.0, GPU-5")


def card(**answers):
    """NVML that answers these, and knows nothing else."""
    known = {f"nvmlDeviceGet{name}": value for name, value in answers.items()}

    def ask(function, *arguments):
        value = known.get(function)
        return value(*arguments) if callable(value) else value

    return ask


def processes(*pids):
    return [SimpleNamespace(pid=pid) for pid in pids]


def used(gib, total=141):
    return SimpleNamespace(used=gib * GIB, total=total * GIB)


def clocks(now, most, set_to=None, default=None, reasons=0x1):
    answers = {"ClockInfo": now, "MaxClockInfo": most, "ApplicationsClock": set_to, "DefaultApplicationsClock": default}
    given = {name: (lambda kind, value=value: value) for name, value in answers.items()}
    return {**given, "CurrentClocksEventReasons": reasons}


CHECKS = [
    ("sharing", {"MigMode": [0, 0], "ComputeMode": 0}, "ok", "MIG off, compute mode default"),
    ("sharing", {"MigMode": [1, 1], "ComputeMode": 0}, "warning", "MIG on"),
    ("sharing", {"ComputeMode": 3}, "warning", "MIG not known, compute mode exclusive process -> two engines"),
    ("sharing", {"MigMode": [0, 0], "ComputeMode": 2}, "problem", "prohibited -> an administrator"),
    ("users", {"ComputeRunningProcesses": []}, "ok", "nobody computes on it"),
    (
        "users",
        {"ComputeRunningProcesses": processes(7), "MPSComputeRunningProcesses": processes(5, 7)},
        "warning",
        "processes 5, 7",
    ),
    ("users", {"MPSComputeRunningProcesses": processes(5)}, "warning", "processes 5"),
    ("gpu_memory", {"MemoryInfo": used(0.5)}, "ok", "0.5 GiB of 141.0 GiB used"),
    ("gpu_memory", {"MemoryInfo": used(3)}, "warning", "somebody is there"),
    ("gpu_memory", {"MemoryInfo": used(60, 100)}, "problem", "free it, or --slm-gpu-memory-utilization 0.4"),
    (
        "power",
        {
            "EnforcedPowerLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000,
            "PowerManagementLimitConstraints": [200_000, 750_500],
        },
        "ok",
        "700 W, default 700 W, at most 750.5 W",
    ),
    (
        "power",
        {"EnforcedPowerLimit": 500_000, "PowerManagementDefaultLimit": 700_000},
        "warning",
        "500 W, default 700 W -> compare only",
    ),
    ("power", {"EnforcedPowerLimit": 500_000}, "ok", "500 W"),
    ("clocks", clocks(345, 1980, 1980, 1980), "ok", "SM 345 of at most 1980 MHz, set to 1980; memory 345 of"),
    ("clocks", clocks(345, 1980), "ok", "memory 345 of at most 1980 MHz"),
    ("clocks", clocks(345, 1980, 1200, 1980), "warning", "set to 1200; memory 345 of at most 1980 MHz, set to 1200 ->"),
    ("clocks", clocks(900, 1980, reasons=0xC0), "warning", "slowed down: temperature; slowed down: power brake"),
    ("clocks", {"CurrentClocksThrottleReasons": 0x20}, "warning", "slowed down: temperature, by the driver"),
    ("clocks", clocks(1980, 1980, reasons=0x5), "ok", "SM 1980 of at most 1980 MHz"),
    ("temperature", {"Temperature": lambda sensor: 40, "TemperatureThreshold": lambda kind: 90}, "ok", "40 °C, slows"),
    ("temperature", {"TemperatureV": lambda sensor: 81, "TemperatureThreshold": lambda kind: 90}, "warning", "81 °C"),
    ("temperature", {"Temperature": lambda sensor: 95}, "ok", "95 °C"),
    ("persistence", {"PersistenceMode": 1}, "ok", "on"),
    ("persistence", {"PersistenceMode": 0}, "warning", "off -> the first start is slower"),
    (
        "errors",
        {"EccMode": [1, 1], "TotalEccErrors": lambda kind, since: 0, "RemappedRows": (3, 1, 0, 0)},
        "ok",
        "ECC on, 0 uncorrected errors, 1 rows remapped",
    ),
    ("errors", {"EccMode": [1, 1], "TotalEccErrors": lambda kind, since: 2}, "problem", "do not measure on it"),
    ("errors", {"RemappedRows": (0, 0, 0, 1)}, "problem", "remapping failed"),
    ("errors", {"RemappedRows": (0, 0, 1, 0)}, "warning", "more pending -> an administrator should reset it"),
]


@pytest.mark.parametrize(("check", "answers", "state", "words"), CHECKS)
def test_a_card_is_fit_or_not(check, answers, state, words):
    finding = getattr(module, f"of_{check}")(card(**answers))
    assert finding.state == state
    assert words in lines([finding])[0]


def test_a_card_that_says_nothing_is_no_warning():
    findings = module.of_card(card())
    assert {finding.state for finding in findings} == {"ok"}
    assert sum(module.UNSAID in finding.found for finding in findings) == 5
    assert {f"of_{check}" for check, *_ in CHECKS} == {check.__name__ for check in CHECKED}


CHECKED = [getattr(module, name) for name in dir(module) if name in {f"of_{check}" for check, *_ in CHECKS}]


class Card(FakeNvml):
    """With what the doctor asks beside what a source does."""

    # ruff: noqa: N802 - NVML's names
    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2

    def nvmlDeviceGetPersistenceMode(self, device, mode):
        mode._obj.value = 0

    def nvmlDeviceGetComputeMode(self, device, mode):
        mode._obj.value = 3

    def nvmlDeviceGetPowerManagementDefaultLimit(self, device, milliwatts):
        milliwatts._obj.value = 750_000

    def nvmlDeviceGetPowerManagementLimitConstraints(self, device, least, most):
        least._obj.value, most._obj.value = 200_000, 800_000

    def nvmlDeviceGetMaxClockInfo(self, device, kind, megahertz):
        megahertz._obj.value = 2000 + kind.value

    def nvmlDeviceGetApplicationsClock(self, device, kind, megahertz):
        megahertz._obj.value = 1500 + kind.value

    def nvmlDeviceGetDefaultApplicationsClock(self, device, kind, megahertz):
        megahertz._obj.value = 1600 + kind.value

    def nvmlDeviceGetTemperatureThreshold(self, device, kind, celsius):
        celsius._obj.value = 44 + kind.value

    def nvmlDeviceGetEccMode(self, device, current, pending):
        current._obj.value = pending._obj.value = 1

    def nvmlDeviceGetTotalEccErrors(self, device, kind, since, count):
        count._obj.value = 10 * (kind.value if hasattr(kind, "value") else kind) + 4

    def nvmlDeviceGetRemappedRows(self, device, corrected, uncorrected, pending, failed):
        corrected._obj.value, uncorrected._obj.value, pending._obj.value, failed._obj.value = 1, 2, 0, 0


@pytest.fixture
def page_of_a_card(places, monkeypatch):
    """The doctor on a host with a card behind the real pynvml; by name of the finding."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    state = State(memory_used_bytes=5 * GIB, processes=(11,), reasons=0x40)

    def page(**gpu: object) -> dict[str, str]:
        visible_gpus.cache_clear()
        with installed(Card(state, **gpu)):
            found = examine(["/nowhere/python"], places)
        visible_gpus.cache_clear()
        return {finding.name: lines([finding])[0] for finding in found}

    return page


def test_a_card_is_asked_through_pynvml(page_of_a_card):
    found = page_of_a_card()
    assert "NVIDIA Pretence, 150.0 GiB, driver 580.00, CUDA 13.0" in found["GPU"] and "(one of 2:" in found["GPU"]
    assert found["telemetry"].startswith("ok") and "nvml-gpm + host" in found["telemetry"]
    assert "MIG off, compute mode exclusive process" in found["sharing"]
    assert "processes 11" in found["GPU users"] and found["GPU memory"].startswith("warning")
    assert "700 W, default 750 W, at most 800 W ->" in found["power limit"]
    assert "SM 1980 of at most 2001 MHz, set to 1501; memory 3201 of at most 2002 MHz, set to 1502" in found["clocks"]
    assert "slowed down: temperature ->" in found["clocks"]
    assert "40 °C, slows down at 45 °C -> let it cool" in found["temperature"]
    assert found["persistence"].startswith("warning")
    assert "ECC on, 14 uncorrected errors, 2 rows remapped ->" in found["GPU errors"]
    assert "no control daemon" in found["MPS"] and found["vLLM"].startswith("problem")


def test_a_card_without_profiling_counters_is_a_warning(page_of_a_card):
    found = page_of_a_card(gpm=False)["telemetry"]
    assert found.startswith("warning") and f"no {SM_ACTIVE}" in found and "nvml-gpm" not in found


def test_mps_is_a_daemon_that_lives(places, tmp_path):
    remote_executor = Places(places.proc, env={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")})
    assert module.of_mps(remote_executor) == Finding("MPS", "ok", f"no control daemon in {tmp_path / 'mps'}")
    put(tmp_path / "mps/nvidia-cuda-mps-control.pid", "77\n")
    assert module.of_mps(remote_executor).state == "ok"  # left behind
    put(places.proc / "77/stat", "")
    found = module.of_mps(remote_executor)
    assert found.state == "warning" and "process 77" in found.found
