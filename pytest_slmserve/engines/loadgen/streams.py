"""Requests to a server as bytes, and many streams at once on non-blocking connections.

Arriving data is timestamped and stored first, and read later. The time of a piece is the kernel's for its last packet,
so it does not depend on the delay of this process. Without it (TLS, other systems), the time of epoll's report is used.
Chunks that waited together are one piece with the time of the last one. The possible error of the first one is counted
as `doubt`.
"""

import os
import re
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from itertools import takewhile
from urllib.parse import urlsplit

from pytest_slmserve.engines.loadgen.response import Answer, RequestFailed
from pytest_slmserve.schema.printable import SHORTEST, hidden, printable

PIECE, PIECES = 1 << 16, 16  # bytes, and pieces at once
STAMP = struct.Struct("ll")  # a timespec
SO_TIMESTAMPNS = 35  # of Linux; Python names it since 3.14 only
TRIAL_S = 5.0
ANCILLARY = socket.CMSG_SPACE(STAMP.size)
PORTS = {"http": 80, "https": 443}
OPEN_HEADERS = {"accept", "content-type", "user-agent"}  # without secrets
CONNECTING = 64  # at once: more would overflow the queue of a server that accepts slowly
CONNECT_S = 10.0
READ_S, LONG_READ_S = 0.0002, 0.02  # of reading, until sockets are polled again
READ_AT, QUIET_S = 32, 0.005  # reading waits for this many unread streams, or for this time without data
UNREAD_LIMIT = 1 << 28  # unread bytes; above it, reading goes first
EVENTS = 4096
TOLD = 300  # characters of a failure
TURN_S = 0.1  # no turn lasts longer
COARSE_S = 0.002
LAST_CHUNK = b"0\r\n\r\n"
SAME_STEP = 0.5  # of a step's usual time, because a step reaches the streams one after the other
NEVER = float("-inf")

Address = tuple[int, tuple[object, ...]]  # family, and argument of `connect`
Piece = tuple[bytes, bytes]  # bytes that arrived, and the kernel's time of their last packet or nothing
Clock = tuple[float, float, float]  # monotonic time, its lead over the time of day, and the time of the previous poll


class Connection:
    """A TCP connection, with TLS if there is a context.

    It is `open` after the handshakes. Until then `advance` is called whenever the socket is ready. With TLS, pieces
    have no time of the kernel, because records are not packets.
    """

    def __init__(self, address: Address, host: str, context: ssl.SSLContext | None) -> None:
        family, where = address
        self.socket: socket.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.open = False
        self.old = False  # it has waited, or has served before
        self.stream: RequestStream | None = None  # whose request it carries
        self.unsent = b""
        self.watched = 0
        self.number = self.socket.fileno()
        self._host, self._context = host, context
        try:
            self.socket.connect(where)
        except BlockingIOError:
            pass
        except OSError:
            self.socket.close()
            raise

    def advance(self) -> int:
        """Continue the handshakes, and return the event to wait for next. Raise OSError if they fail."""
        if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        try:
            self.socket.getpeername()
        except OSError:
            return select.EPOLLOUT
        if self._context:
            if not isinstance(self.socket, ssl.SSLSocket):
                plain, host = self.socket, self._host
                self.socket = self._context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
            try:
                self.socket.do_handshake()
            except ssl.SSLWantWriteError:
                return select.EPOLLOUT
            except ssl.SSLWantReadError:
                return select.EPOLLIN
        self.open = True
        return select.EPOLLIN

    def receive(self) -> list[Piece]:
        """Return the data that has arrived, up to a limit, with an empty piece if the server has closed. Raise OSError.

        The TLS layer is read until it is empty, because epoll does not see it.
        """
        pieces: list[Piece] = []
        with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not isinstance(self.socket, ssl.SSLSocket):
                data, told, _, _ = self.socket.recvmsg(PIECE, ANCILLARY)
                return [(data, told[0][2] if told else b"")]
            while len(pieces) < PIECES or self.socket.pending():
                pieces.append((self.socket.recv(PIECE), b""))
                if not pieces[-1][0]:
                    break
        return pieces


