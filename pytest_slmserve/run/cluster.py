"""Engines that Ray runs for a session, on the nodes of a cluster or on all GPUs of this host.

Each engine is an actor whose calls measure one repeat. If its process or node is lost, Ray restarts it and repeats
unanswered calls.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.archive.codec import engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.engines.child import FOLDER, GUARDIAN, undone_on_error
from pytest_slmserve.engines.interrupts import held, hurried
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case, PlannedItem, clock, engine_title, groups_of, start_estimate_s
from pytest_slmserve.plan.planner import check_there
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.executor import GpuSlots, slot_count
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, Platform, SlmError, read_json, to_install
from pytest_slmserve.schema.records import Environment, Measurement, ReplicaGroup, differences
from pytest_slmserve.schema.specs import Engines, is_steady
from pytest_slmserve.telemetry.host import Host, probe, this_host

ANSWER_S = 30.0  # seen: 2 s
LOOK_S = 120.0  # a node starts an interpreter, which probes another one
INSTALL_S = 1800.0  # if it has to install packages first
# Ray waits two minutes for an address that does not answer, and then ends the process that asked.
ASK = "import logging, sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)"
LOOPBACK = "127.0.0.1"
# A Ray that only this run uses sends no usage statistics, and accepts only processes with its token. If it may not form
# a cluster of several hosts, as by default on macOS and Windows, it listens only on the loopback address.
OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
HANDLER_S = 0.02  # between two checks while Ray starts
STORE_BYTES = 256 * 2**20
# Engines may keep all cores busy for minutes, which Ray would take for the death of the node.
PATIENT = {"health_check_timeout_ms": 600_000, "health_check_failure_threshold": 100}


# Engines, in processes of Ray


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """Answer of an engine to one call.

    Attributes:
        place: Ray's ID of the node, and the process ID.
        packed: one repeat, from `packed_measurements`.
        error: reason if there is none. Ray would wrap an exception.
    """

    place: tuple[str, int]
    packed: bytes = b""
    error: SlmError | None = None
    notes: tuple[str, ...] = ()


def process_place() -> tuple[str, int]:
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()


class RemoteEngine:
    """Actor of Ray with one engine. It writes no results file and resumes nothing.

    Args:
        environment: of the other nodes, whose kind this one must have.
        slots: of the session's host; None on a cluster.
        at: slots of this engine.
    """

    def __init__(
        self, options: Options, environment: Environment, slots: GpuSlots | None = None, at: Sequence[int] = ()
    ) -> None:
        own = options._replace(ray="", ray_env="", ray_resource="", records="", export="", resume=False, plan=False)
        self.options = own._replace(tensor_parallel_size=(1,), baseline="")
        self.environment, self.slots, self.at = environment, slots, at
        self.session: Session | None = None
        self.failed: dict[str, SlmError] = {}  # by the key of a case; "" if there is no session

    def started(self) -> EngineAnswer:
        return EngineAnswer(process_place())

    def measure(self, key: str, cases: Mapping[str, Case]) -> EngineAnswer:
        """Measure one repeat of the case with this key. A case that failed is not tried again."""
        error = self.failed.get("") or self.failed.get(key)
        try:
            if error is None:
                session = self.session or self._open()
                case = cases[key]
                case = replace(case, environment=session.planner.environment(case.engine))
                group = session.executor.measure_once(case, case.title)
                return EngineAnswer(process_place(), packed_measurements(group))
        except SlmError as raised:
            self.failed[key if self.session else ""] = error = raised
        return EngineAnswer(process_place(), error=error)

    def _open(self) -> Session:
        if self.slots:
            self.slots.pin(self.at)
        if isinstance(host := look_around(self.options), SlmError):
            raise host
        if self.slots:
            host = self.slots.host(host, self.at)
        environment = replace(host.environment, git_commit=self.environment.git_commit)
        if unlike := differences(self.environment.kind, environment.kind, ("on the others", "on this one")):
            why = f"a node that came later is of another kind ({'; '.join(unlike)})"
            raise BadUsage(why, "Pass -o slm_ray_resource=NAME, or use nodes of one kind.")
        session = Session.from_options(self.options, Path.cwd(), replace(host, environment=environment))
        session.devices.locked_for_us = self.slots is not None
        session.devices.hold()
        self.session = session
        return session

    def close(self) -> EngineAnswer:
        if self.session:
            self.session.close()
        return EngineAnswer(process_place(), notes=tuple(self.session.notes) if self.session else ())


def look_around(options: Options) -> Host | SlmError:
    """Return the node as engines find it, or an error as a value, because Ray would wrap an exception."""
    # Engines must not inherit Ray's variables: few threads, and no GPUs for a task that takes none.
    os.environ.pop("OMP_NUM_THREADS", None)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    python, variables = options.engine
    assert options.platform is not None
    try:
        return probe(options.platform, python, dict(variables))
    except SlmError as error:
        return error


def packed_measurements(found: Sequence[Measurement]) -> bytes:
    """Return measurements as compressed lines of a results file."""
    lines = []
    for m in found:
        lines += [engine_line(m.launch, m.spec, m.resolved, m.environment), measurement_line(m)]
    return gzip.compress(json.dumps(lines, allow_nan=False).encode(), mtime=0)


def unpacked(data: bytes) -> ReplicaGroup:
    lines = json.loads(gzip.decompress(data))
    return tuple(measurement_of(run, *engine_from_record(engine)) for engine, run in zip(lines[::2], lines[1::2]))


# Nodes


@dataclass(frozen=True, slots=True)
class Node:
    """Living node of a cluster, with the GPUs and CPUs that Ray counts."""

    id: str
    name: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Need:
    """Resources that an engine takes of its node.

    Attributes:
        resource: custom resource that the node must have; "" for none.
    """

    gpus: int
    cpus: int
    resource: str = ""

    def __str__(self) -> str:
        what = counted(self.gpus, "GPU") if self.gpus else f"{self.cpus} CPUs"
        return f"{what} and {self.resource}" if self.resource else what

    def fits(self, node: Node) -> bool:
        return self.gpus <= node.gpus and self.cpus <= node.cpus


def nodes_of(rows: Iterable[Mapping[str, Any]], resource: str = "") -> list[Node]:
    """Return living nodes, those with the most GPUs first.

    Args:
        rows: from `ray.nodes()`.
        resource: custom resource that they must have, or "".
    """
    found = []
    for row in rows:
        has = row["Resources"]
        if row["Alive"] and (not resource or has.get(resource)):
            name = f"{row.get('NodeName') or row['NodeManagerAddress']} ({row['NodeID'][:8]})"
            found.append(Node(row["NodeID"], name, int(has.get("GPU", 0)), int(has.get("CPU", 0))))
    return sorted(found, key=lambda node: (-node.gpus, node.name))


def measuring(nodes: Sequence[Node], platform: Platform) -> list[Node]:
    """Return the nodes that measure: those with GPUs, or with CPUs for the CPU backend or a simulation without GPUs.

    Raises:
        BadUsage: if there are none.
    """
    with_gpus, with_cpus = [n for n in nodes if n.gpus], [n for n in nodes if n.cpus]
    found = {"cuda": with_gpus, "simulated": with_gpus or with_cpus}.get(platform, with_cpus)
    if not found:
        what = "a GPU" if platform == "cuda" else "a CPU"
        looked = f"no node of this cluster offers {what} (looked at {len(nodes)})"
        raise BadUsage(looked, "Run `ray status` to see what it has.")
    return found


def need_of(engine: Engines, nodes: Sequence[Node], resource: str = "") -> Need:
    """Return the resources that an engine takes of a node, which are all cores on the CPU backend.

    Raises:
        BadUsage: if no node has them.
    """
    if engine.platform == "cpu":
        return Need(0, min(node.cpus for node in nodes), resource)
    on_gpus = any(node.gpus for node in nodes)
    need = Need(len(engine.gpus) if on_gpus else 0, min(1, *(node.cpus for node in nodes), 1), resource)
    if not any(map(need.fits, nodes)):
        most = max(node.gpus for node in nodes)
        raise BadUsage(
            f"an engine takes {need}, and no node of this cluster has more than {most}", f"Ask for {most} or fewer."
        )
    return need


def one_host(found: Mapping[Node, Host], mine: Environment) -> Host:
    """Return the nodes as one host, with the GPUs of the node that has the most.

    Raises:
        BadUsage: if the nodes are of different kinds, or have other releases of this package than the session.
    """
    first = next(iter(found))
    for node, host in found.items():
        if host.environment.pytest_slmserve != mine.pytest_slmserve:
            there = host.environment.pytest_slmserve
            why = f"{node.name} has pytest-slmserve {there}, and {mine.pytest_slmserve} asks"
            raise BadUsage(why, "Install the same release on every node.")
        sides = f"on {first.name}", f"on {node.name}"
        if unlike := differences(found[first].environment.kind, host.environment.kind, sides):
            why = f"the nodes are of different kinds ({'; '.join(unlike)}): what they serve cannot be compared"
            only = "one that only nodes of one kind have, such as accelerator_type:H200"
            raise BadUsage(why, f"Pass -o slm_ray_resource=NAME with {only}.")
    widest = max(found, key=lambda node: node.gpus)
    host = found[widest]
    environment = replace(host.environment, git_commit=mine.git_commit)
    return replace(host, environment=environment, gpus=host.gpus[: widest.gpus] if widest.gpus else host.gpus)


def node_hosts(ray: Any, options: Options, nodes: Sequence[Node]) -> dict[Node, Host]:
    """Return the host that each node reports, without lost nodes that Ray still lists."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(max_calls=1, num_cpus=0, max_retries=0)(look_around)
    there = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    asked = [task.options(scheduling_strategy=at).remote(options) for at in there]
    ray.wait(asked, num_returns=len(asked), timeout=INSTALL_S if options.ray_env else LOOK_S)
    found = {node: node_host(ray, node, answer) for node, answer in zip(nodes, asked)}
    return {node: host for node, host in found.items() if host is not None}


