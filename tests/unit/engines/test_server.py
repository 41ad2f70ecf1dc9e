"""What an engine is started with: arguments and environment by its specification, the command line of a server, its
port, and the folder that describes its model, which is the same at every start and whole for all who look. How it
serves and ends is in tests/integration/engines."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from interfaces import (
    stand_in,
)
from tokenizers import Tokenizer

from pytest_slmserve.engines import server
from pytest_slmserve.engines.endpoint import completion
from pytest_slmserve.engines.server import (
    engine_arguments,
    engine_environment,
    model_for,
    server_command,
    tokenizer_files,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import GIB, EngineSpec, Request

CUDA = EngineSpec("opt-1.3b", kv_cache_bytes=3 * GIB, gpu_memory_utilization=0.5)


CPU = EngineSpec("opt-tiny", platform="cpu", kv_cache_bytes=2 * GIB, dtype="bfloat16")


def test_every_limit_is_handed_over():
    arguments = engine_arguments(CUDA, "/model")
    assert arguments["model"] == "/model"
    assert arguments["load_format"] == "dummy"
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "seed", "dtype")
    assert {name: arguments[name] for name in names} == {name: getattr(CUDA, name) for name in names}
    assert arguments["enable_prefix_caching"] is False
    assert arguments["disable_log_stats"] is False  # without it there is no step trace


def test_memory_is_set_by_argument_on_cuda_and_by_environment_on_the_cpu():
    cuda, cpu = engine_arguments(CUDA, "m"), engine_arguments(CPU, "m")
    assert (cuda["gpu_memory_utilization"], cuda["kv_cache_memory_bytes"]) == (0.5, 3 * GIB)
    assert not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(cpu)
    assert engine_environment(CPU, {})["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment(CUDA, {})


def test_what_the_specification_adds_comes_last():
    spec = replace(
        CUDA, load_format="auto", extra=(("max_num_seqs", 7), ("block_size", 32)), env=(("HF_HOME", "/here"),)
    )
    arguments = engine_arguments(spec, "m")
    assert (arguments["load_format"], arguments["max_num_seqs"], arguments["block_size"]) == ("auto", 7, 32)
    assert engine_environment(spec, {"HF_HOME": "/there"})["HF_HOME"] == "/here"


def test_dummy_weights_need_no_network_and_real_ones_may():
    assert engine_environment(CUDA, {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine_environment(replace(CUDA, load_format="auto"), {})


def test_the_workers_folder_comes_first_on_the_path_and_the_rest_is_kept():
    spec = replace(CUDA, env=(("PYTHONPATH", "/theirs"),))
    path = engine_environment(spec, {"PYTHONPATH": "/inherited", "HOME": "/me"})["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(server.WORKER.parent), "/theirs"]
    assert engine_environment(CUDA, {"PYTHONPATH": "/inherited"})["PYTHONPATH"].endswith(":/inherited")
    assert engine_environment(CUDA, {})["PYTHONPATH"] == str(server.WORKER.parent)


def test_what_is_inherited_is_not_changed():
    inherited = {"HOME": "/me", "PYTHONPATH": "/p"}
    assert engine_environment(CUDA, inherited)["HOME"] == "/me"
    assert inherited == {"HOME": "/me", "PYTHONPATH": "/p"}


@pytest.mark.parametrize(
    ("gpu", "gpus", "visible", "wanted"),
    [
        (0, 1, None, None),
        (1, 1, None, "1"),
        (0, 1, "", ""),
        (0, 1, "3", "3"),
        (0, 1, "2,3", "2"),
        (1, 1, "2,3", "3"),
        (0, 1, "GPU-aa,GPU-bb", "GPU-aa"),
        (1, 1, "GPU-aa,GPU-bb", "GPU-bb"),
        (0, 2, None, "0,1"),
        (2, 2, None, "2,3"),
        (0, 2, "3, 5,7", "3,5"),
        (1, 2, "3,5,7", "5,7"),
    ],
)
def test_an_engine_sees_its_gpus_of_those_visible_by_the_order_of_the_bus(gpu, gpus, visible, wanted):
    spec = replace(CUDA, gpu=gpu, tensor_parallel_size=gpus)
    seen = engine_environment(spec, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert seen.get("CUDA_VISIBLE_DEVICES") == wanted
    assert seen.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if gpu or gpus > 1 else None)
    assert engine_arguments(spec, "m").get("tensor_parallel_size", 1) == gpus


def test_engines_of_several_gpus_use_no_multicast_unless_the_records_say_so():
    spec, inherited = replace(CUDA, tensor_parallel_size=2), {"NCCL_NVLS_ENABLE": "1", "HOME": "/me"}
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "VLLM_ALLREDUCE_USE_SYMM_MEM")
    seen = engine_environment(spec, inherited)
    assert [seen[name] for name in names] == ["0", "1", "0"], "whatever was inherited"
    assert engine_environment(CUDA, inherited)["NCCL_NVLS_ENABLE"] == "1", "an engine of one GPU reduces nothing"
    asked = replace(spec, env=(("NCCL_NVLS_ENABLE", "1"),))
    assert engine_environment(asked, {})["NCCL_NVLS_ENABLE"] == "1" and asked.key != spec.key


def test_each_process_of_an_engine_on_the_cpu_has_cores_of_its_own(monkeypatch):
    monkeypatch.setattr(server, "own_cores", lambda: {0, 1, 2, 3, 8})
    spec = replace(CPU, tensor_parallel_size=2)
    assert engine_environment(spec, {})["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert engine_environment(spec, {}, (4, 5))["VLLM_CPU_OMP_THREADS_BIND"] == "4|5"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environment(CPU, {})


def test_visible_gpus_do_not_matter_to_the_cpu():
    assert engine_environment(CPU, {"CUDA_VISIBLE_DEVICES": "2,3"})["CUDA_VISIBLE_DEVICES"] == "2,3"


# A server


SERVED = EngineSpec("opt-1.3b", kv_cache_bytes=3 * GIB, gpu_memory_utilization=0.5, interface="server")


def test_a_server_gets_the_limits_of_the_engine_without_http():
    given = server_command(SERVED, "/model", 8000)
    values = dict(pairwise(given))
    assert (values["--max-num-seqs"], values["--max-num-batched-tokens"], values["--max-model-len"]) == (
        "1024", "8192", "2048",
    )  # fmt: skip
    assert (values["--kv-cache-memory-bytes"], values["--gpu-memory-utilization"]) == (str(3 * GIB), "0.5")
    assert {"--no-enforce-eager", "--no-enable-prefix-caching"} <= set(given)
    assert "--skip-tokenizer-init" not in given, "a server turns tokens into text"


def test_further_arguments_become_flags_of_their_kind():
    spec = replace(SERVED, extra=(("compilation_config", '{"level": 0}'), ("enable_lora", True), ("block_size", 32)))
    spec = replace(spec, extra=(*spec.extra, ("cudagraph_capture_sizes", [1, 2]), ("revision", None)))
    given = server_command(spec, "m", 8000)
    assert json.loads(given[given.index("--compilation-config") + 1]) == {"level": 0}
    assert "--enable-lora" in given and given[given.index("--block-size") + 1] == "32"
    sizes = given.index("--cudagraph-capture-sizes")
    assert given[sizes + 1 : sizes + 3] == ["1", "2"] and "--revision" not in given


def test_one_front_end_is_a_module_several_are_a_matter_of_vllm_serve():
    assert server_command(SERVED, "/m", 8000)[:3] == ["vllm.entrypoints.openai.api_server", "--model", "/m"]
    several = replace(SERVED, extra=(("api_server_count", 4),))
    command = server_command(several, "/m", 8000)
    assert command[:3] == ["vllm.entrypoints.cli.main", "serve", "/m"] and "--model" not in command
    assert command[-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert several.without_http == replace(SERVED, interface="engine") and several.key != SERVED.key


def test_a_request_asks_for_exactly_so_many_tokens():
    asked = completion(Request((3, 5), 7), "a-model")
    assert asked["model"] == "a-model"
    assert (asked["prompt"], asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == ([3, 5], 7, True, 0)
    assert asked["stream"] and asked["stream_options"] == {"include_usage": True}


def test_an_interface_that_is_none_is_refused():
    with pytest.raises(BadUsage, match="'back'"):
        EngineSpec("opt-1.3b", interface="back")
    with pytest.raises(BadUsage):
        EngineSpec("opt-1.3b", platform="simulated", interface="server")


def test_the_interface_is_part_of_the_key():
    assert replace(SERVED, interface="engine").key != SERVED.key
    assert EngineSpec("opt-1.3b").key == "87df620a5220", "archives are known by it"


def test_a_port_is_one_that_no_connection_gets():
    lowest = int(server.OF_CONNECTIONS.read_text().split()[0])
    found = {server.free_port() for _ in range(20)}
    assert len(found) > 10 and all(20_000 <= port < lowest for port in found)


@pytest.mark.parametrize("range_of_connections", ["1024\t65535\n", None])
def test_where_connections_may_have_any_port_the_system_chooses(monkeypatch, tmp_path, range_of_connections):
    if range_of_connections:
        (tmp_path / "range").write_text(range_of_connections)
    monkeypatch.setattr(server, "OF_CONNECTIONS", tmp_path / "range")
    assert server.free_port() >= 1024


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind((server.HOST, server.free_port()))
        taken.listen()
        busy = taken.getsockname()[1]
        monkeypatch.setattr(server.secrets.SystemRandom, "sample", lambda *_: [busy])
        assert server.free_port() not in (0, busy)


def test_vllms_server_is_asked_to_count_where_it_caches():
    caching = replace(stand_in(), interface="server", prefix_caching=True)
    by_argument = replace(stand_in(enable_prefix_caching=True), interface="server")
    for spec, wanted in ((caching, True), (by_argument, True), (replace(stand_in(), interface="server"), False)):
        assert ("--enable-prompt-tokens-details" in server_command(spec, "m", 8000)) is wanted


# Folders that describe a model


TINY = EngineSpec("opt-tiny", platform="cpu", dtype="bfloat16")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pytest-slmserve"


def test_dummy_weights_come_from_a_folder_that_describes_the_model(cache):
    shape = CATALOGUE["opt-125m"]
    folder = Path(model_for(EngineSpec("opt-125m")))
    assert folder.parent == cache and folder.name.startswith("opt-125m-")
    assert json.loads((folder / "config.json").read_text("utf-8")) == dict(shape.config)
    assert not [path for path in folder.iterdir() if path.suffix != ".json"], "there are no weights"


def test_it_is_the_same_at_every_start_and_another_for_another_model():
    here = model_for(TINY)
    assert here == model_for(EngineSpec("opt-tiny", interface="server"))
    other = replace(TINY, model_facts=CATALOGUE["opt-125m"])
    assert here != model_for(other), "a folder of one name may describe something else"


@pytest.mark.parametrize(
    ("model", "wanted"), [("opt-1.3b", "facebook/opt-1.3b"), ("facebook/opt-1.3b", "facebook/opt-1.3b"), ("/m", "/m")]
)
def test_real_weights_come_by_name_or_path(model, wanted, cache):
    assert model_for(EngineSpec(model, load_format="auto")) == wanted
    assert not cache.exists()


@pytest.mark.parametrize("how", ["another shape", "removed", "not text", "a folder"])
def test_a_folder_that_somebody_changed_is_not_measured(cache, how):
    """Its name promises what is in it."""
    config = Path(model_for(TINY)) / "config.json"
    text = config.read_text("utf-8")
    config.unlink()
    match how:
        case "another shape":
            config.write_text(text.replace("{", '{"more": 1, ', 1), "utf-8")
        case "not text":
            config.write_bytes(bytes(range(128, 256)))
        case "a folder":
            config.mkdir()
    with pytest.raises(BadUsage, match="config.json|opt-tiny") as caught:
        model_for(TINY)
    assert caught.value.hint == f"rm -r '{config.parent}'"


def test_starts_at_once_make_one_folder(cache):
    """None ever sees a part of it, and nothing is left beside it."""
    files, found = {"config.json", "tokenizer.json", "tokenizer_config.json"}, []

    def start() -> None:
        folder = Path(model_for(TINY))
        found.append((folder, {path.name for path in folder.iterdir()}))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(found[0][0], files)] * 6
    assert list(cache.iterdir()) == [found[0][0]]


def test_a_cache_that_cannot_be_written_to_is_one_sentence(cache):
    cache.write_text("a file is in the way")
    with pytest.raises(BadUsage, match=r"opt-tiny .*pytest-slmserve: (.|\n)*XDG_CACHE_HOME"):
        model_for(TINY)


def test_there_is_a_word_for_each_token(tmp_path):
    shape = CATALOGUE["opt-tiny"]
    (tmp_path / "tokenizer.json").write_text(tokenizer_files(shape)["tokenizer.json"], "utf-8")
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found.get_vocab_size() == shape.vocabulary
    assert found.encode("t5 t0 t11").ids == [5, 0, 11]
    assert found.decode([5, 0, 11]) == "t5 t0 t11"
