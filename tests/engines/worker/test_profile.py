"""A load under vLLM's own profiler: when it is on, and that nothing of it can spoil a run."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_slmserve.engines.base import message_of
from pytest_slmserve.engines.worker import __file__ as package
from pytest_slmserve.schema.loads import ClosedLoop

LOAD = message_of(ClosedLoop(3, window_s=60.0, ramp_up="burst"))
LENGTH = 6


@pytest.fixture(scope="module")
def worker():
    """The module, found as in its own process: only its folder is on the path, not its package."""
    folder = str(Path(package).parent)
    there = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [folder, *sys.path])
        module = importlib.import_module("vllm_worker")
        patch.setattr(module, "greedy", lambda tokens: tokens)
        yield module
    for name in set(sys.modules) - there:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@dataclass
class Engine:
    """A token per step to everybody; `seen` is what its profiler was told, with the steps until then."""

    trace: object
    steps: int = 0
    seen: list = field(default_factory=list)
    aborted: set = field(default_factory=set)

    async def generate(self, prompt, parameters, name):
        made = 0
        while made < parameters and name not in self.aborted:
            await asyncio.sleep(0.002)
            self.steps, made = self.steps + 1, made + 1
            self.trace.record(SimpleNamespace(), SimpleNamespace(num_generation_tokens=1))
        stamps = SimpleNamespace(num_generation_tokens=made)
        completion = SimpleNamespace(finish_reason="length", token_ids=[7] * made)
        yield SimpleNamespace(outputs=[completion], metrics=stamps, prompt_token_ids=[1])

    async def abort(self, names):
        self.aborted |= set(names)


class Profiling(Engine):
    async def start_profile(self):
        self.seen.append(("start", self.steps))

    async def stop_profile(self):
        self.seen.append(("stop", self.steps))


class Refusing(Profiling):
    async def start_profile(self):
        raise RuntimeError("Profiling is not enabled")


class Unwritten(Profiling):
    async def stop_profile(self):
        raise OSError("No space left on device")


@pytest.fixture
def profiled(worker, monkeypatch):
    """The answer to `profile` of a server with such an engine, and that engine."""
    monkeypatch.setattr(worker, "PROFILED_S", 0.1)

    def ask(kind):
        server = worker.Server(None, None)
        server.engine = kind(worker.StepTrace())
        server.prompts, server.output_tokens = [{"prompt_token_ids": [1]}] * 2, [LENGTH] * 2
        answer = asyncio.run(asyncio.wait_for(server.answer({"op": "profile", "load": LOAD}), 20))
        return answer, server.engine

    return ask


def test_the_profiler_is_on_in_a_short_window_after_the_load_has_settled(profiled):
    answer, engine = profiled(Profiling)
    assert answer == {"event": "profiled", "problem": None}
    (first, began), (last, ended) = engine.seen
    assert (first, last) == ("start", "stop") and ended > began >= 2 * LENGTH


@pytest.mark.parametrize(
    ("kind", "problem", "told"),
    [
        (Engine, "this vLLM has no profiler by that name", []),
        (Refusing, "RuntimeError: Profiling is not enabled", []),
        (Unwritten, "OSError: No space left on device", ["start"]),
    ],
)
def test_what_goes_wrong_is_told_and_raises_nothing(profiled, kind, problem, told):
    answer, engine = profiled(kind)
    assert answer == {"event": "profiled", "problem": problem}
    assert [word for word, _ in engine.seen] == told


def test_a_release_that_has_the_argument_gets_it_and_an_older_one_the_variable(worker, monkeypatch):
    @dataclass
    class New:
        profiler_config: object = None

    @dataclass
    class Old:
        model: str = ""

    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "before")
    given = worker.profiler_arguments(New, "/traces")["profiler_config"]
    assert (given["profiler"], given["torch_profiler_dir"]) == ("torch", "/traces")
    assert os.environ["VLLM_TORCH_PROFILER_DIR"] == "before"
    assert worker.profiler_arguments(Old, "/traces") == {} and os.environ["VLLM_TORCH_PROFILER_DIR"] == "/traces"
