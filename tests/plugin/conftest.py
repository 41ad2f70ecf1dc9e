"""Runs pytest inside pytest, on the simulated engine: everything but the engine is real."""

from __future__ import annotations

import os

import pytest

SWEEP = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim):
        assert slm_claim()
"""
SMALL = ("--slm-fake", "--slm-models=opt-125m", "--slm-batches=1,16,64,128,256", "--slm-window=2")


@pytest.fixture(autouse=True)
def no_options_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def sweep(pytester):
    """Runs a small sweep and its plateau claim: `sweep("--slm-repeats=3")`."""
    pytester.makepyfile(SWEEP)

    def run(*args):
        return pytester.runpytest_inprocess(*SMALL, *args, "-p", "no:cacheprovider")

    return run


@pytest.fixture
def archive(pytester):
    """What the inner run wrote: `archive()` reads the default archive."""
    from pytest_slmserve.store import read

    return lambda path=".slm/records.jsonl": read(pytester.path / path)


def usage_error(result):
    """The one sentence of a usage error; fails if the run ended in another way."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str() + result.stderr.str()
    text = result.stderr.str()
    assert "Traceback" not in text
    return text
