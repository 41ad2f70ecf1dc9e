"""Engines of a cluster without a cluster: which nodes can measure and are of one kind, what an engine needs of them,
what a node says of itself, what an engine there does with each call, and what comes back of engines that end as
planned, by a stand-in for Ray."""

import errno
import os
import pickle
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from refusals import refused
from simulated_sessions import MODEL
from strategies import measurements

from pytest_slmserve.archive import store
from pytest_slmserve.engines.interrupts import as_interrupts
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import PlannedItem
from pytest_slmserve.run import cluster
from pytest_slmserve.run.cluster import Need, Node, measuring, need_of, nodes_of, one_host, unpacked
from pytest_slmserve.run.executor import Devices
from pytest_slmserve.schema.errors import BadUsage, DeviceBusy, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.host import Gpu, Host

# Nodes

HEAD, NARROW, WIDE = Node("a", "head", 0, 4), Node("b", "narrow", 1, 16), Node("c", "wide", 4, 64)
MINE = Environment(pytest_slmserve="0.1.0", git_commit="mine")
H200 = Environment(platform="cuda", gpu_name="H200", driver="580", vllm="0.26.0", pytest_slmserve="0.1.0")
GPUS = tuple(Gpu(f"GPU-{i}", "H200", 141 * GIB, "580", "13.0") for i in range(8))
ON_ONE, ON_TWO = EngineSpec("opt-125m"), EngineSpec("opt-13b", tensor_parallel_size=2)


def row(name, alive=True, **resources):
    return {"NodeID": name * 8, "NodeName": name, "Alive": alive, "Resources": resources}


def test_widest_nodes_come_first():
    rows = [row("a", CPU=4.0, quiet=1.0), row("b", CPU=16.0, GPU=2.0, quiet=0.0), row("c", False, quiet=1.0)]
    rows.append({**row("d", GPU=1.0), "NodeName": "", "NodeManagerAddress": "10.0.0.1"})
    a, b = Node("a" * 8, "a (aaaaaaaa)", 0, 4), Node("b" * 8, "b (bbbbbbbb)", 2, 16)
    assert nodes_of(rows) == [b, Node("d" * 8, "10.0.0.1 (dddddddd)", 1, 0), a] and nodes_of(rows, "quiet") == [a]
    assert measuring([WIDE, NARROW, HEAD], "cuda") == [WIDE, NARROW]
    assert measuring([WIDE, HEAD], "simulated") == [WIDE]
    assert measuring([HEAD], "simulated") == [HEAD]
    assert measuring([WIDE, HEAD], "cpu") == [WIDE, HEAD]
    with refused("GPU", 1):
        measuring([HEAD], "cuda")
    with refused("CPU"):
        measuring([replace(WIDE, cpus=0)], "cpu")
    apart = ReplicaSpec(tuple(EngineSpec("opt-125m", gpu=i) for i in range(4)), "gpus")
    assert need_of(ON_TWO, [WIDE, NARROW]) == Need(2, 1)
    assert need_of(apart, [WIDE, NARROW], "quiet") == Need(4, 1, "quiet")
    assert need_of(ON_ONE, [replace(NARROW, cpus=0)]) == Need(1, 0), "a node without CPUs for tasks will do"
    assert need_of(replace(ON_TWO, platform="simulated"), [WIDE]) == Need(2, 1)
    assert need_of(replace(ON_TWO, platform="simulated"), [HEAD]) == Need(0, 1)
    assert need_of(replace(ON_ONE, platform="cpu"), [HEAD, WIDE]) == Need(0, 4)
    with refused("2 GPUs", "more than 1", hint="1"):  # those of two nodes do not add up
        need_of(ON_TWO, [NARROW, NARROW])


