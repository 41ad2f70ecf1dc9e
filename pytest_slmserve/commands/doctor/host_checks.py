"""The host beside its GPU: cores, their speed and who else uses them, memory, room on disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pytest_slmserve.analysis.stats.estimates import percentile
from pytest_slmserve.commands.doctor.finding import Finding, Places, first_of, gib, of_size
from pytest_slmserve.schema.sensors import CPU_PRESSURE, HOST_CORES, OWN_CORES, STOLEN_CORES
from pytest_slmserve.schema.specs import GIB
from pytest_slmserve.telemetry.base import SensorSource
from pytest_slmserve.telemetry.canary_process import piece, timed
from pytest_slmserve.telemetry.host_counters import limiting_cgroup, open_host
from pytest_slmserve.telemetry.host_probe import cpu_model, own_cores

ENOUGH_CORES = 4  # vLLM's front end, its engine, the worker and the tests
ENOUGH_MEMORY, LEAST_MEMORY = 8 * GIB, 2 * GIB
ENOUGH_DISK, LEAST_DISK = 4 * GIB, GIB // 4
ENOUGH_SHARED = GIB // 4  # containers often have 64 MiB
STEAL_SHARE, BUSY_SHARE = 0.01, 0.1  # of the cores
MOST_CORES, PIECES = 16, 5  # whose speed is asked for, and of each: half a second in all
UNEVEN = 1.4  # times: a core is about half as fast while another one of its physical core works


def of_host(places: Places) -> list[Finding]:
    usable = len(own_cores()) or os.cpu_count() or 1
    return [
        of_cores(places, usable, os.cpu_count() or 1),
        *of_a_second(open_host(proc=places.proc, cgroup=places.sys / "fs" / "cgroup"), usable),
        of_core_speeds(),
        of_sessions(places, usable),
        of_governor(places),
        of_memory(places),
        of_shared_memory(places),
        of_cache(places),
    ]


def of_cores(places: Places, usable: int, total: int) -> Finding:
    """Finding on the cores that we may run on, by affinity and by the cgroup's quota."""
    limit = None
    with suppress(OSError):
        limit = limiting_cgroup(places.proc, places.sys / "fs" / "cgroup")
    threads = _threads_per_core(places.sys)
    found = f"{usable} of {total}, {threads or '?'} per core, {cpu_model() or 'unknown'}"
    throttled = limit and limit[1] < usable
    return first_of(
        "cores",
        f"{found}; a quota of {limit[1]:g}" if limit and throttled else found,
        (throttled, "warning", "throttling shows as pauses: lift the quota"),
        (usable < min(total, ENOUGH_CORES), "warning", "the affinity allows few: taskset, or the container's CPUs"),
        (usable < ENOUGH_CORES, "warning", "engine, tests and sensors share them: small models show it"),
    )


def _threads_per_core(root: Path) -> int | None:
    """Number of threads of one core, from a list such as 0,64 or 0-1; None where it cannot be read."""
    with suppress(OSError, ValueError):
        text = (root / "devices/system/cpu/cpu0/topology/thread_siblings_list").read_text("utf-8")
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        return sum(part[-1] - part[0] + 1 for part in ends)
    return None