def node_host(ray: Any, node: Node, answer: Any) -> Host | None:
    """Return the host that a node reports, or None if the node is lost. Raise BadUsage if it cannot measure."""
    gone = (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError, ray.exceptions.LocalRayletDiedError)
    try:
        host: Host | SlmError = ray.get(answer, timeout=0)
    except gone:
        return None
    except ray.exceptions.GetTimeoutError:
        raise BadUsage(f"{node.name} does not answer", "Run `ray status`, or run without slm_ray_resource.") from None
    except Exception as error:
        last = str(error).strip().splitlines()[-1].strip()  # the reason
        if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
            why = f"{node.name} cannot make the environment of slm_ray_env ({last})"
            raise BadUsage(why, "Name packages that the package index of the nodes has.") from None
        hint = "Install pytest-slmserve there, or name it in slm_ray_env, and use the same Python."
        raise BadUsage(f"{node.name} cannot run what it is sent ({last})", hint) from None
    if isinstance(host, SlmError):
        raise type(host)(f"{node.name}: {host.problem}", host.hint)
    return host


# Connections


def join_cluster(options: Options) -> Any:
    """Return Ray, connected to the cluster of the options.

    Raises:
        BadUsage: if no cluster answers, or the file of slm_ray_env is not a JSON object.
    """
    environment, address, told = None, options.ray, ""
    if path := options.ray_env:
        hint = 'Write a JSON object such as {"pip": ["vllm==0.26.0"]}.'
        environment = read_json(Path(path), hint, f"slm_ray_env: {path}")
        if not isinstance(environment, dict):
            raise BadUsage(f"slm_ray_env: {path} holds no JSON object", hint)
    try:  # in a process that can be ended
        command, variables = [sys.executable, "-c", ASK, address], {**os.environ, "PYTHONSAFEPATH": "1"}
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, env=variables)
        if asked.returncode == 0:
            with ThreadPoolExecutor(1) as alone:
                return _ray_at(address, alone, runtime_env=environment)
        told = asked.stderr
    except subprocess.TimeoutExpired:
        told = f"no answer within {ANSWER_S:.0f} s"
    except Exception as error:  # Ray raises errors of many kinds here
        told = str(error)
    lines = [line for line in told.strip().splitlines() if line.strip()] or ["it did not say why"]
    why = f"--slm-ray {address}: no Ray cluster answers there ({lines[-1].strip()})"
    raise BadUsage(why, "Run `ray status` on a node of the cluster, and pytest on one of its nodes.")


