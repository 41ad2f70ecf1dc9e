"""A plan on many GPUs, on paper: nobody is in two places at once, and no order is much better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.plan.cases import PlannedItem, start_estimate_s
from pytest_slmserve.plan.schedule import (
    Group,
    divided,
    groups_of,
    in_order,
    least_s,
    makespan_s,
    seconds_of,
    spread,
    spread_lines,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec

ONE = EngineSpec("opt-125m")


def group(seconds: float, gpus: int = 1) -> Group:
    return Group(replace(ONE, tensor_parallel_size=gpus), (), gpus, seconds)


GROUPS = st.lists(st.builds(group, st.floats(1, 1000), st.integers(1, 4)), min_size=1, max_size=40)


@given(GROUPS, st.integers(4, 64))
def test_each_group_has_its_gpus_to_itself_and_all_of_them_at_once(groups, gpus):
    placed = spread(groups, gpus)
    assert sorted(p.group.seconds for p in placed) == sorted(g.seconds for g in groups)
    for placement in placed:
        assert len(set(placement.gpus)) == placement.group.gpus and max(placement.gpus) < gpus
        assert placement.ends_s - placement.begins_s == pytest.approx(placement.group.seconds)
    for gpu in range(gpus):
        its = sorted((p for p in placed if gpu in p.gpus), key=lambda p: p.begins_s)
        assert all(first.ends_s <= second.begins_s for first, second in pairwise(its))


@given(GROUPS, st.integers(4, 64))
def test_no_order_takes_less_than_the_bound(groups, gpus):
    assert makespan_s(spread(groups, gpus)) >= least_s(groups, gpus) * (1 - 1e-9)


@given(st.lists(st.builds(group, st.floats(1, 1000)), min_size=1, max_size=60), st.integers(1, 64))
def test_of_engines_on_one_gpu_each_it_takes_at_most_four_thirds_of_the_best(groups, gpus):
    """Graham 1969: longest first. The bound of the best is that of the GPU seconds, the longest, and the two that must
    share a GPU where there are more groups than GPUs."""
    longest = sorted((g.seconds for g in groups), reverse=True)
    pair = longest[gpus - 1] + longest[gpus] if len(longest) > gpus else 0.0
    best = max(least_s(groups, gpus), pair)
    assert makespan_s(spread(groups, gpus)) <= best * (4 / 3) * (1 + 1e-9) + longest[-1]


def test_three_models_on_two_gpus():
    placed = spread([group(100), group(90), group(180)], 2)
    assert makespan_s(placed) == 190 and least_s([group(100), group(90), group(180)], 2) == 185


def test_what_others_are_compared_with_begins_then_the_widest_then_the_longest():
    """Replicas on one GPU are compared too, and so is nothing that runs on one number of GPUs alone."""
    two = Group(ReplicaSpec((ONE, ONE)), (), 1, 70)
    each = Group(ReplicaSpec((ONE, replace(ONE, gpu=1)), "gpus"), (), 2, 15)
    other, server = (
        Group(replace(ONE, **field), (), 1, 60) for field in ({"model": "opt-1.3b"}, {"interface": "server"})
    )
    expected = [group(30), group(20, 4), group(10, 2), two, other, server]
    expected.insert(2, each)
    assert in_order(sorted(expected, key=lambda group: group.seconds)) == expected


def test_an_engine_starts_once_for_all_of_its_cells():
    both = ReplicaSpec((ONE, replace(ONE, gpu=1)), "gpus")
    wide = replace(ONE, tensor_parallel_size=2)
    cells = [
        PlannedItem("a", ONE, 5.0),
        PlannedItem("b", wide, 7.0),
        PlannedItem("c", ONE, 6.0),
        PlannedItem("d", both, 1.0),
        PlannedItem("e", None, 0.0),
    ]
    assert [(g.gpus, g.seconds - start_estimate_s(g.engine), len(g.cells)) for g in groups_of(cells)] == [
        (1, 11.0, 2),
        (2, 7.0, 1),
        (2, 1.0, 1),
    ]


def cells_of(model: str, seconds: Iterable[float], **fields: Any) -> list[PlannedItem]:
    """Cells of one engine, each under a load of its own."""
    engine = replace(ONE, model=model, model_facts=None, **fields)
    return [PlannedItem(f"{model} {n}", engine, each, ClosedLoop(n + 1)) for n, each in enumerate(seconds)]


CELLS = st.lists(
    st.builds(
        cells_of,
        st.sampled_from(["opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b"]),
        st.lists(st.floats(0, 100), min_size=1, max_size=12),
        tensor_parallel_size=st.sampled_from([1, 1, 1, 2]),
        platform=st.sampled_from(["cuda", "simulated"]),
    ),
    min_size=1,
    max_size=6,
).map(lambda found: [cell for its in found for cell in its])


@given(CELLS, st.integers(2, 16))
def test_a_division_loses_no_cell_and_doubles_none(cells, gpus):
    whole = groups_of(cells)
    parts = divided(whole, gpus)
    assert Counter(cell for group in parts for cell in group.cells) == Counter(cells)
    for group in whole:
        its = [part for part in parts if part.engine == group.engine]
        assert its == [group] or group.divisible
        loads = [load for part in its for load in part.by_load]
        assert len(loads) == len(set(loads)) and len(its) <= gpus, "what is under one load stays together"
        assert all(
            part.seconds == pytest.approx(start_estimate_s(part.engine) + seconds_of(part.cells)) for part in its
        )
    before, after = makespan_s(spread(whole, gpus)), makespan_s(spread(parts, gpus))
    assert after < before or len(parts) == len(whole)
    assert after >= least_s(whole, gpus) * (1 - 1e-9)


def test_three_sweeps_on_two_gpus_end_together():
    """As whole engines two of them have a GPU to themselves, and the third waits for one of these."""
    cells = [*cells_of("opt-125m", [14] * 11), *cells_of("opt-1.3b", [13] * 11), *cells_of("opt-2.7b", [12] * 11)]
    whole = groups_of(cells)
    parts = divided(whole, 2)
    assert [group.engine.model for group in parts] == ["opt-125m", "opt-1.3b", "opt-2.7b", "opt-2.7b"]
    alone = sum(group.seconds for group in whole)
    assert makespan_s(spread(whole, 2)) > 0.63 * alone and makespan_s(spread(parts, 2)) < 0.57 * alone


@pytest.mark.parametrize(("models", "gpus", "parts"), [(1, 4, 4), (3, 6, 6), (3, 3, 3)])
def test_engines_that_take_the_same(models, gpus, parts):
    """Dividing one of them alone would save nothing."""
    cells = [cell for model in range(models) for cell in cells_of(f"opt-{model}", [20] * 12)]
    assert len(divided(groups_of(cells), gpus)) == parts


def test_what_the_last_engine_waits_for_is_divided():
    """An engine on both GPUs begins when the one that it is compared with has ended."""
    cells = [*cells_of("opt-6.7b", [60] * 10), *cells_of("opt-6.7b", [60], tensor_parallel_size=2)]
    whole = groups_of(cells)
    parts = divided(whole, 2)
    assert [(group.gpus, len(group.cells)) for group in parts] == [(1, 5), (1, 5), (2, 1)]
    assert makespan_s(spread(whole, 2)) == 770 and makespan_s(spread(parts, 2)) == 470


UNDIVIDED = {
    "what is asked for is not known": [PlannedItem("a", ONE, 100.0), PlannedItem("b", ONE, 100.0, ClosedLoop(1))],
    "one load": [PlannedItem("a", ONE, 100.0, ClosedLoop(1)), PlannedItem("b", ONE, 100.0, ClosedLoop(1))],
    "two GPUs": cells_of("opt-6.7b", [100, 100], tensor_parallel_size=2),
    "replicas": [PlannedItem("a", ReplicaSpec((ONE, ONE)), 100.0, ClosedLoop(n)) for n in (2, 4)],
    "hardly longer than its start": cells_of("opt-125m", [2, 2]),
    "small beside what is longest": [*cells_of("opt-6.7b", [900.0]), *cells_of("opt-125m", [100, 100])],
    "what costs nothing": cells_of("opt-125m", [0, 0], platform="simulated"),
    "nothing": [],
}


@pytest.mark.parametrize("cells", UNDIVIDED.values(), ids=UNDIVIDED)
def test_what_stays_whole(cells):
    groups = groups_of(cells)
    assert sorted(map(repr, divided(groups, 4))) == sorted(map(repr, groups))


def test_as_text():
    cells = [PlannedItem("a", ONE, 5.0), PlannedItem("b", replace(ONE, tensor_parallel_size=2), 7.0)]
    assert spread_lines(cells, 2) == [
        "GPU 0: opt-125m from 0:00 (1 item, 1:00 min), opt-125m on 2 GPUs from 1:00 (1 item, 1:02 min)",
        "GPU 1: opt-125m on 2 GPUs from 1:00 (1 item, 1:02 min)",
        "spread by engine: 2:02 min on 2 GPUs, no order takes less than 1:32 min; one engine after the other: 2:02 min",
    ]
    assert spread_lines(cells_of("opt-125m", [60, 60, 60]), 2) == [
        "GPU 0: opt-125m from 0:00 (2 of 3 items, 2:55 min)",
        "GPU 1: opt-125m from 0:00 (1 of 3 items, 1:55 min)",
        "spread by engine: 2:55 min on 2 GPUs, no order takes less than 1:58 min; one engine after the other: 3:55 min",
    ]
    assert spread_lines([], 1) == [
        "GPU 0: nothing",
        "spread by engine: 0:00 min on 1 GPU, no order takes less than 0:00 min; one engine after the other: 0:00 min",
    ]


def test_too_few_gpus():
    with pytest.raises(BadUsage, match="an engine takes 4 GPUs, and the plan has 2"):
        spread([group(1, 4)], 2)
