"""Each rate of a window against an oracle in fractions, over drawn runs with an origin, gaps and ties; what several
engines have in common; steps of a ramp; whether a client kept its schedule. Latencies and goodput are in
`test_latency.py`."""

from dataclasses import astuple, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from statistics import fmean, quantiles, variance

import pytest
from facts import numbers
from hypothesis import given, strategies as st
from strategies import NO_SAMPLES, NO_STEPS, drawn_runs, measurement, planted_run

from pytest_slmserve.analysis.metrics import validity, window
from pytest_slmserve.analysis.metrics.window import delay_of, late_sends, latencies_of, steps_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Failures, Run, Samples, Steps, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, load_facts

GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"3": 7}, "sum_s": 7e-4}
RAMP = OpenLoop(arrivals="ramp", rate=15.0, settle_s=1.0, window_s=7.0, steps=((10.0, 4.0), (20.0, 4.0)))


def rows(run):
    """Time and index of each step that ended in the window."""
    return [(Fraction(at), i) for i, at in enumerate(run.steps.time_s) if run.window_s[0] <= at <= run.window_s[1]]


def column(run, name):
    return [getattr(run.steps, name)[i] for _, i in rows(run)]


def span(run):
    """From the first of these to the last."""
    times = [at for at, _ in rows(run)]
    return times[-1] - times[0] if times else 0


def batch(run):
    took = [at - before for (before, _), (at, _) in pairwise(rows(run))]
    held = sum(tokens * each for tokens, each in zip(column(run, "new_tokens")[1:], took))
    return held / span(run) if span(run) else None


def in_flight(run, begins=None):
    """Seconds that requests spent between the first step and the last, by clipping each life by hand."""
    begins = run.samples.admitted_s if begins is None else begins
    began = [i for i, at in enumerate(begins) if at is not None]
    if not span(run) or not began:
        return None
    opens, closes = rows(run)[0][0], rows(run)[-1][0]
    lives = []
    for i in began:
        ended = Fraction(run.samples.last_token_s[i]) if run.samples.finished[i] else closes
        lives.append(max(0, min(ended, closes) - max(Fraction(begins[i]), opens)))
    return sum(lives) / span(run)


def littles(run):
    """From the beginning of the step that made a request's first token, looked for one by one."""
    begins = []
    for first in run.samples.first_token_s:
        if first is not None:
            before, after = 0, 0
            for began, ended in pairwise(run.steps.time_s):
                if began < first <= ended:
                    before, after = Fraction(began), Fraction(ended)
            first = Fraction(first) - (after - before)
        begins.append(first)
    requests, held = in_flight(run, begins), batch(run)
    return None if requests is None or not held else float(requests / held) - 1


def most_at_once(run):
    """By counting who is there whenever a request comes."""
    (opens, closes), s = run.window_s, run.samples
    lives = [(at, last if done else closes) for at, last, done in zip(s.sent_s, s.last_token_s, s.finished)]
    moments = [opens, *(at for at in s.sent_s if opens <= at < closes)]
    return max(sum(began <= at < ended for began, ended in lives) for at in moments)


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
    inside = column(run, "prompt_tokens")
    return Fraction(len([*filter(None, inside)]), len(inside)) if inside else None


def ended(run):
    opens, closes = run.window_s
    return [i for i, done in enumerate(run.samples.finished) if done and opens <= run.samples.last_token_s[i] <= closes]


@pytest.mark.parametrize(("figure", "oracle"), [
    (window.output_tokens_per_s, lambda run: sum(column(run, "new_tokens")[1:]) / span(run) if span(run) else None),
    (window.mean_batch, batch),
    (window.step_s, lambda run: span(run) / (len(rows(run)) - 1) if span(run) else None),
    (window.requests_in_flight, in_flight),
    (window.prompt_tokens_per_s, prompts_per_s),
    (window.steps_with_prompts, share_with_prompts),
    (window.kv_usage, lambda run: max((each for each in column(run, "kv_usage") if each is not None), default=None)),
    (window.preemptions, lambda run: sum(column(run, "preempted"))),
    (window.finished_in_window, ended),
    (window.littles_law, littles),
], ids=lambda function: function.__name__)  # fmt: skip
@given(run=drawn_runs())
def test_window_figures_match_oracle(figure, oracle, run):
    expected = oracle(run)
    assert figure(run) == (expected if expected is None else pytest.approx(expected, rel=1e-12))


