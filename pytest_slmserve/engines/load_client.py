"""The load generator as an engine uses it: a process of its own that puts loads on a URL."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import ProgressCallback, WindowBarrier
from pytest_slmserve.engines.launch.child_process import Child, converse, run_from
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Request, Workload
from pytest_slmserve.schema.records import Run, Stream
from pytest_slmserve.schema.secret_words import passed_on

CLIENT = Path(__file__).parent / "loadgen" / "__main__.py"
PACKAGES = Path(__file__).parents[2]  # the folder that holds ours
READY_S = 30.0
TIMEOUT_S = 120.0  # that a request may last by default
REQUEST, PROMPT_TOKENS = 0, 5  # columns of the samples


class LoadClient:
    """The process. headers: sent with every request, the key among them; only the process gets them. cores: those that
    it may use; none: all. timeout_s: the longest that one request may last. processes: how many share the load, if
    one core is not enough for it."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        cores: Collection[int] = (),
        timeout_s: float = TIMEOUT_S,
        processes: int = 1,
    ) -> None:
        command = [sys.executable, str(CLIENT)]
        self._loaded: str | None = None
        # It imports our package from where it is, and nothing from the folder it works in.
        env = passed_on(os.environ) | {"PYTHONPATH": str(PACKAGES)}
        self.child = Child(command, env, cores=cores, name="the load generator")
        self.child.send(url=url, headers=dict(headers), timeout_s=timeout_s, processes=processes)
        ready = self.child.receive(READY_S, "starting")
        if ready["event"] == "failed":
            self.child.kill()
            raise BadUsage(ready["cause"], "http://HOST:PORT/v1/completions")

    def load_requests(
        self, workload: Workload, body: Callable[[Request], str], mark: str = "", rounds: Sequence[str] = ()
    ) -> None:
        """Give it the requests, unless it has them. body: the JSON of each. mark, rounds: the text that differs from
        one round through them to the next (`loadgen.connection.Bodies`)."""
        if not self.has(workload):
            bodies = [body(request) for request in workload.requests]
            output_tokens = [request.output_tokens for request in workload.requests]
            said = {"mark": mark, "rounds": rounds} if rounds else {}
            converse(self.child, op="load", bodies=bodies, output_tokens=output_tokens, **said)
            self._loaded = workload.hash

    def has(self, workload: Workload) -> bool:
        return self._loaded == workload.hash

    def run(
        self, load: Mapping[str, Any], on_progress: ProgressCallback, barrier: WindowBarrier | None
    ) -> dict[str, Any]:
        """The columns of one run, as the client reports them. load: of `message_of`."""
        at = {"at": barrier.begins_s} if barrier else {}
        return converse(self.child, on_progress, barrier, op="run", load=load, **at)

    def kill(self) -> None:
        self.child.kill()


def completion(request: Request, model: str) -> dict[str, Any]:
    """The body of a streamed request for exactly its output tokens, the likeliest each."""
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def run_of(told: Mapping[str, Any], workload: Workload, steps: Sequence[Sequence[Any]] = ()) -> Run:
    """The columns that the client reports, as a Run, with prompt tokens by the workload if a request was cut off before
    the server's count. steps: rows of its server's trace, if there is one."""
    samples = list(told["samples"])
    if samples:
        known = zip(samples[REQUEST], samples[PROMPT_TOKENS], strict=True)
        samples[PROMPT_TOKENS] = [len(workload.requests[i].prompt) if n is None else n for i, n in known]
    run = run_from({**told, "samples": samples, "steps": [*zip(*steps)]})
    (bin_s, begins, tokens), began, (_, closes) = told["received"], told["began"], told["window"]
    silent = int((closes - begins) / bin_s) - len(tokens) if tokens else 0  # spans to the window's end without a token
    scheduled = told["scheduled"]
    stream = Stream(
        bin_s=bin_s,
        begins_s=round(begins - began, 6),
        tokens=(*tokens, *[0.0] * silent),
        gaps=told["gaps"],
        step_gaps=tuple(told["step_gaps"]),
        tokens_per_chunk=told["tokens_per_chunk"],
        scheduled_s=None if scheduled is None else tuple(round(at - began, 6) for at in scheduled),
        unsent_s=tuple(round(at - began, 6) for at in told["unsent"]),
        waited_s=tuple(round(seconds, 6) for seconds in told["waited"]),
        cpu_s=told["client_cpu_s"],
        stamp_uncertainty_s=tuple(told["doubt_s"]),
    )
    return replace(run, stream=stream)
