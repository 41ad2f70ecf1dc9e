"""The way into a Ray cluster: does it answer, and what do its nodes say of themselves?"""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from pytest_slmserve.archive.codec import engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.engines.launch.child_process import FOLDER, GUARDIAN
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case, Engines
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.gpu_slots import GpuSlots
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.errors import BadUsage, Platform, SlmError, named
from pytest_slmserve.schema.records import Measurement, ReplicaGroup
from pytest_slmserve.telemetry.host import Host, probe

A_TOUCH = 0.001  # of a resource that only says where to run


@dataclass(frozen=True, slots=True)
class Node:
    """A living node. gpus, cpus: as Ray counts them. name: for people."""

    id: str
    name: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that a task takes of its node while it runs. resource: "" or one that the node must have."""

    gpus: int
    cpus: int
    resource: str = ""

    def __str__(self) -> str:
        what = counted(self.gpus, "GPU") if self.gpus else f"{self.cpus} CPUs"
        return f"{what} and {self.resource}" if self.resource else what

    def fits(self, node: Node) -> bool:
        return self.gpus <= node.gpus and self.cpus <= node.cpus


def nodes_of(rows: Iterable[Mapping[str, Any]], resource: str = "") -> list[Node]:
    """Living nodes by what `ray.nodes()` says, those with GPUs first. resource: one that they must have."""
    found = [_node(row) for row in rows if row["Alive"] and (not resource or row["Resources"].get(resource))]
    return sorted(found, key=lambda node: (-node.gpus, node.name))


def _node(row: Mapping[str, Any]) -> Node:
    has = row["Resources"]
    name = f"{row.get('NodeName') or row['NodeManagerAddress']} ({row['NodeID'][:8]})"
    return Node(row["NodeID"], name, int(has.get("GPU", 0)), int(has.get("CPU", 0)))


def measuring(nodes: Sequence[Node], platform: Platform) -> list[Node]:
    """The nodes on which cells are measured. The simulated engine takes the GPUs of a cluster that has some, to try out
    how cells spread. Raises BadUsage where there is none."""
    with_gpus, with_cpus = [n for n in nodes if n.gpus], [n for n in nodes if n.cpus]
    found = {"cuda": with_gpus, "simulated": with_gpus or with_cpus}.get(platform, with_cpus)
    if not found:
        what = "a GPU" if platform == "cuda" else "a CPU"
        raise BadUsage(
            f"no node of this cluster offers {what} (looked at {len(nodes)})", "ray status tells what it has"
        )
    return found


def need_of(engine: Engines, nodes: Sequence[Node], resource: str = "") -> Need:
    """nodes: those that measure. An engine on the CPU takes all cores that there are, so a node has one at a time.
    Raises BadUsage where none of them has room for it."""
    if engine.platform == "cpu":
        return Need(0, min(node.cpus for node in nodes), resource)
    on_gpus = any(node.gpus for node in nodes)
    need = Need(len(engine.gpus) if on_gpus else 0, min(1, *(node.cpus for node in nodes), 1), resource)
    if not any(map(need.fits, nodes)):
        most = max(node.gpus for node in nodes)
        raise BadUsage(f"an engine takes {need}, and no node of this cluster has more than {most}", f"{most} or fewer")
    return need


def one_host(found: Mapping[Node, Host], mine: Environment) -> Host:
    """The nodes as one host, with the GPUs of the widest of them. mine: of who asks.

    Raises BadUsage where they are of different kinds, or have another release of this package.
    """
    first = next(iter(found))
    for node, host in found.items():
        if host.environment.pytest_slmserve != mine.pytest_slmserve:
            there = host.environment.pytest_slmserve
            raise BadUsage(
                f"{node.name} has pytest-slmserve {there}, and {mine.pytest_slmserve} asks",
                "the same release on every node",
            )
        sides = f"on {first.name}", f"on {node.name}"
        if unlike := differences(found[first].environment.kind, host.environment.kind, sides):
            raise BadUsage(
                f"the nodes are of different kinds ({'; '.join(unlike)}): what they serve cannot be compared",
                "-o slm_ray_resource=NAME with one that only nodes of one kind have, such as accelerator_type:H200",
            )
    widest = max(found, key=lambda node: node.gpus)
    host = found[widest]
    environment = replace(host.environment, git_commit=mine.git_commit)
    return replace(host, environment=environment, gpus=host.gpus[: widest.gpus] if widest.gpus else host.gpus)


@dataclass(frozen=True, slots=True)
class EngineTask:
    """The work of one task. known: the repeats of each of its cases that the session has already. environment: of the
    other nodes. slots, at: where the task runs on the host of the session, whose process has locked the devices."""

    options: Options
    environment: Environment
    repeats: int
    known: tuple[tuple[ReplicaGroup, ...], ...]
    slots: GpuSlots | None = None
    at: tuple[int, ...] = ()


def task_of(
    options: Options, environment: Environment, repeats: int, known: Sequence[Sequence[ReplicaGroup]]
) -> EngineTask:
    """A task without an archive, which resumes nothing, and sees no GPUs but those that its engine was given."""
    there = options._replace(ray="", ray_env="", ray_resource="", records="", export="", resume=False, plan=False)
    there = there._replace(tensor_parallel_size=(1,), baseline="")
    return EngineTask(there, environment, repeats, tuple(map(tuple, known)))


def run_task(engine_task: EngineTask, cases: Mapping[str, Case]) -> Iterator[Message]:
    """Messages of a Ray task. cases: of one engine, by their keys, in the order in which they are measured."""
    import ray

    yield TaskStarted(ray.get_runtime_context().get_node_id())
    yield from carried_out(engine_task, cases)


def carried_out(engine_task: EngineTask, cases: Mapping[str, Case]) -> Iterator[Message]:
    """Messages until the engine has stopped."""
    open_keys = list(cases)
    try:
        with closing(_session(engine_task)) as session:
            session.devices.hold()
            for (key, case), known in zip(cases.items(), engine_task.known):
                case = replace(case, environment=session.planner.environment(case.engine))
                for group in known:
                    session.executor.keep(case, group)
                yield from _measured(session, key, case, engine_task.repeats)
                open_keys.remove(key)
            yield from map(UserNote, session.notes)
    except SlmError as error:
        for key in open_keys:
            yield CaseEnded(key, error)


def _measured(session: Session, key: str, case: Case, repeats: int) -> Iterator[Message]:
    """Measures one case and yields its messages. An error ends no other case: the next may have an engine that runs."""
    try:
        for group in session.executor.iter_repeats(case, repeats):
            yield CaseMeasured(key, packed_measurements(group))
    except SlmError as error:
        yield CaseEnded(key, error)
    else:
        yield CaseEnded(key)


def _session(engine_task: EngineTask) -> Session:
    """Raises BadUsage where the node is of another kind than those that were looked at before."""
    slots = engine_task.slots
    if slots:
        slots.pin(engine_task.at)
    host = look_around(engine_task.options)
    if isinstance(host, SlmError):
        raise host
    if slots:
        host = slots.host(host, engine_task.at)
    environment = replace(host.environment, git_commit=engine_task.environment.git_commit)
    if unlike := differences(engine_task.environment.kind, environment.kind, ("on the others", "on this one")):
        raise BadUsage(
            f"a node that came later is of another kind ({'; '.join(unlike)})",
            "-o slm_ray_resource=NAME, or nodes of one kind",
        )
    session = Session.from_options(engine_task.options, Path.cwd(), replace(host, environment=environment))
    session.devices.locked_for_us = slots is not None
    return session


def look_around(options: Options) -> Host | SlmError:
    """The node as engines will find it; an error as a value, since Ray would wrap it into one of its own."""
    leave_threads_alone()
    python, variables = options.engine
    assert options.platform is not None
    try:
        return probe(options.platform, python, dict(variables))
    except SlmError as error:
        return error


def leave_threads_alone() -> None:
    """Ray gives a task as many threads as it has CPUs, often one, and hides the GPUs from one that asked for none. An
    engine would inherit both."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """The first message. node: Ray's id of where it is from."""

    node: str


