"""How often a gate is right, at 300 gates of each kind of host and of change: counts within the exact binomial bounds
of what docs/gate-decision.md promises. `tests/nightly/statistics` has the same over thousands of gates."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import gate_sessions as made
import pytest
from gate_sessions import DRIFT, HOSTS, SECOND, TAIL, TERMS, UNCHANGED, Planted, session

from pytest_slmserve.analysis.gate.decision import PairSeries, gate
from pytest_slmserve.analysis.verdict import State

PASS, FAIL, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
GATES = 300
ALARMS, MISSES = (made.most(GATES, share) for share in (made.ALARMS, made.MISSES))


@pytest.mark.parametrize(("n", "p"), [(1500, 0.01), (5000, 0.01), (300, 0.05)])
def test_the_bounds_are_those_of_the_binomial(n, p):
    def up_to(k: int) -> float:
        return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    most, fewest = made.most(n, p), made.fewest(n, p)
    assert 1 - up_to(most) <= TAIL < 1 - up_to(most - 1) and up_to(fewest - 1) <= TAIL < up_to(fewest)


def test_planted_noise_is_what_it_says_and_drift_and_place_favour_no_side_at_any_look():
    for noise in ({}, {"noise": made.heavy}, {"common": 0.9}):
        (series,) = session(Planted(sd=0.02, **noise), random.Random(3), 2000, ("lower",))
        assert math.sqrt(fmean(math.log(b / a) ** 2 for a, b in series.pairs)) == pytest.approx(0.02, rel=0.15)
    (series,) = session(Planted(sd=0.0, drift=DRIFT, second=SECOND), random.Random(3), 12, ("lower",))
    logs = [math.log(b / a) for a, b in series.pairs]
    assert all(abs(math.fsum(logs[:n])) < 1e-9 for n in (4, 6, 8, 12)) and max(logs) > 0.01


FOUR = {"worse": UNCHANGED}
UNLIKELY = {"noise": made.heavy, "common": 0.5, "drift": DRIFT, "second": SECOND}
BETA, MOSTLY = made.most(GATES, TERMS.beta), math.ceil(0.95 * GATES)


@pytest.mark.parametrize(("planted", "fails", "passes"), [
    *((host, (0, ALARMS), (MOSTLY, GATES)) for host in (*HOSTS.values(), FOUR, {**FOUR, "common": 0.9})),
    ({**FOUR, **UNLIKELY}, (0, ALARMS), (0, GATES)),
    *(({"worse": (0.05,), **host}, (GATES - MISSES, GATES), (0, 1)) for host in ({}, *HOSTS.values())),
    ({"worse": made.SLOWER}, (GATES - MISSES, GATES), (0, 1)),
    *(({"worse": worse}, (GATES // 2, GATES), (0, BETA)) for worse in ((0.03,), (0.03, 0.0, 0.0, 0.0))),
])  # fmt: skip
def test_of_300_gates_so_many_fail_and_pass(planted, fails, passes):
    """Unchanged, one seldom fails and mostly passes; 5 % are found; at the margin no more than beta pass."""
    seen = made.many(Planted(sd=0.02, **planted), GATES)
    assert fails[0] <= seen.outcomes[FAIL] <= fails[1] and passes[0] <= seen.outcomes[PASS] <= passes[1]
    assert seen.fails.total() - seen.fails["endpoint 0"] <= ALARMS, "of the others none is worse"


QUIET = session(Planted(sd=0.001, worse=UNCHANGED), random.Random(8), 12, made.DIRECTIONS)


def with_gap(series: PairSeries, at: int, value: float | None, side: int) -> PairSeries:
    baseline, candidate = series.pairs[at]
    gap = (baseline, value) if side else (value, candidate)
    return replace(series, pairs=(*series.pairs[:at], gap, *series.pairs[at + 1 :]))


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize("side", [0, 1], ids=["baseline", "candidate"])
@pytest.mark.parametrize("at", [0, 3, 11])
def test_a_value_that_is_missing_never_passes(value, side, at):
    """Wherever it is, and after the endpoint would have passed too."""
    found = gate([with_gap(QUIET[0], at, value, side), *QUIET[1:]], TERMS)
    assert [(each.outcome, each.decided_at) for each in found] == [(INCONCLUSIVE, None), *[(PASS, 4)] * 3]


@pytest.mark.parametrize("at", range(12))
def test_a_run_with_a_gap_never_ends_as_passed_nor_saves_a_gap_from_failing(at):
    """A run that had passed or failed before the gap has ended before it."""
    outcome, pairs, _ = made.looked_at([with_gap(QUIET[0], at, None, 1), *QUIET[1:]], TERMS)
    assert (outcome, pairs) == ((INCONCLUSIVE, 12) if at < 4 else (PASS, 4))
    slow = replace(QUIET[1], pairs=tuple((a, made.measured(0.2, "lower")) for a, _ in QUIET[1].pairs))
    assert at < 4 or gate([with_gap(slow, at, None, 1)], TERMS)[0].outcome is FAIL
