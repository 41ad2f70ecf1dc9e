"""Which worker gets what, by workers that are simulated: they answer as xdist's do, in any order, and some crash."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xdist")

from pytest_slmserve.scheduling import LAST, EngineScheduling


class Node:
    """Runs its items in the order sent, the last of them only when it knows what comes next, as xdist's workers do."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices):
        assert not self.shutting_down
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def can_run(self) -> bool:
        return len(self.queue) > 1 or bool(self.queue and self.shutting_down)


def scheduled(engines, last, workers):
    """Scheduler, its nodes, and the items with their scopes."""
    scopes = {f"t.py::{engine}-{i}": f"engine {engine}" for engine, size in enumerate(engines) for i in range(size)}
    scopes |= {f"t.py::last-{i}": LAST for i in range(last)}
    items = [*scopes, "t.py::other"]
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True), getvalue=lambda _: ["popen"] * workers)
    log = SimpleNamespace(loadscopesched=lambda *_: None)
    found = EngineScheduling(config, log, lambda: scopes)
    found.numnodes = workers
    nodes = [Node(f"gw{i}") for i in range(workers)]
    for node in nodes:
        found.add_node(node)
        found.add_node_collection(node, items)
    return found, nodes, scopes, items


def run(found, nodes, items, draw, crashes=0):
    """All of it, the worker that is next being drawn. Who ran what, in order, and what crashed its worker."""
    found.schedule()
    ran, crashed = [], []
    while busy := [node for node in nodes if node.can_run]:
        node = draw(busy)
        if len(crashed) < crashes and draw([True, False]):
            nodes.remove(node)
            crashed.append(found.remove_node(node))
            nodes.append(clone := Node(f"clone{len(crashed)}"))
            found.add_node(clone)
            found.add_node_collection(clone, items)
            found.schedule()
        else:
            index = node.queue.pop(0)
            ran.append((node, items[index]))
            found.mark_test_complete(node, index)
        if found.tests_finished:
            for each in nodes:
                each.shutdown()
    return ran, crashed


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 4), st.data())
def test_each_item_once_an_engine_by_one_worker_and_what_reads_at_the_end(engines, last, workers, data):
    found, nodes, scopes, items = scheduled(engines, last, workers)
    ran, _ = run(found, nodes, items, lambda choices: data.draw(st.sampled_from(choices)))
    assert sorted(item for _, item in ran) == sorted(items)
    for scope in set(scopes.values()):
        assert len({node for node, item in ran if scopes.get(item) == scope}) == 1
    order = [scopes.get(item) for _, item in ran]
    if last:
        assert order[-last:] == [LAST] * last


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(1, 3), st.integers(2, 3), st.data())
def test_a_worker_that_crashes_loses_one_item_and_nothing_is_run_twice(engines, last, workers, data):
    found, nodes, scopes, items = scheduled(engines, last, workers)
    ran, crashed = run(found, nodes, items, lambda choices: data.draw(st.sampled_from(choices)), crashes=2)
    assert sorted([*(item for _, item in ran), *filter(None, crashed)]) == sorted(items)
    seen = [scopes.get(item) for _, item in ran]
    measured = [i for i, scope in enumerate(seen) if scope and scope != LAST]
    assert LAST not in seen[: max(measured, default=0)], "what reads came before all was measured"
