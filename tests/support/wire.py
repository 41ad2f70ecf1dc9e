"""Bytes as servers send them: responses and events in every spelling, and the same bytes in other pieces."""

import json
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data`, cut at these places."""
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(at)]


cuts = st.lists(st.integers(0, 10_000), max_size=30)


def chunked(body: bytes, sizes: Sequence[int], line: bytes = b"\r\n", trailer: bytes = b"", note: bytes = b"") -> bytes:
    """The body in chunks of these sizes, the last one as large as it must be. line: how the lines of sizes end."""
    made, at = b"", 0
    for size in [*sizes, len(body)]:
        part = body[at : at + size]
        at += size
        if part:
            made += b"%x%s%s%s\r\n" % (len(part), note, line, part)
    return made + b"0" + line + trailer + b"\r\n"


def token(text: str = " t", finish: str | None = None, **more: object) -> bytes:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}).encode()


def usage(prompt: int, completion: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}).encode()


def stream(*events: bytes, line: bytes = b"\n") -> bytes:
    return b"".join(b"data: %s%s%s" % (event, line, line) for event in events)
