"""`slmserve advise`: archives of ours, external results, and its exit status."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import CSV
from sealed_lines import reseal
from test_main import NAMES, PLAIN, archive, external, measured, run, spoilt, watched

OUTPUT = ("--output-throughput", "output_tok_per_s", "--preemptions", "preemptions")
MODEL = ("--model", "opt-1.3b", "--gpu-memory", "63.43GiB", "--max-model-len", "632")


@pytest.mark.parametrize(("slo", "chosen", "cap"), [("2x@32", 96, 105), ("4x@32", 256, 250)])
def test_the_published_results(tmp_path, capsys, slo, chosen, cap):
    """OPT-1.3B of arXiv:2503.08311, epsilon 0.1, b_half from shapes."""
    asked = (*NAMES, *OUTPUT, *MODEL, "--slo-itl", slo, "--b-half", 40.6, "--price-per-hour", 2)
    status, out, err = run(capsys, "advise", external(tmp_path), *asked, "--json")
    [model] = json.loads(out)["models"]
    assert (status, err) == (0, "") and model["b_opt"]["value"] == chosen and not model["predicted"]
    assert round(model["caps"]["slo"]) == cap and round(model["caps"]["efficiency"]) == 375
    assert model["memory"]["kv_blocks"] == chosen * 40 + 1
    assert model["single"]["cost"]["value"] == pytest.approx(2 / 3600 / 276.593 * 1e6, rel=1e-3)
    status, out, err = run(capsys, "advise", external(tmp_path), *asked)
    assert (status, err) == (0, "") and f"B_opt is {chosen} concurrent requests, the largest measured" in out
    assert f"--max-num-seqs {chosen} " in out and all(len(row) <= 150 for row in out.splitlines())


def test_blocks_of_external_results_tell_what_a_batch_frees(tmp_path, capsys):
    with_blocks = [f"{row},{'num_gpu_blocks' if i == 0 else 18_573}\n" for i, row in enumerate(CSV.splitlines())]
    asked = (*NAMES, *OUTPUT, *MODEL, "--slo-itl", "2x@32", "--kv-blocks", "num_gpu_blocks")
    status, out, err = run(capsys, "advise", external(tmp_path, "".join(with_blocks)), *asked, "--json")
    [model] = json.loads(out)["models"]
    assert (status, err) == (0, "")
    needs = model["memory"]
    assert needs["freed_bytes"] == (18_573 - needs["kv_blocks"]) * 16 * 196_608 > 0
    status, _, err = run(capsys, "advise", external(tmp_path), *asked)
    assert status == 4 and "num_gpu_blocks" in err


def test_two_rows_give_a_prediction(tmp_path, capsys):
    rows = [row for row in CSV.splitlines(keepends=True) if row.split(",")[1] in ("max_num_seqs", "1", "32")]
    path = external(tmp_path, "".join(rows))
    status, out, err = run(capsys, "advise", path, *NAMES, *OUTPUT, "--slo-itl", "2x@32", "--json")
    [model] = json.loads(out)["models"]
    assert (status, err) == (0, "") and model["predicted"] and model["b_opt"]["value"] == 89
    assert model["no_memory"] == "the model is not known: --model NAME" and json.loads(out)["starts"] == []


def test_an_archive(tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl", measured((1, *(16, 32, 64, 128, 256))))
    status, out, err = run(capsys, "advise", path, "--slo-itl", "2x@32", "--price-per-hour", "3.5", "--json")
    seen = json.loads(out)
    [model] = seen["models"]
    assert (status, err) == (0, "") and seen["device"] == "NVIDIA H200" and model["batch"] == 64
    assert model["b_opt"] == {"value": 64, "low": 64, "high": 64}, "repeats of 0.1 % noise"
    assert model["memory"]["longest"] == 96 and model["gains"]["mps"]["unit"] == "roofline"
    words = shlex.split(seen["starts"][0]["commands"][0])
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(model["memory"]["kv_bytes"])
    status, out, err = run(capsys, "advise", path, "--slo-itl", "2x@32")
    assert (
        (status, err) == (0, "") and "B_opt is 64 concurrent requests" in out and "vllm serve facebook/opt-1.3b" in out
    )


def test_nothing_to_advise_is_10(tmp_path, capsys):
    status, out, err = run(capsys, "advise", archive(tmp_path / "one.jsonl", measured((64,))))
    assert (status, err) == (10, "") and "1 load to judge by (concurrency 64): two are needed" in out
    status, out, err = run(capsys, "advise", archive(tmp_path / "none.jsonl", []))
    assert (status, err) == (10, "") and "no sweep was measured" in out
    path = archive(tmp_path / "large.jsonl", measured((1, 16, 64)))
    status, out, err = run(capsys, "advise", path, "--gpu-memory", "2GiB")
    assert (status, err) == (10, "") and "nothing fits" in out and "vllm serve" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--slo-itl", "2x"), "'2x' is no latency objective"),
        (("--efficiency", "1"), "argument --efficiency: '1' is not a share"),
        (("--gpu-memory-utilization", "0"), "argument --gpu-memory-utilization: '0' is not a positive number"),
        (("--price-per-hour", "-1"), "argument --price-per-hour: '-1' is not a positive number"),
        (("--price-per-hour", "nan"), "argument --price-per-hour: 'nan' is not a positive number"),
        (("--gpu-memory", "80"), "argument --gpu-memory: '80' is not a memory of a GPU, such as 40GiB"),
        (("--max-model-len", "0"), "argument --max-model-len: '0' is not a whole number, 1 or more"),
        (("--model", "opt-2.7b"), "there are no records of opt-2.7b"),
        (("--knob", "max_num_seqs"), "need to be told their columns"),
    ],
)
def test_wrong_usage_is_4(tmp_path, capsys, arguments, words):
    path = archive(tmp_path / "a.jsonl", measured((1, 16, 64)))
    status, out, err = run(capsys, "advise", path, *arguments)
    assert (status, out) == (4, "") and err.startswith("error: ") and words in err and err.count("\n") <= 2


def test_results_that_are_not_ours_need_their_columns(tmp_path, capsys):
    status, out, err = run(capsys, "advise", external(tmp_path))
    assert (status, out) == (4, "") and "external results need to be told their columns" in err
    status, out, err = run(capsys, "advise", external(tmp_path), *NAMES, "--model", "no-such-model")
    assert (status, out) == (4, "") and "unknown model 'no-such-model'" in err


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_value_stands_in_a_result_there_is_an_answer_or_one_sentence(tmp_path, capsys, data):
    header, *rows = [row.split(",") for row in CSV.splitlines()]
    results = [dict(zip(header, row)) for row in rows[: data.draw(st.integers(1, len(rows)))]]
    for _ in range(data.draw(st.integers(1, 3))):
        result, name = data.draw(st.sampled_from(results)), data.draw(st.sampled_from(header))
        result[name] = data.draw(PLAIN | st.sampled_from([0, 1, 1e-12, 1e12, 10**9, "1e3"]))
    asked = (*NAMES, *OUTPUT, *MODEL, "--slo-itl", "2x@32", *data.draw(st.sampled_from([(), ("--json",)])))
    status, out, err = run(capsys, "advise", external(tmp_path, json.dumps(results)), *asked)
    assert (status in (0, 10) and ("B_opt" in out or "b_opt" in out or "none: " in out)) or (
        status == 4 and err.startswith("error: ")
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return archive(tmp_path_factory.mktemp("whole") / "a.jsonl", watched(measured((1, 16, 32))))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_value_stands_in_a_record_there_is_an_answer_or_one_sentence(recorded, tmp_path, capsys, data):
    path = tmp_path / "a.jsonl"
    path.write_text(spoilt(data, recorded), "utf-8")
    reseal(path)
    status, out, err = run(capsys, "advise", path, *data.draw(st.sampled_from([(), ("--json",)])))
    answered = status in (0, 10) and ("wanted: " in out or '"starts": [' in out)  # whatever the model is called
    assert answered or (status == 4 and err.startswith("error: "))
