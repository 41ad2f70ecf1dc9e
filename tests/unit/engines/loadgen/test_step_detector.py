"""Steps, as one stream after the other sees them: an engine whose steps are known is played."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.engines.loadgen.streams import Lead


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
        for place, stream in enumerate(list(in_flight)):
            stream.answer.times.append(step * step_s + jitter_s * place / users)
            stream.answer.tokens.append(1)
            stream.left -= 1
            if not stream.left:
                del in_flight[stream]
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
