from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import measurement, planted_run

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import delay_of, latencies_of, steps_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Failures, Run, Samples, Steps, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, load_facts


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
    trace = window.window_trace(HAND)
    assert (trace.ends_s[0], trace.ends_s[-1], trace.seconds) == (1.0, 5.0, 4.0)
    assert window.step_s(HAND) == pytest.approx(4 / 3)


def test_batch_is_weighted_by_time():
    assert window.mean_batch(HAND) == pytest.approx((4 * 1 + 2 * 2 + 6 * 1) / 4)


def test_requests_in_flight_are_cut_to_the_span():
    # 1.0-3.0, 2.0-5.0 and the unfinished 4.5-5.0
    assert window.requests_in_flight(HAND) == pytest.approx((2 + 3 + 0.5) / 4)


def test_the_most_in_flight_are_counted_within_the_window():
    assert window.most_in_flight(HAND) == 3, "from 5.0 to 5.5: the second and the two unfinished"
    in_turn = run_of([], (0.0, 2.0), [(0.0, 0.0, 0.5, 1.0, 1, True), (1.0, 1.0, 1.5, 2.0, 1, True)])
    assert window.most_in_flight(in_turn) == 1, "one ends as the other is sent"
    assert window.most_in_flight(run_of([], (0.0, 2.0))) == 0


@pytest.mark.parametrize("steps", [[], [(1.0, 5)], [(1.0, 5), (1.0, 5)]])
def test_below_two_boundaries_there_is_nothing_to_say(steps):
    run = run_of(steps, (0.0, 2.0), [(0.0, 0.0, 0.5, 1.0, 3, True)])
    assert window.output_tokens_per_s(run) is None
    assert window.mean_batch(run) is None and window.requests_in_flight(run) is None
    assert window.littles_law(run) is None and not window.window_trace(run).seconds and window.kv_usage(run) is None


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
    assert law == pytest.approx(0, abs=1e-6)


def test_preemptions_and_kv_of_the_window_only():
    run = planted_run(8, 1000.0, preempted=3)
    assert window.preemptions(run) == 3 and window.kv_usage(run) == 0.5
    assert window.preemptions(replace(run, window_s=(0.0, run.window_s[0]))) == 0


RAMP = OpenLoop(arrivals="ramp", rate=15.0, settle_s=1.0, window_s=7.0, steps=((10.0, 4.0), (20.0, 4.0)))
NO_STEPS = Steps((), (), (), (), (), (), ())


def served(ramp: OpenLoop):
    """Each request has a TTFT of 0.1 s in the first step, of 0.3 s in the second, and is sent 1 ms late."""
    due = [i / 10 for i in range(40)] + [4 + i / 20 for i in range(100)]
    sent = [at + 0.001 for at in due]
    first = [at + (0.1 if at < 4 else 0.3) for at in sent]
    last = [at + 0.2 for at in first]
    n = len(due)
    samples = Samples(tuple(range(n)), sent, (None,) * n, first, last, (8,) * n, (5,) * n, (True,) * n)
    bins = [5 * sum(0.01 * i <= at < 0.01 * (i + 1) for at in last) for i in range(1000)]
    gaps = {"growth": 1.01, "least_s": 1e-4, "counts": {"3": 7}, "sum_s": 7e-4}
    run = Run(samples, NO_STEPS, (1.0, 8.0), stream=Stream(0.01, 0.0, bins, gaps, scheduled_s=due))
    return replace(measurement(), load=ramp, run=run)


def test_a_step_is_judged_when_it_has_settled():
    assert RAMP.step_windows_s == [(1.0, 4.0), (5.0, 8.0)]


def test_each_step_has_its_own_figures():
    slow, fast = steps_of(served(RAMP))
    assert [latencies_of(m).requests for m in (slow, fast)] == [30, 60]
    assert [latencies_of(m).ttft_s.p99 for m in (slow, fast)] == pytest.approx([0.1, 0.3])
    assert [m.load.rate for m in (slow, fast)] == [10, 20]
    for step, rate in ((slow, 10), (fast, 20)):
        delay = delay_of(step.run)
        assert (delay.requested_per_s, delay.achieved_per_s) == pytest.approx((rate, rate), rel=0.02)
        assert delay.p99_s == pytest.approx(0.001)


def test_a_step_is_no_ramp():
    step = steps_of(served(RAMP))[0]
    assert steps_of(step) == [] and step.load.window_s == 3.0


def test_a_step_has_the_gaps_of_its_own_window():
    whole = served(RAMP)
    of_steps = ({"counts": {"462": 90}, "sum_s": 0.9}, {"counts": {"602": 180}, "sum_s": 7.2})
    stream = replace(whole.run.stream, step_gaps=tuple({**whole.run.stream.gaps, **each} for each in of_steps))
    slow, fast = (latencies_of(m).itl_s for m in steps_of(replace(whole, run=replace(whole.run, stream=stream))))
    assert (slow.known, slow.mean, fast.known, fast.mean) == (90, 0.01, 180, 0.04)
    assert [slow.p50, slow.p90, slow.p95, slow.p99] == pytest.approx([0.01] * 4, rel=0.01)
    assert [fast.p50, fast.p90, fast.p95, fast.p99] == pytest.approx([0.04] * 4, rel=0.01)


def test_a_record_without_gaps_of_steps_does_not_say_which_step_a_gap_was_of():
    assert [latencies_of(step).itl_s for step in steps_of(served(RAMP))] == [None, None]


def test_a_failure_is_of_its_step_settling_included():
    whole = served(RAMP)
    failed = Failures((0, 1, 2), (0.5, 6.0, 8.5), (0.6, 6.1, 8.6), ("timeout",) * 3, (0.5, 6.0, 8.5))
    slow, fast = steps_of(replace(whole, run=replace(whole.run, failures=3, failed=failed)))
    assert (slow.run.failures, list(slow.run.failed.sent_s)) == (1, [0.5])
    assert (fast.run.failures, list(fast.run.failed.scheduled_s)) == (1, [6.0]), "one came after the last step"
    assert latencies_of(slow).unfinished == 0 and latencies_of(fast).unfinished == 1
    assert problems(slow)[0].startswith("1 requests failed")
    older = replace(whole, run=replace(whole.run, failures=3))
    assert [m.run.failures for m in steps_of(older)] == [3, 3], "it is not known in which"


@pytest.mark.parametrize("load", [ClosedLoop(4), OpenLoop(arrivals="gamma", rate=15.0, settle_s=1.0, window_s=7.0)])
def test_other_loads_have_no_steps(load):
    assert steps_of(replace(measurement(), load=load)) == []


def test_a_step_must_be_longer_than_it_settles():
    with pytest.raises(BadUsage, match="a step that is over before it has settled for 4 s"):
        replace(RAMP, settle_s=4.0)


def test_a_load_without_steps_has_the_key_that_it_always_had():
    assert "steps" not in load_facts(replace(RAMP, steps=()))
    assert load_facts(RAMP)["steps"] == RAMP.steps
