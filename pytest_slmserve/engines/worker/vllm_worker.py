"""One engine in its own process, which exchanges JSON lines over an inherited socket.

    python vllm_worker.py FD PARENT_PID

Needs the standard library and vLLM. The first line in has the engine's arguments. Then `load` gives the prompts, and
`run`, `tokens`, `scores`, `nap` and `profile` are answered by `done`, `tokens`, `scores`, `slept` and `profiled`.
`close` ends the process without an answer. One of several concurrent runs begins at a given time, sends `settled`, and
gets its window by `open`. All times are `time.monotonic()`, the clock of vLLM's engine core.
"""

import asyncio
import atexit
import gc
import json
import math
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar

from slm_pacing import SchedulePacer, pacer_of  # this folder is on the path, its package is not
from slm_process import guarded

LINE_LIMIT = 1 << 28  # prompts and traces are one line; asyncio's own limit is 64 KiB
LOOK_S = 0.01
PROGRESS_S, RECENT_STEPS = 0.5, 50  # between two reports, and the number of steps in one
FAILURES_UNTIL_GIVEN_UP = 5
PROFILED_S = 1.0  # of a load: hundreds of steps, each of thousands of events
STALL_S = 60.0  # without a step, after which an engine is stalled
LEAST_STEPS = 24
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

# vLLM imports 700,000 objects that stay. The garbage collector scans them repeatedly, for a quarter of the import and
# for two seconds of the exit, also in the processes that vLLM spawns, which import this module first.
atexit.register(gc.freeze)
if __name__ == "__mp_main__":  # spawned
    from multiprocessing import current_process

    if current_process().name.startswith("VllmWorker"):
        gc.disable()  # until `slm_facts` is imported, which is last


# Every field of vLLM's classes may be missing, because they are not stable between releases.


def step_row(scheduler_stats: Any, iteration_stats: Any) -> tuple[Any, ...] | None:
    """Return an engine step as a row, or None if nothing was computed, as when the scheduler runs dry.

    The row has time, running and waiting sequences, new tokens, prompt tokens, KV cache usage and preemptions, and for
    speculation the sequences with a draft and the accepted tokens. Without tokens, each ended request counts as a new
    one.
    """
    firsts, later = (
        getattr(iteration_stats, name, None) for name in ("time_to_first_tokens_iter", "inter_token_latencies_iter")
    )
    if not (new_tokens := getattr(iteration_stats, "num_generation_tokens", 0) or len(firsts or ())):
        return None
    speculation = getattr(scheduler_stats, "spec_decoding_stats", None)
    drafts, accepted = (getattr(speculation, name, 0) for name in ("num_drafts", "num_accepted_tokens"))
    if speculation is not None and firsts is not None and later is not None:
        # Each sequence has an entry in one of these. The scheduler counts tokens too that lie past a request's end.
        accepted = max(0, new_tokens - len(firsts) - len(later))
    return (
        time.monotonic(),
        getattr(scheduler_stats, "num_running_reqs", None),
        getattr(scheduler_stats, "num_waiting_reqs", None),
        new_tokens,
        getattr(iteration_stats, "num_prompt_tokens", 0),
        getattr(scheduler_stats, "kv_cache_usage", None),
        getattr(iteration_stats, "num_preempted_reqs", 0),
        drafts,
        accepted,
    )


