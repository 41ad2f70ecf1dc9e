"""Answers: HTTP responses and events in pieces of any size, tokens and when they came, and how a stream can fail."""

import json
from bisect import bisect_right
from itertools import accumulate

import pytest
from hypothesis import given, strategies as st
from wire import EVENT_STREAM, chunked, cuts, pieces, stream, token, usage

from pytest_slmserve.engines.loadgen import response
from pytest_slmserve.engines.loadgen.response import Answer, Events, Malformed, RequestFailed, Response, error_in

# HTTP responses

OK = b"HTTP/1.1 200 OK\r\nX-One: 1\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
contents = st.binary(max_size=300)


def fed(parts):
    found = Response()
    return found, b"".join(found.feed(part) for part in parts)


@given(
    contents, st.lists(st.integers(1, 40), max_size=8), cuts, st.sampled_from([b"\r\n", b"\n"]),
    st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: b\r\nC: d\r\n"]), st.sampled_from([b"", b";name=value", b" ;x"]),
    st.sampled_from([b"", INTERIM]), st.integers(1, 60),
)  # fmt: skip
def test_response_body_ends_by_framing(body, sizes, cut, line, trailer, note, before, missing):
    for data, closes in (
        (CHUNKED + chunked(body, sizes, line, trailer, note), False),
        (OK + b"CONTENT-LENGTH:  %d\r\n\r\n" % len(body) + body, False),
        (OK + b"\r\n" + body, True),
    ):
        found, got = fed(pieces(before + data, cut))
        assert (got, found.ended, found.reusable) == (body, not closes, not closes)
        assert (found.status, found.headers["x-one"]) == (200, "1")
        assert not closes or (found.feed(b"") == b"" and found.ended)
    found, _ = fed(pieces((CHUNKED + chunked(body, [7, 7]))[:-missing], cut))
    assert not found.ended
    with pytest.raises(Malformed, match="broke off|unanswered"):
        found.feed(b"")


