"""A verdict: what was claimed, what was seen, how sure, and on which records it rests."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from pytest_slmserve.analysis.estimates import Interval, ends
from pytest_slmserve.schema.records import ReplicaGroup, hosts_of

T = TypeVar("T")
Seen = tuple[Interval, T]  # an estimate, and what it is of


class State(enum.Enum):
    """Inconclusive is neither: the noise is wider than the margin, or points are missing."""

    PASSES = "passes"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"


class Inconclusive(Exception):
    """The truth of an inconclusive verdict was used, or there is nothing to judge by.

    It is no AssertionError, because an expected failure must not swallow it.
    """


class Recorded(Protocol):
    """A point, or another summary of measurements, that names their records and has those that it rests on."""

    @property
    def records(self) -> tuple[str, ...]: ...

    @property
    def used(self) -> Sequence[ReplicaGroup]: ...


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """`assert verdict` is enough: it is true, false, or raises Inconclusive, and its repr tells why.

    value, low, high: the quantity judged and its 95 % interval, None if there is none. threshold: what it was compared
    with. n: number of measurements that it rests on, `records` their ids. again: loads whose further measurements would
    decide it, and `remedy` how long that takes; empty if no measurement would. more_repeats: of each of these loads;
    None for too many, or if it is not known.
    """

    claim: str
    subject: str
    state: State
    why: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    n: int = 0
    records: tuple[str, ...] = ()
    again: tuple[int, ...] = ()
    more_repeats: int | None = None
    remedy: str = ""

    @classmethod
    def inconclusive(
        cls, claim: str, subject: str, why: str, threshold: float | None = None, *seen: Recorded
    ) -> Verdict:
        """Return a verdict without a value: nothing can be said, for the reason `why`."""
        return cls.from_interval(claim, subject, State.INCONCLUSIVE, why, None, threshold, *seen)

    @classmethod
    def from_interval(
        cls,
        claim: str,
        subject: str,
        state: State,
        why: str,
        judged: Interval | None,
        threshold: float | None,
        *seen: Recorded,
    ) -> Verdict:
        """Return a verdict on an estimate that was compared with `threshold`. seen: points that it rests on, each
        counted once. No interval tells how far launches or hosts differ, so the reason says if a point is of one
        launch, or if not all points were measured on the same hosts."""
        value, low, high = (judged.value, judged.low, judged.high) if judged else (None, None, None)
        records = tuple(record for each in dict.fromkeys(point.records for point in seen) for record in each)
        if low is not None:
            once = any(len({group[0].launch for group in point.used}) == 1 for point in seen)
            hosts = {frozenset(hosts_of(chain.from_iterable(point.used)) - {None}) for point in seen} - {frozenset()}
            why += f"{', of one launch' if once else ''}{', on different hosts' if len(hosts) > 1 else ''}"
        return cls(claim, subject, state, why, value, low, high, threshold, len(records), records)

    def __bool__(self) -> bool:
        if self.state is State.INCONCLUSIVE:
            raise Inconclusive(repr(self))
        return self.state is State.PASSES

    def __repr__(self) -> str:
        return f"<{self.state.value}: {self.claim} [{self.subject}]: {self.why}>"


def all_of(states: Iterable[State]) -> State:
    """Return the state of several promises together: it fails if one fails, passes if all pass, and is inconclusive
    otherwise, also without promises."""
    seen = set(states)
    if State.FAILS in seen:
        return State.FAILS
    return State.PASSES if seen == {State.PASSES} else State.INCONCLUSIVE


def unsure(seen: Interval | None) -> str:
    """Return a clause for the end of a reason: without repeats an estimate has no interval. Empty if it has one."""
    return "; known for one repeat only: --slm-repeats 2" if seen and seen.low is None else ""


def within(seen: Interval, least: float, most: float) -> State:
    """Return whether the whole interval lies between two limits. It fails if the whole of it lies outside, on one
    side."""
    low, high = ends(seen)
    if least <= low and high <= most:
        return State.PASSES
    return State.FAILS if high < least or low > most else State.INCONCLUSIVE


def below(seen: Interval, threshold: float) -> State:
    """Return whether the whole interval lies below the threshold. It fails if the whole of it lies above."""
    low, high = ends(seen)
    return State.PASSES if high < threshold else State.FAILS if low > threshold else State.INCONCLUSIVE


def above(seen: Interval, threshold: float) -> State:
    """Return whether the whole interval lies above the threshold. It fails if the whole of it lies below."""
    low, high = ends(seen)
    return State.PASSES if low > threshold else State.FAILS if high < threshold else State.INCONCLUSIVE


def every(
    seen: Callable[[int], Sequence[Seen[T]]], least: float = -math.inf, most: float = math.inf
) -> tuple[State, Interval, T]:
    """Return the state of the promise that each of several estimates lies above `least` and below `most`, and the
    estimate that decides.

    It fails if one does not, corrected for having been chosen (Bonferroni), and passes if each does by its own
    interval. An estimate that is beyond a limit only by its own interval is returned with the corrected one.

    Args:
        seen: Returns the estimates, each with an interval that holds together with those of so many.
    """
    each = seen(1)
    corrected = seen(len(each))

    def decisive(judge: Callable[[Interval, float], State], limit: float, sign: int) -> tuple[State, Interval, T]:
        def reach(row: Seen[T], end: Callable[[Iterable[float]], float]) -> tuple[float, float]:
            return end(sign * each for each in ends(row[0])), sign * row[0].value

        broken = max(corrected, key=lambda row: reach(row, min))
        if judge(broken[0], limit) is State.FAILS:
            return State.FAILS, *broken
        nearest = max(range(len(each)), key=lambda place: reach(each[place], max))
        state = judge(each[nearest][0], limit)
        return (State.INCONCLUSIVE, *corrected[nearest]) if state is State.FAILS else (state, *each[nearest])

    def rank(side: tuple[State, Interval, T]) -> tuple[int, float]:
        low, high = ends(side[1])
        return (State.FAILS, State.INCONCLUSIVE, State.PASSES).index(side[0]), min(low - least, most - high)

    sides = ((below, most, 1), (above, least, -1))
    return min((decisive(*side) for side in sides if math.isfinite(side[1])), key=rank)
