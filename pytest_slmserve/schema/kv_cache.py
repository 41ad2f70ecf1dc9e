"""Arithmetic of weights and KV cache."""

import re
from dataclasses import dataclass

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import ADAPTED
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import FRONT_ENDS, GIB, RANKS, SPECULATIVE, Adapters, EngineSpec

# Methods of quantized checkpoints: vLLM cannot apply them while it loads other weights.
LOADED = {"awq", "gptq", "auto_awq", "auto_gptq", "auto-round", "compressed-tensors", "modelopt", "modelopt_fp4"}
# Bits of a weight with its share of scales, by methods that vLLM applies while it loads.
BITS_OF = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "experts_int8"), 8.0),
    **{"int8_per_channel_weight_only": 8.0, "mxfp8": 8.25, "bitsandbytes": 4.5, "nvfp4_per_token": 4.5},
}


def quantization_of(spec: EngineSpec) -> str | None:
    """Return the quantization method of the specification, else of the checkpoint, else None."""
    asked, own = spec.arguments.get("quantization"), spec.model_facts and spec.model_facts.quantization
    return str(asked) if asked else own.method if own else None


def weight_bytes(spec: EngineSpec, each: int) -> int | None:
    """Return the bytes of all weights in the engine, or None if unknown; `each` is for those that are not quantized."""
    model, method = spec.model_facts, quantization_of(spec)
    if model is None or model.parameters is None:
        return None
    if method is None:
        return model.weight_bytes(each)
    own, plain = model.quantization, method.lower().replace("_marlin", "")
    bits = BITS_OF.get(plain)
    if own and own.method and own.bits is not None:  # with its share of scale and zero point
        scales = own.scale_bits + (own.bits if own.zero_points else 0.0)
        bits = own.bits + (scales / own.group_size if own.group_size else 0.0)
    if bits is None:
        return None
    kept = min(model.lm_head if model.tied else 2 * model.lm_head, model.parameters)
    return int(kept * each + (model.parameters - kept) * bits / 8)


def check_quantization(spec: EngineSpec) -> None:
    """Raise BadUsage for a quantization method that does not suit the model's weights."""
    known = spec.model_facts and spec.model_facts.quantization
    asked, own = spec.arguments.get("quantization"), known.method if known else None
    plain = str(asked).replace("_marlin", "")
    if asked and own and own not in (asked, plain):
        problem = f"{spec.model}: its weights are quantized by {own}, not {asked}"
        raise BadUsage(problem, f"Use --slm-quantization {own}, or none.")
    if asked and not own and plain in LOADED:
        problem = f"{spec.model}: {asked} weights are loaded, not made, and these are not quantized"
        raise BadUsage(problem, "Choose a model that was quantized so, or use --slm-quantization fp8.")


def check_arguments(spec: EngineSpec) -> None:
    """Raise BadUsage for engine arguments with which vLLM does not start, or speculation that cannot be measured."""
    tokens, sequences = given_limit(spec, "max_num_batched_tokens"), given_limit(spec, "max_num_seqs")
    if tokens < sequences:
        problem = f"max_num_batched_tokens {tokens} is below max_num_seqs {sequences}, and vLLM does not start so"
        raise BadUsage(problem, f"Use --slm-max-num-seqs={tokens}, and no larger --slm-concurrency.")
    if spec.arguments.get(SPECULATIVE) is not None:
        check_speculation(spec)


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'  # needs no second model
NGRAMS = {"ngram", "[ngram]", "ngram_gpu"}
FROM_THE_TEXT = {*NGRAMS, "suffix"}  # methods without weights of their own
AS_TOLD = "synthetic"  # vLLM accepts drafts at a given rate, whatever their tokens are


