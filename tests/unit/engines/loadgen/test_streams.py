"""Requests as bytes, and many streams on non-blocking connections to sockets that the test serves: what arrives is
stamped and read whole, however it is cut, and each way to fail is told apart. Steps, as the streams show them."""

import socket
import struct
import time
from contextlib import ExitStack, closing, suppress
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st
from wire import EVENT_STREAM, pieces, stream, token, usage

from pytest_slmserve.engines.loadgen import streams as module
from pytest_slmserve.engines.loadgen.streams import TOLD, Bodies, Lead, RequestStream, Streams, Target, address_of
from pytest_slmserve.schema.printable import HIDDEN, SHORTEST

# Targets and bodies

TARGET = Target("http://host/v1/completions", {})
keys = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=SHORTEST, max_size=40)


@pytest.mark.parametrize(("url", "line", "host", "port"), [
    ("http://127.0.0.1:8000/v1/completions", b"POST /v1/completions HTTP/1.1", b"127.0.0.1:8000", 8000),
    ("http://host/v1?a=b", b"POST /v1?a=b HTTP/1.1", b"host", 80),
    ("https://host", b"POST / HTTP/1.1", b"host", 443),
    ("http://[::1]:81/x", b"POST /x HTTP/1.1", b"[::1]:81", 81),
])  # fmt: skip
def test_request_is_encoded_completely(url, line, host, port):
    target = Target(url, {"Authorization": "Bearer key1"})
    head, _, body = Bodies(target, ['{"prompt": "\u00e9"}']).of(0).partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert (first, body.decode(), target.port) == (line, '{"prompt": "\u00e9"}', port)
    assert {b"Host: " + host, b"Authorization: Bearer key1", b"Content-Length: %d" % len(body)} <= {*lines}
    encrypted = Streams(target, 1.0)._context
    assert encrypted.check_hostname if url.startswith("https:") else encrypted is None


@given(keys, st.text(max_size=30), st.text(max_size=30))
def test_failure_text_hides_key(key, before, after):
    target = Target("http://host/", {"Authorization": f"Bearer {key}", "X-Api-Key": key})
    for said in (key, f"Bearer {key}"):
        text = target.shown(before + said + after)
        assert key not in text.replace(HIDDEN, "") and HIDDEN in text
    open_headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "X-Number": "1"}
    target = Target("http://host/", {"Authorization": "Bearer my-own-key", **open_headers})
    assert target.secrets == ("Bearer my-own-key", "my-own-key")
    assert target.shown("it was Bearer my-own-key") == f"it was {HIDDEN}"
    told = TARGET.shown('HTTP 400: {"error":{"message":' + 40 * '"some words here","type":"x",')
    assert len(told) <= TOLD and told.endswith(("words ...", "some ...", ", ...", '"some ...')), told
    assert (TARGET.shown("short"), len(TARGET.shown("x" * 400))) == ("short", TOLD)


@pytest.mark.parametrize(("url", "header"), [
    *((url, {}) for url in ("host:80/v1", "ftp://host/", "http://", "http://me:secret@host/", "http://host:x/")),
    *(("http://host/", header) for header in ({"A": "b\r\nC: secret"}, {"A\n": "secret"}, {"\u00e9": "secret"})),
])  # fmt: skip
def test_refused_url_hides_secret(url, header):
    with pytest.raises(ValueError) as caught:
        Target(url, {"Authorization": "Bearer secret", **header})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("bodies", "rounds", "loads", "sent"), [
    (["a", "b"], (), [range(5), [0]], "a b a b a a"),
    (["a", "b<>"], ["1", "22"], [range(4)], "a b1 a b22"),  # one without the mark is sent as it is
    (["<>"], ["1", "2"], [range(3)], "1 2 1"),  # after the last round comes the first
    (["<>", "-<><>"], [f"r{i}" for i in range(9)], [(0, 3), [0], (0, 1, 2)], "r0 -r1<> r2 r3 -r3<> r4"),
])  # fmt: skip
def test_each_round_has_fresh_text(bodies, rounds, loads, sent):
    made, found = Bodies(TARGET, bodies, "<>", rounds), []
    for numbers in loads:
        for number in numbers:
            head, _, body = made.of(number).partition(b"\r\n\r\n")
            assert f"Content-Length: {len(body)}".encode() in head, "as long as it says"
            found.append(body.decode())
        made.begin_anew()
    assert " ".join(found) == sent


