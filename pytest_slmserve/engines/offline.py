"""Engines in a process of their own, and those that are used without HTTP: vLLM's asynchronous engine, which shows the
GPU, and Transformers' generate(), which shows what serving was before continuous batching."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from pytest_slmserve.engines.base import Engine, Message, Outputs, ProgressCallback, StartCallback, WindowBarrier
from pytest_slmserve.engines.launch.child_process import Child, converse, resolved_from, run_from
from pytest_slmserve.engines.launch.vllm_arguments import WORKER, engine_arguments, engine_environment, model_for
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.loads import Workload
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.specs import EngineSpec

LOOK_S = 0.05
START_S = 900.0  # a first start compiles; a large model is read from a slow disk


class ProcessEngine(Engine):
    """An engine in a process of its own. When it is launched it imports what it needs, and then waits for `start`.

    A file in its folder says that its turn has come. Each of its processes makes a file beside it as soon as it has
    imported everything, and waits (`worker/slm_facts.py`).
    """

    child: Child

    def __init__(
        self, spec: EngineSpec, *, extra_env: Mapping[str, str] | None = None, cores: Collection[int] = ()
    ) -> None:
        """Launch the engine. Raises BadUsage if its model cannot be described.

        Args:
            extra_env: Environment variables of this launch only, which change no measurement.
            cores: CPU cores that the engine may use. Defaults to all.
        """
        super().__init__(spec)
        self.ready = False
        self._cores = cores
        model = model_for(spec)
        folder = Path(tempfile.mkdtemp(prefix="pytest-slmserve-"))
        self._turn = folder / "turn"
        self._began = time.monotonic()
        environment = engine_environment(spec, os.environ, cores) | dict(extra_env or {})
        self._launch(model, folder, environment | {"SLM_TURN": str(self._turn)})

    def _launch(self, model: str, folder: Path, environment: dict[str, str]) -> None:
        """Make the child."""
        raise NotImplementedError

    def _await_ready(self, on_wait: StartCallback | None) -> Mapping[str, Any]:
        """Wait until the engine is ready, and return the facts that it reports of itself. Raises EngineFailed."""
        raise NotImplementedError

    def await_turn(self, on_wait: StartCallback | None = None) -> None:
        until = time.monotonic() + START_S
        while self._waiting_since() is None and self.child.process.poll() is None:
            if time.monotonic() > until:
                raise self.child.failed(f"had not imported vLLM after {START_S:.0f} s")
            if on_wait:
                on_wait(self.child.log)
            time.sleep(LOOK_S)

    def _waiting_since(self) -> float | None:
        """The time of day at which the last of its processes began to wait; None unless all of them wait."""
        stamps = [path.stat().st_mtime for path in self._turn.parent.glob(f"{self._turn.name}.*")]
        return max(stamps) if len(stamps) >= self.spec.tensor_parallel_size else None

    def start(self, on_wait: StartCallback | None = None) -> Self:
        since = self._waiting_since()
        waited_s = max(0.0, time.time() - since) if since else 0.0  # which is no part of its start
        self._turn.touch()
        try:
            facts = self._await_ready(on_wait)
        except BaseException:
            self.child.kill()
            raise
        self.resolved = resolved_from(facts, time.monotonic() - self._began - waited_s)
        self.ready = True
        return self

    def processes(self) -> set[int]:
        try:
            worker = psutil.Process(self.child.process.pid)
            return {worker.pid, *(child.pid for child in worker.children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()


class OfflineEngine(ProcessEngine):
    """vLLM's asynchronous engine, or another one whose worker answers the same messages."""

    worker = WORKER
    _loaded: str | None = None  # the hash of the requests that the worker has

    def _launch(self, model: str, folder: Path, environment: dict[str, str]) -> None:
        command = [self.spec.python or sys.executable, "-u", str(self.worker)]
        self.child = Child(command, environment, folder, self._cores)
        try:
            self.child.send(**self.arguments(model))
        except BaseException:
            self.child.kill()
            raise

    def arguments(self, model: str) -> Message:
        """The first message to the worker: the arguments of its engine. model: a folder or a Hub name."""
        return engine_arguments(self.spec, model)

    def _await_ready(self, on_wait: StartCallback | None) -> Mapping[str, Any]:
        ready = self.child.receive(START_S, "starting", on_wait)
        if ready["event"] == "failed":
            raise self.child.failed(f"did not start: {ready['cause']}")
        return ready

    def ask(
        self, progress: ProgressCallback | None = None, barrier: WindowBarrier | None = None, /, **message: Any
    ) -> Message:
        """Send one message to the worker, and return its answer. Raises EngineFailed."""
        self.ready = False
        answer = converse(self.child, progress, barrier, **message)
        self.ready = True
        return answer

    def load_requests(self, workload: Workload) -> None:
        if self._loaded != workload.hash:
            super().load_requests(workload)
            prompts = [request.prompt for request in workload.requests]
            self.ask(op="load", prompts=prompts, output_tokens=[r.output_tokens for r in workload.requests])
            self._loaded = workload.hash

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        at = {"at": barrier.begins_s} if barrier else {}
        run = run_from(self.ask(progress, barrier, op="run", load=load, **at))
        if run.first_failure and "EngineDead" in run.first_failure:
            self.ready = False
            raise self.child.failed(f"died while it served ({run.first_failure})")
        return run

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        self.load_requests(workload)
        return tuple(map(tuple, self.ask(op="tokens", requests=requests, length=length)["tokens"]))

    def _logprobs(self, workload: Workload, outputs: Outputs) -> Sequence[Sequence[float]]:
        self.load_requests(workload)
        scores: list[list[float]] = self.ask(op="scores", outputs=outputs)["scores"]
        return scores

    def _profile(self, load: Message) -> str | None:
        problem: str | None = self.ask(op="profile", load=load)["problem"]
        return problem

    def close(self) -> None:
        """Stop the process: by a message if it waits for one, and at once during a load, whose end it would await."""
        polite, self.ready = self.ready, False
        if not polite:
            return self.child.kill()
        with suppress(EngineFailed):
            self.child.send(op="close")
        self.child.end()


class BatchedEngine(OfflineEngine):
    """Transformers' generate() on batches that are made one after the other."""

    worker = WORKER.with_name("hf_worker.py")
    jobs_only = True

    def arguments(self, model: str) -> Message:
        device = "cuda" if self.spec.platform == "cuda" else "cpu"
        same = {name: getattr(self.spec, name) for name in ("load_format", "dtype", "max_model_len", "seed")}
        return {"model": model, "device": device, **same, **self.batching}
