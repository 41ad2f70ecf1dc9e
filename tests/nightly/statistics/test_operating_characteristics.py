"""How often the gate is right: planted changes, and noise of several kinds, judged by the gate as a run judges them.

Every number is from gates that look after 4, 6, 8 and 12 pairs and end when the outcome is known. Bounds are exact
binomial ones: `most(n, p)` is what a true rate of p exceeds in one of a thousand such tests, `fewest(n, p)` what it
falls short of as rarely. "Shown" is a rate whose count is below `fewest`: a true rate of p would have been noticed.
"Allowed" is one whose count is not above `most`: of 1500 gates and p = 1 % that is 28, and a true rate of 3 % would be
noticed in 99 of 100 such tests.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from gate_sessions import DIRECTIONS, Planted, first, heavy, looked_at, many, measured, session

from pytest_slmserve.analysis.gate.decision import GateCriteria, Pair, PairSeries, gate, next_look
from pytest_slmserve.analysis.verdict import State, all_of

PASS, FAIL, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
TAIL = 0.001
ALARMS, MISSES = 0.01, 0.01
UNCHANGED, SLOWER = (0.0,) * 4, (0.05, 0.0, 0.0, 0.0)
DRIFT, SECOND = 0.03, 0.01
HOSTS = {
    "heavy tails": {"noise": heavy},
    "drift": {"drift": DRIFT},
    "second is worse": {"second": SECOND},
    "drift, second is worse": {"drift": DRIFT, "second": SECOND},
}


def probability(n: int, p: float, k: int) -> float:
    logs = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(logs + k * math.log(p) + (n - k) * math.log1p(-p))


def most(n: int, p: float) -> int:
    """The smallest count that is exceeded with a probability of TAIL at most."""
    k, below = 0, probability(n, p, 0)
    while 1 - below > TAIL:
        k += 1
        below += probability(n, p, k)
    return k


def fewest(n: int, p: float) -> int:
    """The largest count that is not reached with a probability of TAIL at most."""
    k, below = 0, 0.0
    while below + probability(n, p, k) <= TAIL:
        below += probability(n, p, k)
        k += 1
    return k


def test_the_limits_are_those_of_the_binomial():
    def up_to(n, p, k):
        return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    for n, p in ((1500, 0.01), (5000, 0.01), (300, 0.05)):
        assert 1 - up_to(n, p, most(n, p)) <= TAIL < 1 - up_to(n, p, most(n, p) - 1)
        assert up_to(n, p, fewest(n, p) - 1) <= TAIL < up_to(n, p, fewest(n, p))
    assert most(1500, 0.01) == 28 and up_to(1500, 0.03, 28) < 0.01 and fewest(100, 0.01) == 0


def test_the_driver_looks_at_the_planned_pairs():
    looks, done = [], 0
    while (done := next_look(done, GateCriteria()) or 0) and len(looks) < 9:
        looks.append(done)
    assert looks == [4, 6, 8, 12]


def test_planted_noise_is_what_it_says():
    for noise in ({}, {"noise": heavy}, {"common": 0.9}):
        (series,) = session(Planted(sd=0.02, **noise), random.Random(3), 4000, ("lower",))
        logs = [math.log(b / a) for a, b in series.pairs]
        assert math.sqrt(math.fsum(x * x for x in logs) / len(logs)) == pytest.approx(0.02, rel=0.15)


def test_planted_drift_and_place_favour_no_side_at_any_look():
    (series,) = session(Planted(sd=0.0, drift=DRIFT, second=SECOND), random.Random(3), 12, ("lower",))
    logs = [math.log(b / a) for a, b in series.pairs]
    assert all(abs(math.fsum(logs[:n])) < 1e-9 for n in (4, 6, 8, 12)) and max(logs) > 0.01


# An unchanged candidate


@pytest.mark.parametrize(("sd", "gates"), [(0.01, 1500), (0.02, 5000)])
def test_one_unchanged_endpoint_fails_in_less_than_one_of_a_hundred_gates(sd, gates):
    """Shown."""
    seen = many(Planted(sd=sd), gates)
    assert seen.outcomes[FAIL] < fewest(gates, ALARMS)
    assert seen.outcomes[PASS] > 0.98 * gates


def test_four_unchanged_endpoints_with_little_noise_fail_in_less_than_one_of_a_hundred_gates():
    """Shown."""
    seen = many(Planted(sd=0.01, worse=UNCHANGED), 1000)
    assert seen.outcomes[FAIL] < fewest(1000, ALARMS) and seen.outcomes[PASS] > 0.99 * 1000


def test_four_unchanged_endpoints_seldom_fail():
    """Allowed."""
    seen = many(Planted(sd=0.02, worse=UNCHANGED), 1000)
    assert seen.outcomes[FAIL] <= most(1000, ALARMS) and seen.outcomes[PASS] > 0.95 * 1000


def test_four_unchanged_endpoints_fail_in_less_than_one_of_a_hundred_gates():
    """Shown."""
    seen = many(Planted(sd=0.02, worse=UNCHANGED), 10_000, seed=2)
    assert seen.outcomes[FAIL] < fewest(10_000, ALARMS)


@pytest.mark.parametrize("sd", [0.01, 0.02])
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_an_unchanged_candidate_seldom_fails_on_a_host_of_this_kind(sd, host):
    """Allowed."""
    seen = many(Planted(sd=sd, **host), 1500)
    assert seen.outcomes[FAIL] <= most(1500, ALARMS) and seen.outcomes[PASS] > 0.95 * 1500


@pytest.mark.parametrize("sd", [0.001, 0.005])
@pytest.mark.parametrize("second", [-0.03, 0.03])
def test_a_place_that_is_worse_than_the_noise_favours_no_side(sd, second):
    """It is balanced at each look, and only widens the spread."""
    unchanged, at_margin = (many(Planted(sd=sd, worse=(worse,), second=second), 200) for worse in (0.0, 0.03))
    assert unchanged.outcomes[FAIL] == 0 == at_margin.outcomes[PASS]


@pytest.mark.parametrize("common", [0.5, 0.9])
def test_correlated_endpoints_seldom_fail(common):
    """Allowed."""
    seen = many(Planted(sd=0.02, worse=UNCHANGED, common=common), 600)
    assert seen.outcomes[FAIL] <= most(600, ALARMS) and seen.outcomes[PASS] > 0.95 * 600


def test_all_of_it_at_once_seldom_fails():
    """Allowed."""
    everything = Planted(sd=0.02, worse=UNCHANGED, noise=heavy, common=0.5, drift=DRIFT, second=SECOND)
    assert many(everything, 400).outcomes[FAIL] <= most(400, ALARMS)


# A worse candidate


@pytest.mark.parametrize("sd", [0.01, 0.02])
def test_five_percent_are_found_in_99_of_100_gates(sd):
    """Shown: fewer are missed than a true share of one in a hundred would be."""
    seen = many(Planted(sd=sd, worse=(0.05,)), 2000)
    assert 2000 - seen.outcomes[FAIL] < fewest(2000, MISSES) and seen.outcomes[PASS] <= 3


@pytest.mark.parametrize("sd", [0.01, 0.02])
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_five_percent_are_found_on_a_host_of_this_kind(sd, host):
    """Allowed."""
    seen = many(Planted(sd=sd, worse=(0.05,), **host), 1000)
    assert 1000 - seen.outcomes[FAIL] <= most(1000, MISSES) and seen.outcomes[PASS] <= 1


@pytest.mark.parametrize(("sd", "common"), [(0.01, 0.0), (0.02, 0.0), (0.02, 0.9)])
def test_five_percent_in_one_of_four_endpoints_are_found_and_nothing_else(sd, common):
    """Allowed; of the others no more than of all gates of an unchanged candidate."""
    seen = many(Planted(sd=sd, worse=SLOWER, common=common), 500)
    assert 500 - seen.fails["endpoint 0"] <= most(500, MISSES)
    assert sum(count for name, count in seen.fails.items() if name != "endpoint 0") <= most(500, ALARMS)


@pytest.mark.parametrize(("sd", "caught"), [(0.01, 0.98), (0.02, 0.88)])
def test_at_the_margin_it_fails_mostly_and_passes_at_most_as_often_as_beta(sd, caught):
    """Shown, both."""
    seen = many(Planted(sd=sd, worse=(0.03,)), 2500)
    assert 2500 - seen.outcomes[FAIL] < fewest(2500, 1 - caught)
    assert seen.outcomes[PASS] < fewest(2500, GateCriteria().beta)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_at_the_margin_it_passes_at_most_as_often_as_beta_on_a_host_of_this_kind(host):
    """Shown."""
    seen = many(Planted(sd=0.02, worse=(0.03,), **host), 800)
    assert seen.outcomes[PASS] < fewest(800, GateCriteria().beta)


@pytest.mark.parametrize("worse", [(0.03, 0.0, 0.0, 0.0), (0.03,) * 4], ids=["one", "all"])
def test_at_the_margin_four_endpoints_pass_at_most_as_often_as_beta(worse):
    """Allowed, for all have to pass."""
    assert many(Planted(sd=0.02, worse=worse), 300).outcomes[PASS] <= most(300, GateCriteria().beta)


@pytest.mark.parametrize("sd", [0.01, 0.02])
@pytest.mark.parametrize("n", [4, 6, 12])
def test_what_is_told_to_be_detectable_is_found_in_nine_of_ten_gates_in_one_of_four_endpoints(sd, n):
    """Allowed, on both sides; half of it is found in less than half of the gates."""
    told = gate([of_noise(sd, n, name) for name in "abcd"], GateCriteria())[0].detectable
    found = {worse: one_of_four(sd, n, worse) for worse in (told, told / 2)}
    assert 1000 - most(1000, 0.13) <= found[told] <= most(1000, 0.93) and found[told / 2] < 500


def of_noise(sd: float, n: int, name: str) -> PairSeries:
    """Pairs that are not worse, with this standard deviation."""
    far = sd * math.sqrt((n - 1) / n)
    return PairSeries(name, "lower", tuple((1.0, math.exp(far if i % 2 else -far)) for i in range(n)))


def one_of_four(sd: float, n: int, worse: float) -> int:
    """Gates of n pairs, of 1000, in which the one endpoint fails that is worse."""
    chance, planted = random.Random(11), Planted(sd=sd, worse=(worse, 0.0, 0.0, 0.0))
    gates = (gate(session(planted, chance, n, DIRECTIONS), GateCriteria()) for _ in range(1000))
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
        outcome, _, (found,) = looked_at(
            session(Planted(sd=sd, worse=(worse,)), chance, 12, ("lower",)), GateCriteria()
        )
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
        assert looked_at(series, GateCriteria())[0] is PASS
        assert looked_at([replace(each, better=wrong) for each in series], GateCriteria())[0] is not PASS


def test_among_unchanged_endpoints_the_one_in_the_wrong_direction_is_never_overlooked():
    chance = random.Random(6)
    for _ in range(150):
        series = session(Planted(sd=0.01, worse=(1 / 1.05 - 1, 0.0, 0.0, 0.0)), chance, 12, DIRECTIONS)
        turned = [replace(series[0], better="lower"), *series[1:]]
        assert looked_at(series, GateCriteria())[0] is PASS and looked_at(turned, GateCriteria())[0] is FAIL


# What is missing

ABSENT = (None, math.nan, math.inf, -math.inf, 0.0, -1.0)
QUIET = session(Planted(sd=0.001, worse=UNCHANGED), random.Random(8), 12, DIRECTIONS)


def with_gap(series: PairSeries, at: int, value: float | None, side: int) -> PairSeries:
    baseline, candidate = series.pairs[at]
    gap: Pair = (baseline, value) if side else (value, candidate)
    return replace(series, pairs=(*series.pairs[:at], gap, *series.pairs[at + 1 :]))


def test_without_a_gap_it_passes_at_the_first_look():
    assert [each.decided_at for each in gate(QUIET, GateCriteria()) if each.outcome is PASS] == [4] * 4


@pytest.mark.parametrize("value", ABSENT)
@pytest.mark.parametrize("side", [0, 1], ids=["baseline", "candidate"])
def test_a_value_that_is_missing_never_passes(value, side):
    """Wherever it is, and after the endpoint would have passed too."""
    for at in range(12):
        gappy = [with_gap(QUIET[0], at, value, side), *QUIET[1:]]
        found = gate(gappy, GateCriteria())
        assert [each.outcome for each in found] == [INCONCLUSIVE, PASS, PASS, PASS]
        assert all_of([each.outcome for each in found]) is INCONCLUSIVE
        assert f"pair {at + 1} has no value" in found[0].why and found[0].decided_at is None


@pytest.mark.parametrize("at", range(12))
def test_a_run_with_a_gap_never_ends_as_passed(at):
    """A run that had passed before the gap has ended before it."""
    gappy = [with_gap(QUIET[0], at, None, 1), *QUIET[1:]]
    outcome, pairs, _ = looked_at(gappy, GateCriteria())
    assert (outcome, pairs) == ((INCONCLUSIVE, 12) if at < 4 else (PASS, 4))


def test_a_gap_saves_nobody_from_failing():
    slow = [replace(each, pairs=tuple((a, measured(0.2, "lower")) for a, _ in each.pairs)) for each in QUIET[1:2]]
    for at in range(4, 12):
        assert gate([with_gap(slow[0], at, None, 1)], GateCriteria())[0].outcome is FAIL


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_too_few_pairs_never_pass(n):
    assert {each.outcome for each in gate(first(QUIET, n), GateCriteria())} == {INCONCLUSIVE}
