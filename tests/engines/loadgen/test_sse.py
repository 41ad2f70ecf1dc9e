"""Events: whatever the pieces and the line ends, the same data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import cuts, pieces

from pytest_slmserve.engines.loadgen import response
from pytest_slmserve.engines.loadgen.response import Events

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=20)
lines = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(texts, max_size=8), lines, cuts, st.sampled_from(["data: ", "data:"]))
def test_any_split_gives_the_same_events(data, line, cut, name):
    body = "".join(f": ping{line}event: x{line}{name}{text}{line}{line}" for text in data).encode()
    events = Events()
    got = [event for piece in pieces(body, cut) for event in events.feed(piece)] + events.end()
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


def test_an_event_without_its_blank_line_is_told_at_the_end():
    events = Events()
    assert events.feed(b"data: [DONE]") == []
    assert events.end() == [b"[DONE]"]
    assert events.end() == []


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(response, "EVENT_LIMIT", 100)
    events = Events()
    with pytest.raises(ValueError, match="no end"):
        for _ in range(20):
            events.feed(b"data: no line end")
