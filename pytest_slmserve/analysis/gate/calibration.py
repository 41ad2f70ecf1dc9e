"""False-alarm rate and power of a gate on this runner, from pairs in which nothing differed.

Pairs of an A/A run are centred, given a random sign, drawn again and again, and judged by the gate itself. All
endpoints of a pair are drawn together, for they are noisy together. A drawn gate looks as a real one does, and stops as
early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pytest_slmserve.analysis.gate.decision import (
    Comparison,
    GateCriteria,
    PairSeries,
    decisions,
    log_costs,
    margin_of,
)
from pytest_slmserve.analysis.stats.group_sequential import looks_until
from pytest_slmserve.analysis.verdict import State, all_of

GATES = 1000  # drawn for each rate: half a percent is then known to a quarter
MIN_POWER = 0.8  # a gate that misses more than a fifth of what it is there to find does not pass anybody
SEED = 7
UNKNOWN = (State.UNDECIDED, 0)


@dataclass(frozen=True, slots=True)
class PairNoise:
    """Logarithms of cost ratios in pairs of which both sides were the same, for each endpoint; `costs[i]` of all
    endpoints is of one pair."""

    names: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of drawn gates, and how many pairs they took in the mean."""

    fail: float
    passed: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """unchanged: gates of an unchanged candidate. worse: by endpoint, gates of a candidate that is worse by the margin
    in this endpoint and in no other."""

    terms: GateCriteria
    n: int
    unchanged: Rates
    worse: Mapping[str, Rates]

    @property
    def weak(self) -> tuple[str, ...]:
        """Endpoints of which a worsening by the margin would be missed too often."""
        return tuple(name for name, rates in self.worse.items() if rates.fail < MIN_POWER)


def noise_of(series: Sequence[PairSeries]) -> PairNoise:
    """Noise of A/A pairs; pairs with a missing value are left out. Costs are centred, since an order effect is no
    difference of sides. They are stretched by what centring takes from the variance of so few pairs."""
    columns = [log_costs(each) for each in series]
    whole = [row for row in zip(*columns) if None not in row]
    means = [fmean(column) for column in zip(*whole)]
    stretch = math.sqrt(len(whole) / (len(whole) - 1)) if len(whole) > 1 else 1.0
    centred = (tuple(stretch * (cost - mean) for cost, mean in zip(row, means)) for row in whole)
    return PairNoise(tuple(each.name for each in series), tuple(centred))


def calibrate(noise: PairNoise, series: Sequence[PairSeries], terms: GateCriteria, gates: int = GATES) -> Calibration:
    """Rates of drawn gates. series: tells each endpoint's direction and margin."""
    drawn = random.Random(SEED)
    worse = {}
    for each in series:
        planted = {each.name: math.log1p(margin_of(each, terms))}
        worse[each.name] = _rates(noise, series, terms, gates, drawn, planted)
    return Calibration(terms, len(noise.costs), _rates(noise, series, terms, gates, drawn, {}), worse)


def _rates(
    noise: PairNoise,
    series: Sequence[PairSeries],
    terms: GateCriteria,
    gates: int,
    drawn: random.Random,
    planted: Mapping[str, float],
) -> Rates:
    outcomes, pairs = [], 0
    for _ in range(gates):
        # A pair with its sides exchanged, or not: nothing tells them apart.
        rows = [(drawn.choice((-1.0, 1.0)), row) for row in drawn.choices(noise.costs, k=terms.pairs)]
        made = []
        for i, each in enumerate(series):
            costs = [sign * row[i] + planted.get(each.name, 0.0) for sign, row in rows]
            made.append(replace(each, pairs=tuple((1.0, math.exp(each.sign * cost)) for cost in costs)))
        for n in looks_until(terms.pairs):
            decided = decisions([replace(each, pairs=each.pairs[:n]) for each in made], terms)
            found = all_of([decided.get(each.name, UNKNOWN)[0] for each in made])
            if found is not State.UNDECIDED:
                break
        outcomes.append(found)
        pairs += n
    return Rates(outcomes.count(State.FAILS) / gates, outcomes.count(State.HOLDS) / gates, pairs / gates)


def weakened(found: Comparison, calibration: Calibration) -> Comparison:
    """A pass that says nothing is none: inconclusive, where a worsening by the margin would mostly be missed. More
    pairs do not change that, so it keeps `decided_at`."""
    if found.outcome is not State.HOLDS or found.name not in calibration.weak:
        return found
    power = calibration.worse[found.name].fail
    worse = f"{100 * found.margin:.3g} % worse would fail in {100 * power:.0f} % of gates only"
    why = f"this runner is too noisy to pass: {worse}"
    steps = tuple(replace(each, outcome=State.UNDECIDED) for each in found.interim)
    return replace(found, outcome=State.UNDECIDED, why=why, interim=steps)
