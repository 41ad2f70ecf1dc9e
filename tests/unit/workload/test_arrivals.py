"""Arrivals obey the laws of the processes that they say they are, each law tried on a planted violation; one seed is
one schedule for ever. Traces of real services are read line by line, cut but never shortened, and damage is told by
its line."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from datetime import datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, stdev, variance

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from pytest_slmserve.schema.errors import BadDataset
from pytest_slmserve.schema.specs import OpenLoop
from pytest_slmserve.workload.arrivals import Trace, TraceRow, job, load_trace, read_trace, sample_lengths, schedule

SEEDS = st.integers(-(2**40), 2**40)
RATES = st.floats(0.1, 1000)
BURSTINESS = st.one_of(st.floats(0.05, 50), st.just(math.inf))


def paced(rate, *, burstiness=1.0, seed=0, duration_s=math.inf, requests=None):
    """Times at one rate, over so many seconds or requests."""
    return schedule([(rate, duration_s)], burstiness, seed, requests)


MANY = [paced(rate=8, seed=seed, duration_s=500) for seed in range(10)]
ON_THE_SECOND = [tuple(sorted(round(t) if n % 3 == 0 else t for n, t in enumerate(times))) for times in MANY]


def counts(times, span_s: float, until_s: float) -> list[int]:
    """How many came in each of the disjoint spans."""
    found = Counter(int(time / span_s) for time in times)
    return [found[index] for index in range(int(until_s / span_s))]


def gaps(times) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def furthest(values, cdf) -> float:
    """Kolmogorov and Smirnov's distance, times the root of n: above 1.95 once in a thousand."""
    ordered = sorted(values)
    n = len(ordered)
    return math.sqrt(n) * max(max(cdf(v) - i / n, (i + 1) / n - cdf(v)) for i, v in enumerate(ordered))


def dispersion(values) -> float:
    """Variance over mean, less 1, in its standard deviations for Poisson counts (a normal deviate)."""
    return (variance(values) / fmean(values) - 1) / math.sqrt(2 / (len(values) - 1))


def autocorrelation(values) -> float:
    """Of neighbours, in its standard deviations for independent ones (a normal deviate)."""
    centre = fmean(values)
    products = sum((a - centre) * (b - centre) for a, b in pairwise(values))
    return products / sum((v - centre) ** 2 for v in values) * math.sqrt(len(values))


# Poisson


def test_the_rate_is_what_was_asked_for():
    sent = sum(map(len, MANY))
    assert abs(sent - 40_000) < 3.3 * math.sqrt(40_000)


@pytest.mark.parametrize("span_s", [0.05, 0.3, 1, 5])
def test_poisson_counts_vary_by_their_mean_and_do_not_know_of_each_other(span_s):
    found = [count for times in MANY for count in counts(times, span_s, 500)]
    assert abs(dispersion(found)) < 3.3
    assert abs(autocorrelation(found)) < 3.3


def test_counts_of_whole_loads_vary_too_where_vllms_client_pins_them():
    lengths = [len(paced(rate=8, seed=seed, duration_s=10)) for seed in range(400)]
    assert abs(dispersion(lengths)) < 3.3
    hundred = [paced(rate=8, seed=seed, requests=100) for seed in range(400)]
    pinned = [[time * 100 / 8 / times[-1] for time in times] for times in hundred]  # the last one at the 12.5th second
    assert dispersion([sum(time < 11 for time in times) for times in pinned]) < -5, "no Poisson process"
    assert abs(dispersion([sum(time < 5 for time in times) for times in hundred])) < 3.3


def test_an_uneven_process_fails_the_dispersion_test():
    uneven = paced(rate=8, burstiness=0.5, duration_s=2000)
    assert dispersion(counts(uneven, 5, 2000)) > 5
    even = paced(rate=8, burstiness=2, duration_s=2000)
    assert dispersion(counts(even, 5, 2000)) < -3.3


def test_a_drifting_process_fails_the_test_of_independence():
    drifting = schedule(((4, 250), (12, 250)))
    assert autocorrelation(counts(drifting, 5, 500)) > 5