# Connections

SECRET = "sk-nobody-may-see"
DONE = token(finish="length"), usage(7, 3), b"[DONE]"
ENDLESS = EVENT_STREAM + b"\r\n"


def answer(*events, head=b""):
    body = stream(*events)
    return EVENT_STREAM + head + b"Content-Length: %d\r\n\r\n" % len(body) + body


WHOLE = answer(token(), token(), *DONE)


class Line:
    """A socket that listens, the connections that it has accepted, and streams to it."""

    def __init__(self, timeout_s=30.0, waiting=0, listens=True):
        self.listener, self.accepted = socket.create_server(("127.0.0.1", 0)), []
        self.port = self.listener.getsockname()[1]
        target = Target(f"http://127.0.0.1:{self.port}/v1", {"Authorization": f"Bearer {SECRET}"})
        if not listens:
            self.listener.close()
        self.streams = Streams(target, timeout_s)
        self.streams.begin_anew(waiting)

    def accept(self, within_s=10):
        self.listener.settimeout(within_s)
        self.accepted.append(self.listener.accept()[0])
        self.accepted[-1].settimeout(10)
        return self.accepted[-1]

    @property
    def waits(self):
        try:
            return bool(self.accept(0))
        except BlockingIOError:
            return False

    def until(self, over):
        for _ in range(1000):
            if over():
                return
            self.streams.turn(0.01)
        raise AssertionError("it does not come about")

    def send(self, body=b"hello"):
        made = RequestStream(0, 3, body)
        self.streams.send(made)
        return made

    def begin(self):
        """A stream whose request has arrived, and its connection there."""
        one = self.send()
        self.until(lambda: one.sent)
        there = self.accept()
        assert received(there, 5) == b"hello"
        return one, there

    def over(self, one):
        self.until(lambda: self.streams.ended)
        assert self.streams.ended.popleft() is one and not self.streams.ended and one not in self.streams.in_flight
        return one

    def close(self):
        for each in (self.listener, *self.accepted, *(each.socket for each in self.streams._connections.values())):
            each.close()
        self.streams.epoll.close()


def received(connection, count):
    data = b""
    while len(data) < count:
        data += connection.recv(1 << 16)
    return data


@pytest.fixture
def open_line():
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(closing(Line(**how)))


@pytest.fixture
def line(open_line):
    return open_line()


@pytest.mark.parametrize("cut", [(), range(0, 2000, 7), range(2000)], ids=["whole", "sevens", "bytes"])
def test_split_answer_arrives_whole(line, cut):
    streams, before = line.streams, time.monotonic()
    one, there = line.begin()
    data = pieces(WHOLE, cut)
    for piece in data:
        there.sendall(piece)
        streams.turn(0.0 if len(data) > 1 else 0.01)
    line.over(one)
    assert (list(one.answer.tokens), one.answer.usage, one.failure, one.cut) == ([1, 1, 1], (7, 3), None, False)
    assert before <= one.asked <= one.sent <= one.answer.times[0] <= one.answer.times[-1] <= time.monotonic()
    assert one.read_until >= one.answer.times[-1] and streams.heard >= one.sent
    assert (streams.tokens_read, streams.pieces, streams._unread_bytes) == (3, streams.pieces_read, 0)


def test_large_request_is_sent_completely(line):
    body = bytes(range(256)) * 40_000
    one = line.send(body)
    line.until(lambda: one.sent)
    there, got = line.accept(), bytearray()
    there.settimeout(0.001)
    while len(got) < len(body):
        line.streams.turn(0.0)
        with suppress(TimeoutError):
            got += there.recv(1 << 20)
    assert got == body
    there.sendall(WHOLE)
    assert line.over(one).failure is None


