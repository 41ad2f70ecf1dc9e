"""The interface to whatever serves, and what all engines share."""

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
StartCallback = Callable[[Path], None]  # called now and then with the log of an engine that is not ready yet
Outputs = tuple[tuple[int, ...], ...]  # token ids of each request
IMPOSSIBLE = -100.0  # nats
PROFILE_FOLDER = "SLM_PROFILE"  # environment variable with the folder for the traces of an engine that can be profiled
BEGIN_S = 0.5  # from the choice of the time at which all runs begin until that time: all workers know it by then
OPEN_S = 0.2  # likewise of the window
SHARED_CYCLES = 2.5  # of the slowest: two of each engine are whole then, also if they last a fifth longer than before
SETTLE_S = 600.0  # the slowest engine has settled by then, or something is wrong


def check_fits(spec: EngineSpec, workload: Workload) -> None:
    """Raise BadUsage if a request is longer than the engine's `max_model_len`."""
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
    """Return the load as a message to the process that sends it. turns: Of each conversation. Raises BadUsage for an
    open loop without its schedule, or of conversations."""
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
    """A barrier between the runs of engines that are measured together. All runs begin at `begins_s`, by the host's
    monotonic clock. The common window opens as soon as each run has settled or has ended."""

    def __init__(self, loads: Sequence[Message]) -> None:
        """loads: The load of each run, as the message to its process."""
        self.begins_s = time.monotonic() + BEGIN_S
        self._loads, self._awaited = loads, len(loads)
        self._window: tuple[float, float] | None = None
        self._given_up = False
        self._changed = threading.Condition()

    def settled(self) -> tuple[float, float]:
        """Report that the load of one engine has settled, and wait for all others. Returns the begin and the end of the
        common window, by the host's monotonic clock. Raises EngineFailed if another engine does not settle."""
        with self._changed:
            self.ended()
            self._changed.wait_for(lambda: self._window or self._given_up, SETTLE_S)
            if self._window is None:
                raise EngineFailed("was stopped, for another replica did not come as far")
            return self._window

    def ended(self) -> None:
        """Report that the others need not wait for this run any more, for example because its requests failed. The
        window is as long as each engine's requests need it, and if they start together has room for two whole lockstep
        cycles."""
        with self._changed:
            self._awaited -= 1
            if self._awaited == 0:
                opens = time.monotonic() + OPEN_S
                seconds = [float(load["window_s"]) for load in self._loads]
                for load in self._loads:
                    pacer = pacer_of(load, (1,))  # whose lifetime is a step
                    lifetime_s = (opens - self.begins_s) / pacer.settled_steps
                    seconds.append(least_window_s(lifetime_s) if pacer.staggered else SHARED_CYCLES * lifetime_s)
                self._window = opens, opens + max(seconds)
                self._changed.notify_all()

    def run_together(self, run: Callable[[int], Result], count: int, stop: Callable[[], None]) -> list[Result]:
        """Call `run` with each index below `count` at the same time, to run a load up to this barrier, and return the
        results. Raises the error of the first call that failed; before, `stop` is called to end the others."""

        def measured(index: int) -> Result:
            found = run(index)
            self.ended()
            return found

        pool = ThreadPoolExecutor(count, thread_name_prefix="slm-run")
        try:
            futures = [pool.submit(measured, index) for index in range(count)]
            wait(futures, return_when=FIRST_EXCEPTION)
            # Those that have ended come first, because none of them was stopped for the failure of another one.
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
    """An engine that serves one load at a time. It is launched when it is made, and ready after `start`.

    Attributes:
        limits: The specification with those of its further arguments that are fields of it.
        launch: An identifier of this launch.
        resolved: The settings that the engine made of its specification.
        ready: Whether it waits for the next load. False during a load, and after a load that was broken off.
    """

    windows_of_schedules = False  # whether it serves an open loop with a window, or with a limit of concurrency
    jobs_only = False  # whether it serves only loads with a fixed number of requests, because it makes static batches
    resolved: Resolved
    _loaded: str | None = None  # the hash of the requests that it has

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = self.limits = spec
        self.launch = uuid.uuid4().hex[:12]
        self.ready = True

    def await_turn(self, on_wait: StartCallback | None = None) -> None:
        """Wait until the engine has imported what it needs, or has ended. Raises EngineFailed after a time limit."""

    def start(self, on_wait: StartCallback | None = None) -> Self:
        """Give the device to the engine, and return the engine as soon as it is ready. Raises EngineFailed."""
        return self

    def load_requests(self, workload: Workload) -> None:
        """Hand over the requests, unless the engine has them, so that the next run of them begins at once. Raises
        BadUsage if they do not fit."""
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
        """Put `load` on the engine and return the facts of the run. Raises BadUsage for a load that the engine cannot
        serve, and EngineFailed if the engine died. on_progress: Called about twice a second. barrier: The barrier of
        the engines that are measured together."""
        if self.jobs_only and not is_job(load):  # users who wait for an answer and a static batch wait for each other
            raise BadUsage("batches made one after the other are for a fixed number of requests", "Use slm_job.")
        windowed = isinstance(load, OpenLoop) and (load.requests is None or load.max_concurrency is not None)
        if windowed and not self.windows_of_schedules:
            problem = "an open loop with a window or with max_concurrency needs a server"
            raise BadUsage(problem, "Use the server interface, or an endpoint.")
        self.load_requests(workload)
        message, self.ready = message_of(load, workload.spec.turns), False  # a load that is refused leaves it ready
        run = self._run(workload, message, on_progress, barrier)
        self.ready = True
        return run

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        raise NotImplementedError

    @property
    def batching(self) -> Message:
        """Static batches, that is `batching` and `wait_s` (seconds) from the specification's further arguments, and
        `batch` from `max_num_seqs`. Raises BadUsage if the further arguments have no `batching`."""
        extra = self.spec.arguments
        if "batching" not in extra:
            hint = 'Use extra=(("batching", "static"),), or "none", or "dynamic".'
            raise BadUsage("an engine of Transformers that does not know how to batch", hint)
        return {"batching": extra["batching"], "batch": self.spec.max_num_seqs, "wait_s": extra.get("wait_s", 0.0)}

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        """Return the first `length` greedy tokens of the first requests, served one after the other. Raises
        EngineFailed."""
        raise EngineFailed(f"an {self.spec.interface} is not asked for its tokens", "Use the server interface.")

    def scores(self, workload: Workload, outputs: Outputs) -> tuple[float, ...]:
        """Return the mean log probability, in nats, of these tokens after the prompts of the first requests. A value
        that is not a number, or is below IMPOSSIBLE, counts as IMPOSSIBLE, because a record must be able to hold the
        outputs of a broken engine. Raises EngineFailed."""
        found = self._logprobs(workload, outputs)
        return tuple(fmean(one if one > IMPOSSIBLE else IMPOSSIBLE for one in each) for each in found)

    def _logprobs(self, workload: Workload, outputs: Outputs) -> Sequence[Sequence[float]]:
        raise EngineFailed(f"an {self.spec.interface} is not asked for its tokens", "Use the server interface.")

    def nap(self) -> tuple[float, float]:
        """Put the engine to sleep, so that its weights are on the host and its cache is dropped (vLLM's level 1), and
        wake it. Returns the seconds of both. Raises EngineFailed."""
        raise EngineFailed(f"an {self.spec.interface} is not put to sleep", "Use the engine interface.")

    def profile(self, workload: Workload, load: Load) -> str | None:
        """Serve a short window of `load` under the engine's profiler, which writes traces into the folder that
        `PROFILE_FOLDER` named when the engine was launched. Returns why there are no traces, or None. Raises
        EngineFailed."""
        self.load_requests(workload)
        return self._profile(message_of(load, workload.spec.turns))

    def _profile(self, load: Message) -> str | None:
        return "not through this interface"

    def differ(self, launch: str, beside: bool = False, cold: bool = False) -> None:
        """Change the speed of a simulated engine by chance, as launches of a gate differ. launch: its name there.
        beside: the other side lives on the device too. cold: its caches were. Other engines differ by themselves."""

    def processes(self) -> set[int]:
        """Ids of the engine's own processes; none of an engine without a process here."""
        return set()

    def close(self) -> None:
        """Stop the engine and free its device. May be called twice."""
