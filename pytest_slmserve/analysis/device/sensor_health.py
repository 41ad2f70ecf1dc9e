"""May a run's window be believed, as far as sensors can tell? Each reason against it is one sentence with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from pytest_slmserve.analysis.device.gpu_figures import (
    POWER_CAP,
    DeviceFigures,
    SensorWindow,
    device_figures,
    each_gpu,
    watched,
)
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.records import Replica, Run

HealthState = Literal["ok", "degraded", "invalid", "unknown"]
Finding = tuple[Literal["noise", "degraded", "invalid"], str]

COVERAGE = 0.95  # a ratio of the unseen twentieth may be anything: the mean of the window is then known to 0.05
GAP_INTERVALS, GAP_S = 5, 2.0  # a late reading or two is usual; in two seconds a load can change and change back
MISSING = 0.20  # a fifth unseen moves a mean by a fifth of what seen and unseen differ by
CAPPED = 0.01  # of the window: a cap lowers the clock by some of itself, so the rate by less than a repeat's noise
CLOCK_DROP = 0.05  # clocks move in steps of 15 MHz, below 1 %; flashinfer issue 2899: 20 % lower was 15 % slower
ENERGY_APART = 0.05  # the two methods agree within 1 % under load where both work (ml-energy/zeus issue 12)
ENERGY_WINDOW_S = 10.0  # power lags by its average over 1 s, so the ends of a shorter window may differ by more
STILL_S = 1.0  # the energy counter moves about every 0.1 s (ml-energy/zeus), whatever the load
DEAD_READINGS, BUSY = 5, 0.5  # a pause can make a reading or two 0, not five of a GPU that is busy
RATIO_END = 1.05  # a span's ends are rounded; what was seen beyond, 1.29, was wrong (NVIDIA/DCGM issue 152)
STOLEN = 0.02  # of the CPU time used: were the host the bound, rates would fall by as much, which is a repeat's noise
THROTTLED = 0.01  # Linux hands out CPU quota every 0.1 s: one that is used up is a pause of several steps
OTHERS, IDLE = 0.10, 0.10  # of all cores: others disturb where they use many and few are left to go to

# Bits of the clock event reasons (NVIDIA, nvml.h) and the counter of the same cause. The card's own power limit is not
# among them: it is part of what a card can do, and on an H200 every large batch of a model of 1.3 billion parameters or
# more meets it. How much it held the clock down is a figure (`DeviceFigures.power_capped`); what it must not do is
# change within a window, which the clock tells.
SLOWDOWNS: tuple[tuple[int, int | None, str], ...] = (
    (0x08, None, "hardware slowdown"),
    (0x20, of.CAPPED_SW_THERMAL, "software thermal slowdown"),
    (0x40, of.CAPPED_HW_THERMAL, "hardware thermal slowdown"),
    (0x80, of.CAPPED_BRAKE, "hardware power brake"),
)
GPU_IDLE = 0x01  # a clock falls because nothing runs


@dataclass(frozen=True, slots=True)
class Health:
    """reasons: worst first; none where all is well. unknown: nothing was sampled, and the reason says so. noise: what
    slowed the host or hid it from the sensors, which an interval has in it and which speaks against nothing. starved:
    did processes of ours wait for CPU cores that others had?"""

    state: HealthState
    reasons: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    starved: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    watch: SensorWindow
    figures: DeviceFigures
    cores: int | None
    gpu_processes: int
    even: bool


def health(
    run: Run, environment: Environment | None = None, replica: Replica | None = None, even: bool = True
) -> Health:
    """The verdict of the sensors over one run's window. environment: tells how many cores the host has. replica: other
    engines of ours were there too. even: the load is the same all through the window."""
    if run.telemetry and (gpus := each_gpu(run.telemetry)):
        return _of_all([health(replace(run, telemetry=one), environment, replica, even) for one in gpus])
    watch = watched(run)
    if watch is None:
        return Health("unknown", ("no telemetry was taken in the window",))
    if not any(watch.values(number) for number in watch.telemetry.columns):
        return Health("unknown", ("no sensor said anything in the window",))
    cores = environment.cores if environment else None
    seen = _Seen(watch, device_figures(run), cores, _own_gpu_processes(replica), even)
    found = [finding for rule in RULES for finding in rule(seen)]
    invalid, degraded, noise = (
        tuple(text for kind, text in found if kind == wanted) for wanted in ("invalid", "degraded", "noise")
    )
    state: HealthState = "invalid" if invalid else "degraded" if degraded else "ok"
    return Health(state, (*invalid, *degraded), noise, starved=any(True for rule in STARVED for _ in rule(seen)))


def _of_all(gpus: Sequence[Health]) -> Health:
    """Health of an engine on several GPUs: the state of the worst one, and reasons that name their GPU."""
    states: tuple[HealthState, ...] = ("invalid", "degraded", "unknown", "ok")
    state = min((gpu.state for gpu in gpus), key=states.index)
    reasons, noise = (
        tuple(f"GPU {i}: {text}" for i, texts in enumerate(each) for text in texts)
        for each in ([gpu.reasons for gpu in gpus], [gpu.noise for gpu in gpus])
    )
    return Health(state, reasons, noise, starved=any(gpu.starved for gpu in gpus))


def _own_gpu_processes(replica: Replica | None) -> int:
    """vLLM computes in one process per GPU; under MPS there is a server beside."""
    if replica is None or replica.sharing == "gpus":
        return 1
    return replica.count + (replica.sharing == "mps")


def _coverage(seen: _Seen) -> Iterator[Finding]:
    """One interval may be missing whatever its share: the one under way when the run ends."""
    share, length, columns = seen.figures.coverage, seen.watch.length_s, seen.watch.telemetry.columns
    if share is None or not any(number in columns for number in of.PROFILED):
        return
    if (1 - share) * length > max((1 - COVERAGE) * length, seen.watch.telemetry.interval_s):
        yield "noise", f"profiled counters cover {percent(share)} of the window (bound {percent(COVERAGE)})"


def _gaps(seen: _Seen) -> Iterator[Finding]:
    """Yield a finding where a GPU's sensors have no reading for too long, since some report a moment only. The host's
    sensors are counters, which miss nothing."""
    telemetry, (opens, closes) = seen.watch.telemetry, seen.watch.window_s
    if not any(number < of.OURS for number in telemetry.columns):
        return
    moments = [opens, *sorted(at for at in telemetry.time_s if opens < at < closes), closes]
    longest = max(after - before for before, after in pairwise(moments))
    bound = max(GAP_INTERVALS * telemetry.interval_s, GAP_S)
    if longest > bound:
        yield "noise", f"no reading for {longest:.1f} s of the window (bound {bound:.1f} s)"


def _failed_sensors(seen: _Seen) -> Iterator[Finding]:
    for note in seen.watch.telemetry.notes:
        yield "degraded", f"a sensor was lost: {note}"


def _slowdowns(seen: _Seen) -> Iterator[Finding]:
    bits = [int(value) for value in seen.watch.values(of.CLOCK_REASONS)]
    for bit, counter, name in SLOWDOWNS:
        told = sum(bool(each & bit) for each in bits)
        share = seen.watch.share_grown(counter) if counter else None
        if told:
            yield "invalid", f"{name}: in {told} of {len(bits)} readings of the clock reasons (bound 0)"
        elif share is not None and share > CAPPED:
            yield "invalid", f"{name}: {percent(share)} of the window by its counter (bound {percent(CAPPED)})"


def _clock_moves(seen: _Seen) -> Iterator[Finding]:
    """Readings at which the GPU says that it idles do not count. Under the power limit the clock dithers from reading
    to reading around what the load takes, and that must stay: there the window's halves are compared, if the load has
    no halves that differ, as a job's of which prompts come first."""
    read = (
        (seen.watch.value(of.SM_CLOCK, row) or 0, seen.watch.value(of.CLOCK_REASONS, row)) for row in seen.watch.rows
    )
    known = ((clock, int(reasons or 0)) for clock, reasons in read if clock > 0)  # unknown reasons are none
    rows = [(clock, reasons) for clock, reasons in known if not reasons & GPU_IDLE]
    if any(reasons & POWER_CAP for _, reasons in rows) and len(rows) > 1:
        half = len(rows) // 2
        then, now = (fmean(clock for clock, _ in part) for part in (rows[:half], rows[half:]))
        if seen.even and abs(now / then - 1) > CLOCK_DROP:
            yield (
                "noise",
                f"under the power limit the mean SM clock moved from {then / 1e6:.0f} MHz in the first half of the "
                f"window to {now / 1e6:.0f} MHz ({percent(now / then - 1)}, bound {percent(CLOCK_DROP)})",
            )
    elif rows and (lowest := min(rows)[0]) < (1 - CLOCK_DROP) * (middle := median(clock for clock, _ in rows)):
        yield (
            "noise",
            f"the SM clock fell to {lowest / 1e6:.0f} MHz from a median of {middle / 1e6:.0f} MHz "
            f"({percent(1 - lowest / middle)} lower, bound {percent(CLOCK_DROP)})",
        )


