"""A server of completions with any fault on the wire, in a process of its own: `POST /FAULT/v1/completions`.

    python wire_server.py        prints its port, and serves until its standard input is closed

The first request of an endpoint asks for FIRST tokens. It is answered well, unless the fault's name begins with
"first-": then it has the fault. A fault "odd-SEED" is no fault: a good answer in any form that the formats allow. How
many tokens each answer had is told by `GET /FAULT/truth`.
"""

import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import Any

FIRST = 2
LONGEST_S = 100.0  # of one answer, however it hangs
PACE_S = 0.002

RESET = "reset"  # the connection, in place of closing it
Piece = bytes | float | str  # to send, or seconds to wait, or RESET
Fault = Callable[["Asked"], Iterable[Piece]]
FAULTS: dict[str, Fault] = {}


class Asked:
    """One request. number: of those to the same fault, from 0."""

    tokens = 4
    written = 0  # tokens of an odd answer

    def __init__(self, head: str, body: bytes, number: int) -> None:
        self.head, self.number = head, number
        with suppress(ValueError):
            self.tokens = int(json.loads(body)["max_tokens"])
        self.key = head.partition("Authorization: Bearer ")[2].partition("\r\n")[0]


def head(status: str = "200 OK", kind: str = "text/event-stream", **more: object) -> bytes:
    lines = {"Content-Type": kind, **{name.replace("_", "-"): value for name, value in more.items()}}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{text}\r\n".encode("latin-1")


def event(value: object) -> bytes:
    return b"data: %s\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())


def token(**more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": " t", **more}]})


def usage(prompt: Any, completion: Any, **more: Any) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}})


DONE = b"data: [DONE]\n\n"


def answer(asked: Asked, last: bytes | None = None, pace_s: float = PACE_S) -> Iterator[Piece]:
    """A good answer. last: in place of the server's counts."""
    yield head()
    for left in range(asked.tokens - 1, -1, -1):
        yield pace_s
        yield token(finish_reason=None if left else "length")
    yield usage(8, asked.tokens) if last is None else last
    yield DONE


def whole(pieces: Iterator[Piece]) -> bytes:
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))


