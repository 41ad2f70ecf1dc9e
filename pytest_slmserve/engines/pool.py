"""The engine, or the set of replicas, that runs on the devices of a session.

Replicas that share a GPU under NVIDIA's Multi-Process Service (MPS) have a control daemon of ours. Sources: NVIDIA,
"Multi-Process Service", and the manual page of nvidia-cuda-mps-control. The code relies on these facts:

- A client that cannot reach its daemon silently runs without MPS, so `MpsDaemon.verify` asks the daemon.
- The daemon's CUDA_VISIBLE_DEVICES renumbers the devices for its clients. A UUID means the same to both.
- The daemon's server is for the user of its first client, and clients of other users wait until it ends. The daemon's
  folder is therefore closed to them.
- When the daemon quits, it waits for its clients and then takes the GPU from them. Their owner ends them first.
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from pytest_slmserve.engines.base import Engine, ProgressCallback, StartCallback, WindowBarrier, message_of
from pytest_slmserve.engines.child import GUARDIAN, Child, last_lines, undone_on_error
from pytest_slmserve.engines.endpoint import TIMEOUT_S, EndpointEngine
from pytest_slmserve.engines.server import BatchedEngine, OfflineEngine, ServerEngine
from pytest_slmserve.engines.simulated import SimulatedBatches, SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, Sharing, naming
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.secrecy import passed_on
from pytest_slmserve.schema.specs import ClosedLoop, Engines, EngineSpec, ReplicaSpec, Workload
from pytest_slmserve.telemetry.host import memory_used, own_cores

PROCESSES = {"cuda", "cpu"}  # platforms whose engines are processes of this host
STABLE_S, STABLE_WITHIN_S = 0.5, 30.0  # of the device's memory, between two starts
IMAGINED_GAIN: dict[Sharing, float] = {"mps": 1.2}  # of the simulated device; other ways of sharing have no gain

PROGRAM = "nvidia-cuda-mps-control"
DRIVER_FOLDER = "/usr/local/nvidia/bin"  # of the driver's programs in containers, not always on the PATH
# Starts the guardian of our process ($4), which must not be a child of the daemon, and then the daemon in the place of
# the shell, in one process group. The daemon does not need the descriptor ($3).
LAUNCH = '("$1" -I -S "$2" "$4" &); exec "$0" -f'
COMM = PROGRAM[:15]  # the kernel's name of the daemon and of its servers
LONGEST = len("/slm-mps-12345678/pipe/control_privileged")
SOCKET_BYTES = 108  # of sun_path with its closing zero; with a longer path the daemon ends without a reason

START_S = 20.0
ASK_S = 10.0
END_S = 10.0
POLL_S = 0.1
PROHIBITED = 2  # NVML's compute modes


def launch_engine(
    spec: EngineSpec,
    *,
    extra_env: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
    timeout_s: float = TIMEOUT_S,
    speed: float = 1.0,
    gpus: int = 0,
) -> Engine:
    """Launch and return the engine of a specification. It does not use its device before `start`.

    Args:
        cores: CPU cores that it may use; empty: all.
        timeout_s: time limit of a request to an endpoint.
        speed: share of the device's speed, for a simulated engine.
        gpus: number of GPUs that a simulated engine reports; 0: its own.
    """
    batches = spec.interface == "transformers"
    match spec.platform:
        case "simulated":
            kind = SimulatedBatches if batches else SimulatedEngine
            return kind(spec, speed=speed, extra_env=extra_env, gpus=gpus)
        case "remote":
            return EndpointEngine(spec, timeout_s=timeout_s)
        case "cuda" | "cpu":
            served = ServerEngine if spec.interface == "server" else OfflineEngine
            return (BatchedEngine if batches else served)(spec, extra_env=extra_env, cores=cores)


class ReplicaEngines:
    """Replicas that are launched at once, because imports take half of a start, and then start one after the other."""

    def __init__(self, spec: ReplicaSpec, launch: Callable[..., Engine], device: str = "none") -> None:
        """Launch all replicas. Raise EngineFailed, naming the replica, if one cannot be launched.

        Args:
            launch: function like `launch_engine`.
            device: UUID of the device that they share, or "cpu" or "none".
        """
        self.spec, self.device = spec, device
        self.engines: list[Engine] = []
        self._daemon: MpsDaemon | None = None
        self._undo = ExitStack()
        count, simulated = len(spec), spec.platform == "simulated"
        extra_envs: Sequence[Mapping[str, str]] = [{}] * count
        ours = own_cores()
        cores = equal_parts([ours] * count, ours) if spec.pinned else [()] * count
        on_gpus = spec.sharing == "gpus"
        part = {"gpus": count} if on_gpus else {"speed": IMAGINED_GAIN.get(spec.sharing, 1.0) / count}
        with undone_on_error(self.close):
            if spec.sharing == "mps" and not simulated:
                self._daemon = MpsDaemon(device, spec.thread_percentage)
                self._undo.callback(self._daemon.close)
                extra_envs = [self._daemon.environment] * count
            elif spec.sharing == "mig" and not simulated:
                extra_envs = [{"CUDA_VISIBLE_DEVICES": instance} for instance in mig_instances(device)]
            for index, engine in enumerate(spec.engines):
                with naming(self.name(index), EngineFailed):
                    self.engines.append(launch(engine, extra_env=extra_envs[index], cores=cores[index], **part))
                self._undo.callback(self.engines[-1].close)

    def start(self, on_wait: StartCallback | None = None) -> Self:
        """Start all replicas and return this object.

        Each waits until the device's memory is stable, because vLLM mistakes memory that others take or free for its
        own. If each has its own GPU, the first one compiles before the others start in parallel.

        Raises:
            EngineFailed: if a replica does not start, is not a client of the MPS daemon, or has fewer KV blocks than
                its equals. All are stopped.
        """
        with undone_on_error(self.close):
            if self.spec.sharing == "gpus":
                self._start(0, on_wait)
                with ThreadPoolExecutor(len(self.spec)) as pool:
                    list(pool.map(self._start, range(1, len(self.spec))))
            else:
                for index in range(len(self.spec)):
                    used: int | None = None
                    one_memory = self.spec.platform == "cuda" and self.spec.sharing != "mig"
                    # Until two readings agree, or too late; the engine's own check decides then.
                    for _ in range(round(STABLE_WITHIN_S / STABLE_S) if index and one_memory else 0):
                        before, used = used, memory_used(self.device)
                        if before == used:
                            break
                        time.sleep(STABLE_S)
                    self._start(index, on_wait)
            specs = [replace(engine, gpu=0) for engine in self.spec.engines]
            for spec in dict.fromkeys(specs):
                blocks = [e.resolved.kv_blocks for e, s in zip(self.engines, specs) if s == spec]
                if len(set(blocks)) > 1:
                    problem = f"replicas of {short_name(spec.model)} got different numbers of KV blocks: {blocks}"
                    raise EngineFailed(problem, "Fix kv_cache_bytes, and let no other program use the device.")
        return self

    def _start(self, index: int, on_wait: StartCallback | None = None) -> None:
        with naming(self.name(index), EngineFailed):
            self.engines[index].start(on_wait)
        self.check(index)

    def check(self, index: int) -> None:
        """Raise EngineFailed, naming the replica, if there is an MPS daemon and the replica is not its client."""
        if self._daemon:
            with naming(self.name(index), EngineFailed):
                self._daemon.verify(self.name(index), self.engines[index].processes())

    @property
    def ready(self) -> bool:
        """True if all replicas wait for their next loads."""
        return bool(self.engines) and all(engine.ready for engine in self.engines)

    def name(self, index: int) -> str:
        """Return the name of a replica in errors, for example "replica 1 of 2 (opt-125m)"."""
        return f"replica {index + 1} of {len(self.spec)} ({short_name(self.spec.engines[index].model)})"

    def run(
        self, workloads: Sequence[Workload], loads: Sequence[ClosedLoop], on_progress: ProgressCallback = None
    ) -> tuple[Run, ...]:
        """Run a load on each replica in one common window (`WindowBarrier`), and return the runs.

        Args:
            on_progress: called with the progress of the first replica.

        Raises:
            BadUsage: if a load has no window.
            EngineFailed: if a replica died. All replicas are stopped.
        """
        engines = self.engines
        if any(load.requests is not None for load in loads):
            raise BadUsage(
                "a load of a fixed number of requests has no window to measure",
                "Use a ClosedLoop without a number of requests.",
            )
        for index, (engine, workload) in enumerate(zip(engines, workloads, strict=True)):
            with naming(self.name(index), EngineFailed):
                engine.load_requests(workload)
        barrier = WindowBarrier([message_of(load) for load in loads])

        def run_one(index: int) -> Run:
            with naming(self.name(index), EngineFailed):
                return engines[index].run(workloads[index], loads[index], None if index else on_progress, barrier)

        with undone_on_error(self.close):
            runs = barrier.run_together(run_one, len(engines), self.close)
            for index in range(len(engines)):
                self.check(index)
        return tuple(runs)

    def close(self) -> None:
        """Stop all replicas, and then the MPS daemon. It may be called twice."""
        self._undo.close()


def equal_parts(near: Sequence[frozenset[int]], ours: frozenset[int]) -> list[tuple[int, ...]]:
    """Return disjoint parts of our CPU cores, one per engine and equally large, so that measurements are comparable.

    Args:
        near: cores near the device of each engine, which are used if there are enough.
        ours: all our cores. If there are fewer than engines, all parts are empty, which means all cores.
    """
    sharers = [sum(not here.isdisjoint(there) for there in near) for here in near]
    each = min((len(cores) // max(1, sharing) for cores, sharing in zip(near, sharers)), default=0)
    if each == 0:
        near, each = [ours] * len(near), len(ours) // max(1, len(near))
    taken, parts = set[int](), []
    for cores in near:
        part = tuple(sorted(cores - taken)[:each])
        taken |= set(part)
        parts.append(part)
    return parts


def cannot_share(spec: ReplicaSpec, device: str) -> str | None:
    """Return in one sentence why these replicas cannot share the device in this way, or None if they can."""
    if spec.platform == "cpu" and len(own_cores()) < len(spec):
        return f"{len(spec)} engines of vLLM's CPU backend need a core each"
    if spec.platform == "simulated" or spec.sharing in ("time-slicing", "gpus", "urls"):
        return None
    if spec.sharing == "mps":
        return mps_unable(device)
    there = len(mig_instances(device))
    return f"{there} MIG instances are there for {len(spec)} replicas; none is made here" if there < len(spec) else None


def mig_instances(device: str) -> list[str]:
    """Return the UUIDs of a GPU's MIG instances, or an empty list if MIG is off or NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(device)
        if not pynvml.nvmlDeviceGetMigMode(gpu)[0]:
            return []
        found = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with suppress(pynvml.NVMLError_NotFound):  # there may be gaps between instances
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
                found.append(str(pynvml.nvmlDeviceGetUUID(instance)))
        return found
    except pynvml.NVMLError:
        return []


