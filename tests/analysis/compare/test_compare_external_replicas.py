"""Several engines beside the best of one: which are compared, and what is never chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import served
from strategies import rates

from pytest_slmserve.analysis.compare.deployments import EngineSet, ReplicaComparison, compare
from pytest_slmserve.schema.errors import TooFewPoints

CHUNKED, PLAIN = (("chunked", "yes"),), (("chunked", "no"),)


def engines(replicas: int, limit: int, *throughput: float, lost: float = 0.0, **facts: object) -> EngineSet:
    point = served(replicas * limit, throughput, [1e-4 * limit for _ in throughput], lost)
    return replace(EngineSet(replicas=replicas, limit=limit, point=point), **facts)


def preempted(sets: EngineSet, lost: float) -> EngineSet:
    return replace(sets, point=served(sets.total, sets.rates, [one.e2e_s for one in sets.point.each], lost))


ONE, TWO = engines(1, 256, 1000.0), engines(2, 128, 1300.0)


@st.composite
def any_sets(draw: st.DrawFn) -> list[EngineSet]:
    """At least one engine that counts, and several; all else as it may be."""
    knobs, settings = st.sampled_from([32, 64, 128, 256]), st.sampled_from([(), CHUNKED, PLAIN])
    one, several = draw(st.tuples(st.just(1), knobs, settings)), draw(st.tuples(st.integers(2, 4), knobs, settings))
    others = draw(st.lists(st.tuples(st.integers(1, 4), knobs, settings), max_size=8))
    found = []
    for place in dict.fromkeys([one, several, *others]):
        replicas, knob, words = place
        repeats = draw(st.lists(rates(), min_size=1, max_size=3))
        lost, counts = (0.0, True) if place == one else draw(st.tuples(st.sampled_from([0.0, 3.0]), st.booleans()))
        found.append(engines(replicas, knob, *repeats, settings=words, lost=lost, eligible=counts))
    return found


def gains(found: ReplicaComparison) -> list[float]:
    """All numbers that say how much more there is."""
    seen = [i for row in found.rows for i in (row.gain, row.at_equal_total)] + [gain for _, gain in found.others]
    return [end for i in seen if i is not None for end in (i.value, i.low, i.high) if end is not None]


def test_the_best_of_several_over_the_best_of_one():
    found = compare([engines(1, 96, 900.0), ONE, TWO, engines(4, 64, 1250.0)])
    assert found.baseline == ONE and found.best is not None and found.best.engines == TWO
    assert found.gain is not None and found.gain.value == pytest.approx(0.3) and found.gain.low is None
    assert found.best.latency is not None and found.best.latency.value == pytest.approx(0.5)


def test_the_best_of_several_is_corrected_for_having_been_chosen():
    found = compare([engines(n, 256 // n, 1000.0 + 100 * (n == 2), 1010.0 + 100 * (n == 2)) for n in (1, 2, 4)])
    assert found.best is found.rows[1]
    wide, plain = (math.log1p(row.gain.high) - math.log1p(row.gain.low) for row in found.rows[1:])
    assert wide > 1.3 * plain, "half of the probability outside"


def test_the_baseline_is_compared_with_nothing():
    [own] = [row for row in compare([ONE, TWO]).rows if row.engines == ONE]
    assert own.gain is None and own.latency is None and own.at_equal_total is None


def test_the_gain_at_equal_total_needs_one_engine_of_that_limit_that_counts():
    larger = engines(1, 512, 1100.0)
    [equal] = [row.at_equal_total for row in compare([ONE, larger, TWO]).rows if row.engines == TWO]
    assert equal is not None and equal.value == pytest.approx(0.3)
    for useless in (preempted(ONE, 1.0), replace(ONE, eligible=False), replace(ONE, limit=255)):
        [equal] = [row.at_equal_total for row in compare([useless, larger, TWO]).rows if row.engines == TWO]
        assert equal is None


def test_what_preempted_is_compared_and_not_chosen():
    lost = engines(4, 128, 2000.0, lost=178.0)
    found = compare([ONE, TWO, lost, engines(1, 512, 1500.0, lost=1.0)])
    assert found.baseline == ONE and found.best is not None and found.best.engines == TWO
    [gain] = [row.gain for row in found.rows if row.engines == lost]
    assert gain is not None and gain.value == pytest.approx(1.0)


def test_all_of_several_preempted():
    found = compare([ONE, preempted(TWO, 2.0)])
    assert found.best is None and found.gain is None and found.others == ()


def test_repeats_give_intervals_by_the_pooled_noise():
    repeated = engines(1, 256, 990.0, 1000.0, 1010.0)
    alone = compare([repeated, TWO]).gain
    assert alone is not None and alone.low is not None and alone.high is not None
    assert alone.low < alone.value < alone.high and alone.value == pytest.approx(0.3)
    both = compare([repeated, engines(2, 128, 1287.0, 1300.0, 1313.0)]).gain
    assert both is not None and both.low is not None and alone.low < both.low < both.value


def test_noise_tells_what_is_alike():
    near, far = engines(4, 64, 1295.0, 1285.0), engines(4, 32, 1100.0, 1110.0)
    found = compare([engines(1, 256, 990.0, 1010.0), engines(2, 128, 1290.0, 1310.0), near, far])
    assert found.alike == (near,)
    assert compare([ONE, TWO, engines(4, 64, 1299.0)]).alike == (), "without repeats nothing can be said"


def test_other_baselines_are_the_best_of_each_other_setting():
    chunked = [engines(1, knob, rate, settings=CHUNKED) for knob, rate in ((256, 1100.0), (512, 1200.0))]
    lost = engines(1, 768, 1250.0, settings=CHUNKED, lost=1.0)
    plain = replace(ONE, settings=PLAIN)
    found = compare([*(replace(s, eligible=False) for s in chunked), lost, plain, replace(TWO, settings=PLAIN)])
    [(other, gain)] = found.others
    assert found.baseline == plain and other.limit == 512 and gain.value == pytest.approx(1300 / 1200 - 1)
    barred = [replace(s, eligible=False, alternative=False) for s in chunked]
    assert compare([*barred, plain, TWO]).others == ()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([], "there is no row of one engine to compare several with"),
        ([TWO], "there is no row of one engine to compare"),
        ([preempted(ONE, 1.0), TWO], "no row of one engine without preemption \\(1 with\\)"),
        ([ONE], "there is no row of several engines"),
    ],
)
def test_one_side_is_missing(sets, words):
    with pytest.raises(TooFewPoints, match=words):
        compare(sets)


@given(any_sets(), st.randoms(use_true_random=False))
def test_order_does_not_matter(sets, chance):
    shuffled = list(sets)
    chance.shuffle(shuffled)
    assert compare(shuffled) == compare(sets)


def scaled(sets: EngineSet, factor: float) -> EngineSet:
    lost = float(sets.point.problems[0].split()[0]) if sets.preempted else 0.0
    return replace(
        sets,
        point=served(sets.total, [factor * rate for rate in sets.rates], [one.e2e_s for one in sets.point.each], lost),
    )


@given(any_sets(), st.integers(-20, 20))
def test_the_unit_of_throughput_changes_no_gain(sets, power):
    """Powers of two: nothing is rounded, so that equal ones stay equal."""
    larger = [scaled(s, 2.0**power) for s in sets]
    first, second = compare(sets), compare(larger)
    assert gains(first) == pytest.approx(gains(second), rel=1e-6, abs=1e-9)
    chosen = [(s.best and (s.best.engines.replicas, s.best.engines.limit), s.baseline.limit) for s in (first, second)]
    assert chosen[0] == chosen[1]


@given(any_sets())
def test_nothing_that_preempted_is_ever_chosen(sets):
    found = compare(sets)
    assert not found.baseline.preempted and found.baseline.eligible and found.baseline.replicas == 1
    assert not any(s.preempted for s, _ in found.others) and not any(s.preempted for s in found.alike)
    several = [s for s in sets if s.replicas > 1 and not s.preempted]
    assert (found.best is None) == (not several)
    if found.best:
        assert found.best.engines in several and found.best.engines.rate == max(s.rate for s in several)
