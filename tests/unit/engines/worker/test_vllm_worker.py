"""The worker's own logic, in this process, with a duck-typed engine in place of vLLM."""

import asyncio
import importlib
import json
import os
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_slmserve.engines.base import message_of
from pytest_slmserve.engines.worker import __file__ as package
from pytest_slmserve.schema.specs import ClosedLoop

FOLDER = Path(package).parent
LENGTH, USERS = 6, 3
WINDOW = message_of(ClosedLoop(USERS, window_s=0.1, ramp_up="burst"))
COUNTED = WINDOW | {"requests": 7}
AT_ONCE = {"kind": "open_loop", "schedule": [0.0] * 9}


@pytest.fixture(scope="module")
def worker():
    """The module, found as in its own process: only its folder is on the path, not its package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        module = importlib.import_module("vllm_worker")
        patch.setattr(module, "greedy", lambda tokens: tokens)
        yield module
    sys.modules.pop("vllm_worker"), sys.modules.pop("slm_pacing")


class Engine:
    """Serves a token per step to all; `refuse(number)` may raise for the request of that number."""

    def __init__(self, trace, refuse=lambda number: None, stamped=True, step_s=0.002):
        self.trace, self.refuse, self.stamped, self.step_s = trace, refuse, stamped, step_s
        self.left, self.tokens, self.aborted, self.came, self.stopped = {}, {}, set(), 0, False

    async def generate(self, prompt, parameters, name):
        number, self.came = self.came, self.came + 1
        self.refuse(number)
        self.tokens[name] = 0
        while self.tokens[name] < parameters and name not in self.aborted:
            await asyncio.sleep(self.step_s)
            if name not in self.aborted:
                self.step(name)
        yield self.answer(prompt, name, "abort" if name in self.aborted else "length")

    def step(self, name):
        self.tokens[name] += 1
        self.trace.record(SimpleNamespace(num_running_reqs=1), SimpleNamespace(num_generation_tokens=1))

    def answer(self, prompt, name, reason):
        made = self.tokens.pop(name)
        stamps = SimpleNamespace(scheduled_ts=1.0, first_token_ts=2.0 * bool(made), last_token_ts=3.0 * bool(made))
        stamps.num_generation_tokens = made
        completion = SimpleNamespace(finish_reason=reason, token_ids=[7] * made)
        return SimpleNamespace(
            outputs=[completion], metrics=stamps if self.stamped else None, prompt_token_ids=prompt["prompt_token_ids"]
        )

    async def abort(self, names):
        self.aborted |= set(names)

    def shutdown(self):
        self.stopped = True


@pytest.fixture
def serve(worker):
    """Runs a load on an engine and returns the worker's answer, and what it said in between."""

    def run(load, engine=None, op="run"):
        server = worker.Server(None, None)
        server.engine = engine or Engine(worker.StepTrace())
        server.prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]
        server.output_tokens = [LENGTH, LENGTH]
        server.heard = []

        async def say(**message):
            server.heard.append(message)

        server.say = say
        answer = asyncio.run(asyncio.wait_for(server.answer({"op": op, "load": load}), 20))
        return answer, server

    return run


def rows(answer):
    names = ("request", "sent", "admitted", "first", "last", "prompt", "output", "finished")
    return [SimpleNamespace(**dict(zip(names, row))) for row in answer["samples"]]


def test_a_counted_loop_serves_exactly_so_many(serve):
    answer, _ = serve(COUNTED)
    assert [row.output for row in rows(answer)] == [LENGTH] * 7
    assert sorted(row.request for row in rows(answer)) == [0, 0, 0, 0, 1, 1, 1]  # the set of two is cycled through
    assert {row.prompt for row in rows(answer)} == {3, 2}
    assert sum(row[3] for row in answer["steps"]) == 7 * LENGTH
    assert (answer["failed"], answer["first_failure"]) == ([], None)
    json.dumps(answer)


def test_a_schedule_may_send_all_at_once(serve):
    answer, _ = serve(AT_ONCE)
    assert len(rows(answer)) == 9
    assert max(row.sent for row in rows(answer)) - answer["began"] < 0.1
    opened, closed = answer["window"]
    assert opened == answer["began"] < closed


def test_a_window_cuts_off_what_is_in_flight_and_keeps_its_stamps(worker, serve):
    answer, server = serve(WINDOW, Engine(worker.StepTrace(), step_s=0.02))
    cut = [row for row in rows(answer) if not row.finished]
    assert 1 <= len(cut) <= USERS
    assert all(row.output < LENGTH and row.admitted == 1.0 for row in cut)
    assert len(server.engine.aborted) == len(cut)
    opened, closed = answer["window"]
    assert closed - opened >= 0.1
    assert answer["began"] < opened
    assert max(row.sent for row in rows(answer)) <= closed + 0.05


class Cut(Engine):
    """Ends each request before its first token."""

    async def generate(self, prompt, parameters, name):
        self.tokens[name] = 0
        yield self.answer(prompt, name, "abort")