@pytest.mark.parametrize(("fact", "other"), [
    ("gpu_name", "H100"), ("driver", "570"), ("vllm", "0.25.0"), ("cpu", "another"), ("cores", 8),
])  # fmt: skip
def test_differing_nodes_are_refused(fact, other):
    other = replace(H200, host="another", git_commit="y", python="3.12")
    found = {NARROW: Host(H200, "GPU-0", (), GPUS[:1]), WIDE: Host(other, "GPU-0", ("look twice",), GPUS)}
    host = one_host(found, MINE)
    assert host == Host(replace(other, git_commit="mine"), "GPU-0", ("look twice",), GPUS[:4]), "all that Ray gives"
    with refused(f"({fact} ", "on narrow", f"{other} on wide)", hint="slm_ray_resource"):
        one_host({NARROW: Host(H200, "x"), WIDE: Host(replace(H200, **{fact: other}), "y")}, MINE)
    with refused("narrow", "0.0.9", "0.1.0"):
        one_host({NARROW: Host(replace(H200, pytest_slmserve="0.0.9"), "x")}, MINE)


def test_mixed_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    for own in ({}, {"CUDA_VISIBLE_DEVICES": "3"}):  # the GPU that the task was given
        os.environ |= own
        cluster.look_around(read_options({"simulate": True}, {}, {}))
        assert os.environ == own

    def engines(number):
        options = read_options({"simulate": True, "ray": f"local:{number}"}, {}, {})
        return cluster.RayEngines.from_options(options, tmp_path)

    here = Host(Environment(platform="simulated"), "GPU-0", gpus=(*GPUS[:2], replace(GPUS[2], name="NVIDIA L4")))
    monkeypatch.setattr(cluster, "probe", lambda *_: here)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    with refused("NVIDIA L4"):
        engines(3)
    assert engines(2).where == "on 2 GPUs of this host at once"


# What a node says

GONE = ("TaskUnschedulableError", "NodeDiedError", "LocalRayletDiedError")
FAILS = {name: type(name, (Exception,), {}) for name in (*GONE, "GetTimeoutError", "RuntimeEnvSetupError")}
NO_PACKAGE = "Failed to set up runtime environment.\n\n    ERROR: No matching distribution found for vllm==99.0\n"
BROKEN = BadUsage("no GPU here", "another node")


def host_that(answer):
    """What comes of a node whose answer is this, or raises it."""
    get = Mock(return_value=answer) if answer is BROKEN else Mock(side_effect=answer)
    ray = SimpleNamespace(exceptions=SimpleNamespace(**FAILS), get=get)
    return cluster.node_host(ray, Node("0" * 56, "10.0.0.2 (00000000)", 1, 8), object())


@pytest.mark.parametrize(("answer", "says", "hint"), [
    (FAILS["RuntimeEnvSetupError"](NO_PACKAGE), "slm_ray_env (ERROR: No matching distribution found for vllm==99.0)",
     "packages"),
    (ModuleNotFoundError("Traceback ...\nNo module named 'x'"), "(No module named 'x')", "slm_ray_env"),
    (FAILS["GetTimeoutError"](), "", "slm_ray_resource"),
    (BROKEN, BROKEN.problem, BROKEN.hint),
])  # fmt: skip
def test_silent_node_is_named(answer, says, hint):
    with refused("10.0.0.2", hint=hint) as told:
        host_that(answer)
    assert told.value.problem.endswith(says)
    assert [host_that(FAILS[name]()) for name in GONE] == [None] * 3, "one that is gone says nothing"


# An engine on a node


@pytest.fixture(autouse=True)
def on_a_node(monkeypatch):
    monkeypatch.setattr(cluster, "process_place", lambda: ("node", 1))


@pytest.fixture
def on_node(opened):
    """An engine whose arguments have been through pickle, as those that travel have: `engine, keys, measure`."""

    def made(*loads, session=None, cases=None, **other):
        session = session or opened(window="1", **other)
        spec, workload = session.planner.spec(MODEL), session.planner.workload(MODEL)
        cases = cases or [session.planner.case(spec, [workload], [session.planner.load(n)]) for n in loads]
        engine = cluster.RemoteEngine(*pickle.loads(pickle.dumps((session.options, session.host.environment))))
        sent = pickle.dumps({case.key: case for case in cases})
        return engine, [case.key for case in cases], lambda key: engine.measure(key, pickle.loads(sent))

    return made


