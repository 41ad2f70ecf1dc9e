"""A control daemon of NVIDIA's Multi-Process Service (MPS) of our own, so that kernels of several engines overlap.

Sources: NVIDIA, "Multi-Process Service", and the manual page of nvidia-cuda-mps-control. What the code rests on:

- A client that cannot reach its daemon runs without MPS and does not say so. `MpsDaemon.verify` asks the daemon.
- CUDA_VISIBLE_DEVICES of the daemon renumbers the devices for its clients, who would read an index of their own anew.
  Daemon and clients are given the same UUID, which means the same to both, with MPS and without.
- The daemon starts a server when its first client comes, and for that client's user: until then there is none, and
  clients of another user would wait until the server of the first has gone. Its folder is closed to others.
- Clients are ended before the daemon, by their owner: it waits for those that are left, then takes the GPU from them.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from pytest_slmserve.engines.launch.child_process import GUARDIAN, LOG_LINES
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.secret_words import passed_on

PROGRAM = "nvidia-cuda-mps-control"
DRIVER_FOLDER = "/usr/local/nvidia/bin"  # where containers get the driver's programs, not always on their PATH
# In one process group: the guardian, no child of the daemon's, and the daemon, in the place of the shell.
LAUNCH = '("$1" -I -S "$2" "$3" &); exec "$0" -f'
COMM = PROGRAM[:15]  # what the kernel keeps of the names of the daemon and of its servers
LONGEST = len("/slm-mps-12345678/pipe/control_privileged")
SOCKET_BYTES = 108  # sun_path, its closing zero included; a daemon with a longer one ends without saying why

START_S = 20.0
ASK_S = 10.0
END_S = 10.0
POLL_S = 0.1
PROHIBITED = 2  # NVML's compute modes


def unable(gpu: str) -> str | None:
    """The reason that MPS cannot run on the GPU of this UUID, in one sentence; None where nothing prevents it."""
    if platform.system() != "Linux":
        return f"MPS runs on Linux, and this is {platform.system()}"
    if program() is None:
        return f"{PROGRAM}, which comes with NVIDIA's driver, is not on the PATH"
    if gpu.startswith("MIG-"):
        return f"{gpu} is a part of a GPU, and MPS is to share a whole one"
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        mode = pynvml.nvmlDeviceGetComputeMode(handle)
        with suppress(pynvml.NVMLError_NotSupported):
            if pynvml.nvmlDeviceGetMigMode(handle)[0]:
                return f"GPU {gpu} is in MIG mode, where MPS would share an instance and not the GPU"
    except pynvml.NVMLError as error:
        return f"no GPU {gpu} here: NVML says {error}"
    return f"GPU {gpu} is in compute mode prohibited: nothing may run on it" if mode == PROHIBITED else None


def program() -> str | None:
    """Path of the control program."""
    return shutil.which(PROGRAM, path=os.pathsep.join([os.environ.get("PATH", os.defpath), DRIVER_FOLDER]))


class MpsDaemon:
    """Starts when made. Raises BadUsage where there is no control program, EngineFailed where it does not come up.

    gpu: its UUID. thread_percentage: of the SMs, that each client may use.

    It runs in the foreground, as our child: its end is seen, with how it ended, and no process id has to be believed
    that a file names. With `-d` it would be nobody's child. A guardian kills its process group when we are gone,
    however we ended (only the folder stays then).
    """

    def __init__(self, gpu: str, thread_percentage: int | None = None) -> None:
        if not (found := program()):
            raise BadUsage(f"{PROGRAM} is not on the PATH", "the programs of NVIDIA's driver, or time slicing")
        self.gpu, self.thread_percentage, self._program = gpu, thread_percentage, found
        self._folder = tempfile.TemporaryDirectory(prefix="slm-mps-", dir=_short_folder(), ignore_cleanup_errors=True)
        self.pipe, self.logs = Path(self._folder.name, "pipe"), Path(self._folder.name, "log")
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a client's environment needs, whatever else is in it; clients run as our user."""
        share = self.thread_percentage
        return self._shared | ({} if share is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)})

    @property
    def _shared(self) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            "CUDA_VISIBLE_DEVICES": self.gpu,
        }

    @property
    def _own_environment(self) -> dict[str, str]:
        """The daemon's: a limit that we inherit would bind all its clients. It may look for its server on the PATH."""
        inherited = {name: value for name, value in passed_on(os.environ).items() if not name.startswith("CUDA_MPS_")}
        path = os.pathsep.join([str(Path(self._program).parent), os.environ.get("PATH", os.defpath)])
        return inherited | self._shared | {"PATH": path}

    def _start(self) -> None:
        self.pipe.mkdir()
        self.logs.mkdir()
        with (self.logs / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", LAUNCH, self._program, sys.executable, str(GUARDIAN), str(os.getpid())],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._own_environment,
            )
        until = time.monotonic() + START_S
        while not self._answers():
            self.check()
            if time.monotonic() >= until:
                raise self._failed(f"does not answer {START_S:g} s after its start")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            self._ask("get_server_list")
        except EngineFailed:
            return False
        return True

    def _ask(self, command: str) -> list[int]:
        """The process ids that the daemon answers with; other words are remarks."""
        try:
            done = subprocess.run(
                [self._program],
                input=f"{command}\n",
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=ASK_S,
                env=self._own_environment,
            )
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not answer to {command} within {ASK_S:g} s") from None
        if done.returncode:
            raise self._failed(f"was not reached ({command}: {(done.stdout + done.stderr).strip()})")
        return [int(word) for word in done.stdout.split() if word.isdigit()]

    def clients(self) -> set[int]:
        """Process ids of the clients of all servers; none before the first client came. Raises EngineFailed."""
        return {client for server in self._ask("get_server_list") for client in self._ask(f"get_client_list {server}")}

    def verify(self, name: str, pids: Collection[int]) -> None:
        """Raises EngineFailed, naming the replica, unless one of `pids` (all its processes) is a client."""
        self.check()
        clients = self.clients()
        if clients.isdisjoint(pids):
            raise self._failed(
                f"does not serve {name}, which silently runs without MPS: of its processes ({_listed(pids)}) none is"
                f" among the clients ({_listed(clients)})",
                "start it as the same user, in the same container, with the daemon's CUDA_MPS_PIPE_DIRECTORY; or share"
                " the GPU by time slicing",
            )

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def check(self) -> None:
        """Raises EngineFailed, with the ends of the logs, where the daemon has ended."""
        if not self.alive():
            raise self._failed(f"ended ({_how_it_ended(self.process)})")

    def _failed(self, problem: str, hint: str = "") -> EngineFailed:
        return EngineFailed(f"the MPS control daemon {problem}; logs in {self.logs}\n{self.log_tail()}", hint)

    def log_tail(self) -> str:
        """The last lines of each log: the daemon's, its servers', and what the daemon printed."""
        tails = []
        for log in sorted(self.logs.glob("*.log")):
            lines = log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:]
            tails += [f"  {log.name}", *(f"  | {line}" for line in lines)] if lines else []
        return "\n".join(tails) or "  | (nothing)"

    def close(self) -> None:
        """Ask it to quit, then end what is left, and remove its folder. Its clients have been ended before.

        May be called twice; takes some END_S at most, whatever hangs. Another daemon is never spoken to.
        """
        try:
            if self.process and self.alive():
                with suppress(EngineFailed, subprocess.TimeoutExpired):
                    self._ask("quit")
                    self.process.wait(END_S)
        finally:
            self._end_what_is_left()
            self._folder.cleanup()

    def _end_what_is_left(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                self._signal(number)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._left():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        until = time.monotonic() + END_S
        while self._left() and time.monotonic() < until:
            time.sleep(POLL_S)

    def _left(self) -> list[int]:
        """The daemon and its servers, by name and by our folder in their environment: one may have left the group."""
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                named = (folder / "comm").read_bytes().strip() == COMM.encode()
                if named and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def _short_folder() -> str:
    """The system's folder for temporary files, unless its name is too long for that of a socket in it."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + LONGEST < SOCKET_BYTES else "/tmp"


def _how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    if process is None:
        return "it was closed"
    code = process.returncode
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _listed(pids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(pids))) or "none"
