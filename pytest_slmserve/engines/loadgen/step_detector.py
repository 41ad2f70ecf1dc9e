"""Steps of an engine, as seen by one of its streams: an engine step gives one token to every stream that decodes."""

from __future__ import annotations

from collections.abc import Callable

from pytest_slmserve.engines.loadgen.streams import RequestStream

SAME_STEP = 0.5  # of a step's usual time: it is told to the streams one after the other
NEVER = float("-inf")


class Lead:
    """Follows one stream to its end, then the youngest that decodes, for that one leads longest.

    What comes within half a step of the last one was counted with it, when the leader changes. Where none decodes when
    a leader ends, all prefill: that is a step, too.

    in_flight: the streams that run, the one that was sent last at the end. read: brings one up to date.
    """

    def __init__(self, in_flight: dict[RequestStream, None], read: Callable[[RequestStream], None]) -> None:
        self._in_flight, self._read = in_flight, read
        self._leader: RequestStream | None = None
        self._seen = 0  # chunks of it
        self._steps = 0  # counted of it, the first of them at `_first`
        self._first = self._last = self._apart = NEVER
        self._step_s = 0.0
        self._lull = False

    def steps(self) -> list[float]:
        """Times of the steps since the last call."""
        found = self._follow()
        if self._leader not in self._in_flight:
            found += self._change()
        return found

    def _follow(self) -> list[float]:
        if self._leader is None:
            return []
        self._read(self._leader)
        answer, seen = self._leader.answer, self._seen
        self._seen = len(answer.times)
        chunks = zip(answer.times[seen:], answer.tokens[seen:])
        found = [at for at, tokens in chunks if at >= self._apart for _ in range(tokens)]
        if found:
            self._count(found)
        return found

    def _count(self, found: list[float]) -> None:
        self._first = self._first if self._steps else found[0]
        self._steps += len(found)
        self._last = found[-1]
        if self._steps > 1:
            self._step_s = (self._last - self._first) / (self._steps - 1)

    def _change(self) -> list[float]:
        # a copy: what is read may turn out to have failed, and is in flight no more
        self._leader = next(filter(self._decodes, reversed([*self._in_flight])), None)
        if self._leader is None:
            self._lull = self._last > NEVER
            return []
        self._seen = self._steps = 0
        self._apart = self._last + SAME_STEP * self._step_s
        first = self._leader.answer.times[0]
        prefill = [first] if self._lull and first >= self._apart else []
        self._lull = False
        return prefill + self._follow()

    def _decodes(self, stream: RequestStream) -> bool:
        self._read(stream)
        return stream in self._in_flight and bool(stream.answer.times)
