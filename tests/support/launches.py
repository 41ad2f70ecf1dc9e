"""Launches of a gate with planted rates: what pairs of sides would have measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stored_records import LIMITS, engine_alone

from pytest_slmserve.schema.errors import Side
from pytest_slmserve.schema.records import GateLaunch, Measurement

LOADS = (8, 64)
RATES = (1000.0, 5000.0)  # output tokens/s at each load


def launch(
    side: Side, pair: int = 1, *, speed: float = 1.0, loads: Iterable[int] = LOADS, kv_blocks: int | None = 1365,
    ready_s: float | None = 20.0, name: str = "", **facts: object,
) -> list[Measurement]:  # fmt: skip
    """One fresh start, measured at each load; keyword arguments of `engine_alone`. speed: of the usual rates."""
    second = (side == "candidate") == (pair % 4 in (0, 1))
    resolved = replace(LIMITS, kv_blocks=kv_blocks, ready_s=ready_s)
    rates, paired, made = dict(zip(LOADS, RATES)), GateLaunch("gate", pair, side, second), []
    for at, n in enumerate(loads):
        m = engine_alone(speed * rates[n], n, resolved=resolved, launch=name or f"{pair}-{side}", **facts)  # type: ignore[arg-type]
        measured_at = f"2026-01-01T00:{pair:02d}:{10 * second + at:02d}.000+00:00"
        made.append(replace(m, measured_at=measured_at, paired=paired))
    return made


def pair_of_launches(pair: int = 1, *, speed: float = 1.0, **facts: object) -> list[Measurement]:
    """baseline and candidate; speed, facts: of the candidate."""
    return [*launch("baseline", pair), *launch("candidate", pair, speed=speed, **facts)]  # type: ignore[arg-type]


def pairs(count: int, *, speed: float = 1.0, **facts: object) -> list[Measurement]:
    return [m for n in range(1, count + 1) for m in pair_of_launches(n, speed=speed, **facts)]
