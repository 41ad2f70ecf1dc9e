"""Requests as bytes: where they go, that nothing of the headers is told, and rounds through the bodies of a load. Many
streams on non-blocking connections, against sockets that the test itself serves: what arrives is stamped and read
whole, however it is cut; a connection that may be used again is; each way to fail is told apart. Steps, as one stream
after the other sees them."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import EVENT_STREAM, pieces, stream, token, usage

from pytest_slmserve.engines.loadgen import streams as module
from pytest_slmserve.engines.loadgen.streams import (
    TOLD,
    Bodies,
    Lead,
    RequestStream,
    Streams,
    Target,
    address_of,
    system_error_text,
)
from pytest_slmserve.schema.printable import HIDDEN, SHORTEST

keys = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=SHORTEST, max_size=40)


@pytest.mark.parametrize(
    ("url", "line", "host", "where"),
    [
        ("http://127.0.0.1:8000/v1/completions", b"POST /v1/completions HTTP/1.1", b"127.0.0.1:8000", 8000),
        ("http://host/v1?a=b", b"POST /v1?a=b HTTP/1.1", b"host", 80),
        ("https://host", b"POST / HTTP/1.1", b"host", 443),
        ("http://[::1]:81/x", b"POST /x HTTP/1.1", b"[::1]:81", 81),
    ],
)
def test_a_request_in_bytes(url, line, host, where):
    target = Target(url, {"Authorization": "Bearer key1"})
    head, _, body = Bodies(target, ['{"prompt": "\u00e9"}']).of(0).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == line and b"Host: " + host in lines and target.port == where
    assert b"Authorization: Bearer key1" in lines
    assert b"Content-Length: %d" % len(body) in lines and body.decode() == '{"prompt": "\u00e9"}'
    assert target.tls == url.startswith("https")


@given(keys, st.text(max_size=30), st.text(max_size=30))
def test_a_key_is_in_no_text(key, before, after):
    target = Target("http://host/", {"Authorization": f"Bearer {key}", "X-Api-Key": key})
    for said in (key, f"Bearer {key}"):
        text = target.shown(before + said + after)
        assert key not in text.replace(HIDDEN, "") and HIDDEN in text


def test_the_longest_secret_is_hidden_first():
    target = Target("http://host/", {"Authorization": "Bearer my-own-key"})
    assert target.secrets == ("Bearer my-own-key", "my-own-key")
    assert target.shown("it was Bearer my-own-key") == f"it was {HIDDEN}"


def test_a_long_failure_ends_behind_a_word():
    shown = Target("http://host/", {}).shown
    assert shown("short") == "short"
    told = shown('HTTP 400: {"error":{"message":' + 40 * '"some words here","type":"x",')
    assert len(told) <= TOLD and told.endswith(("words ...", "some ...", ", ...", '"some ...')), told
    assert len(shown("x" * 400)) == TOLD


def test_what_is_no_secret_is_told():
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "X-Number": "1"}
    assert Target("http://host/", headers).secrets == ()


@pytest.mark.parametrize("url", ["host:80/v1", "ftp://host/", "http://", "http://me:secret@host/", "http://host:x/"])
def test_a_wrong_url_is_refused(url):
    with pytest.raises(ValueError) as caught:
        Target(url, {"Authorization": "Bearer secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("header", [{"A": "b\r\nC: d"}, {"A\n": "b"}, {"\u00e9": "b"}])
def test_a_header_cannot_smuggle_another(header):
    with pytest.raises(ValueError, match="no header may hold"):
        Target("http://host/", header)


# Bodies

TARGET = Target("http://host/v1/completions", {})


def content(request: bytes) -> str:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head, "as long as it says"
    return body.decode()


def test_without_rounds_a_request_comes_again_as_it_was():
    bodies = Bodies(TARGET, ["a", "b"])
    assert [content(bodies.of(n)) for n in range(5)] == ["a", "b", "a", "b", "a"]
    bodies.begin_anew()
    assert content(bodies.of(0)) == "a"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5))
def test_no_two_requests_of_all_loads_are_alike_while_there_are_rounds(loads, distinct):
    bodies, seen = Bodies(TARGET, [f"{i}:<>" for i in range(distinct)], "<>", [f"r{i}" for i in range(200)]), []
    for load in loads:
        bodies.begin_anew()
        seen += [content(bodies.of(number)) for number in range(load)]
    assert len(seen) == len(set(seen))


def test_a_body_without_the_mark_is_sent_as_it_is():
    bodies = Bodies(TARGET, ["a", "b<>"], "<>", ["1", "22"])
    assert [content(bodies.of(n)) for n in range(4)] == ["a", "b1", "a", "b22"]


def test_after_the_last_round_comes_the_first():
    bodies = Bodies(TARGET, ["<>"], "<>", ["1", "2"])
    assert [content(bodies.of(n)) for n in range(3)] == ["1", "2", "1"]


def test_the_next_load_begins_with_the_round_after_the_last_one():
    bodies = Bodies(TARGET, ["<>", "-<><>"], "<>", [f"r{i}" for i in range(9)])
    assert [content(bodies.of(n)) for n in (0, 3)] == ["r0", "-r1<>"], "one placeholder each"
    bodies.begin_anew()
    assert [content(bodies.of(n)) for n in (0, 1, 2)] == ["r2", "-r2<>", "r3"]


# Connections


class Server:
    """A socket that listens, and what came of it, served by the test."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.accepted = []

    def accept(self):
        connection, _ = self.listener.accept()
        connection.settimeout(10)
        self.accepted.append(connection)
        return connection

    @property
    def waits(self):
        """Whether a connection waits to be accepted."""
        self.listener.settimeout(0)
        try:
            self.accept()
        except BlockingIOError:
            return False
        finally:
            self.listener.settimeout(10)
        return True

    def target(self):
        return Target(f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1", {"Authorization": f"Bearer {SECRET}"})

    def close(self):
        for each in (self.listener, *self.accepted):
            each.close()


SECRET = "sk-nobody-may-see"
DONE = token(finish="length"), usage(7, 3), b"[DONE]"
LENGTH = "Content-Length: %d\r\n\r\n"


def answer(*events, head=b""):
    body = stream(*events)
    return EVENT_STREAM + head + (LENGTH % len(body)).encode() + body


WHOLE = answer(token(), token(), *DONE)


@pytest.fixture
def server():
    with closing(Server()) as found:
        yield found


@pytest.fixture
def connect():
    """Streams to a server; all of their connections are closed in the end."""
    made = []

    def to(target, timeout_s=30.0, waiting=0):
        made.append(Streams(target, timeout_s))
        made[-1].begin_anew(waiting)
        return made[-1]

    yield to
    for each in made:
        for connection in each._connections.values():
            connection.socket.close()
        each.epoll.close()


def until(streams, over):
    """Turn until it is over, ten seconds at most."""
    for _ in range(1000):
        if over():
            return
        streams.turn(0.01)
    raise AssertionError("it does not come about")


def sent(streams, body=b"hello", wanted=3):
    made = RequestStream(0, wanted, body)
    streams.send(made)
    return made


def received(connection, count):
    data = b""
    while len(data) < count:
        data += connection.recv(1 << 16)
    return data


def begun(streams, server, body=b"hello"):
    """A stream whose request the server has, and its connection there."""
    one = sent(streams, body)
    until(streams, lambda: one.sent)
    there = server.accept()
    assert received(there, len(body)) == body
    return one, there


def over(streams, one):
    """The stream has ended, and was told of once."""
    until(streams, lambda: streams.ended)
    assert streams.ended.popleft() is one and not streams.ended and one not in streams.in_flight
    return one


@pytest.mark.parametrize("cut", [(), range(0, 2000, 7), range(2000)], ids=["whole", "sevens", "bytes"])
def test_an_answer_comes_whole_however_it_is_cut(server, connect, cut):
    streams = connect(server.target())
    before = time.monotonic()
    one, there = begun(streams, server)
    data = pieces(WHOLE, cut)
    for piece in data:
        there.sendall(piece)
        streams.turn(0.0 if len(data) > 1 else 0.01)
    over(streams, one)
    assert (list(one.answer.tokens), one.answer.usage, one.failure, one.cut) == ([1, 1, 1], (7, 3), None, False)
    assert before <= one.asked <= one.sent <= one.answer.times[0] <= one.answer.times[-1] <= time.monotonic()
    assert one.read_until >= one.answer.times[-1] and streams.heard >= one.sent
    assert (streams.tokens_read, streams.pieces) == (3, streams.pieces_read) and streams._unread_bytes == 0


def test_a_request_larger_than_any_buffer_is_sent_to_its_end(server, connect):
    streams, body = connect(server.target()), bytes(range(256)) * 40_000
    one = sent(streams, body)
    until(streams, lambda: one.sent)
    there, got = server.accept(), bytearray()
    there.settimeout(0.001)
    while len(got) < len(body):
        streams.turn(0.0)
        try:
            got += there.recv(1 << 20)
        except TimeoutError:
            continue
    assert got == body
    there.sendall(WHOLE)
    assert over(streams, one).failure is None


def test_a_connection_that_has_served_is_used_again(server, connect):
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(WHOLE)
    over(streams, one)
    two = sent(streams, b"once more")
    assert two.sent and received(there, 9) == b"once more" and not server.waits
    there.sendall(WHOLE)
    assert over(streams, two).answer.usage == (7, 3)


def test_two_at_once_have_a_connection_each_and_both_are_kept(server, connect):
    streams = connect(server.target())
    (one, first), (two, second) = begun(streams, server), begun(streams, server)
    assert list(streams.in_flight) == [one, two]
    second.sendall(WHOLE)
    over(streams, two)
    first.sendall(WHOLE)
    over(streams, one)
    assert len(streams._idle) == 2 and streams.in_flight == {}


def test_a_load_begins_with_as_many_open_connections_as_it_asks_for(server, connect):
    streams = connect(server.target(), waiting=3)
    first, *_ = [server.accept() for _ in range(3)]
    assert not server.waits
    first.close()
    until(streams, lambda: len(streams._idle) == 2)
    streams.begin_anew(3)
    assert server.waits and not server.waits, "in the place of the one that was closed"
    streams.begin_anew(2)
    assert not server.waits


@pytest.mark.parametrize("head", [b"Connection: close\r\n", b""])
def test_a_connection_that_the_server_ends_with_its_answer_is_no_failure(server, connect, head):
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(answer(token(), *DONE, head=head) if head else EVENT_STREAM + b"\r\n" + stream(token(), *DONE))
    there.close()
    assert over(streams, one).failure is None and streams._idle == {}
    _, another = begun(streams, server)
    assert another is not there


def test_what_an_idle_connection_says_unasked_ends_it(server, connect):
    streams = connect(server.target(), waiting=1)
    there = server.accept()
    there.sendall(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    until(streams, lambda: not streams._idle)
    assert there.recv(10) == b"" and streams.in_flight == {}


def test_one_that_is_lost_on_an_old_connection_is_sent_once_more(server, connect):
    """The server closed just as it was sent: it has waited since the first time."""
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(WHOLE)
    over(streams, one)
    two = sent(streams, b"again")
    at = two.sent
    received(there, 5)
    there.close()
    until(streams, lambda: server.waits)
    anew = server.accepted[-1]
    until(streams, lambda: two.connection)
    assert received(anew, 5) == b"again" and two.sent == at
    anew.sendall(WHOLE)
    assert over(streams, two).failure is None and streams._refused == 0


@pytest.mark.parametrize(
    ("data", "kind", "fact"),
    [
        (b"", "broke off", "unanswered"),
        (WHOLE[:-10], "broke off", "3 chunks"),
        (EVENT_STREAM + b"\r\n" + stream(token()), "broke off", "1 chunk "),
        (b"SSH-2.0-OpenSSH\r\n", "malformed", "SSH"),
        (b"HTTP/1.1 500 No\r\n\r\nno room for Bearer sk-nobody-may-see", "HTTP 500", "no room for [hidden]"),
    ],
)
def test_a_failure_has_its_kind_its_facts_and_its_time_but_no_key(server, connect, data, kind, fact):
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(data)
    there.close()
    (told, why), failed = over(streams, one).failure, one.failed
    assert told == kind and fact.replace("[hidden]", HIDDEN).replace("Bearer ", "") in why.replace("Bearer ", "")
    assert SECRET not in why and one.sent <= failed <= time.monotonic() and streams._idle == {}
    assert streams._unread_bytes == 0 and not one.unread


def test_a_reset_is_named_with_what_came_until_then(server, connect):
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(WHOLE[:-30])
    until(streams, lambda: one.answer.times)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    kind, why = over(streams, one).failure
    assert kind == "broke off" and "chunks" in why and "ConnectionResetError" in why


def test_where_nobody_listens_a_load_begins_at_once_and_each_request_says_why(connect):
    with closing(Server()) as gone:
        target = gone.target()
    began = time.monotonic()
    streams = connect(target, waiting=4)
    assert time.monotonic() - began < module.CONNECT_S / 2
    one, two = sent(streams), sent(streams)
    until(streams, lambda: len(streams.ended) == 2)
    assert list(streams.ended) == [one, two] and streams.in_flight == {}
    for each in (one, two):
        kind, why = each.failure
        assert kind == "no connection" and "ConnectionRefusedError: Connection refused" in why and not each.sent


def test_a_host_without_an_address_is_a_failure_of_its_request(connect, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(module.socket, "getaddrinfo", unknown)
    one = sent(streams := connect(Target("http://nowhere/", {})))
    assert over(streams, one).failure == ("no connection", "no connection: gaierror: Name or service not known")


# Ends


def test_those_that_last_too_long_end_in_the_order_sent_and_no_others(server, connect):
    streams = connect(server.target(), timeout_s=5.0)
    (one, first), (two, _), (three, _) = (begun(streams, server) for _ in range(3))
    first.sendall(EVENT_STREAM + b"\r\n" + stream(token(), token()))
    until(streams, lambda: len(one.answer.times) == 2)
    streams.expire(two.asked + 4.999)
    assert list(streams.in_flight) == [two, three] or one.asked + 5.0 > two.asked + 4.999
    three.asked += 1.0
    streams.expire(two.asked + 5.0)
    assert list(streams.ended) == [one, two] and list(streams.in_flight) == [three]
    assert one.failure[0] == "timeout" and "5 s" in one.failure[1] and "2 chunks" in one.failure[1]
    assert "0 chunks" in two.failure[1] and "unread" not in one.failure[1]
    assert first.recv(10) == b"", "its connection is closed"


def test_what_is_left_unread_of_one_that_lasts_too_long_is_told(server, connect):
    streams = connect(server.target(), timeout_s=5.0)
    one, there = begun(streams, server)
    there.sendall(EVENT_STREAM + b"\r\n" + stream(token()))
    until(streams, lambda: one.unread or one.answer.times)
    one.unread.append(((0.0, 0.0, 0.0), b"", b"more"))
    streams._unread_bytes += 4
    streams.expire(one.asked + 5.0)
    assert "unread" in one.failure[1] and not one.unread and streams._unread_bytes == 0


def test_what_is_cut_off_keeps_what_has_come_and_its_connection_ends(server, connect):
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(EVENT_STREAM + b"\r\n" + stream(token(), token()))
    until(streams, lambda: one.unread or one.answer.times)
    two = sent(streams)
    assert streams.cut_off() == [one, two] and streams.in_flight == {} and not streams.ended
    assert (len(one.answer.times), one.cut, two.cut, one.failure) == (2, True, True, None)
    assert there.recv(10) == b"" and not two.sent
    three = sent(streams)
    until(streams, lambda: three.sent)
    assert not two.sent, "it is not sent for another"


def test_one_whose_end_has_come_is_not_cut_off(server, connect):
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(WHOLE)
    until(streams, lambda: streams.pieces)
    assert streams.cut_off() == [] and not one.cut and list(streams.ended) == [one]


# When it is read


def test_what_arrives_is_fetched_first_and_read_when_nothing_comes(server, connect):
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(EVENT_STREAM + b"\r\n" + stream(token()))
    until(streams, lambda: streams.pieces)
    assert (streams.pieces_read, len(one.unread), streams._unread_bytes > 0) == (0, 1, True)
    began = time.monotonic()
    streams.turn(30.0)
    assert (streams.pieces_read, len(one.answer.times), streams._unread_bytes) == (1, 1, 0)
    assert time.monotonic() - began < 10, "it does not wait while there is something to read"


def test_where_too_much_is_unread_reading_goes_first(server, connect, monkeypatch):
    monkeypatch.setattr(module, "UNREAD_LIMIT", 0)
    streams = connect(server.target())
    one, there = begun(streams, server)
    there.sendall(EVENT_STREAM + b"\r\n" + stream(token()))
    until(streams, lambda: streams.pieces)
    assert len(one.answer.times) == 1 == streams.pieces_read


def test_a_turn_waits_as_long_as_it_may_and_no_longer_than_until_something_comes(server, connect):
    streams = connect(server.target())
    for wait_s in (0.001, 0.02):
        began = time.monotonic()
        streams.turn(wait_s)
        assert wait_s - 0.002 <= time.monotonic() - began < 10, "the last two milliseconds are the next call's"
    _, there = begun(streams, server)
    there.sendall(WHOLE)
    began = time.monotonic()
    streams.turn(30.0)
    assert streams.pieces == 1 and time.monotonic() - began < 10


def test_a_piece_has_the_time_at_which_it_came_and_not_that_of_its_fetch(server, connect):
    """The kernel begins to stamp some time after it was asked to, and until then stamps what is fetched."""
    streams = connect(server.target())
    one, there = begun(streams, server)
    for _ in range(100):
        before = time.monotonic()
        there.sendall(WHOLE)
        after = time.monotonic()
        while time.monotonic() < after + 0.01:
            pass
        if before - 1e-3 <= over(streams, one).answer.times[0] <= after + 1e-3:
            return
        one = sent(streams)
        received(there, 5)
    pytest.fail("no piece was stamped when it came")


def planted(streams, *stamped, sent=10.0, data=None):
    """A stream whose pieces were fetched by this clock: (at, polled before, the kernel's stamp or None)."""
    one = RequestStream(0, 3, b"", sent=sent)
    streams.in_flight[one] = None
    one.answer.read(sent, EVENT_STREAM + b"\r\n")
    for at, polled, told in stamped:
        stamp = b"" if told is None else struct.pack("ll", int(told), round(told % 1 * 1e9))
        one.unread.append(((at, -1000.0, polled), stamp, data or stream(token())))
    streams.read(one)
    return list(one.answer.times)


@pytest.mark.parametrize(
    ("told", "at"),
    [
        (1010.5, 10.5),  # the time of day is a thousand seconds ahead
        (1011.0, 11.0),
        (1011.099, 11.099),
        (1011.11, 11.0),  # later than it can be: the time of day was set
        (1010.0, 10.0),
        (1009.9, 11.0),  # before it was sent
        (None, 11.0),
    ],
)
def test_a_stamp_of_the_kernel_counts_where_it_can_be_true(connect, told, at):
    streams = connect(TARGET)
    assert planted(streams, (11.0, 10.9, told)) == [pytest.approx(at)]


def test_stamps_of_one_stream_never_go_back(connect):
    times = planted(connect(TARGET), (11.0, 10.9, 1010.8), (12.0, 11.0, 1010.7), (13.0, 12.0, 1012.5))
    assert times == pytest.approx([10.8, 12.0, 12.5])


@pytest.mark.parametrize(
    ("polled", "sent", "doubt_s"), [(10.4, 10.0, 0.6), (10.4, 10.7, 0.3), (11.5, 10.0, 0.0), (9.0, 10.0, 1.0)]
)
def test_chunks_that_came_together_are_in_doubt_since_nobody_looked(connect, polled, sent, doubt_s):
    streams = connect(TARGET)
    planted(streams, (11.0, polled, None), sent=sent, data=stream(token(), token()))
    assert streams.doubt_s == pytest.approx(doubt_s) and streams.most_doubt_s == streams.doubt_s
    planted(streams, (11.0, 10.8, None), data=stream(token(), token()))
    assert streams.doubt_s == pytest.approx(doubt_s + 0.2) and streams.tokens_read == 4
    assert streams.most_doubt_s == pytest.approx(max(0.2, doubt_s))


def test_a_chunk_alone_is_in_no_doubt(connect):
    streams = connect(TARGET)
    planted(streams, (11.0, 5.0, None), (12.0, 11.0, None))
    assert (streams.doubt_s, streams.most_doubt_s, streams.tokens_read, streams.pieces_read) == (0, 0, 2, 2)
    streams.begin_anew(0)
    assert (streams.pieces_read, streams.tokens_read) == (0, 0)


# Addresses


def taken(*ports):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]


def test_the_first_address_that_accepts_is_taken_else_the_last(server, monkeypatch):
    with closing(Server()) as gone:
        nobody = gone.listener.getsockname()[1]
    port = server.listener.getsockname()[1]
    for ports, chosen in (((nobody, port, nobody), port), ((port, nobody), port), ((nobody,), nobody)):
        monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, ports=ports, **__: taken(*ports))
        assert address_of("host", 80) == (socket.AF_INET, ("127.0.0.1", chosen))
    asked = []
    monkeypatch.setattr(
        module.socket, "getaddrinfo", lambda *words, **more: asked.append((words, more)) or taken(nobody, 1)
    )
    assert address_of("host", 80)[1][1] == 1, "none accepts: its error is told"
    assert asked == [(("host", 80), {"type": socket.SOCK_STREAM})]


def test_what_is_asked_for_by_https_is_encrypted_and_by_http_is_not(connect):
    plain, safe = (connect(Target(f"{scheme}://127.0.0.1/", {}))._context for scheme in ("http", "https"))
    assert plain is None and safe.check_hostname


def test_an_error_of_the_system_is_told_without_the_address_it_repeats():
    assert system_error_text(ConnectionRefusedError(111, "refused", "10.0.0.1")) == "ConnectionRefusedError: refused"
    assert system_error_text(OSError("alone")) == "OSError: alone"


# Steps: an engine whose steps are known is played


@dataclass(eq=False)
class Played:
    left: int
    answer: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(times=[], tokens=[]))


