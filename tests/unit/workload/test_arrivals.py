"""Arrivals obey the laws of the processes that they say they are, each law tried on a planted violation; one seed is
one schedule for ever. Traces of real services are read line by line, cut but never shortened, and damage is told by
its line."""

import math
import random
import tracemalloc
from collections import Counter
from datetime import datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, stdev, variance

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from refusals import refused

from pytest_slmserve.schema.errors import BadDataset
from pytest_slmserve.schema.specs import OpenLoop
from pytest_slmserve.workload.arrivals import Trace, TraceRow, job, load_trace, read_trace, sample_lengths, schedule

SEEDS = st.integers(-(2**40), 2**40)
RATES = st.floats(0.1, 1000)
BURSTINESS = st.floats(0.05, 50) | st.just(math.inf)


def paced(rate, *, burstiness=1.0, seed=0, duration_s=math.inf, requests=None):
    """Times at one rate, over so many seconds or requests."""
    return schedule([(rate, duration_s)], burstiness, seed, requests)


MANY = [paced(rate=8, seed=seed, duration_s=500) for seed in range(10)]


def counts(times, span_s: float, until_s: float) -> list[int]:
    """How many came in each of the disjoint spans."""
    found = Counter(int(time / span_s) for time in times)
    return [found[index] for index in range(int(until_s / span_s))]


def furthest(values, cdf=lambda share: share) -> float:
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


@pytest.mark.parametrize("span_s", [0.05, 0.3, 1, 5])
def test_poisson_counts_have_right_variance(span_s):
    found = [count for times in MANY for count in counts(times, span_s, 500)]
    assert abs(sum(map(len, MANY)) - 40_000) < 3.3 * math.sqrt(40_000)
    assert abs(dispersion(found)) < 3.3 and abs(autocorrelation(found)) < 3.3


def test_arrival_counts_prefer_no_time():
    lengths = [len(paced(rate=8, seed=seed, duration_s=10)) for seed in range(400)]
    hundred = [paced(rate=8, seed=seed, requests=100) for seed in range(400)]
    halves = [sum(time < 5 for time in each) for each in hundred]
    assert abs(dispersion(lengths)) < 3.3 and abs(dispersion(halves)) < 3.3
    pinned = [[time * 100 / 8 / times[-1] for time in times] for times in hundred]  # the last one at the 12.5th second
    assert dispersion([sum(time < 11 for time in times) for times in pinned]) < -5, "no Poisson process"
    uneven, even = (counts(paced(rate=8, burstiness=each, duration_s=2000), 5, 2000) for each in (0.5, 2))
    assert dispersion(uneven) > 5 and dispersion(even) < -3.3
    assert autocorrelation(counts(schedule(((4, 250), (12, 250))), 5, 500)) > 5
    parts = [time % 1 for times in MANY for time in times]
    assert furthest(parts) < 1.95
    assert max(Counter(round(part, 3) for part in parts).values()) < 100, "40 are to be expected"
    assert furthest([0.0 if n % 3 == 0 else part for n, part in enumerate(parts)]) > 10
    times = schedule([(10, 200), (0, 50), (40, 100), (5, 400)], seed=2)
    for begin, end, rate in ((0, 200, 10), (200, 250, 0), (250, 350, 40), (350, 750, 5)):
        inside = [time for time in times if begin <= time < end]
        assert abs(len(inside) - rate * (end - begin)) <= 3.3 * math.sqrt(rate * (end - begin))
        assert not inside or furthest([(time - begin) / (end - begin) for time in inside]) < 1.95
    assert times[-1] < 750


def erlang(shape: int):
    """Distribution of a gap of mean 1 whose shape is a whole number."""
    return lambda gap: 1 - math.exp(-shape * gap) * sum((shape * gap) ** k / math.factorial(k) for k in range(shape))


@pytest.mark.parametrize(("burstiness", "cdf"), [
    (0.5, lambda gap: math.erf(math.sqrt(gap / 2))), (1, erlang(1)), (2, erlang(2)), (5, erlang(5)),
])  # fmt: skip
def test_gaps_follow_burstiness_distribution(burstiness, cdf):
    times = paced(rate=20, burstiness=burstiness, seed=7, requests=20_000)
    scaled = [20 * (later - earlier) for earlier, later in pairwise(times)]
    assert furthest(scaled, cdf) < 1.95 and abs(autocorrelation(scaled)) < 3.3
    assert furthest(scaled, erlang(3)) > 5, "the test tells shapes apart"


