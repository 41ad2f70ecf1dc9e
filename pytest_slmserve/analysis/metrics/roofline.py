"""Roofline: the highest throughput of a model that a GPU's data sheet allows, and how near a measurement came. Nothing
is faster than its roofline."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from pytest_slmserve.analysis.estimates import mean_of_known
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.schema.kv_cache import computes_in_fp8, kv_layout, value_bytes, weight_bytes
from pytest_slmserve.schema.models import Model
from pytest_slmserve.schema.records import Environment, Measurement, Resolved
from pytest_slmserve.schema.specs import EngineSpec, WorkloadReference


@dataclass(frozen=True, slots=True)
class Peaks:
    """A GPU by its data sheet. words: all of them are in its NVML name. flops_per_s: dense fp16/bf16 tensor with fp32
    accumulation, never the sparse number. fp8_flops_per_s: the same in fp8; None where the GPU has none."""

    family: str
    words: tuple[str, ...]
    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float | None = None

    @property
    def ridge(self) -> float:
        """FLOP per byte above which a kernel is bound by arithmetic."""
        return self.flops_per_s / self.bytes_per_s


_DATA_SHEETS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))
GPUS = tuple(Peaks(family, tuple(row.pop("words")), **row) for family, row in _DATA_SHEETS.items())
OTHER_WORDS = {"MIG", "NVL", "3E", "TI", "D", "LAPTOP"}  # a slice of the card, or a variant with other numbers


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one request on a GPU, in tokens and bytes. parameters: weights that each token is multiplied with: of
    experts those that it is sent to, and no embeddings that it is only looked up in. lm_head: those among them that
    only a sampled token is, for engines compute no logits of the rest of a prompt. weight_bytes: of these weights, with
    all experts. kv_bytes_per_token: read for each token of the mean context. heads_width: query heads x head size x
    layers; one that slides counts with the share of the context that it sees. idle_share: of the weights, experts that
    one token is not sent to. routed_share: of the experts, those that it is sent to."""

    parameters: float
    lm_head: float
    weight_bytes: float
    kv_bytes_per_token: float
    heads_width: float
    prompt_tokens: float
    output_tokens: float
    idle_share: float = 0.0
    routed_share: float = 1.0

    @property
    def context(self) -> float:
        """Mean context while decoding: the prompt and half of the output. For lengths that vary it is low (long
        outputs weigh more), so a bound stays a bound."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def b_half(self) -> float:
        """Sequences whose KV cache weighs as much as the weights."""
        return self.weight_bytes / (self.context * self.kv_bytes_per_token)

    @property
    def prefill_flops(self) -> float:
        """FLOPs of one request's prompt; attention is causal, so it takes half of the square."""
        layers = 2 * (self.parameters - self.lm_head) * self.prompt_tokens
        return layers + 2 * self.lm_head + 2 * self.heads_width * self.prompt_tokens**2

    @property
    def token_flops(self) -> float:
        """FLOPs of one decoded token, at the mean context."""
        return 2 * self.parameters + 4 * self.heads_width * self.context

    @property
    def intensity(self) -> float:
        """FLOP per byte of decoding as the batch grows without limit: the FLOPs of a token over the bytes of its
        context. Above the ridge of a GPU, arithmetic bounds decoding, else memory. It is b_half + query heads per KV
        head."""
        return self.token_flops / (self.context * self.kv_bytes_per_token)

    def weights_read(self, tokens: float) -> float:
        """Bytes of the weights that a step of so many tokens reads; of the experts those that one of them is sent to,
        as many as there are if each token chooses at random."""
        untouched: float = (1 - self.routed_share) ** max(0.0, tokens - 1)
        return self.weight_bytes * (1 - self.idle_share * untouched)


