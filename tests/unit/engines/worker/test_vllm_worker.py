"""The worker's own logic, in this process, with a duck-typed engine in place of vLLM."""

import asyncio
import importlib
import json
import os
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from pytest_slmserve.engines.base import message_of
from pytest_slmserve.engines.worker import __file__ as package
from pytest_slmserve.schema.specs import ClosedLoop

LENGTH, USERS = 6, 3
WINDOW = message_of(ClosedLoop(USERS, window_s=0.1, ramp_up="burst"))
COUNTED = WINDOW | {"requests": 7}
AT_ONCE = {"kind": "open_loop", "schedule": [0.0] * 9}


@pytest.fixture(scope="module")
def worker():
    """The module, found as in its own process: only its folder is on the path, not its package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(package).parent), *sys.path])
        module = importlib.import_module("vllm_worker")
        patch.setattr(module, "parameters_of", module.greedy, raising=False)
        patch.setattr(module, "greedy", lambda tokens, schema="": tokens)
        patch.setattr(module, "pooling", lambda kind: f"for {kind}")
        yield module
    sys.modules.pop("vllm_worker"), sys.modules.pop("slm_pacing")


class Engine:
    """Serves a token per step to all. refused: numbers of requests that fail. cut: each ends before its first token."""

    def __init__(self, trace, refused=(), stamped=True, step_s=0.002, cut=False):
        self.trace, self.refused, self.stamped, self.step_s, self.cut = trace, refused, stamped, step_s, cut
        self.aborted, self.came = set(), 0

    async def generate(self, prompt, parameters, name):
        number, self.came = self.came, self.came + 1
        if number in self.refused:
            raise ValueError(f"number {number} refused")
        made = 0
        while made < parameters and name not in self.aborted and not self.cut:
            await asyncio.sleep(self.step_s)
            if name not in self.aborted:
                made += 1
                self.trace.record(SimpleNamespace(num_running_reqs=1), SimpleNamespace(num_generation_tokens=1))
        stamps = SimpleNamespace(scheduled_ts=1.0, first_token_ts=2.0 * bool(made), last_token_ts=3.0 * bool(made))
        stamps.num_generation_tokens = made
        output = SimpleNamespace(finish_reason="length" if made == parameters else "abort", token_ids=[7] * made)
        told = {"outputs": [output], "prompt_token_ids": prompt["prompt_token_ids"]}
        yield SimpleNamespace(metrics=stamps if self.stamped else None, **told)

    async def encode(self, prompt, parameters, name):
        self.asked = parameters
        await asyncio.sleep(self.step_s)
        told = SimpleNamespace(num_generation_tokens=0, time_to_first_tokens_iter=[0.1], num_prompt_tokens=3)
        self.trace.record(SimpleNamespace(num_running_reqs=0), told)
        yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], num_cached_tokens=2, finished=True)

    async def abort(self, names):
        self.aborted |= set(names)


class Adapting(Engine):
    """Knows adapters, and which one each request had."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.loaded, self.asked = [], []

    async def add_lora(self, request):
        self.loaded.append(request)

    async def generate(self, prompt, parameters, name, lora_request=None):
        self.asked.append(lora_request and lora_request[0])
        async for answer in super().generate(prompt, parameters, name):
            yield answer


@pytest.fixture
def serve(worker):
    """Runs a load on an engine and returns the worker's answer, and the server."""

    def run(load, op="run", kind=Engine, asks="generate", **engine):
        server = worker.Server(None, None)
        server.engine, server.say = kind(worker.StepTrace(), **engine), AsyncMock()
        server.prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]
        server.output_tokens, server.kind = ([LENGTH] if asks == "generate" else [1]) * 2, asks
        answer = asyncio.run(asyncio.wait_for(server.answer({"op": op, "load": load}), 20))
        return answer, server

    return run


def rows(answer):
    names = ("request", "sent", "admitted", "first", "last", "prompt", "output", "finished")
    return [SimpleNamespace(**dict(zip(names, row))) for row in answer["samples"]]


