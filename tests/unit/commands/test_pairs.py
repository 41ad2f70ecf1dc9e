"""`pairs`: for any pairs the verdict, the ratio and the exit status are those of the gate; an empty cell never passes;
and a file that is wrong is refused with its line."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from command_line import refused, said
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_slmserve.analysis.gate.decision import GateCriteria, PairSeries, gate
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.commands import pairs
from pytest_slmserve.report.gate import WORDS

KEYS = {"name", "outcome", "why", "better", "n", "decided_at", "ratio", "worse", "sd", "detectable", "margin"}
HEADER = "baseline,candidate"
OTHER_WAY = {"higher": "lower", "lower": "higher"}


def pairs_of(factor: float = 1.0, sd: float = 0.005, count: int = 12, seed: int = 1) -> list[tuple[float, float]]:
    """A candidate with so many times the baseline's value, measured with some noise."""
    chance = random.Random(seed)
    bases = [chance.uniform(90, 110) for _ in range(count)]
    return [(base, base * factor * math.exp(chance.gauss(0, sd))) for base in bases]


def lines(made: list[tuple[float, float]]) -> list[str]:
    return [f"{a!r},{b!r}" for a, b in made]


def write(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "rate.csv"
    path.write_text("\n".join([header, *rows, ""]), "utf-8")
    return path


def asked(capsys, path: Path, direction: str = "higher", *more: object) -> tuple[int, dict[str, object]]:
    seen = said(capsys, "pairs", path, "--direction", direction, "--json", *more)
    assert seen.err == ""
    return seen.status, json.loads(seen.out)


@pytest.mark.parametrize("direction", ["higher", "lower"])
@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_what_is_certainly_worse_fails_and_all_else_passes(tmp_path, capsys, factor, direction):
    status, found = asked(capsys, write(tmp_path, *lines(pairs_of(factor))), direction)
    worse = (factor < 1) if direction == "higher" else (factor > 1)
    assert (status, found["outcome"], found["better"]) == (*((1, "fail") if worse else (0, "pass")), direction)
    assert found["ratio"]["value"] == pytest.approx(factor, rel=0.02) and (found["decided_at"], found["n"]) == (4, 12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.sampled_from(["higher", "lower"]), st.floats(0.9, 1.1), st.sampled_from([0.03, 0.2]))
def test_the_verdict_is_that_of_the_gate(tmp_path, capsys, seed, direction, factor, margin):
    made = pairs_of(factor, 0.02, 12, seed)
    (expected,) = gate([PairSeries("rate", direction, tuple(made), margin)], GateCriteria(margin))
    status, found = asked(capsys, write(tmp_path, *lines(made)), direction, "--margin", margin)
    assert (found["outcome"], found["decided_at"]) == (WORDS[expected.outcome], expected.decided_at)
    assert status == {State.PASSES: 0, State.FAILS: 1, State.INCONCLUSIVE: 10}[expected.outcome]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.sampled_from(["higher", "lower"]), st.floats(0.9, 1.1), st.floats(0.01, 100))
def test_the_unit_of_a_figure_changes_nothing_and_its_inverse_turns_the_direction(
    tmp_path, capsys, seed, direction, factor, unit
):
    made = pairs_of(factor, 0.01, 12, seed)
    one = asked(capsys, write(tmp_path, *lines(made)), direction)[1]
    scaled = asked(capsys, write(tmp_path, *lines([(unit * a, unit * b) for a, b in made])), direction)[1]
    inverse = asked(capsys, write(tmp_path, *lines([(1 / a, 1 / b) for a, b in made])), OTHER_WAY[direction])[1]
    assert one["outcome"] == scaled["outcome"] == inverse["outcome"]
    assert scaled["ratio"]["value"] == pytest.approx(one["ratio"]["value"])
    assert inverse["ratio"]["value"] == pytest.approx(1 / one["ratio"]["value"])


def test_json_has_all_that_is_known(tmp_path, capsys):
    _, found = asked(capsys, write(tmp_path, *lines(pairs_of(0.9))))
    assert set(found) == KEYS and (found["name"], found["margin"]) == ("rate.csv", 0.03)
    assert found["worse"] == pytest.approx(1 / 0.9 - 1, rel=0.05)
    assert found["ratio"]["low"] < found["ratio"]["value"] < found["ratio"]["high"]
    assert 0.002 < found["sd"] < 0.01 and 0 < found["detectable"] < 0.03


def test_too_noisy_or_too_few_pairs_are_inconclusive(tmp_path, capsys):
    noisy = write(tmp_path, *lines(pairs_of(sd=0.3)))
    status, found = asked(capsys, noisy)
    assert (status, found["outcome"], found["decided_at"]) == (10, "inconclusive", None)
    for rows in (1, 2, 3):
        status, found = asked(capsys, write(tmp_path, *lines(pairs_of(0.5, count=rows))))
        assert (status, found["outcome"], found["n"]) == (10, "inconclusive", rows)