def peaks_of(gpu_name: str | None) -> Peaks | None:
    """The data sheet that an NVML name ("NVIDIA H200", "NVIDIA A100-SXM4-40GB") belongs to, None if not listed."""
    words = set(re.split(r"[\s\-_]+", (gpu_name or "").upper()))
    others = words & OTHER_WORDS
    return next((gpu for gpu in GPUS if others <= set(gpu.words) <= words), None)


def peaks_of_engine(spec: EngineSpec, environment: Environment) -> Peaks | None:
    """Peak rates of all GPUs of an engine: as the user gave them, else by the data sheet; None where that is not
    listed."""
    peaks = peaks_of(environment.gpu_name)
    if given := environment.gpu_peaks:
        peaks = Peaks("given", (), flops_per_s=given.tflops * 1e12, bytes_per_s=given.gbps * 1e9)
    return None if peaks is None else peaks_for(spec, peaks)


def peaks_for(spec: EngineSpec, peaks: Peaks) -> Peaks:
    """Peak rates of all GPUs of an engine, as if none ever waited, in fp8 if that is its quantization. peaks: of one
    GPU."""
    gpus = spec.tensor_parallel_size
    fp8 = peaks.fp8_flops_per_s if computes_in_fp8(spec) else None
    return replace(peaks, bytes_per_s=gpus * peaks.bytes_per_s, flops_per_s=gpus * (fp8 or peaks.flops_per_s))


def work_of_model(
    model: Model,
    prompt_tokens: float,
    output_tokens: float,
    *,
    weight_bytes: float | None = None,
    each: int = 2,
    kv_each: int | None = None,
    gpus: int = 1,
) -> Work | None:
    """A request's work. weight_bytes: as measured; without it the model must tell its parameters. each, kv_each: bytes
    of a weight, and of a number in the KV cache, None for as many. gpus: that together hold the KV heads. None where
    the weights or what the layers keep is not known."""
    known, context = weight_bytes or model.weight_bytes(each), prompt_tokens + output_tokens / 2
    read = model.kv_read_bytes(context, kv_each or each, gpus)
    if known is None or read is None:
        return None
    lookups = 0 if model.tied else model.lm_head  # embeddings of which a token reads one row
    return Work(
        parameters=(model.active or known / each) - lookups,
        lm_head=model.lm_head,
        weight_bytes=known - lookups * each,
        kv_bytes_per_token=read / context,
        heads_width=model.attention_width(context),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        idle_share=(model.parameters - (model.active or 0)) / (model.parameters - lookups) if model.parameters else 0.0,
        routed_share=model.experts_per_token / model.experts if model.experts else 1.0,
    )


def work_of_workload(spec: EngineSpec, resolved: Resolved, workload: WorkloadReference) -> Work | None:
    """The work of a workload's mean request, None where the model's shape or data type is unknown, or prompts may come
    from a cache."""
    model, each = spec.model_facts, value_bytes(spec, resolved)
    if model is None or each is None or (spec.allow_prefix_cache and spec.caches_prefixes):
        return None
    return work_of_model(
        model,
        workload.mean_prompt_tokens,
        workload.mean_output_tokens,
        weight_bytes=resolved.weight_bytes or weight_bytes(spec, each),
        each=each,
        kv_each=kv_layout(spec, resolved).value_bytes,
        gpus=spec.tensor_parallel_size,
    )


def ceiling_tokens_per_s(work: Work, peaks: Peaks, batch: float, *, overlap: bool = False) -> float:
    """Upper bound of the output tokens/s of `batch` running sequences.

    A request costs its prefill (bound by arithmetic) and a decode step for each token after the first, each bound by
    bytes or by arithmetic, whichever is slower. overlap: prefill may hide behind the memory traffic of decoding, as
    chunked prefill tries to; only then is the bound one that no engine can pass. A batch under 1 (an engine that
    sometimes idles) has the bound of 1.
    """
    batch = max(batch, 1.0)
    decoded = max(work.output_tokens - 1, 0.0)
    prefill = work.prefill_flops / peaks.flops_per_s
    token_bytes = work.weights_read(batch) / batch + work.context * work.kv_bytes_per_token
    by_bytes = decoded * token_bytes / peaks.bytes_per_s
    by_flops = decoded * work.token_flops / peaks.flops_per_s
    seconds = max(by_bytes, prefill + by_flops) if overlap else prefill + max(by_bytes, by_flops)
    return work.output_tokens / seconds


