"""--slm-gpu runs the benchmarks on this host's GPU, and is an error, never a skip, where there is none."""

import sys
from types import SimpleNamespace

import pytest
from inside import SWEEP, usage_error

from pytest_slmserve.telemetry import host_probe


class NVMLError(Exception):
    pass


def refuse():
    raise NVMLError("Driver Not Loaded")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse))
    host_probe.visible_gpus.cache_clear()


def test_without_a_gpu_it_is_an_error_in_one_sentence(pytester, no_gpu):
    pytester.makepyfile(SWEEP)
    text = usage_error(pytester.runpytest_inprocess("--slm-gpu"))
    assert "no GPU here: NVML says Driver Not Loaded" in text
    assert "try: --slm-cpu" in text


def test_a_plan_can_be_made_without_a_gpu(pytester, no_gpu, monkeypatch):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-gpu", "--slm-plan", "--slm-models=opt-1.3b")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*start opt-1.3b (cuda, 55 s)*", "*note: no GPU here*assumes*140 GiB*"])


def test_hidden_gpus_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    host_probe.visible_gpus.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None))
    with pytest.raises(host_probe.BadUsage, match="hides every GPU"):
        host_probe.first_gpu()
