"""A resumed run: what it reuses, what it measures, what is refused where nothing can be reused, and damaged lines.

What differs is told in tests/unit/plugin."""

import pytest
from inner_runs import FEW, SWEEP
from sealed_lines import reseal, resealed

from pytest_slmserve.archive.store import runs_of
from pytest_slmserve.plan import cases as costs

ONE = "--slm-concurrency=1 --slm-repeats=1 -k point"


@pytest.fixture(scope="module")
def resumed(runs):
    """A sweep with all its loads and repeats, where one of two loads, one repeat of each, has ended."""
    old = runs.anew(SWEEP, FEW, "--slm-concurrency=1,16 --slm-repeats=1")
    return runs.anew(SWEEP, FEW, "--slm-resume", folder=old.folder)


def test_resume_measures_only_missing_repeats(resumed, runs):
    assert resumed.counts == {"passed": 6} and len(resumed.measured()) == 10
    resumed.says("slmserve: * holds 2 measurements *", "2 measurements * 1 (1), opt-125m at 16 (1)")
    assert [run.header.resumes for run in runs_of(resumed.archive())] == [False, True]
    out = resumed.report()[1]
    line = next(line for line in out.splitlines() if "measured: " in line)
    assert line in resumed.out and "5 points, 2 repeats each, 2 launches" in line and "several runs" not in out

    def again(*words):
        return runs.anew(SWEEP, FEW, "--slm-resume", *words, folder=resumed.folder)

    same, plan, other = again(), again("--slm-plan"), again("--slm-window=3")
    assert same.counts == {"passed": 6} and " start " not in plan.out, "no engine"
    same.says("10 measurements were reused*opt-125m at 1 (2)*")
    plan.says("*test_point?opt-125m-16? (measures nothing)")
    other.says("slmserve: *window_s 0.25 there, 3.0 here", "*test_*")
    assert len(other.measured()) == 20, "those of the first two runs, and of this one"


def test_resume_skips_invalid_measurements(runs):
    words = f"{FEW} {ONE} --slm-engine-arg=preempt_from=1 --slm-resume"
    first = runs.anew(SWEEP, words)
    again = runs.anew(SWEEP, words, folder=first.folder)
    again.says("* 0 measurements for this run, and 2 that are not valid")
    assert len(again.measured()) == 4
    own = "def test_mine(slm_measure): assert slm_measure(concurrency=4, window_s=2).valid"
    first = runs.anew(own, FEW, "--slm-records=old.jsonl")
    ran = runs.anew(own, FEW, "--slm-resume=old.jsonl", folder=first.folder)
    ran.says("slmserve: * 0 measurements *, and 2 of engines *", "2 measurements were reused*")
    other = runs.anew(own, FEW, "--slm-resume=old.jsonl --slm-gpu-memory-utilization=0.5", folder=first.folder)
    other.refuses("gpu_memory_utilization 0.9 there, 0.5 here")


def test_resumed_archive_stays_unchanged(runs, monkeypatch):
    monkeypatch.setattr(costs, "repeat_estimate_s", lambda *_: 10.0)
    old = runs.anew(SWEEP, FEW, "--slm-concurrency=1,16 --slm-records=old.jsonl.gz")
    before = (old.folder / "old.jsonl.gz").read_bytes()

    def there(*words):
        return runs.anew(SWEEP, FEW, "--slm-resume=old.jsonl.gz", *words, folder=old.folder)

    there("--slm-plan --slm-concurrency=1,8,16").says(
        "*4 measurements*", "*opt-125m-8? (20 s)", "*opt-125m-16? (measures nothing)"
    )
    for words in ("--slm-plan", ""):
        refused = there("--slm-window=3", words)
        refused.refuses("old.jsonl.gz", "window_s 0.25 there, 3.0 here")
    assert refused.measured() == (), "before an engine starts"
    ran = there("--slm-concurrency=1,8,16")
    ran.says("*old.jsonl.gz*4 measurements*", "4 measurements*: opt-125m at 1 (2)*at 16 (2)")
    assert ran.loads() == [8, 8] and (ran.folder / "old.jsonl.gz").read_bytes() == before


NEWER = '{"kind":"session","format":99,"started":"2030-01-01","claims":{},"plan":{}}\n'
EMPTY = '{"kind":"session","format":3,"started":"","pytest_slmserve":null,"claims":{},"plan":{}}'


def test_unfit_results_file_is_refused(runs):
    ran = runs.anew(SWEEP, FEW)
    text = (ran.folder / ".slm/records.jsonl").read_text("utf-8")
    other = ran.folder / "h100.jsonl"
    other.write_text(text.replace('"gpu_name":"simulated"', '"gpu_name":"NVIDIA H100"'), "utf-8")
    reseal(other)
    (ran.folder / "new.jsonl").write_text(NEWER, "utf-8")
    (ran.folder / "empty.jsonl").write_text(resealed(EMPTY) + "\n", "utf-8")
    for words, fact in (
        ("--slm-resume=h100.jsonl", "gpu_name NVIDIA H100 there, simulated here"),
        ("--slm-resume --slm-records=new.jsonl", "newer release"), ("--slm-resume=new.jsonl", "newer release"),
        ("--slm-resume=none.jsonl", "none.jsonl"), ("--slm-resume=.", "."), ("--slm-resume=empty.jsonl", "empty.jsonl"),
    ):  # fmt: skip
        runs.anew({}, FEW, ONE, words, folder=ran.folder).refuses(fact)
    lines = text.splitlines(keepends=True)
    (ran.folder / ".slm/records.jsonl").write_text("".join([*lines[:4], lines[4][:200] + "\n", *lines[5:]]))
    runs.anew(SWEEP, FEW, "--slm-resume", folder=ran.folder).refuses("line 5", "skip-damaged")
    again = runs.anew(SWEEP, FEW, "--slm-resume -o slm_skip_damaged=1", folder=ran.folder)
    assert again.counts == {"passed": 6}
    again.says("*note: *line 5*", "*9 measurements were reused*")
