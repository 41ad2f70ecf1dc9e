"""What do this host's GPU sensors really do? Asks, prints and writes down what no document says, in about 75 s.

    python studies/sensor_questions.py --out sensors.json
    python studies/sensor_questions.py --only "ends of"
    python studies/sensor_questions.py --again studies/results/sensor-questions-h200.json.xz

Windows of GPM's ratios, what they are where a unit can do no more, update periods of power and energy, the energy
counter against integrated power, processes, events, throttle counters, what a reading costs, noise of the host. It
reads only, and changes no setting of the card. A load is a child with torch, ended whatever happens; without torch, all
that needs a load is left out, and said so.
"""

from __future__ import annotations

import json
import math
import os
import platform
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from common import parser_of, results_in, results_options

from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.telemetry.gpu import CRITICAL_EVENTS, FIELDS, FUNCTIONS, GPM, LISTS, VALUE_TYPES, open_nvml
from pytest_slmserve.telemetry.host import cpu_model, visible_gpus

WINDOWS_S = {0.005: 80, 0.02: 60, 0.05: 50, 0.1: 30, 0.2: 20, 0.5: 9, 1.0: 5}  # and how many of each
POLL_S, PAUSE_S = 10.5, 0.001
READINGS, BETWEEN_S = 30, 0.15
READER_S = 3.0
LOAD_READY_S, LOAD_LIVES_S = 30.0, 75.0
PHASE_S, SETTLE_S, LOOKS, LOOK_S = 2.5, 0.5, 6, 0.3  # a phase is looked at from SETTLE_S on, LOOKS times LOOK_S
PHASES = {  # of ENDS, in its order: unit of the rate, and how much of it one operation is
    "copy of 1 GiB": ("bytes/s", 2 << 30),
    "float16 product of 4096": ("FLOP/s", 2 * 4096**3),
    "float16 product of 8192": ("FLOP/s", 2 * 8192**3),
}
COUNTER, INSTANT, AVERAGE = 83, 186, 185
SM_CLOCK = 1
THROTTLE = (74, 75, 76, 251, 252, 253, 269, 270, 271)
RATIOS = {1: "engine %", 2: "SM %", 3: "occupancy %", 5: "tensor %", 10: "DRAM %"}  # GPM's metrics
CYCLES = 248  # a cumulative counter among GPM's metrics that came late
EVENTS = {
    0x1: "single-bit ECC", 0x2: "double-bit ECC", 0x4: "P-state", 0x8: "Xid", 0x10: "clock", 0x80: "power source",
    0x100: "MIG change", 0x200: "single-bit ECC storm", 0x400: "DRAM retirement", 0x800: "DRAM retirement failure",
    0x1000: "non-fatal poison", 0x2000: "fatal poison", 0x4000: "GPU unavailable", 0x8000: "GPU recovery action",
}  # fmt: skip

# Small products and copies in turn, 0.3 ms a pair on an H200 by arithmetic, so that windows of 5 ms see the same
# mixture. One batch is always queued behind the one that is waited for: the GPU never idles.
LOAD = """
import os, sys, time
import torch
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
product = torch.empty_like(a)
source = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
copy = torch.empty_like(source)
done = [torch.cuda.Event(), torch.cuda.Event()]
turn = 0
while time.monotonic() < end and os.getppid() == parent:
    for _ in range(200):
        torch.matmul(a, a, out=product)
        copy.copy_(source)
    done[turn % 2].record()
    turn += 1
    if turn > 1:
        done[turn % 2].synchronize()
    if turn == 10:
        print("ready", torch.__version__, flush=True)
torch.cuda.synchronize()
"""
# One kernel after the other, each for so many seconds. Tells which, how often it is done, and when that was seen.
ENDS = """
import os, sys, time
from functools import partial
import torch
seconds, parent = float(sys.argv[1]), os.getppid()
source = torch.randint(256, (1 << 30,), device="cuda", dtype=torch.uint8)
kernels = [partial(torch.empty_like(source).copy_, source)]
for size in (4096, 8192):
    a = torch.randn(size, size, device="cuda", dtype=torch.float16)
    kernels.append(partial(torch.matmul, a, a, out=torch.empty_like(a)))
for kernel in kernels:
    kernel()
torch.cuda.synchronize()
done = [torch.cuda.Event(), torch.cuda.Event()]
began = time.monotonic()
print("ready", torch.__version__, began, flush=True)
for phase, kernel in enumerate(kernels):
    turn = 0
    while time.monotonic() < began + (phase + 1) * seconds and os.getppid() == parent:
        for _ in range(20):
            kernel()
        done[turn % 2].record()
        turn += 1
        if turn > 1:
            done[turn % 2].synchronize()
            print(phase, 20 * (turn - 1), time.monotonic(), flush=True)
    torch.cuda.synchronize()
"""
READER = """
import sys
sys.path.insert(0, sys.argv[1])
import sensor_questions as questions
host = questions.this_host(sys.argv[2])
print(questions.json.dumps(questions.followed(host, 0.25, float(sys.argv[3]))))
"""


