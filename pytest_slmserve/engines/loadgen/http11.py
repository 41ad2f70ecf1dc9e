"""HTTP/1.1 as a client reads and writes it (RFC 9112): bytes in, bytes out, no socket."""

from __future__ import annotations

import re
from collections.abc import Callable

HEAD_LIMIT, LINE_LIMIT, INTERIM_LIMIT = 1 << 16, 1 << 12, 8
BLANK_LINE = re.compile(rb"\r?\n\r?\n")
STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-5]\d\d)(?: .*)?")
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?")
WITHOUT_BODY = {204, 304}


class Malformed(Exception):
    """Bytes that are no HTTP/1.1 response, or that end in the middle of one."""


class Response:
    """One response. `feed` it what came, and `close` it where the peer closed the connection.

    status is None until the head is there; header names are in lower case. `reusable`: the connection may carry
    another request, which holds only once it has `ended`.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.ended = False
        self.reusable = False
        self._rest = b""
        self._left = 0  # bytes of a body, or of a chunk, that are still to come
        self._in_chunk = False  # the end of line after it included
        self._interim = 0
        self._next: Callable[[bytes], bytes] = self._head

    def feed(self, data: bytes) -> bytes:
        """The part of the body that is in `data`. Raises Malformed."""
        if self.ended:
            raise Malformed("bytes after the end of a response")
        if self._rest:
            data, self._rest = self._rest + data, b""
        return self._next(data)

    def close(self) -> None:
        """The peer has closed: the end of a body that nothing else ends. Raises Malformed of any other."""
        if self._next == self._until_closed:
            self.ended = True
        elif not self.ended:
            raise Malformed("the connection broke off" if self.status else "the connection was closed unanswered")

    def _head(self, data: bytes) -> bytes:
        blank = BLANK_LINE.search(data)
        if not blank:
            if len(data) > HEAD_LIMIT or not (data[:5] == b"HTTP/" or b"HTTP/".startswith(data)):
                raise Malformed(f"no HTTP response: it begins with {data[:40]!r}")
            self._rest = data
            return b""
        self._read_head(data[: blank.start()])
        rest = data[blank.end() :]
        if self.status is not None and 100 <= self.status < 200:  # interim: the response itself is still to come
            self._count_interim()
            return self._head(rest) if rest else b""
        self._choose_body()
        if self.ended:
            return self._leftover(rest)
        return self._next(rest) if rest else b""

    def _count_interim(self) -> None:
        self.status = None
        self._interim += 1
        if self._interim > INTERIM_LIMIT:
            raise Malformed("nothing but interim responses")

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").replace("\r\n", "\n").split("\n")
        status = STATUS_LINE.fullmatch(first)
        if not status:
            raise Malformed(f"no HTTP/1.1 status line: {first[:80]!r}")
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.status = int(status[2])
        asked = self.headers.get("connection", "keep-alive" if status[1] == "1" else "close").lower()
        self.reusable = "close" not in asked

    def _choose_body(self) -> None:
        length = self.headers.get("content-length", "")
        if self.status in WITHOUT_BODY:
            self.ended = True
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._next = self._chunks
        elif length:
            if not length.isdecimal():
                raise Malformed(f"a content length of {length[:40]!r}")
            self._left, self._next = int(length), self._counted
            self.ended = not self._left
        else:
            self.reusable, self._next = False, self._until_closed

    def _leftover(self, data: bytes) -> bytes:
        """Discard bytes after the response's end: with any, the connection is not reusable. Returns no bytes."""
        self.reusable = self.reusable and not data
        return b""

    def _until_closed(self, data: bytes) -> bytes:
        return data

    def _counted(self, data: bytes) -> bytes:
        body = data[: self._left]
        self._left -= len(body)
        if not self._left:
            self.ended = True
            self._leftover(data[len(body) :])
        return body

    def _chunks(self, data: bytes) -> bytes:
        """A loop, for a piece of a busy stream holds many chunks."""
        body, at = [], 0
        while at < len(data):
            if self._left:
                body.append(data[at : at + self._left])
                at += len(body[-1])
                self._left -= len(body[-1])
                continue
            end = data.find(b"\n", at)
            if end < 0:
                break
            line, at = data[at:end], end + 1
            if self._in_chunk:
                self._end_chunk(line)
            elif size := chunk_size(line):
                self._left, self._in_chunk = size, True
            else:
                self._next = self._trailer
                body.append(self._trailer(data[at:]))
                return b"".join(body)
        self._wait_for_line(data[at:])
        return body[0] if len(body) == 1 else b"".join(body)

    def _end_chunk(self, line: bytes) -> None:
        if line.rstrip(b"\r"):
            raise Malformed(f"malformed chunk: it is followed by {line[:40]!r}")
        self._in_chunk = False

    def _wait_for_line(self, begun: bytes) -> None:
        if self._in_chunk and begun[:1] not in (b"", b"\r"):
            self._end_chunk(begun)
        if len(begun) > LINE_LIMIT:
            raise Malformed("malformed chunk: its size has no end")
        self._rest = begun

    def _trailer(self, data: bytes) -> bytes:
        while (end := data.find(b"\n")) >= 0:
            line, data = data[:end].rstrip(b"\r"), data[end + 1 :]
            if not line:
                self.ended = True
                return self._leftover(data)
        if len(data) > LINE_LIMIT:
            raise Malformed("the trailer of a response has no end")
        self._rest = data
        return b""


def chunk_size(line: bytes) -> int:
    size = CHUNK_SIZE.fullmatch(line)
    if not size:
        raise Malformed(f"malformed chunk: its size is {line[:40]!r}")
    return int(size[1], 16)
