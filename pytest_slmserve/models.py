"""Shapes of dense decoder models and the arithmetic that needs nothing else: parameters, weight and KV bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_slmserve.errors import BadUsage

OPT_VOCABULARY = 50272
OPT_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """What a `config.json` says of a model, as far as speed and memory depend on it.

    parameters: number of weights, or None where the architecture is not one whose weights we can count.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    parameters: int | None
    config: tuple[tuple[str, Any], ...]  # config.json as it is handed to the engine

    def weight_bytes(self, bytes_per_weight: int = 2) -> int | None:
        """Bytes of all weights, or None where they cannot be counted from the shape."""
        return None if self.parameters is None else self.parameters * bytes_per_weight

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int:
        """Bytes of keys and values that one token of context occupies over all layers, on all `gpus` together: with
        fewer KV heads than GPUs each of them holds one, so some are held twice."""
        return 2 * bytes_per_value * self.layers * max(self.kv_heads, gpus) * self.head_size

    def indivisible(self, gpus: int) -> str | None:
        """Why tensor parallelism cannot divide the model among so many GPUs, None if it can: each takes as many heads,
        and as many columns of the feed-forward layers, and KV heads are divided evenly or held as often."""
        config = dict(self.config)
        feed_forward = config.get("ffn_dim") or config.get("intermediate_size") or gpus
        if self.heads % gpus or int(feed_forward) % gpus:
            what = f"{self.heads} heads" if self.heads % gpus else f"feed-forward layers {feed_forward} wide"
            return f"{self.name} has {what}, which {gpus} GPUs cannot divide evenly"
        if self.kv_heads % gpus and gpus % self.kv_heads:
            return f"{self.name} has {self.kv_heads} KV heads, which {gpus} GPUs cannot divide evenly"
        return None


def count_parameters(config: Mapping[str, Any]) -> int | None:
    """Weights of a model of one of the architectures whose layers are known here, else None."""
    match config["architectures"][0]:
        case "OPTForCausalLM":
            return opt_parameters(
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                ffn=config["ffn_dim"],
                embedding=config.get("word_embed_proj_dim") or config["hidden_size"],
                vocabulary=config["vocab_size"],
                positions=config["max_position_embeddings"],
                pre_norm=config.get("do_layer_norm_before", True),
            )
        case "LlamaForCausalLM" | "MistralForCausalLM":
            return llama_parameters(config)
        case "Qwen2ForCausalLM":
            return llama_parameters(config) + qkv_biases(config)
        case _:
            return None


def llama_parameters(config: Mapping[str, Any]) -> int:
    """Weights of a Llama-like model: gated feed-forward, no biases, RMS norms (arXiv:2302.13971)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_size * (heads + kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(embeddings + config["num_hidden_layers"] * layer + hidden)


def qkv_biases(config: Mapping[str, Any]) -> int:
    """What Qwen2 has beside a Llama-like model: biases of queries, keys and values (arXiv:2407.10671)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return int(config["num_hidden_layers"] * (hidden // heads) * (heads + 2 * kv_heads))


def opt_parameters(
    *, layers: int, hidden: int, ffn: int, embedding: int, vocabulary: int, positions: int, pre_norm: bool
) -> int:
    """Weights of an OPT model with tied embeddings; agrees with the counts of the published checkpoints."""
    embeddings = vocabulary * embedding + (positions + 2) * hidden
    projections = 2 * embedding * hidden if embedding != hidden else 0
    attention = 4 * (hidden * hidden + hidden)
    feed_forward = 2 * hidden * ffn + ffn + hidden
    norms = 4 * hidden
    return embeddings + projections + layers * (attention + feed_forward + norms) + (2 * hidden if pre_norm else 0)


def _opt(
    name: str, layers: int, hidden: int, heads: int, *, embedding: int | None = None, pre_norm: bool = True
) -> Shape:
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "vocab_size": OPT_VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "max_position_embeddings": OPT_POSITIONS,
        "word_embed_proj_dim": embedding or hidden,
        "do_layer_norm_before": pre_norm,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "torch_dtype": "float16",
    }
    return shape_from_config(name, config)


def shape_from_config(name: str, config: Mapping[str, Any]) -> Shape:
    """Read a Transformers `config.json` of a dense decoder. Raises BadUsage where a needed entry is missing."""
    try:
        layers, hidden, heads = (int(config[k]) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        vocabulary, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        architecture, parameters = str(config["architectures"][0]), count_parameters(config)
    except (KeyError, IndexError, TypeError, ValueError) as missing:
        raise BadUsage(f"{name}: its config.json has no usable {missing}", "a dense decoder-only model") from None
    return Shape(
        name=name,
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        vocabulary=vocabulary,
        positions=positions,
        parameters=parameters,
        config=tuple(config.items()),
    )


def _qwen2(name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> Shape:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "torch_dtype": "bfloat16",
    }
    return shape_from_config(name, config)


# Zhang et al. 2022 (arXiv:2205.01068), table 1, and Qwen2.5 (arXiv:2412.15115), table 1; the configurations are those
# of the published checkpoints. opt-tiny is ours: small enough that two CPU cores serve it fast enough to see a plateau.
CATALOGUE: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _opt("opt-tiny", 2, 128, 4),
        _opt("opt-125m", 12, 768, 12),
        _opt("opt-350m", 24, 1024, 16, embedding=512, pre_norm=False),
        _opt("opt-1.3b", 24, 2048, 32),
        _opt("opt-2.7b", 32, 2560, 32),
        _opt("opt-6.7b", 32, 4096, 32),
        _opt("opt-13b", 40, 5120, 40),
        _qwen2("qwen2.5-3b", 36, 2048, 16, 2, 11008),
    )
}


def short_name(model: str) -> str:
    """A model's name for people: "opt-1.3b" for "facebook/opt-1.3b", the folder's name for a path."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def catalogue_name(model: str) -> str | None:
    """The name under which the catalogue has `model`, or None: a folder may be called as it likes."""
    wanted = model.lower()
    return next((name for name in CATALOGUE if wanted in (name, _on_hub(name).lower())), None)


def _on_hub(name: str) -> str:
    return {"qwen2.5-3b": "Qwen/Qwen2.5-3B"}.get(name, f"facebook/{name}")


def hub_name(model: str) -> str:
    """Where real weights come from: the Hub's name of a catalogue model; a folder stays what it is."""
    name = catalogue_name(model)
    return _on_hub(name) if name else model


def shape_of(model: str) -> Shape:
    """The shape of a catalogue name ("opt-1.3b", "facebook/opt-1.3b") or of a local folder with a config.json."""
    if name := catalogue_name(model):
        return CATALOGUE[name]
    config = Path(model) / "config.json"
    if config.is_file():
        try:
            return shape_from_config(Path(model).resolve().name, json.loads(config.read_text("utf-8")))
        except json.JSONDecodeError as error:
            raise BadUsage(f"{config} is not JSON: {error}", "the config.json that came with the model") from None
    raise BadUsage(f"unknown model {model!r}", f"one of {', '.join(CATALOGUE)}, or a folder that holds a config.json")
