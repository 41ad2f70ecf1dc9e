"""Shapes of decoder models as their `config.json` gives them, and the arithmetic that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_slmserve.schema.errors import BadUsage

# What `config.json` calls a thing, by its usual name, then in older architectures.
OTHER_WORDS = {
    "num_hidden_layers": ("n_layers", "n_layer"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
    "max_position_embeddings": ("max_seq_len", "n_positions"),
}
USUAL_CONTEXT = 2048  # tokens: OPT's positions

# Architectures whose layers keep keys and values in vLLM as the entries that are read here say: compared with the cache
# specifications of the model that vLLM 0.32 makes of each on the meta device. Of any other the engine is asked.
AS_CONFIGURED = frozenset(
    [
        "CohereForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "GPTJForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HyperCLOVAXForCausalLM",
        "LlamaForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "MPTForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoeForCausalLM",
        "OPTForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "GPT2LMHeadModel",
    ]
)
# Architectures whose output layer is the embeddings, if nothing else is said (Transformers 5.19).
TIED = frozenset(
    [
        "CohereForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GPT2LMHeadModel",
        "MPTForCausalLM",
        "OPTForCausalLM",
        "SmolLM3ForCausalLM",
    ]
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}  # of layers, and whether they slide


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model as its `config.json` gives it, as far as speed and memory depend on it.

    parameters: number of weights; active: those that one token is multiplied with. None where nobody has counted them.
    windows: of each layer, the tokens that it looks back, None for all; None instead where vLLM is not known to keep
    keys and values so, as in layers that have a state of their own.
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
    active: int | None = None
    windows: tuple[int | None, ...] | None = None

    @property
    def context(self) -> int:
        """Tokens of the longest request that an engine here takes, unless the workload has longer ones."""
        return min(USUAL_CONTEXT, self.positions)

    @property
    def dtype(self) -> str:
        """Type of the weights as published; float16 where the configuration does not say, and for float32, as vLLM
        has it."""
        config = dict(self.config)
        found = str(config.get("dtype") or config.get("torch_dtype") or "float16")
        return "float16" if found == "float32" else found

    @property
    def lm_head(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * int(dict(self.config).get("word_embed_proj_dim") or self.hidden)

    @property
    def looked_up(self) -> int:
        """Weights of the embeddings that are not the output layer too: of these a token reads one row."""
        return 0 if is_tied(dict(self.config)) else self.lm_head

    @property
    def embeddings(self) -> int:
        """Weights of the embeddings, and of the output layer where it is another."""
        return self.lm_head + self.looked_up

    @property
    def routed_share(self) -> float:
        """Share of the experts that a token is sent to; 1 without experts."""
        config = dict(self.config)
        experts = next((n for word in EXPERTS if (n := config.get(word))), 0)
        return int(config.get("num_experts_per_tok") or experts) / experts if experts else 1.0

    def weight_bytes(self, bytes_per_weight: float = 2) -> int | None:
        """Bytes of all weights, or None where they are not counted."""
        return None if self.parameters is None else int(self.parameters * bytes_per_weight)

    @property
    def kv_groups(self) -> tuple[int, tuple[int | None, ...]] | None:
        """Layers that share a block of the KV cache, and the window of each group of so many, as vLLM groups them
        (`_get_kv_cache_groups_uniform_page_size`). None where that is not known: its releases round differently where
        the kinds of layers are nearly equal in number."""
        if not self.windows:
            return None
        counts = Counter(self.windows)
        fewest, most = min(counts.values()), max(counts.values())
        if fewest < most and 1.25 * fewest <= most < 1.5 * fewest:
            return None
        each = most if most < 1.5 * fewest else fewest
        return each, tuple(window for window, count in counts.items() for _ in range(-(-count // each)))

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int | None:
        """Bytes of one token's keys and values in the layers that share a block, on all `gpus` together: of all layers,
        where all look back equally far. With fewer KV heads than GPUs each of them holds one, so some are held
        twice. None where vLLM's layout is not known."""
        groups = self.kv_groups
        return None if groups is None else groups[0] * self._values_per_layer(gpus) * bytes_per_value

    def kv_read_bytes(self, context: float, bytes_per_value: int = 2, gpus: int = 1) -> float | None:
        """Bytes of keys and values that a token reads with so many before it, over all layers and GPUs; None where what
        the layers keep is not known."""
        seen = self._seen(context)
        return None if seen is None else seen * self._values_per_layer(gpus) * bytes_per_value

    def attention_width(self, context: float) -> float:
        """Query heads x head size x layers; a layer that slides counts with the share of the context that it sees."""
        seen = self._seen(context)
        return self.heads * self.head_size * (self.layers if seen is None else seen / context)

    def _values_per_layer(self, gpus: int) -> int:
        return 2 * max(self.kv_heads, gpus) * self.head_size

    def _seen(self, context: float) -> float | None:
        """Tokens that one token looks back at, in all layers together."""
        if self.windows is None:
            return None
        return sum(context if window is None else min(context, window) for window in self.windows)

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


def shape_from_config(
    name: str,
    config: Mapping[str, Any],
    parameters: int | None = None,
    active: int | None = None,
    completed: Mapping[str, Any] | None = None,
) -> Shape:
    """The shape by a Transformers `config.json`. parameters, active: as counted. completed: what Transformers reads in
    the entries that are not there. Raises BadUsage where a needed entry is missing."""
    entries = {**config, **(config.get("text_config") or {}), **(completed or {})}
    try:
        layers, hidden, heads, positions = (int(_entry(entries, word)) for word in OTHER_WORDS)
        vocabulary, architecture = int(entries["vocab_size"]), str(config["architectures"][0])
    except (KeyError, IndexError, TypeError, ValueError) as missing:
        raise BadUsage(f"{name}: its config.json has no usable {missing}", "a decoder-only model") from None
    return Shape(
        name=name,
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(entries.get("num_key_value_heads") or heads),
        head_size=int(entries.get("head_dim") or hidden // heads),
        vocabulary=vocabulary,
        positions=positions,
        parameters=parameters,
        config=tuple(config.items()),
        active=active or parameters,
        windows=windows_of(entries, layers) if architecture in AS_CONFIGURED else None,
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Is the output layer the embeddings? Transformers writes no entry where that is as usual for the architecture."""
    usual = not TIED.isdisjoint(config.get("architectures") or ())
    return bool(config.get("tie_word_embeddings", config.get("tie_embedding", usual)))


def windows_of(entries: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    """The window of each layer; None where a layer is of another kind than attention, or the window is not told."""
    window = entries.get("sliding_window") if entries.get("use_sliding_window") is not False else None
    kinds = entries.get("layer_types")
    if kinds is None:
        unclear = window and "sliding_window_pattern" in entries  # which layers slide, only Transformers knows
        return None if unclear else (window,) * layers
    if len(kinds) != layers or not set(kinds) <= KINDS.keys() or (window is None and any(KINDS[k] for k in kinds)):
        return None
    return tuple(window if KINDS[kind] else None for kind in kinds)


def _entry(config: Mapping[str, Any], name: str) -> Any:
    """The value of an entry, found by its usual name or by that of an older architecture. Raises KeyError."""
    for word in (name, *OTHER_WORDS[name]):
        if config.get(word) is not None:
            return config[word]
    raise KeyError(name)
