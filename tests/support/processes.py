"""Who is alive: processes looked up by group or by command line. A zombie is not alive."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# Of a killed process: Linux frees its memory bit by bit, which an engine's took more than 10 s for once, on cores that
# others kept busy. No process is waited for that long if nothing is wrong.
GONE_S = 60.0


def processes() -> Iterator[tuple[int, int, str, list[str]]]:
    """Process id, process group, state and command line of every process."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            state, _, group = (folder / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[:3]
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            yield int(folder.name), int(group), state, words


def alive() -> Iterator[tuple[int, int, list[str]]]:
    """Process id, process group and command line of every process that is not a zombie."""
    return ((pid, of, words) for pid, of, state, words in processes() if state not in "ZX")


def group(number: int) -> list[int]:
    """Living members of a process group."""
    return sorted(pid for pid, of, _ in alive() if of == number)


def workers_of(parent: int) -> list[int]:
    """Engine workers that were started by the process `parent`; each leads a group of its own."""
    leaders = [(pid, words) for pid, of, words in alive() if pid == of and words[-1:] == [str(parent)]]
    return [pid for pid, words in leaders if any(word.endswith("vllm_worker.py") for word in words)]


def until(seen: Callable[[], T], within_s: float, what: object) -> T:
    """Wait until `seen()` is true, and return it. what: what did not come about, or what then tells it."""
    end = time.monotonic() + within_s
    while not (value := seen()):
        assert time.monotonic() < end, f"not within {within_s} s: {what() if callable(what) else what}"
        time.sleep(0.05)
    return value


def gone(number: int, within_s: float = GONE_S) -> bool:
    """Every member of the group has ended."""
    return until(lambda: not group(number), within_s, lambda: [row for row in processes() if row[1] == number])


def kill_group(number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
