"""The last screen: what is on it in which colour and order, and that it is one screen; what all tables add; and what a
run writes for workflows."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from launches import pairs
from planted import gated, lawful
from sections import difference
from strategies import FAILS, INCONCLUSIVE, PASSES, job_point, measurement, noisy_curve, point, shared_point

from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import screen
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.text_table import laid_out

LOADS = (64, 128, 256, 512)
AS_FAILURE = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit, the paper has 256")
EITHER = replace(AS_FAILURE, expected="either")


@pytest.fixture(autouse=True)
def eighty_columns() -> Iterator[None]:
    with laid_out(80):
        yield


def verdict(state: State, claim: str = "throughput-plateau", subject: str = "opt-1.3b", **facts) -> Verdict:
    return Verdict(claim, subject, state, "because of this", **facts)


def lines_of(most: int = screen.MOST_LINES, **found) -> list[str]:
    return [text for text, _ in screen.screen(Findings(**found), most)]


EXPECTED = [(verdict(PASSES), None), (verdict(FAILS, "table-1-batch-fits"), AS_FAILURE)]
SURPRISES = [(verdict(FAILS, subject="opt-2.7b"), None), (verdict(PASSES, "table-1-batch-fits", "x"), AS_FAILURE)]
NOISY = {"value": 0.1, "low": 0.05, "high": 0.15}
LOST = Verdict.inconclusive("pareto-up-to-plateau", "opt-1.3b", "not measured at concurrency 8")
SHARED = [shared_point(2, (1200.0, 1210.0)), shared_point(2, (900.0, 910.0), sharing="time-slicing")]
ALONE = replace(point(96, [1000.0, 1010.0]), e2e_s=24.6, e2e_p99_s=25.1)
BESIDE = Curve(subject="opt-1.3b", points=(ALONE,), shared=tuple(SHARED), measurements=(measurement(),))


def disturbed() -> Findings:
    curve = noisy_curve({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0})
    cold, busy = (replace(p, degraded=(f"another process took {p.concurrency}% of it",)) for p in curve.points[:2])
    slow = replace(curve.points[3], noise=("not steady: 1 apart", "not steady: 2 apart"))
    partly = replace(slow, concurrency=16, left_out=1, problems=("1 requests failed",))
    points = (cold, busy, point(4, ()), slow, partly)
    shared = [shared_point(2, ()), shared_point(2, (9.0,))]
    jobs = [job_point(()), job_point((), rate=2.5)]
    return Findings(curves=[replace(curve, points=points)], shared=shared, jobs=jobs)


def all_wrong() -> Findings:
    """Nine models, twenty jobs, and everything wrong."""
    wrong, one, models = "a reason of many words " * 20, lawful(LOADS), [f"model-{number}" for number in range(9)]
    judged = [(replace(verdict(FAILS, subject=model), why=wrong), None) for model in models]
    judged += [(Verdict.inconclusive(f"claim-{model}", model, f"{model} {wrong}"), None) for model in models]
    bad = replace(one, points=tuple(replace(p, degraded=(wrong,)) for p in one.points))
    curves, jobs = [replace(bad, subject=model) for model in models], [job_point(output_tokens=n) for n in range(1, 21)]
    return Findings(curves=curves, judged=judged, jobs=jobs, notes=[wrong] * 5, archives=["a.jsonl"])


def between_releases():
    sides = {"baseline": "0.20.0", "candidate": "0.21.0"}
    made = [replace(m, environment=replace(m.environment, vllm=sides[m.paired.side])) for m in pairs(4)]
    return [replace(m, run=replace(m.run, failures=1)) if m.paired.pair == 4 else m for m in made]


def test_screen_matches_expected_file():
    slower, written = gated(pairs(6, speed=0.9)), {"written": "written: g.json", "command": "pytest -k 'a b'"}
    either = [(verdict(state), EITHER) for state in (FAILS, INCONCLUSIVE)]
    failing = [(verdict(FAILS, f"claim-{n}"), None) for n in range(30)]
    curves = [replace(lawful(LOADS), subject=model) for model in ("opt-125m", "opt-1.3b", "opt-2.7b")]
    many = Findings(curves=curves, judged=[*failing, (LOST, None)], jobs=[job_point()] * 9, notes=["a note"] * 9)
    noisy = [(verdict(INCONCLUSIVE, subject=f"opt-{size}", **NOISY), None) for size in ("125m", "1.3b", "2.7b")]
    found = {
        "a sweep that was kept": Findings(curves=[lawful(LOADS)], archives=["a.jsonl"]),
        "a sweep that was not kept": Findings(curves=[lawful(LOADS)]),
        "replicas and a job": Findings(curves=[BESIDE], shared=SHARED, jobs=[job_point()]),
        "two jobs": Findings(jobs=[job_point(), job_point(output_tokens=32)]),
        "claims that surprise": Findings(judged=EXPECTED + SURPRISES),
        "claims as expected": Findings(judged=EXPECTED + either),
        "claims as expected, though strict": Findings(judged=EXPECTED, strict=True),
        "an inconclusive claim": Findings(judged=[*EXPECTED[:1], (verdict(INCONCLUSIVE), None)]),
        "claims by what would decide them": Findings(curves=[lawful(LOADS)], judged=[*noisy, (LOST, None)]),
        "disturbed": disturbed(),
        "a gate that fails": Findings(gates=[slower], archives=["a"], **written),
        "a gate with few pairs": Findings(gates=[gated(pairs(2))]),
        "a gate between releases": Findings(gates=[gated(between_releases())]),
        "four gates": Findings(gates=[slower] * 4, archives=["a.jsonl"]),
        "failures, which have more room than notes": many,
        "all is wrong": all_wrong(),
        "nothing": Findings(),
        "a note": Findings(notes=["the line was torn"], archives=["a.jsonl"]),
        "an inconclusive test": Findings(inconclusive=["too few"]),
    }
    for width in (160, 80):
        with laid_out(width):
            lines = {name: [*screen.screen(each)] for name, each in found.items()}
        assert max(map(len, lines.values())) == screen.MOST_LINES == 23
        assert max(len(text) for each in lines.values() for text, _ in each) <= width
    shown = {name: "\n".join(f"{c or '':7}{text}" for text, c in each) for name, each in lines.items()}
    assert difference("screen", shown) == ""


def test_inconclusive_tests_are_shown_once():
    lines = "\n".join(lines_of(inconclusive=[f"test_a.py::test_{name}: {name} is open" for name in "bc"]))
    assert [lines.count(f"{name} is open") for name in "bc"] == [1, 1]
    lines = "\n".join(lines_of(inconclusive=["test_a.py::test_b: b is open"], failed=["test_a.py::test_c: a failure"]))
    assert lines.count("b is open") == 1


def test_sentence_kind_limits_its_lines(monkeypatch):
    made = []
    monkeypatch.setattr(screen.sweeps, "overview_tables", lambda found: made.append(found) or [])
    assert len(lines_of(notes=["many words " * 100] * 9)) <= screen.MOST_LINES and len(made) == 1
    block = [screen.Words("a"), screen.Words("b")]
    part = screen.ScreenPart([block] * 3, "thing", [screen.Words("head")], [screen.Words("foot")], weight=2)
    assert part.excess == (6 + 1 + 1 - 1) / 2 and len(part.lines) == 8
    assert replace(part, entries=[]).excess == 0 and screen.ScreenPart([], "thing").lines == []
    told = [words.text.strip() for words in replace(part, entries=[block], left_out=2).lines]
    assert told == ["head", "a", "b", "and 2 more things", "foot"]
    long, verdict_, least = (screen.Words("a " * 60, **kind) for kind in ({}, {"kind": screen.VERDICT}, {"least": 2}))
    short, shown = screen.Words("short", kind=screen.VERDICT), long  # shown as it is
    rooms = [(shown, (1, 1)), (verdict_, (9, 1)), (verdict_, (1, 9)), (least, (1, 1)), (short, (0, 0))]
    assert [len(words.within(longest)) for words, longest in rooms] == [1, 2, 1, 2, 1]
    ((text, colour, *_),) = screen.Words(f"  {'word ' * 40}", "red", screen.VERDICT).within((1, 1))
    assert (text[:6], text[-4:], colour) == ("  word", " ...", "red") and len(text) <= 80, "what is cut says so"


@given(st.integers(1, 30), st.integers(1, 60), st.integers(5, 40))
def test_last_notes_go_first(notes, words, most):
    with laid_out(80):
        lines = lines_of(most, notes=[f"n{i}{' w' * words}" for i in range(notes)])
    shown = [line.split()[1] for line in lines if line.startswith("note: ")]
    left = notes - len(shown)
    assert len(lines) <= most and shown == [f"n{i}" for i in range(len(shown))]
    assert not left or lines[-1].strip() == f"and {left} more note{'s' * (left > 1)}"


def judged_sweep(**more: object) -> Findings:
    curve = lawful((128, 256, 512), (1, 1))
    rows = [lookup.row_for(name, "opt-1.3b") for name in ("throughput-plateau", "table-1-batch-fits")]
    reused = {"opt-1.3b at 128": 3, "opt-1.3b at 256": 1}
    facts = {"notes": ["the line was torn"], "reused": reused, "reused_from": "some.jsonl", "archives": ["r.jsonl"]}
    judged = [(lookup.judge_row(row, curve), row) for row in rows]
    return Findings(curves=[curve], judged=judged, **{**facts, **more})  # type: ignore[arg-type]


def test_tables_come_before_summary():
    found = {detail: screen.summary_lines(judged_sweep(), detail) for detail in ("summary", "tables", "all")}
    found["strict"] = screen.summary_lines(judged_sweep(strict=True))
    with laid_out(100):
        shown = {name: "\n".join(f"{c or '':7}{text}" for text, c in lines) for name, lines in found.items()}
    assert [text.count("the line was torn") for text in shown.values()] == [1] * 4
    parts = screen.subject_sections(judged_sweep(jobs=[job_point()]))
    shown["parts of each subject"] = "\n".join(f"{heading}: {len([*each])}" for heading, each in parts.items())
    assert difference("summary", shown) == "" and list(screen.tables(Findings())) == []


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "page.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    return path


def test_workflow_summary_matches_expected_file(page, tmp_path, monkeypatch):
    folder, gates = page.parent / "run", [gated(pairs(4))]
    for found in (judged_sweep(failed=["test_a: why"]), Findings(notes=[f"note {number}" for number in range(90)])):
        assert screen.write_for_others(found, folder / "records.jsonl") == "" and not folder.exists()
    said = screen.write_for_others(Findings(gates=gates, command="pytest -x"), folder / "records.jsonl")
    assert said.replace(str(folder), "") == "written: /gate.json and gate.md"
    shown = {"page": page.read_text("utf-8"), "beside": (folder / "gate.md").read_text("utf-8")}
    assert difference("workflow", shown) == ""
    (facts,) = json.loads((folder / "gate.json").read_text("utf-8"))
    assert (facts["outcome"], facts["pairs"]) == ("pass", 4)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/nowhere/page.md")
    assert "/nowhere/page.md" in screen.write_for_others(judged_sweep(), tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert screen.write_for_others(judged_sweep(), tmp_path) == ""
