"""The rule that a client keeps up, tried on clients that stall, drift and drop, and on some that only hiccup."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.metrics.window import ScheduleDelay, delay_of, late_sends
from pytest_slmserve.schema.records import Failures, Run, Samples, Steps, Stream

WINDOW = (10.0, 110.0)
FAST_TTFT_S = 0.015


def schedule_delay(scheduled_s, sent_s) -> ScheduleDelay:
    """The delays of a run that sent requests at these times; None was never sent."""
    sent = {at: came for at, came in zip(scheduled_s, sent_s, strict=True) if came is not None}
    n, unsent = len(sent), [at for at, came in zip(scheduled_s, sent_s, strict=True) if came is None]
    samples = Samples(range(n), [*sent.values()], *[(None,) * n] * 3, (1,) * n, (2,) * n, (True,) * n)
    stream = Stream(0.01, 0.0, (), {}, scheduled_s=(*sent,), unsent_s=(*unsent,))
    return delay_of(Run(samples, Steps(*[()] * 7), WINDOW, stream=stream))


def even(rate: float) -> list[float]:
    return [number / rate for number in range(int(rate * 120))]


def stalled(times, every_s: float, for_s: float) -> list[float]:
    """A client that does nothing for a while at every so many seconds, and then sends all that is due."""
    return [max(time, time - time % every_s + for_s) for time in times]


def test_the_figures():
    seen = schedule_delay([9.9, 10.0, 60.0, 109.9, 110.0], [10.1, 10.002, 60.0, 110.2, 110.0])
    assert (seen.requested_per_s, seen.achieved_per_s) == (3 / 100, 3 / 100)
    assert (seen.mean_s, seen.max_s) == (pytest.approx(0.302 / 3), pytest.approx(0.3))
    assert seen.p99_s == pytest.approx(0.002 + 0.98 * 0.298)
    assert seen.unsent == 0


def test_what_failed_was_sent_too():
    samples = Samples((0, 1), (10.001, 50.0), (None,) * 2, (11.0, 51.0), (12.0, 52.0), (1,) * 2, (2,) * 2, (True,) * 2)
    stream = Stream(0.01, 0.0, (), {}, scheduled_s=(10.0, 50.0))
    run = Run(samples, Steps(*[()] * 7), WINDOW, failures=1, stream=stream)
    assert delay_of(run).requested_per_s == 2 / 100, "an older record does not say when"
    failed = Failures((2,), (60.5,), (61.0,), ("timeout",), (60.0,))
    seen = delay_of(dataclasses.replace(run, failed=failed))
    assert (seen.requested_per_s, seen.achieved_per_s, seen.max_s) == (3 / 100, 3 / 100, 0.5)
    assert delay_of(dataclasses.replace(run, stream=None)) is None


def test_what_a_load_that_was_given_up_did_not_send_was_asked_for():
    samples = Samples((0,), (10.0,), (None,), (11.0,), (12.0,), (1,), (2,), (True,))
    stream = Stream(0.01, 0.0, (), {}, scheduled_s=(10.0,), unsent_s=(20.0, 30.0, 200.0))
    seen = delay_of(Run(samples, Steps(*[()] * 7), WINDOW, failures=0, stream=stream))
    assert (seen.requested_per_s, seen.achieved_per_s, seen.unsent) == (3 / 100, 1 / 100, 2)


@pytest.mark.parametrize("rate", [1, 10, 100, 1000])
def test_a_punctual_client_is_valid_at_every_rate(rate):
    draw = random.Random(1).random
    times = even(rate)
    seen = schedule_delay(times, [time + 0.002 * draw() for time in times])
    assert late_sends(seen, FAST_TTFT_S) is None and late_sends(seen, None) is None
    assert seen.achieved_per_s == pytest.approx(seen.requested_per_s, rel=0.01)


@pytest.mark.parametrize("rate", [1.7, 10, 100, 1000])
def test_a_client_that_stalls_is_caught_at_every_rate(rate):
    times = even(rate)
    seen = schedule_delay(times, stalled(times, every_s=1, for_s=0.1))
    assert "the client lagged" in late_sends(seen, FAST_TTFT_S)


def test_one_hiccup_in_a_hundred_seconds_is_no_lag():
    times = even(100)
    seen = schedule_delay(times, stalled(times, every_s=100, for_s=0.3))
    assert seen.max_s > 0.2
    assert late_sends(seen, FAST_TTFT_S) is None


def test_a_client_that_cannot_reach_the_rate_is_caught():
    times = even(100)
    seen = schedule_delay(times, [time * 1.02 for time in times])
    assert seen.achieved_per_s == pytest.approx(100 / 1.02, rel=0.01)
    assert "98.04 of 100 requests/s" in late_sends(seen, FAST_TTFT_S)


def test_requests_that_were_never_sent_are_caught():
    times = even(10)
    sent = [None if number == 500 else time for number, time in enumerate(times)]
    seen = schedule_delay(times, sent)
    assert (seen.unsent, seen.requested_per_s, seen.achieved_per_s) == (1, 10, 9.99)
    assert late_sends(seen, FAST_TTFT_S) == "the client never sent 1 requests of the window"
    assert late_sends(schedule_delay(times, [None, *times[1:]]), FAST_TTFT_S) is None, "before the window"


def test_where_latencies_are_long_more_delay_is_harmless():
    times = even(10)
    seen = schedule_delay(times, [time + 0.02 for time in times])
    assert "20.0 ms late or more, 5.0 ms are harmless" in late_sends(seen, FAST_TTFT_S)
    assert "20.0 ms late or more, 15.0 ms are harmless" in late_sends(seen, 0.15)
    assert late_sends(seen, 0.25) is None
    assert late_sends(seen, None) is not None, "nothing is known of the latencies"


def test_a_low_rate_is_no_excuse():
    """A tenth of the gap would be 100 ms here, several times the latency that is measured."""
    times = even(1)
    seen = schedule_delay(times, [time + 0.05 for time in times])
    assert late_sends(seen, FAST_TTFT_S) is not None


def test_of_nothing_there_is_no_delay():
    seen = schedule_delay([], [])
    assert (seen.requested_per_s, seen.mean_s, seen.p99_s, seen.max_s) == (0, None, None, None)
    assert late_sends(seen, FAST_TTFT_S) is None


@given(st.floats(0.0001, 0.2), st.floats(0.0001, 2))
def test_the_bound_is_five_milliseconds_or_a_tenth_of_the_ttft(delay, ttft):
    times = even(2)
    seen = schedule_delay(times, [time + delay for time in times])
    if abs(delay - max(0.005, ttft / 10)) > 1e-9:
        assert (late_sends(seen, ttft) is None) == (delay < max(0.005, ttft / 10))
