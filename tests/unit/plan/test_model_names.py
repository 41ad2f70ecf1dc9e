"""Names of models, and the catalogue: each name stands for one shape, and a configuration is found where it lies."""

from __future__ import annotations

import json

import pytest

from pytest_slmserve.plan.models import kept_sizes, model_of, sizes_file
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import CATALOGUE, MODELS, hub_name, short_name

OURS = {"opt-tiny", "llama-tiny", "mpt-tiny", "gpt-j-tiny"}
TODAY = """qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b llama-3.2-1b llama-3.2-3b
    llama-3.1-8b smollm2-135m smollm2-360m smollm2-1.7b smollm3-3b gemma-3-270m gemma-3-1b gemma-3-4b-text phi-4-mini
    granite-4.0-350m granite-4.0-1b granite-4.0-micro granite-4.0-h-350m olmo-2-1b olmo-2-7b mistral-7b lfm2-350m
    lfm2-1.2b olmoe-1b-7b"""
STRANGER = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1537,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)


def written(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def test_the_models_of_today_and_of_the_papers_are_there():
    papers = {"opt-125m", "opt-1.3b", "opt-2.7b", "llama-7b", "gpt-j-6b", "mpt-7b"}
    assert set(TODAY.split()) | papers | OURS <= CATALOGUE.keys()


@pytest.mark.parametrize("name", MODELS)
def test_each_entry_has_a_source_and_a_name_on_the_hub(name):
    model = MODELS[name]
    assert model["source"] and model["parameters"] > 0
    assert ("hub" in model) is (name not in OURS | {"gemma-3-4b-text"})
    assert hub_name(name) == model.get("hub", name)


def test_a_licence_is_told_where_it_restricts_the_use():
    restricted = {name for name, model in MODELS.items() if "licence" in model}
    assert restricted >= {"llama-3.2-1b", "gemma-3-1b", "opt-125m", "qwen2.5-3b"}
    assert not restricted & {"qwen3-0.6b", "smollm2-135m"}


@pytest.mark.parametrize("model", ["opt-1.3b", "facebook/opt-1.3b", "facebook/OPT-1.3B"])
def test_names_of_the_catalogue(model):
    assert model_of(model) is CATALOGUE["opt-1.3b"]


def test_a_second_llama_is_not_the_first():
    assert model_of("meta-llama/Llama-2-13b-hf") is CATALOGUE["llama-2-13b"]
    assert model_of("llama-2-7b") is not model_of("llama-7b")


def test_a_folder_with_a_configuration(tmp_path):
    folder = written(tmp_path / "mine", STRANGER)
    assert (model_of(str(folder)).name, model_of(f"{folder}/").parameters) == ("mine", None)
    (folder / "config.json").write_text("{", "utf-8")
    with pytest.raises(BadUsage, match="is not JSON"):
        model_of(str(folder))
    (folder / "config.json").write_text("[]", "utf-8")
    with pytest.raises(BadUsage, match="no configuration of a model"):
        model_of(str(folder))


def test_a_fine_tuned_model_has_as_many_weights_as_its_base(tmp_path):
    config = dict(CATALOGUE["smollm2-135m"].config)
    shape = model_of(str(written(tmp_path / "mine", {**config, "eos_token_id": 2, "torch_dtype": "float32"})))
    assert (shape.name, shape.parameters, shape.dtype) == ("mine", 134_515_008, "float16")
    assert model_of(str(written(tmp_path / "longer", {**config, "vocab_size": 49153}))).parameters is None


def test_what_a_probe_counted_is_read_where_it_was_kept(tmp_path):
    folder = written(tmp_path / "mine", STRANGER)
    assert kept_sizes(STRANGER) == {}
    file = sizes_file(STRANGER)
    file.parent.mkdir(parents=True)
    file.write_text('{"parameters": 10, "active": 7, "completed": {"sliding_window": 64}}', "utf-8")
    shape = model_of(str(folder))
    assert (shape.parameters, shape.active, set(shape.windows)) == (10, 7, {64})
    file.write_text("{", "utf-8")
    assert model_of(str(folder)).parameters is None, "a damaged cache is none"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_name_on_the_hub_is_found_in_the_hubs_cache(tmp_path, monkeypatch, variable):
    under = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    monkeypatch.setenv(variable, str(tmp_path))
    repository = tmp_path / under / "models--me--Mine-1B"
    written(repository / "snapshots" / "abc", STRANGER)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert (model_of("me/Mine-1B").name, model_of("me/Mine-1B").hidden) == ("mine-1b", 576)
    (repository / "refs" / "main").write_text("def")
    with pytest.raises(BadUsage, match="unknown model 'me/Mine-1B'"):
        model_of("me/Mine-1B")


def test_an_unknown_model_is_told_what_there_is():
    with pytest.raises(BadUsage, match=r"unknown model 'gpt-5'\n  try: one of opt-tiny, opt-125m"):
        model_of("gpt-5")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("opt-1.4b", "opt-1.3b"),
        ("opt-2b", "opt-2.7b"),
        ("OPT1.3B", "opt-1.3b"),
        ("facebook/opt-126m", "opt-125m"),
        ("Qwen2.5-3", "qwen2.5-3b"),
        ("lama-7b", "llama-7b"),
    ],
)
def test_a_near_miss_gets_a_suggestion(typed, meant):
    with pytest.raises(BadUsage, match=rf"\n  try: {meant}\b[^,]*; a folder that holds a config.json$"):
        model_of(typed)


def test_a_name_on_the_hub_gets_the_command_that_makes_a_folder_of_it():
    command = "`hf download me/Mine config.json --local-dir Mine` and the folder Mine"
    with pytest.raises(BadUsage) as error:
        model_of("me/Mine")
    assert error.value.hint.startswith(f"{command}; one of opt-tiny")


def test_a_folder_without_a_config_says_what_is_missing(tmp_path):
    with pytest.raises(BadUsage, match=rf"^the folder {tmp_path} holds no config.json\n"):
        model_of(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "name"), [("facebook/OPT-1.3B", "opt-1.3b"), ("/models/Mine/", "mine"), ("opt-tiny", "opt-tiny")]
)
def test_short_names(model, name):
    assert short_name(model) == name


@pytest.mark.parametrize(("model", "name"), [("opt-125m", "facebook/opt-125m"), ("me/mine", "me/mine")])
def test_names_on_the_hub(model, name):
    assert hub_name(model) == name
