"""A resumed run: what it reuses, what it measures, what differs where nothing is reused, and damaged lines."""

from __future__ import annotations

import pytest
from inner_runs import FEW, QUIET
from inside import SWEEP, usage_error
from sealed_lines import reseal, resealed

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import runs_of
from pytest_slmserve.plan import cases as costs

ONE = ("--slm-concurrency=1", "--slm-repeats=1")


@pytest.fixture(scope="module")
def old(runs):
    """A sweep of two loads, one repeat of each."""
    return runs.anew(SWEEP, *FEW, "--slm-concurrency=1,16", "--slm-repeats=1")


@pytest.fixture(scope="module")
def resumed(runs, old):
    """The same sweep with all its loads and repeats, where the other ended."""
    return runs.anew(SWEEP, *FEW, "--slm-resume", folder=old.folder)


@pytest.fixture
def small(pytester, kept):
    pytester.makepyfile(SWEEP)
    return lambda *words: pytester.runpytest_inprocess(*FEW, *words, *QUIET)


def test_only_what_is_missing_is_measured(resumed):
    assert resumed.counts == {"passed": 6} and len(resumed.measured()) == 10
    resumed.lines.fnmatch_lines(["slmserve: * holds 2 measurements *", "2 measurements * 1 (1), opt-125m at 16 (1)"])


def test_a_run_that_resumes_is_reported_with_what_it_resumed(resumed, capsys):
    assert [run.header.resumes for run in runs_of(resumed.archive())] == [False, True]
    capsys.readouterr()
    main(["report", str(resumed.folder / ".slm/records.jsonl")])
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "measured: " in line)
    assert line in resumed.out and "5 points, 2 repeats each, 2 launches" in line and "several runs" not in out


def test_a_further_run_measures_nothing_again_unless_it_asks_another_question(runs, resumed):
    again = runs.anew(SWEEP, *FEW, "--slm-resume", folder=resumed.folder)
    assert again.counts == {"passed": 6} and len(again.measured()) == 10
    again.lines.fnmatch_lines(["10 measurements were reused*opt-125m at 1 (2)*"])
    other = runs.anew(SWEEP, *FEW, "--slm-resume", "--slm-window=3", folder=resumed.folder)
    other.lines.fnmatch_lines(["slmserve: *window_s 0.5 there, 3.0 here", "*test_*"])
    assert len(other.measured()) == 20


def test_invalid_measurements_are_not_reused(runs):
    words = (*FEW, *ONE, "--slm-engine-arg=preempt_from=1", "-k", "test_point")
    first = runs.anew(SWEEP, *words)
    before = len(first.measured())
    again = runs.anew(SWEEP, *words, "--slm-resume", folder=first.folder)
    again.lines.fnmatch_lines([f"* 0 measurements for this run, and {before} that are not valid"])
    assert len(again.measured()) > before


def test_the_records_of_another_run_are_reused_and_stay_as_they_are(small, archive, pytester):
    assert small("--slm-resume", *ONE, "-k", "point").ret == 0, "where there is nothing to resume"
    (pytester.path / ".slm/records.jsonl").unlink()
    small("--slm-concurrency=1,16", "--slm-records=old.jsonl.gz")
    before = (pytester.path / "old.jsonl.gz").read_bytes()
    result = small("--slm-resume", "old.jsonl.gz", "--slm-concurrency=1,8,16")
    result.stdout.fnmatch_lines(["*old.jsonl.gz*4 measurements*", "4 measurements*: opt-125m at 1 (2)*at 16 (2)"])
    assert [m.load.concurrency for m in archive().measurements] == [8, 8]
    assert (pytester.path / "old.jsonl.gz").read_bytes() == before


