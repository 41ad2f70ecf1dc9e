"""--slm-strict asserts the claims as the papers make them, also where they are known to fail."""

import pytest

TABLE = """
    import pytest

    @pytest.mark.slm(claim="table-1-batch-fits", models=("opt-1.3b", "opt-2.7b"))
    def test_fits(slm_claim):
        assert slm_claim()
"""


@pytest.fixture
def table(pytester):
    pytester.makepyfile(TABLE)
    return lambda *args: pytester.runpytest_inprocess("--slm-simulate", *args)


def test_a_claim_known_to_fail_is_an_expected_failure_with_its_evidence(table):
    result = table("-rx")
    assert result.ret == 0
    result.assert_outcomes(passed=1, xfailed=1)
    result.stdout.fnmatch_lines(["*XFAIL*opt-1.3b*238 requests*the paper has 256*"])


def test_strict_makes_it_fail(table):
    result = table("--slm-strict")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1)
