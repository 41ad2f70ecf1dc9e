"""`slmserve pairs PAIRS`: its verdicts, its exit status, and what it says of files that are wrong."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.gate.decision import GateCriteria, PairSeries, gate
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.gate import WORDS

KEYS = {"name", "outcome", "why", "better", "n", "decided_at", "ratio", "worse", "sd", "detectable", "margin"}
HEADER = "baseline,candidate"


def pairs_of(factor: float = 1.0, sd: float = 0.005, pairs: int = 12, seed: int = 1) -> list[tuple[float, float]]:
    """A candidate with so many times the baseline's value, measured with some noise."""
    chance = random.Random(seed)
    bases = [chance.uniform(90, 110) for _ in range(pairs)]
    return [(base, base * factor * math.exp(chance.gauss(0, sd))) for base in bases]


def lines(pairs: list[tuple[float, float]]) -> list[str]:
    return [f"{a!r},{b!r}" for a, b in pairs]


def write(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "rate.csv"
    path.write_text("\n".join([header, *rows, ""]), "utf-8")
    return path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["pairs", *map(str, arguments)])
    seen = capsys.readouterr()
    return status, seen.out, seen.err


def asked(capsys, path: Path, direction: str = "higher", *more: object) -> tuple[int, dict[str, object]]:
    status, out, err = run(capsys, path, "--direction", direction, "--json", *more)
    assert err == ""
    return status, json.loads(out)


@pytest.mark.parametrize(
    ("factor", "direction", "status", "outcome"),
    [
        (1.0, "higher", 0, "pass"),
        (1.0, "lower", 0, "pass"),
        (0.9, "higher", 1, "fail"),
        (1.1, "higher", 0, "pass"),
        (0.9, "lower", 0, "pass"),
        (1.1, "lower", 1, "fail"),
    ],
)
def test_status_and_outcome(tmp_path, capsys, factor, direction, status, outcome):
    seen, found = asked(capsys, write(tmp_path, *lines(pairs_of(factor))), direction)
    assert (seen, found["outcome"], found["better"]) == (status, outcome, direction)
    assert found["ratio"]["value"] == pytest.approx(factor, rel=0.02) and found["decided_at"] == 4 and found["n"] == 12


def test_json_has_all_that_is_known(tmp_path, capsys):
    _, found = asked(capsys, write(tmp_path, *lines(pairs_of(0.9))))
    assert set(found) == KEYS and (found["name"], found["margin"]) == ("rate.csv", 0.03)
    assert found["worse"] == pytest.approx(1 / 0.9 - 1, rel=0.05) and "lower" in found["why"]
    assert found["ratio"]["low"] < found["ratio"]["value"] < found["ratio"]["high"]
    assert 0.002 < found["sd"] < 0.01 and 0 < found["detectable"] < 0.03
    status, found = asked(capsys, write(tmp_path, *lines(pairs_of(sd=0.3))))
    assert (status, found["outcome"], found["decided_at"]) == (10, "inconclusive", None), "too noisy"


def test_text_has_the_table_and_the_reason(tmp_path, capsys):
    status, out, err = run(capsys, write(tmp_path, *lines(pairs_of(0.9))), "--direction", "higher")
    assert (status, err) == (1, "") and "candidate /" in out and "rate" in out
    assert "fail: 10" in out and "% lower (0." in out and "which noise does not explain" in out
    status, out, _ = run(capsys, write(tmp_path, *lines(pairs_of(0.98))), "--direction", "higher")
    said = " ".join(out.split())
    assert status == 1 and re.search(r"2(\.\d)? % lower \(0\.9[78]\d* times the baseline\)", said)
    assert ": more than half of the 3 % margin, and noise does not explain it" in said


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_the_verdict_is_that_of_the_gate(tmp_path, capsys, direction):
    for seed in range(30):
        made = pairs_of(1.02, 0.02, 12, seed)
        (expected,) = gate([PairSeries("rate", direction, tuple(made))], GateCriteria())
        status, found = asked(capsys, write(tmp_path, *lines(made)), direction)
        assert (found["outcome"], found["decided_at"]) == (WORDS[expected.outcome], expected.decided_at)
        assert status == {State.PASSES: 0, State.FAILS: 1, State.INCONCLUSIVE: 10}[expected.outcome]