def test_closed_idle_connection_is_replaced(open_line):
    """The server closed just as it was sent: it has waited since the first time."""
    line = open_line()
    streams, (one, first), (two, second) = line.streams, line.begin(), line.begin()
    assert list(streams.in_flight) == [one, two]
    for each, there in ((two, second), (one, first)):
        there.sendall(WHOLE)
        line.over(each)
    assert len(streams._idle) == 2 and streams.in_flight == {}
    three = line.send(b"once more")
    at = three.sent
    assert at and received(first, 9) == b"once more" and not line.waits
    first.close()
    line.until(lambda: line.waits)
    line.until(lambda: three.connection)
    anew = line.accepted[-1]
    assert received(anew, 9) == b"once more" and three.sent == at
    anew.sendall(WHOLE)
    assert line.over(three).failure is None and three.answer.usage == (7, 3) and streams._refused == 0
    line = open_line(waiting=3)
    streams, (first, second, _) = line.streams, [line.accept() for _ in range(3)]
    assert not line.waits
    first.close()
    line.until(lambda: len(streams._idle) == 2)
    streams.begin_anew(3)
    assert line.waits and not line.waits, "in the place of the one that was closed"
    streams.begin_anew(2)
    assert not line.waits
    second.sendall(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    line.until(lambda: len(streams._idle) == 2)
    assert second.recv(10) == b"" and streams.in_flight == {}, "what one says unasked ends it"


@pytest.mark.parametrize(("data", "reset", "kind", "facts"), [
    (answer(token(), *DONE, head=b"Connection: close\r\n"), False, None, []),  # one that ends with its answer is none
    (ENDLESS + stream(*DONE), False, None, []),
    (b"", False, "broke off", ["unanswered"]),
    (WHOLE[:-10], False, "broke off", ["3 chunks"]),
    (ENDLESS + stream(token()), False, "broke off", ["1 chunk "]),
    (WHOLE[:-30], True, "broke off", ["chunks", "ConnectionResetError"]),
    (b"SSH-2.0-OpenSSH\r\n", False, "malformed", ["SSH"]),
    (b"HTTP/1.1 500 No\r\n\r\nno room for Bearer sk-nobody-may-see", False, "HTTP 500", ["no room for ", HIDDEN]),
])  # fmt: skip
def test_failed_stream_tells_its_kind(line, data, reset, kind, facts):
    one, there = line.begin()
    there.sendall(data)
    if reset:
        line.until(lambda: one.answer.times)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    told, why = line.over(one).failure or (None, "")
    assert told == kind and all(fact in why for fact in facts) and SECRET not in why
    assert kind is None or one.sent <= one.failed <= time.monotonic()
    assert (line.streams._idle, line.streams._unread_bytes, len(one.unread)) == ({}, 0, 0)
    assert line.begin()[1] is not there


@pytest.mark.parametrize(("error", "told"), [
    (None, "ConnectionRefusedError: Connection refused"),  # nobody listens
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "gaierror: Name or service not known"),
    (ConnectionRefusedError(111, "refused", "10.0.0.1"), "ConnectionRefusedError: refused"),
    (OSError("alone"), "OSError: alone"),
])  # fmt: skip
def test_missing_connection_is_explained(open_line, monkeypatch, error, told):
    if error:
        monkeypatch.setattr(module.socket, "getaddrinfo", Mock(side_effect=error))
    began, line = time.monotonic(), open_line(listens=False, waiting=4)
    assert time.monotonic() - began < module.CONNECT_S / 2
    sent = [line.send(), line.send()]
    line.until(lambda: len(line.streams.ended) == 2)
    assert [*line.streams.ended] == sent and line.streams.in_flight == {}
    assert [each.failure for each in sent] == [("no connection", f"no connection: {told}")] * 2
    assert not any(each.sent for each in sent)


# Ends


def test_expired_requests_time_out(open_line):
    line = open_line(timeout_s=5.0)
    streams, ((one, first), (two, _), (three, _)) = line.streams, [line.begin() for _ in range(3)]
    first.sendall(ENDLESS + stream(token(), token()))
    line.until(lambda: len(one.answer.times) == 2)
    two.unread.append(((0.0, 0.0, 0.0), b"", b"more"))
    streams._unread_bytes += 4
    streams.expire(two.asked + 4.999)
    assert list(streams.in_flight) == [two, three] or one.asked + 5.0 > two.asked + 4.999
    three.asked += 1.0
    streams.expire(two.asked + 5.0)
    assert list(streams.ended) == [one, two] and list(streams.in_flight) == [three]
    for each, facts, unread in ((one, ("5 s", "2 chunks"), False), (two, ("5 s", "0 chunks"), True)):
        kind, why = each.failure
        assert kind == "timeout" and all(fact in why for fact in facts) and ("unread" in why) == unread
    assert not two.unread and streams._unread_bytes == 0
    assert first.recv(10) == b"", "its connection is closed"
    line = open_line()
    streams, (whole, its), (one, there) = line.streams, line.begin(), line.begin()
    its.sendall(WHOLE)
    there.sendall(ENDLESS + stream(token(), token()))
    line.until(lambda: streams.pieces == 2)
    two = line.send()
    assert streams.cut_off() == [one, two] and streams.in_flight == {}
    assert list(streams.ended) == [whole] and not whole.cut, "its end had come"
    assert (len(one.answer.times), one.cut, two.cut, one.failure) == (2, True, True, None)
    assert there.recv(10) == b"" and not two.sent
    three = line.send()
    line.until(lambda: three.sent)
    assert not two.sent, "it is not sent for another"


