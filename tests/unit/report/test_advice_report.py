"""What the advisor says: a table, reasons, commands, JSON."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import law, point

from pytest_slmserve.analysis.advice.advisor import Footprint, ModelSweep, Objectives, Plan, ServedEngine, plan
from pytest_slmserve.analysis.advice.subjects import ResultSource
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.report.advice import advice_facts, advice_section, serve_words, shell_lines, starts
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import laid_out
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


def told(found: Plan) -> dict[str, Any]:
    """The advice as a program reads it."""
    return json.loads(as_json(advice_facts(found, SOURCE, [])))


def advice_text(found: Plan, source: ResultSource) -> str:
    """The advice as `slmserve advise` prints it."""
    with laid_out(every_column=True):
        return section_text(advice_section(found, source))


def options(command: str) -> dict[str, str]:
    """The words behind each option of a command line."""
    words = shlex.split(command)
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}


def flat(out: str) -> str:
    """Broken lines made whole."""
    return " ".join(out.split())


def test_one_model_as_text():
    out = advice_text(planned(), SOURCE)
    row = next(line.split() for line in out.splitlines() if line.startswith("opt-1.3b  "))
    assert row[:9] == ["opt-1.3b", "64", "5,872", "10.9", "63.9", "42.2", "9.00", "111", "13.5"]
    assert row[9:] == ["9", "25", "x", "1.56", "x", "3.30", "0.166", "try", "2", "of", "32"]
    for said in (
        "NVIDIA H200, 140 GiB of memory, of which engines may take 90 %",
        "at most 2 times the latency at 32 (TPOT)",
        "the host: no kernel runs for 36 % of the time",
        "active 27 % of the time, of 89 % that can be reached",
        "power is at 92.9 % of its limit",
        "0.166 at 64; 0.106 at 512, the largest measured; 4.47 at 1, alone",
    ):
        assert said in flat(out)
    assert out.index("model") < out.index("  batch  ") < out.index("vllm serve")


def test_one_engine_and_two_for_a_trial():
    single, double = starts(planned())
    assert len(single.commands) == 1 and not single.mps and len(double.commands) == 2 and double.mps
    assert [options(shlex.join(words))["--port"] for words in double.commands] == ["8000", "8001"]
    assert {options(shlex.join(words))["--max-num-seqs"] for words in double.commands} == {"32"}
    assert "start the MPS daemon" in flat(advice_text(planned(), SOURCE))


def test_a_full_batch_for_each_of_two_engines_would_miss_the_limit():
    busy = tuple(replace(point(b, [law(b)], [b / law(b)]), **SENSED | {"dram_active": 0.7}) for b in GRID)
    least_ms = f"{1e3 * 2 * 0.7 / 0.89 * 64 / law(64):.3g}"
    out = flat(advice_text(planned(subject(points=busy)), SOURCE))
    assert f"try 2 at batch 32 (not 64: that would take {least_ms} ms per output token at the least)" in out


def test_a_model_whose_memory_is_not_known_is_served_alone():
    """Its engine takes all the memory that it finds."""
    unknown = subject("c", engine=replace(ENGINE, footprint=None))
    found = planned(subject("a"), unknown, subject("b"))
    both, alone = starts(found)
    assert "together: these 2 models take 26.9 of the 126 GiB" in flat(advice_text(found, SOURCE))
    assert len(both.commands) == 2 and "2 engines that fit" in both.what
    assert len(alone.commands) == 1 and alone.what.startswith("one engine of c, alone")
    assert "--port" in alone.commands[0] and "--gpu-memory-utilization" not in alone.commands[0]
    no_gpu = starts(planned(subject("a"), subject("b"), wish=replace(WISH, gpu_bytes=None)))
    assert [start.what.partition(":")[0] for start in no_gpu] == ["one engine of a, alone", "one engine of b, alone"]


def test_several_models_share_the_gpu():
    found = planned(subject("a"), subject("b"), subject("c", batches=(8,)))
    [start] = starts(found)
    assert len(start.commands) == 2 and "2 engines that fit on the GPU together" in start.what
    out = advice_text(found, SOURCE)
    assert "together: these 2 models take 26.9 of the 126 GiB" in out and "each with its B_opt" in out
    assert "none: 1 load to judge by (concurrency 8): two are needed" in out and "no advice" in out


def test_models_that_do_not_fit_at_their_best_or_at_all():
    small = replace(WISH, gpu_bytes=20 * GIB)
    out = flat(advice_text(planned(subject("a"), subject("b"), wish=small), SOURCE))
    assert "with less than B_opt" in out and "not 64" in out and "the memory does not hold that" in out
    assert "speeds are those of the GPU that was measured on, which has 140 GiB" in out
    out = flat(advice_text(planned(subject("a"), subject("b"), wish=replace(WISH, gpu_bytes=5 * GIB)), SOURCE))
    assert "note: nothing fits" in out and "fewer of them (--model)" in out and "vllm serve" not in out
    assert "does not even hold one request" in out


def test_what_is_not_known_is_said():
    bare = subject(engine=None, points=tuple(point(b, [law(b)], [b / law(b)]) for b in GRID), output_share=None)
    out = advice_text(planned(bare, wish=Objectives(price_per_hour=3.5)), ResultSource("external results", "itl_ms"))
    assert "the model is not known: --model NAME" in out
    assert "no cost: how many of the tokens are output" in out
    assert "no latency limit was given (--slo-itl)" in out and "vllm serve" not in out
    assert "GiB" not in out.splitlines()[4], "columns of nothing are left out"
    nowhere = advice_text(planned(wish=replace(WISH, gpu_bytes=None)), replace(SOURCE, gpu_bytes=None))
    assert "--gpu-memory 80GiB" in nowhere and "--gpu-memory-utilization" not in nowhere


def test_a_prediction_is_said_in_the_table_and_below():
    out = advice_text(planned(subject(batches=(1, 32)), wish=replace(WISH, slo=RelativeSlo(4, 32))), SOURCE)
    assert "predicted as the largest with" in out and out.splitlines()[6].endswith("predicted")
    assert "measure there before use" in out and "no limit of the memory is known" not in out
    unlimited = replace(WISH, slo=RelativeSlo(4, 32), gpu_bytes=None)
    assert "no limit of the memory is known" in advice_text(planned(subject(batches=(1, 32)), wish=unlimited), SOURCE)


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
    assert seen["models"][1]["batch"] is None and "two are needed" in seen["models"][1]["reason"]
    assert [shlex.split(c)[:2] for start in seen["starts"] for c in start["commands"]] == [["vllm", "serve"]]


@pytest.mark.parametrize("threshold", [5e-324, 0.1])
def test_what_no_number_can_say_is_null(threshold):
    for batches in (GRID, (1, 32)):
        seen = told(planned(subject(batches=batches), wish=replace(WISH, threshold=threshold)))
        cap = seen["models"][0]["caps"]["efficiency"]
        assert cap is None or math.isfinite(cap)
