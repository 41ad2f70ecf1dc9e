"""A cache of prefixes makes a prompt free that has been there: prompts of one's own, and what is told of the others."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interfaces import engine_with, problems_of, small_workload, somebodys_server, stand_in, url_of
from measured import measure

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.validity import cache_hit_share, problems
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines import endpoint
from pytest_slmserve.engines.endpoint import FRESH, LEAST_ID, MARK, FreshPrompts, cache_lookups
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.server import server_command
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Request, Workload, WorkloadSpec
from pytest_slmserve.telemetry.host import this_host

BURST = ClosedLoop(2, requests=40)  # of 32 requests: the first eight come again
REASON = "of the prompt tokens came from a prefix cache"


def requests_of(*prompts):
    return Workload(WorkloadSpec(), tuple(Request(prompt, 2) for prompt in prompts), "here")


# Prompts of one's own


@given(st.lists(st.integers(4, 999), min_size=8, max_size=20).map(tuple), st.booleans())
def test_a_prompt_keeps_its_length_and_its_end(ids, words):
    own = FreshPrompts(requests_of(ids), words)
    prompt, place = own.prompt(ids), FRESH * (2 if words else 1)
    parts = prompt.split() if words else prompt
    assert parts[1] == MARK and len(parts) - 1 + place == len(ids)
    for text in (own.rounds[0], own.rounds[-1]):
        assert len(text.split() if words else text.split(", ")) == place


def test_no_two_rounds_and_no_two_hand_overs_are_alike():
    workload = requests_of(tuple(range(4, 5000)))
    first, second = (FreshPrompts(workload, words=False) for _ in range(2))
    assert len({*first.rounds, *second.rounds}) == 2 * len(first.rounds)
    assert all(LEAST_ID <= int(part) < 5000 for text in first.rounds for part in text.split(", "))


def test_a_prompt_that_is_too_short_stays_as_it_is():
    own = FreshPrompts(requests_of((5, 6, 7, 8)), words=False)
    assert own.prompt((5, 6, 7, 8)) is None


# What is told


SEVERAL = """vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 50.0
vllm:prefix_cache_hits_total{engine="0"} 3e1
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
"""


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (SEVERAL, (150, 30)),
        ('vllm:gpu_prefix_cache_queries_total{m="x"} 5\nvllm:gpu_prefix_cache_hits_total{m="x"} 2', (5, 2)),
        ("llamacpp:prompt_tokens_total 5\n", None),
        ("", None),
        ("<html>", None),
        ("vllm:prefix_cache_queries_total NaN\n", None),
    ],
)
def test_the_counters_of_several_engines_are_added_up(monkeypatch, page, found):
    monkeypatch.setattr(endpoint, "ask_once", lambda *_: (200, "text/plain", page))
    assert cache_lookups("http://host/v1/completions", {}) == found


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


def test_vllms_server_is_asked_to_count_where_it_caches():
    caching = replace(stand_in(), interface="server", prefix_caching=True)
    by_argument = replace(stand_in(enable_prefix_caching=True), interface="server")
    for spec, wanted in ((caching, True), (by_argument, True), (replace(stand_in(), interface="server"), False)):
        assert ("--enable-prompt-tokens-details" in server_command(spec, "m", 8000)) is wanted