def check_speculation(spec: EngineSpec) -> None:
    """Raise BadUsage for speculation that vLLM 0.32 rejects (vllm/config/speculative.py) or that is not counted."""
    asked, hint = spec.speculation, f"--slm-engine-arg {SPECULATIVE}='{NGRAM}'"
    method, drafted = asked.get("method"), asked.get("num_speculative_tokens")
    if spec.interface == "transformers":
        raise BadUsage("Transformers' generate() gets no speculative_config from here", "--slm-interface engine")
    if not asked:
        raise BadUsage(f"speculative_config {spec.arguments[SPECULATIVE]!r} is not an object with entries", hint)
    if not (method or asked.get("model")):
        raise BadUsage("speculative_config has neither a method nor the model that drafts", hint)
    if (drafted is None and method in NGRAMS) or (drafted is not None and (type(drafted) is not int or drafted < 1)):
        problem = f"speculative_config has num_speculative_tokens {drafted!r}, and 1 or more are drafted at a time"
        raise BadUsage(problem, hint)
    if spec.platform == "cpu" and asked.get("rejection_sample_method") == AS_TOLD:
        raise BadUsage(
            f'vLLM\'s CPU backend has no "rejection_sample_method": "{AS_TOLD}"', "Use a GPU, or remove the entry."
        )
    least, most = asked.get("prompt_lookup_min"), asked.get("prompt_lookup_max")
    if type(least) is type(most) is int and least > most:
        problem = f"speculative_config has prompt_lookup_min {least}, above prompt_lookup_max {most}"
        raise BadUsage(problem, hint)


def has_draft_weights(spec: EngineSpec) -> bool:
    """Return whether a draft model takes memory."""
    return bool(spec.speculation) and spec.speculation.get("method") not in FROM_THE_TEXT


def made_up_acceptance(spec: EngineSpec) -> str | None:
    """Return a note if the acceptance of drafts is not that of real text, else None."""
    asked = spec.speculation
    if asked.get("rejection_sample_method") == AS_TOLD:
        length, rates = (asked.get(f"synthetic_acceptance_{name}") for name in ("length", "rates"))
        if isinstance(rates, list) and all(isinstance(rate, int | float) for rate in rates):
            length = 1 + sum(rates)  # the n-th rate is the share of drafts whose n-th token is accepted
        told = f" of {length:.3g} tokens a step" if isinstance(length, int | float) else ""
        return f"speculative decoding at a planted acceptance{told}"
    if not asked or spec.load_format != "dummy":
        return None
    return "speculative decoding with dummy weights: what is accepted says nothing of real text"


def adapter_bytes(spec: EngineSpec) -> int:
    """Return the bytes of the slots for LoRA adapters on each GPU; 0 without adapters or for an unknown architecture.

    It is an upper bound on several GPUs, because vLLM divides one of the two matrices.
    """
    if not spec.arguments.get("enable_lora") or spec.model_facts is None or not spec.model_facts.adapted:
        return 0
    slots, rank = spec.arguments.get("max_loras", 1), spec.arguments.get("max_lora_rank", 16)
    return int(slots) * spec.model_facts.adapter_slot_bytes(int(rank), value_bytes(spec) or 2)


def beside_adapters(spec: EngineSpec, budget: int) -> int:
    """Return the bytes that adapter slots leave for the KV cache on each GPU. Raise BadUsage if they are too few."""
    taken, per_token = adapter_bytes(spec), kv_layout(spec).bytes_per_token or 0
    least = per_token * spec.max_model_len // spec.tensor_parallel_size
    if taken and budget - taken < least:
        slots = spec.arguments["max_loras"]
        fit = max(0, budget - least) * slots // taken
        problem = f"{slots} slots for adapters take {taken / GIB:.1f} GiB, and {budget / GIB:.1f} GiB are left for"
        hint = f"--slm-engine-arg max_loras={fit}" if fit else "Raise --slm-gpu-memory-utilization."
        raise BadUsage(f"{spec.model}: {problem} them and the KV cache", hint)
    return budget - taken


