"""The probe of sizes, on Transformers where it is installed: one process counts all models of these tests."""

import ast
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from strategies import H200

from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan import models
from pytest_slmserve.plan.models import SIZES, model_of
from pytest_slmserve.plan.planner import check_length, engine_spec
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.models import AS_CONFIGURED, CATALOGUE, MODELS, count_parameters, model_from_config
from pytest_slmserve.schema.records import Environment

if find_spec("transformers") is None or find_spec("torch") is None:
    pytest.skip("needs Transformers and torch", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("sizes of models")  # one process counts them all
LAYERS = 4


def table_of(package: str, file: str, name: str) -> ast.expr | None:
    """A table of an installed package, which is read and not imported: no torch in this process; None without it."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    for node in ast.parse(Path(found.submodule_search_locations[0], file).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return node.value
    return None


def architectures() -> dict[str, str]:
    """Architectures that generate text by vLLM's registry, with their types by Transformers' table of such models."""
    generating = table_of("vllm", "model_executor/models/registry.py", "_TEXT_GENERATION_MODELS")
    types = table_of("transformers", "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if generating is None or not isinstance(types, ast.Call):
        return {}
    pairs = ast.literal_eval(types.args[0])
    known = {name: kind for kind, name in reversed(pairs) if isinstance(name, str)}
    return {name: known[name] for name in ast.literal_eval(generating) if name in known}


ARCHITECTURES = architectures()
# The text model of a small Gemma 4, whose heads are larger in the layers without a window.
GEMMA_4 = {
    "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 20,
    "sliding_window": 512, "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip


# Of models that the unit tests count by arithmetic, to the digit, the smallest of each architecture: Transformers takes
# seconds for all of them.
BY_SIZE = sorted(CATALOGUE, key=lambda name: -CATALOGUE[name].parameters)
SMALLEST = {CATALOGUE[name].architecture: name for name in BY_SIZE}
ASKED = [name for name in CATALOGUE if name in SMALLEST.values() or count_parameters(MODELS[name]["config"]) is None]
OF_GEMMA_4 = {"architectures": ["Gemma4ForConditionalGeneration"]}


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, dict]:
    """The line of models of the catalogue, and of an all but empty configuration of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    configs = {name: MODELS[name]["config"] for name in ASKED}
    few = {"num_hidden_layers": LAYERS}  # of the largest, hundreds of billions of weights take seconds to describe
    configs |= {name: {"architectures": [name], "model_type": kind, **few} for name, kind in ARCHITECTURES.items()}
    configs["gemma-4"] = OF_GEMMA_4 | {"model_type": "gemma4", "text_config": GEMMA_4}
    configs["stranger"] = {"model_type": "from-another-planet"}
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), "utf-8")
    command = [sys.executable, str(SIZES), *(str(folder / name) for name in configs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {Path(line["model"]).name: line for line in lines}


@pytest.mark.parametrize("name", ASKED)
def test_counted_weights_match_catalogue(counted, name):
    told, ours = counted[name], CATALOGUE[name]
    assert (told.get("parameters"), told.get("active")) == (ours.parameters, ours.active), told
    completed = model_from_config(ours.name, MODELS[name]["config"], 0, 0, told["completed"])
    for field in ("layers", "hidden", "heads", "kv_heads", "head_size", "vocabulary", "positions", "windows"):
        assert getattr(completed, field) == getattr(ours, field), field


def outcome(folder: Path) -> str:
    """What a run on a GPU and a simulated one make of the model: "planned", "asks the engine", or why it is refused."""
    try:
        shape = model_of(str(folder))
        length = min(shape.positions, 512) // 2
        asked = read_options({"input_len": f"{length}", "output_len": f"{length}"}, {}, {})
        spec = engine_spec(asked, "cuda", str(folder), replace(H200, gpu_memory_bytes=1 << 44))
        simulated = engine_spec(asked, "simulated", str(folder), Environment(gpu_memory_bytes=1 << 44))
        for each in (spec, simulated):
            check_length(each.model, 2 * length, each.max_model_len)
    except BadUsage as error:
        return error.problem
    return "asks the engine" if kv_capacity(spec, 2 * length) is None else "planned"


@pytest.mark.skipif(not ARCHITECTURES, reason="needs vLLM's registry of models")
def test_every_architecture_is_classified(counted, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(counted["stranger"]["model"]).parent / "cache"))
    monkeypatch.setattr(models, "_told", lambda models, python, env: {m: counted[Path(m).name] for m in models})
    outcomes: dict[str, list[str]] = {}
    for name in ARCHITECTURES:
        folder = Path(counted[name]["model"])
        with suppress(BadUsage):  # where not even Transformers fills in what is needed
            models.probe_models([str(folder)], "", {}, {})
        outcomes.setdefault(outcome(folder), []).append(name)
    planned, asked = outcomes.pop("planned"), outcomes.pop("asks the engine")
    assert len(planned) >= 20 and set(planned) <= AS_CONFIGURED.keys()
    assert {"FalconForCausalLM", "JambaForCausalLM", "DeepseekV2ForCausalLM"} <= set(asked)
    assert all("\n" not in why and len(why.split()) <= 25 for why in outcomes), outcomes
    assert sum(map(len, outcomes.values())) <= len(ARCHITECTURES) / 4, outcomes


def test_mixed_head_sizes_are_counted(counted):
    """By hand: tables of 262,144 tokens, once of the hidden width and once of 256 for each layer, are most of it."""
    told = counted["gemma-4"]
    assert told["parameters"] == 4_055_259_904 > 262_144 * (1536 + 256 * 35)
    assert "head_dim" not in told["completed"], "one number for all layers would be wrong"
    found = model_from_config("gemma-4", OF_GEMMA_4 | GEMMA_4, told["parameters"])
    assert found.kv_bytes_per_token() is None and found.parameters == told["parameters"]
    assert counted["stranger"]["problem"].startswith("ValueError: ") and "parameters" not in counted["stranger"]
