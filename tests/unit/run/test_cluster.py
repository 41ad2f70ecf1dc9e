"""Engines of a cluster without a cluster: which nodes can measure and are of one kind, what an engine needs of them,
what a node says of itself, what an engine there does with each call, and what comes back of engines that end as
planned, by a stand-in for Ray."""

from __future__ import annotations

import errno
import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from simulated_sessions import MODEL
from strategies import measurements

from pytest_slmserve.archive import store
from pytest_slmserve.archive.store import read
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import Case, PlannedItem
from pytest_slmserve.run import cluster
from pytest_slmserve.run.cluster import (
    RESTARTS,
    EngineAnswer,
    Need,
    Node,
    RayEngines,
    RemoteEngine,
    look_around,
    measuring,
    need_of,
    node_host,
    nodes_of,
    one_host,
    packed_measurements,
    unpacked,
)
from pytest_slmserve.run.executor import Devices
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, DeviceBusy, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.host import Gpu, Host

# Nodes

HEAD, NARROW, WIDE = Node("a", "head", 0, 4), Node("b", "narrow", 1, 16), Node("c", "wide", 4, 64)
MINE = Environment(pytest_slmserve="0.1.0", git_commit="mine")
H200 = Environment(platform="cuda", gpu_name="H200", driver="580", vllm="0.26.0", pytest_slmserve="0.1.0")
GPUS = tuple(Gpu(f"GPU-{i}", "H200", 141 * GIB, "580", "13.0") for i in range(8))


def row(name, alive=True, **resources):
    return {
        "NodeID": name * 8,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "Alive": alive,
        "Resources": resources,
    }


def test_nodes_that_live_are_read_widest_first():
    rows = [row("a", CPU=4.0), row("b", CPU=16.0, GPU=2.0), row("c", alive=False)]
    assert nodes_of(rows) == [Node("b" * 8, "b (bbbbbbbb)", 2, 16), Node("a" * 8, "a (aaaaaaaa)", 0, 4)]


def test_a_resource_chooses_among_them():
    rows = [row("a", GPU=1.0, quiet=1.0), row("b", GPU=1.0), row("c", GPU=1.0, quiet=0.0)]
    assert [node.name[0] for node in nodes_of(rows, "quiet")] == ["a"]


def test_engines_of_gpus_are_measured_where_there_are_some():
    assert measuring([WIDE, NARROW, HEAD], "cuda") == [WIDE, NARROW]
    assert measuring([WIDE, HEAD], "simulated") == [WIDE]
    assert measuring([HEAD], "simulated") == [HEAD]
    assert measuring([WIDE, HEAD], "cpu") == [WIDE, HEAD]


def test_a_cluster_without_is_told():
    with pytest.raises(BadUsage, match="GPU .*1"):
        measuring([HEAD], "cuda")
    with pytest.raises(BadUsage, match="CPU"):
        measuring([replace(WIDE, cpus=0)], "cpu")


def test_an_engine_takes_its_gpus_and_one_cpu():
    on_two = EngineSpec("opt-13b", tensor_parallel_size=2)
    apart = ReplicaSpec(tuple(EngineSpec("opt-125m", gpu=i) for i in range(4)), "gpus")
    assert need_of(on_two, [WIDE, NARROW]) == Need(2, 1)
    assert need_of(apart, [WIDE, NARROW], "quiet") == Need(4, 1, "quiet")


def test_a_simulated_one_takes_gpus_where_there_are_any():
    simulated = EngineSpec("opt-125m", platform="simulated", tensor_parallel_size=2)
    assert need_of(simulated, [WIDE]) == Need(2, 1) and need_of(simulated, [HEAD]) == Need(0, 1)


def test_on_the_cpu_it_takes_a_whole_node():
    assert need_of(EngineSpec("opt-tiny", platform="cpu"), [HEAD, WIDE]) == Need(0, 4)


def test_more_than_any_node_has_is_refused():
    with pytest.raises(BadUsage, match=r"\b2 GPUs.* 1"):
        need_of(EngineSpec("opt-13b", tensor_parallel_size=2), [NARROW])


def test_gpus_of_two_nodes_do_not_add_up_and_a_node_without_cpus_for_tasks_will_do():
    assert not Need(2, 1).fits(NARROW)
    assert need_of(EngineSpec("opt-125m"), [replace(NARROW, cpus=0)]) == Need(1, 0)


