"""One connection to the server: non-blocking, with the kernel's own stamp of what arrives where it gives one."""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
from contextlib import suppress

PIECE, PIECES = 1 << 16, 16  # bytes, and how many at once
STAMP = struct.Struct("ll")  # a timespec
SO_TIMESTAMPNS = 35  # of Linux; Python names it since 3.14 only
TRIAL_S = 5.0
ANCILLARY = socket.CMSG_SPACE(STAMP.size)

Address = tuple[int, tuple[object, ...]]  # family, and what `connect` takes
Piece = tuple[bytes, bytes]  # what came, and the kernel's stamp of its last packet, or nothing


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
        """Go on with the handshakes; what to wait for next. Raises OSError."""
        if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        with suppress(OSError):
            self.socket.getpeername()
            self.open = True
        return select.EPOLLIN if self.open else select.EPOLLOUT

    def receive(self) -> list[Piece]:
        """All that is there, up to a limit; an empty piece where the server has closed. Raises OSError."""
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

    def close(self) -> None:
        self.socket.close()


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
        """The pieces that are there, read until nothing is left in the TLS layer, which epoll does not see."""
        pieces: list[Piece] = []
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while len(pieces) < PIECES or (self._tls and self._tls.pending()):
                pieces.append((self.socket.recv(PIECE), b""))
                if not pieces[-1][0]:
                    break
        return pieces


def address_of(host: str, port: int) -> Address:
    """The first of the host's addresses that accepts a connection; the last one where none does. Raises OSError for a
    host without an address."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, where in found[:-1]:
        with socket.socket(family, kind, protocol) as trial, suppress(OSError):
            trial.settimeout(TRIAL_S)
            trial.connect(where)
            return family, where
    return found[-1][0], found[-1][4]