@dataclass(frozen=True, slots=True)
class CaseMeasured:
    """One repeat of a case. packed: as `packed` makes it, one measurement for each engine."""

    key: str
    packed: bytes


@dataclass(frozen=True, slots=True)
class CaseEnded:
    """The end of a case, no more of it comes. error: what ended it; None: all that was requested has been sent."""

    key: str
    error: SlmError | None = None


@dataclass(frozen=True, slots=True)
class UserNote:
    """A sentence for the user."""

    note: str


Message = TaskStarted | CaseMeasured | CaseEnded | UserNote


def packed_measurements(found: Sequence[Measurement]) -> bytes:
    """Measurements encoded as in the archive: small, and read by its rules."""
    lines = [
        line for m in found for line in (engine_line(m.launch, m.spec, m.resolved, m.environment), measurement_line(m))
    ]
    return gzip.compress(json.dumps(lines, allow_nan=False).encode(), mtime=0)


def unpacked(data: bytes) -> tuple[Measurement, ...]:
    lines = json.loads(gzip.decompress(data))
    return tuple(measurement_of(run, *engine_from_record(engine)) for engine, run in zip(lines[::2], lines[1::2]))


ANSWER_S = 30.0  # seen: 2 s
LOOK_S = 120.0  # a node starts an interpreter, and looks at another
INSTALL_S = 1800.0  # where it has to install packages first
# Ray waits two minutes for an address that does not answer, and then ends the process that asked.
ASK = "import logging, sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)"

# Of a Ray that only this run uses: it reports to nobody, and only who has its token may connect.
OWN = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
STORE_BYTES = 256 * 2**20
# Engines may keep all cores busy for minutes, which Ray would take for the death of the node.
PATIENT = {"health_check_timeout_ms": 600_000, "health_check_failure_threshold": 100}