def chunked(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same body in chunks, so that the connection serves on."""
    next(pieces)
    yield head(Transfer_Encoding="chunked")
    for piece in pieces:
        yield b"%x\r\n%s\r\n" % (len(piece), piece) if isinstance(piece, bytes) else piece
    yield b"0\r\n\r\n"


# Answers that are good, in forms of their own; a generator where time passes, or an answer is long


def in_two_pieces(asked: Asked) -> Iterator[Piece]:
    """So close that nobody sees an answer which has begun and not ended."""
    text = whole(answer(asked))
    at = text.index(b"data:", text.index(b"data:") + 1)
    yield 0.02
    yield text[:at]
    yield text[at:]


def rewritten(asked: Asked, old: bytes, new: bytes) -> Iterator[Piece]:
    """With other bytes in its events."""
    for piece in answer(asked):
        yield piece.replace(old, new) if isinstance(piece, bytes) and piece.startswith(b"data:") else piece


def of_large_tokens(asked: Asked) -> Iterator[Piece]:
    yield head()
    for left in range(asked.tokens - 1, -1, -1):
        yield event({"choices": [{"text": "x" * 500_000, "finish_reason": None if left else "length"}]})
    yield usage(8, asked.tokens) + DONE


FAULTS |= {
    "good": answer,
    "good-chunked": lambda asked: chunked(answer(asked)),
    "good-at-once": lambda asked: [whole(answer(asked))],
    "good-buffered": lambda asked: [0.05, whole(answer(asked))],  # as a proxy does that waits for all of it
    "good-one-event": lambda asked: [0.02, head() + token(finish_reason="length") + usage(8, asked.tokens) + DONE],
    "good-byte-by-byte": lambda asked: [bytes([byte]) for byte in whole(answer(asked))],
    "good-without-counts": partial(answer, last=b""),
    "good-counts-null": partial(answer, last=usage(None, None)),
    "good-counts-of-nothing": partial(answer, last=usage(0, 0)),
    "good-ends-early": lambda asked: [head() + token() + token(finish_reason="stop") + usage(8, 2) + DONE],
    "good-every-other-counts": lambda asked: answer(asked, last=b"" if asked.number % 2 else None),
    "good-two-pieces": in_two_pieces,
    "good-carriage-returns": partial(rewritten, old=b"\n", new=b"\r\n"),
    "good-comments": partial(rewritten, old=b"\n\n", new=b"\n\n: still here\n\nevent: ping\nid: 1\n\n"),
    "good-large-tokens": of_large_tokens,
}


def odd(asked: Asked, seed: str) -> Iterator[Piece]:
    """A good answer whose form depends on the seed: ends of lines, several tokens in an event, an event of several
    lines, comments and other fields, with the server's counts or without, in chunks or not, cut anywhere."""
    form, drawn = random.Random(seed), random.Random(f"{seed} {asked.number}")
    end, many, counts, in_chunks, early = form.choice(["\n", "\r\n"]), *(form.random() < 0.5 for _ in range(4))
    asked.written = drawn.randint(1, asked.tokens) if early else asked.tokens
    body, left = "", asked.written
    while left:
        size = drawn.randint(1, min(left, 3)) if many else 1
        left -= size
        why = None if left else "stop" if asked.written < asked.tokens else "length"
        ids: dict[str, Any] = {"token_ids": [*range(size)]} if many else {}
        text = json.dumps({"choices": [{"index": 0, "text": "t\u00e9" * size, "finish_reason": why, **ids}]})
        if drawn.random() < 0.3:  # each line is a part of the value
            text = text.replace(", ", f",{end}data: ")
        before = drawn.choice(["", "", f": ping{end}", f"event: x{end}id: 1{end}", f"retry: 5{end}{end}"])
        body += f"{before}data:{drawn.choice(['', ' '])}{text}{end}{end}"
    told = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": asked.written}}
    body += f"data: {json.dumps(told)}{end}{end}" if counts else ""
    data, pieces = f"{body}data: [DONE]{end}{end}".encode(), list[Piece]()
    while data:
        cut = drawn.randint(1, 80)
        pieces += [data[:cut], drawn.choice([0.0, PACE_S])]
        data = data[cut:]
    answered = iter([head(), *pieces])
    yield from chunked(answered) if in_chunks else answered


# Counts that are none

CACHED = {"cached-text": {"cached_tokens": "8"}, "cached-negative": {"cached_tokens": -1}, "cached-list": [8]}
NUMBERS = {"bigger": "1" + "0" * 400, "digits": "9" * 5000, "nan": "NaN", "infinity": "-Infinity"}
TEXT = b'data: {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": %s}}\n\n'
COUNTS = {
    "float": usage(8.0, 4.25), "whole-float": usage(8, 4.0), "bool": usage(True, True), "text": usage("8", "4"),
    "negative": usage(-8, -4), "huge": usage(10**18, 10**18), "one-more": usage(8, 5), "list": usage([8], [4]),
    "object": usage({"n": 8}, {"n": 4}), "is-a-list": event({"choices": [], "usage": [8, 4]}),
    "is-a-text": event({"choices": [], "usage": "8 and 4"}),
    **{name: usage(8, 4, prompt_tokens_details=details) for name, details in CACHED.items()},
    **{name: TEXT % number.encode() for name, number in NUMBERS.items()},
}  # fmt: skip
FAULTS |= {f"usage-{name}": partial(answer, last=last) for name, last in COUNTS.items()}


# Events that are none


def eventful(asked: Asked, sent: Iterable[bytes]) -> Iterator[Piece]:
    return chain([head() + token(), PACE_S], sent, [DONE])


EVENTS = {
    "deep": event(b"[" * 200_000), "deep-object": event(b'{"a":' * 100_000), "no-json": event(b"{choices: 1}"),
    "list": event([1]), "number": event(5), "null": event(None), "bytes": event(b"\xff\xfe\x00\x01"),
    "choices-number": event({"choices": 5}), "choice-null": event({"choices": [None]}),
    "ids-number": event({"choices": [{"token_ids": 5}]}), "delta-text": event({"choices": [{"delta": "text"}]}),
    "error": event({"error": {"message": "out of memory"}}),
    "escapes": event({"error": "\x1b]0;owned\x07\x1b[2J\x1b[31mred"}),
    "two-values": event(b'{"choices": []} {"choices": []}'),
}  # fmt: skip
SURROGATE = event(b'{"choices": [{"text": "\\ud800"}]}'), event({"error": "\ud800"})
FAULTS |= {f"event-{name}": partial(eventful, sent=[sent]) for name, sent in EVENTS.items()}
FAULTS |= {
    "event-never-ends": partial(eventful, sent=[b"data: " + b"x" * 1_000_000] * 20),
    "event-of-lines-without-end": partial(eventful, sent=[b"data: %s\n" % (b"x" * 60_000)] * 2000),
    "event-surrogate": partial(eventful, sent=SURROGATE),
    "event-without-tokens": lambda a: [head() + event({"choices": [{"text": "", "finish_reason": "stop"}]}) + DONE],
    "event-none-at-all": lambda asked: [head()],
    "event-without-an-end": lambda asked: [head() + token() + token()],
    "event-error-with-the-key": lambda asked: [head() + event({"error": f"the key {asked.key} is not known"})],
}

# Responses that are none

BODY = b'{"error": "no"}'
CHUNKED = head(Transfer_Encoding="chunked")
RESPONSES: dict[str, list[bytes]] = {
    "500": [head("500 Internal Server Error", "application/json") + BODY],
    "503-large": [head("503 Service Unavailable", "text/html"), *[b"<p>busy</p>" * 1000] * 200],
    "429": [head("429 Too Many Requests", "application/json", Retry_After=1) + BODY],
    "302": [head("302 Found", "text/plain", Location="http://127.0.0.1:1/")], "204": [head("204 No Content")],
    "404": [head("404 Not Found", "application/json") + BODY], "status-999": [b"HTTP/1.1 999 What\r\n\r\n"],
    "no-status": [b"HTTP/1.1\r\n\r\n"],
    "version-2": [b"HTTP/2 200\r\nContent-Type: text/event-stream\r\n\r\n" + token() + DONE],
    "random": [random.Random(7).randbytes(5000)], "escapes": [b"\x1b]0;owned\x07\x1b[2J"],
    "json": [head(kind="application/json") + b'{"choices": [{"text": "all of it"}]}'],
    "no-type": [head(kind="") + token() + DONE], "length-negative": [head(Content_Length=-5) + token() + DONE],
    "length-text": [head(Content_Length="many") + token() + DONE],
    "length-too-short": [head(Content_Length=10) + token() + DONE],
    "length-too-long": [head(Content_Length=100_000) + token() + DONE],
    "chunk-size-text": [CHUNKED + b"size\r\n" + token()],
    "chunk-size-huge": [CHUNKED + b"fffffffffffffffff\r\n" + token()],
    "chunk-size-endless": [CHUNKED + b"0" * 100_000], "trailer-endless": [CHUNKED + b"0\r\n", *[b"x" * 1000] * 100],
    "head-endless": [b"HTTP/1.1 200 OK\r\n", *[b"X: %s\r\n" % (b"y" * 1000)] * 1000],
    "interim-endless": [*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 1000],
    "gzip": [head(Content_Encoding="gzip") + b"\x1f\x8b\x08\x00" + random.Random(8).randbytes(500)],
    "lengths-that-differ": [head(Content_Length=5).replace(b"\r\n\r\n", b"\r\nContent-Length: 6\r\n\r\n") + DONE],
    "length-and-chunks": [head(Transfer_Encoding="chunked", Content_Length=5) + b"0\r\n\r\n"],
    "type-in-a-parameter": [head(kind="application/json; x=text/event-stream") + token(finish_reason="length") + DONE],
    "twice": [head(Content_Length=len(DONE)) + DONE + head(Content_Length=len(DONE)) + DONE],
}  # fmt: skip
FAULTS |= {f"http-{name}": partial(lambda asked, sent: sent, sent=sent) for name, sent in RESPONSES.items()}
UNAUTHORIZED = head("401 Unauthorized", "application/json") + b'{"error": "no key %s"}'
FAULTS |= {
    "http-401-with-the-key": lambda asked: [UNAUTHORIZED % asked.key.encode()],
    "http-type-with-the-key": lambda asked: [head(kind=f"text/plain; k={asked.key}") + BODY],
    "http-status-with-the-key": lambda asked: [b"HTTP/1.1 9%s\r\n\r\n" % asked.key.encode()],
}

# Connections


def paced(piece: bytes, count: int = round(LONGEST_S / 0.05)) -> Iterator[Piece]:
    """Pieces at even times, for as long as an answer may last."""
    return chain.from_iterable(repeat((piece, 0.05), count))


def flood(until: float) -> Iterator[Piece]:
    while time.monotonic() < until:
        yield token() * 500


BROKEN, BUSY = [head() + token(), RESET], [head("503 Busy", "text/plain") + b"busy"]
FAULTS |= {
    "wire-closed-at-once": lambda asked: [],
    "wire-reset-at-once": lambda asked: [RESET],
    "wire-closed-in-the-head": lambda asked: [head()[:20]],
    "wire-reset-in-the-middle": lambda asked: [head() + token(), PACE_S, RESET],
    "wire-every-third-breaks": lambda asked: answer(asked) if asked.number % 3 else BROKEN,
    "wire-every-third-fails": lambda asked: answer(asked) if asked.number % 3 else BUSY,
    "wire-dies-after-some": lambda asked: answer(asked) if asked.number < 6 else [RESET],
    "hang-before-the-head": lambda asked: [LONGEST_S],
    "hang-in-the-head": lambda asked: [head()[:20], LONGEST_S],
    "hang-after-the-head": lambda asked: [head(), LONGEST_S],
    "hang-in-the-middle": lambda asked: [head() + token(), LONGEST_S],
    "hang-before-the-end": lambda asked: chain(answer(asked), [LONGEST_S]),  # the connection is not closed
    "hang-after-some": lambda asked: answer(asked) if asked.number < 6 else [LONGEST_S],
    "hang-with-comments": lambda asked: chain([head()], paced(b": wait\n\n")),
    "hang-in-trickles": lambda asked: chain([head()], *(paced(bytes([b]), 1) for b in b"data: "), paced(b"x")),
    "hang-with-tokens": lambda asked: chain([head()], paced(token())),
    "usage-flood": lambda asked: chain([head()], flood(time.monotonic() + LONGEST_S)),
    "usage-flood-of-ids": lambda asked: chain([head()], repeat(token(token_ids=[5, 6, 7]), asked.tokens), [DONE]),
}


class Server:
    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=1000)
        self.port = self.listening.getsockname()[1]
        self.counts: dict[str, int] = {}
        self.written: dict[str, list[int]] = {}  # tokens of odd answers
        self.lock = threading.Lock()

    def serve(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self.connected, args=(connection,), daemon=True).start()

    def connected(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(LONGEST_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = connection.makefile("rb")
            while (asked := self.read(stream)) and self.send(connection, *asked):
                pass

    def read(self, stream: Any) -> tuple[str, Asked] | None:
        lines = []
        while line := stream.readline(1 << 16).rstrip(b"\r\n"):
            lines.append(line.decode("latin-1"))
        if not lines:
            return None
        lengths = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
        body = stream.read(int(lengths[0])) if lengths else b""
        name = lines[0].split()[1].split("/")[1]
        with self.lock:
            number = self.counts[name] = self.counts.get(name, -1) + 1
        return name, Asked("\r\n".join(lines), body, number)

    def send(self, connection: socket.socket, name: str, asked: Asked) -> bool:
        """Whether the connection serves another request."""
        if asked.head.split()[1].endswith("/truth"):
            told = json.dumps(self.written.get(name, [])).encode()
            connection.sendall(head(kind="application/json", Content_Length=len(told)) + told)
            return True
        if asked.head.startswith("GET"):
            connection.sendall(head("404 Not Found", "text/plain", Content_Length=0))
            return True
        is_first = asked.tokens == FIRST
        if is_first and not name.startswith("first-"):
            name, asked.number = "good", 0
            with self.lock:
                self.counts.clear()  # each load of a fault begins with its number 0
        answered = odd(asked, name) if name.startswith("odd-") else FAULTS[name.removeprefix("first-")](asked)
        for piece in answered:
            if isinstance(piece, float):
                time.sleep(piece)
            elif piece == RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            else:
                connection.sendall(piece)  # type: ignore[arg-type]
        with self.lock:
            self.written.setdefault(name, []).append(asked.written)
        return name == "good-chunked"


if __name__ == "__main__":
    server = Server()
    threading.Thread(target=server.serve, daemon=True).start()
    print(server.port, flush=True)
    sys.stdin.read()
