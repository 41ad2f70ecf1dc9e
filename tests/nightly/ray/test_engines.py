"""Engines of a cluster, and what comes back of them: a stand-in for Ray runs the actors, and ends them as planned."""

from __future__ import annotations

import errno
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_sessions import MODEL

from pytest_slmserve.archive import store
from pytest_slmserve.archive.store import read
from pytest_slmserve.plan.cases import Case, PlannedItem
from pytest_slmserve.run import cluster
from pytest_slmserve.run.cluster import RESTARTS, EngineAnswer, RayEngines, RemoteEngine, nodes_of
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed

OTHER = "opt-1.3b"
LOADS = (1, 2, 4, 8)
DIES, LOST = "its node dies", "its process is lost"


class ActorLost(Exception):
    """Ray's error for calls of an actor that it does not start again."""


@dataclass(eq=False)
class Call:
    actor: Actor
    method: str
    arguments: tuple[Any, ...]


class Actor:
    """An actor on the next node that lives. Its calls are carried out in order, when somebody waits for them."""

    def __init__(self, ray: StandIn, arguments: tuple[Any, ...]) -> None:
        self.ray, self.arguments, self.lives = ray, pickle.dumps(arguments), 0
        self.queue: list[tuple[str, tuple[Any, ...]]] = []
        self.begin()

    def begin(self) -> None:
        living = [row for row in self.ray.rows if row["Alive"]]
        self.node = living[len(self.ray.begun) % len(living)] if living else None
        self.lives += 1
        self.engine = RemoteEngine(*pickle.loads(self.arguments))
        self.ray.begun.append(self.node["NodeName"] if self.node else "")

    def __getattr__(self, method: str) -> SimpleNamespace:
        def call(*arguments: Any) -> Call:
            return Call(self, method, arguments)

        return SimpleNamespace(remote=call)

    def answer(self, method: str, arguments: tuple[Any, ...]) -> EngineAnswer:
        """The answer to a call, repeated by Ray as often as it begins the actor again."""
        while self.lives <= RESTARTS + 1:
            if self.node is None:
                raise TimeoutError
            place = self.node["NodeID"], self.lives
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cluster, "process_place", partial(tuple, place))
                answer = getattr(self.engine, method)(*arguments)
            case = arguments[1][arguments[0]] if arguments else None
            ends = self.ray.ends.get((case.engine.model.rpartition("/")[2], case.concurrency)) if case else None
            how = ends.pop(0) if ends and answer.packed else ""
            if not how:
                return answer
            self.node["Alive"] = how != DIES
            if self.engine.session:
                self.engine.session.close()
            self.begin()
        raise ActorLost