@pytest.mark.parametrize("burstiness", [0.1, 0.25, 1, 4, 25, 400])
def test_gap_variation_follows_burstiness(burstiness):
    times = paced(rate=3, burstiness=burstiness, seed=1, requests=20_001)
    seen, cv = [later - earlier for earlier, later in pairwise(times)], 1 / math.sqrt(burstiness)
    assert fmean(seen) * 3 == pytest.approx(1, abs=4 * cv / math.sqrt(20_000))
    assert stdev(seen) / fmean(seen) == pytest.approx(cv, rel=0.02 + 0.03 * cv)


@pytest.mark.parametrize("burstiness", [0.05, 0.3, 1, 3, 30])
def test_arrival_rate_holds_from_start(burstiness):
    for late in (0, 1):
        loads = [paced(4, burstiness=burstiness, seed=seed, duration_s=1 + late) for seed in range(2000)]
        seen = [sum(late <= time for time in times) for times in loads]
        assert fmean(seen) == pytest.approx(4, abs=3.5 * stdev(seen) / math.sqrt(2000))
    # The negative control: the same gaps, counted from the first request on, would begin too fast.
    loads = [paced(rate=4, burstiness=0.3, seed=seed, duration_s=12) for seed in range(2000)]
    seen = [sum(time < times[0] + 1 for time in times) - 1 for times in loads]
    assert fmean(seen) > 4 + 5 * stdev(seen) / math.sqrt(2000)


@pytest.mark.parametrize(("burstiness", "seed", "times"), [
    (1, 0, (0.010330603000106088, 0.10772029788030342, 0.1179402487479048)),
    (0.5, 1, (0.0685066178097023, 0.3934358506607334, 0.40762980068717314)),
])  # fmt: skip
def test_schedules_never_change(burstiness, seed, times):
    """But for the last bits, which are the C library's; and Python's own stream is left alone."""
    random.seed(1)
    before = random.getstate()
    assert paced(10, burstiness=burstiness, seed=seed, requests=3) == pytest.approx(times, rel=1e-12)
    assert random.getstate() == before


@given(SEEDS, SEEDS, RATES, RATES, st.floats(0.05, 50), st.floats(0.1, 10))
def test_seed_determines_schedule(seed, other, rate, faster, burstiness, speed):
    times, again, others = (paced(rate, burstiness=burstiness, seed=s, requests=20) for s in (seed, seed, other))
    assert times == again and (times == others) == (seed == other)
    sooner = paced(faster, burstiness=burstiness, seed=seed, requests=20)
    assert [time * rate for time in times] == pytest.approx([time * faster for time in sooner])
    assert [time * speed for time in INVENTED.times(speed)] == pytest.approx([*range(10)])
    assert INVENTED.times() == tuple(range(10))


@settings(max_examples=50)
@given(SEEDS, RATES, BURSTINESS, st.integers(1, 300), st.none() | st.integers(1, 9))
def test_arrival_times_ascend_until_end(seed, rate, burstiness, requests, most):
    counted = paced(rate, burstiness=burstiness, seed=seed, requests=requests)
    assert len(counted) == requests
    assert counted[0] >= 0 and all(a <= b for a, b in pairwise(counted))
    if counted[-1] > 0:
        end = counted[-1] * (1 - 1e-9)  # bursts have requests a rounding error apart
        timed = paced(rate, burstiness=burstiness, seed=seed, duration_s=end)
        assert timed == pytest.approx(counted[: len(timed)]) and len(timed) < requests
        assert all(time < end for time in timed)
    load = job(requests, rate, seed, most, burstiness)
    assert load == OpenLoop(rate=rate, requests=requests, seed=seed, max_concurrency=most, burstiness=burstiness)
    assert load.times == paced(rate, burstiness=burstiness, seed=seed, requests=requests)
    assert job(requests).times == (0.0,) * requests and job(requests).schedule_s == ()
    assert job(requests, rate).times == paced(rate, requests=requests)


@pytest.mark.parametrize(("steps", "requests", "times"), [
    ([(4, 1)], None, (0, 0.25, 0.5, 0.75)),  # the end is left out
    ([(0.5, math.inf)], 3, (0, 2, 4)), ([(4, 1)], 2, (0, 0.25)), ([(0.5, 3)], None, (0, 2)),
    ([(2, 1), (0, 1), (4, 1)], None, (0, 0.5, 2, 2.25, 2.5, 2.75)),
    ([(1, 1.5), (2, 1)], None, (0, 1, 1.75, 2.25)),
])  # fmt: skip
def test_constant_arrivals_are_even(steps, requests, times):
    assert schedule(steps, math.inf, 9, requests) == times


