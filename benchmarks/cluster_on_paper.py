"""A large plan on many GPUs, on paper: all models of the catalogue through both interfaces, as sweeps, on 1, 2 and 4
GPUs, as replicas with a GPU each and as replicas that share one.

    python benchmarks/cluster_on_paper.py [GPUS ...]

For each number of GPUs the table has the makespan where an engine starts once and serves all of its cells, the least
that any order could take, and the makespan where an engine starts for each cell. Seconds are those that `--slm-plan`
expects on H200s; nothing is started.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import PlannedItem, clock
from pytest_slmserve.plan.schedule import Group, divided, groups_of, least_s, makespan_s, spread
from pytest_slmserve.plugin.estimates import plan_rows
from pytest_slmserve.plugin.parametrize import cases_of
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import CATALOGUE
from pytest_slmserve.schema.errors import OwnInterface

GPUS = (4, 8, 16, 32, 64)
MODELS = [name for name in CATALOGUE if not name.endswith("tiny")]


@dataclass(frozen=True)
class Item:
    """What the plan asks of a test item."""

    name: str
    callspec: Any
    fixturenames: tuple[str, ...]

    def get_closest_marker(self, name: str) -> None:
        return None


def items(session: Session) -> Iterator[Item]:
    """Those of test_pareto_plateau.py, test_tensor_parallel.py and test_replication_gain.py that can be had."""
    for fixture in ("slm_point", "slm_gpus_point", "slm_replica_point"):
        for case in cases_of(fixture, session, {}):
            if not case.skip_reason:
                yield Item(f"{fixture} {case.id}", SimpleNamespace(params={fixture: case}), (fixture,))


def cells() -> list[PlannedItem]:
    """Groups of both interfaces."""
    found: list[PlannedItem] = []
    for interface in get_args(OwnInterface):
        given = {"gpu": True, "plan": True, "interface": interface, "models": ",".join(MODELS), "replicas": "2,3"}
        with tempfile.TemporaryDirectory() as folder:
            session = Session.from_options(read_options(given, {}, {}), Path(folder))
        found += plan_rows(session, list(items(session)))  # type: ignore[arg-type]
    return found


def apart(planned: Sequence[PlannedItem]) -> list[Group]:
    """Each cell on an engine that starts for it."""
    return [group for cell in planned for group in groups_of([cell])]


def rows(planned: Sequence[PlannedItem], gpus: Sequence[int]) -> Iterator[tuple[str, ...]]:
    whole, single = groups_of(planned), apart(planned)
    yield "GPUs", "engine starts", "makespan", "least possible", "over it", "a start per case", "makespan"
    for count in gpus:
        grouped = divided(whole, count)
        reached, least = makespan_s(spread(grouped, count)), least_s(whole, count)
        over, alone = f"{reached / least - 1:.1%}", clock(makespan_s(spread(single, count)))
        yield str(count), str(len(grouped)), clock(reached), clock(least), over, str(len(single)), alone


def main(gpus: Sequence[int]) -> int:
    planned = cells()
    print(f"{len(planned)} cases of {len(MODELS)} models\n")
    for number, row in enumerate(rows(planned, gpus)):
        print(f"| {' | '.join(row)} |")
        if number == 0:
            print(f"|{'---|' * len(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or GPUS))