def address_of(host: str, port: int) -> Address:
    """Return the first address of a host that accepts a connection, or the last one. Raise OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, where in found[:-1]:
        with socket.socket(family, kind, protocol) as trial, suppress(OSError):
            trial.settimeout(TRIAL_S)
            trial.connect(where)
            return family, where
    return found[-1][0], found[-1][4]


class Target:
    """The server of a load.

    Attributes:
        head: bytes of a request up to the length of its body.
        secrets: values and words of headers, longest first.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Parse the URL and the headers.

        Raises:
            ValueError: without the values of headers and a password in the URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname:
            raise ValueError("the URL does not begin with http://host or https://host")
        if parts.username is not None:
            raise ValueError("the URL holds a user's name: a key goes into the headers")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or PORTS[parts.scheme]
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = {
            "Host": host if self.port == PORTS[parts.scheme] else f"{host}:{self.port}",
            "User-Agent": "pytest-slmserve",
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **headers,
        }
        for name, value in lines.items():
            if not name.isascii() or not (name + value).isprintable():
                raise ValueError(f"header {name!r} holds what no header may hold")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.head = head.encode("latin-1")
        # `Bearer KEY` is a secret, and so is KEY without the first word.
        values = [value for name, value in headers.items() if name.lower() not in OPEN_HEADERS]
        words = {word for value in values for word in (value, value.split(" ")[-1]) if len(word) >= SHORTEST}
        self.secrets = tuple(sorted(words, key=len, reverse=True))

    def shown(self, text: str) -> str:
        """Return up to `TOLD` characters of a server's text, without the key and without control characters."""
        text = printable(hidden(text, self.secrets), layout="")
        return text if len(text) <= TOLD else f"{re.sub(r'[^ ,]*$', '', text[: TOLD - 4]) or text[: TOLD - 4]} ..."


