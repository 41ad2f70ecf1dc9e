"""What an engine is started with: arguments and environment by its specification, the command line of a server, its
port, and the folder that describes its model. How it serves and ends is in tests/integration/engines."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from interfaces import stand_in
from tokenizers import Tokenizer

from pytest_slmserve.engines import server
from pytest_slmserve.engines.endpoint import body_of
from pytest_slmserve.engines.server import engine_arguments, engine_environment, model_for, server_command
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import GIB, EngineSpec, Request

CUDA = EngineSpec("opt-1.3b", kv_cache_bytes=3 * GIB, gpu_memory_utilization=0.5)
TWO = replace(CUDA, tensor_parallel_size=2)
CPU = EngineSpec("opt-tiny", platform="cpu", kv_cache_bytes=2 * GIB, dtype="bfloat16")
SERVED = replace(CUDA, interface="server")
LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "seed", "dtype")
FURTHER = {"max_num_seqs": 7, "block_size": 32, "kv_cache_dtype": "fp8", "sizes": (1, (2, 3)), "config": '{"level": 3}'}
VISIBLE, NVLS, THREADS = "CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE", "VLLM_CPU_OMP_THREADS_BIND"
OURS = str(server.WORKER.parent)

# Arguments and variables


@pytest.mark.parametrize(("spec", "wanted"), [
    (CUDA, {name: getattr(CUDA, name) for name in LIMITS}),
    (CUDA, {"model": "/m", "load_format": "dummy", "enable_prefix_caching": False}),
    (CUDA, {"disable_log_stats": False}),  # else there is no step trace
    (CUDA, {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 3 * GIB}),
    (CPU, {"gpu_memory_utilization": None, "kv_cache_memory_bytes": None}),  # it is a variable
    (replace(CPU, kv_cache_bytes=0), {"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": None}),
    (replace(CUDA, load_format="auto"), {"load_format": "auto", "tensor_parallel_size": None}),
    (replace(CUDA, extra=tuple(FURTHER.items())), {**FURTHER, "config": {"level": 3}}),  # they come last
])  # fmt: skip
def test_engine_arguments_include_every_limit(spec, wanted):
    arguments = engine_arguments(spec, "/m")
    assert {name: arguments.get(name) for name in wanted} == wanted
    assert hash(spec) == hash(replace(spec))


@pytest.mark.parametrize(("spec", "inherited", "wanted"), [
    (CPU, {VISIBLE: "2,3"}, {"VLLM_CPU_KVCACHE_SPACE": "2", VISIBLE: "2,3", THREADS: None}),
    (CUDA, {"HOME": "/me"}, {"HOME": "/me", "PYTHONPATH": OURS, "HF_HUB_OFFLINE": "1"}),
    (CUDA, {}, {"VLLM_CPU_KVCACHE_SPACE": None}),
    (replace(CPU, kv_cache_bytes=0), {}, {"VLLM_CPU_KVCACHE_SPACE": None}),
    (replace(CUDA, load_format="auto"), {}, {"HF_HUB_OFFLINE": None}),  # which dummy weights do not need
    (replace(CUDA, env=(("HF_HUB_OFFLINE", "0"),)), {"HF_HUB_OFFLINE": "7"}, {"HF_HUB_OFFLINE": "0"}),
    (CUDA, {"PYTHONPATH": "/inherited"}, {"PYTHONPATH": f"{OURS}:/inherited"}),
    (replace(CUDA, env=(("PYTHONPATH", "/theirs"),)), {"PYTHONPATH": "/ours"}, {"PYTHONPATH": f"{OURS}:/theirs"}),
    # Engines of several GPUs use no multicast, whatever was inherited, unless the records say so.
    (TWO, {NVLS: "1"}, {NVLS: "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}),
    (replace(TWO, env=((NVLS, "1"),)), {}, {NVLS: "1"}),
    (CUDA, {NVLS: "1"}, {NVLS: "1"}),
])  # fmt: skip
def test_specification_variables_override_inherited(spec, inherited, wanted):
    before = dict(inherited)
    seen = engine_environment(spec, inherited)
    assert {name: seen.get(name) for name in wanted} == wanted and inherited == before


@pytest.mark.parametrize(("gpu", "gpus", "visible", "wanted"), [
    (0, 1, None, None), (1, 1, None, "1"), (0, 2, None, "0,1"), (2, 2, None, "2,3"),
    (0, 1, "", ""), (0, 1, "3", "3"), (0, 1, "2,3", "2"), (1, 1, "2,3", "3"), (0, 2, "3, 5,7", "3,5"),
    (1, 2, "3,5,7", "5,7"), (0, 1, "GPU-aa,GPU-bb", "GPU-aa"), (1, 1, "GPU-aa,GPU-bb", "GPU-bb"),
])  # fmt: skip
def test_engine_sees_only_its_gpus(gpu, gpus, visible, wanted, monkeypatch):
    spec = replace(CUDA, gpu=gpu, tensor_parallel_size=gpus)
    seen = engine_environment(spec, {} if visible is None else {VISIBLE: visible})
    assert (seen.get(VISIBLE), seen.get("CUDA_DEVICE_ORDER")) == (wanted, "PCI_BUS_ID" if gpu or gpus > 1 else None)
    assert engine_arguments(spec, "m").get("tensor_parallel_size", 1) == gpus
    monkeypatch.setattr(server, "own_cores", lambda: {0, 1, 2, 3, 8})
    spec = replace(CPU, tensor_parallel_size=2)
    assert [engine_environment(spec, {}, cores)[THREADS] for cores in ((), (4, 5))] == ["0,1|2,3", "4|5"]


def test_server_command_carries_engine_limits():
    extra = {"compilation_config": '{"level": 0}', "enable_lora": True, "block_size": 32, "revision": None}
    extra |= {"cudagraph_capture_sizes": [1, 2]}
    module, *given = server_command(replace(SERVED, extra=tuple(extra.items())), "/m", 8000)
    words = " ".join(given)
    assert module == "vllm.entrypoints.openai.api_server" and "--revision" not in given
    assert "--skip-tokenizer-init" not in given, "a server turns tokens into text"
    for flag in (
        "--model /m", "--max-num-seqs 1024", "--max-num-batched-tokens 8192", "--max-model-len 2048", "--port 8000",
        f"--kv-cache-memory-bytes {3 * GIB}", "--gpu-memory-utilization 0.5", "--no-enforce-eager",
        "--no-enable-prefix-caching", "--enable-lora", "--block-size 32", "--cudagraph-capture-sizes 1 2",
    ):  # fmt: skip
        assert f"{flag} --" in f"{words} --", flag
    assert json.loads(given[given.index("--compilation-config") + 1]) == {"level": 0}
    command = server_command(replace(SERVED, extra=(("api_server_count", 4),)), "/m", 8000)
    assert command[:3] == ["vllm.entrypoints.cli.main", "serve", "/m"] and "--model" not in command
    assert command[-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    caches = replace(stand_in(), prefix_caching=True), stand_in(enable_prefix_caching=True)
    for spec in (*caches, stand_in()):
        command = server_command(replace(spec, interface="server"), "m", 8000)
        assert ("--enable-prompt-tokens-details" in command) is (spec in caches), spec
    wanted = {"model": "a-model", "prompt": [3, 5], "max_tokens": 7, "ignore_eos": True, "temperature": 0}
    wanted |= {"stream": True, "stream_options": {"include_usage": True}}
    assert body_of(Request((3, 5), 7), "a-model") == wanted
    assert EngineSpec("opt-1.3b").key == "87df620a5220"
    asked = body_of(Request(tuple(range(16)), 1), "slm", "rerank")
    assert (asked["query"], len(asked["documents"])) == ("t0 t1", 1)
    files = server.tokenizer_files(CATALOGUE["bert-tiny-reranker"])
    tokens = Tokenizer.from_str(files["tokenizer.json"]).encode(f"{asked['query']} {asked['documents'][0]}").ids
    assert tokens == [*range(16)]


def test_free_port_avoids_connection_range(monkeypatch, tmp_path):
    """No connection gets a port below that range."""
    lowest = int(server.OF_CONNECTIONS.read_text().split()[0])
    found = {server.free_port() for _ in range(20)}
    assert len(found) > 10 and all(20_000 <= port < lowest for port in found)
    with socket.create_server((server.HOST, server.free_port())) as taken, monkeypatch.context() as patch:
        busy = taken.getsockname()[1]
        patch.setattr(server.secrets.SystemRandom, "sample", lambda *_: [busy])
        assert server.free_port() not in (0, busy)
    monkeypatch.setattr(server, "OF_CONNECTIONS", tmp_path / "range")
    assert server.free_port() >= 1024, "where nobody knows, the system chooses"
    (tmp_path / "range").write_text("1024\t65535\n")
    assert server.free_port() >= 1024, "and where connections may have any port"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pytest-slmserve"


def test_dummy_model_folder_is_complete(cache):
    """The same at every start; a folder of one name may describe something else."""
    for model, wanted in (("opt-1.3b", "facebook/opt-1.3b"), ("facebook/opt-1.3b", "facebook/opt-1.3b"), ("/m", "/m")):
        assert model_for(EngineSpec(model, load_format="auto")) == wanted and not cache.exists()
    shape = CATALOGUE["opt-125m"]
    folder = Path(model_for(EngineSpec("opt-125m")))
    assert folder.parent == cache and folder.name.startswith("opt-125m-")
    assert json.loads((folder / "config.json").read_text("utf-8")) == dict(shape.config)
    assert model_for(CPU) == model_for(EngineSpec("opt-tiny", interface="server"))
    assert model_for(CPU) != model_for(replace(CPU, model_facts=shape))
    words = Tokenizer.from_file(f"{model_for(CPU)}/tokenizer.json")
    assert words.get_vocab_size() == CATALOGUE["opt-tiny"].vocabulary
    assert (words.encode("t5 t0 t11").ids, words.decode([5, 0, 11])) == ([5, 0, 11], "t5 t0 t11")
    plain, other = (json.loads(server.tokenizer_files(CATALOGUE[name])["tokenizer.json"])["model"]["vocab"]
                    for name in ("opt-tiny", "bert-tiny"))  # fmt: skip
    text = json.dumps([{"name": "A~!", "count": -1.5e9, "done": None}], separators=(",", ":"))
    assert {*text} <= plain.keys() and not any(word.isspace() for word in plain)
    assert plain["</s>"] == dict(CATALOGUE["opt-tiny"].config)["eos_token_id"] == 2, "which vLLM ends a text at"
    assert sorted(plain.values()) == [*range(CATALOGUE["opt-tiny"].vocabulary)] and "{" not in other
    several = (
        replace(CATALOGUE["opt-tiny"], config=config)
        for config in ((("eos_token_id", (7, 9)),), (("eos_token_id", "2"),), ())
    )
    found = [json.loads(server.tokenizer_files(model)["tokenizer.json"])["model"]["vocab"] for model in several]
    assert (found[0]["</s>"], found[0]["<|end_of_text|>"], found[2]["</s>"]) == (7, 9, 0) and "</s>" not in found[1]


@pytest.mark.parametrize("put", [
    lambda config, text: config.write_text(text.replace("{", '{"more": 1, ', 1), "utf-8"),
    lambda config, text: None,
    lambda config, text: config.write_bytes(bytes(range(128, 256))),
    lambda config, text: config.mkdir(),
], ids=["another shape", "nothing", "not text", "a folder"])  # fmt: skip
def test_changed_model_folder_is_refused(put):
    config = Path(model_for(CPU)) / "config.json"
    text = config.read_text("utf-8")
    config.unlink()
    put(config, text)
    with pytest.raises(BadUsage, match="config.json|opt-tiny") as caught:
        model_for(CPU)
    assert caught.value.hint == f"rm -r '{config.parent}'"


def test_unwritable_model_cache_is_refused(cache):
    cache.write_text("a file is in the way")
    with pytest.raises(BadUsage, match=r"opt-tiny .*pytest-slmserve: (.|\n)*XDG_CACHE_HOME"):
        model_for(CPU)
    cache.unlink()
    # None ever sees a part of it, and nothing is left beside it.
    together = Barrier(6)

    def start(_: int) -> tuple[str, set[str]]:
        together.wait(20)
        return (folder := model_for(CPU)), {path.name for path in Path(folder).iterdir()}

    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(start, range(6))]
    [folder] = cache.iterdir()
    assert found == [(str(folder), {"config.json", "tokenizer.json", "tokenizer_config.json"})] * 6
    folder = Path(server.adapter_folder(CPU, 8))
    assert folder.parent == cache and str(folder) == server.adapter_folder(replace(CPU, interface="server"), 8)
    assert server.adapter_folder(CPU, 16) != str(folder)
    told = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    assert (told["r"], told["target_modules"]) == (8, ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"])
    packed = (folder / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(packed[:8], "little")
    found, data = json.loads(packed[8 : 8 + length]), packed[8 + length :]
    assert len(found) == 2 * 2 * 6, "two matrices for each of six layers, twice"
    name = "base_model.model.model.decoder.layers.1.fc1"
    assert [found[f"{name}.lora_{side}.weight"]["shape"] for side in "AB"] == [[8, 128], [512, 8]]
    begins, ends = found[f"{name}.lora_A.weight"]["data_offsets"]
    values = np.frombuffer(data[begins:ends], "float16").astype(float).reshape(8, 128)
    assert 0.004 < values.std() < 0.008 and len({*map(tuple, values.tolist())}) == 8
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(BadUsage, match="lora-8"):
        server.adapter_folder(CPU, 8)
