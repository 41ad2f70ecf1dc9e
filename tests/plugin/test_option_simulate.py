"""--slm-simulate runs the same benchmarks on a simulated engine, and says so."""

import shutil
import sys

import pytest
from inside import ONE, SMALL, usage_error
from shipped import BENCHMARKS, put

PLATEAU = BENCHMARKS / "test_pareto_plateau.py"
FEW = ("-p", "no:cacheprovider", "--slm-engine-arg=b_half=300")  # by which throughput reaches no plateau
UNPROVED = "slmserve leaves out 3 tests: simulated numbers prove no claim of the papers (--slm-strict judges them)"


def test_points_and_claims_pass_and_the_summary_shouts_that_it_is_simulated(sweep):
    result = sweep()
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*SIMULATED*"])


def test_it_takes_no_lock_so_that_simulations_may_run_beside_each_other(sweep, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "locks"))
    (tmp_path / "locks").mkdir()
    sweep().assert_outcomes(passed=6)
    assert not list((tmp_path / "locks").glob("*.lock"))


def test_modes_exclude_each_other(sweep):
    assert "exclude each other" in usage_error(sweep("--slm-cpu"))


def test_without_a_mode_what_measures_is_skipped_with_the_reason(pytester):
    pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass
        def test_sweep(slm_sweep): raise AssertionError("must not run")
        @pytest.mark.slm(model="opt-125m")
        def test_marked(): raise AssertionError("must not run")
        def test_point(slm_point): raise AssertionError("must not run")
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(["*SKIPPED*measures: needs --slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint*"])


def test_with_a_mode_and_no_path_only_what_measures_runs(pytester):
    pytester.makepyfile("def test_plain(): raise AssertionError\ndef test_engine(slm_engine): assert slm_engine.launch")
    result = pytester.runpytest_inprocess("--slm-simulate")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(
        ["slmserve leaves out 1 test: without a path only tests that measure run (`pytest .` runs all)"]
    )


def test_a_project_that_measures_nothing_is_told_why_nothing_runs(pytester):
    pytester.makepyfile("def test_plain(): pass\ndef test_other(): pass")
    result = pytester.runpytest_inprocess("--slm-simulate", "-q")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(
        ["slmserve leaves out 2 tests: without a path only tests that measure run (`pytest .` runs all)"]
    )


def test_with_a_path_everything_in_it_runs(pytester):
    path = pytester.makepyfile("def test_plain(): pass\ndef test_engine(slm_engine): assert slm_engine.launch")
    pytester.runpytest_inprocess("--slm-simulate", path).assert_outcomes(passed=2)


# The claims of the papers


def test_the_whole_shipped_suite_is_green(pytester):
    """In a process of its own, as a user runs it: these modules may be imported here by other names."""
    result = pytester.runpytest_subprocess(
        BENCHMARKS, "--slm-simulate", "--slm-suite=all", "--rootdir=.", "-p", "no:cacheprovider"
    )
    assert result.ret == 0
    counts = result.parseoutcomes()
    assert counts["passed"] > 150 and counts["deselected"] > 50
    sentence = [line for line in result.outlines if line.startswith("slmserve leaves out")]
    assert sentence == [UNPROVED.replace(" 3 ", f" {counts['deselected']} ")], "once"


def test_its_claims_are_left_out_and_its_points_measured(pytester):
    result = pytester.runpytest_subprocess(PLATEAU, *SMALL, *FEW, "--slm-records=.slm/records.jsonl")
    assert result.ret == 0
    result.assert_outcomes(passed=5, deselected=5)
    result.stdout.fnmatch_lines([UNPROVED.replace(" 3 ", " 5 ")])
    again = pytester.run(sys.executable, "-m", "pytest_slmserve", "report", ".slm/records.jsonl")
    assert again.ret == 0, "as the run was"
    again.stdout.fnmatch_lines(["note: claims that no test of these runs judges are left out; --strict judges all"])
    again.stdout.no_fnmatch_line("throughput-plateau:*")
    strict = pytester.run(sys.executable, "-m", "pytest_slmserve", "report", ".slm/records.jsonl", "--strict")
    assert strict.ret == 1
    strict.stdout.fnmatch_lines(["throughput-plateau:*"])


def test_strict_judges_them(pytester):
    result = pytester.runpytest_subprocess(PLATEAU, *SMALL, *FEW, "--slm-strict")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*no plateau up to 256 in flight*"])
    result.stdout.no_fnmatch_line("slmserve leaves out*")


def test_what_is_arithmetic_is_judged(pytester):
    result = pytester.runpytest_subprocess(BENCHMARKS / "test_table_1.py", *ONE)
    result.assert_outcomes(passed=7, xfailed=4)


def test_a_report_judges_no_claim_that_no_test_judges(pytester):
    """A sweep of one's own, which has no plateau, is no statement on the papers."""
    pytester.makepyfile("def test_mine(slm_sweep): assert slm_sweep([1, 2, 4])")
    records = "--slm-records=r.jsonl"
    pytester.runpytest_subprocess(*ONE, records, "test_a_report_judges_no_claim_that_no_test_judges.py")
    report = pytester.run(sys.executable, "-m", "pytest_slmserve", "report", "r.jsonl")
    assert report.ret == 0
    report.stdout.fnmatch_lines(["note: claims that no test of these runs judges are left out; --strict judges all"])
    report.stdout.no_fnmatch_line("*verdict*")


def test_in_the_folder_of_a_checkout_they_are_left_out_too(pytester):
    shutil.copy(PLATEAU, pytester.mkdir("benchmarks"))
    result = pytester.runpytest_subprocess(*SMALL, *FEW, "benchmarks")
    assert result.ret == 0
    result.stdout.fnmatch_lines([UNPROVED])


def test_a_claim_in_a_file_of_one_s_own_is_judged(pytester):
    put(pytester.path, "test_pareto_plateau")
    result = pytester.runpytest_inprocess(*SMALL, *FEW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*no plateau up to 256 in flight*"])
