"""The host beside a measurement: CPU time, memory, and what kept tasks waiting. All a host without a GPU can tell.

Sources of facts: proc_stat(5), proc_pid_stat(5) and cgroups(7); accounting/psi.rst and admin-guide/cgroup-v2.rst of the
kernel's documentation.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU, SPEED_PROBE
from pytest_slmserve.telemetry.base import NO_GPU, Reading
from pytest_slmserve.telemetry.host_probe import own_cores

LIST_S = 2.0  # between two looks at who our descendants are
LIST_SHARE = 0.005  # of a core, for these looks: on a host with thousands of processes they are rarer,
LATEST_S = 10.0  # but never so rare that a new engine, which takes longer to start, is not seen at its first reading
BUSY = (0, 1, 2, 5, 6)  # of the line "cpu": user, nice, system, irq, softirq; guests' time is in user already
STEAL = 7

K = TypeVar("K")
Counter = Callable[[], dict[int, float]]  # seconds since some moment, by number; OSError or ValueError: not there


@dataclass(frozen=True, slots=True)
class Used:
    """CPU time of a process, and of its descendants that ended and were waited for, in seconds."""

    own_s: float
    reaped_s: float


def newly_used(before: Mapping[K, Used], now: Mapping[K, Used]) -> float:
    """CPU time that a family of processes used between two looks at it, in seconds, never negative.

    A process that ended is found again in `reaped_s` of its parent, with all it ever used, so what was known of it is
    taken off: nothing is lost and nothing counts twice. Where no member waited for it (its parent ignores SIGCHLD,
    or ended first) only what it used since the last look is lost. One seen for the first time counts whole.
    """
    nothing = Used(0.0, 0.0)
    own = sum(used.own_s - before.get(key, nothing).own_s for key, used in now.items())
    reaped = sum(used.reaped_s - before.get(key, nothing).reaped_s for key, used in now.items())
    counted = sum(used.own_s + used.reaped_s for key, used in before.items() if key not in now)
    return max(own, 0.0) + max(reaped - counted, 0.0)


class Family:
    """A process and its descendants; who they are is looked up every LIST_S, or somewhat later.

    A process that is found late brings what it used before in one reading. So that one may be above the number of
    cores, while the mean over a window is right to what was used by those that were listed in it.
    """

    def __init__(self, pid: int) -> None:
        self._head = psutil.Process(pid)
        self._members: list[Any] = [self._head]
        self._due_s = float("-inf")
        self._before: dict[Any, Used] = {}
        self._used_s = 0.0

    def members(self, now_s: float) -> list[Any]:
        if now_s >= self._due_s:
            self._list(now_s)
        return self._members

    def _list(self, now_s: float) -> None:
        began = time.thread_time()  # not the clock's: on a busy host a look waits, and costs no more for it
        kept = {process: process for process in self._members}
        with suppress(psutil.Error):  # looked up anew: after a step of the clock an old head would disown its children
            head = psutil.Process(self._head.pid)
            self._members = [kept.get(p, p) for p in (head, *head.children(recursive=True))]
        self._due_s = now_s + min(max(LIST_S, (time.thread_time() - began) / LIST_SHARE), LATEST_S)

    def look(self, now_s: float) -> tuple[float, int]:
        """CPU time used since the first look, in seconds, and resident memory now, in bytes (shared pages in each)."""
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


@functools.cache
def _family(pid: int) -> Family:
    return Family(pid)


def own_pids() -> set[int]:
    """The ids of our process and its descendants, looked up every LIST_S: one that is younger may be missing."""
    return {process.pid for process in _family(os.getpid()).members(time.monotonic())}


class HostSource:
    """Rates since the last reading, so the first has none; `unsupported` says why a number is never given."""

    name = "host"

    def __init__(self, counters: Mapping[tuple[int, ...], Counter]) -> None:
        self.unsupported: dict[int, str] = {}
        self._counters = {numbers: counter for numbers, counter in counters.items() if self._works(numbers, counter)}
        self._family = Family(os.getpid())
        self._last: dict[int, float | None] = {}
        self._last_s: float | None = None

    def _works(self, numbers: tuple[int, ...], counter: Counter) -> bool:
        try:
            counter()
        except (OSError, ValueError) as error:
            self.unsupported |= dict.fromkeys(numbers, str(error))
            return False
        return True

    def read(self, now_s: float) -> Reading:
        """One reading. Memory is that of now; all else are means over the time since the last reading."""
        missing: list[str] = []
        used_s, resident = self._family.look(now_s)
        counted: dict[int, float | None] = {of.OWN_CORES: used_s}
        for numbers, counter in self._counters.items():
            counted |= _asked(numbers, counter, missing)
        span = None if self._last_s is None else now_s - self._last_s
        rates = {number: self._rate(number, count, span, missing) for number, count in counted.items()}
        self._last, self._last_s = counted, now_s
        return Reading({**rates, of.OWN_MEMORY: float(resident)}, span, tuple(missing))

    def _rate(self, number: int, count: float | None, span: float | None, missing: list[str]) -> float | None:
        last = self._last.get(number)
        if count is None:
            return None
        if span is None or last is None:
            missing.append(f"{number}: a rate needs two readings")
        elif span <= 0:
            missing.append(f"{number}: no time has passed since the last reading")
        elif count < last:
            missing.append(f"{number}: its counter went back")
        else:
            rate = (count - last) / span
            return min(rate, 1.0) if number == of.CPU_THROTTLED else rate
        return None

    def close(self) -> None:
        """Nothing is held open."""


def _asked(numbers: tuple[int, ...], counter: Counter, missing: list[str]) -> dict[int, float | None]:
    try:
        return {**counter()}
    except (OSError, ValueError) as error:
        missing += [f"{number}: {error}" for number in numbers]
        return dict.fromkeys(numbers)


def open_host(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostSource:
    """The host as this process sees it. proc, cgroup: where these file systems are mounted."""
    return HostSource(
        {
            (of.HOST_CORES, of.STOLEN_CORES): lambda: cpu_seconds(proc),
            (of.CPU_PRESSURE,): lambda: {of.CPU_PRESSURE: waited_seconds(proc / "pressure" / "cpu")},
            (of.MEMORY_PRESSURE,): lambda: {of.MEMORY_PRESSURE: waited_seconds(proc / "pressure" / "memory")},
            (of.CPU_THROTTLED,): functools.partial(_throttled, proc, cgroup),
        }
    )


def cpu_seconds(proc: Path) -> dict[int, float]:
    """CPU time of all processes, and time stolen, in seconds since boot. Raises ValueError where nothing is counted."""
    with (proc / "stat").open(encoding="utf-8") as file:
        words = file.readline().split()
    ticks = [int(word) for word in words[1:]]
    if words[:1] != ["cpu"] or len(ticks) <= STEAL or not any(ticks):  # some sandboxes give zeros
        raise ValueError(f"{proc / 'stat'} counts no CPU time")
    per_s = os.sysconf("SC_CLK_TCK")
    return {of.HOST_CORES: sum(ticks[i] for i in BUSY) / per_s, of.STOLEN_CORES: ticks[STEAL] / per_s}


def waited_seconds(pressure: Path) -> float:
    """Time in which at least one task waited, in seconds. Raises OSError where the kernel does not say."""
    found = re.search(r"^some .*\btotal=(\d+)$", pressure.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{pressure} has no total of 'some'")
    return int(found[1]) / 1e6


def limiting_cgroup(proc: Path, cgroup: Path) -> tuple[Path, float] | None:
    """The nearest cgroup of version 2, from our own upwards, with a CPU quota, and that quota in cores; or None."""
    lines = (proc / "self" / "cgroup").read_text("utf-8").splitlines()
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return None
    folder = cgroup / own
    for place in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # the root has no cpu.max, nor has "max" a number
            quota, period = (place / "cpu.max").read_text("utf-8").split()
            return place, int(quota) / int(period)
        if place == cgroup:
            break
    return None


def _throttled(proc: Path, cgroup: Path) -> dict[int, float]:
    """The kernel adds up the time over CPUs, so a share made of it is a bound from above, and cut at 1."""
    found = limiting_cgroup(proc, cgroup)
    if found is None:
        raise ValueError("our cgroup has no CPU quota")
    for line in (found[0] / "cpu.stat").read_text("utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":
            return {of.CPU_THROTTLED: int(value) / 1e6}
    raise ValueError(f"{found[0] / 'cpu.stat'} has no throttled_usec")


SCRIPT = Path(__file__).with_name("speed_probe.py")
MANY_CORES = 4  # from here on an engine on a GPU leaves one idle
# Between two pieces: they take 1.2 % of a core of its own (2.3 % without a rest), 0.2 % of those that the engine needs.
OWN_REST_S, SHARED_REST_S = 0.4, 1.9


class SpeedProbeSource:
    """core: where its process runs; None: wherever the kernel puts it. rest_s: time between two pieces, at least.

    The process is started by the first reading. What goes wrong with it makes values unknown and nothing more: a
    measurement is as good without it. asked_s: when the last piece was asked for.
    """

    def __init__(self, core: int | None = None, rest_s: float = 0.0) -> None:
        self.name = (
            f"{SPEED_PROBE} (Python {sys.version_info.major}.{sys.version_info.minor})"  # whose speed it tells, too
        )
        self.core, self.rest_s = core, rest_s
        self.asked_s = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._at_work = False
        self._lost = ""

    def read(self, now_s: float) -> Reading:
        if not self._lost:
            try:
                return Reading(self._turn(now_s))
            except OSError as error:
                self._lost = str(error)
        return Reading(dict.fromkeys((PROBE, PROBE_CPU)), missing=(f"{PROBE}: {self._lost}",))

    def _turn(self, now_s: float) -> dict[int, float | None]:
        """Values of the piece that has ended since the last turn; the next one begins."""
        process = self._process = self._process or _started(self.core)
        assert process.stdin and process.stdout
        values: dict[int, float | None] = {}
        if self._at_work:
            with suppress(BlockingIOError):  # it still works
                line = os.read(process.stdout.fileno(), 1 << 10)
                if not line:
                    raise BrokenPipeError("the host-speed probe's process has ended")
                wall, cpu = map(int, line.split())
                values, self._at_work = {PROBE: wall / 1e6, PROBE_CPU: cpu / 1e6}, False
        if not self._at_work and now_s - self.asked_s >= self.rest_s:
            os.write(process.stdin.fileno(), b"\n")
            self.asked_s, self._at_work = now_s, True
        return values

    def close(self) -> None:
        process, self._process, self._at_work = self._process, None, False
        if process:
            with process:
                process.kill()


def open_speed_probe(device: str) -> SpeedProbeSource:
    """The host-speed probe beside an engine on this device, a GPU's UUID or "cpu"."""
    core = spare_core(device, own_cores())
    return SpeedProbeSource(core, SHARED_REST_S if core is None else OWN_REST_S)


def spare_core(device: str, allowed: Collection[int]) -> int | None:
    """The last of the allowed cores where an engine can do without it; None where it needs all: on the CPU, and on a
    host of few. Nothing keeps the engine off that core, but the kernel moves it to an idle one."""
    return None if device in NO_GPU or len(allowed) < MANY_CORES else max(allowed)


def _started(core: int | None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SCRIPT), str(os.getpid()), *(() if core is None else (str(core),))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert process.stdout
    os.set_blocking(process.stdout.fileno(), False)
    return process
