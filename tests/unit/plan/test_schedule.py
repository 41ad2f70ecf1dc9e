"""A plan on many GPUs, on paper: nobody is in two places at once, and no order is much better."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.plan.cases import (
    Group,
    PlannedItem,
    groups_of,
    in_order,
    makespan_s,
    spread,
    spread_lines,
    start_estimate_s,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec

ONE = EngineSpec("opt-125m")


def group(seconds: float, gpus: int = 1) -> Group:
    return Group(replace(ONE, tensor_parallel_size=gpus), 0, seconds)


GROUPS = st.lists(st.builds(group, st.floats(1, 1000), st.integers(1, 4)), min_size=1, max_size=40)


@given(GROUPS, st.integers(4, 64))
def test_each_group_has_its_gpus_to_itself_and_all_of_them_at_once(groups, gpus):
    placed = spread(groups, gpus)
    assert sorted(each.seconds for each in placed) == sorted(each.seconds for each in groups)
    for each in placed:
        assert len(set(each.gpus)) == len(each.engine.gpus) and max(each.gpus) < gpus
    for gpu in range(gpus):
        its = sorted((p for p in placed if gpu in p.gpus), key=lambda p: p.begins_s)
        assert all(first.begins_s + first.seconds <= second.begins_s for first, second in pairwise(its))


@given(st.lists(st.builds(group, st.floats(1, 1000)), min_size=1, max_size=60), st.integers(1, 64))
def test_of_engines_on_one_gpu_each_it_takes_at_most_four_thirds_of_the_best(groups, gpus):
    """Graham 1969: longest first. The bound of the best is that of the GPU seconds, the longest, and the two that must
    share a GPU where there are more groups than GPUs."""
    longest = sorted((g.seconds for g in groups), reverse=True)
    pair = longest[gpus - 1] + longest[gpus] if len(longest) > gpus else 0.0
    best = max(sum(longest) / gpus, longest[0], pair)
    reached = makespan_s(spread(groups, gpus))
    assert best * (1 - 1e-9) <= reached <= best * (4 / 3) * (1 + 1e-9) + longest[-1]


def test_three_models_on_two_gpus():
    assert makespan_s(spread([group(100), group(90), group(180)], 2)) == 190


def test_what_others_are_compared_with_begins_then_the_widest_then_the_longest():
    """Replicas on one GPU are compared too, and so is nothing that runs on one number of GPUs alone."""
    two = Group(ReplicaSpec((ONE, ONE)), 0, 70)
    each = Group(ReplicaSpec((ONE, replace(ONE, gpu=1)), "gpus"), 0, 15)
    other, server = (Group(replace(ONE, **field), 0, 60) for field in ({"model": "opt-1.3b"}, {"interface": "server"}))
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
    assert [(len(g.engine.gpus), g.seconds - start_estimate_s(g.engine), g.items) for g in groups_of(cells)] == [
        (1, 11.0, 2),
        (2, 1.0, 1),
        (2, 7.0, 1),
    ]


def test_as_text():
    cells = [PlannedItem("a", ONE, 5.0), PlannedItem("b", replace(ONE, tensor_parallel_size=2), 7.0)]
    assert spread_lines(cells, 2) == [
        "GPU 0: opt-125m from 0:00 (1 item, 1:00 min), opt-125m on 2 GPUs from 1:00 (1 item, 1:02 min)",
        "GPU 1: opt-125m on 2 GPUs from 1:00 (1 item, 1:02 min)",
        "spread by engine: 2:02 min on 2 GPUs; one engine after the other: 2:02 min",
    ]
    assert spread_lines(cells[:1] * 3, 2) == [
        "GPU 0: opt-125m from 0:00 (3 items, 1:10 min)",
        "GPU 1: nothing",
        "spread by engine: 1:10 min on 2 GPUs; one engine after the other: 1:10 min",
    ]
    assert spread_lines([], 1) == [
        "GPU 0: nothing",
        "spread by engine: 0:00 min on 1 GPU; one engine after the other: 0:00 min",
    ]


def test_too_few_gpus():
    with pytest.raises(BadUsage, match="an engine takes 4 GPUs, and the plan has 2"):
        spread([group(1, 4)], 2)
