"""A child in its own process group, which exchanges JSON lines with us over a socket pair and ends with us."""

import atexit
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
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import ProgressCallback, StartCallback, WindowBarrier
from pytest_slmserve.engines.interrupts import held, hurried
from pytest_slmserve.engines.worker.slm_process import Ended, Lines, TooLong
from pytest_slmserve.schema.errors import ENDS_WITH, EngineFailed, single
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Failures, Progress, Resolved, Run, Samples, Steps, known_fields

IMPORTING = "importing vLLM"
# Lines of vLLM's log at which a stage begins (`v1/engine/core.py`, `gpu_model_runner.py`, `compilation/backends.py`,
# `cpu_model_runner.py`; 0.26 to 0.32).
MARKS = {
    "Initializing a V1 LLM engine": "starting the engine",
    "Starting to load model": "loading weights",
    "for vLLM's torch.compile": "compiling",
    "Warming up model for the compilation": "compiling",
    "Capturing CUDA graphs": "capturing CUDA graphs",
    "init engine (profile, create kv cache": "starting the engine",
}


def text_of(log: Path) -> str:
    """Return the text of a log; empty if it was removed with its folder, because the child was killed."""
    try:
        return log.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def stage_of(log: Path) -> str:
    """Return the current stage of an engine's start, by the last mark in its log."""
    text = text_of(log)
    last = max(MARKS, key=text.rfind)
    return MARKS[last] if last in text else IMPORTING


LOG_LINES = 25
POLL_S, LOOK_S = 0.5, 0.05  # between two checks for a message, and for a condition
ENDS_S = 5.0  # for a child to end by itself, while the user who interrupted the run waits
KILLED_S = 20.0
SILENCE_S = 120.0  # progress comes twice a second
NO_MESSAGE = "wrote what is no message into the socket that it speaks to us by"
GUARDIAN = Path(__file__).parent / "worker" / "guardian.py"  # a script, for an interpreter without our packages
FOLDER = "SLM_FOLDER"  # environment variable with the child's folder, which its guardian removes if we are killed
OF_EVERY_STEP = 6  # columns after the time; columns of drafts follow
LONGEST = 60  # characters of a folder for vLLM's sockets, whose paths may have 107


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block ends with an error or an interrupt."""
    try:
        yield
    except BaseException:
        undo()
        raise


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log, indented for an error."""
    return [f"  | {line}" for line in text_of(log).splitlines()[-LOG_LINES:]]


