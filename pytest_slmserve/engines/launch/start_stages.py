"""Stages of an engine's start, for whoever waits for it: read from the log of its process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

IMPORTING = "importing vLLM"
# What vLLM logs when a stage begins (`v1/engine/core.py`, `gpu_model_runner.py`, `compilation/backends.py`; 0.26 to
# 0.32, the CPU's `cpu_model_runner.py` too).
MARKS = {
    "Initializing a V1 LLM engine": "starting the engine",
    "Starting to load model": "loading weights",
    "for vLLM's torch.compile": "compiling",
    "Warming up model for the compilation": "compiling",
    "Capturing CUDA graphs": "capturing CUDA graphs",
    "init engine (profile, create kv cache": "starting the engine",
}
Waiter = Callable[[Path], None]
_WAITER: ContextVar[Waiter | None] = ContextVar("waiter", default=None)


def stage_of(log: Path) -> str:
    """The stage that a start has come to, by the mark that was logged last."""
    try:
        text = log.read_text("utf-8", errors="replace")
    except OSError:  # removed with its folder, for the start has failed
        return IMPORTING
    last = max(MARKS, key=text.rfind)
    return MARKS[last] if last in text else IMPORTING


@contextmanager
def waiting(waiter: Waiter) -> Iterator[None]:
    """Has `waiter` hear now and then, in this thread, the log of an engine that is not ready yet."""
    token = _WAITER.set(waiter)
    try:
        yield
    finally:
        _WAITER.reset(token)


def still_waiting(log: Path) -> None:
    """Tells the waiter, if there is one, that the engine with this log is not ready yet."""
    if waiter := _WAITER.get():
        waiter(log)
