"""Responses: whatever the pieces, the same body and the same end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import chunked, cuts, pieces

from pytest_slmserve.engines.loadgen.response import HEAD_LIMIT, LINE_LIMIT, Malformed, Response

HEAD = b"HTTP/1.1 200 OK\r\nX-One: 1\r\n"
bodies = st.binary(max_size=300)


def fed(parts: list[bytes]) -> tuple[Response, bytes]:
    response = Response()
    return response, b"".join(response.feed(part) for part in parts)


@given(
    bodies,
    st.lists(st.integers(1, 40), max_size=8),
    cuts,
    st.sampled_from([b"\r\n", b"\n"]),
    st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: b\r\nC: d\r\n"]),
    st.sampled_from([b"", b";name=value", b" ;x"]),
)
def test_chunks_of_any_size_in_pieces_of_any_size(body, sizes, cut, line, trailer, note):
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, sizes, line, trailer, note)
    response, got = fed(pieces(data, cut))
    assert (got, response.ended, response.reusable) == (body, True, True)
    assert (response.status, response.headers["x-one"]) == (200, "1")


@given(bodies, cuts)
def test_a_body_of_a_told_length_in_pieces_of_any_size(body, cut):
    response, got = fed(pieces(HEAD + b"CONTENT-LENGTH:  %d\r\n\r\n" % len(body) + body, cut))
    assert (got, response.ended, response.reusable) == (body, True, True)


@given(bodies, cuts)
def test_a_body_that_ends_with_the_connection(body, cut):
    response, got = fed(pieces(HEAD + b"\r\n" + body, cut))
    assert (got, response.ended, response.reusable) == (body, False, False)
    response.close()
    assert response.ended


@given(bodies, cuts, st.integers(1, 60))
def test_it_does_not_end_early_and_a_connection_that_breaks_off_is_no_end(body, cut, missing):
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, [7, 7])
    response, _ = fed(pieces(data[:-missing], cut))
    assert not response.ended
    with pytest.raises(Malformed, match="broke off|unanswered"):
        response.close()


@given(cuts)
def test_interim_responses_are_passed_over(cut):
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nok"
    response, got = fed(pieces(data, cut))
    assert (got, response.status, response.ended) == (b"ok", 200, True)


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200\r\n", True),
    ],
)
def test_whether_a_connection_may_be_used_again(head, reusable):
    response, _ = fed([head + b"Content-Length: 1\r\n\r\nx"])
    assert (response.ended, response.reusable) == (True, reusable)


def test_what_comes_unasked_after_the_end_makes_the_connection_useless():
    response, got = fed([HEAD + b"Content-Length: 1\r\n\r\nxHTTP/1.1 200 OK"])
    assert (got, response.ended, response.reusable) == (b"x", True, False)
    with pytest.raises(Malformed, match="after the end"):
        response.feed(b"y")


@pytest.mark.parametrize("status", [204, 304])
def test_no_body_is_waited_for_where_there_is_none(status):
    response, _ = fed([b"HTTP/1.1 %d None\r\n\r\n" % status])
    assert response.ended


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP response"),
        (b"HTTP/2 200\r\n\r\n", "no HTTP/1.1 status line"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_LIMIT, "no HTTP response"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "content length"),
        (CHUNKED + b"what?\r\n", "malformed chunk: its size is b'what"),
        (CHUNKED + b"-5\r\n", "malformed chunk"),
        (CHUNKED + b"0x5\r\nhello\r\n", "malformed chunk"),
        (CHUNKED + b"\r\n", "malformed chunk"),
        (CHUNKED + b"2\r\nabcd\r\n", "malformed chunk: it is followed by b'cd"),
        (CHUNKED + b"2\r\nabX", "malformed chunk"),
        (CHUNKED + b"1" * 20 + b"\r\n", "malformed chunk"),
        (CHUNKED + b"1" * (LINE_LIMIT + 1), "malformed chunk: its size has no end"),
        (CHUNKED + b"0\r\nX" + b"x" * LINE_LIMIT, "trailer"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 500, "interim"),
    ],
)
def test_what_is_no_response_is_said_to_be_none(data, why):
    with pytest.raises(Malformed, match=why):
        fed([data])
