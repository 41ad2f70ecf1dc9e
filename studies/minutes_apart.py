"""How much wider a ratio is of two sides of which one was measured minutes after the other, and how often it is right.

    python studies/minutes_apart.py --runs 1000

First from the committed archives: how alike windows of one launch are that lie seconds apart. Two loads whose windows
follow each other change from one round to the next, minutes later. If both change because the host did, they change in
the same direction, and Kendall's tau of the changes tells the correlation of the windows: sin(pi tau / 2) (Greiner
1909). What they have in common, over what they have not, is `estimates.MINUTES`.

Then by simulation, on hosts of two speeds: one load is measured on two sides, between which an engine starts. Each
side has windows that follow each other, and nothing differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import fmean, median

from common import BASELINES, parser_of
from noise_study import GRID, HOSTS, TWO_SPEEDS, Host, Law, point_of_windows, share

from pytest_slmserve.analysis.estimates import MINUTES, Differences, grouped
from pytest_slmserve.analysis.points import (
    Figure,
    Point,
    all_groups,
    busy_rate,
    case_points,
    output_rate,
    point_differences,
)
from pytest_slmserve.analysis.sweep.curve import TOLERANCE
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.records import Measurement, moment
from pytest_slmserve.schema.specs import is_steady

SECONDS_S, MINUTES_S = 15.0, 30.0  # windows at most so far apart follow each other; rounds are farther apart
START_S = 60.0  # of an engine
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


def sides(host: float, repeats: int, seed: int) -> tuple[Point, Point]:
    """The largest load on two sides that do not differ, on a host of its own."""
    at, found = Host(Law(TOLERANCE), TWO_SPEEDS, seed, host=host), []
    for at.launch in ("1", "2"):
        at.now_s += START_S
        found.append(point_of_windows(GRID[-1], [(at.once(GRID[-1]),) for _ in range(repeats)]))
    return found[0], found[1]


def row(name: str, host: float, repeats: int, seeds: Sequence[int]) -> str:
    """Per cent covered and median width, with the minutes and without them; of intervals whose windows tell their
    course, and of others."""
    cells = [name, str(repeats)]
    told = [point_differences(sides(host, repeats, seed)) for seed in seeds]
    untold = [replace(d, samples=tuple(tuple(r._replace(within=None) for r in s) for s in d.samples)) for d in told]
    for each in (told, untold):
        for minutes in (0.0, MINUTES):
            seen = [Differences(d.samples, minutes).between(0, 1) for d in each]
            covered = share((s.low or 0.0) <= 0 <= (s.high or 0.0) for s in seen)
            cells.append(f"{covered:.1f}, {math.exp(median((s.high or 0.0) - s.value for s in seen)):.2f}")
    return f"| {' | '.join(cells)} |"


HEAD = "| host | repeats | course told, before | after | not told, before | after |\n|---|" + "---:|" * 5


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="of each host and number of repeats")
    given = parser.parse_args()
    for name, figure in (("output tokens/s", output_rate), ("tokens per busy second", busy_rate)):
        print(f"{name}: {recorded(figure)}")
    print(HEAD)
    for name, host in HOSTS.items():
        for repeats in (2, 3, 4):
            print(row(name, host, repeats, range(given.runs)), flush=True)


if __name__ == "__main__":
    main()
