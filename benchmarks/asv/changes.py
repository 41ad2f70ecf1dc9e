"""Where the history of asv's results changes its level: which releases to look at first, not a verdict on any.

python benchmarks/asv/changes.py [RESULTS]       (default: results/ beside this file; needs apache-otava)

The points of a series are the launches, release by release. Those of two releases were measured at different times, so
a machine that changed looks like a release that did. A change found here is confirmed, or not, by measuring both
releases in turns. Change points: Fleming et al., Hunter, ICPE 2023 (arXiv:2301.03034), as Apache Otava has it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_PVALUE, MIN_MAGNITUDE = 0.001, 0.02
INSTALL = "error: change points need Apache Otava\n  try: pip install apache-otava"
Series = list[tuple[int, str, float]]  # date of the release in ms, release, value of a launch


@dataclass(frozen=True, slots=True)
class Change:
    """A cost that moved. before, after: releases, the same where it moved between two launches of one."""

    name: str
    before: str
    after: str
    by: float  # relative; more is worse
    pvalue: float


def histories(results: Path) -> dict[str, Series]:
    """By machine, everything that makes a curve of its own, benchmark and parameters."""
    found: dict[str, Series] = {}
    for path in sorted(results.glob("*/*.json")):
        if path.name != "machine.json":
            for name, series in launches(json.loads(path.read_text("utf-8"))):
                found.setdefault(name, []).extend(series)
    return {name: sorted(series, key=lambda point: point[0]) for name, series in sorted(found.items())}


def launches(file: dict[str, Any]) -> Iterator[tuple[str, Series]]:
    where = ", ".join(file["params"].values())
    for benchmark, row in file["results"].items():
        columns = dict(zip(file["result_columns"], row))
        for values, samples in zip(itertools.product(*columns["params"]), columns["samples"]):
            points = [(file["date"], file["requirements"]["vllm"], value) for value in samples or ()]
            yield f"{benchmark}({', '.join(values)}) on {where}", points


def changes(name: str, series: Series) -> list[Change]:
    from otava.analysis import compute_change_points

    values = [value for _, _, value in series]
    points, _ = compute_change_points(values, max_pvalue=MAX_PVALUE, min_magnitude=MIN_MAGNITUDE)
    return [
        Change(
            name,
            before=series[point.index - 1][1],
            after=series[point.index][1],
            by=float(point.stats.forward_rel_change()),
            pvalue=float(point.stats.pvalue),
        )
        for point in points
    ]


def line(change: Change) -> str:
    way = "higher (worse)" if change.by > 0 else "lower (better)"
    words = f"{100 * abs(change.by):.1f} % {way}, p = {change.pvalue:.2g}"
    if change.before == change.after:
        return f"{change.name}: within {change.after}: {words}: the machine, not the release"
    return f"{change.name}: {change.before} to {change.after}: {words}"


def main(results: Path) -> int:
    try:
        found = {name: changes(name, series) for name, series in histories(results).items()}
    except ModuleNotFoundError:
        print(INSTALL, file=sys.stderr)
        return 1
    for each in itertools.chain.from_iterable(found.values()):
        print(line(each))
    moved = sum(map(bool, found.values()))
    advice = ": measure both releases in turns" if moved else ""
    print(f"{moved} of {len(found)} series change by {100 * MIN_MAGNITUDE:.0f} % or more{advice}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"))
