"""Gates of planted noise: launches in the order of time, pairs of them, and looks at the pairs as a run has them."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from scipy.stats import binom

from pytest_slmserve.analysis.gate import decision
from pytest_slmserve.analysis.gate.decision import Better, Comparison, GateCriteria, PairSeries
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.run.one_gate import order

Noise = Callable[[random.Random], float]  # of a standard deviation of 1
DIRECTIONS: tuple[Better, ...] = ("higher", "lower", "lower", "lower")  # of the endpoints, as those that are gated
TERMS = GateCriteria()
LAUNCHES = 8  # of the shortest gate


def gaussian(chance: random.Random) -> float:
    return chance.gauss(0, 1)


def heavy(chance: random.Random) -> float:
    """Student's t with 3 degrees of freedom, over its own standard deviation."""
    return chance.gauss(0, 1) / math.sqrt(sum(chance.gauss(0, 1) ** 2 for _ in range(3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """What a session is like. sd: of the logarithm of a pair's ratio. worse: by endpoint, as a share of its cost.
    drift: what the host grows worse by over the shortest gate, and goes on to. second: how much worse the second launch
    of a pair is. common: how far endpoints are correlated. margin: of each endpoint."""

    sd: float
    worse: tuple[float, ...] = (0.0,)
    noise: Noise = gaussian
    drift: float = 0.0
    second: float = 0.0
    common: float = 0.0
    margin: float = decision.MARGIN


def log_costs(planted: Planted, chance: random.Random, number: int) -> list[tuple[float, float]]:
    """Of one pair, by endpoint: baseline and candidate, measured in the order of the gate."""
    shared, found = planted.noise(chance) if planted.common else 0.0, []
    places = {side: place for place, side in enumerate(order(number))}
    host = {
        side: math.log1p(planted.drift) * (2 * (number - 1) + place) / (LAUNCHES - 1)
        + math.log1p(planted.second) * place
        for side, place in places.items()
    }
    for worse in planted.worse:
        own = planted.noise(chance)
        noise = planted.sd * (math.sqrt(planted.common) * shared + math.sqrt(1 - planted.common) * own)
        found.append((host["baseline"] - noise / 2, host["candidate"] + noise / 2 + math.log1p(worse)))
    return found


def measured(cost: float, better: Better) -> float:
    """A rate or a time."""
    return 5000.0 * math.exp(-cost) if better == "higher" else 0.02 * math.exp(cost)


def session(planted: Planted, chance: random.Random, pairs: int, directions: tuple[Better, ...]) -> list[PairSeries]:
    rows = [log_costs(planted, chance, number) for number in range(1, pairs + 1)]
    columns = [tuple((measured(a, d), measured(b, d)) for a, b in costs) for costs, d in zip(zip(*rows), directions)]
    return [
        PairSeries(f"endpoint {i}", d, pairs, planted.margin) for i, (pairs, d) in enumerate(zip(columns, directions))
    ]


def first(series: list[PairSeries], n: int) -> list[PairSeries]:
    return [PairSeries(each.name, each.better, each.pairs[:n], each.margin) for each in series]


def looked_at(series: list[PairSeries], terms: GateCriteria) -> tuple[State, int, tuple[Comparison, ...]]:
    """Outcome, pairs and comparisons of a gate that ends at the first look that decides, or at the last."""
    outcomes, done = decided(series, terms)
    found = decision.gate(first(series, done), terms)
    assert [each.outcome for each in found] == outcomes
    return all_of(outcomes), done, found


def decided(series: list[PairSeries], terms: GateCriteria) -> tuple[list[State], int]:
    """Outcomes by endpoint, and pairs, of such a gate, without what else `gate` tells, which takes half of its time."""
    done = 0
    while (n := decision.next_look(done, terms)) is not None:
        known, done = decision.interim_analyses(first(series, n), terms), n
        outcomes = [known[each.name][-1].outcome if known[each.name] else State.INCONCLUSIVE for each in series]
        if all_of(outcomes) is not State.INCONCLUSIVE:
            break
    return outcomes, done


@dataclass(frozen=True, slots=True)
class Seen:
    """How many of so many gates ended how; fails: by endpoint; pairs: in the mean."""

    gates: int
    outcomes: Counter[State]
    fails: Counter[str]
    pairs: float


def many(planted: Planted, gates: int, terms: GateCriteria = TERMS, seed: int = 1) -> Seen:
    chance, directions = random.Random(seed), DIRECTIONS[: len(planted.worse)]
    ends = [decided(session(planted, chance, terms.pairs, directions), terms) for _ in range(gates)]
    worse = Counter(f"endpoint {i}" for found, _ in ends for i, each in enumerate(found) if each is State.FAILS)
    return Seen(gates, Counter(all_of(found) for found, _ in ends), worse, fmean(n for _, n in ends))


TAIL = 0.001
ALARMS, MISSES = 0.01, 0.01
DRIFT, SECOND = 0.03, 0.01
UNCHANGED, SLOWER = (0.0,) * 4, (0.05, 0.0, 0.0, 0.0)
HOSTS: dict[str, dict[str, Any]] = {
    "heavy tails": {"noise": heavy}, "drift": {"drift": DRIFT}, "second is worse": {"second": SECOND},
    "drift, second is worse": {"drift": DRIFT, "second": SECOND},
}  # fmt: skip


def most(n: int, p: float) -> int:
    """The smallest count that is exceeded with a probability of TAIL at most."""
    return int(binom.isf(TAIL, n, p))


def fewest(n: int, p: float) -> int:
    """The largest count that is not reached with a probability of TAIL at most."""
    return n - most(n, 1 - p)