def of_a_second(
    source: SensorSource,
    cores: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> list[Finding]:
    """Findings on the work of the CPUs over a second in which we do nothing."""
    source.read(clock())
    sleep(1.0)
    values = source.read(clock()).values
    source.close()
    return [_steal(values.get(STOLEN_CORES), cores), _work(values, cores)]


def _steal(stolen: float | None, cores: int) -> Finding:
    if stolen is None:
        return Finding("steal", "ok", "the host does not say")
    found = f"{stolen / cores:.1%} of the CPU time over a second"
    taken = stolen > STEAL_SHARE * cores
    return first_of("steal", found, (taken, "warning", "other guests take CPU time: use a host of your own"))


def _work(values: Mapping[int, float | None], cores: int) -> Finding:
    busy, own, waited = (values.get(number) for number in (HOST_CORES, OWN_CORES, CPU_PRESSURE))
    if busy is None:
        return Finding("other work", "ok", "the host does not say")
    others = max(0.0, busy - (own or 0.0))
    pressure = "" if waited is None else f", a task waited for a CPU {waited:.0%} of the time"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    found = f"{others:.2f} cores over a second{pressure}{load}"
    much = others > BUSY_SHARE * cores
    return first_of("other work", found, (much, "warning", "it takes cores from the engine: wait, or end it"))


def pieces_on_each_core() -> list[float]:
    """CPU seconds of the canary's pieces, on one core after the other; none where cores cannot be chosen."""
    times: list[float] = []
    if allowed := sorted(own_cores()):
        piece()  # an interpreter is slower at what it does for the first time
        with suppress(OSError):  # a container may forbid it
            for core in allowed[:: max(1, len(allowed) // MOST_CORES)][:MOST_CORES]:
                os.sched_setaffinity(0, {core})
                times += [timed()[1] / 1e6 for _ in range(PIECES)]
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)
    return times


def of_core_speeds(pieces_s: Callable[[], Sequence[float]] = pieces_on_each_core) -> Finding:
    """Finding on whether the cores are alike. A hypervisor need not tell of neighbours that share a physical core."""
    times = pieces_s()
    fast, slow = percentile(times, 0.1), percentile(times, 0.9)
    if fast is None or slow is None:
        return Finding("core speeds", "ok", "this system cannot choose a core")
    found = f"a piece of Python takes {1e3 * fast:.1f} to {1e3 * slow:.1f} ms of CPU time"
    advice = "repeats of small models will differ: use a host of your own, or a larger --slm-budget"
    return first_of("core speeds", found, (slow > UNEVEN * fast, "warning", advice))


def of_sessions(places: Places, usable: int) -> Finding:
    """Does the kernel share cores by session? Then a client whose server is in another session can be held up where
    cores are short, however little it needs. What we start ourselves is in our session."""
    on = False
    with suppress(OSError):
        on = (places.proc / "sys/kernel/sched_autogroup_enabled").read_text("utf-8").strip() == "1"
    advice = "a client of a server in another session may lag: sysctl kernel.sched_autogroup_enabled=0"
    found = f"the kernel {'shares' if on else 'does not share'} cores by session"
    return first_of("sessions", found, (on and usable < ENOUGH_CORES, "warning", advice))


def of_governor(places: Places) -> Finding:
    found = set()
    for path in (places.sys / "devices/system/cpu/cpufreq").glob("policy*/scaling_governor"):
        with suppress(OSError):
            found.add(path.read_text("utf-8").strip())
    advice = "clocks follow the load; steadier: cpupower frequency-set -g performance"
    words = ", ".join(sorted(found)) or "not readable, as in most virtual machines"
    return first_of("governor", words, (found - {"performance"}, "warning", advice))


def of_memory(places: Places) -> Finding:
    try:
        rows = (places.proc / "meminfo").read_text("utf-8").splitlines()
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (row.partition(":") for row in rows)}
        free, total = sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return Finding("memory", "ok", "the host does not say")
    found = f"{gib(free)} of {gib(total)} free"
    return of_size("memory", found, free, ENOUGH_MEMORY, LEAST_MEMORY, "free some for the engine")


Free = Callable[[Path], int]


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds the path, or would hold it."""
    there = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(there).free


def of_shared_memory(places: Places, free: Free = free_bytes) -> Finding:
    if not places.shm.exists():
        return Finding("shared memory", "warning", f"no {places.shm}", "mount one: several GPUs need it")
    found = free(places.shm)
    advice = "docker run --shm-size=1g, or --ipc=host"
    return of_size("shared memory", f"{gib(found)} free", found, ENOUGH_SHARED, 0, advice)


def of_cache(places: Places, free: Free = free_bytes) -> Finding:
    """Finding on the folder where vLLM keeps compiled code: without it the first start of every model takes longer."""
    base = Path(places.env.get("XDG_CACHE_HOME", places.home / ".cache"))
    folder = Path(places.env.get("VLLM_CACHE_ROOT", base / "vllm")).expanduser()
    there = "there is one" if (folder / "torch_compile_cache").is_dir() else "nothing compiled yet"
    found = f"{there} in {folder}, {gib(size := free(folder))} free"
    return of_size("compile cache", found, size, ENOUGH_DISK, LEAST_DISK, "free some, or VLLM_CACHE_ROOT=FOLDER")
