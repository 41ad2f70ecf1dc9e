"""Launches of a gate with planted rates: what pairs of sides would have measured, one after the other or at once."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

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


remembered = cache(engine_alone)
HAPPENS = 1.5, -0.5, 0.25, -1.25, 0.75, -1.0, 1.0, -0.75  # of mean 0


def launch_of_both(
    number: int = 1, *, windows: int = 10, loads: Iterable[int] = LOADS, seconds: float = 1.0, kernels: float = 1.0,
    share: float | None = 0.9, noise: float = 0.0, busy_noise: float = 0.0, made: int = 0, **facts: object,
) -> list[Measurement]:  # fmt: skip
    """Windows of both sides in turn, in the order ABBA, at each load.

    seconds, kernels: of the candidate, over those of the baseline. share: of the time in which a kernel runs in the
    baseline's; None: busy seconds are not counted. noise, busy_noise: of the ratio of a pair of windows, times
    `HAPPENS`. made: how often it was begun before.
    """
    rates, found = dict(zip(LOADS, RATES)), list[Measurement]()
    for n in loads:
        for window in range(1, windows + 1):
            turn: tuple[Side, Side] = ("baseline", "candidate") if window % 2 else ("candidate", "baseline")
            seconds_of = remembered(rates[n], n).run.window_s
            happens = HAPPENS[window % len(HAPPENS)]
            for side in turn:
                rate, busy_s = rates[n], share and share * (seconds_of[1] - seconds_of[0])
                if side == "candidate":
                    rate *= math.exp(noise * happens) / seconds
                    busy_s = busy_s and busy_s * kernels * math.exp(busy_noise * happens)
                part = GateLaunch("gate", number, side, side != turn[0], window=window, busy_s=busy_s)
                m = engine_alone(rate, n, **facts) if facts else remembered(rate, n)  # type: ignore[arg-type]
                at = f"2026-01-01T{made:02d}:{number:02d}:00.{len(found):03d}+00:00"
                found.append(replace(m, launch=f"{number}-{side}-{made}", measured_at=at, paired=part))
    return found