DIFFERENT = {
    "lengths": ("--slm-input-len=64", "64/8 tokens there, 16/8 here"),
    "seed": ("--override-ini=slm_seed=1", "seed 1 there, 0 here"),
    "model": ("--slm-models=opt-350m", "opt-350m there, opt-125m here"),
    "memory": ("--slm-gpu-memory-utilization=0.5", "gpu_memory_utilization 0.5 there, 0.9 here"),
    "prefix cache": ("--override-ini=slm_allow_prefix_cache=1", "allow_prefix_cache True there, False here"),
    "ramp-up": ("--slm-ramp-up=burst", "ramp_up burst there, staggered here"),
    "argument": ("--slm-engine-arg=power_w=1", "('power_w', 1)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_records_that_answer_nothing_are_refused_with_what_differs_before_an_engine_starts(runs, case):
    there, says = DIFFERENT[case]
    there = runs.anew(SWEEP, *FEW, *ONE, there, "--slm-records=old.jsonl", "-k", "point")
    ran = runs.anew(SWEEP, *FEW, *ONE, "--slm-resume=old.jsonl", folder=there.folder)
    assert ran.ret == pytest.ExitCode.USAGE_ERROR and "old.jsonl" in ran.err
    assert says in ran.err and ran.measured() == ()


def test_records_of_another_kind_of_gpu_or_of_a_newer_release_are_refused(small, pytester):
    small(*ONE, "--slm-records=old.jsonl", "-k", "point")
    path, new = pytester.path / "old.jsonl", pytester.path / "new.jsonl"
    path.write_text(path.read_text("utf-8").replace('"gpu_name":"simulated"', '"gpu_name":"NVIDIA H100"'), "utf-8")
    reseal(path)
    assert "gpu_name NVIDIA H100 there, simulated here" in usage_error(small("--slm-resume=old.jsonl"))
    new.write_text('{"kind":"session","format":99,"started":"2030-01-01","claims":{},"plan":{}}\n')
    for words in (["--slm-resume", "--slm-records=new.jsonl"], ["--slm-resume", "new.jsonl"]):
        assert "newer release" in usage_error(small(*words))


EMPTY = '{"kind":"session","format":3,"started":"","pytest_slmserve":null,"claims":{},"plan":{}}'


@pytest.mark.parametrize("name", ["none.jsonl", ".", "empty.jsonl"])
def test_what_is_no_archive_or_has_no_measurement_cannot_be_resumed(small, pytester, name):
    (pytester.path / "empty.jsonl").write_text(resealed(EMPTY) + "\n", "utf-8")
    assert name in usage_error(small(f"--slm-resume={name}"))


def test_a_plan_prices_what_is_missing_and_refuses_what_a_run_would(small, pytester, monkeypatch):
    monkeypatch.setattr(costs, "repeat_estimate_s", lambda *_: 10.0)
    small("--slm-concurrency=1,16", "--slm-records=old.jsonl")
    result = small("--slm-plan", "--slm-resume=old.jsonl", "--slm-concurrency=1,8,16")
    result.stdout.fnmatch_lines(["*4 measurements*", "*opt-125m-8? (20 s)", "*opt-125m-16? (measures nothing)"])
    assert not (pytester.path / ".slm").exists()
    assert "old.jsonl" in usage_error(small("--slm-plan", "--slm-resume=old.jsonl", "--slm-window=3"))


def test_of_a_test_of_ones_own_only_the_engine_is_known_beforehand(runs):
    own = "def test_mine(slm_measure): assert slm_measure(concurrency=4, window_s=2).valid"
    words = (*FEW, "--slm-records=old.jsonl")
    first = runs.anew(own, *words)
    ran = runs.anew(own, *FEW, "--slm-resume=old.jsonl", folder=first.folder)
    ran.lines.fnmatch_lines(["slmserve: * 0 measurements *, and 2 of engines *", "2 measurements were reused*"])
    other = runs.anew(own, *FEW, "--slm-resume=old.jsonl", "--slm-gpu-memory-utilization=0.5", folder=first.folder)
    assert other.ret == 4 and "gpu_memory_utilization 0.9 there, 0.5 here" in other.err


def test_replicas_are_resumed_and_others_are_told_apart(gain, archive):
    words = ("--slm-replicas=2", "--slm-sharing=mps", "--slm-concurrency=12", "--slm-window=0.5", *QUIET)
    short = ("--slm-input-len=16", "--slm-output-len=8", "-k", "test_point")
    gain(*words, *short, "--slm-records=old.jsonl")
    result = gain(*words, *short, "--slm-resume=old.jsonl")
    assert archive().measurements == ()
    result.stdout.fnmatch_lines(
        ["slmserve: old.jsonl *", "* measurements were reused from old.jsonl: *, 2 x opt-125m *"]
    )
    other = gain(*words, "--slm-input-len=64", "--slm-output-len=32", "--slm-resume=old.jsonl", "-k", "test_point")
    assert "16/8 tokens there, 64/32 here" in usage_error(other)


def test_a_damaged_line_is_named_and_the_others_are_used_if_that_is_said(small, pytester):
    small()
    path = pytester.path / ".slm/records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][:200] + "\n", *lines[5:]]))
    text = usage_error(small("--slm-resume"))
    assert "line 5" in text and "skip-damaged" in text
    result = small("--slm-resume", "--override-ini=slm_skip_damaged=1")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*note: *line 5*", "*9 measurements were reused*"])
