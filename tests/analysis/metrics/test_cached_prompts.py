"""What share of the prompts was not computed, by whose count, and from where on it is too much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import measurement, planted_run

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import MOST_CACHED, cache_hit_problems, cache_hit_share, problems
from pytest_slmserve.archive.codec import measurement_line, measurement_of
from pytest_slmserve.schema.records import Stream

STREAM = Stream(0.01, 0.0, (), {"growth": 1.01, "least_s": 1e-4, "counts": {}})


def told(tokens, *, of_all=True):
    """A run whose requests had so many of their 64 prompt tokens in a cache; of_all: else only those outside of the
    window."""
    run = planted_run(4, 400.0)
    inside = set(window.finished_in_window(run))
    counts = tuple(tokens if of_all or i not in inside else 0 for i in range(len(run.samples)))
    return replace(run, samples=replace(run.samples, cached_tokens=counts))


@pytest.mark.parametrize(("tokens", "share"), [(0, 0.0), (16, 0.25), (48, 0.75)])
def test_the_share_is_of_the_requests_that_ended_in_the_window(tokens, share):
    assert cache_hit_share(told(tokens)).share == share
    assert cache_hit_share(told(tokens, of_all=False)).share == 0 if tokens else True


def test_a_count_that_is_left_out_is_a_zero_where_others_count():
    """As older releases of vLLM have it."""
    run = told(16)
    inside = window.finished_in_window(run)
    counts = [None] * len(run.samples)
    counts[inside[0]] = 64
    seen = cache_hit_share(replace(run, samples=replace(run.samples, cached_tokens=tuple(counts))))
    assert seen.share == pytest.approx(1 / len(inside))


def test_counters_are_asked_only_where_no_request_tells():
    by_counters = replace(planted_run(4, 400.0), stream=replace(STREAM, cache_lookups=(1000, 100)))
    assert cache_hit_share(by_counters).share == 0.1 and "counters" in cache_hit_share(by_counters).told_by
    both = replace(told(0), stream=by_counters.stream)
    assert cache_hit_share(both).share == 0 and "each request" in cache_hit_share(both).told_by
    nothing = replace(by_counters, stream=replace(STREAM, cache_lookups=(0, 0)))
    assert cache_hit_share(nothing) is None and cache_hit_share(planted_run(4, 400.0)) is None


def test_the_bound_itself_is_not_too_much():
    at = replace(planted_run(4, 400.0), stream=replace(STREAM, cache_lookups=(1000, round(1000 * MOST_CACHED))))
    beyond = replace(at, stream=replace(STREAM, cache_lookups=(1000, round(1000 * MOST_CACHED) + 1)))
    m = measurement(concurrency=4)
    assert not [*cache_hit_problems(replace(m, run=at))] and len([*cache_hit_problems(replace(m, run=beyond))]) == 1
    assert "came from a prefix cache" in problems(replace(m, run=beyond))[-1]
    allowed = replace(m, run=beyond, spec=replace(m.spec, allow_prefix_cache=True))
    assert not [*cache_hit_problems(allowed)]


def test_a_record_keeps_who_told_what():
    m = measurement(concurrency=4)
    stream = replace(STREAM, cache_lookups=(1000, 7), salt=(5, 6), without=("ignore_eos",))
    for run in (replace(told(16), stream=stream), planted_run(4, 400.0)):
        kept = replace(m, run=run)
        line = measurement_line(kept)
        again = measurement_of(line, m.spec, m.resolved, m.environment).run
        assert tuple(again.samples.cached_tokens) == run.samples.cached_tokens and cache_hit_share(
            again
        ) == cache_hit_share(run)
        assert ("cached_tokens" in line["run"]["samples"]) is bool(run.samples.cached_tokens)
        assert again.stream == run.stream
