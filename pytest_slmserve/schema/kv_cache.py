"""Arithmetic of the KV cache: the blocks that an engine has and the requests that fit in them, from shapes alone."""

from __future__ import annotations

from pytest_slmserve.schema.catalog import Shape, shape_of
from pytest_slmserve.schema.errors import BadUsage, SlmError
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec

BLOCK_SIZE = {"cuda": 16, "cpu": 128, "simulated": 16}  # tokens; the defaults of vLLM's two platforms, and ours
NULL_BLOCKS = 1  # vLLM keeps one block that no request ever gets
RESERVE_BYTES = 4 * GIB  # activations, logits of the largest batch, captured graphs and the CUDA context
VALUE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def known_shape(model: str) -> Shape | None:
    """The shape, or None where the model is a folder of another machine."""
    try:
        return shape_of(model)
    except SlmError:
        return None


def value_bytes(spec: EngineSpec, resolved: Resolved | None = None) -> int | None:
    """Bytes of one weight or activation; None for a type we do not know ("auto" before the engine has told)."""
    dtype = (resolved.dtype if resolved else None) or spec.dtype
    return VALUE_BYTES.get(dtype)


def kv_bytes_per_token(spec: EngineSpec, resolved: Resolved | None = None) -> int | None:
    """Bytes of keys and values of a token over all layers and GPUs; None where shape or type are unknown."""
    shape, each = known_shape(spec.model), value_bytes(spec, resolved)
    if str(dict(spec.extra).get("kv_cache_dtype", "auto")).startswith("fp8"):
        each = 1
    return None if shape is None or each is None else shape.kv_bytes_per_token(each, spec.tensor_parallel_size)


def block_size_of(spec: EngineSpec, resolved: Resolved | None = None) -> int:
    """Tokens per KV block: as the engine says, if that is a size, as asked for, or its platform's default."""
    if resolved and resolved.block_size and resolved.block_size > 0:
        return resolved.block_size
    return int(dict(spec.extra).get("block_size") or BLOCK_SIZE[spec.platform])


def kv_blocks(kv_bytes: int, block_size: int, bytes_per_token: int) -> int:
    """Whole blocks of `block_size` tokens in `kv_bytes`."""
    return kv_bytes // (block_size * bytes_per_token)


def requests_that_fit(blocks: int, block_size: int, longest: int) -> int:
    """Requests of `longest` tokens (prompt and output) that all fit at full length, so that none is ever preempted."""
    return max(0, (blocks - NULL_BLOCKS) // -(-longest // block_size))


def predicted_blocks(spec: EngineSpec, resolved: Resolved | None = None) -> int | None:
    """KV blocks that this specification gives, or asks for; None where shape or type are unknown, and of an endpoint
    or Transformers, whose cache is their own affair."""
    if asked := dict(spec.extra).get("num_gpu_blocks_override"):
        return int(asked)
    own_affair = spec.platform == "remote" or spec.interface == "transformers"
    per_token = None if own_affair else kv_bytes_per_token(spec, resolved)
    kv_bytes = spec.kv_cache_bytes * spec.tensor_parallel_size
    return None if per_token is None else kv_blocks(kv_bytes, block_size_of(spec, resolved), per_token)


def kv_capacity(spec: EngineSpec, longest: int, resolved: Resolved | None = None) -> int | None:
    """Requests of `longest` tokens that fit: by the engine's own block count if it has one, else by prediction."""
    blocks = resolved.kv_blocks if resolved and resolved.kv_blocks else predicted_blocks(spec, resolved)
    return None if blocks is None else requests_that_fit(blocks, block_size_of(spec, resolved), longest)


def no_room(spec: EngineSpec, longest: int, requests: int) -> str | None:
    """The reason why so many requests of `longest` tokens would preempt each other; None if they would not, or if the
    capacity is unknown."""
    capacity = kv_capacity(spec, longest)
    if capacity is None or capacity >= requests:
        return None
    return f"the KV cache holds {capacity} requests of {longest} tokens"


def kv_budget_bytes(
    gpu_memory_bytes: int, gpu_memory_utilization: float, weight_bytes: int, reserve_bytes: int = RESERVE_BYTES
) -> int:
    """Value as `kv_cache_bytes`: the share of the memory less weights and reserve. BadUsage if nothing is left."""
    left = int(gpu_memory_bytes * gpu_memory_utilization) - weight_bytes - reserve_bytes
    if left <= 0:
        need, have = (weight_bytes + reserve_bytes) / GIB, gpu_memory_bytes * gpu_memory_utilization / GIB
        raise BadUsage(
            f"weights and reserve take {need:.1f} GiB of the {have:.1f} GiB allowed: no room for a KV cache",
            "a smaller model, or a larger --slm-gpu-memory-utilization",
        )
    return left
