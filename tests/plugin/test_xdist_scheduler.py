"""Which worker gets what, by workers that are simulated: they answer as xdist's do and wait for their GPUs as desks do,
in any order, and some crash."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xdist")

from pytest_slmserve.plugin.xdist_scheduler import LAST, EngineScheduling
from pytest_slmserve.run.gpu_slots import GpuSlot


class Gpus:
    """Whoever waits has none, and those that come later wait behind it."""

    def __init__(self) -> None:
        self.taken: dict[int, Node] = {}
        self.line: list[tuple[Node, list[tuple[int, ...]]]] = []

    def take(self, node: Node, blocks: list[tuple[int, ...]]) -> None:
        self.leave(node)
        self.line.append((node, blocks))
        self._serve()

    def leave(self, node: Node) -> None:
        self.taken = {gpu: owner for gpu, owner in self.taken.items() if owner is not node}
        self.line = [(other, blocks) for other, blocks in self.line if other is not node]
        self._serve()

    def _serve(self) -> None:
        while self.line and (block := next(filter(self.taken.keys().isdisjoint, self.line[0][1]), None)):
            self.taken |= dict.fromkeys(block, self.line.pop(0)[0])

    def waits(self, node: Node) -> bool:
        return any(other is node for other, _ in self.line)


class Node:
    """Begins an item only when it knows what comes next, as xdist's workers do. Its engine has its GPUs until the next
    item is of another one."""

    def __init__(self, run: Run, place: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{place}")
        self.run, self.place = run, place
        self.queue: list[int] = []
        self.shutting_down = False
        self.at: tuple[int, int | None] | None = None  # its item, and the next
        self.engine: str | None = None

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def step(self):
        """What it can do now; None where it waits for something."""
        if self.at:
            return None if self.run.gpus.waits(self) else self.end
        return self.begin if len(self.queue) > 1 or (self.queue and self.shutting_down) else None

    def begin(self) -> None:
        self.at = self.queue.pop(0), self.queue[0] if self.queue else None
        engine = self.run.engine_at(self.at[0])
        if engine and engine != self.engine:
            self.engine = engine
            self.run.gpus.take(self, self.run.blocks(engine, self.place))

    def end(self) -> None:
        index, following = self.at
        if following is None or self.run.engine_at(following) != self.engine:
            self.run.gpus.leave(self)
            self.engine = None
        self.at = None
        self.run.completed(self, index)


class Run:
    """draw: chooses among what could happen next. engines: cells and GPUs of each."""

    def __init__(self, engines, last, others, workers, draw, crashes=0) -> None:
        self.gpus, self.draw, self.crashes, self.workers = Gpus(), draw, crashes, workers
        self.wide = {f"engine {i}": min(wide, workers) for i, (_, wide) in enumerate(engines)}
        self.scopes = {
            f"t.py::{i}-{cell}": f"engine {i}" for i, (cells, _) in enumerate(engines) for cell in range(cells)
        }
        self.scopes |= {f"t.py::last-{i}": LAST for i in range(last)}
        self.items = [*self.scopes, *(f"t.py::other-{i}" for i in range(others))]
        self.ran: list[tuple[Node, str]] = []
        self.crashed: list[str | None] = []
        config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True), getvalue=lambda _: ["popen"] * workers)
        self.found = EngineScheduling(config, SimpleNamespace(loadscopesched=lambda *_: None), lambda: self.scopes)
        self.nodes = [Node(self, place) for place in range(workers)]
        self.new: list[Node] = []  # replace those that crashed, and have not collected
        for node in self.nodes:
            self.found.add_node(node)
        for node in self.nodes:
            self.found.add_node_collection(node, self.items)
        self.found.schedule()

    def engine_at(self, index: int) -> str | None:
        scope = self.scopes.get(self.items[index])
        return None if scope == LAST else scope

    def blocks(self, engine: str, place: int) -> list[tuple[int, ...]]:
        return GpuSlot("", place, ("",) * self.workers).blocks(self.wide[engine])

    def completed(self, node: Node, index: int) -> None:
        self.ran.append((node, self.items[index]))
        self.found.mark_test_complete(node, index)

    def crash(self, node: Node) -> None:
        self.nodes.remove(node)
        self.gpus.leave(node)
        self.crashed.append(self.found.remove_node(node))
        self.new.append(clone := Node(self, node.place))
        self.found.add_node(clone)

    def collect(self) -> None:
        node = self.new.pop(0)
        self.nodes.append(node)
        self.found.add_node_collection(node, self.items)
        self.found.schedule()

    def through(self) -> Run:
        """Until nothing can happen any more."""
        while steps := [step for node in self.nodes if (step := node.step)] + [self.collect] * bool(self.new):
            there = [node for node in self.nodes if node in self.found.nodes]  # workers too many are none
            if there and len(self.crashed) < self.crashes and self.draw([True, False]):
                self.crash(self.draw(there))
            else:
                self.draw(steps)()
            if self.found.tests_finished:
                for node in self.nodes + self.new:
                    node.shutdown()
        return self


ENGINES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=6)


def run(engines, last, others, workers, data, crashes=0) -> Run:
    return Run(engines, last, others, workers, lambda those: data.draw(st.sampled_from(those)), crashes).through()


@given(ENGINES, st.integers(0, 3), st.integers(0, 2), st.integers(1, 4), st.data())
def test_each_item_once_an_engine_by_one_worker_and_what_reads_at_the_end(engines, last, others, workers, data):
    """None is left: nobody waits for a GPU of somebody who waits for his next item."""
    found = run(engines, last, others, workers, data)
    assert sorted(item for _, item in found.ran) == sorted(found.items)
    for scope in set(found.scopes.values()):
        assert len({node for node, item in found.ran if found.scopes.get(item) == scope}) == 1
    order = [found.scopes.get(item) for _, item in found.ran]
    if last:
        assert order[-last:] == [LAST] * last


@given(ENGINES, st.integers(0, 3), st.integers(0, 2), st.integers(1, 4), st.data())
def test_a_worker_that_crashes_loses_one_item_and_nothing_is_run_twice(engines, last, others, workers, data):
    found = run(engines, last, others, workers, data, crashes=2)
    assert sorted([*(item for _, item in found.ran), *filter(None, found.crashed)]) == sorted(found.items)
    seen = [found.scopes.get(item) for _, item in found.ran]
    measured = [i for i, scope in enumerate(seen) if scope != LAST]
    assert LAST not in seen[: max(measured, default=0)], "what reads came before all was measured"
