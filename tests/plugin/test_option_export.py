"""--slm-export writes each result as vLLM's benchmark does, for tools that read those."""

import json

import pytest
from inside import usage_error

from pytest_slmserve.analysis.metrics.window import output_tokens_per_s
from pytest_slmserve.archive import external

COLUMNS = external.Columns(knob="max_concurrency", throughput="output_throughput", latency="mean_e2el_ms")


def test_a_folder_gets_a_file_of_each_measurement(sweep, archive, pytester):
    sweep("--slm-export=vllm-bench=results/", "--slm-goodput=ttft:1s", "--slm-concurrency=1,16")
    paths = sorted((pytester.path / "results").iterdir())
    told = {result["record_id"]: result for path in paths for result in [json.loads(path.read_text("utf-8"))]}
    measured = {m.id: m for m in archive().measurements}
    assert told.keys() == measured.keys() and len(paths) == 4, "two repeats of two loads"
    for name, result in told.items():
        assert result["max_concurrency"] == measured[name].load.concurrency
        assert result["output_throughput"] == pytest.approx(output_tokens_per_s(measured[name].run))
        assert result["request_goodput"] > 0 and result["valid"] and result["backend"] == "engine"
    assert all(path.name.startswith("engine-infqps-concurrency") for path in paths)


def test_a_file_gets_an_object_a_line_that_judge_reads(sweep, pytester):
    sweep("--slm-export=vllm-bench=all.json", "--slm-concurrency=1,16")
    points = external.curve_of(external.read(pytester.path / "all.json"), COLUMNS).points
    assert [(point.concurrency, len(point.repeats)) for point in points] == [(1, 2), (16, 2)]


@pytest.mark.parametrize("words", ["results/", "csv=x", "vllm-bench="])
def test_other_words_are_refused(sweep, words):
    assert "is no export" in usage_error(sweep(f"--slm-export={words}"))


def test_the_file_of_the_records_is_refused(sweep):
    text = usage_error(sweep("--slm-records=all.json", "--slm-export=vllm-bench=./all.json"))
    assert "--slm-export=vllm-bench=./all.json would write into the records" in text


def test_what_cannot_be_written_costs_no_record(sweep, archive, pytester):
    (pytester.path / "taken").write_text("a file")
    result = sweep("--slm-export=vllm-bench=taken", "--slm-concurrency=1")
    assert "cannot write taken" in result.stdout.str()
    assert len(archive().measurements) >= 1
