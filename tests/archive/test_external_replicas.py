"""Rows of several engines, read as sets of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.archive.external import Columns, Row, engine_sets, remarks
from pytest_slmserve.schema.errors import BadUsage

NAMES = Columns(knob="limit", throughput="rate", latency="itl_ms", preemptions="lost", replicas="n", power="watts")


def cells(n: object = 1, limit: object = 64, rate: object = 100.0, **more: object) -> dict[str, object]:
    return {"n": n, "limit": limit, "rate": rate, "itl_ms": 5.0, "lost": 0, "watts": 300.0, **more}


def rows(*each: dict[str, object]) -> list[Row]:
    return [Row(f"row {i}", cell) for i, cell in enumerate(each, 1)]


def sets(*each: dict[str, object], baseline: tuple[str, ...] = (), names: Columns = NAMES):
    return engine_sets(rows(*each), names, baseline)


def said(*each: dict[str, object], baseline: tuple[str, ...] = (), names: Columns = NAMES) -> list[str]:
    return list(remarks(rows(*each), names, baseline))


def test_rows_become_sets_and_equal_ones_repeats():
    one, two = sets(cells("2", 32, 150.0), cells(1, "64.0"), cells(2.0, 32, 160.0, lost="3"))
    assert (one.replicas, one.limit, one.total, one.rates) == (1, 64, 64, (100.0,))
    assert (two.replicas, two.limit, two.total, two.rates) == (2, 32, 64, (150.0, 160.0))
    assert two.preempted and two.point.problems == ("3 preemptions",) and not one.preempted
    assert one.point.e2e_repeats == (0.005,) and one.point.energy_per_token_j == pytest.approx(3.0)
    assert one.point.concurrency == two.point.concurrency == 64


def test_a_column_of_words_tells_sets_apart():
    found = sets(cells(mode="On"), cells(mode="off"), cells(mode="on"), cells(2, mode="off"))
    assert [(s.replicas, s.settings, len(s.rates)) for s in found] == [
        (1, (("mode", "On"),), 2),
        (1, (("mode", "off"),), 1),
        (2, (("mode", "off"),), 1),
    ]


def test_an_empty_cell_among_words_is_a_word():
    found = sets(cells(kind="fp8"), cells(kind=""), cells(kind=None), cells(2, kind="fp8"))
    assert [s.settings for s in found if s.replicas == 1] == [(("kind", ""),), (("kind", "fp8"),)]


def test_names_and_dates_tell_nothing_apart():
    dated = [cells(n, date=f"2025-01-0{i}", name=f"{n}x64") for i, n in enumerate((1, 1, 2, 2), 1)]
    assert [(s.settings, len(s.rates)) for s in sets(*dated)] == [((), 2), ((), 2)]


def test_conditions_hold_for_one_engine_and_tell_sets_apart():
    mixed = [cells(flag=0), cells(flag="1.0", rate=110.0), cells(flag=1, rate=112.0), cells(2, flag=0)]
    found = sets(*mixed, baseline=("flag=1",))
    assert [(s.settings, s.eligible, s.alternative) for s in found if s.replicas == 1] == [
        ((("flag", "0"),), False, True),
        ((("flag", "1"),), True, True),
    ]
    assert [len(s.rates) for s in found] == [1, 2, 1]


def test_a_condition_on_the_limit_binds_other_baselines_too():
    mixed = [cells(mode="a"), cells(mode="b"), cells(1, 128, mode="b"), cells(2, mode="a")]
    found = [s for s in sets(*mixed, baseline=("limit=64", "mode=a")) if s.replicas == 1]
    assert [(s.limit, dict(s.settings)["mode"], s.eligible, s.alternative) for s in found] == [
        (64, "a", True, True),
        (64, "b", False, True),
        (128, "b", False, False),
    ]


@pytest.mark.parametrize("cell", ["", None, "nan", "NaN", float("nan")])
def test_power_may_be_unknown(cell):
    [one, _] = sets(cells(watts=cell), cells(2))
    assert one.point.power_w is None and one.point.energy_per_token_j is None


@pytest.mark.parametrize(
    ("cell", "baseline", "words"),
    [
        (cells(0), (), "row 1: n is 0, which is no number of engines"),
        (cells(1.5), (), "which is no number of engines"),
        (cells("many"), (), "row 1: n is 'many', which is no number"),
        (cells(watts=-1), (), "row 1: watts is -1, which is no power"),
        (cells(watts="high"), (), "watts is 'high', which is no number"),
        (cells(rate=0), (), "no rate and no latency"),
        (cells(lost=-1), (), "no number of preemptions"),
        (cells(mode="a"), ("mode=b",), "no row is left after --baseline mode=b\n  try: mode is a"),
        (cells(), ("mode=b",), "no column 'mode'"),
        (cells(), ("mode",), "--baseline mode: there is no condition in it"),
    ],
)
def test_what_cannot_be_read(cell, baseline, words):
    with pytest.raises(BadUsage, match=words):
        sets(cell, cells(2), baseline=baseline)


def test_a_column_that_is_not_there():
    with pytest.raises(BadUsage, match="row 1 has no 'engines'"):
        sets(cells(), names=replace(NAMES, replicas="engines"))


def test_rows_that_differ_are_said_to_be_compared():
    mixed = [cells(mode="b"), cells(mode="a"), cells(2, mode="a")]
    assert said(*mixed) == ["rows of different mode (a, b) are compared with each other; --where mode=... chooses"]
    assert said(*mixed, baseline=("mode=a",)) == []


def test_settings_in_numbers_are_said_to_be_taken_as_repeats():
    shares = [cells(n, share=share, took=i) for i, (n, share) in enumerate([(1, 0.9), (1, 0.8), (2, 0.9), (2, 0.8)])]
    assert said(*shares) == ["rows of different share (0.8, 0.9) are taken as repeats; --where share=... chooses"]
    assert said(*shares, baseline=("share=0.9",)) == []
    assert said(*(cells(n, run_number=run, took=n + run / 9) for n in (1, 2) for run in (0, 1))) == [], "of a sweep"


def test_unknown_preemptions_are_said():
    [note] = said(cells(), cells(2), names=replace(NAMES, preemptions=None))
    assert "no --preemptions" in note


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8), st.sampled_from("ab"), st.floats(1, 1e6)), min_size=1),
    st.randoms(use_true_random=False),
)
def test_no_row_is_lost_whatever_their_order(found, chance):
    made = [cells(n, limit, rate, mode=mode) for n, limit, mode, rate in found]
    seen = sets(*made)
    assert sorted((s.replicas, s.limit, rate) for s in seen for rate in s.rates) == sorted(
        (n, limit, rate) for n, limit, _, rate in found
    )
    chance.shuffle(made)
    again = [(s.replicas, s.limit, s.settings, s.eligible, sorted(s.rates)) for s in sets(*made)]
    assert again == [(s.replicas, s.limit, s.settings, s.eligible, sorted(s.rates)) for s in seen]
