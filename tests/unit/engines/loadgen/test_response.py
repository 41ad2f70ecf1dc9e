"""Answers: HTTP responses and events in pieces of any size, tokens and when they came, and how a stream can fail."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import EVENT_STREAM, chunked, cuts, pieces, stream, token, usage

from pytest_slmserve.engines.loadgen import response
from pytest_slmserve.engines.loadgen.response import (
    HEAD_LIMIT,
    LINE_LIMIT,
    Answer,
    Events,
    Malformed,
    RequestFailed,
    Response,
)

# HTTP responses

OK = b"HTTP/1.1 200 OK\r\nX-One: 1\r\n"
contents = st.binary(max_size=300)


def fed(parts: list[bytes]) -> tuple[Response, bytes]:
    found = Response()
    return found, b"".join(found.feed(part) for part in parts)


@given(
    contents,
    st.lists(st.integers(1, 40), max_size=8),
    cuts,
    st.sampled_from([b"\r\n", b"\n"]),
    st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: b\r\nC: d\r\n"]),
    st.sampled_from([b"", b";name=value", b" ;x"]),
)
def test_chunks_of_any_size_in_pieces_of_any_size(body, sizes, cut, line, trailer, note):
    data = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, sizes, line, trailer, note)
    found, got = fed(pieces(data, cut))
    assert (got, found.ended, found.reusable) == (body, True, True)
    assert (found.status, found.headers["x-one"]) == (200, "1")


@given(contents, cuts)
def test_a_body_of_a_told_length_in_pieces_of_any_size(body, cut):
    found, got = fed(pieces(OK + b"CONTENT-LENGTH:  %d\r\n\r\n" % len(body) + body, cut))
    assert (got, found.ended, found.reusable) == (body, True, True)


@given(contents, cuts)
def test_a_body_that_ends_with_the_connection(body, cut):
    found, got = fed(pieces(OK + b"\r\n" + body, cut))
    assert (got, found.ended, found.reusable) == (body, False, False)
    assert found.feed(b"") == b"" and found.ended


@given(contents, cuts, st.integers(1, 60))
def test_it_does_not_end_early_and_a_connection_that_breaks_off_is_no_end(body, cut, missing):
    data = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, [7, 7])
    found, _ = fed(pieces(data[:-missing], cut))
    assert not found.ended
    with pytest.raises(Malformed, match="broke off|unanswered"):
        found.feed(b"")


@given(cuts)
def test_interim_responses_are_passed_over(cut):
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok"
    found, got = fed(pieces(data, cut))
    assert (got, found.status, found.ended) == (b"ok", 200, True)


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
    found, _ = fed([head + b"Content-Length: 1\r\n\r\nx"])
    assert (found.ended, found.reusable) == (True, reusable)


def test_what_comes_unasked_after_the_end_makes_the_connection_useless():
    found, got = fed([OK + b"Content-Length: 1\r\n\r\nxHTTP/1.1 200 OK"])
    assert (got, found.ended, found.reusable) == (b"x", True, False)
    with pytest.raises(Malformed, match="after the end"):
        found.feed(b"y")


def test_the_value_of_a_header_may_have_a_colon():
    found, _ = fed([b"HTTP/1.1 200 OK\r\nLink: http://host:80/\r\nContent-Length: 0\r\n\r\n"])
    assert found.headers == {"link": "http://host:80/", "content-length": "0"}


@pytest.mark.parametrize("status", [204, 304])
def test_no_body_is_waited_for_where_there_is_none(status):
    found, _ = fed([b"HTTP/1.1 %d None\r\n\r\n" % status])
    assert found.ended


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP response"),
        (b"HTTP/2 200\r\n\r\n", "no HTTP/1.1 status line"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_LIMIT, "no HTTP response"),
        (OK + b"Content-Length: -1\r\n\r\n", "content length"),
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


def test_lines_may_end_with_a_newline_alone_also_after_a_chunk():
    found, got = fed([CHUNKED + b"2\nab\n3\r\ncde\n0\n\n"])
    assert (got, found.ended, found.reusable) == (b"abcde", True, True)


def test_what_follows_the_last_chunk_makes_the_connection_useless():
    found, got = fed([CHUNKED + b"1\r\na\r\n0\r\n\r\nHTTP/1.1 200 OK"])
    assert (got, found.ended, found.reusable) == (b"a", True, False)


@pytest.mark.parametrize("fill", [HEAD_LIMIT, HEAD_LIMIT + 1])
def test_a_head_may_be_as_long_as_the_limit(fill):
    head = OK + b"X: "
    found = Response()
    if fill > HEAD_LIMIT:
        with pytest.raises(Malformed):
            found.feed(head + b"x" * (fill - len(head)))
    else:
        assert found.feed(head + b"x" * (fill - len(head))) == b"" and found.status is None


@pytest.mark.parametrize("interim", [8, 9])
def test_eight_interim_responses_are_borne(interim):
    data = b"HTTP/1.1 102 Processing\r\n\r\n" * interim + OK + b"Content-Length: 0\r\n\r\n"
    if interim > 8:
        with pytest.raises(Malformed):
            fed([data])
    else:
        assert fed([data])[0].ended


@pytest.mark.parametrize("kind", [{"length": 4095}, {"length": 4097}])
def test_a_line_of_a_chunks_size_has_a_bound(kind):
    data = CHUNKED + b"1;" + b"x" * (kind["length"] - 2)
    if kind["length"] > LINE_LIMIT:
        with pytest.raises(Malformed):
            fed([data])
    else:
        assert fed([data, b"\r\na"])[1] == b"a"


# Events

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=20)
lines = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(texts, max_size=8), lines, cuts, st.sampled_from(["data: ", "data:"]))
def test_any_split_gives_the_same_events(data, line, cut, name):
    body = "".join(f": ping{line}event: x{line}{name}{text}{line}{line}" for text in data).encode()
    events = Events()
    got = [event for piece in pieces(body, cut) for event in events.feed(piece)] + events.feed(b"\n\n")
    assert [event.decode() for event in got] == [t.removeprefix(" ") if name == "data:" else t for t in data]


@given(st.lists(texts, max_size=8))
def test_the_usual_piece_is_one_event(data):
    """The short way gives what the long one gives."""
    events, slow = Events(), Events()
    for text in data:
        body = f"data: {text}\n\n".encode()
        assert events.feed(body) == [text.encode()]
        assert [e for byte in body for e in slow.feed(bytes([byte]))] == [text.encode()]


def test_an_event_is_told_with_its_last_byte_whatever_the_line_end():
    for line in (b"\n", b"\r\n", b"\r"):
        events = Events()
        assert events.feed(b"data: a" + line) == []
        assert events.feed(line) == [b"a"]


def test_lines_of_data_are_joined_and_other_fields_passed_over():
    events = Events()
    assert events.feed(b"id: 7\ndata: a\ndata: b\nretry: 5\ndata\n\n: nothing\n\nevent: x\n\n") == [b"a\nb\n"]


def test_a_newline_after_a_carriage_return_belongs_to_it_across_pieces():
    events = Events()
    assert events.feed(b"data: a\r") == [] and events.feed(b"\ndata: b\r") == []
    assert events.feed(b"\n\r") == [b"a\nb"] and events.feed(b"\n") == []
    assert events.feed(b"data: c\n\n") == [b"c"], "the short way is open again"


def test_an_event_without_its_blank_line_is_told_at_the_end():
    events = Events()
    assert events.feed(b"data: [DONE]") == []
    assert events.feed(b"\n\n") == [b"[DONE]"]
    assert events.feed(b"\n\n") == []


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(response, "EVENT_LIMIT", 100)
    events = Events()
    with pytest.raises(ValueError, match="no end"):
        for _ in range(20):
            events.feed(b"data: no line end")


# Answers

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
        ({"text": ""}, 1),  # as of a special token, or of half a character
        ({"text": "", "finish_reason": "length"}, 0),
        ({"text": "a", "finish_reason": "length"}, 1),
        ({"delta": {"thinking": "a"}}, 1),
        ({"delta": {"reasoning_details": [{}]}}, 1),
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


@pytest.mark.parametrize("count", [0, 1, (1 << 31) - 1])
def test_a_count_of_the_server_is_taken(count):
    details = {"prompt_tokens_details": {"cached_tokens": count}}
    told = json.dumps({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": count, **details}})
    answer = read(whole(token(), told.encode(), b"[DONE]"))
    assert answer.usage == (count, count) and answer.cached == count


@pytest.mark.parametrize("count", [-1, 1 << 31, 1.0, True, "3"])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_what_is_no_count_is_malformed(name, count):
    with pytest.raises(RequestFailed) as caught:
        read(whole(token(), json.dumps({"choices": [], "usage": {name: count}}).encode(), b"[DONE]"))
    assert caught.value.kind == "malformed" and name in str(caught.value)


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}])
def test_a_server_that_does_not_tell_of_its_cache_leaves_it_open(details):
    told = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, **details}}).encode()
    answer = read(whole(token(), told, b"[DONE]"))
    assert (answer.cached, answer.usage) == (None, (3, None))


@pytest.mark.parametrize("blank", ["", " ", "\t "])
def test_an_event_may_have_blanks_around_its_value(blank):
    answer = read(whole((blank + token().decode() + blank).encode(), b"[DONE]"))
    assert len(answer.times) == 1 and answer.complete


def test_a_stream_without_a_token_is_a_failure_that_says_what_the_server_counts():
    for told, fact in (((usage(3, 5),), "5"), ((), "")):
        with pytest.raises(RequestFailed) as caught:
            read(whole(json.dumps({"choices": [{"delta": {"content": ""}}]}).encode(), *told, b"[DONE]"))
        assert caught.value.kind == "no tokens" and fact in str(caught.value)
        assert ("counts" in str(caught.value)) == bool(told)


def test_the_text_of_an_error_is_waited_for_up_to_a_limit():
    answer = Answer()
    answer.read(0.0, b"HTTP/1.1 500 No\r\n\r\n" + b"x" * ((1 << 16) - 1))
    with pytest.raises(RequestFailed) as caught:
        answer.read(1.0, b"x")
    assert caught.value.kind == "HTTP 500" and len(str(caught.value)) >= 1 << 16


def test_a_stream_that_is_empty_but_for_its_head_is_no_event():
    answer = read(HEAD)
    assert not answer.response.ended and (len(answer.times), answer.complete) == (0, False)


def test_tokens_of_all_choices_are_one_chunk():
    event = {"choices": [{"text": " a"}, {"text": " b"}, {"delta": {"content": "c", "reasoning": "d"}}]}
    answer = read(whole(json.dumps(event).encode(), b"[DONE]"))
    assert list(answer.tokens) == [3] and len(answer.times) == 1


def test_a_finish_reason_completes_a_stream_without_done():
    assert read(whole(token(finish="stop"))).complete


def test_a_body_without_a_length_ends_with_the_connection():
    answer = read(EVENT_STREAM + b"\r\n" + stream(token(), b"[DONE]"), closed=True)
    assert answer.response.ended and len(answer.times) == 1


ERROR = b"HTTP/1.1 500 Oops\r\nContent-Length: 5\r\n\r\nwrong"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("data", "closed", "why", "kind"),
    [
        (ERROR, False, "HTTP 500: wrong", "HTTP 500"),
        (b"HTTP/1.1 401 No\r\n\r\nno key", True, "HTTP 401: no key", "HTTP 401"),
        (PLAIN, False, 'without streaming .application/json.*"stream": true', "no stream"),
        (HEAD + b"zz\r\n", False, "malformed chunk.* after 0 chunks with tokens", "malformed"),
        (HEAD + chunked(stream(token(), token()), [])[:-5], True, "broke off after 2 chunks with tokens", "broke off"),
        (b"", True, "closed unanswered", "broke off"),
        (whole(token(), token()), False, "ended before it was complete after 2 chunks", "broke off"),
        (whole(token(), b"{what?"), False, "malformed event", "malformed"),
        (whole(token(), b"7"), False, "malformed event", "malformed"),
        (whole(token(), b'{"choices": 7}'), False, "malformed event", "malformed"),
        (whole(token(), b'{"choices": ["a"]}'), False, "malformed event", "malformed"),
        (whole(token(), b"\xff"), False, "malformed event", "malformed"),
        (
            whole(json.dumps({"error": {"message": "too long"}}).encode()),
            False,
            "said in the stream.*too long",
            "error in the stream",
        ),
        (b"SSH-2.0\r\n", False, "no HTTP response", "malformed"),
    ],
)
@pytest.mark.parametrize("cut", [(), range(0, 2000)], ids=["whole", "bytes"])
def test_a_failure_has_a_reason_and_is_of_a_kind(data, closed, why, kind, cut):
    with pytest.raises(RequestFailed, match=why) as caught:
        read(data, cut, closed)
    assert caught.value.kind == kind
