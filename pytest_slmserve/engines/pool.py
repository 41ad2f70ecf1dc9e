"""What has the devices of a session: one engine at a time, or several at once on one device, with one start for each
specification.

Replicas start one after the other, and are loaded and measured at the same time. Those that share a GPU under NVIDIA's
Multi-Process Service (MPS) have a control daemon of ours, so that their kernels overlap. Sources: NVIDIA,
"Multi-Process Service", and the manual page of nvidia-cuda-mps-control. What its code rests on:

- A client that cannot reach its daemon runs without MPS and does not say so. `MpsDaemon.verify` asks the daemon.
- CUDA_VISIBLE_DEVICES of the daemon renumbers the devices for its clients, who would read an index of their own anew.
  Daemon and clients are given the same UUID, which means the same to both, with MPS and without.
- The daemon starts a server when its first client comes, and for that client's user: until then there is none, and
  clients of another user would wait until the server of the first has gone. Its folder is closed to others.
- Clients are ended before the daemon, by their owner: it waits for those that are left, then takes the GPU from them.
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
DRIVER_FOLDER = "/usr/local/nvidia/bin"  # where containers get the driver's programs, not always on their PATH
# In one process group: the guardian of our process ($4), no child of the daemon's, and the daemon, in the place of the
# shell, which needs no descriptor ($3).
LAUNCH = '("$1" -I -S "$2" "$4" &); exec "$0" -f'
COMM = PROGRAM[:15]  # what the kernel keeps of the names of the daemon and of its servers
LONGEST = len("/slm-mps-12345678/pipe/control_privileged")
SOCKET_BYTES = 108  # sun_path, its closing zero included; a daemon with a longer one ends without saying why

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
    """Launch the engine of a specification. It does not touch its device before its `start`.

    extra_env: Environment variables of this launch only. cores: CPU cores that it may use; none: all. timeout_s: The
    longest that a request to an endpoint may last. speed, gpus: Of a simulated engine, its share of the device's speed,
    and the number of GPUs that it reports.
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
    """Replicas that are launched at once, because half of a start is imports, and then take their parts of the device
    one after the other."""

    def __init__(self, spec: ReplicaSpec, launch: Callable[..., Engine], device: str = "none") -> None:
        """Launch all replicas by `launch`, which is like `launch_engine`. Raises EngineFailed, naming the replica, if
        one cannot be launched. device: UUID of the device that they share, or "cpu" or "none"."""
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
        """Start the replicas one after the other, each as soon as the device's memory is stable, because vLLM takes
        memory that other processes free or take meanwhile for its own. With a GPU each the first replica compiles, and
        the others, which find the compiled code, start side by side. Raises EngineFailed, naming the replica, if one
        does not start or is not a client of the MPS daemon; then all are stopped."""
        with undone_on_error(self.close):
            if self.spec.sharing == "gpus":
                self._start(0, on_wait)
                with ThreadPoolExecutor(len(self.spec)) as pool:
                    list(pool.map(self._start, range(1, len(self.spec))))
            else:
                for index in range(len(self.spec)):
                    used: int | None = None
                    one_memory = self.spec.platform == "cuda" and self.spec.sharing != "mig"
                    # Until two readings agree; then, or too late, the engine's own check decides.
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
        """Raise EngineFailed, naming the replica, unless it is a client of the MPS daemon, if there is one."""
        if self._daemon:
            with naming(self.name(index), EngineFailed):
                self._daemon.verify(self.name(index), self.engines[index].processes())

    @property
    def ready(self) -> bool:
        """Whether all replicas wait for their next loads."""
        return bool(self.engines) and all(engine.ready for engine in self.engines)

    def name(self, index: int) -> str:
        """Return the name of a replica in errors, for example "replica 1 of 2 (opt-125m)"."""
        return f"replica {index + 1} of {len(self.spec)} ({short_name(self.spec.engines[index].model)})"

    def run(
        self, workloads: Sequence[Workload], loads: Sequence[ClosedLoop], on_progress: ProgressCallback = None
    ) -> tuple[Run, ...]:
        """Put a load on each replica and return their runs. All begin at once and have one window, which opens when the
        last replica has settled (`WindowBarrier`). `on_progress` is called with the progress of the first replica.
        Raises BadUsage for a load without a window, and EngineFailed, naming the replica, if one died; then all are
        stopped."""
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
        """Stop all replicas, and last the MPS daemon. May be called twice."""
        self._undo.close()


def equal_parts(near: Sequence[frozenset[int]], ours: frozenset[int]) -> list[tuple[int, ...]]:
    """Return parts of our CPU cores, one for each engine: equally many, adjacent, no core in two of them, and near its
    device (`near`: those that are) if there are enough. Measurements on different numbers of cores are not compared.
    Parts are empty, which means all cores, if there are fewer cores than engines."""
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
    """Return the reason that these replicas cannot share the device in this way, in one sentence; None if they can."""
    if spec.platform == "cpu" and len(own_cores()) < len(spec):
        return f"{len(spec)} engines of vLLM's CPU backend need a core each"
    if spec.platform == "simulated" or spec.sharing in ("time-slicing", "gpus", "urls"):
        return None
    if spec.sharing == "mps":
        return mps_unable(device)
    there = len(mig_instances(device))
    return f"{there} MIG instances are there for {len(spec)} replicas; none is made here" if there < len(spec) else None