@pytest.mark.parametrize(("data", "body", "reusable"), [
    (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", b"x", False),
    (b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\nx", b"x", True),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x", False),
    (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx", b"x", True),
    (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", b"x", True),
    (OK + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx", b"x", True),  # told twice alike
    (b"HTTP/1.1 204 None\r\n\r\n", b"", True),  # no body is waited for where there is none
    (b"HTTP/1.1 304 None\r\n\r\n", b"", True),
    (INTERIM * 4 + OK + b"Content-Length: 0\r\n\r\n", b"", True),  # eight are borne
    (CHUNKED + b"2\nab\n3\r\ncde\n0\n\n", b"abcde", True),  # lines may end with a newline alone
    (OK + b"Content-Length: 1\r\n\r\nxHTTP/1.1 200 OK", b"x", False),  # what comes unasked
    (CHUNKED + b"1\r\na\r\n0\r\n\r\nHTTP/1.1 200 OK", b"a", False),
])  # fmt: skip
def test_connection_reuse_follows_response(data, body, reusable):
    found, got = fed([data])
    assert (got, found.ended, found.reusable) == (body, True, reusable)
    with pytest.raises(Malformed, match="after the end"):
        found.feed(b"y")


@pytest.mark.parametrize(("data", "why"), [
    (b"SSH-2.0-OpenSSH\r\n", "no HTTP response"),
    (b"HTTP/2 200\r\n\r\n", "no HTTP/1.1 status line"),
    (OK + b"x" * (response.HEAD_LIMIT + 1 - len(OK)), "no HTTP response"),
    (OK + b"Content-Length: -1\r\n\r\n", "content length"),
    (OK + b"Content-Length: 1\r\ncontent-length: 2\r\n\r\nx", "content lengths that differ"),
    *((OK + b"Content-Length: 2\r\n"[:at] + b"Transfer-Encoding: Chunked\r\n" + b"Content-Length: 2\r\n"[at:] + b"\r\n",
       "body in chunks that has a content length") for at in (0, 19)),
    (CHUNKED + b"what?\r\n", "malformed chunk: its size is b'what"),
    (CHUNKED + b"-5\r\n", "malformed chunk"),
    (CHUNKED + b"0x5\r\nhello\r\n", "malformed chunk"),
    (CHUNKED + b"\r\n", "malformed chunk"),
    (CHUNKED + b"2\r\nabcd\r\n", "malformed chunk: it is followed by b'cd"),
    (CHUNKED + b"2\r\nabX", "malformed chunk"),
    (CHUNKED + b"1" * 20 + b"\r\n", "malformed chunk"),
    (CHUNKED + b"1" * (response.LINE_LIMIT + 1), "malformed chunk: its size has no end"),
    (CHUNKED + b"0\r\nX" + b"x" * response.LINE_LIMIT, "trailer"),
    (INTERIM * 4 + b"HTTP/1.1 102 Processing\r\n\r\n", "interim"),
])  # fmt: skip
def test_malformed_response_is_refused(data, why):
    with pytest.raises(Malformed, match=why):
        fed([data])


# Events

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(st.lists(texts, max_size=8), st.sampled_from(["\n", "\r\n", "\r"]), cuts, st.sampled_from(["data: ", "data:"]))
def test_split_stream_gives_same_events(data, line, cut, name):
    body = "".join(f": ping{line}event: x{line}{name}{text}{line}{line}" for text in data).encode()
    events = Events()
    got = [event for piece in pieces(body, cut) for event in events.feed(piece)] + events.feed(b"\n\n")
    assert [event.decode() for event in got] == [t.removeprefix(" ") if name == "data:" else t for t in data]
    for text in data:  # the usual piece is one event, by the short way
        assert events.feed(f"data: {text}\n\n".encode()) == [text.encode()]


@pytest.mark.parametrize("told", [
    {b"data: a\n": [], b"\n": [b"a"]},  # with its last byte, whatever the line end
    {b"data: a\r\n": [], b"\r\n": [b"a"]},
    {b"data: a\r": [], b"\r": [b"a"]},
    {b"id: 7\ndata: a\ndata: b\nretry: 5\ndata\n\n: nothing\n\nevent: x\n\n": [b"a\nb\n"]},
    # A newline after a carriage return belongs to it across pieces, and then the short way is open again.
    {b"data: a\r": [], b"\ndata: b\r": [], b"\n\r": [b"a\nb"], b"\n": [], b"data: c\n\n": [b"c"]},
    {b"data: [DONE]": [], b"\n\n": [b"[DONE]"], b"\n": []},  # without its blank line: at the end
])  # fmt: skip
def test_blank_line_ends_event(told):
    events = Events()
    assert [events.feed(piece) for piece in told] == [*told.values()]


def test_event_size_is_limited(monkeypatch):
    events, line, fed = Events(), b"data: " + b"x" * 58 + b"\n", 0
    with pytest.raises(ValueError, match="no end within 16 MiB"):
        while fed < 10 * response.EVENT_LIMIT:
            fed += 1000 * len(line)
            events.feed(line * 1000)
    assert fed < 1.2 * response.EVENT_LIMIT
    events = Events()
    for _ in range(3):
        assert events.feed(b"data: " + b"x" * (response.EVENT_LIMIT - 7) + b"\ndata: y\n\n") != []
    monkeypatch.setattr(response, "EVENT_LIMIT", 100)
    events = Events()
    with pytest.raises(ValueError, match="no end"):
        for _ in range(20):
            events.feed(b"data: no line end")


# Answers

HEAD = EVENT_STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
DONE = b"[DONE]"
MOST = (1 << 31) - 1


def whole(*events):
    return HEAD + chunked(stream(*events), [40] * 50)


def told(**event):
    return json.dumps(event).encode()


def read(data, cut=(), closed=False):
    answer = Answer()
    for at, piece in enumerate(pieces(data, cut)):
        answer.read(float(at), piece)
    if closed:
        answer.read(-1.0, b"")
    return answer


@given(st.integers(1, 20), cuts)
def test_completing_piece_stamps_token(count, cut):
    events = [token() for _ in range(count)] + [token("", "length"), usage(7, count), DONE]
    body, one = stream(*events), len(stream(token()))
    answer = read(whole(*events), cut)
    assert (answer.response.ended, answer.complete, answer.usage) == (True, True, (7, count))

    def place(at):
        """Of a byte of the body, which comes in chunks of forty."""
        size = min(40, len(body) - at // 40 * 40)
        return len(HEAD) + at + at // 40 * len(b"28\r\n\r\n") + len(b"%x\r\n" % size)

    bounds = [*accumulate(map(len, pieces(whole(*events), cut)))]
    assert list(answer.times) == [bisect_right(bounds, place(one * (i + 1) - 1)) for i in range(count)]
    assert list(answer.tokens) == [1] * count


@pytest.mark.parametrize(("choices", "tokens"), [
    ([{"text": " a"}], 1),
    ([{"text": ""}], 1),  # as of a special token, or of half a character
    ([{"text": "", "finish_reason": "length"}], 0),
    ([{"text": "a", "finish_reason": "length"}], 1),
    ([{"delta": {"thinking": "a"}}], 1),
    ([{"delta": {"reasoning_details": [{}]}}], 1),
    ([{"text": None}], 0),
    ([{"text": "", "token_ids": [5]}], 1),
    ([{"text": " a b c", "token_ids": [5, 6, 7]}], 3),
    ([{"delta": {"role": "assistant", "content": ""}}], 0),
    ([{"delta": {"content": "a"}}], 1),
    ([{"delta": {"reasoning_content": "a"}}], 1),
    ([{"delta": {"tool_calls": [{}]}}], 1),
    ([{"delta": {}, "token_ids": [1, 2]}], 2),
    ([{"delta": {}}], 0),
    ([{"text": " a"}, {"text": " b"}, {"delta": {"content": "c", "reasoning": "d"}}], 3),  # of all, in one chunk
])  # fmt: skip
def test_tokens_are_counted_per_chunk(choices, tokens):
    answer = read(whole(token(), told(choices=choices), DONE))
    assert list(answer.tokens) == ([1, tokens] if tokens else [1]) and len(answer.times) == len(answer.tokens)


NAMES, CACHED = ("prompt_tokens", "completion_tokens"), "prompt_tokens_details"


@pytest.mark.parametrize(("sent", "counts", "cached"), [
    *(({NAMES[0]: n, NAMES[1]: n, CACHED: {"cached_tokens": n}}, (n, n), n) for n in (0, 1, MOST)),
    *(({"prompt_tokens": 3, **more}, (3, None), None) for more in ({}, {CACHED: None}, {CACHED: {}})),
])  # fmt: skip
def test_server_token_counts_are_taken(sent, counts, cached):
    answer = read(whole(token(), told(choices=[], usage=sent), DONE))
    assert (answer.usage, answer.cached) == (counts, cached)


@pytest.mark.parametrize(("data", "closed", "complete", "tokens"), [
    *((whole(blank + token() + blank, DONE), False, True, 1) for blank in (b"", b" ", b"\t ")),
    (whole(token(finish="stop")), False, True, 1),
    (EVENT_STREAM + b"\r\n" + stream(token(), DONE), True, True, 1),
    (HEAD, False, False, 0),
    *((b"HTTP/1.1 103 Early\r\nLink: </a>\r\n\r\nHTTP/1.1 %s\r\n\r\n" % kind + stream(token(), DONE), True, True, 1)
      for kind in (b"200\r\nContent-Type: Text/Event-Stream;charset=UTF-8", b"201\r\nContent-Type: text/event-stream")),
])  # fmt: skip
def test_valid_stream_is_recognized(data, closed, complete, tokens):
    answer = read(data, closed=closed)
    assert (answer.response.ended, answer.complete, len(answer.times)) == (complete, complete, tokens)


def test_response_sizes_reach_their_limits(monkeypatch):
    answer = Answer()
    answer.read(0.0, b"HTTP/1.1 500 No\r\n\r\n" + b"x" * ((1 << 16) - 1))
    with pytest.raises(RequestFailed) as caught:
        answer.read(1.0, b"x")
    assert caught.value.kind == "HTTP 500" and len(str(caught.value)) >= 1 << 16
    monkeypatch.setattr(response, "MOST_CHUNKS", 1000)
    answer = Answer()
    answer.read(0.0, EVENT_STREAM + b"\r\n" + stream(token()) * 1000)
    with pytest.raises(RequestFailed, match="1001 tokens"):
        answer.read(0.0, stream(token()))
    found, got = fed([OK + b"x" * (response.HEAD_LIMIT - len(OK))])
    assert (found.status, got) == (None, b"")
    assert fed([CHUNKED + b"1;" + b"x" * (response.LINE_LIMIT - 2), b"\r\na"])[1] == b"a"
    found, _ = fed([b"HTTP/1.1 200 OK\r\nLink: http://host:80/\r\nContent-Length: 0\r\n\r\n"])
    assert found.headers == {"link": "http://host:80/", "content-length": "0"}


NOTHING = told(choices=[{"delta": {"content": ""}}])


@pytest.mark.parametrize(("events", "counts"), [
    ([token(), token(), token(finish="length")], {2: 2, 3: 3}),  # as llama.cpp's last chunk
    ([token(), token(), token("", "length")], {2: 2, 3: 2}),
    ([token(), token(), token("a", "length")], {2: 3, 3: 3}),  # one with a text of its own is a token in any case
    ([token(""), *[token()] * 3], {3: 3, 4: 4}),
])  # fmt: skip
def test_repeated_last_chunk_follows_usage(events, counts):
    for counted, tokens in counts.items():
        answer = read(whole(*events, usage(3, counted), DONE), (len(HEAD),))
        assert len(answer.times) == tokens == len(answer.tokens)
    for reason in ("stop", "length", "tool_calls", "function_call", "repetition"):
        answer = read(whole(token(), token(finish=reason), token(), usage(3, 2), DONE))
        assert (answer.complete, list(answer.times), list(answer.tokens)) == (True, [0.0, 0.0], [1, 1]), reason


@pytest.mark.parametrize("odd", [
    b"data:\n\n", b"data: \n\n", b": ping\n\n", b"event: ping\ndata: {}\n\n", b"event: message\n\n",
    b'data: {"error": null, "choices": []}\n\n', b'data: {"error": "", "usage": null}\n\n', b"retry: 3\nid: 7\n\n",
    b'data: {"type": "ping"}\n\n',
])  # fmt: skip
def test_odd_valid_events_are_read(odd):
    for body in (odd + stream(token(), DONE), stream(token()) + odd + stream(DONE), stream(token(), b"[DONE]  ") + odd):
        answer = read(HEAD + chunked(b"\xef\xbb\xbf" + body, []), range(0, 2000, 7))
        assert (answer.complete, len(answer.times)) == (True, 1)


@pytest.mark.parametrize(("body", "why"), [
    (stream(token(), DONE), None), (b"", None), (stream(token()), None), (stream(token("", "length"), DONE), None),
    (stream(told(error={"message": "no model"})), "no model"), (stream(token(), token(finish="abort")), "abort"),
    (stream(b"{what"), "what"), (b'{"data": [{"index": 0}]}', None), (b'{"error": "no such model"}', "no such model"),
])  # fmt: skip
def test_stream_error_is_found(body, why):
    found = error_in(body, streamed=not body.startswith(b"{"))
    assert found is None if why is None else why in found


@pytest.mark.parametrize(("chunk", "wanted", "most"), [
    ({"text": " a", "token_ids": [5]}, 4, 4), ({"text": " a", "token_ids": [5] * 3}, 4, 3),
    ({"text": " a"}, 4, response.PER_TOKEN * 4 + response.MORE_CHUNKS), ({"text": " a", "token_ids": [5]}, 1, 1),
])  # fmt: skip
def test_endless_tokens_are_refused(chunk, wanted, most):
    answer = Answer(wanted)
    answer.read(0.0, EVENT_STREAM + b"\r\n")
    with pytest.raises(RequestFailed, match=f"of a request for {wanted}") as caught:
        for _ in range(10**6):
            answer.read(0.0, stream(told(choices=[chunk])))
    assert caught.value.kind == "malformed" and most < sum(answer.tokens) <= most + len(chunk.get("token_ids", [1]))


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(("data", "closed", "why", "kind"), [
    (b"HTTP/1.1 500 Oops\r\nContent-Length: 5\r\n\r\nwrong", False, "HTTP 500: wrong", "HTTP 500"),
    (b"HTTP/1.1 401 No\r\n\r\nno key", True, "HTTP 401: no key", "HTTP 401"),
    (PLAIN.replace(b"/json", b"/json; x=text/event-stream"), False, "without streaming", "no stream"),
    (PLAIN, False, 'without streaming .application/json.*"stream": true', "no stream"),
    (HEAD + b"zz\r\n", False, "malformed chunk.* after 0 chunks with tokens", "malformed"),
    (HEAD + chunked(stream(token(), token()), [])[:-5], True, "broke off after 2 chunks with tokens", "broke off"),
    (b"", True, "closed unanswered", "broke off"),
    *((whole(token(), told(choices=[], usage={name: count}), DONE), False, name, "malformed")
      for name in NAMES for count in (-1, MOST + 1, 1.0, True, "3")),
    (whole(token(), token()), False, "ended before it was complete after 2 chunks", "broke off"),
    *((whole(token(), bad), False, "malformed event", "malformed")
      for bad in (b"{what?", b"7", b'{"choices": 7}', b'{"choices": ["a"]}', b"\xff")),
    (whole(told(error={"message": "too long"})), False, "said in the stream.*too long", "error in the stream"),
    (b"SSH-2.0\r\n", False, "no HTTP response", "malformed"),
    (whole(NOTHING, usage(3, 5), DONE), False, "without a token.* counts 5 ", "no tokens"),
    (whole(NOTHING, DONE), False, "without a token$", "no tokens"),
    *((whole(token(), told(choices=[{**choice, "finish_reason": reason}]), usage(3, 16), DONE), False,
       f"finish_reason {reason}", f"finish_reason {reason}")
      for choice in ({"text": " t"}, {"delta": {}}) for reason in ("abort", "error", "content_filter", "STOP?")),
    *((whole(token(), told(**bad), DONE), False, "said in the stream", "error in the stream")
      for bad in ({"error": "x"}, {"object": "error", "message": "x"}, {"type": "error"}, {"code": 500},
                  {"detail": "gone"}, {"message": "no", "choices": [], "usage": None})),
    *((HEAD + chunked(stream(token()) + b"event: error\n" + stream(what, DONE), []), False, "said in the stream",
       "error in the stream") for what in (b"{}", b"gone", b"")),
])  # fmt: skip
@pytest.mark.parametrize("cut", [(), range(0, 2000)], ids=["whole", "bytes"])
def test_request_failure_has_its_kind(data, closed, why, kind, cut):
    with pytest.raises(RequestFailed, match=why) as caught:
        read(data, cut, closed)
    assert caught.value.kind == kind


def result_of(told, status=b"200 OK"):
    text = json.dumps(told).encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(text)) + text


@given(cuts, st.sampled_from(["data", "results"]))
def test_result_counts_as_one_token(cut, name):
    found, counts = Answer(1, streamed=False), {"prompt_tokens": 64, "total_tokens": 64}
    parts = pieces(result_of({name: [{"embedding": "AAAA" * 20}], "usage": counts}), cut)
    for at, part in enumerate(parts):
        assert not found.complete and not found.times
        found.read(float(at), part)
    assert found.complete and found.response.reusable
    assert ([*found.times], [*found.tokens], found.usage) == ([len(parts) - 1.0], [1], (64, 1))


@pytest.mark.parametrize(("answer", "kind"), [
    (result_of({"error": {"message": "too long"}}), "error in the answer"),
    (result_of({"data": []}), "no result"),
    (result_of({"object": "list"}), "no result"),
    (result_of([1]), "malformed"),
    (result_of({"data": [1], "usage": {"prompt_tokens": -1}}), "malformed"),
    (result_of({"data": [1]}, b"503"), "HTTP 503"),
    (result_of({"data": [1]})[:-3], "broke off"),
], ids=range(7))  # fmt: skip
def test_missing_result_fails_request(answer, kind):
    found = Answer(1, streamed=False)
    with pytest.raises(RequestFailed) as caught:
        found.read(1.0, answer)
        found.read(2.0, b"")
    assert caught.value.kind == kind and not found.complete
