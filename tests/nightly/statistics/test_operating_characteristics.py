"""How often the gate is right over thousands of gates of each kind: planted changes, and noise, judged as a run
judges them.

Every number is from gates that look after 4, 6, 8 and 12 pairs and end when the outcome is known. Bounds are exact
binomial ones: `most(n, p)` is what a true rate of p exceeds in one of a thousand such tests, `fewest(n, p)` what it
falls short of as rarely. "Shown" is a rate whose count is below `fewest`: a true rate of p would have been noticed.
"Allowed" is one whose count is not above `most`: of 10,000 gates and p = 1 % that is 132, and a true rate of 1.7 %
would be noticed in 99 of 100 such tests."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from gate_sessions import (
    ALARMS,
    DIRECTIONS,
    DRIFT,
    HOSTS,
    MISSES,
    SECOND,
    SLOWER,
    TERMS,
    UNCHANGED,
    Planted,
    fewest,
    heavy,
    looked_at,
    many,
    most,
    session,
)

from pytest_slmserve.analysis.gate.decision import PairSeries, gate
from pytest_slmserve.analysis.verdict import State

PASS, FAIL = State.PASSES, State.FAILS
GATES = 10_000
SDS = pytest.mark.parametrize("sd", [0.01, 0.02])
EACH_HOST = pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)


# An unchanged candidate


@SDS
def test_one_unchanged_endpoint_fails_in_less_than_one_of_a_hundred_gates(sd):
    """Shown."""
    seen = many(Planted(sd=sd), GATES)
    assert seen.outcomes[FAIL] < fewest(GATES, ALARMS) and seen.outcomes[PASS] > 0.98 * GATES


@pytest.mark.parametrize(("sd", "passed", "seed"), [(0.01, 0.99, 1), (0.02, 0.95, 2)])
def test_four_unchanged_endpoints_fail_in_less_than_one_of_a_hundred_gates(sd, passed, seed):
    """Shown."""
    seen = many(Planted(sd=sd, worse=UNCHANGED), GATES, seed=seed)
    assert seen.outcomes[FAIL] < fewest(GATES, ALARMS) and seen.outcomes[PASS] > passed * GATES


@SDS
@EACH_HOST
def test_an_unchanged_candidate_seldom_fails_on_a_host_of_this_kind(sd, host):
    """Allowed."""
    seen = many(Planted(sd=sd, **host), GATES)
    assert seen.outcomes[FAIL] <= most(GATES, ALARMS) and seen.outcomes[PASS] > 0.95 * GATES


@pytest.mark.parametrize("sd", [0.001, 0.005])
@pytest.mark.parametrize("second", [-0.03, 0.03])
def test_a_place_that_is_worse_than_the_noise_favours_no_side(sd, second):
    """It is balanced at each look, and only widens the spread."""
    unchanged, at_margin = (many(Planted(sd=sd, worse=(worse,), second=second), 2000) for worse in (0.0, 0.03))
    assert unchanged.outcomes[FAIL] == 0 == at_margin.outcomes[PASS]


@pytest.mark.parametrize("common", [0.5, 0.9])
def test_correlated_endpoints_seldom_fail(common):
    """Allowed."""
    seen = many(Planted(sd=0.02, worse=UNCHANGED, common=common), GATES)
    assert seen.outcomes[FAIL] <= most(GATES, ALARMS) and seen.outcomes[PASS] > 0.95 * GATES


def test_all_of_it_at_once_seldom_fails():
    """Allowed."""
    everything = Planted(sd=0.02, worse=UNCHANGED, noise=heavy, common=0.5, drift=DRIFT, second=SECOND)
    assert many(everything, GATES).outcomes[FAIL] <= most(GATES, ALARMS)


# A worse candidate


@SDS
def test_five_percent_are_found_in_99_of_100_gates(sd):
    """Shown: fewer are missed than a true share of one in a hundred would be."""
    seen = many(Planted(sd=sd, worse=(0.05,)), GATES)
    assert GATES - seen.outcomes[FAIL] < fewest(GATES, MISSES) and seen.outcomes[PASS] <= 0.0015 * GATES


@SDS
@EACH_HOST
def test_five_percent_are_found_on_a_host_of_this_kind(sd, host):
    """Allowed."""
    seen = many(Planted(sd=sd, worse=(0.05,), **host), GATES)
    assert GATES - seen.outcomes[FAIL] <= most(GATES, MISSES) and seen.outcomes[PASS] <= 0.001 * GATES


@pytest.mark.parametrize(("sd", "common"), [(0.01, 0.0), (0.02, 0.0), (0.02, 0.9)])
def test_five_percent_in_one_of_four_endpoints_are_found_and_nothing_else(sd, common):
    """Allowed; of the others no more than of all gates of an unchanged candidate."""
    seen = many(Planted(sd=sd, worse=SLOWER, common=common), 2000)
    assert 2000 - seen.fails["endpoint 0"] <= most(2000, MISSES)
    assert seen.fails.total() - seen.fails["endpoint 0"] <= most(2000, ALARMS)


@pytest.mark.parametrize(("sd", "caught"), [(0.01, 0.98), (0.02, 0.88)])
def test_at_the_margin_it_fails_mostly_and_passes_at_most_as_often_as_beta(sd, caught):
    """Shown, both."""
    seen = many(Planted(sd=sd, worse=(0.03,)), GATES)
    assert GATES - seen.outcomes[FAIL] < fewest(GATES, 1 - caught)
    assert seen.outcomes[PASS] < fewest(GATES, TERMS.beta)


@EACH_HOST
def test_at_the_margin_it_passes_at_most_as_often_as_beta_on_a_host_of_this_kind(host):
    """Shown."""
    assert many(Planted(sd=0.02, worse=(0.03,), **host), GATES).outcomes[PASS] < fewest(GATES, TERMS.beta)


@pytest.mark.parametrize("worse", [(0.03, 0.0, 0.0, 0.0), (0.03,) * 4], ids=["one", "all"])
def test_at_the_margin_four_endpoints_pass_at_most_as_often_as_beta(worse):
    """Allowed, for all have to pass."""
    assert many(Planted(sd=0.02, worse=worse), 2000).outcomes[PASS] <= most(2000, TERMS.beta)


@pytest.mark.parametrize("sd", [0.01, 0.02])
@pytest.mark.parametrize("n", [4, 6, 12])
def test_what_is_told_to_be_detectable_is_found_in_nine_of_ten_gates(sd, n):
    """Allowed, on both sides; half of it is found in less than half of the gates."""
    told = gate([of_noise(sd, n, name) for name in "abcd"], TERMS)[0].detectable
    found = {worse: one_of_four(sd, n, worse) for worse in (told, told / 2)}
    assert 1000 - most(1000, 0.13) <= found[told] <= most(1000, 0.93) and found[told / 2] < 500


def of_noise(sd: float, n: int, name: str) -> PairSeries:
    """Pairs that are not worse, with this standard deviation."""
    far = sd * math.sqrt((n - 1) / n)
    return PairSeries(name, "lower", tuple((1.0, math.exp(far if i % 2 else -far)) for i in range(n)))


def one_of_four(sd: float, n: int, worse: float) -> int:
    """Gates of n pairs, of 1000, in which the one endpoint fails that is worse."""
    chance, planted = random.Random(11), Planted(sd=sd, worse=(worse, 0.0, 0.0, 0.0))
    gates = (gate(session(planted, chance, n, DIRECTIONS), TERMS) for _ in range(1000))
    return sum(found[0].outcome is FAIL for found in gates)


@pytest.mark.parametrize(("sd", "caught"), [(0.01, 0.95), (0.02, 0.70)])
def test_at_the_margin_one_of_four_endpoints_is_found_as_often_as_the_docs_say(sd, caught):
    """Shown."""
    seen = many(Planted(sd=sd, worse=(0.03, 0.0, 0.0, 0.0)), 800)
    assert 800 - seen.fails["endpoint 0"] < fewest(800, 1 - caught)


@pytest.mark.parametrize(("sd", "worse"), [(0.01, 0.0), (0.02, 0.015), (0.03, 0.03)])
def test_intervals_contain_the_true_ratio_as_often_as_the_docs_say(sd, worse):
    chance, contained = random.Random(5), list[bool]()
    failed = list[bool]()
    for _ in range(1500):
        outcome, _, (found,) = looked_at(session(Planted(sd=sd, worse=(worse,)), chance, 12, ("lower",)), TERMS)
        contained.append(found.ratio.low <= 1 + worse <= found.ratio.high)
        failed += contained[-1:] if outcome is FAIL else []
    assert fewest(1500, 0.92) <= sum(contained) <= most(1500, 0.95)
    assert worse != 0.015 or fewest(len(failed), 0.86) <= sum(failed) <= most(len(failed), 0.86)


def test_clear_cases_end_early():
    assert many(Planted(sd=0.01), 500).pairs < 4.3 and many(Planted(sd=0.01, worse=(0.05,)), 500).pairs < 4.4


# Directions


@pytest.mark.parametrize("sd", [0.01, 0.02])
@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_better_candidate_never_fails_and_in_the_wrong_direction_never_passes(sd, better):
    chance, wrong = random.Random(5), {"higher": "lower", "lower": "higher"}[better]
    for _ in range(800):
        series = session(Planted(sd=sd, worse=(1 / 1.05 - 1,)), chance, 12, (better,))
        assert looked_at(series, TERMS)[0] is PASS
        assert looked_at([replace(each, better=wrong) for each in series], TERMS)[0] is not PASS


def test_among_unchanged_endpoints_one_in_the_wrong_direction_is_never_overlooked():
    chance = random.Random(6)
    for _ in range(150):
        series = session(Planted(sd=0.01, worse=(1 / 1.05 - 1, 0.0, 0.0, 0.0)), chance, 12, DIRECTIONS)
        turned = [replace(series[0], better="lower"), *series[1:]]
        assert looked_at(series, TERMS)[0] is PASS and looked_at(turned, TERMS)[0] is FAIL
