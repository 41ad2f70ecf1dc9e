"""Noise of a host's speed, by which other studies make windows in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice, repeat

from pytest_slmserve.engines.simulated import TICK_S
from pytest_slmserve.schema.errors import BadUsage

BLOCK = 16  # ticks of recorded noise that stay together
SLOW_SHARE, MINUTES_S = 0.6, 120.0  # of a core of two speeds
OCTAVES = tuple(TICK_S * 2**i for i in range(10))  # time constants of 1/f noise: to two minutes


class HostNoise:
    """The factor of a host's speed at a time. Raises BadUsage for a kind that is not listed here.

    kind: "white:SD", "ou:SD:SECONDS" (Ornstein-Uhlenbeck with that time constant), "pink:SD" (1/f),
    "slow:SHARE:DEPTH:SECONDS" (slower by DEPTH for a SHARE of the time, so many seconds each time), "speeds:TIMES" (a
    core that takes TIMES as long for 0.5 to 4 s at a time, more or less often over minutes), "states:APART" (two
    states, one for a whole launch), several of these joined with "+", or a sequence of recorded factors, one for each
    tick, which is resampled in blocks. SD is the relative standard deviation of a tick.
    """

    def __init__(self, kind: str | Sequence[float], seed: str) -> None:
        self._factors: list[float] = []
        self._more = _factors(kind, random.Random(seed))

    def __call__(self, at_s: float) -> float:
        tick = int(at_s / TICK_S)
        if tick >= len(self._factors):
            self._factors += islice(self._more, 2 * tick + 64 - len(self._factors))
        return self._factors[tick]


def _factors(kind: str | Sequence[float], chance: random.Random) -> Iterator[float]:
    """An endless series of factors, one for each tick."""

    def ou(sd: float, seconds: float) -> Iterator[float]:
        value, keeps = chance.gauss(0, sd), math.exp(-TICK_S / seconds)
        while True:
            yield value
            value = keeps * value + math.sqrt(1 - keeps**2) * chance.gauss(0, sd)

    def slowdowns(share: float, depth: float, seconds: float) -> Iterator[float]:
        """A Markov chain of two states, which is slow for `share` of the time."""
        slow = chance.random() < share
        ends = {True: TICK_S / seconds, False: TICK_S / seconds * share / (1 - share)}
        while True:
            yield 1 - depth if slow else 1.0
            slow = slow ^ (chance.random() < ends[slow])

    def speeds(times: float) -> Iterator[float]:
        """As on hosts whose virtual cores share real ones: 60% of the time slow, in the mean."""
        slow_share, slow = ou(1.0, MINUTES_S), chance.random() < SLOW_SHARE
        while True:
            ticks = round(chance.uniform(0.5, 4) / TICK_S)
            often = list(islice(slow_share, ticks))[-1] + math.log(SLOW_SHARE / (1 - SLOW_SHARE))
            yield from repeat(1 / times if slow else 1.0, ticks)
            slow = chance.random() < 1 / (1 + math.exp(-often))

    if not isinstance(kind, str):
        starts = (chance.randrange(max(1, len(kind) - BLOCK + 1)) for _ in count())
        return chain.from_iterable(kind[start : start + BLOCK] for start in starts)
    if "+" in kind:
        return map(math.prod, zip(*(_factors(part, chance) for part in kind.split("+"))))
    name, *numbers = kind.split(":")
    with suppress(ValueError):
        match name, [float(number) for number in numbers]:
            case "white", [sd]:
                return (math.exp(chance.gauss(0, sd)) for _ in count())
            case "ou", [sd, seconds]:
                return map(math.exp, ou(sd, seconds))
            case "pink", [sd]:
                each = [ou(sd / math.sqrt(len(OCTAVES)), seconds) for seconds in OCTAVES]
                return map(math.exp, map(sum, zip(*each)))
            case "slow", [share, depth, seconds]:
                return slowdowns(share, depth, seconds)
            case "speeds", [times]:
                return speeds(times)
            case "states", [apart]:
                return repeat(math.exp(apart / 2 * chance.choice((-1, 1))))
    raise BadUsage(f"host_noise={kind} is no noise of a host", "host_noise=pink:0.12")
