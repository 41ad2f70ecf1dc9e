"""Sensors of a simulated device: of a run of the simulated engine, or live. Their names say that they are simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Telemetry
from pytest_slmserve.telemetry.base import Reading

INTERVAL_S = 0.25
CLOCK_HZ, SLOW_HZ = 1.98e9, 1.6e9
HW_THERMAL_SLOWDOWN = 0x40  # of NVML's clock event reasons
STEADY = {of.GPU_UTIL: 1.0, of.ENGINE_ACTIVE: 0.97, of.SM_ACTIVE: 0.7, of.POWER_LIMIT: 700.0}
BUSY = {of.SM_OCCUPANCY: 0.15, of.TENSOR_ACTIVE: 0.05, of.DRAM_ACTIVE: 0.85}
POWER_W = 350.0
QUIET = {of.TEMPERATURE: 50.0, of.GPU_PROCESSES: 1.0, of.FOREIGN_PROCESSES: 0.0}


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
    """Readings through the window and one interval around it, every one alike but for what is planted. imbalance: share
    by which the last of several GPUs takes less power than the first."""
    if gpus > 1:
        alike = {"memory_used": memory_used, "slow_clock": slow_clock, "hot": hot, "lost": lost}
        powers = [power_w * (1 - imbalance * i / (gpus - 1)) for i in range(gpus)]
        each = [simulated(window_s, ratios, power_w=watts, **alike) for watts in powers]  # type: ignore[arg-type]
        return replace(each[0], columns={}, gpus=tuple(one.columns for one in each))
    times = _times(*window_s)
    rows = len(times)
    clocks = [SLOW_HZ if slow_clock and i % 4 == 0 else CLOCK_HZ for i in range(rows)]
    constant = {**STEADY, **QUIET, **ratios, of.POWER: power_w, of.POWER_INSTANT: power_w}
    columns: dict[int, Sequence[float]] = {number: (value,) * rows for number, value in constant.items()}
    if memory_used is not None:
        columns[of.MEMORY_USED] = (float(memory_used),) * rows
    columns[of.ENERGY] = tuple(round(power_w * at, 3) for at in times)
    columns[of.SM_CLOCK] = tuple(clocks)
    columns[of.CLOCK_REASONS] = (float(HW_THERMAL_SLOWDOWN if hot else 0),) * rows
    notes = (f"simulated failed after {rows} readings: as it was told to",) if lost else ()
    return Telemetry(("simulated",), INTERVAL_S, times, (INTERVAL_S,) * rows, columns, notes=notes)


def _times(opens: float, closes: float) -> tuple[float, ...]:
    """Times of readings in seconds, from one before the window to one after it."""
    count = int((closes - opens) / INTERVAL_S) + 3
    return tuple(round(opens + (i - 1) * INTERVAL_S, 6) for i in range(count))


class SimulatedSource:
    """Read beside a user's own block where nothing real is measured: a busy GPU in which nothing changes."""

    name = "simulated"

    def __init__(self) -> None:
        self._last_s: float | None = None

    def read(self, now_s: float) -> Reading:
        span_s = None if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        power = {of.POWER: POWER_W, of.POWER_INSTANT: POWER_W, of.ENERGY: POWER_W * now_s}
        clock = {of.SM_CLOCK: CLOCK_HZ, of.CLOCK_REASONS: 0.0}
        return Reading({**STEADY, **QUIET, **BUSY, **power, **clock}, span_s)

    def close(self) -> None:
        """Nothing to free."""
