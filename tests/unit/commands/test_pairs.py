"""`pairs`: for any pairs the verdict, the ratio and the exit status are those of the gate; an empty cell never passes;
and a file that is wrong is refused with its line."""

import json
import math
import random
from pathlib import Path

import pytest
from command_line import refused, said
from hypothesis import HealthCheck, given, settings, strategies as st

from pytest_slmserve.analysis.gate.decision import GateCriteria, PairSeries, gate
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.commands import pairs
from pytest_slmserve.report.gate import WORDS

KEYS = {"name", "outcome", "why", "better", "n", "decided_at", "ratio", "worse", "sd", "detectable", "margin"}
HEADER = "baseline,candidate"


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
def test_clearly_worse_pairs_fail(tmp_path, capsys, factor, direction):
    status, found = asked(capsys, write(tmp_path, *lines(pairs_of(factor))), direction)
    worse = (factor < 1) if direction == "higher" else (factor > 1)
    assert (status, found["outcome"], found["better"]) == (*((1, "fail") if worse else (0, "pass")), direction)
    assert found["ratio"]["value"] == pytest.approx(factor, rel=0.02) and (found["decided_at"], found["n"]) == (4, 12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.sampled_from(["higher", "lower"]), st.floats(0.9, 1.1), st.sampled_from([0.03, 0.2]))
def test_verdict_matches_gate(tmp_path, capsys, seed, direction, factor, margin):
    made = pairs_of(factor, 0.02, 12, seed)
    (expected,) = gate([PairSeries("rate", direction, tuple(made), margin)], GateCriteria(margin))
    status, found = asked(capsys, write(tmp_path, *lines(made)), direction, "--margin", margin)
    assert (found["outcome"], found["decided_at"]) == (WORDS[expected.outcome], expected.decided_at)
    assert status == {State.PASSES: 0, State.FAILS: 1, State.INCONCLUSIVE: 10}[expected.outcome]


def test_json_has_all_figures(tmp_path, capsys):
    path = write(tmp_path, *lines(pairs_of(0.95)))
    (status, found), wide = (asked(capsys, path, "higher", "--margin", margin) for margin in (0.03, 0.2))
    assert (status, found["margin"], wide[0], wide[1]["margin"]) == (1, 0.03, 0, 0.2)
    assert set(found) == KEYS and found["name"] == "rate.csv"
    assert found["worse"] == pytest.approx(1 / 0.95 - 1, rel=0.1)
    assert found["ratio"]["low"] < found["ratio"]["value"] < found["ratio"]["high"]
    assert 0.002 < found["sd"] < 0.01 and 0 < found["detectable"] < 0.03
    made = pairs_of(0.95, 0.02)
    rows = [f"{i},{b!r},x,{a!r}" for i, (a, b) in enumerate(made)]
    mixed = asked(capsys, write(tmp_path, *rows, header="run, candidate ,host,baseline"))
    assert mixed == asked(capsys, write(tmp_path, *lines(made)))


@pytest.mark.parametrize(("factor", "status", "word", "look"), [(0.9, 1, "fail", "bad"), (1.0, 0, "pass", "good")])
def test_page_shows_verdict(factor, status, word, look, tmp_path, capsys, monkeypatch):
    written = []
    monkeypatch.setattr(pairs, "write_page", lambda path, _, status, sections: written.append((path, status, sections)))
    path = write(tmp_path, *lines(pairs_of(factor)))
    seen = said(capsys, "pairs", path, "--direction=higher", "--html", tmp_path / "a.html")
    [(page, told, sections)] = written
    [section] = sections["Gate"]
    assert (seen.status, seen.err, page, told) == (status, "", tmp_path / "a.html", status)
    assert (section.title, section.look) == (f"rate.csv: {word}", look) and section.charts() != []
    assert all(each in seen.out for each in ("candidate /", f"{word}: ")) and not seen.out.startswith("\n")


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("cells", ["100,", ",100", ",", " , ", "100,  "])
def test_empty_cell_never_passes(tmp_path, capsys, at, cells):
    rows = lines(pairs_of())
    rows[at] = cells
    status, found = asked(capsys, write(tmp_path, *rows))
    assert (status, found["outcome"], found["n"]) == (10, "inconclusive", 11) and f"pair {at + 1} " in found["why"]
    status, found = asked(capsys, write(tmp_path, *lines(pairs_of(0.8)), cells))
    assert (status, found["outcome"], found["n"]) == (1, "fail", 12)


@pytest.mark.parametrize(("header", "cells", "facts"), [
    (HEADER, "fast,100", ["line 4", "baseline", "'fast'"]), (HEADER, "100,inf", ["line 4", "candidate", "'inf'"]),
    (HEADER, "100,-5", ["line 4", "candidate", "'-5'"]), (HEADER, "100", ["line 4", "1 ", "2"]),
    ("baseline,after", "100,100", ["'candidate'", "baseline"]), ("a,b", "100,100", ["'baseline'", "a"]),
])  # fmt: skip
def test_wrong_cell_is_named(tmp_path, capsys, header, cells, facts):
    rows = lines(pairs_of())
    rows[2] = cells
    refused(said(capsys, "pairs", write(tmp_path, *rows, header=header), "--direction", "higher"), *facts)


@pytest.mark.parametrize("text", ["", "\n", "baseline,candidate\n", "before,after\n", "[]", None])
def test_file_without_pairs_is_refused(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "rate.csv").write_text(text, "utf-8")
    refused(said(capsys, "pairs", tmp_path / "rate.csv", "--direction", "higher"), "rate.csv")


@pytest.mark.parametrize("margin", ["3", "0", "-0.1", "nan", "much"])
def test_wrong_usage_names_option(tmp_path, capsys, margin):
    path = write(tmp_path, *lines(pairs_of()))
    refused(said(capsys, "pairs", path), "--direction")
    refused(said(capsys, "pairs", path, "--direction=up"), "--direction", "'up'")
    refused(said(capsys, "pairs", path, "--direction=higher", "--margin", margin), "--margin", f"'{margin}'")