def test_one_cut_off_before_its_first_token_has_no_stamps_of_it(worker, serve):
    answer, _ = serve(COUNTED, Cut(worker.StepTrace()))
    assert {(row.first, row.last, row.output, row.finished) for row in rows(answer)} == {(None, None, 0, False)}


def test_without_stamps_tokens_are_still_counted(worker, serve):
    answer, _ = serve(COUNTED, Engine(worker.StepTrace(), stamped=False))
    assert {(row.admitted, row.first, row.last, row.output) for row in rows(answer)} == {(None, None, None, LENGTH)}


def refusing(*numbers):
    def refuse(number):
        if number in numbers:
            raise ValueError(f"number {number} refused")

    return refuse


def test_failures_are_counted_and_the_rest_is_served(worker, serve):
    answer, _ = serve(COUNTED, Engine(worker.StepTrace(), refusing(1, 4)))
    assert answer["first_failure"] == "ValueError: number 1 refused"
    assert [(row[0], row[2], row[4]) for row in answer["failed"]] == [(1, None, "ValueError"), (0, None, "ValueError")]
    assert all(answer["began"] <= sent <= ended for _, sent, _, ended, _ in answer["failed"])
    assert len(rows(answer)) == 5


@pytest.mark.parametrize("load", [WINDOW, COUNTED | {"requests": 1000}])
def test_a_load_that_only_fails_is_given_up_after_five(worker, serve, load):
    answer, server = serve(load, Engine(worker.StepTrace(), refusing(*range(10_000))))
    assert worker.FAILURES_UNTIL_GIVEN_UP <= len(answer["failed"]) < worker.FAILURES_UNTIL_GIVEN_UP + USERS
    assert server.engine.came == len(answer["failed"])
    assert rows(answer) == []


def test_one_bad_user_does_not_end_those_in_flight_when_it_is_given_up(worker, serve):
    answer, _ = serve(COUNTED | {"requests": 1000}, Engine(worker.StepTrace(), refusing(*range(3, 10_000))))
    assert len(answer["failed"]) >= worker.FAILURES_UNTIL_GIVEN_UP
    assert 1 <= len(rows(answer)) <= USERS


@pytest.mark.parametrize("load", [WINDOW, COUNTED, AT_ONCE])
def test_an_engine_without_steps_is_not_waited_for(worker, serve, monkeypatch, load):
    monkeypatch.setattr(worker, "STALL_S", 0.2)
    with pytest.raises(TimeoutError, match="no engine step for 0 s"):
        serve(load, Engine(worker.StepTrace(), step_s=60))
    assert worker.StepTrace.on_step is None


def test_an_engine_without_steps_is_told_before_the_worker_ends(worker, monkeypatch):
    monkeypatch.setattr(worker, "STALL_S", 0.1)
    lines = [b"{}\n", json.dumps({"op": "load", "prompts": [[1, 2]], "output_tokens": [LENGTH]}).encode(), b""]
    lines.insert(2, json.dumps({"op": "run", "load": COUNTED}).encode())
    heard = []

    class Scripted(worker.Server):
        async def start(self, arguments):
            self.engine = Engine(worker.StepTrace(), step_s=60)
            return {}

        async def say(self, **message):
            heard.append(message)

    async def read_line():
        return lines.pop(0)

    with pytest.raises(TimeoutError):
        asyncio.run(Scripted(SimpleNamespace(readline=read_line), None).serve())
    assert heard[-1] == {"event": "stalled", "cause": "no engine step for 0 s"}


def test_it_tells_how_far_it_is_while_it_serves(worker, serve, monkeypatch):
    monkeypatch.setattr(worker, "PROGRESS_S", 0.03)
    _, server = serve(WINDOW)
    assert len(server.heard) >= 3
    assert {message["event"] for message in server.heard} == {"progress"}
    assert server.heard[-1]["phase"] in ("window", "over")
    assert server.heard[-1]["tokens_per_s"] > 0
    assert [m["done"] for m in server.heard] == sorted(m["done"] for m in server.heard)


def test_runs_do_not_share_what_they_noted(worker, serve):
    first, server = serve(COUNTED)
    again = asyncio.run(server.run(COUNTED))
    assert len(again["steps"]) == len(first["steps"]) == 7 * LENGTH
    assert again["steps"][0][0] >= again["began"]
    assert len(rows(again)) == 7


@pytest.fixture
def trace(worker, monkeypatch):
    monkeypatch.setattr(worker.StepTrace, "rows", [])
    return worker.StepTrace("config", 0, unheard_of=1)


FULL = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.5, new_in_this_release=9)


