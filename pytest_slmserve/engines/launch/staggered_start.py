"""An engine's turn on a device that it shares: it imports what it needs, and touches the device only when told to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from pytest_slmserve.engines.launch.child_process import Child
from pytest_slmserve.engines.launch.start_stages import still_waiting

LOOK_S = 0.05
START_S = 900.0  # a first start compiles; a large model is read from a slow disk


class StartTurn:
    """Begins when made, which is when the engine is launched. A file in `folder` says that the turn has come; beside it
    each process of a held engine puts one of its own when it has imported all, and waits (`worker/slm_facts.py`)."""

    def __init__(self, folder: Path, processes: int, held: bool) -> None:
        self._file, self._processes = folder / "turn", processes
        self._began, self._waited_s = time.monotonic(), 0.0
        self.extra_env: Mapping[str, str] = {"SLM_TURN": str(self._file)} if held else {}

    def give(self) -> None:
        """Give the engine its turn: what it has waited for that until now is no part of its start."""
        if since := self._waiting_since():
            self._waited_s = max(0.0, time.time() - since)
        self._file.touch()

    def await_import(self, child: Child, within_s: float) -> None:
        """Wait until all processes of the engine wait for their turn, or it has ended, which its start will report.
        Raises EngineFailed after `within_s` seconds."""
        until = time.monotonic() + within_s
        while not self._waiting_since() and child.process.poll() is None:
            if time.monotonic() > until:
                raise child.failed(f"had not imported vLLM after {within_s:.0f} s")
            still_waiting(child.log)
            time.sleep(LOOK_S)

    @property
    def start_s(self) -> float:
        """Seconds since the engine was launched, less what it waited for its turn."""
        return time.monotonic() - self._began - self._waited_s

    def _waiting_since(self) -> float | None:
        """The time of day when the last of its processes began to wait; None: not all do."""
        stamps = [path.stat().st_mtime for path in self._file.parent.glob(f"{self._file.name}.*")]
        return max(stamps) if len(stamps) >= self._processes else None


class StaggeredEngine:
    """The base of an engine that can be launched before its turn: the wait for the turn, and the start."""

    child: Child
    _turn: StartTurn

    def await_turn(self) -> None:
        """Wait until an engine that was held has imported what it needs, or has ended. Raises EngineFailed where it
        takes more than START_S seconds."""
        self._turn.await_import(self.child, START_S)

    def start(self) -> None:
        """The turn of one that was held: it takes the device, and is ready for a load when this returns."""
        self._turn.give()
        self._finish_start()

    def _finish_start(self) -> None:
        """Wait until it is ready for a load. Raises EngineFailed where it does not start."""
        raise NotImplementedError
