"""Do both sides answer the same? Greedy tokens of the same requests, and where they first differ.

With the same weights and prompts the likeliest token is the same unless roundings differ: another kernel, another order
of sums. With dummy weights all tokens are nearly as likely, so a difference is no fault by itself. It is told, not
judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

Outputs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Differs:
    """The first token that differs: of which request (from 1), at which position (from 1), on each side."""

    request: int
    position: int
    baseline: int | None
    candidate: int | None


@dataclass(frozen=True, slots=True)
class Answers:
    """requests, tokens: how many of each were asked for. steady: launches of one side agree with each other."""

    requests: int
    tokens: int
    steady: bool
    differs: Differs | None


def compare_outputs(baseline: Sequence[Outputs], candidate: Sequence[Outputs]) -> Answers | None:
    """Comparison of the tokens from the launches of each side; None where one side was not requested to answer."""
    if not any(baseline) or not any(candidate):
        return None
    before, after = (next(filter(None, side)) for side in (baseline, candidate))
    steady = all(len(set(filter(None, side))) == 1 for side in (baseline, candidate))
    return Answers(len(before), max(map(len, before)), steady, first_difference(before, after))


def first_difference(baseline: Outputs, candidate: Outputs) -> Differs | None:
    for request, (before, after) in enumerate(zip_longest(baseline, candidate, fillvalue=()), 1):
        for position, (one, other) in enumerate(zip_longest(before, after), 1):
            if one != other:
                return Differs(request, position, one, other)
    return None
