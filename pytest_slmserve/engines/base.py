"""The base class of all engines, and functions that they share."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypeVar

from pytest_slmserve.engines.worker.slm_pacing import pacer_of
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.kv_cache import check_adapters
from pytest_slmserve.schema.records import Progress, Resolved, Run
from pytest_slmserve.schema.specs import EngineSpec, Load, OpenLoop, Workload, is_job, least_window_s

Result = TypeVar("Result")
Message = dict[str, Any]
ProgressCallback = Callable[[Progress], None] | None  # None: progress is not shown
StartCallback = Callable[[Path], None]  # called with the log of an engine that is not ready yet
Outputs = tuple[tuple[int, ...], ...]  # token ids of each request
IMPOSSIBLE = -100.0  # nats
PROFILE_FOLDER = "SLM_PROFILE"  # environment variable with the folder for an engine's traces
BEGIN_S = 0.5  # delay of the common beginning, in which all workers learn its time
OPEN_S = 0.2  # delay of the common window
SHARED_CYCLES = 2.5  # of the slowest engine: two are whole even if they become a fifth longer
SETTLE_S = 600.0  # time limit for the slowest engine


def check_fits(spec: EngineSpec, workload: Workload) -> None:
    """Raise BadUsage if the engine cannot serve the workload: its lengths, structured output or adapters."""
    if workload.longest > spec.max_model_len:
        known = spec.model_facts
        longer = "" if known and workload.longest > known.positions else f", or set max_model_len={workload.longest}"
        problem = f"requests of {workload.longest} tokens do not fit max_model_len {spec.max_model_len}"
        raise BadUsage(problem, f"Send shorter requests{longer}.")
    if workload.spec.response_format and spec.interface == "transformers":
        raise BadUsage(
            "Transformers is not asked for structured output", 'Use interface="engine" or interface="server".'
        )
    without = spec.interface == "engine" and spec.arguments.get("skip_tokenizer_init", True)
    if workload.spec.response_format and without and spec.platform != "simulated":
        hint = 'Use @pytest.mark.slm(response_format="json"), or extra=(("skip_tokenizer_init", False),).'
        raise BadUsage("structured output needs a tokenizer, and the engine starts without one", hint)
    if workload.spec.adapters:
        check_adapters(spec, workload.spec.adapters)


def message_of(load: Load, turns: int = 1) -> Message:
    """Return the load as a message to the process that sends it.

    Args:
        turns: requests of each conversation; an open loop of conversations raises BadUsage.
    """
    if not isinstance(load, OpenLoop):
        return {**asdict(load), "kind": "closed_loop", "turns": turns}
    if turns > 1:
        problem = "a turn of a conversation follows an answer, and a schedule waits for none"
        raise BadUsage(problem, "Run a number of users (--slm-concurrency 64), or use requests of one turn.")
    return {
        "kind": "open_loop",
        "schedule": load.times,
        "window": None if load.window_s is None else (load.settle_s, load.settle_s + load.window_s),
        "steps": load.step_windows_s,
        "most": load.max_concurrency,
    }


class WindowBarrier:
    """A barrier that gives concurrent runs of several engines one beginning and one window.

    All runs begin at `begins_s`, by the host's monotonic clock. The window opens when each run has settled or ended.
    """

    def __init__(self, loads: Sequence[Message]) -> None:
        """Set the beginning of all runs, whose loads are given as messages."""
        self.begins_s = time.monotonic() + BEGIN_S
        self._loads, self._awaited = loads, len(loads)
        self._window: tuple[float, float] | None = None
        self._given_up = False
        self._changed = threading.Condition()

    def settled(self) -> tuple[float, float]:
        """Report that a load has settled, and return the window. Raise EngineFailed if another load does not settle."""
        with self._changed:
            self.ended()
            self._changed.wait_for(lambda: self._window or self._given_up, SETTLE_S)
            if self._window is None:
                raise EngineFailed("was stopped, for another replica did not come as far")
            return self._window

    def ended(self) -> None:
        """Report that nobody needs to wait for this run any more, for example because its requests failed.

        The last report opens the window, which is as long as each engine needs; in a burst, two lockstep cycles.
        """
        with self._changed:
            self._awaited -= 1
            if self._awaited == 0:
                opens = time.monotonic() + OPEN_S
                seconds = [float(load["window_s"]) for load in self._loads]
                for load in self._loads:
                    pacer = pacer_of(load, (1,))  # a lifetime of one step
                    lifetime_s = (opens - self.begins_s) / pacer.settled_steps
                    seconds.append(least_window_s(lifetime_s) if pacer.staggered else SHARED_CYCLES * lifetime_s)
                self._window = opens, opens + max(seconds)
                self._changed.notify_all()

    def run_together(self, run: Callable[[int], Result], count: int, stop: Callable[[], None]) -> list[Result]:
        """Call `run` with each index below `count` concurrently, and return the results.

        If a call fails, `stop` is called to end the others, and its error is raised.
        """

        def measured(index: int) -> Result:
            found = run(index)
            self.ended()
            return found

        pool = ThreadPoolExecutor(count, thread_name_prefix="slm-run")
        try:
            futures = [pool.submit(measured, index) for index in range(count)]
            wait(futures, return_when=FIRST_EXCEPTION)
            # Ended calls come first, because their errors are not results of `stop`.
            for future in sorted(futures, key=lambda each: not each.done()):
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            with self._changed:
                self._given_up = True
                self._changed.notify_all()
            stop()
            raise
        finally:
            pool.shutdown()


class Engine:
    """An engine that serves one load at a time. Its constructor launches it, and `start` makes it ready.

    Its methods raise EngineFailed if the engine dies, is late, or does not support the method.

    Attributes:
        limits: the specification, in which further arguments replace the fields of the same name.
        launch: identifier of this launch.
        resolved: settings that the engine derived from its specification.
        ready: whether it waits for the next load. False during a load, and after an aborted load.
    """

    windows_of_schedules = False  # whether it serves an open loop with a window or a concurrency limit
    jobs_only = False  # whether it serves only a fixed number of requests, because it makes static batches
    resolved: Resolved
    _loaded: str | None = None  # hash of the requests that it has

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = self.limits = spec
        self.launch = uuid.uuid4().hex[:12]
        self.ready = True

    def await_turn(self, on_wait: StartCallback | None = None) -> None:
        """Wait until the engine has imported its packages, or has ended."""

    def start(self, on_wait: StartCallback | None = None) -> Self:
        """Give the device to the engine, and return the engine when it is ready."""
        return self

    def load_requests(self, workload: Workload) -> None:
        """Send the requests unless the engine has them, so that the next run begins at once."""
        if self._loaded != workload.hash:
            self._hand_over(workload)
            self._loaded = workload.hash

    def _hand_over(self, workload: Workload) -> None:
        check_fits(self.limits, workload)

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = None,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        """Run a load on the engine, and return the facts of the run.

        Args:
            on_progress: called about twice a second.
            barrier: of the engines that are measured at the same time.

        Raises:
            BadUsage: if the engine cannot serve the load.
        """
        if self.jobs_only and not is_job(load):  # waiting users and a static batch would wait for each other
            raise BadUsage("batches made one after the other are for a fixed number of requests", "Use slm_job.")
        windowed = isinstance(load, OpenLoop) and (load.requests is None or load.max_concurrency is not None)
        if windowed and not self.windows_of_schedules:
            problem = "an open loop with a window or with max_concurrency needs a server"
            raise BadUsage(problem, "Use the server interface, or an endpoint.")
        self.load_requests(workload)
        message, self.ready = message_of(load, workload.spec.turns), False  # a refused load leaves it ready
        run = self._run(workload, message, on_progress, barrier)
        self.ready = True
        return run

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        raise NotImplementedError

    @property
    def batching(self) -> Message:
        """Settings of static batches from the specification. Raise BadUsage if it has no `batching`."""
        extra = self.spec.arguments
        if "batching" not in extra:
            hint = 'Use extra=(("batching", "static"),), or "none", or "dynamic".'
            raise BadUsage("an engine of Transformers that does not know how to batch", hint)
        return {"batching": extra["batching"], "batch": self.spec.max_num_seqs, "wait_s": extra.get("wait_s", 0.0)}

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        """Return the first `length` greedy tokens of each of the first requests, served one after the other."""
        raise EngineFailed(f"an {self.spec.interface} is not asked for its tokens", "Use the server interface.")

    def scores(self, workload: Workload, outputs: Outputs) -> tuple[float, ...]:
        """Return the mean log probability, in nats, of each output after the prompt of its request.

        Values that are not a number or are below IMPOSSIBLE count as IMPOSSIBLE, because a record must be able to hold
        the outputs of a broken engine.
        """
        found = self._logprobs(workload, outputs)
        return tuple(fmean(one if one > IMPOSSIBLE else IMPOSSIBLE for one in each) for each in found)

    def _logprobs(self, workload: Workload, outputs: Outputs) -> Sequence[Sequence[float]]:
        raise EngineFailed(f"an {self.spec.interface} is not asked for its tokens", "Use the server interface.")

    def nap(self) -> tuple[float, float]:
        """Return the seconds that the engine takes to sleep (vLLM's level 1) and to wake up."""
        raise EngineFailed(f"an {self.spec.interface} is not put to sleep", "Use the engine interface.")

    def profile(self, workload: Workload, load: Load) -> str | None:
        """Profile a short window of a load, and return why there are no traces, or None.

        The engine writes traces to the folder that `PROFILE_FOLDER` named at its launch.
        """
        self.load_requests(workload)
        return self._profile(message_of(load, workload.spec.turns))

    def _profile(self, load: Message) -> str | None:
        return "not through this interface"

    def differ(self, launch: str, beside: bool = False, cold: bool = False, resumed: bool = False) -> None:
        """Change the speed of a simulated engine by chance. Launches of other engines differ by themselves.

        Args:
            launch: its name, unique in the gate or the results file.
            beside: whether the other side runs on the device at the same time.
            cold: whether its compile caches were empty.
            resumed: whether it continues the measurements of an earlier launch.
        """

    def processes(self) -> set[int]:
        """Return the ids of the engine's processes on this host."""
        return set()

    def close(self) -> None:
        """Stop the engine and free its device. It may be called twice."""
