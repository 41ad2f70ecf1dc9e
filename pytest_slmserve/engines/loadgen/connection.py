"""Requests to a server as bytes, and non-blocking connections to it, with the kernel's stamps of what arrives."""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from pytest_slmserve.schema.printable import SHORTEST, hidden, printable

PIECE, PIECES = 1 << 16, 16  # bytes, and how many at once
STAMP = struct.Struct("ll")  # a timespec
SO_TIMESTAMPNS = 35  # of Linux; Python names it since 3.14 only
TRIAL_S = 5.0
ANCILLARY = socket.CMSG_SPACE(STAMP.size)

Address = tuple[int, tuple[object, ...]]  # family, and what `connect` takes
Piece = tuple[bytes, bytes]  # the bytes that arrived, and the kernel's stamp of their last packet, or nothing


class Connection:
    """Plain TCP. `open` once the handshakes are over; until then `advance` is called whenever it is ready."""

    def __init__(self, address: Address) -> None:
        family, where = address
        self.socket: socket.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.open = False
        self.old = False  # it has waited, or has served before
        self.unsent = b""
        self.watched = 0
        self.number = self.socket.fileno()
        try:
            self.socket.connect(where)
        except BlockingIOError:
            pass
        except OSError:
            self.socket.close()
            raise

    def advance(self) -> int:
        """Continue the handshakes, and return the event to wait for next. Raises OSError."""
        if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        with suppress(OSError):
            self.socket.getpeername()
            self.open = True
        return select.EPOLLIN if self.open else select.EPOLLOUT

    def receive(self) -> list[Piece]:
        """All that has arrived, up to a limit; an empty piece if the server has closed. Raises OSError."""
        try:
            data, told, _, _ = self.socket.recvmsg(PIECE, ANCILLARY)
        except BlockingIOError:
            return []
        return [(data, told[0][2] if told else b"")]

    def send(self, data: bytes) -> None:
        """Send as much of `data` as the socket takes, and keep the rest in `unsent`. Raises OSError."""
        try:
            sent = self.socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            sent = 0
        self.unsent = data[sent:]


class SecureConnection(Connection):
    """TLS. Its pieces have no stamp of the kernel: what it decrypts are records, not packets."""

    def __init__(self, address: Address, context: ssl.SSLContext, host: str) -> None:
        super().__init__(address)
        self._context, self._host = context, host
        self._tls: ssl.SSLSocket | None = None

    def advance(self) -> int:
        if self._tls is None:
            wanted = super().advance()
            if not self.open:
                return wanted
            self.open = False
            self._tls = self._context.wrap_socket(
                self.socket, server_hostname=self._host, do_handshake_on_connect=False
            )
            self.socket = self._tls
        try:
            self._tls.do_handshake()
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        self.open = True
        return select.EPOLLIN

    def receive(self) -> list[Piece]:
        """The pieces that have arrived, read until nothing is left in the TLS layer, which epoll does not see."""
        pieces: list[Piece] = []
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while len(pieces) < PIECES or (self._tls and self._tls.pending()):
                pieces.append((self.socket.recv(PIECE), b""))
                if not pieces[-1][0]:
                    break
        return pieces


def address_of(host: str, port: int) -> Address:
    """The first of the host's addresses that accepts a connection, or the last one if none does. Raises OSError for a
    host without an address."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, where in found[:-1]:
        with socket.socket(family, kind, protocol) as trial, suppress(OSError):
            trial.settimeout(TRIAL_S)
            trial.connect(where)
            return family, where
    return found[-1][0], found[-1][4]


PORTS = {"http": 80, "https": 443}
OPEN_HEADERS = {"accept", "content-type", "user-agent"}  # they hold no secrets


@dataclass(frozen=True, slots=True)
class Target:
    """The server of a load. head: a request's bytes up to the length of its body. secrets: values, longest first."""

    host: str
    port: int
    tls: bool
    head: bytes
    secrets: tuple[str, ...]

    def request(self, body: str) -> bytes:
        content = body.encode()
        return b"%sContent-Length: %d\r\n\r\n%s" % (self.head, len(content), content)

    def without_secrets(self, text: str) -> str:
        """The text without the key, which servers like to repeat, and without control characters of a terminal."""
        return printable(hidden(text, self.secrets), layout="")


def target_of(url: str, headers: Mapping[str, str]) -> Target:
    """The server at `url`, and the head of each request to it. Raises ValueError, whose text has neither the headers'
    values nor a password in the URL."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError("the URL does not begin with http://host or https://host")
    if parts.username is not None:
        raise ValueError("the URL holds a user's name: a key goes into the headers")
    port = parts.port or PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    lines = {
        "Host": host if port == PORTS[parts.scheme] else f"{host}:{port}",
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
    # `Bearer KEY` is a secret, and so is KEY without the first word.
    values = [value for name, value in headers.items() if name.lower() not in OPEN_HEADERS]
    words = {word for value in values for word in (value, value.split(" ")[-1]) if len(word) >= SHORTEST}
    secrets = tuple(sorted(words, key=len, reverse=True))
    return Target(parts.hostname, port, parts.scheme == "https", head.encode("latin-1"), secrets)


class Bodies:
    """The requests of a load as bytes, by their number; each round through them with a text of its own, if wanted.

    mark: the placeholder in each body of the text that differs from round to round; a body without it is always the
    same. rounds: the text of the first round through all bodies, of the second, and so on; none: no placeholders.

    Rounds go on from load to load, so that no two requests are alike while there are rounds enough.
    """

    def __init__(self, target: Target, bodies: Sequence[str], mark: str = "", rounds: Sequence[str] = ()) -> None:
        self._target, self._bodies, self._mark, self._rounds = target, bodies, mark, rounds
        self._first = self._last = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def of(self, number: int) -> bytes:
        """The request of that number in a load."""
        at, index = divmod(number, len(self._bodies))
        self._last = max(self._last, at)
        body = self._bodies[index]
        if self._rounds:
            body = body.replace(self._mark, self._rounds[(self._first + at) % len(self._rounds)], 1)
        return self._target.request(body)

    def begin_anew(self) -> None:
        """Another load begins: its rounds are others."""
        self._first, self._last = self._first + self._last + 1, 0
