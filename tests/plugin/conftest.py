"""Runs pytest inside pytest, on the simulated engine: everything but the engine is real."""

from __future__ import annotations

import os

import pytest
from inside import SMALL, SWEEP


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