@pytest.mark.parametrize(
    ("scheduler", "iteration", "rows"),
    [
        (SimpleNamespace(), {"num_generation_tokens": 4}, [(None, None, 4, 0, None, 0)]),
        (None, {"num_generation_tokens": 2}, [(None, None, 2, 0, None, 0)]),
        (FULL, {"num_generation_tokens": 4, "num_prompt_tokens": 32, "num_preempted_reqs": 2}, [(3, 1, 4, 32, 0.5, 2)]),
        (FULL, {}, []),  # without tokens a report is no step
        (FULL, {"num_generation_tokens": 0}, []),
        (FULL, None, []),
    ],
)
def test_the_stat_logger_takes_what_is_there_and_has_all_that_vllm_calls(worker, trace, scheduler, iteration, rows):
    trace.record(scheduler, None if iteration is None else SimpleNamespace(**iteration), "more", engine_idx=0)
    assert [row[1:] for row in worker.StepTrace.rows] == rows
    assert [trace.log(), trace.log_engine_initialized(1), trace.record_sleep_state(sleep=1)] == [None] * 3


@pytest.mark.parametrize(("steps", "rate"), [(0, None), (1, None), (100, 10.0)])
def test_recent_throughput_leaves_out_the_tokens_of_its_first_step(worker, trace, serve, monkeypatch, steps, rate):
    monkeypatch.setattr(worker, "PROGRESS_S", 0.001)
    worker.StepTrace.rows = [(float(i), 0, 0, 10) for i in range(steps)]
    told = []

    async def say(**message):
        told.append(message["tokens_per_s"])
        raise asyncio.CancelledError

    run = worker.WorkerRun(SimpleNamespace(output_tokens=[LENGTH], say=say), COUNTED)
    run.began = 0.0
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run.tell())
    assert told == [rate]


def test_limits_that_a_release_does_not_report_are_none(worker):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16, enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=128, dtype="torch.float16"),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=(1, 2)),
    )

    async def ask():
        return worker.resolved(config)

    facts = asyncio.run(ask())
    assert (facts["kv_blocks"], facts["dtype"], facts["capture_sizes"]) == (10, "float16", [1, 2])
    assert (facts["chunked_prefill"], facts["async_scheduling"]) == (None, None)


# Under vLLM's own profiler


class Profiling(Engine):
    """`seen` is what its profiler was told, with the tokens until then."""

    def __init__(self, trace):
        super().__init__(trace)
        self.seen = []

    async def start_profile(self):
        self.seen.append(("start", len(self.trace.rows)))

    async def stop_profile(self):
        self.seen.append(("stop", len(self.trace.rows)))


class Refusing(Profiling):
    async def start_profile(self):
        raise RuntimeError("Profiling is not enabled")


class Unwritten(Profiling):
    async def stop_profile(self):
        raise OSError("No space left on device")


@pytest.mark.parametrize(
    ("kind", "problem", "told"),
    [
        (Profiling, None, ["start", "stop"]),
        (Engine, "this vLLM has no profiler by that name", []),
        (Refusing, "RuntimeError: Profiling is not enabled", []),
        (Unwritten, "OSError: No space left on device", ["start"]),
    ],
)
def test_the_profiler_is_on_in_a_short_window_of_a_settled_load_and_spoils_nothing(
    worker, serve, monkeypatch, kind, problem, told
):
    monkeypatch.setattr(worker, "PROFILED_S", 0.1)
    answer, server = serve(WINDOW | {"window_s": 60.0}, kind(worker.StepTrace()), op="profile")
    assert answer == {"event": "profiled", "problem": problem}
    seen = getattr(server.engine, "seen", [])
    assert [word for word, _ in seen] == told
    if problem is None:
        (_, began), (_, ended) = seen
        assert ended > began >= 2 * LENGTH


def test_a_release_that_has_the_argument_gets_it_and_an_older_one_the_variable(worker, monkeypatch):
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "before")
    new, old = make_dataclass("New", ["profiler_config"]), make_dataclass("Old", ["model"])
    given = worker.profiler_arguments(new, "/traces")["profiler_config"]
    assert (given["profiler"], given["torch_profiler_dir"]) == ("torch", "/traces")
    assert os.environ["VLLM_TORCH_PROFILER_DIR"] == "before"
    assert worker.profiler_arguments(old, "/traces") == {} and os.environ["VLLM_TORCH_PROFILER_DIR"] == "/traces"


# Its processes


@pytest.mark.parametrize(
    ("device", "executor", "chosen", "method"),
    [
        ("cpu", "mp", None, "fork"),
        ("cpu", "mp", "spawn", "spawn"),
        ("cpu", "uni", None, "spawn"),  # the model is in the core, and OpenMP cannot be forked
        ("cuda", "mp", None, "spawn"),
    ],
)
def test_the_core_is_forked_on_the_cpu_and_spawns_the_process_of_the_model(
    worker, monkeypatch, device, executor, chosen, method
):
    in_child = []
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: in_child.append(after_in_child))
    monkeypatch.setenv(worker.START_METHOD, "spawn")  # as the configuration leaves it
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
    )
    worker.fork_core(config, chosen)
    assert os.environ[worker.START_METHOD] == method
    for forked in in_child:
        forked()
    assert os.environ[worker.START_METHOD] == "spawn"
