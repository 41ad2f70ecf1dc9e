"""The response of a server to one request, from pieces of bytes with their times to tokens with their times."""

import json
import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any

HEAD_LIMIT, LINE_LIMIT, INTERIM_LIMIT = 1 << 16, 1 << 12, 8
BLANK_LINE = re.compile(rb"\r?\n\r?\n")
STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-5]\d\d)(?: .*)?")
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?")
WITHOUT_BODY = {204, 304}


class Malformed(Exception):
    """The error of bytes that are not an HTTP/1.1 response, or that end in the middle of one."""


class Response:
    """One response, parsed as its bytes arrive.

    Attributes:
        status: None until the head is complete.
        headers: with names in lower case.
        ended: whether the response is complete.
        reusable: whether the connection may carry another request, once the response has ended.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.ended = False
        self.reusable = False
        self._rest = b""
        self._left = 0  # bytes of a body or a chunk that are still to come
        self._in_chunk = False  # or in the end of line after it
        self._in_trailer = False
        self._interim = 0
        self._next: Callable[[bytes], bytes] | None = self._head  # None: the rest is body, until the peer closes

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in `data`. Raise Malformed if it is not HTTP.

        Empty data means that the peer has closed, which ends a body without a length.
        """
        if not data and not self.ended and self._next:
            raise Malformed("the connection broke off" if self.status else "the connection was closed unanswered")
        if data and self.ended:
            raise Malformed("bytes after the end of a response")
        self.ended = self.ended or not data
        if self._rest:
            data, self._rest = self._rest + data, b""
        return self._next(data) if data and self._next else data

    def _head(self, data: bytes) -> bytes:
        blank = BLANK_LINE.search(data)
        if not blank:
            if len(data) > HEAD_LIMIT or not (data[:5] == b"HTTP/" or b"HTTP/".startswith(data)):
                raise Malformed(f"no HTTP response: it begins with {data[:40]!r}")
            self._rest = data
            return b""
        first, *lines = data[: blank.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
        rest = data[blank.end() :]
        status = STATUS_LINE.fullmatch(first)
        if not status:
            raise Malformed(f"no HTTP/1.1 status line: {first[:80]!r}")
        if status[2].startswith("1"):  # interim: the response itself is still to come
            self._interim += 1
            if self._interim > INTERIM_LIMIT:
                raise Malformed("nothing but interim responses")
            return self._head(rest) if rest else b""
        self.status = int(status[2])
        named = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        self.headers = dict(named)
        wanted = self.headers.get("connection", "keep-alive" if status[1] == "1" else "close").lower()
        self.reusable = "close" not in wanted
        length = self.headers.get("content-length", "")
        chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        # Readers could disagree where the body ends and the next response begins (RFC 9112, 6.3).
        if len({value for name, value in named if name == "content-length"}) > 1:
            raise Malformed("content lengths that differ")
        if length and chunked:
            raise Malformed("a body in chunks that has a content length")
        if self.status in WITHOUT_BODY:
            self.ended = True
        elif chunked:
            self._next = self._chunks
        elif length:
            if not length.isdecimal():
                raise Malformed(f"a content length of {length[:40]!r}")
            self._left, self._next = int(length), self._counted
            self.ended = not self._left
        else:
            self.reusable, self._next = False, None
        if self.ended:
            self.reusable = self.reusable and not rest
            return b""
        return self._next(rest) if rest and self._next else rest

    def _counted(self, data: bytes) -> bytes:
        body = data[: self._left]
        self._left -= len(body)
        if not self._left:
            self.ended = True
            self.reusable = self.reusable and len(data) == len(body)
        return body

    def _chunks(self, data: bytes) -> bytes:
        body, at = [], 0
        while at < len(data):
            if self._left:
                body.append(data[at : at + self._left])
                at += len(body[-1])
                self._left -= len(body[-1])
                continue
            end = data.find(b"\n", at)
            line = data[at:] if end < 0 else data[at:end]
            if self._in_chunk and line not in (b"", b"\r"):
                raise Malformed(f"malformed chunk: it is followed by {line[:40]!r}")
            if end < 0:
                if len(line) > LINE_LIMIT:
                    what = "the trailer of a response has" if self._in_trailer else "malformed chunk: its size has"
                    raise Malformed(f"{what} no end")
                self._rest = line
                break
            at = end + 1
            if self._in_trailer and line in (b"", b"\r"):
                self.ended = True
                self.reusable = self.reusable and at == len(data)
                break
            if not (self._in_chunk or self._in_trailer):
                size = CHUNK_SIZE.fullmatch(line)
                if not size:
                    raise Malformed(f"malformed chunk: its size is {line[:40]!r}")
                self._left = int(size[1], 16)
                self._in_trailer = not self._left
            self._in_chunk = self._left > 0
        return body[0] if len(body) == 1 else b"".join(body)


# Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events)
LINE_END = re.compile(rb"\r\n|\n|\r")
EVENT_LIMIT = 1 << 24  # bytes of an event
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EVENT_STREAM = "text/event-stream"
STREAMS = (200, 201)
DECODER = json.JSONDecoder()
READ_OF_A_BODY = 1 << 16  # bytes
MOST_TOKENS = 1 << 31  # of a request; a larger number is not a count
MOST_CHUNKS = 1 << 20  # of an answer without a limit
PER_TOKEN, MORE_CHUNKS = 16, 64  # chunks without token ids, because some servers divide the text of a token
HOLDS_TOKENS = (
    "content",
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking",
    "tool_calls",
    "function_call",
    "refusal",
)
# Reasons of a successful end: of OpenAI's reference, of vLLM (`repetition`), and of servers that name the last token
# (Text Generation Inference). Any other reason, for example "abort" or "content_filter", is a failure.
WHOLE = {"stop", "length", "tool_calls", "function_call", "repetition", "eos", "eos_token", "stop_sequence"}
RESULTS = ("data", "results")  # keys of vectors and classes, and of scores
TELLS_ERROR = ("code", "message", "detail")  # keys of an error without choices and usage


class RequestFailed(Exception):
    """The failure of a request.

    Attributes:
        kind: its reason in a word or two: "HTTP 503", "no stream", "error in the stream", "error in the answer",
            "finish_reason abort", "malformed", "broke off", "no tokens" or "no result".
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Answer:
    """The answer to a streaming completion so far, or to a request for a result, which is one JSON object.

    Attributes:
        times: arrival time of each chunk with tokens.
        tokens: number in each of these chunks: its token ids, or one.
        usage: prompt and completion tokens by the server's count.
        cached: prompt tokens from the server's prefix cache, if it reports them.
        complete: whether the server has reported the end.
    """

    def __init__(self, wanted: int | None = None, streamed: bool = True) -> None:
        """Await an answer.

        Args:
            wanted: limit of output tokens; None: no limit. There may be more chunks, because the last one may repeat
                the one before, and some servers divide a token's text.
            streamed: whether the answer is a stream of tokens, and not a result.
        """
        self._wanted = MOST_CHUNKS if wanted is None else wanted
        self._most = MOST_CHUNKS if wanted is None else PER_TOKEN * wanted + MORE_CHUNKS
        self._shown = self._with_ids = 0  # tokens
        self.response = Response()
        self.times = array("d")
        self.tokens = array("I")
        self.usage: tuple[int | None, int | None] = None, None
        self.cached: int | None = None
        self.complete = False
        self._events = Events()
        self._awaits_tokens = streamed
        self._streams = False
        self._refusal = b""
        self._said: object = None  # content of the last chunk with a choice
        self._doubtful: list[int] = []  # places in `times` of chunks that may have no token

    def read(self, at: float, data: bytes) -> None:
        """Read data that arrived at `at` seconds. Empty data is the end of the connection. Raise RequestFailed."""
        response = self.response
        try:
            body = response.feed(data)
            if not self._streams:
                kind = response.headers.get("content-type", "no content type")
                self._streams = response.status in STREAMS and is_stream(kind)
            if not self._streams:  # wait for the text of an error
                self._refusal += body
                if response.status is None or not (response.ended or len(self._refusal) >= READ_OF_A_BODY):
                    return
                if not self._awaits_tokens and response.status in STREAMS:
                    return self._take_result(at) if response.ended else None
                text = self._refusal.decode(errors="replace")
                if response.status not in STREAMS:
                    raise RequestFailed(f"HTTP {response.status}", f"HTTP {response.status}: {text}")
                why = f'the server answered without streaming ({kind}); the body needs "stream": true: {text}'
                raise RequestFailed("no stream", why)
            events = self._events.feed(body) if body else []
            if response.ended:
                events += self._events.feed(b"\n\n")  # an event without the blank line after it
            for event in events:
                self._take(at, event)
            if response.ended:
                self._leave_out_doubtful()
        except Malformed as error:
            raise RequestFailed("malformed" if data else "broke off", f"{error}{self._so_far()}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RequestFailed("malformed", f"malformed event: {error}") from None
        if response.ended and not self.complete:
            raise RequestFailed("broke off", f"the stream ended before it was complete{self._so_far()}")
        if response.ended and not self.times:
            counted = self.usage[1]
            more = f", of which the server counts {counted} (does the server decode them to text?)"
            why = f"the stream was complete without a token{'' if counted is None else more}"
            raise RequestFailed("no tokens", why)

    def _take(self, at: float, data: bytes) -> None:
        if isinstance(data, ErrorEvent):
            raise RequestFailed(
                "error in the stream", f"the server said in the stream: {data.decode(errors='replace')}"
            )
        if data[:1] != b"{" and (data := data.strip()) in (b"", b"[DONE]"):  # empty: a heartbeat
            self.complete = self.complete or bool(data)
            return
        text = data.decode()
        # `json.loads` first looks for blanks around the value, so it parses only an event with more than the value.
        event: Any
        try:
            event, end = DECODER.raw_decode(text) if text.startswith("{") else (None, -1)
            if end != len(text):
                event = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{error}: {text}") from None
        choices, usage = event.get("choices") or (), event.get("usage")
        failed = event.get("error") or "error" in (event.get("object"), event.get("type"))
        if failed or (not (choices or usage) and any(map(event.get, TELLS_ERROR))):
            raise RequestFailed("error in the stream", f"the server said in the stream: {text}")
        tokens, doubtful = 0, False
        for choice in choices:
            reason, delta, shown = choice.get("finish_reason"), choice.get("delta"), choice.get("text")
            said = shown if delta is None else delta
            if self.complete:
                pass  # chunks after the end repeat it
            elif ids := choice.get("token_ids"):
                tokens += len(ids)
                self._with_ids += len(ids)
            elif delta:
                tokens += any(map(delta.get, HOLDS_TOKENS))
            elif shown or (shown is not None and not reason):
                tokens += 1  # even with an empty text, like that of a special token or half a character
                doubtful = not shown or (bool(reason) and said == self._said)
            self._said = said
            if reason and reason not in WHOLE:
                raise RequestFailed(f"finish_reason {reason!s:.20}", f"the server ended it by finish_reason {reason}")
            self.complete = self.complete or bool(reason)
        if tokens:
            if doubtful:
                self._doubtful.append(len(self.times))
            self.times.append(at)
            self.tokens.append(tokens)
            self._shown += tokens
            if self._with_ids > self._wanted or self._shown > self._most:
                raise RequestFailed("malformed", f"{self._shown} tokens came of a request for {self._wanted}")
        if usage:
            self.usage = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
            self.cached = count_in(usage.get("prompt_tokens_details") or {}, "cached_tokens")

    def _take_result(self, at: float) -> None:
        text = self._refusal.decode(errors="replace")
        try:
            told = json.loads(text)
        except ValueError:
            raise RequestFailed("malformed", f"the answer is not JSON: {text}") from None
        if not any(map(told.get, RESULTS)):
            raise RequestFailed("error in the answer" if told.get("error") else "no result", f"no result: {text}")
        usage = told.get("usage") or {}
        self.times.append(at)
        self.tokens.append(1)
        self.usage, self.complete = (count_in(usage, "prompt_tokens"), 1), True

    def _leave_out_doubtful(self) -> None:
        beyond = sum(self.tokens) - self.usage[1] if self.usage[1] else 0
        while beyond > 0 and self._doubtful:
            place = self._doubtful.pop()  # the last one first, which repeats the one before, or is empty
            del self.times[place], self.tokens[place]
            beyond -= 1

    def _so_far(self) -> str:
        chunks = "chunk" if len(self.times) == 1 else "chunks"
        return f" after {len(self.times)} {chunks} with tokens" if self.response.status else ""


def count_in(usage: Mapping[str, Any], name: str) -> int | None:
    """Return a server's count of tokens, or None if it gives none. Raise ValueError if it is not a count."""
    count: int | None = usage.get(name)
    if count is not None and (type(count) is not int or not 0 <= count < MOST_TOKENS):
        raise ValueError(f"its usage has {count!r:.40} for {name}")
    return count


class ErrorEvent(bytes):
    """The data of an event with the name "error"."""


class Events:
    """A parser of server-sent events, from pieces of a body to the data of events.

    Apart from `data` it knows only `event: error`. It skips a byte order mark at the beginning.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._name = b""
        self._data = bytearray()  # with a newline after each line
        self._after_return = False  # a line ended with the last byte, a carriage return: a newline would belong to it
        self._first = True  # no line has ended

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events that `body` completes. Raise ValueError if an event is too long."""
        # A piece is usually one event, which needs no reading line by line.
        usual = body[:6] == b"data: " and body[-2:] == b"\n\n" and body.count(b"\n") == 2 and b"\r" not in body
        if usual and not self._line and not self._data and not self._after_return and not self._name:
            self._first = False
            return [body[6:-2]]
        if self._after_return and body:
            body, self._after_return = body.removeprefix(b"\n"), False
        found: list[bytes] = []
        if b"\n" not in body and b"\r" not in body:  # a token may have megabytes, so do not search them again
            self._line += body
        else:
            text, at = bytes(self._line + body), 0
            for end in LINE_END.finditer(text):
                line, at = text[at : end.start()], end.end()
                if self._first:
                    line, self._first = line.removeprefix(BYTE_ORDER_MARK), False
                field, _, value = line.partition(b":")
                if field == b"data":
                    self._data += value.removeprefix(b" ") + b"\n"
                elif field == b"event":
                    self._name = value.removeprefix(b" ")
                elif not line:
                    if self._data:
                        joined = bytes(self._data[:-1])
                        found.append(ErrorEvent(joined) if self._name == b"error" else joined)
                        self._data.clear()
                    self._name = b""
            self._after_return = at == len(text) and text.endswith(b"\r")
            self._line = bytearray(text[at:])
        if len(self._line) + len(self._data) > EVENT_LIMIT:
            raise ValueError(f"an event has no end within {EVENT_LIMIT >> 20} MiB")
        return found


def is_stream(kind: str) -> bool:
    """Return whether a content type is that of an event stream, with any parameters."""
    return kind.partition(";")[0].strip().lower() == EVENT_STREAM


def error_in(body: bytes, *, streamed: bool = True) -> str | None:
    """Return why a body fails its request, or None. An incomplete body is no failure.

    A stream of few tokens may have no text.

    Args:
        streamed: whether the body is a stream of events, and not a whole answer.
    """
    answer = Answer(streamed=streamed)
    try:
        head = f"HTTP/1.1 200\r\ncontent-type: {EVENT_STREAM if streamed else 'application/json'}\r\n\r\n"
        answer.read(0.0, head.encode() + body)
        answer.read(0.0, b"")
    except RequestFailed as error:
        return None if error.kind in ("no tokens", "broke off") else str(error)
    return None