def check_adapters(spec: EngineSpec, adapters: Adapters) -> None:
    """Raise BadUsage if an engine would not serve these adapters."""
    given, model = spec.arguments, spec.model_facts
    slots, held, rank = (given.get(name, 0) for name in ("max_loras", "max_cpu_loras", "max_lora_rank"))
    if spec.interface in ("endpoint", "transformers"):
        who = (
            "Transformers' generate()" if spec.interface == "transformers" else "an endpoint, whose adapters have names"
        )
        raise BadUsage(
            f"{who} gets no adapters from here", "Use --slm-interface engine or server, without --slm-endpoint."
        )
    if not given.get("enable_lora"):
        raise BadUsage(
            f"{adapters.title}, and the engine is not to serve any",
            f"Pass enable_lora=true, as --slm-lora {adapters.words} does.",
        )
    if model is None or not model.adapted:
        named = model.architecture if model else "this model"
        raise BadUsage(
            f"{spec.model}: no adapters are made here for {named}", f"Choose a model of {', '.join(ADAPTED)}."
        )
    if not all(type(each) is int and each > 0 for each in (slots, held, rank)):
        raise BadUsage(f"max_loras {slots}, max_cpu_loras {held}, max_lora_rank {rank}", "Use positive whole numbers.")
    if rank < adapters.rank or rank not in RANKS:
        raise BadUsage(
            f"max_lora_rank {rank} has no room for {adapters.title}", f"--slm-engine-arg max_lora_rank={adapters.rank}"
        )
    if held < slots:
        problem = f"max_cpu_loras {held} is below max_loras {slots}, and vLLM does not start so"
        raise BadUsage(problem, f"--slm-engine-arg max_cpu_loras={slots}")
    if spec.interface == "server" and spec.front_ends > 1:
        problem = f"adapters are loaded through one HTTP process, and the server has {spec.front_ends}"
        raise BadUsage(problem, f"--slm-engine-arg {FRONT_ENDS}=1")


# Tokens: the defaults of vLLM's two platforms, and ours. An endpoint rarely reports it, so vLLM's on a GPU is assumed.
BLOCK_SIZE = {"cuda": 16, "cpu": 128, "simulated": 16, "remote": 16}
NULL_BLOCKS = 1  # vLLM keeps one block that no request ever gets
STATE_BLOCKS = 2  # maximum of a layer with a state instead of a cache (vLLM's mamba_cache_mode "align")
STEPS_AHEAD = 2  # steps with tokens that are scheduled but not settled, in asynchronous scheduling
RESERVE_BYTES = 4 * GIB  # activations, logits of the largest batch, captured graphs and the CUDA context
MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB)?", re.ASCII | re.IGNORECASE)
SMALLEST_GPU, LARGEST_GPU = GIB, 1 << 44
VALUE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
KV_VALUE_BYTES = {**VALUE_BYTES, **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1)}  # without scales


