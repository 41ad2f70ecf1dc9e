"""vLLM's asynchronous engine without HTTP: this interface shows the GPU."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import (
    Outputs,
    ProgressCallback,
    Scores,
    WindowBarrier,
    check_fits,
    check_load,
    ignore_progress,
    message_of,
    scored,
)
from pytest_slmserve.engines.launch.child_process import Child, converse, resolved_from, run_from
from pytest_slmserve.engines.launch.model_files import model_for
from pytest_slmserve.engines.launch.vllm_arguments import (
    NOWHERE_ELSE,
    START_S,
    WORKER,
    StaggeredEngine,
    StartTurn,
    engine_arguments,
    engine_environment,
    placement_env,
)
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.loads import Load, Workload
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.specs import EngineSpec


class OfflineEngine(StaggeredEngine):
    """Starts when made, unless held; raises EngineFailed with the cause and the end of the log when it cannot."""

    worker = WORKER

    def __init__(
        self,
        spec: EngineSpec,
        *,
        extra_env: Mapping[str, str] = NOWHERE_ELSE,
        cores: Collection[int] = (),
        held: bool = False,
    ) -> None:
        """extra_env: variables that say where it runs beside others, which change no measurement of an engine alone.
        cores: the CPU cores that it may use; none: all. held: it imports what it needs, and waits for `start` before it
        touches the device."""
        self.spec = spec
        self.ready = False
        self.launch = uuid.uuid4().hex[:12]
        self._loaded: str | None = None
        model = model_for(spec)
        folder = Path(tempfile.mkdtemp(prefix="pytest-slmserve-"))
        self._turn = StartTurn(folder, spec.tensor_parallel_size, held)
        environment = engine_environment(spec, os.environ) | placement_env(spec, extra_env, cores, self._turn)
        self.child = Child([spec.python or sys.executable, "-u", str(self.worker)], environment, folder, cores)
        with self._or_killed():
            self.child.send(**self.arguments(model))
        if not held:
            self._finish_start()

    def arguments(self, model: str) -> dict[str, Any]:
        """The first message to the engine's process: its arguments. model: a folder or a Hub name."""
        return engine_arguments(self.spec, model)

    def _finish_start(self) -> None:
        with self._or_killed():
            ready = self.child.event(START_S, "starting")
            if ready["event"] == "failed":
                raise self.child.failed(f"did not start: {ready['cause']}")
        self.resolved = resolved_from(ready, self._turn.start_s)
        self.ready = True

    @contextmanager
    def _or_killed(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.child.kill()
            raise

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = ignore_progress,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        check_load(self.spec, load)
        self.load_requests(workload)
        at = {"at": barrier.begins_s} if barrier else {}
        run = run_from(self.ask(on_progress, barrier, op="run", load=message_of(load), **at))
        if run.first_failure and "EngineDead" in run.first_failure:
            self.ready = False
            raise self.child.failed(f"died while it served ({run.first_failure})")
        return run

    def ask(
        self, on_progress: ProgressCallback = ignore_progress, barrier: WindowBarrier | None = None, /, **message: Any
    ) -> dict[str, Any]:
        """One message there, its answer back; also for a worker that answers more than ours does."""
        self.ready = False
        answer = converse(self.child, on_progress, barrier, **message)
        self.ready = True
        return answer

    def load_requests(self, workload: Workload) -> None:
        if self._loaded == workload.hash:
            return
        check_fits(self.spec, workload)
        prompts = [r.prompt for r in workload.requests]
        self.ask(op="load", prompts=prompts, output_tokens=[r.output_tokens for r in workload.requests])
        self._loaded = workload.hash

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        self.load_requests(workload)
        return tuple(map(tuple, self.ask(op="tokens", requests=requests, length=length)["tokens"]))

    def scores(self, workload: Workload, outputs: Outputs) -> Scores:
        self.load_requests(workload)
        return scored(self.ask(op="scores", outputs=outputs)["scores"])

    def profile(self, workload: Workload, load: Load) -> str | None:
        self.load_requests(workload)
        problem: str | None = self.ask(op="profile", load=message_of(load))["problem"]
        return problem

    def close(self) -> None:
        """Stop the process: politely where it waits for us, at once in a load, whose end it would await first."""
        polite, self.ready = self.ready, False
        if not polite:
            return self.child.kill()
        with suppress(EngineFailed):
            self.child.send(op="close")
        self.child.end()
