"""Names of models: each stands for one shape, found where it lies, or the error says what is near and how to get it.
Sizes: of stored weights, of a twin in the catalogue, or of a probe, which is asked once for what nobody knows."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import hostile
import pytest
from campaign import CONFIG, OF_A_MODEL
from refusals import refused

from pytest_slmserve.plan import models
from pytest_slmserve.plan.models import kept_sizes, known_model, model_of, probe_models, stored_parameters, wants_probe
from pytest_slmserve.schema import errors, kv_cache, specs
from pytest_slmserve.schema.models import CATALOGUE, MODELS

OURS = {"opt-tiny", "llama-tiny", "mpt-tiny", "gpt-j-tiny", "bert-tiny", "bert-tiny-reranker"}
VERSIONS = {"vllm": "0.26.0", "torch": "2.11"}
STRANGER = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1537, "vocab_size": 49152,
    "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}  # fmt: skip
FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 65024}
ENTRIES = {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024}
ENTRIES |= {"max_position_embeddings": 2048}
COUNTED = {"parameters": 7_217_189_760, "active": 7_217_189_000, "completed": ENTRIES}
HEAD = {"lm_head.weight": ("BF16", [8, 4])}
STORED = {"model.embed_tokens.weight": ("BF16", [8, 4]), "model.norm.weight": ("F32", [4])}
FETCHED = "hf download me/mine config.json"


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)


def written(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def in_the_hubs_cache(folder, name, config, revision="abc"):
    """Where the Hub's own library puts a snapshot."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = written(repository / "snapshots" / "abc", config)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return snapshot


def test_unknown_model_suggests_near_names():
    assert len(MODELS) > 30 and OURS <= CATALOGUE.keys() == MODELS.keys()
    assert all(model["source"] and model["parameters"] > 0 for model in MODELS.values())
    assert {name for name, model in MODELS.items() if "hub" not in model} == OURS | {"gemma-3-4b-text"}
    restricted = {name for name, model in MODELS.items() if "licence" in model}
    assert restricted >= {"llama-3.2-1b", "gemma-3-1b", "opt-125m", "qwen2.5-3b"}
    assert not restricted & {"qwen3-0.6b", "smollm2-135m"}
    for name in ("opt-1.3b", "facebook/opt-1.3b", "facebook/OPT-1.3B"):
        assert model_of(name) is known_model(name) is CATALOGUE["opt-1.3b"]
    assert model_of("meta-llama/Llama-2-13b-hf") is CATALOGUE["llama-2-13b"]
    assert model_of("llama-2-7b") is not model_of("llama-7b")
    near = {"opt-1.4b": "opt-1.3b", "opt-2b": "opt-2.7b", "OPT1.3B": "opt-1.3b", "facebook/opt-126m": "opt-125m"}
    for typed, meant in (near | {"Qwen2.5-3": "qwen2.5-3b", "lama-7b": "llama-7b"}).items():
        with refused(repr(typed), hint="config.json") as caught:
            model_of(typed)
        named = {name for name in CATALOGUE if f" {name}" in f" {caught.value.hint}".replace(";", " ")}
        assert meant in named and len(named) < 4, typed
    with refused("'gpt-5'") as caught:
        model_of("gpt-5")
    assert all(name in caught.value.hint for name in CATALOGUE) and "hf download" not in caught.value.hint
    assert known_model("gpt-5") is None and known_model("x" * 5000) is None
    with refused("'me/Mine'", hint="`hf download me/Mine config.json --local-dir Mine`") as caught:
        model_of("me/Mine")
    assert "opt-tiny" in caught.value.hint


def test_model_folder_gives_its_shape(tmp_path, monkeypatch):
    folder = written(tmp_path / "mine", STRANGER)
    shape = model_of(f"{folder}/")
    assert (shape.name, shape.source, shape.layers, shape.hidden) == ("mine", "folder", 30, 576)
    assert shape.parameters is shape.active is None and known_model(folder) == shape
    monkeypatch.chdir(folder)
    assert model_of(".").name == "mine"
    base = CATALOGUE["olmoe-1b-7b"]
    tuned = {**dict(base.config), "eos_token_id": 2, "torch_dtype": "float32"}
    shape = model_of(written(tmp_path / "mine", tuned))
    assert (shape.name, shape.source, shape.dtype) == ("mine", "folder", "float16")
    assert (shape.parameters, shape.active) == (base.parameters, base.active) != (None, None)
    assert model_of(written(tmp_path / "longer", {**tuned, "vocab_size": 50305})).parameters is None
    folder = written(tmp_path / "mine", [])
    for text in ("[]", "{", "\xff", "[" * 100_000):
        (tmp_path / "mine" / "config.json").write_text(text, "latin-1")
        with refused(folder, "config.json"):
            model_of(folder)
        assert known_model(folder) is None
    (tmp_path / "mine" / "config.json").unlink()
    with refused(folder, "config.json"):
        model_of(folder)