def test_counted_loop_serves_exact_number(serve):
    first, server = serve(COUNTED)
    for answer in (first, asyncio.run(server.run(COUNTED))):
        assert [row.output for row in rows(answer)] == [LENGTH] * 7
        assert sorted(row.request for row in rows(answer)) == [0, 0, 0, 0, 1, 1, 1]  # the set of two is cycled through
        assert {row.prompt for row in rows(answer)} == {3, 2}
        assert (len(answer["steps"]), sum(row[3] for row in answer["steps"])) == (7 * LENGTH, 7 * LENGTH)
        assert (answer["failed"], answer["first_failure"]) == ([], None)
        assert answer["steps"][0][0] >= answer["began"] and json.dumps(answer)
    answer, _ = serve(COUNTED, refused=(1, 4))
    assert answer["first_failure"] == "ValueError: number 1 refused" and len(rows(answer)) == 5
    assert [(row[0], row[2], row[4]) for row in answer["failed"]] == [(1, None, "ValueError"), (0, None, "ValueError")]
    assert all(answer["began"] <= sent <= ended for _, sent, _, ended, _ in answer["failed"])
    answer, server = serve(WINDOW, step_s=0.02)
    cut = [row for row in rows(answer) if not row.finished]
    assert 1 <= len(cut) <= USERS and len(server.engine.aborted) == len(cut)
    assert all(row.output < LENGTH and row.admitted == 1.0 for row in cut)
    opened, closed = answer["window"]
    assert closed - opened >= 0.1 and answer["began"] < opened
    assert max(row.sent for row in rows(answer)) <= closed + 0.05


@pytest.mark.parametrize(("taken", "has"), [
    ("structured_outputs", "StructuredOutputsParams"), ("guided_decoding", "GuidedDecodingParams"),
])  # fmt: skip
def test_structured_output_uses_release_api(worker, monkeypatch, taken, has, serve):
    module = SimpleNamespace(**{has: lambda json: ("by", json)}, RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    told = {"SamplingParams": lambda **given: given, "sampling_params": module}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(**told))
    free, asked = worker.parameters_of(9), worker.parameters_of(9, '{"type": "object"}')
    assert (free["ignore_eos"], asked["ignore_eos"], asked.pop(taken)) == (True, False, ("by", '{"type": "object"}'))
    assert free | {"ignore_eos": False} == asked and free["max_tokens"] == 9

    class Ending(Engine):
        reason = "stop"

        async def generate(self, *given):
            async for answer in super().generate(*given):
                answer.outputs[0].finish_reason = self.reason
                yield answer

    class Broken(Ending):
        reason = "error"

    ended, (failed, _) = serve(COUNTED, kind=Ending)[0], serve(COUNTED, kind=Broken)
    assert all(row.finished for row in rows(ended)) and ended["failed"] == []
    assert f"after {LENGTH} tokens" in failed["first_failure"] and not rows(failed)


def test_each_round_has_fresh_prompts(serve, worker, monkeypatch):
    """Two prompts, of which the second is too short for a place; seven requests are four rounds of the first."""
    _, server = serve(COUNTED)
    server.places, server.rounds = [1, None], [[90 + n] for n in range(9)]
    server.first_round = server.last_round = 0
    seen, generate = [], server.engine.generate

    def watched(prompt, *more):
        seen.append(prompt["prompt_token_ids"])
        return generate(prompt, *more)

    server.engine.generate = watched
    for _ in range(2):
        asyncio.run(server.run(COUNTED))
    assert sorted(ids for ids in seen if len(ids) == 3) == [[1, 90 + n, 3] for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    assert [ids for ids in seen if len(ids) == 2] == [[4, 5]] * 6
    # Of an engine that knows none nothing is asked (`Engine.generate` has no such argument).
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=lambda *facts: facts))
    server = worker.Server(None, None)
    server.engine, server.say = Adapting(worker.StepTrace()), AsyncMock()
    server.prompts, server.output_tokens = [{"prompt_token_ids": [n]} for n in range(3)], [LENGTH] * 3

    async def serve():
        server.further = await server.with_adapters([2, 1, 2], "slm-rank8", 80_000, "/adapter")
        return await server.answer({"op": "run", "load": WINDOW | {"requests": 6}})

    assert asyncio.run(asyncio.wait_for(serve(), 20))["failed"] == []
    assert server.engine.loaded == [("slm-rank8-1", 80_001, "/adapter"), ("slm-rank8-2", 80_002, "/adapter")]
    assert server.engine.asked == ["slm-rank8-2", "slm-rank8-1", "slm-rank8-2"] * 2


@pytest.mark.parametrize(("engine", "row"), [
    ({"cut": True}, (1.0, None, None, 0, False)), ({"stamped": False}, (None, None, None, LENGTH, True))
])  # fmt: skip
def test_scheduled_requests_come_at_once(serve, engine, row):
    answer, _ = serve(AT_ONCE, **engine)
    found = [(one.admitted, one.first, one.last, one.output, one.finished) for one in rows(answer)]
    assert found == [row] * 9 and max(one.sent for one in rows(answer)) - answer["began"] < 0.1
    opened, closed = answer["window"]
    assert opened == answer["began"] < closed


