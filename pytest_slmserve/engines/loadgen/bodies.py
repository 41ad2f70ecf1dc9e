"""The requests of a load as bytes, by their number; each time round with something of its own, where that is wanted."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_slmserve.engines.loadgen.target import Target


class Bodies:
    """mark: what stands in each body in the place of what differs from round to round; a body without it is always the
    same. rounds: what stands there in the first round through all bodies, in the second, and so on; none: as it is.

    Rounds go on from load to load, so that no two requests are alike while there are rounds enough.
    """

    def __init__(self, target: Target, bodies: Sequence[str], mark: str = "", rounds: Sequence[str] = ()) -> None:
        self._target, self._rounds, self._mark = target, rounds, mark
        self._bodies = [] if rounds else [target.request(body) for body in bodies]
        self._parts = [body.partition(mark) for body in bodies] if rounds else []
        self._first = self._last = 0

    def __len__(self) -> int:
        return len(self._bodies) or len(self._parts)

    def of(self, number: int) -> bytes:
        """The request of that number in a load."""
        if not self._rounds:
            return self._bodies[number % len(self._bodies)]
        at, index = divmod(number, len(self._parts))
        self._last = max(self._last, at)
        before, mark, after = self._parts[index]
        text = self._rounds[(self._first + at) % len(self._rounds)] if mark else ""
        return self._target.request(before + text + after)

    def begin_anew(self) -> None:
        """Another load begins: its rounds are others."""
        self._first, self._last = self._first + self._last + 1, 0
