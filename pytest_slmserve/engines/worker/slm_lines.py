"""Lines of JSON between two processes, over a socket. Pure: the standard library alone."""

from __future__ import annotations

import json
import select
import socket
from typing import Any


class Ended(Exception):
    """The error of a socket whose other end was closed. lines: of that socket."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self.lines = lines


class TooLong(ValueError):
    """A message without an end."""


class Lines:
    """Messages over a socket, each an object of JSON in a line of its own."""

    longest = 1 << 29  # bytes: the columns of five million requests

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = bytearray()

    def say(self, **message: Any) -> None:
        """Raises Ended."""
        try:
            self.end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise Ended(self) from None

    @property
    def has_room(self) -> bool:
        """Is there room for a short message, so that nobody waits until the other end listens?"""
        return bool(select.select([], [self.end], [], 0)[1])

    def hear(self, wait_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None where nothing came for `wait_s` seconds. Raises Ended; TooLong for one of more than
        `longest` bytes; ValueError or RecursionError for a line that is no message."""
        seen = 0
        while (end := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            if seen > self.longest:
                self._buffer.clear()
                raise TooLong(f"a message of more than {self.longest >> 20} MiB without an end")
            if not select.select([self.end], [], [], wait_s)[0]:
                return None
            try:
                data = self.end.recv(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                raise Ended(self)
            self._buffer += data
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message