@pytest.mark.parametrize(("load", "served"), [(WINDOW, 0), (COUNTED, 0), (COUNTED, USERS)])
def test_failing_load_is_given_up(worker, serve, load, served):
    answer, server = serve(load | {"requests": load["requests"] and 1000}, refused=range(served, 10_000))
    least, failed = worker.FAILURES_UNTIL_GIVEN_UP, len(answer["failed"])
    assert least <= failed < least + USERS and server.engine.came == failed + len(rows(answer))
    assert min(served, 1) <= len(rows(answer)) <= served


@pytest.mark.parametrize("load", [WINDOW, COUNTED, AT_ONCE])
def test_stalled_engine_is_reported(worker, monkeypatch, load):
    monkeypatch.setattr(worker, "STALL_S", 0.1)
    prompts = {"op": "load", "prompts": [[1, 2]], "output_tokens": [LENGTH], "kind": "generate"}
    given = {}, prompts, {"op": "run", "load": load}
    lines = AsyncMock(side_effect=[json.dumps(line).encode() for line in given])
    server = worker.Server(SimpleNamespace(readline=lines), None)
    server.start, server.say = AsyncMock(return_value={}), AsyncMock()
    server.engine = Engine(worker.StepTrace(), step_s=60)
    with pytest.raises(TimeoutError):
        asyncio.run(server.serve())
    assert server.say.call_args.kwargs == {"event": "stalled", "cause": "no engine step for 0 s"}
    assert worker.StepTrace.on_step is None


FULL = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.5, new_in_this_release=9)
DRAFTING = SimpleNamespace(spec_decoding_stats=SimpleNamespace(num_drafts=2, num_accepted_tokens=5))
# Of three sequences one made its first token, one 4 and one 2, with which it ended: a third was accepted and dropped.
THREE = {"num_generation_tokens": 7, "time_to_first_tokens_iter": [0.1], "inter_token_latencies_iter": [0.1, 0.1]}


@pytest.mark.parametrize(("scheduler", "iteration", "rows"), [
    (SimpleNamespace(), {"num_generation_tokens": 4}, [(None, None, 4, 0, None, 0, 0, 0)]),
    (None, {"num_generation_tokens": 2}, [(None, None, 2, 0, None, 0, 0, 0)]),
    (FULL, {"num_generation_tokens": 4, "num_prompt_tokens": 32, "num_preempted_reqs": 2},
     [(3, 1, 4, 32, 0.5, 2, 0, 0)]),
    (DRAFTING, THREE, [(None, None, 7, 0, None, 0, 2, 4)]),
    (DRAFTING, {"num_generation_tokens": 7}, [(None, None, 7, 0, None, 0, 2, 5)]),  # as the scheduler counts
    (SimpleNamespace(spec_decoding_stats=SimpleNamespace()), {"num_generation_tokens": 7},
     [(None, None, 7, 0, None, 0, 0, 0)]),
    (FULL, THREE, [(3, 1, 7, 0, 0.5, 0, 0, 0)]),  # nothing was drafted
    (FULL, {}, []),  # without tokens a report is no step
    (FULL, {"num_generation_tokens": 0}, []),
    (FULL, None, []),
])  # fmt: skip
def test_stat_logger_accepts_any_release(worker, monkeypatch, scheduler, iteration, rows):
    monkeypatch.setattr(worker.StepTrace, "rows", [])
    trace = worker.StepTrace("config", 0, unheard_of=1)
    trace.record(scheduler, None if iteration is None else SimpleNamespace(**iteration), "more", engine_idx=0)
    assert [row[1:] for row in worker.StepTrace.rows] == rows
    assert [trace.log(), trace.log_engine_initialized(1), trace.record_sleep_state(sleep=1)] == [None] * 3


@pytest.mark.parametrize(("steps", "rate"), [(0, None), (1, None), (100, 10.0)])
def test_recent_throughput_skips_first_step(worker, monkeypatch, steps, rate):
    monkeypatch.setattr(worker, "PROGRESS_S", 0.001)
    monkeypatch.setattr(worker.StepTrace, "rows", [(float(i), 0, 0, 10) for i in range(steps)])
    say = AsyncMock(side_effect=asyncio.CancelledError)
    server = SimpleNamespace(output_tokens=[LENGTH], kind="generate", schema="", say=say)
    run = worker.WorkerRun(server, COUNTED)
    run.began = 0.0
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run.tell())
    assert say.call_args.kwargs["tokens_per_s"] == rate