@given(SEEDS, st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 5)), min_size=1, max_size=6), BURSTINESS)
def test_equal_ramp_steps_merge(seed, steps, burstiness):
    steps = ((7.5, 1.0), *steps)
    times = schedule(tuple(steps), seed=seed, burstiness=burstiness)
    length = math.fsum(s for _, s in steps)
    assert all(a <= b for a, b in pairwise(times)) and all(0 <= time < length for time in times)
    level = schedule(tuple((7.5, s) for _, s in steps), seed=seed, burstiness=burstiness)
    one = paced(7.5, burstiness=burstiness, seed=seed, duration_s=length)
    assert abs(len(level) - len(one)) <= 1, "rounding may move one over the end"
    assert level[: len(one)] == pytest.approx(one[: len(level)])


@pytest.mark.parametrize(("steps", "more", "facts", "hint"), [
    ([], {}, (), "steps=((5, 60), (10, 60))"), ([(0, 5)], {}, (), "steps="),
    ([(math.inf, 1)], {}, ("inf", "1 s"), "finite rate"),
    ([(1, 1), (math.nan, 1)], {}, ("nan", "1 s"), "finite rate"),
    ([(1, math.inf)], {}, ("1 requests", "inf s"), "seconds above 0"),
    ([(1, 0)], {}, ("1 requests", "0 s"), "seconds above 0"),
    ([(1, 0)], {"requests": 1}, ("1 requests", "0 s"), "seconds above 0"),
    ([(1, 1), (-1, 1)], {}, ("-1 requests",), "finite rate of 0 or more"),
    ([(1, 1)], {"burstiness": 0}, ("burstiness of 0",), "burstiness=1"),
    ([(1, 1)], {"burstiness": 0.0099}, ("0.0099",), "at least 0.01"),
    ([(1, 1)], {"burstiness": math.nan}, ("nan",), "burstiness=1"),
])  # fmt: skip
def test_wrong_schedule_suggests_valid_value(steps, more, facts, hint):
    with refused(*facts, hint=hint):
        schedule(steps, **more)
    assert len(schedule([(1, 1e9)], 0.01, 0, requests=5)) == 5, "the least burstiness is taken"


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
OTHER_COLUMNS = (
    "id,GeneratedTokens, TIMESTAMP ,ContextTokens\na,5,2024-05-10 00:00:00.25+00:00,7\n"
    "b,6,2024-05-10T02:00:01+02:00,8\nc,7,2024-05-11T00:00:00Z,9\n"
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


@pytest.mark.parametrize(("text", "offsets", "lengths"), [
    *((text, [0, 0.2000002, 0.2000002, 4], LENGTHS) for text in (AZURE, "\ufeff" + AZURE, AZURE.replace("\n", "\r\n"))),
    ("  " + MOONCAKE, [0, 0.2, 0.2, 4.0005], LENGTHS),  # whose milliseconds may have fractions
    (OTHER_COLUMNS, [0, 0.75, 86399.75], [(7, 5), (8, 6), (9, 7)]),
])  # fmt: skip
def test_trace_instants_lose_no_digit(trace, text, offsets, lengths):
    blocks = [(1, 2), (), (), ()] if "hash_ids" in text else [()] * 4
    assert [*read_trace(trace(text))] == [*map(TraceRow, offsets, lengths, blocks)]


@IN_ONE_FILE
@given(ticks=st.lists(st.integers(0, 10**12), min_size=1, max_size=20).map(sorted), data=st.data())
def test_written_trace_is_read_back(trace, ticks, data):
    """ticks: of 100 ns."""
    lengths = [data.draw(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))) for _ in ticks]
    seconds = [datetime(2023, 11, 16, 18, 15, 46) + timedelta(seconds=tick // 10**7) for tick in ticks]
    lines = [f"{at}.{tick % 10**7:07},{p},{o}\n" for at, tick, (p, o) in zip(seconds, ticks, lengths)]
    offsets = [(tick - ticks[0]) / 10**7 for tick in ticks]
    assert [*read_trace(trace(HEADER + "".join(lines)))] == [*map(TraceRow, offsets, lengths)]


@pytest.mark.parametrize(("before", "damaged"), [
    *((AZURE + "\n", f"2023-11-16 18:15:46.6805900,{rest}") for rest in ("374", "374,", "37.4,44", "-374,44")),
    *((AZURE + "\n", f"{instant},374,44") for instant in
      ("2023-11-16 18:15:46.68059000001", "2023-11-31 18:15:46.6805900", "16.11.2023 18:15")),
    (AZURE + "\n", "\ud83d"),
    *((MOONCAKE, '{{"timestamp": {}, "input_length": {}, "output_length": {}}}'.format(*facts)) for facts in (
        (6000, 69.5, 52), (6000, '"6955"', 52), (6000, 6955, -1), (6000, "true", 52), ('"6000"', 6955, 52),
        ("NaN", 6955, 52), ("1e999", 6955, 52),
    )),
    (MOONCAKE, '{"timestamp": 6000, "input_length": 6955, "output_len'),
    (MOONCAKE, '{"timestamp": 6000, "input_length": 6955}'),
    *((MOONCAKE, line) for line in ("[6000, 6955, 52]", "7")),
    pytest.param(MOONCAKE, "[" * 100_000, id="deep"),
])  # fmt: skip
def test_damaged_trace_line_is_named(trace, before, damaged):
    path = trace(f"{before}{damaged}\n".encode("utf-8", "surrogatepass"))
    rows = read_trace(path)
    assert [row.lengths for row in islice(rows, 4)] == LENGTHS
    with refused(f"line {before.count(chr(10)) + 1} ", path, kind=BadDataset, hint="whole copy"):
        next(rows)
    first, second, third, *_ = AZURE.splitlines()
    with refused("line 3 ", kind=BadDataset, hint="Sort the file by time."):
        list(read_trace(trace("\n".join([first, third, second]))))


@pytest.mark.parametrize("text", ["", "[]", "TIMESTAMP,ContextTokens\n", "PK\x03\x04", '[{"conversations": []}]'])
def test_foreign_trace_file_is_refused(trace, monkeypatch, text):
    path = trace(text)
    with refused(path, text.strip()[:2], kind=BadDataset, hint="TIMESTAMP, ContextTokens"):
        list(read_trace(path))
    with refused("No such file", path.parent, kind=BadDataset, hint="TIMESTAMP"):
        list(read_trace(path.with_name("nowhere.csv")))
    monkeypatch.setenv("HOME", str(path.parent))
    path.write_text(AZURE)
    assert len(list(read_trace(Path("~/trace")))) == 4


def test_long_trace_is_streamed(trace):
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
    short = "".join(f"\n2023-11-17 00:00:04.0,{lengths}" for lengths in ("0,7", "7,0", "0,0"))
    loaded = load_trace(trace(AZURE + short), max_model_len=4096)
    assert (len(loaded.rows), loaded.left_out) == (4, 3)
    path = trace(MOONCAKE + "damaged\n")
    assert len(load_trace(path, max_model_len=4096, until_s=2).rows) == 3
    with refused("line 5", kind=BadDataset):
        load_trace(path, max_model_len=4096)


LIMITS = st.sampled_from([10, 11, 417, 418, 2048, 2049]) | st.integers(5, 4096)
ENDS = st.sampled_from([0.2, 4.0005, math.inf]) | st.floats(0.001, 10)


@IN_ONE_FILE
@given(limit=LIMITS, until_s=ENDS)
def test_trace_slice_keeps_fitting_rows(trace, limit, until_s):
    path, whole = trace(MOONCAKE), map(TraceRow, [0, 0.2, 0.2, 4.0005], LENGTHS, [(1, 2), (), (), ()])
    inside = [row for row in whole if row.offset_s < until_s]
    fitting = tuple(row for row in inside if sum(row.lengths) <= limit)
    if fitting:
        found = load_trace(path, max_model_len=limit, until_s=until_s)
        assert found == Trace(fitting, len(inside) - len(fitting), "trace")
    else:
        with refused(f" {limit} tokens", f"({len(inside)} ", path, kind=BadDataset, hint="--more") as caught:
            load_trace(path, max_model_len=limit, until_s=until_s, hint="--more")
        assert (f" before {until_s} s" in caught.value.problem) is (until_s < math.inf)


INVENTED = Trace(tuple(TraceRow(float(n), (n + 1, 2 * n + 1)) for n in range(10)), 0, "invented")


@given(SEEDS, SEEDS, st.integers(0, 60))
def test_trace_lengths_are_drawn_reproducibly(seed, other, requests):
    drawn = sample_lengths(INVENTED, 60, seed)
    assert sample_lengths(INVENTED, requests, seed) == drawn[:requests]
    assert (sample_lengths(INVENTED, 60, other) == drawn) == (seed == other)
    seen = Counter(sample_lengths(INVENTED, 5000, seed=3))
    assert seen.keys() == {row.lengths for row in INVENTED.rows}
    chi_square = sum((count - 500) ** 2 / 500 for count in seen.values())
    assert chi_square < 27.9, "nine degrees of freedom, one in a thousand"
    assert sample_lengths(INVENTED, 4, seed=0) == [(2, 3), (8, 15), (3, 5), (7, 13)]
