"""Models as their `config.json` describes them, and the catalogue.

`models.json` has for each model its name on the Hub, the source of its configuration, its license if that restricts its
use, its number of weights, and its configuration. `architectures.json` has the architectures whose KV cache is known.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pytest_slmserve.schema.errors import BadUsage, Kind

# Usual names of entries of `config.json`, with their names in older architectures; and the largest possible values.
OTHER_WORDS = {
    "num_hidden_layers": ("n_layers", "n_layer", "num_layers"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("max_seq_len", "n_positions", "seq_length", "max_sequence_length"),
}
MOST = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 18,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
}
# Largest values of optional entries, which may also be 0.
MOST_IF_ANY = {
    **dict.fromkeys(("ffn_dim", "intermediate_size"), 1 << 20),
    "word_embed_proj_dim": 1 << 18,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1 << 14),
    "sliding_window": 1 << 30,
}
MOST_WEIGHTS, MOST_BITS, MOST_PADDING = 10**14, 64, 16
HAVE_STATE = {"state_size", "d_state", "ssm_cfg", "attention_hidden_size"}  # of models that may have no heads
ModelSource = Literal["catalogue", "folder", "hub"]  # hub: the Hub's cache on this host
USUAL_CONTEXT = 2048  # tokens: OPT's positions

# Architectures whose KV cache in vLLM follows from the entries that are read here: compared with the cache
# specifications of the models that vLLM 0.32 makes on the meta device. Engines report that of other architectures.
# True: the output layer is the embeddings by default (Transformers 5.19).
AS_CONFIGURED: dict[str, bool] = json.loads((Path(__file__).parent / "architectures.json").read_text("utf-8"))
# Architectures whose layers all slide if `config.json` has a window and does not say which layers slide.
ALL_SLIDE = {"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"}
# Architectures that generate no text (as in vLLM's registry of pooling models): some return a vector, some a score for
# each class. The tasks of the other heads, such as filling gaps, are not measured here.
EMBEDS, SCORES = re.compile(r".*(?<!LMHead)(?<!ChatGLM)Model"), re.compile(r".*ForSequenceClassification")
OTHER_HEADS = re.compile(r".*(For\w*Classification|ForMaskedLM|ForQuestionAnswering|For\w*Reward\w*)")
ENCODERS = re.compile(r".*(bert|GteNew).*", re.IGNORECASE)  # attention in both directions needs no KV cache
# Architectures for which LoRA adapters are made here, and the number of tables (embeddings, output layer) with a part
# in vLLM's slot for an adapter, used or not: compared with the slots that vLLM 0.32 makes for a small model.
ADAPTED = {
    **dict.fromkeys(("OPTForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"), 0),
    **dict.fromkeys(("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"), 0),
    **{"LlamaForCausalLM": 2, "Qwen3ForCausalLM": 2, "GraniteForCausalLM": 2, "Olmo2ForCausalLM": 1},
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}  # of layers, and whether they slide


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a checkpoint, from its `quantization_config`.

    Attributes:
        bits: of a weight without its scale; None if unknown or different between layers.
        group_size: weights that share a scale of `scale_bits`; None if the scale is negligible.
        zero_points: each group has one.
        fp8_inputs: activations are 8-bit floats, too.
        kv_cache_dtype: meaning of vLLM's "auto": "fp8" if the checkpoint has scales for it, "" for another type.
    """

    method: str | None = None
    bits: float | None = None
    group_size: int | None = None
    zero_points: bool = False
    fp8_inputs: bool = False
    kv_cache_dtype: str = "auto"
    scale_bits: int = 16


