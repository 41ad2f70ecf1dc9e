"""Selection of the sources that answer on this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.records import Telemetry
from pytest_slmserve.telemetry.base import NO_GPU, Reading, SensorSource
from pytest_slmserve.telemetry.dcgm import ADDRESS, open_dcgm
from pytest_slmserve.telemetry.dcgm_exporter import ExporterSource
from pytest_slmserve.telemetry.host_counters import HostSource, open_speed_probe
from pytest_slmserve.telemetry.nvml import open_nvml
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler, merged_readings


class SeveralGpus:
    """Several GPUs as one source: the values of each stay apart, because a sum would hide the one that lags.

    gpus: the sources of each, in the order in which an engine has the GPUs. One that fails ends them all: the others
    would be taken for the whole."""

    def __init__(self, gpus: Sequence[Sequence[SensorSource]]) -> None:
        names = dict.fromkeys(" + ".join(source.name for source in sources) for sources in gpus)
        self.name = f"{len(gpus)} x {' or '.join(names)}"
        self._gpus = gpus

    def read(self, now_s: float) -> Reading:
        each = [merged_readings([source.read(now_s) for source in sources]) for sources in self._gpus]
        missing = tuple(f"GPU {i}: {why}" for i, reading in enumerate(each) for why in reading.missing)
        return Reading({}, each[0].span_s, missing, tuple(reading.values for reading in each))

    def close(self) -> None:
        for source in chain.from_iterable(self._gpus):
            source.close()


def open_sampler(
    choice: str, device: str, interval_s: float, others: Sequence[str] = ()
) -> tuple[Sampler | None, list[str]]:
    """A sampler of the sources that `choice` (the text of --slm-telemetry) names, and notes for the user.

    device: what is measured, a GPU's UUID or "cpu". others: further GPUs that are measured with it. "auto" takes the
    sources that are there and notes those that are not; anything else raises SensorFailed if it is not there, BadUsage
    if it cannot be.
    """
    if choice == "off":
        return None, []
    interval_s = Sampler((), interval_s).interval_s  # refuses the interval before anything is opened
    notes: list[str] = []
    host = [*_tried(HostSource, notes), open_speed_probe(device)]
    if choice == "host" or (choice == "auto" and device in NO_GPU):
        return Sampler(host, interval_s), notes
    if device in NO_GPU:
        raise BadUsage(f"--slm-telemetry {choice} asks a GPU, and none is measured here", "--slm-telemetry auto")
    each = [_sources_of_gpu(choice, gpu, interval_s, notes) for gpu in (device, *others)]
    sources = each[0]
    if others and all(each):
        sources = [SeveralGpus(each)]
    elif others:  # a part of them would be taken for the whole
        for source in chain.from_iterable(each):
            source.close()
        sources = []
        notes.append("telemetry: not every GPU of the engine has sensors that answer, so none is read")
    return Sampler([*sources, *host], interval_s), list(dict.fromkeys(notes))


def _sources_of_gpu(choice: str, device: str, interval_s: float, notes: list[str]) -> list[SensorSource]:
    match choice.partition("=")[::2]:
        case "auto", _:
            # NVML with the profiling counters of the GPU (Hopper and newer); else with those of DCGM, if it runs.
            nvml = _tried(partial(open_nvml, device, profile=True), notes)
            if nvml and nvml[0].name == "nvml-gpm":
                return nvml
            why: list[str] = []
            dcgm = _tried(partial(open_dcgm, device, interval_s=interval_s), why)
            none = "no profiling counters (SM, DRAM and tensor activity): NVML has none for this GPU"
            notes += [f"{none}; {reason}" for reason in why]
            return [*dcgm, *nvml]  # of what both have, DCGM's counts
        case "gpm", _:
            source = open_nvml(device, profile=True)
            if source.name != "nvml-gpm":
                source.close()
                hint = "--slm-telemetry dcgm, or auto"
                raise SensorFailed("this GPU has no GPM counters (Hopper and newer have)", hint)
            return [source]
        case "nvml", _:
            return [open_nvml(device, profile=False)]
        case "dcgm", address:
            return [open_dcgm(device, interval_s=interval_s, address=address or ADDRESS)]
        case _:
            return [ExporterSource(choice, device)]


def _tried(opened: Callable[[], SensorSource], notes: list[str]) -> list[SensorSource]:
    try:
        return [opened()]
    except SensorFailed as error:
        notes.append(f"telemetry: {error.problem}")
        return []


CLOCK_HZ, SLOW_HZ = 1.98e9, 1.6e9
HW_THERMAL_SLOWDOWN = 0x40  # of NVML's clock event reasons
STEADY = {of.GPU_UTIL: 1.0, of.ENGINE_ACTIVE: 0.97, of.SM_ACTIVE: 0.7, of.POWER_LIMIT: 700.0}
BUSY = {of.SM_OCCUPANCY: 0.15, of.TENSOR_ACTIVE: 0.05, of.DRAM_ACTIVE: 0.85}
POWER_W = 350.0
QUIET = {of.TEMPERATURE: 50.0, of.GPU_PROCESSES: 1.0, of.FOREIGN_PROCESSES: 0.0}


def simulated_values(at_s: float, power_w: float, *, slow_clock: bool = False, hot: bool = False) -> dict[int, float]:
    """Values of a busy GPU in which nothing changes, `at_s` seconds after its energy counter began."""
    power = {of.POWER: power_w, of.POWER_INSTANT: power_w, of.ENERGY: round(power_w * at_s, 3)}
    reasons = float(HW_THERMAL_SLOWDOWN if hot else 0)
    return {**STEADY, **QUIET, **power, of.SM_CLOCK: SLOW_HZ if slow_clock else CLOCK_HZ, of.CLOCK_REASONS: reasons}


def simulated(
    window_s: tuple[float, float],
    ratios: Mapping[int, float],
    *,
    power_w: float,
    memory_used: float | None = None,
    slow_clock: bool = False,
    hot: bool = False,
    lost: bool = False,
    gpus: int = 1,
    imbalance: float = 0.0,
) -> Telemetry:
    """Readings through the window and one interval around it, all alike except for what is planted. imbalance: share by
    which the last of several GPUs takes less power than the first."""
    opens, closes = window_s
    rows = int((closes - opens) / INTERVAL_S) + 3  # from one before the window to one after it
    times = tuple(round(opens + (i - 1) * INTERVAL_S, 6) for i in range(rows))
    more = {**ratios, **({} if memory_used is None else {of.MEMORY_USED: float(memory_used)})}
    each = []
    for gpu in range(gpus):
        watts = power_w * (1 - imbalance * gpu / max(1, gpus - 1))
        slow = (slow_clock and i % 4 == 0 for i in range(rows))
        read = [simulated_values(at, watts, slow_clock=is_slow, hot=hot) | more for at, is_slow in zip(times, slow)]
        each.append({number: tuple(values[number] for values in read) for number in read[0]})
    columns, several = (each[0], ()) if gpus == 1 else ({}, tuple(each))
    notes = (f"simulated failed after {rows} readings: as it was told to",) if lost else ()
    return Telemetry(("simulated",), INTERVAL_S, times, (INTERVAL_S,) * rows, columns, notes=notes, gpus=several)


class SimulatedSource:
    """A busy GPU in which nothing changes, read during a user's own block if nothing real is measured."""

    name = "simulated"

    def __init__(self) -> None:
        self._last_s: float | None = None

    def read(self, now_s: float) -> Reading:
        span_s = None if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        return Reading({**simulated_values(now_s, POWER_W), **BUSY}, span_s)

    def close(self) -> None:
        """Nothing to free."""
