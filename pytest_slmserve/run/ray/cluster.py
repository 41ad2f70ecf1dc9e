"""Engines that Ray runs for a session, on the nodes of a cluster or on all GPUs of this host at once.

Each engine is an actor, which measures one repeat at a call. If its process or its node is lost, Ray starts it again
elsewhere, and repeats the calls that were not answered. All answers are taken in one thread, while an item waits for
its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case, PlannedItem, clock, engine_title, start_estimate_s
from pytest_slmserve.plan.planner import check_there
from pytest_slmserve.plan.schedule import Group, groups_of, in_order
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.gpu_slots import GpuSlots, slot_count
from pytest_slmserve.run.ray import connect
from pytest_slmserve.run.ray.remote import EngineAnswer, RemoteEngine, unpacked
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, SlmError
from pytest_slmserve.schema.loads import is_steady
from pytest_slmserve.telemetry.host import Host, probe, this_host

TICK_S = 0.5
# Seconds of silence of all engines that indicate a failure: far more than the longest case takes.
LEAST_QUIET_S = 600.0
PATIENCE = 5.0
END_S = 15.0  # for engines to stop
RESTARTS = 2  # of an engine whose process or node is lost: then it is the engine that kills them
A_TOUCH = 0.001  # of a resource that only says where to run
RESUME = "pytest again with --slm-resume: what came is kept"
UNCHECKED = (
    "whether engines on several GPUs disturbed each other was not looked at: the shipped test_neighbours.py does, by "
    "two loads of each model alone"
)


@dataclass(eq=False)
class RunningEngine:
    """An engine with what is to be measured on it.

    Attributes:
        open: Cases of which repeats are missing, by key.
        actor, cases: Ray's handles of the engine, and of all of its cases. None before it begins.
        place: Node and process of the engine, since its first answer.
        lost: How each of its earlier processes ended, in words.
        again: Whether its cases get one repeat more than the run wanted.
        at, neighbours: The slots of this host that it has, and the most slots that other engines had since its last
            repeat; both only if slots are given.
    """

    group: Group
    need: connect.Need
    open: dict[str, Case]
    again: bool = False
    actor: Any = None
    cases: Any = None
    place: tuple[str, int] | None = None
    lost: list[str] = field(default_factory=list)
    at: tuple[int, ...] = ()
    neighbours: int = 0

    @property
    def name(self) -> str:
        return engine_title(self.group.engine)

    def cells(self) -> str:
        """The number of its open cases, for a sentence: "2 cells of opt-125m were"."""
        return f"{counted(len(self.open), 'cell')} of {self.name} {'was' if len(self.open) == 1 else 'were'}"


@dataclass(eq=False, repr=False)
class RayEngines:
    """Measures for a session.

    Attributes:
        ray: Ray, once it is connected.
        nodes: The nodes on which engines may run.
        host: The host of the session: what an engine finds on any of the nodes.
        slots: The GPUs of this host, or parts of its CPU, if engines run here. Engines then begin in their order: one
            that needs several GPUs gets them before those behind it take one, so it does not wait for ever.
        on_progress: Called while a case is waited for, with how the wait goes.
    """

    ray: Any
    options: Options
    nodes: list[connect.Node]
    host: Host
    slots: GpuSlots | None = None
    on_progress: Callable[[Case, str], None] = lambda case, text: None
    _session: Session | None = None
    _waiting: list[RunningEngine] = field(default_factory=list)
    _running: list[RunningEngine] = field(default_factory=list)
    _calls: dict[Any, tuple[RunningEngine, str | None]] = field(default_factory=dict)  # key: None of the last call
    _planned: set[str] = field(default_factory=set)
    _failed: dict[str, BaseException] = field(default_factory=dict)  # by the key of a case
    _ran: Counter[str] = field(default_factory=Counter)  # engines by node
    _came: int = 0
    _quiet_s: float = LEAST_QUIET_S
    _heard_at: float = 0.0
    _undo: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def from_options(cls, options: Options, root: Path) -> RayEngines:
        """The GPUs of this host, or a cluster whose nodes have been asked what they are. Raises BadUsage, before any
        engine starts."""
        platform, (python, variables) = options.platform, options.engine
        assert platform is not None
        if find_spec("ray") is None:
            raise BadUsage("--slm-ray needs Ray, which is not installed", "pip install 'pytest-slmserve[ray]'")
        if options.on_all_gpus:
            here = probe(platform, python, dict(variables), root)
            slots = GpuSlots.from_host(here, slot_count(options, here), options.tensor_parallel_size[-1])
            every = range(len(slots.devices))
            check_there(here, every if here.gpus else (0,))
            node = connect.Node("local", "this host", len(every), len(every))
            return cls(None, options, [node], slots.host(here, every), slots)
        ray = connect.join_cluster(options)
        try:
            listed = connect.measuring(connect.nodes_of(ray.nodes(), options.ray_resource), platform)
            found = connect.node_hosts(ray, options, listed)
            nodes = connect.measuring(list(found), platform)  # that answered
            return cls(ray, options, nodes, connect.one_host(found, this_host(platform, root)))
        except BaseException:
            ray.shutdown()
            raise

    @property
    def where(self) -> str:
        """The place of the engines, in words."""
        if self.slots:
            return f"on {counted(len(self.slots.devices), 'GPU' if self.host.gpus else 'part')} of this host at once"
        return f"on {counted(len(self.nodes), 'node')} of a Ray cluster"

    def send(self, session: Session, cases: Sequence[Case], rows: Sequence[PlannedItem]) -> None:
        """Begin the engines of these cases, less what is known already: the widest first, then the longest. Raises
        BadUsage if one of them fits on no node, with none begun, and DeviceBusy."""
        self._session, self._planned = session, {case.key for case in cases}
        if self.slots:
            if self.slots.visible:  # parts of the CPU have one lock, which an open session holds
                session.devices.lock(self.slots.devices)
            self.ray = self._undo.enter_context(connect.start_here(len(self.slots.devices)))
        missing = [case for case in cases if self._missing(case)]
        for group in in_order(groups_of(rows)):
            open_ = {case.key: case for case in missing if case.engine == group.engine}
            if open_:
                self._waiting.append(RunningEngine(group, self._need(group), open_))
        expected = [cell.seconds + start_estimate_s(cell.engine) for cell in rows if cell.engine]
        self._quiet_s = LEAST_QUIET_S + PATIENCE * max(expected, default=0.0)
        self._begin()
        self._heard_at = time.monotonic()

    def fetch(self, case: Case) -> None:
        """Take answers until all repeats of this case are known. Raises the error that kept it from being measured."""
        if case.key not in self._planned:
            why = f"{case.title} was not planned before the run, so it was not sent to Ray"
            raise BadUsage(why, "without --slm-ray")
        while any(case.key in engine.open for engine in (*self._running, *self._waiting)):
            self._hear()
            running = sum(engine.place is not None for engine in self._running)
            waiting = len(self._running) - running
            self.on_progress(case, f"{self._came} came | {running} engines run, {waiting} wait for a node")
        if error := self._failed.get(case.key):
            raise error

    def measure_alone(self, session: Session, model: str) -> None:
        """Measure two cases of a model's sweep once more, if all of it was measured beside others: its smallest load,
        for which the CPU is most of a step, and its largest."""
        spec, workload = session.planner.spec(model), session.planner.workload(model)
        found = [m for m in session.verdicts.curve(model).measurements if not problems(m)]
        beside = sorted({m.load.concurrency for m in found if m.neighbours and is_steady(m.load)})
        for concurrency in dict.fromkeys(beside[:1] + beside[-1:]):
            case = session.planner.case(spec, [workload], [session.planner.load(concurrency)])
            if all(m.neighbours for (m,) in session.results.repeats[case.key] if not problems(m)):
                while self._calls:  # engines whose last case has come may still be stopping
                    self._hear()
                group = Group(spec, (), len(spec.gpus), start_estimate_s(spec))
                self._waiting.append(RunningEngine(group, self._need(group), {case.key: case}, again=True))
                self._begin()
                self.fetch(case)

    def close(self) -> None:
        """Take what has come, and stop what still runs; may be called twice."""
        try:
            self._waiting.clear()
            while self._hear(0.0):
                pass
            for engine in [each for each in self._running if each.open]:
                self._end(engine)
            until = time.monotonic() + END_S
            while self._calls and time.monotonic() < until:
                self._hear()
            if (session := self._session) and self._ran:
                ran = ", ".join(f"{node} ({counted(n, 'engine')})" for node, n in self._ran.items())
                judged = {verdict.claim for verdict, _ in session.verdicts.judged}
                if not self.slots:
                    session.note(f"measured on {ran} of the Ray cluster at {self.options.ray}")
                elif deployments.CLAIM not in judged and any(m.neighbours for m in session.results.measurements()):
                    session.note(UNCHECKED)
                self._ran.clear()
        finally:
            self._undo.close()
            if self.ray and not self.slots:
                self.ray.shutdown()

    def _need(self, group: Group) -> connect.Need:
        if self.slots:
            return connect.Need(len(group.engine.gpus) if self.host.gpus else 1, 0)
        return connect.need_of(group.engine, self.nodes, self.options.ray_resource)

    def _missing(self, case: Case) -> int:
        assert self._session is not None
        return self._session.executor.count_missing(case, self.options.repeats)

    # Engines

    def _begin(self) -> None:
        """Begin the engines that wait, in their order, as far as slots are free. On a cluster Ray finds the places."""
        while self._waiting:
            engine, resources = self._waiting[0], dict[str, Any]()
            if self.slots:
                taken = {slot for other in self._running for slot in other.at}
                at = self.slots.block(engine.need.gpus, set(range(len(self.slots.devices))) - taken)
                if at is None:
                    return
                engine.at, resources = at, {"num_gpus": 0, "num_cpus": 0}  # the slots say what runs where
            else:
                need = engine.need
                touched = {need.resource: A_TOUCH} if need.resource else {}
                resources = {"num_gpus": need.gpus, "num_cpus": need.cpus, "resources": touched}
                resources["scheduling_strategy"] = "SPREAD"
            self._running.append(self._waiting.pop(0))
            actor = self.ray.remote(RemoteEngine).options(max_restarts=RESTARTS, max_task_retries=-1, **resources)
            engine.actor = actor.remote(self.options, self.host.environment, self.slots, engine.at)
            engine.cases = self.ray.put(dict(engine.open))  # no argument of the actor: they would be lost with its node
            self._calls[engine.actor.started.remote()] = engine, ""
            for key, case in engine.open.items():
                for _ in range(1 if engine.again else self._missing(case)):
                    self._calls[engine.actor.measure.remote(key, engine.cases)] = engine, key
            for running in self._running:
                running.neighbours = max(running.neighbours, self._neighbours(running))

    def _neighbours(self, engine: RunningEngine) -> int:
        """The number of slots on which other engines run now."""
        return sum(len(other.at) for other in self._running if other is not engine)

    def _end(self, engine: RunningEngine, error: BaseException | None = None) -> None:
        """End an engine. error: why its open cases fail; None if they do not."""
        if error:
            self._failed |= {key: error for key, case in engine.open.items() if self._missing(case) or engine.again}
        engine.open.clear()
        self._calls = {call: of for call, of in self._calls.items() if of[0] is not engine}
        for engines in (self._waiting, self._running):
            if engine in engines:
                engines.remove(engine)
        if engine.actor is not None:
            self.ray.kill(engine.actor)
            engine.actor = None

    # Answers

    def _hear(self, within_s: float = TICK_S) -> bool:
        """Take the next answer, if one comes, and look for engines that no longer answer if none does."""
        ready = self.ray.wait(list(self._calls), num_returns=1, timeout=within_s)[0] if self._calls else []
        for call in ready:
            self._heard_at = time.monotonic()
            engine, key = self._calls.pop(call)
            try:
                answer = self.ray.get(call)
            except self.ray.exceptions.RayActorError:
                lost = [*engine.lost, self._how_lost(engine)]
                why = f"{' and '.join(dict.fromkeys(lost))} while {engine.cells()} measured there"
                self._end(engine, EngineFailed(f"{why}, which is once too often", RESUME))
            except Exception as error:  # of Ray, or a bug of ours over there: told by the items that wait for it
                self._end(engine, error)
            else:
                self._take(engine, key, answer)
        if not ready and within_s:
            self._check_alive()
        self._begin()
        return bool(ready)

    def _take(self, engine: RunningEngine, key: str | None, answer: EngineAnswer) -> None:
        session = self._session
        assert session is not None
        if answer.place != engine.place:
            if engine.place and key:
                engine.lost.append(self._how_lost(engine))
                session.note(f"{engine.lost[-1]}; {engine.cells()} sent once more")
            engine.place = answer.place
            self._ran[self._name(engine)] += 1
        session.note(*answer.notes)
        if key is None:
            self._end(engine)
            return
        if answer.error:
            self._failed[key] = answer.error
        elif answer.packed:
            self._came += 1
            group = tuple(replace(m, neighbours=engine.neighbours) for m in unpacked(answer.packed))
            engine.neighbours = self._neighbours(engine)
            session.results.repeats.setdefault(key, []).append(group)
            try:
                session.executor.write(group)
            except SlmError as error:
                self._failed[key] = error
                if isinstance(error, BadUsage):  # nothing that comes could be written
                    for each in [*self._running, *self._waiting]:
                        self._end(each, error)
                    return
        if (case := engine.open.get(key)) and (engine, key) not in self._calls.values():
            if self._missing(case) and key not in self._failed and not engine.again:  # a repeat was not clean
                self._calls[engine.actor.measure.remote(key, engine.cases)] = engine, key
            else:
                del engine.open[key]
        if not engine.open:
            self._calls[engine.actor.close.remote()] = engine, None

    def _check_alive(self) -> None:
        """Fail engines that wait for a node if no living node has room for them: Ray would wait for others. Fail all if
        nothing has come for too long."""
        if not self.slots:
            living = connect.nodes_of(self.ray.nodes(), self.options.ray_resource)
            for engine in list(self._running):
                there = engine.place is not None and engine.place[0] in {node.id for node in living}
                if not there and not any(map(engine.need.fits, living)):
                    gone = [f"{node.name} died" for node in self.nodes if node not in living]
                    lost = " and ".join(dict.fromkeys([*engine.lost, *gone]))
                    what = f"{counted(len(engine.open), 'cell')} of {engine.name}" if engine.place else engine.name
                    self._end(engine, EngineFailed(f"{lost}, and no other node has {engine.need} for {what}", RESUME))
        if time.monotonic() - self._heard_at >= self._quiet_s:
            for engine in list(self._running):
                where = self._name(engine) if engine.place else f"no node, {engine.need} being taken"
                why = f"{engine.name}: nothing came for {clock(self._quiet_s)} (on {where})"
                self._end(engine, EngineFailed(why, "ray status; what came is kept: --slm-resume"))

    def _name(self, engine: RunningEngine) -> str:
        """The name of the node on which an engine answered last."""
        if self.slots:
            return self.nodes[0].name
        if engine.place is None:
            return "a node"
        node = engine.place[0]
        return next((known.name for known in self.nodes if known.id == node), node[:8])

    def _how_lost(self, engine: RunningEngine) -> str:
        """How the process of an engine ended before its time, in words."""
        living = {node.id for node in connect.nodes_of(self.ray.nodes())}
        died = not self.slots and engine.place is not None and engine.place[0] not in living
        return f"{self._name(engine)} died" if died else f"its task was lost on {self._name(engine)}"
