"""`predict`: what it prints of a model on another GPU and host in three formats, checked by what was measured there,
and its exit status."""

import csv
import io
import json
import sys
from functools import partial

import pytest
from command_line import refused, said, told_in_json
from scripts import BASELINES, in_checkout

from pytest_slmserve.analysis.advice.two_laws import LAWS, PYTHON

found = partial(told_in_json, "predict")
COST = {"python": PYTHON, "fast_s": 1.1 * LAWS.usual.fast_s, "middle_s": 1.2 * LAWS.usual.middle_s}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that writes the cost of a host, with other values if told, and gives its path."""
    monkeypatch.chdir(tmp_path)

    def written(**other: object) -> str:
        (tmp_path / "host.json").write_text(json.dumps({**COST, **other}))
        return "host.json"

    return written


def test_predicted_loads_have_intervals(host, capsys):
    bare = found(capsys, "Qwen/Qwen3-0.6B", "--gpu", "NVIDIA L4", status=0)
    known = found(capsys, "qwen3-0.6b", "--gpu", "l4", "--host-cost", host(), status=0)
    assert [row["concurrency"] for row in bare["loads"]] == [1, 2, 4, 8, 16, 32, 64, 128, 182]
    assert "182" in bare["notes"][0] and "H100 and H200" in bare["notes"][1] and bare["verdicts"] == []
    for one, other in zip(bare["loads"], known["loads"], strict=True):
        assert {"memory", "compute", "launches", "host"} >= {one["limit"]}
        for name in ("tokens_per_s", "ttft_s", "tpot_s"):
            assert one[name]["low"] < one[name]["value"] < one[name]["high"]
        wide, narrow = (row["tokens_per_s"]["high"] / row["tokens_per_s"]["value"] for row in (one, other))
        assert wide > narrow
    assert "any GPU" in bare["would_gain_most"]
    small = found(capsys, "qwen3-0.6b", "--gpu", "L4", "--gpu-memory", "12GiB", "--quantization", "fp8", status=0)
    assert small["loads"][-1]["concurrency"] < 182
    assert small["loads"][0]["tokens_per_s"]["value"] > bare["loads"][0]["tokens_per_s"]["value"]
    words = ("opt-125m", "--gpu", "H100", "--input-len", "64", "--output-len", "64")
    graphs = found(capsys, *words, "--max-cudagraph-capture-size", "4096", status=0)["loads"][-1]
    assert graphs["tokens_per_s"]["value"] > found(capsys, *words, status=0)["loads"][-1]["tokens_per_s"]["value"]


@in_checkout
def test_records_narrow_prediction(capsys):
    records = ("--from", BASELINES / "h200-vllm-0.26.0-today.jsonl.xz")
    bare, own, there = (found(capsys, "qwen3-4b", "--gpu", gpu, *more, status=0) for gpu, more in
                        (("H100", ()), ("H100", records), ("H200", records)))  # fmt: skip
    wide, narrow = (each["loads"][-1]["tokens_per_s"] for each in (bare, own))
    assert wide["high"] / wide["low"] > narrow["high"] / narrow["low"] and bare["verdicts"] == own["verdicts"] == []
    assert {verdict["state"] for verdict in there["verdicts"]} == {"passes"}
    other = found(capsys, "smollm2-135m", "--gpu", "H100", *records, status=0)
    assert "shape alone" in other["notes"][0]


def test_csv_agrees_with_table(host, monkeypatch, capsys):
    words = ("predict", "opt-125m", "--gpu", "H100", "--host-cost", host())
    for columns in (80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        seen = said(capsys, *words)
        assert seen.status == 0 and max(map(len, seen.out.splitlines())) <= columns
        assert all(fact in seen.words for fact in ("opt-125m on H100", "shape alone", "batch:", "this host lets"))
    rows = [*csv.DictReader(io.StringIO(said(capsys, *words, "--csv").out))]
    told = found(capsys, *words[1:], status=0)["loads"]
    assert [float(row["tokens_per_s.value"]) for row in rows] == [row["tokens_per_s"]["value"] for row in told]


def test_aiconfigurator_uses_own_interpreter(tmp_path, capsys):
    """A stand-in that finds the model's shape, knows one load, and fails at another."""
    package = tmp_path / "aiconfigurator" / "cli"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    source = (
        "import json, pathlib\n"
        "class Found:\n    raw = {'tokens/s': 1234.0}\n"
        "def cli_estimate(model, system, batch_size, **words):\n"
        "    shape = json.loads((pathlib.Path(model) / 'config.json').read_text())\n"
        "    assert shape['num_hidden_layers'] == 28 and system == 'h100_sxm' and words['isl'] == 512\n"
        "    if batch_size != 8: raise RuntimeError('OOM')\n"
        "    return Found\n"
    )
    (package / "api.py").write_text(source)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    words = ("qwen3-0.6b", "--gpu", "H100", "--aiconfigurator", python)
    seen = found(capsys, *words, status=0)
    assert [row["aiconfigurator_tokens_per_s"] for row in seen["loads"]][2:5] == [None, 1234.0, None]
    assert "OOM" in seen["notes"][-1] and "1,234" in said(capsys, "predict", *words).out
    assert "not asked" in found(capsys, "qwen3-0.6b", "--gpu", "T4", *words[3:], status=0)["notes"][-1]
    refused(said(capsys, "predict", *words[:3], "--aiconfigurator", "/nowhere/python"), "/nowhere/python")


@pytest.mark.parametrize(("words", "fact"), [
    (["opt-125m", "--gpu", "MI300X"], "V100S"), (["opt-125m"], "--gpu"), (["opt-126m", "--gpu", "H100"], "opt-125m"),
    (["opt-13b", "--gpu", "T4"], "smaller model"), (["opt-125m", "--gpu", "H100", "--host-cost", "no.json"], "doctor"),
])  # fmt: skip
def test_wrong_usage_suggests_fix(words, fact, capsys):
    refused(said(capsys, "predict", *words), fact)


def test_unfit_host_cost_is_refused(host, capsys):
    for other, fact in (({"python": "3.11"}, PYTHON), ({"fast_s": 0}, "doctor"), ({"middle_s": "x"}, "doctor")):
        refused(said(capsys, "predict", "opt-125m", "--gpu", "H100", "--host-cost", host(**other)), fact)
