"""Server-sent events: bytes of a body in, data of events out (https://html.spec.whatwg.org/multipage/server-sent-events)."""

from __future__ import annotations

import re

LINE_END = re.compile(rb"\r\n|\n|\r")
EVENT_LIMIT = 1 << 24


class Events:
    """Reads a body in pieces of any size. Other fields than `data` are passed over."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._after_return = False  # a line ended with the last byte, a carriage return: a newline would belong to it

    def feed(self, body: bytes) -> list[bytes]:
        """Data of the events that `body` completes. Raises ValueError of an event without end."""
        if not self._line and not self._data and not self._after_return and is_one_event(body):
            return [body[6:-2]]
        if self._after_return and body:
            body, self._after_return = body.removeprefix(b"\n"), False
        return self._read(self._line + body)

    def end(self) -> list[bytes]:
        """The body is over: an event without the blank line after it is one all the same."""
        found = self._read(self._line + b"\n\n") if self._line or self._data else []
        self._line = b""
        return found

    def _read(self, text: bytes) -> list[bytes]:
        found, at = [], 0
        for end in LINE_END.finditer(text):
            line, at = text[at : end.start()], end.end()
            if line:
                self._take(line)
            elif self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        self._after_return = at == len(text) and text.endswith(b"\r")
        self._line = text[at:]
        if len(self._line) > EVENT_LIMIT or len(self._data) > EVENT_LIMIT:
            raise ValueError("an event has no end")
        return found

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))


def is_one_event(body: bytes) -> bool:
    """The usual piece, known without reading it line by line."""
    return body[:6] == b"data: " and body[-2:] == b"\n\n" and body.count(b"\n") == 2 and b"\r" not in body