def play(lengths, users, steps, step_s=0.1, jitter_s=0.01, at_once=True):
    """Steps that a lead counts while an engine makes `steps`: in each, every stream gets a token, told one after the
    other within `jitter_s`; what has ended is followed by the next, which gets its first token a step later."""
    lengths = iter(lengths)
    in_flight: dict = {}
    lead, counted = Lead(in_flight, lambda stream: None), []
    for _ in range(users if at_once else 1):
        in_flight[Played(next(lengths))] = None
    for step in range(steps):
        if step and len(in_flight) < users:
            in_flight[Played(next(lengths))] = None
        for place, one in enumerate(list(in_flight)):
            one.answer.times.append(step * step_s + jitter_s * place / users)
            one.answer.tokens.append(1)
            one.left -= 1
            if not one.left:
                del in_flight[one]
                in_flight[Played(next(lengths))] = None
            counted += lead.steps()
    return counted


@given(st.integers(1, 12), st.integers(3, 20))
def test_spread_streams_show_every_step_once(users, length):
    counted = play([length] * 10_000, users, 60, at_once=False)
    changes = 60 / length + 1
    assert 60 - changes <= len(counted) <= 60 + changes


@given(st.lists(st.integers(5, 30), min_size=40, max_size=40), st.integers(2, 12))
def test_streams_of_any_length_show_every_step_about_once(lengths, users):
    counted = play(lengths * 40, users, 60, at_once=False)
    assert len(counted) == pytest.approx(60, rel=0.35)
    assert counted == sorted(counted)