class Bodies:
    """The requests of a load as bytes, by their number.

    Rounds continue from load to load, so that no two requests are alike until all rounds are used.

    Args:
        mark: placeholder for the text of a round; a body without it does not change.
        rounds: text of each round through all bodies; empty: no placeholders.
    """

    def __init__(self, target: Target, bodies: Sequence[str], mark: str = "", rounds: Sequence[str] = ()) -> None:
        self._target, self._bodies, self._mark, self._rounds = target, bodies, mark, rounds
        self._first = self._last = 0

    def of(self, number: int) -> bytes:
        """Return the request with this number in a load."""
        at, index = divmod(number, len(self._bodies))
        self._last = max(self._last, at)
        body = self._bodies[index]
        if self._rounds:
            body = body.replace(self._mark, self._rounds[(self._first + at) % len(self._rounds)], 1)
        content = body.encode()
        return b"%sContent-Length: %d\r\n\r\n%s" % (self._target.head, len(content), content)

    def begin_anew(self) -> None:
        """Begin another load, with other rounds."""
        self._first, self._last = self._first + self._last + 1, 0


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request and its answer.

    Attributes:
        index: of its body.
        wanted: output tokens that it asks for.
        due, asked, sent: times at which it was due, handed over, and first sent.
        failed: time of its failure.
        read_until: time of the last piece that was read.
        failure: kind and text of its failure.
        number: its number in the load.
        cut: whether the end of the load cut it off.
        bounded: whether more tokens than wanted are malformed.
        streamed: whether the answer is a stream of tokens, and not a result.
    """

    index: int
    wanted: int
    body: bytes
    due: float | None = None
    answer: Answer = field(init=False)
    asked: float = 0.0
    sent: float = 0.0
    failed: float = 0.0
    read_until: float = 0.0
    failure: tuple[str, str] | None = None
    number: int = 0
    cut: bool = False
    connection: Connection | None = None
    unread: deque[tuple[Clock, bytes, bytes]] = field(default_factory=deque)
    bounded: InitVar[bool] = True
    streamed: InitVar[bool] = True

    def __post_init__(self, bounded: bool, streamed: bool) -> None:
        self.answer = Answer(self.wanted if bounded else None, streamed)


class Streams:
    """Connections to one server, and the streams on them.

    Ended streams are in `ended`, from which the caller takes them. No method raises an error because of the server.
    """

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target, self.timeout_s = target, timeout_s
        self.epoll = select.epoll()
        self.ended: deque[RequestStream] = deque()
        self.in_flight: dict[RequestStream, None] = {}
        self._polled = self.heard = time.monotonic()  # heard: time of the last data
        self._unread_bytes = 0
        self._address: Address | None = None
        self._context = ssl.create_default_context() if target.tls else None
        if self._context:
            self._context.set_alpn_protocols(["http/1.1"])
        self._connections: dict[int, Connection] = {}
        self._idle: dict[Connection, None] = {}
        self._refused = 0
        self._without_connection: deque[RequestStream] = deque()
        self._to_read: deque[RequestStream] = deque()

    def begin_anew(self, count: int) -> None:
        """Reset all counts, and open connections until `count` are idle, one fails, or CONNECT_S seconds pass."""
        self.pieces = self.pieces_read = self.tokens_read = 0
        self.doubt_s = self.most_doubt_s = 0.0  # the sum, and the most
        self.turn(0.0)  # drops connections that were closed since the last run
        until = time.monotonic() + CONNECT_S
        refused = self._refused
        while len(self._idle) < count and time.monotonic() < until and self._refused == refused:
            opening = sum(not connection.open for connection in self._connections.values())
            if opening < min(count - len(self._idle), CONNECTING):
                self._connect()
            else:
                self.turn(0.01)

    def send(self, stream: RequestStream) -> None:
        """Send a stream's request on an idle connection, or on a new one as soon as it is open."""
        stream.asked = time.monotonic()
        self.in_flight[stream] = None
        if self._idle:
            return self._send_on(self._idle.popitem()[0], stream)
        self._without_connection.append(stream)
        self._connect()

    def turn(self, wait_s: float) -> None:
        """Fetch arrived data; if there is none, read fetched data; if there is nothing to read, wait."""
        if self._to_read:
            wait_s = 0.0 if len(self._to_read) >= READ_AT else min(wait_s, QUIET_S)
        # epoll counts in milliseconds, so it leaves the last two of a longer wait to the next call, in which select
        # waits with microseconds. If the process was stopped meanwhile, the wait ends without a look at the sockets, so
        # each wait is followed by a poll.
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
        """Read all of a stream that was fetched."""
        while stream.unread and stream.failure is None:
            self._read_piece(stream)

    def expire(self, now: float) -> None:
        """End the streams that last too long."""
        # They are in the order sent.
        for stream in list(takewhile(lambda stream: stream.asked + self.timeout_s <= now, self.in_flight)):
            chunks = f"{len(stream.answer.times)} chunks with tokens came{', more are unread' if stream.unread else ''}"
            self._fail(stream, "timeout", f"no end within {self.timeout_s:g} s ({chunks})")

    def cut_off(self) -> list[RequestStream]:
        """End all streams in flight and return them, including streams that were not sent."""
        self._without_connection.clear()
        for stream in list(self.in_flight):
            self.read(stream)
        cut = list(self.in_flight)
        for stream in cut:
            stream.cut = True
            self._leave(stream)
        return cut

    # Connections

    def _connect(self) -> None:
        try:
            self._address = self._address or address_of(self.target.host, self.target.port)
            connection = Connection(self._address, self.target.host, self._context)
        except OSError as error:
            return self._fail_waiting(system_error_text(error))
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

    def _fail_waiting(self, why: str) -> None:
        self._refused += 1
        if self._without_connection:
            self._fail(self._without_connection.popleft(), "no connection", f"no connection: {why}")

    def _advance(self, connection: Connection, clock: Clock) -> None:
        try:
            if not connection.open:
                self._watch(connection, connection.advance())
                if connection.open:
                    self._use(connection)
                return
            if connection.unsent:
                self._write(connection, connection.unsent)
            pieces = connection.receive()
            stream = connection.stream
            if stream is None:  # the server of an idle connection that sends data is about to close it
                return self._drop(connection) if pieces else None
            for data, told in pieces:
                if stream not in self.in_flight:
                    return
                if not data:
                    return self._lose(connection, "")
                self.heard = clock[0]
                self.pieces += 1
                self._unread_bytes += len(data)
                if not stream.unread:
                    self._to_read.append(stream)
                stream.unread.append((clock, told, data))
                if data.endswith(LAST_CHUNK) or b"data:" not in data:  # perhaps its end, or something unusual
                    self.read(stream)
        except OSError as error:
            self._lose(connection, system_error_text(error))

    def _use(self, connection: Connection) -> None:
        if self._without_connection:
            self._send_on(connection, self._without_connection.popleft())
        else:
            connection.old = True
            self._idle[connection] = None

    def _lose(self, connection: Connection, why: str) -> None:
        """Drop a lost connection. Its stream ends with the data that has come, or is sent again."""
        self._drop(connection)
        stream = connection.stream
        if stream is None:
            return None if connection.open else self._fail_waiting(why)
        self.read(stream)
        if stream not in self.in_flight:
            return
        # An old connection may have been closed just as the request was sent.
        if connection.old and stream.answer.response.status is None:
            del self.in_flight[stream]
            connection.stream = stream.connection = None
            self.in_flight[stream] = None
            self._without_connection.append(stream)
            return self._connect()
        try:
            stream.answer.read(stream.read_until, b"")
        except RequestFailed as error:
            return self._fail(stream, error.kind, f"{error} ({why})" if why else f"{error}")
        self._leave(stream)
        self.ended.append(stream)

    def _send_on(self, connection: Connection, stream: RequestStream) -> None:
        stream.connection, connection.stream = connection, stream
        stream.sent = stream.sent or time.monotonic()  # a stream that is sent again has waited since the first time
        try:
            self._write(connection, stream.body)
        except OSError as error:
            self._lose(connection, system_error_text(error))

    def _write(self, connection: Connection, data: bytes) -> None:
        try:
            sent = connection.socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            sent = 0
        connection.unsent = data[sent:]
        self._watch(connection, select.EPOLLIN | select.EPOLLOUT if connection.unsent else select.EPOLLIN)

    # Streams

    def _read_piece(self, stream: RequestStream) -> None:
        (at, ahead, polled), told, data = stream.unread.popleft()
        self._unread_bytes -= len(data)
        self.pieces_read += 1
        earliest = max(stream.sent, stream.read_until)
        if told:
            seconds, nanoseconds = STAMP.unpack(told)
            stamped = seconds + nanoseconds / 1e9 + ahead
            if earliest <= stamped <= at + TURN_S:  # not after the time of day was set
                at = stamped
        stream.read_until = at
        before = len(stream.answer.times)
        try:
            stream.answer.read(at, data)
        except RequestFailed as error:
            return self._fail(stream, error.kind, str(error))
        self.tokens_read += sum(stream.answer.tokens[before:])
        if len(stream.answer.times) > before + 1:
            doubt_s = at - max(earliest, polled)  # before that nothing had arrived
            self.doubt_s += max(0.0, doubt_s)
            self.most_doubt_s = max(self.most_doubt_s, doubt_s)
        if stream.answer.response.ended:
            self._leave(stream)
            self.ended.append(stream)

    def _leave(self, stream: RequestStream) -> None:
        """Take a stream off its connection, which is used again if possible, and closed otherwise."""
        del self.in_flight[stream]
        connection, stream.connection = stream.connection, None
        if connection is None:
            return
        connection.stream = None
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
        stream.failure, stream.failed = (kind, self.target.shown(why)), time.monotonic()
        self._unread_bytes -= sum(len(data) for _, _, data in stream.unread)
        stream.unread.clear()
        if stream in self._without_connection:
            self._without_connection.remove(stream)
        if stream in self.in_flight:
            self._leave(stream)
            self.ended.append(stream)


def system_error_text(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {text}"


class Lead:
    """A stream that shows the engine's steps, and after its end the youngest one that decodes, which leads longest.

    At a change, chunks within half a step of the last step belong to that step. If no stream decodes when a leader
    ends, all prefill, which is also a step.

    Args:
        in_flight: streams that run, the last sent at the end.
        read: function that reads the fetched data of a stream.
    """

    def __init__(self, in_flight: dict[RequestStream, None], read: Callable[[RequestStream], None]) -> None:
        self._in_flight, self._read = in_flight, read
        self._leader: RequestStream | None = None
        self._seen = 0  # chunks of the leader
        self._steps = 0  # of the leader, the first of them at `_first`
        self._first = self._last = self._apart = NEVER
        self._step_s = 0.0
        self._lull = False

    def steps(self) -> list[float]:
        """Return the times of the steps since the last call."""
        found: list[float] = []
        if self._leader is not None:
            self._read(self._leader)
            found = self._new_steps(self._leader)
        if self._leader in self._in_flight:
            return found
        self._leader = None
        for stream in reversed([*self._in_flight]):  # a copy, because a stream that fails is removed
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
