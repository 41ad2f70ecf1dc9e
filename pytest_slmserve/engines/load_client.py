"""The load generator as an engine uses it: one or several processes of its own that put loads on a URL."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import Message, ProgressCallback, WindowBarrier
from pytest_slmserve.engines.launch.child_process import Child, converse, run_from
from pytest_slmserve.engines.loadgen.load_run import BIN_S, GROWTH, LEAST_S, LOST, parts_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Request, Workload
from pytest_slmserve.schema.records import Progress, Run, Stream
from pytest_slmserve.schema.secret_words import passed_on
from pytest_slmserve.telemetry.host import own_cores

CLIENT = Path(__file__).parent / "loadgen" / "__main__.py"
PACKAGES = Path(__file__).parents[2]  # the folder that holds ours
READY_S = 30.0
TIMEOUT_S = 120.0  # that a request may last by default
REQUEST, SENT, PROMPT_TOKENS = 0, 1, 5  # columns of the samples
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

    def run(self, load: Message, on_progress: ProgressCallback, barrier: WindowBarrier | None) -> list[Message]:
        """The results of one run, as each process reports them. Several share the load; they begin together, and have
        one window and one progress. Raises EngineFailed, after which all are stopped, if one of them died."""
        parts = parts_of(load, len(self.children))
        if len(parts) == 1:
            at = {"at": barrier.begins_s} if barrier else {}
            return [converse(self.children[0], on_progress, barrier, op="run", load=load, **at)]
        assert barrier is None, "one engine of several has one process"
        together = WindowBarrier([load] * len(parts) if load["kind"] == "closed_loop" else [])
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
            return found

        return together.run_together([partial(measured, index) for index in range(len(parts))], self.kill)

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


def run_of(told: Sequence[Mapping[str, Any]], workload: Workload, steps: Sequence[Sequence[Any]] = ()) -> Run:
    """The results that the client's processes report, as a Run, with prompt tokens by the workload if a request was cut
    off before the server's count. steps: rows of its server's trace, if there is one."""
    rows = sorted((row for part in told for row in part["samples"]), key=itemgetter(SENT))
    for row in rows:
        if row[PROMPT_TOKENS] is None:
            row[PROMPT_TOKENS] = len(workload.requests[row[REQUEST]].prompt)
    *samples, scheduled = zip(*rows) if rows else ((),)
    failed = sorted((row for part in told for row in part["failed"]), key=itemgetter(SENT))
    began, closes = told[0]["began"], max(part["window"][1] for part in told)
    run = run_from(
        {
            "began": began,
            "window": (min(part["window"][0] for part in told), closes),
            "samples": samples,
            "steps": [*zip(*steps)],
            "failures": len(failed),
            "failed": dict(zip(LOST, zip(*failed))),
            "first_failure": next((part["first_failure"] for part in told if part["first_failure"]), None),
        }
    )
    bins: Counter[int] = Counter()
    for part in told:
        bins.update({int(index): tokens for index, tokens in part["bins"].items()})
    first, last = min(bins, default=0), max(bins, default=-1)
    if bins:  # to the window's end, also without a token
        last = max(last, first + int((closes - first * BIN_S) / BIN_S) - 1)
    chunks, on_schedule = sum(part["chunks"] for part in told), told[0]["on_schedule"]
    window_gaps, *step_gaps = (histogram(parts) for parts in zip(*(part["gaps"] for part in told)))
    stream = Stream(
        bin_s=BIN_S,
        begins_s=round(first * BIN_S - began, 6),
        tokens=tuple(round(bins[index], 3) for index in range(first, last + 1)),
        gaps=window_gaps,
        step_gaps=tuple(step_gaps),
        tokens_per_chunk=sum(part["told"] for part in told) / chunks if chunks else None,
        scheduled_s=tuple(round(at - began, 6) for at in scheduled) if on_schedule else None,
        unsent_s=tuple(round(at - began, 6) for at in sorted(at for part in told for at in part["unsent"])),
        waited_s=tuple(round(seconds, 6) for seconds in sorted(s for part in told for s in part["waited"])),
        cpu_s=sum(part["client_cpu_s"] for part in told),
        stamp_uncertainty_s=(max(part["doubt_s"][0] for part in told), max(part["doubt_s"][1] for part in told)),
    )
    return replace(run, stream=stream)


def histogram(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The gaps that the processes of a client report, as one histogram of a `Stream`."""
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update({int(index): count for index, count in part["counts"].items()})
    told = {str(index): counts[index] for index in sorted(counts)}
    sum_s = round(sum(part["sum_s"] for part in parts), 6)
    return {"growth": GROWTH, "least_s": LEAST_S, "counts": told, "sum_s": sum_s}
