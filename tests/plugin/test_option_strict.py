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


@pytest.mark.parametrize("gain", [1.05, 1.5])
def test_what_may_go_either_way_is_no_failure_and_strict_judges_it(pytester, gain):
    """Throughput from 128 to 256 in flight of a simulated engine whose law is told."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(claim="marginal-after-128", models=["opt-1.3b"])
        def test_little(slm_claim):
            assert slm_claim()

        def test_point(slm_point):
            assert slm_point.measure()
        """
    )
    # T(256)/T(128) = 2 (128 + b)/(256 + b)
    b_half = (gain - 1) * 256 / (2 - gain)
    law = ("--slm-engine-arg=t_inf=10000.0", f"--slm-engine-arg=b_half={b_half}", "--slm-concurrency=64,128,256")
    words = ("--slm-simulate", "--slm-models=opt-1.3b", "--slm-budget=0", *law)
    assert pytester.runpytest_inprocess(*words, "--slm-records=a.jsonl").ret == 0
    strict = pytester.runpytest_inprocess(*words, "--slm-records=b.jsonl", "--slm-strict")
    assert strict.ret == (0 if gain < 1.1 else 1)