def roofline_fraction(
    measurement: Measurement, tokens_per_s: float | None, batch: float | None, *, overlap: bool = False
) -> float | None:
    """Measured output tokens/s over the bound, 0 to 1; None where GPU, model or throughput are unknown."""
    peaks = peaks_of_engine(measurement.spec, measurement.environment)
    work = work_of_workload(measurement.spec, measurement.resolved, measurement.workload)
    if peaks is None or work is None or tokens_per_s is None or batch is None:
        return None
    return tokens_per_s / ceiling_tokens_per_s(work, peaks, batch, overlap=overlap)


Bound = Literal["memory", "compute", "host", "mixed"]

# What a counter reads where its unit can do no more: on an H200, 0.89 in plain copies (4.28 of the 4.8 TB/s of the data
# sheet) and 0.94 in fp16 matrix products of 8192 (0.64 of 0.99 PFLOP/s: the power limit lowers the clock, and the ratio
# is of the cycles that are left). On an H100 0.90 (3.01 of 3.35 TB/s) and 0.94. docs/sensors.md has more.
REACHABLE_DRAM = 0.89
REACHABLE_TENSOR = 0.94
SATURATED = 0.5  # a unit that is busy for less than half of what it can be leaves most of the step to something else
IDLE = 0.3  # arXiv:2503.08311, figure 7: gaps took 25 % of a step of OPT-1.3B at batch 1, 37 % at 512
EXPLAINED = 0.5  # by shapes alone: more than half of the step must go there at the very least


@dataclass(frozen=True, slots=True)
class StepTime:
    """The mean step of a measurement. weights_s, kv_s, flops_s: the time that the weights, the keys and values, and the
    FLOPs take at least, by shapes and the data sheet. unexplained: the share of the step that the larger of bytes and
    FLOPs does not fill: host, launches, and all that stays below the data sheet. bound: by counters, else by shapes;
    None: neither can tell."""

    weights_s: float
    kv_s: float
    flops_s: float
    unexplained: float
    bound: Bound | None


@dataclass(frozen=True, slots=True)
class StepParts:
    """Shares of a step, which add up to 1; None: not known, or not a part.

    weights, kv: to move the weights, and the keys and values, at the data sheet's rate. flops: what arithmetic takes
    beyond both, at its rate. kernels: further time in which a kernel ran. idle: time in which none did. unsplit:
    kernels and idle together, where no counter tells them apart.
    """

    weights: float | None = None
    kv: float | None = None
    flops: float | None = None
    kernels: float | None = None
    idle: float | None = None
    unsplit: float | None = None


