"""The advice: each row, reason, command and fact has the numbers of its plan; what is not known is said with the option
that tells it; and predictions for another GPU stand beside what was measured there."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from gpus import on_gpus, replicas
from hypothesis import given
from hypothesis import strategies as st
from sections import column_of, rows_of, sentences_of, tables_of
from strategies import H200, law, measurement, point

from pytest_slmserve.analysis.advice.advisor import Footprint, ModelSweep, Objectives, Plan, ServedEngine, plan
from pytest_slmserve.analysis.advice.other_gpu import gpu_named, predicted_elsewhere
from pytest_slmserve.analysis.advice.subjects import ResultSource
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.report.advice import (
    advice_facts,
    advice_reasons,
    advice_section,
    batch_text,
    prediction_report,
    serve_words,
    shell_lines,
    starts,
)
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, EngineSpec

SOURCE = ResultSource("NVIDIA H200", "TPOT", 140 * GIB)
FOOTPRINT = Footprint(weight_bytes=2_631_516_160, kv_bytes_per_token=196_608, longest=768, allowance_bytes=2 * GIB)
ENGINE = ServedEngine(
    spec=EngineSpec("opt-1.3b"),
    dtype="float16",
    max_num_batched_tokens=8192,
    footprint=FOOTPRINT,
    kv_had_bytes=120 * GIB,
)
SENSED = {"engine_active": 0.64, "dram_active": 0.27, "tensor_active": 0.16, "power_w": 650.0, "power_limit_w": 700.0}
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WISH = Objectives(slo=RelativeSlo(2, 32), gpu_bytes=140 * GIB, price_per_hour=3.5)


def subject(name: str = "opt-1.3b", batches=GRID, **facts: object) -> ModelSweep:
    points = tuple(replace(point(b, [law(b)], [b / law(b)]), **SENSED) for b in batches)
    return ModelSweep(**{"name": name, "points": points, "engine": ENGINE, **facts})


def planned(*subjects: ModelSweep, wish: Objectives = WISH) -> Plan:
    return plan(subjects or [subject()], wish)


def told(found: Plan, source: ResultSource = SOURCE) -> dict[str, Any]:
    """The advice as a program reads it."""
    return json.loads(as_json(advice_facts(found, source, [])))


def shown(found: Plan, source: ResultSource = SOURCE) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The rows of the table by their model, and all sentences, those on a model on one line each."""
    with laid_out(10_000, every_column=True):
        section = advice_section(found, source)
    texts = [line.strip() for text in (section.title, *sentences_of(section)) for line in text.split("\n")]
    rows = [row for table in tables_of(section) for row in rows_of(table)]
    return {row["model"]: row for row in rows}, texts


def reasons(found: Plan) -> dict[str, str]:
    """What is said of the first model, by its subject."""
    return dict(advice_reasons(found.advices[0], found))


def said(texts: list[str], *facts: object) -> bool:
    """Whether one of the sentences has all these facts."""
    return any(all(str(fact) in text for fact in facts) for text in texts)


def options(command: str) -> dict[str, str]:
    """The words behind each option of a command line."""
    words = shlex.split(command)
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}


def test_the_row_of_a_model_has_its_figures():
    rows, texts = shown(planned())
    assert rows["opt-1.3b"] == {
        "model": "opt-1.3b", "batch": "64", "tokens /s": "5,872", "ms/token": "10.9", "of peak %": "63.9",
        "eff. %": "42.2", "KV GiB": "9.00", "freed GiB": "111", "engine GiB": "13.5", "full-batch engines": "9",
        "split-batch engines": "25", "time-slicing gain": "x 1.56", "MPS gain": "x 3.30", "cost/M tokens": "0.166",
        "": "try 2 of 32",
    }  # fmt: skip
    assert advice_section(planned(), SOURCE).look == "good"
    assert said(texts, "NVIDIA H200", "140 GiB", "90 %") and said(texts, "2 times the latency at 32 (TPOT)")


