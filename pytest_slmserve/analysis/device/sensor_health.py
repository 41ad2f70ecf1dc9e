"""The sensors' findings on a run's window: what makes it invalid, what degrades it, and what disturbed it. Each is one
sentence with its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from statistics import fmean, median
from typing import Literal, get_args

from pytest_slmserve.analysis.device import gpu_figures
from pytest_slmserve.analysis.device.gpu_figures import DeviceFigures, SensorWindow
from pytest_slmserve.analysis.stats.estimates import grouped, percent
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.records import Replica, Run

HealthState = Literal["invalid", "degraded", "unknown", "ok"]  # the worst first
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
    """The state of a run's window by its sensors. Its state is "unknown" if nothing was sampled.

    reasons: of the state, the worst first; none if it is "ok". noise: what slowed the host or hid it from the sensors;
    an interval covers it. starved: processes of the run waited for CPU cores that others had.
    """

    state: HealthState
    reasons: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    starved: bool = False


def health(
    run: Run, environment: Environment | None = None, replica: Replica | None = None, even: bool = True
) -> Health:
    """The verdict of the sensors over one run's window. An engine on several GPUs has the state of the worst of them,
    and each reason names its GPU.

    Args:
        environment: Has the number of cores of the host, without which a busy host is not noticed.
        replica: The engine's part in a run of several engines, whose processes use the GPU as well.
        even: Whether the load is the same all through the window.
    """
    if gpus := gpu_figures.runs_of_each_gpu(run):
        found = [health(one, environment, replica, even) for one in gpus]
        reasons = tuple(f"GPU {i}: {text}" for i, one in enumerate(found) for text in one.reasons)
        noise = tuple(f"GPU {i}: {text}" for i, one in enumerate(found) for text in one.noise)
        worst = min((one.state for one in found), key=get_args(HealthState).index)
        return Health(worst, reasons, noise, starved=any(one.starved for one in found))
    watch = gpu_figures.watched(run)
    if watch is None:
        return Health("unknown", ("no telemetry was taken in the window",))
    if not any(watch.values(number) for number in watch.telemetry.columns):
        return Health("unknown", ("no sensor said anything in the window",))
    figures = gpu_figures.device_figures(run)
    own = 1  # vLLM computes in one process per GPU; under MPS there is a server as well
    if replica and replica.sharing != "gpus":
        own = replica.count + (replica.sharing == "mps")
    starving = list(_busy_host(watch, figures, environment.cores if environment else None))
    findings = [
        *_unseen_time(watch, figures),
        *_gpu_events(watch, own),
        *_wrong_readings(watch, figures),
        *_clock_moves(watch, even),
        *_lost_sensors(watch),
        *starving,
    ]
    kinds = grouped(findings, itemgetter(0))
    invalid, degraded, noise = (
        tuple(text for _, text in kinds.get(kind, ())) for kind in ("invalid", "degraded", "noise")
    )
    state: HealthState = "invalid" if invalid else "degraded" if degraded else "ok"
    return Health(state, (*invalid, *degraded), noise, starved=bool(starving))


def _unseen_time(watch: SensorWindow, figures: DeviceFigures) -> Iterator[Finding]:
    """Yield a finding if profiled counters miss too much of the window, or a GPU's sensors have no reading for too
    long, since some report a moment only. The host's sensors are counters, which miss nothing. One interval may be
    missing whatever its share: the one under way when the run ends."""
    telemetry, (opens, closes), share = watch.telemetry, watch.window_s, figures.coverage
    missing_s, allowed_s = (1 - (share or 0.0)) * (closes - opens), (1 - COVERAGE) * (closes - opens)
    profiled = any(number in telemetry.columns for number in of.PROFILED)
    if share is not None and profiled and missing_s > max(allowed_s, telemetry.interval_s):
        yield "noise", f"profiled counters cover {percent(share)} of the window (bound {percent(COVERAGE)})"
    if any(number < of.OURS for number in telemetry.columns):
        moments = [opens, *sorted(at for at in telemetry.time_s if opens < at < closes), closes]
        longest = max(after - before for before, after in pairwise(moments))
        bound = max(GAP_INTERVALS * telemetry.interval_s, GAP_S)
        if longest > bound:
            yield "noise", f"no reading for {longest:.1f} s of the window (bound {bound:.1f} s)"


def _gpu_events(watch: SensorWindow, own_processes: int) -> Iterator[Finding]:
    """Yield a finding for each slowdown, foreign process, error and change of the power limit. own_processes: of this
    run, that compute on the GPU. The Xid is the number of the last error and stays: only a change is an error."""
    bits = [int(value) for value in watch.values(of.CLOCK_REASONS)]
    for bit, counter, name in SLOWDOWNS:
        told = sum(bool(each & bit) for each in bits)
        share = watch.share_grown(counter) if counter else None
        if told:
            yield "invalid", f"{name}: in {told} of {len(bits)} readings of the clock reasons (bound 0)"
        elif share is not None and share > CAPPED:
            yield "invalid", f"{name}: {percent(share)} of the window by its counter (bound {percent(CAPPED)})"
    foreign, processes = watch.values(of.FOREIGN_PROCESSES), max(watch.values(of.GPU_PROCESSES), default=0)
    if foreign and max(foreign) > 0:
        yield "invalid", f"{max(foreign):.0f} processes of others computed on the GPU (bound 0)"
    elif not foreign and processes > own_processes:
        what = f"{processes:.0f} processes computed on the GPU, and whose they are is not known"
        yield "degraded", f"{what} (bound {own_processes})"
    for before, now in pairwise(watch.with_before(of.XID)):
        if now not in (before, 0):
            yield "invalid", f"the GPU reported Xid {now:.0f} (before: {before:.0f})"
    broken = {of.ECC_DOUBLE_BIT: "memory errors beyond repair", of.REMAPPED_ROWS: "remapped memory rows"}
    for number, what in broken.items():
        values = watch.with_before(number)
        if values and max(values) > values[0]:
            yield "invalid", f"{what} grew from {values[0]:.0f} to {max(values):.0f} (bound: no growth)"
    limits = watch.with_before(of.POWER_LIMIT)
    if limits and min(limits) < max(limits):
        yield "invalid", f"the power limit moved between {min(limits):.0f} W and {max(limits):.0f} W (bound: no change)"


def _wrong_readings(watch: SensorWindow, figures: DeviceFigures) -> Iterator[Finding]:
    """Yield a finding for each sensor that says what cannot be: a counter of energy that falls or stands still, power
    that differs from it, a unit at 0 while the GPU is busy, and a ratio of the GPU below 0 or above `RATIO_END`. The
    host's ratios are not checked: Linux adds up pressure every two seconds, so one reading may hold what belongs to the
    one before."""
    readings, apart, (opens, closes) = watch.readings(of.ENERGY), figures.energy_deviation, watch.window_s
    seconds = readings[-1].at_s - readings[0].at_s if readings else 0.0
    fall = next(((a.value, b.value) for a, b in pairwise(readings) if b.value < a.value), None)
    if fall:
        yield "invalid", f"the energy counter fell from {fall[0]:.0f} J to {fall[1]:.0f} J (bound: no fall)"
    elif seconds >= STILL_S and readings[-1].value == readings[0].value:
        yield "invalid", f"the energy counter stood still for {seconds:.1f} s (bound {STILL_S:.1f} s)"
    if not fall and apart is not None and abs(apart) > ENERGY_APART and closes - opens >= ENERGY_WINDOW_S:
        what = f"integrated power is {percent(apart)} apart from the energy counter"
        yield "degraded", f"{what} (bound {percent(ENERGY_APART)})"
    busy = max(figures.gpu_util or 0.0, figures.engine_active or 0.0)
    for number in (of.SM_ACTIVE, of.DRAM_ACTIVE):
        values = watch.values(number)
        if busy > BUSY and len(values) >= DEAD_READINGS and not any(values):
            what = f"{of.SENSORS[number].names[0]} is 0 in all {len(values)} readings while the GPU is busy"
            yield "invalid", f"{what} for {percent(busy)} of the time (bound {percent(BUSY)})"
    for sensor in (of.SENSORS[n] for n in watch.telemetry.columns if n < of.OURS and n in of.SENSORS):
        wrong = [v for v in watch.values(sensor.number) if not 0 <= v <= RATIO_END]
        if sensor.unit == "ratio" and wrong:
            what = f"{sensor.names[0]} was {max(wrong, key=abs):.3g}, which is no ratio"
            yield "invalid", f"{what} (bounds 0 and {RATIO_END})"


def _clock_moves(watch: SensorWindow, even: bool) -> Iterator[Finding]:
    """Yield a finding if the SM clock fell. Readings at which the GPU says that it idles do not count. Under the power
    limit the clock dithers from reading to reading around what the load takes, and that must stay: there the window's
    halves are compared, if the load has no halves that differ, as a job's of which prompts come first."""
    rows = []
    for row in watch.rows:
        clock, reasons = watch.value(of.SM_CLOCK, row) or 0, int(watch.value(of.CLOCK_REASONS, row) or 0)
        if clock > 0 and not reasons & GPU_IDLE:  # unknown reasons are none
            rows.append((clock, reasons))
    if any(reasons & gpu_figures.POWER_CAP for _, reasons in rows) and len(rows) > 1:
        half = len(rows) // 2
        then, now = (fmean(clock for clock, _ in part) for part in (rows[:half], rows[half:]))
        if even and abs(now / then - 1) > CLOCK_DROP:
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