def step_time(measurement: Measurement, figures: DeviceFigures) -> StepTime | None:
    """The mean step of a window. figures: those of its sensors. None where the GPU or the model's shape is unknown, or
    the window has no steps.

    Each step reads the weights once and the contexts of the sequences it decodes; the keys and values of prompts are
    written. A prompt's last step yields its first token, so that token is the prefill's.
    """
    run, trace, step_s = measurement.run, window.window_trace(measurement.run), window.step_s(measurement.run)
    steps, span = trace.steps[1:], trace.span_s
    peaks = peaks_of_engine(measurement.spec, measurement.environment)
    work = work_of_workload(measurement.spec, measurement.resolved, measurement.workload)
    if peaks is None or work is None or span is None or step_s is None:
        return None
    rows = zip(run.samples.prompt_tokens, run.samples.first_token_s, strict=True)
    prompts = [tokens for tokens, first in rows if first is not None and span[0] < first <= span[1]]
    decoded = max(0, sum(run.steps.new_tokens[i] for i in steps) - len(prompts))
    kv_tokens = decoded * work.context + sum(prompts)
    prefill = sum(replace(work, prompt_tokens=tokens).prefill_flops for tokens in prompts)
    # Of experts a step with a prompt reads nearly all, and one without it few: no mean step has their mean.
    tokens = ((run.steps.new_tokens[i], run.steps.prompt_tokens[i]) for i in steps) if work.idle_share else [(0, 0)]
    weights_s = fmean(work.weights_read(max(each)) for each in tokens) / peaks.bytes_per_s
    kv_s = kv_tokens * work.kv_bytes_per_token / len(steps) / peaks.bytes_per_s
    flops_s = (decoded * work.token_flops + prefill) / len(steps) / peaks.flops_per_s
    bound = bound_by_counters(figures)
    if bound is None and max(weights_s + kv_s, flops_s) >= EXPLAINED * step_s:
        bound = "memory" if weights_s + kv_s >= flops_s else "compute"
    return StepTime(weights_s, kv_s, flops_s, 1 - max(weights_s + kv_s, flops_s) / step_s, bound)


def step_parts(measurements: Sequence[Measurement]) -> StepParts | None:
    """Parts of the mean step: means over repeats. None if a repeat has none, or other ones than the others: where
    neither data sheet nor counters tell, and where the counters saw kernels for less than the data sheet allows."""
    each: list[StepParts] = []
    for m in measurements:
        figures, step_s = device_figures(m.run), window.step_s(m.run)
        known, idle = step_time(m, figures), idle_share(figures.engine_active)
        if known is not None and step_s is not None:
            unexplained = known.unexplained - (idle or 0.0)
            bytes_s = known.weights_s + known.kv_s
            least = known.weights_s / step_s, known.kv_s / step_s, max(0.0, known.flops_s - bytes_s) / step_s
            if unexplained >= 0:
                rest = (None, None, unexplained) if idle is None else (unexplained, idle)
                each.append(StepParts(*least, *rest))
        elif step_s is not None and idle is not None:
            each.append(StepParts(kernels=1 - idle, idle=idle))
    kinds = {tuple(share is None for share in astuple(parts)) for parts in each}
    if len(each) < len(measurements) or len(kinds) != 1:
        return None
    return StepParts(*(mean_of_known(shares) for shares in zip(*map(astuple, each))))


def idle_share(engine_active: float | None) -> float | None:
    """Share of the window in which no kernel ran: the host's part, as counters see it."""
    return None if engine_active is None else max(0.0, 1 - engine_active)


def bound_by_counters(figures: DeviceFigures) -> Bound | None:
    """host: the GPU idles for at least IDLE of the time, and longer than its memory is busy. Else memory or compute,
    whichever is nearer to what it can reach, if at least half way there. Else mixed: nothing is near its end, kernels
    wait for latencies and for each other. None without both counters."""
    dram, tensor, idle = figures.dram_active, figures.tensor_active, idle_share(figures.engine_active)
    if dram is None or tensor is None:
        return None
    if idle is not None and idle >= IDLE and idle > dram:
        return "host"
    memory, compute = dram / REACHABLE_DRAM, tensor / REACHABLE_TENSOR
    if max(memory, compute) < SATURATED:
        return "mixed"
    return "memory" if memory >= compute else "compute"


def saturation_gap(dram: float | None, tensor: float | None) -> float | None:
    """ln of how near the memory is to its reach over how near the tensor cores are to theirs, by counters.

    Positive where memory is nearer to its end. None where either is not known or was not busy at all.
    """
    if dram is None or tensor is None or dram <= 0 or tensor <= 0:
        return None
    return math.log(dram / REACHABLE_DRAM) - math.log(tensor / REACHABLE_TENSOR)