def test_no_time_of_the_second_is_preferred():
    parts = [time % 1 for times in MANY for time in times]
    assert furthest(parts, lambda share: share) < 1.95
    assert max(Counter(round(part, 3) for part in parts).values()) < 100, "40 are to be expected"


def test_a_preference_for_whole_seconds_is_found():
    parts = [time % 1 for times in ON_THE_SECOND for time in times]
    assert furthest(parts, lambda share: share) > 10


# Gamma


def erlang(shape: int):
    """Distribution of a gap of mean 1 whose shape is a whole number."""
    return lambda gap: 1 - math.exp(-shape * gap) * sum((shape * gap) ** k / math.factorial(k) for k in range(shape))


@pytest.mark.parametrize(
    ("burstiness", "cdf"),
    [(0.5, lambda gap: math.erf(math.sqrt(gap / 2))), (1, erlang(1)), (2, erlang(2)), (5, erlang(5))],
    ids=["1/2", "1", "2", "5"],
)
def test_gaps_have_the_distribution_of_the_burstiness(burstiness, cdf):
    times = paced(rate=20, burstiness=burstiness, seed=7, requests=20_000)
    scaled = [20 * gap for gap in gaps(times)]
    assert furthest(scaled, cdf) < 1.95
    assert furthest(scaled, erlang(3)) > 5, "the test tells shapes apart"
    assert abs(autocorrelation(scaled)) < 3.3


@pytest.mark.parametrize("burstiness", [0.1, 0.25, 1, 4, 25, 400])
def test_the_variation_of_gaps_is_one_over_the_root_of_the_burstiness(burstiness):
    times = paced(rate=3, burstiness=burstiness, seed=1, requests=20_001)
    seen = gaps(times)
    cv = 1 / math.sqrt(burstiness)
    assert fmean(seen) * 3 == pytest.approx(1, abs=4 * cv / math.sqrt(20_000))
    assert stdev(seen) / fmean(seen) == pytest.approx(cv, rel=0.02 + 0.03 * cv)


@pytest.mark.parametrize("burstiness", [0.05, 0.3, 1, 3, 30])
def test_the_rate_is_the_same_from_the_first_second_on(burstiness):
    for late in (0, 1):
        loads = [paced(4, burstiness=burstiness, seed=seed, duration_s=1 + late) for seed in range(2000)]
        seen = [sum(late <= time for time in times) for times in loads]
        assert fmean(seen) == pytest.approx(4, abs=3.5 * stdev(seen) / math.sqrt(2000))


def test_a_load_that_begins_with_a_whole_gap_would_begin_too_fast():
    """The negative control of the test above: the same gaps, counted from the first request on."""
    seen = []
    for seed in range(2000):
        times = paced(rate=4, burstiness=0.3, seed=seed, duration_s=12)
        seen.append(sum(time < times[0] + 1 for time in times) - 1)
    assert fmean(seen) > 4 + 5 * stdev(seen) / math.sqrt(2000)


# All of them


@pytest.mark.parametrize(
    ("burstiness", "seed", "times"),
    [
        (1, 0, (0.010330603000106088, 0.10772029788030342, 0.1179402487479048)),
        (0.5, 1, (0.0685066178097023, 0.3934358506607334, 0.40762980068717314)),
    ],
    ids=["poisson", "gamma"],
)
def test_schedules_are_the_same_for_ever(burstiness, seed, times):
    assert paced(10, burstiness=burstiness, seed=seed, requests=3) == pytest.approx(times, rel=1e-12), (
        "the last bits are the C library's"
    )


@given(SEEDS, SEEDS, RATES, st.floats(0.05, 50))
def test_one_seed_is_one_schedule(seed, other, rate, burstiness):
    times, again, others = (paced(rate, burstiness=burstiness, seed=s, requests=20) for s in (seed, seed, other))
    assert times == again
    assert (times == others) == (seed == other)


