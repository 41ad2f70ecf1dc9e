"""What sensors and validity add to a run: what cannot be trusted is measured once more and fails, is shown, or is kept;
claims on sensors are judged by what they say, and are inconclusive where nothing is said or was not measured."""

from __future__ import annotations

import pytest
from inner_runs import QUIET
from inside import outcomes

from pytest_slmserve.archive.store import read

TESTS = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim):
        assert slm_claim()

    @pytest.mark.slm(claim="occupancy-below-a-saturated-kernel", needs="gpu")
    def test_underused(slm_claim):
        assert slm_claim()

    @pytest.mark.slm(claim="energy-per-token-falls-with-load", needs="gpu")
    def test_cheaper(slm_claim):
        assert slm_claim()
"""
FEW = ("--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=1,4,8,16", "--slm-window=2", "-v", *QUIET)
FEW = (*FEW, "--slm-input-len=64", "--slm-output-len=32", "--slm-report=tables", "--slm-budget=0")
LAW = ("t_inf=4000", "b_half=1.5", "noise=0.001")
POINTS = [f"test_point[opt-125m-{n}]" for n in (1, 4, 8, 16)]


@pytest.fixture(scope="module")
def run(inner):
    """Runs them with planted facts; `repeats` are those of each load."""
    inner.makepyfile(TESTS)

    def sensed(*facts, more=()):
        arguments = [f"--slm-engine-arg={each}" for each in (*LAW, *facts)]
        result = inner.runpytest_inprocess(*FEW, f"--slm-records={'-'.join(facts) or 'all'}.jsonl", *arguments, *more)
        made = read(inner.path / f"{'-'.join(facts) or 'all'}.jsonl").measurements
        result.repeats = [sum(m.load.concurrency == n for m in made) for n in (1, 4, 8, 16)]
        return result

    return sensed


def test_with_sensors_all_is_judged(run):
    result = run()
    assert result.ret == 0 and set(outcomes(result).values()) <= {"PASSED", "XFAIL"} and result.repeats == [2, 2, 2, 2]


def test_a_degraded_point_is_measured_once_more_shown_and_no_failure(run):
    result = run("lost_from=16")
    assert outcomes(result)[POINTS[-1]] == "PASSED" and result.repeats == [2, 2, 2, 3]
    result.stdout.fnmatch_lines(["*16 *degraded", "*degraded: concurrency 16: a sensor was lost*"])


def test_a_noisy_point_is_not_measured_again_and_is_shown(run):
    result = run("slow_clock_from=16")
    assert result.ret == 0 and outcomes(result)[POINTS[-1]] == "PASSED" and result.repeats == [2, 2, 2, 2]
    result.stdout.fnmatch_lines(["*16 *noisy", "noisy, kept: concurrency 16: *1600 MHz*"])
    result.stdout.no_fnmatch_line("*left out*")


def test_an_invalid_point_is_measured_once_more_and_fails(run):
    result = run("hot_from=16")
    found = outcomes(result)
    assert [found[name] for name in POINTS] == ["PASSED"] * 3 + ["FAILED"] and result.repeats == [2, 2, 2, 3]
    assert result.ret == pytest.ExitCode.TESTS_FAILED and found["test_plateau[opt-125m]"] == "INCONCLUSIVE"
    result.stdout.fnmatch_lines(["*0 of 3 measurements are valid, 2 are wanted: *", "*INVALID: concurrency 16*"])


@pytest.mark.parametrize(
    ("fact", "state", "ret"), [("sensors=false", "INCONCLUSIVE", 10), ("sm_occupancy=0.8", "PASSED", 0)]
)
def test_claims_on_sensors_are_judged_by_what_they_say(run, fact, state, ret):
    """That of the occupancy is expected to fail where it is high, so that is no failure."""
    result = run(fact)
    assert result.ret == ret and outcomes(result)["test_plateau[opt-125m]"] == "PASSED"
    assert outcomes(result)["test_cheaper[opt-125m]"] == state


def test_a_deselected_point_leaves_its_claim_inconclusive(run):
    result = run(more=("-k", "not 8", "--slm-records=deselected.jsonl"))
    assert result.ret == 10 and outcomes(result)["test_plateau[opt-125m]"] == "INCONCLUSIVE"
    result.stdout.fnmatch_lines(["*inconclusive*not measured at concurrency 8*"])
