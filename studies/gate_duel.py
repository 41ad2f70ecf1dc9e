"""How often is a gate right on a host whose speed drifts, beside the usual comparison of two blocks? By simulation.

    python studies/gate_duel.py --gates 2000

A launch of a side gives one rate. The rates scatter from launch to launch, and the host's own speed walks, by so much
at each launch. Three ways compare a candidate with a baseline: all launches of one side and then all of the other, with
Welch's test, as most CI does; the same test with the sides in turn; and this project's pairs, which end at an interim
analysis. Welch's test fails a candidate if the 95% interval of the ratio is worse than half of the margin, and passes
it if the interval is not worse than the margin. Prints a table in per cent of the gates, with the launches in the mean.
"""

from __future__ import annotations

import math
import random
from statistics import fmean, variance

from common import parser_of

from pytest_slmserve.analysis.estimates import TAIL, t_above
from pytest_slmserve.analysis.gate.decision import GateCriteria, PairSeries, interim_analyses
from pytest_slmserve.analysis.verdict import State

TERMS = GateCriteria()
SIDE = TERMS.pairs  # launches of each
WORLDS = {"2% a launch": (0.02, 0.0), "1% a launch, and the host walks by 2%": (0.01, 0.02)}
TRUTHS = {"unchanged": 0.0, "5% slower": math.log(0.95)}


def launches(order: str, truth: float, noise: float, walk: float, chance: random.Random) -> dict[str, list[float]]:
    """Return logarithms of the rates of each side, of launches in this order of sides: "AABB"."""
    found: dict[str, list[float]] = {"A": [], "B": []}
    host = 0.0
    for side in order:
        host += chance.gauss(0, walk)
        found[side].append(host + chance.gauss(0, noise) + truth * (side == "B"))
    return found


def welch(a: list[float], b: list[float]) -> State:
    """Judge the difference of two means of unlike variances (Welch 1947)."""
    parts = [variance(each) / len(each) for each in (a, b)]
    df = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (a, b)))
    reach, worse = t_above(TAIL, round(df)) * math.sqrt(sum(parts)), fmean(a) - fmean(b)
    if worse - reach > math.log1p(TERMS.margin) / 2:
        return State.FAILS
    return State.PASSES if worse + reach < math.log1p(TERMS.margin) else State.INCONCLUSIVE


def in_pairs(a: list[float], b: list[float]) -> tuple[State, int]:
    """Judge pairs of launches as a gate does; return the outcome, and the launches that it took."""
    pairs = tuple((math.exp(x), math.exp(y)) for x, y in zip(a, b))
    for step in interim_analyses([PairSeries("rate", "higher", pairs)], TERMS)["rate"]:
        if step.outcome is not State.INCONCLUSIVE:
            break
    return step.outcome, 2 * step.pairs


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gates", type=int, default=2000)
    args = parser.parse_args()
    print("| launches scatter by | candidate | in blocks | in turn | pairs in turn | launches |")
    print("|---|---|---:|---:|---:|---:|")
    for world, (noise, walk) in WORLDS.items():
        for name, truth in TRUTHS.items():
            chance, ended = random.Random(f"{world} {name}"), []
            for _ in range(args.gates):
                blocks = launches("A" * SIDE + "B" * SIDE, truth, noise, walk, chance)
                turns = launches("ABBA" * (SIDE // 2), truth, noise, walk, chance)
                ended.append((welch(**lower(blocks)), welch(**lower(turns)), *in_pairs(**lower(turns))))
            *ways, taken = zip(*ended)
            told = [
                f"{100 * way.count(State.FAILS) / args.gates:.1f}, {100 * way.count(State.PASSES) / args.gates:.1f}"
                for way in ways
            ]
            print(f"| {world} | {name} | {' | '.join(told)} | {fmean(taken):.1f} |")


def lower(sides: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name.lower(): values for name, values in sides.items()}


if __name__ == "__main__":
    main()