def resolved(config: Any) -> dict[str, Any]:
    """Return the limits that an engine really runs with, and the package of the front end's event loop."""
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    capture = getattr(config.compilation_config, "cudagraph_capture_sizes", None)
    event_loop = None
    with suppress(RuntimeError):
        event_loop = type(asyncio.get_running_loop()).__module__.split(".")[0]
    return {
        "kv_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": model.max_model_len,
        "capture_sizes": None if capture is None else list(capture),
        "chunked_prefill": getattr(scheduler, "enable_chunked_prefill", None),
        "prefix_caching": cache.enable_prefix_caching,
        "async_scheduling": getattr(scheduler, "async_scheduling", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "event_loop": event_loop,
    }


class StepTrace:
    """A duck-typed stat logger of vLLM, with one row per engine step."""

    rows: ClassVar[list[tuple[Any, ...]]] = []
    on_step: ClassVar[Any] = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        if row := step_row(scheduler_stats, iteration_stats):
            StepTrace.rows.append(row)
            if StepTrace.on_step:
                StepTrace.on_step()

    def log(self, *_: Any, **__: Any) -> None: ...

    log_engine_initialized = record_sleep_state = log


class Server:
    """The server of one parent, with one load at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.engine: Any = None
        self.prompts: list[dict[str, list[int]]] = []
        self.output_tokens: list[int] = []
        self.kind, self.schema = "generate", ""
        self.places: list[int | None] = []  # of the ids in each prompt that differ from round to round
        self.rounds: list[list[int]] = []  # these ids, for each round; empty: all rounds are alike
        self.first_round = self.last_round = 0  # of the run
        self.further: dict[int, dict[str, Any]] = {}  # arguments of `generate`, by request with an adapter
        self.runs = 0

    def write(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def say(self, **message: Any) -> None:
        self.write(**message)
        await self.writer.drain()

    async def serve(self) -> None:
        arguments = json.loads(await self.reader.readline())
        try:
            facts = await self.start(arguments)
        except BaseException as error:
            await self.say(event="failed", cause=f"{type(error).__name__}: {error}")
            raise
        await self.say(event="ready", **facts)
        while line := await self.reader.readline():
            message = json.loads(line)
            if message["op"] == "close":
                break
            if message["op"] == "open":  # too late for a run that has ended
                continue
            if message["op"] == "load":
                self.prompts = [{"prompt_token_ids": prompt} for prompt in message["prompts"]]
                self.output_tokens, self.kind = message["output_tokens"], message["kind"]
                self.schema = message.get("schema", "")
                self.places, self.rounds = message.get("places", []), message.get("rounds", [])
                self.first_round = self.last_round = 0
                self.further = await self.with_adapters(**message["adapters"]) if message.get("adapters") else {}
                await self.say(event="loaded")
                continue
            try:
                answer = await self.answer(message)
            except TimeoutError as error:
                await self.say(event="stalled", cause=f"{error}" or f"requests did not end within {STALL_S:.0f} s")
                raise
            await self.say(**answer)
        if self.engine:
            self.engine.shutdown()

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["op"]:
            case "tokens":
                # One after the other, because concurrent requests may get other kernels, and other roundings.
                first, length = self.prompts[: message["requests"]], message["length"]
                outputs = [await self.served(prompt, greedy(length, self.schema), i) for i, prompt in enumerate(first)]
                return {"event": "tokens", "tokens": [list(output.outputs[0].token_ids) for output in outputs]}
            case "scores":
                scores, parameters = [], greedy(1)
                parameters.prompt_logprobs = 0
                for i, (prompt, tokens) in enumerate(zip(self.prompts, message["outputs"])):
                    longer = {"prompt_token_ids": [*prompt["prompt_token_ids"], *tokens]}
                    table = (await self.served(longer, parameters, i)).prompt_logprobs
                    scores.append([row[token].logprob for row, token in zip(table[-len(tokens) :], tokens)])
                return {"event": "scores", "scores": scores}
            case "nap":
                began = time.monotonic()
                try:
                    await self.engine.sleep(level=1)
                    slept = time.monotonic()
                    await self.engine.wake_up()
                except Exception as error:  # the release or the model has no sleep
                    return {"event": "failed", "cause": f"{type(error).__name__}: {error}"}
                return {"event": "slept", "sleep_s": slept - began, "wake_s": time.monotonic() - slept}
            case "profile":
                return await self.run(message["load"], time.monotonic(), profiled=True)
        return await self.run(message["load"], message.get("at"))

    async def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start the engine, and return its facts."""
        gc.disable()
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        class Arguments(AsyncEngineArgs):  # type: ignore[misc]
            def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
                chosen = os.environ.get(START_METHOD)
                # The CPU backend inspects the model's class in this process. By default it would import vLLM in one
                # more process for that, which on a GPU keeps CUDA out of this process.
                with suppress(ImportError, AttributeError):  # a release that works otherwise
                    from vllm.model_executor.models import registry
                    from vllm.platforms import current_platform

                    if current_platform.is_cpu() and registry._run_in_subprocess:
                        registry._run_in_subprocess = lambda inspect: inspect()
                config = super().create_engine_config(*args, **kwargs)
                gc.freeze()  # before a fork, whose child then shares these pages
                gc.enable()
                fork_core(config, chosen)
                return config

        if folder := os.environ.get("SLM_PROFILE"):
            arguments |= profiler_arguments(AsyncEngineArgs, folder)
        self.engine = AsyncLLMEngine.from_engine_args(Arguments(**arguments), stat_loggers=[StepTrace])
        parts: list[dict[str, Any]] = await self.engine.collective_rpc("slm_facts")
        return {**resolved(self.engine.vllm_config), "parts": parts}

    def steps_of_results(self, concurrency: int) -> int:
        """Return the steps until a request has its result, if `concurrency` requests are always there.

        A step takes as many whole prompts as its limits allow. LEAST_STEPS are enough for a window to show a rate.
        """
        scheduler = self.engine.vllm_config.scheduler_config
        tokens = sum(len(prompt["prompt_token_ids"]) for prompt in self.prompts) / len(self.prompts)
        a_step: float = max(1.0, min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens / tokens))
        return max(LEAST_STEPS, math.ceil(concurrency / a_step))

    def prompt(self, number: int) -> dict[str, list[int]]:
        """Return the prompt of the request with this number in a run. Rounds continue from run to run."""
        at, index = divmod(number, len(self.prompts))
        self.last_round = max(self.last_round, at)
        if not self.rounds or (place := self.places[index]) is None:
            return self.prompts[index]
        ids, fresh = self.prompts[index]["prompt_token_ids"], self.rounds[(self.first_round + at) % len(self.rounds)]
        return {"prompt_token_ids": [*ids[:place], *fresh, *ids[place + len(fresh) :]]}

    async def with_adapters(self, asked: list[int], name: str, first: int, path: str) -> dict[int, dict[str, Any]]:
        """Load the adapters that requests ask for by number, and return arguments of `generate` by request."""
        from vllm.lora.request import LoRARequest

        known = {n: LoRARequest(f"{name}-{n}", first + n, path) for n in sorted({*asked})}
        for request in known.values():
            await self.engine.add_lora(request)
        return {i: {"lora_request": known[n]} for i, n in enumerate(asked)}

    async def served(self, prompt: dict[str, list[int]], parameters: Any, index: int) -> Any:
        """Return the output of one request, which is served alone with the adapter of the request `index`."""
        self.runs += 1
        async for answer in self.engine.generate(
            prompt, parameters, f"alone{self.runs}", **self.further.get(index, {})
        ):
            output = answer
        return output

    async def run(self, load: dict[str, Any], at: float | None = None, profiled: bool = False) -> dict[str, Any]:
        """Run a load and return its result as a message.

        Args:
            at: time at which it begins together with others; None: now, alone.
        """
        self.runs += 1
        self.first_round, self.last_round = self.first_round + self.last_round + 1, 0
        StepTrace.rows = []
        gc.collect()
        # A collection in a window would stop the front end for tens of milliseconds. Objects stay frozen, because each
        # run would otherwise begin with a scan of all imports, which takes half a second.
        gc.freeze()
        run = (Profiled if profiled else WorkerRun)(self, load, gated=at is not None)
        await asyncio.sleep(max(0.0, (at or 0.0) - time.monotonic()))
        return await run.result()