def test_each_reason_has_its_numbers():
    seen = reasons(planned())
    assert said([seen["batch"]], "B_opt is 64 ", "5,872 tokens/s", "63.9 %")
    assert said([seen["memory"]], "64 requests of 768 ", "9.00 GiB of KV", "2.45 of weights", "13.5 GiB", "so 111 GiB ")
    assert said([seen["gain"]], "1.56 times", "36 %", "3.30 times", "27 %", "89 %", "92.9 %", "concurrency 64")
    assert said([seen["engines"]], "9 at batch 64", "25 ", "try 2 at batch 32")
    assert said([seen["cost"]], "0.166 at 64", "0.106 at 512, the largest", "4.47 at 1, alone")


def test_a_plan_has_one_engine_and_two_for_a_trial():
    single, double = starts(planned())
    assert len(single.commands) == 1 and not single.mps and len(double.commands) == 2 and double.mps
    assert [options(shlex.join(words))["--port"] for words in double.commands] == ["8000", "8001"]
    assert {options(shlex.join(words))["--max-num-seqs"] for words in double.commands} == {"32"}
    assert said(shown(planned())[1], "nvidia-cuda-mps-control -d")


def test_a_full_batch_for_each_of_two_engines_would_miss_the_limit():
    busy = tuple(replace(point(b, [law(b)], [b / law(b)]), **SENSED | {"dram_active": 0.7}) for b in GRID)
    least_ms = f"{1e3 * 2 * 0.7 / 0.89 * 64 / law(64):.3g} ms"
    assert said([reasons(planned(subject(points=busy)))["engines"]], "try 2 at batch 32 (not 64: ", least_ms)


def test_a_model_whose_memory_is_not_known_is_served_alone():
    """Its engine takes all the memory that it finds."""
    found = planned(subject("a"), subject("c", engine=replace(ENGINE, footprint=None)), subject("b"))
    both, alone = starts(found)
    assert said(shown(found)[1], "these 2 models take 26.9 of the 126 GiB")
    assert len(both.commands) == 2 and both.what.startswith("2 engines")
    assert len(alone.commands) == 1 and alone.what.startswith("one engine of c, alone")
    assert "--port" in alone.commands[0] and "--gpu-memory-utilization" not in alone.commands[0]
    no_gpu = starts(planned(subject("a"), subject("b"), wish=replace(WISH, gpu_bytes=None)))
    assert [start.what.partition(":")[0] for start in no_gpu] == ["one engine of a, alone", "one engine of b, alone"]


def test_several_models_share_the_gpu_and_one_without_a_sweep_has_no_advice():
    found = planned(subject("a"), subject("b"), subject("c", batches=(8,)))
    [start] = starts(found)
    rows, texts = shown(found)
    assert len(start.commands) == 2 and said(texts, "these 2 models take 26.9 of the 126 GiB", "B_opt")
    assert (rows["c"]["batch"], rows["c"][""]) == ("-", "no advice") and said(texts, "none: 1 load", "concurrency 8")


def test_models_that_do_not_fit_at_their_best_or_at_all():
    small = planned(subject("a"), subject("b"), wish=replace(WISH, gpu_bytes=20 * GIB))
    rows, texts = shown(small)
    assert said(texts, "B_opt", "less") and said(texts, "140 GiB") and "not 64" in rows["a"][""] + rows["b"][""]
    lowered = [advice for advice in small.advices if advice.batch != 64]
    assert lowered and all(said([batch_text(each, small)], f"so {each.batch}") for each in lowered)
    nothing = planned(subject("a"), subject("b"), wish=replace(WISH, gpu_bytes=5 * GIB))
    assert said(shown(nothing)[1], "note: nothing fits", "4.50 GiB", "(--model)") and [*starts(nothing)] == []
    assert not said([reasons(nothing)["batch"]], "tokens/s") and advice_section(nothing, SOURCE).look == "open"
    alone = planned(wish=replace(WISH, gpu_bytes=2 * GIB))
    assert said(shown(alone)[1], "note: nothing fits", "--gpu-memory-utilization") and "(--model)" not in " ".join(
        shown(alone)[1]
    )


