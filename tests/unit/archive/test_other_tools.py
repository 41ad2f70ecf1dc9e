"""Files of other tools, cut down from those found in public repositories: each column has the value that its tool tells
under another name, in vLLM's unit, and what is of no tool is left as it is."""

import json

import pytest

from pytest_slmserve.archive.external import read_results
from pytest_slmserve.archive.other_tools import rows_of_tool

ROW = {
    "max_concurrency": 8, "output_throughput": 283.4, "mean_tpot_ms": 11.9, "mean_ttft_ms": 12262.5,
    "mean_e2el_ms": 2413.5, "request_throughput": 0.25, "completed": 56, "failed": 2,
}  # fmt: skip


def mean(value):
    return {"successful": {"mean": value, "median": 1.0}, "errored": {"mean": 9e9}}


def guidellm(strategy, where="config", tpot="inter_token_latency_ms", **more):
    totals = {"request_totals": {"successful": 56, "errored": 2, "total": 58}}
    metrics = {
        "output_tokens_per_second": mean(283.4), tpot: mean(11.9), "time_to_first_token_ms": mean(12262.5),
        "request_latency": mean(2.4135), "requests_per_second": mean(0.25), **totals,
    }  # fmt: skip
    return {"metadata": {}, "args": {}, "benchmarks": [{where: {"strategy": strategy}, "metrics": metrics, **more}]}


def aiperf(config, unit="ms", scale=1.0):
    def found(value):
        return {"unit": unit, "avg": value / scale, "p99": 9e9}

    return {
        "schema_version": "1.3", "input_config": config, "request_throughput": {"unit": "requests/sec", "avg": 0.25},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 283.4}, "inter_token_latency": found(11.9),
        "time_to_first_token": found(12262.5), "request_latency": found(2413.5),
        "request_count": {"avg": 56}, "error_request_count": {"avg": 2},
    }  # fmt: skip


INFERENCE_PERF = {
    "load_summary": {"count": 58, "concurrency": 8, "schedule_delay": {"mean": 0.1}},
    "successes": {
        "count": 56,
        "latency": {
            "request_latency": {"mean": 2.4135}, "time_per_output_token": {"mean": 0.0119},
            "time_to_first_token": {"mean": 12.2625}, "normalized_time_per_output_token": {"mean": 9.0},
        },
        "throughput": {"output_tokens_per_sec": 283.4, "requests_per_sec": 0.25, "input_tokens_per_sec": 9.0},
    },
    "failures": {"count": 2},
}  # fmt: skip


@pytest.mark.parametrize(("tool", "result"), [
    ("guidellm", guidellm({"type_": "concurrent", "streams": 8})),
    ("guidellm", guidellm({"max_concurrency": 8})),
    ("guidellm", guidellm({"streams": 8}, "args")), ("guidellm", guidellm({"streams": 8}, "scheduler")),
    ("aiperf", aiperf({"loadgen": {"concurrency": 8}})),
    ("aiperf", aiperf({"phases": [{"name": "profiling", "concurrency": 8}]}, "sec", 1000.0)),
    ("inference-perf", INFERENCE_PERF),
])  # fmt: skip
def test_tool_columns_keep_their_values(tool, result):
    [row] = rows_of_tool(result)
    assert row.pop("tool") == tool and row.pop("model_id", None) is None
    assert row == {name: pytest.approx(value) for name, value in ROW.items()}


@pytest.mark.parametrize(("result", "name", "value"), [
    (guidellm({"type_": "synchronous"}), "max_concurrency", 1),
    (guidellm({"type_": "constant", "rate": 3}), "max_concurrency", None),
    (aiperf({"endpoint": {"model_names": ["a/b"]}}), "model_id", "a/b"),
    (aiperf({"models": {"items": [{"name": "a/b"}, {"name": "c"}]}}), "model_id", "a/b"),
])  # fmt: skip
def test_synchronous_tool_load_is_one(result, name, value):
    [row] = rows_of_tool(result)
    assert row[name] == value


@pytest.mark.parametrize("result", [
    {}, {"max_concurrency": 1, "output_throughput": 2.0}, {"benchmarks": []}, {"benchmarks": 7}, {"benchmarks": [{}]},
    {"successes": {"count": 3}}, {"output_token_throughput": 3.0},
])  # fmt: skip
def test_unknown_tool_result_is_ignored(result):
    assert list(rows_of_tool(result)) == []


def test_tool_benchmarks_become_separate_rows(tmp_path):
    one, two = guidellm({"streams": 8}), guidellm({"streams": 16})
    one["benchmarks"] += two["benchmarks"]
    path, flat = tmp_path / "benchmarks.json", {"max_concurrency": 4, "output_throughput": 7}
    path.write_text(json.dumps([one, flat]), "utf-8")
    rows = read_results(path)
    assert [row.cells["max_concurrency"] for row in rows] == [8, 16, 4] and rows[2].cells == flat
    assert [row.place for row in rows] == [f"benchmarks.json: result {number}" for number in ("1.1", "1.2", "2")]
