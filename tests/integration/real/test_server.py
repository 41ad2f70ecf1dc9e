"""One server of vLLM's CPU backend, started once, with a cache of prefixes: it keeps the contract of all engines, and
is measured as somebody else's by its URL."""

from contextlib import closing
from dataclasses import replace

import pytest
from contract import Contract
from interfaces import problems_of, url_of
from real_engine import NOTHING_COMPILED, SPEC
from runs import POINTS

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.server import ServerEngine

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("real server")]


SERVER = replace(SPEC, interface="server", prefix_caching=True, env=tuple(NOTHING_COMPILED.items()))


@pytest.fixture(scope="module")
def there(vllm_here):
    with closing(ServerEngine(SERVER).start()) as found:
        yield found


class TestContract(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, there):
        return there


def test_suite_runs_at_server_url(there, pytester, monkeypatch):
    pytester.makepyfile(POINTS)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    asked = ("--slm-concurrency=1,8", "--slm-input-len=160", "--slm-output-len=16", "--slm-repeats=1", "--slm-window=2")
    words = ("--slm-models=slm", *asked, "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(f"--slm-endpoint={url_of(there)}", *words)
    found = read(pytester.path / ".slm/records.jsonl").measurements
    assert problems_of(found) == []
    assert [cache_hit_share(m.run).share for m in found] == [0.0] * len(found), "its prompts are its own"
    assert {m.load.concurrency for m in found} == {1, 8} and not any(len(m.run.steps) for m in found)
    assert {tokens for m in found for tokens in m.run.samples.prompt_tokens} == {160}


REQUESTS = 96  # a fast CPU serves fewer in less than the 0.2 s of tokens that a window needs


def test_repeated_seed_hits_warm_cache(there, tmp_path, capsys, monkeypatch):
    """The CPU's blocks are of 128 tokens: one of a prompt of 160 is kept."""
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    lengths = ("--max-concurrency", "4", "--num-prompts", str(REQUESTS), "--input-len", "160", "--output-len", "8")
    words = ("measure", "--endpoint", url_of(there), "--model", "slm", *lengths, "--records", str(tmp_path / "r.jsonl"))
    for further in (["--seed", "5"], ["--seed", "5"], ["--seed", "5", "--allow-prefix-cache"], []):
        assert main([*words, *further]) in (0, 1), capsys.readouterr().err
    found = read(tmp_path / "r.jsonl").measurements
    refused = [any("from a prefix cache" in text for text in problems_of([m])) for m in found]
    assert refused == [False, True, False, False]
    assert [cache_hit_share(m.run).share for m in found] == [0, pytest.approx(128 / 160), pytest.approx(128 / 160), 0]
    by_counters = [m.run.stream.cache_lookups for m in found]
    assert [looked_up >= REQUESTS * 160 for looked_up, _ in by_counters] == [True] * 4, "vLLM's own page agrees"
    assert [hits for _, hits in by_counters] == [0, REQUESTS * 128, REQUESTS * 128, 0]