def test_what_is_not_known_is_said_with_the_option_that_tells_it():
    bare = subject(engine=None, points=tuple(point(b, [law(b)], [b / law(b)]) for b in GRID), output_share=None)
    found = planned(bare, wish=Objectives(price_per_hour=3.5))
    rows, texts = shown(found, ResultSource("external results", "itl_ms"))
    assert all(said(texts, option) for option in ("--model NAME", "--output-throughput NAME", "--slo-itl"))
    assert not any("GiB" in name for name in rows["opt-1.3b"]) and [*starts(found)] == []
    nowhere = planned(wish=replace(WISH, gpu_bytes=None))
    assert said(shown(nowhere, replace(SOURCE, gpu_bytes=None))[1], "--gpu-memory 80GiB")
    assert said(shown(Plan(WISH, (), None))[1], "no sweep")


def test_a_prediction_is_marked_and_says_to_measure():
    wish = replace(WISH, slo=RelativeSlo(4, 32))
    rows, texts = shown(planned(subject(batches=(1, 32)), wish=wish))
    assert rows["opt-1.3b"][""].startswith("predicted") and said(texts, "predicted as the largest")
    unknown = [
        said(shown(planned(subject(batches=(1, 32)), wish=replace(wish, gpu_bytes=g)))[1], "no limit of the memory")
        for g in (None, 140 * GIB)
    ]
    assert unknown == [True, False]


# Commands

VISIBLE = st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))  # as a specification has them
NAMES = st.text(VISIBLE, min_size=1).filter(lambda s: s[0] != "-")
FOOTPRINTS = st.builds(
    Footprint,
    weight_bytes=st.integers(1, 30 * GIB),
    kv_bytes_per_token=st.integers(1, 10**6),
    longest=st.integers(1, 4096),
    allowance_bytes=st.integers(1, 4 * GIB),
)


@given(NAMES, FOOTPRINTS, st.integers(1, 2000), st.integers(1, 200), st.none() | st.integers(1, 10**6))
def test_a_command_parses_back_to_its_numbers(model, footprint, batch, gib, tokens):
    engine = ServedEngine(spec=EngineSpec(model), dtype="float16", max_num_batched_tokens=tokens, footprint=footprint)
    words = serve_words(engine, batch, gib * GIB)
    seen = options(shlex.join(words))
    assert shlex.split(shlex.join(words)) == list(words) and words[:3] == ("vllm", "serve", model)
    assert int(seen["--max-num-seqs"]) == batch and int(seen["--max-model-len"]) == footprint.longest
    assert int(seen["--kv-cache-memory-bytes"]) == footprint.kv_bytes(batch) and seen["--dtype"] == "float16"
    assert seen.get("--max-num-batched-tokens") == (None if tokens is None else str(tokens))
    share, needed = float(seen["--gpu-memory-utilization"]), footprint.total_bytes(batch) / (gib * GIB)
    assert share == 1 or (needed <= share + 1e-9 and share - needed <= 0.001)


@given(NAMES, st.integers(30, 200))
def test_a_command_broken_for_a_terminal_is_the_same_for_a_shell(model, width):
    words = (*serve_words(replace(ENGINE, spec=EngineSpec(model)), 64, 140 * GIB), "--port", "8000")
    assert shlex.split(shell_lines(words, width).replace(" \\\n    ", " ")) == list(words)
    assert shell_lines(words, 10_000) == shlex.join(words)


def test_what_is_not_known_of_the_engine_is_left_to_vllm():
    bare = replace(ENGINE, max_num_batched_tokens=None, footprint=None, spec=EngineSpec("opt-1.3b", enforce_eager=True))
    assert (
        shlex.join(serve_words(bare, 8, None))
        == "vllm serve facebook/opt-1.3b --dtype float16 --max-num-seqs 8 --enforce-eager"
    )


# JSON


def test_as_json():
    seen = told(planned(subject("a"), subject("b", batches=(8,))))
    model = seen["models"][0]
    assert model["b_opt"] == {"value": 64, "low": None, "high": None} and model["batch"] == 64
    assert (seen["gpu_bytes"], seen["price_per_hour"]) == (140 * GIB, 3.5)
    assert seen["objective"] == "at most 2 times the latency at 32" and model["limit_s"] == pytest.approx(64 / law(32))
    assert model["memory"]["kv_bytes"] == FOOTPRINT.kv_bytes(64) and seen["together"]["fits"]
    assert model["gains"]["time_slicing"]["unit"] == "host" and model["gains"]["mps"]["unit"] == "dram"
    assert model["advised"]["tokens_per_s"]["value"] == law(64)
    assert seen["models"][1]["batch"] is None and "concurrency 8" in seen["models"][1]["reason"]
    assert [shlex.split(c)[:2] for start in seen["starts"] for c in start["commands"]] == [["vllm", "serve"]]


