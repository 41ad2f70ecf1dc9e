"""Requests by their number: the same each time round, or with something of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.engines.loadgen.connection import Bodies, target_of

TARGET = target_of("http://host/v1/completions", {})


def content(request: bytes) -> str:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head, "as long as it says"
    return body.decode()


def test_without_rounds_a_request_comes_again_as_it_was():
    bodies = Bodies(TARGET, ["a", "b"])
    assert [content(bodies.of(n)) for n in range(5)] == ["a", "b", "a", "b", "a"]
    bodies.begin_anew()
    assert content(bodies.of(0)) == "a" and len(bodies) == 2


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
    assert len(bodies) == 2


def test_after_the_last_round_comes_the_first():
    bodies = Bodies(TARGET, ["<>"], "<>", ["1", "2"])
    assert [content(bodies.of(n)) for n in range(3)] == ["1", "2", "1"]
