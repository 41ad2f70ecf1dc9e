"""Intervals of differences: against scipy's tests where those apply, moderation against its own formulas, pairing in
time, launches as units. How often intervals cover the truth over thousands of sweeps is in `tests/nightly`."""

import math
import random
from dataclasses import replace
from itertools import pairwise, product
from statistics import fmean, median_high, variance

import pytest
from hypothesis import given, strategies as st
from scipy import optimize, special
from scipy.stats import t as student, ttest_1samp, ttest_ind, ttest_rel

from pytest_slmserve.analysis import estimates
from pytest_slmserve.analysis.estimates import MINUTES, TAIL, Differences, Interval, Prior, Repeat, contrast

LOGS = st.lists(st.floats(-0.7, 0.7).filter(lambda x: abs(x) > 1e-3), min_size=2, max_size=6, unique=True)


def repeats(*values, at="", launch="a", within=None):
    return tuple(Repeat(value, at and f"{at}{i}", launch, within) for i, value in enumerate(values))


def of_logs(*samples):
    return Differences(tuple(repeats(*map(math.exp, logs)) for logs in samples))


def half(interval):
    return (interval.high - interval.low) / 2


def of_scipy(test):
    low, high = test.confidence_interval(0.95)
    return pytest.approx((high - low) / 2, rel=1e-6)


@given(LOGS, LOGS)
def test_intervals_match_student_t_test(first, second):
    both = of_logs(first, second)
    seen, back, wide, one = both.between(0, 1), both.between(1, 0), both.between(0, 1, TAIL / 4), of_logs(first).mean(0)
    means = [math.log(fmean(map(math.exp, logs))) for logs in (first, second)]
    assert (half(one), one.value) == (of_scipy(ttest_1samp(first, 0)), pytest.approx(means[0]))
    assert (half(seen), seen.value) == (of_scipy(ttest_ind(first, second)), pytest.approx(means[1] - means[0]))
    assert (back.value, back.low, back.high) == pytest.approx((-seen.value, -seen.high, -seen.low))
    assert wide.low < seen.low < seen.value < seen.high < wide.high
    assert both.between(1, 1) == Interval(0.0, 0.0, 0.0)


@given(LOGS, st.data())
def test_alternating_samples_use_paired_test(first, data):
    second = data.draw(st.lists(st.floats(-1, 1), min_size=len(first), max_size=len(first), unique=True))
    order = data.draw(st.lists(st.booleans(), min_size=len(first), max_size=len(first)))  # who is first in a round
    one = tuple(Repeat(math.exp(log), f"{i}{2 * late}", "a") for i, (log, late) in enumerate(zip(first, order)))
    other = tuple(Repeat(math.exp(log), f"{i}1", "a") for i, log in enumerate(second))
    if variance([a - b for a, b in zip(first, second)]) > 1e-9:
        assert contrast(one, other).in_turn
        for samples in ((one, other), (other, one)):
            assert half(Differences(samples).between(0, 1)) == of_scipy(ttest_rel(first, second))


def by_smyth(variances):
    """The common variance and the degrees of freedom it is worth (Smyth 2004, section 6.2), by scipy."""
    total = sum(df for _, df in variances)
    pooled = Prior(sum(v * df for v, df in variances) / total if total else 0.0, math.inf, total)
    floor = 1e-5 * median_high(v for v, _ in variances) if variances else 0.0
    if len(variances) < 3 or not floor:
        return pooled
    each = [math.log(max(v, floor)) - special.digamma(df / 2) + math.log(df / 2) for v, df in variances]
    beyond = variance(each) - fmean(special.polygamma(1, df / 2) for _, df in variances)
    if beyond <= 0:
        return pooled
    x = math.exp(optimize.brentq(lambda log: special.polygamma(1, math.exp(log)) - beyond, -7, 14, xtol=1e-12))
    return Prior(math.exp(fmean(each) + special.digamma(x) - math.log(x)), 2 * x, total)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1e-4, 0.01, 0.5, 1.0, 3.0, 40.0]), st.integers(1, 6)), max_size=9))
def test_common_variance_matches_smyth_formula(variances):
    assert estimates.prior(variances) == pytest.approx(by_smyth(variances), rel=1e-5)


@given(st.lists(LOGS, min_size=3, max_size=6), st.sampled_from([0.025, 0.005]))
def test_noise_shrinks_towards_common_variance(logs, tail):
    """By hand, of samples that were not measured in turn and know no course."""
    spreads = [(variance(each), len(each) - 1) for each in logs]
    common, (v1, d1), (v2, d2) = by_smyth(spreads), spreads[2], spreads[0]
    own, df = (v1 * d1 + v2 * d2) / (d1 + d2), d1 + d2
    if math.isinf(common.df):
        ratio, df = common.ratio, common.most
    else:
        ratio, df = (common.df * common.ratio + df * own) / (common.df + df), min(common.df + df, common.most)
    expected = student.isf(tail, df) * math.sqrt(ratio * (1 / len(logs[2]) + 1 / len(logs[0])))
    assert half(of_logs(*logs).between(2, 0, tail)) == pytest.approx(expected, rel=1e-5)