@dataclass
class Host:
    """Where questions are asked. answers: fills up. load: what keeps the GPU busy, while there is such a process."""

    nv: Any
    device: Any
    uuid: str
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    load: subprocess.Popen[str] | None = None
    answers: dict[str, Any] = field(default_factory=dict)

    def ask(self, name: str, question: Callable[[Host], Any]) -> None:
        """Put the answer down; a question that cannot be asked says why, and the next one is asked."""
        began = self.now()
        try:
            answer = question(self)
        except (self.nv.NVMLError, SlmError, OSError, ValueError, subprocess.SubprocessError) as error:
            answer = {"not asked": f"{type(error).__name__}: {error}"}
        self.answers[name] = answer
        print(f"\n{name} ({self.now() - began:.1f} s)\n{shown(answer)}", flush=True)


def this_host(uuid: str) -> Host:
    import pynvml

    pynvml.nvmlInit()
    return Host(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid), uuid)


def shown(answer: Any, indent: str = "  ") -> str:
    """One line for each fact."""
    if not isinstance(answer, dict):
        return f"{indent}{answer}"
    lines = []
    for name, value in answer.items():
        deeper = isinstance(value, dict) and any(isinstance(v, dict) for v in value.values())
        flat = ", ".join(f"{k} {brief(v)}" for k, v in value.items()) if isinstance(value, dict) else brief(value)
        lines.append(f"{indent}{name}:\n{shown(value, indent + '  ')}" if deeper else f"{indent}{name}: {flat}")
    return "\n".join(lines)


def brief(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Centre and width of some values; nothing where there are none."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    return {
        "n": len(ordered), "min": ordered[0], "median": median(ordered), "mean": fmean(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], "max": ordered[-1], "sd": pstdev(ordered),
    }  # fmt: skip


# GPM


def sampled(host: Host) -> tuple[float, Any]:
    """A sample, and when it was taken: the middle of the call."""
    sample = host.nv.nvmlGpmSampleAlloc()
    before = host.now()
    try:
        host.nv.nvmlGpmSampleGet(host.device, sample)
    except host.nv.NVMLError:
        host.nv.nvmlGpmSampleFree(sample)
        raise
    return (before + host.now()) / 2, sample


def metrics(host: Host, first: Any, second: Any, ids: Sequence[int]) -> list[tuple[int, float]]:
    """Code and value of each metric."""
    request = host.nv.c_nvmlGpmMetricsGet_t(version=1, numMetrics=len(ids), sample1=first, sample2=second)
    for number, place in zip(ids, request.metrics):
        place.metricId, place.nvmlReturn = number, 999
    host.nv.nvmlGpmMetricsGet(request)
    return [(place.nvmlReturn, place.value) for place in request.metrics[: len(ids)]]


