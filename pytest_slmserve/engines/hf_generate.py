"""Transformers' generate() on batches made one after the other: what serving was before continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_slmserve.engines.base import ProgressCallback, WindowBarrier, check_load, ignore_progress, message_of
from pytest_slmserve.engines.launch.vllm_arguments import WORKER
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.engines.worker.slm_pacing import batch_rows, next_batch
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Load, Workload
from pytest_slmserve.schema.records import Run, Samples, Steps
from pytest_slmserve.schema.specs import EngineSpec

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


def batching_of(spec: EngineSpec) -> dict[str, Any]:
    """The worker's arguments of batching: `batching` and `wait_s` (seconds) from the specification's further arguments,
    `batch` from `max_num_seqs`. Raises BadUsage where the further arguments have no `batching`."""
    extra = dict(spec.extra)
    try:
        return {"batching": extra["batching"], "batch": spec.max_num_seqs, "wait_s": extra.get("wait_s", 0.0)}
    except KeyError:
        hint = 'extra=(("batching", "static"),), or "none", or "dynamic"'
        raise BadUsage("an engine of Transformers that does not know how to batch", hint) from None


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
        check_load(self.spec, load)
        self.load_requests(workload)
        how, (t_inf, b_half), times = batching_of(self.spec), self.drawn_law(workload), message_of(load)["schedule"]
        samples, steps, first, now = list[Row](), list[Row](), 0, 0.0
        tokens = [(len(request.prompt), request.output_tokens) for request in workload.requests]
        while first < len(times):
            began, count = next_batch(how["batching"], times, first, now, how["batch"], how["wait_s"])
            rows = [n % len(tokens) for n in range(first, first + count)]
            requests = [(row, sent, *tokens[row]) for row, sent in zip(rows, times[first:])]
            longest, step_s = max(output for *_, output in requests), (b_half + count) / t_inf
            stamps = [began + step_s * (number + 1) for number in range(longest)]
            now = stamps[-1]
            made, answered = batch_rows(requests, began, stamps, now)
            steps += made
            samples += answered
            first += count
        *columns, _ = zip(*samples)  # no prompt comes from a cache
        return Run(Samples(*columns), Steps(*zip(*steps)), (0.0, now))
