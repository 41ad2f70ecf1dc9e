"""Decoder models as their `config.json` gives them, the arithmetic that needs nothing else, and the catalogue.

`models.json` has for each model its name on the Hub, where its configuration was published, its licence where that
restricts its use, its number of weights, and its configuration. The tiny ones are ours. `architectures.json` has the
architectures whose KV cache is known.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pytest_slmserve.schema.errors import BadUsage

# What `config.json` calls a thing, by its usual name, then in older architectures.
OTHER_WORDS = {
    "num_hidden_layers": ("n_layers", "n_layer"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
    "max_position_embeddings": ("max_seq_len", "n_positions"),
}
ModelSource = Literal["catalogue", "folder", "hub"]  # of the package, a folder, the cache of the Hub
USUAL_CONTEXT = 2048  # tokens: OPT's positions

# Architectures whose layers keep keys and values in vLLM as the entries that are read here say: compared with the cache
# specifications of the model that vLLM 0.32 makes of each on the meta device. Of any other the engine is asked.
# True: the output layer is the embeddings, if nothing else is said (Transformers 5.19).
AS_CONFIGURED: dict[str, bool] = json.loads((Path(__file__).parent / "architectures.json").read_text("utf-8"))
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}  # of layers, and whether they slide


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a checkpoint by its `quantization_config`.

    bits: of a weight, without its scale; None if groups of layers differ, or it is not told. group_size: number of
    weights that share a scale; None if so many that the scale does not count. zero_points: each group has one, too.
    fp8_inputs: activations are 8-bit floats, as the weights. kv_cache_dtype: what vLLM takes for "auto": fp8 if the
    checkpoint has scales for it, "" for another type of the checkpoint, else "auto".
    """

    method: str | None = None
    bits: float | None = None
    group_size: int | None = None
    zero_points: bool = False
    fp8_inputs: bool = False
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder model as its `config.json` gives it, as far as speed and memory depend on it.

    It is made when a run is planned, and goes with the engine's specification into the record, so that a record is read
    alike wherever its reader is.

    parameters: number of weights; active: those that one token is multiplied with. None if nobody has counted them.
    windows: of each layer, the tokens that it looks back, None for all; None instead if vLLM is not known to keep keys
    and values so, as in layers that have a state of their own. dtype: of the weights as vLLM loads them by itself.
    embedding_width: numbers of a row of the embeddings. tied: the output layer is the embeddings. feed_forward: width
    of these layers, if it is told. config: `config.json` as it is handed to the engine; no record keeps it.
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
    def context(self) -> int:
        """Tokens of the longest request that an engine here takes, unless the workload has longer ones."""
        return min(USUAL_CONTEXT, self.positions)

    @property
    def lm_head(self) -> int:
        """Weights of the output layer, and of the embeddings, which are the same if they are `tied`."""
        return self.vocabulary * self.embedding_width

    def weight_bytes(self, bytes_per_weight: float = 2) -> int | None:
        """Bytes of all weights; None if they are not counted."""
        return None if self.parameters is None else int(self.parameters * bytes_per_weight)

    @property
    def kv_groups(self) -> tuple[int, tuple[int | None, ...]] | None:
        """Layers that share a block of the KV cache, and the window of each group of so many, as vLLM groups them
        (`_get_kv_cache_groups_uniform_page_size`). None if that is not known: its releases round differently if the
        kinds of layers are nearly equal in number."""
        if not self.windows:
            return None
        counts = Counter(self.windows)
        fewest, most = min(counts.values()), max(counts.values())
        if fewest < most and 1.25 * fewest <= most < 1.5 * fewest:
            return None
        each = most if most < 1.5 * fewest else fewest
        return each, tuple(window for window, count in counts.items() for _ in range(-(-count // each)))

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int | None:
        """Bytes of one token's keys and values in the layers that share a block, on all `gpus` together; with fewer KV
        heads than GPUs some heads are held twice. None if vLLM's layout is not known."""
        groups = self.kv_groups
        return None if groups is None else groups[0] * 2 * max(self.kv_heads, gpus) * self.head_size * bytes_per_value

    def kv_read_bytes(self, context: float, bytes_per_value: int = 2, gpus: int = 1) -> float | None:
        """Bytes of keys and values that a token reads with so many before it, over all layers and GPUs; None if what
        the layers keep is not known."""
        seen = self._seen(context)
        return None if seen is None else seen * 2 * max(self.kv_heads, gpus) * self.head_size * bytes_per_value

    def attention_width(self, context: float) -> float:
        """Query heads x head size x layers; a layer that slides counts with the share of the context that it sees."""
        seen = self._seen(context)
        return self.heads * self.head_size * (self.layers if seen is None else seen / context)

    def _seen(self, context: float) -> float | None:
        """Tokens that one token looks back at, in all layers together."""
        if self.windows is None:
            return None
        return sum(context if window is None else min(context, window) for window in self.windows)

    def indivisible(self, gpus: int) -> str | None:
        """The reason why tensor parallelism cannot divide the model among so many GPUs; None if it can. Heads and
        columns of the feed-forward layers are divided evenly; KV heads too, or each is held by equally many GPUs."""
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
    """The model of a Transformers `config.json`. completed: what Transformers reads in the entries that are not there.
    Raises BadUsage if a needed entry is missing."""
    entries = {**config, **(config.get("text_config") or {}), **(completed or {})}
    told = {word: value for word, value in entries.items() if value is not None}
    words = (next((each for each in (word, *older) if each in told), word) for word, older in OTHER_WORDS.items())
    try:
        layers, hidden, heads, positions = (int(told[word]) for word in words)
        architecture = str(config["architectures"][0])
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
        experts = int(next((n for word in EXPERTS if (n := config.get(word))), 0))
        return Model(
            name=name,
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(entries.get("num_key_value_heads") or heads),
            head_size=int(entries.get("head_dim") or hidden // heads),
            vocabulary=int(entries["vocab_size"]),
            positions=positions,
            parameters=parameters,
            active=active or parameters,
            windows=windows_of(entries, layers) if architecture in AS_CONFIGURED else None,
            dtype="float16" if dtype == "float32" else dtype,  # as vLLM has it
            embedding_width=int(config.get("word_embed_proj_dim") or hidden),
            tied=is_tied(config),
            feed_forward=int(config.get("ffn_dim") or config.get("intermediate_size") or 0) or None,
            experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok") or experts),
            quantization=_quantization(config.get("quantization_config")),
            source=source,
            config=tuple(config.items()),
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as missing:
        raise BadUsage(f"{name}: its config.json has no usable {missing}", "a decoder-only model") from None


def _quantization(own: Any) -> Quantization | None:
    if not isinstance(own, dict) or not own:
        return None
    method = own.get("quant_method")
    groups = list((own.get("config_groups") or {}).values())
    bits, group_size, zero_points = own.get("bits") or own.get("w_bit"), own.get("group_size"), True
    if method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in groups]
        told = {(w.get("num_bits"), w.get("group_size"), w.get("symmetric", True)) for w in weights}
        bits, group_size, symmetric = told.pop() if len(told) == 1 else (None, None, True)
        zero_points = not symmetric
    inputs = [group.get("input_activations") or {} for group in groups]
    size = int(group_size or own.get("q_group_size") or -1)
    kv_cache_dtype = "auto"
    scheme = own.get("kv_cache_scheme") or own.get("kv_cache_quant_algo")
    if scheme and str(method).startswith(("compressed-tensors", "modelopt")):
        eight_bits = scheme == "FP8" or (isinstance(scheme, dict) and scheme.get("num_bits") == 8)
        kv_cache_dtype = "fp8" if eight_bits else ""
    return Quantization(
        method=None if method is None else str(method),
        bits=float(bits) if bits else None,
        group_size=size if size > 0 else None,
        zero_points=bool(bits) and zero_points,
        fp8_inputs=any((each.get("num_bits"), each.get("type")) == (8, "float") for each in inputs),
        kv_cache_dtype=kv_cache_dtype,
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Report whether the output layer is the embeddings, which `config.json` says only if that is unusual."""
    usual = any(AS_CONFIGURED.get(name) for name in config.get("architectures") or ())
    return bool(config.get("tie_word_embeddings", config.get("tie_embedding", usual)))


def windows_of(entries: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    """The window of each layer; None if a layer is of another kind than attention, or its window is not known."""
    window = entries.get("sliding_window") if entries.get("use_sliding_window") is not False else None
    kinds = entries.get("layer_types")
    if kinds is None:
        unclear = window and "sliding_window_pattern" in entries  # which layers slide, only Transformers knows
        return None if unclear else (window,) * layers
    if len(kinds) != layers or not set(kinds) <= KINDS.keys() or (window is None and any(KINDS[k] for k in kinds)):
        return None
    return tuple(window if KINDS[kind] else None for kind in kinds)


MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))
CATALOGUE: dict[str, Model] = {
    name: model_from_config(name, model["config"], model["parameters"], model.get("active"))
    for name, model in MODELS.items()
}
KNOWN_AS = {known.lower(): name for name, model in MODELS.items() for known in (name, model.get("hub", name))}


def short_name(model: str) -> str:
    """A model's name for people: "opt-1.3b" for "facebook/opt-1.3b", the folder's name for a path."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def catalogue_name(model: str) -> str | None:
    """The name under which the catalogue has `model`, or None: a folder may be called as it likes."""
    return KNOWN_AS.get(model.lower())


def hub_name(model: str) -> str:
    """The name to load real weights by: the Hub's, of a catalogue model; any other name, such as a folder, as it is."""
    name = catalogue_name(model)
    return str(MODELS[name].get("hub", name)) if name else model