def test_dead_engine_ends_its_cases(on_node, opened, monkeypatch):
    engine, keys, measure = on_node(4, 8)
    found = [m for key in (*keys, *keys) for m in unpacked(measure(key).packed)]
    assert [m.key for m in found] == keys * 2
    assert len({m.launch for m in found}) == 1, "one engine for all of them"
    assert engine.close().notes == tuple(engine.session.notes) and engine.started().place == ("node", 1)
    planner = (session := opened(window="1")).planner
    _, [key], measure = on_node(session=session, cases=[planner.replicas_case(planner.replicas([MODEL] * 2), 16)])
    pair = unpacked(measure(key).packed)
    assert [m.replica.count for m in pair] == [2, 2] and len({m.replica.set for m in pair}) == 1, "one answer"
    _, keys, measure = on_node(4, 64, 8, engine_arg=["die_at=64"])
    errors = [measure(key).error for key in (*keys, keys[1])]
    assert list(map(type, errors)) == [type(None), EngineFailed, type(None), EngineFailed]
    assert errors[1] is errors[3], "it is not tried again"
    engine, keys, measure = on_node(4, 8)
    engine.environment = replace(engine.environment, gpu_name="H100")  # the others', if this one came later
    said = "is of another kind (gpu_name H100 on the others, simulated on this one)"
    assert all(said in measure(key).error.problem for key in keys)
    _, keys, measure = on_node(4, 8)
    monkeypatch.setattr(Devices, "hold", Mock(side_effect=DeviceBusy("another run measures it", "wait")))
    assert [type(measure(key).error) for key in keys] == [DeviceBusy, DeviceBusy]


@given(measurements())
@settings(max_examples=20)
def test_unpacked_measurement_matches_archive(measurement):
    once = unpacked(cluster.packed_measurements([measurement]))
    assert unpacked(cluster.packed_measurements(once)) == once and once[0].key == measurement.key


# Engines of a run

OTHER = "opt-1.3b"
LOADS = (1, 2, 4, 8)
CELLS = [(model, n) for model in (MODEL, OTHER) for n in LOADS]
DIES, LOST = "its node dies", "its process is lost"


class ActorLost(Exception):
    """Ray's error for calls of an actor that it does not start again."""


class Actor:
    """An actor on the next node that lives. Its calls are carried out in order, when somebody waits for them."""

    def __init__(self, ray, *arguments):
        self.ray, self.arguments, self.lives = ray, pickle.dumps(arguments), 0
        self.begin()

    def begin(self):
        living = [row for row in self.ray.rows if row["Alive"]]
        self.node = living[len(self.ray.begun) % len(living)] if living else None
        self.lives += 1
        self.engine = cluster.RemoteEngine(*pickle.loads(self.arguments))
        self.ray.begun.append(self.node["NodeName"] if self.node else "")

    def __getattr__(self, method):
        """A call is what makes its answer, and is known by itself."""
        return SimpleNamespace(remote=lambda *arguments: partial(self.answer, method, arguments))

    def answer(self, method, arguments):
        """The answer to a call, repeated by Ray as often as it begins the actor again."""
        while self.lives <= cluster.RESTARTS + 1:
            if self.node is None:
                raise TimeoutError
            place = self.node["NodeID"], self.lives
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cluster, "process_place", partial(tuple, place))
                answer = getattr(self.engine, method)(*arguments)
            ends = self.ray.ends.get(cell_of(arguments[1][arguments[0]])) if arguments else None
            how = ends.pop(0) if ends and answer.packed else ""
            if not how:
                return answer
            self.node["Alive"] = how != DIES
            self.ray.kill(self)
            self.begin()
        raise ActorLost