@given(drawn_runs(), st.integers(1, 3))
def test_accepted_drafts_raise_throughput_only(run, further):
    """As if each sequence had made one token alone in steps of the same times."""
    made = run.steps.new_tokens
    accepted = tuple(further * each for each in made)
    tokens = tuple((1 + further) * each for each in made)
    drafting = replace(run, steps=replace(run.steps, new_tokens=tokens, drafts=made, accepted=accepted))
    assert window.mean_batch(drafting) == window.mean_batch(run)
    assert window.littles_law(drafting) == window.littles_law(run)
    rate, plain = window.output_tokens_per_s(drafting), window.output_tokens_per_s(run)
    assert rate is plain is None or rate == pytest.approx((1 + further) * plain)
    any_made = any(column(run, "new_tokens"))
    assert window.acceptance_length(drafting) == (1 + further if any_made else None)
    assert window.acceptance_length(run) is None


@given(drawn_runs(), st.integers(0, 30), st.integers(0, 30))
def test_most_in_flight_matches_counting(run, first, end):
    if run.window_s[0] < run.window_s[1]:
        assert window.most_in_flight(run) == most_at_once(run)
    else:
        assert window.most_in_flight(run) <= len(run.samples)
    inside, expected = rows(run)[first:end], None
    if inside and inside[-1][0] > inside[0][0]:
        expected = sum(run.steps.new_tokens[i] for _, i in inside[1:]) / (inside[-1][0] - inside[0][0])
    assert window.output_tokens_per_s(run, first, end) == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from([1, 1, 2, 9]), st.integers(0, 9)), min_size=14, max_size=40), st.integers())
def test_window_variance_uses_eight_parts(steps, origin):
    gaps, tokens = zip(*steps)
    times = [at / 64 for at in accumulate(gaps, initial=64 * (origin % 4096))][1:]
    n = len(times)
    trace = Steps(times, [None] * n, [0] * n, tokens, [0] * n, [None] * n, [0] * n)
    run = Run(NO_SAMPLES, trace, (times[0], times[-1]))
    expected = variance_by_course(run)
    assert window.relative_variance(run) == (expected and pytest.approx(float(expected), rel=1e-9))
    assert window.relative_variance(planted_run(8, 1000.0)) == 1e-6, "without noise that of the stamps"


@given(drawn_runs(), st.integers(1, 9))
def test_client_spans_replace_server_steps(run, ticks):
    """The same tokens in spans of time are those of steps that end then; requests count from their sending."""
    stream = Stream(ticks / 64, run.window_s[0] - 0.125, tuple(map(float, run.steps.new_tokens)), GAPS)
    ends = [stream.begins_s + stream.bin_s * (i + 1) for i in range(len(stream.tokens))]
    client = replace(run, steps=NO_STEPS, stream=stream)
    server = replace(run, steps=replace(run.steps, time_s=ends))
    sent = replace(server, samples=replace(run.samples, admitted_s=run.samples.sent_s))
    assert window.output_tokens_per_s(client) == window.output_tokens_per_s(server)
    assert window.relative_variance(client) == window.relative_variance(server)
    assert window.mean_batch(client) == window.requests_in_flight(client, "sent_s") == window.requests_in_flight(sent)
    unknown = (window.step_s, window.kv_usage, window.steps_with_prompts, window.preemptions)
    assert [figure(client) for figure in unknown] == [None, None, None, 0]


@pytest.mark.parametrize(("began_s", "windows_s", "ramp_up", "common_s"), [
    ((100.0, 100.5, 99.0), [(2.0, 7.0), (1.0, 6.0), (1.0, 8.5)], "staggered", [(2.0, 6.5), (1.5, 6.0), (3.0, 7.5)]),
    ((0.0, 9.0), [(1.0, 2.0)] * 2, "staggered", [(10.0, 10.0), (1.0, 1.0)]),  # nothing in common
    ((None, 9.0), [(1.0, 2.0)] * 2, "staggered", [(1.0, 2.0)] * 2),  # no common clock
    ((0.0, 0.5), [(1.0, 2.0)] * 2, "burst", [(1.0, 2.0)] * 2),  # convoys are not cut
])  # fmt: skip
def test_engines_share_common_span(began_s, windows_s, ramp_up, common_s):
    runs = (Run(NO_SAMPLES, NO_STEPS, seen, began_s=at) for seen, at in zip(windows_s, began_s))
    group = [replace(measurement(), run=run) for run in runs]
    group[-1] = replace(group[-1], load=ClosedLoop(8, ramp_up=ramp_up))
    assert [run.window_s for run in window.common_span(group)] == common_s


