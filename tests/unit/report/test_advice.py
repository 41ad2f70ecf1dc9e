"""The advice on planted sweeps is the one that is kept, its commands parse back to their numbers, and predictions for
another GPU stand beside what was measured there."""

import json
import math
import re
import shlex
from dataclasses import replace
from itertools import product

import pytest
from gpus import PLANTED, on_gpus, replicas
from hypothesis import given, strategies as st
from sections import difference, in_words, sentences_of
from strategies import law, point

from pytest_slmserve.analysis.advice.advisor import Footprint, ModelSweep, Objectives, Plan, ServedEngine, plan
from pytest_slmserve.analysis.advice.subjects import ResultSource
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.report import advice, text_table
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.schema.specs import GIB, EngineSpec

SOURCE = ResultSource("NVIDIA H200", "TPOT", 140 * GIB)
FOOTPRINT = Footprint(weight_bytes=2_631_516_160, kv_bytes_per_token=196_608, longest=768, allowance_bytes=2 * GIB)
SERVED = {"dtype": "float16", "max_num_batched_tokens": 8192, "footprint": FOOTPRINT, "kv_had_bytes": 120 * GIB}
ENGINE = ServedEngine(spec=EngineSpec("opt-1.3b"), **SERVED)
SENSED = {"engine_active": 0.64, "dram_active": 0.27, "tensor_active": 0.16, "power_w": 650.0, "power_limit_w": 700.0}
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WISH = Objectives(slo=RelativeSlo(2, 32), gpu_bytes=140 * GIB, price_per_hour=3.5, together=True)
VISIBLE = st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))  # as a specification has them
NAMES = st.text(VISIBLE, min_size=1).filter(lambda s: s[0] != "-")
FOOTPRINTS = st.builds(
    Footprint, weight_bytes=st.integers(1, 30 * GIB), kv_bytes_per_token=st.integers(1, 10**6),
    longest=st.integers(1, 4096), allowance_bytes=st.integers(1, 4 * GIB),
)  # fmt: skip


def points(batches=GRID, **sensed):
    return tuple(replace(point(b, [law(b)], [b / law(b)]), **sensed) for b in batches)


def subject(name: str = "opt-1.3b", batches=GRID, **facts: object) -> ModelSweep:
    return ModelSweep(**{"name": name, "points": points(batches, **SENSED), "engine": ENGINE, **facts})


def planned(*subjects: ModelSweep, **wish: object) -> Plan:
    return plan(subjects or [subject()], replace(WISH, **wish))


DRAM_BOUND = subject(points=points(**SENSED | {"dram_active": 0.7}))
UNSIZED = subject("c", engine=replace(ENGINE, footprint=None))
PLANS = {
    "one model": planned(),
    "a full batch for each of two engines would miss the limit": planned(DRAM_BOUND),
    "one of unknown memory is served alone": planned(subject("a"), UNSIZED, subject("b")),
    "a GPU of unknown memory": planned(subject("a"), subject("b"), gpu_bytes=None),
    "one without a sweep": planned(subject("a"), subject("b"), subject("c", batches=(8,))),
    "a GPU that is small": planned(subject("a"), subject("b"), gpu_bytes=20 * GIB),
    "a GPU that is too small": planned(subject("a"), subject("b"), gpu_bytes=5 * GIB),
    "a GPU that is too small for one": planned(gpu_bytes=2 * GIB),
    "predicted": planned(subject(batches=(1, 32)), slo=RelativeSlo(4, 32)),
    "predicted, no limit of the memory": planned(subject(batches=(1, 32)), slo=RelativeSlo(4, 32), gpu_bytes=None),
    "no sensors": planned(subject(points=points())),
    "no limit of the power": planned(subject(points=points(**SENSED | {"power_limit_w": None}))),
}
BARE = plan([subject(engine=None, points=points(), output_share=None)], Objectives(price_per_hour=3.5))


