"""Runs pytest inside pytest, on the simulated engine: everything but the engine is real."""

from __future__ import annotations

from importlib import import_module

import pytest
from inner_runs import InnerRuns, inner_pytester, without_options
from inside import GATE, ONE, SMALL, SWEEP
from interfaces import STAND_IN
from shipped import put
from simulated_sessions import remembered


@pytest.fixture(scope="session", autouse=True)
def imported_once():
    """pytester forgets what is imported while it works, and each inner run would import it anew: so before."""
    for name in ("pytest_slmserve.plugin.session_hooks", "pytest_slmserve.run.session"):
        import_module(name)


# What follows is patched for a module at a time: other folders have tests of these functions in the same process.


@pytest.fixture(scope="module", autouse=True)
def requests_made_once(imported_once):
    """Half a million token ids and their hash, which are the same in one inner run as in the next."""
    from pytest_slmserve.plan import planner

    make = planner.build_workload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planner, "build_workload", lambda spec, of: (remembered if spec.source == "lengths" else make)(spec, of)
        )
        yield


@pytest.fixture(scope="module", autouse=True)
def no_process_of_git(imported_once):
    """Each session would start one, to know the commit."""
    from pytest_slmserve.telemetry import host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "git_commit", lambda root: None)
        yield


@pytest.fixture(scope="module")
def inner(request, tmp_path_factory, wide_terminal):
    """A `pytester` for a whole module, so that many tests look at one inner run. Records are kept."""
    with inner_pytester(request.path.stem, request.config, tmp_path_factory) as made:
        yield made


@pytest.fixture(autouse=True)
def very_wide_terminal(wide_terminal, monkeypatch):
    """No sentence is broken, so that a test can match it."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(autouse=True)
def no_options_from_outside(monkeypatch):
    """Nor a word that tests run side by side: the inner run does not, and pytest-benchmark would switch itself off."""
    without_options(monkeypatch)


@pytest.fixture
def sweep(pytester):
    """Runs a small sweep and its plateau claim: `sweep("--slm-repeats=3")`."""
    pytester.makepyfile(SWEEP)

    def run(*args):
        return pytester.runpytest_inprocess(*SMALL, *args, "-p", "no:cacheprovider")

    return run


@pytest.fixture
def kept(monkeypatch):
    """Simulated runs keep their records in the usual place, as they do where an archive is named."""
    monkeypatch.setenv("SLM_RECORDS", ".slm/records.jsonl")


@pytest.fixture
def archive(pytester, kept):
    """What the inner run wrote: `archive()` reads the default archive."""
    from pytest_slmserve.archive.store import read

    return lambda path=".slm/records.jsonl": read(pytester.path / path)


@pytest.fixture
def gain(pytester):
    """Runs the shipped benchmark of replicas on the simulated engine."""
    put(pytester.path, "test_replication_gain")
    return lambda *args: pytester.runpytest_inprocess(*ONE, *args)


@pytest.fixture
def gate(pytester):
    """Runs the shipped gate on the simulated engine: `gate("--slm-concurrency=4,32")`."""
    put(pytester.path, "test_gate")
    return lambda *args: pytester.runpytest_inprocess(*GATE, *args)


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
    """The option by which engines on the CPU are the stand-in for vLLM, whatever this interpreter holds."""
    holds("0.32.0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # other runs on this machine have their own lock
    return f"--slm-env=PYTHONPATH={STAND_IN}"


@pytest.fixture(scope="session")
def runs(imported_once, wide_terminal, request, tmp_path_factory):
    """Runs of pytest that several tests look at: see `inner_runs`."""
    return InnerRuns(request.config, tmp_path_factory)