def test_turn_fetches_before_it_reads(line, monkeypatch):
    streams, (one, there) = line.streams, line.begin()
    there.sendall(ENDLESS + stream(token()))
    line.until(lambda: streams.pieces)
    assert (streams.pieces_read, len(one.unread), streams._unread_bytes > 0) == (0, 1, True)
    began = time.monotonic()
    streams.turn(30.0)
    assert (streams.pieces_read, len(one.answer.times), streams._unread_bytes) == (1, 1, 0)
    assert time.monotonic() - began < 10, "it does not wait while there is something to read"
    monkeypatch.setattr(module, "UNREAD_LIMIT", 0)
    there.sendall(stream(token()))
    line.until(lambda: streams.pieces == 2)
    assert (streams.pieces_read, len(one.answer.times)) == (2, 2), "in the same turn"
    _, there = line.begin()
    for wait_s, least_s, sent in ((0.001, 0.0, b""), (0.02, 0.018, b""), (30.0, 0.0, WHOLE)):
        there.sendall(sent)
        began = time.monotonic()
        line.streams.turn(wait_s)
        assert least_s <= time.monotonic() - began < 10, "the last two milliseconds are the next call's"
    assert line.streams.pieces == 3


def test_piece_has_arrival_time(line):
    """The kernel begins to stamp some time after it was asked to, and until then stamps what is fetched."""
    one, there = line.begin()
    for _ in range(100):
        before = time.monotonic()
        there.sendall(WHOLE)
        after = time.monotonic()
        while time.monotonic() < after + 0.01:
            pass
        if before - 1e-3 <= line.over(one).answer.times[0] <= after + 1e-3:
            return
        one = line.send()
        received(there, 5)
    pytest.fail("no piece was stamped when it came")


def planted(streams, *stamped, sent=10.0, tokens=1):
    """Times of a stream whose pieces were fetched by this clock: (at, polled before, the kernel's stamp or None)."""
    one = RequestStream(0, 3, b"", sent=sent)
    streams.in_flight[one] = None
    one.answer.read(sent, ENDLESS)
    for at, polled, told in stamped:
        stamp = b"" if told is None else struct.pack("ll", int(told), round(told % 1 * 1e9))
        one.unread.append(((at, -1000.0, polled), stamp, stream(*[token()] * tokens)))
    streams.read(one)
    return list(one.answer.times)


@pytest.mark.parametrize(("stamped", "times"), [
    ([(11.0, 10.9, 1010.5)], [10.5]),  # the time of day is a thousand seconds ahead
    ([(11.0, 10.9, 1011.0)], [11.0]),
    ([(11.0, 10.9, 1011.099)], [11.099]),
    ([(11.0, 10.9, 1011.11)], [11.0]),  # later than it can be: the time of day was set
    ([(11.0, 10.9, 1010.0)], [10.0]),
    ([(11.0, 10.9, 1009.9)], [11.0]),  # before it was sent
    ([(11.0, 10.9, None)], [11.0]),
    ([(11.0, 10.9, 1010.8), (12.0, 11.0, 1010.7), (13.0, 12.0, 1012.5)], [10.8, 12.0, 12.5]),  # never back
])  # fmt: skip
def test_plausible_kernel_stamp_is_used(line, stamped, times):
    assert planted(line.streams, *stamped) == pytest.approx(times)