def _foreign_processes(seen: _Seen) -> Iterator[Finding]:
    foreign, all_of_them = seen.watch.values(of.FOREIGN_PROCESSES), seen.watch.values(of.GPU_PROCESSES)
    if foreign and max(foreign) > 0:
        yield "invalid", f"{max(foreign):.0f} processes of others computed on the GPU (bound 0)"
    elif not foreign and all_of_them and max(all_of_them) > seen.gpu_processes:
        yield (
            "degraded",
            f"{max(all_of_them):.0f} processes computed on the GPU, and whose they are is not known "
            f"(bound {seen.gpu_processes})",
        )


def _errors(seen: _Seen) -> Iterator[Finding]:
    """The Xid is the number of the last error and stays: only a change tells that there was one."""
    for before, now in pairwise(seen.watch.with_before(of.XID)):
        if now not in (before, 0):
            yield "invalid", f"the GPU reported Xid {now:.0f} (before: {before:.0f})"
    for number, what in (
        (of.ECC_DOUBLE_BIT, "memory errors beyond repair"),
        (of.REMAPPED_ROWS, "remapped memory rows"),
    ):
        values = seen.watch.with_before(number)
        if values and max(values) > values[0]:
            yield "invalid", f"{what} grew from {values[0]:.0f} to {max(values):.0f} (bound: no growth)"