def served(**facts):
    """Each request has a TTFT of 0.1 s in the first step, of 0.3 s in the second, and is sent 1 ms late. facts: of the
    stream."""
    due = [i / 10 for i in range(40)] + [4 + i / 20 for i in range(100)]
    sent = [at + 0.001 for at in due]
    first = [at + (0.1 if at < 4 else 0.3) for at in sent]
    n = len(due)
    samples = Samples(range(n), sent, (None,) * n, first, [at + 0.2 for at in first], (8,) * n, (5,) * n, (True,) * n)
    run = Run(samples, NO_STEPS, (1.0, 8.0), stream=Stream(0.01, 0.0, (), GAPS, scheduled_s=due, **facts))
    return replace(measurement(), load=RAMP, run=run)


def test_ramp_steps_have_own_figures():
    of_steps = ({"counts": {"462": 90}, "sum_s": 0.9}, {"counts": {"602": 180}, "sum_s": 7.2})
    steps = steps_of(served(step_gaps=tuple({**GAPS, **each} for each in of_steps)))
    assert [m.run.window_s for m in steps] == [(1.0, 4.0), (5.0, 8.0)], "when it has settled"
    assert [(m.load.rate, m.load.window_s) for m in steps] == [(10, 3), (20, 3)]
    seen = [latencies_of(m) for m in steps]
    assert [each.requests for each in seen] == [30, 60]
    assert [each.ttft_s.p99 for each in seen] == pytest.approx([0.1, 0.3])
    assert [(each.itl_s.known, each.itl_s.mean) for each in seen] == [(90, 0.01), (180, 0.04)]
    assert [latencies_of(m).itl_s for m in steps_of(served())] == [None, None], "nobody says of which step"
    for delay, rate in zip((delay_of(m.run) for m in steps), (10, 20), strict=True):
        assert (delay.requested_per_s, delay.achieved_per_s) == pytest.approx((rate, rate), rel=0.02)
        assert delay.p99_s == pytest.approx(0.001)
    assert steps_of(steps[0]) == steps_of(replace(steps[0], load=ClosedLoop(4))) == []
    with pytest.raises(BadUsage) as error:
        replace(RAMP, settle_s=4.0)
    assert numbers(error.value.problem) == [4], "a step is longer than it settles"
    assert "steps" not in load_facts(replace(RAMP, steps=())) and load_facts(RAMP)["steps"] == RAMP.steps
    whole, at = served(), (0.0, 6.0, 8.0)
    failed = Failures((0, 1, 2), at, (0.6, 6.1, 8.6), ("timeout",) * 3, at)
    slow, fast = steps_of(replace(whole, run=replace(whole.run, failures=3, failed=failed)))
    assert [m.run.failures for m in (slow, fast)] == [1, 1], "one came after the last step"
    assert list(slow.run.failed.sent_s) == [0.0] and list(fast.run.failed.scheduled_s) == [6.0]
    assert [latencies_of(m).unfinished for m in (slow, fast)] == [0, 1] and 1 in numbers(validity.problems(slow)[0])
    older = replace(whole, run=replace(whole.run, failures=3))
    assert [m.run.failures for m in steps_of(older)] == [3, 3], "it is not known in which"


