"""A real server that the suite has not started, as far as it knows: vLLM's own, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doors import url_of, wrong_but_for_noise
from real_engine import SPEC

from pytest_slmserve.engines.server import ServerEngine
from pytest_slmserve.store import read

POINTS = """
    def test_point(slm_point):
        assert slm_point.measure()
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def there(vllm_here):
    found = ServerEngine(replace(SPEC, door="server"))
    yield found
    found.close()


def test_the_suite_at_its_url(there, pytester, monkeypatch):
    pytester.makepyfile(POINTS)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    asked = ("--slm-models=slm", "--slm-batches=1,8", "--slm-lengths=32/16", "--slm-repeats=1")
    pytester.runpytest_inprocess(f"--slm-endpoint={url_of(there)}", *asked, "-p", "no:cacheprovider")
    found = read(pytester.path / ".slm/records.jsonl").measurements
    assert wrong_but_for_noise(found) == []
    assert {m.load.concurrency for m in found} == {1, 8} and not any(len(m.run.steps) for m in found)
    assert {tokens for m in found for tokens in m.run.samples.prompt_tokens} == {32}