def _power_limit(seen: _Seen) -> Iterator[Finding]:
    limits = seen.watch.with_before(of.POWER_LIMIT)
    if limits and min(limits) < max(limits):
        yield "invalid", f"the power limit moved between {min(limits):.0f} W and {max(limits):.0f} W (bound: no change)"


def _energy(seen: _Seen) -> Iterator[Finding]:
    readings, apart = seen.watch.known(of.ENERGY), seen.figures.energy_deviation
    for before, now in pairwise(readings):
        if now.value < before.value:
            yield "invalid", f"the energy counter fell from {before.value:.0f} J to {now.value:.0f} J (bound: no fall)"
            return
    seconds = readings[-1].at_s - readings[0].at_s if readings else 0.0
    if seconds >= STILL_S and readings[-1].value == readings[0].value:
        yield "invalid", f"the energy counter stood still for {seconds:.1f} s (bound {STILL_S:.1f} s)"
    if apart is not None and abs(apart) > ENERGY_APART and seen.watch.length_s >= ENERGY_WINDOW_S:
        yield (
            "degraded",
            f"integrated power is {percent(apart)} apart from the energy counter (bound {percent(ENERGY_APART)})",
        )


def _dead_counters(seen: _Seen) -> Iterator[Finding]:
    busy = max(seen.figures.gpu_util or 0.0, seen.figures.engine_active or 0.0)
    for number in (of.SM_ACTIVE, of.DRAM_ACTIVE):
        values = seen.watch.values(number)
        if busy > BUSY and len(values) >= DEAD_READINGS and not any(values):
            yield (
                "invalid",
                f"{_name(number)} is 0 in all {len(values)} readings while the GPU is busy for {percent(busy)} of the "
                f"time (bound {percent(BUSY)})",
            )


def _impossible_ratios(seen: _Seen) -> Iterator[Finding]:
    """Yield a finding where a ratio of the GPU is below 0 or above `RATIO_END`. The host's are not checked. Linux adds
    up pressure every two seconds, so one reading may hold what belongs to the one before."""
    for number in (n for n in seen.watch.telemetry.columns if n < of.OURS):
        sensor, values = of.SENSORS.get(number), seen.watch.values(number)
        wrong = [v for v in values if not 0 <= v <= RATIO_END]
        if sensor and sensor.unit == "ratio" and wrong:
            worst = max(wrong, key=abs)
            yield "invalid", f"{_name(number)} was {worst:.3g}, which is no ratio (bounds 0 and {RATIO_END})"


def _missing(seen: _Seen) -> Iterator[Finding]:
    rows = len(seen.watch.rows)
    for number in (n for n in of.PROFILED if n in seen.watch.telemetry.columns):
        lost = rows - len(seen.watch.values(number))
        if lost > MISSING * rows:
            yield "degraded", f"{_name(number)} is missing in {lost} of {rows} readings (bound {percent(MISSING)})"


def _stolen(seen: _Seen) -> Iterator[Finding]:
    stolen, used = seen.figures.stolen_cores, seen.figures.own_cores or seen.figures.host_cores
    if stolen is not None and used and stolen > STOLEN * used:
        yield (
            "noise",
            f"the hypervisor took {stolen:.2f} cores where {used:.2f} were used "
            f"({percent(stolen / used)}, bound {percent(STOLEN)})",
        )


def _throttled(seen: _Seen) -> Iterator[Finding]:
    share = seen.watch.mean(of.CPU_THROTTLED)
    if share is not None and share > THROTTLED:
        yield "noise", f"the CPU quota was used up for {percent(share)} of the time (bound {percent(THROTTLED)})"


def _busy_host(seen: _Seen) -> Iterator[Finding]:
    own, used, cores = seen.figures.own_cores, seen.figures.host_cores, seen.cores
    if own is None or used is None or not cores:
        return
    others, idle = (used - own) / cores, 1 - used / cores
    if others > OTHERS and idle < IDLE:
        yield (
            "noise",
            f"others used {used - own:.1f} of {cores} cores (bound {percent(OTHERS)}) and {percent(max(idle, 0.0))} "
            f"were idle (bound {percent(IDLE)})",
        )


def _name(number: int) -> str:
    return of.SENSORS[number].names[0]


STARVED = (_stolen, _throttled, _busy_host)
RULES: tuple[Callable[[_Seen], Iterator[Finding]], ...] = (
    _coverage,
    _gaps,
    _slowdowns,
    _foreign_processes,
    _errors,
    _power_limit,
    _energy,
    _dead_counters,
    _impossible_ratios,
    _clock_moves,
    _missing,
    _failed_sensors,
    *STARVED,
)