@given(drawn_runs(), st.data())
def test_send_delays_cover_scheduled_requests(run, data):
    """By hand from all rows: served, failed, and never sent. Whoever does not say when leaves its failures out."""
    late = st.integers(0, 99).map(lambda ticks: ticks / 64)
    sent = [*run.samples.sent_s, *run.failed.sent_s]
    due = [at - data.draw(late) for at in sent]
    n, unsent = len(run.samples), tuple(data.draw(st.lists(late, max_size=3)))
    stream = Stream(0.01, 0.0, (), {}, scheduled_s=tuple(due[:n]), unsent_s=unsent)
    seen = delay_of(replace(run, stream=stream, failed=replace(run.failed, scheduled_s=tuple(due[n:]))))
    opens, closes = run.window_s
    delays = [at - wanted for wanted, at in zip(due, sent) if opens <= wanted < closes]
    missed, seconds = sum(opens <= at < closes for at in unsent), closes - opens
    p99_s = quantiles(delays if len(delays) > 1 else delays * 2, n=100, method="inclusive")[98] if delays else None
    expected = (fmean(delays), p99_s, max(delays)) if delays else (None, None, None)
    assert (seen.unsent, seen.mean_s, seen.p99_s, seen.max_s) == pytest.approx((missed, *expected))
    achieved = sum(opens <= at < closes for at in sent)
    rates = [rate * seconds for rate in (seen.requested_per_s, seen.achieved_per_s)]
    assert rates == pytest.approx([len(delays) + missed, achieved] if seconds else [0, 0])
    older = delay_of(replace(run, stream=stream))
    assert older.unsent == missed and older.requested_per_s <= seen.requested_per_s
    assert delay_of(run) is None and delay_of(replace(run, stream=replace(stream, scheduled_s=None))) is None


def kept(scheduled_s, sent_s):
    """The delays in a window of 100 s of a run that sent requests at these times; None was never sent."""
    sent = {at: came for at, came in zip(scheduled_s, sent_s, strict=True) if came is not None}
    n, unsent = len(sent), tuple(at for at in scheduled_s if at not in sent)
    samples = Samples(range(n), [*sent.values()], *[(None,) * n] * 3, (1,) * n, (2,) * n, (True,) * n)
    stream = Stream(0.01, 0.0, (), {}, scheduled_s=(*sent,), unsent_s=unsent)
    return delay_of(Run(samples, NO_STEPS, (10.0, 110.0), stream=stream))


@given(st.floats(0.0001, 0.2), st.none() | st.floats(0.0001, 2))
def test_small_send_delays_are_harmless(delay, ttft):
    bound, seen = max(0.005, (ttft or 0.0) / 10), kept([20.0, 21.0], [20.0 + delay, 21.0 + delay])
    assert window.harmless_s(ttft) == pytest.approx(bound)
    if abs(delay - bound) > 1e-9:
        told = late_sends(seen, ttft)
        assert (told is None) == (delay < bound)
        assert told is None or {round(delay * 1e3, 1), round(bound * 1e3, 1)} <= set(numbers(told))


def test_rare_late_sends_are_allowed():
    due = [*map(float, range(120))]
    unsent, before = (late_sends(kept(due, [None if at == lost else at for at in due]), 0.015) for lost in (50, 0))
    few, many = (late_sends(kept(due, [at + 0.3 * (at in late) for at in due]), 0.015) for late in ((50,), (50, 51)))
    assert (numbers(unsent), before, few) == ([1], None, None) and 300 in numbers(many)
    nothing = kept([], [])
    assert astuple(nothing) == (0, 0, 0, None, None, None) and late_sends(nothing, 0.015) is None
    stream = Stream(0.01, 0.0, (), {}, waited_s=(0.0, 0.0, 1.0, 3.0))
    told = (stream, None, replace(stream, waited_s=()))
    seen, *none = (window.held_back(Run(NO_SAMPLES, NO_STEPS, (0.0, 1.0), stream=each)) for each in told)
    assert astuple(seen) == pytest.approx((2, 1.0, 1 + 2 * 0.97, 3.0)) and none == [None, None]


@given(drawn_runs(), st.integers(1, 4), st.sampled_from([0, 0.25, 3.0]), st.integers(1, 50))
def test_thinking_users_match_unfinished_conversations(run, turns, think_s, users):
    """Their think times are exponential, so k of them add up to k means and, at most, three standard deviations."""
    m = replace(measurement(), run=run, load=ClosedLoop(users, think_s=think_s))
    m = replace(m, workload=replace(m.workload, spec=replace(m.workload.spec, turns=turns)))
    ends, samples = [at for at, _ in rows(run)], run.samples
    answers = [
        at
        for number, at, done in zip(samples.request, samples.last_token_s, samples.finished)
        if done and at is not None and span(run) and ends[0] <= Fraction(at) <= ends[-1] and number % turns != turns - 1
    ]
    most = (len(answers) + 3 * len(answers) ** 0.5) * think_s / float(span(run)) if span(run) else 0
    assert window.thinking_users(m) == pytest.approx(min(most, users), rel=1e-9)
    assert window.thinking_users(replace(m, load=OpenLoop(requests=3))) == 0
