"""Dispatch of cases to Ray, an engine's cases as one task. What comes back is known to the session at once.

All of this happens in one thread: what has come is taken while an item waits for what is its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case, Engines, PlannedItem, clock, engine_title, start_estimate_s
from pytest_slmserve.plan.schedule import Group, groups_of, in_order
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.ray.connect import (
    A_TOUCH,
    CaseEnded,
    CaseMeasured,
    EngineTask,
    Message,
    Need,
    Node,
    TaskStarted,
    UserNote,
    connect,
    measuring,
    need_of,
    node_hosts,
    nodes_of,
    one_host,
    run_task,
    task_of,
    unpacked,
)
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, SlmError
from pytest_slmserve.schema.records import ReplicaGroup
from pytest_slmserve.telemetry.host import Host, this_host

TICK_S = 0.5
END_S = 15.0  # for engines to stop
LEAST_QUIET_S = 600.0
PATIENCE = 5.0  # so many times as long as the price of the longest silence
RETRIES = 1  # of a cell
MOST_LOST = 3  # tasks of an engine: then it is the engine that kills them, not a cell


@dataclass(eq=False)
class Submission:
    """An engine's cases on their way. open: those of which something is missing, the first of which is the one that
    is being measured. node: where it is; None while it waits for one. lost: how each of its tasks ended before its
    time, with the key of the case that it was at. extra: one repeat more than was requested. at, beside: the slots of
    this host that it has, and the most that others had since a repeat came; both only where slots are given."""

    group: Group
    need: Need
    open: dict[str, Case]
    node: str | None = None
    lost: list[tuple[str, str]] = field(default_factory=list)
    extra: bool = False
    at: tuple[int, ...] = ()
    beside: int = 0

    @property
    def name(self) -> str:
        return engine_title(self.group.engine)


@dataclass(eq=False, repr=False)
class Cluster:
    """Measures in a session's stead. on_progress: hears how a wait is going."""

    ray: Any
    options: Options
    nodes: list[Node]
    host: Host
    on_progress: Callable[[Case, str], None] = lambda case, text: None
    _session: Session | None = None
    _sent: dict[Any, Submission] = field(default_factory=dict)  # by the stream of its messages
    _known: set[str] = field(default_factory=set)  # keys of what was planned
    _failed: dict[str, BaseException] = field(default_factory=dict)
    _dead: set[str] = field(default_factory=set)
    _ran: Counter[str] = field(default_factory=Counter)  # tasks by node
    _came: int = 0
    _quiet_s: float = LEAST_QUIET_S
    _heard_at: float = 0.0
    _closed: bool = False

    @classmethod
    def from_options(cls, options: Options, root: Path) -> Cluster:
        """Connect, and ask the nodes what they are. Raises BadUsage, before any engine starts."""
        platform = options.platform
        assert platform is not None
        ray = connect(options)
        try:
            listed = measuring(nodes_of(ray.nodes(), options.ray_resource), platform)
            found = node_hosts(ray, options, listed)
            nodes = measuring(list(found), platform)  # that answered
            return cls(ray, options, nodes, one_host(found, this_host(platform, root)))
        except BaseException:
            ray.shutdown()
            raise

    def send(self, session: Session, cases: Sequence[Case], cells: Sequence[PlannedItem]) -> None:
        """Widest engines first, then the longest; less what is known already. Raises BadUsage where one of them fits
        on no node, with none sent."""
        self._session = session
        self._known = {case.key for case in cases}
        missing = [case for case in cases if self._is_open(case)]
        sent = []
        for group in in_order(groups_of(cells)):
            its = {c.key: c for c in missing if c.engine == group.engine}
            if its:
                sent.append(Submission(group, self._need(group.engine), its))
        self._quiet_s = quiet_s([each.group for each in sent])
        for each in sent:
            self._submit(each)
        self._heard_at = time.monotonic()

    def fetch(self, case: Case) -> None:
        """Take what comes until all of this case has come. Raises what kept it from being measured."""
        if case.key not in self._known:
            why = f"{case.title} was not planned before the run, so it was not sent to Ray"
            raise BadUsage(why, "without --slm-ray")
        self._wait_for(case)

    def _wait_for(self, case: Case) -> None:
        while any(case.key in sent.open for sent in self._pending):
            if not self._hear(TICK_S):
                self._check_quiet()
            self.on_progress(case, self._progress())
        if error := self._failed.get(case.key):
            raise error

    def close(self) -> None:
        """Take what has come, and stop what still runs there; may be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            for stream in self._sent:
                self.ray.cancel(stream)
            until = time.monotonic() + END_S
            while self._sent and time.monotonic() < until:
                self._hear(TICK_S)
            if self._session and self._ran:
                self._session.notes.extend(self._notes(self._session))
        finally:
            if self.ray:
                self.ray.shutdown()

    @property
    def where(self) -> str:
        """The place of the engines, in words."""
        return f"on {counted(len(self.nodes), 'node')} of a Ray cluster"

    def _notes(self, session: Session) -> list[str]:
        """Notes for the end of the run."""
        return [f"measured on {_ran(self._ran)} of the Ray cluster at {self.options.ray}"]

    def _need(self, engine: Engines) -> Need:
        return need_of(engine, self.nodes, self.options.ray_resource)

    @property
    def _pending(self) -> list[Submission]:
        """Submissions of which something may still come."""
        return list(self._sent.values())

    def _is_open(self, case: Case) -> bool:
        assert self._session is not None
        return self._session.executor.count_missing(case, self.options.repeats) > 0

    def _submit(self, sent: Submission) -> None:
        # A process that has served one task may see the GPUs of that one for ever.
        task = self.ray.remote(max_calls=1)(run_task)
        stream = task.options(
            name=sent.name,
            num_returns="streaming",
            max_retries=0,  # Ray's own would measure again what has come
            **self._resources(sent.need),
        ).remote(self._task(sent), sent.open)
        sent.node = None
        self._sent[stream] = sent

    def _task(self, sent: Submission) -> EngineTask:
        assert self._session is not None
        if sent.extra:
            return task_of(self.options, self.host.environment, 1, [()] * len(sent.open))
        repeats = self._session.results.repeats
        known = [repeats.get(key, ()) for key in sent.open]
        return task_of(self.options, self.host.environment, self.options.repeats, known)

    def _resources(self, need: Need) -> dict[str, Any]:
        """Resources that Ray takes of a node while the task runs, and where it starts it."""
        resources = {need.resource: A_TOUCH} if need.resource else {}
        return {
            "num_gpus": need.gpus,
            "num_cpus": need.cpus,
            "resources": resources,
            "scheduling_strategy": "SPREAD",
        }

    def _hear(self, within_s: float) -> bool:
        """Take one message, if one comes."""
        ready, _ = self.ray.wait(list(self._sent), num_returns=1, timeout=within_s, fetch_local=False)
        for stream in ready:
            self._heard_at = time.monotonic()
            self._next(stream)
        return bool(ready)

    def _next(self, stream: Any) -> None:
        sent, problems = self._sent[stream], self.ray.exceptions
        try:
            message = self.ray.get(next(stream))
        except StopIteration:
            del self._sent[stream]
            self._fail(sent, EngineFailed(f"{sent.name}: its task ended before all was measured", "--slm-resume"))
        except (
            problems.NodeDiedError,
            problems.LocalRayletDiedError,
            problems.ObjectLostError,
            problems.OutOfMemoryError,
            problems.WorkerCrashedError,
        ) as error:
            del self._sent[stream]
            self._died(sent, self._how(sent, error))
        except Exception as error:  # of Ray, or a bug of ours over there: told by the items that wait for it
            del self._sent[stream]
            self._fail(sent, error)
        else:
            self._take(sent, message)

    def _take(self, sent: Submission, message: Message) -> None:
        session = self._session
        assert session is not None
        match message:
            case TaskStarted(node):
                sent.node = node
                self._ran[self._name(node)] += 1
            case CaseMeasured(key, packed):
                self._came += 1
                try:
                    session.executor.keep(sent.open[key], self._group(sent, packed))
                except SlmError as error:
                    self._failed[key] = error
                    if isinstance(error, BadUsage):
                        self._stop(error)
            case CaseEnded(key, error):
                if error:
                    self._failed[key] = error
                del sent.open[key]
            case UserNote(note):
                session.note(note)

    def _stop(self, error: BadUsage) -> None:
        """Cancels and fails all that still runs or waits: what comes could not be written."""
        for sent in self._pending:
            self._fail(sent, error)
        for stream in self._sent:
            self.ray.cancel(stream)
        self._sent.clear()

    def _group(self, sent: Submission, packed: bytes) -> ReplicaGroup:
        return unpacked(packed)

    def _how(self, sent: Submission, error: Exception) -> str:
        """Describes how a task ended before its time, for people; marks its node as dead if the node died."""
        name, problems = self._name(sent.node) if sent.node else "a node", self.ray.exceptions
        if isinstance(error, problems.OutOfMemoryError):
            return f"{name} ran out of memory"
        if not isinstance(error, problems.NodeDiedError | problems.LocalRayletDiedError):
            return f"its task was lost on {name}"
        if sent.node:
            self._dead.add(sent.node)
        return f"{name} died"

    def _died(self, sent: Submission, how: str) -> None:
        """Sends once more what has not come, except a cell during which a task ended for the second time. After
        MOST_LOST lost tasks everything missing of the engine fails. What has come is never measured again."""
        if not sent.extra:
            sent.open = {key: case for key, case in sent.open.items() if self._is_open(case)}
        if self._closed:
            return
        if sent.open:
            at = next(iter(sent.open))
            sent.lost.append((at, how))
            often = [how for key, how in sent.lost if key == at]
            if len(sent.lost) >= MOST_LOST:
                self._fail(sent, _too_often([how for _, how in sent.lost], f"{_cells(sent)} {_were(sent)}"))
            else:
                if len(often) > RETRIES:
                    self._failed[at] = _too_often(often, f"{sent.open.pop(at).title} was")
                self._send_again(sent, how)
        self._strand()

    def _send_again(self, sent: Submission, how: str) -> None:
        if not sent.open:
            return
        if not any(map(sent.need.fits, self._living())):
            self._fail(sent, _lost(f"{how}, and no other node has {sent.need} for {_cells(sent)}"))
            return
        assert self._session is not None
        self._session.notes.append(f"{how}; {_cells(sent)} {_were(sent)} sent once more")
        self._submit(sent)

    def _strand(self) -> None:
        """Cancels and fails what waits for a node, where no living node has room for it."""
        living = self._living()
        for stream, sent in list(self._sent.items()):
            if sent.node is None and not any(map(sent.need.fits, living)):
                self.ray.cancel(stream)
                del self._sent[stream]
                gone = [node.name for node in self.nodes if node not in living]
                lost = [*(how for _, how in sent.lost), *(f"{name} died" for name in gone)]
                self._fail(sent, _lost(f"{_all(lost)}, and no other node has {sent.need} for {sent.name}"))

    def _living(self) -> list[Node]:
        """Ray may take a while to notice what its tasks have told already."""
        return [n for n in nodes_of(self.ray.nodes(), self.options.ray_resource) if n.id not in self._dead]

    def _name(self, node: str) -> str:
        return next((known.name for known in self.nodes if known.id == node), node[:8])

    def _fail(self, sent: Submission, error: BaseException) -> None:
        for key, case in sent.open.items():
            if self._is_open(case):
                self._failed[key] = error

    def _check_quiet(self) -> None:
        """Fails what waits where nothing has come for too long, or at once where the nodes are gone: of a task that had
        not begun there Ray tells nothing, and waits for others."""
        if any(sent.node is None for sent in self._sent.values()):
            self._strand()
        if time.monotonic() - self._heard_at < self._quiet_s:
            return
        for stream, sent in list(self._sent.items()):
            self.ray.cancel(stream)
            del self._sent[stream]
            where = self._name(sent.node) if sent.node else f"no node, {sent.need} being taken"
            why = f"{sent.name}: nothing came for {clock(self._quiet_s)} (on {where})"
            self._fail(sent, EngineFailed(why, "ray status; what came is kept: --slm-resume"))

    def _progress(self) -> str:
        running = sum(sent.node is not None for sent in self._sent.values())
        waiting = len(self._sent) - running
        return f"{self._came} came | {running} engines run, {waiting} wait for a node"


def quiet_s(groups: Sequence[Group]) -> float:
    """Seconds of silence of the whole cluster that indicate a failure: far more than the longest cell takes."""
    prices = [start_estimate_s(g.engine) + max((cell.seconds for cell in g.cells), default=0.0) for g in groups]
    return LEAST_QUIET_S + PATIENCE * max(prices, default=0.0)


def _lost(problem: str) -> EngineFailed:
    return EngineFailed(problem, "pytest again with --slm-resume: what came is kept")


def _too_often(lost: Sequence[str], what: str) -> EngineFailed:
    return _lost(f"{_all(lost)} while {what} measured there, which is once too often")


def _all(lost: Sequence[str]) -> str:
    """The distinct reasons in `lost`, joined by " and " for a message."""
    return " and ".join(dict.fromkeys(lost))


def _cells(sent: Submission) -> str:
    return f"{counted(len(sent.open), 'cell')} of {sent.name}"


def _were(sent: Submission) -> str:
    return "were" if len(sent.open) != 1 else "was"


def _ran(by_node: Counter[str]) -> str:
    return ", ".join(f"{node} ({counted(n, 'engine')})" for node, n in by_node.items())