def test_the_margin_is_the_users(tmp_path, capsys):
    path = write(tmp_path, *lines(pairs_of(0.95)))
    assert [asked(capsys, path, "higher", "--margin", m)[0] for m in (0.03, 0.2)] == [1, 0]
    assert asked(capsys, path, "higher", "--margin", 0.2)[1]["margin"] == 0.2


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_than_four_pairs_are_inconclusive(tmp_path, capsys, rows):
    path = write(tmp_path, *lines(pairs_of(0.5, pairs=rows)))
    status, found = asked(capsys, path)
    assert (status, found["outcome"], found["n"]) == (10, "inconclusive", rows)
    status, out, _ = run(capsys, path, "--direction", "higher")
    assert status == 10 and "4 are wanted at least" in out


def test_more_pairs_than_a_run_of_ours_makes(tmp_path, capsys):
    noisy = lines(pairs_of(1.0, 0.035, 20, seed=4))
    fewer, more = asked(capsys, write(tmp_path, *noisy[:12])), asked(capsys, write(tmp_path, *noisy))
    assert fewer[0] == 10 and (more[0], more[1]["n"]) == (0, 20) and more[1]["decided_at"] in (18, 20)


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("cells", ["100,", ",100", ",", " , ", "100,  "])
def test_an_empty_cell_never_passes(tmp_path, capsys, at, cells):
    rows = lines(pairs_of())
    rows[at] = cells
    status, found = asked(capsys, write(tmp_path, *rows))
    assert (status, found["outcome"], found["n"]) == (10, "inconclusive", 11)
    assert f"pair {at + 1} has no value of the" in found["why"]


def test_an_empty_cell_does_not_hide_a_failure(tmp_path, capsys):
    status, found = asked(capsys, write(tmp_path, *lines(pairs_of(0.8)), "100,"))
    assert (status, found["outcome"], found["n"]) == (1, "fail", 12) and "noise does not explain" in found["why"]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("fast,100", "line 4: baseline is 'fast', which is no number"),
        ("100,inf", "line 4: candidate is 'inf', which is no number"),
        ("100,-5", "line 4: candidate is '-5', which no rate and no latency can be"),
        ("100", "line 4 has 1 fields, the header has 2"),
    ],
)
def test_what_is_no_measurement_is_wrong_usage(tmp_path, capsys, cells, said):
    rows = lines(pairs_of())
    rows[2] = cells
    status, out, err = run(capsys, write(tmp_path, *rows), "--direction", "higher")
    assert (status, out) == (4, "") and err.startswith("error: ") and said in err
    assert len(err.splitlines()) <= 2  # one sentence, and what to try


@pytest.mark.parametrize(("header", "missing"), [("baseline,after", "candidate"), ("a,b", "baseline")])
def test_a_column_that_is_not_there_is_named(tmp_path, capsys, header, missing):
    status, out, err = run(capsys, write(tmp_path, *lines(pairs_of()), header=header), "--direction", "lower")
    assert (status, out) == (4, "") and f"no column '{missing}'" in err and header.split(",")[0] in err


@pytest.mark.parametrize("text", ["", "\n", "baseline,candidate\n", "before,after\n", "[]"])
def test_a_file_without_pairs_is_wrong_usage(tmp_path, capsys, text):
    (tmp_path / "rate.csv").write_text(text, "utf-8")
    status, out, err = run(capsys, tmp_path / "rate.csv", "--direction", "higher")
    assert (status, out) == (4, "") and "rate.csv: there are no pairs in it" in err
    status, _, err = run(capsys, tmp_path / "none.csv", "--direction", "higher")
    assert status == 4 and "cannot read" in err and "none.csv" in err


def test_other_columns_and_their_order_do_not_matter(tmp_path, capsys):
    rows = [f"{i},{b!r},x,{a!r}" for i, (a, b) in enumerate(pairs_of(0.9))]
    status, found = asked(capsys, write(tmp_path, *rows, header="run, candidate ,host,baseline"))
    assert (status, found["outcome"]) == (1, "fail") and found["ratio"]["value"] == pytest.approx(0.9, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--direction"),
        (["--direction", "up"], "invalid choice: 'up'"),
        *(
            (["--direction", "higher", "--margin", m], f"argument --margin: '{m}' is not a")
            for m in ("3", "0", "-0.1", "nan")
        ),
        (["--direction", "higher", "--margin", "much"], "argument --margin: 'much' is not a positive number"),
    ],
)
def test_wrong_usage_is_4(tmp_path, capsys, arguments, said):
    status, out, err = run(capsys, write(tmp_path, *lines(pairs_of())), *arguments)
    assert (status, out) == (4, "") and said in err


def test_as_a_program(tmp_path):
    path = write(tmp_path, *lines(pairs_of(0.9)))
    words = [sys.executable, "-m", "pytest_slmserve", "pairs", str(path), "--direction", "higher", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "") and json.loads(done.stdout)["outcome"] == "fail"