def _ray_at(address: str, alone: Executor, **words: Any) -> Any:
    # In the main thread Ray would let SIGTERM end the process silently, and an interrupt of its start would be a
    # SIGSEGV. What Ray starts in the thread ends with it.
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it could not take SIGTERM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # -W error must not end the run
        import ray

        _aside(alone, ray.init, address, log_to_driver=False, logging_level=logging.ERROR, **words)
    return ray


def shut_down(ray: Any) -> None:
    with ThreadPoolExecutor(1) as alone:
        _aside(alone, ray.shutdown)


def _aside(alone: Executor, work: Callable[..., object], *args: Any, **words: Any) -> None:
    """Run work that starts or ends Ray in the thread of `alone`, and restore our handler of SIGTERM meanwhile."""
    # Ray's library replaces the handler when it starts and resets it when it ends. Either would end the process.
    doing = alone.submit(work, *args, **words)
    main, handler = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    done = False
    while not done:
        done = not wait([doing], HANDLER_S).not_done
        if main and handler:
            signal.signal(signal.SIGTERM, handler)
    doing.result()


@contextmanager
def start_here(tasks: int) -> Iterator[Any]:
    """Start Ray on this host until the context ends, for a number of engines at a time.

    Its processes and files do not outlive this process. Signals wait while it starts or ends.
    """
    undo = ExitStack()
    try:
        with held():
            ray = _start_here(tasks, undo)
        yield ray
    finally:
        with held():
            undo.close()


