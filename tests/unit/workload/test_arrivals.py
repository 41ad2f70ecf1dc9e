"""Arrivals against the laws of the processes that they say they are, each law tried on a planted violation."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from statistics import fmean, stdev, variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.workload.arrivals import schedule

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


@settings(max_examples=60, deadline=None)
@given(SEEDS, SEEDS, RATES, st.floats(0.05, 50))
def test_one_seed_is_one_schedule(seed, other, rate, burstiness):
    times = paced(rate=rate, burstiness=burstiness, seed=seed, requests=20)
    again = paced(rate=rate, burstiness=burstiness, seed=seed, requests=20)
    remote_executor = paced(rate=rate, burstiness=burstiness, seed=other, requests=20)
    assert times == again
    assert (times == remote_executor) == (seed == other)


@settings(max_examples=100, deadline=None)
@given(SEEDS, RATES, BURSTINESS, st.integers(1, 300))
def test_times_ascend_from_zero_on_and_a_duration_cuts_them(seed, rate, burstiness, requests):
    counted = paced(rate=rate, burstiness=burstiness, seed=seed, requests=requests)
    assert len(counted) == requests
    assert counted[0] >= 0 and all(a <= b for a, b in pairwise(counted))
    if counted[-1] > 0:
        end = counted[-1] * (1 - 1e-9)  # bursts have requests a rounding error apart
        timed = paced(rate=rate, burstiness=burstiness, seed=seed, duration_s=end)
        assert timed == pytest.approx(counted[: len(timed)]) and len(timed) < requests
        assert all(time < end for time in timed)


@given(SEEDS, RATES, RATES)
def test_another_rate_is_the_same_load_on_another_clock(seed, rate, other):
    times = paced(rate=rate, seed=seed, requests=20)
    faster = paced(rate=other, seed=seed, requests=20)
    assert [time * rate for time in times] == pytest.approx([time * other for time in faster])


def test_constant_arrivals_are_even_and_begin_at_once():
    assert paced(rate=4, duration_s=1, burstiness=math.inf) == (0, 0.25, 0.5, 0.75)
    assert paced(rate=0.5, requests=3, seed=9, burstiness=math.inf) == (0, 2, 4)


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


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 5)), min_size=1, max_size=6), BURSTINESS)
def test_a_ramp_of_equal_rates_is_one_step(seed, steps, burstiness):
    steps = ((7.5, 1.0), *steps)
    times = schedule(tuple(steps), seed=seed, burstiness=burstiness)
    assert all(a <= b for a, b in pairwise(times)) and all(0 <= time < sum(s for _, s in steps) for time in times)
    level = schedule(tuple((7.5, s) for _, s in steps), seed=seed, burstiness=burstiness)
    length = math.fsum(s for _, s in steps)
    one = paced(rate=7.5, burstiness=burstiness, seed=seed, duration_s=length)
    assert abs(len(level) - len(one)) <= 1, "rounding may move one over the end"
    assert level[: len(one)] == pytest.approx(one[: len(level)])


# Bad input


@pytest.mark.parametrize(
    ("wrong", "problem", "hint"),
    [
        ({"steps": []}, "send nothing", "steps=((5, 60), (10, 60))"),
        ({"steps": [(0, 5)]}, "send nothing", "steps="),
        ({"steps": [(math.inf, 1)]}, "inf requests per second", "finite rate"),
        ({"steps": [(1, 1), (math.nan, 1)]}, "nan requests per second", "finite rate"),
        ({"steps": [(1, math.inf)]}, "1 requests per second for inf s", "seconds above 0"),
        ({"steps": [(1, 0)]}, "1 requests per second for 0 s", "seconds above 0"),
        ({"steps": [(1, 1), (-1, 1)]}, "-1 requests per second", "finite rate of 0 or more"),
        ({"steps": [(1, 1)], "burstiness": 0}, "burstiness of 0", "burstiness=1"),
        ({"steps": [(1, 1)], "burstiness": 1e-9}, "burstiness of 1e-09", "0.01 at least"),
    ],
)
def test_bad_input_says_what_to_type(wrong, problem, hint):
    with pytest.raises(BadUsage) as error:
        schedule(**wrong)
    assert problem in error.value.problem
    assert hint in error.value.hint


def test_scheduling_leaves_the_global_stream_alone_and_imports_nothing_heavy():
    random.seed(1)
    before = random.getstate()
    paced(rate=1, burstiness=0.5, requests=100)
    assert random.getstate() == before
    code = "import sys, pytest_slmserve.workload.arrivals, pytest_slmserve.workload.arrivals; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"numpy", "pandas", "ijson", "vllm", "pytest"}.isdisjoint(loaded)
