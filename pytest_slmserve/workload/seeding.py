"""Seeded choices that are the same for ever, on every machine and every Python.

Python guarantees the stream of `random.Random(seed).random()` for an integer seed, and nothing else of that module:
shuffle, choice and randrange may change. So everything here is made of that stream alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Literal, TypeVar

T = TypeVar("T")
Purpose = Literal["order", "ids", "arrivals", "trace"]

# Two streams for each seed in the numbers below 2^64, two above: apart for all seeds below 2^62.
STREAMS: dict[Purpose, int] = {"order": 0, "ids": 1, "arrivals": 1 << 64, "trace": (1 << 64) + 1}


def draws(seed: int, purpose: Purpose) -> Iterator[float]:
    """An endless stream in [0, 1), one for each purpose, so that one choice does not depend on another."""
    distinct = 2 * seed if seed >= 0 else -2 * seed - 1  # Random takes the absolute value of a seed
    draw = random.Random(2 * distinct + STREAMS[purpose]).random
    while True:
        yield draw()


def first_in_order(items: Iterable[T], seed: int, limit: int) -> list[T]:
    """The first `limit` of `items` in seeded order, while `items` stream by; memory grows with `limit` only.

    The order is total: a larger limit gives a longer list that begins the same.
    """
    keyed = zip(draws(seed, "order"), count(), items)
    return [item for _, _, item in heapq.nsmallest(limit, keyed)]