def _start_here(tasks: int, undo: ExitStack) -> Any:
    """Start and return Ray, and push onto `undo` all that ends it. Its agents end a minute after it."""
    undo.callback(os.environ.update, {name: os.environ[name] for name in OWN if name in os.environ})
    for name in OWN:
        undo.callback(os.environ.pop, name)
    os.environ |= OWN
    _import_own_ray()
    folder = undo.enter_context(TemporaryDirectory(prefix="slm-", ignore_cleanup_errors=True))
    command, null = [sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid())], subprocess.DEVNULL
    variables = {**os.environ, FOLDER: folder}
    # In its own session, because Ctrl-C is for pytest, and the process group of pytest must not be killed.
    guardian = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=variables, start_new_session=True)
    undo.callback(guardian.wait)
    undo.callback(guardian.terminate)
    undo.callback(_kill_servers, folder)  # if the start failed halfway
    try:
        ray = _ray_at(
            "local",
            undo.enter_context(ThreadPoolExecutor(1)),
            num_cpus=tasks,
            num_gpus=0,  # the slots assign them
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _node_ip_address=LOOPBACK,
            _system_config=PATIENT,
            _temp_dir=f"{folder}/r",  # Ray lets all users write into it, but the parent folder is private
        )
    except Exception as error:  # of many kinds
        first = str(error).strip().partition("\n")[0]
        raise BadUsage(f"Ray does not start on this host ({first})", "Run without --slm-ray.") from None
    undo.callback(shut_down, ray)
    return ray


