"""Traces of real services: read line by line, cut but never shortened, and damage told by its line."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections import Counter
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_slmserve.schema.errors import BadDataset
from pytest_slmserve.workload.arrivals import Trace, TraceRow, load_trace, read_trace, sample_lengths

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEADER + (
    "2023-11-16 23:59:59.9000001,374,44\n"
    "2023-11-17 00:00:00.1000003,396,109\n"
    "2023-11-17 00:00:00.1000003,10,1\n"
    "\n"
    "2023-11-17 00:00:03.9000001,2000,49"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 374, "output_length": 44, "hash_ids": [1, 2]}\n'
    '{"timestamp": 1200, "input_length": 396, "output_length": 109, "hash_ids": []}\n'
    '{"timestamp": 1200, "input_length": 10, "output_length": 1}\n'
    '{"timestamp": 5000, "input_length": 2000, "output_length": 49}\n'
)
LENGTHS = [(374, 44), (396, 109), (10, 1), (2000, 49)]


@pytest.fixture
def trace(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture(scope="session")
def azure_2023() -> Path:
    """AzureLLMInferenceTrace_conv.csv of AzurePublicDataset, at the path in SLM_AZURE_TRACE."""
    path = Path(os.environ.get("SLM_AZURE_TRACE", ""))
    if not path.is_file():
        pytest.skip("needs the Azure LLM inference trace of conversations, 2023: SLM_AZURE_TRACE=its path")
    return path


# Reading


@pytest.mark.parametrize("text", [AZURE, MOONCAKE, "\ufeff" + AZURE, AZURE.replace("\n", "\r\n")])
def test_both_formats_give_offsets_and_lengths(trace, text):
    rows = list(read_trace(trace(text)))
    assert [row.lengths for row in rows] == LENGTHS
    assert [row.offset_s for row in rows] == pytest.approx([0, 0.2, 0.2, 4], abs=3e-7)


def test_no_digit_of_an_instant_is_lost(trace):
    assert [row.offset_s for row in read_trace(trace(AZURE))] == [0, 0.2000002, 0.2000002, 4]


def test_columns_are_found_by_name_and_others_passed_over(trace):
    text = "id,GeneratedTokens,TIMESTAMP,ContextTokens\na,5,2024-05-10 00:00:00.25+00:00,7\n" + (
        "b,6,2024-05-10T02:00:01+02:00,8\n"
    )
    assert list(read_trace(trace(text))) == [TraceRow(0, (7, 5)), TraceRow(0.75, (8, 6))]


INSTANTS = st.lists(st.integers(0, 10**12), min_size=1, max_size=20).map(sorted)  # in units of 100 ns


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ticks=INSTANTS, data=st.data())
def test_what_was_written_is_read(trace, ticks, data):
    lengths = [data.draw(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))) for _ in ticks]
    seconds = [datetime(2023, 11, 16, 18, 15, 46) + timedelta(seconds=tick // 10**7) for tick in ticks]
    lines = [f"{at}.{tick % 10**7:07},{p},{o}\n" for at, tick, (p, o) in zip(seconds, ticks, lengths)]
    rows = list(read_trace(trace(HEADER + "".join(lines))))
    assert [row.lengths for row in rows] == lengths
    assert [row.offset_s for row in rows] == [(tick - ticks[0]) / 10**7 for tick in ticks]


AZURE_LINES = [
    "2023-11-16 18:15:46.6805900,374",
    "2023-11-16 18:15:46.6805900,374,",
    "2023-11-16 18:15:46.6805900,37.4,44",
    "2023-11-16 18:15:46.6805900,-374,44",
    "2023-11-16 18:15:46.68059000001,374,44",
    "2023-11-31 18:15:46.6805900,374,44",
    "16.11.2023 18:15,374,44",
    "\ud83d".encode("utf-8", "surrogatepass"),
]
MOONCAKE_LINES = [
    '{"timestamp": 6000, "input_length": 6955, "output_len',
    '{"timestamp": 6000, "input_length": 6955}',
    '{"timestamp": 6000, "input_length": 69.5, "output_length": 52}',
    '{"timestamp": 6000, "input_length": "6955", "output_length": 52}',
    '{"timestamp": 6000, "input_length": 6955, "output_length": -1}',
    '{"timestamp": 6000, "input_length": true, "output_length": 52}',
    '{"timestamp": "6000", "input_length": 6955, "output_length": 52}',
    '{"timestamp": NaN, "input_length": 6955, "output_length": 52}',
    '{"timestamp": 1e999, "input_length": 6955, "output_length": 52}',
    "[6000, 6955, 52]",
    "7",
]


@pytest.mark.parametrize("line", [*((HEADER, line) for line in AZURE_LINES), *((MOONCAKE, x) for x in MOONCAKE_LINES)])
def test_a_damaged_line_is_named_after_all_before_it(trace, line):
    before, damaged = line
    lines = before.count("\n")
    path = trace(before.encode() + (damaged if isinstance(damaged, bytes) else damaged.encode()) + b"\n")
    rows = read_trace(path)
    assert len(list(islice(rows, lines - (before == HEADER)))) == lines - (before == HEADER)
    with pytest.raises(BadDataset, match=f"line {lines + 1} of .*trace is no row of this trace\n.*whole copy"):
        next(rows)


def test_a_line_that_goes_back_in_time_is_named(trace):
    lines = AZURE.splitlines()
    with pytest.raises(BadDataset, match="line 3 of .* is earlier than the one before it\n.*sorted by time"):
        list(read_trace(trace("\n".join([lines[0], lines[2], lines[1]]))))


@pytest.mark.parametrize("text", ["", "[]", "TIMESTAMP,ContextTokens\n", "PK\x03\x04", '[{"conversations": []}]'])
def test_another_file_is_refused(trace, text):
    with pytest.raises(BadDataset, match="is no trace: its first line is .*\n.*TIMESTAMP, ContextTokens"):
        list(read_trace(trace(text)))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BadDataset, match="cannot be read: No such file"):
        list(read_trace(tmp_path / "nowhere.csv"))


def test_a_long_trace_is_not_held_in_memory(trace):
    line = '{"timestamp": %d, "input_length": 6955, "output_length": 52, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n'
    path = trace("".join(line % ms for ms in range(8_000)))
    assert path.stat().st_size > 700_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_trace(path)) == 8_000
        assert load_trace(path, max_model_len=8000, until_s=0.2).rows[-1].offset_s == pytest.approx(0.199)
        assert tracemalloc.get_traced_memory()[1] < 150_000
    finally:
        tracemalloc.stop()


# Slices


def test_what_does_not_fit_is_left_out_and_counted(trace):
    loaded = load_trace(trace(AZURE), max_model_len=418)
    assert [row.lengths for row in loaded.rows] == [(374, 44), (10, 1)]
    assert loaded.left_out == 2
    assert load_trace(trace(AZURE), max_model_len=2049).left_out == 0
    assert load_trace(trace(AZURE), max_model_len=2048).left_out == 1


@pytest.mark.parametrize("lengths", ["0,7", "7,0", "0,0"])
def test_a_row_without_tokens_one_way_cannot_be_served(trace, lengths):
    loaded = load_trace(trace(AZURE + f"\n2023-11-17 00:00:04.0,{lengths}\n"), max_model_len=4096)
    assert (len(loaded.rows), loaded.left_out) == (4, 1)


def test_a_slice_reads_no_further_than_it_must(trace):
    path = trace(MOONCAKE + "damaged\n")
    assert len(load_trace(path, max_model_len=4096, until_s=2).rows) == 3
    with pytest.raises(BadDataset, match="line 5"):
        load_trace(path, max_model_len=4096)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=st.integers(11, 4096), until_s=st.floats(0.001, 10), speed=st.floats(0.1, 10))
def test_a_slice_is_the_beginning_of_the_whole_at_any_speed(trace, limit, until_s, speed):
    path = trace(MOONCAKE)
    whole, inside = load_trace(path, max_model_len=limit), [r for r in read_trace(path) if r.offset_s < until_s]
    fitting = tuple(row for row in whole.rows if row.offset_s < until_s)
    if not fitting:
        with pytest.raises(BadDataset, match=r"no request of up to \d+ tokens before .* s \(\d do not fit\)"):
            load_trace(path, max_model_len=limit, until_s=until_s)
        return
    part = load_trace(path, max_model_len=limit, until_s=until_s)
    assert part.rows == fitting and len(part.rows) + part.left_out == len(inside)
    assert [time * speed for time in part.times(speed)] == pytest.approx([row.offset_s for row in fitting])


def test_a_slice_with_nothing_in_it_says_why(trace):
    with pytest.raises(BadDataset, match=r"no request of up to 5 tokens \(4 do not fit\)"):
        load_trace(trace(MOONCAKE), max_model_len=5)


# Lengths alone

ROWS = tuple(TraceRow(float(n), (n + 1, 2 * n + 1)) for n in range(10))


def test_lengths_are_drawn_in_pairs_with_replacement():
    drawn = sample_lengths(Trace(ROWS, 0, "invented"), 5000, seed=3)
    seen = Counter(drawn)
    assert seen.keys() == {row.lengths for row in ROWS}
    assert sum((count - 500) ** 2 / 500 for count in seen.values()) < 27.9, (
        "chi square, nine degrees, one in a thousand"
    )


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40), st.integers(0, 60))
def test_drawn_lengths_are_those_of_the_seed_and_more_begin_the_same(seed, other, requests):
    trace = Trace(ROWS, 0, "invented")
    drawn = sample_lengths(trace, 60, seed)
    assert sample_lengths(trace, requests, seed) == drawn[:requests]
    assert (sample_lengths(trace, 60, other) == drawn) == (seed == other)


def test_drawn_lengths_are_the_same_for_ever():
    assert sample_lengths(Trace(ROWS, 0, "invented"), 4, seed=0) == [(2, 3), (8, 15), (3, 5), (7, 13)]


# The real one


def test_azures_trace_of_conversations(azure_2023):
    whole = load_trace(azure_2023, max_model_len=20_000)
    assert (len(whole.rows), whole.left_out) == (19_366, 0)
    assert whole.rows[-1].offset_s == 3501.721937
    assert len(whole.rows) / whole.rows[-1].offset_s == pytest.approx(5.53, abs=0.005)
    short = load_trace(azure_2023, max_model_len=2048)
    assert (len(short.rows), short.left_out) == (19_366 - 2_838, 2_838)


def test_a_slice_of_azures_trace_at_twice_the_speed_has_twice_the_rate(azure_2023):
    minutes = load_trace(azure_2023, max_model_len=20_000, until_s=600)
    times = minutes.times(speed=2)
    assert len(times) == len(minutes.rows) > 2000
    assert times[-1] == pytest.approx(300, abs=2)


def test_lines_of_mooncake_in_another_order_of_keys(trace):
    rows = [json.dumps({"output_length": 3, "hash_ids": [], "timestamp": ms, "input_length": 5}) for ms in (0, 1.5)]
    assert list(read_trace(trace("\n".join(rows)))) == [TraceRow(0, (5, 3)), TraceRow(0.0015, (5, 3))]