def windows(host: Host, length_s: float, count: int) -> tuple[list[float], list[list[tuple[int, float]]], list[str]]:
    """Spans, metrics of one window after the other, and errors of the whole call."""
    spans, rows, errors = [], [], []
    at, sample = sampled(host)
    try:
        for _ in range(count):
            host.sleep(max(0.0, at + length_s - host.now()))
            then, newer = sampled(host)
            try:
                rows.append(metrics(host, sample, newer, list(GPM)))
                spans.append(then - at)
            except host.nv.NVMLError as error:
                errors.append(str(error))
            host.nv.nvmlGpmSampleFree(sample)
            at, sample = then, newer
    finally:
        host.nv.nvmlGpmSampleFree(sample)
    return spans, rows, errors


def window_lengths(host: Host) -> dict[str, Any]:
    """GPM's ratios in percent, by length of the window: where do repeats, zeros and values that are none begin?"""
    found: dict[str, Any] = {}
    for length_s, count in WINDOWS_S.items():
        spans, rows, errors = windows(host, length_s, count)
        found[f"{1000 * length_s:g} ms"] = {
            "true span": spread(spans),
            "calls that failed": {e: errors.count(e) for e in set(errors)},
            **{f"metric {metric}": oddities([row[place] for row in rows]) for place, metric in enumerate(GPM)},
        }
    return found