def test_nodes_of_one_kind_are_one_host_with_the_gpus_of_the_widest():
    found = {NARROW: Host(H200, "GPU-0", (), GPUS[:1]), WIDE: Host(H200, "GPU-0", ("look twice",), GPUS)}
    host = one_host(found, MINE)
    assert host.gpus == GPUS[:4], "as many as Ray gives away"
    assert host.environment.git_commit == "mine" and host.environment.key == H200.key
    assert host.warnings == ("look twice",)


@pytest.mark.parametrize(
    ("fact", "other"), [("gpu_name", "H100"), ("driver", "570"), ("vllm", "0.25.0"), ("cpu", "another"), ("cores", 8)]
)
def test_nodes_of_different_kinds_are_refused_with_what_differs(fact, other):
    found = {NARROW: Host(H200, "x"), WIDE: Host(replace(H200, **{fact: other}), "y")}
    with pytest.raises(BadUsage, match=rf"\({fact} .* on narrow, {other} on wide\)") as refused:
        one_host(found, MINE)
    assert "slm_ray_resource" in refused.value.hint


def test_so_is_another_release_of_ours():
    with pytest.raises(BadUsage, match="narrow .*0.0.9.*0.1.0"):
        one_host({NARROW: Host(replace(H200, pytest_slmserve="0.0.9"), "x")}, MINE)


def test_hosts_of_one_kind_do_not_differ():
    other = replace(H200, host="another", git_commit="y", python="3.12")
    assert one_host({NARROW: Host(H200, "x"), WIDE: Host(other, "y")}, MINE).environment.key == H200.key


# What a node says

NODE = Node("0" * 56, "10.0.0.2 (00000000)", 1, 8)
PROBLEMS = (
    "TaskUnschedulableError",
    "NodeDiedError",
    "LocalRayletDiedError",
    "GetTimeoutError",
    "RuntimeEnvSetupError",
)


def ray_that(name: str, text: str = ""):
    """Ray, whose answers raise this."""
    kinds = {problem: type(problem, (Exception,), {}) for problem in PROBLEMS}

    def get(answer: object, timeout: float) -> object:
        raise kinds.get(name, ModuleNotFoundError)(text)

    return SimpleNamespace(exceptions=SimpleNamespace(**kinds), get=get)


@pytest.mark.parametrize(
    ("name", "text", "says", "hint"),
    [
        (
            "RuntimeEnvSetupError",
            "Failed to set up runtime environment.\n\n    ERROR: No matching distribution found for vllm==99.0\n",
            "slm_ray_env (ERROR: No matching distribution found for vllm==99.0)",
            "packages",
        ),
        (
            "another",
            "Traceback ...\nNo module named 'pytest_slmserve'",
            "(No module named 'pytest_slmserve')",
            "slm_ray_env",
        ),
        ("GetTimeoutError", "", "", "slm_ray_resource"),
    ],
)
def test_a_node_that_cannot_answer_is_named_with_the_reason(name, text, says, hint):
    with pytest.raises(BadUsage) as told:
        node_host(ray_that(name, text), NODE, object())
    assert told.value.problem.startswith(NODE.name) and told.value.problem.endswith(says)
    assert hint in told.value.hint


def test_a_node_that_is_gone_says_nothing():
    assert node_host(ray_that("NodeDiedError"), NODE, object()) is None


# An engine on a node


@pytest.fixture(autouse=True)
def on_a_node(monkeypatch):
    monkeypatch.setattr(cluster, "process_place", lambda: ("node", 1))


@pytest.fixture
def asked(tmp_path):
    """A session with its cases: `session, cases = asked()`."""
    sessions = []

    def of(*loads, **words):
        given = {"simulate": True, "records": str(tmp_path / "records.jsonl"), "window": "1", **words}
        session = Session.from_options(read_options(given, {}, {}), tmp_path)
        sessions.append(session)
        spec, workload = session.planner.spec("opt-125m"), session.planner.workload("opt-125m")
        return session, [session.planner.case(spec, [workload], [session.planner.load(n)]) for n in loads]

    yield of
    for session in sessions:
        session.close()


class OnNode:
    """An engine whose arguments have been through pickle, as those that travel have."""

    def __init__(self, session, cases, environment=None):
        where = environment or session.host.environment
        self.engine = RemoteEngine(*pickle.loads(pickle.dumps((session.options, where))))
        self.cases = pickle.dumps({case.key: case for case in cases})

    def measure(self, key):
        return self.engine.measure(key, pickle.loads(self.cases))


