"""0 all as expected, 1 something fails, 10 nothing fails but something is inconclusive, 4 wrong usage.

3, a gate that was broken off, is among the tests of the gate."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

FAILS = "--slm-engine-arg=b_half=300"
INCONCLUSIVE = "--slm-repeats=1"


def test_all_as_expected(sweep):
    assert sweep().ret == 0


def test_a_claim_that_fails(sweep):
    result = sweep(FAILS)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*no plateau up to concurrency 256*"])


def test_nothing_fails_but_something_is_inconclusive(sweep):
    result = sweep(INCONCLUSIVE)
    assert result.ret == 10
    result.stdout.fnmatch_lines(["*.py .....U*", "*5 passed, 1 inconclusive*"])


def test_wrong_usage(sweep):
    assert sweep("--slm-concurrency=2,1").ret == 4


def test_an_expected_failure_does_not_swallow_what_is_inconclusive(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_slmserve import State, Verdict

        @pytest.mark.slm
        @pytest.mark.xfail(raises=AssertionError, strict=True)
        def test_it():
            assert Verdict("claim", "model", State.INCONCLUSIVE, "too noisy")
        """
    )
    result = pytester.runpytest_inprocess("--slm-simulate")
    assert result.ret == 10
    result.assert_outcomes(xfailed=0)


def test_a_fixture_whose_verdict_is_inconclusive_makes_its_test_inconclusive(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_slmserve import State, Verdict

        @pytest.fixture
        def quick_enough():
            assert Verdict("claim", "model", State.INCONCLUSIVE, "too noisy")

        @pytest.mark.slm
        def test_it(quick_enough):
            raise AssertionError("its fixture was not inconclusive")
        """
    )
    result = pytester.runpytest_inprocess("--slm-simulate")
    assert (result.ret, result.parseoutcomes()) == (10, {"inconclusive": 1})


@pytest.mark.parametrize(("second", "status", "failed", "inconclusive"), [("True", 10, 0, 2), ("False", 1, 2, 1)])
def test_subtests_that_are_inconclusive_fail_no_run(pytester, second, status, failed, inconclusive):
    pytest.importorskip("_pytest.subtests", reason="pytest has subtests from 9 on")
    pytester.makepyfile(f"""
        import pytest
        from pytest_slmserve import State, Verdict

        @pytest.mark.slm
        def test_it(subtests):
            with subtests.test(n=1):
                assert Verdict("claim", "model", State.INCONCLUSIVE, "too noisy")
            with subtests.test(n=2):
                assert {second}
    """)
    result = pytester.runpytest_inprocess("--slm-simulate")
    counts = result.parseoutcomes()
    assert (result.ret, counts.get("failed", 0), counts["inconclusive"]) == (status, failed, inconclusive)


def test_junit_shows_an_inconclusive_claim_as_a_failure_with_its_state(sweep, pytester):
    sweep(INCONCLUSIVE, "--junitxml=out.xml")
    suite = ElementTree.parse(pytester.path / "out.xml").getroot()[0]
    assert suite.attrib["failures"] == "1"
    properties = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
    assert properties["slm_state"] == "inconclusive"