def fork_core(config: Any, chosen: str | None) -> None:
    """Fork the engine core of the CPU backend, as on a GPU, unless the user has chosen.

    A spawned core, that backend's default, would import vLLM once more. The core spawns the model's process, because
    OpenMP cannot be forked. A core that has the model itself stays spawned.
    """
    apart = config.parallel_config.distributed_executor_backend == "mp"
    if chosen is None and apart and config.device_config.device_type == "cpu":
        os.environ[START_METHOD] = "fork"
        os.register_at_fork(after_in_child=partial(os.environ.__setitem__, START_METHOD, "spawn"))


def greedy(tokens: int, schema: str = "") -> Any:
    """Return sampling parameters for exactly `tokens` greedy tokens, reported when all are complete.

    Args:
        schema: JSON schema of the output, which may then end earlier.
    """
    from vllm import SamplingParams, sampling_params

    further: dict[str, Any] = {}
    if schema and hasattr(sampling_params, "StructuredOutputsParams"):
        further = {"structured_outputs": sampling_params.StructuredOutputsParams(json=schema)}
    elif schema:  # before 0.11
        further = {"guided_decoding": sampling_params.GuidedDecodingParams(json=schema)}
    kind = sampling_params.RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=not schema, detokenize=False, output_kind=kind, **further
    )


