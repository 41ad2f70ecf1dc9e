"""Shapes of dense decoder models and the arithmetic that needs nothing else: parameters, weight and KV bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.errors import BadUsage

# What `config.json` calls a thing, by its usual name, then in older architectures.
OTHER_WORDS = {
    "num_hidden_layers": ("n_layers", "n_layer"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
    "max_position_embeddings": ("max_seq_len", "n_positions"),
}
OPT_VOCABULARY = 50272
OPT_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model as its `config.json` gives it, as far as speed and memory depend on it.

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

    @property
    def context(self) -> int:
        """Tokens of the longest request that an engine here takes: OPT's positions, of all that have as many."""
        return min(OPT_POSITIONS, self.positions)

    def weight_bytes(self, bytes_per_weight: int = 2) -> int | None:
        """Bytes of all weights, or None where they cannot be counted from the shape."""
        return None if self.parameters is None else self.parameters * bytes_per_weight

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int:
        """Bytes of keys and values that one token of context occupies over all layers, on all `gpus` together: with
        fewer KV heads than GPUs each of them holds one, so some are held twice."""
        return 2 * bytes_per_value * self.layers * max(self.kv_heads, gpus) * self.head_size

    def indivisible(self, gpus: int) -> str | None:
        """The reason why tensor parallelism cannot divide the model among so many GPUs; None if it can. Each GPU takes
        equally many heads and columns of the feed-forward layers. KV heads are divided evenly, or each is held by
        equally many GPUs."""
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
            return opt_parameters(config)
        case "LlamaForCausalLM" | "MistralForCausalLM":
            return llama_parameters(config)
        case "Qwen2ForCausalLM":
            return llama_parameters(config) + qkv_biases(config)
        case "GPTJForCausalLM":
            return gptj_parameters(config)
        case "MPTForCausalLM":
            return mpt_parameters(config)
        case _:
            return None


