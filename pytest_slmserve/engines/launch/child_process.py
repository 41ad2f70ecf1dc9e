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
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import ProgressCallback, WindowBarrier, ignore_progress
from pytest_slmserve.engines.launch.start_stages import still_waiting
from pytest_slmserve.engines.worker.slm_lines import Ended, Lines, TooLong
from pytest_slmserve.schema.errors import ENDS_WITH, EngineFailed
from pytest_slmserve.schema.records import Progress, known_fields

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
