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

from pytest_slmserve.engines.launch.child_process import GUARDIAN, last_lines
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.printable import passed_on

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
    """The reason that MPS cannot run on the GPU of this UUID, in one sentence; None if nothing prevents it."""
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
    """The path of the control program; None if there is none."""
    return shutil.which(PROGRAM, path=os.pathsep.join([os.environ.get("PATH", os.defpath), DRIVER_FOLDER]))


class MpsDaemon:
    """A control daemon, which is started when this object is made.

    It runs in the foreground, as our child: so we see when and how it ends, and need not believe a file that names its
    process id. With `-d` it would not be our child. A guardian kills its process group when this process is gone,
    however it ended; only the folder stays then.

    Attributes:
        environment: The variables that a client's environment needs. Clients run as our user.
    """

    def __init__(self, gpu: str, thread_percentage: int | None = None) -> None:
        """Start the daemon.

        Args:
            gpu: UUID of the GPU.
            thread_percentage: Percentage of the SMs that each client may use.

        Raises:
            BadUsage: There is no control program.
            EngineFailed: The daemon does not come up.
        """
        if not (found := program()):
            raise BadUsage(f"{PROGRAM} is not on the PATH", "the programs of NVIDIA's driver, or time slicing")
        self._program = found
        temporary = tempfile.gettempdir()
        short = temporary if len(os.fsencode(temporary)) + LONGEST < SOCKET_BYTES else "/tmp"
        self._folder = tempfile.TemporaryDirectory(prefix="slm-mps-", dir=short, ignore_cleanup_errors=True)
        self.pipe, self.logs = Path(self._folder.name, "pipe"), Path(self._folder.name, "log")
        shared = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        share = {} if thread_percentage is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(thread_percentage)}
        self.environment = shared | share
        # A limit that we inherit would bind all clients of the daemon. It may look for its server on the PATH.
        own = {name: value for name, value in passed_on(os.environ).items() if not name.startswith("CUDA_MPS_")}
        path = os.pathsep.join([str(Path(found).parent), os.environ.get("PATH", os.defpath)])
        self._own_environment = own | shared | {"PATH": path}
        self.process: subprocess.Popen[bytes] | None = None
        try:
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
            while True:
                with suppress(EngineFailed):
                    self._ask("get_server_list")
                    break
                self.check()
                if time.monotonic() >= until:
                    raise self._failed(f"does not answer {START_S:g} s after its start")
                time.sleep(POLL_S)
        except BaseException:
            self.close()
            raise

    def _ask(self, command: str) -> list[int]:
        """The process ids in the daemon's answer; other words are remarks."""
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
        """Raise EngineFailed, naming the replica, unless one of `pids` (all its processes) is a client."""
        self.check()
        clients = self.clients()
        if clients.isdisjoint(pids):
            ours, theirs = (", ".join(map(str, sorted(each))) or "none" for each in (pids, clients))
            raise self._failed(
                f"does not serve {name}, which silently runs without MPS: of its processes ({ours}) none is"
                f" among the clients ({theirs})",
                "start it as the same user, in the same container, with the daemon's CUDA_MPS_PIPE_DIRECTORY; or share"
                " the GPU by time slicing",
            )

    def check(self) -> None:
        """Raise EngineFailed, with the last lines of the logs, if the daemon has ended."""
        if self.process is None:
            raise self._failed("ended (it was closed)")
        if (code := self.process.poll()) is not None:
            raise self._failed(
                f"ended ({f'signal {signal.Signals(-code).name}' if code < 0 else f'exit status {code}'})"
            )

    def _failed(self, problem: str, hint: str = "") -> EngineFailed:
        """An error with the last lines of each log: the daemon's, its servers', and what the daemon printed."""
        tails = []
        for log in sorted(self.logs.glob("*.log")):
            tails += [f"  {log.name}", *lines] if (lines := last_lines(log)) else []
        shown = "\n".join(tails) or "  | (nothing)"
        return EngineFailed(f"the MPS control daemon {problem}; logs in {self.logs}\n{shown}", hint)

    def close(self) -> None:
        """Ask the daemon to quit, then end what is left, and remove its folder. Its clients have been ended before.

        May be called twice. Takes a few END_S at most, whatever hangs. Never speaks to another daemon.
        """
        try:
            if self.process and self.process.poll() is None:
                with suppress(EngineFailed, subprocess.TimeoutExpired):
                    self._ask("quit")
                    self.process.wait(END_S)
        finally:
            process, self.process = self.process, None
            try:
                for number in (signal.SIGTERM, signal.SIGKILL) if process else ():
                    for pid in self._left():
                        with suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, number)
                    until = time.monotonic() + END_S
                    while self._left() and time.monotonic() < until:
                        time.sleep(POLL_S)
            finally:
                if process:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(END_S)
                self._folder.cleanup()

    def _left(self) -> list[int]:
        """Process ids of the daemon and its servers, by their name and by our folder in their environment, because a
        server may have left the process group."""
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                named = (folder / "comm").read_bytes().strip() == COMM.encode()
                if named and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found
