"""The last screen: what is on it in which colour and order, and that it is one screen; what all tables add; and what a
run writes for workflows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import pairs
from strategies import H200, job_point, law, measurement, noisy_curve, point, shared_point

from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import screen as last_screen
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import (
    MOST_LINES,
    VERDICT,
    ScreenPart,
    Words,
    disturbances,
    screen,
    subject_sections,
    summary_lines,
    tables,
    write_for_others,
)
from pytest_slmserve.report.text_table import laid_out

BATCHES = (64, 128, 256, 512)
EXPECTED_TO_FAIL = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit, the paper has 256")
PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE


@pytest.fixture(autouse=True)
def eighty_columns() -> Iterator[None]:
    with laid_out(80):
        yield


def sweep(model: str = "opt-1.3b", repeats: int = 2) -> Curve:
    made = [
        measurement(c, law(c) * (1 + 0.002 * i), model=model, environment=H200, repeat=i)
        for c in BATCHES
        for i in range(repeats)
    ]
    return curve_of(model, made)


def verdict(state: State, claim: str = "throughput-plateau", subject: str = "opt-1.3b", **facts: object) -> Verdict:
    return Verdict(claim, subject, state, "because of this", **facts)  # type: ignore[arg-type]


def lines_of(**found: object) -> list[str]:
    return [text for text, _ in screen(Findings(**found))]  # type: ignore[arg-type]


def flat(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


# What is on it


def test_a_model_is_a_line_of_its_table_and_the_archive_comes_last():
    lines = lines_of(curves=[sweep()], archives=["a.jsonl"])
    assert [line.split()[:4] for line in lines if line.startswith("opt-1.3b")] == [["opt-1.3b", "from", "256", "256"]]
    assert lines[-2:] == ["archive: a.jsonl", "more: slmserve report a.jsonl"]
    assert "--slm-report=tables" in lines_of(curves=[sweep()])[-1], "nothing was kept"


def test_replicas_and_jobs_are_told():
    alone = replace(point(96, [1000.0, 1010.0]), e2e_s=24.6, e2e_p99_s=25.1)
    shared = [shared_point(2, (1200.0, 1210.0)), shared_point(2, (900.0, 910.0), sharing="time-slicing")]
    curve = Curve(subject="opt-1.3b", points=(alone,), shared=tuple(shared), measurements=(measurement(),))
    text = flat(lines_of(curves=[curve], shared=shared, jobs=[job_point()]))
    assert "2 x opt-1.3b, mps: 1,205 tokens/s at concurrency 96, +19.9 % (95 %: " in text and " 2 deployments" in text
    assert "job: opt-6.7b: 10.05 requests/s, 2,573 tokens/s, mean E2E 2.01 s (500 of 512/256 tokens, " in text
    text = flat(lines_of(jobs=[job_point(), job_point(output_tokens=32)]))
    assert "Jobs on NVIDIA H200, vLLM 0.26.0" in text and "opt-6.7b 512/256 500 at once" in text


def test_claims_are_counted_and_those_that_surprise_are_red():
    judged = [
        (verdict(PASSES), None),
        (verdict(FAILS, "table-1-batch-fits"), EXPECTED_TO_FAIL),
        (verdict(FAILS, subject="opt-2.7b"), None),
        (verdict(PASSES, "table-1-batch-fits", "opt-2.7b"), EXPECTED_TO_FAIL),
    ]
    lines = screen(Findings(judged=judged))
    assert [colour for _, colour in lines] == ["red"] * 3
    assert lines[0][0] == "claims: 1 pass, 1 fail as expected, 1 FAIL, 1 PASS, UNEXPECTED"
    assert "throughput-plateau, opt-2.7b" in lines[1][0] and "table-1-batch-fits, opt-2.7b" in lines[2][0]
    either = replace(EXPECTED_TO_FAIL, expected="either")
    open_ones = [(verdict(state), either) for state in (FAILS, INCONCLUSIVE)]
    ((text, colour),) = screen(Findings(judged=[*judged[:2], *open_ones]))
    assert text.endswith("; either expected: 1 fail, 1 inconclusive") and colour == "green"
    assert screen(Findings(judged=judged[:2], strict=True))[0][1] == "red"
    assert screen(Findings(judged=[*judged[:1], (verdict(INCONCLUSIVE), None)]))[0][1] == "yellow"


def test_inconclusive_claims_are_together_by_what_would_decide_them():
    noisy = {"value": 0.1, "low": 0.05, "high": 0.15}
    judged = [(verdict(INCONCLUSIVE, subject=f"opt-{size}", **noisy), None) for size in ("125m", "1.3b", "2.7b")]
    lost = Verdict.inconclusive("pareto-up-to-plateau", "opt-1.3b", "not measured at concurrency 8")
    lines = lines_of(curves=[sweep()], judged=[*judged, (lost, None)])
    first = lines.index("claims: 4 inconclusive")
    text = flat(lines[first + 1 : -1])
    assert "--slm-repeats 4 " in text and "throughput-plateau (3 verdicts)" in text
    assert text.endswith("pareto-up-to-plateau (opt-1.3b)") and text.count("--slm-resume") == 2


def test_what_was_disturbed_is_named_the_worst_first():
    curve = noisy_curve({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0})
    cold, busy = (replace(p, degraded=(f"another process took {p.concurrency} % of it",)) for p in curve.points[:2])
    slow = replace(curve.points[3], noise=("not steady: 1 apart", "not steady: 2 apart"))
    partly = replace(slow, concurrency=16, left_out=1, problems=("1 requests failed",))
    found = Findings(
        curves=[replace(curve, points=(cold, busy, point(4, ()), slow, partly))],
        jobs=[job_point(()), job_point((), rate=2.5)],
    )
    counts, said = disturbances(found)
    assert counts.endswith(": 7 of 7 points")
    assert [text.split(": ")[0] for text in said] == ["INVALID", "degraded", "some left out", "noisy, kept"]
    assert said[0].endswith("opt-1.3b at 4; opt-6.7b, jobs at once, 2.5/s: planted: invalid")
    assert said[1].endswith("opt-1.3b at 1, 2: another process took 1 % of it")
    assert said[3].endswith(" at 8: not steady: 1 apart, and 1 more like it")
    lines = screen(found)
    assert (counts, "yellow") in lines and disturbances(Findings(curves=[sweep()]))[1] == []


def test_replicas_that_were_disturbed_are_named():
    _, (said,) = disturbances(Findings(shared=[shared_point(2, ()), shared_point(2, (9.0,))]))
    assert "2 x opt-1.3b, mps, at 96" in said


def test_a_gate_has_its_outcome_first_and_the_endpoints_that_do_not_pass_before_the_others():
    slower = judge_gate(pairs(6, speed=0.9), GateCriteria())
    lines = screen(
        Findings(gates=[slower], archives=["a.jsonl"], written="written: gate.json", command="pytest -k 'a b'")
    )
    texts = [text for text, _ in lines]
    assert lines[0] == ("opt-1.3b: FAIL after 6 pairs of launches", "red")
    outcomes = [text.split()[-1] for text, colour in lines if colour and text.split()[-1] in ("pass", "fail")]
    assert outcomes == sorted(outcomes) and {"pass", "fail"} == {*outcomes}
    failing = next(number for number, text in enumerate(texts) if text.endswith("  fail"))
    assert "10 % lower (0.9 times" in flat(texts[failing + 1 : failing + 3])
    assert "written: gate.json" in texts and "to repeat it: pytest -k 'a b'" in texts


def test_a_gate_with_few_pairs_shows_what_is_next_and_no_endpoint():
    lines = screen(Findings(gates=[judge_gate(pairs(2), GateCriteria())]))
    assert [colour for text, colour in lines if text.startswith("  next: ")] == ["yellow"]
    assert not any("output tokens/s" in text for text, _ in lines) and "--slm-gate" in flat([text for text, _ in lines])


def test_a_gate_between_releases_names_them_and_what_was_dropped():
    made = [
        replace(m, environment=replace(m.environment, vllm=f"0.2{m.paired.side == 'candidate':d}.0")) for m in pairs(4)
    ]
    lost = [replace(m, run=replace(m.run, failures=1)) if m.paired.pair == 4 else m for m in made]
    lines = lines_of(gates=[judge_gate(lost, GateCriteria())])
    assert lines[0].endswith(": vLLM 0.20.0 and 0.21.0") and any(line.startswith("left out: pair 4") for line in lines)


def test_nothing_is_said_of_nothing():
    assert lines_of() == []
    assert lines_of(notes=["the line was torn"], archives=["a.jsonl"]) == ["note: the line was torn"]
    assert screen(Findings(inconclusive=["too few"])) == [("inconclusive: too few", "yellow")]


# One screen


@pytest.mark.parametrize("width", [80, 160])
def test_it_is_one_screen_however_much_there_is(width):
    """Nine models, twenty jobs, and everything wrong."""
    wrong = "a reason of many words " * 20
    models = [f"model-{number}" for number in range(9)]
    judged = [(replace(verdict(FAILS, subject=model), why=wrong), None) for model in models]
    judged += [(Verdict.inconclusive(f"claim-{model}", model, f"{model} {wrong}"), None) for model in models]
    one = sweep()
    bad = replace(one, points=tuple(replace(p, degraded=(wrong,)) for p in one.points))
    curves, jobs = [replace(bad, subject=model) for model in models], [job_point(output_tokens=n) for n in range(1, 21)]
    with laid_out(width):
        lines = lines_of(curves=curves, judged=judged, jobs=jobs, notes=[wrong] * 5, archives=["a.jsonl"])
    assert max(map(len, lines)) <= width and len(lines) == MOST_LINES == 23
    text = "\n".join(lines)
    assert all(word in text for word in ("model-0  from", "plateau, model-0", "inconclusive: model-0", "more models"))
    assert any(line.strip().startswith("20 jobs") for line in lines) and lines[-1] == "more: slmserve report a.jsonl"


def test_what_fails_has_more_room_than_notes():
    judged = [(verdict(FAILS, f"claim-{n}", "opt-1.3b"), None) for n in range(30)]
    judged += [(Verdict.inconclusive("other", "opt-125m", "for want of data"), None)]
    curves = [replace(sweep(), subject=model) for model in ("opt-125m", "opt-1.3b", "opt-2.7b")]
    lines = lines_of(curves=curves, judged=judged, jobs=[job_point()] * 9, notes=["a note"] * 9, archives=["a.jsonl"])
    assert len(lines) == MOST_LINES and sum("FAILS" in line for line in lines) >= 5


def test_the_parts_are_made_once_however_little_room_there_is(monkeypatch):
    made = []
    monkeypatch.setattr(last_screen.sweeps, "overview_tables", lambda found: made.append(found) or [])
    assert len(lines_of(notes=["many words " * 100] * 9)) <= MOST_LINES and len(made) == 1


def test_several_gates_are_one_screen():
    lines = lines_of(gates=[judge_gate(pairs(6, speed=0.9), GateCriteria())] * 4, archives=["a.jsonl"])
    assert len(lines) <= MOST_LINES and lines.count("opt-1.3b: FAIL after 6 pairs of launches") == 4


@given(st.integers(1, 30), st.integers(1, 60), st.integers(5, 40))
def test_of_many_notes_the_last_go_first_and_are_counted(notes, words, most):
    with laid_out(80):
        lines = [
            text for text, _ in screen(Findings(notes=[f"n{i} {'w ' * words}".strip() for i in range(notes)]), most)
        ]
    shown = [line.split()[1] for line in lines if line.startswith("note: ")]
    assert len(lines) <= most and shown == [f"n{i}" for i in range(len(shown))]
    assert (
        len(shown) == notes
        or lines[-1].strip() == f"and {notes - len(shown)} more note{'s' * (notes - len(shown) > 1)}"
    )


@pytest.mark.parametrize(
    ("words", "longest", "lines"),
    [
        (Words("a " * 60), (1, 1), 1),  # shown as it is
        (Words("a " * 60, kind=VERDICT), (9, 1), 2),
        (Words("a " * 60, kind=VERDICT), (1, 9), 1),
        (Words("a " * 60, least=2), (1, 1), 2),
        (Words("short", kind=VERDICT), (0, 0), 1),
    ],
)
def test_a_sentence_has_as_many_lines_as_its_kind_may_have(words, longest, lines):
    assert len(words.within(longest)) == lines


def test_a_sentence_that_is_cut_says_so_and_keeps_its_indent_and_colour():
    (line,) = Words(f"  {'word ' * 40}", "red", VERDICT).within((1, 1))
    assert (
        line.text.startswith("  word") and line.text.endswith(" ...") and len(line.text) <= 80 and line.colour == "red"
    )


def test_a_part_can_do_without_all_but_its_first_line():
    block = [Words("a"), Words("b")]
    part = ScreenPart([block] * 3, "thing", [Words("head")], [Words("foot")], weight=2)
    assert part.excess == (6 + 1 + 1 - 1) / 2 and len(part.lines) == 8
    assert replace(part, entries=[]).excess == 0 and ScreenPart([], "thing").lines == []
    told = [words.text for words in replace(part, entries=[block], left_out=2).lines]
    assert told[:3] == ["head", "a", "b"] and told[3].strip() == "and 2 more things" and told[4] == "foot"


# With all tables


def judged_sweep(strict: bool = False, **more: object) -> Findings:
    curve = curve_of("opt-1.3b", [measurement(c, law(c), repeat=i) for c in (128, 256, 512) for i in range(2)])
    rows = [lookup.row_for(name, "opt-1.3b") for name in ("throughput-plateau", "table-1-batch-fits")]
    return Findings(
        curves=[curve],
        judged=[(lookup.judge_row(row, curve), row) for row in rows],
        notes=["the line was torn"],
        reused={"opt-1.3b at 128": 3, "opt-1.3b at 256": 1},
        reused_from="some.jsonl",
        archives=["records.jsonl"],
        strict=strict,
        **more,  # type: ignore[arg-type]
    )


def test_the_summary_has_no_table_and_tells_what_was_reused():
    lines = list(summary_lines(judged_sweep()))
    assert ("claims: 1 pass, 1 fail as expected", "green") in lines and ("note: the line was torn", "yellow") in lines
    assert [text for text, _ in lines[-2:]] == ["archive: records.jsonl", "more: slmserve report records.jsonl"]
    assert lines[-3][0].startswith("4 ") and lines[-3][0].endswith("from some.jsonl")
    assert not any(text.startswith("opt-1.3b on NVIDIA") for text, _ in lines)


@pytest.mark.parametrize("detail", ["tables", "all"])
def test_tables_come_before_the_summary_and_nothing_is_said_twice(detail):
    with laid_out(100):
        lines = list(summary_lines(judged_sweep(), detail))
    colours = {" ".join(text.split())[:18]: colour for text, colour in lines}
    assert (
        colours["passes opt-1.3b pl"] == "green" == colours["fails, as expected"]
        and colours["opt-1.3b on NVIDIA"] is None
    )
    text = "\n".join(text for text, _ in lines)
    assert text.count("the line was torn") == 1 == text.count("from some.jsonl") and "opt-1.3b at 128 (3)" in text
    assert lines[-1][0] == "more: slmserve report records.jsonl" and ("not shown:" in text) is (detail == "tables")


def test_under_strict_an_expected_failure_is_red():
    assert [c for text, c in summary_lines(judged_sweep(strict=True)) if text.strip().startswith("FAILS")] == ["red"]


def test_each_subject_has_its_heading_and_without_results_there_is_nothing():
    found = {heading: [*shown] for heading, shown in subject_sections(judged_sweep(jobs=[job_point()])).items()}
    assert {heading for heading, shown in found.items() if shown} == {"Models", "Jobs"} and len(found) == 9
    assert len(found["Jobs"]) == 2 and list(tables(Findings())) == []


# For workflows


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page.md"))
    return tmp_path / "run" / "records.jsonl"


def test_a_run_writes_its_summary_on_the_page_of_its_workflow(records, tmp_path):
    assert write_for_others(replace(judged_sweep(), failed=["test_a: why"]), records) == ""
    text = (tmp_path / "page.md").read_text("utf-8")
    assert (
        text.startswith("### pytest-slmserve\n\n```text\nfailed: test_a: why\nNVIDIA H200") and text.count("```") == 2
    )
    assert "claims: 1 pass, 1 fail as expected" in text and not records.parent.exists()


def test_a_page_has_room_for_more_lines_than_a_screen(records, tmp_path):
    write_for_others(Findings(notes=[f"note {number}" for number in range(90)]), records)
    assert (tmp_path / "page.md").read_text("utf-8").count("note: note ") == 90


def test_gates_are_written_as_json_and_markdown_and_their_command_on_the_page(records, tmp_path):
    gated = judge_gate(pairs(4), GateCriteria())
    said = write_for_others(Findings(gates=[gated], command="pytest -x"), records)
    (facts,) = json.loads((records.parent / "gate.json").read_text("utf-8"))
    beside, page = (records.parent / "gate.md").read_text("utf-8"), (tmp_path / "page.md").read_text("utf-8")
    assert (facts["outcome"], facts["pairs"]) == ("pass", 4) and "gate.json" in said and "gate.md" in said
    assert beside.startswith("### opt-1.3b: PASS") and page.startswith(beside.rstrip("\n"))
    assert "```sh\npytest -x\n```" in page and "### pytest-slmserve" not in page


def test_a_second_run_is_below_the_first_on_the_page(records, tmp_path):
    for _ in range(2):
        write_for_others(judged_sweep(), records)
    assert (tmp_path / "page.md").read_text("utf-8").count("### pytest-slmserve") == 2


def test_a_page_that_cannot_be_written_is_told_and_no_page_is_no_fault(records, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/nowhere/page.md")
    assert "/nowhere/page.md" in write_for_others(judged_sweep(), records)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert write_for_others(judged_sweep(), records) == ""