def oddities(answers: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """How many answers are no measurement, and the spread of the rest."""
    values = [value for code, value in answers if code == 0]
    finite = [value for value in values if math.isfinite(value)]
    return {
        **spread(finite),
        "errors": len(answers) - len(values),
        "nan": len(values) - len(finite),
        "zeros": sum(value == 0 for value in finite),
        "above 105": sum(value > 105 for value in finite),
        "repeats": sum(a == b != 0 for a, b in pairwise(finite)),
    }


def cycle_counter(host: Host) -> dict[str, Any]:
    """Is the cumulative counter accepted, by this driver and these bindings?"""
    _, first = sampled(host)
    host.sleep(0.2)
    _, second = sampled(host)
    try:
        code, value = metrics(host, first, second, [CYCLES])[0]
    finally:
        for sample in (first, second):
            host.nv.nvmlGpmSampleFree(sample)
    room = type(host.nv.c_nvmlGpmMetricsGet_t().metrics)._length_
    said = "accepted" if code == 0 else str(host.nv.NVMLError(code))
    return {"id": CYCLES, "answer": said, "value": value, "metrics that the bindings have room for": room}


def followed(host: Host, length_s: float, seconds: float) -> dict[str, Any]:
    """SM and DRAM ratios of a reader that does nothing else."""
    _, rows, errors = windows(host, length_s, round(seconds / length_s))
    places = list(GPM)
    return {
        "SM": oddities([row[places.index(2)] for row in rows]),
        "DRAM": oddities([row[places.index(10)] for row in rows]),
        "failed calls": len(errors),
    }


def second_reader(host: Host) -> dict[str, Any]:
    """Do two processes read GPM at the same time, and do they agree?"""
    arguments = [str(Path(__file__).parent), host.uuid, str(READER_S)]
    other = subprocess.Popen([sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        ours = followed(host, 0.25, READER_S + 0.5)
        text, _ = other.communicate(timeout=10)
    finally:
        other.kill()
        other.wait()
    return {"this process": ours, "the other": json.loads(text or '"said nothing"')}


def ends_of_counters(host: Host) -> dict[str, Any]:
    """What do ratios read where their unit can do no more? With the rate that was reached, power and the SM clock."""
    with loaded(host, ENDS, PHASE_S) as said:
        assert host.load is not None and host.load.stdout is not None
        lines: list[str] = []
        # Each line at once, or the pipe fills up and the child stands still.
        reader = threading.Thread(target=lines.extend, args=(host.load.stdout,), daemon=True)
        reader.start()
        looks = []
        for phase in range(len(PHASES)):
            host.sleep(max(0.0, float(said[1]) + phase * PHASE_S + SETTLE_S - host.now()))
            looks.append(looked_at(host))
        reader.join(PHASE_S)
    return {name: reached(lines, phase, *look) for phase, (name, look) in enumerate(zip(PHASES, looks))}


def looked_at(host: Host) -> tuple[float, float, dict[str, Any]]:
    """From when to when it was looked, and means of what was seen."""
    began, rows, watts, clocks = host.now(), [], [], []
    for _ in range(LOOKS):
        rows += windows(host, LOOK_S, 1)[1]
        (answer,) = host.nv.nvmlDeviceGetFieldValues(host.device, [INSTANT])
        if answer.nvmlReturn:
            raise host.nv.NVMLError(answer.nvmlReturn)
        watts.append(float(getattr(answer.value, VALUE_TYPES[answer.valueType])) / 1000)
        clocks.append(host.nv.nvmlDeviceGetClockInfo(host.device, SM_CLOCK))
    ended = host.now()
    seen = {RATIOS[metric]: oddities([row[place] for row in rows]) for place, metric in enumerate(GPM)}
    means = {name: found.get("mean", "not told") for name, found in seen.items()}
    return began, ended, means | {"W": fmean(watts), "MHz": f"{min(clocks)} to {max(clocks)}"}


def reached(lines: Sequence[str], phase: int, begin: float, end: float, seen: dict[str, Any]) -> dict[str, Any]:
    """The rate of a phase while it was looked at, before what was seen. Raises OSError where nothing was done then."""
    unit, amount = list(PHASES.values())[phase]
    told = [(int(done), float(at)) for number, done, at in map(str.split, lines) if int(number) == phase]
    inside = [(done, at) for done, at in told if begin <= at <= end]
    if len(inside) < 2:
        raise OSError(f"the load told nothing of phase {phase}, {list(PHASES)[phase]}, while it was looked at")
    (first, since), (last, until) = inside[0], inside[-1]
    return {unit: amount * (last - first) / (until - since), **seen}


# Power and energy


def polled(host: Host) -> list[tuple[float, int, int, int]]:
    """Time, energy in mJ, instant and average power in mW, as fast as can be asked without keeping a core busy."""
    rows: list[tuple[float, int, int, int]] = []
    end = host.now() + POLL_S
    while (at := host.now()) < end:
        answers = host.nv.nvmlDeviceGetFieldValues(host.device, [COUNTER, INSTANT, AVERAGE])
        if any(answer.nvmlReturn for answer in answers):
            codes = [str(host.nv.NVMLError(answer.nvmlReturn)) for answer in answers if answer.nvmlReturn]
            raise OSError(f"fields {COUNTER}, {INSTANT}, {AVERAGE}: {codes}")
        energy, instant, average = (getattr(answer.value, VALUE_TYPES[answer.valueType]) for answer in answers)
        rows.append((at, energy, instant, average))
        host.sleep(PAUSE_S)
    return rows


def changes(rows: Sequence[tuple[float, ...]], place: int) -> list[float]:
    """When a value was first seen to be another than before."""
    return [row[0] for before, row in pairwise(rows) if row[place] != before[place]]


def integral_j(rows: Sequence[tuple[float, ...]], place: int, begin: float, end: float) -> float:
    """Power in mW as steps, from one time to another, in joules."""
    inside = [row for row in rows if begin <= row[0] <= end]
    return sum(row[place] / 1000 * (after[0] - row[0]) for row, after in pairwise(inside))


def power_and_energy(host: Host) -> dict[str, Any]:
    """Update periods in ms, and the counter against integrated power between its first and last update."""
    rows = polled(host)
    found: dict[str, Any] = {"ms between polls": spread(gaps_ms([row[0] for row in rows]))}
    for place, name in enumerate(("energy", "instant power", "average power"), 1):
        found[f"ms between changes of {name}"] = spread(gaps_ms(changes(rows, place)))
    for place, name in enumerate(("instant W", "average W"), 2):
        found[name] = spread([row[place] / 1000 for row in rows])
    return found | {"energy": energy_two_ways(rows)}


def gaps_ms(times: Sequence[float]) -> list[float]:
    return [1000 * (b - a) for a, b in pairwise(times)]


def energy_two_ways(rows: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Joules of the counter, and those of integrated power as parts of it: all polls, and one in 0.25 s."""
    updates = changes(rows, 1)
    if len(updates) < 2:
        return {"not asked": f"the counter was updated {len(updates)} times"}
    begin, end = updates[0], updates[-1]
    at = {row[0]: row[1] for row in rows}
    counter_j = (at[end] - at[begin]) / 1000
    sparse = [row for before, row in pairwise(rows) if int(row[0] / 0.25) != int(before[0] / 0.25)]
    edges = sparse[0][0], sparse[-1][0]
    seen_j = (at[edges[1]] - at[edges[0]]) / 1000
    return {
        "seconds": end - begin,
        "counter J": counter_j,
        "mean W": counter_j / (end - begin),
        "instant / counter": integral_j(rows, 2, begin, end) / counter_j,
        "average / counter": integral_j(rows, 3, begin, end) / counter_j,
        "instant every 0.25 s / counter": integral_j(sparse, 2, *edges) / seen_j,
        "average every 0.25 s / counter": integral_j(sparse, 3, *edges) / seen_j,
    }


# The rest


def throttle_counters(host: Host) -> dict[str, Any]:
    """Every id that a throttle counter may have: code, type and value now."""
    answers = host.nv.nvmlDeviceGetFieldValues(host.device, list(THROTTLE))
    return {
        str(number): {"code": a.nvmlReturn, "type": VALUE_TYPES[a.valueType], "value": a.value.ullVal}
        for number, a in zip(THROTTLE, answers)
    }


def throttling(host: Host) -> dict[str, Any]:
    """How the counters grew over a second of load, in their own unit, beside the reasons that were shown."""
    before, began, reasons = throttle_counters(host), host.now(), set()
    while host.now() < began + 1:
        reasons.add(hex(host.nv.nvmlDeviceGetCurrentClocksEventReasons(host.device)))
        host.sleep(0.05)
    after, seconds = throttle_counters(host), host.now() - began
    for number, answer in after.items():
        answer["per s"] = (answer["value"] - before[number]["value"]) / seconds
    return {"reasons": " ".join(sorted(reasons)), "fields": after}


def processes(host: Host) -> dict[str, Any]:
    """Lists of processes beside the ids that we know."""
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    found: dict[str, Any] = {
        "this process": os.getpid(),
        "the load": host.load.pid if host.load else "none",
        "namespaces": next((line for line in status if line.startswith("NSpid")), "not told"),
    }
    for name in (*LISTS, "nvmlDeviceGetGraphicsRunningProcesses_v3"):
        try:
            listed = getattr(host.nv, name)(host.device)
            found[name] = [{"pid": process.pid, "memory": process.usedGpuMemory} for process in listed]
        except (host.nv.NVMLError, AttributeError) as error:
            found[name] = f"not asked: {error}"
    return found


def events(host: Host) -> dict[str, Any]:
    """Types of events, and whether they can be registered as the user that we are."""
    nv = host.nv
    types = nv.nvmlDeviceGetSupportedEventTypes(host.device)
    found: dict[str, Any] = {
        "supported": ", ".join(name for bit, name in EVENTS.items() if types & bit) or "none",
        "mask": hex(types),
        "user id": os.geteuid(),
    }
    event_set = nv.nvmlEventSetCreate()
    try:
        nv.nvmlDeviceRegisterEvents(host.device, types & CRITICAL_EVENTS, event_set)
        found["registered"] = hex(types & CRITICAL_EVENTS)
        began = host.now()
        nv.nvmlEventSetWait_v2(event_set, 0)
        found["waiting"] = "an event came"
    except nv.NVMLError as error:
        if "registered" in found:
            found |= {"waiting": str(error), "ms of a wait for 0 ms": 1000 * (host.now() - began)}
        else:
            found["registered"] = f"no: {error}"
    finally:
        nv.nvmlEventSetFree(event_set)
    return found


def reading_costs(host: Host) -> dict[str, Any]:
    """Wall and CPU time of a reading as the package takes it, in ms, and what it does not find here."""
    own = {os.getpid()} | ({host.load.pid} if host.load else set())
    source = open_nvml(host.uuid, own_pids=lambda: own)
    wall: list[float] = []
    cpu: list[float] = []
    unknown: dict[str, int] = {}
    last: dict[int, float | None] = {}
    try:
        for _ in range(READINGS):
            host.sleep(BETWEEN_S)
            began, spent = time.perf_counter(), time.process_time()
            reading = source.read(host.now())
            wall.append(1000 * (time.perf_counter() - began))
            cpu.append(1000 * (time.process_time() - spent))
            unknown |= {why: unknown.get(why, 0) + 1 for why in reading.missing}
            last |= reading.values
    finally:
        source.close()
    return {
        "source": source.name, "wall ms": spread(wall), "CPU ms": spread(cpu),
        "never there": {str(number): why for number, why in source.unsupported.items()}, "not known": unknown,
        "last values": {str(number): value for number, value in last.items()}, "span s": reading.span_s,
    }  # fmt: skip


def call_costs(host: Host) -> dict[str, Any]:
    """Milliseconds of each call that a reading is made of, and the CPU time of each field alone: some are dear."""

    def called(function: str, *arguments: object) -> object:
        return getattr(host.nv, function)(host.device, *arguments)

    calls: dict[str, Callable[[], object]] = {
        " ".join(map(str, (ask.function, *ask.arguments))): partial(called, ask.function, *ask.arguments)
        for ask in FUNCTIONS
    }
    calls |= {name: partial(called, name) for name in LISTS}
    ids = [field.id for field in FIELDS]
    calls["nvmlDeviceGetFieldValues"] = partial(called, "nvmlDeviceGetFieldValues", ids)
    calls["nvmlGpmSampleGet"] = lambda: host.nv.nvmlGpmSampleFree(sampled(host)[1])
    alone = {str(number): cost(host, partial(called, "nvmlDeviceGetFieldValues", [number])) for number in ids}
    found = {name: cost(host, call) for name, call in calls.items()}
    return found | {"CPU ms of fields": {number: seen.get("CPU", "not asked") for number, seen in alone.items()}}


def cost(host: Host, call: Callable[[], object], times: int = 15) -> dict[str, Any]:
    """Time on the clock, and mean CPU time."""
    spent, cpu = [], time.thread_time()
    try:
        for _ in range(times):
            began = time.perf_counter()
            call()
            spent.append(1000 * (time.perf_counter() - began))
    except (host.nv.NVMLError, AttributeError) as error:
        return {"not asked": str(error)}
    return {"median": median(spent), "max": max(spent), "CPU": 1000 * (time.thread_time() - cpu) / times}


def host_facts(host: Host) -> dict[str, Any]:
    """What makes times on this host noisy."""
    gpu = visible_gpus()[0]
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    load = Path("/proc/loadavg")
    naps_ms = []
    for _ in range(50):
        began = time.perf_counter()
        time.sleep(0.001)
        naps_ms.append(1000 * (time.perf_counter() - began))
    return {
        "GPU": gpu.name, "driver": gpu.driver, "CUDA": gpu.cuda, "nvidia-ml-py": version("nvidia-ml-py"),
        "kernel": platform.version(), "release": platform.release(), "CPU": cpu_model(), "CPUs": os.cpu_count(),
        "CPUs for us": len(os.sched_getaffinity(0)),
        "threads of the first core": siblings.read_text("utf-8").strip() if siblings.exists() else "not told",
        "load average": load.read_text("utf-8").strip() if load.exists() else "not told",
        "timer: ms slept when 1 was asked for": spread(naps_ms),
    }  # fmt: skip


def cpu_ticks() -> list[int] | None:
    """user, nice, system, idle, iowait, irq, softirq, steal of all CPUs since boot, in ticks."""
    try:
        line = Path("/proc/stat").read_text("utf-8").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return [int(ticks) for ticks in line[1:9]] if line[:1] == ["cpu"] and len(line) > 8 else None


def cpu_shares(before: list[int] | None, after: list[int] | None) -> dict[str, Any]:
    """Where the CPUs' time went between two looks, and how much of it others took (steal)."""
    if before is None or after is None or sum(after) <= sum(before):
        return {"not asked": "/proc/stat does not tell here"}
    spent = [b - a for a, b in zip(before, after)]
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    return {name: ticks / sum(spent) for name, ticks in zip(names, spent)}


@contextmanager
def loaded(host: Host, script: str, seconds: float) -> Iterator[list[str]]:
    """The GPU is busy inside the block, by a script that is told `seconds`; yields what it said behind "ready", first
    torch's version. Raises OSError where it does not come to work."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": host.uuid}
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stderr is not None
        said = child.stdout.readline() if select.select([child.stdout], [], [], LOAD_READY_S)[0] else ""
        if not said.startswith("ready"):
            child.kill()
            why = child.stderr.read().strip().rpartition("\n")[2]
            raise OSError(f"the load did not begin within {LOAD_READY_S:g} s: {why or 'it was silent'}")
        host.load = child
        yield said.split()[1:]
    finally:
        host.load = None
        child.kill()
        child.communicate()


BEFORE_LOAD: dict[str, Callable[[Host], Any]] = {
    "host": host_facts,
    "events": events,
    "processes, idle": processes,
    "power and energy, idle": power_and_energy,
    "ends of the counters": ends_of_counters,  # has loads of its own
}
UNDER_LOAD: dict[str, Callable[[Host], Any]] = {
    "power and energy under load": power_and_energy,
    "GPM windows under load": window_lengths,
    "GPM's cycle counter": cycle_counter,
    "GPM with a second reader": second_reader,
    "processes under load": processes,
    "throttle counters under load": throttling,
    "cost of a reading": reading_costs,
    "cost of each call": call_costs,
}


def ask_all(host: Host, only: str = "") -> dict[str, Any]:
    """All answers by question, of those with `only` in their name; one that could not be asked holds "not asked" and
    why. A load is there only where it is needed."""
    ticks = cpu_ticks()
    for name in (name for name in BEFORE_LOAD if only in name):
        host.ask(name, BEFORE_LOAD[name])
    under_load = [name for name in UNDER_LOAD if only in name]
    try:
        with loaded(host, LOAD, LOAD_LIVES_S) if under_load else nullcontext() as said:
            if said:
                host.answers["load"] = f"bfloat16 products of 4096 and copies of 256 MiB, torch {said[0]}"
                host.sleep(2.0)
            for name in under_load:
                host.ask(name, UNDER_LOAD[name])
            if host.load:
                host.answers["load ended too early"] = host.load.poll() is not None
    except OSError as error:
        print(f"\nNOT ASKED, for there is no load: {', '.join(under_load)}\n  {error}")
        host.answers |= {name: {"not asked": str(error)} for name in under_load if name not in host.answers}
    host.ask("CPU time of the host, shares", lambda _: cpu_shares(ticks, cpu_ticks()))
    return host.answers


def main() -> None:
    parser = parser_of(__doc__)
    results_options(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="ask only questions with TEXT in their name")
    args = parser.parse_args()
    if args.again:
        for name, answer in results_in(args.again).items():
            if args.only in name:
                print(f"\n{name}\n{shown(answer)}")
        return
    if not any(args.only in name for name in BEFORE_LOAD | UNDER_LOAD):
        parser.error(f"no question has {args.only!r} in its name; there are: {'; '.join(BEFORE_LOAD | UNDER_LOAD)}")
    try:
        host = this_host(visible_gpus()[0].uuid)
    except SlmError as error:
        raise SystemExit(f"nothing could be asked: {error}") from None
    began = time.monotonic()
    answers = ask_all(host, args.only)
    unasked = [name for name, answer in answers.items() if isinstance(answer, dict) and "not asked" in answer]
    print(f"\n{time.monotonic() - began:.0f} s. Not asked: {', '.join(unasked) or 'nothing'}")
    print("Never asked here: MPS memory limits, two engines at once, GPM beside a profiler.")
    if args.out:
        args.out.write_text(json.dumps(answers, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
