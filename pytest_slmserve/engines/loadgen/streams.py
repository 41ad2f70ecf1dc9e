"""Many streams at once: what arrives is stamped and kept first, and read when there is time.

A piece's time is the kernel's, taken as its last packet came in, so it does not depend on when this process got to it.
Without one (TLS, other systems) it is the time at which epoll reported the socket. Chunks that waited together are one
piece and have the time of the last of them: how far that can be off for the first is counted as `doubt`.
"""

from __future__ import annotations

import re
import select
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from pytest_slmserve.engines.loadgen.connection import STAMP, Address, Connection, SecureConnection, Target, address_of
from pytest_slmserve.engines.loadgen.response import Answer, RequestFailed

CONNECTING = 64  # at once: more would overflow the queue of a server that accepts slowly
CONNECT_S = 10.0
READ_S, LONG_READ_S = 0.0002, 0.02  # reading goes on for so long before sockets are looked at again
READ_AT, QUIET_S = 32, 0.005  # reading waits for so many unread streams, or until nothing comes for so long
UNREAD_LIMIT = 1 << 28  # bytes that are kept unread; beyond, reading goes first
EVENTS = 4096
TOLD = 300  # characters of a failure
TURN_S = 0.1  # no turn lasts longer
COARSE_S = 0.002
LAST_CHUNK = b"0\r\n\r\n"