def _lost_sensors(watch: SensorWindow) -> Iterator[Finding]:
    """Yield a finding for each profiled counter that is missing in too many readings, and each failure of a source."""
    rows = len(watch.rows)
    for number in (n for n in of.PROFILED if n in watch.telemetry.columns):
        lost = rows - len(watch.values(number))
        if lost > MISSING * rows:
            name = of.SENSORS[number].names[0]
            yield "degraded", f"{name} is missing in {lost} of {rows} readings (bound {percent(MISSING)})"
    for note in watch.telemetry.notes:
        yield "degraded", f"a sensor was lost: {note}"


def _busy_host(watch: SensorWindow, figures: DeviceFigures, cores: int | None) -> Iterator[Finding]:
    """Yield a finding for each sign that processes of ours waited for CPU cores."""
    own, used, stolen = figures.own_cores, figures.host_cores, figures.stolen_cores
    if stolen is not None and (base := own or used) and stolen > STOLEN * base:
        what = f"the hypervisor took {stolen:.2f} cores where {base:.2f} were used"
        yield "noise", f"{what} ({percent(stolen / base)}, bound {percent(STOLEN)})"
    share = watch.mean(of.CPU_THROTTLED)
    if share is not None and share > THROTTLED:
        yield "noise", f"the CPU quota was used up for {percent(share)} of the time (bound {percent(THROTTLED)})"
    if own is not None and used is not None and cores:
        others, idle = (used - own) / cores, 1 - used / cores
        if others > OTHERS and idle < IDLE:
            what = f"others used {used - own:.1f} of {cores} cores (bound {percent(OTHERS)})"
            yield "noise", f"{what} and {percent(max(idle, 0.0))} were idle (bound {percent(IDLE)})"
