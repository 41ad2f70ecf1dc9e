"""Means, percentiles, Student's t and boundaries of looks against scipy and the standard library; a quantity of a run
is computed once. Intervals of differences: `test_differences.py`."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, quantiles, stdev

import pytest
from hypothesis import given, strategies as st
from scipy import special
from scipy.stats import chi2, multivariate_normal, nct, norm, t as student
from strategies import NO_STEPS, planted_run

from pytest_slmserve.analysis import estimates
from pytest_slmserve.analysis.estimates import Interval, boundaries, looks_until, spent, survival, t_above
from pytest_slmserve.analysis.metrics.window import window_trace

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)
DEGREES = st.floats(1, 400) | st.integers(1, 400)
ASKED = []
LOOKS = {
    0: (), 3: (), 4: (4,), 5: (4, 5), 7: (4, 6, 7), 10: (4, 6, 8, 10), 12: (4, 6, 8, 12), 13: (4, 6, 8, 12, 13),
    18: (4, 6, 8, 12, 18), 20: (4, 6, 8, 12, 18, 20), 30: (4, 6, 8, 12, 18, 28, 30),
}  # fmt: skip


@given(st.floats(0, 60), st.floats(1e-9, 0.499), DEGREES)
def test_student_t_matches_scipy(t, tail, df):
    rel = 1e-9 if t > 1e-3 else 1e-7  # of the square of a smaller t digits are lost
    assert survival(t, df) == pytest.approx(student.sf(t, df), rel=rel, abs=1e-300)
    assert survival(-t, df) == pytest.approx(1 - student.sf(t, df), rel=rel)
    assert t_above(tail, df) == pytest.approx(student.isf(tail, df), rel=1e-7)


def test_estimates_handle_extreme_inputs():
    assert [survival(t, 4) for t in (0.0, math.inf, -math.inf)] == [0.5, 0, 1]
    assert t_above(0.5, 4) == pytest.approx(0, abs=1e-9)
    for ask in (lambda: survival(1.0, 0.99), lambda: t_above(0.1, -1)):
        with pytest.raises(ValueError, match="degrees of freedom"):
            ask()
    logs = [estimates.growth(log) for log in (0.0, math.log(2), 1e-12, 1e6)]
    assert logs == pytest.approx([0, 1, 1e-12, math.inf], rel=1e-6, abs=0)
    assert math.isfinite(estimates.growth(699.9))
    assert estimates.sample_sd([1e300, 3e300]) == pytest.approx(2**0.5 * 1e300)
    seen = estimates.factor(Interval(math.log(2), math.log(1.5), None))
    assert (seen.value, seen.low, seen.high) == (pytest.approx(2), pytest.approx(1.5), None)
    assert estimates.ends(seen) == (seen.low, math.inf)
    assert estimates.ends(Interval(1.0, None, 2.0)) == (-math.inf, 2)
    rates = [estimates.per_second(6, window_s) for window_s in ((1.0, 4.0), (4.0, 4.0), (4.0, 1.0))]
    assert rates == [2, 0, 0], "a rate needs a window"
    for share, text in ((0.0789, "7.9%"), (0.1, "10%"), (-0.00001, "0%"), (-0.14, "-14%")):
        assert estimates.percent(share) == text == estimates.percent_interval(Interval(share, 0.1))
        assert estimates.percent_interval(Interval(share, 0.1, 0.2)) == f"{text} (95%: 10% to 20%)"
        assert estimates.times(Interval(1.2345, 1.2, 1.26)) == "1.23 times (95%: 1.2 to 1.26)"
        assert estimates.times(Interval(1.2345)) == estimates.times(Interval(1.2345, 1.2)) == "1.23 times"


@given(NUMBERS, st.floats(0, 1e3), st.none() | st.floats(-1e6, 1e6))
def test_repeat_intervals_match_libraries(values, sd, value):
    df = len(values) - 1
    seen = estimates.sd_interval(sd, df)
    ends = [sd * math.sqrt(df / x) for x in chi2.interval(0.95, df)[::-1]]
    assert (seen.value, [seen.low, seen.high]) == (sd, pytest.approx(ends, rel=1e-7))
    assert estimates.sd_interval(sd, 0) == Interval(sd)
    sample_sd = estimates.sample_sd
    assert sample_sd(values) == pytest.approx(stdev(values), rel=1e-9, abs=1e-9)
    assert sample_sd(values) == sample_sd(values[::-1]) and sample_sd(values[:1] * 7) == 0
    seen, centre = estimates.student_interval(values, value), fmean(values) if value is None else value
    half = student.isf(0.025, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    expected = (centre, centre - half, centre + half)
    assert (seen.value, seen.low, seen.high) == pytest.approx(expected, rel=1e-7, abs=1e-6)
    assert estimates.student_interval(values[:1]) == Interval(values[0])


@given(st.floats(0.5, 0.999), st.floats(0, 12), st.integers(3, 60), st.floats(0, 1e4))
def test_shift_gives_requested_power(power, critical, df, bound):
    assert nct.sf(critical, df, estimates.shift(power, critical, df)) == pytest.approx(power, abs=1e-5)
    found = estimates.least(lambda x: x >= bound)
    assert bound <= found <= math.nextafter(bound, math.inf) or found <= 5e-324


@given(st.floats(0.001, 0.999), st.integers(1, 200), st.floats(0.05, 12) | st.floats(12, 200))
def test_chi_square_matches_scipy(tail, df, x):
    assert estimates.chi_square_above(tail, df) == pytest.approx(chi2.isf(tail, df), rel=1e-7)
    expected = special.digamma(x), float(special.polygamma(1, x))
    assert estimates.digammas(x) == pytest.approx(expected, rel=0, abs=1e-8)


@given(NUMBERS, st.sampled_from([1, 5, 50, 90, 99]), st.lists(st.none() | st.floats(-1e6, 1e6)))
def test_percentiles_match_standard_library(values, share, some):
    cuts, percentile = quantiles(values, n=100, method="inclusive"), estimates.percentile
    assert percentile(values, share / 100) == pytest.approx(cuts[share - 1], abs=1e-6)
    assert (percentile(values, 0.0), percentile(values, 1.0)) == (min(values), max(values))
    assert percentile([], share / 100) is None
    known = [value for value in some if value is not None]
    assert estimates.mean_of_known(some) == pytest.approx(sum(known) / len(known) if known else None)


@pytest.mark.parametrize(("seen", "cut"), [
    ((0.5, 0.4, 0.6), (0.5, 0.4, 0.6)), ((0.2, -0.3, 0.7), (0.2, 0.0, 0.7)), ((0.9, 0.6, 1.2), (0.9, 0.6, 1.0)),
    ((-0.1, -0.3, 0.1), (-0.1, 0.0, 0.1)), ((-0.1, -0.3, 0.0), (-0.1, 0.0, 0.0)), ((1.1, 1.0, 1.3), (1.1, 1.0, 1.0)),
    ((-0.2, -0.3, -0.1), (-0.2,)), ((1.2, 1.1, 1.3), (1.2,)), ((0.5, 0.1), (0.5,)),
])  # fmt: skip
def test_interval_is_cut_to_range(seen, cut):
    assert estimates.possible(Interval(*seen), most=1.0) == Interval(*cut)


@given(st.lists(st.integers(0, 5)))
def test_groups_keep_first_met_order(values):
    seen = estimates.grouped(enumerate(values), lambda row: row[1])
    assert [*seen] == [*dict.fromkeys(values)]
    assert all(rows == [row for row in enumerate(values) if row[1] == key] for key, rows in seen.items())


@given(st.integers(4, 3000), st.floats(0, 1), st.floats(0, 1), st.floats(1e-4, 0.5))
def test_looks_fall_at_planned_pairs(pairs, share, more, alpha):
    assert {n: looks_until(n) for n in LOOKS} == LOOKS
    looks = looks_until(pairs)
    assert (looks[0], looks[-1]) == (4, pairs) and list(looks) == sorted(set(looks))
    assert all(n % 2 == 0 for n in looks[:-1])  # as many pairs begin with the one side as with the other
    assert spent(share, alpha) <= spent(min(1.0, share + more), alpha) <= alpha * (1 + 1e-12)
    found = [spent(part, 1.0) for part in (0.0, 0.5, 1.0, 1.5)]
    assert found == pytest.approx([0, math.log(1 + (math.e - 1) / 2), 1, 1]), "Pocock's kind"
    assert spent(share, alpha) == pytest.approx(alpha * spent(share, 1.0))


@pytest.mark.parametrize("alpha", [0.01, 0.05])
@pytest.mark.parametrize("most", [4, 5, 12, 18])
def test_each_look_spends_planned_alpha(most, alpha):
    """No boundary is exceeded up to a look with the probability that a normal vector lies below all of them."""
    looks = looks_until(most)
    stops = norm.isf(estimates.tails(looks, most, alpha))
    for k in range(1, len(looks) + 1):
        alike = [[math.sqrt(min(a, b) / max(a, b)) for a in looks[:k]] for b in looks[:k]]
        below = multivariate_normal.cdf(stops[:k], cov=alike, abseps=2e-5, releps=0, rng=1)
        assert 1 - below == pytest.approx(spent(looks[k - 1] / most, alpha / 1.15), rel=5e-3)
    assert boundaries(looks, most, alpha) == pytest.approx(student.isf(norm.sf(stops), [n - 1 for n in looks]))


def test_more_alpha_lowers_boundaries():
    looks = looks_until(12)
    rows = [boundaries(looks, 12, alpha) for alpha in (0.001, 0.01, 0.2)]
    rows += [[-c for c in boundaries(looks, most, 0.01)] for most in (12, 28)]
    for higher, lower in (*pairwise(rows[:3]), rows[3:]):
        assert all(high > low for high, low in zip(higher, lower, strict=True))
    assert [*rows[1]] == sorted(rows[1], reverse=True) and all(c > t_above(0.01, n - 1) for n, c in zip(looks, rows[1]))
    assert boundaries(looks[:2], 12, 0.01) == pytest.approx(rows[1][:2]), "whatever looks are to come"


@estimates.once
def steps(run, more=0):
    """How many there were."""
    ASKED.append(run)
    return len(run.steps) + more if len(run.steps) else None


def test_run_quantity_is_computed_once():
    run, empty = planted_run(4, 100.0), replace(planted_run(4, 100.0), steps=NO_STEPS)
    found = [steps(run), steps(run), steps(run, 1), steps(run, more=1), steps(empty), steps(empty)]
    n = len(run.steps)
    assert found == [n, n, n + 1, n + 1, None, None], "that there is nothing is an answer too"
    assert [run, run, run, empty] == ASKED and steps.__doc__ == "How many there were."
    assert window_trace(run) is window_trace(run)
    assert run.derived and run == planted_run(4, 100.0) and "derived" not in repr(run)