Clock = tuple[float, float, float]  # monotonic now, what it is ahead of the time of day, and when last polled before


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request and its answer. number: which of the load. due, asked, sent: when it was to be sent, was handed over,
    and was sent first. read_until: the time of the last piece that was read.

    failure: why it failed, as kind and text, at `failed`; `complete` and `cut off` are the other two ways to end.
    """

    number: int
    body: bytes
    due: float | None = None
    answer: Answer = field(default_factory=Answer)
    asked: float = 0.0
    sent: float = 0.0
    failed: float = 0.0
    read_until: float = 0.0
    failure: tuple[str, str] | None = None
    connection: Connection | None = None
    unread: deque[tuple[Clock, bytes, bytes]] = field(default_factory=deque)


class Streams:
    """Connections to one server and the streams on them. `ended` holds the streams that are over, for the caller to
    take; no method raises for what a server does."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target, self.timeout_s = target, timeout_s
        self.epoll = select.epoll()
        self.ended: deque[RequestStream] = deque()
        self.in_flight: dict[RequestStream, None] = {}
        self.heard = time.monotonic()  # when anything came last
        self.start_count()
        self._polled = self.heard
        self._unread_bytes = 0
        self._address: Address | None = None
        self._context = ssl.create_default_context() if target.tls else None
        if self._context:
            self._context.set_alpn_protocols(["http/1.1"])
        self._connections: dict[int, Connection] = {}
        self._streams: dict[Connection, RequestStream] = {}
        self._idle: dict[Connection, None] = {}
        self._refused = 0
        self._without_connection: deque[RequestStream] = deque()
        self._to_read: deque[RequestStream] = deque()

    def start_count(self) -> None:
        """Set the counts of pieces and tokens, and the doubt of the stamps, to zero for the next run."""
        self.pieces = self.pieces_read = self.tokens_read = 0
        self.doubt_s = self.most_doubt_s = 0.0  # the sum, and the most

    def connect_ahead(self, count: int) -> None:
        """Open connections until `count` of them wait for a request, one fails, or CONNECT_S seconds have passed."""
        self.turn(0.0)  # which drops those that were closed since the last run
        until = time.monotonic() + CONNECT_S
        refused = self._refused
        while len(self._idle) < count and time.monotonic() < until and self._refused == refused:
            opening = len(self._connections) - len(self._idle) - len(self._streams)
            if opening < min(count - len(self._idle), CONNECTING):
                self._connect()
            else:
                self.turn(0.01)

    def send(self, stream: RequestStream) -> None:
        """Send a stream's request on a connection that waits, else on a new one, as soon as it is open."""
        stream.asked = time.monotonic()
        self.in_flight[stream] = None
        if self._idle:
            return self._send_on(self._idle.popitem()[0], stream)
        self._without_connection.append(stream)
        self._connect()

    def turn(self, wait_s: float) -> None:
        """Fetch what has arrived; if nothing has, read what was fetched; if there is nothing to read, wait."""
        if self._to_read:
            wait_s = 0.0 if len(self._to_read) >= READ_AT else min(wait_s, QUIET_S)
        # epoll counts in milliseconds: of a longer wait the last two are left to the next call, of which select, which
        # counts in microseconds, waits the rest. A process that was stopped meanwhile hears that the time is over,
        # without a look at the sockets: so each wait ends with one.
        ready = []
        if wait_s > 2 * COARSE_S:
            ready = self.epoll.poll(wait_s - COARSE_S, EVENTS)
        elif wait_s > 0:
            select.select([self.epoll], [], [], wait_s)
        ready = ready or self.epoll.poll(0, EVENTS)
        now = time.monotonic()
        clock = now, now - time.time(), self._polled
        self._polled = now
        for number, _ in ready:
            if number in self._connections:
                self._advance(self._connections[number], clock)
        until = time.monotonic() + (LONG_READ_S if self._unread_bytes > UNREAD_LIMIT else 0.0 if ready else READ_S)
        while self._to_read and time.monotonic() < until:
            stream = self._to_read.popleft()
            if stream.unread:
                self._read_piece(stream)
            if stream.unread:
                self._to_read.appendleft(stream)

    def read(self, stream: RequestStream) -> None:
        """Read all of it that was fetched."""
        while stream.unread and stream.failure is None:
            self._read_piece(stream)

    def expire(self, now: float) -> None:
        """End the streams that last too long; they are in the order sent."""
        for stream in list(takewhile(lambda stream: stream.asked + self.timeout_s <= now, self.in_flight)):
            chunks = f"{len(stream.answer.times)} chunks with tokens came{', more are unread' if stream.unread else ''}"
            self._fail(stream, "timeout", f"no end within {self.timeout_s:g} s ({chunks})")

    def cut_off(self) -> list[RequestStream]:
        """End all that are in flight, and return them as they are, including those that were not even sent."""
        self._without_connection.clear()
        for stream in list(self.in_flight):
            self.read(stream)
        cut = list(self.in_flight)
        for stream in cut:
            self._leave(stream)
        return cut

    # Connections

    def _connect(self) -> None:
        try:
            self._address = self._address or address_of(self.target.host, self.target.port)
            if self._context:
                connection: Connection = SecureConnection(self._address, self._context, self.target.host)
            else:
                connection = Connection(self._address)
        except OSError as error:
            return self._fail_waiting(error)
        self._connections[connection.number] = connection
        self._watch(connection, select.EPOLLOUT)

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.watched != events:
            (self.epoll.modify if connection.watched else self.epoll.register)(connection.number, events)
            connection.watched = events

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.number]
        self._idle.pop(connection, None)
        connection.socket.close()

    def _fail_waiting(self, error: Exception) -> None:
        """No connection comes about: the stream that has waited longest fails."""
        self._refused += 1
        if self._without_connection:
            why = f"no connection: {system_error_text(error)}"
            self._fail(self._without_connection.popleft(), "no connection", why)

    def _advance(self, connection: Connection, clock: Clock) -> None:
        """Continue the handshakes of a connection that epoll reported; send and fetch on one that is open."""
        try:
            if not connection.open:
                self._watch(connection, connection.advance())
                if connection.open:
                    self._use(connection)
                return
            if connection.unsent:
                self._write(connection, connection.unsent)
            pieces = connection.receive()
            stream = self._streams.get(connection)
            if stream is None:  # it waits, and a server that sends something now is about to close it
                return self._drop(connection) if pieces else None
            for data, told in pieces:
                if stream not in self.in_flight:
                    continue
                if not data:  # the server has closed
                    self.read(stream)
                    if stream in self.in_flight:
                        self._drop(connection)
                        self._break_off(stream, "")
                    continue
                self.heard = clock[0]
                self.pieces += 1
                self._unread_bytes += len(data)
                if not stream.unread:
                    self._to_read.append(stream)
                stream.unread.append((clock, told, data))
                if data.endswith(LAST_CHUNK) or b"data:" not in data:  # its end, perhaps, or nothing usual
                    self.read(stream)
        except OSError as error:
            self._lose(connection, error)

    def _use(self, connection: Connection) -> None:
        """Give a free connection to the stream that waits, or keep it for the next one."""
        if self._without_connection:
            self._send_on(connection, self._without_connection.popleft())
        else:
            connection.old = True
            self._idle[connection] = None

    def _lose(self, connection: Connection, error: Exception) -> None:
        self._drop(connection)
        stream = self._streams.get(connection)
        if stream:
            self._break_off(stream, system_error_text(error))
        elif not connection.open:
            self._fail_waiting(error)

    def _send_on(self, connection: Connection, stream: RequestStream) -> None:
        stream.connection = connection
        self._streams[connection] = stream
        stream.sent = stream.sent or time.monotonic()  # again: it has waited since the first time
        try:
            self._write(connection, stream.body)
        except OSError as error:
            self._lose(connection, error)

    def _write(self, connection: Connection, data: bytes) -> None:
        connection.send(data)
        self._watch(connection, select.EPOLLIN | select.EPOLLOUT if connection.unsent else select.EPOLLIN)

    # Streams

    def _read_piece(self, stream: RequestStream) -> None:
        """Read the stream's next piece, whose time is the kernel's stamp, else when it was fetched. A stamp that cannot
        be true, as after the time of day was set, is not used."""
        (at, ahead, polled), told, data = stream.unread.popleft()
        self._unread_bytes -= len(data)
        self.pieces_read += 1
        earliest = max(stream.sent, stream.read_until)
        if told:
            seconds, nanoseconds = STAMP.unpack(told)
            stamped = seconds + nanoseconds / 1e9 + ahead
            if earliest <= stamped <= at + TURN_S:
                at = stamped
        stream.read_until = at
        before = len(stream.answer.times)
        try:
            stream.answer.read(at, data)
        except RequestFailed as error:
            return self._fail(stream, error.kind, str(error))
        self.tokens_read += sum(stream.answer.tokens[before:])
        if len(stream.answer.times) > before + 1:
            doubt_s = at - max(earliest, polled)  # until then none of it was there
            self.doubt_s += max(0.0, doubt_s)
            self.most_doubt_s = max(self.most_doubt_s, doubt_s)
        if stream.answer.response.ended:
            self._leave(stream)
            self.ended.append(stream)

    def _break_off(self, stream: RequestStream, why: str) -> None:
        """End a stream whose connection is lost, or send it again: an old connection may have been closed just as the
        request was sent."""
        self.read(stream)
        connection = stream.connection
        if stream not in self.in_flight or connection is None:
            return
        if connection.old and stream.answer.response.status is None:
            del self._streams[connection]
            del self.in_flight[stream]
            stream.connection = None
            self.in_flight[stream] = None
            self._without_connection.append(stream)
            return self._connect()
        try:
            stream.answer.read(stream.read_until, b"")
        except RequestFailed as error:
            return self._fail(stream, error.kind, f"{error} ({why})" if why else f"{error}")
        self._leave(stream)
        self.ended.append(stream)

    def _leave(self, stream: RequestStream) -> None:
        """Take a stream off its connection, which then waits for another if it may, and is closed otherwise."""
        del self.in_flight[stream]
        connection, stream.connection = stream.connection, None
        if connection is None:
            return
        del self._streams[connection]
        if self._connections.get(connection.number) is not connection:
            return
        response = stream.answer.response
        clean = response.ended and response.reusable and not (stream.unread or connection.unsent)
        if stream.failure is None and clean:
            connection.old = True
            self._use(connection)
        else:
            self._drop(connection)

    def _fail(self, stream: RequestStream, kind: str, why: str) -> None:
        stream.failure, stream.failed = (kind, shortened(self.target.without_secrets(why))), time.monotonic()
        self._unread_bytes -= sum(len(data) for _, _, data in stream.unread)
        stream.unread.clear()
        if stream in self._without_connection:
            self._without_connection.remove(stream)
        if stream in self.in_flight:
            self._leave(stream)
            self.ended.append(stream)


