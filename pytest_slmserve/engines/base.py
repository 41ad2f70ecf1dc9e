"""The seam between us and whatever serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Load, OpenLoop, Workload, is_job
from pytest_slmserve.schema.records import Progress, Resolved, Run
from pytest_slmserve.schema.specs import EngineSpec

ProgressCallback = Callable[[Progress], None]
Outputs = tuple[tuple[int, ...], ...]  # ids of tokens, of each request
Scores = tuple[float, ...]  # of each request
IMPOSSIBLE = -100.0  # nats
PROFILE_FOLDER = "SLM_PROFILE"  # variable of an engine that shall be profiled: where its traces go


def check_fits(spec: EngineSpec, workload: Workload) -> None:
    """Raises BadUsage where a request is longer than the engine takes."""
    if workload.longest > spec.max_model_len:
        known = spec.model_facts
        longer = "" if known and workload.longest > known.positions else f"max_model_len={workload.longest}, or "
        raise BadUsage(
            f"requests of {workload.longest} tokens do not fit max_model_len {spec.max_model_len}",
            f"{longer}shorter requests",
        )


def check_load(spec: EngineSpec, load: Load) -> None:
    """Raises BadUsage for a load that only a client of a server can make; and, where batches are made one after the
    other, for users who send when they are answered: a static batch would wait for those that wait for it."""
    if spec.interface == "transformers" and not is_job(load):
        raise BadUsage("batches made one after the other are for a fixed number of requests", "slm_job")
    if isinstance(load, OpenLoop) and (load.requests is None or load.max_concurrency is not None):
        raise BadUsage(
            "an open loop with a window or with max_concurrency needs a server", "the server interface, or an endpoint"
        )


def message_of(load: Load) -> dict[str, Any]:
    """The load in the words of the process that sends it. Raises BadUsage for an open loop without its schedule."""
    if not isinstance(load, OpenLoop):
        return {**asdict(load), "kind": "closed_loop"}
    return {
        "kind": "open_loop",
        "schedule": load.times,
        "window": None if load.window_s is None else (load.settle_s, load.settle_s + load.window_s),
        "steps": load.step_windows_s,
        "most": load.max_concurrency,
    }


def ignore_progress(progress: Progress) -> None:
    """The listener of those who do not want to hear."""


class WindowBarrier(Protocol):
    """A barrier of engines that are measured together. begins_s: when all begin, by the host's monotonic clock."""

    begins_s: float

    def settled(self) -> tuple[float, float]:
        """Report that this engine's load has settled, and wait until all have. Returns the begin and the end of the
        common window, by the host's monotonic clock. Raises EngineFailed where another engine will not settle."""


def scored(logprobs: Iterable[Sequence[float]]) -> Scores:
    """The mean of each request's log probabilities. What is no number, or less than IMPOSSIBLE, counts as that: of a
    broken engine a record must hold it."""
    return tuple(fmean(one if one > IMPOSSIBLE else IMPOSSIBLE for one in each) for each in logprobs)


class Engine(Protocol):
    """A started engine. `launch` is unique to this start; `resolved` is what it made of its specification.

    ready: it waits for the next load. False while it serves one, and for ever when a load was broken off.
    """

    spec: EngineSpec
    launch: str
    resolved: Resolved
    ready: bool

    def load_requests(self, workload: Workload) -> None:
        """Give it the requests, so that the next run of them begins at once. Raises BadUsage where they do not fit."""

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = ignore_progress,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        """Put `load` on the engine and wait for its end. barrier: of several. Raises EngineFailed if it dies."""

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        """The first `length` greedy tokens of the first requests, one after the other. Raises EngineFailed."""

    def scores(self, workload: Workload, outputs: Outputs) -> Scores:
        """The mean log probability, in nats, of these tokens after the prompts of the first requests. Raises
        EngineFailed."""

    def close(self) -> None:
        """Stop it and free its device; may be called twice."""


@runtime_checkable
class CanProfile(Protocol):
    """An engine that has a profiler of its own."""

    def profile(self, workload: Workload, load: Load) -> str | None:
        """Serve a short window of `load` under it; the traces lie in the folder that `PROFILE_FOLDER` named when the
        engine started. Says why there are none. Raises EngineFailed."""
