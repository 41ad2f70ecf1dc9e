"""Bisection of releases: which release to gate next, and which may be the first slow one.

Each release is gated against the first one. What is not known of a release, since its gate was inconclusive or it could
not be started, is never guessed: its neighbours are gated instead, and it stays among those that may be the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_slmserve.analysis.verdict import State


def suspects(releases: Sequence[str], outcomes: Mapping[str, State]) -> Sequence[str]:
    """Releases of which one is the first slow one, ascending: a single one where it is known.

    releases: ascending, the good one first and the slow one last. outcomes: of the gates so far, against the good one;
    UNDECIDED also for a release that could not be started.
    """
    slow = next(i for i, each in enumerate(releases) if i == len(releases) - 1 or outcomes.get(each) is State.FAILS)
    good = max(i for i, each in enumerate(releases[:slow]) if i == 0 or outcomes.get(each) is State.HOLDS)
    return releases[good + 1 : slow + 1]


def next_release(releases: Sequence[str], outcomes: Mapping[str, State]) -> str | None:
    """The release to gate next: of those between that were not gated the nearest to the middle; None: all were."""
    between = suspects(releases, outcomes)[:-1]
    middle = (len(between) - 1) / 2
    left = [i for i, each in enumerate(between) if each not in outcomes]
    return between[min(left, key=lambda i: abs(i - middle))] if left else None
