"""Answers: what is counted as a token, when it came, and in how many ways a stream can fail."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import EVENT_STREAM, chunked, cuts, pieces, stream, token, usage

from pytest_slmserve.engines.loadgen.response import Answer, RequestFailed

HEAD = EVENT_STREAM + b"Transfer-Encoding: chunked\r\n\r\n"


def whole(*events: bytes) -> bytes:
    return HEAD + chunked(stream(*events), [40] * 50)


def read(data: bytes, cut=(), closed=False) -> Answer:
    answer = Answer()
    for at, piece in enumerate(pieces(data, cut)):
        answer.read(float(at), piece)
    if closed:
        answer.read(-1.0, b"")
    return answer


@given(st.integers(1, 20), cuts)
def test_every_token_is_stamped_with_the_piece_that_completes_it(count, cut):
    events = [token() for _ in range(count)] + [token("", "length"), usage(7, count), b"[DONE]"]
    data = whole(*events)
    answer = read(data, cut)
    assert answer.response.ended and answer.complete
    assert answer.usage == (7, count)
    assert len(answer.times) == count == sum(answer.tokens)
    body = stream(*events)
    assert list(answer.times) == expected_times(data, body, cut, count)


def expected_times(data, body, cut, count):
    """Independently: the piece in which the last byte of each token's event lies."""
    one = len(stream(token()))
    offsets = [offset for offset, inside in body_offsets(data, body)]
    ends = [offsets[one * (i + 1) - 1] for i in range(count)]
    at, bounds = 0, []
    for piece in pieces(data, cut):
        at += len(piece)
        bounds.append(at)
    return [float(next(i for i, bound in enumerate(bounds) if bound > end)) for end in ends]


def body_offsets(data, body):
    """Where each byte of the body stands in the data, chunk by chunk of forty."""
    at = len(HEAD)
    for begin in range(0, len(body), 40):
        part = body[begin : begin + 40]
        at += len(b"%x\r\n" % len(part))
        yield from ((at + i, part[i]) for i in range(len(part)))
        at += len(part) + 2


@pytest.mark.parametrize(
    ("choice", "tokens"),
    [
        ({"text": " a"}, 1),
        ({"text": ""}, 0),
        ({"text": None}, 0),
        ({"text": "", "token_ids": [5]}, 1),
        ({"text": " a b c", "token_ids": [5, 6, 7]}, 3),
        ({"delta": {"role": "assistant", "content": ""}}, 0),
        ({"delta": {"content": "a"}}, 1),
        ({"delta": {"reasoning_content": "a"}}, 1),
        ({"delta": {"tool_calls": [{}]}}, 1),
        ({"delta": {}, "token_ids": [1, 2]}, 2),
        ({"delta": {}}, 0),
    ],
)
def test_what_bears_a_token(choice, tokens):
    answer = read(whole(token(), json.dumps({"choices": [choice]}).encode(), b"[DONE]"))
    assert list(answer.tokens) == ([1, tokens] if tokens else [1])


def test_a_finish_reason_completes_a_stream_without_done():
    assert read(whole(token(finish="stop"))).complete


def test_a_body_without_a_length_ends_with_the_connection():
    answer = read(EVENT_STREAM + b"\r\n" + stream(token(), b"[DONE]"), closed=True)
    assert answer.response.ended and len(answer.times) == 1


ERROR = b"HTTP/1.1 500 Oops\r\nContent-Length: 5\r\n\r\nwrong"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("data", "closed", "why"),
    [
        (ERROR, False, "HTTP 500: wrong"),
        (b"HTTP/1.1 401 No\r\n\r\nno key", True, "HTTP 401: no key"),
        (PLAIN, False, 'without streaming .application/json.*"stream": true'),
        (HEAD + b"zz\r\n", False, "malformed chunk.* after 0 chunks with tokens"),
        (HEAD + chunked(stream(token(), token()), [])[:-5], True, "broke off after 2 chunks with tokens"),
        (b"", True, "closed unanswered"),
        (whole(token(), token()), False, "ended before it was complete after 2 chunks"),
        (whole(token(), b"{what?"), False, "malformed event"),
        (whole(token(), b"7"), False, "malformed event"),
        (whole(token(), b'{"choices": 7}'), False, "malformed event"),
        (whole(token(), b'{"choices": ["a"]}'), False, "malformed event"),
        (whole(token(), b"\xff"), False, "malformed event"),
        (whole(json.dumps({"error": {"message": "too long"}}).encode()), False, "said in the stream.*too long"),
        (b"SSH-2.0\r\n", False, "no HTTP response"),
    ],
)
@pytest.mark.parametrize("cut", [(), range(0, 2000)], ids=["whole", "bytes"])
def test_a_failure_has_a_reason(data, closed, why, cut):
    with pytest.raises(RequestFailed, match=why):
        read(data, cut, closed)


@pytest.mark.parametrize(
    ("data", "closed", "kind"),
    [
        (ERROR, False, "HTTP 500"),
        (PLAIN, False, "no stream"),
        (HEAD + b"zz\r\n", False, "malformed"),
        (whole(token(), b"7"), False, "malformed"),
        (whole(json.dumps({"error": {"message": "too long"}}).encode()), False, "error in the stream"),
        (whole(token(), token()), False, "broke off"),
        (HEAD + chunked(stream(token(), token()), [])[:-5], True, "broke off"),
        (b"", True, "broke off"),
    ],
)
def test_a_failure_is_of_a_kind(data, closed, kind):
    with pytest.raises(RequestFailed) as caught:
        read(data, (), closed)
    assert caught.value.kind == kind
