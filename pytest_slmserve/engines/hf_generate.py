"""Transformers' generate() on batches made one after the other: what serving was before continuous batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_slmserve.engines.base import ProgressCallback, WindowBarrier, ignore_progress
from pytest_slmserve.engines.launch.vllm_arguments import WORKER
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.engines.worker.slm_pacing import next_batch
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Load, is_job
from pytest_slmserve.schema.records import Run, Samples, Steps
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.workloads import Workload

Row = tuple[Any, ...]
GENERATE = WORKER.with_name("hf_worker.py")


class BatchedEngine(OfflineEngine):
    """An engine of Transformers' generate(): another worker process, otherwise driven as vLLM's engine is."""

    worker = GENERATE

    def arguments(self, model: str) -> dict[str, Any]:
        spec = self.spec
        return {
            "model": model,
            "load_format": spec.load_format,
            "device": "cuda" if spec.platform == "cuda" else "cpu",
            "dtype": spec.dtype,
            "max_model_len": spec.max_model_len,
            "seed": spec.seed,
            **batching_of(spec),
        }

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = ignore_progress,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        times_of(load)
        return super().run(workload, load, on_progress, barrier)


def batching_of(spec: EngineSpec) -> dict[str, Any]:
    """The worker's arguments of batching: `batching` and `wait_s` (seconds) from the specification's further arguments,
    `batch` from `max_num_seqs`. Raises BadUsage where the further arguments have no `batching`."""
    extra = dict(spec.extra)
    try:
        return {"batching": extra["batching"], "batch": spec.max_num_seqs, "wait_s": extra.get("wait_s", 0.0)}
    except KeyError:
        hint = 'extra=(("batching", "static"),), or "none", or "dynamic"'
        raise BadUsage("an engine of Transformers that does not know how to batch", hint) from None


def times_of(load: Load) -> tuple[float, ...]:
    """The time at which each request of a job arrives, in seconds since its beginning. Raises BadUsage for users who
    send when they are answered: a static batch would wait for those that wait for it."""
    if not is_job(load):
        raise BadUsage("batches made one after the other are for a fixed number of requests", "slm_job")
    return load.times


class SimulatedBatches(SimulatedEngine):
    """A simulated engine that makes batches one after the other. A step of B slots takes (b_half + B)/t_inf seconds,
    the formula of `SimulatedEngine`, whether their requests have ended or not."""

    def __init__(self, spec: EngineSpec, extra_env: Mapping[str, str] | None = None) -> None:
        super().__init__(spec, extra_env=extra_env)
        self.resolved = replace(self.resolved, kv_blocks=None)  # its cache grows with the batch

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = ignore_progress,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        self.load_requests(workload)
        how, (t_inf, b_half) = batching_of(self.spec), self.drawn_law(workload)
        times = times_of(load)
        samples, steps, first, now = list[Row](), list[Row](), 0, 0.0
        while first < len(times):
            began, count = next_batch(how["batching"], times, first, now, how["batch"], how["wait_s"])
            numbers, step_s = range(first, first + count), (b_half + count) / t_inf
            made, now = _batch(workload, numbers, began, step_s)
            steps += made
            samples += _answers(workload, numbers, times, (began, made[0][0], now))
            first += count
        return Run(Samples(*zip(*samples)), Steps(*zip(*steps)), (0.0, now))


def _batch(workload: Workload, numbers: range, began: float, step_s: float) -> tuple[list[Row], float]:
    """Rows of the steps of a batch, and when it ends."""
    requests = [workload.requests[n % len(workload.requests)] for n in numbers]
    longest, prompts = max(r.output_tokens for r in requests), max(len(r.prompt) for r in requests)
    steps: list[Row] = []
    for number in range(longest):
        useful, computed = sum(r.output_tokens > number for r in requests), 0 if number else prompts * len(requests)
        steps.append((began + step_s * (number + 1), len(requests), 0, useful, computed, None, 0))
    return steps, began + step_s * longest


def _answers(
    workload: Workload, numbers: range, times: Sequence[float], stamps: tuple[float, float, float]
) -> list[Row]:
    """Rows of the requests of a batch. stamps: when it began, made its first token, and ended."""
    rows = [(n % len(workload.requests), times[n]) for n in numbers]
    return [
        (row, sent, *stamps, len(workload.requests[row].prompt), workload.requests[row].output_tokens, True)
        for row, sent in rows
    ]
