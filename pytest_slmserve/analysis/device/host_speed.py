"""Speed of a host beside a window, relative to the fastest that it was known to be: by its canary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytest_slmserve.analysis.device.gpu_figures import device_figures, watched
from pytest_slmserve.analysis.stats.estimates import mean_of_known, percentile
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.sensors import CANARY_CPU

FASTEST = 0.05  # percentile of all pieces: the fastest alone may be a stroke of luck

Place = tuple[str | None, tuple[str, ...]]  # a host, and sources: a canary's name has its Python, which sets its speed


def fastest_pieces(measurements: Iterable[Measurement]) -> dict[Place, float]:
    """CPU time of the canary's fastest pieces in the windows of each host, in seconds."""
    found: dict[Place, list[float]] = {}
    for m in measurements:
        if (place := _place(m)) and (watch := watched(m.run)):
            found.setdefault(place, []).extend(watch.values(CANARY_CPU))
    return {place: fastest for place, values in found.items() if (fastest := percentile(values, FASTEST))}


def host_speed(measurements: Iterable[Measurement], fastest: Mapping[Place, float]) -> float | None:
    """Mean speed beside these windows: 1 where the host was as fast as in its fastest pieces."""
    speeds = []
    for m in measurements:
        cpu_s, best = device_figures(m.run).canary_cpu_s, fastest.get(_place(m) or (None, ()))
        speeds.append(best / cpu_s if best and cpu_s else None)
    return mean_of_known(speeds)


def waiting(canary_s: float | None, canary_cpu_s: float | None) -> float | None:
    """Share of a piece's time in which it had no core."""
    return max(0.0, 1 - canary_cpu_s / canary_s) if canary_s and canary_cpu_s is not None else None


def _place(measurement: Measurement) -> Place | None:
    seen = measurement.run.telemetry
    if seen is None or CANARY_CPU not in seen.columns:
        return None
    return measurement.environment.host, tuple(name for name in seen.sources if name.startswith("canary"))
