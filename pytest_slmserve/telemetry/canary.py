"""The canary: a process that does the same piece of Python again and again beside a measurement, so that the host's own
speed is a sensor. Each reading asks for one piece, and tells of the one before.

More CPU time than at other times is a slower core (its clock, its caches, whoever shares it; on most virtual machines
also what the hypervisor takes). More time by the clock alone is waiting for a core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from pytest_slmserve.schema.sensors import CANARY, CANARY_CPU
from pytest_slmserve.telemetry.base import NO_GPU, Reading
from pytest_slmserve.telemetry.host_probe import own_cores

SCRIPT = Path(__file__).with_name("canary_process.py")
MANY_CORES = 4  # from here on an engine on a GPU leaves one idle
# Between two pieces: they take 1.2 % of a core of its own (2.3 % without a rest), 0.2 % of those that the engine needs.
OWN_REST_S, SHARED_REST_S = 0.4, 1.9


class CanarySource:
    """core: where its process runs; None: wherever the kernel puts it. rest_s: time between two pieces, at least.

    The process is started by the first reading. What goes wrong with it makes values unknown and nothing more: a
    measurement is as good without it. asked_s: when the last piece was asked for.
    """

    def __init__(self, core: int | None = None, rest_s: float = 0.0) -> None:
        self.name = f"canary (Python {sys.version_info.major}.{sys.version_info.minor})"  # whose speed it tells, too
        self.core, self.rest_s = core, rest_s
        self.asked_s = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._at_work = False
        self._lost = ""

    def read(self, now_s: float) -> Reading:
        if not self._lost:
            try:
                return Reading(self._turn(now_s))
            except OSError as error:
                self._lost = str(error)
        return Reading(dict.fromkeys((CANARY, CANARY_CPU)), missing=(f"{CANARY}: {self._lost}",))

    def _turn(self, now_s: float) -> dict[int, float | None]:
        """Values of the piece that has ended since the last turn; the next one begins."""
        process = self._process = self._process or _started(self.core)
        assert process.stdin and process.stdout
        values: dict[int, float | None] = {}
        if self._at_work:
            with suppress(BlockingIOError):  # it still works
                line = os.read(process.stdout.fileno(), 1 << 10)
                if not line:
                    raise BrokenPipeError("the canary's process has ended")
                wall, cpu = map(int, line.split())
                values, self._at_work = {CANARY: wall / 1e6, CANARY_CPU: cpu / 1e6}, False
        if not self._at_work and now_s - self.asked_s >= self.rest_s:
            os.write(process.stdin.fileno(), b"\n")
            self.asked_s, self._at_work = now_s, True
        return values

    def close(self) -> None:
        process, self._process, self._at_work = self._process, None, False
        if process:
            with process:
                process.kill()


def open_canary(device: str) -> CanarySource:
    """The canary beside an engine on this device, a GPU's UUID or "cpu"."""
    core = spare_core(device, own_cores())
    return CanarySource(core, SHARED_REST_S if core is None else OWN_REST_S)


def spare_core(device: str, allowed: Collection[int]) -> int | None:
    """The last of the allowed cores where an engine can do without it; None where it needs all: on the CPU, and on a
    host of few. Nothing keeps the engine off that core, but the kernel moves it to an idle one."""
    return None if device in NO_GPU or len(allowed) < MANY_CORES else max(allowed)


def _started(core: int | None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SCRIPT), str(os.getpid()), *(() if core is None else (str(core),))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert process.stdout
    os.set_blocking(process.stdout.fileno(), False)
    return process
