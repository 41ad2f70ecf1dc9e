"""Options of a resumed run: which measurements are reused, and what happens to damaged lines."""

from __future__ import annotations

import pytest
from inside import usage_error
from sealed_lines import reseal, resealed

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import runs_of
from pytest_slmserve.plan import cases as costs

# resume


def test_a_second_run_measures_nothing_again(sweep, archive):
    sweep()
    result = sweep("--slm-resume")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(
        [
            "slmserve: .slm/records.jsonl holds 10 measurements for this run",
            "*10 measurements were reused from .slm/records.jsonl: opt-125m at 1 (2), opt-125m at 16 (2)*",
        ]
    )
    assert len(archive().measurements) == 10


def test_only_what_is_missing_is_measured(sweep, archive):
    sweep("--slm-concurrency=1,16", "--slm-repeats=1")
    result = sweep("--slm-resume")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["2 measurements were reused from *: opt-125m at 1 (1), opt-125m at 16 (1)"])
    assert len(archive().measurements) == 10


def test_a_run_that_resumes_is_reported_with_what_it_resumed(sweep, archive, pytester, capsys):
    sweep("--slm-concurrency=1,16", "--slm-repeats=1")
    text = sweep("--slm-resume").stdout.str()
    assert [run.header.resumes for run in runs_of(archive())] == [False, True]
    capsys.readouterr()
    main(["report", str(pytester.path / ".slm/records.jsonl")])
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "measured: " in line)
    assert line in text and "5 points, 2 repeats each, 2 launches" in line and "several runs" not in out


def test_another_question_is_measured_anew_and_what_differs_is_said_beforehand(sweep, archive):
    sweep()
    result = sweep("--slm-resume", "--slm-window=3")
    result.stdout.fnmatch_lines(
        [
            "slmserve: nothing is resumed: .slm/records.jsonl answers nothing of this run: "
            "window_s 1.0 there, 3.0 here",
            "*test_*",
        ]
    )
    assert len(archive().measurements) == 20


def test_invalid_measurements_are_not_reused(sweep, archive):
    sweep("--slm-engine-arg=preempt_from=1", "--slm-concurrency=1,2")
    before = len(archive().measurements)
    result = sweep("--slm-engine-arg=preempt_from=1", "--slm-concurrency=1,2", "--slm-resume")
    result.stdout.fnmatch_lines([f"*holds 0 measurements for this run, and {before} that are not valid"])
    assert len(archive().measurements) > before


def test_without_an_archive_there_is_nothing_to_resume(sweep):
    sweep("--slm-resume").assert_outcomes(passed=6)


def test_a_newer_archive_is_refused(sweep, pytester):
    path = pytester.path / "new.jsonl"
    path.write_text('{"kind":"session","format":99,"started":"2030-01-01","claims":{},"plan":{}}\n')
    assert "newer release" in usage_error(sweep("--slm-resume", "--slm-records=new.jsonl"))
    assert "newer release" in usage_error(sweep("--slm-resume", "new.jsonl"))


def test_the_records_of_another_run_are_reused_and_stay_as_they_are(sweep, archive, pytester):
    sweep("--slm-concurrency=1,16", "--slm-records=old.jsonl.gz")
    before = (pytester.path / "old.jsonl.gz").read_bytes()
    result = sweep("--slm-resume", "old.jsonl.gz", "--slm-concurrency=1,16,64")
    result.stdout.fnmatch_lines(
        [
            "slmserve: old.jsonl.gz holds 4 measurements for this run",
            "4 measurements were reused from old.jsonl.gz: opt-125m at 1 (2), opt-125m at 16 (2)",
        ]
    )
    assert [m.load.concurrency for m in archive().measurements] == [64, 64]
    assert (pytester.path / "old.jsonl.gz").read_bytes() == before


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ("--slm-input-len=64", "requests of 64/256 tokens there, 512/256 here"),
        ("--override-ini=slm_seed=1", "seed 1 there, 0 here; other requests (seed 1 there, 0 here)"),
        ("--slm-models=opt-350m", "model opt-350m there, opt-125m here"),
        ("--slm-gpu-memory-utilization=0.5", "gpu_memory_utilization 0.5 there, 0.9 here"),
        ("--override-ini=slm_allow_prefix_cache=1", "allow_prefix_cache True there, False here"),
        ("--slm-ramp-up=burst", "ramp_up burst there, staggered here"),
        ("--slm-engine-arg=t_inf=1", "extra (('t_inf', 1),) there, () here"),
    ],
)
def test_records_that_answer_nothing_are_refused_with_what_differs_before_an_engine_starts(sweep, archive, there, says):
    sweep(there, "--slm-concurrency=1", "--slm-repeats=1", "--slm-records=old.jsonl")
    text = usage_error(sweep("--slm-resume=old.jsonl", "--slm-concurrency=1"))
    assert "--slm-resume: old.jsonl answers nothing of this run: " in text and says in text
    assert "try: the options of the run that wrote it" in text
    assert archive().measurements == ()


