"""How often is a gate right whose sides live on one GPU at once, and how long does it take? By simulation.

    python studies/side_by_side_study.py --gates 10000 --processes 2

Each gate launches both sides two or four times. Windows of both alternate in each launch, and each pair of windows
gives the logarithm of a cost ratio: what the candidate is worse by, what this launch does to the ratio, and the noise
of the host, part of which lasts for half a minute. The code that judges real gates decides how many windows a launch
needs, whether throughput as seen is refused, when it is enough, and how it ends. Prints a table in per cent, with the
minutes that a gate takes in the mean, and that nine in ten take at most.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean, quantiles

from common import parser_of

from pytest_slmserve.analysis.gate import side_by_side
from pytest_slmserve.analysis.gate.decision import GateCriteria, interim_analyses
from pytest_slmserve.analysis.gate.side_by_side import COMMITTED, Allowance, WindowSeries
from pytest_slmserve.analysis.verdict import State, all_of

MARGIN = 0.03
START_S, PAIR_S = 35.0, 3.4  # of both engines with warm caches; two windows of 1.5 s with a gap of 0.2 s after each
THROWN_AWAY = 2  # pairs of windows at the beginning of a launch
SLOW_S = 30.0  # how long the slow part of the noise lasts
CALIBRATING = (8, 16)  # launches of equal sides, and pairs of windows in each


@dataclass(frozen=True)
class Noise:
    """Of one endpoint: the standard deviation of a pair of windows, and the share of its variance that is slow."""

    sd: float
    slow: float = 0.05


BUSY, BUSY_SHORT = Noise(0.015), Noise(0.022)
SEEN, BAD_HOST, HOST_BOUND = Noise(0.03), Noise(0.06), Noise(0.15, 0.15)
CASES: Mapping[str, tuple[Noise, ...]] = {
    "busy second, 1.5%": (BUSY,),
    "busy second, 2.2%": (BUSY_SHORT,),
    "seen, 3%": (SEEN,),
    "seen, 3%, and busy second, 2.2%": (SEEN, BUSY_SHORT),
    "seen, 6%": (BAD_HOST,),
    "seen, the host decides, 15%": (HOST_BOUND,),
}
LAUNCHES_APART = (0.003, 0.005, 0.01)  # standard deviation of what a launch does to the ratio
TOO_FAR_APART = 0.014
WORSE = (0.0, MARGIN, 0.05)


@dataclass(frozen=True)
class Ended:
    """One gate. state: None if it was refused."""

    state: State | None
    minutes: float


def launch(
    noises: Sequence[Noise], apart: float, worse: float, chance: random.Random
) -> list[Callable[[int], list[float]]]:
    """Return for each endpoint a function that gives the first n logarithms of ratios of one launch. What a launch does
    is drawn for each endpoint; more pairs than were asked for before follow the ones that are there."""

    def pairs(noise: Noise) -> Callable[[int], list[float]]:
        effect, found, slow = worse + chance.gauss(0, apart), list[float](), [chance.gauss(0, 1)]
        stays = math.exp(-PAIR_S / SLOW_S)

        def at_least(n: int) -> list[float]:
            while len(found) < n:
                fast = chance.gauss(0, math.sqrt(1 - noise.slow))
                found.append(effect + noise.sd * (fast + math.sqrt(noise.slow) * slow[0]))
                slow[0] = stays * slow[0] + math.sqrt(1 - stays**2) * chance.gauss(0, 1)
            return found[:n]

        return at_least

    return [pairs(noise) for noise in noises]


def series_of(launches: Sequence[Sequence[Sequence[float]]], allowance: Allowance) -> list[WindowSeries]:
    """Series of each endpoint. launches: of each, the logarithms of ratios by endpoint."""
    return [
        WindowSeries.of(
            name, "lower", [[(1.0, math.exp(cost)) for cost in each] for each in windows], MARGIN, allowance
        )
        for name, windows in zip(("seen", "busy"), zip(*launches))
    ]


def minutes(launches: int, pairs: int) -> float:
    return launches * (START_S + (THROWN_AWAY + pairs) * PAIR_S) / 60


def one(noises: Sequence[Noise], apart: float, worse: float, calibrates: bool, seed: int) -> Ended:
    """One gate. calibrates: launches of equal sides on this host tell the allowance beforehand."""
    chance, terms, cost = random.Random(seed), GateCriteria(MARGIN).with_both_at_once, math.log1p(worse)
    allowance = COMMITTED
    if calibrates:
        count, pairs = CALIBRATING
        equal = [launch(noises, apart, 0.0, chance)[0](pairs) for _ in range(count)]
        allowance = Allowance.measured(equal, "a calibration")
        if allowance.refused:
            return Ended(None, 0.0)
    made: list[list[list[float]]] = []
    wanted = 0
    for number in range(1, terms.pairs + 1):
        each = launch(noises, apart, cost, chance)
        if number == 1:
            early = [pairs(side_by_side.FIRST_PAIRS) for pairs in each]
            wanted = side_by_side.pairs_wanted(early, MARGIN)
            for first, pairs in zip(early, each):
                for seen in (first, pairs(wanted)):
                    if side_by_side.host_decides(seen, None):
                        return Ended(None, minutes(1, len(seen)))
        made.append([pairs(wanted) for pairs in each])
        if number in terms.looks(number):
            series = series_of(made, allowance)
            if any(each.strange for each in series):
                return Ended(None, minutes(number, wanted))
            found = interim_analyses(series, terms)
            state = all_of([steps[-1].outcome for steps in found.values()])
            if state is not State.INCONCLUSIVE:
                break
    return Ended(state, minutes(number, wanted))


def share(found: Iterable[bool]) -> str:
    return f"{100 * fmean(found):.1f}"


def row(name: str, apart: float, by_worse: Mapping[float, Sequence[Ended]]) -> str:
    """Row of the table."""
    same, margin, more = (by_worse[worse] for worse in WORSE)
    took = [each.minutes for each in same]
    cells = [
        name,
        f"{100 * apart:.1f}",
        share(each.state is None for each in same),
        share(each.state is State.FAILS for each in same),
        share(each.state is State.PASSES for each in same),
        f"{fmean(took):.1f}, {quantiles(took, n=10)[-1]:.1f}",
        share(each.state is State.FAILS for each in margin),
        share(each.state is State.PASSES for each in margin),
        f"{fmean(each.minutes for each in margin):.1f}",
        share(each.state is State.FAILS for each in more),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| endpoint, a pair of windows | launches % | refused | unchanged: fails | passes | min, 90% | 3% worse: fails "
    "| passes | min | 5% worse: fails |\n|---|" + "---:|" * 9
)


def study(
    noises: Sequence[Noise],
    apart: float,
    seeds: Sequence[int],
    calibrates: bool,
    each: Callable[..., Iterable[Ended]] = map,
) -> dict[float, list[Ended]]:
    """Gates by what the candidate is worse by. each: `map`, of a pool or not."""
    return {worse: list(each(partial(one, noises, apart, worse, calibrates), seeds)) for worse in WORSE}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gates", type=int, default=10000, help="of each cell")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    print(HEAD)
    with ProcessPoolExecutor(given.processes) as pool:
        each = partial(pool.map, chunksize=100) if given.processes > 1 else map
        rows = [(name, apart, False) for name in CASES for apart in LAUNCHES_APART]
        rows += [
            (name, TOO_FAR_APART, calibrated)
            for name in ("busy second, 2.2%", "seen, 3%")
            for calibrated in (False, True)
        ]
        for name, apart, calibrated in rows:
            found = study(CASES[name], apart, range(given.gates), calibrated, each)
            print(row(f"{name}{', calibrated' if calibrated else ''}", apart, found), flush=True)


if __name__ == "__main__":
    main()
