"""How often the gate is right over thousands of gates of each kind: planted changes, and noise, judged as a run
judges them. And how often intervals of differences cover the truth, and how much of alpha the looks spend, over
hundreds of thousands of drawn samples; the same against closed forms is in `tests/unit/analysis`.

Every number is from gates that look after 4, 6, 8 and 12 pairs and end when the outcome is known. Bounds are exact
binomial ones: `most(n, p)` is what a true rate of p exceeds in one of a thousand such tests, `fewest(n, p)` what it
falls short of as rarely. "Shown" is a rate whose count is below `fewest`: a true rate of p would have been noticed.
"Allowed" is one whose count is not above `most`: of 10,000 gates and p = 1% that is 132, and a true rate of 1.7%
would be noticed in 99 of 100 such tests."""

import math
import random
from dataclasses import replace
from functools import lru_cache, partial

import gate_sessions as gates
import numpy
import pytest
from gate_sessions import ALARMS, DIRECTIONS, HOSTS, MISSES, TERMS, UNCHANGED, Planted, fewest, looked_at, many, most

from pytest_slmserve.analysis.estimates import Differences, Repeat, boundaries, looks_until, spent, t_above
from pytest_slmserve.analysis.gate.decision import PairSeries, gate
from pytest_slmserve.analysis.verdict import State

PASS, FAIL = State.PASSES, State.FAILS
SDS = (0.01, 0.02)
ALL_OF_IT = {"noise": gates.heavy, "common": 0.5, "drift": gates.DRIFT, "second": gates.SECOND}


def shown(p):
    return lambda n: range(fewest(n, p))


def allowed(p):
    return lambda n: range(most(n, p) + 1)


def over(share):
    return lambda n: range(int(share * n) + 1, n + 1)


def up_to(share):
    return lambda n: range(int(share * n) + 1)


# What is planted, how many gates, and bounds on how many end so. missed: they do not fail; first, others: endpoints.
@pytest.mark.parametrize(("planted", "number", "bounds"), [
    # An unchanged candidate
    *(({"sd": sd}, 10_000, {"fail": shown(ALARMS), "pass": over(0.98)}) for sd in SDS),
    ({"sd": 0.01, "worse": UNCHANGED}, 10_000, {"fail": shown(ALARMS), "pass": over(0.99)}),
    ({"sd": 0.02, "worse": UNCHANGED, "seed": 2}, 10_000, {"fail": shown(ALARMS), "pass": over(0.95)}),
    *(({"sd": sd, **host}, 10_000, {"fail": allowed(ALARMS), "pass": over(0.95)})
      for host in HOSTS.values() for sd in SDS),
    *(({"sd": 0.02, "worse": UNCHANGED, "common": common}, 10_000, {"fail": allowed(ALARMS), "pass": over(0.95)})
      for common in (0.5, 0.9)),
    ({"sd": 0.02, "worse": UNCHANGED, **ALL_OF_IT}, 10_000, {"fail": allowed(ALARMS)}),
    # A place that is worse than the noise is balanced at each look: it favours no side.
    *(({"sd": sd, "second": second, "worse": (worse,)}, 2000, {never: up_to(0)})
      for sd in (0.001, 0.005) for second in (-0.03, 0.03) for worse, never in ((0.0, "fail"), (0.03, "pass"))),
    # Five per cent worse, in one endpoint of four and nothing else
    *(({"sd": sd, "worse": (0.05,)}, 10_000, {"missed": shown(MISSES), "pass": up_to(0.0015)}) for sd in SDS),
    *(({"sd": sd, "worse": (0.05,), **host}, 10_000, {"missed": allowed(MISSES), "pass": up_to(0.001)})
      for host in HOSTS.values() for sd in SDS),
    *(({"sd": sd, "worse": gates.SLOWER, "common": common}, 2000,
       {"first missed": allowed(MISSES), "others fail": allowed(ALARMS)})
      for sd, common in ((0.01, 0.0), (0.02, 0.0), (0.02, 0.9))),
    # At the margin it fails mostly, and passes at most as often as beta.
    *(({"sd": sd, "worse": (0.03,)}, 10_000, {"missed": shown(1 - caught), "pass": shown(TERMS.beta)})
      for sd, caught in ((0.01, 0.98), (0.02, 0.88))),
    *(({"sd": 0.02, "worse": (0.03,), **host}, 10_000, {"pass": shown(TERMS.beta)}) for host in HOSTS.values()),
    *(({"sd": 0.02, "worse": worse}, 2000, {"pass": allowed(TERMS.beta)})  # all have to pass
      for worse in ((0.03, 0.0, 0.0, 0.0), (0.03,) * 4)),
    *(({"sd": sd, "worse": (0.03, 0.0, 0.0, 0.0)}, 800, {"first missed": shown(1 - caught)})
      for sd, caught in ((0.01, 0.95), (0.02, 0.70))),
])  # fmt: skip
def test_gate_error_rates_stay_bounded(planted, number, bounds):
    facts = {"seed": 1, **planted}
    seed = facts.pop("seed")
    seen = many(Planted(**facts), number, seed=seed)
    failed, first = seen.outcomes[FAIL], seen.fails["endpoint 0"]
    counts = {"fail": failed, "missed": number - failed, "pass": seen.outcomes[PASS]}
    counts |= {"first missed": number - first, "others fail": seen.fails.total() - first}
    assert {name: counts[name] for name in bounds if counts[name] not in bounds[name](number)} == {}


