"""Simulated gates whose sides live on one GPU at once: how they end, and how long they take.

Each gate launches both sides two or four times. Windows of both alternate in each launch, and each pair of windows
gives the logarithm of a cost ratio: what the candidate is worse by, what this launch does to the ratio, and the noise
of the host, part of which lasts for half a minute. The code that judges real gates decides how many windows a launch
needs, whether throughput as seen is refused, when it is enough, and how it ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.estimates import sample_sd
from pytest_slmserve.analysis.gate import side_by_side
from pytest_slmserve.analysis.gate.decision import GateCriteria, interim_analyses
from pytest_slmserve.analysis.gate.side_by_side import COMMITTED, Allowance, WindowSeries
from pytest_slmserve.analysis.verdict import State

MARGIN = 0.03
START_S, PAIR_S = 35.0, 3.4  # of both engines with warm caches; two windows of 1.5 s with a gap of 0.2 s after each
SLOW_S = 30.0  # how long the slow part of the noise lasts
CALIBRATING = (8, 16)  # launches of equal sides, and pairs of windows in each


@dataclass(frozen=True)
class Noise:
    """Of an endpoint: the standard deviation of a pair of windows, and the share of its variance that is slow."""

    sd: float
    slow: float = 0.05


@dataclass(frozen=True)
class Ended:
    """One gate. state: None if it was refused."""

    state: State | None
    minutes: float


def launch(noise: Noise, apart: float, worse: float, chance: random.Random) -> Callable[[int], list[float]]:
    """Return a function that gives the first n logarithms of ratios of one launch; more pairs than were asked for
    before follow the ones that are there. apart: standard deviation of what a launch does to the ratio."""
    effect, found, slow = worse + chance.gauss(0, apart), list[float](), [chance.gauss(0, 1)]
    stays = math.exp(-PAIR_S / SLOW_S)

    def at_least(n: int) -> list[float]:
        while len(found) < n:
            fast = chance.gauss(0, math.sqrt(1 - noise.slow))
            found.append(effect + noise.sd * (fast + math.sqrt(noise.slow) * slow[0]))
            slow[0] = stays * slow[0] + math.sqrt(1 - stays**2) * chance.gauss(0, 1)
        return found[:n]

    return at_least


def series_of(launches: Sequence[Sequence[float]], allowance: Allowance) -> WindowSeries:
    """The series of an endpoint. launches: of each, the logarithms of ratios."""
    ratios = [[(1.0, math.exp(cost)) for cost in each] for each in launches]
    return WindowSeries.of("seen", "lower", ratios, MARGIN, allowance)


def minutes(launches: int, pairs: int) -> float:
    return launches * (START_S + (side_by_side.THROWN_AWAY + pairs) * PAIR_S) / 60


def one_gate(noise: Noise, apart: float, worse: float, calibrates: bool, seed: int) -> Ended:
    """One gate. calibrates: launches of equal sides on this host tell the allowance beforehand."""
    chance, terms, cost = random.Random(seed), GateCriteria(MARGIN).with_both_at_once, math.log1p(worse)
    allowance = COMMITTED
    if calibrates:
        count, pairs = CALIBRATING
        equal = [fmean(launch(noise, apart, 0.0, chance)(pairs)) for _ in range(count)]
        allowance = Allowance.known(sample_sd(equal), count, "a calibration")
        if allowance.refused:
            return Ended(None, 0.0)
    made: list[list[float]] = []
    wanted, state = 0, State.INCONCLUSIVE
    for number in range(1, terms.pairs + 1):
        costs = launch(noise, apart, cost, chance)
        if number == 1:
            step = side_by_side.FIRST_PAIRS
            wanted = side_by_side.pairs_wanted([costs(step)], MARGIN)
            for seen in map(costs, (*range(step, wanted, step), wanted)):  # as often as a real gate asks
                if side_by_side.host_decides(seen, None):
                    return Ended(None, minutes(1, len(seen)))
        made.append(costs(wanted))
        if number in terms.looks(number):
            series = series_of(made, allowance)
            if series.strange:
                return Ended(None, minutes(number, wanted))
            state = interim_analyses([series], terms)[series.name][-1].outcome
            if state is not State.INCONCLUSIVE:
                break
    return Ended(state, minutes(number, wanted))
