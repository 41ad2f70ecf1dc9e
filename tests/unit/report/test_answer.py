"""Five lines of a whole run: the worst outcome decides, an error is no verdict, and one command follows."""

from dataclasses import replace

import pytest
from launches import pairs
from planted import gated, lawful
from stored_records import KNOWN, repeats
from strategies import FAILS, INCONCLUSIVE, PASSES, job_point

from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.compare.changes import release_histories
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.answer import answer_of
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import screen, tables

TO_FAIL = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit")
SWEPT = {"curves": [lawful((64, 128, 256, 512))], "archives": ["a.jsonl"], "command": "pytest --slm-gpu"}
GOOD, BAD = ([gated(pairs(4, speed=speed))] for speed in (1.0, 0.9))
SHORT = [gated(pairs(2))]  # among other tests: its speed is not judged
ERROR = "test_a.py::test_b[m-4]: EngineFailed: it died"
BROKEN = "test_a.py::test_b[m-4]: AssertionError: assert <fails: ttft [m]: 900 ms, limit 200 ms>"


def judged(state: State, row: ClaimRow | None = None):
    return (Verdict("throughput-plateau", "opt-1.3b", state, "because of this"), row)


def slower(*rates: float, hosts: int = 1):
    """A history of releases from 0.24.0 on."""
    made = []
    for i, speed in enumerate((1000.0, *rates)):
        where = replace(KNOWN, vllm=f"0.{24 + i}.0", host=f"host {i % hosts}")
        made += repeats([speed, 1.001 * speed], environment=where, launch=f"{i}")
    return release_histories(made)


@pytest.mark.parametrize(("found", "answer", "do_this"), [
    ({**SWEPT, "history": slower(500)}, "INCONCLUSIVE: opt-1.3b at concurrency 8: since vLLM 0.25.0, tokens/s is 0.500",
     "--slm-gate-launches=apart"),
    ({**SWEPT, "history": slower(500), "judged": [judged(FAILS)]}, "FAILS: throughput-plateau", "--slm-gpu -v"),
    ({**SWEPT, "history": slower(*[1000] * 4, *[700] * 5, hosts=10)}, "INCONCLUSIVE: opt-1.3b at concurrency 8: since "
     "vLLM 0.29.0, tokens/s is 0.700 times that before", "--slm-gate-launches=apart"),
    ({**SWEPT, "history": slower(500, 1000)}, "MEASURED: opt-1.3b reaches", "compare a.jsonl --save"),
    ({**SWEPT, "history": slower(1000)}, "MEASURED: opt-1.3b reaches 9,201 tokens/s (95%: ", "compare a.jsonl --save"),
    (SWEPT, "MEASURED: opt-1.3b reaches 9,201 tokens/s (95%: ", "slmserve compare a.jsonl --save"),
    ({"jobs": [job_point()]}, "MEASURED: opt-6.7b reaches", "rerun with -v"),
    ({**SWEPT, "command": "pytest --slm-simulate"}, "MEASURED", "pytest --slm-gpu"),
    ({"judged": [judged(PASSES), judged(FAILS, TO_FAIL)]}, "PASSES: all is as expected", "rerun with -v"),
    ({**SWEPT, "judged": [judged(FAILS)]}, "FAILS: throughput-plateau, opt-1.3b: because of this", "--slm-gpu -v"),
    ({**SWEPT, "judged": [judged(PASSES, TO_FAIL)]}, "FAILS: unexpected pass: throughput-plateau", "-v"),
    ({**SWEPT, "judged": [judged(INCONCLUSIVE)]}, "INCONCLUSIVE: throughput-plateau (opt-1.3b): because",
     "pytest --slm-gpu --slm-resume"),
    ({"inconclusive": ["test_a.py::test_b: open"], "judged": [judged(PASSES)]}, "INCONCLUSIVE: test_b", ""),
    ({**SWEPT, "failed": [BROKEN]}, "FAILS: test_b[m-4]: ttft [m]: 900 ms, limit 200 ms", "-v"),
    ({**SWEPT, "failed": [ERROR]}, "ERROR: test_b[m-4]: EngineFailed: it died", "-v"),
    ({**SWEPT, "failed": [ERROR, BROKEN]}, "FAILS: test_b[m-4]: ttft [m]: 900 ms, limit 200 ms; the first of 2", "-v"),
    ({**SWEPT, "gates": GOOD}, "PASSES: the candidate serves", "the candidate may replace the baseline"),
    ({**SWEPT, "gates": GOOD, "judged": [judged(FAILS)]}, "FAILS: throughput-plateau", "-v"),
    ({**SWEPT, "gates": SHORT, "judged": [judged(PASSES)]}, "PASSES: opt-1.3b reaches 9,201 tokens/s", "--save"),
    ({"gates": SHORT}, "INCONCLUSIVE: the speed of opt-1.3b is not judged yet", ""),
    ({**SWEPT, "gates": GOOD, "interrupted": True}, "INTERRUPTED, PASSES so far: the candidate serves", "--slm-resume"),
    ({**SWEPT, "interrupted": True}, "INTERRUPTED, MEASURED so far: opt-1.3b reaches", "pytest --slm-gpu --slm-resume"),
    ({**SWEPT, "gates": BAD, "interrupted": True}, "FAILS: the candidate serves", "slm_profile"),
    ({**SWEPT, "gates": BAD, "judged": [judged(FAILS)]}, "FAILS: the candidate serves", "slm_profile"),
])  # fmt: skip
def test_worst_outcome_becomes_answer(found, answer, do_this):
    five = answer_of(Findings(**found))
    assert five is not None and five.answer.startswith(answer) and do_this in five.do_this, five
    assert five.look == {"P": "good", "F": "bad", "E": "bad"}.get(five.answer[0], "open")
    assert ("slmserve report a.jsonl" in five.where) is ("archives" in found) and "\n" not in "".join(five.below)


def test_empty_findings_have_no_answer():
    assert answer_of(Findings()) is None


def test_regression_heads_all_tables():
    found = Findings(**SWEPT, history=slower(500), judged=[judged(INCONCLUSIVE)])
    shown = "\n".join(text for text, _ in tables(found))
    assert "INCONCLUSIVE: opt-1.3b at concurrency 8: since vLLM 0.25.0" in shown and "do this: pytest --pyargs" in shown
    assert "throughput-plateau" in "\n".join(text for text, _ in screen(found)), "the open claim is still told"
    assert "since vLLM" not in "\n".join(text for text, _ in tables(Findings(**SWEPT, history=slower(1000))))