@pytest.mark.parametrize("sd", SDS)
@pytest.mark.parametrize("n", [4, 6, 12])
def test_detectable_change_is_mostly_found(sd, n):
    """In nine of ten gates, as allowed on both sides; half of the change is found in less than half of the gates."""
    far = sd * math.sqrt((n - 1) / n)
    pairs = tuple((1.0, math.exp(far if i % 2 else -far)) for i in range(n))  # not worse, with this deviation
    told = gate([PairSeries(name, "lower", pairs) for name in "abcd"], TERMS)[0].detectable
    found = []
    for worse in (told, told / 2):
        chance, planted = random.Random(11), Planted(sd=sd, worse=(worse, 0.0, 0.0, 0.0))
        ends = (gate(gates.session(planted, chance, n, DIRECTIONS), TERMS) for _ in range(1000))
        found.append(sum(first.outcome is FAIL for first, *_ in ends))
    assert 1000 - most(1000, 0.13) <= found[0] <= most(1000, 0.93) and found[1] < 500


@pytest.mark.parametrize(("sd", "worse"), [(0.01, 0.0), (0.02, 0.015), (0.03, 0.03)])
def test_gate_intervals_cover_true_ratio(sd, worse):
    chance, contained, failed = random.Random(5), [], []
    for _ in range(1500):
        series = gates.session(Planted(sd=sd, worse=(worse,)), chance, 12, ("lower",))
        outcome, _, (found,) = looked_at(series, TERMS)
        contained.append(found.ratio.low <= 1 + worse <= found.ratio.high)
        failed += contained[-1:] if outcome is FAIL else []
    assert fewest(1500, 0.92) <= sum(contained) <= most(1500, 0.95)
    assert worse != 0.015 or fewest(len(failed), 0.86) <= sum(failed) <= most(len(failed), 0.86)


def test_clear_gates_end_early():
    assert many(Planted(sd=0.01), 500).pairs < 4.3 and many(Planted(sd=0.01, worse=(0.05,)), 500).pairs < 4.4


@pytest.mark.parametrize("sd", SDS)
@pytest.mark.parametrize("better", ["higher", "lower"])
def test_better_candidate_never_fails(sd, better):
    chance, wrong = random.Random(5), {"higher": "lower", "lower": "higher"}[better]
    for _ in range(800):
        series = gates.session(Planted(sd=sd, worse=(1 / 1.05 - 1,)), chance, 12, (better,))
        assert looked_at(series, TERMS)[0] is PASS
        assert looked_at([replace(each, better=wrong) for each in series], TERMS)[0] is not PASS


ALPHAS = pytest.mark.parametrize("alpha", [0.0025, 0.01, 0.05])
MAXIMA = (4, 5, 6, 8, 10, 12, 20)
DRAWN, PARTS = 100_000, 6
MORE = 3.09  # standard errors that one in a thousand lies beyond


def with_courses(chance, spread):
    """Three repeats of each load, whose noise is seen in the course of each window."""
    return [
        [Repeat(math.exp(chance.gauss(0, sd)), within=sd**2 * chance.uniform(0.7, 1.4)) for _ in range(3)]
        for sd in spread
    ]


def in_turn(chance, loads, count, host=0.0, sd=0.01):
    """The host drifts from one round to the next, and a round is measured in turn."""
    rounds = [chance.gauss(0, host) for _ in range(count)]
    return [
        [Repeat(math.exp(drift + chance.gauss(0, sd)), f"{i}-{load}") for i, drift in enumerate(rounds)]
        for load in range(loads)
    ]


def of_launches(chance, launches):
    """Four loads: three repeats of each, or three launches of two windows each that differ by more than those."""
    windows, between = (2, 0.05) if launches > 1 else (3, 0.0)

    def sample():
        states = [chance.gauss(0, between) for _ in range(launches)]
        return [
            Repeat(math.exp(state + chance.gauss(0, 0.01)), launch=f"{launch}")
            for launch, state in enumerate(states)
            for _ in range(windows)
        ]

    return [sample() for _ in range(4)]