def gptj_parameters(config: Mapping[str, Any]) -> int:
    """Weights of a GPT-J: rotary positions, attention without biases, one norm a layer, an output layer of its own with
    a bias. The checkpoint of 6B has 6,050,882,784, as Transformers counts them."""
    hidden, vocabulary = config["n_embd"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * hidden
    layer = 4 * hidden * hidden + 2 * hidden * inner + inner + hidden + 2 * hidden
    return int(2 * vocabulary * hidden + vocabulary + config["n_layer"] * layer + 2 * hidden)


def mpt_parameters(config: Mapping[str, Any]) -> int:
    """Weights of an MPT without biases: ALiBi, tied embeddings. The checkpoint of 7B has 6,649,286,656."""
    hidden = config["d_model"]
    layer = (4 + 2 * config["expansion_ratio"]) * hidden * hidden + 2 * hidden
    return int(config["vocab_size"] * hidden + config["n_layers"] * layer + hidden)


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
    """Weights of Qwen2 beside those of a Llama-like model: biases of queries, keys and values (arXiv:2407.10671)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return int(config["num_hidden_layers"] * (hidden // heads) * (heads + 2 * kv_heads))


def opt_parameters(config: Mapping[str, Any]) -> int:
    """Weights of an OPT model with tied embeddings; agrees with the counts of the published checkpoints."""
    hidden, ffn = config["hidden_size"], config["ffn_dim"]
    embedding = config.get("word_embed_proj_dim") or hidden
    embeddings = config["vocab_size"] * embedding + (config["max_position_embeddings"] + 2) * hidden
    projections = 2 * embedding * hidden if embedding != hidden else 0
    attention = 4 * (hidden * hidden + hidden)
    feed_forward = 2 * hidden * ffn + ffn + hidden
    layers = config["num_hidden_layers"] * (attention + feed_forward + 4 * hidden)
    last_norm = 2 * hidden if config.get("do_layer_norm_before", True) else 0
    return int(embeddings + projections + layers + last_norm)


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
        layers, hidden, heads, positions = (int(_entry(config, name)) for name in OTHER_WORDS)
        vocabulary = int(config["vocab_size"])
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


def _entry(config: Mapping[str, Any], name: str) -> Any:
    """The value of an entry, found by its usual name or by that of an older architecture. Raises KeyError."""
    for word in (name, *OTHER_WORDS[name]):
        if word in config:
            return config[word]
    raise KeyError(name)


def _llama(
    name: str, layers: int, hidden: int, heads: int, intermediate: int, *, positions: int = 2048, epsilon: float = 1e-6
) -> Shape:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
    return shape_from_config(name, config)


def _mpt(name: str, layers: int, hidden: int, heads: int) -> Shape:
    config = {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "vocab_size": 50432,
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads,
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "embedding_fraction": 1.0,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "prefix_lm": False},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float16",
    }
    return shape_from_config(name, config)


def _gptj(name: str, layers: int, hidden: int, heads: int, rotary: int) -> Shape:
    config = {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "activation_function": "gelu_new",
        "vocab_size": 50400,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": None,
        "n_positions": 2048,
        "rotary_dim": rotary,
        "tie_word_embeddings": False,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "torch_dtype": "float16",
    }
    return shape_from_config(name, config)


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


# Zhang et al. 2022 (arXiv:2205.01068), table 1; Qwen2.5 (arXiv:2412.15115), table 1; LLaMA (arXiv:2302.13971), table 2;
# LLaMA-2, MPT-7B and GPT-J-6B: the configurations that their publishers put beside the checkpoints (mosaicml/mpt-7b,
# EleutherAI/gpt-j-6b). The tiny ones are ours: small enough that two CPU cores serve them fast enough to see a plateau.
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
        _llama("llama-tiny", 2, 128, 4, 344),
        _llama("llama-7b", 32, 4096, 32, 11008),
        _llama("llama-2-7b", 32, 4096, 32, 11008, positions=4096, epsilon=1e-5),
        _llama("llama-2-13b", 40, 5120, 40, 13824, positions=4096, epsilon=1e-5),
        _mpt("mpt-tiny", 2, 128, 4),
        _mpt("mpt-7b", 32, 4096, 32),
        _gptj("gpt-j-tiny", 2, 128, 4, 16),
        _gptj("gpt-j-6b", 28, 4096, 16, 64),
    )
}

ON_HUB = {
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "llama-7b": "huggyllama/llama-7b",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "mpt-7b": "mosaicml/mpt-7b",
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
}


def short_name(model: str) -> str:
    """A model's name for people: "opt-1.3b" for "facebook/opt-1.3b", the folder's name for a path."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def catalogue_name(model: str) -> str | None:
    """The name under which the catalogue has `model`, or None: a folder may be called as it likes."""
    return KNOWN_AS.get(model.lower())


def _on_hub(name: str) -> str:
    return ON_HUB.get(name, f"facebook/{name}")


KNOWN_AS = {known: name for name in CATALOGUE for known in (name, _on_hub(name).lower())}


def hub_name(model: str) -> str:
    """The name to load real weights by: the Hub's, of a catalogue model; any other name, such as a folder, as it is."""
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
    if Path(model).is_dir():
        raise BadUsage(f"the folder {model} holds no config.json", "the config.json that came with the model")
    raise BadUsage(f"unknown model {model!r}", _instead_of(model))


def _instead_of(model: str) -> str:
    """What to type in place of an unknown name: near ones first, then how a folder is made of a name on the Hub."""
    known = f"one of {', '.join(CATALOGUE)}, or a folder that holds a config.json"
    near = dict.fromkeys(KNOWN_AS[each] for each in get_close_matches(model.lower(), KNOWN_AS, cutoff=0.75))
    suggestions = [" or ".join(near)] if near else []
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        own = model.rsplit("/", 1)[-1]
        suggestions.append(f"`hf download {model} config.json --local-dir {own}` and the folder {own}")
    return "; ".join([*suggestions, known])
