"""JSON lines between a process and its parent, and the guardian of a process. Needs the standard library."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Ended(Exception):
    """The error of a socket whose other end was closed."""


class TooLong(ValueError):
    """The error of a message without an end."""


class Lines:
    """Messages over a socket, each a JSON object in its own line."""

    longest = 1 << 29  # bytes: the columns of five million requests

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = bytearray()

    def say(self, **message: Any) -> None:
        """Send a message. Raise Ended if the other end was closed."""
        try:
            self.end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise Ended from None

    def hear(self, wait_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None if nothing was received for `wait_s` seconds.

        Raises:
            Ended: if the other end was closed.
            TooLong: for more than `longest` bytes.
            ValueError, RecursionError: if a line is not a message.
        """
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
                raise Ended
            self._buffer += data
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message


def start_guardian(parent: str) -> subprocess.Popen[bytes]:
    """Start a guardian, which kills the process group if the process with the id `parent`, or this process, is gone."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), parent, str(os.getpid())]
    # A SIGTERM must wait until the guardian can check whether the parent is gone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    guardian = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return guardian


@contextmanager
def guarded(parent: str) -> Iterator[None]:
    """Run a guardian for as long as this process works."""
    guardian = start_guardian(parent)
    try:
        yield
    finally:
        guardian.terminate()  # if the parent is gone the guardian removes our folder, and ends this process
        guardian.wait()