@pytest.mark.parametrize("threshold", [5e-324, 0.1])
def test_what_no_number_can_say_is_null(threshold):
    for batches in (GRID, (1, 32)):
        seen = told(planned(subject(batches=batches), wish=replace(WISH, threshold=threshold)))
        cap = seen["models"][0]["caps"]["efficiency"]
        assert cap is None or math.isfinite(cap)


# Another GPU


def on(environment: Environment, factor: float = 1.0) -> Curve:
    made = [
        measurement(c, factor * law(c) * (1 + 0.002 * i), environment=environment, repeat=i)
        for c in GRID[:9]
        for i in range(2)
    ]
    return curve_of("opt-1.3b", made)


def test_a_prediction_stands_beside_what_was_measured_there():
    carried = predicted_elsewhere(on(H200), gpu_named("H100"))
    there = on(replace(H200, gpu_name="NVIDIA H100 80GB HBM3"), 0.9)
    fewer = replace(there, points=there.points[2:])
    facts, section = prediction_report("opt-1.3b", carried, [fewer])
    (table,) = tables_of(section)
    rows = rows_of(table)
    assert column_of(table, "concurrency") == [str(c) for c in GRID[:9]] and len(facts["loads"]) == 9
    assert [row["measured there"] for row in rows[:2]] == ["-", "-"] and [row["95 %"] for row in rows[:2]] == ["-", "-"]
    for row, told, point_ in zip(rows[2:], facts["loads"][2:], fewer.points, strict=True):
        ratio = told["predicted_tokens_per_s"] / fmean(point_.repeats)
        assert told["predicted_over_measured"] == pytest.approx(ratio, rel=1e-6) and told["low"] < ratio < told["high"]
        assert row["predicted % of measured"] == f"{100 * ratio:.1f}"
        assert told["measured_tokens_per_s"] == fmean(point_.repeats)
    assert facts["b_half"] == carried.law.b_half.value and facts["predicted_t_inf"] == carried.step.pace
    (verdict,) = facts["verdicts"]
    assert [text for text in sentences_of(section) if text.startswith(verdict.state.value)]


def test_a_prediction_without_measurements_there_is_a_table_of_its_own():
    carried = predicted_elsewhere(on(H200), gpu_named("H100"))
    facts, section = prediction_report("opt-1.3b", carried, [])
    (table,) = tables_of(section)
    assert "measured there" not in table.cells.heads and facts["verdicts"] == []
    assert [row["output_tokens_per_s"] for row in facts["loads"]] == [fmean(p.repeats) for p in carried.curve.points]
    assert "H100" in section.title and "H100" in sentences_of(section)[-1]


def test_the_best_deployments_on_several_gpus_are_facts_and_sentences():
    planted = {"all_reduce_s": 1e-3, "imbalance": 0.2}
    curve = on_gpus((1, 2), shared=replicas(2, **planted), room={1: 4}, **planted)
    found = planned(subject("opt-tiny"))
    (seen,) = advice_facts(found, SOURCE, [curve])["several_gpus"]
    assert (seen["model"], seen["gpus"], seen["concurrency"]) == ("opt-tiny", 2, 16)
    best = seen["best_requests_per_s"]
    assert (best["deployment"], best["engines"], best["tensor_parallel_size"]) == ("one engine, TP 2", 1, 2)
    assert best["requests_per_s"] == pytest.approx(25, rel=0.01)
    assert seen["best_e2e_s"]["e2e_s"] > 0 and seen["best_joules_per_request"]["joules_per_request"] > 0
    assert said(
        sentences_of(advice_section(found, SOURCE, [curve])), "opt-tiny on 2 GPUs, concurrency 16", "TP 2 (25.0)"
    )
