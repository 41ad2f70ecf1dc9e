"""Requests as bytes: where they go, that nothing of the headers is told, and rounds through the bodies of a load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.engines.loadgen.streams import TOLD, Bodies, Target
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