@pytest.mark.parametrize(("draw", "seed", "runs", "asked", "least", "most"), [
    *((partial(with_courses, spread=spread), 4, 1500, (3, 4), 0.93, 0.98)
      for spread in ((0.01,) * 5, (0.002, 0.005, 0.01, 0.05, 0.05))),
    *((partial(in_turn, loads=loads, count=count, host=host), 6, 1000, (0, 1), 0.925, 0.975)
      for loads in (2, 3) for count in (2, 3) for host in (0.0, 0.05)),
    *((partial(of_launches, launches=launches), 7, 1000, 2, 0.92, 0.98) for launches in (1, 3)),
    # Two rounds of nine loads leave six degrees of freedom, where the scatter of nine samples has nine: of 0.4% at
    # each end 0.8% are missed as planned, and 1.2% with eight degrees.
    (partial(in_turn, loads=9, count=2, sd=0.02), 6, 4000, (7, 8, 0.004), 0.989, 0.995),
])  # fmt: skip
def test_difference_intervals_cover_truth(draw, seed, runs, asked, least, most):
    """asked: two loads, and the tail if it is another; or one load, whose mean is meant."""
    chance, covered = random.Random(seed), 0
    for _ in range(runs):
        drawn = Differences(tuple(map(tuple, draw(chance))))
        seen = drawn.between(*asked) if isinstance(asked, tuple) else drawn.mean(asked)
        covered += seen.low <= 0 <= seen.high
    assert least <= covered / runs <= most


@lru_cache(maxsize=1)
def drawn():
    """Student's t of many samples of nothing but noise, by the number of pairs that it is of."""
    chance, wanted = numpy.random.default_rng(20), sorted({n for most in MAXIMA for n in looks_until(most)})
    parts = {n: [] for n in wanted}
    for _ in range(PARTS):
        values = chance.standard_normal((max(wanted), DRAWN))
        sums, squares = numpy.cumsum(values, axis=0), numpy.cumsum(values**2, axis=0)
        for n in wanted:
            mean = sums[n - 1] / n
            parts[n].append(mean / numpy.sqrt((squares[n - 1] / n - mean**2) / (n - 1)))
    return {n: numpy.concatenate(part) for n, part in parts.items()}


def exceeded(looks, critical):
    """Share of the samples that exceed one of these values."""
    t = drawn()
    return float(numpy.mean(numpy.any([t[n] > c for n, c in zip(looks, critical, strict=True)], axis=0)))


@ALPHAS
@pytest.mark.parametrize(("most", "so_far"), [*((most, None) for most in MAXIMA), (12, 1), (12, 2), (12, 3)])
def test_gate_looks_spend_planned_alpha(most, so_far, alpha):
    looks = looks_until(most)[:so_far]
    share, planned = exceeded(looks, boundaries(looks, most, alpha)), spent(looks[-1] / most, alpha)
    error = math.sqrt(planned * (1 - planned) / (DRAWN * PARTS))
    assert 0.8 * planned - MORE * error < share < planned + MORE * error


@ALPHAS
def test_repeated_t_tests_exceed_alpha(alpha):
    """What the boundaries are there for: four tests at `alpha` each are wrong far more often."""
    looks = looks_until(12)
    assert exceeded(looks, [t_above(alpha, n - 1) for n in looks]) > 1.6 * alpha


@pytest.mark.parametrize(("planted", "bounds"), [
    *(({"sd": sd}, {"fail": shown(ALARMS), "pass": over(0.97)}) for sd in (0.03, 0.05)),
    *(({"sd": sd}, {"fail": allowed(ALARMS)}) for sd in (0.08, 0.14)),
    *(({"sd": 0.05, "worse": (0.0, 0.0, 0.0), **host}, {"fail": allowed(ALARMS), "pass": over(0.9)})
      for host in ({"noise": gates.heavy}, {"drift": 0.05}, {"second": 0.03}, {"second": -0.03}, {"common": 0.7})),
    *(({"sd": sd, "worse": (0.3, 0.0)}, {"missed": allowed(0.02), "pass": up_to(0)}) for sd in (0.03, 0.05)),
    *(({"sd": sd, "worse": (0.15, 0.0)}, {"pass": shown(TERMS.beta)}) for sd in (0.03, 0.05, 0.08, 0.14)),
])  # fmt: skip
def test_start_gate_errors_stay_bounded(planted, bounds):
    """Gates of both states of the caches, or of waking too, after three pairs or five: docs/statistics.md."""
    number = 4000
    seen = many(Planted(**{"worse": (0.0, 0.0), "margin": 0.15, **planted}), number, TERMS.of_starts, seed=3)
    failed = seen.outcomes[FAIL]
    counts = {"fail": failed, "missed": number - failed, "pass": seen.outcomes[PASS]}
    assert {name: counts[name] for name in bounds if counts[name] not in bounds[name](number)} == {}
