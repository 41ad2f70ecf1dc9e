"""A cache of prefixes makes a prompt free that has been there: prompts of one's own, and what is told of the others."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest
from interfaces import engine_with, problems_of, small_workload, somebodys_server, stand_in, url_of
from measured import measure

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.validity import cache_hit_share, problems
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.endpoint import cache_lookups
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec
from pytest_slmserve.telemetry.host import this_host

BURST = ClosedLoop(2, requests=40)  # of 32 requests: the first eight come again
REASON = "of the prompt tokens came from a prefix cache"


# Prompts of one's own


# What is told


# A stand-in for a server that caches


@pytest.fixture(scope="module", params=["usage", "counters"])
def caching(request):
    """Tells of its cache for each request, or by its counters alone."""
    told = {} if request.param == "usage" else {"metrics": True, "enable_prompt_tokens_details": False}
    with somebodys_server(enable_prefix_caching=True, **told) as server:
        yield server, request.param


@pytest.fixture
def ask(caching, tmp_path, capsys, monkeypatch):
    """`measure` at that server: exit status, and what it says as JSON."""
    server, _ = caching
    monkeypatch.setenv("SLM_ENDPOINT_KEY", server._key)
    lengths = ("--input-len", "16", "--output-len", "4", "--max-concurrency", "2", "--num-prompts", "40")

    def run(*arguments, form="--json"):
        words = ["--endpoint", url_of(server), "--model", "slm", "--records", str(tmp_path / "r.jsonl")]
        status = main(["measure", *words, *lengths, *arguments, form])
        return status, capsys.readouterr().out

    return run


def test_by_default_nothing_comes_from_a_cache_however_often_it_is_measured(ask, tmp_path):
    for _ in range(3):
        status, told = ask()
        assert status == 0 and json.loads(told)["cached_prompt_share"] == 0
    salts = [m.run.stream.salt for m in read(tmp_path / "r.jsonl").measurements]
    assert len(set(salts)) == 3 and all(salts)
    assert len({m.key for m in read(tmp_path / "r.jsonl").measurements}) == 1, "one question, however it was varied"


def test_a_seed_gives_the_same_prompts_again_and_that_is_not_valid(ask, tmp_path):
    assert ask("--seed", "3")[0] == 0
    status, told = ask("--seed", "3")
    found = json.loads(told)
    assert status == 1 and found["cached_prompt_share"] == pytest.approx(12 / 16)
    assert any(REASON in text and "75 %" in text and "limit 5 %" in text for text in found["problems"])
    assert [m.run.stream.salt for m in read(tmp_path / "r.jsonl").measurements] == [None, None]


def test_unless_it_was_asked_for(ask, caching, tmp_path):
    ask("--seed", "4")
    status, told = ask("--seed", "4", "--allow-prefix-cache", form="--json")
    assert status == 0 and json.loads(told)["cached_prompt_share"] > 0.7
    apart = ("--records", str(tmp_path / "other.jsonl"))
    status, page = ask("--allow-prefix-cache", *apart, form="--seed=4")
    by = "counted for each request" if caching[1] == "usage" else "server metrics"
    assert status == 0 and f"prefix-cache hit rate 75.0 % ({by})" in page
    refused, allowed = read(tmp_path / "r.jsonl").measurements
    assert refused.key != allowed.key, "never reused for each other"


def test_rounds_within_one_load_are_not_alike_either(caching):
    """Thirty-two requests, five times over."""
    server, how = caching
    spec = EngineSpec("slm", platform="remote", interface="endpoint", url=url_of(server))
    engine = engine_with(server._key, spec)
    try:
        found = measure(engine, small_workload(), ClosedLoop(4, requests=160), this_host("remote"))
        again = measure(engine, small_workload(), ClosedLoop(4, requests=160), this_host("remote"))
    finally:
        engine.close()
    assert [cache_hit_share(m.run).share for m in (found, again)] == [0, 0]
    assert bool(found.run.samples.cached_tokens) is (how == "usage")
    assert (found.run.stream.cache_lookups is None) is (how == "usage")


def test_a_server_that_does_not_tell_is_not_judged(tmp_path):
    with somebodys_server(enable_prefix_caching=True, enable_prompt_tokens_details=False) as server:
        spec = EngineSpec("slm", platform="remote", interface="endpoint", url=url_of(server))
        engine = engine_with(server._key, spec, own_prompts=False)
        found = [measure(engine, small_workload(), BURST, this_host("remote")) for _ in range(2)]
        engine.close()
        assert cache_lookups(url_of(server), {}) is None
    assert cache_hit_share(found[1].run) is None and problems_of(found[1:]) == []


# Engines of ours


@pytest.mark.parametrize("interface", ["engine", "server"])
def test_an_engine_of_ours_with_a_cache_says_when_it_is_warm(interface):
    spec = replace(stand_in(), interface=interface, prefix_caching=True)
    with closing(Pool()) as pool:
        first, second = (measure(pool.engine(spec), small_workload(), BURST, this_host("remote")) for _ in range(2))
    assert (
        cache_hit_share(first.run).share == pytest.approx(8 / 40 * 12 / 16)
        and cache_hit_share(second.run).share == 12 / 16
    )
    assert any(REASON in text for text in problems(second))
    allowed = replace(second, spec=replace(spec, allow_prefix_cache=True))
    assert not any(REASON in text for text in problems(allowed)) and allowed.key != second.key


@pytest.mark.parametrize("interface", ["engine", "server"])
def test_without_a_cache_there_is_nothing_to_tell(interface):
    with closing(Pool()) as pool:
        engine = pool.engine(replace(stand_in(), interface=interface))
        found = [measure(engine, small_workload(), BURST, this_host("remote")) for _ in range(2)]
    assert [cache_hit_share(m.run) and cache_hit_share(m.run).share for m in found] == [
        0 if interface == "engine" else None
    ] * 2