class StandIn:
    """Ray, as far as engines are concerned.

    ends: by model and concurrent requests, what happens to each repeat of that case once it has been measured: it comes
    (""), or its actor ends in this way, and it does not.
    """

    exceptions = SimpleNamespace(RayActorError=ActorLost)

    def __init__(self, nodes, ends):
        self.rows = [{**row(f"{n}", GPU=1.0, CPU=1.0), "NodeName": f"node-{n}"} for n in range(nodes)]
        self.ends = {cell: [*how] for cell, how in ends.items()}
        self.nodes, self.begun, self.answers = lambda: self.rows, [], {}  # begun: nodes on which actors began

    def put(self, value):
        return pickle.loads(pickle.dumps(value))

    def remote(self, kind):
        return SimpleNamespace(options=lambda **words: SimpleNamespace(remote=partial(Actor, self)))

    def wait(self, calls, **words):
        for call in calls:
            try:
                self.answers[call] = call()
            except TimeoutError:  # it is still to be placed
                continue
            except ActorLost as error:
                self.answers[call] = error
            return [call], []
        return [], calls

    def get(self, call):
        if isinstance(answer := self.answers.pop(call), Exception):
            raise answer
        return answer

    def kill(self, actor):
        if actor.engine.session:
            actor.engine.session.close()


def cell_of(it):
    return it.engine.model.rpartition("/")[2], it.concurrency


class Run:
    """Two models' cases, sent."""

    def __init__(self, session, ray):
        self.session, self.ray, planner = session, ray, session.planner
        self.cases = [planner.point(model, n) for model, n in CELLS]
        self.engines = cluster.RayEngines(ray, session.options, nodes_of(ray.nodes()), session.host)
        session.executor.fetch = self.engines.fetch
        session.undo.callback(self.engines.close)
        self.engines.send(session, self.cases, [PlannedItem(case.title, case.engine, 1.0) for case in self.cases])

    def failures(self):
        """What each item of the run fails with, asked in their order; those that pass are not in it."""
        found = {}
        for case in self.cases:
            try:
                assert len(self.session.executor.measure(case, 2)) >= 2
            except (BadUsage, EngineFailed) as error:
                found[cell_of(case)] = error.problem + error.hint
        self.engines.close()
        return found

    def made(self):
        """How many repeats of each case the archive holds."""
        found = store.read(self.session.options.records).measurements
        return Counter((m.spec.model.rpartition("/")[2], m.load.concurrency) for m in found)


@pytest.fixture
def run(opened):
    """A run on a cluster: `run(nodes=3, ends={("opt-125m", 4): [DIES]})`."""
    small = {"window": "0.5", "input_len": "32", "output_len": "8", "concurrency": ",".join(map(str, LOADS))}

    def begun(nodes=4, ends=None, **given):
        words = {"models": f"{MODEL},{OTHER}", "ray": "auto", **small, **given}
        return Run(opened(**words), StandIn(nodes, ends or {}))

    return begun


ALL = dict.fromkeys(CELLS, 2)


@pytest.mark.parametrize(("ends", "begun", "said"), [
    ({}, 2, "measured on node-0 (00000000) (1 engine), node-1 (11111111) (1 "),
    ({(MODEL, 4): ["", DIES]}, 3, "node-0 (00000000) died; 2 cells of opt-125m"),
    ({(MODEL, 4): ["", LOST]}, 3, "its task was lost on node-0 (00000000); 2 cells of opt-125m"),
    ({(MODEL, 2): [DIES], (MODEL, 8): [DIES]}, 4, "node-3 (33333333) died; 1 cell of opt-125m"),
])  # fmt: skip
def test_lost_engine_begins_again(run, ends, begun, said):
    on_cluster = run(ends=ends)
    assert on_cluster.failures() == {} and on_cluster.made() == ALL
    assert len(on_cluster.ray.begun) == begun
    notes = on_cluster.session.notes
    assert len([note for note in notes if note.startswith(said)]) == 1, notes


def test_interrupted_close_leaves_ray_alone(run):
    """Ray is shut down after it, and would start another cluster if it were asked again."""
    on_cluster = run()
    on_cluster.ray.wait = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        on_cluster.engines.close()
    on_cluster.engines.close()
    assert on_cluster.ray.wait.call_count == 1