def shortened(text: str) -> str:
    """A text of at most `TOLD` characters. A longer one ends after a word, with an ellipsis."""
    return text if len(text) <= TOLD else f"{re.sub(r'[^ ,]*$', '', text[: TOLD - 4]) or text[: TOLD - 4]} ..."


def system_error_text(error: Exception) -> str:
    """An error of the system, without the address that some of them repeat."""
    text = getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {text}"


SAME_STEP = 0.5  # of a step's usual time: it reaches the streams one after the other
NEVER = float("-inf")


class Lead:
    """Follows one stream to its end, then the youngest that decodes, because that one leads longest.

    When the leader changes, chunks within half a step of the last one were counted with it. If none decodes when a
    leader ends, all prefill: that is a step, too.

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
        found: list[float] = []
        if self._leader is not None:
            self._read(self._leader)
            found = self._new_steps(self._leader)
        if self._leader in self._in_flight:
            return found
        self._leader = None
        for stream in reversed([*self._in_flight]):  # a copy: a stream that fails as it is read is in flight no more
            self._read(stream)
            if stream in self._in_flight and stream.answer.times:
                self._leader = stream
                break
        if self._leader is None:
            self._lull = self._last > NEVER
            return found
        self._seen = self._steps = 0
        self._apart = self._last + SAME_STEP * self._step_s
        first = self._leader.answer.times[0]
        if self._lull and first >= self._apart:
            found.append(first)  # of the prefill
        self._lull = False
        return found + self._new_steps(self._leader)

    def _new_steps(self, leader: RequestStream) -> list[float]:
        """Times of the leader's tokens that were not seen yet, a step each."""
        answer, seen = leader.answer, self._seen
        self._seen = len(answer.times)
        chunks = zip(answer.times[seen:], answer.tokens[seen:])
        found = [at for at, tokens in chunks if at >= self._apart for _ in range(tokens)]
        if found:
            self._first = self._first if self._steps else found[0]
            self._steps += len(found)
            self._last = found[-1]
            if self._steps > 1:
                self._step_s = (self._last - self._first) / (self._steps - 1)
        return found
