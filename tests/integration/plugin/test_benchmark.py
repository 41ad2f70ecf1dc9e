"""pytest-benchmark is a view: seconds per request, and everything else in `extra_info`."""

from __future__ import annotations

import json

import pytest
from inside import SMALL, SWEEP

pytest.importorskip("pytest_benchmark")


@pytest.fixture
def saved(pytester):
    """In a process of its own: pytest-benchmark 5.0 leaves files open, one for each time that it reads options."""
    pytester.makepyfile(SWEEP)

    def run(*args):
        pytester.runpytest_subprocess(*SMALL, "--benchmark-json=out.json", "-p", "no:cacheprovider", *args)
        return json.loads((pytester.path / "out.json").read_text())

    return run


def test_each_point_is_a_benchmark_of_seconds_per_request(saved, archive):
    told = saved()
    rows = {row["name"]: row for row in told["benchmarks"]}
    assert len(rows) == 5
    row = rows["test_point[opt-125m-64]"]
    assert row["stats"]["rounds"] == 2
    assert row["stats"]["ops"] == pytest.approx(row["extra_info"]["requests_per_s"], rel=0.01)
    assert row["group"] == "opt-125m"
    assert set(row["extra_info"]["records"]) <= {m.id for m in archive().measurements}
    assert row["extra_info"]["concurrency"] == 64
    assert row["params"] == {"slm_point": "opt-125m-64"}
    assert told["machine_info"]["slmserve"]["platform"] == "simulated"


def test_a_point_without_a_valid_measurement_is_no_benchmark(saved):
    names = [row["name"] for row in saved("--slm-engine-arg=preempt_from=100")["benchmarks"]]
    assert names == ["test_point[opt-125m-1]", "test_point[opt-125m-16]", "test_point[opt-125m-64]"]


def test_autosave_and_compare_work(sweep):
    sweep("--benchmark-autosave")
    result = sweep("--benchmark-compare")
    result.stdout.fnmatch_lines(["*opt-125m-64* (0001_*", "*6 passed*"])


def test_disabled_it_measures_all_the_same(sweep, archive):
    sweep("--benchmark-disable").assert_outcomes(passed=6)
    assert len(archive().measurements) == 10


def test_an_interrupted_run_has_its_last_screen_where_warnings_are_errors(pytester):
    pytester.makepyfile(SWEEP)
    pytester.makeconftest(
        """
        def pytest_runtest_call(item):
            if "opt-125m-64" in item.name:
                raise KeyboardInterrupt
        """
    )
    result = pytester.runpytest_subprocess(*SMALL, "-W", "error", "-p", "no:cacheprovider")
    assert result.ret == 2
    result.stdout.fnmatch_lines(["opt-125m  from 64 *", "*! KeyboardInterrupt !*", "*2 passed*"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