def test_unclean_repeat_gets_extra_attempt(run):
    on_cluster = run(engine_arg=["preempt_from=8"])
    assert on_cluster.failures() == {}
    assert on_cluster.made() == {(model, n): 3 if n == 8 else 2 for model, n in CELLS}
    on_cluster = run(nodes=9, archive="ends", ends={(MODEL, 2): ["", *[DIES] * 9]})
    failures = on_cluster.failures()
    assert list(failures) == CELLS[1:4]
    assert "3 cells of opt-125m" in failures[MODEL, 2] and "--slm-resume" in failures[MODEL, 2]
    assert sum(not row["Alive"] for row in on_cluster.ray.rows) == 3
    assert on_cluster.made() == {(MODEL, 1): 2, (MODEL, 2): 1} | {(OTHER, n): 2 for n in LOADS}
    again = run(archive="ends", resume=True)
    assert again.failures() == {} and again.made() == ALL and again.ray.begun == ["node-0"]


def test_missing_cells_name_cause(run, monkeypatch, tmp_path):
    on_cluster = run(nodes=1, ends={(OTHER, 2): [DIES]})
    failures = on_cluster.failures()
    assert {(OTHER, n) for n in LOADS[1:]} <= failures.keys() <= {*CELLS} - {(OTHER, 1)}
    assert all(fact in failures[OTHER, 2] for fact in ("node-0 (00000000) died", "1 GPU", "3 cells of opt-1.3b"))
    assert on_cluster.made().keys() == {*CELLS} - failures.keys()
    # Ray tells nothing of such an actor: it is still to be placed.
    on_cluster = run(nodes=2)
    on_cluster.ray.wait = lambda calls, **words: ([], calls)
    for row in on_cluster.ray.rows:
        row["Alive"] = False
    failures = on_cluster.failures()
    assert list(failures) == CELLS
    facts = "node-0 (00000000) died", "node-1 (11111111) died", "1 GPU", "opt-125m"
    assert all(fact in failures[MODEL, 1] for fact in facts)
    on_cluster = run()
    monkeypatch.setattr(store, "_append", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    failures = on_cluster.failures()
    assert list(failures) == CELLS and on_cluster.engines._came == 1, "nothing more was taken"
    assert len({*failures.values()}) == 1 and str(tmp_path) in failures[MODEL, 1]


# A Ray of our own


def started(monkeypatch, ray):
    """What became of a start of Ray by this stand-in, with the variables that it saw."""
    monkeypatch.setattr(cluster, "_import_own_ray", lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_AUTH_MODE", "theirs")
    with cluster.start_here(2) as found:
        return found


def test_failed_ray_start_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "_import_own_ray", cluster._import_own_ray.__wrapped__)  # which remembers nothing
    monkeypatch.setitem(sys.modules, "ray", Mock())
    with refused("imported before", hint="conftest"), cluster.start_here(2):
        pass
    assert "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ray = Mock(init=Mock(side_effect=RuntimeError("Failed to start GCS.\nof many lines")))
    with refused("Failed to start GCS.", hint="without --slm-ray"):
        started(monkeypatch, ray)
    assert not [*tmp_path.iterdir()] and os.environ["RAY_AUTH_MODE"] == "theirs"


def test_ray_works_in_private_folder(monkeypatch, tmp_path):
    for address, reachable in (("127.0.0.1", ""), ("192.0.2.2", "192.0.2.2")):
        nodes = Mock(return_value=[{"NodeManagerAddress": address}])
        assert cluster.reachable_at(Mock(nodes=nodes)) == reachable
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    def init(*_, _temp_dir, **words):
        Path(_temp_dir).mkdir()
        seen.append((stat.S_IMODE(Path(_temp_dir).parent.stat().st_mode), words["_node_ip_address"]))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        seen.append("started")

    ray = Mock(init=init)
    with as_interrupts(), pytest.raises(KeyboardInterrupt):
        started(monkeypatch, ray)
    assert seen == [(0o700, "127.0.0.1"), "started"] and ray.shutdown.called and not [*tmp_path.iterdir()]
