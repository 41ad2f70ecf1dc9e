"""The shipped benchmark of several engines on one device: what it measures and judges, its table, plan and resume."""

from __future__ import annotations

import pytest
from inner_runs import QUIET
from inside import ONE
from shipped import put

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read

LAW = ("--slm-concurrency=96", "--slm-engine-arg=t_inf=20000", "--slm-engine-arg=b_half=10", "--slm-output-len=64")
RECORDS = ".slm/records.jsonl"


@pytest.fixture(scope="module")
def gain(inner):
    put(inner.path, "test_replication_gain")
    return lambda *args: inner.runpytest_inprocess(*ONE, *QUIET, *LAW, *args)


@pytest.fixture(scope="module")
def first(gain, inner):
    """Two and three replicas, each way, four times; and what was measured."""
    result = gain("--slm-replicas=2,3", "--slm-repeats=4", "-v")
    result.measured = read(inner.path / RECORDS).measurements
    return result


def test_the_shipped_benchmark_measures_and_judges(first):
    """A simulated device gains by MPS, as planted, and loses by time slicing: both read their own weights."""
    failing = [
        f"*replicas_{what}[[]opt-125m-time-slicing] FAILED*" for what in ("pay", "answer_sooner", "keep_the_tail")
    ]
    first.stdout.fnmatch_lines_random(failing)
    assert first.ret == 1 and first.parseoutcomes()["failed"] == 3
    several = [m for m in first.measured if m.replica and m.replica.count > 1]
    parts = {(m.replica.sharing, m.replica.count, m.load.concurrency) for m in several}
    assert parts == {(how, n, 96 // n) for how in ("time-slicing", "mps") for n in (2, 3)}
    assert len(several) == 4 * 2 * (2 + 3) and {m.load.concurrency for m in first.measured if m not in several} >= {96}
    shares = {len({m.spec.kv_cache_bytes for m in several if m.replica.count == n}) for n in (2, 3)}
    assert shares == {1}, "replicas are alike"


def test_the_report_has_a_table_and_the_archive_gives_it_again(first, inner, monkeypatch, capsys):
    lines = first.outlines
    rows = [
        " ".join(line.split())
        for line in lines
        if " x opt-125m " in line or "opt-125m alone " in " ".join(line.split())
    ]
    assert any(row.startswith("opt-125m alone 96 ") for row in rows)
    assert {"time-slicing", "mps"} <= {row.split()[3] for row in rows if row.startswith("2 x opt-125m")}
    assert "not measured, though planned" not in first.stdout.str(), "the claims of replicas need no sweep"
    monkeypatch.chdir(inner.path)
    main(["report", RECORDS])
    again = capsys.readouterr().out
    assert "Replicas on one device: simulated" in again and len(rows) >= 5
    assert all(row in " ".join(again.split()) for row in rows)


def test_what_is_known_is_not_measured_again(first, gain, inner):
    again = gain("--slm-resume", "--slm-replicas=2,3,4", "--slm-repeats=4", "-k", "point")
    before = len(first.measured)
    assert len(read(inner.path / RECORDS).measurements) == before + 2 * 4 * 4, "only four replicas were new"
    again.stdout.fnmatch_lines([f"slmserve: {RECORDS} holds {before} *", f"{before} measurements were reused from *"])


def test_a_plan_tells_starts_and_prices(gain):
    text = gain("--slm-plan", "--slm-sharing=time-slicing").stdout.str()
    assert "start 2 x opt-125m, by time-slicing" in text
    assert "test_point_of_replicas[opt-125m-96-x2-time-slicing]" in text
    assert "test_replicas_pay[opt-125m-mps] (measures nothing)" in text


def test_two_models_are_measured_where_both_are_chosen(gain):
    words = ("--slm-models=opt-125m,opt-1.3b", "-k", "two_models or model_alone", "--slm-records=two.jsonl")
    result = gain(*words)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["opt-125m + opt-1.3b, mps: *times what serving one after the other would give*"])