def mig_instances(device: str) -> list[str]:
    """UUIDs of the MIG instances of a GPU, as NVML lists them; none if MIG is off, or there is no NVML."""
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
    """Return the reason that MPS cannot run on the GPU of this UUID, in one sentence; None if nothing prevents it."""
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
    """Return the path of the control program; None if there is none."""
    return shutil.which(PROGRAM, path=os.pathsep.join([os.environ.get("PATH", os.defpath), DRIVER_FOLDER]))


class MpsDaemon(Child):
    """A control daemon of MPS, which is started when this object is made. It runs in the foreground: with `-d` it would
    not be our child, and we would have to believe a file that names its process id.

    environment: The variables that a client's environment needs. Clients run as our user.
    """

    log_name = "log/daemon.log"

    def __init__(self, gpu: str, thread_percentage: int | None = None) -> None:
        """Start the daemon of the GPU of that UUID. Raises BadUsage if there is no control program, and EngineFailed if
        the daemon does not come up. thread_percentage: Percentage of the SMs that each client may use."""
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
        # A limit that we inherit would bind all clients of the daemon. It may look for its server on the PATH.
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
        """Return the process ids in the daemon's answer; other words are remarks."""
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
        """Process ids of the clients of all servers; none before the first client came. Raises EngineFailed."""
        return {client for server in self._ask("get_server_list") for client in self._ask(f"get_client_list {server}")}

    def verify(self, name: str, pids: Collection[int]) -> None:
        """Raise EngineFailed, naming the replica, unless one of `pids` (all its processes) is a client."""
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
        """Return an error with the last lines of each log: the daemon's, its servers', and what the daemon printed. No
        log is kept."""
        tails = []
        for log in sorted(self.logs.glob("*.log")):
            tails += [f"  {log.name}", *lines] if (lines := last_lines(log)) else []
        shown = "\n".join(tails) or "  | (nothing)"
        return EngineFailed(f"the MPS control daemon {problem}; logs in {self.logs}\n{shown}", hint)

    def close(self) -> None:
        """Ask the daemon to quit, then end what is left, and remove its folder. Its clients have been ended before. May
        be called twice. Takes a few END_S at most, whatever hangs."""
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
        """Process ids of the daemon and its servers, by their name and by our folder in their environment, because a
        server may have left the process group."""
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
    """The engine or the replicas that run. A request for another specification stops them first.

    launch: Launches an engine, as `launch_engine` does. starts: The specification of each start, in order. first_start:
    That of the first one that succeeded, and the seconds that it took. on_wait: Called while an engine starts, with its
    specification and its log. on_started: Called when an engine is ready, with its specification and the seconds that
    its start took.
    """

    def __init__(
        self, launch: Callable[..., Engine] = launch_engine, device: str = "none", timeout_s: float = TIMEOUT_S
    ) -> None:
        """device: UUID of the device that replicas share. timeout_s: The longest that a request to an endpoint may
        last."""
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
        """Return the engine, or the replicas, of `spec`: what runs if it is ready, or what is started. Raises BadUsage
        if replicas cannot share the device in this way (`cannot_share` says it beforehand), and EngineFailed if an
        engine does not start; what did not start is not tried again."""
        if self._running and self._running.spec == spec and self._running.ready:
            return self._running
        if isinstance(spec, EngineSpec):
            return self.start(spec, partial(self.launch, spec))
        if why := cannot_share(spec, self.device):
            raise BadUsage(why, "Choose another way of sharing, for example --slm-sharing=time-slicing.")
        return self.start(spec, partial(ReplicaEngines, spec, self.launch, self.device))

    def start(self, spec: Engines, launch: Callable[[], Launched], beside: bool = False) -> Launched:
        """Stop what runs, and start what `launch` returns in its place; beside: or beside it, as an engine that its
        caller stops. Raises EngineFailed; at once, and nothing is stopped, if this specification was the last one that
        did not start."""
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
        """Stop what runs."""
        running, self._running = self._running, None
        if running:
            running.close()


@contextmanager
def abreast(
    pool: Pool, launches: Sequence[tuple[EngineSpec, Mapping[str, str]]], beside: bool = False
) -> Iterator[list[Callable[[], Engine]]]:
    """Start functions of engines that are launched at once and then have a device one after the other.

    All have imported what they need, which is half of a start, before the first of them starts: all under the same
    conditions, and while nothing is measured. A start ends the engine before it, and in the end all engines end. An
    engine without a process here is launched when it starts.

    launches: The specification and the environment variables of each launch. beside: A start ends no engine, because
    several live on the device at once.
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