@pytest.mark.parametrize("entry", OF_A_MODEL)
def test_odd_config_never_breaks_sizes(tmp_path, entry):
    for value in hostile.ODD:
        folder = written(tmp_path / "mine", {**CONFIG, entry: value})
        try:
            model = model_of(folder)
        except errors.BadUsage as error:
            assert "mine" in error.problem and "config.json" in error.problem
            assert error.hint and len(error.problem) < 200
            continue
        for number in (model.kv_bytes_per_token(), model.kv_read_bytes(100), model.attention_width(100)):
            assert number is None or 0 < number < 1e12
        assert model.quantization is None or 0 <= (model.quantization.bits or 0) <= 64
        assert (model.indivisible(3) is None) in (True, False) and model.lm_head > 0


@pytest.mark.parametrize(("variable", "under"), [
    ("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"),
])  # fmt: skip
def test_hub_cache_provides_model_config(tmp_path, monkeypatch, variable, under):
    monkeypatch.setenv(variable, str(tmp_path))
    with refused("me/Mine-1B"):
        model_of("me/Mine-1B")
    snapshot = in_the_hubs_cache(tmp_path / under, "me/Mine-1B", STRANGER, "abc\n")
    assert (model_of("me/Mine-1B").name, model_of("me/Mine-1B").source) == ("mine-1b", "hub")
    assert str(models.config_folder("me/Mine-1B")) == snapshot
    in_the_hubs_cache(tmp_path / under, "me/Mine-1B", STRANGER, "def")
    with refused("me/Mine-1B"):
        model_of("me/Mine-1B")
    assert known_model("me/Mine-1B") is None


def weights(path, tensors):
    told = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **told}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"weights")


