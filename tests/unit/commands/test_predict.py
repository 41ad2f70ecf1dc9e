"""`predict`: what it prints of a law on another GPU in three formats, checked by what was measured there, and its exit
status."""

import csv
import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from command_line import refused, said, told_in_json
from scripts import BASELINES, in_checkout
from stored_records import stored
from strategies import H200, law, measurement

H100 = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
LOADS = (1, 8, 64)
found = partial(told_in_json, "predict")


def sweep(where, rates, model="opt-1.3b"):
    """Two repeats of each load, by load and rate."""
    facts = {"model": model, "environment": where, "steps": 50}
    return [measurement(load, rate + 0.1 * i, repeat=i, **facts) for load, rate in rates.items() for i in range(2)]


MEASURED = sweep(H100, {load: law(load) for load in LOADS})


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A sweep on an H100, the same at 0.7 of its rates on an H200, and one on the H100 that no law describes."""
    monkeypatch.chdir(tmp_path)
    there = sweep(H200, {load: 0.7 * law(load) for load in (*LOADS, 96)})
    return stored(Path("a.jsonl"), *MEASURED, *there, *sweep(H100, dict(zip(LOADS, (10.0, 900.0, 700.0))), "opt-2.7b"))


def test_loads_are_predicted_with_their_error_what_comes_true_is_0_and_nothing_to_predict_from_10(records, capsys):
    seen = found(capsys, records, "--gpu", "H200", status=1)
    (one,) = seen["predictions"]
    assert [row["concurrency"] for row in one["loads"]] == [*LOADS, 96]
    assert {verdict["state"] for verdict in one["verdicts"]} == {"fails"}
    for row in one["loads"]:
        assert row["predicted_over_measured"] == row["predicted_tokens_per_s"] / row["measured_tokens_per_s"]
        assert row["low"] < row["predicted_over_measured"] < row["high"]
        assert row["measured_tokens_per_s"] == pytest.approx(0.7 * law(row["concurrency"]), rel=1e-2)
    assert one["loads"][-1]["output_tokens_per_s"] is None, "the H100 had no such load"
    assert ["opt-2.7b" in note for note in seen["notes"]] == [True]
    unchecked = found(capsys, records, "--gpu", "L40S", status=0)["predictions"]
    assert [each["verdicts"] for each in unchecked] == [[], []]
    true = {row["concurrency"]: row["predicted_tokens_per_s"] for row in one["loads"][:3]}
    path = stored(Path("true.jsonl"), *MEASURED, *sweep(H200, true))
    (again,) = found(capsys, path, "--gpu", "H200", status=0)["predictions"]
    assert {verdict["state"] for verdict in again["verdicts"]} == {"passes"}
    assert all(row["predicted_over_measured"] == pytest.approx(1, abs=0.01) for row in again["loads"])
    path = stored(Path("one.jsonl"), *sweep(H100, {8: 900.0}), *sweep(H200, {load: law(load) for load in LOADS}))
    seen = found(capsys, path, "--gpu", "H200", status=10)
    assert seen["predictions"] == [] and len(seen["notes"]) == 1


def test_table_and_csv_tell_the_same(records, monkeypatch, capsys):
    words = ("predict", records, "--gpu", "H200")
    for columns in (80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        seen = said(capsys, *words)
        assert seen.status == 1 and max(map(len, seen.out.splitlines())) <= columns
        assert all(fact in seen.words for fact in ("opt-1.3b", H100.gpu_name, "vLLM 0.26.0", "note: opt-2.7b"))
    (one,) = found(capsys, *words[1:], status=1)["predictions"]
    seen, name = said(capsys, *words, "--csv"), "predicted_tokens_per_s"
    rows = csv.DictReader(io.StringIO(seen.out))
    assert [float(row[name]) for row in rows] == [each[name] for each in one["loads"]]
    assert seen.status == 1 and "opt-2.7b" in seen.err


@in_checkout
def test_an_fp8_sweep_is_not_predicted_for_the_gpu_that_it_was_measured_on(capsys):
    assert found(capsys, BASELINES / "h100-vllm-0.26.0-fp8.jsonl.xz", "--gpu", "H100", status=10)["predictions"] == []


@pytest.mark.parametrize(("words", "fact"), [(["--gpu", "MI300X"], "V100S"), ([], "--gpu")])
def test_wrong_usage_names_the_gpus_or_the_option(words, fact, records, capsys):
    refused(said(capsys, "predict", records, *words), fact)
