"""The response of a server to one request: pieces of bytes with their times in, tokens with their times out."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from typing import Any

from pytest_slmserve.engines.loadgen.connection import Malformed, Response

# Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events)
LINE_END = re.compile(rb"\r\n|\n|\r")
EVENT_LIMIT = 1 << 24
DECODER = json.JSONDecoder()
READ_OF_A_BODY = 1 << 16  # bytes
MOST_TOKENS = 1 << 31  # of a request: what is more is no count
HOLDS_TOKENS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class RequestFailed(Exception):
    """The request failed, and why. kind: the same in a word or two: "HTTP 503", "no stream", "error in the stream",
    "malformed", "broke off" or "no tokens"."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Answer:
    """The answer to one streaming completion, as far as it has come.

    times: when each chunk that bears tokens came. tokens: how many each of them bears, as far as it says so itself: as
    many as there are token ids, or one. usage: prompt and completion tokens, as the server counts them. cached: those
    of the prompt that it had in its cache of prefixes, where it says so.
    complete: the server has said that this is all.
    """

    def __init__(self) -> None:
        self.response = Response()
        self.times = array("d")
        self.tokens = array("I")
        self.usage: tuple[int | None, int | None] = None, None
        self.cached: int | None = None
        self.complete = False
        self._events = Events()
        self._streams = False
        self._refusal = b""

    @property
    def ended(self) -> bool:
        return self.response.ended

    def read(self, at: float, data: bytes) -> None:
        """`data` came at `at` seconds; none: the connection was closed. Raises Failed."""
        try:
            if data:
                body = self.response.feed(data)
            else:
                self.response.close()
                body = b""
            self._read_body(at, body)
        except Malformed as error:
            raise RequestFailed("malformed" if data else "broke off", f"{error}{self._so_far()}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RequestFailed("malformed", f"malformed event: {error}") from None

    def _read_body(self, at: float, body: bytes) -> None:
        if not self._streams and not self._begins():
            return self._refuse(body) if self.response.status else None
        events = self._events.feed(body) if body else []
        if self.response.ended:
            events += self._events.end()
        for data in events:
            self._take(at, data)
        if self.response.ended and not self.complete:
            raise RequestFailed("broke off", f"the stream ended before it was complete{self._so_far()}")
        if self.response.ended and not self.times:
            counted = "" if self.usage[1] is None else f", of which the server counts {self.usage[1]}"
            hint = "" if self.usage[1] is None else " (does the server decode them to text?)"
            raise RequestFailed("no tokens", f"the stream was complete without a token{counted}{hint}")

    def _begins(self) -> bool:
        """Report whether the response is a stream of events, by its status and content type so far."""
        kind = self.response.headers.get("content-type", "")
        self._streams = self.response.status == 200 and "text/event-stream" in kind
        return self._streams

    def _refuse(self, body: bytes) -> None:
        """Wait for the text of an error, which says what is wrong."""
        self._refusal += body
        if not self.ended and len(self._refusal) < READ_OF_A_BODY:
            return
        text = self._refusal.decode(errors="replace")
        if self.response.status != 200:
            raise RequestFailed(f"HTTP {self.response.status}", f"HTTP {self.response.status}: {text}")
        kind = self.response.headers.get("content-type", "no content type")
        why = f'the server answered without streaming ({kind}); the body needs "stream": true: {text}'
        raise RequestFailed("no stream", why)

    def _take(self, at: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        event = parsed(data.decode())
        if event.get("error") or event.get("object") == "error":
            raise RequestFailed("error in the stream", f"the server said in the stream: {data.decode()}")
        tokens = 0
        for choice in event.get("choices") or ():
            tokens += tokens_in(choice)
            self.complete = self.complete or bool(choice.get("finish_reason"))
        if tokens:
            self.times.append(at)
            self.tokens.append(tokens)
        if usage := event.get("usage"):
            self.usage = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
            self.cached = count_in(usage.get("prompt_tokens_details") or {}, "cached_tokens")

    def _so_far(self) -> str:
        chunks = "chunk" if len(self.times) == 1 else "chunks"
        return f" after {len(self.times)} {chunks} with tokens" if self.response.status else ""

    @property
    def output_tokens(self) -> int:
        """The server's count where it gave one."""
        return sum(self.tokens) if self.usage[1] is None else self.usage[1]


def parsed(text: str) -> dict[str, Any]:
    """The event that `text` holds as JSON. `json.loads`, which first looks for blanks around the value, parses it only
    where something follows the value. Raises ValueError."""
    value, end = DECODER.raw_decode(text)
    event: dict[str, Any] = value if end == len(text) else json.loads(text)
    return event


def tokens_in(choice: Mapping[str, Any]) -> int:
    if ids := choice.get("token_ids"):
        return len(ids)
    delta = choice.get("delta")
    return int(any(map(delta.get, HOLDS_TOKENS))) if delta else int(bool(choice.get("text")))


def count_in(usage: Mapping[str, Any], name: str) -> int | None:
    """A server's count of tokens, None where it gives none. Raises ValueError for what is no count."""
    count: int | None = usage.get(name)
    if count is not None and (type(count) is not int or not 0 <= count < MOST_TOKENS):
        raise ValueError(f"its usage has {count!r:.40} for {name}")
    return count


class Events:
    """Server-sent events: bytes of a body in, in pieces of any size, data of events out. Other fields than `data`
    are passed over."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._after_return = False  # a line ended with the last byte, a carriage return: a newline would belong to it

    def feed(self, body: bytes) -> list[bytes]:
        """Data of the events that `body` completes. Raises ValueError of an event without end."""
        if not self._line and not self._data and not self._after_return and is_one_event(body):
            return [body[6:-2]]
        if self._after_return and body:
            body, self._after_return = body.removeprefix(b"\n"), False
        if b"\n" not in body and b"\r" not in body:  # looked at once: a token may have megabytes
            self._line += body
            return self._unended([])
        return self._read(bytes(self._line + body))

    def end(self) -> list[bytes]:
        """The body is over: an event without the blank line after it is one all the same."""
        found = self._read(bytes(self._line + b"\n\n")) if self._line or self._data else []
        self._line.clear()
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
        self._line = bytearray(text[at:])
        return self._unended(found)

    def _unended(self, found: list[bytes]) -> list[bytes]:
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
