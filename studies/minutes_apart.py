"""How much windows have in common that are seconds apart, and others that are minutes apart have not.

    python studies/minutes_apart.py

From the committed archives: how alike windows of one launch are that lie seconds apart. Two loads whose windows
follow each other change from one round to the next, minutes later. If both change because the host did, they change in
the same direction, and Kendall's tau of the changes tells the correlation of the windows: sin(pi tau / 2) (Greiner
1909). What they have in common, over what they have not, is `estimates.MINUTES`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from statistics import fmean

from common import BASELINES, parser_of

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.points import Figure, Point, all_groups, busy_rate, case_points, output_rate
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.records import Measurement, moment
from pytest_slmserve.schema.specs import is_steady

SECONDS_S, MINUTES_S = 15.0, 30.0  # windows at most so far apart follow each other; rounds are farther apart
DRAWS = 2000
Signs = list[int]  # of one launch: 1 if both changes have one direction, -1 if not


def signs(measurements: Sequence[Measurement], figure: Figure) -> Iterator[Signs]:
    """Signs of each launch: of cases that follow each other, from one round to the next."""
    steady = [m for m in measurements if is_steady(m.load) and not m.paired]
    for of_launch in grouped(steady, lambda m: m.launch).values():
        changes = []
        for number, point in enumerate(case_points(Point, all_groups(of_launch))):
            repeats = sorted((moment(m.measured_at).timestamp(), v) for (m, *_), v in zip(point.used, figure(point)))
            changes += [(number, *change) for change in pairwise(repeats)]
        found = []
        for (one, (a, before), (b, after)), (other, (c, earlier), (d, later)) in combinations(changes, 2):
            near, far = max(abs(a - c), abs(b - d)), min(b - a, d - c, abs(b - c), abs(d - a))
            if one != other and near < SECONDS_S and far >= MINUTES_S:
                found.append(int(math.copysign(1, (after - before) * (later - earlier))))
        if found:
            yield found


def component(launches: Sequence[Signs]) -> float:
    """Variance that windows have in common over the rest."""
    correlation = math.sin(math.pi / 2 * fmean(sign for each in launches for sign in each))
    return correlation / (1 - correlation) if correlation < 1 else math.inf


def recorded(figure: Figure) -> str:
    """The component of the committed archives, with its interval: whole launches are drawn again."""
    found = [each for path in sorted(BASELINES.glob("*.xz")) for each in signs(read(path).measurements, figure)]
    chance = random.Random(1)
    drawn = sorted(component(chance.choices(found, k=len(found))) for _ in range(DRAWS))
    low, high = drawn[DRAWS // 40], drawn[-1 - DRAWS // 40]
    return f"{component(found):.2f} ({low:.2f} to {high:.2f}), {len(found)} launches, {sum(map(len, found))} changes"


def main() -> None:
    parser_of(__doc__).parse_args()
    for name, figure in (("output tokens/s", output_rate), ("tokens per busy second", busy_rate)):
        print(f"{name}: {recorded(figure)}")


if __name__ == "__main__":
    main()
