"""Each rate of a window against an oracle in fractions, over drawn runs with an origin, gaps and ties; who counts for a
latency; steps of a ramp; whether a client kept its schedule. Latencies and goodput are in `test_latency.py`."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from fractions import Fraction
from itertools import pairwise
from statistics import variance

import pytest
from facts import numbers
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawn_runs, measurement, planted_run

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import delay_of, held_back, late_sends, latencies_of, steps_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Failures, Run, Samples, Steps, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, load_facts

NO_STEPS = Steps(*[()] * 7)
NO_SAMPLES = Samples(*[()] * 8)
GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"3": 7}, "sum_s": 7e-4}

# An oracle for each figure


def rows(run):
    """Time and index of each step that ended in the window."""
    return [(Fraction(at), i) for i, at in enumerate(run.steps.time_s) if run.window_s[0] <= at <= run.window_s[1]]


def span(run):
    """From the first of these to the last."""
    times = [at for at, _ in rows(run)]
    return times[-1] - times[0] if times else 0


def weighted(run):
    """Tokens of each step but the first, and how long it took."""
    inside = rows(run)
    return [(run.steps.new_tokens[i], at - before) for (before, _), (at, i) in pairwise(inside)]


def tokens_per_s(run):
    return sum(tokens for tokens, _ in weighted(run)) / span(run) if span(run) else None


def batch(run):
    return sum(tokens * took for tokens, took in weighted(run)) / span(run) if span(run) else None


def step_s(run):
    return span(run) / (len(rows(run)) - 1) if span(run) else None


def in_flight(run):
    """Seconds that requests spent between the first step and the last, by clipping each life by hand."""
    admitted = [i for i, at in enumerate(run.samples.admitted_s) if at is not None]
    if not span(run) or not admitted:
        return None
    opens, closes = rows(run)[0][0], rows(run)[-1][0]
    lives = []
    for i in admitted:
        ended = Fraction(run.samples.last_token_s[i]) if run.samples.finished[i] else closes
        lives.append(max(0, min(ended, closes) - max(Fraction(run.samples.admitted_s[i]), opens)))
    return sum(lives) / span(run)


def most_at_once(run):
    """By counting who is there whenever a request comes."""
    (opens, closes), s = run.window_s, run.samples
    lives = [(at, last if done else closes) for at, last, done in zip(s.sent_s, s.last_token_s, s.finished)]
    moments = [opens, *(at for at in s.sent_s if opens <= at < closes)]
    return max(sum(began <= at < ended for began, ended in lives) for at in moments) if opens < closes else None


def variance_by_course(run):
    """Of eight parts of the window, from what had been made by each boundary if each step makes its tokens evenly."""
    inside, whole = rows(run), span(run)
    if len(inside) < 16 or not whole:
        return None
    ends = [inside[0][0] + whole * i / 8 for i in range(9)]
    made = [
        sum(run.steps.new_tokens[i] * min(Fraction(1), max(Fraction(0), (end - before) / (at - before)))
            for (before, _), (at, i) in pairwise(inside))
        for end in ends
    ]  # fmt: skip
    parts = [after - before for before, after in pairwise(made)]
    return max(Fraction(1e-6), variance(parts) / (sum(parts) / 8) ** 2 / 8) if min(parts) else None


def prompts_per_s(run):
    opens, closes = run.window_s
    known = zip(run.samples.prompt_tokens, run.samples.first_token_s)
    counted = sum(tokens for tokens, first in known if first is not None and opens <= first <= closes)
    return counted / (Fraction(closes) - Fraction(opens)) if closes > opens else None


def share_with_prompts(run):
    inside = [run.steps.prompt_tokens[i] for _, i in rows(run)]
    return Fraction(len([tokens for tokens in inside if tokens]), len(inside)) if inside else None


def largest_usage(run):
    known = sorted(run.steps.kv_usage[i] for _, i in rows(run) if run.steps.kv_usage[i] is not None)
    return known[-1] if known else None


def ended(run):
    opens, closes = run.window_s
    return [i for i, done in enumerate(run.samples.finished) if done and opens <= run.samples.last_token_s[i] <= closes]


ORACLES = [
    (window.output_tokens_per_s, tokens_per_s),
    (window.mean_batch, batch),
    (window.step_s, step_s),
    (window.requests_in_flight, in_flight),
    (window.prompt_tokens_per_s, prompts_per_s),
    (window.steps_with_prompts, share_with_prompts),
    (window.kv_usage, largest_usage),
    (window.preemptions, lambda run: sum(run.steps.preempted[i] for _, i in rows(run))),
    (window.finished_in_window, ended),
]


@pytest.mark.parametrize(("figure", "oracle"), ORACLES, ids=lambda function: function.__name__)
@given(run=drawn_runs())
def test_each_figure_of_any_run_is_that_of_its_oracle(figure, oracle, run):
    found, expected = figure(run), oracle(run)
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected, rel=1e-12)


@given(drawn_runs())
def test_littles_law_compares_requests_with_the_batch(run):
    requests, held = in_flight(run), batch(run)
    expected = None if requests is None or not held else float(requests / held) - 1
    assert window.littles_law(run) == (expected if expected is None else pytest.approx(expected, abs=1e-12))


@given(drawn_runs())
def test_the_most_in_flight_are_found_by_counting_at_each_sending(run):
    if run.window_s[0] < run.window_s[1]:
        assert window.most_in_flight(run) == most_at_once(run)
    else:
        assert window.most_in_flight(run) <= len(run.samples)


@given(st.lists(st.tuples(st.sampled_from([1, 1, 2, 9]), st.integers(0, 9)), min_size=14, max_size=40), st.integers())
def test_the_variance_of_a_window_is_that_of_its_eight_parts(steps, origin):
    clock, times = Fraction(origin % 4096), []
    for gap, _ in steps:
        clock += Fraction(gap, 64)
        times.append(float(clock))
    n, tokens = len(steps), [made for _, made in steps]
    trace = Steps(times, [None] * n, [0] * n, tokens, [0] * n, [None] * n, [0] * n)
    run = Run(NO_SAMPLES, trace, (times[0], times[-1]))
    found, expected = window.relative_variance(run), variance_by_course(run)
    assert found == (expected if expected is None else pytest.approx(float(expected), rel=1e-9))


def test_a_window_without_noise_has_the_variance_of_its_stamps():
    assert window.relative_variance(planted_run(8, 1000.0)) == 1e-6
    assert window.relative_variance(planted_run(8, 1000.0, steps=14)) is None, "15 steps, two parts need two each"
    assert window.relative_variance(planted_run(8, 1000.0, steps=15)) == 1e-6


@given(drawn_runs(), st.integers(0, 30), st.integers(0, 30))
def test_a_rate_of_some_steps_is_that_of_a_window_which_holds_them(run, first, end):
    inside = rows(run)[first:end]
    times = [at for at, _ in inside]
    expected = None
    if inside and times[-1] > times[0]:
        expected = sum(run.steps.new_tokens[i] for _, i in inside[1:]) / (times[-1] - times[0])
    assert window.output_tokens_per_s(run, first, end) == (expected and pytest.approx(expected))


@given(drawn_runs(), st.integers(1, 9))
def test_a_server_without_steps_is_told_by_the_spans_of_its_client(run, ticks):
    """The same tokens in spans of time are those of steps that end then; requests count from their sending."""
    stream = Stream(ticks / 64, run.window_s[0] - 0.125, tuple(map(float, run.steps.new_tokens)), GAPS)
    ends = [stream.begins_s + stream.bin_s * (i + 1) for i in range(len(stream.tokens))]
    client = replace(run, steps=NO_STEPS, stream=stream)
    server = replace(run, steps=replace(run.steps, time_s=ends))
    sent = replace(server, samples=replace(run.samples, admitted_s=run.samples.sent_s))
    assert window.output_tokens_per_s(client) == window.output_tokens_per_s(server)
    assert window.relative_variance(client) == window.relative_variance(server)
    assert window.mean_batch(client) == window.requests_in_flight(client, "sent_s") == window.requests_in_flight(sent)
    told = window.step_s(client), window.kv_usage(client), window.steps_with_prompts(client)
    assert told == (None, None, None) and window.preemptions(client) == 0


@given(st.integers(1, 60), st.floats(10, 1e5), st.integers(2, 40), st.integers(12, 80), st.integers(0, 8))
def test_a_planted_loop_is_found_and_obeys_littles_law(concurrency, rate, output_tokens, steps, idle):
    run = planted_run(concurrency, rate, output_tokens=output_tokens, steps=steps)
    found = window.output_tokens_per_s(run), window.mean_batch(run), window.step_s(run)
    assert found == pytest.approx((rate, concurrency, concurrency / rate))
    paused = planted_run(concurrency, rate, output_tokens=output_tokens, steps=steps, idle_steps=idle)
    assert window.littles_law(paused) == pytest.approx(0, abs=1e-6)


# Several engines at once


def began(began_s, window_s):
    return replace(measurement(), run=Run(NO_SAMPLES, NO_STEPS, window_s, began_s=began_s))


def test_the_span_of_several_engines_is_what_their_windows_have_in_common():
    runs = window.common_span([began(100.0, (2.0, 7.0)), began(100.5, (1.0, 6.0)), began(99.0, (1.0, 8.5))])
    assert [run.window_s for run in runs] == [(2.0, 6.5), (1.5, 6.0), (3.0, 7.5)]
    first, second = (run.window_s for run in window.common_span([began(0.0, (1.0, 2.0)), began(9.0, (1.0, 2.0))]))
    assert first[0] == first[1] == 10 and second[0] == second[1] == 1, "they have nothing in common"


def test_windows_without_a_common_clock_or_of_convoys_are_not_cut():
    convoy = replace(began(0.5, (1.0, 2.0)), load=ClosedLoop(8, ramp_up="burst"))
    for group in ([began(None, (1.0, 2.0)), began(9.0, (1.0, 2.0))], [began(0.0, (1.0, 2.0)), convoy]):
        assert [run.window_s for run in window.common_span(group)] == [(1.0, 2.0)] * 2


# Steps of a ramp

RAMP = OpenLoop(arrivals="ramp", rate=15.0, settle_s=1.0, window_s=7.0, steps=((10.0, 4.0), (20.0, 4.0)))


def served(ramp):
    """Each request has a TTFT of 0.1 s in the first step, of 0.3 s in the second, and is sent 1 ms late."""
    due = [i / 10 for i in range(40)] + [4 + i / 20 for i in range(100)]
    sent = [at + 0.001 for at in due]
    first = [at + (0.1 if at < 4 else 0.3) for at in sent]
    n = len(due)
    samples = Samples(range(n), sent, (None,) * n, first, [at + 0.2 for at in first], (8,) * n, (5,) * n, (True,) * n)
    run = Run(samples, NO_STEPS, (1.0, 8.0), stream=Stream(0.01, 0.0, (), GAPS, scheduled_s=due))
    return replace(measurement(), load=ramp, run=run)


def test_each_step_of_a_ramp_has_its_own_figures():
    slow, fast = steps_of(served(RAMP))
    assert [m.run.window_s for m in (slow, fast)] == [(1.0, 4.0), (5.0, 8.0)], "when it has settled"
    assert [(m.load.rate, m.load.window_s) for m in (slow, fast)] == [(10, 3), (20, 3)]
    assert [latencies_of(m).requests for m in (slow, fast)] == [30, 60]
    assert [latencies_of(m).ttft_s.p99 for m in (slow, fast)] == pytest.approx([0.1, 0.3])
    for delay, rate in ((delay_of(slow.run), 10), (delay_of(fast.run), 20)):
        assert (delay.requested_per_s, delay.achieved_per_s) == pytest.approx((rate, rate), rel=0.02)
        assert delay.p99_s == pytest.approx(0.001)
    assert steps_of(slow) == [], "a step is no ramp"


def test_a_step_has_the_gaps_of_its_own_window_or_none():
    whole = served(RAMP)
    of_steps = ({"counts": {"462": 90}, "sum_s": 0.9}, {"counts": {"602": 180}, "sum_s": 7.2})
    stream = replace(whole.run.stream, step_gaps=tuple({**GAPS, **each} for each in of_steps))
    slow, fast = (latencies_of(m).itl_s for m in steps_of(replace(whole, run=replace(whole.run, stream=stream))))
    assert (slow.known, slow.mean, fast.known, fast.mean) == (90, 0.01, 180, 0.04)
    assert [latencies_of(step).itl_s for step in steps_of(whole)] == [None, None], "nobody says of which step"


def test_a_failure_is_of_its_step_settling_included():
    whole = served(RAMP)
    at = (0.0, 6.0, 8.0)
    failed = Failures((0, 1, 2), at, (0.6, 6.1, 8.6), ("timeout",) * 3, at)
    slow, fast = steps_of(replace(whole, run=replace(whole.run, failures=3, failed=failed)))
    assert [m.run.failures for m in (slow, fast)] == [1, 1], "one came after the last step"
    assert list(slow.run.failed.sent_s) == [0.0] and list(fast.run.failed.scheduled_s) == [6.0]
    assert [latencies_of(m).unfinished for m in (slow, fast)] == [0, 1]
    assert 1 in numbers(problems(slow)[0])
    older = replace(whole, run=replace(whole.run, failures=3))
    assert [m.run.failures for m in steps_of(older)] == [3, 3], "it is not known in which"


@pytest.mark.parametrize("load", [ClosedLoop(4), OpenLoop(arrivals="gamma", rate=15.0, settle_s=1.0, window_s=7.0)])
def test_other_loads_have_no_steps(load):
    assert steps_of(replace(measurement(), load=load)) == []


def test_a_step_is_longer_than_it_settles_and_part_of_the_key():
    with pytest.raises(BadUsage) as error:
        replace(RAMP, settle_s=4.0)
    assert numbers(error.value.problem) == [4]
    assert "steps" not in load_facts(replace(RAMP, steps=())) and load_facts(RAMP)["steps"] == RAMP.steps


# Schedules, and requests that are held back

FAST_TTFT_S = 0.015


def kept(scheduled_s, sent_s, opens=10.0, closes=110.0):
    """The delays of a run that sent requests at these times; None was never sent."""
    sent = {at: came for at, came in zip(scheduled_s, sent_s, strict=True) if came is not None}
    n, unsent = len(sent), [at for at, came in zip(scheduled_s, sent_s, strict=True) if came is None]
    samples = Samples(range(n), [*sent.values()], *[(None,) * n] * 3, (1,) * n, (2,) * n, (True,) * n)
    stream = Stream(0.01, 0.0, (), {}, scheduled_s=(*sent,), unsent_s=(*unsent,))
    return delay_of(Run(samples, NO_STEPS, (opens, closes), stream=stream))


def even(rate):
    return [number / rate for number in range(int(rate * 120))]


@given(drawn_runs(), st.data())
def test_rates_and_delays_are_of_the_scheduled_requests_whatever_became_of_them(run, data):
    """By hand from all rows: served, failed, and never sent. Whoever does not say when leaves its failures out."""
    late = st.integers(0, 99).map(lambda ticks: ticks / 64)
    sent = [*run.samples.sent_s, *run.failed.sent_s]
    due = [at - data.draw(late) for at in sent]
    n, unsent = len(run.samples), tuple(data.draw(st.lists(late, max_size=3)))
    stream = Stream(0.01, 0.0, (), {}, scheduled_s=tuple(due[:n]), unsent_s=unsent)
    seen = delay_of(replace(run, stream=stream, failed=replace(run.failed, scheduled_s=tuple(due[n:]))))
    opens, closes = run.window_s
    delays = sorted(at - wanted for wanted, at in zip(due, sent) if opens <= wanted < closes)
    missed, seconds = sum(opens <= at < closes for at in unsent), closes - opens
    assert seen.unsent == missed and seen.max_s == (delays[-1] if delays else None)
    assert seen.requested_per_s * seconds == pytest.approx(len(delays) + missed)
    assert seen.achieved_per_s * seconds == pytest.approx(sum(opens <= at < closes for at in sent))
    assert seen.mean_s == (pytest.approx(sum(delays) / len(delays)) if delays else None)
    older = delay_of(replace(run, stream=stream))
    assert older.unsent == missed and older.requested_per_s <= seen.requested_per_s
    assert delay_of(run) is None and delay_of(replace(run, stream=replace(stream, scheduled_s=None))) is None


def test_the_99th_percentile_of_a_delay_is_interpolated():
    seen = kept([9.9, 10.0, 60.0, 109.9, 110.0], [10.1, 10.002, 60.0, 110.2, 110.0])
    assert (seen.requested_per_s, seen.achieved_per_s, seen.unsent) == (3 / 100, 3 / 100, 0)
    assert seen.p99_s == pytest.approx(0.002 + 0.98 * 0.298)


@pytest.mark.parametrize("rate", [1.7, 10, 100])
def test_a_punctual_client_keeps_up_at_every_rate_and_one_that_stalls_does_not(rate):
    draw, times = random.Random(1).random, even(rate)
    seen = kept(times, [time + 0.002 * draw() for time in times])
    assert late_sends(seen, FAST_TTFT_S) is None and late_sends(seen, None) is None
    assert seen.achieved_per_s == pytest.approx(seen.requested_per_s, rel=0.01)
    stalled = kept(times, [max(time, time - time % 1 + 0.1) for time in times])  # for 0.1 s of each second
    assert late_sends(stalled, FAST_TTFT_S)


def test_one_hiccup_in_a_hundred_seconds_is_no_lag():
    times = even(100)
    seen = kept(times, [max(time, time - time % 100 + 0.3) for time in times])
    assert seen.max_s > 0.2 and late_sends(seen, FAST_TTFT_S) is None


def test_a_client_that_cannot_reach_the_rate_is_told_with_both_rates():
    times = even(100)
    seen = kept(times, [time * 1.02 for time in times])
    assert seen.achieved_per_s == pytest.approx(100 / 1.02, rel=0.01)
    assert {98.04, 100} <= set(numbers(late_sends(seen, FAST_TTFT_S)))


def test_a_request_that_was_never_sent_is_lateness_only_in_the_window():
    times = even(10)
    seen = kept(times, [None if number == 500 else time for number, time in enumerate(times)])
    assert (seen.unsent, seen.requested_per_s, seen.achieved_per_s) == (1, 10, 9.99)
    assert numbers(late_sends(seen, FAST_TTFT_S)) == [1]
    assert late_sends(kept(times, [None, *times[1:]]), FAST_TTFT_S) is None


@given(st.floats(0.0001, 0.2), st.floats(0.0001, 2))
def test_five_milliseconds_or_a_tenth_of_the_ttft_are_harmless(delay, ttft):
    seen = kept([20.0, 21.0], [20.0 + delay, 21.0 + delay])
    bound = max(0.005, ttft / 10)
    if abs(delay - bound) > 1e-9:
        told = late_sends(seen, ttft)
        assert (told is None) == (delay < bound)
        assert told is None or {round(delay * 1e3, 1), round(bound * 1e3, 1)} <= set(numbers(told))


def test_without_a_ttft_five_milliseconds_are_harmless_and_nothing_is_never_late():
    assert [window.harmless_s(ttft_s) for ttft_s in (None, 0.04, 0.25)] == [0.005, 0.005, 0.025]
    late = [kept([20.0], [20.0 + delay]) for delay in (0.004, 0.006)]
    assert [bool(late_sends(seen, None)) for seen in late] == [False, True]
    nothing = kept([], [])
    assert [getattr(nothing, f.name) for f in fields(nothing)] == [0, 0, 0, None, None, None]
    assert late_sends(nothing, FAST_TTFT_S) is None


def test_waiting_for_a_turn_is_told_over_all_requests():
    stream = Stream(0.01, 0.0, (), {}, waited_s=(0.0, 0.0, 1.0, 3.0))
    seen = held_back(Run(NO_SAMPLES, NO_STEPS, (0.0, 1.0), stream=stream))
    assert (seen.requests, seen.mean_s, seen.max_s) == (2, 1.0, 3.0)
    assert seen.p99_s == pytest.approx(1 + 2 * 0.97)
    for none in (None, replace(stream, waited_s=())):
        assert held_back(Run(NO_SAMPLES, NO_STEPS, (0.0, 1.0), stream=none)) is None
