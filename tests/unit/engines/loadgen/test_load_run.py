"""Results of requests: tokens in bins, gaps in a histogram, and several processes as one run."""

from __future__ import annotations

import json
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interfaces import small_workload

from pytest_slmserve.engines.endpoint import run_of
from pytest_slmserve.engines.loadgen.load_run import BIN_S, GROWTH, LEAST_S, gaps, results_of
from pytest_slmserve.engines.loadgen.streams import RequestStream

stamps = st.lists(st.floats(1000, 1003), min_size=1, max_size=30).map(sorted)
WORKLOAD = small_workload()
REST = {
    "began": 999.0,
    "failed": [],
    "unsent": [],
    "waited": [],
    "first_failure": None,
    "client_cpu_s": 0.5,
    "doubt_s": [0.0, 0.0],
}


def row(times, usage=(None, None), tokens=None, sent=999.0, scheduled=None, finished=True, asked=99):
    tokens = [1] * len(times) if tokens is None else tokens
    stream = RequestStream(0, asked, b"", scheduled, sent=sent, cut=not finished)
    stream.answer.times, stream.answer.tokens, stream.answer.usage = array("d", times), array("I", tokens), usage
    return stream


def run(*parts, window=(1000.0, 1003.0), steps=(), on_schedule=False, **more):
    """The run of these requests, of which each part is sent by a process."""
    shared = {**REST, "window": window, "on_schedule": on_schedule, **more}
    return run_of([json.loads(json.dumps({**shared, **results_of(rows, window, steps)})) for rows in parts], WORKLOAD)


@given(st.lists(stamps, min_size=1, max_size=5))
def test_every_token_is_in_the_bin_of_its_time(streams):
    found = run([row(times) for times in streams]).stream
    assert sum(found.tokens) == sum(map(len, streams)) and found.tokens[0]
    first = round((found.begins_s + 999.0) / BIN_S)
    for at in streams[0]:
        assert found.tokens[int(at / BIN_S) - first] >= 1


@given(st.lists(st.floats(LEAST_S, 50), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_any_percentile_of_the_gaps_to_a_hundredth(values, share):
    counts = Counter()
    for value in values:
        counts.update(gaps([[0.0, value]], (0.0, 60.0))["counts"])
    rank = round(share * (len(values) - 1))
    index = [i for i in sorted(counts) for _ in range(counts[i])][rank]
    assert LEAST_S * GROWTH**index == pytest.approx(sorted(values)[rank], rel=0.0101)


def test_gaps_count_where_both_ends_lie_in_the_window():
    found = gaps([[0.0, 1.0, 2.0, 3.0, 3.00001], [2.5]], (1.0, 3.5))
    assert found["counts"] == {-1: 1, 925: 2} and LEAST_S * GROWTH**925 <= 1.0 < LEAST_S * GROWTH**926
    assert found["sum_s"] == pytest.approx(2.00001)


def test_a_request_has_its_row_as_the_worker_has_it():
    rows = [row([5.0, 6.0], (7, 2), sent=2.0), row([4.0], sent=1.0, finished=False), row([], sent=3.0, finished=False)]
    samples = run(rows, began=0.0).samples
    assert list(zip(samples.sent_s, samples.first_token_s, samples.last_token_s)) == [
        (1.0, 4.0, 4.0),
        (2.0, 5.0, 6.0),
        (3.0, None, None),
    ]
    assert samples.prompt_tokens == (16, 7, 16), "by the workload if it was cut off before the server's count"
    assert (samples.output_tokens, samples.finished) == ((1, 2, 0), (False, True, False))


@pytest.mark.parametrize(("asked", "output"), [(99, 2), (1, 1)])
def test_tokens_that_chunks_do_not_show_are_taken_from_the_usage(asked, output):
    """Two tokens a chunk by the server's count: so it is with those that were cut off, too, up to those requested."""
    found = run([row([1001.0, 1002.0], (7, 4)), row([1001.0], finished=False, asked=asked)])
    assert (found.stream.tokens_per_chunk, found.samples.output_tokens) == (2.0, (4, output))
    assert sum(found.stream.tokens) == pytest.approx(4 + output, abs=0.01)


def test_without_any_usage_nobody_knows_the_tokens_of_a_chunk():
    assert run([row([1001.0, 1002.0])]).stream.tokens_per_chunk is None


@given(st.lists(stamps, min_size=2, max_size=6), st.booleans())
def test_parts_together_are_what_one_process_would_have_found(streams, on_schedule):
    rows = [
        row(times, (3, len(times)), sent=float(i), scheduled=float(i) if on_schedule else None)
        for i, times in enumerate(streams)
    ]
    steps = [(1000.5, 1001.5), (1002.0, 1002.5)]
    whole, both = (
        run(*parts, window=(1000.5, 1002.5), steps=steps, on_schedule=on_schedule)
        for parts in ([rows], [rows[::2], rows[1::2]])
    )
    assert both.samples == whole.samples and both.stream.tokens == whole.stream.tokens
    for one, other in zip((both.stream.gaps, *both.stream.step_gaps), (whole.stream.gaps, *whole.stream.step_gaps)):
        assert one == {**other, "sum_s": pytest.approx(other["sum_s"], abs=1e-5)}
    assert (both.stream.scheduled_s, both.stream.tokens_per_chunk) == (whole.stream.scheduled_s, 1.0)
    assert (both.stream.cpu_s, whole.stream.cpu_s) == (1.0, 0.5)
    assert len(whole.stream.step_gaps) == 2


def test_losses_of_parts_are_in_the_order_sent():
    lost = [[i, float(9 - i), None if i % 2 else 1.5, 20.0, "timeout"] for i in range(5)]
    parts = [{**REST, "window": (0.0, 1.0), "on_schedule": False, **results_of([], (0.0, 1.0))} for _ in range(2)]
    parts[0]["failed"], parts[1]["failed"] = lost[:2], lost[2:]
    found = run_of(json.loads(json.dumps(parts)), WORKLOAD)
    assert (found.failures, found.failed.request, found.failed.scheduled_s) == (5, (4, 3, 2, 1, 0), None)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("on_schedule", "scheduled"), [(True, ()), (False, None)])
def test_no_requests_are_an_empty_run(parts, on_schedule, scheduled):
    """Whether there was a schedule does not depend on what came of it."""
    found = run(*[[]] * parts, on_schedule=on_schedule)
    assert (len(found.samples), found.stream.tokens, found.stream.gaps["counts"]) == (0, (), {})
    assert found.stream.scheduled_s == scheduled
