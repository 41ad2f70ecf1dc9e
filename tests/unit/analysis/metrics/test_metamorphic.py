"""What becomes of all figures of a window when its record is changed in a way that is understood: all times shifted or
scaled, requests permuted or divided among clients, a step's tokens doubled, GPUs in another order or twice. Each figure
must stay, or follow as stated."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import NO_STEPS, TICK_S, drawn_readings, drawn_runs, measurement

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.gpu_figures import decode_window, device_figures
from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.analysis.metrics.window import Slo
from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Samples, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"300": 5, "310": 2}, "sum_s": 0.5}
SECONDS = (of.ENERGY, of.CAPPED_POWER)  # counters that grow with time
LOADS = st.sampled_from([ClosedLoop(8), OpenLoop(arrivals="gamma", rate=9.0, window_s=2.0)])


def with_run(m, **values):
    return replace(m, run=replace(m.run, **values))


def mapped(table, columns, change):
    """A table of a record with these columns changed."""
    return replace(table, **{name: change(getattr(table, name)) for name in columns})


def picked(table, rows):
    """These rows of a table; a column that nobody has stays empty."""
    return mapped(table, [f.name for f in fields(table)], lambda column: tuple(column[i] for i in rows if column))


@st.composite
def watched(draw, gpus=0):
    """A measurement of any run, with a client's schedule and the readings of any sensors. gpus: 0 for one without
    columns of its own."""
    run = draw(drawn_runs())
    due = tuple(at - draw(st.integers(0, 9)) * TICK_S for at in run.samples.sent_s)
    stream = Stream(0.01, 0.0, (), GAPS, scheduled_s=due, unsent_s=run.window_s[:1], waited_s=(0.0, 0.25))
    return with_run(
        replace(measurement(load=draw(LOADS)), run=run),
        samples=replace(run.samples, cached_tokens=[None if i % 3 else i for i in range(len(due))]),
        telemetry=draw(drawn_readings(run.window_s[0], gpus)),
        stream=stream,
        failed=replace(run.failed, scheduled_s=run.failed.sent_s),
    )


def figures(m):
    """All numbers that are known of a window, by name."""
    run, goodput = m.run, window.goodput_of(Slo(ttft_s=0.25, e2e_s=1.0), (m,))
    judged, decoding, cached = window.judged_requests(m), decode_window(run), cache_hit_share(run)
    return {
        **{f.name: getattr(summarize(m), f.name) for f in fields(summarize(m))},
        **{f"device {name}": value for name, value in asdict(device_figures(run)).items()},
        **{f"delay {name}": value for name, value in asdict(window.delay_of(run)).items()},
        "variance": window.relative_variance(run),
        "prompt_tokens_per_s": window.prompt_tokens_per_s(run),
        "with prompts": window.steps_with_prompts(run),
        "most": window.most_in_flight(run),
        "preemptions": window.preemptions(run),
        "judged": (len(judged.rows), judged.prompt_tokens, judged.output_tokens, judged.failures),
        "good": (goodput.requests, goodput.good, goodput.dropped, *goodput.by_slo.values()),
        "goodput_per_s": goodput.per_s,
        "decoding": decoding and len(decoding.rows),
        "cached": cached and cached.share,
    }


def same(found, expected):
    """Whether all of these are equal, but for rounding."""
    wrong = {}
    for name, value in expected.items():
        numbers = isinstance(value, float) and found[name] is not None
        if not (math.isclose(found[name], value, rel_tol=1e-9, abs_tol=1e-9) if numbers else found[name] == value):
            wrong[name] = found[name], value
    return wrong == {} or pytest.fail(f"{wrong}")


def retimed(m, move, factor=1.0):
    """All moments of a record moved, and its spans of time by a factor."""
    run, t = m.run, m.run.telemetry

    def moved(times):
        return tuple(None if at is None else move(at) for at in times)

    counted = {n: [v and factor * v for v in column] if n in SECONDS else column for n, column in t.columns.items()}
    telemetry = replace(mapped(t, ["time_s"], moved), interval_s=factor * t.interval_s, columns=counted)
    stream = mapped(run.stream, ["scheduled_s", "unsent_s"], moved)
    return with_run(
        m,
        samples=mapped(run.samples, ["sent_s", "admitted_s", "first_token_s", "last_token_s"], moved),
        steps=mapped(run.steps, ["time_s"], moved),
        telemetry=replace(telemetry, span_s=[span and factor * span for span in t.span_s]),
        stream=replace(stream, gaps={**GAPS, "least_s": factor * 1e-4, "sum_s": factor * 0.5}),
        failed=mapped(run.failed, ["sent_s", "ended_s", "scheduled_s"], moved),
        window_s=moved(run.window_s),
    )


@given(watched(), st.integers(1, 2**16))
def test_no_figure_depends_on_when_the_run_began(m, ticks):
    assert same(figures(retimed(m, lambda at: at + ticks * TICK_S)), figures(m))


PARTS = [f"{name}{part}_s" for name in ("e2e", "ttft", "tpot", "itl") for part in ("", "_p50", "_p90", "_p95", "_p99")]
DELAYS = [f"delay {name}_s" for name in ("mean", "p99", "max")]
TIMES = [*PARTS, *DELAYS, "normalized_latency_s", "step_s", "energy_per_token_j"]
RATES = [
    *("requests_per_s", "output_tokens_per_s", "roofline_fraction", "prompt_tokens_per_s"),
    *("goodput_per_s", "delay requested_per_s", "delay achieved_per_s"),
]


@given(watched(), st.sampled_from([0.25, 2.0, 8.0]))
def test_latencies_follow_the_clock_rates_its_inverse_and_all_else_stays(m, factor):
    slower = retimed(m, lambda at: factor * at, factor)
    before, after = figures(m), figures(slower)
    slo = window.goodput_of(Slo(ttft_s=factor * 0.25, e2e_s=factor), (slower,))
    after["good"], after["goodput_per_s"] = (slo.requests, slo.good, slo.dropped, *slo.by_slo.values()), slo.per_s
    expected = {
        **before,
        **{name: before[name] and factor * before[name] for name in TIMES},
        **{name: before[name] and before[name] / factor for name in RATES},
        "unexplained": before["unexplained"] and 1 - (1 - before["unexplained"]) / factor,
    }
    del expected["bound"]  # by shapes, if counters do not tell: those of a data sheet are no part of the record
    assert same(after, expected)


@given(watched(), st.randoms(use_true_random=False))
def test_the_order_of_requests_says_nothing(m, chance):
    run = m.run
    order, rows = (chance.sample(range(len(table)), len(table)) for table in (run.samples, run.failed))
    stream = mapped(run.stream, ["scheduled_s"], lambda column: tuple(column[i] for i in order))
    turned = with_run(m, samples=picked(run.samples, order), stream=stream, failed=picked(run.failed, rows))
    assert same(figures(turned), figures(m))


def part_of(m, kept):
    """What a client saw of the requests for which `kept` of their row holds."""
    run = m.run
    rows, failed = (list(filter(kept, range(len(each)))) for each in (run.samples, run.failed))
    stream = mapped(run.stream, ["scheduled_s"], lambda column: tuple(column[i] for i in rows))
    lost = picked(run.failed, failed)
    return with_run(m, samples=picked(run.samples, rows), failed=lost, failures=len(lost), stream=stream)


@given(watched(), st.integers(0, 2**12))
def test_two_clients_see_together_what_one_would(m, mask):
    one, other = (part_of(m, lambda i, side=side: (mask >> i) % 2 == side) for side in (0, 1))
    parts = [one, with_run(other, stream=replace(other.run.stream, unsent_s=()))]
    by, runs, slo = m.load.judged_by, [part.run for part in parts], Slo(tpot_s=0.25, e2e_s=1.0)
    no_gaps = [replace(run, stream=None) for run in (m.run, *runs)]
    assert window.latencies(no_gaps[1:], by) == window.latencies(no_gaps[:1], by)
    both, whole = window.goodput_of(slo, parts), window.goodput_of(slo, (m,))
    assert both == replace(whole, per_s=pytest.approx(whole.per_s))
    for name in ("requested_per_s", "achieved_per_s", "unsent"):
        first, second, all_of_it = (getattr(window.delay_of(run), name) for run in (*runs, m.run))
        assert first + second == pytest.approx(all_of_it)
    lives = [window.requests_in_flight(run, "sent_s") or 0 for run in (m.run, *runs)]
    assert lives[0] == pytest.approx(lives[1] + lives[2])
    counts = window.gaps_of([m.run]).counts
    assert {index: 2 * count for index, count in counts.items()} == window.gaps_of(runs).counts


@given(drawn_runs(), st.integers(0, 9))
def test_tokens_of_two_clients_add_up_to_those_of_one(run, share):
    """The same spans of time, their tokens divided between two columns."""
    whole = tuple(map(float, run.steps.new_tokens))
    columns = whole, tuple(min(share, n) for n in whole), tuple(n - min(share, n) for n in whole)
    streams = [Stream(0.25, run.window_s[0] - 0.5, column, GAPS) for column in columns]
    both, one, other = (window.output_tokens_per_s(replace(run, steps=NO_STEPS, stream=each)) for each in streams)
    assert both is one is other is None or both == pytest.approx(one + other)


@given(watched(), st.integers(0, 29))
def test_twice_the_tokens_of_a_step_add_to_the_rate_and_their_time_to_the_batch(m, step):
    run, tokens = m.run, list(m.run.steps.new_tokens)
    if step < len(tokens):
        tokens[step] *= 2
        more = with_run(m, steps=replace(run.steps, new_tokens=tokens))
        trace, before, after = window.window_trace(run), figures(m), figures(more)
        followed = ["output_tokens_per_s", "requests_per_s", "batch", "roofline_fraction", "little"]
        followed += ["energy_per_token_j", "variance", "unexplained", "bound"]
        assert same(after, {name: value for name, value in before.items() if name not in followed})
        if before["batch"] is not None:
            counts = tokens[step] / 2 if step in trace.steps[1:] else 0
            took = run.steps.time_s[step] - run.steps.time_s[step - 1] if step else 0.0
            rate = before["output_tokens_per_s"] + counts / trace.seconds
            assert after["output_tokens_per_s"] == pytest.approx(rate)
            assert after["batch"] == pytest.approx(before["batch"] + counts * took / trace.seconds)


@given(watched())
def test_who_came_and_went_before_the_window_changes_nothing_of_it(m):
    run, (opens, _) = m.run, m.run.window_s
    row = (99, opens - 3, opens - 2.5, opens - 2, opens - 1, 7, 7, True, None)
    samples = Samples(*((*getattr(run.samples, f.name), value) for f, value in zip(fields(Samples), row)))
    stream = replace(run.stream, scheduled_s=(*run.stream.scheduled_s, opens - 3))
    early, before = figures(with_run(m, samples=samples, stream=stream)), figures(m)
    if all(at is None for at in run.samples.admitted_s):
        before["little"] = early["little"]  # now somebody says when it was admitted
    del before["requests_per_s"]  # by the mean length of all finished requests
    assert same(early, before)


# Several GPUs


@given(watched(gpus=3), st.permutations(range(3)))
def test_the_order_of_gpus_says_nothing(m, order):
    gpus = m.run.telemetry.gpus
    turned = with_run(m, telemetry=replace(m.run.telemetry, gpus=tuple(gpus[i] for i in order)))
    assert same(asdict(device_figures(turned.run)), asdict(device_figures(m.run)))


@given(watched(gpus=1))
def test_two_gpus_alike_take_twice_the_power_and_memory_of_one(m):
    one, telemetry = device_figures(m.run), m.run.telemetry
    two = device_figures(replace(m.run, telemetry=replace(telemetry, gpus=telemetry.gpus * 2)))
    doubled = {n: getattr(one, n) and 2 * getattr(one, n) for n in ("power_w", "power_limit_w", "memory_used_bytes")}
    balance = {"power_imbalance": 0.0 if one.power_w else None}
    assert same(asdict(two), {**asdict(one), **doubled, **balance})
