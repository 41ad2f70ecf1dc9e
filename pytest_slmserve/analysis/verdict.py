"""Verdicts on claims, SLOs and gates, with the reason, the interval and the records."""

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
Seen = tuple[Interval, T]  # an estimate and its subject


class State(enum.Enum):
    """Outcome of a verdict; inconclusive if the noise is too large, or points are missing."""

    PASSES = "passes"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"


class Inconclusive(Exception):
    """Error if an inconclusive verdict is asserted, or if there is nothing to evaluate.

    It is not an AssertionError, because an expected failure must not hide it.
    """


class Recorded(Protocol):
    """Point or other summary, with the ids of its records and the measurements of each repeat used."""

    @property
    def records(self) -> tuple[str, ...]: ...

    @property
    def used(self) -> Sequence[ReplicaGroup]: ...


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """Result to assert: `assert verdict` passes, fails, or raises Inconclusive, and its repr has the reason.

    Attributes:
        value: evaluated quantity, with its 95% interval from `low` to `high`.
        threshold: limit for `value`.
        n: number of measurements or requests.
        records: ids of the measurements.
        again: loads at which further measurements could resolve an inconclusive verdict.
        more_repeats: repeats that each of these needs; None if too many or unknown.
        remedy: how to resolve it, or why repeats would not help; may be empty.
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
        """Return a verdict on an estimate from the points `seen`, compared with `threshold`.

        No interval covers differences between launches or hosts, so the reason says if a point has only one launch, or
        if hosts differ.
        """
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
    """Return FAILS if one state fails, PASSES if all pass, and INCONCLUSIVE otherwise or without states."""
    seen = set(states)
    if State.FAILS in seen:
        return State.FAILS
    return State.PASSES if seen == {State.PASSES} else State.INCONCLUSIVE


def unsure(seen: Interval | None) -> str:
    """Return a clause that asks for repeats if an estimate has no interval, else ""."""
    return "; known for one repeat only: --slm-repeats 2" if seen and seen.low is None else ""


def within(seen: Interval, least: float, most: float) -> State:
    """Return PASSES if the interval lies between two limits, FAILS if it lies beyond one, else INCONCLUSIVE."""
    low, high = ends(seen)
    if least <= low and high <= most:
        return State.PASSES
    return State.FAILS if high < least or low > most else State.INCONCLUSIVE


def below(seen: Interval, threshold: float) -> State:
    """Return PASSES if the interval lies below the threshold, FAILS if it lies above, else INCONCLUSIVE."""
    low, high = ends(seen)
    return State.PASSES if high < threshold else State.FAILS if low > threshold else State.INCONCLUSIVE


def above(seen: Interval, threshold: float) -> State:
    """Return PASSES if the interval lies above the threshold, FAILS if it lies below, else INCONCLUSIVE."""
    low, high = ends(seen)
    return State.PASSES if low > threshold else State.FAILS if high < threshold else State.INCONCLUSIVE


def every(
    seen: Callable[[int], Sequence[Seen[T]]], least: float = -math.inf, most: float = math.inf
) -> tuple[State, Interval, T]:
    """Return whether all estimates lie above `least` and below `most`, and the estimate that decides.

    Each passes by its own interval, but fails only by the one corrected for having been chosen (Bonferroni).

    Args:
        seen: returns the estimates, with intervals that hold for this number of estimates together.
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
