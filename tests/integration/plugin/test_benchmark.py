"""pytest-benchmark is a view: seconds per request, and everything else in `extra_info`."""

from __future__ import annotations

import json

import pytest
from inside import SWEEP

from pytest_slmserve.archive.store import read

pytest.importorskip("pytest_benchmark")
FEW = (
    "--slm-simulate",
    "--slm-models=opt-125m",
    "--slm-concurrency=1,4,8,16",
    "--slm-window=1",
    "-p",
    "no:cacheprovider",
)
FEW = (*FEW, "--slm-output-len=32", "--slm-input-len=64", "--slm-engine-arg=t_inf=4000", "--slm-engine-arg=b_half=1")


@pytest.fixture(scope="module")
def saved(inner):
    """In a process of its own: pytest-benchmark 5.0 leaves files open, one for each time that it reads options."""
    inner.makepyfile(SWEEP)
    inner.runpytest_subprocess(*FEW, "--benchmark-json=out.json", "--slm-engine-arg=preempt_from=16")
    return json.loads((inner.path / "out.json").read_text())


def test_each_valid_point_is_a_benchmark_of_seconds_per_request(saved, inner):
    rows = {row["name"]: row for row in saved["benchmarks"]}
    assert list(rows) == [f"test_point[opt-125m-{n}]" for n in (1, 4, 8)], "nothing is valid at 16"
    row, info = rows["test_point[opt-125m-8]"], rows["test_point[opt-125m-8]"]["extra_info"]
    assert (row["stats"]["rounds"], row["group"], info["concurrency"]) == (2, "opt-125m", 8)
    assert row["stats"]["ops"] == pytest.approx(info["requests_per_s"], rel=0.01)
    assert set(info["records"]) <= {m.id for m in read(inner.path / ".slm/records.jsonl").measurements}
    assert row["params"] == {"slm_point": "opt-125m-8"}
    assert saved["machine_info"]["slmserve"]["platform"] == "simulated"


def test_autosave_and_compare_work(inner, saved):
    inner.runpytest_inprocess(*FEW, "--benchmark-autosave")
    result = inner.runpytest_inprocess(*FEW, "--benchmark-compare")
    result.stdout.fnmatch_lines(["*opt-125m-8* (0001_*", "*5 passed*"])


@pytest.mark.parametrize("words", [("--benchmark-disable",), ("-p", "no:benchmark")])
def test_without_it_all_is_measured_all_the_same(inner, saved, words):
    inner.runpytest_inprocess(*FEW, *words, f"--slm-records={words[0]}.jsonl").assert_outcomes(passed=5)
    assert len(read(inner.path / f"{words[0]}.jsonl").measurements) >= 8


def test_an_interrupted_run_has_its_last_screen_where_warnings_are_errors(pytester):
    pytester.makepyfile(SWEEP)
    pytester.makeconftest(
        """
        def pytest_runtest_call(item):
            if "opt-125m-8" in item.name:
                raise KeyboardInterrupt
        """
    )
    result = pytester.runpytest_subprocess(*FEW, "--slm-report=tables", "-W", "error")
    assert result.ret == 2
    result.stdout.fnmatch_lines(["opt-125m *", "*! KeyboardInterrupt !*", "*2 passed*"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
