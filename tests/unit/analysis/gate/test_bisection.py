"""The first slow release is named, wherever it was planted, and what could not be told stays open."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.gate.decision import suspects
from pytest_slmserve.analysis.verdict import State


def bisected(releases: list[str], planted: str, unknown: set[str]) -> dict[str, State]:
    outcomes: dict[str, State] = {}
    while (release := suspects(releases, outcomes)[1]) is not None:
        assert release not in outcomes
        slow = releases.index(release) >= releases.index(planted)
        outcomes[release] = State.INCONCLUSIVE if release in unknown else State.FAILS if slow else State.PASSES
    return outcomes


@given(st.data())
def test_the_planted_release_is_named_and_unknown_neighbours_with_it(data: st.DataObject) -> None:
    releases = [f"0.{n}.0" for n in range(data.draw(st.integers(2, 40)))]
    planted = data.draw(st.sampled_from(releases[1:]))
    unknown = set(data.draw(st.lists(st.sampled_from(releases[1:]))))
    left, _ = suspects(releases, bisected(releases, planted, unknown))
    assert planted in left
    assert set(left[:-1]) <= unknown


@given(st.integers(2, 200), st.data())
def test_as_few_gates_as_halving_takes(n: int, data: st.DataObject) -> None:
    releases = [f"{i}" for i in range(n)]
    planted = data.draw(st.sampled_from(releases[1:]))
    outcomes = bisected(releases, planted, set())
    assert suspects(releases, outcomes) == ([planted], None)
    assert len(outcomes) <= math.ceil(math.log2(n - 1))


def test_neighbours_have_nothing_between() -> None:
    assert suspects(["0.25.0", "0.26.0"], {}) == (["0.26.0"], None)