def value_bytes(spec: EngineSpec, resolved: Resolved | None = None) -> int | None:
    """Return the bytes of one weight or activation, or None for an unknown type."""
    dtype = (resolved.dtype if resolved else None) or spec.arguments.get("dtype") or spec.dtype
    return VALUE_BYTES.get(str(dtype))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of an engine's KV cache; None means unknown.

    Attributes:
        bytes_per_token: for the layers that share a block, over all GPUs.
        windows: tokens of each group of layers, None for all tokens, 0 for a state of fixed size.
    """

    value_bytes: int | None
    bytes_per_token: int | None
    windows: tuple[int | None, ...] | None
    block_size: int


def kv_layout(spec: EngineSpec, resolved: Resolved | None = None) -> KvLayout:
    """Return the layout of the KV cache: as reported, else by specification and model, else the default."""
    extra, model = spec.arguments, spec.model_facts
    dtype = str(extra.get("kv_cache_dtype", "auto"))
    if dtype == "auto" and model and model.quantization:
        dtype = model.quantization.kv_cache_dtype
    each = value_bytes(spec, resolved) if dtype == "auto" else KV_VALUE_BYTES.get(dtype)
    per_token = None
    if model and each is not None and not extra.get("disable_hybrid_kv_cache_manager"):
        per_token = model.kv_bytes_per_token(each, spec.tensor_parallel_size)
    windows, size = (resolved.kv_windows, resolved.block_size) if resolved else (None, None)
    if windows is None and model and (groups := model.kv_groups):
        windows = groups[1]
    if not size or size < 0:
        size = int(extra.get("block_size") or BLOCK_SIZE[spec.platform])
    return KvLayout(each, per_token, windows, size)


def request_blocks(spec: EngineSpec, windows: tuple[int | None, ...], block_size: int, longest: int) -> int:
    """Return the largest number of blocks that one request takes, over all groups of layers.

    A sliding group keeps its window and the tokens that are scheduled but not settled
    (`SlidingWindowSpec.max_admission_blocks_per_request` of vLLM).

    Args:
        longest: prompt and output tokens.
    """
    whole, in_flight = -(-longest // block_size), STEPS_AHEAD * given_limit(spec, "max_num_batched_tokens")
    return sum(
        whole if w is None else STATE_BLOCKS if w == 0 else min(whole, -(-(w - 1 + in_flight) // block_size) + 1)
        for w in windows
    )


def given_limit(spec: EngineSpec, argument: str, field: str = "") -> int:
    """Return a limit of the engine: its argument if that is a positive whole number, else the specification's field.

    Args:
        field: if its name is not that of the argument.
    """
    given, own = spec.arguments.get(argument), int(getattr(spec, field or argument))
    return given if isinstance(given, int) and given > 0 else own


def predicted_blocks(spec: EngineSpec, resolved: Resolved | None = None) -> int | None:
    """Return the number of KV blocks by the specification, or None if it depends on the engine."""
    if given := spec.arguments.get("num_gpu_blocks_override"):
        return int(given)
    layout, cache_bytes = kv_layout(spec, resolved), specified_kv_bytes(spec)
    own_affair = spec.platform == "remote" or spec.interface == "transformers" or not cache_bytes
    if own_affair or layout.bytes_per_token is None:
        return None
    return cache_bytes // (layout.block_size * layout.bytes_per_token)


def specified_kv_bytes(spec: EngineSpec) -> int:
    """Return the specified bytes of the KV cache, over all GPUs; 0 for all memory that is left."""
    return given_limit(spec, "kv_cache_memory_bytes", "kv_cache_bytes") * spec.tensor_parallel_size


def kv_bytes(spec: EngineSpec, resolved: Resolved) -> int:
    """Return the bytes of the KV cache over all GPUs, from the reported or predicted blocks, else as specified."""
    layout, blocks = kv_layout(spec, resolved), resolved.kv_blocks or predicted_blocks(spec, resolved)
    if blocks is None or layout.bytes_per_token is None:
        return specified_kv_bytes(spec)
    return blocks * layout.block_size * layout.bytes_per_token


def kv_capacity(spec: EngineSpec, longest: int, resolved: Resolved | None = None) -> int | None:
    """Return the number of requests of `longest` tokens that fit in the KV cache, or None if unknown."""
    blocks = resolved.kv_blocks if resolved and resolved.kv_blocks else predicted_blocks(spec, resolved)
    layout = kv_layout(spec, resolved)
    if blocks is None or layout.windows is None:
        return None
    each = request_blocks(spec, layout.windows, layout.block_size, longest)
    return max(0, blocks - NULL_BLOCKS) // max(1, each)


def no_room(spec: EngineSpec, longest: int, requests: int) -> str | None:
    """Return why these requests of `longest` tokens would preempt each other; None if they fit, or if it is unknown."""
    capacity = kv_capacity(spec, longest)
    if capacity is None or capacity >= requests:
        return None
    return f"the KV cache holds {capacity} requests of {longest} tokens"


def kv_budget_bytes(gpu_memory_bytes: int, gpu_memory_utilization: float, weight_bytes: int) -> int:
    """Return the bytes for the KV cache: the engine's share of the memory minus weights and reserve."""
    left = int(gpu_memory_bytes * gpu_memory_utilization) - weight_bytes - RESERVE_BYTES
    if left <= 0:
        need, have = (weight_bytes + RESERVE_BYTES) / GIB, gpu_memory_bytes * gpu_memory_utilization / GIB
        problem = f"weights and reserve take {need:.1f} GiB of the {have:.1f} GiB allowed: no room for a KV cache"
        raise BadUsage(problem, "Choose a smaller model, or a larger --slm-gpu-memory-utilization.")
    return left


def parse_memory(text: str) -> int:
    """Return the bytes of a GPU's memory, from "80GiB" or a number."""
    found = MEMORY.fullmatch(text)
    size = int(float(found[1]) * (GIB if found[2] else 1)) if found and len(text) < 30 else 0
    if not SMALLEST_GPU <= size <= LARGEST_GPU:
        raise BadUsage(f"{text!r} is not a memory of a GPU", "Write 80GiB, or 85899345920 (bytes).")
    return size
