"""Whoever measures in place of a session, and how many repeats are still to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from pytest_slmserve.plan.cases import Question

T = TypeVar("T")


SECOND_CHANCES = 1


class RemoteExecutor(Protocol):
    """Whoever measures in a session's stead."""

    def fetch(self, question: Question) -> None:
        """Wait until all that is wanted of it is known to the session. Raises what kept it from being measured."""

    def close(self) -> None:
        """Take what has come, and stop what still runs there; may be called twice."""


def wanted(known: Sequence[T], repeats: int, is_sound: Callable[[T], bool]) -> Iterator[int]:
    """Numbers of the repeats still to be made, while those that are made are put into `known`: until so many are sound,
    with a second chance for one that is not."""
    for _ in range(repeats - len(known) + SECOND_CHANCES):
        if sum(map(is_sound, known)) >= repeats:
            return
        yield len(known) + 1


def left(known: Sequence[T], repeats: int, is_sound: Callable[[T], bool]) -> int:
    """How many that are, if each that is made is sound."""
    return max(0, min(repeats - sum(map(is_sound, known)), repeats - len(known) + SECOND_CHANCES))