def test_stored_weights_are_counted_once(tmp_path):
    """Qwen3-0.6B is stored so: 751,632,384 numbers, of which an engine holds 596,049,920."""

    def counted(tensors):
        weights(tmp_path / "model.safetensors", tensors)
        return [stored_parameters(tmp_path, tied=tied) for tied in (True, False)]

    assert stored_parameters(tmp_path, tied=False) is None
    assert [counted(tensors) for tensors in (STORED, STORED | HEAD, {})] == [[36, 36], [36, 68], [None, None]]
    assert counted(HEAD | {"other.weight": ("F16", [2])}) == [34, 34], "all that there is"
    for odd in ([-8, 4], [10**9, 10**9], ["8"], "84", [1.5, 2], None):
        assert counted({"a.weight": ("F16", odd)}) == [None, None], "no shape"
    assert counted(STORED | {"qweight": ("I32", [4, 4])}) == [None, None], "packed numbers are not weights"
    for tied, number in ((True, 36), (False, 68)):
        folder = written(tmp_path / str(tied), {**STRANGER, "tie_word_embeddings": tied})
        weights(tmp_path / str(tied) / "model.safetensors", STORED | HEAD)
        assert model_of(folder).parameters == number
    index = {"weight_map": {"lm_head.weight": "b.safetensors", "model.norm.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights(tmp_path / "a.safetensors", STORED)
    assert stored_parameters(tmp_path, tied=False) is None
    weights(tmp_path / "b.safetensors", HEAD)
    assert stored_parameters(tmp_path, tied=False) == 68
    too_large = (models.LARGEST_JSON + 1).to_bytes(8, "little") + b"{}" + b" " * 20
    for at, damaged in enumerate((b"", b"\2" + b"\0" * 7 + b"[]", b"\xff" * 20, b"\1" + b"\0" * 7 + b"{", too_large)):
        (tmp_path / str(at)).mkdir()
        (tmp_path / str(at) / "model.safetensors").write_bytes(damaged)
        assert stored_parameters(tmp_path / str(at), tied=False) is None


@pytest.fixture
def falcon(tmp_path):
    """A folder whose configuration leaves sizes to Transformers' defaults."""
    return written(tmp_path / "falcon", FALCON)


@pytest.fixture
def probe(monkeypatch):
    """Answers for the interpreter: `probe.lines` are what it prints, or what is raised; `probe.asked` how it was."""
    told = SimpleNamespace(lines=[], asked=[])

    def run(command, **how):
        told.asked.append((command, how))
        if isinstance(told.lines, Exception):
            raise told.lines
        texts = (line if isinstance(line, str) else json.dumps(line) for line in told.lines)
        return SimpleNamespace(stdout="\n".join(texts).encode())

    monkeypatch.setattr(subprocess, "run", run)
    return told


def test_catalogue_model_needs_no_probe(tmp_path, falcon, probe):
    twin = written(tmp_path / "twin", dict(CATALOGUE["qwen3-0.6b"].config))
    assert not wants_probe(twin, VERSIONS) and not wants_probe("opt-1.3b", VERSIONS)
    assert probe_models(["opt-1.3b", "Qwen/Qwen3-0.6B", twin], "", {}, VERSIONS) == [] and probe.asked == []
    counted = written(tmp_path / "counted", {**FALCON, **ENTRIES})
    [note] = probe_models([counted], "", {}, VERSIONS, is_run=False)
    assert counted in note and not probe.asked
    assert not wants_probe(counted, VERSIONS, is_run=False) and wants_probe("some/model", VERSIONS, is_run=False)
    for model, fact in ((falcon, "num_hidden_layers"), ("falcon-7", "'falcon-7'")):
        with refused(fact):
            probe_models([model], "", {}, VERSIONS)


def test_probe_counts_each_configuration_once(monkeypatch, falcon, probe, tmp_path):
    monkeypatch.setenv("SLM_ENDPOINT_KEY", "hunter2")
    probe.lines = ["a warning of a library", "[1]", "{}", {"model": falcon, "folder": falcon, **COUNTED}]
    assert wants_probe(falcon, VERSIONS)
    assert probe_models([falcon, "opt-125m", falcon], "/my/python", {"A": "1"}, VERSIONS) == []
    shape = model_of(falcon)
    assert (shape.parameters, shape.active, shape.layers) == (7_217_189_760, 7_217_189_000, 32)
    assert kept_sizes(FALCON) == {"versions": VERSIONS, **COUNTED}
    assert not wants_probe(falcon, VERSIONS) and not wants_probe(falcon, {"vllm": None, "torch": None})
    probe_models([falcon], "", {}, VERSIONS)
    probe_models([falcon], "", {}, {**VERSIONS, "vllm": "0.27.0"})
    (command, how), (of_other_versions, _) = probe.asked
    assert (command[0], command[2:], how["timeout"]) == ("/my/python", [falcon], models.PROBE_S)
    assert how["env"]["A"] == "1" and "hunter2" not in how["env"].values() and models.SIZES.is_file()
    assert how["capture_output"] and of_other_versions[0] == sys.executable
    told, other = {"model": falcon, "folder": falcon, **COUNTED}, written(tmp_path / "other", STRANGER)
    probe.lines = [{"model": other, "folder": other, "problem": "too new"}, told]
    [note] = probe_models([other, falcon], "", {}, VERSIONS)
    assert other in note and model_of(falcon).parameters == COUNTED["parameters"]
    models.sizes_file(FALCON).unlink()
    probe.lines = subprocess.TimeoutExpired("python", 15, output=json.dumps(told).encode())
    assert probe_models([falcon], "", {}, VERSIONS) == [] and model_of(falcon).parameters == COUNTED["parameters"]


def test_damaged_size_cache_is_ignored(tmp_path, monkeypatch, probe):
    folder, file = written(tmp_path / "mine", STRANGER), models.sizes_file(STRANGER)
    assert kept_sizes(STRANGER) == {}
    file.parent.mkdir(parents=True)
    file.write_text('{"parameters": 10, "active": 7, "completed": {"sliding_window": 64}}', "utf-8")
    shape = model_of(folder)
    assert (shape.parameters, shape.active, set(shape.windows)) == (10, 7, {64})
    counts = ('"active": -1', '"parameters": "x"', '"parameters": 1e15', '"active": true', '"completed": 5')
    for damaged in ("{", "[]", "[" * 5000, *(f"{{{count}}}" for count in counts)):
        file.write_text(damaged, "utf-8")
        assert kept_sizes(STRANGER) == {} and model_of(folder).parameters is None
    assert file != models.sizes_file(FALCON) and file.is_relative_to(tmp_path / "cache")
    folder = written(tmp_path / "mine", STRANGER)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    probe.lines = [{"model": folder, "folder": folder, **COUNTED}]
    [note] = probe_models([folder], "", {}, VERSIONS)
    assert "cache" in note and model_of(folder).parameters is None


def test_unknown_sizes_want_probe(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    assert wants_probe(written(folder, STRANGER), VERSIONS), "its weights"
    weights(folder / "model.safetensors", STORED)
    assert not wants_probe(str(folder), VERSIONS)
    assert wants_probe(written(folder, {**STRANGER, "num_experts_per_tok": 2}), VERSIONS), "those of a token"
    assert wants_probe(written(folder, {**FALCON, "num_hidden_layers": 2}), VERSIONS), "entries that are not there"
    assert wants_probe("me/mine", VERSIONS), "its configuration"
    with refused("'mine-7'"):
        wants_probe("mine-7", VERSIONS)
    folder = written(tmp_path / "mine", STRANGER)
    weights(tmp_path / "mine" / "model.safetensors", STORED)
    unread = SimpleNamespace(architecture="LlamaForCausalLM", windows=None, parameters=9)
    monkeypatch.setattr(models, "model_of", lambda _: unread)
    for read in ({"LlamaForCausalLM"}, set()):
        monkeypatch.setattr(models.catalogue, "AS_CONFIGURED", read)
        assert wants_probe(folder, VERSIONS) is bool(read)


@pytest.mark.parametrize(("answer", "fact"), [
    ("told", "ValueError: too new"), ([], "/my/python"),
    (FileNotFoundError(2, "No such file"), "/my/python does not run: No such file"),
    (subprocess.TimeoutExpired("python", 15), f"{models.PROBE_S} s"),
], ids=range(4))  # fmt: skip
def test_uncounted_model_is_noted_once(tmp_path, probe, answer, fact):
    falcon = written(tmp_path / "falcon", {**FALCON, **ENTRIES})
    probe.lines = [{"model": falcon, "folder": falcon, "problem": fact}] if answer == "told" else answer
    [note] = probe_models([falcon], "/my/python", {}, VERSIONS)
    assert falcon in note and fact in note and "transformers" in note
    assert model_of(falcon).parameters is None and not wants_probe(falcon, VERSIONS)
    assert probe_models([falcon], "/my/python", {}, VERSIONS) == [note], "it is told again, and not asked again"
    assert len(probe.asked) == 1 and wants_probe(falcon, {**VERSIONS, "torch": "9"})


@pytest.mark.parametrize(("beside", "method", "bits"), [
    ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "modelopt", 8.0),
    ({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "modelopt", 4.5),
])  # fmt: skip
def test_separate_quantization_file_counts(tmp_path, beside, method, bits):
    folder = written(tmp_path / "a", dict(MODELS["llama-3.2-1b"]["config"], extra=1, unknown="x"))
    plain = models.sizes_file(models.read_config(tmp_path / "a"))
    (tmp_path / "a" / "hf_quant_config.json").write_text(json.dumps(beside), "utf-8")
    known = model_of(folder)
    assert known.quantization.method == method and models.sizes_file(models.read_config(tmp_path / "a")) != plain
    spec = specs.EngineSpec(folder, model_facts=replace(known, parameters=10**9), platform="cuda")
    kept = known.lm_head if known.tied else 2 * known.lm_head
    assert kv_cache.weight_bytes(spec, 2) == int(2 * kept + (10**9 - kept) * bits / 8)
    assert kv_cache.kv_layout(spec).value_bytes == (1 if "kv_cache_quant_algo" in str(beside) else 2)
    (tmp_path / "a" / "hf_quant_config.json").write_text("[]", "utf-8")
    with refused("hf_quant_config.json"):
        model_of(folder)


@pytest.mark.parametrize(("kinds", "offline", "told", "hint"), [
    (["GatedRepoError", "RepositoryNotFoundError"], "", "gated", "HF_TOKEN"),
    (["RepositoryNotFoundError"], "", "private", "HF_TOKEN"), (["HFValidationError"], "", "private", "HF_TOKEN"),
    (["EntryNotFoundError"], "", "config.json", "Transformers"),
    (["LocalEntryNotFoundError", "EntryNotFoundError"], "1", "HF_HUB_OFFLINE", FETCHED),
    (["OfflineModeIsEnabled"], "yes", "HF_HUB_OFFLINE", FETCHED), (["TimeoutError"], "", "does not answer", FETCHED),
    (["OfflineModeIsEnabled"], "0", "does not answer", FETCHED),
    (["ModuleNotFoundError"], "", "not installed", "--slm-python"),
], ids=range(9))  # fmt: skip
def test_missing_config_has_its_remedy(monkeypatch, probe, kinds, offline, told, hint):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    error = models.missing("me/mine", kinds)
    assert "me/mine" in error.problem and told in error.problem and hint in error.hint
    assert ("HF_HUB_OFFLINE" in error.problem) is (told == "HF_HUB_OFFLINE")
    probe.lines = [{"model": "me/mine", "missing": kinds}]
    with refused("me/mine", told, hint=hint):
        probe_models(["me/mine"], "", {}, VERSIONS)