@given(st.lists(st.lists(st.floats(0.5, 2), min_size=3, max_size=3, unique=True), min_size=4, max_size=6))
def test_shared_samples_widen_neighbour_intervals(values):
    """Three rounds of all loads. Variances of two neighbouring differences, which share a sample, correlate by 1/4, so
    all of them together are worth fewer degrees than their sum (Satterthwaite 1946)."""
    samples = tuple(tuple(Repeat(v, f"{i}{load}") for i, v in enumerate(each)) for load, each in enumerate(values))
    logs = [[math.log(b / a) for a, b in zip(one, other)] for one, other in pairwise(values)]
    common, n = by_smyth([(variance(each) / 2, 2) for each in logs]), len(logs)
    ratio, df = estimates.moderated(variance(logs[0]) / 2, 2, common._replace(most=(2 * n) ** 2 / (2 * n + (n - 1))))
    seen = Differences(samples).between(0, 1)
    assert half(seen) == pytest.approx(student.isf(0.025, df) * math.sqrt(ratio * 2 / 3), rel=1e-5)


@pytest.mark.parametrize(("own", "common", "found"), [
    ((4.0, 2), Prior(1.0, 2.0, 100), (2.5, 4.0)), ((4.0, 2), Prior(1.0, 50.0, 9), (58 / 52, 9)),  # as all have
    ((4.0, 2), Prior(1.0, math.inf, 9), (1.0, 9)), ((4.0, 0), Prior(1.0, math.inf, 0), (1.0, 1)),
    ((4.0, 0), Prior(1.0, 0.5, 0.5), (1.0, 1)),
])  # fmt: skip
def test_moderated_variance_mixes_both_variances(own, common, found):
    assert estimates.moderated(*own, common) == pytest.approx(found)


def test_only_true_rounds_are_paired():
    """The host slows down by a tenth; each pair is measured in the same moment."""
    first = repeats(100, 90, 81, at="2026-01-0")
    second = tuple(r._replace(at=f"{r.at}T12") for r in repeats(110, 99.1, 89.05, at="2026-01-0"))
    found = contrast(first, second)
    assert found.in_turn and found.df == 2
    apart = {
        "later": tuple(r._replace(at=f"2026-02-0{i}") for i, r in enumerate(second)),
        "at the same moment": tuple(r._replace(at=s.at) for r, s in zip(second, first)),
        "of another launch": tuple(r._replace(launch="ab"[i % 2]) for i, r in enumerate(second)),
        "fewer": second[:2],
    }
    assert {how for how, sample in apart.items() if contrast(first, sample).in_turn} == set()
    assert contrast(first, apart["later"]).ratio > 100 * found.ratio
    assert not contrast(first[:1], second[:1]).in_turn, "one pair tells of no noise"
    first, second = side(1, (0.0, 0.02, 0.05)), side(2, (0.0, 0.03))
    apart, others = contrast(first, second), {
        "one launch": tuple(r._replace(launch="1a") for r in second),
        "some before, some after": (second[0]._replace(at="2026-01-01T00"), second[1]),
        "unknown times": tuple(r._replace(at="") for r in second),
    }  # fmt: skip
    for sample in others.values():
        found = contrast(first, sample)
        assert (found.ratio, found.df) == pytest.approx((apart.ratio, apart.df)) and not found.in_turn
        assert apart.scale - found.scale == pytest.approx(2 * MINUTES)
    rounds = [side(1, (0.0, 0.02), "ab"), tuple(r._replace(at=f"{r.at}T9") for r in side(1, (0.01, 0.05), "cd"))]
    assert contrast(*rounds).in_turn and contrast(*rounds).scale == pytest.approx(1.0)


def side(day, logs, launches="a", within=None):
    """Repeats that follow each other on one day, of one launch or of one each."""
    at, of = f"2026-01-0{day}T", [f"{day}{launches[i % len(launches)]}" for i in range(len(logs))]
    return tuple(Repeat(math.exp(log), f"{at}{i}", of[i], within) for i, log in enumerate(logs))


def pooled(*samples):
    df = [len(each) - 1 for each in samples]
    return sum(n * variance(each) for n, each in zip(df, samples)) / sum(df), sum(df)


