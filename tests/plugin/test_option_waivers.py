"""--slm-waivers is a file of known regressions, each with an owner, a reason and a last day."""

import json

import pytest
from inside import usage_error

SLOWER = ("--slm-baseline-engine-arg=t_inf=10000", "--slm-candidate-engine-arg=t_inf=9000")
ROW = {"model": "opt-125m", "device": "*", "owner": "Ada", "reason": "fixed in 0.27", "until": "2999-12-31"}


@pytest.fixture
def waive(pytester, gate):
    """Runs a gate of a slower candidate with a waiver for each endpoint named."""

    def run(*endpoints, **other):
        rows = [{**ROW, "endpoint": endpoint, **other} for endpoint in endpoints]
        (pytester.path / "known.json").write_text(json.dumps(rows), "utf-8")
        return gate(*SLOWER, "--slm-waivers=known.json", "-rxX")

    return run


def test_a_waived_regression_is_an_expected_failure_that_names_its_owner(waive):
    result = waive("throughput", "latency", "energy")
    result.assert_outcomes(passed=3, xfailed=3)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["XFAIL *throughput of opt-125m on * is waived until 2999-12-31 by Ada: fixed in 0.27*"]
    )


def test_what_is_not_waived_fails(waive):
    result = waive("throughput")
    result.assert_outcomes(passed=3, xfailed=1, failed=2)
    assert result.ret == 1


def test_an_expired_waiver_excuses_nothing_and_says_whose_it_was(waive):
    result = waive("throughput", until="2020-01-31")
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines(["*the waiver of throughput of opt-125m on * expired on 2020-01-31; its owner is Ada*"])


def test_a_waiver_of_another_model_is_none(waive):
    waive("throughput", "latency", "energy", model="opt-13b").assert_outcomes(passed=3, failed=3)


def test_what_no_gate_compares_is_refused(waive):
    assert "known.json: no gate compares 'requests_per_s'" in usage_error(waive("requests_per_s"))


def test_a_file_that_is_not_there_is_an_error_before_anything_starts(gate):
    assert "nowhere.json" in usage_error(gate("--slm-waivers=nowhere.json"))


def test_it_says_nothing_without_a_gate(pytester):
    assert "--slm-waivers says what a gate" in usage_error(
        pytester.runpytest_inprocess("--slm-simulate", "--slm-waivers=a")
    )