def test_records_of_another_kind_of_gpu_are_refused(sweep, pytester):
    sweep("--slm-concurrency=1", "--slm-repeats=1", "--slm-records=old.jsonl")
    path = pytester.path / "old.jsonl"
    path.write_text(path.read_text("utf-8").replace('"gpu_name":"simulated"', '"gpu_name":"NVIDIA H100"'), "utf-8")
    reseal(path)
    assert "gpu_name NVIDIA H100 there, simulated here" in usage_error(sweep("--slm-resume=old.jsonl"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--slm-resume=none.jsonl",), "no archive is at none.jsonl"),
        (("--slm-resume", "test_it.py"), "a path of tests has to stand before a --slm-resume without one"),
        (("--slm-resume=.",), "no archive is at ."),
        (("--slm-resume=old.jsonl",), "old.jsonl holds no measurement"),
        (("--slm-resume=old.jsonl", "--slm-gate"), "--slm-gate: a gate stays in one archive"),
    ],
)
def test_what_cannot_be_resumed_is_one_sentence(sweep, pytester, given, says):
    (pytester.path / "old.jsonl").write_text(
        resealed('{"kind":"session","format":3,"started":"","pytest_slmserve":null,"claims":{},"plan":{}}') + "\n",
        "utf-8",
    )
    assert says in usage_error(sweep(*given))


def test_a_plan_prices_what_is_missing_and_refuses_what_a_run_would(sweep, pytester, monkeypatch):
    monkeypatch.setattr(costs, "repeat_estimate_s", lambda *_: 10.0)
    sweep("--slm-concurrency=1,16", "--slm-records=old.jsonl")
    result = sweep("--slm-plan", "--slm-resume=old.jsonl", "--slm-concurrency=1,16,64")
    result.stdout.fnmatch_lines(
        [
            "slmserve: old.jsonl holds 4 measurements for this run",
            "*test_point?opt-125m-16? (measures nothing)",
            "*test_point?opt-125m-64? (20 s)",
        ]
    )
    assert not (pytester.path / ".slm").exists()
    assert "answers nothing" in usage_error(sweep("--slm-plan", "--slm-resume=old.jsonl", "--slm-window=3"))


OWN = """
    def test_mine(slm_measure):
        assert slm_measure(concurrency=4, window_s=2).valid
"""


def test_of_a_test_of_ones_own_only_the_engine_is_known_beforehand(pytester):
    pytester.makepyfile(OWN)
    words = ("--slm-simulate", "--slm-models=opt-125m", "-p", "no:cacheprovider")

    def run(*more):
        return pytester.runpytest_inprocess(*words, *more)

    run("--slm-records=old.jsonl").assert_outcomes(passed=1)
    run("--slm-resume=old.jsonl").stdout.fnmatch_lines(
        [
            "slmserve: old.jsonl holds 0 measurements for this run, and 2 of engines that its own tests use",
            "2 measurements were reused from old.jsonl",
        ]
    )
    assert "gpu_memory_utilization 0.9 there, 0.5 here" in usage_error(
        run("--slm-resume=old.jsonl", "--slm-gpu-memory-utilization=0.5")
    )


def test_replicas_are_resumed_and_others_are_told_apart(gain, archive):
    words = ("--slm-replicas=2", "--slm-sharing=mps")
    gain(*words, "--slm-records=old.jsonl")
    result = gain(*words, "--slm-resume=old.jsonl")
    assert archive().measurements == ()
    result.stdout.fnmatch_lines(
        [
            "slmserve: old.jsonl holds 8 measurements for this run",
            "8 measurements were reused from old.jsonl: *, 2 x opt-125m at 192 (4)",
        ]
    )
    points = ("-k", "test_point", "--slm-resume=old.jsonl", "--slm-input-len=64", "--slm-output-len=32")
    assert "requests of 512/256 tokens there, 64/32 here" in usage_error(gain(*words, *points))


# skip_damaged


@pytest.fixture
def damaged(sweep, pytester, kept):
    sweep()
    path = pytester.path / ".slm/records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[4] = lines[4][:200] + "\n"
    path.write_text("".join(lines))


def test_a_damaged_line_is_named(sweep, damaged):
    text = usage_error(sweep("--slm-resume"))
    assert "line 5" in text
    assert "skip-damaged" in text


def test_the_others_are_used(sweep, damaged):
    result = sweep("--slm-resume", "--override-ini=slm_skip_damaged=1")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*note: *line 5*", "*9 measurements were reused*"])