class Child:
    """A process started with `command + [descriptor, our process id]`, whose output goes to a log.

    Args:
        folder: for its log and its temporary files. It is removed in the end, unless an error has named the log.
        cores: CPU cores for it and its children; empty: all.
        name: in errors.
    """

    log_name = "engine.log"
    keep_log = False
    killed = True  # or not yet started

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path | None = None,
        cores: Collection[int] = (),
        name: str = "the engine",
    ) -> None:
        self.name = name
        with undone_on_error(self.kill), held():
            self._start(command, env, folder, cores)

    def _start(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path | None, cores: Collection[int]
    ) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="pytest-slmserve-"))
        self.log = self.folder / self.log_name
        self._temporary = self.folder / "t"
        self._temporary.mkdir()
        own = {FOLDER: str(self.folder)}
        if len(str(self._temporary)) <= LONGEST:
            # Temporary files are in its folder, but compiled code is not, because it is used again.
            user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch names the folder
            compiled = env.get("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{user}")))
            own |= {"TMPDIR": str(self._temporary), "TORCHINDUCTOR_CACHE_DIR": compiled}
        self.socket, theirs = socket.socketpair()
        with undone_on_error(self._discard), theirs, open(self.log, "wb", opener=single) as log:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                # A group can be killed as a whole. It is not a session: if the kernel shares cores by session
                # (`kernel.sched_autogroup_enabled`), a client on its server's cores waits for seconds to run for a
                # few milliseconds (Linux 6.18).
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**env, **own},
            )
            self.killed = False
            atexit.register(self._forgotten, os.getpid())
        if cores:
            os.sched_setaffinity(self.process.pid, cores)  # before it has a child, which would keep the other cores
        self._lines = Lines(self.socket)

    def send(self, **message: Any) -> None:
        """Send one message. Raise EngineFailed if the child has ended."""
        with self._ending_told():
            self._lines.say(**message)

    def receive(self, within_s: float, what: str, on_wait: StartCallback | None = None) -> dict[str, Any]:
        """Return the next message, whose "event" says what happened.

        Args:
            within_s: time limit in seconds.
            what: activity of the child, for errors.
            on_wait: called with the log while no message comes.

        Raises:
            EngineFailed: if the child has ended, is late, or sent something else.
        """
        until = time.monotonic() + within_s
        with self._ending_told():
            while (message := self._lines.hear(min(POLL_S, max(0.0, until - time.monotonic())))) is None:
                if time.monotonic() >= until:
                    raise self.failed(f"was silent for {within_s:.0f} s while {what}")
                if on_wait:
                    on_wait(self.log)
            if "event" not in message:
                raise ValueError
        return message

    def wait_until(
        self, over: Callable[[], bool], within_s: float, late: str, on_wait: StartCallback | None = None
    ) -> None:
        """Wait until `over` returns True, or the child has ended. After `within_s` raise EngineFailed with `late`."""
        until = time.monotonic() + within_s
        while not over() and self.process.poll() is None:
            if time.monotonic() > until:
                raise self.failed(late)
            if on_wait:
                on_wait(self.log)
            time.sleep(LOOK_S)

    @contextmanager
    def _ending_told(self) -> Iterator[None]:
        try:
            yield
        except Ended:
            how = "ended (it closed its end)"
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(5)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended (exit status {code})"
            raise self.failed(how) from None
        except (ValueError, RecursionError) as error:
            raise self.failed(f"sent {error}" if isinstance(error, TooLong) else NO_MESSAGE) from None

    def failed(self, problem: str, hint: str = "") -> EngineFailed:
        """Return an error with the last lines of the log, which is kept unless we have killed the child."""
        self.keep_log |= not self.killed
        tail = "\n".join(last_lines(self.log)) or "  | (nothing)"
        return EngineFailed(f"{self.name} {problem}; {self.log}{ENDS_WITH}{tail}", hint)

    def end(self, within_s: float = ENDS_S) -> None:
        """Wait until the child ends by itself, and then kill the rest of its process group.

        An interrupt during the wait, or a repeated one before it, kills it at once.
        """
        until = time.monotonic() + within_s
        with undone_on_error(self.kill):
            self.socket.close()
            while not hurried() and (left_s := until - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(min(POLL_S, left_s))
                    break
        self.kill()

    def kill(self) -> None:
        """Kill the process group of the child and remove its folder. A second call does nothing."""
        with held():
            if self.killed:  # the number of the group may belong to others by then
                return
            self.killed = True
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it hangs in a driver
                self.process.wait(KILLED_S)
            self._discard()
            atexit.unregister(self._forgotten)

    def _forgotten(self, owner: int) -> None:
        # At exit, because an interrupt may come between two steps of the child's end. A fork must not kill the child.
        if os.getpid() == owner:
            self.kill()

    def _discard(self) -> None:
        self.socket.close()
        shutil.rmtree(self._temporary if self.keep_log else self.folder, ignore_errors=True)


def converse(
    child: Child, progress: ProgressCallback = None, barrier: WindowBarrier | None = None, /, **message: Any
) -> dict[str, Any]:
    """Send a message and return its answer. Meanwhile pass on progress and the barrier's window."""
    child.send(**message, **({"at": barrier.begins_s} if barrier else {}))
    while True:
        answer = child.receive(SILENCE_S, "measuring")
        match answer["event"]:
            case "progress":
                if progress:
                    progress(Progress(**known_fields(Progress, answer)))
            case "settled":
                if barrier:
                    child.send(op="open", window=barrier.settled())
            case "stalled" | "failed" as how:
                raise child.failed(f"{how}: {answer['cause']}")
            case _:
                return answer


def resolved_from(ready: Mapping[str, Any], ready_s: float, began_s: float) -> Resolved:
    """Return the settings of an engine from its `ready` message, with a part for each of its processes.

    Args:
        ready_s: seconds of the start.
        began_s: monotonic time at which the start began.
    """
    parts = ready.get("parts") or [{}]
    weights = [part.get("weight_bytes") for part in parts]
    facts = {**ready, **parts[0], "weight_bytes": None if None in weights else sum(weights), "ready_s": ready_s}
    listed = {name: tuple(facts[name]) for name in ("capture_sizes", "kv_windows") if facts.get(name) is not None}
    imported = {"import": facts["imported_s"] - began_s} if "imported_s" in facts else {}
    stages = tuple({**imported, **(facts.get("stages") or {})}.items())
    return Resolved(**known_fields(Resolved, {**facts, **listed, "stages": stages}))


def run_from(parts: Sequence[Mapping[str, Any]], steps: Sequence[Sequence[Any]] = ()) -> Run:
    """Return a Run from the rows that the processes of one run report, with times since its beginning.

    Args:
        steps: rows of the engine's steps, if another process has recorded them.
    """
    began = parts[0]["began"]

    def since(stamps: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(None if stamp is None else round(stamp - began, 6) for stamp in stamps)

    def columns(name: str, count: int) -> list[tuple[Any, ...]]:
        rows = sorted((row for part in parts for row in part[name]), key=itemgetter(1))
        return list(zip(*rows))[:count] or [()] * count

    request, sent, admitted, first, last, prompt, output, finished, cached = columns("samples", 9)
    lost, lost_sent, scheduled, ended, kind = columns("failed", 5)
    time_s, *rest = list(zip(*(steps or parts[0].get("steps", ())))) or [()] * 7
    if len(rest) > OF_EVERY_STEP and not any(rest[OF_EVERY_STEP]):  # no drafts
        rest = rest[:OF_EVERY_STEP]
    cached = () if all(count is None for count in cached) else cached
    begin, end = min(part["window"][0] for part in parts), max(part["window"][1] for part in parts)
    failure = next((part["first_failure"] for part in parts if part["first_failure"]), None)
    failed = Failures(lost, since(lost_sent), since(ended), kind, None if None in scheduled else since(scheduled))
    return Run(
        Samples(request, since(sent), since(admitted), since(first), since(last), prompt, output, finished, cached),
        Steps(since(time_s), *rest),
        (round(begin - began, 6), round(end - began, 6)),
        len(lost),
        failure and printable(failure),
        began_s=round(began, 6),
        failed=failed if lost else None,
    )
