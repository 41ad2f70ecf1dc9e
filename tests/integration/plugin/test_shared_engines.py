"""Several engines on one device: the fixtures, the shipped benchmark, resume, plan and report."""

from __future__ import annotations

from inside import ONE

from pytest_slmserve.__main__ import main


def test_the_shipped_benchmark_measures_and_judges(gain, archive, capsys):
    result = gain("--slm-replicas=2,3", "--slm-repeats=4", "-v")
    # a simulated device gains by MPS, as planted, and loses by time slicing: both read their own weights
    result.assert_outcomes(passed=1 + 4 + 1 + 3, failed=3, skipped=4, xfailed=2)
    result.stdout.fnmatch_lines_random(
        [f"*replicas_{what}[[]opt-125m-time-slicing] FAILED*" for what in ("pay", "answer_sooner", "keep_the_tail")]
    )
    measured = archive().measurements
    assert len(measured) == 4 * (2 + 2 * (2 + 3)), (
        "one alone under two loads, two ways of two and three, four times each"
    )
    several = [m for m in measured if m.replica and m.replica.count > 1]
    parts = {(m.replica.sharing, m.replica.count, m.load.concurrency) for m in several}
    assert parts == {(how, n, 384 // n) for how in ("time-slicing", "mps") for n in (2, 3)}
    assert {m.load.concurrency for m in measured if m not in several} == {384, 96}
    shares = {len({m.spec.kv_cache_bytes for m in measured if m.replica and m.replica.count == n}) for n in (2, 3)}
    assert shares == {1}, "replicas are alike"


def test_the_report_has_a_table_and_the_archive_gives_it_again(gain, capsys, kept):
    text = gain().stdout.str()
    rows = [line.split() for line in text.splitlines() if " x opt-125m " in line or " alone " in line]
    assert [row[:4] for row in rows[:3]] == [  # below them the same with what the sensors saw
        ["opt-125m", "alone", "384", rows[0][3]],
        ["2", "x", "opt-125m", "time-slicing"],
        ["2", "x", "opt-125m", "mps"],
    ]
    assert "not measured, though planned" not in text, "the claims of replicas need no sweep"
    capsys.readouterr()
    main(["report", ".slm/records.jsonl"])
    again = capsys.readouterr().out
    for piece in ("Replicas on one device: simulated", "2 replicas under MPS serve", *(" ".join(row) for row in rows)):
        assert piece in " ".join(again.split()) or piece in again


def test_what_is_known_is_not_measured_again(gain, archive):
    gain()
    before = len(archive().measurements)
    again = gain("--slm-resume", "--slm-replicas=2,3")
    assert len(archive().measurements) == before + 2 * 2 * 3, "only three replicas were new"
    holds = f"slmserve: .slm/records.jsonl holds {before} measurements for this run"
    again.stdout.fnmatch_lines([holds, f"{before} measurements were reused from *"])


def test_a_plan_tells_starts_and_prices(gain):
    text = gain("--slm-plan", "--slm-sharing=time-slicing").stdout.str()
    assert "start 2 x opt-125m, by time-slicing" in text
    assert (
        "test_point_of_replicas[opt-125m-384-x2-time-slicing]" in text
        and "test_replicas_pay[opt-125m-mps] (measures nothing)" in text
    )


OWN = """
import pytest

def test_two(slm_replicas, slm_measure):
    two, alone = slm_replicas(2, sharing="mps"), slm_measure(96)
    shared = two.measure(96)
    assert shared.valid and len(shared.repeats) == 2 and shared.loads == (48, 48)
    assert shared.output_tokens_per_s > alone.output_tokens_per_s
    assert repr(two) == "2 replicas (2 x opt-125m, by mps)"

def test_pair(slm_replicas):
    pair = slm_replicas(models=["opt-125m", "opt-1.3b"]).measure(64, repeats=1, ramp_up="burst")
    assert pair.valid and pair.model is None and pair.models == ("opt-125m", "opt-1.3b")
    assert len(pair.each_tokens_per_s) == 2 and pair.ramp_up == "burst"

def test_uneven(slm_replicas):
    slm_replicas(3).measure(64)

def test_one(slm_replicas):
    slm_replicas(1)

def test_pinned(slm_replicas):
    assert slm_replicas(2, pinned=True).measure(8).pinned
"""


def test_replicas_of_a_users_own_test(pytester):
    pytester.makepyfile(OWN)
    result = pytester.runpytest_inprocess(*ONE)
    result.assert_outcomes(passed=3, failed=2)
    lines = (
        "64 concurrent requests cannot be divided evenly among 3 replicas",
        "try: a multiple, such as 96, 192 or 384",
    )
    result.stdout.fnmatch_lines([f"*{line}*" for line in lines])
    result.stdout.fnmatch_lines(["*1 replica is an engine like any other*", "*slm_measure*"])
    result.stdout.fnmatch_lines(["opt-125m + opt-1.3b *"])


def test_two_models_are_measured_where_both_are_chosen(gain, archive):
    result = gain("--slm-models=opt-125m,opt-1.3b", "-k", "two_models or model_alone")
    result.assert_outcomes(passed=4)
    models = {tuple(sorted({m.spec.model for m in archive().measurements if m.replica}))}
    assert models == {("opt-1.3b", "opt-125m")}
    result.stdout.fnmatch_lines(["opt-125m + opt-1.3b, mps: *times what serving one after the other would give*"])
