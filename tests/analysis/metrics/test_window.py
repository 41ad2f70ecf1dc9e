from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import planted_run

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.schema.records import Run, Samples, Steps


def run_of(steps: list[tuple[float, int]], window_s: tuple[float, float], rows: list[tuple] = ()) -> Run:
    """steps: (time, new tokens). rows: sent, admitted, first token, last token, output tokens, finished."""
    n = len(steps)
    sent, admitted, first, last, tokens, finished = zip(*rows) if rows else ((),) * 6
    return Run(
        Samples(tuple(range(len(rows))), sent, admitted, first, last, (1,) * len(rows), tokens, finished),
        Steps([t for t, _ in steps], [None] * n, [0] * n, [k for _, k in steps], [0] * n, [None] * n, [0] * n),
        window_s,
    )


HAND = run_of(
    [(0.5, 9), (1.0, 9), (2.0, 4), (4.0, 2), (5.0, 6), (9.0, 9)],
    (0.9, 6.0),
    [
        (0.0, 0.5, 1.0, 3.0, 3, True),
        (1.5, 2.0, 2.5, 5.5, 1, True),
        (0.0, 0.0, 0.2, 0.8, 4, True),
        (4.0, 4.5, None, None, 0, False),
        (5.0, None, None, None, 0, False),
    ],
)


def test_throughput_counts_the_tokens_after_the_first_boundary():
    assert window.output_tokens_per_s(HAND) == (4 + 2 + 6) / 4.0


def test_step_time_and_span():
    assert window.span_s(HAND) == (1.0, 5.0)
    assert window.step_s(HAND) == pytest.approx(4 / 3)


def test_batch_is_weighted_by_time():
    assert window.mean_batch(HAND) == pytest.approx((4 * 1 + 2 * 2 + 6 * 1) / 4)


def test_requests_in_flight_are_cut_to_the_span():
    # 1.0-3.0, 2.0-5.0 and the unfinished 4.5-5.0
    assert window.requests_in_flight(HAND) == pytest.approx((2 + 3 + 0.5) / 4)


@pytest.mark.parametrize("steps", [[], [(1.0, 5)], [(1.0, 5), (1.0, 5)]])
def test_below_two_boundaries_there_is_nothing_to_say(steps):
    run = run_of(steps, (0.0, 2.0), [(0.0, 0.0, 0.5, 1.0, 3, True)])
    assert window.output_tokens_per_s(run) is None
    assert window.mean_batch(run) is None and window.requests_in_flight(run) is None
    assert window.littles_law(run) is None and window.span_s(run) is None and window.kv_usage(run) is None


def test_step_time_needs_two_steps():
    assert window.step_s(run_of([(1.0, 5)], (0.0, 2.0))) is None


def test_unknown_is_not_zero():
    never = replace(HAND, samples=replace(HAND.samples, admitted_s=(None,) * 5))
    assert window.requests_in_flight(never) is None and window.littles_law(never) is None


@given(st.integers(1, 60), st.floats(10, 1e5), st.integers(2, 40), st.integers(5, 80))
def test_planted_throughput_and_batch_are_found(concurrency, rate, output_tokens, steps):
    run = planted_run(concurrency, rate, output_tokens=output_tokens, steps=steps)
    assert window.output_tokens_per_s(run) == pytest.approx(rate)
    assert window.mean_batch(run) == pytest.approx(concurrency)
    assert window.step_s(run) == pytest.approx(concurrency / rate)


@given(st.integers(1, 60), st.integers(2, 40), st.integers(12, 80), st.integers(0, 8))
def test_littles_law_is_an_identity_of_an_honest_run(concurrency, output_tokens, steps, idle):
    law = window.littles_law(planted_run(concurrency, 1e3, output_tokens=output_tokens, steps=steps, idle_steps=idle))
    assert law.deviation == pytest.approx(0, abs=1e-6)


def test_preemptions_and_kv_of_the_window_only():
    run = planted_run(8, 1000.0, preempted=3)
    assert window.preemptions(run) == 3 and window.kv_usage(run) == 0.5
    assert window.preemptions(replace(run, window_s=(0.0, run.window_s[0]))) == 0
