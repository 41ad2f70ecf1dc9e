"""--slm-resume reuses the archive's valid measurements of the same key."""

from inside import usage_error


def test_a_second_run_measures_nothing_again(sweep, archive):
    sweep()
    result = sweep("--slm-resume")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*10 measurements were reused from .slm/records.jsonl*"])
    assert len(archive().measurements) == 10


def test_only_what_is_missing_is_measured(sweep, archive):
    sweep("--slm-batches=1,16", "--slm-repeats=1")
    sweep("--slm-resume").assert_outcomes(passed=6)
    assert len(archive().measurements) == 10


def test_another_question_is_measured_anew(sweep, archive):
    sweep()
    sweep("--slm-resume", "--slm-window=3")
    assert len(archive().measurements) == 20


def test_invalid_measurements_are_not_reused(sweep, archive):
    sweep("--slm-engine-arg=preempt_from=1", "--slm-batches=1,2")
    before = len(archive().measurements)
    sweep("--slm-engine-arg=preempt_from=1", "--slm-batches=1,2", "--slm-resume")
    assert len(archive().measurements) > before


def test_without_an_archive_there_is_nothing_to_resume(sweep):
    sweep("--slm-resume").assert_outcomes(passed=6)


def test_a_newer_archive_is_refused(sweep, pytester):
    path = pytester.path / "new.jsonl"
    path.write_text('{"kind":"session","format":99,"started":"2030-01-01","claims":{},"plan":{}}\n')
    assert "newer release" in usage_error(sweep("--slm-resume", "--slm-records=new.jsonl"))
