"""A verdict: what was claimed, what was seen, how sure, and on which records it rests."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_slmserve.analysis.stats.estimates import Interval, ends


class State(enum.Enum):
    """Undecided is neither: the noise is wider than the margin, or points are missing."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


class Undecided(Exception):
    """The truth of an undecided verdict was asked. Not an AssertionError: an expected failure must not swallow it."""


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """`assert verdict` is enough: it is true, false, or raises Undecided, and its repr tells why.

    value, low, high: the quantity judged and its 95 % interval, None where there is none. bound: what it was held
    against. n: measurements it rests on, `records` their ids.
    """

    claim: str
    subject: str
    state: State
    why: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    n: int = 0
    records: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        if self.state is State.UNDECIDED:
            raise Undecided(repr(self))
        return self.state is State.HOLDS

    def __repr__(self) -> str:
        return f"<{self.state.value}: {self.claim} [{self.subject}]: {self.why}>"


def all_of(states: Iterable[State]) -> State:
    """Of several promises: fails where one is broken, holds where all are kept; of none: undecided."""
    seen = set(states)
    if State.FAILS in seen:
        return State.FAILS
    return State.HOLDS if seen == {State.HOLDS} else State.UNDECIDED


def below(seen: Interval, bound: float) -> State:
    """Does the whole interval lie below the bound? Fails where the whole of it lies above."""
    low, high = ends(seen)
    return State.HOLDS if high < bound else State.FAILS if low > bound else State.UNDECIDED


def above(seen: Interval, bound: float) -> State:
    """Does the whole interval lie above the bound? Fails where the whole of it lies below."""
    low, high = ends(seen)
    return State.HOLDS if low > bound else State.FAILS if high < bound else State.UNDECIDED
