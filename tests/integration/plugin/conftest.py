"""Runs pytest inside pytest, on the simulated engine: everything but the engine is real."""

import os
from importlib import import_module

import pytest
from inner_runs import InnerRuns
from interfaces import STAND_IN
from simulated_sessions import remembered


@pytest.fixture(scope="session")
def runs(wide_terminal, request, tmp_path_factory):
    """Runs of pytest that several tests look at: see `inner_runs`. pytester forgets what is imported while it works,
    and each inner run would import it anew: so before."""
    for name in ("pytest_slmserve.plugin.session_hooks", "pytest_slmserve.run.session"):
        import_module(name)
    return InnerRuns(request.config, tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def quick_and_alone(runs):
    """No process of git for each session, requests that are made once, and no options from outside, nor the words of
    tests that run side by side. Other folders have tests of these functions in the same process."""
    from pytest_slmserve.plan import planner
    from pytest_slmserve.telemetry import host

    make = planner.build_workload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planner, "build_workload", lambda spec, of: (remembered if spec.source == "lengths" else make)(spec, of)
        )
        patch.setattr(host, "git_commit", lambda root: None)
        for name in [name for name in os.environ if name.startswith(("SLM_", "PYTEST_XDIST"))]:
            patch.delenv(name)
        yield


@pytest.fixture
def holds(monkeypatch):
    """What any interpreter is taken to hold: `holds("0.32.0")`; None is no vLLM."""
    from pytest_slmserve.telemetry import host

    def with_vllm(version):
        facts = {"python": "3.11.7", "vllm": version, "torch": "2.13.0"}
        monkeypatch.setattr(host, "interpreter", lambda python, env: facts)

    return with_vllm


@pytest.fixture
def stand_in_here(holds, monkeypatch, tmp_path):
    """The words by which engines on the CPU are the stand-in for vLLM, whatever this interpreter holds."""
    holds("0.32.0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # other runs on this machine have their own lock
    return f"--slm-cpu --slm-telemetry=off --slm-env=PYTHONPATH={STAND_IN}"