@settings(max_examples=50)
@given(SEEDS, RATES, BURSTINESS, st.integers(1, 300))
def test_times_ascend_from_zero_on_and_a_duration_cuts_them(seed, rate, burstiness, requests):
    counted = paced(rate, burstiness=burstiness, seed=seed, requests=requests)
    assert len(counted) == requests
    assert counted[0] >= 0 and all(a <= b for a, b in pairwise(counted))
    if counted[-1] > 0:
        end = counted[-1] * (1 - 1e-9)  # bursts have requests a rounding error apart
        timed = paced(rate, burstiness=burstiness, seed=seed, duration_s=end)
        assert timed == pytest.approx(counted[: len(timed)]) and len(timed) < requests
        assert all(time < end for time in timed)


@given(SEEDS, RATES, RATES)
def test_another_rate_is_the_same_load_on_another_clock(seed, rate, other):
    times, faster = (paced(each, seed=seed, requests=20) for each in (rate, other))
    assert [time * rate for time in times] == pytest.approx([time * other for time in faster])


def test_constant_arrivals_are_even_begin_at_once_and_leave_out_the_end():
    assert paced(4, duration_s=1, burstiness=math.inf) == (0, 0.25, 0.5, 0.75)
    assert paced(0.5, requests=3, seed=9, burstiness=math.inf) == (0, 2, 4)
    assert paced(4, duration_s=1, requests=2, burstiness=math.inf) == (0, 0.25)


@given(SEEDS, st.integers(1, 50), RATES, BURSTINESS, st.none() | st.integers(1, 9))
def test_a_job_has_the_schedule_of_its_rate(seed, requests, rate, burstiness, most):
    load = job(requests, rate, seed, most, burstiness)
    assert load == OpenLoop(rate=rate, requests=requests, seed=seed, max_concurrency=most, burstiness=burstiness)
    assert load.times == paced(rate, burstiness=burstiness, seed=seed, requests=requests)
    assert job(requests).times == (0.0,) * requests and job(requests).schedule_s == ()
    assert job(requests, rate).times == paced(rate, requests=requests)


# Ramps


def test_each_step_of_a_ramp_has_its_rate():
    times = schedule([(10, 200), (0, 50), (40, 100), (5, 400)], seed=2)
    for begin, end, rate in ((0, 200, 10), (200, 250, 0), (250, 350, 40), (350, 750, 5)):
        inside = [time for time in times if begin <= time < end]
        assert abs(len(inside) - rate * (end - begin)) <= 3.3 * math.sqrt(rate * (end - begin))
        if inside:
            assert furthest([(time - begin) / (end - begin) for time in inside], lambda share: share) < 1.95
    assert times[-1] < 750


def test_an_even_ramp_goes_on_from_step_to_step():
    assert schedule(((2, 1), (0, 1), (4, 1)), burstiness=math.inf) == (0, 0.5, 2, 2.25, 2.5, 2.75)
    assert schedule(((1, 1.5), (2, 1)), burstiness=math.inf) == (0, 1, 1.75, 2.25)


@given(SEEDS, st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 5)), min_size=1, max_size=6), BURSTINESS)
def test_a_ramp_of_equal_rates_is_one_step(seed, steps, burstiness):
    steps = ((7.5, 1.0), *steps)
    times = schedule(tuple(steps), seed=seed, burstiness=burstiness)
    length = math.fsum(s for _, s in steps)
    assert all(a <= b for a, b in pairwise(times)) and all(0 <= time < length for time in times)
    level = schedule(tuple((7.5, s) for _, s in steps), seed=seed, burstiness=burstiness)
    one = paced(7.5, burstiness=burstiness, seed=seed, duration_s=length)
    assert abs(len(level) - len(one)) <= 1, "rounding may move one over the end"
    assert level[: len(one)] == pytest.approx(one[: len(level)])


@pytest.mark.parametrize(
    ("wrong", "facts", "hint"),
    [
        ({"steps": []}, (), "steps=((5, 60), (10, 60))"),
        ({"steps": [(0, 5)]}, (), "steps="),
        ({"steps": [(math.inf, 1)]}, ("inf", "1 s"), "finite rate"),
        ({"steps": [(1, 1), (math.nan, 1)]}, ("nan", "1 s"), "finite rate"),
        ({"steps": [(1, math.inf)]}, ("1 requests", "inf s"), "seconds above 0"),
        ({"steps": [(1, 0)]}, ("1 requests", "0 s"), "seconds above 0"),
        ({"steps": [(1, 0)], "requests": 1}, ("1 requests", "0 s"), "seconds above 0"),
        ({"steps": [(1, 1), (-1, 1)]}, ("-1 requests",), "finite rate of 0 or more"),
        ({"steps": [(1, 1)], "burstiness": 0}, ("burstiness of 0",), "burstiness=1"),
        ({"steps": [(1, 1)], "burstiness": 0.0099}, ("0.0099",), "0.01 at least"),
        ({"steps": [(1, 1)], "burstiness": math.nan}, ("nan",), "burstiness=1"),
    ],
)
def test_bad_input_says_what_to_type(wrong, facts, hint):
    with refused(*facts, hint=hint):
        schedule(**wrong)


