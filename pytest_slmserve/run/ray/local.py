"""All GPUs of this host at once: Ray runs the tasks, and each task has GPUs and CPU cores of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case, Engines, PlannedItem
from pytest_slmserve.plan.planner import check_there
from pytest_slmserve.plan.schedule import Group
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.gpu_slots import GpuSlots, slot_count
from pytest_slmserve.run.ray.connect import EngineTask, Need, Node, start_here
from pytest_slmserve.run.ray.driver import TICK_S, Cluster, Submission
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import is_steady
from pytest_slmserve.schema.records import ReplicaGroup
from pytest_slmserve.telemetry.host import probe

UNCHECKED = (
    "whether engines on several GPUs disturbed each other was not looked at: the shipped test_neighbours.py does, by "
    "two loads of each model alone"
)


@dataclass(eq=False, repr=False, kw_only=True)
class LocalGpus(Cluster):
    """Measures on the slots of this host. Tasks begin in their order: one that needs several GPUs gets them before
    those behind it take one, so it does not wait for ever."""

    slots: GpuSlots
    _waiting: list[Submission] = field(default_factory=list)
    _undo: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def from_options(cls, options: Options, root: Path) -> LocalGpus:
        """The slots of this host. Raises BadUsage for more than there are, and for GPUs of different kinds."""
        platform, (python, variables) = options.platform, options.engine
        assert platform is not None
        host = probe(platform, python, dict(variables), root)
        slots = GpuSlots.from_host(host, slot_count(options, host), options.tensor_parallel_size[-1])
        every = range(len(slots.devices))
        check_there(host, every if host.gpus else (0,))
        this = Node("local", "this host", len(every), len(every))
        return cls(ray=None, options=options, nodes=[this], host=slots.host(host, every), slots=slots)

    def send(self, session: Session, cases: Sequence[Case], cells: Sequence[PlannedItem]) -> None:
        """Locks the GPUs, starts Ray, and submits the cases. Raises DeviceBusy, BadUsage."""
        if self.slots.visible:  # parts of the CPU have one lock, which an open session holds
            session.devices.lock(self.slots.devices)
        self.ray = self._undo.enter_context(start_here(len(self.slots.devices)))
        super().send(session, cases, cells)

    def measure_alone(self, session: Session, model: str) -> None:
        """Two cases of a model's sweep once more, if all of it was measured beside others: its smallest load, where the
        CPU is most of a step, and its largest."""
        spec, workload = session.planner.spec(model), session.planner.workload(model)
        found = [m for m in session.verdicts.curve(model).measurements if not problems(m)]
        beside = sorted({m.load.concurrency for m in found if m.neighbours and is_steady(m.load)})
        for concurrency in dict.fromkeys(beside[:1] + beside[-1:]):
            case = session.planner.case(spec, [workload], [session.planner.load(concurrency)])
            if all(m.neighbours for (m,) in session.results.repeats[case.key] if not problems(m)):
                while self._sent:  # engines whose last case has come may still be stopping
                    if not self._hear(TICK_S):
                        self._check_quiet()
                group = Group.from_items(spec, ())
                self._submit(Submission(group, self._need(spec), {case.key: case}, extra=True))
                self._wait_for(case)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._undo.close()

    @property
    def where(self) -> str:
        return f"on {counted(len(self.slots.devices), 'GPU' if self.host.gpus else 'part')} of this host at once"

    def _need(self, engine: Engines) -> Need:
        return Need(len(engine.gpus) if self.host.gpus else 1, 0)

    def _living(self) -> list[Node]:
        return self.nodes

    def _name(self, node: str) -> str:
        return self.nodes[0].name

    @property
    def _pending(self) -> list[Submission]:
        return [*self._sent.values(), *self._waiting]

    def _submit(self, sent: Submission) -> None:
        self._waiting.append(sent)
        self._begin()

    def _begin(self) -> None:
        """Begins the tasks that wait, in their order, as far as slots are free."""
        while self._waiting:
            taken = {slot for sent in self._sent.values() for slot in sent.at}
            first = self._waiting[0]
            at = self.slots.block(first.need.gpus, set(range(len(self.slots.devices))) - taken)
            if at is None:
                return
            first.at = at
            super()._submit(self._waiting.pop(0))
            for sent in self._sent.values():
                sent.beside = max(sent.beside, self._beside(sent))

    def _beside(self, sent: Submission) -> int:
        """The number of slots on which other tasks run now."""
        return sum(len(other.at) for other in self._sent.values() if other is not sent)

    def _task(self, sent: Submission) -> EngineTask:
        return replace(super()._task(sent), slots=self.slots, at=sent.at)

    def _resources(self, need: Need) -> dict[str, Any]:
        return {"num_gpus": 0, "num_cpus": 0}  # the slots say what runs where

    def _stop(self, error: BadUsage) -> None:
        super()._stop(error)
        self._waiting.clear()

    def _hear(self, within_s: float) -> bool:
        heard = bool(self._sent) and super()._hear(within_s)
        self._begin()
        return heard

    def _group(self, sent: Submission, packed: bytes) -> ReplicaGroup:
        """The measurements of one repeat, with the most neighbours that it had since the last one came."""
        group = tuple(replace(m, neighbours=sent.beside) for m in super()._group(sent, packed))
        sent.beside = self._beside(sent)
        return group

    def _notes(self, session: Session) -> list[str]:
        judged = {verdict.claim for verdict, _ in session.verdicts.judged}
        beside = any(m.neighbours for m in session.results.measurements())
        return [UNCHECKED] if beside and deployments.CLAIM not in judged else []


def measure_alone(session: Session, model: str) -> None:
    """Measures two cases of a model alone, in a run on all GPUs of this host."""
    assert isinstance(session.executor.remote, LocalGpus)
    session.executor.remote.measure_alone(session, model)