@dataclass(frozen=True, slots=True)
class Model:
    """Model as its `config.json` describes it, as far as speed and memory depend on it.

    A record contains it, and so means the same on every host.

    Attributes:
        parameters: number of weights, None if unknown.
        active: weights that one token is multiplied with, None if unknown.
        windows: tokens that each layer looks back, None for all; None instead of the tuple if vLLM's layout is unknown.
        dtype: type of the weights as vLLM loads them by default.
        embedding_width: numbers in a row of the embeddings.
        tied: the output layer is the embeddings.
        feed_forward: width of these layers, None if not given.
        config: `config.json` for the engine; not in records.
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
    active: int | None = None
    windows: tuple[int | None, ...] | None = None
    dtype: str = "float16"
    embedding_width: int = 0
    tied: bool = False
    feed_forward: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    quantization: Quantization | None = None
    source: ModelSource = "catalogue"
    config: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of requests that the model serves, its own first; vLLM makes an embedding model of any decoder."""
        if SCORES.fullmatch(self.architecture):
            return "rerank", "classify"
        if EMBEDS.fullmatch(self.architecture):
            return ("embed",)
        return "generate", "embed"

    @property
    def is_encoder(self) -> bool:
        """True if tokens attend in both directions, so that there is no KV cache."""
        return self.windows == ()

    @property
    def context(self) -> int:
        """Longest request in tokens, unless the workload has longer ones."""
        return min(USUAL_CONTEXT, self.positions)

    @property
    def lm_head(self) -> int:
        """Number of weights of the output layer, which is also that of the embeddings."""
        return self.vocabulary * self.embedding_width

    def weight_bytes(self, bytes_per_weight: float = 2) -> int | None:
        """Return the bytes of all weights, or None if they are not counted."""
        return None if self.parameters is None else int(self.parameters * bytes_per_weight)

    @property
    def adapted(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each layer that a LoRA adapter changes, by PEFT's names; empty if none are made."""
        if self.architecture not in ADAPTED or not self.feed_forward:
            return {}
        is_opt, hidden, inner = self.architecture == "OPTForCausalLM", self.hidden, self.feed_forward
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        layer = {f"self_attn.{name}_proj": (hidden, width) for name, width in zip("qkv", (queries, keys, keys))}
        layer[f"self_attn.{'out' if is_opt else 'o'}_proj"] = queries, hidden
        if is_opt:
            layer |= {"fc1": (hidden, inner), "fc2": (inner, hidden)}
        else:
            layer |= {f"mlp.{name}_proj": (hidden, inner) for name in ("gate", "up")}
            layer["mlp.down_proj"] = inner, hidden
        where = "model.decoder.layers" if is_opt else "model.layers"
        return {f"{where}.{i}.{name}": sizes for i in range(self.layers) for name, sizes in layer.items()}

    def adapter_slot_bytes(self, rank: int, bytes_per_value: int = 2) -> int:
        """Return the bytes of vLLM's slot for an adapter of at most this rank, on one GPU."""
        tables = ADAPTED.get(self.architecture, 0) * (self.vocabulary + self.hidden)
        return rank * bytes_per_value * (sum(map(sum, self.adapted.values())) + tables)

    @property
    def kv_groups(self) -> tuple[int, tuple[int | None, ...]] | None:
        """Number of layers that share a block, and the window of each group of this size; None if unknown.

        It follows vLLM (`_get_kv_cache_groups_uniform_page_size`), whose releases round differently if the kinds of
        layers are nearly equal in number.
        """
        if not self.windows:
            return None
        counts = Counter(self.windows)
        fewest, most = min(counts.values()), max(counts.values())
        if fewest < most and 1.25 * fewest <= most < 1.5 * fewest:
            return None
        each = most if most < 1.5 * fewest else fewest
        return each, tuple(window for window, count in counts.items() for _ in range(-(-count // each)))

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int | None:
        """Return the bytes of a token in the layers that share a block, over all GPUs, or None if unknown.

        If there are fewer KV heads than GPUs, some heads are stored twice.
        """
        groups = self.kv_groups
        return None if groups is None else groups[0] * 2 * max(self.kv_heads, gpus) * self.head_size * bytes_per_value

    def kv_read_bytes(self, context: float, bytes_per_value: int = 2, gpus: int = 1) -> float | None:
        """Return the bytes of keys and values that a token reads with `context` before it, over all GPUs."""
        seen = self._seen(context)
        return None if seen is None else seen * 2 * max(self.kv_heads, gpus) * self.head_size * bytes_per_value

    def attention_width(self, context: float) -> float:
        """Return query heads x head size x layers, with sliding layers weighted by the visible share of the context."""
        seen = self._seen(context) if self.windows else None
        return self.heads * self.head_size * (self.layers if seen is None else seen / context)

    def _seen(self, context: float) -> float | None:
        if self.windows is None:
            return None
        return sum(context if window is None else min(context, window) for window in self.windows)

    def indivisible(self, gpus: int) -> str | None:
        """Return why tensor parallelism cannot divide the model among these GPUs, or None if it can."""
        if self.heads % gpus or (self.feed_forward or gpus) % gpus:
            what = f"{self.heads} heads" if self.heads % gpus else f"feed-forward layers {self.feed_forward} wide"
            return f"{self.name} has {what}, which {gpus} GPUs cannot divide evenly"
        if self.kv_heads % gpus and gpus % self.kv_heads:
            return f"{self.name} has {self.kv_heads} KV heads, which {gpus} GPUs cannot divide evenly"
        return None


def model_from_config(
    name: str,
    config: Mapping[str, Any],
    parameters: int | None = None,
    active: int | None = None,
    completed: Mapping[str, Any] | None = None,
    source: ModelSource = "catalogue",
) -> Model:
    """Return the model of a Transformers `config.json`, or raise BadUsage if it is unusable or serves no `Kind`.

    Args:
        parameters: number of weights; None to count them.
        completed: values that Transformers uses for missing entries.
    """
    try:
        own = {**config, **(config.get("text_config") or {})}
        entries = {**own, **(completed or {})}
        architecture = architecture_of(config)
        other_head = OTHER_HEADS.fullmatch(architecture) and not SCORES.fullmatch(architecture)
        if other_head or config.get("is_encoder_decoder"):
            problem = f"{name}: {architecture} neither generates text nor embeds or classifies it"
            raise BadUsage(problem, "Choose a model that does one of these.")
        layers, hidden = (_number(entries, word) for word in ("num_hidden_layers", "hidden_size"))
        no_heads = bool(HAVE_STATE & entries.keys()) and not _told(entries, "num_attention_heads")
        heads = 0 if no_heads else _number(entries, "num_attention_heads")
        kv_heads = _number(entries, "num_key_value_heads", heads)
        if kv_heads > heads:
            raise ValueError(f"num_key_value_heads: {kv_heads}, and {heads} heads")
        if heads > hidden:
            raise ValueError(f"'hidden_size': {hidden}, and {heads} heads")
        dtype = str(own.get("dtype") or own.get("torch_dtype") or "float16")
        experts = next((n for word in EXPERTS if (n := _number_if_any(own, word))), 0)
        counted = parameters if parameters is not None else count_parameters(config)
        return Model(
            name=name,
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_size=_number(entries, "head_dim", hidden // heads if heads else 0),
            vocabulary=_number(entries, "vocab_size"),
            positions=_number(entries, "max_position_embeddings", USUAL_CONTEXT) - _positions_before(own),
            parameters=counted,
            active=active or counted,
            windows=windows_of(entries, layers, architecture),
            dtype="float16" if dtype == "float32" else dtype,  # as vLLM has it
            embedding_width=_number_if_any(own, "word_embed_proj_dim") or hidden,
            tied=is_tied(config),
            feed_forward=_number_if_any(own, "ffn_dim") or _number_if_any(own, "intermediate_size") or None,
            experts=experts,
            experts_per_token=_number_if_any(own, "num_experts_per_tok") or experts,
            quantization=_quantization(config.get("quantization_config")),
            source=source,
            config=tuple(config.items()),
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as missing:
        raise BadUsage(f"{name}: its config.json has no usable {missing}", "Choose a decoder-only model.") from None


def _positions_before(config: Mapping[str, Any]) -> int:
    """Return the positions that no token has: those of a RoBERTa begin after that of its padding."""
    pad = config.get("pad_token_id", 1)
    is_one = "roberta" in str(config.get("model_type")).lower() and type(pad) is int and 0 <= pad < MOST_PADDING
    return pad + 1 if is_one else 0


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that `config.json` names, or else, as in vLLM, that of its model_type.

    Raises:
        LookupError: if both are missing.
    """
    if named := config.get("architectures"):
        if not isinstance(named, list | tuple) or not isinstance(named[0], str):
            raise ValueError(f"'architectures': {named!r:.40} are no names")
        return named[0]
    kind = str(config.get("model_type") or "").replace("_", "")
    if not kind:
        raise LookupError("'architectures'")
    return next((name for name in AS_CONFIGURED if name.lower() == f"{kind}forcausallm"), f"{kind}ForCausalLM")


def _told(entries: Mapping[str, Any], word: str) -> Any:
    """Return an entry by its usual or an older name, or None."""
    return next((value for each in (word, *OTHER_WORDS[word]) if (value := entries.get(each)) is not None), None)


def _number(entries: Mapping[str, Any], word: str, otherwise: int | None = None) -> int:
    value = _told(entries, word)
    if value is None and otherwise is not None:
        return otherwise
    if value is None:
        raise LookupError(f"'{word}'")
    return _within(word, value, MOST[word], 1)


def _number_if_any(entries: Mapping[str, Any], word: str) -> int:
    value = entries.get(word)
    return 0 if value is None else _within(word, value, MOST_IF_ANY[word])


def _within(word: str, value: Any, most: int, least: int = 0) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value // 1 or not least <= value <= most:
        raise ValueError(f"'{word}': {value!r:.40} is not a number of a model")
    return int(value)


def counted_weights(count: Any) -> int | None:
    return count if type(count) is int and 0 < count <= MOST_WEIGHTS else None


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """Properties of a layer that a model family's configurations do not contain.

    Attributes:
        norms: number over the hidden width.
        bias: of query, key and value.
        head_norms: of query and key, for "each" head or as a "whole".
    """

    norms: int = 2
    bias: bool = False
    head_norms: Literal["", "each", "whole"] = ""


# Decoders with RMSNorm and gated feed-forward layers, by their model_type (Transformers 5.19).
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "granite", "smollm3", "phi3", "gemma"), LayerTraits()),
    "qwen2": LayerTraits(bias=True),
    "qwen3": LayerTraits(head_norms="each"),
    "gemma2": LayerTraits(norms=4),
    "gemma3_text": LayerTraits(norms=4, head_norms="each"),
    "olmo2": LayerTraits(head_norms="whole"),
}
COUNTED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"),
}
OF_ENCODERS = re.compile(  # further entries: counted tables, and entries that change no weight
    r"type_vocab_size|id2label|label2id|layer_norm_eps|position_embedding_type|.*_dropout_prob|"
    r"gradient_checkpointing|is_decoder|add_cross_attention|sentence_transformers"
)
# Entries that change no weight. A configuration with any other entry is not counted.
WEIGHTLESS = re.compile(
    r"_.*|unsloth.*|.*_token_id|rope_.*|.*dropout|.*_pdrop|.*softcapping|.*_multiplier|logits_scaling|architectures|"
    r"model_type|torch_dtype|dtype|transformers_version|use_cache|initializer_range|hidden_act|hidden_activation|"
    r"max_position_embeddings|original_max_position_embeddings|rms_norm_eps|pretraining_tp|partial_rotary_factor|"
    r"sliding_window|sliding_window_pattern|use_sliding_window|max_window_layers|layer_types|no_rope_layers|"
    r"no_rope_layer_interval|query_pre_attn_scalar|cache_implementation|quantization_config|attn_implementation|"
    r"use_bidirectional_attention|bos_token|eos_token"
)


def count_parameters(config: Mapping[str, Any]) -> int | None:
    """Return the number of weights of a BERT or of a decoder of `FAMILIES`, or None for an unknown family or entry."""
    if config.get("model_type") == "bert" and config.get("architectures"):
        known = all(name in COUNTED or OF_ENCODERS.fullmatch(name) or WEIGHTLESS.fullmatch(name) for name in config)
        return _count_encoder(config) if known else None
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not all(name in COUNTED or WEIGHTLESS.fullmatch(name) for name in config):
        return None
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    size = _number(config, "head_dim", hidden // heads)
    queries, keys = heads * size, _number(config, "num_key_value_heads", heads) * size
    inner, rows = _number_if_any(config, "intermediate_size"), _number(config, "vocab_size")
    layer = 2 * hidden * (queries + keys) + 3 * hidden * inner + family.norms * hidden
    layer += queries + 2 * keys if family.bias or config.get("attention_bias") else 0
    layer += hidden if config.get("attention_bias") and not family.bias else 0
    layer += 2 * inner + hidden if config.get("mlp_bias") else 0
    layer += {"": 0, "each": 2 * size, "whole": queries + keys}[family.head_norms]
    tables = 1 if is_tied(config) else 2
    return tables * rows * hidden + _number(config, "num_hidden_layers") * layer + hidden


def _count_encoder(config: Mapping[str, Any]) -> int | None:
    hidden, inner = _number(config, "hidden_size"), _number_if_any(config, "intermediate_size")
    # With the pooler, and a head if it classifies: bge-small-en-v1.5 gets the 33,360,000 weights that its makers state.
    tables = sum(int(config.get(name, 0)) for name in ("vocab_size", "max_position_embeddings", "type_vocab_size"))
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
    classes = len(config.get("id2label") or (0, 1)) if SCORES.fullmatch(architecture_of(config)) else 0
    pooled = hidden * (hidden + 1) + classes * (hidden + 1)
    return tables * hidden + 2 * hidden + _number(config, "num_hidden_layers") * layer + pooled


NVFP4_GROUP, MXFP8_GROUP = 16, 32  # weights that share a scale in NVFP4, and in MXFP8
# Bits, group size and bits of its scale by the names of NVIDIA's ModelOpt (`quant_algo`).
ALGORITHMS: dict[str, tuple[float, int | None, int]] = {
    "FP8": (8, None, 16),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, None, 16),
    "NVFP4": (4, NVFP4_GROUP, 8),
    "W4A16_NVFP4": (4, NVFP4_GROUP, 8),
    "MXFP8": (8, MXFP8_GROUP, 8),
    "W4A16_AWQ": (4, 128, 16),
    "W4A8_AWQ": (4, 128, 16),
}


def _quantization(told: Any) -> Quantization | None:
    if not isinstance(told, dict) or not told:
        return None
    own = {**told, **(told.get("quantization") or {})}
    algorithm = own.get("quant_algo")
    method = own.get("quant_method") or ("modelopt" if algorithm else None)
    groups = list((own.get("config_groups") or {}).values())
    bits, group_size, zero_points = own.get("bits") or own.get("w_bit"), own.get("group_size"), True
    scale_bits = 16
    if method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in groups]
        described = {(w.get("num_bits"), w.get("group_size"), w.get("symmetric", True), w.get("type")) for w in weights}
        bits, group_size, symmetric, kind = described.pop() if len(described) == 1 else (None, None, True, None)
        zero_points = not symmetric
        scale_bits = 8 if (bits, kind) == (4, "float") else 16  # NVFP4
    elif str(method).startswith("modelopt"):
        bits, group, scale_bits = ALGORITHMS.get(str(algorithm).upper(), (None, None, 16))
        group_size, zero_points = group_size or group if group else None, False
    elif method == "bitsandbytes":
        bits, zero_points = 8 if own.get("load_in_8bit") else None, False
    inputs = [group.get("input_activations") or {} for group in groups]
    size, bits = int(group_size or own.get("q_group_size") or -1), float(bits or 0)
    if not 0 <= bits <= MOST_BITS:
        raise ValueError(f"'quantization_config': weights of {bits:g} bits")
    kv_cache_dtype = "auto"
    scheme = own.get("kv_cache_scheme") or own.get("kv_cache_quant_algo")
    if scheme and str(method).startswith(("compressed-tensors", "modelopt")):
        eight_bits = scheme == "FP8" or (isinstance(scheme, dict) and scheme.get("num_bits") == 8)
        kv_cache_dtype = "fp8" if eight_bits else ""
    return Quantization(
        method=None if method is None else str(method),
        bits=bits or None,
        group_size=size if size > 0 else None,
        zero_points=bool(bits) and zero_points,
        fp8_inputs=any((each.get("num_bits"), each.get("type")) == (8, "float") for each in inputs)
        or str(algorithm).startswith("FP8"),
        kv_cache_dtype=kv_cache_dtype,
        scale_bits=scale_bits,
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output layer is the embeddings, which `config.json` says only if it is unusual."""
    usual = False
    with suppress(LookupError, ValueError):
        usual = AS_CONFIGURED.get(architecture_of(config), False)
    return bool(config.get("tie_word_embeddings", config.get("tie_embedding", usual)))


def windows_of(entries: Mapping[str, Any], layers: int, architecture: str) -> tuple[int | None, ...] | None:
    """Return the window of each layer in tokens, None for all; empty for an encoder.

    Returns None instead if it is unknown which layers slide.
    """
    if ENCODERS.fullmatch(architecture):
        return ()
    if architecture not in AS_CONFIGURED:
        return None
    window = _number_if_any(entries, "sliding_window") or None
    window = None if entries.get("use_sliding_window") is False else window
    kinds = entries.get("layer_types")
    if kinds is None:
        from_layer = entries.get("max_window_layers")
        if window is None or (architecture in ALL_SLIDE and "sliding_window_pattern" not in entries):
            return (window,) * layers
        if entries.get("use_sliding_window") and isinstance(from_layer, int):  # Qwen: layers from there on slide
            return tuple(window if layer >= from_layer else None for layer in range(layers))
        return None
    if len(kinds) != layers or not set(kinds) <= KINDS.keys() or (window is None and any(KINDS[k] for k in kinds)):
        return None
    return tuple(window if KINDS[kind] else None for kind in kinds)


OF_MONTH = date(2026, 11, 1)  # of the last search for newer small models
MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))
CATALOGUE: dict[str, Model] = {
    name: model_from_config(name, model["config"], model["parameters"], model.get("active"))
    for name, model in MODELS.items()
}
KNOWN_AS = {known.lower(): name for name, model in MODELS.items() for known in (name, model.get("hub", name))}


def short_name(model: str) -> str:
    """Return a model's name for people: "opt-1.3b" for "facebook/opt-1.3b", the folder's name for a path."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def catalogue_name(model: str) -> str | None:
    return KNOWN_AS.get(model.lower())


def hub_name(model: str) -> str:
    """Return the name that loads real weights: the Hub's for a catalogue model, else the given one."""
    name = catalogue_name(model)
    return str(MODELS[name].get("hub", name)) if name else model
