"""Breakdown of the time of an engine step: memory, arithmetic, or the host that feeds the GPU.

Two views that know nothing of each other: what the shapes say must be moved and computed at least, and what the GPU's
own counters saw. arXiv:2503.08311 found decode bound by DRAM inside the attention kernel, while a third of the step
at the largest batch was a gap in which the GPU waited for the host: so the step, not the kernel, is taken apart here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import Literal

from pytest_slmserve.analysis.device.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.roofline import Work, peaks_of_engine, work_of_workload
from pytest_slmserve.analysis.stats.estimates import mean_of_known
from pytest_slmserve.schema.records import Measurement, Run

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

    @property
    def bytes_s(self) -> float:
        return self.weights_s + self.kv_s


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
    """figures: those of its sensors. None where the GPU or the model's shape is unknown, or the window has no steps."""
    peaks = peaks_of_engine(measurement.spec, measurement.environment)
    step_s = window.step_s(measurement.run)
    work = work_of_workload(measurement.spec, measurement.resolved, measurement.workload)
    if peaks is None or work is None or step_s is None:
        return None
    weights, moved, computed = _bytes_and_flops(measurement.run, work)
    bytes_s, flops_s = moved / peaks.bytes_per_s, computed / peaks.flops_per_s
    weights_s = weights / peaks.bytes_per_s
    return StepTime(
        weights_s=weights_s,
        kv_s=bytes_s - weights_s,
        flops_s=flops_s,
        unexplained=1 - max(bytes_s, flops_s) / step_s,
        bound=bound_by_counters(figures) or bound_by_shapes(bytes_s / step_s, flops_s / step_s),
    )


def step_parts(measurements: Sequence[Measurement]) -> StepParts | None:
    """Parts of the mean step: means over repeats. None where a repeat has none, or other ones than the others."""
    each = [parts for m in measurements if (parts := _step_parts(m))]
    kinds = {tuple(share is None for share in astuple(parts)) for parts in each}
    if len(each) < len(measurements) or len(kinds) != 1:
        return None
    return StepParts(*(mean_of_known(shares) for shares in zip(*map(astuple, each))))


def _step_parts(measurement: Measurement) -> StepParts | None:
    """None where neither data sheet nor counters tell, and where the counters saw kernels for less than the data sheet
    allows."""
    figures, step_s = device_figures(measurement.run), window.step_s(measurement.run)
    known, idle = step_time(measurement, figures), idle_share(figures.engine_active)
    if known is None or step_s is None:
        return None if step_s is None or idle is None else StepParts(kernels=1 - idle, idle=idle)
    unexplained = known.unexplained - (idle or 0.0)
    if unexplained < 0:
        return None
    least = known.weights_s / step_s, known.kv_s / step_s, max(0.0, known.flops_s - known.bytes_s) / step_s
    return StepParts(*least, unsplit=unexplained) if idle is None else StepParts(*least, unexplained, idle)


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


def bound_by_shapes(by_bytes: float, by_flops: float) -> Bound | None:
    """Resource that bounds a step, memory or compute; None where neither share reaches `EXPLAINED`. by_bytes, by_flops:
    shares of the step that its bytes and its FLOPs take at least."""
    if max(by_bytes, by_flops) < EXPLAINED:
        return None
    return "memory" if by_bytes >= by_flops else "compute"


def saturation_gap(dram: float | None, tensor: float | None) -> float | None:
    """ln of how near the memory is to its reach over how near the tensor cores are to theirs, by counters.

    Positive where memory is nearer to its end. None where either is not known or was not busy at all.
    """
    if dram is None or tensor is None or dram <= 0 or tensor <= 0:
        return None
    return math.log(dram / REACHABLE_DRAM) - math.log(tensor / REACHABLE_TENSOR)


def _bytes_and_flops(run: Run, work: Work) -> tuple[float, float, float]:
    """Lower bounds of the bytes of weights moved, of all bytes moved, and of the FLOPs computed in the window's mean
    step. Each step reads the weights once and the contexts of the sequences it decodes; the keys and values of prompts
    are written. A prompt's last step yields its first token, so that token is the prefill's."""
    (began, ended), samples = window.span_s(run) or (0.0, 0.0), run.samples
    rows = zip(samples.prompt_tokens, samples.first_token_s, strict=True)
    prompts = [tokens for tokens, first in rows if first is not None and began < first <= ended]
    steps = window.window_steps(run)[1:]
    decoded = max(0, sum(run.steps.new_tokens[i] for i in steps) - len(prompts))
    kv_tokens = decoded * work.context + sum(prompts)
    prefill = sum(replace(work, prompt_tokens=tokens).prefill_flops for tokens in prompts)
    # Of experts a step with a prompt reads nearly all, and one without it few: no mean step has their mean.
    tokens = ((run.steps.new_tokens[i], run.steps.prompt_tokens[i]) for i in steps) if work.idle_share else [(0, 0)]
    weights = fmean(work.weights_read(max(each)) for each in tokens)
    moved = weights + kv_tokens * work.kv_bytes_per_token / len(steps)
    return weights, moved, (decoded * work.token_flops + prefill) / len(steps)
