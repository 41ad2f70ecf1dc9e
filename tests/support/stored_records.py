"""Measurements that can be a stored baseline: of an H200 of which all is known, with its sensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strategies import H200, RESOLVED, WELL, Column, measurement, planted_telemetry

from pytest_slmserve.archive.store import Archive
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Environment, Measurement, Resolved


def stored(path: Path, *measurements: Measurement) -> Path:
    """An archive of these, without a session."""
    with Archive.open(path) as opened:
        for one in measurements:
            opened.add(one)
    return path


KNOWN = replace(
    H200, driver="580.159.04", cuda="13.0", torch="2.11.0", operating_system="Linux", cpu="Xeon", cores=16, host="one"
)
LIMITS = replace(RESOLVED, max_num_batched_tokens=8192, max_model_len=2048, chunked_prefill=True, prefix_caching=False)
BUSY: dict[int, Column] = {**WELL, sensors.ENGINE_ACTIVE: 1.0, sensors.MEMORY_CLOCK: 3201e6}


def engine_alone(
    rate: float = 1000.0, concurrency: int = 8, *, environment: Environment = KNOWN, resolved: Resolved = LIMITS,
    columns: Mapping[int, Column] = BUSY, sensed: bool = True, **facts: object,
) -> Measurement:  # fmt: skip
    """One measurement; keyword arguments of `strategies.measurement`. sensed: were there sensors?"""
    made = measurement(concurrency, rate, environment=environment, resolved=resolved, **facts)  # type: ignore[arg-type]
    closes_s = made.run.window_s[1]
    readings = planted_telemetry(columns, until_s=1.1 * closes_s, interval_s=closes_s / 32)
    return replace(made, run=replace(made.run, telemetry=readings if sensed else None))


def having(measurements: Iterable[Measurement], **facts: Any) -> list[Measurement]:
    """The same with other facts; those of a part of a record in a dictionary: `spec={"seed": 7}`."""

    def changed(m: Measurement) -> Measurement:
        parts = {k: replace(getattr(m, k), **v) if isinstance(v, dict) else v for k, v in facts.items()}
        return replace(m, **parts)

    return [*map(changed, measurements)]


def repeats(rates: Sequence[float], concurrency: int = 8, **facts: object) -> list[Measurement]:
    """One after the other, of one launch unless told."""
    return [engine_alone(rate, concurrency, repeat=i, **facts) for i, rate in enumerate(rates)]  # type: ignore[arg-type]


BASELINE = repeats([1000, 1001, 1002])
NEW = replace(KNOWN, vllm="0.27.0", torch="2.12.0")


def candidate(factor: float, **facts: object) -> list[Measurement]:
    """What takes `factor` times as long as `BASELINE`."""
    return repeats([1000 / factor, 1001 / factor, 1002 / factor], **{"environment": NEW, "launch": "launch-2", **facts})
