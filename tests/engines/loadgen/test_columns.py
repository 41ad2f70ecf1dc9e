"""Columns: tokens in bins, gaps in a histogram, and several processes as one."""

from __future__ import annotations

import json
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.engines.loadgen.load_run import (
    BIN_S,
    GROWTH,
    LEAST_S,
    Lost,
    RequestRow,
    columns_found,
    gaps,
    lost_in,
    merged_columns,
)

stamps = st.lists(st.floats(1000, 1003), min_size=1, max_size=30).map(sorted)
NOTHING = {
    "began": 1000.0,
    "window": [1000.5, 1002.5],
    "failed": lost_in([]),
    "failures": 0,
    "unsent": [],
    "waited": [],
    "first_failure": None,
    "client_cpu_s": 0.5,
    "doubt_s": [0.0, 0.0],
}


def row(times, usage=(None, None), tokens=None, sent=999.0, scheduled=None, finished=True, asked=99):
    tokens = [1] * len(times) if tokens is None else tokens
    return RequestRow(0, sent, scheduled, array("d", times), array("I", tokens), usage, finished, asked)


@given(st.lists(stamps, min_size=1, max_size=5))
def test_every_token_is_in_the_bin_of_its_time(streams):
    width, begin, tokens = columns_found([row(times) for times in streams], (0.0, 9e9))["received"]
    assert sum(tokens) == sum(map(len, streams)) and tokens[0] and tokens[-1]
    first = round(begin / width)
    for at in streams[0]:
        assert tokens[int(at / BIN_S) - first] >= 1


@given(st.lists(st.floats(LEAST_S, 50), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_any_percentile_of_the_gaps_to_a_hundredth(values, share):
    counts = Counter()
    for value in values:
        counts.update({int(i): count for i, count in gaps([[0.0, value]], (0.0, 60.0))["counts"].items()})
    rank = round(share * (len(values) - 1))
    index = [i for i in sorted(counts) for _ in range(counts[i])][rank]
    assert LEAST_S * GROWTH**index == pytest.approx(sorted(values)[rank], rel=0.0101)


def test_gaps_count_where_both_ends_lie_in_the_window():
    found = gaps([[0.0, 1.0, 2.0, 3.0, 3.00001], [2.5]], (1.0, 3.5))
    assert found["counts"] == {"-1": 1, "925": 2} and LEAST_S * GROWTH**925 <= 1.0 < LEAST_S * GROWTH**926
    assert found["sum_s"] == pytest.approx(2.00001)


@given(st.lists(stamps, max_size=5))
def test_a_step_has_the_gaps_that_its_window_would_have_alone(streams):
    steps = [(1000.0, 1001.0), (1001.5, 1003.0)]
    found = columns_found([row(times) for times in streams], (1000.0, 1003.0), steps)
    assert found["step_gaps"] == [columns_found([row(times) for times in streams], each)["gaps"] for each in steps]
    assert all(sum(each["counts"].values()) <= sum(found["gaps"]["counts"].values()) for each in found["step_gaps"])


def test_a_request_has_its_row_as_the_worker_has_it():
    rows = [row([5.0, 6.0], (7, 2), sent=2.0), row([4.0], sent=1.0, finished=False), row([], sent=3.0, finished=False)]
    assert list(zip(*columns_found(rows, (0.0, 9.0))["samples"])) == [
        (0, 1.0, None, 4.0, 4.0, None, 1, False, None),
        (0, 2.0, None, 5.0, 6.0, 7, 2, True, None),
        (0, 3.0, None, None, None, None, 0, False, None),
    ]


def test_tokens_that_chunks_do_not_show_are_taken_from_the_usage():
    """Two tokens a chunk by the server's count: so it is with those that were cut off, too."""
    found = columns_found([row([1.0, 2.0], (7, 4)), row([1.0], finished=False)], (0.0, 9.0))
    assert (found["tokens_per_chunk"], found["samples"][6]) == (2.0, [4, 2])
    assert sum(found["received"][2]) == 6


def test_one_that_was_cut_off_has_no_more_tokens_than_were_asked_for():
    found = columns_found([row([1.0, 2.0], (7, 4)), row([1.0, 2.0, 3.0], finished=False, asked=4)], (0.0, 9.0))
    assert found["samples"][6] == [4, 4] and sum(found["received"][2]) == pytest.approx(8, abs=0.01)


def test_without_any_usage_nobody_knows_the_tokens_of_a_chunk():
    assert columns_found([row([1.0, 2.0])], (0.0, 9.0))["tokens_per_chunk"] is None


@given(st.lists(stamps, min_size=2, max_size=6), st.booleans())
def test_parts_together_are_what_one_process_would_have_found(streams, scheduled):
    rows = [
        row(times, (3, len(times)), sent=float(i), scheduled=float(i) if scheduled else None)
        for i, times in enumerate(streams)
    ]
    windows = (1000.5, 1002.5), [(1000.5, 1001.5), (1002.0, 1002.5)]
    found = [columns_found(part, *windows, on_schedule=scheduled) for part in (rows, rows[::2], rows[1::2])]
    whole, *parts = [json.loads(json.dumps(each)) for each in found]
    both = merged_columns([{**part, **NOTHING} for part in parts])
    sums = [[each.pop("sum_s") for each in (found["gaps"], *found["step_gaps"])] for found in (whole, both)]
    assert sums[0] == pytest.approx(sums[1], abs=1e-5), "each is rounded"
    assert {name: json.loads(json.dumps(both[name])) for name in whole} == whole
    assert both["client_cpu_s"] == 1.0


def test_losses_of_parts_are_in_the_order_sent():
    lost = [Lost(i, float(9 - i), None if i % 2 else 1.5, 20.0, "timeout") for i in range(5)]
    nothing = columns_found([], (0.0, 1.0))
    parts = [{**nothing, **NOTHING, "failed": lost_in(half)} for half in (lost[:2], lost[2:])]
    both = merged_columns(json.loads(json.dumps(parts)))["failed"]
    assert both == lost_in(lost) and both["request"] == [4, 3, 2, 1, 0]


def test_no_rows_are_no_columns():
    nothing = columns_found([], (0.0, 1.0))
    assert (nothing["samples"], nothing["received"][2], nothing["gaps"]["counts"]) == ([], [], {})
    assert merged_columns([{**nothing, **NOTHING}] * 2)["samples"] == []


@pytest.mark.parametrize(("on_schedule", "scheduled"), [(True, []), (False, None)])
def test_whether_there_was_a_schedule_does_not_depend_on_what_came_of_it(on_schedule, scheduled):
    nothing = columns_found([], (0.0, 0.0), on_schedule=on_schedule)
    assert nothing["scheduled"] == merged_columns([{**nothing, **NOTHING}] * 2)["scheduled"] == scheduled