@given(st.integers(2, 12), st.integers(4, 20))
def test_a_convoy_has_a_period_of_one_step_more_than_its_tokens(users, length):
    """As in the worker, where admitting the next ones is a step."""
    counted = play([length] * 10_000, users, 3 * length)
    assert len(counted) == 3 * (length + 1) - 1


def test_several_tokens_in_a_chunk_are_several_steps():
    stream = Played(9)
    lead = Lead({stream: None}, lambda stream: None)
    stream.answer.times.append(1.0)
    stream.answer.tokens.append(3)
    assert lead.steps() == [1.0, 1.0, 1.0]
    assert lead.steps() == []


def test_a_stream_that_turns_out_to_have_failed_is_not_followed():
    """As it is read, which takes it from those in flight."""
    failed, sound = Played(5), Played(5)
    sound.answer.times, sound.answer.tokens = [0.1, 0.2], [1, 1]
    failed.answer.times, failed.answer.tokens = [0.15], [1]
    in_flight: dict = {sound: None, failed: None}
    lead = Lead(in_flight, lambda stream: in_flight.pop(failed, None))
    assert lead.steps() == [0.1, 0.2]


def lead_of(*streams):
    """A lead over streams of these times, the one sent last at the end."""
    in_flight: dict = {}
    for times in streams:
        one = Played(9)
        one.answer.times, one.answer.tokens = list(times), [1] * len(times)
        in_flight[one] = None
    return Lead(in_flight, lambda stream: None), in_flight