def test_each_call_is_one_repeat_under_the_key_that_it_was_asked_by(asked):
    session, cases = asked(4, 8)
    node, keys = OnNode(session, cases), [case.key for case in cases]
    found = [m for key in (*keys, *keys) for m in unpacked(node.measure(key).packed)]
    assert [m.key for m in found] == keys * 2
    assert len({m.launch for m in found}) == 1, "one engine for all of them"
    assert node.engine.close().notes == tuple(node.engine.session.notes) and node.engine.started().place == ("node", 1)


def test_an_engine_that_dies_ends_its_case_and_no_other(asked):
    session, cases = asked(4, 64, 8, engine_arg=["die_at=64"])
    node = OnNode(session, cases)
    answers = [node.measure(case.key) for case in (*cases, cases[1])]
    assert [type(answer.error) for answer in answers] == [type(None), EngineFailed, type(None), EngineFailed]
    assert answers[1].error is answers[3].error, "it is not tried again"


def test_a_node_that_came_later_and_is_of_another_kind_measures_nothing(asked):
    session, cases = asked(4, 8)
    node = OnNode(session, cases, replace(session.host.environment, gpu_name="H100"))
    said = "is of another kind (gpu_name H100 on the others, simulated on this one)"
    assert all(said in str(node.measure(case.key).error) for case in cases)


def test_what_keeps_a_node_from_beginning_is_told_of_every_case(asked, monkeypatch):
    def busy(*_):
        raise DeviceBusy("this device is being measured by another run", "wait")

    monkeypatch.setattr(Devices, "hold", busy)
    session, cases = asked(4, 8)
    node = OnNode(session, cases)
    assert [type(node.measure(case.key).error) for case in cases] == [DeviceBusy, DeviceBusy]


def test_several_engines_are_one_answer(asked):
    session, _ = asked()
    case = session.planner.replicas_case(session.planner.replicas(["opt-125m"] * 2), 16)
    found = unpacked(OnNode(session, [case]).measure(case.key).packed)
    assert len(found) == 2 and len({m.replica.set for m in found}) == 1 and found[0].replica.count == 2


def test_the_engine_of_a_node_does_not_inherit_what_ray_gives_a_task(monkeypatch):
    options = read_options({"simulate": True}, {}, {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    look_around(options)
    assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & os.environ.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    look_around(options)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "the GPU that the task was given"


@given(measurements())
@settings(max_examples=20)
def test_what_is_unpacked_is_what_the_archive_would_hold(measurement):
    once = unpacked(packed_measurements([measurement]))
    assert unpacked(packed_measurements(once)) == once and once[0].key == measurement.key


# Engines of a run

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
    (note,) = [note for note in on_cluster.session.notes if said in note]
    assert {"2", "opt-125m"} <= {*note.split()}


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
    assert "3 cells of opt-125m" in failures[MODEL, 2] and "--slm-resume" in failures[MODEL, 2]
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
    assert len({*failures.values()}) == 1 and str(tmp_path) in failures[MODEL, 1]


def test_if_no_other_node_is_left_each_cell_that_is_missing_says_so(run):
    on_cluster = run(nodes=1, ends={(OTHER, 2): [DIES]})
    failures = on_cluster.failures()
    missing = {(MODEL, n) for n in LOADS} | {(OTHER, n) for n in LOADS[1:]}
    assert failures.keys() <= missing and {(OTHER, n) for n in LOADS[1:]} <= failures.keys()
    assert all(fact in failures[OTHER, 2] for fact in ("node-0 (00000000) died", "1 GPU", "3 cells of opt-1.3b"))
    assert on_cluster.made().keys() == on_cluster.cases.keys() - failures.keys()


def test_if_all_nodes_die_before_an_engine_begins_nobody_waits_for_others(run):
    """Ray tells nothing of such an actor: it is still to be placed."""
    on_cluster = run(nodes=2)
    on_cluster.ray.silent = True
    for row in on_cluster.ray.rows:
        row["Alive"] = False
    failures = on_cluster.failures()
    assert failures.keys() == on_cluster.cases.keys()
    facts = "node-0 (00000000) died", "node-1 (00000001) died", "1 GPU", "opt-125m"
    assert all(fact in failures[MODEL, 1] for fact in facts)
