"""A child in its own process group that speaks JSON lines over a socket pair, and dies with us."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import ProgressCallback, WindowBarrier, ignore_progress
from pytest_slmserve.engines.worker.slm_lines import Ended, Lines, TooLong
from pytest_slmserve.schema.errors import ENDS_WITH, EngineFailed
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Failures, Progress, Resolved, Run, Samples, Steps, known_fields

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
def waiting_for_engine(waiter: Waiter) -> Iterator[None]:
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


LOG_LINES = 25
POLL_S = 0.5
SILENCE_S = 120.0  # progress comes twice a second
NO_MESSAGE = "wrote what is no message into the socket that it speaks to us by"
GUARDIAN = Path(__file__).parent.parent / "worker" / "guardian.py"  # a script, for an interpreter without our packages
FOLDER = "SLM_FOLDER"  # variable of a child: its own folder, which its guardian removes where we were killed
LONGEST = 60  # characters of a folder in which vLLM makes sockets, whose paths may have 107


class Child:
    """Started with `command + [descriptor, our pid]`; its standard output and error go to a log of its own.

    folder: where its log is, its temporary files and whatever else is its own; removed in the end. cores: those that it
    and its own children may run on; none: all of ours. name: of what it is, in errors.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str],
        folder: Path | None = None,
        cores: Collection[int] = (),
        name: str = "the engine",
    ) -> None:
        self.name = name
        self.folder = folder or Path(tempfile.mkdtemp(prefix="pytest-slmserve-"))
        self.log = self.folder / "engine.log"
        self._temporary = self.folder / "t"
        self._temporary.mkdir()
        self.socket, theirs = socket.socketpair()
        with theirs, self.log.open("wb") as log, ExitStack() as undo:
            undo.callback(self.socket.close)
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                # A group, to end it by, but no session: where a kernel shares cores by session
                # (`kernel.sched_autogroup_enabled`), a client that shares them with its server was held up for seconds,
                # of which it needed a few milliseconds (Linux 6.18).
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env | {FOLDER: str(self.folder)} | self._places(env),
            )
            undo.pop_all()
        if cores:
            os.sched_setaffinity(self.process.pid, cores)  # before it has any child, which would keep the others
        self._lines = Lines(self.socket)
        self.keep_log = self._killed = False

    def _places(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables by which its temporary files are in its folder, but for what is compiled: that is used again."""
        if len(str(self._temporary)) > LONGEST:
            return {}
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        compiled = str(Path(tempfile.gettempdir(), f"torchinductor_{user}"))  # as torch names it
        return {"TMPDIR": str(self._temporary), "TORCHINDUCTOR_CACHE_DIR": compiled} | {
            name: env[name] for name in ("TORCHINDUCTOR_CACHE_DIR",) if name in env
        }

    def send(self, **message: Any) -> None:
        try:
            self._lines.say(**message)
        except Ended:
            raise self.failed(self._how_it_ended()) from None

    def receive(self, within_s: float, what: str) -> dict[str, Any]:
        """The next line. Raises EngineFailed when the child is gone, silent for `within_s` seconds, or without end."""
        until = time.monotonic() + within_s
        try:
            while (message := self._lines.hear(min(POLL_S, max(0.0, until - time.monotonic())))) is None:
                if time.monotonic() >= until:
                    raise self.failed(f"was silent for {within_s:.0f} s while {what}")
                still_waiting(self.log)
        except Ended:
            raise self.failed(self._how_it_ended()) from None
        except TooLong as error:
            raise self.failed(f"sent {error}") from None
        except (ValueError, RecursionError):
            raise self.failed(NO_MESSAGE) from None
        return message

    def event(self, within_s: float, what: str) -> dict[str, Any]:
        """The next line, which says what happened. Raises EngineFailed as `receive` does."""
        message = self.receive(within_s, what)
        if "event" not in message:
            raise self.failed(NO_MESSAGE)
        return message

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "ended (it closed its end)"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended (exit status {code})"

    def failed(self, problem: str, hint: str = "") -> EngineFailed:
        """An error that shows the end of the log, which is kept."""
        self.keep_log = True
        return EngineFailed(f"{self.name} {problem}; {self.log}{ENDS_WITH}{self.log_tail()}", hint)

    def log_tail(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-LOG_LINES:]) or "  | (nothing)"

    def end(self, within_s: float = 20.0) -> None:
        """Wait for it to leave by itself, then kill what is left of its process group."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        self.kill()

    def kill(self) -> None:
        """May be called again: by then the system may have given the number of its group to another."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        shutil.rmtree(self._temporary if self.keep_log else self.folder, ignore_errors=True)


def converse(
    child: Child,
    on_progress: ProgressCallback = ignore_progress,
    barrier: WindowBarrier | None = None,
    /,
    **message: Any,
) -> dict[str, Any]:
    """One message there, its answer back; meanwhile progress is told, and the window of a gated run is asked for."""
    child.send(**message)
    while (answer := child.event(SILENCE_S, "measuring"))["event"] in ("progress", "settled", "stalled"):
        if answer["event"] == "stalled":
            raise child.failed(f"stalled: {answer['cause']}")
        if answer["event"] == "progress":
            on_progress(Progress(**known_fields(Progress, answer)))
        elif barrier:
            child.send(op="open", window=barrier.settled())
    if answer["event"] == "failed":
        raise child.failed(f"failed: {answer['cause']}")
    return answer


def resolved_from(ready: dict[str, Any], ready_s: float) -> Resolved:
    """ready: its limits, and what each of its processes knows of the model, which is a part of it."""
    parts = ready.get("parts") or [{}]
    weights = [part.get("weight_bytes") for part in parts]
    known = {"weight_bytes": None if None in weights else sum(weights)}
    facts = known_fields(Resolved, {**ready, **parts[0], **known})
    for name in ("capture_sizes", "kv_windows"):
        facts[name] = None if facts.get(name) is None else tuple(facts[name])
    return Resolved(**{**facts, "ready_s": ready_s})


def run_from(message: dict[str, Any]) -> Run:
    """The worker's columns as a Run, its clock set to zero where the run began and its rows in the order sent."""
    began = message["began"]

    def since(stamps: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if s is None else round(s - began, 6) for s in stamps)

    rows = sorted(zip(*message["samples"]), key=lambda row: row[1])
    request, sent, admitted, first, last, prompt, output, finished, cached = zip(*rows) if rows else [()] * 9
    time_s, running, waiting, new, prefilled, kv, preempted = message["steps"] or [()] * 7
    start, stop = message["window"]
    return Run(
        samples=Samples(
            tuple(request),
            since(sent),  # type: ignore[arg-type]
            since(admitted),
            since(first),
            since(last),
            tuple(prompt),
            tuple(output),
            tuple(finished),
            () if all(count is None for count in cached) else tuple(cached),
        ),
        steps=Steps(since(time_s), *map(tuple, (running, waiting, new, prefilled, kv, preempted))),  # type: ignore[arg-type]
        window_s=(round(start - began, 6), round(stop - began, 6)),
        failures=message["failures"],
        first_failure=message["first_failure"] and printable(message["first_failure"]),
        began_s=round(began, 6),
        failed=_failures(message["failed"], since) if message["failures"] else None,
    )


def _failures(told: dict[str, Any], since: Callable[[Sequence[Any]], tuple[Any, ...]]) -> Failures:
    scheduled = told.get("scheduled", [None])
    return Failures(
        request=tuple(told["request"]),
        sent_s=since(told["sent"]),
        ended_s=since(told["ended"]),
        kind=tuple(told["kind"]),
        scheduled_s=None if None in scheduled else since(scheduled),
    )