@pytest.mark.parametrize(("polled", "sent", "doubt_s"), [(10.4, 10, 0.6), (10.4, 10.7, 0.3), (11.5, 10, 0), (9, 10, 1)])
def test_joint_chunks_are_in_doubt(line, polled, sent, doubt_s):
    streams = line.streams
    planted(streams, (11.0, 5.0, None), (12.0, 11.0, None))
    assert (streams.doubt_s, streams.most_doubt_s, streams.tokens_read, streams.pieces_read) == (0, 0, 2, 2)
    streams.begin_anew(0)
    assert (streams.pieces_read, streams.tokens_read) == (0, 0)
    planted(streams, (11.0, polled, None), sent=sent, tokens=2)
    assert streams.doubt_s == pytest.approx(doubt_s) and streams.most_doubt_s == streams.doubt_s
    planted(streams, (11.0, 10.8, None), tokens=2)
    assert streams.doubt_s == pytest.approx(doubt_s + 0.2) and streams.tokens_read == 4
    assert streams.most_doubt_s == pytest.approx(max(0.2, doubt_s))


def test_first_accepting_address_is_taken(open_line, monkeypatch):
    port, nobody = (open_line(listens=there).port for there in (True, False))
    for *ports, chosen in ((nobody, port, nobody, port), (port, nobody, port), (nobody, nobody), (nobody, 1, 1)):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each)) for each in ports]
        monkeypatch.setattr(module.socket, "getaddrinfo", asked := Mock(return_value=found))
        assert address_of("host", 80) == (socket.AF_INET, ("127.0.0.1", chosen))
        asked.assert_called_once_with("host", 80, type=socket.SOCK_STREAM)


# Steps


def told(stream, *times, tokens=1):
    stream.answer.times.extend(times)
    stream.answer.tokens.extend([tokens] * len(times))
    return stream


def play(lengths, users, steps, at_once=False):
    """Steps of 0.1 s that a lead counts while an engine makes `steps`: in each, every stream gets a token, told one
    after the other within 0.01 s; what has ended is followed by the next, which gets its first token a step later."""
    following = (RequestStream(0, length, b"") for length in lengths)
    in_flight = {next(following): None for _ in range(users if at_once else 1)}
    lead, counted = Lead(in_flight, lambda stream: None), []
    for step in range(steps):
        if step and len(in_flight) < users:
            in_flight[next(following)] = None
        for place, one in enumerate(list(in_flight)):
            told(one, step * 0.1 + 0.01 * place / users)
            if len(one.answer.times) == one.wanted:
                del in_flight[one]
                in_flight[next(following)] = None
            counted += lead.steps()
    return counted


@given(st.integers(1, 12), st.integers(3, 20), st.lists(st.integers(5, 30), min_size=40, max_size=40))
def test_streams_show_every_step(users, length, lengths):
    changes = 60 / length + 1
    assert 60 - changes <= len(play([length] * 10_000, users, 60)) <= 60 + changes
    users, length = max(users, 2), max(length, 4)
    assert len(play([length] * 10_000, users, 3 * length, at_once=True)) == 3 * (length + 1) - 1
    counted = play(lengths * 40, users, 60)
    assert len(counted) == pytest.approx(60, rel=0.35) and counted == sorted(counted)


def led(*times):
    """Streams with chunks at these times, the one sent last at the end, and their lead."""
    in_flight = {told(RequestStream(0, 9, b""), *each): None for each in times}
    return in_flight, Lead(in_flight, lambda stream: None)


@pytest.mark.parametrize(("late_s", "counted"), [(0.04, []), (0.06, [0.36])])
def test_youngest_decoding_stream_leads(late_s, counted):
    """Steps of 0.1 s: the next leader tells of the last one 0.04 s later, and of the first new one 0.06 s later."""
    in_flight, lead = led([0.0, 0.05 + late_s + 0.25], [0.1, 0.2, 0.3])
    assert lead.steps() == [0.1, 0.2, 0.3]
    in_flight.popitem()
    assert lead.steps() == pytest.approx(counted)
    in_flight, _ = led([0.1, 0.2], [0.15], [])
    _, failed, _ = in_flight
    assert Lead(in_flight, lambda stream: in_flight.pop(failed, None)).steps() == [0.1, 0.2]
    in_flight, lead = led([0.1, 0.2, 0.3])
    assert lead.steps() == [0.1, 0.2, 0.3]
    in_flight.clear()
    assert lead.steps() == [] == lead.steps()
    in_flight.update(led([0.5, 0.6])[0])
    assert lead.steps() == [0.5, 0.5, 0.6]
    told(next(iter(in_flight)), 0.7, tokens=2)
    in_flight.update(led([])[0])
    assert lead.steps() == [0.7, 0.7]
