"""What is sent to a cluster and comes back, or does not: a stand-in for Ray runs the tasks in this process, and
ends their tasks where it is told to."""

from __future__ import annotations

import errno
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_sessions import MODEL

from pytest_slmserve.archive import store
from pytest_slmserve.archive.store import read
from pytest_slmserve.plan.cases import Case, PlannedItem
from pytest_slmserve.run.ray.connect import CaseMeasured, Message, TaskStarted, carried_out, nodes_of
from pytest_slmserve.run.ray.driver import Cluster
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed

OTHER = "opt-1.3b"
LOADS = (1, 2, 4, 8)
DIES = "NodeDiedError"
PROBLEMS = ("NodeDiedError", "LocalRayletDiedError", "ObjectLostError", "OutOfMemoryError", "WorkerCrashedError")


class Task:
    """A stream of messages, as Ray's generators are: `next` gives what `get` waits for. ends: asked before each message
    but the first whether the task ends there, for this reason."""

    def __init__(self, node: str, messages: Iterator[Message], ends: Callable[[Message], Exception | None]) -> None:
        self.node, self.messages, self.ends = node, messages, ends
        self.arrived = self.over = False

    def __next__(self) -> Message | Exception:
        if self.over:
            raise StopIteration
        if not self.arrived:
            self.arrived = True
            return TaskStarted(self.node)
        message = next(self.messages)
        error = self.ends(message)
        self.over = error is not None
        return error or message


class StandIn:
    """Ray, as far as a dispatcher asks it for anything. Tasks run in turn, each on the next node that lives.

    ends: by model and requests in flight, what happens to each repeat of that cell once it has been measured: it comes
    (""), or its task ends by this error, and it does not.
    """

    def __init__(self, nodes: int, ends: dict[tuple[str, int], list[str]]) -> None:
        self.rows = [
            {"NodeID": f"{n:08}", "NodeName": f"node-{n}", "Alive": True, "Resources": {"GPU": 1.0, "CPU": 1.0}}
            for n in range(nodes)
        ]
        self.ends = ends
        self.exceptions = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in PROBLEMS})
        self.sent: list[tuple[str, list[int]]] = []  # node and loads of each engine_task

    def nodes(self) -> list[dict[str, Any]]:
        return self.rows

    def remote(self, **words: Any) -> Callable[..., Any]:
        return lambda function: SimpleNamespace(options=lambda **words: SimpleNamespace(remote=self.task))

    def task(self, engine_task: Any, cases: Any) -> Task:
        engine_task, cases = pickle.loads(pickle.dumps((engine_task, cases)))
        living = [row for row in self.rows if row["Alive"]]
        node = living[len(self.sent) % len(living)]
        self.sent.append((node["NodeName"], [case.concurrency for case in cases.values()]))
        cells = {key: (cases[key].engine.model.rpartition("/")[2], cases[key].concurrency) for key in cases}

        def ends(message: Message) -> Exception | None:
            left = self.ends.get(cells[message.key]) if isinstance(message, CaseMeasured) else None
            if not left or not (name := left.pop(0)):
                return None
            node["Alive"] = name not in ("NodeDiedError", "LocalRayletDiedError")
            return getattr(self.exceptions, name)()

        return Task(node["NodeID"], carried_out(engine_task, cases), ends)

    def wait(self, streams: Sequence[Task], **words: Any) -> tuple[Sequence[Task], Sequence[Task]]:
        return streams[:1], streams[1:]

    def get(self, found: Message | Exception) -> Message:
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self, stream: Task) -> None:
        stream.over = True

    def shutdown(self) -> None:
        pass


class Run:
    """Two models' cells, sent."""

    def __init__(self, session: Session, ray: StandIn) -> None:
        self.session, self.ray = session, ray
        self.cases = {(model, n): self._case(model, n) for model in (MODEL, OTHER) for n in LOADS}
        nodes = nodes_of(ray.nodes())
        self.cluster = session.executor.remote = Cluster(ray, session.options, nodes, session.host)
        cells = [PlannedItem(str(cell), case.engine, 1.0) for cell, case in self.cases.items()]
        self.cluster.send(session, list(self.cases.values()), cells)

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
        self.cluster.close()
        return found

    def made(self) -> Counter[tuple[str, int]]:
        """What the archive holds of each cell."""
        measurements = read(self.session.options.records).measurements
        return Counter((m.spec.model.rpartition("/")[2], m.load.concurrency) for m in measurements)


@pytest.fixture
def run(opened):
    """A run on a cluster: `run(nodes=3, ends={("opt-125m", 4): ["NodeDiedError"]})`."""

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


def test_an_engine_is_one_task_and_all_of_it_comes(run):
    on_cluster = run()
    assert on_cluster.failures() == {} and set(on_cluster.made().values()) == {2}
    assert [loads for _, loads in on_cluster.ray.sent] == [[*LOADS]] * 2


