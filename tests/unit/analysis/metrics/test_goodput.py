"""Goodput: what a bound means, who counts, and where there is most of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import measurement

from pytest_slmserve.analysis.metrics.window import (
    Goodput,
    Slo,
    finished_in_window,
    goodput_of,
    parse_slo,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Failures, Measurement, Run, Samples, Steps
from pytest_slmserve.schema.specs import OpenLoop

# Words

BOUNDS = st.one_of(st.none(), st.integers(1, 10**9).map(lambda microseconds: microseconds / 10**6))


@given(BOUNDS, BOUNDS, BOUNDS)
def test_an_slo_is_the_same_after_its_words(ttft, tpot, e2e):
    if {ttft, tpot, e2e} != {None}:
        slo = Slo(ttft, tpot, None, e2e)
        assert parse_slo(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:200ms,tpot:50ms,e2e:5s", Slo(ttft_s=0.2, tpot_s=0.05, e2e_s=5)),
        (" e2e : 1.5 s , ttft:.5s", Slo(ttft_s=0.5, e2e_s=1.5)),
        ("tpot:1500ms", Slo(tpot_s=1.5)),
    ],
)
def test_words_of_an_slo(text, slo):
    assert parse_slo(text) == slo


def test_an_slo_in_words():
    assert str(Slo(e2e_s=5, ttft_s=0.2, tpot_s=0.0125)) == "ttft:200ms,tpot:12.5ms,e2e:5s"


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("", "'' is no SLO", "ttft:200ms,tpot:50ms,e2e:5s"),
        ("ttft", "'ttft' is no SLO", "ttft:200ms"),
        ("ttft:200", "'ttft:200' has no unit", "ttft:200ms, or ttft:200s"),
        ("ttft:200us", "'ttft:200us' is no SLO", "ttft:200ms"),
        ("ttft:-5ms", "'ttft:-5ms' is no SLO", "ttft:200ms"),
        ("ttft:0ms", "an SLO of 0.0 s for ttft", "ttft:200ms"),
        ("ttft:nanms", "is no SLO", "ttft:200ms"),
        ("ttft:200ms tpot:50ms", "'ttft:200ms tpot:50ms' is no SLO", "ttft:200ms,tpot:50ms"),
        ("ttft:200ms,", "'' is no SLO", "ttft:200ms"),
        ("e2el:5s", "no latency is called 'e2el'", "one of ttft, tpot, itl, e2e"),
        ("ttft:1s,ttft:2s", "ttft twice", "ttft:200ms"),
    ],
)
def test_other_words_say_what_to_type(text, problem, hint):
    with pytest.raises(BadUsage) as error:
        parse_slo(text)
    assert problem in error.value.problem
    assert hint in error.value.hint


@pytest.mark.parametrize("bounds", [{}, {"ttft_s": 0}, {"ttft_s": math.inf}, {"e2e_s": math.nan}])
def test_an_slo_that_bounds_nothing_is_refused(bounds):
    with pytest.raises(BadUsage):
        Slo(**bounds)


# Counting

# sent, first token, last token, output tokens, finished: TTFT 0.1, TPOT 0.05, E2E 0.6 unless said otherwise
GOOD = (1.0, 1.1, 1.6, 11, True)
SLOW_START = (1.0, 1.3, 1.8, 11, True)
SLOW_TOKENS = (1.0, 1.1, 3.1, 11, True)
LONG = (1.0, 1.1, 11.1, 201, True)
ONE_TOKEN = (1.0, 1.1, 1.1, 1, True)
CUT_OFF = (1.0, 1.1, None, 5, False)
BEFORE, AFTER = (0.9, 1.0, 1.5, 11, True), (3.0, 3.1, 3.6, 11, True)
SLO = Slo(ttft_s=0.2, tpot_s=0.06, e2e_s=5)
WINDOW = (1.0, 3.0)


def samples_of(*rows) -> Samples:
    sent, first, last, tokens, finished = zip(*rows) if rows else ((),) * 5
    return Samples(tuple(range(len(rows))), sent, sent, first, last, (1,) * len(rows), tokens, finished)


def served(samples: Samples, failed: int = 0) -> Measurement:
    """An open loop with these requests in WINDOW, and failed ones whose times are not known."""
    run = Run(samples, Steps(*[()] * 7), WINDOW, failures=failed)
    return replace(measurement(load=OpenLoop(rate=10.0, window_s=2.0)), run=run)


def goodput(samples: Samples, slo: Slo, failed: int = 0) -> Goodput:
    return goodput_of(slo, (served(samples, failed),))


def test_goodput_is_of_those_that_met_every_slo():
    seen = goodput(samples_of(BEFORE, GOOD, GOOD, SLOW_START, SLOW_TOKENS, LONG, ONE_TOKEN, CUT_OFF, AFTER), SLO)
    assert (seen.requests, seen.good, seen.dropped) == (7, 3, 1)
    assert seen.per_s == 3 / 2.0 and seen.attainment == 3 / 7
    assert seen.by_slo == {"ttft": 5 / 7, "tpot": 5 / 7, "e2e": 5 / 7}
    assert seen.slo == SLO


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (GOOD, {"ttft", "tpot", "e2e"}),
        (SLOW_START, {"tpot", "e2e"}),
        (SLOW_TOKENS, {"ttft", "e2e"}),
        (LONG, {"ttft", "tpot"}),
        (ONE_TOKEN, {"ttft", "tpot", "e2e"}),
        (CUT_OFF, set()),
    ],
)
def test_each_slo_is_held_against_its_own_latency(row, kept):
    seen = goodput(samples_of(row), SLO)
    assert {name for name, share in seen.by_slo.items() if share} == kept
    assert seen.good == (len(kept) == 3)


def test_a_bound_that_is_just_met_is_met():
    exact = samples_of((1.0, 1.25, 1.75, 5, True))
    assert goodput(exact, Slo(ttft_s=0.25, tpot_s=0.125, e2e_s=0.75)).good == 1
    for tighter in (Slo(ttft_s=0.2499), Slo(tpot_s=0.1249), Slo(e2e_s=0.7499)):
        assert goodput(exact, tighter).good == 0


def test_one_that_ends_after_the_window_counts_and_one_that_never_ended_counts_against():
    late = (2.9, 3.0, 7.0, 101, True)
    assert goodput(samples_of(late), SLO).good == 1
    never = goodput(samples_of(late, (2.9, 3.0, None, 101, False)), SLO)
    assert (never.good, never.requests, never.attainment) == (1, 2, 0.5)


def test_failures_without_a_row_count_against():
    seen = goodput(samples_of(GOOD, GOOD), SLO, failed=2)
    assert (seen.requests, seen.good, seen.dropped, seen.attainment) == (4, 2, 2, 0.5)
    assert seen.by_slo == {"ttft": 0.5, "tpot": 0.5, "e2e": 0.5}


def test_what_the_end_of_a_closed_loop_cuts_off_was_not_dropped():
    planted = measurement(8, 1000.0)
    cut = sum(not finished for finished in planted.run.samples.finished)
    seen = goodput_of(Slo(e2e_s=100), (planted,))
    assert cut > 0 and (seen.dropped, seen.attainment) == (0, 1)
    assert seen.requests == len(finished_in_window(planted.run))
    open_loop = replace(planted, load=OpenLoop(arrivals="gamma 1", rate=10.0, settle_s=1.0, window_s=2.0))
    assert goodput_of(Slo(e2e_s=100), (open_loop,)).dropped == cut, "nobody who waited in an open loop is forgotten"


def test_only_failures_of_the_window_are_dropped():
    planted = measurement(load=OpenLoop(arrivals="gamma 1", rate=10.0, settle_s=1.0, window_s=2.0), failures=3)
    begin, end = planted.run.window_s
    failed = Failures((0, 1, 2), (begin - 0.1, begin, end), (end,) * 3, ("timeout",) * 3)
    noted = replace(planted, run=replace(planted.run, failed=failed))
    unknown, known = goodput_of(SLO, (planted,)), goodput_of(SLO, (noted,))
    assert unknown.dropped - known.dropped == 2 == unknown.requests - known.requests
    assert known.good == unknown.good


def test_repeats_together():
    one, other = (served(samples_of(*rows)) for rows in ((GOOD, SLOW_START), (GOOD, GOOD, GOOD, SLOW_TOKENS)))
    both = goodput_of(SLO, (one,), (other,))
    assert (both.requests, both.good, both.dropped, both.attainment) == (6, 4, 0, 4 / 6)
    assert both.per_s == (1 / 2.0 + 3 / 2.0) / 2
    assert both.by_slo == {"ttft": 5 / 6, "tpot": 5 / 6, "e2e": 1}
    assert goodput_of(SLO, (one, other)) == replace(both, per_s=2 * both.per_s), "engines beside each other"


def test_a_bound_on_gaps_cannot_be_held_against_records():
    for refused in (lambda: parse_slo("itl:5ms"), lambda: Slo(itl_s=0.1, e2e_s=5)):
        with pytest.raises(BadUsage, match="not request by request"):
            refused()


def test_of_nothing_there_are_no_shares():
    seen = goodput(samples_of(BEFORE), SLO)
    assert seen == Goodput(SLO, 0, 0, 0, 0.0, None, {"ttft": None, "tpot": None, "e2e": None})


ROWS = st.lists(
    st.builds(
        lambda sent, ttft, decode, tokens, finished: (
            sent,
            sent + ttft,
            sent + ttft + decode if finished else None,
            tokens,
            finished,
        ),
        st.floats(0, 4),
        st.floats(0, 1),
        st.floats(0, 5),
        st.integers(1, 50),
        st.booleans(),
    ),
    max_size=30,
)


@given(ROWS, st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.01, 5))
def test_a_tighter_slo_is_never_met_more_often(rows, ttft, tpot, e2e):
    samples, slo = samples_of(*rows), Slo(ttft, tpot, None, e2e)
    seen = goodput(samples, slo)
    assert seen.good <= min(
        [seen.requests - seen.dropped, *(round(s * seen.requests) for s in seen.by_slo.values() if s)]
    )
    for tighter in (replace(slo, ttft_s=ttft / 2), replace(slo, tpot_s=tpot / 2), replace(slo, e2e_s=e2e / 2)):
        assert goodput(samples, tighter).good <= seen.good
    assert goodput(samples, Slo(ttft_s=ttft)).good >= seen.good