def connect(options: Options) -> Any:
    """Ray, connected. Raises BadUsage where it is not installed, or the address does not answer."""
    environment = runtime_env(options.ray_env) if options.ray_env else None
    with _imported() as ray:
        check_answers(options.ray)
        try:
            with _own_signals():
                ray.init(options.ray, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # what Ray raises here is of many kinds, and the user's affair
            raise _unreachable(options.ray, str(error)) from None
    return ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Context after which SIGTERM does what it did before: Ray would have it end the process with nothing told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def start_here(tasks: int) -> Iterator[Any]:
    """Ray on this host alone, for so many tasks at a time, until the context ends; its files go with it. Raises
    BadUsage where it is not installed, or does not start."""
    before = {name: os.environ.get(name) for name in OWN}
    os.environ |= OWN  # read when Ray is imported
    try:
        with (
            TemporaryDirectory(prefix="slm-", ignore_cleanup_errors=True) as folder,
            _guarded(folder),
            _imported() as ray,
        ):
            with _own_signals():
                ray.init(
                    "local",
                    num_cpus=tasks,
                    num_gpus=0,  # the tasks are told which they have
                    include_dashboard=False,
                    object_store_memory=STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                    _system_config=PATIENT,
                    _temp_dir=folder,
                )
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


@contextmanager
def _guarded(folder: str) -> Iterator[None]:
    """Context in which Ray's processes and its folder do not outlive this process, however it ends. Ray's agents are
    children of a child of ours, and end a minute after it."""
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid())],
        env={**os.environ, FOLDER: folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us, and the group of pytest is not to be killed
    )
    try:
        yield
    finally:
        guardian.terminate()
        guardian.wait()


@contextmanager
def _imported() -> Iterator[Any]:
    """Ray, with its warnings silent. Raises BadUsage where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, which a run with -W error must survive
        try:
            import ray
        except ImportError:
            raise BadUsage(
                "--slm-ray needs Ray, which is not installed", "pip install 'pytest-slmserve[ray]'"
            ) from None
        yield ray


def runtime_env(path: str) -> dict[str, Any]:
    """Raises BadUsage where the file holds no JSON object."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadUsage(f"slm_ray_env: cannot read {path}: {error.strerror}", "another path") from None
    except ValueError as error:
        raise BadUsage(f"slm_ray_env: {path} is not JSON ({error})", '{"pip": ["vllm==0.26.0"]}') from None
    if not isinstance(found, dict):
        raise BadUsage(f"slm_ray_env: {path} holds no JSON object", '{"pip": ["vllm==0.26.0"]}')
    return found


def check_answers(address: str) -> None:
    """Raises BadUsage where nobody lets a process in. A process of its own asks, which can be ended."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK, address],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired:
        raise _unreachable(address, f"no answer within {ANSWER_S:.0f} s") from None
    if asked.returncode:
        raise _unreachable(address, asked.stderr)


def _unreachable(address: str, told: str) -> BadUsage:
    lines = [line for line in told.strip().splitlines() if line.strip()] or ["it did not say why"]
    why = lines[-1].strip()
    return BadUsage(
        f"--slm-ray {address}: no Ray cluster answers there ({why})",
        "ray status on a node of the cluster, and pytest on one of its nodes",
    )


def node_hosts(ray: Any, options: Options, nodes: Sequence[Node]) -> dict[Node, Host]:
    """The host that each node reports, without the nodes that Ray still lists although they are gone. Raises BadUsage
    where a node cannot measure, or does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(max_calls=1, num_cpus=0, max_retries=0)(look_around)
    there = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    asked = [task.options(scheduling_strategy=at).remote(options) for at in there]
    ray.wait(asked, num_returns=len(asked), timeout=INSTALL_S if options.ray_env else LOOK_S)
    said = {node: _said(ray, node, answer) for node, answer in zip(nodes, asked)}
    return {node: host for node, host in said.items() if host is not None}


def _said(ray: Any, node: Node, answer: Any) -> Host | None:
    gone = (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError, ray.exceptions.LocalRayletDiedError)
    try:
        host: Host | SlmError = ray.get(answer, timeout=0)
    except gone:
        return None
    except ray.exceptions.GetTimeoutError:
        raise BadUsage(f"{node.name} does not answer", "ray status, or a run without slm_ray_resource") from None
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise BadUsage(
            f"{node.name} cannot make the environment of slm_ray_env ({_last(error)})",
            "packages that the index of the nodes has",
        ) from None
    except Exception as error:
        raise BadUsage(
            f"{node.name} cannot run what it is sent ({_last(error)})",
            "pytest-slmserve installed there, or named in slm_ray_env, and the same Python",
        ) from None
    if isinstance(host, SlmError):
        raise named(node.name, host)
    return host


def _last(error: Exception) -> str:
    """The end of what Ray tells, which is the reason."""
    return str(error).strip().splitlines()[-1].strip()
