"""The column "valid" of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class AnyPoint(Protocol):
    """A point of any kind."""

    @property
    def valid(self) -> bool: ...
    @property
    def degraded(self) -> Sequence[str]: ...
    @property
    def left_out(self) -> int: ...


def valid_cell(point: AnyPoint) -> str:
    """partly: some repeats were left out. degraded: all that are left have something against them."""
    if not point.valid:
        return "NO"
    if point.degraded:
        return "degraded"
    return "partly" if point.left_out else "yes"