def test_unreported_limits_are_unknown(worker, monkeypatch):
    told = {
        "cache": {"num_gpu_blocks": 10, "block_size": 16, "enable_prefix_caching": False},
        "model": {"max_model_len": 128, "dtype": "torch.float16"}, "compilation": {"cudagraph_capture_sizes": (1, 2)},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    }  # fmt: skip
    facts = worker.resolved(SimpleNamespace(**{f"{part}_config": SimpleNamespace(**of) for part, of in told.items()}))
    assert (facts["kv_blocks"], facts["dtype"], facts["capture_sizes"]) == (10, "float16", [1, 2])
    assert (facts["chunked_prefill"], facts["async_scheduling"]) == (None, None)
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "before")
    new, old = make_dataclass("New", ["profiler_config"]), make_dataclass("Old", ["model"])
    given = worker.profiler_arguments(new, "/traces")["profiler_config"]
    assert (given["profiler"], given["torch_profiler_dir"]) == ("torch", "/traces")
    assert os.environ["VLLM_TORCH_PROFILER_DIR"] == "before"
    assert worker.profiler_arguments(old, "/traces") == {} and os.environ["VLLM_TORCH_PROFILER_DIR"] == "/traces"


class Profiling(Engine):
    """`seen` is what its profiler was told, with the tokens until then. broken: what it raises at "start" or "stop"."""

    def __init__(self, trace, **broken):
        super().__init__(trace)
        self.seen, self.broken = [], broken

    async def start_profile(self, word="start"):
        if word in self.broken:
            raise self.broken[word]
        self.seen.append((word, len(self.trace.rows)))

    async def stop_profile(self):
        await self.start_profile("stop")


NOT_ENABLED, FULL_DISK = RuntimeError("Profiling is not enabled"), OSError("No space left on device")


@pytest.mark.parametrize(("kind", "broken", "problem", "told"), [
    (Profiling, {}, None, ["start", "stop"]),
    (Engine, {}, "this vLLM has no profiler by that name", []),
    (Profiling, {"start": NOT_ENABLED}, f"RuntimeError: {NOT_ENABLED}", []),
    (Profiling, {"stop": FULL_DISK}, f"OSError: {FULL_DISK}", ["start"]),
])  # fmt: skip
def test_profiler_covers_short_window(worker, serve, monkeypatch, kind, broken, problem, told):
    monkeypatch.setattr(worker, "PROFILED_S", 0.1)
    answer, server = serve(WINDOW | {"window_s": 60.0}, op="profile", kind=kind, **broken)
    assert answer == {"event": "profiled", "problem": problem}
    seen = getattr(server.engine, "seen", [])
    assert [word for word, _ in seen] == told
    if problem is None:
        (_, began), (_, ended) = seen
        assert ended > began >= LENGTH, "a burst has settled after one cycle"


@pytest.mark.parametrize(("device", "executor", "chosen", "method"), [
    ("cpu", "mp", None, "fork"),
    ("cpu", "mp", "spawn", "spawn"),
    ("cpu", "uni", None, "spawn"),  # the model is in the core, and OpenMP cannot be forked
    ("cuda", "mp", None, "spawn"),
])  # fmt: skip
def test_core_is_forked_on_cpu(worker, monkeypatch, device, executor, chosen, method):
    in_child = []
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: in_child.append(after_in_child))
    monkeypatch.setenv(worker.START_METHOD, "spawn")  # as the configuration leaves it
    parallel, of = SimpleNamespace(distributed_executor_backend=executor), SimpleNamespace(device_type=device)
    worker.fork_core(SimpleNamespace(device_config=of, parallel_config=parallel), chosen)
    assert os.environ[worker.START_METHOD] == method
    for forked in in_child:
        forked()
    assert os.environ[worker.START_METHOD] == "spawn"


class Limited(Engine):
    """With the limits of a step of vLLM's scheduler."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=10))


@pytest.mark.parametrize("load", [WINDOW, COUNTED])
@pytest.mark.parametrize("asks", ["embed", "rerank"])
def test_pooling_request_has_one_output(serve, load, asks, worker):
    answer, server = serve(load, kind=Limited, asks=asks)
    found = [row for row in rows(answer) if row.finished]
    assert server.engine.asked == f"for {asks}" and len(found) >= USERS
    assert all(row.admitted is None and row.sent < row.first == row.last and row.output == 1 for row in found)
    assert {row.prompt for row in found} == {2, 3} and {row[-1] for row in answer["samples"]} == {2}
    assert {row[3:5] for row in answer["steps"]} == {(1, 3)}, "a result of each request that ends"
    server = worker.Server(None, None)
    server.engine = Limited(worker.StepTrace())
    server.prompts = [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3] * 3}]
    found = [server.steps_of_results(concurrency) for concurrency in (1, 96, 1000)]
    assert found == [24, 24, 250], "four prompts of 2.5 tokens in a step of 10"