def test_more_pairs_decide_what_fewer_leave_open(tmp_path, capsys):
    noisy = lines(pairs_of(1.0, 0.035, 20, seed=4))
    fewer, more = asked(capsys, write(tmp_path, *noisy[:12])), asked(capsys, write(tmp_path, *noisy))
    assert fewer[0] == 10 and (more[0], more[1]["n"]) == (0, 20) and more[1]["decided_at"] in (18, 20)


def test_the_text_has_the_table_and_the_number_of_the_verdict(tmp_path, capsys):
    seen = said(capsys, "pairs", write(tmp_path, *lines(pairs_of(0.9))), "--direction", "higher")
    assert (seen.status, seen.err) == (1, "") and "fail: 10" in seen.out and not seen.out.startswith("\n")
    assert all(word in seen.out for word in ("candidate /", "rate", "% lower (0."))


def test_the_margin_is_the_users(tmp_path, capsys):
    path = write(tmp_path, *lines(pairs_of(0.95)))
    assert [asked(capsys, path, "higher", "--margin", margin)[0] for margin in (0.03, 0.2)] == [1, 0]
    assert asked(capsys, path, "higher", "--margin", 0.2)[1]["margin"] == 0.2


def test_the_page_has_the_verdict_and_its_status(tmp_path, capsys, monkeypatch):
    written = []
    monkeypatch.setattr(pairs, "write_page", lambda path, _, status, sections: written.append((path, status, sections)))
    for factor, look in ((0.9, "bad"), (1.0, "good")):
        path = write(tmp_path, *lines(pairs_of(factor)))
        said(capsys, "pairs", path, "--direction=higher", "--html", tmp_path / "a.html")
        [(page, status, sections)] = written
        [section] = sections["Gate"]
        assert (page, status, section.look) == (tmp_path / "a.html", int(factor < 1), look)
        assert section.title == f"rate.csv: {'fail' if factor < 1 else 'pass'}" and section.charts() != []
        written.clear()


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("cells", ["100,", ",100", ",", " , ", "100,  "])
def test_an_empty_cell_never_passes(tmp_path, capsys, at, cells):
    rows = lines(pairs_of())
    rows[at] = cells
    status, found = asked(capsys, write(tmp_path, *rows))
    assert (status, found["outcome"], found["n"]) == (10, "inconclusive", 11) and f"pair {at + 1} " in found["why"]


def test_an_empty_cell_does_not_hide_a_failure(tmp_path, capsys):
    status, found = asked(capsys, write(tmp_path, *lines(pairs_of(0.8)), "100,"))
    assert (status, found["outcome"], found["n"]) == (1, "fail", 12)


def test_other_columns_and_their_order_do_not_matter(tmp_path, capsys):
    made = pairs_of(0.95, 0.02)
    rows = [f"{i},{b!r},x,{a!r}" for i, (a, b) in enumerate(made)]
    mixed = asked(capsys, write(tmp_path, *rows, header="run, candidate ,host,baseline"))
    assert mixed == asked(capsys, write(tmp_path, *lines(made)))


@pytest.mark.parametrize(
    ("cells", "facts"),
    [
        ("fast,100", ["line 4", "baseline", "'fast'"]),
        ("100,inf", ["line 4", "candidate", "'inf'"]),
        ("100,-5", ["line 4", "candidate", "'-5'"]),
        ("100", ["line 4", "1 ", "2"]),
    ],
)
def test_what_is_no_measurement_is_refused_with_its_line(tmp_path, capsys, cells, facts):
    rows = lines(pairs_of())
    rows[2] = cells
    refused(said(capsys, "pairs", write(tmp_path, *rows), "--direction", "higher"), *facts)


@pytest.mark.parametrize(("header", "missing"), [("baseline,after", "candidate"), ("a,b", "baseline")])
def test_a_column_that_is_not_there_is_named(tmp_path, capsys, header, missing):
    path = write(tmp_path, *lines(pairs_of()), header=header)
    refused(said(capsys, "pairs", path, "--direction", "lower"), f"'{missing}'", header.split(",")[0])


@pytest.mark.parametrize("text", ["", "\n", "baseline,candidate\n", "before,after\n", "[]", None])
def test_a_file_without_pairs_is_refused_by_its_name(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "rate.csv").write_text(text, "utf-8")
    refused(said(capsys, "pairs", tmp_path / "rate.csv", "--direction", "higher"), "rate.csv")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ([], ["--direction"]),
        (["--direction", "up"], ["--direction", "'up'"]),
        *(
            (["--direction", "higher", "--margin", m], ["--margin", f"'{m}'"])
            for m in ("3", "0", "-0.1", "nan", "much")
        ),
    ],
)
def test_wrong_usage_names_the_option(tmp_path, capsys, words, facts):
    refused(said(capsys, "pairs", write(tmp_path, *lines(pairs_of())), *words), *facts)