def test_a_node_that_dies_is_made_good_by_another(run):
    on_cluster = run(ends={(MODEL, 4): ["", DIES]})
    assert on_cluster.failures() == {}
    assert len(on_cluster.made()) == 8 and set(on_cluster.made().values()) == {2}, "nothing twice, nothing less"
    assert any(note.endswith(" died; 2 cells of opt-125m were sent once more") for note in on_cluster.session.notes)
    assert on_cluster.ray.sent[-1][1] == [4, 8], "what had come is not sent again"


def test_when_the_second_node_dies_too_one_item_fails_and_no_other(run):
    on_cluster = run(ends={(MODEL, 4): ["", DIES, DIES]})
    [(cell, sentence)] = on_cluster.failures().items()
    assert cell == (MODEL, 4)
    first, second = (f"{row['NodeName']} ({row['NodeID']})" for row in on_cluster.ray.rows if not row["Alive"])
    assert sentence in [
        f"{one} died and {other} died while opt-125m at 4 was measured there, which is once too often\n"
        "  try: pytest again with --slm-resume: what came is kept"
        for one, other in ((first, second), (second, first))
    ]
    made = on_cluster.made()
    assert made.pop((MODEL, 4)) == 1, "what came of it is kept"
    assert len(made) == 7 and set(made.values()) == {2}
    assert on_cluster.ray.sent[-1][1] == [8], "the rest of its engine goes on"


def test_an_archive_that_can_be_written_nowhere_stops_all(run, monkeypatch, tmp_path):
    def no_room(file: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    on_cluster = run()
    monkeypatch.setattr(store, "_append", no_room)
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    failures = on_cluster.failures()
    assert failures.keys() == on_cluster.cases.keys() and on_cluster.cluster._came == 1, "nothing more was taken"
    assert all("and no second file can be written" in sentence for sentence in failures.values())


def test_what_came_of_a_cell_that_failed_is_resumed(run):
    run(ends={(MODEL, 4): ["", DIES, DIES]}).failures()
    again = run(resume=True)
    assert again.failures() == {} and again.ray.sent == [("node-0", [4])]
    assert len(again.made()) == 8 and set(again.made().values()) == {2}


def test_nodes_that_die_at_different_cells_cost_none_of_them(run):
    on_cluster = run(ends={(MODEL, 2): [DIES], (MODEL, 8): [DIES]})
    assert on_cluster.failures() == {} and set(on_cluster.made().values()) == {2}


def test_an_engine_that_ends_its_third_task_gets_no_fourth(run):
    on_cluster = run(nodes=9, ends={(MODEL, n): [DIES] * 9 for n in LOADS})
    failures = on_cluster.failures()
    assert failures.keys() == {(MODEL, n) for n in LOADS}
    assert "died while opt-125m at 1 was measured there" in failures[MODEL, 1]
    assert {failures[MODEL, n].count(" died") for n in (2, 4, 8)} == {3}
    assert "while 3 cells of opt-125m were measured there, which is once too often" in failures[MODEL, 8]
    assert sum(not row["Alive"] for row in on_cluster.ray.rows) == 3
    assert on_cluster.made() == {(OTHER, n): 2 for n in LOADS}


def test_where_no_other_node_is_left_each_cell_that_is_missing_says_so(run):
    on_cluster = run(nodes=1, ends={(OTHER, 2): [DIES]})
    failures = on_cluster.failures()
    missing = {(MODEL, n) for n in LOADS} | {(OTHER, n) for n in LOADS[1:]}
    assert failures.keys() <= missing and {(OTHER, n) for n in LOADS[1:]} <= failures.keys()
    assert "node-0 (00000000) died, and no other node has 1 GPU for 3 cells of opt-1.3b" in failures[OTHER, 2]
    assert on_cluster.made().keys() == on_cluster.cases.keys() - failures.keys()


def test_where_all_nodes_die_before_a_task_begins_nobody_waits_for_others(run, monkeypatch):
    """Ray tells nothing of such a task: it is still to be placed."""
    on_cluster = run(nodes=2)
    monkeypatch.setattr(on_cluster.ray, "wait", lambda streams, **words: ([], streams))
    for row in on_cluster.ray.rows:
        row["Alive"] = False
    failures = on_cluster.failures()
    assert failures.keys() == on_cluster.cases.keys()
    sentence = "node-0 (00000000) died and node-1 (00000001) died, and no other node has 1 GPU for opt-125m"
    assert sentence in failures[MODEL, 1]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("OutOfMemoryError", "node-0 (00000000) ran out of memory while opt-125m at 8 was"),
        ("WorkerCrashedError", "its task was lost on node-0 (00000000) while opt-125m at 8 was"),
    ],
)
def test_a_task_that_ends_while_its_node_lives_is_told_apart(run, error, says):
    on_cluster = run(nodes=1, ends={(MODEL, 8): [error] * 2})
    [(cell, sentence)] = on_cluster.failures().items()
    assert cell == (MODEL, 8) and sentence.startswith(says)
