"""How long a large plan takes to make, and how good it is, on paper: nothing is started.

    python studies/plan_cost.py [--cases 10000] [--gpus 4 8 16 32 64]

First the time: cases are estimated, the plan is written, and it is spread over 64 GPUs. The cases are points of six
models on 1, 2 and 4 GPUs, as pytest would hand them over; collecting them is pytest's affair and is not counted. Exit
status 1 if the median is over a second.

Then the order, with all models of the catalogue through both interfaces: as sweeps, on 1, 2 and 4 GPUs, as replicas
with a GPU each and as replicas that share one. For each number of GPUs the table has the makespan if an engine starts
once and serves all of its cases, and the makespan if an engine starts for each case. Seconds are those that
`--slm-plan` expects on H200s.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import get_args

from common import parser_of

from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import Case, PlannedItem, clock, groups_of, makespan_s, plan_lines, spread
from pytest_slmserve.plugin.items import ItemPlan, parameters_of
from pytest_slmserve.plugin.progress import plan_rows
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import OwnInterface
from pytest_slmserve.schema.models import CATALOGUE

LIMIT_S = 1.0
RUNS = 5
GPUS = 64
MODELS = ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "qwen2.5-3b")
FIXTURES = ("slm_point", "slm_gpus_point", "slm_replica_point")  # of the sweeps, several GPUs and replicas


def item(case: Case) -> ItemPlan:
    return ItemPlan(f"test_point[{case.id}]", case=case, engine=case.engine)


def session_of(**given: object) -> Session:
    with tempfile.TemporaryDirectory() as folder:
        return Session.from_options(read_options({"gpu": True, "plan": True} | given, {}, {}), Path(folder))


def planned(count: int) -> tuple[list[PlannedItem], float]:
    """So many cases, and the seconds of CPU time that it took to estimate and write them."""
    session = session_of(input_len="64", output_len="32")
    planner, began = session.planner, time.process_time()
    degrees = list(product(MODELS, (1, 2, 4)))
    engines = {(model, gpus): planner.spec(model, gpus) for model, gpus in degrees}
    loads = range(1, 1 + -(-count // len(degrees)))
    found = [
        item(planner.case(engines[model, gpus], [planner.workload(model)], [planner.load(load)], id=str(number)))
        for number, ((model, gpus), load) in enumerate(islice(product(degrees, loads), count))
    ]
    cases = plan_rows(session, found)
    lines = plan_lines(cases)
    spread(groups_of(cases), GPUS)
    seconds = time.process_time() - began
    assert len(lines) > count
    return cases, seconds


def cases_of_all(models: Sequence[str]) -> list[PlannedItem]:
    """Cases of both interfaces that can be had."""
    found: list[PlannedItem] = []
    for interface in get_args(OwnInterface):
        session = session_of(interface=interface, models=",".join(models), replicas="2,3")
        cases = [case for fixture in FIXTURES for each in parameters_of(fixture, session, {}) for case in each.values]
        found += plan_rows(session, [item(case) for case in cases if not case.skip_reason])
    return found


def rows(cases: Sequence[PlannedItem], gpus: Sequence[int]) -> Iterator[tuple[str, ...]]:
    whole, apart = groups_of(cases), [group for case in cases for group in groups_of([case])]
    yield "GPUs", "engine starts", "makespan", "a start per case", "makespan"
    for count in gpus:
        reached, alone = (clock(makespan_s(spread(groups, count))) for groups in (whole, apart))
        yield str(count), str(len(whole)), reached, str(len(apart)), alone


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, nargs="*", default=[4, 8, 16, 32, 64])
    parser.add_argument("--models", nargs="+", default=[name for name in CATALOGUE if not name.endswith("tiny")])
    given = parser.parse_args()
    runs = [planned(given.cases) for _ in range(RUNS)]
    middle = statistics.median(seconds for _, seconds in runs)
    print(f"{given.cases:,} cases: {middle:.3f} s in the median of {RUNS} (limit {LIMIT_S:g} s)\n")
    if given.gpus:
        cases = cases_of_all(given.models)
        print(f"{len(cases)} cases of {len(given.models)} models\n")
        head, *body = rows(cases, given.gpus)
        for row in (head, ["---"] * len(head), *body):
            print(f"| {' | '.join(row)} |")
    return int(middle > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