def test_the_youngest_that_decodes_leads():
    lead, _ = lead_of([0.1, 0.2, 0.3], [0.25, 0.35], [])
    assert lead.steps() == [0.25, 0.35]


def test_chunks_of_the_next_leader_within_half_a_step_were_counted():
    """Steps of 0.1 s: the next leader tells of the last one 0.04 s later, and of the first new one 0.06 s later."""
    for late, counted in ((0.04, []), (0.06, [0.36])):
        lead, in_flight = lead_of([0.0, 0.05 + late + 0.25], [0.1, 0.2, 0.3])
        assert lead.steps() == [0.1, 0.2, 0.3]
        del in_flight[list(in_flight)[1]]
        assert lead.steps() == pytest.approx(counted)


def test_after_a_lull_the_prefill_of_the_next_is_a_step():
    lead, in_flight = lead_of([0.1, 0.2, 0.3])
    assert lead.steps() == [0.1, 0.2, 0.3]
    in_flight.clear()
    assert lead.steps() == [] == lead.steps()
    _, more = lead_of([0.5, 0.6])
    in_flight.update(more)
    assert lead.steps() == [0.5, 0.5, 0.6]
    in_flight.update(lead_of([])[1])
    next(iter(in_flight)).answer.times.append(0.7)
    next(iter(in_flight)).answer.tokens.append(2)
    assert lead.steps() == [0.7, 0.7]