@cache  # of a process
def _import_own_ray() -> None:
    # Ray reads the variables of `OWN` when it is imported.
    if "ray" in sys.modules:
        why = "Ray was imported before --slm-ray could tell it to take nobody's calls but ours"
        raise BadUsage(why, "Import ray in no conftest.py, plugin, or test module.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray  # noqa: F401


def _kill_servers(folder: str) -> None:
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(folder in word for word in child.cmdline()):
                for each in (*child.children(recursive=True), child):
                    each.kill()


def reachable_at(ray: Any) -> str:
    """Return the address at which other hosts may reach a Ray on this host, or "" if it is the loopback address."""
    [address] = {row["NodeManagerAddress"] for row in ray.nodes()}
    return "" if address == LOOPBACK else str(address)


TICK_S = 0.5
# Seconds of silence of all engines that indicate a failure: far more than the longest case takes.
LEAST_QUIET_S = 600.0
PATIENCE = 5.0
END_S = 15.0  # for engines to stop
RESTARTS = 2  # of an engine whose process or node is lost: after that the engine is probably the cause
A_TOUCH = 0.001  # amount of a resource that only selects nodes
RESUME = "Run pytest again with --slm-resume: finished measurements are kept."
REACHABLE = "this release of Ray listens on {}, where other hosts may reach it: only its random token keeps them out"
UNCHECKED = (
    "whether engines on several GPUs disturbed each other was not looked at: the shipped test_neighbours.py does, by "
    "two loads of each model alone"
)


@dataclass(eq=False)
class RunningEngine:
    """Engine with the cases to measure on it."""

    spec: Engines
    need: Need
    open: dict[str, Case]  # cases with missing repeats, by key
    again: bool = False  # its cases get one more repeat than the run requested
    actor: Any = None  # Ray's handle, once it has started
    cases: Any = None  # Ray's reference to all its cases
    place: tuple[str, int] | None = None  # node and process, since its first answer
    lost: list[str] = field(default_factory=list)  # reasons why earlier processes ended
    at: tuple[int, ...] = ()  # its slots, if there are slots
    neighbours: int = 0  # most slots in use by other engines since its last repeat

    @property
    def name(self) -> str:
        return engine_title(self.spec)

    def cells(self) -> str:
        """Return the number of open cases for a sentence, such as "2 cells of opt-125m were"."""
        return f"{counted(len(self.open), 'cell')} of {self.name} {'was' if len(self.open) == 1 else 'were'}"


@dataclass(eq=False, repr=False)
class RayEngines:
    """Engines that measure for a session.

    With slots, engines begin in their order, so that one that needs several GPUs does not wait forever. On a cluster
    Ray places them.
    """

    ray: Any  # once it is connected
    options: Options
    nodes: list[Node]  # of the cluster, on which engines may run
    host: Host  # what an engine finds on any of them
    slots: GpuSlots | None = None  # the GPUs of this host, or parts of its CPU, if engines run here
    on_progress: Callable[[Case, str], None] = lambda case, text: None  # shows the wait for a case
    warning: str = ""  # about the Ray that `send` has started
    _session: Session = field(init=False)  # from `send` on
    _engines: list[RunningEngine] = field(default_factory=list)  # in the order in which they begin
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
        """Return engines for the GPUs of this host, or for a cluster whose nodes have reported their hosts."""
        platform, (python, variables) = options.platform, options.engine
        assert platform is not None
        if find_spec("ray") is None:
            raise BadUsage("--slm-ray needs Ray, which is not installed", to_install("ray"))
        if options.on_all_gpus:
            here = probe(platform, python, dict(variables), root)
            slots = GpuSlots.from_host(here, slot_count(options, here), options.tensor_parallel_size[-1])
            every = range(len(slots.devices))
            check_there(here, every if here.gpus else (0,))
            return cls(None, options, [], slots.host(here, every), slots)
        ray = join_cluster(options)
        with undone_on_error(partial(shut_down, ray)):
            listed = measuring(nodes_of(ray.nodes(), options.ray_resource), platform)
            found = node_hosts(ray, options, listed)
            nodes = measuring(list(found), platform)  # without lost nodes
            joined = cls(ray, options, nodes, one_host(found, this_host(platform, root)))
        joined._undo.callback(shut_down, ray)
        return joined

    @property
    def where(self) -> str:
        if self.slots:
            return f"on {counted(len(self.slots.devices), 'GPU' if self.host.gpus else 'part')} of this host at once"
        return f"on {counted(len(self.nodes), 'node')} of a Ray cluster"

    def send(self, session: Session, cases: Sequence[Case], rows: Sequence[PlannedItem]) -> None:
        """Start the engines of missing cases, in the order of `groups_of`.

        Raise BadUsage, with none started, if one fits nowhere.
        """
        self._session, self._planned = session, {case.key for case in cases}
        if self.slots:
            if self.slots.visible:  # parts of the CPU share a lock, which an open session holds
                session.devices.lock(self.slots.devices)
            self.ray = self._undo.enter_context(start_here(len(self.slots.devices)))
            if address := reachable_at(self.ray):
                self.warning = REACHABLE.format(address)
        missing = [case for case in cases if self._missing(case)]
        for engine in (group.engine for group in groups_of(rows)):
            if open_ := {case.key: case for case in missing if case.engine == engine}:
                self._engines.append(RunningEngine(engine, self._need(engine), open_))
        expected = [cell.seconds + start_estimate_s(cell.engine) for cell in rows if cell.engine]
        self._quiet_s = LEAST_QUIET_S + PATIENCE * max(expected, default=0.0)
        self._begin()
        self._heard_at = time.monotonic()

    def fetch(self, case: Case) -> None:
        """Take answers until all repeats of a case are known. Raise the error of its measurement, if any."""
        if case.key not in self._planned:
            why = f"{case.title} was not planned before the run, so it was not sent to Ray"
            raise BadUsage(why, "Run without --slm-ray.")
        while any(case.key in engine.open for engine in self._engines):
            self._hear()
            running = sum(engine.place is not None for engine in self._running)
            waiting = len(self._running) - running
            self.on_progress(case, f"{self._came} came | {running} engines run, {waiting} wait for a node")
        if error := self._failed.get(case.key):
            raise error

    def measure_alone(self, session: Session, model: str) -> None:
        """Measure the smallest and the largest load of a model again that were measured next to other engines.

        At the smallest load, the CPU takes most of a step.
        """
        found = [m for m in session.verdicts.curve(model).measurements if not problems(m)]
        beside = sorted({m.load.concurrency for m in found if m.neighbours and is_steady(m.load)})
        for concurrency in dict.fromkeys(beside[:1] + beside[-1:]):
            case = session.planner.point(model, concurrency)
            if all(m.neighbours for (m,) in session.results.repeats[case.key] if not problems(m)):
                while self._calls:  # engines whose last case has come may still be stopping
                    self._hear()
                self._engines.append(RunningEngine(case.engine, self._need(case.engine), {case.key: case}, again=True))
                self._begin()
                self.fetch(case)

    def close(self) -> None:
        """Take the answers that have arrived, and stop all engines. May be called twice."""
        try:
            self._engines = self._running
            while self._hear(0.0):
                pass
            for engine in [each for each in self._running if each.open]:
                self._end(engine)
            until = time.monotonic() + END_S
            while self._calls and time.monotonic() < until and not hurried():
                self._hear()
            if self._ran:
                session = self._session
                ran = ", ".join(f"{node} ({counted(n, 'engine')})" for node, n in self._ran.items())
                judged = {verdict.claim for verdict, _ in session.verdicts.judged}
                if not self.slots:
                    session.note(f"measured on {ran} of the Ray cluster at {self.options.ray}")
                elif deployments.CLAIM not in judged and any(m.neighbours for m in session.results.measurements()):
                    session.note(UNCHECKED)
                self._ran.clear()
        finally:  # afterwards there is no Ray to ask, and a call of it would start another cluster
            self._calls, self._engines = {}, []
            self._undo.close()

    def _need(self, engine: Engines) -> Need:
        if self.slots:
            return Need(len(engine.gpus) if self.host.gpus else 1, 0)
        return need_of(engine, self.nodes, self.options.ray_resource)

    def _missing(self, case: Case) -> int:
        return self._session.executor.count_missing(case, self.options.repeats)

    # Engines

    @property
    def _running(self) -> list[RunningEngine]:
        return [engine for engine in self._engines if engine.actor is not None]

    def _begin(self) -> None:
        for engine in [each for each in self._engines if each.actor is None]:
            resources: dict[str, Any] = {"num_gpus": 0, "num_cpus": 0}  # the slots place engines
            if self.slots:
                taken = {slot for other in self._engines for slot in other.at}
                at = self.slots.block(engine.need.gpus, set(range(len(self.slots.devices))) - taken)
                if at is None:
                    return
                engine.at = at
            else:
                need = engine.need
                touched = {need.resource: A_TOUCH} if need.resource else {}
                resources = {"num_gpus": need.gpus, "num_cpus": need.cpus, "resources": touched}
                resources["scheduling_strategy"] = "SPREAD"
            actor = self.ray.remote(RemoteEngine).options(max_restarts=RESTARTS, max_task_retries=-1, **resources)
            engine.actor = actor.remote(self.options, self.host.environment, self.slots, engine.at)
            engine.cases = self.ray.put(dict(engine.open))  # arguments of the actor would be lost with its node
            self._calls[engine.actor.started.remote()] = engine, ""
            for key, case in engine.open.items():
                for _ in range(1 if engine.again else self._missing(case)):
                    self._calls[engine.actor.measure.remote(key, engine.cases)] = engine, key
            for each in self._running:
                each.neighbours = max(each.neighbours, self._beside(each))

    def _end(self, engine: RunningEngine, error: BaseException | None = None) -> None:
        """End an engine. Its open cases fail with `error`, unless that is None."""
        if error:
            self._failed |= {key: error for key, case in engine.open.items() if self._missing(case) or engine.again}
        engine.open.clear()
        self._calls = {call: of for call, of in self._calls.items() if of[0] is not engine}
        if engine in self._engines:
            self._engines.remove(engine)
        if engine.actor is not None:
            self.ray.kill(engine.actor)
            engine.actor = None

    # Answers

    def _hear(self, within_s: float = TICK_S) -> bool:
        """Take the next answer, if there is one, and otherwise look for lost engines. Return whether there was one."""
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
            except Exception as error:  # of Ray, or a bug of ours there: the waiting items raise it
                self._end(engine, error)
            else:
                self._take(engine, key, answer)
        if not ready and within_s:
            self._check_alive()
        self._begin()
        return bool(ready)

    def _take(self, engine: RunningEngine, key: str | None, answer: EngineAnswer) -> None:
        session = self._session
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
            engine.neighbours = self._beside(engine)
            known = session.results.repeats.setdefault(key, [])
            known.append(group)
            try:
                known[-1] = session.executor.write(group)
            except SlmError as error:
                self._failed[key] = error
                if isinstance(error, BadUsage):  # no further answer could be written
                    for each in [*self._engines]:
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
        # Ray would wait for a node with room. All engines fail if nothing was received for too long.
        if not self.slots:
            living = nodes_of(self.ray.nodes(), self.options.ray_resource)
            for engine in self._running:
                there = engine.place is not None and engine.place[0] in {node.id for node in living}
                if not there and not any(map(engine.need.fits, living)):
                    gone = [f"{node.name} died" for node in self.nodes if node not in living]
                    lost = " and ".join(dict.fromkeys([*engine.lost, *gone]))
                    what = f"{counted(len(engine.open), 'cell')} of {engine.name}" if engine.place else engine.name
                    self._end(engine, EngineFailed(f"{lost}, and no other node has {engine.need} for {what}", RESUME))
        if time.monotonic() - self._heard_at >= self._quiet_s:
            for engine in self._running:
                where = self._name(engine) if engine.place else f"no node, {engine.need} being taken"
                why = f"{engine.name}: nothing came for {clock(self._quiet_s)} (on {where})"
                self._end(
                    engine,
                    EngineFailed(
                        why, "Run `ray status`, then pytest again with --slm-resume: finished measurements are kept."
                    ),
                )

    def _beside(self, engine: RunningEngine) -> int:
        return sum(len(other.at) for other in self._engines if other is not engine)

    def _name(self, engine: RunningEngine) -> str:
        if self.slots:
            return "this host"
        if engine.place is None:
            return "a node"
        node = engine.place[0]
        return next((known.name for known in self.nodes if known.id == node), node[:8])

    def _how_lost(self, engine: RunningEngine) -> str:
        living = {node.id for node in nodes_of(self.ray.nodes())}
        died = not self.slots and engine.place is not None and engine.place[0] not in living
        return f"{self._name(engine)} died" if died else f"its task was lost on {self._name(engine)}"