def mps_unable(gpu: str) -> str | None:
    """Return in one sentence why MPS cannot run on the GPU with this UUID, or None if it can."""
    if platform.system() != "Linux":
        return f"MPS runs on Linux, and this is {platform.system()}"
    if mps_program() is None:
        return f"{PROGRAM}, which comes with NVIDIA's driver, is not on the PATH"
    if gpu.startswith("MIG-"):
        return f"{gpu} is a part of a GPU, and MPS is to share a whole one"
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        mode = pynvml.nvmlDeviceGetComputeMode(handle)
        with suppress(pynvml.NVMLError_NotSupported):
            if pynvml.nvmlDeviceGetMigMode(handle)[0]:
                return f"GPU {gpu} is in MIG mode, where MPS would share an instance and not the GPU"
    except pynvml.NVMLError as error:
        return f"no GPU {gpu} here: NVML says {error}"
    return f"GPU {gpu} is in compute mode prohibited: nothing may run on it" if mode == PROHIBITED else None


def mps_program() -> str | None:
    """Return the path of MPS's control program, or None."""
    return shutil.which(PROGRAM, path=os.pathsep.join([os.environ.get("PATH", os.defpath), DRIVER_FOLDER]))


class MpsDaemon(Child):
    """A control daemon of MPS, which the constructor starts.

    It runs in the foreground: with `-d` it would not be our child, and its process id would come from a file.

    Attributes:
        environment: variables that a client needs. Clients run as our user.
    """

    log_name = "log/daemon.log"

    def __init__(self, gpu: str, thread_percentage: int | None = None) -> None:
        """Start the daemon of the GPU with this UUID.

        Args:
            thread_percentage: percentage of the SMs for each client; None: no limit.

        Raises:
            BadUsage: if there is no control program.
            EngineFailed: if the daemon does not come up.
        """
        if not (found := mps_program()):
            raise BadUsage(
                f"{PROGRAM} is not on the PATH", "Install the programs of NVIDIA's driver, or use time slicing."
            )
        self._program = found
        temporary = tempfile.gettempdir()
        short = temporary if len(os.fsencode(temporary)) + LONGEST < SOCKET_BYTES else "/tmp"
        folder = Path(tempfile.mkdtemp(prefix="slm-mps-", dir=short))
        self.pipe, self.logs = folder / "pipe", folder / "log"
        self.pipe.mkdir()
        self.logs.mkdir()
        shared = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        share = {} if thread_percentage is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(thread_percentage)}
        self.environment = shared | share
        # An inherited limit would apply to all clients. The daemon may look for its server on the PATH.
        own = {name: value for name, value in passed_on(os.environ).items() if not name.startswith("CUDA_MPS_")}
        path = os.pathsep.join([str(Path(found).parent), os.environ.get("PATH", os.defpath)])
        self._own_environment = own | shared | {"PATH": path}
        command = ["sh", "-c", LAUNCH, found, sys.executable, str(GUARDIAN)]
        super().__init__(command, self._own_environment, folder)

        def answers() -> bool:
            with suppress(EngineFailed):
                self._ask("get_server_list")
                return True
            return False

        with undone_on_error(self.close):
            self.wait_until(answers, START_S, f"does not answer {START_S:g} s after its start")
            self.check()

    def _ask(self, command: str) -> list[int]:
        """Send a command, and return the process ids in the daemon's answer."""
        try:
            done = subprocess.run(
                [self._program],
                input=f"{command}\n",
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=ASK_S,
                env=self._own_environment,
            )
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not answer to {command} within {ASK_S:g} s") from None
        if done.returncode:
            raise self.failed(f"was not reached ({command}: {(done.stdout + done.stderr).strip()})")
        return [int(word) for word in done.stdout.split() if word.isdigit()]

    def clients(self) -> set[int]:
        """Return the process ids of the clients of all servers."""
        return {client for server in self._ask("get_server_list") for client in self._ask(f"get_client_list {server}")}

    def verify(self, name: str, pids: Collection[int]) -> None:
        """Raise EngineFailed, naming the replica, unless one of its processes is a client."""
        self.check()
        clients = self.clients()
        if clients.isdisjoint(pids):
            ours, theirs = (", ".join(map(str, sorted(each))) or "none" for each in (pids, clients))
            raise self.failed(
                f"does not serve {name}, which silently runs without MPS: of its processes ({ours}) none is"
                f" among the clients ({theirs})",
                "start it as the same user, in the same container, with the daemon's CUDA_MPS_PIPE_DIRECTORY; or share"
                " the GPU by time slicing",
            )

    def check(self) -> None:
        """Raise EngineFailed if the daemon has ended."""
        if (code := self.process.poll()) is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise self.failed(f"ended ({'it was closed' if self.killed else how})")

    def failed(self, problem: str, hint: str = "") -> EngineFailed:
        """Return an error with the last lines of the logs of the daemon and its servers. The logs are not kept."""
        tails = []
        for log in sorted(self.logs.glob("*.log")):
            tails += [f"  {log.name}", *lines] if (lines := last_lines(log)) else []
        shown = "\n".join(tails) or "  | (nothing)"
        return EngineFailed(f"the MPS control daemon {problem}; logs in {self.logs}\n{shown}", hint)

    def close(self) -> None:
        """Stop the daemon and its servers within a few END_S, and remove its folder. Its clients must have ended."""
        if self.killed:
            return
        try:
            with suppress(EngineFailed, subprocess.TimeoutExpired):
                if self.process.poll() is None:
                    self._ask("quit")
                    self.process.wait(END_S)
            for number in (signal.SIGTERM, signal.SIGKILL):
                for pid in self._left():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                until = time.monotonic() + END_S
                while self._left() and time.monotonic() < until:
                    time.sleep(POLL_S)
        finally:
            self.kill()

    def _left(self) -> list[int]:
        # The daemon and its servers, by name and environment, because a server may have left the process group.
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                named = (folder / "comm").read_bytes().strip() == COMM.encode()
                if named and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


