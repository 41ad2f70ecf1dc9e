"""How long it takes to plan 10,000 cells: to price them, to write the plan, and to spread it over 64 GPUs on paper.

    python benchmarks/plan_cost.py [CELLS]

The cells are points on 1, 2 and 4 GPUs, as pytest would hand them over; collecting them is pytest's affair and is not
counted. Exit status 1 where the median is over a second. The last line is the makespan on 64 GPUs of as many cells of
twelve releases against the lower bound.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import PlannedItem, clock
from pytest_slmserve.plan.schedule import divided, groups_of, least_s, makespan_s, plan_lines, spread
from pytest_slmserve.plugin.estimates import plan_rows
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.specs import EngineSpec

CELLS = 10_000
LIMIT_S = 1.0
RUNS = 5
GPUS = 64
DEGREES = (1, 2, 4)
RELEASES = 12
MODELS = ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "qwen2.5-3b")


@dataclass(frozen=True)
class Item:
    """What the plan asks of a test item."""

    name: str
    callspec: Any
    fixturenames = ("slm_gpus_point",)

    def get_closest_marker(self, name: str) -> None:
        return None


def items(session: Session, count: int) -> list[Any]:
    """Loads of every model on 1, 2 and 4 GPUs, as many as are asked for."""
    planner = session.planner
    engines = {(model, gpus): planner.spec(model, gpus) for model, gpus in product(MODELS, DEGREES)}
    each = range(1, 1 + -(-count // (len(MODELS) * len(DEGREES))))
    cells = islice(product(MODELS, DEGREES, each), count)
    return [
        Item(
            f"test_point[{n}]",
            SimpleNamespace(
                params={
                    "slm_gpus_point": planner.case(
                        engines[model, gpus], [planner.workload(model)], [planner.load(load)], id=str(n)
                    )
                }
            ),
        )
        for n, (model, gpus, load) in enumerate(cells)
    ]


def planned(count: int) -> tuple[list[PlannedItem], float]:
    """The cells, and the seconds that it took to price and write them."""
    options = read_options({"gpu": True, "plan": True, "input_len": "64", "output_len": "32"}, {}, {})
    with tempfile.TemporaryDirectory() as folder:
        session = Session.from_options(options, Path(folder))
        began = time.process_time()
        found = items(session, count)
        cells = plan_rows(session, found)
        lines = plan_lines(cells)
        spread(divided(groups_of(cells), GPUS), GPUS)
        seconds = time.process_time() - began
    assert len(lines) > count
    return cells, seconds


def of_release(cell: PlannedItem, number: int) -> PlannedItem:
    """The same on an engine of another interpreter."""
    assert isinstance(cell.engine, EngineSpec)
    return cell._replace(engine=replace(cell.engine, python=f"vllm-{number}"))


def main(count: int) -> int:
    runs = [planned(count) for _ in range(RUNS)]
    middle = statistics.median(seconds for _, seconds in runs)
    print(f"{count:,} cases: {middle:.3f} s in the median of {RUNS} (bound {LIMIT_S:g} s)")
    groups = groups_of([of_release(cell, n) for cell in runs[0][0] for n in range(RELEASES)][:: RELEASES - 1])
    reached, least = makespan_s(spread(groups, GPUS)), least_s(groups, GPUS)
    print(f"{len(groups)} engines on {GPUS} GPUs: {clock(reached)}, no order takes less than {clock(least)}")
    return int(middle > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else CELLS))
