"""0 all as expected, 1 something fails, 10 nothing fails but something is inconclusive, 4 wrong usage.

3, a gate that was broken off, is among the tests of the gate."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from inner_runs import FEW
from inside import SWEEP

NOISY = """
        import pytest
        from pytest_slmserve import State, Verdict

        noisy = Verdict("claim", "model", State.INCONCLUSIVE, "too noisy")
"""
ENDS = {
    "all as expected": (SWEEP, FEW, 0),
    "a claim that fails": (SWEEP, (*FEW, "--slm-engine-arg=b_half=300", "--slm-engine-arg=t_inf=200000"), 1),
    "wrong usage": (SWEEP, (*FEW, "--slm-concurrency=2,1"), 4),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_run_ends_with_the_status_of_the_worst(runs, case):
    source, words, status = ENDS[case]
    assert runs(source, *words).ret == status


def test_what_is_inconclusive_has_a_status_and_a_letter_and_is_a_failure_with_its_state_in_junit(runs):
    ran = runs(SWEEP, *FEW, "--slm-repeats=1", "--junitxml=out.xml")
    assert ran.ret == 10
    ran.lines.fnmatch_lines(["*.py .....U*", "*5 passed, 1 inconclusive*"])
    suite = ElementTree.parse(ran.folder / "out.xml").getroot()[0]
    assert suite.attrib["failures"] == "1"
    properties = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
    assert properties["slm_state"] == "inconclusive"


def test_an_expected_failure_or_a_fixture_does_not_swallow_what_is_inconclusive(runs):
    source = f"""{NOISY}
        @pytest.mark.slm
        @pytest.mark.xfail(raises=AssertionError, strict=True)
        def test_expected(): assert noisy

        @pytest.fixture
        def quick_enough(): assert noisy

        @pytest.mark.slm
        def test_fixture(quick_enough): raise AssertionError("its fixture was not inconclusive")
    """
    ran = runs(source, "--slm-simulate")
    assert (ran.ret, ran.counts) == (10, {"inconclusive": 2})


@pytest.mark.parametrize(("second", "status", "failed", "inconclusive"), [("True", 10, 0, 2), ("False", 1, 2, 1)])
def test_subtests_that_are_inconclusive_fail_no_run(runs, second, status, failed, inconclusive):
    pytest.importorskip("_pytest.subtests", reason="pytest has subtests from 9 on")
    source = f"""{NOISY}
        @pytest.mark.slm
        def test_it(subtests):
            with subtests.test(n=1):
                assert noisy
            with subtests.test(n=2):
                assert {second}
    """
    ran = runs(source, "--slm-simulate")
    assert (ran.ret, ran.counts.get("failed", 0), ran.counts["inconclusive"]) == (status, failed, inconclusive)