def test_advice_matches_expected_file():
    shown = {name: (found, SOURCE) for name, found in PLANS.items()}
    shown |= {
        "nothing but points": (BARE, ResultSource("external results", "itl_ms")),
        "no memory of the source": (planned(gpu_bytes=None), replace(SOURCE, gpu_bytes=None)),
        "no sweep": (Plan(WISH, (), None), SOURCE),
    }
    with text_table.laid_out(10_000):
        texts = {name: in_words([advice.advice_section(*each)]) for name, each in shown.items()}
    commands = re.compile(r"\nvllm serve .*|; start one after the other.*")
    texts = {name: text if name == "one model" else commands.sub("", text) for name, text in texts.items()}
    assert difference("advice", texts) == ""
    several = on_gpus((1, 2), shared=replicas(2, **PLANTED), room={1: 4}, **PLANTED)
    both = planned(subject("a"), subject("b", batches=(8,)))
    found = {
        "two models, one without a sweep": advice.advice_facts(both, SOURCE, []),
        "several GPUs": advice.advice_facts(planned(subject("opt-tiny")), SOURCE, [several])["several_gpus"],
    }
    shown = {name: as_json(facts) for name, facts in found.items()}
    assert difference("advice-facts", shown) == ""
    assert found["several GPUs"][0]["best_requests_per_s"]["requests_per_s"] == pytest.approx(25, rel=0.01)
    last = sentences_of(advice.advice_section(planned(subject("opt-tiny")), SOURCE, [several]))[-1]
    assert "opt-tiny on 2 GPUs, concurrency 16" in last and "TP 2 (25.0)" in last
    for threshold, batches in product((5e-324, 0.1), (GRID, (1, 32))):  # what no number can say is null
        facts = advice.advice_facts(planned(subject(batches=batches), threshold=threshold), SOURCE, [])
        cap = json.loads(as_json(facts))["models"][0]["caps"]["efficiency"]
        assert cap is None or math.isfinite(cap)


def test_second_engine_only_if_worth():
    run = advice.QuickRun(start_s=20.0, measured_s=59.6, budget_s=60, all_s=3.2, records="r.jsonl", trial="pytest two")
    plans = (planned(subject(points=points(**SENSED | {"engine_active": share}))) for share in (0.64, 0.97))
    worth, not_worth = (in_words([advice.advice_section(each, SOURCE, quick=run)]) for each in plans)
    assert "measure two engines: pytest two" in worth and "next" not in not_worth
    assert "the command took 3 s; by its own clock, the engine started in 20 s and measured for 60 s" in worth


def test_engines_started_together_have_ports():
    single, double = advice.starts(planned())
    assert (len(single.commands), single.mps, len(double.commands), double.mps) == (1, False, 2, True)
    seen = [options(shlex.join(words)) for words in double.commands]
    assert [(each["--port"], each["--max-num-seqs"]) for each in seen] == [("8000", "32"), ("8001", "32")]
    both, alone = advice.starts(PLANS["one of unknown memory is served alone"])
    assert len(both.commands) == 2 and "--port" in alone.commands[0]
    assert "--gpu-memory-utilization" not in alone.commands[0]
    assert [*advice.starts(PLANS["a GPU that is too small"])] == [] == [*advice.starts(BARE)]
    spec = EngineSpec("opt-1.3b", enforce_eager=True)
    words = advice.serve_words(replace(ENGINE, max_num_batched_tokens=None, footprint=None, spec=spec), 8, None)
    assert shlex.join(words) == "vllm serve facebook/opt-1.3b --dtype float16 --max-num-seqs 8 --enforce-eager"


def options(command: str) -> dict[str, str]:
    """The words behind each option of a command line."""
    words = shlex.split(command)
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}


@given(NAMES, FOOTPRINTS, st.integers(1, 2000), st.integers(1, 200), st.none() | st.integers(1, 10**6))
def test_serve_command_parses_back(model, footprint, batch, gib, tokens):
    engine = replace(ENGINE, spec=EngineSpec(model), max_num_batched_tokens=tokens, footprint=footprint)
    words = advice.serve_words(engine, batch, gib * GIB)
    seen = options(shlex.join(words))
    assert words[:3] == ("vllm", "serve", model) and advice.shell_lines(words, 10_000) == shlex.join(words)
    for width in (30, 100):  # of a terminal for which it is broken
        assert shlex.split(advice.shell_lines(words, width).replace(" \\\n    ", " ")) == list(words)
    assert int(seen["--max-num-seqs"]) == batch and int(seen["--max-model-len"]) == footprint.longest
    assert int(seen["--kv-cache-memory-bytes"]) == footprint.kv_bytes(batch) and seen["--dtype"] == "float16"
    assert seen.get("--max-num-batched-tokens") == (None if tokens is None else str(tokens))
    share, needed = float(seen["--gpu-memory-utilization"]), footprint.total_bytes(batch) / (gib * GIB)
    assert share == 1 or (needed <= share + 1e-9 and share - needed <= 0.001)