class StandIn:
    """Ray, as far as engines are concerned.

    ends: by model and concurrent requests, what happens to each repeat of that case once it has been measured: it comes
    (""), or its actor ends in this way, and it does not.
    """

    def __init__(self, nodes: int, ends: dict[tuple[str, int], list[str]]) -> None:
        self.rows = [
            {"NodeID": f"{n:08}", "NodeName": f"node-{n}", "Alive": True, "Resources": {"GPU": 1.0, "CPU": 1.0}}
            for n in range(nodes)
        ]
        self.ends, self.begun = ends, list[str]()  # nodes on which actors began
        self.exceptions = SimpleNamespace(RayActorError=ActorLost)
        self.answers: dict[Any, Any] = {}
        self.silent = False

    def put(self, value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    def nodes(self) -> list[dict[str, Any]]:
        return self.rows

    def remote(self, kind: type) -> SimpleNamespace:
        make = SimpleNamespace(remote=lambda *arguments: Actor(self, arguments))
        return SimpleNamespace(options=lambda **words: make)

    def wait(self, calls: Sequence[Any], **words: Any) -> tuple[list[Any], list[Any]]:
        for call in [] if self.silent else calls:
            try:
                self.answers[call] = call.actor.answer(call.method, call.arguments)
            except TimeoutError:  # it is still to be placed
                continue
            except ActorLost as error:
                self.answers[call] = error
            return [call], []
        return [], list(calls)

    def get(self, call: Any) -> EngineAnswer:
        if isinstance(answer := self.answers.pop(call), Exception):
            raise answer
        return answer

    def kill(self, actor: Actor) -> None:
        if actor.engine.session:
            actor.engine.session.close()

    def shutdown(self) -> None:
        pass


class Run:
    """Two models' cases, sent."""

    def __init__(self, session: Session, ray: StandIn) -> None:
        self.session, self.ray = session, ray
        self.cases = {(model, n): self._case(model, n) for model in (MODEL, OTHER) for n in LOADS}
        self.engines = RayEngines(ray, session.options, nodes_of(ray.nodes()), session.host)
        session.executor.fetch = self.engines.fetch
        session.undo.callback(self.engines.close)
        rows = [PlannedItem(str(cell), case.engine, 1.0) for cell, case in self.cases.items()]
        self.engines.send(session, list(self.cases.values()), rows)

    def _case(self, model: str, concurrency: int) -> Case:
        planner = self.session.planner
        return planner.case(planner.spec(model), [planner.workload(model)], [planner.load(concurrency)])

    def failures(self) -> dict[tuple[str, int], str]:
        """What each item of the run fails with, asked in their order; those that pass are not in it."""
        found = {}
        for cell, case in self.cases.items():
            try:
                assert len(self.session.executor.measure(case, 2)) == 2
            except (BadUsage, EngineFailed) as error:
                found[cell] = str(error)
        self.engines.close()
        return found

    def made(self) -> Counter[tuple[str, int]]:
        """What the archive holds of each case."""
        measurements = read(self.session.options.records).measurements
        return Counter((m.spec.model.rpartition("/")[2], m.load.concurrency) for m in measurements)


@pytest.fixture
def run(opened) -> Callable[..., Run]:
    """A run on a cluster: `run(nodes=3, ends={("opt-125m", 4): [DIES]})`."""

    def begun(nodes: int = 4, ends: dict[tuple[str, int], list[str]] | None = None, **given: object) -> Run:
        words = {
            "models": f"{MODEL},{OTHER}",
            "concurrency": ",".join(map(str, LOADS)),
            "window": "0.5",
            "input_len": "32",
            "output_len": "8",
            "ray": "auto",
        }
        return Run(opened(**{**words, **given}), StandIn(nodes, ends or {}))

    return begun


def test_an_engine_is_one_actor_and_all_of_it_comes(run):
    on_cluster = run()
    assert on_cluster.failures() == {} and set(on_cluster.made().values()) == {2}
    assert on_cluster.ray.begun == ["node-0", "node-1"]
    assert on_cluster.session.notes[-1].startswith("measured on node-0 (00000000) (1 engine), node-1 (00000001) (1 ")


@pytest.mark.parametrize(
    ("how", "said"), [(DIES, "node-0 (00000000) died"), (LOST, "its task was lost on node-0 (00000000)")]
)
def test_a_lost_engine_begins_again_and_nothing_is_measured_twice(run, how, said):
    on_cluster = run(ends={(MODEL, 4): ["", how]})
    assert on_cluster.failures() == {}
    assert len(on_cluster.made()) == 8 and set(on_cluster.made().values()) == {2}, "nothing twice, nothing less"
    assert f"{said}; 2 cells of opt-125m were sent once more" in on_cluster.session.notes


def test_an_unclean_repeat_gets_one_extra_attempt(run):
    on_cluster = run(engine_arg=["preempt_from=8"])
    for case in on_cluster.cases.values():
        on_cluster.session.executor.measure(case, 2)
    on_cluster.engines.close()
    assert on_cluster.made() == {(model, n): 3 if n == 8 else 2 for model, n in on_cluster.cases}


def test_nodes_that_die_at_different_cells_cost_none_of_them(run):
    on_cluster = run(ends={(MODEL, 2): [DIES], (MODEL, 8): [DIES]})
    assert on_cluster.failures() == {} and set(on_cluster.made().values()) == {2}


def test_an_engine_that_ends_its_third_process_gets_no_fourth(run):
    on_cluster = run(nodes=9, ends={(MODEL, 2): [DIES] * 9})
    failures = on_cluster.failures()
    assert failures.keys() == {(MODEL, n) for n in LOADS[1:]}
    assert failures[MODEL, 2].endswith(
        "died while 3 cells of opt-125m were measured there, which is once too often\n"
        "  try: pytest again with --slm-resume: what came is kept"
    )
    assert sum(not row["Alive"] for row in on_cluster.ray.rows) == 3
    assert on_cluster.made() == {(MODEL, 1): 2} | {(OTHER, n): 2 for n in LOADS}


def test_what_came_of_an_engine_that_failed_is_resumed(run):
    run(ends={(MODEL, 4): ["", DIES, DIES, DIES]}).failures()
    again = run(resume=True)
    assert again.failures() == {} and again.ray.begun == ["node-0"]
    assert len(again.made()) == 8 and set(again.made().values()) == {2}


def test_an_archive_that_can_be_written_nowhere_stops_all(run, monkeypatch, tmp_path):
    def no_room(file: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    on_cluster = run()
    monkeypatch.setattr(store, "_append", no_room)
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    failures = on_cluster.failures()
    assert failures.keys() == on_cluster.cases.keys() and on_cluster.engines._came == 1, "nothing more was taken"
    assert all("and no second file can be written" in sentence for sentence in failures.values())


def test_if_no_other_node_is_left_each_cell_that_is_missing_says_so(run):
    on_cluster = run(nodes=1, ends={(OTHER, 2): [DIES]})
    failures = on_cluster.failures()
    missing = {(MODEL, n) for n in LOADS} | {(OTHER, n) for n in LOADS[1:]}
    assert failures.keys() <= missing and {(OTHER, n) for n in LOADS[1:]} <= failures.keys()
    assert "node-0 (00000000) died, and no other node has 1 GPU for 3 cells of opt-1.3b" in failures[OTHER, 2]
    assert on_cluster.made().keys() == on_cluster.cases.keys() - failures.keys()


def test_if_all_nodes_die_before_an_engine_begins_nobody_waits_for_others(run):
    """Ray tells nothing of such an actor: it is still to be placed."""
    on_cluster = run(nodes=2)
    on_cluster.ray.silent = True
    for row in on_cluster.ray.rows:
        row["Alive"] = False
    failures = on_cluster.failures()
    assert failures.keys() == on_cluster.cases.keys()
    sentence = "node-0 (00000000) died and node-1 (00000001) died, and no other node has 1 GPU for opt-125m"
    assert sentence in failures[MODEL, 1]
