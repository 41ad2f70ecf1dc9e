"""`predict`: what it prints of a law on another GPU, as text, JSON and CSV, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import BASELINES, in_checkout
from strategies import H200, law, measurement

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import Archive

H100 = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A sweep on an H100, the same at 0.7 of its rates on an H200, and one on the H100 that no law describes."""
    monkeypatch.chdir(tmp_path)
    rates = [(H100, "opt-1.3b", load, law(load)) for load in (1, 8, 64)]
    rates += [(H200, "opt-1.3b", load, 0.7 * law(load)) for load in (1, 8, 64, 96)]
    rates += [(H100, "opt-2.7b", load, rate) for load, rate in ((1, 10.0), (8, 900.0), (64, 700.0))]
    with Archive.open(Path("both.jsonl")) as archive:
        archive.begin({}, {})
        for where, model, load, rate in rates:
            for repeat in range(2):
                archive.add(measurement(load, rate + 0.1 * repeat, model=model, environment=where, repeat=repeat))
    return "both.jsonl"


def told(capsys, *words):
    status = main(["predict", *words])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 160])
def test_a_table_of_each_sweep_and_its_error_where_the_gpu_was_measured(columns, records, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out = told(capsys, records, "--gpu", "H200")
    text = " ".join(out.split())
    assert max(map(len, out.splitlines())) <= columns
    assert "opt-1.3b, measured on NVIDIA H100 80GB HBM3, vLLM 0.26.0, predicted for H200" in text
    assert status == 1 and "fails: H200, opt-1.3b: predicted is 1" in text
    assert "note: opt-2.7b: the law of saturation does not describe it" in text


def test_json_and_csv_have_what_the_text_has(records, capsys):
    status, out = told(capsys, records, "--gpu", "H200", "--json")
    (found,) = json.loads(out)["predictions"]
    assert status == 1 and [row["concurrency"] for row in found["loads"]] == [1, 8, 64, 96]
    last = found["loads"][-1]
    assert last["output_tokens_per_s"] is None
    assert last["predicted_over_measured"] == last["predicted_tokens_per_s"] / last["measured_tokens_per_s"]
    assert last["low"] < last["predicted_over_measured"] < last["high"]
    assert len(told(capsys, records, "--gpu", "H200", "--csv")[1].splitlines()) == 1 + len(found["loads"])


def test_a_gpu_that_was_not_measured_is_predicted_unchecked(records, capsys):
    status, out = told(capsys, records, "--gpu", "L40S")
    assert status == 0 and out.count("not checked: no archive has this sweep on L40S") == 2


@in_checkout
def test_an_fp8_sweep_is_not_predicted_for_the_gpu_that_it_was_measured_on(capsys):
    status, out = told(capsys, str(BASELINES / "h100-vllm-0.26.0-fp8.jsonl.xz"), "--gpu", "H100")
    assert status == 10 and out == "nothing can be predicted\n"


def test_wrong_usage_names_the_gpus(records, capsys):
    assert main(["predict", records, "--gpu", "MI300X"]) == 4
    assert "try: one of T4, V100S" in capsys.readouterr().err
