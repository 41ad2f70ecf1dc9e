"""Quantized weights: how an engine holds them, and the bytes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.shapes import Shape
from pytest_slmserve.schema.specs import EngineSpec

LOADED = frozenset({"awq", "gptq", "auto_awq", "auto_gptq", "auto-round", "compressed-tensors"})  # never made at a load
# Of methods that make them at the load, with the scales of their blocks.
BITS_OF = {
    "fp8": 8.0,
    "fp8_per_tensor": 8.0,
    "fp8_per_block": 8.0,
    "fp8_per_channel": 8.0,
    "int8_per_channel_weight_only": 8.0,
    "experts_int8": 8.0,
    "mxfp8": 8.25,
    "bitsandbytes": 4.5,
    "nvfp4_per_token": 4.5,
}
SCALE_BITS = 16


def quantization_of(spec: EngineSpec, shape: Shape | None) -> str | None:
    """The method by which the weights are quantized: the one asked for, else the model's own; None for none."""
    asked = dict(spec.extra).get("quantization")
    return str(asked) if asked else _own(shape).get("quant_method") if shape else None


def weight_bytes(spec: EngineSpec, shape: Shape, each: int) -> int | None:
    """Bytes of all weights as the engine holds them; None where they are not counted, or the method is not known.
    each: bytes of a weight that is not quantized: embeddings and output layer are not."""
    method = quantization_of(spec, shape)
    if method is None or shape.parameters is None:
        return shape.weight_bytes(each)
    bits = bits_per_weight(method, _own(shape))
    if bits is None:
        return None
    kept = min(shape.embeddings, shape.parameters)
    return int(kept * each + (shape.parameters - kept) * bits / 8)


def bits_per_weight(method: str, own: Mapping[str, Any]) -> float | None:
    """Bits of a quantized weight, with its share of scale and zero point. own: the model's `quantization_config`."""
    match method.lower().replace("_marlin", ""):
        case "awq" | "gptq" | "auto_awq" | "auto_gptq" | "auto-round" if bits := own.get("bits") or own.get("w_bit"):
            group = int(own.get("group_size") or own.get("q_group_size") or -1)
            return _with_scales(float(bits), group, float(bits))
        case "compressed-tensors":
            groups = (own.get("config_groups") or {}).values()
            weights = [group.get("weights") or {} for group in groups]
            told = {(w.get("num_bits"), w.get("group_size"), w.get("symmetric", True)) for w in weights}
            bits, size, symmetric = told.pop() if len(told) == 1 else (None, None, True)
            return _with_scales(float(bits), size, 0.0 if symmetric else float(bits)) if bits else None
        case known:
            return BITS_OF.get(known)


def _with_scales(bits: float, group: int | None, zero_bits: float) -> float:
    """Bits of a weight with those of its group's scale and zero point. group: weights that share them; None or below 1
    for so many that they do not count."""
    return bits + ((SCALE_BITS + zero_bits) / group if group and group > 0 else 0.0)


def computes_in_fp8(spec: EngineSpec, shape: Shape | None) -> bool:
    """Are products of weights and activations of 8-bit floats, where the GPU has them?"""
    method = quantization_of(spec, shape) or ""
    if method != "compressed-tensors" or shape is None:
        return method.startswith("fp8")
    groups = (_own(shape).get("config_groups") or {}).values()
    inputs = [group.get("input_activations") or {} for group in groups]
    return any((each.get("num_bits"), each.get("type")) == (8, "float") for each in inputs)


def own_kv_cache_dtype(shape: Shape | None) -> str:
    """Type of the KV cache that vLLM takes for "auto": fp8 where the checkpoint has scales for one, "" where it asks
    for another, else "auto"."""
    own = _own(shape) if shape else {}
    scheme = own.get("kv_cache_scheme") or own.get("kv_cache_quant_algo")
    match scheme:
        case _ if not scheme or not str(own.get("quant_method")).startswith(("compressed-tensors", "modelopt")):
            return "auto"
        case {"num_bits": 8} | "FP8":
            return "fp8"
        case _:
            return ""


def check_quantization(spec: EngineSpec, shape: Shape) -> None:
    """Raises BadUsage for a method that neither makes these weights nor is the model's own."""
    asked, own = dict(spec.extra).get("quantization"), _own(shape).get("quant_method")
    if not asked or asked == own or str(asked).replace("_marlin", "") == own:
        return
    if own:
        problem = f"{spec.model}: its weights are quantized by {own}, not {asked}"
        raise BadUsage(problem, f"--slm-quantization {own}, or none")
    if str(asked).replace("_marlin", "") in LOADED:
        problem = f"{spec.model}: {asked} weights are loaded, not made, and these are not quantized"
        raise BadUsage(problem, "a model that was quantized so, or --slm-quantization fp8")


def _own(shape: Shape) -> dict[str, Any]:
    found = dict(shape.config).get("quantization_config")
    return found if isinstance(found, dict) else {}