def test_the_least_burstiness_and_small_rates_are_taken():
    assert len(schedule([(1, 1e9)], 0.01, 0, requests=5)) == 5
    assert schedule([(0.5, 3)], math.inf) == (0, 2)


def test_scheduling_leaves_the_global_stream_alone():
    random.seed(1)
    before = random.getstate()
    paced(1, burstiness=0.5, requests=100)
    assert random.getstate() == before


# Traces

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
    '{"timestamp": 1200, "output_length": 1, "input_length": 10}\n'
    '{"timestamp": 5000.5, "input_length": 2000, "output_length": 49}\n'
)
LENGTHS = [(374, 44), (396, 109), (10, 1), (2000, 49)]
IN_ONE_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def trace(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("text", [AZURE, "\ufeff" + AZURE, AZURE.replace("\n", "\r\n")])
def test_no_digit_of_an_instant_is_lost(trace, text):
    rows = list(read_trace(trace(text)))
    assert [(row.offset_s, row.lengths) for row in rows] == [*zip([0, 0.2000002, 0.2000002, 4], LENGTHS)]


def test_milliseconds_of_mooncake_may_have_fractions(trace):
    rows = list(read_trace(trace("  " + MOONCAKE)))
    assert [(row.offset_s, row.lengths) for row in rows] == [*zip([0, 0.2, 0.2, 4.0005], LENGTHS)]


def test_columns_are_found_by_name_and_others_passed_over(trace):
    text = "id,GeneratedTokens, TIMESTAMP ,ContextTokens\na,5,2024-05-10 00:00:00.25+00:00,7\n" + (
        "b,6,2024-05-10T02:00:01+02:00,8\nc,7,2024-05-11T00:00:00Z,9\n"
    )
    assert list(read_trace(trace(text))) == [TraceRow(0, (7, 5)), TraceRow(0.75, (8, 6)), TraceRow(86399.75, (9, 7))]


@IN_ONE_FILE
@given(ticks=st.lists(st.integers(0, 10**12), min_size=1, max_size=20).map(sorted), data=st.data())
def test_what_was_written_is_read(trace, ticks, data):
    """ticks: of 100 ns."""
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
    "[" * 100_000,
    "7",
]


@pytest.mark.parametrize(
    ("before", "damaged"), [*((AZURE + "\n", line) for line in AZURE_LINES), *((MOONCAKE, x) for x in MOONCAKE_LINES)]
)
def test_a_damaged_line_is_named_after_all_before_it(trace, before, damaged):
    path = trace(before.encode() + (damaged if isinstance(damaged, bytes) else damaged.encode()) + b"\n")
    rows = read_trace(path)
    assert [row.lengths for row in islice(rows, 4)] == LENGTHS
    with refused(f"line {before.count(chr(10)) + 1} ", path, kind=BadDataset, hint="whole copy"):
        next(rows)


def test_a_line_that_goes_back_in_time_is_named(trace):
    first, second, third, *_ = AZURE.splitlines()
    with refused("line 3 ", kind=BadDataset, hint="sorted by time"):
        list(read_trace(trace("\n".join([first, third, second]))))


@pytest.mark.parametrize("text", ["", "[]", "TIMESTAMP,ContextTokens\n", "PK\x03\x04", '[{"conversations": []}]'])
def test_another_file_is_refused_by_its_first_line(trace, text):
    path = trace(text)
    with refused(path, text.strip()[:2], kind=BadDataset, hint="TIMESTAMP, ContextTokens"):
        list(read_trace(path))


