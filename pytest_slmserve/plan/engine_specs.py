"""Engine specifications that the options give on each platform, with its defaults. Arithmetic: needs no GPU and starts
nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import BadUsage, Platform
from pytest_slmserve.schema.kv_cache import (
    check_quantization,
    kv_budget_bytes,
    quantization_of,
    value_bytes,
    weight_bytes,
)
from pytest_slmserve.schema.models import catalogue_name
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, EngineSpec

LARGEST_LOAD = 1024
IMAGINED_GPU_BYTES = 140 * GIB  # of the simulated device, and of a plan made where there is no GPU
UNUSABLE = 0.03  # share of its memory that a GPU keeps for itself: one sold with 40 GiB has 39.4


@dataclass(frozen=True, slots=True)
class Defaults:
    """Meaning of the options that were not given, on a platform."""

    models: tuple[str, ...]
    lengths: tuple[int, int]
    window_s: float
    largest: int
    dtype: str  # "" for the model's own
    start_s: float  # what a start costs, for the price of a plan; seen, not promised
    turn_s: float  # and what each further replica adds
    budget_s: float  # of a sweep that measures until its claims are decided


DEFAULTS: dict[Platform, Defaults] = {
    "cuda": Defaults(("opt-125m", "opt-1.3b", "opt-2.7b"), (512, 256), 2.0, LARGEST_LOAD, "", 55.0, 27.0, 240.0),
    "cpu": Defaults(("opt-tiny",), (64, 32), 2.0, 256, "bfloat16", 15.0, 5.0, 60.0),
    "simulated": Defaults(("opt-125m", "opt-1.3b", "opt-2.7b"), (512, 256), 5.0, LARGEST_LOAD, "", 0, 0, 60.0),
    "remote": Defaults((), (512, 256), 5.0, 256, "", 0.0, 0.0, 240.0),
}

WITHOUT_BFLOAT16 = ("T4", "V100")
FROM_TURING_ON = ("fp8", "awq")  # methods, by vLLM's own bounds (`get_min_capability`)
ALIBI = "MPTForCausalLM"
LAST_RELEASE = {ALIBI: (0, 28)}  # of vLLM (its registry of models names those that it had)
# Of vLLM's engine on a GPU. FlashAttention 3, which it takes on Hopper, has no ALiBi (vllm-project/vllm#15231).
ENGINE_ARGUMENTS: dict[str, tuple[tuple[str, str], ...]] = {ALIBI: (("attention_backend", "TRITON_ATTN"),)}


def unserved(architecture: str, platform: Platform, vllm: str | None) -> str | None:
    """Return the reason why no engine of this platform and release of vLLM serves the architecture; None if one
    should."""
    if architecture == ALIBI and platform == "cpu":
        return "its attention has biases (ALiBi), which vLLM's CPU backend has not"
    last = LAST_RELEASE.get(architecture)
    if last and vllm and tuple(map(int, re.findall(r"\d+", vllm)[:2])) > last:
        return f"vLLM {vllm} has no {architecture}, the last release that has is {last[0]}.{last[1]}"
    return None


def engine_spec(
    options: Options, platform: Platform, model: str, environment: Environment, gpus: int | None = None
) -> EngineSpec:
    """Return the engine that serves `model` under these options, with every limit set. gpus: other than the options
    say."""
    known, defaults = model_of(model), DEFAULTS[platform]
    if why := unserved(known.architecture, platform, environment.vllm):
        raise BadUsage(f"{model}: {why}", "another model")
    peaks, given = peaks_of(environment.gpu_name), zip((options.input_len, options.output_len), defaults.lengths)
    # float16 for bfloat16 on a GPU that has none, as vLLM has it.
    dtype = "float16" if peaks and peaks.family.startswith(WITHOUT_BFLOAT16) else known.dtype
    # Natural lengths are as long as the context.
    tokens = sum(n for length, usual in given if (n := length or usual) != "natural")
    as_served = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    spec = EngineSpec(
        model=catalogue_name(model) or model,
        platform=platform,
        load_format=options.load_format,
        dtype=defaults.dtype or dtype,
        max_model_len=max(known.context, min(tokens, known.positions)),
        max_num_seqs=options.max_num_seqs or max(LARGEST_LOAD, *(options.concurrency or (1,))),
        kv_cache_bytes=GIB,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=platform == "cpu",
        seed=options.seed,
        python=options.python,
        env=options.env,
        extra=(
            *(ENGINE_ARGUMENTS.get(known.architecture, ()) if platform == "cuda" else ()),
            *((name, value) for name, value in as_served.items() if value),
            *options.engine_arg,
        ),
        interface=options.interface,
        tensor_parallel_size=gpus or options.tensor_parallel_size[0],
        allow_prefix_cache=options.allow_prefix_cache,
        model_facts=known,
    )
    if why := known.indivisible(spec.tensor_parallel_size):
        raise BadUsage(why, "--slm-tensor-parallel-size with numbers that do")
    check_quantization(spec)
    method = quantization_of(spec) or ""
    if peaks and peaks.family.startswith("V100") and method.startswith(FROM_TURING_ON):
        why = f"vLLM serves {method} weights on GPUs of compute capability 7.5 and more"
        hint = "another GPU, or --slm-quantization gptq for a model that was quantized so"
        raise BadUsage(f"{model}: {why}, and {environment.gpu_name} has 7.0", hint)
    if platform == "cpu":
        return spec
    weights = weight_bytes(spec, value_bytes(spec) or 2)
    if weights is None and platform == "simulated":
        weights = 0  # its device is imagined too; a plan without Transformers goes on
    if weights is None:
        return replace(spec, kv_cache_bytes=0)  # the engine knows better what its memory has beside the weights
    memory = planned_memory(options.gpu_memory, environment.gpu_memory_bytes or IMAGINED_GPU_BYTES)
    own_weights = -(-weights // spec.tensor_parallel_size)
    return replace(spec, kv_cache_bytes=kv_budget_bytes(memory, options.gpu_memory_utilization, own_weights))


def planned_memory(wanted: int | None, there: int) -> int:
    """Return the bytes of GPU memory that an engine is planned for. Raises BadUsage if the GPU has less than is
    wanted."""
    if wanted is None:
        return there
    if wanted > there * (1 + UNUSABLE):
        why = f"the GPU has {there / GIB:.1f} GiB of memory, and {wanted / GIB:.1f} GiB are wanted"
        raise BadUsage(why, "a smaller --slm-gpu-memory")
    return min(wanted, there)