Launched = TypeVar("Launched", Engine, ReplicaEngines)


class Pool:
    """The engine, or the replicas, that run. A request for another specification stops them first.

    Attributes:
        starts: specification of each start, in order.
        first_start: specification and seconds of the first successful start.
        on_wait: called during a start, with the specification and the engine's log.
        on_started: called after a start, with the specification and the seconds.
    """

    def __init__(
        self, launch: Callable[..., Engine] = launch_engine, device: str = "none", timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create a pool in which nothing runs.

        Args:
            launch: function like `launch_engine`.
            device: UUID of the device that replicas share.
            timeout_s: time limit of a request to an endpoint.
        """
        self.launch, self.device = partial(launch, timeout_s=timeout_s), device
        self.starts: list[Engines] = []
        self.first_start: tuple[Engines, float] | None = None
        self.on_wait: Callable[[Engines, Path], None] | None = None
        self.on_started: Callable[[Engines, float], None] | None = None
        self._running: Engine | ReplicaEngines | None = None
        self._failed: tuple[Engines, EngineFailed] | None = None

    @property
    def current(self) -> Engines | None:
        return self._running.spec if self._running else None

    def engine(self, spec: Engines) -> Engine | ReplicaEngines:
        """Return the engine, or the replicas, of a specification, and start them unless they run and are ready.

        Raises:
            BadUsage: if the replicas cannot share the device (see `cannot_share`).
            EngineFailed: if an engine does not start.
        """
        if self._running and self._running.spec == spec and self._running.ready:
            return self._running
        if isinstance(spec, EngineSpec):
            return self.start(spec, partial(self.launch, spec))
        if why := cannot_share(spec, self.device):
            raise BadUsage(why, "Choose another way of sharing, for example --slm-sharing=time-slicing.")
        return self.start(spec, partial(ReplicaEngines, spec, self.launch, self.device))

    def start(self, spec: Engines, launch: Callable[[], Launched], beside: bool = False) -> Launched:
        """Stop the engine that runs, and start and return the engine that `launch` returns.

        Args:
            beside: stop no engine; the caller stops the new one.

        Raises:
            EngineFailed: if it does not start, or at once if the last failed start had the same specification.
        """
        if self._failed and self._failed[0] == spec:
            raise EngineFailed(f"not tried again: {self._failed[1].cause}", self._failed[1].hint)
        if not beside:
            self.close()
        self.starts.append(spec)
        began = time.monotonic()
        try:
            running = launch().start(partial(self.on_wait, spec) if self.on_wait else None)
        except EngineFailed as error:
            self._failed = spec, error
            raise
        self._running, seconds = self._running if beside else running, time.monotonic() - began
        self.first_start = self.first_start or (spec, seconds)
        if self.on_started:
            self.on_started(spec, seconds)
        return running

    def close(self) -> None:
        running, self._running = self._running, None
        if running:
            running.close()


@contextmanager
def abreast(
    pool: Pool, launches: Sequence[tuple[EngineSpec, Mapping[str, str]]], beside: bool = False
) -> Iterator[list[Callable[[], Engine]]]:
    """Launch engines at once, and yield functions that start them one after the other.

    All engines finish their imports, half of a start, before the first one starts, so that conditions are equal and no
    import disturbs a measurement. A start ends the engine before it, and the end of the context ends all. An engine
    without a process on this host is launched by its start.

    Args:
        launches: specification and environment variables of each launch.
        beside: whether a start ends no engine, because several use the device at once.
    """

    def take(spec: EngineSpec, extra_env: Mapping[str, str], launched: Engine | None) -> Engine:
        engine = pool.start(spec, lambda: launched or pool.launch(spec, extra_env=extra_env), beside)
        if beside:
            undo.callback(engine.close)
        return engine

    with ExitStack() as undo:
        undo.callback(pool.close)
        pool.close()
        engines: list[Engine | None] = []
        for spec, extra_env in launches:
            engines.append(pool.launch(spec, extra_env=extra_env) if spec.platform in PROCESSES else None)
            if engine := engines[-1]:
                undo.callback(engine.close)
        for engine in filter(None, engines):
            engine.await_turn(partial(pool.on_wait, engine.spec) if pool.on_wait else None)
        yield [partial(take, *launch, engine) for launch, engine in zip(launches, engines)]