def test_a_missing_file_is_refused(tmp_path, monkeypatch):
    with refused("No such file", tmp_path, kind=BadDataset, hint="TIMESTAMP"):
        list(read_trace(tmp_path / "nowhere.csv"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.csv").write_text(AZURE)
    assert len(list(read_trace(Path("~/t.csv")))) == 4


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


@pytest.mark.parametrize(
    ("longest", "left_out", "last"), [(418, 2, (10, 1)), (417, 3, (10, 1)), (2048, 1, (10, 1)), (2049, 0, (2000, 49))]
)
def test_what_does_not_fit_is_left_out_and_counted(trace, longest, left_out, last):
    loaded = load_trace(trace(AZURE), max_model_len=longest)
    assert (len(loaded.rows), loaded.left_out, loaded.rows[-1].lengths, loaded.source) == (
        4 - left_out,
        left_out,
        last,
        "trace",
    )


@pytest.mark.parametrize("lengths", ["0,7", "7,0", "0,0"])
def test_a_row_without_tokens_one_way_cannot_be_served(trace, lengths):
    loaded = load_trace(trace(AZURE + f"\n2023-11-17 00:00:04.0,{lengths}\n"), max_model_len=4096)
    assert (len(loaded.rows), loaded.left_out) == (4, 1)


def test_a_slice_reads_no_further_than_it_must(trace):
    path = trace(MOONCAKE + "damaged\n")
    assert len(load_trace(path, max_model_len=4096, until_s=2).rows) == 3
    with refused("line 5", kind=BadDataset):
        load_trace(path, max_model_len=4096)


@IN_ONE_FILE
@given(limit=st.integers(11, 4096), until_s=st.sampled_from([0.2, 4.0005]) | st.floats(0.001, 10))
def test_a_slice_is_the_beginning_of_the_whole(trace, limit, until_s):
    path = trace(MOONCAKE)
    inside = [*zip([0, 0.2, 0.2, 4.0005], LENGTHS)]
    inside = [row for row in inside if row[0] < until_s]
    fitting = [row for row in inside if sum(row[1]) <= limit]
    if not fitting:
        with refused(limit, until_s, f"({len(inside)} ", path, kind=BadDataset, hint="--more"):
            load_trace(path, max_model_len=limit, until_s=until_s, hint="--more")
        return
    part = load_trace(path, max_model_len=limit, until_s=until_s)
    assert [(row.offset_s, row.lengths) for row in part.rows] == fitting
    assert part.left_out == len(inside) - len(fitting)


def test_a_slice_with_nothing_in_it_says_why(trace):
    with refused(" 5 tokens", "(4 ", kind=BadDataset, hint="more tokens") as caught:
        load_trace(trace(MOONCAKE), max_model_len=5)
    assert "inf" not in caught.value.problem


ROWS = tuple(TraceRow(float(n), (n + 1, 2 * n + 1)) for n in range(10))
INVENTED = Trace(ROWS, 0, "invented")


@given(st.floats(0.1, 10))
def test_twice_the_speed_is_half_the_time(speed):
    assert [time * speed for time in INVENTED.times(speed)] == pytest.approx([*range(10)])
    assert INVENTED.times() == tuple(range(10))


# Lengths alone


def test_lengths_are_drawn_in_pairs_with_replacement():
    seen = Counter(sample_lengths(INVENTED, 5000, seed=3))
    assert seen.keys() == {row.lengths for row in ROWS}
    assert sum((count - 500) ** 2 / 500 for count in seen.values()) < 27.9, (
        "chi square, nine degrees, one in a thousand"
    )


@given(SEEDS, SEEDS, st.integers(0, 60))
def test_drawn_lengths_are_those_of_the_seed_and_more_begin_the_same(seed, other, requests):
    drawn = sample_lengths(INVENTED, 60, seed)
    assert sample_lengths(INVENTED, requests, seed) == drawn[:requests]
    assert (sample_lengths(INVENTED, 60, other) == drawn) == (seed == other)


def test_drawn_lengths_are_the_same_for_ever():
    assert sample_lengths(INVENTED, 4, seed=0) == [(2, 3), (8, 15), (3, 5), (7, 13)]