@given(LOGS, LOGS, st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_distant_sides_scatter_by_minutes(first, second, course, other):
    """The repeats of each side have something in common that their scatter does not show."""
    seen, (own, df) = Differences((side(1, first), side(2, second))), pooled(first, second)
    variance_of_both = own * (1 / len(first) + 1 / len(second) + 2 * MINUTES)
    expected = student.isf(0.025, df) * math.sqrt(variance_of_both)
    assert [half(seen.between(0, 1)), half(seen.between(1, 0))] == pytest.approx([expected, expected])
    assert half(replace(seen, minutes=0.0).between(0, 1)) == of_scipy(ttest_ind(first, second)), "added by its reader"
    several = Differences((side(1, first, "abcdef"), side(2, second)))
    expected = student.isf(0.025, df) * math.sqrt(own * (1 / len(first) + 1 / len(second) + MINUTES))
    assert half(several.between(0, 1)) == pytest.approx(expected), "launches are minutes apart"
    told = Differences((side(1, first, within=course), side(2, second, within=other)))
    degrees = [len(each) - 1 for each in (first, second)]
    mean = sum(n * each for n, each in zip(degrees, (course, other))) / sum(degrees)
    ratio = max(pooled(first, second)[0] / mean, 1.0)
    scale = course * (1 / len(first) + MINUTES) + other * (1 / len(second) + MINUTES)
    expected = student.isf(0.025, sum(degrees)) * math.sqrt(ratio * scale)
    assert half(told.between(0, 1)) == pytest.approx(expected)


def test_pairs_cancel_host_drift():
    """The host loses a tenth in each round, and pairs scatter by a thousandth. The last two loads have a round more."""
    chance = random.Random(5)
    samples = []
    for load, rounds in enumerate((3, 3, 3, 4, 4)):
        values = [0.9**i * math.exp(chance.gauss(0, 1e-3)) for i in range(rounds)]
        samples.append(tuple(Repeat(value, f"2026-01-0{i}T1{load}", "a") for i, value in enumerate(values)))
    seen = Differences(tuple(samples))
    assert 2 * half(seen.between(3, 4)) < 0.01 and 2 * half(seen.between(2, 3)) > 0.05
    # Three launches of each, two windows of a launch; the host slows down by a tenth from one pair to the next.
    first, second = [], []
    for day, minute in product(range(3), range(2)):
        slower = 0.9**day * (1 + minute / 1000)
        first.append(Repeat(100 * slower, f"2026-01-0{day}T01:{minute}", f"a{day}"))
        second.append(Repeat(110 * slower, f"2026-01-0{day}T02:{minute}", f"b{day}"))
    assert not contrast(first, second).in_turn, "two windows of one launch follow each other"
    found = contrast(first[::2], second[::2])
    assert found.in_turn and found.df == 2 and found.ratio * found.scale == pytest.approx(0, abs=1e-12)
    # Two launches 10% apart, windows of each alike: four windows are two repeats.
    logs = [0.0, 0.001, 0.1, 0.101]
    sample = tuple(Repeat(math.exp(log), launch="ab"[i // 2]) for i, log in enumerate(logs))
    found = contrast(sample, sample)
    assert found.df == 2 and found.ratio / 2 == pytest.approx(variance([0.0005, 0.1005]))
    means = [estimates.launch_means(zip(launches, (1, 3, 5, 6))) for launches in ("aabb", "aab", "aa")]
    assert means == [[2, 5.5], [1, 3, 5], [1, 3]]
    seen = Differences((sample,)).mean(0)
    assert half(seen) == pytest.approx(estimates.t_above(0.025, 1) * math.sqrt(variance([0.0005, 0.1005]) / 2))


def test_window_course_reveals_noisy_loads():
    quiet, rough = repeats(100, 100.1, within=1e-6), repeats(50, 55, within=2.5e-3)
    seen = Differences((quiet, quiet, rough, rough))
    assert half(seen.between(2, 3)) > 20 * half(seen.between(0, 1))
    assert half(seen.between(2, 3)) == pytest.approx(50 * half(seen.between(0, 1))), "by the root of the course"
    assert half(seen.mean(0)) < 0.01 < half(seen.mean(2))
    silent = (rough[0], rough[1]._replace(within=None))
    plain = tuple(tuple(r._replace(within=None) for r in sample) for sample in (quiet, rough))
    found = [Differences(samples).between(0, 1) for samples in ((quiet, silent), plain, (quiet, rough))]
    assert found[0] == found[1] != found[2]
    single = Differences((repeats(1.0), repeats(2.0)))
    assert not single.known and single.mean(0).low is None
    assert single.between(0, 1).low is None and single.between(0, 1).value == pytest.approx(math.log(2))
    more = Differences((repeats(1.0), repeats(2.0), repeats(3.0, 3.1)))
    assert more.known and more.between(0, 1).low < math.log(2) < more.between(0, 1).high, "a third tells of it"
