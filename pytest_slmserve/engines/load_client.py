"""The load generator as an engine uses it: one or several processes of its own that put loads on a URL."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import Message, ProgressCallback, WindowBarrier
from pytest_slmserve.engines.launch.child_process import Child, converse, run_from
from pytest_slmserve.engines.loadgen.load_run import merged_columns, parts_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Request, Workload
from pytest_slmserve.schema.records import Progress, Run, Stream
from pytest_slmserve.schema.secret_words import passed_on
from pytest_slmserve.telemetry.host import own_cores

CLIENT = Path(__file__).parent / "loadgen" / "__main__.py"
PACKAGES = Path(__file__).parents[2]  # the folder that holds ours
READY_S = 30.0
TIMEOUT_S = 120.0  # that a request may last by default
REQUEST, PROMPT_TOKENS = 0, 5  # columns of the samples
PHASES = ("ramp", "settle", "window", "over")


class LoadClient:
    """The processes of a load generator.

    headers: sent with every request, the key among them; only the processes get them. cores: those that they may use;
    none: all. timeout_s: the longest that one request may last. processes: how many share a load, if one core is not
    enough for it; each has its part of the cores, if there are enough.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        cores: Collection[int] = (),
        timeout_s: float = TIMEOUT_S,
        processes: int = 1,
    ) -> None:
        self._loaded: str | None = None
        # It imports our package from where it is, and nothing from the folder it works in.
        env = passed_on(os.environ) | {"PYTHONPATH": str(PACKAGES)}
        command, ours = [sys.executable, str(CLIENT)], sorted(cores or own_cores())
        parts = [ours[i::processes] if len(ours) >= processes > 1 else cores for i in range(processes)]
        self.children = [Child(command, env, cores=part, name="the load generator") for part in parts]
        for child in self.children:
            child.send(url=url, headers=dict(headers), timeout_s=timeout_s)
        for child in self.children:
            ready = child.receive(READY_S, "starting")
            if ready["event"] == "failed":
                self.kill()
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
            for child in self.children:
                converse(child, op="load", bodies=bodies, output_tokens=output_tokens, **said)
            self._loaded = workload.hash

    def has(self, workload: Workload) -> bool:
        return self._loaded == workload.hash

    def run(self, load: Message, on_progress: ProgressCallback, barrier: WindowBarrier | None) -> Message:
        """The columns of one run, as one client process reports them. Several share the load; they begin together, and
        have one window and one progress. Raises EngineFailed, after which all are stopped, if one of them died."""
        parts = parts_of(load, len(self.children))
        if len(parts) == 1:
            at = {"at": barrier.begins_s} if barrier else {}
            return converse(self.children[0], on_progress, barrier, op="run", load=load, **at)
        assert barrier is None, "one engine of several has one process"
        windowed = load["kind"] == "closed_loop"
        together = WindowBarrier([load] * len(parts) if windowed else [])
        progress: dict[int, Progress] = {}
        left = set(range(len(parts)))

        def measured(index: int) -> dict[str, Any]:
            def show(told: Progress) -> None:
                progress[index] = told
                if index == min(left):
                    each = list(progress.values())
                    phase = min((one.phase for one in each), key=PHASES.index)
                    done, in_flight = sum(one.done for one in each), sum(one.in_flight for one in each)
                    tokens_per_s = sum(one.tokens_per_s or 0.0 for one in each)
                    on_progress(Progress(phase, told.elapsed_s, done, in_flight, tokens_per_s))

            words = {"op": "run", "load": parts[index], "at": together.begins_s}
            found = converse(self.children[index], show, together, **words)
            left.discard(index)
            if windowed:
                together.ended()
            return found

        pool = ThreadPoolExecutor(len(parts), thread_name_prefix="slm-load")
        try:
            runs = [pool.submit(measured, index) for index in range(len(parts))]
            wait(runs, return_when=FIRST_EXCEPTION)
            # Those that have ended come first, because none of them was stopped for the failure of another one.
            return merged_columns([run.result() for run in sorted(runs, key=lambda run: not run.done())])
        except BaseException:
            together.give_up()
            self.kill()
            raise
        finally:
            pool.shutdown()

    def kill(self) -> None:
        for child in self.children:
            child.kill()


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