def pooling(kind: str) -> Any:
    """Return parameters for one result. A model with a classifier scores a pair by it (vLLM's task "classify")."""
    from vllm import PoolingParams

    return PoolingParams(task="embed" if kind == "embed" else "classify")


class WorkerRun:
    """One load, with a task for each user and a row for each request."""

    def __init__(self, server: Server, load: dict[str, Any], gated: bool = False) -> None:
        self.server = server
        lives = server.output_tokens  # steps
        if server.kind == "generate":
            self.parameters = {tokens: greedy(tokens, server.schema) for tokens in set(server.output_tokens)}
        else:
            self.parameters = {1: pooling(server.kind)}
            lives = [server.steps_of_results(load.get("concurrency") or 1)]
        self.rows: list[tuple[Any, ...]] = []
        self.in_flight: set[str] = set()
        self.done = 0
        self.failed: list[tuple[Any, ...]] = []  # index, when sent, None for no schedule, when failed, kind
        self.first_failure: str | None = None
        self.loop = pacer_of(load, lives, gated)
        self.users: list[asyncio.Task[None]] = []
        self.over = asyncio.Event()  # ends all think times

    async def result(self) -> dict[str, Any]:
        """Serve the load, and return its columns."""
        self.began = self.last_step = self.last_answer = time.monotonic()
        StepTrace.on_step = self.step
        self.start_users()
        beside = [asyncio.create_task(self.tell())]
        if isinstance(self.loop, SchedulePacer):
            beside.append(asyncio.create_task(self.arrive(self.loop)))
        try:
            # A load without a window is over when all users have ended.
            whole, unopened = self.loop.requests is not None, self.loop.gated
            while len(self.failed) < FAILURES_UNTIL_GIVEN_UP and (
                self.loop.phase != "over" or (whole and not all(user.done() for user in self.users))
            ):
                if self.in_flight and time.monotonic() - self.last_step > STALL_S:
                    raise TimeoutError(f"no engine step for {STALL_S:.0f} s")
                if unopened and self.loop.settled:
                    unopened = False
                    beside.append(asyncio.create_task(self.open_window()))
                await asyncio.sleep(LOOK_S)
            self.over.set()
            if self.in_flight:
                await self.server.engine.abort(list(self.in_flight))
            await asyncio.wait_for(asyncio.gather(*self.users), STALL_S)
        finally:
            StepTrace.on_step = None
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)  # one of them may still read the parent's next message
        return {
            "event": "done",
            "began": self.began,
            "window": self.loop.window or (self.began, self.last_answer),
            "samples": self.rows,
            "steps": StepTrace.rows,
            "failed": self.failed,
            "first_failure": self.first_failure,
        }

    async def arrive(self, schedule: SchedulePacer) -> None:
        """Start each user when its request is due."""
        while (due := schedule.next_s) is not None:
            await asyncio.sleep(max(0.0, self.began + due - time.monotonic()))
            self.start_users()

    async def open_window(self) -> None:
        """Report that the load has settled, and receive the window, unless the parent is gone."""
        await self.server.say(event="settled")
        if line := await self.server.reader.readline():
            self.loop.given = json.loads(line)["window"]

    def step(self) -> None:
        self.last_step = time.monotonic()
        self.loop.stepped(self.last_step)
        self.start_users()

    def start_users(self) -> None:
        for _ in range(self.loop.users_due(time.monotonic() - self.began)):
            self.users.append(asyncio.create_task(self.user()))

    async def user(self) -> None:
        number = None
        while len(self.failed) < FAILURES_UNTIL_GIVEN_UP and (number := self.loop.next_request(number)) is not None:
            sent = time.monotonic()
            index = number % len(self.server.prompts)
            try:
                await self.serve_one(number, index)
            except Exception as error:
                self.failed.append((index, sent, None, time.monotonic(), type(error).__name__))
                self.first_failure = self.first_failure or f"{type(error).__name__}: {error}"
            if rest_s := self.loop.rest_s(number):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), rest_s)

    async def serve_one(self, number: int, index: int) -> None:
        """Serve one request and add its row. Errors of the engine are raised."""
        server, name = self.server, f"run{self.server.runs}-{number}"
        parameters = self.parameters[server.output_tokens[index]]
        now = time.monotonic()
        if not self.in_flight:
            self.last_step = now  # no step was due
        self.in_flight.add(name)
        sent = self.began + self.loop.sent_s(number, now - self.began)
        output = None
        serve = server.engine.generate if server.kind == "generate" else server.engine.encode
        try:
            further = server.further.get(index, {})
            async for answer in serve(server.prompt(number), parameters, name, **further):
                output = answer
        finally:
            self.in_flight.discard(name)
        if output is None:
            raise RuntimeError("the engine ended a request without an answer")
        if server.kind != "generate":  # vLLM gives results no time, so the front end's is used
            now, prompt, cached = time.monotonic(), output.prompt_token_ids, getattr(output, "num_cached_tokens", None)
            self.rows.append((index, sent, None, now, now, len(prompt), 1, True, cached))
            self.done += 1
            self.last_answer = now
            return
        completion, stamps = output.outputs[0], output.metrics
        if completion.finish_reason == "error":
            raise RuntimeError(f"the engine ended a request by an error after {len(completion.token_ids)} tokens")
        finished = completion.finish_reason in ("length", "stop")  # "stop": its JSON is complete
        self.rows.append(
            (
                index,
                sent,
                getattr(stamps, "scheduled_ts", None) or None,
                getattr(stamps, "first_token_ts", None) or None,
                getattr(stamps, "last_token_ts", None) or None,
                len(output.prompt_token_ids or ()),
                getattr(stamps, "num_generation_tokens", None) or len(completion.token_ids),
                finished,
                getattr(output, "num_cached_tokens", None) if finished else None,
            )
        )
        self.done += finished
        self.last_answer = time.monotonic()

    async def tell(self) -> None:
        """Report progress, with the throughput of the latest steps."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            recent = StepTrace.rows[-RECENT_STEPS:]
            seconds = recent[-1][0] - recent[0][0] if len(recent) > 1 else 0
            await self.server.say(
                event="progress",
                phase=self.loop.phase,
                elapsed_s=time.monotonic() - self.began,
                done=self.done,
                in_flight=len(self.in_flight),
                tokens_per_s=sum(row[3] for row in recent[1:]) / seconds if seconds else None,
            )


class Profiled(WorkerRun):
    """A load under vLLM's own profiler, which begins when the load has settled. Its window is not measured."""

    problem: str | None = None

    async def result(self) -> dict[str, Any]:
        await super().result()
        if self.problem is None:
            await self.tried("stop_profile")
        return {"event": "profiled", "problem": self.problem}

    async def open_window(self) -> None:
        await self.tried("start_profile")
        self.loop.given = time.monotonic(), time.monotonic() + PROFILED_S

    async def tried(self, name: str) -> None:
        """Call the engine's method `name`, and keep its error in `problem`."""
        method = getattr(self.server.engine, name, None)
        if method is None:
            self.problem = "this vLLM has no profiler by that name"
            return
        try:
            await method()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"


def profiler_arguments(known: type, folder: str) -> dict[str, Any]:
    """Return the engine's arguments for traces of kernels and their launches, without slow Python stacks.

    Releases before 0.13 take the folder from a variable, which 0.16 no longer reads (vllm-project/vllm#29912, #33536).
    """
    if "profiler_config" not in {field.name for field in fields(known)}:
        os.environ["VLLM_TORCH_PROFILER_DIR"] = folder
        return {}
    chosen = {"torch_profiler_with_stack": False, "ignore_frontend": True}
    return {"profiler_config": {"profiler": "torch", "torch_profiler_dir": folder, **chosen}}


def run_worker(server_class: type[Server] = Server) -> None:
    """Serve the parent, on the event loop of vLLM's own server if it is installed.

    With a small model the front end is the limit.
    """
    descriptor, parent = int(sys.argv[1]), sys.argv[2]

    async def serve() -> None:
        ends = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=LINE_LIMIT)
        await server_class(*ends).serve()

    # An engine core, spawned or forked, that kept it open would hide our end from the parent.
    os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=partial(os.close, descriptor))
    with guarded(parent):
        with suppress(ImportError):
            import uvloop

            asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        asyncio.run(serve())


if __name__ == "__main__":
    run_worker()
