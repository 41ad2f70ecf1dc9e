"""Percentiles of the right requests: nobody is left out for being slow, and gaps are told to one per cent."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import measurement, planted_run

from pytest_slmserve.analysis.estimates import percentile
from pytest_slmserve.analysis.metrics.window import (
    PARTS,
    GapHistogram,
    gap_histogram,
    judged_requests,
    latencies,
    percentiles,
    request_latency,
)
from pytest_slmserve.analysis.points import Summary
from pytest_slmserve.schema.records import Failures, Run, Samples, Steps
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

NO_STEPS = Steps((), (), (), (), (), (), ())


def samples_of(rows) -> Samples:
    """rows: sent, first token, last token, output tokens, finished."""
    sent, first, last, tokens, finished = zip(*rows) if rows else ((),) * 5
    return Samples(tuple(range(len(rows))), sent, sent, first, last, (1,) * len(rows), tokens, finished)


def queue(rate: float, service_s: float, until_s: float, cut_s: float = math.inf) -> Samples:
    """One server, first come first served, even arrivals; what has not ended by `cut_s` is cut off."""
    rows, free = [], 0.0
    for number in range(int(rate * until_s)):
        sent = number / rate
        began, free = max(sent, free), max(sent, free) + service_s
        rows.append(
            (sent, began, free, 5, True) if free <= cut_s else (sent, began if began < cut_s else None, None, 0, False)
        )
    return samples_of(rows)


HAND = samples_of(
    [
        (0.5, 0.6, 1.6, 11, True),  # sent before the window, ends in it
        (1.0, 1.2, 2.2, 11, True),  # at its opening
        (1.5, 1.9, 9.9, 5, True),  # ends long after it
        (1.8, 2.0, 2.0, 1, True),  # one token
        (1.9, 2.4, None, 3, False),  # cut off
        (1.95, None, None, 0, False),  # no token
        (2.0, 2.1, 2.2, 2, True),  # at its close
    ]
)


def test_the_definitions():
    seen = request_latency(HAND, 1)
    assert seen.ttft_s == pytest.approx(0.2) and seen.e2e_s == pytest.approx(1.2)
    assert seen.tpot_s == pytest.approx((1.2 - 0.2) / 10) and seen.normalized_latency_s == pytest.approx(1.2 / 11)
    one = request_latency(HAND, 3)
    assert (one.tpot_s, one.single) == (None, True) and one.e2e_s is not None
    cut = request_latency(HAND, 4)
    assert cut.ttft_s == pytest.approx(0.5)
    assert (cut.tpot_s, cut.e2e_s, cut.normalized_latency_s, cut.single) == (None, None, None, False)


def test_an_open_loop_is_judged_by_what_was_sent_in_the_window():
    seen = latencies([Run(HAND, NO_STEPS, (1.0, 2.0))], "sent")
    assert (seen.requests, seen.unfinished) == (5, 2)
    assert seen.ttft_s.known == 4
    assert seen.tpot_s.known == 2, "that of one token has none"
    assert seen.e2e_s.p50 == pytest.approx(8.4) and seen.e2e_s.p90 is None and seen.e2e_s.mean is None


def test_what_failed_is_slower_than_everything_too():
    run = Run(HAND, NO_STEPS, (1.0, 2.0), failures=3)
    unknown, known = latencies([run], "sent"), latencies([replace(run, failed=failures(0.9, 1.0, 1.5))], "sent")
    assert (unknown.requests, unknown.unfinished) == (5, 2), "it is not known when they were sent"
    assert (known.requests, known.unfinished, known.ttft_s.known) == (7, 4, 4)
    assert known.ttft_s.p90 is None and known.ttft_s.p50 >= unknown.ttft_s.p50


def test_failures_count_where_they_were_sent_or_in_a_closed_loop_where_they_failed():
    planted = measurement(load=OpenLoop(arrivals="gamma 1", rate=4.0, settle_s=1.0, window_s=1.0))
    run = replace(planted.run, window_s=(1.0, 2.0), failures=3, failed=failures(0.5, 1.0, 1.9))
    assert judged_requests(replace(planted, run=run)).failures == 2
    assert judged_requests(replace(planted, run=run, load=ClosedLoop(4))).failures == 1, (
        "each failed 0.3 s after it was sent"
    )
    assert judged_requests(replace(planted, run=replace(run, failed=None))).failures == 3


@pytest.mark.parametrize("load", [OpenLoop(requests=9), ClosedLoop(4, requests=9)])
def test_all_failures_of_a_number_of_requests_count(load):
    """Also those after the last answer, with which its window ends."""
    planted = measurement(load=load)
    run = replace(planted.run, window_s=(1.0, 2.0), failures=3, failed=failures(0.5, 1.0, 2.9))
    assert judged_requests(replace(planted, run=run)).failures == 3


def failures(*sent: float) -> Failures:
    return Failures((0,) * len(sent), sent, tuple(at + 0.3 for at in sent), ("timeout",) * len(sent))


def test_a_closed_loop_is_judged_by_what_ended_in_the_window():
    run = Run(HAND, NO_STEPS, (1.0, 2.0))
    seen = latencies([run])
    assert (seen.requests, seen.unfinished) == (2, 0)
    assert seen.e2e_s.mean == pytest.approx((1.1 + 0.2) / 2)


def test_latencies_of_a_closed_loop_by_hand():
    rows = [
        (0.0, 1.0, 3.0, 3, True),
        (1.5, 2.5, 5.5, 1, True),  # the request of one token has no TPOT
        (0.0, 0.2, 0.8, 4, True),  # ended before the window
        (4.0, None, None, 0, False),
    ]
    seen = latencies([Run(samples_of(rows), NO_STEPS, (0.9, 6.0))]).figures
    assert (seen["e2e_s"], seen["e2e_p50_s"], seen["ttft_s"], seen["ttft_p90_s"]) == pytest.approx((3.5, 3.5, 1, 1))
    assert seen["tpot_s"] == seen["tpot_p99_s"] == pytest.approx((3 - 1) / 2)
    assert seen["normalized_latency_s"] == pytest.approx((3 / 3 + 4 / 1) / 2)


def test_a_finished_request_without_a_first_token_has_no_ttft():
    seen = latencies([Run(samples_of([(0.0, None, 1.0, 3, True)]), NO_STEPS, (0.0, 5.0))])
    assert (seen.requests, seen.ttft_s.known, seen.ttft_s.mean, seen.tpot_s.mean) == (1, 0, None, None)


def test_planted_latency_is_found():
    seen = latencies([planted_run(8, 1000.0, output_tokens=32)]).figures
    assert [seen[f"e2e_{part}_s"] for part in PARTS] == pytest.approx([0.256] * 4)
    assert [seen[f"{name}_{part}_s"] for name in ("ttft", "tpot") for part in PARTS] == pytest.approx([0.008] * 8)
    assert {name for name, value in seen.items() if value is None} == {"itl_s", *(f"itl_{part}_s" for part in PARTS)}


def test_figures_are_the_fields_of_a_summary():
    assert planted_figures().keys() < {field.name for field in fields(Summary)}


def planted_figures():
    return latencies([planted_run(8, 1000.0)]).figures


def test_both_ways_agree_in_a_steady_state():
    run = Run(queue(rate=10, service_s=0.08, until_s=100), NO_STEPS, (20, 80))
    opened, closed = latencies([run], "sent"), latencies([run])
    assert opened.e2e_s.p99 == pytest.approx(closed.e2e_s.p99) == pytest.approx(0.08)


def test_survivors_look_fast_under_overload():
    """Twice the load that can be served: who ends in the window was sent long before it and waited half as long."""
    run = Run(queue(rate=20, service_s=0.1, until_s=60), NO_STEPS, (20, 40))
    honest, survivors = latencies([run], "sent"), latencies([run])
    assert honest.e2e_s.p50 == pytest.approx(30.1, abs=0.2)
    assert survivors.e2e_s.p50 == pytest.approx(15.1, abs=0.2)


def test_what_is_cut_off_is_slower_than_everything():
    """The run ends 30 s after the window opened: two of three requests of the window have not ended by then."""
    run = Run(queue(rate=20, service_s=0.1, until_s=60, cut_s=50), NO_STEPS, (20, 35))
    seen = latencies([run], "sent")
    assert seen.requests == 300 and seen.unfinished == pytest.approx(200, abs=2)
    assert seen.e2e_s.p50 is None and seen.e2e_s.p99 is None
    untouched = latencies([replace(run, samples=queue(rate=20, service_s=0.1, until_s=60))], "sent")
    assert untouched.e2e_s.p50 is not None


@pytest.mark.parametrize("unknown", [0, 1, 5, 10, 11])
def test_percentiles_below_the_unknown_ones_are_those_of_all(unknown):
    values = [float(v) for v in range(1, 102 - unknown)] + [None] * unknown
    seen = percentiles(values)
    assert seen.known == 101 - unknown
    whole = {0.5: 51.0, 0.9: 91.0, 0.95: 96.0, 0.99: 100.0}
    expected = [value if value <= 101 - unknown else None for value in whole.values()]
    assert [seen.p50, seen.p90, seen.p95, seen.p99] == expected
    assert seen.mean == (51.0 if unknown == 0 else None)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=60))
def test_an_unknown_value_never_makes_a_percentile_smaller(values):
    seen, known = percentiles(values), [v for v in values if v is not None]
    for share, shown in ((0.5, seen.p50), (0.9, seen.p90), (0.95, seen.p95), (0.99, seen.p99)):
        if shown is not None:
            assert shown >= percentile(known, share) - 1e-9 and math.isfinite(shown)
        elif values:
            assert seen.known < len(values)


def test_of_nothing_there_is_nothing():
    seen = latencies([])
    assert (seen.requests, seen.e2e_s.mean, seen.e2e_s.p50, seen.tpot_s.p99) == (0, None, None, None)


# Gaps

GAPS = st.lists(st.floats(1e-4, 100), min_size=1, max_size=200)


def histogram(gaps, growth=1.01, least_s=1e-4) -> GapHistogram:
    counts: dict[int, int] = {}
    for gap in gaps:
        index = math.floor(math.log(gap / least_s) / math.log(growth)) if gap > 0 else -1
        counts[index] = counts.get(index, 0) + 1
    return GapHistogram(growth, least_s, counts, sum(gaps))


@given(GAPS, st.floats(0, 1))
def test_any_percentile_is_known_to_one_per_cent(gaps, share):
    exact = sorted(gaps)[max(1, math.ceil(share * len(gaps))) - 1]
    assert histogram(gaps).percentile(share) == pytest.approx(exact, rel=0.01)


def test_a_coarse_histogram_is_not_so_exact():
    gaps = [0.001 * (1 + n / 100) for n in range(100)]
    exact = sorted(gaps)[98]
    assert histogram(gaps, growth=1.5).percentile(0.99) != pytest.approx(exact, rel=0.01)


def test_gaps_of_nothing_and_gaps_below_the_least():
    nothing = GapHistogram(1.01, 1e-4, {}, 0.0)
    assert (nothing.percentile(0.99), nothing.mean_s) == (None, None)
    merged = histogram([0.0, 0.0, 5e-5, 0.5])
    assert merged.percentile(0.5) == 1e-4, "tokens that came in one chunk"
    assert merged.percentile(1.0) == pytest.approx(0.5, rel=0.01)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_the_mean_gap_is_exact(gaps):
    assert histogram(gaps).mean_s == pytest.approx(sum(gaps) / len(gaps))


def test_a_histogram_is_the_same_after_json():
    facts = {"growth": 1.01, "least_s": 1e-4, "counts": {463: 90, 694: 10}, "sum_s": 1.9}
    seen = gap_histogram(json.loads(json.dumps(facts)))
    assert seen == gap_histogram(facts) and (seen.gaps, seen.mean_s) == (100, 0.019)
    assert [seen.percentile(share) for share in (0.9, 0.95)] == pytest.approx([0.01, 0.1], rel=0.01)
